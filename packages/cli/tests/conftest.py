from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attn_cli.main import app
from attn_shared.registry import DEFAULT_REGISTRY

# Makes the tests' shared module importable, whatever the import mode.
sys.path.insert(0, str(Path(__file__).parent))

PLUGIN = """
from __future__ import annotations

from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability, DeviceLimit, MultipleOf, SizeSet
from attn_shared.device import Vendor
import torch


class Paged16(AttentionBackend):
    name = "PAGED16"
    attn_api = ">=1,<2"
    auto_priority = None
    description = "takes blocks of 16 tokens"

    @classmethod
    def capability(cls, device, inventory):
        return Capability(
            devices=(DeviceLimit(vendor=Vendor.CPU), DeviceLimit(vendor=Vendor.NVIDIA)),
            dtypes=frozenset({torch.bfloat16}),
            head_sizes=SizeSet.of(64, 128),
            block_sizes=(MultipleOf(16),),
        )

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ATTN_") or name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    nowhere = Path(__file__).parent / "no-such-cache"  # what was tuned here is no test's affair
    monkeypatch.setattr(
        "attn_cli.tuned._cache_folder", lambda settings: settings.cache_dir or nowhere
    )


class Attn:
    """Runs the command in this process."""

    def __call__(self, *words: str) -> Any:
        result = CliRunner().invoke(app, list(words))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, *words: str, code: int = 0) -> Any:
        result = self(*words, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)


@pytest.fixture
def attn() -> Attn:
    return Attn()


@pytest.fixture
def paged16_source() -> str:
    """The module of a third party's backend, by name only, that takes blocks of 16 tokens."""
    return PLUGIN


@pytest.fixture
def paged16() -> Iterator[str]:
    """That backend, registered in this process."""
    names: dict[str, Any] = {}
    exec(PLUGIN, names)
    DEFAULT_REGISTRY.register("PAGED16", names["Paged16"], source="a test")
    yield "PAGED16"
    DEFAULT_REGISTRY.clear_override("PAGED16")


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder that, on PYTHONPATH, is an installed distribution with entry points."""

    def make(name: str, module: str, source: str, entry_points: str) -> Path:
        folder = tmp_path / name
        info = folder / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(entry_points)
        (folder / f"{module}.py").write_text(source)
        return folder

    return make
