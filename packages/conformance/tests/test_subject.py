from __future__ import annotations

import pytest
import torch

from attn_conformance.case import Case
from attn_conformance.reference_backend import ReferenceBackend
from attn_conformance.subject import Subject
from attn_shared.errors import NoBackendError, PluginError, UnknownNameError

REFERENCE = "attn_conformance.reference_backend:ReferenceBackend"
CASE = Case(name="c", query_lens=(1,), seq_lens=(5,))


def test_a_class_is_found_by_its_path() -> None:
    subject = Subject.find(REFERENCE)
    assert subject.backend is ReferenceBackend
    assert subject.source == "attn_conformance.reference_backend"
    assert subject.device == torch.device("cpu")
    assert subject.returns_lse


def test_a_registered_backend_is_found_by_its_name() -> None:
    pytest.importorskip("attn_torch")
    subject = Subject.find("TORCH_SDPA")
    assert subject.backend.name == "TORCH_SDPA"
    assert subject.source.startswith("attn-torch ")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("NO_SUCH", UnknownNameError, "unknown backend 'NO_SUCH'"),
        ("no_such_module:Backend", PluginError, "no_such_module"),
        ("conformance_backends:Missing", PluginError, "Missing"),
        ("conformance_backends:NotABackend", PluginError, "not a subclass"),
    ],
)
def test_a_name_that_is_no_backend_is_refused(
    name: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Subject.find(name)


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown device 'tin'"):
        Subject.find(REFERENCE, "tin")


def test_a_device_of_no_platform_is_refused() -> None:
    with pytest.raises(NoBackendError, match="meta"):
        Subject.find(REFERENCE, "meta")


def test_the_capability_says_what_is_excluded() -> None:
    subject = Subject.find("conformance_backends:Blocks16")
    codes = {reason.code for reason in subject.excluded(CASE)}
    assert codes == {"dtype", "head_size", "block_size"}
    assert (
        subject.excluded(CASE.with_fields(dtype=torch.bfloat16, head_size=64, block_size=32)) == ()
    )


def test_the_mode_of_a_case_reaches_the_builder() -> None:
    subject = Subject.find(REFERENCE)
    case = CASE.with_fields(batch_invariant=True)
    engine = subject.engine(subject.batch(case), max_num_seqs=7)
    assert engine.builder.config.batch_invariant
    assert engine.builder.config.max_num_seqs == 7
    assert engine.impl.spec.batch_invariant
