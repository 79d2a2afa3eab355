"""Whether an adapter's tensors fit an engine: every name, partner, rank, shape and dtype.

vLLM itself takes unknown modules in silence, and fails half-way at a missing partner or a
wrong shape. So everything is looked at here, from descriptions alone, before it is asked.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

from ...errors import AdapterModuleError, AdapterTensorError
from ...layout import TensorMeta
from .. import compat
from ..problems import summary
from .places import Place, places_of

MAX_NAMED = 20
MAX_FITS = 8
_NOTHING = "nothing was changed"
_SIDES = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
_OTHER = {one: other for a, b in _SIDES for one, other in ((a, b), (b, a))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Where an adapter goes in one worker.

    Attributes:
        modules: vLLM's modules that take part of it.
        skipped: Names of tensors that go nowhere, rightly.
        is_stacked: Its experts are stacked in one tensor (vLLM's 3D format).
        notes: What a user may not expect.
    """

    modules: frozenset[str]
    skipped: tuple[str, ...]
    is_stacked: bool
    notes: tuple[str, ...] = ()


class Fits:
    """The fits of the last few kinds of adapters: a new version is checked once."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Fit] = OrderedDict()

    def get(self, key: Hashable, *, check: Callable[[], Fit]) -> Fit:
        """Return what was found before for the same key, or what ``check`` finds.

        Args:
            key: All that it depends on. vLLM's manager never changes its modules.
            check: Finds it, or raises: then it is asked again the next time.
        """
        found = self._known.pop(key, None)
        self._known[key] = check() if found is None else found
        if len(self._known) > MAX_FITS:
            self._known.popitem(last=False)
        return self._known[key]


@dataclass(slots=True)
class _Pair:
    """One module's two tensors, as far as they were named.

    Attributes:
        name: The module's name in the adapter.
    """

    name: str
    a: TensorMeta | None = None
    b: TensorMeta | None = None

    @property
    def metas(self) -> list[TensorMeta]:
        return [meta for meta in (self.a, self.b) if meta is not None]


@dataclass(slots=True)
class _Problems:
    tensors: list[tuple[str, str, str, str]] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def add(self, tensor: str, *, expected: str, got: str, advice: str) -> None:
        text = f"{tensor!r} does not fit: expected {expected}, got {got}; {advice}"
        self.tensors.append((text, tensor, expected, got))


def check_fit(
    metas: Iterable[TensorMeta],
    *,
    worker: Any,
    helper: Any,
    adapter: str,
    partial: Sequence[str] = (),
) -> Fit:
    """Confirm that an adapter can be applied whole.

    Args:
        metas: Its tensors.
        worker: vLLM's worker, with LoRA.
        helper: Its config, as vLLM has it.
        adapter: Its name, for messages.
        partial: fnmatch patterns of the adapter's module names that may go nowhere.

    Raises:
        AdapterModuleError: Modules have no place, or nothing of it has.
        AdapterTensorError: A tensor is missing, or does not fit.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    places = places_of(manager)
    problems = _Problems()
    pairs, skipped = _pairs(metas, manager.model, problems)
    matched: dict[str, Place] = {}
    num_elsewhere = 0
    for module, pair in pairs.items():
        place = places.get(module)
        if place is not None:
            matched[module] = place
            _check_pair(pair, place, helper, problems)
        elif compat.is_on_another_stage(manager.model, module):
            num_elsewhere += 1
        elif any(fnmatchcase(pair.name, pattern) for pattern in partial):
            skipped += [meta.name for meta in pair.metas]
        else:
            problems.unmatched.append(pair.name)
    _check_partners(matched, pairs, problems)
    if problems.unmatched or not (matched or num_elsewhere or problems.tensors):
        unmatched = problems.unmatched or [pair.name for pair in pairs.values()]
        _raise_unmatched(unmatched, places, adapter=adapter, is_all=not matched)
    if problems.tensors:
        _raise_tensors(problems, adapter)
    return Fit(
        modules=frozenset(place.module for place in matched.values()),
        skipped=tuple(skipped),
        is_stacked=any(place.num_experts > 1 for place in matched.values()),
        notes=_idle_patterns(partial, pairs),
    )


def _idle_patterns(partial: Sequence[str], pairs: dict[str, _Pair]) -> tuple[str, ...]:
    """Return a note of each pattern that no module of the adapter is matched by."""
    names = [pair.name for pair in pairs.values()]
    return tuple(
        f"partial names {pattern!r}, which matches no module of the adapter"
        for pattern in partial
        if not any(fnmatchcase(name, pattern) for name in names)
    )


def _pairs(
    metas: Iterable[TensorMeta], model: Any, problems: _Problems
) -> tuple[dict[str, _Pair], list[str]]:
    """Sort tensors by the module that vLLM would put them in."""
    mapper = compat.rename_mapper(model)
    prefixes = getattr(model, "lora_skip_prefixes", None)
    pairs: dict[str, _Pair] = {}
    skipped: list[str] = []
    for meta in metas:
        is_left_out = prefixes and LoRAModel._should_skip_module(meta.name, prefixes)
        if is_base_embedding_weights(meta.name) or is_left_out:
            skipped.append(meta.name)
            continue
        try:
            compat.check_adapter_name(meta.name)
            module, is_a = parse_fine_tuned_lora_name(meta.name, mapper)
            name, _ = parse_fine_tuned_lora_name(meta.name)
        except ValueError:
            problems.add(
                meta.name,
                expected="….lora_A.weight or ….lora_B.weight",
                got="another name",
                advice="send what PEFT saves of a LoRA, without biases and whole modules",
            )
            continue
        pair = pairs.setdefault(module, _Pair(name))
        if getattr(pair, "a" if is_a else "b") is not None:
            problems.add(meta.name, expected="once", got="twice", advice="send each tensor once")
        setattr(pair, "a" if is_a else "b", meta)
    return pairs, skipped


def _check_pair(pair: _Pair, place: Place, helper: Any, problems: _Problems) -> None:
    if pair.a is None or pair.b is None:
        known, lacking = ("lora_B", "lora_A") if pair.a is None else ("lora_A", "lora_B")
        name = ".".join(_OTHER.get(part, part) for part in pair.metas[0].name.split("."))
        advice = f"its {known} came, and is worth nothing without {lacking}; send both"
        problems.add(name, expected=f"a {lacking}", got="nothing", advice=advice)
        return
    for meta in (pair.a, pair.b):
        if not getattr(torch, meta.dtype).is_floating_point:
            advice = "send it in a dtype of floats"
            problems.add(meta.name, expected="floats", got=meta.dtype, advice=advice)
    if place.partners and place.inputs is None:
        return
    rank = compat.rank_of(helper, pair.name) * place.num_experts
    advice = f"it is for {place.module} of the engine, with rank and target as in its config"
    for meta, expected in (
        (pair.a, (rank, place.inputs)),
        (pair.b, (place.outputs, rank)),
    ):
        if not _agrees(meta.shape, expected):
            shape = "[" + ", ".join("any" if s is None else str(s) for s in expected) + "]"
            problems.add(meta.name, expected=shape, got=str(list(meta.shape)), advice=advice)


def _agrees(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(
        wanted is None or size == wanted for size, wanted in zip(shape, expected, strict=True)
    )


def _check_partners(
    matched: dict[str, Place], pairs: dict[str, _Pair], problems: _Problems
) -> None:
    """Find experts without an adapter where others of their layer have one."""
    groups = {place.partners for place in matched.values() if place.partners}
    for partners in groups:
        # A layer may take stacked experts or single ones; it gets one of both.
        lacking = [name for name in partners if name not in pairs]
        for name in lacking:
            problems.add(
                f"{name}.lora_A.weight",
                expected="an adapter for every expert and projection of the layer",
                got="nothing",
                advice="vLLM takes a layer's experts together; target all of them",
            )


def _raise_unmatched(
    unmatched: list[str], places: dict[str, Place], *, adapter: str, is_all: bool
) -> NoReturn:
    close = difflib.get_close_matches(unmatched[0], places, n=3, cutoff=0.6) if unmatched else []
    near = f"; close to the first {'are' if len(close) > 1 else 'is'} {_listed(close)}"
    what = "any of it" if is_all else "part of it"
    advice = "rename modules with rename=, leave them out, or name them in partial="
    if any(name.endswith((".experts", ".experts.base_layer")) for name in unmatched):
        advice = (
            "its experts are stacked in one tensor: start the engine with "
            "--enable-mixed-moe-lora-format, or send each expert by itself"
        )
    raise AdapterModuleError(
        f"adapter {adapter!r} cannot be applied: the engine has no place for {what}: "
        f"{_listed(unmatched) or 'it holds no tensors'}{near if close else ''}; {_NOTHING}; "
        f"{advice}; an engine started with --lora-target-modules takes no others",
        adapter=adapter,
        problems=unmatched[:MAX_NAMED],
        unmatched=unmatched[: 10 * MAX_NAMED],
    )


def _raise_tensors(problems: _Problems, adapter: str) -> NoReturn:
    texts = [text for text, *_ in problems.tensors[:MAX_NAMED]]
    if len(problems.tensors) > MAX_NAMED:
        texts.append(f"and {len(problems.tensors) - MAX_NAMED} more")
    _, tensor, expected, got = problems.tensors[0]
    lines = summary((f"{want} {has}", name, text) for text, name, want, has in problems.tensors)
    raise AdapterTensorError(
        "\n  ".join([f"adapter {adapter!r} cannot be applied; {_NOTHING}:", *lines]),
        adapter=adapter,
        problems=texts,
        tensor=tensor,
        expected=expected,
        got=got,
    )


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(map(repr, names[:MAX_NAMED]))
    return text if len(names) <= MAX_NAMED else f"{text} and {len(names) - MAX_NAMED} more"
