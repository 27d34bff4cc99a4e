"""Wrong arguments of the ops: refused with what is wrong, whatever they are, and never a crash."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_cpu_testing import (
    NAMES,
    attention_arguments,
    needs_kernels,
    plan_of,
    run,
    write_arguments,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = needs_kernels

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8),
    *(torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
)

WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "wider": lambda t: torch.cat([t, t[..., :1]], dim=-1),
    "shorter": lambda t: t[:-1],
    "flat": lambda t: t.flatten(),
    "deeper": lambda t: t.unsqueeze(0),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t.flatten()[0],
    "float64": lambda t: t.to(torch.float64),
    "sparse_rows": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}
"""Changes that make most tensors of a right call wrong."""

PARTS = ("query", "out", "lse", "key", "value", "block_table", "query_start_loc", "seq_lens")
# A view with gaps in its last dimension, fewer blocks and a longer list are no error everywhere.
FINE = {("key", "shorter"), ("value", "shorter"), ("block_table", "wider"), ("plan", "wider")}
FINE |= {("lse", "sparse_rows"), ("block_table", "shorter"), ("query_start_loc", "wider")}
FINE |= {("seq_lens", "wider"), ("lse", "wider")}
FINE |= {("query_start_loc", "flat"), ("seq_lens", "flat")}


@pytest.mark.parametrize(
    ("name", "change"), [pair for pair in itertools.product(PARTS, WRONG) if pair not in FINE]
)
def test_a_wrong_tensor_is_named(name: str, change: str) -> None:
    arguments = attention_arguments()
    arguments[name] = WRONG[change](arguments[name])
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as caught:
        run(arguments)
    assert caught.value.args[0]


@pytest.mark.parametrize("entry", [-1, 6, 2**31 - 1, -(2**31)])
def test_checked_mode_names_a_table_entry(entry: int) -> None:
    arguments = attention_arguments()
    arguments["block_table"][0, 1] = entry
    with pytest.raises(RuntimeError, match=rf"block_table.*{entry}"):
        run(arguments)


def test_entries_past_a_requests_end_are_never_read() -> None:
    arguments = attention_arguments()
    expected = run(attention_arguments()).clone()
    table = torch.full((3, 5), 2**31 - 1, dtype=torch.int32)
    table[:, :2] = arguments["block_table"]
    table[2] = -7  # a padded row
    assert torch.equal(run(arguments | {"block_table": table}), expected)


@pytest.mark.parametrize("slot", [48, 2**40, -2])
def test_checked_mode_names_a_slot(slot: int) -> None:
    arguments = write_arguments()
    arguments["slot_mapping"][2] = slot
    with pytest.raises(RuntimeError, match=rf"slot.*{slot}"):
        torch.ops.attn_cpu.write_kv(**arguments)


def test_a_slot_outside_is_refused_unchecked_as_well() -> None:
    arguments = write_arguments(checked=False)
    arguments["slot_mapping"][2] = 48
    with pytest.raises(RuntimeError, match=r"slot_mapping\[2\] is 48; allowed: -1 to 47"):
        torch.ops.attn_cpu.write_kv(**arguments)
    assert not arguments["key_cache"].any()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("softcap", 0.0, "softcap"),
        ("softcap", float("nan"), "softcap"),
        ("scale", float("inf"), "scale"),
        ("window_left", -2, "window"),
        ("window_right", -2, "window"),
        ("chunk_size", 0, "chunk"),
        ("sinks", torch.zeros(3), "sinks"),
        ("alibi_slopes", torch.zeros(5), "alibi"),
        ("sinks", torch.zeros(4, dtype=torch.float64), "sinks"),
        ("causal_per_request", torch.ones(2, dtype=torch.bool), "causal"),
        ("k_scale", torch.ones(3), "k_scale"),
        ("key_scales", torch.ones(6, 8, 2), "key_scales"),
        ("mm_prefix_ranges", torch.zeros(1, 2, dtype=torch.int32), "mm_prefix_ranges"),
        ("mm_prefix_ranges", torch.zeros(1, 3), "mm_prefix_ranges"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: Any, words: str) -> None:
    arguments = attention_arguments()
    with pytest.raises(RuntimeError, match=words):
        run(arguments | {name: value})


def test_a_plan_of_another_batch_is_refused() -> None:
    other = attention_arguments(seq_lens=torch.tensor([9, 13, 5], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="plan"):
        run(attention_arguments(plan=plan_of(other)))
    with pytest.raises(RuntimeError, match="plan"):
        run(attention_arguments(plan=torch.zeros(3, dtype=torch.int32)))


# Fuzz: any of it may be refused, some of it may be right, none of it may end the process.


@st.composite
def tensors(draw: st.DrawFn) -> Tensor | None:
    """Any small tensor: shape, strides, dtype, contents."""
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    numbers = torch.randint(-130, 130, shape, generator=torch.Generator().manual_seed(1))
    made = numbers.to(dtype)
    if made.dim() and draw(st.booleans()):
        made = made.movedim(draw(st.integers(0, made.dim() - 1)), -1)
    return made


@st.composite
def mutated(draw: st.DrawFn, source: Tensor) -> Tensor:
    """A tensor near a right one: another view of it, other numbers, another dtype."""
    made = source.clone()
    kind = draw(st.sampled_from(["values", "dtype", "slice", "expand", "transpose", "stride"]))
    if kind == "values" and made.numel():
        place = draw(st.integers(0, made.numel() - 1))
        number = draw(st.sampled_from([-(2**31), -1, 0, 1, 5, 7, 127, 2**31 - 1]))
        limited = number if made.dtype.itemsize >= 4 else number % 100
        made.view(-1)[place] = bool(number) if made.dtype is torch.bool else limited
    elif kind == "dtype":
        made = made.to(draw(st.sampled_from(DTYPES)))
    elif kind == "slice" and made.dim():
        dim = draw(st.integers(0, made.dim() - 1))
        made = made.narrow(dim, 0, draw(st.integers(0, made.shape[dim])))
    elif kind == "expand" and made.dim():
        dim = draw(st.integers(0, made.dim() - 1))
        if made.shape[dim]:
            made = made.narrow(dim, 0, 1).expand_as(made)
    elif kind == "transpose" and made.dim() > 1:
        made = made.transpose(0, draw(st.integers(1, made.dim() - 1)))
    elif made.dim():
        made = torch.cat([made, made], dim=0)[::2]
    return made


@settings(max_examples=400, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES[:3]))
def test_attention_never_crashes(data: st.DataObject, dtype: torch.dtype) -> None:
    arguments = attention_arguments(dtype)
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)):
        source = arguments[name]
        near = data.draw(st.booleans()) and source is not None
        arguments[name] = data.draw(mutated(source) if near else tensors())
    arguments["checked"] = True
    for name, values in (
        ("window_left", [None, 0, 3, -1, 2**40]),
        ("window_right", [None, 0, 3, -1, 2**40]),
        ("chunk_size", [None, 1, 4, -3, 2**40]),
        ("softcap", [None, 1.0, -1.0, float("nan")]),
        ("causal", [True, False]),
    ):
        if data.draw(st.integers(0, 4)) == 0:
            arguments[name] = data.draw(st.sampled_from(values))
    _try(torch.ops.attn_cpu.attention, arguments)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES[:3]))
def test_write_never_crashes(data: st.DataObject, dtype: torch.dtype) -> None:
    arguments = write_arguments(dtype)
    names = [name for name in arguments if name != "checked"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        source = arguments[name]
        near = data.draw(st.booleans()) and source is not None
        arguments[name] = data.draw(mutated(source) if near else tensors())
    _try(torch.ops.attn_cpu.write_kv, arguments)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_plan_never_crashes(data: st.DataObject) -> None:
    arguments = attention_arguments()
    small = st.integers(-2, 9)
    for name in ("query_start_loc", "seq_lens"):
        if data.draw(st.booleans()):
            arguments[name] = data.draw(mutated(arguments[name]))
    rest = {
        "num_heads": data.draw(small),
        "num_kv_heads": data.draw(small),
        "head_size": data.draw(st.sampled_from([32, 64, 0, -8, 2**40])),
        "head_size_v": data.draw(st.sampled_from([32, 64, 0, -8, 2**40])),
        "causal": True,
        "causal_per_request": data.draw(tensors()),
        "window_left": data.draw(st.sampled_from([None, 0, 3, -5])),
        "window_right": None,
        "chunk_size": data.draw(st.sampled_from([None, 4, -3])),
        "has_mm_prefix": False,
        "num_threads": data.draw(st.sampled_from([1, 2, 64, 0, -1, 2**40])),
        "batch_invariant": data.draw(st.booleans()),
    }
    own = {name: arguments[name] for name in ("query_start_loc", "seq_lens")}
    _try(torch.ops.attn_cpu.plan, own | rest)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_merge_never_crashes(data: st.DataObject) -> None:
    rows, lse = torch.randn(5, 4, 32), torch.randn(4, 5)
    arguments: dict[str, Any] = {
        "output": torch.empty_like(rows),
        "output_lse": torch.empty_like(lse),
        "output_a": rows,
        "lse_a": lse,
        "output_b": rows.clone(),
        "lse_b": lse.clone(),
    }
    for name in data.draw(
        st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=3, unique=True)
    ):
        near = data.draw(st.booleans())
        arguments[name] = data.draw(mutated(arguments[name]) if near else tensors())
    _try(torch.ops.attn_cpu.merge_attn_states, arguments)


def _try(op: Callable[..., Any], arguments: dict[str, Any]) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError, ValueError, TypeError):
        op(**arguments)
