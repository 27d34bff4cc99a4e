from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attn_shared_fakes import (
    CPU,
    GPU,
    FakeEntryPoint,
    FakeEntryPoints,
    backend,
    capability,
    library_spec,
    platform,
    registry_of,
    request,
)

from attn_shared import selector as selector_module
from attn_shared.capability import Support
from attn_shared.device import Vendor, preset
from attn_shared.errors import (
    BackendNotProvidedError,
    BackendRejectedError,
    InvalidInputError,
    NoBackendError,
    UnknownNameError,
    VendorMissingError,
)
from attn_shared.inventory import Inventory, VendorSpec, VendorStatus
from attn_shared.registry import DEFAULT_REGISTRY, BackendRegistry
from attn_shared.selection import Policy, Selection, VerdictStatus
from attn_shared.selector import (
    Selector,
    current_platform,
    get_attn_backend,
    get_mamba_attn_backend,
    select,
)

WriteModule = Callable[[str, str], None]

PROBE_TEXT = """
from attn_shared.inventory import VendorBuild
def probe():
    return VendorBuild(version="9.9", kernel_lse_base="2")
"""


GUEST_TEXT = """
from attn_shared_fakes import backend
from attn_shared.inventory import VendorSpec
MODULE = "attn_fake_vendor"
PROBE = "attn_fake_vendor:probe"
SPEC = VendorSpec(name="theirs", distributions=(), module=MODULE, install="", probe=PROBE)
Ipex = backend("IPEX", vendor_libraries=("theirs",), vendor_specs=(SPEC,))
"""


def installed(name: str, module: str) -> VendorSpec:
    """Return how to find a library that is one written module."""
    return VendorSpec(
        name=name,
        distributions=(),
        module=module,
        install=f"pip install {name}",
        probe=f"{module}:probe",
    )


def of_platforms(*classes: Any) -> Selector:
    points = [FakeEntryPoint(cls.name, f"f:{cls.name}", target=cls) for cls in classes]
    return Selector(BackendRegistry(FakeEntryPoints((), points)))


def statuses(selection: Selection) -> dict[str, str]:
    return {verdict.name: str(verdict.status) for verdict in selection.verdicts}


ABSENT = platform(name="absent", precedence=1, present=())
SECOND = platform(name="second", precedence=2)
HOST = platform(
    name="host", precedence=3, present=(CPU,), vendor=Vendor.CPU, torch_device_type="cpu"
)


def test_the_current_platform_is_the_first_available() -> None:
    assert of_platforms(HOST, SECOND, ABSENT).current_platform().name == "second"


def test_no_available_platform_gives_the_reason_of_each() -> None:
    selector = of_platforms(ABSENT)
    selector.registry._entry_points.platforms.append(  # type: ignore[attr-defined]
        FakeEntryPoint("lost", "no_such_module:P", "attn-lost", "0.1")
    )
    with pytest.raises(NoBackendError) as caught:
        selector.current_platform()
    assert str(caught.value) == (
        "no platform is available on this machine: absent: 0 devices; lost = no_such_module:P "
        "(attn-lost 0.1): ModuleNotFoundError: No module named 'no_such_module'. "
        "Hint: attn-cpu has the one that every machine can use; in a checkout of attn: "
        "pip install ./platforms/cpu"
    )
    with pytest.raises(NoBackendError, match="on this machine: none installed"):
        of_platforms().current_platform()


def test_facts_of_a_torch_device() -> None:
    both = platform(name="both", precedence=5, present=(GPU, preset("a100")))
    selector = of_platforms(ABSENT, both, HOST)
    assert selector.device_facts(torch.device("cuda")) is GPU
    assert selector.device_facts(torch.device("cuda:1")).arch == "sm_80"
    assert selector.device_facts(torch.device("cpu")) is CPU
    with pytest.raises(InvalidInputError, match="device index is 7; allowed: 0 to 1"):
        selector.device_facts(torch.device("cuda:7"))
    with pytest.raises(NoBackendError, match=r"torch device xpu: no installed platform has device"):
        selector.device_facts(torch.device("xpu"))
    with pytest.raises(NoBackendError, match=r"torch device cuda: absent: 0 devices\."):
        of_platforms(ABSENT, HOST).device_facts(torch.device("cuda"))


def test_the_first_device_of_the_current_platform_is_the_default() -> None:
    selector = Selector(registry_of(backend("X")))
    assert selector.resolve(request()).device is GPU


def test_an_inventory_is_scanned_once(write_module: WriteModule) -> None:
    write_module("attn_fake_vendor", "raise RuntimeError('imported')")
    specs = (installed("a", "attn_fake_vendor"), library_spec("b"))
    selector = Selector(registry_of(backend("X"), libraries=specs))
    known = selector.inventory(GPU)
    assert known.get("a").status is VendorStatus.PRESENT
    assert known.get("b").status is VendorStatus.ABSENT
    assert selector.inventory(GPU) is known
    assert "attn_fake_vendor" not in sys.modules


def test_everything_is_assumed_for_a_simulated_device() -> None:
    selector = Selector(
        registry_of(backend("X", vendor_libraries=("b",)), libraries=(library_spec("b"),))
    )
    with pytest.raises(NoBackendError):
        selector.resolve(request(), GPU)
    found = selector.resolve(request(), preset("h200"))
    assert found.chosen == "X"
    assert any("every vendor library is assumed installed" in note for note in found.notes())
    assert selector.inventory(preset("h200")).get("b").status is VendorStatus.ASSUMED
    assert selector.inventory(GPU).get("b").status is VendorStatus.ABSENT


def test_nothing_is_loaded_for_a_simulated_device() -> None:
    def load() -> None:
        raise RuntimeError("loaded")

    selector = Selector(registry_of(backend("X", load=load)))
    assert selector.resolve(request(), preset("h200")).chosen == "X"


def test_a_third_party_brings_its_own_libraries(write_module: WriteModule) -> None:
    write_module("attn_fake_vendor", PROBE_TEXT)
    spec = installed("theirs", "attn_fake_vendor")
    cls = backend("THEIRS", vendor_libraries=("theirs",), vendor_specs=(spec,), auto_priority=1)
    registry = registry_of(ranks={})
    selector = Selector(registry)
    known = selector.inventory(GPU)
    assert known.get("theirs").install == ""
    registry.register("THEIRS", cls)
    assert selector.inventory(GPU).get("theirs").status is VendorStatus.PRESENT
    assert selector.resolve(request()).chosen == "THEIRS"


def test_a_named_backend_of_another_platform_brings_its_own_libraries(
    write_module: WriteModule,
) -> None:
    write_module("attn_fake_vendor", PROBE_TEXT)
    write_module("attn_fake_ipex", GUEST_TEXT)
    points = [FakeEntryPoint("IPEX", "attn_fake_ipex:Ipex")]
    selector = Selector(registry_of(backend("X"), entry_points=points))
    assert selector.resolve(request()).chosen == "X"
    assert selector.inventory(GPU).get("theirs").status is VendorStatus.ABSENT
    assert selector.resolve(request(), policy=Policy(backend="IPEX")).chosen == "IPEX"
    assert selector.inventory(GPU).get("theirs").status is VendorStatus.PRESENT
    found = selector.resolve(request(), preset("h200"), Policy(backend="IPEX"))
    assert found.chosen == "IPEX"


def test_what_was_learnt_is_kept_when_a_backend_is_registered(write_module: WriteModule) -> None:
    write_module("attn_fake_vendor", PROBE_TEXT)
    registry = registry_of(probed("X"), libraries=(installed("a", "attn_fake_vendor"),))
    selector = Selector(registry)
    selector.resolve(request())
    registry.register("Y", backend("Y"))
    assert selector.inventory(GPU).get("a").status is VendorStatus.LOADED


def probed(name: str, **options: Any) -> Any:
    """A backend whose answer depends on the build of library "a": sinks with LSE base 2 only."""

    def served(device: Any, known: Inventory) -> Any:
        build = known.get("a").build
        if build is None:
            return capability(needs_probe=("a",), sinks=Support.YES)
        sinks = Support.YES if build.kernel_lse_base == "2" else Support.NO
        return capability(sinks=sinks)

    return backend(name, served, vendor_libraries=("a",), **options)


def test_what_the_choice_waits_for_is_probed(write_module: WriteModule) -> None:
    write_module("attn_fake_vendor", PROBE_TEXT)
    registry = registry_of(
        probed("X"), backend("Y"), libraries=(installed("a", "attn_fake_vendor"),)
    )
    selector = Selector(registry)
    found = selector.resolve(request(has_sinks=True))
    assert found.chosen == "X"
    entry = selector.inventory(GPU).get("a")
    assert (entry.status, entry.version) == (VendorStatus.LOADED, "9.9")


def test_a_probe_may_turn_the_choice(write_module: WriteModule) -> None:
    write_module("attn_fake_vendor", PROBE_TEXT.replace('"2"', '"e"'))
    sinks = backend("Y", lambda device, known: capability(sinks=Support.YES))
    registry = registry_of(probed("X"), sinks, libraries=(installed("a", "attn_fake_vendor"),))
    found = Selector(registry).resolve(request(has_sinks=True))
    assert statuses(found) == {"X": "rejected", "Y": "chosen"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise OSError('libcudart.so.12')", "OSError: libcudart.so.12"),
        ("raise RuntimeError('No CUDA GPUs')", "RuntimeError: No CUDA GPUs"),
        ("raise SystemExit(127)", "SystemExit: 127"),
    ],
)
def test_a_probe_that_fails_is_shown_in_its_own_words(
    text: str, words: str, write_module: WriteModule
) -> None:
    write_module("attn_fake_vendor", text)
    registry = registry_of(
        probed("X"), backend("Y"), libraries=(installed("a", "attn_fake_vendor"),)
    )
    selector = Selector(registry)
    found = selector.resolve(request())
    assert statuses(found) == {"X": "unavailable", "Y": "chosen"}
    assert f"a failed to load: {words}; to install it again: pip install a" in str(found)
    with pytest.raises(
        VendorMissingError, match=f"X, which was named, .* a failed to load: {words}"
    ):
        selector.resolve(request(), policy=Policy(backend="X"))


def test_no_more_is_probed_than_the_choice_waits_for(write_module: WriteModule) -> None:
    write_module("attn_fake_vendor", "raise RuntimeError('probed for nothing')")
    registry = registry_of(
        backend("Y"), probed("X"), libraries=(installed("a", "attn_fake_vendor"),)
    )
    selector = Selector(registry)
    found = selector.resolve(request())
    assert statuses(found) == {"Y": "chosen", "X": "unknown"}
    assert "not known before a is probed" in str(found)
    assert "attn_fake_vendor" not in sys.modules
    selector.resolve(request(), policy=Policy(backend="Y"))
    assert "attn_fake_vendor" not in sys.modules


def failing(*errors: BaseException) -> Callable[[], None]:
    """Return a load that raises each error once, then succeeds."""
    left = list(errors)

    def load() -> None:
        if left:
            raise left.pop(0)

    return load


@pytest.fixture
def present(write_module: WriteModule) -> tuple[VendorSpec, ...]:
    """Two libraries that are installed."""
    for name in ("attn_fake_a", "attn_fake_b"):
        write_module(name, PROBE_TEXT)
    return (installed("a", "attn_fake_a"), installed("b", "attn_fake_b"))


ERRORS = [
    VendorMissingError("libcudart is missing."),
    OSError("libcudart is missing."),
    SystemExit("libcudart is missing."),
]


@pytest.mark.parametrize("error", ERRORS)
def test_auto_goes_on_when_the_chosen_library_does_not_load(
    error: BaseException, present: tuple[VendorSpec, ...]
) -> None:
    first = backend("X", load=failing(error), vendor_libraries=("a",))
    selector = Selector(registry_of(first, backend("Y"), libraries=present))
    found = selector.resolve(request())
    assert statuses(found) == {"X": "unavailable", "Y": "chosen"}
    assert found.verdict("X").detail == (
        f"a failed to load: {type(error).__name__}: libcudart is missing.; "
        "to install it again: pip install a"
    )
    assert selector.resolve(request()) is found


@pytest.mark.parametrize("error", ERRORS)
def test_a_named_backend_raises_when_its_library_does_not_load(
    error: BaseException, present: tuple[VendorSpec, ...]
) -> None:
    first = backend("X", load=failing(error), vendor_libraries=("a",))
    selector = Selector(registry_of(first, backend("Y"), libraries=present))
    for is_first in (True, False):
        with pytest.raises(VendorMissingError) as caught:
            selector.resolve(request(), policy=Policy(backend="X"))
        assert "X, which was named, cannot serve this request" in str(caught.value)
        assert "libcudart is missing." in str(caught.value)
        assert "Hint: Y would serve it." in str(caught.value)
        assert (caught.value.__cause__ is error) is is_first


def test_an_interrupt_while_loading_leaves_nothing_behind(
    present: tuple[VendorSpec, ...],
) -> None:
    loaded: list[str] = []
    interrupted = failing(KeyboardInterrupt())

    def load() -> None:
        interrupted()
        loaded.append("X")

    selector = Selector(
        registry_of(backend("X", load=load, vendor_libraries=("a",)), libraries=present)
    )
    with pytest.raises(KeyboardInterrupt):
        selector.resolve(request())
    assert selector.resolve(request()).chosen == "X"
    assert loaded == ["X"]


def test_the_library_to_blame_is_the_one_that_the_error_names(
    present: tuple[VendorSpec, ...],
) -> None:
    load = failing(VendorMissingError("no kernel.", library="b"))
    both = backend("X", load=load, vendor_libraries=("a", "b"))
    selector = Selector(registry_of(both, backend("Y", vendor_libraries=("b",)), libraries=present))
    found = selector.resolve(request())
    assert statuses(found) == {"X": "chosen", "Y": "unavailable"}
    assert selector.inventory(GPU).get("a").is_usable


def test_the_backend_itself_is_to_blame_where_no_one_library_is(
    present: tuple[VendorSpec, ...],
) -> None:
    both = backend("X", load=failing(OSError("which?")), vendor_libraries=("a", "b"))
    alone = backend("Z", load=failing(RuntimeError("no compiler")))
    last = backend("Y", vendor_libraries=("a",))
    selector = Selector(registry_of(both, alone, last, libraries=present))
    found = selector.resolve(request())
    assert statuses(found) == {"X": "unavailable", "Z": "unavailable", "Y": "chosen"}
    assert found.verdict("X").detail == "X failed to load: OSError: which?"
    assert found.verdict("Z").detail == "Z failed to load: RuntimeError: no compiler"


def test_when_nothing_loads_every_failure_is_told(present: tuple[VendorSpec, ...]) -> None:
    first = backend("X", load=failing(OSError("one")), vendor_libraries=("a",))
    second = backend("Y", load=failing(OSError("two")), vendor_libraries=("b",))
    selector = Selector(registry_of(first, second, libraries=present))
    with pytest.raises(NoBackendError) as caught:
        selector.resolve(request())
    assert "a failed to load: OSError: one" in str(caught.value)
    assert "b failed to load: OSError: two" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_question_is_answered_once() -> None:
    asked: list[str] = []

    def served(device: Any, known: Any) -> Any:
        asked.append("capability")
        return capability()

    selector = Selector(registry_of(backend("X", served, load=lambda: asked.append("load"))))
    first = selector.resolve(request())
    count = len(asked)
    assert asked.count("load") == 1
    assert selector.resolve(request()) is first
    assert selector.resolve(request(), GPU, Policy()) is first
    assert len(asked) == count


def test_registering_anew_is_seen_at_once() -> None:
    registry = registry_of(backend("X"))
    selector = Selector(registry)
    first = selector.resolve(request())
    second = backend("X")
    registry.register("X", second)
    assert selector.resolve(request()).backend_cls is second is not first.backend_cls


def test_a_fresh_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    selector = Selector(registry_of(backend("X")))
    with caplog.at_level(logging.INFO, logger="attn_shared"):
        selector.resolve(request())
        selector.resolve(request())
    assert [record.message for record in caplog.records] == [
        "X chosen by default for NVIDIA Fake (sm_90), block_size=16, kv_layout=NHD"
    ]


@pytest.fixture
def _own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(backend("X"), backend("Y"))
    monkeypatch.setattr(selector_module, "DEFAULT_SELECTOR", Selector(registry))


@pytest.mark.usefixtures("_own_default")
def test_the_entries_of_the_field() -> None:
    assert current_platform().name == "fake"
    assert get_attn_backend(request()).get_name() == "X"
    assert get_attn_backend(request(), backend="auto").get_name() == "X"
    assert get_attn_backend(request(), GPU, backend="Y").get_name() == "Y"
    with pytest.raises(BackendRejectedError, match=r"head_size=20 \(allowed: 8 to 256, a multiple"):
        get_attn_backend(request(head_size=20), backend="Y")
    with pytest.raises(UnknownNameError, match=r"unknown backend 'Z'; allowed: X, Y\."):
        get_attn_backend(request(), backend="Z")


@pytest.fixture
def _mamba() -> Iterator[None]:
    DEFAULT_REGISTRY.register("MAMBA2", dict, kind="mamba")
    yield
    DEFAULT_REGISTRY.clear_override("MAMBA2", "mamba")


@pytest.mark.usefixtures("_mamba")
def test_recurrent_backends_by_name() -> None:
    assert get_mamba_attn_backend("MAMBA2") is dict
    with pytest.raises(BackendNotProvidedError, match="'LINEAR' is known and not provided"):
        get_mamba_attn_backend("LINEAR")
    with pytest.raises(UnknownNameError, match="did you mean 'MAMBA2'"):
        get_mamba_attn_backend("MAMBA3")
    with pytest.raises(
        BackendRejectedError, match=r"batch_invariant=True .* recurrent backend MAMB"
    ):
        get_mamba_attn_backend("MAMBA2", batch_invariant=True)


def test_selecting_by_hand_needs_no_selector() -> None:
    found = select(request(), GPU, Inventory(), registry=registry_of(backend("X")))
    assert found.verdict("X").status is VerdictStatus.CHOSEN
