"""The words of advice: a server is started with flags, an ``LLM`` with arguments.

Texts are written with flags, mostly by workers, which do not know how their engine was
started. Who asked knows, and what it raises is put into those words here. (The command
line has words of its own, for what are arguments of ``WeightSync``: ``cli.wording``.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..errors import BucketSyncError
from .base import Engine

# vLLM's flags that texts of ours name, and what an LLM takes for them.
FLAGS = {
    "--worker-extension-cls": "worker_extension_cls",
    "--enable-lora": "enable_lora=True",
    "--enable-eplb": "enable_eplb=True",
    "--enable-mixed-moe-lora-format": "enable_mixed_moe_lora_format=True",
    "--lora-target-modules": "lora_target_modules",
    "--max-lora-rank": "max_lora_rank",
    "--max-cpu-loras": "max_cpu_loras",
    "--max-loras": "max_loras",
}
# A dotted name behind a flag is its value; any other word is the sentence's.
_FLAG = re.compile(rf"({'|'.join(FLAGS)})(?![\w-])(?: (\w+(?:\.\w+)+))?")


def as_arguments(text: str) -> str:
    """Return a text with vLLM's flags as the arguments of its ``LLM``."""
    return _FLAG.sub(_argument, text)


@contextmanager
def in_words_of(engines: Sequence[Engine]) -> Iterator[None]:
    """Let errors speak of arguments where every engine is an object of this process."""
    try:
        yield
    except BucketSyncError as error:
        if all(getattr(engine, "takes_arguments", False) for engine in engines):
            error.args = tuple(as_arguments(str(part)) for part in error.args)
        raise


def _argument(match: re.Match[str]) -> str:
    return FLAGS[match[1]] + ("" if match[2] is None else f"={match[2]!r}")
