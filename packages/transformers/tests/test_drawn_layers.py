"""Layers of drawn kinds in turn, over two caches under the same masks, against the definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hf_testing import paged
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_causal_mask_function

from attn_shared.selection import Policy
from attn_transformers import PagedCache
from attn_transformers.attention import AttentionFunction
from attn_transformers.masks import attention_mask

SIZE = 8
ROWS = 2


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a layer asks for at each of its calls."""

    heads: tuple[int, int]
    scaling: float | None
    softcap: float | None
    sinks: tuple[float, ...] | None
    window: int | None

    @property
    def arguments(self) -> dict[str, Any]:
        sinks = None if self.sinks is None else torch.tensor(self.sinks)
        return {"scaling": self.scaling, "softcap": self.softcap, "s_aux": sinks}


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    heads = draw(st.sampled_from([(6, 2), (4, 2)]))
    sinks = draw(st.sampled_from([None, None, tuple(0.3 * head for head in range(heads[0]))]))
    return Kind(
        heads=heads,
        scaling=draw(st.sampled_from([None, None, 0.7])),
        softcap=draw(st.sampled_from([None, None, 1.5])),
        sinks=sinks,
        window=draw(st.sampled_from([None, None, 3])),
    )


@dataclass(kw_only=True)
class Layer:
    """One layer over one cache, with all keys and values that it was handed."""

    kind: Kind
    index: int
    cache: PagedCache
    module: torch.nn.Module = field(default_factory=torch.nn.Module)
    past: list[torch.Tensor] = field(default_factory=list)

    def call(
        self, attend: AttentionFunction, mask: torch.Tensor, count: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attn and what the definition say of new tokens."""
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = self.kind.heads
        heads = (num_heads, num_kv_heads, num_kv_heads)
        query, key, value = (torch.randn(ROWS, n, count, SIZE, generator=generator) for n in heads)
        self.past.append(torch.stack((key, value)))
        key, value = self.cache.update(key, value, self.index)
        found = attend(self.module, query, key, value, mask, **self.kind.arguments)[0]
        return found, self.by_hand(query)

    def by_hand(self, query: torch.Tensor) -> torch.Tensor:
        key, value = torch.cat(self.past, 3).double()
        group = self.kind.heads[0] // self.kind.heads[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        scale = SIZE**-0.5 if self.kind.scaling is None else self.kind.scaling
        scores = query.double() @ key.transpose(-1, -2) * scale
        if self.kind.softcap is not None:
            scores = self.kind.softcap * (scores / self.kind.softcap).tanh()
        count, total = scores.shape[-2:]
        distance = torch.arange(total - count, total)[:, None] - torch.arange(total)
        is_seen = distance >= 0
        if self.kind.window is not None:
            is_seen &= distance < self.kind.window
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if self.kind.sinks is not None:
            sinks = torch.tensor(self.kind.sinks).double()[None, :, None, None]
            scores = torch.cat((scores, sinks.expand(ROWS, -1, count, 1)), -1)
        output: torch.Tensor = scores.softmax(-1)[..., :total] @ value
        return output.transpose(1, 2)


def mask_of(window: int | None, start: int, count: int) -> torch.Tensor:
    options: dict[str, Any] = {}
    if window is not None:
        function = sliding_window_causal_mask_function(window)
        options = {"mask_function": function, "local_size": window}
    return attention_mask(ROWS, count, start + count, q_offset=start, **options)


@settings(max_examples=120, deadline=None)
@given(
    layers=st.lists(kinds(), min_size=1, max_size=4),
    counts=st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=5),
    again=st.sampled_from(["go on", "reset", "crop"]),
    is_interleaved=st.booleans(),
)
def test_each_layer_is_answered_by_its_own_rules(
    layers: list[Kind], counts: list[int], again: str, is_interleaved: bool
) -> None:
    attend = AttentionFunction(policy=Policy())
    caches = [paged(), paged()]
    made = [
        Layer(kind=kind, index=index, cache=cache)
        for index, kind in enumerate(layers)
        for cache in caches
    ]
    if not is_interleaved:  # else no call finds the one before it of use
        made.sort(key=lambda layer: caches.index(layer.cache))
    start = 0
    for turn, count in enumerate((*counts, *counts)):
        if turn == len(counts) and again == "reset":
            start = 0
            for cache in caches:
                cache.reset()
            for layer in made:
                layer.past.clear()
        if turn == len(counts) and again == "crop" and not any(kind.window for kind in layers):
            start -= 1
            for cache in caches:
                cache.crop(-1)
            for layer in made:
                layer.past = [torch.cat(layer.past, 3)[:, :, :, :-1]]
        masks = {kind.window: mask_of(kind.window, start, count) for kind in layers}
        for place, layer in enumerate(made):
            found, expected = layer.call(
                attend, masks[layer.kind.window], count, 100 * turn + place
            )
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        start += count
