"""README's server, its trainers and its commands run as they stand, but for names and ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.readme import block, with_names

from vllm_bucketsync.cli.demo_model import PROMPTS, build_checkpoint
from vllm_bucketsync.cli.servers import environment, signal_group

pytestmark = pytest.mark.timeout(600)

# Of two servers at once, on two cores that others may use as well.
START_TIMEOUT_S = 420.0
KEY = "SECRET"
# Small enough for a test; README leaves them to the user.
SMALL = "--dtype float32 --enforce-eager --max-model-len 128 --max-num-seqs 4"
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Two servers that README's command has started, and what can be pushed into them."""

    root: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def names(self) -> dict[str, str]:
        """What stands here for README's names, where a block has them."""
        return {
            "http://127.0.0.1:8000": self.url,
            "/run/vllm.sock": str(self.root / "b.sock"),
            "NEW_CHECKPOINT": str(self.root / "new"),
            "MODEL": str(self.root / "new"),
            "checkpoints/step-100": str(self.root / "new"),
            "adapters/step-100": str(self.root / "adapter"),
            "step-100.json": str(self.root / "step-100.json"),
        }

    def put_into(self, text: str) -> str:
        return with_names(text, {name: to for name, to in self.names.items() if name in text})

    def text(self) -> str:
        """Return what the first server generates, greedily."""
        return completed(httpx.Client(base_url=self.url), str(self.root / "old"))


def completed(http: httpx.Client, model: str) -> str:
    request = {"model": model, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
    with http:
        answer = http.post(
            "/v1/completions", json=request, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
        )
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    # A short path: sockets are made in it, where pytest's own is too long.
    with tempfile.TemporaryDirectory(prefix="bs-") as name, ExitStack() as running:
        root = Path(name)
        build_checkpoint(root / "old", seed=1)
        build_checkpoint(root / "new", seed=2)
        save_adapter(root / "new", root / "adapter")
        found = Place(root=root, port=free_port())
        lora = "--enable-lora --max-lora-rank 8 --max-loras 1"
        servers: list[tuple[str, dict[str, Any]]] = [
            (
                f"--host 127.0.0.1 --port {found.port} {lora}",
                {"base_url": found.url, "transport": httpx.HTTPTransport(retries=5)},
            ),
            (
                f"--uds {root / 'b.sock'}",
                {
                    "base_url": "http://localhost",
                    "transport": httpx.HTTPTransport(uds=str(root / "b.sock"), retries=5),
                },
            ),
        ]
        started = [
            running.enter_context(served(root, log=root / f"{number}.log", arguments=arguments))
            for number, (arguments, _) in enumerate(servers)
        ]
        for number, (_, connection) in enumerate(servers):
            wait_until_healthy(connection, started[number], log=root / f"{number}.log")
        yield found


@contextmanager
def served(root: Path, *, log: Path, arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run README's command for a server, with the entry point that it names for the CPU build."""
    command = block("export VLLM_API_KEY=")
    python = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {root / 'old'}"
    command = with_names(command.strip(), {"vllm serve MODEL": python})
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"{command} {SMALL} {arguments}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment({**os.environ, "VLLM_RPC_BASE_PATH": str(root)}),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while signal_group(process.pid, 0) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.1)
        signal_group(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


def wait_until_healthy(
    connection: dict[str, Any], process: subprocess.Popen[bytes], *, log: Path
) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    # Before it listens, httpx would leave a socket open with each try.
    while b"Application startup complete" not in log.read_bytes():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.25)
    with httpx.Client(**connection) as http:
        assert http.get("/health").is_success


def save_adapter(base: Path, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_program(beginning: str, place: Place, capsys: pytest.CaptureFixture[str]) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(place.put_into(block(beginning)), names)  # noqa: S102 - README's own
    return capsys.readouterr().out


def run_commands(beginning: str, place: Place) -> list[str]:
    """Run a block's commands as a shell does, and return what each has printed."""
    outputs = []
    for command in block(beginning).strip().splitlines():
        result = subprocess.run(
            ["bash", "-c", place.put_into(command)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={
                **os.environ,
                "VLLM_API_KEY": KEY,
                # What others have left on this machine is not this test's to clean.
                "VLLM_BUCKETSYNC_DIR": str(place.root),
                "PATH": f"{BIN}:{os.environ['PATH']}",
            },
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        outputs.append(result.stdout)
    return outputs


def test_the_program_at_the_top_pushes_a_checkpoint(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    before = place.text()

    run_program("from vllm_bucketsync import WeightSync\n\nwith WeightSync(", place, capsys)

    assert place.text() != before


def test_the_trainer_s_program_pushes_its_model_and_prints_reports(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run_program("from transformers import AutoModelForCausalLM\n", place, capsys)

    reports = re.findall(r"^version '(\d)': .* over shm, into 1 worker$", printed, re.MULTILINE)
    assert reports == ["0", "1", "2"]


def test_the_program_for_several_servers_updates_both(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run_program("from vllm_bucketsync import WeightSync\n\nservers", place, capsys)

    assert printed.split()[-1] == "2"
    assert "bucketsync_http" in printed


def test_the_commands_for_servers_check_push_and_tell(place: Place) -> None:
    beginning = "vllm-bucketsync push checkpoints/step-100 --url http://127.0.0.1:8000 --dry-run"

    checked, pushed, adapter, status = run_commands(beginning, place)

    assert "nothing; it fits the engine" in checked
    assert "The push of 'new'" in pushed
    assert '"model": "policy"' in adapter
    assert '"version": "new"' in status
    assert completed(httpx.Client(base_url=place.url), "policy")


def test_the_command_for_a_trace_writes_one(place: Place) -> None:
    beginning = (
        "vllm-bucketsync push checkpoints/step-100 --url http://127.0.0.1:8000 --trace step-100"
    )

    run_commands(beginning, place)

    assert '"traceEvents"' in (place.root / "step-100.json").read_text()


def test_the_doctor_s_commands_find_nothing_wrong(place: Place) -> None:
    here, cleaned, server = run_commands("vllm-bucketsync doctor\n", place)

    assert "all of it will work" in here
    assert "all of it will work" in cleaned
    assert '"will_all_work": true' in server
