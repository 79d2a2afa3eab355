"""What the benchmarks' options have in common: sizes, and where JSON goes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_bucketsync.config import parse_size
from vllm_bucketsync.errors import ConfigError

from .exits import CommandError, ExitCode

STDOUT = "-"
# Options of both benchmarks that are settings of WeightSync.
SETTINGS = ("slot_size", "num_slots")


def add_slots(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``WeightSync``'s slots, and that of JSON."""
    parser.add_argument("--slot-size", type=size, help="bytes of one slot (as WeightSync chooses)")
    parser.add_argument("--num-slots", type=int, help="slots (as WeightSync chooses)")
    text = "write everything as JSON to FILE, or - for stdout"
    parser.add_argument("--json", metavar="FILE", help=text)


def size(text: str) -> int:
    """Return a size in bytes, as an option's type."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_target(target: str | None) -> None:
    """Refuse a file that cannot be made, before minutes are spent on what goes into it."""
    if target not in {None, STDOUT} and not Path(target or "").parent.is_dir():
        raise CommandError(
            f"{target!r} cannot be written: its folder does not exist", code=ExitCode.USAGE
        )


def write(text: str, target: str) -> None:
    """Write the whole of a file, or to stdout.

    Raises:
        CommandError: It cannot be written.
    """
    if target == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise CommandError(f"{target!r} cannot be written: {error.strerror}") from error
