"""Recorded decisions that no request makes: versions, splits, orders, lengths, and their rules."""

from __future__ import annotations

from collections.abc import Iterator

from compare_latents import compare_mla_prefill, latent_rules
from differences import Difference, Rule
from recorded import Row, rows

__all__ = ["FILES", "compare_mla_prefill", "compare_others", "other_rules"]

FILES = ("fa_version", "trtllm", "mla_prefill", "cascade", "split", "reorder", "dcp_local")
"""Their names; each has a function `compare_NAME`."""


def compare_others() -> Iterator[Difference]:
    """Compare every row of every one of these files."""
    for name in FILES:
        compare = globals()[f"compare_{name}"]
        yield from compare()


def _difference(file: str, row: Row, code: str, here: object, there: object) -> Difference:
    side = "here" if here is not None else "there"
    return Difference(
        file=file, row=row, subject=file, code=code, side=side, here=here, there=there
    )


def compare_fa_version() -> Iterator[Difference]:
    """Which generation of FlashAttention runs a layer, with what v0.25.1 had installed."""
    from attn_cuda._fa_providers import resolve_provider
    from attn_shared.device import device_from_arch
    from attn_shared.inventory import Inventory, VendorEntry, VendorStatus
    from attn_shared.request import AttentionRequest

    names = ("vllm_flash_attn_2", "vllm_flash_attn_3", "flash_attn_4")
    installed = Inventory(
        tuple(VendorEntry(name=name, status=VendorStatus.ASSUMED) for name in names)
    )
    for row in rows("fa_version"):
        if row["platform"] != "cuda":
            continue
        request = AttentionRequest(
            num_heads=8,
            num_kv_heads=8,
            head_size=row["head_size"] or 128,
            head_size_v=row["head_size_v"],
            flash_attn_version=row["forced_version"],
            batch_invariant=row["batch_invariant"],
            has_alibi=row["requires_alibi"],
            has_sinks=row["has_sinks"],
        )
        provider = resolve_provider(device_from_arch(row["arch"]), installed, request).provider
        ours = None if provider is None else provider.version
        if ours != row["version"]:
            yield _difference("fa_version", row, "version", ours, row["version"])


def compare_trtllm() -> Iterator[Difference]:
    """Whether a phase runs on FlashInfer's trtllm-gen or XQA kernels, and whether it could."""
    from attn_cuda._fi_trtllm import DECODE, PREFILL, TrtllmCase, can_use_trtllm, use_trtllm
    from attn_shared.device import device_from_arch

    for row in rows("trtllm"):
        device = device_from_arch(row["arch"])
        case = TrtllmCase(
            phase=PREFILL if row["is_prefill"] else DECODE,
            num_heads=row["num_qo_heads"],
            num_kv_heads=row["num_kv_heads"],
            kv_cache_dtype=row["kv_cache_dtype"],
            query_is_fp8=row["q_dtype"].startswith("float8"),
            has_sinks=row["has_sinks"],
            has_drafts=row["has_spec"],
            batch_invariant=row["batch_invariant"],
            dcp_size=row["dcp_world_size"],
            num_tokens=row["num_tokens"],
            force=row["force"],
        )
        for code, decide in (("can_use_trtllm", can_use_trtllm), ("use_trtllm", use_trtllm)):
            ours = decide(case, device)
            if ours != row[code]:
                yield _difference("trtllm", row, code, ours, row[code])


def compare_cascade() -> Iterator[Difference]:
    """Whether a common prefix pays."""
    from attn_shared.cascade import use_cascade

    for row in rows("cascade"):
        ours = use_cascade(
            common_prefix_len=row["common_prefix_len"],
            query_lens=row["query_lens"],
            num_heads=row["num_query_heads"],
            num_kv_heads=row["num_kv_heads"],
            num_compute_units=row["num_sms"],
            has_alibi=row["use_alibi"],
            has_window=row["use_sliding_window"],
            has_chunks=row["use_local_attention"],
            dcp_size=row["dcp_world_size"],
        )
        if ours != row["cascade"]:
            yield _difference("cascade", row, "cascade", ours, row["cascade"])


def compare_split() -> Iterator[Difference]:
    """Where the decodes of a batch end, in two parts and in three."""
    import torch

    from attn_shared.batching import (
        split_decodes_and_prefills,
        split_decodes_extends_and_prefills,
    )
    from attn_shared.metadata import CommonAttentionMetadata

    for row in rows("split"):
        batch = CommonAttentionMetadata.from_lengths(
            query_lens=row["query_lens"],
            seq_lens=row["seq_lens"],
            is_prefilling=torch.tensor(row["is_prefilling"]),
        )
        threshold = row["decode_threshold"]
        short = row["treat_short_extends_as_decodes"]
        two = split_decodes_and_prefills(
            batch,
            decode_threshold=threshold,
            require_uniform=row["require_uniform"],
            treat_short_extends_as_decodes=short,
        )
        if list(two) != row["split2"]:
            yield _difference("split", row, "two parts", list(two), row["split2"])
        if row["split3"] is None:
            continue
        three = split_decodes_extends_and_prefills(
            batch, decode_threshold=threshold, treat_short_extends_as_decodes=short
        )
        if list(three) != row["split3"]:
            yield _difference("split", row, "three parts", list(three), row["split3"])


def compare_reorder() -> Iterator[Difference]:
    """How rows are brought in order, swap by swap."""
    from attn_shared.batching import reorder

    for row in rows("reorder"):
        ours = reorder(
            row["num_scheduled"], row["num_computed"], row["num_prompt"], row["decode_threshold"]
        )
        found = (ours.changed, list(ours.order), [list(swap) for swap in ours.swaps])
        recorded = (row["changed"], row["final_order"], row["swaps"])
        if found != recorded:
            yield _difference("reorder", row, "order", found, recorded)


def compare_dcp_local() -> Iterator[Difference]:
    """How many of a sequence's tokens each rank holds."""
    import torch

    from attn_shared.context_parallel import local_seq_lens

    for row in rows("dcp_local"):
        lens = torch.tensor(row["seq_lens"], dtype=torch.int32)
        ours = local_seq_lens(lens, row["dcp_size"], None, row["interleave"]).tolist()
        if ours != row["per_rank"]:
            yield _difference("dcp_local", row, "lengths", ours, row["per_rank"])


def other_rules() -> list[Rule]:
    """Why these are decided otherwise."""
    return [*_versions(), *latent_rules(), *_splits()]


def _versions() -> Iterator[Rule]:
    def rule(name: str, evidence: str, reason: str, explains: object) -> Rule:
        return Rule(
            name=name,
            files=("fa_version",),
            reason=reason,
            evidence=evidence,
            explains=explains,  # type: ignore[arg-type]
        )

    def width_v(d: Difference) -> object:
        return d.row["head_size_v"] or d.row["head_size"]

    def is_blackwell(d: Difference) -> bool:
        return str(d.row["arch"]).startswith("10.")

    yield rule(
        "a named generation is taken or refused, never replaced",
        "vllm#13766, vllm#15231",
        "v0.25.1 falls from a named 3 or 4 to 2 without a word.",
        lambda d: d.row["forced_version"] not in (None, d.there) and d.here is None and d.there,
    )
    yield rule(
        "no FlashAttention has kernels for heads of 512",
        "vllm#42569; the kernels' instantiations",
        "v0.25.1 resolves to a version that then refuses the layer.",
        lambda d: d.row["head_size"] == 512 and d.here is None,
    )
    yield rule(
        "FlashAttention 2 has neither value heads of another width nor sinks",
        "the kernel's constraint, in the checks of its own call; vllm#42569",
        "v0.25.1 resolves to 2 and the call refuses.",
        lambda d: (
            (width_v(d) != d.row["head_size"] or d.row["has_sinks"])
            and d.there == 2
            and d.here is None
        ),
    )
    yield rule(
        "a layer gets the first generation whose kernels serve it, and nothing else is asked",
        "flash-attn-4's own checks of widths; `causal` per request is a feature that is asked for",
        "On Blackwell v0.25.1 falls to 2 for heads of 256, for which 4 has kernels, and takes 4 "
        "for 192 with 192, for which it has none; on Hopper it takes 4 for every diffusion model.",
        lambda d: (
            (is_blackwell(d) and d.row["head_size"] == width_v(d) == 192 and d.there == 4)
            or (is_blackwell(d) and d.row["head_size"] == 256 and (d.there, d.here) == (2, 4))
            or (d.row["arch"] == "9.0" and d.row["diffusion_model"] and d.here == 3)
        ),
    )


def _splits() -> Iterator[Rule]:
    yield Rule(
        name="a uniform batch that still prefills is no batch of decodes",
        files=("split",),
        reason="A backend that does not count short extends as decodes, recurrent state for one, "
        "must not be handed them because the lengths happen to be equal.",
        evidence="vllm#47381; the contract: a decode is not prefilling unless short extends count",
        explains=lambda d: (
            d.code == "two parts"
            and d.row["require_uniform"]
            and not d.row["treat_short_extends_as_decodes"]
            and any(d.row["is_prefilling"])
        ),
    )
    yield Rule(
        name="the split in three asks whether short extends are decodes, as that in two does",
        files=("split",),
        reason="There they always are; here a short row that still reads its prompt is an extend.",
        evidence="the contract: a decode is not prefilling unless short extends count",
        explains=lambda d: (
            d.code == "three parts"
            and not d.row["treat_short_extends_as_decodes"]
            and any(d.row["is_prefilling"])
        ),
    )
