"""What an update came to, and what workers hold, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

_STATUS_HEADINGS = (
    *("engine", "replica", "rank", "pid", "device"),
    *("version", "state", "updates", "failures", "transport", "adapters"),
)


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
    if not is_dry_run:
        table.add_row("buckets", f"{report['num_buckets']} of {report['slot_size_bytes']:,} bytes")
        table.add_row("workers", str(report["num_workers"]))
    table.add_row("seconds", f"{report['seconds']:.3f}")
    if is_dry_run:
        table.add_row("written", "nothing: it was only checked")
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
    """Return a table with a row for each worker.

    Args:
        workers: What ``WeightSync.status()`` returned.
    """
    table = Table(title="What the workers hold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in _STATUS_HEADINGS:
        table.add_column(heading)
    for worker in workers:
        version = worker["version"]
        table.add_row(
            str(worker["engine"]),
            str(worker["dp_index"]),
            str(worker["rank"]),
            str(worker["pid"]),
            escape(worker["device"]),
            "initial" if version is None else escape(version),
            _state_of(worker),
            str(worker["num_updates"]),
            str(worker["num_failures"]),
            worker.get("transport") or "",
            escape(", ".join(f"{one['name']}@{one['version']}" for one in _adapters(worker))),
        )
    return table


def _verified(worker: Mapping[str, Any], verified_bytes: int) -> str:
    """Return what a worker compared, for people."""
    num_modules = worker["num_direct_verified"] + worker["num_processed_verified"]
    text = f"{verified_bytes:,} bytes, {num_modules} modules"
    num_others = worker["num_unverified"]
    return f"{text}; {num_others} tensors were not compared" if num_others else text


def _state_of(worker: Mapping[str, Any]) -> str:
    if worker["is_torn"]:
        return "[red]torn[/red]"
    return "partly older" if worker.get("left_as_is") else "whole"


def _adapters(worker: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = worker.get("adapters") or ()
    return found
