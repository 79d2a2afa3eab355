"""Say what every worker of running servers holds.

Of data-parallel replicas vLLM lets only the first answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from vllm_bucketsync.errors import BucketSyncError

from . import online
from .exits import CommandError, ExitCode
from .tables import status_table


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
    from vllm_bucketsync.sync import WeightSync

    try:
        with WeightSync(**online.connection(args)) as sync:
            workers = sync.status()
    except BucketSyncError as error:
        raise CommandError.of(error) from error
    if args.json:
        print(json.dumps(workers, indent=2))
    else:
        Console().print(status_table(workers))
    if found := problems(workers):
        raise CommandError("; ".join(found))
    return ExitCode.OK


def problems(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with what workers hold; nothing where all is well."""
    found = [
        f"rank {worker['rank']} of engine {worker['engine']} holds parts of two sets of weights; "
        f"a complete push mends it"
        for worker in workers
        if worker["is_torn"]
    ]
    for engine in sorted({worker["engine"] for worker in workers}):
        versions = {worker["version"] for worker in workers if worker["engine"] == engine}
        if len(versions) > 1:
            listed = ", ".join(sorted(map(repr, versions)))
            found.append(f"the workers of engine {engine} hold different weights: {listed}")
    return found
