"""Twins that are wrong about heads, their widths and dtypes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.by_request import ByRequest, OneRequest
from attn_conformance.twins.twin import Twin
from attn_shared.kv_cache import KVViews
from attn_shared.reference import ReferenceResult

__all__ = ["TWINS"]


class HeadModuloKvHeads(Twin):
    """Reads kv head h % Hkv instead of h // (Hq / Hkv)."""

    breaks = ("gqa",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            heads = range(self.spec.num_heads)
            order = sorted(heads, key=lambda head: head % self.spec.num_kv_heads)
            result = super().attend(replace(call, query=call.query[:, order]))
            back = torch.tensor(order).argsort()
            return replace(result, output=result.output[:, back], lse=result.lse[back])


class _TailOfGroup(ReferenceImpl):
    """Gives zeros for query heads past the first few of each kv head's group."""

    def num_served(self, group: int) -> int:
        raise NotImplementedError

    def attend(self, call: ReferenceCall) -> ReferenceResult:
        result = super().attend(call)
        group = self.spec.queries_per_kv
        is_left_out = torch.arange(self.spec.num_heads) % group >= self.num_served(group)
        result.output[: result.num_tokens, is_left_out] = 0
        return result


class GroupsOfPowersOfTwo(Twin):
    """Serves as many query heads of a group as the largest power of two that fits."""

    breaks = ("gqa", "generated")

    class impl(_TailOfGroup):
        def num_served(self, group: int) -> int:
            return 1 << (group.bit_length() - 1)


class GroupsOfSixteen(Twin):
    """Serves sixteen query heads per kv head, the rows of one tile."""

    breaks = ("gqa",)

    class impl(_TailOfGroup):
        def num_served(self, group: int) -> int:
            return 16


class HeadsOfEights(Twin):
    """Leaves the elements of a head past a multiple of 8 out of the product."""

    breaks = ("head_sizes",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            query = call.query.clone()
            query[..., self.spec.head_size // 8 * 8 :] = 0
            return super().attend(replace(call, query=query))


class HeadsUpTo256(Twin):
    """Leaves the elements of a head past 256 out of the product."""

    breaks = ("head_sizes",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            query = call.query.clone()
            query[..., 256:] = 0
            return super().attend(replace(call, query=query))


class ValuesAsWideAsKeys(Twin):
    """Writes as many elements of a value as a key has."""

    breaks = ("value_head_sizes",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            result.output[: result.num_tokens, :, self.spec.head_size :] = 0
            return result


class DenominatorInDtype(Twin):
    """Adds up the softmax's denominator in the compute dtype, where small terms are lost."""

    breaks = ("dtypes",)

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            result = super().attend_one(call, request)
            key, _ = self.read(call, self.slots(call, request))
            key = key.repeat_interleave(self.spec.queries_per_kv, dim=1)
            logits = torch.einsum("qhd,khd->hqk", call.query[request.rows].double(), key)
            is_seen = torch.arange(request.length) <= self.positions(request)[:, None]
            weights = (logits * self.spec.scale - result.lse[..., None]).exp() * is_seen
            total = torch.zeros(weights.shape[:2], dtype=self.spec.dtype)
            for column in weights.to(self.spec.dtype).unbind(-1):
                total = total + column
            return replace(result, output=result.output / total.double().T[..., None])


class LogitsInBfloat16(Twin):
    """Rounds the query to bfloat16, whatever the dtype."""

    breaks = ("dtypes", "ieee_float32")

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            query = call.query.bfloat16().to(call.query.dtype)
            return super().attend(replace(call, query=query))


class TensorFloat32(Twin):
    """Multiplies float32 with ten bits of mantissa."""

    breaks = ("ieee_float32",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            return super().attend(replace(call, query=_ten_bits(call.query)))

        def views(self, call: ReferenceCall) -> KVViews:
            views = super().views(call)
            return views._replace(key=_ten_bits(views.key), value=_ten_bits(views.value))


def _ten_bits(tensor: Tensor) -> Tensor:
    """Cut the low 13 bits of float32; other dtypes have no more than ten anyway."""
    if tensor.dtype is not torch.float32:
        return tensor
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


TWINS: tuple[type[Twin], ...] = (
    HeadModuloKvHeads,
    GroupsOfPowersOfTwo,
    GroupsOfSixteen,
    HeadsOfEights,
    HeadsUpTo256,
    ValuesAsWideAsKeys,
    DenominatorInDtype,
    LogitsInBfloat16,
    TensorFloat32,
)
