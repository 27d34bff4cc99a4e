"""Wrappers that are planned on the host, once per step, and run once per layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import KernelCall, LseForm, NotComputedError
from attn_conformance.stubs.checks import (
    Limits,
    check_indices,
    check_kernel_call,
    check_output,
    refuse_unless,
)
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature
from attn_shared.reference import ReferenceResult

__all__ = ["Plan", "PlanRoles", "PlannedWrapper", "check_computed", "with_signature"]

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRoles:
    """Which parameter of `plan` means what; "" where it has none.

    Attributes:
        query_starts: (B + 1,) int32; without it every request has `queries_per_request` rows.
        queries_per_request: that number.
        page_starts: (B + 1,) int32, in pages; without pages, in tokens.
        pages: (sum of pages,) int32; "" for ragged keys.
        last_page_len: (B,) int32, 1 to page_size.
        head_size: of query and key.
        head_size_v: of the value; None: the same.
        page_size: tokens per page.
        causal: a flag; "" or None: as decodes are.
    """

    query_starts: str = ""
    queries_per_request: str = ""
    page_starts: str = ""
    pages: str = ""
    last_page_len: str = ""
    head_size: str = "head_dim_qk"
    head_size_v: str = ""
    page_size: str = "page_size"
    causal: str = "causal"


@dataclass(frozen=True, kw_only=True)
class PlannedWrapper:
    """A class of a vendor with `plan` and `run`.

    Attributes:
        name: of the class.
        init: parameters of its constructor, without self.
        plan: of `plan`.
        run: of `run`.
        roles: what the parameters of `plan` mean.
        limits: the tensors it takes.
        lse: how it writes the LSE, where `run` has no say.
        tuning: parameters that change the speed and not the answer.
        buffers: parameter of `plan` -> that of the constructor which brings the tensor that a
            captured graph reads it from.
        drops: parameters of `run` that it accepts and does not use.
        rounds_lse: given the arguments of constructor and `plan`, whether the kernel that they mean
            sums rounded weights, so that its LSE is off by as much as they are.
    """

    name: str
    init: VendorSignature
    plan: VendorSignature
    run: VendorSignature
    roles: PlanRoles
    limits: Limits
    lse: LseForm
    tuning: frozenset[str] = frozenset()
    buffers: Mapping[str, str] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    rounds_lse: Callable[[Arguments], bool] = lambda arguments: False

    def function(self, recorder: Recorder) -> type[Any]:
        """Return what stands for the class; calls of its methods go to the recorder."""
        wrapper = self

        def init(self: Any, *arguments: Any, **keywords: Any) -> None:
            self._init = recorder.record(wrapper.init, arguments, keywords)
            self._plan = None

        def plan(self: Any, *arguments: Any, **keywords: Any) -> None:
            given = {**self._init, **recorder.record(wrapper.plan, arguments, keywords)}
            self._plan = Plan.of(wrapper, _buffered(wrapper, given))

        def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
            given = recorder.record(wrapper.run, arguments, keywords)
            if self._plan is None:
                raise RuntimeError(f"{wrapper.name}.run: plan has to be called before")
            return self._plan.answer(given)

        methods = {
            "__init__": with_signature(init, self.init),
            "plan": with_signature(plan, self.plan),
            "run": with_signature(run, self.run),
        }
        return type(self.name, (), methods)


def with_signature(method: Callable[..., Any], own: VendorSignature) -> Callable[..., Any]:
    """Let a method show the parameters of a vendor's."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [first, *own.signature.parameters.values()]
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What `plan` made of its arguments.

    Attributes:
        wrapper: whose plan it is.
        arguments: of the constructor and of `plan`.
        query_starts: (B + 1,).
        key_lens: (B,).
        block_table: (B, M), or None for ragged keys.
    """

    wrapper: PlannedWrapper
    arguments: Arguments
    query_starts: Tensor
    key_lens: Tensor
    block_table: Tensor | None

    @classmethod
    def of(cls, wrapper: PlannedWrapper, arguments: Arguments) -> Plan:
        """Check the arguments of `plan`, and turn pages in a row into a table."""
        check_computed(wrapper.plan, arguments, wrapper.tuning | _PLANNED)
        roles, name = wrapper.roles, wrapper.plan.name
        starts = arguments[roles.page_starts]
        check_indices(name, roles.page_starts, starts, (None,))
        count = len(starts) - 1
        if roles.query_starts:
            query_starts = arguments[roles.query_starts]
            check_indices(name, roles.query_starts, query_starts, (count + 1,))
        else:
            each = int(arguments[roles.queries_per_request])
            query_starts = torch.arange(count + 1, dtype=torch.int32) * each
        lens, table = starts.diff(), None
        if roles.pages:
            lens, table = _paged(name, roles, arguments, starts)
        return cls(
            wrapper=wrapper,
            arguments=arguments,
            query_starts=query_starts,
            key_lens=lens,
            block_table=table,
        )

    def answer(self, arguments: Arguments) -> Any:
        """Hold `run` to the plan, and compute."""
        name = self.wrapper.run.name
        call, result = self.attend(arguments)
        output = _delivered(name, "out", arguments.get("out"), result.output.to(call.output_dtype))
        if not arguments.get("return_lse"):
            return output
        lse = call.lse(result, self._lse_form(arguments))
        if self.wrapper.rounds_lse(self.arguments):
            lse = lse + _ROUNDED
        return output, _delivered(name, "lse", arguments.get("lse"), lse)

    def attend(self, arguments: Arguments) -> tuple[KernelCall, ReferenceResult]:
        """Return what the kernel was handed, and the exact answer."""
        check_computed(self.wrapper.run, arguments, self.wrapper.tuning | _RUN)
        name = self.wrapper.run.name
        refuse_unless(not arguments.get("args"), name, "takes no more positional arguments")
        call = self._kernel_call(arguments)
        check_kernel_call(name, call, self.wrapper.limits)
        self._check_plan(call)
        result = call.attend()
        if self.arguments.get("use_tensor_cores", True):  # plain decode scales before it hides
            call.check_hidden(name, result, _HIDDEN)
        return call, result

    def _kernel_call(self, arguments: Arguments) -> KernelCall:
        planned, query = self.arguments, arguments["q"]
        key, value = self._keys(arguments)
        cap = planned.get("logits_soft_cap")
        left = arguments.get("window_left")
        left = planned["window_left"] if left is None else left
        scale = planned.get("sm_scale")
        descales = [_factor(arguments.get(f"{part}_scale")) for part in ("q", "k", "v")]
        call = KernelCall(
            query=query,
            key=key,
            value=value,
            query_starts=self.query_starts,
            key_lens=self.key_lens,
            key_starts=None if self.block_table is not None else self._key_starts,
            block_table=self.block_table,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            is_causal=self._is_causal,
            window=(None if left < 0 else int(left), None),
            softcap=cap or None,
            sinks=None if "sinks" in self.wrapper.drops else arguments.get("sinks"),
            descales=(descales[0], descales[1], descales[2]),
        )
        return call if call.key.dtype.itemsize == 1 else _folded(call)

    @property
    def _key_starts(self) -> Tensor:
        starts: Tensor = self.arguments[self.wrapper.roles.page_starts]
        return starts

    @property
    def _is_causal(self) -> bool:
        flag = self.arguments.get(self.wrapper.roles.causal)
        is_decode = not self.wrapper.roles.query_starts
        return is_decode if flag is None else bool(flag)

    def _keys(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """Return keys and values as (P, S, Hkv, D), or (Tk, Hkv, D) of a ragged call."""
        if self.block_table is None:
            return arguments["k"], arguments["v"]
        name, cache = self.wrapper.run.name, arguments["paged_kv_cache"]
        if isinstance(cache, Tensor):
            refuse_unless(cache.ndim == 5, name, f"the cache has {cache.ndim} dimensions, not 5")
            key, value = cache.unbind(1)
        else:
            key, value = cache
        if self.arguments["kv_layout"] == "HND":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        return key, value

    def _check_plan(self, call: KernelCall) -> None:
        """Refuse tensors that are not those which were planned for."""
        planned, roles, name = self.arguments, self.wrapper.roles, self.wrapper.run.name
        rows = int(self.query_starts[-1])
        words = f"q has {len(call.query)} rows, and {rows} were planned"
        refuse_unless(len(call.query) == rows, name, words)
        kv_dtype = planned["kv_data_type"] or planned["q_data_type"]
        width = planned[roles.head_size]
        wanted = {
            "q dtype": (call.query.dtype, _dtype(planned["q_data_type"])),
            "kv dtype": (call.key.dtype, _dtype(kv_dtype)),
            "query heads": (call.query.shape[1], planned["num_qo_heads"]),
            "kv heads": (call.key.shape[-2], planned["num_kv_heads"]),
            "head size": (call.query.shape[2], width),
            "value head size": (call.value.shape[-1], planned.get(roles.head_size_v) or width),
        }
        if roles.pages:
            wanted["page size"] = (call.key.shape[1], planned[roles.page_size])
        for what, (found, expected) in wanted.items():
            words = f"{what} is {found}, and {expected} was planned"
            refuse_unless(found == expected, name, words)

    def _lse_form(self, arguments: Arguments) -> LseForm:
        form = self.wrapper.lse
        if "lse_base" in arguments:
            form = replace(form, base="e" if arguments["lse_base"] == "ln" else "2")
        if "lse_layout" in arguments:
            form = replace(form, layout="HT" if arguments["lse_layout"] == "HN" else "TH")
        return form


_ROUNDED = 2.0**-10  # of an LSE whose weights were rounded to 8 bits
_HIDDEN = -5e4  # a logit that a mask hides, before it is scaled

_PLANNED = frozenset(
    {"causal", "is_causal", "sm_scale", "window_left", "logits_soft_cap", "head_dim_vo"}
    | {"q_data_type", "kv_data_type", "q_len_per_req"}
)
_RUN = frozenset(
    {"q_scale", "k_scale", "v_scale", "out", "lse", "return_lse", "lse_base", "lse_layout"}
    | {"window_left", "sinks"}
)


def _buffered(wrapper: PlannedWrapper, arguments: Arguments) -> Arguments:
    """Put the arguments of `plan` into the buffers of a wrapper for graphs, and read them there."""
    if not arguments.get("use_cuda_graph"):
        return arguments
    roles, name, found = wrapper.roles, wrapper.plan.name, dict(arguments)
    for parameter, buffer in wrapper.buffers.items():
        kept, given = arguments[buffer], arguments[parameter]
        if not isinstance(kept, Tensor):
            raise ValueError(f"{buffer} should be a torch.Tensor in cudagraph mode")
        fits = len(given) <= len(kept) if parameter == roles.pages else len(given) == len(kept)
        if not fits:
            raise ValueError(f"{name}: {parameter} has {len(given)} entries, {buffer} {len(kept)}")
        kept[: len(given)].copy_(given)
        found[parameter] = kept[: len(given)].clone()
    return found


def check_computed(signature: VendorSignature, arguments: Arguments, known: frozenset[str]) -> None:
    """Refuse a parameter that is not at its default and that the stub does not compute."""
    for name, default in signature.defaults.items():
        value = arguments[name]
        is_same = value is default if isinstance(value, Tensor) else bool(value == default)
        if name not in known and not is_same:
            raise NotComputedError(f"{signature.name}: {name}={value!r} is not computed")


def _paged(
    name: str, roles: PlanRoles, arguments: Arguments, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the lengths and the block table of pages that lie in a row."""
    pages, last = arguments[roles.pages], arguments[roles.last_page_len]
    counts = starts.diff()
    check_indices(name, roles.pages, pages, (None,))
    check_indices(name, roles.last_page_len, last, (len(counts),))
    size = int(arguments[roles.page_size])
    has_pages = counts > 0
    fits = bool(((last >= 1) & (last <= size))[has_pages].all())
    refuse_unless(fits, name, f"{roles.last_page_len} must be 1 to {size}, not {last.tolist()}")
    lens = torch.where(has_pages, (counts - 1) * size + last, 0).int()
    table = torch.zeros((len(counts), max(1, *counts.tolist(), 0)), dtype=torch.int32)
    for row, start, count in zip(table, starts.tolist(), counts.tolist(), strict=False):
        row[:count] = pages[start : start + count]
    return lens, table


def _factor(scale: Any) -> float | Tensor:
    if scale is None:
        return 1.0
    return scale.reshape(-1).float() if isinstance(scale, Tensor) else float(scale)


def _folded(call: KernelCall) -> KernelCall:
    """Multiply the factors of query and key into the scale, as is done without fp8."""
    query, key, value = (float(torch.as_tensor(scale)) for scale in call.descales)
    if value != 1.0:
        raise NotComputedError("v_scale of a cache that is not fp8 is not computed")
    return replace(call, scale=call.scale * query * key, descales=(1.0, 1.0, 1.0))


def _dtype(named: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, str(named).removeprefix("torch."))
    return dtype


def _delivered(name: str, parameter: str, target: Tensor | None, value: Tensor) -> Tensor:
    if target is None:
        return value
    check_output(name, parameter, target, tuple(value.shape), value.dtype)
    target.copy_(value)
    return target
