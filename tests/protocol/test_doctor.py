"""The doctor's trials, between real processes: what works, and what dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from vllm_bucketsync.config import Settings
from vllm_bucketsync.doctor.findings import State
from vllm_bucketsync.doctor.helpers import Helper, HelperError
from vllm_bucketsync.doctor.transports import PROBE_BYTES, Deadline, check_devices, check_transports
from vllm_bucketsync.probe import probe

PATIENCE_S = 50.0
NO_GPU = probe({"CUDA_VISIBLE_DEVICES": ""}, root="/no/such/root")


def test_bytes_that_one_process_wrote_are_read_by_another_and_nothing_is_left(
    shm_dir: str,
) -> None:
    deadline = Deadline.after(PATIENCE_S)

    found = list(check_transports(Settings(dir=shm_dir), probe=NO_GPU, deadline=deadline))

    assert [(one.name, one.state) for one in found] == [
        ("devices", State.OK),
        ("cuda_ipc", State.SKIPPED),
        ("shm, cpu", State.OK),
    ]
    assert f"{PROBE_BYTES:,} bytes" in found[-1].found
    assert os.listdir(shm_dir) == []  # noqa: PTH208


def test_a_directory_that_cannot_be_used_fails_with_its_reason() -> None:
    settings = Settings(dir="/no/such/directory")
    deadline = Deadline.after(PATIENCE_S)

    *_, found = check_transports(settings, probe=NO_GPU, deadline=deadline)

    assert (found.name, found.state) == ("shm, cpu", State.FAILED)
    assert "no private directory can be had in '/no/such/directory'" in found.found


def test_what_was_written_is_what_the_digest_is_of(shm_dir: str) -> None:
    shared = {"kind": "shm", "device": "cpu", "num_bytes": 4096}
    with Helper() as writer, Helper() as reader:
        written = writer.ask("write", timeout_s=PATIENCE_S, directory=shm_dir, **shared)
        before = reader.ask("read", timeout_s=PATIENCE_S, handle=written["handle"], **shared)
        (file,) = Path(shm_dir).rglob("*.seg")
        with file.open("r+b") as segment:
            segment.seek(-1, os.SEEK_END)
            last = segment.read(1)
            segment.seek(-1, os.SEEK_END)
            segment.write(bytes([last[0] ^ 1]))
        after = reader.ask("read", timeout_s=PATIENCE_S, handle=written["handle"], **shared)

    assert before["digest"] == written["digest"]
    assert after["digest"] != written["digest"]


def test_torch_is_asked_for_its_gpus_in_another_process() -> None:
    with_gpu = probe({}, root="/")

    found, devices = check_devices(with_gpu, deadline=Deadline.after(PATIENCE_S))

    assert found.state in {State.OK, State.WARN}
    assert all(device.startswith("cuda:") for device in devices)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_process_that_dies_says_of_what(number: signal.Signals) -> None:
    with Helper() as helper:
        os.kill(helper.pid, number)

        with pytest.raises(HelperError, match=f"died of {number.name}"):
            helper.ask("devices", timeout_s=PATIENCE_S)


def test_a_process_that_hangs_is_killed_at_the_deadline() -> None:
    with Helper() as helper:
        helper.ask("close", timeout_s=PATIENCE_S)
        os.kill(helper.pid, signal.SIGSTOP)
        begin_s = time.monotonic()

        with pytest.raises(HelperError, match="no answer to 'devices' in the"):
            helper.ask("devices", timeout_s=1.0)

        assert time.monotonic() - begin_s < 20
        with pytest.raises(HelperError, match="died of SIGKILL"):
            helper.ask("devices", timeout_s=PATIENCE_S)


def test_a_process_that_cannot_start_says_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/no/such/path")
    monkeypatch.setenv("PYTHONHOME", "/no/such/home")
    with Helper() as helper, pytest.raises(HelperError, match=r"ended with code \d+: .+"):
        helper.ask("devices", timeout_s=PATIENCE_S)


def test_what_fails_there_is_an_answer_and_the_next_one_works(shm_dir: str) -> None:
    with Helper() as helper:
        with pytest.raises(HelperError, match="'telepathy' is not known here"):
            helper.ask(
                "read",
                timeout_s=PATIENCE_S,
                kind="telepathy",
                device="cpu",
                num_bytes=1,
                handle='{"type":"inproc","id":"x","num_bytes":1}',
            )

        assert helper.ask("close", timeout_s=PATIENCE_S) == {"warnings": []}
