"""FlashInfer's compiler as releases 0.6.13 and later have it: specs that load or build."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from attn_cuda._vendor.flashinfer_jit import FlashInferCompiler
from attn_cuda.backends.flashinfer import FlashInferBackend
from attn_cuda.backends.flashinfer_mla import FlashInferMLABackend
from attn_cuda.backends.flashinfer_trtllm import FlashInferTrtllmBackend
from attn_shared.errors import VendorMissingError


@dataclass
class Spec:
    """As `flashinfer.jit.core.JitSpec`: one module, in a file once it is built."""

    name: str
    place: Path
    loads: list[str] = field(default_factory=list)

    def get_library_path(self) -> Path:
        return self.place / f"{self.name}.so"

    def build_and_load(self) -> str:
        self.loads.append(self.name)
        return self.name


class Core(ModuleType):
    JitSpec = Spec

    def __init__(self) -> None:
        super().__init__("flashinfer.jit.core")
        self.built: list[tuple[list[str], bool, str | None]] = []
        self.error: Exception | None = None
        self.broken = ""  # the module that raises it; "" for each

    def build_jit_specs(
        self, specs: list[Spec], verbose: bool = False, skip_prebuilt: bool = True
    ) -> None:
        names = [spec.name for spec in specs]
        self.built.append((names, skip_prebuilt, os.environ.get("MAX_JOBS")))
        if self.error is not None and (not self.broken or self.broken in names):
            raise self.error
        for spec in specs:
            spec.get_library_path().touch()


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    found = Core()
    parts = {"flashinfer": ModuleType("flashinfer"), "flashinfer.jit": ModuleType("flashinfer.jit")}
    for name, module in {**parts, found.__name__: found}.items():
        module.__path__ = []
        module.__spec__ = SimpleNamespace(name=name, origin=None)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_what_is_missing_is_noted_and_compiled_side_by_side(
    core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    there, first, second = (Spec(name, tmp_path) for name in ("there", "first", "second"))
    there.get_library_path().touch()
    compiler = FlashInferCompiler()
    with compiler.noting() as missing:
        assert there.build_and_load() == "there"
        for spec in (first, second, first):
            with pytest.raises(VendorMissingError, match=f"{spec.name} is not compiled yet"):
                spec.build_and_load()
        assert sorted(missing) == ["first", "second"]
    assert first.loads == second.loads == []
    compiler.compile(5)
    assert core.built == [(["first", "second"], True, "5")]
    assert os.environ["MAX_JOBS"] == "3"
    with compiler.noting() as missing:
        assert first.build_and_load() == "first"
        assert not missing
    assert second.build_and_load() == "second"  # the library's own again


def test_the_compilers_words_are_kept(
    core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    core.error = RuntimeError("Ninja build failed. nvcc: no such file")
    compiler = FlashInferCompiler()
    with compiler.noting(), pytest.raises(VendorMissingError):
        Spec("first", tmp_path).build_and_load()
    with pytest.raises(VendorMissingError, match=r"first do not compile; .*nvcc: no such file"):
        compiler.compile(2)
    assert "MAX_JOBS" not in os.environ


def test_what_compiles_is_compiled_beside_what_does_not(core: Core, tmp_path: Path) -> None:
    core.error, core.broken = RuntimeError("static assertion failed"), "second"
    compiler = FlashInferCompiler()
    with compiler.noting():
        for name in ("first", "second", "third"):
            with pytest.raises(VendorMissingError):
                Spec(name, tmp_path).build_and_load()
    with pytest.raises(VendorMissingError, match=r"^second do not compile; second: .*assertion"):
        compiler.compile(2)
    assert {path.stem for path in tmp_path.iterdir()} == {"first", "third"}


def test_a_release_without_it_says_so(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Core, "build_jit_specs")
    with pytest.raises(VendorMissingError, match=r"build_jit_specs.*pip install -U"):
        FlashInferCompiler()


@pytest.mark.parametrize(
    "backend", [FlashInferBackend, FlashInferTrtllmBackend, FlashInferMLABackend]
)
def test_backends_on_it_compile_ahead(core: Core, backend: type[FlashInferBackend]) -> None:
    assert isinstance(backend.kernel_compiler(), FlashInferCompiler)
