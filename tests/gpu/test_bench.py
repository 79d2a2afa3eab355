"""The benchmarks run on a GPU: every row and every transport, compared; no number is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_bucketsync import cli
from vllm_bucketsync.bench.engine.run import METHODS
from vllm_bucketsync.cli.exits import ExitCode

pytestmark = [
    pytest.mark.timeout(400),
    # vLLM leaves sockets and contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
def test_transfers_on_a_gpu_are_measured_beside_their_floor(tmp_path: Path, transport: str) -> None:
    target = tmp_path / "found.json"
    command = ["bench", "transfer", "--device", "cuda", "--transport", transport]

    code = cli.main([*command, "--size", "64MiB", "--repeat", "2", "--json", str(target)])

    assert code == ExitCode.OK
    found = json.loads(target.read_text())
    assert (found["transport"], found["device"]) == (transport, "cuda")
    assert found["compared_with"] == {"cuda_ipc": "device_copy", "shm": "host_copies"}[transport]
    assert found["machine"]["gpu"]["name"] == torch.cuda.get_device_name()
    for name in ("device_copy", "host_copies"):
        assert len(found[name]["seconds"]) == 4


def test_every_row_of_an_engine_is_measured_on_a_gpu(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    command = ["bench", "engine", "--model", "tiny", "--device", "cuda", "--repeat", "2"]

    code = cli.main([*command, "--methods", ",".join(METHODS), "--json", str(target)])

    found = json.loads(target.read_text())
    outcomes = {row["name"]: (row["outcome"], row["text"]) for row in found["rows"]}
    assert {name: outcome for name, outcome in outcomes.items() if outcome[0] == "failed"} == {}
    assert code == ExitCode.OK
    possible = [name for name, outcome in outcomes.items() if outcome[0] == "measured"]
    assert set(METHODS) <= set(possible)
    # Nothing of the weights is hidden here: every byte is compared.
    assert found["compared_bytes"] == found["num_bytes"]
    assert found["unlike"] == []
