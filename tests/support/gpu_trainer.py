"""A trainer on a GPU, in a process of its own whose allocator is set as a test wants it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from vllm_bucketsync.sync import WeightSync
from vllm_bucketsync.tensors import byte_view

from .fake_engine import FakeEngine
from .trainer_process import PipeEngine, strike_around

# What a worker's sink tells of each tensor.
Loaded = dict[str, tuple[str, tuple[int, ...], str]]


def many_tensors(device: str = "cuda", *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of many dtypes, sizes and forms; some larger than a small slot."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "odd": random(3).to(torch.uint8),
        "embed.weight": random(1000, 96).bfloat16(),
        "layer.weight": random(257, 129),
        "transposed": random(64, 80).half().t(),
        "rows": random(100, 10)[3:70],
        "columns": random(100, 10)[:, 2:7],
        "scalar": random(1)[0].double(),
        "empty": random(0, 7),
        "wide": random(3, 70_000).bfloat16(),
        "expanded": random(1, 5).expand(9, 5),
        "flags": random(40) > 0,
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def hashes_of(tensors: dict[str, torch.Tensor]) -> Loaded:
    """Return what a worker has to tell of these tensors."""
    return {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            hashlib.blake2b(byte_view(tensor).cpu().numpy().tobytes(), digest_size=16).hexdigest(),
        )
        for name, tensor in tensors.items()
    }


def _train(pipe: Connection, settings: dict[str, Any], device: str, is_zero_copy: bool) -> None:
    """Push with whatever allocator the environment says, and tell what came of it."""
    tensors = many_tensors(device)
    with FakeEngine(device="cuda:0") as engine, WeightSync(engine, **settings) as sync:
        reports = [
            sync.push(tensors, version=version, zero_copy=is_zero_copy) for version in range(3)
        ]
        (loaded,) = engine.call("loaded")
        told = [(report.transport, report.transport_reason) for report in reports]
        pipe.send((told, loaded == hashes_of(tensors)))


def train_with(
    environment: dict[str, str],
    *,
    device: str = "cuda",
    is_zero_copy: bool = False,
    **settings: Any,
) -> Any:
    """Run a trainer and its engine under an environment.

    Returns:
        What each of three pushes said of its transport, and whether the bytes are right.
    """
    before = dict(os.environ)
    os.environ.update(environment)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train, args=(theirs, settings, device, is_zero_copy))
    try:
        process.start()
        theirs.close()
        if not ours.poll(120):
            raise TimeoutError("the trainer says nothing")
        return ours.recv()
    finally:
        os.environ.clear()
        os.environ.update(before)
        ours.close()
        process.join(20)
        process.kill()
        process.join(5)
        process.close()


def _dying_source(tensors: dict[str, torch.Tensor], at: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index, (name, tensor) in enumerate(tensors.items()):
        if index == at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield name, tensor.cuda()


def _train_and_die(
    pipe: Connection, strike: int | str, transport: str, tensors: dict[str, torch.Tensor]
) -> None:
    if isinstance(strike, str):
        strike_around(strike, signal.SIGKILL)
    at = strike if isinstance(strike, int) else -1
    with WeightSync(PipeEngine(pipe), slot_size="1MiB", transport=transport) as sync:
        torch.zeros(1, device="cuda")
        sync.push(_dying_source(tensors, at), version="lost")
    os._exit(3)  # it was to be killed


def die_while_pushing(
    engine: Any, strike: int | str, transport: str, tensors: dict[str, torch.Tensor]
) -> Any:
    """Let a trainer ask for an update, and be killed in the middle of it.

    Args:
        engine: Has ``call``; is asked what the trainer asks.
        strike: At which tensor, or at which step of the sender.
        transport: What it uses.
        tensors: What it would send, on the CPU.

    Returns:
        What the worker answered to the update.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_train_and_die, args=(theirs, strike, transport, tensors), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(60):
            raise TimeoutError("the trainer asks for nothing")
        method, arguments = ours.recv()
        (result,) = engine.call(method, *arguments)
        process.join(30)
        if process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"the trainer ended with {process.exitcode}")
        return result
    finally:
        ours.close()
        process.kill()
        process.join(5)
        process.close()
