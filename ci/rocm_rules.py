"""Why attn's backends for AMD GPUs select otherwise than the recorded ones."""

from __future__ import annotations

from collections.abc import Iterator

from differences import Rule, Test, selection_rule

__all__ = ["rocm_rules"]

_OWN, _FLASH, _UNIFIED = "ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN"
_AITER_ARCHS = ("gfx942", "gfx950")
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


def rocm_rules() -> Iterator[Rule]:
    """The rules, the special ones before the general."""
    yield from _own()
    yield from _flash()
    yield from _unified()
    yield from _all()


def _refuses(subject: str, side: str, *codes: str) -> Test:
    """Accounts for codes that one side alone has, for one backend."""
    return lambda d: (d.subject, d.side) == (subject, side) and d.code in codes


_MORE = ("attn_type", "batch_invariance", "block_size", "head_size", "sink", "kv_cache_dtype")


def _own() -> Iterator[Rule]:
    yield selection_rule(
        "ROCM_ATTN has what TRITON_ATTN's kernels have",
        _refuses(_OWN, "there", *_MORE, "per_head_quant_scales"),
        reason="The recorded class stands for a HIP operator over packed keys beside a Triton "
        "prefill; here the name stands for attn's Triton kernels, over the plain blocks that "
        "every other backend reads.",
        evidence="`attn verify TRITON_ATTN`, whose kernels and rules it shares",
    )
    yield selection_rule(
        "ROCM_ATTN has the limits of TRITON_ATTN's kernels",
        _refuses(_OWN, "here", "fp8_on_device", "mm_prefix_decoder", "shared_memory"),
        reason="e4m3 where Triton's compiler has it, multimodal ranges in decoders, tiles that "
        "fit the shared memory of a device.",
        evidence="the kernels' constraints, docs/backends/triton_attn.md",
    )
    yield selection_rule(
        "ROCM_ATTN is chosen by name",
        lambda d: d.subject == "order" and d.there == _OWN and d.here != _OWN,
        reason="v0.25.1 puts it first on every AMD GPU, also with AITER installed and enabled; "
        "here it is TRITON_ATTN under another name, and whoever has AITER has asked for it.",
        evidence="recorded_order; vllm#34570 and others: the HIP operator's own gates are silent",
    )


def _flash() -> Iterator[Rule]:
    yield selection_rule(
        "ROCM_AITER_FA serves encoders and cross-attention",
        _refuses(_FLASH, "there", "attn_type"),
        reason="Its varlen call takes any ragged keys, and its paged calls any lengths of them.",
        evidence="the rules encoder, encoder_only and cross_attention through its stubs",
    )
    yield selection_rule(
        "ROCM_AITER_FA's pages hold 16 or 32 tokens",
        _refuses(_FLASH, "here", "block_size"),
        reason="Its decode is run with the pages that AITER's own tests cover; the recorded class "
        "admits any multiple of 16 and packs them anew.",
        evidence="paged_attention_v1 divides parts of 256 by the block; op_tests of ROCm/aiter",
    )
    yield selection_rule(
        "AITER reads fp8 caches by decodes over pages alone",
        lambda d: (
            _refuses(_FLASH, "here", "kv_cache_dtype")(d) and d.config["kv_cache_dtype"] in _FP8
        ),
        reason="It has no e5m2, and its prefill has no fp8 keys beside a query of 16 bits: layers "
        "with windows or sinks, and encoders, cannot read such a cache.",
        evidence="csrc/py_itfs_ck of amd-aiter 0.1.7: query and key must have the same dtype",
    )


def _unified() -> Iterator[Rule]:
    yield selection_rule(
        "AITER's Triton kernels are causal",
        _refuses(_UNIFIED, "here", "attn_type", "mm_prefix"),
        reason="The call asserts a causal mask and takes no ranges; the recorded class admits "
        "encoders, cross-attention and multimodal prefixes, and runs them causally or fails.",
        evidence="aiter/ops/triton/unified_attention.py: only causal attention is supported",
    )
    yield selection_rule(
        "AITER's Triton kernels are held to heads of 256",
        _refuses(_UNIFIED, "here", "head_size"),
        reason="Larger ones need more shared memory than a compute unit has with its tile of a "
        "whole block; the recorded class admits any from 32 on.",
        evidence="65,536 bytes of LDS on gfx942; the kernel's tiles of block x head",
    )
    yield selection_rule(
        "AITER's Triton kernels take blocks up to 128",
        _refuses(_UNIFIED, "here", "block_size"),
        reason="A decode's tile is one block.",
        evidence="aiter/ops/triton/unified_attention.py: TILE_SIZE is the block's in decodes",
    )
    yield selection_rule(
        "AITER's Triton kernels serve float16",
        _refuses(_UNIFIED, "there", "dtype"),
        reason="They read the dtype that they are given; the recorded class declares bfloat16.",
        evidence="the suite in float16 through its stubs, the interpreted kernel of `nox -s aiter`",
    )
    yield selection_rule(
        "AITER's Triton kernels work with a KV connector",
        _refuses(_UNIFIED, "there", "kv_connector"),
        reason="A cache is block first here whoever reads it; the recorded class inherits the "
        "refusal of one whose cache is not.",
        evidence="attn_shared's cache layouts; the recorded class's own shape is block first",
    )
    yield selection_rule(
        "AITER has code for gfx942 and gfx950",
        lambda d: _refuses(_UNIFIED, "here", "device")(d) and d.row["arch"] not in _AITER_ARCHS,
        reason="v0.25.1 never asks the device where the name is forced; elsewhere AITER refuses "
        "to be imported, or its tables of settings know no such device.",
        evidence="aiter/jit/core.py and its arch tables at e4048607a5",
    )


def _all() -> Iterator[Rule]:
    yield selection_rule(
        "an encoder without a cache has no block size, on AMD GPUs too",
        lambda d: (
            d.subject in (_FLASH, _UNIFIED)
            and (d.code, d.side) == ("block_size", "there")
            and d.config["attn_type"] in ("encoder", "encoder_only")
        ),
        reason="The block size of the model's other layers says nothing about it.",
        evidence="the contract: ENCODER and ENCODER_ONLY have no cache",
    )
    yield selection_rule(
        "a library that is not installed serves nobody",
        lambda d: d.code == "library",
        reason="v0.25.1 takes a named AITER backend where AITER is absent, and fails when a layer "
        "is made.",
        evidence="vllm#22217: a named backend works or raises with its reasons",
    )
