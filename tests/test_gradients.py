"""One rule for gradients on every backend of a CPU: a call that asks for one is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mla_cases import case
from mla_cases import layer as mla_layer
from torch.autograd import forward_ad

from attn_shared import ops
from attn_shared.context_parallel import cp_lse_ag_out_rs, dcp_a2a_lse_reduce
from attn_shared.errors import AttnError, UnsupportedOptionError
from attn_shared.layer import Attention, StepPlan
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla import MLAAttention
from attn_shared.request import AttentionType

BACKENDS = ("TORCH_SDPA", "FLEX_ATTENTION", "CPU_ATTN")
MLA_BACKENDS = ("TORCH_MLA", "CPU_MLA")
jvp_warns = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
LENS, TOKENS, HEADS, SIZE = (1, 3), 4, 4, 64


def built(make: Callable[[], Any]) -> Any:
    """Return a layer, or skip the test with the selector's reason."""
    try:
        return make()
    except AttnError as error:
        pytest.skip(error.message.splitlines()[0])


def layer_of(backend: str, **options: Any) -> Attention:
    sizes: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": 2, "head_size": SIZE}
    made: Attention = built(
        lambda: Attention(**sizes, dtype=torch.float32, backend=backend, **options)
    )
    return made


def planned(layer: Attention) -> StepPlan:
    block_size = layer.selection.block_size
    common = CommonAttentionMetadata.from_lengths(
        query_lens=LENS,
        seq_lens=(9, 3),
        block_table=torch.tensor([[1], [0]], dtype=torch.int32),
        block_size=block_size,
    )
    return layer.plan(common)


def states() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = {"query": HEADS, "key": 2, "value": 2}
    return {
        name: torch.randn(TOKENS, count, SIZE, generator=generator) for name, count in heads.items()
    }


def run(layer: Attention, tensors: dict[str, torch.Tensor], cache: torch.Tensor) -> torch.Tensor:
    query, key, value = tensors.values()
    return layer.forward(query, key, value, cache, planned(layer))


def encode(layer: Attention, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    query, key, value = tensors.values()
    return layer.encode(query, key, value, LENS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_tensor_that_requires_a_gradient_is_refused_by_name(backend: str, name: str) -> None:
    layer, tensors = layer_of(backend), states()
    cache = layer.allocate(2)
    tensors[name].requires_grad_()
    with pytest.raises(UnsupportedOptionError, match=f"^{name} requires a gradient") as caught:
        run(layer, tensors, cache)
    words = str(caught.value)
    assert backend in words
    assert "torch.inference_mode() or torch.no_grad()" in words
    assert "detach the tensor" in words
    assert not cache.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_same_call_runs_where_gradients_are_off(backend: str, mode: Callable[[], Any]) -> None:
    layer, tensors = layer_of(backend), states()
    expected = run(layer, tensors, layer.allocate(2))
    for tensor in tensors.values():
        tensor.requires_grad_()
    with mode():
        output = run(layer, tensors, layer.allocate(2))
    assert torch.equal(output, expected)
    assert not output.requires_grad


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "CPU_ATTN"])
def test_the_layers_own_tensors_count(backend: str) -> None:
    sinks = torch.zeros(HEADS, requires_grad=True)
    layer = layer_of(backend, sinks=sinks)
    with pytest.raises(UnsupportedOptionError, match=r"^the layer's sinks requires a gradient"):
        run(layer, states(), layer.allocate(2))
    scale = torch.tensor(0.5, requires_grad=True)
    layer = layer_of(backend, k_scale=scale, kv_cache_dtype="fp8")
    with pytest.raises(UnsupportedOptionError, match=r"^the layer's k_scale requires"):
        run(layer, states(), layer.allocate(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_without_a_cache(backend: str) -> None:
    layer, tensors = layer_of(backend, attn_type=AttentionType.ENCODER_ONLY), states()
    tensors["query"].requires_grad_()
    with pytest.raises(UnsupportedOptionError, match=r"^query requires a gradient"):
        encode(layer, tensors)


def test_what_is_written_to_counts() -> None:
    layer, tensors = layer_of("TORCH_SDPA"), states()
    cache, output = layer.allocate(2), torch.zeros(TOKENS, HEADS, SIZE)
    forward: Callable[..., torch.Tensor] = layer.forward
    for name, tensor in (("kv_cache", cache), ("output", output)):
        tensor.requires_grad_()
        with pytest.raises(UnsupportedOptionError, match=f"^{name} requires a gradient"):
            forward(*tensors.values(), cache, planned(layer), output)
        tensor.requires_grad_(False)


def test_a_backend_that_declares_it_is_left_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of("TORCH_SDPA", attn_type=AttentionType.ENCODER_ONLY)
    monkeypatch.setattr(type(layer.impl), "differentiates", True)
    tensors = states()
    tensors["query"].requires_grad_()
    assert encode(layer, tensors).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_refuse_when_they_are_traced(backend: str) -> None:
    layer, tensors = layer_of(backend), states()
    cache = layer.allocate(2)

    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return ops.attend(layer, query * 2, key, value, cache)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ops.step(planned(layer)):
        expected = model(*tensors.values())
        assert torch.equal(compiled(*tensors.values()), expected)
        before = cache.clone()
        tensors["query"].requires_grad_()
        with pytest.raises(UnsupportedOptionError, match=r"^query requires a gradient"):
            model(*tensors.values())
        # Whatever torch raises for an error while it traces: never an output without a gradient.
        with pytest.raises(Exception, match=r"UnsupportedOptionError|requires a gradient"):
            compiled(*tensors.values())
        assert torch.equal(cache, before)
        with torch.no_grad():
            assert torch.equal(compiled(*tensors.values()), expected)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "CPU_ATTN"])
def test_compiled_layers_with_tensors_of_their_own(backend: str) -> None:
    layer, tensors = layer_of(backend, sinks=torch.zeros(HEADS, requires_grad=True)), states()
    cache = layer.allocate(2)

    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return ops.attend(layer, query * 2, key, value, cache)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ops.step(planned(layer)):
        with pytest.raises(Exception, match=r"UnsupportedOptionError|requires a gradient"):
            compiled(*tensors.values())
        assert not cache.any()
        with torch.no_grad():
            compiled(*tensors.values())


def test_compiled_layers_with_a_scale_that_requires_one() -> None:
    scale = torch.tensor(0.5, requires_grad=True)
    layer, tensors = layer_of("CPU_ATTN", k_scale=scale, kv_cache_dtype="fp8"), states()
    cache = layer.allocate(2)
    graphs: list[torch.fx.GraphModule] = []

    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return ops.attend(layer, query * 2, key, value, cache)

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=keep)
    with ops.step(planned(layer)):
        with pytest.raises(Exception, match=r"UnsupportedOptionError|requires a gradient"):
            compiled(*tensors.values())
        assert not cache.view(torch.uint8).any()
        with torch.no_grad():
            compiled(*tensors.values())
        graphs.clear()
        for layer.k_scale in (0.25, 0.5, 0.75):  # other numbers trace nothing again
            compiled(*tensors.values())
    assert len(graphs) == 1


@jvp_warns
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_tangents_are_refused_with_and_without_gradients(
    backend: str, mode: Callable[[], Any], name: str
) -> None:
    layer, tensors = layer_of(backend), states()
    cache = layer.allocate(2)
    words = f"^{name} carries a tangent"
    with mode(), forward_ad.dual_level():
        run(layer, tensors, layer.allocate(2))  # none of its tensors has one
        plain = tensors[name]
        tensors[name] = forward_ad.make_dual(plain, torch.ones_like(plain))
        with pytest.raises(UnsupportedOptionError, match=words) as caught:
            run(layer, tensors, cache)
        assert "no_grad" not in str(caught.value)  # which leaves tangents on
        with torch.inference_mode():  # which carries none along, through no op
            run(layer, tensors, layer.allocate(2))

    def call(state: torch.Tensor) -> torch.Tensor:
        return run(layer, tensors | {name: state}, cache)

    with mode(), pytest.raises(UnsupportedOptionError, match=words):
        torch.func.jvp(call, (plain,), (torch.ones_like(plain),))
    assert not cache.any()


@jvp_warns
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev])
def test_transforms_of_functions_are_refused(transform: Callable[..., Any]) -> None:
    layer, tensors = layer_of("CPU_ATTN"), states()
    cache = layer.allocate(2)
    query = tensors["query"]
    call = transform(lambda state: run(layer, tensors | {"query": state}, cache).sum())
    with pytest.raises(UnsupportedOptionError, match=r"^query (requires a|carries a)"):
        call(query)
    assert not cache.any()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_no_gradient() -> None:
    layer, tensors = layer_of("TORCH_SDPA"), states()
    expected = run(layer, tensors, layer.allocate(2))
    cache = layer.allocate(2)
    found = torch.vmap(lambda query: run(layer, tensors | {"query": query}, cache))(
        tensors["query"].expand(2, -1, -1, -1)
    )
    torch.testing.assert_close(found, expected.expand(2, -1, -1, -1))


@pytest.mark.parametrize("backend", MLA_BACKENDS)
@pytest.mark.parametrize("name", ["query", "latent", "rope"])
def test_latents(backend: str, name: str) -> None:
    attn: MLAAttention = built(lambda: mla_layer(backend=backend))
    step = case(attn, [1, 12], [20, 12])
    before = step.kv_cache.clone()
    tensors = {"query": step.query, "latent": step.latent, "rope": step.rope}
    tensors[name] = tensors[name].clone().requires_grad_()
    query, latent, rope = tensors.values()
    plan = attn.plan(step.common)
    with pytest.raises(UnsupportedOptionError, match=f"^{name} requires a gradient"):
        attn.forward(query, latent, rope, step.kv_cache, plan)
    with ops.step(plan), pytest.raises(UnsupportedOptionError, match=f"^{name} requires"):
        ops.attend_latents(attn, query, latent, rope, step.kv_cache)
    assert torch.equal(step.kv_cache, before)
    with torch.no_grad():
        attn.forward(query, latent, rope, step.kv_cache, plan)


def test_the_up_projection_counts() -> None:
    attn: MLAAttention = mla_layer()
    step = case(attn, [1, 1], [5, 9])
    assert attn.kv_b_proj is not None
    attn.kv_b_proj = attn.kv_b_proj.clone().requires_grad_()
    with pytest.raises(UnsupportedOptionError, match="the layer's kv_b_proj requires a gradient"):
        attn.forward(step.query, step.latent, step.rope, step.kv_cache, attn.plan(step.common))


def test_absorbed_decodes() -> None:
    attn: MLAAttention = mla_layer()
    step = case(attn, [1, 1], [5, 9])
    query = torch.zeros(2, attn.spec.num_heads, attn.spec.head_size, requires_grad=True)
    plan = attn.plan(step.common)
    with pytest.raises(UnsupportedOptionError, match=r"^query requires a gradient"):
        attn.decode(query, step.kv_cache, plan)


@pytest.mark.parametrize("combine", [cp_lse_ag_out_rs, dcp_a2a_lse_reduce])
@pytest.mark.parametrize("name", ["output", "lse", "sinks"])
def test_combines_over_ranks_refuse_before_they_communicate(
    combine: Callable[..., Any], name: str
) -> None:
    tensors = {"output": torch.zeros(3, 2, 4), "lse": torch.zeros(2, 3), "sinks": torch.zeros(2)}
    tensors[name].requires_grad_()
    with pytest.raises(UnsupportedOptionError, match=f"^{name} requires a gradient"):
        combine(group=None, **tensors)
