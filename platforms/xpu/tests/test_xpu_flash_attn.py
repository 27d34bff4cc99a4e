"""XPU_FLASH_ATTN's layers: what is handed to the library, what is put right, what is refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from xpu_testing import common_of, layer_object, layer_spec, stubbed

from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.vendors.vllm_xpu_kernels import (
    VLLM_XPU_KERNELS,
    VLLM_XPU_KERNELS_UNCOMPILED,
    VLLM_XPU_KERNELS_WITHOUT_DRIVER,
)
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import (
    InvalidInputError,
    MetadataError,
    UnsupportedOptionError,
    VendorMissingError,
)
from attn_shared.inventory import Inventory
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig, LayerSpec
from attn_xpu import _xpu_fa_slow as slow
from attn_xpu._xpu_fa_metadata import XpuFlashAttnMetadata, XpuFlashAttnMetadataBuilder
from attn_xpu._xpu_fa_sinks import correct_rounded
from attn_xpu.backends.xpu_flash_attn import XpuFlashAttnBackend, XpuFlashAttnImpl

CPU = torch.device("cpu")
NAME = "flash_attn_varlen_func"
FP8 = {"dtype": torch.float8_e4m3fn, "kv_cache_dtype": "fp8"}


@pytest.fixture
def kernels() -> Iterator[Recorder]:
    with stubbed(VLLM_XPU_KERNELS, XpuFlashAttnBackend) as (recorder, _):
        yield recorder


@pytest.fixture
def uncompiled() -> Iterator[Recorder]:
    with stubbed(VLLM_XPU_KERNELS_UNCOMPILED, XpuFlashAttnBackend) as (recorder, _):
        yield recorder


def builder(*layers: LayerSpec, **config: Any) -> XpuFlashAttnMetadataBuilder:
    layers = layers or (layer_spec(),)
    named = {f"layer {index}": layer for index, layer in enumerate(layers)}
    return XpuFlashAttnMetadataBuilder(layers[0].kv_cache_spec, named, BuildConfig(**config), CPU)


def run(
    spec: LayerSpec,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    padding: int = 0,
    layer: Any = None,
    value: float = 1.0,
    **options: Any,
) -> torch.Tensor:
    """Run one step over a cache of one value, and return the output."""
    metadata = builder(spec).build(0, common_of(query_lens, seq_lens))
    assert spec.kv_cache_spec is not None
    cache = spec.kv_cache_spec.allocate(16, "cpu")  # type: ignore[attr-defined]
    cache.copy_(torch.full(cache.shape, value).to(cache.dtype))
    query = torch.randn(sum(query_lens) + padding, 4, 16).to(spec.dtype)
    impl = XpuFlashAttnImpl(spec)
    return impl.forward(layer or layer_object(), query, None, None, cache, metadata, **options)


def given(recorder: Recorder) -> Any:
    return recorder.of(NAME)[-1].arguments


# What is handed over


def test_a_call_says_what_the_batch_says(kernels: Recorder) -> None:
    run(layer_spec(window=(3, 0)), [1, 3], [20, 33])
    call = given(kernels)
    assert (call["max_seqlen_q"], call["max_seqlen_k"], call["causal"]) == (3, 33, True)
    assert call["cu_seqlens_q"].tolist() == [0, 1, 4]
    assert (call["seqused_k"].tolist(), call["cu_seqlens_k"]) == ([20, 33], None)
    assert call["window_size"] == [3, 0]
    assert call["softmax_scale"] == 0.25


def test_what_the_library_refuses_or_drops_is_never_named(kernels: Recorder) -> None:
    run(layer_spec(), [1, 3], [20, 33])
    named = {"num_splits", "scheduler_metadata", "q_descale", "softcap", "alibi_slopes"}
    assert not named & kernels.of(NAME)[-1].given


def test_padding_rows_are_not_handed_over(kernels: Recorder) -> None:
    # Two queries of 1 and 3 rows, padded to 6: by its rows the library would take them for drafts.
    result = run(layer_spec(), [1, 3], [20, 33], padding=2)
    assert len(given(kernels)["q"]) == 4
    assert result.shape == (6, 4, 16)
    assert (result[:4] == 1.0).all()


def test_single_queries_are_told_only_where_rows_are_requests(kernels: Recorder) -> None:
    run(layer_spec(), [1, 1], [5, 9])
    assert (given(kernels)["max_seqlen_q"], given(kernels)["is_mix_batch"]) == (1, True)
    run(layer_spec(), [1, 0], [5, 9])
    assert (given(kernels)["max_seqlen_q"], given(kernels)["is_mix_batch"]) == (2, False)


def test_rows_without_keys_are_zero(kernels: Recorder) -> None:
    lse = torch.zeros(4, 5)
    result = run(layer_spec(), [1, 3, 1], [0, 2, 5], lse=lse)
    # Of three rows over two keys the first sits before them.
    is_empty = [True, True, False, False, False]
    assert (result == 0).flatten(1).all(1).tolist() == is_empty
    assert (lse == -math.inf).all(0).tolist() == is_empty
    assert given(kernels)["seqused_k"].tolist() == [1, 2, 5]
    assert given(kernels)["block_table"][0].tolist() == [0]


def test_an_output_that_no_kernel_can_write_is_copied_to(kernels: Recorder) -> None:
    wide = torch.zeros(2, 4, 17).bfloat16()
    result = run(layer_spec(), [1, 1], [5, 9], output=wide[..., :16])
    assert given(kernels)["out"].is_contiguous()
    assert result.data_ptr() == wide.data_ptr()
    assert (wide[..., :16] == 1.0).all()
    assert (wide[..., 16] == 0.0).all()


def test_a_step_without_tokens_calls_no_kernel(kernels: Recorder) -> None:
    assert run(layer_spec(), [0, 0], [5, 2], padding=3).shape == (3, 4, 16)
    assert kernels.of(NAME) == []


@pytest.mark.parametrize(("scale", "sign"), [(-0.5, -1.0), (0.0, 0.0)])
def test_a_scale_that_is_not_positive_goes_to_the_query(
    kernels: Recorder, scale: float, sign: float
) -> None:
    torch.manual_seed(0)
    run(layer_spec(scale=scale), [1], [5])
    torch.manual_seed(0)
    expected = torch.randn(1, 4, 16).bfloat16() * sign
    assert given(kernels)["softmax_scale"] == (0.5 if scale else 1.0)
    assert torch.equal(given(kernels)["q"], expected)


# Sinks and scales


def test_sinks_that_the_dtype_holds_are_the_kernels(kernels: Recorder) -> None:
    sinks = torch.tensor([1.0, -0.5, 0.25, 2.0])
    run(layer_spec(has_sinks=True), [1], [5], layer=layer_object(sinks=sinks))
    assert given(kernels)["s_aux"].dtype is torch.bfloat16
    assert not given(kernels)["return_softmax_lse"]


def test_sinks_beside_an_lse_enter_afterwards(kernels: Recorder) -> None:
    # 16 keys of logit 0 and value 1: the output is 16 / (16 + exp(sink)).
    lse, sinks = torch.zeros(4, 1), torch.tensor([0.0, 1.0, -1.0, 5.01])
    spec = layer_spec(has_sinks=True, scale=0.0)
    result = run(spec, [1], [16], layer=layer_object(sinks=sinks), lse=lse)
    assert (given(kernels)["s_aux"], given(kernels)["return_softmax_lse"]) == (None, True)
    expected = 16 / (16 + sinks.exp())
    torch.testing.assert_close(result[0, :, 0].float(), expected, atol=0.005, rtol=0.01)
    torch.testing.assert_close(lse[:, 0], (16 + sinks.exp()).log())


def test_sinks_that_the_dtype_does_not_hold_are_corrected(kernels: Recorder) -> None:
    # 5.01 is 5.0 in bfloat16, so that the keys' share would be 0.0973 in place of 0.0964.
    sinks = torch.tensor([5.01, 5.01, 0.0, -1.0])
    output = torch.tensor([[1 / (1 + math.exp(5.0)) * 1000]] * 4).reshape(1, 4, 1)
    without = torch.full((1, 4, 1), 1000.0)
    rounded = sinks.bfloat16()
    correct_rounded(output, without, sinks, rounded)
    assert output[0, 0, 0].item() == pytest.approx(1000 / (1 + math.exp(5.01)), rel=1e-4)
    run(
        layer_spec(has_sinks=True, window=(3, 0)),
        [1],
        [16],
        layer=layer_object(sinks=sinks),
    )
    first, second = kernels.of(NAME)
    assert first.arguments["s_aux"] is not None
    assert second.arguments["s_aux"] is None
    assert not any(call.arguments["return_softmax_lse"] for call in (first, second))


def test_a_row_whose_values_are_zero_stays_zero() -> None:
    output = torch.zeros(1, 1, 4)
    correct_rounded(output, torch.zeros(1, 1, 4), torch.tensor([5.01]), torch.tensor([5.0]))
    assert output.tolist() == [[[0.0] * 4]]


def test_an_lse_of_windowed_rows_is_refused(kernels: Recorder) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"lse is given with window=\(3, 0\)"):
        run(layer_spec(window=(3, 0)), [1], [5], lse=torch.zeros(4, 1))


def test_both_descales_are_handed_over_where_one_scale_was_set(kernels: Recorder) -> None:
    run(layer_spec(cache=FP8), [1, 1], [5, 9], layer=layer_object(k_scale=0.5))
    for name, number in (("k_descale", 0.5), ("v_descale", 1.0)):
        scale = given(kernels)[name]
        assert scale.tolist() == [[number] * 2] * 2
        assert scale.untyped_storage().nbytes() == 4


def test_a_scale_that_is_part_of_a_tensor_becomes_one_of_its_own(kernels: Recorder) -> None:
    layer = layer_object(k_scale=torch.tensor([0.5, 2.0])[1], v_scale=torch.tensor([4.0]))
    run(layer_spec(cache=FP8), [1], [5], layer=layer)
    assert given(kernels)["k_descale"].tolist() == [[2.0, 2.0]]
    assert given(kernels)["k_descale"].untyped_storage().nbytes() == 4
    assert given(kernels)["v_descale"].data_ptr() == layer.v_scale.data_ptr()


def test_scales_per_head_are_refused(kernels: Recorder) -> None:
    layer = layer_object(v_scale=torch.tensor([0.5, 2.0]))
    with pytest.raises(UnsupportedOptionError, match=r"layer\.v_scale of 2 heads is not served"):
        run(layer_spec(cache=FP8), [1], [5], layer=layer)


def test_an_fp8_cache_of_the_other_flavour_is_refused(kernels: Recorder) -> None:
    cache = {"dtype": torch.float8_e4m3fnuz, "kv_cache_dtype": "fp8"}
    with pytest.raises(UnsupportedOptionError, match=r"allowed: torch\.float8_e4m3fn or"):
        XpuFlashAttnImpl(layer_spec(cache=cache))


def test_a_block_stride_that_is_no_number_of_tokens_is_refused(kernels: Recorder) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"page_size_padded=2056.*multiple of 32"):
        run(layer_spec(cache={"page_size_padded": 2056}), [1], [5])
    run(layer_spec(cache={"page_size_padded": 2112}), [1], [5])


# The slow reference


def test_the_slow_reference_is_reported_and_counted(uncompiled: Recorder) -> None:
    spec = layer_spec(window=(3, 0), has_sinks=True)
    layer = layer_object(sinks=torch.zeros(4))
    impl = XpuFlashAttnImpl(spec)
    metadata = builder(spec).build(0, common_of([1], [5]))
    cache = spec.kv_cache_spec.allocate(1, "cpu").fill_(1.0)  # type: ignore[union-attr]
    query = torch.ones(1, 4, 16).bfloat16()
    for _ in range(2):
        with pytest.warns(slow.SlowReferenceWarning) as told:
            impl.forward(layer, query, None, None, cache, metadata)
        assert str(told[0].message).startswith(
            "XPU_FLASH_ATTN: vllm_xpu_kernels has no kernel compiled for heads of 16, pages of 16, "
            "a window of (3, 0), sinks, and falls back to its slow reference"
        )
    assert repr(impl) == "XpuFlashAttnImpl(vllm_xpu_kernels, 2 calls on its slow reference)"


def test_a_compiled_kernel_is_not_reported(kernels: Recorder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(layer_spec(), [1, 3], [5, 9])


def test_drafts_without_a_kernel_reach_the_reference(uncompiled: Recorder) -> None:
    with pytest.warns(slow.SlowReferenceWarning):
        result = run(layer_spec(), [2, 2], [5, 9])
    assert (result == 1.0).all()
    first, second = uncompiled.of(NAME)
    assert [call.arguments["max_seqlen_q"] for call in (first, second)] == [2, 3]


@pytest.mark.parametrize(
    ("window", "is_causal"), [((0, 0), True), ((0, 0), False), ((None, 0), False)]
)
def test_a_window_that_the_reference_drops_is_refused(
    uncompiled: Recorder, window: Any, is_causal: bool
) -> None:
    spec = layer_spec(window=window)
    metadata = builder(spec).build(0, common_of([1], [5]).with_fields(causal=is_causal))
    cache = spec.kv_cache_spec.allocate(1, "cpu")  # type: ignore[union-attr]
    query = torch.ones(1, 4, 16).bfloat16()
    with pytest.raises(UnsupportedOptionError, match="its reference drops such a window"):
        XpuFlashAttnImpl(spec).forward(layer_object(), query, None, None, cache, metadata)


def test_a_release_that_fails_closed_is_an_error_with_its_words(
    kernels: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_xpu_kernels.flash_attn_interface as interface

    def closed(**arguments: Any) -> Any:
        raise RuntimeError("Fail-closed: kernel not compiled for this config")

    monkeypatch.setattr(interface, NAME, closed)
    with pytest.raises(UnsupportedOptionError, match=r"heads of 16, pages of 16.*Fail-closed"):
        run(layer_spec(), [1], [5])


def test_another_error_of_the_library_passes_through(
    kernels: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_xpu_kernels.flash_attn_interface as interface

    def broken(**arguments: Any) -> Any:
        raise RuntimeError("UR_RESULT_ERROR_DEVICE_LOST")

    monkeypatch.setattr(interface, NAME, broken)
    with pytest.raises(RuntimeError, match="DEVICE_LOST"):
        run(layer_spec(), [1], [5])


def test_an_lse_of_another_shape_is_refused(
    kernels: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_xpu_kernels.flash_attn_interface as interface

    monkeypatch.setattr(interface, NAME, lambda **arguments: (arguments["out"], torch.empty(())))
    with pytest.raises(UnsupportedOptionError, match=r"returned is \(\); allowed: \(4, 1\)"):
        run(layer_spec(), [1], [5], lse=torch.zeros(4, 1))


def test_the_stand_in_is_watched_once(kernels: Recorder) -> None:
    import vllm_xpu_kernels.flash_attn_interface as interface

    watched = interface._fallback_varlen_attn
    assert slow.is_watched(interface)
    slow.watch(interface)
    assert interface._fallback_varlen_attn is watched


# Steps and refusals


def test_kernels_without_their_driver_do_not_load_in_their_own_words() -> None:
    with (
        pytest.raises(VendorMissingError, match=r"libze_loader\.so\.1: cannot open") as caught,
        stubbed(VLLM_XPU_KERNELS_WITHOUT_DRIVER, XpuFlashAttnBackend),
    ):
        pass
    assert caught.value.library == "vllm_xpu_kernels"


def test_a_layer_without_the_library_says_what_to_install() -> None:
    with pytest.raises(VendorMissingError, match=r'pip install "attn-xpu\[kernels\]"'):
        XpuFlashAttnBackend.load_vendor(None, Inventory())  # type: ignore[arg-type]


def test_metadata_of_another_backend_is_refused(kernels: Recorder) -> None:
    impl = XpuFlashAttnImpl(layer_spec())
    with pytest.raises(InvalidInputError, match="metadata is a object"):
        impl.forward(layer_object(), torch.ones(1, 4, 16), None, None, None, object())  # type: ignore[arg-type]


def test_no_graph_may_hold_its_calls(kernels: Recorder) -> None:
    support = XpuFlashAttnMetadataBuilder.get_cudagraph_support(BuildConfig(), None)
    assert support is AttentionCGSupport.NEVER


def test_a_batch_invariant_builder_is_refused(kernels: Recorder) -> None:
    with pytest.raises(UnsupportedOptionError, match="batch_invariant=True is not served"):
        builder(batch_invariant=True)


def test_a_table_moves_with_its_requests_without_keys(kernels: Recorder) -> None:
    made = builder()
    metadata: XpuFlashAttnMetadata = made.build(0, common_of([1, 1], [0, 20]))
    moved = made.update_block_table(
        metadata, torch.tensor([[7, 7], [8, 9]], dtype=torch.int32), torch.zeros(2).long()
    )
    assert moved.step.block_table is not None
    assert moved.step.block_table.tolist() == [[0, 0], [8, 9]]


def test_lengths_of_keys_of_an_encoder(kernels: Recorder) -> None:
    cross = layer_spec(attn_type=AttentionType.ENCODER_DECODER)
    lens = torch.tensor([7, 20], dtype=torch.int32)
    common = common_of([1, 2], [30, 30], encoder_seq_lens=lens, encoder_seq_lens_cpu=lens)
    step = builder(cross).build(0, common).step
    assert step.key_lens is lens
    assert (step.max_key_len, step.causal) == (20, False)
    with pytest.raises(MetadataError, match="encoder_seq_lens"):
        builder(cross).build(0, common_of([1], [5]))


def test_layers_of_one_group_may_differ_in_their_windows(kernels: Recorder) -> None:
    made = builder(layer_spec(window=(3, 0)), layer_spec())
    metadata = made.build(0, common_of([2], [1]).with_fields(seq_lens_cpu=None))
    assert set(metadata.keyless) == {(3, 0), (None, None)}
    assert all(rows.tolist() == [True, False] for rows in metadata.keyless.values())


def test_layers_without_a_cache_have_no_table_to_move(kernels: Recorder) -> None:
    encoder = layer_spec(attn_type=AttentionType.ENCODER, kv_cache_spec=None)
    made = builder(encoder)
    common = common_of([3], [3], causal=False).with_fields(block_table=None)
    with pytest.raises(UnsupportedOptionError, match="no block table"):
        made.update_block_table(made.build(0, common), torch.zeros(1, 1).int(), torch.zeros(1))
