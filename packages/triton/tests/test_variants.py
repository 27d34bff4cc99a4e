"""Every variant names its kernel's parameters, and is named once."""

from __future__ import annotations

from collections import Counter

import pytest

from attn_triton.variants import ARCHITECTURES, all_variants

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_names_and_parameters(arch: str) -> None:
    found = list(all_variants(arch))
    repeated = [name for name, count in Counter(item.name for item in found).items() if count > 1]
    assert not repeated
    assert {item.name.split("-")[0] for item in found if item.is_main} >= {"kv", "merge"}
    for item in found:
        given = [*item.signature, *item.constants]
        assert sorted(given) == sorted(item.kernel.arg_names), item.name
        assert set(item.unaligned) <= set(item.signature), item.name
