"""A pytest plugin for vLLM's own tests: a pass is a test that ran, and no GPU is missed.

It changes no test. On a machine without a GPU, tests that ask how many devices there are
hear of as many as ``VLLM_BUCKETSYNC_TEST_DEVICES`` says, and servers of the reinforcement
learning tests start without sleep mode, which the CPU build refuses.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator
from typing import Any

import pytest

DEVICES = "VLLM_BUCKETSYNC_TEST_DEVICES"
_PARENT = os.getpid()
# Shared with every process that is forked from this one.
_said_in_child = mmap.mmap(-1, mmap.PAGESIZE)
_Skipped: Any = pytest.skip.Exception
_init = _Skipped.__init__


def _note_in_child(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    if os.getpid() != _PARENT:
        reason = str(self.msg).encode()[: mmap.PAGESIZE - 1] or b"no reason"
        _said_in_child[: len(reason) + 1] = reason + b"\0"


_Skipped.__init__ = _note_in_child


def _take_what_was_said() -> str:
    reason = _said_in_child[:].partition(b"\0")[0].decode(errors="replace")
    _said_in_child[0:1] = b"\0"
    return reason


def pytest_configure(config: pytest.Config) -> None:
    """Load plugins as vLLM does in each of its processes, and stand in for a GPU."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if num_devices := os.environ.get(DEVICES):
        _pretend(int(num_devices))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave sleep mode out of what tests start servers with, as far as it was imported."""
    import sys

    arguments = sys.modules.get("tests.entrypoints.rl.conftest")
    if not os.environ.get(DEVICES) or arguments is None:
        return
    for given in vars(arguments).values():
        if isinstance(given, list) and "--enable-sleep-mode" in given:
            given.remove("--enable-sleep-mode")


def _pretend(num_devices: int) -> None:
    import torch
    from vllm.platforms import current_platform

    torch.accelerator.device_count = lambda: num_devices
    platform: Any = type(current_platform)
    platform.device_count = classmethod(lambda cls: num_devices)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test as skipped that skipped in a child, and was to be told as passed.

    vLLM runs many tests in a forked child, which ends well when the test skips.
    """
    report = yield
    if call.when != "call":
        return report
    reason = _take_what_was_said()
    if reason and report.passed:
        report.outcome = "skipped"
        where = (str(item.path), (item.location[1] or 0) + 1)
        report.longrepr = (*where, f"Skipped: in a forked child: {reason}")
    return report
