from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attn_bench_testing import CELL, RESULTS

from attn_bench.plots import check_plot_path, draw, save_plot
from attn_bench.results import Results
from attn_shared.errors import InvalidInputError, VendorMissingError

PREFILL = replace(
    CELL, phase="prefill", label="1x512", share_of_matmul=0.9, share_of_read=0.1, ratio=1.5,
    ratio_interval=(1.4, 1.7),
)  # fmt: skip
MANY = replace(
    RESULTS,
    machine=replace(RESULTS.machine, notes=("other work ran beside", "and more words" * 12)),
    cells=(
        CELL,
        replace(CELL, peer="torch.sdpa_gathered", ratio=3.0, ratio_interval=(2.5, 3.5)),
        PREFILL,
        replace(CELL, dtype="float32", phase="shared_prefix", label="16x(2048+256)"),
        replace(CELL, dtype="float32", label="48 of 100..8000 window 1024 +LSE own out"),
    ),
)


@pytest.fixture(autouse=True)
def _needs_matplotlib(request: pytest.FixtureRequest) -> None:
    if "absent" not in request.fixturenames:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def texts(results: Results) -> set[str]:
    figure = draw(results)
    found = [text.get_text() for text in figure.findobj(_is_text)]
    return {text for text in found if text}


def _is_text(artist: Any) -> bool:
    return hasattr(artist, "get_text")


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_files(tmp_path: Path, name: str, magic: bytes) -> None:
    save_plot(MANY, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_the_same_results_give_the_same_svg(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save_plot(MANY, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_what_is_written_on_it() -> None:
    assert texts(MANY) >= {
        "Some CPU (x86_64, 2 cores, 8 GiB)",
        "attn 0.1.0, torch 2.13.0, 2026-11-18, cold inputs",
        "TORCH_SDPA    heads 32/8x128, bfloat16",
        "TORCH_SDPA    heads 32/8x128, float32",
        "decode 8x1024",
        "prefill 1x512",
        "beside torch.sdpa",
        "beside torch.sdpa_gathered",
        "  27.3 GB/s",
        "  109 GFLOP/s",
        "0.62",
        "3.00",
        # 27.3 / 0.85 and 0.109 / 0.07; halfway from there to 27.3 / 0.1 and 0.109 / 0.9
        "limit: about 32.1 GB/s, 1.56 TFLOP/s",
        "limit: about 153 GB/s, 839 GFLOP/s",
    }


def test_bars_are_as_long_as_the_figures() -> None:
    assert "other work ran beside" in texts(RESULTS)
    rates, ratios = draw(RESULTS).axes
    assert [bar.get_width() for bar in rates.patches] == [pytest.approx(85.0)]
    (bar,) = ratios.patches
    assert bar.get_x() + bar.get_width() == pytest.approx(0.62)
    low, high = ratios.get_xlim()
    assert low < 0.6 < 1.0 < high


def test_without_peers_there_are_rates_alone() -> None:
    alone = replace(CELL, peer=None, ratio=None, ratio_interval=None)
    assert len(draw(replace(RESULTS, cells=(alone,))).axes) == 1


def test_no_label_lies_on_another() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = draw(MANY)
    FigureCanvasAgg(figure).draw()
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible()
    ]
    pairs = [
        (one, other)
        for index, (one, box) in enumerate(boxes)
        for other, other_box in boxes[index + 1 :]
        if box.overlaps(other_box)
    ]
    assert pairs == []
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for _, box in boxes)


def test_a_name_of_wide_characters_is_whole() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    name = "6d@150..4096 + 256p + 512@1536"
    figure = draw(replace(RESULTS, cells=(replace(CELL, phase="mixed", label=name),)))
    FigureCanvasAgg(figure).draw()
    written = [text for text in figure.findobj(Text) if text.get_text() == f"mixed {name}"]
    assert written
    assert all(text.get_window_extent().x0 >= 0 for text in written)


def test_nothing_to_draw() -> None:
    with pytest.raises(InvalidInputError, match="at least one measured cell"):
        draw(replace(RESULTS, cells=()))


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a file that can be written"):
        save_plot(RESULTS, tmp_path / "no" / "a.png")


def test_another_ending_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"ends in \.png or \.svg"):
        check_plot_path(Path("a.pdf"))


def test_without_matplotlib_the_command_is_named(absent: None) -> None:
    with pytest.raises(VendorMissingError, match="run: pip install matplotlib") as caught:
        check_plot_path(Path("a.png"))
    assert caught.value.exit_code == 4
