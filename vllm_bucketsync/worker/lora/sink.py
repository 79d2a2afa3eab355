"""One update of one adapter: cloned, checked, built, and only then swapped in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ...adapters import check_spec
from ...errors import AdapterConfigError, AdapterError, AdapterTensorError, EngineState
from ...layout import Manifest, TensorMeta
from ...messages import LoadSplit, Open
from ...sinks import Bucket, Piece, SinkReport
from .. import compat, guards
from ..sleeps import Sleeps
from .clones import clones_of, on_host
from .fit import Fit, check_fit
from .image import Arriving, Layout, has_one_dtype
from .settings import read_config
from .shelf import Kept, Shelf, shelf_of


class AdapterSink:
    """One update of an adapter. See ``sinks.Sink`` for the order of calls.

    vLLM's manager is untouched until ``commit``, and is as before if that fails. Every
    rank has built its model before any of them commits.
    """

    def __init__(self, worker: Any, opened: Open, *, sleeps: Sleeps) -> None:
        """Prepare for one update; nothing is touched.

        Args:
            worker: vLLM's worker.
            opened: The offer, with ``adapter`` set.
            sleeps: What the worker's sleeps took away.
        """
        self._worker = worker
        self._opened = opened
        self._sleeps = sleeps
        self._helper: Any = None
        self._fit: Fit | None = None
        self._shelf: Shelf | None = None
        self._key: Hashable | None = None
        self._arriving: Arriving | None = None
        self._metas: dict[int, TensorMeta] = {}
        self._whole: dict[int, torch.Tensor] = {}
        self._partial: dict[int, tuple[torch.Tensor, int]] = {}
        self._built: tuple[Kept, Any] | None = None

    def open(self, manifest: Manifest | None) -> None:
        """Refuse what cannot work.

        Raises:
            AdapterError: The engine cannot use the adapter.
            EngineAsleepError: The engine's weights are asleep.
            EngineBusyError: vLLM's own weight update is open.
        """
        check_spec(self._spec, version=self._opened.version)
        self._refuse_unfit()
        self._shelf = shelf_of(self._worker)
        self._helper = read_config(
            self._spec.config, lora_config=self._lora_config, adapter=self._name
        )
        self._shelf.check(self._spec)
        if manifest is not None and self._opened.is_declared:
            self._key = (manifest.digest, self._spec.config, tuple(self._opened.partial))
            self._fit = self._shelf.fits.get(self._key, check=lambda: self._checked(manifest.metas))
            # What is skipped may be anything, and large; it is not to be kept.
            if has_one_dtype(manifest.metas) and not self._fit.skipped:
                layout = Layout(manifest.metas)
                self._arriving = Arriving(layout, is_pinned=compat.pins_adapters())

    def deviate(self, index: int) -> None:
        """Accept any stream: it is checked as a whole, before anything is changed."""

    def load(self, bucket: Bucket) -> None:
        """Clone one bucket's tensors into private memory, in the engine's dtype."""
        # The bucket is filled again.
        if self._arriving is not None:
            self._arriving.add(bucket)
            return
        for piece in on_host(bucket.pieces, is_pinned=compat.pins_adapters()):
            self._metas[piece.index] = piece.meta
            if piece.is_whole:
                self._whole[piece.index] = piece.tensor().to(self._dtype)
            else:
                self._add_fragment(piece)

    def prepare(self) -> None:
        """Build what the commit swaps in.

        Raises:
            AdapterError: The adapter is incomplete, or does not fit.
        """
        self._refuse_incomplete()
        if self._fit is None:
            self._fit = self._checked(list(self._metas.values()))
        kept = Kept(
            spec=self._spec,
            version=self._opened.version,
            helper=self._helper,
            tensors=self._tensors(self._fit),
            is_stacked=self._fit.is_stacked,
            key=self._key,
        )
        self._built = (kept, self._build(kept))

    def commit(self) -> SinkReport:
        """Swap the adapter in."""
        if self._built is None or self._fit is None:
            raise RuntimeError("commit was called before prepare")
        kept, model = self._built
        with compat.engine_context(self._worker.vllm_config):
            was_quick = self._shelf_here.put(kept, model)
        num_modules, num_bytes = len(self._fit.modules), kept.num_bytes
        return SinkReport(
            split=LoadSplit(num_direct=num_modules, direct_bytes=num_bytes)
            if was_quick
            else LoadSplit(num_loaded=num_modules, loaded_bytes=num_bytes),
            cloned_bytes=num_bytes,
            skipped=self._fit.skipped,
            notes=(f"it is applied to {num_modules} modules", *self._fit.notes),
        )

    def abort(self) -> EngineState:
        """Say that nothing changed: a swap that failed was undone."""
        return EngineState.UNCHANGED

    def release(self) -> None:
        """Drop what was not swapped in. Idempotent."""
        self._whole, self._partial, self._metas = {}, {}, {}
        self._built = self._arriving = None

    @property
    def _spec(self) -> Any:
        if self._opened.adapter is None:
            raise AdapterError("the offer does not say which adapter it brings; nothing was done")
        return self._opened.adapter

    @property
    def _name(self) -> str:
        name: str = self._spec.name
        return name

    @property
    def _lora_config(self) -> Any:
        return self._worker.vllm_config.lora_config

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._lora_config.lora_dtype
        return dtype

    @property
    def _shelf_here(self) -> Shelf:
        if self._shelf is None:
            raise RuntimeError("the sink was not opened")
        return self._shelf

    def _refuse_unfit(self) -> None:
        if self._lora_config is None:
            raise AdapterConfigError(
                f"adapter {self._name!r} cannot be applied: the engine was started without LoRA; "
                f"nothing was changed; start it with --enable-lora",
                adapter=self._name,
                setting="enable_lora",
                expected="True",
                found="False",
            )
        guards.refuse_at_work(self._worker)
        if self._sleeps.has_lost_base:
            raise AdapterError(
                f"adapter {self._name!r} would be put on weights that a sleep of level 2 has "
                f"dropped; nothing was changed; push the base weights first",
                adapter=self._name,
            )

    def _checked(self, metas: Sequence[TensorMeta]) -> Fit:
        return check_fit(
            metas,
            worker=self._worker,
            helper=self._helper,
            adapter=self._name,
            partial=self._opened.partial,
        )

    def _refuse_incomplete(self) -> None:
        found = None if self._arriving is None else self._arriving.incomplete()
        if found is None and self._partial:
            index, (_, num_filled) = next(iter(self._partial.items()))
            found = self._metas[index], num_filled
        if found is not None:
            meta, num_filled = found
            raise AdapterTensorError(
                f"of {meta.name!r} only {num_filled}/{meta.num_bytes} bytes came; nothing was "
                f"changed; send all of it",
                adapter=self._name,
                tensor=meta.name,
                expected=f"{meta.num_bytes} bytes",
                got=f"{num_filled} bytes",
            )

    def _tensors(self, fit: Fit) -> Mapping[str, torch.Tensor]:
        """Return the tensors that are kept, by name."""
        if self._arriving is not None:
            return self._arriving.image(self._dtype)
        named = {self._metas[index].name: tensor for index, tensor in self._whole.items()}
        if not fit.skipped:
            return named
        kept = {name: tensor for name, tensor in named.items() if name not in fit.skipped}
        # They came in one memory with what is skipped, which is not to be kept.
        return clones_of(kept, is_pinned=False)

    def _add_fragment(self, piece: Piece) -> None:
        empty = (torch.empty(0, dtype=torch.uint8, device="cpu"), 0)
        buffer, num_filled = self._partial.pop(piece.index, empty)
        if not num_filled:
            buffer = torch.empty(piece.meta.num_bytes, dtype=torch.uint8, device="cpu")
        end = piece.first_byte + piece.data.numel()
        buffer[piece.first_byte : end].copy_(piece.data)
        num_filled += piece.data.numel()
        if num_filled < piece.meta.num_bytes:
            self._partial[piece.index] = (buffer, num_filled)
            return
        whole = Piece(index=piece.index, meta=piece.meta, first_byte=0, data=buffer)
        self._whole[piece.index] = whole.tensor().to(self._dtype)

    def _build(self, kept: Kept) -> Any:
        try:
            with compat.engine_context(self._worker.vllm_config):
                return self._shelf_here.prepare(kept)
        # vLLM's own refusals, whatever their kind.
        except Exception as error:
            raise AdapterError(
                f"adapter {self._name!r} cannot be applied: {type(error).__name__}: {error}; "
                f"nothing was changed",
                adapter=self._name,
            ) from error
