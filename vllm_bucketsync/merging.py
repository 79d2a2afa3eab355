"""A PEFT model's merged weights, one tensor at a time, without changing the model.

What ``merge_and_unload`` would leave, under the base model's own names. Each sum is made
when the tensor is asked for, so one merged tensor is alive at a time, and the layers
themselves are never merged: a trainer goes on training them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .errors import AdapterConfigError, SourceError
from .inputs import open_source
from .layout import TensorMeta
from .names import Names
from .peft_models import carries_adapter, peft_model
from .recall import Recall
from .sources import Source, declare
from .tensors import SeenTensors, check_sendable, describe
from .texts import with_article

_Table = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A tensor of the base model, and where it is looked up anew.

    Attributes:
        name: Its name, without what PEFT added.
        table: The module's own parameters or buffers.
        leaf: Its name there.
        is_buffer: It is a persistent buffer.
        layers: What PEFT wrapped its module in.
    """

    name: str
    table: _Table
    leaf: str
    is_buffer: bool = False
    layers: tuple[Any, ...] = field(default=())


def open_weights(
    given: object,
    *,
    rename: Callable[[str], str] | None = None,
    merge: bool = False,
    recall: Recall | None = None,
) -> Source:
    """Turn what a user gave to ``push`` into a source.

    Args:
        given: See ``open_source``; with ``merge``, a PEFT model.
        rename: See ``open_source``.
        merge: Send merged weights.
        recall: See ``open_source``.

    Raises:
        SourceError: It cannot be sent, or is a PEFT model without ``merge``.
        AdapterConfigError: See ``open_merged``.
    """
    if merge:
        return open_merged(given, rename=rename)
    model = peft_model(given)
    if model is not None and any(map(carries_adapter, model.modules())):
        raise SourceError(
            "a PEFT model was given; push_lora sends its adapter, and push(…, merge=True) the "
            "weights that it gives when it is merged; nothing was sent"
        )
    return open_source(given, rename=rename, recall=recall)


def open_merged(given: object, *, rename: Callable[[str], str] | None = None) -> Source:
    """Turn a PEFT model into a declared source of its merged weights.

    Args:
        given: A PEFT model. Its active adapters are merged, unless they are disabled or
            merged already.
        rename: See ``open_source``.

    Raises:
        SourceError: It is no PEFT model, or cannot be sent.
        AdapterConfigError: An active adapter is none that can be added up, as DoRA.
    """
    model = peft_model(given)
    if model is None:
        raise SourceError(
            f"{with_article(type(given).__name__)} was given with merge=True; expected a PEFT "
            "model; leave "
            f"merge= out for anything else"
        )
    names = Names(rename)
    metas: list[TensorMeta] = []
    places: list[_Place] = []
    # By position: a tensor may be replaced before it is sent.
    added: list[list[Callable[[], torch.Tensor]]] = []
    layers: list[list[tuple[Any, object]]] = []
    positions: dict[int, int] = {}
    devices: set[torch.device] = set()
    seen = SeenTensors()
    for place in _walk(model, "", ()):
        tensor = check_sendable(place.name, place.table[place.leaf])
        twin = seen.add(tensor)
        if twin is None:
            positions[id(tensor)] = len(places)
            added.append([])
            layers.append([])
            metas.append(describe(names.take(place.name), tensor, is_buffer=place.is_buffer))
            places.append(place)
            devices.add(tensor.device)
        # Tied tensors are one, and get what was learned for any of their names.
        position = positions[id(tensor if twin is None else twin)]
        added[position].extend(_adding(place))
        layers[position].extend((layer, _merging(layer)) for layer in place.layers)
    fetch = partial(_merged, places, added, layers)
    return declare(metas, fetch, what="PEFT model", devices=devices)


def _walk(module: Any, prefix: str, layers: tuple[Any, ...]) -> Iterator[_Place]:
    """Name the base model's tensors; ``layers`` wrap the module that is looked at."""
    if carries_adapter(module):
        yield from _walk(module.base_layer, prefix, (*layers, module))
        return
    if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
        yield from _walk(_saved_module(module), prefix, ())
        return
    start = f"{prefix}." if prefix else ""
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield _Place(name=start + leaf, table=module._parameters, leaf=leaf, layers=layers)
    for leaf, buffer in module._buffers.items():
        if buffer is not None and leaf not in module._non_persistent_buffers_set:
            yield _Place(
                name=start + leaf, table=module._buffers, leaf=leaf, is_buffer=True, layers=layers
            )
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, start + name, ())


def _saved_module(wrapper: Any) -> Any:
    """Return the copy that an active adapter trains of a whole module, or the original."""
    active = [name for name in _active(wrapper) if name in wrapper.modules_to_save]
    return wrapper.modules_to_save[active[0]] if active else wrapper.original_module


def _active(layer: Any) -> list[str]:
    if getattr(layer, "disable_adapters", False):
        return []
    active = getattr(layer, "active_adapters", ())
    return [active] if isinstance(active, str) else list(active)


def _merging(layer: Any) -> object:
    """Return which of a layer's adapters count, and which of them its weights have already."""
    return tuple(_active(layer)), tuple(getattr(layer, "merged_adapters", ()))


def _adding(place: _Place) -> list[Callable[[], torch.Tensor]]:
    """Return what computes each term that is to be added to a tensor, in PEFT's order."""
    found: list[Callable[[], torch.Tensor]] = []
    # The innermost first: it is the one that PEFT added first.
    for layer in reversed(place.layers):
        for name in _active(layer):
            if name in getattr(layer, "merged_adapters", ()):
                continue
            is_known = any(
                name in getattr(layer, table, ()) for table in ("lora_A", "lora_embedding_A")
            )
            if not is_known:
                continue
            _refuse_variant(layer, name, place)
            if place.leaf == getattr(layer, "parameter_name", "weight"):
                found.append(partial(_delta, layer, name))
            elif place.leaf == "bias" and getattr(layer, "lora_bias", {}).get(name):
                found.append(partial(_bias, layer, name))
    return found


def _delta(layer: Any, name: str) -> torch.Tensor:
    delta: torch.Tensor = layer.get_delta_weight(name)
    # PEFT rounds what it adds to an embedding before it adds it, and nothing else.
    is_embedding = name in getattr(layer, "lora_embedding_A", ())
    return delta.to(layer.get_base_layer().weight.dtype) if is_embedding else delta


def _bias(layer: Any, name: str) -> torch.Tensor:
    bias: torch.Tensor = layer.lora_B[name].bias * layer.scaling[name]
    return bias


def _refuse_variant(layer: Any, name: str, place: _Place) -> None:
    is_dora = bool(getattr(layer, "use_dora", {}).get(name))
    if is_dora or name in getattr(layer, "lora_variant", {}):
        kind = "use_dora" if is_dora else type(layer.lora_variant[name]).__name__
        raise AdapterConfigError(
            f"{place.name!r} has adapter {name!r} of kind {kind}, which is not a sum of two "
            "tensors; "
            f"nothing was sent; push what merge_and_unload() makes of a copy",
            adapter=name,
            setting=kind,
            expected="plain LoRA",
            found=kind,
        )


@torch.no_grad()
def _sum(tensor: torch.Tensor, terms: list[Callable[[], torch.Tensor]]) -> torch.Tensor:
    """Return a new tensor with every term added in turn, as PEFT does."""
    total = tensor.detach().clone()
    for term in terms:
        total += term().detach()
    return total


def _merged(
    places: list[_Place],
    added: list[list[Callable[[], torch.Tensor]]],
    layers: list[list[tuple[Any, object]]],
) -> Iterator[object]:
    for place, terms, wrapping in zip(places, added, layers, strict=True):
        if any(_merging(layer) != before for layer, before in wrapping):
            raise SourceError(
                f"adapters of {place.name!r} were merged, unmerged or switched while the weights "
                f"were pushed; what is read from here on is not what was asked for; wait for the "
                f"push to return before you change the model",
                name=place.name,
            )
        # Looked up anew: a trainer may replace a parameter after it was declared.
        tensor = place.table.get(place.leaf)
        yield _sum(tensor, terms) if tensor is not None and terms else tensor
