"""Which sampler serves, who decided, and why: as attention's selection says it."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import torch
from sampling_testing import sampler_of

from attn_shared.capability import Reason
from attn_shared.errors import (
    BackendRejectedError,
    InvalidInputError,
    UnknownNameError,
    VendorMissingError,
)
from attn_shared.inventory import VendorSpec
from attn_shared.sampling import (
    Drawn,
    Returns,
    SamplerBackend,
    SamplerRequest,
    SamplingParams,
    register_sampler,
)
from attn_shared.sampling import candidates as candidates_module
from attn_shared.sampling.rows import Rows
from attn_shared.selection import DecidedBy, VerdictStatus


class Fast(SamplerBackend):
    """A sampler that draws token 1, and shows no logits."""

    name: ClassVar[str] = "FAST"
    description: ClassVar[str] = "token 1"
    priority: ClassVar[int | None] = 300
    provenance: ClassVar[str] = "made up"

    @classmethod
    def objections(cls, request: SamplerRequest) -> tuple[Reason, ...]:
        if request.returns is Returns.IDS:
            return ()
        return (Reason(code="returns", value=str(request.returns), allowed="ids"),)

    def sample(self, logits: torch.Tensor, rows: Rows, returns: Returns) -> Drawn:
        return Drawn(
            ids=torch.ones(len(logits), dtype=torch.int64),
            valid=torch.ones(len(logits), dtype=torch.bool),
        )


class Absent(Fast):
    """One whose library nobody has."""

    name: ClassVar[str] = "ABSENT"
    vendor: ClassVar[VendorSpec | None] = VendorSpec(
        name="absent",
        distributions=("no-such-distribution",),
        module="no_such_module",
        install="pip install absent",
        probe="",
    )


class Broken(Fast):
    """One whose library is there and does not load."""

    name: ClassVar[str] = "BROKEN"
    priority: ClassVar[int | None] = 400
    vendor: ClassVar[VendorSpec | None] = VendorSpec(
        name="broken", distributions=("torch",), module="torch", install="pip install it", probe=""
    )

    def __init__(self) -> None:
        raise OSError("libbroken.so: undefined symbol")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates_module, "_REGISTERED", {})


LOGITS = torch.zeros(2, 4)


def test_the_best_that_serves_is_chosen_and_says_so() -> None:
    register_sampler(Fast)
    found = sampler_of().sample(LOGITS)
    assert found.ids.tolist() == [1, 1]
    assert found.selection.chosen == "FAST"
    assert found.selection.decided_by is DecidedBy.DEFAULT
    assert "TORCH  eligible" in str(found.selection).replace("   ", "  ")


def test_a_caller_that_wants_logits_gets_the_native_path_and_the_reason() -> None:
    register_sampler(Fast)
    found = sampler_of().sample(LOGITS, returns="processed_logprobs")
    assert found.selection.chosen == "TORCH"
    assert found.logprobs is not None
    assert found.logits is None
    verdict = found.selection.verdict("FAST")
    assert verdict.status is VerdictStatus.REJECTED
    assert verdict.summary() == "returns=processed_logprobs (allowed: ids)"


def test_a_named_sampler_works_or_raises() -> None:
    register_sampler(Fast)
    sampler = sampler_of("FAST", source="a test")
    found = sampler.sample(LOGITS, SamplingParams(top_k=2))
    assert found.selection.decided_by is DecidedBy.USER
    assert "FAST was named by a test" in found.selection.notes()
    with pytest.raises(BackendRejectedError, match=r"returns=processed_logits \(allowed: ids\)"):
        sampler.sample(LOGITS, returns="processed_logits")
    with pytest.raises(UnknownNameError, match="allowed: FAST, TORCH"):
        sampler_of("FASTER").sample(LOGITS)


def test_a_named_sampler_whose_library_is_absent_raises_with_the_command() -> None:
    register_sampler(Absent)
    with pytest.raises(VendorMissingError, match="to install it: pip install absent"):
        sampler_of("ABSENT").sample(LOGITS)
    verdict = sampler_of().sample(LOGITS).selection.verdict("ABSENT")
    assert verdict.status is VerdictStatus.UNAVAILABLE


def test_auto_goes_on_without_one_that_does_not_load_and_a_name_does_not() -> None:
    register_sampler(Broken)
    selection = sampler_of().sample(LOGITS).selection
    assert selection.chosen == "TORCH"
    assert "OSError: libbroken.so: undefined symbol" in selection.verdict("BROKEN").summary()
    with pytest.raises(VendorMissingError, match="undefined symbol") as caught:
        sampler_of("BROKEN").sample(LOGITS)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_platforms_sampler_that_does_not_import_is_out_with_its_words() -> None:
    selection = sampler_of(samplers=("no_such_module_of_ours:Sampler",)).selection()
    assert selection.chosen == "TORCH"
    verdict = selection.verdict("no_such_module_of_ours:Sampler")
    assert "No module named 'no_such_module_of_ours'" in verdict.detail


def test_a_name_has_one_owner() -> None:
    class Other(Fast):
        pass

    register_sampler(Fast)
    register_sampler(Fast)
    with pytest.raises(InvalidInputError, match=r"sampler\.name is FAST"):
        register_sampler(Other)
    with pytest.raises(InvalidInputError, match="a SamplerBackend's class"):
        register_sampler(Fast())  # type: ignore[arg-type]


def test_a_selection_is_json_safe() -> None:
    register_sampler(Fast)
    found: dict[str, Any] = json.loads(json.dumps(sampler_of().selection().to_dict()))
    assert found["chosen"] == "FAST"
    assert [verdict["name"] for verdict in found["verdicts"]] == ["FAST", "TORCH"]


def test_checked_mode_looks_into_tensors_on_the_device() -> None:
    params = SamplingParams(top_p=torch.tensor([0.5, 0.7]))
    assert sampler_of(checked=True).sample(LOGITS, params).valid.all()
    object.__setattr__(params, "top_p", torch.tensor([0.5, 1.7]))
    with pytest.raises(InvalidInputError, match=r"top_p\[1\] is 1.7"):
        sampler_of(checked=True).sample(LOGITS, params)


def test_what_was_drawn_reads_as_a_line() -> None:
    found = sampler_of().sample(LOGITS, returns="processed_logprobs")
    rows, shape = tuple(found.ids.shape), tuple(LOGITS.shape)
    by = f"by {found.selection.chosen} on cpu"
    assert repr(found) == f"Sampled(ids={rows}, valid={rows}, logprobs={shape}, {by})"
