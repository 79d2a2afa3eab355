"""Whether vLLM, started in this environment, loads what it has to load of ours.

Found out as vLLM does it: by the entry points of what is installed, filtered by
``VLLM_PLUGINS``, and by loading them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from .environment import OUR_DISTRIBUTION, is_there
from .findings import Finding, State

GENERAL_GROUP, PLUGIN = "vllm.general_plugins", "bucketsync"
ENDPOINT_GROUP, ROUTE = "vllm.endpoint_plugins", "bucketsync_http"
FILTER = "VLLM_PLUGINS"
_BOTH = f"{PLUGIN},{ROUTE}"
# What loading an entry point can fail with: whatever its module raises when it is imported.
_LOADING = (ImportError, AttributeError, OSError, RuntimeError, ValueError, TypeError)


def check_plugin(environ: Mapping[str, str] | None = None) -> Finding:
    """Tell whether each of vLLM's processes loads the plugin.

    Args:
        environ: The environment; the process's own where ``None``.
    """
    name, named = "plugin", _named(environ)
    finding = _check_entry_point(name, group=GENERAL_GROUP, called=PLUGIN)
    if finding.state is State.OK and named is not None and PLUGIN not in named:
        found = f"{FILTER} is {','.join(named)!r}, which keeps vLLM from loading {PLUGIN}"
        advice = f"{_as_named(named)}; what workers log of updates is not shown without it"
        return Finding(name=name, state=State.WARN, found=found, advice=advice)
    return finding


def check_route(environ: Mapping[str, str] | None = None) -> Finding:
    """Tell whether a server that is started in this environment has our route.

    Args:
        environ: The environment; the process's own where ``None``.
    """
    name, named = "server's route", _named(environ)
    finding = _check_entry_point(name, group=ENDPOINT_GROUP, called=ROUTE)
    if finding.state is not State.OK:
        return finding
    if named is None:
        found = f"{finding.found}; not loaded as long as {FILTER} does not name it"
        advice = f"start servers with {FILTER}={_BOTH}"
        return Finding(name=name, state=State.OK, found=found, advice=advice)
    if ROUTE not in named:
        found = f"{FILTER} is {','.join(named)!r}, which does not name {ROUTE}"
        return Finding(name=name, state=State.WARN, found=found, advice=_as_named(named))
    return finding


def _check_entry_point(name: str, *, group: str, called: str) -> Finding:
    if not is_there("vllm"):
        return Finding(name=name, state=State.SKIPPED, found="there is no vLLM here to load it")
    points = list(entry_points(group=group, name=called))
    if not points:
        found = f"no entry point {called!r} of {group} is installed"
        advice = f"pip install {OUR_DISTRIBUTION} in this environment, which is the engine's"
        return Finding(name=name, state=State.FAILED, found=found, advice=advice)
    point, problem = points[0], _loading_problem(points[0])
    if problem is not None:
        found = f"{point.value} does not load: {problem}"
        advice = f"vLLM goes on without it; install what it lacks, or {OUR_DISTRIBUTION} again"
        return Finding(name=name, state=State.FAILED, found=found, advice=advice)
    return Finding(name=name, state=State.OK, found=f"vLLM finds {called!r}: {point.value}")


def _loading_problem(point: EntryPoint) -> str | None:
    try:
        loaded = point.load()
    except _LOADING as error:
        return f"{type(error).__name__}: {error}"
    return None if callable(loaded) else f"it is a {type(loaded).__name__}, and cannot be called"


def _named(environ: Mapping[str, str] | None) -> list[str] | None:
    """Return what ``VLLM_PLUGINS`` names, as vLLM splits it: spaces stay where they are."""
    text = (os.environ if environ is None else environ).get(FILTER)
    return None if text is None else text.split(",")


def _as_named(named: list[str]) -> str:
    others = [one.strip() for one in named if one.strip() not in {"", PLUGIN, ROUTE}]
    return f"set {FILTER}={','.join([*others, _BOTH])}, without spaces"
