"""Reads a Hugging Face checkpoint: what is in it, without its data, then its tensors.

The headers say names, dtypes and shapes, so a checkpoint is declared before a byte of
a tensor is read; ``torch_files`` says the same of what ``torch.save`` wrote. An index is
a promise about the shards, and is held to it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from . import torch_files
from .errors import SourceError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_model.safetensors"

# The codes of the safetensors format. A dtype that this torch lacks is refused by name.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_NUM_SHOWN = 3
_DIGITS = re.compile(r"(\d+)")
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a file's header describes it.

    Attributes:
        name: Its name in the file.
        file: The file.
        dtype: What torch reads it as.
        shape: Elements along each dimension, as torch counts them.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def list_checkpoint(path: Path) -> list[StoredTensor]:
    """Say what a checkpoint holds, from its headers alone.

    Args:
        path: A folder with ``model.safetensors.index.json`` and its shards, with
            ``model.safetensors``, with any ``*.safetensors``, or, where there is none of
            them, with ``pytorch_model.bin`` or its index and shards; or one such file.

    Returns:
        Its tensors in natural order of their names (``layers.2`` before
        ``layers.10``), whichever shards hold them, so that the parts of a module
        follow each other.

    Raises:
        SourceError: There is no checkpoint, a file is damaged or missing, or the
            index and the shards disagree. The text names the files.
    """
    files, index_file = _find_files(path)
    index = None if index_file is None else _read_index(index_file)
    if index is not None:
        files = sorted({path / file for file in index.values()})
    found: dict[str, StoredTensor] = {}
    for file in files:
        for stored in _read_header(file):
            other = found.get(stored.name)
            if other is not None:
                raise SourceError(
                    f"{stored.name!r} is in {other.file} and in {file}; leave one of them out",
                    name=stored.name,
                )
            found[stored.name] = stored
    if index is not None and index_file is not None:
        _compare(index_file, index=index, found=found)
    return sorted(found.values(), key=lambda stored: natural_key(stored.name))


def read_tensors(stored: Sequence[StoredTensor]) -> Iterator[torch.Tensor]:
    """Read tensors one at a time, each when it is asked for.

    A file is opened with its first tensor and closed with its last, or when the
    generator is closed; but it stays mapped for as long as a tensor of it lives.

    Yields:
        The tensors in order, on the CPU: views of the mapped file, read from disk when
        their bytes are first used.

    Raises:
        SourceError: A file cannot be read any more.
    """
    left = Counter(item.file for item in stored)
    opened: dict[Path, tuple[ExitStack, Any]] = {}
    with ExitStack() as everything:
        for item in stored:
            try:
                if item.file not in opened:
                    stack = everything.enter_context(ExitStack())
                    handle = stack.enter_context(_opened(item.file))
                    opened[item.file] = stack, handle
                stack, handle = opened[item.file]
                tensor = handle.get_tensor(item.name)
            except (OSError, KeyError, SafetensorError) as error:
                raise SourceError(
                    f"{item.name!r} cannot be read from {item.file}: {error}; the file must "
                    f"not change while it is pushed",
                    name=item.name,
                ) from error
            left[item.file] -= 1
            if not left[item.file]:
                del handle
                opened.pop(item.file)
                stack.close()
            yield tensor
            # The next tensor must not be read while this one is still held here.
            del tensor


def natural_key(name: str) -> tuple[tuple[tuple[bool, int, str], ...], ...]:
    """Return a sort key that counts: ``layers.2`` comes before ``layers.10``."""
    return tuple(
        tuple(
            (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
            for part in _DIGITS.split(segment)
            if part
        )
        for segment in name.split(".")
    )


def _find_files(path: Path) -> tuple[list[Path], Path | None]:
    """Return a checkpoint's files, or the index that names them."""
    if path.is_file():
        if path.suffix != ".safetensors" and not torch_files.is_torch_file(path):
            raise SourceError(
                f"{path} is none of {', '.join(('.safetensors', *torch_files.SUFFIXES))}; convert "
                f"it with save_pretrained(safe_serialization=True)"
            )
        return [path], None
    if not path.is_dir():
        raise SourceError(
            f"{str(path)!r} is neither a checkpoint folder nor a .safetensors file here; a "
            f"model of the Hugging Face hub must be downloaded first"
        )
    if (path / INDEX_NAME).is_file():
        return [], path / INDEX_NAME
    if (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME], None
    files = sorted(path.glob("*.safetensors"))
    if [file.name for file in files] == [ADAPTER_NAME]:
        raise SourceError(f"{path} holds an adapter, not a model; use push_lora")
    if files:
        _check_shard_numbers(path, files)
        return files, None
    if (path / torch_files.INDEX_NAME).is_file():
        return [], path / torch_files.INDEX_NAME
    if (path / torch_files.SINGLE_NAME).is_file():
        return [path / torch_files.SINGLE_NAME], None
    raise SourceError(
        f"{path} holds no *.safetensors and no {torch_files.SINGLE_NAME}; convert the checkpoint "
        f"with save_pretrained(safe_serialization=True)"
    )


def _check_shard_numbers(path: Path, files: Sequence[Path]) -> None:
    """Without an index only the shards' own names tell that one is missing."""
    names = {file.name for file in files}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match is None:
            continue
        stem, width, total = match[1], len(match[2]), match[3]
        wanted = {f"{stem}-{i:0{width}}-of-{total}.safetensors" for i in range(1, int(total) + 1)}
        if missing := sorted(wanted - names):
            raise SourceError(f"{path} lacks {_some(missing)}; download or save it again")


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(
            f"{path} is not an index of a checkpoint: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(index, dict):
        raise SourceError(f"{path}: weight_map must be a mapping from tensor to file")
    for name, file in index.items():
        pure = PurePosixPath(file) if isinstance(file, str) else None
        if pure is None or pure.is_absolute() or ".." in pure.parts:
            raise SourceError(
                f"{path}: {name!r} is said to be in {file!r}, which is not a file of that folder",
                name=name,
            )
        if not (path.parent / pure).is_file():
            raise SourceError(
                f"{path} names the shard {file}, which is not there; download it, or save the "
                f"checkpoint again",
                name=name,
            )
    return index


def _compare(path: Path, *, index: dict[str, str], found: dict[str, StoredTensor]) -> None:
    """Raise unless the shards hold exactly what the index says."""
    wrong = [
        f"{name!r} should be in {file}"
        + (f", is in {found[name].file.name}" if name in found else ", is in no shard")
        for name, file in index.items()
        if name not in found or found[name].file != path.parent / file
    ]
    wrong += [
        f"{stored.name!r} is in {stored.file.name} but not in the index"
        for stored in found.values()
        if stored.name not in index
    ]
    if wrong:
        raise SourceError(
            f"{path} and its shards disagree: {_some(wrong)}; save the checkpoint again"
        )


def _opened(file: Path) -> Any:
    is_torch = torch_files.is_torch_file(file)
    return torch_files.open_torch_file(file) if is_torch else safe_open(file, framework="pt")


def _read_header(file: Path) -> list[StoredTensor]:
    if torch_files.is_torch_file(file):
        return [
            StoredTensor(name=name, file=file, dtype=one.dtype, shape=tuple(one.shape))
            for name, one in torch_files.load_torch_file(file).items()
        ]
    try:
        with safe_open(file, framework="pt") as handle:
            slices = [(name, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118
            return [
                _stored(file, name=name, code=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in slices
            ]
    except (OSError, SafetensorError) as error:
        raise SourceError(f"{file} cannot be read: {error}; save or download it again") from error


def _stored(file: Path, *, name: str, code: str, shape: tuple[int, ...]) -> StoredTensor:
    dtype = getattr(torch, _DTYPES.get(code, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise SourceError(
            f"{name!r} in {file} is of dtype {code}, which torch {torch.__version__} lacks",
            name=name,
        )
    if code == "F4":
        # The file counts values, torch counts bytes of two values each.
        if not shape or shape[-1] % 2:
            raise SourceError(
                f"{name!r} in {file} is F4 of shape {list(shape)}; torch needs an even last "
                f"dimension",
                name=name,
            )
        shape = (*shape[:-1], shape[-1] // 2)
    return StoredTensor(name=name, file=file, dtype=dtype, shape=shape)


def _some(texts: Sequence[str]) -> str:
    rest = f" and {len(texts) - _NUM_SHOWN} more" if len(texts) > _NUM_SHOWN else ""
    return "; ".join(texts[:_NUM_SHOWN]) + rest
