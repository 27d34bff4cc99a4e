"""What `attn_shared` itself offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import attn_shared


@pytest.mark.parametrize("name", attn_shared.__all__)
def test_each_public_name_is_there(name: str) -> None:
    assert getattr(attn_shared, name) is not None
    assert name in dir(attn_shared)


def test_a_name_comes_from_its_own_module() -> None:
    from attn_shared.layer import Attention
    from attn_shared.selector import current_platform

    assert attn_shared.Attention is Attention
    assert attn_shared.current_platform is current_platform


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FlashAttention'"):
        attn_shared.FlashAttention  # noqa: B018


def test_the_package_alone_imports_none_of_its_modules() -> None:
    code = (
        "import attn_shared, sys; print([m for m in sys.modules if m.startswith('attn_shared.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
