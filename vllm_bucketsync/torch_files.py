"""Reads what ``torch.save`` wrote: ``.bin``, ``.pt`` and ``.pth`` files of a checkpoint.

Such a file is a pickle. It is read with torch's ``weights_only``, which builds tensors and
plain containers and calls nothing that the file names. Its data stays on disk, mapped,
until it is used.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from .errors import SourceError

SUFFIXES = (".bin", ".pt", ".pth")
# Where trainers put the weights in what else they save.
_NESTS = ("state_dict", "model_state_dict", "model", "module")


INDEX_NAME = "pytorch_model.bin.index.json"
SINGLE_NAME = "pytorch_model.bin"
_REFUSED = re.compile(r"(?:GLOBAL|class|global) (\S+)")


class OpenFile(Protocol):
    """What gives a file's tensors; as safetensors has it."""

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: a view of the mapped file."""


class _TorchFile:
    """The tensors of one file."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: a view of the mapped file."""
        return self._tensors[name]


@contextmanager
def open_torch_file(file: Path) -> Iterator[OpenFile]:
    """Open a file for reading its tensors one by one; see ``load_torch_file``."""
    yield _TorchFile(load_torch_file(file))


def is_torch_file(file: Path) -> bool:
    """Return whether a file's name is one of what ``torch.save`` writes."""
    return file.suffix in SUFFIXES


def load_torch_file(file: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors by their names, as views of the mapped file.

    Raises:
        SourceError: It cannot be read, holds more than tensors and plain containers, or
            holds no state dict.
    """
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        refused = _REFUSED.search(str(error))
        what = _one_line(error) if refused is None else refused[1].rstrip(".,")
        raise SourceError(
            f"{file} holds more than tensors, and what it names is not run: {what}; save "
            f"model.state_dict() by itself, or as safetensors"
        ) from error
    # Of an old format, cut short, or no such file at all.
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise SourceError(
            f"{file} cannot be read: {_one_line(error)}; save it again with this torch, or as "
            f"safetensors"
        ) from error
    state = _state_dict_of(found)
    if state is None:
        raise SourceError(
            f"{file} holds no state dict: expected names and tensors, or those under one of "
            f"{', '.join(_NESTS)}; save model.state_dict()"
        )
    return state


def _state_dict_of(found: object) -> dict[str, torch.Tensor] | None:
    if not isinstance(found, Mapping):
        return None
    if found and all(
        isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in found.items()
    ):
        return dict(found)
    nested = [found[name] for name in _NESTS if isinstance(found.get(name), Mapping)]
    # Of two it is unknown which one is meant.
    return _state_dict_of(nested[0]) if len(nested) == 1 else None


def _one_line(error: BaseException) -> str:
    """Return an error's first sentence: what torch goes on to advise is to trust the file."""
    return str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
