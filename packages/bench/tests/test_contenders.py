from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_bench_testing import CPU, workload

from attn_bench.agreement import check_agreement
from attn_bench.contenders import BackendContender
from attn_bench.workloads import WorkloadPhase
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import BackendRejectedError, UnknownNameError
from attn_shared.registry import DEFAULT_REGISTRY


@pytest.fixture
def two_orders() -> Iterator[str]:
    """TORCH_SDPA with a builder that wants decodes first, would cascade, and may be captured."""
    plain = DEFAULT_REGISTRY.load("TORCH_SDPA")

    class Builder(plain.get_builder_cls()):  # type: ignore[misc]
        requires_ordered_batch = True
        prefixes: list[int] = []  # noqa: RUF012

        @classmethod
        def get_cudagraph_support(cls, config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
            return AttentionCGSupport.UNIFORM_BATCH

        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            self.prefixes.append(common_prefix_len)
            return super().build(common_prefix_len, common, fast_build)

        def use_cascade_attention(self, prefix: int, query_lens: Any, units: int) -> bool:
            return prefix >= 8

    class Backend(plain):  # type: ignore[misc, valid-type]
        name = "TWO_ORDERS"

        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

    DEFAULT_REGISTRY.register("TWO_ORDERS", Backend, source="a test")
    yield "TWO_ORDERS"
    DEFAULT_REGISTRY.clear_override("TWO_ORDERS")


@pytest.mark.parametrize(
    "batch",
    [
        workload(),
        workload((1, 3, 7), (9, 3, 20)),
        workload((1, 1), (12, 15), shared_prefix_len=10),
        workload(dtype=torch.bfloat16),
        workload(kv_cache_dtype="int8_per_token_head", dtype=torch.bfloat16),
        workload(kv_cache_dtype="fp8", dtype=torch.bfloat16),
        workload((1, 3), (9, 8), window=4),
        workload(returns_lse=True),
        workload(own_output=True),
    ],
    ids=lambda batch: batch.name,
)
def test_a_backend_answers_as_the_reference_on_each_copy(batch: Any) -> None:
    prepared = BackendContender("TORCH_SDPA").prepare(batch, CPU, 2, is_captured=False)
    first, second = (copy.tokens(copy.call()).clone() for copy in prepared.copies)
    assert not torch.equal(first, second)
    check_agreement("TORCH_SDPA", prepared.copies[0], first)
    check_agreement("TORCH_SDPA", prepared.copies[1], second)
    assert (prepared.copies[0].lse is not None) is batch.returns_lse
    assert prepared.block_size == 4
    assert prepared.graph_level is AttentionCGSupport.NEVER
    assert prepared.plan is not None


def test_an_output_of_its_own_is_new_each_time() -> None:
    own = BackendContender("TORCH_SDPA").prepare(
        workload(own_output=True), CPU, 1, is_captured=False
    )
    given = BackendContender("TORCH_SDPA").prepare(workload(), CPU, 1, is_captured=False)
    first, second = (own.copies[0].call() for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert given.copies[0].call() is given.copies[0].call()


def test_a_plan_that_is_timed_is_the_builders_own_work(two_orders: str) -> None:
    batch = workload((3, 1), (6, 9), phase=WorkloadPhase.TRACE)
    prepared = BackendContender(two_orders).prepare(batch, CPU, 1, is_captured=False)
    builder = DEFAULT_REGISTRY.load(two_orders).get_builder_cls()
    builder.prefixes.clear()
    assert prepared.plan is not None
    prepared.plan()
    assert builder.prefixes == [0]


def test_which_build_of_several_runs_is_noted(
    two_orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = DEFAULT_REGISTRY.load(two_orders).get_impl_cls()
    monkeypatch.setattr(impl, "provider", "a build of a library", raising=False)
    prepared = BackendContender(two_orders).prepare(workload(), CPU, 1, is_captured=False)
    assert prepared.notes == (f"{two_orders} runs a build of a library",)


def test_auto_says_what_was_chosen() -> None:
    prepared = BackendContender("auto").prepare(workload(), CPU, 1, is_captured=False)
    assert prepared.name in DEFAULT_REGISTRY.names()


def test_a_batch_is_taken_in_the_backends_order(two_orders: str) -> None:
    batch = workload((3, 1), (6, 9), phase=WorkloadPhase.TRACE)
    prepared = BackendContender(two_orders).prepare(batch, CPU, 1, is_captured=False)
    copy = prepared.copies[0]
    assert copy.lengths == ((1, 9), (3, 6))
    check_agreement(two_orders, copy, copy.call())
    assert prepared.graph_level is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    ("shared", "is_captured", "prefix"), [(10, False, 8), (10, True, 0), (4, False, 0)]
)
def test_cascade_where_the_backend_asks_for_it_and_no_graph_is_made(
    two_orders: str, shared: int, is_captured: bool, prefix: int
) -> None:
    batch = workload((1, 1), (12, 15), shared_prefix_len=shared)
    builder = DEFAULT_REGISTRY.load(two_orders).get_builder_cls()
    builder.prefixes.clear()
    prepared = BackendContender(two_orders).prepare(batch, CPU, 1, is_captured=is_captured)
    assert set(builder.prefixes) == {prefix}
    assert (f"cascade over {prefix} tokens" in prepared.notes) == bool(prefix)
    copy = prepared.copies[0]
    check_agreement(two_orders, copy, copy.call())


def test_a_backend_that_does_not_serve_it_refuses() -> None:
    with pytest.raises(UnknownNameError):
        BackendContender("TORCH_SPDA").prepare(workload(), CPU, 1, is_captured=False)
    with pytest.raises(BackendRejectedError):
        BackendContender("TORCH_SDPA").prepare(
            workload(kv_cache_dtype="nvfp4"), CPU, 1, is_captured=False
        )


def test_a_slow_path_that_is_declared_is_noted() -> None:
    batch = workload(kv_cache_dtype="int8_per_token_head", dtype=torch.bfloat16)
    prepared = BackendContender("TORCH_SDPA").prepare(batch, CPU, 1, is_captured=False)
    plain = BackendContender("TORCH_SDPA").prepare(workload(), CPU, 1, is_captured=False)
    assert plain.notes == ()
    assert all(note.startswith("declares a slow path for") for note in prepared.notes)
