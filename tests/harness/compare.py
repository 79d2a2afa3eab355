"""vLLM's own tests, with this package and without it, outcome by outcome."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from harness import environments
from harness.lists import TestFile
from harness.running import Ended, Place, pytest
from support import junit
from support.facts import facts

# Something was run, and this is what came of it.
_RAN = {junit.PASSED, junit.FAILED, junit.ERROR, junit.XFAILED}


def run(place: Place, files: Sequence[TestFile]) -> list[str]:
    """Run each file in both environments, and return what is wrong.

    ``compared.xml`` among the results says which tests came to the same, twice.
    """
    for plugin in sorted({plugin for file in files for plugin in file.plugins}):
        for environment in (place.without, place.with_plugin):
            environments.install(environment, place.vllm / "tests" / "plugins" / plugin)
    problems: list[str] = []
    compared: dict[str, str] = {}
    witnessed: Counter[object] = Counter()
    for number, file in enumerate(files):
        if not (place.vllm / "tests" / file.path).exists():
            print(f"{file.path}: this vLLM has no such file")
            continue
        lacking = [name for name in file.needs if find_spec(name) is None]
        if lacking:
            problems.append(f"{file.path}: not run without {', '.join(lacking)}; install '.[test]'")
            continue
        began_s = time.monotonic()
        without, with_plugin = _run_both(place, file, number)
        problems += judge(file, without, with_plugin)
        compared |= outcomes(file, without, with_plugin)
        witnessed.update(one["event"] for one in with_plugin.witnessed)
        told = "nothing" if with_plugin.run is None else with_plugin.run.summary()
        print(f"{file.path}: {told} ({time.monotonic() - began_s:.0f} s)", flush=True)
    num = Counter(compared.values())
    print(
        f"vLLM's own tests: {num[junit.PASSED]} ran and came to the same with the plugin and "
        f"without it, {num[junit.FAILED]} did not, {num[junit.SKIPPED]} skipped themselves; vLLM "
        f"loaded the plugin in {witnessed['plugins']} processes, and {witnessed['engine']} engines "
        f"had a worker extension"
    )
    if not num[junit.PASSED]:
        problems.append("nothing of vLLM's own tests was run")
    junit.write(place.results / "compared.xml", compared, facts("vLLM's own"))
    return problems


def outcomes(file: TestFile, without: Ended, with_plugin: Ended) -> dict[str, str]:
    """Return for each test whether it ran and came to the same twice, or did not, or skipped."""
    both = [{} if one.run is None else one.run.outcomes for one in (without, with_plugin)]
    found: dict[str, str] = {}
    for name in sorted(both[0].keys() | both[1].keys()):
        before, after = (one.get(name) for one in both)
        same = junit.PASSED if after in _RAN else junit.SKIPPED
        found[f"{file.path} {name}"] = same if before == after else junit.FAILED
    return found


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
