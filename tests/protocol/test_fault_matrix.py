"""Proves that whatever goes wrong at either end, in any state, ends well for the other end.

Real processes: a trainer and two workers. One of them is killed, stopped, cut off, silent,
raises, or says what it may not; ``support.fault_table`` says in which states. After each:

- The others have a typed error, within a second of a death or a broken rule, and at the
  deadline of what is silent, which says where the update was and who is to blame.
- Every worker says *unchanged*, *committed* or *torn*, and its bytes do not contradict it.
- The next update works without a restart, and nothing is left of what failed.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_engine import FakeEngine
from support.fault_table import (
    FAULTS,
    MESSAGES,
    TRAINER,
    WORKER,
    Case,
    all_cases,
    answered,
    cases,
    named,
    raised,
)
from support.striking import Strike, hashes_of, held
from support.struck_trainer import (
    SLOT_SIZE,
    Order,
    StruckTrainer,
    failing,
    tensors,
)

from vllm_bucketsync import errors
from vllm_bucketsync.channel import LINGER_S
from vllm_bucketsync.codec import encode
from vllm_bucketsync.identity import doing
from vllm_bucketsync.session import State
from vllm_bucketsync.sync import WeightSync

# Seconds within which a death, or a broken rule, must be known to the others.
AT_ONCE_S = 1.0
CONNECT_S = 1.0
IDLE_S = 0.6
COMMIT_S = 0.6
# Beyond a deadline: for the others to be told, and a call that does not return.
AFTERWARDS_S = 3.0
NUM_WORKERS = 2
ROUNDING_BYTES = 32 << 20
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
PARAMETERS = [
    pytest.param(case, id=str(case), marks=() if case.is_quick else pytest.mark.long)
    for case in cases()
]


class Stage:
    """Two workers and a trainer, kept from case to case for as long as they live."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.fill = 0
        self.begin()

    def begin(self) -> None:
        device = self.device
        self.engine = FakeEngine("live", world_size=NUM_WORKERS, device=device)
        self.has_respawned = False
        self.baseline: list[dict[str, int]] = []
        # Drivers and allocators take what they need with the first update, and keep it.
        with WeightSync(self.engine, slot_size=SLOT_SIZE) as sync:
            sync.push(tensors(self.next_fill(), device), version=self.fill)
        self.begin_trainer()

    def begin_trainer(self) -> None:
        """Start a trainer, and have it take what its first update takes."""
        self.trainer = StruckTrainer(self.device)
        self.trainer.push(Order(fill=self.next_fill(), settings={}), self.engine)
        assert self.trainer.told(self.engine)[0] == ("", "", "committed")
        # There is another process on the device.
        self.has_respawned = True

    def next_fill(self) -> int:
        self.fill += 1
        return self.fill

    def close(self) -> None:
        self.trainer.end()
        self.engine.stop()


@pytest.fixture(scope="module", params=DEVICES)
def stage(request: pytest.FixtureRequest, _fork_server: None) -> Iterator[Stage]:
    if request.param.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = Stage(request.param)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(_fork_server: None, _session_dir: Path) -> Iterator[None]:
    """As for all tests of this folder, but processes are replaced: only how many counts."""
    files, before = set(_session_dir.rglob("*")), held()
    yield
    gc.collect()
    assert set(_session_dir.rglob("*")) == files
    # The kernel may be a moment late with what a process had that has just ended.
    deadline_s = time.monotonic() + AT_ONCE_S
    while has_more(held(), before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not has_more(held(), before), (held(), before)


def has_more(now: dict[str, int], then: dict[str, int]) -> bool:
    return any(now[name] > then[name] for name in then)


def deadlines(case: Case, directory: str) -> dict[str, Any]:
    """Return settings: short for what the case waits for, long for what it does not."""
    waits = case.fault in {"stop", "silence"}
    is_early = case.state in {State.GREETING, State.GREETED, State.OPENING}
    # What was cut before it was read is waited for as well.
    is_missed = case.fault == "cut" and case.state is State.GREETED
    return {
        "dir": directory,
        "connect_timeout_s": CONNECT_S if (waits and is_early) or is_missed else 10.0,
        "idle_timeout_s": IDLE_S if waits else 10.0,
        "commit_timeout_s": COMMIT_S if waits else 10.0,
    }


def strike_of(case: Case, stamp: Path) -> Strike:
    faults = {"junk": "say", "wrong": "say"}
    data = b"\xffjunk" if case.fault == "junk" else b""
    if case.fault == "wrong":
        data = encode(MESSAGES[case.message])
    return Strike(
        state=case.state,
        fault=faults.get(case.fault, case.fault),
        data=data,
        stamp=str(stamp),
        then="load" if case.has_failing_loader else "",
    )


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_fault(
    case: Case, stage: Stage, shm_dir: str, tmp_path: Path, short_patience: None
) -> None:
    make_whole(stage, shm_dir)
    stamp = tmp_path / "struck"
    act = strike_a_worker if case.end is WORKER else strike_the_trainer

    try:
        act(case, stage, shm_dir, stamp)
    except BaseException:
        # A case that fails is not to take the next ones with it.
        stage.close()
        stage.begin()
        raise

    assert case.fault == "source" or stamp.exists(), "the strike did not come"
    # What a dead trainer left is a minute old when the next one looks.
    make_old(shm_dir)
    make_whole(stage, shm_dir)
    check_nothing_is_left(stage)


def strike_a_worker(case: Case, stage: Stage, shm_dir: str, stamp: Path) -> None:
    engine, before, fill = stage.engine, stage.fill, stage.next_fill()
    pid = engine.processes[0].pid
    engine.call_one(0, "arm", strike_of(case, stamp))
    weights = (failing if case.has_failing_source else tensors)(fill, stage.device)
    error: BaseException | None = None
    with WeightSync(engine, slot_size=SLOT_SIZE, **deadlines(case, shm_dir)) as sync:
        try:
            sync.push(weights, version=fill)
        except Exception as caught:  # noqa: BLE001 - the table says which
            error = caught
        ended_s = time.monotonic()
        if case.fault == "stop":
            resume(pid)
        assert all(call.wait(20) for call in sync._calls)
        if case.fault == "kill":
            engine.respawn(0)
            stage.has_respawned = True

        assert (type(error).__name__ if error else "") in raised(case)
        check_time(case, stamp, ended_s)
        check_text(case, str(error or ""), pid)
        ranks = (1,) if case.fault == "kill" else (0, 1)
        states = check_truth(stage, ranks, before=before, after=fill)
        check_claim(getattr(error, "engine_state", None), states, is_raised=error is not None)
        # The same one goes on.
        sync.push(tensors(stage.next_fill(), stage.device), version=stage.fill)


def strike_the_trainer(case: Case, stage: Stage, shm_dir: str, stamp: Path) -> None:
    engine, trainer = stage.engine, stage.trainer
    before, fill = stage.fill, stage.next_fill()
    pid = trainer.process.pid
    if case.has_failing_loader:
        engine.call_one(0, "arm", Strike(state=State.GREETING, fault="", then="load", stamp=""))
    is_failing = case.has_failing_source or case.fault == "source"
    order = Order(
        fill=fill,
        is_failing=is_failing,
        strike=None if case.fault == "source" else strike_of(case, stamp),
        settings=deadlines(case, shm_dir),
    )
    trainer.push(order, engine)
    ended_s = time.monotonic()
    if case.fault == "stop":
        resume(pid)
    told = None
    if case.fault == "kill":
        trainer.process.join(10)
        trainer.end()
    else:
        told, _ = trainer.told(engine)

    codes = {(one["error"] or {"code": ""})["code"] for one in trainer.results}
    assert codes <= answered(case)
    check_time(case, stamp, ended_s)
    for result in trainer.results:
        if result["error"] is not None and result["error"]["code"] != "remote":
            check_workers_text(case, result["error"]["message"], pid)
    states = check_truth(stage, range(NUM_WORKERS), before=before, after=fill)
    assert [one["state"] for one in trainer.results] == states
    if told is None:
        stage.begin_trainer()
        return
    name, _, claim = told
    assert name in {"", "GatherFailedError"} or hasattr(errors, name)
    if claim is not None:
        check_claim(claim, states, is_raised=bool(name))


def resume(pid: int) -> None:
    """Let a process go on, but not before it has stopped: the others may be that fast."""
    deadline_s = time.monotonic() + 10
    while doing(pid) != "stopped by a signal":
        assert time.monotonic() < deadline_s, "it did not stop"
        time.sleep(0.005)
    os.kill(pid, signal.SIGCONT)


def make_whole(stage: Stage, shm_dir: str) -> None:
    """Push good weights from a new ``WeightSync``, and see them everywhere."""
    with WeightSync(stage.engine, slot_size=SLOT_SIZE, dir=shm_dir) as sync:
        sync.push(tensors(stage.next_fill(), stage.device), version=stage.fill)
        found = [(s["version"], s["state"], s["is_torn"]) for s in sync.status()]
    assert found == [(str(stage.fill), "committed", False)] * NUM_WORKERS
    assert all(live == hashes(stage.fill) for live in stage.engine.call("live"))


def hashes(fill: int) -> dict[str, str]:
    return hashes_of(tensors(fill))


def check_time(case: Case, stamp: Path, ended_s: float) -> None:
    if case.fault == "source" or not stamp.exists():
        return
    took_s = ended_s - float(stamp.read_text(encoding="ascii"))
    if case.fault in {"stop", "silence"} or deadlines(case, "")["connect_timeout_s"] == CONNECT_S:
        # Workers wait twice as long as their trainer: it says better what is late.
        limit_s = 2 * max(CONNECT_S, IDLE_S, COMMIT_S) + IDLE_S + AFTERWARDS_S
    else:
        # Last words that were cut off linger before the worker's call returns.
        limit_s = AT_ONCE_S + (LINGER_S if case.fault == "cut" else 0.0)
    assert took_s < limit_s


def check_text(case: Case, text: str, pid: int) -> None:
    """See that what a push raises says where it was, and who is to blame."""
    # Its Hello may not have been read: nobody knows then who it was.
    is_early = case.state is State.GREETED and case.fault in {"kill", "stop", "silence", "cut"}
    if not text or is_early or case.state is State.GREETING or case.has_failing_source:
        return
    if case.fault == "loader" or case.has_failing_loader:
        assert "this loader cannot" in text or str(pid) in text
        return
    if case.state is State.COMMITTED:
        return
    assert re.search(rf"\bpid {pid}\b", text)
    if case.fault in {"kill", "stop", "silence", "cut"} and case.state is State.READY:
        assert re.search(r"bucket \d of 6 \(tensor \d of 6", text)
        assert "rank 0" in text


def check_workers_text(case: Case, text: str, pid: int) -> None:
    """See that what a worker answers says where it was, and who is to blame."""
    assert re.search(rf"\bpid {pid}\b", text)
    assert re.search("state [A-Z]+", text)
    if case.state is State.READY and case.fault not in {"junk", "wrong", "replay"}:
        assert re.search(r"bucket \d of 6 \(tensor \d of 6", text)


def check_truth(stage: Stage, ranks: Any, *, before: int, after: int) -> list[str]:
    """See that no worker's word is contradicted by its bytes; return what they say."""
    states = []
    for rank in ranks:
        status = stage.engine.call_one(rank, "bucketsync_status")
        live = stage.engine.call_one(rank, "live")
        states.append(status["state"])
        is_new = status["state"] == "committed"
        assert status["version"] == str(after if is_new else before)
        assert status["is_torn"] is (status["state"] == "torn")
        if status["state"] != "torn":
            assert live == hashes(after if is_new else before)
    return states


def check_claim(claim: Any, states: list[str], *, is_raised: bool) -> None:
    """See that what a push says of the engine as a whole is so, as far as it can know it."""
    if not is_raised:
        assert set(states) == {"committed"}
    elif claim in {"unchanged", "committed"}:
        assert set(states) == {str(claim)}
    elif claim == "torn":
        assert "torn" in states or len(set(states)) > 1


def make_old(directory: str) -> None:
    for file in Path(directory).rglob("*.*"):
        os.utime(file, (0, 0))


def check_nothing_is_left(stage: Stage) -> None:
    """See that the workers hold what they held at first, and this process nothing."""
    deadline_s = time.monotonic() + AFTERWARDS_S
    while True:
        # Every entry lets go of what has lost its owner, once the kernel has told.
        stage.engine.call("bucketsync_status")
        found = stage.engine.call("held")
        free = [one.pop("free_bytes", 0) for one in found]
        is_known = not stage.has_respawned and bool(stage.baseline)
        is_as_before = found == stage.baseline[:NUM_WORKERS]
        has_let_go = is_as_before if is_known else not any(one["threads"] for one in found)
        if has_let_go or time.monotonic() > deadline_s:
            break
        time.sleep(0.01)
    if stage.has_respawned or not stage.baseline:
        stage.has_respawned = False
        stage.baseline = [*found, *({"free_bytes": one} for one in free)]
    assert found == stage.baseline[:NUM_WORKERS]
    for then, now in zip(stage.baseline[NUM_WORKERS:], free, strict=True):
        assert now > then["free_bytes"] - ROUNDING_BYTES
    assert held()["threads"] == 0


def test_every_state_message_and_end_is_a_case_or_has_a_reason_why_not() -> None:
    told = {*cases(), *named()}

    assert told == set(all_cases())
    assert not set(cases()) & set(named())
    assert all(named().values())
    quick = [case for case in cases() if case.is_quick]
    for state in State:
        for end in (WORKER, TRAINER):
            assert any((case.state, case.end) == (state, end) for case in quick)
    for fault in FAULTS:
        ends = {case.end for case in quick if case.fault == fault}
        assert ends == {case.end for case in cases() if case.fault == fault}
