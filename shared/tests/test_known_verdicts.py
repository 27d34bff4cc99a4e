from __future__ import annotations

import json

from attn_shared_fakes import backend, registry_of, request

from attn_shared.device import preset
from attn_shared.known_verdicts import KNOWN_NOT_PROVIDED, known_verdicts
from attn_shared.request import AttentionRequest, MLADims

H100, B200, MI300X = preset("h100"), preset("b200"), preset("mi300x")
LATENT = AttentionRequest(num_heads=16, num_kv_heads=1, head_size=576, mla=MLADims())


def test_they_are_of_the_requests_family_and_the_devices_vendor() -> None:
    names = {verdict.name for verdict in known_verdicts(LATENT, H100, registry_of())}
    assert names >= {"FLASHMLA", "TRITON_MLA", "CUTLASS_MLA"}
    assert not names & {"FLASHMLA_SPARSE", "ROCM_AITER_MLA", "FLASHINFER"}
    names = {verdict.name for verdict in known_verdicts(request(), MI300X, registry_of())}
    assert {"ROCM_ATTN", "ROCM_AITER_FA"} <= names


def test_what_is_provided_has_a_verdict_of_its_own() -> None:
    registry = registry_of(backend("FLASHMLA"))
    assert "FLASHMLA" not in {verdict.name for verdict in known_verdicts(LATENT, H100, registry)}


def test_each_says_whether_it_would_serve() -> None:
    found = {v.name: v for v in known_verdicts(LATENT, H100, registry_of())}
    assert found["FLASHMLA"].would_serve
    assert "would serve this by the limits of vLLM 0.25.1" in found["FLASHMLA"].summary()
    cutlass = found["CUTLASS_MLA"]
    assert not cutlass.would_serve
    assert "device=nvidia sm_90 (9.0) (allowed: nvidia family 10.x)" in cutlass.summary()


def test_one_without_published_limits_says_what_it_is() -> None:
    found = {v.name: v for v in known_verdicts(request(), H100, registry_of())}
    trtllm = found["FLASHINFER_TRTLLM"]
    assert (trtllm.reasons, trtllm.would_serve) == (None, False)
    assert trtllm.summary() == "FlashInfer: trtllm-gen, XQA; planned for attn-cuda"


def test_they_are_json_safe() -> None:
    records = [v.to_dict() for v in known_verdicts(LATENT, B200, registry_of())]
    found = {record["name"]: record for record in json.loads(json.dumps(records))}
    assert found["CUTLASS_MLA"]["status"] == KNOWN_NOT_PROVIDED
    assert found["CUTLASS_MLA"]["would_serve"] is True
    assert found["FLASHMLA"]["reasons"][0]["code"] == "device"
    assert found["FLASHMLA"]["limits_of"] == "vLLM 0.25.1"
