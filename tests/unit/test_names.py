"""Trainers' wrappers leave a name wherever they are nested, and no name comes twice."""

from __future__ import annotations

import re

import pytest

from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.layout import MAX_NAME_BYTES
from vllm_bucketsync.names import Names, strip_wrappers


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("weight", "weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("model.layers.0._orig_mod.mlp.w", "model.layers.0.mlp.w"),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.w", "model.layers.0.w"),
        ("l.0._checkpoint_wrapped_module._fsdp_wrapped_module._orig_mod.w", "l.0.w"),
        ("module.module.w", "w"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("module.base_model._orig_mod.model.lm_head.weight", "lm_head.weight"),
        ("base_model.model.base_model.model.w", "w"),
        ("base_model.w", "base_model.w"),
        ("model.base_model.w", "model.base_model.w"),
        ("base_model.model", "base_model.model"),
        ("a.module", "a.module"),
        ("submodule.w", "submodule.w"),
        ("my_module.w", "my_module.w"),
        ("modules.0.w", "modules.0.w"),
        ("vision_base_model.model.w", "vision_base_model.model.w"),
    ],
)
def test_wrappers_are_stripped_as_whole_segments(given: str, name: str) -> None:
    assert strip_wrappers(given) == name
    assert Names().take(given) == name


def test_rename_sees_the_stripped_name_once_for_each_tensor() -> None:
    seen: list[str] = []

    def rename(name: str) -> str:
        seen.append(name)
        return name.replace("model.", "language_model.")

    names = Names(rename)

    assert names.take("module.model.a") == "language_model.a"
    assert names.take("b") == "b"
    assert seen == ["model.a", "b"]
    assert len(names) == 2


def test_what_rename_returns_is_not_stripped_again() -> None:
    assert Names(lambda name: f"module.{name}").take("a") == "module.a"


def test_a_name_given_twice_is_refused() -> None:
    names = Names()
    names.take("a.w")

    with pytest.raises(SourceError, match=r"'a\.w' was given twice") as caught:
        names.take("a.w")
    assert caught.value.name == "a.w"


def test_two_names_that_become_the_same_are_refused_with_both() -> None:
    names = Names()
    names.take("_orig_mod.a.w")

    with pytest.raises(
        SourceError, match=r"'_orig_mod\.a\.w' and 'module\.a\.w' both become 'a\.w'"
    ):
        names.take("module.a.w")


def test_two_names_that_rename_makes_the_same_are_refused_with_both() -> None:
    names = Names(lambda _: "same")
    names.take("a")

    with pytest.raises(SourceError, match=r"'a' and 'b' both become 'same'; .*rename="):
        names.take("b")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "name is empty"),
        (None, "name is None, a NoneType; expected a str"),
        (3, "name is 3, an int; expected a str"),
        (b"a", "name is b'a', a bytes; expected a str"),
        ("x" * (MAX_NAME_BYTES + 1), "has 1025 bytes; at most 1024"),
        ("é" * 513, "has 1026 bytes; at most 1024"),
        ("a\ud800", "cannot be written as UTF-8"),
        ("module.", r"\(what 'module\.' becomes\) is empty"),
    ],
    ids=["empty", "none", "int", "bytes", "long", "long in UTF-8", "surrogate", "only a wrapper"],
)
def test_what_is_no_name_is_refused(given: object, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        Names().take(given)


@pytest.mark.parametrize("result", ["", None, 7, "x" * 2000], ids=["empty", "none", "int", "long"])
def test_what_rename_may_not_return_is_refused_with_the_name_that_it_was_given(
    result: object,
) -> None:
    names = Names(lambda _: result)  # type: ignore[arg-type, return-value]

    with pytest.raises(SourceError, match=re.escape("(what 'a.w' becomes)")):
        names.take("a.w")


def test_what_rename_raises_passes_unchanged() -> None:
    problem = KeyError("a")

    def rename(name: str) -> str:
        raise problem

    with pytest.raises(KeyError) as caught:
        Names(rename).take("a")
    assert caught.value is problem


def test_a_name_of_exactly_the_limit_is_taken_as_a_plain_string() -> None:
    class Text(str):
        __slots__ = ()

    name = Names().take(Text("x" * MAX_NAME_BYTES))

    assert type(name) is str
