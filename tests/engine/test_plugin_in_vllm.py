"""vLLM itself finds the plugin, and resolves the extension by its public name."""

from __future__ import annotations

import subprocess
import sys

import vllm_bucketsync

SCRIPT = """
import logging
from vllm.plugins import load_general_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname

logging.getLogger("vllm_bucketsync").setLevel(logging.DEBUG)
logging.getLogger("vllm_bucketsync").addHandler(logging.StreamHandler())
load_general_plugins()
from vllm_bucketsync.probe import own_probe
print("probed", own_probe.cache_info().misses, own_probe().kind)
print("found", resolve_obj_by_qualname("vllm_bucketsync.WorkerExtension").__module__)
"""


def test_vllm_loads_the_plugin_and_resolves_the_extension() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )

    # vLLM logs there, too.
    said = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    # Before anybody asked.
    misses, kind = said["probed"].split()
    assert misses == "1"
    assert f"{vllm_bucketsync.__version__}: {kind}, since " in result.stderr
    assert "Failed to load plugin bucketsync" not in result.stdout + result.stderr
    assert said["found"] == "vllm_bucketsync.worker.extension"
