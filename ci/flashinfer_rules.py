"""Why attn's two FlashInfer backends select otherwise than the recorded one."""

from __future__ import annotations

from collections.abc import Iterator

from differences import Difference, Rule, selection_rule

__all__ = ["flashinfer_rules"]

_OWN, _TRTLLM = "FLASHINFER", "FLASHINFER_TRTLLM"


def _is_blackwell(d: Difference) -> bool:
    return d.row["platform"] == "cuda" and str(d.row["arch"]).startswith("10.")


def _has_trtllm_alone(d: Difference) -> bool:
    """Whether the recorded class serves it by trtllm-gen, and FlashInfer's own kernels do not."""
    asked = {"sink": d.config["has_sink"], "kv_cache_dtype": d.config["kv_cache_dtype"] == "nvfp4"}
    return bool(asked.get(d.code)) and d.side == "here" and d.subject == _OWN and _is_blackwell(d)


def flashinfer_rules() -> Iterator[Rule]:
    """The rules."""
    yield selection_rule(
        "trtllm-gen is a backend of its own",
        reason="The recorded class decides within one name whose kernels run, batch by batch; here "
        "FLASHINFER_TRTLLM says what trtllm-gen has (sinks, a cache of 4 bits, pages of 128 to "
        "1024) and FLASHINFER what its own kernels have, and on Blackwell the first stands first.",
        evidence="the recorded decisions of both phases, trtllm.jsonl; vllm#36702: a capability "
        "says what the kernel that runs can do",
        explains=lambda d: (
            _has_trtllm_alone(d)
            or (d.subject == "order" and d.here == _TRTLLM and d.row["chosen"] == _OWN)
        ),
    )
    yield selection_rule(
        "kernels are chosen by the name of their backend, not by a switch",
        reason="There trtllm-gen is switched off beside the choice of a backend; here whoever does "
        "not want it names another backend.",
        evidence="pytorch#166962: two systems of switches disagree; `--backend FLASHINFER`",
        explains=lambda d: (
            d.subject == "order"
            and d.here == _TRTLLM
            and d.config.get("use_trtllm_attention") is False
        ),
    )
    yield selection_rule(
        "FLASHINFER's heads are 64, 128 and 256 wide",
        reason="Its kernels for Hopper end at 256, and 512 has never been run here.",
        evidence="flashinfer 0.6.13: the fa3 kernels' dispatch; flashinfer#1048: a width outside "
        "the table compiles and then fails",
        explains=lambda d: (
            d.subject == _OWN
            and (d.code, d.side) == ("head_size", "here")
            and d.config["head_size"] == 512
        ),
    )
