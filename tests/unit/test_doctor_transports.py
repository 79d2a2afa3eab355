"""Which trials the doctor makes, and what it makes of their outcomes. No process starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import pytest

from vllm_bucketsync.config import Settings
from vllm_bucketsync.doctor import transports
from vllm_bucketsync.doctor.findings import Finding, State
from vllm_bucketsync.doctor.helpers import HelperError
from vllm_bucketsync.doctor.transports import Deadline, check_transports, trials
from vllm_bucketsync.probe import TransportProbe, probe

GPUS = ["cuda:0", "cuda:1"]


class Stub:
    """Stands for a helper process.

    Attributes:
        made: How many there were.
        asked: Which of them was asked for what, in order.
        act: What an answer is, by act and device; raises for what fails.
    """

    made: ClassVar[int] = 0
    asked: ClassVar[list[tuple[int, str]]] = []
    act: ClassVar[Callable[[str, dict[str, Any]], dict[str, Any]]]

    def __init__(self) -> None:
        self._number = Stub.made
        Stub.made += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, act: str, *, timeout_s: float, **request: Any) -> dict[str, Any]:
        assert 0 < timeout_s <= 10
        Stub.asked.append((self._number, act))
        return {"warnings": []} | Stub.act(act, request)


def works(act: str, request: dict[str, Any]) -> dict[str, Any]:
    devices = [{"device": one, "name": "H200", "uuid": f"GPU-{one}"} for one in GPUS]
    answers: dict[str, dict[str, Any]] = {
        "devices": {"torch": "2.13", "devices": devices},
        "write": {"handle": "h", "digest": "d"},
        "read": {"digest": "d"},
        "close": {},
    }
    return answers[act]


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "Helper", Stub)
    monkeypatch.setattr(Stub, "made", 0)
    monkeypatch.setattr(Stub, "asked", [])
    monkeypatch.setattr(Stub, "act", staticmethod(works), raising=False)


def gpu_probe() -> TransportProbe:
    found = probe({}, root="/no/such/root", platform="linux")
    return dataclasses.replace(found, kind="cuda_ipc")


def check(**settings: Any) -> dict[str, Finding]:
    found = check_transports(Settings(**settings), probe=gpu_probe(), deadline=Deadline.after(10.0))
    return {one.name: one for one in found}


def test_each_device_is_tried_with_each_transport_and_the_first_with_each_other() -> None:
    assert [trial.name for trial in trials(["cuda:0", "cuda:1", "cuda:2"])] == [
        "shm, cpu",
        *(f"shm, cuda:{index}" for index in range(3)),
        *(f"cuda_ipc, cuda:{index}" for index in range(3)),
        "cuda_ipc, cuda:0 to cuda:1",
        "cuda_ipc, cuda:0 to cuda:2",
    ]
    assert [trial.name for trial in trials([])] == ["shm, cpu"]


def test_where_all_works_two_processes_are_enough() -> None:
    found = check()

    assert [one.state for one in found.values()] == [State.OK] * (1 + 6)
    assert "GPU-cuda:1" in found["devices"].found
    assert Stub.made == 3


def test_memory_is_given_back_after_each_trial_by_the_reader_first() -> None:
    check()

    devices, *asked = Stub.asked
    assert devices == (0, "devices")
    assert asked == [(1, "write"), (2, "read"), (2, "close"), (1, "close")] * 6


def test_bytes_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(act: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"digest": "other"} if act == "read" else works(act, request)

    monkeypatch.setattr(Stub, "act", staticmethod(differs))

    found = check()["shm, cpu"]

    assert found.state is State.FAILED
    assert "not those written" in found.found


def test_one_that_fails_costs_no_other_and_gets_new_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(act: str, request: dict[str, Any]) -> dict[str, Any]:
        if (act, request.get("kind"), request.get("device")) == ("read", "cuda_ipc", "cuda:1"):
            raise HelperError("the process that tried it died of SIGSEGV")
        return works(act, request)

    monkeypatch.setattr(Stub, "act", staticmethod(refuses))

    found = check()

    failed = [one.name for one in found.values() if one.state is State.FAILED]
    assert failed == ["cuda_ipc, cuda:1", "cuda_ipc, cuda:0 to cuda:1"]
    assert "SIGSEGV" in found["cuda_ipc, cuda:1"].found
    assert "updates go over shm" in found["cuda_ipc, cuda:1"].advice
    assert len(found) == 1 + 6
    assert Stub.made == 1 + 2 + 2


def test_a_transport_that_is_asked_for_has_no_other_to_fall_back_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(act: str, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("kind") == "cuda_ipc":
            raise HelperError("refused")
        return works(act, request)

    monkeypatch.setattr(Stub, "act", staticmethod(refuses))

    advice = check(transport="cuda_ipc")["cuda_ipc, cuda:0"].advice

    assert "set VLLM_BUCKETSYNC_TRANSPORT to auto" in advice


def test_what_is_warned_of_on_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(act: str, request: dict[str, Any]) -> dict[str, Any]:
        return works(act, request) | {"warnings": ["not pinned"] if act in {"read"} else []}

    monkeypatch.setattr(Stub, "act", staticmethod(warns))

    found = check()["shm, cuda:0"]

    assert (found.state, found.advice) == (State.WARN, "not pinned")


def test_a_torch_that_finds_no_gpu_where_there_is_one_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(act: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"torch": "2.13+cpu", "devices": []} if act == "devices" else works(act, request)

    monkeypatch.setattr(Stub, "act", staticmethod(blind))

    found = check()

    assert found["devices"].state is State.WARN
    assert "torch 2.13+cpu finds none" in found["devices"].found
    assert list(found) == ["devices", "shm, cpu"]


def test_a_torch_that_cannot_be_asked_is_a_failure_and_the_rest_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hangs(act: str, request: dict[str, Any]) -> dict[str, Any]:
        if act == "devices":
            raise HelperError("no answer")
        return works(act, request)

    monkeypatch.setattr(Stub, "act", staticmethod(hangs))

    found = check()

    assert found["devices"].state is State.FAILED
    assert found["shm, cpu"].state is State.OK


@pytest.mark.parametrize(
    ("transport", "state"), [("auto", State.SKIPPED), ("cuda_ipc", State.FAILED)]
)
def test_without_a_gpu_cuda_ipc_is_missed_only_where_it_is_asked_for(
    transport: str, state: State
) -> None:
    without = probe({}, root="/no/such/root", platform="linux")
    found = check_transports(
        Settings(transport=transport), probe=without, deadline=Deadline.after(10.0)
    )

    by_name = {one.name: one for one in found}
    assert by_name["cuda_ipc"].state is state
    assert by_name["shm, cpu"].state is State.OK
    assert without.reason in by_name["cuda_ipc"].found
