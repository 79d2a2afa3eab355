"""Say what every worker of running servers holds.

A line for each worker: which weights it has, whether they are whole, how they came, and
whether the server holds requests back. Exit code 1 if a worker is torn (it holds parts of
two updates) or workers disagree. In development mode, vLLM lets only the first of several
data-parallel replicas answer.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from vllm_bucketsync.errors import BucketSyncError

from . import online, screen
from .exits import CommandError, ExitCode
from .tables import status_lines, status_table

if TYPE_CHECKING:
    from rich.console import Console

# More columns than a terminal has: a table is measured by itself then.
_UNBOUNDED = 10_000

EXAMPLES = """\
examples:
  vllm-bucketsync status --url http://127.0.0.1:8000
  vllm-bucketsync status --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add whom to ask."""
    online.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> ExitCode:
    """Ask, and show the answers.

    Returns:
        ``FAILED`` where a worker is torn, or the workers of one engine disagree.

    Raises:
        CommandError: A server did not answer.
    """
    online.check(args)
    from vllm_bucketsync.doctor.server import held_back, worker_problems
    from vllm_bucketsync.sync import WeightSync

    try:
        with WeightSync(**online.connection(args)) as sync:
            workers = sync.status()
    except BucketSyncError as error:
        raise CommandError.of(error) from error
    if args.json:
        print(json.dumps(workers, indent=2))
    else:
        show(screen.stdout(args), workers)
    for url in args.url:
        try:
            why = held_back(url, api_key=args.api_key)
            told = why and f"requests are held back: {why}"
        except BucketSyncError as error:
            told = f"cannot say whether requests are held back: {error}"
        if told:
            screen.stderr(args).print(
                f"{url}: {told}", markup=False, highlight=False, soft_wrap=True
            )
    if found := worker_problems(workers):
        raise CommandError("; ".join(found))
    return ExitCode.OK


def show(console: Console, workers: list[dict[str, Any]]) -> None:
    """Show a table on a terminal that is wide enough for it, and lines elsewhere.

    Args:
        console: Where.
        workers: What ``WeightSync.status()`` returned.
    """
    table = status_table(workers)
    needed = console.measure(table, options=console.options.update_width(_UNBOUNDED)).minimum
    if console.is_terminal and needed <= console.width:
        console.print(table)
        return
    for line in status_lines(workers):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
