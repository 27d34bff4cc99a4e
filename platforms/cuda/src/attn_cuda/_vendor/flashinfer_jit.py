"""FlashInfer's compiler: which modules are missing, and all of them compiled side by side."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from attn_cuda._vendor.flashinfer_library import library
from attn_shared.errors import VendorMissingError, own_words
from attn_shared.probing import require

__all__ = ["FlashInferCompiler"]

_LIBRARY = "flashinfer"
_TOO_OLD = "too old; pip install -U flashinfer-python"
_JOBS = "MAX_JOBS"  # the library's own variable; without it ninja takes every core


class FlashInferCompiler:
    """Notes modules by the one call that loads each, `JitSpec.build_and_load`."""

    def __init__(self) -> None:
        """Import the library's compiler.

        Raises:
            VendorMissingError: it does not load, or has none of the calls used here.
        """
        try:
            library()
            self._core = importlib.import_module("flashinfer.jit.core")
            self._spec = require(self._core, "JitSpec", _TOO_OLD)
            self._build = require(self._core, "build_jit_specs", _TOO_OLD)
        except ImportError as error:
            raise VendorMissingError(
                f"{_LIBRARY} has no compiler that can be asked: {own_words(error)}.",
                library=_LIBRARY,
            ) from error
        self._missing: dict[str, Any] = {}

    @contextmanager
    def noting(self) -> Iterator[Collection[str]]:
        """Note what is missing instead of compiling it; see `KernelCompiler.noting`."""
        load = self._spec.build_and_load

        def load_or_note(spec: Any, *arguments: Any, **options: Any) -> Any:
            if spec.get_library_path().exists():
                return load(spec, *arguments, **options)
            self._missing[spec.name] = spec
            raise VendorMissingError(f"{spec.name} is not compiled yet.", library=_LIBRARY)

        self._spec.build_and_load = load_or_note
        try:
            yield self._missing.keys()
        finally:
            self._spec.build_and_load = load

    def compile(self, jobs: int) -> None:
        """Compile what was noted; see `KernelCompiler.compile`."""
        specs, self._missing = list(self._missing.values()), {}
        before = os.environ.get(_JOBS)
        os.environ[_JOBS] = str(jobs)
        try:
            self._build_all(specs)
        finally:
            if before is None:
                del os.environ[_JOBS]
            else:
                os.environ[_JOBS] = before

    def _build_all(self, specs: list[Any]) -> None:
        """Build side by side; after a failure, which ends the others too, each of them alone."""
        try:
            self._build(specs, verbose=False, skip_prebuilt=True)
        except Exception as error:  # noqa: BLE001 - nvcc speaks through whatever the library raises
            failed = {specs[0].name: error} if len(specs) == 1 else self._build_each(specs)
            for name, words in failed.items():
                raise VendorMissingError(
                    f"{', '.join(failed)} do not compile; {name}: {own_words(words)}",
                    library=_LIBRARY,
                ) from words

    def _build_each(self, specs: list[Any]) -> dict[str, Exception]:
        failed: dict[str, Exception] = {}
        for spec in specs:
            try:
                self._build([spec], verbose=False, skip_prebuilt=True)
            except Exception as error:  # noqa: BLE001 - likewise
                failed[spec.name] = error
        return failed
