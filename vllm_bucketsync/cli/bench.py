"""Measure what this machine does, without vLLM and without a model.

``transfer`` moves tensors of the shapes of a model between two processes, and compares
that with two plain memcpys of the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from vllm_bucketsync.config import parse_size
from vllm_bucketsync.errors import BucketSyncError, ConfigError

from .exits import CommandError, ExitCode

if TYPE_CHECKING:
    from vllm_bucketsync.bench.result import Measured

DEFAULT_SIZE = "1GiB"
_DTYPES = ("bfloat16", "float16", "float32")
_STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks, each with its options."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    text = "move a model between two processes, beside two plain memcpys of the same bytes"
    transfer = benchmarks.add_parser("transfer", help=text, description=text)
    option = transfer.add_argument
    option("--size", type=_size, default=DEFAULT_SIZE, help="bytes to move, at least (%(default)s)")
    option("--dtype", choices=_DTYPES, default=_DTYPES[0], help="of every tensor (%(default)s)")
    option("--slot-size", type=_size, help="bytes of one slot (as WeightSync chooses)")
    option("--num-slots", type=int, help="slots (as WeightSync chooses)")
    option("--repeat", type=int, default=5, help="warm updates into each target (%(default)s)")
    option("--threads", type=int, help="torch's, at each end (half of the processors)")
    option("--json", metavar="FILE", help="write everything as JSON to FILE, or - for stdout")


def run(args: argparse.Namespace) -> ExitCode:
    """Measure, and show what came of it.

    Raises:
        CommandError: An option is out of range, this machine is too small, an update
            failed, or ``--json`` names a file that cannot be written.
    """
    from vllm_bucketsync.bench.result import Plan, usable_cpus
    from vllm_bucketsync.bench.transfer import measure

    _check_target(args.json)
    console = Console(stderr=True)
    threads = max(1, usable_cpus() // 2) if args.threads is None else args.threads
    plan = Plan(
        num_bytes=args.size,
        num_threads=threads,
        dtype=args.dtype,
        repeat=args.repeat,
        slot_size=args.slot_size,
        num_slots=args.num_slots,
    )
    try:
        measured = measure(plan, tell=lambda doing: console.print(f"{doing} …", style="dim"))
    except BucketSyncError as error:
        raise CommandError.of(error) from error
    is_stdout_taken = args.json == _STDOUT
    (console if is_stdout_taken else Console()).print(
        _speed_table(measured), _setup_table(measured)
    )
    if args.json is not None:
        _write(json.dumps(measured.as_dict(), indent=2) + "\n", args.json)
    return ExitCode.OK


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _check_target(target: str | None) -> None:
    """Refuse a file that cannot be made, before minutes are spent on what goes into it."""
    if target not in {None, _STDOUT} and not Path(target or "").parent.is_dir():
        raise CommandError(
            f"{target!r} cannot be written: its folder does not exist", code=ExitCode.USAGE
        )


def _write(text: str, target: str) -> None:
    if target == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise CommandError(f"{target!r} cannot be written: {error.strerror}") from error


def _speed_table(measured: Measured) -> Table:
    found = measured.as_dict()
    table = Table(
        title=f"{found['num_bytes']:,} bytes in {found['num_tensors']} tensors of {found['dtype']}",
        caption=found["compared"],
        caption_justify="left",
    )
    for heading in ("", "median s", "best s", "median GB/s", "median / memcpys", "best / memcpys"):
        table.add_column(heading, justify="right" if heading else "left")
    first, memcpys = found["first"], found["memcpys"]
    table.add_row("first update", f"{first['seconds']:.3f}", "", f"{first['gb_per_s']:.2f}", "", "")
    for target, warm in found["warm"].items():
        table.add_row(
            f"warm updates ({target})",
            f"{warm['median_s']:.3f}",
            f"{warm['best_s']:.3f}",
            f"{warm['median_gb_per_s']:.2f}",
            f"{warm['ratio_of_medians']:.2f}",
            f"{warm['ratio_of_bests']:.2f}",
        )
    table.add_row(
        "two memcpys", f"{memcpys['median_s']:.3f}", f"{memcpys['best_s']:.3f}", "", "1", "1"
    )
    return table


def _setup_table(measured: Measured) -> Table:
    found = measured.as_dict()
    peaks, machine, versions = found["peaks"], found["machine"], found["versions"]
    table = Table(title="How it was measured", show_header=False)
    table.add_row("warm updates", f"{found['repeat']} into each target")
    table.add_row("slots", f"{found['num_slots']} of {found['slot_size_bytes']:,} bytes")
    table.add_row("buckets", str(found["num_buckets"]))
    table.add_row("transport", found["transport"])
    table.add_row("threads of torch", f"{found['num_threads']} at each end")
    table.add_row(
        "processors",
        f"{machine['usable_cpus']} of {machine['cpu_count']}, {machine['processor'] or 'unnamed'}",
    )
    table.add_row("load average", f"{machine['load_average']:.1f}")
    table.add_row("versions", ", ".join(f"{name} {text}" for name, text in versions.items()))
    table.add_row("slots, bytes", f"{peaks['slots_bytes']:,}")
    for end in ("trainer", "worker"):
        rise = peaks[f"{end}_beyond_slots_bytes"]
        table.add_row(
            f"{end}'s peak beyond tensors and slots",
            "the kernel does not say" if rise is None else f"{rise:,} bytes",
        )
    table.add_row("largest tensor", f"{peaks['largest_tensor_bytes']:,} bytes")
    return table
