"""Settings mean what they say, come from the environment, and name themselves when wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_bucketsync.config import (
    DEFAULT_SLOT_SIZE_BYTES,
    ENV_PREFIX,
    PlanMode,
    Settings,
    api_key_from_env,
    parse_size,
)
from vllm_bucketsync.errors import ConfigError

WRONG: list[tuple[str, Any]] = [
    ("transport", "carrier_pigeon"),
    ("transport", ""),
    ("slot_size", "many"),
    ("slot_size", "512MB"),
    ("slot_size", "-1"),
    ("slot_size", ""),
    ("slot_size", "9" * 5000),
    ("slot_size", 0),
    ("slot_size", -1),
    ("slot_size", 255),
    ("slot_size", 1.5),
    ("slot_size", True),
    ("num_slots", 0),
    ("num_slots", 65),
    ("num_slots", 1.5),
    ("num_slots", "two"),
    ("num_slots", True),
    ("dir", "shm"),
    ("dir", ""),
    ("dir", "/dev/\0shm"),
    ("dir", 5),
    ("connect_timeout_s", 0),
    ("idle_timeout_s", -1.0),
    ("idle_timeout_s", math.nan),
    ("commit_timeout_s", math.inf),
    ("commit_timeout_s", "soon"),
    ("commit_timeout_s", True),
]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (1, 1),
        ("1", 1),
        ("512MiB", 512 * 1024**2),
        (" 512 mib ", 512 * 1024**2),
        ("3KiB", 3072),
        ("2GiB", 2 * 1024**3),
        ("1TiB", 1024**4),
        ("7B", 7),
    ],
)
def test_a_size_is_read_in_binary_units(text: int | str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "1.5GiB", "1MB", "1 K", "-1", "1e9", "MiB"])
def test_what_is_no_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match="KiB, MiB, GiB or TiB"):
        parse_size(text)


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}={v!r}" for n, v in WRONG])
def test_a_wrong_setting_is_refused_by_its_name_and_its_variable(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**{name: value})

    text = str(caught.value)
    assert text.startswith(f"{name} is {value!r}; expected ")
    assert text.endswith(f"; set it as {name}= or in {ENV_PREFIX}{name.upper()}")


@pytest.mark.parametrize(
    ("name", "text"),
    [("num_slots", "2.5"), ("idle_timeout_s", "never"), ("slot_size", "1 MB"), ("dir", "here")],
)
def test_a_wrong_variable_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{text}'.*{ENV_PREFIX}{name.upper()}"):
        Settings.from_env({ENV_PREFIX + name.upper(): text})


def test_what_is_given_wins_over_the_environment_which_wins_over_the_default() -> None:
    environ = {
        "VLLM_BUCKETSYNC_NUM_SLOTS": "3",
        "VLLM_BUCKETSYNC_SLOT_SIZE": "4MiB",
        "VLLM_BUCKETSYNC_IDLE_TIMEOUT_S": "1.5",
        "VLLM_BUCKETSYNC_TRANSPORT": "",
    }

    settings = Settings.from_env(environ, num_slots=4, dir=None)

    assert settings.num_slots == 4
    assert settings.slot_size_bytes == 4 * 1024**2
    assert settings.idle_timeout_s == 1.5
    assert settings.transport == "auto"
    assert settings.dir == Settings().dir


def test_the_process_s_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BUCKETSYNC_NUM_SLOTS", "7")

    assert Settings.from_env().num_slots == 7
    assert Settings().num_slots == 2


def test_a_given_wrong_setting_is_not_hidden_by_a_right_variable() -> None:
    with pytest.raises(ConfigError, match="num_slots is 0"):
        Settings.from_env({"VLLM_BUCKETSYNC_NUM_SLOTS": "3"}, num_slots=0)


def test_an_unknown_setting_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no setting is called 'slots'; there are transport, .*"):
        Settings.from_env({}, slots=2)


def test_a_slot_is_rounded_up_to_the_alignment() -> None:
    assert Settings(slot_size=1000).slot_size_bytes == 1024
    assert Settings(slot_size=256).slot_size_bytes == 256
    assert Settings().slot_size_bytes == DEFAULT_SLOT_SIZE_BYTES


def test_settings_cannot_be_changed_once_they_were_checked() -> None:
    with pytest.raises(AttributeError):
        Settings().num_slots = 0  # type: ignore[misc]


def test_the_engine_s_environment_says_whether_to_plan() -> None:
    assert PlanMode.from_env({}) is PlanMode.AUTO
    assert PlanMode.from_env({"VLLM_BUCKETSYNC_PLAN": ""}) is PlanMode.AUTO
    for mode in PlanMode:
        assert PlanMode.from_env({"VLLM_BUCKETSYNC_PLAN": mode.value}) is mode
    with pytest.raises(ConfigError, match=r"VLLM_BUCKETSYNC_PLAN is 'on'; expected one of auto, "):
        PlanMode.from_env({"VLLM_BUCKETSYNC_PLAN": "on"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, None), ({"VLLM_API_KEY": "secret"}, "secret"), ({"VLLM_API_KEY": ""}, None)],
)
def test_the_key_of_servers_is_vllm_s_own_variable(
    environ: dict[str, str], expected: str | None
) -> None:
    assert api_key_from_env(environ) == expected
