"""Measure what attn itself costs: imports, selection, the command, a call of `Attention`.

    python ci/measure_overheads.py docs/benchmarks/overheads.md

prints the figures as JSON and writes the page. Each figure is a median over rounds; what is
compared alternates within a round, so that a busy machine slows both sides. Run it on installed
distributions with bytecode caching on.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["main"]

ROUNDS = 11

SELECT = "select --device h200 --head-size 128 --num-heads 32 --num-kv-heads 8 --block-size 16 -q"

TIMED_IMPORT = """
import time, torch
start = time.perf_counter()
{statement}
print((time.perf_counter() - start) * 1e3)
"""

FIRST_SELECTION = """
import time, torch
from attn_shared import AttentionRequest, resolve_device, select
from attn_shared.selector import DEFAULT_SELECTOR
request = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128)
start = time.perf_counter()
device = resolve_device("h200")
select(request, device, DEFAULT_SELECTOR.inventory(device))
print((time.perf_counter() - start) * 1e3)
"""


def in_new_process(code: str) -> float:
    """The number that a fresh interpreter prints for this code."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(run.stdout)


def wall_ms(*command: str) -> float:
    """The time of a whole process."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - start) * 1e3


def processes() -> dict[str, list[float]]:
    """Imports and the command, each in processes of their own, in turn."""
    import_torch = (sys.executable, "-c", "import torch")
    command = (sys.executable, "-m", "attn_cli", *SELECT.split())
    all_names = "import attn_shared.layer, attn_shared.selector"
    measured: dict[str, Callable[[], float]] = {
        "import_attn_shared_ms": lambda: in_new_process(
            TIMED_IMPORT.format(statement="import attn_shared")
        ),
        "import_layer_and_selector_ms": lambda: in_new_process(
            TIMED_IMPORT.format(statement=all_names)
        ),
        "first_selection_of_a_process_ms": lambda: in_new_process(FIRST_SELECTION),
        "import_torch_process_ms": lambda: wall_ms(*import_torch),
        "attn_select_process_ms": lambda: wall_ms(*command),
    }
    found: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(ROUNDS):
        for name, measure in measured.items():
            found[name].append(measure())
    return found


def selections() -> dict[str, list[float]]:
    """An uncached selection over a platform's candidates, and a cached one."""
    from attn_shared import AttentionRequest, Policy, resolve_device, select
    from attn_shared.selector import DEFAULT_SELECTOR

    request = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128)
    device = resolve_device("h200")
    inventory, policy, cache = (
        DEFAULT_SELECTOR.inventory(device),
        Policy(),
        DEFAULT_SELECTOR.cache,
    )
    uncached = repeated(lambda: select(request, device, inventory, policy), 20, 1e3)
    cached = repeated(lambda: cache.select(request, device, inventory, policy), 2000, 1e6)
    return {"uncached_selection_ms": uncached, "cached_selection_us": cached}


def repeated(call: Callable[[], object], number: int, unit: float) -> list[float]:
    """The time of one call, averaged over `number`, in each round."""
    call()
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(number):
            call()
        found.append((time.perf_counter() - start) / number * unit)
    return found


def calls() -> dict[str, list[float]]:
    """What `Attention.forward` adds to the backend's own calls, on a batch of one token."""
    import torch

    from attn_shared import Attention, CommonAttentionMetadata

    layer = Attention(num_heads=2, num_kv_heads=1, head_size=16, dtype=torch.float32)
    kv_cache = layer.allocate(4)
    batch = CommonAttentionMetadata.from_lengths(
        query_lens=[1], seq_lens=[3], block_table=torch.tensor([[1]]), block_size=16
    )
    plan, slots = layer.plan(batch), batch.slot_mapping
    query, key, value = torch.randn(1, 2, 16), torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    if slots is None:
        raise SystemExit("the batch has no slots")

    def direct() -> None:
        layer.impl.do_kv_cache_update(layer, key, value, kv_cache, slots)
        layer.impl.forward(layer, query, key, value, kv_cache, plan.metadata)

    def through_layer() -> None:
        layer.forward(query, key, value, kv_cache, plan)

    found: dict[str, list[float]] = {"direct_calls_us": [], "attention_forward_us": []}
    for _ in range(ROUNDS):
        found["direct_calls_us"].append(statistics.median(repeated(direct, 200, 1e6)))
        found["attention_forward_us"].append(statistics.median(repeated(through_layer, 200, 1e6)))
    return found


def machine() -> dict[str, Any]:
    """What the figures were measured on, without its host's name."""
    import torch

    from attn_shared import current_platform

    device = current_platform().device()
    return {
        "name": device.name,
        "arch": device.arch,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


MEANINGS = {
    "import_attn_shared_ms": "`import attn_shared`, on top of torch (aim: at most 20)",
    "import_layer_and_selector_ms": "the first use of a layer imports its modules, once",
    "first_selection_of_a_process_ms": "the first selection, imports and discovery included",
    "uncached_selection_ms": "a selection over all candidates of a platform (aim: under 5)",
    "cached_selection_us": "the same selection again (aim: under 5)",
    "import_torch_process_ms": '`python -c "import torch"`, the whole process',
    "attn_select_process_ms": "`attn select`, the whole process",
    "attn_select_over_import_torch": "the two as a ratio, round by round (aim: under 1.2)",
    "direct_calls_us": "TORCH_SDPA's own two calls, cache write and forward, of one tiny token",
    "attention_forward_us": "`Attention.forward`, which makes the same two calls",
    "attention_forward_adds_us": "the difference, round by round (aim: at most 10)",
}


def page(record: dict[str, Any]) -> str:
    """The figures as a page."""
    place, figures = record["machine"], record["figures"]
    units = {name: name.rpartition("_")[2] for name in MEANINGS}
    rows = [
        f"| {figures[name]} {units[name] if units[name] in ('ms', 'us') else ''} | {meaning} |"
        for name, meaning in MEANINGS.items()
    ]
    run = (
        f"{place['name']} ({place['arch']}, {place['cores']} cores, load {place['load']}), "
        f"torch {place['torch']}, python {place['python']}, {record['date']}; medians of "
        f"{record['rounds']} rounds in which what is compared takes turns."
    )
    return "\n".join(
        [
            "<!-- Written by `python ci/measure_overheads.py`. Do not edit. -->",
            "",
            "# What attn itself costs",
            "",
            run,
            "",
            "| Figure | Of what |",
            "| --- | --- |",
            *rows,
            "",
            "`attn select` takes less than a bare `import torch` because it does without garbage",
            "collection, which takes a fifth of that import and finds nothing.",
            "",
        ]
    )


def main() -> int:
    """Measure, print, and write the file that is named."""
    rounds = {**processes(), **selections(), **calls()}
    figures = {name: round(statistics.median(values), 3) for name, values in rounds.items()}
    pairs = zip(rounds["attn_select_process_ms"], rounds["import_torch_process_ms"], strict=True)
    added = zip(rounds["attention_forward_us"], rounds["direct_calls_us"], strict=True)
    figures["attn_select_over_import_torch"] = round(statistics.median(a / b for a, b in pairs), 3)
    figures["attention_forward_adds_us"] = round(statistics.median(a - b for a, b in added), 3)
    record = {
        "schema_version": 1,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "rounds": ROUNDS,
        "figures": figures,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
