"""Every error that this package raises on purpose, in one tree.

The classes are grouped by what a caller does next: fix the call, change the
machine, retry, report, reload. Each also derives from the builtin that a stranger
would catch, and carries its facts as attributes, so that nobody parses texts.

On the wire an error is plain data, see ``wire_errors.py``: a code, a text, and the
primitives named in ``fields``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

from .texts import utf8

Primitive = str | int | float | bool | None
Details = dict[str, Primitive | list[str]]


class EngineState(StrEnum):
    """What an engine, or one worker of it, holds after an update ended."""

    COMMITTED = "committed"
    """The new weights, complete."""
    UNCHANGED = "unchanged"
    """Exactly what it held before the update."""
    TORN = "torn"
    """Part of the update. Only a complete new update repairs it."""
    UNKNOWN = "unknown"
    """The worker did not say: it is dead, stopped, or still at work."""


# What an error's text says of the engine; that it is unchanged needs no words.
_HOLDS = {
    EngineState.COMMITTED: "the engine has the new weights all the same",
    EngineState.TORN: "the engine is torn; push again to repair it",
    EngineState.UNKNOWN: "what the engine holds is unknown; ask status()",
}


class BucketSyncError(Exception):
    """The root of the tree: everything raised on purpose.

    Attributes:
        code: The class's name on the wire.
        fields: Names of the attributes that travel with it.
        rank: The worker that failed, within its engine; ``None`` where it was the
            trainer's side.
        engine_state: What the engine holds now; ``None`` where no update had begun.
    """

    code: ClassVar[str] = "error"
    fields: ClassVar[tuple[str, ...]] = ()

    rank: int | None = None
    engine_state: EngineState | None = None

    @property
    def message(self) -> str:
        """What went wrong, without what the engine holds."""
        return super().__str__()

    def __str__(self) -> str:
        """Return what went wrong, and what the engine holds unless that is what it held."""
        said = None if self.engine_state is None else _HOLDS.get(self.engine_state)
        return f"{self.message} ({said})" if said else self.message

    def details(self) -> Details:
        """Return the attributes that travel with the error, as primitives."""
        return {field: _primitive(getattr(self, field, None)) for field in self.fields}

    def __reduce__(self) -> tuple[Any, ...]:
        """Let it be copied and pickled: not every class can be made from its text alone."""
        # Builtins keep this one outside of the instance's dictionary.
        number = {"errno": self.errno} if isinstance(self, OSError) else {}
        return made, (type(self), self.args), self.__dict__ | number


class ConfigError(BucketSyncError, ValueError):
    """A setting or an argument is wrong; nothing was started."""

    code = "config"


class SourceError(BucketSyncError, ValueError):
    """What was given to push cannot be sent: empty, meta, sparse, a repeated name.

    Attributes:
        name: The tensor, or ``None`` where it is the source as a whole.
    """

    code = "source"
    fields = ("name",)

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class UnsupportedError(BucketSyncError, RuntimeError):
    """This vLLM, torch, device, platform or engine mode cannot do it."""

    code = "unsupported"


class EngineBusyError(BucketSyncError, RuntimeError):
    """Another update, which cannot be cancelled, still runs there."""

    code = "engine_busy"


class EngineAsleepError(BucketSyncError, RuntimeError):
    """The engine's weights are asleep; wake them up before an update."""

    code = "engine_asleep"


class EngineUnreachableError(BucketSyncError, ConnectionError):
    """The engine did not answer, or refused the call.

    Attributes:
        url: What was asked.
    """

    code = "engine_unreachable"
    fields = ("url",)

    def __init__(self, message: str, *, url: str) -> None:
        super().__init__(message)
        self.url = url


class OlderVersionError(BucketSyncError, ValueError):
    """``require_newer`` was set, and the engine holds that version or a newer one.

    Attributes:
        version: What was to be pushed.
        held: What the engine holds.
    """

    code = "older_version"
    fields = ("version", "held")

    def __init__(self, message: str, *, version: str = "", held: str = "") -> None:
        super().__init__(message)
        self.version = version
        self.held = held


class TransportError(BucketSyncError):
    """The bytes or the messages did not get across."""

    code = "transport"


class ChannelTimeoutError(TransportError, TimeoutError):
    """Nothing happened before the deadline.

    Attributes:
        timeout_s: The deadline, in seconds.
        waiting_for: What was awaited.
    """

    code = "channel_timeout"
    fields = ("timeout_s", "waiting_for")

    def __init__(self, *, timeout_s: float, waiting_for: str, advice: str) -> None:
        super().__init__(f"waited {timeout_s:g} s for {waiting_for}; {advice}")
        self.timeout_s = timeout_s
        self.waiting_for = waiting_for


class PeerLostError(TransportError, ConnectionError):
    """The other process is gone.

    Attributes:
        pid: Its process id, or ``None`` where it never said who it was.
    """

    code = "peer_lost"
    fields = ("pid",)

    def __init__(self, message: str, *, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class RegionError(TransportError, OSError):
    """Shared memory could not be created, opened or trusted."""

    code = "region"


class CorruptionError(TransportError, OSError):
    """Bytes arrived that are not those that were sent; ``verify`` found it.

    Attributes:
        name: The tensor.
        first_byte: Where the damaged stretch begins within the tensor.
        num_bytes: Its length.
        bucket: Which bucket carried it, counted from 0.
        transport: What carried the bucket.
    """

    code = "corruption"
    fields = ("name", "first_byte", "num_bytes", "bucket", "transport")

    def __init__(
        self,
        message: str,
        *,
        name: str = "",
        first_byte: int = 0,
        num_bytes: int = 0,
        bucket: int = 0,
        transport: str = "",
    ) -> None:
        super().__init__(message)
        self.name = name
        self.first_byte = first_byte
        self.num_bytes = num_bytes
        self.bucket = bucket
        self.transport = transport


class StagingError(BucketSyncError, RuntimeError):
    """A worker has no room to stage an atomic update; nothing was written.

    Attributes:
        needed_bytes: What this worker's part of the update takes.
        device_bytes: What its device could give, the margin taken off; 0 for a CPU.
        host_bytes: What the host could give this worker, the margin taken off.
    """

    code = "staging"
    fields = ("needed_bytes", "device_bytes", "host_bytes")

    def __init__(
        self, message: str, *, needed_bytes: int, device_bytes: int, host_bytes: int
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.device_bytes = device_bytes
        self.host_bytes = host_bytes


class ProtocolError(BucketSyncError, RuntimeError):
    """The order or the form of the messages was broken; see its two subclasses."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """This end broke the order: a fault of this package."""

    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    """The other end sent what it may not."""

    code = "remote_protocol"


class LoadError(BucketSyncError, RuntimeError):
    """The engine's model refused the weights.

    Attributes:
        name: The tensor or parameter that the text begins with, or ``None``.
        problems: One text for each thing found, the first of them included.
    """

    code = "load"
    fields: ClassVar[tuple[str, ...]] = ("name", "problems")

    def __init__(
        self, message: str, *, name: str | None = None, problems: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.name = name
        self.problems = tuple(problems)


class UnknownTensorError(LoadError):
    """The engine's model has no place for a tensor, or would skip it in silence."""

    code = "unknown_tensor"


class MissingTensorError(LoadError):
    """A parameter of the engine's model would get no value, or only part of one."""

    code = "missing_tensor"


class DuplicateTensorError(LoadError):
    """Two tensors would land in the same place of the engine's model."""

    code = "duplicate_tensor"


class PlanError(LoadError):
    """Loading by plan and by vLLM's own loaders came to different bytes."""

    code = "plan"


class VerifyError(LoadError):
    """A tensor of the engine did not take the value that was sent; ``verify`` found it."""

    code = "verify"


class ApplyError(LoadError):
    """An atomic update was complete on every worker, and a worker failed to apply it.

    Attributes:
        cause: The code of the error that it failed with.
    """

    code = "apply"
    fields = ("name", "problems", "cause")

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        problems: Sequence[str] = (),
        cause: str = "",
    ) -> None:
        super().__init__(message, name=name, problems=problems)
        self.cause = cause


class TensorMismatchError(LoadError):
    """A tensor does not fit the parameter that it is meant for.

    Attributes:
        expected: Shape or dtype that the engine has, as text.
        got: Shape or dtype that was sent, as text.
    """

    code = "tensor_mismatch"
    fields = ("name", "problems", "expected", "got")

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        problems: Sequence[str] = (),
        expected: str = "",
        got: str = "",
    ) -> None:
        super().__init__(message, name=name, problems=problems)
        self.expected = expected
        self.got = got


class AdapterError(BucketSyncError, RuntimeError):
    """The engine cannot use an adapter; what it had under that name goes on serving.

    Attributes:
        adapter: The adapter's name.
        problems: One text for each thing found, the first of them included.
    """

    code = "adapter"
    fields: ClassVar[tuple[str, ...]] = ("adapter", "problems")

    def __init__(self, message: str, *, adapter: str = "", problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.adapter = adapter
        self.problems = tuple(problems)


class AdapterConfigError(AdapterError):
    """A setting of the adapter, or of the engine, rules it out.

    Attributes:
        setting: The setting, by PEFT's word for it or by vLLM's.
        expected: What the engine can do, as text.
        found: What the setting is, as text.
    """

    code = "adapter_config"
    fields = ("adapter", "problems", "setting", "expected", "found")

    def __init__(
        self,
        message: str,
        *,
        adapter: str = "",
        problems: Sequence[str] = (),
        setting: str = "",
        expected: str = "",
        found: str = "",
    ) -> None:
        super().__init__(message, adapter=adapter, problems=problems)
        self.setting = setting
        self.expected = expected
        self.found = found


class AdapterModuleError(AdapterError):
    """The engine has no module, or no adapter's place in one, for part of an adapter.

    Attributes:
        unmatched: Names of the modules, as the adapter has them.
    """

    code = "adapter_module"
    fields = ("adapter", "problems", "unmatched")

    def __init__(
        self,
        message: str,
        *,
        adapter: str = "",
        problems: Sequence[str] = (),
        unmatched: Sequence[str] = (),
    ) -> None:
        super().__init__(message, adapter=adapter, problems=problems)
        self.unmatched = tuple(unmatched)


class AdapterTensorError(AdapterError):
    """A tensor of an adapter is missing, or does not fit its module.

    Attributes:
        tensor: The tensor that the text begins with.
        expected: Its shape or dtype for the engine, as text.
        got: What was sent, as text; ``nothing`` where it is missing.
    """

    code = "adapter_tensor"
    fields = ("adapter", "problems", "tensor", "expected", "got")

    def __init__(
        self,
        message: str,
        *,
        adapter: str = "",
        problems: Sequence[str] = (),
        tensor: str = "",
        expected: str = "",
        got: str = "",
    ) -> None:
        super().__init__(message, adapter=adapter, problems=problems)
        self.tensor = tensor
        self.expected = expected
        self.got = got


class AdapterCapacityError(AdapterError):
    """The engine has no room for one more adapter.

    Attributes:
        limit: How many it can have there.
        held: Names, or numbers, of those that take the room.
    """

    code = "adapter_capacity"
    fields = ("adapter", "problems", "limit", "held")

    def __init__(
        self,
        message: str,
        *,
        adapter: str = "",
        problems: Sequence[str] = (),
        limit: int = 0,
        held: Sequence[str] = (),
    ) -> None:
        super().__init__(message, adapter=adapter, problems=problems)
        self.limit = limit
        self.held = tuple(held)


class RemoteError(BucketSyncError, RuntimeError):
    """The other end failed in a way that has no class here.

    Attributes:
        remote_type: The exception's class over there.
    """

    code = "remote"
    fields = ("remote_type",)

    def __init__(self, message: str, *, remote_type: str = "") -> None:
        super().__init__(message)
        self.remote_type = remote_type


def made(cls: type[BucketSyncError], args: tuple[Any, ...]) -> BucketSyncError:
    """Make an error that has its text already; its attributes follow."""
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    return error


def _primitive(value: Any) -> Primitive | list[str]:
    if value is None or isinstance(value, int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [utf8(str(item)) for item in value]
    return utf8(str(value))
