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


LOGGING = """
import io, logging
from vllm_bucketsync import plugin
said = io.StringIO()
handler = logging.StreamHandler(said)
handler.setFormatter(logging.Formatter("vLLM's: %(levelname)s %(message)s"))
{before}
plugin.register()
plugin.register()
log = logging.getLogger("vllm_bucketsync.worker.weights")
log.debug("a detail")
log.info("an update")
print(said.getvalue(), end="")
"""
AS_VLLM = """
vllm = logging.getLogger("vllm")
vllm.addHandler(handler)
vllm.setLevel(logging.INFO)
vllm.propagate = False
"""


def test_logs_go_once_where_vllm_s_go_at_its_level() -> None:
    assert run(LOGGING.format(before=AS_VLLM)) == "vLLM's: INFO an update\n"


def test_a_level_that_was_asked_for_stays() -> None:
    asked = f"{AS_VLLM}\nlogging.getLogger('vllm_bucketsync').setLevel(logging.WARNING)"

    assert run(LOGGING.format(before=asked)) == ""


@pytest.mark.parametrize("name", ["", "vllm_bucketsync"])
def test_logs_that_already_go_somewhere_are_left_alone(name: str) -> None:
    elsewhere = f"""{AS_VLLM}
own = logging.StreamHandler(io.StringIO())
logging.getLogger({name!r}).addHandler(own)
logging.getLogger({name!r}).setLevel(logging.INFO)
"""
    script = LOGGING.format(before=elsewhere) + "print(own.stream.getvalue(), end='')"

    assert run(script) == "an update\n"


def test_a_root_logger_that_is_set_up_later_shows_nothing_twice() -> None:
    later = "\nlogging.basicConfig(stream=sys.stdout, level=0)\nlog.info('another')\n"
    script = "import sys\n" + LOGGING.format(before=AS_VLLM) + later + "print(said.getvalue())"

    assert run(script).count("another") == 1


def test_without_vllm_s_logging_nothing_is_set_up() -> None:
    script = LOGGING.format(before="") + "print(logging.getLogger('vllm_bucketsync').handlers)"

    assert run(script) == "[]\n"


def run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    assert result.stderr == ""
    return result.stdout
