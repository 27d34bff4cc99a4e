from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from attn_shared_fakes import FakeBackend, backend

from attn_shared.backend_names import (
    AttentionBackendEnum,
    MambaAttentionBackendEnum,
    register_backend,
)
from attn_shared.errors import BackendNotProvidedError, DuplicateNameError
from attn_shared.registry import DEFAULT_REGISTRY

HPC, CUSTOM = AttentionBackendEnum.HPC_ATTN, AttentionBackendEnum.CUSTOM


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    yield
    for name in (HPC, CUSTOM, "MY_ATTN"):
        DEFAULT_REGISTRY.clear_override(name)
    for member in MambaAttentionBackendEnum:
        member.clear_override()


def test_every_member_is_its_own_name_and_no_alias() -> None:
    # Equal values would make one member an alias of another, and registering hit the wrong one.
    for kind in (AttentionBackendEnum, MambaAttentionBackendEnum):
        assert [member.value for member in kind] == list(kind.__members__)
        assert all(str(member) == member.name for member in kind)


def test_a_member_finds_what_is_registered_for_it() -> None:
    assert not HPC.is_overridden()
    mine = backend("HPC_ATTN")
    register_backend(HPC, mine)
    assert HPC.is_overridden()
    assert HPC.get_class() is mine
    assert HPC.get_path() == "attn_shared_fakes:HPC_ATTN"
    assert HPC.get_path(include_classname=False) == "attn_shared_fakes"
    HPC.clear_override()
    assert not HPC.is_overridden()
    with pytest.raises(BackendNotProvidedError, match="'HPC_ATTN' is known and not provided"):
        HPC.get_class()


def test_a_path_in_either_form_has_a_module() -> None:
    register_backend("HPC_ATTN", "some.module.Class")
    assert HPC.get_path() == "some.module:Class"
    assert HPC.get_path(include_classname=False) == "some.module"


def test_the_decorator_returns_the_class() -> None:
    @register_backend("MY_ATTN")
    class MyBackend(FakeBackend):
        name = "MY_ATTN"

    assert MyBackend.name == "MY_ATTN"
    assert DEFAULT_REGISTRY.load("MY_ATTN") is MyBackend


def test_with_a_target_the_decorator_has_nothing_left_to_do() -> None:
    decorate: Callable[[type[dict[str, int]]], type[dict[str, int]]]
    decorate = register_backend("MY_ATTN", backend("MY_ATTN"))
    mine = DEFAULT_REGISTRY.load("MY_ATTN")
    assert decorate(dict) is dict
    assert DEFAULT_REGISTRY.load("MY_ATTN") is mine


def test_many_third_parties_have_names_of_their_own() -> None:
    register_backend("MY_ATTN", "mine:Attn")
    register_backend(CUSTOM, "theirs:Attn")
    assert {"MY_ATTN", "CUSTOM"} <= set(DEFAULT_REGISTRY.names())
    with pytest.raises(DuplicateNameError, match=r"CUSTOM is already registered as theirs:Attn by"):
        register_backend(CUSTOM, "mine:Attn")


@pytest.mark.parametrize("name", [MambaAttentionBackendEnum.MAMBA2, "MAMBA2"])
def test_a_recurrent_name_goes_to_the_recurrent_registry(name: str) -> None:
    register_backend(name, dict)
    assert MambaAttentionBackendEnum.MAMBA2.get_class() is dict
    assert MambaAttentionBackendEnum.MAMBA2.get_path() == "builtins:dict"
    assert DEFAULT_REGISTRY.names("mamba") == ("MAMBA2",)
    assert "MAMBA2" not in DEFAULT_REGISTRY.names()


def test_a_name_of_both_kinds_goes_where_its_type_says() -> None:
    register_backend("CUSTOM", backend("CUSTOM"))
    register_backend(MambaAttentionBackendEnum.CUSTOM, dict)
    assert MambaAttentionBackendEnum.CUSTOM.get_class() is dict
    assert CUSTOM.get_class().get_name() == "CUSTOM"
    MambaAttentionBackendEnum.CUSTOM.clear_override()
    assert CUSTOM.is_overridden()
