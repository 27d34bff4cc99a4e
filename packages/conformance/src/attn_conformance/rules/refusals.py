"""What has to be refused, before any kernel runs and in words that name what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.batch import Batch
from attn_conformance.case import Case
from attn_conformance.checks import must_refuse, require
from attn_conformance.engine import Engine
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule, Violation
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.rules.cache import FORMATS
from attn_conformance.subject import Subject
from attn_shared.backend import AttentionImpl
from attn_shared.capability import Reason, Support
from attn_shared.dtypes import COMPUTE_DTYPES, KVCacheLayout
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["RULES"]

Wrong = Callable[[Batch], Batch]


def _other_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def _wider(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[..., :1]], dim=-1)


def _more_heads(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[:, :1]], dim=1)


def _changed(name: str, change: Callable[[Tensor], Any]) -> Wrong:
    def wrong(batch: Batch) -> Batch:
        return replace(batch, **{name: change(getattr(batch, name))})

    return wrong


def _layer_with(**values: Any) -> Wrong:
    def wrong(batch: Batch) -> Batch:
        return replace(batch, layer=replace(batch.layer, **values))

    return wrong


_WRONG_CALLS: dict[str, tuple[str, Wrong]] = {
    "query-dtype": ("query", _changed("query", _other_dtype)),
    "query-heads": ("query", _changed("query", _more_heads)),
    "query-head-size": ("query", _changed("query", _wider)),
    "query-rank": ("query", _changed("query", lambda t: t.flatten(1))),
    "query-too-few-rows": ("query", _changed("query", lambda t: t[:-1])),
    "key-heads": ("key", _changed("key", _more_heads)),
    "value-head-size": ("value", _changed("value", _wider)),
    "key-dtype": ("key", _changed("key", _other_dtype)),
    "key-too-few-rows": ("key", _changed("key", lambda t: t[:-1])),
    "cache-missing": ("kv_cache", _changed("kv_cache", lambda t: None)),
    "cache-dtype": ("kv_cache", _changed("kv_cache", _other_dtype)),
    "cache-shape": ("kv_cache", _changed("kv_cache", _wider)),
    "cache-rank": ("kv_cache", _changed("kv_cache", lambda t: t.flatten(-2))),
    "k-scale-unquantised": ("scale", _layer_with(k_scale=2.0)),
    "sinks-undeclared": ("sinks", _layer_with(sinks=torch.zeros(4))),
    "slopes-undeclared": ("alibi", _layer_with(alibi_slopes=torch.ones(4))),
    "v-scale-unquantised": ("scale", _layer_with(v_scale=0.5)),
}
"""What is wrong, the word that the refusal has to hold, and how to make it so."""

_WRONG_LAYERS: dict[str, tuple[str, dict[str, Any], Wrong]] = {
    "sinks-missing": ("sinks", {"has_sinks": True}, _layer_with(sinks=None)),
    "sinks-shape": ("sinks", {"has_sinks": True}, _layer_with(sinks=torch.zeros(7))),
    "slopes-missing": ("alibi", {"has_alibi": True}, _layer_with(alibi_slopes=None)),
    "slopes-shape": ("alibi", {"has_alibi": True}, _layer_with(alibi_slopes=torch.zeros(7))),
}

_WRONG_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "output-dtype": _other_dtype,
    "output-heads": _more_heads,
    "output-head-size": _wider,
    "output-rows": lambda t: t[:-1],
}

_WRONG_LSES: dict[str, Callable[[Tensor], Tensor]] = {
    "lse-dtype": _other_dtype,
    "lse-shape": _wider,
    "lse-transposed": lambda t: t.T,
}


def _wrong_inputs(depth: Depth, fit: Fit) -> Iterator[Case]:
    lens = ((1, 5), (9, 7))
    plain = [*_WRONG_CALLS, *_WRONG_OUTPUTS, *_WRONG_LSES, "lse-on-demand"]
    for name in plain:
        if name.endswith("unquantised"):
            yield fit.case(name, *lens, kv_cache_dtype="auto")
        else:
            yield fit.case(name, *lens)
    for name, (_, fields, _) in _WRONG_LAYERS.items():
        yield fit.case(name, *lens, **fields)
    encoder = {"attn_type": AttentionType.ENCODER_ONLY}
    yield fit.case("encoder-without-keys", (5, 3), (5, 3), **encoder)
    yield fit.case("encoder-without-values", (5, 3), (5, 3), **encoder)
    yield fit.case("no-block-table", *lens)
    yield fit.case("query-device", *lens, variant="device")
    yield fit.case("metadata-of-another", *lens)


def _check_wrong_input(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    engine = subject.engine(batch)
    name = case.name
    if name in _WRONG_OUTPUTS:
        _refuse_output(engine, batch, name)
    elif name in _WRONG_LSES or name == "lse-on-demand":
        _refuse_lse(engine, batch, name)
    elif name == "encoder-without-keys":
        _refuse_call(engine, batch, replace(batch, key=None, value=None), name, "key")
    elif name == "encoder-without-values":
        _refuse_call(engine, batch, replace(batch, value=None), name, "value")
    elif name == "no-block-table":
        with must_refuse(name, "block_table"):
            engine.plan(replace(batch, common=batch.common.with_fields(block_table=None)))
    elif name == "query-device":
        _refuse_call(engine, batch, replace(batch, query=batch.query.cpu()), name, "query")
    elif name == "metadata-of-another":
        with must_refuse("check_metadata of another backend's metadata", "metadata"):
            engine.impl.check_metadata(object())
        with must_refuse("forward with another backend's metadata", "metadata"):
            engine.forward(batch, object())
    elif name in _WRONG_LAYERS:
        word, _, wrong = _WRONG_LAYERS[name]
        _refuse_call(engine, batch, wrong(batch), name, word)
    else:
        word, wrong = _WRONG_CALLS[name]
        _refuse_call(engine, batch, wrong(batch), name, word)


def _refuse_call(engine: Engine, batch: Batch, wrong: Batch, what: str, word: str) -> None:
    """Plan the right batch, and call with what is wrong."""
    metadata = engine.plan(batch)
    output = batch.query.new_zeros((len(wrong.query), batch.case.num_heads, batch.case.value_size))
    with must_refuse(what, word):
        engine.write(wrong)
        engine.forward(wrong, metadata, output=output)


def _refuse_output(engine: Engine, batch: Batch, what: str) -> None:
    metadata = engine.plan(batch)
    output = batch.query.new_zeros((*batch.query.shape[:2], batch.case.value_size))
    with must_refuse(what, "output"):
        engine.forward(batch, metadata, output=_WRONG_OUTPUTS[what](output))


def _refuse_lse(engine: Engine, batch: Batch, what: str) -> None:
    metadata = engine.plan(batch)
    rows, heads = batch.query.shape[:2]
    lse = torch.zeros((heads, rows), dtype=torch.float32, device=batch.device)
    wrong = _WRONG_LSES[what](lse) if what in _WRONG_LSES else lse
    arguments = (batch.layer, batch.query, batch.key, batch.value, batch.kv_cache, metadata)
    with must_refuse(what, "lse"):
        engine.impl.forward(*arguments, lse=wrong)


def _applies(subject: Subject, case: Case) -> tuple[Reason, ...]:
    is_lse = case.name.startswith("lse-")
    if is_lse and subject.returns_lse == (case.name == "lse-on-demand"):
        return (Reason(code="lse", value=str(subject.returns_lse), allowed="the other here"),)
    if case.variant == "device" and subject.device.type == "cpu":
        return (Reason(code="device", value="cpu", allowed="another, which differs from the host"),)
    return subject.excluded(case)


_MALFORMED: dict[str, tuple[str, dict[str, Any]]] = {
    "softcap-zero": ("softcap", {"softcap": 0.0}),
    "softcap-negative": ("softcap", {"softcap": -1.0}),
    "softcap-infinite": ("softcap", {"softcap": math.inf}),
    "softcap-nan": ("softcap", {"softcap": math.nan}),
    "window-negative": ("window", {"window": (-1, 0)}),
    "window-right-negative": ("window", {"window": (4, -2)}),
    "heads-not-divisible": ("heads", {"num_heads": 5}),
    "scale-nan": ("scale", {"scale": math.nan}),
    "scale-infinite": ("scale", {"scale": math.inf}),
}


def _malformed(depth: Depth, fit: Fit) -> Iterator[Case]:
    for name in _MALFORMED:
        yield fit.case(name, (1, 5), (9, 7))


def _check_malformed(subject: Subject, case: Case) -> None:
    word, fields = _MALFORMED[case.name]
    batch = subject.batch(case)
    with must_refuse(f"a layer with {fields}", word):
        _construct(subject, batch, replace(batch.spec, **fields))


def _construct(subject: Subject, batch: Batch, spec: LayerSpec) -> None:
    subject.backend.get_impl_cls()(spec)
    subject.backend.get_builder_cls()(
        spec.kv_cache_spec, {"layer": spec}, BuildConfig(), batch.device
    )


def _options(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Everything that some backend does not serve; what this one serves is excluded."""
    lens = ((1, 5), (9, 7))
    features: dict[str, dict[str, Any]] = {
        "sinks": {"has_sinks": True},
        "window": {"window": (3, 0)},
        "two-sided-window": {"window": (3, 1), "causal": False},
        "chunks": {"chunk_size": fit.block_size},
        "softcap": {"softcap": 2.0},
        "alibi": {"has_alibi": True},
        "non-causal": {"causal": False},
        "per-request-causal": {"causal": (True, False)},
        "multimodal-ranges": {"mm_prefix_ranges": {0: ((1, 3),)}},
        "scales-per-head": {"kv_cache_dtype": "fp8", "k_scale": (0.5, 2.0), "v_scale": (1.0, 2.0)},
        "batch-invariant": {"batch_invariant": True},
        "value-head-size": {"head_size_v": 2 * fit.head_size},
    }
    for name, fields in features.items():
        yield fit.case(name, *lens, **fields)
    for size in (1, 7, 33, 72, 320, 1024):
        yield fit.case(f"head-size-{size}", *lens, head_size=size)
    for size in (1, 7, 24, 512):
        yield fit.case(f"block-size-{size}", *lens, block_size=size)
    for name, dtype in COMPUTE_DTYPES.items():
        yield fit.case(f"dtype-{name}", *lens, dtype=dtype)
    for name in FORMATS:
        yield fit.case(f"cache-{name}", *lens, kv_cache_dtype=name)
    for layout in KVCacheLayout:
        yield fit.case(f"layout-{layout}", *lens, layout=layout)
    for attn_type in AttentionType:
        yield fit.case(f"type-{attn_type}", (5, 3), (5, 3), attn_type=attn_type)
    yield fit.case("chunks-non-causal", *lens, chunk_size=fit.block_size, causal=False)


def _served(subject: Subject, case: Case) -> tuple[Reason, ...]:
    if subject.excluded(case):
        return ()
    return (Reason(code="served", value="True", allowed="what the capability does not serve"),)


def _check_option(subject: Subject, case: Case) -> None:
    reasons = "; ".join(map(str, subject.excluded(case)))
    batch = subject.batch(case)
    with must_refuse(f"what the capability does not serve ({reasons})"):
        subject.engine(batch).run(batch)


def _constructions(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from (case for case in _options(Depth.QUICK, fit))
    yield from over_shapes(fit, depth)


def _check_construction(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    try:
        engine = subject.engine(batch)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        message = f"the capability serves {case}, and the constructor raises {words}"
        raise Violation(message) from error
    impl, capability = engine.impl, subject.capability
    require(isinstance(impl, AttentionImpl), f"{type(impl).__name__} is no AttentionImpl")
    declared = capability.lse is not Support.NO
    message = f"the capability says lse={declared}, can_return_lse is {impl.can_return_lse}"
    require(declared == impl.can_return_lse, message)
    threshold = engine.builder.reorder_batch_threshold
    is_sane = threshold is None or (isinstance(threshold, int) and threshold >= 1)
    require(is_sane, f"reorder_batch_threshold is {threshold!r}, neither None nor >= 1")


RULES = (
    Rule(
        name="construction",
        contract="What the capability serves, the constructors accept: one gate, not two.",
        make=_constructions,
        check=_check_construction,
    ),
    Rule(
        name="unsupported_option",
        contract="What the capability does not serve is refused, never accepted and dropped.",
        make=_options,
        check=_check_option,
        excluded=_served,
    ),
    Rule(
        name="malformed_layer",
        contract="A layer's value that nobody may accept is refused, by name.",
        make=_malformed,
        check=_check_malformed,
    ),
    Rule(
        name="wrong_input",
        contract="Wrong input is refused before any kernel runs, naming the argument.",
        make=_wrong_inputs,
        check=_check_wrong_input,
        excluded=_applies,
    ),
)
