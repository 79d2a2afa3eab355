"""How a command ends: the exit codes, and the error that carries one."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What ``vllm-bucketsync`` ends with; 2 is argparse's own."""

    OK = 0
    """Done, and the outcome is good."""
    FAILED = 1
    """It ran, and the outcome is bad; the last lines say what."""
    USAGE = 2
    """The command line is wrong."""
    UNAVAILABLE = 3
    """This environment lacks something; the text says what to install or to change."""
    INTERRUPTED = 130
    """Ctrl-C; everything that was started has been stopped."""


class CommandError(Exception):
    """A command cannot go on; its text is for the user.

    Attributes:
        code: What to exit with.
    """

    def __init__(self, message: str, *, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code
