"""What deadlines and the detection of deaths cost of a warm update: measured, by hand.

Updates with and without them differ by less than the noise of a machine, so what is measured is
the processor's time that the trainer's thread spends in them, beside that of whole updates.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from support.fake_engine import FakeEngine

from vllm_bucketsync import channel, transfer
from vllm_bucketsync.sync import WeightSync

NUM_UPDATES = 15
NUM_WARM_UPS = 5
MAX_SHARE = 0.02
# 256 MiB, in as many buckets as the default makes of it.
MODEL = {f"model.layers.{index}.weight": torch.zeros(1 << 20) for index in range(64)}
WATCHES: list[tuple[Any, str]] = [
    (transfer._Watch, "check"),
    (transfer._Watch, "renew"),
    (transfer._Run, "_look"),
    (channel.Listener, "_watch"),
]


class Stopwatch:
    """Adds up the time of calls, the outermost of those that are within each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self._is_running = False
        for owner, name in WATCHES:
            monkeypatch.setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any) -> Any:
            if self._is_running:
                return method(*args)
            self._is_running, begin_s = True, time.thread_time()
            try:
                return method(*args)
            finally:
                self.seconds += time.thread_time() - begin_s
                self._is_running = False

        return timed


def push(sync: WeightSync, number: int) -> list[float]:
    took_s = []
    for version in range(number):
        begin_s = time.perf_counter()
        sync.push(MODEL, version=version)
        took_s.append(time.perf_counter() - begin_s)
    return took_s


@pytest.mark.long
def test_the_watch_costs_less_than_two_percent_of_a_warm_update(
    shm_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeEngine("discarding") as engine, WeightSync(engine, dir=shm_dir) as sync:
        push(sync, NUM_WARM_UPS)
        update_s = statistics.median(push(sync, NUM_UPDATES))
        stopwatch = Stopwatch(monkeypatch)
        push(sync, NUM_UPDATES)
    watch_s = stopwatch.seconds / NUM_UPDATES
    with capsys.disabled():
        print(f"\nwatch: {watch_s * 1e6:.0f} us of {update_s * 1e3:.1f} ms for a warm update")  # noqa: T201

    assert watch_s / update_s < MAX_SHARE
