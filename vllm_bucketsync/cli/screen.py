"""How much a command says, and where: results on stdout, all else on stderr.

Colors and moving bars are for terminals only (and never where ``NO_COLOR`` is set):
what goes into a file or a pipe is plain text.
"""

from __future__ import annotations

import argparse
import logging

from rich.console import Console

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def add_arguments(parser: argparse.ArgumentParser, *, default: object = None) -> None:
    """Add ``-q`` and ``-v``, which every command takes, before its name or after it.

    Args:
        parser: The whole command line's, or a command's.
        default: ``argparse.SUPPRESS`` for a command: what was said before its name holds.
    """
    quiet, verbose = (False, 0) if default is None else (default, default)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        default=quiet,
        help="say nothing but errors, and JSON where it is asked for",
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=verbose,
        help="log what happens, on stderr; twice: each message and bucket, too",
    )


def start_logging(args: argparse.Namespace) -> None:
    """Let this process's logs be seen as far as ``-q`` and ``-v`` say."""
    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    level = logging.ERROR if args.quiet else levels[min(args.verbose, len(levels) - 1)]
    logging.basicConfig(level=level, format=_FORMAT)


def stdout(args: argparse.Namespace) -> Console:
    """Return where results go, as people read them."""
    return Console(quiet=args.quiet)


def stderr(args: argparse.Namespace) -> Console:
    """Return where everything else goes: progress, notes."""
    return Console(stderr=True, quiet=args.quiet)
