"""Proves that slips of the hand in arguments are told before anybody is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.thread_engine import ThreadEngine

from vllm_bucketsync import ConfigError, WeightSync

TENSORS = {"a": torch.ones(3)}


@pytest.mark.parametrize("version", [None, 1.5, True, b"7", (1,)], ids=repr)
def test_a_version_is_a_whole_number_or_a_name(version: Any) -> None:
    engine = ThreadEngine()
    with (
        WeightSync(engine) as sync,
        pytest.raises(ConfigError, match="expected a whole number or a name"),
    ):
        sync.push(TENSORS, version=version)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rename": {"a": "b"}}, "rename is a dict; expected a function"),
        ({"trace": True}, "trace is True; expected the path of a file"),
        ({"trace": Path("none/t.json")}, "has a folder that does not exist"),
        ({"trace": Path("/")}, "is a folder"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_told_before_anybody_is_asked(
    options: dict[str, Any], text: str
) -> None:
    engine = ThreadEngine()
    with WeightSync(engine) as sync, pytest.raises(ConfigError, match=text):
        sync.push(TENSORS, version=1, **options)
    assert engine.requests == []


def test_a_closed_sync_has_no_status() -> None:
    sync = WeightSync(ThreadEngine())
    sync.close()

    with pytest.raises(ConfigError, match="is closed"):
        sync.status()
