"""Which phase of a batch may run on TensorRT-LLM's kernels inside FlashInfer, as one pure function.

On Blackwell of family 10.x both phases may, by trtllm-gen, whose kernels are shipped compiled
(cubins). On Hopper decode may, by XQA, which is compiled at first use like FlashInfer's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_shared.device import DeviceFacts

__all__ = ["DECODE", "PREFILL", "TrtllmCase", "can_use_trtllm", "kernels_of", "use_trtllm"]

PREFILL = "prefill"
DECODE = "decode"

_FEW_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmCase:
    """What the choice depends on.

    Attributes:
        phase: `PREFILL` or `DECODE`.
        num_heads: query heads.
        num_kv_heads: kv heads.
        kv_cache_dtype: the cache's format by name; "auto" is the layer's own dtype.
        query_is_fp8: the query is quantised before the call.
        has_sinks: the layer has sinks.
        has_drafts: decodes bring draft tokens, all as many.
        batch_invariant: results must not depend on what shares the batch.
        dcp_size: ranks that share each sequence.
        num_tokens: query tokens of the batch.
        force: True: wherever it may run; False: nowhere; None: where v0.25.1 expects it to pay.
    """

    phase: str
    num_heads: int
    num_kv_heads: int
    kv_cache_dtype: str = "auto"
    query_is_fp8: bool = False
    has_sinks: bool = False
    has_drafts: bool = False
    batch_invariant: bool = False
    dcp_size: int = 1
    num_tokens: int = 1
    force: bool | None = None


def kernels_of(device: DeviceFacts, phase: str) -> str | None:
    """Return the kernels that a device has for a phase: "trtllm-gen", "xqa" or None."""
    capability = device.capability
    if capability is None:
        return None
    if capability.is_family(10):
        return "trtllm-gen"
    return "xqa" if capability.is_family(9) and phase == DECODE else None


def can_use_trtllm(case: TrtllmCase, device: DeviceFacts) -> bool:
    """Whether kernels for the phase are there, serve its heads, and are not switched off."""
    return (
        case.force is not False
        and not case.batch_invariant
        and kernels_of(device, case.phase) is not None
        and case.num_heads % case.num_kv_heads == 0
    )


def use_trtllm(case: TrtllmCase, device: DeviceFacts) -> bool:
    """Whether the phase runs on them.

    Drafts, fp8 queries and sinks have no other kernel in FlashInfer, so that they decide before any
    expectation of speed; a sharded sequence needs another causal mask than theirs. The rest is
    vLLM 0.25.1's table of what pays, `ATTN_ORACLE_DIR/trtllm.jsonl`.
    """
    if not can_use_trtllm(case, device) or case.dcp_size > 1:
        return False
    is_decode = case.phase == DECODE
    if (case.has_drafts and is_decode) or case.query_is_fp8 or case.has_sinks or case.force:
        return True
    is_plain = case.kv_cache_dtype == "auto"
    if not is_decode:
        return is_plain
    if kernels_of(device, DECODE) == "xqa" and case.kv_cache_dtype.startswith("fp8"):
        return True
    return is_plain and case.num_tokens <= _FEW_TOKENS
