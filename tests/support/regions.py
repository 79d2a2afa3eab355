"""What every transport has to do alike, as one check that each backend runs."""

from __future__ import annotations

import pytest
import torch

from vllm_bucketsync.errors import LocalProtocolError, RegionError, RemoteProtocolError
from vllm_bucketsync.handles import Handle
from vllm_bucketsync.layout import ALIGNMENT_BYTES
from vllm_bucketsync.transport.base import OpenedRegion, OwnedRegion

NUM_BYTES = 16 * ALIGNMENT_BYTES


def check_region(owned: OwnedRegion, opened: OpenedRegion, *, device: str = "cpu") -> None:
    """Check both ends of one region of ``NUM_BYTES``, which are closed at the end."""
    assert owned.num_bytes == opened.num_bytes == NUM_BYTES
    assert opened.id == owned.handle.id
    check_bytes_arrive(owned, opened, device=device)
    check_bounds_are_kept(owned, opened, device=device)
    check_the_end(owned, opened, device=device)


def check_bytes_arrive(owned: OwnedRegion, opened: OpenedRegion, *, device: str) -> None:
    for seed in range(3):
        first = random_bytes(3 * ALIGNMENT_BYTES + 1, seed=seed, device=device)
        second = random_bytes(NUM_BYTES - 4 * ALIGNMENT_BYTES, seed=seed + 10, device=device)
        nothing = random_bytes(0, seed=0, device=device)

        owned.write(0, first)
        owned.write(4 * ALIGNMENT_BYTES, second)
        owned.write(NUM_BYTES, nothing)

        for offset, data in ((0, first), (4 * ALIGNMENT_BYTES, second), (NUM_BYTES, nothing)):
            view = opened.view(offset, data.numel())
            assert view.dtype == torch.uint8
            assert view.dim() == 1
            assert view.is_contiguous()
            assert torch.equal(view, data)
    # Any dtype can be viewed in place.
    assert opened.view(0, first.numel())[:256].view(torch.complex128).numel() == 16


def check_bounds_are_kept(owned: OwnedRegion, opened: OpenedRegion, *, device: str) -> None:
    for offset, size in (
        (1, 1),
        (ALIGNMENT_BYTES // 2, 1),
        (-ALIGNMENT_BYTES, 1),
        (0, -1),
        (0, NUM_BYTES + 1),
        (NUM_BYTES, 1),
        (NUM_BYTES + ALIGNMENT_BYTES, 0),
        (ALIGNMENT_BYTES, NUM_BYTES),
        (0, 1 << 62),
    ):
        with pytest.raises(RemoteProtocolError):
            opened.view(offset, size)
    for offset, size in ((1, 1), (-ALIGNMENT_BYTES, 1), (NUM_BYTES, 1), (0, NUM_BYTES + 1)):
        with pytest.raises(LocalProtocolError):
            owned.write(offset, random_bytes(size, seed=0, device=device))


def check_the_end(owned: OwnedRegion, opened: OpenedRegion, *, device: str) -> None:
    data = random_bytes(1000, seed=1, device=device)
    owned.write(0, data)
    kept = opened.view(0, 1000)
    assert opened.owner_is_alive()

    owned.unlink()
    owned.unlink()
    assert opened.owner_is_alive()
    assert torch.equal(opened.view(0, 1000), data)

    owned.close()
    owned.close()
    assert not opened.owner_is_alive()
    with pytest.raises(LocalProtocolError):
        owned.write(0, data)

    opened.close()
    opened.close()
    assert not opened.owner_is_alive()
    assert torch.equal(kept, data)
    with pytest.raises(LocalProtocolError):
        opened.view(0, 1)


def check_is_refused(opened_class: type[OpenedRegion], handle: Handle) -> None:
    """Check that no region is opened by a handle that is wrong."""
    with pytest.raises(RegionError):
        opened_class.open(handle)  # type: ignore[attr-defined]


def random_bytes(num_bytes: int, *, seed: int, device: str = "cpu") -> torch.Tensor:
    """Return ``[num_bytes]``, uint8, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return data.to(device)
