"""Every peculiarity of a vLLM version or platform, told by its features.

Nothing here asks for a version string. What is faulty in vLLM itself, and worked around
here, says so; ``tests/engine/test_compat.py`` shows that each fault is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.platforms import current_platform

from ..errors import UnsupportedError

_CPU = torch.device("cpu")

# What the layerwise reload is driven by, beside its public functions.
_NEEDED = ("LAYERWISE_INFO", "LOADING_LAYERS", "_layerwise_process", "_place_kernel_tensors")


# Names that stand for all experts of a layer, by how they end.
FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
# What plans are made and run with besides; without it, everything goes through the loaders.
_NEEDED_TO_PLAN = ("get_layerwise_info", "restore_layer_on_meta", "materialize_layer")


def can_plan() -> bool:
    """Whether this vLLM and this torch have what plans need."""
    has_parts = all(hasattr(layerwise, name) for name in _NEEDED_TO_PLAN)
    return has_parts and hasattr(torch._C, "_storage_Use_Count")


def num_draft_tensors(worker: Any) -> int:
    """Return how many tensors a speculative drafter has beside those of the model."""
    find = getattr(worker.model_runner, "get_draft_model", None)
    draft = None if find is None else find()
    if draft is None:
        return 0
    shared = {id(one) for one in worker.model_runner.get_model().parameters()}
    return sum(id(one) not in shared for one in draft.parameters())


def check_layerwise_reload() -> None:
    """Confirm that this vLLM's layerwise reload has the parts that are driven here.

    Raises:
        UnsupportedError: It lacks one of them.
    """
    lacking = [name for name in _NEEDED if not hasattr(layerwise, name)]
    if lacking:
        raise UnsupportedError(
            f"vLLM's layerwise reload has no {', '.join(lacking)}; vLLM 0.26 to 0.33 have; "
            f"install one of them, or a newer vllm_bucketsync"
        )


@contextmanager
def engine_context(vllm_config: Any) -> Iterator[None]:
    """Run vLLM's loaders as vLLM does: with its config set, and without gradients.

    Not ``inference_mode``: it would leave inference tensors inside parameters. What the
    caller of an in-process push has set for its own thread, a default device or inference
    mode, is not for the engine's tensors.
    """
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.enter_context(torch.no_grad())
        # Entered only where it changes something: it costs every call of torch.
        if torch.get_default_device() != _CPU:
            stack.enter_context(_CPU)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        yield


@contextmanager
def processing_switched_off() -> Iterator[None]:
    """Keep complete modules from being processed and copied into live tensors."""
    process = layerwise._layerwise_process
    layerwise._layerwise_process = lambda layer, info: None
    try:
        yield
    finally:
        layerwise._layerwise_process = process


def live_tensor_names() -> frozenset[str]:
    """Names of tensors that loaders write straight into the live model, by last part."""
    return frozenset(getattr(meta, "SKIP_TENSORS", {"bias", "e_score_correction_bias"}))


def independent_names() -> frozenset[str]:
    """Those of ``live_tensor_names`` that no module is built anew with."""
    return frozenset(getattr(meta, "SKIP_LOAD_TENSORS", live_tensor_names() - {"bias"}))


def keeps_live_tensors(module: torch.nn.Module) -> bool:
    """Whether a reload leaves all tensors of ``module`` in place."""
    return type(module).__name__ in getattr(meta, "SKIP_MODULES", ())


def is_processed_last(module: torch.nn.Module) -> bool:
    """Whether ``module`` is attention-like: finalised after all others, scales optional."""
    known = getattr(layerwise, "is_deferred_attention_layer", None)
    if known is not None:
        return bool(known(module))
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return isinstance(module, Attention | MLAAttention)


def finalises_to_constants(module: torch.nn.Module) -> bool:
    """Whether finalising an attention-like module only sets the scales of its cache to 1.

    As the sources of 0.26 to 0.33 say: of plain attention, without quantisation, whose
    backend adds nothing. Nor does anything else set the scales of a cache that has none.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention import backend

    found: Any = module
    hook = "process_weights_after_loading"
    if getattr(type(module), hook, None) is not vars(Attention).get(hook):
        return False
    bases = (getattr(backend, name, None) for name in ("AttentionImplBase", "AttentionImpl"))
    empty = [vars(base)[hook] for base in bases if base is not None and hook in vars(base)]
    return (
        getattr(type(getattr(found, "impl", None)), hook, None) in empty
        and getattr(found, "quant_config", True) is None
        and not getattr(found, "calculate_kv_scales", False)
        and getattr(found, "kv_cache_dtype", None) in {"auto", "float16", "bfloat16"}
    )


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Map each tied embedding's parameter name to the first name of the same parameter."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, VocabParallelEmbedding):
            continue
        for name, parameter in module.named_parameters(prefix=path, remove_duplicate=False):
            canonical = first.setdefault(id(parameter), name)
            if canonical != name:
                tied[name] = canonical
    return tied


def engine_name(model: torch.nn.Module, name: str) -> str | None:
    """Return a checkpoint name as the model's own mapper renames it; ``None``: ignored."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None)
    if rename is None:
        return name
    renamed: str | None = rename(name)
    return renamed


# vLLM computes these itself; its loaders drop them from any checkpoint.
_COMPUTED = (
    "rotary_pos_emb.inv_freq",
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)


def why_skipped(worker: Any, model: torch.nn.Module, name: str) -> str | None:
    """Return why vLLM rightly loads nothing from ``name`` in this worker, or ``None``."""
    if any(part in name for part in _COMPUTED):
        return "vLLM computes it"
    renamed = engine_name(model, name)
    if renamed is None:
        return "the model's own mapper ignores it"
    if _is_next_token_prediction(worker.model_config.hf_config, renamed):
        return "it belongs to a draft head"
    if is_on_another_stage(model, renamed):
        return "another pipeline stage has it"
    is_of_all = renamed.endswith(FUSED_EXPERTS)
    has_a_part = worker.vllm_config.parallel_config.enable_expert_parallel
    if has_a_part and ".experts." in renamed and not is_of_all:
        return "another worker has that expert"
    return None


def _is_next_token_prediction(hf_config: Any, name: str) -> bool:
    text_config = getattr(hf_config, "get_text_config", lambda: hf_config)()
    try:
        from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name
    except ImportError:
        return False
    return get_spec_layer_idx_from_weight_name(text_config, name) is not None


def is_on_another_stage(model: torch.nn.Module, name: str) -> bool:
    """Whether a module or tensor of ``model`` is on another pipeline stage."""
    from vllm.model_executor.models import utils

    names = ("PPMissingLayer", "StageMissingLayer")
    missing = tuple(getattr(utils, name) for name in names if hasattr(utils, name))
    module: Any = model
    for part in name.split("."):
        module = getattr(module, part, None)
        if isinstance(module, missing):
            return True
        if not isinstance(module, torch.nn.Module):
            return False
    return False


def rename_mapper(model: torch.nn.Module) -> Any:
    """Return how the model's checkpoint names are renamed, without how they are fused."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        make = getattr(mapper, name, None)
        if make is not None:
            return make()
    return mapper


def is_expert_of_another(manager: Any, name: str) -> bool:
    """Whether an adapter's tensor is for an expert that another worker has.

    Args:
        manager: vLLM's ``LoRAModelManager``.
        name: The tensor.
    """
    spec = getattr(manager, "moe_ep_load_spec", None)
    if spec is None:
        return False
    from vllm.lora.lora_model import _is_remote_expert_key

    return bool(_is_remote_expert_key(name, spec))


# What names of an adapter's tensors end with.
_ADAPTER_ENDINGS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


def check_adapter_name(name: str) -> None:
    """Confirm that a tensor is one half of a LoRA, before vLLM's own parser is asked.

    That of 0.31 takes ``lora_B.bias`` for ``lora_B``; those of 0.31 and 0.32 take the whole
    weight or bias of a classifier for its ``lora_B``.

    Raises:
        ValueError: It is not.
    """
    if not name.endswith(_ADAPTER_ENDINGS):
        raise ValueError(f"{name} is no half of a LoRA")


def pins_adapters() -> bool:
    """Whether vLLM keeps adapters in host memory that is pinned: a copy, where it is not yet."""
    from vllm.lora import lora_model

    return bool(getattr(lora_model, "PIN_MEMORY", False))


def rank_of(helper: Any, module: str) -> int:
    """Return the rank that an adapter's config gives one of its modules."""
    find = getattr(helper, "get_rank_and_scaling", None)
    return int(helper.r if find is None else find(module)[0])


def take_moe_kernels(modules: Iterable[torch.nn.Module]) -> list[tuple[Any, Any]]:
    """Make the CPU's mixture-of-experts kernels be built anew, and return the old ones.

    On the CPU, vLLM packs the experts only where no kernel exists yet, so a reload
    leaves unpacked weights for a kernel that expects packed ones: wrong outputs
    after reloading even the same weights. Elsewhere the kernel has to stay, since
    CUDA graphs hold it.

    Returns:
        Pairs of quant method and the kernel taken from it, for ``give_back_moe_kernels``.
    """
    if not current_platform.is_cpu():
        return []
    methods: list[Any] = [getattr(module, "quant_method", None) for module in modules]
    by_identity = {id(one): one for one in methods if getattr(one, "moe_kernel", None) is not None}
    taken = [(method, method.moe_kernel) for method in by_identity.values()]
    for method, _ in taken:
        method.moe_kernel = None
    return taken


def give_back_moe_kernels(taken: list[tuple[Any, Any]]) -> None:
    """Put kernels back where none was built since ``take_moe_kernels``."""
    for method, kernel in taken:
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def rebuild_tied_heads(model: torch.nn.Module) -> None:
    """Pack tied output heads again after their embedding was replaced.

    On the CPU a head multiplies with a packed copy of its weight, which vLLM makes
    only when the head itself is loaded. A tied one is not: its logits would go on
    coming from the old weights.
    """
    if not current_platform.is_cpu():
        return
    for name in tied_names(model):
        module = model.get_submodule(name.rpartition(".")[0])
        quant_method = getattr(module, "quant_method", None)
        if quant_method is not None:
            quant_method.process_weights_after_loading(module)


def run_model_hook(model: torch.nn.Module) -> None:
    """Run a model's own step after loading, which a reload leaves out."""
    hook = getattr(model, "process_weights_after_loading", None)
    if callable(hook) and not is_processed_last(model):
        hook()


# Kinds of modules whose processing was read, and does nothing to weights in their
# checkpoint's layout: quant method, platform, backend. ``tests/engine/test_observe.py``
# has a test for each line. ``None`` is a module without a quant method, such as a norm.
DIRECT_KINDS = frozenset(
    {
        (None, "cpu", None),
        (None, "cuda", None),
        ("UnquantizedEmbeddingMethod", "cuda", None),
        ("UnquantizedLinearMethod", "cuda", None),
        ("UnquantizedFusedMoEMethod", "cuda", "TRITON"),
    }
)


def why_not_known_as_direct(module: torch.nn.Module) -> str:
    """Return why weights of this kind of module are always processed; ``""`` if not so."""
    method = getattr(module, "quant_method", None)
    name = None if method is None else type(method).__name__
    backend = getattr(method, "unquantized_backend", None)
    backend = getattr(backend, "name", backend)
    kind = (name, current_platform.device_type, backend)
    return "" if kind in DIRECT_KINDS else f"{kind} is not known to leave weights alone"


def kernel_of(quant_method: object) -> object:
    """Return what computes with weights, of a method that has it made; ``None`` if none."""
    return getattr(quant_method, "moe_kernel", None)


def is_config(value: Any) -> bool:
    """Whether an object is a setting of vLLM's or a model's: large, and no part of a layer."""
    return type(value).__module__.startswith(("vllm.config", "transformers.", "vllm.platforms"))


def tensor_names(model: torch.nn.Module) -> set[str]:
    """Names of all parameters and buffers of ``model``, aliases included."""
    return {
        name
        for named in (model.named_parameters, model.named_buffers)
        for name, _ in named(remove_duplicate=False)
    }
