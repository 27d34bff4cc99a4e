"""The kernel for long prompts: answers, and when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prompt_cases import hopper_cases, large_cases, prompt_cases

from attn_conformance.case import Case
from attn_conformance.checks import Answer, check_numbers
from attn_conformance.outcome import Status
from attn_conformance.subject import Subject
from attn_conformance.suite import Suite
from attn_shared.arch import parse_arch
from attn_shared.spec import LayerSpec
from attn_triton import _prompt_programs
from attn_triton._prompts import CopyRoom, PromptGrid, Prompts, kind_of
from attn_triton._route import (
    Context,
    Fresh,
    Route,
    plain_because,
    portable_because,
    route_of,
    tile_of,
    tile_within,
)
from attn_triton._rows import cache_matrix, token_matrix
from attn_triton.prompt_tiles import PromptKernel, section_heads
from attn_triton.tiles import Widths

HOPPER = parse_arch("sm_90")
_NAMES = {"cpu": "interpreted_backend:InterpretedBackend"}


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[Route | None]:
    """The routes that calls take, as they take them."""
    seen: list[Route | None] = []

    def watched(*args: Any, **kwargs: Any) -> Route | None:
        seen.append(route_of(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(_prompt_programs, "route_of", watched)
    return seen


@pytest.mark.parametrize("case", prompt_cases(), ids=lambda case: case.name)
def test_answers(device: torch.device, case: Case, routes: list[Route | None]) -> None:
    check_numbers(Subject.find(_NAMES.get(device.type, "TRITON_ATTN"), str(device)), case)
    assert routes
    assert None not in routes


@pytest.mark.cuda(min_capability=(9, 0))
@pytest.mark.parametrize("case", hopper_cases(), ids=lambda case: case.name)
def test_answers_of_the_kernel_for_hopper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_triton.kernels.compiling import has_gluon

    if torch.cuda.get_device_capability()[0] != 9 or not has_gluon():
        pytest.skip("no Hopper GPU, or no Triton with the Gluon that it is in")
    seen: list[Any] = []
    made = _prompt_programs._for_hopper

    def watched(*args: Any) -> Any:
        seen.append(args)
        return made(*args)

    monkeypatch.setattr(_prompt_programs, "_for_hopper", watched)
    check_numbers(Subject.find("TRITON_ATTN", "cuda:0"), case)
    assert seen


@pytest.mark.cuda
@pytest.mark.parametrize("case", large_cases(), ids=lambda case: case.name)
def test_answers_of_several_waves(case: Case, routes: list[Route | None]) -> None:
    check_numbers(Subject.find("TRITON_ATTN", "cuda:0"), case)
    assert routes
    assert None not in routes


def test_fresh_keys_stand_for_quantised_ones_where_that_is_allowed(
    device: torch.device, routes: list[Route | None]
) -> None:
    (case,) = (x for x in prompt_cases() if x.name == "whole prompts")
    case = case.with_fields(query_lens=(130, 64), seq_lens=(130, 64), nan_tail=False)
    case = case.with_fields(kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0)
    subject = Subject.find(_NAMES.get(device.type, "TRITON_ATTN"), str(device))
    batch = subject.batch(case)
    result = subject.engine(batch, allows_fresh_kv=True).run(batch)
    Answer(batch, *batch.expected(reads_fresh_kv=True), str(case)).hold(result)
    assert routes == [Route(context=Context.NONE, fresh=Fresh.STEP)]
    subject.engine(batch).run(batch)
    assert routes[-1] == Route(context=Context.ROWS, fresh=Fresh.NONE)


_RULES = (
    *("block_sizes", "combinations", "cross_attention", "encoder", "extend", "far_blocks"),
    *("fp8_scales_per_head", "keyless_rows", "layouts", "lse", "new_tokens_as_stored", "nan_tails"),
    *("order", "padded_requests", "per_request_causality", "replay", "strided_inputs", "window"),
    *("batch_invariance", "two_sided_window", "chunked_local", "unread_query_rows"),
)
"""Rules that long prompts could break where others hold."""


@pytest.fixture(scope="module")
def forced() -> Iterator[Suite]:
    with Suite("interpreted_prompts:PromptBackend") as started:
        yield started


@pytest.mark.interpreter
@pytest.mark.parametrize("rule", _RULES)
def test_the_contract_with_every_prompt_on_the_kernel(forced: Suite, rule: str) -> None:
    entries = [x for x in forced.plan.entries if x.rule == rule and not x.is_excluded]
    outcomes = [forced.run(entry) for entry in entries[:2]]
    assert [f"{x.case}: {x.message}" for x in outcomes if x.status is not Status.PASSED] == []
    assert outcomes


def layer(**options: Any) -> LayerSpec:
    plain: dict[str, Any] = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "head_size_v": 128,
        "scale": 0.1,
        "dtype": torch.bfloat16,
    }
    return LayerSpec(**{**plain, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.float32}, "float32 on sm_90 have no tile"),
        ({"head_size": 96}, "head sizes 96 and 128"),
        ({"has_alibi": True}, "ALiBi"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"scale": 0.0}, "scale=0.0"),
    ],
)
def test_what_runs_on_the_plain_kernel(options: dict[str, Any], words: str) -> None:
    spec = layer(**options)
    reason = plain_because(spec, HOPPER, spec.dtype, is_invariant=False)
    assert reason is not None
    assert words in reason


def test_formats_and_modes_of_the_plain_kernel() -> None:
    spec = layer()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert plain_because(spec, HOPPER, dtype, is_invariant=False) is None
    int8 = plain_because(spec, HOPPER, torch.int8, is_invariant=False)
    assert int8 == "a cache of torch.int8"
    invariant = plain_because(spec, HOPPER, torch.bfloat16, is_invariant=True)
    assert invariant == "batch-invariant mode with pages that must be copied"
    other = plain_because(spec, parse_arch("gfx942"), torch.bfloat16, is_invariant=False)
    assert other is not None
    assert "on gfx942" in other


def test_where_keys_are_read() -> None:
    tile = tile_of(layer(), HOPPER)
    assert tile is not None

    def route(spec: LayerSpec | None = None, **options: Any) -> tuple[int, int] | None:
        facts = {
            "page": 16,
            "is_stored_alike": True,
            "has_fresh": True,
            "has_context": True,
            "may_copy": True,
        }
        found = route_of(spec or layer(), tile, **{**facts, **options})
        return None if found is None else (found.context, found.fresh)

    assert route(has_context=False) == (Context.NONE, Fresh.STEP)
    assert route(page=64) == (Context.PAGES, Fresh.STEP)
    assert route(page=64, has_fresh=False) == (Context.PAGES, Fresh.NONE)
    assert route() == (Context.ROWS, Fresh.STEP)
    assert route(has_fresh=False, has_context=False) == (Context.ROWS, Fresh.NONE)
    assert route(may_copy=False) is None
    assert route(may_copy=False, page=128) == (Context.PAGES, Fresh.STEP)
    # An fp8 cache is copied, and its keys are not mixed with others that have no scale.
    assert route(page=64, is_stored_alike=False) == (Context.ROWS, Fresh.NONE)
    sharing = layer(kv_sharing_target="other")
    assert route(sharing, page=64) == (Context.PAGES, Fresh.NONE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": (1023, 0)}, "a window"),
        ({"chunk_size": 64}, "chunked attention"),
        ({"softcap": 30.0}, "softcap"),
        ({"head_size": 64, "head_size_v": 64}, "head sizes 64 and 64 on sm_90 have no tile"),
    ],
)
def test_what_runs_on_the_kernel_for_every_gpu(options: dict[str, Any], words: str) -> None:
    reason = portable_because(layer(**options), HOPPER, has_gluon=True)
    assert reason is not None
    assert words in reason


def test_what_runs_on_the_kernel_for_hopper() -> None:
    for size in (128, 256):
        spec = layer(head_size=size, head_size_v=size, has_sinks=True, dtype=torch.float16)
        assert portable_because(spec, HOPPER, has_gluon=True) is None
        without = portable_because(spec, HOPPER, has_gluon=False)
        assert without is not None
        assert "Gluon" in without
        elsewhere = portable_because(spec, parse_arch("sm_100"), has_gluon=True)
        assert elsewhere is not None
        assert "on sm_100" in elsewhere


@pytest.mark.parametrize(("page", "fits"), [(16, False), (64, True), (192, True), (128, True)])
def test_pages_that_the_kernel_for_hopper_reads(page: int, fits: bool) -> None:
    tile = tile_of(layer(), HOPPER, kernel=PromptKernel.HOPPER)
    assert tile is not None
    assert tile_within(tile, page) == (tile if fits else None)
    assert tile.cached(128) == (64, 64)


@pytest.mark.parametrize(
    ("kernel", "blocks", "longest", "num_keys", "programs"),
    [
        (PromptKernel.PORTABLE, 32, 4096, 4096, 1024),
        (PromptKernel.HOPPER, 32, 4096, 4096, 132),
        (PromptKernel.HOPPER, 2, 256, 256, 64),
        (PromptKernel.HOPPER, 128, 16384, 16384, 4096),
        (PromptKernel.HOPPER, 128, 16384, None, 132),
    ],
)
def test_programs(
    kernel: PromptKernel, blocks: int, longest: int, num_keys: int | None, programs: int
) -> None:
    tile = tile_of(layer(), HOPPER, kernel=kernel)
    assert tile is not None
    flags = ("has_context", "may_copy", "is_invariant", "allows_fresh")
    grid = PromptGrid(
        kind=kind_of(tile, **dict.fromkeys(flags, False)),
        blocks=torch.empty(0),
        prompts=Prompts(num_blocks=blocks, longest=longest, has_context=False, num_keys=num_keys),
        decode_tokens=1,
        section_heads=32,
        room=CopyRoom(),
        compute_units=132,
    )
    assert grid.programs(32) == programs


def test_rows_of_tokens() -> None:
    fused = torch.zeros(5, 6, 64, dtype=torch.bfloat16)
    matrix = token_matrix(fused[:, 2:4])
    assert matrix is not None
    assert (matrix.columns, matrix.stride) == (128, 384)
    assert (matrix.head_rows, matrix.head_columns) == (0, 64)
    assert token_matrix(fused.transpose(0, 1)) is None  # heads apart
    assert token_matrix(fused.view(-1)[4:-380].view(4, 6, 64)) is None  # 8 bytes off
    assert token_matrix(fused.mT) is None


def test_rows_of_a_cache() -> None:
    # keys and values of a block beside each other: 2 x 16 tokens x 8 heads x 128
    nhd = cache_matrix(0, (32768, 1024, 128), (10, 16, 8, 128), 2)
    assert nhd is not None
    assert (nhd.rows, nhd.columns, nhd.stride) == (16, 1024, 1024)
    assert (nhd.block_rows, nhd.head_rows, nhd.head_columns) == (32, 0, 128)
    hnd = cache_matrix(0, (32768, 128, 2048), (10, 16, 8, 128), 2)
    assert hnd is not None
    assert (hnd.rows, hnd.columns, hnd.stride) == (7 * 16 + 16, 128, 128)
    assert (hnd.block_rows, hnd.head_rows, hnd.head_columns) == (256, 16, 0)
    assert cache_matrix(8, (32768, 1024, 128), (10, 16, 8, 128), 2) is None
    assert cache_matrix(0, (32769, 1024, 128), (10, 16, 8, 128), 2) is None


@pytest.mark.parametrize(
    ("longest", "heads"),
    [(1, 32), (4096, 32), (8192, 16), (16384, 8), (10**6, 8)],
)
def test_heads_whose_keys_fit_the_cache(longest: int, heads: int) -> None:
    widths = Widths(head_size=128, head_size_v=128, element_bytes=2, cache_bytes=2)
    assert section_heads(8, 4, widths, longest, 50 * 2**20) == heads
