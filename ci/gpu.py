"""Prove a platform on a GPU machine that has its own torch and no network.

Where there is a network (and a checkout):

    python ci/start.py dist
    python ci/gpu.py pack --into gpu-pack --wheels dist --libraries tests.tar.xz fa3.tar.xz

On the GPU machine, in the same checkout, with gpu-pack beside it:

    python ci/gpu.py run --pack gpu-pack --room cuda --backend TORCH_SDPA --out results

`pack` lays the built wheels and the archives of installed files (test tools, vendor libraries) into
one folder. `run` unpacks them into a folder of its own, never into the machine's environment, and
then, each as a step whose output is kept: the platform's session without a virtual environment, the
contract's rules on each backend, a memory checker over a few of them where the tool starts, and the
bench. A step that fails does not keep the next from running. Under --out are left summary.json, the
commands' own JSON, and a log per step; the exit code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Step", "StepResult", "main", "pack", "run_steps", "steps", "unpack"]

ROOT = Path(__file__).resolve().parents[1]
SCHEMA_VERSION = 1
SANITIZED_RULES = ("causal", "padded_requests", "unread_blocks", "cache_update")
TAIL_LINES = 12
# Python 3.11 has filters of archives from 3.11.4 on.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command; `absent` says why it cannot be tried on this machine."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    absent: str = ""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What became of a step: "passed", "failed", "out of time" or "not run"."""

    name: str
    command: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    tail: list[str] = field(default_factory=list)


def pack(into: Path, wheels: Path, libraries: Sequence[Path]) -> None:
    """Copy wheels and archives into one folder that can travel.

    Raises:
        SystemExit: there is no wheel, or an archive is missing.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"{wheels} holds no wheel; run: python ci/start.py dist")
    absent = [str(path) for path in libraries if not path.is_file()]
    if absent:
        raise SystemExit(f"no such archive: {', '.join(absent)}")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for path in (*found, *libraries):
        shutil.copy2(path, into / path.name)
    size = sum(path.stat().st_size for path in into.iterdir())
    print(f"{into}: {len(found)} wheels, {len(libraries)} archives, {size / 2**20:.1f} MiB")


def unpack(packed: Path, site: Path) -> list[str]:
    """Unpack everything into one folder of packages, entry points included; returns the names.

    A wheel is an archive of installed files; unpacking it needs no pip, and cannot reach for a
    network.
    """
    site.mkdir(parents=True, exist_ok=True)
    for path in sorted(packed.glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(site, **SAFELY)
    for path in sorted(packed.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(site)
    return sorted(path.name for path in packed.iterdir())


def environment(site: Path) -> dict[str, str]:
    """The variables that let child processes see the packages."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def attn(*arguments: str) -> tuple[str, ...]:
    """A command of the attn command line, by the interpreter that runs this."""
    return (sys.executable, "-m", "attn_cli", *arguments)


def steps(options: argparse.Namespace, out: Path) -> Iterator[Step]:
    """The steps in order."""
    info = attn("info", "--probe", "--json")
    yield Step(name="info", command=info, limit_s=options.limit)
    yield session_step(options)
    for backend in options.backend:
        yield verify_step(backend, options, out)
    for backend in options.backend:
        yield bench_step(backend, options, out)
    for backend in options.backend:  # last: it is slow, and the rest does not wait for it
        yield sanitizer_step(backend, options)


def verify_step(backend: str, options: argparse.Namespace, out: Path) -> Step:
    """The contract's rules on the device."""
    record = ("--output", str(out / f"verify-{backend}.json"))
    command = attn("verify", backend, "--device", options.device, "--depth", options.depth, *record)
    return Step(name=f"verify {backend}", command=command, limit_s=options.limit)


def bench_step(backend: str, options: argparse.Namespace, out: Path) -> Step:
    """The bench, beside the peers that were named."""
    command = attn("bench", "--backend", backend, "--device", options.device, "--cold")
    for flag, values in (("--peer", options.peer), ("--workload", options.workload)):
        command += tuple(part for value in values for part in (flag, value))
    command += ("--budget", str(int(0.8 * options.limit)))
    command += ("--output", str(out / f"bench-{backend}.json"))
    return Step(name=f"bench {backend}", command=command, limit_s=options.limit)


def session_step(options: argparse.Namespace) -> Step:
    """The platform's session, without a virtual environment; it is many steps in one."""
    room = options.room
    command = (sys.executable, "-m", "nox", "--no-venv", "-s", room, "--", "--require-hardware")
    has_nox = subprocess.run([sys.executable, "-c", "import nox"], capture_output=True, check=False)
    absent = "" if has_nox.returncode == 0 else "nox is not among the packages"
    return Step(name=f"session {room}", command=command, limit_s=2 * options.limit, absent=absent)


def sanitizer_step(backend: str, options: argparse.Namespace) -> Step:
    """A few small rules under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    rules = [part for rule in SANITIZED_RULES for part in ("--rule", rule)]
    command = (
        "compute-sanitizer",
        "--target-processes=all",
        "--error-exitcode=9",
        *attn("verify", backend, "--device", options.device, *rules),
    )
    return Step(
        name=f"memory check {backend}",
        command=command,
        limit_s=options.limit,
        absent="" if tool else "compute-sanitizer is not on this machine",
    )


def run_steps(planned: Iterator[Step], out: Path, env: dict[str, str]) -> list[StepResult]:
    """Run each step and keep its output; a summary is written after each."""
    results: list[StepResult] = []
    for step in planned:
        print(f"== {step.name}", flush=True)
        results.append(run_step(step, out, env))
        print(f"   {results[-1].status} in {results[-1].seconds:.0f} s {results[-1].reason}")
        write_summary(results, out)
    return results


def run_step(step: Step, out: Path, env: dict[str, str]) -> StepResult:
    """Run one step within its limit."""
    words = " ".join(step.command).replace(sys.executable, "python")
    if step.absent:
        return StepResult(name=step.name, command=words, status="not run", reason=step.absent)
    log = out / f"{step.name.replace(' ', '-')}.log"
    start, reason = time.monotonic(), ""
    with log.open("w", encoding="utf-8") as stream:
        try:
            code = subprocess.run(
                step.command,
                cwd=ROOT,
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=step.limit_s,
                check=False,
            ).returncode
            status = "passed" if code == 0 else "failed"
            reason = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            status, reason = "out of time", f"limit {step.limit_s:.0f} s"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return StepResult(
        name=step.name,
        command=words,
        status=status,
        seconds=round(time.monotonic() - start, 1),
        reason=reason,
        tail=lines[-TAIL_LINES:],
    )


def write_summary(results: Sequence[StepResult], out: Path) -> None:
    """Write what is known so far, whole or not at all."""
    record = {"schema_version": SCHEMA_VERSION, "steps": [asdict(result) for result in results]}
    partial = out / "summary.json.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / "summary.json")


def parser() -> argparse.ArgumentParser:
    """The two commands and their options."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="lay wheels and archives into one folder")
    packing.add_argument("--into", type=Path, required=True)
    packing.add_argument("--wheels", type=Path, default=ROOT / "dist")
    packing.add_argument("--libraries", type=Path, nargs="*", default=[])
    running = commands.add_parser("run", help="prove a platform on this machine")
    running.add_argument("--pack", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--site", type=Path, help="where to unpack; default OUT/../site")
    running.add_argument("--room", choices=("cuda", "rocm", "xpu"), default="cuda")
    running.add_argument("--device", default="cuda:0")
    running.add_argument("--backend", action="append", default=[])
    running.add_argument("--peer", action="append", default=[])
    running.add_argument("--workload", action="append", default=[])
    running.add_argument("--depth", choices=("quick", "full"), default="quick")
    running.add_argument("--limit", type=float, default=600.0, help="seconds for one long step")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, or run; 1 if a step failed."""
    options = parser().parse_args(arguments)
    if options.command == "pack":
        pack(options.into, options.wheels, options.libraries)
        return 0
    site = options.site or options.out.parent / "site"
    options.out.mkdir(parents=True, exist_ok=True)
    unpacked = unpack(options.pack, site)
    print(f"unpacked into {site}: {', '.join(unpacked)}")
    env = environment(site)
    os.environ["PYTHONPATH"] = env["PYTHONPATH"]  # for the look at what is importable
    results = run_steps(steps(options, options.out), options.out, env)
    failed = [result.name for result in results if result.status in ("failed", "out of time")]
    passed = sum(result.status == "passed" for result in results)
    print(f"{passed} passed, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
