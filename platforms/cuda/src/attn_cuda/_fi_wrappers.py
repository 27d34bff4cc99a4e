"""FlashInfer's planned wrappers: made once, lent to one step at a time, planned with care.

`plan` fills a pinned buffer of the wrapper and copies it to the device while the host goes on, and
overwrites what `run` reads. So a wrapper waits for its last copy before it is planned again, and is
planned again only when nobody holds the step that it was planned for. All share one workspace,
which holds nothing between two kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_cuda._fi_capability import LSE_GROUPS
from attn_cuda._fi_choice import decodes_on_tensor_cores
from attn_cuda._fi_key import PlanKey
from attn_cuda._fi_loaded import Loaded
from attn_cuda._vendor import flashinfer
from attn_shared.workspace import Workspace

__all__ = [
    "Lease",
    "Planner",
    "Wrappers",
    "has_plain_decode",
    "shared_workspace",
    "uses_tensor_cores",
    "workspace_bytes",
]

_MIB = 2**20
_LARGEST_TILE = 128  # rows of one program, of queries times heads of a group
_DECODE_TILES = (16, 64, _LARGEST_TILE)
_PROGRAMS_PER_UNIT = 2
_USUAL_COMPUTE_UNITS = 132

_LSE_ARGUMENTS = {"lse_base": "log2", "lse_layout": "NH"}

_WORKSPACES: weakref.WeakValueDictionary[torch.device, Workspace] = weakref.WeakValueDictionary()


def uses_tensor_cores(key: PlanKey) -> bool:
    """Whether decode runs on tensor cores."""
    return decodes_on_tensor_cores(key.group, is_quantized=key.is_quantized)


def has_plain_decode(key: PlanKey) -> bool:
    """Whether there is a decode without tensor cores, which sums unrounded weights."""
    return not key.is_quantized and key.group in LSE_GROUPS


def workspace_bytes(key: PlanKey, num_compute_units: int, largest_capture: int = 0) -> int:
    """Return the scratch memory that no plan exceeds.

    Where keys are split, each program leaves float32 rows of output and one LSE. Without a graph
    there are at most 2 programs per unit; a captured decode has a program per request as well.
    (`PrefillPlan` of FlashInfer's scheduler.)

    Args:
        key: of the layers.
        num_compute_units: of the device.
        largest_capture: requests of the largest captured batch, 0 for none.
    """
    programs = max(1, _PROGRAMS_PER_UNIT * num_compute_units // key.num_kv_heads)
    rows = programs * _LARGEST_TILE
    if largest_capture:
        tile = next((size for size in _DECODE_TILES if key.group <= size), _LARGEST_TILE)
        tiles = -(-largest_capture * key.group // tile) + largest_capture - 1
        rows = max(rows, max(programs, tiles) * tile)
    num_bytes = 4 * key.num_heads * rows * (key.head_size + 1)
    return (num_bytes // _MIB + 2) * _MIB


def shared_workspace(device: torch.device) -> Workspace:
    """Return the workspace of a device, which lives as long as somebody holds it."""
    found = _WORKSPACES.get(device)
    if found is None:
        found = _WORKSPACES[device] = Workspace(device)
    return found


class Planner:
    """One wrapper, and what must be waited for before it is planned again."""

    def __init__(self, wrapper: Any, device: torch.device, run_options: dict[str, str]) -> None:
        """Keep the wrapper.

        Args:
            wrapper: of the library.
            device: where it runs.
            run_options: further keywords of its `run`.
        """
        self.wrapper = wrapper
        self.run_options = run_options
        self._is_staged = False
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            # By its number: a device without one would be looked up at every plan.
            self._index = torch.cuda.current_device() if device.index is None else device.index

    def plan(self, **arguments: Any) -> None:
        """Plan, after the last plan has left the pinned buffer."""
        if self._copied is None:
            self.wrapper.plan(**arguments)
            return
        if self._is_staged:
            self._copied.synchronize()
        self.wrapper.plan(**arguments)
        self._copied.record(torch.cuda.current_stream(self._index))
        self._is_staged = True


class Lease:
    """A planner in one step's hands; it goes back when the step is forgotten."""

    __slots__ = ("_home", "planner", "run")

    def __init__(self, planner: Planner, home: list[Planner] | None) -> None:
        """Hold a planner; without a home it is kept for good, as captured ones are."""
        self.planner = planner
        self.run: Callable[..., Any] = planner.wrapper.run
        self._home = home

    def __del__(self) -> None:
        """Give the planner back."""
        if self._home is not None:
            self._home.append(self.planner)


class Wrappers:
    """The wrappers of one builder."""

    def __init__(
        self,
        key: PlanKey,
        device: torch.device,
        loaded: Loaded,
        workspace: Workspace | None = None,
        largest_capture: int = 0,
    ) -> None:
        """Make none yet.

        Args:
            key: what every plan has in common.
            device: where they run.
            loaded: which release.
            workspace: scratch memory; None for that of the device.
            largest_capture: requests of the largest captured batch, 0 for none.
        """
        self.key = key
        self.device = device
        self._loaded = loaded
        units = loaded.device.compute_units or _USUAL_COMPUTE_UNITS
        self._num_bytes = workspace_bytes(key, units, largest_capture)
        self._largest_capture = largest_capture
        self._workspace = workspace or shared_workspace(device)
        self._idle: dict[str, list[Planner]] = {}
        self._captured: dict[int, Planner] = {}
        self._indices: Tensor | None = None

    def decode(self, *, on_tensor_cores: bool) -> Lease:
        """Return a wrapper for single queries."""
        kind = "decode on tensor cores" if on_tensor_cores else "decode"
        return self._lend(kind, partial(self._decode_wrapper, on_tensor_cores))

    def prefill(self, kernels: str) -> Lease:
        """Return a wrapper for queries over pages, by the kernels "fa2" or "fa3"."""
        return self._lend(f"prefill {kernels}", lambda: self._rows_wrapper("prefill", kernels))

    def ragged(self, kernels: str) -> Lease:
        """Return a wrapper for queries over keys that come with the call."""
        return self._lend(f"ragged {kernels}", lambda: self._rows_wrapper("ragged", kernels))

    def cascade(self) -> Lease:
        """Return a wrapper of two levels."""
        return self._lend("cascade", self._cascade_wrapper)

    def captured(self, size: int, most_pages: int) -> Lease:
        """Return the one decode wrapper of a captured batch size, over buffers that stay.

        All sizes share the buffer of page numbers, since each replay follows a plan of its own.

        Args:
            size: requests.
            most_pages: of one request.
        """
        if size not in self._captured:
            if self._indices is None:
                self._indices = self._ints(self._largest_capture * most_pages)
            make = partial(
                self._decode_wrapper,
                uses_tensor_cores(self.key),
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._ints(size + 1),
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=self._ints(size),
            )
            self._captured[size] = self._planner(make, "decode")
        return Lease(self._captured[size], None)

    @property
    def held_pages(self) -> int:
        """Page numbers that captured batches have room for."""
        return 0 if self._indices is None else len(self._indices)

    def _lend(self, kind: str, make: Callable[[], Any]) -> Lease:
        idle = self._idle.setdefault(kind, [])
        return Lease(idle.pop() if idle else self._planner(make, kind), idle)

    def _planner(self, make: Callable[[], Any], kind: str) -> Planner:
        """Make a wrapper that may be planned outside inference mode, wherever it is made."""
        with torch.inference_mode(mode=False):
            return Planner(make(), self.device, self._run_options(kind))

    def _run_options(self, kind: str) -> dict[str, str]:
        """Return the base and order of the LSE, where a release lets them be chosen."""
        name = kind.split()[0]
        return {
            argument: value
            for argument, value in _LSE_ARGUMENTS.items()
            if self._loaded.takes(f"{name}.run.{argument}")
        }

    def _decode_wrapper(self, on_tensor_cores: bool, **buffers: Any) -> Any:
        return flashinfer.wrapper("decode")(
            self._scratch(),
            kv_layout=str(self.key.layout),
            use_tensor_cores=on_tensor_cores,
            backend="fa2",  # never "auto": later releases may take other kernels for it
            **buffers,
        )

    def _rows_wrapper(self, short: str, kernels: str) -> Any:
        layout = str(self.key.layout) if short == "prefill" else "NHD"  # new keys are token-major
        return flashinfer.wrapper(short)(self._scratch(), kv_layout=layout, backend=kernels)

    def _cascade_wrapper(self) -> Any:
        return flashinfer.wrapper("cascade")(2, self._scratch(), kv_layout=str(self.key.layout))

    def _scratch(self) -> Tensor:
        return self._workspace.get(self._num_bytes)

    def _ints(self, size: int) -> Tensor:
        with torch.inference_mode(mode=False):
            return torch.zeros(size, dtype=torch.int32, device=self.device)
