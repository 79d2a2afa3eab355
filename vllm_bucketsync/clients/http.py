"""A vLLM server: asked through our own route, or through vLLM's development mode.

Which of the two a server has is found out with the first question. Ours is guarded by
the server's API key; vLLM's is not guarded at all.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec

from ..errors import (
    BucketSyncError,
    ConfigError,
    EngineBusyError,
    EngineState,
    EngineUnreachableError,
    UnsupportedError,
)
from ..wire_errors import from_dict
from .base import (
    RELEASE_METHOD,
    STATUS_METHOD,
    OwnPause,
    UpdateAnswer,
    UpdateRequest,
    has_committed,
    may_resume,
    verdict,
    without_extension,
    without_method,
)

# Control requests only; the update itself has deadlines of its own and no timeout here.
REQUEST_TIMEOUT_S = 60.0
PREFIX = "/v1/bucketsync"


class HttpEngine:
    """Asks a server. Opens connections when it first asks.

    Attributes:
        is_in_process: Never.
        is_idle: Nobody can know: others send requests.
    """

    is_in_process = False
    is_idle = False

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Take note of the server; nothing is asked yet.

        Args:
            url: Its base URL, a root path included, or ``unix:///path/of/its/socket``. The
                ``/v1`` that OpenAI's clients want at its end may be there.
            api_key: What it was started with; none where it is empty.

        Raises:
            ConfigError: The URL is not one of a server.
        """
        self._http = _Http(url, api_key=api_key)
        self._routes: _Routes | None = None

    @property
    def name(self) -> str:
        """The server's URL, and how it is asked once that is known."""
        how = "" if self._routes is None else f" ({self._routes.kind})"
        return self._http.url + how

    def num_workers(self) -> int:
        """Return the server's world size, data parallelism included."""
        return self._found().num_workers()

    def check_ready(self) -> None:
        """See ``Engine``. Whether weights are asleep only the workers can tell.

        vLLM calls a paused engine asleep as well, and a torn one stays paused.
        """
        routes = self._found()
        if not routes.extension():
            raise without_extension(f"{self._http.url} has no worker_extension_cls")

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """See ``Engine``."""
        return self._found().update(request)

    def call(self, method: str) -> list[Any]:
        """See ``Engine``."""
        return self._found().call(method)

    def facts(self) -> dict[str, Any]:
        """Return what the server says of itself: ``worker_extension_cls``, ``is_paused``.

        Our route says more: what ``GET /info`` and ``GET /engine`` do.
        """
        return self._found().facts()

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        """See ``Engine``. Requests for it are a 404 as soon as the server is asked."""
        return self._found().remove_adapter(name, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _found(self) -> _Routes:
        """Return the server's routes, found out with the first question."""
        if self._routes is None:
            answer = self._http.ask("GET", f"{PREFIX}/info", allowed=(httpx.codes.NOT_FOUND,))
            is_ours = answer.status_code != httpx.codes.NOT_FOUND
            self._routes = _OurRoutes(self._http) if is_ours else _DevelopmentRoutes(self._http)
        return self._routes


class _Routes(Protocol):
    """What differs between the two ways to ask a server."""

    kind: str

    def num_workers(self) -> int: ...

    def extension(self) -> str: ...

    def facts(self) -> dict[str, Any]: ...

    def update(self, request: UpdateRequest) -> UpdateAnswer: ...

    def call(self, method: str) -> list[Any]: ...

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]: ...


class _OurRoutes:
    """``bucketsync_http``, see ``endpoint.py``."""

    kind = "bucketsync_http"
    _METHODS: ClassVar = {STATUS_METHOD: "status", RELEASE_METHOD: "release"}

    def __init__(self, http: _Http) -> None:
        self._http = http

    def num_workers(self) -> int:
        return int(self._info()["num_workers"])

    def extension(self) -> str:
        return str(self._info()["worker_extension_cls"])

    def facts(self) -> dict[str, Any]:
        engine: dict[str, Any] = self._http.ask("GET", f"{PREFIX}/engine").json()
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
        path = f"{PREFIX}/{self._METHODS[method]}"
        return list(self._http.ask("POST", path, timeout=None).json()["results"])

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        body = {"name": name, "timeout_s": timeout_s}
        return list(self._change("remove_lora", body)["results"])

    def _change(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for what only one at a time can have."""
        busy = (httpx.codes.CONFLICT,)
        answer = self._http.ask("POST", f"{PREFIX}/{what}", allowed=busy, json=body, timeout=None)
        if answer.status_code in busy:
            raise EngineBusyError(f"{self._http.url} refused the {what}: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    def _info(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.ask("GET", f"{PREFIX}/info").json()
        return found


class _DevelopmentRoutes:
    """vLLM's own, which exist only with ``VLLM_SERVER_DEV_MODE=1``."""

    kind = "development mode"

    def __init__(self, http: _Http) -> None:
        self._http = http
        self._extension: str | None = None
        self._pause = OwnPause()

    def num_workers(self) -> int:
        answer = self._http.ask("GET", "/get_world_size", params={"include_dp": "true"})
        return int(answer.json()["world_size"])

    def extension(self) -> str:
        if self._extension is None:
            # Asked once: the server collects its whole environment for the answer.
            answer = self._http.ask("GET", "/server_info", params={"config_format": "json"})
            parallel = answer.json().get("vllm_config", {}).get("parallel_config", {})
            self._extension = str(parallel.get("worker_extension_cls") or "")
        return self._extension

    def facts(self) -> dict[str, Any]:
        is_paused = bool(self._http.ask("GET", "/is_paused").json()["is_paused"])
        return {"worker_extension_cls": self.extension(), "is_paused": is_paused}

    def update(self, request: UpdateRequest) -> UpdateAnswer:
        """Ask for one step after the other. A trainer that dies leaves the server paused."""
        if request.adapter is not None:
            raise self._without_names()
        if request.pause is None:
            return UpdateAnswer(results=self._call(request.method, request.offer))
        results: list[Any] = []
        state = EngineState.UNCHANGED
        is_paused = bool(self._http.ask("GET", "/is_paused").json()["is_paused"])
        was_paused = is_paused and not self._pause.is_ours
        try:
            self._http.ask(
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
                self._http.ask("POST", "/resume")
                self._pause.is_ours = False
            else:
                self._pause.is_ours = not was_paused
        return UpdateAnswer(results=results, drops_caches=drops_caches)

    def call(self, method: str) -> list[Any]:
        return self._call(method)

    def remove_adapter(self, name: str, *, timeout_s: float) -> list[Any]:
        raise self._without_names()

    def _without_names(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self._http.url} is asked through vLLM's development mode, where no adapter can get "
            f"a name; nothing was sent; start it with VLLM_PLUGINS=bucketsync,bucketsync_http"
        )

    def _call(self, method: str, *args: Any) -> list[Any]:
        body = {"method": method, "args": list(args)}
        answer = self._http.ask("POST", "/collective_rpc", json=body, timeout=None)
        return list(answer.json().get("results", []))

    def _finish(self, version: str | None) -> bool:
        params = {"reset_running_requests": "true"}
        answer = self._http.ask("POST", "/reset_prefix_cache", params=params)
        # Older servers answer without a body.
        is_empty = bool(answer.json().get("success", True)) if answer.content else True
        missing = (httpx.codes.NOT_FOUND,)
        self._http.ask("POST", "/reset_mm_cache")
        self._http.ask("POST", "/reset_encoder_cache", allowed=missing)
        if version is not None:
            body = {"new_version": version}
            self._http.ask("POST", "/update_weight_version", json=body, allowed=missing)
        return is_empty


class _Http:
    """Requests to one server, with every failure made an error of ours.

    Attributes:
        url: The server, for people.
    """

    def __init__(self, url: str, *, api_key: str | None) -> None:
        try:
            parts = urlsplit(url)
        except ValueError:  # such as a bracket that is not closed
            parts = urlsplit("")
        is_socket = parts.scheme == "unix" and parts.path.startswith("/")
        if not is_socket and (parts.scheme not in {"http", "https"} or not parts.netloc):
            raise ConfigError(
                f"{url!r} is not the base URL of a server; expected one such as "
                f"'http://localhost:8000', or 'unix:///path/of/the/socket'"
            )
        self.url = url.rstrip("/") if is_socket else _base_url(url)
        # An environment's proxy is for the world, not for the engine on this host.
        self._http = httpx.Client(
            base_url="http://localhost" if is_socket else self.url,
            transport=httpx.HTTPTransport(uds=parts.path) if is_socket else None,
            headers={} if not api_key else {"Authorization": f"Bearer {api_key}"},
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
        )

    def ask(
        self, method: str, path: str, *, allowed: tuple[int, ...] = (), **options: Any
    ) -> httpx.Response:
        """Return the answer.

        Args:
            method: HTTP's.
            path: Below the base URL.
            allowed: Answers that are no failure, beside a success.
            options: httpx's.

        Raises:
            EngineUnreachableError: There is none, or it is a refusal.
            BucketSyncError: It is a refusal that says which error it is.
        """
        try:
            answer = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise EngineUnreachableError(
                f"{method} {self.url}{path}: {error or type(error).__name__}; is the server up, "
                f"and is this its base URL?",
                url=self.url,
            ) from error
        if answer.is_success or answer.status_code in allowed:
            return answer
        refusal = _refusal(answer)
        if refusal is not None:
            raise refusal
        raise EngineUnreachableError(
            f"{method} {self.url}{path} answered {answer.status_code}: {answer.text[:300]!r}; "
            f"{_advice(answer.status_code)}",
            url=self.url,
        )

    def close(self) -> None:
        self._http.close()


def _base_url(url: str) -> str:
    """Return a server's URL without the ``/v1`` that OpenAI's clients have at its end."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _refusal(answer: httpx.Response) -> BucketSyncError | None:
    """Return the error that our route describes in its answer, or ``None``."""
    try:
        return from_dict(answer.json()["detail"])
    except (ValueError, TypeError, KeyError):
        return None


def _advice(status: int) -> str:
    if status in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        return "pass the server's key as api_key= or in VLLM_API_KEY"
    if status == httpx.codes.NOT_FOUND:
        return (
            "start the server with VLLM_PLUGINS=bucketsync,bucketsync_http, or with "
            "VLLM_SERVER_DEV_MODE=1, and check the base URL"
        )
    return "look at the server's log"
