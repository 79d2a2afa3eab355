"""What a process can be expected to use is told by files and the environment alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_bucketsync.probe import TransportProbe, own_probe, probe

LINUX = "Linux version 6.8.0-1015-aws (buildd@lcy02) #16-Ubuntu SMP"
WSL2 = "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1)"


class Machine:
    """A root folder with what a kernel would have in it, and an environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ: dict[str, str] = {}
        (root / "dev/shm").mkdir(parents=True)
        self.write("proc/version", LINUX)

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def add_gpus(self, count: int = 1) -> None:
        for number in range(count):
            self.write(f"dev/nvidia{number}")
        self.write("dev/nvidiactl")
        # Neither is a GPU.
        self.write("dev/nvidia-uvm")
        self.write("dev/nvidia-modeset")

    def probe(self, *, platform: str = "linux") -> TransportProbe:
        return probe(self.environ, root=str(self.root), platform=platform)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def gpu_machine(machine: Machine) -> Machine:
    machine.add_gpus(2)
    return machine


def test_a_machine_with_gpus_may_use_cuda_ipc(gpu_machine: Machine) -> None:
    found = gpu_machine.probe()

    assert found.kind == "cuda_ipc"
    assert found.reason == "a GPU is here and nothing rules CUDA IPC out"
    assert found.facts["num_nvidia_devices"] == 2
    assert found.facts["has_nvidia_control"] is True
    assert found.facts["has_amd_devices"] is False
    assert found.facts["is_wsl"] is False
    assert found.facts["platform"] == "linux"


def test_a_machine_without_device_files_uses_shared_memory(machine: Machine) -> None:
    found = machine.probe()

    assert (found.kind, found.reason) == ("shm", "no GPU's device files are in /dev")


@pytest.mark.parametrize("path", ["dev/nvidia0", "dev/nvidiactl", "dev/kfd"])
def test_one_device_file_of_a_gpu_is_enough(machine: Machine, path: str) -> None:
    machine.write(path)

    assert machine.probe().kind == "cuda_ipc"


def test_rocm_s_device_is_told_apart(machine: Machine) -> None:
    machine.write("dev/kfd")
    facts = machine.probe().facts

    assert (facts["has_amd_devices"], facts["num_nvidia_devices"]) == (True, 0)
    assert facts["has_nvidia_control"] is False


def mark_by_device(machine: Machine) -> None:
    machine.write("dev/dxg")


def mark_by_kernel(machine: Machine) -> None:
    machine.write("proc/version", WSL2)


@pytest.mark.parametrize("mark", [mark_by_device, mark_by_kernel])
def test_wsl2_has_no_cuda_ipc_whichever_way_it_shows(
    gpu_machine: Machine, mark: Callable[[Machine], None]
) -> None:
    mark(gpu_machine)
    found = gpu_machine.probe()

    assert (found.kind, found.facts["is_wsl"]) == ("shm", True)
    assert "WSL2" in found.reason


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_another_platform_is_named(gpu_machine: Machine, platform: str) -> None:
    found = gpu_machine.probe(platform=platform)

    assert found.kind == "shm"
    assert found.reason == f"CUDA IPC needs Linux, and this is {platform}"


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles", "none", "void"])
def test_hidden_gpus_are_named_with_the_variable(gpu_machine: Machine, visible: str) -> None:
    gpu_machine.environ["CUDA_VISIBLE_DEVICES"] = visible
    found = gpu_machine.probe()

    assert found.kind == "shm"
    assert f"CUDA_VISIBLE_DEVICES is {visible!r}" in found.reason


@pytest.mark.parametrize("visible", ["0", "0,1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"])
def test_visible_gpus_are_noted(gpu_machine: Machine, visible: str) -> None:
    gpu_machine.environ["CUDA_VISIBLE_DEVICES"] = visible
    found = gpu_machine.probe()

    assert found.kind == "cuda_ipc"
    assert found.facts["visible_devices"] == visible
    assert found.facts["has_mig_devices"] is False


def test_a_part_of_a_gpu_is_noted_and_only_trying_can_tell(gpu_machine: Machine) -> None:
    gpu_machine.environ["CUDA_VISIBLE_DEVICES"] = "MIG-41b35014-542d-5a75-8a1d-c1a1a1d1e7c6"
    found = gpu_machine.probe()

    assert (found.kind, found.facts["has_mig_devices"]) == ("cuda_ipc", True)


def test_the_setting_of_the_environment_is_obeyed_and_named(gpu_machine: Machine) -> None:
    gpu_machine.environ["VLLM_BUCKETSYNC_TRANSPORT"] = "shm"
    found = gpu_machine.probe()

    assert (found.kind, found.reason) == ("shm", "VLLM_BUCKETSYNC_TRANSPORT is 'shm'")
    for other in ("auto", "cuda_ipc", ""):
        gpu_machine.environ["VLLM_BUCKETSYNC_TRANSPORT"] = other
        assert gpu_machine.probe().kind == "cuda_ipc"


def test_what_only_a_doctor_wants_to_know_rules_nothing_out(gpu_machine: Machine) -> None:
    gpu_machine.write("proc/sys/kernel/yama/ptrace_scope", "1\n")
    gpu_machine.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    found = gpu_machine.probe()

    assert found.kind == "cuda_ipc"
    assert found.facts["ptrace_scope"] == "1"
    assert found.facts["allocator"] == "expandable_segments:True"
    free_mib = found.facts["shm_free_mib"]
    assert isinstance(free_mib, int)
    file_system = os.statvfs(gpu_machine.root)
    all_mib = file_system.f_blocks * file_system.f_frsize // 1024**2
    assert 0 < free_mib <= all_mib
    assert found.facts["shm_is_writable"] is True

    gpu_machine.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    assert gpu_machine.probe().facts["allocator"] == "backend:cudaMallocAsync"


def test_missing_shared_memory_is_noted(gpu_machine: Machine) -> None:
    (gpu_machine.root / "dev/shm").rmdir()
    facts = gpu_machine.probe().facts

    assert (facts["shm_free_mib"], facts["shm_is_writable"]) == (None, False)


def test_an_empty_root_is_a_machine_of_which_nothing_is_known(tmp_path: Path) -> None:
    found = probe({}, root=str(tmp_path / "missing"), platform="linux")

    assert found.kind == "shm"
    assert set(found.facts.values()) <= {None, False, "linux"}


def test_what_is_of_another_kind_than_it_should_be_does_not_raise(machine: Machine) -> None:
    (machine.root / "proc/version").unlink()
    (machine.root / "proc/version").mkdir()
    machine.write("dev/nvidiactl/odd")
    machine.write("proc/sys/kernel/yama/ptrace_scope")
    (machine.root / "proc/sys/kernel/yama/ptrace_scope").write_bytes(b"\xff\xfe")
    (machine.root / "dev/shm").rmdir()
    machine.write("dev/shm")

    assert json.dumps(machine.probe().as_dict())


@pytest.mark.parametrize("number", [13, 5, 40])
def test_what_may_not_be_looked_at_counts_as_missing(
    gpu_machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    for function in ("stat", "lstat", "open", "scandir", "listdir", "statvfs"):
        monkeypatch.setattr(os, function, refuse)
    monkeypatch.setattr("io.open", refuse)
    found = gpu_machine.probe()
    monkeypatch.undo()

    assert found.kind == "shm"
    assert found.facts["has_nvidia_control"] is False


def test_a_probe_can_be_sent_whatever_bytes_the_environment_holds(gpu_machine: Machine) -> None:
    not_utf8 = os.fsdecode(b"0,\xff")
    gpu_machine.environ |= {
        "CUDA_VISIBLE_DEVICES": not_utf8,
        "PYTORCH_ALLOC_CONF": not_utf8,
        "VLLM_BUCKETSYNC_TRANSPORT": not_utf8,
    }
    plain = gpu_machine.probe().as_dict()

    assert set(plain) == {"kind", "reason", "facts"}
    assert json.loads(json.dumps(plain)) == plain
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain)) == plain


def test_a_process_is_probed_once() -> None:
    assert own_probe() is own_probe()
    assert own_probe().facts == probe(os.environ).facts | {
        "shm_free_mib": own_probe().facts["shm_free_mib"]
    }


# Run where any process of vLLM runs it: before a device was chosen, and perhaps before a fork.
FRESH = """
import json, os, sys, threading
before = dict(os.environ)
from vllm_bucketsync.probe import own_probe
from vllm_bucketsync.plugin import register
register()
found = own_probe().as_dict()
print(*{"torch", "vllm", "zmq", "pynvml", "cuda", "ctypes", "numpy"} & sys.modules.keys())
print(os.environ == before, threading.active_count())
print(json.dumps(found))
"""


@pytest.mark.parametrize("visible", ["", "0", "MIG-1"])
def test_probing_a_fresh_process_loads_no_library_and_changes_nothing(visible: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FRESH],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
    )

    loaded, unchanged, found = result.stdout.splitlines()
    assert loaded == ""
    assert unchanged == "True 1"
    assert json.loads(found)["facts"]["visible_devices"] == visible
    assert result.stderr == ""
