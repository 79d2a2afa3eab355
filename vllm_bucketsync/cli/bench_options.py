"""What the benchmarks' options have in common: sizes, and where JSON and pictures go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_bucketsync.config import parse_size
from vllm_bucketsync.errors import BucketSyncError, ConfigError

from . import screen
from .exits import CommandError, ExitCode

if TYPE_CHECKING:
    from vllm_bucketsync.bench.plot import Picture

STDOUT = "-"
# Options of both benchmarks that are settings of WeightSync.
SETTINGS = ("slot_size", "num_slots")


def add_slots(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``WeightSync``'s slots, and that of JSON."""
    parser.add_argument("--slot-size", type=size, help="bytes of one slot (as WeightSync chooses)")
    parser.add_argument("--num-slots", type=int, help="slots (as WeightSync chooses)")
    text = "write everything as JSON to FILE, or - for stdout"
    parser.add_argument("--json", metavar="FILE", help=text)


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """Add the options of what shows where the time goes."""
    option = parser.add_argument
    text = "trace more updates, and write one like the median as Chrome trace JSON, for Perfetto"
    option("--trace", metavar="FILE", type=Path, help=text)
    text = "draw where the time goes, and GB/s beside a plain copy's: FILE.svg or FILE.png"
    option("--plot", metavar="FILE", type=Path, help=text)


def check_pictures(args: argparse.Namespace) -> bool:
    """Refuse what cannot be written or drawn, before minutes are spent on it.

    Returns:
        Whether anything is to be traced.

    Raises:
        CommandError: A file cannot be made, or matplotlib is missing.
    """
    if args.trace is not None:
        check_target(str(args.trace))
    if args.plot is not None:
        check_plot(args.plot)
    return args.trace is not None or args.plot is not None


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn.

    Raises:
        CommandError: Its file cannot be made, or matplotlib is missing.
    """
    from vllm_bucketsync.bench import plot

    check_target(str(path))
    try:
        plot.check(path)
    except BucketSyncError as error:
        raise CommandError.of(error) from error


def write_pictures(args: argparse.Namespace, picture: Picture) -> None:
    """Write what was asked for.

    Raises:
        CommandError: A file cannot be written.
    """
    from vllm_bucketsync.bench import plot
    from vllm_bucketsync.bench.traces import merged

    if args.trace is not None:
        write(json.dumps(merged(picture.traces)), str(args.trace), args)
    if args.plot is not None:
        try:
            plot.draw(picture, args.plot)
        except OSError as error:
            raise _unwritten(str(args.plot), error) from error
        say_written(str(args.plot), args)


def measured_on(found: Mapping[str, Any]) -> str:
    """Return which machine and versions numbers are of, in one line.

    Args:
        found: ``as_dict()`` of a result.
    """
    machine, versions = found["machine"], found["versions"]
    device = machine.get("gpu", {}).get("name") or machine["processor"] or "unnamed processor"
    return ", ".join([device, *(f"{name} {text}" for name, text in versions.items())])


def bytes_text(num_bytes: int) -> str:
    """Return a number of bytes for a title: three digits, in units of ten."""
    unit, name = (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")
    return f"{num_bytes / unit:.3g} {name}"


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


def say_written(target: str, args: argparse.Namespace) -> None:
    """Say where a result is."""
    screen.stderr(args).print(f"wrote {target}", markup=False, highlight=False, soft_wrap=True)


def write(text: str, target: str, args: argparse.Namespace | None = None) -> None:
    """Write the whole of a file, or to stdout.

    Args:
        text: The whole of it.
        target: The file, or ``STDOUT``.
        args: The command's, where a user is to be told.

    Raises:
        CommandError: It cannot be written.
    """
    if target == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise _unwritten(target, error) from error
    if args is not None:
        say_written(target, args)


def _unwritten(target: str, error: OSError) -> CommandError:
    return CommandError(f"{target!r} cannot be written: {error.strerror}")
