"""Several engines that are updated together: all of them commit, or none does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from support.fake_engine import FakeEngine
from support.thread_engine import KeepingSink, ThreadEngine

from vllm_bucketsync import BucketSyncError, ConfigError, RemoteError, WeightSync
from vllm_bucketsync.clients.base import UpdateAnswer, UpdateRequest

TENSORS = {f"w{i}": torch.full((256,), float(i)) for i in range(8)}


def failing_at(call: str) -> KeepingSink:
    def fail(found: str, _: object) -> None:
        if found == call:
            raise RuntimeError(f"cannot {call}")

    return KeepingSink(fail)


def test_every_worker_of_every_engine_gets_the_same_weights_with_one_packing() -> None:
    engines = [ThreadEngine(num_workers=2), ThreadEngine(), ThreadEngine(num_workers=3)]
    taken = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            taken.append(name)
            yield name, tensor

    with WeightSync(engines, slot_size=1024) as sync:
        report = sync.push(counted(), version="together")

        places = [(w.engine, w.rank) for w in report.workers]
        assert places == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
        assert [s["version"] for s in sync.status()] == ["together"] * 6
        assert [s["engine"] for s in sync.status()] == [0, 0, 1, 2, 2, 2]
    assert taken == list(TENSORS)
    sinks = [sink for engine in engines for sink in engine.sinks]
    for sink in sinks:
        assert {n: bytes(t.numpy()) for n, t in sink.tensors.items()} == {
            n: t.numpy().tobytes() for n, t in TENSORS.items()
        }
    assert [engine.finished for engine in engines] == [["together"]] * 3
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("call", ["open", "load", "prepare"])
def test_no_engine_commits_if_one_cannot(call: str, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = ThreadEngine(num_workers=2), ThreadEngine(make=lambda: failing_at(call))
    with WeightSync([good, bad], slot_size=1024) as sync:
        with pytest.raises(RemoteError, match=f"cannot {call}") as caught:
            sync.push(TENSORS, version="bad")

        assert [status["version"] for status in sync.status()] == [None] * 3
        is_untouched = call == "open"
        assert caught.value.engine_state == ("unchanged" if is_untouched else "torn")
    assert good.finished == bad.finished == []
    assert all("commit" not in sink.calls for sink in good.sinks)
    for engine in (good, bad):
        engine.close()
    # The record's traceback would keep the sink's frames, and so the views in them.
    caplog.clear()


def test_one_that_fails_while_the_others_commit_is_torn_and_said_so() -> None:
    good, bad = ThreadEngine(), ThreadEngine(make=lambda: failing_at("commit"))
    with WeightSync([good, bad]) as sync:
        with pytest.raises(RemoteError, match="cannot commit") as caught:
            sync.push(TENSORS, version="half")

        assert caught.value.engine_state == "torn"
        assert [(s["version"], s["is_torn"]) for s in sync.status()] == [
            ("half", False),
            (None, True),
        ]
    assert (good.finished, bad.finished) == (["half"], [])
    for engine in (good, bad):
        engine.close()


def test_the_death_of_one_engine_spares_the_other() -> None:
    with FakeEngine() as good, FakeEngine("die load") as bad:
        with WeightSync([good, bad], slot_size=1024) as sync:
            with pytest.raises(BucketSyncError, match="is gone") as caught:
                sync.push(TENSORS, version="bad")
            assert caught.value.engine_state in {"torn", "unknown"}
        with WeightSync(good) as sync:
            sync.push(TENSORS, version="good")
            assert not sync.status()[0]["is_torn"]


def test_a_stopped_engine_keeps_the_other_from_committing() -> None:
    with FakeEngine() as good, FakeEngine("stop prepare") as bad:
        with WeightSync([good, bad], connect_timeout_s=5, idle_timeout_s=1) as sync:
            with pytest.raises(TimeoutError, match="engine 1 rank 0 pid"):
                sync.push(TENSORS, version="bad")
            bad.kill(number=signal.SIGCONT)
        with WeightSync(good) as sync:
            assert sync.status()[0]["version"] is None


def test_an_in_process_engine_is_only_updated_alone() -> None:
    with pytest.raises(ConfigError, match="alone"):
        WeightSync([ThreadEngine(is_in_process=True), ThreadEngine()])
    with pytest.raises(ConfigError, match="no engine was given"):
        WeightSync([])


def test_a_worker_too_many_is_an_error_even_if_it_comes_when_all_is_over() -> None:
    class LateWorker(ThreadEngine):
        def update(self, request: UpdateRequest) -> UpdateAnswer:
            answer = super().update(request)
            return UpdateAnswer(results=[*answer.results, late.call("update", request)])

    class Late:
        def call(self, _: str, request: UpdateRequest) -> object:
            from vllm_bucketsync import serve

            worker = serve.Worker(make_sink=lambda opened: KeepingSink(), rank=1)
            return serve.update(worker, request.offer)

    late = Late()
    engine = LateWorker()
    with (
        WeightSync(engine, connect_timeout_s=0.5, idle_timeout_s=0.5) as sync,
        pytest.raises(BucketSyncError, match="next command"),
    ):
        sync.push(TENSORS, version=1)
    engine.close()


def test_a_worker_that_is_asked_after_its_push_was_given_up_is_free_at_once() -> None:
    class Draining(ThreadEngine):
        def update(self, request: UpdateRequest) -> UpdateAnswer:
            given_up.wait(30)
            begin_s = time.monotonic()
            answer = super().update(request)
            took_s.append(time.monotonic() - begin_s)
            return answer

    given_up = threading.Event()
    took_s: list[float] = []
    engine = Draining()
    with WeightSync(engine, connect_timeout_s=2) as sync:
        with pytest.raises(TimeoutError, match="said hello"):
            sync.push(TENSORS, version="late")
        given_up.set()
        deadline_s = time.monotonic() + 10
        while not took_s and time.monotonic() < deadline_s:
            time.sleep(0.01)

        # Nobody reads what it says: else it would wait for its whole connect_timeout_s.
        assert took_s[0] < 1.5
        sync.push(TENSORS, version="good")
    engine.close()


def test_what_would_mean_something_else_is_refused_before_an_engine_is_asked() -> None:
    engine = ThreadEngine()
    with WeightSync(engine) as sync:
        with pytest.raises(ConfigError, match=r"expected a list of patterns: \['lm_head\.\*'\]"):
            sync.push(TENSORS, version=1, partial="lm_head.*")
        with pytest.raises(ConfigError, match="at most 256"):
            sync.push(TENSORS, version="v" * 257)
    assert engine.requests == []
    engine.close()
