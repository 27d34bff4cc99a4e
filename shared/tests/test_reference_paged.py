from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.quantization import quantize_fp8, quantize_int8_per_token_head
from attn_shared.reference import (
    AttentionOptions,
    ReferenceResult,
    attention,
    mla_decode,
    paged_attention,
)

BLOCK = 4
GARBAGE = 2**31 - 1
OPTIONS = AttentionOptions(scale=0.5)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Batch:
    """Requests with their keys both in a row and in a shuffled, poisoned cache."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor
    where: dict[str, Tensor]

    def run(self, options: AttentionOptions = OPTIONS, **extra: Any) -> ReferenceResult:
        return paged_attention(
            self.query, self.key_cache, self.value_cache, options, **{**self.where, **extra}
        )

    def rows(self, request: int) -> slice:
        starts = self.where["query_start_loc"].tolist()
        return slice(starts[request], starts[request + 1])

    def assert_like_dense(
        self, result: ReferenceResult, options: AttentionOptions = OPTIONS, **extra: Any
    ) -> None:
        """Compare with the dense call of each request alone."""
        for index, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            rows = self.rows(index)
            alone = attention(self.query[rows], key, value, options, **extra)
            assert_close(result.output[rows], alone.output)
            assert_close(result.lse[:, rows], alone.lse)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def make_batch(
    lengths: Sequence[tuple[int, int]] = ((1, 9), (3, 3), (0, 0), (2, 8)),
    *,
    heads: int = 4,
    kv_heads: int = 2,
    padding: int = 2,
    empty: float = math.nan,
) -> Batch:
    """Lay out (query_len, seq_len) pairs; all that must not be read holds `empty` or garbage."""
    num_blocks = 2 + sum(-(-length // BLOCK) for _, length in lengths)
    free = iter(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist())
    key_cache = torch.full((num_blocks, BLOCK, kv_heads, 6), empty, dtype=torch.float64)
    value_cache = torch.full((num_blocks, BLOCK, kv_heads, 5), empty, dtype=torch.float64)
    table = torch.full((len(lengths) + 1, 5), GARBAGE, dtype=torch.int32)
    table[:, -1] = -7
    keys, values = [], []
    for index, (_, length) in enumerate(lengths):
        keys.append(randn(length, kv_heads, 6, seed=10 + index))
        values.append(randn(length, kv_heads, 5, seed=50 + index))
        for start in range(0, length, BLOCK):
            block = next(free)
            table[index, start // BLOCK] = block
            piece = slice(start, min(start + BLOCK, length))
            key_cache[block, : piece.stop - start] = keys[-1][piece]
            value_cache[block, : piece.stop - start] = values[-1][piece]
    starts = torch.tensor([0] + [count for count, _ in lengths]).cumsum(0).to(torch.int32)
    query = randn(int(starts[-1]) + padding, heads, 6, seed=3)
    query[int(starts[-1]) :] = math.nan
    where = {
        "query_start_loc": starts,
        "seq_lens": torch.tensor([length for _, length in lengths], dtype=torch.int32),
        "block_table": table,
    }
    return Batch(query, keys, values, key_cache, value_cache, where)


class TestReading:
    def test_equals_dense_and_reads_nothing_else(self) -> None:
        batch = make_batch()
        result = batch.run()
        batch.assert_like_dense(result)
        assert result.num_tokens == 6
        assert result.output[6:].isnan().all()
        assert result.lse[:, 6:].isnan().all()
        assert result.value_abs_max == max(float(v.abs().max()) for v in batch.values if len(v))

    @settings(derandomize=True, max_examples=40, deadline=None)
    @given(
        lengths=st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 12)).map(lambda n: (n[0], sum(n))),
            max_size=4,
        ),
        window=st.none() | st.integers(0, 5),
    )
    def test_any_batch_equals_its_requests_alone(
        self, lengths: list[tuple[int, int]], window: int | None
    ) -> None:
        batch = make_batch(lengths)
        options = AttentionOptions(scale=0.5, window=(window, None))
        batch.assert_like_dense(batch.run(options), options)

    def test_every_option_at_once(self) -> None:
        batch = make_batch()
        options = AttentionOptions(
            scale=0.3,
            window=(4, 0),
            softcap=2.0,
            alibi_slopes=torch.tensor([0.1, 0.2, 0.4, 0.8]),
            sinks=torch.tensor([0.0, 1.0, -1.0, 2.0]),
        )
        batch.assert_like_dense(batch.run(options), options)

    def test_chunks_follow_absolute_positions(self) -> None:
        batch = make_batch()
        options = AttentionOptions(scale=0.3, chunk_size=3)
        batch.assert_like_dense(batch.run(options), options)

    def test_block_zero_is_an_ordinary_block(self) -> None:
        batch = make_batch([(1, 4)])
        table = torch.zeros(1, 1, dtype=torch.int32)
        key, value = batch.keys[0], batch.values[0]
        result = paged_attention(
            batch.query,
            key.unsqueeze(0),
            value.unsqueeze(0),
            OPTIONS,
            **{**batch.where, "block_table": table},
        )
        batch.assert_like_dense(result)

    def test_padded_block_stride(self) -> None:
        batch = make_batch()
        caches = []
        for cache in (batch.key_cache, batch.value_cache):
            dense = cache[0].numel()
            storage = torch.full((len(cache), dense + 13), math.nan, dtype=torch.float64)
            view = storage[:, :dense].view(cache.shape)
            caches.append(view.copy_(cache))
            assert caches[-1].stride(0) == dense + 13
        batch.assert_like_dense(paged_attention(batch.query, *caches, OPTIONS, **batch.where))

    def test_head_major_blocks_behind_a_permuted_view(self) -> None:
        batch = make_batch()
        caches = [
            cache.transpose(1, 2).contiguous().transpose(1, 2)
            for cache in (batch.key_cache, batch.value_cache)
        ]
        assert not caches[0].is_contiguous()
        batch.assert_like_dense(paged_attention(batch.query, *caches, OPTIONS, **batch.where))

    def test_padded_rows_are_empty(self) -> None:
        # A padded request with a row of its own: seq_len 0, query_len 1.
        batch = make_batch([(1, 5), (1, 0)], padding=0)
        sinks = torch.tensor([0.0, 1.0, -1.0, 2.0])
        with_sinks = AttentionOptions(scale=0.5, sinks=sinks)
        assert (batch.run().output[1] == 0).all()
        assert (batch.run().lse[:, 1] == -math.inf).all()
        assert torch.equal(batch.run(with_sinks).lse[:, 1], sinks.double())

    def test_empty_batch(self) -> None:
        batch = make_batch([], padding=3)
        result = batch.run()
        assert (result.num_tokens, result.value_abs_max) == (0, 0.0)
        assert result.output.shape == (3, 4, 5)

    @pytest.mark.parametrize("ratio", [1, 3, 5, 8])
    def test_any_ratio_of_heads(self, ratio: int) -> None:
        batch = make_batch(heads=2 * ratio)
        batch.assert_like_dense(batch.run())


class TestVisibility:
    def test_causality_per_request(self) -> None:
        batch = make_batch([(2, 6), (3, 5)])
        causal, full = batch.run(causal=True), batch.run(causal=False)
        mixed = batch.run(causal=torch.tensor([False, True]))
        assert torch.equal(mixed.output[:2], full.output[:2])
        assert torch.equal(mixed.output[2:5], causal.output[2:5])
        assert not torch.equal(full.output[0], causal.output[0])

    def test_cross_attention_has_more_rows_than_keys(self) -> None:
        batch = make_batch([(5, 2), (1, 6)])
        result = batch.run(causal=False)
        for index, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True)):
            weights = torch.einsum(
                "qhd,khd->hqk", batch.query[batch.rows(index)] * 0.5, repeat(key)
            )
            expected = torch.einsum("hqk,khd->qhd", weights.softmax(-1), repeat(value))
            assert_close(result.output[batch.rows(index)], expected)

    def test_multimodal_ranges_belong_to_their_request(self) -> None:
        batch = make_batch([(3, 6), (3, 6)])
        result = batch.run(mm_prefix_ranges={1: [(3, 5)]})
        assert torch.equal(result.output[:3], batch.run().output[:3])
        # All of request 1's rows sit inside the range, so that each sees all six keys.
        assert_close(result.output[3:6], batch.run(causal=False).output[3:6])

    def test_a_range_may_reach_past_what_is_cached_so_far(self) -> None:
        batch = make_batch([(2, 6)])
        result = batch.run(mm_prefix_ranges={0: [(4, 40)]})
        assert_close(result.output[:2], batch.run(causal=False).output[:2])


def repeat(heads: Tensor) -> Tensor:
    return heads.repeat_interleave(2, dim=1)


class TestQuantisedCaches:
    @pytest.mark.parametrize(
        "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2]
    )
    @pytest.mark.parametrize("per_head", [False, True])
    def test_fp8_is_read_as_stored_times_scale(self, dtype: torch.dtype, per_head: bool) -> None:
        batch = make_batch(empty=0.0)
        k_scale: Any = torch.tensor([0.25, 0.1]) if per_head else 0.3
        v_scale: Any = torch.tensor([2.0, 0.7]) if per_head else 1.7
        key_cache = quantize_fp8(batch.key_cache, k_scale, dtype)
        value_cache = quantize_fp8(batch.value_cache, v_scale, dtype)
        result = paged_attention(
            batch.query,
            key_cache,
            value_cache,
            OPTIONS,
            **batch.where,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        column = (-1, 1) if per_head else ()
        decoded = [
            stored.double() * torch.as_tensor(scale, dtype=torch.float32).double().reshape(column)
            for stored, scale in ((key_cache, k_scale), (value_cache, v_scale))
        ]
        expected = paged_attention(batch.query, *decoded, OPTIONS, **batch.where)
        assert_close(result.output[:6], expected.output[:6])
        assert_close(result.lse[:, :6], expected.lse[:, :6])
        assert (result.output[:6] - batch.run().output[:6]).abs().max() > 1e-3

    def test_fnuz_and_ocp_bits_mean_different_numbers(self) -> None:
        # 0x40 is 2 in e4m3fn and 1 in e4m3fnuz, whose exponent bias is one more.
        bits = torch.full((1, BLOCK, 1, 1), 0x40, dtype=torch.uint8)
        where = {
            "query_start_loc": torch.tensor([0, 1]),
            "seq_lens": torch.tensor([2]),
            "block_table": torch.tensor([[0]]),
        }
        query = torch.zeros(1, 1, 1)
        outputs = [
            paged_attention(query, bits.view(dtype), bits.view(dtype), OPTIONS, **where).output
            for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
        ]
        assert [output.item() for output in outputs] == [2.0, 1.0]
        with pytest.raises(UnsupportedOptionError, match=r"torch\.uint8 does not say"):
            paged_attention(query, bits, bits, OPTIONS, **where)

    def test_int8_has_a_scale_per_token_and_head(self) -> None:
        batch = make_batch(empty=0.0)
        key_cache, key_scales = quantize_int8_per_token_head(batch.key_cache)
        value_cache, value_scales = quantize_int8_per_token_head(batch.value_cache)
        result = paged_attention(
            batch.query,
            key_cache,
            value_cache,
            OPTIONS,
            **batch.where,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        key = key_cache.double() * key_scales.double().unsqueeze(-1)
        value = value_cache.double() * value_scales.double().unsqueeze(-1)
        expected = paged_attention(batch.query, key, value, OPTIONS, **batch.where)
        assert_close(result.output[:6], expected.output[:6])
        assert 0 < (result.output[:6] - batch.run().output[:6]).abs().max() < 0.05

    def test_fresh_tokens_replace_their_stored_form(self) -> None:
        batch = make_batch([(2, 6), (1, 0), (3, 3)], empty=0.0)
        stored = [
            quantize_fp8(cache, 0.5, torch.float8_e5m2)
            for cache in (batch.key_cache, batch.value_cache)
        ]
        fresh_key, fresh_value = randn(8, 2, 6, seed=8), randn(8, 2, 5, seed=9)
        result = paged_attention(
            batch.query,
            *stored,
            OPTIONS,
            **batch.where,
            k_scale=0.5,
            v_scale=0.5,
            fresh_key=fresh_key,
            fresh_value=fresh_value,
        )
        old = [
            quantize_fp8(each[0][:4], 0.5, torch.float8_e5m2).double() * 0.5
            for each in (batch.keys, batch.values)
        ]
        first = attention(
            batch.query[:2],
            torch.cat([old[0], fresh_key[:2]]),
            torch.cat([old[1], fresh_value[:2]]),
            OPTIONS,
        )
        third = attention(batch.query[3:6], fresh_key[3:6], fresh_value[3:6], OPTIONS)
        assert_close(result.output[:2], first.output)
        assert (result.output[2] == 0).all()
        assert_close(result.output[3:6], third.output)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_plain_caches_are_exact(self, dtype: torch.dtype) -> None:
        batch = make_batch()
        low = [cache.to(dtype) for cache in (batch.key_cache, batch.value_cache)]
        result = paged_attention(batch.query.to(dtype), *low, OPTIONS, **batch.where)
        wide = [cache.double() for cache in low]
        expected = paged_attention(batch.query.to(dtype).double(), *wide, OPTIONS, **batch.where)
        assert result.output.dtype == torch.float64
        assert torch.equal(result.output[:6], expected.output[:6])


class TestMLA:
    def test_decode_takes_values_from_the_latent_part(self) -> None:
        rank, rope, heads = 6, 2, 3
        latent, query = randn(3, BLOCK, rank + rope), randn(3, heads, rank + rope, seed=1)
        result = mla_decode(
            query,
            latent,
            scale=0.2,
            kv_lora_rank=rank,
            query_start_loc=torch.tensor([0, 1, 3]),
            seq_lens=torch.tensor([3, 6]),
            block_table=torch.tensor([[2, -1], [1, 0]], dtype=torch.int32),
        )
        second = torch.cat([latent[1], latent[0]])[:6].unsqueeze(1)
        options = AttentionOptions(scale=0.2)
        first = attention(query[:1], latent[2, :3, None], latent[2, :3, None, :rank], options)
        assert result.output.shape == (3, heads, rank)
        assert_close(result.output[:1], first.output)
        assert_close(
            result.output[1:], attention(query[1:], second, second[..., :rank], options).output
        )

    def test_fp8_entry_has_one_scale(self) -> None:
        latent, query = randn(1, BLOCK, 8), randn(1, 2, 8, seed=1)
        stored = quantize_fp8(latent, 0.125, torch.float8_e4m3fn)
        where = {
            "query_start_loc": torch.tensor([0, 1]),
            "seq_lens": torch.tensor([4]),
            "block_table": torch.tensor([[0]]),
            "scale": 0.3,
            "kv_lora_rank": 6,
        }
        result = mla_decode(query, stored, cache_scale=0.125, **where)
        expected = mla_decode(query, stored.double() * 0.125, **where)
        assert_close(result.output, expected.output)

    @pytest.mark.parametrize("rank", [0, 9])
    def test_rank_outside_the_entry(self, rank: int) -> None:
        with pytest.raises(InvalidInputError, match="kv_lora_rank"):
            mla_decode(
                randn(1, 2, 8),
                randn(1, BLOCK, 8),
                scale=1.0,
                kv_lora_rank=rank,
                query_start_loc=torch.tensor([0, 1]),
                seq_lens=torch.tensor([1]),
                block_table=torch.tensor([[0]]),
            )


class TestRefusals:
    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({"k_scale": 0.5}, "k_scale is 0.5; allowed: 1.0 with a cache of torch.float64"),
            ({"v_scale": torch.tensor([1.0, 2.0])}, "v_scale"),
            ({"v_scale": torch.ones(3)}, r"v_scale.shape is \(3,\)"),
            ({"key_scales": torch.ones(9, BLOCK, 2)}, "k scales per token and head"),
            (
                {"seq_lens": torch.tensor([1, 2])},
                "query_start_loc is of length 5; allowed: length 3",
            ),
            ({"seq_lens": torch.tensor([9, 3, -1, 8])}, r"seq_lens\[2\] is -1"),
            ({"seq_lens": torch.tensor([21, 3, 0, 8])}, r"seq_lens\[0\] is 21; allowed: <= 20"),
            ({"seq_lens": torch.tensor([9, 3, 1, 8])}, r"block_table\[2, :1\] is \[2147483647\]"),
            ({"query_start_loc": torch.tensor([0, 1, 4, 4, 9])}, "query_start_loc"),
            ({"query_start_loc": torch.tensor([0, 5, 4, 4, 6])}, "query_start_loc"),
            ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, "block_table.shape"),
            ({"causal": torch.tensor([True])}, "causal is torch.bool"),
            ({"causal": torch.ones(4)}, "causal is torch.float32"),
            ({"mm_prefix_ranges": {4: [(0, 1)]}}, r"keyed by \[4\]"),
            ({"fresh_key": torch.zeros(8, 2, 6)}, "both or neither"),
            (
                {"fresh_key": torch.zeros(8, 2, 6), "fresh_value": torch.zeros(7, 2, 5)},
                "fresh_value.shape",
            ),
        ],
    )
    def test_arguments(self, extra: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            make_batch().run(**extra)

    def test_fresh_tokens_of_a_request_longer_than_its_sequence(self) -> None:
        batch = make_batch([(3, 2)])
        with pytest.raises(InvalidInputError, match="seq_lens is 2; allowed: >= 3"):
            batch.run(fresh_key=randn(5, 2, 6), fresh_value=randn(5, 2, 5))

    def test_int8_without_scales(self) -> None:
        batch = make_batch()
        cache = torch.zeros(9, BLOCK, 2, 6, dtype=torch.int8)
        with pytest.raises(InvalidInputError, match="k scales per token and head is None"):
            paged_attention(batch.query, cache, cache, OPTIONS, **batch.where)

    def test_cache_of_three_dimensions(self) -> None:
        batch = make_batch()
        with pytest.raises(InvalidInputError, match=r"key_cache\.shape"):
            paged_attention(
                batch.query, batch.key_cache[0], batch.value_cache[0], OPTIONS, **batch.where
            )
