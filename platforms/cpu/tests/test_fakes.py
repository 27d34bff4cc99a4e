"""The ops as torch.library sees them: schemas that tell the truth, and traces without running."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_cpu_testing import (
    attention_arguments,
    cached_arguments,
    needs_kernels,
    plan_of,
    write_arguments,
)
from torch import Tensor

pytestmark = needs_kernels

# Nothing here has a gradient; a plan's length follows from contents.
TESTS = ("test_schema", "test_faketensor")


def _check(name: str, arguments: dict[str, Any]) -> None:
    op = getattr(torch.ops.attn_cpu, name).default
    torch.library.opcheck(op, (), arguments, test_utils=TESTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype: torch.dtype) -> None:
    _check("attention", attention_arguments(dtype))
    size = torch.ops.attn_cpu.workspace_bytes(attention_arguments()["plan"])
    workspace = torch.zeros(size, dtype=torch.uint8)
    options = {"sinks": torch.zeros(4), "window_left": 3, "workspace": workspace}
    _check("attention", attention_arguments(dtype, lse=None, **options))


def test_attention_cached() -> None:
    _check("attention_cached", cached_arguments(attention_arguments()))


def test_tensors_of_two_devices_do_not_pass_for_a_trace() -> None:
    arguments = attention_arguments()
    arguments["key"] = arguments["key"].to("meta")
    with pytest.raises(RuntimeError, match=r"device is one of \['cpu', 'meta'\]; allowed: one"):
        torch.ops.attn_cpu.attention(**arguments)


def test_write_kv() -> None:
    _check("write_kv", write_arguments())


def test_merge() -> None:
    rows, lse = torch.randn(5, 4, 32), torch.randn(4, 5)
    arguments = {"output": torch.empty_like(rows), "output_lse": torch.empty_like(lse)}
    arguments |= {"output_a": rows, "lse_a": lse, "output_b": rows + 1, "lse_b": lse + 1}
    _check("merge_attn_states", arguments)


def test_a_graph_of_the_ops_is_whole() -> None:
    arguments = attention_arguments()
    plan_of(arguments)

    def model(query: Tensor) -> Tensor:
        out = torch.empty_like(query)
        torch.ops.attn_cpu.attention(**(arguments | {"query": query * 2, "out": out}))
        return out + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(arguments["query"]), model(arguments["query"]))
