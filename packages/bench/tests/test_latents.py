"""Latent attention in the bench: counted by hand, run beside a direct call, refused by name."""

from __future__ import annotations

import pytest
import torch

from attn_bench.agreement import WrongResultError, check_agreement
from attn_bench.contenders import BackendContender
from attn_bench.counting import count
from attn_bench.graphs import rotation
from attn_bench.peers import contender_named
from attn_bench.sets import SETS
from attn_bench.vendor_peers import VendorContender, VendorPeer
from attn_bench.workloads import Heads, Workload, WorkloadPhase
from attn_shared.errors import InvalidInputError, NoBackendError, UnsupportedOptionError
from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.request import MLADims

CPU = torch.device("cpu")
SMALL = MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)


def decode(*seq_lens: int, query_len: int = 1, **options: object) -> Workload:
    fields = {"heads": Heads.latents(3, SMALL), "dtype": torch.float32, "block_size": 4}
    return Workload(
        phase=WorkloadPhase.DECODE,
        query_lens=(query_len,) * len(seq_lens),
        seq_lens=seq_lens,
        **{**fields, **options},  # type: ignore[arg-type]
    )


def prefill(*lens: int) -> Workload:
    heads = Heads.expanded(3, SMALL)
    return decode(*lens, heads=heads).with_fields(phase=WorkloadPhase.PREFILL, query_lens=lens)


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("16/1x576:512", Heads.latents(16)),
        ("128/128x192:128", Heads.expanded(128)),
        ("8/1x320:256", Heads.latents(8, MLADims(kv_lora_rank=256))),
    ],
)
def test_shapes_are_written_with_the_values_width(text: str, heads: Heads) -> None:
    assert Heads.parse(text) == heads
    assert str(heads) == text


def test_a_shape_that_no_such_layer_has() -> None:
    with pytest.raises(InvalidInputError, match="16/2x576:512"):
        Heads.parse("16/2x576:512")


def test_an_entry_is_read_once_and_its_first_part_is_the_value() -> None:
    work = count(decode(100, 50))
    assert work.kv_bytes == 150 * 24 * 4
    assert work.io_bytes == 2 * 3 * (24 + 16) * 4
    assert work.operations == 2 * 3 * (24 + 16) * 150


def test_the_h200s_read_floor() -> None:
    """32 x 4096 entries of 576 in bfloat16 are 151 MB: 34.7 us at 4.35 TB/s."""
    first = SETS["h200-mla"][0]
    assert (first.shape, str(first.heads), first.block_size) == ("32x4096", "16/1x576:512", 64)
    assert count(first).kv_bytes == 150_994_944


def test_expanded_keys_and_values_have_their_own_widths() -> None:
    work = count(prefill(10))
    assert work.kv_bytes == 10 * 3 * (16 + 12) * 4
    assert work.io_bytes == 10 * 3 * (16 + 12) * 4
    assert work.operations == 2 * 3 * (16 + 12) * 55


@pytest.mark.parametrize("options", [{}, {"returns_lse": True}, {"own_output": True}])
@pytest.mark.parametrize("workload", [decode(9, 30, 1), decode(9, 30, query_len=3), prefill(9, 30)])
def test_what_is_timed_answers_rightly(workload: Workload, options: dict[str, bool]) -> None:
    name = "TORCH_MLA" if workload.heads.is_latent else "TORCH_SDPA"
    prepared = BackendContender(name).prepare(
        workload.with_fields(**options), CPU, 2, is_captured=False
    )
    assert prepared.name == name
    assert prepared.plan is not None
    prepared.plan()
    for copy in prepared.copies:
        check_agreement(prepared.name, copy, copy.call())


@pytest.mark.parametrize("workload", [decode(9, 30, 1), prefill(9, 30)])
def test_whoever_is_chosen_answers_rightly(workload: Workload) -> None:
    prepared = BackendContender("auto").prepare(workload, CPU, 1, is_captured=False)
    check_agreement(prepared.name, prepared.copies[0], prepared.copies[0].call())


def test_an_answer_by_another_scale_is_wrong() -> None:
    from dataclasses import replace

    (copy,) = BackendContender("TORCH_MLA").prepare(decode(30), CPU, 1, is_captured=False).copies
    with pytest.raises(WrongResultError):
        check_agreement("X", replace(copy, scale=24**-0.5), copy.call())


def test_a_captured_step_is_one_of_decodes() -> None:
    prepared = BackendContender("TORCH_MLA").prepare(decode(9, 5), CPU, 1, is_captured=True)
    check_agreement("TORCH_MLA", prepared.copies[0], prepared.copies[0].call())


@pytest.mark.parametrize(
    ("name", "workload", "words"),
    [
        ("TORCH_MLA", prefill(9), "TORCH_MLA does not run prefill"),
        ("TORCH_MLA", decode(30, query_len=20), "would prefill the others"),
        ("auto", prefill(9).with_fields(seq_lens=(12,)), "has earlier ones"),
    ],
)
def test_backends_of_the_other_kind(name: str, workload: Workload, words: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=words):
        BackendContender(name).prepare(workload, CPU, 1, is_captured=False)


def test_a_backend_of_ordinary_heads() -> None:
    with pytest.raises(NoBackendError, match="mla=True"):
        BackendContender("TORCH_SDPA").prepare(decode(9), CPU, 1, is_captured=False)


@pytest.mark.parametrize("peer", ["torch.sdpa", "torch.sdpa_folded", "torch.sdpa_gathered"])
def test_peers_of_ordinary_heads(peer: str) -> None:
    with pytest.raises(UnsupportedOptionError, match="no latent attention"):
        contender_named(peer).prepare(decode(9), CPU, 1, is_captured=False)


def test_a_peer_over_latents_gets_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = VendorPeer(
        name="x",
        description="",
        distributions=("torch",),
        install="",
        maker="mla_peer:direct",
        takes_latents=True,
    )
    contender = VendorContender(peer)
    prepared = contender.prepare(decode(9, 30), CPU, 1, is_captured=False)
    check_agreement("x", prepared.copies[0], prepared.copies[0].call())
    with pytest.raises(UnsupportedOptionError, match="decodes over latents"):
        contender.prepare(prefill(9), CPU, 1, is_captured=False)


def test_reading_alone_is_a_peer_of_everything() -> None:
    for workload in (decode(9), prefill(9)):
        prepared = contender_named("torch.read").prepare(workload, CPU, 1, is_captured=False)
        assert not prepared.is_attention


def test_every_call_of_a_graph_is_a_layer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that the first layer's call makes is made once for all of them, as in a model."""
    found = BackendContender("TORCH_MLA").prepare(decode(9, 5), CPU, 3, is_captured=False)
    seen: list[int] = []
    impl = DEFAULT_REGISTRY.load("TORCH_MLA").get_impl_cls()
    plain = impl.forward_mqa

    def record(self: object, *arguments: object, **options: object) -> torch.Tensor:
        seen.append(id(self))
        result: torch.Tensor = plain(self, *arguments, **options)
        return result

    monkeypatch.setattr(impl, "forward_mqa", record)
    for index in rotation(3):
        found.copies[index].call()
    assert len(seen) == len(set(seen)) == 24
