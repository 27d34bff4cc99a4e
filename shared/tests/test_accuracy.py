from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_shared._eager import _ieee_float32
from attn_shared.accuracy import (
    check_against_reference,
    eager_attention,
    eager_mla_decode,
    eager_varlen_attention,
    lse_budget,
    output_budget,
)
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.quantization import quantize_fp8
from attn_shared.reference import (
    AttentionOptions,
    ReferenceResult,
    mla_decode,
    paged_attention,
    varlen_attention,
)

INF = math.inf
LOW = [torch.float16, torch.bfloat16, torch.float32]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_request(tokens: int, length: int) -> dict[str, Any]:
    """Describe one request over one block."""
    return {
        "query_start_loc": torch.tensor([0, tokens], dtype=torch.int32),
        "seq_lens": torch.tensor([length], dtype=torch.int32),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
    }


def column(*numbers: float, dtype: torch.dtype) -> Tensor:
    """One block of one head of size one: (1, tokens, 1, 1)."""
    return torch.tensor(numbers, dtype=dtype).reshape(1, -1, 1, 1)


def result(output: Tensor, lse: Tensor) -> ReferenceResult:
    return ReferenceResult(output=output, lse=lse, num_tokens=len(output), value_abs_max=1.0)


class TestEager:
    def test_p_is_rounded_before_it_meets_v(self) -> None:
        # P = (1/6, 5/6) and V = (5, -1) cancel exactly. In bfloat16 P is (171, 852) / 1024, of
        # which 5 * 171 - 852 = 3 parts in 1024 are left.
        dtype = torch.bfloat16
        query = torch.ones(1, 1, 1, dtype=torch.float32)
        key, value = column(0.0, math.log(5), dtype=torch.float32), column(5.0, -1.0, dtype=dtype)
        options = AttentionOptions(scale=1.0)
        where = one_request(1, 2)
        # The key is kept in float32 so that its logit does not hide what is looked at.
        exact = paged_attention(query, key, value, options, **where)
        assert exact.output.item() == pytest.approx(0.0, abs=1e-6)
        weights = torch.tensor([1 / 6, 5 / 6]).to(dtype)
        assert [weights[0].item() * 1024, weights[1].item() * 1024] == [171.0, 852.0]
        low = eager_attention(
            torch.full((1, 1, 1), math.log(5)).to(dtype),
            column(0.0, 1.0, dtype=dtype),
            value,
            AttentionOptions(scale=math.log(5) / torch.tensor(math.log(5)).to(dtype).item()),
            **where,
        )
        assert low.output.dtype == dtype
        assert low.output.item() == 3 / 1024
        assert low.lse.dtype == torch.float32
        assert low.lse.item() == pytest.approx(math.log(6), rel=1e-6)

    def test_operands_are_rounded_to_the_compute_dtype(self) -> None:
        # 1 + 2^-8 is half an ulp above 1 in bfloat16 and rounds to the even 1, 257 to 256.
        near_one = torch.full((1, 1, 1), 1 + 2.0**-8)
        low = eager_attention(
            near_one,
            column(257.0, dtype=torch.float32),
            near_one.unsqueeze(0),
            AttentionOptions(scale=1.0),
            **one_request(1, 1),
            compute_dtype=torch.bfloat16,
        )
        assert (low.lse.item(), low.output.item()) == (256.0, 1.0)
        assert low.output.dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", LOW)
    def test_error_is_that_of_two_roundings(self, dtype: torch.dtype) -> None:
        # P errs by half an ulp relative, the output by another half: one ulp of max |V| in all.
        query, key, value = (randn(6, 4, 16, seed=seed, dtype=dtype) for seed in range(3))
        where = {"query_start_loc": torch.tensor([0, 2, 6]), "causal": True}
        options = AttentionOptions(scale=0.25, softcap=5.0)
        exact = varlen_attention(query, key, value, options, **where)
        low = eager_varlen_attention(query, key, value, options, **where)
        assert low.output.dtype == dtype
        error = (low.output.double() - exact.output).abs().max()
        # float32's own sums over 16 products come on top of it there.
        ulps = 4 if dtype == torch.float32 else 1.01
        assert 0 < error <= ulps * torch.finfo(dtype).eps * exact.value_abs_max

    def test_fp8_caches_are_quantised_alike(self) -> None:
        where = one_request(2, 4)
        query = randn(2, 2, 8, dtype=torch.bfloat16)
        stored = [
            quantize_fp8(randn(1, 4, 1, 8, seed=seed), 0.5, torch.float8_e4m3fn) for seed in (1, 2)
        ]
        options = AttentionOptions(scale=0.3)
        exact = paged_attention(query, *stored, options, **where, k_scale=0.5, v_scale=0.5)
        low = eager_attention(query, *stored, options, **where, k_scale=0.5, v_scale=0.5)
        error = (low.output.double() - exact.output).abs().max()
        assert 0 < error <= 1.01 * 2**-7 * exact.value_abs_max
        assert low.value_abs_max == exact.value_abs_max

    def test_fp8_products_round_query_and_unnormalised_p(self) -> None:
        # The query 1.1 / 0.5 = 2.2 is stored as 2.25, so that the logits are 0 and 1.125 * k.
        # Weights are (0.3, 1), of which 0.3 becomes 0.3125; the sum 1.3 is not rounded.
        fp8 = torch.float8_e4m3fn
        options = AttentionOptions(scale=-math.log(0.3) / 1.125)
        low = eager_attention(
            torch.full((1, 1, 1), 1.1),
            column(0.0, 1.0, dtype=torch.float32).to(fp8),
            column(1.0, 0.0, dtype=torch.float32).to(fp8),
            options,
            **one_request(1, 2),
            compute_dtype=fp8,
            q_scale=0.5,
        )
        assert low.output.dtype == torch.float32
        assert low.output.item() == pytest.approx(0.3125 / 1.3, rel=1e-6)
        assert low.lse.item() == pytest.approx(math.log(1.3) - math.log(0.3), rel=1e-6)

    def test_mla_is_the_same_call_in_low_precision(self) -> None:
        latent, query = randn(1, 4, 12, dtype=torch.float16), randn(1, 3, 12, dtype=torch.float16)
        where = {**one_request(1, 4), "scale": 0.3, "kv_lora_rank": 8}
        exact, low = mla_decode(query, latent, **where), eager_mla_decode(query, latent, **where)
        assert low.output.shape == (1, 3, 8)
        error = (low.output.double() - exact.output).abs().max()
        assert 0 < error <= 1.01 * 2**-10 * exact.value_abs_max

    def test_float64_is_exact(self) -> None:
        query, key = randn(3, 2, 4).double(), randn(3, 1, 4, seed=1).double()
        where = {"query_start_loc": torch.tensor([0, 3]), "causal": True}
        options = AttentionOptions(scale=0.5)
        exact = varlen_attention(query, key, key, options, **where)
        low = eager_varlen_attention(query, key, key, options, **where)
        assert torch.equal(low.output, exact.output)

    def test_refusals(self) -> None:
        query = torch.ones(1, 1, 1)
        cache = column(1.0, 2.0, dtype=torch.float32)
        options, where = AttentionOptions(scale=1.0), one_request(1, 2)
        with pytest.raises(InvalidInputError, match=r"q_scale is 2\.0; allowed: 1\.0 unless"):
            eager_attention(query, cache, cache, options, **where, q_scale=2.0)
        with pytest.raises(UnsupportedOptionError, match="fp8 products read what is stored"):
            eager_attention(
                query,
                cache,
                cache,
                options,
                **where,
                fresh_key=query,
                fresh_value=query,
                compute_dtype=torch.float8_e5m2,
            )


@pytest.fixture
def medium_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def float32_settings() -> list[str]:
    return [
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
    ]


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="this torch has one float32 setting for all libraries (before 2.9)",
)
@pytest.mark.usefixtures("medium_float32")
def test_float32_products_are_ieee_whatever_the_process_prefers() -> None:
    with _ieee_float32():
        assert float32_settings() == ["ieee", "ieee"]
    assert float32_settings() == ["tf32", "bf16"]
    with pytest.raises(RuntimeError, match="inside"), _ieee_float32():
        raise RuntimeError("inside")
    assert float32_settings() == ["tf32", "bf16"]
    assert torch.get_float32_matmul_precision() == "medium"


class TestBudgets:
    def test_output(self) -> None:
        reference = torch.tensor([1.0, 2.0], dtype=torch.float64)
        eager = torch.tensor([1.5, 1.75])
        assert output_budget(reference, eager, 3.0, torch.bfloat16) == 2 * 0.5 + 3 * 2**-7
        assert output_budget(reference, eager, 3.0, torch.float16) == 2 * 0.5 + 3 * 2**-10
        assert output_budget(reference[:0], eager[:0], 0.0, torch.float16) == 0.0

    def test_lse(self) -> None:
        reference = torch.tensor([[1.0, -10.0, -INF]], dtype=torch.float64)
        eager = torch.tensor([[1.0, -9.5, -INF]])
        expected = [1 + 1e-6 + 4e-7, 1 + 1e-6 + 4e-6, 0.0]
        assert lse_budget(reference, eager).tolist() == [pytest.approx(expected, rel=1e-12)]

    @pytest.mark.parametrize("bad", [math.nan, INF])
    def test_what_is_not_finite_bounds_nothing(self, bad: float) -> None:
        fine, broken = torch.zeros(1, 2), torch.tensor([[0.0, bad]])
        with pytest.raises(InvalidInputError, match=r"eager\.output is NaN or infinite at 1 of 2"):
            output_budget(fine, broken, 1.0, torch.float16)
        with pytest.raises(InvalidInputError, match=r"reference\.output"):
            output_budget(broken, fine, 1.0, torch.float16)
        with pytest.raises(InvalidInputError, match=r"eager\.lse"):
            lse_budget(fine, broken)

    def test_lses_must_be_empty_alike(self) -> None:
        with pytest.raises(InvalidInputError, match=r"eager\.lse is not -inf where"):
            lse_budget(torch.tensor([[-INF]]), torch.tensor([[0.0]]))


class TestVerdict:
    """Three rows of two heads; row 1 of head 1 is empty; eager errs by 0.25 and by 0.125."""

    def setup_method(self) -> None:
        output = torch.ones(3, 2, 2, dtype=torch.float64)
        lse = torch.full((2, 3), 2.0, dtype=torch.float64)
        output[1, 1], lse[1, 1] = 0.0, -INF
        self.reference = result(output, lse)
        eager_output, eager_lse = output.float(), lse.float()
        eager_output[0, 0, 1] += 0.25
        eager_lse[0, 0] -= 0.125
        self.eager = result(eager_output, eager_lse)
        self.output, self.lse = output.float(), lse.float()

    def check(self, **extra: Any) -> Any:
        return check_against_reference(
            self.output, self.lse, self.reference, self.eager, dtype=torch.float16, **extra
        )

    def test_equal_answers_pass(self) -> None:
        report = self.check()
        assert report.ok
        assert (report.max_error, report.budget) == (0.0, 0.5 + 2**-10)
        assert report.lse_max_error == 0.0
        assert str(report) == "output error 0.000e+00 within 5.010e-01"

    def test_twice_the_eager_error_and_an_ulp_pass_but_no_more(self) -> None:
        self.output[2, 1, 0] += 0.5 + 2**-10
        assert self.check().ok
        self.output[2, 1, 0] += 2**-20
        report = self.check()
        assert not report.ok
        assert report.worst_index == (2, 1, 0)
        assert report.problems == ("output error 5.010e-01 at (2, 1, 0) is over 5.010e-01",)

    def test_the_largest_value_can_be_given(self) -> None:
        self.output[2, 1, 0] += 0.6
        assert not self.check().ok
        assert self.check(value_abs_max=200.0).ok

    @pytest.mark.parametrize("bad", [math.nan, INF, -INF])
    def test_nan_and_infinity_never_pass(self, bad: float) -> None:
        self.output[2, 0, 1] = bad
        report = self.check(value_abs_max=1e300)
        assert not report.ok
        assert (report.max_error, report.worst_index) == (INF, (2, 0, 1))
        assert "1 NaN or infinite elements, one at (2, 0, 1)" in str(report)

    def test_an_empty_row_is_exactly_zero(self) -> None:
        self.output[1, 1, 0] = 1e-20
        report = self.check()
        assert report.problems == ("output of row 1, head 1, which sees no key, is not 0",)

    def test_lse_within_and_over_its_budget(self) -> None:
        self.lse[1, 2] += 0.25
        assert self.check().ok
        self.lse[1, 2] += 1e-5
        report = self.check()
        assert not report.ok
        assert report.lse_worst_index == (1, 2)
        assert report.lse_worst_budget == pytest.approx(0.25 + 1e-6 + 8e-7)
        assert "LSE at (1, 2) is 2.25" in str(report)

    @pytest.mark.parametrize(
        ("place", "bad"),
        [((0, 1), math.nan), ((0, 1), INF), ((0, 1), -INF), ((1, 1), 0.0), ((1, 1), INF)],
    )
    def test_lse_is_minus_infinity_exactly_where_nothing_is_seen(
        self, place: tuple[int, int], bad: float
    ) -> None:
        self.lse[place] = bad
        report = self.check()
        assert not report.ok
        assert report.lse_worst_index == place

    def test_nan_at_an_empty_entry(self) -> None:
        self.lse[1, 1] = math.nan
        assert not self.check().ok

    def test_log2_is_noticed(self) -> None:
        self.lse /= math.log(2)
        assert not self.check().ok

    def test_no_lse_is_no_verdict_on_it(self) -> None:
        report = check_against_reference(
            self.output, None, self.reference, self.eager, dtype=torch.float16
        )
        assert report.ok
        assert report.lse_max_error is None

    def test_padded_rows_are_left_out(self) -> None:
        self.reference.output[2], self.reference.lse[:, 2] = math.nan, math.nan
        self.reference = dataclasses.replace(self.reference, num_tokens=2)
        self.output[2], self.lse[:, 2] = math.nan, INF
        assert self.check().ok

    def test_other_shapes_are_refused(self) -> None:
        self.output = self.output[:2]
        with pytest.raises(InvalidInputError, match=r"actual_output\.shape is \(2, 2, 2\)"):
            self.check()

    def test_no_rows_pass(self) -> None:
        nothing = result(torch.zeros(0, 2, 2).double(), torch.zeros(2, 0).double())
        report = check_against_reference(
            torch.zeros(0, 2, 2), torch.zeros(2, 0), nothing, nothing, dtype=torch.float16
        )
        assert report.ok
        assert (report.worst_index, report.lse_worst_index) == (None, None)


@pytest.mark.parametrize("dtype", LOW)
class TestOnAnotherImplementation:
    """torch's own fused attention is held to the budget, right and with one thing wrong."""

    def run(self, dtype: torch.dtype, scale: float) -> Any:
        query, key, value = (randn(40, 4, 32, seed=seed, dtype=dtype) for seed in range(3))
        options = AttentionOptions(scale=32**-0.5)
        where: dict[str, Any] = {"query_start_loc": torch.tensor([0, 40]), "causal": True}
        actual = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)),
            is_causal=True,
            scale=scale,
        )
        return check_against_reference(
            actual[0].transpose(0, 1),
            None,
            varlen_attention(query, key, value, options, **where),
            eager_varlen_attention(query, key, value, options, **where),
            dtype=dtype,
        )

    def test_it_passes(self, dtype: torch.dtype) -> None:
        report = self.run(dtype, 32**-0.5)
        assert report.ok, report
        assert report.max_error > 0

    def test_a_scale_a_tenth_off_does_not(self, dtype: torch.dtype) -> None:
        assert not self.run(dtype, 1.1 * 32**-0.5).ok
