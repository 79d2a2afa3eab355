"""``bench engine``: an engine takes over weights in every way there is, one after the other."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from vllm_bucketsync.errors import BucketSyncError

from . import bench_options, screen
from .exits import CommandError, ExitCode
from .preflight import require_vllm

if TYPE_CHECKING:
    from vllm_bucketsync.bench.engine.result import EngineResult
    from vllm_bucketsync.bench.plot import Picture

TEXT = (
    "bring weights into a vLLM engine of random weights: ours, vLLM's own, and plain copies, each "
    "compared bit by bit before its time counts"
)
_MODELS = ("tiny", "0.6b", "8b", "moe31b")
_HEADINGS = ("", "median ms", "best ms", "first ms", "GB/s", "/ copy", "/ vLLM's ipc", "runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("--model", choices=_MODELS, default="tiny", help="what is updated (%(default)s)")
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of both ends")
    option("--methods", metavar="A,B", help="which rows, in which order (all that are possible)")
    option("--repeat", type=int, default=7, help="timed runs of each row (%(default)s)")
    option("--warm-up", type=int, default=2, help="runs before them (%(default)s)")
    option("--budget-s", type=float, help="seconds after which nothing more is begun")
    option("--cuda-graphs", action="store_true", help="let the engine compile and capture")
    bench_options.add_slots(parser)
    bench_options.add_pictures(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Measure, and show what came of it; a file for JSON is written after every row.

    Returns:
        ``FAILED`` where a row failed.

    Raises:
        CommandError: An option is out of range, vLLM is missing or does not start, or
            a file cannot be written.
    """
    bench_options.check_target(args.json)
    is_traced = bench_options.check_pictures(args)
    require_vllm()
    console = screen.stderr(args)
    is_stdout_taken = args.json == bench_options.STDOUT
    begin_s = time.monotonic()

    def tell(text: str) -> None:
        console.print(
            f"[{time.monotonic() - begin_s:6.1f} s] {text}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def save(result: EngineResult) -> None:
        if args.json is not None and not is_stdout_taken:
            _write(result, args.json)

    from vllm_bucketsync.bench.engine.run import measure

    try:
        result = measure(_plan(args, is_traced=is_traced), tell=tell, save=save, begin_s=begin_s)
    except BucketSyncError as error:
        raise CommandError.of(error, settings=bench_options.SETTINGS) from error
    found = result.as_dict()
    (console if is_stdout_taken else screen.stdout(args)).print(table(found), setup_table(found))
    if args.json is not None:
        _write(result, args.json, args)
    if is_traced:
        bench_options.write_pictures(args, _picture(result))
    has_failed = any(row["outcome"] == "failed" for row in found["rows"])
    return ExitCode.FAILED if has_failed else ExitCode.OK


def _plan(args: argparse.Namespace, *, is_traced: bool) -> Any:
    import torch

    from vllm_bucketsync.bench.engine.result import EnginePlan
    from vllm_bucketsync.bench.engine.run import LEFT_OUT_ON_GPU, METHODS

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    left_out = LEFT_OUT_ON_GPU if device == "cuda" else frozenset()
    named = args.methods.split(",") if args.methods else [m for m in METHODS if m not in left_out]
    return EnginePlan(
        model=args.model,
        device=device,
        methods=tuple(name.strip() for name in named),
        repeat=args.repeat,
        warm_up=args.warm_up,
        budget_s=args.budget_s,
        enforce_eager=not args.cuda_graphs,
        slot_size=args.slot_size,
        num_slots=args.num_slots,
        is_traced=is_traced,
    )


def _write(result: EngineResult, target: str, args: argparse.Namespace | None = None) -> None:
    bench_options.write(json.dumps(result.as_dict(), indent=2) + "\n", target, args)


def _picture(result: EngineResult) -> Picture:
    from vllm_bucketsync.bench.engine.result import FLOOR
    from vllm_bucketsync.bench.plot import Picture, Speeds

    found, plan = result.as_dict(), result.plan
    return Picture(
        title=f"{plan.model}, {bench_options.bytes_text(result.num_bytes)} in "
        f"{result.num_tensors} tensors, into a vLLM engine on {plan.device}",
        caption=bench_options.measured_on(found),
        traces={row.name: row.trace for row in result.rows if row.trace is not None},
        speeds=[
            Speeds(
                name=row.name,
                gb_per_s=[result.num_bytes / seconds / 1e9 for seconds in row.seconds],
                is_floor=row.name == FLOOR,
            )
            for row in result.rows
            if row.median_s is not None
        ],
    )


def table(found: dict[str, Any]) -> Table:
    """Return a table of the rows.

    Args:
        found: ``EngineResult.as_dict()``.
    """
    made = Table(
        title=f"{found['plan']['model']}: {found['num_bytes']:,} bytes in "
        f"{found['num_tensors']} tensors, on {found['plan']['device']}",
    )
    for heading in _HEADINGS:
        made.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    for row in found["rows"]:
        made.add_row(row["name"], *_numbers(row))
    return made


def setup_table(found: dict[str, Any]) -> Table:
    """Return a table of what is in the times, why some are missing, and what was compared."""
    made = Table(title="What was measured", show_header=False)
    for row in found["rows"]:
        made.add_row(row["name"], escape(_explained(row)))
    compared = f"{found['compared_bytes']:,} bytes of the engine after every run"
    made.add_row("compared", compared + (", and outputs" if found["compares_outputs"] else ""))
    if found["unlike"]:
        made.add_row("not compared", escape(", ".join(found["unlike"])))
    machine, versions = found["machine"], found["versions"]
    made.add_row("machine", machine.get("gpu", {}).get("name") or machine["processor"])
    made.add_row("versions", ", ".join(f"{name} {text}" for name, text in versions.items()))
    made.add_row("seconds", f"{found['seconds']:.0f}, with the engine's start")
    return made


def _numbers(row: dict[str, Any]) -> list[str]:
    if "median_s" not in row:
        return [""] * (len(_HEADINGS) - 1)
    ratios = [row["times_floor"], row["times_vllm_ipc"]]
    return [
        f"{1000 * row['median_s']:.2f}",
        f"{1000 * row['best_s']:.2f}",
        f"{1000 * row['warm_up_s'][0]:.1f}" if row["warm_up_s"] else "",
        f"{row['gb_per_s']:.2f}",
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        str(len(row["seconds"])),
    ]


def _explained(row: dict[str, Any]) -> str:
    if row["outcome"] != "measured":
        return f"{row['outcome']}: {row['text']}"
    return f"{row['what']} ({row['text']})" if row["text"] else str(row["what"])
