"""The builder of every MLA backend: what is a decode, in which order, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from attn_shared.capability import Capability, DeviceLimit, MultipleOf, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.errors import BackendDefinitionError, MetadataError, UnsupportedOptionError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_metadata import MLAMetadata, MLAQuerySupport, RaggedPart
from attn_shared.mla_prefill import MLAPrefill, prefill_capability
from attn_shared.request import MLADims
from attn_shared.spec import BuildConfig, LayerSpec

DIMS = MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)
CPUS = (DeviceLimit(vendor=Vendor.CPU),)
SPEC = MLAAttentionSpec(block_size=4, head_size=24, kv_lora_rank=16, dtype=torch.float32)
LAYER = LayerSpec(
    num_heads=2,
    num_kv_heads=1,
    head_size=24,
    head_size_v=16,
    scale=0.3,
    dtype=torch.float32,
    kv_cache_spec=SPEC,
    mla=DIMS,
)


class Prefill(MLAPrefill):
    """Notes what it prepares."""

    name = "NOTED"
    prepared: ClassVar[list[RaggedPart]] = []

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        return prefill_capability(CPUS, frozenset({torch.float32}))

    def prepare(self, part: RaggedPart) -> int:
        self.prepared.append(part)
        return len(self.prepared)

    def run(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError


class Single(MLAMetadataBuilder[CommonAttentionMetadata]):
    backend_name = "FAKE_MLA"
    served = Capability(
        devices=CPUS,
        dtypes=frozenset({torch.float32}),
        head_sizes=SizeSet(),
        block_sizes=(MultipleOf(1),),
        is_mla=True,
        lse=Support.YES,
        dcp=Support.YES,
    )

    def build_decode(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


class Uniform(Single):
    query_support = MLAQuerySupport.UNIFORM
    decode_threshold = 3


class Varlen(Single):
    query_support = MLAQuerySupport.VARLEN
    decode_threshold = 3
    max_query_len = 8


def builder(
    cls: type[Single], layer: LayerSpec = LAYER, **config: Any
) -> MLAMetadataBuilder[CommonAttentionMetadata]:
    options = {"mla_prefill": Prefill, **config}
    return cls(SPEC, {"layer": layer}, BuildConfig(**options), torch.device("cpu"))


def batch(query_lens: list[int], seq_lens: list[int], **options: Any) -> CommonAttentionMetadata:
    width = max((-(-length // 4) for length in seq_lens), default=1)
    table = torch.arange(len(seq_lens) * width, dtype=torch.int32).view(len(seq_lens), width)
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens, seq_lens=seq_lens, block_table=table, block_size=4, **options
    )


def decodes(metadata: MLAMetadata[CommonAttentionMetadata]) -> list[int]:
    return [] if metadata.decode is None else metadata.decode.query_lens_cpu.tolist()


SPLITS: list[tuple[list[int], list[int], list[int], list[int]]] = [
    # query lengths, then what SINGLE, UNIFORM and VARLEN decode
    ([1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]),
    ([1, 1, 9], [1, 1], [1, 1], [1, 1]),
    ([2, 2, 9], [], [2, 2], [2, 2]),
    ([2, 1, 9], [], [2], [2, 1]),
    ([1, 2, 3, 4], [1], [1], [1, 2, 3]),
    ([4, 4], [], [], []),
    ([1, 0, 1, 0], [1], [1], [1, 0, 1]),
    ([0, 1], [], [], [0, 1]),
    ([0, 0], [], [], []),
    ([], [], [], []),
]


@pytest.mark.parametrize(("lens", "single", "uniform", "varlen"), SPLITS)
def test_what_is_a_decode(
    lens: list[int], single: list[int], uniform: list[int], varlen: list[int]
) -> None:
    common = batch(lens, lens)  # nothing is computed yet, so that no order is asked for
    for cls, expected in ((Single, single), (Uniform, uniform), (Varlen, varlen)):
        metadata = builder(cls).build(0, common)
        assert decodes(metadata) == expected, cls.__name__
        assert (metadata.num_decodes, metadata.num_decode_tokens) == (len(expected), sum(expected))
        assert metadata.num_prefill_tokens == sum(lens) - sum(expected)
        assert (metadata.prefill is None) == (sum(lens) == sum(expected))


@pytest.mark.parametrize(
    ("cls", "config", "threshold"),
    [
        (Single, {"num_spec_tokens": 4}, 1),
        (Uniform, {}, 3),
        (Uniform, {"num_spec_tokens": 4}, 5),
        (Uniform, {"num_spec_tokens": 4, "parallel_drafting": True}, 9),
        (Varlen, {"num_spec_tokens": 4, "parallel_drafting": True}, 8),
    ],
)
def test_drafts_raise_the_threshold_up_to_the_kernels_limit(
    cls: type[Single], config: dict[str, Any], threshold: int
) -> None:
    assert builder(cls, **config).reorder_batch_threshold == threshold


def test_a_batch_of_decodes_is_handed_over_as_it_is() -> None:
    common = batch([1, 1], [5, 9])
    assert builder(Single).build(0, common).decode is common


def test_the_first_rows_of_a_batch_are_views_with_bounds_of_their_own() -> None:
    common = batch([1, 1, 30], [5, 9, 70])
    part = builder(Single).build(0, common).decode
    assert part is not None
    assert (part.num_reqs, part.num_actual_tokens, part.max_query_len) == (2, 2, 1)
    assert part.max_seq_len == 9
    assert common.block_table is not None
    assert part.block_table is not None
    assert part.block_table.data_ptr() == common.block_table.data_ptr()
    assert part.seq_lens.data_ptr() == common.seq_lens.data_ptr()


def test_decodes_need_no_host_lengths_and_prefills_do() -> None:
    unknown = {"seq_lens_cpu": None}
    assert decodes(builder(Single).build(0, batch([1, 1], [5, 9]).with_fields(**unknown))) == [1, 1]
    with pytest.raises(MetadataError, match="seq_lens_cpu is missing"):
        builder(Single).build(0, batch([1, 9], [5, 9]).with_fields(**unknown))


def test_prefills_are_laid_out_with_their_context() -> None:
    Prefill.prepared.clear()
    prefill = builder(Single).build(0, batch([1, 6, 5, 4], [9, 12, 5, 0])).prefill
    assert prefill is not None
    assert prefill.new.query_start_loc.tolist() == [0, 6, 11, 15]
    assert (prefill.new.is_causal, prefill.new.plan) == (True, 1)
    (chunk,) = prefill.context
    assert (chunk.rows, chunk.part.num_keys, chunk.part.plan) == (slice(0, 6), 6, 2)
    assert chunk.slots.tolist() == [12, 13, 14, 15, 16, 17]
    assert prefill.blind == (slice(11, 15),)


def test_a_decode_behind_a_longer_row_is_out_of_order() -> None:
    with pytest.raises(MetadataError, match=r"row 2 is of 1 query tokens, out of order"):
        builder(Single).build(0, batch([1, 9, 1], [5, 9, 6]))
    reading = torch.tensor([False, True, True])
    assert decodes(
        builder(Single).build(0, batch([1, 9, 1], [5, 9, 6], is_prefilling=reading))
    ) == [1]


def test_over_a_sharded_cache_every_row_is_a_decode_or_refused() -> None:
    sharded = replace(LAYER, dcp_size=2)
    assert builder(Varlen, sharded).reorder_batch_threshold == 8
    assert decodes(builder(Varlen, sharded).build(0, batch([7, 8], [9, 8]))) == [7, 8]
    with pytest.raises(UnsupportedOptionError, match=r"9 query tokens .* \(dcp_size=2\)"):
        builder(Varlen, sharded).build(0, batch([9], [9]))


def test_a_batch_with_prefills_is_not_captured() -> None:
    own = builder(Uniform)
    assert decodes(own.build_for_cudagraph_capture(batch([2, 2], [5, 9]))) == [2, 2]
    with pytest.raises(UnsupportedOptionError, match="query lengths up to 9"):
        own.build_for_cudagraph_capture(batch([2, 9], [5, 9]))


def test_a_threshold_beyond_the_kernels_lengths_is_a_mistake() -> None:
    with pytest.raises(BackendDefinitionError, match="allowed: at most 1"):

        class TooLong(Single):
            decode_threshold = 2

    with pytest.raises(BackendDefinitionError, match="allowed: at most 8"):

        class Longer(Varlen):
            decode_threshold = 9


def test_earlier_keys_beyond_the_table_are_refused() -> None:
    common = batch([6], [12])
    assert common.block_table is not None
    narrow = common.with_fields(block_table=common.block_table[:, :1])
    with pytest.raises(MetadataError, match="earlier keys of a request is 6; allowed: at most 4"):
        builder(Single).build(0, narrow)


def test_layers_of_a_group_agree_on_what_they_share() -> None:
    layers = {"a": LAYER, "b": replace(LAYER, scale=0.5)}
    with pytest.raises(UnsupportedOptionError, match=r"scale: a has 0\.3, b has 0\.5"):
        Single(SPEC, layers, BuildConfig(), torch.device("cpu"))


def test_a_prefill_is_chosen_when_the_first_batch_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    class Selector:
        def device_facts(self, device: torch.device) -> str:
            return "facts"

        def resolve(self, request: Any, facts: str, *, kind: str) -> Any:
            asked.append((request.phase, request.mla, facts, kind))
            return SimpleNamespace(prefill_cls=Prefill)

    monkeypatch.setattr("attn_shared.mla_builder.DEFAULT_SELECTOR", Selector())
    own = builder(Single, mla_prefill=None)
    own.build(0, batch([1, 1], [5, 9]))
    assert asked == []
    own.build(0, batch([1, 9], [5, 9]))
    own.build(0, batch([1, 9], [5, 9]))
    assert asked == [("prefill", DIMS, "facts", "mla_prefill")]
