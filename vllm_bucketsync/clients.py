"""How a trainer asks an engine: an ``LLM`` object of this process, or a server's URL.

Nothing here imports vllm: an ``LLM`` is known by what it can do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from .errors import (
    BucketSyncError,
    ConfigError,
    EngineAsleepError,
    EngineUnreachableError,
    UnsupportedError,
)

EXTENSION = "vllm_bucketsync.WorkerExtension"
UPDATE_METHOD = "update_weights_from_bucket"
# Control requests only; the update itself has deadlines of its own and no timeout here.
REQUEST_TIMEOUT_S = 60.0


class Engine(Protocol):
    """One engine, as a trainer asks it.

    Attributes:
        is_in_process: Its only worker runs on the thread that calls it.
    """

    is_in_process: bool

    def num_workers(self) -> int | None:
        """Return how many workers take part in an update; ``None`` if it cannot say."""

    def check_ready(self) -> None:
        """Refuse an engine that cannot be updated now.

        Raises:
            EngineAsleepError: Its weights are asleep.
            UnsupportedError: It was started without the extension.
        """

    def call(self, method: str, *args: Any) -> list[Any]:
        """Run a method on every worker and return what they return. No timeout."""

    def paused(self, *, timeout_s: float) -> contextlib.AbstractContextManager[None]:
        """Keep requests from running inside the block, and resume after it.

        Args:
            timeout_s: For the requests that run, to end.
        """

    def finish(self, version: str) -> None:
        """Drop what was computed with the old weights, and record the version."""

    def close(self) -> None:
        """Give back what the client holds; never the engine itself."""


def connect(engine: object) -> Engine:
    """Return the client for what a user named as the engine.

    Raises:
        ConfigError: It is nothing that can be asked.
    """
    if isinstance(engine, str):
        return HttpEngine(engine)
    if hasattr(engine, "collective_rpc") and hasattr(engine, "llm_engine"):
        return LlmEngine(engine)
    if all(hasattr(engine, name) for name in ("call", "num_workers", "check_ready", "paused")):
        return engine  # type: ignore[return-value]
    raise ConfigError(
        f"{type(engine).__name__} is no engine; expected a vllm.LLM, or the base URL of a "
        f"vLLM server such as 'http://localhost:8000'"
    )


class LlmEngine:
    """A ``vllm.LLM`` of this process, in-process or with its workers in others.

    Attributes:
        is_in_process: Whether its worker runs on the calling thread.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._config = llm.llm_engine.vllm_config.parallel_config
        # vLLM's in-process client holds the engine core itself, the others its address.
        core = getattr(llm.llm_engine, "engine_core", None)
        executor = getattr(getattr(core, "engine_core", None), "model_executor", None)
        self.is_in_process = hasattr(executor, "driver_worker") and self.num_workers() == 1

    def num_workers(self) -> int:
        """Return tensor times pipeline parallel size, times the replicas it drives."""
        replicas = getattr(self._llm.llm_engine.engine_core, "engine_ranks_managed", [0])
        return int(self._config.world_size) * max(1, len(replicas))

    def check_ready(self) -> None:
        """See ``Engine``."""
        if not self._config.worker_extension_cls:
            raise _without_extension("the LLM has no worker_extension_cls")
        if self._llm.llm_engine.is_sleeping():
            raise _asleep("llm.wake_up()")

    def call(self, method: str, *args: Any) -> list[Any]:
        """See ``Engine``."""
        return list(self._llm.collective_rpc(method, args=args))

    @contextlib.contextmanager
    def paused(self, *, timeout_s: float) -> Iterator[None]:
        """Do nothing: an ``LLM`` runs requests only while it is asked to."""
        yield

    def finish(self, version: str) -> None:
        """See ``Engine``.

        Raises:
            EngineUnreachableError: A cache could not be reset.
        """
        engine = self._llm.llm_engine
        if not engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineUnreachableError(
                "the prefix cache could not be reset; the new weights are committed, but old "
                "cache entries may still be used; call llm.reset_prefix_cache()",
                url="LLM",
            )
        engine.reset_mm_cache()
        engine.reset_encoder_cache()
        if hasattr(engine, "set_weight_version"):
            engine.set_weight_version(version)

    def close(self) -> None:
        """Hold nothing."""


class HttpEngine:
    """A vLLM server that runs with ``VLLM_SERVER_DEV_MODE=1``.

    Attributes:
        is_in_process: Never.
    """

    is_in_process = False

    def __init__(self, url: str) -> None:
        """Take note of the server; nothing is asked yet.

        Raises:
            ConfigError: The URL is not one of a server.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise ConfigError(
                f"{url!r} is no base URL of a server; expected one such as 'http://localhost:8000'"
            )
        self._url = url.rstrip("/")
        self._extension: str | None = None
        # An environment's proxy is for the world, not for the engine on this host.
        self._http = httpx.Client(base_url=self._url, timeout=REQUEST_TIMEOUT_S, trust_env=False)

    def num_workers(self) -> int:
        """Return the server's world size, data parallelism included."""
        answer = self._ask("GET", "/get_world_size", params={"include_dp": "true"})
        return int(answer.json()["world_size"])

    def check_ready(self) -> None:
        """See ``Engine``.

        Raises:
            EngineUnreachableError: Nothing answers there, or not as a vLLM server does.
        """
        if self._extension is None:
            # Asked once: the server collects its whole environment for the answer.
            answer = self._ask("GET", "/server_info", params={"config_format": "json"})
            parallel = answer.json().get("vllm_config", {}).get("parallel_config", {})
            self._extension = parallel.get("worker_extension_cls", "")
        if not self._extension:
            raise _without_extension(f"{self._url} has no worker_extension_cls")
        if self._ask("GET", "/is_sleeping").json()["is_sleeping"]:
            raise _asleep(f"POST {self._url}/wake_up")

    def call(self, method: str, *args: Any) -> list[Any]:
        """See ``Engine``."""
        body = {"method": method, "args": list(args)}
        answer = self._ask("POST", "/collective_rpc", json=body, timeout=None)
        return list(answer.json().get("results", []))

    @contextlib.contextmanager
    def paused(self, *, timeout_s: float) -> Iterator[None]:
        """Let running requests finish, hold new ones back, and resume after the block.

        A torn engine stays paused: it would answer with half of each model.
        """
        self._ask("POST", "/pause", params={"mode": "wait"}, timeout=timeout_s)
        try:
            yield
        except BucketSyncError as error:
            if error.engine_state in {None, "unchanged", "committed"}:
                self._resume_after(error)
            raise
        except BaseException as error:
            self._resume_after(error)
            raise
        self._ask("POST", "/resume")

    def finish(self, version: str) -> None:
        """See ``Engine``.

        Raises:
            EngineUnreachableError: A cache could not be reset.
        """
        params = {"reset_running_requests": "true"}
        answer = self._ask("POST", "/reset_prefix_cache", params=params)
        if not answer.json().get("success", True):
            raise EngineUnreachableError(
                f"{self._url} could not reset its prefix cache; the new weights are committed, "
                f"but old cache entries may still be used; POST /reset_prefix_cache again",
                url=self._url,
            )
        self._ask("POST", "/reset_mm_cache")
        self._ask("POST", "/reset_encoder_cache")
        self._ask(
            "POST", "/update_weight_version", json={"new_version": version}, may_be_missing=True
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _resume_after(self, error: BaseException) -> None:
        try:
            self._ask("POST", "/resume")
        except EngineUnreachableError as unreachable:
            error.add_note(f"vllm_bucketsync: the engine could not be resumed: {unreachable}")

    def _ask(
        self, method: str, path: str, *, may_be_missing: bool = False, **options: Any
    ) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise EngineUnreachableError(
                f"{method} {self._url}{path}: {error or type(error).__name__}; is the server "
                f"up, and is this its base URL?",
                url=self._url,
            ) from error
        if answer.is_success or (may_be_missing and answer.status_code == httpx.codes.NOT_FOUND):
            return answer
        advice = "look at the server's log"
        if answer.status_code == httpx.codes.NOT_FOUND:
            advice = "start the server with VLLM_SERVER_DEV_MODE=1, and check the base URL"
        raise EngineUnreachableError(
            f"{method} {self._url}{path} answered {answer.status_code}: {answer.text[:300]!r}; "
            f"{advice}",
            url=self._url,
        )


def without_method(error: BaseException) -> UnsupportedError | None:
    """Return what to say where a call failed because no worker knows the method."""
    text = str(error)
    if UPDATE_METHOD not in text or "attribute" not in text:
        return None
    return _without_extension(f"its worker_extension_cls has no {UPDATE_METHOD}")


def _without_extension(found: str) -> UnsupportedError:
    return UnsupportedError(
        f"the engine's workers cannot take an update: {found}; start it with "
        f"--worker-extension-cls {EXTENSION}, or a class derived from it"
    )


def _asleep(how: str) -> EngineAsleepError:
    return EngineAsleepError(
        f"the engine is asleep and an update would write to memory that is not there; nothing "
        f"was started; wake it up first ({how})"
    )
