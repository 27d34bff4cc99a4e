from __future__ import annotations

import pytest
import torch
from attn_shared_fakes import GPU, FakeBackend, FakeBuilder, backend, capability, request

from attn_shared import backend as backend_module
from attn_shared.backend import AttentionBackend, AttentionCGSupport, AttentionType
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import BackendDefinitionError, UnsupportedOptionError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from attn_shared.limits import MultipleOf
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig, LayerSpec

NOTHING = Inventory()


def served(device: DeviceFacts, inventory: Inventory) -> Capability:
    return capability(
        kv_cache_dtypes=frozenset({"auto", "fp8"}),
        block_sizes=(16, MultipleOf(24)),
        preferred_block_size=48,
        kv_layouts=(KVCacheLayout.HND,),
    )


TESTED = backend("TESTED", served)


def test_views_answer_from_the_capability() -> None:
    assert TESTED.get_name() == "TESTED"
    assert TESTED.full_cls_name() == ("attn_shared_fakes", "TESTED")
    assert TESTED.is_mla(GPU, NOTHING) is False
    assert TESTED.supports_head_size(64, GPU, NOTHING)
    assert not TESTED.supports_head_size(65, GPU, NOTHING)
    assert TESTED.supports_dtype(torch.float16, GPU, NOTHING)
    assert not TESTED.supports_dtype(torch.float32, GPU, NOTHING)
    assert TESTED.supports_kv_cache_dtype("fp8", GPU, NOTHING)
    assert not TESTED.supports_kv_cache_dtype("nvfp4", GPU, NOTHING)
    assert TESTED.supports_block_size(72, GPU, NOTHING)
    assert not TESTED.supports_block_size(40, GPU, NOTHING)
    assert TESTED.supports_attn_type(AttentionType.DECODER, GPU, NOTHING)
    assert not TESTED.supports_attn_type(AttentionType.ENCODER, GPU, NOTHING)
    assert TESTED.get_supported_kernel_block_sizes(GPU, NOTHING) == (16, MultipleOf(24))
    assert TESTED.get_preferred_block_size(GPU, NOTHING) == 48
    assert TESTED.get_preferred_block_size(GPU, NOTHING, 32) == 32
    assert TESTED.get_preferred_block_size(GPU, NOTHING, 15) == 48
    assert TESTED.validate_configuration(request(), GPU, NOTHING) == ()
    reasons = TESTED.validate_configuration(request(has_sinks=True), GPU, NOTHING)
    assert [reason.code for reason in reasons] == ["sink"]


def test_a_layout_is_required_where_it_is_the_only_one() -> None:
    assert TESTED.get_required_kv_cache_layout(GPU, NOTHING) is KVCacheLayout.HND
    both = backend("BOTH", lambda device, _: capability(kv_layouts=tuple(KVCacheLayout)))
    assert both.get_required_kv_cache_layout(GPU, NOTHING) is None


def test_cache_shapes_are_the_specs() -> None:
    full = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.float16
    )
    latent = MLAAttentionSpec(block_size=64, head_size=576, kv_lora_rank=512, dtype=torch.float16)
    assert TESTED.get_kv_cache_shape(full, 5) == (5, 2, 16, 2, 64)
    assert TESTED.get_kv_cache_shape(latent, 5) == (5, 64, 576)
    state = MambaSpec(block_size=1, shapes=((2,),), dtypes=(torch.float32,))
    with pytest.raises(UnsupportedOptionError, match="MambaSpec has no paged cache"):
        TESTED.get_kv_cache_shape(state, 5)


@pytest.mark.parametrize("view", ["supports_head_size", "get_name", "validate_configuration"])
def test_a_view_is_not_overridden(view: str) -> None:
    # Code of the field overrides these; selection would not see it.
    with pytest.raises(BackendDefinitionError) as caught:
        type("Ported", (FakeBackend,), {view: classmethod(lambda cls, *args: True)})
    assert str(caught.value).startswith(f"Ported overrides {view}, which follows from capability.")


def test_what_a_backend_must_say_is_its_own() -> None:
    assert AttentionBackend.__abstractmethods__ == {
        "capability",
        "get_impl_cls",
        "get_builder_cls",
    }
    FakeBackend.load_vendor(GPU, NOTHING)
    assert FakeBackend.vendor_libraries == ()
    assert FakeBackend.vendor_specs == ()
    assert FakeBackend.auto_priority is None
    assert FakeBackend.forward_includes_kv_cache_update is False


def test_graph_levels_are_ordered() -> None:
    names = [level.name for level in sorted(AttentionCGSupport)]
    assert names == ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]


@pytest.fixture
def builder() -> FakeBuilder:
    layers = {"layer.0": LayerSpec.from_request(request(), scale=0.125)}
    return FakeBuilder(None, layers, BuildConfig(max_num_seqs=4), torch.device("cpu"))


@pytest.fixture
def batch() -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(query_lens=[1, 3], seq_lens=[5, 3], device="cpu")


def test_a_builder_keeps_what_every_step_needs(builder: FakeBuilder) -> None:
    assert list(builder.layers) == ["layer.0"]
    assert builder.config.max_num_seqs == 4
    assert builder.kv_cache_spec is None
    assert builder.device == torch.device("cpu")
    assert builder.reorder_batch_threshold is None


def test_a_builder_that_declares_nothing_promises_nothing(
    builder: FakeBuilder, batch: CommonAttentionMetadata
) -> None:
    assert builder.get_cudagraph_support(builder.config, None) is AttentionCGSupport.NEVER
    assert builder.use_cascade_attention(4096, [1] * 64, 132) is False
    assert not builder.supports_update_block_table
    with pytest.raises(UnsupportedOptionError, match="FakeBuilder has no update_block_table"):
        builder.update_block_table("m", torch.zeros(2, 1), torch.zeros(4))


def test_capture_and_drafts_build_without_a_prefix(
    builder: FakeBuilder, batch: CommonAttentionMetadata
) -> None:
    assert builder.build(16, batch) == "prefix 16, fast False"
    assert builder.build_for_cudagraph_capture(batch) == "prefix 0, fast False"
    assert builder.build_for_drafting(batch, 2) == "prefix 0, fast True"


def test_the_module_gives_all_that_an_author_needs() -> None:
    assert set(backend_module.__all__) >= {
        "AttentionBackend",
        "AttentionImpl",
        "AttentionMetadataBuilder",
        "MLAAttentionImpl",
        "MultipleOf",
        "SparseMLAAttentionImpl",
    }
    assert all(hasattr(backend_module, name) for name in backend_module.__all__)
