"""A picture of where an update's time goes, and of its speed beside a plain copy's.

Above, each way's trace: one row for what an end was about and one for each of its slots,
with the buckets' numbers; what goes on in a slot is pale in the end's own row. Below, GB/s of
every run. Colors are Okabe's and Ito's, which people who see fewer colors can tell apart, and
what matters differs in its pattern, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from vllm_bucketsync.errors import ConfigError, UnsupportedError
from vllm_bucketsync.timeline import (
    LOADING,
    PACKING,
    PROCESSING,
    STAGING,
    WAITING,
    WAITING_FOR_SLOT,
)
from vllm_bucketsync.trace import Trace

SUFFIXES = (".png", ".svg")

_INK, _FLOOR = "#222222", "#D55E00"
_OTHER = "other stages"
# Fill and pattern of each kind of bar, in the order of the legend.
_LOOKS = {
    PACKING: ("#0072B2", ""),
    LOADING: ("#E69F00", ""),
    PROCESSING: ("#CC79A7", "xxx"),
    WAITING: ("#E5E5E5", "////"),
    _OTHER: ("#009E73", ""),
}
_LEGEND = {
    PACKING: "packing a bucket (trainer)",
    LOADING: "loading a bucket (worker)",
    PROCESSING: "post-processing modules (worker)",
    WAITING: "waiting for the other end",
    _OTHER: "other stages",
}
_KINDS = {name: name for name in _LOOKS} | {WAITING_FOR_SLOT: WAITING, STAGING: LOADING}
# It holds what is drawn in the slots' rows, and is pale itself.
_STREAMING = "streaming"
_PALE = 0.25
_DARK = frozenset({PACKING, _OTHER})
# Of a lane's row, and parts of the whole width that text needs.
_HEIGHT, _NUMBER_WIDTH, _LETTER_WIDTH = 0.8, 0.011, 0.009
_WIDTH_IN, _ROW_IN, _MARGIN_IN = 12.0, 0.3, 0.75
# From here on, the slowest would be too short to be seen beside the fastest.
_LOG_FROM = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast one way was.

    Attributes:
        name: What it is called.
        gb_per_s: Of each run, in 10^9 bytes.
        is_floor: Whether the others are compared with it.
    """

    name: str
    gb_per_s: Sequence[float]
    is_floor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is drawn.

    Attributes:
        title: What was measured.
        caption: On what, and how.
        traces: One update of each way of ours, by its name.
        speeds: Of every way.
    """

    title: str
    caption: str
    traces: Mapping[str, Trace]
    speeds: Sequence[Speeds]


def check(path: Path) -> None:
    """Refuse what ``draw`` cannot make, before anything is measured.

    Raises:
        ConfigError: The file's name does not end with a format that can be drawn.
        UnsupportedError: matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"the picture's file is {str(path)!r}; expected a name that ends with "
            f"{' or '.join(SUFFIXES)}"
        )
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "matplotlib, which draws the picture, is not installed here; "
            "pip install 'vllm-bucketsync[plot]'"
        )


def draw(picture: Picture, path: Path) -> None:
    """Draw a picture and write it, as PNG or SVG by the file's name.

    Raises:
        OSError: It cannot be written.
    """
    # Not pyplot: nothing of the process is changed, and no screen is needed.
    from matplotlib.figure import Figure

    heights = [len(_lanes_of(trace)) for trace in picture.traces.values()]
    heights.append(len(picture.speeds))
    total = sum(heights) * _ROW_IN + (len(heights) + 1) * _MARGIN_IN
    figure = Figure(figsize=(_WIDTH_IN, total), layout="constrained")
    figure.supxlabel(picture.caption, fontsize=8, color=_INK)
    *above, below = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    end_ms = max(map(_end_ms, picture.traces.values()), default=1.0)
    for axes, (name, trace) in zip(above, picture.traces.items(), strict=True):
        _draw_trace(axes, name, trace, end_ms=end_ms)
    for axes in above[-1:]:
        axes.set_xlabel("ms from the call of push", fontsize=8)
    _draw_speeds(below, picture.speeds)
    _draw_head(figure, picture.title, drawn=_kinds_in(picture.traces.values()))
    figure.savefig(path, dpi=150)


def _draw_trace(axes: Any, name: str, trace: Trace, *, end_ms: float) -> None:
    lanes = _lanes_of(trace)
    rows = {lane: row for row, lane in enumerate(lanes)}
    for event in _pale_of(trace):
        fill, _ = _LOOKS[_kind_of(event)]
        axes.barh(
            rows[event["pid"]],
            event["dur"] / 1e3,
            left=event["ts"] / 1e3,
            height=_HEIGHT,
            color=fill,
            alpha=_PALE,
            linewidth=0,
            zorder=1.5,
        )
    for event in _bars_of(trace):
        begin_ms, width_ms = event["ts"] / 1e3, event["dur"] / 1e3
        row, kind = rows[event["tid"]], _kind_of(event)
        fill, pattern = _LOOKS[kind]
        axes.barh(
            row,
            width_ms,
            left=begin_ms,
            height=_HEIGHT,
            color=fill,
            hatch=pattern,
            edgecolor="white" if kind != WAITING else "#9A9A9A",
            linewidth=0.5,
            # Parts lie on the stage that they are a part of.
            zorder=3 if kind == PROCESSING else 2,
        )
        text = _text_of(event, share=width_ms / end_ms)
        color = "white" if kind in _DARK else _INK
        middle = begin_ms + width_ms / 2
        axes.text(*(middle, row, text), ha="center", va="center", fontsize=7, color=color, zorder=4)
    axes.set_yticks(range(len(lanes)), lanes.values())
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, end_ms * 1.01)
    axes.set_title(f"{name}: one update of {_end_ms(trace):.1f} ms", fontsize=10, loc="left")
    _make_plain(axes)


def _draw_speeds(axes: Any, speeds: Sequence[Speeds]) -> None:
    medians = [median(one.gb_per_s) for one in speeds]
    for row, (one, middle) in enumerate(zip(speeds, medians, strict=True)):
        looks = {"color": "#E5E5E5", "hatch": "////", "edgecolor": "#9A9A9A"}
        axes.barh(row, middle, height=0.6, **(looks if one.is_floor else {"color": "#56B4E9"}))
        axes.plot(one.gb_per_s, [row] * len(one.gb_per_s), "o", color=_INK, ms=3, alpha=0.7)
        # Beside the axes: next to a dot it would seem to be that run's.
        axes.annotate(
            f"median {middle:.3g} GB/s",
            (1.01, row),
            xycoords=("axes fraction", "data"),
            annotation_clip=False,
            va="center",
            fontsize=8,
        )
    for one, middle in zip(speeds, medians, strict=True):
        if one.is_floor:
            axes.axvline(middle, color=_FLOOR, linestyle="--", linewidth=1.5)
    slowest, fastest = (pick(s for one in speeds for s in one.gb_per_s) for pick in (min, max))
    is_log = fastest > _LOG_FROM * slowest
    if is_log:
        axes.set_xscale("log")
    axes.set_xlim(slowest / 2 if is_log else 0, fastest * (2 if is_log else 1.05))
    axes.set_yticks(range(len(speeds)), [one.name for one in speeds])
    axes.set_ylim(len(speeds) - 0.4, -0.6)
    axes.set_xlabel(f"GB/s{' (logarithmic)' if is_log else ''}; a dot for each run", fontsize=8)
    axes.set_title(
        "speed: bars are medians; the dashed line is what a plain copy of the same bytes reaches",
        fontsize=10,
        loc="left",
    )
    _make_plain(axes)


def _draw_head(figure: Any, title: str, *, drawn: frozenset[str]) -> None:
    """Draw the title above the legend: one thing, which the layout makes room for."""
    from matplotlib.patches import Patch

    patches = [
        Patch(
            facecolor=fill,
            hatch=pattern,
            edgecolor="#9A9A9A" if kind == WAITING else "white",
            label=_LEGEND[kind],
        )
        for kind, (fill, pattern) in _LOOKS.items()
        if kind in drawn
    ]
    figure.legend(
        handles=patches,
        title=title,
        title_fontsize=13,
        fontsize=9,
        loc="outside upper center",
        ncols=max(1, len(patches)),
        frameon=False,
    )


def _make_plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _bars_of(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in _all_bars(trace) if event["name"] != _STREAMING]


def _pale_of(trace: Trace) -> list[dict[str, Any]]:
    """Return what an end's own row would have a gap for."""
    return [
        event
        for event in _all_bars(trace)
        if event["name"] == _STREAMING
        or (event["tid"] != event["pid"] and _kind_of(event) == LOADING)
    ]


def _lanes_of(trace: Trace) -> dict[int, str]:
    """Return what to call each row, by lane, in the order of the trace."""
    events = trace["traceEvents"]
    ends = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {e["tid"]: e for e in events if e["name"] == "thread_name"}
    return {
        # The first row of an end has its name, without the number of its process.
        lane: ends[e["pid"]].split(" pid ")[0] if lane == e["pid"] else e["args"]["name"]
        for lane, e in lanes.items()
    }


def _kinds_in(traces: Any) -> frozenset[str]:
    return frozenset(_kind_of(event) for trace in traces for event in _bars_of(trace))


def _kind_of(event: Mapping[str, Any]) -> str:
    return _KINDS.get(event["name"], _OTHER)


def _end_ms(trace: Trace) -> float:
    return max((e["ts"] + e["dur"] for e in _all_bars(trace)), default=0.0) / 1e3


def _all_bars(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def _text_of(event: Mapping[str, Any], *, share: float) -> str:
    """Return what is written in a bar that takes this share of the width."""
    if "bucket" in event["args"] and _kind_of(event) != WAITING:
        return str(event["args"]["bucket"]) if share > _NUMBER_WIDTH else ""
    name = str(event["name"])
    return name if share > _LETTER_WIDTH * len(name) else ""
