"""Graph capture: which batches, at which addresses, and with what a replay may change."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance._walk import tensors_in
from attn_conformance.batch import Batch
from attn_conformance.case import Case
from attn_conformance.checks import Answer, answer_of, require
from attn_conformance.engine import Engine, Result
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.subject import Subject
from attn_shared.backend import AttentionCGSupport
from attn_shared.capability import Reason
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig

__all__ = ["RULES", "captured_step", "on_cuda", "overwrite"]

_LEVELS = {
    "decode": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "uniform": AttentionCGSupport.UNIFORM_BATCH,
    "mixed": AttentionCGSupport.ALWAYS,
}
_WARM_UPS = 3  # as torch's guide to graphs asks for, on a stream of its own


def _level(subject: Subject, batch: Batch) -> AttentionCGSupport:
    builder = subject.backend.get_builder_cls()
    return builder.get_cudagraph_support(_config(batch), batch.spec.kv_cache_spec)


def _config(batch: Batch) -> BuildConfig:
    tokens = max(1, len(batch.query))
    return BuildConfig(max_num_tokens=tokens, capture_sizes=(tokens,))


def _levels(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield fit.case("decode", (1, 1), (5, 9))


def _check_level(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    level = _level(subject, batch)
    words = f"get_cudagraph_support returns {level!r}"
    require(isinstance(level, AttentionCGSupport), f"{words}, which is no AttentionCGSupport")
    again = _level(subject, batch)
    require(level == again, f"{words}, and then {again!r} for the same layer")
    is_cpu = subject.device.type == "cpu"
    require(isinstance(level, int) or is_cpu, words)


def _captured(depth: Depth, fit: Fit) -> Iterator[Case]:
    """The variant says which level such a batch needs; lengths backwards have other contents."""
    n = fit.block_size
    for name, feature in {"plain": {}, "sinks": {"has_sinks": True}}.items():
        yield fit.case(f"decode-{name}", (1, 1, 1), (2, 3 * n, n + 1), **feature, variant="decode")
        yield fit.case(
            f"uniform-{name}", (2, 2, 2), (2, 3 * n, n + 1), **feature, variant="uniform"
        )
        yield fit.case(
            f"mixed-{name}", (1, 2, n), (2 * n, 3 * n, 2 * n), **feature, variant="mixed"
        )
    yield fit.case("mixed-prompt", (1, 2, 70), (2 * n, 3 * n, 70 + n), variant="mixed")
    yield fit.case("padded", (1, 1, 1, 1), (2, 3 * n, 0, n + 1), variant="decode")


def _is_captured(subject: Subject, case: Case) -> tuple[Reason, ...]:
    excluded = subject.excluded(case)
    if excluded:
        return excluded
    level, needed = _level(subject, subject.batch(case)), _LEVELS[case.variant]
    if level >= needed:
        return ()
    return (Reason(code="graph_level", value=level.name, allowed=f"{needed.name} or more"),)


def _other(case: Case) -> Case:
    """Return a batch of the same shapes and the same blocks in all, with other contents."""
    lens = tuple(reversed(case.seq_lens))
    is_longer = all(new <= old for new, old in zip(case.query_lens, lens, strict=True) if old)
    return case.with_fields(seq_lens=lens if is_longer else case.seq_lens, seed=case.seed + 1)


def _check_pointers(subject: Subject, case: Case) -> None:
    """The step's inputs stay where they are; so must everything that a kernel was shown."""
    first, second = subject.batch(case), subject.batch(_other(case))
    engine = subject.engine(first, **_fields_of(_config(first)))
    captured = engine.builder.build_for_cudagraph_capture(_roomy(first))
    before = _addresses(captured, first)
    refreshed = _refresh(first, second)
    for again in (engine.builder.build(0, refreshed.common), captured):
        after = _addresses(again, refreshed)
        moved = sorted(path for path in before if after.get(path) != before[path])
        require(not moved, f"tensors moved after capture: {', '.join(moved)} in {case}")


def _fields_of(config: BuildConfig) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(config)}


def _addresses(metadata: Any, batch: Batch) -> dict[str, int]:
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


def _roomy(batch: Batch) -> CommonAttentionMetadata:
    """Return the batch with the bounds that an engine captures with: the longest that may come."""
    longest = max(batch.common.max_seq_len, *batch.case.seq_lens)
    return batch.common.with_fields(max_seq_len=longest)


def _refresh(static: Batch, new: Batch) -> Batch:
    """Copy a batch's contents into the tensors of another; the host's mirrors are new ones."""
    for name in ("query", "key", "value", "kv_cache", "written_cache"):
        target, source = getattr(static, name), getattr(new, name)
        if isinstance(target, Tensor):
            overwrite(target, source)
    changes = {}
    for item in fields(static.common):
        target, source = (getattr(each.common, item.name) for each in (static, new))
        if item.name.endswith("_cpu") or not isinstance(target, Tensor):
            changes[item.name] = source
        else:
            overwrite(target, source)
    for name in ("sinks", "alibi_slopes"):
        target, source = getattr(static.layer, name), getattr(new.layer, name)
        if isinstance(target, Tensor):
            overwrite(target, source)
    return replace(static, case=new.case, common=static.common.with_fields(**changes))


def overwrite(target: Tensor, source: Tensor) -> None:
    """Copy one tensor into another of its shape and dtype, fp8 by its bytes."""
    if target.dtype.itemsize == 1 and target.dtype is not torch.bool:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


def _check_replay(subject: Subject, case: Case) -> None:
    """Capture one batch, refresh contents in place, replay: the answer is the new batch's."""
    static, new = subject.batch(case), subject.batch(_other(case))
    engine = subject.engine(static, **_fields_of(_config(static)))
    first, second = answer_of(subject, static), answer_of(subject, new)
    metadata = engine.builder.build_for_cudagraph_capture(_roomy(static))
    output = torch.full_like(_output_like(static), torch.nan)
    replay = _capture(subject, engine, static, metadata, output)
    replay()
    first.hold(Result(output=output), "first replay")
    refreshed = _refresh(static, new)
    engine.builder.build(0, refreshed.common)
    output.fill_(torch.nan)
    replay()
    second.hold(Result(output=output), "replay with new contents")


def _output_like(batch: Batch) -> Tensor:
    return batch.query.new_empty((*batch.query.shape[:2], batch.case.value_size))


def _capture(
    subject: Subject, engine: Engine, batch: Batch, metadata: Any, output: Tensor
) -> Callable[[], None]:
    """Return what runs the step of a batch again."""

    def step() -> None:
        engine.write(batch)
        engine.forward(batch, metadata, output=output)

    return captured_step(subject, step)


def captured_step(subject: Subject, step: Callable[[], None]) -> Callable[[], None]:
    """Return what runs a captured step again; without graphs, the very same Python calls."""
    if subject.device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _steps(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, names=("decode", "extend", "mixed"))
    yield from over_shapes(fit, depth, "sinks", names=("decode",), has_sinks=True)


def on_cuda(subject: Subject, case: Case) -> tuple[Reason, ...]:
    """Return why a case is not run where only a CUDA device can tell."""
    if subject.device.type == "cuda":
        return subject.excluded(case)
    return (Reason(code="device", value=subject.device.type, allowed="cuda, which tells"),)


def _check_no_synchronisation(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    engine = subject.engine(batch)
    metadata = engine.plan(batch)
    output = _output_like(batch)

    def step() -> None:
        engine.write(batch)
        engine.forward(batch, metadata, output=output)

    step()  # what happens once (compilation, autotuning) may synchronise
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # the mode says that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    answer: Answer = answer_of(subject, batch)
    answer.hold(Result(output=output))


RULES = (
    Rule(
        name="graph_level",
        contract="The graph level is declared as an AttentionCGSupport, always the same.",
        make=_levels,
        check=_check_level,
    ),
    Rule(
        name="capture_pointers",
        contract="Metadata built for capture keeps its data pointers.",
        make=_captured,
        check=_check_pointers,
        excluded=_is_captured,
    ),
    Rule(
        name="replay",
        contract="A captured step replayed with new contents gives the new answer.",
        make=_captured,
        check=_check_replay,
        excluded=_is_captured,
    ),
    Rule(
        name="no_synchronisation",
        contract="Neither update nor forward synchronises with the device.",
        make=_steps,
        check=_check_no_synchronisation,
        excluded=on_cuda,
    ),
)
