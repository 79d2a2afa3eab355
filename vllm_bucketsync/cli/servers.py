"""A real vLLM server in processes of its own, started and stopped by a command.

It listens on the loopback interface only, wants a key that is made for it, and is updated
through our own route: vLLM's development mode is off.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Self

import httpx

from vllm_bucketsync.config import API_KEY_ENV

from .exits import CommandError

START_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.25
_LOG_TAIL_LINES = 25
_MODEL_NAME = "demo"
# Tells whether a process is there, and does nothing to it.
_NO_SIGNAL = 0

# Only what the user has not set: tiny engines, nothing from a network, nothing reported.
_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    # Some CPUs advertise AMX tiles that they cannot use: SIGILL without this.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
PLUGINS = ("bucketsync", "bucketsync_http")
_PLUGIN_GROUPS = "vllm."
# vLLM loads these only where they are named; all others also where nothing is named.
_ENDPOINT_GROUP = "vllm.endpoint_plugins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine generated, greedily, from one prompt.

    Attributes:
        prompt: What was asked.
        text: What was generated, as words.
        token_ids: The same, as the model has it.
        logprobs: Log-probability of each of the tokens.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Server:
    """One vLLM server, from ``start`` to the end of its ``with``.

    Attributes:
        url: Where it listens.
        api_key: What it asks for.
        log: The file that holds everything that its processes print.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], *, url: str, api_key: str, log: Path
    ) -> None:
        self.url = url
        self.api_key = api_key
        self.log = log
        self._process = process
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
        )

    @classmethod
    def start(cls, checkpoint: Path, *, log: Path, arguments: Sequence[str] = ()) -> Self:
        """Start a server, and return before it is ready.

        Args:
            checkpoint: Folder of the model.
            log: Where its output goes; overwritten.
            arguments: More arguments for vLLM's server. A key among them replaces
                ``api_key``.
        """
        port, api_key = _free_port(), secrets.token_urlsafe()
        # `vllm serve` asks for a distribution called vllm, which the CPU build is not.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(checkpoint), "--served-model-name", _MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
        command += ["--max-num-seqs", "4", "--gpu-memory-utilization", "0.2"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_server_environment(os.environ, api_key=api_key, folder=log.parent),
                # A group of its own: stop() then reaches its workers, and Ctrl-C only us.
                start_new_session=True,
            )
        return cls(process, url=f"http://127.0.0.1:{port}", api_key=api_key, log=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return as soon as the server answers.

        Raises:
            CommandError: It ended, or did not answer in time; the text holds the
                last lines of its log.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._is_healthy():
                return
            try:
                code = self._process.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            raise self._failed(f"ended with code {code} while starting")
        raise self._failed(f"did not answer within {timeout_s:g} s")

    def complete(self, prompt: str, *, num_tokens: int) -> Completion:
        """Generate greedily.

        Raises:
            CommandError: The engine refused, or is gone.
        """
        request = {
            "model": _MODEL_NAME,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        try:
            answer = self._http.post("/v1/completions", json=request)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise self._failed(f"did not generate: {error}") from error
        choice = answer.json()["choices"][0]
        return Completion(
            prompt=prompt,
            text=choice["text"].strip(),
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
        )

    def ask_to_stop(self) -> None:
        """Ask the server to end, and do not wait for it; ``stop`` does."""
        self._process.terminate()

    def stop(self) -> None:
        """End the server and its workers. Idempotent.

        The server is asked, and given time to unlink what it shares with its workers;
        what is left of its processes is then killed.
        """
        if self._http.is_closed:
            return
        self._http.close()
        self.ask_to_stop()
        try:
            self._wait_for_group()
        finally:
            # Also when a second Ctrl-C comes meanwhile.
            signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=STOP_TIMEOUT_S)

    def _wait_for_group(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while signal_group(self._process.pid, _NO_SIGNAL) and time.monotonic() < deadline:
            # Reaps the server, which would otherwise count as alive.
            self._process.poll()
            time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        try:
            return self._http.get("/health").is_success
        except httpx.HTTPError:
            return False

    def _failed(self, what: str) -> CommandError:
        return CommandError(with_logs(f"the engine {what}; its whole log is {self.log}", self.log))


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine or a trainer: what is given comes first."""
    return {**_ENVIRONMENT, **given}


def plugins(named: str | None) -> str:
    """Return a ``VLLM_PLUGINS`` that loads ours, and what would be loaded without it.

    Args:
        named: The user's own ``VLLM_PLUGINS``; ``None`` where there is none, and vLLM
            would load every plugin that adds no route.
    """
    if named is None:
        points = entry_points()
        groups = {group for group in points.groups if group.startswith(_PLUGIN_GROUPS)}
        groups.discard(_ENDPOINT_GROUP)
        names = sorted({point.name for group in groups for point in points.select(group=group)})
    else:
        names = [name.strip() for name in named.split(",") if name.strip()]
    return ",".join(dict.fromkeys([*names, *PLUGINS]))


def _server_environment(given: Mapping[str, str], *, api_key: str, folder: Path) -> dict[str, str]:
    found = {
        **environment(given),
        # Not as an argument: those are read by every user of the machine.
        API_KEY_ENV: api_key,
        "VLLM_PLUGINS": plugins(given.get("VLLM_PLUGINS")),
        # vLLM leaves its own sockets behind; here they go with the log's folder.
        "VLLM_RPC_BASE_PATH": str(folder),
    }
    found.pop("VLLM_SERVER_DEV_MODE", None)
    return found


def with_logs(reason: str, *logs: Path) -> str:
    """Return an error's text: the last lines of each log, and the reason where eyes end."""
    lines: list[str] = []
    for log in logs:
        lines.append(f"the last lines of {log}:")
        lines += log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return "\n".join([*lines, reason])


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a group of processes; return whether there was one left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    # It may be taken before vLLM binds it; vLLM then ends at once and says so.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
