"""Loads a manifest into a model without data, to see what would happen.

vLLM's own loaders are fed one meta tensor per manifest entry under a layerwise
reload whose processing is switched off. What they copy is recorded, what they
refuse is a problem, and then every live tensor is put back: nothing was written.

All problems are found in one pass. A loader that raises ends its ``load_weights``
call, so the next call goes on behind the tensor that it raised at. Some loaders
first make a list of everything, so the tensor that was asked for last is only
suspected: it is fed alone, and if it is innocent the others are fed by halves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import layerwise

from ..layout import Manifest, TensorMeta
from ..messages import Cast
from . import compat, completeness, experts, problems
from .casts import casts_of, truncations
from .completeness import ModuleTargets, Waiver
from .layerwise import put_back
from .plan import Plan, make_plan
from .problems import Problem
from .record import LoadRecord, NotRecordableError, Recorder, Target
from .unread import num_shards, too_large


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """What a dry run found.

    Attributes:
        record: What loading comes down to; of the healthy tensors, where there are problems.
        problems: What is wrong, first things first; empty means that it will load.
        plan: How it is loaded without the loaders, where that is possible.
        left_as_is: Patterns that let a parameter keep its old value.
        casts: Tensors that the model holds in another dtype, by pairs of dtypes.
    """

    record: LoadRecord
    problems: tuple[Problem, ...]
    plan: Plan | None = None
    left_as_is: tuple[str, ...] = ()
    casts: tuple[Cast, ...] = ()

    def is_current(self) -> bool:
        """Whether the plan's direct modules are still computed with as they were observed."""
        return self.plan is None or self.plan.is_current()


def dry_run(worker: Any, manifest: Manifest, *, partial: Sequence[str] = ()) -> DryRunResult:
    """Find out what loading ``manifest`` would do. The model is left as it was.

    Must run inside ``compat.engine_context``.

    Args:
        worker: vLLM's worker.
        manifest: What will come.
        partial: fnmatch patterns of parameters that may stay without a value.
    """
    result = _once(worker, manifest, partial)
    model = worker.model_runner.get_model()
    if experts.are_split(model) or not any(experts.is_fused(one.name) for one in result.problems):
        return result
    experts.split_from_now_on(model)
    again = _once(worker, manifest, partial)
    if any(experts.is_fused(one.name) for one in again.problems):
        experts.split_from_now_on(model, is_on=False)
        return result
    return again


def _once(worker: Any, manifest: Manifest, partial: Sequence[str]) -> DryRunResult:
    model = worker.model_runner.get_model()
    tied = compat.tied_names(model)
    with compat.processing_switched_off():
        try:
            layerwise.initialize_layerwise_reload(model)
            run = _Run(worker, model, manifest.metas, Waiver(partial, tied))
            result = run.result()
        finally:
            put_back(model)
    if not compat.can_plan() or result.record.unverified:
        # A loader that raised leaves a traceback, which holds on to tensors as well.
        return result
    # Now only: until here, vLLM keeps what its loaders were given.
    impure = result.record.impure | run.retained()
    record = replace(result.record, impure=impure)
    left_out = too_large(
        record.copies,
        metas=manifest.metas,
        shards=num_shards(worker),
        impure=impure,
        partial=partial,
    )
    found = (*result.problems, *left_out)
    plan = None if found else make_plan(model, manifest.metas, record)
    return replace(result, record=record, problems=found, plan=plan)


@dataclass(slots=True)
class _Outcome:
    """What became of the sources so far."""

    problems: list[Problem] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    unverified: set[int] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    # Modules that a failed source was aimed at: what they lack was said already.
    excused: set[str] = field(default_factory=set)


class _Run:
    """One dry run, while the model's tensors are on the meta device."""

    def __init__(
        self, worker: Any, model: torch.nn.Module, metas: Sequence[TensorMeta], waiver: Waiver
    ) -> None:
        self._worker = worker
        self._model = model
        self._metas = metas
        self._waiver = waiver
        self._modules = completeness.targets_of(model.named_modules())
        self._recorder = Recorder(
            target for entry in self._modules for target in entry.targets.values()
        )
        self._tensors = [
            torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            for meta in metas
        ]
        for source, tensor in enumerate(self._tensors):
            self._recorder.add_source(source, tensor)
        self._now = _Outcome()

    def result(self) -> DryRunResult:
        """Feed everything, then look at what it came to."""
        order = list(self._worth_feeding())
        is_all = self._feed_all(order)
        now = self._now
        copies = tuple(copy for copy in self._recorder.copies if copy.source not in now.failed)
        if is_all:
            self._find_dropped(order)
            now.problems.extend(completeness.overlaps(self._modules, self._metas))
            now.problems.extend(self._missing())
            now.problems.extend(truncations(copies, metas=self._metas, modules=self._modules))
        record = LoadRecord(
            copies=copies,
            fills=tuple(self._recorder.fills),
            impure=frozenset(self._recorder.impure | now.unverified),
            unverified=frozenset(now.unverified),
            tainted=frozenset(self._recorder.tainted),
            skipped=now.skipped,
        )
        return DryRunResult(
            record=record,
            problems=tuple(now.problems),
            left_as_is=tuple(sorted(self._waiver.used)),
            casts=casts_of(copies, metas=self._metas, modules=self._modules),
        )

    def retained(self) -> frozenset[int]:
        """Return the sources that a loader still holds on to, and does who knows what with."""
        control = [torch.empty(0, device="meta")]
        self._recorder.add_source(len(self._tensors), control[0])
        alone = _num_uses(control, 0)
        uses = (_num_uses(self._tensors, source) for source in range(len(self._tensors)))
        return frozenset(source for source, num_uses in enumerate(uses) if num_uses != alone)

    def _worth_feeding(self) -> Iterator[int]:
        """Yield sources without tied duplicates and repeated names."""
        seen: set[str] = set()
        for source, meta in enumerate(self._metas):
            if meta.name in seen:
                self._now.problems.append(problems.repeated(meta.name))
                self._now.failed.add(source)
                continue
            seen.add(meta.name)
            tied_to = self._waiver.tied_to(compat.engine_name(self._model, meta.name))
            if tied_to is None:
                yield source
            else:
                self._now.skipped[meta.name] = f"tied to {tied_to}"

    def _feed_all(self, order: Sequence[int]) -> bool:
        """Feed sources; return ``False`` if it was given up because too much was wrong."""
        first = 0
        while first < len(order):
            if len(self._now.problems) >= problems.MAX_PROBLEMS:
                return False
            first += self._feed_until_failure(order[first:])
        return True

    def _feed_until_failure(self, order: Sequence[int]) -> int:
        """Feed sources; return how many of them are dealt with."""
        fed = 0

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal fed
            for source in order:
                fed += 1
                self._recorder.aim = None
                yield self._metas[source].name, self._tensors[source]

        error = self._load(weights())
        if error is None:
            return len(order)
        suspects = list(order[:fed])
        if fed <= 1:
            self._note(suspects, error)
            return 1
        self._recorder.forget(frozenset(suspects[-1:]))
        alone = self._feed_alone(suspects[-1])
        if alone is None:
            self._search(suspects, error)
        return fed

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Exception | None:
        try:
            with self._recorder:
                experts.load(self._model, weights)
        # Loaders raise whatever they like: the kind is told by what they were doing.
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def _feed_alone(self, source: int) -> Exception | None:
        self._recorder.aim = None
        error = self._load(iter([(self._metas[source].name, self._tensors[source])]))
        if error is not None:
            self._note([source], error)
        return error

    def _search(self, suspects: Sequence[int], error: Exception) -> None:
        """Find by halves what raised, where the tensor asked for last is innocent."""
        num_before = len(self._now.failed)
        waiting = [list(suspects)]
        while waiting and len(self._now.problems) < problems.MAX_PROBLEMS:
            part = waiting.pop()
            self._recorder.forget(frozenset(part))
            if len(part) == 1:
                self._feed_alone(part[0])
            elif self._load(iter([(self._metas[one].name, self._tensors[one]) for one in part])):
                half = len(part) // 2
                waiting += [part[half:], part[:half]]
        if len(self._now.failed) == num_before:
            self._note(suspects[-1:], error)

    def _note(self, suspects: Sequence[int], error: Exception) -> None:
        """Take note of what is wrong with the last of ``suspects``."""
        now, source = self._now, suspects[-1]
        meta = self._metas[source]
        now.failed.add(source)
        self._recorder.forget(frozenset([source]))
        aim = self._aim(source)
        if aim is not None:
            now.excused.add(aim[0].name.rpartition(".")[0])
        if _wants_values(error):
            now.unverified.add(source)
        elif aim is not None:
            now.problems.append(
                problems.mismatch(meta.name, shape=meta.shape, target=aim[0].name, expected=aim[1])
                if tuple(meta.shape) != tuple(aim[1])
                else problems.loader_failed(meta.name, error)
            )
        elif meta.is_buffer:
            now.skipped[meta.name] = "a buffer that the engine's model has no place for"
        elif (why := compat.why_skipped(self._worker, self._model, meta.name)) is not None:
            now.skipped[meta.name] = why
        else:
            now.problems.append(problems.unknown(self._model, meta.name))

    def _aim(self, source: int) -> tuple[Target, tuple[int, ...]] | None:
        """Return what a source that failed was meant for, and the shape expected of it."""
        if self._recorder.aim is not None:
            target, shape = self._recorder.aim
            return target, _without_padding(self._modules, target, shape)
        for entry in self._modules:
            info = layerwise.LAYERWISE_INFO.get(entry.module)
            for name, bound in info.loaded_weights if info is not None else ():
                if source in _sources(self._recorder, bound) and name in entry.targets:
                    target = entry.targets[name]
                    return target, _without_padding([entry], target, tuple(target.tensor.shape))
        name = compat.engine_name(self._model, self._metas[source].name)
        for entry in self._modules:
            for target in entry.targets.values():
                if target.name == name:
                    return target, _without_padding([entry], target, tuple(target.tensor.shape))
        return None

    def _find_dropped(self, order: Sequence[int]) -> None:
        """Find sources that no loader did anything with."""
        now = self._now
        kept: set[int] = set()
        for entry in self._modules:
            info = layerwise.LAYERWISE_INFO.get(entry.module)
            for _, bound in info.loaded_weights if info is not None else ():
                kept |= _sources(self._recorder, bound)
        for source in order:
            meta = self._metas[source]
            if source in self._recorder.consumed or source in now.failed or source in kept:
                continue
            why = compat.why_skipped(self._worker, self._model, meta.name)
            if why is not None:
                now.skipped[meta.name] = why
            elif meta.is_buffer:
                now.skipped[meta.name] = "a buffer that the engine's model has no place for"
            else:
                now.problems.append(problems.skipped_in_silence(meta.name))

    def _missing(self) -> list[Problem]:
        judged = [entry for entry in self._modules if entry.path not in self._now.excused]
        return completeness.judge(judged, waiver=self._waiver, arrived=self._arrived)

    def _arrived(self, target: Target) -> list[str]:
        sources = dict.fromkeys(source for _, source in target.covered if source >= 0)
        return [self._metas[source].name for source in sources]


def _num_uses(tensors: list[torch.Tensor], source: int) -> tuple[int, int]:
    """Return how many hold on to a tensor, and how many to its storage."""
    num_views = torch._C._storage_Use_Count(tensors[source].untyped_storage()._cdata)
    return sys.getrefcount(tensors[source]), int(num_views)


def _sources(recorder: Recorder, bound: Any) -> set[int]:
    found = {
        recorder.source_of(value)
        for value in bound.arguments.values()
        if isinstance(value, torch.Tensor)
    }
    return {source for source in found if source is not None}


def _without_padding(
    modules: Sequence[ModuleTargets], target: Target, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape without rows that only the engine has, where it is an embedding."""
    for entry in modules:
        rows = getattr(entry.module, "org_vocab_size", None)
        if rows is not None and target in entry.targets.values() and shape:
            return (int(rows), *shape[1:])
    return shape


def _wants_values(error: BaseException) -> bool:
    """Whether a loader failed only because the tensors here have no values."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, NotRecordableError | NotImplementedError):
            return True
        if "meta tensor" in str(chain).lower() or "device meta" in str(chain).lower():
            return True
        chain = chain.__cause__ or chain.__context__
    return False
