"""Runs every method on one engine: warm up, time, compare; and keeps what there is so far."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from vllm_bucketsync.bench.machine import machine, versions
from vllm_bucketsync.bench.traces import nearest, traced
from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import ConfigError, UnsupportedError
from vllm_bucketsync.trace import Trace

from .floors import floors
from .method import Method, Stage
from .models import MODELS
from .native import Checkpoint, Handles, VllmIpc
from .ours import Push
from .result import EnginePlan, EngineResult, Outcome, Row
from .running import running_engine
from .trainer import Trainer
from .truth import Truth

# In the order in which they run: what matters most comes first, in case time is short.
METHODS = (
    *("copy", "copies", "cuda_ipc", "zero_copy", "vllm_ipc_packed", "vllm_ipc", "handles"),
    *("shm", "host_copies", "checkpoint"),
)
# Minutes for a large model.
LEFT_OUT_ON_GPU = frozenset({"checkpoint"})

Tell = Callable[[str], None]
Save = Callable[[EngineResult], None]


def measure(
    plan: EnginePlan, *, tell: Tell, save: Save, begin_s: float | None = None
) -> EngineResult:
    """Run the benchmark. Whatever ends it, the engine is stopped.

    Args:
        plan: What to measure.
        tell: Told what is done, and what came of it.
        save: Given the result so far, after every row.
        begin_s: When the budget began to run, of ``time.monotonic``; now where ``None``.

    Raises:
        ConfigError: The plan makes no sense; nothing was started.
        UnsupportedError: There is no such device, or vLLM does not start.
        LoadError: vLLM itself could not load the weights: nothing can be compared.
    """
    begin_s = time.monotonic() if begin_s is None else begin_s
    _check(plan)
    model, shapes = MODELS[plan.model], MODELS[plan.model].shapes()
    # bf16 ends vLLM's CPU build on some processors.
    dtype = "bfloat16" if plan.device == "cuda" else "float32"
    shm = Path(Settings().dir)
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        folder = Path(name)
        model.write_config(folder, dtype=dtype)
        tell(f"start an engine for {plan.model} on {plan.device}")
        eager = plan.enforce_eager
        with running_engine(folder, dtype=dtype, device=plan.device, enforce_eager=eager) as llm:
            tell(f"make {len(shapes)} tensors of a trainer")
            trainer = Trainer(shapes, dtype=dtype, device=torch.device(plan.device))
            settings = {"slot_size": plan.slot_size, "num_slots": plan.num_slots}
            stage = Stage(llm=llm, trainer=trainer, settings=settings)
            tell("load both versions with vLLM's own loaders, to compare with")
            truth = Truth(stage, folder=folder)
            result = EngineResult(
                plan=plan,
                machine=machine(plan.device),
                versions=versions(with_vllm=True),
                num_bytes=trainer.num_bytes,
                num_tensors=len(shapes),
                compared_bytes=truth.compared_bytes,
                compares_outputs=truth.compares_outputs,
                unlike=truth.unlike,
            )
            runner = _Runner(plan, stage, truth, tell=tell, begin_s=begin_s)
            for method in _methods(plan, stage, folder):
                result.rows.append(runner.row(method))
                result.seconds = time.monotonic() - begin_s
                save(result)
    return result


def _check(plan: EnginePlan) -> None:
    Settings.from_env(slot_size=plan.slot_size, num_slots=plan.num_slots)
    if plan.repeat < 1 or plan.warm_up < 0:
        raise ConfigError(
            f"repeat is {plan.repeat} and warm-up is {plan.warm_up}; expected 1 or more, and 0 or "
            f"more"
        )
    if unknown := sorted({*plan.methods} - {*METHODS}):
        raise ConfigError(
            f"no method is called {', '.join(unknown)}; there are {', '.join(METHODS)}"
        )
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} finds no GPU here; take --device cpu")


def _methods(plan: EnginePlan, stage: Stage, folder: Path) -> list[Method]:
    made: tuple[Method, ...] = (
        *floors(stage),
        Push(stage, "cuda_ipc", what="buckets in device memory", transport="cuda_ipc"),
        Push(
            stage,
            "zero_copy",
            what="straight from the trainer's own memory",
            transport="cuda_ipc",
            zero_copy=True,
        ),
        VllmIpc(stage, packed=True),
        VllmIpc(stage, packed=False),
        Handles(stage),
        Push(stage, "shm", what="buckets in shared memory", transport="shm"),
        Checkpoint(stage, folder),
    )
    by_name = {method.name: method for method in made}
    return [by_name[name] for name in plan.methods]


class _Runner:
    def __init__(
        self, plan: EnginePlan, stage: Stage, truth: Truth, *, tell: Tell, begin_s: float
    ) -> None:
        self._plan = plan
        self._stage = stage
        self._truth = truth
        self._tell = tell
        self._begin_s = begin_s

    @property
    def _is_late(self) -> bool:
        budget_s = self._plan.budget_s
        return budget_s is not None and time.monotonic() - self._begin_s > budget_s

    def row(self, method: Method) -> Row:
        """Measure one method. Never raises, whatever fails: the others are to be measured."""
        row = Row(name=method.name, what=method.what, is_floor=method.is_floor)
        if self._is_late:
            row.outcome = Outcome.SKIPPED
            row.text = f"the {self._plan.budget_s:g} s of the whole run were over"
        elif why_not := method.why_not():
            row.outcome, row.text = Outcome.IMPOSSIBLE, why_not
        else:
            self._tell(f"{method.name} …")
            try:
                self._measure(method, row)
            except Exception as error:  # noqa: BLE001 - a row with its error, never a lost run
                row.outcome = Outcome.FAILED
                row.text = f"{type(error).__name__}: {error}"
        self._tell(_line(row))
        return row

    def _measure(self, method: Method, row: Row) -> None:
        try:
            method.prepare()
            for number in range(self._plan.warm_up + self._plan.repeat):
                if self._is_late and number:
                    row.text = "fewer runs than asked for: the time of the whole run was over"
                    row.outcome = Outcome.MEASURED if row.seconds else Outcome.SKIPPED
                    return
                self._run(method, row, is_timed=number >= self._plan.warm_up)
            if self._plan.is_traced and isinstance(method, Push) and not self._is_late:
                row.trace = nearest(lambda: self._traced(method), seconds=median(row.seconds))
        finally:
            method.close()
            if self._stage.has_gpu:
                # Our slots are no memory of torch's, and have to find room.
                torch.cuda.empty_cache()

    def _run(self, method: Method, row: Row, *, is_timed: bool) -> None:
        if not method.is_floor:
            self._stage.trainer.step()
        begin_s = time.perf_counter()
        details = method.run()
        seconds = time.perf_counter() - begin_s
        if not method.is_floor:
            self._truth.check()
        (row.seconds if is_timed else row.warm_up_s).append(seconds)
        if is_timed:
            row.details.append(details)

    def _traced(self, push: Push) -> tuple[float, Trace]:
        self._stage.trainer.step()
        found = traced(push.push)
        self._truth.check()
        return found


def _line(row: Row) -> str:
    if row.median_s is None:
        return f"{row.name}: {row.outcome}: {row.text}"
    first = f", first {1000 * row.warm_up_s[0]:.1f} ms" if row.warm_up_s else ""
    times = f"median {1000 * row.median_s:.2f} ms of {len(row.seconds)}{first}"
    return f"{row.name}: {times}{'; ' if row.text else ''}{row.text}"
