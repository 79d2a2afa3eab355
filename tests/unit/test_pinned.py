"""Memory that cannot be pinned is used as it is, and what was pinned is unpinned once."""

from __future__ import annotations

import logging

import pytest
import torch
from support import stub_cuda
from support.stub_cuda import StubRuntime

from vllm_bucketsync.transport.pinned import HostCopies, Pin

GPU = torch.device("cuda", 3)
DATA = torch.zeros(4096, dtype=torch.uint8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StubRuntime:
    return stub_cuda.install(monkeypatch)


def test_memory_is_pinned_where_it_lies_and_unpinned_once(
    cuda: StubRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    pin = Pin.of(DATA, device=GPU)

    assert pin.is_pinned
    assert cuda.calls == [("cudaHostRegister", DATA.data_ptr(), 4096, 1)]
    pin.undo()
    pin.undo()
    assert not pin.is_pinned
    assert cuda.named("cudaHostUnregister") == [(DATA.data_ptr(),)]
    assert cuda.devices == [3, 3]
    assert caplog.records == []


# Refused by confidential computing, by a limit, and registered already.
@pytest.mark.parametrize("code", [1, 2, 712, 801])
def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_warning(
    cuda: StubRuntime, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    cuda.codes["cudaHostRegister"] = code
    with caplog.at_level(logging.DEBUG):
        pin = Pin.of(DATA, device=GPU)
        pin.undo()
        pin.undo()

    assert not pin.is_pinned
    assert cuda.named("cudaHostUnregister") == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("4096 bytes", f"failed with {code}", "memlock", "slot_size"):
        assert part in record.getMessage()
    # The next call of CUDA, whoever makes it, does not raise what was refused here.
    assert cuda.last_error == 0


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_a_torch_without_cuda_cannot_pin_and_only_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pin = Pin.of(DATA, device=GPU)
    pin.undo()

    assert not pin.is_pinned
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_memory_that_cannot_be_unpinned_is_only_told(
    cuda: StubRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.codes["cudaHostUnregister"] = 1
    pin = Pin.of(DATA, device=GPU)

    pin.undo()
    pin.undo()

    assert not pin.is_pinned
    assert len(cuda.named("cudaHostUnregister")) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "stays pinned" in record.getMessage()
    assert cuda.last_error == 0


def test_copies_that_end_unpin_what_they_took_over(cuda: StubRuntime) -> None:
    copies = HostCopies(Pin.of(DATA, device=GPU))

    copies.wait()
    copies.close()
    copies.close()

    assert len(cuda.named("cudaHostUnregister")) == 1
