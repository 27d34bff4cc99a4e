"""What is selected for well-known models on every preset, as files that a person can read.

python ci/generate_golden.py             write tests/golden/selections/*.txt
python ci/generate_golden.py --check     fail where they are not what would be written

A change to a capability or to a rank shows in these files, model by model: read the difference
before it is committed. Needs every distribution of the project installed.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from repository import ROOT

if TYPE_CHECKING:
    from attn_shared.device import DeviceFacts
    from attn_shared.model_config import LayerGroup, ModelLayers
    from attn_shared.model_selection import ModelSelection

__all__ = ["main", "stale", "texts"]

CONFIGS = ROOT / "shared" / "tests" / "model_configs"
GOLDEN = ROOT / "tests" / "golden" / "selections"
COMMAND = "python ci/generate_golden.py"
RANKS = {"deepseek-v3": 8, "deepseek-v3.2": 8, "llama-4-scout": 8, "qwen3-32b": 4}
"""Tensor-parallel ranks of models that one device does not hold; one for the others."""


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 if a file is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args(arguments).check:
        told = list(stale())
        print("\n".join(told) or "the golden selections are current")
        return int(bool(told))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    current = texts()
    for path in GOLDEN.glob("*.txt"):
        if path.name not in current:
            path.unlink()
    for name, text in current.items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(current)} files")
    return 0


def texts() -> dict[str, str]:
    """The files with their texts."""
    from attn_shared.model_config import load_config, model_layers

    found = {}
    for path in sorted(CONFIGS.glob("*.json")):
        model = model_layers(load_config(path), tp_size=RANKS.get(path.stem, 1))
        found[f"{path.stem}.txt"] = "\n".join(_lines(path.stem, model)) + "\n"
    return found


def stale() -> Iterator[str]:
    """What is not current, one description per file."""
    current = texts()
    present = {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.txt")}
    for name in sorted({*current, *present}):
        before, after = present.get(name, ""), current.get(name, "")
        if before != after:
            changed = difflib.unified_diff(
                before.splitlines(), after.splitlines(), "present", "current", lineterm="", n=0
            )
            where = f"tests/golden/selections/{name} is not current; run: {COMMAND}"
            yield "\n".join([where, *list(changed)[:12]])


def _lines(name: str, model: ModelLayers) -> Iterator[str]:
    """The model, then a line per preset: block size, bytes per token, a backend per group."""
    from attn_shared.device import PRESETS

    ranks = "1 rank" if model.tp_size == 1 else f"a rank of {model.tp_size}"
    yield f"{name} ({model.model_type}), {ranks}, {str(model.dtype).removeprefix('torch.')}"
    yield ""
    for number, group in enumerate(model.groups, start=1):
        yield f"  ({number}) {_described(group)}"
    yield ""
    heads = [f"({n})" for n, group in enumerate(model.groups, start=1) if group.request is not None]
    yield from _table(
        [
            ("preset", "arch", "block", "bytes/token", *heads),
            *(_row(preset, device, model) for preset, device in PRESETS.items()),
        ]
    )


def _described(group: LayerGroup) -> str:
    words = f"{len(group.layers)} layers of {group.name}"
    request, state = group.request, group.state
    if state is not None:
        return f"{words}, {state.num_bytes:,} bytes per sequence and layer"
    if request is None:
        return words
    heads = f"{request.num_heads} heads over {request.num_kv_heads}"
    return f"{words}, {heads} of {request.head_size}"


def _row(preset: str, device: DeviceFacts, model: ModelLayers) -> tuple[str, ...]:
    found = _selection(device, model)
    if found is None:
        return (preset, device.arch, "-", "-", *(_alone(g, device) for g in model.attention_groups))
    block = "-" if found.block_size is None else str(found.block_size)
    chosen = [str(g.selection.chosen) for g in found.groups if g.selection is not None]
    return (preset, device.arch, block, f"{found.cache_bytes_per_token:,}", *chosen)


def _selection(device: DeviceFacts, model: ModelLayers) -> ModelSelection | None:
    from attn_shared.errors import NoBackendError
    from attn_shared.model_selection import select_model
    from attn_shared.selector import DEFAULT_SELECTOR

    try:
        return select_model(model, partial(DEFAULT_SELECTOR.resolve, device=device))
    except NoBackendError:
        return None


def _alone(group: LayerGroup, device: DeviceFacts) -> str:
    """The backend of a group that others leave without a common answer, or the reasons."""
    from attn_shared.errors import NoBackendError
    from attn_shared.selector import DEFAULT_SELECTOR

    if group.request is None:
        return "-"
    try:
        return str(DEFAULT_SELECTOR.resolve(group.request, device).chosen)
    except NoBackendError as error:
        nearest = None if error.selection is None else error.selection.runner_up()
        codes = [] if nearest is None else [reason.code for reason in nearest.reasons]
        return f"none ({nearest.name}: {', '.join(codes)})" if nearest is not None else "none"


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    for row in listed:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


if __name__ == "__main__":
    sys.exit(main())
