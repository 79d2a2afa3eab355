"""Run a worked example: "rl" trains a policy with samples of a real vLLM engine.

Each update pushes the policy into the engine, samples from it, and takes one step of
REINFORCE; the reward rises within a minute or two on a CPU. The model is tiny and random, and
nothing is downloaded. --code prints the program instead, to be copied.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import bench_options, example_plot, screen
from .demo_model import build_checkpoint
from .example_trainer import lines_of
from .exits import CommandError, ExitCode
from .preflight import require_package, require_vllm
from .progress import Steps

if TYPE_CHECKING:
    from rich.table import Table

NAMES = ("rl",)
EXAMPLES = """\
examples:
  vllm-bucketsync example rl
  vllm-bucketsync example rl --adapter --plot rl.svg
  vllm-bucketsync example rl --code
"""
_MIN_UPDATES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which example, and how to run it."""
    option = parser.add_argument
    option("example", metavar="EXAMPLE", choices=NAMES, help="which one: rl")
    option("--adapter", action="store_true", help="train and push a LoRA adapter alone (PEFT)")
    option("--updates", type=int, default=20, metavar="N", help="how many (%(default)s)")
    option("--seed", type=int, default=0, help="of everything that is random (%(default)s)")
    text = "draw reward and push time of every update: FILE.svg or FILE.png"
    option("--plot", metavar="FILE", type=Path, help=text)
    option("--code", action="store_true", help="print the program, and run nothing")


def run(args: argparse.Namespace) -> ExitCode:
    """Run the example, and show what came of it.

    Returns:
        ``FAILED`` where the reward did not rise.

    Raises:
        CommandError: Something is missing here, or the trainer failed.
    """
    if args.code:
        print(files("vllm_bucketsync.examples").joinpath(f"{args.example}.py").read_text(), end="")
        return ExitCode.OK
    _check(args)
    updates = _train(args)
    before, after = _rewards(updates)
    console = screen.stdout(args)
    console.print(_table(updates))
    if args.plot is not None:
        what = "adapter" if args.adapter else "all weights"
        example_plot.draw(updates, args.plot, title=f"REINFORCE with a vLLM engine, {what}")
        bench_options.say_written(str(args.plot), args)
    if after <= before:
        console.print(f"[red]wrong:[/red] the reward went from {before:.3f} to {after:.3f}")
        return ExitCode.FAILED
    console.print(f"[green]ok:[/green] the reward rose from {before:.3f} to {after:.3f}")
    return ExitCode.OK


def _check(args: argparse.Namespace) -> None:
    if args.updates < _MIN_UPDATES:
        raise CommandError(
            f"--updates is {args.updates}; expected at least {_MIN_UPDATES}", code=ExitCode.USAGE
        )
    if args.plot is not None:
        bench_options.check_plot(args.plot)
    require_vllm()
    if args.adapter:
        require_package("peft", why="it makes the adapter")


def _train(args: argparse.Namespace) -> list[dict[str, Any]]:
    # Short: sockets are made in it, whose paths may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="bucketsync-"))
    try:
        updates = _watch(args, folder)
    except CommandError:
        raise  # its text names the log
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    return updates


def _watch(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    updates: list[dict[str, Any]] = []
    checkpoint, log = folder / "model", folder / "trainer.log"
    arguments = [str(checkpoint), str(args.updates), str(args.seed)]
    with Steps(screen.stderr(args)) as steps:
        with steps.step("build a tiny random model"):
            build_checkpoint(checkpoint, seed=1)
        with steps.step("start a trainer and its engine, and train"):
            begun = time.monotonic()
            for line in lines_of([*arguments, *(["--adapter"] if args.adapter else [])], log):
                update = json.loads(line)
                updates.append(update)
                steps.say(_line(len(updates), update, seconds=time.monotonic() - begun))
    return updates


def _line(number: int, update: dict[str, Any], *, seconds: float) -> str:
    return (
        f"[{seconds:5.1f} s] update {number:3d}  reward {update['reward']:.3f}  "
        f"push {1e3 * update['push_s']:6.1f} ms  {update['sample']}"
    )


def _rewards(updates: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the mean reward of the first updates and of the last: a quarter of them each."""
    num = max(1, len(updates) // 4)
    first, last = updates[:num], updates[-num:]
    return sum(one["reward"] for one in first) / num, sum(one["reward"] for one in last) / num


def _table(updates: Sequence[dict[str, Any]]) -> Table:
    from statistics import median

    from rich.markup import escape
    from rich.table import Table

    table = Table(title="What training came to", show_header=False)
    table.add_row("updates", str(len(updates)))
    rewards = [f"{one['reward']:.3f}" for one in (updates[0], updates[-1])]
    table.add_row("reward, first and last", ", ".join(rewards))
    seconds = median(one["push_s"] for one in updates[1:])
    table.add_row("push, median after the first", f"{1e3 * seconds:.1f} ms")
    mismatch = max(one["mismatch"] for one in updates)
    table.add_row("log-probabilities of both ends differ by", f"{mismatch:.1e} at most")
    table.add_row("sampled first", escape(updates[0]["sample"]))
    table.add_row("sampled last", escape(updates[-1]["sample"]))
    return table
