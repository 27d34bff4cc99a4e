from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("attn_bench", reason="attn-bench is not installed")

import attn_bench.limits
import attn_bench.timing
import attn_bench.tuned
from attn_bench.results import read_results

WORDS = ("tune", "--device", "cpu", "--heads", "2/1x16", "--dtype", "float32", "--rounds", "3")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tiny batches, and two backends: nothing is compiled."""
    monkeypatch.setitem(attn_bench.limits._READ_BYTES, "cpu", 4096)
    monkeypatch.setitem(attn_bench.limits._MATMUL_SIZE, "cpu", 16)
    monkeypatch.setitem(attn_bench.timing._FLUSH_BYTES, "cpu", 4096)
    monkeypatch.setitem(attn_bench.tuned._DECODES, "cpu", ((1, 9), (2, 5)))
    monkeypatch.setitem(attn_bench.tuned._PREFILLS, "cpu", ((1, 6),))
    monkeypatch.setattr(
        "attn_cli.commands.tune._serving", lambda request, device: ["TORCH_SDPA", "EAGER_TWIN"]
    )
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def twin() -> Any:
    """TORCH_SDPA under a second name."""
    from attn_shared.registry import DEFAULT_REGISTRY

    base = DEFAULT_REGISTRY.load("TORCH_SDPA")
    cls = type("EagerTwin", (base,), {"name": "EAGER_TWIN", "auto_priority": 1})
    DEFAULT_REGISTRY.register("EAGER_TWIN", cls, source="a test")
    yield
    DEFAULT_REGISTRY.clear_override("EAGER_TWIN")


def test_a_table_is_written_and_decides_later_selections(attn: Any, tmp_path: Path) -> None:
    answer = attn.json(*WORDS)
    assert answer["schema_version"] == 1
    phases = {row["phase"]: row["relative_times"] for row in answer["orders"]}
    assert set(phases) == {"mixed", "prefill", "decode"}
    for times in phases.values():
        assert set(times) == {"TORCH_SDPA", "EAGER_TWIN"}
        assert min(times.values()) == 1.0
    path = Path(answer["table"])
    assert path.parent == tmp_path / "tuned"
    assert len(read_results(path).cells) == 3
    heads = ("--num-heads", "2", "--num-kv-heads", "1", "--head-size", "16")
    later = attn.json("select", "--device", "cpu", *heads, "--dtype", "float32")
    assert later["decided_by"] == "measured"
    assert later["chosen"] == next(iter(phases["mixed"]))


def test_a_table_for_a_person(attn: Any) -> None:
    text = attn(*WORDS).stdout
    assert "Time over the fastest's" in text
    assert "2/1x16 float32" in text
    assert "kept in " in text
    quiet = attn(*WORDS, "-q").stdout.splitlines()
    assert quiet[0].startswith("2/1x16 float32 mixed: ")


def test_another_layer_is_added_and_the_same_measured_again(attn: Any) -> None:
    first = attn.json(*WORDS)
    attn.json(*WORDS, "--heads", "4/2x8")  # both layers
    kept = read_results(Path(first["table"])).cells
    assert sorted({cell.heads for cell in kept}) == ["2/1x16", "4/2x8"]
    assert len(kept) == 6


def test_a_run_that_has_no_time_keeps_the_older_figures(attn: Any) -> None:
    path = Path(attn.json(*WORDS)["table"])
    before = read_results(path).cells
    result = attn(*WORDS, "--budget", "1e-9")
    assert result.exit_code == 1
    assert "the time budget ended before its turn" in result.stderr
    assert read_results(path).cells == before


def test_what_fails_now_has_no_older_figure(attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(attn.json(*WORDS)["table"])

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("a kernel that fails")

    from attn_shared.registry import DEFAULT_REGISTRY

    cls = DEFAULT_REGISTRY.load("EAGER_TWIN")
    broken = type("Broken", (cls.get_impl_cls(),), {"forward": fails})
    monkeypatch.setattr(cls, "get_impl_cls", staticmethod(lambda: broken))
    assert attn(*WORDS).exit_code == 1
    assert {cell.peer for cell in read_results(path).cells} <= {None}


def test_a_table_of_other_software_is_replaced_and_that_is_said(attn: Any) -> None:
    path = Path(attn.json(*WORDS)["table"])
    record = json.loads(path.read_text())
    record["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(record))
    result = attn(*WORDS, "--json")
    assert "the older table is replaced: it is of torch 1.0" in result.stderr
    path.write_text("{")
    assert "the older table is replaced" in attn(*WORDS, "--json").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tune", "--device", "h200"), "allowed: a device of this machine"),
        (("tune", "--device", "cpu", "--heads", "8x64"), "heads is '8x64'"),
        (("tune", "--device", "cpu", "--dtype", "int3"), "unknown dtype 'int3'"),
        (("tune", "--device", "cpu", "--kv-cache-dtype", "fp9"), "unknown kv_cache_dtype 'fp9'"),
        (("tune", "--device", "cpu", "--budget", "0"), "--budget is 0.0"),
        (("tune", "--device", "cpu", "--rounds", "0"), "rounds is 0"),
    ],
)
def test_bad_input(attn: Any, words: tuple[str, ...], message: str) -> None:
    assert message in attn.json(*words, code=2)["error"]["message"]


def test_one_backend_is_no_comparison(attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_cli.commands.tune._serving", lambda request, device: ["TORCH_SDPA"])
    assert "two that serve the layer" in attn.json(*WORDS, code=2)["error"]["message"]


def test_a_folder_that_cannot_be_written_is_named(
    attn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a-file"
    file.write_text("")
    monkeypatch.setenv("ATTN_CACHE_DIR", str(file))
    assert "ATTN_CACHE_DIR is" in attn.json(*WORDS, code=2)["error"]["message"]
