"""What travels between sender and receiver: typed, versioned, bounded, and inert.

A ``Command`` goes from the sender to a receiver, a ``Reply`` the other way. Each is
a frozen struct, which ``codec.py`` makes bytes of and reads from them. Nothing that
arrives can run, and nothing is believed before that and the receiver's own checks have
passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from .config import Verify
from .errors import EngineState
from .handles import MAX_REGIONS, Count, Handle, ShortText, Text
from .layout import MAX_ENTRIES, BucketLayout, Entry, Placed, TensorMeta
from .timeline import MAX_SPANS, Span

# Raised with every change of a message that an older end would misread.
PROTOCOL_VERSION = 4
MAX_METAS = 8192
# PEFT may list every target module by its full name.
MAX_CONFIG_CHARS = 1024 * 1024
MAX_ADAPTER_NAME_CHARS = 256
MAX_ADAPTER_ID = (1 << 31) - 1
MAX_NOTES = 64
# Of one entry of a bucket, see ``digests``.
DIGEST_BYTES = 8
MAX_PATTERNS = 1024
MAX_STAGES = 64
MAX_TENSORS = 1 << 26
MAX_VERSION_CHARS = 256


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a handle's bytes that buckets name by its number.

    Attributes:
        handle: Which handle of the ``Open``.
        offset_bytes: Where it starts there.
        num_bytes: Its length.
    """

    handle: Count
    offset_bytes: Count
    num_bytes: Count


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root of both directions."""


class Command(Message, frozen=True, kw_only=True):
    """Goes from the sender to one receiver."""


class Reply(Message, frozen=True, kw_only=True):
    """Goes from a receiver to its sender."""


class Hello(Reply, frozen=True, kw_only=True, tag="hello"):
    """Who a receiver is, and what it still holds.

    Attributes:
        token: The secret that only the RPC carried.
        protocol: ``PROTOCOL_VERSION`` of the receiver.
        plugin_version: Its ``vllm_bucketsync.__version__``.
        engine: Which engine of the offer it belongs to.
        rank: Its rank within its engine.
        dp_index: Which data-parallel replica of the engine.
        world_size: Workers of one replica.
        instance_id: Random, made anew with every worker process.
        pid: Its process id, as it sees it.
        host_id: Name of the host.
        boot_id: The kernel's boot id: memory is shared only within one.
        device: Its device, as torch writes it.
        device_uuid: The device's own name, empty for a CPU.
        transports: Kinds that it may be able to open.
        transport_reason: Why some are not among them.
        regions: Ids of handles that it has open.
        manifests: Digests of manifests that it holds.
        version: Of the weights that it holds; ``None`` before the first update.
        adapters: The version of each adapter that was pushed, by name.
    """

    token: ShortText
    protocol: Count
    plugin_version: ShortText
    engine: Count
    rank: Count
    dp_index: Count
    world_size: Count
    instance_id: ShortText
    pid: Count
    host_id: ShortText
    boot_id: ShortText
    device: ShortText
    device_uuid: ShortText
    transports: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=16)]
    transport_reason: Text = ""
    regions: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_REGIONS)] = ()
    manifests: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=64)] = ()
    version: ShortText | None = None
    adapters: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=1024)] = {}


class AdapterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an adapter is, beside its tensors.

    Attributes:
        name: What requests call it.
        lora_int_id: What vLLM calls it: always the same for one name.
        lora_path: What stands where vLLM has a folder: it says whose adapter it is, and
            changes with the version, so that no prefix cache outlives it.
        config: PEFT's ``adapter_config.json``, as text.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_NAME_CHARS)]
    lora_int_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_ADAPTER_ID)]
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    config: Annotated[str, msgspec.Meta(max_length=MAX_CONFIG_CHARS)] = ""


class Open(Command, frozen=True, kw_only=True, tag="open"):
    """What is about to come, and through which memory.

    Sent again, with the next transport, after a ``Fallback``.

    Attributes:
        update_id: Random name of the update.
        version: The user's name for these weights.
        kind: Which sink takes them: ``weights``, ``adapter`` or ``discard``.
        transport: How the regions are shared.
        transport_reason: Why that way, for people.
        handles: The shared memory.
        regions: The stretches of it that buckets are put in.
        layout: What both ends plan with.
        placed: Which tensors are read where they lie; only with a declared manifest.
        manifest: Digest of the manifest; ``None`` for a stream seen for the first time.
        num_metas: Metas that follow in ``Metas`` messages; 0 where the receiver holds
            the manifest, or where there is none.
        is_declared: The manifest is a promise; else it is what the last stream was.
        partial: Patterns of parameter names that may be left without a value; of an
            adapter's module names that may go nowhere.
        adapter: What the adapter is; ``None`` for any other kind.
        is_traced: The report is to say when each thing happened.
        is_atomic: Nothing of the model may change before the commit.
        verify: What is checked; with ``digest`` every batch carries digests.
        num_workers: How many take part on this host, in all engines together.
    """

    update_id: ShortText
    version: Annotated[str, msgspec.Meta(max_length=MAX_VERSION_CHARS)]
    kind: ShortText
    transport: ShortText
    handles: Annotated[tuple[Handle, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    layout: BucketLayout
    manifest: ShortText | None = None
    num_metas: Annotated[int, msgspec.Meta(ge=0, le=MAX_TENSORS)] = 0
    is_declared: bool = False
    transport_reason: Text = ""
    placed: Placed | None = None
    partial: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_PATTERNS)] = ()
    adapter: AdapterSpec | None = None
    is_traced: bool = False
    is_atomic: bool = False
    verify: Verify = Verify.NONE
    num_workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSORS)] = 1


class Metas(Command, frozen=True, kw_only=True, tag="metas"):
    """The next part of the manifest.

    Attributes:
        metas: At most ``MAX_METAS``.
    """

    metas: Annotated[tuple[TensorMeta, ...], msgspec.Meta(max_length=MAX_METAS)]


class Ready(Reply, frozen=True, kw_only=True, tag="ready"):
    """Regions are open, the manifest fits, nothing is written yet."""


class Fallback(Reply, frozen=True, kw_only=True, tag="fallback"):
    """This transport does not work here; offer the next one.

    Attributes:
        transport: The one that failed.
        reason: Why, for people.
    """

    transport: ShortText
    reason: Text


class Batch(Command, frozen=True, kw_only=True, tag="batch"):
    """A bucket is filled.

    Attributes:
        seq: Counts from 0 within the update.
        region: Which region holds it.
        entries: Its tensors; ``None`` where both ends planned the same.
        metas: What a stream had to say of the tensors that begin in it; ``()`` for
            those that the manifest names.
        digests: ``DIGEST_BYTES`` for each entry, in order; empty where nothing is verified.
    """

    seq: Count
    region: Count
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)] | None = None
    metas: Annotated[tuple[TensorMeta, ...], msgspec.Meta(max_length=MAX_METAS)] = ()
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_ENTRIES * DIGEST_BYTES)] = b""


class Ack(Reply, frozen=True, kw_only=True, tag="ack"):
    """No byte of the bucket is needed any more.

    Attributes:
        seq: The bucket.
    """

    seq: Count


class Deviate(Command, frozen=True, kw_only=True, tag="deviate"):
    """The stream leaves the manifest; batches carry entries and metas from here on.

    Attributes:
        index: The first tensor that the manifest does not name.
    """

    index: Count


class Busy(Command, frozen=True, kw_only=True, tag="busy"):
    """The source is giving tensors, and the next bucket is not full yet.

    Sent now and then, so that a slow source is not taken for one that has stopped.

    Attributes:
        num_tensors: Tensors that it has given.
    """

    num_tensors: Count


class Finish(Command, frozen=True, kw_only=True, tag="finish"):
    """Everything was sent.

    Attributes:
        num_batches: Buckets.
        num_tensors: Tensors.
        num_bytes: Bytes of all tensors, without alignment.
        manifest: Digest of what was sent.
    """

    num_batches: Count
    num_tensors: Count
    num_bytes: Count
    manifest: ShortText


class Conclude(Finish, frozen=True, kw_only=True, tag="conclude"):
    """Everything was sent, and nobody else votes: commit it if it is complete and valid."""


class Prepared(Reply, frozen=True, kw_only=True, tag="prepared"):
    """Complete and valid here; a commit will not find anything missing."""


class Commit(Command, frozen=True, kw_only=True, tag="commit"):
    """Every receiver of every sender is prepared."""


class LoadSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Which ways the weights of one update took into a model.

    Attributes:
        num_direct: Modules that were written in place.
        direct_bytes: Bytes that went this way.
        num_processed: Modules that were put together aside, then post-processed.
        processed_bytes: Bytes that went this way.
        num_loaded: Modules that vLLM's own loaders filled.
        loaded_bytes: Bytes that went this way.
        process_s: Seconds of post-processing in ``num_processed`` modules.
    """

    num_direct: Count = 0
    direct_bytes: Count = 0
    num_processed: Count = 0
    processed_bytes: Count = 0
    num_loaded: Count = 0
    loaded_bytes: Count = 0
    process_s: float = 0.0


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """Where an atomic update waited for its commit.

    Attributes:
        num_bytes: What this worker's part of it took.
        place: The device, or the kind of host memory; empty where nothing was staged.
    """

    num_bytes: Count = 0
    place: ShortText = ""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What ``verify`` looked at, and found good.

    Attributes:
        arrived_bytes: Bytes that arrived as they were sent.
        num_direct: Modules written in place whose live tensors hold what was sent.
        direct_bytes: Bytes of those tensors.
        num_processed: Modules that held what was sent when post-processing began.
        processed_bytes: Bytes of their tensors.
        num_unchecked: Tensors that vLLM's own loaders took, and nothing looked at.
        unchecked: Names of the first of these.
    """

    arrived_bytes: Count = 0
    num_direct: Count = 0
    direct_bytes: Count = 0
    num_processed: Count = 0
    processed_bytes: Count = 0
    num_unchecked: Count = 0
    unchecked: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_NOTES)] = ()


# No struct of msgspec's: reports hold it as it came, and are data to ``dataclasses.asdict``.
@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Tensors that the engine holds in another dtype than they were sent in.

    Attributes:
        sent: The dtype that they came in.
        held: The dtype that the engine has for them.
        num_tensors: How many they are.
        names: Of the first of them.
    """

    sent: ShortText
    held: ShortText
    num_tensors: Count
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_NOTES)] = ()


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    """The new weights are in use.

    Attributes:
        split: Which ways they took.
        staged: Where an atomic update waited.
        checked: What was verified.
        cloned_bytes: Bytes that had to be copied aside while loading.
        skipped: Names that the engine has no place for and was allowed to skip.
        notes: Anything else that a user should read.
        left_as_is: Patterns of ``partial`` that let a parameter keep its old value.
        casts: What was cast, as far as the update was known in advance.
        stages_ms: What each stage took in all, in milliseconds; ``waiting`` is for the
            sender. Stages lie one behind the other, kinds of spans within them.
        spans: When each stage and span was, where that was asked for.
    """

    split: LoadSplit = LoadSplit()
    staged: Staged = Staged()
    checked: Checked = Checked()
    cloned_bytes: Count = 0
    skipped: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_METAS)] = ()
    notes: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_NOTES)] = ()
    left_as_is: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_PATTERNS)] = ()
    casts: Annotated[tuple[Cast, ...], msgspec.Meta(max_length=MAX_NOTES)] = ()
    stages_ms: Annotated[dict[ShortText, float], msgspec.Meta(max_length=MAX_STAGES)] = {}
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=2 * MAX_SPANS)] = ()


class Abort(Command, frozen=True, kw_only=True, tag="abort"):
    """Forget this update.

    Attributes:
        reason: Why, for people.
    """

    reason: Text


class Aborted(Reply, frozen=True, kw_only=True, tag="aborted"):
    """The update is forgotten.

    Attributes:
        state: What the worker holds now.
    """

    state: EngineState


class Error(Reply, frozen=True, kw_only=True, tag="error"):
    """The receiver failed, has undone what it could, and has left the update.

    Attributes:
        code: The class of the error (``errors.py``).
        message: Its text.
        details: Its attributes.
        state: What the worker holds now.
    """

    code: ShortText
    message: Text
    details: dict[ShortText, str | int | float | bool | list[str] | None]
    state: EngineState
