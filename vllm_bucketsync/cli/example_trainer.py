"""The trainer of the example: a process of its own, whose engine is one more.

    python -m vllm_bucketsync.cli.example_trainer CHECKPOINT UPDATES SEED [--adapter]

It prints a line of JSON for each update, with the fields of ``examples.rl.Update``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from .exits import CommandError
from .servers import STOP_TIMEOUT_S, environment, signal_group, with_logs

_POLL_S = 0.1
# For the engine to start, or for one update: seconds on two cores.
UPDATE_TIMEOUT_S = 600.0


def main(checkpoint: str, num_updates: str, seed: str, *options: str) -> None:
    """Train, and tell of every update."""
    from transformers.utils.logging import disable_progress_bar

    from vllm_bucketsync.examples import rl

    disable_progress_bar()
    rl.train(
        checkpoint,
        use_adapter="--adapter" in options,
        num_updates=int(num_updates),
        seed=int(seed),
        tell=lambda update: print(json.dumps(asdict(update)), flush=True),
    )


def lines_of(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Run the trainer, and yield what it prints; none of its processes outlives this.

    Args:
        arguments: Those of ``main``.
        log: Where everything else goes that it and its engine print.

    Raises:
        CommandError: It failed; the text has the end of its log.
    """
    with log.open("wb") as errors:
        trainer = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment_of(os.environ),
            # A group of its own: what ends the trainer reaches its engine, too.
            start_new_session=True,
        )
    with trainer:
        try:
            # The engine's process writes to the same pipe.
            yield from (line for line in _read(trainer, log) if line.startswith("{"))
            trainer.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CommandError(with_logs("the trainer is done but does not end", log)) from None
        finally:
            _end(trainer)
    if trainer.returncode:
        raise CommandError(with_logs(f"the trainer ended with code {trainer.returncode}", log))


def _read(trainer: subprocess.Popen[bytes], log: Path) -> Iterator[str]:
    """Yield lines until the trainer has ended, or its pipe has.

    Raises:
        CommandError: It said nothing for ``UPDATE_TIMEOUT_S``.
    """
    pipe = trainer.stdout
    if pipe is None:
        return
    said, deadline = b"", time.monotonic() + UPDATE_TIMEOUT_S
    while True:
        if not select.select([pipe], [], [], _POLL_S)[0]:
            if trainer.poll() is not None:
                return
            if time.monotonic() > deadline:
                text = f"the trainer said nothing for {UPDATE_TIMEOUT_S:.0f} s"
                raise CommandError(with_logs(text, log))
            continue
        chunk = os.read(pipe.fileno(), 65536)
        if not chunk:
            return
        *lines, said = (said + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        deadline = time.monotonic() + UPDATE_TIMEOUT_S


def _end(trainer: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    try:
        is_there = signal_group(trainer.pid, signal.SIGTERM)
        while is_there and time.monotonic() < deadline:
            trainer.poll()  # reaps it: it would otherwise count as alive
            time.sleep(_POLL_S)
            is_there = signal_group(trainer.pid, 0)
    finally:
        signal_group(trainer.pid, signal.SIGKILL)


def _environment_of(given: Mapping[str, str]) -> dict[str, str]:
    # Two processes share the processors: each would else start a thread for every one.
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    ours = {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "WARNING"}
    return {**ours, **environment(given)}


if __name__ == "__main__":
    main(*sys.argv[1:])
