"""``--rename`` and ``--strip-prefix``: from a checkpoint's names to the engine's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

Prefixes = Sequence[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--strip-prefix",
        dest="prefixes",
        action="append",
        type=_stripped,
        default=[],
        metavar="PREFIX",
        help="remove it from every name that begins with it, as in 'actor.'",
    )
    parser.add_argument(
        "--rename",
        dest="prefixes",
        action="append",
        type=_pair,
        metavar="OLD=NEW",
        help="replace a prefix of names by another; the first that fits is used; repeat it",
    )


def renamer(prefixes: Prefixes) -> Callable[[str], str] | None:
    """Return what ``push`` takes as ``rename``; ``None`` where nothing is to be renamed.

    Args:
        prefixes: Old and new ones, in the order in which they are tried.
    """
    if not prefixes:
        return None

    def rename(name: str) -> str:
        for old, new in prefixes:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return rename


def _stripped(text: str) -> tuple[str, str]:
    if not text:
        raise argparse.ArgumentTypeError("the prefix is empty")
    return text, ""


def _pair(text: str) -> tuple[str, str]:
    old, is_pair, new = text.partition("=")
    if not old or not is_pair:
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW, as in actor.=model.")
    return old, new
