"""The plugin is found, can be called any number of times, and touches nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import distribution, entry_points

import pytest

import vllm_bucketsync
from vllm_bucketsync import plugin
from vllm_bucketsync.probe import own_probe

# Run where any process of vLLM runs it: before a device is chosen.
FRESH = """
import os, sys, threading
before = dict(os.environ)
from importlib.metadata import entry_points
(found,) = entry_points(group="vllm.general_plugins", name="bucketsync")
register = found.load()
register()
register()
print(*{"torch", "vllm", "zmq", "pynvml", "cuda"} & sys.modules.keys())
print(os.environ == before, threading.active_count())
"""


def test_the_entry_point_leads_to_register() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="bucketsync")

    assert found.load() is plugin.register


def test_the_installed_version_is_the_package_s() -> None:
    assert distribution("vllm-bucketsync").version == vllm_bucketsync.__version__


def test_register_loads_nothing_in_a_fresh_interpreter() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=True, timeout=30
    )

    assert result.stdout.splitlines() == ["", "True 1"]
    assert result.stderr == ""


def test_register_only_notes_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="vllm_bucketsync"):
        plugin.register()
        plugin.register()

    found = own_probe()
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.DEBUG]
    assert {record.getMessage() for record in caplog.records} == {
        f"vllm_bucketsync {vllm_bucketsync.__version__}: {found.kind}, since {found.reason}"
    }
