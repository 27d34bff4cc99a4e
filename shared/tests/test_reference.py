from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.reference import (
    AttentionOptions,
    ReferenceResult,
    attention,
    encoder_attention,
    mla_absorb_query,
    mla_expand_latent,
    mla_project_output,
    varlen_attention,
)

INF = math.inf


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def column(*numbers: float) -> Tensor:
    """One head of size one: (T, 1, 1)."""
    return torch.tensor(numbers, dtype=torch.float64).reshape(-1, 1, 1)


def by_scalars(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    causal: bool,
    ranges: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor]:
    """Attention one number at a time with math.exp, to check the vectorised one."""
    (tq, heads, _), tk = query.shape, len(key)
    output = torch.zeros(tq, heads, value.shape[-1], dtype=torch.float64)
    lse = torch.full((heads, tq), -INF, dtype=torch.float64)
    left, right = (INF if side is None else side for side in options.window)
    for row in range(tq):
        i = tk - tq + row
        for head in range(heads):
            shared = head // (heads // key.shape[1])
            terms = []
            for j in range(tk):
                allowed = i - left <= j <= i + right and (not causal or j <= i)
                if options.chunk_size is not None:
                    allowed = allowed and j // options.chunk_size == i // options.chunk_size
                together = any(a <= i <= b and a <= j <= b for a, b in ranges)
                if not (allowed or together):
                    continue
                logit = options.scale * float(query[row, head] @ key[j, shared])
                if options.softcap is not None:
                    logit = options.softcap * math.tanh(logit / options.softcap)
                if options.alibi_slopes is not None:
                    logit -= float(options.alibi_slopes[head]) * abs(i - j)
                terms.append((logit, j))
            total = sum(math.exp(logit) for logit, _ in terms)
            if options.sinks is not None:
                total += math.exp(float(options.sinks[head]))
            if total:
                lse[head, row] = math.log(total)
            for logit, j in terms:
                output[row, head] += math.exp(logit) / total * value[j, shared]
    return output, lse


def assert_equal_to(result: ReferenceResult, output: Tensor, lse: Tensor) -> None:
    torch.testing.assert_close(result.output, output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.lse, lse, rtol=1e-12, atol=1e-12)


class TestByHand:
    def test_one_key_returns_its_value_and_its_logit(self) -> None:
        result = attention(column(3.0), column(2.0), column(7.0), AttentionOptions(scale=0.5))
        assert result.output.item() == 7.0
        assert result.lse.item() == 3.0
        assert (result.num_tokens, result.value_abs_max) == (1, 7.0)

    def test_two_keys_weigh_by_the_exponential_of_the_scaled_product(self) -> None:
        # logits 0 and ln 3: shares 1/4 and 3/4, denominator 4.
        result = attention(
            column(1.0), column(0.0, math.log(3)), column(4.0, 8.0), AttentionOptions(scale=1.0)
        )
        assert result.output.item() == pytest.approx(7.0, rel=1e-14)
        assert result.lse.item() == pytest.approx(math.log(4), rel=1e-14)

    def test_softcap_bends_before_alibi_shifts(self) -> None:
        # Key 0: 2 tanh(4 / 2) - 0.5; key 1, the query's own: 2 tanh(2 / 2).
        options = AttentionOptions(
            scale=2.0, softcap=2.0, alibi_slopes=torch.tensor([0.5], dtype=torch.float64)
        )
        first, second = 2 * math.tanh(2.0) - 0.5, 2 * math.tanh(1.0)
        result = attention(column(1.0), column(2.0, 1.0), column(1.0, 0.0), options)
        share = 1 / (1 + math.exp(second - first))
        assert result.output.item() == pytest.approx(share, rel=1e-14)
        assert result.lse.item() == pytest.approx(
            math.log(math.exp(first) + math.exp(second)), rel=1e-14
        )

    def test_sink_is_a_logit_without_value_neither_scaled_nor_capped(self) -> None:
        # logits: one key at 0 and a sink at ln 3: share 1/4.
        options = AttentionOptions(
            scale=5.0, softcap=0.1, sinks=torch.tensor([math.log(3)], dtype=torch.float64)
        )
        result = attention(column(1.0), column(0.0), column(8.0), options)
        assert result.output.item() == pytest.approx(2.0, rel=1e-14)
        assert result.lse.item() == pytest.approx(math.log(4), rel=1e-14)

    def test_causal_rows_are_aligned_to_the_last_key(self) -> None:
        # Two queries over three keys of equal logit: the first sees two of them.
        result = attention(
            column(0.0, 0.0),
            column(0.0, 0.0, 0.0),
            column(1.0, 2.0, 6.0),
            AttentionOptions(scale=1),
        )
        assert result.output.flatten().tolist() == pytest.approx([1.5, 3.0])

    @pytest.mark.parametrize(
        ("window", "causal", "seen_by_middle"),
        [
            ((0, 0), True, [2]),
            ((1, 0), True, [1, 2]),
            ((2, 0), True, [0, 1, 2]),
            ((1, 1), True, [1, 2]),
            ((1, 1), False, [1, 2, 3]),
            ((0, None), False, [2, 3, 4]),
            ((None, 1), False, [0, 1, 2, 3]),
            ((None, None), True, [0, 1, 2]),
            ((7, 7), False, [0, 1, 2, 3, 4]),
        ],
    )
    def test_window_counts_keys_beside_the_own(
        self, window: tuple[int | None, int | None], causal: bool, seen_by_middle: list[int]
    ) -> None:
        value = torch.eye(5, dtype=torch.float64).reshape(5, 1, 5)
        options = AttentionOptions(scale=1.0, window=window)
        result = attention(column(*[0.0] * 5), column(*[0.0] * 5), value, options, causal=causal)
        assert result.output[2, 0].nonzero().flatten().tolist() == seen_by_middle

    def test_multimodal_range_opens_both_directions_and_both_ends(self) -> None:
        value = torch.eye(6, dtype=torch.float64).reshape(6, 1, 6)
        zeros = column(*[0.0] * 6)
        options = AttentionOptions(scale=1.0, window=(1, 0))
        result = attention(zeros, zeros, value, options, mm_prefix_ranges=[(1, 4)])
        seen = [row.nonzero().flatten().tolist() for row in result.output[:, 0]]
        image = [1, 2, 3, 4]
        assert seen == [[0], [0, *image], image, image, image, [4, 5]]

    def test_chunks_hide_what_came_before_them(self) -> None:
        value = torch.eye(5, dtype=torch.float64).reshape(5, 1, 5)
        zeros = column(*[0.0] * 5)
        result = attention(zeros, zeros, value, AttentionOptions(scale=1.0, chunk_size=2))
        seen = [row.nonzero().flatten().tolist() for row in result.output[:, 0]]
        assert seen == [[0], [0, 1], [2], [2, 3], [4]]


class TestAgainstOtherComputations:
    @pytest.mark.parametrize("ratio", [1, 3, 5, 8])
    @pytest.mark.parametrize("causal", [True, False])
    def test_sdpa_with_an_explicit_mask(self, ratio: int, causal: bool) -> None:
        tq, tk, kv_heads = 5, 9, 2
        query, key = randn(tq, ratio * kv_heads, 6), randn(tk, kv_heads, 6, seed=1)
        value = randn(tk, kv_heads, 4, seed=2)
        rows, columns = torch.arange(tq).unsqueeze(1), torch.arange(tk).unsqueeze(0)
        mask = (columns <= rows + tk - tq) if causal else torch.ones(tq, tk, dtype=torch.bool)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1).repeat_interleave(ratio, 0),
            value.transpose(0, 1).repeat_interleave(ratio, 0),
            attn_mask=mask,
            scale=0.3,
        )
        result = attention(query, key, value, AttentionOptions(scale=0.3), causal=causal)
        torch.testing.assert_close(result.output, expected.transpose(0, 1), rtol=1e-12, atol=1e-13)

    def test_sinks_equal_one_more_column_of_logits(self) -> None:
        query, key, value = randn(4, 3, 8), randn(7, 1, 8, seed=1), randn(7, 1, 8, seed=2)
        sinks = randn(3, seed=3)
        logits = 0.5 * torch.einsum("qhd,kd->hqk", query, key[:, 0])
        logits = torch.cat([logits, sinks.reshape(3, 1, 1).expand(3, 4, 1)], dim=-1)
        expected = torch.einsum("hqk,kd->qhd", logits.softmax(-1)[..., :-1], value[:, 0])
        options = AttentionOptions(scale=0.5, sinks=sinks)
        result = attention(query, key, value, options, causal=False)
        assert_equal_to(result, expected, logits.logsumexp(-1))

    @settings(derandomize=True, max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 2**20),
        tq=st.integers(1, 4),
        tk=st.integers(0, 7),
        heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
        window=st.tuples(*[st.none() | st.integers(0, 3)] * 2),
        softcap=st.none() | st.sampled_from([0.5, 30.0]),
        alibi=st.booleans(),
        sinks=st.booleans(),
        causal=st.booleans(),
        chunk=st.none() | st.integers(1, 4),
        ranges=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=2),
    )
    def test_any_mixture_of_features_equals_the_scalar_loops(
        self,
        seed: int,
        tq: int,
        tk: int,
        heads: tuple[int, int],
        window: tuple[int | None, int | None],
        softcap: float | None,
        alibi: bool,
        sinks: bool,
        causal: bool,
        chunk: int | None,
        ranges: list[tuple[int, int]],
    ) -> None:
        query, key = randn(tq, heads[0], 3, seed=seed), randn(tk, heads[1], 3, seed=seed + 1)
        value = randn(tk, heads[1], 2, seed=seed + 2)
        inclusive = [(start, start + more) for start, more in ranges]
        options = AttentionOptions(
            scale=0.7,
            window=window,
            softcap=softcap,
            alibi_slopes=randn(heads[0], seed=seed + 3).abs() if alibi else None,
            sinks=randn(heads[0], seed=seed + 4) if sinks else None,
            chunk_size=chunk if causal else None,
        )
        result = attention(query, key, value, options, causal=causal, mm_prefix_ranges=inclusive)
        output, lse = by_scalars(query, key, value, options, causal=causal, ranges=inclusive)
        assert_equal_to(result, output, lse)

    def test_mla_absorbed_equals_expanded(self) -> None:
        rank, rope, nope, heads, dv = 12, 4, 6, 3, 5
        latent, query = randn(8, rank + rope), randn(3, heads, nope + rope, seed=1)
        key_up, value_up = randn(rank, heads, nope, seed=2), randn(rank, heads, dv, seed=3)
        options = AttentionOptions(scale=(nope + rope) ** -0.5)
        key, value = mla_expand_latent(latent, key_up, value_up)
        expanded = attention(query, key, value, options)
        absorbed = attention(
            mla_absorb_query(query, key_up),
            latent.unsqueeze(1),
            latent[:, :rank].unsqueeze(1),
            options,
        )
        assert absorbed.output.shape == (3, heads, rank)
        assert_equal_to(expanded, mla_project_output(absorbed.output, value_up), absorbed.lse)


class TestNumerics:
    @pytest.mark.parametrize("magnitude", [1e3, 1e6, 1e300])
    def test_softcap_is_stable_for_any_finite_logit(self, magnitude: float) -> None:
        # Capped logits are +2 and -2, whatever the magnitude.
        options = AttentionOptions(scale=1.0, softcap=2.0)
        result = attention(
            column(1.0), column(magnitude, -magnitude), column(1.0, 0.0), options, causal=False
        )
        assert result.output.item() == pytest.approx(1 / (1 + math.exp(-4)), rel=1e-14)
        assert result.lse.item() == pytest.approx(2 + math.log1p(math.exp(-4)), rel=1e-14)

    def test_large_logits_neither_overflow_nor_lose_the_lse(self) -> None:
        result = attention(
            column(1.0), column(1e4, 1e4), column(1.0, 3.0), AttentionOptions(scale=1.0)
        )
        assert result.output.item() == 2.0
        assert result.lse.item() == pytest.approx(1e4 + math.log(2), rel=1e-15)

    def test_extreme_sink_leaves_nothing_or_changes_nothing(self) -> None:
        inputs = (column(1.0), column(0.0), column(5.0))
        huge, none = (
            attention(*inputs, AttentionOptions(scale=1.0, sinks=torch.tensor([sink])))
            for sink in (2000.0, -INF)
        )
        assert (huge.output.item(), huge.lse.item()) == (0.0, 2000.0)
        assert (none.output.item(), none.lse.item()) == (5.0, 0.0)

    @pytest.mark.parametrize("payload", [math.nan, INF, -INF])
    def test_what_is_invisible_never_leaks(self, payload: float) -> None:
        query, key, value = randn(3, 2, 4), randn(3, 1, 4, seed=1), randn(3, 1, 4, seed=2)
        options = AttentionOptions(scale=0.5, softcap=3.0)
        clean = attention(query, key, value, options)
        key[2, 0, 1], value[2, 0, 3] = payload, payload
        dirty = attention(query, key, value, options)
        assert torch.equal(dirty.output[:2], clean.output[:2])
        assert torch.equal(dirty.lse[:, :2], clean.lse[:, :2])
        assert not dirty.output[2].isfinite().all()

    def test_a_visible_infinite_value_arrives(self) -> None:
        result = attention(
            column(0.0, 0.0), column(0.0, 0.0), column(1.0, INF), AttentionOptions(scale=1.0)
        )
        assert result.output.flatten().tolist() == [1.0, INF]


class TestEmptyRows:
    def test_rows_before_the_first_key_are_zero(self) -> None:
        query, key = randn(3, 2, 4), randn(1, 2, 4, seed=1)
        result = attention(query, key, key, AttentionOptions(scale=1.0))
        assert torch.equal(result.output[:2], torch.zeros(2, 2, 4, dtype=torch.float64))
        assert (result.lse[:, :2] == -INF).all()
        torch.testing.assert_close(result.output[2], key[0])

    def test_with_a_sink_the_lse_is_its_logit(self) -> None:
        sinks = torch.tensor([0.25, -3.0], dtype=torch.float64)
        nothing = torch.zeros(0, 1, 4, dtype=torch.float64)
        options = AttentionOptions(scale=1.0, sinks=sinks)
        result = attention(randn(2, 2, 4), nothing, nothing, options)
        assert torch.equal(result.output, torch.zeros(2, 2, 4, dtype=torch.float64))
        assert torch.equal(result.lse, sinks.unsqueeze(1).expand(2, 2))

    def test_no_rows_at_all(self) -> None:
        key = randn(3, 1, 4)
        result = attention(randn(0, 2, 4), key, key, AttentionOptions(scale=1.0))
        assert (result.output.shape, result.lse.shape) == ((0, 2, 4), (2, 0))


class TestRagged:
    def test_each_request_is_on_its_own(self) -> None:
        query, key, value = randn(7, 2, 4), randn(9, 1, 4, seed=1), randn(9, 1, 3, seed=2)
        value[4:] *= 100
        result = varlen_attention(
            query,
            key,
            value,
            AttentionOptions(scale=0.5),
            query_start_loc=torch.tensor([0, 2, 2, 5], dtype=torch.int32),
            key_start_loc=torch.tensor([0, 4, 5, 9], dtype=torch.int32),
            causal=True,
        )
        for rows, keys in ((slice(0, 2), slice(0, 4)), (slice(2, 5), slice(5, 9))):
            alone = attention(query[rows], key[keys], value[keys], AttentionOptions(scale=0.5))
            assert torch.equal(result.output[rows], alone.output)
            assert torch.equal(result.lse[:, rows], alone.lse)
        assert result.num_tokens == 5
        assert result.output[5:].isnan().all()
        assert result.lse[:, 5:].isnan().all()
        seen = torch.cat([value[:4], value[5:]])
        assert result.value_abs_max == float(seen.abs().max())

    def test_encoder_sees_everything_of_its_own_request(self) -> None:
        zeros = column(*[0.0] * 5)
        value = column(1.0, 2.0, 4.0, 10.0, 30.0)
        result = encoder_attention(
            zeros,
            zeros,
            value,
            AttentionOptions(scale=1.0),
            query_start_loc=torch.tensor([0, 3, 5]),
        )
        assert result.output.flatten().tolist() == pytest.approx([7 / 3] * 3 + [20.0] * 2)

    def test_encoder_window_is_two_sided(self) -> None:
        zeros = column(*[0.0] * 5)
        value = torch.eye(5, dtype=torch.float64).reshape(5, 1, 5)
        options = AttentionOptions(scale=1.0, window=(1, 1))
        result = encoder_attention(
            zeros, zeros, value, options, query_start_loc=torch.tensor([0, 5])
        )
        seen = [row.nonzero().flatten().tolist() for row in result.output[:, 0]]
        assert seen == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4]]

    @pytest.mark.parametrize("starts", [[1, 3], [0, 3, 2], [0, 9], []])
    def test_offsets_that_do_not_tile_are_refused(self, starts: list[int]) -> None:
        query = randn(4, 1, 2)
        with pytest.raises(InvalidInputError, match="query_start_loc"):
            encoder_attention(
                query,
                query,
                query,
                AttentionOptions(scale=1.0),
                query_start_loc=torch.tensor(starts, dtype=torch.int32),
            )

    def test_as_many_requests_on_both_sides(self) -> None:
        query = randn(4, 1, 2)
        with pytest.raises(InvalidInputError, match="key_start_loc is of length 3"):
            encoder_attention(
                query,
                query,
                query,
                AttentionOptions(scale=1.0),
                query_start_loc=torch.tensor([0, 4]),
                key_start_loc=torch.tensor([0, 2, 4]),
            )


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"scale": math.nan}, "scale is nan"),
            ({"softcap": 0.0}, "softcap is 0.0"),
            ({"softcap": -1.0}, "softcap is -1.0"),
            ({"softcap": INF}, "softcap is inf"),
            ({"window": (-1, 0)}, r"window is \(-1, 0\)"),
            ({"window": (None, -1)}, r"window is \(None, -1\)"),
            ({"chunk_size": 0}, "chunk_size is 0"),
            ({"sinks": torch.zeros(2, 2)}, r"sinks is torch.float32 \(2, 2\)"),
            ({"alibi_slopes": torch.zeros(2, dtype=torch.int32)}, "alibi_slopes is torch.int32"),
        ],
    )
    def test_options(self, fields: dict[str, object], message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            AttentionOptions(**{"scale": 1.0, **fields})

    @pytest.mark.parametrize(
        ("heads", "key", "value", "message"),
        [
            (4, (5, 3, 8), (5, 3, 8), r"num_heads is 4; allowed: a multiple of num_kv_heads \(3\)"),
            (4, (5, 2, 6), (5, 2, 8), "key head size is 6; allowed: 8"),
            (4, (5, 2, 8), (4, 2, 8), r"value.shape is \(4, 2, 8\)"),
            (3, (5, 1, 8), (5, 1, 8), r"sinks.shape is \(4,\); allowed: \(3,\)"),
            (4, (5, 8), (5, 8), r"key is torch.float64 \(5, 8\)"),
        ],
    )
    def test_shapes(
        self, heads: int, key: tuple[int, ...], value: tuple[int, ...], message: str
    ) -> None:
        options = AttentionOptions(scale=1.0, sinks=torch.zeros(4))
        with pytest.raises(InvalidInputError, match=message):
            attention(randn(2, heads, 8), randn(*key), randn(*value), options)

    def test_integer_queries(self) -> None:
        query = torch.zeros(2, 1, 4, dtype=torch.int64)
        with pytest.raises(InvalidInputError, match=r"query is torch\.int64"):
            attention(query, randn(2, 1, 4), randn(2, 1, 4), AttentionOptions(scale=1.0))

    def test_chunks_need_causality(self) -> None:
        query = randn(2, 1, 4)
        options = AttentionOptions(scale=1.0, chunk_size=2)
        with pytest.raises(InvalidInputError, match="causal is False; allowed: True with chunk"):
            attention(query, query, query, options, causal=False)

    @pytest.mark.parametrize("bad", [(-1, 2), (3, 2)])
    def test_ranges(self, bad: tuple[int, int]) -> None:
        query = randn(2, 1, 4)
        with pytest.raises(InvalidInputError, match="mm_prefix_ranges"):
            attention(query, query, query, AttentionOptions(scale=1.0), mm_prefix_ranges=[bad])

    def test_positions_of_another_length(self) -> None:
        query = randn(2, 1, 4)
        with pytest.raises(InvalidInputError, match="query_positions"):
            attention(
                query, query, query, AttentionOptions(scale=1.0), query_positions=torch.arange(3)
            )


def test_positions_can_be_given() -> None:
    query, key = randn(2, 1, 4), randn(6, 1, 4, seed=1)
    options = AttentionOptions(scale=1.0)
    result = attention(query, key, key, options, query_positions=torch.tensor([4, 0]))
    torch.testing.assert_close(
        result.output[:1], attention(query[:1], key[:5], key[:5], options).output
    )
    torch.testing.assert_close(result.output[1], key[0])
