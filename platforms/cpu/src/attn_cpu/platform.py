"""The platform of host processors: always there, with this process's share of the machine."""

from __future__ import annotations

import platform as python_platform
from collections.abc import Callable, Collection
from pathlib import Path
from typing import ClassVar

import torch

from attn_cpu._vendor import attn_cpu_kernels
from attn_cpu.cpu_info import CpuInfo, best_isa, isa_of_torch_capability, parse_cpuinfo
from attn_cpu.files import read_text
from attn_cpu.priorities import MLA_PREFILL_PRIORITIES, MLA_PRIORITIES, PRIORITIES
from attn_cpu.topology import CpuTopology, allowed_cpus, read_topology
from attn_shared.arch import UNKNOWN_FAMILY, parse_arch
from attn_shared.device import DeviceFacts, Fp8Format, Vendor
from attn_shared.errors import UnknownNameError
from attn_shared.inventory import VendorSpec
from attn_shared.platform import Availability, Candidate, Platform
from attn_shared.ranking import check_vendor, rank
from attn_shared.request import AttentionRequest

__all__ = ["CpuPlatform"]

_BF16_ARITHMETIC = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


class CpuPlatform(Platform):
    """The CPU that this process runs on, as one device.

    Facts are read once, when first asked for: CPU affinity and a control group's limits count as
    they were then.

    Args:
        root: the folder that stands for "/", where /proc and /sys are read.
        cpus: returns the logical CPUs that this process may run on.
        machine: the kind of processor, as `platform.machine()` names it.
    """

    name: ClassVar[str] = "cpu"
    vendor: ClassVar[Vendor] = Vendor.CPU
    torch_device_type: ClassVar[str] = "cpu"
    distribution: ClassVar[str] = "attn-cpu"
    precedence: ClassVar[int] = 100

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        cpus: Callable[[], Collection[int]] = allowed_cpus,
        machine: str | None = None,
    ) -> None:
        self._root = root
        self._cpus = cpus
        self._machine = machine
        self._topology: CpuTopology | None = None
        self._facts: DeviceFacts | None = None

    def availability(self) -> Availability:
        """Say what the CPU is; one is always there."""
        facts = self._device()
        reason = f"{facts.name} ({facts.arch}): {facts.compute_units} cores, {best_isa(facts.isa)}"
        return Availability(is_available=True, reason=reason)

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the CPU as one device, whatever its sockets."""
        return (self._device(),)

    def candidates(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        """Return the backends offered on CPUs, best rank first.

        Raises:
            InvalidInputError: the device is no CPU.
        """
        check_vendor(device, self.vendor)
        table = MLA_PRIORITIES if request.use_mla else PRIORITIES
        return rank(table, request, device)

    def mla_prefills(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        """Return the prefills over latents, best rank first.

        Raises:
            InvalidInputError: the device is another vendor's.
        """
        check_vendor(device, self.vendor)
        return rank(MLA_PREFILL_PRIORITIES, request, device)

    def vendor_specs(self) -> tuple[VendorSpec, ...]:
        """Return how to find this distribution's own kernels, which a pure wheel does not have."""
        return (attn_cpu_kernels.SPEC,)

    def supported_dtypes(self, device: DeviceFacts) -> tuple[torch.dtype, ...]:
        """Return all compute dtypes; bfloat16 first where the CPU has arithmetic for it.

        Elsewhere float32 is first: torch computes the others by converting to it.

        Raises:
            InvalidInputError: the device is no CPU.
        """
        check_vendor(device, self.vendor)
        if _BF16_ARITHMETIC.isdisjoint(device.isa):
            return (torch.float32, torch.bfloat16, torch.float16)
        return (torch.bfloat16, torch.float32, torch.float16)

    def topology(self) -> CpuTopology:
        """Return threads, NUMA nodes, caches and limits: what `DeviceFacts` has no field for."""
        if self._topology is None:
            self._topology = read_topology(self._root, self._cpus())
        return self._topology

    def _device(self) -> DeviceFacts:
        if self._facts is None:
            self._facts = self._read_facts()
        return self._facts

    def _read_facts(self) -> DeviceFacts:
        topology = self.topology()
        machine = self._machine or python_platform.machine()
        info, sources = self._read_info(topology.cpus)
        arch, family = _arch_of(machine)
        return DeviceFacts(
            vendor=Vendor.CPU,
            name=info.model or python_platform.processor() or machine,
            arch=arch,
            capability=None,
            arch_family=family,
            fp8=Fp8Format.NONE,
            memory_bytes=topology.memory_bytes,
            compute_units=topology.usable_cores,
            isa=info.isa,
            index=0,
            notes=(*sources, *topology.notes()),
        )

    def _read_info(self, cpus: Collection[int]) -> tuple[CpuInfo, tuple[str, ...]]:
        """Return the processor, and a note where torch had to be asked for it."""
        text = read_text(self._root / "proc/cpuinfo")
        if text is not None:
            return parse_cpuinfo(text, cpus=cpus), ()
        capability = torch.backends.cpu.get_cpu_capability()
        note = f"instruction sets: the least that torch's dispatch level {capability} implies"
        return CpuInfo(model="", isa=isa_of_torch_capability(capability)), (note,)


def _arch_of(machine: str) -> tuple[str, str]:
    try:
        arch = parse_arch(machine)
    except UnknownNameError:
        return machine, UNKNOWN_FAMILY
    return arch.canonical, arch.family
