"""vLLM's own ways: its ``ipc`` weight transfer, its reload, and a plain loop over handles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .extension import LOAD_HANDLES, RELOAD_FILES
from .handles import export
from .method import Details, Stage, ask

_NO_GPU = "vLLM opens CUDA IPC handles, and the tensors and the model are on the CPU"


class VllmIpc:
    """vLLM's trainer engine for ``ipc``, and its worker engine at the other end.

    Attributes:
        name: What it is called on the command line.
        what: What is in its time.
        is_floor: ``False``.
    """

    is_floor = False

    def __init__(self, stage: Stage, *, packed: bool) -> None:
        self.name = "vllm_ipc_packed" if packed else "vllm_ipc"
        how = "packed into one buffer, chunk by chunk" if packed else "a handle for each tensor"
        self.what = f"vLLM's own ipc weight transfer, start to finish of an update: {how}"
        self._stage = stage
        self._packed = packed
        self._trainer: Any = None
        self._details: dict[str, Any] = {}

    def why_not(self) -> str | None:
        """Refuse without a GPU."""
        return None if self._stage.has_gpu else _NO_GPU

    def prepare(self) -> None:
        """Make vLLM's trainer engine, which tells its worker engine what will come."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

        tensors = self._stage.trainer.tensors
        # It refuses a tensor that is larger than its buffer.
        largest = max(tensor.nbytes for tensor in tensors.values())
        size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
        self._details = {"packed_buffer_size_bytes": size} if self._packed else {}
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=0, packed=self._packed, packed_buffer_size_bytes=size),
            client=_Client(self._stage.llm),
            source=_source(tensors),
        )

    def run(self) -> Details:
        """Run an update."""
        self._trainer.send_weights()
        return self._details

    def close(self) -> None:
        """Drop the trainer engine; vLLM's worker engine has nothing open between updates."""
        self._trainer = None
        torch.cuda.ipc_collect()


class _Client:
    """What vLLM's trainer engine calls, for an ``LLM``: vLLM has it for HTTP and Ray only."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)


def _source(tensors: dict[str, torch.Tensor]) -> Any:
    """Return vLLM's kind of source: the cheapest there can be, over a plain dictionary."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(tensors.items())

    return Source()


class Handles:
    """A handle of torch's for each tensor, and ``load_weights`` for each at the other end."""

    name = "handles"
    what = (
        "a CUDA IPC handle of torch's for each tensor, sent in one call, and load_weights of each"
    )
    is_floor = False

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def why_not(self) -> str | None:
        """Refuse without a GPU."""
        return None if self._stage.has_gpu else _NO_GPU

    def prepare(self) -> None:
        """Have nothing to prepare: every handle is good for one use."""

    def run(self) -> Details:
        """Export, send, load."""
        ask(self._stage.llm, LOAD_HANDLES, export(self._stage.trainer.tensors.items()))
        return {}

    def close(self) -> None:
        """Let torch look for what the worker has let go of."""
        torch.cuda.ipc_collect()


class Checkpoint:
    """A safetensors file in memory, and vLLM's own reload from it."""

    name = "checkpoint"
    what = "a safetensors file is written to /dev/shm, and vLLM reloads its weights from it"
    is_floor = False

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage = stage
        self._path = folder / "pushed.safetensors"

    def why_not(self) -> str | None:
        """Be possible everywhere, for what fits."""
        return None

    def prepare(self) -> None:
        """Have nothing to prepare."""

    def run(self) -> Details:
        """Write the file, and reload."""
        from safetensors.torch import save_file

        save_file(self._stage.trainer.tensors, self._path)
        ask(self._stage.llm, RELOAD_FILES, str(self._path))
        return {}

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
