"""The options by which a command finds running servers, and the engine that they make."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import urlsplit

from vllm_bucketsync.config import API_KEY_ENV

from .exits import CommandError, ExitCode

_SCHEMES = ("http", "https", "unix")


def add_arguments(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Add ``--url`` and ``--api-key``.

    Args:
        parser: The command's.
        is_required: The command is nothing without a server.
    """
    parser.add_argument(
        "--url",
        action="append",
        required=is_required,
        help="a server's base URL, or unix:///path/of/its/socket; repeatable",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"the servers' key (default: {API_KEY_ENV}, which other users cannot read)",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse what is no URL at all, before what is slow to import is needed.

    Raises:
        CommandError: A URL has no scheme that servers have.
    """
    for url in args.url or ():
        scheme = url.partition("://")[0]
        if scheme not in _SCHEMES or not _has_place(url):
            raise CommandError(
                f"--url {url!r} is not a server's URL; expected one such as "
                f"http://127.0.0.1:8000, or unix:///path/of/its/socket",
                code=ExitCode.USAGE,
            )


def _has_place(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # such as a bracket that is not closed
        return False
    return bool(parts.path if parts.scheme == "unix" else parts.netloc)


def connection(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``WeightSync`` that say whom to ask, and with which key."""
    return {"engine": args.url, "api_key": args.api_key}
