"""A trainer on a GPU pushes adapters into real engines on the same GPU, with CUDA graphs.

They answer as the same ones that vLLM reads from disk, and their slots hold the same bytes. The
first engine is as deep and wide as one of 0.6 billion parameters; the second has experts, and
sleeps. What matters most comes first.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import gpu_adapters, tiny_models
from support.adapter_tensors import CONFIG, Tensors, experts, request_of, save_tensors
from support.gpu_adapters import (
    Record,
    Truth,
    adapter_tensors,
    answers_of,
    base_tensors,
    begin_profile,
    called,
    end_profile,
    forget_peak,
    hashes,
    memory,
    poison,
    save_base,
    trainer,
)
from support.gpu_engines import running
from support.lora_slots import held_ids, slot_hashes

from vllm_bucketsync import AdapterConfigError, AdapterError, EngineAsleepError, WeightSync
from vllm_bucketsync.adapters import spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    # vLLM leaves sockets and contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # What vLLM, PEFT, transformers and torch deprecate of each other depends on their versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

TRANSPORTS = ("cuda_ipc", "shm")
SEEDS = (1, 2, 3, 4)
NUM_TENSORS = 392
MIB = 1024**2
# Compiled and captured, as an engine is that nobody told otherwise.
LORA: dict[str, Any] = {"enforce_eager": False, "enable_lora": True, "max_lora_rank": 16}


@dataclass(frozen=True)
class Stage:
    """A running engine, what a trainer holds for it, and what the truth is.

    Attributes:
        sources: What ``push_lora`` is given, by seed.
        options: More of its arguments, by seed.
        folders: The same adapters on disk, by seed.
    """

    llm: Any
    sources: dict[int, Any]
    options: dict[int, dict[str, Any]]
    folders: dict[int, Path]
    truth: Truth

    def push(self, sync: WeightSync, seed: int, *, name: str = "policy", version: Any = 1) -> Any:
        """Push an adapter, and fill the slots with NaN once it is there."""
        found = sync.push_lora(self.sources[seed], name=name, version=version, **self.options[seed])
        poison(sync)
        return found

    def says(self, report: Any) -> list[int]:
        """Return the seeds of the adapters that the engine answers with: there should be one."""
        return self.truth.seed_of(answers_of(self.llm, request_of(report)))

    def holds(self, report: Any) -> list[int]:
        """Return the seeds of the adapters that are in its slot: there should be one."""
        found = self.llm.collective_rpc(slot_hashes, args=(report.lora_int_id,))
        return [seed for seed, slot in self.truth.slots.items() if slot == found]


def truth_of(llm: Any, folders: dict[int, Path]) -> Truth:
    """Let vLLM read the adapters by itself, and take note of what they do."""
    from vllm.lora.request import LoRARequest

    answers, slots = {0: answers_of(llm)}, {}
    for seed, folder in folders.items():
        answers[seed] = answers_of(llm, LoRARequest(f"disk-{seed}", seed, str(folder)))
        slots[seed] = llm.collective_rpc(slot_hashes, args=(seed,))
        llm.llm_engine.remove_lora(seed)
    truth = Truth(answers, slots)
    assert not list(truth.confused())
    return truth


@pytest.fixture(scope="module")
def record() -> Record:
    import vllm

    return Record(f"adapters-{vllm.__version__}")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("dense")
    base = save_base(root / "base", seed=0)
    model = trainer(base, SEEDS)
    names = [called(seed) for seed in SEEDS]
    model.save_pretrained(str(root), selected_adapters=names, save_embedding_layers=False)
    folders = {seed: root / called(seed) for seed in SEEDS}
    options = {seed: {"adapter_name": called(seed)} for seed in SEEDS}
    with running(base, max_loras=2, max_cpu_loras=3, **LORA) as llm:
        yield Stage(llm, dict.fromkeys(SEEDS, model), options, folders, truth_of(llm, folders))


@pytest.fixture(params=TRANSPORTS)
def sync(request: pytest.FixtureRequest, dense: Stage) -> Iterator[WeightSync]:
    with WeightSync(dense.llm, transport=request.param) as found:
        yield found
        for adapter in found.status()[0]["adapters"]:
            assert found.remove_lora(adapter["name"])
        assert dense.llm.collective_rpc(held_ids) == [([], [])]


def trained_tensors(dense: Stage) -> Tensors:
    state = dense.sources[1].state_dict()
    return {name: tensor for name, tensor in state.items() if "lora_" in name}


def test_pushed_adapters_answer_as_those_on_disk_and_a_new_version_at_once(
    dense: Stage, sync: WeightSync, record: Record
) -> None:
    llm = dense.llm
    before = hashes(trained_tensors(dense))

    first = dense.push(sync, 1, name="policy")
    other = dense.push(sync, 2, name="other")

    assert first.transport in TRANSPORTS
    assert (first.num_tensors, first.num_bytes > 16 * MIB) == (NUM_TENSORS, True)
    record.note(f"{first.transport}: first push, ms", 1000 * first.seconds)
    assert [dense.says(first), dense.says(other)] == [[1], [2]]
    assert [dense.holds(first), dense.holds(other)] == [[1], [2]]
    # vLLM has multiplied every lora_B by four, in place.
    assert hashes(trained_tensors(dense)) == before
    requests = [request_of(first), request_of(other), None, request_of(first)]
    assert dense.truth.others(answers_of(llm, requests), (1, 2, 0, 1)) == []

    for version, seed in enumerate((3, 4, 1), start=2):
        # Long enough for the prefix cache, which has this prompt of the version before.
        assert answers_of(llm, request_of(first))[-1].num_cached >= 16
        report = dense.push(sync, seed, name="policy", version=version)
        found = answers_of(llm, request_of(report))
        assert (dense.truth.seed_of(found), found[-1].num_cached) == ([seed], 0)
        assert dense.holds(report) == [seed]
        # Requests that were made before know it by its old path.
        assert [dense.says(first), dense.says(other)] == [[seed], [2]]
    assert dense.truth.seed_of(answers_of(llm)) == [0]


def test_an_adapter_of_16_mib_is_timed_from_the_call_to_its_return(
    dense: Stage, sync: WeightSync, record: Record
) -> None:
    config = dense.sources[1].peft_config[called(1)]
    pairs = {seed: (adapter_tensors(dense.sources[seed], seed), config) for seed in SEEDS}
    ways: dict[str, Any] = {
        "PEFT model": lambda seed, version: sync.push_lora(
            dense.sources[seed], adapter_name=called(seed), name="policy", version=version
        ),
        "tensors": lambda seed, version: sync.push_lora(
            pairs[seed], name="policy", version=version
        ),
    }
    for way, push in ways.items():
        timed_ms, reports = [], []
        for number in range(14):
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            reports.append(push(1 + number % 2, version=f"{way} {number}"))
            timed_ms.append(1000 * (time.perf_counter() - begin_s))
        assert dense.says(reports[-1]) == dense.holds(reports[-1]) == [2]
        warm = timed_ms[5:]
        record.note(
            f"{reports[-1].transport}: warm push of {way}, ms",
            {
                "median": statistics.median(warm),
                "all": [round(one, 2) for one in timed_ms],
                "worker's load": [round(1000 * r.workers[0].load_s, 2) for r in reports[5:]],
                "worker's wait": [round(1000 * r.workers[0].wait_s, 2) for r in reports[5:]],
                "num_bytes": reports[-1].num_bytes,
            },
        )
    begin_profile()
    dense.llm.collective_rpc(begin_profile)
    for number in range(6):
        ways["PEFT model"](1 + number % 2, version=f"profiled {number}")
    (worker,) = dense.llm.collective_rpc(end_profile)
    text = f"trainer\n{end_profile()}\nworker\n{worker}"
    record.write(f"{reports[-1].transport}.profile.txt", text)


def test_a_hundred_pushes_leave_memory_flat_and_need_no_more_than_their_slots(
    dense: Stage, sync: WeightSync, record: Record
) -> None:
    llm = dense.llm
    size = dense.push(sync, 1).num_bytes
    for version in range(6):
        dense.push(sync, 1 + version % 4, version=version)
    sync.release()
    (worker_before,), before = llm.collective_rpc(memory), memory()
    forget_peak()
    llm.collective_rpc(forget_peak)
    report = dense.push(sync, 2, version="measured")
    (worker_peak,), peak = llm.collective_rpc(memory), memory()

    slots_bytes = report.slot_size_bytes * sync._slots.num_slots
    extra = {
        "adapter": size,
        "slots": slots_bytes,
        "device": before["free"] - peak["free"],
        "trainer's peak": peak["peak"] - before["allocated"],
        "worker's peak": worker_peak["peak"] - worker_before["allocated"],
    }
    record.note(f"{report.transport}: memory of one push, bytes", extra)
    # Memory is handed out in pieces of 2 MiB.
    assert extra["device"] <= slots_bytes + 4 * MIB
    assert extra["trainer's peak"] <= size + 4 * MIB
    assert extra["worker's peak"] <= size + 4 * MIB

    (worker_before,), before = llm.collective_rpc(memory), memory()
    for version in range(100):
        report = dense.push(sync, 1 + version % 4, version=version)
        if version % 25 == 24:
            assert dense.says(report) == dense.holds(report) == [1 + version % 4]
    (worker_after,), after = llm.collective_rpc(memory), memory()
    growth = {
        f"{end}'s {name}": now[name] - then[name]
        for end, then, now in (("trainer", before, after), ("worker", worker_before, worker_after))
        for name in ("rss", "allocated", "reserved", "free")
    }
    record.note(f"{report.transport}: growth over 100 pushes, bytes", growth)
    for name, num_bytes in growth.items():
        # Of a hundred copies that were forgotten, ten would be too many.
        assert abs(num_bytes) <= 4 * MIB or (name.endswith("rss") and num_bytes < 10 * size), growth


def test_adapters_that_vllm_has_evicted_come_back_unscaled(dense: Stage, sync: WeightSync) -> None:
    # Two slots, and room for three in vLLM's own cache: each of the four evicts another.
    reports = {seed: dense.push(sync, seed, name=f"policy-{seed}") for seed in SEEDS}
    for _ in range(3):
        for seed, report in reports.items():
            assert dense.says(report) == dense.holds(report) == [seed]
            ((held, active),) = dense.llm.collective_rpc(held_ids)
            assert (len(held), len(active)) == (3, 2)


def test_adapters_stay_when_the_base_weights_change(dense: Stage, sync: WeightSync) -> None:
    llm = dense.llm
    reports = {seed: dense.push(sync, seed, name=f"policy-{seed}") for seed in (1, 2)}

    sync.push(base_tensors(1), version="other")

    truth = truth_of(llm, {seed: dense.folders[seed] for seed in (1, 2)})
    found = {seed: answers_of(llm, request_of(report)) for seed, report in reports.items()}
    assert {seed: truth.seed_of(one) for seed, one in found.items()} == {1: [1], 2: [2]}
    assert not any(dense.truth.seed_of(one) for one in found.values())
    report = dense.push(sync, 2, name="policy-1", version=2)
    assert truth.seed_of(answers_of(llm, request_of(report))) == [2]

    sync.push(base_tensors(0), version="back")
    assert [dense.says(one) for one in reports.values()] == [[2], [2]]
    assert dense.truth.seed_of(answers_of(llm)) == [0]


def test_what_the_engine_cannot_use_is_refused_and_the_old_adapter_goes_on(
    dense: Stage, sync: WeightSync
) -> None:
    old = dense.push(sync, 1)
    tensors = adapter_tensors(dense.sources[2], 2)
    config = dense.sources[2].peft_config[called(2)].to_dict()
    half = dict(list(tensors.items())[1:])

    with pytest.raises(AdapterConfigError, match="max_lora_rank"):
        sync.push_lora((tensors, config | {"r": 64}), name="policy", version=2)
    for source in (half, iter(half.items())):
        with pytest.raises(AdapterError, match="nothing was changed"):
            sync.push_lora((source, config), name="policy", version=2)

    assert dense.says(old) == dense.holds(old) == [1]


def test_an_adapter_that_is_not_there_is_answered_visibly_and_ends_nothing(
    dense: Stage, sync: WeightSync
) -> None:
    from vllm.lora.request import LoRARequest

    llm = dense.llm
    report, spec = dense.push(sync, 1), spec_of("gone", version="1")
    gone = LoRARequest(spec.name, spec.lora_int_id, spec.lora_path)

    for _ in range(2):
        found = answers_of(llm, [gone, request_of(report), None, request_of(report)])
        assert all(map(math.isnan, found[0].chosen))
        assert all(0 <= token < gpu_adapters.MODEL.vocab_size for token in found[0].tokens)
        assert dense.truth.others(found, (None, 1, 0, 1)) == []
    assert not sync.remove_lora("gone")
    assert dense.says(report) == [1]
    assert dense.says(dense.push(sync, 2, name="gone")) == [2]


def on_device(tensors: Tensors) -> Tensors:
    return {name: tensor.to(gpu_adapters.DEVICE) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("moe")
    base = tiny_models.save_checkpoint("qwen3_moe", root / "base", seed=0)
    tensors = {seed: experts(seed, with_router=False) for seed in SEEDS}
    folders = {seed: save_tensors(tensors[seed], CONFIG, root / str(seed)) for seed in SEEDS}
    sources = {seed: (on_device(tensors[seed]), CONFIG) for seed in SEEDS}
    options: dict[int, dict[str, Any]] = {seed: {} for seed in SEEDS}
    settings = LORA | {"max_loras": 1, "max_cpu_loras": 2, "enable_sleep_mode": True}
    with running(base, **settings) as llm:
        yield Stage(llm, sources, options, folders, truth_of(llm, folders))


@pytest.fixture(params=TRANSPORTS)
def moe_sync(request: pytest.FixtureRequest, moe: Stage) -> Iterator[WeightSync]:
    with WeightSync(moe.llm, transport=request.param, slot_size="16KiB") as found:
        yield found


def test_adapters_of_experts_follow_one_another_under_graphs(
    moe: Stage, moe_sync: WeightSync
) -> None:
    for version, seed in enumerate((1, 2, 3, 1)):
        report = moe.push(moe_sync, seed, version=version)
        assert moe.says(report) == moe.holds(report) == [seed]
    # One slot, and room for two in vLLM's own cache.
    reports = {seed: moe.push(moe_sync, seed, name=f"policy-{seed}") for seed in SEEDS}
    for _ in range(2):
        for seed, report in reports.items():
            assert moe.says(report) == moe.holds(report) == [seed]
    assert moe.truth.seed_of(answers_of(moe.llm)) == [0]


def test_adapters_outlive_both_kinds_of_sleep(moe: Stage, moe_sync: WeightSync) -> None:
    llm = moe.llm
    report = moe.push(moe_sync, 1)
    llm.sleep(level=1)
    with pytest.raises(EngineAsleepError, match="wake_up"):
        moe.push(moe_sync, 2)
    llm.wake_up()
    assert moe.says(report) == moe.holds(report) == [1]
    report = moe.push(moe_sync, 2, version="awake")
    assert moe.says(report) == moe.holds(report) == [2]

    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(AdapterError, match="push the base weights first"):
        moe.push(moe_sync, 3)
    weights = tiny_models.checkpoint_tensors("qwen3_moe", seed=0)
    moe_sync.push(on_device(weights), version="same")
    assert moe.says(report) == moe.holds(report) == [2]
    assert moe.says(moe.push(moe_sync, 3, version="after")) == [3]
    assert moe.truth.seed_of(answers_of(llm)) == [0]
