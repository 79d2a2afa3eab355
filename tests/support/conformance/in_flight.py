"""Requests that run while weights change: what they say before is old, what they say after is new.

Greedy, so an answer tells where the change was: up to there it is the old engine's, and from
there on what the new engine says to the same prompt and the same beginning.
"""

from __future__ import annotations

from typing import Any

from vllm_bucketsync import WeightSync

from . import state
from .proof import PROMPTS, Bench, Holding, tokens_of
from .rows import Row

PROMPT = PROMPTS[3]
NUM_TOKENS = 16
NUM_ASYNC_TOKENS = 150


def prove_in_flight(row: Row, bench: Bench, *, num_steps: int) -> None:
    """Show that a request that is under way goes on with the new weights, and with no old cache.

    Args:
        row: Its engine runs in this process.
        bench: Where it is tried.
        num_steps: Of the engine, before the weights change.
    """
    truths = [bench.truth(row, seed) for seed in (0, 1)]
    old = _alone(row, bench, 0, [PROMPT], NUM_TOKENS)[0]
    with bench.running(row, 0) as llm, WeightSync(llm) as sync:
        Holding.of(llm).is_that_of(truths[0])
        engine = llm.llm_engine
        engine.add_request("in flight", {"prompt_token_ids": PROMPT}, _params(NUM_TOKENS))
        seen: list[int] = []
        for _ in range(num_steps):
            seen = _step(engine) or seen
        sync.push(row.source(row, 1), version="of 1", **row.push)
        answer = seen
        while engine.has_unfinished_requests():
            answer = _step(engine) or answer
        Holding.of(llm).is_that_of(truths[1])
    assert len(answer) == NUM_TOKENS, f"the answer has {len(answer)} tokens"
    assert _is_old_then_new(row, bench, answer, old, first=len(seen)), (
        f"{answer} is neither {old} nor what new weights say after its beginning"
    )


def prove_paused(row: Row, bench: Bench) -> None:
    """Show what each way to pause an ``AsyncLLM`` does to a request that runs."""
    from ..async_engines import running_async

    old, new = (_alone(row, bench, s, [PROMPT], NUM_ASYNC_TOKENS)[0] for s in (0, 1))
    truths = [bench.truth(row, seed) for seed in (0, 1)]
    settings = dict(bench.defaults) | {"dtype": row.dtype, **row.settings}
    with (
        running_async(row.checkpoint(bench.root, 0), **settings) as running,
        WeightSync(running.llm) as sync,
    ):
        kept = _asked_and_pushed(row, running, sync, "keep", 1)
        _has(running, truths[1], new)
        aborted = _asked_and_pushed(row, running, sync, "abort", 0)
        _has(running, truths[0], old)
        waited = _asked_and_pushed(row, running, sync, "wait", 1)
        _has(running, truths[1], new)
    assert waited == old, "a request that was waited for did not end with the old weights"
    assert aborted == new[: len(aborted)], "a request that was aborted had said something else"
    assert len(aborted) < len(new), "nothing ran any more when it was to be aborted"
    assert _is_old_then_new(row, bench, kept, old, first=1), "a request that was kept went wrong"
    assert kept != old, "nothing ran any more when it was to be kept"


def _asked_and_pushed(row: Row, running: Any, sync: WeightSync, mode: str, seed: int) -> list[int]:
    """Push while a request runs, and return the tokens of its answer."""
    answer = running.ask(PROMPT, num_tokens=NUM_ASYNC_TOKENS)
    sync.push(row.source(row, seed), version=f"{mode} {seed}", pause=mode, **row.push)
    return [token for token, _ in answer.result(120)]


def _has(running: Any, truth: Holding, answer: list[int]) -> None:
    workers = running.run(running.llm.collective_rpc(state.hashes))
    Holding(truth.outputs, workers).is_that_of(truth)
    said = running.ask(PROMPT, num_tokens=NUM_ASYNC_TOKENS).result(120)
    assert [token for token, _ in said] == answer, "outputs are not those of the new weights"


def _is_old_then_new(
    row: Row, bench: Bench, answer: list[int], old: list[int], *, first: int
) -> bool:
    """Whether an answer is the old engine's up to one place, ``first`` or later, then the new's."""
    places = [n for n in range(first, len(answer)) if answer[:n] == old[:n]]
    prompts = [[*PROMPT, *answer[:place]] for place in places]
    ends = _alone(row, bench, 1, prompts, len(answer))
    return any(
        answer[place:] == end[: len(answer) - place]
        for place, end in zip(places, ends, strict=True)
    )


def _alone(
    row: Row, bench: Bench, seed: int, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """Return the answers of an engine that was started from a seed's checkpoint."""
    with bench.running(row, seed, is_truth=True) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            _params(num_tokens),
            use_tqdm=False,
        )
        return [[token for token, _ in tokens_of(answer.outputs[0])] for answer in answers]


def _step(engine: Any) -> list[int]:
    """Let the engine do one step; return what it has said so far, if it says anything."""
    for output in engine.step():
        return list(output.outputs[0].token_ids)
    return []


def _params(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, logprobs=1, ignore_eos=True, detokenize=False
    )
