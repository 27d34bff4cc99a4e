"""Why attn selects otherwise than was recorded of vLLM 0.25.1: a rule for each reason.

A rule says which differences it accounts for by what was asked and where, never by a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from differences import Difference, Rule, Test, selection_rule
from flashinfer_rules import flashinfer_rules
from mla_rules import mla_rules
from rocm_rules import rocm_rules
from triton_mla_rules import triton_mla_rules

__all__ = ["selection_rules"]

ENCODERS = ("encoder", "encoder_only")
SIXTEEN = ("float16", "bfloat16")
E4M3 = ("fp8", "fp8_e4m3")
WITHOUT_E4M3 = ("gfx90a", "gfx1100")
FACTS = "vLLM 0.25.1's own classes, run with a mocked device"


def selection_rules() -> list[Rule]:
    """The rules, the special ones before the general."""
    return [
        *_missing(),
        *_requests(),
        *_flash_attn(),
        *_flash_attn_builds(),
        *flashinfer_rules(),
        *_triton(),
        *rocm_rules(),
        *_flex(),
        *_cpu(),
        *_xpu(),
        *_caches(),
        *mla_rules(),
        *triton_mla_rules(),
        *_named(),
        *_orders(),
    ]


def _refuses(subjects: tuple[str, ...], code: str, side: str, asked: Test) -> Test:
    """Accounts for a code that one side alone has, for some backends, where `asked` holds."""
    return lambda d: d.subject in subjects and (d.code, d.side) == (code, side) and asked(d)


def _major(d: Difference) -> int:
    """The major of an NVIDIA architecture; 0 elsewhere."""
    return int(d.row["arch"].split(".")[0]) if d.row["platform"] == "cuda" else 0


def _cc(d: Difference) -> tuple[int, int]:
    major, minor = d.row["arch"].split(".")
    return int(major), int(minor)


# What attn does not provide

PLACEHOLDERS = {
    "NO_ATTENTION": "its module is missing in the release itself",
    "CUSTOM": "one slot, which a second registration replaces silently (vllm-gaudi#557)",
}


def _missing() -> Iterator[Rule]:
    from attn_shared.known_backends import KNOWN_BACKENDS
    from attn_shared.registry import DEFAULT_REGISTRY

    provided = DEFAULT_REGISTRY.names()
    for name, known in KNOWN_BACKENDS.items():
        if name in provided or name in ("FLASHINFER_TRTLLM", "IPEX", "TORCH_MLA", "CPU_MLA"):
            continue  # nobody else has these
        words = PLACEHOLDERS.get(name, f"{known.kernels}; {known.plan}")
        yield selection_rule(
            f"not provided: {name}" if name in PLACEHOLDERS else f"not provided yet: {name}",
            _refuses(("missing",), name, "there", lambda d: True),
            reason=f"{words}.",
            evidence=f"`attn explain {name}`",
        )


def _requests() -> Iterator[Rule]:
    yield selection_rule(
        "latents of no width describe no model",
        lambda d: d.subject == "request" and d.config["use_mla"],
        reason="A latent is the cache entry less its rope part of 64; the recorded selector is "
        "never told and answers all the same.",
        evidence="the recorded mla_dims; an entry is kv_lora_rank + qk_rope_head_dim wide",
    )


# FLASH_ATTN


FLASH_ATTN = ("FLASH_ATTN", "FLASH_ATTN_DIFFKV")


def _flash_attn() -> Iterator[Rule]:
    """What its kernels have or lack."""
    names = FLASH_ATTN
    yield selection_rule(
        "FlashAttention has no kernels for heads of 512, nor with sinks for some on Blackwell",
        lambda d: (
            d.subject in names
            and d.side == "here"
            and (
                (d.code == "head_size" and d.config["head_size"] > 256)
                or (d.code in ("head_size", "head_size_v") and _is_odd_with_sinks(d))
            )
        ),
        reason="The recorded class admits them where FlashAttention 4 can be imported; the layer "
        "then resolves to 2, which has no such heads and no sinks. There, version 4 takes heads of "
        "192 with values of 128 alone, and reads 16 elements at a time.",
        evidence="vllm#42569, vllm#53111; kernels of flash-attn, flash-attn-3 and flash-attn-4",
    )
    yield selection_rule(
        "FLASH_ATTN takes no multimodal ranges",
        _refuses(names, "mm_prefix", "here", lambda d: d.config["use_mm_prefix"]),
        reason="Ranges need a mask function compiled into FlashAttention 4; TRITON_ATTN has them "
        "in its kernels.",
        evidence=f"{FACTS}: served only where version 4 resolves for the head size",
    )
    yield selection_rule(
        "scales per head are of fp8 caches, which FlashAttention 3 alone reads",
        _refuses(names, "per_head_quant_scales", "here", lambda d: _major(d) in (10, 11)),
        reason="The recorded class admits the scales from version 3 on, and refuses the cache that "
        "they would scale.",
        evidence=f"{FACTS}: fp8 caches on family 9.x only",
    )


def _flash_attn_builds() -> Iterator[Rule]:
    """What its builds have limits for, and how that is told."""
    names = FLASH_ATTN
    yield selection_rule(
        "FlashAttention 3's fp8 kernels return bfloat16, and read 16 elements at a time",
        lambda d: (
            d.subject in names
            and d.side == "here"
            and _major(d) == 9
            and d.config["kv_cache_dtype"] in E4M3
            and (
                (d.code == "kv_cache_dtype" and d.config["dtype"] == "float16")
                or (d.code == "head_size" and d.config["head_size"] % 16 != 0)
                or (d.code == "num_heads" and d.config["has_sink"] and d.config["num_heads"] > 64)
            )
        ),
        reason="A float16 layer would get an output of another dtype than its own; the one build "
        "with sinks beside an fp8 cache has them for up to 64 heads.",
        evidence="the kernel's constraint, in the checks of its own call",
    )
    yield selection_rule(
        "a batch-invariant FlashAttention has limits of its own, told as such",
        lambda d: (
            d.subject in names
            and d.config["use_batch_invariant"]
            and (d.code, d.side, _major(d))
            in (
                ("sink", "there", 10),
                ("batch_invariance", "here", 10),
                ("block_size", "here", 9),
            )
        ),
        reason="On Blackwell, version 4 falls to 2 in this mode there, and what is reported is "
        "that 2 has no sinks; here version 4 is said not to be batch-invariant. On Hopper, version "
        "3 chooses its loads by the longest query where pages are whole tiles.",
        evidence="vllm#13766: say what was asked, what was resolved and why",
    )
    yield selection_rule(
        "FLASH_ATTN_DIFFKV is for heads of unequal widths",
        _refuses(("FLASH_ATTN_DIFFKV",), "head_size_v", "here", lambda d: True),
        reason="FLASH_ATTN serves equal widths from the same kernels, in a cache of the common "
        "form; one of the two names is enough.",
        evidence="the cache form (blocks, tokens, heads, D + Dv) is that of unequal widths",
    )
    yield selection_rule(
        "a named FlashAttention that cannot serve is told as such",
        lambda d: (
            d.subject in names
            and d.config.get("flash_attn_version") is not None
            and (d.code, d.side) in _OF_A_NAMED_ONE
        ),
        reason="A generation that was named is taken or refused under its own code, never replaced "
        "by another; what else it lacks is part of that reason.",
        evidence="vllm#13766, vllm#15231",
    )


def _is_odd_with_sinks(d: Difference) -> bool:
    """Whether version 4 must serve, for its sinks, and has no such heads on Blackwell."""
    size = int(d.config["head_size"])
    return _major(d) in (10, 11) and bool(d.config["has_sink"]) and (size == 192 or size % 16 != 0)


_OF_A_NAMED_ONE = (
    ("flash_attn_version", "here"),
    ("sink", "there"),
    ("kv_cache_dtype", "there"),
    ("per_head_quant_scales", "there"),
)


# TRITON_ATTN


def _triton() -> Iterator[Rule]:
    names = ("TRITON_ATTN",)
    yield selection_rule(
        "TRITON_ATTN begins with NVIDIA's 8.0",
        _refuses(names, "device", "here", lambda d: 0 < _major(d) < 8),
        reason="Triton's own floor: 7.5 is untested there and has no bfloat16.",
        evidence="Triton 3: supported NVIDIA architectures begin with 8.0",
    )
    yield selection_rule(
        "TRITON_ATTN reads e4m3 where Triton's compiler has it",
        _refuses(names, "fp8_on_device", "here", _lacks_e4m3),
        reason="The recorded selector chooses it, and its constructor then refuses the cache.",
        evidence="constructor of the recorded class (fp8 from 8.9 on); vllm#13730, vllm#14221",
    )
    yield selection_rule(
        "TRITON_ATTN reads no e4m3 on Intel GPUs",
        _refuses(names, "fp8_on_device", "here", lambda d: d.row["platform"] == "xpu"),
        reason="Its kernels read the flavour of the architecture's matrix hardware, and Intel's "
        "up to Xe3 have none; attn's machine refuses such a cache there.",
        evidence="lacking_fp8 and machine.require_readable of attn_triton",
    )
    yield selection_rule(
        "TRITON_ATTN's tiles end at heads of 512",
        _refuses(names, "head_size", "here", lambda d: d.config["head_size"] > 512),
        reason="A head is one tile wide; the recorded class declares no limit.",
        evidence="the kernel's constraint, MAX_HEAD_SIZE of attn_triton",
    )
    yield selection_rule(
        "TRITON_ATTN's tiles must fit the shared memory of the device",
        _refuses(names, "shared_memory", "here", lambda d: _head_bytes(d) >= 768),
        reason="Its smallest tiles of such heads need more than one program can have, and the "
        "launch would fail.",
        evidence="bytes of the kernel's tiles beside the architecture's limit; gfx1201 has 65,536",
    )
    yield selection_rule(
        "multimodal ranges are a decoder's",
        _refuses(
            ("TRITON_ATTN", "CPU_ATTN"),
            "mm_prefix_decoder",
            "here",
            lambda d: d.config["use_mm_prefix"] and d.config["attn_type"] != "decoder",
        ),
        reason="They widen a causal mask, which an encoder and cross-attention do not have; a "
        "model that asks for both is misread.",
        evidence="the contract of multimodal prefixes",
    )
    yield selection_rule(
        "TRITON_ATTN scales fp8 caches per head",
        _refuses(
            names,
            "per_head_quant_scales",
            "there",
            lambda d: d.config["use_per_head_quant_scales"],
        ),
        reason="attn's kernels read a scale per head; the recorded ones one per tensor.",
        evidence="`attn verify TRITON_ATTN`",
    )
    yield selection_rule(
        "TRITON_ATTN and FLEX_ATTENTION take blocks of any size",
        _refuses(
            ("TRITON_ATTN", "FLEX_ATTENTION"),
            "block_size",
            "there",
            lambda d: d.config["block_size"] % 16 != 0,
        ),
        reason="attn's kernels find each token's block by itself.",
        evidence="capabilities of both, held by `attn verify`; vllm#36241 on lists that are too "
        "strict",
    )


def _lacks_e4m3(d: Difference) -> bool:
    if d.config["kv_cache_dtype"] not in E4M3:
        return False
    if d.row["platform"] == "cuda":
        return _cc(d) < (8, 9)
    return d.row["arch"] in WITHOUT_E4M3


def _head_bytes(d: Difference) -> int:
    return int(d.config["head_size"]) * (4 if d.config["dtype"] == "float32" else 2)


# FLEX_ATTENTION


def _flex() -> Iterator[Rule]:
    names = ("FLEX_ATTENTION",)
    yield selection_rule(
        "FLEX_ATTENTION has sinks",
        _refuses(names, "sink", "there", lambda d: d.config["has_sink"]),
        reason="A sink shrinks the output by what the LSE says; attn does so behind the kernel.",
        evidence="`attn verify FLEX_ATTENTION`",
    )
    yield selection_rule(
        "FLEX_ATTENTION serves encoders and cross-attention",
        _refuses(
            names,
            "attn_type",
            "there",
            lambda d: d.config["attn_type"] in ("encoder", "encoder_decoder"),
        ),
        reason="Its mask says who sees whom, and the lengths may differ.",
        evidence="`attn verify FLEX_ATTENTION`",
    )
    yield selection_rule(
        "FLEX_ATTENTION is not batch-invariant",
        _refuses(names, "batch_invariance", "here", lambda d: d.config["use_batch_invariant"]),
        reason="The contract asks for equal bits whatever shares the batch, and torch compiles and "
        "splits by the batch's shape; the backend does not claim what nobody has shown.",
        evidence="vllm#40193: a backend without the mode must not be chosen in it",
    )
    yield selection_rule(
        "FLEX_ATTENTION's kernels are for heads of 16 to 512",
        _refuses(names, "head_size", "here", lambda d: not 16 <= int(d.config["head_size"]) <= 512),
        reason="torch compiles no kernel for others; the recorded class admits any.",
        evidence="torch.nn.attention.flex_attention's own limits",
    )
    yield selection_rule(
        "FLEX_ATTENTION begins with NVIDIA's 8.0",
        _refuses(names, "device", "here", lambda d: 0 < _major(d) < 8),
        reason="It compiles through Triton, which begins there.",
        evidence="Triton 3: supported NVIDIA architectures begin with 8.0",
    )


# CPU_ATTN, and what concerns all


def _cpu() -> Iterator[Rule]:
    yield selection_rule(
        "a format of the cache is asked for on CPUs and Intel GPUs as well",
        lambda d: (
            d.subject in ("CPU_ATTN", "TRITON_ATTN", "XPU_FLASH_ATTN")
            and (d.code, d.side) == ("kv_cache_dtype", "here")
            and d.row["platform"] in ("cpu", "xpu")
            and d.config["kv_cache_dtype"] not in ("auto", d.config["dtype"])
        ),
        reason="These platforms of v0.25.1 validate nothing, and start with a format that their "
        "kernels do not have.",
        evidence="vllm#16002, vllm#13730: an option is validated, never accepted and then dropped",
    )


def _xpu() -> Iterator[Rule]:
    """v0.25.1 validates nothing on Intel GPUs; attn asks the capability there as anywhere."""
    names = ("XPU_FLASH_ATTN",)
    wheel = "the wheel vllm-xpu-kernels 0.1.16.2"
    yield selection_rule(
        "XPU_FLASH_ATTN is not batch-invariant",
        _refuses(names, "batch_invariance", "here", lambda d: d.config["use_batch_invariant"]),
        reason="Its kernels split keys by the batch, and its call refuses a number of splits.",
        evidence=f"vllm#58131: the argument is dropped there; {wheel}, num_splits > 1",
    )
    yield selection_rule(
        "XPU_FLASH_ATTN takes one scale for keys and one for values",
        _refuses(
            names,
            "per_head_quant_scales",
            "here",
            lambda d: d.config["use_per_head_quant_scales"],
        ),
        reason="A descale has to be a view of one number.",
        evidence=f"{wheel}: its check of k_descale and v_descale",
    )
    yield selection_rule(
        "XPU_FLASH_ATTN reads pages of multiples of 16 tokens",
        _refuses(
            names,
            "block_size",
            "here",
            lambda d: int(d.config["block_size"] or 0) % 16 != 0,
        ),
        reason="Its kernels raise an error for others, when the first step runs.",
        evidence=f'{wheel}: "unsupported block_size", "any positive multiple of 16"',
    )


def _caches() -> Iterator[Rule]:
    yield selection_rule(
        "an encoder without a cache has no block size",
        _refuses(
            ("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
            "block_size",
            "there",
            lambda d: d.config["attn_type"] in ENCODERS,
        ),
        reason="The block size of the model's other layers says nothing about it.",
        evidence="the contract: ENCODER and ENCODER_ONLY have no cache",
    )
    yield selection_rule(
        "a cache that is not quantised has the layer's dtype",
        lambda d: (
            (d.code, d.side) in (("kv_cache_dtype", "here"), ("cache_dtype_of_layer", "here"))
            and d.config["kv_cache_dtype"] in SIXTEEN
            and d.config["kv_cache_dtype"] != d.config["dtype"]
        ),
        reason="Kernels multiply what they read; a float16 layer over a bfloat16 cache would "
        "convert on the way, which no kernel does.",
        evidence="vllm#14221: a numeric format is never ignored; the kernels' one element type",
    )


def _named() -> Iterator[Rule]:
    yield selection_rule(
        "a named FlashAttention is served by FlashAttention alone",
        lambda d: (
            (d.code, d.side) == ("flash_attn_version", "here")
            and d.subject
            in ("FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA", "CPU_ATTN")
            and d.config.get("flash_attn_version") is not None
        ),
        reason="v0.25.1 lets the other backends ignore the number.",
        evidence="vllm#22193: a request that has no effect is an error",
    )
    yield selection_rule(
        "a named backend is never replaced",
        lambda d: d.code == "replaced" and d.row["platform"] == "cpu",
        reason="v0.25.1's CPU platform logs the name and takes CPU_ATTN; here the named one serves "
        "or the reasons are given.",
        evidence="vllm#22217, sglang#8989",
    )
    yield selection_rule(
        "any backend may be named anywhere, and its capability answers",
        lambda d: d.code == "forced_backend_not_offered" and d.row["platform"] == "xpu",
        reason="v0.25.1's XPU platform knows two names and refuses the others without a reason.",
        evidence="vllm#40677: a refusal names the value and what is allowed",
    )
    yield selection_rule(
        "TORCH_SDPA is a backend",
        _refuses(("TORCH_SDPA",), "unregistered", "there", lambda d: True),
        reason="There the name is a tag for vision towers without a class.",
        evidence=f"{FACTS}: an empty path",
    )


def _orders() -> Iterator[Rule]:
    from attn_shared.known_backends import KNOWN_BACKENDS

    portable = {name for name in ("TORCH_SDPA", "FLEX_ATTENTION") if name in KNOWN_BACKENDS}
    yield selection_rule(
        "backends on torch alone are the last resort, on every platform",
        lambda d: d.subject == "order" and d.here in portable and d.there in (None, *portable),
        reason="Where no kernel of a vendor's or of Triton's serves a request, one on torch does.",
        evidence="vllm#32732, vllm#16808: every cell has a last-resort backend",
    )
    yield selection_rule(
        "TRITON_ATTN serves on Intel GPUs what XPU_FLASH_ATTN refuses",
        lambda d: (
            d.subject == "order"
            and (d.here, d.there, d.row["platform"]) == ("TRITON_ATTN", None, "xpu")
        ),
        reason="v0.25.1 offers it there by name, for multimodal ranges and for float32.",
        evidence=f"{FACTS}: the decision tree of its XPU platform",
    )
