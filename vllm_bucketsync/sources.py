"""Tensors in one form, whatever a user gave to ``push`` (``inputs.py``).

Everything is pulled on the caller's thread, one tensor at a time: item k+1 is not
asked for before the consumer wants it, so that generators may gather, merge or load
inside their own contexts and only one gathered tensor is alive. A *declared* source
knows all names, dtypes and shapes before the first tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import cast

import torch

from .errors import SourceError
from .layout import Manifest, TensorMeta
from .recall import Recall
from .tensors import check_unchanged, gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one ``push`` sends.

    Made by ``inputs.open_source``; the consumer calls ``close``, also when it stops early.

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
    return _declared(Manifest(metas), fetch, what=what, devices=devices)


def read_metas(source: Source) -> Source:
    """Read a stream to its end for what it would send; its tensors are dropped."""
    with closing(source):
        manifest = Manifest([meta for meta, _ in source.tensors])
    return Source(declared=manifest, tensors=iter(()))


def declare_present(
    manifest: Manifest,
    fetch: Callable[[int, int], list[object]],
    *,
    found: Sequence[object],
    what: str,
    recall: Recall,
) -> Source:
    """Return a declared source of tensors that exist all at once.

    Args:
        manifest: What will come, in order.
        fetch: Returns the tensors from one number to another, as they are by then.
        found: All of them, as they are now.
        what: What was given, for a message.
        recall: What is known of them, and whether they are to be gathered.

    Raises:
        SourceError: It holds no tensors.
    """
    metas = manifest.metas

    def ready(first: int, end: int) -> list[torch.Tensor]:
        again = fetch(first, end)
        # Looked at again: a trainer's other threads, and its progress, may change them.
        if not recall.are_unchanged(again, first=first):
            for index, one in enumerate(again, start=first):
                check_unchanged(metas[index], one)
        return cast(list[torch.Tensor], again)

    source = _declared(
        manifest,
        lambda: (fetch(i, i + 1)[0] for i in range(len(metas))),
        what=what,
        devices=recall.devices,
    )
    if recall.is_sharded:
        return source
    tensors_found = cast(Sequence[torch.Tensor], found)
    return replace(source, ready=ready, seen=lambda: recall.seen, found=tensors_found)


def _declared(
    manifest: Manifest,
    fetch: Callable[[], Iterator[object]],
    *,
    what: str,
    devices: Iterable[torch.device],
) -> Source:
    if not manifest.metas:
        raise SourceError(f"the {what} holds no tensors; nothing was sent")
    tensors = _fetch_declared(manifest.metas, fetch)
    return Source(declared=manifest, tensors=tensors, devices=frozenset(devices))


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
