"""What the matrix asks: requests that differ from a plain one by a single feature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from types import MappingProxyType
from typing import Any

from attn_shared.dtypes import KV_CACHE_DTYPES, KVCacheLayout
from attn_shared.request import AttentionRequest, AttentionType, MLADims, Phase

__all__ = ["PLAIN", "QUESTIONS", "Changes", "Question", "Topic", "axes_of", "plain_requests"]

Changes = Mapping[str, Any]
"""Fields of a request, with the values that they get."""


class Topic(StrEnum):
    """Questions that are read together."""

    KINDS = "Kinds of attention"
    MASK = "Masks"
    LOGITS = "Logits and LSE"
    SERVING = "Serving"
    FORMATS = "Formats"
    SIZES = "Sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One thing that a request may ask for.

    Attributes:
        topic: what it is read with.
        axis: what is asked about: a feature, or a quantity with several values.
        label: the axis in words.
        value: which value of a quantity is asked for; "" for a feature, which is asked for or not.
        ways: changes to a plain request, any one of which asks for it, the usual one first.
        needs_cache: it is about the cache, and no question where a request reads none.
    """

    topic: Topic
    axis: str
    label: str
    value: str = ""
    ways: tuple[Changes, ...]
    needs_cache: bool = False

    @property
    def key(self) -> str:
        """The question's name: "sink", "head_size=128"."""
        return f"{self.axis}={self.value}" if self.value else self.axis


PLAIN = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128)
"""Causal decoder attention over a paged cache, 32 query heads to 8 of keys, bfloat16."""

_ORDINARY: Changes = MappingProxyType(
    {
        "num_heads": PLAIN.num_heads,
        "num_kv_heads": PLAIN.num_kv_heads,
        "head_size": PLAIN.head_size,
        "head_size_v": None,
        "mla": None,
        "use_sparse": False,
        "index_topk": None,
    }
)
_LATENT: Changes = MappingProxyType(
    {
        **_ORDINARY,
        "num_heads": 128,
        "num_kv_heads": 1,
        "head_size": MLADims().latent_size,
        "mla": MLADims(),
    }
)
_INDEXED: Changes = MappingProxyType({"use_sparse": True, "index_topk": 2048})

_KINDS: Mapping[str, Changes] = MappingProxyType(
    {
        "ordinary": _ORDINARY,
        "MLA": _LATENT,
        "sparse MLA": MappingProxyType({**_LATENT, **_INDEXED}),
        "sparse": MappingProxyType({**_ORDINARY, **_INDEXED}),
    }
)
"""Kinds that exclude one another: a backend is for one of them."""

_OTHER_WIDTHS = tuple(MappingProxyType({**_ORDINARY, "head_size": size}) for size in (64, 256))
_UNEQUAL: Changes = MappingProxyType({**_ORDINARY, "head_size": 192, "head_size_v": 128})
_CACHE_FREE: Changes = MappingProxyType({**_ORDINARY, "attn_type": AttentionType.ENCODER_ONLY})

_DTYPES = ("bfloat16", "float16", "float32")
_HEAD_SIZES = (32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 320, 512, 576)
_UNEQUAL_SIZES = ((128, 64), (192, 128), (576, 512))
_RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
_BLOCK_SIZES = (1, 8, 16, 24, 32, 48, 64, 128, 256, 528)
_QUANTISED = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")

_BOTH_SIDES: Changes = MappingProxyType({"window": (1023, 1023)})


def plain_requests() -> Iterator[AttentionRequest]:
    """Yield requests that ask for no feature, the plainest first.

    The first that a backend serves is what its questions differ from: a backend for latents, for
    one phase or for an fp8 cache alone is not asked about what it never serves.
    """
    others = (changes for name, changes in _KINDS.items() if name != "ordinary")
    kinds = (_ORDINARY, *_OTHER_WIDTHS, _UNEQUAL, _CACHE_FREE, *others)
    for kind, cache, phase, dtype in product(kinds, ("auto", "fp8"), Phase, _DTYPES):
        yield PLAIN.with_options(**kind, kv_cache_dtype=cache, phase=phase, dtype=dtype)


def axes_of(topic: Topic, questions: Iterable[Question]) -> dict[str, list[Question]]:
    """Return the questions of a topic by their axes, in their order."""
    found: dict[str, list[Question]] = {}
    for question in questions:
        if question.topic is topic:
            found.setdefault(question.axis, []).append(question)
    return found


def _feature(topic: Topic, axis: str, label: str, *ways: Changes) -> Question:
    return Question(topic=topic, axis=axis, label=label, ways=ways)


def _values(
    topic: Topic,
    axis: str,
    label: str,
    values: Mapping[str, Changes],
    *,
    needs_cache: bool = False,
) -> Iterator[Question]:
    for value, changes in values.items():
        yield Question(
            topic=topic,
            axis=axis,
            label=label,
            value=value,
            ways=(changes,),
            needs_cache=needs_cache,
        )


def _kinds() -> Iterator[Question]:
    yield from _values(Topic.KINDS, "kind", "kinds", _KINDS)
    types: dict[str, Changes] = {str(kind): {"attn_type": kind} for kind in AttentionType}
    yield from _values(Topic.KINDS, "attn_type", "attention types", types)
    phases: dict[str, Changes] = {str(phase): {"phase": phase} for phase in Phase}
    yield from _values(Topic.KINDS, "phase", "phases", phases)


def _masks() -> Iterator[Question]:
    yield _feature(Topic.MASK, "window", "window", {"window": (1023, 0)})
    yield _feature(
        Topic.MASK,
        "two_sided_window",
        "two-sided window",
        {**_BOTH_SIDES, "non_causal": True},
        *({**_BOTH_SIDES, "attn_type": kind} for kind in ("encoder_only", "encoder")),
    )
    yield _feature(Topic.MASK, "chunked_local", "chunked local", {"chunk_size": 8192})
    yield _feature(Topic.MASK, "non_causal", "non-causal", {"non_causal": True})
    yield _feature(
        Topic.MASK, "per_request_causal", "per-request causal", {"per_request_causal": True}
    )
    yield _feature(Topic.MASK, "mm_prefix", "mm-prefix", {"use_mm_prefix": True})


def _logits() -> Iterator[Question]:
    yield _feature(Topic.LOGITS, "sink", "sinks", {"has_sinks": True})
    yield _feature(Topic.LOGITS, "softcap", "softcap", {"softcap": 30.0})
    yield _feature(Topic.LOGITS, "alibi", "ALiBi", {"has_alibi": True})
    yield _feature(Topic.LOGITS, "lse", "LSE", {"needs_lse": True})


def _serving() -> Iterator[Question]:
    yield _feature(Topic.SERVING, "batch_invariance", "batch-invariant", {"batch_invariant": True})
    yield _feature(Topic.SERVING, "kv_connector", "KV connector", {"use_kv_connector": True})
    named = ({"flash_attn_version": version} for version in (3, 2, 4))
    yield _feature(Topic.SERVING, "flash_attn_version", "a named FlashAttention", *named)
    yield _feature(Topic.SERVING, "dcp", "DCP", {"dcp_size": 2})
    yield _feature(Topic.SERVING, "pcp", "PCP", {"pcp_size": 2})


def _formats() -> Iterator[Question]:
    dtypes: dict[str, Changes] = {name: {"dtype": name} for name in _DTYPES}
    yield from _values(Topic.FORMATS, "dtype", "dtypes", dtypes)
    caches: dict[str, Changes] = {name: {"kv_cache_dtype": name} for name in KV_CACHE_DTYPES}
    yield from _values(Topic.FORMATS, "kv_cache_dtype", "KV cache dtypes", caches, needs_cache=True)
    layouts: dict[str, Changes] = {str(layout): {"kv_layout": layout} for layout in KVCacheLayout}
    yield from _values(Topic.FORMATS, "kv_layout", "layouts", layouts, needs_cache=True)
    yield Question(
        topic=Topic.FORMATS,
        axis="per_head_quant_scales",
        label="per-head scales",
        ways=tuple({"kv_cache_dtype": name, "per_head_quant_scales": True} for name in _QUANTISED),
        needs_cache=True,
    )


def _sizes() -> Iterator[Question]:
    widths: dict[str, Changes] = {
        str(size): {"head_size": size, "head_size_v": None} for size in _HEAD_SIZES
    }
    yield from _values(Topic.SIZES, "head_size", "head sizes", widths)
    unequal: dict[str, Changes] = {
        f"{key}/{value}": {"head_size": key, "head_size_v": value} for key, value in _UNEQUAL_SIZES
    }
    yield from _values(Topic.SIZES, "head_size_v", "K/V head sizes", unequal)
    ratios: dict[str, Changes] = {
        str(ratio): {"num_heads": 8 * ratio, "num_kv_heads": 8} for ratio in _RATIOS
    }
    yield from _values(Topic.SIZES, "queries_per_kv", "GQA ratios", ratios)
    blocks: dict[str, Changes] = {str(size): {"block_size": size} for size in _BLOCK_SIZES}
    yield from _values(Topic.SIZES, "block_size", "block sizes", blocks, needs_cache=True)


QUESTIONS: tuple[Question, ...] = (
    *_kinds(),
    *_masks(),
    *_logits(),
    *_serving(),
    *_formats(),
    *_sizes(),
)
"""Every question, in the order of the topics."""
