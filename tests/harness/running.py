"""Runs pytest in one of the two environments, and reads what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness import environments, honest, witness
from harness.environments import Environment
from support import junit

# Far more than a file takes; what hangs is ended, and told as failed.
TIMEOUT_S = 1500.0
_STOP_S = 30.0
_LOG_TAIL_LINES = 40
_FOR_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Some CPUs advertise AMX tiles that they cannot use: SIGILL without this.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    # Two of them run at a time; threads that spin for each other would take turns.
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Everything that a run needs, made ready.

    Attributes:
        vllm: The folder that holds vLLM's ``tests``.
        hub: What stands in for the hub's models.
        results: Where logs and JUnit files go.
        without: Where everything but this package is.
        with_plugin: Where this package is as well.
    """

    vllm: Path
    hub: Path
    results: Path
    without: Environment
    with_plugin: Environment


@dataclass(frozen=True, slots=True)
class Ended:
    """One run of pytest that has ended.

    Attributes:
        run: What it wrote, or ``None`` if it wrote nothing.
        code: Its exit code; ``None`` if it had to be stopped.
        log: Everything that it printed.
        witnessed: What processes said that loaded our plugin; none without it.
    """

    run: junit.Run | None
    code: int | None
    log: Path
    witnessed: list[dict[str, object]]

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


def pytest(
    place: Place,
    environment: Environment,
    arguments: Sequence[str],
    *,
    name: str,
    path: Sequence[Path] = (),
) -> Ended:
    """Run pytest on ``arguments`` in vLLM's folder.

    Args:
        place: Where things are.
        environment: One of the place's two.
        arguments: For pytest.
        name: Of the files in ``place.results``.
        path: More folders from which modules are imported, here and in what is started.
    """
    stem = place.results / f"{name}-{environment.name}"
    report, log, seen = (stem.with_name(stem.name + end) for end in (".xml", ".log", ".seen"))
    for old in (report, seen):
        old.unlink(missing_ok=True)
    command = [str(environment.python), "-m", "pytest", "-q", "-p", "bucketsync_honest"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    variables = _variables(place, environment)
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (place.vllm, *path)))
    variables[witness.FILE] = str(seen)
    with log.open("wb") as output:
        code = _wait(command, folder=place.vllm, variables=variables, output=output)
    said = seen.read_text().splitlines() if seen.exists() else []
    run = junit.read(report) if report.exists() else None
    return Ended(run, code, log, [json.loads(line) for line in said])


def _variables(place: Place, environment: Environment) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    found |= {
        "PATH": os.pathsep.join((str(environment.bin), os.environ.get("PATH", ""))),
        "HF_HOME": str(place.hub),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Nothing that one of the two has compiled is found by the other.
        "VLLM_CACHE_ROOT": str(environment.folder / "cache"),
    }
    if environments.is_cpu_build():
        found |= _FOR_CPU | {honest.DEVICES: "1"}
    return found


def _wait(
    command: list[str], *, folder: Path, variables: dict[str, str], output: object
) -> int | None:
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code: int = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    else:
        return code
    finally:
        if process.poll() is None:
            # As by Ctrl-C: pytest runs the ends of fixtures, which stop their servers.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        # Also what a pytest that crashed has left; a server would keep its port.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_S)
