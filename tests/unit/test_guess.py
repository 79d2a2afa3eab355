"""Proves what a trainer sends before its workers have spoken, and that no guess is taken for truth.

A real sender without a wire, as in ``test_sender.py``: workers stayed connected since the
last update, so their word is known.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.stepping import WISH, byte_pairs, hello, manifest_of

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import EngineState, PeerLostError, RemoteProtocolError
from vllm_bucketsync.inputs import open_source
from vllm_bucketsync.messages import (
    Abort,
    Aborted,
    Ack,
    Command,
    Conclude,
    Done,
    Error,
    Fallback,
    Finish,
    Hello,
    Open,
    Prepared,
    Ready,
    Reply,
)
from vllm_bucketsync.route import Route
from vllm_bucketsync.sender import Sender
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.update import Phase, Update

PAIRS = byte_pairs(300, 700, 8)
MANIFEST = manifest_of(PAIRS)


class Warm:
    """A trainer whose workers have been through one update of the same tensors."""

    def __init__(self, *, num_workers: int = 1, is_stream: bool = False) -> None:
        self.num_workers = num_workers
        self.is_stream = is_stream
        self.slots = Slots(Settings(slot_size=512, num_slots=3))
        first = self.sender(known={})
        for rank in range(num_workers):
            first.receive(key_of(rank), hello(rank=rank))
        run(first, Ready(), Ack(seq=0), Ack(seq=1), Ack(seq=2), Prepared())
        first.commit()
        run(first, Done())
        assert first.error is None
        self.known = first.kept()

    def sender(self, *, known: Any = None) -> Sender:
        given: Any = iter(self.pairs) if self.is_stream else list(self.pairs)
        return Sender(
            update=Update(
                update_id="u",
                version="1",
                token="secret",  # noqa: S106 - of this test alone
                num_workers=(self.num_workers,),
            ),
            source=open_source(given),
            slots=self.slots,
            route=Route(wish=WISH, slots=self.slots),
            known=self.known if known is None else known,
        )

    @property
    def pairs(self) -> list[tuple[str, torch.Tensor]]:
        return [(meta.name, tensor) for meta, tensor in PAIRS]


@pytest.fixture
def warm() -> Any:
    made = Warm()
    yield made
    made.slots.release()


def key_of(rank: int) -> bytes:
    return b"worker %d" % rank


def exhaust(sender: Sender) -> list[Command]:
    said: list[Command] = []
    while outgoing := sender.advance():
        said += [command for _, command in outgoing]
    return said


def run(sender: Sender, *replies: Reply) -> list[Command]:
    """Let every worker answer, and return what the sender says to all of them."""
    said = exhaust(sender)
    for reply in replies:
        for key in list(sender.peers):
            sender.receive(key, reply)
        said += exhaust(sender)
    return said


def kinds(commands: list[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def word(warm: Warm, rank: int = 0, **changes: Any) -> Hello:
    known = warm.known[key_of(rank)]
    return hello(rank=rank, **{"regions": known.regions, "manifests": known.manifests, **changes})


def test_one_worker_gets_a_warm_update_before_it_has_spoken_and_commits_on_its_own(
    warm: Warm,
) -> None:
    sender = warm.sender()

    assert kinds(exhaust(sender)) == ["Open", "Batch", "Batch", "Batch"]
    assert (sender.phase, sender.num_silent) == (Phase.STREAMING, 1)
    assert sender.waiting_for() == "1 of 1 workers that have not said hello"
    sender.receive(key_of(0), word(warm))
    assert (exhaust(sender), sender.num_silent) == ([], 0)
    (conclude,) = run(sender, Ready())
    assert isinstance(conclude, Conclude)
    assert (conclude.num_batches, conclude.manifest) == (3, MANIFEST.digest)
    assert sender.phase is Phase.COMMITTING
    assert run(sender, Ack(seq=0), Ack(seq=1), Ack(seq=2), Done()) == []
    assert sender.has_ended
    assert (sender.error, sender.engine_state) == (None, EngineState.COMMITTED)
    assert sender.kept() == warm.known


def test_of_several_workers_none_gets_a_bucket_before_all_are_ready_and_all_vote() -> None:
    warm = Warm(num_workers=2)
    sender = warm.sender()

    assert kinds(exhaust(sender)) == ["Open", "Open"]
    sender.receive(key_of(0), word(warm, 0))
    sender.receive(key_of(0), Ready())
    assert exhaust(sender) == []
    sender.receive(key_of(1), word(warm, 1))
    sender.receive(key_of(1), Ready())
    said = exhaust(sender)
    assert kinds(said) == ["Batch"] * 6 + ["Finish"] * 2
    assert all(type(one) is Finish for one in said[6:])
    warm.slots.release()


def test_a_stream_is_not_begun_before_its_worker_is_ready() -> None:
    warm = Warm(is_stream=True)
    sender = warm.sender()

    assert kinds(exhaust(sender)) == ["Open"]
    sender.receive(key_of(0), word(warm))
    said = run(sender, Ready(), Ack(seq=0), Ack(seq=1), Ack(seq=2))
    assert kinds(said) == ["Batch", "Batch", "Batch", "Finish"]
    warm.slots.release()


def test_a_worker_of_a_stream_that_came_anew_is_told_what_the_others_were_promised() -> None:
    warm = Warm(num_workers=2, is_stream=True)
    sender = warm.sender()
    exhaust(sender)
    sender.receive(key_of(0), word(warm, 0))
    sender.receive(key_of(0), Ready())

    sender.lose(key_of(1), PeerLostError("gone", pid=1))
    sender.receive(b"anew", hello(rank=1, instance_id="another process"))

    offers = sender.advance()
    assert [(key, type(one).__name__) for key, one in offers] == [
        (key_of(0), "Open"),
        (b"anew", "Open"),
        (b"anew", "Metas"),
    ]
    assert [one.manifest for _, one in offers if isinstance(one, Open)] == [MANIFEST.digest] * 2
    said = run(sender, Ready(), Ack(seq=0), Ack(seq=1), Ack(seq=2))
    assert kinds(said)[-2:] == ["Finish", "Finish"]
    assert sender.error is None
    warm.slots.release()


def test_a_worker_that_left_and_came_anew_is_offered_all_of_it_again(warm: Warm) -> None:
    sender = warm.sender()
    exhaust(sender)

    sender.lose(key_of(0), PeerLostError("gone", pid=1))

    assert (sender.error, sender.phase, sender.peers) == (None, Phase.GREETING, {})
    sender.receive(b"anew", hello(rank=0, instance_id="another process"))
    assert kinds(exhaust(sender)) == ["Open", "Metas"]
    assert kinds(run(sender, Ready())) == ["Batch", "Batch", "Batch", "Finish"]
    assert sender.error is None


def test_a_worker_that_comes_anew_before_its_end_was_seen_takes_its_own_place(
    warm: Warm,
) -> None:
    sender = warm.sender()
    exhaust(sender)

    sender.receive(b"anew", hello(rank=0, instance_id="another process"))

    assert (sender.error, list(sender.peers)) == (None, [b"anew"])
    assert kinds(exhaust(sender)) == ["Open", "Metas"]


@pytest.mark.parametrize(
    "changes",
    [
        {"token": "another offer's"},
        {"instance_id": "another process"},
        {"rank": 1},
        {"regions": ()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_word_that_is_not_what_was_known_ends_the_update(
    warm: Warm, changes: dict[str, Any]
) -> None:
    sender = warm.sender()
    exhaust(sender)

    sender.receive(key_of(0), replace(word(warm), **changes))

    assert isinstance(sender.error, RemoteProtocolError)
    assert "push again" in str(sender.error)
    assert sender.kept() == {}


def test_a_region_that_is_not_offered_any_more_may_be_gone(warm: Warm) -> None:
    warm.known = {
        key: replace(said, regions=(*said.regions, "of another, which was dropped"))
        for key, said in warm.known.items()
    }
    sender = warm.sender()
    exhaust(sender)

    sender.receive(key_of(0), word(warm, regions=warm.known[key_of(0)].regions[:1]))

    assert sender.error is None


def test_a_failure_before_a_word_tells_nobody_and_waits_for_nobody(warm: Warm) -> None:
    sender = warm.sender()
    exhaust(sender)

    sender.fail(KeyboardInterrupt())

    assert exhaust(sender) == []
    assert sender.has_ended
    assert sender.has_silent_guess
    states = [sender.engine_state]
    # Its call still runs: it may have come meanwhile.
    sender.is_unsure = True
    states.append(sender.engine_state)
    assert states == [EngineState.UNCHANGED, EngineState.UNKNOWN]


def test_a_worker_that_was_given_up_and_comes_after_all_says_what_it_holds(warm: Warm) -> None:
    sender = warm.sender()
    exhaust(sender)
    sender.fail(ValueError("the trainer's"))

    sender.receive(key_of(0), word(warm))

    (abort,) = exhaust(sender)
    assert isinstance(abort, Abort)
    assert (sender.has_ended, sender.has_silent_guess) == (False, False)
    for reply in (Ready(), Ack(seq=0), Aborted(state=EngineState.TORN)):
        sender.receive(key_of(0), reply)
    assert (sender.has_ended, sender.engine_state) == (True, EngineState.TORN)
    assert "the trainer's" in str(sender.error)


def test_what_was_sent_to_a_worker_that_left_may_be_in_its_model_until_it_comes_anew(
    warm: Warm,
) -> None:
    sender = warm.sender()
    exhaust(sender)

    sender.lose(key_of(0), PeerLostError("gone", pid=1))

    assert (sender.peers, sender.has_silent_guess) == ({}, True)
    sender.receive(b"anew", hello(rank=0))
    assert not sender.has_silent_guess


def test_what_one_worker_does_not_say_mends_no_other_that_is_torn(warm: Warm) -> None:
    sender = warm.sender()
    exhaust(sender)
    sender.receive(key_of(0), word(warm))
    torn = Error(code="load", message="broken", details={}, state=EngineState.TORN)
    sender.receive(key_of(0), torn)

    sender.is_unsure = True

    assert sender.engine_state is EngineState.TORN


def test_a_failure_after_its_word_aborts_as_ever(warm: Warm) -> None:
    sender = warm.sender()
    exhaust(sender)
    sender.receive(key_of(0), word(warm))

    sender.fail(ValueError("the trainer's"))

    (abort,) = exhaust(sender)
    assert isinstance(abort, Abort)
    assert not sender.has_ended


def test_a_fallback_in_a_hurry_is_an_error(warm: Warm) -> None:
    sender = warm.sender()
    exhaust(sender)
    sender.receive(key_of(0), word(warm))

    sender.receive(key_of(0), Fallback(transport="shm", reason="unmapped"))

    assert isinstance(sender.error, RemoteProtocolError)
    assert "unmapped" in str(sender.error)


def test_a_refusal_in_a_hurry_is_the_workers_own(warm: Warm) -> None:
    sender = warm.sender()
    exhaust(sender)
    sender.receive(key_of(0), word(warm))
    asleep = Error(code="engine_asleep", message="asleep", details={}, state=EngineState.UNCHANGED)

    sender.receive(key_of(0), asleep)

    assert "asleep" in str(sender.error)
    assert sender.engine_state is EngineState.UNCHANGED
    assert sender.has_ended
    assert sender.kept() == {}


def test_the_oldest_manifest_is_forgotten_on_both_ends_alike(warm: Warm) -> None:
    digests = tuple(f"m{number}" for number in range(4))
    warm.known = {key: replace(said, manifests=digests) for key, said in warm.known.items()}
    sender = warm.sender()

    assert kinds(exhaust(sender)) == ["Open", "Metas"]
    sender.receive(key_of(0), word(warm))
    run(sender, Ready(), Ack(seq=0), Ack(seq=1), Ack(seq=2), Prepared())
    sender.commit()
    run(sender, Done())
    assert sender.kept()[key_of(0)].manifests == (*digests[1:], MANIFEST.digest)
