"""Say what will work on this machine and why not, by trying it.

Random bytes are written by one process and read by another, for each transport and each
device; the environment, the container and what is installed are looked at. With --url, a
running server is checked, too: a dry run of an update with nothing in it, which writes
nothing and holds no request back. Exit code 0: all of it will work, 1: something will not.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from . import online, screen
from .exits import ExitCode
from .wording import as_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table
    from rich.text import Text

    from vllm_bucketsync.doctor.findings import Finding

EXAMPLES = """\
examples:
  vllm-bucketsync doctor
  vllm-bucketsync doctor --clean
  vllm-bucketsync doctor --url http://127.0.0.1:8000 --json
"""

# As in ``doctor.transports``, which is slow to import; a test compares them.
DEFAULT_TIMEOUT_S = 180.0
_MARKS = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "failed": ("FAILED", "bold red"),
    "skipped": ("-", "dim"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to look at beside this machine, and how to tell of it."""
    option = parser.add_argument
    online.add_arguments(parser, is_required=False)
    option(
        "--clean",
        action="store_true",
        help="remove shared memory and sockets that dead processes of this user left",
    )
    option(
        "--timeout-s",
        type=_seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="for all of the transports that are tried (%(default)g)",
    )
    option("--json", action="store_true", help="print the findings as JSON, and nothing else")


def run(args: argparse.Namespace) -> ExitCode:
    """Look at everything, and show it.

    Returns:
        ``FAILED`` where something will not work.
    """
    from vllm_bucketsync.doctor.findings import will_all_work

    findings = []
    console = screen.stdout(args)
    for one in _findings(args):
        finding = replace(one, found=as_options(one.found), advice=as_options(one.advice))
        findings.append(finding)
        if not args.json:
            # One by one: trying a device takes seconds.
            console.print(_row(finding) if console.is_terminal else _line(finding), soft_wrap=True)
    is_well = will_all_work(findings)
    if args.json:
        told = {"will_all_work": is_well, "findings": [asdict(one) for one in findings]}
        print(json.dumps(told, indent=2))
    else:
        console.print(_summary(findings))
    return ExitCode.OK if is_well else ExitCode.FAILED


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    from vllm_bucketsync.doctor import examine
    from vllm_bucketsync.doctor.transports import Deadline

    deadline = Deadline.after(args.timeout_s)
    yield from examine.check_machine(is_cleaning=args.clean, deadline=deadline)
    yield from examine.check_servers(args.url or [], api_key=args.api_key)


def _row(finding: Finding) -> Table:
    """Return a finding for a terminal, whose width long texts are wrapped to."""
    from rich.table import Table
    from rich.text import Text

    mark, style = _MARKS[finding.state]
    text = Text.assemble((finding.name, "bold"), f": {finding.found}")
    if finding.advice:
        text.append(f"\n{finding.advice}", style="italic")
    grid = Table.grid(padding=0)
    grid.add_column(width=7)
    grid.add_column()
    grid.add_row(Text(mark, style=style), text)
    return grid


def _line(finding: Finding) -> Text:
    """Return a finding for a pipe or a file: its advice is the one line that follows."""
    from rich.text import Text

    mark, style = _MARKS[finding.state]
    line = Text.assemble((f"{mark:<7}", style), (finding.name, "bold"), f": {finding.found}")
    if finding.advice:
        line.append(f"\n       {finding.advice}", style="italic")
    return line


def _summary(findings: Sequence[Finding]) -> str:
    from rich.markup import escape

    counts = {state: sum(one.state == state for one in findings) for state in _MARKS}
    if counts["failed"]:
        names = escape(", ".join(one.name for one in findings if one.state == "failed"))
        return f"[bold red]will not work:[/bold red] {names}"
    warned = f", {counts['warn']} of it could work better" if counts["warn"] else ""
    return f"[green]all of it will work[/green]{warned}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds
