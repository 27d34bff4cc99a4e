"""Recurrent states of hybrid models: what each family's config says of their shapes.

Shapes are for one sequence on one rank, as the models' own code allocates them: a convolution keeps
its kernel's width less one, a scan keeps (heads, head size, state size).
"""

from __future__ import annotations

import torch

from attn_shared._model_layers import RecurrentNeeds
from attn_shared._model_values import ConfigValues
from attn_shared.dtypes import parse_dtype

__all__ = ["gated_delta_net", "mamba1", "mamba2", "nemotron_mamba2", "short_convolution"]


def mamba1(values: ConfigValues) -> RecurrentNeeds:
    """Return the selective scan of Mamba and Jamba (arXiv 2312.00752)."""
    width = values.count("mamba_expand", "expand", default=2) * values.count("hidden_size")
    kernel = values.count("mamba_d_conv", "conv_kernel", default=4)
    state = values.count("mamba_d_state", "state_size", default=16)
    return RecurrentNeeds(
        kind="MAMBA1",
        sharded=(("the scan's width", width),),
        shapes=lambda tp: ((width // tp, kernel - 1), (width // tp, state)),
        state_dtype=_state_dtype(values),
    )


def mamba2(values: ConfigValues) -> RecurrentNeeds:
    """Return the chunked scan of Bamba, Granite and Falcon-H1 (arXiv 2405.21060)."""
    heads = values.count("mamba_n_heads", "num_heads", default=128)
    width = values.optional_count("mamba_d_ssm")
    if width is None:
        width = values.count("mamba_expand", "expand", default=2) * values.count("hidden_size")
    is_given = values.record.get("mamba_d_head", "auto") not in (None, "auto")
    head_size = values.count("mamba_d_head") if is_given else width // heads
    if heads * head_size != width:
        raise values.odd(
            "mamba_n_heads", heads, f"a number that, times mamba_d_head, makes a width of {width}"
        )
    return _chunked_scan(
        values,
        heads=heads,
        head_size=head_size,
        groups=values.count("mamba_n_groups", "n_groups", default=1),
        state=values.count("mamba_d_state", "state_size", default=256),
        kernel=values.count("mamba_d_conv", "conv_kernel", default=4),
    )


def nemotron_mamba2(values: ConfigValues) -> RecurrentNeeds:
    """Return the chunked scan of Nemotron-H, whose config has names of its own."""
    return _chunked_scan(
        values,
        heads=values.count("mamba_num_heads"),
        head_size=values.count("mamba_head_dim"),
        groups=values.count("n_groups", "mamba_n_groups", default=8),
        state=values.count("ssm_state_size", default=128),
        kernel=values.count("conv_kernel", "mamba_d_conv", default=4),
    )


def _chunked_scan(
    values: ConfigValues, *, heads: int, head_size: int, groups: int, state: int, kernel: int
) -> RecurrentNeeds:
    """Groups are divided among ranks, and a single one is kept by each of them."""

    def shapes(tp: int) -> tuple[tuple[int, ...], ...]:
        channels = heads * head_size // tp + 2 * max(1, groups // tp) * state
        return ((channels, kernel - 1), (heads // tp, head_size, state))

    sharded = (("the scan's heads", heads),)
    return RecurrentNeeds(
        kind="MAMBA2",
        sharded=sharded if groups == 1 else (*sharded, ("the scan's groups", groups)),
        shapes=shapes,
        state_dtype=_state_dtype(values),
    )


def gated_delta_net(values: ConfigValues) -> RecurrentNeeds:
    """Return the gated delta net of Qwen3-Next (arXiv 2412.06464)."""
    key_heads = values.count("linear_num_key_heads")
    value_heads = values.count("linear_num_value_heads")
    key_size = values.count("linear_key_head_dim")
    value_size = values.count("linear_value_head_dim")
    kernel = values.count("linear_conv_kernel_dim", default=4)
    channels = 2 * key_heads * key_size + value_heads * value_size
    return RecurrentNeeds(
        kind="GDN_ATTN",
        sharded=(
            ("linear_num_key_heads", key_heads),
            ("linear_num_value_heads", value_heads),
        ),
        shapes=lambda tp: ((channels // tp, kernel - 1), (value_heads // tp, value_size, key_size)),
        state_dtype=_state_dtype(values),
    )


def short_convolution(values: ConfigValues) -> RecurrentNeeds:
    """Return the gated short convolution of LFM2."""
    width, kernel = values.count("hidden_size"), values.count("conv_L_cache", default=3)
    return RecurrentNeeds(
        kind="SHORT_CONV",
        sharded=(("hidden_size", width),),
        shapes=lambda tp: ((width // tp, kernel - 1),),
    )


def _state_dtype(values: ConfigValues) -> torch.dtype | None:
    for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        if values.record.get(name) not in (None, "auto"):
            return parse_dtype(values.word(name))
    return None
