"""What a server's own ``/metrics`` tells of updates."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from .clients.base import verdict
from .errors import EngineState


class Metrics:
    """Counters of this process, in the registry that vLLM serves at ``/metrics``."""

    def __init__(self) -> None:
        """Register them; a registry takes each name once."""
        name = "vllm_bucketsync"
        self.seconds = Histogram(f"{name}_update_seconds", "Seconds of an update on the engine")
        self.updates = Counter(f"{name}_updates", "Updates that were committed")
        self.failures = Counter(f"{name}_failures", "Updates and dry runs that failed")
        self.bytes = Counter(f"{name}_bytes", "Bytes loaded by each worker")
        self.tensors = Counter(f"{name}_tensors", "Tensors loaded by each worker")
        # Of several API servers the one that was asked last knows.
        self.torn = Gauge(
            f"{name}_torn",
            "1 while a worker holds part of an update",
            multiprocess_mode="mostrecent",
        )
        self.version = Gauge(
            f"{name}_version",
            "Version of the weights, where it is a number",
            multiprocess_mode="mostrecent",
        )

    def note(self, results: list[dict[str, Any]], *, version: str | None, seconds: float) -> None:
        """Take note of an update's outcome, as the workers returned it."""
        self.seconds.observe(seconds)
        state = verdict(results)
        is_good = state is EngineState.COMMITTED
        (self.updates if is_good else self.failures).inc()
        if is_good:
            self.bytes.inc(results[0]["num_bytes"])
            self.tensors.inc(results[0]["num_tensors"])
            with contextlib.suppress(ValueError, TypeError):
                self.version.set(float(version))  # type: ignore[arg-type]
        said = [one for one in results if isinstance(one, dict)]
        self.torn.set(state is EngineState.TORN or any(one.get("is_torn") for one in said))


@functools.cache
def metrics() -> Metrics:
    """Return this process's metrics: a registry takes each name once."""
    return Metrics()
