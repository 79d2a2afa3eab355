"""Stream a trainer's weights into running vLLM workers through shared-memory buckets.

Public names are imported when they are first used (PEP 562), so that importing the
package, as vLLM does in every one of its processes, costs nothing and touches nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import Settings
    from .errors import (
        AdapterCapacityError,
        AdapterConfigError,
        AdapterError,
        AdapterModuleError,
        AdapterTensorError,
        ApplyError,
        BucketSyncError,
        ChannelTimeoutError,
        ConfigError,
        CorruptionError,
        DuplicateTensorError,
        EngineAsleepError,
        EngineBusyError,
        EngineState,
        EngineUnreachableError,
        LoadError,
        LocalProtocolError,
        MissingTensorError,
        OlderVersionError,
        PeerLostError,
        PlanError,
        ProtocolError,
        RegionError,
        RemoteError,
        RemoteProtocolError,
        SourceError,
        StagingError,
        TensorMismatchError,
        TransportError,
        UnknownTensorError,
        UnsupportedError,
        VerifyError,
    )
    from .report import AdapterReport, PushReport, WorkerReport
    from .sync import WeightSync
    from .worker.extension import WorkerExtension

__all__ = [
    "AdapterCapacityError",
    "AdapterConfigError",
    "AdapterError",
    "AdapterModuleError",
    "AdapterReport",
    "AdapterTensorError",
    "ApplyError",
    "BucketSyncError",
    "ChannelTimeoutError",
    "ConfigError",
    "CorruptionError",
    "DuplicateTensorError",
    "EngineAsleepError",
    "EngineBusyError",
    "EngineState",
    "EngineUnreachableError",
    "LoadError",
    "LocalProtocolError",
    "MissingTensorError",
    "OlderVersionError",
    "PeerLostError",
    "PlanError",
    "ProtocolError",
    "PushReport",
    "RegionError",
    "RemoteError",
    "RemoteProtocolError",
    "Settings",
    "SourceError",
    "StagingError",
    "TensorMismatchError",
    "TransportError",
    "UnknownTensorError",
    "UnsupportedError",
    "VerifyError",
    "WeightSync",
    "WorkerExtension",
    "WorkerReport",
    "__version__",
]

# Where the names live that are not errors.
_HOMES = {
    "AdapterReport": "report",
    "PushReport": "report",
    "Settings": "config",
    "WeightSync": "sync",
    "WorkerExtension": "worker.extension",
    "WorkerReport": "report",
}

# Hidden from type checkers, which would take every misspelt name for one of these.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
