from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attn_shared_fakes import CPU, GPU, FakePlatform, platform

from attn_shared.device import DeviceFacts, preset
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.platform import PriorityBand

AMPERE, BLACKWELL, MI300X = preset("a100"), preset("b300"), preset("mi300x")


def of(*devices: DeviceFacts, **attributes: Any) -> FakePlatform:
    return platform(present=devices, **attributes)()


def test_a_device_by_its_index() -> None:
    assert of(GPU, AMPERE).device(1) is AMPERE
    assert of(GPU).device() is GPU


@pytest.mark.parametrize(
    ("devices", "index", "message"),
    [
        ((GPU, GPU), 2, "device index is 2; allowed: 0 to 1"),
        ((GPU,), -1, "device index is -1; allowed: 0 to 0"),
        ((), 0, "device index is 0; allowed: none: 0 devices"),
    ],
)
def test_an_index_without_a_device_is_refused(
    devices: tuple[DeviceFacts, ...], index: int, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        of(*devices).device(index)


def test_each_question_is_about_one_device() -> None:
    mixed = of(AMPERE, BLACKWELL)  # 8.0 and 10.3
    assert [mixed.has_device_capability(9, index=i) for i in (0, 1)] == [False, True]
    assert [mixed.is_device_capability(10, 3, index=i) for i in (0, 1)] == [False, True]
    assert [mixed.is_device_capability_family(10, index=i) for i in (0, 1)] == [False, True]
    assert [mixed.supports_fp8(index=i) for i in (0, 1)] == [False, True]
    assert [mixed.fp8_dtype(index=i) for i in (0, 1)] == [None, torch.float8_e4m3fn]


def test_a_device_without_a_capability_passes_none_of_the_three() -> None:
    host = of(CPU)
    assert not host.has_device_capability(0)
    assert not host.is_device_capability(9)
    assert not host.is_device_capability_family(9)


def test_facts_of_a_device() -> None:
    found = of(GPU)
    assert found.num_compute_units() == 132
    assert found.device_memory_bytes() == 2**37
    assert not found.is_fp8_fnuz()
    assert of(MI300X).is_fp8_fnuz()


def test_a_dtype_without_arithmetic_is_refused() -> None:
    class Turing(FakePlatform):
        def supported_dtypes(self, device: DeviceFacts) -> tuple[torch.dtype, ...]:
            return (torch.float16, torch.float32)

    of(GPU).check_if_supports_dtype(torch.bfloat16)
    Turing().check_if_supports_dtype(torch.float16)
    with pytest.raises(UnsupportedOptionError) as caught:
        Turing().check_if_supports_dtype(torch.bfloat16)
    assert str(caught.value) == (
        "NVIDIA Fake (sm_90) does not support dtype=bfloat16; allowed: float16, float32."
    )


def test_bands_leave_room_between_them() -> None:
    bands = [
        PriorityBand.REFERENCE,
        PriorityBand.PORTABLE,
        PriorityBand.PERFORMANT,
        PriorityBand.SPECIALISED,
    ]
    assert bands == sorted(bands)
    assert min(b - a for a, b in pairwise(bands)) > 1


def test_a_group_of_one_fp8_flavour_has_a_dtype() -> None:
    mixed = of(MI300X, MI300X, preset("mi355x"))
    assert mixed.common_fp8_dtype((0, 1)) is torch.float8_e4m3fnuz
    assert mixed.common_fp8_dtype((2,)) is torch.float8_e4m3fn
    assert of(AMPERE, AMPERE).common_fp8_dtype() is None
    assert of(AMPERE).common_fp8_dtype(()) is None


def test_a_group_of_several_flavours_is_refused_by_name() -> None:
    mixed = of(MI300X, preset("mi355x"))
    words = r"fp8 flavours of the group is gfx942: e4m3fnuz, gfx950: e4m3fn; allowed: one flavour"
    with pytest.raises(InvalidInputError, match=words) as caught:
        mixed.common_fp8_dtype()
    assert "kv_cache_dtype=auto" in str(caught.value)
