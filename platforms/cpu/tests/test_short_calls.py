"""The short way through `forward`, taken after a layer's first call: same answers, same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_cpu_testing import needs_kernels
from test_cpu_attn import Step
from torch import Tensor

from attn_cpu.backends import cpu_attn
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec

pytestmark = needs_kernels


class Call:
    """A layer, and the arguments of a right call of its `forward`."""

    def __init__(self, **layer: Any) -> None:
        self.step = Step([33, 20], [1, 4], **layer)
        self.layer, self.query = self.step.layer, self.step.query
        self.arguments: dict[str, Any] = {
            "query": self.query,
            "key": torch.zeros(5, 2, 64, dtype=self.query.dtype),
            "value": torch.zeros(5, 2, 64, dtype=self.query.dtype),
            "kv_cache": self.step.cache,
            "metadata": self.layer.plan(self.step.common).metadata,
            "output": torch.empty_like(self.query),
        }

    def run(self, **changes: Any) -> Tensor:
        return self.layer.impl.forward(self.layer, **(self.arguments | changes))


@pytest.fixture
def no_long_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise AssertionError("the long way was taken")

        monkeypatch.setattr(cpu_attn, "attend", fail)

    return forbid


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"window": (7, 0), "softcap": 3.0},
        {"dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 2.0},
    ],
    ids=["float32", "bfloat16", "window_and_cap", "fp8"],
)
def test_it_is_taken_and_answers_alike(
    options: dict[str, Any], no_long_way: Callable[[], None]
) -> None:
    call = Call(**options)
    expected = call.run().clone()
    no_long_way()
    assert torch.equal(call.run(), expected)
    assert torch.equal(call.run(output=None), expected)
    assert torch.equal(call.run(key=None, value=None), expected)


WRONG: list[dict[str, Any]] = [
    {"query": torch.zeros(5, 6, 32)},
    {"query": torch.zeros(4, 6, 64), "output": torch.zeros(4, 6, 64)},
    {"query": torch.zeros(5, 6, 64, dtype=torch.float16)},
    {"query": torch.zeros(5, 6, 64, device="meta")},
    {"query": None},
    {"output": torch.zeros(5, 6, 32)},
    {"output": torch.zeros(6, 6, 64)},
    {"output": torch.zeros(5, 6, 64, device="meta")},
    {"key": None},
    {"value": torch.zeros(5, 4, 64)},
    {"key": torch.zeros(5, 2, 64, dtype=torch.float16)},
    {"kv_cache": None},
    {"kv_cache": torch.zeros(5, 2, 16, 2, 64, device="meta")},
    {"kv_cache": torch.zeros(5, 2, 16, 2, 32)},
    {"kv_cache": torch.zeros(5, 2, 8, 2, 64)},
    {"kv_cache": torch.zeros(5, 2, 16, 2, 64, dtype=torch.float16)},
    {"kv_cache": torch.zeros(3, 2, 16, 2, 64)},
    {"metadata": {}},
    {"lse": torch.zeros(5, 6)},
]


@pytest.mark.parametrize("change", WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_it_refuses_in_the_same_words(change: dict[str, Any]) -> None:
    call, warmed = Call(), Call()
    warmed.run()
    said = []
    for each in (call, warmed):
        with pytest.raises((InvalidInputError, UnsupportedOptionError)) as caught:
            each.run(**change)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


def test_options_that_a_layer_gets_later() -> None:
    call = Call()
    call.run()
    call.layer.k_scale = 2.0
    with pytest.raises(UnsupportedOptionError, match=r"k_scale=2\.0 with a cache that has no such"):
        call.run()
    call.layer.k_scale = 1.0
    call.layer.sinks = torch.zeros(6)
    with pytest.raises(UnsupportedOptionError, match="sinks is given"):
        call.run()


@pytest.mark.parametrize("scale", [4.0, torch.tensor([4.0])])
def test_another_scale_counts_at_once(scale: float | Tensor) -> None:
    call = Call(dtype=torch.bfloat16, kv_cache_dtype="fp8", v_scale=1.0)
    plain = call.run().float().clone()
    call.layer.v_scale = scale
    for _ in range(2):
        assert torch.allclose(call.run().float(), plain * 4, rtol=0.02, atol=0.02)
    if isinstance(scale, Tensor):
        scale.fill_(2.0)
        assert torch.allclose(call.run().float(), plain * 2, rtol=0.02, atol=0.02)


def test_a_cache_that_moved_or_was_made_anew() -> None:
    call = Call()
    expected = call.run().clone()
    cache, spec = call.step.cache, call.layer.kv_cache_spec
    assert isinstance(spec, AttentionSpec)
    other = spec.allocate(len(cache), "cpu").copy_(cache)
    assert torch.equal(call.run(kv_cache=other), expected)
    cache.set_(spec.allocate(len(cache), "cpu"))  # type: ignore[call-overload]
    assert not call.run().any()


def test_another_table_of_the_same_batch_counts() -> None:
    call = Call()
    expected = call.run().clone()
    table = call.step.common.block_table
    assert table is not None
    order = torch.arange(len(call.step.cache)).flip(0)
    slots = torch.zeros(5, dtype=torch.int64)
    changed = call.layer.builder.update_block_table(
        call.arguments["metadata"], order[table.long()].int(), slots
    )
    call.arguments |= {"metadata": changed, "kv_cache": call.step.cache[order]}
    assert torch.equal(call.run(), expected)
