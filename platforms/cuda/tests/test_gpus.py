"""Which GPUs a CUDA process sees: order, UUIDs, MIG, what CUDA_VISIBLE_DEVICES hides."""

from __future__ import annotations

import dataclasses

import pytest

from attn_cuda.gpus import Gpu, VisibleGpus, visible_gpus
from attn_shared.visible_devices import parse_visible_devices

GIB = 2**30


def h200(number: int) -> Gpu:
    return Gpu(
        uuid=f"GPU-{number:08x}-0000-0000-0000-000000000000",
        name="NVIDIA H200",
        capability=(9, 0),
        memory_bytes=141 * GIB,
        compute_units=132,
        pci_bus_id=f"00000000:{number:02X}:00.0",
    )


def display(number: int) -> Gpu:
    return dataclasses.replace(
        h200(number), name="NVIDIA RTX A400", capability=(8, 6), memory_bytes=4 * GIB
    )


def mig_slice(gpu: Gpu, instance: int) -> Gpu:
    return Gpu(
        uuid=f"MIG-{instance:08x}-1111-0000-0000-000000000000",
        name=f"{gpu.name} MIG 1g.18gb",
        capability=gpu.capability,
        memory_bytes=18 * GIB,
        compute_units=16,
        pci_bus_id=gpu.pci_bus_id,
        gpu_instance=instance,
        compute_instance=0,
    )


def divided(number: int) -> Gpu:
    gpu = h200(number)
    slices = (mig_slice(gpu, 16 * number + 1), mig_slice(gpu, 16 * number + 2))
    return dataclasses.replace(gpu, is_mig_enabled=True, mig_devices=slices)


def see(gpus: list[Gpu], value: str | None, order: str | None = None) -> VisibleGpus:
    return visible_gpus(gpus, parse_visible_devices(value), order)


def uuids(seen: VisibleGpus) -> list[str]:
    return [gpu.uuid[4:12] for gpu in seen.gpus]


def test_without_the_variable_all_are_seen_in_pci_order() -> None:
    seen = see([h200(3), h200(1), h200(2)], None)
    assert uuids(seen) == ["00000001", "00000002", "00000003"]
    assert seen.is_order_known
    assert seen.problem == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2,0", ["00000003", "00000001"]),
        ("GPU-00000002", ["00000002"]),
        ("GPU-00000003-0000-0000-0000-000000000000,1", ["00000003", "00000002"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_variable_filters_and_orders(value: str, expected: list[str]) -> None:
    seen = see([h200(1), h200(2), h200(3)], value)
    assert uuids(seen) == expected
    assert seen.problem == ""


@pytest.mark.parametrize(
    ("value", "expected", "words"),
    [
        ("1,7,0", ["00000002"], "'7' names no GPU"),
        ("0,GPU-deadbeef,1", ["00000001"], "'GPU-deadbeef' names no GPU"),
        ("0,x,1", ["00000001"], "'x'"),
        ("GPU-0000000", [], "'GPU-0000000' names no GPU"),  # the beginning of several
    ],
)
def test_the_list_ends_at_the_first_entry_that_names_nothing(
    value: str, expected: list[str], words: str
) -> None:
    seen = see([h200(1), h200(2), h200(3)], value)
    assert uuids(seen) == expected
    assert words in seen.problem


def test_unequal_gpus_have_no_known_order() -> None:
    mixed = [display(1), h200(2)]
    assert not see(mixed, None).is_order_known
    assert not see(mixed, "0").is_order_known
    assert not see(mixed, None, "FASTEST_FIRST").is_order_known


def test_unequal_gpus_in_pci_order_or_by_uuid_are_known() -> None:
    mixed = [display(1), h200(2)]
    by_pci = see(mixed, "1", "PCI_BUS_ID")
    assert by_pci.is_order_known
    assert [gpu.name for gpu in by_pci.gpus] == ["NVIDIA H200"]
    by_uuid = see(mixed, "GPU-00000002,GPU-00000001")
    assert by_uuid.is_order_known
    assert [gpu.name for gpu in by_uuid.gpus] == ["NVIDIA H200", "NVIDIA RTX A400"]


def test_a_mig_device_is_found_by_uuid_with_its_own_memory() -> None:
    seen = see([divided(1), h200(2)], "MIG-00000012-1111-0000-0000-000000000000")
    (gpu,) = seen.gpus
    assert (gpu.memory_bytes, gpu.compute_units, gpu.gpu_instance) == (18 * GIB, 16, 18)
    assert seen.is_order_known


@pytest.mark.parametrize("parent", ["GPU-00000001-0000-0000-0000-000000000000"])
def test_a_mig_device_is_found_by_its_instances(parent: str) -> None:
    (gpu,) = see([divided(1)], f"MIG-{parent}/18/0").gpus
    assert gpu.gpu_instance == 18
    missing = see([divided(1)], f"MIG-{parent}/19/0")
    assert missing.gpus == ()
    assert "/19/0' names no GPU" in missing.problem


@pytest.mark.parametrize("value", [None, "0", "0,1", "MIG-00000011"])
def test_a_process_sees_one_mig_device_and_then_no_whole_gpu(value: str | None) -> None:
    seen = see([divided(1), h200(2)], value, "PCI_BUS_ID")
    assert [gpu.gpu_instance for gpu in seen.gpus] == [17]


def test_a_whole_gpu_beside_a_divided_one_can_be_chosen() -> None:
    assert uuids(see([divided(1), h200(2)], "1", "PCI_BUS_ID")) == ["00000002"]


def test_a_gpu_in_mig_mode_without_mig_devices_is_not_usable() -> None:
    empty = dataclasses.replace(h200(1), is_mig_enabled=True)
    assert uuids(see([empty, h200(2)], None, "PCI_BUS_ID")) == ["00000002"]


def test_equally_divided_gpus_are_alike_and_differently_divided_ones_are_not() -> None:
    assert not divided(1).is_like(h200(2))
    assert h200(1).is_like(h200(2))
