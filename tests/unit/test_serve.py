"""Proves that what an RPC starts never raises, and answers in nothing but primitives.

vLLM's engine core dies of a reply that it cannot encode, and gets out of step with a
worker that raises. The sender is a link of this process: no sockets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.stepping import byte_pairs, commands_of, manifest_of, shm_slots
from support.thread_engine import KeepingSink, ThreadEngine

from vllm_bucketsync import __version__, link, serve
from vllm_bucketsync.adapters import spec_of
from vllm_bucketsync.errors import EngineState, PeerLostError
from vllm_bucketsync.messages import PROTOCOL_VERSION, Abort, Command, Hello, Open, Reply
from vllm_bucketsync.sinks import SinkReport
from vllm_bucketsync.slots import Slots
from vllm_bucketsync.sync import WeightSync

TOKEN = "token"  # noqa: S105 - of this test alone
OFFER: dict[str, Any] = {
    "protocol": PROTOCOL_VERSION,
    "token": TOKEN,
    "update_id": "u",
    "endpoints": {"*": link.SCHEME + TOKEN},
    "engine": 0,
    "connect_timeout_s": 1.0,
    "idle_timeout_s": 1.0,
}


OFFER_OF_NOW = msgspec.convert(OFFER, serve.Offer)


class ScriptedLink:
    """A sender that says what it is told to, a command at a time."""

    def __init__(self, commands: list[Command]) -> None:
        self._commands = iter(commands)
        self.replies: list[Reply] = []

    def exchange(self, replies: list[Reply]) -> list[Command]:
        self.replies.extend(replies)
        return [command for command in [next(self._commands, None)] if command is not None]


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    made = shm_slots(tmp_path)
    yield made
    made.release()
    link.unregister(TOKEN)


def worker_of(make: Callable[[], Any] = KeepingSink, **changes: Any) -> serve.Worker:
    return serve.Worker(make_sink=lambda opened: make(), **changes)


def run(worker: serve.Worker, commands: list[Command], offer: Any = None) -> serve.Result:
    """Run one update over a link, and check that its result is what JSON can carry."""
    link.register(TOKEN, ScriptedLink(commands))
    return plain(serve.update(worker, OFFER if offer is None else offer))


def plain(result: serve.Result) -> serve.Result:
    """Return a result that came unchanged through JSON and msgpack."""
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result)) == result
    return result


def test_an_update_that_works_says_so_and_is_counted(slots: Slots) -> None:
    worker = worker_of(rank=3, dp_index=1, world_size=4)
    before = plain(serve.status(worker))
    assert (before["version"], before["num_updates"], before["region_bytes"]) == (None, 0, 0)

    result = run(worker, commands_of(slots, byte_pairs(300, 700), version="7"))

    assert result == {
        "ok": True,
        "state": "committed",
        "rank": 3,
        "dp_index": 1,
        "version": "7",
        "was_torn": False,
        "is_torn": False,
        "num_tensors": 2,
        "num_bytes": 1000,
        "adapter": None,
        "lora_path": None,
        "error": None,
    }
    after = plain(serve.status(worker))
    assert (
        after.items()
        >= {
            "rank": 3,
            "dp_index": 1,
            "version": "7",
            "update_id": "u",
            "is_torn": False,
            "num_updates": 1,
            "num_failures": 0,
            "transport": "shm",
            "plugin_version": __version__,
            "protocol": PROTOCOL_VERSION,
            "error": None,
        }.items()
    )
    assert after["region_bytes"] > 0
    worker.memory.release()


def test_an_update_of_an_adapter_says_which(slots: Slots) -> None:
    opened, *rest = commands_of(slots, byte_pairs(300), version="7")
    assert isinstance(opened, Open)
    opened = msgspec.structs.replace(
        opened, kind="adapter", adapter=spec_of("policy", version="7", config="{}")
    )
    worker = worker_of()

    result = run(worker, [opened, *rest])

    assert result["state"] == "committed"
    assert (result["adapter"], result["lora_path"]) == ("policy", "bucketsync://policy@7")
    assert result["version"] is None
    worker.memory.release()


def test_hello_says_what_the_worker_still_holds(slots: Slots) -> None:
    worker = worker_of()
    pairs = byte_pairs(300)
    run(worker, commands_of(slots, pairs))
    sender = ScriptedLink([Abort(reason="enough")])
    link.register(TOKEN, sender)
    serve.update(worker, OFFER)

    said = sender.replies[0]
    assert isinstance(said, Hello)
    assert said.token == TOKEN
    assert said.regions == (slots.handles[0].id,)
    assert said.manifests == (manifest_of(pairs).digest,)
    assert said.instance_id == worker.instance_id
    worker.memory.release()


BAD_OFFERS: list[tuple[Any, str, str]] = [
    (None, "config", "the offer is not one of protocol"),
    (7, "config", "the offer is not one of protocol"),
    ("offer", "config", "the offer is not one of protocol"),
    ([], "config", "the offer is not one of protocol"),
    ({}, "config", "missing required field"),
    (object(), "config", "the offer is not one of protocol"),
    ({1: 2}, "config", "the offer is not one of protocol"),
    (OFFER | {"token": None}, "config", "$.token"),
    (OFFER | {"endpoints": ["*"]}, "config", "$.endpoints"),
    (OFFER | {"connect_timeout_s": 0}, "config", "$.connect_timeout_s"),
    (OFFER | {"idle_timeout_s": float("nan")}, "config", "$.idle_timeout_s"),
    (OFFER | {"idle_timeout_s": float("inf")}, "config", "$.idle_timeout_s"),
    (OFFER | {"protocol": PROTOCOL_VERSION + 1}, "unsupported", "install the same version"),
    (OFFER | {"protocol": 1 << 80}, "unsupported", "install the same version"),
    (OFFER | {"endpoints": {}}, "config", "only for none"),
    (OFFER | {"endpoints": {"GPU-1": "x"}}, "config", "only for GPU-1"),
    (OFFER | {"endpoints": {"*": link.SCHEME + "other"}}, "peer_lost", "push again"),
    (OFFER | {"endpoints": {"*": "nonsense"}}, "", ""),
    (OFFER | {"endpoints": {"*": ""}}, "", ""),
    (OFFER | {"endpoints": {"*": "tcp://\udc80"}}, "", ""),
]


@pytest.mark.parametrize(("offer", "code", "match"), BAD_OFFERS)
def test_an_offer_that_cannot_be_taken_is_an_answer(offer: Any, code: str, match: str) -> None:
    worker = worker_of()

    result = plain(serve.update(worker, offer))

    assert (result["ok"], result["state"], result["version"]) == (False, "unchanged", None)
    assert result["error"]["message"]
    assert code in result["error"]["code"]
    assert match in result["error"]["message"]
    status = plain(serve.status(worker))
    assert (status["num_failures"], status["is_torn"], status["transport"]) == (1, False, None)


def test_a_sender_is_found_by_the_device_before_any_other() -> None:
    worker = worker_of(device_uuid="GPU-1")
    sender = ScriptedLink([Abort(reason="enough")])
    link.register("mine", sender)
    endpoints = {"*": link.SCHEME + "other", "GPU-1": link.SCHEME + "mine"}

    result = plain(serve.update(worker, OFFER | {"endpoints": endpoints}))

    assert result["state"] == "unchanged"
    assert len(sender.replies) == 2
    link.unregister("mine")


def test_a_sender_that_says_nothing_more_is_lost(slots: Slots) -> None:
    result = run(worker_of(), commands_of(slots, byte_pairs(300, 700))[:2])

    assert (result["ok"], result["state"]) == (False, "torn")
    assert result["error"]["code"] == PeerLostError.code


def test_a_sender_that_raises_is_an_answer(slots: Slots) -> None:
    class Raising:
        def exchange(self, replies: list[Reply]) -> list[Command]:
            raise ValueError("the trainer failed")

    link.register(TOKEN, Raising())
    result = plain(serve.update(worker_of(), OFFER))

    assert "the trainer failed" in result["error"]["message"]
    assert result["state"] == "unchanged"
    link.unregister(TOKEN)


class RaisingSink(KeepingSink):
    """Raises whatever it is made with, at one call."""

    def __init__(self, call: str, error: BaseException) -> None:
        def fail(found: str, _: Any) -> None:
            if found == call:
                raise error

        super().__init__(fail)
        self._call = call
        self._error = error

    def release(self) -> None:
        super().release()
        if self._call == "release":
            raise self._error


@pytest.mark.parametrize("error", [ValueError("bad \udc80"), OSError(), KeyError(1)], ids=repr)
@pytest.mark.parametrize("call", ["open", "load", "prepare", "commit"])
def test_a_loader_that_raises_is_an_answer_and_the_next_update_works(
    slots: Slots, call: str, error: Exception
) -> None:
    sinks: list[Any] = [RaisingSink(call, error), KeepingSink()]
    worker = worker_of(lambda: sinks.pop(0))
    update = commands_of(slots, byte_pairs(300, 700))

    result = run(worker, update)

    was_written = call in {"prepare", "commit"}
    assert result["state"] == ("torn" if was_written else "unchanged")
    assert result["error"]["details"] == {"remote_type": type(error).__name__}
    assert plain(serve.status(worker))["is_torn"] is was_written
    assert run(worker, update)["ok"]
    status = plain(serve.status(worker))
    assert (status["is_torn"], status["num_updates"], status["num_failures"]) == (False, 1, 1)
    worker.memory.release()


def test_a_loader_that_cannot_be_released_does_not_undo_a_commit(slots: Slots) -> None:
    worker = worker_of(lambda: RaisingSink("release", RuntimeError("cannot let go")))

    result = run(worker, commands_of(slots, byte_pairs(300)))

    assert (result["ok"], result["state"]) == (True, "committed")
    worker.memory.release()


def test_an_interrupt_passes_through_but_leaves_the_worker_told(slots: Slots) -> None:
    sink = RaisingSink("load", KeyboardInterrupt())
    worker = worker_of(lambda: sink)
    with pytest.raises(KeyboardInterrupt):
        run(worker, commands_of(slots, byte_pairs(300)))

    assert sink.calls == ["open", "load", "abort", "release"]
    worker.memory.release()


class BrokenRegion:
    """A region of which nothing works; it was opened by an earlier update."""

    held_bytes = 7

    def owner_is_alive(self) -> bool:
        raise OSError("cannot tell \udc80")

    def close(self) -> None:
        raise OSError("cannot close")


def test_memory_that_cannot_be_looked_at_or_closed_is_an_answer_everywhere() -> None:
    worker = worker_of()
    broken: Any = BrokenRegion()
    worker.memory.regions["broken"] = broken

    update = run(worker, [])
    status = plain(serve.status(worker))
    release = plain(serve.release(worker))

    assert (update["ok"], update["state"]) == (False, "unchanged")
    assert "cannot tell" in update["error"]["message"]
    assert "cannot tell" in status["error"]["message"]
    assert status["region_bytes"] == 7
    assert "cannot close" in release["error"]["message"]
    # It was let go of all the same.
    assert plain(serve.release(worker))["error"] is None
    assert plain(serve.release(worker))["region_bytes"] == 0


def test_release_closes_everything_and_the_next_update_opens_it_again(slots: Slots) -> None:
    worker = worker_of()
    update = commands_of(slots, byte_pairs(300))
    run(worker, update)

    for _ in range(2):
        assert plain(serve.release(worker)).items() >= {"region_bytes": 0, "error": None}.items()
    assert run(worker, update)["ok"]
    assert serve.status(worker)["region_bytes"] > 0

    slots.release()
    assert plain(serve.status(worker))["region_bytes"] == 0


def test_a_failed_update_keeps_the_version_of_the_last_one_that_worked(slots: Slots) -> None:
    worker = worker_of()
    run(worker, commands_of(slots, byte_pairs(300), version="1", update_id="first"))

    result = run(worker, commands_of(slots, byte_pairs(300), version="2", update_id="second")[:2])

    assert (result["ok"], result["version"]) == (False, "1")
    status = serve.status(worker)
    assert (status["version"], status["update_id"]) == ("1", "first")
    assert status["is_torn"]
    assert status["state"] == "torn"
    worker.memory.release()


class PartSink(KeepingSink):
    """Takes what it gets for a part of the weights, as long as it is told to."""

    left_as_is: tuple[str, ...] = ()

    def commit(self) -> SinkReport:
        super().commit()
        return SinkReport(left_as_is=self.left_as_is)


def test_what_was_left_as_it_was_is_marked_until_an_update_is_complete(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = serve.Worker(make_sink=lambda opened: PartSink())
    assert plain(serve.status(worker))["state"] is None
    seen = []
    for left_as_is in (("b.*",), ("a.*",), (), ("a.*",)):
        monkeypatch.setattr(PartSink, "left_as_is", left_as_is)
        run(worker, commands_of(slots, byte_pairs(300), version="1", partial=("a.*", "b.*")))
        seen.append(plain(serve.status(worker))["left_as_is"])
        # Of a failed update nothing came, so nothing was mended.
        run(worker, [])
        status = serve.status(worker)
        assert (status["state"], status["left_as_is"]) == ("unchanged", seen[-1])

    assert seen == [["b.*"], ["a.*", "b.*"], [], ["a.*"]]
    worker.memory.release()


def test_hello_says_which_versions_the_worker_holds(slots: Slots) -> None:
    worker = worker_of()
    worker.adapter_versions = lambda: {"policy": "8"}
    assert (worker.hello(OFFER_OF_NOW).version, worker.version) == (None, None)

    run(worker, commands_of(slots, byte_pairs(300), version="7"))

    hello = worker.hello(OFFER_OF_NOW)
    assert (hello.version, hello.adapters) == ("7", {"policy": "8"})
    worker.memory.release()


class NotingEngine(ThreadEngine):
    """Keeps the arguments and results of every call."""

    def __init__(self) -> None:
        super().__init__(is_in_process=True)
        self.seen: list[Any] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        results = super().call(method, *args)
        self.seen.extend([*args, *results])
        return results


def test_everything_that_goes_through_an_rpc_is_what_json_can_carry() -> None:
    engine = NotingEngine()
    with WeightSync(engine) as sync:
        report = sync.push({"a": torch.ones(3)}, version=1)
        sync.status()
        sync.release()
        with pytest.raises(ValueError, match="empty"):
            sync.push(iter([("", torch.ones(1))]), version=2)

    assert [type(value) for value in engine.seen] == [dict] * 6
    for value in engine.seen:
        plain(value)
    assert engine.seen[0].keys() == OFFER.keys()
    json.dumps(report.as_dict())
    # References were handed over: there are no slots, also once the push is over.
    assert report.slot_size_bytes == 0
    assert engine.workers[0].memory.regions == {}
    assert engine.sinks[-1].calls == ["open", "abort", "release"]
    assert EngineState(engine.seen[1]["state"]) is EngineState.COMMITTED
