"""``bench transfer``: between two processes, without vLLM and without a model."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vllm_bucketsync.config import TRANSPORTS
from vllm_bucketsync.errors import BucketSyncError

from . import bench_options, screen
from .exits import CommandError, ExitCode

if TYPE_CHECKING:
    from vllm_bucketsync.bench.plot import Picture
    from vllm_bucketsync.bench.result import Measured

TEXT = "move a model between two processes, beside plain copies of the same bytes"
DEFAULT_SIZE = "1GiB"
_FLOOR_TITLES = {
    "memcpys": "two memcpys",
    "device_copy": "one device copy",
    "host_copies": "pinned host copies, down and up",
}
_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    size = bench_options.size
    option("--size", type=size, default=DEFAULT_SIZE, help="bytes to move, at least (%(default)s)")
    option("--dtype", choices=_DTYPES, default=_DTYPES[0], help="of every tensor (%(default)s)")
    option("--device", choices=("cpu", "cuda"), default="cpu", help="of both ends (%(default)s)")
    option("--transport", choices=TRANSPORTS, default="auto", help="what carries it (%(default)s)")
    option("--repeat", type=int, default=5, help="warm updates into each target (%(default)s)")
    option("--threads", type=int, help="torch's, at each end (half of the processors)")
    bench_options.add_slots(parser)
    bench_options.add_pictures(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Measure, and show what came of it.

    Raises:
        CommandError: An option is out of range, this machine is too small or has no such
            device, an update failed, or a file cannot be written.
    """
    bench_options.check_target(args.json)
    is_traced = bench_options.check_pictures(args)
    from vllm_bucketsync.bench.machine import usable_cpus
    from vllm_bucketsync.bench.result import Plan
    from vllm_bucketsync.bench.transfer import measure

    console = screen.stderr(args)
    threads = max(1, usable_cpus() // 2) if args.threads is None else args.threads
    plan = Plan(
        num_bytes=args.size,
        num_threads=threads,
        dtype=args.dtype,
        device=args.device,
        transport=args.transport,
        repeat=args.repeat,
        slot_size=args.slot_size,
        num_slots=args.num_slots,
        is_traced=is_traced,
    )
    try:
        measured = measure(plan, tell=lambda doing: console.print(f"{doing} …", style="dim"))
    except BucketSyncError as error:
        settings = (*bench_options.SETTINGS, "transport")
        raise CommandError.of(error, settings=settings) from error
    is_stdout_taken = args.json == bench_options.STDOUT
    (console if is_stdout_taken else screen.stdout(args)).print(
        _speed_table(measured), _setup_table(measured)
    )
    if args.json is not None:
        bench_options.write(json.dumps(measured.as_dict(), indent=2) + "\n", args.json, args)
    if is_traced:
        bench_options.write_pictures(args, _picture(measured))
    return ExitCode.OK


def _picture(measured: Measured) -> Picture:
    from vllm_bucketsync.bench.plot import Picture, Speeds

    found = measured.as_dict()
    speeds = {f"warm updates ({target})": measured.seconds(target) for target in measured.warm}
    floors = {_FLOOR_TITLES[name]: seconds for name, seconds in measured.floors.items()}
    floor = _FLOOR_TITLES[measured.floor]
    return Picture(
        title=f"{bench_options.bytes_text(found['num_bytes'])} between two processes, "
        f"{found['transport']}, {found['num_buckets']} buckets, {found['num_slots']} slots of "
        f"{bench_options.bytes_text(found['slot_size_bytes'])}",
        caption=bench_options.measured_on(found),
        traces={f"warm update ({target})": trace for target, trace in measured.traces.items()},
        speeds=[
            Speeds(
                name=name,
                gb_per_s=[measured.gb_per_s(one) for one in seconds],
                is_floor=name == floor,
            )
            for name, seconds in (speeds | floors).items()
        ],
    )


def _speed_table(measured: Measured) -> Table:
    found = measured.as_dict()
    table = Table(
        title=f"{found['num_bytes']:,} bytes in {found['num_tensors']} tensors of {found['dtype']}",
        caption=found["compared"],
        caption_justify="left",
    )
    floor = found["compared_with"]
    ratios = f"median / {floor}", f"best / {floor}"
    for heading in ("", "median s", "best s", "median GB/s", *ratios):
        table.add_column(heading, justify="right" if heading else "left")
    first = found["first"]
    table.add_row("first update", f"{first['seconds']:.4f}", "", f"{first['gb_per_s']:.2f}", "", "")
    for target, warm in found["warm"].items():
        table.add_row(
            f"warm updates ({target})",
            f"{warm['median_s']:.4f}",
            f"{warm['best_s']:.4f}",
            f"{warm['median_gb_per_s']:.2f}",
            f"{warm['ratio_of_medians']:.2f}",
            f"{warm['ratio_of_bests']:.2f}",
        )
    for name in measured.floors:
        table.add_row(*_floor_row(found, name))
    return table


def _floor_row(found: dict[str, Any], name: str) -> list[str]:
    copies = found[name]
    is_floor = name == found["compared_with"]
    return [
        _FLOOR_TITLES[name],
        f"{copies['median_s']:.4f}",
        f"{copies['best_s']:.4f}",
        f"{copies['median_gb_per_s']:.2f}",
        *(["1", "1"] if is_floor else ["", ""]),
    ]


def _setup_table(measured: Measured) -> Table:
    found = measured.as_dict()
    peaks, machine, versions = found["peaks"], found["machine"], found["versions"]
    table = Table(title="How it was measured", show_header=False)
    table.add_row("warm updates", f"{found['repeat']} into each target")
    table.add_row("slots", f"{found['num_slots']} of {found['slot_size_bytes']:,} bytes")
    table.add_row("buckets", str(found["num_buckets"]))
    table.add_row("transport", f"{found['transport']}, on {found['device']}")
    if gpu := machine.get("gpu"):
        table.add_row("GPU", gpu["name"])
    table.add_row("threads of torch", f"{found['num_threads']} at each end")
    table.add_row(
        "processors",
        f"{machine['usable_cpus']} of {machine['cpu_count']}, {machine['processor'] or 'unnamed'}",
    )
    table.add_row("load average", f"{machine['load_average']:.1f}")
    table.add_row("versions", ", ".join(f"{name} {text}" for name, text in versions.items()))
    table.add_row("slots on the host, bytes", f"{peaks['slots_bytes']:,}")
    for end in ("trainer", "worker"):
        rise = peaks[f"{end}_beyond_slots_bytes"]
        table.add_row(
            f"{end}'s peak beyond tensors and slots",
            "the kernel does not say" if rise is None else f"{rise:,} bytes",
        )
    table.add_row("largest tensor", f"{peaks['largest_tensor_bytes']:,} bytes")
    return table
