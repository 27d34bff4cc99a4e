"""The field's names of backends as enums, over the process's registry."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum, auto
from typing import Any, TypeVar

from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS
from attn_shared.registry import DEFAULT_REGISTRY, BackendKind

__all__ = ["AttentionBackendEnum", "MambaAttentionBackendEnum", "register_backend"]

C = TypeVar("C", bound=type[Any])


class _RegisteredName(StrEnum):
    """What the two enums share: a member's value is its name, looked up in the open registry."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[str]) -> str:
        return name

    @classmethod
    def _kind(cls) -> BackendKind:
        return "attention"

    def get_path(self, include_classname: bool = True) -> str:
        """Return "package.module:Class" of what provides this name.

        Args:
            include_classname: False leaves the class out.

        Raises:
            BackendNotProvidedError: nothing installed provides it.
        """
        path = DEFAULT_REGISTRY.get(self.value, self._kind()).path
        module, _, _ = path.partition(":")
        return path if include_classname else module

    def get_class(self) -> type[Any]:
        """Return the class that provides this name, importing it."""
        return DEFAULT_REGISTRY.load(self.value, self._kind())

    def is_overridden(self) -> bool:
        """Whether `register_backend` replaced or added the provider."""
        return DEFAULT_REGISTRY.is_overridden(self.value, self._kind())

    def clear_override(self) -> None:
        """Undo `register_backend`."""
        DEFAULT_REGISTRY.clear_override(self.value, self._kind())


class AttentionBackendEnum(_RegisteredName):
    """Names of attention backends; `known_backends.KNOWN_BACKENDS` has the facts of each."""

    TORCH_SDPA = auto()
    FLEX_ATTENTION = auto()
    FLASH_ATTN = auto()
    FLASH_ATTN_DIFFKV = auto()
    TRITON_ATTN = auto()
    TRITON_ATTN_DIFFKV = auto()
    ROCM_ATTN = auto()
    ROCM_AITER_FA = auto()
    ROCM_AITER_UNIFIED_ATTN = auto()
    FLASHINFER = auto()
    FLASHINFER_TRTLLM = auto()
    XPU_FLASH_ATTN = auto()
    IPEX = auto()
    CPU_ATTN = auto()
    HPC_ATTN = auto()
    TURBOQUANT = auto()
    MINIMAX_M3_SPARSE = auto()
    TORCH_MLA = auto()
    TRITON_MLA = auto()
    FLASHMLA = auto()
    FLASHINFER_MLA = auto()
    FLASH_ATTN_MLA = auto()
    CUTLASS_MLA = auto()
    TOKENSPEED_MLA = auto()
    CPU_MLA = auto()
    ROCM_AITER_MLA = auto()
    ROCM_AITER_TRITON_MLA = auto()
    ROCM_AITER_MLA_SPARSE = auto()
    XPU_MLA_SPARSE = auto()
    FLASHINFER_MLA_SPARSE = auto()
    FLASHINFER_MLA_SPARSE_SM120 = auto()
    FLASHINFER_MLA_SPARSE_DSV4 = auto()
    FLASHMLA_SPARSE = auto()
    FLASHMLA_SPARSE_DSV4 = auto()
    ROCM_FLASHMLA_SPARSE_DSV4 = auto()
    FLASH_ATTN_MLA_SPARSE = auto()
    NO_ATTENTION = auto()
    CUSTOM = auto()


class MambaAttentionBackendEnum(_RegisteredName):
    """Names of recurrent backends."""

    MAMBA1 = auto()
    MAMBA2 = auto()
    SHORT_CONV = auto()
    LINEAR = auto()
    GDN_ATTN = auto()
    CUSTOM = auto()

    @classmethod
    def _kind(cls) -> BackendKind:
        return "mamba"


def register_backend(
    name: str | StrEnum, target: str | type[Any] | None = None
) -> Callable[[C], C]:
    """Provide a backend under a name, in this process.

    Call it with a class or a path, or use it as a decorator:

        @register_backend("MY_ATTN")
        class MyBackend(AttentionBackend): ...

    The registry follows from the name: a member of `MambaAttentionBackendEnum`, and a name that
    only recurrent backends have, goes to the recurrent one, everything else to attention.

    Raises:
        BackendDefinitionError: the class cannot serve under this name.
        DuplicateNameError: the name was registered for another path and not cleared.
    """
    kind = _kind_of(name)
    if target is not None:
        DEFAULT_REGISTRY.register(str(name), target, kind=kind)

    def decorate(cls: C) -> C:
        if target is None:
            DEFAULT_REGISTRY.register(str(name), cls, kind=kind)
        return cls

    return decorate


def _kind_of(name: str | StrEnum) -> BackendKind:
    is_recurrent = name in KNOWN_MAMBA_BACKENDS and name not in KNOWN_BACKENDS
    is_member = isinstance(name, MambaAttentionBackendEnum)
    return "mamba" if is_member or is_recurrent else "attention"
