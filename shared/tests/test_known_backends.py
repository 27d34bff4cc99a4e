from __future__ import annotations

import pytest

from attn_shared.backend_names import AttentionBackendEnum, MambaAttentionBackendEnum
from attn_shared.device import Vendor
from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS

FAMILIES = {"mha", "mla", "sparse_mla", "recurrent", "placeholder"}


def test_the_table_and_the_enums_name_the_same() -> None:
    assert list(KNOWN_BACKENDS) == [member.value for member in AttentionBackendEnum]
    assert list(KNOWN_MAMBA_BACKENDS) == [member.value for member in MambaAttentionBackendEnum]


@pytest.mark.parametrize("name", [*KNOWN_BACKENDS, *KNOWN_MAMBA_BACKENDS])
def test_each_name_has_its_facts(name: str) -> None:
    known = KNOWN_BACKENDS.get(name) or KNOWN_MAMBA_BACKENDS[name]
    assert name == name.upper()
    assert known.family in FAMILIES
    assert known.kernels
    assert (known.vendors == ()) is (known.family == "placeholder")
    assert not (known.is_planned and known.family in {"placeholder", "recurrent", "sparse_mla"})


@pytest.mark.parametrize(
    "name",
    ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "ROCM_AITER_FA", "FLASHMLA", "XPU_FLASH_ATTN"],
)
def test_names_of_the_field_are_there(name: str) -> None:
    assert KNOWN_BACKENDS[name].is_planned


def test_every_vendor_has_a_planned_backend_of_each_plain_kind() -> None:
    for vendor in Vendor:
        planned = {
            k.family for k in KNOWN_BACKENDS.values() if k.is_planned and vendor in k.vendors
        }
        assert {"mha", "mla"} <= planned


def test_the_tables_are_read_only() -> None:
    with pytest.raises(TypeError):
        KNOWN_BACKENDS["X"] = KNOWN_BACKENDS["CUSTOM"]  # type: ignore[index]
