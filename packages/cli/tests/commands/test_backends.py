from __future__ import annotations

from typing import Any

import pytest

from attn_cli.commands.backends import backend_records
from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS, KNOWN_MLA_PREFILLS
from attn_shared.registry import DEFAULT_REGISTRY, BackendRegistry


def rows(record: Any) -> dict[str, Any]:
    return {row["name"]: row for row in record["backends"] if row["kind"] == "attention"}


def test_what_is_provided_says_by_whom_and_for_whom(attn: Any) -> None:
    record = attn.json("list")
    assert record["schema_version"] == 1
    assert set(rows(record)) == set(DEFAULT_REGISTRY.names())
    torch = rows(record)["TORCH_SDPA"]
    assert torch["status"] == "provided"
    assert torch["provided_by"].startswith("attn-torch ")
    assert torch["path"].startswith("attn_torch.")
    assert torch["family"] == "mha"
    assert torch["vendors"] == ["nvidia", "amd", "intel", "cpu"]
    assert torch["description"]


def test_all_shows_names_that_nothing_provides(attn: Any) -> None:
    record = attn.json("list", "--all")
    names = {(row["kind"], row["name"]) for row in record["backends"]}
    assert names >= {("attention", name) for name in KNOWN_BACKENDS}
    assert names >= {("mamba", name) for name in KNOWN_MAMBA_BACKENDS}
    absent = rows(record)["FLASHMLA_SPARSE"]
    assert (absent["status"], absent["is_planned"]) == ("not provided", False)
    assert (absent["family"], absent["vendors"]) == ("sparse_mla", ["nvidia"])
    assert absent["provided_by"] is None
    assert record["not_shown"] == 0


def test_the_number_of_names_not_shown_is_given(attn: Any) -> None:
    brief, full = attn.json("list"), attn.json("list", "--all")
    assert brief["not_shown"] == len(full["backends"]) - len(brief["backends"]) > 0
    assert f"{brief['not_shown']} more names are known" in attn("list").stdout


def test_prefills_over_latents_are_a_kind_of_their_own(attn: Any) -> None:
    record = attn.json("list", "--all")
    prefills = {row["name"]: row for row in record["backends"] if row["kind"] == "mla_prefill"}
    assert set(prefills) >= set(KNOWN_MLA_PREFILLS)
    assert prefills["TORCH_SDPA"]["status"] == "provided"
    assert prefills["TORCH_SDPA"]["path"].startswith("attn_torch.mla_prefills.")
    assert prefills["TOKENSPEED_MLA"]["status"] == "not provided"
    assert "MLA prefill" in attn("list").stdout


def test_a_third_partys_backend_is_asked_for_its_vendors(attn: Any, paged16: str) -> None:
    row = rows(attn.json("list"))[paged16]
    assert row["vendors"] == ["cpu", "nvidia"]
    assert (row["is_known"], row["family"]) == (False, "mha")
    assert row["description"] == "takes blocks of 16 tokens"


def test_quiet_prints_names(attn: Any) -> None:
    assert attn("list", "-q").stdout.splitlines() == list(DEFAULT_REGISTRY.names())


def test_a_capability_that_raises_takes_only_the_facts_away(
    attn: Any, paged16: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DEFAULT_REGISTRY.load(paged16), "capability", lambda *_: 1 // 0)
    row = rows(attn.json("list"))[paged16]
    assert (row["status"], row["vendors"], row["family"]) == ("provided", [], None)


@pytest.fixture
def broken() -> BackendRegistry:
    registry = BackendRegistry(entry_points=lambda _group: ())
    registry.register("BROKEN", "no_such_module_at_all:Backend", source="a test")
    return registry


def test_a_backend_that_does_not_load_is_shown(broken: BackendRegistry) -> None:
    row = next(row for row in backend_records(broken, "attention") if row["name"] == "BROKEN")
    assert row["status"] == "failed"
    assert row["error"]["class"] == "PluginError"
    assert "no_such_module_at_all" in row["error"]["message"]
    assert row["provided_by"] == "a test"
