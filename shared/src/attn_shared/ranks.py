"""The process groups of one layer, and what its ranks have to agree on.

A rank that ran another layer, or another batch, than the others would leave them waiting in a
collective, or combine numbers that do not belong together. So the ranks compare what they are
about to do: the layer's description when it is built, the batch at the first step, and in checked
mode at every step. Each comparison is two collectives, a length and some hundred bytes, and every
rank raises.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from attn_shared.context_parallel import COMBINES
from attn_shared.errors import InvalidRequestError, RanksDisagreeError, UnknownNameError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "ContextParallel",
    "NoGroup",
    "compare_ranks",
    "gather_objects",
    "group_rank",
    "group_size",
]


class NoGroup(Enum):
    """The default of a group; None is what `dist.group.WORLD` is before the processes join it."""

    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """Over which ranks a layer's sequences are spread.

    A group that is given has to exist.

    Attributes:
        dcp_group: ranks among which the cache is sharded. All of them have the same kv heads, and
            each its own query heads; left out, each rank holds whole sequences.
        interleave: consecutive tokens that one rank holds; it divides the block size.
        combine: one of `context_parallel.COMBINES`; None: "a2a" for a batch-invariant layer, whose
            sums must not depend on a collective's order, else "ag_rs".
        pcp_group: ranks among which the step's tokens are split; left out, each has them all.
    """

    # None is in the types alone, for it is in torch's type of dist.group.WORLD; it is refused.
    dcp_group: ProcessGroup | NoGroup | None = NoGroup.LEFT_OUT
    interleave: int = 1
    combine: str | None = None
    pcp_group: ProcessGroup | NoGroup | None = NoGroup.LEFT_OUT

    def __post_init__(self) -> None:
        """Refuse what no rank could serve.

        Raises:
            InvalidRequestError: the interleave is no count, a group does not exist yet or does not
                hold this process, or a combine is named and there is nobody to exchange with.
            UnknownNameError: there is no such combine.
        """
        if isinstance(self.interleave, bool) or not isinstance(self.interleave, int):
            raise InvalidRequestError.for_field("interleave", self.interleave, "an int >= 1")
        if self.interleave < 1:
            raise InvalidRequestError.for_field("interleave", self.interleave, "an int >= 1")
        if self.combine is not None and self.combine not in COMBINES:
            raise UnknownNameError.for_name("combine", self.combine, COMBINES)
        for name in ("dcp_group", "pcp_group"):
            group = getattr(self, name)
            if group is NoGroup.LEFT_OUT:
                continue
            if group is None:
                raise InvalidRequestError.for_field(
                    name,
                    None,
                    "a process group; leave it out where there is none",
                    hint="torch.distributed.init_process_group comes first: until then "
                    "dist.group.WORLD is None, and the layer would run unsharded.",
                )
            if group_rank(group) < 0:
                raise InvalidRequestError.for_field(
                    name, "a group without this process", "a group that it belongs to"
                )
        if self.combine == "a2a" and self.dcp_size == 1:
            raise InvalidRequestError.for_field(
                "combine", self.combine, "None with dcp_size=1: there is nobody to exchange with"
            )

    @property
    def is_shared(self) -> bool:
        """Whether any sequence is shared with another rank."""
        return self.dcp_size > 1 or self.pcp_size > 1

    @property
    def dcp_size(self) -> int:
        """Ranks among which the cache is sharded."""
        return group_size(self.dcp_group)

    @property
    def dcp_rank(self) -> int:
        """This rank among them."""
        return group_rank(self.dcp_group)

    @property
    def pcp_size(self) -> int:
        """Ranks among which the step's tokens are split."""
        return group_size(self.pcp_group)

    @property
    def pcp_rank(self) -> int:
        """This rank among them."""
        return group_rank(self.pcp_group)

    def combine_for(self, *, batch_invariant: bool) -> str:
        """Return the combine to use.

        Raises:
            InvalidRequestError: "ag_rs" was named for a batch-invariant layer.
        """
        if batch_invariant and self.combine == "ag_rs":
            raise InvalidRequestError.for_field(
                "combine",
                self.combine,
                "'a2a' with batch_invariant=True",
                hint="a reduce-scatter adds in an order of its own, which may depend on sizes.",
            )
        return self.combine or ("a2a" if batch_invariant else "ag_rs")


def group_size(group: ProcessGroup | NoGroup | None) -> int:
    """Return how many ranks a group has; no group is one rank."""
    return 1 if isinstance(group, NoGroup) else dist.get_world_size(group)


def group_rank(group: ProcessGroup | NoGroup | None) -> int:
    """Return this process's rank in a group, -1 if it is not in it; without a group, 0."""
    return 0 if isinstance(group, NoGroup) else dist.get_rank(group)


def gather_objects(group: ProcessGroup, value: Any) -> list[Any]:
    """Return what each rank of a group passed, pickled; every rank has to enter.

    torch's own `all_gather_object` needs NumPy, which torch does not bring.
    """
    device = _device_of(group)
    size = dist.get_world_size(group)
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(own)], device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    counts = [int(each) for each in lengths]
    padded = own.new_zeros(max(counts))
    padded[: len(own)] = own
    rows = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(rows, padded, group=group)
    pairs = zip(rows, counts, strict=True)
    return [pickle.loads(bytes(row[:count].tolist())) for row, count in pairs]


def _device_of(group: ProcessGroup) -> torch.device:
    """Return where tensors have to lie for a group's collectives."""
    kind = {"nccl": "cuda", "xccl": "xpu"}.get(dist.get_backend(group), "cpu")
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def compare_ranks(group: ProcessGroup, what: str, facts: Mapping[str, object]) -> None:
    """Refuse to go on, on every rank, where the ranks of a group do not say the same.

    Args:
        group: the ranks.
        what: that they describe, for the message.
        facts: picklable, by name.

    Raises:
        RanksDisagreeError: names the first fact that differs, with each rank's value.
    """
    every = gather_objects(group, {name: _plain(value) for name, value in facts.items()})
    for name in every[0]:
        values = [each.get(name) for each in every]
        if any(value != values[0] for value in values):
            raise RanksDisagreeError(
                f"the ranks disagree on {name} of {what}: "
                + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
                + ".",
                hint="every rank of a group builds the same layer and gets the same batch.",
            )


def _plain(value: object) -> object:
    """Turn what does not compare across processes into what does."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return str(value) if isinstance(value, torch.dtype) else value
