"""What a benchmark of an engine was asked for, and what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from vllm_bucketsync.bench.stages import stages_of
from vllm_bucketsync.trace import Trace

# The plain copy that everything is divided by, and vLLM's own ways.
FLOOR = "copy"
VLLM_IPC = ("vllm_ipc_packed", "vllm_ipc")
# Of a row: what is summed up, and what goes into a file of its own.
_NO_DATA = frozenset({"details", "trace"})


class Outcome(StrEnum):
    """What became of a row."""

    MEASURED = "measured"
    FAILED = "failed"
    IMPOSSIBLE = "not possible here"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What is to be measured.

    Attributes:
        model: A name of ``models.MODELS``.
        device: ``cpu`` or ``cuda``, for the trainer and the engine.
        methods: Which rows, in this order.
        repeat: Timed runs of each row.
        warm_up: Runs before them, whose times are kept apart.
        budget_s: Seconds after which nothing more is begun; ``None`` for no end.
        enforce_eager: Whether the engine leaves out CUDA graphs and compilation.
        slot_size: As in ``Settings``.
        num_slots: As in ``Settings``.
        is_traced: Whether more runs of ours follow, of which traces are kept.
    """

    model: str
    device: str
    methods: tuple[str, ...]
    repeat: int = 7
    warm_up: int = 2
    budget_s: float | None = None
    enforce_eager: bool = True
    slot_size: int | None = None
    num_slots: int | None = None
    is_traced: bool = False


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of one method.

    Attributes:
        name: The method's.
        what: What is in its time.
        is_floor: Whether it only moves bytes.
        outcome: What became of it.
        text: Why it was not measured, or not as often as asked.
        warm_up_s: Seconds of the runs before the timed ones; the first may make memory.
        seconds: Of each timed run. Runs of an engine count only after a comparison.
        details: What each timed run told.
        trace: Of a run like the median one; of ours, where that was asked for.
    """

    name: str
    what: str
    is_floor: bool
    outcome: Outcome = Outcome.MEASURED
    text: str = ""
    warm_up_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    details: list[Mapping[str, Any]] = field(default_factory=list)
    trace: Trace | None = None

    @property
    def median_s(self) -> float | None:
        """Median of the timed runs; ``None`` where there are none, or it failed."""
        is_good = self.outcome is Outcome.MEASURED and self.seconds
        return median(self.seconds) if is_good else None

    def as_dict(self, *, num_bytes: int, floor_s: float | None, vllm_s: float | None) -> Any:
        """Return everything as data that JSON can hold.

        Args:
            num_bytes: Bytes of the weights.
            floor_s: The floor's median.
            vllm_s: That of vLLM's fastest own way.
        """
        found = {key: value for key, value in asdict(self).items() if key not in _NO_DATA}
        if self.median_s is not None:
            found |= {
                "median_s": self.median_s,
                "best_s": min(self.seconds),
                "gb_per_s": num_bytes / self.median_s / 1e9,
                "times_floor": self.median_s / floor_s if floor_s else None,
                "times_vllm_ipc": self.median_s / vllm_s if vllm_s else None,
            }
        return found | {
            "splits": splits(self.details),
            "stages_ms": stages_of(self.details),
            "last": dict(self.details[-1]) if self.details else {},
        }


@dataclass(slots=True, kw_only=True)
class EngineResult:
    """What was measured so far.

    Attributes:
        plan: What was asked for.
        machine: What it was measured on.
        versions: What was measured.
        num_bytes: Bytes of the weights.
        num_tensors: Their number.
        compared_bytes: Bytes that were compared after every run.
        compares_outputs: Whether outputs were compared, too.
        unlike: Some tensors that nothing was compared with.
        rows: One for each method, in the order in which they ran.
        seconds: Of everything, so far.
    """

    plan: EnginePlan
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    num_bytes: int
    num_tensors: int
    compared_bytes: int
    compares_outputs: bool
    unlike: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as data that JSON can hold."""
        medians = {row.name: row.median_s for row in self.rows}
        theirs = [found for name in VLLM_IPC if (found := medians.get(name)) is not None]
        floor_s, vllm_s = medians.get(FLOOR), min(theirs, default=None)
        return {
            "benchmark": "engine",
            "plan": asdict(self.plan),
            "num_bytes": self.num_bytes,
            "num_tensors": self.num_tensors,
            "compared_bytes": self.compared_bytes,
            "compares_outputs": self.compares_outputs,
            "unlike": list(self.unlike),
            "rows": [
                row.as_dict(num_bytes=self.num_bytes, floor_s=floor_s, vllm_s=vllm_s)
                for row in self.rows
            ],
            "seconds": self.seconds,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
        }


def splits(details: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return what the worker of each run said of its time, by the names of its report."""
    found: dict[str, list[float]] = {}
    for one in details:
        for worker in one.get("workers", ())[:1]:
            for name, value in worker.items():
                if name.endswith("_s"):
                    found.setdefault(name, []).append(value)
    return found
