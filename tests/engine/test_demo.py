"""The demo itself: real engines, a real push from another process, and nothing left behind."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from vllm_bucketsync.cli.exits import CommandError, ExitCode
from vllm_bucketsync.cli.servers import Server

COMMAND = [str(Path(sys.executable).with_name("vllm-bucketsync")), "demo"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: sockets are made in it, where pytest's own is too long."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@contextmanager
def running_demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the demo with all of its files in ``folder``, and let none of it outlive the test."""
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "VLLM_BUCKETSYNC_DIR": str(folder),
        # A user's own list of plugins, a key and development mode are not in the way.
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_API_KEY": "of-another-server",
        "VLLM_SERVER_DEV_MODE": "1",
        # What torch compiled for the tests before is good for this one.
        "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}",
    }
    # An engine in processes of its own, also where other tests asked for one in theirs.
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            for started in [*descendants(process), process]:
                started.kill()


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def left_behind(folder: Path) -> list[str]:
    # vLLM leaves a rendezvous file for each engine, and torch its compiler's cache.
    others = ("vllm_dist_", "torchinductor_")
    return [path.name for path in folder.iterdir() if not path.name.startswith(others)]


def wait_for_servers(process: subprocess.Popen[str], *, timeout_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = descendants(process)
        # Two servers, and at least one process that one of them started.
        if len(found) > 2:
            return found
        time.sleep(0.05)
    raise AssertionError(f"the demo started no engines within {timeout_s:g} s")


def test_the_demo_proves_that_outputs_follow_and_leaves_nothing_behind(folder: Path) -> None:
    with running_demo(folder) as process:
        printed, steps = process.communicate(timeout=240)

    assert process.returncode == ExitCode.OK, printed + steps
    assert "ok: 32 tokens and their log-probabilities" in " ".join(printed.split())
    assert "shm: " in printed
    assert "(bucketsync_http)" in printed
    assert "a trainer process pushes the new weights as 'step-1'" in steps
    assert left_behind(folder) == []


def test_an_interrupted_demo_stops_everything_that_it_started(folder: Path) -> None:
    with running_demo(folder) as process:
        started = wait_for_servers(process, timeout_s=120)
        process.send_signal(signal.SIGTERM)
        _, steps = process.communicate(timeout=60)

    assert process.returncode == ExitCode.INTERRUPTED, steps
    assert "interrupted: stopping the engines" in steps
    assert [child for child in started if is_alive(child)] == []
    assert left_behind(folder) == []


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs: one that only its parent has not reaped does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_an_engine_that_cannot_start_is_an_error_that_shows_the_end_of_its_log(
    folder: Path,
) -> None:
    log = folder / "engine.log"

    with (
        Server.start(folder / "no-checkpoint", log=log) as engine,
        pytest.raises(CommandError, match="ended with code 1 while starting") as failed,
    ):
        engine.wait_until_ready(timeout_s=120)

    assert str(log) in str(failed.value)
    assert log.read_text().splitlines()[-1] in str(failed.value)
