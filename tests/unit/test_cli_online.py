"""``push`` and ``status``: what they ask for, what they print, and what they end with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from vllm_bucketsync import cli, sync
from vllm_bucketsync.cli import status
from vllm_bucketsync.cli.exits import ExitCode
from vllm_bucketsync.cli.push import PAUSE_MODES, VERIFY_MODES
from vllm_bucketsync.cli.servers import PLUGINS, plugins
from vllm_bucketsync.cli.tables import status_table
from vllm_bucketsync.clients.base import PauseMode
from vllm_bucketsync.config import Verify
from vllm_bucketsync.doctor import server
from vllm_bucketsync.errors import (
    BucketSyncError,
    EngineBusyError,
    EngineState,
    SourceError,
    UnknownTensorError,
    UnsupportedError,
)
from vllm_bucketsync.report import PushReport, WorkerReport

URL = "http://127.0.0.1:8000"
WORKER = WorkerReport(
    engine=0,
    rank=0,
    dp_index=0,
    pid=4711,
    device="cpu",
    num_direct=2,
    direct_bytes=10,
    num_processed=3,
    processed_bytes=20,
    num_loaded=1,
    loaded_bytes=4,
    process_s=0.1,
    load_s=0.1,
    wait_s=0.0,
    stages_ms={"loading": 100.0},
    cloned_bytes=0,
    notes=("one note",),
)
REPORT = PushReport(
    engines=(f"{URL} (bucketsync_http)",),
    update_id="0123",
    version="step-[1]",
    is_dry_run=False,
    num_tensors=2,
    num_bytes=1024,
    num_buckets=1,
    seconds=0.5,
    transport="shm",
    transport_reason="another process [of this host]",
    slot_size_bytes=2048,
    zero_copy_bytes=0,
    skipped=("rope.inv_freq",),
    stages_ms={"streaming": 400.0},
    workers=(WORKER,),
)
STATUS = {
    "engine": 0,
    "rank": 0,
    "dp_index": 0,
    "pid": 4711,
    "device": "cpu",
    "version": "step-1",
    "is_torn": False,
    "num_updates": 3,
    "num_failures": 1,
}


class Fake:
    """Stands for ``WeightSync``, of which a command makes one.

    Attributes:
        made: The arguments that it was made with.
        pushed: The arguments of its pushes.
        act: What a push does before it returns ``report``.
    """

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.pushed: list[dict[str, Any]] = []
        self.act: Callable[[dict[str, Any]], None] = lambda _: None
        self.report = REPORT
        self.workers: list[dict[str, Any]] = [STATUS]
        self.held: dict[str, str] = {}
        self.is_closed = False

    def __call__(self, engine: object, **options: Any) -> Self:
        self.made = {"engine": engine, **options}
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def push_lora(self, source: object, **options: Any) -> PushReport:
        return self.push(source, **options)

    def push(self, source: object, **options: Any) -> PushReport:
        self.pushed.append({"source": source, **options})
        self.act(options)
        return self.report

    def status(self) -> list[dict[str, Any]]:
        return self.workers


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    monkeypatch.setattr(server, "held_back", lambda url, api_key: found.held.get(url, ""))
    monkeypatch.setattr(sync, "WeightSync", found)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return found


@pytest.fixture
def push(tmp_path: Path) -> list[str]:
    (tmp_path / "step-1").mkdir()
    return ["push", str(tmp_path / "step-1"), "--url", URL]


def test_a_push_is_named_after_its_folder_and_waits_for_requests(
    fake: Fake, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(push) == ExitCode.OK

    assert fake.made == {"engine": [URL], "api_key": None}
    (options,) = fake.pushed
    del options["progress"]
    folder = Path(push[1])
    assert options == {
        "source": folder,
        "version": "step-1",
        "require_newer": False,
        "partial": [],
        "rename": None,
        "dry_run": False,
        "pause": "wait",
        "atomic": False,
        "verify": "none",
        "trace": None,
    }
    assert fake.is_closed
    out, err = capsys.readouterr()
    begun, done = (line for line in err.splitlines() if line.startswith("push "))
    assert begun == f"push {folder} as 'step-1' …"
    assert done == f"push {folder} as 'step-1': done in 0.0 s"
    for text in ("1,024", "(bucketsync_http)", "'step-[1]'", "[of this host]", "one note"):
        assert text in out


def test_every_option_of_a_push_is_handed_on(fake: Fake, push: list[str]) -> None:
    other = ["--url", "unix:///run/vllm"]

    patterns = ["--partial", "*.norm.weight", "--partial", "lm_head.*"]
    more = ["--atomic", "--verify", "digest", "--trace", "t.json", "--require-newer", *patterns]
    cli.main([*push, *other, "--version", "7", "--pause", "keep", "--dry-run", *more])

    assert fake.made == {"engine": [URL, "unix:///run/vllm"], "api_key": None}
    assert (fake.pushed[0]["version"], fake.pushed[0]["pause"]) == ("7", "keep")
    assert fake.pushed[0]["partial"] == ["*.norm.weight", "lm_head.*"]
    assert fake.pushed[0]["dry_run"]
    assert fake.pushed[0]["trace"] == Path("t.json")
    assert (fake.pushed[0]["atomic"], fake.pushed[0]["verify"]) == (True, "digest")
    assert fake.pushed[0]["require_newer"]

    cli.main([*push, "--api-key", "given"])

    assert fake.made["api_key"] == "given"


def test_an_adapter_is_pushed_under_its_name(fake: Fake, push: list[str]) -> None:
    folder = push[1]
    arguments = ["push-lora", folder, "--url", URL, "--name", "policy"]

    assert cli.main(arguments) == ExitCode.OK
    more = ["--verify", "digest", "--trace", "t.json", "--partial", "visual.*"]
    more += ["--version", "7", "--pause", "keep", "--dry-run"]
    assert cli.main([*arguments, *more]) == ExitCode.OK

    named = [{key: one[key] for key in ("source", "name", "version")} for one in fake.pushed]
    assert named == [
        {"source": Path(folder), "name": "policy", "version": version}
        for version in ("step-1", "7")
    ]
    assert (fake.pushed[1]["pause"], fake.pushed[1]["dry_run"]) == ("keep", True)
    assert [one["trace"] for one in fake.pushed] == [None, Path("t.json")]
    assert [one["partial"] for one in fake.pushed] == [[], ["visual.*"]]
    assert [one["verify"] for one in fake.pushed] == ["none", "digest"]
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--atomic"])
    nowhere = ["push-lora", "/no/such/folder", "--url", URL, "--name", "policy"]
    assert cli.main(nowhere) == ExitCode.USAGE


def test_the_pause_modes_are_those_of_push() -> None:
    assert tuple(PauseMode) == PAUSE_MODES


def test_the_ways_to_verify_are_those_of_push() -> None:
    assert tuple(Verify) == VERIFY_MODES


def test_what_was_staged_and_compared_is_shown(
    fake: Fake, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    worker = replace(
        WORKER,
        staged_bytes=4096,
        staged_on="pinned [host] memory",
        verified_bytes=2048,
        num_direct_verified=2,
        num_processed_verified=3,
        num_unverified=7,
    )
    fake.report = replace(REPORT, workers=(worker, replace(worker, rank=1, num_unverified=0)))

    cli.main(push)

    out = capsys.readouterr().out
    assert "4,096 bytes in pinned [host] memory" in out
    assert "2,048 bytes, 5 modules; 7 tensors were not compared" in out
    assert out.count("not compared") == 1
    assert out.count("verified by rank") == 2


def test_json_is_all_that_stdout_gets(
    fake: Fake, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*push, "--json"]) == ExitCode.OK

    report = REPORT.as_dict()
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report))


def test_a_dry_run_says_that_nothing_was_written(
    fake: Fake, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.report = replace(REPORT, is_dry_run=True, workers=())

    cli.main([*push, "--dry-run"])

    out, err = capsys.readouterr()
    assert "The dry run of" in out
    assert "nothing; it fits the engine" in out
    assert err.startswith("check ")


def test_a_single_file_is_pushed_and_named_without_its_ending(fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "step-7.safetensors"
    file.touch()

    assert cli.main(["push", str(file), "--url", URL]) == ExitCode.OK

    assert (fake.pushed[0]["source"], fake.pushed[0]["version"]) == (file, "step-7")


def test_an_error_is_told_in_the_words_of_the_command_line(
    fake: Fake, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def act(_: object) -> None:
        raise SourceError("x is missing; name it in partial=, or raise connect_timeout_s")

    fake.act = act

    assert cli.main(push) == ExitCode.FAILED
    told = "name it in --partial, or raise VLLM_BUCKETSYNC_CONNECT_TIMEOUT_S"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "renamed"),
    [
        (["--strip-prefix", "actor."], {"actor.a": "a", "b": "b", "x.actor.a": "x.actor.a"}),
        (["--rename", "actor.=model."], {"actor.a": "model.a", "b": "b"}),
        (["--rename", "a.b.=c.", "--strip-prefix", "a."], {"a.b.w": "c.w", "a.w": "w"}),
        (["--strip-prefix", "a.", "--rename", "a.b.=c."], {"a.b.w": "b.w"}),
    ],
)
@pytest.mark.parametrize("command", ["push", "push-lora"])
def test_prefixes_of_names_are_replaced_by_the_first_that_fits(
    fake: Fake, push: list[str], command: str, options: list[str], renamed: dict[str, str]
) -> None:
    named = ["--name", "policy"] if command == "push-lora" else []

    assert cli.main([command, *push[1:], *named, *options]) == ExitCode.OK

    rename = fake.pushed[0]["rename"]
    assert {name: rename(name) for name in renamed} == renamed


@pytest.mark.parametrize("pair", ["actor.", "=model.", ""])
def test_a_rename_is_a_pair(
    fake: Fake, push: list[str], pair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*push, "--rename", pair])

    assert ended.value.code == ExitCode.USAGE
    assert "is not OLD=NEW, as in actor.=model." in capsys.readouterr().err
    assert fake.pushed == []


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("option", ["-q", "--quiet"])
def test_quiet_says_nothing_where_all_is_well(
    fake: Fake, push: list[str], option: str, before: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([option, *push] if before else [*push, option]) == ExitCode.OK
    assert capsys.readouterr() == ("", "")


def test_quiet_keeps_json_and_errors(
    fake: Fake, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*push, "-q", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["version"] == REPORT.version

    def act(_: object) -> None:
        raise SourceError("it is empty")

    fake.act = act
    assert cli.main([*push, "-q"]) == ExitCode.FAILED
    assert "it is empty" in capsys.readouterr().err


def test_nothing_is_coloured_that_goes_into_a_pipe(
    fake: Fake, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.workers = [STATUS | {"is_torn": True}]

    cli.main(push)
    cli.main(["status", "--url", URL])

    assert "\x1b" not in "".join(capsys.readouterr())


def test_a_folder_that_is_none_is_a_usage_error_and_nobody_is_asked(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["push", "/no/such/folder", "--url", URL]) == ExitCode.USAGE

    assert fake.made == {}
    assert "'/no/such/folder' does not exist on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "state", "code", "holds"),
    [
        (SourceError("it is empty"), None, ExitCode.FAILED, "no update had begun"),
        (UnknownTensorError("no x"), EngineState.UNCHANGED, ExitCode.FAILED, "what it held before"),
        (UnsupportedError("old"), EngineState.UNCHANGED, ExitCode.UNAVAILABLE, "held before"),
        (
            BucketSyncError("gone"),
            EngineState.TORN,
            ExitCode.FAILED,
            "complete push repairs it",
        ),
        (EngineBusyError("hm"), EngineState.COMMITTED, ExitCode.FAILED, "has the new weights all"),
        (EngineBusyError("hm"), EngineState.UNKNOWN, ExitCode.FAILED, "vllm-bucketsync status"),
    ],
)
def test_an_error_ends_with_what_the_engine_holds(
    fake: Fake,
    push: list[str],
    error: BucketSyncError,
    state: EngineState | None,
    code: ExitCode,
    holds: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def act(_: object) -> None:
        error.engine_state = state
        raise error

    fake.act = act

    assert cli.main(push) == code
    out, err = capsys.readouterr()
    assert out == ""
    _, line = err.splitlines()
    assert error.message in line
    assert holds in line
    assert code is not ExitCode.FAILED or f"{type(error).__name__}: " in line


@pytest.mark.parametrize("command", ["push", "status"])
def test_a_server_that_is_not_there_is_an_error(
    command: str, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = push if command == "push" else ["status", "--url", URL]

    assert cli.main([*arguments[:-1], "http://127.0.0.1:1"]) == ExitCode.FAILED
    assert "is the server up" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["push", "status"])
def test_a_url_that_is_none_is_a_usage_error(
    command: str, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = push if command == "push" else ["status", "--url", URL]

    assert cli.main([*arguments[:-1], "localhost:8000"]) == ExitCode.USAGE
    assert "'localhost:8000' is not a server's URL" in capsys.readouterr().err


def test_ctrl_c_says_what_push_noted(
    fake: Fake, push: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def act(_: object) -> None:
        error = KeyboardInterrupt()
        error.add_note("the engine's weights are torn")
        raise error

    fake.act = act

    assert cli.main(push) == ExitCode.INTERRUPTED
    assert "interrupted; the engine's weights are torn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("is_late", "text"), [(False, "no update had begun"), (True, "vllm-bucketsync status")]
)
def test_ctrl_c_where_push_notes_nothing_goes_by_what_was_sent(
    fake: Fake,
    push: list[str],
    is_late: bool,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def act(options: dict[str, Any]) -> None:
        if is_late:
            options["progress"](1, 2)
        raise KeyboardInterrupt

    fake.act = act

    assert cli.main(push) == ExitCode.INTERRUPTED
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_as_ctrl_c_and_its_handler_comes_back(
    fake: Fake, push: list[str], number: signal.Signals
) -> None:
    fake.act = lambda _: os.kill(os.getpid(), number)
    # Whoever started this may ignore hangups.
    previous = signal.signal(number, signal.SIG_DFL)
    try:
        assert cli.main(push) == ExitCode.INTERRUPTED
        assert signal.getsignal(number) is signal.SIG_DFL
        assert fake.is_closed
    finally:
        signal.signal(number, previous)


def test_a_hangup_that_is_ignored_stays_ignored(fake: Fake, push: list[str]) -> None:
    fake.act = lambda _: os.kill(os.getpid(), signal.SIGHUP)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(push) == ExitCode.OK
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


WORKERS = [
    STATUS
    | {
        "transport": "cuda_ipc",
        "version": "run-17/checkpoint-with-a-long-name-000100",
        "adapters": [{"name": "policy", "version": "7"}, {"name": "judge", "version": "1"}],
    },
    STATUS | {"engine": 1, "dp_index": 2, "version": None, "transport": None},
]


def test_status_in_a_pipe_is_a_line_for_each_worker_with_nothing_cut(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.workers = WORKERS

    assert cli.main(["status", "--url", URL, "--url", "http://other"]) == ExitCode.OK

    assert fake.made["engine"] == [URL, "http://other"]
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "engine 0  dp 0  rank 0  pid 4711  device cpu  version run-17/checkpoint-with-a-"
        "long-name-000100  state whole  updates 3  failed 1  transport cuda_ipc  "
        "adapters policy@7, judge@1"
    )
    assert second == (
        "engine 1  dp 2  rank 0  pid 4711  device cpu  version initial  state whole  "
        "updates 3  failed 1"
    )


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("workers", [WORKERS, [STATUS]], ids=["long names", "short names"])
def test_status_on_a_terminal_is_a_table_where_that_fits_and_nothing_is_cut(
    width: int, workers: list[dict[str, Any]]
) -> None:
    console = Console(width=width, force_terminal=True, color_system=None, record=True)

    status.show(console, workers)

    text = console.export_text()
    is_table = "What the workers hold" in text
    assert is_table == (width == 200 or len(workers) == 1)
    assert "…" not in text
    assert not is_table or max(map(len, text.splitlines())) <= width
    names = ["whole", workers[0]["version"]]
    names += ["policy@7, judge@1", "cuda_ipc"] if len(workers) > 1 else []
    assert all(name in text for name in names)


def test_status_of_one_engine_without_replicas_leaves_their_columns_out() -> None:
    told = [str(column.header) for column in status_table([STATUS, STATUS | {"rank": 1}]).columns]

    assert told[:3] == ["rank", "pid", "device"]


@pytest.mark.parametrize(
    ("what", "state"),
    [
        ({"is_torn": True}, "torn"),
        ({"is_asleep": True}, "asleep"),
        ({"left_as_is": ["*.norm"]}, "partly older"),
    ],
)
def test_status_names_the_state_of_a_worker(
    fake: Fake, what: dict[str, Any], state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.workers = [STATUS | what]

    cli.main(["status", "--url", URL])

    assert f"state {state}  " in capsys.readouterr().out


def test_status_says_which_server_holds_requests_back(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.held = {"http://other": "it is paused"}

    assert cli.main(["status", "--url", URL, "--url", "http://other"]) == ExitCode.OK
    assert capsys.readouterr().err == "http://other: requests are held back: it is paused\n"


def test_status_as_json_is_what_the_workers_say(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--url", URL, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == [STATUS]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"rank": 1, "is_torn": True}, "rank 1 of engine 0 holds parts of two sets"),
        ({"rank": 1, "version": "step-2"}, "different weights: 'step-1', 'step-2'"),
        ({"rank": 1, "version": None}, "different weights: 'step-1', None"),
    ],
)
def test_status_fails_where_an_engine_is_not_whole(
    fake: Fake, second: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.workers = [STATUS, STATUS | second]

    assert cli.main(["status", "--url", URL]) == ExitCode.FAILED
    out, err = capsys.readouterr()
    assert "4711" in out
    assert text in err


def test_engines_may_hold_different_versions(fake: Fake) -> None:
    fake.workers = [STATUS, STATUS | {"engine": 1, "version": "another"}]

    assert cli.main(["status", "--url", URL]) == ExitCode.OK


def test_a_server_loads_our_plugins_beside_those_of_the_user() -> None:
    assert plugins("other, bucketsync") == "other,bucketsync,bucketsync_http"
    assert plugins("") == ",".join(PLUGINS)


def test_a_server_loads_what_it_would_load_without_a_list() -> None:
    named = plugins(None).split(",")

    assert set(PLUGINS) <= set(named)
    assert len(named) == len(set(named))
