"""FlashInfer over latents: 0.6.13, read from its wheel and run on an H200, and 0.7.4, read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import KernelCall, LseForm
from attn_conformance.stubs.checks import (
    Limits,
    check_indices,
    check_kernel_call,
    check_output,
    refuse_unless,
)
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.planned import with_signature
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction
from attn_conformance.stubs.vendors.flashinfer import FLASHINFER, FLASHINFER_0_6_13

__all__ = ["FLASHINFER_MLA_0_6", "FLASHINFER_MLA_0_7"]

Arguments = Mapping[str, Any]

_CLASS = "BatchMLAPagedAttentionWrapper"
_INIT = (
    "float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, "
    "kv_indices=None, kv_len_arr=None, backend='auto'"
)
_FLAT = "qo_indptr, kv_indptr, kv_indices, kv_len_arr"
_SIZES = (
    "num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type"
)
_PLAN_0_6 = f"{_FLAT}, {_SIZES}, use_profiler=False"
_PLAN_0_7 = (
    f"{_FLAT.replace(',', '=None,')}=None, {_SIZES.replace(',', '=None,')}=None, "
    "use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, seq_lens=None, "
    "max_q_len=None, query_layout=None, kv_cache_layout=None, lse_mode='none', "
    "output_dtype=None, output_scale='none', scale_mode='default', skip_softmax=False"
)
_RUN = (
    "q_nope{0}, q_pe{0}, ckv_cache{0}, kpe_cache{0}, out=None, lse=None, return_lse=False, "
    "profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None"
)
_RUN_0_7 = (
    f"{_RUN.format('=None')}, *, query=None, kv_cache=None, ckv_scale=None, ckv_scale_arr=None, "
    "kpe_scale=None"
)
_TRTLLM = (
    "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, "
    "block_tables, seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, "
    "bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None, enable_pdl=None, "
    "backend='auto', is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, return_lse=False, "
    "cute_dsl_impl='auto'{}"
)
_FP8 = (torch.float8_e4m3fn,)
_LIMITS = Limits(head_size_multiple=64, head_size_max=576)
_LIMITS_TRTLLM = Limits(
    dtypes=(torch.bfloat16, torch.float16, *_FP8),
    cache_dtypes=_FP8,
    head_size_multiple=64,
    head_size_max=576,
    page_multiple=32,
)


@dataclass(frozen=True, kw_only=True)
class _Wrapper:
    """The class of planned decodes; `takes_one`: from 0.7 on plans are made from one object."""

    takes_one: bool
    init: VendorSignature = field(
        default=VendorSignature(name=_CLASS, parameters=_INIT, returns="the wrapper")
    )

    @property
    def plan(self) -> VendorSignature:
        """The parameters of `plan`."""
        text = _PLAN_0_7 if self.takes_one else _PLAN_0_6
        return VendorSignature(name=f"{_CLASS}.plan", parameters=text, returns="nothing")

    @property
    def run(self) -> VendorSignature:
        """The parameters of `run`."""
        text = _RUN_0_7 if self.takes_one else _RUN.format("")
        words = "out (T, Hq, ckv); with return_lse also LSE (T, Hq)"
        return VendorSignature(name=f"{_CLASS}.run", parameters=text, returns=words)

    def function(self, recorder: Recorder) -> type[Any]:
        """Return what stands for the class; calls of its methods go to the recorder."""
        wrapper, run_signature = self, self.run

        def init(self: Any, *arguments: Any, **keywords: Any) -> None:
            self._init = recorder.record(wrapper.init, arguments, keywords)
            self._plan = None

        def plan(self: Any, *arguments: Any, **keywords: Any) -> None:
            given = recorder.record(wrapper.plan, arguments, keywords)
            self._plan = _Plan.of(given, self._init, takes_one=wrapper.takes_one)

        def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
            given = recorder.record(run_signature, arguments, keywords)
            if self._plan is None:
                raise RuntimeError(f"{_CLASS}.run() called before plan()")
            return self._plan.answer(given)

        methods = {
            "__init__": with_signature(init, self.init),
            "plan": with_signature(plan, self.plan),
            "run": with_signature(run, run_signature),
        }
        return type(_CLASS, (), methods)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What `plan` made of its arguments."""

    arguments: Arguments
    query_starts: Tensor
    key_lens: Tensor
    block_table: Tensor
    lse_mode: str | None

    @classmethod
    def of(cls, given: Arguments, init: Arguments, *, takes_one: bool) -> _Plan:
        """Check the arguments, and turn pages in a row into a table."""
        name = f"{_CLASS}.plan"
        refuse_unless(init["backend"] in ("auto", "fa2", "fa3"), name, f"backend {init['backend']}")
        tensors = given
        if takes_one:
            if given["metadata"] is None or given["qo_indptr"] is not None:
                raise DeprecationWarning("flat plan metadata tensors are deprecated")
            tensors = vars(given["metadata"])
        starts, pages, lens = (tensors[n] for n in ("kv_indptr", "kv_indices", "kv_len_arr"))
        count = len(starts) - 1
        check_indices(name, "kv_indptr", starts, (None,))
        check_indices(name, "qo_indptr", tensors["qo_indptr"], (count + 1,))
        check_indices(name, "kv_len_arr", lens, (count,))
        check_indices(name, "kv_indices", pages, (None,))
        needed = -(-lens // given["page_size"])
        words = "page counts in kv_indptr must equal ceil(kv_len_arr / page_size)"
        refuse_unless(torch.equal(needed.int(), starts.diff()), name, words)
        refuse_unless(int(starts[-1]) <= len(pages), name, "kv_indices are too few")
        if init["use_cuda_graph"]:
            cls._check_buffers(name, init, count, int(starts[-1]))
        table = torch.zeros((count, max(1, *needed.tolist(), 0)), dtype=torch.int32)
        for row, start, some in zip(table, starts.tolist(), needed.tolist(), strict=False):
            row[:some] = pages[start : start + some]
        return cls(
            arguments=given,
            query_starts=tensors["qo_indptr"].clone(),
            key_lens=lens.clone(),
            block_table=table,
            lse_mode=given["lse_mode"] if takes_one else None,
        )

    @staticmethod
    def _check_buffers(name: str, init: Arguments, count: int, pages: int) -> None:
        sizes = {"qo_indptr": count + 1, "kv_indptr": count + 1, "kv_len_arr": count}
        for buffer, size in sizes.items():
            check_indices(name, f"buffer {buffer}", init[buffer], (size,))
        refuse_unless(len(init["kv_indices"]) >= pages, name, "the buffer kv_indices is too small")

    def answer(self, arguments: Arguments) -> Any:
        """Hold `run` to the plan, and compute."""
        name, planned = f"{_CLASS}.run", self.arguments
        query, cache = self._inputs(arguments)
        rank, width = planned["head_dim_ckv"], planned["head_dim_ckv"] + planned["head_dim_kpe"]
        for what, found, expected in (
            ("query", tuple(query.shape[1:]), (planned["num_heads"], width)),
            ("cache", tuple(cache.shape[1:]), (planned["page_size"], width)),
            ("query dtype", query.dtype, planned["q_data_type"]),
            ("cache dtype", cache.dtype, planned["kv_data_type"]),
            ("rows", len(query), int(self.query_starts[-1])),
        ):
            words = f"{what} is {found}, and {expected} was planned"
            refuse_unless(found == expected, name, words)
        key = cache.unsqueeze(2)
        call = KernelCall(
            query=query,
            key=key,
            value=key[..., :rank],
            query_starts=self.query_starts,
            key_lens=self.key_lens,
            block_table=self.block_table,
            scale=float(planned["sm_scale"]),
            is_causal=bool(planned["causal"]) or int(self.query_starts.diff().max()) <= 1,
        )
        check_kernel_call(name, call, _LIMITS)
        result = call.attend()
        output = result.output.to(query.dtype)
        if call.scale <= 0:
            output.fill_(torch.nan)
        if arguments["out"] is not None:
            check_output(name, "out", arguments["out"], tuple(output.shape), query.dtype)
            output = arguments["out"].copy_(output)
        return self._returned(arguments, call, result, output)

    def _returned(self, arguments: Arguments, call: KernelCall, result: Any, output: Any) -> Any:
        natural = bool(arguments["return_lse_base_on_e"])
        wanted = "none" if not arguments["return_lse"] else "basee" if natural else "base2"
        if self.lse_mode is not None and self.lse_mode != wanted:
            raise ValueError(f"lse_mode: planned {self.lse_mode!r}, got {wanted!r}; re-plan")
        if not arguments["return_lse"]:
            return output
        return output, call.lse(result, LseForm(base="e" if natural else "2", layout="TH"))

    def _inputs(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """Return query and cache, each with both parts."""
        if self.lse_mode is None:
            query = (arguments["q_nope"], arguments["q_pe"])
            cache = (arguments["ckv_cache"], arguments["kpe_cache"])
        else:
            query, cache = arguments["query"], arguments["kv_cache"]
            for name, parts in (("query", query), ("kv_cache", cache)):
                is_planned = self.arguments[f"{name}_layout"] == "split"
                words = f"{name} is {type(parts).__name__}, and another layout was planned"
                is_pair = isinstance(parts, tuple) and len(parts) == 2
                refuse_unless(is_pair is is_planned, f"{_CLASS}.run", words)
        return torch.cat(query, -1), torch.cat(cache, -1)


def _csr(qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> Any:
    return SimpleNamespace(
        qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr
    )


def _ragged_widths(arguments: Arguments) -> None:
    """Its kernels are for three sets of widths; values and the scale of values are plain."""
    name = "trtllm_ragged_attention_deepseek"
    found = tuple(arguments[part].shape[-1] for part in ("query", "key", "value"))
    if found not in ((192, 192, 128), (128, 128, 128), (256, 256, 256)):
        raise AssertionError(f"Unsupported head dimensions: {found}")
    is_plain = arguments["bmm2_scale"] == 1.0 and arguments["window_left"] == -1
    refuse_unless(is_plain, name, "bmm2_scale and window_left are not computed")
    refuse_unless(arguments["value"].is_contiguous(), name, "value must be contiguous")
    is_right = arguments["batch_size"] == len(arguments["seq_lens"])
    refuse_unless(is_right, name, "batch_size is not that of seq_lens")


@dataclass(frozen=True, kw_only=True)
class _Trtllm:
    """trtllm_batch_decode_with_kv_cache_mla by trtllm-gen, on 10.x."""

    has_base: bool

    @property
    def signature(self) -> VendorSignature:
        """Its parameters."""
        more = ", return_lse_base=None" if self.has_base else ""
        return VendorSignature(
            name="trtllm_batch_decode_with_kv_cache_mla",
            parameters=_TRTLLM.format(more),
            returns="out (B, Sq, Hq, ckv); with return_lse also LSE (B * Sq, Hq)",
        )

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for it; its calls go to the recorder."""
        signature = self.signature

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.answer(recorder.record(signature, arguments, keywords))

        call.__name__ = call.__qualname__ = signature.name
        call.__signature__ = signature.signature  # type: ignore[attr-defined]
        return call

    def answer(self, arguments: Arguments) -> Any:
        """Refuse what the real call refuses, and compute the rest."""
        name = self.signature.name
        query, cache, table = (arguments[n] for n in ("query", "kv_cache", "block_tables"))
        refuse_unless(query.ndim == 4, name, f"query must have 4 dimensions, not {query.ndim}")
        refuse_unless(cache.ndim == 4, name, f"kv_cache must have 4 dimensions, not {cache.ndim}")
        rank, rope = arguments["kv_lora_rank"], arguments["qk_rope_head_dim"]
        refuse_unless((rank, rope) in ((512, 64), (256, 64)), name, f"widths {rank}, {rope}")
        batch, length, page = query.shape[0], query.shape[1], cache.shape[-2]
        check_indices(name, "block_tables", table, (batch, None))
        check_indices(name, "seq_lens", arguments["seq_lens"], (batch,))
        words = f"block_num % (128 / block_size) must be 0, not {table.shape[1]} of {page}"
        refuse_unless(table.shape[1] % (128 / page) == 0, name, words)
        is_zero = not bool(arguments["workspace_buffer"].any())
        refuse_unless(is_zero, name, "workspace_buffer must be zero for its first use")
        key = cache.transpose(1, 2)
        call = KernelCall(
            query=query.flatten(0, 1),
            key=key,
            value=key[..., :rank],
            query_starts=torch.arange(batch + 1, dtype=torch.int32) * length,
            key_lens=arguments["seq_lens"],
            block_table=table,
            scale=float(arguments["bmm1_scale"]),
            is_causal=True,
        )
        check_kernel_call(name, call, _LIMITS_TRTLLM)
        result = call.attend()
        output = (result.output * float(arguments["bmm2_scale"])).bfloat16()
        output = output.unflatten(0, (batch, length))
        if not arguments["return_lse"]:
            return output
        form = LseForm(base="2", layout="TH")
        return output, call.lse(result, form)


_RAGGED = VarlenFunction(
    signature=VendorSignature(
        name="trtllm_ragged_attention_deepseek",
        parameters=(
            "query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, "
            "bmm2_scale, o_sf_scale, batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, "
            "enable_pdl, is_causal, return_lse, attention_sinks=None, "
            "skip_softmax_threshold_scale_factor=None, out=None, lse=None, "
            "sage_attn_sfs=(None, None, None, None), num_elts_per_sage_attn_blk=(0, 0, 0, 0), "
            "backend='trtllm-gen'"
        ),
        returns="out; with return_lse out and LSE (T, Hq)",
    ),
    roles=Roles(
        query="query",
        key="key",
        value="value",
        out="out",
        query_starts="cum_seq_lens_q",
        key_starts="cum_seq_lens_kv",
        key_lens="seq_lens",
        max_query_len="max_q_len",
        max_key_len="max_kv_len",
        scale="bmm1_scale",
        causal="is_causal",
        window="",
        softcap="",
        lse_flag="return_lse",
    ),
    limits=Limits(head_size_multiple=64, head_size_max=256),
    lse=LseForm(base="2", layout="TH"),
    rules=(_ragged_widths,),
    needs_positive_scale=True,
)


def _stub(base: VendorStub, *, takes_one: bool) -> VendorStub:
    module: dict[str, object] = {
        _CLASS: _Wrapper(takes_one=takes_one),
        "trtllm_batch_decode_with_kv_cache_mla": _Trtllm(has_base=takes_one),
    }
    if takes_one:
        module["MLAPlanMetadata"] = SimpleNamespace(csr=_csr)
    prefill = {**base.modules.get("flashinfer.prefill", {}), _RAGGED.signature.name: _RAGGED}
    return replace(
        base,
        modules={**base.modules, "flashinfer.mla": module, "flashinfer.prefill": prefill},
    )


FLASHINFER_MLA_0_6 = _stub(FLASHINFER_0_6_13, takes_one=False)
"""Plans from flat tensors; the LSE is asked for in each run."""

FLASHINFER_MLA_0_7 = _stub(FLASHINFER, takes_one=True)
"""Plans from one object, which says whether there will be an LSE."""
