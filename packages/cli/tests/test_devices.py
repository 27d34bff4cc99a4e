from __future__ import annotations

import pytest

from attn_cli.devices import named_device
from attn_shared.device import PRESETS, Vendor
from attn_shared.errors import InvalidInputError, NoBackendError, UnknownNameError
from attn_shared.selector import DEFAULT_SELECTOR


def test_cpu_is_this_machines() -> None:
    facts = named_device("cpu", DEFAULT_SELECTOR)
    assert facts.vendor is Vendor.CPU
    assert not facts.is_simulated
    assert named_device("cpu:0", DEFAULT_SELECTOR) == facts


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_simulated(name: str) -> None:
    assert named_device(name, DEFAULT_SELECTOR) == PRESETS[name]


@pytest.mark.parametrize(
    ("text", "arch"),
    [("gfx942:sramecc+:xnack-", "gfx942"), ("sm_90a", "sm_90"), ("12.1", "sm_121")],
)
def test_an_architecture_stands_for_any_of_its_devices(text: str, arch: str) -> None:
    facts = named_device(text, DEFAULT_SELECTOR)
    assert (facts.arch, facts.is_simulated, facts.memory_bytes) == (arch, True, None)


def test_an_unknown_device_lists_presets_architectures_and_this_machines_types() -> None:
    with pytest.raises(UnknownNameError) as caught:
        named_device("h20", DEFAULT_SELECTOR)
    assert "'h20'" in caught.value.message
    for allowed in ("h200", "mi300x", "sm_90", "gfx942", "cpu", "cuda:0"):
        assert allowed in caught.value.message
    assert "did you mean 'h200'?" in caught.value.hint


@pytest.mark.parametrize("text", ["", "cpu:", "cpu:x", "cuda:-1", "cuda:1234", "cuda:0 "])
def test_what_only_looks_like_a_torch_device_is_unknown(text: str) -> None:
    with pytest.raises(UnknownNameError):
        named_device(text, DEFAULT_SELECTOR)


def test_a_device_that_this_machine_lacks_says_what_is_allowed() -> None:
    with pytest.raises(InvalidInputError, match="device index is 7; allowed: 0 to 0"):
        named_device("cpu:7", DEFAULT_SELECTOR)


def test_a_platform_that_this_machine_lacks_gives_its_reason() -> None:
    absent = {
        platform.torch_device_type: platform.availability().reason
        for platform in DEFAULT_SELECTOR.registry.platforms().values()
        if not platform.availability().is_available
    }
    if not absent:
        pytest.skip("every platform is available")
    for kind, reason in absent.items():
        others = [
            p
            for p in DEFAULT_SELECTOR.registry.platforms().values()
            if p.torch_device_type == kind and p.availability().is_available
        ]
        if others:
            continue  # cuda and rocm share a device type
        with pytest.raises(NoBackendError) as caught:
            named_device(f"{kind}:0", DEFAULT_SELECTOR)
        assert reason in caught.value.message
