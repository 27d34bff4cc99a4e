"""Names that other software gives to attention backends, and what attn calls them.

The names are those of `vllm serve --attention-backend` (vLLM 0.25.1), `sglang
--attention-backend` (SGLang 0.5) and `attn_implementation` of transformers 5. One of them may stand
for several of attn's, which a request and a device tell apart: SGLang's "triton" serves ordinary
heads and latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from attn_shared.device import Vendor
from attn_shared.errors import InvalidInputError, NoBackendError, UnknownNameError
from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS
from attn_shared.request import AttentionRequest

__all__ = [
    "FOREIGN_NAMES",
    "ForeignName",
    "backend_for",
    "family_of",
    "find_foreign_name",
    "names_elsewhere",
]

_OURS_ALONE = frozenset({"FLASHINFER_TRTLLM", "XPU_FLASH_ATTN", "IPEX", "TORCH_MLA", "CPU_MLA"})
_PAGED = "paged|"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignName:
    """One name of other software.

    Attributes:
        origin: whose it is, a key of `FOREIGN_NAMES`.
        name: as it is written there.
        backends: what attn calls it, by families and vendors; empty: attn has nothing like it.
        flash_attn_version: the generation of FlashAttention that the name means, if it means one.
        note: what a reader should know.
    """

    origin: str
    name: str
    backends: tuple[str, ...]
    flash_attn_version: int | None = None
    note: str = ""

    def __str__(self) -> str:
        """Read as "vllm:FLASHINFER"."""
        return f"{self.origin}:{self.name}"


def _vllm() -> Iterator[ForeignName]:
    several = {
        "FLASH_ATTN": ("FLASH_ATTN", "XPU_FLASH_ATTN"),
        "FLASHINFER": ("FLASHINFER", "FLASHINFER_TRTLLM"),
        "NO_ATTENTION": (),
        "CUSTOM": (),
    }
    notes = {
        "FLASHINFER": "vLLM decides within this name whether trtllm-gen and XQA kernels run",
        "NO_ATTENTION": "a name whose module is in no release of vLLM 0.25.1",
        "CUSTOM": "vLLM's slot for third parties; attn takes theirs by their own names",
    }
    for name in [*KNOWN_BACKENDS, *(n for n in KNOWN_MAMBA_BACKENDS if n not in KNOWN_BACKENDS)]:
        if name not in _OURS_ALONE:
            backends = several.get(name, (name,))
            yield ForeignName(origin="vllm", name=name, backends=backends, note=notes.get(name, ""))


def _sglang() -> Iterator[ForeignName]:
    names: dict[str, tuple[str, ...]] = {
        "triton": ("TRITON_ATTN", "TRITON_MLA"),
        "torch_native": ("TORCH_SDPA",),
        "flex_attention": ("FLEX_ATTENTION",),
        "flashinfer": ("FLASHINFER", "FLASHINFER_MLA"),
        "flashmla": ("FLASHMLA",),
        "cutlass_mla": ("CUTLASS_MLA",),
        "trtllm_mla": ("FLASHINFER_MLA",),
        "trtllm_mha": ("FLASHINFER_TRTLLM",),
        "aiter": ("ROCM_AITER_FA", "ROCM_AITER_MLA"),
        "intel_amx": ("CPU_ATTN",),
        "intel_xpu": ("XPU_FLASH_ATTN",),
        "nsa": ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE"),
        "wave": (),
        "ascend": (),
        "dual_chunk_flash_attn": (),
    }
    notes = {
        "triton": "of SGLang's own kernels; TRITON_ATTN and TRITON_MLA are attn's",
        "intel_amx": "of SGLang's own kernels; CPU_ATTN is attn's",
        "wave": "attn has no kernels of this compiler",
        "ascend": "attn has no platform for Ascend NPUs",
        "dual_chunk_flash_attn": "attn has no dual chunk attention",
    }
    for name, backends in names.items():
        yield ForeignName(origin="sglang", name=name, backends=backends, note=notes.get(name, ""))
    for version in (3, 4):
        yield ForeignName(
            origin="sglang",
            name=f"fa{version}",
            backends=("FLASH_ATTN", "FLASH_ATTN_MLA") if version == 3 else ("FLASH_ATTN",),
            flash_attn_version=version,
        )


def _transformers() -> Iterator[ForeignName]:
    yield ForeignName(origin="transformers", name="sdpa", backends=("TORCH_SDPA",))
    yield ForeignName(origin="transformers", name="flex_attention", backends=("FLEX_ATTENTION",))
    yield ForeignName(
        origin="transformers",
        name="eager",
        backends=(),
        note="the model's own arithmetic; attn_shared.reference is attn's, for comparison only",
    )
    for version in (2, 3, 4):
        yield ForeignName(
            origin="transformers",
            name=f"flash_attention_{version}",
            backends=("FLASH_ATTN",),
            flash_attn_version=version,
        )


FOREIGN_NAMES: Mapping[str, Mapping[str, ForeignName]] = MappingProxyType(
    {
        origin: MappingProxyType({entry.name: entry for entry in entries})
        for origin, entries in (
            ("vllm", _vllm()),
            ("sglang", _sglang()),
            ("transformers", _transformers()),
        )
    }
)
"""Names by whose they are, then by how they are written there."""


def find_foreign_name(text: str) -> ForeignName:
    """Return what "ORIGIN:NAME" means to attn; the case of the name does not matter.

    transformers' prefix "paged|" is accepted and ignored: attn's backends read paged caches anyway.

    Raises:
        InvalidInputError: the text has another form.
        UnknownNameError: nobody has such a name; lists the names of that origin.
    """
    origin, colon, name = text.partition(":")
    if not colon or origin.lower() not in FOREIGN_NAMES:
        raise InvalidInputError.for_argument(
            "from",
            repr(text),
            f"ORIGIN:NAME with one of {', '.join(FOREIGN_NAMES)} as ORIGIN",
            hint="vllm:FLASHINFER, for instance.",
        )
    names = FOREIGN_NAMES[origin.lower()]
    folded = {known.lower(): entry for known, entry in names.items()}
    found = folded.get(name.lower().removeprefix(_PAGED))
    if found is None:
        raise UnknownNameError.for_name(f"{origin.lower()} backend", name, names)
    return found


def names_elsewhere(backend: str) -> dict[str, tuple[str, ...]]:
    """Return what other software calls a backend of attn; origins without a name are left out."""
    found = {
        origin: tuple(entry.name for entry in names.values() if backend in entry.backends)
        for origin, names in FOREIGN_NAMES.items()
    }
    return {origin: names for origin, names in found.items() if names}


def family_of(request: AttentionRequest) -> str:
    """Return the family of `known_backends` that serves a request."""
    if request.use_sparse and request.use_mla:
        return "sparse_mla"
    return "mla" if request.use_mla else "mha"


def backend_for(foreign: ForeignName, request: AttentionRequest, vendor: Vendor) -> str:
    """Return which of a name's backends is meant for this request on a vendor's devices.

    Raises:
        NoBackendError: none of them is; says what the name stands for.
    """
    family = family_of(request)
    for name in foreign.backends:
        known = KNOWN_BACKENDS.get(name)
        if known is not None and known.family == family and vendor in known.vendors:
            return name
    described = ", ".join(_described(name) for name in foreign.backends)
    raise NoBackendError(
        f"{foreign} stands for {described or 'nothing that attn has'}; none is for {family} on "
        f"{vendor} devices.",
        hint=foreign.note or "leave the choice to attn, or name one of attn's backends.",
    )


def _described(name: str) -> str:
    known = KNOWN_BACKENDS.get(name) or KNOWN_MAMBA_BACKENDS[name]
    return f"{name} ({known.family}: {', '.join(map(str, known.vendors))})"
