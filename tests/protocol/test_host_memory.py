"""Proves that host memory which is short, or limited, is an error that says so, and never a signal.

Each program runs in a process of its own with a mount of its own, whose ``/dev/shm`` has 16
MiB. ``support.small_shm`` says what it can call.
"""

from __future__ import annotations

import pytest
from support.small_shm import run


def test_a_model_goes_through_shared_memory_that_is_smaller_than_it() -> None:
    run("""
with WeightSync(engine) as sync:
    for fill in (1, 2):
        model = weights(40, fill)
        report = sync.push(model, version=fill)
        check(engine, model)
        assert report.slot_size_bytes * 2 < 16 * MIB
""")


def test_slots_that_do_not_fit_are_refused_and_the_same_one_goes_on_when_there_is_room() -> None:
    run("""
with WeightSync(engine, slot_size="12MiB") as sync:
    text = refused(sync, weights(20, 1), RegionError, "bytes are free", "slot_size", "--shm-size")
    assert str(24 * MIB + 4096) in text
with WeightSync(engine, slot_size="4MiB") as sync:
    fill_up()
    refused(sync, weights(20, 1), RegionError, "bytes are free")
    (SHM / "others").unlink()
    model = weights(20, 3)
    sync.push(model, version=3)
    check(engine, model)
""")


def test_memory_that_others_take_meanwhile_ends_no_update() -> None:
    run("""
with WeightSync(engine) as sync:
    sync.push(weights(8, 1), version=1)

    def source():
        # What was reserved is there, whatever others do.
        fill_up()
        yield from weights(30, 3).items()

    sync.push(source(), version=3)
    check(engine, weights(30, 3))
""")


def test_a_file_system_that_is_full_of_files_is_named() -> None:
    run(
        """
for number in range(100):
    try:
        (SHM / f"others{number}").touch()
    except OSError as error:
        assert error.errno == errno.ENOSPC
        break
else:
    raise AssertionError("there is no limit")
with WeightSync(engine) as sync:
    refused(sync, weights(1, 1), ConfigError, "No space left", "VLLM_BUCKETSYNC_DIR")
    for path in SHM.glob("others*"):
        path.unlink()
    sync.push(weights(1, 1), version=1)
""",
        options="size=16m,nr_inodes=8",
    )


@pytest.mark.parametrize("number", ["EOPNOTSUPP", "EINVAL", "ENOSYS"])
def test_a_file_system_that_cannot_reserve_is_written_to_instead(number: str) -> None:
    run(f"""
def cannot(*_):
    raise OSError(errno.{number}, os.strerror(errno.{number}))

os.posix_fallocate = cannot
with WeightSync(engine, slot_size="32MiB") as sync:
    refused(sync, weights(20, 1), RegionError, "No space left", "--shm-size")
assert free() == 16 * MIB
with WeightSync(engine) as sync:
    model = weights(40, 2)
    assert sync.push(model, version=2).slot_size_bytes >= MIB
    check(engine, model)
""")


@pytest.mark.parametrize(
    ("limit", "size", "text"),
    [
        ("RLIMIT_FSIZE", "MIB", "File too large"),
        ("RLIMIT_NOFILE", "len(os.listdir('/proc/self/fd'))", "Too many open files"),
        ("RLIMIT_NOFILE", "len(os.listdir('/proc/self/fd')) + 9", "ulimit -n"),
    ],
    ids=["files' sizes", "descriptors", "some descriptors"],
)
def test_a_limit_of_the_process_is_an_error_that_names_it(limit: str, size: str, text: str) -> None:
    run(f"""
model = weights(4, 1)
with WeightSync(engine, slot_size="4MiB") as sync:
    with limited(resource.{limit}, {size}):
        refused(sync, model, (RegionError, ConfigError, TransportError), {text!r})
    sync.push(model, version=1)
    check(engine, model)
""")


def test_a_limit_of_locked_memory_does_not_matter_without_a_gpu() -> None:
    run("""
with limited(resource.RLIMIT_MEMLOCK, 0), WeightSync(engine) as sync:
    model = weights(4, 1)
    sync.push(model, version=1)
    check(engine, model)
""")


def test_what_a_worker_keeps_of_a_bucket_can_be_read_when_everything_is_closed() -> None:
    run("""
kept = []

class Keeping(engine._make):
    def load(self, bucket):
        super().load(bucket)
        kept.extend(piece.data for piece in bucket.pieces)

engine._make = Keeping
with WeightSync(engine, slot_size="1MiB", num_slots=8) as sync:
    sync.push(weights(8, 7), version=1)
engine.close()
gc.collect()
assert len(kept) == 8
assert all(bool((data == 7).all()) for data in kept)
kept.clear()
""")
