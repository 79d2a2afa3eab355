"""What vLLM's loaders do with tensors, written down while they do it.

A dispatch mode sees every operation. Views of a source and of a parameter are
followed by their storages; a copy from the one to the other, and a constant fill,
are what a plan can hold. Whatever else touches a source makes it *impure*: its
loader has to be run each time. Copies into live tensors are written down, not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..boxes import Box

_ATEN = torch.ops.aten
_FILLS = {_ATEN.fill_.Scalar, _ATEN.zero_.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy, with a cast where the dtypes differ.

    Attributes:
        source: Which tensor of the manifest.
        source_box: Which part of it.
        target: The engine's parameter or buffer, by its name in the model.
        target_box: Which part of that, before any post-processing.
        is_live: The loader writes it straight into the live model.
    """

    source: int
    source_box: Box
    target: str
    target_box: Box
    is_live: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A constant that a loader writes, such as a vocabulary's padding.

    Attributes:
        target: The engine's parameter or buffer, by its name in the model.
        target_box: Which part of that.
        value: The constant.
        is_live: The loader writes it straight into the live model.
    """

    target: str
    target_box: Box
    value: float
    is_live: bool


@dataclass(slots=True, eq=False)
class Target:
    """A tensor of the model that loaders write to.

    Attributes:
        name: Its name in the model.
        tensor: The tensor: on the meta device, or live.
        covered: The parts that sources reached, each with the source (-1: unknown).
        filled: The parts that constants reached.
    """

    name: str
    tensor: torch.Tensor
    covered: list[tuple[Box, int]] = field(default_factory=list)
    filled: list[Box] = field(default_factory=list)


class NotRecordableError(Exception):
    """A loader needs the values of a tensor that has none here."""


class ShapeError(Exception):
    """A loader would spread a tensor over a larger part of a parameter."""


class Recorder(TorchDispatchMode):
    """Writes down the copies from sources into targets.

    Attributes:
        copies: Every copy from a view of a source, in order.
        fills: Every constant fill, in order.
        impure: Sources that more was done with than to view and copy them.
        tainted: Targets, by name, that more was done to than to copy sources and
            constants into them: what they hold in the end is not known here.
        consumed: Sources that reached a target, or any computation.
        aim: The target that was touched last, and the shape of that view.
    """

    def __init__(self, targets: Iterable[Target]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets: dict[int, Target] = {}
        for target in targets:
            self._targets.setdefault(_storage(target.tensor), target)
        self._sources: dict[int, int] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._derived: dict[int, frozenset[int]] = {}
        # A storage that is gone can give its identity to another.
        self._alive: list[torch.Tensor] = []
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.impure: set[int] = set()
        self.tainted: set[str] = set()
        self.consumed: set[int] = set()
        self.aim: tuple[Target, tuple[int, ...]] | None = None

    def add_source(self, source: int, tensor: torch.Tensor) -> None:
        """Follow a tensor, which has its storage to itself, as number ``source``."""
        self._sources[_storage(tensor)] = source
        self._dtypes[source] = tensor.dtype
        self._alive.append(tensor)

    def source_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the source that ``tensor`` is a view of."""
        return self._sources.get(_storage(tensor))

    def forget(self, sources: frozenset[int]) -> None:
        """Drop what was written down of these sources: they are loaded again."""
        self.copies = [copy for copy in self.copies if copy.source not in sources]
        for target in self._targets.values():
            target.covered = [part for part in target.covered if part[1] not in sources]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default:
            return self._copy(func, args, kwargs)
        if func in _FILLS:
            return self._fill(func, args, kwargs)
        if func.is_view:
            return self._view(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _view(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            target = self._targets.get(_storage(out))
            if target is not None:
                self.aim = (target, tuple(out.shape))
        return out

    def _copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        to, value = args[0], args[1]
        target = self._targets.get(_storage(to))
        if target is None:
            return self._compute(func, args, kwargs)
        self.aim = (target, tuple(to.shape))
        if to.shape != value.shape and to.numel() != value.numel():
            raise ShapeError
        source = self._sources.get(_storage(value))
        box = _box(to, target.tensor)
        if source is not None and self._means_what_it_says(source, value, to, target):
            self.consumed.add(source)
            target.covered.append((box, source))
            self.copies.append(
                Copy(
                    source=source,
                    source_box=_box(value.expand_as(to)),
                    target=target.name,
                    target_box=box,
                    is_live=not to.is_meta,
                )
            )
        else:
            sources = self._sources_of([value])
            self._mark(sources)
            self._taint([to, value])
            target.covered.extend((box, one) for one in sources or {-1})
        # The recorder counts; the storage of a live tensor is left as it is.
        return to if not to.is_meta else func(*args, **kwargs)

    def _means_what_it_says(
        self, source: int, value: torch.Tensor, to: torch.Tensor, target: Target
    ) -> bool:
        """Whether a copy is one of values, and not of bits that are shown as another dtype."""
        return (
            value.dtype == self._dtypes[source]
            and to.dtype == target.tensor.dtype
            and not (value.is_conj() or value.is_neg())
        )

    def _fill(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        to = args[0]
        target = self._targets.get(_storage(to))
        if target is None:
            return func(*args, **kwargs)
        if to.dtype != target.tensor.dtype:
            return self._compute(func, args, kwargs)
        value = float(args[1]) if len(args) > 1 else 0.0
        box = _box(to, target.tensor)
        target.filled.append(box)
        self.fills.append(
            Fill(target=target.name, target_box=box, value=value, is_live=not to.is_meta)
        )
        return to

    def _compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run what is neither view, copy nor fill, unless it would write to the live model."""
        tensors = list(_tensors([*args, *kwargs.values()]))
        sources = self._sources_of(tensors)
        self._mark(sources)
        self._taint(tensors)
        if func._schema.is_mutable and tensors:
            target = self._targets.get(_storage(tensors[0]))
            if target is not None:
                target.covered.extend(
                    (_box(tensors[0], target.tensor), one) for one in sources or {-1}
                )
                if not tensors[0].is_meta:
                    return tensors[0]
        if sources and func is _ATEN._to_copy.default:
            # A move to the model's device is no reason to stop: nothing has values here.
            kwargs = {**kwargs, "device": "meta"}
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if sources:
                raise NotRecordableError(str(func)) from error
            raise
        for tensor in _tensors([out]):
            if sources:
                self._derived[_storage(tensor)] = sources | self._sources_of([tensor])
                self._alive.append(tensor)
        return out

    def _sources_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        found: set[int] = set()
        for tensor in tensors:
            storage = _storage(tensor)
            if storage in self._sources:
                found.add(self._sources[storage])
            found |= self._derived.get(storage, frozenset())
        return frozenset(found)

    def _taint(self, tensors: Iterable[torch.Tensor]) -> None:
        found = (self._targets.get(_storage(tensor)) for tensor in tensors)
        self.tainted |= {target.name for target in found if target is not None}

    def _mark(self, sources: frozenset[int]) -> None:
        self.impure |= sources
        self.consumed |= sources


def _storage(tensor: torch.Tensor) -> int:
    # All meta storages have address 0, so it is the storage object that tells them apart.
    return int(tensor.untyped_storage()._cdata)


def _box(tensor: torch.Tensor, base: torch.Tensor | None = None) -> Box:
    if base is not None and tensor.itemsize != base.itemsize:
        tensor = _shown_as(tensor, base)
    first = 0 if base is None else base.storage_offset()
    return Box(int(tensor.storage_offset()) - int(first), tuple(tensor.shape), tensor.stride())


def _shown_as(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as elements of ``base``'s dtype; all of it where that cannot be."""
    try:
        return tensor.view(base.dtype)
    except RuntimeError:
        return base


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """What loading one manifest into one model comes down to.

    Sources are positions in the manifest; targets are names in the model, in the
    layout that checkpoints have, before any post-processing.

    Attributes:
        copies: Every copy, in the order in which the loaders make them.
        fills: Every constant that they write.
        impure: Sources whose loader does more than to view and copy: run it.
        unverified: Of these, the ones whose loader could not be followed at all.
        tainted: Targets whose loader does more to them than to copy and to fill.
        skipped: Names that go nowhere, rightly, and why.
    """

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    impure: frozenset[int]
    unverified: frozenset[int]
    tainted: frozenset[str]
    skipped: dict[str, str]
