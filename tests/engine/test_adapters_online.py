"""A server and a tensor-parallel ``AsyncLLM`` take adapters together, and serve them by name.

The server is a real one, with its key and without vLLM's flag for loading adapters while it
runs. What adapters answer is compared with the same ones on disk: the server was started with
those, and the ``AsyncLLM`` reads them when it is asked. Prefix caching is on in both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from support import adapters
from support.adapter_tensors import request_of, trained
from support.adapters import Outputs, from_disk
from support.async_engines import Running, running_async
from support.process_engines import EXTENSION

from vllm_bucketsync import (
    AdapterConfigError,
    AdapterError,
    AdapterModuleError,
    WeightSync,
)
from vllm_bucketsync.cli.demo_model import WORDS, build_checkpoint
from vllm_bucketsync.cli.servers import Server

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "a-key-of-the-test"
SEEDS = (1, 2)
# More than one block of 128 tokens, so that its prefix is kept.
PROMPT = " ".join(WORDS[index * 7 % len(WORDS)] for index in range(180))


@dataclass(frozen=True)
class Stage:
    """Both engines, their base weights, and what the adapters on disk answer."""

    server: Server
    running: Running
    folder: Path
    truth: dict[int, Outputs]
    answers: dict[int, tuple[Any, ...]]

    @property
    def engines(self) -> list[Any]:
        return [self.server.url, self.running.llm]

    def ask(self, model: str) -> httpx.Response:
        body = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": 6,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        with httpx.Client(base_url=self.server.url, headers=self._key, timeout=60) as http:
            return http.post("/v1/completions", json=body)

    def answer(self, model: str) -> tuple[tuple[Any, ...], int]:
        """Return what the server answers, and how much of the prompt was in its cache."""
        answer = self.ask(model).raise_for_status().json()
        choice, details = answer["choices"][0], answer["usage"]["prompt_tokens_details"]
        return (choice["text"], *choice["logprobs"]["token_logprobs"]), details["cached_tokens"]

    def says(self, name: str, report: Any) -> tuple[int, int]:
        """Return whose adapter the server and the AsyncLLM answer with, by seed."""
        answer, _ = self.answer(name)
        outputs = in_words(self.running, request_of(report))
        (on_server,) = [seed for seed, truth in self.answers.items() if truth == answer]
        (in_llm,) = [seed for seed, truth in self.truth.items() if truth == outputs]
        return on_server, in_llm

    def names(self) -> list[str]:
        with httpx.Client(base_url=self.server.url, headers=self._key, timeout=60) as http:
            return [model["id"] for model in http.get("/v1/models").json()["data"]]

    @property
    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}"}


def in_words(running: Running, request: Any = None) -> Outputs:
    # Fewer words than the tiny models of other tests have tokens.
    asked = [running.ask(prompt, request) for prompt in ([5, 17, 123, 42, 60], [9] * 12)]
    return [answer.result(60) for answer in asked]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with (
        tempfile.TemporaryDirectory(prefix="bs-") as name,
        pytest.MonkeyPatch.context() as environment,
    ):
        root = Path(name)
        build_checkpoint(root / "base", seed=0)
        folders = {
            seed: adapters.saved(trained(root / "base", seed), root / f"disk-{seed}")
            for seed in SEEDS
        }
        environment.setenv("VLLM_SERVER_DEV_MODE", "0")
        environment.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
        environment.setenv("VLLM_PLUGINS", "bucketsync,bucketsync_http")
        arguments = ["--worker-extension-cls", "vllm_bucketsync.WorkerExtension"]
        arguments += ["--api-key", KEY, "--enable-prefix-caching", "--max-model-len", "256"]
        arguments += ["--enable-prompt-tokens-details", "--enable-lora", "--max-lora-rank", "8"]
        arguments += ["--max-loras", "2", "--max-cpu-loras", "4", "--lora-modules"]
        arguments += [f"disk-{seed}={folder}" for seed, folder in folders.items()]
        start = Server.start(root / "base", log=root / "log", arguments=arguments)
        environment.delenv("VLLM_PLUGINS")
        with (
            start as server,
            running_async(
                root / "base", num_ranks=2, worker_extension_cls=EXTENSION, **adapters.LORA
            ) as running,
        ):
            server.wait_until_ready()
            truth = {0: in_words(running)}
            truth |= {
                seed: in_words(running, from_disk(folder, seed)) for seed, folder in folders.items()
            }
            found = Stage(server, running, root / "base", truth, {})
            for seed, model in ((0, "demo"), (1, "disk-1"), (2, "disk-2")):
                found.answers[seed], _ = found.answer(model)
            assert len(set(map(str, truth.values()))) == len(set(found.answers.values())) == 3
            yield found


@pytest.fixture
def sync(stage: Stage) -> Iterator[WeightSync]:
    with WeightSync(stage.engines, api_key=KEY) as found:
        yield found
        for name in {one["name"] for worker in found.status() for one in worker["adapters"]}:
            assert found.remove_lora(name)
        assert stage.names() == ["demo", "disk-1", "disk-2"]


def test_both_engines_serve_what_was_pushed_under_its_name_and_replace_it_at_once(
    stage: Stage, sync: WeightSync
) -> None:
    # A server that has just started knows no names: the request never gets to a worker.
    assert stage.ask("policy").status_code == 404
    for version, seed in enumerate((1, 2, 1)):
        report = sync.push_lora(trained(stage.folder, seed), name="policy", version=version)
        assert report.num_workers == 3
        assert report.transport == "shm"
        # Nothing of the prompt comes from the cache that the old version filled.
        answer, num_cached = stage.answer("policy")
        assert (answer, num_cached) == (stage.answers[seed], 0)
        assert stage.answer("policy") == (answer, 128)
        assert stage.says("policy", report) == (seed, seed)
        assert stage.names() == ["demo", "disk-1", "disk-2", "policy"]
        assert {one["adapters"][0]["version"] for one in sync.status()} == {str(version)}
    assert stage.answer("demo")[0] == stage.answers[0]

    assert sync.remove_lora("policy")
    assert stage.ask("policy").status_code == 404
    assert [one["adapters"] for one in sync.status()] == [[], [], []]


def test_buckets_of_any_size_carry_several_adapters(stage: Stage, sync: WeightSync) -> None:
    reports = {}
    for seed, slot_size in ((1, 1024), (2, "64KiB")):
        with WeightSync(stage.engines, api_key=KEY, slot_size=slot_size) as small:
            model = trained(stage.folder, seed)
            reports[seed] = small.push_lora(model, name=f"policy-{seed}", version=1)
    assert reports[1].num_buckets > 100
    for seed, report in reports.items():
        assert stage.says(report.name, report) == (seed, seed)


def test_all_ranks_of_all_engines_take_an_adapter_or_none_does(
    stage: Stage, sync: WeightSync
) -> None:
    old = sync.push_lora(trained(stage.folder, 1), name="policy", version=1)
    stage.running.run(stage.running.llm.collective_rpc("probe_adapters_break", args=(1,)))

    with pytest.raises(AdapterError, match="no such kernel on this rank") as caught:
        sync.push_lora(trained(stage.folder, 2), name="policy", version=2)

    assert (caught.value.rank, caught.value.engine_state) == (1, "unchanged")
    assert stage.says("policy", old) == (1, 1)
    assert {one["adapters"][0]["version"] for one in sync.status()} == {"1"}
    with pytest.raises(AdapterConfigError, match="max_lora_rank"):
        sync.push_lora(trained(stage.folder, 2, r=16), name="policy", version=2)
    names = {"model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(4, 160)}
    with pytest.raises(AdapterModuleError):
        sync.push_lora((names, {"r": 4, "lora_alpha": 4}), name="new", version=1)
    assert stage.ask("new").status_code == 404
    assert stage.says("policy", old) == (1, 1)
    report = sync.push_lora(trained(stage.folder, 2), name="policy", version=2)
    assert stage.says("policy", report) == (2, 2)


def test_a_name_that_requests_have_for_something_else_is_refused(
    stage: Stage, sync: WeightSync
) -> None:
    for name in ("demo", "disk-1"):
        with pytest.raises(AdapterError, match="give it another name") as caught:
            sync.push_lora(trained(stage.folder, 2), name=name, version=1)
        assert caught.value.adapter == name
    assert not sync.remove_lora("disk-1")
    assert stage.answer("disk-1")[0] == stage.answers[1]


def test_base_weights_change_under_an_adapter(stage: Stage, sync: WeightSync) -> None:
    report = sync.push_lora(trained(stage.folder, 1), name="policy", version=1)
    merged = trained(stage.folder, 2)

    sync.push(merged, version="merged", merge=True)

    # Base and adapter are the other way round: the sum is the same, the rounding is not.
    assert stage.answer("demo")[0] != stage.answers[0]
    assert stage.answer("policy")[0] not in stage.answers.values()
    sync.push(stage.folder, version="back")
    assert stage.says("policy", report) == (1, 1)
    assert stage.answer("demo")[0] == stage.answers[0]


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_requests_that_run_end_on_the_old_adapter_or_go_on_with_the_new_one(
    mode: str, stage: Stage
) -> None:
    prompt = [5, 17, 123, 42]
    running = stage.running
    with WeightSync(running.llm) as sync:
        ends = {}
        for seed in (2, 1):
            report = sync.push_lora(trained(stage.folder, seed), name="policy", version=seed)
            ends[seed] = running.ask(prompt, request_of(report), num_tokens=100).result(60)
        assert ends[1] != ends[2]

        asked = running.ask(prompt, request_of(report), num_tokens=100)
        report = sync.push_lora(trained(stage.folder, 2), name="policy", version=3, pause=mode)
        was_running = not asked.done()
        answer = asked.result(60)

        assert running.ask(prompt, request_of(report), num_tokens=100).result(60) == ends[2]
        assert len(answer) == 100
        assert was_running is (mode == "keep")
        if mode == "wait":
            assert answer == ends[1]
        else:
            assert answer not in ends.values()
            assert answer[0] == ends[1][0]
        asked = running.ask(prompt, request_of(report), num_tokens=100)
        assert sync.remove_lora("policy")
        assert asked.done()
        assert asked.result(0) == ends[2]


def test_memory_of_trainer_and_workers_stays_flat(stage: Stage) -> None:
    running, model = stage.running, trained(stage.folder, 1, r=8)

    def resident() -> list[int]:
        workers = running.run(running.llm.collective_rpc("probe_memory"))
        return [psutil.Process().memory_info().rss, *workers]

    with WeightSync(running.llm) as sync:
        for number in range(200):
            if number == 20:
                before = resident()
            report = sync.push_lora(model, name="policy", version=number)
        after = resident()
        sync.remove_lora("policy")

    grown = [new - old for new, old in zip(after, before, strict=True)]
    # One copy that was forgotten each time would be 180 of them.
    assert max(grown) < 90 * report.num_bytes, (grown, report.num_bytes)
