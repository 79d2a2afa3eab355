"""A plugin of vLLM beside ours: tells in which processes vLLM loaded ours, and puts it to work.

vLLM imports every general plugin before it calls the first one, so ours is imported by now
if vLLM found it; this module does not import it. Engines that name no worker extension get
ours, so that vLLM's own tests run with it in every worker.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

EXTENSION = "vllm_bucketsync.WorkerExtension"
# A file to which each process appends a line.
FILE = "VLLM_BUCKETSYNC_TEST_WITNESS"


def register() -> None:
    """Write down this process, and make our extension the default."""
    from vllm.engine.arg_utils import EngineArgs

    _note(event="plugins", has_plugin="vllm_bucketsync.plugin" in sys.modules)
    create = EngineArgs.create_engine_config
    if getattr(create, "is_ours", False):
        return

    def create_with_extension(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.worker_extension_cls = self.worker_extension_cls or EXTENSION
        _note(event="engine", extension=self.worker_extension_cls)
        return create(self, *args, **kwargs)

    create_with_extension.is_ours = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_with_extension


def _note(**facts: object) -> None:
    path = os.environ.get(FILE)
    if path:
        with Path(path).open("a") as file:
            # One write of less than a page: lines of several processes do not mix.
            file.write(json.dumps({"pid": os.getpid(), **facts}) + "\n")
