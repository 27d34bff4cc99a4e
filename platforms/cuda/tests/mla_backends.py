"""The backends over latents, each on a stub of its library and a device that it is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from mla_testing import Decodes, decodes, latent_layer

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.suite import stubbed_subject
from attn_conformance.stubs.vendors.cutlass_mla import VLLM_CUTLASS_MLA
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3_LATENT
from attn_conformance.stubs.vendors.flash_mla import SGL_FLASH_MLA, TOKENSPEED_FLASH_MLA
from attn_conformance.stubs.vendors.flashinfer_mla import FLASHINFER_MLA_0_6, FLASHINFER_MLA_0_7
from attn_conformance.stubs.vendors.vllm_flash_attn import VLLM_FLASH_ATTN_3
from attn_conformance.subject import Subject
from attn_cuda.backends import cutlass_mla, flash_attn_mla, flashinfer_mla, flashmla
from attn_cuda.platform import CudaPlatform
from attn_shared.backend import AttentionBackend, AttentionMetadataBuilder, MLAAttentionImpl
from attn_shared.device import preset
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["BACKENDS", "Stubbed", "built", "common_of", "decodes_for", "loaded"]


@dataclass(frozen=True, kw_only=True)
class Stubbed:
    """A backend with a release of its library and a device."""

    backend: type[AttentionBackend]
    stub: VendorStub
    device: str = "h200"
    block_size: int = 64
    query_len: int = 3  # that decodes may have


BACKENDS: dict[str, Stubbed] = {
    "flashmla-tokenspeed": Stubbed(backend=flashmla.FlashMLABackend, stub=TOKENSPEED_FLASH_MLA),
    "flashmla-sgl": Stubbed(backend=flashmla.FlashMLABackend, stub=SGL_FLASH_MLA),
    "flash-attn-vllm": Stubbed(
        backend=flash_attn_mla.FlashAttnMLABackend, stub=VLLM_FLASH_ATTN_3, block_size=16
    ),
    "flash-attn-upstream": Stubbed(
        backend=flash_attn_mla.FlashAttnMLABackend, stub=FLASH_ATTN_3_LATENT, block_size=48
    ),
    "flashinfer-0.6-hopper": Stubbed(
        backend=flashinfer_mla.FlashInferMLABackend, stub=FLASHINFER_MLA_0_6
    ),
    "flashinfer-0.7-hopper": Stubbed(
        backend=flashinfer_mla.FlashInferMLABackend, stub=FLASHINFER_MLA_0_7, block_size=16
    ),
    "flashinfer-0.6-blackwell": Stubbed(
        backend=flashinfer_mla.FlashInferMLABackend,
        stub=FLASHINFER_MLA_0_6,
        device="b200",
        block_size=32,
    ),
    "flashinfer-0.7-blackwell": Stubbed(
        backend=flashinfer_mla.FlashInferMLABackend, stub=FLASHINFER_MLA_0_7, device="b200"
    ),
    "cutlass": Stubbed(
        backend=cutlass_mla.CutlassMLABackend,
        stub=VLLM_CUTLASS_MLA,
        device="b200",
        block_size=128,
        query_len=1,
    ),
}

_DEVICES = (cutlass_mla, flash_attn_mla, flashinfer_mla, flashmla)


@contextmanager
def loaded(stubbed: Stubbed, device: str | None = None) -> Iterator[tuple[Recorder, Subject]]:
    """Let the library be there, found and loaded as on the device."""
    for module in _DEVICES:
        module.DEVICES.forget()
    try:
        with stub_vendor(stubbed.stub) as recorder:
            subject = stubbed_subject(
                stubbed.backend, preset(device or stubbed.device), CudaPlatform().vendor_specs()
            )
            yield recorder, subject
    finally:
        for module in _DEVICES:
            module.DEVICES.forget()


def common_of(given: Decodes, **options: Any) -> CommonAttentionMetadata:
    """Describe decodes as an engine does."""
    assert given.layer.kv_cache_spec is not None
    return CommonAttentionMetadata(
        query_start_loc=given.starts,
        query_start_loc_cpu=given.starts,
        seq_lens=given.seq_lens,
        seq_lens_cpu=given.seq_lens.clone(),
        num_reqs=len(given.seq_lens),
        num_actual_tokens=int(given.starts[-1]),
        max_query_len=int(given.starts.diff().max()),
        max_seq_len=int(given.seq_lens.max()),
        block_table=given.block_table,
        block_size=given.layer.kv_cache_spec.block_size,
        **options,
    )


def built(
    backend: type[AttentionBackend], layer: LayerSpec, **config: Any
) -> tuple[MLAAttentionImpl[Any], AttentionMetadataBuilder[Any]]:
    """Return implementation and builder of a layer."""
    impl: Any = backend.get_impl_cls()(layer)
    builder: Any = backend.get_builder_cls()(
        layer.kv_cache_spec, {"layer": layer}, BuildConfig(**config), torch.device("cpu")
    )
    return impl, builder


def decodes_for(stubbed: Stubbed, lens: list[int], query_len: int = 1, **layer: Any) -> Decodes:
    """Return decodes of a backend's block size."""
    spec = latent_layer(block_size=stubbed.block_size, **layer)
    return decodes(spec, [query_len] * len(lens), lens)
