"""What a user sees while a command works: its steps, the one at work, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# Called with the bytes done, and the bytes in all where that is known.
Advance = Callable[[int, int | None], None]


class Steps:
    """Steps that run one after the other, shown until the ``with`` ends.

    On a terminal the step at work moves. Elsewhere a line says what begins, and another how
    long it took, so that a log stays readable.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Say something at once, above the step at work."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, text: str) -> Iterator[Advance]:
        """Show one step for as long as the ``with`` takes; yield what moves its bar."""
        started = time.monotonic()
        if not self._console.is_terminal:
            self._tell(f"{text} …")
        task = self._progress.add_task(text, total=None, amount="")

        def advance(done: int, total: int | None) -> None:
            amount = _gb(done) if total is None else f"{_gb(done)} of {_gb(total)}"
            self._progress.update(task, completed=done, total=total, amount=f"{amount} GB")

        yield advance
        self._progress.update(task, completed=1, total=1)
        if not self._console.is_terminal:
            self._tell(f"{text}: done in {time.monotonic() - started:.1f} s")

    def _tell(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g}"
