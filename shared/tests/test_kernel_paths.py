from __future__ import annotations

import json
from typing import Any

import pytest
from attn_shared_fakes import GPU, capability, request

from attn_shared.backend import AttentionBackend
from attn_shared.inventory import Inventory
from attn_shared.kernel_paths import KernelPath
from attn_shared.platform import Candidate
from attn_shared.registry import BackendRegistry
from attn_shared.selection import VerdictStatus
from attn_shared.verdicts import judge

PATH = KernelPath(rows="decodes", kernel="the split-KV kernel", why="at most 16 query tokens")


class Told(AttentionBackend):
    """Says of every request which block size it was asked with."""

    name = "TOLD"

    @classmethod
    def capability(cls, device: Any, inventory: Any) -> Any:
        return capability()

    @classmethod
    def kernel_paths(cls, request: Any, device: Any, inventory: Any) -> tuple[KernelPath, ...]:
        return (KernelPath(rows="all rows", kernel="one", why=f"pages of {request.block_size}"),)

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError


class Plain(Told):
    """Has one way."""

    kernel_paths = AttentionBackend.kernel_paths


class Failing(Told):
    """Fails to say it."""

    @classmethod
    def kernel_paths(cls, request: Any, device: Any, inventory: Any) -> tuple[KernelPath, ...]:
        raise ZeroDivisionError("no way")


def verdict_of(backend: type[AttentionBackend], monkeypatch: Any, **asked: Any) -> Any:
    registry = BackendRegistry()
    monkeypatch.setattr(registry, "load", lambda name, kind="attention": backend)
    candidate = Candidate(name=backend.name, priority=100, provenance="test")
    return judge(candidate, request(**asked), GPU, Inventory(), registry)


def test_a_path_reads_as_a_line_and_is_json_safe() -> None:
    assert str(PATH) == "decodes: the split-KV kernel (at most 16 query tokens)"
    assert json.loads(json.dumps(PATH.to_dict())) == {
        "rows": "decodes",
        "kernel": "the split-KV kernel",
        "why": "at most 16 query tokens",
    }


def test_a_verdict_has_the_paths_of_the_block_size_that_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = verdict_of(Told, monkeypatch)
    assert [path.why for path in verdict.paths] == ["pages of 16"]
    assert verdict.to_dict()["paths"] == [
        {"rows": "all rows", "kernel": "one", "why": "pages of 16"}
    ]
    assert [p.why for p in verdict_of(Told, monkeypatch, block_size=48).paths] == ["pages of 48"]
    assert verdict_of(Told, monkeypatch, head_size=3).paths == ()
    assert verdict_of(Plain, monkeypatch).paths == ()


def test_a_backend_that_fails_to_say_so_stays_eligible(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_of(Failing, monkeypatch)
    assert verdict.status is VerdictStatus.ELIGIBLE
    (path,) = verdict.paths
    assert path.kernel == "not known"
    assert path.why == "kernel_paths of TOLD raised ZeroDivisionError: no way"
