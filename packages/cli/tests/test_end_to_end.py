from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

MODEL = ["--head-size", "128", "--num-heads", "32", "--num-kv-heads", "8", "--block-size", "16"]

BROKEN = "raise RuntimeError('this plugin is broken')\n"


def run(*words: str, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with a folder of plugins if one is given."""
    env = {**os.environ, **environ}
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "attn_cli", *words]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_entry_point_is_installed_and_answers_for_a_device_that_is_not_here() -> None:
    script = Path(sysconfig.get_path("scripts")) / "attn"
    command = [str(script), "select", "--device", "h200", *MODEL, "--dtype", "bfloat16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer.keys() >= {"schema_version", "chosen", "kv_layout", "decided_by", "verdicts"}
    assert answer["device"]["name"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("entry_points", "shown"),
    [
        ("[attn.backends]\nBROKEN = broken_plugin:Backend\n", "BROKEN = broken_plugin:Backend"),
        ("[attn.platforms]\nodd = broken_plugin:Odd\n", "odd = broken_plugin:Odd"),
    ],
)
def test_a_plugin_that_fails_to_import_disables_itself_only(
    install: Callable[..., Path], entry_points: str, shown: str
) -> None:
    path = install("broken-dist", "broken_plugin", BROKEN, entry_points)
    info = run("info", "--json", path=path)
    assert info.returncode == 0, info.stderr
    (failure,) = json.loads(info.stdout)["failures"]
    assert (failure["entry_point"], failure["distribution"]) == (shown, "broken-dist")
    assert failure["version"] == "1.5"
    assert "RuntimeError: this plugin is broken" in failure["error"]
    done = run("select", "--device", "h200", *MODEL, "--json", path=path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["chosen"] != "BROKEN"
    assert any("this plugin is broken" in note for note in answer["notes"])


def test_a_broken_backend_that_is_named_is_refused_with_its_words(
    install: Callable[..., Path],
) -> None:
    entry_points = "[attn.backends]\nBROKEN = broken_plugin:Backend\n"
    path = install("broken-dist", "broken_plugin", BROKEN, entry_points)
    done = run("select", *MODEL, "--backend", "BROKEN", path=path)
    assert done.returncode == 4
    assert "this plugin is broken" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_distributions_with_one_backend_are_both_named(
    install: Callable[..., Path],
) -> None:
    entry_points = "[attn.backends]\nTWICE = broken_plugin:Backend\n"
    first = install("first-dist", "broken_plugin", BROKEN, entry_points)
    second = install("second-dist", "broken_plugin", BROKEN, entry_points.replace("B", "C"))
    done = run("list", "--json", path=first, PYTHONPATH=str(second))
    assert done.returncode == 0, done.stderr
    row = next(r for r in json.loads(done.stdout)["backends"] if r["name"] == "TWICE")
    assert row["error"]["class"] == "DuplicateNameError"
    assert "first-dist" in row["error"]["message"]
    assert "second-dist" in row["error"]["message"]


def test_a_third_partys_backend_is_found_and_can_be_named(
    install: Callable[..., Path], paged16_source: str
) -> None:
    entry_points = "[attn.backends]\nPAGED16 = paged16:Paged16\n"
    path = install("paged16-dist", "paged16", paged16_source, entry_points)
    done = run("select", "--device", "cpu", *MODEL, "--backend", "PAGED16", "--json", path=path)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["chosen"] == "PAGED16"


def test_what_a_selection_imports() -> None:
    """Beyond torch's own import: no compiler, no table, no vendor; and no torch for the help."""
    code = """
import contextlib, io, sys
from attn_cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
assert "torch" not in sys.modules, "help imports torch"
for name in [n for n in sys.modules if n.split(".")[0] == "rich"]:
    del sys.modules[name]
import torch
before = set(sys.modules)
with contextlib.redirect_stdout(io.StringIO()):
    for device in (["--device", "h200"], []):
        assert main(["select", *device, "--head-size", "64", "--num-heads", "4", "--json"]) == 0
heavy = {"torch", "rich", "numpy", "transformers", "triton", "flash_attn", "flashinfer", "aiter"}
print(sorted(n for n in set(sys.modules) - before if n.split(".")[0] in heavy))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "attn_cli", "list", "--all", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        words = process.stderr.read()
    assert (process.returncode, words) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full device of Linux")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_disk_under_stdout_is_said_in_one_line(form: list[str]) -> None:
    command = [sys.executable, "-m", "attn_cli", "select", "--device", "h200", *MODEL, *form]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "Error: the answer cannot be written (No space left on device).\n"


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_ctrl_c_ends_it_with_one_word(install: Callable[..., Path]) -> None:
    # a job in the background inherits a SIGINT that is ignored
    source = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    entry_points = "[attn.backends]\nSLOW = slow_plugin:Backend\n"
    path = install("slow-dist", "slow_plugin", source, entry_points)
    done = run("list", path=path)
    assert (done.returncode, done.stdout, done.stderr) == (
        128 + signal.SIGINT,
        "",
        "interrupted\n",
    )


def test_tables_are_plain_where_there_is_no_terminal() -> None:
    done = run("explain", "--device", "h200", *MODEL, COLUMNS="80")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_explain_tells_which_kernels_decode_and_prefill_latents() -> None:
    done = run("explain", "--device", "h200", "--mla", "--num-heads", "128", COLUMNS="100")
    assert "decodes: the dense kernels of flash_mla" in done.stdout
    assert "prefills: FlashAttention 3" in done.stdout
