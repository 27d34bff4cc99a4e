"""The three classes together, as vLLM uses them, against the float64 reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_stand_in import GraphLevel, MultipleOf, StandIn, batch, layer_with

from attn_shared.errors import BackendRejectedError, InvalidInputError, UnsupportedOptionError
from attn_shared.reference import AttentionOptions, paged_attention, varlen_attention
from attn_vllm._vendor import classes
from attn_vllm.impl import CALLS

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 32, 0.2
VERSIONS = ["0.25.1", "0.32.0"]


@pytest.fixture(params=VERSIONS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TORCH_SDPA")
    found = StandIn(request.param, "cpu")
    found.install(monkeypatch)
    return found


def impl(**options: Any) -> Any:
    fields = {"num_kv_heads": KV_HEADS, **options}
    return classes.impl_class()(HEADS, WIDTH, SCALE, **fields)


def builder(engine: StandIn, layers: dict[str, Any], block_size: int | None) -> Any:
    context = engine.config.compilation_config.static_forward_context
    context.update(layers)
    spec = SimpleNamespace() if block_size is None else SimpleNamespace(block_size=block_size)
    device = torch.device("cpu")
    return classes.builder_class()(spec, list(layers), engine.config, device)


def cache_of(engine: StandIn, num_blocks: int, block_size: int) -> torch.Tensor:
    """A cache as the release allocates it, full of what nobody may read."""
    if engine.version.startswith("0.25"):
        backend = classes.backend_class()
        shape = backend.get_kv_cache_shape(num_blocks, block_size, KV_HEADS, WIDTH)
        order = backend.get_kv_cache_stride_order()
        physical = torch.full([shape[dim] for dim in order], torch.nan)
        return physical.permute([order.index(dim) for dim in range(len(shape))])
    return torch.full((num_blocks, KV_HEADS, block_size, 2 * WIDTH), torch.nan)


def inputs(num_tokens: int, padding: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    return tuple(
        torch.randn(num_tokens + padding, heads, WIDTH, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def run_two_steps(engine: StandIn, layer: Any, **source: Any) -> tuple[torch.Tensor, ...]:
    """Write whole prompts, then run a mixed batch over them."""
    size = 16
    made = builder(engine, {"layer.0": layer}, size)
    lengths = [37, 5, 20]
    first = batch(lengths, lengths, size)
    cache = cache_of(engine, first.num_blocks, size)
    _, key, value = inputs(sum(lengths))
    layer.impl.do_kv_cache_update(layer, key, value, cache, first.slot_mapping)
    second = batch([1, 5, 4], lengths, size, padding=2)
    vars(second).update(source)
    query, key, value = inputs(10, padding=2)
    layer.impl.do_kv_cache_update(layer, key, value, cache, second.slot_mapping)
    output = torch.full((12, HEADS, WIDTH), 99.0)
    step = made.build(0, second)
    returned = layer.impl.forward(layer, query, key, value, cache, step, output)
    assert returned is output
    views = layer.impl.bound.cache.split(_described(layer, cache))
    return query, views.key, views.value, output, step


def _described(layer: Any, cache: torch.Tensor) -> torch.Tensor:
    from attn_vllm.caches import view_cache

    return view_cache(cache, layer.impl.bound.cache)


def expect(layer: Any, options: AttentionOptions, run: tuple[Any, ...], **more: Any) -> None:
    query, keys, values, output, step = run
    common = step.common
    arguments = {
        "query_start_loc": common.query_start_loc,
        "seq_lens": common.seq_lens,
        "block_table": common.block_table,
        **more,
    }
    count = common.num_actual_tokens
    reference = paged_attention(query[:count], keys, values, options, **arguments)
    torch.testing.assert_close(
        output[:count].double(), reference.output.double(), rtol=1e-5, atol=1e-5
    )


def test_a_mixed_batch_is_right(engine: StandIn) -> None:
    layer = layer_with(impl())
    before = CALLS["TORCH_SDPA"]
    run = run_two_steps(engine, layer)
    expect(layer, AttentionOptions(scale=SCALE), run)
    assert CALLS["TORCH_SDPA"] == before + 1


def test_options_reach_the_kernel(engine: StandIn) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    layer = layer_with(impl(sliding_window=7, logits_soft_cap=3.0, sinks=sinks.bfloat16()))
    run = run_two_steps(engine, layer)
    options = AttentionOptions(scale=SCALE, window=(6, 0), softcap=3.0, sinks=sinks)
    expect(layer, options, run)


def test_slopes_reach_the_kernel(engine: StandIn) -> None:
    slopes = [0.5, 0.25, 0.125, 0.0625]
    layer = layer_with(impl(alibi_slopes=slopes))
    run = run_two_steps(engine, layer)
    expect(layer, AttentionOptions(scale=SCALE, alibi_slopes=torch.tensor(slopes)), run)


def test_layers_of_two_kinds_share_a_group(engine: StandIn) -> None:
    layers = {"a": layer_with(impl()), "b": layer_with(impl(sliding_window=4))}
    made = builder(engine, layers, 16)
    source = batch([9], [9], 16)
    step = made.build(0, source)
    assert len(step.plans) == 2
    query, key, value = inputs(9)
    for name, window in (("a", None), ("b", 3)):
        layer, cache = layers[name], cache_of(engine, source.num_blocks, 16)
        layer.impl.do_kv_cache_update(layer, key, value, cache, source.slot_mapping)
        output = torch.empty(9, HEADS, WIDTH)
        layer.impl.forward(layer, query, key, value, cache, step, output)
        exact = varlen_attention(
            query,
            key,
            value,
            AttentionOptions(scale=SCALE, window=(window, 0 if window else None)),
            query_start_loc=source.query_start_loc,
            causal=True,
        )
        torch.testing.assert_close(output.double(), exact.output, rtol=1e-5, atol=1e-5)


def test_an_encoder_needs_no_cache(engine: StandIn) -> None:
    layer = layer_with(impl(attn_type="encoder_only"))
    made = builder(engine, {"encoder": layer}, None)
    source = batch([6, 3], [6, 3], 16)
    query, key, value = inputs(9)
    output = torch.empty(9, HEADS, WIDTH)
    placeholder = torch.tensor([])
    layer.impl.do_kv_cache_update(layer, key, value, placeholder, source.slot_mapping)
    layer.impl.forward(layer, query, key, value, placeholder, made.build(0, source), output)
    exact = varlen_attention(
        query,
        key,
        value,
        AttentionOptions(scale=SCALE),
        query_start_loc=source.query_start_loc,
        causal=False,
    )
    torch.testing.assert_close(output.double(), exact.output, rtol=1e-5, atol=1e-5)


def test_a_profiling_run_gives_zeros(engine: StandIn) -> None:
    layer = layer_with(impl())
    query, key, value = inputs(3)
    output = torch.full((3, HEADS, WIDTH), torch.nan)
    layer.impl.forward(layer, query, key, value, torch.tensor([]), None, output)
    assert output.count_nonzero() == 0


def test_a_quantised_output_is_refused(engine: StandIn) -> None:
    layer = layer_with(impl())
    query, key, value = inputs(3)
    with pytest.raises(UnsupportedOptionError, match="output_scale"):
        layer.impl.forward(
            layer, query, key, value, torch.tensor([]), None, query, output_scale=torch.ones(1)
        )


def test_a_layer_without_a_cache_yet_is_refused(engine: StandIn) -> None:
    layer = layer_with(impl())
    query, key, value = inputs(3)
    with pytest.raises(InvalidInputError, match="not yet bound"):
        layer.impl.do_kv_cache_update(layer, key, value, query, torch.zeros(3).long())


def test_a_cache_format_that_the_backend_lacks_ends_the_start(engine: StandIn) -> None:
    with pytest.raises(BackendRejectedError, match="int4_per_token_head"):
        impl(kv_cache_dtype="int4_per_token_head")


def test_a_backend_of_other_devices_ends_the_start(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "FLASH_ATTN")
    with pytest.raises(BackendRejectedError, match="FLASH_ATTN"):
        impl()


def test_scales_of_fp8_are_the_layer_s(engine: StandIn) -> None:
    layer = layer_with(impl(kv_cache_dtype="fp8_e4m3"), _k_scale_float=0.5, _v_scale_float=0.25)
    made = builder(engine, {"layer.0": layer}, 16)
    source = batch([7], [7], 16)
    cache = cache_of(engine, source.num_blocks, 16).nan_to_num().to(torch.uint8)
    query, key, value = inputs(7)
    layer.impl.do_kv_cache_update(layer, key, value, cache, source.slot_mapping)
    output = torch.empty(7, HEADS, WIDTH)
    layer.impl.forward(layer, query, key, value, cache, made.build(0, source), output)
    views = layer.impl.bound.cache.split(_described(layer, cache))
    exact = paged_attention(
        query,
        views.key,
        views.value,
        AttentionOptions(scale=SCALE),
        query_start_loc=source.query_start_loc,
        seq_lens=source.seq_lens,
        block_table=source.block_table_tensor,
        k_scale=0.5,
        v_scale=0.25,
    )
    torch.testing.assert_close(output.double(), exact.output, rtol=1e-5, atol=1e-5)


def test_what_vllm_asks_of_the_class(engine: StandIn) -> None:
    backend = classes.backend_class()
    assert backend.get_name() == "CPU_ATTN"
    assert backend.supports_head_size(80)
    assert backend.supports_sink()
    assert not backend.supports_kv_cache_dtype("nvfp4")
    assert not backend.supports_attn_type("encoder_decoder")
    (size,) = backend.get_supported_kernel_block_sizes()
    assert isinstance(size, MultipleOf)
    assert size.base == 16
    served = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    assert backend.validate_configuration(**served) == []
    (reason,) = backend.validate_configuration(**{**served, "kv_cache_dtype": "nvfp4"})
    assert "nvfp4" in reason


def test_graph_levels_are_vllm_s(engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = classes.builder_class()
    assert isinstance(kind.get_cudagraph_support(engine.config, None), GraphLevel)
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "auto")
    assert kind.get_cudagraph_support(engine.config, None) is GraphLevel.NEVER
