"""What vLLM says of a layer as a request, and the backend chosen for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_shared.device import DeviceFacts
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, spec_for
from attn_shared.request import AttentionRequest, AttentionType, window_of
from attn_shared.selection import Policy, Selection
from attn_shared.selector import DEFAULT_SELECTOR, Selector
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = [
    "VARIABLE",
    "EngineFacts",
    "LayerArguments",
    "choose",
    "describe",
    "named",
    "request_of",
]

VARIABLE = "ATTN_VLLM_BACKEND"


def named(setting: str | None) -> str | None:
    """Return the backend that the variable names; None is "auto"."""
    return None if setting is None or setting.lower() == "auto" else setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine's configuration says of all its layers.

    Attributes:
        dtype: of query, key, value and output.
        device: where the model runs.
        block_size: tokens per block where the user fixed it, else None.
        batch_invariant: results must not depend on what shares the batch.
        use_kv_connector: another party reads or writes cache blocks.
        dcp_size, pcp_size: ranks that share sequences.
        has_spec_decode: host lengths may be upper bounds.
        config: bounds of the batches.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int | None = None
    batch_invariant: bool = False
    use_kv_connector: bool = False
    dcp_size: int = 1
    pcp_size: int = 1
    has_spec_decode: bool = False
    config: BuildConfig = field(default_factory=BuildConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArguments:
    """What vLLM builds a layer's implementation from, by its own names.

    `sliding_window` counts the visible keys, the query's own included; None or -1 is none.
    `logits_soft_cap` None or 0 is none. `others` are arguments that only some models pass.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int | None = None
    alibi_slopes: Any = None
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: str = "decoder"
    kv_sharing_target_layer_name: str | None = None
    sinks: torch.Tensor | None = None
    others: Mapping[str, Any] | None = None

    def refuse_others(self) -> None:
        """Refuse arguments that would have to be dropped.

        Raises:
            UnsupportedOptionError: names them with their values.
        """
        asked = {name: value for name, value in (self.others or {}).items() if value}
        if asked:
            listed = ", ".join(f"{name}={value!r}" for name, value in asked.items())
            raise UnsupportedOptionError(
                f"the model asks its attention layers for {listed}, which no backend of attn has.",
                hint=f"unset {VARIABLE} to run this model on vLLM's own backend.",
            )


def request_of(
    arguments: LayerArguments,
    facts: EngineFacts,
    *,
    block_size: int | None = None,
    head_size_v: int | None = None,
    use_mm_prefix: bool = False,
) -> AttentionRequest:
    """Return the request that a layer of vLLM makes.

    Raises:
        UnsupportedOptionError: cross-attention, context parallelism or arguments of a model's own.
        InvalidRequestError, UnknownNameError: a value that no backend may accept.
    """
    arguments.refuse_others()
    attn_type = AttentionType(str(getattr(arguments.attn_type, "value", arguments.attn_type)))
    if attn_type is AttentionType.ENCODER_DECODER:
        raise UnsupportedOptionError(
            "cross-attention of vLLM's encoder-decoder models is not adapted.",
            hint=f"unset {VARIABLE} to run this model on vLLM's own backend.",
        )
    if facts.dcp_size > 1 or facts.pcp_size > 1:
        raise UnsupportedOptionError(
            f"decode_context_parallel_size={facts.dcp_size}, prefill_context_parallel_size="
            f"{facts.pcp_size}: vLLM's own sharding over ranks is not adapted; allowed: 1 and 1."
        )
    window = arguments.sliding_window
    window = None if window in (None, -1) else window
    return AttentionRequest(
        num_heads=arguments.num_heads,
        num_kv_heads=arguments.num_kv_heads or arguments.num_heads,
        head_size=arguments.head_size,
        head_size_v=head_size_v,
        dtype=facts.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        block_size=block_size or facts.block_size,
        has_sinks=arguments.sinks is not None,
        has_alibi=arguments.alibi_slopes is not None,
        attn_type=attn_type,
        window=window_of(window, causal=attn_type is AttentionType.DECODER),
        softcap=arguments.logits_soft_cap or None,
        use_mm_prefix=use_mm_prefix,
        batch_invariant=facts.batch_invariant,
        use_kv_connector=facts.use_kv_connector,
    )


def choose(
    request: AttentionRequest,
    device: torch.device,
    backend: str | None,
    selector: Selector = DEFAULT_SELECTOR,
) -> tuple[Selection, DeviceFacts]:
    """Select for a layer; a named backend serves it or raises with every verdict.

    Raises:
        NoBackendError: nothing serves the layer; vLLM's start-up ends with this table.
    """
    facts = selector.device_facts(device)
    policy = Policy(backend=backend, source=f"environment variable {VARIABLE}")
    return selector.resolve(request, facts, policy), facts


def describe(
    selection: Selection, device: DeviceFacts, arguments: LayerArguments
) -> tuple[LayerSpec, AttentionSpec | None]:
    """Return what the chosen backend builds the layer from, and its cache."""
    request, spec = selection.request, None
    if not request.is_cache_free and selection.block_size is not None:
        made = spec_for(
            request,
            block_size=selection.block_size,
            layout=selection.kv_layout or KVCacheLayout.NHD,
            fp8_e4m3_dtype=device.fp8_dtype or torch.float8_e4m3fn,
        )
        spec = made if isinstance(made, AttentionSpec) else None
    layer = LayerSpec.from_request(
        request,
        scale=float(arguments.scale),
        kv_cache_spec=spec,
        kv_sharing_target=arguments.kv_sharing_target_layer_name,
    )
    return layer, spec
