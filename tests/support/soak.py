"""Updates of every kind, one after the other, into one engine, and what the processes hold.

Which kind comes next is decided by a seed. Weights and adapters are those of two trainers,
so that what is served can be compared with what was first served from the same ones.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from support import tiny_models
from support.adapter_tensors import CONFIG, LINEAR, request_of

from vllm_bucketsync import BucketSyncError, WeightSync

KIND = "qwen3"
ADAPTERS = ("policy", "judge")
# Each is a manifest, a layout, or memory of its own.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"slot_size": "1MiB"},
    {"slot_size": 1024, "num_slots": 4},
    {"slot_size": "48KiB", "num_slots": 1},
    {},
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What both ends held after so many updates.

    Attributes:
        num_updates: How many.
        rss_bytes: Resident bytes: the trainer's, and the workers'.
        num_fds: Descriptors, likewise.
        num_threads: Threads, likewise.
        num_files: Entries of /dev/shm.
    """

    num_updates: int
    rss_bytes: tuple[int, int]
    num_fds: tuple[int, int]
    num_threads: tuple[int, int]
    num_files: int


@dataclass
class Soak:
    """One engine under updates.

    Attributes:
        llm: The engine, with LoRA, whose workers are other processes.
        seed: Decides what comes when.
        samples: What was held, in order.
        counts: How often each kind of update was made.
    """

    llm: Any
    seed: int = 0
    samples: list[Sample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - to be repeated
        self._models = [tiny_models.trainer_model(KIND, seed=seed) for seed in range(2)]
        self._tensors = [tiny_models.checkpoint_tensors(KIND, seed=seed) for seed in range(2)]
        self._adapters = [_adapter(seed, self._tensors[0]) for seed in range(2)]
        self._sync = WeightSync(self.llm, **SETTINGS[0])
        self._pids = sorted({int(one["pid"]) for one in self._sync.status()})
        self.num_updates = 0

    def run(self, num_updates: int, *, sample_every: int) -> None:
        """Make so many updates; afterwards the engine serves the first trainer's weights."""
        for _ in range(num_updates):
            name, step = self._random.choice(self._steps())
            with contextlib.suppress(_ExpectedError):
                step()
            self.counts[name] += 1
            self.num_updates += 1
            if self.num_updates % sample_every == 0:
                self.samples.append(self._sample())
        self.settle()

    def settle(self) -> list[Any]:
        """Push the first trainer's weights and adapters; return the requests for those."""
        self._sync.push(self._tensors[0], version="last")
        reports = [
            self._sync.push_lora((tensors, _CONFIG), name=name, version="last")
            for name, tensors in zip(ADAPTERS, self._adapters, strict=True)
        ]
        return [request_of(report) for report in reports]

    def close(self) -> None:
        """Give everything back."""
        self._sync.close()

    def write(self, folder: Path) -> None:
        """Write samples as JSON, and draw them."""
        folder.mkdir(parents=True, exist_ok=True)
        data = [vars(sample) for sample in self.samples]
        (folder / "soak.json").write_text(json.dumps({"counts": self.counts, "samples": data}))
        _draw(self.samples, folder / "soak.svg")

    def _steps(self) -> list[tuple[str, Callable[[], object]]]:
        """Return what can come next; what is here twice comes twice as often."""
        which = self._random.randrange(2)
        tensors, name = self._tensors[which], ADAPTERS[which]
        shuffled = list(tensors.items())
        self._random.shuffle(shuffled)
        attention = {key: one for key, one in tensors.items() if "self_attn" in key}
        rest = ["*.mlp.*", "*norm*", "*embed*", "lm_head*"]
        push = self._sync.push
        return [
            ("dict", lambda: push(tensors, version=which)),
            ("dict", lambda: push(tensors, version=which)),
            ("module", lambda: push(self._models[which], version=which)),
            ("generator", lambda: push(iter(shuffled), version=which)),
            ("another order", lambda: push(dict(shuffled), version=which)),
            ("a part", lambda: push(attention, version=which, partial=rest)),
            ("atomic", lambda: push(tensors, version=which, atomic=True)),
            ("verified", lambda: push(tensors, version=which, verify="digest")),
            ("dry run", lambda: push(tensors, version=which, dry_run=True)),
            ("refused", lambda: self._fail(tensors | {"nothing": torch.ones(1)})),
            ("failing", lambda: self._fail(_failing(shuffled))),
            ("adapter", lambda: self._push_adapter(name, which)),
            ("adapter", lambda: self._push_adapter(name, 1 - which)),
            ("removed adapter", lambda: self._sync.remove_lora(name)),
            ("release", self._sync.release),
            ("another sync", self._renew),
            ("request", lambda: answers(self.llm)),
        ]

    def _push_adapter(self, name: str, which: int) -> None:
        self._sync.push_lora((self._adapters[which], _CONFIG), name=name, version=which)

    def _fail(self, source: object) -> None:
        try:
            self._sync.push(source, version="wrong")
        except (BucketSyncError, _ExpectedError) as error:
            raise _ExpectedError from error
        raise AssertionError("what cannot be pushed was pushed")

    def _renew(self) -> None:
        self._sync.close()
        self._sync = WeightSync(self.llm, **self._random.choice(SETTINGS))

    def _sample(self) -> Sample:
        gc.collect()
        ours = psutil.Process()
        workers = [psutil.Process(pid) for pid in self._pids]
        return Sample(
            num_updates=self.num_updates,
            rss_bytes=(ours.memory_info().rss, sum(one.memory_info().rss for one in workers)),
            num_fds=(ours.num_fds(), sum(one.num_fds() for one in workers)),
            num_threads=(ours.num_threads(), sum(one.num_threads() for one in workers)),
            num_files=len(list(Path("/dev/shm").iterdir())),  # noqa: S108 - to be counted
        )


_CONFIG = CONFIG | {"target_modules": list(LINEAR)}


class _ExpectedError(Exception):
    """An update failed that had to."""


def answers(llm: Any, request: Any = None) -> Any:
    """Return greedy tokens and log-probabilities."""
    from support.adapters import outputs_of

    return outputs_of(llm, request)


def _failing(pairs: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from pairs[: len(pairs) // 2]
    raise _ExpectedError


def _adapter(seed: int, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter of every linear layer."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEAR:
            outputs, inputs = tensor.shape
            prefix = f"base_model.model.{module}"
            found[f"{prefix}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.3
            found[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.3
    return found


def _draw(samples: list[Sample], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    numbers = [sample.num_updates for sample in samples]
    for end, (name, style) in enumerate((("trainer", "-"), ("workers", "--"))):
        resident = [sample.rss_bytes[end] / 2**20 for sample in samples]
        axes.plot(numbers, resident, style, color="#0072B2", label=f"memory of the {name}")
    axes.set(xlabel="updates", ylabel="resident memory, MiB", title="Memory over updates")
    axes.set_ylim(bottom=0)
    others = axes.twinx()
    for end, (name, style) in enumerate((("trainer", "-"), ("workers", "--"))):
        fds = [sample.num_fds[end] for sample in samples]
        others.plot(numbers, fds, style, color="#D55E00", label=f"descriptors of the {name}")
    others.set_ylabel("descriptors")
    others.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path)
