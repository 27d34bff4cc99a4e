"""Lengths, starts and block tables that are none of integers, refused before torch meets them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch

from attn_shared.argument_checks import count_objection
from attn_shared.errors import MetadataError

__all__ = ["check_batch_tensors", "check_count", "check_integers", "host_lens"]


def check_count(name: str, value: object) -> None:
    """Refuse what is no integer of at least 1, or more than torch takes.

    Raises:
        MetadataError: names the argument, its value and what is allowed.
    """
    allowed = count_objection(value)
    if allowed is not None:
        raise MetadataError.for_argument(name, repr(value), allowed)


def host_lens(name: str, lens: object) -> list[int]:
    """Return lengths on the host as a list of ints.

    Raises:
        MetadataError: names the argument or the entry, and what is allowed.
    """
    if not isinstance(lens, Iterable) or isinstance(lens, str | bytes | Mapping):
        raise MetadataError.for_argument(name, f"a {type(lens).__name__}", "a list of ints")
    found = []
    for request, length in enumerate(lens):
        try:
            if isinstance(length, bool):
                raise TypeError("a bool is no length")
            found.append(operator.index(length))
        except TypeError as error:
            raise MetadataError.for_argument(
                f"{name}[{request}]", repr(length), "an int"
            ) from error
    return found


def check_integers(name: str, tensor: object, dims: int, shape: str) -> None:
    """Refuse what is no tensor of integers of so many dimensions; contents are not looked at.

    Raises:
        MetadataError: names the argument, what it is and what is allowed.
    """
    allowed = f"a tensor {shape} of integers"
    if not isinstance(tensor, torch.Tensor):
        raise MetadataError.for_argument(name, f"a {type(tensor).__name__}", allowed)
    if tensor.dim() != dims or tensor.dtype not in (torch.int32, torch.int64):
        found = f"of {tensor.dtype} {tuple(tensor.shape)}"
        raise MetadataError.for_argument(name, found, f"{allowed}, int32 or int64")


def check_batch_tensors(
    block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Refuse a batch's tensors that do not fit one another; contents are not looked at.

    Raises:
        MetadataError: names the arguments, what they are and what is allowed.
    """
    check_integers("block_table", block_table, 2, "(B, M)")
    check_integers("query_start_loc", query_start_loc, 1, "(B + 1,)")
    check_integers("seq_lens", seq_lens, 1, "(B,)")
    count = len(seq_lens)
    if len(query_start_loc) != count + 1 or len(block_table) != count:
        raise MetadataError.for_argument(
            "block_table, query_start_loc, seq_lens",
            f"of {len(block_table)}, {len(query_start_loc)} and {count} entries",
            "B, B + 1 and B entries",
        )
    devices = {tensor.device for tensor in (block_table, query_start_loc, seq_lens)}
    if len(devices) > 1:
        raise MetadataError.for_argument(
            "block_table, query_start_loc, seq_lens",
            f"on {', '.join(sorted(map(str, devices)))}",
            "on one device",
        )
