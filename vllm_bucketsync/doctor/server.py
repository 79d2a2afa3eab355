"""Whether a running server can be updated from here: asked, and tried without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_bucketsync import __version__
from vllm_bucketsync.clients.http import HttpEngine
from vllm_bucketsync.config import api_key_from_env
from vllm_bucketsync.errors import BucketSyncError
from vllm_bucketsync.messages import PROTOCOL_VERSION
from vllm_bucketsync.sync import WeightSync

from .findings import Finding, State

# Nobody waits for a server as long as a trainer would.
ANSWER_TIMEOUT_S = 30.0


class _Nothing(torch.nn.Module):
    """A source that no engine has a place for, and that is no error: one unknown buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("vllm_bucketsync_doctor", torch.zeros(1))


def check_server(url: str, *, api_key: str | None = None) -> Iterator[Finding]:
    """Ask a server what it is, and try whether its workers can be reached.

    Nothing is written, and no request is held back: it is a dry run of an update with
    nothing in it.

    Args:
        url: Its base URL, or ``unix:///path/of/its/socket``.
        api_key: What it was started with; the environment's where ``None``.
    """
    try:
        engine = HttpEngine(url, api_key=api_key_from_env() if api_key is None else api_key)
        with WeightSync(
            engine, connect_timeout_s=ANSWER_TIMEOUT_S, idle_timeout_s=ANSWER_TIMEOUT_S
        ) as sync:
            yield from _found(url, engine, sync)
    except BucketSyncError as error:
        yield _refused(url, error)


def _found(url: str, engine: HttpEngine, sync: WeightSync) -> Iterator[Finding]:
    engine.check_ready()
    facts = engine.facts()
    found = f"{engine.name}, with {facts['worker_extension_cls']}"
    yield Finding(name=url, state=State.OK, found=found)
    workers = sync.status()
    yield _versions(url, workers)
    yield _workers(url, workers)
    yield _requests(url, facts)
    yield _update(url, sync, num_workers=len(workers))


def _versions(url: str, workers: Sequence[Mapping[str, Any]]) -> Finding:
    name = f"{url}: versions"
    theirs = {(str(one.get("plugin_version")), one.get("protocol")) for one in workers}
    if theirs == {(__version__, PROTOCOL_VERSION)}:
        found = f"{__version__} (protocol {PROTOCOL_VERSION}) at both ends"
        return Finding(name=name, state=State.OK, found=found)
    said = ", ".join(
        f"{version} (protocol {number})" for version, number in sorted(theirs, key=str)
    )
    found = f"the server has {said}; here is {__version__} (protocol {PROTOCOL_VERSION})"
    is_understood = {protocol for _, protocol in theirs} == {PROTOCOL_VERSION}
    state = State.WARN if is_understood else State.FAILED
    advice = "install one version of vllm_bucketsync at both ends"
    return Finding(name=name, state=state, found=found, advice=advice)


def _workers(url: str, workers: Sequence[Mapping[str, Any]]) -> Finding:
    name = f"{url}: workers"
    found = [
        f"rank {one['rank']} on {one['device']}, pid {one['pid']}: "
        + ("the weights it started with" if one["version"] is None else f"{one['version']!r}")
        + (f", last over {one['transport']}" if one.get("transport") else "")
        for one in workers
    ]
    if asleep := [str(one["rank"]) for one in workers if one.get("is_asleep")]:
        advice = "wake them up before a push: POST /wake_up?tags=weights"
        said = f"the weights of rank {', '.join(asleep)} are asleep; {'; '.join(found)}"
        return Finding(name=name, state=State.FAILED, found=said, advice=advice)
    if wrong := worker_problems(workers):
        advice = "a complete push repairs it"
        return Finding(name=name, state=State.FAILED, found="; ".join(wrong), advice=advice)
    return Finding(name=name, state=State.OK, found="; ".join(found))


def held_back(url: str, *, api_key: str | None = None) -> str:
    """Return why a server answers no requests now; empty where it does.

    Raises:
        BucketSyncError: It did not answer this.
    """
    engine = HttpEngine(url, api_key=api_key_from_env() if api_key is None else api_key)
    try:
        return _why_held_back(engine.facts())
    finally:
        engine.close()


def _why_held_back(facts: Mapping[str, Any]) -> str:
    if facts.get("is_updating"):
        return "an update is running there now"
    return "it is paused" if facts["is_paused"] else ""


def _requests(url: str, facts: Mapping[str, Any]) -> Finding:
    name = f"{url}: requests"
    why = _why_held_back(facts)
    if not why:
        return Finding(name=name, state=State.OK, found="are answered")
    advice = "a complete push resumes it after a torn update; otherwise whoever paused it"
    return Finding(
        name=name,
        state=State.WARN,
        found=f"held back: {why}",
        advice=advice if facts["is_paused"] else "",
    )


def _update(url: str, sync: WeightSync, *, num_workers: int) -> Finding:
    name = f"{url}: an update"
    try:
        sync.push(_Nothing(), version="doctor", partial=["*"], dry_run=True)
    except BucketSyncError as error:
        return _refused(name, error)
    found = f"its workers ({num_workers}) found this process, and went through a dry run"
    return Finding(name=name, state=State.OK, found=found)


def _refused(name: str, error: BucketSyncError) -> Finding:
    """Return an error as a finding: its text ends with what to do."""
    found, _, advice = error.message.rpartition("; ")
    found, advice = (found, advice) if found else (advice, "")
    return Finding(
        name=name, state=State.FAILED, found=f"{type(error).__name__}: {found}", advice=advice
    )


def worker_problems(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with what workers hold; nothing where all is well.

    Args:
        workers: What ``WeightSync.status()`` returned.
    """
    found = [
        f"rank {worker['rank']} of engine {worker['engine']} holds parts of two sets of weights; "
        f"a complete push repairs it"
        for worker in workers
        if worker["is_torn"]
    ]
    for engine in sorted({worker["engine"] for worker in workers}):
        versions = {worker["version"] for worker in workers if worker["engine"] == engine}
        if len(versions) > 1:
            listed = ", ".join(sorted(map(repr, versions)))
            found.append(f"the workers of engine {engine} hold different weights: {listed}")
    return found
