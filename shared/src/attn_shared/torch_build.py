"""What this torch was built for: read from its version module, which starts no runtime."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

__all__ = ["Runtime", "TorchBuild", "is_running"]


class Runtime(StrEnum):
    """A runtime that a build of torch may be linked with."""

    CUDA = "CUDA"
    ROCM = "ROCm"
    XPU = "XPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Versions of the runtimes that a torch was built with; None for those that it was not.

    `torch.cuda.is_available()` is true with ROCm as well, so that it tells nothing here.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None

    @classmethod
    def current(cls) -> TorchBuild:
        """Return the build of the torch that is imported."""
        return cls(
            version=torch.__version__,
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            xpu=torch.version.xpu,
        )

    @property
    def runtime(self) -> Runtime | None:
        """The runtime that this torch is linked with; None for a CPU build."""
        if self.hip is not None:
            return Runtime.ROCM
        if self.cuda is not None:
            return Runtime.CUDA
        return Runtime.XPU if self.xpu is not None else None

    def problem(self, wanted: Runtime) -> str | None:
        """Say why this torch cannot use a runtime's devices, and what to do; None if it can."""
        if self.runtime is wanted:
            return None
        words = f"without {wanted}" if self.runtime is None else f"for {self.runtime}, not {wanted}"
        return (
            f"torch {self.version} is built {words}: install torch's {wanted} build "
            "(pytorch.org/get-started/locally gives the command)"
        )


def is_running(runtime: Runtime) -> bool:
    """Whether torch has started this runtime in this process; starts nothing.

    In a process forked from one that had started it, it is not running.
    """
    if TorchBuild.current().runtime is not runtime:
        return False
    module = torch.xpu if runtime is Runtime.XPU else torch.cuda  # ROCm has CUDA's names in torch
    return bool(module.is_initialized())
