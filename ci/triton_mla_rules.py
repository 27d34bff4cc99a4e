"""Why TRITON_MLA is decided otherwise here than in vLLM 0.25.1, as rules with their evidence."""

from __future__ import annotations

from collections.abc import Iterator

from differences import Difference, Rule, selection_rule

__all__ = ["triton_mla_rules"]

NAME = "TRITON_MLA"
_UNSERVED = ("attn_type", "kv_cache_dtype", "mm_prefix", "per_head_quant_scales", "sink")


def triton_mla_rules() -> Iterator[Rule]:
    """What its kernels have or lack."""
    yield selection_rule(
        "TRITON_MLA begins with NVIDIA's 8.0",
        lambda d: _is(d, "device", "here") and d.row["arch"] == "7.5",
        reason="As TRITON_ATTN: Triton's own floor.",
        evidence="Triton 3: supported NVIDIA architectures begin with 8.0",
    )
    yield selection_rule(
        "TRITON_MLA reads e4m3 where Triton's compiler has it",
        lambda d: (
            _is(d, "fp8_on_device", "here") and d.config["kv_cache_dtype"] in ("fp8", "fp8_e4m3")
        ),
        reason="The recorded selector chooses it, and its constructor then refuses the cache.",
        evidence="lacking_fp8 of attn_triton, by the architectures that Triton compiles e4m3 for",
    )
    yield selection_rule(
        "TRITON_MLA takes float32, blocks of any size, e5m2, and rows without a causal mask",
        lambda d: (
            (_is(d, "dtype", "there") and d.config["dtype"] == "float32")
            or (_is(d, "block_size", "there") and (d.config["block_size"] or 0) % 16 != 0)
            or (_is(d, "kv_cache_dtype", "there") and _is_extra_format(d))
            or (_is(d, "non_causal", "there") and d.config["use_non_causal"])
        ),
        reason="attn's kernels find each token's block by themselves and multiply float32 as IEEE "
        "does; over a cache that is sharded rows see every key of a rank.",
        evidence="`attn verify TRITON_MLA`: mla_decode, mla_block_sizes, mla_fp8, mla_non_causal",
    )
    yield selection_rule(
        "what latent attention has not is refused on Intel GPUs as well",
        lambda d: (
            d.subject == NAME
            and d.side == "here"
            and d.code in _UNSERVED
            and d.row["platform"] == "xpu"
        ),
        reason="v0.25.1's XPU platform takes TRITON_MLA for latents and asks it nothing.",
        evidence="the recorded capability of the same class on NVIDIA's and AMD's GPUs refuses it",
    )
    yield selection_rule(
        "TRITON_MLA on a CPU is refused by its own capability",
        lambda d: d.subject == NAME and (d.row["platform"], d.code) == ("cpu", "platform_no_mla"),
        reason="v0.25.1's CPU platform refuses all latents without a reason.",
        evidence="vllm#22217: a named backend works or raises with its reasons",
    )


def _is(d: Difference, code: str, side: str) -> bool:
    return d.subject == NAME and (d.code, d.side) == (code, side)


def _is_extra_format(d: Difference) -> bool:
    """Formats that the recorded class lacks: float32 itself, and e5m2."""
    return d.config["kv_cache_dtype"] in ("fp8_e5m2", "float32")
