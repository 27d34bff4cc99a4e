"""TRITON among the prefills over latents: heads of 192 and 128, or any other widths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.arch import Arch
from attn_shared.capability import Capability, DeviceLimit, Reason, Rule, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES, dtype_name
from attn_shared.kernel_paths import KernelPath
from attn_shared.mla_metadata import RaggedPart
from attn_shared.mla_prefill import MLAPrefill, prefill_capability
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton._builder import planning
from attn_triton._steps import plan_ints
from attn_triton._visibility import visibility_of
from attn_triton.kernel_paths import arch_of
from attn_triton.latent_paths import has_gluon_in
from attn_triton.launch import AddressedLaunch, Launcher
from attn_triton.machine import machine_of
from attn_triton.mla_prompt_tiles import plain_because
from attn_triton.mla_prompts import HopperPrompts, PromptBlocks, targets
from attn_triton.paged import load_triton
from attn_triton.tiles import (
    Tile,
    Widths,
    least_shared_bytes,
    next_power_of_2,
    prefill_tile,
    shared_bytes,
)

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["TritonPrefill"]

_LOG2E = math.log2(math.e)
_PLAIN = "the portable kernel, by blocks of query rows"
_HOPPER = "the kernel for Hopper, in Gluon"
_UNUSED_TILE = 64  # of the decode kernel, of whose items there are none


def _widths(dims: MLADims, dtype: torch.dtype) -> Widths:
    return Widths(
        head_size=dims.qk_nope_head_dim + dims.qk_rope_head_dim,
        head_size_v=dims.v_head_dim,
        element_bytes=dtype.itemsize,
        cache_bytes=dtype.itemsize,
    )


def _tile_fits(request: AttentionRequest, device: DeviceFacts) -> Reason | None:
    """The smallest tiles must fit what one program may have of shared memory."""
    limit, dims = device.shared_memory_bytes, request.mla
    if limit is None or dims is None:
        return None
    widths = _widths(dims, request.dtype)
    needed = least_shared_bytes(widths)
    if needed <= limit:
        return None
    return Reason(
        code="shared_memory",
        value=f"{needed} bytes for tiles of head sizes {widths.head_size} and "
        f"{widths.head_size_v} in {dtype_name(request.dtype)}",
        allowed=f"at most {limit} bytes on {device.arch}",
    )


_CAPABILITY = prefill_capability(
    (
        DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0)),
        DeviceLimit(vendor=Vendor.AMD),
        DeviceLimit(vendor=Vendor.INTEL),
    ),
    frozenset(COMPUTE_DTYPES.values()),
    batch_invariant=Support.YES,
    non_causal=Support.YES,
    rules=(Rule(name="shared_memory", check=_tile_fits),),
)


def _tile(arch: Arch, widths: Widths) -> Tile:
    """Return the shape for prompts, held to few registers only where two programs share a unit."""
    tile = prefill_tile(arch, widths)
    limit = arch.shared_memory_bytes
    if limit is not None and 2 * shared_bytes(tile, widths) > limit:
        return replace(tile, max_registers=None)
    return tile


def _has_gluon(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    from attn_triton.kernels.compiling import has_gluon

    return has_gluon()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Blocks:
    """Blocks of query rows of one part.

    Attributes:
        plan: where each request's blocks begin, for the kernel.
        num_blocks: of all requests.
    """

    plan: Tensor
    num_blocks: int


class TritonPrefill(MLAPrefill):
    """Blocks of query rows, by a kernel of their own on Hopper, else by that of ordinary heads."""

    name = "TRITON"
    attn_api = ">=1,<2"
    vendor_libraries = ("triton",)
    description = "Triton kernels for prompts: portable for any widths, and one for Hopper"

    def __init__(self, spec: LayerSpec, config: BuildConfig, device: torch.device) -> None:
        """Keep what every step needs."""
        super().__init__(spec, config, device)
        dims, machine = spec.mla or MLADims(), machine_of(device)
        self._widths = _widths(dims, spec.dtype)
        self._tile = _tile(machine.arch, self._widths)
        self._nope = dims.qk_nope_head_dim
        self._hopper: HopperPrompts | None = None
        if plain_because(machine.arch, dims, spec.dtype, has_gluon=_has_gluon(device)) is None:
            self._hopper = HopperPrompts(spec, config, device, machine)
        self._programs: dict[tuple[object, ...], AddressedLaunch] = {}

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every device, but for the rule on the device."""
        return _CAPABILITY

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import Triton and see that it can run kernels here.

        Raises:
            VendorMissingError: it does not import, or has no active driver.
        """
        load_triton()

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return which of the two kernels prefills."""
        dims, arch = request.mla or MLADims(), arch_of(device)
        why = plain_because(arch, dims, request.dtype, has_gluon=has_gluon_in(inventory))
        if why is not None:
            return (KernelPath(rows="prefills", kernel=_PLAIN, why=why),)
        why = f"widths of 128, 64 and 128 in 16 bits on {arch.canonical}"
        return (KernelPath(rows="prefills", kernel=_HOPPER, why=why),)

    def prepare(self, part: RaggedPart) -> _Blocks | PromptBlocks:
        """Have the device compute where each request's blocks begin."""
        if self._hopper is not None:
            return self._hopper.prepare(part)
        starts: list[int] = part.query_start_loc_cpu.tolist()
        rows, num_reqs = self._tile.rows, len(starts) - 1
        size = plan_ints(0, num_reqs)
        plan = torch.empty(size, dtype=torch.int32, device=self.device)
        block = next_power_of_2(max(num_reqs, self.config.max_num_seqs, 16))
        launch = planning(visibility_of(self.spec), True, _UNUSED_TILE, 0, 1, block)
        tensors = (plan, part.query_start_loc, part.key_start_loc)
        launch((1, 1, 1), tensors, (num_reqs, 0, 0, 0, 1, rows))
        count = sum(-(-(stop - start) // rows) for start, stop in pairwise(starts))
        return _Blocks(plan=plan, num_blocks=count)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: RaggedPart,
        *,
        output: Tensor | None = None,
        returns_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `MLAPrefill.run`."""
        if self._hopper is not None:
            nope, rope = key[..., : self._nope], key[..., self._nope :]
            return self._hopper.run(
                query, nope, rope, value, part, output=output, returns_lse=returns_lse
            )
        output, lse = targets(query, value, output, returns_lse=returns_lse)
        blocks: _Blocks = part.plan
        places = (query, key, value, output)
        strides = tuple(each.stride()[:2] for each in places)
        programs = self._programs.get((strides, part.is_causal))
        if programs is None:
            programs = self._make(strides, is_causal=part.is_causal)
            self._programs[strides, part.is_causal] = programs
        starts = (part.key_start_loc, part.query_start_loc)
        programs(
            (blocks.num_blocks * self.spec.num_heads, 1, 1),
            (*places, lse, blocks.plan, None, *starts, *(None,) * 6),
            (
                *(len(part.query_start_loc) - 1, 0, 0, 0),
                0 if lse is None else lse.stride(0),
                *(self.spec.scale * _LOG2E, 1.0, 1.0),
            ),
        )
        return output, lse

    def run_apart(
        self,
        query: Tensor,
        nope: Tensor,
        rope: Tensor,
        value: Tensor,
        part: RaggedPart,
        *,
        output: Tensor | None = None,
        returns_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `MLAPrefill.run_apart`. The kernel for Hopper needs no whole keys."""
        attend, last = super().run_apart, rope
        if self._hopper is not None:
            attend, last = self._hopper.run, rope.unsqueeze(1)
        return attend(query, nope, last, value, part, output=output, returns_lse=returns_lse)

    def _make(self, strides: tuple[tuple[int, ...], ...], *, is_causal: bool) -> AddressedLaunch:
        from attn_triton.kernels.prefill import prefill

        tile, heads, widths = self._tile, self.spec.num_heads, self._widths
        padded, padded_v = widths.padded
        query, key, value, output = strides
        constants = {
            "HQ": heads,
            "HK": heads,
            "D": widths.head_size,
            "DV": widths.head_size_v,
            "DP": padded,
            "DVP": padded_v,
            "ROWS": tile.rows,
            "BN": tile.keys,
            "STAGES": tile.stages,
            "PAGE": 0,
            "LEFT": -1,
            "RIGHT": -1,
            "CHUNK": 0,
            "CAUSAL": int(is_causal),
            "SOFTCAP": False,
            "SCALES": 0,
            "INT8": False,
            **dict(zip(("Q_TOKEN", "Q_HEAD"), query, strict=True)),
            **dict(zip(("O_TOKEN", "O_HEAD"), output, strict=True)),
            **dict(zip(("K_BLOCK", "K_TOKEN", "K_HEAD"), (0, *key), strict=True)),
            **dict(zip(("V_BLOCK", "V_TOKEN", "V_HEAD"), (0, *value), strict=True)),
        }
        registers = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
        return AddressedLaunch(
            Launcher(prefill, constants, num_warps=tile.num_warps, options=registers)
        )
