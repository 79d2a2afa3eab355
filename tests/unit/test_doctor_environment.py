"""The doctor on what is installed: versions, plugins as vLLM finds them, settings."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from vllm_bucketsync import __version__
from vllm_bucketsync.cli.servers import PLUGINS
from vllm_bucketsync.doctor import environment, plugins
from vllm_bucketsync.doctor.findings import Finding, State, will_all_work

ROOT = Path(__file__).parents[2]


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, points: str = "", version: str = __version__
) -> None:
    """Make ``folder`` the only place where distributions are installed."""
    info = folder / "vllm_bucketsync-0.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {environment.OUR_DISTRIBUTION}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
    (info / "entry_points.txt").write_text(points)
    monkeypatch.setattr(sys, "path", [str(folder)])


@pytest.fixture
def _has_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "is_there", lambda _: True)


GOOD = """\
[vllm.general_plugins]
bucketsync = vllm_bucketsync.plugin:register
[vllm.endpoint_plugins]
bucketsync_http = vllm_bucketsync.errors:BucketSyncError
"""


def test_findings_of_which_none_has_failed_will_all_work() -> None:
    def findings(*states: State) -> list[Finding]:
        return [Finding(name="x", state=state, found="") for state in states]

    assert will_all_work(findings(State.OK, State.WARN, State.SKIPPED))
    assert not will_all_work(findings(State.OK, State.FAILED))


def test_the_package_is_ok_where_it_is_installed_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path)

    found = environment.check_package()

    assert found.state is State.OK
    assert __version__ in found.found


def test_an_installation_of_another_version_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, version="0.0.1")

    found = environment.check_package()

    assert found.state is State.WARN
    assert "installed as 0.0.1" in found.found


def test_code_that_is_not_installed_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    found = environment.check_package()

    assert found.state is State.WARN
    assert "pip install vllm-bucketsync" in found.advice


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.13.0+cpu", State.OK),
        ("2.9.0", State.OK),
        ("2.8.1", State.FAILED),
        ("3.0", State.OK),
        (None, State.FAILED),
    ],
)
def test_torch_is_judged_by_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, state: State
) -> None:
    monkeypatch.setattr(environment, "version_of", lambda _: version)

    assert environment.check_torch().state is state


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.32.0", State.OK),
        ("0.26.0", State.OK),
        ("0.33.1", State.OK),
        ("0.25.9", State.WARN),
        ("0.34.0", State.WARN),
        (None, State.SKIPPED),
    ],
)
def test_vllm_is_judged_by_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, state: State
) -> None:
    monkeypatch.setattr(environment, "vllm_version", lambda: version)

    assert environment.check_vllm().state is state


def test_the_bounds_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()

    def dotted(release: tuple[int, ...]) -> str:
        return ".".join(map(str, release))

    assert f"torch>={dotted(environment.MIN_TORCH)}" in project["dependencies"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={dotted(environment.MIN_VLLM)}"]
    newest = re.search(r"written for 0\.26 to (\d+\.\d+)", readme)
    assert newest is not None
    assert newest[1] == dotted(environment.NEWEST_VLLM)


def test_a_companion_that_does_not_load_is_named_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reason = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision.py").write_text(f"raise RuntimeError({reason!r})")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    found = environment.check_companions()

    assert found.state is State.FAILED
    assert f"torchvision does not load: {reason}" in found.found
    assert "pip uninstall -y torchvision" in found.advice


def test_a_companion_that_loads_is_ok(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchcodec.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    try:
        found = environment.check_companions()
    finally:
        sys.modules.pop("torchcodec", None)

    assert found.state is State.OK
    assert "torchcodec" in found.found


def test_settings_of_the_environment_are_listed() -> None:
    assert environment.check_settings({}).found == "the defaults; none is set"

    found = environment.check_settings({"VLLM_BUCKETSYNC_NUM_SLOTS": "3", "OTHER": "x"})

    assert found.state is State.OK
    assert found.found == "VLLM_BUCKETSYNC_NUM_SLOTS=3"


@pytest.mark.parametrize("variable", ["NUM_SLOTS", "SLOT_SIZE", "PLAN", "TRANSPORT"])
def test_a_setting_that_cannot_be_meant_fails(variable: str) -> None:
    found = environment.check_settings({f"VLLM_BUCKETSYNC_{variable}": "nonsense"})

    assert found.state is State.FAILED
    assert "nonsense" in found.found


def test_a_variable_that_nothing_reads_is_warned_of() -> None:
    found = environment.check_settings({"VLLM_BUCKETSYNC_SLOTSIZE": "1GiB"})

    assert found.state is State.WARN
    assert "VLLM_BUCKETSYNC_SLOTSIZE" in found.found


@pytest.mark.usefixtures("_has_vllm")
def test_entry_points_are_found_among_what_is_installed_and_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, points=GOOD)

    plugin, route = plugins.check_plugin({}), plugins.check_route({})

    assert (plugin.state, route.state) == (State.OK, State.OK)
    assert "vllm_bucketsync.plugin:register" in plugin.found
    assert f"VLLM_PLUGINS={','.join(PLUGINS)}" in route.advice


@pytest.mark.usefixtures("_has_vllm")
def test_an_entry_point_that_is_not_installed_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path)

    for found in (plugins.check_plugin({}), plugins.check_route({})):
        assert found.state is State.FAILED
        assert "is installed" in found.found


@pytest.mark.usefixtures("_has_vllm")
@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("vllm_bucketsync.no_such_module:register", "ModuleNotFoundError"),
        ("vllm_bucketsync.plugin:no_such_name", "AttributeError"),
        ("vllm_bucketsync:__version__", "cannot be called"),
    ],
)
def test_an_entry_point_that_does_not_load_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, problem: str
) -> None:
    install(monkeypatch, tmp_path, points=f"[vllm.general_plugins]\nbucketsync = {target}\n")

    found = plugins.check_plugin({})

    assert found.state is State.FAILED
    assert problem in found.found


@pytest.mark.usefixtures("_has_vllm")
@pytest.mark.parametrize(
    ("named", "plugin", "route"),
    [
        ("bucketsync,bucketsync_http", State.OK, State.OK),
        ("bucketsync", State.OK, State.WARN),
        ("bucketsync_http", State.WARN, State.OK),
        ("lora_filesystem_resolver", State.WARN, State.WARN),
        ("", State.WARN, State.WARN),
        # vLLM splits at commas and leaves the spaces.
        ("bucketsync, bucketsync_http", State.OK, State.WARN),
    ],
)
def test_what_vllm_plugins_does_not_name_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, plugin: State, route: State
) -> None:
    install(monkeypatch, tmp_path, points=GOOD)
    environ = {"VLLM_PLUGINS": named}

    found = plugins.check_plugin(environ), plugins.check_route(environ)

    assert (found[0].state, found[1].state) == (plugin, route)
    for one in found:
        if one.state is State.WARN:
            others = "lora_filesystem_resolver," if "lora" in named else ""
            assert f"VLLM_PLUGINS={others}bucketsync,bucketsync_http" in one.advice


def test_without_vllm_there_is_nothing_that_would_load_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "is_there", lambda _: False)

    assert plugins.check_plugin({}).state is plugins.check_route({}).state is State.SKIPPED


def test_the_entry_points_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert {group: list(points) for group, points in project["entry-points"].items()} == {
        plugins.GENERAL_GROUP: [plugins.PLUGIN],
        plugins.ENDPOINT_GROUP: [plugins.ROUTE],
    }
    assert project["name"] == environment.OUR_DISTRIBUTION


def test_this_very_environment_is_looked_at_as_it_is() -> None:
    """The tests need an installation; a package of that name is what is found."""
    assert environment.version_of("torch") == metadata.version("torch")
    assert environment.version_of("no-such-distribution") is None
    assert environment.is_there("no_such_module") is False
