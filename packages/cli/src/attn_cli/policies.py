"""Who names the backend: --backend, --from, or the environment; and what --from means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from attn_cli.request_flags import RequestFlags
from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from attn_shared.device import DeviceFacts
    from attn_shared.foreign_names import ForeignName
    from attn_shared.request import AttentionRequest
    from attn_shared.selection import Policy, Selection
    from attn_shared.settings import Settings

__all__ = ["foreign_name_of", "prefill_resolver", "resolver"]


def foreign_name_of(flags: RequestFlags) -> ForeignName | None:
    """Return what --from means, or None without it.

    Raises:
        InvalidInputError: --backend names one too, or the text has another form.
        UnknownNameError: nobody has such a name.
    """
    from attn_shared.foreign_names import find_foreign_name

    if flags.from_name is None:
        return None
    if flags.backend is not None:
        raise InvalidInputError.for_argument(
            "--from", "given together with --backend", "one of them"
        )
    return find_foreign_name(flags.from_name)


def resolver(
    flags: RequestFlags, settings: Settings, device: DeviceFacts | None
) -> Callable[[AttentionRequest], Selection]:
    """Return what answers a request on the device under this policy.

    Args:
        flags: name the backend, or not.
        settings: the environment may.
        device: where it runs; None is this machine's first device.

    Raises:
        AttnError: as `foreign_name_of`.
    """
    from attn_shared.selector import DEFAULT_SELECTOR

    foreign = foreign_name_of(flags)
    place = device or DEFAULT_SELECTOR.current_platform().device()
    if foreign is None:
        policy = _policy(flags, settings)
        policy_for = _unchanged(policy) if flags.untuned else _measured(policy, place, settings)
        return lambda request: DEFAULT_SELECTOR.resolve(request, place, policy_for(request))
    named = foreign

    def resolve(request: AttentionRequest) -> Selection:
        if named.flash_attn_version is not None and request.flash_attn_version is None:
            request = request.with_options(flash_attn_version=named.flash_attn_version)
        policy = _with_libraries(_foreign_policy(named, request, place), flags)
        return DEFAULT_SELECTOR.resolve(request, place, policy)

    return resolve


def prefill_resolver(
    flags: RequestFlags, device: DeviceFacts | None
) -> Callable[[AttentionRequest], Selection]:
    """Return what says who prefills latent attention on the device; nobody names that one."""
    from attn_shared.selection import Policy
    from attn_shared.selector import DEFAULT_SELECTOR

    place = device or DEFAULT_SELECTOR.current_platform().device()
    policy = _with_libraries(Policy(), flags)
    return lambda request: DEFAULT_SELECTOR.resolve(request, place, policy, kind="mla_prefill")


def _policy(flags: RequestFlags, settings: Settings) -> Policy:
    policy = settings.policy(flags.backend)
    if flags.backend is not None:
        policy = replace(policy, source="option --backend")
    return _with_libraries(policy, flags)


def _with_libraries(policy: Policy, flags: RequestFlags) -> Policy:
    """Return the policy with what --prefer and --avoid name.

    Raises:
        InvalidInputError: one library is in both, or a name is empty.
    """
    prefer, avoid = _names("--prefer", flags.prefer), _names("--avoid", flags.avoid)
    return replace(policy, prefer=prefer, avoid=avoid)


def _names(option: str, text: str | None) -> tuple[str, ...]:
    """Return the names of a list with commas; an empty one is none that a person meant."""
    if text is None:
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise InvalidInputError.for_argument(
            option, repr(text), "names of vendor libraries, with commas between them"
        )
    return names


def _unchanged(policy: Policy) -> Callable[[AttentionRequest], Policy]:
    return lambda request: policy


def _measured(
    policy: Policy, device: DeviceFacts, settings: Settings
) -> Callable[[AttentionRequest], Policy]:
    """Return the policy with what `attn tune` measured here, unless a backend was named."""
    from attn_cli.tuned import measured_policy

    if policy.named()[0] is not None:
        return _unchanged(policy)
    return measured_policy(policy, device, settings)


def _foreign_policy(foreign: ForeignName, request: AttentionRequest, device: DeviceFacts) -> Policy:
    from attn_shared.foreign_names import backend_for
    from attn_shared.selection import Policy

    backend = backend_for(foreign, request, device.vendor)
    return Policy(backend=backend, source=f"option --from {foreign}")
