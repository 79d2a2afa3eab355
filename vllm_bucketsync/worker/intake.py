"""Feeding tensors that no dry run has seen: each name is watched while it is loaded.

What a declared manifest is checked for in advance is checked here as it comes, so a
fault may be found when modules were replaced already. A missing tensor is known only
at the end.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from inspect import BoundArguments
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..layout import TensorMeta
from . import compat, completeness, experts, problems
from .completeness import Waiver
from .layerwise import LayerwiseReload, OpenLayer, original_loader
from .problems import Problem
from .record import Recorder, Target

logger = logging.getLogger(__name__)

Weights = Sequence[tuple[TensorMeta, torch.Tensor]]
_STATE = "part of the update may be in the model"


class Intake:
    """The names of one update, and what became of them.

    Attributes:
        skipped: Names that go nowhere, rightly, and why.
    """

    def __init__(
        self, worker: Any, model: torch.nn.Module, reload: LayerwiseReload, waiver: Waiver
    ) -> None:
        self._worker = worker
        self._model = model
        self._reload = reload
        self._waiver = waiver
        self._known = compat.tensor_names(model)
        self._seen: set[str] = set()
        self._loaded: set[str] = set()
        self._says_what_it_loads = True
        self.skipped: dict[str, str] = {}

    def note_planned(self, metas: Iterable[TensorMeta], targets: Iterable[str]) -> None:
        """Count tensors, and what they reached in the engine, as seen and loaded."""
        self._seen.update(meta.name for meta in metas)
        self._loaded.update(targets)

    def feed_declared(self, weights: Weights) -> None:
        """Feed tensors that a dry run has found good.

        Raises:
            LoadError: A loader raised all the same.
        """
        self._seen.update(meta.name for meta, _ in weights)
        error, name = self._feed(weights)
        if error is not None:
            # Logged, not chained: its traceback holds views of the bucket.
            logger.error("a loader that a dry run found good raised at %s", name, exc_info=error)
            problems.raise_problems([problems.loader_failed(name, error)], state=_STATE)

    def feed_watched(self, weights: Weights) -> None:
        """Feed tensors that nothing is known of.

        Raises:
            LoadError: One of them is unknown, repeated, or does not fit.
        """
        plain: list[tuple[TensorMeta, torch.Tensor]] = []
        for meta, data in weights:
            if meta.name in self._seen:
                problems.raise_problems([problems.repeated(meta.name)], state=_STATE)
            self._seen.add(meta.name)
            engine_name = compat.engine_name(self._model, meta.name)
            if (tied_to := self._waiver.tied_to(engine_name)) is not None:
                self.skipped[meta.name] = f"tied to {tied_to}"
            elif meta.is_buffer and engine_name not in self._known:
                # A loader would raise at it, and drop what comes behind it.
                self._feed_and_check([(meta, data)])
            else:
                plain.append((meta, data))
        if plain:
            self._feed_and_check(plain)

    def missing(self) -> list[Problem]:
        """Return what the model still lacks. Called once everything was fed."""
        waiting = self._reload.waiting()
        begun = [layer for layer in waiting if layer.info.loaded_weights]
        untouched = [layer for layer in waiting if not layer.info.loaded_weights]
        came = self._loaded_independently()
        found = _judge_again(begun, self._waiver, self._arrived_near, came)
        found += completeness.judge(
            completeness.targets_of((layer.path, layer.module) for layer in untouched),
            waiver=self._waiver,
            arrived=lambda target: (),
            came=came,
        )
        told = {problem.name for problem in found}
        return found + [one for one in self._missing_live() if one.name not in told]

    def _feed_and_check(self, weights: Weights) -> None:
        with _Watch([data for _, data in weights]) as watch:
            error, name = self._feed(weights)
        unused = watch.unused()
        if unused:
            watch.note_kept(self._reload.waiting())
            unused = watch.unused()
        if error is not None:
            position = next(i for i, (meta, _) in enumerate(weights) if meta.name == name)
            if not self._may_split(name, is_unused=position in unused):
                self._handle_failure(weights[position], error, was_used=position not in unused)
                return
            # Loaded, though their loader could not say it any more.
            self._loaded |= {
                compat.engine_name(self._model, meta.name) or meta.name
                for index, (meta, _) in enumerate(weights[:position])
                if index not in unused
            }
            self._feed_and_check(weights[position:])
            unused = {one for one in unused if one < position}
        for position in sorted(unused):
            self._handle_unused(weights[position][0])

    def _may_split(self, name: str, *, is_unused: bool) -> bool:
        """Whether to try again with experts one by one, after a loader raised at ``name``."""
        if not (is_unused and experts.is_fused(name)) or experts.are_split(self._model):
            return False
        experts.split_from_now_on(self._model)
        return True

    def _feed(self, weights: Weights) -> tuple[Exception | None, str]:
        """Feed tensors; return what was raised, and at which name."""
        now = ""

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal now
            for meta, data in weights:
                now = meta.name
                yield meta.name, data

        try:
            loaded = self._reload.feed(named())
        # Loaders raise whatever they like; the caller tells the kinds apart.
        except Exception as error:  # noqa: BLE001
            return error, now
        self._says_what_it_loads &= loaded is not None
        self._loaded |= loaded or set()
        return None, now

    def _handle_failure(
        self, weight: tuple[TensorMeta, torch.Tensor], error: Exception, *, was_used: bool
    ) -> None:
        meta, data = weight
        kept = _find_kept(self._reload.waiting(), data)
        if kept is None and not was_used:
            self._handle_unused(meta, is_refused=True)
            return
        logger.error("a loader raised at %s", meta.name, exc_info=error)
        problem = problems.loader_failed(meta.name, error)
        shape = None if kept is None else _misfit(*kept)
        if kept is not None and shape is not None:
            target = f"{kept[0].path}.{kept[1]}"
            problem = problems.mismatch(meta.name, shape=meta.shape, target=target, expected=shape)
        problems.raise_problems([problem], state=_STATE)

    def _handle_unused(self, meta: TensorMeta, *, is_refused: bool = False) -> None:
        why = compat.why_skipped(self._worker, self._model, meta.name)
        if why is not None:
            self.skipped[meta.name] = why
        elif meta.is_buffer:
            self.skipped[meta.name] = "a buffer that the engine's model has no place for"
        elif is_refused:
            problems.raise_problems([problems.unknown(self._model, meta.name)], state=_STATE)
        else:
            problems.raise_problems([problems.skipped_in_silence(meta.name)], state=_STATE)

    def _missing_live(self) -> Iterator[Problem]:
        """Yield parameters that loaders write straight into the model, and did not."""
        if not self._says_what_it_loads:
            return
        alone = compat.independent_names()
        loaded = self._loaded_independently()
        for name, tensor in self._model.named_parameters():
            is_due = name.rpartition(".")[2] in alone and name not in loaded
            if is_due and not self._waiver.covers(name):
                yield problems.never_sent(name, shape=tensor.shape)

    def _loaded_independently(self) -> set[str]:
        """Names, and their aliases, of the live tensors that loaders say they wrote."""
        alone = compat.independent_names()
        named = dict(self._model.named_parameters(remove_duplicate=False))
        loaded = {
            id(named[name])
            for name in self._loaded
            if name in named and name.rpartition(".")[2] in alone
        }
        return {name for name, tensor in named.items() if id(tensor) in loaded}

    def _arrived_near(self, target: Any) -> list[str]:
        """Return names from the module that a target's module lies in."""
        parent = target.name.rpartition(".")[0].rpartition(".")[0]
        return sorted(name for name in self._seen if parent and name.startswith(f"{parent}."))


class _Watch(TorchDispatchMode):
    """Sees which of a list of tensors anything is computed or copied from.

    Tensors are told by their addresses, since those of a bucket share a storage.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Without elements there is nothing that could be read.
        ranges = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, position)
            for position, tensor in enumerate(tensors)
            if tensor.nbytes
        )
        self._first = [first for first, _, _ in ranges]
        self._ranges = ranges
        self._unused = {position for _, _, position in ranges}

    def unused(self) -> set[int]:
        """Return the positions of the tensors that nothing was done with."""
        return set(self._unused)

    def note_kept(self, layers: Sequence[OpenLayer]) -> None:
        """Count what vLLM keeps as used: its loaders took it, if only to refuse it later."""
        for layer in layers:
            for _, bound in layer.info.loaded_weights[layer.num_checked :]:
                self._note(bound.arguments.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self._note(args[1:2] if func is torch.ops.aten.copy_.default else args)
        return func(*args, **(kwargs or {}))

    def _note(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and not value.is_meta:
                address = value.data_ptr()
                at = bisect_right(self._first, address) - 1
                if at >= 0 and address < self._ranges[at][1]:
                    self._unused.discard(self._ranges[at][2])
            elif isinstance(value, list | tuple):
                self._note(value)


def _find_kept(
    layers: Sequence[OpenLayer], data: torch.Tensor
) -> tuple[OpenLayer, str, BoundArguments] | None:
    """Return where vLLM keeps ``data``: the layer, its tensor's name, the loader's arguments."""
    first, end = data.data_ptr(), data.data_ptr() + data.nbytes
    for layer in layers:
        for name, bound in layer.info.loaded_weights[layer.num_checked :]:
            for value in bound.arguments.values():
                is_here = isinstance(value, torch.Tensor) and not value.is_meta
                if is_here and first <= value.data_ptr() < end:
                    return layer, name, bound
    return None


def _misfit(layer: OpenLayer, name: str, bound: BoundArguments) -> tuple[int, ...] | None:
    """Return the shape that a loader wants, where it refuses what it was given for its shape.

    The loader runs once more, onto a tensor without values: one that raised for
    another reason does not raise now.
    """
    parameters, buffers = layer.info.restore_metadata
    tensor = {**buffers, **parameters}.get(name)
    if tensor is None:
        # Such a tensor is live, and the recorder keeps it from being written to.
        tensor = getattr(layer.module, name)
    again = BoundArguments(bound.signature, OrderedDict(bound.arguments, param=tensor))
    recorder = Recorder([Target(f"{layer.path}.{name}", tensor)])
    try:
        with recorder:
            original_loader(tensor)(*again.args, **again.kwargs)
    # Loaders raise whatever they like.
    except Exception:  # noqa: BLE001
        return tuple(tensor.shape) if recorder.aim is None else recorder.aim[1]
    return None


def _judge_again(
    layers: Sequence[OpenLayer], waiver: Waiver, arrived: Any, came: set[str]
) -> list[Problem]:
    """Judge modules that began to load, by loading what vLLM keeps once more onto meta.

    vLLM's own count leaves out what loaders fill with constants, such as the rows of
    a padded vocabulary.
    """
    modules = completeness.targets_of((layer.path, layer.module) for layer in layers)
    with Recorder(target for entry in modules for target in entry.targets.values()):
        for layer in layers:
            for name, bound in layer.info.loaded_weights:
                original_loader(getattr(layer.module, name))(*bound.args, **bound.kwargs)
    return completeness.judge(modules, waiver=waiver, arrived=arrived, came=came)
