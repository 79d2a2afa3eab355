"""Copies within a GPU: our kernel, byte for byte, and what it leaves to torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import bytes_of as host

from vllm_bucketsync import copy_kernel
from vllm_bucketsync.copies import CopyBatch
from vllm_bucketsync.places import Places

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

DEVICE = torch.device("cuda:0")
# Around one thread's part, one step, two steps, one chunk, and what none of them divides.
SIZES = [0, 1, 15, 16, 32, 4096, 8176, 8192, 8208, 16384, 16400, 65535, 65536, 65552, 200_000]
SIZES += [3 * 1024**2 + 48, 40 * 1024**2]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return host.bytes_of(tensor.cpu())


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)


def test_the_kernel_can_be_had() -> None:
    assert copy_kernel.is_available(DEVICE)
    assert copy_kernel.is_available(torch.device("cuda"))


@pytest.mark.parametrize("shift", [0, 2, 16], ids="shift {}".format)
def test_every_byte_is_copied_and_its_neighbours_are_left_alone(shift: int) -> None:
    pairs, whole = [], []
    for size in SIZES:
        target, source = random_bytes(size + 256), random_bytes(size + 256)
        before = bytes_of(target)
        part = slice(64 + shift, 64 + shift + size)
        expected = before[: part.start] + bytes_of(source)[part] + before[part.stop :]
        whole.append((target, expected))
        pairs.append((target[part], source[part]))
    batch = CopyBatch(pairs)

    for _ in range(2):
        batch.run()

        for target, expected in whole:
            assert bytes_of(target) == expected
            target[64 + shift : -(192 - shift)].zero_()


def test_copies_wait_for_what_their_stream_was_given_to_do() -> None:
    source, target = torch.zeros(8 * 1024**2, device=DEVICE), torch.ones(8 * 1024**2, device=DEVICE)
    batch, stream = CopyBatch([(target, source)]), torch.cuda.Stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.fill_(3.0)
        batch.run()
        stream.synchronize()

    assert bool((target == 3.0).all())


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda one: one,
    "turned": lambda one: one.t().contiguous().t(),
    "at odd addresses": lambda one: torch.cat([one.new_zeros(1), one.reshape(-1)])[1:].view_as(one),
    "from the host": lambda one: one.cpu(),
}


@pytest.mark.parametrize("form", FORMS)
def test_places_are_filled_from_other_tensors_every_time(form: str) -> None:
    shapes = [(64, 64), (3, 5), (1024, 1024), (7,)]
    memory, first = torch.zeros(8 * 1024**2, dtype=torch.uint8, device=DEVICE), 0
    spots = []
    for shape in shapes:
        spots.append((first, torch.bfloat16, shape))
        first += -(-torch.Size(shape).numel() * 2 // 256) * 256
    places = Places(memory, spots)

    for _ in range(3):
        sources = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]
        sources = [FORMS[form](one) if one.dim() == 2 else one for one in sources]
        for _ in range(2):
            memory.zero_()
            places.fill(sources)
            torch.cuda.synchronize()

            for (start, _, _), one in zip(spots, sources, strict=True):
                assert bytes_of(memory[start : start + one.nbytes]) == bytes_of(one.contiguous())


def test_without_the_kernel_torch_makes_the_same_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "_load", lambda index: None)
    target, source = random_bytes(100_000), random_bytes(100_000)

    assert not copy_kernel.is_available(DEVICE)
    CopyBatch([(target, source)]).run()

    assert bytes_of(target) == bytes_of(source)
