"""Proves that no error advises a setting that does not exist, or in words of another way in.

Every text of the package is read from its source, and those that are put together when
they are raised are raised.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_bucketsync
from vllm_bucketsync import serve, transfer
from vllm_bucketsync.cli.wording import as_options
from vllm_bucketsync.clients.words import FLAGS, as_arguments, in_words_of
from vllm_bucketsync.config import ENV_PREFIX, Settings
from vllm_bucketsync.errors import (
    AdapterCapacityError,
    BucketSyncError,
    ChannelTimeoutError,
    ConfigError,
    RegionError,
    UnsupportedError,
)
from vllm_bucketsync.receiver import Receiver
from vllm_bucketsync.retained import ReceiverMemory
from vllm_bucketsync.session import State
from vllm_bucketsync.sinks import DiscardSink
from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.transport.shm import ShmRegion
from vllm_bucketsync.update import Phase

FIELDS = set(Settings.__dataclass_fields__)
ARGUMENTS = {
    name
    for call in (WeightSync.__init__, WeightSync.push, WeightSync.push_lora)
    for name in inspect.signature(call).parameters
}
# Arguments of vLLM's own methods that a text tells to call; and the engine's own variable.
OTHERS = {"tags", "plan"}
NAMED = re.compile(rf"\b([a-z]+(?:_[a-z]+)*)=(?![=\w'])|\b({ENV_PREFIX}[A-Z_]*[A-Z])\b")
ADVISED = re.compile(r"\b(?:raise|lower|set) ((?:[a-z]+_)+[a-z]+)(?: or ((?:[a-z]+_)+[a-z]+))?")


def names_in(text: str) -> set[str]:
    """Return what a text calls a setting or an argument."""
    found = {name for match in NAMED.findall(text) for name in match if name}
    found |= {name for match in ADVISED.findall(text) for name in match if name}
    return {
        name.removeprefix(ENV_PREFIX).lower() if name.startswith(ENV_PREFIX) else name
        for name in found
    }


def texts_of_errors(path: Path) -> Iterator[str]:
    """Yield the constant parts of every text that an error of a module is made with."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name.endswith("Error"):
            constants = [
                part.value
                for argument in (*node.args, *(keyword.value for keyword in node.keywords))
                for part in ast.walk(argument)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            yield " … ".join(constants)


def texts_of_the_library(root: Path) -> Iterator[str]:
    """Yield every text in the code that engines and trainers run; docstrings are none."""
    for path in sorted(root.rglob("*.py")):
        if {"cli", "bench", "doctor", "examples"} & set(path.relative_to(root).parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = None
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_flag_that_a_text_names_has_its_argument() -> None:
    texts = texts_of_the_library(Path(vllm_bucketsync.__file__).parent)

    named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", text)}

    # Docker's own.
    assert named - {"--shm-size"} == set(FLAGS)


def test_every_argument_that_a_text_names_is_an_option_or_none_of_a_command() -> None:
    texts = texts_of_the_library(Path(vllm_bucketsync.__file__).parent)

    left = {name for text in texts for name in names_in(as_options(text)) if name not in FIELDS}

    # What no command offers, so that none can be told of it.
    assert left <= {"adapter_name", "expected_workers", "merge", "tags", "plan"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "start it with --worker-extension-cls vllm_bucketsync.WorkerExtension, or a class",
            "start it with worker_extension_cls='vllm_bucketsync.WorkerExtension', or a class",
        ),
        ("start it with --enable-lora", "start it with enable_lora=True"),
        ("with a higher --max-loras than", "with a higher max_loras than"),
        ("--max-lora-rank", "max_lora_rank"),
        ("a larger --shm-size", "a larger --shm-size"),
    ],
)
def test_flags_are_told_as_arguments(text: str, expected: str) -> None:
    assert as_arguments(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "pass the key as api_key= or in VLLM_API_KEY",
            "pass the key as --api-key or VLLM_API_KEY",
        ),
        ("name it in partial= if", "name it in --partial if"),
        (
            "rename it with rename=, or leave it",
            "rename it with --rename or --strip-prefix, or leave it",
        ),
        ("push with pause='keep'", "push with --pause keep"),
        ("raise idle_timeout_s if", "raise VLLM_BUCKETSYNC_IDLE_TIMEOUT_S if"),
        ("set it as dir= or in VLLM_BUCKETSYNC_DIR", "set VLLM_BUCKETSYNC_DIR"),
        ("set dir= or VLLM_BUCKETSYNC_DIR to", "set VLLM_BUCKETSYNC_DIR to"),
        ("set transport to 'auto'", "set VLLM_BUCKETSYNC_TRANSPORT to 'auto'"),
        ("transport cuda_ipc does not work", "transport cuda_ipc does not work"),
        ("use push_lora", "use push-lora"),
        ("VLLM_BUCKETSYNC_SLOT_SIZE", "VLLM_BUCKETSYNC_SLOT_SIZE"),
    ],
)
def test_arguments_are_told_as_options(text: str, expected: str) -> None:
    assert as_options(text) == expected


def test_a_setting_that_the_command_has_an_option_for_is_told_as_that() -> None:
    text = "slot_size is 1; set it as slot_size= or in VLLM_BUCKETSYNC_SLOT_SIZE; set dir to"

    told = as_options(text, settings=["slot_size"])

    assert told == "--slot-size is 1; set --slot-size; set VLLM_BUCKETSYNC_DIR to"


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ([True], "enable_lora=True"),
        ([True, True], "enable_lora=True"),
        ([False], "--enable-lora"),
        ([True, False], "--enable-lora"),
    ],
)
def test_errors_speak_of_arguments_where_all_engines_take_them(
    kinds: list[bool], text: str
) -> None:
    engines: Any = [SimpleNamespace(takes_arguments=kind) for kind in kinds]

    with pytest.raises(UnsupportedError) as caught, in_words_of(engines):
        raise UnsupportedError("start it with --enable-lora")

    assert str(caught.value) == f"start it with {text}"


def test_an_error_keeps_its_attributes_in_other_words() -> None:
    engines: Any = [SimpleNamespace(takes_arguments=True)]

    with pytest.raises(BucketSyncError) as caught, in_words_of(engines):
        raise AdapterCapacityError("a higher --max-loras", adapter="a", limit=3, held=["b"])

    assert isinstance(caught.value, AdapterCapacityError)
    assert (str(caught.value), caught.value.limit) == ("a higher max_loras", 3)


def test_every_setting_that_a_text_of_the_package_names_is_one() -> None:
    root = Path(vllm_bucketsync.__file__).parent
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        for text in texts_of_errors(path):
            found |= dict.fromkeys(names_in(text), f"{path.name}: {text}")

    unknown = {
        name: where for name, where in found.items() if name not in FIELDS | ARGUMENTS | OTHERS
    }
    assert unknown == {}
    assert found.keys() >= {"slot_size", "num_slots", "dir", "expected_workers", "rename"}


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_setting_that_is_wrong_is_named_with_its_variable(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({ENV_PREFIX + field.upper(): "-1"})

    assert names_in(str(caught.value)) == {field}
    assert ENV_PREFIX + field.upper() in str(caught.value)


@pytest.mark.parametrize("phase", Phase)
def test_a_deadline_that_passed_names_the_setting_that_it_came_from(phase: Phase) -> None:
    settings = Settings(connect_timeout_s=1e-9, idle_timeout_s=1e-9, commit_timeout_s=1e-9)
    num_silent = 2 if phase is Phase.GREETING else 0
    sender: Any = SimpleNamespace(phase=phase, num_silent=num_silent, waiting_for=lambda: "rank 0")

    with pytest.raises(ChannelTimeoutError) as caught:
        transfer._Watch(sender, settings).check()

    expected = {Phase.GREETING: "connect_timeout_s", Phase.COMMITTING: "commit_timeout_s"}
    assert names_in(str(caught.value)) == {expected.get(phase, "idle_timeout_s")}


@pytest.mark.parametrize("name", ["connect_timeout_s", "idle_timeout_s"])
def test_a_worker_that_waited_too_long_names_the_trainers_setting(name: str) -> None:
    worker = serve.Worker(make_sink=lambda opened: DiscardSink())
    receiver = Receiver(memory=ReceiverMemory(), make_sink=worker.make_sink)
    offer = serve.Offer(
        protocol=1,
        token="",
        update_id="",
        endpoints={},
        engine=0,
        connect_timeout_s=1e-9,
        idle_timeout_s=1e-9,
    )
    receiver.greet(worker.hello(offer))
    if name == "idle_timeout_s":
        receiver.session.state = State.READY
    silent: Any = SimpleNamespace(receive=lambda timeout_s: None, peer_pid=4711)

    with pytest.raises(ChannelTimeoutError) as caught:
        serve._next_command(silent, receiver, offer)

    assert names_in(str(caught.value)) == {name}
    assert name in FIELDS


def test_memory_that_cannot_be_had_names_every_setting_that_would_help(tmp_path: Path) -> None:
    with pytest.raises(RegionError) as caught:
        ShmRegion.create(1 << 60, directory=str(tmp_path))

    assert names_in(str(caught.value)) == {"slot_size", "num_slots", "dir"}
