"""TRITON_MLA through its classes: answers, captured steps, refusals, and its prefill."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_shared.accuracy import check_against_reference, eager_mla_decode
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_context import ragged_part
from attn_shared.mla_metadata import MLAMetadata
from attn_shared.reference import AttentionOptions, mla_decode, varlen_attention
from attn_shared.request import MLADims
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton._latent_cache import LatentCaches
from attn_triton.backends.triton_mla import TritonMLAImpl, TritonMLAMetadataBuilder
from attn_triton.mla_prefills.triton import TritonPrefill

DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=16)
HEADS, SCALE, BLOCK = 3, 0.3, 16


class Layer:
    q_scale: float | Tensor = 1.0
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    kv_b_proj: Tensor | None = None


def spec_of(**changes: Any) -> LayerSpec:
    cache = MLAAttentionSpec(
        block_size=BLOCK,
        dtype=torch.float32,
        head_size=DIMS.latent_size,
        kv_lora_rank=DIMS.kv_lora_rank,
    )
    fields: dict[str, Any] = {
        "num_heads": HEADS,
        "num_kv_heads": 1,
        "head_size": DIMS.latent_size,
        "head_size_v": DIMS.kv_lora_rank,
        "scale": SCALE,
        "dtype": torch.float32,
        "kv_cache_spec": cache,
        "mla": DIMS,
    }
    return LayerSpec(**{**fields, **changes})


class Call:
    """One layer and batches over a cache of random entries."""

    def __init__(self, device: torch.device, config: BuildConfig | None = None) -> None:
        self.device, self.spec = device, spec_of()
        generator = torch.Generator().manual_seed(3)
        self.cache = torch.randn(40, BLOCK, DIMS.latent_size, generator=generator).to(device)
        self.queries = torch.randn(12, HEADS, DIMS.latent_size, generator=generator).to(device)
        self.order = torch.randperm(40, generator=generator).to(torch.int32).view(4, 10)
        self.impl = TritonMLAImpl(self.spec)
        self.builder = TritonMLAMetadataBuilder(
            self.spec.kv_cache_spec, {"layer": self.spec}, config or BuildConfig(), device
        )

    def common(self, query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
        return CommonAttentionMetadata.from_lengths(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=self.order[: len(seq_lens)],
            device=self.device,
        )

    def check(
        self, common: CommonAttentionMetadata, metadata: MLAMetadata[Any], **given: Tensor
    ) -> None:
        count = common.num_actual_tokens
        lse = given.get("lse", torch.full((HEADS, count), 7.0, device=self.device))
        arguments: tuple[Any, ...] = (Layer(), self.queries[:count], self.cache, metadata)
        output = self.impl.forward_mqa(*arguments, given.get("output"), lse=lse)
        call: dict[str, Any] = {
            "scale": SCALE,
            "kv_lora_rank": DIMS.kv_lora_rank,
            "query_start_loc": common.query_start_loc.cpu(),
            "seq_lens": common.seq_lens.cpu(),
            "block_table": self.order,
        }
        query, cache = self.queries[:count].cpu(), self.cache.cpu()
        report = check_against_reference(
            output.cpu(),
            lse.cpu(),
            mla_decode(query, cache, **call),
            eager_mla_decode(query, cache, **call),
            dtype=torch.float32,
        )
        assert report.ok, str(report)


def test_decodes_of_several_lengths(device: torch.device) -> None:
    call = Call(device)
    common = call.common([1, 4, 2], [150, 20, 70])
    metadata = call.builder.build(0, common)
    assert metadata.decode is not None
    assert metadata.decode.combine is not None
    assert metadata.decode.parts_at_once > 0
    call.check(common, metadata)


def test_parts_of_many_rows_are_merged_by_blocks(device: torch.device) -> None:
    """As in batch-invariant mode, where every step does."""
    call = Call(device, BuildConfig(batch_invariant=True))
    common = call.common([1, 4, 0, 2], [150, 160, 20, 70])
    metadata = call.builder.build(0, common)
    assert metadata.decode is not None
    assert metadata.decode.parts_at_once == 0
    call.check(common, metadata)


def test_nothing_is_merged_where_nothing_can_be_cut(device: torch.device) -> None:
    call = Call(device)
    common = call.common([1, 1], [9, 16])
    metadata = call.builder.build(0, common)
    assert metadata.decode is not None
    assert metadata.decode.combine is None
    call.check(common, metadata)


def test_a_captured_step_replays_with_new_lengths(device: torch.device) -> None:
    """The buffers of the captured one are those that a later build fills."""
    call = Call(device)
    captured = call.builder.build_for_cudagraph_capture(call.common([1, 1], [16, 3]))
    common = call.common([1, 1], [9, 150])
    metadata = call.builder.build(0, common)
    assert captured.decode is not None
    assert metadata.decode is not None
    for name in ("plan", "parts", "stats"):
        places = [getattr(each.decode, name).data_ptr() for each in (captured, metadata)]
        assert places[0] == places[1]
    assert metadata.decode.grid is captured.decode.grid
    call.check(common, metadata)


def test_longer_queries_than_were_captured_get_buffers_of_their_own(device: torch.device) -> None:
    call = Call(device)
    captured = call.builder.build_for_cudagraph_capture(call.common([1, 1], [16, 3]))
    common = call.common([2, 0], [150, 9])
    metadata = call.builder.build(0, common)
    assert captured.decode is not None
    assert metadata.decode is not None
    assert metadata.decode.plan.data_ptr() != captured.decode.plan.data_ptr()
    call.check(common, metadata)


@pytest.mark.interpreter
def test_outputs_whose_columns_lie_apart() -> None:
    call = Call(torch.device("cpu"))
    common = call.common([1, 2], [33, 20])
    metadata = call.builder.build(0, common)
    buffer = torch.full((3, HEADS, 2 * DIMS.kv_lora_rank), 5.0)
    sums = torch.full((3, HEADS), 5.0).T
    call.check(common, metadata, output=buffer[..., ::2], lse=sums)
    assert (buffer[..., 1::2] == 5.0).all()


@pytest.mark.interpreter
def test_a_cache_is_not_kept_alive() -> None:
    caches, cache = LatentCaches(), torch.zeros(2, BLOCK, 48)
    assert caches.read(cache) is caches.read(cache)
    assert caches.read(cache).strides == (BLOCK * 48, 48)
    alive = weakref.ref(cache)
    del cache
    assert alive() is None


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("shape", "latent", "keys", "can"),
    [
        ((4, 64, 576), 512, 64, True),
        ((4, 128, 576), 512, 64, True),
        ((4, 16, 576), 512, 64, False),  # a tile lies in several blocks
        ((4, 64, 578), 512, 64, False),  # rows at odd places
        ((4, 64, 528), 516, 64, False),  # rope parts at odd places
        ((0, 64, 576), 512, 64, False),
    ],
)
def test_what_descriptors_can_say(
    shape: tuple[int, ...], latent: int, keys: int, can: bool
) -> None:
    cache = LatentCaches().read(torch.zeros(shape, dtype=torch.bfloat16))
    assert cache.can_be_described(keys, latent) is can


@pytest.mark.interpreter
def test_metadata_of_another_backend_is_refused() -> None:
    call = Call(torch.device("cpu"))
    metadata: MLAMetadata[Any] = MLAMetadata(
        num_tokens=1, num_decode_tokens=1, num_decodes=1, decode=object()
    )
    arguments: tuple[Any, ...] = (Layer(), call.queries[:1], call.cache, metadata)
    with pytest.raises(InvalidInputError, match="TritonMLADecode"):
        call.impl.forward_mqa(*arguments)


@pytest.mark.interpreter
def test_latents_that_are_too_wide_are_refused() -> None:
    dims = MLADims(kv_lora_rank=1024)
    cache = MLAAttentionSpec(
        block_size=BLOCK, dtype=torch.float32, head_size=1088, kv_lora_rank=1024
    )
    spec = spec_of(mla=dims, head_size=1088, head_size_v=1024, kv_cache_spec=cache)
    with pytest.raises(UnsupportedOptionError, match="kv_lora_rank=1024"):
        TritonMLAImpl(spec)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "whole"])
def test_prefills_heads_of_two_sizes(device: torch.device, is_causal: bool) -> None:
    """40 and 16 columns; a request without rows; without a mask keys of other numbers."""
    query_lens = [5, 0, 150]
    key_lens = query_lens if is_causal else [9, 0, 70]
    starts, key_starts = (
        torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in (query_lens, key_lens)
    )
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(155, HEADS, 40, generator=generator)
    key = torch.randn(int(key_starts[-1]), HEADS, 40, generator=generator)
    value = torch.randn(int(key_starts[-1]), HEADS, 40, generator=generator)[..., 24:]
    prefill = TritonPrefill(spec_of(), BuildConfig(), device)
    part = ragged_part(starts, key_starts, device, is_causal=is_causal)
    plan = prefill.prepare(part)
    object.__setattr__(part, "plan", plan)
    places = [each.to(device) for each in (query, key)]
    output, lse = prefill.run(*places, value.to(device), part, returns_lse=True)
    assert lse is not None
    expected = varlen_attention(
        query,
        key,
        value,
        AttentionOptions(scale=SCALE),
        query_start_loc=starts,
        key_start_loc=key_starts,
        causal=is_causal,
    )
    torch.testing.assert_close(output.cpu().double(), expected.output, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.cpu().double(), expected.lse, rtol=0, atol=3e-6)
    into = torch.empty_like(output)
    again, none = prefill.run(*places, value.to(device), part, output=into)
    assert again is into
    assert none is None
    assert torch.equal(into, output)


def test_the_classes_are_read_without_triton() -> None:
    """Selection reads capabilities in processes that have no Triton, and must not import it."""
    words = (
        "import sys; from attn_triton.backends.triton_mla import TritonMLABackend as B;"
        "from attn_triton.mla_prefills.triton import TritonPrefill as P;"
        "print(B.name, P.name, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["TRITON_MLA", "TRITON", "False"]
