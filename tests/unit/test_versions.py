"""Proves which versions are newer, and that names without an order are never compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_bucketsync.errors import ConfigError, OlderVersionError
from vllm_bucketsync.versions import check_newer, check_ordered, goes_back, number_of

NAMES = ["", "step-7", "7.0", "1_000", " 7", "0x7", "7\n", "\u0667", "--7", "True", "9" * 257]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_no_order(name: str) -> None:
    assert number_of(name) is None
    with pytest.raises(ConfigError, match="whole numbers"):
        check_ordered(name)
    with pytest.raises(ConfigError, match="push once without require_newer"):
        check_newer("8", ["3", name])
    assert not goes_back("1", [name])
    assert not goes_back(name, ["1"])


@given(new=st.integers(), old=st.integers())
def test_numbers_are_compared_as_numbers_and_not_as_text(new: int, old: int) -> None:
    check_ordered(str(new))
    assert goes_back(str(new), [str(old)]) is (new < old)
    if new > old:
        check_newer(str(new), [str(old), None])
        return
    with pytest.raises(OlderVersionError, match="nothing was written") as caught:
        check_newer(str(new), [str(old)])
    assert (caught.value.version, caught.value.held) == (str(new), str(old))


def test_a_worker_without_a_version_has_nothing_newer() -> None:
    check_newer("-3", [])
    check_newer("-3", [None, None])
    assert not goes_back("-3", [None])


@pytest.mark.parametrize("held", [["6", "7"], ["7", None]])
def test_an_engine_whose_workers_differ_is_given_the_newest_again_and_nothing_older(
    held: list[str | None],
) -> None:
    check_newer("7", held)
    check_newer("8", held)
    with pytest.raises(OlderVersionError):
        check_newer("6", held)
    with pytest.raises(OlderVersionError):
        check_newer("7", ["7", "7"])
