"""EXAMPLE_EAGER: found by its entry point, taken by name, and right for numbers done by hand."""

from __future__ import annotations

import math

import pytest
import torch

from attn_example_plugin.backend import CAPABILITY, ExampleEagerBackend, attend
from attn_shared.device import preset
from attn_shared.errors import AttnError, BackendRejectedError
from attn_shared.inventory import Inventory
from attn_shared.layer import Attention
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.request import AttentionRequest
from attn_shared.selection import Policy
from attn_shared.selector import select
from attn_shared.spec import LayerSpec

PLAIN = {"num_heads": 1, "num_kv_heads": 1, "head_size": 1, "head_size_v": 1, "scale": 1.0}


def spec(**options: object) -> LayerSpec:
    return LayerSpec(**{**PLAIN, "dtype": torch.float32, **options})  # type: ignore[arg-type]


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).reshape(-1, 1, 1)


def test_its_entry_point_is_found() -> None:
    registration = DEFAULT_REGISTRY.get("EXAMPLE_EAGER")

    assert registration.source == "attn-example-plugin 0.1.0"
    assert DEFAULT_REGISTRY.load("EXAMPLE_EAGER") is ExampleEagerBackend


def test_it_is_taken_by_name_and_never_by_itself() -> None:
    request = AttentionRequest(num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float32)
    device, inventory = preset("genericcpu"), Inventory()

    named = select(request, device, inventory, Policy(backend="EXAMPLE_EAGER"))
    assert named.backend_cls is ExampleEagerBackend
    assert select(request, device, inventory, Policy()).chosen != "EXAMPLE_EAGER"


def test_what_it_does_not_serve_is_rejected_with_a_reason() -> None:
    request = AttentionRequest(
        num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float32, has_sinks=True
    )

    with pytest.raises(BackendRejectedError, match="sink=True"):
        select(request, preset("genericcpu"), Inventory(), Policy(backend="EXAMPLE_EAGER"))


def test_a_row_weighs_the_keys_up_to_its_own() -> None:
    # Row 0 sees key 0 alone. Row 1 has logits 2 * (0, ln 3) and so weighs the values 1 : 9.
    output = attend(column(5, 2), column(0, math.log(3)), column(10, 20), spec())

    assert output.flatten().tolist() == pytest.approx([10, 19])


def test_a_window_of_one_key_beside_the_own_hides_the_first() -> None:
    output = attend(column(0), column(1, 1, 1), column(100, 3, 5), spec(window=(1, 0)))

    assert output.item() == pytest.approx(4)


def test_heads_of_a_group_read_one_kv_head() -> None:
    # One key, so that every head returns its kv head's value.
    query, value = torch.zeros(1, 6, 1), torch.tensor([7.0, 8.0]).reshape(1, 2, 1)
    layer = spec(num_heads=6, num_kv_heads=2)

    output = attend(query, torch.zeros(1, 2, 1), value, layer)

    assert output.flatten().tolist() == [7, 7, 7, 8, 8, 8]


def test_no_key_gives_zeros() -> None:
    output = attend(torch.ones(2, 1, 1), torch.ones(0, 1, 1), torch.ones(0, 1, 1), spec())

    assert output.flatten().tolist() == [0, 0]


def test_it_runs_as_a_layer_of_a_user_without_an_engine() -> None:
    attention = Attention(
        num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, backend="EXAMPLE_EAGER"
    )
    kv_cache = attention.allocate(num_blocks=4)
    assert attention.kv_cache_spec is not None
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[3],
        seq_lens=[3],
        block_table=torch.tensor([[2]]),
        block_size=attention.kv_cache_spec.block_size,
    )
    query, value = torch.randn(3, 4, 8), torch.randn(3, 2, 8)

    output = attention.forward(query, torch.randn(3, 2, 8), value, kv_cache, attention.plan(common))

    # The first row sees its own value alone.
    torch.testing.assert_close(output[0], value[0].repeat_interleave(2, dim=0))


def test_it_says_no_by_name() -> None:
    with pytest.raises(AttnError, match="kv_cache_spec=None"):
        ExampleEagerBackend.get_impl_cls()(spec())


def test_of_all_features_it_serves_windows() -> None:
    features = CAPABILITY.to_dict()["features"]

    assert [name for name, how in features.items() if how != "no"] == ["window"]
