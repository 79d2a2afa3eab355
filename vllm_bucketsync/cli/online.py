"""The options by which a command finds running servers, and the engine that they make."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_bucketsync.config import API_KEY_ENV


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
        help="a server's base URL, or unix:///path/of/its/socket; repeat it for several",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what the servers ask for; {API_KEY_ENV} where it is left out, which other users of "
        f"this machine cannot read",
    )


def connection(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``WeightSync`` that say whom to ask, and with which key."""
    return {"engine": args.url, "api_key": args.api_key}
