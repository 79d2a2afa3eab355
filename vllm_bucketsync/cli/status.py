"""Say what every worker of running servers holds.

A line for each worker: which weights it has, whether they are whole, how they came. Exit
code 1 where a worker holds parts of two updates, or workers disagree. Of data-parallel
replicas vLLM lets only the first answer.
"""

from __future__ import annotations

import argparse
import json

from vllm_bucketsync.errors import BucketSyncError

from . import online, screen
from .exits import CommandError, ExitCode
from .tables import status_table

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
    from vllm_bucketsync.doctor.server import worker_problems
    from vllm_bucketsync.sync import WeightSync

    try:
        with WeightSync(**online.connection(args)) as sync:
            workers = sync.status()
    except BucketSyncError as error:
        raise CommandError.of(error) from error
    if args.json:
        print(json.dumps(workers, indent=2))
    else:
        screen.stdout(args).print(status_table(workers))
    if found := worker_problems(workers):
        raise CommandError("; ".join(found))
    return ExitCode.OK
