from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix_testing import ALL, BARE, backend_of, devices, matrix_of, run_of, selector_of

from attn_cli.matrix.answers import Answer, Cell
from attn_cli.matrix.questions import QUESTIONS, Question
from attn_cli.matrix.survey import AskedDevice, Matrix, own_backends, survey
from attn_shared.capability import Capability, DeviceLimit
from attn_shared.choice import select
from attn_shared.device import PRESETS, DeviceFacts, Vendor
from attn_shared.errors import (
    BackendRejectedError,
    InvalidRequestError,
    PlatformMissingError,
    VendorMissingError,
)
from attn_shared.known_backends import KNOWN_BACKENDS
from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.selection import Policy, Selection
from attn_shared.selector import Selector

SELECTOR = Selector()


@cache
def real() -> Matrix:
    """The project's own backends on every preset."""
    return survey(SELECTOR, devices=AskedDevice.presets(), backends=own_backends(SELECTOR.registry))


@given(
    backend=st.sampled_from(own_backends(DEFAULT_REGISTRY)),
    preset=st.sampled_from(sorted(PRESETS)),
    question=st.sampled_from(QUESTIONS),
)
def test_a_cell_is_what_the_selector_says(backend: str, preset: str, question: Question) -> None:
    """Each way of asking is put to the selector with the backend named."""
    sheet = next(s for s in real().sheets[backend] if s.device.name == preset)
    said = sheet.cells[question.key]
    if said.answer is Answer.NO_QUESTION:
        return
    outcomes = [_selected(backend, sheet.device.facts, sheet.plain, way) for way in question.ways]
    served = [outcome for outcome in outcomes if outcome is not None]
    assert said.answer.is_served == any(outcome.answer.is_served for outcome in served)
    if said.answer is Answer.SLOW or said.answer is Answer.YES:
        assert said in served
    elif not said.refuses_device:
        assert said.reasons in [outcome.reasons for outcome in served]


def _selected(backend: str, device: DeviceFacts, plain: object, way: object) -> Cell | None:
    try:
        request = plain.with_options(**way)  # type: ignore[attr-defined]
    except InvalidRequestError:
        return None
    inventory, policy = SELECTOR.inventory(device), Policy(backend=backend)
    try:
        selection = select(request, device, inventory, policy, registry=SELECTOR.registry)
    except (BackendRejectedError, VendorMissingError) as error:
        return _verdict(error.selection, backend)
    return _verdict(selection, backend)


def _verdict(selection: Selection | None, backend: str) -> Cell:
    assert selection is not None
    return Cell.of(selection.verdict(backend))


def test_every_backend_has_a_sheet_per_device_with_every_answer() -> None:
    assert set(real().sheets) >= {"FLEX_ATTENTION", "TORCH_SDPA"}
    for sheets in real().sheets.values():
        assert [sheet.device.name for sheet in sheets] == list(PRESETS)
        assert all(list(s.cells) == [q.key for q in QUESTIONS] for s in sheets)


@pytest.mark.parametrize(
    ("backend", "preset", "key", "answer"),
    [
        ("TORCH_SDPA", "h200", "sink", Answer.SLOW),
        ("TORCH_SDPA", "h200", "window", Answer.YES),
        ("TORCH_SDPA", "t4", "window", Answer.YES),
        ("TORCH_SDPA", "mi300x", "kind=MLA", Answer.NO),
        ("FLEX_ATTENTION", "h200", "sink", Answer.YES),
        ("FLEX_ATTENTION", "spr", "sink", Answer.SLOW),
        ("FLEX_ATTENTION", "h200", "head_size=576", Answer.NO),
        ("FLEX_ATTENTION", "spr", "head_size=576", Answer.YES),
        ("FLEX_ATTENTION", "t4", "window", Answer.NO),
        ("FLEX_ATTENTION", "h200", "kv_cache_dtype=fp8", Answer.NO),
        ("TORCH_SDPA", "h200", "kv_cache_dtype=fp8", Answer.YES),
    ],
)
def test_what_is_known_of_the_torch_backends(
    backend: str, preset: str, key: str, answer: Answer
) -> None:
    sheet = next(s for s in real().sheets[backend] if s.device.name == preset)
    assert sheet.cells[key].answer is answer


def test_a_refused_device_is_the_answer_to_every_question() -> None:
    nvidia = replace(ALL, devices=(DeviceLimit(vendor=Vendor.NVIDIA, at_least=(9, 0)),))
    (sheet,) = matrix_of("a100", FAKE=nvidia).sheets["FAKE"]
    assert sheet.base.why() == "device=nvidia sm_80 (8.0) (allowed: nvidia >= 9.0)"
    assert set(sheet.cells.values()) == {sheet.base}


def test_one_backend_that_raises_leaves_the_others_their_answers() -> None:
    def broken(_device: DeviceFacts) -> Capability:
        raise RuntimeError("out of luck")

    found = matrix_of("h200", BROKEN=broken, FINE=BARE)
    (bad,), (good,) = found.sheets["BROKEN"], found.sheets["FINE"]
    assert bad.base.answer is Answer.UNAVAILABLE
    assert "out of luck" in bad.base.detail
    assert good.base.answer is Answer.YES


def test_a_backend_that_does_not_load_is_shown_with_its_words() -> None:
    selector = selector_of()
    selector.registry.register("GONE", "no_such_module_at_all:Backend", source="a test")
    found = survey(selector, devices=devices("h200"), backends=["GONE"])
    assert "no_such_module_at_all" in found.sheets["GONE"][0].base.detail
    assert "no_such_module_at_all" in found.backends[0].problem


def test_a_missing_platform_is_the_answer_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = selector_of(FAKE=BARE)

    def missing(_device: DeviceFacts) -> None:
        raise PlatformMissingError("nobody serves these")

    monkeypatch.setattr(selector, "inventory", missing)
    (sheet,) = survey(selector, devices=devices("b60"), backends=["FAKE"]).sheets["FAKE"]
    assert (sheet.base.answer, sheet.base.detail) == (Answer.UNAVAILABLE, "nobody serves these")
    assert set(sheet.cells.values()) == {sheet.base}


def test_the_graph_level_is_the_builders_word_or_not_known() -> None:
    levels = {facts.name: facts.graph_level for facts in real().backends}
    assert (levels["FLEX_ATTENTION"], levels["TORCH_SDPA"]) == ("NEVER", "NEVER")
    (fake,) = matrix_of("h200", FAKE=BARE).backends
    assert fake.graph_level == ""
    assert "NotImplementedError" in fake.problem


def test_runs_belong_to_a_backend_and_an_architecture() -> None:
    runs = [run_of("FAKE"), run_of("ELSEWHERE")]
    found = matrix_of("h100", "h200", "a100", FAKE=BARE, OTHER=BARE, runs=runs)
    assert [s.is_run for s in found.sheets["FAKE"]] == [True, True, False]
    assert [s.is_run for s in found.sheets["OTHER"]] == [False, False, False]
    assert found.runs == (runs[0],)


def test_sheets_differ_by_answers_preferences_and_runs() -> None:
    def by_vendor(device: DeviceFacts) -> Capability:
        size = 32 if device.vendor is Vendor.AMD else 16
        return replace(BARE, preferred_block_size=size)

    found = matrix_of("h200", "b200", "mi300x", FAKE=by_vendor, runs=[run_of("FAKE")])
    h200, b200, mi300x = found.sheets["FAKE"]
    assert (h200.preferred, mi300x.preferred) == ("16 NHD", "32 NHD")
    assert len({h200.essence, b200.essence, mi300x.essence}) == 3
    assert replace(h200, runs=()).essence == b200.essence


def test_names_that_nothing_provides_are_kept_apart() -> None:
    found = matrix_of("h200", FLASH_ATTN=BARE)
    assert "FLASH_ATTN" not in found.not_provided
    assert set(KNOWN_BACKENDS) - {"FLASH_ATTN"} <= set(found.not_provided)
    assert found.not_provided["GDN_ATTN"].family == "recurrent"


def test_own_backends_are_planned_ones_that_nobody_overrides(paged16: str) -> None:
    assert paged16 in DEFAULT_REGISTRY.names()
    own = own_backends(DEFAULT_REGISTRY)
    assert {"FLEX_ATTENTION", "TORCH_SDPA"} <= set(own) <= set(KNOWN_BACKENDS)
    DEFAULT_REGISTRY.register("TORCH_SDPA", backend_of("TORCH_SDPA", BARE), source="a test")
    try:
        assert "TORCH_SDPA" not in own_backends(DEFAULT_REGISTRY)
    finally:
        DEFAULT_REGISTRY.clear_override("TORCH_SDPA")
