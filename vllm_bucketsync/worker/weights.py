"""temporary slice"""
from __future__ import annotations
from collections.abc import Sequence
from typing import Any
from ..errors import EngineState
from ..layout import Manifest
from ..sinks import Piece, SinkReport
from . import caches, compat, guards
from .layerwise import LayerwiseReload


class WeightSink:
    def __init__(self, worker: Any, *, partial: Sequence[str] = (), memory: Any = None) -> None:
        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._reload = LayerwiseReload(self._model, worker.model_config)
        self._begun = False
        self._frag = {}
        self._cloned = 0

    def open(self, manifest: Manifest | None) -> None:
        guards.refuse_unfit(self._worker)

    def deviate(self, index: int) -> None: ...

    def load(self, pieces: Sequence[Piece]) -> None:
        import torch
        with compat.engine_context(self._worker.vllm_config):
            if not self._begun:
                self._begun = True
                self._reload.begin()
            ws = []
            for p in pieces:
                if p.is_whole:
                    ws.append((p.meta.name, p.tensor()))
                else:
                    buf = self._frag.setdefault(p.index, torch.empty(p.meta.num_bytes, dtype=torch.uint8))
                    buf[p.first_byte:p.first_byte+p.data.numel()].copy_(p.data)
                    if p.first_byte + p.data.numel() == p.meta.num_bytes:
                        del self._frag[p.index]
                        ws.append((p.meta.name, Piece(index=p.index, meta=p.meta, first_byte=0, data=buf).tensor()))
            self._reload.feed(ws)
            self._reload.keep_out_of({p.data.untyped_storage().data_ptr() for p in pieces})

    def prepare(self): ...
    def commit(self) -> SinkReport:
        with compat.engine_context(self._worker.vllm_config):
            self._reload.finalise()
        return SinkReport(cloned_bytes=self._reload.cloned_bytes, notes=caches.drop_caches(self._worker))
    def abort(self):
        with compat.engine_context(self._worker.vllm_config):
            return EngineState.TORN if self._reload.abort() else EngineState.UNCHANGED
    def release(self): ...
