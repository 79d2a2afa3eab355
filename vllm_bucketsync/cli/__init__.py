"""The command line: ``vllm-bucketsync COMMAND``.

A command is a module of this package with ``add_arguments(parser)`` and
``run(args) -> ExitCode``, and maybe ``EXAMPLES`` and ``EXIT_CODES`` for the end of its help.
What it needs that is slow to import, it imports in ``run``. Exit codes are those of
``exits.ExitCode``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_bucketsync import __version__

from . import bench, demo, doctor, example, push, push_lora, screen, status
from .exits import CommandError, ExitCode
from .parsing import Parser
from .signals import interrupted_by_signals

COMMANDS = {
    "doctor": doctor,
    "push": push,
    "push-lora": push_lora,
    "status": status,
    "bench": bench,
    "demo": demo,
    "example": example,
}

_EXIT_CODES = """\
exit codes:
  0    done
  1    it ran and the outcome is bad: a push failed, a worker is torn, outputs differ,
       something on this machine does not work
  2    the command line is wrong
  3    this environment, or the engine, lacks something; the text says what to change
  130  interrupted; everything that was started has been stopped
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; the process's own where ``None``.

    Returns:
        The exit code.
    """
    args = parser().parse_args(argv)
    screen.start_logging(args)
    try:
        with interrupted_by_signals():
            return int(COMMANDS[args.command].run(args))
    except CommandError as error:
        print(f"vllm-bucketsync: {error}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        print("vllm-bucketsync: interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)


def parser() -> Parser:
    """Return the parser of the whole command line."""
    found = Parser(
        prog="vllm-bucketsync",
        description="Stream a trainer's weights into running vLLM workers.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    screen.add_arguments(found)
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            epilog="\n".join(getattr(module, name, "") for name in ("EXAMPLES", "EXIT_CODES")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        screen.add_arguments(command, default=argparse.SUPPRESS)
        module.add_arguments(command)
    return found
