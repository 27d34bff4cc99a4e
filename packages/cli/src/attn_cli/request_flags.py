"""The flags that describe a request: one for every field of `AttentionRequest`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from attn_cli.completion import complete_backend, complete_device
from attn_cli.options import Panel
from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from attn_shared.request import AttentionRequest, MLADims, Window

__all__ = ["RequestFlags"]


_where, _heads = Panel("Where and what"), Panel("Heads")
_cache, _mask, _mode = Panel("Cache"), Panel("Mask and logits"), Panel("Mode")
_mla = Panel("Multi-head latent attention")

_FIELDS = MappingProxyType(
    {
        "head_size_v": "head_size_v",
        "kv_cache_dtype": "kv_cache_dtype",
        "block_size": "block_size",
        "kv_layout": "kv_layout",
        "sparse": "use_sparse",
        "index_topk": "index_topk",
        "sinks": "has_sinks",
        "attn_type": "attn_type",
        "non_causal": "non_causal",
        "per_request_causal": "per_request_causal",
        "mm_prefix": "use_mm_prefix",
        "chunk_size": "chunk_size",
        "softcap": "softcap",
        "alibi": "has_alibi",
        "batch_invariant": "batch_invariant",
        "kv_connector": "use_kv_connector",
        "per_head_scales": "per_head_quant_scales",
        "lse": "needs_lse",
        "flash_attn_version": "flash_attn_version",
        "dcp": "dcp_size",
        "pcp": "pcp_size",
        "phase": "phase",
    }
)
"""Flags that are passed on as they are, with the field of `AttentionRequest` that each sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFlags:
    """What a model asks of attention, where, and by which backend."""

    device: Annotated[
        str | None,
        _where.word(
            "--device",
            "A preset (h200, mi300x, spr), an architecture (sm_90a, gfx942) or a device of this "
            "machine (cpu, cuda:0, xpu:0). Default: this machine's first device.",
            "NAME",
            autocompletion=complete_device,
        ),
    ] = None
    model: Annotated[
        str | None,
        _where.word(
            "--model",
            "A model's config.json, or the folder that holds it: its layers say what is asked, "
            "and every group of them gets a backend.",
            "PATH",
        ),
    ] = None
    backend: Annotated[
        str | None,
        _where.word(
            "--backend",
            "The backend to use, or auto. Wins over ATTN_BACKEND.",
            "NAME",
            autocompletion=complete_backend,
        ),
    ] = None
    from_name: Annotated[
        str | None,
        _where.word(
            "--from",
            "The backend to use, by its name elsewhere: vllm:FLASHINFER, sglang:fa3, "
            "transformers:sdpa.",
            "ORIGIN:NAME",
        ),
    ] = None
    prefer: Annotated[
        str | None,
        _where.word(
            "--prefer",
            "Vendor libraries whose backends come first where they serve the request without a "
            "slow path: aiter, or several with commas.",
            "LIBRARY",
        ),
    ] = None
    avoid: Annotated[
        str | None,
        _where.word("--avoid", "Vendor libraries to leave aside, as if not installed.", "LIBRARY"),
    ] = None
    untuned: Annotated[
        bool, _where.flag("--untuned", "Leave aside what `attn tune` measured on this device.")
    ] = False
    phase: Annotated[
        str, _where.word("--phase", "Which part of serving: mixed, prefill or decode.", "PHASE")
    ] = "mixed"

    num_heads: Annotated[
        int | None,
        _heads.integer("--num-heads", "Query heads, of all ranks. Needed but for --model."),
    ] = None
    num_kv_heads: Annotated[
        int | None,
        _heads.integer(
            "--num-kv-heads", "Key/value heads, of all ranks. Default: as many, 1 for MLA.", "N"
        ),
    ] = None
    head_size: Annotated[
        int | None,
        _heads.integer("--head-size", "Width of a query and key head. Needed but for MLA.", "D"),
    ] = None
    head_size_v: Annotated[
        int | None,
        _heads.integer("--head-size-v", "Width of a value head. Default: the same.", "D"),
    ] = None
    dtype: Annotated[
        str | None,
        _heads.word(
            "--dtype",
            "Of query, key, value, output: bfloat16, float16, float32. Default: bfloat16, or the "
            "model's own.",
            "DTYPE",
        ),
    ] = None
    tp: Annotated[
        int, _heads.integer("--tp", "Tensor-parallel ranks that the heads are divided among.")
    ] = 1

    max_model_len: Annotated[
        int | None,
        _where.integer("--max-model-len", "Tokens of the longest sequence. Default: the model's."),
    ] = None

    kv_cache_dtype: Annotated[
        str, _cache.word("--kv-cache-dtype", "Format of the cache: auto, fp8, ...", "DTYPE")
    ] = "auto"
    block_size: Annotated[
        int | None, _cache.integer("--block-size", "Tokens per block. Default: the backend's own.")
    ] = None
    kv_layout: Annotated[
        str | None, _cache.word("--kv-layout", "NHD or HND. Default: the backend's own.", "LAYOUT")
    ] = None
    per_head_scales: Annotated[
        bool, _cache.flag("--per-head-scales", "Scales of a quantised cache are per head.")
    ] = False
    kv_connector: Annotated[
        bool, _cache.flag("--kv-connector", "Another party reads or writes cache blocks.")
    ] = False

    attn_type: Annotated[
        str,
        _mask.word("--attn-type", "decoder, encoder, encoder_only or encoder_decoder.", "TYPE"),
    ] = "decoder"
    non_causal: Annotated[
        bool, _mask.flag("--non-causal", "Decoder rows see keys to their right as well.")
    ] = False
    per_request_causal: Annotated[
        bool, _mask.flag("--per-request-causal", "Causality differs between requests of a batch.")
    ] = False
    mm_prefix: Annotated[
        bool, _mask.flag("--mm-prefix", "Multimodal ranges see each other in both directions.")
    ] = False
    window: Annotated[
        str | None,
        _mask.word(
            "--window",
            "Sliding window: W keys with the query's own, or LEFT,RIGHT beside it, either of them "
            "`none` for unbounded.",
            "W|L,R",
        ),
    ] = None
    chunk_size: Annotated[
        int | None, _mask.integer("--chunk-size", "Chunked local attention over N keys.")
    ] = None
    softcap: Annotated[
        float | None, _mask.number("--softcap", "Logits become CAP * tanh(logits / CAP).", "CAP")
    ] = None
    sinks: Annotated[
        bool, _mask.flag("--sinks", "One extra logit per head enters the softmax's denominator.")
    ] = False
    alibi: Annotated[bool, _mask.flag("--alibi", "A linear bias per head is added to logits.")] = (
        False
    )

    lse: Annotated[
        bool, _mode.flag("--lse", "The caller wants the logarithm of the softmax's denominator.")
    ] = False
    batch_invariant: Annotated[
        bool, _mode.flag("--batch-invariant", "Results do not depend on what shares the batch.")
    ] = False
    flash_attn_version: Annotated[
        int | None,
        _mode.integer("--flash-attn-version", "The FlashAttention to run: 2, 3 or 4.", "V"),
    ] = None
    dcp: Annotated[
        int, _mode.integer("--dcp", "Ranks that a sequence's cache is sharded over at decode.")
    ] = 1
    pcp: Annotated[
        int, _mode.integer("--pcp", "Ranks that a sequence's prefill is sharded over.")
    ] = 1

    mla: Annotated[
        bool, _mla.flag("--mla", "Latent attention, of DeepSeek's widths unless given below.")
    ] = False
    kv_lora_rank: Annotated[int | None, _mla.integer("--kv-lora-rank", "Implies --mla.")] = None
    qk_nope_head_dim: Annotated[
        int | None, _mla.integer("--qk-nope-head-dim", "Implies --mla.")
    ] = None
    qk_rope_head_dim: Annotated[
        int | None, _mla.integer("--qk-rope-head-dim", "Implies --mla.")
    ] = None
    v_head_dim: Annotated[int | None, _mla.integer("--v-head-dim", "Implies --mla.")] = None
    q_lora_rank: Annotated[int | None, _mla.integer("--q-lora-rank", "Implies --mla.")] = None
    sparse: Annotated[
        bool, _mla.flag("--sparse", "Attend only to the keys that an indexer selects.")
    ] = False
    index_topk: Annotated[
        int | None, _mla.integer("--index-topk", "How many keys the indexer selects.")
    ] = None

    def to_request(self) -> AttentionRequest:
        """Return the request of one tensor-parallel rank.

        Raises:
            AttnError: a value that no backend may accept, or a name that nobody knows.
        """
        from attn_shared.request import AttentionRequest

        if self.num_heads is None:
            raise InvalidInputError.for_argument(
                "--num-heads", "missing", "an integer >= 1", hint="only --model goes without it."
            )
        mla = self._mla_dims()
        num_kv_heads = self.num_kv_heads
        if num_kv_heads is None:
            num_kv_heads = self.num_heads if mla is None else 1
        return AttentionRequest.for_rank(
            total_num_heads=self.num_heads,
            total_num_kv_heads=num_kv_heads,
            tp_size=self.tp,
            head_size=self._head_size(mla),
            mla=mla,
            dtype="bfloat16" if self.dtype is None else self.dtype,
            window=self._window(),
            **{field: getattr(self, flag) for flag, field in _FIELDS.items()},
        )

    def _mla_dims(self) -> MLADims | None:
        from attn_shared.request import MLADims

        names = (
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "q_lora_rank",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return MLADims(**given) if self.mla or given else None

    def _head_size(self, mla: MLADims | None) -> int:
        if self.head_size is not None:
            return self.head_size
        if mla is not None:
            return mla.latent_size
        raise InvalidInputError.for_argument(
            "--head-size", "missing", "an integer >= 1", hint="only --mla goes without it."
        )

    def _window(self) -> Window:
        from attn_shared.request import window_of

        if self.window is None:
            return (None, None)
        sides = [_side(part, self.window) for part in self.window.split(",")]
        match sides:
            case [None]:
                return (None, None)
            case [int(size)]:
                is_causal = self.attn_type == "decoder" and not self.non_causal
                return window_of(size, causal=is_causal)
            case [left, right]:
                return (left, right)
        raise _bad_window(self.window)


def _side(part: str, window: str) -> int | None:
    text = part.strip().lower()
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise _bad_window(window) from None


def _bad_window(window: str) -> InvalidInputError:
    return InvalidInputError.for_argument(
        "--window",
        repr(window),
        "W keys including the query's own, or LEFT,RIGHT, each a count of keys >= 0 or none",
    )
