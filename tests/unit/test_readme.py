"""README's commands are those that CI runs, and its programs use what there is."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import readme

import vllm_bucketsync
from vllm_bucketsync import cli, config, endpoint, receiver, serve, served_metrics, timeline
from vllm_bucketsync.cli import servers
from vllm_bucketsync.cli.exits import ExitCode
from vllm_bucketsync.clients.base import EXTENSION
from vllm_bucketsync.report import AdapterReport, PushReport, WorkerReport
from vllm_bucketsync.sinks import DiscardSink
from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.update import Phase

ROOT = Path(__file__).parents[2]
TEXT = readme.TEXT
CI_LINES = (ROOT / ".ci" / "run").read_text().splitlines()
VENV_LINES = ["python3 -m venv .venv", ". .venv/bin/activate"]


def blocks(language: str, section: str) -> list[str]:
    body = TEXT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"```{language}\n(.*?)```", body, flags=re.DOTALL)


def commands(block: str) -> list[str]:
    return [command.strip() for command in block.strip().split("&&")]


def test_the_two_commands_are_one_line_each() -> None:
    assert [block.count("\n") for block in blocks("sh", "Try it")] == [1, 1]


def test_the_test_command_is_what_ci_runs_after_the_same_installation() -> None:
    _, tests = blocks("sh", "Try it")

    assert commands(tests)[:2] == VENV_LINES
    assert commands(tests)[-1] == "bash .ci/test"
    steps = [line for line in CI_LINES if line in commands(tests)]
    assert steps == commands(tests)[2:]


def test_the_demo_command_installs_what_ci_does_and_starts_the_demo() -> None:
    demo, _ = blocks("sh", "Try it")

    *install, start = commands(demo)
    assert start == "vllm-bucketsync demo"
    assert [shlex.split(line.replace(",test", "")) for line in CI_LINES if ".[cpu" in line] == [
        shlex.split(install[2])
    ]
    assert install[3] in CI_LINES


PROGRAMS, SHELL = readme.blocks("python"), readme.blocks("sh")
_SERVER = "engine/test_readme_server.py"
_PROGRAM = "engine/test_readme_program.py"
# The test that runs each block, by what the block begins with.
RUN_BY = {
    "from vllm_bucketsync import WeightSync\n\nwith WeightSync(": (
        f"{_SERVER}::test_the_program_at_the_top_pushes_a_checkpoint"
    ),
    # CI runs these lines themselves: the tests say so.
    "python3 -m venv .venv && . .venv/bin/activate && pip install '.[cpu]'": (
        "unit/test_readme.py::test_the_demo_command_installs_what_ci_does_and_starts_the_demo"
    ),
    "python3 -m venv .venv && . .venv/bin/activate && pip install '.[cpu,test]'": (
        "unit/test_readme.py::test_the_test_command_is_what_ci_runs_after_the_same_installation"
    ),
    "python3 -m venv .venv && . .venv/bin/activate && pip install -e": (
        "unit/test_readme.py::test_the_commands_for_development_are_those_of_ci"
    ),
    "export VLLM_API_KEY=": f"{_SERVER}::served",
    "from transformers import AutoModelForCausalLM\n": (
        f"{_SERVER}::test_the_trainer_s_program_pushes_its_model_and_prints_reports"
    ),
    "from vllm import LLM": (
        f"{_PROGRAM}::test_the_program_with_an_llm_object_generates_with_the_new_weights"
    ),
    "from peft import": f"{_PROGRAM}::test_the_program_with_an_adapter_generates_with_it",
    "from vllm_bucketsync import WeightSync\n\nservers": (
        f"{_SERVER}::test_the_program_for_several_servers_updates_both"
    ),
    "from vllm_bucketsync import WeightSync\n\n\nasync def": (
        f"{_PROGRAM}::test_the_async_program_updates_an_async_engine"
    ),
    # The adapter's form differs in a switch, which the unit tests follow to the trainer.
    "vllm-bucketsync example rl\n": (
        "engine/test_example.py::test_the_command_trains_draws_and_leaves_no_process_behind"
    ),
    "vllm-bucketsync push checkpoints/step-100 --url http://127.0.0.1:8000 --dry-run": (
        f"{_SERVER}::test_the_commands_for_servers_check_push_and_tell"
    ),
    "vllm-bucketsync push checkpoints/step-100 --url http://127.0.0.1:8000 --trace": (
        f"{_SERVER}::test_the_command_for_a_trace_writes_one"
    ),
    "vllm-bucketsync doctor\n": f"{_SERVER}::test_the_doctor_s_commands_find_nothing_wrong",
    # With fewer bytes and models; those for a GPU in gpu/test_bench.py.
    "vllm-bucketsync bench transfer": (
        "protocol/test_bench.py::test_updates_into_each_target_are_traced_and_drawn"
    ),
}
OUR_COMMANDS = [
    line for block in SHELL for line in block.splitlines() if line.startswith("vllm-bucketsync ")
]


def test_every_block_is_run_by_a_test_that_exists() -> None:
    claims = {
        block: [test for beginning, test in RUN_BY.items() if block.startswith(beginning)]
        for block in (*PROGRAMS, *SHELL)
    }

    assert [block for block, tests in claims.items() if len(tests) != 1] == []
    claimed = {test for tests in claims.values() for test in tests}
    assert claimed == set(RUN_BY.values())
    for test in claimed:
        file, name = test.split("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in defined, test
    # No other block than these two kinds, and the drawing.
    assert TEXT.count("\n```") == 2 * (len(PROGRAMS) + len(SHELL) + 1)


def test_the_commands_for_development_are_those_of_ci() -> None:
    (block,) = blocks("sh", "Development")
    install, tests, checks, everything, *_ = block.strip().splitlines()

    assert commands(install)[:2] == VENV_LINES
    assert commands(install)[3] in CI_LINES
    assert tests.split("#")[0].split() == ["bash", ".ci/test", "tests/unit"]
    assert all(command in CI_LINES for command in commands(checks))
    assert (ROOT / everything.split("#")[0].split()[1]).is_file()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_short_and_imports_public_names(program: str) -> None:
    assert program.count("\n") < 30
    imported = [
        alias.name
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and node.module == "vllm_bucketsync"
        for alias in node.names
    ]
    assert imported
    assert set(imported) <= set(vllm_bucketsync.__all__)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_uses_what_there_is_as_it_is_meant(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = mock.create_autospec(WeightSync)
    double.return_value.__enter__.return_value = double.return_value
    monkeypatch.setattr(vllm_bucketsync, "WeightSync", double)
    for module in ("peft", "transformers", "vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, module, mock.MagicMock())
    names: dict[str, Any] = {"__name__": "__main__"}

    exec(program, names)  # noqa: S102 - README's own
    if "train" in names:
        asyncio.run(names["train"](mock.Mock(), mock.Mock()))

    sync = double.return_value
    # apush takes what push takes.
    calls: dict[Any, list[Any]] = {
        WeightSync.push: sync.push.call_args_list + sync.apush.call_args_list,
        WeightSync.push_lora: sync.push_lora.call_args_list + sync.apush_lora.call_args_list,
    }
    assert any(calls.values())
    for method, found in calls.items():
        signature = inspect.signature(method)
        assert all(signature.bind(None, *call.args, **call.kwargs) for call in found)


def test_every_shell_command_is_one_that_is_checked_here() -> None:
    known = (
        *("python3 -m venv", "export VLLM_API_KEY=", "VLLM_PLUGINS=", "bash .ci/", "ruff check"),
        *("python tests/harness", "pip install nox && nox -f tests/matrix/noxfile.py"),
    )
    lines = [line for block in SHELL for line in block.splitlines()]

    unknown = [line for line in lines if not line.startswith(known) and line not in OUR_COMMANDS]
    assert unknown == []


@pytest.mark.parametrize("command", OUR_COMMANDS)
def test_a_command_of_ours_can_be_parsed(command: str) -> None:
    _, *arguments = shlex.split(command)

    assert cli.parser().parse_args(arguments).command in cli.COMMANDS


def test_the_server_s_command_names_our_plugins_and_extension() -> None:
    (command,) = [line for block in SHELL for line in block.splitlines() if "vllm serve" in line]

    plugins, *arguments = shlex.split(command)
    assert plugins == f"VLLM_PLUGINS={','.join(servers.PLUGINS)}"
    assert arguments[-2:] == ["--worker-extension-cls", EXTENSION]
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert tuple(name for group in points.values() for name in group) == servers.PLUGINS


def test_every_metric_and_route_is_listed() -> None:
    metrics = re.findall(r"^\| `(vllm_bucketsync_\w+)` \|", TEXT, flags=re.MULTILINE)
    listed = re.findall(r"^\| `([A-Z]+) (/v1/\w+/\w+)` \|", TEXT, flags=re.MULTILINE)

    collectors = vars(served_metrics.metrics()).values()
    kinds = {"counter": "_total"}
    families = [next(iter(collector.collect())) for collector in collectors]
    assert metrics == [family.name + kinds.get(family.type, "") for family in families]
    routes = [(next(iter(r.methods)), r.path) for r in endpoint.router.routes]  # type: ignore[attr-defined]
    assert listed == routes


@pytest.mark.parametrize("name", ["push", "push_lora"])
def test_every_argument_of_push_is_listed(name: str) -> None:
    section = TEXT.split(f"| argument of `{name}` |", 1)[1].split("\n\n", 1)[0]

    listed = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert listed == list(inspect.signature(getattr(WeightSync, name)).parameters)[2:]


def names_of(heading: str) -> list[str]:
    """Return the names in the first column of a table, of which a row may have several."""
    section = TEXT.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, flags=re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize("kind", [PushReport, WorkerReport])
def test_everything_that_a_report_has_is_listed(kind: type[Any]) -> None:
    found = [field.name for field in dataclasses.fields(kind)]
    found += [name for name, one in vars(kind).items() if isinstance(one, property)]

    assert sorted(names_of(f"of `{kind.__name__}`")) == sorted(found)


def test_what_an_adapter_s_report_adds_is_named() -> None:
    added = {one.name for one in dataclasses.fields(AdapterReport)}
    added -= {one.name for one in dataclasses.fields(PushReport)}

    (told,) = re.findall(r"an `AdapterReport`, which has three more, (.*?); see", TEXT)
    assert set(re.findall(r"`(\w+)`", told)) == added


def test_everything_that_status_tells_is_listed() -> None:
    told = serve.status(serve.Worker(make_sink=lambda _: DiscardSink()))
    # What the extension knows, and the client.
    found = {*told, "is_asleep", "adapters", "engine"}

    assert sorted(names_of("of `status()`")) == sorted(found)


def test_every_module_has_its_place_on_the_map() -> None:
    section = TEXT.split("| part of `vllm_bucketsync` |", 1)[1].split("\n\n", 1)[0]
    listed = re.findall(r"`(\w+)/?`", "".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE)))

    package = ROOT / "vllm_bucketsync"
    there = [path.stem for path in package.glob("[!_]*.py")]
    there += [path.parent.name for path in package.glob("*/__init__.py")]
    assert sorted(listed) == sorted(there)


def test_every_stage_is_listed_in_its_order_with_the_end_that_has_it() -> None:
    section = TEXT.split("| stage of | called | is |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| (.*?) ?\| `([\w ]+)` \| \w", section, flags=re.MULTILINE)
    listed: dict[str, list[str]] = {}
    for end, name in rows:
        listed.setdefault(end or list(listed)[-1], []).append(name)

    phases = [phase.value for phase in Phase]
    parts = [timeline.PACKING, timeline.MAKING, timeline.WAITING_FOR_SLOT]
    after = phases.index(Phase.STREAMING.value) + 1
    # A worker that aborts has no report, and says nothing of its time.
    stages = [name for name in receiver._STAGES.values() if name != timeline.ABORTING]
    worker = list(dict.fromkeys([timeline.WAITING, *stages]))
    at = worker.index(timeline.LOADING) + 1
    worker[at:at] = [timeline.PROCESSING, timeline.STAGING]
    assert listed == {
        "the trainer": [
            *(timeline.EXAMINING, *phases[:after], *parts),
            *(*phases[after:], timeline.RETURNING),
        ],
        "a worker": worker,
    }


def test_every_exit_code_is_listed() -> None:
    section = TEXT.split("| exit code |", 1)[1].split("\n\n", 1)[0]

    listed = re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE)
    assert listed == [str(code.value) for code in ExitCode]


def test_every_setting_is_listed_with_its_variable() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `(VLLM_BUCKETSYNC_\w+)` \|", TEXT, flags=re.MULTILINE)

    names = list(config.Settings.__dataclass_fields__)
    assert listed == [(name, config.ENV_PREFIX + name.upper()) for name in names]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_listed(command: str) -> None:
    assert re.search(rf"^\| `vllm-bucketsync {command}\b", TEXT, flags=re.MULTILINE)


def test_every_link_within_the_readme_leads_to_a_heading_and_contents_name_every_section() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    headings = re.findall(r"^(#{2,3}) (.*)$", prose, flags=re.MULTILINE)

    def anchor(heading: str) -> str:
        return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")

    links = re.findall(r"\]\(#([\w-]+)\)", prose)
    assert set(links) <= {anchor(heading) for _, heading in headings}
    contents = prose.split("\n## Contents\n", 1)[1].split("\n## ", 1)[0]
    sections = [anchor(text) for level, text in headings if level == "##"][2:]
    assert sorted(re.findall(r"\]\(#([\w-]+)\)", contents)) == sorted(sections)
