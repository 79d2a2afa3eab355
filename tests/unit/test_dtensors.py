"""A DTensor is declared whole, and gathered at the moment when it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.tensor_samples import as_bytes, expected_bytes
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.inputs import open_source
from vllm_bucketsync.tensors import byte_view

VALUES = torch.arange(12.0).view(4, 3)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    file = tmp_path_factory.mktemp("store") / "file"
    distributed.init_process_group(
        "gloo", init_method=file.as_uri(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def model(mesh: DeviceMesh) -> nn.Module:
    model = nn.Module()
    model.a = nn.Parameter(distribute_tensor(VALUES, mesh, [Shard(0)]))
    model.b = nn.Parameter(distribute_tensor(VALUES.t().contiguous(), mesh, [Replicate()]))
    model.tied = model.a
    model.plain = nn.Parameter(torch.ones(2))
    model.empty = nn.Parameter(distribute_tensor(torch.ones(0, 3), mesh, [Shard(0)]))
    return model


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that were gathered so far."""
    shapes: list[tuple[int, ...]] = []
    original = DTensor.full_tensor

    def full_tensor(self: DTensor, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(self.shape))
        return original(self, **kwargs)

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    return shapes


def test_a_module_s_dtensors_are_gathered_one_by_one_as_they_are_sent(
    model: nn.Module, gathered: list[tuple[int, ...]]
) -> None:
    source = open_source(model)
    assert source.declared is not None
    assert [(meta.name, meta.shape) for meta in source.declared.metas] == [
        ("a", (4, 3)), ("b", (3, 4)), ("plain", (2,)), ("empty", (0, 3)),
    ]  # fmt: skip
    assert gathered == []

    seen = []
    for meta, tensor in source.tensors:
        seen.append((meta.name, len(gathered)))
        assert not isinstance(tensor, DTensor)
        assert tuple(tensor.shape) == meta.shape
        if meta.name == "a":
            assert as_bytes(byte_view(tensor)) == expected_bytes(VALUES)
        if meta.name == "b":
            assert as_bytes(byte_view(tensor)) == expected_bytes(VALUES.t())

    assert seen == [("a", 1), ("b", 2), ("plain", 2), ("empty", 3)]


def test_a_stream_s_dtensors_are_gathered_too(
    model: nn.Module, gathered: list[tuple[int, ...]]
) -> None:
    sent = [(meta.shape, type(t)) for meta, t in open_source(model.named_parameters()).tensors]

    assert [shape for shape, _ in sent] == [(4, 3), (3, 4), (2,), (0, 3)]
    assert DTensor not in [kind for _, kind in sent]
    assert len(gathered) == 3


def test_gathering_leaves_the_trainer_s_gradients_alone(model: nn.Module) -> None:
    sent = dict(open_source(model).tensors)

    assert all(not t.requires_grad for meta, t in sent.items() if meta.name != "plain")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_dtensor_without_data_is_refused(mesh: DeviceMesh) -> None:
    local = torch.empty(2, device="meta")

    with pytest.raises(SourceError, match="'x' is on the meta device"):
        open_source({"x": DTensor.from_local(local, mesh, [Shard(0)])})


def test_a_module_that_is_gathered_after_it_was_declared_is_still_the_same(
    model: nn.Module,
) -> None:
    source = open_source(model)
    model.a = nn.Parameter(VALUES.clone())

    assert expected_bytes(next(source.tensors)[1]) == expected_bytes(VALUES)
