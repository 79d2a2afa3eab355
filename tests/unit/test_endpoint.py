"""Proves what our routes accept, what they refuse, and what they ask of the engine."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY

from vllm_bucketsync.adapters import id_of, spec_of
from vllm_bucketsync.endpoint import MAX_BODY_BYTES, Endpoint
from vllm_bucketsync.messages import PROTOCOL_VERSION
from vllm_bucketsync.served_names import Names

OFFER = {
    "protocol": PROTOCOL_VERSION,
    "token": "t",
    "update_id": "u",
    "endpoints": {"*": "ipc:///x"},
    "engine": 0,
    "connect_timeout_s": 1.0,
    "idle_timeout_s": 1.0,
}
UPDATE = {"offer": OFFER, "version": "17"}
GOOD = {"ok": True, "state": "committed", "num_tensors": 3, "num_bytes": 100}
CALL = ("update_weights_from_bucket", OFFER)
FINISH = ["prefix True", "mm", "encoder", "version 17"]
WHOLE = ["pause wait", CALL, *FINISH, "resume"]
TORN = {"ok": False, "state": "torn", "num_tensors": 0, "num_bytes": 0}


class FakeEngineClient:
    """What the routes use of vLLM's ``EngineClient``."""

    def __init__(self) -> None:
        self.vllm_config = self
        self.parallel_config = self
        self.world_size = 2
        self.worker_extension_cls = "vllm_bucketsync.WorkerExtension"
        self.results: list[dict[str, Any]] = [GOOD, GOOD]
        self.resets = True
        self.is_held = False
        self.asked: list[Any] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append((method, *args))
        await asyncio.sleep(0)
        return self.results

    async def is_paused(self) -> bool:
        return self.is_held

    async def pause_generation(self, *, mode: str) -> None:
        self.asked.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.asked.append("resume")

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.asked.append(f"prefix {reset_running_requests}")
        return self.resets

    async def reset_mm_cache(self) -> None:
        self.asked.append("mm")

    async def reset_encoder_cache(self) -> None:
        self.asked.append("encoder")

    async def update_weight_version(self, version: str) -> None:
        self.asked.append(f"version {version}")

    async def get_weight_version(self) -> str:
        return "default"


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def server(engine: FakeEngineClient) -> Iterator[TestClient]:
    app, endpoint = FastAPI(), Endpoint()
    endpoint.attach_router(app)
    asyncio.run(endpoint.init_state(engine, app.state, Namespace()))
    with TestClient(app, base_url="http://test/v1/bucketsync") as found:
        yield found


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(f"vllm_bucketsync_{name}") or 0.0


def test_a_trainer_learns_what_it_has_to_know_without_asking_the_engine(
    server: TestClient, engine: FakeEngineClient
) -> None:
    found = server.get("info").json()

    assert found["num_workers"] == 2
    assert found["protocol"] == PROTOCOL_VERSION
    assert found["worker_extension_cls"] == "vllm_bucketsync.WorkerExtension"
    assert found["is_updating"] is False
    assert engine.asked == []
    assert server.get("engine").json() == {"is_paused": False, "weight_version": "default"}


def test_an_update_goes_to_every_worker_and_is_counted(
    server: TestClient, engine: FakeEngineClient
) -> None:
    before = {name: metric(name) for name in ("updates_total", "bytes_total", "tensors_total")}

    answer = server.post("update", json=UPDATE)

    assert answer.json() == {"results": [GOOD, GOOD], "drops_caches": True}
    assert engine.asked == WHOLE
    assert metric("version") == 17
    after = {name: metric(name) - value for name, value in before.items()}
    assert after == {"updates_total": 1, "bytes_total": 100, "tensors_total": 3}


def test_a_failed_update_is_an_answer_and_is_counted(
    server: TestClient, engine: FakeEngineClient
) -> None:
    engine.results = [GOOD, TORN]
    failures = metric("failures_total")

    answer = server.post("update", json=UPDATE)
    assert answer.json() == {"results": [GOOD, TORN], "drops_caches": True}
    assert metric("failures_total") == failures + 1
    assert metric("torn") == 1

    engine.results = [GOOD, GOOD]
    server.post("update", json=UPDATE)
    assert metric("torn") == 0


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not a valid update"),
        (b"{", "not a valid update"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field"),
        (b'{"offer": {"protocol": "1"}}', "Expected `int`"),
        (b"\xff\xfe", "not a valid update"),
        (b"[" * 60_000, "not a valid update"),
        (b'{"more": 1}', "unknown field"),
    ],
)
def test_a_body_that_is_no_offer_is_refused_with_what_is_wrong(
    server: TestClient, engine: FakeEngineClient, body: bytes, text: str
) -> None:
    answer = server.post("update", content=body)

    assert answer.status_code == 422
    assert text in answer.json()["detail"]
    assert engine.asked == []


def test_a_body_that_is_too_large_is_refused_before_it_is_read_to_its_end(
    server: TestClient, engine: FakeEngineClient
) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += MAX_BODY_BYTES
            yield b" " * MAX_BODY_BYTES

    for path in ("update", "finish"):
        assert server.post(path, content=endless()).status_code == 413
    assert engine.asked == []


@pytest.mark.parametrize("path", ["update", "status", "release"])
def test_workers_without_the_extension_are_never_asked(
    server: TestClient, engine: FakeEngineClient, path: str
) -> None:
    engine.worker_extension_cls = ""

    answer = server.post(path, json=UPDATE)

    assert answer.status_code == 501
    assert "--worker-extension-cls" in answer.json()["detail"]
    assert engine.asked == []


def test_pause_takes_vllms_words_only(server: TestClient, engine: FakeEngineClient) -> None:
    for mode in ("wait", "abort", "keep"):
        assert server.post("pause", params={"mode": mode}).status_code == 200
    assert server.post("pause").status_code == 200
    assert server.post("resume").status_code == 200
    refused = server.post("pause", params={"mode": "stop"})

    assert refused.status_code == 422
    assert "wait, abort, keep" in refused.json()["detail"]
    assert engine.asked == ["pause wait", "pause abort", "pause keep", "pause wait", "resume"]


STATES = ["committed", "unchanged", "torn", "unknown", None]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("resume_torn", [False, True])
def test_an_engine_goes_on_if_it_is_whole_and_is_cleaned_if_it_is_new(
    server: TestClient, engine: FakeEngineClient, state: str | None, resume_torn: bool
) -> None:
    engine.results = [GOOD | {"state": state}]

    server.post("update", json=UPDATE | {"pause": "keep", "resume_torn": resume_torn})

    expected = ["pause keep", CALL]
    expected += FINISH if state == "committed" else []
    expected += ["resume"] if resume_torn or state in {"committed", "unchanged"} else []
    assert engine.asked == expected


@pytest.mark.parametrize(
    ("was_torn", "is_torn", "goes_on"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_an_engine_that_was_paused_before_goes_on_only_if_it_was_mended(
    server: TestClient, engine: FakeEngineClient, was_torn: bool, is_torn: bool, goes_on: bool
) -> None:
    engine.is_held = True
    engine.results = [GOOD | {"was_torn": was_torn, "is_torn": is_torn}]

    server.post("update", json=UPDATE)

    assert ("resume" in engine.asked) is goes_on


def test_an_update_that_was_aborted_is_no_committed_one(
    server: TestClient, engine: FakeEngineClient
) -> None:
    server.post("update", json=UPDATE)
    updates, failures = metric("updates_total"), metric("failures_total")
    # A worker that does as it is told has not failed.
    engine.results = [GOOD | {"state": "unchanged"}] * 2

    server.post("update", json=UPDATE | {"version": "18"})

    assert (metric("updates_total"), metric("failures_total")) == (updates, failures + 1)
    assert metric("version") == 17


def test_requests_that_do_not_end_in_time_let_the_engine_go_on(
    server: TestClient, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = metric("failures_total")

    async def pause(*, mode: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "pause_generation", pause)

    answer = server.post("update", json=UPDATE | {"offer": OFFER | {"connect_timeout_s": 0.05}})

    assert answer.status_code == 504
    assert "connect_timeout_s" in answer.json()["detail"]
    assert engine.asked == ["resume"]
    assert metric("failures_total") == failures + 1


@pytest.mark.parametrize(
    ("error", "num_failed"), [(None, 0), ({"code": "unknown_tensor", "message": "no place"}, 1)]
)
def test_a_dry_run_that_failed_is_counted_as_the_workers_count_it_and_no_other(
    server: TestClient, engine: FakeEngineClient, error: dict[str, str] | None, num_failed: int
) -> None:
    names = ("failures_total", "updates_total", "update_seconds_count")
    before = [metric(name) for name in names]
    answer = {"ok": error is None, "state": "unchanged", "error": error}
    engine.results = [answer, answer]

    server.post("update", json=UPDATE | {"pause": None})

    after = [metric(name) - value for name, value in zip(names, before, strict=True)]
    assert after == [num_failed, 0, 0]


def test_a_dry_run_pauses_nothing_and_drops_nothing(
    server: TestClient, engine: FakeEngineClient
) -> None:
    updates = metric("updates_total")

    server.post("update", json=UPDATE | {"pause": None})

    assert engine.asked == [CALL]
    assert metric("updates_total") == updates


def test_a_cache_that_could_not_be_dropped_is_said(
    server: TestClient, engine: FakeEngineClient
) -> None:
    engine.resets = False

    assert server.post("update", json=UPDATE).json()["drops_caches"] is False
    assert engine.asked == WHOLE


def test_an_update_is_seen_through_when_whoever_asked_has_gone(engine: FakeEngineClient) -> None:
    app, endpoint = FastAPI(), Endpoint()
    endpoint.attach_router(app)

    async def run() -> None:
        await endpoint.init_state(engine, app.state, Namespace())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asking = asyncio.create_task(client.post("/v1/bucketsync/update", json=UPDATE))
            while not engine.asked:
                await asyncio.sleep(0)
            asking.cancel()
            while app.state.bucketsync.running:
                await asyncio.sleep(0)

    asyncio.run(run())

    assert engine.asked == WHOLE


def test_finish_drops_every_cache_and_records_the_version(
    server: TestClient, engine: FakeEngineClient
) -> None:
    assert server.post("finish", json={"version": "17"}).json() == {"success": True}
    assert engine.asked == FINISH

    engine.resets = False
    assert server.post("finish", json={"version": "17"}).json() == {"success": False}


@pytest.mark.parametrize(
    "body", [{}, {"version": 7}, {"version": "7", "more": 1}, {"version": "v" * 257}]
)
def test_a_version_that_is_none_is_refused(
    server: TestClient, engine: FakeEngineClient, body: dict[str, Any]
) -> None:
    assert server.post("finish", json=body).status_code == 422
    assert engine.asked == []


def test_a_second_update_at_the_same_time_is_refused(engine: FakeEngineClient) -> None:
    app, endpoint = FastAPI(), Endpoint()
    endpoint.attach_router(app)

    async def run() -> list[int]:
        await endpoint.init_state(engine, app.state, Namespace())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = await asyncio.gather(
                *(client.post("/v1/bucketsync/update", json=UPDATE) for _ in range(3))
            )
        return sorted(answer.status_code for answer in answers)

    assert asyncio.run(run()) == [200, 409, 409]
    assert engine.asked == WHOLE


def test_the_server_is_asked_for_nothing_outside_of_what_its_key_guards() -> None:
    app = FastAPI()
    Endpoint().attach_router(app)

    ours = [route.path for route in app.routes if "bucketsync" in getattr(route, "path", "")]  # type: ignore[attr-defined]
    assert len(ours) == 9
    assert all(path.startswith("/v1/bucketsync/") for path in ours)


def test_every_replica_is_heard_and_one_that_is_torn_keeps_the_engine_paused(
    server: TestClient, engine: FakeEngineClient
) -> None:
    class Core:
        engine_ranks_managed = (0, 1)

        async def call_utility_all_async(self, name: str, *args: Any) -> list[list[Any]]:
            engine.asked.append((name, *args))
            return [[GOOD, GOOD], [GOOD, TORN]]

    engine.engine_core = Core()  # type: ignore[attr-defined]

    assert server.get("info").json()["num_workers"] == 4
    assert server.post("update", json=UPDATE).json()["results"] == [GOOD, GOOD, GOOD, TORN]
    rpc = ("collective_rpc", "update_weights_from_bucket", None, (OFFER,), None)
    # What the good ones answered with their old weights is gone, and no version is right.
    assert engine.asked == ["pause wait", rpc, *FINISH[:3]]
    assert len(server.post("status").json()["results"]) == 4


def test_what_vllm_raised_is_told_and_the_next_good_update_lets_the_engine_go_on(
    engine: FakeEngineClient,
) -> None:
    app, endpoint = FastAPI(), Endpoint()
    endpoint.attach_router(app)
    answers: list[Any] = [
        AttributeError("'Worker' object has no attribute 'update_weights_from_bucket'"),
        RuntimeError("a worker is gone"),
        [None],
        [{"state": "nonsense"}],
        [GOOD],
    ]

    async def act(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    engine.collective_rpc = act  # type: ignore[method-assign]
    asyncio.run(endpoint.init_state(engine, app.state, Namespace()))
    found = []
    with TestClient(app, base_url="http://test/v1/bucketsync") as server:
        while answers:
            engine.asked.clear()
            answer = server.post("update", json=UPDATE)
            engine.is_held = "resume" not in engine.asked
            found.append((answer.status_code, engine.is_held))
            if answer.status_code != 200:
                assert "Error: " in answer.json()["detail"]

    # A method that is not there wrote nothing; after the others nobody knows.
    assert found == [(502, False), (502, True), (200, True), (200, True), (200, False)]


SPEC: dict[str, Any] = {
    "name": "policy",
    "lora_int_id": id_of("policy"),
    "lora_path": "bucketsync://policy@17",
}
ADAPTER = UPDATE | {"adapter": SPEC}
HAVE = GOOD | {"adapter": SPEC["name"], "lora_path": SPEC["lora_path"]}
LORA_CALL = ("update_lora_from_bucket", OFFER)
REMOVED = [{"rank": 0, "dp_index": 0, "was_held": True, "error": None}]


class FakeModels:
    """vLLM's ``OpenAIServingModels``, as far as names go."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}

    def is_base_model(self, name: str) -> bool:
        return name == "base"


@pytest.fixture
def models(server: TestClient) -> FakeModels:
    found = FakeModels()
    server.app.state.bucketsync.names = Names(found, make_request=SimpleNamespace)  # type: ignore[attr-defined]
    return found


@pytest.fixture(autouse=True)
def requests_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    double = SimpleNamespace(LoRARequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", double)


def test_an_adapter_gets_its_name_once_every_worker_has_it(
    server: TestClient, engine: FakeEngineClient, models: FakeModels
) -> None:
    for results, names in (([HAVE, TORN], []), ([HAVE, HAVE], ["policy"])):
        engine.results, engine.asked = results, []
        before = metric("version")

        assert server.post("update", json=ADAPTER).status_code == 200

        assert list(models.lora_requests) == names
        assert engine.asked[:2] == ["pause wait", LORA_CALL]
        # The engine's own weights are what they were.
        assert not any("version" in str(one) for one in engine.asked)
        assert metric("version") == before
    found = models.lora_requests["policy"]
    assert (found.lora_name, found.lora_int_id, found.lora_path) == tuple(SPEC.values())
    assert engine.asked[2:] == ["prefix True", "mm", "encoder", "resume"]


@pytest.mark.parametrize(
    "other",
    [GOOD, HAVE | {"adapter": "other"}, HAVE | {"lora_path": "bucketsync://policy@18"}],
)
def test_an_adapter_that_is_not_the_one_that_workers_took_gets_no_name(
    server: TestClient, engine: FakeEngineClient, models: FakeModels, other: dict[str, Any]
) -> None:
    engine.results = [HAVE, other]

    assert server.post("update", json=ADAPTER).status_code == 200

    assert models.lora_requests == {}


@pytest.mark.parametrize(
    "change",
    [
        {"lora_int_id": 1},
        {"lora_path": "some-org/some-repo"},
        {"lora_path": "bucketsync://policy@18"},
        {"name": "two\nlines"},
    ],
)
def test_an_adapter_with_the_number_or_path_of_something_else_is_refused(
    server: TestClient, engine: FakeEngineClient, models: FakeModels, change: dict[str, Any]
) -> None:
    answer = server.post("update", json=UPDATE | {"adapter": SPEC | change})

    assert (answer.status_code, answer.json()["detail"]["code"]) == (422, "adapter")
    assert (engine.asked, models.lora_requests) == ([], {})


def test_an_adapter_that_one_rank_has_not_taken_leaves_the_engine_paused_without_caches(
    server: TestClient, engine: FakeEngineClient, models: FakeModels
) -> None:
    engine.results = [HAVE, {"ok": False, "state": "unchanged"}]

    server.post("update", json=ADAPTER)

    assert engine.asked == ["pause wait", LORA_CALL, *FINISH[:3]]
    assert models.lora_requests == {}
    assert metric("torn") == 1


def test_a_dry_run_of_an_adapter_names_nothing(
    server: TestClient, engine: FakeEngineClient, models: FakeModels
) -> None:
    engine.results = [{"ok": True, "state": "unchanged"}] * 2

    assert server.post("update", json=ADAPTER | {"pause": None}).status_code == 200

    assert models.lora_requests == {}
    assert engine.asked == [LORA_CALL]


def test_a_name_that_stands_for_something_else_is_refused_before_workers_are_asked(
    server: TestClient, engine: FakeEngineClient, models: FakeModels
) -> None:
    models.lora_requests["disk"] = SimpleNamespace(lora_path="/adapters/disk")
    for name in ("base", "disk"):
        spec = msgspec.to_builtins(spec_of(name, version="17"))
        answer = server.post("update", json=UPDATE | {"adapter": spec})

        assert answer.status_code == 422
        detail = answer.json()["detail"]
        assert (detail["code"], detail["details"]["adapter"]) == ("adapter", name)
        assert "cannot be served" in detail["message"]
    server.app.state.bucketsync.names = Names(None, make_request=SimpleNamespace)  # type: ignore[attr-defined]
    assert server.post("update", json=ADAPTER).json()["detail"]["code"] == "adapter"
    assert engine.asked == []


def test_an_adapter_that_is_removed_loses_its_name_before_workers_are_asked(
    server: TestClient, engine: FakeEngineClient, models: FakeModels
) -> None:
    engine.results = [HAVE, HAVE]
    server.post("update", json=ADAPTER)
    engine.results, engine.asked = REMOVED, []
    seen = []

    async def pause(*, mode: str) -> None:
        seen.append(list(models.lora_requests))

    engine.pause_generation = pause  # type: ignore[method-assign]
    answer = server.post("remove_lora", json={"name": "policy"})

    assert answer.json() == {"results": REMOVED}
    assert seen == [[]]
    assert engine.asked == [("bucketsync_remove_lora", "policy"), "resume"]
    # A name of vLLM's own stays, whatever the workers say of it.
    models.lora_requests["disk"] = SimpleNamespace(lora_path="/adapters/disk")
    server.post("remove_lora", json={"name": "disk"})
    assert list(models.lora_requests) == ["disk"]


@pytest.mark.parametrize(
    "results",
    [
        [*REMOVED, REMOVED[0] | {"error": {"code": "busy"}}],
        [None],
        RuntimeError("a worker is gone"),
    ],
)
def test_an_adapter_that_may_still_be_there_keeps_its_name(
    server: TestClient, engine: FakeEngineClient, models: FakeModels, results: Any
) -> None:
    engine.results = [HAVE, HAVE]
    server.post("update", json=ADAPTER)

    async def answer(method: str, args: tuple[Any, ...] = ()) -> Any:
        if isinstance(results, Exception):
            raise results
        return results

    engine.collective_rpc = answer  # type: ignore[method-assign]
    answered = server.post("remove_lora", json={"name": "policy"})

    assert answered.status_code == (502 if isinstance(results, Exception) else 200)
    assert list(models.lora_requests) == ["policy"]


def test_an_adapter_whose_requests_do_not_end_keeps_its_name(
    server: TestClient, engine: FakeEngineClient, models: FakeModels
) -> None:
    engine.results = [HAVE, HAVE]
    server.post("update", json=ADAPTER)
    engine.asked = []

    async def never(*, mode: str) -> None:
        await asyncio.sleep(60)

    engine.pause_generation = never  # type: ignore[method-assign]
    answer = server.post("remove_lora", json={"name": "policy", "timeout_s": 0.05})

    assert answer.status_code == 504
    assert list(models.lora_requests) == ["policy"]
    assert engine.asked == ["resume"]


def test_a_paused_engine_forgets_an_adapter_and_stays_paused(
    server: TestClient, engine: FakeEngineClient
) -> None:
    engine.results, engine.is_held = REMOVED, True

    assert server.post("remove_lora", json={"name": "policy"}).json() == {"results": REMOVED}
    assert engine.asked == [("bucketsync_remove_lora", "policy")]
