"""What the benchmark asks of vLLM's own ipc transfer and of torch's handles, without a GPU.

The parts that need CUDA are doubles; the classes of vLLM that are driven, and its encoding
of what goes to a worker, are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from vllm_bucketsync.bench.engine import extension, handles, native
from vllm_bucketsync.bench.engine.method import Stage

PARTS = (
    *(torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 0),
    *(b"h" * 64, 4096, 512, False, b"counter", 7, b"event", True),
)
REDUCTIONS = "torch.multiprocessing.reductions"


class FakeLlm:
    """Takes an ``LLM``'s calls as a worker would get them: through vLLM's own encoding."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(("init", request["init_info"]))

    def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    def update_weights(self, request: Any) -> None:
        self.calls.append(("update", sent(request["update_info"])))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(("finish", weight_version))

    def collective_rpc(self, method: str, *, args: Any) -> list[Any]:
        self.calls.append((method, sent(args)))
        return [{"ok": True}]


def sent(what: Any) -> Any:
    """Return data as it arrives in another process."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return MsgpackDecoder().decode(MsgpackEncoder().encode(what))


@pytest.fixture
def stage() -> Iterator[Stage]:
    trainer = mock.Mock(device=torch.device("cuda"))
    trainer.tensors = {f"t{i}": torch.ones(2, 3).bfloat16() for i in range(3)}
    with (
        mock.patch.dict("os.environ", {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}),
        mock.patch("torch.accelerator.current_device_index", return_value=0),
        mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(uuid="GPU-1")),
        mock.patch("torch.cuda.current_stream"),
        mock.patch("torch.cuda.ipc_collect"),
        mock.patch(f"{REDUCTIONS}.reduce_tensor", return_value=(None, PARTS)),
        mock.patch(
            "vllm.distributed.weight_transfer.ipc_engine.reduce_tensor", return_value=(None, PARTS)
        ),
    ):
        yield Stage(llm=FakeLlm(), trainer=trainer, settings={})


def test_an_update_of_vllm_s_own_goes_through_its_three_calls(stage: Stage) -> None:
    method = native.VllmIpc(stage, packed=False)
    assert method.why_not() is None
    method.prepare()
    for _ in range(2):
        method.run()
    method.close()

    init, *calls = stage.llm.calls
    assert init == ("init", {"packed": False})
    assert [name for name, _ in calls] == ["start", "update", "finish"] * 2
    update = calls[1][1]
    assert update["names"] == ["t0", "t1", "t2"]
    (arrived,) = update["ipc_handles"][0].values()
    # Tuples arrive as lists; classes and dtypes as themselves.
    assert arrived == [list(part) if isinstance(part, tuple) else part for part in PARTS]


def test_the_packed_way_tells_the_worker_and_takes_a_buffer_for_the_largest_tensor(
    stage: Stage,
) -> None:
    method = native.VllmIpc(stage, packed=True)
    largest = mock.Mock(nbytes=3 * 1024**3)
    with mock.patch.dict(stage.trainer.tensors, {"large": largest}):
        method.prepare()

    assert stage.llm.calls == [("init", {"packed": True})]
    assert method._trainer.packed_buffer_size_bytes == 3 * 1024**3


def test_handles_are_primitives_and_are_opened_with_torch_s_own_names(stage: Stage) -> None:
    with mock.patch.dict("os.environ", {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}):
        native.Handles(stage).run()
    ((method, (exported,)),) = stage.llm.calls
    assert method == extension.LOAD_HANDLES

    # Called by position, as torch does, it would get what torch took apart.
    order = (
        *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype"),
        *("storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes"),
        *("requires_grad", "ref_counter_handle", "ref_counter_offset", "event_handle"),
        "event_sync_required",
    )
    with mock.patch(f"{REDUCTIONS}.rebuild_cuda_tensor", side_effect=lambda **parts: parts):
        found = dict(handles.opened(exported, device=torch.device("cuda", 1)))

    expected = dict(zip(order, PARTS, strict=True)) | {"storage_device": 1}
    expected |= {"tensor_size": [2, 3], "tensor_stride": [3, 1]}
    assert found == {f"t{i}": expected for i in range(3)}


def test_the_worker_has_no_name_that_vllm_s_workers_have() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    own = [name for name in dir(extension.BenchExtension) if not name.startswith("__")]
    assert [name for name in own if hasattr(Worker, name)] == []
