"""CPU_ATTN held to one instruction set each, as the conformance suite takes classes."""

from __future__ import annotations

from attn_cpu.backends.cpu_attn import CpuAttnBackend, CpuAttnImpl
from attn_cpu.isa import IsaLevel

__all__ = ["CLASSES"]


def _held_to(level: IsaLevel) -> type[CpuAttnBackend]:
    impl = type(f"Impl_{level.label}", (CpuAttnImpl,), {"isa": level})

    class Held(CpuAttnBackend):
        @staticmethod
        def get_impl_cls() -> type[CpuAttnImpl]:
            return impl

    Held.__name__ = Held.__qualname__ = f"held_{level.label}"
    return Held


CLASSES = {level.label: _held_to(level) for level in IsaLevel}
globals().update({cls.__name__: cls for cls in CLASSES.values()})
