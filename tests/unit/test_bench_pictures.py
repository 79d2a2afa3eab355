"""Stages' medians, which trace is kept, all of them in one file, and the picture of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support.thread_engine import ThreadEngine
from support.traces import bars_of, check_update

from vllm_bucketsync import cli
from vllm_bucketsync.bench import plot
from vllm_bucketsync.bench.plot import Picture, Speeds, draw
from vllm_bucketsync.bench.stages import stages_of
from vllm_bucketsync.bench.traces import NUM_TRACED, merged, nearest, traced
from vllm_bucketsync.cli import bench_engine, bench_options
from vllm_bucketsync.cli.exits import ExitCode
from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.trace import Trace

TENSORS = {f"layers.{index}.weight": torch.full((100,), float(index)) for index in range(3)}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def sync() -> Iterator[WeightSync]:
    with WeightSync(ThreadEngine(is_in_process=True)) as made:
        yield made


@pytest.fixture
def trace(sync: WeightSync) -> Trace:
    return traced(lambda path: sync.push(iter(TENSORS.items()), version="new", trace=path))[1]


def report(**stages: float) -> dict[str, Any]:
    worker = {"stages_ms": {name: 10 * ms for name, ms in stages.items()}}
    return {"stages_ms": stages, "workers": (worker, {"stages_ms": {"not": 1.0}})}


def test_stages_are_told_by_run_and_as_medians_for_both_ends() -> None:
    reports = [report(a=1.0, b=5.0), {"other": 1}, report(a=3.0), report(a=2.0, b=7.0)]

    found = stages_of(reports)

    assert found["runs"] == {
        "trainer": {"a": [1.0, 3.0, 2.0], "b": [5.0, 0.0, 7.0]},
        "worker": {"a": [10.0, 30.0, 20.0], "b": [50.0, 0.0, 70.0]},
    }
    assert found["medians"] == {"trainer": {"a": 2.0, "b": 5.0}, "worker": {"a": 20.0, "b": 50.0}}


def test_what_is_no_push_has_no_stages() -> None:
    assert stages_of([{}]) == {
        "runs": {"trainer": {}, "worker": {}},
        "medians": {"trainer": {}, "worker": {}},
    }


def test_a_traced_update_is_one_like_any_other(sync: WeightSync, tmp_path: Path) -> None:
    paths = []

    def push(path: Path) -> Any:
        paths.append(path)
        return sync.push(TENSORS, version="new", trace=path)

    seconds, trace = traced(push)

    assert seconds > 0
    check_update(trace)
    # What it was written to is gone.
    assert not paths[0].parent.exists()


def test_the_trace_of_the_update_that_took_about_as_long_as_the_median_is_kept() -> None:
    runs = [(0.1, {"n": 0}), (0.4, {"n": 1}), (0.9, {"n": 2})]
    assert len(runs) == NUM_TRACED

    kept = [nearest(iter(runs).__next__, seconds=seconds) for seconds in (0.0, 0.5, 0.8, 9.0)]

    assert [one["n"] for one in kept] == [0, 1, 2, 2]


def test_traces_in_one_file_keep_their_events_their_zero_and_their_lanes(trace: Trace) -> None:
    found = json.loads(json.dumps(merged({"shm": trace, "zero_copy": trace})))

    bars, alone = bars_of(found), bars_of(trace)
    assert len(bars) == 2 * len(alone)
    for name in ("shm", "zero_copy"):
        own = [bar for bar in bars if bar.end.startswith(f"{name}: ")]
        assert [(b.end, b.lane, b.name, b.begin_us, b.end_us, b.bucket) for b in own] == [
            (f"{name}: {b.end}", b.lane, b.name, b.begin_us, b.end_us, b.bucket) for b in alone
        ]
    order = [e["args"] for e in found["traceEvents"] if e["name"] == "process_sort_index"]
    assert [one["sort_index"] for one in order] == [100, 200, 300, 400]
    update_id = trace["otherData"]["update_id"]
    assert found["otherData"]["zero_copy: update_id"] == update_id


def picture(**traces: Trace) -> Picture:
    return Picture(
        title="three tensors",
        caption="on this machine",
        traces=traces,
        speeds=[
            Speeds(name="ours", gb_per_s=[1.0, 2.0, 4.0]),
            Speeds(name="a plain copy", gb_per_s=[8.0], is_floor=True),
        ],
    )


def texts(path: Path) -> list[str]:
    """Return what is written in an SVG: matplotlib notes each text beside its shapes."""
    found = path.read_text()
    ElementTree.fromstring(found)  # noqa: S314 - drawn by this test
    return [line.strip()[5:-4] for line in found.splitlines() if line.strip().startswith("<!-- ")]


def test_a_picture_says_what_is_drawn_in_it(trace: Trace, tmp_path: Path) -> None:
    slow = json.loads(json.dumps(trace))
    for event in slow["traceEvents"]:
        if event["name"] == "packing":
            # Wide enough for its number, which no scale has.
            bucket = event["args"]["bucket"]
            event |= {"ts": 1e6 * bucket, "dur": 9e5, "args": {"bucket": 41 + bucket}}

    draw(picture(shm=slow), tmp_path / "found.svg")

    found = texts(tmp_path / "found.svg")
    for text in (
        *("three tensors", "on this machine", "ours", "a plain copy"),
        *("packing a bucket (trainer)", "loading a bucket (worker)", "other stages"),
        *("trainer", "worker rank 0", "slot 0", "median 2 GB/s", "median 8 GB/s"),
        "shm: one update of 2900.0 ms",
    ):
        assert found.count(text) >= 1, text
    assert {"41", "42", "43"} <= set(found)
    assert "post-processing modules (worker)" not in found


def test_a_picture_of_two_ways_has_one_scale_and_one_that_nothing_was_traced_for_has_speeds(
    trace: Trace, tmp_path: Path
) -> None:
    draw(picture(shm=trace, zero_copy=trace), tmp_path / "two.svg")
    draw(picture(), tmp_path / "none.svg")

    two, none = texts(tmp_path / "two.svg"), texts(tmp_path / "none.svg")
    assert two.count("worker rank 0") == 2
    assert two.count("ms from the call of push") == 1
    assert "median 2 GB/s" in none
    assert "other stages" not in none


def test_speeds_that_are_far_apart_are_drawn_on_a_scale_that_shows_both(tmp_path: Path) -> None:
    far = Speeds(name="a plain copy", gb_per_s=[2000.0], is_floor=True)
    near = Speeds(name="ours", gb_per_s=[90.0])
    for name, speeds in (("far", [near, far]), ("near", [near, near])):
        draw(
            Picture(title="", caption="", traces={}, speeds=speeds),
            tmp_path / f"{name}.svg",
        )

    label = "GB/s{}; a dot for each run"
    assert label.format(" (logarithmic)") in texts(tmp_path / "far.svg")
    assert label.format("") in texts(tmp_path / "near.svg")


def test_a_png_is_one(trace: Trace, tmp_path: Path) -> None:
    draw(picture(shm=trace), tmp_path / "found.png")

    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_kinds_of_bars_differ_in_brightness_or_pattern() -> None:
    for (first, its), (second, other) in combinations(plot._LOOKS.values(), 2):
        assert its != other or abs(brightness(first) - brightness(second)) > 15


def brightness(colour: str) -> float:
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_bytes_in_a_title_have_three_digits() -> None:
    found = [bench_options.bytes_text(n) for n in (658_000, 34_340_000, 1_500_000_000)]

    assert found == ["0.658 MB", "34.3 MB", "1.5 GB"]


@pytest.mark.parametrize("benchmark", ["transfer", "engine"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--trace=/no/such/folder/found.json"], "its folder does not exist"),
        (["--plot=/no/such/folder/found.svg"], "its folder does not exist"),
        (["--plot=found.jpg"], "'found.jpg'; expected a name that ends with .png or .svg"),
    ],
)
def test_a_file_that_cannot_be_made_is_a_usage_error_before_anything_starts(
    benchmark: str,
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_engine, "require_vllm", lambda: pytest.fail("it went on"))

    code = cli.main(["bench", benchmark, *arguments])

    assert code == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


@pytest.mark.parametrize("benchmark", ["transfer", "engine"])
def test_without_matplotlib_a_picture_is_refused_with_what_to_type(
    benchmark: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        plot, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    monkeypatch.setattr(bench_engine, "require_vllm", lambda: pytest.fail("it went on"))

    code = cli.main(["bench", benchmark, f"--plot={tmp_path / 'found.svg'}"])

    assert code == ExitCode.UNAVAILABLE
    assert "pip install 'vllm-bucketsync[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
