"""Updates of a real ``vllm serve`` under traffic, which ``RemoteOpenAIServer`` starts.

Through our own route, with the server's key: vLLM's development mode is off. What the server
answers is compared with itself, started from the same weights or adapters on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from support.traffic import PROMPTS, Answer, Traffic, ask
from tests.utils import RemoteOpenAIServer

from vllm_bucketsync import EngineUnreachableError, UnknownTensorError, WeightSync

KEY = RemoteOpenAIServer.DUMMY_API_KEY
ARGUMENTS = [
    *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "128", "--max-num-seqs", "4", "--enable-prefix-caching"),
    *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"),
    *("--worker-extension-cls", "vllm_bucketsync.WorkerExtension"),
]
ENVIRONMENT = {
    "VLLM_PLUGINS": "bucketsync,bucketsync_http",
    "VLLM_API_KEY": KEY,
    "VLLM_SERVER_DEV_MODE": "0",
}


@dataclass(frozen=True)
class Stage:
    """A running server, and what it answers before anything was pushed to it.

    Attributes:
        old: Answers of the weights that it was started from.
        with_adapter: Answers with the adapter that it was started with.
    """

    server: Any
    old: dict[str, Answer]
    with_adapter: dict[str, Answer]

    @property
    def url(self) -> str:
        return str(self.server.url_root)

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def answers(self, model: str = "demo") -> dict[str, Answer]:
        with self.client() as http:
            return {prompt: ask(http, prompt, model=model) for prompt in PROMPTS}

    def models(self) -> set[str]:
        with self.client() as http:
            return {one["id"] for one in http.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def stage(files: Any) -> Iterator[Stage]:
    arguments = [*ARGUMENTS, "--lora-modules", f"disk={files.adapters[1]}"]
    with RemoteOpenAIServer(str(files.old), arguments, env_dict=ENVIRONMENT) as server:
        started = Stage(server, {}, {})
        yield Stage(server, started.answers(), started.answers("disk"))


@pytest.fixture
def sync(stage: Stage, files: Any) -> Iterator[WeightSync]:
    with WeightSync(stage.url, api_key=KEY) as found:
        yield found
        found.push(files.old, version="old")


def test_no_request_fails_and_each_answer_is_of_one_version_while_weights_change(
    stage: Stage, sync: WeightSync, files: Any
) -> None:
    sync.push(files.new, version="new")
    versions = {"old": stage.old, "new": stage.answers()}
    assert versions["old"] != versions["new"]

    with Traffic(stage.client) as traffic:
        for number in range(8):
            report = sync.push((files.old, files.new)[number % 2], version=number)
            assert report.engines == (f"{stage.url} (bucketsync_http)",)

    assert traffic.failures == []
    seen = dict.fromkeys(versions, 0)
    for prompt, answer in traffic.answers:
        (version,) = [name for name, answers in versions.items() if answers[prompt] == answer]
        seen[version] += 1
    assert all(seen.values()), seen
    assert stage.answers() == versions["new"]
    # Back at the first weights, the answers are those of the start.
    sync.push(files.old, version="old")
    assert stage.answers() == stage.old


def test_a_pushed_adapter_is_served_by_its_name_as_the_one_from_disk(
    stage: Stage, sync: WeightSync, files: Any
) -> None:
    assert stage.models() == {"demo", "disk"}
    for seed in (2, 1):
        sync.push_lora(files.trained(seed), name="policy", version=seed)
        assert (stage.answers("policy") == stage.with_adapter) is (seed == 1)
    assert stage.models() == {"demo", "disk", "policy"}
    assert stage.answers() == stage.old

    assert sync.remove_lora("policy")
    assert stage.models() == {"demo", "disk"}


def test_what_does_not_fit_and_who_has_no_key_is_refused_while_the_server_goes_on(
    stage: Stage, sync: WeightSync, files: Any
) -> None:
    with pytest.raises(UnknownTensorError) as caught:
        sync.push({"model.nothing": torch.ones(1)}, version="wrong")
    assert caught.value.engine_state == "unchanged"
    with (
        WeightSync(stage.url, api_key="another") as stranger,
        pytest.raises(EngineUnreachableError, match="api_key="),
    ):
        stranger.push(files.new, version="stolen")
    with stage.client() as http:
        assert http.post("/collective_rpc", json={"method": "check_health"}).status_code == 404
    assert stage.answers() == stage.old
