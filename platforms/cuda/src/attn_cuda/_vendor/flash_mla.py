"""FlashMLA, of which two distributions with one module and different arguments exist."""

from __future__ import annotations

from attn_shared.inventory import VendorBuild, VendorSpec
from attn_shared.probing import (
    build_flags,
    import_library,
    installed_version,
    optional_arguments,
    require,
)

__all__ = ["SPEC", "probe"]

SPEC = VendorSpec(
    name="flash_mla",
    distributions=("sgl-flash-mla", "tokenspeed-flashmla", "flash-mla"),
    module="flash_mla",
    install='pip install "attn-cuda[flashmla]"',
    probe="attn_cuda._vendor.flash_mla:probe",
)

_OPTIONAL = (
    *("use_legacy", "kv_format", "descale_q", "descale_k", "indices", "attn_sink", "topk_length"),
    *("enable_batch_invariant", "is_fp8_kvcache", "return_log2_lse"),
)


def probe() -> VendorBuild:
    """Import the library and say which of its two generations of kernels are there.

    The flag "legacy" tells whether the kernels for Hopper and dense decode, which upstream has
    dropped, are carried as a second set; a build without that choice has no such flag.

    Raises:
        ImportError: with the loader's own words, or naming what is missing.
    """
    library = import_library("flash_mla")
    calls = {
        name: require(library, name, "reinstall it")
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    }
    has_legacy = getattr(library, "has_legacy", None)
    return VendorBuild(
        version=installed_version(SPEC.distributions),
        flags=build_flags({} if has_legacy is None else {"legacy": bool(has_legacy())}),
        kernel_lse_base="e",
        optional_arguments=optional_arguments(calls, _OPTIONAL),
    )
