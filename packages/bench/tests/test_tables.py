from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace

import pytest
from attn_bench_testing import CELL, RESULTS, workload
from rich.console import Console, RenderableType

from attn_bench.results import Skipped, SkippedStatus, shape_fields
from attn_bench.tables import (
    headline,
    peer_table,
    rate_words,
    result_tables,
    summary_lines,
    workload_table,
)


def shown(tables: Iterable[RenderableType], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for table in tables:
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_headline() -> None:
    assert headline(RESULTS) == (
        "Some CPU (x86_64, 2 cores, 8 GiB), attn 0.1.0, torch 2.13.0, 2026-11-18, cold inputs"
    )


@pytest.mark.parametrize(
    ("arch", "words"), [("sm_90", "132 SMs"), ("gfx942", "132 CUs"), ("bmg", "132 Xe cores")]
)
def test_units_by_their_vendors_name(arch: str, words: str) -> None:
    machine = replace(RESULTS.machine, arch=arch, isa=(), compute_units=132)
    assert words in headline(replace(RESULTS, machine=machine))


def test_everything_is_shown_within_eighty_columns() -> None:
    other = replace(CELL, peer="torch.sdpa_gathered", ratio=12.34, ratio_interval=(11.0, 14.0))
    text = shown(result_tables(replace(RESULTS, cells=(CELL, other))))
    assert "…" not in text
    for words in (
        "TORCH_SDPA, 32/8x128, bfloat16",
        "decode 8x1024",
        "1.23 ms [1.20, 1.30]",
        "27.3 GB/s  85%",
        "2.00 ms [1.90, 2.10]",
        "0.62 [0.60, 0.65]",
        "12.3 [11.0, 14.0]",
        "read 32.0 [31.0, 33.0] GB/s",
        "note: other work ran beside",
        "note: keys lie dense",
    ):
        assert words in text
    assert text.count("decode 8x1024") == 1


def test_the_nearer_limit_is_shown() -> None:
    assert rate_words(CELL) == "27.3 GB/s"
    assert rate_words(replace(CELL, share_of_matmul=0.9)) == "109 GFLOP/s"


def test_what_was_skipped_is_shown_with_its_reason() -> None:
    skipped = Skipped(
        backend="TORCH_SDPA",
        peer="PEER",
        status=SkippedStatus.WRONG,
        reason="off by [one]",
        exit_code=1,
        **shape_fields(workload()),
    )
    text = shown(result_tables(replace(RESULTS, skipped=(skipped,))))
    assert "Not measured" in text
    assert "wrong: off by [one]" in text
    assert "PEER" in text


def test_a_long_reason_has_the_width_of_a_narrow_terminal() -> None:
    reason = " ".join(["word"] * 40)
    skipped = Skipped(
        backend="TORCH_SDPA",
        peer="scaled_dot_product_attention",
        status=SkippedStatus.FAILED,
        reason=reason,
        exit_code=1,
        **shape_fields(workload()),
    )
    lines = shown(result_tables(replace(RESULTS, skipped=(skipped,)))).splitlines()
    of_reason = [line for line in lines if "word word" in line]
    assert len(of_reason) == 3  # 208 characters


def test_graphs_have_a_table_of_their_own() -> None:
    cells = (CELL, replace(CELL, mode="graph", kv_cache_dtype="fp8"))
    text = shown(result_tables(replace(RESULTS, cells=cells)))
    assert "bfloat16, fp8 cache, graph" in text


def test_the_hosts_time_is_shown_where_there_is_one() -> None:
    cell = replace(CELL, host_us=211.0, peer_host_us=12.5)
    text = shown(result_tables(replace(RESULTS, cells=(cell,))))
    assert "Host" in text
    assert "211 us" in text
    assert "12.5 us" in text
    assert "…" not in text
    assert "Host" not in shown(result_tables(RESULTS))


def test_bare_lines() -> None:
    alone = replace(CELL, peer=None, ratio=None)
    assert list(summary_lines(replace(RESULTS, cells=(CELL, alone)))) == [
        "TORCH_SDPA decode 8x1024 32/8x128 bfloat16 1234.0 torch.sdpa 0.620",
        "TORCH_SDPA decode 8x1024 32/8x128 bfloat16 1234.0",
    ]


def test_sets_are_listed() -> None:
    text = shown([workload_table([("mine", (workload(), workload(label="noon")))])])
    assert "mine" in text
    assert "decode 2x9 4/2x8 float32, decode noon 4/2x8 float32" in text


def test_peers_are_listed() -> None:
    text = shown([peer_table([("vendor", "its call", "not installed; pip install vendor")])])
    assert "vendor" in text
    assert "pip install vendor" in text
