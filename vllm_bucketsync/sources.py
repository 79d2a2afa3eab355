"""Turns what a user gives to ``push`` into one form, and tensors into bytes.

Everything is pulled on the caller's thread, one tensor at a time: item k+1 is not
asked for before the consumer wants it, so that generators may gather, merge or load
inside their own contexts and only one gathered tensor is alive. A *declared* source
knows all names, dtypes and shapes before the first tensor is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from .checkpoint import list_checkpoint, read_tensors
from .errors import SourceError
from .layout import Manifest, TensorMeta
from .names import Names
from .recall import Described, Recall
from .tensors import (
    DTYPE_NAMES,
    SeenTensors,
    byte_view,
    check_sendable,
    check_unchanged,
    describe,
    gather,
    meta_of,
)
from .texts import with_article

__all__ = ["Source", "byte_view", "declare", "meta_of", "open_source", "read_metas"]

Rename = Callable[[str], str]
_Table = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one ``push`` sends.

    Made by ``open_source``; the consumer calls ``close``, also when it stops early.

    Attributes:
        declared: What will come; ``None`` where only the tensors themselves say it.
        tensors: The tensors in order. To be consumed once, on the caller's thread.
            Each is plain and strided, on its own device, in its own dtype, with the
            shape that its meta says; it may be the trainer's own tensor, so it is
            only to be read, and let go of before the next one is asked for.
        devices: Where they are; empty for a stream, whose tensors nobody has seen yet.
        seen: Returns the same object again where all tensors are, and look, as last time; to
            be asked after ``ready`` was. ``None`` where that is not known.
        ready: Returns the tensors from one number to another, checked, where they all
            exist at once and are plain; instead of ``tensors``. ``None`` elsewhere.
        found: What ``ready`` would have returned of all of them when the source was opened.
    """

    declared: Manifest | None
    tensors: Iterator[tuple[TensorMeta, torch.Tensor]]
    devices: frozenset[torch.device] = frozenset()
    ready: Callable[[int, int], list[torch.Tensor]] | None = None
    seen: Callable[[], object] | None = None
    found: Sequence[torch.Tensor] = ()

    @property
    def device(self) -> torch.device | None:
        """The one device that stands for all: a GPU before the host, the same each time."""
        by_worth = sorted(self.devices, key=lambda one: (one.type == "cpu", one.index or 0))
        return by_worth[0] if by_worth else None

    def close(self) -> None:
        """Close files, and the user's generator on this thread. Idempotent."""
        if isinstance(self.tensors, Generator):
            self.tensors.close()


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
    return _declare(
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
    tensors = _fetch_declared(metas, lambda: (given.get(key) for key in keys))
    return _checked_source(metas, tensors, what="mapping", devices=devices)


def _open_dict(given: dict[object, object], rename: Rename | None, recall: Recall) -> Source:
    keys, tensors = list(given), list(given.values())
    manifest = _describe_all(keys, tensors, rename, recall)
    fetch = given.get
    return _declare(
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
    return _declare(
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
    tensors = _fetch_declared(metas, lambda: read_tensors(stored))
    devices = {torch.device("cpu")}
    return _checked_source(metas, tensors, what=f"checkpoint {path}", devices=devices)


def declare(
    metas: Sequence[TensorMeta],
    fetch: Callable[[], Iterator[object]],
    *,
    what: str,
    devices: Iterable[torch.device],
) -> Source:
    """Return a declared source of tensors that are made one by one.

    Args:
        metas: What will come, in order.
        fetch: Called when the first tensor is asked for; yields one for each meta.
        what: What was given, for a message.
        devices: Where the tensors are.

    Raises:
        SourceError: It holds no tensors.
    """
    return _checked_source(metas, _fetch_declared(metas, fetch), what=what, devices=devices)


def read_metas(source: Source) -> Source:
    """Read a stream to its end for what it would send; its tensors are dropped."""
    with closing(source):
        manifest = Manifest([meta for meta, _ in source.tensors])
    return Source(declared=manifest, tensors=iter(()))


def _declare(
    manifest: Manifest,
    fetch: Callable[[int, int], list[object]],
    *,
    found: Sequence[object],
    what: str,
    recall: Recall,
) -> Source:
    """Return the source of tensors that exist all at once, unless they are to be gathered."""
    metas = manifest.metas

    def ready(first: int, end: int) -> list[torch.Tensor]:
        again = fetch(first, end)
        # Looked at again: a trainer's other threads, and its progress, may change them.
        if not recall.are_unchanged(again, first=first):
            for index, one in enumerate(again, start=first):
                check_unchanged(metas[index], one)
        return cast(list[torch.Tensor], again)

    tensors = _fetch_declared(metas, lambda: (fetch(i, i + 1)[0] for i in range(len(metas))))
    source = _checked_source(metas, tensors, what=what, manifest=manifest, devices=recall.devices)
    if recall.is_sharded:
        return source
    tensors_found = cast(Sequence[torch.Tensor], found)
    return replace(source, ready=ready, seen=lambda: recall.seen, found=tensors_found)


def _checked_source(
    metas: Sequence[TensorMeta],
    tensors: Iterator[tuple[TensorMeta, torch.Tensor]],
    *,
    what: str,
    devices: Iterable[torch.device],
    manifest: Manifest | None = None,
) -> Source:
    if not metas:
        raise SourceError(f"the {what} holds no tensors; nothing was sent")
    declared = Manifest(metas) if manifest is None else manifest
    return Source(declared=declared, tensors=tensors, devices=frozenset(devices))


def _fetch_declared(
    metas: Sequence[TensorMeta], fetch: Callable[[], Iterator[object]]
) -> Generator[tuple[TensorMeta, torch.Tensor], None, None]:
    with ExitStack() as stack:
        found = fetch()
        if isinstance(found, Generator):
            stack.enter_context(closing(found))
        for meta in metas:
            tensor = gather(meta, check_unchanged(meta, next(found)))
            yield meta, tensor
            # Let go before the next one is gathered or read.
            del tensor


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
