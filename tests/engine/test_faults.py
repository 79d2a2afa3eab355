"""A real engine whose trainer is killed, or stopped, in the middle of an update.

The engine says what it holds, goes on, and the next update makes it what it is to be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.process_engines import EXTENSION, Holding, running_processes
from support.striking import Strike
from support.struck_trainer import Order, StruckTrainer

from vllm_bucketsync import WeightSync
from vllm_bucketsync.session import State

KIND = "qwen3"
IDLE_S = 1.5
# A death is seen in a second; a stop when the worker has waited twice as long as its trainer.
LIMITS_S = {"kill": 1.0, "stop": 2 * IDLE_S + 2.0}


@dataclass(frozen=True)
class Stage:
    """A running engine, what it held at first, and what it holds with the new weights."""

    llm: Any
    old: Holding
    new: Holding
    folders: tuple[Path, Path]


class Asked:
    """The engine, as whoever answers for a trainer asks it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def call(self, method: str, *args: Any) -> list[Any]:
        return list(self._llm.collective_rpc(method, args=args))


@pytest.fixture(scope="module")
def stage(checkpoint: Callable[[str, int], Path]) -> Iterator[Stage]:
    folders = (checkpoint(KIND, 0), checkpoint(KIND, 1))
    with running_processes(folders[0], worker_extension_cls=EXTENSION) as llm:
        old = Holding.of(llm)
        with WeightSync(llm) as sync:
            sync.push(folders[1], version="new")
            new = Holding.of(llm)
            assert new != old
        yield Stage(llm, old, new, folders)


@pytest.mark.parametrize(
    ("state", "fault", "held", "code"),
    [
        # Where it is READY, a part of the first tensor came, which is not in the model yet.
        (State.OPENING, "kill", "unchanged", "peer_lost"),
        (State.READY, "kill", "unchanged", "peer_lost"),
        (State.PREPARED, "kill", "torn", "peer_lost"),
        (State.COMMITTING, "kill", "committed", None),
        (State.READY, "stop", "unchanged", "channel_timeout"),
    ],
    ids=str,
)
def test_a_trainer_that_is_struck_leaves_an_engine_that_says_so_and_goes_on(
    stage: Stage, state: State, fault: str, held: str, code: str | None, tmp_path: Path
) -> None:
    with WeightSync(stage.llm) as sync:
        sync.push(stage.folders[0], version="old")
        assert Holding.of(stage.llm) == stage.old
    stamp = tmp_path / "struck"
    trainer = StruckTrainer("cpu", num_workers=1)
    try:
        order = Order(
            fill=7,
            strike=Strike(state=state, fault=fault, stamp=str(stamp)),
            settings={"connect_timeout_s": 30.0, "idle_timeout_s": IDLE_S},
            folder=str(stage.folders[1]),
        )
        trainer.push(order, Asked(stage.llm))
        took_s = time.monotonic() - float(stamp.read_text(encoding="ascii"))
        if fault == "stop":
            trainer.resume()
            assert trainer.told(Asked(stage.llm))[0][0] == "ChannelTimeoutError"
    finally:
        trainer.end()

    (result,) = trainer.results
    assert took_s < LIMITS_S[fault]
    told = (result["state"], (result["error"] or {}).get("code"))
    # ZeroMQ sends from a thread of its own: the last message may have died with its process.
    may_be_lost = {("torn", "peer_lost")} if state is State.COMMITTING else set()
    assert told in {(held, code), *may_be_lost}
    held = told[0]
    with WeightSync(stage.llm) as sync:
        (status,) = sync.status()
        version = "7" if held == "committed" else "old"
        assert (status["state"], status["version"]) == (held, version)
        assert status["is_torn"] is (held == "torn")
        if held != "torn":
            assert Holding.of(stage.llm) == (stage.new if held == "committed" else stage.old)

        sync.push(stage.folders[1], version="new")

        assert Holding.of(stage.llm) == stage.new
        assert not sync.status()[0]["is_torn"]
