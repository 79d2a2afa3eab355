"""A digest is the same number wherever bytes lie, and another one where a bit of them is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_samples import bytes_tensor

from vllm_bucketsync import digests as module
from vllm_bucketsync.digests import ROW_BYTES, Digests, digest, packed, unpacked

MASK = (1 << 64) - 1
KNOWN = -5743030351973277660
SIZES = [0, 1, 7, 8, 9, 255, 256, 257, 511, 512, 4096, 4099, 70_001]


def oracle(data: bytes) -> int:
    """Return the digest as the module's docstring defines it, without torch."""
    total, num_rows = len(data), -(-len(data) // ROW_BYTES)
    for row in range(0, len(data), ROW_BYTES):
        words = data[row : row + ROW_BYTES].ljust(ROW_BYTES, b"\0")
        row_sum = sum(int.from_bytes(words[i : i + 8], "little") for i in range(0, ROW_BYTES, 8))
        total += row_sum * (2 * (num_rows - row // ROW_BYTES) - 1)
    return total & MASK


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_is_what_its_definition_says(size: int) -> None:
    data = bytes_tensor(size, seed=size)

    assert digest(data) & MASK == oracle(data.numpy().tobytes())


def test_a_known_digest_never_changes() -> None:
    # Trainer and engine compare their own: another value is another wire.
    assert digest(torch.arange(1000, dtype=torch.int16).view(torch.uint8)) == KNOWN


@given(st.binary(min_size=1, max_size=1200), st.data())
def test_any_single_flipped_bit_changes_the_digest(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8

    assert digest(as_tensor(bytes(flipped))) != digest(as_tensor(data))


@pytest.mark.parametrize("size", [1, 8, 256, 300])
@pytest.mark.parametrize("value", [0x00, 0xFF, 0x80])
def test_every_bit_of_a_plain_pattern_counts(size: int, value: int) -> None:
    data = torch.full((size,), value, dtype=torch.uint8)
    expected = digest(data)

    for byte in range(size):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert digest(data) != expected
            data[byte] ^= 1 << bit


@given(st.binary(max_size=900), st.binary(max_size=900))
def test_bytes_that_differ_in_one_word_or_in_length_differ(one: bytes, other: bytes) -> None:
    num_words = sum(one[i : i + 8] != other[i : i + 8] for i in range(0, 900, 8))
    if one != other and (len(one) != len(other) or num_words == 1):
        assert digest(as_tensor(one)) != digest(as_tensor(other))


def test_zeros_behind_the_end_and_rows_in_another_order_are_found() -> None:
    data = bytes_tensor(2 * ROW_BYTES, seed=1)
    longer = torch.cat([data, torch.zeros(5, dtype=torch.uint8)])
    swapped = torch.cat([data[ROW_BYTES:], data[:ROW_BYTES]])

    assert len({digest(data), digest(longer), digest(swapped)}) == 3


def test_words_in_another_order_within_a_row_are_not_found() -> None:
    data = bytes_tensor(ROW_BYTES, seed=1)

    assert digest(torch.cat([data[8:], data[:8]])) == digest(data)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=8), st.integers(0, 3), st.booleans())
def test_a_slot_digested_at_once_is_its_tensors_one_by_one(
    sizes: list[int], num_gap_rows: int, is_dirty: bool
) -> None:
    step = max(sizes) + (1 + num_gap_rows) * ROW_BYTES
    step -= step % ROW_BYTES
    slot = bytes_tensor(step * len(sizes), seed=2 if is_dirty else 3)
    packed_sizes, offset = [], 0
    for size in sizes:
        packed_sizes.append((offset, size))
        offset += -(-size // ROW_BYTES) * ROW_BYTES
    dense = [slot[first : first + size] for first, size in packed_sizes]
    sparse = [slot[i * step : i * step + size] for i, size in enumerate(sizes)]
    ends = [sum(sizes[:i]) for i in range(len(sizes))]
    crowded = [slot[end : end + size] for end, size in zip(ends, sizes, strict=True)]

    for stretches in (dense, sparse, crowded, [one.clone() for one in dense], dense[::-1]):
        digests = Digests()
        digests.add_all(stretches)

        assert digests.take() == [digest(one.clone()) for one in stretches]


@pytest.mark.parametrize(
    ("step", "num_bytes"), [(1, 64 * ROW_BYTES), (3, 22 * ROW_BYTES)], ids=["dense", "sparse"]
)
def test_a_dense_slot_is_read_in_one_pass_and_gaps_are_not_read(
    step: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    row_sums = module._row_sums

    def counted(data: torch.Tensor) -> torch.Tensor:
        passes.append(data.numel())
        return row_sums(data)

    monkeypatch.setattr(module, "_row_sums", counted)
    slot = bytes_tensor(64 * ROW_BYTES, seed=4)
    digests = Digests()

    digests.add_all([slot[i * ROW_BYTES : (i + 1) * ROW_BYTES] for i in range(0, 64, step)])

    assert sum(passes) == num_bytes
    assert len(passes) == (1 if step == 1 else 22)


@pytest.mark.parametrize("shift", range(9))
def test_bytes_have_the_same_digest_wherever_they_lie(shift: int) -> None:
    data = bytes_tensor(1000, seed=5)
    memory = torch.zeros(1024, dtype=torch.uint8)
    memory[shift : shift + 1000] = data

    assert digest(memory[shift : shift + 1000]) == digest(data)


def test_a_builder_begins_anew_after_each_fetch_and_takes_over_another() -> None:
    one, two = bytes_tensor(300, seed=6), bytes_tensor(40, seed=7)
    first, second = Digests(), Digests()
    first.add(one)
    second.add(two)

    first.absorb(second)

    assert first.take() == [digest(one), digest(two)]
    assert (first.take(), second.take()) == ([], [])


def test_digests_travel_as_eight_bytes_each_the_lowest_first() -> None:
    numbers = [1, -1, -(1 << 63), (1 << 63) - 1]

    assert packed([1, -2]) == b"\x01" + bytes(7) + b"\xfe" + b"\xff" * 7
    assert unpacked(packed(numbers)) == numbers
    assert packed([]) == b""
    with pytest.raises(ValueError, match="9 bytes"):
        unpacked(bytes(9))
