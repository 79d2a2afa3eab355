"""An adapter's number and path follow from its name and version, and are never vLLM's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.adapters import FIRST_ID, id_of, is_ours, spec_of
from vllm_bucketsync.messages import MAX_ADAPTER_ID


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
