"""The proof: an engine that was given weights is one that was started from them.

Greedy tokens and their log-probabilities, and every live tensor that ``state`` finds, of
three other checkpoints and of the first one again; then the same weights five times over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vllm_bucketsync import BucketSyncError, WeightSync

from . import state
from .results import NotRunError, recorded
from .rows import SEEDS, Row

# One is longer than a chunk of a chunked prefill, and the last has most of it in common.
_LONG = [(7 * number) % 480 + 2 for number in range(40)]
PROMPTS = ([5, 17, 123, 42, 260], [301, 2, 77], [9] * 12, _LONG, [*_LONG[:36], 11, 12])
NUM_TOKENS = 8

Outputs = list[list[tuple[int, float]]]
# Starts an engine from a checkpoint: with these settings, in this process or not.
Start = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class Holding:
    """What every worker of an engine computes with, and what the engine says."""

    outputs: Outputs
    workers: list[dict[str, str]]

    @classmethod
    def of(cls, llm: Any) -> Holding:
        # In this order, so that what requests leave behind is that of the same ones.
        return cls(outputs_of(llm), llm.collective_rpc(state.hashes))

    def is_that_of(self, other: Holding, *, spared: Collection[str] = ()) -> None:
        """Assert that nothing differs, but for what is spared, and name what does."""
        for rank, names in enumerate(self.unlike(other)):
            wrong = [name for name in names if name not in spared]
            assert not wrong, f"on rank {rank} these differ, or are on one side alone: {wrong}"
        assert self.outputs == other.outputs, "outputs differ, though every tensor is the same"

    def unlike(self, other: Holding) -> list[list[str]]:
        """Return, for each rank, the tensors that differ or are on one side alone."""
        return [
            sorted(name for name in mine | its if mine.get(name) != its.get(name))
            for mine, its in zip(self.workers, other.workers, strict=True)
        ]


def outputs_of(llm: Any) -> Outputs:
    """Return, for each of ``PROMPTS``, the greedy tokens and their log-probabilities.

    One after the other: the shape of a batch decides the last bits, and when requests reach
    an engine of another process decides that shape.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True, detokenize=False
    )
    answers = [
        llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)[0]
        for prompt in PROMPTS
    ]
    return [tokens_of(answer.outputs[0]) for answer in answers]


def tokens_of(output: Any) -> list[tuple[int, float]]:
    """Return the tokens of one answer and their log-probabilities."""
    return [
        (token, logprobs[token].logprob)
        for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
    ]


@dataclass
class Bench:
    """Where rows are tried: how engines are started here, and what is known of some.

    Attributes:
        start: Starts an engine.
        root: Where checkpoints lie.
        defaults: Settings of an ``AsyncLLM`` here.
        known: Of engines that were started already, what they held.
    """

    start: Start
    root: Path
    defaults: Mapping[str, Any] = field(default_factory=dict)
    known: dict[tuple[str, ...], Holding] = field(default_factory=dict)

    @contextmanager
    def running(self, row: Row, seed: int, *, is_truth: bool = False) -> Iterator[Any]:
        """Yield an engine as the row says, started from the checkpoint of a seed."""
        settings = dict(row.settings)
        is_in_process = row.is_in_process
        if is_truth:
            settings = dict(row.settings if row.truth_settings is None else row.truth_settings)
            is_in_process = settings.get("tensor_parallel_size", 1) == 1
        with self.start(
            row.checkpoint(self.root, seed),
            is_in_process=is_in_process,
            dtype=row.dtype,
            **settings,
        ) as llm:
            yield llm

    def truth(self, row: Row, seed: int) -> Holding:
        """Return what an engine holds that was started from the checkpoint of a seed.

        Raises:
            NotRunError: vLLM starts no such engine here, as the row says of some places.
        """
        settings = row.settings if row.truth_settings is None else row.truth_settings
        key = (row.model, row.dtype, row.files, repr(sorted(settings.items())), str(seed))
        if key not in self.known:
            try:
                with self.running(row, seed, is_truth=True) as llm:
                    self.known[key] = Holding.of(llm)
            except Exception as error:
                if not row.may_not_start or row.may_not_start not in _first(error):
                    raise
                raise NotRunError(f"vLLM starts no such engine here: {_first(error)}") from error
        return self.known[key]


def prove_row(row: Row, bench: Bench) -> None:
    """Show what a row claims, and write down what came of it."""
    with recorded(row) as reasons:
        if row.why_not_run:
            raise NotRunError(row.why_not_run)
        if row.why_refused:
            reasons.append(prove_refused(row, bench))
        else:
            prove(row, bench)


def prove(row: Row, bench: Bench) -> None:
    """Show that a row is right: see the module.

    Raises:
        NotRunError: It cannot be tried here.
        AssertionError: It is wrong.
    """
    truths = [bench.truth(row, seed) for seed in SEEDS]
    distinct = {repr(truth.outputs) for truth in truths}
    assert len(distinct) == len(truths), "two checkpoints of this row say the same"
    with bench.running(row, SEEDS[0]) as llm, WeightSync(llm) as sync:
        spared = _not_of_weights(Holding.of(llm), truths[0]) if row.has_old_outputs else set()
        places = llm.collective_rpc(state.addresses)
        for seed in (*SEEDS[1:], SEEDS[0]):
            give(row, sync, llm, seed)
            Holding.of(llm).is_that_of(truths[seed], spared=spared)
        for _ in range(5):
            give(row, sync, llm, SEEDS[0])
            Holding.of(llm).is_that_of(truths[0], spared=spared)
        moved = _moved(places, llm.collective_rpc(state.addresses))
        assert not moved, f"these lie elsewhere now: {moved}"


def _not_of_weights(one: Holding, other: Holding) -> set[str]:
    """Return what differs between two engines that were started from the same checkpoint.

    It was derived by them and of something else: scratch of a kernel, say. A parameter or a
    buffer is never among it.
    """
    spared = {name for names in one.unlike(other) for name in names}
    one.is_that_of(other, spared={name for name in spared if state.DERIVED in name})
    return spared


def prove_refused(row: Row, bench: Bench) -> str:
    """Show that a row is refused before a byte of the engine was written; return why.

    Raises:
        NotRunError: It cannot be tried here.
        AssertionError: It is not refused, or not so.
    """
    with bench.running(row, SEEDS[0]) as llm, WeightSync(llm) as sync:
        before = Holding.of(llm)
        with (
            row.around(llm),
            pytest.raises(BucketSyncError, match=row.why_refused) as caught,
        ):
            sync.push(row.source(row, 1), version="refused", **row.push)
        # Not every engine's push has emptied it, and what comes out differs in the last bits.
        llm.reset_prefix_cache()
        assert "nothing was written" in str(caught.value)
        Holding.of(llm).is_that_of(before)
    return str(caught.value)


def give(row: Row, sync: WeightSync, llm: Any, seed: int) -> None:
    """Push the weights of a seed, as the row says."""
    with row.around(llm):
        sync.push(row.source(row, seed), version=f"of {seed}", **row.push)


def _moved(before: list[dict[str, int]], after: list[dict[str, int]]) -> list[str]:
    """Return the tensors that lie elsewhere now; those of no bytes lie nowhere."""
    return sorted(
        path
        for old, new in zip(before, after, strict=True)
        for path in old.keys() | new.keys()
        if old.get(path) != new.get(path)
    )


def _first(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return f"{type(error).__name__}: {lines[0][:200]}"
