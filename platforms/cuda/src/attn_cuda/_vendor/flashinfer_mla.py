"""FlashInfer's calls over latents, whose forms differ between releases.

0.6.13 plans from flat tensors and decides on the LSE in each run; since 0.7 a plan is made from one
object and says beforehand whether there will be an LSE, and a run takes query and cache as one
argument each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from attn_cuda._vendor.flashinfer_library import library
from attn_shared.probing import require

__all__ = ["Interface", "interface", "ragged"]

_HINT = "too old; pip install -U flashinfer-python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What a release has.

    Attributes:
        wrapper: the class BatchMLAPagedAttentionWrapper.
        csr: makes the one object that a plan is made from, or None where plans take tensors.
        trtllm: trtllm_batch_decode_with_kv_cache_mla, or None.
        trtllm_arguments: what that takes.
        has_natural_lse: the wrapper's `run` returns a natural logarithm if it is asked to.
    """

    wrapper: type[Any]
    csr: Callable[..., Any] | None
    trtllm: Callable[..., Any] | None
    trtllm_arguments: frozenset[str]
    has_natural_lse: bool


def interface() -> Interface:
    """Return the calls of the installed release.

    Raises:
        ImportError: with the library's own words, or naming what is missing.
    """
    module: ModuleType = library("flashinfer.mla")
    wrapper = require(module, "BatchMLAPagedAttentionWrapper", _HINT)
    trtllm = getattr(module, "trtllm_batch_decode_with_kv_cache_mla", None)
    takes_one = "metadata" in inspect.signature(wrapper.plan).parameters
    return Interface(
        wrapper=wrapper,
        csr=require(module, "MLAPlanMetadata", _HINT).csr if takes_one else None,
        trtllm=trtllm,
        trtllm_arguments=_arguments(trtllm),
        has_natural_lse="return_lse_base_on_e" in _arguments(wrapper.run),
    )


def ragged() -> Callable[..., Any]:
    """Return trtllm-gen's prefill over keys that come with the call.

    Raises:
        ImportError: with the library's own words, or it has none.
    """
    found: Callable[..., Any] = require(
        library("flashinfer.prefill"), "trtllm_ragged_attention_deepseek", _HINT
    )
    return found


def _arguments(function: Callable[..., Any] | None) -> frozenset[str]:
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)
