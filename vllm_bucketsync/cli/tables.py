"""What an update came to, and what workers hold, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

_STATUS_HEADINGS = (
    *("engine", "dp", "rank", "pid", "device"),
    *("version", "state", "updates", "failed", "transport", "adapters"),
)
# Left out where all workers have 0 there.
_PLACES = _STATUS_HEADINGS[:2]
_TORN = "torn"


def report_table(report: Mapping[str, Any]) -> Table:
    """Return a table of a push.

    Args:
        report: ``PushReport.as_dict()``. What is missing or empty is left out.
    """
    is_dry_run = bool(report.get("is_dry_run"))
    what = "The dry run of" if is_dry_run else "The push of"
    name = report.get("name")
    thing = f"{report['version']!r}" if name is None else f"{name!r}, version {report['version']!r}"
    table = Table(title=escape(f"{what} {thing}"), show_header=False)
    if name is not None and not is_dry_run:
        table.add_row("requests name it", escape(f'"model": "{name}"'))
    for engine in report.get("engines", ()):
        table.add_row("engine", escape(engine))
    table.add_row("bytes", f"{report['num_bytes']:,}")
    table.add_row("tensors", str(report["num_tensors"]))
    if is_dry_run and report.get("previous_version") is not None:
        table.add_row("the engine holds", escape(repr(report["previous_version"])))
    if not is_dry_run:
        table.add_row("buckets", f"{report['num_buckets']} of {report['slot_size_bytes']:,} bytes")
        table.add_row("workers", str(report["num_workers"]))
    table.add_row("seconds", f"{report['seconds']:.3f}")
    if is_dry_run:
        table.add_row("written", "nothing; it fits the engine")
        return table
    table.add_row("GB/s", f"{report['gb_per_s']:.3f}")
    table.add_row("transport", escape(f"{report['transport']}: {report['transport_reason']}"))
    if skipped := report.get("skipped"):
        table.add_row("skipped", escape(", ".join(skipped)))
    if left_as_is := report.get("left_as_is"):
        table.add_row("left as it was", escape(", ".join(left_as_is)))
    if report.get("goes_back"):
        table.add_row("went back from", escape(str(report.get("previous_version"))))
    for worker in report.get("workers", ()):
        _add_worker(table, worker)
    return table


def _add_worker(table: Table, worker: Mapping[str, Any]) -> None:
    """Add what one worker has to say."""
    if place := worker.get("staged_on"):
        staged = f"{worker['staged_bytes']:,} bytes in {place}"
        table.add_row(f"staged by rank {worker['rank']}", escape(staged))
    for cast in worker.get("casts", ()):
        told = f"{cast['num_tensors']} tensors of {cast['sent']} to {cast['held']}"
        table.add_row(f"cast by rank {worker['rank']}", told)
    if verified := worker.get("verified_bytes"):
        table.add_row(f"verified by rank {worker['rank']}", _verified(worker, verified))
    for note in worker["notes"]:
        table.add_row(f"note of rank {worker['rank']}", escape(note))


def status_table(workers: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each worker, whose texts are in one line each.

    Args:
        workers: What ``WeightSync.status()`` returned.
    """
    rows = [_status_row(worker) for worker in workers]
    is_told = [
        name not in _PLACES or any(row[column] != "0" for row in rows)
        for column, name in enumerate(_STATUS_HEADINGS)
    ]
    table = Table(title="What the workers hold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, is_shown in zip(_STATUS_HEADINGS, is_told, strict=True):
        if is_shown:
            table.add_column(heading, no_wrap=True)
    for row in rows:
        shown = [text for text, is_shown in zip(row, is_told, strict=True) if is_shown]
        table.add_row(*(_colored(text) for text in shown))
    return table


def status_lines(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each worker, for pipes and files: a heading before each value."""
    return [
        "  ".join(
            f"{name} {text}"
            for name, text in zip(_STATUS_HEADINGS, _status_row(worker), strict=True)
            if text
        )
        for worker in workers
    ]


def _status_row(worker: Mapping[str, Any]) -> list[str]:
    version = worker["version"]
    return [
        str(worker["engine"]),
        str(worker["dp_index"]),
        str(worker["rank"]),
        str(worker["pid"]),
        worker["device"],
        "initial" if version is None else version,
        _state_of(worker),
        str(worker["num_updates"]),
        str(worker["num_failures"]),
        worker.get("transport") or "",
        ", ".join(f"{one['name']}@{one['version']}" for one in _adapters(worker)),
    ]


def _verified(worker: Mapping[str, Any], verified_bytes: int) -> str:
    """Return what a worker compared, for people."""
    num_modules = worker["num_direct_verified"] + worker["num_processed_verified"]
    text = f"{verified_bytes:,} bytes, {num_modules} modules"
    num_others = worker["num_unverified"]
    return f"{text}; {num_others} tensors were not compared" if num_others else text


def _state_of(worker: Mapping[str, Any]) -> str:
    if worker["is_torn"]:
        return _TORN
    if worker.get("is_asleep"):
        return "asleep"
    return "partly older" if worker.get("left_as_is") else "whole"


def _colored(text: str) -> str:
    return f"[bold red]{text}[/bold red]" if text == _TORN else escape(text)


def _adapters(worker: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = worker.get("adapters") or ()
    return found
