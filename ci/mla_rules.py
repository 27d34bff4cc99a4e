"""Why attn selects otherwise than was recorded of vLLM 0.25.1 where latents are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from differences import Difference, Rule, selection_rule

__all__ = ["mla_rules"]

VENDORS = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "ROCM_AITER_MLA")
FACTS = "vLLM 0.25.1's own classes, run with a mocked device"
FP8 = ("fp8", "fp8_e4m3")


def mla_rules() -> Iterator[Rule]:
    """The rules, the special ones before the general."""
    yield from _order()
    yield from _devices()
    yield from _kernels()
    yield from _blocks()


def _major(d: Difference) -> int:
    """The major of an NVIDIA architecture; 0 elsewhere."""
    return int(d.row["arch"].split(".")[0]) if d.row["platform"] == "cuda" else 0


def _order() -> Iterator[Rule]:
    yield selection_rule(
        "many heads are decoded by FLASHMLA on Hopper",
        lambda d: d.subject == "order" and (d.here, d.there) == ("FLASHMLA", "FLASH_ATTN_MLA"),
        reason="From 64 heads on they fill its tiles: with 128 it takes 0.81 to 0.91 of "
        "FLASH_ATTN_MLA's time in batches.",
        evidence="docs/benchmarks/h200-mla.json",
    )


def _devices() -> Iterator[Rule]:
    yield selection_rule(
        "FLASHINFER_MLA serves Hopper as well",
        lambda d: (
            d.subject == "FLASHINFER_MLA" and _major(d) == 9 and (d.code, d.side) == _NOT_THERE
        ),
        reason="FlashInfer has kernels over latents for Hopper, which v0.25.1 never offers there.",
        evidence="BatchMLAPagedAttentionWrapper with backend fa3; `attn verify FLASHINFER_MLA`",
    )
    yield selection_rule(
        "FLASHMLA's dense decode is for Hopper",
        lambda d: (
            d.subject == "FLASHMLA"
            and ((d.code, d.side) == ("device", "here") or d.code.startswith("combo:flashmla_"))
            and (_major(d) != 9 or d.side == "here")
        ),
        reason="The recorded class admits 10.x too and refuses it in a second check; here the "
        "device is the one reason.",
        evidence="the library's own words: dense decode is only supported on SM90a",
    )
    yield selection_rule(
        "FLASH_ATTN_MLA is told by device and build",
        lambda d: d.subject == "FLASH_ATTN_MLA" and d.code == "combo:fa3_mla_unavailable",
        reason="Where the device is not Hopper that is the reason, and where it is the build is "
        "named with what it lacks.",
        evidence="vllm#40677: a refusal names the value and what is allowed",
    )

    yield selection_rule(
        "AITER decodes latents on gfx942 and gfx950",
        lambda d: (
            d.subject == "ROCM_AITER_MLA"
            and (d.code, d.side) == ("device", "here")
            and d.row["arch"] not in ("gfx942", "gfx950")
        ),
        reason="v0.25.1 never asks the device where the name is forced; elsewhere AITER has no "
        "machine code.",
        evidence="aiter/jit/core.py and hsa/ of ROCm/aiter at e4048607a5",
    )
    yield selection_rule(
        "a named backend over latents is answered by its own capability",
        lambda d: (
            d.subject in VENDORS
            and (d.row["platform"], d.code) in (("xpu", "replaced"), ("cpu", "platform_no_mla"))
        ),
        reason="v0.25.1's XPU platform runs TRITON_MLA whatever is named, and its CPU platform "
        "refuses all latents without a reason.",
        evidence="vllm#22217: a named backend works or raises with its reasons",
    )


_NOT_THERE = ("device", "there")


def _kernels() -> Iterator[Rule]:
    yield selection_rule(
        "widths of latents have one code",
        lambda d: (
            d.subject == "FLASHINFER_MLA"
            and (d.code == "combo:qk_nope_head_dim" or (d.code, d.side) == ("mla_dims", "here"))
        ),
        reason="The same limit of trtllm-gen under another name; the kernels for Hopper do not "
        "read that width.",
        evidence=f"{FACTS}: qk_nope_head_dim of 64, 128 or 192",
    )
    yield selection_rule(
        "kernels over latents of 512 beside 64 take no others",
        lambda d: (
            d.subject in ("FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "ROCM_AITER_MLA")
            and (d.code, d.side) == ("head_size", "here")
            and (d.config["head_size"] == 320 or d.subject == "ROCM_AITER_MLA")
        ),
        reason="The recorded classes admit entries of 320, AITER's of any width, and the call "
        "then refuses them; trtllm-gen has kernels for both.",
        evidence="the libraries' own checks: head_size_v of 512 alone, D_latent of 512",
    )
    yield selection_rule(
        "trtllm-gen's decode over latents returns bfloat16",
        lambda d: (
            d.subject == "FLASHINFER_MLA"
            and _major(d) == 10
            and (d.code, d.side) == ("dtype", "here")
            and d.config["dtype"] == "float16"
        ),
        reason="A float16 layer would get an output of another dtype than its own.",
        evidence="the library's own check of `out`, which is bfloat16",
    )
    yield selection_rule(
        "an fp8 cache of latents is read by who scales it",
        lambda d: (
            d.subject in ("CUTLASS_MLA", "FLASHINFER_MLA")
            and (d.code, d.side) == ("kv_cache_dtype", "here")
            and d.config["kv_cache_dtype"] in FP8
            and (d.subject == "CUTLASS_MLA" or _major(d) != 10)
        ),
        reason="CUTLASS's operator takes no scale of the cache, and FlashInfer's kernels for "
        "Hopper read 16 bits alone.",
        evidence="the operator's schema; vllm#13730: a numeric format is never ignored",
    )


def _blocks() -> Iterator[Rule]:
    yield selection_rule(
        "sparse attention has no blocks to compare",
        lambda d: (
            d.subject in VENDORS
            and (d.code, d.side) == ("block_size", "there")
            and d.config["attn_type"] in ("encoder", "encoder_only")
        ),
        reason="An encoder has no cache, and so no block size, whatever else stands in its way.",
        evidence="the contract: ENCODER and ENCODER_ONLY have no cache",
    )
    yield selection_rule(
        "FLASHINFER_MLA's kernels for Hopper take blocks of 16 x n",
        lambda d: (
            d.subject == "FLASHINFER_MLA"
            and (d.code, d.side) == ("block_size", "there")
            and _major(d) != 10
            and d.config["block_size"] % 16 == 0
        ),
        reason="They find each token's page by division; 32 and 64 are limits of trtllm-gen.",
        evidence="`attn verify FLASHINFER_MLA`; vllm#36241 on lists that are too strict",
    )
