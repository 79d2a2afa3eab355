"""The two ways to ask a server for an update: our own route, and vLLM's development mode.

Ours is guarded by the server's API key; vLLM's is not guarded at all.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import httpx
import msgspec

from ..errors import EngineBusyError, EngineState, EngineUnreachableError, UnsupportedError
from .base import (
    RELEASE_METHOD,
    STATUS_METHOD,
    OwnPause,
    UpdateAnswer,
    UpdateRequest,
    has_committed,
    may_resume,
    verdict,
    without_method,
)
from .server import Server

PREFIX = "/v1/bucketsync"


class Routes(Protocol):
    """What differs between the two ways to ask a server; see ``HttpEngine`` for the rest.

    Attributes:
        kind: What people call it.
    """

    kind: str

    def num_workers(self) -> int:
        """Return the server's world size, data parallelism included."""
        ...

    def extension(self) -> str:
        """Return the dotted name of its worker extension; empty where it has none."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what the server says of itself."""
        ...

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """Run one update, and what belongs around it."""
        ...

    def call(self, method: str) -> list[Any]:
        """Call a method that every worker answers at once."""
        ...

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        """Make every worker forget an adapter."""
        ...


class OurRoutes:
    """``bucketsync_http``, see ``endpoint.py``."""

    kind = "bucketsync_http"
    _METHODS: ClassVar = {STATUS_METHOD: "status", RELEASE_METHOD: "release"}

    def __init__(self, server: Server) -> None:
        self._server = server

    def num_workers(self) -> int:
        """See ``Routes``."""
        return int(self._info()["num_workers"])

    def extension(self) -> str:
        """See ``Routes``."""
        return str(self._info()["worker_extension_cls"])

    def facts(self) -> dict[str, Any]:
        """See ``Routes``."""
        engine: dict[str, Any] = self._server.ask("GET", f"{PREFIX}/engine").json()
        return self._info() | engine

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """Ask for all of it at once: the server sees it through, with or without us."""
        body = {
            "offer": request.offer,
            "version": request.version,
            "pause": request.pause,
            "resume_torn": request.resume_torn,
        }
        if request.adapter is not None:
            body["adapter"] = msgspec.to_builtins(request.adapter)
        found = self._change("update", body)
        return UpdateAnswer(results=found["results"], drops_caches=found["drops_caches"])

    def call(self, method: str) -> list[Any]:
        """See ``Routes``."""
        path = f"{PREFIX}/{self._METHODS[method]}"
        return list(self._server.ask("POST", path, timeout=None).json()["results"])

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        """See ``Routes``."""
        body = {"name": name, "timeout_s": timeout_s}
        return list(self._change("remove_lora", body)["results"])

    def _change(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for what only one at a time can have."""
        busy = (httpx.codes.CONFLICT,)
        answer = self._server.ask("POST", f"{PREFIX}/{what}", allowed=busy, json=body, timeout=None)
        if answer.status_code in busy:
            raise EngineBusyError(f"{self._server.url} refused the {what}: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    def _info(self) -> dict[str, Any]:
        found: dict[str, Any] = self._server.ask("GET", f"{PREFIX}/info").json()
        return found


class DevelopmentRoutes:
    """vLLM's own, which exist only with ``VLLM_SERVER_DEV_MODE=1``."""

    kind = "development mode"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._extension: str | None = None
        self._pause = OwnPause()

    def num_workers(self) -> int:
        """See ``Routes``."""
        answer = self._server.ask("GET", "/get_world_size", params={"include_dp": "true"})
        return int(answer.json()["world_size"])

    def extension(self) -> str:
        """See ``Routes``."""
        if self._extension is None:
            # Asked once: the server collects its whole environment for the answer.
            answer = self._server.ask("GET", "/server_info", params={"config_format": "json"})
            parallel = answer.json().get("vllm_config", {}).get("parallel_config", {})
            self._extension = str(parallel.get("worker_extension_cls") or "")
        return self._extension

    def facts(self) -> dict[str, Any]:
        """See ``Routes``."""
        is_paused = bool(self._server.ask("GET", "/is_paused").json()["is_paused"])
        return {"worker_extension_cls": self.extension(), "is_paused": is_paused}

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """Ask for one step after the other. A trainer that dies leaves the server paused."""
        if request.adapter is not None:
            raise self._without_names()
        if request.pause is None:
            return UpdateAnswer(results=self._call(request.method, request.offer))
        results: list[Any] = []
        state = EngineState.UNCHANGED
        is_paused = bool(self._server.ask("GET", "/is_paused").json()["is_paused"])
        was_paused = is_paused and not self._pause.is_ours
        try:
            self._server.ask(
                "POST", "/pause", params={"mode": str(request.pause)}, timeout=request.timeout_s
            )
            state = EngineState.UNKNOWN
            try:
                results = self._call(request.method, request.offer)
            except EngineUnreachableError as error:
                if without_method(error) is not None:
                    state = EngineState.UNCHANGED
                raise
            state = verdict(results)
            is_new = state is EngineState.COMMITTED
            drops_caches = not has_committed(results) or self._finish(
                request.version if is_new else None
            )
        finally:
            resume_torn = request.resume_torn
            if may_resume(state, results, was_paused=was_paused, resume_torn=resume_torn):
                self._server.ask("POST", "/resume")
                self._pause.is_ours = False
            else:
                self._pause.is_ours = not was_paused
        return UpdateAnswer(results=results, drops_caches=drops_caches)

    def call(self, method: str) -> list[Any]:
        """See ``Routes``."""
        return self._call(method)

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        """See ``Routes``."""
        raise self._without_names()

    def _without_names(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._server.url} is asked through vLLM's development mode, where no adapter can "
            f"get a name; nothing was sent; start it with VLLM_PLUGINS=bucketsync,bucketsync_http"
        )

    def _call(self, method: str, *args: Any) -> list[Any]:
        body = {"method": method, "args": list(args)}
        answer = self._server.ask("POST", "/collective_rpc", json=body, timeout=None)
        return list(answer.json().get("results", []))

    def _finish(self, version: str | None) -> bool:
        params = {"reset_running_requests": "true"}
        answer = self._server.ask("POST", "/reset_prefix_cache", params=params)
        # Older servers answer without a body.
        is_empty = bool(answer.json().get("success", True)) if answer.content else True
        missing = (httpx.codes.NOT_FOUND,)
        self._server.ask("POST", "/reset_mm_cache")
        self._server.ask("POST", "/reset_encoder_cache", allowed=missing)
        if version is not None:
            body = {"new_version": version}
            self._server.ask("POST", "/update_weight_version", json=body, allowed=missing)
        return is_empty
