"""Kernels that begin while the one before them ends: programmatic dependent launch.

On NVIDIA GPUs from Hopper on a launch may carry an attribute by which the driver starts a grid as
soon as all programs of the one before it in the stream have ended or said `release_next`, instead
of when all its memory is written. Starting up, which takes about a microsecond, is hidden so. What
makes that safe:

1. Every program of such a kernel calls `wait_for_earlier` before it ends, so that the grid never
   ends before the one that it depends on. Whatever follows without the attribute (a projection, a
   copy, an event) waits for the last grid, and by that for all before it.
2. Before it waits a program reads nothing and writes nothing, but for rule 4. After it everything
   that the earlier grid wrote is there, and whatever that one read may be overwritten: the memory
   for parts, which all layers share, is written again by the next decode only after the merge
   that reads it has ended.
3. `release_next` comes after the wait. So a grid that has begun knows that all but the one
   grid before it have ended, and that their writes are visible.
4. The merging kernels read the plan and the query's places before they wait: these were written
   before decode, which waited for that by rule 3, and decode itself does not write them.

Grids are released when every program has begun, so that a waiting one takes no place from programs
that have not started. The merge does not release the next decode before it ends: that would be laid
onto multiprocessors unevenly, as long as programs of the merge are there (8 requests of 32,768
tokens on an H200: 269 us instead of 248). Elsewhere, and in the interpreter, PDL is False and
nothing is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["release_next", "wait_for_earlier"]


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Wait until the grid before this one has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    """Let the grid after this one begin, if it was launched to do so."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
