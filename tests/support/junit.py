"""JUnit files, as pytest writes them: each test's outcome, and where it was run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

PASSED, FAILED, ERROR, SKIPPED, XFAILED = "passed", "failed", "error", "skipped", "xfailed"
# A test that ends more than once, as with an error after a pass, counts as the last of these.
_WORST_LAST = (PASSED, XFAILED, SKIPPED, FAILED, ERROR)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest.

    Attributes:
        outcomes: By test.
        reasons: Why a test was skipped or failed, in one line, by test.
        facts: What the run said of itself: its testsuite's properties.
        date: The day on which it began, as in ``2026-12-01``.
        seconds: How long it took.
    """

    outcomes: dict[str, str]
    reasons: dict[str, str]
    facts: dict[str, str]
    date: str
    seconds: float

    def count(self, outcome: str) -> int:
        return Counter(self.outcomes.values())[outcome]

    def summary(self) -> str:
        """Return as in ``3 passed, 1 skipped``."""
        counts = Counter(self.outcomes.values())
        return ", ".join(f"{counts[name]} {name}" for name in _WORST_LAST if counts[name]) or "none"


def read(path: Path) -> Run:
    """Read one file that pytest has written."""
    suite = ElementTree.parse(path).getroot().find("testsuite")  # noqa: S314 - pytest's own
    if suite is None:
        raise ValueError(f"{path} has no testsuite; it is not what pytest writes")
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for case in suite.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome, reason = _outcome(case)
        known = outcomes.get(name, PASSED)
        outcomes[name] = max(known, outcome, key=_WORST_LAST.index)
        if reason:
            reasons[name] = reason
    facts = {
        one.get("name", ""): one.get("value", "") for one in suite.findall("properties/property")
    }
    date = suite.get("timestamp", "").partition("T")[0]
    return Run(outcomes, reasons, facts, date, float(suite.get("time", "0")))


def write(path: Path, outcomes: dict[str, str], facts: dict[str, str]) -> None:
    """Write what ``read`` reads, of tests that are passed, failed or skipped."""
    root = ElementTree.Element("testsuites")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    suite = ElementTree.SubElement(root, "testsuite", timestamp=now, time="0")
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=name, value=value)
    tags = {outcome: tag for tag, outcome in _TAGS.items()}
    for name, outcome in outcomes.items():
        first, _, last = name.partition("::")
        case = ElementTree.SubElement(suite, "testcase", classname=first, name=last)
        if outcome in tags:
            ElementTree.SubElement(case, tags[outcome])
    ElementTree.ElementTree(root).write(path, encoding="unicode")


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    found = [(_kind(one), one.get("message") or "") for one in case if one.tag in _TAGS]
    if not found:
        return PASSED, ""
    outcome, message = max(found, key=lambda pair: _WORST_LAST.index(pair[0]))
    return outcome, " ".join(message.split())


_TAGS = {"failure": FAILED, "error": ERROR, "skipped": SKIPPED}


def _kind(one: ElementTree.Element) -> str:
    return XFAILED if one.get("type") == "pytest.xfail" else _TAGS[one.tag]


def differences(without: Run, with_plugin: Run) -> list[str]:
    """Return a line for each test whose outcome is another one, or that only one run has."""
    names = sorted(without.outcomes.keys() | with_plugin.outcomes.keys())
    return [
        f"{name}: {before} without the plugin, {after} with it {_why(name, without, with_plugin)}"
        for name in names
        if (before := without.outcomes.get(name, "absent"))
        != (after := with_plugin.outcomes.get(name, "absent"))
    ]


def _why(name: str, *runs: Run) -> str:
    reasons: Iterable[str] = (run.reasons.get(name, "") for run in runs)
    return f"({'; '.join(filter(None, reasons))[:300]})"
