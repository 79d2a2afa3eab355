"""The worker's side of the benchmark: our extension, with what the comparison needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from vllm_bucketsync.streams import synchronise
from vllm_bucketsync.worker import compat
from vllm_bucketsync.worker.extension import WorkerExtension

from .handles import Exported, opened
from .reference import Reference

EXTENSION = f"{__name__}.BenchExtension"
RELOAD_HANDLES = "bucketsync_bench_reload_handles"
RELOAD_FILES = "bucketsync_bench_reload_files"
LOAD_HANDLES = "bucketsync_bench_load_handles"
REMEMBER = "bucketsync_bench_remember"
LEARN = "bucketsync_bench_learn"
COMPARE = "bucketsync_bench_compare"
# As many names are told of what is wrong.
_MAX_NAMES = 5

Answer = dict[str, Any]


class BenchExtension(WorkerExtension):
    """Every method takes and returns primitives, and never raises: see ``WorkerExtension``."""

    def bucketsync_bench_reload_handles(self, exported: Exported) -> Answer:
        """Have vLLM reload its weights from a trainer's tensors, opened one by one."""
        return self._bucketsync_bench_reload(lambda: opened(exported, device=self.device))

    def bucketsync_bench_reload_files(self, path: str) -> Answer:
        """Have vLLM reload its weights from a safetensors file."""
        return self._bucketsync_bench_reload(lambda: _read(Path(path)))

    def bucketsync_bench_load_handles(self, exported: Exported) -> Answer:
        """Give a trainer's tensors to the model's ``load_weights``, all in one call, as they are.

        Right only where vLLM keeps its weights as they come; comparing finds out.
        """

        def act(worker: Any) -> Answer:
            with compat.engine_context(worker.vllm_config):
                model = worker.model_runner.get_model()
                # All of them open at a time: what was opened for one tensor serves its neighbours.
                model.load_weights(list(opened(exported, device=worker.device)))
            return {}

        return self._bucketsync_bench_answer(act)

    def bucketsync_bench_remember(self) -> Answer:
        """Keep a copy of what the model holds now."""

        def act(worker: Any) -> Answer:
            reference = Reference(worker.model_runner.get_model())
            worker.__dict__["_bucketsync_bench_reference"] = reference
            return {"num_bytes": reference.num_bytes}

        return self._bucketsync_bench_answer(act)

    def bucketsync_bench_learn(self) -> Answer:
        """Find out what follows the weights: vLLM has loaded the other version."""

        def act(worker: Any) -> Answer:
            reference: Reference = worker.__dict__["_bucketsync_bench_reference"]
            reference.learn(worker.model_runner.get_model())
            return {
                "compared_bytes": reference.compared_bytes,
                "num_unlike": len(reference.unlike),
                "unlike": reference.unlike[:_MAX_NAMES],
            }

        return self._bucketsync_bench_answer(act)

    def bucketsync_bench_compare(self, is_flipped: bool) -> Answer:
        """Compare every bit of the model with what it must hold."""

        def act(worker: Any) -> Answer:
            reference: Reference = worker.__dict__["_bucketsync_bench_reference"]
            model = worker.model_runner.get_model()
            found = reference.differences(model, is_flipped=is_flipped)
            return {"num_different": len(found), "different": found[:_MAX_NAMES]}

        return self._bucketsync_bench_answer(act)

    def _bucketsync_bench_reload(
        self, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> Answer:
        def act(worker: Any) -> Answer:
            worker.reload_weights(weights_iterator=weights())
            return {}

        return self._bucketsync_bench_answer(act)

    def _bucketsync_bench_answer(self, act: Callable[[Any], Answer]) -> Answer:
        try:
            with torch.no_grad():
                answer = act(self)
            synchronise(self.device)
        except Exception as error:  # noqa: BLE001 - a raise desynchronises vLLM's executor
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}
        return {"ok": True, **answer}


def _read(path: Path) -> Iterable[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            yield name, file.get_tensor(name)
