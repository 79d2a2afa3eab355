"""The worked example learns: the reward of a real engine's samples rises, update by update."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import engines

from vllm_bucketsync.cli.demo_model import build_checkpoint

# Far above what both ends' kernels differ by, far below what a missed update changes.
MAX_MISMATCH = 1e-3


@pytest.mark.parametrize("use_adapter", [False, True], ids=["all weights", "adapter"])
def test_the_reward_rises_and_the_engine_has_the_trainer_s_policy_at_every_update(
    use_adapter: bool, tmp_path: Path
) -> None:
    from vllm_bucketsync.examples import rl

    build_checkpoint(tmp_path / "model", seed=1)
    with engines.environment():
        updates = rl.train(
            str(tmp_path / "model"), use_adapter=use_adapter, num_updates=8, tell=lambda _: None
        )

    rewards = [one.reward for one in updates]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1, rewards
    assert max(one.mismatch for one in updates) < MAX_MISMATCH


def test_a_push_that_is_left_out_is_seen_in_the_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_bucketsync.examples import rl

    build_checkpoint(tmp_path / "model", seed=1)
    monkeypatch.setattr(rl, "push", lambda *_, **__: None)
    with engines.environment():
        updates = rl.train(str(tmp_path / "model"), num_updates=3, tell=lambda _: None)

    assert updates[-1].mismatch > 10 * MAX_MISMATCH


def test_the_command_trains_draws_and_leaves_no_process_behind(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            str(Path(sys.executable).with_name("vllm-bucketsync")),
            *("example", "rl", "--updates", "8", "--plot", str(tmp_path / "rl.svg")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, **engines.ENVIRONMENT, "TMPDIR": str(tmp_path)},
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok: the reward rose from" in result.stdout
    assert f"wrote {tmp_path / 'rl.svg'}" in result.stderr
    assert result.stderr.count("  reward 0.") == 8
    assert (tmp_path / "rl.svg").read_text().rstrip().endswith("</svg>")
    assert [path.name for path in tmp_path.glob("bucketsync-*")] == []
