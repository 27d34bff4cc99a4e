from __future__ import annotations

import pytest
import torch

from attn_shared.errors import InvalidInputError
from attn_shared.workspace import Workspace

CPU = torch.device("cpu")


def test_a_workspace_grows_and_is_shared() -> None:
    workspace = Workspace(CPU)
    assert (workspace.num_bytes, workspace.device) == (0, CPU)
    first = workspace.get(64)
    assert (first.shape, first.dtype, first.device) == ((64,), torch.uint8, CPU)
    assert workspace.num_bytes == 64
    second = workspace.get(16)
    assert second.shape == (16,)
    assert second.data_ptr() == first.data_ptr()
    assert workspace.num_bytes == 64


def test_a_view_outlives_growth() -> None:
    workspace = Workspace(CPU, num_bytes=4)
    view = workspace.get(4).fill_(7)
    assert workspace.get(8).data_ptr() != view.data_ptr()
    assert view.tolist() == [7] * 4


def test_a_frozen_workspace_keeps_its_address() -> None:
    workspace = Workspace(CPU, num_bytes=64)
    address = workspace.get(64).data_ptr()
    workspace.freeze()
    assert workspace.get(64).data_ptr() == address
    with pytest.raises(InvalidInputError) as caught:
        workspace.get(65)
    assert str(caught.value) == (
        "workspace request is 65 bytes; allowed: at most 64 bytes after graph capture began. "
        "Hint: raise the bounds in BuildConfig and build before capturing."
    )


def test_sizes_are_not_negative() -> None:
    with pytest.raises(InvalidInputError, match="num_bytes is -1; allowed: an int >= 0"):
        Workspace(CPU, num_bytes=-1)
    with pytest.raises(InvalidInputError, match="num_bytes is -1; allowed: an int >= 0"):
        Workspace(CPU).get(-1)
