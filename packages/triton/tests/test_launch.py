"""Which handle a call takes, and what Triton's launcher is then given."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_triton import launch
from attn_triton.launch import AlignedLaunch, Handle, Launcher, vector_width


@pytest.mark.parametrize(
    ("dtype", "numbers", "width"),
    [
        (torch.bfloat16, (1024, 128), 8),
        (torch.bfloat16, (0, 128), 8),
        (torch.bfloat16, (1028, 128), 4),
        (torch.float32, (128,), 4),
        (torch.uint8, (48,), 16),
        (torch.uint8, (33,), 1),
        (torch.bfloat16, (), 8),
    ],
)
def test_vector_width(dtype: torch.dtype, numbers: tuple[int, ...], width: int) -> None:
    assert vector_width(dtype, numbers) == width


class Recorder:
    """Stands for Triton's compiled kernel and its driver, and keeps the launches."""

    function, packed_metadata = "function", (4, 1, 0)

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def run(self, *args: object) -> None:
        self.launches.append(args)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The kernel that every compilation gives, on device 0 whose current stream is 77."""
    recorder = Recorder()
    monkeypatch.setattr(launch, "_runtime", lambda: (lambda index: 77, lambda: None))
    monkeypatch.setattr(launch, "_made_current", lambda device: nullcontext())
    call = (recorder.run, ("function", (4, 1, 0), None, None, None), (None, None))
    monkeypatch.setattr(Launcher, "_compile", lambda self, args, index: Handle(*call, index))
    monkeypatch.setattr(Launcher, "__init__", _init_without_triton)
    return recorder


def _init_without_triton(self: Launcher) -> None:
    self._kernel, self._constants, self._handles = SimpleNamespace(), {}, {}
    self.is_interpreted = False


def handles_of(launcher: Launcher) -> int:
    return len(launcher._handles)


def test_a_launch_passes_addresses_and_skips_the_constants(compiled: Recorder) -> None:
    x = torch.empty(8)
    Launcher()((5, 2, 1), x, 3, None, 0.5)
    (launched,) = compiled.launches
    assert launched[:9] == (5, 2, 1, 77, "function", (4, 1, 0), None, None, None)
    assert launched[9:] == (x.data_ptr(), 3, None, 0.5, None, None)


def test_an_empty_grid_launches_nothing(compiled: Recorder) -> None:
    Launcher()((5, 0, 1), torch.empty(8))
    assert not compiled.launches


@pytest.mark.parametrize(
    ("other", "is_other"),
    [
        pytest.param((torch.empty(64), 7, torch.empty(4)), False, id="same class"),
        pytest.param((torch.empty(64)[4:], 7, torch.empty(4)), False, id="16 bytes further"),
        pytest.param((torch.empty(64)[1:], 7, torch.empty(4)), True, id="4 bytes further"),
        pytest.param((torch.empty(64), 7, torch.empty(9)[2:]), True, id="another unaligned"),
        pytest.param((torch.empty(64).half(), 7, torch.empty(4)), True, id="dtype"),
        pytest.param((torch.empty(64), 7, None), True, id="absent"),
        pytest.param((torch.empty(64), 1, torch.empty(4)), False, id="the number 1"),
        pytest.param((torch.empty(64), 2**40, torch.empty(4)), False, id="a large number"),
    ],
)
def test_what_takes_another_handle(
    other: tuple[Any, ...], is_other: bool, compiled: Recorder
) -> None:
    launcher = Launcher()
    launcher((1, 1, 1), torch.empty(64), 7, torch.empty(4))
    launcher((1, 1, 1), *other)
    assert handles_of(launcher) == 1 + is_other
    assert len(compiled.launches) == 2


def test_aligned_calls_find_their_handle_and_others_the_launcher(compiled: Recorder) -> None:
    launcher = Launcher()
    launch_aligned = AlignedLaunch(launcher)
    memory = torch.empty(64)
    for first in (memory, memory[4:], memory[1:], memory[8:]):
        launch_aligned((1, 1, 1), (first, memory), (5,))
    assert handles_of(launcher) == 2
    given = [launched[9:12] for launched in compiled.launches]
    base = memory.data_ptr()
    assert given == [(base + offset, base, 5) for offset in (0, 16, 4, 32)]


def test_needs_a_tensor(compiled: Recorder) -> None:
    with pytest.raises(TypeError, match="none of the arguments is a tensor"):
        Launcher()((1, 1, 1), 3, None)


@pytest.mark.interpreter
def test_the_interpreter_runs_the_kernel_itself() -> None:
    from attn_triton_kernels import copy

    source, out = torch.arange(8.0), torch.zeros(8)
    launcher = Launcher(copy, {})
    launcher((0, 1, 1), source, out)
    assert not out.any()
    launcher((1, 1, 1), source, out)
    assert torch.equal(out, source)
    with pytest.raises(RuntimeError, match="no handle"):
        launcher.handle(source, out)


@pytest.mark.cuda
def test_alignments_and_streams_on_a_gpu() -> None:
    from attn_triton_kernels import copy

    launcher = Launcher(copy, {}, num_warps=1)
    source = torch.arange(64.0, device="cuda")
    for offset in range(9):  # every alignment, each through a handle of its own or a kept one
        out = torch.zeros(72, device="cuda")
        launcher((1, 1, 1), source[offset:], out[offset:])
        assert torch.equal(out[offset : offset + 8], source[offset : offset + 8])
        assert out.count_nonzero() == 8 - (offset == 0)
    assert handles_of(launcher) == 2
    other = torch.cuda.Stream()
    out = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(10_000_000)
        source.add_(1)
        launcher.handle(source, out)((1, 1, 1), source, out)
    other.synchronize()
    assert torch.equal(out, torch.arange(1.0, 9, device="cuda"))


@pytest.mark.cuda
def test_every_device_has_a_handle_of_its_own() -> None:
    from attn_triton_kernels import copy

    last = torch.cuda.device_count() - 1
    if last == 0:
        pytest.skip("one GPU alone")
    launcher = Launcher(copy, {}, num_warps=1)
    for index in (0, last, 0):
        source = torch.arange(8.0, device=f"cuda:{index}")
        out = torch.zeros_like(source)
        launcher((1, 1, 1), source, out)
        assert torch.equal(out, source)
    assert handles_of(launcher) == 2
