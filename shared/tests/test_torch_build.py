"""What a torch was built for."""

from __future__ import annotations

import pytest
import torch

from attn_shared.torch_build import Runtime, TorchBuild, is_running


@pytest.mark.parametrize(
    ("build", "runtime"),
    [
        (TorchBuild(version="2.13.0+cpu"), None),
        (TorchBuild(version="2.13.0+cu130", cuda="13.0"), Runtime.CUDA),
        (TorchBuild(version="2.9.0+rocm6.4", hip="6.4.43482"), Runtime.ROCM),
        (TorchBuild(version="2.14.0+xpu", xpu="20260101"), Runtime.XPU),
    ],
)
def test_each_build_serves_its_own_runtime_alone(
    build: TorchBuild, runtime: Runtime | None
) -> None:
    assert build.runtime is runtime
    assert {wanted for wanted in Runtime if build.problem(wanted) is None} == (
        set() if runtime is None else {runtime}
    )


def test_a_rocm_build_that_also_names_cuda_is_rocm() -> None:
    assert TorchBuild(version="2.9", cuda="12.8", hip="6.4").runtime is Runtime.ROCM


def test_problems_name_the_build_and_what_to_install() -> None:
    cpu = TorchBuild(version="2.13.0+cpu").problem(Runtime.CUDA)
    assert cpu is not None
    assert cpu.startswith("torch 2.13.0+cpu is built without CUDA: install torch's CUDA build")
    rocm = TorchBuild(version="2.9.0+rocm6.4", hip="6.4").problem(Runtime.CUDA)
    assert rocm is not None
    assert "is built for ROCm, not CUDA" in rocm


def test_current_is_the_imported_torch() -> None:
    assert TorchBuild.current().version == torch.__version__


@pytest.mark.parametrize("runtime", list(Runtime))
def test_nothing_runs_that_nobody_started(runtime: Runtime) -> None:
    if TorchBuild.current().runtime is not runtime:
        assert not is_running(runtime)


def test_a_runtime_of_this_torch_runs_once_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert is_running(Runtime.ROCM)
    assert not is_running(Runtime.CUDA)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not is_running(Runtime.ROCM)
