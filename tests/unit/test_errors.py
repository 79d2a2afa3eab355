"""Every error has a code of its own, survives the wire with its facts, and is a builtin too."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import msgspec
import pytest

from vllm_bucketsync import errors, wire_errors
from vllm_bucketsync.errors import BucketSyncError, EngineState

CLASSES = [
    cls
    for cls in vars(errors).values()
    if inspect.isclass(cls) and issubclass(cls, BucketSyncError)
]
# Only caught, never raised as themselves: what they group has builtins of its own.
GROUPS = {BucketSyncError, errors.TransportError}

SAMPLES: list[BucketSyncError] = [
    errors.BucketSyncError("something"),
    errors.ConfigError("num_slots is 0"),
    errors.SourceError("'a.weight' is on the meta device", name="a.weight"),
    errors.SourceError("the mapping holds no tensors"),
    errors.UnsupportedError("no IPC here"),
    errors.EngineBusyError("update 7 runs"),
    errors.EngineAsleepError("wake up first"),
    errors.EngineUnreachableError("refused", url="http://localhost:8000"),
    errors.OlderVersionError("not newer", version="3", held="7"),
    errors.TransportError("lost"),
    errors.ChannelTimeoutError(timeout_s=0.5, waiting_for="ack from rank 1", advice="look"),
    errors.PeerLostError("rank 1 is gone", pid=4711),
    errors.PeerLostError("rank 1 is gone"),
    errors.RegionError("no memory is left"),
    errors.CorruptionError(
        "a bit", name="a", first_byte=512, num_bytes=256, bucket=3, transport="shm"
    ),
    errors.StagingError("no room", needed_bytes=9, device_bytes=1, host_bytes=2),
    errors.ProtocolError("out of order"),
    errors.LocalProtocolError("Ack is not allowed"),
    errors.RemoteProtocolError("junk"),
    errors.LoadError("2 problems", name="a", problems=["a: x", "b: y"]),
    errors.UnknownTensorError("no place", name="a", problems=("no place",)),
    errors.MissingTensorError("no value", name="a", problems=("no value",)),
    errors.PlanError("other bytes", name="a"),
    errors.VerifyError("other bytes", name="a", problems=("a: x",)),
    errors.ApplyError("half-way", name="a", problems=("b",), cause="load"),
    errors.DuplicateTensorError("twice", name="a", problems=("twice",)),
    errors.TensorMismatchError("shape", name="a", problems=("s",), expected="[2]", got="[3]"),
    errors.AdapterError("no room", adapter="p", problems=("no room",)),
    errors.AdapterConfigError(
        "rank", adapter="p", problems=("r",), setting="r", expected="at most 8", found="64"
    ),
    errors.AdapterModuleError("no place", adapter="p", problems=("q",), unmatched=("q",)),
    errors.AdapterTensorError(
        "shape", adapter="p", problems=("s",), tensor="q", expected="[4]", got="[3]"
    ),
    errors.AdapterCapacityError("full", adapter="p", problems=("f",), limit=2, held=("a", "b")),
    errors.RemoteError("KeyError: 'x'", remote_type="KeyError"),
]


def over_the_wire(error: BaseException) -> BucketSyncError:
    code, text, details = wire_errors.to_wire(error)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode((code, text, details)))
    return wire_errors.from_wire(*arrived)


def test_every_class_is_found_by_a_code_of_its_own() -> None:
    by_code = wire_errors.error_classes()

    assert sorted(cls.__name__ for cls in by_code.values()) == sorted(c.__name__ for c in CLASSES)
    assert all(by_code[cls.code] is cls and "code" in vars(cls) for cls in CLASSES)


def test_every_class_is_sampled_here() -> None:
    assert {type(error) for error in SAMPLES} == set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_says_what_it_is_and_ends_in_error(cls: type[BucketSyncError]) -> None:
    assert cls.__name__.endswith("Error")
    assert cls.__doc__


@pytest.mark.parametrize("cls", [c for c in CLASSES if c not in GROUPS], ids=lambda c: c.__name__)
def test_a_class_that_is_raised_is_also_a_builtin_that_a_stranger_would_catch(
    cls: type[BucketSyncError],
) -> None:
    builtins = {
        base
        for base in cls.__mro__
        if base.__module__ == "builtins" and base not in {object, BaseException, Exception}
    }

    assert builtins


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_wire_with_its_attributes(error: BucketSyncError) -> None:
    arrived = over_the_wire(error)

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.details() == error.details()
    assert {f: getattr(arrived, f) for f in error.fields} == {
        f: getattr(error, f) for f in error.fields
    }


def test_rank_and_state_are_set_by_whoever_received_the_error() -> None:
    error = wire_errors.from_wire("load", "x", {}, rank=0, engine_state=EngineState.TORN)

    assert error.rank == 0
    assert error.engine_state is EngineState.TORN
    assert errors.LoadError("y").rank is None
    assert errors.LoadError("y").engine_state is None


def test_a_stranger_becomes_a_remote_error_that_names_its_class() -> None:
    arrived = over_the_wire(ZeroDivisionError("by zero"))

    assert isinstance(arrived, errors.RemoteError)
    assert arrived.remote_type == "ZeroDivisionError"
    assert str(arrived) == "ZeroDivisionError: by zero"


def test_a_code_of_a_newer_peer_becomes_a_remote_error_that_keeps_it() -> None:
    arrived = wire_errors.from_wire("not_invented_yet", "text", {"field": 1})

    assert isinstance(arrived, errors.RemoteError)
    assert arrived.remote_type == "not_invented_yet"
    assert str(arrived) == "text"


def test_details_that_no_class_knows_are_ignored_and_missing_ones_are_none() -> None:
    arrived = wire_errors.from_wire("source", "text", {"__class__": "x", "args": ["y"]})

    assert type(arrived) is errors.SourceError
    assert arrived.name is None
    assert str(arrived) == "text"


def test_an_attribute_that_is_no_primitive_travels_as_text() -> None:
    error = errors.SourceError("text", name="a")
    error.name = {"not": "a primitive"}  # type: ignore[assignment]

    assert error.details() == {"name": "{'not': 'a primitive'}"}


def test_a_subclass_of_a_user_does_not_stand_for_its_parent() -> None:
    class MineError(errors.LoadError):
        """Has no code of its own."""

    arrived = over_the_wire(MineError("x", name="a"))

    assert type(arrived) is errors.LoadError
    assert arrived.name == "a"


def test_a_timeout_says_how_long_for_what_and_what_to_do() -> None:
    error = errors.ChannelTimeoutError(timeout_s=30.0, waiting_for="Hello", advice="start it")

    assert str(error) == "waited 30 s for Hello; start it"
    assert isinstance(error, TimeoutError)


def pickled(error: BucketSyncError) -> BucketSyncError:
    copied: BucketSyncError = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    return copied


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, ""),
        (EngineState.UNCHANGED, ""),
        (EngineState.TORN, " (the engine is torn; push again to repair it)"),
        (EngineState.COMMITTED, " (the engine has the new weights all the same)"),
        (EngineState.UNKNOWN, " (what the engine holds is unknown; ask status())"),
    ],
)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda e: type(e).__name__)
def test_the_text_of_an_error_says_what_the_engine_holds_unless_it_is_unchanged(
    sample: BucketSyncError, state: EngineState | None, said: str
) -> None:
    error = copy.copy(sample)
    error.engine_state = state

    assert str(error) == str(sample) + said
    # The wire and the command line have other words for the state.
    assert wire_errors.to_wire(error)[1] == error.message == str(sample)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("copied", [pickled, copy.copy, copy.deepcopy])
def test_an_error_comes_whole_out_of_a_trainers_process_pool(
    sample: BucketSyncError, copied: Callable[[BucketSyncError], BucketSyncError]
) -> None:
    error = copy.copy(sample)
    error.rank, error.engine_state = 3, EngineState.TORN
    error.add_note("a note")
    if isinstance(error, OSError):
        error.errno = 28

    found = copied(error)

    assert type(found) is type(sample)
    assert (str(found), found.message) == (str(error), str(sample))
    assert vars(found) == vars(error)
    assert found.__notes__ == ["a note"]
    assert getattr(found, "errno", None) == getattr(error, "errno", None)
