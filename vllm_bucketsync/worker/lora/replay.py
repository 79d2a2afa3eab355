"""A new version of an adapter where the last one is: the same copies, other bytes.

vLLM takes an adapter over tensor by tensor: some thousand calls, however few bytes. Where
manifest and config are those of an earlier one, every call would be the same. So the first
time they are watched (``writes.py``), and the next time only what they came to is done: the
model is made by its recipe (``recipe.py``), and the slot is filled from the recipe's bench
by one batch of copies.

A wrong adapter would show nowhere, so each of these has to be so, and is looked at:

- The kind is the same: manifest, config and ``partial``. All that vLLM does depends on these
  alone. It was watched for this kind and this very slot, and nothing but the copies that
  are repeated, and zeros before them, was written anywhere.
- Tried when it was learnt: zeros with these copies have the bytes that vLLM left.
- The slot holds this kind now, and nobody wrote to it since (``contents.py``): all that lies
  outside of the copies is zero already.
- The bench holds the bytes of the model that is put, and no other's.
- vLLM has the adapter in both of its caches, and would choose the same slot again.

Otherwise vLLM does all of it, as for an adapter that comes for the first time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ...copies import CopyBatch, Pair
from .contents import Contents, SlotTensors
from .image import Image
from .recipe import NotRepeatableError, Recipe, is_alike, learn, part_of
from .swap import refill, slot_of, swap, will_stay
from .writes import Write, Writes, address_of

logger = logging.getLogger(__name__)

# Of all benches together. Larger adapters cost their bytes, not their calls.
MAX_BENCH_BYTES = 256 * 1024**2
MAX_KINDS = 8


@dataclass(frozen=True, slots=True)
class _Fill:
    """How one slot is filled.

    Attributes:
        batch: Copies from the bench; ``None``: only vLLM can.
        slots: What it was learnt of. The batch writes to these very tensors.
    """

    batch: CopyBatch | None
    slots: SlotTensors


@dataclass(slots=True)
class _Kind:
    """What is known of adapters of one kind.

    Attributes:
        recipe: How their models are made; ``None``: only vLLM can.
        fills: How a slot is filled, by slot.
    """

    recipe: Recipe | None
    fills: dict[int, _Fill] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return 0 if self.recipe is None else self.recipe.bench.nbytes


class Replays:
    """Builds and puts adapters for one of vLLM's managers, and does so again quickly.

    Attributes:
        num_built: Models that were made by a recipe.
        num_filled: Adapters whose slot was filled by a batch of copies.
    """

    def __init__(self, manager: Any) -> None:
        """Begin with nothing known.

        Args:
            manager: vLLM's ``LRUCacheLoRAModelManager``.
        """
        self.num_built = 0
        self.num_filled = 0
        self._manager = manager
        self._contents = Contents(manager)
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def forget(self) -> None:
        """Give the memory of all benches back: the next adapter of each kind is watched again."""
        self._kinds.clear()
        self._contents.forget()

    def forget_slots(self) -> None:
        """Take note that slots may have lost what they held."""
        self._contents.forget()

    def build(
        self, tensors: object, *, key: Hashable | None, number: int, build: Callable[[], Any]
    ) -> Any:
        """Return vLLM's model of an adapter.

        Args:
            tensors: The adapter's; only an ``Image`` can be taken over quickly.
            key: Its kind. ``None``: it is one of its own.
            number: The adapter's.
            build: Has vLLM make it.

        Raises:
            Exception: vLLM refuses it.
        """
        if key is None or not isinstance(tensors, Image) or tensors.flat.nbytes > MAX_BENCH_BYTES:
            return build()
        kind = self._kinds.get(key)
        if kind is None:
            with Writes() as writes:
                model = build()
            self._make_room(tensors.flat.nbytes)
            kind = _Kind(self._learn_recipe(model, tensors, writes.found))
            self._kinds[key] = kind
            return model if kind.recipe is None else kind.recipe.build(tensors, number=number)
        self._kinds.move_to_end(key)
        if kind.recipe is None:
            return build()
        self.num_built += 1
        return kind.recipe.build(tensors, number=number)

    def put(self, model: Any, *, key: Hashable | None) -> bool:
        """Use a model from now on, in the place of the one with its number.

        Args:
            model: What ``build`` returned.
            key: Its kind.

        Returns:
            Whether its slot was filled by the batch of copies.

        Raises:
            Exception: It failed. The old one is in use, as before.
        """
        before = slot_of(self._manager, model.id)
        kind = None if key is None else self._kinds.get(key)
        if kind is not None and (kind.recipe is None or not kind.recipe.is_on_bench(model)):
            kind = None
        held = self._contents.known()
        batch = None
        if kind is not None and before is not None and held.get(before) == key:
            batch = self._batch(kind, before, model)
        # Until all is done.
        self._contents.forget()
        if batch is not None:
            refill(self._manager, model, batch.run)
            self.num_filled += 1
        elif kind is not None and self._is_news(kind, before, model):
            with Writes() as writes:
                swap(self._manager, model)
            self._learn_fill(kind, before, model, writes.found)
        else:
            swap(self._manager, model)
        # If it has moved, its old slot is empty.
        if before is not None:
            held.pop(before, None)
        slot = slot_of(self._manager, model.id)
        if slot is not None:
            self._contents.put(slot, key, others=held)
        return batch is not None

    def _batch(self, kind: _Kind, slot: int, model: Any) -> CopyBatch | None:
        fill = kind.fills.get(slot)
        if fill is None or fill.slots is not self._contents.slots:
            return None
        return fill.batch if will_stay(self._manager, model.id) else None

    def _is_news(self, kind: _Kind, before: int | None, model: Any) -> bool:
        """Whether vLLM may fill a slot of which nothing was learnt yet."""
        slots = self._contents.slots
        known = {slot for slot, fill in kind.fills.items() if fill.slots is slots}
        if before is not None and will_stay(self._manager, model.id):
            return before not in known
        return len(known) < int(self._manager.lora_slots)

    def _learn_recipe(self, model: Any, image: Image, writes: Sequence[Write]) -> Recipe | None:
        with _left_to_vllm("to build adapters of a kind"):
            return learn(model, image, writes, device=self._manager.device)
        return None

    def _learn_fill(
        self, kind: _Kind, before: int | None, model: Any, writes: Sequence[Write]
    ) -> None:
        slot = slot_of(self._manager, model.id)
        if kind.recipe is None or slot is None or before not in {None, slot}:
            return
        slots = self._contents.slots
        kind.fills[slot] = _Fill(None, slots)
        with _left_to_vllm(f"to fill slot {slot} with adapters of a kind"):
            if slots.are_uncounted:
                raise NotRepeatableError("nothing counts the writes to tensors of inference mode")
            pairs = _pairs(writes, kind.recipe, memories=slots.by_memory())
            _try(pairs, slot, slots, num_slots=int(self._manager.lora_slots))
            kind.fills[slot] = _Fill(CopyBatch(pairs), slots)

    def _make_room(self, num_bytes: int) -> None:
        """Forget the kinds that came longest ago, until there is room for one more bench."""
        while self._kinds and (
            len(self._kinds) >= MAX_KINDS
            or sum(one.num_bytes for one in self._kinds.values()) + num_bytes > MAX_BENCH_BYTES
        ):
            self._kinds.popitem(last=False)


@contextmanager
def _left_to_vllm(what: str) -> Iterator[None]:
    """Let nothing out: whatever is not as it was expected, vLLM has done it, and will again."""
    try:
        yield
    except NotRepeatableError as why:
        logger.info("it is left to vLLM %s: %s", what, why)
    except Exception:
        logger.exception("it is left to vLLM %s", what)


def _pairs(writes: Sequence[Write], recipe: Recipe, *, memories: Collection[int]) -> list[Pair]:
    """Return the copies from the bench that come to the same as what was written.

    Args:
        writes: All, to whatever.
        recipe: What made the model that was written from.
        memories: Of the slots.

    Raises:
        NotRepeatableError: Something else was written than zeros, and copies of the model
            after them.
    """
    pairs: list[Pair] = []
    copied: set[int] = set()
    for write in writes:
        if write.memory not in memories:
            raise NotRepeatableError(f"{write.name} wrote to what is no slot")
        if write.is_zero and write.memory not in copied:
            continue
        source = write.operands[0] if write.is_copy else None
        if source is None or address_of(source) != recipe.made_at:
            raise NotRepeatableError(f"{write.name} wrote what is not in the model as it is")
        copied.add(write.memory)
        pairs.append((write.target, part_of(source).of(recipe.bench)))
    if _may_overlap([to for to, _ in pairs]):
        raise NotRepeatableError("one copy may have written over another, and the order is lost")
    return pairs


def _may_overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two tensors have a stretch of one memory in common, from first to last element."""
    spans = sorted(
        (address_of(one), int(one.storage_offset()), _end_of(one)) for one in tensors if one.numel()
    )
    return any(
        memory == other and end > begin for (memory, _, end), (other, begin, _) in pairwise(spans)
    )


def _end_of(tensor: torch.Tensor) -> int:
    """Return the element of its memory that comes after a tensor's last one."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach + 1


def _try(pairs: Sequence[Pair], slot: int, slots: SlotTensors, *, num_slots: int) -> None:
    """Confirm that a slot holds zeros with these copies, and nothing else.

    Raises:
        NotRepeatableError: It does not.
    """
    copies: dict[int, list[Pair]] = {}
    for to, source in pairs:
        copies.setdefault(address_of(to), []).append((to, source))
    for memory, tensor in slots.by_memory().items():
        if not tensor.dim() or len(tensor) != num_slots:
            # It has no part for each slot: nothing may be copied there.
            continue
        here = tensor[slot]
        expected = torch.zeros_like(here)
        for to, source in copies.pop(memory, ()):
            first = int(to.storage_offset() - here.storage_offset())
            expected.as_strided(to.shape, to.stride(), first).copy_(source)
        if not is_alike(expected, here):
            raise NotRepeatableError("the same copies gave other bytes")
    if copies:
        raise NotRepeatableError("there are copies beside the slot")
