"""FLASH_ATTN among the prefills over latents: FlashAttention 2, 3 and 4 on expanded heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cuda._fa_calls import kernel_for, load
from attn_cuda._fa_providers import LIBRARIES, Provider, libraries_for, resolve_provider
from attn_cuda._fa_step import Extras, KeyStep
from attn_shared.alignment import aligned, is_aligned
from attn_shared.capability import Capability, Reason, Rule, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.errors import UnsupportedOptionError
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.kernel_paths import KernelPath
from attn_shared.limits import DeviceLimit
from attn_shared.loaded_devices import LoadedDevices, import_vendor
from attn_shared.mla_prefill import MLAPrefill, padded_value, prefill_capability, prefill_request
from attn_shared.request import AttentionRequest, AttentionType, MLADims
from attn_shared.served import request_of
from attn_shared.signed_scale import Scale

if TYPE_CHECKING:
    from attn_shared.mla_metadata import RaggedPart
    from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["FlashAttnPrefill"]

NAME = "FLASH_ATTN"
_DEVICE = DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The build that prefills a layer, and how wide its values are to it."""

    provider: Provider
    value_size: int


def _choose(
    device: DeviceFacts, inventory: Inventory, request: AttentionRequest
) -> _Choice | Reason:
    """Return the build for expanded heads; where none takes values of their width, padded ones."""
    dims = request.mla or MLADims()
    width = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    heads = AttentionRequest(
        num_heads=request.num_heads,
        num_kv_heads=request.num_heads,
        head_size=width,
        dtype=request.dtype,
        attn_type=AttentionType.ENCODER_ONLY,
        needs_lse=True,
        batch_invariant=request.batch_invariant,
    )
    reasons = []
    for size in (dims.v_head_dim, *([width] if dims.v_head_dim < width else [])):
        found = resolve_provider(device, inventory, heads.with_options(head_size_v=size))
        if found.provider is not None:
            return _Choice(provider=found.provider, value_size=size)
        reasons += [found.reason] if found.reason is not None else []
    return reasons[-1]


def _capability(device: DeviceFacts, inventory: Inventory) -> Capability:
    def has_provider(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        if not _DEVICE.admits(device):
            return None  # which has said why
        found = _choose(device, inventory, request)
        return found if isinstance(found, Reason) else None

    return prefill_capability(
        (_DEVICE,),
        frozenset({torch.float16, torch.bfloat16}),
        rules=(Rule(name="flash_attn_provider", check=has_provider),),
        batch_invariant=Support.YES,
        non_causal=Support.YES,
        needs_probe=tuple(
            name
            for name in libraries_for(device)
            if inventory.get(name).status is VendorStatus.PRESENT
        ),
    )


DEVICES = LoadedDevices(f"mla_prefill {NAME}", _capability)


class FlashAttnPrefill(MLAPrefill):
    """FlashAttention over keys that come with the call."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = LIBRARIES
    description = "FlashAttention 2, 3 and 4; values are padded where kernels have one width"

    def __init__(self, spec: LayerSpec, config: BuildConfig, device: torch.device) -> None:
        """Resolve the build, and bind its call.

        Raises:
            UnsupportedOptionError: no build serves the layer.
            VendorMissingError: the process has loaded none.
        """
        super().__init__(spec, config, device)
        there = DEVICES.latest()
        choice = _choose(there.device, there.inventory, prefill_request(request_of(spec)))
        if isinstance(choice, Reason):
            raise UnsupportedOptionError(f"mla_prefill {NAME} does not serve this layer: {choice}.")
        dims = spec.mla or MLADims()
        self.provider, self._value_size = choice.provider, choice.value_size
        self._is_padded = choice.value_size != dims.v_head_dim
        self._is_invariant = config.batch_invariant or spec.batch_invariant
        self._scale = Scale(spec.scale)
        heads = replace(
            spec,
            num_kv_heads=spec.num_heads,
            head_size=dims.qk_nope_head_dim + dims.qk_rope_head_dim,
            head_size_v=choice.value_size,
            scale=self._scale.value,
            kv_cache_spec=None,
            attn_type=AttentionType.ENCODER_ONLY,
            mla=None,
        )
        self._call = kernel_for(self.provider, heads)

    def __repr__(self) -> str:
        """Read as what runs."""
        return f"FlashAttnPrefill({self.provider})"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what FlashAttention can do on the device with the builds that are installed."""
        return _capability(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the build that serves the heads, and what becomes of the values."""
        choice, dims = _choose(device, inventory, request), request.mla or MLADims()
        if isinstance(choice, Reason):
            return ()
        why = f"heads of {dims.qk_nope_head_dim + dims.qk_rope_head_dim} with values of "
        why += str(dims.v_head_dim)
        if choice.value_size != dims.v_head_dim:
            why += f", padded to {choice.value_size}: no build here takes two widths"
        return (KernelPath(rows="prefills", kernel=str(choice.provider), why=why),)

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the builds that may be meant, and note for which device.

        Raises:
            VendorMissingError: one of them does not load, in its own words.
        """
        for library in libraries_for(device):
            if inventory.get(library).is_usable:
                import_vendor(library, lambda name=library: load(name))  # type: ignore[misc]
        DEVICES.remember(device, inventory)

    def prepare(self, part: RaggedPart) -> KeyStep:
        """Return a part as a call of FlashAttention reads it.

        In batch-invariant mode a bound of 1 is told as 2, since kernels choose tiles by it.
        """
        return KeyStep(
            query_start_loc=part.query_start_loc,
            max_query_len=max(part.max_query_len, 2 if self._is_invariant else 1),
            max_key_len=max(1, part.max_key_len),
            causal=part.is_causal,
            key_start_loc=part.key_start_loc,
            num_splits=1 if self._is_invariant else 0,
        )

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
        """Attend; see `MLAPrefill.run`."""
        width = value.shape[-1]
        extras = Extras(with_lse=returns_lse)
        if self._is_padded:
            value = padded_value(value, self._value_size)
        elif output is not None and self.provider.writes_out and is_aligned(output):
            extras.out = output
        result, lse = self._call(
            self._scale.query(query), aligned(key), aligned(value), part.plan, extras
        )
        return result[..., :width], lse if returns_lse else None
