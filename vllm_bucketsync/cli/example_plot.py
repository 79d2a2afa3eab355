"""A picture of the example: reward above, and the time of every push below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .exits import CommandError

# Okabe's and Ito's, which people who see fewer colors can tell apart.
_REWARD, _PUSH = "#009E73", "#0072B2"


def draw(updates: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw a picture and write it, as PNG or SVG by the file's name.

    Args:
        updates: The fields of ``examples.rl.Update``, in their order.
        path: The file.
        title: What was trained.

    Raises:
        CommandError: The file cannot be written.
    """
    # Not pyplot: nothing of the process is changed, and no screen is needed.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    numbers = range(len(updates))
    above.plot(numbers, [one["reward"] for one in updates], "o-", color=_REWARD, ms=4)
    above.set_ylabel("mean reward")
    above.set_ylim(bottom=0)
    below.bar(numbers, [1e3 * one["push_s"] for one in updates], color=_PUSH)
    below.set_ylabel("push, ms")
    below.set_xlabel("update")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=12)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise CommandError(f"{str(path)!r} cannot be written: {error.strerror}") from error
