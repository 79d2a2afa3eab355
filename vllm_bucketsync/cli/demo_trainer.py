"""The trainer of the demo: a process of its own that pushes a model into an engine.

    python -m vllm_bucketsync.cli.demo_trainer CHECKPOINT URL VERSION

It prints a line of JSON whenever there is something to tell: ``{"done", "total"}`` in
bytes while it pushes, and ``{"report"}`` or ``{"error"}`` at the end. The engine's key is
in ``VLLM_API_KEY``. It knows nothing of vLLM.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm_bucketsync import BucketSyncError, WeightSync

from .exits import ExitCode


def main(checkpoint: str, url: str, version: str) -> int:
    """Push the weights of ``checkpoint`` into the engine at ``url``."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    try:
        with WeightSync(url) as sync:
            report = sync.push(
                model,
                version=version,
                progress=lambda done, total: _tell(done=done, total=total),
            )
    except BucketSyncError as error:
        _tell(error=f"{type(error).__name__}: {error}")
        return ExitCode.FAILED
    _tell(report=report.as_dict())
    return ExitCode.OK


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
