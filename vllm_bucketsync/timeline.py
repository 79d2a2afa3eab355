"""What an end of an update did when: its stages, one after the other, and parts of them.

Times are the kernel's monotonic clock, which all processes of a host share, so the
timelines of a trainer and its workers can be laid side by side (``trace.py``).
"""

from __future__ import annotations

import time
from collections import defaultdict

import msgspec

from .handles import Count, ShortText

# What a trainer is about before and after its phases (``update.Phase``), and parts of those.
EXAMINING, RETURNING = "examining", "returning"
PACKING, WAITING_FOR_SLOT, MAKING = "packing", "waiting for a slot", "making tensors"
# What a worker is about, and a part of that. An atomic update stages instead of loading.
WAITING, OPENING, LOADING, STAGING = "waiting", "opening", "loading", "staging"
PREPARING, COMMITTING, ABORTING = "preparing", "committing", "aborting"
PROCESSING = "processing"
# More are counted, but not kept one by one.
MAX_SPANS = 16_384
NO_BUCKET = -1
# What a name may have to be told.
_MAX_ABOUT_CHARS = 200


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time.

    Attributes:
        name: What.
        begin_ns: When it began, in the nanoseconds of ``time.monotonic_ns``.
        end_ns: When it ended.
        bucket: Which bucket it was about; ``NO_BUCKET`` for none.
        region: Which region holds that bucket.
        about: Which module it was about; empty for none.
    """

    name: ShortText
    begin_ns: Count
    end_ns: Count
    bucket: int = NO_BUCKET
    region: int = NO_BUCKET
    about: ShortText = ""


class Timeline:
    """One end of one update. Stages follow each other without a gap; spans lie within them.

    Attributes:
        stages: What was done, one after the other. The first ``MAX_SPANS`` of them.
        spans: Parts of stages that are worth showing. The first ``MAX_SPANS`` of them.
    """

    def __init__(self, stage: str | None = None) -> None:
        """Begin, with a stage or without."""
        self.stages: list[Span] = []
        self.spans: list[Span] = []
        self._sums_ns: dict[str, int] = defaultdict(int)
        self._stage: tuple[str, int, int] | None = None
        self._since_ns = 0
        if stage is not None:
            self.enter(stage)

    @staticmethod
    def now() -> int:
        """Return the time, for ``note`` and ``count``."""
        return time.monotonic_ns()

    def enter(self, stage: str, *, bucket: int = NO_BUCKET, region: int = NO_BUCKET) -> None:
        """End the stage that is going on, and begin the next."""
        self.end()
        self._stage = (stage, bucket, region)

    def end(self) -> None:
        """End the stage that is going on. Idempotent."""
        now_ns, since_ns = self.now(), self._since_ns
        stage, self._stage, self._since_ns = self._stage, None, now_ns
        if stage is not None:
            name, bucket, region = stage
            self._sums_ns[name] += now_ns - since_ns
            if len(self.stages) < MAX_SPANS:
                self.stages.append(Span(name, since_ns, now_ns, bucket, region))

    def note(
        self,
        name: str,
        begin_ns: int,
        *,
        bucket: int = NO_BUCKET,
        region: int = NO_BUCKET,
        about: str = "",
    ) -> None:
        """Keep a part of a stage, which ends now."""
        end_ns = self.now()
        self.count(name, end_ns - begin_ns)
        if len(self.spans) < MAX_SPANS:
            about = about[-_MAX_ABOUT_CHARS:]
            self.spans.append(Span(name, begin_ns, end_ns, bucket, region, about))

    def count(self, name: str, duration_ns: int) -> None:
        """Add to what ``name`` took in all, without keeping when."""
        self._sums_ns[name] += duration_ns

    def seconds(self, *names: str) -> float:
        """Return what stages and spans of these names took in all; ended ones only."""
        return sum(self._sums_ns[name] for name in names if name in self._sums_ns) / 1e9

    def stages_ms(self) -> dict[str, float]:
        """Return what each stage, and each kind of span, took in all, in milliseconds."""
        return {name: duration_ns / 1e6 for name, duration_ns in self._sums_ns.items()}
