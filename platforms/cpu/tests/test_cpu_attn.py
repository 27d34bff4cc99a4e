"""CPU_ATTN as a layer: what the conformance suite does not ask."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from attn_cpu_testing import levels, needs_kernels

from attn_cpu.backends.cpu_attn import CpuAttnBackend, CpuAttnImpl
from attn_cpu.isa import forced
from attn_cpu.platform import CpuPlatform
from attn_shared import ops
from attn_shared.errors import InvalidInputError, UnsupportedOptionError, VendorMissingError
from attn_shared.inventory import Inventory, scan
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.layer import Attention
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import AttentionOptions, paged_attention
from attn_shared.spec import BuildConfig, LayerSpec

BLOCK = 16
FACTS = CpuPlatform().device()


class Step:
    """A layer with a filled cache, and one batch of it."""

    def __init__(
        self, lens: list[int], queries: list[int], *, checked: bool = False, **layer: Any
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        plain = {"num_heads": 6, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
        plain |= {"backend": "CPU_ATTN", "block_size": BLOCK}
        self.layer = Attention(**(plain | layer), config=BuildConfig(checked=checked))
        counts = [-(-length // BLOCK) for length in lens]
        self.cache = self.layer.allocate(sum(counts))
        self.views = self.layer.kv_cache_spec.split(self.cache)  # type: ignore[union-attr]
        for view in (self.views.key, self.views.value):
            view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))
        table, used = torch.zeros(len(lens), max(counts), dtype=torch.int32), 0
        for row, count in enumerate(counts):
            table[row, :count] = torch.arange(used, used + count)
            used += count
        self.common = CommonAttentionMetadata.from_lengths(
            query_lens=queries, seq_lens=lens, block_table=table, block_size=BLOCK
        )
        size = (sum(queries), 6, 64)
        self.query = torch.randn(size, generator=generator).to(self.layer.spec.dtype)

    def expected(self) -> torch.Tensor:
        """Return the float64 answer."""
        return paged_attention(
            self.query,
            self.views.key,
            self.views.value,
            AttentionOptions(scale=64**-0.5),
            query_start_loc=self.common.query_start_loc,
            seq_lens=self.common.seq_lens,
            block_table=self.common.block_table,
        ).output

    def run(self, query: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Run the layer over the cache as it is."""
        rows = self.query if query is None else query
        plan = self.layer.plan(self.common)
        return self.layer.forward(rows, None, None, self.cache, plan, **options)


@needs_kernels
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forced_levels_give_one_answer(level: str, dtype: torch.dtype) -> None:
    step = Step([300, 40, 17], [1, 3, 17], dtype=dtype)
    with forced(level):
        output = step.run()
    assert (output - step.expected()).abs().max() <= 4 * torch.finfo(dtype).eps * 4


@needs_kernels
def test_an_impl_may_be_held_to_a_level() -> None:
    step = Step([300], [1])
    impl = type("Held", (CpuAttnImpl,), {"isa": 99})(step.layer.spec)
    metadata = step.layer.plan(step.common).metadata
    with pytest.raises(InvalidInputError, match="isa is 99"):
        impl.forward(step.layer, step.query, None, None, step.cache, metadata)


@needs_kernels
def test_any_number_of_threads_gives_the_answer() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            step = Step([900, 5], [1, 5])
            assert torch.allclose(step.run().double(), step.expected(), atol=1e-5)
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_layers_run_in_several_python_threads() -> None:
    steps = [Step([200 + 50 * index], [1]) for index in range(4)]
    results: list[torch.Tensor | None] = [None] * len(steps)

    def work(index: int) -> None:
        results[index] = steps[index].run()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, result in zip(steps, results, strict=True):
        assert result is not None
        assert torch.allclose(result.double(), step.expected(), atol=1e-5)


@needs_kernels
def test_one_layer_runs_in_two_python_threads_at_once() -> None:
    step = Step([3000, 2500], [1, 40])  # split keys, whose parts pass through the workspace
    plans = [step.layer.plan(step.common) for _ in range(2)]
    queries = [step.query, -step.query]
    alone = [
        step.layer.forward(query, None, None, step.cache, plan)
        for query, plan in zip(queries, plans, strict=True)
    ]
    worst = [0.0, 0.0]

    def work(index: int) -> None:
        for _ in range(40):
            got = step.layer.forward(queries[index], None, None, step.cache, plans[index])
            worst[index] = max(worst[index], float((got - alone[index]).abs().max()))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(worst) < 1e-5


@needs_kernels
def test_output_and_lse_are_written_in_place() -> None:
    step = Step([33, 20], [1, 4])
    output, lse = torch.empty_like(step.query), torch.empty(6, 5)
    assert step.run(output=output, lse=lse) is output
    assert torch.allclose(output.double(), step.expected(), atol=1e-5)
    assert torch.equal(output, step.run())
    assert lse.isfinite().all()


@needs_kernels
def test_rows_with_gaps_between_them() -> None:
    """Query, output and LSE may be views of something wider, as after a fused projection."""
    step = Step([33, 20], [1, 4])
    wide = torch.zeros(5, 3 * 6 * 64)
    query = wide[:, : 6 * 64].view(5, 6, 64).copy_(step.query)
    output = torch.zeros(5, 12, 64)[:, ::2]
    step.run(query, output=output, lse=torch.zeros(5, 6).T)
    assert torch.allclose(output.double(), step.expected(), atol=1e-5)


@needs_kernels
def test_entries_are_checked_before_they_are_followed() -> None:
    step = Step([33, 20], [1, 4], checked=True)
    metadata = step.layer.plan(step.common).metadata
    step.common.block_table[0, 1] = 77  # type: ignore[index]
    with pytest.raises(InvalidInputError, match=r"block_table\[0, 1\] is 77; allowed: 0 to 4"):
        step.layer.impl.forward(step.layer, step.query, None, None, step.cache, metadata)


@needs_kernels
def test_refusals_of_the_ops_are_the_projects() -> None:
    step = Step([33], [1])
    key = torch.zeros(1, 2, 64)
    with pytest.raises(InvalidInputError, match=r"slot_mapping\[0\] is 4800; allowed: -1 to 47"):
        step.layer.impl.do_kv_cache_update(step.layer, key, key, step.cache, torch.tensor([4800]))


@needs_kernels
def test_metadata_of_another_builder() -> None:
    step = Step([33], [1])
    with pytest.raises(InvalidInputError, match="metadata is a dict; allowed: a CpuAttnMetadata"):
        step.layer.impl.forward(step.layer, step.query, None, None, step.cache, {})
    narrow = Step([33], [1], window=(3, 0))
    other = narrow.layer.plan(narrow.common).metadata
    with pytest.raises(InvalidInputError, match=r"planned for .*a plan for Sight"):
        step.layer.impl.forward(step.layer, step.query, None, None, step.cache, other)


def test_another_fp8_flavour_is_refused() -> None:
    cache = FullAttentionSpec(
        block_size=BLOCK,
        dtype=torch.float8_e4m3fnuz,
        kv_cache_dtype="fp8",
        num_kv_heads=2,
        head_size=64,
        head_size_v=64,
    )
    spec = LayerSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=64,
        head_size_v=64,
        scale=1.0,
        dtype=torch.bfloat16,
        kv_cache_spec=cache,
    )
    with pytest.raises(UnsupportedOptionError, match="float8_e4m3fnuz; allowed: float8_e4m3fn"):
        CpuAttnImpl(spec)


def test_a_library_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("the kernels need torch 2.10 or newer")

    monkeypatch.setattr("attn_cpu._vendor.attn_cpu_kernels.load", fail)
    inventory = scan(CpuPlatform().vendor_specs())
    with pytest.raises(VendorMissingError, match="cannot load its kernels: the kernels need torch"):
        CpuAttnBackend.load_vendor(FACTS, inventory)


def test_it_says_what_it_needs() -> None:
    assert CpuAttnBackend.vendor_libraries == ("attn_cpu_kernels",)
    assert CpuAttnBackend.capability(FACTS, Inventory()).preferred_block_size == 128


@needs_kernels
def test_a_compiled_graph_runs_through_it() -> None:
    step = Step([33, 20], [1, 4])
    plan = step.layer.plan(step.common)
    key = torch.randn(5, 2, 64)

    def model(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return ops.attend(step.layer, query * 2, key, key + 1, cache) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ops.step(plan):
        expected = model(step.query, step.cache.clone())
        assert torch.equal(compiled(step.query, step.cache.clone()), expected)
    assert math.isfinite(float(expected.sum()))
