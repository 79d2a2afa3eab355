"""What a check found, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What a finding means."""

    OK = "ok"
    """It works, or is as it should be."""
    WARN = "warn"
    """It works, but not as well as it could; the advice says how it would."""
    FAILED = "failed"
    """Something will not work until the advice is followed."""
    SKIPPED = "skipped"
    """It could not be tried, or there is nothing here to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        name: What was looked at.
        state: What it means.
        found: What was found, for people.
        advice: What to do, or to know; empty where there is nothing.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def will_all_work(findings: Iterable[Finding]) -> bool:
    """Return whether nothing was found that will not work; warnings do work."""
    return all(finding.state is not State.FAILED for finding in findings)
