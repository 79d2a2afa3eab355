"""What ``collective_rpc`` can call on every vLLM worker.

vLLM adds the class to its worker's bases: methods come after vLLM's own, ``__init__`` is
never called, and a name that vLLM has too is refused at start. Hence the prefix on every
name that is not vLLM's own hook, and state that is made on first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .. import serve
from ..config import PlanMode
from ..errors import UnsupportedError
from ..staging import staged_if_asked
from ..transport.devices import uuid_of
from . import guards, sleeps
from .footing import Footings
from .lora.shelf import find_shelf, shelf_of
from .lora.sink import AdapterSink
from .weights import WeightMemory, WeightSink

if TYPE_CHECKING:
    import torch

    from ..messages import Open
    from ..sinks import Sink

logger = logging.getLogger(__name__)


class WorkerExtension:
    """Pass its dotted name as ``worker_extension_cls``; never construct it.

    Every method takes and returns primitives only, and never raises: vLLM's executor
    gets out of step when a worker does.
    """

    device: torch.device  # set by the worker

    def init_worker_extension(self) -> None:
        """Begin to watch sleeps. vLLM calls it from 0.33 on, before it loads the model."""
        try:
            sleeps.watch(self)
        # It would end the start of the engine; our first RPC says what is wrong.
        except Exception:
            logger.exception("sleeps are not watched before the first call")

    @cached_property
    def _bucketsync_worker(self) -> serve.Worker:
        worker: Any = self
        memory = WeightMemory()
        footings = Footings(worker, memory)
        watched = sleeps.watch(worker)
        if worker.vllm_config.lora_config is not None:
            # From now on: a request may be older than this worker, and name one of ours.
            shelf_of(worker)

        def make_sink(opened: Open) -> Sink:
            if opened.kind == "adapter":
                return AdapterSink(worker, opened, sleeps=watched)
            if opened.kind != "weights":
                raise UnsupportedError(
                    f"this engine takes no {opened.kind!r}; it takes 'weights' and 'adapter'; "
                    f"install the same version of vllm_bucketsync on both sides"
                )
            sink = WeightSink(
                worker,
                partial=opened.partial,
                memory=memory,
                footings=footings,
                is_promise=opened.is_declared,
                mode=PlanMode.from_env(),
                verify=opened.verify,
            )
            return staged_if_asked(sink, opened, device=worker.device)

        def adapter_versions() -> dict[str, str]:
            shelf = find_shelf(worker)
            return {} if shelf is None else shelf.versions()

        return serve.Worker(
            adapter_versions=adapter_versions,
            make_sink=make_sink,
            ahead=footings,
            rank=worker.rank,
            dp_index=getattr(worker.vllm_config.parallel_config, "data_parallel_index", 0),
            world_size=worker.vllm_config.parallel_config.world_size,
            device=str(worker.device),
            device_uuid=uuid_of(worker.device),
        )

    def update_weights_from_bucket(self, offer: dict[str, Any]) -> dict[str, Any]:
        """Take over new weights from the sender that ``offer`` names.

        Spans the whole update: no forward pass of this engine sees half of it.

        Args:
            offer: See ``serve.Offer``.

        Returns:
            ``ok``, ``state``, ``rank``, ``dp_index``, ``version``, ``error``.
        """
        return self._bucketsync_answer(lambda worker: serve.update(worker, offer))

    def update_lora_from_bucket(self, offer: dict[str, Any]) -> dict[str, Any]:
        """Take over an adapter from the sender that ``offer`` names.

        Swapped in one step, at the end. Until then, and after any failure, the old one
        serves.

        Args:
            offer: See ``serve.Offer``.

        Returns:
            See ``update_weights_from_bucket``.
        """
        return self._bucketsync_answer(
            lambda worker: serve.update(worker, offer, is_of_weights=False)
        )

    def bucketsync_remove_lora(self, name: str) -> dict[str, Any]:
        """Forget an adapter that was pushed.

        Returns:
            ``rank``, ``dp_index``, ``was_held``, ``error``.
        """

        def remove(worker: serve.Worker) -> serve.Result:
            shelf = find_shelf(self)
            is_asleep = guards.weights_are_asleep(self)
            was_held = shelf is not None and shelf.remove(name, is_asleep=is_asleep)
            return {
                "rank": worker.rank,
                "dp_index": worker.dp_index,
                "was_held": was_held,
                "error": None,
            }

        return self._bucketsync_answer(remove)

    def bucketsync_status(self) -> dict[str, Any]:
        """Return what this worker holds: version, torn, asleep, memory, counts, adapters."""

        def status(worker: serve.Worker) -> serve.Result:
            shelf = find_shelf(self)
            return serve.status(worker) | {
                "is_asleep": guards.weights_are_asleep(self),
                "adapters": [] if shelf is None else shelf.status(),
            }

        return self._bucketsync_answer(status)

    def bucketsync_probe(self) -> dict[str, Any]:
        """Return which transports this worker may be able to use, and by what that is told."""
        return self._bucketsync_answer(serve.probe)

    def bucketsync_release(self) -> dict[str, Any]:
        """Close shared memory that is kept between updates, and drop what makes adapters quick."""

        def release(worker: serve.Worker) -> serve.Result:
            shelf = find_shelf(self)
            if shelf is not None:
                shelf.replays.forget()
            return serve.release(worker)

        return self._bucketsync_answer(release)

    def _bucketsync_answer(self, act: Callable[[serve.Worker], serve.Result]) -> serve.Result:
        """Act, and answer with data whatever fails, on a vLLM that we do not know included."""
        try:
            return act(self._bucketsync_worker)
        except Exception as error:  # noqa: BLE001 - a raise desynchronises vLLM's executor
            return serve.refusal(error)
