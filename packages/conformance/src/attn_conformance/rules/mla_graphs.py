"""Results in place, and graph capture of decodes over latents."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance._walk import tensors_in
from attn_conformance.case import Case
from attn_conformance.checks import must_refuse, require
from attn_conformance.fit import Fit
from attn_conformance.mla_batch import MLABatch
from attn_conformance.mla_engine import MLAEngine, MLAResult, hold, mla_batch, mla_engine
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules.graphs import captured_step, on_cuda, overwrite
from attn_conformance.subject import Subject
from attn_shared.backend import AttentionCGSupport
from attn_shared.capability import Reason
from attn_shared.spec import BuildConfig

__all__ = ["RULES"]

_LEVELS = {
    "decode": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "uniform": AttentionCGSupport.UNIFORM_BATCH,
}


def _outputs(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("decodes", (1, 1, 1), (2 * n + 1, n, 3))
    yield fit.mla_case("mixed", (1, 1, 20), (2 * n + 1, n, 20 + n))


def _check_outputs(subject: Subject, case: Case) -> None:
    """The output that is given is the one that is returned; strides do not matter."""
    batch = mla_batch(subject, case)
    engine = mla_engine(subject, batch)
    metadata = engine.builder.build(0, batch.common)
    engine.write(batch)
    count, dims = metadata.num_decode_tokens, batch.dims
    rows = batch.absorbed[:count]
    heads = batch.spec.num_heads
    wide = rows.new_full((count, heads + 1, dims.kv_lora_rank + 8), torch.nan)
    given = wide[:, :heads, : dims.kv_lora_rank]
    arguments = (batch.layer, rows, batch.kv_cache, metadata)
    found = engine.impl.forward_mqa(*arguments, given)
    require(found.data_ptr() == given.data_ptr(), f"another output than the given in {case}")
    untouched = wide[:, heads:].isnan().all() and wide[..., dims.kv_lora_rank :].isnan().all()
    require(bool(untouched), f"more is written than the output in {case}")
    own = engine.impl.forward_mqa(*arguments)
    empty = batch.query[count:count, :, : dims.v_head_dim]
    for name, latents in (("given", found), ("own", own)):
        decodes = replace(metadata, num_tokens=count, prefill=None)
        hold(MLAResult(batch=batch, metadata=decodes, latents=latents, values=empty), name)
    spread = torch.stack([batch.absorbed, batch.absorbed], dim=2)[:, :, 0]
    other = replace(batch, absorbed=spread)
    hold(engine.attend(other, metadata), "a query with strides")


def _config(batch: MLABatch) -> dict[str, Any]:
    tokens = max(1, len(batch.query))
    return {"max_num_tokens": tokens, "capture_sizes": (tokens,)}


def _level(subject: Subject, batch: MLABatch) -> AttentionCGSupport:
    builder = subject.backend.get_builder_cls()
    config = BuildConfig(**_config(batch))
    return builder.get_cudagraph_support(config, batch.spec.kv_cache_spec)


def _plain(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield fit.mla_case("decode", (1, 1), (5, 9))


def _check_level(subject: Subject, case: Case) -> None:
    batch = mla_batch(subject, case)
    level = _level(subject, batch)
    words = f"get_cudagraph_support returns {level!r}"
    require(isinstance(level, AttentionCGSupport), f"{words}, which is no AttentionCGSupport")
    require(level == _level(subject, batch), f"{words}, and then another for the same layer")


def _captured(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("decode", (1, 1, 1), (2, 3 * n, n + 1), variant="decode")
    yield fit.mla_case("padded", (1, 1, 1, 1), (2, 3 * n, 0, n + 1), variant="decode")
    yield fit.mla_case("uniform", (2, 2, 2), (2, 3 * n, n + 1), variant="uniform")


def _is_captured(subject: Subject, case: Case) -> tuple[Reason, ...]:
    excluded = subject.excluded(case)
    if excluded:
        return excluded
    batch = mla_batch(subject, case)
    level, needed = _level(subject, batch), _LEVELS[case.variant]
    if level < needed:
        return (Reason(code="graph_level", value=level.name, allowed=f"{needed.name} or more"),)
    threshold = mla_engine(subject, batch, **_config(batch)).builder.reorder_batch_threshold or 1
    if max(case.query_lens) <= threshold:
        return ()
    return (Reason(code="threshold", value=f"{threshold}", allowed=f"{max(case.query_lens)}"),)


def _other(case: Case) -> Case:
    """Return a batch of the same shapes and the same blocks in all, with other contents."""
    return case.with_fields(seq_lens=tuple(reversed(case.seq_lens)), seed=case.seed + 1)


def _refresh(static: MLABatch, new: MLABatch) -> MLABatch:
    """Copy a batch's contents into the tensors of another; the host's mirrors are new ones."""
    for name in ("query", "absorbed", "latent", "rope", "kv_cache", "written_cache"):
        overwrite(getattr(static, name), getattr(new, name))
    changes = {}
    for item in fields(static.common):
        target, source = (getattr(each.common, item.name) for each in (static, new))
        if item.name.endswith("_cpu") or not isinstance(target, Tensor):
            changes[item.name] = source
        else:
            overwrite(target, source)
    return replace(
        static, case=new.case, layer=new.layer, common=static.common.with_fields(**changes)
    )


def _addresses(metadata: Any, batch: MLABatch) -> dict[str, int]:
    """Return where the device tensors are; on a CPU, all but mirrors that the host reads."""
    mirrors = {
        id(getattr(batch.common, item.name))
        for item in fields(batch.common)
        if item.name.endswith("_cpu") or item.name == "is_prefilling"
    }
    return {
        path: tensor.data_ptr()
        for path, tensor in tensors_in(metadata)
        if tensor.device == batch.device and id(tensor) not in mirrors and "_cpu" not in path
    }


def _roomy(batch: MLABatch) -> Any:
    longest = max(batch.common.max_seq_len, *batch.case.seq_lens)
    return batch.common.with_fields(max_seq_len=longest)


def _check_pointers(subject: Subject, case: Case) -> None:
    first, second = mla_batch(subject, case), mla_batch(subject, _other(case))
    engine = mla_engine(subject, first, **_config(first))
    captured = engine.builder.build_for_cudagraph_capture(_roomy(first))
    before = _addresses(captured, first)
    refreshed = _refresh(first, second)
    for again in (engine.builder.build(0, refreshed.common), captured):
        after = _addresses(again, refreshed)
        moved = sorted(path for path in before if after.get(path) != before[path])
        require(not moved, f"tensors moved after capture: {', '.join(moved)} in {case}")


def _check_replay(subject: Subject, case: Case) -> None:
    """Capture decodes, refresh contents in place, replay: the answer is the new batch's."""
    static, new = mla_batch(subject, case), mla_batch(subject, _other(case))
    engine = mla_engine(subject, static, **_config(static))
    metadata = engine.builder.build_for_cudagraph_capture(_roomy(static))
    shape = (*static.absorbed.shape[:2], static.dims.kv_lora_rank)
    output = static.absorbed.new_full(shape, torch.nan)
    first = _result(static, metadata, output)

    def step() -> None:
        engine.write(static)
        engine.impl.forward_mqa(static.layer, static.absorbed, static.kv_cache, metadata, output)

    replay = captured_step(subject, step)
    replay()
    hold(first, "first replay")
    refreshed = _refresh(static, new)
    engine.builder.build(0, refreshed.common)
    output.fill_(torch.nan)
    replay()
    hold(_result(refreshed, metadata, output), "replay with new contents")


def _result(batch: MLABatch, metadata: Any, output: Tensor) -> MLAResult:
    return MLAResult(
        batch=batch,
        metadata=metadata,
        latents=output,
        values=batch.query[:0, :, : batch.dims.v_head_dim],
    )


def _check_no_prefill(subject: Subject, case: Case) -> None:
    """Prefills depend on their lengths, so that a graph of them would replay those captured."""
    batch = mla_batch(subject, case)
    builder = mla_engine(subject, batch, **_config(batch)).builder
    if max(case.query_lens) <= (builder.reorder_batch_threshold or 1):
        return
    with must_refuse("capture of a batch with prefills", "captured", "decode"):
        builder.build_for_cudagraph_capture(batch.common)


def _with_prefill(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield fit.mla_case("prefill", (1, 700), (5, 700))


def _steps(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("decodes", (1, 1), (3 * n, n + 1))
    yield fit.mla_case("mixed", (1, 30, 40), (3 * n, 30 + 2 * n, 40))


def _check_no_synchronisation(subject: Subject, case: Case) -> None:
    batch = mla_batch(subject, case)
    engine = mla_engine(subject, batch)
    metadata = engine.builder.build(0, batch.common)
    hold(_stepped(engine, batch, metadata))  # what happens once may synchronise
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # the mode says that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        result = _stepped(engine, batch, metadata)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    hold(result)


def _stepped(engine: MLAEngine, batch: MLABatch, metadata: Any) -> MLAResult:
    engine.write(batch)
    return engine.attend(batch, metadata)


RULES = (
    Rule(
        name="mla_output",
        contract="The given output is written, of any strides, and returned; None makes one.",
        make=_outputs,
        check=_check_outputs,
    ),
    Rule(
        name="mla_graph_level",
        contract="The graph level is declared as an AttentionCGSupport, always the same.",
        make=_plain,
        check=_check_level,
    ),
    Rule(
        name="mla_capture_pointers",
        contract="Metadata built for capture keeps its data pointers.",
        make=_captured,
        check=_check_pointers,
        excluded=_is_captured,
    ),
    Rule(
        name="mla_replay",
        contract="Captured decodes replayed with new contents give the new answer.",
        make=_captured,
        check=_check_replay,
        excluded=_is_captured,
    ),
    Rule(
        name="mla_captured_prefill",
        contract="A batch with prefills is not captured, and says so.",
        make=_with_prefill,
        check=_check_no_prefill,
    ),
    Rule(
        name="mla_no_synchronisation",
        contract="Neither update nor attention synchronises with the device.",
        make=_steps,
        check=_check_no_synchronisation,
        excluded=on_cuda,
    ),
)
