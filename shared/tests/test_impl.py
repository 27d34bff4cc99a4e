from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attn_shared_fakes import FakeImpl, request

from attn_shared.backend import AttentionImpl, MLAAttentionImpl, SparseMLAAttentionImpl
from attn_shared.errors import MLAForwardError, UnsupportedOptionError
from attn_shared.kv_cache import spec_for
from attn_shared.request import MLADims
from attn_shared.spec import LayerSpec


class Latent(MLAAttentionImpl[str]):
    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        return None

    def forward_mqa(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(1)


class Sparse(SparseMLAAttentionImpl[str]):
    def forward_mqa(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(1)


def layer(k_scale: float = 1.0, v_scale: float = 1.0) -> Any:
    return SimpleNamespace(q_scale=1.0, k_scale=k_scale, v_scale=v_scale)


def spec(*, cached: bool = True, **options: Any) -> LayerSpec:
    asked = request(dtype="float32", **options)
    cache = spec_for(asked, block_size=2) if cached else None
    return LayerSpec.from_request(asked, scale=0.125, kv_cache_spec=cache)


def latent_spec(**options: Any) -> LayerSpec:
    dims = MLADims(kv_lora_rank=2, qk_rope_head_dim=1)
    return spec(mla=dims, num_kv_heads=1, head_size=3, **options)


def test_an_impl_promises_only_what_it_declares() -> None:
    impl = FakeImpl(spec())
    assert impl.can_return_lse is False
    assert impl.lse_base_on_e is True
    assert impl.supports_pcp is False
    assert impl.spec == spec()
    with pytest.raises(TypeError, match="abstract"):
        AttentionImpl(spec())  # type: ignore[abstract]


def test_keys_and_values_go_to_their_slots_with_the_layers_scales() -> None:
    found = spec(num_heads=1, num_kv_heads=1, head_size=1, kv_cache_dtype="fp8")
    cache = found.kv_cache_spec.allocate(2, "cpu")  # type: ignore[union-attr]
    impl = FakeImpl(found)
    ones = torch.ones(2, 1, 1)
    impl.do_kv_cache_update(layer(0.5, 0.25), ones, ones, cache, torch.tensor([2, -1]))
    assert cache.float().flatten().tolist() == [0, 0, 0, 0, 2, 0, 4, 0]


def test_latents_go_to_their_slots_with_the_layers_scale() -> None:
    found = latent_spec(kv_cache_dtype="fp8")
    cache = found.kv_cache_spec.allocate(2, "cpu")  # type: ignore[union-attr]
    Latent(found).do_kv_cache_update(
        layer(0.5),
        torch.tensor([[1.0, 2.0], [9.0, 9.0]]),
        torch.tensor([[4.0], [9.0]]),
        cache,
        torch.tensor([3, -1]),
    )
    assert cache.float().view(4, 3).tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [2, 4, 8]]


def test_without_a_cache_there_is_nothing_to_write() -> None:
    rows = torch.zeros(1, 2, 64)
    with pytest.raises(UnsupportedOptionError, match="this layer has no paged cache to write"):
        FakeImpl(spec(cached=False)).do_kv_cache_update(
            layer(), rows, rows, rows, torch.tensor([0])
        )
    with pytest.raises(UnsupportedOptionError, match="this layer has no latent cache to write"):
        Latent(latent_spec(cached=False)).do_kv_cache_update(
            layer(), rows, rows, rows, torch.tensor([0])
        )


def test_latent_attention_has_two_calls_and_no_forward() -> None:
    impl = Latent(latent_spec())
    assert not hasattr(impl, "forward")
    with pytest.raises(MLAForwardError) as caught:
        impl.forward  # noqa: B018
    assert str(caught.value) == (
        "Latent has no forward: multi-head latent attention runs prefill and decode by different "
        "products. Hint: call forward_mha for prefill and forward_mqa for decode."
    )


def test_sparse_attention_has_one_call_for_every_phase() -> None:
    with pytest.raises(MLAForwardError, match=r"Sparse has no forward_mha.*forward_mqa with topk"):
        Sparse(latent_spec()).forward_mha(*[None] * 7)  # type: ignore[arg-type]


def test_one_call_stands_for_two_unless_a_subclass_means_its_own() -> None:
    class Both(FakeImpl):
        def write_and_attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(1)

    class OtherWrite(Both):
        def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
            return None

    class OtherBoth(OtherWrite):
        def write_and_attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.ones(1)

    classes = (FakeImpl, Both, OtherWrite, OtherBoth)
    assert [each.has_one_call() for each in classes] == [False, True, False, True]
    tensors = [torch.zeros(1)] * 5
    assert FakeImpl(spec()).write_and_attend(layer(), *tensors, "a step") is None
