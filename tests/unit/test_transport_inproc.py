"""References are handed over: the very tensors, nothing copied, nothing kept too long."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.regions import NUM_BYTES, check_is_refused, check_region, random_bytes

from vllm_bucketsync.errors import ConfigError, RemoteProtocolError
from vllm_bucketsync.handles import InprocHandle
from vllm_bucketsync.transport.inproc import InprocRegion, OpenedInproc


def test_it_does_what_every_region_does() -> None:
    owned = InprocRegion.create(NUM_BYTES)

    check_region(owned, OpenedInproc.open(owned.handle))


def test_the_very_tensor_is_handed_over() -> None:
    owned = InprocRegion.create(NUM_BYTES)
    opened = OpenedInproc.open(owned.handle)
    data = random_bytes(1000, seed=0)

    owned.write(0, data)

    assert opened.view(0, 1000) is data
    owned.close()


def test_a_length_that_was_not_written_is_refused() -> None:
    owned = InprocRegion.create(NUM_BYTES)
    opened = OpenedInproc.open(owned.handle)
    owned.write(0, random_bytes(1000, seed=0))

    with pytest.raises(RemoteProtocolError, match="1000 bytes was written"):
        opened.view(0, 999)
    with pytest.raises(RemoteProtocolError, match="nothing was written"):
        opened.view(1024, 1000)
    owned.close()


def test_a_new_bucket_drops_the_one_before() -> None:
    owned = InprocRegion.create(NUM_BYTES)
    references = [write_and_watch(owned, offset) for offset in (0, 1024)]

    owned.write(0, random_bytes(10, seed=0))

    gc.collect()
    assert [reference() for reference in references] == [None, None]
    owned.close()


def test_closing_and_forgetting_both_drop_everything() -> None:
    closed, forgotten = InprocRegion.create(NUM_BYTES), InprocRegion.create(NUM_BYTES)
    references = [write_and_watch(closed, 0), write_and_watch(forgotten, 0)]
    handles = [closed.handle, forgotten.handle]

    closed.close()
    del forgotten

    gc.collect()
    assert [reference() for reference in references] == [None, None]
    for handle in handles:
        check_is_refused(OpenedInproc, handle)


def write_and_watch(owned: InprocRegion, offset_bytes: int) -> weakref.ref[torch.Tensor]:
    data = random_bytes(10, seed=0)
    owned.write(offset_bytes, data)
    return weakref.ref(data)


def test_a_handle_of_another_process_or_size_is_refused() -> None:
    owned = InprocRegion.create(NUM_BYTES)

    check_is_refused(OpenedInproc, InprocHandle(id="unknown", num_bytes=NUM_BYTES))
    check_is_refused(OpenedInproc, InprocHandle(id=owned.handle.id, num_bytes=NUM_BYTES + 256))
    owned.close()


@pytest.mark.parametrize("size", [0, -1])
def test_a_region_without_room_is_refused(size: int) -> None:
    with pytest.raises(ConfigError):
        InprocRegion.create(size)
