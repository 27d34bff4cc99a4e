"""ROCM_ATTN: TRITON_ATTN's kernels, whole, under the name of AMD's users."""

from __future__ import annotations

from dataclasses import replace

import pytest
from aiter_testing import MI300X, layer_spec, request

from attn_rocm.backends import rocm_attn
from attn_rocm.backends.rocm_attn import (
    RocmAttentionBackend,
    RocmAttentionImpl,
    RocmAttentionMetadataBuilder,
)
from attn_rocm.platform import RocmPlatform
from attn_shared.device import preset
from attn_shared.errors import UnsupportedOptionError, VendorMissingError
from attn_shared.inventory import Inventory, assume_all
from attn_shared.selection import Policy
from attn_shared.selector import select
from attn_triton import paged
from attn_triton.backends.triton_attn import TritonAttentionBackend

ALL = assume_all(RocmPlatform().vendor_specs())


def test_it_is_the_triton_kernels_and_nothing_beside() -> None:
    for own, theirs in (
        (RocmAttentionImpl, paged.TritonAttentionImpl),
        (RocmAttentionMetadataBuilder, paged.TritonAttentionMetadataBuilder),
    ):
        assert own.__bases__ == (theirs,)
        changed = {name for name in vars(own) if not name.startswith("__")}
        assert changed - {"_abc_impl"} == {"backend_name"}
        assert own.backend_name == "ROCM_ATTN"


def test_it_can_what_triton_attn_can_on_amd_gpus_alone() -> None:
    own = RocmAttentionBackend.capability(MI300X, Inventory())
    theirs = TritonAttentionBackend.capability(MI300X, Inventory())
    assert replace(own, devices=theirs.devices) == theirs
    assert own.admits(MI300X)
    assert own.admits(preset("rx7900xtx"))
    assert not own.admits(preset("h200"))


def test_it_is_chosen_by_name_alone() -> None:
    assert select(request(), MI300X, ALL).backend_cls is not RocmAttentionBackend
    named = select(request(), MI300X, ALL, Policy(backend="ROCM_ATTN"))
    assert named.backend_cls is RocmAttentionBackend


def test_its_refusals_carry_its_name() -> None:
    with pytest.raises(UnsupportedOptionError, match="ROCM_ATTN does not serve this layer"):
        RocmAttentionImpl(layer_spec(head_size=1024, head_size_v=1024))


def test_without_triton_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise VendorMissingError("triton does not import: no module.", library="triton")

    monkeypatch.setattr(rocm_attn, "load_triton", missing)
    with pytest.raises(VendorMissingError, match="triton does not import"):
        RocmAttentionBackend.load_vendor(MI300X, Inventory())
