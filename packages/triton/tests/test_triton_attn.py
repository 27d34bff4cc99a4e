"""TRITON_ATTN through its classes: answers, refusals, and calls by address."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_shared.device import preset
from attn_shared.errors import InvalidInputError, UnsupportedOptionError, VendorMissingError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import AttentionOptions, paged_attention
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton import _calls
from attn_triton.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

SIZE = 16


class Layer:
    q_scale: float | Tensor = 1.0
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


class Call:
    """One layer and one batch over a cache of random numbers."""

    def __init__(self, device: torch.device, query_lens: list[int], seq_lens: list[int]) -> None:
        generator = torch.Generator().manual_seed(3)
        blocks = -(-max(seq_lens) // 4)
        self.cache_spec = FullAttentionSpec(
            block_size=4, dtype=torch.float32, num_kv_heads=2, head_size=SIZE, head_size_v=SIZE
        )
        self.spec = LayerSpec(
            num_heads=6,
            num_kv_heads=2,
            head_size=SIZE,
            head_size_v=SIZE,
            scale=0.3,
            dtype=torch.float32,
            kv_cache_spec=self.cache_spec,
        )
        count = len(seq_lens) * blocks
        self.cache = torch.randn(count, 2, 4, 2, SIZE, generator=generator).to(device)
        self.query = torch.randn(sum(query_lens), 6, SIZE, generator=generator).to(device)
        order = torch.randperm(count, generator=generator).to(torch.int32)
        self.common = CommonAttentionMetadata.from_lengths(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=order.view(len(seq_lens), blocks),
            device=device,
        )
        self.impl = TritonAttentionImpl(self.spec)
        self.builder = TritonAttentionMetadataBuilder(
            self.cache_spec, {"layer": self.spec}, BuildConfig(), device
        )
        self.metadata = self.builder.build(0, self.common)

    def __call__(self, output: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
        arguments: tuple[Any, ...] = (Layer(), self.query, None, None, self.cache, self.metadata)
        return self.impl.forward(*arguments, output, lse=lse)

    def expected(self) -> Tensor:
        key, value = self.cache.cpu().unbind(1)
        common = self.common
        assert common.block_table is not None
        result = paged_attention(
            self.query.cpu().double(),
            key,
            value,
            AttentionOptions(scale=0.3),
            query_start_loc=common.query_start_loc_cpu,
            seq_lens=common.seq_lens.cpu(),
            block_table=common.block_table.cpu(),
        )
        return result.output


def test_decodes_prompts_and_cut_requests_in_one_batch(device: torch.device) -> None:
    call = Call(device, [1, 20, 2], [300, 20, 70])
    assert call.metadata.decode is not None
    assert call.metadata.decode.may_split
    torch.testing.assert_close(call().cpu().double(), call.expected(), rtol=0, atol=3e-6)


@pytest.mark.interpreter
def test_an_output_whose_heads_lie_apart() -> None:
    call = Call(torch.device("cpu"), [1, 3], [30, 9])
    buffer = torch.full((4, 6, 2 * SIZE), 5.0)
    for output in (buffer[..., :SIZE], buffer[..., ::2]):
        buffer.fill_(5.0)
        assert call(output).data_ptr() == output.data_ptr()
        torch.testing.assert_close(output.double(), call.expected(), rtol=0, atol=3e-6)
        assert (buffer == 5.0).sum() >= 4 * 6 * SIZE


@pytest.mark.interpreter
def test_a_query_without_a_dense_last_dimension() -> None:
    call = Call(torch.device("cpu"), [1, 3], [30, 9])
    call.query = call.query.mT.contiguous().mT
    torch.testing.assert_close(call().double(), call.expected(), rtol=0, atol=3e-6)


class _Launcher:
    """Runs a kernel when it is handed tensors, and holds later calls by address to them."""

    is_interpreted = False
    calls: list[str]

    def __init__(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        self.inner = _REAL(kernel, *args, **kwargs)
        self.seen: tuple[object, ...] = ()

    def __call__(self, grid: tuple[int, int, int], *args: object) -> None:
        self.calls.append("tensors")
        self.seen = args
        self.inner(grid, *args)

    def handle(self, *args: object) -> Any:
        def launch(grid: tuple[int, int, int], *given: object) -> None:
            self.calls.append("addresses")
            wanted = [each.data_ptr() if isinstance(each, Tensor) else each for each in self.seen]
            assert list(given) == wanted

        return launch


_REAL = _calls.Launcher


@pytest.mark.interpreter
def test_later_calls_hand_over_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_triton.kernels import compiling

    monkeypatch.setattr(_Launcher, "calls", [], raising=False)
    monkeypatch.setattr(_calls, "Launcher", _Launcher)
    monkeypatch.setattr(compiling, "driver_calls", lambda: (None, lambda: None))
    call = Call(torch.device("cpu"), [1, 20, 2], [300, 20, 70])
    output, lse = torch.empty_like(call.query), torch.empty(6, len(call.query))
    for _ in range(2):
        call(output, lse)
    assert _Launcher.calls == ["tensors"] * 3 + ["addresses"] * 3
    unaligned = torch.empty(output.numel() + 1)[1:].view(output.shape)
    call(unaligned, lse)
    assert _Launcher.calls[6:] == ["tensors"] * 3


@pytest.mark.interpreter
def test_a_plan_of_another_layer_is_refused() -> None:
    call = Call(torch.device("cpu"), [1], [9])
    other = LayerSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=SIZE,
        head_size_v=SIZE,
        scale=0.3,
        dtype=torch.float32,
        kv_cache_spec=call.cache_spec,
        window=(3, 0),
    )
    call.impl = TritonAttentionImpl(other)
    with pytest.raises(InvalidInputError, match="metadata"):
        call()
    call.metadata = object()  # type: ignore[assignment]
    with pytest.raises(InvalidInputError, match="TritonAttentionMetadata"):
        call()


@pytest.mark.interpreter
def test_a_cache_in_the_other_flavour_of_fp8_is_refused() -> None:
    from attn_triton.machine import require_readable

    cpu = torch.device("cpu")  # stands for sm_90
    require_readable(torch.float8_e4m3fn, cpu)
    require_readable(torch.bfloat16, cpu)
    with pytest.raises(UnsupportedOptionError, match="float8_e4m3fnuz on sm_90"):
        require_readable(torch.float8_e4m3fnuz, cpu)


def test_the_class_is_read_without_triton() -> None:
    """Selection reads capabilities in processes that have no Triton, and must not import it."""
    words = (
        "import sys; from attn_triton.backends.triton_attn import TritonAttentionBackend as B;"
        "print(B.name, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["TRITON_ATTN", "False"]


def test_triton_without_a_driver_is_said_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attn_triton.kernels.loading", None)
    with pytest.raises(VendorMissingError, match="triton cannot run kernels here") as caught:
        TritonAttentionBackend.load_vendor(preset("h200"), Inventory())
    assert caught.value.library == "triton"
