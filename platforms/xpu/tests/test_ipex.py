"""IPEX: which build serves whom, what its calls are handed, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from xpu_testing import B60, common_of, layer_object, layer_spec, request, stubbed

from attn_conformance.stubs.modules import stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.vendors.ipex import IPEX_CPU, IPEX_XPU
from attn_shared.backend import AttentionCGSupport
from attn_shared.device import device_from_arch, preset
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import (
    InvalidInputError,
    MetadataError,
    UnsupportedOptionError,
    VendorMissingError,
)
from attn_shared.inventory import (
    Inventory,
    VendorBuild,
    VendorEntry,
    VendorStatus,
    assume_all,
)
from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.request import AttentionType
from attn_shared.selection import Policy, VerdictStatus
from attn_shared.selector import DEFAULT_SELECTOR, select
from attn_shared.spec import BuildConfig, LayerSpec
from attn_xpu._ipex_capability import LIBRARY, NAME, capability_on
from attn_xpu._ipex_metadata import IpexMetadata, IpexMetadataBuilder
from attn_xpu._vendor import ipex
from attn_xpu.backends.ipex import IpexBackend, IpexImpl

CPU = torch.device("cpu")
HOST, MAX = preset("spr"), preset("max1550")
SINGLE, PREFILL = "single_query_cached_kv_attention", "flash_attn_varlen_func"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    with stubbed(IPEX_CPU, IpexBackend, HOST) as (recorder, _):
        yield recorder


def spec_of(**fields: Any) -> LayerSpec:
    cache = {"layout": KVCacheLayout.HND, **fields.pop("cache", {})}
    return layer_spec(**{"dtype": torch.float32, "cache": cache, **fields})


def builder(*layers: LayerSpec, **config: Any) -> IpexMetadataBuilder:
    layers = layers or (spec_of(),)
    named = {f"layer {index}": layer for index, layer in enumerate(layers)}
    return IpexMetadataBuilder(layers[0].kv_cache_spec, named, BuildConfig(**config), CPU)


def run(spec: LayerSpec, query_lens: list[int], seq_lens: list[int], **options: Any) -> Any:
    metadata = builder(spec).build(0, common_of(query_lens, seq_lens))
    assert spec.kv_cache_spec is not None
    cache = spec.kv_cache_spec.allocate(16, "cpu").fill_(1.0)  # type: ignore[attr-defined]
    query = torch.randn(sum(query_lens), spec.num_heads, 16, dtype=spec.dtype)
    return IpexImpl(spec).forward(layer_object(), query, None, None, cache, metadata, **options)


def inventory(label: str | None, status: VendorStatus = VendorStatus.LOADED) -> Inventory:
    build = None
    if label is not None:
        build = VendorBuild(version="2.8.0", flags=(("build", label),))
    return Inventory((VendorEntry(name=LIBRARY, status=status, version="2.8.0", build=build),))


def words(device: Any, found: Inventory, **fields: Any) -> str:
    asked = request(**{"block_size": 64, **fields})
    return "; ".join(map(str, capability_on(device, found).check(asked, device)))


# Who is served


def test_the_name_is_registered_and_known() -> None:
    assert DEFAULT_REGISTRY.load(NAME) is IpexBackend
    assert IpexBackend.get_impl_cls() is IpexImpl
    assert IpexBackend.get_builder_cls() is IpexMetadataBuilder


def test_on_intels_gpus_it_comes_after_triton() -> None:
    selection = DEFAULT_SELECTOR.resolve(request(), MAX)
    assert selection.chosen == "TRITON_ATTN"
    verdict = selection.verdict(NAME)
    assert verdict.status is VerdictStatus.ELIGIBLE
    assert (verdict.block_size, str(verdict.kv_layout)) == (64, "NHD")


def test_it_serves_where_it_alone_is_installed() -> None:
    others = assume_all([])
    found = Inventory((*others.entries, *inventory("xpu").entries))
    selection = select(request(), MAX, found, Policy(), registry=DEFAULT_SELECTOR.registry)
    assert selection.chosen == NAME


def test_on_a_cpu_it_is_taken_by_name_alone() -> None:
    assert NAME not in [verdict.name for verdict in DEFAULT_SELECTOR.resolve(request()).verdicts]
    selection = DEFAULT_SELECTOR.resolve(request(), HOST, Policy(backend=NAME))
    assert selection.chosen == NAME
    assert (selection.block_size, str(selection.kv_layout)) == (64, "HND")


def test_a_cpu_without_the_library_is_told_how_to_get_it() -> None:
    if ipex_is_installed():
        pytest.skip("intel-extension-for-pytorch is installed here")
    with pytest.raises(VendorMissingError, match=r"intel-extension-for-pytorch==2\.8"):
        DEFAULT_SELECTOR.resolve(request(), policy=Policy(backend=NAME))


def ipex_is_installed() -> bool:
    return ipex.SPEC.name in [
        entry.name for entry in DEFAULT_SELECTOR.inventory(B60).entries if entry.build is not None
    ]


@pytest.mark.parametrize(("label", "device"), [("xpu", HOST), ("cpu", MAX)])
def test_the_other_build_is_told(label: str, device: Any) -> None:
    assert f"ipex_build={label} (allowed: " in words(device, inventory(label), head_size=64)


def test_only_a_library_that_is_present_and_unknown_is_probed() -> None:
    present = inventory(None, VendorStatus.PRESENT)
    assert capability_on(HOST, present).needs_probe == (LIBRARY,)
    assert capability_on(HOST, inventory("cpu")).needs_probe == ()


def test_the_label_is_the_modules_where_the_index_left_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    for stub, label in ((IPEX_CPU, "cpu"), (IPEX_XPU, "xpu")):
        with stub_vendor(stub):
            assert ipex.probe().flag("build") == label


def test_another_torch_is_refused_before_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    with (
        stub_vendor(IPEX_CPU),
        pytest.raises(VendorMissingError, match=r"2\.8\.0 needs torch 2\.8, and this is torch"),
    ):
        IpexBackend.load_vendor(HOST, Inventory())


# Bad input: the value and what is allowed


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"block_size": 24}, "block_size=24 (allowed: 1, 2, 4, 8, 16, 32, 64, 128)"),
        ({"window": (0, 0)}, "window=(0, 0) (allowed: at least 1 key on the left"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype=fp8_e5m2 (allowed: auto)"),
        ({"has_alibi": True}, "alibi=True (allowed: False)"),
        ({"has_sinks": True}, "sink=True (allowed: False)"),
        ({"needs_lse": True}, "lse=True (allowed: False)"),
        ({"kv_layout": "NHD"}, "kv_layout=NHD (allowed: HND)"),
        ({"batch_invariant": True}, "batch_invariance=True (allowed: False)"),
        ({"attn_type": "encoder", "softcap": 2.0}, "softcap=2.0 (allowed: none without a cache)"),
        ({"attn_type": "encoder", "window": (3, 3)}, "window=(3, 3) (allowed: none without"),
    ],
)
def test_what_the_cpu_build_does_wrong_is_refused(fields: dict[str, Any], expected: str) -> None:
    assert words(HOST, inventory("cpu"), **fields).startswith(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"block_size": 16}, "block_size=16 (allowed: a multiple of 64)"),
        ({"head_size": 80}, "head_size=80 (allowed: 64, 128, 192, 256)"),
        ({"dtype": torch.float32}, "dtype=float32 (allowed: bfloat16, float16)"),
    ],
)
def test_limits_of_the_build_for_gpus(fields: dict[str, Any], expected: str) -> None:
    assert words(MAX, inventory("xpu"), **fields).startswith(expected)


def test_other_cpus_have_no_build() -> None:
    assert "device=cpu aarch64" in words(device_from_arch("aarch64"), inventory("cpu"))


# What the calls are handed


def test_single_queries_have_a_call_of_their_own(host: Recorder) -> None:
    assert (run(spec_of(window=(3, 0)), [1, 1], [5, 20]) == 1.0).all()
    (call,) = host.of(SINGLE)
    assert call.arguments["window_size"] == 4  # with the query's own key
    assert call.arguments["head_mapping"].tolist() == [0, 0, 1, 1]
    assert call.arguments["context_lens"].tolist() == [5, 20]
    run(spec_of(window=(3, 0)), [1, 2], [5, 20])
    (call,) = host.of(PREFILL)
    assert (call.arguments["window_size_left"], call.arguments["window_size_right"]) == (3, 0)
    assert call.arguments["cu_seqlens_kv"].tolist() == [0, 5, 25]


def test_large_groups_of_heads_go_to_the_call_for_prefill(host: Recorder) -> None:
    run(spec_of(num_heads=32, num_kv_heads=1), [1], [5])
    assert (len(host.of(SINGLE)), len(host.of(PREFILL))) == (0, 1)


def test_a_window_with_a_softcap_goes_to_the_call_for_prefill(host: Recorder) -> None:
    assert (run(spec_of(window=(3, 0), softcap=20.0), [1], [5]) == 1.0).all()
    assert (len(host.of(SINGLE)), len(host.of(PREFILL))) == (0, 1)


def test_requests_without_a_row_go_to_the_call_for_prefill(host: Recorder) -> None:
    run(spec_of(), [1, 0], [5, 9])
    assert (len(host.of(SINGLE)), len(host.of(PREFILL))) == (0, 1)


def test_rows_without_keys_are_zero(host: Recorder) -> None:
    result = run(spec_of(), [1, 3, 1], [0, 2, 5])
    is_empty = [True, True, False, False, False]
    assert (result == 0).flatten(1).all(1).tolist() == is_empty


def test_rows_without_a_slot_are_not_handed_to_the_writer(host: Recorder) -> None:
    spec = spec_of()
    impl = IpexImpl(spec)
    cache = spec.kv_cache_spec.allocate(2, "cpu").zero_()  # type: ignore[union-attr]
    rows = torch.ones(3, 2, 16)
    impl.do_kv_cache_update(layer_object(), rows, rows, cache, torch.tensor([-1, 17, 3]))
    (call,) = host.of("reshape_and_cache")
    assert call.arguments["slot_mapping"].tolist() == [17, 3]
    assert call.arguments["slot_mapping"].dtype is torch.int32
    assert cache.sum().item() == 2 * 2 * 2 * 16
    impl.do_kv_cache_update(layer_object(), rows, rows, cache, torch.tensor([-1, -1]))
    assert len(host.of("reshape_and_cache")) == 1


def test_the_scale_of_keys_without_a_cache_goes_to_the_query(host: Recorder) -> None:
    spec = spec_of(attn_type=AttentionType.ENCODER, kv_cache_spec=None, scale=0.5)
    common = common_of([3], [3], causal=False).with_fields(block_table=None)
    metadata = builder(spec).build(0, common)
    query, key = torch.ones(3, 4, 16), torch.ones(3, 2, 16)
    IpexImpl(spec).forward(layer_object(), query, key, key, None, metadata)
    (call,) = host.of("apply_function")
    assert torch.equal(call.arguments["query"], query * 2)  # 0.5 in place of 1 / sqrt(16)


@pytest.mark.parametrize(("scale", "sign"), [(-0.5, -1.0), (0.0, 0.0)])
def test_a_scale_that_is_not_positive_goes_to_the_query(
    host: Recorder, scale: float, sign: float
) -> None:
    torch.manual_seed(0)
    run(spec_of(scale=scale), [2], [5])
    torch.manual_seed(0)
    (call,) = host.of(PREFILL)
    assert call.arguments["scale"] == (0.5 if scale else 1.0)
    assert torch.equal(call.arguments["query"], torch.randn(2, 4, 16) * sign)


def test_an_lse_is_refused(host: Recorder) -> None:
    with pytest.raises(UnsupportedOptionError, match="lse is given"):
        run(spec_of(), [1], [5], lse=torch.zeros(4, 1))


def test_metadata_of_another_backend_is_refused(host: Recorder) -> None:
    impl = IpexImpl(spec_of())
    with pytest.raises(InvalidInputError, match="metadata is a object"):
        impl.forward(layer_object(), torch.ones(1, 4, 16), None, None, None, object())  # type: ignore[arg-type]


def test_a_table_moves_with_its_requests_without_keys(host: Recorder) -> None:
    made = builder()
    metadata: IpexMetadata = made.build(0, common_of([1, 1], [0, 20]))
    table = torch.tensor([[7, 7], [8, 9]], dtype=torch.int32)
    moved = made.update_block_table(metadata, table, torch.zeros(2).long())
    assert moved.step.block_table is not None
    assert moved.step.block_table.tolist() == [[0, 0], [8, 9]]
    encoder = builder(spec_of(attn_type=AttentionType.ENCODER, kv_cache_spec=None))
    with pytest.raises(UnsupportedOptionError, match="no block table"):
        encoder.update_block_table(metadata, table, torch.zeros(2).long())


def test_cross_attention_needs_the_encoders_lengths(host: Recorder) -> None:
    with pytest.raises(MetadataError, match="encoder_seq_lens"):
        builder(spec_of(attn_type=AttentionType.ENCODER_DECODER)).build(0, common_of([1], [5]))


def test_neither_graphs_nor_batch_invariant_steps(host: Recorder) -> None:
    support = IpexMetadataBuilder.get_cudagraph_support(BuildConfig(), None)
    assert support is AttentionCGSupport.NEVER
    with pytest.raises(UnsupportedOptionError, match="batch_invariant=True is not served"):
        builder(batch_invariant=True)
