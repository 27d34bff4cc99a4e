"""What the installed distributions say of themselves: version, siblings, entry points."""

from __future__ import annotations

import inspect
from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement

VERSION = (Path(__file__).resolve().parents[1] / "VERSION").read_text(encoding="utf-8").strip()
DISTRIBUTIONS = (
    "attn-bench",
    "attn-cli",
    "attn-conformance",
    "attn-cpu",
    "attn-cuda",
    "attn-example-plugin",
    "attn-rocm",
    "attn-shared",
    "attn-torch",
    "attn-transformers",
    "attn-triton",
    "attn-vllm",
    "attn-xpu",
)
PLATFORMS = {"cpu", "cuda", "rocm", "xpu"}
TORCH_BACKENDS = {"FLEX_ATTENTION", "TORCH_SDPA"}


def requirements(name: str) -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires(name) or []]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_version_is_the_projects(name: str) -> None:
    assert metadata.version(name) == VERSION


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_siblings_are_pinned_exactly(name: str) -> None:
    siblings = [item for item in requirements(name) if item.name.startswith("attn-")]
    assert [str(item.specifier) for item in siblings] == [f"=={VERSION}"] * len(siblings)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_torch_has_a_floor_and_no_cap(name: str) -> None:
    torch = [item for item in requirements(name) if item.name == "torch"]
    assert all(str(item.specifier) == ">=2.8" for item in torch)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_carries_its_types_and_licence(name: str) -> None:
    assert resources.files(name.replace("-", "_")).joinpath("py.typed").is_file()
    assert metadata.metadata(name)["License-Expression"] == "Apache-2.0"


def test_shared_requires_torch_alone() -> None:
    assert [item.name for item in requirements("attn-shared")] == ["torch"]


def test_vendors_are_extras_never_requirements() -> None:
    for platform in PLATFORMS:
        always = {item.name for item in requirements(f"attn-{platform}") if item.marker is None}
        assert always <= {"attn-shared", "attn-torch", "attn-triton", "packaging", "torch"}


def test_pre_releases_are_named_so_that_pip_takes_them() -> None:
    wanted = {"flash-attn-4": "attn-cuda", "amd-aiter": "attn-rocm"}
    for library, name in wanted.items():
        (found,) = [item for item in requirements(name) if item.name == library]
        assert found.specifier.prereleases


def test_each_platform_is_an_entry_point_that_loads() -> None:
    points = metadata.entry_points(group="attn.platforms")
    assert {point.name for point in points} >= PLATFORMS
    for point in points:
        if point.name in PLATFORMS:
            assert inspect.isclass(point.load())


def test_torch_backends_are_entry_points_that_load() -> None:
    points = metadata.entry_points(group="attn.backends")
    assert {point.name for point in points} >= TORCH_BACKENDS
    for name in TORCH_BACKENDS:
        (point,) = points.select(name=name)
        assert point.load().get_name() == name


def test_the_command_is_installed() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="attn")
    assert callable(script.load())
