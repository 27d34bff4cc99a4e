"""`attn::forward` inside compiled graphs, on every backend that this machine can select."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_shared import ops
from attn_shared.errors import AttnError
from attn_shared.layer import Attention, StepPlan
from attn_shared.metadata import CommonAttentionMetadata

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 16
TABLE = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32)
ON_CPU = ("TORCH_SDPA", "FLEX_ATTENTION", "CPU_ATTN")
ON_CUDA = ("TORCH_SDPA", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")

Model = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

CASES = [
    *(pytest.param("cpu", name, id=f"cpu-{name}") for name in ON_CPU),
    *(pytest.param("cuda", name, id=f"cuda-{name}", marks=pytest.mark.cuda) for name in ON_CUDA),
]


def layer_on(device: str, backend: str) -> Attention:
    """Return a layer, or skip the test with the selector's reason."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        return Attention(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=SIZE,
            block_size=BLOCK,
            dtype=dtype,
            device=device,
            backend=backend,
        )
    except AttnError as error:
        pytest.skip(f"{backend} cannot be selected: {error.message.splitlines()[0]}")


def planned(layer: Attention, query_lens: tuple[int, int], seq_lens: tuple[int, int]) -> StepPlan:
    common = CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=TABLE,
        block_size=BLOCK,
        device=layer.device,
    )
    return layer.plan(common)


def inputs(layer: Attention, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def rows(heads: int) -> torch.Tensor:
        made = torch.randn(num_tokens, heads, SIZE, generator=generator)
        return made.to(device=layer.device, dtype=layer.spec.dtype)

    return rows(HEADS), rows(KV_HEADS), rows(KV_HEADS)


def model_of(layer: Attention) -> Model:
    def model(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        return ops.attend(layer, query * 2, key, value, kv_cache) + 1

    return model


# FLEX_ATTENTION builds its masks by vmap, which runs in none of the modes that opcheck sets.
OPCHECKED = [case for case in CASES if "FLEX_ATTENTION" not in case.values]


@pytest.mark.parametrize(("device", "backend"), OPCHECKED)
def test_the_operator_is_registered_rightly(device: str, backend: str) -> None:
    layer = layer_on(device, backend)
    query, key, value = inputs(layer, 3)
    arguments = (query, key, value, layer.allocate(6), torch.empty_like(query), layer.handle)
    with ops.step(planned(layer, (1, 2), (20, 7))):
        torch.library.opcheck(torch.ops.attn.forward.default, arguments)


@pytest.mark.parametrize(("device", "backend"), CASES)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [((1, 1), (20, 7)), ((3, 1), (20, 7))], ids=["decode", "mixed"]
)
def test_a_model_compiles_without_a_graph_break(
    device: str, backend: str, query_lens: tuple[int, int], seq_lens: tuple[int, int]
) -> None:
    layer = layer_on(device, backend)
    tensors = inputs(layer, sum(query_lens))
    plan = planned(layer, query_lens, seq_lens)
    eager_cache, compiled_cache = layer.allocate(6), layer.allocate(6)
    model = model_of(layer)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ops.step({layer.handle: plan}):
        expected = model(*tensors, eager_cache)
        torch.testing.assert_close(compiled(*tensors, compiled_cache), expected, rtol=0, atol=0)
    assert torch.equal(eager_cache, compiled_cache)


@pytest.mark.parametrize(("device", "backend"), CASES)
def test_one_compilation_serves_steps_with_other_plans(device: str, backend: str) -> None:
    layer = layer_on(device, backend)
    model = model_of(layer)
    counter = _Counting()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    tensors, cache = inputs(layer, 2), layer.allocate(6)
    for lens in ((20, 7), (21, 8), (22, 9)):
        with ops.step(planned(layer, (1, 1), lens)):
            expected = model(*tensors, cache.clone())
            torch.testing.assert_close(compiled(*tensors, cache), expected, rtol=0, atol=0)
    assert counter.compilations == 1


class _Counting:
    """A compiler that runs the graph as it is, and counts how often it was asked."""

    def __init__(self) -> None:
        self.compilations = 0

    def __call__(self, graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        self.compilations += 1
        return graph.forward


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor itself imports
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_inductor_compiles_around_the_operator(backend: str) -> None:
    layer = layer_on("cuda", backend)
    tensors = inputs(layer, 2)
    plan = planned(layer, (1, 1), (20, 7))
    eager_cache, compiled_cache = layer.allocate(6), layer.allocate(6)
    model = model_of(layer)
    compiled = torch.compile(model, fullgraph=True)
    with ops.step(plan):
        expected = model(*tensors, eager_cache)
        torch.testing.assert_close(compiled(*tensors, compiled_cache), expected)
    assert torch.equal(eager_cache, compiled_cache)
