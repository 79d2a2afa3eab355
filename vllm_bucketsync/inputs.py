"""Makes a source of what a user gives to ``push``: a module, a mapping, a checkpoint, a stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, ItemsView, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import nn

from .checkpoint import list_checkpoint, read_tensors
from .errors import SourceError
from .layout import Manifest, TensorMeta
from .names import Names
from .recall import Described, Recall
from .sources import Source, declare, declare_present
from .tensors import DTYPE_NAMES, SeenTensors, check_sendable, describe, gather, meta_of
from .texts import with_article

Rename = Callable[[str], str]
_Table = Mapping[str, torch.Tensor | None]


def open_source(
    given: object, *, rename: Rename | None = None, recall: Recall | None = None
) -> Source:
    """Turn what a user gave into a source.

    Args:
        given: An ``nn.Module`` (its parameters and persistent buffers; tied tensors
            once, under their first name), a mapping from name to tensor, a list or
            tuple of (name, tensor), a folder or file of safetensors (``str`` or
            ``Path``), or any other iterable of (name, tensor).
        rename: Called with each name after the trainers' wrappers were stripped from
            it; returns the checkpoint name.
        recall: Spares what is the same as last time; given again with every push.

    Returns:
        A declared source, or a streamed one for an iterable that is none of the
        others. Nothing is held open before its first tensor is asked for.

    Raises:
        SourceError: It cannot be sent. For a streamed source this comes from
            ``tensors``, also where it ends without one.
    """
    names = Names(rename)
    recall = Recall() if recall is None else recall
    match given:
        case nn.Module():
            return _open_module(given, rename, recall)
        case dict() if type(given) in {dict, OrderedDict}:
            return _open_dict(given, rename, recall)
        case Mapping():
            return _open_mapping(given, names)
        case list() | tuple() | ItemsView():
            return _open_pairs(list(given), rename, recall)
        case str() if not given:
            raise SourceError("the path of the checkpoint is empty; nothing was sent")
        case str() | Path():
            return _open_checkpoint(Path(given).expanduser(), names)
        case Iterable() if not isinstance(given, torch.Tensor | bytes | bytearray):
            if not hasattr(given, "__array__"):
                return Source(declared=None, tensors=_stream(given, names))
    raise SourceError(
        f"{with_article(_kind(given))} was given; expected a module, a state_dict, (name, "
        "tensor) pairs, or "
        f"the path of a checkpoint"
    )


def _open_module(module: nn.Module, rename: Rename | None, recall: Recall) -> Source:
    walked = list(_walk(module))
    keys = [(name, is_buffer) for name, _, _, is_buffer in walked]
    tensors = [table[leaf] for _, table, leaf, _ in walked]
    known = recall.find(keys, tensors, rename)
    if known is None:
        known = _describe_module(walked, keys, rename)
        recall.note(known, tensors)
    places = [walked[position][1:3] for position in known.sent]
    # Looked up anew: a trainer may replace a parameter after it was declared.
    return declare_present(
        known.manifest,
        lambda first, end: [table.get(leaf) for table, leaf in places[first:end]],
        found=[tensors[position] for position in known.sent],
        what="module",
        recall=recall,
    )


def _describe_module(
    walked: list[tuple[str, _Table, str, bool]], keys: list[tuple[str, bool]], rename: Rename | None
) -> Described:
    names, metas, sent, seen = Names(rename), [], [], SeenTensors()
    twins: list[tuple[int, int]] = []
    first_of: dict[int, int] = {}
    for position, (name, table, leaf, is_buffer) in enumerate(walked):
        tensor = check_sendable(name, table[leaf])
        twin = seen.add(tensor)
        if twin is None:
            first_of[id(tensor)] = position
            metas.append(describe(names.take(name), tensor, is_buffer=is_buffer))
            sent.append(position)
        else:
            twins.append((position, first_of[id(twin)]))
    manifest = Manifest(metas)
    return Described(
        keys=keys, rename=rename, manifest=manifest, sent=sent, twins=twins, is_each_once=True
    )


def _walk(module: nn.Module) -> Iterator[tuple[str, _Table, str, bool]]:
    """Name all parameters and persistent buffers, those of one module together."""
    for prefix, owner in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                yield start + leaf, owner._parameters, leaf, False
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and leaf not in owner._non_persistent_buffers_set:
                yield start + leaf, owner._buffers, leaf, True


def _open_mapping(given: Mapping[object, object], names: Names) -> Source:
    keys = list(given)
    metas: list[TensorMeta] = []
    devices: set[torch.device] = set()
    for key in keys:
        name = names.take(key)
        tensor = check_sendable(name, given[key])
        metas.append(describe(name, tensor))
        devices.add(tensor.device)
        # A lazy mapping would otherwise hold all of its tensors at once.
        del tensor
    return declare(metas, lambda: (given.get(key) for key in keys), what="mapping", devices=devices)


def _open_dict(given: dict[object, object], rename: Rename | None, recall: Recall) -> Source:
    keys, tensors = list(given), list(given.values())
    manifest = _describe_all(keys, tensors, rename, recall)
    fetch = given.get
    return declare_present(
        manifest,
        lambda first, end: [fetch(key) for key in keys[first:end]],
        found=tensors,
        what="mapping",
        recall=recall,
    )


def _open_pairs(given: list[object], rename: Rename | None, recall: Recall) -> Source:
    pairs = [_pair(item, position) for position, item in enumerate(given)]
    keys, tensors = [name for name, _ in pairs], [tensor for _, tensor in pairs]
    manifest = _describe_all(keys, tensors, rename, recall)
    return declare_present(
        manifest,
        lambda first, end: tensors[first:end],
        found=tensors,
        what="list",
        recall=recall,
    )


def _describe_all(
    keys: list[object], tensors: list[object], rename: Rename | None, recall: Recall
) -> Manifest:
    known = recall.find(keys, tensors, rename)
    if known is not None:
        return known.manifest
    names = Names(rename)
    manifest = Manifest(
        [meta_of(names.take(name), one) for name, one in zip(keys, tensors, strict=True)]
    )
    sent = range(len(keys))
    recall.note(Described(keys=keys, rename=rename, manifest=manifest, sent=sent), tensors)
    return manifest


def _open_checkpoint(path: Path, names: Names) -> Source:
    stored = list_checkpoint(path)
    metas = [
        TensorMeta(
            names.take(item.name),
            DTYPE_NAMES[item.dtype],
            item.shape,
            item.num_bytes,
        )
        for item in stored
    ]
    devices = {torch.device("cpu")}
    return declare(metas, lambda: read_tensors(stored), what=f"checkpoint {path}", devices=devices)


def _stream(
    given: Iterable[object], names: Names
) -> Generator[tuple[TensorMeta, torch.Tensor], None, None]:
    with ExitStack() as stack:
        if isinstance(given, Generator):
            # On this thread, so that its own contexts end where they began.
            stack.enter_context(closing(given))
        for item in given:
            name, found = _pair(item, len(names))
            taken = names.take(name)
            tensor = check_sendable(taken, found)
            meta = describe(taken, tensor)
            tensor = gather(meta, tensor)
            del item, found
            yield meta, tensor
            # Let go before the next one is gathered.
            del tensor
    if not len(names):
        raise SourceError("the iterable ended without a tensor; nothing was sent")


def _pair(item: object, position: int) -> tuple[object, object]:
    match item:
        case (name, tensor) if isinstance(item, tuple | list):
            return name, tensor
    raise SourceError(
        f"item {position} is {with_article(_kind(item))}; expected (name, tensor), as from "
        f"named_parameters() or state_dict().items()"
    )


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
