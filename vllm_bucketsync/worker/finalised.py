"""The modules that vLLM finalises after all others, attention, and which are so already.

vLLM makes attention ready once its neighbours have their weights. For plain attention that
comes down to setting the scales of its cache to 1: a dozen small kernels for each layer,
longer than copying the weights of a small model. Where the source of vLLM says that it does
no more, and nobody has written to those scales since, it is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import compat

_State = tuple[tuple[torch.Tensor, int], ...]


class Finalised:
    """Those of one model. Lives for as long as the model looks as it does."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """Take note of them; none is known to be ready.

        Args:
            modules: All for which ``compat.is_processed_last``, in order.
        """
        self._modules = list(modules)
        self._states: dict[torch.nn.Module, _State | None] = {}

    def renew(self, dtype: torch.dtype) -> None:
        """Have vLLM finalise those that are not ready.

        Args:
            dtype: The engine's.
        """
        for module in self._modules:
            before = self._states.get(module)
            if before is not None and _is_same(before, _state_of(module)):
                continue
            module.process_weights_after_loading(dtype)  # type: ignore[operator]
            self._states[module] = _state_of(module)


def _state_of(module: torch.nn.Module) -> _State | None:
    """Return the scales, and how often each was written to; ``None``: whatever it depends on."""
    if not compat.finalises_to_constants(module):
        return None
    buffers = [one for one in module._buffers.values() if one is not None]
    # Nobody counts what is written to a tensor of inference mode.
    if any(one.is_inference() for one in buffers):
        return None
    return tuple((one, one._version) for one in buffers)


def _is_same(before: _State, now: _State | None) -> bool:
    return (
        now is not None
        and len(before) == len(now)
        and all(
            one is other and version == other_version
            for (one, version), (other, other_version) in zip(before, now, strict=True)
        )
    )
