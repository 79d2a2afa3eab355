"""The program of the processes that share memory for a check: ``python -m …doctor.pair``.

Reads a request a line, as JSON, and answers each with a line. Whatever fails is an answer
as well, so that only a hang or a crash is left for the one who asks to find out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from vllm_bucketsync.config import Settings
from vllm_bucketsync.errors import BucketSyncError
from vllm_bucketsync.handles import Handle
from vllm_bucketsync.transport import registry
from vllm_bucketsync.transport.base import OpenedRegion, OwnedRegion
from vllm_bucketsync.transport.devices import uuid_of

Answer = dict[str, Any]


class Side:
    """One of the two processes: makes regions and fills them, or opens them and reads."""

    def __init__(self) -> None:
        self._regions: list[OwnedRegion | OpenedRegion] = []

    def devices(self) -> Answer:
        """Return every GPU that torch finds here."""
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return {
            "torch": str(torch.__version__),
            "devices": [
                {
                    "device": gpu,
                    "name": torch.cuda.get_device_name(gpu),
                    "uuid": uuid_of(gpu),
                    "memory_bytes": torch.cuda.get_device_properties(gpu).total_memory,
                }
                for gpu in gpus
            ],
        }

    def write(self, *, kind: str, device: str, num_bytes: int, directory: str) -> Answer:
        """Make a region and fill it with random bytes that lie on ``device``."""
        source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
        settings = Settings(transport=kind, slot_size=num_bytes, num_slots=1, dir=directory)
        wish = registry.Wish(transport=kind, device=source.device)
        region, _, _ = registry.create_slots(
            kind, settings=settings, needed_bytes=num_bytes, wish=wish
        )
        self._regions.append(region)
        region.write(0, source)
        region.flush(0)
        return {"handle": msgspec.json.encode(region.handle).decode(), "digest": _digest(source)}

    def read(self, *, kind: str, device: str, num_bytes: int, handle: str) -> Answer:
        """Open a region for ``device``, and return the digest of what is in it."""
        named: Handle = msgspec.json.decode(handle, type=Handle)
        opened = registry.open_region(kind, named, device=torch.device(device))
        self._regions.append(opened)
        opened.await_writes(0)
        return {"digest": _digest(opened.view(0, num_bytes).to(device))}

    def close(self) -> Answer:
        """Let every region go."""
        while self._regions:
            self._regions.pop().close()
        return {}


class _Warnings(logging.Handler):
    """Keeps what the package warns of, such as memory that cannot be pinned."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> None:
    """Answer requests until there are no more."""
    side, warnings = Side(), _Warnings()
    logging.getLogger("vllm_bucketsync").addHandler(warnings)
    acts: dict[str, Callable[..., Answer]] = {
        "devices": side.devices,
        "write": side.write,
        "read": side.read,
        "close": side.close,
    }
    with contextlib.closing(side):
        for line in sys.stdin:
            request = json.loads(line)
            warnings.texts.clear()
            answer = _answer(acts[request.pop("act")], request)
            sys.stdout.write(json.dumps(answer | {"warnings": warnings.texts}) + "\n")
            sys.stdout.flush()


def _answer(act: Callable[..., Answer], request: dict[str, Any]) -> Answer:
    try:
        return act(**request)
    # Torch and drivers raise whatever they like, and all of it is what was to be found out.
    except Exception as error:  # noqa: BLE001
        kind = "" if isinstance(error, BucketSyncError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{error}"}


def _digest(data: torch.Tensor) -> str:
    return hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
