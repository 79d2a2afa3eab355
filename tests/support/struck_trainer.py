"""A trainer in a process of its own that pushes as it is told, and is struck where it is told."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from support import forking, striking

from vllm_bucketsync import transfer
from vllm_bucketsync.session import Role
from vllm_bucketsync.sync import WeightSync

from .trainer_process import PipeEngine

NUM_TENSORS = 6
SLOT_SIZE = 1024
PATIENCE_S = 30.0


class GatherFailedError(Exception):
    pass


def tensors(fill: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return the weights of a version: each fills a slot, and has the version's bytes."""
    return {
        f"model.layers.{index}.weight": torch.full((SLOT_SIZE,), fill % 251, dtype=torch.uint8).to(
            device
        )
        for index in range(NUM_TENSORS)
    }


def failing(fill: int, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield half of the weights, and fail."""
    yield from list(tensors(fill, device).items())[: NUM_TENSORS // 2]
    raise GatherFailedError("a rank is missing")


def shorten_patience(module: Any = transfer) -> None:
    """Give workers that do not answer an abort less time than users do."""
    module.DRAIN_TIMEOUT_S = 0.2
    module.RETURN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One push.

    Attributes:
        fill: Which weights, and their version.
        is_failing: The source fails half-way.
        strike: What happens to the trainer meanwhile.
        settings: Of its ``WeightSync``.
        folder: A checkpoint's, in the place of these weights.
    """

    fill: int
    is_failing: bool = False
    strike: striking.Strike | None = None
    settings: dict[str, Any]
    folder: str = ""


class _Engine(PipeEngine):
    """Some workers, behind a pipe of their own."""

    def __init__(self, pipe: Connection, num_workers: int) -> None:
        super().__init__(pipe)
        self._num_workers = num_workers

    def num_workers(self) -> int:
        return self._num_workers


def _train(orders: Connection, asked: Connection, device: str, num_workers: int) -> None:
    torch.set_num_threads(1)
    shorten_patience()
    striking.watch(Role.SENDER)
    while True:
        try:
            order: Order = orders.recv()
        except EOFError:
            return
        striking.arm(order.strike)
        made: Any = failing if order.is_failing else tensors
        weights = order.folder or made(order.fill, device)
        with WeightSync(_Engine(asked, num_workers), slot_size=SLOT_SIZE, **order.settings) as sync:
            try:
                sync.push(weights, version=order.fill)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test gets to see it
                state = getattr(error, "engine_state", None)
                told = (type(error).__name__, str(error), None if state is None else str(state))
            else:
                told = ("", "", "committed")
            # A call that has not returned still reads its pipe.
            all(call.wait(PATIENCE_S) for call in sync._calls)
        striking.arm(None)
        orders.send((told, striking.held()))


class StruckTrainer:
    """The parent's end: gives orders, and is the engine's side of the calls."""

    def __init__(self, device: str, *, num_workers: int = 2) -> None:
        context = forking.context()
        self._orders, theirs = context.Pipe()
        self._asked, asked = context.Pipe()
        self.process = context.Process(
            target=_train, args=(theirs, asked, device, num_workers), daemon=True
        )
        self.process.start()
        theirs.close()
        asked.close()
        self.results: list[Any] = []

    def push(self, order: Order, engine: Any) -> None:
        """Give an order, and let ``engine`` answer the update's call, or fail to."""
        self.results = []
        self._orders.send(order)
        assert self._asked.poll(PATIENCE_S), "the trainer asks for nothing"
        method, args = self._asked.recv()
        self.results = engine.call(method, *args)
        with contextlib.suppress(OSError):
            self._asked.send(self.results)

    def told(self, engine: Any) -> tuple[tuple[str, str, str | None], dict[str, int]]:
        """Return what it says of its push, and what it holds; answer what it asks until then."""
        while True:
            ready = wait([self._orders, self._asked], PATIENCE_S)
            assert ready, "the trainer says nothing"
            if self._orders in ready:
                told: tuple[tuple[str, str, str | None], dict[str, int]] = self._orders.recv()
                return told
            method, args = self._asked.recv()
            self._asked.send(engine.call(method, *args))

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End it, however it is."""
        self._orders.close()
        self._asked.close()
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.process.close()
