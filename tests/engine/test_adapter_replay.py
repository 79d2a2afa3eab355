"""A new version that is put by the copies of the last one is as if vLLM had taken it over.

What is compared are bytes: of every tensor of the slot, and of vLLM's model in its cache on
the host. The oracle is the same adapter from a stream, of which nothing is known before it
comes, so that vLLM does all of it; and outputs of the same adapter from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import adapters, engines, tiny_models
from support.adapter_tensors import ATTENTION, CONFIG, LINEAR, Tensors, save_tensors
from support.adapters import LORA, from_disk, opened, outputs_of, peft_model, request_for, sink_of
from support.bytes_of import bytes_of
from support.pushes import Warm, load_all, metas_of, push
from vllm.lora.peft_helper import PEFTHelper

from vllm_bucketsync import copies
from vllm_bucketsync.adapters import id_of
from vllm_bucketsync.layout import Manifest, TensorMeta
from vllm_bucketsync.sinks import Bucket, Piece
from vllm_bucketsync.worker import sleeps
from vllm_bucketsync.worker.lora import recipe, replay, swap
from vllm_bucketsync.worker.lora.contents import SlotTensors
from vllm_bucketsync.worker.lora.image import Arriving, Layout
from vllm_bucketsync.worker.lora.shelf import shelf_of
from vllm_bucketsync.worker.lora.writes import Writes
from vllm_bucketsync.worker.weights import WeightSink


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str, int], Path]) -> Iterator[Any]:
    with engines.running_engine(checkpoint("qwen3", 0), **LORA) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        for number in list(adapters.manager_of(llm).list_adapters()):
            llm.llm_engine.remove_lora(number)
        for name in ("policy", "other", "oracle", "pinned"):
            shelf_of(engines.worker_of(llm)).remove(name)


def was_quick(
    llm: Any,
    tensors: Tensors,
    *,
    name: str = "policy",
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> bool:
    """Push an adapter, and return whether it was put by the copies of the last one."""
    report = push(sink_of(engines.worker_of(llm), opened(name, config=config)), tensors, **settings)
    assert (report.split.num_direct > 0) is not (report.split.num_loaded > 0)
    return report.split.num_direct > 0


def held(llm: Any, name: str = "policy") -> dict[str, bytes]:
    """Return the bytes of all that vLLM has of an adapter, in its slot and on the host."""
    manager, number = adapters.manager_of(llm), id_of(name)
    slot = manager.lora_index_to_id.index(number)
    found: dict[str, bytes] = {}
    for path, module in manager.modules.items():
        for side in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(module, side)
            for part, tensor in enumerate(stacked if isinstance(stacked, tuple) else (stacked,)):
                found[f"slot {path} {side} {part}"] = bytes_of(tensor[slot])
    model = manager.list_adapters()[number]
    for path, lora in model.loras.items():
        about = {key: value for key, value in vars(lora).items() if key not in {"lora_a", "lora_b"}}
        found[f"about {path}"] = repr((type(lora), sorted(about.items()))).encode()
        for side in ("lora_a", "lora_b"):
            parts = getattr(lora, side)
            for part, tensor in enumerate(parts if isinstance(parts, list) else [parts]):
                data = b"none" if tensor is None else bytes_of(tensor)
                found[f"host {path} {side} {part}"] = data
    about = {key: value for key, value in vars(model).items() if key not in {"loras", "id"}}
    found["about it"] = repr((type(model), sorted(about.items()))).encode()
    return found


def as_by_vllm(
    llm: Any, tensors: Tensors, config: dict[str, Any] | None = None
) -> dict[str, bytes]:
    """Return what vLLM has of an adapter that it took over itself."""
    assert not was_quick(llm, tensors, name="oracle", config=config, declared=False)
    found = held(llm, "oracle")
    shelf_of(engines.worker_of(llm)).remove("oracle")
    return found


@dataclass(frozen=True)
class Kind:
    """One kind of adapter.

    Attributes:
        settings: PEFT's.
        dtype: Of its tensors.
    """

    settings: dict[str, Any]
    dtype: torch.dtype = torch.float32
    needs_patterns: bool = False

    def of(self, seed: int) -> tuple[Tensors, dict[str, Any]]:
        """Return tensors, with a zero and a negative one, and the config."""
        model = peft_model(seed, **self.settings)
        config = model.peft_config["default"].to_dict()
        names = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
        tensors = {
            name.replace(".default", ""): tensor.detach().to(self.dtype)
            for name, tensor in model.state_dict().items()
            if "lora_" in name
        }
        return tensors, {"target_modules": []} | {name: config[name] for name in names}


KINDS = {
    "all linear layers": Kind({}),
    "a rank that fills the slot": Kind({"r": 8}),
    "scales of one": Kind({"lora_alpha": 4}),
    "query and value only": Kind({"targets": ("q_proj", "v_proj")}),
    "up and down only": Kind({"targets": ("up_proj", "down_proj")}),
    "some layers only": Kind({"targets": LINEAR, "layers_to_transform": [1]}),
    "embeddings and heads": Kind({"targets": adapters.EVERYTHING}),
    "tensors that are cast": Kind({"lora_alpha": 7}, dtype=torch.bfloat16),
    "ranks and scales that differ": Kind(
        {
            "targets": ATTENTION,
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "layers.1.self_attn.o_proj": 8},
            "alpha_pattern": {"v_proj": 3},
        },
        needs_patterns=True,
    ),
}


@pytest.mark.parametrize("slot_size_bytes", [256, 20_224, 1 << 20])
@pytest.mark.parametrize("name", KINDS)
def test_a_new_version_is_put_by_copies_and_is_what_vllm_would_have_made_of_it(
    name: str, slot_size_bytes: int, llm: Any, tmp_path: Path
) -> None:
    kind = KINDS[name]
    if kind.needs_patterns and not hasattr(PEFTHelper, "get_rank_and_scaling"):
        pytest.skip("this vLLM scales every module of an adapter alike")
    tensors, config = kind.of(1)
    assert not was_quick(llm, tensors, config=config, slot_size_bytes=slot_size_bytes)
    for seed in (2, 3, 2):
        tensors, _ = kind.of(seed)
        assert was_quick(llm, tensors, config=config, slot_size_bytes=slot_size_bytes)
        assert held(llm) == as_by_vllm(llm, tensors, config)
        if slot_size_bytes == 20_224:
            folder = save_tensors(tensors, config, tmp_path / str(seed))
            outputs = outputs_of(llm, request_for())
            assert outputs == outputs_of(llm, from_disk(folder, 9))
            llm.llm_engine.remove_lora(9)
        # vLLM has written to the slots for the oracle.
        assert not was_quick(llm, tensors, config=config, slot_size_bytes=slot_size_bytes)
        assert held(llm) == as_by_vllm(llm, tensors, config)
        was_quick(llm, kind.of(1)[0], config=config, slot_size_bytes=slot_size_bytes)


def test_an_adapter_that_starts_from_zero_is_scaled_once_it_is_none(llm: Any) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    zero = {name: one * 0 if "lora_B" in name else one for name, one in tensors.items()}
    assert not was_quick(llm, zero, config=config)

    assert was_quick(llm, tensors, config=config)

    assert held(llm) == as_by_vllm(llm, tensors, config)


def test_planned_buckets_that_come_again_are_copied_whole(llm: Any) -> None:
    warm, worker = Warm(slot_size_bytes=8192), engines.worker_of(llm)
    for seed in (1, 2, 3, 1):
        tensors, config = KINDS["all linear layers"].of(seed)
        report = warm.push(sink_of(worker, opened(config=config)), tensors)
    assert report.split.num_direct == 8
    assert len(warm.buckets) > 2
    assert all(bucket.prepared is not None for bucket in warm.buckets)
    assert held(llm) == as_by_vllm(llm, tensors, config)


def test_vllm_is_asked_for_nothing(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = KINDS["all linear layers"].of(1)
    second, _ = KINDS["all linear layers"].of(2)
    was_quick(llm, first, config=CONFIG)
    manager = adapters.manager_of(llm)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    for cls in {type(module) for module in manager.modules.values()}:
        monkeypatch.setattr(cls, "set_lora", fail)
        monkeypatch.setattr(cls, "reset_lora", fail)
    monkeypatch.setattr(manager, "add_adapter", fail)
    monkeypatch.setattr(manager, "_create_merged_loras_inplace", fail)

    assert was_quick(llm, second, config=CONFIG)


def test_one_that_vllm_has_forgotten_comes_back_from_its_last_version_unscaled(
    llm: Any, tmp_path: Path
) -> None:
    kind = KINDS["all linear layers"]
    for seed in (1, 2):
        tensors, config = kind.of(seed)
        quick = was_quick(llm, tensors, config=config)
    assert quick
    truth, before = outputs_of(llm, request_for()), held(llm)
    for _ in range(2):
        for number in (11, 12):
            other, _ = kind.of(number)
            folder = save_tensors(other, config, tmp_path / str(number))
            outputs_of(llm, from_disk(folder, number))
        assert id_of("policy") not in adapters.manager_of(llm).list_adapters()
        assert outputs_of(llm, request_for()) == truth
        assert held(llm) == before
    # vLLM itself has filled the slot.
    assert not was_quick(llm, tensors, config=config)
    assert was_quick(llm, tensors, config=config)


def test_two_adapters_in_two_slots_do_not_disturb_each_other(llm: Any) -> None:
    kind = KINDS["all linear layers"]
    quick = []
    for seed in range(1, 5):
        for name in ("policy", "other"):
            tensors, config = kind.of(seed + (10 if name == "other" else 0))
            quick.append(was_quick(llm, tensors, name=name, config=config))
    assert quick == [False, False] + [True] * 6
    states = held(llm), held(llm, "other")
    assert states == tuple(as_by_vllm(llm, kind.of(seed)[0], config) for seed in (4, 14))


def test_names_that_take_turns_in_one_slot_are_each_itself(llm: Any) -> None:
    small, large = KINDS["query and value only"], KINDS["all linear layers"]
    # The other slot is taken for good.
    was_quick(llm, large.of(9)[0], name="pinned")
    llm.llm_engine.pin_lora(id_of("pinned"))
    for turn in range(3):
        for name, kind in (("policy", large), ("other", small)):
            tensors, config = kind.of(turn)
            assert not was_quick(llm, tensors, name=name, config=config)
            state = held(llm, name)
            assert was_quick(llm, tensors, name=name, config=config)
            assert held(llm, name) == state == as_by_vllm(llm, tensors, config)
            assert not was_quick(llm, tensors, name=name, config=config)


def test_kinds_that_take_turns_under_one_name_are_each_itself(llm: Any) -> None:
    small, large = KINDS["query and value only"], KINDS["all linear layers"]
    for turn in range(3):
        for kind in (large, small):
            tensors, config = kind.of(turn)
            assert not was_quick(llm, tensors, config=config)
            assert held(llm) == as_by_vllm(llm, tensors, config)


def test_another_scale_is_another_kind(llm: Any) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    was_quick(llm, tensors, config=config)
    states: list[dict[str, bytes]] = []
    for alpha in (16, 5, 16):
        changed = config | {"lora_alpha": alpha}
        is_new = alpha != 16 or bool(states)
        assert was_quick(llm, tensors, config=changed) is not is_new
        assert was_quick(llm, tensors, config=changed)
        states.append(held(llm))
    assert states[0] == states[2] != states[1]
    assert states[2] == as_by_vllm(llm, tensors, config)


def test_it_is_the_newest_in_vllms_caches_and_keeps_its_pins(llm: Any) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    manager = adapters.manager_of(llm)

    def caches() -> list[Any]:
        both = (manager._registered_adapters, manager._active_adapters)
        return [(list(one.order), set(one.pinned_items)) for one in both]

    seen = {}
    for declared in (False, True):
        for name in ("policy", "other"):
            was_quick(llm, tensors, name=name, config=config)
        llm.llm_engine.pin_lora(id_of("policy"))
        before = caches()
        assert was_quick(llm, tensors, config=config, declared=declared) is declared
        assert manager._last_mapping is None
        seen[declared] = before, caches(), list(manager.lora_index_to_id)
        for name in ("policy", "other"):
            shelf_of(engines.worker_of(llm)).remove(name)
    assert seen[True] == seen[False]


@pytest.mark.parametrize("where", ["at its start", "half-way", "at its end"])
def test_a_failure_leaves_the_old_adapter_and_the_next_one_works(
    where: str, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["all linear layers"]
    old, config = kind.of(1)
    new, _ = kind.of(2)
    for _ in range(2):
        was_quick(llm, old, config=config)
    llm.llm_engine.pin_lora(id_of("policy"))
    before, outputs = held(llm), outputs_of(llm, request_for())
    run = copies.CopyBatch.run

    def fail(batch: copies.CopyBatch) -> None:
        if where == "half-way":
            # Some of it is in the slot.
            batch._moves.run()
        raise RuntimeError("an illegal address")

    def fail_late(_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("an illegal address")

    if where == "at its end":
        monkeypatch.setattr(swap, "synchronise", fail_late)
    else:
        monkeypatch.setattr(copies.CopyBatch, "run", fail)
    with pytest.raises(RuntimeError, match="an illegal address"):
        was_quick(llm, new, config=config)
    monkeypatch.undo()

    assert copies.CopyBatch.run is run
    assert held(llm) == before
    assert outputs_of(llm, request_for()) == outputs
    status = shelf_of(engines.worker_of(llm)).status()
    assert [(one["is_pinned"], one["is_active"]) for one in status] == [(True, True)]
    assert not was_quick(llm, new, config=config)
    assert was_quick(llm, new, config=config)
    assert held(llm) == as_by_vllm(llm, new, config)


def _write(tensor: torch.Tensor) -> None:
    tensor[0].view(-1)[3] = 7.0


def _write_in_inference_mode(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor[1, 0].fill_(3.0)


@pytest.mark.parametrize("write", [_write, _write_in_inference_mode])
def test_whoever_else_writes_to_a_slot_is_seen(write: Callable[..., None], llm: Any) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    for _ in range(2):
        quick = was_quick(llm, tensors, config=config)
    assert quick

    write(adapters.manager_of(llm).modules["model.layers.1.mlp.down_proj"].lora_b_stacked[0])

    assert not was_quick(llm, tensors, config=config)
    assert held(llm) == as_by_vllm(llm, tensors, config)


def test_slots_in_another_memory_are_seen(llm: Any) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    for _ in range(2):
        quick = was_quick(llm, tensors, config=config)
    assert quick
    module = adapters.manager_of(llm).modules["model.layers.1.mlp.down_proj"]

    for change in range(2):
        if change:
            module.lora_a_stacked[0].data = module.lora_a_stacked[0].clone()
        else:
            module.lora_a_stacked = tuple(one.clone() for one in module.lora_a_stacked)
        other, _ = KINDS["all linear layers"].of(3 + change)
        assert not was_quick(llm, other, config=config)
        assert held(llm) == as_by_vllm(llm, other, config)
        assert not was_quick(llm, other, config=config)
        assert was_quick(llm, tensors, config=config)
        assert held(llm) == as_by_vllm(llm, tensors, config)
        assert not was_quick(llm, other, config=config)


def test_an_update_that_was_prepared_before_another_one_is_put_by_vllm(llm: Any) -> None:
    kind, worker = KINDS["all linear layers"], engines.worker_of(llm)
    tensors, config = kind.of(1)
    was_quick(llm, tensors, config=config)
    sinks = []
    for seed in (2, 3):
        sink = sink_of(worker, opened(config=config))
        sink.open(Manifest(metas_of(kind.of(seed)[0])))
        load_all(sink, kind.of(seed)[0], slot_size_bytes=1 << 16)
        sink.prepare()
        sinks.append(sink)

    assert sinks[0].commit().split.num_loaded
    assert held(llm) == as_by_vllm(llm, kind.of(2)[0], config)


def test_a_deep_sleep_and_new_base_weights_end_what_is_known_of_slots(llm: Any) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    for _ in range(2):
        quick = was_quick(llm, tensors, config=config)
    assert quick
    worker, state = engines.worker_of(llm), held(llm)
    sleeps.watch(worker)

    worker.sleep(2)
    for tensor in SlotTensors(adapters.manager_of(llm)).tensors:
        # Behind torch's back, as a sleep is.
        tensor.data.fill_(7)
    worker.wake_up()
    assert held(llm) == state
    push(WeightSink(worker), tiny_models.checkpoint_tensors("qwen3", seed=0))
    assert held(llm) == state

    assert not was_quick(llm, tensors, config=config)
    assert was_quick(llm, tensors, config=config)
    assert held(llm) == state


def test_an_adapter_that_goes_to_another_slot_leaves_its_own_empty(llm: Any) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    was_quick(llm, tensors, name="other", config=config)
    for _ in range(2):
        quick = was_quick(llm, tensors, config=config)
    assert quick
    # vLLM calls the slot free, and writes nothing.
    llm.llm_engine.remove_lora(id_of("other"))
    manager = adapters.manager_of(llm)
    assert manager.lora_index_to_id == [None, id_of("policy")]

    assert not was_quick(llm, tensors, config=config)
    assert manager.lora_index_to_id == [id_of("policy"), None]
    left = [one[1] for one in SlotTensors(manager).tensors if len(one) == 2]
    assert left
    assert not any(bool(one.any()) for one in left)
    assert was_quick(llm, tensors, config=config)
    assert held(llm) == as_by_vllm(llm, tensors, config)


def test_parts_of_tensors_are_copied_where_a_rank_takes_a_part(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = adapters.manager_of(llm).modules["model.layers.1.mlp.down_proj"]

    def set_lora(index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Take what rank 1 of 2 would, as vLLM's layers do."""
        module.reset_lora(index)
        a, b = a[:, 48:], b[32:]
        module.lora_a_stacked[0][index, 0, : a.shape[0], : a.shape[1]].copy_(a)
        module.lora_b_stacked[0][index, 0, : b.shape[0], : b.shape[1]].copy_(b)

    monkeypatch.setattr(module, "set_lora", set_lora)
    for seed in (1, 2):
        tensors, config = KINDS["all linear layers"].of(seed)
        quick = was_quick(llm, tensors, config=config | {"lora_alpha": 40})
    assert quick
    assert held(llm) == as_by_vllm(llm, tensors, config | {"lora_alpha": 40})


_ELSEWHERE = torch.zeros(3)
BESIDES: dict[str, Callable[[Any], object]] = {
    "other bytes than the model's": lambda module: module.lora_b_stacked[0][0].mul_(2),
    "what is no slot": lambda module: _ELSEWHERE.add_(1),
    "a copy of what is not in the model": lambda module: module.lora_b_stacked[0][0].copy_(
        module.lora_b_stacked[0][0] + 1
    ),
    "another slot": lambda module: module.lora_b_stacked[0][1, 0, :4, :4].copy_(
        module.lora_b_stacked[0][0, 0, :4, :4]
    ),
    "zeros, after copies": lambda module: module.lora_b_stacked[0][0, 0, :4].zero_(),
}


@pytest.mark.parametrize("what", BESIDES)
def test_where_vllm_writes_more_than_the_model_it_is_left_to_vllm(
    what: str, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    module = adapters.manager_of(llm).modules["model.layers.1.mlp.down_proj"]
    set_lora = module.set_lora

    def more(*args: Any) -> None:
        set_lora(*args)
        BESIDES[what](module)

    monkeypatch.setattr(module, "set_lora", more)
    config = config | {"lora_alpha": 30 + list(BESIDES).index(what)}

    assert [was_quick(llm, tensors, config=config) for _ in range(3)] == [False] * 3
    assert shelf_of(engines.worker_of(llm)).replays.num_built


def test_no_more_is_kept_than_a_few_kinds(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, config = KINDS["all linear layers"].of(1)
    num_bytes = sum(one.nbytes for one in tensors.values())
    replays = shelf_of(engines.worker_of(llm)).replays
    for limit in (3 * num_bytes, num_bytes // 2):
        monkeypatch.setattr(replay, "MAX_BENCH_BYTES", limit)
        for alpha in range(20, 26):
            changed = config | {"lora_alpha": alpha}
            quick = [was_quick(llm, tensors, config=changed) for _ in range(2)]
            assert quick == [False, limit > num_bytes]
        benches = sum(kind.num_bytes for kind in replays._kinds.values())
        assert benches <= 3 * num_bytes


def test_an_image_takes_pieces_from_anywhere_and_overwrites_nothing() -> None:
    metas = [
        TensorMeta(
            name=str(number), dtype="float32", shape=(10 + number,), num_bytes=40 + 4 * number
        )
        for number in range(3)
    ]
    values = [torch.full(meta.shape, float(number)) for number, meta in enumerate(metas)]
    memory = torch.full((3 * 256,), 0xA5, dtype=torch.uint8)
    arriving = Arriving(Layout(metas), is_pinned=False)

    def piece(number: int, *, is_in_memory: bool) -> Piece:
        data = values[number].view(torch.uint8)
        if is_in_memory:
            here = memory[256 * number : 256 * number + data.numel()]
            data = here.copy_(data)
        return Piece(index=number, meta=metas[number], first_byte=0, data=data)

    arriving.add(Bucket(seq=0, pieces=(piece(1, is_in_memory=False),)))
    assert arriving.incomplete() == (metas[0], 0)
    # As far apart as they are in the image; what lies between them is not theirs.
    both = tuple(piece(number, is_in_memory=True) for number in (0, 2))
    arriving.add(Bucket(seq=1, pieces=both))

    image = arriving.image(torch.float32)
    assert arriving.incomplete() is None
    assert {name: bytes_of(one) for name, one in image.items()} == {
        meta.name: bytes_of(one) for meta, one in zip(metas, values, strict=True)
    }
    assert image.num_bytes == sum(one.nbytes for one in values)
    assert image.flat.data_ptr() != memory.data_ptr()
    half = arriving.image(torch.bfloat16)
    assert half.num_bytes == image.num_bytes // 2
    assert {name: bytes_of(one) for name, one in half.items()} == {
        meta.name: bytes_of(one.bfloat16()) for meta, one in zip(metas, values, strict=True)
    }


def test_what_makes_adapters_quick_is_given_back_with_the_last_one(
    llm: Any,
) -> None:
    worker = engines.worker_of(llm)
    replays = shelf_of(worker).replays

    for give_back in (lambda: shelf_of(worker).remove("policy"), replays.forget):
        assert [was_quick(llm, adapters.tensors_of(seed)) for seed in (1, 2, 1)][1:] == [True, True]
        assert sum(kind.num_bytes for kind in replays._kinds.values()) > 0
        give_back()
        assert not replays._kinds
        assert not was_quick(llm, adapters.tensors_of(2))
        assert was_quick(llm, adapters.tensors_of(1))
    assert held(llm) == as_by_vllm(llm, adapters.tensors_of(1))


def test_room_for_a_bench_is_made_before_it_is_taken(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = shelf_of(engines.worker_of(llm)).replays
    num_bytes = []
    learn = recipe.learn

    def watched(*args: Any, **options: Any) -> Any:
        num_bytes.append(sum(kind.num_bytes for kind in replays._kinds.values()))
        return learn(*args, **options)

    monkeypatch.setattr("vllm_bucketsync.worker.lora.replay.learn", watched)
    assert not was_quick(llm, adapters.tensors_of(1))
    (one,) = replays._kinds.values()
    monkeypatch.setattr(replay, "MAX_BENCH_BYTES", one.num_bytes)
    assert not was_quick(llm, adapters.tensors_of(1), config={**CONFIG, "lora_alpha": 2})

    assert num_bytes == [0, 0]
    assert len(replays._kinds) == 1


def test_copies_that_may_overlap_are_not_repeated() -> None:
    memory = torch.zeros(64)
    rows = memory.view(8, 8)

    assert not replay._may_overlap([rows[0], rows[1], torch.zeros(9), rows[3, :0]])
    assert replay._may_overlap([rows[0], memory[4:6]])
    assert replay._may_overlap([rows[:, :2], rows[2]])


def test_operands_by_keyword_are_noted() -> None:
    with Writes() as writes:
        torch.ops.aten.copy_(torch.zeros(3), src=torch.ones(3))
        torch.ops.aten.fill_(torch.ones(3), value=0)

    assert [write.is_copy for write in writes.found] == [True, False]
    assert [write.is_zero for write in writes.found] == [False, True]


def test_what_is_skipped_is_not_kept(llm: Any) -> None:
    base = {"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(512, 64)}
    worker = engines.worker_of(llm)
    sink = sink_of(worker, opened("policy"))
    push(sink, {**adapters.tensors_of(1), **base})

    kept = shelf_of(worker)._kept[id_of("policy")]
    held_bytes = sum(
        {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in kept.tensors.values()
        }.values()
    )
    assert not set(base) & set(kept.tensors)
    assert held_bytes <= 2 * kept.num_bytes
