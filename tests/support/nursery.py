"""A process that has imported everything and forks others: in milliseconds, not in seconds.

It holds no socket, memory or lock of an update, so nothing of one survives in its children
when their kin are killed. Each child is a function of this test suite, called with a pipe.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch

# Imported before the first fork: what an update would import when it begins.
_PRELOADED = ("vllm_bucketsync.sync", "vllm_bucketsync.serve", "vllm_bucketsync.staging")
PATIENCE_S = 20.0


class Child:
    """A forked process, and the pipe to it.

    Attributes:
        pid: Its process id.
        pipe: What its function was called with is the other end.
    """

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.pipe = pipe

    def receive(self) -> Any:
        """Return what it says next.

        Raises:
            EOFError: It is dead.
        """
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError(f"process {self.pid} says nothing")
        try:
            return self.pipe.recv()
        except ConnectionResetError as error:
            raise EOFError from error

    def kill(self) -> None:
        """End it with SIGKILL, without waiting for the end. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """End it, and wait until it is gone. Idempotent."""
        self.pipe.close()
        deadline_s = time.monotonic() + PATIENCE_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline_s:
                os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.001)


class Nursery:
    """Forks children until the end of its ``with``; whoever has one ends it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        self._process.close()
        self._folder.cleanup()

    def fork(self, act: Callable[..., None], *args: Any) -> Child:
        """Start ``act(pipe, *args)`` in a new process: a function of a module."""
        path = str(Path(self._folder.name) / secrets.token_hex(4))
        with Listener(path, family="AF_UNIX") as listener:
            self._pipe.send((path, act, args))
            # Nobody connects where it has died.
            if not wait([listener._listener._socket], PATIENCE_S):  # type: ignore[attr-defined]
                raise TimeoutError("the nursery has forked nobody")
            pipe = listener.accept()
        return Child(pipe.recv(), pipe)


def _serve(pipe: Connection) -> None:
    # Test modules are found from here, whichever way pytest was started.
    sys.path.append(str(Path(__file__).parents[2]))
    for name in _PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    # Nobody waits for the children: the kernel takes them away.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            path, act, args = pipe.recv()
        except EOFError:
            return
        if os.fork() == 0:
            pipe.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _live(path, act, args)


def _live(path: str, act: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Be a child, to its end; never returns to the loop that forked it."""
    code = 1
    try:
        with Client(path, family="AF_UNIX") as pipe:
            pipe.send(os.getpid())
            act(pipe, *args)
        code = 0
    except (EOFError, ConnectionError):
        # Whoever asked is gone.
        pass
    except BaseException:  # noqa: BLE001 - it ends here, and pytest shows what it said
        traceback.print_exc()
    finally:
        os._exit(code)
