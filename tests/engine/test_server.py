"""A real server, with its key, behind a Unix socket, while clients never stop asking.

Not in development mode: everything goes through our own route.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from support.traffic import PROMPTS, Answer, Traffic, ask

from vllm_bucketsync import EngineUnreachableError, LoadError, WeightSync
from vllm_bucketsync.cli.demo_model import build_checkpoint
from vllm_bucketsync.cli.servers import Server

pytestmark = pytest.mark.timeout(400)

KEY = "a-key-of-the-test"


@dataclass(frozen=True)
class Stage:
    """A running server, two checkpoints, and what it answers with each of them."""

    url: str
    socket: str
    folders: dict[str, Path]
    answers: dict[str, dict[str, Answer]]

    def client(self, key: str = KEY) -> httpx.Client:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=self.socket),
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )

    def sync(self) -> WeightSync:
        return WeightSync(self.url, api_key=KEY)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with (
        tempfile.TemporaryDirectory(prefix="bs-") as name,
        pytest.MonkeyPatch.context() as environment,
    ):
        root = Path(name)
        folders = {version: root / version for version in ("a", "b")}
        for seed, folder in enumerate(folders.values()):
            build_checkpoint(folder, seed=seed)
        environment.setenv("VLLM_SERVER_DEV_MODE", "0")
        environment.setenv("VLLM_PLUGINS", "bucketsync,bucketsync_http")
        path = str(root / "s")
        arguments = ["--worker-extension-cls", "vllm_bucketsync.WorkerExtension"]
        arguments += ["--api-key", KEY, "--uds", path, "--enable-prefix-caching"]
        with Server.start(folders["a"], log=root / "log", arguments=arguments) as server:
            found = Stage(f"unix://{path}", path, folders, {})
            _wait_until_ready(found, server)
            with found.client() as http, found.sync() as sync:
                for number, version in enumerate(("a", "b", "a")):
                    if number:
                        sync.push(folders[version], version=version)
                    answers = {prompt: ask(http, prompt) for prompt in PROMPTS}
                    # Back at the first weights, the answers have to be the first ones.
                    assert found.answers.setdefault(version, answers) == answers
            yield found


def _wait_until_ready(stage: Stage, server: Server) -> None:
    """Wait until somebody listens. httpx leaves a socket open where nobody does."""
    deadline_s = time.monotonic() + 200
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(stage.socket) == 0:
                break
        assert time.monotonic() < deadline_s, server.log.read_text()[-3000:]
        time.sleep(0.2)
    with stage.client() as http:
        http.get("/health").raise_for_status()


def test_no_request_fails_and_every_answer_is_of_one_version_while_weights_change(
    stage: Stage,
) -> None:
    assert stage.answers["a"] != stage.answers["b"]
    with Traffic(stage.client) as traffic, stage.sync() as sync:
        for number in range(20):
            report = sync.push(stage.folders["b" if number % 2 else "a"], version=number)
            assert report.engines == (f"{stage.url} (bucketsync_http)",)
            assert sync.status()[0]["version"] == str(number)
            with stage.client() as http:
                found = http.get("/v1/bucketsync/engine").json()
            assert found == {"is_paused": False, "weight_version": str(number)}

    assert traffic.failures == []
    seen = dict.fromkeys(stage.answers, 0)
    for prompt, answer in traffic.answers:
        versions = [v for v, answers in stage.answers.items() if answers[prompt] == answer]
        assert len(versions) == 1, f"{prompt!r} was answered with {answer}, which is of no version"
        seen[versions[0]] += 1
    assert all(seen.values()), seen
    assert traffic.num_healthy > 5


def test_the_metrics_of_the_server_tell_of_updates(stage: Stage) -> None:
    def metrics() -> dict[str, float]:
        with stage.client() as http:
            lines = http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm_bucketsync_"))
        return {name: float(value) for name, value in pairs}

    before = metrics()
    with stage.sync() as sync:
        report = sync.push(stage.folders["a"], version=1234)
        with pytest.raises(LoadError):
            sync.push({"model.norm.weight": torch.ones(1)}, version=1235)
    after = metrics()

    changes = {name: after[name] - before[name] for name in after}
    assert changes["vllm_bucketsync_updates_total"] == 1
    assert changes["vllm_bucketsync_failures_total"] == 1
    assert changes["vllm_bucketsync_bytes_total"] == report.num_bytes
    assert changes["vllm_bucketsync_tensors_total"] == report.num_tensors
    assert after["vllm_bucketsync_version"] == 1234
    assert after["vllm_bucketsync_torn"] == 0
    assert changes["vllm_bucketsync_update_seconds_count"] == 2


def test_without_the_key_nothing_is_done_and_development_mode_is_off(stage: Stage) -> None:
    with (
        WeightSync(stage.url, api_key="wrong") as sync,
        pytest.raises(EngineUnreachableError, match="api_key="),
    ):
        sync.push(stage.folders["b"], version=1)
    with stage.client() as http:
        assert http.post("/collective_rpc", json={"method": "check_health"}).status_code == 404
        assert {p: ask(http, p) for p in PROMPTS} == stage.answers["a"]


@pytest.mark.parametrize(("num_tensors", "is_torn"), [(0, False), (20, True)])
def test_the_death_of_a_trainer_stops_the_traffic_only_of_a_torn_engine(
    stage: Stage, num_tensors: int, is_torn: bool
) -> None:
    script = Path(__file__).parents[1] / "support" / "slow_trainer.py"
    arguments = [stage.url, KEY, str(stage.folders["b"]), str(num_tensors)]
    with subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "standing still\n"
        trainer.kill()

    with stage.client() as http, stage.sync() as sync:
        status = sync.status()[0]
        assert (status["is_torn"], status["num_failures"] > 0) == (is_torn, True)
        deadline_s = time.monotonic() + 10
        while http.get("/v1/bucketsync/engine").json()["is_paused"] is not is_torn:
            assert time.monotonic() < deadline_s
        if not is_torn:
            assert {p: ask(http, p) for p in PROMPTS} == stage.answers["a"]

        sync.push(stage.folders["b"], version="mended")
        assert {p: ask(http, p) for p in PROMPTS} == stage.answers["b"]
        sync.push(stage.folders["a"], version="a")
