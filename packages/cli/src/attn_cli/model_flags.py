"""`--model`: what a whole model asks, and which flags go with it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from attn_cli.request_flags import RequestFlags
from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from attn_shared.model_config import ModelLayers

__all__ = ["model_of"]

_PASSED_ON = MappingProxyType(
    {
        "kv_cache_dtype": "kv_cache_dtype",
        "block_size": "block_size",
        "kv_layout": "kv_layout",
        "per_head_scales": "per_head_quant_scales",
        "kv_connector": "use_kv_connector",
        "lse": "needs_lse",
        "batch_invariant": "batch_invariant",
        "flash_attn_version": "flash_attn_version",
        "dcp": "dcp_size",
        "pcp": "pcp_size",
        "phase": "phase",
    }
)
"""Flags that no model decides, with the field of every request that each sets."""

_OF_THE_MODEL = (
    "num_heads",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "attn_type",
    "non_causal",
    "per_request_causal",
    "mm_prefix",
    "window",
    "chunk_size",
    "softcap",
    "sinks",
    "alibi",
    "mla",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "q_lora_rank",
    "sparse",
    "index_topk",
)
"""Flags for what a config.json says itself."""


def model_of(flags: RequestFlags, path: str) -> ModelLayers:
    """Return what the model of a config.json asks, with the flags that go with it.

    Raises:
        InvalidInputError: the file cannot be read as a model's config, or a flag is given for what
            the model decides.
        AttnError: as `model_layers`.
    """
    from attn_shared.model_config import load_config, model_layers

    _refuse_flags_of_the_model(flags)
    return model_layers(
        load_config(path),
        tp_size=flags.tp,
        dtype=flags.dtype,
        max_model_len=flags.max_model_len,
        **{field: getattr(flags, flag) for flag, field in _PASSED_ON.items()},
    )


def _refuse_flags_of_the_model(flags: RequestFlags) -> None:
    plain = RequestFlags()
    for name in _OF_THE_MODEL:
        if getattr(flags, name) != getattr(plain, name):
            option = f"--{name.replace('_', '-')}"
            raise InvalidInputError.for_argument(
                option,
                "given together with --model",
                "one of them",
                hint="the layers of the model say it; change it in a copy of its config.json.",
            )
