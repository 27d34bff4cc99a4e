"""The call of the library's attention, which every backend of this distribution makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from attn_cpu._attn_batch import HostBatch
from attn_cpu._ops import call, op
from attn_cpu._plans import Plan
from attn_cpu.isa import BEST, IsaLevel, forced_level
from attn_shared.errors import VendorMissingError

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["LIBRARY", "Keys", "Options", "attend", "load_kernels"]

LIBRARY = "attn_cpu_kernels"
Options = tuple[float, float | None, int | None, int | None, int | None]
"""Scale, softcap, window to the left and to the right, chunk size."""


class Keys(NamedTuple):
    """Where a call reads keys and values: the arguments of the op's names."""

    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def load_kernels(backend: str, inventory: Inventory) -> None:
    """Load the library.

    Args:
        backend: who needs it.
        inventory: what is installed.

    Raises:
        VendorMissingError: it does not load; in its own words.
    """
    from attn_cpu._vendor.attn_cpu_kernels import load

    try:
        load()
    except ImportError as error:
        raise VendorMissingError(
            f"{backend} cannot load its kernels: {error}.",
            hint=inventory.get(LIBRARY).install,
            library=LIBRARY,
        ) from error


def attend(
    query: Tensor,
    output: Tensor,
    lse: Tensor | None,
    keys: Keys,
    batch: HostBatch,
    plan: Plan,
    options: Options,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    is_checked: bool = False,
    isa: IsaLevel | int = BEST,
) -> None:
    """Attend, and write `output` and `lse`.

    Args:
        query: (T, Hq, D).
        output: (T, Hq, Dv).
        lse: (Hq, T) float32, or None.
        keys: of the cache, or of the call.
        batch: lengths and rules of each request.
        plan: of this batch and these heads.
        options: of the layer.
        sinks: (Hq,) float32, or None.
        alibi_slopes: (Hq,) float32, or None.
        is_checked: also look at the contents of multimodal ranges.
        isa: the level of instructions; BEST is what `attn_cpu.isa.forced` says, or the CPU's best.

    Raises:
        InvalidInputError: an argument does not fit the others.
    """
    call(
        op("attention"),
        query,
        output,
        lse,
        keys.key,
        keys.value,
        batch.block_table,
        batch.query_start_loc,
        batch.key_lens,
        batch.key_start_loc,
        plan.pieces,
        plan.workspace,
        *options,
        batch.is_causal,
        batch.causal_per_request,
        sinks,
        alibi_slopes,
        keys.k_scale,
        keys.v_scale,
        keys.key_scales,
        keys.value_scales,
        batch.ranges,
        is_checked,
        forced_level() if isa == BEST else isa,
    )
