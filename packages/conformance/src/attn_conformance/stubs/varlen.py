"""Calls that take everything at once: ragged queries, and ragged or paged keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
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

__all__ = ["Roles", "VarlenFunction"]

Arguments = Mapping[str, Any]

_NATURAL = LseForm()


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Which parameter of a call means what; "" where it has none.

    Attributes:
        query: (T, Hq, D), or (B, Sq, Hq, D) where no query_starts are given.
        key: (P, S, Hkv, D) with a table, (B, Sk, Hkv, D) with key_lens alone, else (Tk, Hkv, D).
        value: the same; "" where it is the first columns of the key.
        value_size: how many, where it is.
        query_value: (T, Hq, Dv), whose products with the values are added to the logits.
        out: written in place.
        query_starts: (B + 1,) int32.
        key_starts: (B + 1,) int32; with a table, lengths are its differences.
        key_lens: (B,) int32.
        table: (B, M) int32.
        max_query_len: host bound: rows of a longer query are never written.
        max_key_len: host bound: rows of a request with more keys are never written.
        scale: None is 1 / sqrt(D).
        causal: a flag.
        window: (left, right, ...), negative or None for unbounded.
        window_sides: instead of it, the two parameters that hold left and right.
        softcap: 0 is off.
        alibi: (Hq,) float32.
        sinks: (Hq,).
        query_descale: (B, Hkv) or one number.
        key_descale: the same.
        value_descale: the same.
        lse_flag: asks for the LSE.
    """

    query: str = "q"
    key: str = "k"
    value: str = "v"
    value_size: str = ""
    query_value: str = ""
    out: str = ""
    query_starts: str = "cu_seqlens_q"
    key_starts: str = ""
    key_lens: str = ""
    table: str = ""
    max_query_len: str = "max_seqlen_q"
    max_key_len: str = ""
    scale: str = "softmax_scale"
    causal: str = "causal"
    window: str = "window_size"
    window_sides: tuple[str, ...] = ()
    softcap: str = "softcap"
    alibi: str = ""
    sinks: str = ""
    query_descale: str = ""
    key_descale: str = ""
    value_descale: str = ""
    lse_flag: str = ""

    def names(self) -> set[str]:
        """Return the parameters that have a role."""
        names = {getattr(self, item.name) for item in fields(self) if item.name != "window_sides"}
        return (names | set(self.window_sides)) - {""}


@dataclass(frozen=True, kw_only=True)
class VarlenFunction:
    """One function of a vendor.

    Attributes:
        signature: its parameters.
        roles: what they mean.
        limits: the tensors it takes.
        lse: how it writes the LSE.
        tuning: parameters that change the speed and not the answer.
        plain: what it returns: "output", "lse", "none", in this order; nothing for ().
        with_lse: what it returns where lse_flag asks for the LSE.
        rules: further refusals; each gets the arguments and raises.
        needs_positive_scale: with another scale the output is NaN, since the kernel takes the
            largest logit before it scales.
    """

    signature: VendorSignature
    roles: Roles
    limits: Limits
    lse: LseForm = _NATURAL
    tuning: frozenset[str] = frozenset()
    plain: tuple[str, ...] = ("output",)
    with_lse: tuple[str, ...] = ("output", "lse")
    rules: tuple[Callable[[Arguments], None], ...] = ()
    needs_positive_scale: bool = False

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for the function; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.answer(recorder.record(self.signature, arguments, keywords))

        call.__name__ = call.__qualname__ = self.signature.name
        call.__signature__ = self.signature.signature  # type: ignore[attr-defined]
        return call

    def answer(self, arguments: Arguments) -> Any:
        """Refuse what the real function refuses, and compute the rest.

        Raises:
            RuntimeError, TypeError, NotImplementedError: as the real function.
            NotComputedError: it would compute this, and the stub does not.
        """
        for rule in self.rules:
            rule(arguments)
        self._check_computed(arguments)
        call = self._kernel_call(arguments)
        check_kernel_call(self.signature.name, call, self.limits)
        return self._returned(arguments, call)

    def _check_computed(self, arguments: Arguments) -> None:
        known = self.roles.names() | self.tuning
        for name, default in self.signature.defaults.items():
            value = arguments[name]
            if name not in known and not _is_same(value, default):
                raise NotComputedError(f"{self.signature.name}: {name}={value!r} is not computed")

    def _get(self, arguments: Arguments, role: str) -> Any:
        name = getattr(self.roles, role)
        return arguments[name] if name else None

    def _kernel_call(self, arguments: Arguments) -> KernelCall:
        query, key, value = self._tensors(arguments)
        width = self._get(arguments, "query").shape[-1]
        query, starts = self._queries(arguments, query)
        lens, key_starts, table = self._keys(arguments, key, len(starts) - 1)
        scale = self._get(arguments, "scale")
        descales = tuple(
            _descale(self._get(arguments, f"{part}_descale")) for part in ("query", "key", "value")
        )
        return KernelCall(
            query=query,
            key=key,
            value=value,
            query_starts=starts,
            key_lens=lens,
            key_starts=key_starts,
            block_table=table,
            scale=width**-0.5 if scale is None else float(scale),
            is_causal=bool(self._get(arguments, "causal")),
            window=self._window(arguments),
            softcap=self._get(arguments, "softcap") or None,
            alibi_slopes=self._slopes(arguments),
            sinks=self._get(arguments, "sinks"),
            descales=(descales[0], descales[1], descales[2]),
        )

    def _tensors(self, arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, with what is multiplied with values among the keys."""
        query, key, value = (self._get(arguments, role) for role in ("query", "key", "value"))
        size, query_value = self._get(arguments, "value_size"), self._get(arguments, "query_value")
        if size is not None:
            value = key[..., :size]
        if query_value is not None:
            query, key = torch.cat((query_value, query), -1), torch.cat((value, key), -1)
        return query, key, value

    def _window(self, arguments: Arguments) -> tuple[int | None, int | None]:
        sides = [arguments[name] for name in self.roles.window_sides]
        sizes = sides or self._get(arguments, "window")
        return _window(sizes, self._get(arguments, "max_key_len"))

    def _queries(self, arguments: Arguments, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query as (T, Hq, D) and where each request begins."""
        name, starts = self.signature.name, self._get(arguments, "query_starts")
        if starts is not None:
            check_indices(name, self.roles.query_starts, starts, (None,))
            last = int(starts[-1])
            words = f"{self.roles.query_starts} ends at {last}, past {len(query)} rows"
            refuse_unless(last <= len(query), name, words)
            return query, starts
        refuse_unless(query.ndim == 4, name, "query must be (B, Sq, Hq, D) without cu_seqlens")
        batch, length = query.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32) * length
        return query.flatten(0, 1), starts

    def _keys(
        self, arguments: Arguments, key: Tensor, count: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the lengths, and either where each request's keys begin or the block table."""
        name, roles = self.signature.name, self.roles
        starts, lens, table = (
            self._get(arguments, role) for role in ("key_starts", "key_lens", "table")
        )
        if isinstance(lens, int):
            lens = torch.full((count,), lens, dtype=torch.int32)
        if starts is not None:
            check_indices(name, roles.key_starts, starts, (count + 1,))
        if lens is not None:
            check_indices(name, roles.key_lens, lens, (count,))
        elif starts is not None:
            lens = starts.diff()
        refuse_unless(lens is not None, name, "the lengths of the keys are not given")
        if table is not None:
            check_indices(name, roles.table, table, (count, None))
        elif key.ndim == 4:
            table = torch.arange(len(key), dtype=torch.int32)[:, None]
        return lens, starts, table

    def _slopes(self, arguments: Arguments) -> Tensor | None:
        slopes: Tensor | None = self._get(arguments, "alibi")
        if slopes is not None:
            words = f"{self.roles.alibi} must be float32, not {slopes.dtype}"
            refuse_unless(slopes.dtype is torch.float32, self.signature.name, words)
        return slopes

    def _returned(self, arguments: Arguments, call: KernelCall) -> Any:
        result = call.attend()
        output, lse = result.output.to(call.output_dtype), call.lse(result, self.lse)
        self._leave_out_uncovered(arguments, call, output)
        if self.needs_positive_scale and call.scale <= 0:
            output.fill_(torch.nan)
        output, lse = self._in_shape(arguments, output, lse)
        out = self._get(arguments, "out")
        if out is not None:
            check_output(
                self.signature.name, self.roles.out, out, tuple(output.shape), output.dtype
            )
            rows = slice(0, result.num_tokens)
            out[rows] = output[rows]
            output = out
        items = {"output": output, "lse": lse, "none": None}
        names = self.with_lse if self._get(arguments, "lse_flag") else self.plain
        found = tuple(items[name] for name in names)
        return found[0] if len(found) == 1 else found or None

    def _leave_out_uncovered(self, arguments: Arguments, call: KernelCall, output: Tensor) -> None:
        """Fill rows that the host's bounds leave out with NaN: no kernel ever writes them."""
        most_rows, most_keys = (
            self._get(arguments, role) for role in ("max_query_len", "max_key_len")
        )
        starts = call.query_starts.tolist()
        for index, length in enumerate(call.key_lens.tolist()):
            start, stop = starts[index], starts[index + 1]
            if most_keys is not None and length > most_keys:
                output[start:stop] = torch.nan
            if most_rows is not None:
                output[min(stop, start + int(most_rows)) : stop] = torch.nan

    def _in_shape(self, arguments: Arguments, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch of equal queries as (B, Sq, Hq, Dv) and (B, Hq, Sq)."""
        query: Tensor = self._get(arguments, "query")
        if query.ndim == 3:
            return output, lse
        batch, length = query.shape[:2]
        lse = lse.unflatten(1, (batch, length)).transpose(0, 1).contiguous()
        return output.unflatten(0, (batch, length)), lse


def _is_same(value: object, default: object) -> bool:
    if isinstance(value, Tensor) or isinstance(default, Tensor):
        return value is default
    if isinstance(value, list):
        value = tuple(value)
    return bool(value == default)


def _window(sizes: Any, max_key_len: int | None) -> tuple[int | None, int | None]:
    """Return (left, right) with None for unbounded; a third number is not looked at.

    A left side that reaches past all keys counts as none, as kernels take it.
    """
    if sizes is None:
        return (None, None)
    left, right = (None if size is None or size < 0 else int(size) for size in sizes[:2])
    is_wider = left is not None and max_key_len is not None and left >= max_key_len
    return (None if is_wider else left), right


def _descale(scale: Any) -> float | Tensor:
    """Return one factor, or one for each kv head; (B, Hkv) must be alike for all requests."""
    if scale is None:
        return 1.0
    if not isinstance(scale, Tensor):
        return float(scale)
    rows = scale.reshape(-1, scale.shape[-1]) if scale.ndim else scale.reshape(1, 1)
    if not bool((rows == rows[:1]).all()):
        raise NotComputedError("descales that differ between requests are not computed")
    return rows[0].float() if len(rows) else 1.0
