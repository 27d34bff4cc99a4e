"""Compile the Triton kernels for every GPU without one, and keep what came out as a table.

python ci/compile_triton.py              compile all variants; write docs/triton-compilation.*
python ci/compile_triton.py --check      compile the main ones; fail where a limit is passed or
                                         the table no longer names what is compiled
python ci/compile_triton.py --arch sm_90 --verbose    one architecture; the table keeps the others

Needs attn-triton and Triton, as the session `triton` has them. Registers differ from one release of
the compiler to the next, so that `--check` compares with the limits, not with the table's numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from repository import ROOT

__all__ = ["LIMITS", "Compiled", "Limits", "main", "page", "problems", "usage_of"]

RECORD = ROOT / "docs" / "triton-compilation.json"
PAGE = ROOT / "docs" / "triton-compilation.md"
COMMAND = "python ci/compile_triton.py"
KIB = 1024
PREFACE = f"""\
<!-- Written by `{COMMAND}`. Do not edit. -->

# What the Triton kernels compile to

Every kernel of attn-triton, compiled with Triton {{triton}} for each architecture below, without a
GPU: {{count}} kernels, of which {{spilling}} spill. [The same as JSON]({{record}}).

A cell is registers per thread, shared memory (LDS) of a program, and bytes per thread that were
spilled to memory, where there are any. **Compiled is not run**: of these architectures sm_90 alone
has run, on an H200. Intel's GPUs are neither run nor compiled for: the Triton that package indexes
have contains no backend for them.

The session `triton` compiles the first table's variants anew and fails where one does not compile,
spills, or needs more shared memory than its architecture has."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use, and where that is written."""

    gpus: str
    shared_bytes: int
    registers: int
    source: str


CUDA_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
CDNA_GUIDE = "AMD Instinct CDNA ISA guides: LDS and VGPRs, accumulation registers included"
RDNA_GUIDE = "AMD RDNA ISA guides: LDS of a work group, VGPRs of a wave of 32"
LIMITS = {
    "sm_80": Limits(gpus="A100", shared_bytes=163 * KIB, registers=255, source=CUDA_GUIDE),
    "sm_90": Limits(gpus="H100, H200", shared_bytes=227 * KIB, registers=255, source=CUDA_GUIDE),
    "sm_100": Limits(gpus="B200", shared_bytes=227 * KIB, registers=255, source=CUDA_GUIDE),
    "sm_120": Limits(gpus="RTX 50", shared_bytes=99 * KIB, registers=255, source=CUDA_GUIDE),
    "gfx90a": Limits(gpus="MI200", shared_bytes=64 * KIB, registers=512, source=CDNA_GUIDE),
    "gfx942": Limits(gpus="MI300", shared_bytes=64 * KIB, registers=512, source=CDNA_GUIDE),
    "gfx950": Limits(gpus="MI350", shared_bytes=160 * KIB, registers=512, source=CDNA_GUIDE),
    "gfx1100": Limits(gpus="RX 7900", shared_bytes=64 * KIB, registers=256, source=RDNA_GUIDE),
    "gfx1201": Limits(gpus="RX 9070", shared_bytes=64 * KIB, registers=256, source=RDNA_GUIDE),
}
"""For each architecture that is compiled for, what a program has."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a variant became on an architecture; `error` is the compiler's refusal."""

    arch: str
    variant: str
    is_main: bool
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    num_warps: int = 0
    error: str = ""


# Compiling


def compile_all(
    archs: Iterable[str], *, main_only: bool, jobs: int | None = None, verbose: bool = False
) -> list[Compiled]:
    """Compile the variants of these architectures, `jobs` at once or as many as there are cores."""
    from attn_triton.variants import all_variants

    tasks = [
        (arch, variant.name)
        for arch in archs
        for variant in all_variants(arch)
        if variant.is_main or not main_only
    ]
    found = []
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(
            jobs or os.cpu_count(), get_context("spawn"), initializer=use_cache, initargs=(cache,)
        ) as pool,
    ):
        for result, seconds in pool.map(compile_one, *zip(*tasks, strict=True)):
            found.append(result)
            if verbose or result.error:
                print(
                    f"{result.arch} {result.variant}: {seconds:.1f} s, {cell(result)}", flush=True
                )
    return found


def use_cache(folder: str) -> None:
    """Keep compiled kernels in this folder, so that none is taken from an earlier run."""
    os.environ["TRITON_CACHE_DIR"] = folder


def compile_one(arch: str, name: str) -> tuple[Compiled, float]:
    """Compile a variant, and say how long that took."""
    from attn_triton.kernels.compiling import compile_variant
    from attn_triton.variants import all_variants

    variant = next(found for found in all_variants(arch) if found.name == name)
    started = time.perf_counter()
    result = Compiled(arch=arch, variant=name, is_main=variant.is_main)
    try:
        kernel = compile_variant(variant, arch)
    except Exception as error:  # noqa: BLE001  whatever the compiler says is the result
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return replace(result, error=lines[-1][:200]), time.perf_counter() - started
    registers, spilled = usage_of(kernel.asm)
    result = replace(
        result,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
    )
    return result, time.perf_counter() - started


def usage_of(asm: dict[str, Any]) -> tuple[int, int]:
    """Return registers per thread and bytes per thread that did not fit in them."""
    if "cubin" in asm:
        return nvidia_usage(resource_usage(asm["cubin"]))
    return amd_usage(asm["amdgcn"])


def resource_usage(cubin: bytes) -> str:
    """What cuobjdump, which comes with Triton, says about a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def nvidia_usage(text: str) -> tuple[int, int]:
    """Registers, and the stack: Triton's kernels have nothing on it but spilled registers."""
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def amd_usage(text: str) -> tuple[int, int]:
    """Vector registers, and 4 bytes for each that was spilled or the scratch memory if more."""
    numbers = {
        name: int(value)
        for name, value in re.findall(r"\.(\w+):\s+(\d+)$", text, flags=re.MULTILINE)
    }
    spilled = 4 * numbers.get("vgpr_spill_count", 0)
    registers = numbers["vgpr_count"]  # on CDNA the accumulation registers are counted in it
    return registers, max(spilled, numbers.get("private_segment_fixed_size", 0))


# Judging


def problems(found: Iterable[Compiled]) -> Iterator[str]:
    """What passes a limit: an error, too much shared memory, spills of a main variant."""
    for item in found:
        where = f"{item.variant} for {item.arch}"
        limits = LIMITS[item.arch]
        if item.error:
            yield f"{where} does not compile: {item.error}"
        if item.shared_bytes > limits.shared_bytes:
            yield (
                f"{where} needs {item.shared_bytes} bytes of shared memory; "
                f"{limits.gpus} has {limits.shared_bytes}"
            )
        if item.is_main and item.spilled_bytes:
            yield f"{where} spills {item.spilled_bytes} bytes per thread: choose a smaller tile"


def stale(found: Iterable[Compiled], recorded: dict[str, Any], shown: str) -> Iterator[str]:
    """How the record differs from what is compiled: in names, and in the page made from it."""
    now = {(item.arch, item.variant) for item in found if item.is_main}
    kept = {(item["arch"], item["variant"]) for item in recorded["compiled"] if item["is_main"]}
    for arch, name in sorted(now ^ kept):
        missing = "not in the table" if (arch, name) in now else "no longer compiled"
        yield f"{name} for {arch} is {missing}; run: {COMMAND}"
    if page(recorded) != shown:
        yield f"{PAGE.name} is not what {RECORD.name} gives; run: {COMMAND}"


# Showing


def page(recorded: dict[str, Any]) -> str:
    """The page of docs/ that shows a record."""
    found = [Compiled(**item) for item in recorded["compiled"]]
    archs = [arch for arch in LIMITS if any(item.arch == arch for item in found)]
    limits = [
        f"| {arch} | {LIMITS[arch].gpus} | {LIMITS[arch].shared_bytes // KIB} KiB | "
        f"{LIMITS[arch].registers} | {LIMITS[arch].source} |"
        for arch in archs
    ]
    spilling = sum(1 for item in found if item.spilled_bytes)
    preface = PREFACE.format(
        triton=recorded["triton"], count=len(found), spilling=spilling, record=RECORD.name
    )
    lines = [
        *(preface, "", "| architecture | such as | shared memory | registers | limits from |"),
        *("|---|---|---|---|---|", *limits, ""),
        *table("What a serving step usually runs", [x for x in found if x.is_main], archs),
        *table("The rest", [x for x in found if not x.is_main], archs),
    ]
    return "\n".join(lines).rstrip() + "\n"


def table(title: str, found: list[Compiled], archs: list[str]) -> Iterator[str]:
    """The lines of a table of variants by architectures."""
    if not found:
        return
    cells = {(item.variant, item.arch): cell(item) for item in found}
    yield from (f"## {title}", "", f"| variant | {' | '.join(archs)} |")
    yield "|---" * (len(archs) + 1) + "|"
    for name in dict.fromkeys(item.variant for item in found):
        yield f"| {name} | {' | '.join(cells.get((name, arch), '-') for arch in archs)} |"
    yield ""


def cell(item: Compiled) -> str:
    """What is shown of one kernel."""
    if item.error:
        return f"refused: {item.error}"
    shared = f"{item.shared_bytes / KIB:.0f}K" if item.shared_bytes >= KIB else "0"
    spilled = f" **+{item.spilled_bytes}B**" if item.spilled_bytes else ""
    return f"{item.registers} {shared}{spilled}"


def write(found: list[Compiled], triton: str) -> None:
    """Write the record and its page; architectures that were not compiled now keep their lines."""
    kept = []
    if RECORD.is_file():
        recorded = json.loads(RECORD.read_text(encoding="utf-8"))
        now = {item.arch for item in found}
        kept = [Compiled(**item) for item in recorded["compiled"] if item["arch"] not in now]
    places = {arch: index for index, arch in enumerate(LIMITS)}
    lines = sorted([*found, *kept], key=lambda item: places[item.arch])
    recorded = {"triton": triton, "compiled": [asdict(item) for item in lines]}
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(recorded), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Compile, and write or check; 1 if something passes a limit or is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="the main variants; write nothing")
    parser.add_argument("--arch", action="append", choices=LIMITS, help="these alone")
    parser.add_argument("--jobs", type=int, help="how many at once (the number of cores)")
    parser.add_argument("--verbose", action="store_true", help="print each kernel as it comes")
    options = parser.parse_args(arguments)
    import triton

    archs = options.arch or list(LIMITS)
    started = time.perf_counter()
    found = compile_all(archs, main_only=options.check, jobs=options.jobs, verbose=options.verbose)
    wrong = list(problems(found))
    if not options.check:
        write(found, triton.__version__)
    elif not options.arch:
        recorded = json.loads(RECORD.read_text(encoding="utf-8"))
        wrong += stale(found, recorded, PAGE.read_text(encoding="utf-8"))
    print("\n".join(wrong) or "no kernel passes a limit")
    seconds = time.perf_counter() - started
    print(f"{len(found)} kernels with Triton {triton.__version__} in {seconds:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
