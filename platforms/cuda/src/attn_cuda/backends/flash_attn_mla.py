"""FLASH_ATTN_MLA: FlashAttention 3's kernels for latents on Hopper, for queries of any length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cuda import _fa_mla_call
from attn_cuda._fa_mla_call import FlashAttnMLACall, latent_schedule, resolve_provider
from attn_cuda._fa_providers import Provider
from attn_cuda._fa_step import KeyStep
from attn_cuda._mla_capability import BATCHES, flash_attn_mla
from attn_shared.alignment import is_aligned
from attn_shared.backend import AttentionBackend, AttentionCGSupport, AttentionLayer
from attn_shared.capability import Capability, Reason
from attn_shared.device import DeviceFacts
from attn_shared.errors import UnsupportedOptionError
from attn_shared.kernel_paths import KernelPath
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.loaded_devices import LoadedDevices, import_vendor
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_impl import VendorMLAImpl
from attn_shared.mla_metadata import MLAMetadata, MLAQuerySupport
from attn_shared.mla_paths import decode_path
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.served import require_block_table
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.step_buffers import Buffers, is_captured
from attn_triton.portable import take_latent_kernels

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = [
    "FlashAttnMLABackend",
    "FlashAttnMLADecode",
    "FlashAttnMLAImpl",
    "FlashAttnMLAMetadataBuilder",
]

NAME = "FLASH_ATTN_MLA"
DEVICES = LoadedDevices(NAME, flash_attn_mla)

_MOST_SPLITS = 32
_TILE_ROWS = 64  # of queries times heads
_USUAL_COMPUTE_UNITS = 132


class FlashAttnMLABackend(AttentionBackend):
    """FlashAttention 3 over the latent cache as it lies."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = _fa_mla_call.LIBRARIES
    description = "FlashAttention 3 with qv on Hopper, queries of any length"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what FlashAttention 3 can do on the device with the builds that are installed."""
        return flash_attn_mla(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the build that decodes, and why none before it does."""
        found, why = resolve_provider(inventory), "the first that has kernels for latents"
        if isinstance(found, Reason):
            return ()
        if inventory.get(found.library).build is not None and not found.has_schedule:
            why = f"{why}; it takes no schedule made ahead"
        return (decode_path(FlashAttnMLAMetadataBuilder, str(found), why),)

    @staticmethod
    def get_impl_cls() -> type[FlashAttnMLAImpl]:
        """Return the class that runs one layer."""
        return FlashAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnMLAMetadataBuilder]:
        """Return the class that prepares each step."""
        return FlashAttnMLAMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the build that has kernels for latents, and note for which device.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        found = resolve_provider(inventory)
        if isinstance(found, Provider):
            import_vendor(found.library, _fa_mla_call.INTERFACES[found.library])
        DEVICES.remember(device, inventory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashAttnMLADecode:
    """The decodes of a step, for the build that they were described to."""

    provider: Provider
    step: KeyStep


def _provider() -> Provider:
    """Return the build that runs layers in this process.

    Raises:
        UnsupportedOptionError: none has kernels for latents.
    """
    found = resolve_provider(DEVICES.latest().inventory)
    if isinstance(found, Reason):
        raise UnsupportedOptionError(f"{NAME} is not served here: {found}.")
    return found


class FlashAttnMLAMetadataBuilder(MLAMetadataBuilder[FlashAttnMLADecode]):
    """Describes decodes to FlashAttention 3; host lengths may be upper bounds.

    For a captured size every tensor that is made here stays at one address, and bounds and splits
    are those that were captured.
    """

    backend_name = NAME
    served = BATCHES
    query_support = MLAQuerySupport.VARLEN
    decode_threshold = 512

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs; see `MLAMetadataBuilder`."""
        super().__init__(kv_cache_spec, layers, config, device)
        self._provider = _provider()
        self._dims = self.layer.mla or MLADims()
        self._buffers = Buffers(device, is_kept=True)
        self._longest: dict[tuple[int, int], int] = {}

    def check_served(self, layer: LayerSpec) -> None:
        """Refuse a layer that is not served where the library is loaded."""
        DEVICES.serving(layer)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_BATCH: decodes of one length."""
        return AttentionCGSupport.UNIFORM_BATCH

    def build_for_cudagraph_capture(
        self, common: CommonAttentionMetadata
    ) -> MLAMetadata[FlashAttnMLADecode]:
        """Return metadata to capture with; `build` bounds later batches of this size alike."""
        self._longest[_size_of(common)] = max(1, common.max_seq_len)
        return super().build_for_cudagraph_capture(common)

    def build_decode(self, common: CommonAttentionMetadata) -> FlashAttnMLADecode:
        """Return the decodes' metadata, with the library's schedule where it makes one ahead."""
        longest = max(1, common.max_seq_len)
        captured = self._longest.get(_size_of(common), 0)
        step = KeyStep(
            query_start_loc=common.query_start_loc,
            max_query_len=max(common.max_query_len, 2) if self.is_invariant else _rows(common),
            max_key_len=captured if longest <= captured else longest,
            causal=True,
            key_lens=common.seq_lens,
            block_table=require_block_table(common),
            num_splits=self._num_splits(common),
        )
        if self._provider.has_schedule and not self.is_invariant:
            made = latent_schedule(
                self._provider,
                self.layer,
                step,
                page_size=self.block_size,
                kv_lora_rank=self._dims.kv_lora_rank,
            )
            if is_captured(common, self.config):
                made = self._buffers.kept(f"schedule of {common.num_actual_tokens}", made)
            step = replace(step, schedule=made)
        return FlashAttnMLADecode(provider=self._provider, step=step)

    def _num_splits(self, common: CommonAttentionMetadata) -> int:
        """Return 1 in batch-invariant mode, 0 where the kernel may choose by each batch.

        A captured number is the most that a request may be cut into; how many pay is worked out on
        the device at each replay.
        """
        if self.is_invariant:
            return 1
        if not is_captured(common, self.config):
            return 0
        units = DEVICES.latest().device.compute_units or _USUAL_COMPUTE_UNITS
        tiles = -(-_rows(common) * self.layer.num_heads // _TILE_ROWS)
        return max(1, min(_MOST_SPLITS, units // tiles))


def _rows(common: CommonAttentionMetadata) -> int:
    return max(1, common.max_query_len)


def _size_of(common: CommonAttentionMetadata) -> tuple[int, int]:
    return (common.num_reqs, common.num_actual_tokens)


class FlashAttnMLAImpl(VendorMLAImpl[FlashAttnMLADecode]):
    """Runs one layer on the build that was resolved when it was made."""

    decode_type = FlashAttnMLADecode

    def __init__(self, spec: LayerSpec) -> None:
        """Resolve the build, and bind its call; see `VendorMLAImpl`."""
        super().__init__(spec, DEVICES, NAME)
        take_latent_kernels(self, self.loaded.device)
        self.provider = _provider()
        self._call = FlashAttnMLACall(self.provider, spec, self.dims.kv_lora_rank)

    def decode(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        step: FlashAttnMLADecode,
        out: Tensor | None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and LSE of the decodes."""
        is_written = out is not None and self.provider.writes_out and is_aligned(out)
        return self._call(
            query, kv_cache, step.step, out if is_written else None, with_lse=with_lse
        )
