"""What a folder of tests costs and needs: its timeout, and its marker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
# Seconds for one test, a hang included; a fresh interpreter that imports torch takes a few.
_TIMEOUTS_S = {"unit": 30, "protocol": 60, "engine": 300, "gpu": 300}
_FAULT = "test_fault_matrix.py::test_a_fault["
_MARKERS = {"engine": pytest.mark.vllm, "gpu": pytest.mark.gpu}


@pytest.fixture(scope="session", autouse=True)
def _facts(
    request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Have a JUnit file tell with which vLLM, and on which device, it was written."""
    if request.config.getoption("xmlpath") is None:
        return
    from support.facts import facts

    folders = {item.path.relative_to(_HERE).parts[0] for item in request.session.items}
    for name, value in facts(" ".join(f"tests/{one}" for one in sorted(folders))).items():
        record_testsuite_property(name, value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many faults were tried, and how many ended well."""
    tried = {
        report.nodeid: report.outcome
        for reports in terminalreporter.stats.values()
        for report in reports
        if _FAULT in getattr(report, "nodeid", "") and getattr(report, "when", "") == "call"
    }
    if not tried:
        return
    from support import fault_table

    num_passed = sum(outcome == "passed" for outcome in tried.values())
    terminalreporter.write_line(
        f"faults: {num_passed} of {len(tried)} cases passed; the table has "
        f"{len(fault_table.cases())}, and {len(fault_table.named())} that make no sense, each with "
        f"its reason"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(_HERE).parts[0]
        if folder in _MARKERS:
            item.add_marker(_MARKERS[folder])
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUTS_S.get(folder, 60)))
