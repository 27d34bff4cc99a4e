"""FLASHINFER's sampler: the rule of `attn_shared.sampling` by FlashInfer's kernels.

They find the cut of a row without sorting it, and draw in the same kernel.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_cuda._vendor import flashinfer_sampling
from attn_shared.capability import Reason
from attn_shared.device import Vendor
from attn_shared.errors import VendorMissingError, own_words
from attn_shared.inventory import VendorSpec
from attn_shared.limits import DeviceLimit
from attn_shared.platform import PriorityBand
from attn_shared.sampling.backend import Drawn, SamplerBackend, largest
from attn_shared.sampling.request import Returns, SamplerRequest
from attn_shared.sampling.rows import Rows, column

__all__ = ["FlashInferSampler"]

_LEAST_P = 1e-30
"""What a p of 0 becomes in rows that are greedy anyway: the kernel accepts no token at 0."""


class FlashInferSampler(SamplerBackend):
    """Masks by top-k, then draws by top-p or min-p; masks do not depend on the batch."""

    name: ClassVar[str] = "FLASHINFER"
    description: ClassVar[str] = "FlashInfer's kernels, which do not sort"
    vendor: ClassVar[VendorSpec | None] = flashinfer_sampling.SPEC
    devices: ClassVar[tuple[DeviceLimit, ...] | None] = (
        DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0), below=(12, 2)),
    )
    priority: ClassVar[int | None] = PriorityBand.PERFORMANT
    provenance: ClassVar[str] = (
        "measured on an H200: 3 to 16 times as fast as TORCH with top-p, 0.8 to 4 times without"
    )

    @classmethod
    def objections(cls, request: SamplerRequest) -> tuple[Reason, ...]:
        """Return what the kernels cannot do: show what they kept, or seed single rows."""
        found = []
        if request.returns is not Returns.IDS:
            hint = "FlashInfer does not show the logits that its filters left"
            found.append(_reason("returns", request.returns, Returns.IDS, hint))
        if request.own_draws:
            hint = "its kernels mix a row's place in the batch into its draws"
            found.append(_reason("own_draws", True, False, hint))
        if request.top_p and request.min_p:
            hint = "no kernel of it has both"
            found.append(_reason("top_p with min_p", True, "one of the two", hint))
        return tuple(found)

    def __init__(self) -> None:
        """Import the library, find its calls and compile its kernels.

        Raises:
            VendorMissingError: it is broken, too old or does not compile, in its own words.
        """
        super().__init__()
        name = flashinfer_sampling.SPEC.name
        try:
            self._kernels = flashinfer_sampling.Kernels()
        except ImportError as error:
            raise VendorMissingError(str(error), library=name) from error
        # A compiler that is missing, or fails, speaks through whatever the library raises.
        try:
            self._kernels.build()
        except Exception as error:
            words = f"FlashInfer's sampling kernels do not build: {own_words(error)}"
            raise VendorMissingError(words, library=name) from error

    def sample(self, logits: torch.Tensor, rows: Rows, returns: Returns) -> Drawn:
        """Draw one token per row; see `SamplerBackend.sample`."""
        top, first, valid = largest(logits, rows)
        if rows.all_greedy or not rows.num_rows:
            return Drawn(ids=torch.where(valid, first, 0), valid=valid)
        probs = self._probabilities(logits, top, rows)
        ids, drawn = self._draw(probs, rows)
        if drawn is not None:
            valid = valid & drawn
        if rows.greedy is not None:
            ids = torch.where(rows.greedy, first, ids)
        return Drawn(ids=torch.where(valid, ids, 0), valid=valid)

    def _probabilities(self, logits: torch.Tensor, top: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return (B, V) float32 after top-k and temperature.

        Torch's softmax sums a row alike in any batch; FlashInfer's splits rows of small batches.
        """
        logits = logits.float().contiguous()
        if rows.top_k is not None:
            top_k = rows.top_k
            if isinstance(top_k, torch.Tensor):
                top_k = top_k.to(torch.int32)
            logits = self._kernels.mask_top_k(logits, top_k)
        if rows.temperature is not None:
            logits = (logits - top.float()[:, None]).div_(column(rows.temperature))
        return logits.softmax(dim=-1)

    def _draw(self, probs: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ids as int64, and for which rows they were drawn, if the release says so."""
        options: dict[str, Any] = {"deterministic": True, "generator": rows.params.generator}
        if self._kernels.returns_valid:
            options["return_valid"] = True
        if rows.top_p is not None:
            found = self._kernels.draw_top_p(probs, _least(rows.top_p), **options)
        elif rows.min_p is not None:
            found = self._kernels.draw_min_p(probs, _float(rows.min_p), **options)
        else:
            found = self._kernels.draw(probs, **options)
        ids, drawn = found if isinstance(found, tuple) else (found, None)
        return ids.to(torch.int64), drawn


def _least(top_p: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(top_p, torch.Tensor):
        return top_p.to(torch.float32).clamp(min=_LEAST_P, max=1.0)
    return max(top_p, _LEAST_P)


def _float(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) else value


def _reason(code: str, value: object, allowed: object, hint: str) -> Reason:
    return Reason(code=code, value=str(value), allowed=str(allowed), hint=hint)
