"""Calls of an engine: whoever waits for one has it before it runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from vllm_bucketsync import asking
from vllm_bucketsync.asking import RpcCall


def test_a_call_that_was_never_begun_is_waited_for_by_nobody() -> None:
    call = RpcCall(lambda: 1)

    assert (call.is_done, call.wait(0.0), call.result, call.error) == (True, True, None, None)


def test_a_call_is_done_when_it_has_returned_or_raised() -> None:
    may_end = threading.Event()
    call = RpcCall(lambda: may_end.wait(10) and "answer").start()
    assert not call.is_done
    assert not call.wait(0.01)
    may_end.set()
    assert call.wait(10)
    assert call.result == "answer"

    failed: RpcCall[Any] = RpcCall(lambda: 1 // 0).start()
    assert failed.wait(10)
    assert isinstance(failed.error, ZeroDivisionError)


@pytest.mark.parametrize("runs", [True, False])
def test_an_interrupt_while_a_call_begins_loses_no_call_that_runs(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if runs:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(asking, "START_TIMEOUT_S", 0.1)
    call = RpcCall(lambda: may_end.wait(10))
    with pytest.raises(KeyboardInterrupt):
        call.start()

    assert call.is_done is not runs
    may_end.set()
    assert call.wait(10)
