"""Push an adapter into running servers, to be served under its name.

All of the servers take it, or none does; until then, and after any failure, the old
version serves. The adapter is a folder with adapter_model.safetensors and
adapter_config.json, as PEFT's save_pretrained writes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import push, renaming
from .exits import CommandError, ExitCode

EXAMPLES = """\
examples:
  vllm-bucketsync push-lora adapters/step-100 --url http://127.0.0.1:8000 --name policy
"""
EXIT_CODES = push.EXIT_CODES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to push, where to, under which name, and how."""
    option = parser.add_argument
    option("adapter", metavar="ADAPTER_DIR", type=Path, help="folder of the adapter")
    option("--name", required=True, help="the model that requests ask for")
    push.add_options(parser, partial="modules of the adapter that may go unapplied")


def run(args: argparse.Namespace) -> ExitCode:
    """Push, and show what it came to.

    Raises:
        CommandError: It was not done, or was interrupted; the text says what the engine
            holds now.
    """
    if not args.adapter.is_dir():
        raise CommandError(
            f"{str(args.adapter)!r} is not a folder on this machine; expected an adapter as "
            f"PEFT saves it",
            code=ExitCode.USAGE,
        )
    version = args.adapter.resolve().name if args.version is None else args.version
    return push.give(
        args,
        what=f"{args.adapter} as {args.name!r}, version {version!r}",
        act=lambda sync, progress: sync.push_lora(
            args.adapter,
            name=args.name,
            version=version,
            require_newer=args.require_newer,
            partial=args.partial,
            rename=renaming.renamer(args.prefixes),
            dry_run=args.dry_run,
            pause=args.pause,
            verify=args.verify,
            progress=progress,
            trace=args.trace,
        ),
    )
