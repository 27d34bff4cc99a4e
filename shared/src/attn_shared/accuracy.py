"""How far a kernel's answer may be from the specification: a budget, not a tolerance.

The yardstick is eager attention in the kernel's own compute dtype: inputs in that dtype, products
accumulated in float32, softmax in float32, P rounded to the dtype before it meets V, output
rounded to the dtype. A backend may err, over the whole call, twice as much as that against the
float64 reference, plus one ulp of the largest value. Nothing is tuned by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared._eager import eager_attention, eager_mla_decode, eager_varlen_attention
from attn_shared._reference_core import ReferenceResult
from attn_shared.errors import InvalidInputError

__all__ = [
    "AccuracyReport",
    "check_against_reference",
    "eager_attention",
    "eager_mla_decode",
    "eager_varlen_attention",
    "lse_budget",
    "output_budget",
]

_ERROR_RATIO = 2.0
_LSE_ABSOLUTE = 1e-6
_LSE_RELATIVE = 4e-7

_LseNumbers = tuple[float | None, tuple[int, ...] | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyReport:
    """The verdict over one call.

    Attributes:
        ok: nothing is over budget.
        max_error: largest absolute error of the output over rows that hold tokens; infinite where
            the actual value is NaN or infinite.
        budget: what max_error may be.
        worst_index: (row, head, element) of max_error; None without rows.
        lse_max_error: the same for the LSE; None if none was given.
        lse_worst_index: (head, row) of the LSE entry furthest over, or nearest to, its budget.
        lse_worst_budget: what the error at lse_worst_index may be.
        problems: one sentence for each way in which the call is wrong.
    """

    ok: bool
    max_error: float
    budget: float
    worst_index: tuple[int, ...] | None
    lse_max_error: float | None = None
    lse_worst_index: tuple[int, ...] | None = None
    lse_worst_budget: float | None = None
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Say the verdict in one line."""
        if self.problems:
            return "; ".join(self.problems)
        return f"output error {self.max_error:.3e} within {self.budget:.3e}"


def output_budget(
    reference: Tensor, eager: Tensor, value_abs_max: float, dtype: torch.dtype
) -> float:
    """Return what the largest output error of a call may be.

    2 * max |eager - reference| + ulp(dtype) * max |V|, where ulp is the spacing at 1.

    Args:
        reference: output of the reference, rows without tokens left out.
        eager: output of eager attention, the same shape.
        value_abs_max: largest magnitude among the values that are seen.
        dtype: the kernel's compute dtype.

    Raises:
        InvalidInputError: reference or eager is not finite, so that it bounds nothing.
    """
    _require_finite("reference.output", reference)
    _require_finite("eager.output", eager)
    return _ERROR_RATIO * _max_abs(eager.double() - reference.double()) + (
        torch.finfo(dtype).eps * value_abs_max
    )


def lse_budget(reference_lse: Tensor, eager_lse: Tensor) -> Tensor:
    """Return float64 (Hq, T): what the error of each LSE entry may be.

    2 * max |eager - reference| + 1e-6 + 4e-7 * |LSE|; the maximum is over the call. Where the
    reference is -inf the budget is 0.

    Raises:
        InvalidInputError: the two are not -inf at the same entries, or otherwise not finite.
    """
    empty = reference_lse == -torch.inf
    if not torch.equal(empty, eager_lse == -torch.inf):
        raise InvalidInputError.for_argument(
            "eager.lse", "not -inf where the reference is", "-inf at the same entries"
        )
    filled = reference_lse.double().masked_fill(empty, 0.0)
    eager_filled = eager_lse.double().masked_fill(empty, 0.0)
    _require_finite("reference.lse", filled)
    _require_finite("eager.lse", eager_filled)
    eager_error = _max_abs(eager_filled - filled)
    budget = _ERROR_RATIO * eager_error + _LSE_ABSOLUTE + _LSE_RELATIVE * filled.abs()
    return budget.masked_fill(empty, 0.0)


def check_against_reference(
    actual_output: Tensor,
    actual_lse: Tensor | None,
    reference: ReferenceResult,
    eager: ReferenceResult,
    *,
    dtype: torch.dtype,
    value_abs_max: float | None = None,
) -> AccuracyReport:
    """Hold a kernel's output and LSE to the budget, over the rows that hold tokens.

    NaN or infinity never passes, but for an LSE of -inf exactly where no key is visible; there the
    output must be exactly 0.

    Args:
        actual_output: (T, Hq, Dv), the reference's shape; rows past its num_tokens are ignored.
        actual_lse: (Hq, T) in natural log, or None when the kernel returned none.
        reference: float64 result of the call.
        eager: eager attention's result of the same call.
        dtype: the kernel's compute dtype.
        value_abs_max: largest magnitude among the values; by default what the reference saw.

    Raises:
        InvalidInputError: shapes differ, or reference and eager cannot bound anything.
    """
    rows = reference.num_tokens
    _check_shape("actual_output", actual_output, reference.output)
    expected, got = reference.output[:rows], actual_output[:rows].double().to(reference.output)
    largest = reference.value_abs_max if value_abs_max is None else value_abs_max
    budget = output_budget(expected, eager.output[:rows], largest, dtype)
    error = _error(got, expected)
    max_error, worst = _worst(error)
    problems = _output_problems(got, error, budget, reference.lse[:, :rows])
    lse_numbers: _LseNumbers = (None, None, None)
    if actual_lse is not None:
        _check_shape("actual_lse", actual_lse, reference.lse)
        lse_numbers, lse_problems = _check_lse(
            actual_lse[:, :rows].double().to(reference.lse),
            reference.lse[:, :rows],
            eager.lse[:, :rows],
        )
        problems += lse_problems
    return AccuracyReport(
        ok=not problems,
        max_error=max_error,
        budget=budget,
        worst_index=worst,
        lse_max_error=lse_numbers[0],
        lse_worst_index=lse_numbers[1],
        lse_worst_budget=lse_numbers[2],
        problems=tuple(problems),
    )


def _output_problems(got: Tensor, error: Tensor, budget: float, reference_lse: Tensor) -> list[str]:
    problems = []
    max_error, worst = _worst(error)
    unbounded = int((~got.isfinite()).sum())
    if unbounded:
        problems.append(f"output has {unbounded} NaN or infinite elements, one at {worst}")
    elif max_error > budget:
        problems.append(f"output error {max_error:.3e} at {worst} is over {budget:.3e}")
    empty = (reference_lse == -torch.inf).T
    if bool((got[empty] != 0).any()):
        row, head = torch.nonzero(empty & (got != 0).any(-1))[0].tolist()
        problems.append(f"output of row {row}, head {head}, which sees no key, is not 0")
    return problems


def _check_lse(got: Tensor, expected: Tensor, eager_lse: Tensor) -> tuple[_LseNumbers, list[str]]:
    """Return the worst LSE entry's numbers and what is wrong with the LSE."""
    budget = lse_budget(expected, eager_lse)
    error = _error(got, expected)
    excess, worst = _worst(error - budget)
    max_error, _ = _worst(error)
    if worst is None:
        return (max_error, None, None), []
    allowed = float(budget[worst])
    problems = []
    if excess > 0:
        problems.append(
            f"LSE at {worst} is {float(got[worst])}, not {float(expected[worst])} "
            f"within {allowed:.3e}"
        )
    return (max_error, worst, allowed), problems


def _error(got: Tensor, expected: Tensor) -> Tensor:
    """Return |got - expected|: 0 where equal, also at -inf; inf where the difference is NaN."""
    difference = (got - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(got == expected, 0.0, difference)


def _worst(error: Tensor) -> tuple[float, tuple[int, ...] | None]:
    """Return the largest element and where it is."""
    if error.numel() == 0:
        return 0.0, None
    rest = int(error.argmax())
    place: tuple[int, ...] = ()
    for size in reversed(error.shape):
        rest, axis = divmod(rest, size)
        place = (axis, *place)
    return float(error[place]), place


def _max_abs(x: Tensor) -> float:
    return float(x.abs().amax()) if x.numel() else 0.0


def _require_finite(name: str, x: Tensor) -> None:
    count = int((~x.isfinite()).sum())
    if count:
        raise InvalidInputError.for_argument(
            name,
            f"NaN or infinite at {count} of {x.numel()} elements",
            "finite numbers",
            hint="inputs that are seen must be finite, and small enough for the compute dtype.",
        )


def _check_shape(name: str, actual: Tensor, reference: Tensor) -> None:
    if actual.shape != reference.shape:
        raise InvalidInputError.for_argument(
            f"{name}.shape", tuple(actual.shape), f"{tuple(reference.shape)}, the reference's"
        )
