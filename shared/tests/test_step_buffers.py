"""Tensors at addresses that stay, where graphs are captured."""

from __future__ import annotations

import torch

from attn_shared.step_buffers import Buffers

CPU = torch.device("cpu")


def test_a_kept_tensor_stays_at_its_address() -> None:
    buffers = Buffers(CPU, is_kept=True)
    first = buffers.kept("schedule", torch.tensor([1, 2], dtype=torch.int32))
    second = buffers.kept("schedule", torch.tensor([3, 4], dtype=torch.int32))
    assert first.data_ptr() == second.data_ptr()
    assert first.tolist() == [3, 4]


def test_names_and_sizes_do_not_share() -> None:
    buffers = Buffers(CPU, is_kept=True)
    tensors = [buffers.of(*key, torch.int32) for key in (("a", 2), ("a", 3), ("b", 2))]
    assert len({tensor.data_ptr() for tensor in tensors}) == 3


def test_without_graphs_nothing_is_kept() -> None:
    buffers = Buffers(CPU, is_kept=False)
    made = torch.ones(2)
    assert buffers.kept("a", made) is made
    assert buffers.of("a", 2, torch.int32).data_ptr() != buffers.of("a", 2, torch.int32).data_ptr()
