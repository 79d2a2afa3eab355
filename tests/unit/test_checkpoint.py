"""A checkpoint is declared from its headers, read lazily, and held to its index."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.tensor_samples import expected_bytes, sample

from vllm_bucketsync.checkpoint import INDEX_NAME, list_checkpoint, natural_key, read_tensors
from vllm_bucketsync.errors import SourceError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_raw(path: Path, header: dict[str, Any], data: bytes) -> None:
    """Write a file as another program might, with any header."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_sharded(folder: Path, **changes: str | None) -> Path:
    """Write two shards and an index; ``changes`` to the index, ``None`` leaves out."""
    save_file({"layers.10.w": torch.ones(2), "layers.2.b": torch.zeros(3)}, folder / FIRST)
    save_file({"layers.2.a": torch.full((4,), 2.0), "norm": torch.ones(1)}, folder / SECOND)
    weight_map: dict[str, str | None] = {
        "layers.10.w": FIRST, "layers.2.b": FIRST, "layers.2.a": SECOND, "norm": SECOND,
    }  # fmt: skip
    weight_map.update(changes)
    kept = {name: file for name, file in weight_map.items() if file is not None}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": kept}))
    return folder


def num_open_files(folder: Path) -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    opened = sum(str(link.resolve()).startswith(str(folder)) for link in links)
    return opened + sum(str(folder) in line for line in maps)


def names(path: Path) -> list[str]:
    return [stored.name for stored in list_checkpoint(path)]


def test_shards_are_merged_in_natural_order_so_that_modules_stay_together(tmp_path: Path) -> None:
    assert names(write_sharded(tmp_path)) == ["layers.2.a", "layers.2.b", "layers.10.w", "norm"]


def test_numbers_in_names_count() -> None:
    given = ["l.10.w", "l.2.w", "l.2.b", "l.w", "10", "9", "a10b2", "a9b11", "l.02.w", ""]

    ordered = sorted(given, key=natural_key)

    assert ordered.index("l.2.w") < ordered.index("l.10.w")
    assert ordered.index("9") < ordered.index("10")
    assert ordered.index("a9b11") < ordered.index("a10b2")
    assert abs(ordered.index("l.2.b") - ordered.index("l.2.w")) == 1


def test_every_dtype_that_the_format_has_is_declared_as_it_is_read(tmp_path: Path) -> None:
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16,
        torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.int64, torch.uint64,
        torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
        torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    ]  # fmt: skip
    tensors = {str(dtype): sample(dtype) for dtype in dtypes}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.zeros(0, 3)
    save_file(tensors, tmp_path / "model.safetensors")

    stored = list_checkpoint(tmp_path)
    read = list(read_tensors(stored))

    assert {item.name for item in stored} == set(tensors)
    for item, tensor in zip(stored, read, strict=True):
        assert (item.dtype, item.shape) == (tensor.dtype, tuple(tensor.shape))
        assert item.num_bytes == tensors[item.name].nbytes
        assert expected_bytes(tensor) == expected_bytes(tensors[item.name])


def test_a_file_whose_data_is_not_aligned_is_read_exactly(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    write_raw(tmp_path / "x.safetensors", header, bytes(range(11)))

    first, second = read_tensors(list_checkpoint(tmp_path / "x.safetensors"))

    assert expected_bytes(first) == bytes(range(3))
    assert expected_bytes(second) == bytes(range(3, 11))


def test_headers_are_read_and_files_are_open_only_between_their_first_and_last_tensor(
    tmp_path: Path,
) -> None:
    stored = list_checkpoint(write_sharded(tmp_path))
    assert num_open_files(tmp_path) == 0

    reading = read_tensors(stored)
    assert num_open_files(tmp_path) == 0
    kept = [next(reading) for _ in stored[:-1]]
    assert num_open_files(tmp_path) > 0
    last = next(reading)

    assert [tuple(tensor.shape) for tensor in [*kept, last]] == [(4,), (3,), (2,), (1,)]
    del kept, last
    assert next(reading, None) is None
    assert num_open_files(tmp_path) == 0


def test_files_are_closed_when_the_reader_stops_early(tmp_path: Path) -> None:
    reading = read_tensors(list_checkpoint(write_sharded(tmp_path)))
    next(reading)
    next(reading)

    reading.close()  # type: ignore[attr-defined]

    assert num_open_files(tmp_path) == 0


def test_an_index_makes_other_files_of_the_folder_irrelevant(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"all": torch.ones(1)}, tmp_path / "consolidated.safetensors")

    assert "all" not in names(tmp_path)


def test_the_single_file_is_preferred_to_others_of_the_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "other.safetensors")

    assert names(tmp_path) == ["a"]


def test_without_index_and_single_file_all_files_are_taken(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")

    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm": "model-3.safetensors"}, "names the shard model-3.safetensors, which is not"),
        ({"norm": FIRST}, f"'norm' should be in {FIRST}, is in {SECOND}"),
        ({"extra": SECOND}, f"'extra' should be in {SECOND}, is in no shard"),
        ({"norm": None}, f"'norm' is in {SECOND} but not in the index"),
        ({"norm": "../x.safetensors"}, "'norm' is said to be in '../x.safetensors'"),
        ({"norm": "/etc/passwd"}, "'norm' is said to be in '/etc/passwd'"),
    ],
    ids=["missing shard", "other shard", "missing tensor", "not listed", "outside", "absolute"],
)
def test_an_index_that_disagrees_with_the_shards_is_refused(
    tmp_path: Path, changes: dict[str, str | None], text: str
) -> None:
    with pytest.raises(SourceError, match=text) as caught:
        list_checkpoint(write_sharded(tmp_path, **changes))

    assert INDEX_NAME in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)

    with pytest.raises(SourceError, match=INDEX_NAME):
        list_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")

    with pytest.raises(SourceError, match=r"'a' is in .*one\.safetensors and in .*two\.safetens"):
        list_checkpoint(tmp_path)


def test_a_shard_that_is_missing_beside_no_index_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / SECOND)

    with pytest.raises(SourceError, match=f"lacks {FIRST}; download or save it again"):
        list_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "size", "text"),
    [
        ({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, 3, "F6_E2M3, which"),
        ({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, 3, "an even last"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 5, "cannot be read"),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, 8, "cannot be read"),
    ],
    ids=["F6", "odd F4", "truncated", "unknown dtype"],
)
def test_a_file_that_torch_cannot_read_is_refused_by_name(
    tmp_path: Path, header: dict[str, Any], size: int, text: str
) -> None:
    write_raw(tmp_path / "x.safetensors", header, bytes(size))

    with pytest.raises(SourceError, match=rf"x\.safetensors.*{text}"):
        list_checkpoint(tmp_path)


def test_junk_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"hello world, this is junk")

    with pytest.raises(SourceError, match=r"x\.safetensors cannot be read"):
        list_checkpoint(tmp_path)


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "other tensors"])
def test_a_file_that_changes_under_the_reader_is_refused(tmp_path: Path, *, gone: bool) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1)}, file)
    stored = list_checkpoint(tmp_path)
    file.unlink()
    if not gone:
        save_file({"b": torch.ones(1)}, file)

    with pytest.raises(SourceError, match=r"'a' cannot be read from .*must not change"):
        list(read_tensors(stored))


def test_what_is_no_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"neither a checkpoint folder nor .*downloaded first"):
        list_checkpoint(Path("Qwen/Qwen3-0.6B"))
    with pytest.raises(SourceError, match=r"holds no \*\.safetensors and no .*; convert"):
        list_checkpoint(tmp_path)
    with pytest.raises(SourceError, match=r"is none of \.safetensors, \.bin, .*; convert"):
        list_checkpoint(tmp_path / "model.gguf")
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(SourceError, match="holds an adapter, not a model; use push_lora"):
        list_checkpoint(tmp_path)
