"""A vLLM server as an engine, asked by whichever routes it has."""

from __future__ import annotations

from typing import Any

import httpx

from .base import UpdateAnswer, UpdateRequest, without_extension
from .routes import PREFIX, DevelopmentRoutes, OurRoutes, Routes
from .server import Server


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
        self._server = Server(url, api_key=api_key)
        self._routes: Routes | None = None

    @property
    def name(self) -> str:
        """The server's URL, and how it is asked once that is known."""
        how = "" if self._routes is None else f" ({self._routes.kind})"
        return self._server.url + how

    def num_workers(self) -> int:
        """Return the server's world size, data parallelism included."""
        return self._found().num_workers()

    def check_ready(self) -> None:
        """See ``Engine``. Whether weights are asleep only the workers can tell.

        vLLM calls a paused engine asleep as well, and a torn one stays paused.
        """
        routes = self._found()
        if not routes.extension():
            raise without_extension(f"{self._server.url} has no worker_extension_cls")

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
        self._server.close()

    def _found(self) -> Routes:
        """Return the server's routes, found out with the first question."""
        if self._routes is None:
            answer = self._server.ask("GET", f"{PREFIX}/info", allowed=(httpx.codes.NOT_FOUND,))
            is_ours = answer.status_code != httpx.codes.NOT_FOUND
            self._routes = OurRoutes(self._server) if is_ours else DevelopmentRoutes(self._server)
        return self._routes
