"""The table of what was seen to be right is that of the results, and hides none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.conformance import table


def line(**changes: Any) -> dict[str, Any]:
    plain = {"device": "CPU", "vllm": "0.32", "model": "qwen3", "mode": "plain"}
    return {**plain, "dtype": "float32", "result": "right", "reason": "", **changes}


def test_the_readme_has_the_table_of_the_results_that_are_kept() -> None:
    assert table.results() != []
    assert table.in_readme(table.README.read_text()) == table.table(table.results()).strip("\n")


def test_models_that_came_to_the_same_share_a_row_and_others_do_not() -> None:
    made = table.table(
        [
            line(),
            line(model="llama"),
            line(model="gemma3", result="wrong", reason="AssertionError: a tensor; and more"),
            line(mode="sleep", result="refused", reason="it is asleep"),
            line(vllm="0.33"),
            line(vllm="0.33", mode="sleep", result="not run", reason="it is asleep"),
        ]
    )

    assert made.splitlines() == [
        "| engine | dtype | models | CPU, vLLM 0.32 | CPU, vLLM 0.33 |",
        "| --- | --- | --- | --- | --- |",
        "| plain | fp32 | Qwen3 | right | right |",
        "| plain | fp32 | Llama | right |  |",
        "| plain | fp32 | Gemma3 | wrong (1) |  |",
        "| sleep | fp32 | Qwen3 | refused (2) | not run (2) |",
        "",
        "1. AssertionError: a tensor",
        "2. it is asleep",
    ]


def test_results_are_taken_row_by_row_and_the_newest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    for number, results in enumerate(
        [[line(result="wrong"), line(model="llama")], [line(), line(device="H200")]]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for position, one in enumerate(results):
            (folder / f"{position}.json").write_text(json.dumps(one))
        table.take(folder)

    assert [path.name for path in sorted((tmp_path / "results").iterdir())] == [
        "cpu-0.32.json",
        "h200-0.32.json",
    ]
    kept = {(one["device"], one["model"]): one["result"] for one in table.results()}
    assert kept == {
        ("CPU", "qwen3"): "right",
        ("CPU", "llama"): "right",
        ("H200", "qwen3"): "right",
    }
