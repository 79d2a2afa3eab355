"""Proves that Ctrl-C, wherever it comes, leaves a ``WeightSync`` that can push."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch
from support.thread_engine import ThreadEngine

from vllm_bucketsync import keeping, turns
from vllm_bucketsync.clients.base import UpdateAnswer, UpdateRequest
from vllm_bucketsync.errors import EngineBusyError
from vllm_bucketsync.retained import MAX_MANIFESTS
from vllm_bucketsync.sync import WeightSync

TENSORS = {"a": torch.arange(100.0), "b": torch.ones(3)}
# What takes the turn and gives it back, and what Python itself runs around that.
WHERE = {"_exclusively", "_check_idle", "take", "end", "__enter__", "__exit__"}


def is_about_turns(frame: FrameType) -> bool:
    code, caller = frame.f_code, frame.f_back
    if code.co_name not in WHERE or caller is None:
        return False
    if code.co_filename == contextlib.__file__:
        return caller.f_code.co_name == "push"
    return code.co_filename in {keeping.__file__, turns.__file__}


class Interrupt:
    """Raises at one instruction of ``WHERE``, counted from the beginning of a push."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not is_about_turns(frame):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._step


def test_a_push_that_is_interrupted_anywhere_in_taking_its_turn_does_not_keep_it() -> None:
    engine = ThreadEngine()
    tracer, kept, number = sys.gettrace(), [], 0
    with WeightSync(engine) as sync:
        while True:
            number += 1
            interrupt = Interrupt(number)
            sys.settrace(interrupt)
            try:
                sync.push(TENSORS, version=number)
            # Kept, as a notebook keeps the last traceback, with every frame in it.
            except KeyboardInterrupt as error:
                kept.append(error)
            finally:
                sys.settrace(tracer)
            if interrupt.left > 0:
                break
            sync.push(TENSORS, version="after")
            assert engine.workers[0].version == "after"
    assert len(kept) == number - 1 > 100
    engine.close()


def test_of_two_turns_the_first_is_had_until_its_lock_is_free() -> None:
    taken, first, second = turns.Turns(), threading.Lock(), threading.Lock()
    with first:
        assert taken.take(first)
        with second:
            assert not taken.take(second)
    with second:
        assert taken.take(second)
        taken.end(second)
        taken.end(second)
        with first:
            assert taken.take(first)


def test_a_push_in_the_middle_of_a_push_is_refused() -> None:
    engine = ThreadEngine()
    with WeightSync(engine, slot_size=512) as sync:

        def push_again(num_bytes: int, total: int | None) -> None:
            with pytest.raises(EngineBusyError, match="another push"):
                sync.push(TENSORS, version="inner")

        sync.push(TENSORS, version="outer", progress=push_again)
    assert engine.finished == ["outer"]
    engine.close()


class InterruptingEngine(ThreadEngine):
    """Sends its caller a Ctrl-C when its workers are done, and before it returns."""

    is_due = False

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        answer = super().update(request)
        if self.is_due:
            self.is_due = False
            # By now it has heard from all of them, and waits for this call alone.
            time.sleep(0.3)
            signal.pthread_kill(main_thread_id(), signal.SIGINT)
            time.sleep(0.3)
        return answer


def main_thread_id() -> int:
    found = threading.main_thread().ident
    assert found is not None
    return found


def test_what_was_known_before_a_push_that_was_interrupted_is_not_believed() -> None:
    engine = InterruptingEngine()
    with WeightSync(engine, slot_size=2048) as sync:
        # One more than a worker remembers: with the last, it forgets the first.
        for number in range(MAX_MANIFESTS):
            sync.push({f"t{number}": torch.ones(9)}, version=number)
        engine.is_due = True
        with pytest.raises(KeyboardInterrupt):
            sync.push({"another": torch.ones(9)}, version="interrupted")

        sync.push({"t0": torch.ones(9)}, version="after")

    assert engine.finished[-2:] == ["interrupted", "after"]
    engine.close()
