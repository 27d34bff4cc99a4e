"""Run AITER's own Triton kernel by ROCM_AITER_UNIFIED_ATTN, and compile it, without an AMD GPU.

python ci/run_aiter.py interpret FOLDER   the contract's rules through the real kernel, interpreted
python ci/run_aiter.py compile FOLDER     the kernels of the backend's calls, for each architecture
python ci/run_aiter.py all FOLDER         both, after the wheel was downloaded into the folder

Needs attn-rocm, attn-conformance and Triton, as the session `aiter` has them.

AITER's import asks ROCm for a GPU. Of the wheel only the files of its Triton kernels are taken; the
packages above them are empty here, and two questions to the device are answered for it: the
architecture and the number of compute units. A zip archive of aiter/ops/triton of another release,
named amd_aiter-VERSION.whl, will do as well.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from repository import ROOT

__all__ = ["RULES", "main"]

WHEEL = "amd-aiter==0.1.7.post2.dev18"

ARCHS = {"gfx942": "mi300x", "gfx950": "mi355x"}
"""Architectures, and the preset that stands for each."""

EMPTY = (
    *("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.attention"),
    "aiter.ops.triton._triton_kernels.flash_attn_triton_amd",
)
"""Packages whose own code is left out; the last two are of releases after the wheel."""
COMPUTE_UNITS = 4  # of the interpreted device: few, so that decodes run the kernel in parts as well

RULES = (
    *("causal", "window", "sinks", "alibi", "keyless_rows", "layouts", "drafts", "padded_requests"),
    *("upper_bounds", "strided_inputs", "padded_blocks", "fp8_scales", "fp8_flavours", "scale"),
)
"""Rules of the conformance suite that are run; each case is one call or a few."""

KERNELS = ("kernel_unified_attention_2d", "kernel_unified_attention_3d", "reduce_segments")


def unpack(wheel: Path, folder: Path) -> None:
    """Take what belongs to Triton out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name
            for name in archive.namelist()
            if name.startswith("aiter/ops/triton/") and name.endswith(".py")
        ]
        archive.extractall(folder, wanted)


def make_importable(folder: Path, arch: str) -> ModuleType:
    """Import the Triton call from a folder as if a GPU of this architecture were there."""
    from triton.runtime import driver

    from attn_rocm._vendor import aiter
    from attn_triton.kernels.compiling import target_of

    for name in EMPTY:
        place = folder.joinpath(*name.split("."))
        if place.is_dir():
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(place)]
    target = target_of(arch)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    device = importlib.import_module("aiter.ops.triton.utils.device_info")
    device.get_num_sms = lambda: COMPUTE_UNITS  # type: ignore[attr-defined]
    return sys.modules[aiter.call("unified_attention").__module__]


def interpret(wheel: Path) -> int:
    """Run the rules; return how many cases failed."""
    from attn_conformance.outcome import Status
    from attn_conformance.stubs.suite import run_rules

    mend_interpreter()
    arch = "gfx950"  # the interpreter does not know the fp8 of gfx942
    with tempfile.TemporaryDirectory() as name:
        unpack(wheel, Path(name))
        module = make_importable(Path(name), arch)
        called = count_calls(module)
        outcomes = list(run_rules(subject_of(arch), RULES))
    for outcome in outcomes:
        if outcome.status is Status.FAILED:
            print(f"{outcome.rule} {outcome.case}: {outcome.message}")
    counts = Counter(outcome.status for outcome in outcomes)
    told = ", ".join(f"{count} {status.value}" for status, count in sorted(counts.items()))
    print(f"AITER's Triton kernel for {arch}, interpreted: {told}; launched {dict(called)}")
    unused = [kernel for kernel in KERNELS if not called[kernel]]
    if unused:
        print(f"never launched: {', '.join(unused)}")
    return counts[Status.FAILED] + len(unused)


def mend_interpreter() -> None:
    """Make the interpreter compute as GPUs do, as attn-triton's tests do."""
    path = ROOT / "packages" / "triton" / "tests" / "conftest.py"
    found = importlib.util.spec_from_file_location("attn_triton_conftest", path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} does not load")
    conftest = importlib.util.module_from_spec(found)
    found.loader.exec_module(conftest)
    conftest.mend_interpreter()


class Launcher:
    """Stands for a kernel: `kernel[grid](**arguments)` is noted, and handed on if there is one."""

    def __init__(self, name: str, kernel: Any, notes: list[tuple[str, dict[str, Any]]]) -> None:
        self._name, self._kernel, self._notes = name, kernel, notes

    def __getitem__(self, grid: object) -> Any:
        def launch(**arguments: Any) -> None:
            self._notes.append((self._name, arguments))
            if self._kernel is not None:
                self._kernel[grid](**arguments)

        return launch


def count_calls(module: ModuleType) -> Counter[str]:
    """Return a counter of launches, which goes on counting."""
    called: Counter[str] = Counter()

    class Notes(list[tuple[str, dict[str, Any]]]):
        def append(self, item: tuple[str, dict[str, Any]]) -> None:
            called[item[0]] += 1

    for name in KERNELS:
        setattr(module, name, Launcher(name, getattr(module, name), Notes()))
    return called


def subject_of(arch: str) -> Any:
    """Return what the suite tries: the backend, told that it runs on this architecture."""
    import torch

    from attn_conformance.subject import Subject
    from attn_rocm.backends.rocm_aiter_unified_attn import AiterUnifiedBackend
    from attn_shared.device import preset
    from attn_shared.inventory import Inventory, VendorEntry, VendorStatus

    device = preset(ARCHS[arch])
    inventory = Inventory((VendorEntry(name="aiter", status=VendorStatus.ASSUMED),))
    AiterUnifiedBackend.load_vendor(device, inventory)
    return Subject(
        name=AiterUnifiedBackend.name,
        source="the wheel",
        backend=AiterUnifiedBackend,
        device=torch.device("cpu"),
        facts=device,
        inventory=inventory,
    )


def compile_all(wheel: Path) -> int:
    """Compile what the backend's calls launch; return how many need more shared memory than is.

    How many registers they spill is the library's own affair, and printed.
    """
    from compile_triton import LIMITS, usage_of

    from attn_rocm import _aiter_loaded

    failed = 0
    with tempfile.TemporaryDirectory() as name:
        unpack(wheel, Path(name))
        os.environ["TRITON_CACHE_DIR"] = str(Path(name) / "cache")
        for arch in ARCHS:
            _aiter_loaded.forget()  # one process serves devices of one flavour of fp8
            module = make_importable(Path(name), arch)
            for words, kernel, arguments in launches(module, arch):
                made = compile_kernel(kernel, arguments, arch)
                registers, spilled = usage_of(made.asm)
                shared = made.metadata.shared
                is_within = shared <= LIMITS[arch].shared_bytes
                failed += not is_within
                verdict = "" if is_within else "  PAST A LIMIT"
                print(
                    f"{arch} {words}: {registers} registers, {spilled} bytes spilled, "
                    f"{shared} bytes of shared memory{verdict}"
                )
            for loaded in [item for item in sys.modules if item.partition(".")[0] == "aiter"]:
                del sys.modules[loaded]
    return failed


def launches(module: ModuleType, arch: str) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the kernels that the backend's call launches, for some layers and batches."""
    import torch

    from attn_shared.kv_cache import FullAttentionSpec
    from attn_shared.metadata import CommonAttentionMetadata
    from attn_shared.spec import BuildConfig, LayerSpec

    subject = subject_of(arch)
    real = {name: getattr(module, name) for name in KERNELS}
    notes: list[tuple[str, dict[str, Any]]] = []
    for name in KERNELS:
        setattr(module, name, Launcher(name, None, notes))
    for dtype, stored, size, block, lens, longest in (
        (torch.bfloat16, "auto", 128, 16, [1, 1], 2000),
        (torch.bfloat16, "auto", 128, 64, [1, 300], 2000),
        (torch.bfloat16, "fp8", 128, 64, [1, 1], 2000),
        (torch.bfloat16, "fp8", 128, 16, [1, 300], 2000),
        (torch.float16, "auto", 64, 16, [2, 5], 2000),
        (torch.bfloat16, "auto", 256, 128, [1, 1], 2000),  # the largest tiles, in parts
        (torch.bfloat16, "auto", 256, 128, [1, 1], 500),  # and at once
        (torch.bfloat16, "auto", 256, 128, [1, 300], 500),
    ):
        sizes: dict[str, Any] = {"num_kv_heads": 2, "head_size": size, "head_size_v": size}
        held = dtype if stored == "auto" else subject.facts.fp8_dtype
        cache = FullAttentionSpec(block_size=block, dtype=held, kv_cache_dtype=stored, **sizes)
        spec = LayerSpec(num_heads=8, scale=0.1, dtype=dtype, kv_cache_spec=cache, **sizes)
        build = BuildConfig()
        cpu = torch.device("cpu")
        builder = subject.backend.get_builder_cls()(cache, {"layer": spec}, build, cpu)
        common = CommonAttentionMetadata.from_lengths(
            query_lens=lens,
            seq_lens=[longest, 400],
            block_table=torch.zeros(2, -(-longest // block), dtype=torch.int32),
        )
        query = torch.zeros(sum(lens), 8, size, dtype=dtype)
        layer = Layer()
        impl = subject.backend.get_impl_cls()(spec)
        pages = cache.allocate(1, "cpu")
        impl.forward(layer, query, None, None, pages, builder.build(0, common))
        for name, arguments in notes:
            words = f"{name}, {str(dtype)[6:]} over {stored}, heads of {size}, blocks of {block}, "
            words += f"rows {lens} of {longest} keys"
            yield words, real[name], arguments
        notes.clear()


class Layer:
    """What a layer object holds beside its description."""

    q_scale = k_scale = v_scale = 1.0
    sinks = alibi_slopes = None


def compile_kernel(kernel: Any, arguments: Mapping[str, Any], arch: str) -> Any:
    """Compile a kernel for the arguments of a launch."""
    from attn_triton.kernels import compiling

    compiler_options = ("num_warps", "num_stages", "waves_per_eu")
    options = {name: arguments[name] for name in compiler_options if name in arguments}
    given = {name: value for name, value in arguments.items() if name not in options}
    kinds, constants = {}, {}
    for parameter in kernel.params:
        name = parameter.name
        value = given.get(name, parameter.default)
        if parameter.is_constexpr or value is None:
            constants[name] = value
        else:
            kinds[name] = compiling.kind_of(value, parameter.annotation_type)
    target = compiling.target_of(arch)
    return compiling.compile_kernel(kernel, kinds, constants, target=target, options=options)


def run_all(folder: Path) -> int:
    """Download the wheel where it is not yet, and do both; return how many of them failed."""
    if not list(folder.glob("*.whl")):
        options = ("--quiet", "--no-deps", "--dest", str(folder))
        subprocess.run([sys.executable, "-m", "pip", "download", *options, WHEEL], check=True)
    failed = 0
    for what, is_interpreted in (("interpret", "1"), ("compile", "0")):
        command = [sys.executable, __file__, what, str(folder)]
        environ = {**os.environ, "TRITON_INTERPRET": is_interpreted}
        failed += subprocess.run(command, check=False, env=environ).returncode != 0
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked for; 0 where all of it went well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("all", "interpret", "compile"))
    parser.add_argument("folder", type=Path, help="where the wheel is, or is to be")
    chosen = parser.parse_args(arguments)
    if chosen.what == "all":
        return int(run_all(chosen.folder) > 0)
    (wheel,) = chosen.folder.glob("amd_aiter-*.whl")
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreted != (chosen.what == "interpret"):
        parser.error("set TRITON_INTERPRET=1 to interpret, and not to compile")
    failed = interpret(wheel) if chosen.what == "interpret" else compile_all(wheel)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
