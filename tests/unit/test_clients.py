"""Proves how a trainer asks an engine: what is refused, in which order, with which text.

The server is a plain HTTP server of the test with vLLM's routes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from vllm_bucketsync.clients import UPDATE_METHOD, HttpEngine, LlmEngine, connect, without_method
from vllm_bucketsync.errors import (
    ConfigError,
    EngineAsleepError,
    EngineState,
    EngineUnreachableError,
    LoadError,
    UnsupportedError,
)

EXTENSION = "vllm_bucketsync.WorkerExtension"


class Server(ThreadingHTTPServer):
    """Answers as vLLM does in development mode.

    Attributes:
        asked: Method and path of every request, in order.
        answers: What each path answers: status and body.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        config = {"parallel_config": {"worker_extension_cls": EXTENSION}}
        self.answers: dict[str, tuple[int, Any]] = {
            "/server_info": (200, {"vllm_config": config}),
            "/is_sleeping": (200, {"is_sleeping": False}),
            "/get_world_size": (200, {"world_size": 4}),
            "/collective_rpc": (200, {"results": [{"rank": 0}]}),
            "/reset_prefix_cache": (200, {"success": True}),
        } | {
            path: (200, {})
            for path in (
                "/pause",
                "/resume",
                "/reset_mm_cache",
                "/reset_encoder_cache",
                "/update_weight_version",
            )
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.server.bodies.append(json.loads(self.rfile.read(size) or b"null"))
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.server.asked.append(f"{parts.path}{'?' * bool(parts.query)}{parts.query}")
        status, body = self.server.answers.get(parts.path, (404, {"detail": "Not Found"}))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join(5)
    found.server_close()


@pytest.fixture
def engine(server: Server) -> Iterator[HttpEngine]:
    found = HttpEngine(server.url + "/")
    yield found
    found.close()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h", "http://", "/a/path"])
def test_what_is_no_base_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:8000"):
        connect(url)


@pytest.mark.parametrize("engine", [None, 7, object(), ["http://h"]])
def test_what_is_no_engine_is_refused_by_its_type(engine: object) -> None:
    with pytest.raises(ConfigError, match=f"{type(engine).__name__} is no engine"):
        connect(engine)


def test_a_server_that_is_not_there_is_named(server: Server) -> None:
    with HttpClosed(server) as engine, pytest.raises(EngineUnreachableError) as caught:
        engine.check_ready()

    assert server.url in str(caught.value)
    assert caught.value.url == server.url
    assert "is the server up" in str(caught.value)


class HttpClosed:
    """An engine whose server has just gone."""

    def __init__(self, server: Server) -> None:
        server.server_close()
        self._engine = HttpEngine(server.url)

    def __enter__(self) -> HttpEngine:
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def test_a_server_without_development_mode_is_told_apart(
    server: Server, engine: HttpEngine
) -> None:
    server.answers.clear()

    with pytest.raises(EngineUnreachableError, match="VLLM_SERVER_DEV_MODE=1"):
        engine.check_ready()


def test_a_server_without_the_extension_is_refused_before_its_workers_are_asked(
    server: Server, engine: HttpEngine
) -> None:
    server.answers["/server_info"] = (200, {"vllm_config": {"parallel_config": {}}})

    with pytest.raises(UnsupportedError, match=f"--worker-extension-cls {EXTENSION}"):
        engine.check_ready()
    assert not any("/collective_rpc" in path for path in server.asked)


def test_a_server_that_sleeps_is_refused_with_the_way_to_wake_it(
    server: Server, engine: HttpEngine
) -> None:
    server.answers["/is_sleeping"] = (200, {"is_sleeping": True})

    with pytest.raises(EngineAsleepError, match="/wake_up"):
        engine.check_ready()


def test_the_world_size_counts_data_parallel_replicas(server: Server, engine: HttpEngine) -> None:
    assert engine.num_workers() == 4
    assert server.asked == ["/get_world_size?include_dp=true"]


def test_a_call_names_the_method_and_gives_its_arguments(
    server: Server, engine: HttpEngine
) -> None:
    assert engine.call(UPDATE_METHOD, {"token": "t"}) == [{"rank": 0}]
    assert server.bodies == [{"method": UPDATE_METHOD, "args": [{"token": "t"}]}]


def test_requests_wait_while_paused_and_go_on_afterwards(
    server: Server, engine: HttpEngine
) -> None:
    with engine.paused(timeout_s=5):
        assert server.asked == ["/pause?mode=wait"]
    assert server.asked == ["/pause?mode=wait", "/resume"]


@pytest.mark.parametrize(
    ("state", "resumes"),
    [
        (EngineState.UNCHANGED, True),
        (EngineState.COMMITTED, True),
        (None, True),
        (EngineState.TORN, False),
        (EngineState.UNKNOWN, False),
    ],
)
def test_an_engine_goes_on_after_a_failure_only_if_it_is_whole(
    server: Server, engine: HttpEngine, state: EngineState | None, resumes: bool
) -> None:
    error = LoadError("no")
    error.engine_state = state

    with pytest.raises(LoadError), engine.paused(timeout_s=5):
        raise error

    assert ("/resume" in server.asked) is resumes


def test_an_engine_that_cannot_be_resumed_does_not_hide_the_failure(
    server: Server, engine: HttpEngine
) -> None:
    server.answers["/resume"] = (500, {"error": "no"})

    with pytest.raises(LoadError) as caught, engine.paused(timeout_s=5):
        raise LoadError("the first failure")

    assert "could not be resumed" in caught.value.__notes__[0]


def test_every_cache_is_dropped_and_the_version_recorded(
    server: Server, engine: HttpEngine
) -> None:
    engine.finish("step-7")

    assert server.asked == [
        "/reset_prefix_cache?reset_running_requests=true",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/update_weight_version",
    ]
    assert server.bodies[-1] == {"new_version": "step-7"}


def test_a_server_without_weight_versions_is_served_as_well(
    server: Server, engine: HttpEngine
) -> None:
    del server.answers["/update_weight_version"]

    engine.finish("step-7")


def test_a_prefix_cache_that_could_not_be_reset_is_an_error(
    server: Server, engine: HttpEngine
) -> None:
    server.answers["/reset_prefix_cache"] = (200, {"success": False})

    with pytest.raises(EngineUnreachableError, match="old cache entries"):
        engine.finish("step-7")


def test_a_worker_without_the_method_is_told_from_other_failures() -> None:
    missing = Exception(f"'CPUWorker' object has no attribute '{UPDATE_METHOD}'")

    assert "--worker-extension-cls" in str(without_method(missing))
    assert without_method(Exception("out of memory")) is None


class FakeLlm:
    """What ``LlmEngine`` uses of a ``vllm.LLM``."""

    def __init__(self, *, is_in_process: bool = False, extension: str = EXTENSION) -> None:
        self.calls: list[Any] = []
        self.llm_engine = self
        self.vllm_config = self
        self.parallel_config = self
        self.world_size = 2 - is_in_process
        self.worker_extension_cls = extension
        self.resets_prefix_cache = True
        self.sleeps = False
        if is_in_process:
            self.driver_worker = object()
            self.model_executor = self
            self.engine_core: Any = self
        else:
            self.engine_core = _Client()

    def is_sleeping(self) -> bool:
        return self.sleeps

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method, args))
        return [{"rank": 0}]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.calls.append("prefix")
        return self.resets_prefix_cache

    def reset_mm_cache(self) -> None:
        self.calls.append("mm")

    def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")

    def set_weight_version(self, version: str) -> None:
        self.calls.append(version)


class _Client:
    engine_ranks_managed = (0, 1)


def test_an_llm_is_asked_through_its_own_methods() -> None:
    llm = FakeLlm()
    engine = connect(llm)
    engine.check_ready()

    assert isinstance(engine, LlmEngine)
    assert not engine.is_in_process
    assert engine.num_workers() == 4
    assert engine.call("m", 1) == [{"rank": 0}]
    with engine.paused(timeout_s=1):
        engine.finish("v")
    engine.close()
    assert llm.calls == [("m", (1,)), "prefix", "mm", "encoder", "v"]


def test_an_in_process_llm_is_known_by_the_worker_that_it_drives() -> None:
    engine = connect(FakeLlm(is_in_process=True))

    assert engine.is_in_process
    assert engine.num_workers() == 1


def test_an_llm_that_cannot_be_updated_says_why() -> None:
    asleep, plain, stuck = FakeLlm(), FakeLlm(extension=""), FakeLlm()
    asleep.sleeps, stuck.resets_prefix_cache = True, False

    with pytest.raises(EngineAsleepError, match="wake_up"):
        connect(asleep).check_ready()
    with pytest.raises(UnsupportedError, match="--worker-extension-cls"):
        connect(plain).check_ready()
    with pytest.raises(EngineUnreachableError, match="reset_prefix_cache"):
        connect(stuck).finish("v")
