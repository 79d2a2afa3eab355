"""A trainer that pushes until it waits for its death: ``URL KEY CHECKPOINT NUM_TENSORS``.

It prints a line when it has handed over so many tensors, and then stands still.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from vllm_bucketsync import WeightSync


def main(url: str, key: str, checkpoint: str, num_tensors: int) -> None:
    def until_the_end() -> Iterator[tuple[str, torch.Tensor]]:
        tensors = load_file(Path(checkpoint) / "model.safetensors")
        for index, item in enumerate(sorted(tensors.items())):
            if index == num_tensors:
                sys.stdout.write("standing still\n")
                sys.stdout.flush()
                time.sleep(600)
            yield item

    with WeightSync(url, api_key=key, slot_size=1024) as sync:
        sync.push(until_the_end(), version="never")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
