"""Sampling: a token per row from logits, by top-k, top-p and min-p, with one rule on any device.

    from attn_shared.sampling import Sampler, SamplingParams

    sampler = Sampler("cuda")
    drawn = sampler.sample(logits, SamplingParams(temperature=0.7, top_k=50, top_p=0.9))
    drawn.ids, drawn.valid, print(drawn.selection)

The rule is written down, exact and slow, in `attn_shared.sampling.reference`.
"""

from __future__ import annotations

from attn_shared.sampling.backend import Drawn, SamplerBackend
from attn_shared.sampling.candidates import register_sampler, sampler_selection
from attn_shared.sampling.params import SamplingParams
from attn_shared.sampling.request import Returns, SamplerRequest
from attn_shared.sampling.sampler import Sampled, Sampler
from attn_shared.sampling.selection import SamplerSelection, select_sampler

__all__ = [
    "Drawn",
    "Returns",
    "Sampled",
    "Sampler",
    "SamplerBackend",
    "SamplerRequest",
    "SamplerSelection",
    "SamplingParams",
    "register_sampler",
    "sampler_selection",
    "select_sampler",
]
