"""The doctor on a machine with a GPU: every trial is made there, and passes."""

from __future__ import annotations

import pytest
import torch

from vllm_bucketsync.config import Settings
from vllm_bucketsync.doctor.findings import State
from vllm_bucketsync.doctor.transports import Deadline, check_transports, trials
from vllm_bucketsync.probe import machine_probe
from vllm_bucketsync.transport.devices import uuid_of

pytestmark = pytest.mark.gpu


def test_every_transport_works_on_every_device() -> None:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]

    found = list(
        check_transports(Settings(), probe=machine_probe(), deadline=Deadline.after(200.0))
    )

    states = {one.name: (one.state, one.found, one.advice) for one in found}
    assert all(one.state is State.OK for one in found), states
    assert [one.name for one in found] == ["devices", *(trial.name for trial in trials(gpus))]
    assert all(uuid_of(gpu) in found[0].found for gpu in gpus)
