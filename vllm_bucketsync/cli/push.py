"""Push a checkpoint into running servers.

All of the servers take the new weights, or none does: what does not fit is refused before
anything is written. The checkpoint is a folder, as save_pretrained writes it, or one
.safetensors, .bin, .pt or .pth file. Ctrl-C ends a push at any moment, and says what the
engine holds then.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_bucketsync.errors import BucketSyncError, EngineState

from . import online, renaming, screen
from .exits import CommandError, ExitCode
from .progress import Steps
from .tables import report_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_bucketsync.asking import Progress
    from vllm_bucketsync.report import PushReport
    from vllm_bucketsync.sync import WeightSync

    Act = Callable[[WeightSync, Progress], PushReport]

# Of every command that pushes.
EXIT_CODES = """\
exit codes:
  0    every worker has it; with --dry-run, it fits
  1    the push failed, or it does not fit; the last line says what the engine holds
  2    the command line is wrong, or there is no such file; no server was asked
  3    the server has no worker extension, or cannot do it
  130  interrupted; the last line says what the engine holds
"""

EXAMPLES = """\
examples:
  vllm-bucketsync push checkpoints/step-100 --url http://127.0.0.1:8000 --dry-run
  vllm-bucketsync push checkpoints/step-100 --url http://127.0.0.1:8000 --pause keep
  vllm-bucketsync push step-100.safetensors --url unix:///run/vllm.sock --version 100
  vllm-bucketsync push actor/step-100 --url http://127.0.0.1:8000 --strip-prefix actor.
"""


# vLLM's words; what they mean is written down in ``clients.base.PauseMode``.
PAUSE_MODES = ("wait", "abort", "keep")
# As ``config.Verify`` has them.
VERIFY_MODES = ("none", "digest")

_HOLDS = {
    EngineState.UNCHANGED: "the engine holds what it held before",
    EngineState.COMMITTED: "the engine has the new weights all the same",
    EngineState.TORN: "the engine's weights are torn, part new and part old: a server stays "
    "paused until a complete push repairs it",
    EngineState.UNKNOWN: "what the engine holds is unknown: ask vllm-bucketsync status",
}
_NOTHING_BEGAN = "no update had begun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to push, where to, and how."""
    option = parser.add_argument
    option("checkpoint", metavar="CHECKPOINT", type=Path, help="folder or file of the new weights")
    text = "keep the old weights until every worker has all of the new ones"
    option("--atomic", action="store_true", help=text)
    add_options(parser, partial="parameters of the engine that may keep their value")


def add_options(parser: argparse.ArgumentParser, *, partial: str) -> None:
    """Add what every command that pushes takes.

    Args:
        parser: The command's.
        partial: What the patterns of ``--partial`` name.
    """
    option = parser.add_argument
    online.add_arguments(parser)
    option("--version", help="what to call it (the folder's name)")
    option(
        "--partial",
        action="append",
        default=[],
        metavar="PATTERN",
        help=f"{partial}, by a pattern such as '*.norm.*'; repeatable",
    )
    renaming.add_arguments(parser)
    option(
        "--require-newer",
        action="store_true",
        help="refuse to replace the same version or a higher one; versions are whole numbers",
    )
    option("--dry-run", action="store_true", help="check everything, and write nothing")
    option(
        "--pause",
        choices=PAUSE_MODES,
        default=PAUSE_MODES[0],
        help="running requests: wait for them, abort them, or keep them frozen (%(default)s)",
    )
    option(
        "--verify",
        choices=VERIFY_MODES,
        default=VERIFY_MODES[0],
        help="compare what arrives and what is loaded with what was sent (%(default)s)",
    )
    text = "write a timeline of both ends, as Chrome trace JSON for Perfetto"
    option("--trace", metavar="FILE", type=Path, help=text)
    option("--json", action="store_true", help="print the report as JSON, and nothing else")


def run(args: argparse.Namespace) -> ExitCode:
    """Push, and show what it came to.

    Raises:
        CommandError: It was not done, or was interrupted; the text says what the engine
            holds now.
    """
    if not args.checkpoint.exists():
        raise CommandError(
            f"{str(args.checkpoint)!r} does not exist on this machine; expected the folder or the "
            f"file of a checkpoint",
            code=ExitCode.USAGE,
        )
    version = _name_of(args.checkpoint.resolve()) if args.version is None else args.version
    return give(
        args,
        what=f"{args.checkpoint} as {version!r}",
        act=lambda sync, progress: sync.push(
            args.checkpoint,
            version=version,
            require_newer=args.require_newer,
            partial=args.partial,
            rename=renaming.renamer(args.prefixes),
            dry_run=args.dry_run,
            pause=args.pause,
            atomic=args.atomic,
            verify=args.verify,
            progress=progress,
            trace=args.trace,
        ),
    )


def _name_of(checkpoint: Path) -> str:
    """Return what weights are called that nobody gave a name: as their folder or file."""
    return checkpoint.name if checkpoint.is_dir() else checkpoint.stem


def give(args: argparse.Namespace, *, what: str, act: Act) -> ExitCode:
    """Push something, and show what it came to.

    Args:
        args: What ``add_options`` has added.
        what: What is pushed, for people.
        act: Pushes it.

    Raises:
        CommandError: It was not done, or was interrupted; the text says what the engine
            holds now.
    """
    online.check(args)
    report = _given(args, what, act)
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        screen.stdout(args).print(report_table(report.as_dict()))
    return ExitCode.OK


def _given(args: argparse.Namespace, what: str, act: Act) -> PushReport:
    from vllm_bucketsync.sync import WeightSync

    has_sent = False
    doing = "check" if args.dry_run else "push"
    with Steps(screen.stderr(args)) as steps:
        try:
            with (
                WeightSync(**online.connection(args)) as sync,
                steps.step(f"{doing} {what}") as advance,
            ):

                def progress(done: int, total: int | None) -> None:
                    nonlocal has_sent
                    has_sent = True
                    advance(done, total)

                return act(sync, progress)
        except BucketSyncError as error:
            raise CommandError.of(error, also=_holds(error)) from error
        except KeyboardInterrupt as error:
            raise CommandError(
                f"interrupted; {_left_behind(error, has_sent=has_sent)}", code=ExitCode.INTERRUPTED
            ) from error


def _holds(error: BucketSyncError) -> str:
    return _NOTHING_BEGAN if error.engine_state is None else _HOLDS[error.engine_state]


def _left_behind(error: KeyboardInterrupt, *, has_sent: bool) -> str:
    """Return what an interrupted push left: ``push`` notes it where it was at work."""
    notes: list[str] = getattr(error, "__notes__", [])
    if notes:
        return "; ".join(notes)
    return _HOLDS[EngineState.UNKNOWN] if has_sent else _NOTHING_BEGAN
