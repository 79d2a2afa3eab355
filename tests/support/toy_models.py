"""Models of toy layers whose loaders cut, stack, turn, cast and pad as vLLM's do.

Import it after ``support.engines``. One rank of a tensor-parallel group is simulated:
a source is what a checkpoint has, a parameter what this rank keeps of it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

Loader = Callable[..., None]
Source = tuple[tuple[int, ...], torch.dtype, tuple[Any, ...]]


@dataclass(frozen=True)
class Group:
    """This rank, and how many there are."""

    rank: int
    size: int

    def part(self, tensor: torch.Tensor, dim: int, *, replicas: int = 1) -> torch.Tensor:
        """Return this rank's part along a dimension, which ``replicas`` ranks share."""
        size = tensor.shape[dim] * replicas // self.size
        return tensor.narrow(dim, self.rank // replicas * size, size)


class Untouched(QuantizeMethodBase):  # type: ignore[misc]
    """Leaves weights as they are, as most do on a GPU."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight
        return weight

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...


class Packing(Untouched):
    """Turns weights into another layout, and keeps a packed copy besides."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().flip(0).clone()
        layer.weight = nn.Parameter(layer.weight.detach() * 2, requires_grad=False)


class Layer(nn.Module):
    """One parameter with a loader, perhaps a bias, and what processes them."""

    packed: torch.Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        loader: Loader,
        quant_method: QuantizeMethodBase | None,
        *,
        has_bias: bool,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = loader  # type: ignore[attr-defined]
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False) if has_bias else None
        self.quant_method = quant_method


@dataclass(frozen=True)
class Spec:
    """A layer, and the sources that fill its weight.

    Attributes:
        kind: How sources become the weight.
        shape: The weight on this rank.
        dtype: Its dtype.
        sources: Shape, dtype and loader's arguments of each source.
        method: Name of its quant method.
        has_bias: It has a bias, which is loaded straight into the live model.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[Source, ...]
    method: str | None
    has_bias: bool


_METHODS: dict[str | None, Callable[[], QuantizeMethodBase | None]] = {
    None: lambda: None,
    "Untouched": Untouched,
    "Packing": Packing,
}


class ToyModel(nn.Module):
    """Layers by their specs; names of sources are ``layers.<n>.<m>``."""

    def __init__(self, specs: Iterable[Spec], group: Group) -> None:
        super().__init__()
        self.specs = list(specs)
        self.group_size = group.size
        loaders = {name: make(group) for name, make in LOADERS.items()}
        self.layers = nn.ModuleList(
            Layer(
                spec.shape,
                spec.dtype,
                loaders[spec.kind],
                _METHODS[spec.method](),
                has_bias=spec.has_bias,
            )
            for spec in self.specs
        )
        record_metadata_for_reloading(self)
        # As after a first load: what processing leaves is live.
        layer: Any
        for layer in self.layers:
            if layer.quant_method is not None:
                layer.quant_method.process_weights_after_loading(layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        arguments: tuple[Any, ...]
        for name, tensor in weights:
            _, number, source = name.split(".")
            if source == "bias":
                target, arguments = f"layers.{number}.bias", ()
            else:
                target = f"layers.{number}.weight"
                arguments = self.specs[int(number)].sources[int(source)][2]
            parameter = parameters[target]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *arguments)
            loaded.add(target)
        return loaded

    def sources(self, seed: int) -> dict[str, torch.Tensor]:
        """Return what a checkpoint of that seed has."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape, dtype in self._described()
        }

    def _described(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        for number, spec in enumerate(self.specs):
            for source, (shape, dtype, _) in enumerate(spec.sources):
                yield f"layers.{number}.{source}", shape, dtype
            if spec.has_bias:
                yield f"layers.{number}.bias", (3,), torch.float32


@functools.cache
def _config() -> VllmConfig:
    return VllmConfig()


def worker_of(model: ToyModel) -> Any:
    """Return what a sink needs of a worker that has the model."""
    config = copy.copy(_config())
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = model.group_size
    model_config = SimpleNamespace(dtype=torch.float32, hf_config=SimpleNamespace())
    runner = SimpleNamespace(get_model=lambda: model)
    return SimpleNamespace(
        vllm_config=config,
        model_config=model_config,
        model_runner=runner,
        device=torch.device("cpu"),
        rank=0,
    )


# How a loader puts a source, of which it gets its arguments, into a parameter.


def _whole(group: Group) -> Loader:
    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)

    return load


def _column(group: Group) -> Loader:
    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(group.part(loaded_weight, 0))

    return load


def _row(group: Group) -> Loader:
    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(group.part(loaded_weight, 1))

    return load


def _stacked(group: Group) -> Loader:
    """Parts that lie one after the other; the later ones are shared by all ranks."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor, first: int, replicas: int) -> None:
        part = group.part(loaded_weight, 0, replicas=replicas)
        param.data.narrow(0, first, part.shape[0]).copy_(part)

    return load


def _expert(group: Group) -> Loader:
    """One expert's gate, up or down, cut for this rank."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor, expert: int, half: int) -> None:
        part = group.part(loaded_weight, 0)
        param.data[expert].narrow(0, half * part.shape[0], part.shape[0]).copy_(part)

    return load


def _fused_experts(group: Group) -> Loader:
    """All experts in one tensor, turned the other way."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        for expert in range(param.shape[0]):
            param.data[expert].copy_(group.part(loaded_weight[expert].t(), 0))

    return load


def _padded(group: Group) -> Loader:
    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        rows = loaded_weight.shape[0]
        param.data[:rows].copy_(loaded_weight)
        param.data[rows:].fill_(0)

    return load


def _turned(group: Group) -> Loader:
    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight.t())

    return load


def _spread(group: Group) -> Loader:
    """One value for all, as scales are."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        for row in range(param.shape[0]):
            param.data[row].copy_(loaded_weight[0])

    return load


def _computed(group: Group) -> Loader:
    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(-torch.exp(loaded_weight.float()))

    return load


def _twice(group: Group) -> Loader:
    """Once as it is, then changed in place."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)
        param.data.mul_(3)

    return load


def _viewed(group: Group) -> Loader:
    """The bits of the source, as integers: values that a cast would not come to."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        integers = {2: torch.int16, 4: torch.int32}[loaded_weight.itemsize]
        param.data.copy_(loaded_weight.view(integers))

    return load


def _raw(group: Group) -> Loader:
    """The bytes of the source, where both have the same dtype."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        if loaded_weight.dtype == param.dtype:
            param.data.view(torch.uint8).copy_(loaded_weight.view(torch.uint8))
        else:
            param.data.copy_(loaded_weight.to(param.dtype))

    return load


LOADERS: dict[str, Callable[[Group], Loader]] = {
    "whole": _whole,
    "column": _column,
    "row": _row,
    "stacked": _stacked,
    "expert": _expert,
    "fused_experts": _fused_experts,
    "padded": _padded,
    "turned": _turned,
    "spread": _spread,
    "computed": _computed,
    "twice": _twice,
    "viewed": _viewed,
    "raw": _raw,
}
# Those that a plan cannot do.
BY_LOADERS = {"computed", "twice", "viewed", "raw"}
