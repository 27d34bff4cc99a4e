"""Which of its kernels a backend runs a request on, and why: what `attn explain` shows."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KernelPath"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPath:
    """One way through a backend, in words for a person.

    Attributes:
        rows: which part of a batch goes this way ("decodes", "prompts of 64 tokens or more").
        kernel: what runs it.
        why: what of the request, the device or the libraries decides so.
    """

    rows: str
    kernel: str
    why: str

    def __str__(self) -> str:
        """Read as "decodes: split-KV kernel (at most 16 query tokens)"."""
        return f"{self.rows}: {self.kernel} ({self.why})"

    def to_dict(self) -> dict[str, str]:
        """Return JSON-safe values."""
        return {"rows": self.rows, "kernel": self.kernel, "why": self.why}
