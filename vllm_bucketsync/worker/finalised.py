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

# Tensors, and how often each had been written to.
_Written = list[tuple[torch.Tensor, int]]


class Finalised:
    """Those of one model. Lives for as long as the model looks as it does."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """Take note of them; none is known to be ready.

        Args:
            modules: All for which ``compat.is_processed_last``, in order.
        """
        self._modules = list(modules)
        self._ready: dict[torch.nn.Module, _Written] = {}

    def renew(self, dtype: torch.dtype) -> None:
        """Have vLLM finalise those that are not ready.

        Args:
            dtype: The engine's.
        """
        for module in self._modules:
            written = self._ready.get(module)
            if written is not None and all(one._version == count for one, count in written):
                continue
            module.process_weights_after_loading(dtype)  # type: ignore[operator]
            scales = [one for one in module._buffers.values() if one is not None]
            # Nobody counts what is written to a tensor of inference mode.
            is_counted = not any(one.is_inference() for one in scales)
            if is_counted and compat.finalises_to_constants(module):
                self._ready[module] = [(one, one._version) for one in scales]
