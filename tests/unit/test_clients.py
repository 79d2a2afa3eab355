"""Proves how a trainer asks an engine: what is refused, in which order, with which text.

The server is a plain HTTP server of the test with vLLM's routes.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from vllm_bucketsync.clients.base import (
    UPDATE_METHOD,
    PauseMode,
    UpdateAnswer,
    UpdateRequest,
    verdict,
    without_method,
)
from vllm_bucketsync.clients.connect import connect
from vllm_bucketsync.clients.http import HttpEngine
from vllm_bucketsync.clients.llm import LlmEngine
from vllm_bucketsync.errors import (
    AdapterError,
    ConfigError,
    EngineBusyError,
    EngineUnreachableError,
    UnsupportedError,
)
from vllm_bucketsync.messages import AdapterSpec
from vllm_bucketsync.sync import WeightSync

COMMITTED = {"rank": 0, "dp_index": 0, "state": "committed"}
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
        self.keys: list[str | None] = []
        config = {"parallel_config": {"worker_extension_cls": EXTENSION}}
        self.answers: dict[str, tuple[int, Any]] = {
            "/server_info": (200, {"vllm_config": config}),
            "/is_paused": (200, {"is_paused": False}),
            "/get_world_size": (200, {"world_size": 4}),
            "/collective_rpc": (200, {"results": [COMMITTED]}),
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
        if data := self.rfile.read(size):
            self.server.bodies.append(json.loads(data))
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.server.keys.append(self.headers.get("Authorization"))
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


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://h", "http://", "http://[::1", "/a/path"]
)
def test_what_is_no_base_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:8000"):
        connect(url)


@pytest.mark.parametrize("engine", [None, 7, object(), object])
def test_what_is_no_engine_is_refused_by_its_type(engine: object) -> None:
    with pytest.raises(ConfigError, match=f"{type(engine).__name__} is not an engine"):
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


def test_the_world_size_counts_data_parallel_replicas(server: Server, engine: HttpEngine) -> None:
    assert engine.num_workers() == 4
    assert server.asked == ["/v1/bucketsync/info", "/get_world_size?include_dp=true"]


def request(pause: PauseMode | None = PauseMode.WAIT, **changes: Any) -> UpdateRequest:
    offer = {"token": "t"}
    return UpdateRequest(offer=offer, version="7", pause=pause, timeout_s=5, **changes)


UPDATE = "/collective_rpc"
FINISH = [
    "/reset_prefix_cache?reset_running_requests=true",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/update_weight_version",
]


def test_an_update_in_development_mode_is_one_step_after_the_other(
    server: Server, engine: HttpEngine
) -> None:
    for mode in PauseMode:
        answer = engine.update(request(mode))

        assert answer == UpdateAnswer(results=[COMMITTED])
        assert server.asked[-8:] == [
            "/is_paused",
            f"/pause?mode={mode}",
            UPDATE,
            *FINISH,
            "/resume",
        ]
        rpc = {"method": UPDATE_METHOD, "args": [{"token": "t"}]}
        assert server.bodies[-2:] == [rpc, {"new_version": "7"}]


def test_a_dry_run_pauses_nothing_and_drops_nothing(server: Server, engine: HttpEngine) -> None:
    engine.update(request(None))

    assert server.asked[1:] == [UPDATE]


@pytest.mark.parametrize("resume_torn", [False, True])
@pytest.mark.parametrize("state", ["unchanged", "torn", "unknown"])
def test_an_engine_that_was_not_committed_goes_on_if_it_is_whole(
    server: Server, engine: HttpEngine, state: str, resume_torn: bool
) -> None:
    server.answers[UPDATE] = (200, {"results": [{"state": state}]})

    engine.update(request(resume_torn=resume_torn))

    goes_on = resume_torn or state == "unchanged"
    assert server.asked[2:] == ["/pause?mode=wait", UPDATE] + ["/resume"] * goes_on


def test_caches_of_an_engine_in_development_mode_go_with_the_first_worker_that_has_committed(
    server: Server, engine: HttpEngine
) -> None:
    server.answers[UPDATE] = (200, {"results": [COMMITTED, {"state": "unchanged"}]})

    engine.update(request())

    assert server.asked[2:] == ["/pause?mode=wait", UPDATE, *FINISH[:3]]


def test_an_engine_that_cannot_be_paused_is_let_go_on(server: Server, engine: HttpEngine) -> None:
    server.answers["/pause"] = (500, {"error": "no"})

    with pytest.raises(EngineUnreachableError, match="/pause answered 500"):
        engine.update(request())
    assert server.asked[2:] == ["/pause?mode=wait", "/resume"]


def test_a_server_without_weight_versions_is_served_as_well(
    server: Server, engine: HttpEngine
) -> None:
    del server.answers["/update_weight_version"]

    assert engine.update(request()).drops_caches


def test_a_prefix_cache_that_could_not_be_reset_is_said(server: Server, engine: HttpEngine) -> None:
    server.answers["/reset_prefix_cache"] = (200, {"success": False})

    assert not engine.update(request()).drops_caches


def test_our_route_is_used_where_there_is_one_and_sees_an_update_through(
    server: Server,
) -> None:
    info = {"num_workers": 3, "worker_extension_cls": EXTENSION}
    server.answers = {
        "/v1/bucketsync/info": (200, info),
        "/v1/bucketsync/update": (200, {"results": [COMMITTED], "drops_caches": True}),
        "/v1/bucketsync/status": (200, {"results": [{"rank": 0}]}),
        "/v1/bucketsync/release": (200, {"results": [{"rank": 0}]}),
    }
    engine = HttpEngine(server.url, api_key="secret")
    engine.check_ready()

    assert engine.name == f"{server.url} (bucketsync_http)"
    assert engine.num_workers() == 3
    assert engine.update(request(PauseMode.KEEP)) == UpdateAnswer(results=[COMMITTED])
    body = {"offer": {"token": "t"}, "version": "7", "pause": "keep", "resume_torn": False}
    assert server.bodies == [body]
    assert engine.call("bucketsync_status") == engine.call("bucketsync_release") == [{"rank": 0}]
    assert set(server.keys) == {"Bearer secret"}
    engine.close()


def test_a_server_at_work_on_another_update_is_busy(server: Server, engine: HttpEngine) -> None:
    info = {"num_workers": 3, "worker_extension_cls": EXTENSION}
    server.answers["/v1/bucketsync/info"] = (200, info)
    server.answers["/v1/bucketsync/update"] = (409, {"detail": "another update runs"})

    with pytest.raises(EngineBusyError, match="another update runs"):
        engine.update(request())


def test_a_server_below_a_root_path_is_asked_there(server: Server) -> None:
    server.answers = {
        "/models/one/v1/bucketsync/info": (200, {"num_workers": 2, "worker_extension_cls": "x"})
    }
    engine = HttpEngine(f"{server.url}/models/one/")

    assert engine.num_workers() == 2
    assert engine.name == f"{server.url}/models/one (bucketsync_http)"
    engine.close()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1//"])
@pytest.mark.parametrize("root", ["", "/models/one", "/v1x"])
def test_a_url_may_end_as_openai_s_clients_have_it(server: Server, root: str, end: str) -> None:
    server.answers = {
        f"{root}/v1/bucketsync/info": (200, {"num_workers": 2, "worker_extension_cls": "x"})
    }
    engine = HttpEngine(f"{server.url}{root}{end}")

    assert engine.num_workers() == 2
    assert engine.name == f"{server.url}{root} (bucketsync_http)"
    engine.close()


@pytest.mark.parametrize(
    ("given", "sent"), [(None, "Bearer of-the-environment"), ("given", "Bearer given"), ("", None)]
)
def test_the_environment_s_key_is_taken_where_none_is_given(
    server: Server, monkeypatch: pytest.MonkeyPatch, given: str | None, sent: str | None
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")

    with WeightSync(server.url, api_key=given) as sync:
        sync.status()

    assert set(server.keys) == {sent}


def test_a_server_says_of_itself_what_its_routes_do(server: Server, engine: HttpEngine) -> None:
    assert engine.facts() == {"worker_extension_cls": EXTENSION, "is_paused": False}

    info = {"num_workers": 3, "worker_extension_cls": EXTENSION, "is_updating": True}
    server.answers["/v1/bucketsync/info"] = (200, info)
    server.answers["/v1/bucketsync/engine"] = (200, {"is_paused": True, "weight_version": "7"})
    ours = HttpEngine(server.url)
    assert ours.facts() == info | {"is_paused": True, "weight_version": "7"}
    ours.close()


def test_a_wrong_key_says_what_to_pass(server: Server, engine: HttpEngine) -> None:
    server.answers["/v1/bucketsync/info"] = (401, {"error": "Unauthorized"})

    with pytest.raises(EngineUnreachableError, match="api_key= or in VLLM_API_KEY"):
        engine.check_ready()


def test_a_server_behind_a_unix_socket_is_asked() -> None:
    path = Path(tempfile.mkdtemp(prefix="bs-")) / "s"

    class UnixServer(Server):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            self.socket.bind(str(path))

    found = UnixServer()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    engine = HttpEngine(f"unix://{path}")
    try:
        engine.check_ready()
        assert engine.num_workers() == 4
        assert engine.name == f"unix://{path} (development mode)"
    finally:
        engine.close()
        found.shutdown()
        thread.join(5)
        found.server_close()
        path.unlink()
        path.parent.rmdir()


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
        self.is_busy = False
        self.dp_group: object | None = None
        self.cache_config = SimpleNamespace(enable_prefix_caching=True)
        self.results = [COMMITTED]
        if is_in_process:
            self.driver_worker = object()
            self.model_executor = self
            self.engine_core: Any = self
        else:
            self.engine_core = _Client()

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        return self.results

    def has_unfinished_requests(self) -> bool:
        return self.is_busy

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
    [engine] = connect(llm)
    engine.check_ready()

    assert isinstance(engine, LlmEngine)
    assert not engine.is_in_process
    assert engine.num_workers() == 4
    assert engine.call("m") == [COMMITTED]
    assert engine.update(request()) == UpdateAnswer(results=[COMMITTED])
    engine.close()
    update = (UPDATE_METHOD, ({"token": "t"},))
    assert llm.calls == [("m", ()), "prefix", update, "mm", "encoder", "7"]


def test_the_prefix_cache_goes_last_where_requests_could_fill_it_again() -> None:
    busy, replica = FakeLlm(), FakeLlm()
    busy.is_busy = True
    # A replica would have to ask the others whether it is idle.
    replica.dp_group = object()

    for llm in (busy, replica):
        connect(llm)[0].update(request())

        assert llm.calls == [(UPDATE_METHOD, ({"token": "t"},)), "prefix", "mm", "encoder", "7"]


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_prefix_cache_that_there_is_not_is_not_asked_about_while_nothing_runs(
    is_busy: bool,
) -> None:
    llm = FakeLlm()
    llm.cache_config = SimpleNamespace(enable_prefix_caching=False)
    llm.is_busy = is_busy

    assert connect(llm)[0].update(request()).drops_caches
    # Requests that run have to be computed anew.
    assert ("prefix" in llm.calls) is is_busy


def test_a_dry_run_drops_no_cache() -> None:
    llm = FakeLlm()
    llm.results = [UNCHANGED]

    connect(llm)[0].update(dataclasses.replace(request(), pause=None))

    assert llm.calls == [(UPDATE_METHOD, ({"token": "t"},))]


def test_an_in_process_llm_is_known_by_the_worker_that_it_drives() -> None:
    [engine] = connect(FakeLlm(is_in_process=True))

    assert engine.is_in_process
    assert engine.num_workers() == 1


def test_an_llm_that_cannot_be_updated_says_why() -> None:
    plain, stuck = FakeLlm(extension=""), FakeLlm()
    stuck.resets_prefix_cache = False

    with pytest.raises(UnsupportedError, match="--worker-extension-cls"):
        connect(plain)[0].check_ready()
    assert not connect(stuck)[0].update(request()).drops_caches


UNCHANGED = COMMITTED | {"state": "unchanged"}


@pytest.mark.parametrize(
    ("results", "dropped"),
    [
        ([COMMITTED, UNCHANGED], ["prefix", "mm", "encoder"]),
        ([COMMITTED, None], ["prefix", "mm", "encoder"]),
        ([UNCHANGED, UNCHANGED], []),
    ],
)
def test_caches_go_as_soon_as_one_worker_has_what_is_new_and_the_version_stays(
    results: list[Any], dropped: list[str]
) -> None:
    llm = FakeLlm()
    llm.is_busy = True
    llm.results = results

    connect(llm)[0].update(request())

    assert llm.calls[1:] == dropped


def test_an_engine_holds_what_all_of_its_workers_hold_or_is_torn_or_unknown() -> None:
    def of(*states: str | None) -> str:
        return verdict([{"state": state} for state in states])

    assert of("committed", "committed") == "committed"
    assert of("unchanged") == "unchanged"
    assert of("committed", "torn") == of("torn", "unchanged") == "torn"
    assert of("committed", "unchanged") == of("unchanged", None, "committed") == "torn"
    assert of() == of(None) == of("unchanged", None) == of("committed", None) == "unknown"
    assert verdict([None, "boom"]) == "unknown"


ADAPTER = AdapterSpec(name="policy", lora_int_id=1 << 30, lora_path="bucketsync://policy@7")


def adapter_request() -> UpdateRequest:
    return dataclasses.replace(request(), adapter=ADAPTER)


def test_an_adapter_is_another_method_and_leaves_the_weights_version() -> None:
    assert (request().method, request().weight_version) == ("update_weights_from_bucket", "7")
    assert adapter_request().method == "update_lora_from_bucket"
    assert adapter_request().weight_version is None


def test_our_route_is_told_the_adapter_s_name_and_refuses_in_its_own_words(server: Server) -> None:
    info = {"num_workers": 3, "worker_extension_cls": EXTENSION}
    wire = {"code": "adapter", "message": "taken", "details": {"adapter": "policy"}}
    removed = {"rank": 0, "dp_index": 0, "was_held": True, "error": None}
    server.answers = {
        "/v1/bucketsync/info": (200, info),
        "/v1/bucketsync/update": (200, {"results": [COMMITTED], "drops_caches": True}),
        "/v1/bucketsync/remove_lora": (200, {"results": [removed]}),
    }
    engine = HttpEngine(server.url)
    engine.update(adapter_request())
    assert engine.remove_adapter("policy", timeout_s=2.0) == [removed]
    assert server.bodies[0]["adapter"] == {
        "name": "policy",
        "lora_int_id": 1 << 30,
        "lora_path": "bucketsync://policy@7",
        "config": "",
    }
    assert server.bodies[1] == {"name": "policy", "timeout_s": 2.0}

    server.answers["/v1/bucketsync/update"] = (422, {"detail": wire})
    with pytest.raises(AdapterError, match="taken") as caught:
        engine.update(adapter_request())
    assert caught.value.adapter == "policy"
    engine.close()


def test_development_mode_takes_no_adapter_and_is_not_paused_for_it(
    server: Server, engine: HttpEngine
) -> None:
    for ask in (
        lambda: engine.update(adapter_request()),
        lambda: engine.remove_adapter("policy", timeout_s=1.0),
    ):
        with pytest.raises(UnsupportedError, match="VLLM_PLUGINS=bucketsync,bucketsync_http"):
            ask()
    assert not any("pause" in path for path in server.asked)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://h:8000", "http://h:8000/"),
        ("http://h", "HTTP://H:80"),
        ("http://localhost:1/root", "http://127.0.0.1:1/root/"),
        ("unix:///run/vllm.sock", "unix:///run/vllm.sock"),
    ],
)
def test_an_engine_that_is_named_twice_is_refused(first: str, second: str) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        connect([first, "http://other:1", second])


def test_engines_that_differ_in_port_path_or_scheme_are_two() -> None:
    urls = ["http://h:1", "http://h:2", "http://h:1/a", "https://h:1", "unix:///a", "unix:///b"]

    assert len(connect(urls)) == len(urls)
    assert len(connect([FakeLlm(), FakeLlm()])) == 2
    with pytest.raises(ConfigError, match="named twice"):
        connect([llm := FakeLlm(), llm])
