"""Whether every parameter of a model gets a value, and a whole one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from ..layout import TensorMeta
from . import compat, problems
from .coverage import cover
from .problems import Problem
from .record import Target


@dataclass(frozen=True, slots=True)
class ModuleTargets:
    """A module's own tensors, as something to be loaded.

    Attributes:
        path: The module's name within the model.
        module: The module, in the middle of a reload.
        targets: Its parameters and persistent buffers, by their last name.
    """

    path: str
    module: torch.nn.Module
    targets: Mapping[str, Target]


@dataclass(frozen=True, slots=True)
class Waiver:
    """Which parameters may stay without a value.

    Attributes:
        patterns: fnmatch patterns over parameter names, as the user gave them.
        tied: Names that share their parameter with another one.
        used: Patterns that were needed so far: something did not come.
    """

    patterns: Sequence[str]
    tied: Mapping[str, str]
    used: set[str] = field(default_factory=set, compare=False)

    def tied_to(self, name: str | None) -> str | None:
        """Return the name whose parameter ``name``, as the loaders know it, shares."""
        return self.tied.get(name or "")

    def covers(self, name: str) -> bool:
        """Whether parameter ``name``, which got none, may keep its old value."""
        if name in self.tied:
            return True
        found = next((one for one in self.patterns if fnmatchcase(name, one)), None)
        if found is not None:
            self.used.add(found)
        return found is not None


def idle_patterns(model: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the patterns that no parameter of a model is matched by: typos, most likely."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)} if patterns else ()
    return [one for one in patterns if not any(fnmatchcase(name, one) for name in names)]


def targets_of(
    named_modules: Iterable[tuple[str, torch.nn.Module]],
) -> list[ModuleTargets]:
    """Return what loaders can write to, modules without tensors left out.

    A tensor that several modules hold is one target, under the first name.
    """
    known: dict[int, Target] = {}
    found = []
    for path, module in named_modules:
        targets = {}
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            full = f"{path}.{name}" if path else name
            targets[name] = known.setdefault(id(tensor), Target(full, tensor))
        if targets:
            found.append(ModuleTargets(path, module, targets))
    return found


def overlaps(modules: Iterable[ModuleTargets], metas: Sequence[TensorMeta]) -> list[Problem]:
    """Return which sources would land in the same elements: one pair for each target."""
    found = []
    targets = {id(target): target for entry in modules for target in entry.targets.values()}
    for target in targets.values():
        parts = [(box, source) for box, source in target.covered if source >= 0]
        pair = cover([box for box, _ in parts]).overlap if len(parts) > 1 else None
        if pair is None:
            continue
        first, second = (metas[parts[position][1]].name for position in pair)
        # A loader may well write one source twice.
        if first != second:
            found.append(problems.same_place(second, other=first, target=target.name))
    return found


def judge(
    modules: Iterable[ModuleTargets],
    *,
    waiver: Waiver,
    arrived: Callable[[Target], Sequence[str]],
    came: Collection[str] = (),
) -> list[Problem]:
    """Return what is missing in ``modules``.

    Args:
        modules: The modules and what reached them.
        waiver: What may be missing.
        arrived: Names of the sources that reached a target, for the text.
        came: Names of targets that are known to have got their value.
    """
    found: dict[str, Problem] = {}
    for entry in modules:
        # Attention-like modules hold scales, which have defaults.
        if compat.is_processed_last(entry.module) or compat.keeps_live_tensors(entry.module):
            continue
        for problem in _judge_module(entry, waiver=waiver, arrived=arrived, came=came):
            found.setdefault(problem.name, problem)
    return list(found.values())


def _judge_module(
    entry: ModuleTargets,
    *,
    waiver: Waiver,
    arrived: Callable[[Target], Sequence[str]],
    came: Collection[str],
) -> Iterable[Problem]:
    alone = compat.independent_names()
    reached = {name: _num_reached(target) for name, target in entry.targets.items()}
    is_loaded = any(num for name, (num, _) in reached.items() if name not in alone)
    for name, (num_reached, num_expected) in reached.items():
        target = entry.targets[name]
        if num_reached >= num_expected or target.name in came:
            continue
        # What is built anew with its module would be garbage if nothing came.
        if num_reached or (is_loaded and name not in alone):
            yield problems.in_part(
                target.name,
                num_elements=num_reached,
                expected=num_expected,
                arrived=arrived(target),
            )
        elif name in entry.module._parameters and not waiver.covers(target.name):
            yield problems.never_sent(target.name, shape=target.tensor.shape)


def _num_reached(target: Target) -> tuple[int, int]:
    """Return how many elements got a value, and how many should."""
    num_expected = target.tensor.numel()
    boxes = [box for box, _ in target.covered]
    if not boxes:
        return 0, num_expected
    if any(math.prod(box.shape) == num_expected for box in boxes):
        return num_expected, num_expected
    num_copied = cover(boxes).num_elements
    # A padded parameter says how much of it a checkpoint has.
    num_loadable = int(getattr(target.tensor, "weight_loader_numel", num_expected))
    if num_copied >= num_loadable:
        return num_expected, num_expected
    if target.filled:
        num_copied = cover([*boxes, *target.filled]).num_elements
    return num_copied, num_expected
