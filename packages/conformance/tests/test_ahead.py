"""Kernels that are compiled ahead of the suite, through a library that says what is missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from attn_conformance.ahead import compile_needed, main
from attn_conformance.reference_backend import ReferenceBackend, ReferenceImpl
from attn_conformance.subject import Subject
from attn_conformance.verify import verify
from attn_shared.errors import InvalidInputError, UnsupportedOptionError, VendorMissingError


class Library:
    """Has modules by name; a missing one is compiled at once, or noted."""

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.jobs: list[int] = []
        self.missing: set[str] = set()
        self.is_noting = False
        self.broken = ""

    def load(self, name: str) -> None:
        if name in self.compiled:
            return
        assert self.is_noting, "compiled within a case"
        self.missing.add(name)
        raise VendorMissingError(f"{name} is not compiled yet.", library="library")

    @contextmanager
    def noting(self) -> Iterator[Collection[str]]:
        self.is_noting = True
        yield self.missing
        self.is_noting = False

    def compile(self, jobs: int) -> None:
        self.jobs.append(jobs)
        if self.broken in self.missing:
            raise VendorMissingError(f"{self.broken} do not compile", library="library")
        self.compiled |= self.missing
        self.missing = set()


LIBRARY = Library()


class LazyImpl(ReferenceImpl):
    def forward(self, layer, query, *rest, **options):  # type: ignore[no-untyped-def]
        LIBRARY.load("first")
        LIBRARY.load(f"then {self.spec.head_size}")
        return super().forward(layer, query, *rest, **options)


class Lazy(ReferenceBackend):
    """Needs two modules for each layer, and finds them missing one after the other."""

    library: ClassVar[Library] = LIBRARY

    @staticmethod
    def get_impl_cls() -> type[LazyImpl]:
        return LazyImpl

    @classmethod
    def kernel_compiler(cls) -> Library:
        return cls.library


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    LIBRARY.__init__()  # type: ignore[misc]


def test_passes_go_on_until_nothing_is_missing() -> None:
    subject = Subject.find(f"{__name__}:Lazy")
    said: list[str] = []
    assert compile_needed(subject, 3, ["causal"], say=said.append) == 2
    assert LIBRARY.jobs == [3, 3]
    assert LIBRARY.compiled == {"first", "then 16"}
    assert "compiling 1 modules, 3 files at a time" in said[0]
    assert said[1].endswith("first")
    assert compile_needed(subject, 3, ["causal"]) == 0
    assert len(LIBRARY.jobs) == 2


def test_what_does_not_compile_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    LIBRARY.broken = "first"
    command = [f"{__name__}:Lazy", "--device", "cpu", "--jobs", "1", "--rule", "causal"]
    assert main(command) == 2
    assert "first do not compile" in capsys.readouterr().err
    LIBRARY.broken = "another"
    assert main(command) == 0
    assert "2 modules were compiled, none is missing" in capsys.readouterr().out


def test_a_backend_that_compiles_nothing_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    name = "attn_conformance.reference_backend:ReferenceBackend"
    with pytest.raises(UnsupportedOptionError, match="compile_jobs=2 is not served by"):
        compile_needed(Subject.find(name), 2, ["causal"])
    with pytest.raises(UnsupportedOptionError, match=r"not compiled ahead: compile_jobs=2"):
        verify(name, rules=["causal"], compile_jobs=2)
    assert "compiles nothing ahead" not in capfd.readouterr().err, "said twice"
    with pytest.raises(InvalidInputError, match="compile_jobs is 0; allowed: at least 1"):
        verify(name, rules=["causal"], compile_jobs=0)
