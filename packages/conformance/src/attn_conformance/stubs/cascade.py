"""Planned attention of several levels: a prefix for all rows, then each request's own keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.checks import refuse_unless
from attn_conformance.stubs.planned import Plan, PlannedWrapper, check_computed, with_signature
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature

__all__ = ["CascadeWrapper"]

_LISTS = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")


@dataclass(frozen=True, kw_only=True)
class CascadeWrapper:
    """A class of a vendor that plans one paged prefill for each level, and merges.

    Attributes:
        name: of the class.
        init: parameters of its constructor, without self.
        plan: of `plan`; four of them are lists with an entry per level.
        run: of `run`.
        level: the wrapper that each level is, whose `plan` takes the lists' entries.
    """

    name: str
    init: VendorSignature
    plan: VendorSignature
    run: VendorSignature
    level: PlannedWrapper

    def function(self, recorder: Recorder) -> type[Any]:
        """Return what stands for the class; calls of its methods go to the recorder."""
        outer = self

        def init(self: Any, *arguments: Any, **keywords: Any) -> None:
            self._init = recorder.record(outer.init, arguments, keywords)
            check_computed(outer.init, self._init, frozenset({"kv_layout"}))
            self._plans = None

        def plan(self: Any, *arguments: Any, **keywords: Any) -> None:
            given = recorder.record(outer.plan, arguments, keywords)
            self._plans = outer.plans({**self._init, **given})

        def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
            given = recorder.record(outer.run, arguments, keywords)
            refuse_unless(self._plans is not None, outer.run.name, "plan has to be called before")
            return outer.merged(self._plans, given)

        methods = {
            "__init__": with_signature(init, self.init),
            "plan": with_signature(plan, self.plan),
            "run": with_signature(run, self.run),
        }
        return type(self.name, (), methods)

    def plans(self, arguments: dict[str, Any]) -> list[Plan]:
        """Return the plan of each level; all but the last are without a causal mask."""
        num_levels = arguments["num_levels"]
        for name in _LISTS:
            found = len(arguments[name])
            refuse_unless(found == num_levels, self.plan.name, f"{name} has {found} levels")
        shared = {key: value for key, value in arguments.items() if key not in _LISTS}
        head_dim = shared.pop("head_dim")
        return [
            Plan.of(
                self.level,
                {
                    **self.level.init.defaults,
                    **self.level.plan.defaults,
                    **shared,
                    "head_dim_qk": head_dim,
                    "causal": shared["causal"] and level == num_levels - 1,
                    "qo_indptr": rows,
                    "paged_kv_indptr": starts,
                    "paged_kv_indices": pages,
                    "paged_kv_last_page_len": last,
                },
            )
            for level, (rows, starts, pages, last) in enumerate(
                zip(*(arguments[name] for name in _LISTS), strict=True)
            )
        ]

    def merged(self, plans: list[Plan], arguments: dict[str, Any]) -> Tensor:
        """Return the output over all levels, in the query's dtype."""
        given = {**self.level.run.defaults, **arguments, "args": ()}
        answers = [plan.attend(given)[1] for plan in plans]
        lse = torch.stack([answer.lse for answer in answers])  # (levels, Hq, T)
        most = lse.amax(0).nan_to_num(neginf=0.0)
        weights = (lse - most).exp()
        total = weights.sum(0)
        shares = torch.where(total > 0, weights / total, 0.0).transpose(1, 2)[..., None]
        outputs = torch.stack([answer.output.double() for answer in answers])
        parts = torch.where(shares > 0, outputs * shares, 0.0)
        query: Tensor = arguments["q"]
        refuse_unless(math.isfinite(float(shares.sum())), self.run.name, "the LSE is NaN")
        return parts.sum(0).to(query.dtype)
