"""What a program of the kernel for long prompts on Hopper works on, one item after another.

An item is a block of query tokens of one head. One warp looks items up and tells the others of them
through a mailbox in shared memory, ahead of their work.

Where Triton has no Gluon, or another form of it, the module does not import.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_triton.kernels.blocks import HEADER

__all__ = ["FIELDS", "item_of", "last_seen", "post", "read", "tile_at", "tiles_of"]

_HEADER = gl.constexpr(HEADER)
FIELDS = gl.constexpr(11)
"""Numbers of an item in the mailbox."""


@gluon.jit
def item_of(place, batch, causal_ptr, HQ: gl.constexpr, FRESH: gl.constexpr, CAUSAL: gl.constexpr):
    """Return what is at a place of the plan.

    That is: request, whether it is causal by its flag, query head, first token of the block,
    first row of the request, its rows, its keys, and how many of these come before `FRESH` ones.
    """
    blocks_ptr, lens_ptr, query_starts, num_blocks, num_reqs, section_heads = batch
    in_section = num_blocks * section_heads
    rest = place % in_section
    head = place // in_section * section_heads + rest % section_heads
    record = blocks_ptr + _HEADER + num_reqs + 2 * (rest // section_heads)
    b = gl.load(record)
    m0 = gl.load(record + 1)
    q0 = gl.load(query_starts + b)
    num_rows = gl.load(query_starts + b + 1) - q0
    is_causal = 0
    if CAUSAL == 2:
        is_causal = gl.load(causal_ptr + b).to(gl.int32)
    if FRESH == 2:
        num_keys = gl.load(lens_ptr + b + 1) - gl.load(lens_ptr + b)
        split = 0
    else:
        num_keys = gl.load(lens_ptr + b)
        split = num_keys
        if FRESH == 1:
            split = gl.maximum(num_keys - num_rows, 0)  # padded rows have no keys at all
    return b, is_causal, head, m0, q0, num_rows, num_keys, split


@gluon.jit
def last_seen(position, num_keys, is_causal, CAUSAL: gl.constexpr):
    """Return one past the last key that queries at `position` see."""
    end = position * 0 + num_keys
    if CAUSAL == 1:
        end = gl.minimum(position + 1, num_keys)
    if CAUSAL == 2:
        end = gl.where(is_causal != 0, gl.minimum(position + 1, num_keys), end)
    return end


@gluon.jit
def tiles_of(
    item, ROWS: gl.constexpr, BN: gl.constexpr, CONTEXT: gl.constexpr, FRESH: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return tiles of the step's own keys and of earlier ones, and of each those without a mask.

    There is at least one in all: a hidden tile is simpler than none.
    """
    _b, is_causal, _head, m0, _q0, num_rows, num_keys, split = item
    past = num_keys - num_rows
    bottom = past + gl.minimum(m0 + ROWS, num_rows) - 1
    end = last_seen(bottom, num_keys, is_causal, CAUSAL)
    whole = gl.maximum(last_seen(past + m0, num_keys, is_causal, CAUSAL), 0)
    new, new_whole, old, old_whole = 0, 0, 0, 0
    if FRESH > 0:
        new = gl.maximum((end - split + BN - 1) // BN, 1)
        new_whole = gl.maximum(whole - split, 0) // BN
    if CONTEXT > 0:
        old = (gl.minimum(end, split) + BN - 1) // BN
        old_whole = gl.minimum(whole, split) // BN
    if FRESH == 0:
        old = gl.maximum(old, 1)
    return new, new_whole, old, old_whole


@gluon.jit
def tile_at(i, tiles, split, BN: gl.constexpr, CONTEXT: gl.constexpr, FRESH: gl.constexpr):
    """Return whether tile `i` has earlier keys, and its first key: those with a mask come first."""
    new, new_whole, old, old_whole = tiles
    if FRESH == 0:
        return True, (old - 1 - i) * BN
    if CONTEXT == 0:
        return False, split + (new - 1 - i) * BN
    new_masked = new - new_whole
    masked = new_masked + old - old_whole
    is_masked = i < masked
    is_old = gl.where(is_masked, i >= new_masked, i >= masked + new_whole)
    own = gl.where(is_masked, new - 1 - i, masked + new_whole - 1 - i)
    earlier = gl.where(is_masked, old - 1 - (i - new_masked), new + old - 1 - i)
    return is_old, gl.where(is_old, earlier * BN, split + own * BN)


@gluon.jit
def post(mail, slot, numbers):
    """Write an item's numbers to a slot of the mailbox, by one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(len(numbers)):
        mail.index(slot * FIELDS + i).store(gl.full([1], 0, gl.int32, LAYOUT) + numbers[i])


@gluon.jit
def read(mail, slot, i):
    """Return a number of a slot of the mailbox, to each of four warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(mail.index(slot * FIELDS + i).load(LAYOUT), 0)
