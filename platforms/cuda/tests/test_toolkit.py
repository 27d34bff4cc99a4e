"""Which CUDA toolkit lies on a machine, and of which version."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_cuda.toolkit import Toolkit, find_toolkit

NOWHERE = Path("/no/cuda/here")


def toolkit(
    folder: Path, version: int | None = 13000, *, header: str = "include", compiler: bool = True
) -> Path:
    """Lay out a folder as an installer does."""
    (folder / "bin").mkdir(parents=True)
    if compiler:
        (folder / "bin" / "nvcc").touch()
    if version is not None:
        (folder / header).mkdir(parents=True)
        text = f"/* of the driver */\n#define CUDA_VERSION {version}\n"
        (folder / header / "cuda.h").write_text(text)
    return folder


def nothing(name: str) -> str | None:
    return None


def test_none_is_no_error() -> None:
    assert find_toolkit({}, which=nothing, usual=NOWHERE) is None


@pytest.mark.parametrize(
    ("number", "version"), [(13000, (13, 0)), (12090, (12, 9)), (11080, (11, 8))]
)
def test_the_version_is_the_headers(tmp_path: Path, number: int, version: tuple[int, int]) -> None:
    folder = toolkit(tmp_path / "cuda", number)
    found = find_toolkit({}, which=nothing, usual=folder)
    assert found == Toolkit(path=folder, version=version, has_compiler=True)
    assert str(found) == "{}.{} in {}".format(*version, folder)


def test_the_header_of_a_target_counts(tmp_path: Path) -> None:
    folder = toolkit(tmp_path / "cuda", header="targets/x86_64-linux/include")
    found = find_toolkit({}, which=nothing, usual=folder)
    assert found is not None
    assert found.version == (13, 0)


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_the_environment_comes_first(tmp_path: Path, name: str) -> None:
    named = toolkit(tmp_path / "named", 12060)
    usual = toolkit(tmp_path / "usual")
    found = find_toolkit({name: str(named)}, which=nothing, usual=usual)
    assert found is not None
    assert found.version == (12, 6)


def test_a_variable_that_names_no_folder_is_passed_over(tmp_path: Path) -> None:
    usual = toolkit(tmp_path / "usual")
    found = find_toolkit({"CUDA_HOME": str(NOWHERE)}, which=nothing, usual=usual)
    assert found is not None
    assert found.path == usual


def test_the_compiler_on_the_path_leads_to_its_toolkit(tmp_path: Path) -> None:
    folder = toolkit(tmp_path / "cuda-13.0")
    link = tmp_path / "nvcc"
    link.symlink_to(folder / "bin" / "nvcc")
    found = find_toolkit({}, which=lambda name: str(link), usual=NOWHERE)
    assert found is not None
    assert found.path == folder


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = toolkit(tmp_path / "cuda", None, compiler=False)
    found = find_toolkit({}, which=nothing, usual=folder)
    assert found == Toolkit(path=folder, version=None, has_compiler=False)
    assert str(found) == f"of unknown version in {folder}, without nvcc"


def test_a_script_on_the_path_that_stands_elsewhere_leads_nowhere(tmp_path: Path) -> None:
    elsewhere = toolkit(tmp_path / "local", None)
    usual = toolkit(tmp_path / "usual")
    found = find_toolkit({}, which=lambda name: str(elsewhere / "bin" / "nvcc"), usual=usual)
    assert found is not None
    assert found.path == usual
