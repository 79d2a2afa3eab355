"""The doctor on a running server: what it makes of what the server and its workers say."""

from __future__ import annotations

from typing import Any, Self

import pytest

from vllm_bucketsync import __version__
from vllm_bucketsync.doctor import server
from vllm_bucketsync.doctor.findings import Finding, State
from vllm_bucketsync.errors import (
    BucketSyncError,
    ChannelTimeoutError,
    EngineAsleepError,
    EngineUnreachableError,
)
from vllm_bucketsync.messages import PROTOCOL_VERSION

URL = "http://127.0.0.1:8000"
WORKER = {
    "engine": 0,
    "rank": 0,
    "dp_index": 0,
    "pid": 4711,
    "device": "cpu",
    "version": None,
    "is_torn": False,
    "is_asleep": False,
    "plugin_version": __version__,
    "protocol": PROTOCOL_VERSION,
    "transport": None,
}


class Fake:
    """Stands for the server, as ``HttpEngine`` and as ``WeightSync``.

    Attributes:
        name: As ``HttpEngine`` has it.
        key: What it was asked with.
        pushed: What was pushed, and how.
        refusal: What a push raises.
    """

    name = f"{URL} (bucketsync_http)"

    def __init__(self) -> None:
        self.key: str | None = None
        self.said: dict[str, Any] = {"worker_extension_cls": "Extension", "is_paused": False}
        self.workers: list[dict[str, Any]] = [WORKER]
        self.pushed: list[dict[str, Any]] = []
        self.not_ready: BucketSyncError | None = None
        self.refusal: BucketSyncError | None = None
        self.is_closed = False

    def engine(self, url: str, *, api_key: str | None) -> Self:
        assert url == URL
        self.key = api_key
        return self

    def sync(self, engine: object, **_: Any) -> Self:
        assert engine is self
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def check_ready(self) -> None:
        if self.not_ready is not None:
            raise self.not_ready

    def facts(self) -> dict[str, Any]:
        return self.said

    def status(self) -> list[dict[str, Any]]:
        return self.workers

    def push(self, source: Any, **options: Any) -> None:
        self.pushed.append({"names": [name for name, _ in source.named_buffers()], **options})
        if self.refusal is not None:
            raise self.refusal


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    monkeypatch.setattr(server, "HttpEngine", found.engine)
    monkeypatch.setattr(server, "WeightSync", found.sync)
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")
    return found


def check(**options: Any) -> dict[str, Finding]:
    found = server.check_server(URL, **options)
    return {one.name.removeprefix(URL).removeprefix(": "): one for one in found}


def test_a_server_of_which_all_is_well(fake: Fake) -> None:
    found = check()

    assert [one.state for one in found.values()] == [State.OK] * 5
    assert list(found) == ["", "versions", "workers", "requests", "an update"]
    assert "(bucketsync_http), with Extension" in found[""].found
    assert "rank 0 on cpu, pid 4711: the weights it started with" in found["workers"].found
    assert fake.is_closed


def test_what_is_tried_writes_nothing_and_has_nothing_that_an_engine_could_lack(fake: Fake) -> None:
    check()

    (pushed,) = fake.pushed
    assert pushed["dry_run"] is True
    assert pushed["partial"] == ["*"]
    # Of what an engine has no place for, a buffer alone is no error.
    assert pushed["names"] == ["vllm_bucketsync_doctor"]


@pytest.mark.parametrize(("given", "key"), [(None, "of-the-environment"), ("mine", "mine")])
def test_the_key_is_handed_on(fake: Fake, given: str | None, key: str) -> None:
    check(api_key=given)

    assert fake.key == key


def test_a_server_that_does_not_answer_is_one_failure_with_its_advice(fake: Fake) -> None:
    fake.not_ready = EngineUnreachableError("no answer; is the server up", url=URL)

    (found,) = check().values()

    assert found.state is State.FAILED
    assert found.found == "EngineUnreachableError: no answer"
    assert found.advice == "is the server up"
    assert fake.pushed == []


@pytest.mark.parametrize(
    ("said", "state", "text"),
    [
        ({"plugin_version": "0.0.1"}, State.WARN, "0.0.1 (protocol"),
        ({"protocol": PROTOCOL_VERSION + 1}, State.FAILED, f"protocol {PROTOCOL_VERSION + 1}"),
        ({"plugin_version": None, "protocol": None}, State.FAILED, "None (protocol None)"),
    ],
)
def test_versions_that_differ_are_told(
    fake: Fake, said: dict[str, Any], state: State, text: str
) -> None:
    fake.workers = [WORKER, WORKER | {"rank": 1} | said]

    found = check()["versions"]

    assert found.state is state
    assert text in found.found


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"is_asleep": True}, "the weights of rank 1 are asleep"),
        ({"is_torn": True}, "rank 1 of engine 0 holds parts of two sets of weights"),
        ({"version": "step-2"}, "the workers of engine 0 hold different weights"),
    ],
)
def test_workers_that_cannot_serve_or_be_pushed_to_are_a_failure(
    fake: Fake, said: dict[str, Any], text: str
) -> None:
    fake.workers = [WORKER, WORKER | {"rank": 1} | said]

    found = check()["workers"]

    assert found.state is State.FAILED
    assert text in found.found


@pytest.mark.parametrize(
    ("said", "text"),
    [({"is_paused": True}, "it is paused"), ({"is_updating": True}, "an update is running")],
)
def test_requests_that_are_held_back_are_warned_of(
    fake: Fake, said: dict[str, Any], text: str
) -> None:
    fake.said |= said

    found = check()["requests"]

    assert found.state is State.WARN
    assert text in found.found


@pytest.mark.parametrize(
    "error",
    [
        EngineAsleepError("the weights are asleep; wake them up"),
        ChannelTimeoutError(timeout_s=30, waiting_for="rank 0's hello", advice="wake them up"),
    ],
)
def test_workers_that_cannot_be_reached_are_a_failure(fake: Fake, error: BucketSyncError) -> None:
    fake.refusal = error

    found = check()["an update"]

    assert found.state is State.FAILED
    assert found.found.startswith(f"{type(error).__name__}: ")
    assert found.advice == "wake them up"
