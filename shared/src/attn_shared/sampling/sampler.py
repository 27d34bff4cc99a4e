"""The sampler of an engine: one call per step, served by the best backend for what it asks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from attn_shared._fields import member_of
from attn_shared._layer_inputs import device_of
from attn_shared.errors import AttnError, InvalidInputError
from attn_shared.inventory import Inventory
from attn_shared.sampling.backend import SamplerBackend
from attn_shared.sampling.candidates import candidates, inventory_of
from attn_shared.sampling.params import SamplingParams
from attn_shared.sampling.request import Returns, SamplerRequest
from attn_shared.sampling.rows import Rows
from attn_shared.sampling.selection import SamplerSelection, select_sampler
from attn_shared.selection import Policy
from attn_shared.selector import DEFAULT_SELECTOR, Selector

__all__ = ["Sampled", "Sampler"]

_LOG = logging.getLogger("attn_shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a step drew.

    Attributes:
        ids: (B,) int64, from 0 to V - 1; 0 for a row that is not valid.
        valid: (B,) bool: whether the row had a distribution: no NaN in it, a finite largest logit.
        logits: (B, V) float32 with `returns="processed_logits"`, else None.
        logprobs: (B, V) float32 with `returns="processed_logprobs"`, else None.
        selection: which sampler drew, who decided, and why not another.
    """

    ids: torch.Tensor
    valid: torch.Tensor
    logits: torch.Tensor | None
    logprobs: torch.Tensor | None
    selection: SamplerSelection

    def __repr__(self) -> str:
        """Read as shapes and who drew; contents may be on a device, and are not waited for."""
        tensors = {name: getattr(self, name) for name in ("ids", "valid", "logits", "logprobs")}
        shapes = [f"{name}={tuple(t.shape)}" for name, t in tensors.items() if t is not None]
        return f"Sampled({', '.join(shapes)}, by {self.selection.chosen} on {self.ids.device})"


class Sampler:
    """Draws a token per row, by the rule of `attn_shared.sampling.reference`.

    Each kind of call is served by the best sampler for it, chosen once and kept. A sampler whose
    library does not load is left out from then on, and the selection says so.

    Args:
        device: where the logits are: a torch device of this machine; None is the current
            platform's first.
        sampler: "auto", or the name of the one to use, which serves or raises.
        source: where the name is from ("argument", "environment variable X").
        checked: look at the numbers in tensors as well, which waits for the device.
        selector: what is known of this machine.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        sampler: str = "auto",
        source: str = "argument",
        checked: bool = False,
        selector: Selector = DEFAULT_SELECTOR,
    ) -> None:
        if device is None:
            device = selector.current_platform().torch_device_type
        place = device_of(device)
        self.device_type = place.type
        self.device = selector.device_facts(place)
        self.policy = Policy(backend=sampler, source=source)
        self.checked = checked
        self._selector = selector
        self._chosen: dict[SamplerRequest, tuple[SamplerSelection, SamplerBackend]] = {}
        self._loaded: dict[str, SamplerBackend] = {}
        self._inventory: Inventory | None = None

    def sample(
        self,
        logits: torch.Tensor,
        params: SamplingParams | None = None,
        *,
        returns: Returns | str = Returns.IDS,
    ) -> Sampled:
        """Draw one token per row.

        Args:
            logits: (B, V), of a floating-point dtype; not modified. -inf forbids a token.
            params: what the rows ask; None draws from the logits as they are.
            returns: "ids", or "processed_logits" or "processed_logprobs" beside them.

        Raises:
            InvalidInputError: shapes, dtypes, devices or numbers do not fit.
            AttnError: no sampler serves, or the named one cannot; as `select_sampler`.
        """
        params = SamplingParams() if params is None else params
        for name, value, wanted in (
            ("logits", logits, torch.Tensor),
            ("params", params, SamplingParams),
        ):
            if not isinstance(value, wanted):
                raise InvalidInputError.for_argument(
                    name, f"a {type(value).__name__}", f"a {wanted.__name__}"
                )
        kind = member_of(Returns, "returns", returns)
        selection, backend = self._serving(params.request(kind))
        if logits.device.type != self.device_type:
            raise InvalidInputError.for_argument(
                "logits", f"on {logits.device}", f"a tensor on {self.device_type}, as the sampler"
            )
        rows = Rows.of(params, logits)
        if self.checked:
            rows.check_values()
        drawn = backend.sample(logits, rows, kind)
        return Sampled(
            ids=drawn.ids,
            valid=drawn.valid,
            logits=drawn.logits,
            logprobs=drawn.logprobs,
            selection=selection,
        )

    def selection(self, request: SamplerRequest | None = None) -> SamplerSelection:
        """Return who serves a kind of call, and why; `sample` chooses the same.

        Raises:
            AttnError: as `sample`.
        """
        return self._serving(request or SamplerRequest())[0]

    def _serving(self, request: SamplerRequest) -> tuple[SamplerSelection, SamplerBackend]:
        found = self._chosen.get(request)
        if found is None:
            found = self._chosen[request] = self._load(request)
            _LOG.info("sampler: %s", found[0].one_line())
        return found

    def _load(self, request: SamplerRequest) -> tuple[SamplerSelection, SamplerBackend]:
        """Select, and load what was chosen; "auto" goes on without one that does not load."""
        # Ends: each further round knows one more sampler to be broken.
        failure: BaseException | None = None
        while True:
            try:
                selection = self._select(request)
            except AttnError as refusal:
                raise refusal from failure
            chosen = selection.sampler
            if chosen is None:
                raise RuntimeError("a selection without a sampler is an error already")
            if chosen.name in self._loaded:
                return selection, self._loaded[chosen.name]
            # A library's import or first compilation may raise anything.
            try:
                self._loaded[chosen.name] = chosen()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if chosen.vendor is None:
                    raise
                failure = error
                self._inventory = self._known().with_broken(chosen.vendor.name, error)

    def _select(self, request: SamplerRequest) -> SamplerSelection:
        classes, failures = candidates(self.device, self._selector)
        return select_sampler(request, self.device, self._known(), classes, self.policy, failures)

    def _known(self) -> Inventory:
        if self._inventory is None:
            self._inventory = inventory_of(self.device, candidates(self.device, self._selector)[0])
        return self._inventory
