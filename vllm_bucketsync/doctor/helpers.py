"""A process that tries something for a check, so that a hang or a crash stays there."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Self

_STOP_TIMEOUT_S = 5.0


class HelperError(Exception):
    """The process failed, ended, or did not answer in time; the text says which."""


class HelperTimeoutError(HelperError):
    """It did not answer before the deadline, and was killed."""


class Helper:
    """One process that runs ``pair``; reaped at the end of its ``with``.

    Attributes:
        pid: Its process id.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_bucketsync.doctor.pair"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            # Ctrl-C is for the one who asks, and ends this one, too.
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._said = b""

    def ask(self, act: str, *, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Have something done, and return what came of it.

        Args:
            act: A method of ``pair.Side``.
            timeout_s: Until the answer, in seconds. The process is killed after that.
            request: The method's arguments.

        Raises:
            HelperError: It failed, ended, or did not answer in time.
        """
        if self._process.poll() is not None:
            raise self._ended()
        stdin = self._process.stdin
        line = json.dumps({"act": act, **request}).encode() + b"\n"
        try:
            if stdin is not None:
                stdin.write(line)
            answer: dict[str, Any] = json.loads(self._line(act, timeout_s))
        except BrokenPipeError:
            raise self._ended() from None
        if "error" in answer:
            raise HelperError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process: it is asked to, and killed if it does not. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._errors.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the process; at once, where something has gone wrong."""
        if exc[0] is not None:
            self._kill()
        self.close()

    def _line(self, act: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        stdout = self._process.stdout
        while b"\n" not in self._said:
            left_s = max(deadline - time.monotonic(), 0.0)
            if stdout is None or not select.select([stdout], [], [], left_s)[0]:
                self._kill()
                raise HelperTimeoutError(
                    f"no answer to {act!r} in the {timeout_s:.1f} s that were left for it"
                )
            chunk = os.read(stdout.fileno(), 65536)
            if not chunk:
                raise self._ended()
            self._said += chunk
        line, self._said = self._said.split(b"\n", 1)
        return line

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=_STOP_TIMEOUT_S)

    def _ended(self) -> HelperError:
        """Return what to say of a process that is gone."""
        code = self._process.wait(timeout=_STOP_TIMEOUT_S)
        how = f"ended with code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return HelperError(f"the process that tried it {how}" + (f": {said[-1]}" if said else ""))
