"""Both ends of an update without a wire: commands made, and given to a receiver, by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from support.tensor_samples import bytes_tensor
from support.thread_engine import KeepingSink

from vllm_bucketsync.codec import decode_command, encode
from vllm_bucketsync.config import Settings, Verify
from vllm_bucketsync.identity import HOST
from vllm_bucketsync.layout import Manifest, TensorMeta
from vllm_bucketsync.messages import (
    PROTOCOL_VERSION,
    Command,
    Commit,
    Finish,
    Hello,
    Metas,
    Open,
    Reply,
)
from vllm_bucketsync.packing import Packing
from vllm_bucketsync.receiver import Receiver
from vllm_bucketsync.retained import ReceiverMemory
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.sources import Source
from vllm_bucketsync.transport.base import OpenedRegion
from vllm_bucketsync.transport.registry import Wish

SLOT_BYTES = 512
# So many that no bucket of a short update is written over: it may be read at any time.
NUM_SLOTS = 64
# What a trainer on the CPU knows before it has asked anybody.
WISH = Wish(transport="auto", device=torch.device("cpu"))

Pairs = Sequence[tuple[TensorMeta, torch.Tensor]]


class WatchedRegion:
    """A region that takes note of every view, and passes it on.

    Attributes:
        views: Offset and length of each.
        awaited: Each slot that was waited for, with how many views there were before.
    """

    def __init__(self, region: OpenedRegion) -> None:
        self._region = region
        self.views: list[tuple[int, int]] = []
        self.awaited: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)

    def await_writes(self, slot: int) -> None:
        self.awaited.append((slot, len(self.views)))
        self._region.await_writes(slot)

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        self.views.append((offset_bytes, num_bytes))
        return self._region.view(offset_bytes, num_bytes)


def hello(*, rank: int = 0, **changes: Any) -> Hello:
    """Return what a worker of this host says, with changes."""
    said = Hello(
        token="secret",  # noqa: S106 - of this test alone
        protocol=PROTOCOL_VERSION,
        plugin_version="0",
        engine=0,
        rank=rank,
        dp_index=0,
        world_size=1,
        instance_id=f"instance {rank}",
        pid=1000 + rank,
        host_id="host",
        boot_id=HOST.boot_id,
        device="cpu",
        device_uuid="",
        transports=("shm",),
    )
    return msgspec.structs.replace(said, **changes)


def byte_pairs(*sizes: int, prefix: str = "t") -> Pairs:
    """Return tensors ``[size]``, uint8, of random bytes."""
    return [
        (TensorMeta(f"{prefix}{i}", "uint8", (size,), size), bytes_tensor(size, seed=i + 1))
        for i, size in enumerate(sizes)
    ]


def manifest_of(pairs: Pairs) -> Manifest:
    """Return what declares the tensors."""
    return Manifest([meta for meta, _ in pairs])


def shm_slots(directory: object, *, num_slots: int = NUM_SLOTS) -> Slots:
    """Return slots of ``SLOT_BYTES`` in shared memory of their own; release them."""
    slots = Slots(Settings(slot_size=SLOT_BYTES, num_slots=num_slots, dir=str(directory)))
    slots.prepare("shm", needed_bytes=None, hellos=[], wish=WISH)
    return slots


def opening(slots: Slots, *, manifest: Manifest | None = None, **changes: Any) -> Open:
    """Return the offer of some slots, with every meta of the manifest to follow."""
    offered = Open(
        update_id="u",
        version="1",
        kind="weights",
        transport="shm",
        handles=slots.handles,
        regions=slots.regions,
        layout=slots.layout,
        manifest=None if manifest is None else manifest.digest,
        num_metas=0 if manifest is None else len(manifest),
    )
    return msgspec.structs.replace(offered, **changes)


def commands_of(
    slots: Slots,
    pairs: Pairs,
    *,
    manifest: Manifest | None = None,
    is_declared: bool = False,
    **changes: Any,
) -> list[Command]:
    """Return every command of a whole update, packed by the real sender's half.

    Args:
        slots: Enough of them that none has to be waited for.
        pairs: What is sent.
        manifest: What both ends know before: what is sent, or what a stream resembles.
        is_declared: The manifest is a promise.
        changes: Other fields of the offer.
    """
    declared = manifest if is_declared else None
    packing = Packing(
        Source(declared=declared, tensors=iter(pairs)),
        manifest=manifest,
        slots=slots,
        verify=changes.get("verify", Verify.NONE),
    )
    commands: list[Command] = [
        opening(slots, manifest=manifest, is_declared=is_declared, **changes)
    ]
    if manifest is not None:
        commands.append(Metas(metas=manifest.metas))
    for step in packing.batches(lambda: packing.num_batches):
        commands.extend(step)
    finish = Finish(
        num_batches=packing.num_batches,
        num_tensors=packing.num_tensors,
        num_bytes=packing.num_bytes,
        manifest=packing.digest(),
    )
    return [*commands, finish, Commit()]


def greeted(memory: ReceiverMemory, sink: Any = None) -> Receiver:
    """Return a receiver that has said hello and puts everything in ``sink``."""
    kept = KeepingSink() if sink is None else sink
    receiver = Receiver(memory=memory, make_sink=lambda opened: kept)
    receiver.greet(hello())
    return receiver


def feed(receiver: Receiver, commands: Iterable[Command]) -> list[Reply]:
    """Give commands to a receiver as they come off the wire, and return all its replies."""
    replies: list[Reply] = []
    for command in commands:
        replies.extend(receiver.step(decode_command(encode(command))))
    return replies


def bytes_by_name(pairs: Pairs) -> dict[str, bytes]:
    """Return what has to arrive."""
    return {meta.name: tensor.numpy().tobytes() for meta, tensor in pairs}


def kept_by(sink: KeepingSink) -> dict[str, bytes]:
    """Return what arrived."""
    return {name: tensor.numpy().tobytes() for name, tensor in sink.tensors.items()}
