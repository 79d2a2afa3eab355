"""How vLLM makes its model of one kind of adapter, learnt from seeing it do so once.

vLLM's model is a structure of tensors, most of them as they came, some multiplied by a
scale. Which, and by what, follows from names, shapes and config alone. So where these are
the same again, the model is a copy of the structure over one copy of the bytes, with the
same factors on the same parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .image import Image
from .writes import Write, address_of


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an image, by elements.

    Attributes:
        shape: Its shape.
        strides: How far apart neighbours are, in each dimension.
        offset: Where it starts.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return that part of ``flat``, as a view."""
        return flat.as_strided(self.shape, self.strides, self.offset)


Parts = Part | list[Part | None] | None


class Recipe:
    """Makes vLLM's models of adapters that differ in their bytes only.

    Where the slots are, it keeps one memory as large as an adapter, the bench: there the
    bytes are scaled, and from there they go into a slot.

    Attributes:
        bench: ``[num_elements]``, on the device of the slots, in their dtype.
        made_at: The address of the memory of the model that was made last.
    """

    def __init__(
        self,
        model: Any,
        loras: dict[str, tuple[Any, Parts, Parts]],
        factors: dict[float, list[Part]],
        bench: torch.Tensor,
    ) -> None:
        """Keep what ``learn`` has found."""
        self.bench = bench
        self.made_at = 0
        self._model = model
        self._loras = loras
        self._scaled = [
            (factor, [part.of(bench) for part in parts]) for factor, parts in factors.items()
        ]
        self._made: weakref.ref[Any] | None = None

    def build(self, image: Image, *, number: int) -> Any:
        """Return a model.

        Args:
            image: An adapter's tensors, laid out as those that this was learnt from.
            number: The adapter's.
        """
        self._made = None
        self.bench.copy_(image.flat, non_blocking=True)
        for factor, views in self._scaled:
            torch._foreach_mul_(views, factor)
        is_pinned = image.flat.is_pinned()
        flat = torch.empty(image.flat.shape, dtype=image.flat.dtype, pin_memory=is_pinned)
        # Waits for the device: the image has been read as well.
        flat.copy_(self.bench)
        model = _twin(self._model)
        model.id, model.loras = number, {}
        for name, (like, a, b) in self._loras.items():
            lora = _twin(like)
            lora.lora_a, lora.lora_b = _views(flat, a), _views(flat, b)
            model.loras[name] = lora
        self._made, self.made_at = weakref.ref(model), address_of(flat)
        return model

    def is_on_bench(self, model: Any) -> bool:
        """Whether the bench holds the bytes of this very model, which ``build`` made last."""
        return self._made is not None and self._made() is model


class NotRepeatableError(Exception):
    """Why something that vLLM did is left to vLLM the next time. Never seen by a caller."""


def learn(model: Any, image: Image, writes: Sequence[Write], *, device: Any) -> Recipe:
    """Return how a model was made: by one copy of the image, and some factors.

    Args:
        model: vLLM's, ready to be added.
        image: What it was made of.
        writes: All that were made meanwhile.
        device: Where the slots are.

    Raises:
        NotRepeatableError: Anything else was done, or what was cannot be told; or the recipe,
            tried on the same image, gives other bytes.
    """
    tensors = list(_tensors(model))
    memories = {address_of(tensor) for tensor in tensors}
    if len(memories) != 1 or any(tensor.dtype != image.flat.dtype for tensor in tensors):
        raise NotRepeatableError(f"its tensors are in {len(memories)} memories, or were cast")
    found = [write for write in writes if write.memory in memories]
    if not found or not _is_copy_of(image, found[0]):
        raise NotRepeatableError("its memory is no copy of what came")
    copied, *products = found
    source = copied.operands[0]
    first, end = source.storage_offset(), source.storage_offset() + source.numel()
    shift = int(first - copied.target.storage_offset())
    if not all(first <= shift + one.storage_offset() < end for one in tensors if one.numel()):
        raise NotRepeatableError("a tensor lies beside what came")
    factors, loras = _factors(products, shift), _structure(model, shift)
    like = _twin(model)
    like.loras = {}
    try:
        bench = torch.empty(image.flat.shape, dtype=image.flat.dtype, device=device)
    except torch.OutOfMemoryError:
        raise NotRepeatableError("the device has no room for another copy") from None
    recipe = Recipe(like, loras, factors, bench)
    tried = list(_tensors(recipe.build(image, number=model.id)))
    if len(tried) != len(tensors) or not all(map(is_alike, tensors, tried)):
        raise NotRepeatableError("the same steps gave other bytes")
    return recipe


def is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and the same bytes."""
    if one.shape != other.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def _is_copy_of(image: Image, write: Write) -> bool:
    """Whether a write copied a stretch of an image, element by element."""
    if not write.is_copy or address_of(write.operands[0]) != address_of(image.flat):
        return False
    return all(one.dim() == 1 and one.is_contiguous() for one in (write.target, write.operands[0]))


def _factors(products: Sequence[Write], shift: int) -> dict[float, list[Part]]:
    found: dict[float, list[Part]] = {}
    end = 0
    for write in sorted(products, key=lambda one: int(one.target.storage_offset())):
        part = part_of(write.target, shift)
        # Each element is multiplied once, so that the order does not matter.
        if write.factor is None or not write.target.is_contiguous() or part.offset < end:
            raise NotRepeatableError(f"{write.name} wrote to it")
        end = part.offset + write.target.numel()
        found.setdefault(write.factor, []).append(part)
    return found


def _structure(model: Any, shift: int) -> dict[str, tuple[Any, Parts, Parts]]:
    if not all(_is_plain(value) for name, value in vars(model).items() if name != "loras"):
        raise NotRepeatableError("it holds more than layers")
    found: dict[str, tuple[Any, Parts, Parts]] = {}
    for name, lora in model.loras.items():
        like = _twin(lora)
        like.lora_a = like.lora_b = None
        if not all(map(_is_plain, vars(like).values())):
            raise NotRepeatableError(f"{name} holds more than two matrices")
        found[name] = (like, _parts(lora.lora_a, shift), _parts(lora.lora_b, shift))
    return found


def _twin(one: Any) -> Any:
    """Return an object with the same attributes; ``copy.copy`` asks more, and takes longer."""
    other = object.__new__(type(one))
    vars(other).update(vars(one))
    return other


def _is_plain(value: object) -> bool:
    """Whether models may share a value: no tensor is in it, and nobody changes it."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or value == {} or isinstance(value, bool | int | float | str)


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    for lora in model.loras.values():
        for held in (lora.lora_a, lora.lora_b):
            for one in held if isinstance(held, list) else [held]:
                if one is not None:
                    yield one


def part_of(tensor: torch.Tensor, shift: int = 0) -> Part:
    """Return which part of its own memory, moved by ``shift`` elements, a tensor is."""
    offset = int(tensor.storage_offset()) + shift
    return Part(tuple(tensor.shape), tuple(tensor.stride()), offset)


def _parts(held: Any, shift: int) -> Parts:
    if isinstance(held, list):
        return [None if one is None else part_of(one, shift) for one in held]
    return None if held is None else part_of(held, shift)


def _views(flat: torch.Tensor, parts: Parts) -> Any:
    if isinstance(parts, list):
        return [None if part is None else part.of(flat) for part in parts]
    return None if parts is None else parts.of(flat)
