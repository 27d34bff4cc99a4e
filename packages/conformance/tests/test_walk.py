from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attn_conformance._walk import tensors_in


@dataclass(slots=True)
class Inner:
    table: Any


class Pair(NamedTuple):
    first: Any
    second: Any


class Plain:
    def __init__(self) -> None:
        self.lens = torch.zeros(1)
        self.name = "x"


def test_every_kind_of_holder_is_looked_into() -> None:
    held = [
        Inner(torch.zeros(1)),
        Pair(torch.zeros(1), None),
        {"key": (torch.zeros(1), 3)},
        Plain(),
    ]
    assert [path for path, _ in tensors_in(held)] == [
        "metadata[0].table",
        "metadata[1][0]",
        "metadata[2]['key'][0]",
        "metadata[3].lens",
    ]


def test_a_holder_of_itself_ends() -> None:
    loop: list[Any] = [torch.zeros(1)]
    loop.append(loop)
    assert len(list(tensors_in(loop))) == 8
