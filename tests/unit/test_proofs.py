"""A tensor that did not take the value it was given is found, and named."""

from __future__ import annotations

import pytest
import torch

from vllm_bucketsync.digests import Digests, digest
from vllm_bucketsync.errors import LocalProtocolError, VerifyError
from vllm_bucketsync.proofs import Proof, seal_all
from vllm_bucketsync.tensors import byte_view


def noted(to: torch.Tensor, data: torch.Tensor, *, name: str = "engine.weight") -> Proof:
    proof = Proof()
    proof.note(name, to, source="trainer.weight", data=data)
    proof.seal()
    return proof


@pytest.mark.parametrize(
    ("to", "data"),
    [
        (torch.zeros(5, 7), torch.randn(5, 7)),
        (torch.zeros(9, 8)[2:5, ::2], torch.randn(4, 3).t()),
        (torch.zeros(64, dtype=torch.bfloat16), torch.randn(64)),
        (torch.zeros(3, 4).t(), torch.randn(3, 1).t().expand(4, 3)),
        (torch.zeros(()), torch.randn(())),
        (torch.zeros(0, 3), torch.randn(0, 3)),
    ],
    ids=["plain", "strided", "cast", "expanded", "scalar", "empty"],
)
def test_a_copy_that_was_made_is_good_and_its_source_may_change(
    to: torch.Tensor, data: torch.Tensor
) -> None:
    to.copy_(data)
    proof = noted(to, data)
    data = data.clone().zero_()

    proof.check(state="x")

    assert proof.num_bytes == to.nbytes


def test_a_copy_that_was_not_made_is_named() -> None:
    proof = noted(torch.zeros(300), torch.ones(300))

    with pytest.raises(VerifyError, match=r"'trainer.weight'.*nothing was written") as caught:
        proof.check(state="nothing was written")
    assert caught.value.name == "engine.weight"
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("byte", [0, 511, 1199])
def test_one_flipped_bit_is_found(byte: int) -> None:
    live = torch.arange(300, dtype=torch.float32)
    proof = noted(live, live.clone())
    proof.check(state="x")
    live.view(torch.uint8)[byte] ^= 0x10

    with pytest.raises(VerifyError, match="1 of 1 parts differ"):
        proof.check(state="x")


def test_of_many_only_the_wrong_ones_are_listed_in_order() -> None:
    live = [torch.full((40,), float(i)) for i in range(30)]
    proof = Proof()
    for number, tensor in enumerate(live):
        proof.note(f"p{number}", tensor, source=f"s{number}", data=tensor)
    proof.seal()
    for tensor in live[5:]:
        tensor[3] += 1

    with pytest.raises(VerifyError, match=r"p5 does not.*25 of 30 parts differ") as caught:
        proof.check(state="x")
    assert caught.value.name == "p5"
    assert [text.split()[0] for text in caught.value.problems] == [f"p{i}" for i in range(5, 21)]


def test_proofs_are_sealed_together_and_checked_as_one() -> None:
    live = [torch.randn(300) for _ in range(4)]
    proofs = [Proof(), Proof()]
    for turn in (0, 1):
        for number, proof in enumerate(proofs):
            tensor = live[2 * turn + number]
            proof.note(f"p{2 * turn + number}", tensor, source="s", data=tensor)
        seal_all(proofs)
    together = Proof()
    for proof in proofs:
        together.absorb(proof)

    together.check(state="x")
    live[2][0] += 1

    with pytest.raises(VerifyError, match=r"p2 does not.*1 of 4 parts"):
        together.check(state="x")


def test_what_is_known_of_a_source_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(300)
    known = {(data.data_ptr(), data.nbytes): digest(byte_view(data))}
    live = data.clone()
    others = {"part": data[:40], "every other": data[::2], "cast": data}
    targets = [data[:40].clone(), data[::2].clone(), data.bfloat16()]
    read: list[int] = []
    add = Digests.add

    def counted(self: Digests, stretch: torch.Tensor) -> None:
        read.append(stretch.numel())
        add(self, stretch)

    proof = Proof()
    with monkeypatch.context() as patch:
        patch.setattr(Digests, "add", counted)
        proof.note("whole", live, source="s", data=data, known=known)
        assert read == []
        for (name, part), to in zip(others.items(), targets, strict=True):
            proof.note(name, to, source="s", data=part, known=known)
        assert read == [160, 600, 600]
    proof.seal()
    proof.check(state="x")

    for name, to in {"whole": live, "part": targets[0], "every other": targets[1]}.items():
        to[7] += 1
        with pytest.raises(VerifyError, match=f"^{name} does not"):
            proof.check(state="x")
        to[7] = data[14] if name == "every other" else data[7]


def test_what_is_known_of_other_bytes_is_found_out() -> None:
    data = torch.randn(300)
    proof = Proof()
    known = {(data.data_ptr(), data.nbytes): 1}
    proof.note("whole", data.clone(), source="s", data=data, known=known)
    proof.seal()

    with pytest.raises(VerifyError):
        proof.check(state="x")


def test_what_is_not_sealed_is_not_taken_for_good() -> None:
    proof = Proof()
    proof.note("engine.weight", torch.zeros(3), source="trainer.weight", data=torch.zeros(3))

    with pytest.raises(LocalProtocolError, match="were not digested"):
        proof.check(state="x")
