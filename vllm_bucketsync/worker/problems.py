"""What can be wrong with an update for a model, and how it is said."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import (
    DuplicateTensorError,
    LoadError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from ..layout import TensorMeta
from . import compat

# Each costs another pass through vLLM's loaders.
MAX_PROBLEMS = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        cls: The error that it is, alone.
        kind: What is like it; only the first of a kind is told in full.
        name: The tensor or parameter that it is about.
        text: Which, expected, found, where, what to do.
        expected: For a mismatch, what the engine has.
        got: For a mismatch, what was sent.
    """

    cls: type[LoadError]
    kind: str
    name: str
    text: str
    expected: str = ""
    got: str = ""


def raise_problems(problems: Sequence[Problem], *, state: str, hint: str = "") -> None:
    """Raise the first problem's error, with all of them in its text: a line or two a kind.

    What the text leaves out is in the log, and the first ``MAX_PROBLEMS`` of them in
    ``problems``.

    Args:
        problems: What was found; none is no error.
        state: What was done to the model until now.
        hint: What may be behind all of them.

    Raises:
        LoadError: There is a problem. Its class is that of the first one.
    """
    if not problems:
        return
    first = problems[0]
    texts = [problem.text for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        texts.append(f"and {len(problems) - MAX_PROBLEMS} more")
    message = "; ".join(filter(None, (hint, texts[0], state)))
    if len(problems) > 1:
        # The search ends there, where it is a dry run.
        count = f"at least {MAX_PROBLEMS}" if len(problems) == MAX_PROBLEMS else len(problems)
        lines = summary((one.kind, one.name, one.text) for one in problems)
        message = "\n  ".join([f"{count} problems; {state}:", *filter(None, [hint]), *lines])
        if len(lines) < len(problems):
            every = "\n  ".join(problem.text for problem in problems)
            logger.error("%s problems; %s:\n  %s", count, state, every)
    if issubclass(first.cls, TensorMismatchError):
        raise first.cls(
            message, name=first.name, problems=texts, expected=first.expected, got=first.got
        )
    raise first.cls(message, name=first.name, problems=texts)


def summary(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for the first of each kind, and one for all others of that kind.

    Args:
        found: Kind, name and text of each thing that is wrong.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for kind, name, text in found:
        kinds.setdefault(kind, []).append((name, text))
    lines = []
    for (_, first), *others in kinds.values():
        lines.append(first)
        if len(others) == 1:
            lines.append(others[0][1])
        elif others:
            names = _quoted(name for name, _ in others)
            lines.append(f"and {len(others)} more like it: {names}")
    return lines


def prefix_hint(model: torch.nn.Module, problems: Sequence[Problem], names: Sequence[str]) -> str:
    """Return what to strip from names that the model would know without a prefix of all.

    Args:
        model: The engine's.
        problems: What is wrong; without an unknown name, there is nothing to say.
        names: All that were sent.
    """
    if not any(problem.cls is UnknownTensorError for problem in problems):
        return ""
    known = set(_checkpoint_names(model))
    prefix = ""
    for segment in min(names).split(".")[:-1]:
        prefix += f"{segment}."
        if not all(name.startswith(prefix) for name in names):
            return ""
        if any(name.removeprefix(prefix) in known for name in names):
            return (
                f"all {len(names)} names start with {prefix!r}, and those of the engine do not; "
                f"remove it with rename="
            )
    return ""


def unknown(model: torch.nn.Module, name: str, *, why: str = "") -> Problem:
    """Describe a tensor that the model has no place for."""
    close = _close_names(model, name)
    near = f"; close to it {'are' if len(close) > 1 else 'is'} {_quoted(close)}" if close else ""
    reason = f" ({why})" if why else ""
    return Problem(
        cls=UnknownTensorError,
        kind="unknown",
        name=name,
        text=(
            f"the engine's model has no place for {name!r}{reason}{near}; rename it with rename=, "
            f"or leave it out"
        ),
    )


def skipped_in_silence(name: str) -> Problem:
    """Describe a tensor that the model's loaders take and drop."""
    return Problem(
        cls=UnknownTensorError,
        kind="skipped_in_silence",
        name=name,
        text=(
            f"the engine's model would drop {name!r} in silence: its loaders copied it nowhere; "
            f"rename it with rename=, or leave it out"
        ),
    )


def mismatch(name: str, *, shape: Sequence[int], target: str, expected: Sequence[int]) -> Problem:
    """Describe a tensor of a wrong shape."""
    return Problem(
        cls=TensorMismatchError,
        kind="mismatch",
        name=name,
        text=(
            f"{name!r} does not fit: expected {tuple(expected)}, got {tuple(shape)}, for "
            f"{target} of the engine; send the whole tensor in its checkpoint's shape"
        ),
        expected=str(tuple(expected)),
        got=str(tuple(shape)),
    )


def too_large(meta: TensorMeta, *, target: str, num_read: int, num_shards: int) -> Problem:
    """Describe a tensor of which the engine would read a part only."""
    expected = f"at most {num_read * num_shards} elements"
    by = "" if num_shards == 1 else f" by {num_shards} workers together"
    return Problem(
        cls=TensorMismatchError,
        kind="too_large",
        name=meta.name,
        text=(
            f"{meta.name!r} does not fit: expected {expected}, which are read{by} for {target} of "
            f"the engine, got {math.prod(meta.shape)}, of shape {tuple(meta.shape)}; the rest is "
            f"left out; send the checkpoint of this engine's model, or name {target} in partial="
        ),
        expected=expected,
        got=f"{math.prod(meta.shape)} elements",
    )


def miscast(meta: TensorMeta, *, target: str, expected: str) -> Problem:
    """Describe a tensor whose values a cast would destroy."""
    return Problem(
        cls=TensorMismatchError,
        kind="miscast",
        name=meta.name,
        text=(
            f"{meta.name!r} does not fit: expected {expected}, got {meta.dtype}, for {target} of "
            f"the engine; a cast would truncate it; send its values in a dtype of that kind"
        ),
        expected=expected,
        got=meta.dtype,
    )


def repeated(name: str) -> Problem:
    """Describe a name that comes twice."""
    return Problem(
        cls=DuplicateTensorError,
        kind="repeated",
        name=name,
        text=f"{name!r} comes twice; the second would be dropped, or undo the first; send it once",
    )


def same_place(name: str, *, other: str, target: str) -> Problem:
    """Describe two tensors that would land in the same elements."""
    return Problem(
        cls=DuplicateTensorError,
        kind="same_place",
        name=name,
        text=(f"{name!r} and {other!r} would land in the same part of {target}; send one of them"),
    )


def in_part(target: str, *, num_elements: int, expected: int, arrived: Sequence[str]) -> Problem:
    """Describe a parameter of which a part would be garbage."""
    parts = f"of its parts only {_quoted(arrived)} came" if arrived else "none of its parts came"
    return Problem(
        cls=MissingTensorError,
        kind="in_part",
        name=target,
        text=(
            f"{target} would get {num_elements}/{expected} elements: {parts}; a module is sent "
            f"as a whole, or not at all where partial= names it; send the rest of it"
        ),
    )


def never_sent(target: str, *, shape: Sequence[int]) -> Problem:
    """Describe a parameter that nothing was sent for."""
    return Problem(
        cls=MissingTensorError,
        kind="never_sent",
        name=target,
        text=(
            f"{target} {tuple(shape)} of the engine would get no value; send it, or name it in "
            f"partial= if it may keep its old one"
        ),
    )


def cut_short(name: str, *, num_bytes: int, expected: int) -> Problem:
    """Describe a tensor whose fragments did not all come."""
    return Problem(
        cls=MissingTensorError,
        kind="cut_short",
        name=name,
        text=f"of {name!r} only {num_bytes}/{expected} bytes came; send all of it",
    )


def module_cut_short(path: str) -> Problem:
    """Describe a module that the plan did not get all of."""
    return Problem(
        cls=MissingTensorError,
        kind="module_cut_short",
        name=path,
        text=f"not all of {path} came, though it was declared; send all of it",
    )


def loader_failed(name: str, error: BaseException) -> Problem:
    """Describe a failure that no other text here fits."""
    return Problem(
        cls=LoadError,
        kind="loader_failed",
        name=name,
        text=f"{name!r} cannot be loaded: {type(error).__name__}: {_one_line(error)}",
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}…"


def _quoted(names: Iterable[str], *, most: int = 4) -> str:
    listed = list(names)
    text = ", ".join(map(repr, listed[:most]))
    return text if len(listed) <= most else f"{text} and {len(listed) - most} more"


def _close_names(model: torch.nn.Module, name: str) -> list[str]:
    # Names of the same layer and expert only: comparing one name takes 50 µs.
    numbers = re.findall(r"\d+", name)
    known = [one for one in _checkpoint_names(model) if re.findall(r"\d+", one) == numbers]
    return difflib.get_close_matches(name, known, n=3, cutoff=0.75)


def _checkpoint_names(model: torch.nn.Module) -> list[str]:
    """Names that would be loaded, as far as the model's mapper tells how it fuses them."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    parts: dict[str, list[str]] = {}
    for part, (whole, _) in getattr(mapper, "orig_to_new_stacked", {}).items():
        parts.setdefault(whole, []).append(part)
    names: list[str] = []
    for name in sorted(compat.tensor_names(model)):
        wholes = [whole for whole in parts if whole in name]
        names.extend(name.replace(whole, part) for whole in wholes for part in parts[whole])
        if not wholes:
            names.append(name)
    return names
