"""The benchmark of an engine runs from one end to the other on a CPU, and tells what it cannot.

No number is asserted: machines differ. Every run is compared with what vLLM itself loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.traces import bars_of, named, of_end

from vllm_bucketsync import cli
from vllm_bucketsync.bench.engine import run as running
from vllm_bucketsync.bench.engine.models import MODELS
from vllm_bucketsync.bench.engine.result import EnginePlan, EngineResult, Row
from vllm_bucketsync.bench.engine.truth import Truth
from vllm_bucketsync.bench.traces import NUM_TRACED
from vllm_bucketsync.cli.exits import ExitCode
from vllm_bucketsync.errors import LoadError

pytestmark = [
    pytest.mark.timeout(200),
    # vLLM leaves sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

COMMAND = ["bench", "engine", "--model", "tiny", "--device", "cpu", "--repeat", "2"]
GPU_ONLY = {"cuda_ipc", "zero_copy", "vllm_ipc_packed", "vllm_ipc", "handles", "host_copies"}


class WrongPush:
    """A method that pushes nothing, so that the engine keeps the version before."""

    name = "copy"
    what = "nothing"
    is_floor = False

    def why_not(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def run(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def test_every_row_is_measured_or_says_why_not_and_a_wrong_one_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    methods = running._methods

    def with_a_wrong_one(*args: Any) -> list[Any]:
        return [WrongPush(), *methods(*args)]

    def checked(truth: Truth) -> None:
        try:
            check(truth)
        except LoadError as error:
            seen.append(error)
            raise
        seen.append(None)

    check = Truth.check
    monkeypatch.setattr(running, "_methods", with_a_wrong_one)
    monkeypatch.setattr(Truth, "check", checked)
    target, trace, plot = (tmp_path / f"{name}" for name in ("found.json", "t.json", "p.svg"))

    files = ["--json", str(target), "--trace", str(trace), "--plot", str(plot)]
    code = cli.main([*COMMAND, "--warm-up", "1", *files])

    # The wrong row alone has failed, and it was the first that was compared.
    assert code == ExitCode.FAILED
    found = json.loads(target.read_text())
    wrong, *rows = found["rows"]
    assert (wrong["outcome"], wrong["seconds"]) == ("failed", [])
    assert "hold wrong bytes" in wrong["text"]
    assert {row["name"] for row in rows} == set(running.METHODS)
    for row in rows:
        if row["name"] in GPU_ONLY:
            assert row["outcome"] == "not possible here"
            assert row["text"]
            continue
        assert (row["outcome"], len(row["seconds"]), len(row["warm_up_s"])) == ("measured", 2, 1)
    # Three runs of shm and three of the checkpoint, each compared, and those that are traced.
    assert [error is None for error in seen] == [False] + [True] * (6 + NUM_TRACED)
    (shm,) = (row for row in rows if row["name"] == "shm")
    assert shm["last"]["transport"] == "shm"
    assert shm["last"]["num_bytes"] == found["num_bytes"]
    assert len(shm["splits"]["load_s"]) == 2
    assert len(shm["stages_ms"]["runs"]["worker"]["loading"]) == 2
    assert shm["stages_ms"]["medians"]["trainer"]["packing"] > 0
    bars = bars_of(json.loads(trace.read_text()))
    for name in ("packing", "loading"):
        numbers = [bar.bucket for bar in named(of_end(bars, "shm: "), name)]
        assert numbers == list(range(shm["last"]["num_buckets"]))
    assert {"shm: trainer", "shm: worker rank 0"} == {b.end.split(" pid ")[0] for b in bars}
    for text in ("loading a bucket (worker)", "checkpoint", "shm: one update of"):
        assert text in plot.read_text()
    assert found["compares_outputs"]
    assert found["versions"]["torch"] == torch.__version__
    out, err = capsys.readouterr()
    assert "shm: median" in err
    assert "host_copies" in out


def test_the_models_have_the_tensors_and_bytes_of_those_that_they_stand_for() -> None:
    found = {
        name: (
            len(shapes := model.shapes()),
            sum(torch.Size(shape).numel() for shape in shapes.values()) * 2,
        )
        for name, model in MODELS.items()
    }

    assert {name: num_tensors for name, (num_tensors, _) in found.items()} == {
        "tiny": 25,
        "0.6b": 311,
        "8b": 399,
        "moe31b": 9435,
    }
    assert found["8b"][1] == 16_381_470_720
    assert 31.0e9 < found["moe31b"][1] < 31.4e9
    assert 1.5e9 < found["0.6b"][1] < 1.51e9


def result(*rows: Row) -> EngineResult:
    return EngineResult(
        plan=EnginePlan(model="tiny", device="cpu", methods=()),
        machine={},
        versions={},
        num_bytes=10**9,
        num_tensors=1,
        compared_bytes=1,
        compares_outputs=False,
        unlike=[],
        rows=list(rows),
    )


def test_ratios_are_to_the_floor_and_to_the_faster_of_vllm_s_own_ways() -> None:
    def row(name: str, *seconds: float) -> Row:
        return Row(name=name, what="", is_floor=name == "copy", seconds=list(seconds))

    found = result(
        row("copy", 0.5),
        row("cuda_ipc", 1.0, 3.0, 2.0),
        row("vllm_ipc_packed", 8.0),
        row("vllm_ipc", 4.0),
    ).as_dict()

    ours = found["rows"][1]
    assert (ours["median_s"], ours["best_s"], ours["gb_per_s"]) == (2.0, 1.0, 0.5)
    assert (ours["times_floor"], ours["times_vllm_ipc"]) == (4.0, 0.5)
    json.dumps(found)
