"""The pure parts of the benchmark of an engine: versions, references, handles, plans."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from vllm_bucketsync import cli
from vllm_bucketsync.bench.engine import flip
from vllm_bucketsync.bench.engine import run as running
from vllm_bucketsync.bench.engine.reference import Reference
from vllm_bucketsync.bench.engine.result import EnginePlan, Outcome, Row, splits
from vllm_bucketsync.bench.engine.trainer import Trainer
from vllm_bucketsync.bench.floors import pieces
from vllm_bucketsync.cli import bench_engine
from vllm_bucketsync.cli.exits import ExitCode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flip_changes_every_byte_keeps_numbers_finite_and_undoes_itself(
    dtype: torch.dtype,
) -> None:
    before = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    flipped = before.clone()

    flip.flip_in_place(flipped)

    assert bool((bytes_of(before) != bytes_of(flipped)).all())
    assert bool(flipped.isfinite().all())
    assert flip.equals(flipped, before, flipped=True)
    assert not flip.equals(flipped, before)
    flip.flip_in_place(flipped)
    assert flip.equals(flipped, before)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)], ids=str)
def test_one_wrong_bit_of_a_transposed_tensor_is_seen(shape: tuple[int, ...]) -> None:
    before = torch.ones(shape).t() if len(shape) == 2 else torch.ones(shape)
    after = before.clone()
    assert flip.equals(after, before)

    if after.numel():
        flip.as_integers(after.contiguous()).bitwise_xor_(1)
        changed = after.contiguous().clone()
        flip.as_integers(changed)[-1] ^= 1
        assert not flip.equals(changed, after.contiguous())


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.randn(4, 6).bfloat16())
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("scale", torch.ones(()))

    def flip(self) -> None:
        flip.flip_in_place(self.fused.data)


def test_a_reference_follows_what_follows_the_weights_and_holds_the_rest_still() -> None:
    model = Model()
    reference = Reference(model)
    model.flip()
    reference.learn(model)

    assert reference.followers == {"fused"}
    assert reference.compared_bytes == model.fused.nbytes
    assert reference.differences(model, is_flipped=True) == []
    assert reference.differences(model, is_flipped=False) == ["fused"]
    model.flip()
    assert reference.differences(model, is_flipped=False) == []
    model.get_buffer("table")[2] = 7.0
    assert reference.differences(model, is_flipped=False) == ["table"]
    model.fused.data = model.fused.data.float()
    assert reference.differences(model, is_flipped=False) == ["fused", "table"]


def test_what_a_loader_computes_from_the_weights_is_told_and_not_compared() -> None:
    model = Model()
    reference = Reference(model)
    model.flip()
    model.get_buffer("scale").fill_(3.0)

    reference.learn(model)

    assert reference.unlike == ["scale"]
    assert reference.differences(model, is_flipped=True) == []


def test_a_trainer_changes_every_tensor_with_each_step() -> None:
    shapes = {"a.weight": (3, 4), "b.norm.weight": (5,)}
    trainer = Trainer(shapes, dtype="bfloat16", device=torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}

    trainer.step()

    assert (trainer.is_flipped, trainer.num_steps) == (True, 1)
    for name, tensor in trainer.tensors.items():
        assert flip.equals(tensor, before[name], flipped=True)
        assert tuple(tensor.shape) == shapes[name]
    assert trainer.num_bytes == 2 * (12 + 5)


def test_pieces_add_up() -> None:
    assert [pieces(n, 10) for n in (3, 10, 25)] == [[3], [10], [10, 10, 5]]


def test_splits_are_the_seconds_that_the_first_worker_tells() -> None:
    worker = {"rank": 0, "load_s": 0.5, "wait_s": 0.25, "notes": ()}

    assert splits([{"workers": (worker, worker)}, {"workers": (worker,)}, {}]) == {
        "load_s": [0.5, 0.5],
        "wait_s": [0.25, 0.25],
    }


def measured(*, budget_s: float | None = None, **behaviour: Any) -> tuple[Row, mock.Mock]:
    """Run one row of a method that is a double, under a clock that ticks once a look."""
    method = mock.Mock(what="", is_floor=False, **behaviour)
    method.configure_mock(name="double")
    method.why_not.return_value = behaviour.get("why_not_text")
    plan = EnginePlan(model="tiny", device="cpu", methods=(), repeat=3, budget_s=budget_s)
    stage = mock.Mock(has_gpu=False)
    runner = running._Runner(plan, stage, mock.Mock(), tell=lambda text: None, begin_s=0.0)
    with mock.patch("time.monotonic", side_effect=itertools.count().__next__):
        return runner.row(method), method


def test_a_row_is_warmed_up_timed_and_closed() -> None:
    row, method = measured()

    assert (row.outcome, len(row.warm_up_s), len(row.seconds)) == (Outcome.MEASURED, 2, 3)
    method.close.assert_called_once_with()


def test_a_row_that_fails_has_its_error_and_is_closed() -> None:
    row, method = measured(run=mock.Mock(side_effect=RuntimeError("no")))

    assert (row.outcome, row.text, row.median_s) == (Outcome.FAILED, "RuntimeError: no", None)
    method.close.assert_called_once_with()


def test_a_row_that_cannot_be_says_why() -> None:
    row, method = measured(why_not_text="no GPU")

    assert (row.outcome, row.text) == (Outcome.IMPOSSIBLE, "no GPU")
    method.prepare.assert_not_called()


def test_when_time_is_over_nothing_more_is_begun_and_a_row_keeps_what_it_has() -> None:
    # Before the row, before each of its two runs to warm up, and before each of three.
    outcomes = [measured(budget_s=budget_s - 0.5)[0] for budget_s in (0, 2, 4, 9)]

    assert [row.outcome for row in outcomes] == [
        *(Outcome.SKIPPED, Outcome.SKIPPED, Outcome.MEASURED, Outcome.MEASURED)
    ]
    assert [len(row.seconds) for row in outcomes] == [0, 0, 1, 3]
    assert [bool(row.text) for row in outcomes] == [True, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--repeat=0"], "repeat is 0"),
        (["--warm-up=-1"], "warm-up is -1"),
        (["--methods=copy,teleport"], "no method is called teleport; there are copy"),
        (["--slot-size=16"], "--slot-size is 16; expected at least 256 bytes; set --slot-size"),
        (["--json=/no/such/folder/found.json"], "its folder does not exist"),
    ],
)
def test_an_option_that_is_out_of_range_is_a_usage_error_before_anything_starts(
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_engine, "require_vllm", lambda: None)

    code = cli.main(["bench", "engine", "--device", "cpu", *arguments])

    assert code == ExitCode.USAGE
    assert text in capsys.readouterr().err
