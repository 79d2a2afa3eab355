"""Requests to one server, and what a refusal means."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx

from ..errors import BucketSyncError, ConfigError, EngineUnreachableError
from ..wire_errors import from_dict

# Control requests only; the update itself has deadlines of its own and no timeout here.
REQUEST_TIMEOUT_S = 60.0


class Server:
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
        """Close the connections."""
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
