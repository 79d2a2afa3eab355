"""Proves when shared memory is kept for the next update, and when it is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.stepping import WISH, hello

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import RegionError, UnsupportedError
from vllm_bucketsync.handles import ShmHandle
from vllm_bucketsync.layout import BucketLayout
from vllm_bucketsync.messages import Hello, Region
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.transport.registry import Choice, Wish
from vllm_bucketsync.transport.shm import OpenedShm, ShmRegion

MIB = 1024**2


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    made = Slots(Settings(dir=str(tmp_path)))
    yield made
    made.release()
    assert list(tmp_path.iterdir()) == []


def holding(slots: Slots, num_workers: int = 2) -> list[Hello]:
    """Return what workers say that have the memory open."""
    ids = tuple(handle.id for handle in slots.handles)
    return [hello(rank=rank, regions=ids) for rank in range(num_workers)]


def prepare(slots: Slots, needed_bytes: int | None, hellos: list[Hello] | None = None) -> str:
    """Prepare shared memory and return its id."""
    said = holding(slots) if hellos is None else hellos
    slots.prepare("shm", needed_bytes=needed_bytes, hellos=said, wish=WISH)
    return slots.handles[0].id


def test_there_is_nothing_before_the_first_update(slots: Slots) -> None:
    assert slots.handles == ()
    slots.unlink()
    slots.release()
    with pytest.raises(RuntimeError, match="prepare"):
        slots.write(0, 0, torch.zeros(1, dtype=torch.uint8))


def test_slots_lie_one_after_the_other_and_buckets_take_them_in_turn(tmp_path: Path) -> None:
    slots = Slots(Settings(slot_size=512, num_slots=3, dir=str(tmp_path)))
    prepare(slots, None)
    assert slots.regions == (Region(0, 0, 512), Region(0, 512, 512), Region(0, 1024, 512))
    handle = slots.handles[0]
    assert isinstance(handle, ShmHandle)
    with OpenedShm.open(handle) as opened:
        for batch in range(5):
            slots.write(batch, 256, torch.full((8,), batch, dtype=torch.uint8))
        found = [opened.view(start + 256, 8).tolist() for start in (0, 512, 1024)]

    assert found == [[3] * 8, [4] * 8, [2] * 8]
    slots.release()


def test_the_memory_is_kept_while_every_worker_has_it_open(slots: Slots) -> None:
    first = prepare(slots, 4 * MIB)
    slots.unlink()

    assert prepare(slots, 4 * MIB) == first
    assert prepare(slots, MIB) == first
    assert prepare(slots, 4 * MIB + MIB // 4) == first  # a little more is not worth it
    assert slots.slot_size_bytes == 4 * MIB


def test_memory_that_one_worker_has_lost_is_made_anew_for_all(slots: Slots) -> None:
    first = prepare(slots, 4 * MIB)
    restarted = [holding(slots)[0], hello(rank=1)]

    second = prepare(slots, 4 * MIB, restarted)

    assert second != first
    assert prepare(slots, 4 * MIB, [hello(rank=0, regions=(first, second))]) == second


def test_a_much_larger_update_gets_larger_slots(slots: Slots) -> None:
    first = prepare(slots, 4 * MIB)

    assert prepare(slots, 8 * MIB) != first
    assert slots.slot_size_bytes == 8 * MIB


def test_slots_that_had_to_shrink_are_kept_for_an_update_of_the_same_size(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ShmRegion.create

    def full(num_bytes: int, *, directory: str) -> object:
        if num_bytes > 4 * MIB:
            error = RegionError("full")
            error.errno = 28
            raise error
        return create(num_bytes, directory=directory)

    monkeypatch.setattr(ShmRegion, "create", full)
    first = prepare(slots, 16 * MIB)
    assert slots.slot_size_bytes == 2 * MIB

    assert prepare(slots, 16 * MIB) == first


def test_memory_that_cannot_be_had_leaves_nothing_and_the_next_try_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots(Settings(slot_size=MIB, dir=str(tmp_path)))
    prepare(slots, None)
    slots.unlink()

    def full(num_bytes: int, *, directory: str) -> object:
        raise RegionError("full")

    with monkeypatch.context() as patched:
        patched.setattr(ShmRegion, "create", full)
        with pytest.raises(RegionError, match="full"):
            prepare(slots, None, [hello()])
    assert slots.handles == ()
    assert list(tmp_path.iterdir()) == []

    assert prepare(slots, None)
    slots.release()


def test_an_unlinked_region_has_no_file_and_goes_on_working(slots: Slots) -> None:
    prepare(slots, MIB)
    handle = slots.handles[0]
    assert isinstance(handle, ShmHandle)
    assert Path(handle.path).exists()

    slots.unlink()
    slots.unlink()

    assert not Path(handle.path).exists()
    slots.write(0, 0, torch.zeros(8, dtype=torch.uint8))


def test_release_gives_the_memory_back_and_the_next_update_takes_it_anew(slots: Slots) -> None:
    first = prepare(slots, MIB)
    said = holding(slots)
    slots.release()
    slots.release()
    assert slots.handles == ()

    assert prepare(slots, MIB, said) != first


def test_references_take_one_slot_and_no_memory_also_when_they_are_given_back(
    slots: Slots,
) -> None:
    slots.prepare("inproc", needed_bytes=None, hellos=[hello()], wish=WISH)

    assert (slots.num_slots, slots.layout.max_entries) == (1, 1)
    assert slots.slot_size_bytes == 0
    slots.release()
    assert slots.slot_size_bytes == 0


def test_another_transport_gets_memory_of_its_own(slots: Slots) -> None:
    slots.prepare("inproc", needed_bytes=MIB, hellos=[hello()], wish=WISH)
    first = slots.handles[0].id

    second = prepare(slots, MIB, [hello(regions=(first,))])

    assert second != first
    assert (slots.num_slots, slots.slot_size_bytes) == (2, MIB)
    with pytest.raises(UnsupportedError, match="teleport"):
        slots.prepare("teleport", needed_bytes=MIB, hellos=[hello()], wish=WISH)


def choices(*kinds: str) -> list[Choice]:
    return [Choice(kind, f"{kind} is here") for kind in kinds]


WORKERS = [hello(rank=0), hello(rank=1)]


def test_without_a_failure_every_choice_is_left(slots: Slots) -> None:
    assert slots.without_failures(choices("a", "b"), WORKERS) == choices("a", "b")


def test_what_failed_with_these_workers_is_skipped_with_its_reason(slots: Slots) -> None:
    given = choices("a", "b", "c")
    slots.note_failure("a", WORKERS, "error 1")

    left = slots.without_failures(given, WORKERS)

    assert [one.reason for one in left] == ["a failed (error 1); b is here", "c is here"]
    # The caller's own stays as it is.
    assert given == choices("a", "b", "c")


def test_only_what_comes_before_the_first_that_may_work_is_skipped(slots: Slots) -> None:
    slots.note_failure("b", WORKERS, "error 2")
    assert slots.without_failures(choices("a", "b", "c"), WORKERS) == choices("a", "b", "c")

    slots.note_failure("a", WORKERS, "error 1")
    (left,) = slots.without_failures(choices("a", "b", "c"), WORKERS)
    assert left.kind == "c"
    assert left.reason == "a failed (error 1); b failed (error 2); c is here"


def test_the_last_choice_is_always_left(slots: Slots) -> None:
    slots.note_failure("a", WORKERS, "error 1")

    assert slots.without_failures(choices("a"), WORKERS) == choices("a")


def test_a_failure_is_that_of_these_workers_in_any_order(slots: Slots) -> None:
    slots.note_failure("a", WORKERS, "error 1")
    reborn = [hello(rank=0), hello(rank=1, instance_id="another")]

    assert len(slots.without_failures(choices("a", "b"), WORKERS[::-1])) == 1
    for others in (reborn, WORKERS[:1], [*WORKERS, hello(rank=2)]):
        assert slots.without_failures(choices("a", "b"), others) == choices("a", "b")


def test_room_is_made_before_a_larger_update_and_for_no_other(slots: Slots) -> None:
    slots.make_room(64 * MIB)
    first = prepare(slots, 4 * MIB)

    for needed_bytes in (4 * MIB, MIB, 4 * MIB + MIB // 4):
        slots.make_room(needed_bytes)
        assert [handle.id for handle in slots.handles] == [first]
    slots.make_room(8 * MIB)
    assert slots.handles == ()

    second = prepare(slots, 8 * MIB, [])
    assert second != first
    # A stream may be as large as a slot can be.
    slots.make_room(None)
    assert slots.handles == ()


class FlushedRegion:
    """A region that notes which slots were flushed."""

    def __init__(self) -> None:
        self.flushed: list[int] = []
        self.held_bytes = 1

    def flush(self, slot: int) -> None:
        self.flushed.append(slot)

    def close(self) -> None:
        pass


def test_the_slot_that_a_bucket_lies_in_is_flushed(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots.flush(0)
    region = FlushedRegion()
    monkeypatch.setattr(
        "vllm_bucketsync.slots.create_slots",
        lambda *_, **__: (region, BucketLayout(256), 3),
    )
    slots.prepare("shm", needed_bytes=None, hellos=[], wish=WISH)

    for batch in range(5):
        slots.flush(batch)

    assert region.flushed == [0, 1, 2, 0, 1]


def test_memory_is_made_as_it_was_wished_for(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    def create(kind: str, **others: object) -> object:
        asked.append((kind, others))
        return FlushedRegion(), BucketLayout(256), 3

    monkeypatch.setattr("vllm_bucketsync.slots.create_slots", create)
    wish = Wish(transport="auto", device=torch.device("cuda", 1))
    slots.prepare("cuda_ipc", needed_bytes=7, hellos=[], wish=wish)

    ((kind, others),) = asked
    assert (kind, others["needed_bytes"], others["wish"]) == ("cuda_ipc", 7, wish)
