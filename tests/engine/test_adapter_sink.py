"""What vLLM keeps of an adapter is nobody else's: not a bucket's, not the trainer's.

The sink is driven through one bucket that is poisoned after every load.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch
from support import adapters, engines, tiny_models
from support.adapter_tensors import CONFIG, save_tensors
from support.adapters import (
    LORA,
    from_disk,
    opened,
    outputs_of,
    put,
    request_for,
    sink_of,
    tensors_of,
)
from support.bytes_of import bytes_of
from support.pushes import load_all, metas_of, push

from vllm_bucketsync import AdapterConfigError, AdapterError, AdapterTensorError, EngineAsleepError
from vllm_bucketsync.adapters import id_of, spec_of
from vllm_bucketsync.layout import Manifest
from vllm_bucketsync.messages import Open
from vllm_bucketsync.sinks import Bucket, Piece
from vllm_bucketsync.worker import sleeps
from vllm_bucketsync.worker.lora import shelf
from vllm_bucketsync.worker.lora.sink import AdapterSink
from vllm_bucketsync.worker.weights import WeightSink


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str, int], Path]) -> Iterator[Any]:
    with engines.running_engine(checkpoint("qwen3", 0), **LORA) as found:
        yield found


@pytest.mark.parametrize("declared", [True, False])
def test_adapters_come_through_buckets_of_any_size(
    declared: bool, llm: Any, tmp_path: Path
) -> None:
    tensors = tensors_of(1)
    folder = save_tensors(tensors, CONFIG, tmp_path)
    truth = outputs_of(llm, from_disk(folder, 1))
    before = {name: bytes_of(tensor) for name, tensor in tensors.items()}

    # The smallest splits every tensor, the others part many an A from its B.
    for slot_size_bytes in (256, 1024, 4096, 1 << 20):
        report = put(llm, tensors, slot_size_bytes=slot_size_bytes, declared=declared)
        assert outputs_of(llm, request_for()) == truth
        assert report.cloned_bytes == sum(tensor.nbytes for tensor in tensors.values())

    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == before
    llm.llm_engine.remove_lora(1)


def evicted(llm: Any, tmp_path: Path) -> None:
    """Use other adapters until vLLM has forgotten ours."""
    for number, seed in ((11, 2), (12, 3)):
        folder = save_tensors(tensors_of(seed), CONFIG, tmp_path / str(number))
        outputs_of(llm, from_disk(folder, number))
    assert id_of("policy") not in adapters.manager_of(llm).list_adapters()


class KeepsViews(AdapterSink):
    """What a sink would be without its clones, of what was not declared."""

    def load(self, bucket: Bucket) -> None:
        for piece in bucket.pieces:
            self._metas[piece.index] = piece.meta
            self._whole[piece.index] = piece.tensor()


def test_views_of_a_bucket_would_show(llm: Any, tmp_path: Path) -> None:
    folder = save_tensors(tensors_of(1), CONFIG, tmp_path)
    truth = outputs_of(llm, from_disk(folder, 1))
    worker = engines.worker_of(llm)

    sink = sink_of(worker, cls=KeepsViews)
    push(sink, tensors_of(1), slot_size_bytes=4096, declared=False)

    assert outputs_of(llm, request_for()) != truth
    llm.llm_engine.remove_lora(1)


@pytest.mark.parametrize(("declared", "has_clones"), [(True, True), (False, True), (False, False)])
def test_an_adapter_that_vllm_has_scaled_and_forgotten_comes_back_from_a_pristine_copy(
    declared: bool, has_clones: bool, llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tensors(tensors_of(1), CONFIG, tmp_path)
    truth = outputs_of(llm, from_disk(folder, 1))
    with monkeypatch.context() as patch:
        if not has_clones:
            patch.setattr(shelf, "clones_of", lambda tensors, **_: dict(tensors))
        put(llm, tensors_of(1), declared=declared)
    assert outputs_of(llm, request_for()) == truth

    for _ in range(2):
        evicted(llm, tmp_path)
        assert (outputs_of(llm, request_for()) == truth) is has_clones


def test_nothing_that_is_kept_shares_memory_with_anything(llm: Any) -> None:
    tensors = tensors_of(1)
    worker = engines.worker_of(llm)
    sink = sink_of(worker)
    bucket = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]

    push(sink, tensors)

    kept = shelf.shelf_of(worker)._kept[id_of("policy")]
    mine = {tensor.untyped_storage().data_ptr() for tensor in kept.tensors.values()}
    model = adapters.manager_of(llm).list_adapters()[id_of("policy")]
    theirs = {
        tensor.untyped_storage().data_ptr()
        for lora in model.loras.values()
        for held in (lora.lora_a, lora.lora_b)
        for tensor in (held if isinstance(held, list) else [held])
    }
    assert (len(mine), len(kept.tensors)) == (1, len(tensors))
    assert mine.isdisjoint(theirs)
    assert bucket.untyped_storage().data_ptr() not in mine | theirs


@pytest.mark.parametrize("declared", [True, False])
def test_an_update_holds_what_came_and_no_more_than_a_bucket_besides(
    declared: bool, llm: Any
) -> None:
    tensors, slot_size_bytes = tensors_of(1), 4096
    worker = engines.worker_of(llm)

    def held() -> int:
        gc.collect()
        live = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.is_cpu]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in live}
        return sum(one.nbytes() for one in storages.values())

    seen: list[int] = []

    class Watched(AdapterSink):
        def load(self, bucket: Bucket) -> None:
            super().load(bucket)
            seen.append(held())

    sink = sink_of(worker, cls=Watched)
    before = held()
    sink.open(Manifest(metas_of(tensors)) if declared else None)
    load_all(sink, tensors, slot_size_bytes=slot_size_bytes)
    total = sum(tensor.nbytes for tensor in tensors.values())
    sink.release()

    assert len(seen) > 10
    # Of what is declared, the place is taken first. The bucket itself is one more.
    came = [total if declared else (n + 1) * slot_size_bytes for n in range(len(seen))]
    limits = [min(one, total) + 2 * slot_size_bytes for one in came]
    assert all(one - before <= limit for one, limit in zip(seen, limits, strict=True))
    assert held() <= before


def test_memory_stays_flat_over_two_hundred_updates(llm: Any) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        return len(tensors), psutil.Process().memory_info().rss

    versions = [tensors_of(seed) for seed in (1, 2)]
    for number in range(220):
        if number == 20:
            num_tensors, rss = held()
        put(llm, versions[number % 2], slot_size_bytes=1 << 16)

    after, rss_after = held()
    assert after <= num_tensors + 5
    num_bytes = sum(tensor.nbytes for tensor in versions[0].values())
    # One copy that was forgotten each time would be 200 of them.
    assert rss_after - rss < 100 * num_bytes


def test_an_abort_at_any_point_leaves_the_adapter_that_was_there(llm: Any) -> None:
    put(llm, tensors_of(1))
    old = outputs_of(llm, request_for())
    worker = engines.worker_of(llm)
    for last in ("open", "load", "prepare"):
        sink = sink_of(worker)
        sink.open(Manifest(metas_of(tensors_of(2))))
        if last != "open":
            load_all(sink, tensors_of(2), slot_size_bytes=4096)
        if last == "prepare":
            sink.prepare()
        assert sink.abort() == "unchanged"
        sink.release()
        assert outputs_of(llm, request_for()) == old
    cut = sink_of(worker)
    cut.open(Manifest(metas_of(tensors_of(2))))
    name, tensor = next(iter(tensors_of(2).items()))
    data = tensor.contiguous().view(-1).view(torch.uint8)[:256]
    piece = Piece(index=0, meta=metas_of({name: tensor})[0], first_byte=0, data=data)
    cut.load(Bucket(seq=0, pieces=(piece,)))
    with pytest.raises(AdapterTensorError, match="only 256/1024 bytes came"):
        cut.prepare()
    cut.release()


# Sleep is the GPU's; a CPU worker takes the calls and does nothing.


def test_what_a_sleep_took_away_is_given_back_or_asked_for(llm: Any, tmp_path: Path) -> None:
    worker = engines.worker_of(llm)
    watched = sleeps.watch(worker)
    put(llm, tensors_of(1))
    truth = outputs_of(llm, request_for())

    worker.sleep(level=1)
    worker.wake_up()
    assert not watched.has_lost_base
    assert outputs_of(llm, request_for()) == truth

    worker.sleep(2)
    for module in adapters.manager_of(llm).modules.values():
        # Level 2 leaves garbage in the slots.
        for tensor in (*module.lora_a_stacked, *module.lora_b_stacked):
            tensor.fill_(7.0)
    worker.wake_up(tags=["weights"])
    assert outputs_of(llm, request_for()) == truth
    with pytest.raises(AdapterError, match="push the base weights first"):
        put(llm, tensors_of(2))
    assert outputs_of(llm, request_for()) == truth

    weights = tiny_models.checkpoint_tensors("qwen3", seed=0)
    part = {name: one for name, one in weights.items() if name != "lm_head.weight"}
    push(WeightSink(worker, partial=["lm_head.*"]), part)
    assert watched.has_lost_base
    push(WeightSink(worker), weights)
    put(llm, tensors_of(1))
    assert outputs_of(llm, request_for()) == truth


def test_a_worker_whose_weights_are_asleep_takes_no_adapter(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = engines.worker_of(llm)
    monkeypatch.setattr(worker, "_sleep_mode_backend", SimpleNamespace(state=lambda: "SUSPENDED"))

    with pytest.raises(EngineAsleepError, match=r"wake_up\(tags=\['weights'\]\)"):
        put(llm, tensors_of(1))


def test_an_adapter_is_removed_from_a_worker_that_sleeps_without_a_write_to_its_slot(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(llm, tensors_of(1))
    module = adapters.manager_of(llm).modules["model.layers.0.mlp.down_proj"]
    written: list[int] = []
    monkeypatch.setattr(module, "reset_lora", written.append)

    kept = shelf.shelf_of(engines.worker_of(llm))
    assert kept.remove("policy", is_asleep=True)
    assert (written, adapters.manager_of(llm).list_adapters()) == ([], {})
    monkeypatch.undo()
    put(llm, tensors_of(1))
    assert kept.remove("policy")


def test_a_config_that_is_none_is_refused(llm: Any) -> None:
    for text in ("{", "[]", "null"):
        offer = opened()
        offer = Open(
            **{name: getattr(offer, name) for name in offer.__struct_fields__ if name != "adapter"},
            adapter=spec_of("policy", version="1", config=text),
        )
        with pytest.raises(AdapterConfigError, match="PEFT's LoraConfig"):
            sink_of(engines.worker_of(llm), offer).open(None)


def test_a_number_or_path_that_is_not_the_name_s_own_is_refused_and_nothing_is_touched(
    llm: Any,
) -> None:
    worker = engines.worker_of(llm)
    before = set(adapters.manager_of(llm).list_adapters())
    good, own = opened(), spec_of("policy", version="1", config=json.dumps(CONFIG))
    for change in (
        {"lora_int_id": 1},
        {"lora_path": "some-org/some-repo"},
        {"lora_path": "bucketsync://policy@2"},
    ):
        spec = msgspec.structs.replace(own, **change)
        offer = msgspec.structs.replace(good, adapter=spec)
        with pytest.raises(AdapterError, match="let push_lora make them") as caught:
            push(sink_of(worker, offer), tensors_of(1))
        assert caught.value.adapter == "policy"
    assert set(adapters.manager_of(llm).list_adapters()) == before
