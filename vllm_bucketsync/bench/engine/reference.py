"""What a model must hold, to the last bit: what vLLM's own loaders made of the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .flip import can_flip, equals


class Reference:
    """A copy of every live tensor of a model, on its device.

    Made after vLLM itself has loaded one version of the trainer's weights. ``learn``, after
    it has loaded the other, finds out which tensors follow the weights.

    Attributes:
        num_bytes: Memory that it takes.
        followers: Tensors that follow the weights, by name.
        unlike: Tensors that changed in another way, and are compared by nobody.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Copy what the model holds."""
        self._copies = {name: tensor.detach().clone() for name, tensor in _live(model)}
        self.num_bytes = sum(copy.nbytes for copy in self._copies.values())
        self.followers: set[str] = set()
        self.unlike: list[str] = []

    @property
    def compared_bytes(self) -> int:
        """Bytes of the tensors that follow the weights."""
        return sum(self._copies[name].nbytes for name in self.followers)

    def learn(self, model: torch.nn.Module) -> None:
        """Tell tensors that follow the weights from those that stay, in the other version."""
        self.followers, self.unlike = set(), []
        for name, tensor in _live(model):
            copy = self._copies[name]
            if copy.numel() == 0 or equals(tensor, copy):
                continue
            if can_flip(copy.dtype) and equals(tensor, copy, flipped=True):
                self.followers.add(name)
            else:
                self.unlike.append(name)

    def differences(self, model: torch.nn.Module, *, is_flipped: bool) -> list[str]:
        """Return the tensors that do not hold what they must.

        Args:
            model: What is looked at.
            is_flipped: Which version of the weights it was given.
        """
        return [
            name
            for name, tensor in _live(model)
            if name not in self.unlike
            and not self._is_right(name, tensor, flipped=is_flipped and name in self.followers)
        ]

    def _is_right(self, name: str, tensor: torch.Tensor, *, flipped: bool) -> bool:
        copy = self._copies.get(name)
        if copy is None or (copy.dtype, copy.shape) != (tensor.dtype, tensor.shape):
            return False
        return equals(tensor, copy, flipped=flipped)


def _live(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
