"""What ``torch.save`` wrote is read as tensors and nothing else, and stays on disk until used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_bucketsync import torch_files
from vllm_bucketsync.checkpoint import list_checkpoint, read_tensors
from vllm_bucketsync.errors import SourceError

STATE = {
    "layers.10.w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "layers.2.b": torch.tensor([1.5, float("nan")]),
    "scalar": torch.tensor(7),
    "turned": torch.arange(6.0).reshape(2, 3).T,
}


def saved(file: Path, found: object = STATE, **options: Any) -> Path:
    torch.save(found, file, **options)
    return file


def read(path: Path) -> dict[str, torch.Tensor]:
    stored = list_checkpoint(path)
    found = dict(zip([one.name for one in stored], read_tensors(stored), strict=True))
    for one in stored:
        assert (one.dtype, one.shape) == (found[one.name].dtype, tuple(found[one.name].shape))
    return found


def same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    def as_bytes(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    return {name: as_bytes(one) for name, one in found.items()} == {
        name: as_bytes(one) for name, one in expected.items()
    }


@pytest.mark.parametrize("name", ["step.bin", "step.pt", "step.pth"])
def test_a_single_file_is_a_checkpoint(tmp_path: Path, name: str) -> None:
    found = read(saved(tmp_path / name))

    assert list(found) == ["layers.2.b", "layers.10.w", "scalar", "turned"]
    assert same_bytes(found, STATE)


@pytest.mark.parametrize("nest", ["state_dict", "model_state_dict", "model", "module"])
def test_weights_are_found_in_what_a_trainer_saves_beside_them(tmp_path: Path, nest: str) -> None:
    file = saved(tmp_path / "step.pt", {"epoch": 3, nest: STATE, "optimizer": {"lr": 0.1}})

    assert same_bytes(read(file), STATE)


def test_a_folder_without_safetensors_is_read_from_its_torch_file(tmp_path: Path) -> None:
    saved(tmp_path / torch_files.SINGLE_NAME)
    saved(tmp_path / "training_args.bin", {"no": "weights"})

    assert same_bytes(read(tmp_path), STATE)


def test_shards_are_held_to_their_index(tmp_path: Path) -> None:
    first, second = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    names = list(STATE)
    saved(tmp_path / first, {name: STATE[name] for name in names[:2]})
    saved(tmp_path / second, {name: STATE[name] for name in names[2:]})
    index = {name: first if name in names[:2] else second for name in names}
    file = tmp_path / torch_files.INDEX_NAME
    file.write_text(json.dumps({"weight_map": index}))

    assert same_bytes(read(tmp_path), STATE)

    file.write_text(json.dumps({"weight_map": index | {"scalar": first}}))
    with pytest.raises(SourceError, match=r"'scalar' should be in .*save the checkpoint again"):
        read(tmp_path)


def test_safetensors_come_first(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved(tmp_path / torch_files.SINGLE_NAME)
    save_file({"only": torch.ones(1)}, tmp_path / "model.safetensors")

    assert list(read(tmp_path)) == ["only"]


class Harmful:
    """Runs something where it is unpickled as Python does it."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


def test_nothing_that_a_file_names_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    file = saved(tmp_path / "step.pt", {**STATE, "harm": Harmful(trace)})

    with pytest.raises(
        SourceError, match=r"what it names is not run: posix\.mkdir; save"
    ) as caught:
        read(file)

    assert not trace.exists()
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    "found",
    [
        {},
        [torch.ones(1)],
        torch.ones(1),
        {"a": torch.ones(1), "b": 3},
        {1: torch.ones(1)},
        {"model": STATE, "state_dict": STATE},
    ],
    ids=["empty", "list", "tensor", "mixed", "numbers", "two"],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, found: object) -> None:
    with pytest.raises(SourceError, match="holds no state dict"):
        read(saved(tmp_path / "step.pt", found))


def test_what_cannot_be_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    old = saved(tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    cut = saved(tmp_path / "cut.pt")
    cut.write_bytes(cut.read_bytes()[:-200])
    (tmp_path / "empty.pt").touch()

    for file in (old, cut, tmp_path / "empty.pt"):
        with pytest.raises(SourceError, match=r"cannot be read: .*; save it again") as caught:
            read(file)
        assert "\n" not in str(caught.value)


def test_a_file_that_changes_between_is_an_error(tmp_path: Path) -> None:
    file = saved(tmp_path / "step.pt")
    stored = list_checkpoint(file)
    saved(file, {"other": torch.ones(1)})

    with pytest.raises(SourceError, match="must not change while it is pushed"):
        list(read_tensors(stored))


def test_data_stays_on_disk_until_it_is_used(tmp_path: Path) -> None:
    file = saved(tmp_path / "step.pt", {"big": torch.ones(1 << 20)})

    found = read(file)

    assert any(str(file) in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert same_bytes(found, {"big": torch.ones(1 << 20)})
