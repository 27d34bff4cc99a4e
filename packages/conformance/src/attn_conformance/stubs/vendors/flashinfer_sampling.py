"""FlashInfer's sampling: the calls that keep ties, by their signatures and by what they accept.

Read in the wheels of flashinfer-python 0.6.13 and 0.7.4 (sampling.py, sampling.cuh, topk.cuh). The
signatures of these calls are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature

__all__ = ["sampling_stub"]


@dataclass(frozen=True, kw_only=True)
class _SamplingFunction:
    """A call whose result is computed from what it was handed.

    Attributes:
        signature: its parameters.
        answer: arguments, defaults included -> result.
    """

    signature: VendorSignature
    answer: Callable[[Mapping[str, Any]], Any]

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for the function; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.answer(recorder.record(self.signature, arguments, keywords))

        call.__signature__ = self.signature.signature  # type: ignore[attr-defined]
        return call


def sampling_stub(version: str, *, has_valid: bool = True) -> VendorStub:
    """Return a release: its module `flashinfer.sampling`.

    Args:
        version: as its metadata says it.
        has_valid: whether draws take `return_valid`, which releases before 0.6 do not.
    """
    options = (
        "indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None"
    )
    if has_valid:
        options += ", return_valid=False"

    def made(name: str, parameters: str, answer: Callable[[Mapping[str, Any]], Any]) -> object:
        signature = VendorSignature(name=name, parameters=parameters, returns="ids, int32")
        return _SamplingFunction(signature=signature, answer=answer)

    functions = {
        "top_k_mask_logits": made("top_k_mask_logits", "logits, top_k", _mask_top_k),
        "sampling_from_probs": made("sampling_from_probs", f"probs, {options}", _draw),
        "top_p_sampling_from_probs": made(
            "top_p_sampling_from_probs", f"probs, top_p, {options}", _draw_top_p
        ),
        "min_p_sampling_from_probs": made(
            "min_p_sampling_from_probs", f"probs, min_p, {options}", _draw_min_p
        ),
    }
    return VendorStub(
        distribution="flashinfer-python",
        version=version,
        modules={"flashinfer": {}, "flashinfer.sampling": functions},
    )


def _per_row(name: str, value: Any, rows: Tensor, dtype: torch.dtype) -> list[Any]:
    """Return one number per row; a tensor must be what the kernel reads."""
    if isinstance(value, Tensor):
        if value.dtype is not dtype or value.shape != rows.shape[:1]:
            raise ValueError(f"{name} of {value.dtype} {tuple(value.shape)}")
        return list(value.tolist())
    return [value] * len(rows)


def _check_rows(rows: Tensor) -> None:
    if rows.dim() != 2 or not rows.is_contiguous() or rows.dtype is not torch.float32:
        raise ValueError(f"rows of {rows.dtype} {tuple(rows.shape)}, strides {rows.stride()}")


def _mask_top_k(arguments: Mapping[str, Any]) -> Tensor:
    """Mask by the k-th largest value, with all that equal it; a NaN is not kept."""
    logits = arguments["logits"]
    _check_rows(logits)
    masked = torch.full_like(logits, -torch.inf)
    for row, top_k in enumerate(_per_row("top_k", arguments["top_k"], logits, torch.int32)):
        if not 1 <= top_k <= logits.shape[1]:
            raise ValueError(f"top_k={top_k} of {logits.shape[1]} tokens")
        pivot = logits[row].sort(descending=True)[0][top_k - 1]
        masked[row] = torch.where(logits[row] >= pivot, logits[row], -torch.inf)
    return masked


def _draw(arguments: Mapping[str, Any]) -> Any:
    return _drawn(arguments, lambda row, index: row > 0)


def _draw_top_p(arguments: Mapping[str, Any]) -> Any:
    """Keep a token if larger ones hold less than p; at 0 the kernel would accept none."""
    parts = _per_row("top_p", arguments["top_p"], arguments["probs"], torch.float32)
    if not all(0 < part <= 1 for part in parts):
        raise ValueError(f"top_p={parts}")

    def is_kept(row: Tensor, index: int) -> Tensor:
        larger = torch.stack([row[row > value].sum() for value in row])
        return larger.lt(parts[index]).logical_and(row > 0)

    return _drawn(arguments, is_kept)


def _draw_min_p(arguments: Mapping[str, Any]) -> Any:
    parts = _per_row("min_p", arguments["min_p"], arguments["probs"], torch.float32)
    return _drawn(arguments, lambda row, index: (row >= row.max() * parts[index]) & (row > 0))


def _drawn(arguments: Mapping[str, Any], is_kept: Callable[[Tensor, int], Tensor]) -> Any:
    """Draw from what is kept of each row; a row that holds nothing gives 0, which is not valid."""
    probs = arguments["probs"]
    _check_rows(probs)
    if arguments["indices"] is not None or not arguments["deterministic"]:
        raise ValueError("indices, or not deterministic: not described here")
    ids = torch.zeros(len(probs), dtype=torch.int32)
    valid = torch.zeros(len(probs), dtype=torch.bool)
    for index, row in enumerate(probs):
        kept = torch.where(is_kept(row, index), row, 0.0)
        if kept.sum() > 0:
            drawn = torch.multinomial(kept, 1, generator=arguments["generator"])
            ids[index], valid[index] = drawn[0], True
    return (ids, valid) if arguments.get("return_valid") else ids
