"""What is asked of vLLM: its release, configuration and layers, and a place among its backends.

vLLM is imported inside the functions: it calls this package, and has imported itself by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from attn_shared.spec import BuildConfig
from attn_vllm.layers import EngineFacts
from attn_vllm.versions import Interface

__all__ = ["build_config", "engine_facts", "layers_of", "multiple_of", "take_place", "version"]

CLASS_PATH = "attn_vllm.adapters.AttnBackend"
"""Where vLLM finds the backend class."""


def version() -> str:
    """Return vLLM's own version."""
    import vllm

    return str(vllm.__version__)


def torch_device() -> torch.device:
    """Return the torch device that vLLM's platform runs on in this process."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def take_place(interface: Interface, own_name: str) -> str:
    """Register the backend class, and return the name that it is known by to vLLM.

    Args:
        interface: of this release.
        own_name: the name on GPUs, where vLLM takes a new one.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    name = place_name(interface, own_name)
    if name in AttentionBackendEnum.__members__:
        register_backend(AttentionBackendEnum[name], CLASS_PATH)
    else:
        register_backend(name, CLASS_PATH)
    return name


def place_name(interface: Interface, own_name: str) -> str:
    """Return the name among vLLM's backends: the CPU platform resolves one alone."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "CPU_ATTN"
    return "CUSTOM" if interface is Interface.SHAPES else own_name


def engine_facts() -> EngineFacts:
    """Return what the configuration of the engine that is being built says of every layer."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    cache, parallel = config.cache_config, config.parallel_config
    transfer = config.kv_transfer_config
    is_fixed = cache is not None and getattr(cache, "user_specified_block_size", False)
    return EngineFacts(
        dtype=config.model_config.dtype,
        device=torch_device(),
        block_size=cache.block_size if is_fixed else None,
        batch_invariant=_is_batch_invariant(),
        use_kv_connector=transfer is not None and bool(transfer.is_kv_transfer_instance),
        dcp_size=parallel.decode_context_parallel_size,
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        has_spec_decode=config.speculative_config is not None,
        config=build_config(config),
    )


def _is_batch_invariant() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def build_config(config: Any) -> BuildConfig:
    """Return the bounds of the batches of an engine's configuration."""
    speculative = config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    sizes = getattr(config.compilation_config, "cudagraph_capture_sizes", None) or ()
    return BuildConfig(
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_tokens=config.scheduler_config.max_num_batched_tokens,
        max_model_len=config.model_config.max_model_len,
        capture_sizes=tuple(sizes),
        num_spec_tokens=drafts,
        parallel_drafting=bool(getattr(speculative, "parallel_drafting", False)),
        batch_invariant=_is_batch_invariant(),
    )


def layers_of(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return vLLM's layers of these names."""
    context = config.compilation_config.static_forward_context
    return {name: context[name] for name in names}


def multiple_of(base: int) -> Any:
    """Return vLLM's marker for any multiple of a block size."""
    from vllm.v1.attention.backend import MultipleOf

    return MultipleOf(base)
