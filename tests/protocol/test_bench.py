"""Proves that the benchmark runs, says what it measured, and leaves nothing behind.

Sizes are tiny, and no number is asserted: machines differ.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.traces import bars_of, named, of_end

import vllm_bucketsync
from vllm_bucketsync import cli
from vllm_bucketsync.bench.model import decoder_shapes, num_elements
from vllm_bucketsync.bench.worker import WorkerProcess
from vllm_bucketsync.cli.exits import ExitCode
from vllm_bucketsync.errors import EngineUnreachableError
from vllm_bucketsync.sync import WeightSync

SIZE_BYTES = 1024**2
TINY = ["bench", "transfer", "--size", "1MiB", "--repeat", "2"]
TARGETS = {"discard", "model"}
PATIENCE_S = 30.0
MAIN = "import sys; from vllm_bucketsync.cli import main; sys.exit(main())"


def check(found: dict[str, Any]) -> None:
    """Check that everything is said, and that what is said fits together."""
    assert found["benchmark"] == "transfer"
    assert found["num_bytes"] >= SIZE_BYTES
    assert found["num_tensors"] == 291
    assert found["num_buckets"] >= found["num_bytes"] / found["slot_size_bytes"]
    assert found["num_threads"] >= 1
    assert found["transport"] == "shm"
    assert found["device"] == "cpu"
    assert found["compared_with"] == "memcpys"
    assert "DiscardSink" in found["compared"]
    assert found["versions"]["vllm_bucketsync"] == vllm_bucketsync.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["machine"]["cpu_count"] == os.cpu_count()
    assert set(found["warm"]) == TARGETS
    assert len(found["memcpys"]["seconds"]) == 2 * len(TARGETS)
    for warm in found["warm"].values():
        assert len(warm["seconds"]) == found["repeat"] == 2
        assert 0 < warm["best_s"] <= warm["median_s"]
        assert math.isclose(
            warm["ratio_of_medians"], warm["median_s"] / found["memcpys"]["median_s"]
        )
        assert math.isclose(warm["median_gb_per_s"], found["num_bytes"] / warm["median_s"] / 1e9)
        stages = warm["stages_ms"]
        assert set(stages["medians"]["trainer"]) >= {"packing", "streaming", "committing"}
        assert set(stages["medians"]["worker"]) >= {"waiting", "loading", "committing"}
        for index, load_s in enumerate(warm["worker_load_s"]):
            spent_ms = {name: runs[index] for name, runs in stages["runs"]["worker"].items()}
            assert math.isclose(sum(spent_ms.values()) - spent_ms["waiting"], 1e3 * load_s)
    peaks = found["peaks"]
    assert peaks["slots_bytes"] == found["num_slots"] * found["slot_size_bytes"]
    assert peaks["trainer_bytes"] is None or peaks["trainer_bytes"] >= 0


def test_a_file_gets_everything_and_the_table_goes_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_threads = torch.get_num_threads()

    code = cli.main([*TINY, "--json", str(tmp_path / "found.json"), "--num-slots", "3"])

    assert code == ExitCode.OK
    found = json.loads((tmp_path / "found.json").read_text())
    check(found)
    assert found["num_slots"] == 3
    out, err = capsys.readouterr()
    assert "two memcpys" in out
    assert "push again: 2 of 2" in err
    assert torch.get_num_threads() == num_threads


def test_json_on_stdout_is_all_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main([*TINY, "--json", "-", "--dtype", "float32", "--slot-size", "64KiB"])

    assert code == ExitCode.OK
    out, err = capsys.readouterr()
    found = json.loads(out)
    check(found)
    assert (found["dtype"], found["slot_size_bytes"]) == ("float32", 64 * 1024)
    assert "two memcpys" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cuda"], "finds no GPU here; use --device cpu"),
        (["--transport", "cuda_ipc"], "transport 'cuda_ipc' cannot be used"),
    ],
)
def test_what_needs_a_gpu_says_so_where_there_is_none(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main([*TINY, *arguments])

    assert code == ExitCode.UNAVAILABLE
    assert text in capsys.readouterr().err


def test_updates_into_each_target_are_traced_and_drawn(tmp_path: Path) -> None:
    files = {name: tmp_path / f"found.{name}" for name in ("json", "svg")}
    options = ["--trace", str(files["json"]), "--plot", str(files["svg"])]

    # In a process of its own: matplotlib keeps its fonts open.
    run = subprocess.run(
        [sys.executable, "-c", MAIN, *TINY, "--slot-size", "256KiB", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    assert run.returncode == ExitCode.OK, run.stderr
    bars = bars_of(json.loads(files["json"].read_text()))
    for target in TARGETS:
        for end, name in (("trainer", "packing"), ("worker rank 0", "loading")):
            drawn = named(of_end(bars, f"warm update ({target}): {end}"), name)
            assert len(drawn) > 2
            assert [bar.bucket for bar in drawn] == list(range(len(drawn)))
    drawn_text = files["svg"].read_text()
    for text in (*(f"warm update ({target})" for target in TARGETS), "two memcpys", "median"):
        assert text in drawn_text
    assert "trace updates (model)" in run.stderr
    assert all(f"wrote {path}" in run.stderr for path in files.values())


def test_nothing_is_traced_that_was_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(TINY) == ExitCode.OK

    assert "trace updates" not in capsys.readouterr().err


def test_a_transport_that_is_asked_for_carries_it(tmp_path: Path) -> None:
    code = cli.main([*TINY, "--transport", "shm", "--json", str(tmp_path / "found.json")])

    assert code == ExitCode.OK
    check(json.loads((tmp_path / "found.json").read_text()))


@pytest.mark.parametrize("size", ["", "12MB", "-1", "much"])
def test_a_size_that_is_none_is_a_usage_error(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "transfer", f"--size={size}"])

    assert ended.value.code == ExitCode.USAGE
    assert (
        f"{size!r} is not a size; expected bytes, or a number with KiB" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--size=0"], "size is 0 bytes; expected at least 1048576"),
        (["--size=9999999999TiB"], "no decoder is that large"),
        (["--slot-size=16"], "--slot-size is 16; expected at least 256 bytes"),
        (["--num-slots=0"], "--num-slots is 0; expected a whole number from 1 to 64"),
        (["--repeat=0"], "repeat is 0"),
        (["--threads=0"], "threads is 0"),
    ],
)
def test_an_option_that_is_out_of_range_is_a_usage_error(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["bench", "transfer", *arguments])

    assert code == ExitCode.USAGE
    assert text in capsys.readouterr().err


def test_a_machine_that_is_too_small_is_named_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = cli.main(["bench", "transfer", "--size=100TiB"])

    assert code == ExitCode.UNAVAILABLE
    assert "choose a smaller --size" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = cli.main([*TINY, "--json", "/no/such/folder/found.json"])

    assert code == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert "'/no/such/folder/found.json' cannot be written: its folder does not exist" in err


def test_a_worker_that_is_killed_is_an_error_and_is_reaped() -> None:
    with WorkerProcess(model_bytes=1, num_threads=1) as worker, WeightSync(worker) as sync:
        (status,) = sync.status()
        os.kill(status["pid"], signal.SIGKILL)

        with pytest.raises(EngineUnreachableError, match=f"pid {status['pid']}.* is gone"):
            sync.push({"weight": torch.ones(1)}, version="new")
        with pytest.raises(EngineUnreachableError):
            sync.status()

    assert not psutil.pid_exists(status["pid"])


def test_ctrl_c_stops_the_worker_and_ends_with_130(shm_dir: str) -> None:
    command = [sys.executable, "-c", MAIN, *TINY[:-1], "1000000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "VLLM_BUCKETSYNC_DIR": shm_dir},
        start_new_session=True,
    ) as bench:
        try:
            said = wait_for_line(bench, b"push again: 3 ")
            children = psutil.Process(bench.pid).children(recursive=True)
            # As a terminal does it: the whole group hears of it.
            os.killpg(bench.pid, signal.SIGINT)
            _, rest = bench.communicate(timeout=PATIENCE_S)
        finally:
            bench.kill()

    assert bench.returncode == ExitCode.INTERRUPTED
    assert (said + rest).endswith(b"vllm-bucketsync: interrupted\n")
    assert len(children) == 2  # the worker, and Python's resource tracker
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []


def wait_for_line(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    assert process.stderr is not None
    said, deadline_s = b"", time.monotonic() + PATIENCE_S
    while text not in said:
        left_s = deadline_s - time.monotonic()
        assert select.select([process.stderr], [], [], max(left_s, 0))[0], said
        chunk = os.read(process.stderr.fileno(), 65536)
        assert chunk, said
        said += chunk
    return said


@pytest.mark.parametrize("num_bytes", [SIZE_BYTES, 3 * SIZE_BYTES + 1, 1024**3, 16 * 10**9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_model_is_just_as_large_as_was_asked(num_bytes: int, dtype: str) -> None:
    shapes = decoder_shapes(num_bytes, dtype=dtype)

    found_bytes = num_elements(shapes) * getattr(torch, dtype).itemsize
    assert num_bytes <= found_bytes
    # The next width less would have been too little, and widths go in steps of 8.
    (width,) = shapes["model.norm.weight"]
    assert found_bytes * ((width - 8) / width) ** 2 < num_bytes
    assert len(shapes) == 291


def test_the_model_of_8b_has_the_shapes_of_one_of_8b() -> None:
    shapes = decoder_shapes(16 * 10**9)

    (width,) = shapes["model.norm.weight"]
    assert abs(width - 4096) < 64
    assert shapes["model.layers.31.self_attn.k_proj.weight"] == (width // 4, width)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (width, 7 * width // 2)
