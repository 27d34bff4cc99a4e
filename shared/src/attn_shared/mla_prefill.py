"""What attends in a prefill over latents: kernels for ordinary heads whose keys come with the call.

A prefill backend is one class, found by its entry point in the group `attn.mla_prefills`. The
metadata builder of an MLA backend makes one object of it and has it prepare each part of a step;
`attn_shared.impl.MLAAttentionImpl.forward_mha` has it run them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_shared.capability import Capability, DeviceLimit, Rule, Support
from attn_shared.dtypes import KV_CACHE_DTYPES
from attn_shared.kernel_paths import KernelPath
from attn_shared.limits import SizeSet
from attn_shared.mla_metadata import RaggedPart
from attn_shared.request import AttentionRequest, Phase
from attn_shared.spec import BuildConfig, LayerSpec

if TYPE_CHECKING:
    from attn_shared.device import DeviceFacts
    from attn_shared.inventory import Inventory, VendorSpec

__all__ = ["MLAPrefill", "padded_value", "prefill_capability", "prefill_request"]


class MLAPrefill(ABC):
    """A kernel that prefills with expanded heads.

    Class attributes:
        name: unique over all prefills of all platforms, upper-case.
        attn_api: range of interface versions that the class is written for.
        vendor_libraries: names in the inventory of which any one is enough; empty: torch alone.
        vendor_specs: how to find those of them that no platform declares.
        auto_priority: where "auto" ranks a third party's; None: it is taken by name only.
        description: one line for tables.
    """

    name: ClassVar[str]
    attn_api: ClassVar[str] = ""
    vendor_libraries: ClassVar[tuple[str, ...]] = ()
    vendor_specs: ClassVar[tuple[VendorSpec, ...]] = ()
    auto_priority: ClassVar[int | None] = None
    description: ClassVar[str] = ""

    def __init__(self, spec: LayerSpec, config: BuildConfig, device: torch.device) -> None:
        """Keep what every step needs.

        Args:
            spec: of a layer of the group; all agree on heads, widths, dtype and scale.
            config: bounds of the batches.
            device: where the kernels run.
        """
        self.spec = spec
        self.config = config
        self.device = device

    @classmethod
    @abstractmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do there, from `prefill_capability`; pure, as a backend's."""

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import what the kernels need, before the first step is prepared.

        Raises:
            VendorMissingError: with the library's own words.
        """
        return  # torch alone is loaded already; a class with vendor_libraries defines its own

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return which of its kernels a request's prefills run on; see `AttentionBackend`."""
        return ()

    def prepare(self, part: RaggedPart) -> Any:
        """Return what `run` will find as `part.plan`: a schedule, say; on the host, per step."""
        return None

    @abstractmethod
    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: RaggedPart,
        *,
        output: Tensor | None = None,
        returns_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; never waits for the device.

        Args:
            query: (T, H, qk_nope_head_dim + qk_rope_head_dim), T = part.num_queries, any strides
                with a dense last dimension.
            key: (Tk, H, qk_nope_head_dim + qk_rope_head_dim), Tk = part.num_keys.
            value: (Tk, H, v_head_dim), a view: only its last dimension is dense.
            part: which rows and keys are whose; a request has no row, or at least one key.
            output: (T, H, v_head_dim) that may be written and returned; None: the kernel's own.
            returns_lse: whether the LSE is wanted.

        Returns:
            Output (T, H, v_head_dim), and the LSE (H, T) float32 in natural logarithm, any
            strides, or None where it was not asked for.
        """

    def run_apart(
        self,
        query: Tensor,
        nope: Tensor,
        rope: Tensor,
        value: Tensor,
        part: RaggedPart,
        *,
        output: Tensor | None = None,
        returns_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with keys whose rope part lies apart, one for all heads; here they become whole.

        Args:
            query: as in `run`.
            nope: (Tk, H, qk_nope_head_dim), a view: only its last dimension is dense.
            rope: (Tk, qk_rope_head_dim).
            value: as in `run`, as what follows.
            part: likewise.
            output: likewise.
            returns_lse: likewise.

        Returns:
            What `run` returns.
        """
        width = nope.shape[2]
        key = nope.new_empty(*nope.shape[:2], width + rope.shape[1])
        key[..., :width] = nope
        key[..., width:] = rope.unsqueeze(1)
        return self.run(query, key, value, part, output=output, returns_lse=returns_lse)


def prefill_capability(
    devices: tuple[DeviceLimit, ...],
    dtypes: frozenset[torch.dtype],
    *,
    rules: tuple[Rule, ...] = (),
    batch_invariant: Support = Support.NO,
    non_causal: Support = Support.NO,
    needs_probe: tuple[str, ...] = (),
) -> Capability:
    """Return what a prefill can do; it reads no cache, so that no field of one limits it.

    Args:
        devices: limits of which at least one must admit the device.
        dtypes: compute dtypes.
        rules: checks of what couples several fields, such as the widths in `request.mla`.
        batch_invariant: results do not depend on what shares the batch.
        non_causal: the step's own tokens all see each other.
        needs_probe: libraries whose build must be known before.
    """
    return Capability(
        devices=devices,
        dtypes=dtypes,
        head_sizes=SizeSet(),
        kv_cache_dtypes=frozenset(KV_CACHE_DTYPES),
        block_sizes=(1,),
        phases=frozenset({Phase.PREFILL}),
        is_mla=True,
        batch_invariant=batch_invariant,
        non_causal=non_causal,
        kv_connector=Support.YES,
        lse=Support.YES,
        dcp=Support.YES,
        rules=rules,
        needs_probe=needs_probe,
    )


def prefill_request(request: AttentionRequest) -> AttentionRequest:
    """Return what a layer's request asks of its prefill: nothing of the cache."""
    return request.with_options(
        kv_cache_dtype="auto",
        block_size=None,
        kv_layout=None,
        use_kv_connector=False,
        per_head_quant_scales=False,
        needs_lse=False,
        dcp_size=1,
        phase=Phase.PREFILL,
    )


def padded_value(value: Tensor, width: int) -> Tensor:
    """Return value (Tk, H, Dv) with zeros up to `width`, for kernels with one head size.

    The output's first Dv columns are what they were; the others are 0 and are cut off.
    """
    return pad(value, (0, width - value.shape[-1]))
