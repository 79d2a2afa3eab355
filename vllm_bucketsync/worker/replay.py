"""Runs a plan: one update, bucket by bucket, without vLLM's loaders.

Direct modules are written in place. For the others the plan fills scratch tensors of
one module, and vLLM post-processes them as soon as the last byte is there. The model
stays live throughout: what is torn by an abort are written weights, never its structure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..boxes import Box
from ..copies import CopyBatch, DeferredCopies, view
from ..layout import TensorMeta
from ..messages import LoadSplit
from ..sinks import Bucket, Piece
from ..timeline import PROCESSING, Timeline
from . import layerwise
from .observe import observe
from .plan import Plan, PlannedModule
from .proofs import Proofs, Written
from .record import Copy

Weights = list[tuple[TensorMeta, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What a bucket holds of a module that is processed.

    Attributes:
        planned: The module.
        copies: What fills its scratch.
        parts: The same: name there, part, source, what is copied.
        num_elements: Elements that are there afterwards, live ones included.
    """

    planned: PlannedModule
    copies: DeferredCopies
    parts: tuple[tuple[str, Box, str, torch.Tensor], ...]
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """What a bucket comes down to, made ready once.

    Attributes:
        plan: The plan that it was made for.
        generation: And which state of it.
        live: Copies straight into live tensors.
        written: The same, each with its module.
        fills: Constants in live tensors.
        steps: Modules that are processed, in the order in which they begin.
        counts: Elements that come to each module.
        others: What goes to vLLM's own loaders.
    """

    plan: Plan
    generation: int
    live: CopyBatch
    written: tuple[Written, ...]
    fills: tuple[tuple[torch.Tensor, float], ...]
    steps: tuple[_Step, ...]
    counts: dict[PlannedModule, int]
    others: tuple[Piece, ...]

    def is_for(self, plan: Plan) -> bool:
        """Whether it was made for a plan as it is now."""
        return self.plan is plan and self.generation == plan.generation


class Replay:
    """One update by plan.

    Attributes:
        plan: The plan.
        has_written: A live tensor has, or may have, new bytes.
        timeline: When modules were post-processed.
    """

    def __init__(self, plan: Plan, *, proofs: Proofs | None = None) -> None:
        """Begin; nothing is written.

        Args:
            plan: The plan.
            proofs: Takes note of every copy, so that it can be verified; ``None``: nothing is.
        """
        self.plan = plan
        self._proofs = proofs
        self._run: list[_Program] = []
        self._scratch: dict[PlannedModule, dict[str, torch.Tensor]] = {}
        self._left: dict[PlannedModule, int] = {}
        self._found: dict[PlannedModule, str] = {}
        self.timeline = Timeline()
        self.has_written = False

    def load(self, bucket: Bucket) -> tuple[Piece, ...]:
        """Take over what the plan knows of a bucket.

        Copies on a device are enqueued on the current stream: synchronise before the
        bucket is given back.

        Returns:
            The pieces that go to vLLM's own loaders.
        """
        program = bucket.prepared
        if not isinstance(program, _Program) or not program.is_for(self.plan):
            program = _compile(self.plan, bucket.pieces)
            bucket.prepared = program if bucket.is_kept else None
        self._execute(program)
        return program.others

    def settle(self) -> LoadSplit:
        """Take over what was observed, once all is well; return what went which way."""
        left = self._count_left()
        done = [one for one in self.plan.modules if not left[one]]
        direct = [one for one in done if one.is_direct]
        processed = [one for one in done if not one.is_direct]
        self.plan.settle(self._found)
        return LoadSplit(
            num_direct=len(direct),
            direct_bytes=sum(one.num_bytes for one in direct),
            num_processed=len(processed),
            processed_bytes=sum(one.num_bytes for one in processed),
            process_s=self.timeline.seconds(PROCESSING),
        )

    def unfinished(self) -> list[PlannedModule]:
        """Return the modules that have not got all of their elements."""
        left = self._count_left()
        return [one for one in self.plan.modules if left[one]]

    def hand_over(self, end: int) -> tuple[list[PlannedModule], Weights]:
        """Give up what is not finished: the stream has left the manifest.

        Args:
            end: The first tensor that is not the manifest's. All before it have come.

        Returns:
            The modules that were not finished, and the tensors that came for them, read
            back from where they were put. Of a sharded tensor only this worker's part
            has values.
        """
        unfinished = self.unfinished()
        given_up = set(unfinished)
        weights = [
            (self.plan.metas[source], self._read_back(source, planned, copies))
            for source, (planned, copies) in self.plan.of_source.items()
            if source < end and planned in given_up
        ]
        self._scratch.clear()
        return unfinished, weights

    def release(self) -> None:
        """Drop scratch tensors. Idempotent."""
        self._scratch.clear()
        self._run.clear()

    def _count_left(self) -> dict[PlannedModule, int]:
        left = {one: one.num_elements for one in self.plan.modules}
        for program in self._run:
            for planned, count in program.counts.items():
                left[planned] -= count
        return left

    def _read_back(
        self, source: int, planned: PlannedModule, copies: tuple[Copy, ...]
    ) -> torch.Tensor:
        meta = self.plan.metas[source]
        dtype, scratch = getattr(torch, meta.dtype), self._scratch.get(planned, {})
        device = planned.live(planned.leaf(copies[0].target)).device
        tensor = torch.zeros(meta.shape, dtype=dtype, device=device)
        for copy in copies:
            leaf = planned.leaf(copy.target)
            found = scratch[leaf] if leaf in scratch else planned.live(leaf)
            view(tensor, copy.source_box).copy_(view(found, copy.target_box))
        return tensor

    def _execute(self, program: _Program) -> None:
        if program.live.num_bytes:
            self.has_written = True
            program.live.run()
        if self._proofs is not None:
            self._proofs.note_written(program.written)
        for to, value in program.fills:
            self.has_written = True
            to.fill_(value)
        self._run.append(program)
        for step in program.steps:
            planned = step.planned
            if planned not in self._scratch:
                self._scratch[planned] = _filled_scratch(planned)
                self._left[planned] = planned.num_elements
            scratch = self._scratch[planned]
            step.copies.run(scratch)
            if self._proofs is not None:
                for leaf, box, source, data in step.parts:
                    to = view(scratch[leaf], box)
                    self._proofs.note_aside(planned, leaf, to, source=source, data=data)
            self._left[planned] -= step.num_elements
            if not self._left[planned]:
                self._process(planned)

    def _process(self, planned: PlannedModule) -> None:
        scratch = self._scratch.pop(planned)
        if self._proofs is not None:
            self._proofs.check_aside(planned)
        self.has_written = True
        begin_ns = self.timeline.now()

        def process() -> None:
            layerwise.process(planned.module, scratch)

        if planned.why_not_direct is None:
            self._found[planned] = observe(planned, scratch, process)
        else:
            process()
        self.timeline.note(PROCESSING, begin_ns, about=planned.path)


def _filled_scratch(planned: PlannedModule) -> dict[str, torch.Tensor]:
    scratch = layerwise.scratch_of(planned.module)
    for fill in planned.fills:
        if not fill.is_live:
            view(scratch[planned.leaf(fill.target)], fill.target_box).fill_(fill.value)
    return scratch


def _compile(plan: Plan, pieces: tuple[Piece, ...]) -> _Program:
    """Make a bucket's part of a plan ready."""
    written: list[Written] = []
    aside: dict[PlannedModule, list[tuple[str, Box, str, torch.Tensor]]] = defaultdict(list)
    counts: dict[PlannedModule, int] = defaultdict(int)
    fills: list[tuple[torch.Tensor, float]] = []
    tensors: dict[tuple[PlannedModule, str], torch.Tensor] = {}
    for piece in pieces:
        planned, copies = plan.of_source.get(piece.index, (None, ()))
        if planned is None:
            continue
        if planned not in counts and piece.first_byte == 0:
            fills += _live_fills(planned, piece.index)
        for copy, source, box in _parts(piece, copies):
            counts[planned] += box.num_elements
            leaf = planned.leaf(copy.target)
            if not (planned.is_direct or copy.is_live):
                aside[planned].append((leaf, box, piece.meta.name, source))
                continue
            key = (planned, leaf)
            if key not in tensors:
                tensors[key] = planned.live(leaf)
            to = view(tensors[key], box)
            written.append(Written(planned, leaf, to, piece.meta.name, source))
    return _Program(
        plan=plan,
        generation=plan.generation,
        live=CopyBatch((one.to, one.data) for one in written),
        written=tuple(written),
        fills=tuple(fills),
        steps=tuple(
            _Step(
                planned=one,
                copies=DeferredCopies((leaf, box, data) for leaf, box, _, data in aside[one]),
                parts=tuple(aside[one]),
                num_elements=count,
            )
            for one, count in counts.items()
            if not one.is_direct
        ),
        counts=dict(counts),
        others=tuple(piece for piece in pieces if piece.index in plan.by_loaders),
    )


def _live_fills(planned: PlannedModule, source: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield the constants in live tensors, with the source that comes to a module first."""
    if source != min(copy.source for copy in planned.copies):
        return
    for fill in planned.fills:
        if planned.is_direct or fill.is_live:
            yield view(planned.live(planned.leaf(fill.target)), fill.target_box), fill.value


def _parts(piece: Piece, copies: tuple[Copy, ...]) -> Iterator[tuple[Copy, torch.Tensor, Box]]:
    """Yield what a piece holds of each copy: the part of the source, and of the target."""
    for copy in copies:
        for source, target in piece.share(copy.source_box, copy.target_box):
            yield copy, source, target
