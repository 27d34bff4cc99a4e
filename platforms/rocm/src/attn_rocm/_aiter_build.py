"""What the AITER that is installed has: its releases differ in their calls' arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attn_shared.capability import DeviceLimit, Reason
from attn_shared.device import Vendor
from attn_shared.inventory import Inventory, VendorEntry

__all__ = ["AITER_ARCHS", "DEVICES", "LIBRARY", "AiterBuild", "build_in", "missing_call"]

LIBRARY = "aiter"

AITER_ARCHS = ("gfx942", "gfx950")
"""Architectures that AITER has machine code for; elsewhere it does not import, or has no kernel."""

DEVICES = (DeviceLimit(vendor=Vendor.AMD, archs=AITER_ARCHS),)


@dataclass(frozen=True, slots=True, kw_only=True)
class AiterBuild:
    """A release of AITER, as far as attention depends on it; by default its repository's head.

    Attributes:
        release: its version, where it is known.
        window_length: of `flash_attn_varlen_func`'s window: 2, or 3 with a number of sink tokens.
        has_sinks: its prefill takes a logit per head.
        reads_tables: its paged prefill takes a block table; else it takes the place of each token.
        absent: calls that it lacks.
    """

    release: str | None = None
    window_length: int = 3
    has_sinks: bool = True
    reads_tables: bool = True
    absent: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Read as "aiter 0.1.7"."""
        return LIBRARY if self.release is None else f"{LIBRARY} {self.release}"


_CALLS = (
    "flash_attn_varlen_func",
    "mha_batch_prefill_func",
    "mla_decode_fwd",
    "paged_attention_v1",
    "unified_attention",
)


def build_in(inventory: Inventory) -> AiterBuild:
    """Return the release that an inventory holds; one that is not probed counts as complete."""
    return _build_of(inventory.get(LIBRARY))


def _build_of(entry: VendorEntry) -> AiterBuild:
    build = entry.build
    if build is None:
        return AiterBuild(release=entry.version)
    arguments = build.optional_arguments
    sinks = {"flash_attn_varlen_func.sink_ptr", "mha_batch_prefill_func.sink_ptr"}
    tables = {"mha_batch_prefill_func.block_table", "mha_batch_prefill_func.seqlen_k"}
    return AiterBuild(
        release=entry.version,
        window_length=int(build.flag("window_size") or 2),
        has_sinks=sinks <= arguments,
        reads_tables=tables <= arguments,
        absent=frozenset(name for name in _CALLS if build.flag(name) in ("off", "absent")),
    )


def missing_call(build: AiterBuild, needed: Iterable[str]) -> Reason | None:
    """Return why a release without one of these calls cannot run a backend; None if it has them."""
    missing = [name for name in needed if name in build.absent]
    if not missing:
        return None
    return Reason(
        code="aiter_calls",
        value=f"{build} without {', '.join(missing)}",
        allowed=f"a release with {', '.join(needed)}",
        hint='pip install -U "attn-rocm[aiter]"',
    )
