"""Generate greedily with vLLM's engine, and write what came out: one process of `run_vllm.py`.

    python ci/vllm_engine.py --model FOLDER --dtype float32 --output result.json

`ATTN_VLLM_BACKEND` says whose backend runs; unset is vLLM's own. Chunked prefill and prefix caching
are on, and the prompts make use of both: one is longer than a step's tokens, and several share
their beginning. All prompts run twice, and the second time is the one that is measured, with
nothing left to compile and the prefixes in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["PROMPTS", "main"]

STEP_TOKENS = 128
BLOCK_TOKENS = 32
NEW_TOKENS = 32
MODEL_LEN = 1024

_STORY = (
    "The lighthouse keeper wrote in his book every evening. On the first day the sea was calm and "
    "three ships passed. On the second day the wind came from the north and no ship was seen. "
)
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    f"{_STORY}On the third day",
    f"{_STORY}On the fourth day",
    f"{_STORY}The keeper's daughter asked him why",
    f"{_STORY * 12}At the end of the month",
    "A list of five colours: red,",
    "To make a cup of tea, first",
)
"""Eight prompts: three that share 40 tokens (a block), one of some 500, more than a step takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write the result."""
    options = parsed(arguments)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # calls are counted in here
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(options.model),
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        enforce_eager=True,
        max_model_len=MODEL_LEN,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=len(PROMPTS),
        block_size=BLOCK_TOKENS,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        seed=0,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    first = engine.generate(list(PROMPTS), greedy, use_tqdm=False)
    begin = time.perf_counter()
    second = engine.generate(list(PROMPTS), greedy, use_tqdm=False)
    seconds = time.perf_counter() - begin
    options.output.write_text(json.dumps(result(options, first, second, seconds), indent=1))
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True, help="a folder of safetensors")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


def result(options: argparse.Namespace, first: Any, second: Any, seconds: float) -> dict[str, Any]:
    """What came out of both passes, and how the layers were run."""
    texts = [output.outputs[0].text for output in second]
    tokens = sum(len(output.outputs[0].token_ids) for output in second)
    return {
        "backend": os.environ.get("ATTN_VLLM_BACKEND"),
        "dtype": options.dtype,
        "first_texts": [output.outputs[0].text for output in first],
        "texts": texts,
        "prompt_tokens": [len(output.prompt_token_ids) for output in second],
        "cached_tokens": [output.num_cached_tokens for output in second],
        "new_tokens": tokens,
        "seconds": seconds,
        "calls": calls(),
    }


def calls() -> dict[str, int]:
    """How often attn's adapters ran a layer, by the backend that they ran it on."""
    module = sys.modules.get("attn_vllm.impl")
    return {} if module is None else dict(module.CALLS)


if __name__ == "__main__":
    sys.exit(main())
