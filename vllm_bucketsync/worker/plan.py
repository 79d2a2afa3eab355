"""What loading one manifest into one model comes down to, module by module.

Made from a dry run's record. A module is *planned* if every one of its tensors gets its
values by copies and constants alone, none of which overlap, from tensors that go
nowhere else. Anything else is left to vLLM's own loaders, whole modules at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from vllm.model_executor.model_loader.reload import layerwise

from ..layout import TensorMeta
from . import compat
from .coverage import cover
from .record import Copy, Fill, LoadRecord


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedModule:
    """A module that is filled without its loaders.

    Attributes:
        path: Its name within the model.
        module: The module.
        copies: What fills it, in order.
        fills: Constants in it.
        is_whole: Copies and constants give every element of its tensors a value.
        num_elements: Elements that the copies write.
        num_bytes: Bytes of the sources that they read.
        why_not_direct: Why its weights go through post-processing: ``""`` if they need
            not, ``None`` before that was observed.
    """

    path: str
    module: torch.nn.Module
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    is_whole: bool
    num_elements: int
    num_bytes: int
    why_not_direct: str | None = None

    @property
    def is_direct(self) -> bool:
        """Whether sources are copied straight into the live tensors."""
        return self.why_not_direct == ""

    def leaf(self, target: str) -> str:
        """Return the name within the module of one of its tensors."""
        return target.removeprefix(f"{self.path}.") if self.path else target

    def live(self, leaf: str) -> torch.Tensor:
        """Return a live tensor of the module, by its name there."""
        found = self.module._parameters.get(leaf)
        tensor = self.module._buffers[leaf] if found is None else found
        if tensor is None:
            raise RuntimeError(f"{self.path}.{leaf} is gone from the model")
        return tensor.detach()


@dataclass(slots=True, kw_only=True, eq=False)
class Plan:
    """How one manifest is loaded into one model.

    Attributes:
        metas: The manifest's tensors.
        modules: What is filled by the plan.
        of_source: For each source that the plan copies: its module and its copies.
        by_loaders: Sources that go to vLLM's own loaders.
        loaded_modules: The modules that those fill.
        generation: Counts the changes of ``PlannedModule.why_not_direct``, which make
            void what was prepared before.
        kernels: What computed with the weights of direct modules when they were observed,
            with the quant method that has it.
    """

    metas: Sequence[TensorMeta]
    modules: tuple[PlannedModule, ...]
    of_source: dict[int, tuple[PlannedModule, tuple[Copy, ...]]] = field(repr=False)
    by_loaders: frozenset[int]
    loaded_modules: frozenset[torch.nn.Module] = field(repr=False)
    generation: int = 0
    kernels: dict[int, tuple[object, object]] = field(default_factory=dict, repr=False)

    def settle(self, found: dict[PlannedModule, str]) -> None:
        """Take over what was observed of modules: why each is not direct, or ``""``."""
        for planned, why in found.items():
            planned.why_not_direct = why
            method = getattr(planned.module, "quant_method", None)
            if planned.is_direct and method is not None:
                self.kernels[id(method)] = (method, compat.kernel_of(method))
        self.generation += bool(found)

    def is_current(self) -> bool:
        """Whether the direct modules have the kernels that they were observed with.

        For a model that looks as it did: its modules have the same quant methods.
        """
        return all(compat.kernel_of(method) is one for method, one in self.kernels.values())


def make_plan(
    model: torch.nn.Module, metas: Sequence[TensorMeta], record: LoadRecord
) -> Plan | None:
    """Make the plan that a dry run's record allows.

    Args:
        model: The live model.
        metas: The manifest's tensors.
        record: What a dry run of them found, without problems.

    Returns:
        ``None`` if a loader could not be followed at all: it might write anywhere.
    """
    if record.unverified:
        return None
    modules = dict(model.named_modules(remove_duplicate=False))
    copies: dict[str, list[Copy]] = defaultdict(list)
    fills: dict[str, set[Fill]] = defaultdict(set)
    for copy in record.copies:
        copies[_owner(copy.target)].append(copy)
    for fill in record.fills:
        fills[_owner(fill.target)].add(fill)
    unfit = _unfit(modules, copies, fills, record)
    planned = {
        path: _planned(path, modules[path], copies[path], fills[path], metas)
        for path in copies
        if path not in unfit
    }
    found: dict[int, tuple[PlannedModule, list[Copy]]] = {}
    for one in planned.values():
        for copy in one.copies:
            found.setdefault(copy.source, (one, []))[1].append(copy)
    of_source = {source: (one, tuple(made)) for source, (one, made) in found.items()}
    skipped = record.skipped
    return Plan(
        metas=metas,
        modules=tuple(planned.values()),
        of_source=of_source,
        by_loaders=frozenset(
            source
            for source, meta in enumerate(metas)
            if source not in of_source and meta.name not in skipped
        ),
        loaded_modules=frozenset(modules[path] for path in unfit if path in modules),
    )


def _unfit(
    modules: dict[str, torch.nn.Module],
    copies: dict[str, list[Copy]],
    fills: dict[str, set[Fill]],
    record: LoadRecord,
) -> set[str]:
    """Return the paths of modules that only their loaders can fill."""
    unfit = {_owner(name) for name in record.tainted}
    goes_to: dict[int, set[str]] = defaultdict(set)
    for path, made in copies.items():
        for copy in made:
            goes_to[copy.source].add(path)
        module = modules.get(path)
        is_odd = (
            module is None
            or compat.is_processed_last(module)
            or compat.keeps_live_tensors(module)
            # Its weights do not come: scratch of them would hold nothing.
            or all(copy.is_live for copy in made)
        )
        if is_odd or _has_overlap(made, fills[path]):
            unfit.add(path)
    for source, paths in goes_to.items():
        # A loader would fill the other module as well.
        if source in record.impure or len(paths) > 1:
            unfit |= paths
    return unfit


def _has_overlap(copies: Iterable[Copy], fills: Iterable[Fill]) -> bool:
    """Whether the order of what is written to a module matters, or cannot be told."""
    boxes = defaultdict(list)
    for target, box in [
        *((copy.target, copy.target_box) for copy in copies),
        *((fill.target, fill.target_box) for fill in fills),
    ]:
        boxes[target].append(box)
    found = [cover(of_target) for of_target in boxes.values() if len(of_target) > 1]
    return any(one.overlap is not None or not one.is_exact for one in found)


def _planned(
    path: str,
    module: torch.nn.Module,
    copies: Sequence[Copy],
    fills: Iterable[Fill],
    metas: Sequence[TensorMeta],
) -> PlannedModule:
    num_elements = sum(copy.target_box.num_elements for copy in copies)
    num_filled = sum(fill.target_box.num_elements for fill in fills)
    itemsizes = {name: getattr(torch, name).itemsize for name in {m.dtype for m in metas}}
    num_bytes = sum(
        copy.source_box.num_elements * itemsizes[metas[copy.source].dtype] for copy in copies
    )
    return PlannedModule(
        path=path,
        module=module,
        copies=tuple(copies),
        fills=tuple(fills),
        is_whole=num_elements + num_filled == _num_due(path, module, copies),
        num_elements=num_elements,
        num_bytes=num_bytes,
    )


def _num_due(path: str, module: torch.nn.Module, copies: Iterable[Copy]) -> int:
    """Return the elements of what a reload replaces, and of the live tensors that are written."""
    parameters, buffers = layerwise.LAYERWISE_INFO[module].restore_metadata
    reached = {copy.target.removeprefix(f"{path}.") for copy in copies if copy.is_live}
    live = {**module._parameters, **module._buffers}
    due = {**{name: live[name] for name in reached}, **parameters, **buffers}
    transient = module._non_persistent_buffers_set
    return sum(
        one.numel() for name, one in due.items() if one is not None and name not in transient
    )


def _owner(target: str) -> str:
    return target.rpartition(".")[0]
