"""The groups of a layer. (What ranks tell each other: tests/layer_ranks.)"""

from __future__ import annotations

import pytest
import torch.distributed

from attn_shared.errors import InvalidRequestError, UnknownNameError
from attn_shared.ranks import ContextParallel


def test_no_group_is_one_rank() -> None:
    place = ContextParallel()
    assert (place.dcp_size, place.dcp_rank, place.pcp_size, place.pcp_rank) == (1, 0, 1, 0)
    assert not place.is_shared


def test_the_combine_follows_from_batch_invariance() -> None:
    assert ContextParallel().combine_for(batch_invariant=False) == "ag_rs"
    assert ContextParallel().combine_for(batch_invariant=True) == "a2a"
    named = ContextParallel(combine="ag_rs")
    assert named.combine_for(batch_invariant=False) == "ag_rs"
    with pytest.raises(InvalidRequestError, match="combine='ag_rs' is not allowed; allowed: 'a2a'"):
        named.combine_for(batch_invariant=True)


@pytest.mark.parametrize("interleave", [0, -1, True, 1.5])
def test_an_interleave_is_a_count(interleave: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"interleave={interleave!r}"):
        ContextParallel(interleave=interleave)  # type: ignore[arg-type]


def test_combines_are_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown combine 'a2q'; allowed: a2a, ag_rs"):
        ContextParallel(combine="a2q")
    with pytest.raises(InvalidRequestError, match=r"combine='a2a' .* nobody to exchange with"):
        ContextParallel(combine="a2a")


@pytest.mark.parametrize("name", ["dcp_group", "pcp_group"])
def test_a_group_that_does_not_exist_yet_is_refused(name: str) -> None:
    world = torch.distributed.group.WORLD
    assert world is None  # no process of these tests has joined a group
    with pytest.raises(InvalidRequestError, match=f"{name}=None is not allowed") as caught:
        ContextParallel(**{name: world})
    assert "init_process_group comes first" in caught.value.hint
