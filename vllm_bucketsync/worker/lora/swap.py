"""One adapter for another in vLLM's LoRA manager: in one step, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ...errors import AdapterCapacityError
from ...streams import synchronise

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Which of vLLM's two caches may not evict an adapter.

    Attributes:
        is_kept: The one of adapters in host memory.
        is_active: The one of slots on the device.
    """

    is_kept: bool = False
    is_active: bool = False


def pins_of(manager: Any, lora_int_id: int) -> Pins:
    """Return what of an adapter is pinned.

    Args:
        manager: vLLM's ``LRUCacheLoRAModelManager``.
        lora_int_id: The adapter.
    """
    return Pins(
        is_kept=lora_int_id in manager._registered_adapters.pinned_items,
        is_active=lora_int_id in manager._active_adapters.pinned_items,
    )


def check_room(manager: Any, lora_int_id: int, *, adapter: str) -> None:
    """Refuse an adapter for which nothing could be evicted.

    Raises:
        AdapterCapacityError: All the room is taken by adapters that are pinned.
    """
    caches = (
        ("--max-cpu-loras", manager._registered_adapters, int(manager.capacity)),
        ("--max-loras", manager._active_adapters, int(manager.lora_slots)),
    )
    for setting, cache, limit in caches:
        pinned = sorted(cache.pinned_items)
        if lora_int_id not in cache and len(pinned) >= limit:
            raise AdapterCapacityError(
                f"adapter {adapter!r} has no room: all {limit} places of {setting} hold adapters "
                f"that are pinned, {pinned}; nothing was changed; remove one of them, or start the "
                f"engine with a higher {setting}",
                adapter=adapter,
                limit=limit,
                held=[str(one) for one in pinned],
            )


def make_room(manager: Any, wanted: Collection[int]) -> None:
    """Take pins away until adapters that are asked for together fit beside the others.

    vLLM evicts nothing that is pinned, and fails inside a forward pass where it would have
    to: the engine ends. The adapter that was used longest ago loses its pin first.

    Args:
        manager: vLLM's ``LRUCacheLoRAModelManager``.
        wanted: Their numbers. They keep their own pins.
    """
    caches = (
        ("--max-cpu-loras", manager._registered_adapters, int(manager.capacity)),
        ("--max-loras", manager._active_adapters, int(manager.lora_slots)),
    )
    for setting, cache, limit in caches:
        pinned = [one for one in cache.order if one in cache.pinned_items and one not in wanted]
        for number in pinned[: max(0, len(pinned) + len(wanted) - limit)]:
            logger.error(
                "adapter %d loses its pin: a request wants %s, and too many of the %d places of %s "
                "are pinned; pin fewer adapters, or start the engine with a higher %s",
                number,
                sorted(wanted),
                limit,
                setting,
                setting,
            )
            cache.pinned_items.discard(number)


def swap(manager: Any, model: Any, *, pins: Pins | None = None) -> None:
    """Put an adapter in the place of the one with its number, active and as pinned as it was.

    Args:
        manager: vLLM's ``LRUCacheLoRAModelManager``.
        model: vLLM's ``LoRAModel``. It is the manager's from here on.
        pins: What is to be pinned; ``None``: what is.

    Raises:
        Exception: vLLM refused it. The old adapter is back.
    """
    number = model.id
    pins = pins_of(manager, number) if pins is None else pins
    old = manager.list_adapters().get(number)
    try:
        _put(manager, model, pins)
    except BaseException:
        _put_back(manager, number, old, pins)
        raise


def refill(manager: Any, model: Any, fill: Callable[[], object]) -> None:
    """Put an adapter in the place of the one with its number, in the same slot.

    Args:
        manager: vLLM's ``LRUCacheLoRAModelManager``.
        model: vLLM's ``LoRAModel``, for whose number ``will_stay`` is true.
        fill: Writes the slot.

    Raises:
        Exception: It failed. The old adapter is back.
    """
    number = model.id
    pins, old = pins_of(manager, number), manager.list_adapters()[number]
    try:
        fill()
        # In vLLM's caches it is the newest, as one that was added. Its pins stay.
        manager._registered_adapters[number] = model
        manager._active_adapters.touch(number)
        manager._last_mapping = None
        synchronise(manager.device)
    except BaseException:
        _put_back(manager, number, old, pins)
        raise


def will_stay(manager: Any, lora_int_id: int) -> bool:
    """Whether an adapter is in both of vLLM's caches, and would get its slot again.

    vLLM takes the first slot that is free.
    """
    slot = slot_of(manager, lora_int_id)
    is_held = lora_int_id in manager._registered_adapters
    is_active = lora_int_id in manager._active_adapters
    return (
        is_held
        and is_active
        and slot is not None
        and None not in list(manager.lora_index_to_id)[:slot]
    )


def _put_back(manager: Any, number: int, old: Any, pins: Pins) -> None:
    # vLLM counts one as active before it has filled its slot.
    take_out(manager, number)
    if old is not None:
        try:
            _put(manager, old, pins)
        # It is loaded again, from its own copy, when it is next asked for.
        except Exception:
            logger.exception("adapter %d could not be put back at once", number)
            take_out(manager, number)


def take_out(manager: Any, lora_int_id: int, *, may_write: bool = True) -> None:
    """Remove an adapter from vLLM's caches, and its weights from its slot.

    vLLM itself only calls the slot free. What is left there is not harmless: on a CPU,
    requests without an adapter are computed with the last slot and the others in a batch.

    Args:
        manager: vLLM's ``LRUCacheLoRAModelManager``.
        lora_int_id: The adapter.
        may_write: The slots are in memory that is there.
    """
    slot = slot_of(manager, lora_int_id)
    manager.remove_adapter(lora_int_id)
    # A batch of the same requests must not miss that slots have changed.
    manager._last_mapping = None
    if slot is not None and may_write:
        _empty(manager, slot)


def empty_all(manager: Any) -> None:
    """Remove the weights from every slot of a manager that has no adapter.

    Args:
        manager: vLLM's ``LRUCacheLoRAModelManager``.
    """
    for slot in range(int(manager.lora_slots)):
        _empty(manager, slot)


def _put(manager: Any, model: Any, pins: Pins) -> None:
    number = model.id
    before = slot_of(manager, number)
    manager.remove_adapter(number)
    manager._last_mapping = None
    while len(manager) + 1 > manager.capacity:
        manager.remove_oldest_adapter()
    manager.add_adapter(model)
    manager.activate_adapter(number)
    if before is not None and manager.lora_index_to_id[before] is None:
        _empty(manager, before)
    if pins.is_kept:
        manager._registered_adapters.pin(number)
    if pins.is_active:
        manager._active_adapters.pin(number)
    # A copy to the device that fails does so here, while the old adapter is at hand.
    synchronise(manager.device)


def slot_of(manager: Any, lora_int_id: int) -> int | None:
    """Return the slot that an adapter is in, if it is in one."""
    slots = list(manager.lora_index_to_id)
    return slots.index(lora_int_id) if lora_int_id in slots else None


def _empty(manager: Any, slot: int) -> None:
    for module in manager.modules.values():
        module.reset_lora(slot)
