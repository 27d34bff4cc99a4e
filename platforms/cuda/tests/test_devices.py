"""Facts of the visible GPUs: from NVML, in CUDA's order where GPUs differ."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from attn_cuda._vendor.nvml import DriverUnavailableError
from attn_cuda.devices import facts_of, find_visible
from attn_cuda.gpus import DriverReading, Gpu
from attn_shared.device import Fp8Format

H200 = Gpu(
    uuid="GPU-aaaa",
    name="NVIDIA H200",
    capability=(9, 0),
    memory_bytes=150_754_820_096,
    compute_units=132,
    pci_bus_id="00000000:18:00.0",
)
A400 = Gpu(
    uuid="GPU-bbbb",
    name="NVIDIA RTX A400",
    capability=(8, 6),
    memory_bytes=4_294_967_296,
    compute_units=6,
    pci_bus_id="00000000:01:00.0",
)


def reading(*gpus: Gpu, problems: tuple[str, ...] = ()) -> DriverReading:
    return DriverReading(
        source="NVML",
        driver_version="580.159.04",
        cuda_version=(13, 0),
        gpus=gpus,
        problems=problems,
    )


def never(environ: Mapping[str, str]) -> DriverReading:
    raise AssertionError("the driver must not be asked")


def test_facts_follow_from_the_gpu_and_its_architecture() -> None:
    facts = facts_of(H200, index=0, notes=("from a test",))
    assert (facts.arch, facts.arch_family, facts.fp8) == ("sm_90", "hopper", Fp8Format.E4M3FN)
    assert facts.capability is not None
    assert facts.capability.is_exactly(9, 0)
    assert (facts.memory_bytes, facts.compute_units) == (150_754_820_096, 132)
    assert facts.shared_memory_bytes == 227 * 1024
    assert (facts.index, facts.uuid, facts.notes) == (0, "GPU-aaaa", ("from a test",))
    json.dumps(facts.to_dict())


def test_an_architecture_that_is_too_new_is_described_and_not_guessed() -> None:
    facts = facts_of(Gpu(uuid="GPU-x", name="NVIDIA Next", capability=(15, 0)), index=0, notes=())
    assert (facts.arch, facts.arch_family) == ("sm_150", "unknown")
    assert "shares the host's" in facts.notes[0]


def test_a_mig_device_says_so() -> None:
    mig = Gpu(uuid="MIG-1", name="H200 MIG", capability=(9, 0), memory_bytes=2**34, gpu_instance=1)
    assert "MIG device" in facts_of(mig, index=0, notes=()).notes[0]


def test_equal_gpus_are_numbered_without_asking_cuda() -> None:
    seen = find_visible(reading(H200, H200), {}, never)
    assert [device.index for device in seen.devices] == [0, 1]
    assert seen.devices[0].notes == ("from NVML, driver 580.159.04, CUDA up to 13.0",)


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_VISIBLE_DEVICES": "GPU-bbbb,GPU-aaaa"},
    ],
)
def test_unequal_gpus_whose_order_is_fixed_are_numbered_without_asking_cuda(
    environ: dict[str, str],
) -> None:
    seen = find_visible(reading(A400, H200), environ, never)
    assert [(d.name, d.index) for d in seen.devices] == [("NVIDIA RTX A400", 0), ("NVIDIA H200", 1)]


def test_unequal_gpus_are_numbered_as_cuda_says() -> None:
    asked: list[Mapping[str, str]] = []

    def ask(environ: Mapping[str, str]) -> DriverReading:
        asked.append(environ)
        return DriverReading(
            source="a child", driver_version="", cuda_version=(13, 0), gpus=(H200, A400)
        )

    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    seen = find_visible(reading(A400, H200), environ, ask)
    assert asked == [environ]
    assert [(d.name, d.index) for d in seen.devices] == [("NVIDIA H200", 0), ("NVIDIA RTX A400", 1)]
    assert "in CUDA's own order, asked in a child process" in seen.devices[0].notes


def test_unequal_gpus_without_a_known_order_are_flagged_and_have_no_number() -> None:
    def ask(environ: Mapping[str, str]) -> DriverReading:
        raise DriverUnavailableError("the CUDA driver does not answer: out of memory")

    seen = find_visible(reading(A400, H200), {"CUDA_VISIBLE_DEVICES": "0"}, ask)
    (device,) = seen.devices
    assert device.index is None
    assert any("set CUDA_DEVICE_ORDER=PCI_BUS_ID" in note for note in device.notes)
    assert any("out of memory" in note for note in device.notes)


def test_problems_of_the_variable_and_of_gpus_are_kept() -> None:
    seen = find_visible(
        reading(H200, problems=("GPU 1: lost",)), {"CUDA_VISIBLE_DEVICES": "0,5"}, never
    )
    assert len(seen.devices) == 1
    assert seen.problem.startswith("CUDA_VISIBLE_DEVICES: '5' names no GPU")
    assert seen.problem.endswith("GPU 1: lost")


def test_torch_is_not_asked_while_its_runtime_is_down() -> None:
    # In a process of its own: where there is a GPU, other tests have started the runtime here.
    code = "from attn_cuda.devices import torch_gpus; print(torch_gpus())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "None"
