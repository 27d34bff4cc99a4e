"""Stubs in the place of modules, with the metadata of the distribution that would bring them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from attn_conformance.stubs.recorder import Recorder

__all__ = ["Computed", "Namespace", "VendorStub", "stub_module", "stub_vendor"]


@runtime_checkable
class Computed(Protocol):
    """What becomes a function or class when it is installed: `VarlenFunction`, `PlannedWrapper`."""

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for it; its calls go to the recorder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Something that holds functions and is no module, such as a library's operators in torch."""

    functions: Mapping[str, Computed]

    def function(self, recorder: Recorder) -> Any:
        """Return what stands for it; calls of its functions go to the recorder."""
        made = {name: item.function(recorder) for name, item in self.functions.items()}
        return SimpleNamespace(**made)


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorStub:
    """One release of a vendor's library.

    Attributes:
        distribution: its name on a package index.
        version: as its metadata says it.
        modules: module -> what it holds: `Computed`, or values that are taken as they are.
    """

    distribution: str
    version: str
    modules: Mapping[str, Mapping[str, object]]


@contextmanager
def stub_vendor(*stubs: VendorStub) -> Iterator[Recorder]:
    """Let these releases be importable, and found by their metadata, inside the context.

    What is really installed under the modules' names is out of sight meanwhile.
    """
    recorder = Recorder()
    hidden = {name.partition(".")[0] for stub in stubs for name in stub.modules}
    with tempfile.TemporaryDirectory() as folder, _restored(hidden):
        sys.path.insert(0, folder)
        for stub in stubs:
            _write_metadata(Path(folder), stub)
            for name, content in stub.modules.items():
                _install(name, content, recorder)
        yield recorder


def stub_module(
    name: str,
    functions: Mapping[str, object],
    *,
    distribution: str | None = None,
    version: str = "0",
) -> Any:
    """Let one module be importable; a context that gives the recorder.

    Args:
        name: of the module; its packages are made as well.
        functions: what it holds.
        distribution: that brings it; by default it has the module's name.
        version: of the distribution.
    """
    stub = VendorStub(
        distribution=distribution or name.partition(".")[0],
        version=version,
        modules={name: functions},
    )
    return stub_vendor(stub)


@contextmanager
def _restored(packages: set[str]) -> Iterator[None]:
    """Put sys.path and the modules of some top-level packages back in the end."""

    def take_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in packages]
        return {name: sys.modules.pop(name) for name in names}

    path, modules = list(sys.path), take_out()
    try:
        yield
    finally:
        sys.path[:] = path
        take_out()
        sys.modules.update(modules)


def _write_metadata(folder: Path, stub: VendorStub) -> None:
    name = stub.distribution.replace("-", "_")
    info = folder / f"{name}-{stub.version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {stub.distribution}\nVersion: {stub.version}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")


def _install(name: str, content: Mapping[str, object], recorder: Recorder) -> None:
    module = _module(name)
    for attribute, value in content.items():
        setattr(module, attribute, _made(value, recorder))


def _made(value: object, recorder: Recorder) -> object:
    return value.function(recorder) if isinstance(value, Computed) else value


def _module(name: str) -> ModuleType:
    """Return a module of this name, made with its packages where there is none yet."""
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []  # so that modules below it may be looked for
    sys.modules[name] = module
    package, _, last = name.rpartition(".")
    if package:
        setattr(_module(package), last, module)
    return module
