from __future__ import annotations

import math

import pytest
import torch
from conformance_backends import DecodesFirst

from attn_conformance._caches import differing_blocks
from attn_conformance.batch import Batch, make_batch
from attn_conformance.case import Case
from attn_conformance.engine import Engine
from attn_conformance.reference_backend import ReferenceBackend, ReferenceImpl
from attn_shared.errors import MetadataError
from attn_shared.spec import BuildConfig

UNORDERED = Case(name="c", query_lens=(5, 1, 3), seq_lens=(5, 9, 8), num_padding_rows=2)


def engine_of(backend: type[ReferenceBackend], batch: Batch) -> Engine:
    return Engine.of(backend, batch, BuildConfig())


def test_a_step_writes_the_new_tokens_and_answers() -> None:
    batch = make_batch(UNORDERED)
    result = engine_of(ReferenceBackend, batch).run(batch, with_lse=True)
    exact, _ = batch.expected()
    assert torch.allclose(result.output[:9].double(), exact.output[:9], atol=1e-6)
    assert result.lse is not None
    assert torch.allclose(result.lse[:, :9].double(), exact.lse[:, :9], atol=1e-6)
    assert batch.kv_cache is not None
    assert batch.written_cache is not None
    assert batch.placement is not None
    assert differing_blocks(batch.kv_cache, batch.written_cache, batch.placement) == []


def test_a_batch_is_put_in_order_for_a_builder_that_needs_it_and_back() -> None:
    batch = make_batch(UNORDERED)
    engine = engine_of(DecodesFirst, batch)
    with pytest.raises(MetadataError, match="out of order"):
        engine.plan(batch)
    result = engine.run(batch, with_lse=True)
    plain = engine_of(ReferenceBackend, batch).run(batch, with_lse=True)
    assert torch.equal(result.output[:9], plain.output[:9])
    assert result.lse is not None
    assert plain.lse is not None
    assert torch.equal(result.lse[:, :9], plain.lse[:, :9])


def test_what_a_backend_leaves_unwritten_stays_nan() -> None:
    class Lazy(ReferenceImpl):
        def deliver(self, call, result, output, lse):  # type: ignore[no-untyped-def]
            return output

    class LazyBackend(ReferenceBackend):
        name = "LAZY"
        impl = Lazy

    batch = make_batch(UNORDERED)
    assert bool(engine_of(LazyBackend, batch).run(batch).output.isnan().all())


def test_an_lse_of_base_two_is_converted() -> None:
    class Log2(ReferenceImpl):
        lse_base_on_e = False

        def deliver(self, call, result, output, lse):  # type: ignore[no-untyped-def]
            answer = super().deliver(call, result, output, lse)
            if lse is not None:
                lse /= math.log(2)
            return answer

    class Log2Backend(ReferenceBackend):
        name = "LOG2"
        impl = Log2

    batch = make_batch(UNORDERED)
    ours = engine_of(Log2Backend, batch).run(batch, with_lse=True).lse
    natural = engine_of(ReferenceBackend, batch).run(batch, with_lse=True).lse
    assert ours is not None
    assert natural is not None
    assert torch.allclose(ours[:, :9], natural[:, :9], atol=1e-6)


def test_a_backend_that_writes_in_forward_is_not_asked_to_write() -> None:
    class Writes(ReferenceBackend):
        name = "WRITES"
        forward_includes_kv_cache_update = True

    batch = make_batch(UNORDERED)
    engine_of(Writes, batch).write(batch)
    assert batch.kv_cache is not None
    assert batch.written_cache is not None
    assert batch.placement is not None
    assert differing_blocks(batch.kv_cache, batch.written_cache, batch.placement) != []
