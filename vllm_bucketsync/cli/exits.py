"""How a command ends: the exit codes, and the error that carries one."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import Self

from vllm_bucketsync.errors import BucketSyncError, ConfigError, UnsupportedError

from .wording import as_options


class ExitCode(IntEnum):
    """What ``vllm-bucketsync`` ends with; 2 is argparse's own."""

    OK = 0
    """Done, and the outcome is good."""
    FAILED = 1
    """It ran, and the outcome is bad; the last lines say what."""
    USAGE = 2
    """The command line is wrong."""
    UNAVAILABLE = 3
    """This environment or the engine lacks something; the text says what to change."""
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

    @classmethod
    def of(cls, error: BucketSyncError, *, also: str = "", settings: Collection[str] = ()) -> Self:
        """Return what a command ends with where the package raised ``error``.

        Args:
            error: What was raised; its class decides the exit code.
            also: What a user should read after it.
            settings: Those that the command has an option for.
        """
        # Of these the text says all; of the others the class is what README explains.
        match error:
            case ConfigError():
                text, code = error.message, ExitCode.USAGE
            case UnsupportedError():
                text, code = error.message, ExitCode.UNAVAILABLE
            case _:
                text, code = f"{type(error).__name__}: {error.message}", ExitCode.FAILED
        text = as_options(text, settings=settings)
        return cls(f"{text} ({also})" if also else text, code=code)
