"""The adapters with vLLM's base classes under them, as vLLM wants to find them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from attn_shared.dtypes import KVCacheLayout
from attn_shared.settings import from_environ
from attn_vllm._vendor import engine
from attn_vllm.backend import BackendAdapter
from attn_vllm.builder import BuilderAdapter
from attn_vllm.impl import ImplAdapter
from attn_vllm.layers import EngineFacts, named
from attn_vllm.plugin import OWN_NAME
from attn_vllm.versions import Interface, interface_of

__all__ = ["backend_class"]


class _Choice:
    """Which backend was named, for the three classes."""

    @classmethod
    def named_backend(cls) -> str | None:
        """Return the backend that `ATTN_VLLM_BACKEND` names; None is "auto"."""
        return named(from_environ().vllm_backend)


@cache
def backend_class() -> type[Any]:
    """Return the backend class for the vLLM that is installed."""
    from vllm.v1.attention.backend import AttentionBackend

    members: dict[str, Any] = {
        "__module__": "attn_vllm.adapters",
        "__qualname__": "AttnBackend",
        "__doc__": "attn's backends, as vLLM's.",
        "get_name": staticmethod(_name),
        "get_impl_cls": staticmethod(impl_class),
        "get_builder_cls": staticmethod(builder_class),
        "device": classmethod(lambda _cls: engine.torch_device()),
        "engine_multiple_of": classmethod(lambda _cls, base: engine.multiple_of(base)),
    }
    if interface_of(engine.version()) is Interface.LAYOUTS:
        members["supported_kv_cache_layouts"] = classmethod(_vllm_layouts)
    return type("AttnBackend", (_Choice, BackendAdapter, AttentionBackend), members)


def _name() -> str:
    return engine.place_name(interface_of(engine.version()), OWN_NAME)


def _vllm_layouts(cls: type[BackendAdapter]) -> tuple[Any, ...]:
    """Return vLLM's layouts whose pages hold one block of one layer each."""
    from vllm.v1.kv_cache_interface import KVCacheLayout as EngineLayout

    names = {KVCacheLayout.HND: "LBHNC", KVCacheLayout.NHD: "LBNHC"}
    return tuple(EngineLayout[names[layout]] for layout in cls.attn_layouts())


@cache
def impl_class() -> type[Any]:
    """Return the implementation class for the vLLM that is installed."""
    from vllm.v1.attention.backend import AttentionImpl

    class AttnImpl(_Choice, ImplAdapter, AttentionImpl):  # type: ignore[misc]
        """A backend of attn's, as vLLM's."""

        @classmethod
        def engine_facts(cls) -> EngineFacts:
            """Return what the engine's configuration says."""
            return engine.engine_facts()

    return AttnImpl


@cache
def builder_class() -> type[Any]:
    """Return the builder class for the vLLM that is installed."""
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

    class AttnBuilder(BuilderAdapter, AttentionMetadataBuilder):  # type: ignore[misc]
        """The builders of attn's backends, as vLLM's."""

        def __init__(
            self,
            kv_cache_spec: Any,
            layer_names: list[str],
            vllm_config: Any,
            device: torch.device,
        ) -> None:
            """Bind the group's layers to their cache."""
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            layers = engine.layers_of(vllm_config, layer_names)
            self.prepare(layers, getattr(kv_cache_spec, "block_size", None), device)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            """Return which batches may be captured."""
            level = cls.graph_level(_Choice.named_backend(), engine.build_config(vllm_config))
            return AttentionCGSupport[level.name]

    return AttnBuilder
