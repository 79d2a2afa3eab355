"""The model as it was before vLLM wrapped its layers for adapters.

With LoRA, a layer that takes adapters has another in its place, and is that one's
``base_layer``. Loaders differ in what they make of it: some versions know none of a
checkpoint's names any more, and all of them drop its experts in silence. So whatever loads
weights works on the model without the wrappers, under the names that it has without LoRA;
no forward pass runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA

from . import compat

_INFIX = ".base_layer"
# What experts put before the ends of a checkpoint's names when they are wrapped.
_PREFIX = "lora_base_layer_prefix"


class Wrapped:
    """The layers of a worker's model that are wrapped; none where it takes no adapters."""

    def __init__(self, worker: Any) -> None:
        """Take note of the worker; they are looked for when they are first taken off.

        Args:
            worker: vLLM's worker.
        """
        self._worker = worker
        self._is_known = worker.vllm_config.lora_config is None
        self._places: list[tuple[dict[str, Any], str, BaseLayerWithLoRA]] = []
        self._prefixed: list[tuple[torch.nn.Module, str]] = []

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Have every layer in its wrapper's place, as loaders are run, and put it back at the end.

        See ``compat.engine_context`` for what else they are run in.
        """
        if not self._is_known:
            self._find(self._worker.model_runner.get_model())
        with compat.engine_context(self._worker.vllm_config):
            try:
                for children, name, wrapper in self._places:
                    children[name] = wrapper.base_layer
                for module, _ in self._prefixed:
                    setattr(module, _PREFIX, "")
                yield
            finally:
                for children, name, wrapper in self._places:
                    children[name] = wrapper
                for module, prefix in self._prefixed:
                    setattr(module, _PREFIX, prefix)

    def _find(self, model: torch.nn.Module) -> None:
        self._is_known = True
        for module in model.modules():
            # The dictionary itself: it keeps its order, and no hook of the module's runs.
            children: dict[str, Any] = module._modules
            self._places += [
                (children, name, child)
                for name, child in children.items()
                if isinstance(child, BaseLayerWithLoRA)
            ]
            if prefix := vars(module).get(_PREFIX):
                self._prefixed.append((module, prefix))


def plain(name: str) -> str:
    """Return the name that a parameter or module, or a pattern of them, has without LoRA."""
    return name.replace(f"{_INFIX}.", ".").removesuffix(_INFIX)
