"""What a prefill over latents is asked, and what it may say."""

from __future__ import annotations

import pytest
import torch

from attn_shared.capability import DeviceLimit, Reason, Rule
from attn_shared.device import PRESETS, DeviceFacts, Vendor
from attn_shared.mla_prefill import padded_value, prefill_capability, prefill_request
from attn_shared.request import AttentionRequest, MLADims, Phase

HALF = frozenset({torch.bfloat16, torch.float16})
NVIDIA = (DeviceLimit(vendor=Vendor.NVIDIA),)


def request(**options: object) -> AttentionRequest:
    dims = MLADims()
    fields = {"num_heads": 16, "num_kv_heads": 1, "head_size": 576, "mla": dims, **options}
    return AttentionRequest(**fields)  # type: ignore[arg-type]


def test_values_are_padded_with_zeros_that_change_nothing() -> None:
    value = torch.arange(12.0).view(2, 2, 3)
    padded = padded_value(value, 5)
    assert padded.shape == (2, 2, 5)
    assert torch.equal(padded[..., :3], value)
    assert not padded[..., 3:].any()
    weights = torch.rand(4, 2)
    assert torch.equal((weights @ padded[:, 0])[:, :3], weights @ value[:, 0])


def test_a_prefill_is_asked_nothing_of_the_cache() -> None:
    asked = prefill_request(
        request(
            kv_cache_dtype="fp8",
            block_size=64,
            needs_lse=True,
            dcp_size=2,
            use_kv_connector=True,
            per_head_quant_scales=True,
        )
    )
    assert asked == request(phase=Phase.PREFILL)


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({}, []),
        ({"dtype": torch.float32}, ["dtype"]),
        ({"batch_invariant": True}, ["batch_invariance"]),
        ({"non_causal": True}, ["non_causal"]),
        ({"has_sinks": True}, ["sink"]),
        ({"use_sparse": True}, ["sparse"]),
    ],
)
def test_what_is_not_said_is_not_served(options: dict[str, object], codes: list[str]) -> None:
    served = prefill_capability(NVIDIA, HALF)
    found = served.check(prefill_request(request(**options)), PRESETS["h200"])
    assert [reason.code for reason in found] == codes


def test_rules_see_the_widths() -> None:
    def check(asked: AttentionRequest, device: DeviceFacts) -> Reason | None:
        widths = asked.mla
        if widths is not None and widths.v_head_dim == 128:
            return None
        return Reason(code="mla_dims", value=str(widths), allowed="v_head_dim=128")

    served = prefill_capability(NVIDIA, HALF, rules=(Rule(name="mla_dims", check=check),))
    assert served.check(prefill_request(request()), PRESETS["h200"]) == ()
    other = prefill_request(request(mla=MLADims(v_head_dim=64)))
    (reason,) = served.check(other, PRESETS["h200"])
    assert (reason.code, reason.allowed) == ("mla_dims", "v_head_dim=128")
    (reason,) = served.check(prefill_request(request()), PRESETS["spr"])
    assert reason.code == "device"
