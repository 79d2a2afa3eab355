"""The options by which a command finds running servers, and the engine that they make."""

from __future__ import annotations

import argparse
import os
from typing import Any

API_KEY = "VLLM_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--url`` and ``--api-key``."""
    parser.add_argument(
        "--url",
        action="append",
        required=True,
        help="a server's base URL, or unix:///path/of/its/socket; repeat it for several",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what the servers ask for; {API_KEY} where it is left out, which other users of "
        f"this machine cannot read",
    )


def connection(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``WeightSync`` that say whom to ask, and with which key."""
    key = os.environ.get(API_KEY) if args.api_key is None else args.api_key
    return {"engine": args.url, "api_key": key or None}
