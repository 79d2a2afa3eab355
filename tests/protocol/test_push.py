"""Proves that what is pushed arrives: every bit, in every layout, over both transports.

Workers are threads here; the sockets, the shared memory and both ends are the real ones.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bytes_of import bytes_of
from support.thread_engine import KeepingSink, ThreadEngine

from vllm_bucketsync.errors import ChannelTimeoutError, ConfigError, EngineBusyError, SourceError
from vllm_bucketsync.sinks import Bucket
from vllm_bucketsync.sync import WeightSync

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bits in a random dtype, plain, transposed, expanded or strided."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(SHAPES) if draw(st.booleans()) else (draw(st.integers(1, 3000)),)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_elements = 1
    for size in shape:
        num_elements *= size
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(
        0, high, (num_elements * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    tensor = bits.view(dtype).view(shape)
    match draw(st.sampled_from(["plain", "transposed", "expanded", "strided"])):
        case "transposed" if tensor.dim() > 1:
            return tensor.transpose(0, -1)
        case "expanded":
            return tensor.unsqueeze(0).expand(2, *tensor.shape)
        case "strided" if tensor.dim() and tensor.shape[0] > 2:
            return tensor[::2]
    return tensor


def lists_of_tensors() -> st.SearchStrategy[list[tuple[str, torch.Tensor]]]:
    return st.lists(tensors(), min_size=1, max_size=12).map(
        lambda found: [(f"model.layers.{i}.weight", tensor) for i, tensor in enumerate(found)]
    )


def arrived(engine: ThreadEngine) -> list[dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Return what each worker's last sink kept."""
    sinks = engine.sinks[-len(engine.workers) :]
    return [
        {
            name: (sink.metas[name].dtype, sink.metas[name].shape, bytes(tensor.numpy()))
            for name, tensor in sink.tensors.items()
        }
        for sink in sinks
    ]


def expected(
    pairs: list[tuple[str, torch.Tensor]],
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes_of(tensor))
        for name, tensor in pairs
    }


@pytest.fixture(scope="module", params=["shm", "inproc"])
def engine(request: pytest.FixtureRequest) -> ThreadEngine:
    return ThreadEngine(is_in_process=request.param == "inproc")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pairs=lists_of_tensors(),
    slot_size=st.sampled_from([256, 512, 4096, 65_536]),
    num_slots=st.integers(1, 3),
    is_streamed=st.booleans(),
)
def test_random_tensors_arrive_bit_for_bit_in_order_and_are_not_changed(
    engine: ThreadEngine,
    pairs: list[tuple[str, torch.Tensor]],
    slot_size: int,
    num_slots: int,
    is_streamed: bool,
) -> None:
    before = expected(pairs)

    with WeightSync(engine, slot_size=slot_size, num_slots=num_slots) as sync:
        report = sync.push(iter(pairs) if is_streamed else pairs, version=1)

    assert arrived(engine) == [before]
    assert list(arrived(engine)[0]) == [name for name, _ in pairs]
    assert expected(pairs) == before
    assert report.num_tensors == len(pairs)
    assert report.num_bytes == sum(len(data) for _, _, data in before.values())


@settings(max_examples=40, deadline=None)
@given(first=lists_of_tensors(), second=lists_of_tensors(), slot_size=st.sampled_from([256, 4096]))
def test_a_stream_that_resembles_the_last_one_arrives_bit_for_bit(
    first: list[tuple[str, torch.Tensor]], second: list[tuple[str, torch.Tensor]], slot_size: int
) -> None:
    engine = ThreadEngine()
    mixed = first[: len(first) // 2] + [(f"other.{name}", tensor) for name, tensor in second]
    with WeightSync(engine, slot_size=slot_size) as sync:
        for pairs in (first, first, mixed, first, first[:1]):
            sync.push(iter(pairs), version=1)
            assert arrived(engine) == [expected(pairs)]
    engine.close()


def test_a_repeated_stream_and_a_repeated_manifest_send_no_metas_again() -> None:
    engine = ThreadEngine()
    pairs = [(f"w{i}", torch.randn(10)) for i in range(5)]
    with WeightSync(engine) as sync:
        sync.push(iter(pairs), version=1)
        sync.push(iter(pairs), version=2)
        assert [sink.manifest and len(sink.manifest) for sink in engine.sinks] == [None, 5]
        sync.push([*pairs[:3], ("new", torch.ones(1))], version=3)
        sync.push(iter(pairs[:2]), version=4)
        sync.push(iter([*pairs[:1], ("newer", torch.ones(2))]), version=5)

        assert engine.sinks[-1].calls == [
            "open",
            "deviate 1",
            "load",
            "prepare",
            "commit",
            "release",
        ]
    engine.close()


@pytest.mark.parametrize("num_workers", [1, 4])
def test_tensors_around_the_size_of_a_slot_arrive_at_every_worker(num_workers: int) -> None:
    slot = 1024**2
    sizes = [4 * slot // 10, 33 * slot // 10, 4 * slot // 10, slot, slot + 1, slot - 1, 3]
    pairs = [(f"w{i}", torch.randint(0, 256, (n,), dtype=torch.uint8)) for i, n in enumerate(sizes)]
    engine = ThreadEngine(num_workers=num_workers)
    with WeightSync(engine, slot_size=slot) as sync:
        report = sync.push(pairs, version="all")

    assert arrived(engine) == [expected(pairs)] * num_workers
    assert report.num_workers == num_workers
    assert report.slot_size_bytes == slot
    engine.close()


class SlowSinks:
    """Sinks of which the first copies nothing before the others are as far as they can be.

    Whoever refills a slot too early has done so by then.
    """

    def __init__(self, num_workers: int, *, num_buckets: int, num_slots: int) -> None:
        self._num_loads = [0] * num_workers
        self._ahead = [min(num_buckets, done + num_slots) for done in range(num_buckets)]
        self._moved = threading.Condition()
        self._num_made = 0

    def make(self) -> KeepingSink:
        with self._moved:
            number, self._num_made = self._num_made, self._num_made + 1
        return KeepingSink(lambda call, _: self._note(number) if call == "load" else None)

    def _note(self, number: int) -> None:
        loads = self._num_loads
        with self._moved:
            if number == 0:
                ahead = self._ahead[loads[0]]
                assert self._moved.wait_for(lambda: min(loads[1:]) >= ahead - 1, timeout=20)
            loads[number] += 1
            self._moved.notify_all()


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_the_slowest_of_four_workers_gets_every_bucket_as_it_was_sent(num_slots: int) -> None:
    pairs = [(f"w{i}", torch.full((1024,), i, dtype=torch.uint8)) for i in range(12)]
    sinks = SlowSinks(4, num_buckets=12, num_slots=num_slots)
    engine = ThreadEngine(num_workers=4, make=sinks.make)

    with WeightSync(engine, slot_size=1024, num_slots=num_slots) as sync:
        report = sync.push(pairs, version=1)

    assert report.num_buckets == 12
    assert arrived(engine) == [expected(pairs)] * 4
    engine.close()


class LateEngine(ThreadEngine):
    """Each worker begins a little later than the one before, whatever it is asked."""

    def _act(self, index: int, act: Callable[..., Any], *args: Any) -> Any:
        threading.Event().wait((0.0, 0.25, 0.05, 0.15)[index])
        return super()._act(index, act, *args)


def test_workers_that_begin_late_are_waited_for_and_none_is_left_out() -> None:
    pairs = [(f"w{i}", torch.randn(100)) for i in range(5)]
    engine = LateEngine(num_workers=4)
    with WeightSync(engine, slot_size=512) as sync:
        for version in range(3):
            report = sync.push(pairs, version=version)
            assert report.num_workers == 4
            assert arrived(engine) == [expected(pairs)] * 4
        assert [status["version"] for status in sync.status()] == ["2"] * 4
    engine.close()


@pytest.mark.parametrize("is_in_process", [False, True])
def test_two_trainers_of_one_engine_are_served_one_after_the_other_and_never_mixed(
    is_in_process: bool,
) -> None:
    engine = ThreadEngine(num_workers=1 if is_in_process else 2, is_in_process=is_in_process)
    start = threading.Barrier(2)
    failures: list[BaseException] = []
    # Closed by the test: this engine's close would take the workers' memory from the other.
    syncs = [WeightSync(engine, slot_size=512) for _ in range(2)]

    def train(trainer: int) -> None:
        try:
            start.wait(10)
            for step in range(5):
                number = float(10 * trainer + step)
                pairs = [(f"w{i}", torch.full((100,), number)) for i in range(6)]
                source = pairs if step % 2 else iter(pairs)
                syncs[trainer].push(source, version=f"{trainer}.{step}")
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    for sync in syncs:
        sync.close()

    assert failures == []
    assert sorted(engine.finished) == [f"{t}.{step}" for t in range(2) for step in range(5)]
    assert len(engine.sinks) == 10 * len(engine.workers)
    for sink in engine.sinks:
        assert sink.calls[-2:] == ["commit", "release"]
        assert len(sink.tensors) == 6
        assert len({bytes(tensor.numpy()) for tensor in sink.tensors.values()}) == 1
    versions = {worker.version for worker in engine.workers}
    assert len(versions) == 1
    assert versions <= {"0.4", "1.4"}
    engine.close()


class DroppingSink(KeepingSink):
    """Keeps the bytes only, in order: a million tensors would be most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = bytearray()

    def load(self, bucket: Bucket) -> None:
        for piece in bucket.pieces:
            self.bytes += piece.data.numpy().tobytes()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_million_tiny_tensors_arrive(is_streamed: bool) -> None:
    values = torch.arange(1_000_000, dtype=torch.int32)
    pairs = ((f"p{i}", values[i]) for i in range(len(values)))
    engine = ThreadEngine(make=DroppingSink)
    begin_s = time.monotonic()
    with WeightSync(engine) as sync:
        report = sync.push(pairs if is_streamed else list(pairs), version=1)

    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took = f"{time.monotonic() - begin_s:.1f} s, peak of the process {peak_kib >> 10} MiB"
    print(f"a million tensors in {report.num_buckets} buckets: {took}")  # noqa: T201 - by hand
    assert bytes(engine.sinks[-1].bytes) == bytes_of(values)
    assert report.num_tensors == len(values)
    engine.close()


@pytest.mark.timeout(120)
def test_a_hundred_thousand_tiny_tensors_arrive() -> None:
    values = torch.arange(100_000, dtype=torch.int32)
    pairs = [(f"p{i}", values[i]) for i in range(len(values))]
    engine = ThreadEngine()
    with WeightSync(engine) as sync:
        sync.push(pairs, version=1)

    found = engine.sinks[-1].tensors
    assert b"".join(bytes(t.numpy()) for t in found.values()) == bytes_of(values)
    engine.close()


def test_a_generator_may_reuse_one_buffer_for_all_its_tensors() -> None:
    buffer = torch.empty(1000, dtype=torch.int32)

    def reusing() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(20):
            yield f"w{i}", buffer.fill_(i)

    for is_in_process in (False, True):
        engine = ThreadEngine(is_in_process=is_in_process)
        with WeightSync(engine, slot_size=16_384) as sync:
            sync.push(reusing(), version=1)
        for i in range(20):
            want = torch.full((1000,), i, dtype=torch.int32)
            assert bytes(engine.sinks[-1].tensors[f"w{i}"].numpy()) == bytes_of(want)
        engine.close()


def test_a_generator_runs_on_the_callers_thread_inside_its_own_context() -> None:
    merged = {"active": False}

    def merging() -> Iterator[tuple[str, torch.Tensor]]:
        merged["active"] = True
        try:
            for i in range(30):
                yield f"w{i}", torch.full((100,), float(merged["active"]))
        finally:
            merged["active"] = False

    engine = ThreadEngine()
    with WeightSync(engine, slot_size=512) as sync:
        sync.push(merging(), version=1)

    assert not merged["active"]
    ones = bytes_of(torch.ones(100))
    assert all(bytes(t.numpy()) == ones for t in engine.sinks[-1].tensors.values())
    engine.close()


def test_parameters_persistent_buffers_and_tied_tensors_of_a_module_arrive_once() -> None:
    linear, tied = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
    tied.weight = linear.weight
    module = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(4), tied)
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    engine = ThreadEngine()
    with WeightSync(engine) as sync:
        sync.push(module, version=1)

    names = set(engine.sinks[-1].tensors)
    assert names == set(module.state_dict()) - {"2.weight"}
    assert engine.sinks[-1].metas["1.running_mean"].is_buffer
    assert not engine.sinks[-1].metas["0.weight"].is_buffer
    engine.close()


def test_a_dry_run_opens_the_sink_and_writes_nothing() -> None:
    for source in ([("a", torch.ones(3))], iter([("a", torch.ones(3))])):
        engine = ThreadEngine()
        with WeightSync(engine) as sync:
            report = sync.push(source, version=1, dry_run=True)

            assert report.is_dry_run
            assert (report.num_tensors, report.num_bytes, report.num_buckets) == (1, 12, 0)
            assert engine.sinks[-1].calls == ["open", "abort", "release"]
            assert engine.finished == []
            assert sync.status()[0]["version"] is None
        engine.close()


def test_the_version_goes_to_every_worker_and_to_the_engine_as_a_string() -> None:
    engine = ThreadEngine(num_workers=2)
    with WeightSync(engine) as sync:
        for version in (7, "step-8", 3):
            sync.push({"a": torch.ones(1)}, version=version)
            assert [s["version"] for s in sync.status()] == [str(version)] * 2

    assert engine.finished == ["7", "step-8", "3"]
    engine.close()


def test_progress_ends_with_all_bytes() -> None:
    seen: list[tuple[int, int | None]] = []
    engine = ThreadEngine()
    with WeightSync(engine, slot_size=256) as sync:
        sync.push(
            {f"w{i}": torch.ones(64) for i in range(8)},
            version=1,
            progress=lambda done, total: seen.append((done, total)),
        )

    assert seen[-1] == (2048, 2048)
    assert sorted(seen) == seen
    engine.close()


def test_the_next_push_reuses_the_memory_and_release_gives_it_back() -> None:
    engine = ThreadEngine()
    with WeightSync(engine, slot_size="1MiB") as sync:
        sync.push({"a": torch.ones(1)}, version=1)
        first = list(engine.workers[0].memory.regions)
        sync.push({"a": torch.ones(1), "b": torch.ones(2)}, version=2)
        assert list(engine.workers[0].memory.regions) == first

        sync.release()
        assert sync.status()[0]["region_bytes"] == 0
        sync.push({"a": torch.ones(1)}, version=3)
        assert list(engine.workers[0].memory.regions) != first
    engine.close()


def test_a_worker_lets_memory_go_once_its_owner_did() -> None:
    engine = ThreadEngine()
    with WeightSync(engine, slot_size="1MiB") as sync:
        sync.push({"a": torch.ones(1)}, version=1)
    with WeightSync(engine) as other:
        assert other.status()[0]["region_bytes"] == 0


def test_what_cannot_be_pushed_is_refused_before_a_worker_is_asked() -> None:
    engine = ThreadEngine()
    with WeightSync(engine) as sync:
        sources: list[object] = [
            [],
            {},
            torch.nn.Module(),
            7,
            {"a": torch.ones(1, device="meta")},
        ]
        for source in sources:
            with pytest.raises(SourceError):
                sync.push(source, version=1)
    assert engine.sinks == []
    with pytest.raises(ConfigError, match="closed"):
        sync.push({"a": torch.ones(1)}, version=1)


def test_a_stream_that_turns_out_empty_is_an_error_and_changes_nothing() -> None:
    engine = ThreadEngine()
    with WeightSync(engine) as sync:
        with pytest.raises(SourceError, match="without a tensor") as caught:
            sync.push(iter([]), version=1)

        assert caught.value.engine_state == "unchanged"
        assert sync.status()[0]["version"] is None
        sync.push({"a": torch.ones(1)}, version=1)
    engine.close()


def test_a_push_inside_a_push_is_refused() -> None:
    engine = ThreadEngine()
    with WeightSync(engine) as sync:

        def nested() -> Iterator[tuple[str, torch.Tensor]]:
            with pytest.raises(EngineBusyError, match="another push"):
                sync.push({"a": torch.ones(1)}, version=2)
            yield "a", torch.ones(1)

        sync.push(nested(), version=1)
        assert sync.status()[0]["version"] == "1"
    engine.close()


def test_fewer_workers_than_expected_is_an_error_that_says_so() -> None:
    engine = ThreadEngine()
    with (
        WeightSync(engine, expected_workers=2, connect_timeout_s=0.5) as sync,
        pytest.raises(ChannelTimeoutError, match="1 of 2 workers that have not") as caught,
    ):
        sync.push({"a": torch.ones(1)}, version=1)

    assert caught.value.engine_state == "unchanged"
    engine.close()
