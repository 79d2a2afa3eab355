"""Commands against a real server, with its key and without its development mode."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_bucketsync.cli.demo_model import PROMPTS, build_checkpoint
from vllm_bucketsync.cli.exits import ExitCode
from vllm_bucketsync.cli.servers import Server

pytestmark = pytest.mark.timeout(300)

COMMAND = str(Path(sys.executable).with_name("vllm-bucketsync"))


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder with a short path: sockets are made in it, where pytest's own is too long."""
    with tempfile.TemporaryDirectory(prefix="bs-") as name:
        for seed in (1, 2):
            build_checkpoint(Path(name) / f"step-{seed}", seed=seed)
        yield Path(name)


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    extension = ["--worker-extension-cls", "vllm_bucketsync.WorkerExtension"]
    with Server.start(root / "step-1", log=root / "log", arguments=extension) as found:
        found.wait_until_ready()
        yield found


def run(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments, "--url", server.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "VLLM_API_KEY": server.api_key},
    )


def test_a_checkpoint_is_checked_pushed_and_known(root: Path, server: Server) -> None:
    before = server.complete(PROMPTS[0], num_tokens=8)

    checked = run(server, "push", str(root / "step-2"), "--dry-run")
    assert checked.returncode == ExitCode.OK, checked.stderr
    assert server.complete(PROMPTS[0], num_tokens=8) == before

    pushed = run(server, "push", str(root / "step-2"), "--json")
    assert pushed.returncode == ExitCode.OK, pushed.stderr
    report = json.loads(pushed.stdout)
    assert (report["version"], report["num_workers"]) == ("step-2", 1)
    assert report["engines"] == [f"{server.url} (bucketsync_http)"]
    assert server.complete(PROMPTS[0], num_tokens=8) != before

    status = run(server, "status", "--json")
    assert status.returncode == ExitCode.OK, status.stderr
    (worker,) = json.loads(status.stdout)
    assert (worker["version"], worker["is_asleep"]) == ("step-2", False)


def test_what_a_worker_logs_of_an_update_is_in_the_servers_log(root: Path, server: Server) -> None:
    pushed = run(server, "push", str(root / "step-2"), "--version", "seen-in-the-log")

    assert pushed.returncode == ExitCode.OK, pushed.stderr
    (line,) = [one for one in server.log.read_text().splitlines() if "seen-in-the-log" in one]
    assert "INFO" in line
    assert "committed: weights version seen-in-the-log" in line


def test_the_doctor_finds_nothing_wrong_and_leaves_the_server_as_it_was(
    root: Path, server: Server
) -> None:
    def look() -> tuple[list[dict[str, object]], object]:
        workers = json.loads(run(server, "status", "--json").stdout)
        # A dry run, too, is an update that came some way, and ended unchanged.
        of_the_last = {"state": None, "transport": None, "transport_reason": None}
        held = [one | of_the_last for one in workers]
        return held, server.complete(PROMPTS[0], num_tokens=8)

    before = look()

    found = run(server, "doctor", "--json")

    assert found.returncode == ExitCode.OK, found.stdout
    states = {one["name"]: one["state"] for one in json.loads(found.stdout)["findings"]}
    parts = ("", ": versions", ": workers", ": requests", ": an update")
    assert [states[f"{server.url}{part}"] for part in parts] == ["ok"] * 5
    assert look() == before


def test_the_doctor_says_that_a_key_is_wrong_and_how_to_give_another(server: Server) -> None:
    found = run(server, "doctor", "--api-key", "wrong")

    assert found.returncode == ExitCode.FAILED
    assert "answered 401" in found.stdout
    assert "--api-key or VLLM_API_KEY" in found.stdout
    assert f"will not work: {server.url}" in found.stdout


def test_a_wrong_key_is_refused(root: Path, server: Server) -> None:
    refused = run(server, "push", str(root / "step-1"), "--api-key", "wrong")

    assert refused.returncode == ExitCode.FAILED
    assert "answered 401" in refused.stderr
    assert "no update had begun" in refused.stderr


def test_an_interrupted_push_says_what_the_engine_holds_and_traffic_goes_on(
    root: Path, server: Server
) -> None:
    before = server.complete(PROMPTS[0], num_tokens=8)
    script = (
        "import sys, time\n"
        "from vllm_bucketsync import checkpoint, cli, sources, sync\n"
        "def slowly(*args, **options):\n"
        "    found = opened(*args, **options)\n"
        "    found = sources.Source(declared=found.declared, tensors=still(found.tensors))\n"
        "    return found\n"
        "def still(tensors):\n"
        "    print('standing still', flush=True)\n"
        "    time.sleep(60)\n"
        "    yield from tensors\n"
        "opened, sync.open_weights = sync.open_weights, slowly\n"
        "sys.exit(cli.main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, "push", str(root / "step-1"), "--url", server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_API_KEY": server.api_key},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "standing still\n"
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()

    assert process.returncode == ExitCode.INTERRUPTED, said
    assert "interrupted; " in said
    assert "the engine's weights are unchanged" in said
    assert server.complete(PROMPTS[0], num_tokens=8) == before
    assert run(server, "status").returncode == ExitCode.OK
