"""vLLM's own tests, with this package and without it, outcome by outcome."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from harness import environments
from harness.lists import TestFile
from harness.running import Ended, Place, pytest
from support import junit

# Something was run, and this is what came of it.
_RAN = {junit.PASSED, junit.FAILED, junit.ERROR, junit.XFAILED}


def run(place: Place, files: Sequence[TestFile]) -> list[str]:
    """Run each file in both environments, and return what is wrong."""
    for plugin in sorted({plugin for file in files for plugin in file.plugins}):
        for environment in (place.without, place.with_plugin):
            environments.install(environment, place.vllm / "tests" / "plugins" / plugin)
    problems: list[str] = []
    num_ran = num_skipped = num_processes = num_engines = 0
    for number, file in enumerate(files):
        lacking = _why_not(place, file)
        if lacking:
            print(f"{file.path}: not run, {lacking}")
            continue
        began_s = time.monotonic()
        without, with_plugin = _run_both(place, file, number)
        problems += judge(file, without, with_plugin)
        told = "nothing" if with_plugin.run is None else with_plugin.run.summary()
        print(f"{file.path}: {told} ({time.monotonic() - began_s:.0f} s)", flush=True)
        if with_plugin.run is not None:
            num_skipped += with_plugin.run.count(junit.SKIPPED)
            num_ran += sum(one in _RAN for one in with_plugin.run.outcomes.values())
        num_processes += sum(one["event"] == "plugins" for one in with_plugin.witnessed)
        num_engines += sum(one["event"] == "engine" for one in with_plugin.witnessed)
    print(
        f"vLLM's own tests: {num_ran} were run twice and {num_skipped} skipped themselves; vLLM "
        f"loaded the plugin in {num_processes} processes, and {num_engines} engines had a worker "
        f"extension; {len(problems)} problems"
    )
    if not num_ran:
        problems.append("nothing of vLLM's own tests was run")
    return problems


def judge(file: TestFile, without: Ended, with_plugin: Ended) -> list[str]:
    """Return what is wrong with one file's two runs."""
    for name, ended in (("without", without), ("with", with_plugin)):
        if ended.run is None or ended.code is None:
            return [f"{file.path}: ended {name} the plugin with {ended.code}; see {ended.log}"]
    if without.run is None or with_plugin.run is None:
        return []
    found = [f"{file.path}: {line}" for line in junit.differences(without.run, with_plugin.run)]
    if without.code != with_plugin.code:
        found.append(
            f"{file.path}: pytest ended with {without.code} without the plugin and with "
            f"{with_plugin.code} with it; see {with_plugin.log}"
        )
    if file.is_short and not without.run.count(junit.PASSED):
        found.append(f"{file.path}: nothing passes without the plugin; see {without.log}")
    loaded = [one["has_plugin"] for one in with_plugin.witnessed if one["event"] == "plugins"]
    if not loaded or not all(loaded) or without.witnessed:
        found.append(
            f"{file.path}: the plugin was loaded by {sum(map(bool, loaded))} of {len(loaded)} "
            f"processes with it, and by {len(without.witnessed)} without it"
        )
    return found


def _why_not(place: Place, file: TestFile) -> str:
    if not (place.vllm / "tests" / file.path).exists():
        return "this vLLM has no such file"
    lacking = [name for name in file.needs if find_spec(name) is None]
    return f"{', '.join(lacking)} is not installed" if lacking else ""


def _run_both(place: Place, file: TestFile, number: int) -> tuple[Ended, Ended]:
    name = f"{number:02}-" + file.path.removesuffix(".py").replace("/", "-")

    def run_in(environment: environments.Environment) -> Ended:
        return pytest(place, environment, [f"tests/{file.path}", *file.select], name=name)

    both = (place.without, place.with_plugin)
    if file.is_alone:
        before, after = map(run_in, both)
    else:
        with ThreadPoolExecutor(len(both)) as pool:
            before, after = pool.map(run_in, both)
    return before, after
