"""The trainer's tensors, each in memory of its own, in two versions."""

from __future__ import annotations

import torch

from vllm_bucketsync.bench.floors import synchronise

from .flip import flip_in_place
from .models import Shapes

_SEED = 5
_SPREAD = 0.02


class Trainer:
    """Tensors under a checkpoint's names; one ``step`` changes every byte of them.

    Attributes:
        tensors: By name, in the checkpoint's order; contiguous.
        is_flipped: Which of the two versions they hold.
        num_steps: How often they changed.
    """

    def __init__(self, shapes: Shapes, *, dtype: str, device: torch.device) -> None:
        """Make random tensors.

        Args:
            shapes: What there is.
            dtype: Of every tensor.
            device: Where they are.
        """
        generator = torch.Generator(device).manual_seed(_SEED)
        self.device = device
        self.is_flipped = False
        self.num_steps = 0
        self.tensors: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            tensor.normal_(std=_SPREAD, generator=generator)
            # Norms of about one, so that an engine that generates stays in range.
            self.tensors[name] = tensor.add_(1) if name.endswith("norm.weight") else tensor
        synchronise(device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def step(self) -> None:
        """Change every byte of every tensor, and wait until that is done."""
        for tensor in self.tensors.values():
            flip_in_place(tensor)
        self.is_flipped = not self.is_flipped
        self.num_steps += 1
        synchronise(self.device)
