"""An adapter's number and path follow from its name and version, and are never vLLM's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.adapters import FIRST_ID, check_spec, id_of, is_ours, spec_of
from vllm_bucketsync.errors import AdapterError
from vllm_bucketsync.messages import MAX_ADAPTER_ID, AdapterSpec


@given(st.text(min_size=1, max_size=256))
def test_a_name_always_has_the_same_number_out_of_vllm_s_way(name: str) -> None:
    assert id_of(name) == id_of(name)
    assert FIRST_ID <= id_of(name) <= MAX_ADAPTER_ID


def test_a_number_is_the_same_in_every_process_and_release() -> None:
    assert [id_of("policy"), id_of("é")] == [1_825_983_515, 1_878_202_671]


def test_a_version_changes_the_path_and_nothing_else() -> None:
    old, new = (spec_of("policy", version=version) for version in ("6", "7"))

    assert (old.name, old.lora_int_id) == (new.name, new.lora_int_id)
    assert (old.lora_path, new.lora_path) == ("bucketsync://policy@6", "bucketsync://policy@7")
    assert is_ours(new.lora_path)
    assert not is_ours("/adapters/bucketsync")


def test_what_was_made_of_a_name_and_a_version_is_believed() -> None:
    for name, version in (("policy", "7"), ("a@b", "@"), ("é", "")):
        check_spec(spec_of(name, version=version, config="{}"), version=version)


NUMBER, PATH = id_of("policy"), "bucketsync://policy@7"


@pytest.mark.parametrize(
    ("name", "number", "path"),
    [
        ("policy", 1, PATH),
        ("policy", id_of("other"), PATH),
        ("policy", NUMBER, "some-org/some-repo"),
        ("policy", NUMBER, "bucketsync://other@7"),
        ("policy", NUMBER, "bucketsync://policy@8"),
        ("policy", NUMBER, f"{PATH}/.."),
        ("other", NUMBER, PATH),
        ("two\nlines", id_of("two\nlines"), "bucketsync://two\nlines@7"),
    ],
)
def test_a_number_or_a_path_of_something_else_is_refused(name: str, number: int, path: str) -> None:
    spec = AdapterSpec(name=name, lora_int_id=number, lora_path=path)

    with pytest.raises(AdapterError, match="nothing was changed") as caught:
        check_spec(spec, version="7")
    assert caught.value.adapter == name
