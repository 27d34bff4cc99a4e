"""Decode at padded batch sizes: on a GPU from captured graphs, elsewhere by the same steps."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_shared.accuracy import check_against_reference, eager_attention
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import AttnError
from attn_shared.layer import Attention
from attn_shared.reference import AttentionOptions, paged_attention
from attn_shared.spec import BuildConfig

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "cuda_graph_decode.py"
HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 64, 16
SIZES, LONGEST = (1, 2, 4), 96
BLOCKS_EACH = LONGEST // BLOCK
ON_CUDA = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLASHINFER_TRTLLM")

# Batches that grow and shrink, over sequences that grow and give way to new ones.
STEPS = ([3], [17, 4], [18, 5, 90], [19, 6, 91, 1], [20, 7], [96, 33, 48, 16], [2], [21])


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("cuda_graph_decode", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks for its module there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def layer_on(device: str, backend: str, **options: Any) -> Attention:
    """Return a layer, or skip the test with the selector's reason."""
    try:
        return Attention(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=SIZE,
            block_size=BLOCK,
            device=device,
            backend=backend,
            config=BuildConfig(max_num_seqs=4, max_model_len=LONGEST, capture_sizes=SIZES),
            **options,
        )
    except AttnError as error:
        pytest.skip(f"{backend} cannot be selected: {error.message.splitlines()[0]}")


def filled_cache(layer: Attention) -> torch.Tensor:
    """Return a cache of finite numbers: what is computed must not depend on who was there."""
    cache = layer.allocate(1 + max(SIZES) * BLOCKS_EACH)
    generator = torch.Generator().manual_seed(7)
    return cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype))


def table_of(num_reqs: int) -> torch.Tensor:
    order = torch.randperm(max(SIZES) * BLOCKS_EACH, generator=torch.Generator().manual_seed(3))
    return (1 + order.int()).reshape(max(SIZES), BLOCKS_EACH)[:num_reqs]


def rows_of(layer: Attention, num_reqs: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_reqs, HEADS + 2 * KV_HEADS, SIZE, generator=generator)
    rows = rows.to(device=layer.device, dtype=layer.spec.dtype)
    return tuple(rows.tensor_split((HEADS, HEADS + KV_HEADS), dim=1))


def hold_to_reference(
    layer: Attention,
    output: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: Sequence[int],
) -> None:
    """Compare a step with the reference over what the cache holds after it."""
    views = layer.kv_cache_spec.split(cache.cpu())  # type: ignore[union-attr]
    call: dict[str, Any] = {
        "query": query.cpu(),
        "key_cache": views.key,
        "value_cache": views.value,
        "options": AttentionOptions(scale=layer.spec.scale, window=layer.spec.window),
        "query_start_loc": torch.arange(len(seq_lens) + 1, dtype=torch.int32),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "block_table": table_of(len(seq_lens)),
    }
    report = check_against_reference(
        output.cpu(),
        None,
        paged_attention(**call),
        eager_attention(**call),
        dtype=layer.spec.dtype,
    )
    assert report.ok, f"{seq_lens}: {report}"


def hold_written(
    layer: Attention,
    cache: torch.Tensor,
    before: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    seq_lens: Sequence[int],
) -> None:
    """The step's keys and values lie in their slots, and nothing else was written."""
    spec = layer.kv_cache_spec
    table = table_of(len(seq_lens))
    expected = spec.split(before)  # type: ignore[union-attr]
    for request, length in enumerate(seq_lens):
        block, offset = table[request, (length - 1) // BLOCK], (length - 1) % BLOCK
        expected.key[block, offset] = new[0][request]
        expected.value[block, offset] = new[1][request]
    assert torch.equal(cache, before)


def run_steps(graphs: Any, layer: Attention, cache: torch.Tensor) -> None:
    for seed, seq_lens in enumerate(STEPS):
        query, key, value = rows_of(layer, len(seq_lens), seed)
        before = cache.clone()
        output = graphs.run(query, key, value, seq_lens, table_of(len(seq_lens)))
        hold_to_reference(layer, output, query, cache, seq_lens)
        hold_written(layer, cache, before, (key, value), seq_lens)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION", "CPU_ATTN"])
@pytest.mark.parametrize("options", [{}, {"window": (20, 0)}], ids=["plain", "window"])
def test_padded_steps_answer_as_the_reference(
    example: ModuleType, backend: str, options: dict[str, Any]
) -> None:
    layer = layer_on("cpu", backend, dtype=torch.float32, **options)
    cache = filled_cache(layer)
    graphs = example.DecodeGraphs(layer, cache, SIZES, LONGEST)
    assert not graphs.is_captured
    run_steps(graphs, layer, cache)


def test_a_batch_larger_than_every_size_is_refused(example: ModuleType) -> None:
    layer = layer_on("cpu", "TORCH_SDPA", dtype=torch.float32)
    graphs = example.DecodeGraphs(layer, layer.allocate(1), (1, 2), LONGEST)
    query, key, value = rows_of(layer, 3, 0)
    with pytest.raises(AttnError, match="num_reqs is 3; allowed: at most 2"):
        graphs.run(query, key, value, [1, 1, 1], table_of(3))


def test_the_example_runs(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["TORCH_SDPA"]) == 0
    assert "39 steps of 1 to 8 requests" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ON_CUDA)
@pytest.mark.parametrize("options", [{}, {"window": (20, 0)}], ids=["plain", "window"])
def test_replays_answer_as_the_reference(
    example: ModuleType, backend: str, options: dict[str, Any]
) -> None:
    layer = layer_on("cuda", backend, dtype=torch.bfloat16, **options)
    cache = filled_cache(layer)
    graphs = example.DecodeGraphs(layer, cache, SIZES, LONGEST)
    assert graphs.is_captured
    run_steps(graphs, layer, cache)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let torch raise an error for each synchronisation that it sees."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # it says that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ON_CUDA)
def test_a_replayed_step_waits_for_nothing(example: ModuleType, backend: str) -> None:
    layer = layer_on("cuda", backend, dtype=torch.bfloat16)
    cache = filled_cache(layer)
    graphs = example.DecodeGraphs(layer, cache, SIZES, LONGEST)
    query, key, value = rows_of(layer, 3, 0)
    graphs.run(query, key, value, [5, 6, 7], table_of(3))
    torch.cuda.synchronize()
    with no_synchronisation():
        output = graphs.run(query, key, value, [6, 7, 8], table_of(3))
    hold_to_reference(layer, output, query, cache, [6, 7, 8])


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ON_CUDA)
def test_replays_take_no_more_memory(example: ModuleType, backend: str) -> None:
    layer = layer_on("cuda", backend, dtype=torch.bfloat16)
    cache = filled_cache(layer)
    graphs = example.DecodeGraphs(layer, cache, SIZES, LONGEST)
    taken = []
    for length in range(10, 20):
        query, key, value = rows_of(layer, 3, length)
        graphs.run(query, key, value, [length] * 3, table_of(3))
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    assert len(set(taken[2:])) == 1


@pytest.mark.cuda
def test_what_may_not_be_captured_runs_without(example: ModuleType) -> None:
    layer = layer_on("cuda", "TORCH_SDPA", dtype=torch.bfloat16)
    level = layer.builder.get_cudagraph_support(layer.config, layer.kv_cache_spec)
    assert level is AttentionCGSupport.NEVER
    cache = filled_cache(layer)
    graphs = example.DecodeGraphs(layer, cache, SIZES, LONGEST)
    assert not graphs.is_captured
    run_steps(graphs, layer, cache)
