"""What the kernel, and the control group of a container, leave to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_bucketsync.host_memory import available_bytes

V1 = "sys/fs/cgroup/memory"


def machine(root: Path, files: dict[str, str]) -> str:
    meminfo = "MemTotal:  9000 kB\nMemAvailable:  4000 kB\nSwapFree: 1 kB\n"
    for path, text in {"proc/meminfo": meminfo, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return str(root)


def group(limit: str, *, usage: str = "3000000\n", cached: int = 500_000) -> dict[str, str]:
    return {
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": usage,
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {cached}\nfile 7\n",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4000 * 1024),
        (group("max"), 4000 * 1024),
        (group("4000000"), 1_500_000),
        (group("1000000"), 0),
        (group("99000000"), 4000 * 1024),
        (group("4000000", usage="what?\n"), 4000 * 1024),
        (
            {
                f"{V1}/memory.limit_in_bytes": "3000000\n",
                f"{V1}/memory.usage_in_bytes": "2000000\n",
                f"{V1}/memory.stat": "inactive_file 1\ntotal_inactive_file 250000\n",
            },
            1_250_000,
        ),
    ],
    ids=["no group", "no limit", "limit", "over it", "more than there is", "unreadable", "v1"],
)
def test_the_smaller_of_machine_and_group_counts(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert available_bytes(machine(tmp_path, files)) == expected


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
