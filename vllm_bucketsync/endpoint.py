"""``bucketsync_http``: the routes by which a trainer updates an online server.

An entry point of ``vllm.endpoint_plugins``; vLLM loads it in its API servers only, and
only where ``VLLM_PLUGINS`` names it. Everything lies under ``/v1/``, which is what vLLM
guards with the server's API key. The routes reach the engine as vLLM's own do, through
``EngineClient``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from . import __version__
from .clients import online
from .clients.base import (
    RELEASE_METHOD,
    STATUS_METHOD,
    OwnPause,
    PauseMode,
    UpdateAnswer,
    UpdateRequest,
    verdict,
)
from .errors import BucketSyncError, ChannelTimeoutError, EngineState
from .messages import (
    MAX_ADAPTER_NAME_CHARS,
    MAX_VERSION_CHARS,
    PROTOCOL_VERSION,
    AdapterSpec,
)
from .serve import Offer, Seconds
from .served_metrics import metrics
from .served_names import Names
from .wire_errors import to_dict

logger = logging.getLogger(__name__)

# An offer is a few hundred bytes.
MAX_BODY_BYTES = 64 * 1024

T = TypeVar("T")

router = APIRouter(prefix="/v1/bucketsync", tags=["bucketsync"])


class _Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One update: what the workers get, and what happens around it."""

    offer: Offer
    version: Annotated[str, msgspec.Meta(max_length=MAX_VERSION_CHARS)]
    pause: PauseMode | None = PauseMode.WAIT
    resume_torn: bool = False
    adapter: AdapterSpec | None = None


class _Remove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is to be forgotten, once the requests that run have ended."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER_NAME_CHARS)]
    timeout_s: Seconds = 60.0


class _Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engine's new weights are called."""

    version: Annotated[str, msgspec.Meta(max_length=MAX_VERSION_CHARS)]


class Endpoint:
    """What vLLM makes of the entry point.

    Attributes:
        name: What ``VLLM_PLUGINS`` calls it.
        required_tasks: Only servers with an engine that generates.
    """

    name = "bucketsync_http"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; called once while the server is built."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep the engine for the routes; called once before the server listens."""
        state.bucketsync = _State(engine_client, getattr(state, "openai_serving_models", None))


class _State:
    """What the routes of one API server share.

    Attributes:
        engine: vLLM's ``EngineClient``.
        metrics: On the server's own ``/metrics``.
        pause: Whether the engine is paused because an update left it so.
        running: The update that runs, if there is one; nobody may be waiting for it.
        names: Of adapters, as requests can have them.
    """

    def __init__(self, engine: Any, models: Any = None) -> None:
        self.engine = engine
        self.names = Names(models, make_request=_lora_request)
        self.metrics = metrics()
        self.pause = OwnPause()
        self.running: set[asyncio.Task[Any]] = set()


def _lora_request(**fields: Any) -> Any:
    """Return vLLM's ``LoRARequest``."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(**fields)


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """Say what a trainer has to know before it asks for an update; asks no engine."""
    state = _state(request)
    return {
        "protocol": PROTOCOL_VERSION,
        "plugin_version": __version__,
        "num_workers": online.num_workers(state.engine),
        "worker_extension_cls": state.engine.vllm_config.parallel_config.worker_extension_cls or "",
        "is_updating": bool(state.running),
    }


@router.get("/engine")
async def engine(request: Request) -> dict[str, Any]:
    """Say what the engine says of itself, as soon as it can."""
    found = _state(request).engine
    return {
        "is_paused": bool(await found.is_paused()),
        "weight_version": await _weight_version(found),
    }


@router.post("/update")
async def update(request: Request) -> Any:
    """Run one update: pause, every worker, caches, version, resume.

    Seen through to its end even if whoever asked has gone.
    """
    state = _state(request)
    body = await _body(request, _Update)
    _require_extension(state)
    refusal = None
    if body.adapter is not None:
        refusal = state.names.refusal(body.adapter, version=body.version)
    if refusal is not None:
        return _typed(refusal)
    answer = await _seen_through(state, _run(state, body))
    return {"results": answer.results, "drops_caches": answer.drops_caches}


@router.post("/remove_lora")
async def remove_lora(request: Request) -> dict[str, Any]:
    """Forget an adapter: its name at once, the rest when the requests that run have ended."""
    state = _state(request)
    body = await _body(request, _Remove)
    _require_extension(state)
    return {"results": await _seen_through(state, _remove(state, body))}


async def _seen_through(state: _State, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` comes to. It goes on to its end if whoever asked has gone."""
    if state.running:
        work.close()
        raise HTTPException(409, "another update runs on this server; wait for its end")
    running = asyncio.create_task(work)
    state.running.add(running)
    running.add_done_callback(state.running.discard)
    try:
        return await asyncio.shield(running)
    except ChannelTimeoutError as error:
        raise HTTPException(504, str(error)) from error
    # Whatever vLLM raised: a bare 500 would not tell the trainer why.
    except Exception as error:
        text = f"the engine's call failed: {type(error).__name__}: {error}"
        raise HTTPException(502, text) from error


def _typed(error: BucketSyncError) -> JSONResponse:
    """Return an error as data: vLLM makes one text of what an HTTPException says."""
    return JSONResponse({"detail": to_dict(error)}, status_code=422)


async def _remove(state: _State, body: _Remove) -> list[Any]:
    """Take the name away first, so that no new request comes for it.

    It comes back unless every worker says that the adapter is gone: nobody could ask again
    for one that has no name.
    """
    known = state.names.forget(body.name)
    is_gone = False
    try:
        results = await online.remove_adapter(state.engine, body.name, timeout_s=body.timeout_s)
        is_gone = all(isinstance(one, dict) and one.get("error") is None for one in results)
    finally:
        if not is_gone:
            state.names.restore(body.name, known)
    return results


async def _run(state: _State, body: _Update) -> UpdateAnswer:
    begin_s = time.monotonic()
    request = UpdateRequest(
        offer=msgspec.to_builtins(body.offer),
        version=body.version,
        pause=body.pause,
        resume_torn=body.resume_torn,
        timeout_s=body.offer.connect_timeout_s,
        adapter=body.adapter,
    )
    try:
        answer = await online.update(state.engine, request, pause=state.pause)
    except Exception:
        state.metrics.failures.inc()
        raise
    if body.pause is None:
        # A dry run is no update, but one that was refused counts, as it does in ``status``.
        if any(isinstance(one, dict) and one.get("error") for one in answer.results):
            state.metrics.failures.inc()
    else:
        seconds = time.monotonic() - begin_s
        state.metrics.note(answer.results, version=request.weight_version, seconds=seconds)
        if body.adapter is not None and _have(answer.results, body.adapter):
            state.names.register(body.adapter)
    return answer


def _have(results: list[Any], adapter: AdapterSpec) -> bool:
    """Return whether every worker has an adapter now: this one, whatever else was offered."""
    return verdict(results) is EngineState.COMMITTED and all(
        (one.get("adapter"), one.get("lora_path")) == (adapter.name, adapter.lora_path)
        for one in results
    )


@router.post("/status")
async def status(request: Request) -> dict[str, Any]:
    """Say what every worker holds."""
    state = _state(request)
    _require_extension(state)
    return {"results": await online.call_workers(state.engine, STATUS_METHOD)}


@router.post("/release")
async def release(request: Request) -> dict[str, Any]:
    """Let every worker close the memory that it keeps between updates."""
    state = _state(request)
    _require_extension(state)
    return {"results": await online.call_workers(state.engine, RELEASE_METHOD)}


@router.post("/pause")
async def pause(request: Request, mode: str = PauseMode.WAIT) -> dict[str, Any]:
    """Hold requests back: wait for those that run, abort them, or keep them frozen."""
    if mode not in set(PauseMode):
        raise HTTPException(422, f"mode is {mode!r}; expected one of {', '.join(PauseMode)}")
    await _state(request).engine.pause_generation(mode=mode)
    return {"status": "paused"}


@router.post("/resume")
async def resume(request: Request) -> dict[str, Any]:
    """Let requests run again."""
    await _state(request).engine.resume_generation()
    return {"status": "resumed"}


@router.post("/finish")
async def finish(request: Request) -> dict[str, Any]:
    """Drop every cache that knows old weights, and record what the new ones are called."""
    body = await _body(request, _Finish)
    return {"success": await online.finish(_state(request).engine, body.version)}


def _state(request: Request) -> _State:
    found: _State = request.app.state.bucketsync
    return found


def _require_extension(state: _State) -> None:
    """Refuse before workers are asked: a method that they lack desynchronises them."""
    if not state.engine.vllm_config.parallel_config.worker_extension_cls:
        raise HTTPException(
            501,
            "the workers know nothing of updates; start the server with "
            "--worker-extension-cls vllm_bucketsync.WorkerExtension",
        )


async def _body(request: Request, kind: type[Any]) -> Any:
    """Return a body of bounded size as ``kind``, or answer what is wrong with it."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(
            422, f"the body is not a valid {kind.__name__.lstrip('_').lower()}: {error}"
        ) from error


async def _weight_version(engine: Any) -> str | None:
    if not hasattr(engine, "get_weight_version"):
        return None
    return str(await engine.get_weight_version())
