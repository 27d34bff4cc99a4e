"""What a sampler is: its name, what it can do, and one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from attn_shared.capability import Reason
from attn_shared.device import DeviceFacts
from attn_shared.inventory import VendorSpec
from attn_shared.limits import DeviceLimit
from attn_shared.platform import PriorityBand
from attn_shared.sampling.request import Returns, SamplerRequest
from attn_shared.sampling.rows import Rows

__all__ = ["Drawn", "SamplerBackend", "largest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a sampler returns.

    Attributes:
        ids: (B,) int64, from 0 to V - 1; 0 for a row that is not valid.
        valid: (B,) bool: whether the row had a distribution to draw from.
        logits: (B, V) float32, with `returns="processed_logits"`: after temperature and filters.
        logprobs: (B, V) float32, with `returns="processed_logprobs"`: their log-softmax.
    """

    ids: torch.Tensor
    valid: torch.Tensor
    logits: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None


class SamplerBackend(ABC):
    """One way to sample. Its class says what it serves; an object of it was loaded.

    Class attributes:
        name: upper-case, nobody else's.
        description: in a few words.
        vendor: the library that it needs, or None.
        devices: limits of which one must admit the device; None: every device.
        priority, provenance: its rank for "auto", and where that comes from; None: by name only.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    vendor: ClassVar[VendorSpec | None] = None
    devices: ClassVar[tuple[DeviceLimit, ...] | None] = None
    priority: ClassVar[int | None] = PriorityBand.PORTABLE
    provenance: ClassVar[str] = ""

    @classmethod
    def objections(cls, request: SamplerRequest) -> tuple[Reason, ...]:
        """Return every reason why it cannot serve a call of this kind; pure."""
        return ()

    @classmethod
    def check(cls, request: SamplerRequest, device: DeviceFacts) -> tuple[Reason, ...]:
        """Return every reason to refuse the request on the device, which comes first."""
        if cls.devices is None or any(limit.admits(device) for limit in cls.devices):
            return cls.objections(request)
        capability = f" ({device.capability})" if device.capability else ""
        reason = Reason(
            code="device",
            value=f"{device.vendor} {device.arch}{capability}",
            allowed="; ".join(map(str, cls.devices)),
        )
        return (reason, *cls.objections(request))

    def __init__(self) -> None:  # noqa: B027 - a sampler that needs no library loads nothing
        """Load what the sampler needs.

        Raises:
            VendorMissingError: its library is absent, too old or broken.
        """

    @abstractmethod
    def sample(self, logits: torch.Tensor, rows: Rows, returns: Returns) -> Drawn:
        """Draw one token per row.

        Args:
            logits: (B, V), of a floating-point dtype; not modified.
            rows: what the rows ask.
            returns: what is wanted beside ids; one that `objections` admits.
        """


def largest(logits: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's largest logit (B,), its first place, and whether the row is valid.

    A NaN anywhere in the row is its largest logit, as torch reads `max`.
    """
    top, first = logits.max(dim=-1)
    valid = top.isfinite()
    if rows.broken is not None:
        valid &= ~rows.broken
    return top, first, valid
