"""Every public name can be had, and every error is exported and explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vllm_bucketsync
from vllm_bucketsync import errors, wire_errors
from vllm_bucketsync.config import Settings
from vllm_bucketsync.sync import WeightSync

README = Path(__file__).parents[2] / "README.md"


# The one that needs vLLM is had in tests/engine/test_plugin_in_vllm.py.
@pytest.mark.parametrize("name", sorted(set(vllm_bucketsync.__all__) - {"WorkerExtension"}))
def test_a_public_name_can_be_had(name: str) -> None:
    assert getattr(vllm_bucketsync, name) is not None
    assert name in dir(vllm_bucketsync)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vllm_bucketsync' has no attribute 'Weightsync'"):
        _ = vllm_bucketsync.Weightsync  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error", wire_errors.error_classes().values(), ids=lambda cls: cls.__name__
)
def test_an_error_is_exported(error: type[errors.BucketSyncError]) -> None:
    assert error.__name__ in vllm_bucketsync.__all__
    assert getattr(vllm_bucketsync, error.__name__) is error


def test_the_readme_explains_every_error_with_its_builtin_and_no_other() -> None:
    section = README.read_text().split("## What can go wrong", 1)[1].split("\n## ", 1)[0]
    row = re.compile(r"^\| `(\w+)`(?: \(`(\w+)`\))? \|", flags=re.MULTILINE)
    explained = dict(row.findall(section))

    assert explained == {
        cls.__name__: own_builtin(cls) for cls in wire_errors.error_classes().values()
    }


def own_builtin(error: type[errors.BucketSyncError]) -> str:
    """The builtin that a class adds to its parent's; empty where it adds none."""
    added = [base.__name__ for base in error.__bases__ if base.__module__ == "builtins"]
    return next((name for name in added if name != "Exception"), "")


@pytest.mark.parametrize("name", Settings.__dataclass_fields__)
def test_help_tells_every_setting_where_it_is_passed_and_what_it_means(name: str) -> None:
    assert f"- ``{name}``: " in (WeightSync.__init__.__doc__ or "")
    assert f"    {name}: " in (Settings.__doc__ or "")


@pytest.mark.parametrize(
    "name",
    ["__init__", *("push", "push_lora", "apush", "apush_lora", "remove_lora", "status", "release")],
)
def test_help_tells_what_every_method_raises(name: str) -> None:
    _, raises = (getattr(WeightSync, name).__doc__ or "").split("Raises:\n", 1)

    told = re.findall(r"^ {12}(\w+): ", raises, flags=re.MULTILINE)
    assert told
    assert set(told) <= {cls.__name__ for cls in wire_errors.error_classes().values()}
