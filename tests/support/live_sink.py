"""A model without vLLM: live tensors, which a sink writes in place as direct modules are.

Of every tensor a rank keeps its part: of columns where the name ends in ``.columns``, else of
rows. What is live stays from one update to the next.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from vllm_bucketsync.boxes import Box
from vllm_bucketsync.copies import view
from vllm_bucketsync.errors import EngineState
from vllm_bucketsync.layout import Manifest, TensorMeta
from vllm_bucketsync.sinks import Bucket, SinkReport


class Model:
    """What one rank serves with.

    Attributes:
        live: Its tensors, by name.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self._rank = rank
        self._num_ranks = num_ranks

    def part(self, meta: TensorMeta) -> Box:
        """Return the part of a tensor that this rank keeps."""
        size = meta.shape[-1 if meta.name.endswith(".columns") else 0] // self._num_ranks
        whole = Box(0, meta.shape, strides_of(meta.shape))
        dim = len(meta.shape) - 1 if meta.name.endswith(".columns") else 0
        shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
        return Box(self._rank * size * whole.strides[dim], shape, whole.strides)

    def prepare(self, manifest: Manifest) -> None:
        """Make room for what was never there."""
        for meta in manifest.metas:
            dtype = getattr(torch, meta.dtype)
            self.live.setdefault(meta.name, torch.zeros(self.part(meta).shape, dtype=dtype))

    def hashes(self) -> dict[str, str]:
        """Return what it holds, by name."""
        return {name: hash_of(tensor) for name, tensor in self.live.items()}

    def expected(self, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        """Return what it would hold with these weights."""
        found = {}
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            meta = TensorMeta(name, dtype, tuple(tensor.shape), tensor.nbytes)
            found[name] = hash_of(view(tensor.contiguous(), self.part(meta)))
        return found


class LiveSink:
    """One update of a ``Model``; can be told to fail."""

    def __init__(self, model: Model, *, on_call: Callable[[str], None] | None = None) -> None:
        self._model = model
        self._on_call = on_call
        self._manifest = Manifest([])
        self._has_written = False
        self.calls: list[str] = []

    def open(self, manifest: Manifest | None) -> None:
        self._note("open")
        if manifest is not None:
            self._manifest = manifest
            self._model.prepare(manifest)

    def wanted(self, index: int) -> tuple[Box, ...] | None:
        return (self._model.part(self._manifest.metas[index]),)

    def deviate(self, index: int) -> None:
        self._note("deviate")

    def load(self, bucket: Bucket) -> None:
        self._note("load")
        for piece in bucket.pieces:
            live, part = self._model.live[piece.meta.name], self._model.part(piece.meta)
            for data, box in piece.share(part, Box(0, part.shape, strides_of(part.shape))):
                self._has_written = True
                view(live, box).copy_(data)

    def prepare(self) -> None:
        self._note("prepare")

    def commit(self) -> SinkReport:
        self._note("commit")
        return SinkReport()

    def abort(self) -> EngineState:
        self.calls.append("abort")
        return EngineState.TORN if self._has_written else EngineState.UNCHANGED

    def release(self) -> None:
        self.calls.append("release")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def hash_of(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
