"""Other processes for tests: a Python text that runs, says lines, and can be killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

# An interpreter that imports torch on a loaded machine takes its time.
PATIENCE_S = 40.0


class Child:
    """A fresh interpreter that runs ``code``; killed and reaped at the end of ``with``.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, code: str, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._said = b""

    def line(self) -> str:
        """Return the next line that it says; fail after ``PATIENCE_S`` or at its end."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._said:
            left_s = max(deadline - time.monotonic(), 0)
            ready, _, _ = select.select([self._process.stdout], [], [], left_s)
            assert ready, f"the child said nothing for {PATIENCE_S} s"
            chunk = os.read(self._process.stdout.fileno(), 65536)
            assert chunk, f"the child ended: {self.end()}"
            self._said += chunk
        line, self._said = self._said.split(b"\n", 1)
        return line.decode()

    def tell(self, text: str) -> None:
        """Give it a line to read."""
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")

    def kill(self) -> None:
        """End it with SIGKILL, without waiting for the end."""
        self._process.kill()

    def stop(self) -> None:
        """Stop it, and wait until the kernel has."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit status and what it said to stderr."""
        _, errors = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, errors.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(timeout=PATIENCE_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
