from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from attn_cli.views.info import info_tables
from attn_shared.device import PRESETS

ENTRY = {
    "name": "flash_attn",
    "status": "absent",
    "version": None,
    "install": "pip install flash-attn",
    "error": None,
    "flags": {},
}


def record(**changes: Any) -> dict[str, Any]:
    device = {**PRESETS["h200"].to_dict(), "index": 1, "notes": ["a note"]}
    cuda = {
        "name": "cuda",
        "distribution": "attn-cuda",
        "torch_device_type": "cuda",
        "available": True,
        "reason": "1 device",
        "versions": {"driver": "580.159.04", "CUDA toolkit": "13.0 in /usr/local/cuda"},
        "devices": [device],
        "vendor_libraries": [ENTRY],
    }
    return {
        "versions": {"python": "3.12.1"},
        "torch": {"version": "2.13.0", "cuda": "13.0", "hip": None, "xpu": None},
        "current_platform": "cuda",
        "platforms": [cuda],
        "failures": [],
        "settings": {"backend": None, "cache_dir": None, "checked": False, "notes": []},
        **changes,
    }


def rendered(values: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=100, markup=False)
    for part in info_tables(values):
        console.print(part)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_a_device_is_shown_by_torchs_name_with_its_facts() -> None:
    text = rendered(record())
    assert "python 3.12.1, torch 2.13.0 (cuda 13.0)" in text
    assert "cuda attn-cuda available 1 device (current)" in text
    assert (
        "cuda:1 NVIDIA H200 sm_90 (hopper), capability 9.0, 132 SMs, 141.0 GiB, fp8 e4m3fn" in text
    )
    assert "note: a note" in text


def test_an_absent_library_gives_the_command() -> None:
    assert "cuda flash_attn absent pip install flash-attn" in rendered(record())


def test_a_broken_library_gives_its_own_words() -> None:
    broken = {**ENTRY, "status": "broken", "version": "2.8", "error": "OSError: no libcudart"}
    platforms = [{**record()["platforms"][0], "vendor_libraries": [broken]}]
    text = rendered(record(platforms=platforms))
    assert "flash_attn broken 2.8 OSError: no libcudart" in text


def test_a_machine_without_devices_says_so() -> None:
    platforms = [{**record()["platforms"][0], "devices": [], "available": False}]
    text = rendered(record(platforms=platforms, current_platform=None))
    assert "cuda attn-cuda unavailable 1 device" in text
    assert "Devices none" in text


def test_settings_are_shown() -> None:
    settings = {"backend": "X", "cache_dir": None, "checked": True, "notes": []}
    text = rendered(record(settings=settings))
    assert "ATTN_BACKEND: X ATTN_CACHE_DIR: not set ATTN_CHECKED: True" in text


def test_the_versions_beneath_a_platform_are_shown() -> None:
    text = rendered(record())
    assert "driver 580.159.04" in text
    assert "CUDA toolkit 13.0" in text
