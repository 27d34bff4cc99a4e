"""A stand-in for the parts of vLLM that attn-vllm touches, of either interface and either device.

Its classes have the names, abstract methods and defaults of the real ones, and nothing else: where
vLLM itself is needed, the session `vllm` runs it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from enum import Enum, IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attn_vllm._vendor import classes


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class GraphLevel(IntEnum):
    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class Layout(Enum):
    LBHNC = 1
    LBNHC = 2


class Backend(ABC):
    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...


class Impl(ABC):
    @abstractmethod
    def __init__(self, *arguments: Any) -> None: ...

    @abstractmethod
    def forward(self, *arguments: Any) -> torch.Tensor: ...


class Builder(ABC):
    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any: ...


class StandIn:
    """The modules, and what was registered with them.

    Attributes:
        names: vLLM's backends by name -> class path, where it was overridden or added.
        config: the engine's configuration.
    """

    def __init__(self, version: str, device_type: str, **config: Any) -> None:
        self.version, self.device_type = version, device_type
        self.names: dict[str, str | None] = {"CPU_ATTN": None, "FLASH_ATTN": None, "CUSTOM": None}
        self.config = _config(**config)

    def install(self, monkeypatch: Any) -> None:
        """Put the modules in their places."""
        for name, members in self._modules().items():
            module = ModuleType(name)
            vars(module).update(members, __path__=[])
            monkeypatch.setitem(sys.modules, name, module)
        for made in (classes.backend_class, classes.impl_class, classes.builder_class):
            made.cache_clear()

    def _modules(self) -> dict[str, dict[str, Any]]:
        enum = _Names(self.names)
        platform = SimpleNamespace(
            device_type=self.device_type, is_cpu=lambda: self.device_type == "cpu"
        )
        bases = {
            "AttentionBackend": Backend,
            "AttentionImpl": Impl,
            "AttentionMetadataBuilder": Builder,
            "AttentionCGSupport": GraphLevel,
            "MultipleOf": MultipleOf,
        }
        return {
            "vllm": {"__version__": self.version, "envs": SimpleNamespace()},
            "vllm.platforms": {"current_platform": platform},
            "vllm.config": {"get_current_vllm_config": lambda: self.config},
            "vllm.v1": {},
            "vllm.v1.attention": {},
            "vllm.v1.attention.backend": bases,
            "vllm.v1.attention.backends": {},
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": enum,
                "register_backend": enum.register,
            },
            "vllm.v1.kv_cache_interface": {"KVCacheLayout": Layout},
        }


class _Names:
    """The enum of backends: members by name, new ones in the later releases."""

    def __init__(self, names: dict[str, str | None]) -> None:
        self._names = names

    @property
    def __members__(self) -> dict[str, str | None]:
        return self._names

    def __getitem__(self, name: str) -> str:
        return name if name in self._names else {}[name]

    def register(self, name: str, path: str) -> None:
        self._names[name] = path


def _config(**changes: Any) -> SimpleNamespace:
    """An engine's configuration, as far as it is read."""
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(dtype=torch.float32, max_model_len=512),
        "cache_config": SimpleNamespace(block_size=16, user_specified_block_size=False),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        "compilation_config": SimpleNamespace(
            static_forward_context={}, cudagraph_capture_sizes=None
        ),
        "speculative_config": None,
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**{**parts, **changes})


def layer_with(impl: Any, **values: Any) -> SimpleNamespace:
    """A layer of vLLM's around an implementation."""
    plain = {"_q_scale_float": 1.0, "_k_scale_float": 1.0, "_v_scale_float": 1.0}
    return SimpleNamespace(impl=impl, head_size_v=impl.head_size, **{**plain, **values})


def batch(query_lens: list[int], seq_lens: list[int], block_size: int, padding: int = 0) -> Any:
    """The description of a batch as vLLM's runner makes it, blocks numbered from 1."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    blocks = [-(-length // block_size) for length in seq_lens]
    table = torch.zeros(len(blocks), max(blocks) + 2, dtype=torch.int32)
    slots, first = [], 1
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(first, first + count)
        first += count
        for position in range(seq_lens[row] - query_lens[row], seq_lens[row]):
            block = int(table[row, position // block_size])
            slots.append(block * block_size + position % block_size)
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens) + padding,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens) + 3,  # an upper bound
        block_table_tensor=table,
        slot_mapping=torch.tensor([*slots, *[-1] * padding], dtype=torch.int64),
        causal=True,
        num_blocks=first,
    )
