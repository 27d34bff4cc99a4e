from __future__ import annotations

import pytest

from attn_shared.errors import UnsupportedOptionError
from attn_vllm.versions import DECLARED, Interface, interface_of


@pytest.mark.parametrize(
    ("version", "interface"),
    [
        ("0.25.1", Interface.SHAPES),
        ("0.25.1+cu130", Interface.SHAPES),
        ("0.25.3", Interface.SHAPES),
        ("0.32.0", Interface.LAYOUTS),
        ("0.32.0+cpu", Interface.LAYOUTS),
        ("0.33.1", Interface.LAYOUTS),
    ],
)
def test_a_declared_release_has_its_interface(version: str, interface: Interface) -> None:
    assert interface_of(version) is interface


@pytest.mark.parametrize("version", ["0.25.0", "0.26.0", "0.31.9", "0.34.0", "1.0", "dev", ""])
def test_another_release_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        interface_of(version)
    assert version in str(caught.value)
    assert DECLARED in str(caught.value)
    assert "ATTN_VLLM_BACKEND" in str(caught.value)


def test_the_extra_covers_the_declared_releases() -> None:
    assert DECLARED == ">=0.25.1,<0.26 or >=0.32,<0.34"
