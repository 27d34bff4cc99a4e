"""A captured step of latent attention, refreshed where it stands: the answer is the new batch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from mla_cases import BLOCK, Case, case, layer

from attn_conformance.mla_reference_backend import MLAReferenceBackend
from attn_shared.errors import UnsupportedOptionError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.static_batch import StaticBatch


@pytest.fixture
def backend() -> Iterator[str]:
    """A backend whose decodes may be captured on a CPU, in that they are only called again."""
    name = MLAReferenceBackend.name
    DEFAULT_REGISTRY.register(name, MLAReferenceBackend)
    yield name
    DEFAULT_REGISTRY.clear_override(name)


@pytest.mark.parametrize("query_len", [1, 2])
def test_a_step_is_replayed_with_later_batches(backend: str, query_len: int) -> None:
    attn = layer(backend=backend)
    static = StaticBatch(num_reqs=3, max_seq_len=40, block_size=BLOCK, query_len=query_len)
    steps = [
        case(attn, [query_len] * 2, [9, 30], seed=1),
        case(attn, [query_len] * 3, [40, 2, 17], seed=2),
    ]
    plan = attn.plan_for_capture(static.for_capture())
    for step in steps:
        attn.refresh(plan, _filled(static, step))
        padded = _padded(step, 3 * query_len)
        output = attn.forward(padded.query, padded.latent, padded.rope, step.kv_cache, plan)
        report = step.report(output[: len(step.query)], None)
        assert report.ok, str(report)
        assert not output[len(step.query) :].any()


def test_prefills_are_not_captured(backend: str) -> None:
    attn = layer(backend=backend)
    with pytest.raises(UnsupportedOptionError, match="query lengths up to 20"):
        attn.plan_for_capture(case(attn, [1, 20], [5, 20]).common)


def _filled(static: StaticBatch, step: Case) -> CommonAttentionMetadata:
    common = step.common
    assert common.block_table is not None
    return static.update(common.exact_seq_lens_cpu.tolist(), common.block_table)


def _padded(step: Case, rows: int) -> Case:
    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])

    return replace(step, query=pad(step.query), latent=pad(step.latent), rope=pad(step.rope))
