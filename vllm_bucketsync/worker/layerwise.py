"""One layerwise reload of vLLM, driven from outside: begin, feed, finalise, undo.

vLLM puts every module's tensors onto the meta device, keeps what its loaders are
given until a module is complete, builds the module anew, and copies the result into
the live tensors. What is added here is what it lacks: the clones of what it keeps
(it keeps views of the bucket), and the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import layerwise

from . import compat, experts
from .finalised import Finalised


@dataclass(slots=True)
class OpenLayer:
    """A module that waits for its tensors.

    Attributes:
        path: Its name within the model.
        module: The module, its tensors on the meta device.
        info: vLLM's account of it.
        num_checked: Kept tensors that no longer point into a bucket.
    """

    path: str
    module: torch.nn.Module
    info: Any
    num_checked: int = 0

    @property
    def was_replaced(self) -> bool:
        """Whether vLLM built it anew and put its live tensors back."""
        return self.info.kernel_tensors is None

    @property
    def was_begun(self) -> bool:
        """Whether vLLM is, or failed, in the middle of building it anew.

        It left the meta device then, and kernels may hold its new weights though
        no live tensor changed yet.
        """
        return self.was_replaced or any(
            not tensor.is_meta for tensor in _reloaded_tensors(self.module, self.info)
        )


class LayerwiseReload:
    """One reload, from ``begin`` to ``finalise`` or ``abort``.

    Attributes:
        cloned_bytes: Bytes copied out of buckets because vLLM keeps them.
        num_built: Modules that were built anew, once all is done.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._open: list[OpenLayer] = []
        self._live: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = []
        self._kernels: list[tuple[Any, Any]] = []
        self._begun: set[torch.nn.Module] = set()
        self._replaced: set[torch.nn.Module] = set()
        self._is_finalising = False
        self.cloned_bytes = 0
        self.num_built = 0

    def begin(self, *, spared: Callable[[torch.nn.Module], bool] = lambda module: False) -> None:
        """Put tensors onto the meta device, ready to be loaded; more of them if called again.

        Args:
            spared: Says which modules stay as they are, because others fill them. Those
                that are processed last are never spared.
        """
        self.waiting()
        layerwise.initialize_layerwise_reload(self._model)
        added = []
        for module in self._model.modules():
            is_spared = spared(module) and not compat.is_processed_last(module)
            if module in self._replaced or (is_spared and module not in self._begun):
                _put_back(module, layerwise.get_layerwise_info(module))
            elif module not in self._begun:
                self._begun.add(module)
                added.append(module)
        fresh = set(added)
        self._open += [layer for layer in open_layers(self._model) if layer.module in fresh]
        self._live += _snapshot_live_tensors(added)
        self._kernels += compat.take_moe_kernels(added)

    def feed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Give tensors to the model's loaders; return what they loaded, if they say it."""
        loaded = experts.load(self._model, weights)
        return None if loaded is None else set(loaded)

    def waiting(self) -> list[OpenLayer]:
        """Return the modules that are not complete yet, fewer each time.

        A walk over the modules of a large model costs some 50 µs: nothing beside
        loading a bucket.
        """
        self._replaced.update(layer.module for layer in self._open if layer.was_replaced)
        self._open = [layer for layer in self._open if not layer.was_replaced]
        return self._open

    def keep_out_of(self, storages: set[int]) -> None:
        """Clone what vLLM keeps and what lies in these storages.

        Args:
            storages: Addresses of the storages whose bytes are about to change.
        """
        clones: dict[tuple[Any, ...], torch.Tensor] = {}
        for layer in self.waiting():
            kept = layer.info.loaded_weights
            for _, bound in kept[layer.num_checked :]:
                for key, value in bound.arguments.items():
                    bound.arguments[key] = self._cloned(value, storages, clones)
            layer.num_checked = len(kept)

    def finalise(self) -> None:
        """Process what waits for the end, attention last, and put everything in place."""
        self._is_finalising = True
        self.num_built = sum(layer.info.load_numel > 0 for layer in self.waiting())
        self.num_built += len(self._replaced)
        for layer in self.waiting():
            if layer.info.load_numel <= 0 and not compat.is_processed_last(layer.module):
                # vLLM would do the same, and warn of each that it "failed to load".
                _put_back(layer.module, layer.info)
        layerwise.finalize_layerwise_reload(self._model, self._model_config)
        compat.give_back_moe_kernels(self._kernels)
        compat.rebuild_tied_heads(self._model)
        compat.run_model_hook(self._model)
        self._open, self._live, self._kernels = [], [], []

    def abort(self) -> bool:
        """Put the live tensors back. It works wherever the reload stopped.

        Returns:
            Whether the model is torn: a module has its new tensors, or was being
            given them.
        """
        replaced = self._replaced | {layer.module for layer in self._open if layer.was_begun}
        put_back(self._model)
        for module, tensor, old in self._live:
            # A module that was replaced keeps what belongs to its new weights.
            if module not in replaced:
                tensor.data.copy_(old)
        compat.give_back_moe_kernels(self._kernels)
        self._open, self._live, self._kernels = [], [], []
        return bool(replaced) or self._is_finalising

    def _cloned(
        self, value: Any, storages: set[int], clones: dict[tuple[Any, ...], torch.Tensor]
    ) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_meta or value.untyped_storage().data_ptr() not in storages:
                return value
            view = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if view not in clones:
                clones[view] = value.clone()
                self.cloned_bytes += value.nbytes
            clone = clones[view].view_as(clones[view])
            # Loaders read attributes, such as the shard that a tensor is meant for.
            clone.__dict__.update(value.__dict__)
            return clone
        if isinstance(value, dict):
            return {key: self._cloned(item, storages, clones) for key, item in value.items()}
        if type(value) in {list, tuple}:
            return type(value)(self._cloned(item, storages, clones) for item in value)
        return value


def finish(model: torch.nn.Module, model_config: Any, *, finalised: Finalised) -> None:
    """Do what vLLM's finalise does to a model of which no module is being reloaded.

    Args:
        model: The live model.
        model_config: vLLM's settings of it.
        finalised: What has to be finalised.
    """
    finalised.renew(model_config.dtype)
    compat.rebuild_tied_heads(model)
    compat.run_model_hook(model)


def scratch_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return tensors for a module's weights as a checkpoint has them, without values.

    The module is as before. What loaders write straight into the live model is not
    among them.
    """
    info = _detach_live(module)
    try:
        layerwise.materialize_layer(module, info)
        live = {id(tensor) for group in info.kernel_tensors for tensor in group.values()}
        return {name: one for name, one in _tensors(module).items() if id(one) not in live}
    finally:
        _put_back(module, info)


def process(module: torch.nn.Module, scratch: Mapping[str, torch.Tensor]) -> None:
    """Let vLLM post-process a module's new weights and copy the result into the live ones.

    Args:
        module: A live module.
        scratch: What ``scratch_of`` made, filled.
    """
    kernels = compat.take_moe_kernels([module])
    info = _detach_live(module)
    for name, tensor in scratch.items():
        setattr(module, name, tensor)
    try:
        layerwise._layerwise_process(module, info)
    finally:
        compat.give_back_moe_kernels(kernels)


def _detach_live(module: torch.nn.Module) -> Any:
    """Begin a reload of one module, as vLLM does for all at once; return its account."""
    info = layerwise.get_layerwise_info(module)
    info.kernel_tensors = (
        {name: one for name, one in module._parameters.items() if one is not None},
        {name: one for name, one in module._buffers.items() if one is not None},
    )
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    layerwise.restore_layer_on_meta(module, info)
    return info


def open_layers(model: torch.nn.Module) -> Iterator[OpenLayer]:
    """Yield the modules that wait for tensors; those without any are left out."""
    for path, module in model.named_modules():
        info = layerwise.LAYERWISE_INFO.get(module)
        if info is not None and info.kernel_tensors is not None and info.load_numel_total:
            yield OpenLayer(path, module, info)


def is_open(model: torch.nn.Module) -> bool:
    """Whether a reload of this model was begun and not ended, by whomever."""
    # Nearly always none is, of any model, and that takes no walk.
    if all(info.kernel_tensors is None for info in layerwise.LAYERWISE_INFO.values()):
        return False
    infos = (layerwise.LAYERWISE_INFO.get(module) for module in model.modules())
    return any(info is not None and info.kernel_tensors is not None for info in infos)


def put_back(model: torch.nn.Module) -> None:
    """End any reload of ``model``: live tensors in place, nothing kept, loaders unwrapped."""
    for module in model.modules():
        info = layerwise.LAYERWISE_INFO.get(module)
        if info is not None:
            _put_back(module, info)
    layerwise.LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def original_loader(tensor: torch.Tensor) -> Any:
    """Return a tensor's weight loader without what the reload wraps around it."""
    return layerwise._get_original_loader(tensor)


def _put_back(module: torch.nn.Module, info: Any) -> None:
    if info.kernel_tensors is not None:
        for name in {**info.kernel_tensors[0], **info.kernel_tensors[1]}:
            # A processing step that failed may have left a plain attribute there,
            # beside which no parameter can be registered.
            vars(module).pop(name, None)
        layerwise._place_kernel_tensors(module, info)
        for tensor in _tensors(module).values():
            if getattr(tensor, "weight_loader", None) is not None:
                tensor.weight_loader = original_loader(tensor)  # type: ignore[attr-defined]
    info.reset()


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _reloaded_tensors(module: torch.nn.Module, info: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an open module that are not its live ones."""
    if compat.keeps_live_tensors(module):
        return
    live = {id(tensor) for group in info.kernel_tensors or () for tensor in group.values()}
    for tensor in _tensors(module).values():
        if id(tensor) not in live:
            yield tensor


def _snapshot_live_tensors(
    modules: Iterable[torch.nn.Module],
) -> Iterator[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]]:
    """Yield each tensor that loaders write straight into the live model, and a copy of it."""
    names = compat.live_tensor_names()
    for module in modules:
        for name, tensor in _tensors(module).items():
            if name in names or compat.keeps_live_tensors(module):
                yield module, tensor, tensor.detach().clone()
