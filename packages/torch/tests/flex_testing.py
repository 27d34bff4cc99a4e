"""What the tests of FLEX_ATTENTION share: backends with either way of calling, and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_torch_testing import Batch, Case

from attn_shared.spec import BuildConfig
from attn_torch.backends.flex_attention import (
    FlexAttentionBackend,
    FlexAttentionImpl,
    FlexMetadata,
    FlexMetadataBuilder,
    FlexOptions,
)

__all__ = [
    "LONG",
    "MIXED",
    "REPEATED",
    "SHARED_PREFIX",
    "TABLES",
    "TWO_COLUMNS",
    "CompiledBackend",
    "UncompiledBackend",
    "compiles",
    "impl_and_metadata",
    "run_and_check",
    "with_table",
]

# torch's own imports on the way to its code generator.
compiles = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:.*tensor cores.*:UserWarning"
)


class _CompiledBuilder(FlexMetadataBuilder):
    """The builder of someone who asked for torch.compile."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, options=FlexOptions(compile=True))


class CompiledBackend(FlexAttentionBackend):
    """The backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[FlexMetadataBuilder]:
        return _CompiledBuilder


class _UncompiledBuilder(FlexMetadataBuilder):
    """The builder of someone who asked for none."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, options=FlexOptions(compile=False))


class UncompiledBackend(FlexAttentionBackend):
    """The backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[FlexMetadataBuilder]:
        return _UncompiledBuilder


def run_and_check(case: Case, **options: Any) -> None:
    batch = case.build()
    batch.check(*batch.run(FlexAttentionBackend, **options))


MIXED = Case(query_lens=(1, 5, 3), seq_lens=(9, 5, 21))
LONG = Case(query_lens=(1, 18, 4), seq_lens=(40, 18, 33), block_size=16)


def impl_and_metadata(
    batch: Batch, backend: type[FlexAttentionBackend] = FlexAttentionBackend
) -> tuple[FlexAttentionImpl, FlexMetadata]:
    spec = batch.spec
    builder = backend.get_builder_cls()(
        spec.kv_cache_spec, {"layer": spec}, BuildConfig(), torch.device("cpu")
    )
    return FlexAttentionImpl(spec), builder.build(0, batch.common)


def with_table(case: Case, rows: Sequence[Sequence[int]]) -> Batch:
    """Return the case's batch over other blocks; all of the cache holds numbers."""
    batch = case.build()
    assert batch.kv_cache is not None
    generator = torch.Generator().manual_seed(5)
    batch.kv_cache.copy_(torch.randn(batch.kv_cache.shape, generator=generator))
    table = torch.tensor(rows, dtype=torch.int32, device=case.device)
    return replace(batch, common=batch.common.with_fields(block_table=table))


SHARED_PREFIX = ((3, 0, 1), (3, 0, 2))
TWO_COLUMNS = ((0, 3, 1), (3, 0, 2))
REPEATED = ((0, 0, 1), (2, 3, 2))
TABLES = pytest.mark.parametrize(
    "rows", [SHARED_PREFIX, TWO_COLUMNS, REPEATED], ids=["shared", "two columns", "repeated"]
)
