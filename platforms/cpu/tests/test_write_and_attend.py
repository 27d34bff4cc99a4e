"""`write_and_attend`: `write_kv` and `attention_cached` in one op; refused, it writes nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from attn_cpu_testing import attention_arguments, cached_arguments, levels, needs_kernels, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_attn import Step
from test_op_inputs import DTYPES, mutated, tensors
from torch import Tensor

from attn_cpu.isa import level_named
from attn_shared.errors import InvalidInputError

pytestmark = needs_kernels


def both_arguments(dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """Return the arguments of a right call, whose slots are those of the last blocks' tokens."""
    scales = options.pop("scales", (1.0, 1.0))
    stored = options.pop("stored", dtype)
    arguments = attention_arguments(dtype, lse=None, **options)
    for name in ("key", "value"):
        arguments[name] = arguments[name].to(stored)
    arguments["plan"] = plan_of(arguments)
    cached = cached_arguments(arguments, scales=scales)
    num_tokens = len(cached["query"])
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, num_tokens, *cached["kv_cache"].shape[3:], generator=generator).to(dtype)
    del cached["new_key"], cached["new_value"]
    slots = torch.arange(num_tokens) + 1
    slots[-1] = -1
    return cached | {"key": rows[0], "value": rows[1], "slot_mapping": slots}


def one(arguments: dict[str, Any]) -> Tensor:
    torch.ops.attn_cpu.write_and_attend(**arguments)
    out: Tensor = arguments["out"]
    return out


def two(arguments: dict[str, Any], scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return output and cache of the two ops, on copies."""
    cache = arguments["kv_cache"].clone()
    is_fp8 = cache.dtype.itemsize == 1
    k_scale, v_scale = (torch.tensor([scale]) if is_fp8 else None for scale in scales)
    key_cache, value_cache = cache.unbind(1)
    rows = arguments["key"], arguments["value"], key_cache, value_cache, arguments["slot_mapping"]
    torch.ops.attn_cpu.write_kv(*rows, k_scale, v_scale, None, None, True)
    own = {name: arguments[name] for name in ("query", "block_table", "plan", "workspace", "layer")}
    out = torch.zeros_like(arguments["out"])
    torch.ops.attn_cpu.attention_cached(
        **own, out=out, new_key=None, new_value=None, kv_cache=cache, isa=arguments["isa"]
    )
    return out, cache


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(
    ("dtype", "stored", "scales"),
    [
        (torch.float32, torch.float32, (1.0, 1.0)),
        (torch.bfloat16, torch.bfloat16, (1.0, 1.0)),
        (torch.float16, torch.float16, (1.0, 1.0)),
        (torch.bfloat16, torch.float8_e4m3fn, (0.5, 3.0)),
        (torch.float32, torch.float8_e5m2, (2.0, 0.25)),
    ],
)
def test_it_is_the_two_ops(
    level: str, dtype: torch.dtype, stored: torch.dtype, scales: tuple[float, float]
) -> None:
    arguments = both_arguments(dtype, stored=stored, scales=scales, isa=level_named(level))
    before = arguments["kv_cache"].clone()
    expected, cache = two(arguments, scales)
    found = one(arguments)
    assert found.any()
    assert torch.equal(found, expected)
    assert torch.equal(arguments["kv_cache"].view(torch.uint8), cache.view(torch.uint8))
    assert not torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"slot_mapping": torch.tensor([0, 1, 10_000])}, r"slot_mapping\[2\] is 10000; allowed: -1 to"),
    ({"slot_mapping": torch.tensor([-2])}, r"slot_mapping\[0\] is -2"),
    ({"slot_mapping": torch.arange(99)}, "key rows is"),
    ({"slot_mapping": torch.arange(3).int()}, "slot_mapping dtype"),
    ({"key": torch.zeros(9, 2, 16)}, "new_key"),
    ({"value": torch.zeros(9, 2, 32).half()}, "new_value dtype"),
    ({"query": torch.zeros(1, 4, 32), "out": torch.zeros(1, 4, 32)}, "query rows is 1"),
    ({"workspace": torch.zeros(1, dtype=torch.uint8)}, "workspace length is 1"),
    ({"block_table": torch.full((3, 2), 99, dtype=torch.int32)}, r"block_table\[0, 0\] is 99"),
    ({"isa": 99}, "isa is 99"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_refused_is_named_and_nothing_is_written(
    change: dict[str, Any], words: str
) -> None:
    arguments = both_arguments()
    before = arguments["kv_cache"].clone()
    with pytest.raises(RuntimeError, match=words):
        one(arguments | change)
    assert torch.equal(arguments["kv_cache"], before)


def test_a_cache_whose_blocks_share_memory_is_not_written() -> None:
    arguments = both_arguments()
    cache = arguments["kv_cache"]
    with pytest.raises(RuntimeError, match="kv_cache"):
        one(arguments | {"kv_cache": cache[:1].expand(len(cache), -1, -1, -1, -1)})


def test_schema_and_trace() -> None:
    op = torch.ops.attn_cpu.write_and_attend.default
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(op, (), both_arguments(), test_utils=tests)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES[:3]))
def test_it_never_crashes(data: st.DataObject, dtype: torch.dtype) -> None:
    arguments = both_arguments(dtype)
    names = [name for name in arguments if name != "isa"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        source = arguments[name]
        near = data.draw(st.booleans()) and source is not None
        arguments[name] = data.draw(mutated(source) if near else tensors())
    with contextlib.suppress(RuntimeError, NotImplementedError, ValueError, TypeError):
        one(arguments)


# Through a layer


def step_of_a_layer(**layer: Any) -> tuple[Step, dict[str, Any]]:
    step = Step([33, 20], [1, 4], **layer)
    rows = torch.randn(2, 5, 2, 64, generator=torch.Generator().manual_seed(2))
    rows = rows.to(step.query.dtype)
    plan = step.layer.plan(step.common)
    arguments = {"query": step.query, "key": rows[0], "value": rows[1]}
    return step, arguments | {"kv_cache": step.cache, "plan": plan}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16, "window": (7, 0), "softcap": 3.0},
        {"dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 2.0},
    ],
    ids=["float32", "window_and_cap", "fp8"],
)
def test_a_layer_takes_it_after_its_first_call(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, arguments = step_of_a_layer(**options)
    cache = step.cache.clone()
    expected = step.layer.forward(**arguments).clone()
    written = step.cache.clone()

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the cache was written by a call of its own")

    monkeypatch.setattr(type(step.layer.impl), "do_kv_cache_update", fail)
    step.cache.copy_(cache)
    assert torch.equal(step.layer.forward(**arguments), expected)
    assert torch.equal(step.cache.view(torch.uint8), written.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(5, 6, 32)}, "query shape is"),
        ({"key": torch.zeros(5, 2, 32)}, "key shape is"),
        ({"value": None}, "value is None; allowed: a tensor"),
        ({"output": torch.zeros(1, 6, 64).expand(5, -1, -1)}, "output is of strides"),
        ({"kv_cache": torch.zeros(1, 2, 16, 2, 64)}, "kv_cache blocks is 1"),
        ({"key": torch.zeros(2, 2, 64), "value": torch.zeros(2, 2, 64)}, "key rows"),
    ],
)
def test_a_layer_refuses_in_its_own_words_and_writes_nothing(
    change: dict[str, Any], words: str
) -> None:
    step, arguments = step_of_a_layer()
    step.layer.forward(**arguments)
    before = step.cache.clone()
    with pytest.raises(InvalidInputError, match=words):
        step.layer.forward(**(arguments | {"key": arguments["key"] + 1} | change))
    assert torch.equal(step.cache, before)


def test_options_that_a_layer_gets_later_take_the_long_way() -> None:
    step, arguments = step_of_a_layer(
        dtype=torch.bfloat16, kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0
    )
    first = step.layer.forward(**arguments).clone()
    step.layer.v_scale = 4.0
    second = step.layer.forward(**arguments)
    assert not torch.equal(first, second)
