"""Proves that no error advises a setting that does not exist.

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
from vllm_bucketsync.config import ENV_PREFIX, Settings
from vllm_bucketsync.errors import ChannelTimeoutError, ConfigError, RegionError
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
    sender: Any = SimpleNamespace(phase=phase, waiting_for=lambda: "rank 0")

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
