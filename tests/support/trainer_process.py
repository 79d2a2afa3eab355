"""A trainer in a process of its own, which can be killed or stopped at any step.

The offer of its update comes to the test over a pipe, so that the test is the worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from support import forking

from vllm_bucketsync.clients.base import UPDATE_METHOD, UpdateAnswer, UpdateRequest
from vllm_bucketsync.sender import Sender
from vllm_bucketsync.sync import WeightSync

NUM_TENSORS = 12


def source(strike_at: int | None, number: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(NUM_TENSORS):
        if index == strike_at:
            os.kill(os.getpid(), number)
        yield f"model.layers.{index}.weight", torch.full((256,), float(index))


class PipeEngine:
    """Asks through a pipe: whoever has its other end is the engine."""

    is_in_process = False
    is_idle = True
    name = "the test"

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def num_workers(self) -> int:
        return 1

    def check_ready(self) -> None:
        pass

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        return UpdateAnswer(results=self._ask(UPDATE_METHOD, request.offer))

    def call(self, method: str) -> list[Any]:
        return self._ask(method)

    def _ask(self, method: str, *args: Any) -> list[Any]:
        self._pipe.send((method, args))
        return list(self._pipe.recv())

    def close(self) -> None:
        pass


def push_checkpoint(pipe: Connection, folder: str, directory: str) -> None:
    """Be a trainer that pushes a checkpoint, all or nothing, through the given directory."""
    with WeightSync(PipeEngine(pipe), slot_size="16KiB", dir=directory) as sync:
        sync.push(folder, version="new", atomic=True, verify="digest")


def strike_around(step: str, number: int) -> None:
    """Strike where the sender is about to take ``step``: "open", "finish" or "commit"."""
    name = {"open": "_offer", "finish": "_finish", "commit": "commit"}[step]
    original = getattr(Sender, name)

    def striking(self: Sender) -> None:
        os.kill(os.getpid(), number)
        original(self)

    setattr(Sender, name, striking)


def _train(
    pipe: Connection, strike: int | str | None, number: int, settings: dict[str, Any]
) -> None:
    if isinstance(strike, str):
        strike_around(strike, number)
    with WeightSync(PipeEngine(pipe), slot_size=1024, **settings) as sync:
        try:
            sync.push(source(strike if isinstance(strike, int) else None, number), version="new")
        except Exception as error:  # noqa: BLE001 - whatever it is, the test gets to see it
            pipe.send(("error", (type(error).__name__, str(error))))
        else:
            pipe.send(("pushed", ()))


class TrainerProcess:
    """Starts the trainer; ``receive`` gives what it says. A context manager."""

    def __init__(
        self, strike: int | str | None, number: int = signal.SIGKILL, **settings: Any
    ) -> None:
        """Start it.

        Args:
            strike: At which tensor, or at which step of the sender.
            number: The signal that it sends itself there.
            settings: Of its ``WeightSync``.
        """
        context = forking.context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_train, args=(theirs, strike, int(number), settings), daemon=True
        )
        self.process.start()
        theirs.close()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.join(10)
        self.process.close()

    def receive(self) -> Any:
        if not self._pipe.poll(60):
            raise TimeoutError("the trainer says nothing")
        return self._pipe.recv()

    def answer(self, results: list[Any]) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(results)

    def finish(self) -> None:
        """Wait until it has closed everything."""
        self.process.join(30)
        if self.process.exitcode != 0:
            raise RuntimeError(f"the trainer ended with {self.process.exitcode}")

    def resume(self) -> None:
        if self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGCONT)
