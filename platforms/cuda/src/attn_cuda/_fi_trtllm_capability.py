"""What FLASHINFER_TRTLLM can do on a device: XQA's decode on Hopper, trtllm-gen on Blackwell."""

from __future__ import annotations

from dataclasses import replace

from attn_cuda._fi_capability import capability_on
from attn_cuda._fi_loaded import LIBRARY
from attn_shared.capability import Capability, DeviceLimit, Exactly, Reason, Rule, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import KVCacheLayout
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.request import AttentionRequest

__all__ = ["NAME_TRTLLM", "capability_trtllm"]

NAME_TRTLLM = "FLASHINFER_TRTLLM"

# What kernels are compiled for; none serves for a multiple.
_XQA_PAGES = (16, 32, 64, 128)
_GEN_PAGES = (16, 32, 64)
_GEN_PAGES_GROUPED = (128, 256, 512, 1024)


def capability_trtllm(device: DeviceFacts, inventory: Inventory) -> Capability:
    """Return FLASHINFER_TRTLLM's capability.

    On Hopper XQA decodes and FLASHINFER's own kernels prefill, so that a layer gets what both
    have: no sinks, and no LSE. On Blackwell trtllm-gen serves both phases.
    """
    is_blackwell = device.capability is not None and device.capability.is_family(10)
    own = capability_on(device, inventory)
    pages = (*_GEN_PAGES, *_GEN_PAGES_GROUPED) if is_blackwell else _XQA_PAGES
    formats = {"auto", "fp8", "fp8_e4m3"} | ({"nvfp4"} if is_blackwell else set())
    layouts = (KVCacheLayout.HND, KVCacheLayout.NHD)
    return replace(
        own,
        devices=(DeviceLimit(vendor=Vendor.NVIDIA, families=(9, 10)),),
        kv_cache_dtypes=frozenset(formats),
        block_sizes=tuple(map(Exactly, pages)),
        kv_layouts=layouts if is_blackwell else (KVCacheLayout.NHD, KVCacheLayout.HND),
        softcap=Support.NO,
        sinks=Support.YES if is_blackwell else Support.NO,
        lse=Support.YES if is_blackwell else Support.NO,
        dcp=Support.NO,
        fp8_products=True,
        rules=(
            *(rule for rule in own.rules if rule.name != "flashinfer_lse"),
            Rule(name="trtllm_nvfp4", check=_nvfp4),
            Rule(name="trtllm_non_causal", check=_non_causal),
            *(_blackwell_rules(inventory) if is_blackwell else _HOPPER_RULES),
        ),
    )


def _blackwell_rules(inventory: Inventory) -> tuple[Rule, ...]:
    return Rule(name="trtllm_grouped_pages", check=_grouped_pages), _cubins_rule(inventory)


def _grouped_pages(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Refuse the large pages where each query head has a kv head of its own."""
    is_grouped = request.num_heads != request.num_kv_heads
    if is_grouped or request.block_size not in _GEN_PAGES_GROUPED:
        return None
    return Reason(
        code="block_size",
        value=str(request.block_size),
        allowed=", ".join(map(str, _GEN_PAGES)),
        hint="pages of 128 and more need several query heads per kv head",
    )


def _xqa_groups(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Refuse groups that XQA's kernel of Hopper does not compile for.

    It rounds the heads of a group up to a multiple of 8 and takes one, two or four of these
    (`Gemm0Acc::size` in mha_sm90.cu of 0.6.13; met on an H200 with 20 heads).
    """
    group = request.num_heads // request.num_kv_heads
    if group <= 16 or 25 <= group <= 32:
        return None
    return Reason(
        code="num_heads",
        value=f"{request.num_heads} over {request.num_kv_heads}, a group of {group}",
        allowed="groups of 1 to 16 and 25 to 32, for which XQA compiles",
        hint="FLASHINFER serves it",
    )


_HOPPER_RULES = (Rule(name="xqa_groups", check=_xqa_groups),)


def _nvfp4(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Hold a cache of 4 bits to the layout in which its scales lie in a row, and to causal rows."""
    if request.kv_cache_dtype != "nvfp4":
        return None
    if request.kv_layout not in (None, KVCacheLayout.HND):
        return Reason(
            code="kv_layout",
            value=str(request.kv_layout),
            allowed="HND with kv_cache_dtype nvfp4, whose scales lie in a row for each head",
        )
    if request.non_causal:
        return Reason(code="non_causal", value="True", allowed="False with kv_cache_dtype nvfp4")
    return None


def _non_causal(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Refuse what rows without a causal mask lack, which FLASHINFER's own kernels run."""
    if not request.non_causal or not (request.has_sinks or request.needs_lse):
        return None
    code = "sink" if request.has_sinks else "lse"
    return Reason(code=code, value="True", allowed="False without a causal mask")


def _cubins_rule(inventory: Inventory) -> Rule:
    """Return the rule of compiled kernels that are not here: nothing is fetched while serving."""
    entry = inventory.get(LIBRARY)

    def check(_request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
        if entry.status is not VendorStatus.LOADED or entry.build is None:
            return None
        if entry.build.flag("cubins") != "unknown":
            return None
        return Reason(
            code="cubins",
            value="not installed",
            allowed="the compiled trtllm-gen kernels of flashinfer-cubin",
            hint="pip install flashinfer-cubin, of the same version as flashinfer-python",
        )

    return Rule(name="trtllm_cubins", check=check)
