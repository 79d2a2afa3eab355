"""What a worker keeps of the adapters that were pushed: pristine copies, ready to be used.

vLLM changes the tensors that it is given (it multiplies ``lora_B`` by the adapter's scale),
and forgets an adapter whenever it needs room, falls deeply asleep, or gets new weights. It
then asks its ``_load_adapter`` for it again, from inside a forward pass, where a failure
ends the engine. So that method answers for our adapters from here, on the manager's
instance, and what asks it makes room first; for any other path they do what they did.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...adapters import id_of, is_ours
from ...errors import AdapterCapacityError, AdapterError
from ...messages import AdapterSpec
from .. import compat
from .clones import clones_of
from .fit import Fits
from .image import Image
from .places import is_head, nan_head
from .replay import Replays
from .swap import check_room, empty_all, make_room, pins_of, swap, take_out

logger = logging.getLogger(__name__)

# Each keeps its tensors in host memory, twice.
MAX_ADAPTERS = 256
_KEY = "_bucketsync_shelf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One adapter's pristine copy.

    Attributes:
        spec: What it is.
        version: The user's name for this version.
        helper: Its config, as vLLM has it.
        tensors: By name, in the dtype of the engine's adapters, on the CPU. Never handed
            out: vLLM gets clones.
        is_stacked: Its experts are stacked in one tensor.
        key: Its kind: two of one kind differ in their bytes only. ``None`` where the order
            of its tensors was not known before they came.
    """

    spec: AdapterSpec
    version: str
    helper: Any
    tensors: Mapping[str, torch.Tensor]
    is_stacked: bool = False
    key: Hashable | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        if isinstance(self.tensors, Image):
            return self.tensors.num_bytes
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Shelf:
    """The pushed adapters of one worker, by number. Lives as long as vLLM's manager.

    Attributes:
        fits: Of adapters that came before, which are no longer checked.
        replays: What is known of how vLLM takes them over.
    """

    def __init__(self, owner: Any) -> None:
        """Begin with none.

        Args:
            owner: vLLM's ``WorkerLoRAManager``.
        """
        self._owner = owner
        self._kept: dict[int, Kept] = {}
        # Numbers that stand for adapters which are no longer here.
        self._missing: set[int] = set()
        self.fits = Fits()
        self.replays = Replays(owner._adapter_manager)

    @property
    def _manager(self) -> Any:
        return self._owner._adapter_manager

    def check(self, spec: AdapterSpec) -> None:
        """Refuse an adapter that there is no room for, here or in vLLM's caches.

        Raises:
            AdapterCapacityError: There is none.
            AdapterError: Its number belongs to another adapter.
        """
        number = spec.lora_int_id
        kept = self._kept.get(number)
        is_strange = kept is None and number in self._manager.list_adapters()
        if (kept is not None and kept.spec.name != spec.name) or (
            is_strange and number not in self._missing
        ):
            other = "one that was not pushed" if kept is None else repr(kept.spec.name)
            raise AdapterError(
                f"adapter {spec.name!r} has number {number}, which belongs to {other}; nothing was "
                f"changed; give it another name, or remove that one",
                adapter=spec.name,
            )
        if kept is None and len(self._kept) >= MAX_ADAPTERS:
            raise AdapterCapacityError(
                f"adapter {spec.name!r} would be number {MAX_ADAPTERS + 1} of those that were "
                f"pushed; {MAX_ADAPTERS} are kept at most; nothing was changed; remove one with "
                f"remove_lora",
                adapter=spec.name,
                limit=MAX_ADAPTERS,
                held=sorted(one.spec.name for one in self._kept.values()),
            )
        check_room(self._manager, number, adapter=spec.name)

    def prepare(self, kept: Kept) -> Any:
        """Return vLLM's model of an adapter that is to be put next.

        Raises:
            Exception: vLLM refuses it.
        """
        return self.replays.build(
            kept.tensors,
            key=kept.key,
            number=kept.spec.lora_int_id,
            build=lambda: self.build(kept),
        )

    def build(self, kept: Kept) -> Any:
        """Have vLLM make its model of an adapter: clones, merged as its layers want them.

        Raises:
            Exception: vLLM refuses it.
        """
        owner, manager = self._owner, self._manager
        # vLLM scales what it gets, in place; and copies what is to be pinned, and is not.
        tensors = clones_of(
            {
                name: tensor
                for name, tensor in kept.tensors.items()
                if not compat.is_expert_of_another(manager, name)
            },
            is_pinned=compat.pins_adapters(),
        )
        model = owner._lora_model_cls.from_lora_tensors(
            lora_model_id=kept.spec.lora_int_id,
            tensors=tensors,
            peft_helper=kept.helper,
            device="cpu",
            dtype=owner.lora_config.lora_dtype,
            model_vocab_size=owner.vocab_size,
            weights_mapper=compat.rename_mapper(manager.model),
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
        )
        model.is_3d_lora_weight = kept.is_stacked
        if hasattr(manager, "_validate_moe_lora_format"):
            manager._validate_moe_lora_format(model)
        # vLLM does it when it adds the model. Whatever is wrong shows before anything is
        # swapped, and the second time there is nothing left to do.
        manager._create_merged_loras_inplace(model)
        return model

    def put(self, kept: Kept, model: Any) -> bool:
        """Use an adapter from now on, in the place of the one with its name.

        Args:
            kept: Its pristine copy.
            model: What ``prepare`` made of it.

        Returns:
            Whether vLLM was spared: its slot was filled as the last time.

        Raises:
            Exception: vLLM refused it. The old one is in use, as before.
        """
        was_quick = self.replays.put(model, key=kept.key)
        self._kept[kept.spec.lora_int_id] = kept
        self._missing.discard(kept.spec.lora_int_id)
        return was_quick

    def remove(self, name: str, *, is_asleep: bool = False) -> bool:
        """Forget an adapter, and return whether it was here.

        Args:
            name: The adapter.
            is_asleep: Its slot's memory is not there: do not write to it.
        """
        found = [number for number, kept in self._kept.items() if kept.spec.name == name]
        for number in found:
            take_out(self._manager, number, may_write=not is_asleep)
            del self._kept[number]
        if found and not self._kept:
            self.replays.forget()
        stand_in = id_of(name)
        if stand_in in self._missing:
            take_out(self._manager, stand_in, may_write=not is_asleep)
            self._missing.discard(stand_in)
        return bool(found)

    def restore(self, *, forget: Callable[[], object] | None = None) -> int:
        """Put the adapters that vLLM had in its caches there again, from their copies.

        Every slot is emptied or filled anew. Adapters that were not pushed are dropped: vLLM loads
        them again when they are next asked for.

        Args:
            forget: What empties vLLM's caches; its manager's own method where ``None``.

        Returns:
            How many of those there were.
        """
        manager = self._manager
        # Oldest first, so that the same ones stay when there is less room.
        before = [(number, pins_of(manager, number)) for number in manager.list_adapters()]
        (manager.remove_all_adapters if forget is None else forget)()
        self._missing.clear()
        # A sleep drops the contents of memory behind torch's back.
        self.replays.forget_slots()
        empty_all(manager)
        for number, pins in before:
            kept = self._kept.get(number)
            if kept is None:
                continue
            try:
                swap(manager, self.build(kept), pins=pins)
            # The weights are committed; it is loaded when it is next asked for.
            except Exception:
                logger.exception("adapter %r could not be restored at once", kept.spec.name)
        return sum(number not in self._kept for number, _ in before)

    def model_for(self, request: Any) -> Any:
        """Return a model for vLLM's request for one of our adapters. Never raises.

        One that is not here, because it was removed or the worker is a new one, gets a model
        that makes its logits NaN: such answers are visibly none, where the base model's would
        look like some, and an error would end the engine.
        """
        kept = self._kept.get(request.lora_int_id)
        if kept is not None:
            try:
                return self.build(kept)
            except Exception:
                logger.exception("adapter %r could not be built", request.lora_name)
        logger.error(
            "a request wants adapter %r (%s), which is not here; it is answered with NaN; push the "
            "adapter again, or stop asking for it",
            request.lora_name,
            request.lora_path,
        )
        self._missing.add(request.lora_int_id)
        return self._nothing(request.lora_int_id)

    def _nothing(self, number: int) -> Any:
        owner, manager = self._owner, self._manager
        rank = min(8, int(owner.lora_config.max_lora_rank))
        find = getattr(manager, "get_dummy_lora_warmup_rank", None)
        model = manager.create_dummy_lora(
            number, rank if find is None else find(rank), owner.embedding_modules
        )
        for name, module in manager.modules.items():
            if is_head(module):
                model.loras[name] = nan_head(name, module, dtype=owner.lora_config.lora_dtype)
        return model

    def versions(self) -> dict[str, str]:
        """Return the version of each adapter, by name."""
        return {kept.spec.name: kept.version for kept in self._kept.values()}

    def status(self) -> list[dict[str, Any]]:
        """Return what is kept, as primitives, by name."""
        active = set(self._manager._active_adapters)
        return [
            {
                "name": kept.spec.name,
                "lora_int_id": number,
                "version": kept.version,
                "num_bytes": kept.num_bytes,
                "is_active": number in active,
                "is_pinned": pins_of(self._manager, number).is_active,
            }
            for number, kept in sorted(self._kept.items(), key=lambda one: one[1].spec.name)
        ]


def shelf_of(worker: Any) -> Shelf:
    """Return a worker's shelf; the first time it is made, and vLLM's manager told of it.

    Args:
        worker: vLLM's worker, with LoRA.
    """
    owner = worker.model_runner.lora_manager
    shelf: Shelf | None = vars(owner).get(_KEY)
    if shelf is None:
        shelf = Shelf(owner)
        vars(owner)[_KEY] = shelf
        load, model_for = owner._load_adapter, shelf.model_for
        owner._load_adapter = lambda request: (
            model_for(request) if is_ours(request.lora_path) else load(request)
        )
        _make_room_first(owner)
    return shelf


def _make_room_first(owner: Any) -> None:
    """Let no pin stand in the way of a request for one of our adapters."""
    add, apply = owner.add_adapter, owner._apply_adapters

    def add_adapter(request: Any) -> Any:
        if is_ours(request.lora_path):
            make_room(owner._adapter_manager, {request.lora_int_id})
        return add(request)

    def apply_adapters(requests: Collection[Any]) -> Any:
        # All of a batch at once: one must not push out another.
        if any(request and is_ours(request.lora_path) for request in requests):
            wanted = {request.lora_int_id for request in requests if request}
            make_room(owner._adapter_manager, wanted)
        return apply(requests)

    owner.add_adapter, owner._apply_adapters = add_adapter, apply_adapters


def find_shelf(worker: Any) -> Shelf | None:
    """Return a worker's shelf, or ``None`` where none was made, as without LoRA."""
    owner = getattr(worker.model_runner, "lora_manager", None)
    return None if owner is None else vars(owner).get(_KEY)
