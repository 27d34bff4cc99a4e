"""What a backend for latents has to refuse, before any kernel runs and in words that say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.case import Case
from attn_conformance.checks import must_refuse, require
from attn_conformance.fit import Fit
from attn_conformance.mla_batch import MLABatch
from attn_conformance.mla_engine import MLAEngine, mla_batch, mla_engine
from attn_conformance.rule import Depth, Rule
from attn_conformance.subject import Subject
from attn_shared.capability import Reason, Support
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.spec import LayerSpec

__all__ = ["RULES"]

Change = Callable[[Tensor], Any]


def _double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def _wider(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[..., :1]], dim=-1)


def _more_heads(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[:, :1]], dim=1)


def _fewer_rows(tensor: Tensor) -> Tensor:
    return tensor[:-1]


_DECODE_TENSORS: dict[str, tuple[str, str, Change]] = {
    "query-dtype": ("query", "query", _double),
    "query-heads": ("query", "query", _more_heads),
    "query-width": ("query", "query", _wider),
    "query-rank": ("query", "query", lambda t: t.flatten(1)),
    "query-rows": ("query", "query", _fewer_rows),
    "cache-missing": ("kv_cache", "kv_cache", lambda t: None),
    "cache-dtype": ("kv_cache", "kv_cache", _double),
    "cache-width": ("kv_cache", "kv_cache", _wider),
    "cache-rank": ("kv_cache", "kv_cache", lambda t: t.flatten(-2)),
    "output-dtype": ("output", "output", _double),
    "output-heads": ("output", "output", _more_heads),
    "output-width": ("output", "output", _wider),
    "output-rows": ("output", "output", _fewer_rows),
    "lse-dtype": ("lse", "lse", _double),
    "lse-shape": ("lse", "lse", _wider),
    "metadata": ("metadata", "metadata", lambda t: object()),
}
"""Case -> the argument that is wrong, the word that the refusal has to hold, the change."""


def _wrong_decodes(depth: Depth, fit: Fit) -> Iterator[Case]:
    lens = ((1, 1, 1), (5, 9, 2))
    others = ("expanded-query", "values-as-output", "scale-unquantised", "metadata-of-another")
    for name in (*_DECODE_TENSORS, *others):
        if name.startswith("scale"):
            yield fit.mla_case(name, *lens, kv_cache_dtype="auto")
        else:
            yield fit.mla_case(name, *lens)


def _decode_arguments(engine: MLAEngine, batch: MLABatch) -> dict[str, Any]:
    rows, heads = batch.absorbed.shape[:2]
    return {
        "layer": batch.layer,
        "query": batch.absorbed,
        "kv_cache": batch.kv_cache,
        "metadata": engine.builder.build(0, batch.common),
        "output": batch.absorbed.new_empty(rows, heads, batch.dims.kv_lora_rank),
        "lse": batch.absorbed.new_empty(heads, rows, dtype=torch.float32),
    }


def _check_wrong_decode(subject: Subject, case: Case) -> None:
    batch = mla_batch(subject, case)
    engine = mla_engine(subject, batch)
    arguments = _decode_arguments(engine, batch)
    if not subject.returns_lse_of(case):
        if case.name.startswith("lse"):
            return
        arguments["lse"] = None
    word = "query"
    if case.name in _DECODE_TENSORS:
        name, word, change = _DECODE_TENSORS[case.name]
        arguments[name] = change(arguments[name])
    elif case.name == "expanded-query":
        arguments["query"] = batch.query
    elif case.name == "metadata-of-another":
        word, other = "metadata", replace(arguments["metadata"], decode=object())
        arguments["metadata"] = other
        with must_refuse("check_metadata of another backend's decodes", word):
            engine.impl.check_metadata(other)
    elif case.name == "values-as-output":
        word, shape = "output", batch.absorbed.shape[:2]
        arguments["output"] = batch.query.new_empty(*shape, batch.dims.v_head_dim + 1)
    else:
        word, arguments["layer"] = "scale", replace(batch.layer, k_scale=2.0, v_scale=2.0)
    with must_refuse(f"forward_mqa with a wrong {case.name}", word):
        engine.impl.forward_mqa(**arguments)


_PREFILL_TENSORS: dict[str, tuple[str, Change]] = {
    "query-dtype": ("query", _double),
    "query-heads": ("query", _more_heads),
    "query-width": ("query", _wider),
    "query-rows": ("query", _fewer_rows),
    "latent-width": ("latent", _wider),
    "latent-rows": ("latent", _fewer_rows),
    "latent-dtype": ("latent", _double),
    "rope-width": ("rope", _wider),
    "rope-rows": ("rope", _fewer_rows),
}


def _wrong_prefills(depth: Depth, fit: Fit) -> Iterator[Case]:
    for name in (*_PREFILL_TENSORS, "absorbed-query", "no-projection", "metadata"):
        yield fit.mla_case(name, (20, 33), (20, 33 + fit.block_size))


def _check_wrong_prefill(subject: Subject, case: Case) -> None:
    batch = mla_batch(subject, case)
    engine = mla_engine(subject, batch)
    metadata: Any = engine.builder.build(0, batch.common)
    if metadata.prefill is None:
        return  # a decode kernel that takes rows so long is asked by other rules
    word, layer = "query", batch.layer
    rows = slice(metadata.num_decode_tokens, None)
    tensors = {"query": batch.query, "latent": batch.latent, "rope": batch.rope}
    tensors = {name: tensor[rows] for name, tensor in tensors.items()}
    if case.name in _PREFILL_TENSORS:
        word, change = _PREFILL_TENSORS[case.name]
        tensors[word] = change(tensors[word])
    elif case.name == "absorbed-query":
        tensors["query"] = batch.absorbed[rows]
    elif case.name == "no-projection":
        word, layer = "kv_b_proj", replace(batch.layer, kv_b_proj=None)
    else:
        word, metadata = "metadata", object()
    output = batch.query.new_empty(*batch.query[rows].shape[:2], batch.dims.v_head_dim)
    with must_refuse(f"forward_mha with a wrong {case.name}", word):
        engine.impl.forward_mha(
            layer,
            tensors["query"],
            tensors["latent"],
            tensors["rope"],
            batch.kv_cache,
            metadata,
            output,
        )


_LAYERS: dict[str, tuple[str, Callable[[LayerSpec], LayerSpec]]] = {
    "value-width": ("head_size_v", lambda s: replace(s, head_size_v=s.head_size_v + 8)),
    "entry-width": ("head_size", lambda s: replace(s, head_size=s.head_size + 8)),
    "kv-heads": ("num_kv_heads", lambda s: replace(s, num_kv_heads=s.num_heads, num_heads=4)),
    "no-widths": ("mla", lambda s: replace(s, mla=None, head_size_v=s.head_size)),
    "no-cache": ("kv_cache_spec", lambda s: replace(s, kv_cache_spec=None)),
    "cache-of-heads": (
        "kv_cache_spec",
        lambda s: replace(
            s,
            kv_cache_spec=FullAttentionSpec(
                block_size=s.kv_cache_spec.block_size,  # type: ignore[union-attr]
                dtype=s.dtype,
                num_kv_heads=1,
                head_size=s.head_size,
                head_size_v=s.head_size,
            ),
        ),
    ),
}
"""Layers that no backend for latents may take, and the word that says why."""

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("window", {"window": (3, 0)}),
    "softcap": ("softcap", {"softcap": 30.0}),
    "sinks": ("sinks", {"has_sinks": True}),
    "alibi": ("alibi", {"has_alibi": True}),
    "chunks": ("chunked_local", {"chunk_size": 8}),
}
"""Features that a capability may lack: its field, and how the layer asks."""


def _wrong_layers(depth: Depth, fit: Fit) -> Iterator[Case]:
    for name in (*_LAYERS, *_OPTIONS):
        yield fit.mla_case(name, (1,), (5,))


def _served_option(subject: Subject, case: Case) -> tuple[Reason, ...]:
    excluded = subject.excluded(case)
    if excluded or case.name not in _OPTIONS:
        return excluded
    field, _ = _OPTIONS[case.name]
    if getattr(subject.capability, field) is Support.NO:
        return ()
    return (Reason(code=field, value="served", allowed="not served, to be refused"),)


def _check_wrong_layer(subject: Subject, case: Case) -> None:
    batch = mla_batch(subject, case)
    if case.name in _LAYERS:
        word, change = _LAYERS[case.name]
        words = ("head_size", "kv_lora_rank") if "head_size" in word else (word,)
    else:
        word, fields = _OPTIONS[case.name]

        def change(spec: LayerSpec) -> LayerSpec:
            return replace(spec, **fields)

        words = (word.rstrip("s"),)
    spec = change(batch.spec)
    with must_refuse(f"a layer with {case.name}", *words):
        subject.backend.get_impl_cls()(spec)


def _unserved(depth: Depth, fit: Fit) -> Iterator[Case]:
    for name in ("fp8_ds_mla", "nvfp4", "int8_per_token_head", "fp8", "fp8_e5m2"):
        yield fit.mla_case(name, (1,), (5,), variant=name)
    for size in (1, 8, 16, 24, 32, 48):
        yield fit.mla_case(f"block-{size}", (1,), (5,), block_size=size, variant="block")


def _always(subject: Subject, case: Case) -> tuple[Reason, ...]:
    return ()


def _check_unserved(subject: Subject, case: Case) -> None:
    """What the capability does not name is told with value and limit, and refused when built."""
    request = case.request
    if case.variant != "block":
        request = request.with_options(kv_cache_dtype=case.variant)
    reasons = subject.capability.check(request, subject.facts)
    code = "block_size" if case.variant == "block" else "kv_cache_dtype"
    told = [reason for reason in reasons if reason.code == code]
    value = str(case.block_size) if code == "block_size" else case.variant
    for reason in told:
        require(value in reason.value, f"{code}={value} is refused as {reason}")
        require(bool(reason.allowed), f"{code}={value} is refused without what is allowed")
    if told and code == "block_size":
        batch = mla_batch(subject, case)
        with must_refuse(f"a layer with blocks of {value}", value):
            subject.backend.get_impl_cls()(batch.spec)


def _plain(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield fit.mla_case("layer", (1,), (5,))


def _check_forward(subject: Subject, case: Case) -> None:
    impl = mla_engine(subject, mla_batch(subject, case)).impl
    require(not hasattr(impl, "forward"), f"{type(impl).__name__} has a forward")
    try:
        impl.forward  # noqa: B018
    except AttributeError as error:
        said = str(error)
        named = "forward_mha" in said and "forward_mqa" in said
        require(named, f"forward is refused without naming forward_mha and forward_mqa: {said}")


def _check_blocks(subject: Subject, case: Case) -> None:
    """A batch that was described for other blocks has slots elsewhere."""
    batch = mla_batch(subject, case)
    other = batch.common.with_fields(block_size=case.block_size * 2)
    with must_refuse("a batch of other blocks", "block_size"):
        mla_engine(subject, batch).builder.build(0, other)


RULES = (
    Rule(
        name="mla_forward",
        contract="There is no forward: asking for it names forward_mha and forward_mqa.",
        make=_plain,
        check=_check_forward,
    ),
    Rule(
        name="mla_layer",
        contract="A layer that does not fit itself, or asks what is not served, is refused.",
        make=_wrong_layers,
        check=_check_wrong_layer,
        excluded=_served_option,
    ),
    Rule(
        name="mla_unserved",
        contract="Formats and blocks that are not served are refused with value and limit.",
        make=_unserved,
        check=_check_unserved,
        excluded=_always,
    ),
    Rule(
        name="mla_decode_input",
        contract="A wrong argument of forward_mqa is refused by name.",
        make=_wrong_decodes,
        check=_check_wrong_decode,
    ),
    Rule(
        name="mla_prefill_input",
        contract="A wrong argument of forward_mha is refused by name.",
        make=_wrong_prefills,
        check=_check_wrong_prefill,
    ),
    Rule(
        name="mla_other_blocks",
        contract="A batch that was described for blocks of another size is refused.",
        make=_plain,
        check=_check_blocks,
    ),
)
