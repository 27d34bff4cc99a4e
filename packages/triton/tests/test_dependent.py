"""Kernels that begin while the one before them ends: where, and what they touch before it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from attn_shared.arch import parse_arch
from attn_triton.machine import has_dependent_launch

COMPILE = """
import json
from attn_triton.kernels.compiling import compile_variant
from attn_triton.variants import all_variants

ANYWHERE = ("decode-bf16-d128", "combine-bf16-d128")
HOPPER = ("mla-decode-16-heads",)
found = {}
for arch, wanted in (("sm_80", ANYWHERE), ("sm_90", ANYWHERE + HOPPER)):
    for variant in all_variants(arch):
        if variant.name in wanted:
            found[f"{arch} {variant.name}"] = compile_variant(variant, arch).asm["ptx"]
print(json.dumps(found))
"""
WAIT, RELEASE = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
READS = ("ld.global", "cp.async", "ldmatrix")
WRITES = ("st.global", "red.", "atom.")


@pytest.mark.parametrize(
    ("arch", "has"),
    [
        ("sm_80", False),
        ("sm_89", False),
        ("sm_90", True),
        ("sm_100", True),
        ("sm_120", True),
        ("gfx942", False),
        ("gfx1201", False),
        ("bmg", False),
    ],
)
def test_where_it_is(arch: str, has: bool) -> None:
    assert has_dependent_launch(parse_arch(arch)) is has


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Texts of kernels by architecture and name, compiled where none is interpreted."""
    pytest.importorskip("triton", reason="triton is not installed")
    cache = str(tmp_path_factory.mktemp("cache"))
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-c", COMPILE]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return found


def first(text: str, words: tuple[str, ...]) -> int:
    """Return where the first of these words is."""
    return min(text.index(word) for word in words if word in text)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["decode-bf16-d128", "mla-decode-16-heads"])
def test_decode_waits_before_it_touches_memory(assembly: dict[str, str], name: str) -> None:
    text = assembly[f"sm_90 {name}"]
    assert text.count(WAIT) == 1
    assert text.index(WAIT) < min(first(text, READS), first(text, WRITES))
    assert text.index(WAIT) < text.index(RELEASE)


@pytest.mark.interpreter
def test_a_merge_waits_before_it_returns_or_writes(assembly: dict[str, str]) -> None:
    text = assembly["sm_90 combine-bf16-d128"]
    assert text.count(WAIT) == 1
    assert RELEASE not in text
    assert text.index(WAIT) < min(first(text, WRITES), text.index("ret;"), text.index("bra"))
    assert text[: text.index(WAIT)].count("ld.global") == 4  # of the plan, and the query's places


@pytest.mark.interpreter
def test_older_gpus_have_none_of_it(assembly: dict[str, str]) -> None:
    older = [text for name, text in assembly.items() if name.startswith("sm_80")]
    assert len(older) == 2
    assert not any("griddepcontrol" in text for text in older)
