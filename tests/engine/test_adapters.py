"""Adapters that are pushed into a running engine do what the same adapters on disk do.

The oracle is an engine that was started from the base weights and read the adapter, as PEFT
saved it, from a folder. Prefix caching is off here; ``test_adapters_online.py`` has it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from support import adapters, engines, tiny_models
from support.adapter_tensors import ATTENTION, request_of
from support.adapters import LORA, Outputs, from_disk, outputs_of, peft_model
from support.bytes_of import bytes_of
from vllm.lora.peft_helper import PEFTHelper

from vllm_bucketsync import (
    AdapterCapacityError,
    AdapterConfigError,
    AdapterError,
    AdapterModuleError,
    AdapterTensorError,
    RemoteError,
    SourceError,
    WeightSync,
)
from vllm_bucketsync.worker.lora import swap
from vllm_bucketsync.worker.lora.shelf import shelf_of

EXTENSION = "vllm_bucketsync.WorkerExtension"
SEEDS = (1, 2, 3)


# Older vLLM scales every module of an adapter alike.
HAS_PATTERNS = hasattr(PEFTHelper, "get_rank_and_scaling")


@dataclass(frozen=True)
class Stage:
    """A running engine, and what one that reads adapters from disk says.

    Attributes:
        truth: By the seeds of base and adapter; no adapter is 0.
        folders: Of the adapters on disk.
    """

    llm: Any = field(repr=False)
    truth: dict[tuple[int, int], Outputs] = field(repr=False)
    folders: dict[int, Path]

    @property
    def drops_adapters(self) -> bool:
        """Whether this vLLM drops adapters that it has read from disk with the base weights."""
        return hasattr(engines.worker_of(self.llm).model_runner, "reset_lora_state")

    def says(self, report: Any, *, base: int = 0) -> int:
        """Return the seed of the adapter whose outputs these are."""
        outputs = outputs_of(self.llm, None if report is None else request_of(report))
        found = [seed for (b, seed), truth in self.truth.items() if (b, outputs) == (base, truth)]
        assert len(found) == 1, "these are the outputs of no adapter"
        return found[0]


def _everywhere() -> Any:
    return peft_model(4, targets=adapters.EVERYTHING)


@pytest.fixture(scope="module")
def stage(
    checkpoint: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("adapters")
    models = {seed: peft_model(seed) for seed in SEEDS} | {4: _everywhere()}
    folders = {seed: adapters.saved(model, root / str(seed)) for seed, model in models.items()}
    truth: dict[tuple[int, int], Outputs] = {}
    for base in (0, 1):
        with engines.running_engine(checkpoint("qwen3", base), **LORA) as llm:
            truth[base, 0] = outputs_of(llm)
            for seed, folder in folders.items():
                truth[base, seed] = outputs_of(llm, from_disk(folder, seed))
    assert len({str(outputs) for outputs in truth.values()}) == len(truth)
    settings = LORA | {"worker_extension_cls": EXTENSION}
    with engines.running_engine(checkpoint("qwen3", 0), **settings) as llm:
        yield Stage(llm, truth, folders)


@pytest.fixture
def sync(stage: Stage) -> Iterator[WeightSync]:
    with WeightSync(stage.llm) as found:
        yield found
        for adapter in found.status()[0]["adapters"]:
            assert found.remove_lora(adapter["name"])
        assert adapters.manager_of(stage.llm).list_adapters() == {}
        assert stage.says(None) == 0


def test_a_release_gives_back_what_makes_new_versions_quick(stage: Stage, sync: WeightSync) -> None:
    replays = shelf_of(engines.worker_of(stage.llm)).replays
    for version, seed in enumerate((1, 2, 1)):
        report = sync.push_lora(peft_model(seed), name="policy", version=version)
        assert (report.workers[0].num_direct > 0) is (version > 0)
    assert len(replays._kinds) == 1

    sync.release()

    assert not replays._kinds
    report = sync.push_lora(peft_model(2), name="policy", version="slow")
    assert (report.workers[0].num_direct, stage.says(report)) == (0, 2)


def test_what_the_trainer_s_thread_has_set_is_not_for_the_engine(
    stage: Stage, sync: WeightSync
) -> None:
    for version, seed in enumerate((1, 2, 1)):
        model = peft_model(seed)
        tensors = get_peft_model_state_dict(model)
        source = (tensors, model.peft_config["default"]) if seed == 2 else model
        with torch.device("meta"), torch.inference_mode():
            report = sync.push_lora(source, name="policy", version=version)
        assert stage.says(report) == seed


def test_a_pushed_adapter_answers_as_one_that_was_read_from_disk(
    stage: Stage, sync: WeightSync
) -> None:
    model = peft_model(1)
    before = {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}

    report = sync.push_lora(model, name="policy", version=7)

    assert stage.says(report) == 1
    assert {name: bytes_of(tensor) for name, tensor in model.state_dict().items()} == before
    assert report.workers[0].notes == ("it is applied to 8 modules",)
    assert report.request_kwargs == {
        "lora_name": "policy",
        "lora_int_id": report.lora_int_id,
        "lora_path": "bucketsync://policy@7",
    }
    held = sync.status()[0]
    assert held["version"] is None
    assert held["adapters"] == [
        {
            "name": "policy",
            "lora_int_id": report.lora_int_id,
            "version": "7",
            "num_bytes": report.num_bytes,
            "is_active": True,
            "is_pinned": False,
        }
    ]


def test_tensors_with_a_config_and_a_folder_do_as_well(stage: Stage, sync: WeightSync) -> None:
    from peft import get_peft_model_state_dict

    model = peft_model(2)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    sources = [
        (tensors, model.peft_config["default"]),
        (iter(tensors.items()), {"r": 4, "lora_alpha": 16}),
        stage.folders[2],
    ]
    for version, source in enumerate(sources):
        report = sync.push_lora(source, name="policy", version=version)
        assert stage.says(report) == 2


def test_a_new_version_takes_effect_at_once_and_keeps_number_name_and_pin(
    stage: Stage, sync: WeightSync
) -> None:
    first = sync.push_lora(peft_model(1), name="policy", version=1)
    assert stage.says(first) == 1
    stage.llm.llm_engine.pin_lora(first.lora_int_id)

    for version, seed in enumerate((2, 1, 3, 2), start=2):
        report = sync.push_lora(peft_model(seed), name="policy", version=version)
        assert stage.says(report) == seed
        # Requests that were made before know it by its old path.
        assert stage.says(first) == seed
        assert (report.name, report.lora_int_id) == (first.name, first.lora_int_id)
        (held,) = sync.status()[0]["adapters"]
        assert (held["is_pinned"], held["version"]) == (True, str(version))


def test_several_adapters_live_side_by_side_and_evicted_ones_come_back_unscaled(
    stage: Stage, sync: WeightSync
) -> None:
    # Two slots, and room for two in vLLM's own cache: each of these evicts another.
    reports = {
        seed: sync.push_lora(peft_model(seed), name=f"policy-{seed}", version=1) for seed in SEEDS
    }
    assert len({report.lora_int_id for report in reports.values()}) == 3
    for _ in range(3):
        for seed, report in reports.items():
            assert stage.says(report) == seed
    assert len(adapters.manager_of(stage.llm).list_adapters()) == 2

    # vLLM's own adapters come and go beside them.
    assert outputs_of(stage.llm, from_disk(stage.folders[3])) == stage.truth[0, 3]
    assert stage.says(reports[1]) == 1
    assert sync.remove_lora("policy-2")
    assert not sync.remove_lora("policy-2")
    assert [stage.says(reports[seed]) for seed in (3, 1)] == [3, 1]
    stage.llm.llm_engine.remove_lora(1)


def test_base_weights_and_adapters_alternate_in_any_order(stage: Stage, sync: WeightSync) -> None:
    weights = {seed: tiny_models.checkpoint_tensors("qwen3", seed=seed) for seed in (0, 1)}
    pinned = sync.push_lora(peft_model(1), name="pinned", version=1)
    stage.llm.llm_engine.pin_lora(pinned.lora_int_id)
    other = sync.push_lora(peft_model(2), name="other", version=1)

    report = sync.push(weights[1], version=1)
    assert "dropped" not in str(report.workers[0].notes)
    assert {one["name"]: one["is_pinned"] for one in sync.status()[0]["adapters"]} == {
        "pinned": True,
        "other": False,
    }
    assert [stage.says(one, base=1) for one in (pinned, other, None)] == [1, 2, 0]

    other = sync.push_lora(peft_model(3), name="other", version=2)
    assert [stage.says(one, base=1) for one in (other, pinned)] == [3, 1]
    sync.push(weights[0], version=2)
    sync.push(weights[1], version=3)
    assert [stage.says(one, base=1) for one in (other, None, pinned)] == [3, 0, 1]

    assert outputs_of(stage.llm, from_disk(stage.folders[2], 5)) == stage.truth[1, 2]
    report = sync.push(weights[0], version=4)
    if stage.drops_adapters:
        assert report.workers[0].notes == ("1 adapters were dropped with the old weights",)
    else:
        # Before 0.29, vLLM keeps what it has read from disk, and so does an update.
        assert report.workers[0].notes == ()
        assert outputs_of(stage.llm, from_disk(stage.folders[2], 5)) == stage.truth[0, 2]
        stage.llm.llm_engine.remove_lora(5)
    assert [stage.says(one) for one in (None, other, pinned)] == [0, 3, 1]


def test_merged_weights_are_pushed_without_changing_the_model(
    stage: Stage, sync: WeightSync
) -> None:
    model = peft_model(1, targets=[*ATTENTION, "up_proj"])
    before = {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}
    policy = sync.push_lora(peft_model(2), name="policy", version=1)

    with pytest.raises(SourceError, match="merge=True"):
        sync.push(model, version=1)
    sync.push(model, version="merged", merge=True)

    assert {name: bytes_of(tensor) for name, tensor in model.state_dict().items()} == before
    merged = outputs_of(stage.llm)
    with_policy = outputs_of(stage.llm, request_of(policy))
    sync.push(tiny_models.checkpoint_tensors("qwen3", seed=0), version="back")
    sync.push(model.merge_and_unload(), version="PEFT's own")
    assert outputs_of(stage.llm) == merged != stage.truth[0, 0]
    assert outputs_of(stage.llm, request_of(policy)) == with_policy
    sync.push(tiny_models.checkpoint_tensors("qwen3", seed=0), version="back")


def tensors_of(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = peft_model(seed, targets=ATTENTION)
    return _tensors(model), model.peft_config["default"].to_dict()


def _tensors(model: Any) -> dict[str, Any]:
    return {
        name.replace(".default", ""): tensor
        for name, tensor in model.state_dict().items()
        if "lora_" in name
    }


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name.replace(old, new): one for name, one in tensors.items()}


def without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name: one for name, one in tensors.items() if part not in name}


Change = Callable[[dict[str, Any]], dict[str, Any]]
REFUSED: dict[str, tuple[type[AdapterError], Change, dict[str, Any], dict[str, Any]]] = {
    "a rank above the engine's": (
        AdapterConfigError,
        lambda tensors: tensors,
        {"r": 64},
        {"setting": "r", "found": "64"},
    ),
    "a rank pattern above the engine's": (
        AdapterConfigError,
        lambda tensors: tensors,
        {"rank_pattern": {"q_proj": 16}},
        {"setting": "rank_pattern['q_proj']", "found": "16"},
    ),
    "DoRA": (AdapterConfigError, lambda t: t, {"use_dora": True}, {"setting": "use_dora"}),
    "whole modules": (
        AdapterConfigError,
        lambda t: t,
        {"modules_to_save": ["lm_head"]},
        {"setting": "modules_to_save", "found": "['lm_head']"},
    ),
    "biases": (AdapterConfigError, lambda t: t, {"bias": "all"}, {"setting": "bias"}),
    "biases of its own": (
        AdapterConfigError,
        lambda t: t,
        {"lora_bias": True},
        {"setting": "lora_bias"},
    ),
    "another kind": (
        AdapterConfigError,
        lambda t: t,
        {"peft_type": "IA3"},
        {"setting": "peft_type", "rank": None},
    ),
    "a pattern that is none": (
        AdapterConfigError,
        lambda t: t,
        {"rank_pattern": {"q_proj(": 2}},
        {"setting": "config" if HAS_PATTERNS else "rank_pattern"},
    ),
    "numbers that are none": (
        AdapterConfigError,
        lambda t: t,
        {"lora_alpha": math.nan},
        {"setting": "config", "rank": 0},
    ),
    "a prefix that matches nothing": (
        AdapterModuleError,
        renamed("model.layers", "transformer.h"),
        {},
        {"unmatched": tuple(f"transformer.h.{n}.self_attn.{p}" for n in (0, 1) for p in ATTENTION)},
    ),
    "one module that matches nothing": (
        AdapterModuleError,
        renamed("layers.0.self_attn.q_proj", "layers.0.self_attn.qq_proj"),
        {},
        {"unmatched": ("model.layers.0.self_attn.qq_proj",)},
    ),
    "a layer that the engine has not": (
        AdapterModuleError,
        renamed("layers.1.", "layers.9."),
        {},
        {"unmatched": tuple(f"model.layers.9.self_attn.{p}" for p in ATTENTION)},
    ),
    "a missing partner": (
        AdapterTensorError,
        without("layers.0.self_attn.q_proj.lora_B"),
        {},
        {"tensor": f"{QUERY}.lora_B.weight".removeprefix("base_model.model."), "got": "nothing"},
    ),
    "a wrong shape": (
        AdapterTensorError,
        lambda tensors: tensors | {f"{QUERY}.lora_B.weight": tensors[f"{QUERY}.lora_B.weight"][:8]},
        {},
        {"expected": "[160, 4]", "got": "[8, 4]"},
    ),
    "a rank that is not the config's": (
        AdapterTensorError,
        lambda tensors: tensors,
        {"r": 8},
        {"expected": "[8, 64]", "got": "[4, 64]"},
    ),
    "whole numbers": (
        AdapterTensorError,
        lambda tensors: {name: one.int() for name, one in tensors.items()},
        {},
        {"expected": "floats", "got": "int32"},
    ),
    "a bias among its tensors": (
        AdapterTensorError,
        lambda tensors: tensors | {f"{QUERY}.lora_B.bias": tensors[f"{QUERY}.lora_A.weight"][0]},
        {},
        {"got": "another name"},
    ),
    "a whole classifier among its tensors": (
        AdapterTensorError,
        lambda t: t | {"base_model.model.score.weight": t[f"{QUERY}.lora_A.weight"]},
        {},
        {"tensor": "score.weight", "got": "another name"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["declared", "streamed"])
def test_what_cannot_be_applied_is_refused_and_the_old_adapter_goes_on_serving(
    case: str, is_streamed: bool, stage: Stage, sync: WeightSync
) -> None:
    kind, change, settings, attributes = REFUSED[case]
    old = sync.push_lora(peft_model(1), name="policy", version=1)
    tensors, config = tensors_of(2)
    changed = change(tensors)
    source = iter(changed.items()) if is_streamed else changed

    with pytest.raises(kind) as caught:
        sync.push_lora((source, config | settings), name="policy", version=2)

    expected = {"rank": 0, "engine_state": "unchanged"} | attributes
    if expected["rank"] is None:
        expected["engine_state"] = None
    assert {name: getattr(caught.value, name) for name in expected} == expected
    assert "nothing was" in str(caught.value)
    (held,) = sync.status()[0]["adapters"]
    assert held["version"] == "1"
    assert stage.says(old) == 1


def test_faults_of_one_kind_are_told_by_the_first(stage: Stage, sync: WeightSync) -> None:
    tensors, config = tensors_of(1)
    whole = {name: one.int() for name, one in tensors.items()}

    with pytest.raises(AdapterTensorError) as caught:
        sync.push_lora((whole, config), name="x", version=1)

    head, first, others = str(caught.value).splitlines()
    assert head == "adapter 'x' cannot be applied; nothing was changed:"
    assert "does not fit: expected floats, got int32" in first
    assert others.startswith(f"  and {len(whole) - 1} more like it: '")
    assert len(caught.value.problems) == min(len(whole), 20 + 1)


def test_modules_may_go_unapplied_where_they_are_named(stage: Stage, sync: WeightSync) -> None:
    tensors, config = tensors_of(1)
    with_more = tensors | {
        name.replace("model.layers.0", "visual.blocks.0"): tensor
        for name, tensor in tensors.items()
    }
    plain = sync.push_lora((tensors, config), name="plain", version=1)
    report = sync.push_lora(
        (with_more, config), name="more", version=1, partial=["visual.*", "vsual.*"]
    )

    assert report.workers[0].notes[1:] == (
        "partial names 'vsual.*', which matches no module of the adapter",
    )
    assert report.skipped == tuple(
        f"visual.blocks.0.self_attn.{part}.lora_{side}.weight"
        for part in sorted(ATTENTION)
        for side in "AB"
    )
    assert outputs_of(stage.llm, request_of(report)) == outputs_of(stage.llm, request_of(plain))
    only = {name: one for name, one in with_more.items() if "visual" in name}
    with pytest.raises(AdapterModuleError, match="any of it"):
        sync.push_lora((only, config), name="more", version=2, partial=["visual.*"])


def test_a_dry_run_checks_everything_and_changes_nothing(stage: Stage, sync: WeightSync) -> None:
    old = sync.push_lora(peft_model(1), name="policy", version=1)
    tensors, config = tensors_of(2)

    report = sync.push_lora((tensors, config), name="policy", version=2, dry_run=True)

    assert (report.num_tensors, report.num_buckets) == (len(tensors), 0)
    assert stage.says(old) == 1
    with pytest.raises(AdapterTensorError):
        sync.push_lora((without("B")(tensors), config), name="x", version=2, dry_run=True)


def test_an_adapter_for_which_nothing_may_be_evicted_is_refused(
    stage: Stage, sync: WeightSync
) -> None:
    reports = [sync.push_lora(peft_model(seed), name=str(seed), version=1) for seed in (1, 2)]
    for report in reports:
        stage.llm.llm_engine.pin_lora(report.lora_int_id)

    with pytest.raises(AdapterCapacityError, match="remove one of them") as caught:
        sync.push_lora(peft_model(3), name="3", version=1)

    assert (caught.value.limit, caught.value.engine_state) == (2, "unchanged")
    assert [stage.says(report) for report in reports] == [1, 2]
    assert sync.remove_lora("1")
    assert stage.says(sync.push_lora(peft_model(3), name="3", version=1)) == 3


def test_a_request_for_an_adapter_that_is_gone_ends_neither_the_engine_nor_other_requests(
    stage: Stage, sync: WeightSync
) -> None:
    gone = sync.push_lora(peft_model(1), name="gone", version=1)
    other = sync.push_lora(peft_model(2), name="other", version=1)
    assert sync.remove_lora("gone")

    def is_answered_with_nan() -> bool:
        outputs = outputs_of(stage.llm, request_of(gone))
        # A token of the vocabulary, whatever kernels make of NaN.
        assert {token for answer in outputs for token, _ in answer} <= {0, 1}
        return all(math.isnan(logprob) for answer in outputs for _, logprob in answer)

    assert is_answered_with_nan()
    assert stage.says(other) == 2
    # It answers for a name, and goes with it: the base model's answers are nobody else's.
    assert not sync.remove_lora("gone")
    assert gone.lora_int_id not in adapters.manager_of(stage.llm).list_adapters()
    assert stage.says(None) == 0
    assert is_answered_with_nan()
    sync.push(tiny_models.checkpoint_tensors("qwen3", seed=0), version="same")
    assert stage.says(None) == 0
    assert is_answered_with_nan()
    again = sync.push_lora(peft_model(3), name="gone", version=2)
    assert [stage.says(one) for one in (again, gone, other)] == [3, 3, 2]


def test_a_commit_that_vllm_refuses_leaves_the_old_adapter_and_the_next_one_works(
    stage: Stage, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = sync.push_lora(peft_model(1), name="policy", version=1)
    stage.llm.llm_engine.pin_lora(old.lora_int_id)
    module = adapters.manager_of(stage.llm).modules["model.layers.1.mlp.down_proj"]
    set_lora, calls = module.set_lora, []

    def fail_once(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no such kernel")
        set_lora(*args)

    monkeypatch.setattr(module, "set_lora", fail_once)
    with pytest.raises(RemoteError, match="no such kernel") as caught:
        sync.push_lora(peft_model(2), name="policy", version=2)

    assert caught.value.engine_state == "unchanged"
    assert stage.says(old) == 1
    (held,) = sync.status()[0]["adapters"]
    assert (held["version"], held["is_pinned"]) == ("1", True)
    assert stage.says(sync.push_lora(peft_model(2), name="policy", version=3)) == 2


def test_a_copy_to_the_device_that_fails_late_leaves_the_old_adapter(
    stage: Stage, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = sync.push_lora(peft_model(1), name="policy", version=1)
    late = iter([RuntimeError("an illegal address")])

    def synchronise(_: object) -> None:
        for error in late:
            raise error

    monkeypatch.setattr(swap, "synchronise", synchronise)
    with pytest.raises(RemoteError, match="an illegal address") as caught:
        sync.push_lora(peft_model(2), name="policy", version=2)

    assert caught.value.engine_state == "unchanged"
    assert stage.says(old) == 1
    assert sync.status()[0]["adapters"][0]["version"] == "1"


def test_a_request_for_an_evicted_adapter_takes_the_oldest_pin_where_everything_is_pinned(
    stage: Stage, sync: WeightSync, caplog: pytest.LogCaptureFixture
) -> None:
    evicted, older, newer = (
        sync.push_lora(peft_model(seed), name=f"policy-{seed}", version=1) for seed in SEEDS
    )
    for report in (newer, older):
        stage.llm.llm_engine.pin_lora(report.lora_int_id)
    assert [stage.says(one) for one in (older, newer)] == [2, 3]

    def pinned() -> list[str]:
        return [one["name"] for one in sync.status()[0]["adapters"] if one["is_pinned"]]

    assert pinned() == ["policy-2", "policy-3"]
    assert stage.says(evicted) == 1
    assert pinned() == ["policy-3"]
    assert f"adapter {older.lora_int_id} loses its pin" in caplog.text

    # A batch that asks for both of the others at once has them both.
    requests = [request_of(older), request_of(evicted)]
    prompts = engines.PROMPTS[:2]
    answers = outputs_of(stage.llm, requests, prompts=prompts)
    assert [tokens(one) for one in answers] == [
        tokens(outputs_of(stage.llm, request, prompts=[prompt])[0])
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    assert pinned() == []


def tokens(answer: list[tuple[int, float]]) -> list[int]:
    return [token for token, _ in answer]


def test_nothing_is_left_in_a_slot_that_nobody_has(stage: Stage, sync: WeightSync) -> None:
    manager = adapters.manager_of(stage.llm)

    def filled() -> list[bool]:
        return [
            any(
                bool(one[slot].any())
                for module in manager.modules.values()
                if isinstance(module.lora_b_stacked, tuple)
                for one in module.lora_b_stacked
            )
            for slot in range(2)
        ]

    first = sync.push_lora(peft_model(1), name="first", version=1)
    sync.push_lora(peft_model(2), name="second", version=1)
    assert (filled(), manager.lora_index_to_id[0]) == ([True, True], first.lora_int_id)
    assert sync.remove_lora("first")
    assert filled() == [False, True]

    # It takes the first free slot, and leaves its own.
    second = sync.push_lora(peft_model(3), name="second", version=2)
    assert (filled(), manager.lora_index_to_id[0]) == ([True, False], second.lora_int_id)
    assert stage.says(second) == 3

    # vLLM's own adapters go with the old base weights, out of their slots as well.
    outputs_of(stage.llm, from_disk(stage.folders[1], 5))
    assert filled() == [True, True]
    sync.push(tiny_models.checkpoint_tensors("qwen3", seed=0), version="same")
    assert filled() == [True, not stage.drops_adapters]
    assert manager.lora_index_to_id[0] == second.lora_int_id
    stage.llm.llm_engine.remove_lora(5)


def test_scales_that_differ_by_module_are_those_of_the_config(
    stage: Stage, sync: WeightSync, tmp_path: Path
) -> None:
    model = peft_model(
        5,
        targets=ATTENTION,
        use_rslora=True,
        rank_pattern={"q_proj": 2, "layers.1.self_attn.o_proj": 8},
        alpha_pattern={"v_proj": 3},
    )
    folder = adapters.saved(model, tmp_path)
    if not HAS_PATTERNS:
        with pytest.raises(AdapterConfigError, match="would scale every module alike"):
            sync.push_lora(model, name="policy", version=1)
        return

    report = sync.push_lora(model, name="policy", version=1)

    assert outputs_of(stage.llm, request_of(report)) == outputs_of(stage.llm, from_disk(folder, 9))
    stage.llm.llm_engine.remove_lora(9)


def test_embeddings_and_heads_take_adapters_too(stage: Stage, sync: WeightSync) -> None:
    model = _everywhere()

    report = sync.push_lora(model, name="policy", version=1)

    assert report.workers[0].notes == ("it is applied to 10 modules",)
    assert stage.says(report) == 4
    tensors = {name: one for name, one in _tensors(model).items() if "embed_tokens" in name}
    short = {name: one[:, :-1] if "_A" in name else one for name, one in tensors.items()}
    with pytest.raises(AdapterTensorError, match=r"expected \[4, 500\], got \[4, 499\]"):
        sync.push_lora((short, model.peft_config["default"]), name="policy", version=2)
