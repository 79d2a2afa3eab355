"""The worker's entry points: what an RPC starts, and what is kept between RPCs.

Nothing here raises and nothing returned is more than a primitive: vLLM's executor gets
out of step when one worker raises (its replies carry no tags), and its engine core dies
of a reply that msgpack cannot encode.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from . import __version__, link
from .channel import Dialer
from .codec import decode_command, encode
from .errors import (
    BucketSyncError,
    ChannelTimeoutError,
    ConfigError,
    EngineState,
    PeerLostError,
    RemoteProtocolError,
    UnsupportedError,
)
from .identity import HOST, doing
from .messages import PROTOCOL_VERSION, Command, Hello, Open, Reply
from .probe import TransportProbe, own_probe
from .receiver import Receiver
from .retained import ReceiverMemory
from .session import State
from .sinks import Sink
from .transport.registry import openable
from .wire_errors import as_dict, to_dict

logger = logging.getLogger(__name__)

Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
Result = dict[str, Any]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of the RPC: where the sender is, and how long to wait for it.

    Attributes:
        protocol: ``PROTOCOL_VERSION`` of the sender.
        token: The secret that proves that a worker was asked by this sender.
        endpoints: Where each worker finds its sender: by device UUID, or ``*``.
        update_id: The update that is asked for.
        engine: Which engine of the sender this is.
        connect_timeout_s: Until the first command, in seconds.
        idle_timeout_s: Between two commands, in seconds.
    """

    protocol: int
    token: str
    update_id: str
    endpoints: dict[str, str]
    engine: int
    connect_timeout_s: Seconds
    idle_timeout_s: Seconds


class Ahead:
    """What a worker can find out before an update is opened. This one: nothing."""

    def during_a_call(self) -> AbstractContextManager[None]:
        """Surround a call: what is found out in it holds until its end."""
        return nullcontext()

    def look_ahead(self) -> None:
        """Find it out, for new weights. Never raises."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process, as updates see it: who it is, and what it keeps.

    Attributes:
        rank: Its rank within its engine.
        dp_index: Which data-parallel replica of the engine.
        world_size: Workers of one replica.
        device: Its device, as torch writes it.
        device_uuid: The device's own name; empty for a CPU.
        probe: What this process was found to have; its own, unless given.
        make_sink: Makes the sink that an offer asks for.
        memory: What makes the next update warm.
        ahead: What it does while the sender makes its offer ready.
        instance_id: Random, made anew with every worker process.
        adapter_versions: Tells the version of each adapter that it holds, by name.
        version: The weights that it holds; ``None`` before the first update.
        update_id: The update that brought them.
        state: What the last update left, whatever it brought; ``None`` before the first.
        left_as_is: Patterns of ``partial`` that let a parameter keep its old value, since
            the last update that was complete.
        num_updates: Updates that were committed.
        num_failures: Updates that were not.
        transport: What the last update came through.
        transport_reason: Why that.
    """

    make_sink: Callable[[Open], Sink]
    ahead: Ahead = field(default_factory=Ahead)
    rank: int = 0
    dp_index: int = 0
    world_size: int = 1
    device: str = "cpu"
    device_uuid: str = ""
    probe: TransportProbe = field(default_factory=own_probe)
    memory: ReceiverMemory = field(default_factory=ReceiverMemory)
    instance_id: str = field(default_factory=lambda: secrets.token_hex(16))
    adapter_versions: Callable[[], dict[str, str]] = dict
    version: str | None = None
    update_id: str | None = None
    state: EngineState | None = None
    left_as_is: tuple[str, ...] = ()
    num_updates: int = 0
    num_failures: int = 0
    transport: str | None = None
    transport_reason: str | None = None

    def hello(self, offer: Offer) -> Hello:
        """Return what this worker says first."""
        return Hello(
            token=offer.token,
            protocol=PROTOCOL_VERSION,
            plugin_version=__version__,
            engine=offer.engine,
            rank=self.rank,
            dp_index=self.dp_index,
            world_size=self.world_size,
            instance_id=self.instance_id,
            pid=HOST.pid,
            host_id=HOST.host_id,
            boot_id=HOST.boot_id,
            device=self.device,
            device_uuid=self.device_uuid,
            transports=openable(self.device, self.probe),
            transport_reason=self.probe.reason,
            regions=tuple(self.memory.regions),
            manifests=tuple(self.memory.manifests),
            version=self.version,
            adapters=self.adapter_versions(),
        )

    def status(self) -> Result:
        """Return what this worker holds, as primitives."""
        return {
            "rank": self.rank,
            "dp_index": self.dp_index,
            "pid": HOST.pid,
            "instance_id": self.instance_id,
            "plugin_version": __version__,
            "protocol": PROTOCOL_VERSION,
            "device": self.device,
            "version": self.version,
            "update_id": self.update_id,
            "state": None if self.state is None else str(self.state),
            "is_torn": self.memory.is_torn,
            "left_as_is": list(self.left_as_is),
            "num_updates": self.num_updates,
            "num_failures": self.num_failures,
            "transport": self.transport,
            "transport_reason": self.transport_reason,
            "region_bytes": sum(r.held_bytes for r in self.memory.regions.values()),
        }


def update(worker: Worker, offer: object, *, is_of_weights: bool = True) -> Result:
    """Run one update in this worker, from hello to the end.

    Args:
        worker: This worker.
        offer: The RPC's argument, see ``Offer``.
        is_of_weights: Not of an adapter, as far as the call says.

    Returns:
        Primitives: ``ok``, ``state``, ``rank``, ``dp_index``, ``version``,
        ``was_torn``, ``is_torn``, ``num_tensors``, ``num_bytes``, ``error``, and of the
        adapter that was offered ``adapter`` (its name) and ``lora_path``.
    """
    receiver = Receiver(
        memory=worker.memory,
        make_sink=worker.make_sink,
        rank=worker.rank,
        device=worker.device,
    )
    try:
        worker.memory.drop_dead_regions()
        accepted = _accept(offer)
        endpoint = _endpoint(accepted, worker)
        with worker.ahead.during_a_call():
            if endpoint.startswith(link.SCHEME):
                _run_linked(worker, receiver, accepted, link.find(endpoint))
            else:
                meanwhile = worker.ahead.look_ahead if is_of_weights else _nothing
                _run_dialled(worker, receiver, accepted, endpoint, meanwhile=meanwhile)
    # Whatever it was, the caller gets it as data.
    except Exception as error:  # noqa: BLE001
        receiver.fail(error)
    except BaseException as error:
        receiver.fail(error)
        raise
    finally:
        receiver.release()
    return _conclude(worker, receiver)


def _nothing() -> None:
    """An adapter's update looks at its shelf, and at nothing in advance."""


def status(worker: Worker) -> Result:
    """Return what a worker holds, after dropping what has lost its owner."""
    return _answer(worker, worker.memory.drop_dead_regions)


def release(worker: Worker) -> Result:
    """Close what is kept between updates; the next one opens it again."""
    return _answer(worker, worker.memory.release)


def probe(worker: Worker) -> Result:
    """Return what was found of the transports, without trying any of them."""
    kinds = list(openable(worker.device, worker.probe))
    device = {"device": worker.device, "device_uuid": worker.device_uuid, "transports": kinds}
    return worker.probe.as_dict() | device


def refusal(error: BaseException) -> Result:
    """Return the answer of a worker that could not even begin, or not end, to answer."""
    logger.error("the worker could not answer", exc_info=error)
    return {
        "ok": False,
        "state": str(EngineState.UNKNOWN),
        "rank": -1,
        "dp_index": -1,
        "error": to_dict(error),
    }


def _answer(worker: Worker, act: Callable[[], None]) -> Result:
    """Act, and return the worker's status with ``error`` set where that failed."""
    error: Result | None = None
    try:
        act()
    except Exception as failure:  # noqa: BLE001 - as above
        error = to_dict(failure)
    return worker.status() | {"error": error}


def _accept(offer: object) -> Offer:
    try:
        accepted = msgspec.convert(offer, Offer)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the offer is not one of protocol {PROTOCOL_VERSION}: {error}; the trainer and "
            f"the engine must run the same version of vllm_bucketsync (here {__version__})"
        ) from error
    if accepted.protocol != PROTOCOL_VERSION:
        raise UnsupportedError(
            f"the trainer speaks protocol {accepted.protocol}, the engine {PROTOCOL_VERSION} "
            f"(vllm_bucketsync {__version__}); install the same version on both sides"
        )
    return accepted


def _endpoint(offer: Offer, worker: Worker) -> str:
    for key in (worker.device_uuid, "*"):
        if key in offer.endpoints:
            return offer.endpoints[key]
    raise ConfigError(
        f"no sender is offered for device {worker.device_uuid or worker.device!r}, only for "
        f"{', '.join(offer.endpoints) or 'none'}; every device needs a sender, or one for '*'"
    )


def _run_linked(worker: Worker, receiver: Receiver, offer: Offer, sender: link.Link) -> None:
    replies: list[Reply] = [receiver.greet(worker.hello(offer))]
    while True:
        commands = sender.exchange(replies)
        if receiver.session.has_ended:
            return
        if not commands:
            raise PeerLostError("the sender of this in-process update ended without a word")
        replies = [reply for command in commands for reply in receiver.step(command)]


def _run_dialled(
    worker: Worker,
    receiver: Receiver,
    offer: Offer,
    endpoint: str,
    *,
    meanwhile: Callable[[], None],
) -> None:
    kept = worker.memory.take_dialer(endpoint)
    channel = Dialer(endpoint) if kept is None else kept
    receiver.sender = f"the trainer (pid {channel.peer_pid or 'unknown'})"
    try:
        channel.send(encode(receiver.greet(worker.hello(offer))))
        _run_over(channel, receiver, offer, meanwhile=meanwhile)
        if receiver.state is EngineState.COMMITTED:
            worker.memory.dialer = channel
    finally:
        if worker.memory.dialer is not channel:
            channel.close()


def _run_over(
    channel: Dialer, receiver: Receiver, offer: Offer, *, meanwhile: Callable[[], None]
) -> None:
    try:
        meanwhile()
        while not receiver.session.has_ended:
            command = _next_command(channel, receiver, offer)
            for reply in receiver.step(command):
                if receiver.session.has_ended:
                    _say(channel, reply)
                else:
                    channel.send(encode(reply))
    except BaseException as error:
        if not receiver.session.has_ended:
            _say(channel, receiver.fail(error))
        raise


def _next_command(channel: Dialer, receiver: Receiver, offer: Offer) -> Command:
    is_first = receiver.session.state is State.GREETED
    timeout_s = offer.connect_timeout_s if is_first else offer.idle_timeout_s
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        data = channel.receive(left_s)
        if data is not None:
            return _asked_for(decode_command(data), offer)
    name = "connect_timeout_s" if is_first else "idle_timeout_s"
    raise ChannelTimeoutError(
        timeout_s=timeout_s,
        waiting_for=f"the next command of {receiver.sender}, after {receiver.describe()}",
        advice=f"it is {doing(channel.peer_pid) or 'not known to be alive'}, and has sent "
        f"nothing, not even that its source is at work: one tensor takes longer than that, or it "
        f"hangs; raise {name} if it needs longer",
    )


def _asked_for(command: Command, offer: Offer) -> Command:
    """Refuse an update that came in advance, over a kept connection, without its call."""
    if isinstance(command, Open) and command.update_id != offer.update_id:
        raise RemoteProtocolError(
            f"update {command.update_id} was offered, and {offer.update_id} asked for"
        )
    return command


def _say(channel: Dialer, reply: Reply) -> None:
    """Tell the sender, if it is still there."""
    try:
        channel.send(encode(reply))
    except BucketSyncError:
        logger.debug("the sender is gone and was not told", exc_info=True)


def _conclude(worker: Worker, receiver: Receiver) -> Result:
    """Keep what the update left, log one line, and build the RPC's result."""
    opened = receiver.opened
    if opened is not None:
        worker.transport = opened.transport
        worker.transport_reason = opened.transport_reason
    worker.state = receiver.state
    if receiver.state is EngineState.COMMITTED and opened is not None:
        if opened.adapter is None:
            worker.version, worker.update_id = opened.version, opened.update_id
            is_mixed = bool(receiver.left_as_is)
            kept = {*worker.left_as_is, *receiver.left_as_is} if is_mixed else ()
            worker.left_as_is = tuple(sorted(kept))
        worker.num_updates += 1
        logger.info(
            "update %s committed: %s version %s, %d buckets over %s",
            opened.update_id,
            "weights" if opened.adapter is None else f"adapter {opened.adapter.name!r}",
            opened.version,
            receiver.session.num_batches,
            opened.transport,
        )
    elif receiver.error is not None:
        worker.num_failures += 1
        logger.error("update failed, engine is %s: %s", receiver.state, receiver.error.message)
    wire = receiver.error
    adapter = None if opened is None else opened.adapter
    return {
        "ok": wire is None,
        "state": None if receiver.state is None else str(receiver.state),
        "rank": worker.rank,
        "dp_index": worker.dp_index,
        "version": worker.version,
        "was_torn": receiver.was_torn,
        "is_torn": worker.memory.is_torn,
        "num_tensors": receiver.num_tensors,
        "num_bytes": receiver.num_bytes,
        "adapter": None if adapter is None else adapter.name,
        "lora_path": None if adapter is None else adapter.lora_path,
        "error": None if wire is None else as_dict(wire.code, wire.message, wire.details),
    }
