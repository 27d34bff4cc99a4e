from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.merge import check_merge, merge_attn_states, merge_many, to_natural
from attn_shared.reference import AttentionOptions, ReferenceResult, attention

INF = math.inf


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def states(tokens: int = 3, heads: int = 2, size: int = 4) -> list[Tensor]:
    """Return output_a, lse_a, output_b, lse_b."""
    return [
        randn(tokens, heads, size),
        randn(heads, tokens, seed=1),
        randn(tokens, heads, size, seed=2),
        randn(heads, tokens, seed=3),
    ]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


class TestByHand:
    def test_shares_follow_the_exponentials(self) -> None:
        # Denominators 1 and 3: shares 1/4 and 3/4, merged denominator 4.
        output, lse = merge_attn_states(
            torch.full((1, 1, 1), 8.0),
            torch.zeros(1, 1),
            torch.full((1, 1, 1), 4.0),
            torch.full((1, 1), math.log(3)),
        )
        assert output.item() == pytest.approx(5.0, rel=1e-6)
        assert lse.item() == pytest.approx(math.log(4), rel=1e-6)

    def test_lses_far_apart_or_large_do_not_overflow(self) -> None:
        ones = torch.ones(1, 1, 1)
        output, lse = merge_attn_states(
            ones, torch.full((1, 1), 3e4), 3 * ones, torch.full((1, 1), 3e4)
        )
        assert output.item() == 2.0
        assert lse.item() == pytest.approx(3e4 + math.log(2))
        output, lse = merge_attn_states(
            ones, torch.full((1, 1), -3e38), 3 * ones, torch.full((1, 1), 3e38)
        )
        assert output.item() == 3.0
        assert lse.item() == pytest.approx(3e38)


class TestEmptySides:
    @pytest.mark.parametrize("empty", [-INF, INF])
    @pytest.mark.parametrize("payload", [math.nan, INF, 0.0])
    @pytest.mark.parametrize("swap", [False, True])
    def test_the_other_side_is_returned_bit_for_bit(
        self, empty: float, payload: float, swap: bool
    ) -> None:
        kept, kept_lse, nothing, nothing_lse = states()
        kept[0, 0], kept_lse[1, 2] = -0.0, -0.0
        nothing.fill_(payload)
        nothing_lse.fill_(empty)
        sides = [(kept, kept_lse), (nothing, nothing_lse)]
        (out_a, lse_a), (out_b, lse_b) = reversed(sides) if swap else sides
        output, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
        assert torch.equal(bits(output), bits(kept))
        assert torch.equal(bits(lse), bits(kept_lse))

    @pytest.mark.parametrize("pair", [(-INF, -INF), (-INF, INF), (INF, INF)])
    def test_both_empty_gives_zero_and_minus_infinity(self, pair: tuple[float, float]) -> None:
        out_a, lse_a, out_b, lse_b = states()
        lse_a[1, 2], lse_b[1, 2] = pair
        out_a[2, 1], out_b[2, 1] = math.nan, INF
        output, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
        assert torch.equal(bits(output[2, 1]), torch.zeros(4, dtype=torch.int32))
        assert lse[1, 2] == -INF
        lse[1, 2] = 0.0
        assert output.isfinite().all()
        assert lse.isfinite().all()

    @pytest.mark.parametrize("payload", [1.0, math.nan, INF])
    def test_empty_sides_take_no_part_in_gradients(self, payload: float) -> None:
        sides = [side.double() for side in states()]
        sides[1][0, 0] = sides[1][1, 2] = sides[3][1, 2] = -INF  # one side empty, and both
        sides[0][0, 0] = sides[0][2, 1] = sides[2][2, 1] = payload
        for side in sides:
            side.requires_grad_()
        output, lse = merge_attn_states(*sides)
        (output.sum() + lse[lse.isfinite()].sum()).backward()
        found = [side.grad for side in sides]
        assert all(grad is not None and grad.isfinite().all() for grad in found)
        assert [bool(grad[0, 0].any()) for grad in found if grad is not None] == [
            *(False, False, True, True)  # output_b's share of 1, and lse_b as the lse
        ]
        assert not any(found[at][2, 1].any() for at in (0, 2))  # type: ignore[index]
        assert not any(found[at][1, 2].any() for at in (1, 3))  # type: ignore[index]

    @pytest.mark.parametrize("other", [1.0, -INF, math.nan])
    def test_nan_propagates_to_its_row_alone(self, other: float) -> None:
        out_a, lse_a, out_b, lse_b = states()
        lse_a[1, 2], lse_b[1, 2] = math.nan, other
        output, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
        assert lse.isnan().nonzero().tolist() == [[1, 2]]
        assert output.isnan().all(-1).nonzero().tolist() == [[2, 1]]
        assert output.isnan().sum() == 4

    def test_checked_mode_refuses_plus_infinity_only(self) -> None:
        out_a, lse_a, out_b, lse_b = states()
        lse_a[0, 0] = -INF
        merge_attn_states(out_a, lse_a, out_b, lse_b, checked=True)
        lse_b[0, 1] = INF
        with pytest.raises(InvalidInputError, match=r"lses\[1\] is \+inf at 1 of 6 entries"):
            merge_attn_states(out_a, lse_a, out_b, lse_b, checked=True)


def split_reference(
    cuts: list[int], options: AttentionOptions, *, sink_shard: int = 0
) -> tuple[ReferenceResult, list[ReferenceResult]]:
    """Return the call over all keys, and one call per shard of keys; sinks in one shard only."""
    query, key, value = (
        randn(*shape, seed=seed, dtype=torch.float64)
        for seed, shape in enumerate([(3, 4, 8), (12, 2, 8), (12, 2, 5)])
    )
    whole = attention(query, key, value, options, causal=False)
    bare = AttentionOptions(scale=options.scale)
    edges = [0, *cuts, 12]
    shards = [
        attention(
            query,
            key[start:stop],
            value[start:stop],
            options if index == sink_shard else bare,
            causal=False,
        )
        for index, (start, stop) in enumerate(pairwise(edges))
    ]
    return whole, shards


class TestAgainstTheReference:
    @pytest.mark.parametrize("cuts", [[5], [1, 8], [3, 4, 9], [0, 12]])
    @pytest.mark.parametrize("sinks", [False, True])
    def test_shards_of_keys_merge_to_the_whole(self, cuts: list[int], sinks: bool) -> None:
        options = AttentionOptions(
            scale=0.4, sinks=torch.tensor([0.0, 1.0, -2.0, 3.0]) if sinks else None
        )
        whole, shards = split_reference(cuts, options, sink_shard=len(cuts))
        output, lse = merge_many([s.output for s in shards], [s.lse for s in shards])
        torch.testing.assert_close(output, whole.output, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(lse, whole.lse, rtol=1e-13, atol=1e-14)

    def test_pairs_in_any_order_give_the_same(self) -> None:
        whole, (first, second, third) = split_reference([3, 7], AttentionOptions(scale=0.4))
        late = merge_attn_states(third.output, third.lse, first.output, first.lse)
        output, lse = merge_attn_states(second.output, second.lse, *late)
        torch.testing.assert_close(output, whole.output, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(lse, whole.lse, rtol=1e-13, atol=1e-14)

    @pytest.mark.parametrize(
        ("dtype", "ulp"),
        [(torch.float32, 2**-23), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
    )
    def test_low_precision_errs_by_rounding_alone(self, dtype: torch.dtype, ulp: float) -> None:
        whole, shards = split_reference([4, 9], AttentionOptions(scale=0.4))
        output, lse = merge_many(
            [s.output.to(dtype) for s in shards], [s.lse.float() for s in shards]
        )
        assert (output.dtype, lse.dtype) == (dtype, torch.float32)
        largest = max(float(s.output.abs().max()) for s in shards)
        assert (output.double() - whole.output).abs().max() <= 2 * ulp * largest
        torch.testing.assert_close(lse.double(), whole.lse, rtol=1e-6, atol=1e-6)

    def test_a_shared_prefix_seen_in_full_merges_with_the_causal_rest(self) -> None:
        query, key, value = randn(3, 2, 4), randn(9, 1, 4, seed=1), randn(9, 1, 4, seed=2)
        options = AttentionOptions(scale=0.5)
        prefix = attention(query, key[:6], value[:6], options, causal=False)
        suffix = attention(query, key[6:], value[6:], options)
        output, lse = merge_attn_states(prefix.output, prefix.lse, suffix.output, suffix.lse)
        whole = attention(query, key, value, options)
        torch.testing.assert_close(output, whole.output, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(lse, whole.lse, rtol=1e-13, atol=1e-14)

    @settings(derandomize=True, max_examples=100, deadline=None)
    @given(
        lses=st.lists(
            st.one_of(st.floats(-60, 60), st.sampled_from([-INF, INF])), min_size=1, max_size=5
        )
    )
    def test_any_shards_equal_the_sum_of_exponentials(self, lses: list[float]) -> None:
        weights = [0.0 if math.isinf(x) else math.exp(x) for x in lses]
        values = [float(index + 1) for index in range(len(lses))]
        output, lse = merge_many(
            [torch.full((1, 1, 1), x, dtype=torch.float64) for x in values],
            [torch.full((1, 1), x, dtype=torch.float64) for x in lses],
        )
        total = sum(weights)
        expected = sum(w * v for w, v in zip(weights, values, strict=True)) / total if total else 0
        assert output.item() == pytest.approx(expected, rel=1e-12)
        assert lse.item() == pytest.approx(math.log(total) if total else -INF, rel=1e-12, abs=1e-12)


class TestMemory:
    def test_any_strides_of_inputs(self) -> None:
        dense = states()
        out_a, lse_a, out_b, lse_b = dense
        padded = torch.full((2, 5), math.nan)
        padded[:, :3] = lse_a
        strided = [
            out_a.permute(2, 1, 0).contiguous().permute(2, 1, 0),
            padded[:, :3],
            torch.stack([out_b, out_b + 9], dim=1)[:, 0],
            lse_b.T.contiguous().T,
        ]
        assert not any(tensor.is_contiguous() for tensor in strided)
        for result, expected in zip(
            merge_attn_states(*strided), merge_attn_states(*dense), strict=True
        ):
            assert torch.equal(result, expected)

    def test_writes_to_what_is_given_and_nothing_beside_it(self) -> None:
        inputs = states()
        buffer, lse_buffer = torch.full((3, 2, 2, 4), 7.0), torch.full((2, 6), 7.0)
        out, out_lse = buffer[:, 1], lse_buffer[:, ::2]
        output, lse = merge_attn_states(*inputs, output=out, output_lse=out_lse)
        assert (output.data_ptr(), lse.data_ptr()) == (out.data_ptr(), out_lse.data_ptr())
        for result, expected in zip((out, out_lse), merge_attn_states(*inputs), strict=True):
            assert torch.equal(result, expected)
        assert (buffer[:, 0] == 7).all()
        assert (lse_buffer[:, 1::2] == 7).all()

    def test_an_out_beside_an_input_in_one_storage_is_allowed(self) -> None:
        out_a, lse_a, out_b, lse_b = states()
        shared = torch.stack([out_a, out_b, torch.empty_like(out_a)], dim=1)
        output, _ = merge_attn_states(shared[:, 0], lse_a, shared[:, 1], lse_b, output=shared[:, 2])
        assert torch.equal(output, merge_attn_states(out_a, lse_a, out_b, lse_b)[0])

    @pytest.mark.parametrize(
        ("out", "source", "message"),
        [
            ("output", 0, r"output is sharing memory with outputs\[0\]"),
            ("output", 2, r"output is sharing memory with outputs\[1\]"),
            ("output_lse", 1, r"output_lse is sharing memory with lses\[0\]"),
            ("output_lse", 3, r"output_lse is sharing memory with lses\[1\]"),
        ],
    )
    def test_an_out_that_aliases_an_input_is_refused(
        self, out: str, source: int, message: str
    ) -> None:
        inputs = states()
        with pytest.raises(InvalidInputError, match=message):
            merge_attn_states(*inputs, **{out: inputs[source]})

    def test_partial_overlap_is_refused(self) -> None:
        out_a, lse_a, out_b, lse_b = states()
        long = torch.zeros(4, 2, 4)
        long[:3] = out_a
        with pytest.raises(InvalidInputError, match="sharing memory"):
            merge_attn_states(long[:3], lse_a, out_b, lse_b, output=long[1:])

    def test_the_two_outs_may_not_meet(self) -> None:
        inputs = states(size=1)
        buffer = torch.zeros(6)
        with pytest.raises(InvalidInputError, match="output is sharing memory with output_lse"):
            merge_attn_states(*inputs, output=buffer.view(3, 2, 1), output_lse=buffer.view(2, 3))

    def test_an_out_that_holds_an_element_twice_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match=r"output\.stride\(\) is \(4, 0, 1\)"):
            merge_attn_states(*states(), output=torch.zeros(3, 1, 4).expand(3, 2, 4))


class TestRefusals:
    @pytest.mark.parametrize(
        ("index", "replacement", "message"),
        [
            (0, torch.zeros(3, 8), r"outputs\[0\] is torch\.float32 \(3, 8\)"),
            (0, torch.zeros(3, 2, 4, dtype=torch.int32), r"outputs\[0\] is torch\.int32"),
            (1, torch.zeros(3, 2), r"lses\[0\] is torch\.float32 \(3, 2\).*allowed: .*\(2, 3\)"),
            (1, torch.zeros(2, 3).bfloat16(), r"lses\[0\]\.dtype is torch\.bfloat16"),
            (2, torch.zeros(3, 2, 5), r"outputs\[1\] is torch\.float32 \(3, 2, 5\)"),
            (2, torch.zeros(3, 2, 4).half(), r"outputs\[1\] is torch\.float16"),
            (3, torch.zeros(2, 3).double(), r"lses\[1\] is torch\.float64"),
            (3, torch.zeros(2, 3, device="meta"), r"lses\[1\] is .* on meta"),
        ],
    )
    def test_inputs(self, index: int, replacement: Tensor, message: str) -> None:
        inputs = states()
        inputs[index] = replacement
        with pytest.raises(InvalidInputError, match=message):
            merge_attn_states(*inputs)

    def test_outs(self) -> None:
        with pytest.raises(InvalidInputError, match=r"output is torch\.float32 \(3, 2, 5\)"):
            merge_attn_states(*states(), output=torch.zeros(3, 2, 5))
        with pytest.raises(InvalidInputError, match=r"output_lse is torch\.float16"):
            merge_attn_states(*states(), output_lse=torch.zeros(2, 3).half())

    @pytest.mark.parametrize("count", [0, 1])
    def test_as_many_lses_as_outputs(self, count: int) -> None:
        with pytest.raises(InvalidInputError, match=f"of {count} and 0 shards"):
            merge_many([torch.zeros(3, 2, 4)] * count, [])


def test_check_merge_refuses_what_merging_refuses_and_writes_nothing() -> None:
    out_a, lse_a, out_b, lse_b = states()
    target = torch.full_like(out_a, 7.0)
    check_merge((out_a, out_b), (lse_a, lse_b), output=target)
    assert (target == 7).all()
    with pytest.raises(InvalidInputError, match=r"output is sharing memory with outputs\[1\]"):
        check_merge((out_a, out_b), (lse_a, lse_b), output=out_b)


def test_no_rows_merge_to_no_rows() -> None:
    output, lse = merge_attn_states(*states(tokens=0))
    assert (output.shape, lse.shape) == ((0, 2, 4), (2, 0))


def test_nothing_depends_on_the_values_of_tensors() -> None:
    """A tensor without data can be merged, so that a graph can record the call."""
    inputs = [tensor.to("meta") for tensor in states()]
    outs = [torch.empty(3, 2, 4, device="meta"), torch.empty(2, 3, device="meta")]
    output, _ = merge_attn_states(*inputs, output=outs[0], output_lse=outs[1])
    assert output is outs[0]


class TestToNatural:
    def test_log2_is_converted_once(self) -> None:
        lse = torch.tensor([[3.0, -INF, 0.0]])
        assert to_natural(lse, lse_base_on_e=False).tolist() == [
            [pytest.approx(math.log(8)), -INF, 0.0]
        ]

    def test_natural_is_left_alone(self) -> None:
        lse = torch.tensor([[3.0]])
        assert to_natural(lse, lse_base_on_e=True) is lse


def numbers(nested: object) -> Tensor:
    """Return a nested list, in which "-inf" stands for itself, as float32."""
    return torch.tensor(json.loads(json.dumps(nested).replace('"-inf"', "-Infinity")))


@pytest.mark.parametrize("base_on_e", [True, False])
def test_recorded_merges(base_on_e: bool, oracle: Callable[[str], list[dict[str, object]]]) -> None:
    rows = oracle("lse_combine")
    assert rows
    for row in rows:
        factor = math.log(2) if row["base"] in (2, "2") else 1.0
        lses, total = numbers(row["lses"]) * factor, numbers(row["global_lse"]) * factor
        given = lses if base_on_e else lses / math.log(2)
        output, lse = merge_many(
            list(numbers(row["outputs"])),
            [to_natural(each.T, lse_base_on_e=base_on_e) for each in given],
        )
        torch.testing.assert_close(output, numbers(row["combined"]), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(lse.T, total, rtol=2e-6, atol=2e-6)
