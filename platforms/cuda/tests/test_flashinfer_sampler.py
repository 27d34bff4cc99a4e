"""FLASHINFER's sampler on the library's stub: what is handed over, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_conformance.stubs.modules import stub_module, stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.vendors.flashinfer_sampling import sampling_stub
from attn_cuda._vendor.flashinfer_sampling import SPEC
from attn_cuda.backends.flashinfer_sampler import FlashInferSampler
from attn_shared.device import preset
from attn_shared.errors import BackendRejectedError, VendorMissingError
from attn_shared.inventory import VendorStatus, probe, scan
from attn_shared.sampling import Drawn, Returns, SamplerRequest, SamplingParams, sampler_selection
from attn_shared.sampling.reference import exact_row
from attn_shared.sampling.rows import Rows
from attn_shared.selection import Policy, VerdictStatus

RELEASES = {
    "0.6.13": sampling_stub("0.6.13"),
    "0.7.4": sampling_stub("0.7.4"),
    "0.5": sampling_stub("0.5", has_valid=False),
}


@pytest.fixture(params=RELEASES)
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    with stub_vendor(RELEASES[request.param]) as found:
        yield found


def sample(logits: torch.Tensor, **asked: Any) -> Drawn:
    rows = Rows.of(SamplingParams(**asked), logits)
    return FlashInferSampler().sample(logits, rows, Returns.IDS)


LOGITS = [2.0, 0.0, 1.0, 1.0, -1.0, 0.5, -math.inf, 1.5]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"top_k": 4, "top_p": 0.7, "temperature": 1.5},
        {"top_k": 3, "min_p": 0.5},
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"top_k": 2**30},
    ],
)
def test_draws_follow_the_distribution(recorder: Recorder, asked: dict[str, Any]) -> None:
    exact = exact_row(LOGITS, **asked)
    count = 1500
    generator = torch.Generator().manual_seed(3)
    found = sample(torch.tensor([LOGITS] * count), generator=generator, **asked)
    counts = torch.bincount(found.ids, minlength=8).tolist()
    assert [number > 0 for number in counts] == list(exact.kept)
    for number, probability in zip(counts, exact.probabilities, strict=True):
        # Six standard deviations of a binomial number; the seed is fixed.
        assert abs(number - count * probability) <= 6 * math.sqrt(count * probability) + 1e-9
    assert found.valid.all()
    assert found.ids.dtype is torch.int64


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(LOGITS), min_size=6, max_size=6),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.sampled_from([None, 0, 1, 3, 2**30]),
            st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_row_gets_what_it_asked(rows: list[Any], dtype: torch.dtype) -> None:
    logits = torch.tensor([row[0] for row in rows]).to(dtype)
    asked = {
        "temperature": torch.tensor([row[1] for row in rows]),
        "top_k": [row[2] for row in rows],
        "top_p": [row[3] for row in rows],
    }
    with stub_vendor(RELEASES["0.6.13"]):
        found = sample(logits, **asked)
    for place, (values, temperature, top_k, top_p) in enumerate(rows):
        exact = exact_row(values, temperature=temperature, top_k=top_k, top_p=top_p)
        assert bool(found.valid[place]) is exact.valid
        if exact.valid and exact.margin > 1e-5:
            assert exact.kept[int(found.ids[place])]


def test_bad_rows_harm_no_other_row(recorder: Recorder) -> None:
    logits = torch.tensor([LOGITS] * 5)
    logits[0, 3], logits[1], logits[2, 0] = math.nan, -math.inf, math.inf
    # The library's top-k drops a NaN, and would draw from the rest of its row.
    found = sample(logits, top_k=2, top_p=0.5)
    assert found.valid.tolist() == [False, False, False, True, True]
    assert found.ids.tolist() == [0] * 5


def test_what_is_handed_over(recorder: Recorder) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([LOGITS] * 2, dtype=torch.bfloat16)
    sample(logits, top_k=[2, -1], top_p=[0.5, 0.0], generator=generator)
    mask, draw = recorder.calls
    assert mask.arguments["top_k"].tolist() == [2, 8]
    assert mask.arguments["logits"].dtype is torch.float32
    assert draw.arguments["top_p"].tolist() == pytest.approx([0.5, 1e-30])
    assert draw.arguments["generator"] is generator
    assert draw.arguments["deterministic"] is True
    assert "seed" not in draw.given


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"returns": Returns.PROCESSED_LOGITS}, "does not show the logits that its filters left"),
        ({"returns": "processed_logprobs"}, "returns=processed_logprobs (allowed: ids)"),
        ({"own_draws": True}, "its kernels mix a row's place in the batch into its draws"),
        ({"top_p": True, "min_p": True}, "top_p with min_p=True"),
    ],
)
def test_what_it_cannot_do_goes_to_torch_and_says_why(asked: dict[str, Any], words: str) -> None:
    request, device = SamplerRequest(**asked), preset("h200")
    selection = sampler_selection(request, device)
    assert selection.chosen == "TORCH"
    assert words in selection.verdict("FLASHINFER").summary()
    assert words in str(selection)
    with pytest.raises(BackendRejectedError, match="TORCH would serve it"):
        sampler_selection(request, device, Policy(backend="FLASHINFER"))


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("h200", VerdictStatus.CHOSEN),
        ("a100", VerdictStatus.CHOSEN),
        ("t4", VerdictStatus.REJECTED),
    ],
)
def test_devices(name: str, status: VerdictStatus) -> None:
    selection = sampler_selection(SamplerRequest(top_k=True), preset(name))
    verdict = selection.verdict("FLASHINFER")
    assert verdict.status is status
    assert selection.chosen == ("FLASHINFER" if status is VerdictStatus.CHOSEN else "TORCH")
    if status is VerdictStatus.CHOSEN:
        assert "measured on an H200" in verdict.summary()


def test_a_release_without_a_call_is_too_old() -> None:
    with (
        stub_module("flashinfer.sampling", {}, distribution="flashinfer-python"),
        pytest.raises(VendorMissingError, match="has no sampling_from_probs: too old"),
    ):
        FlashInferSampler()


@pytest.mark.parametrize("compiles", [True, False])
def test_kernels_are_compiled_when_the_sampler_is_loaded(compiles: bool) -> None:
    built = []

    def get_sampling_module() -> None:
        built.append(1)
        if not compiles:
            raise RuntimeError("Ninja build failed: nvcc not found")

    stub = RELEASES["0.6.13"]
    content = {**stub.modules["flashinfer.sampling"], "get_sampling_module": get_sampling_module}
    modules = {**stub.modules, "flashinfer.sampling": content}
    with stub_vendor(replace(stub, modules=modules)):
        if compiles:
            FlashInferSampler()
        else:
            with pytest.raises(VendorMissingError, match="do not build: RuntimeError: Ninja build"):
                FlashInferSampler()
    assert built == [1]


@pytest.mark.parametrize("release", RELEASES)
def test_the_probe_says_what_a_release_takes(release: str) -> None:
    with stub_vendor(RELEASES[release]):
        entry = probe([SPEC], [SPEC.name], scan([SPEC])).get(SPEC.name)
    assert entry.status is VendorStatus.LOADED, entry.error
    assert entry.build is not None
    assert entry.build.version == release
    has_valid = "top_p_sampling_from_probs.return_valid" in entry.build.optional_arguments
    assert has_valid is (release != "0.5")
