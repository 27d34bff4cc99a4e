from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from attn_shared_fakes import FakeEntryPoint, FakeEntryPoints, backend, platform

from attn_shared.backend import AttentionBackend
from attn_shared.device import Vendor
from attn_shared.errors import (
    BackendDefinitionError,
    BackendNotProvidedError,
    DuplicateNameError,
    PlatformMissingError,
    PluginError,
    UnknownNameError,
)
from attn_shared.known_backends import KNOWN_BACKENDS
from attn_shared.registry import (
    BACKEND_GROUP,
    MLA_PREFILL_GROUP,
    PLATFORM_GROUP,
    BackendRegistry,
)

WriteModule = Callable[[str, str], None]

CLASS_TEXT = """
from attn_shared_fakes import FakeBackend
class X(FakeBackend):
    name = "X"
"""


def registry(
    *entry_points: FakeEntryPoint, platforms: list[FakeEntryPoint] | None = None
) -> BackendRegistry:
    return BackendRegistry(FakeEntryPoints(entry_points, platforms or []))


def of(name: str, distribution: str = "attn-x", version: str = "1.0") -> FakeEntryPoint:
    return FakeEntryPoint(name, f"attn_fake_plugin:{name}", distribution, version)


def test_nothing_is_listed_before_it_is_asked_for() -> None:
    points = FakeEntryPoints([of("X")], [FakeEntryPoint("fake", "f:P", target=platform())])
    found = BackendRegistry(points)
    found.register("Y", backend("Y"))
    assert points.listed == []
    assert found.names() == ("X", "Y")
    assert found.names() == ("X", "Y")
    assert points.listed == [BACKEND_GROUP, MLA_PREFILL_GROUP]
    assert list(found.platforms()) == list(found.platforms()) == ["fake"]
    assert points.listed == [BACKEND_GROUP, MLA_PREFILL_GROUP, PLATFORM_GROUP]


def test_a_backend_is_imported_when_it_is_loaded(write_module: WriteModule) -> None:
    write_module("attn_fake_plugin", CLASS_TEXT)
    found = registry(of("X"))
    registration = found.get("X")
    assert (registration.path, registration.source) == ("attn_fake_plugin:X", "attn-x 1.0")
    assert "attn_fake_plugin" not in sys.modules
    cls = found.load("X")
    assert cls is sys.modules["attn_fake_plugin"].X
    assert found.load("X") is cls
    assert found.failures() == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ImportError('undefined symbol')", "ImportError: undefined symbol"),
        ("raise RuntimeError('No CUDA GPUs')", "RuntimeError: No CUDA GPUs"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1", "AttributeError: module 'attn_fake_plugin' has no attribute 'X'"),
        ("X = dict", "<class 'dict'> is not a subclass of attn_shared.backend.AttentionBackend"),
        (f"{CLASS_TEXT}    attn_api = '>=2'", "it needs attn_api >=2, and this attn-shared has 1"),
    ],
)
def test_a_plugin_that_fails_disables_itself_only(
    text: str, words: str, write_module: WriteModule
) -> None:
    write_module("attn_fake_plugin", text)
    found = registry(of("X"))
    found.register("Y", backend("Y"))
    with pytest.raises(PluginError) as caught:
        found.load("X")
    line = f"X = attn_fake_plugin:X (attn-x 1.0): {words}"
    assert str(caught.value) == f"backend X failed to load: {line}"
    assert [str(failure) for failure in found.failures()] == [line]
    assert found.load("Y").get_name() == "Y"
    assert found.names() == ("X", "Y")


def test_the_cause_is_chained(write_module: WriteModule) -> None:
    write_module("attn_fake_plugin", "raise OSError('libfoo.so')")
    with pytest.raises(PluginError) as caught:
        registry(of("X")).load("X")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_failed_import_is_not_tried_again_until_it_is_registered_anew(
    write_module: WriteModule, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    note = f"with open({str(count)!r}, 'a') as f: f.write('x')\n"
    write_module("attn_fake_plugin", note + "raise ImportError('no')")
    found = registry()
    found.register("X", "attn_fake_plugin:X")
    for _ in range(3):
        with pytest.raises(PluginError, match="ImportError: no"):
            found.load("X")
    assert count.read_text() == "x"
    write_module("attn_fake_plugin", CLASS_TEXT)
    found.register("X", "attn_fake_plugin:X")
    assert found.load("X").get_name() == "X"
    assert found.failures() == ()


def test_an_interrupt_is_no_fault_of_the_plugin(write_module: WriteModule) -> None:
    write_module("attn_fake_plugin", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry(of("X")).load("X")


def test_two_distributions_of_one_name_are_both_named_when_it_is_used() -> None:
    found = registry(of("X", "attn-x", "1.0"), of("X", "other-x", "2.3"), of("Y"))
    assert found.names() == ("X", "Y")
    assert found.get("Y").source == "attn-x 1.0"
    with pytest.raises(DuplicateNameError) as caught:
        found.get("X")
    assert str(caught.value) == (
        "backend X is provided by attn-x 1.0 (attn_fake_plugin:X) and other-x 2.3 "
        "(attn_fake_plugin:X). Hint: uninstall all but one of these distributions."
    )
    found.register("X", backend("X"))
    assert found.load("X").get_name() == "X"


def test_one_distribution_that_is_listed_twice_is_one() -> None:
    assert registry(of("X"), of("X")).get("X").source == "attn-x 1.0"


def test_a_known_name_that_nothing_provides_says_so() -> None:
    with pytest.raises(BackendNotProvidedError) as caught:
        registry(of("X")).get("FLASHMLA")
    assert str(caught.value) == (
        "backend 'FLASHMLA' is known and not provided by any installed distribution "
        "(mla, FlashMLA; planned for attn-cuda); provided: X."
    )


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("TORCH_SDPA", "planned for attn-torch"),
        ("CPU_ATTN", "planned for attn-cpu"),
        ("TRITON_ATTN", "planned for attn-cuda, attn-rocm, attn-xpu"),
        ("FLASHMLA_SPARSE", "not planned"),
        ("CUSTOM", "not planned"),
    ],
)
def test_a_known_name_says_where_it_will_come_from(name: str, plan: str) -> None:
    with pytest.raises(BackendNotProvidedError, match=rf"; {plan}\); provided: \(none\)\.$"):
        registry().get(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MY_ATN", "unknown backend 'MY_ATN'; allowed: MY_ATTN. Hint: did you mean 'MY_ATTN'?"),
        (
            "flash_mla",
            (
                "unknown backend 'flash_mla'; allowed: MY_ATTN. Hint: did you mean 'FLASHMLA', "
                "which no installed distribution provides?"
            ),
        ),
        ("zebra", "unknown backend 'zebra'; allowed: MY_ATTN."),
        ("", "unknown backend ''; allowed: MY_ATTN."),
    ],
)
def test_an_unknown_name_lists_valid_ones_and_suggests(name: str, message: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry(of("MY_ATTN")).get(name)
    assert str(caught.value) == message


def test_recurrent_backends_have_names_of_their_own() -> None:
    found = registry(of("X"))
    found.register("MAMBA2", dict, kind="mamba")
    assert found.load("MAMBA2", "mamba") is dict
    assert found.names("mamba") == ("MAMBA2",)
    assert found.names() == ("X",)
    with pytest.raises(
        BackendNotProvidedError, match=r"'LINEAR' .*recurrent, linear attention; not"
    ):
        found.get("LINEAR", "mamba")
    with pytest.raises(UnknownNameError, match=r"'MAMBA3'; allowed: MAMBA2\. .*'MAMBA2'"):
        found.get("MAMBA3", "mamba")


def test_a_registered_class_comes_before_an_installed_one(write_module: WriteModule) -> None:
    write_module("attn_fake_plugin", CLASS_TEXT)
    found = registry(of("X"))
    installed, mine = found.load("X"), backend("X")
    assert not found.is_overridden("X")
    found.register("X", mine)
    assert found.is_overridden("X")
    assert found.load("X") is mine
    assert found.get("X").source == "register_backend"
    found.clear_override("X")
    assert not found.is_overridden("X")
    assert found.load("X") is installed


def test_a_registered_path_is_imported_when_it_is_loaded(write_module: WriteModule) -> None:
    write_module("attn_fake_plugin", CLASS_TEXT)
    found = registry()
    found.register("X", "attn_fake_plugin.X")
    assert found.get("X").path == "attn_fake_plugin:X"
    assert "attn_fake_plugin" not in sys.modules
    assert found.load("X").get_name() == "X"


def test_a_name_is_registered_for_one_path_until_it_is_cleared() -> None:
    found = registry()
    found.register("X", "some.module:X")
    found.register("X", "some.module.X")
    with pytest.raises(DuplicateNameError) as caught:
        found.register("X", "other.module:X")
    assert str(caught.value) == (
        "backend X is already registered as some.module:X by register_backend. "
        "Hint: call clear_override('X') first."
    )
    assert found.get("X").path == "some.module:X"
    found.clear_override("X")
    found.register("X", "other.module:X")
    assert found.get("X").path == "other.module:X"


def test_a_class_of_the_same_path_takes_the_place_of_the_one_before() -> None:
    found = registry()
    first, second = backend("X"), backend("X")
    assert (first.__module__, first.__qualname__) == (second.__module__, second.__qualname__)
    found.register("X", first)
    assert found.load("X") is first
    found.register("X", second)
    assert found.load("X") is second


def test_a_class_that_cannot_serve_is_refused_where_it_is_registered() -> None:
    found = registry()
    with pytest.raises(BackendDefinitionError) as caught:
        found.register("X", backend("Y"))
    assert str(caught.value) == (
        "backend X cannot be registered: Y.name is 'Y', and it is registered as 'X'."
    )
    assert found.names() == ()
    assert found.generation == 0


def test_the_generation_grows_with_every_change_and_no_question() -> None:
    found = registry(of("X"), platforms=[FakeEntryPoint("fake", "f:P", target=platform())])
    generations = [found.generation]
    changes: list[Callable[[], None]] = [
        lambda: found.register("Y", backend("Y")),
        lambda: found.register("Y", backend("Y")),
        lambda: found.clear_override("Y"),
        lambda: found.register("MAMBA1", dict, kind="mamba"),
    ]
    for change in changes:
        change()
        generations.append(found.generation)
    assert sorted(set(generations)) == generations
    now = found.generation
    found.names()
    found.load("MAMBA1", "mamba")
    with pytest.raises(PluginError):
        found.load("X")
    found.clear_override("Z")
    found.platforms()
    found.failures()
    assert found.generation == now


def test_third_parties_are_whoever_no_platform_is_expected_to_offer() -> None:
    found = registry(of("MY_ATTN"), of("TORCH_SDPA"), of("HPC_ATTN"), of("FLASH_ATTN"))
    assert found.third_party_names() == ("HPC_ATTN", "MY_ATTN")
    found.register("CUSTOM", backend("CUSTOM"))
    found.register("TORCH_SDPA", backend("TORCH_SDPA"))
    assert found.third_party_names() == ("CUSTOM", "HPC_ATTN", "MY_ATTN", "TORCH_SDPA")


def test_unprovided_names_are_a_vendors_that_nothing_brings() -> None:
    found = registry(of("TORCH_SDPA"))
    names = found.unprovided(Vendor.CPU)
    assert set(names) == {"FLEX_ATTENTION", "CPU_ATTN", "CPU_MLA", "IPEX", "TORCH_MLA"}
    assert names["CPU_ATTN"] is KNOWN_BACKENDS["CPU_ATTN"]


def test_platforms_come_in_order_of_precedence() -> None:
    points = [
        FakeEntryPoint("late", "f:L", target=platform(name="late", precedence=20)),
        FakeEntryPoint("early", "f:E", target=platform(name="early", precedence=5)),
    ]
    assert list(registry(platforms=points).platforms()) == ["early", "late"]


def test_a_platform_that_fails_disables_itself_only() -> None:
    points = [
        FakeEntryPoint("broken", "no_such_module:Platform", "attn-broken", "0.3"),
        FakeEntryPoint("odd", "f:O", "attn-odd", target=lambda: "a string"),
        FakeEntryPoint("good", "f:G", target=platform(name="good")),
        FakeEntryPoint("raises", "f:R", "attn-raises", target=lambda: 1 / 0),
    ]
    found = registry(platforms=points)
    assert list(found.platforms()) == ["good"]
    assert [str(failure) for failure in found.failures()] == [
        (
            "broken = no_such_module:Platform (attn-broken 0.3): ModuleNotFoundError: "
            "No module named 'no_such_module'"
        ),
        "odd = f:O (attn-odd 1.0): TypeError: 'a string' is not an attn_shared.platform.Platform",
        "raises = f:R (attn-raises 1.0): ZeroDivisionError: division by zero",
    ]


def test_two_distributions_of_one_platform_are_both_named() -> None:
    points = [
        FakeEntryPoint("a", "f:A", "attn-a", "1.0", target=platform(name="cuda")),
        FakeEntryPoint("b", "f:B", "attn-b", "2.0", target=platform(name="cuda")),
    ]
    with pytest.raises(
        DuplicateNameError, match=r"platform cuda is provided by attn-a 1\.0 and att"
    ):
        registry(platforms=points).platforms()
    assert list(registry(platforms=[points[0], points[0]]).platforms()) == ["cuda"]


def test_a_vendor_has_its_platform() -> None:
    points = [
        FakeEntryPoint("gpu", "f:G", target=platform(name="gpu", vendor=Vendor.NVIDIA)),
        FakeEntryPoint("cpu", "f:C", target=platform(name="cpu", vendor=Vendor.CPU)),
        FakeEntryPoint("broken", "no_such_module:P", "attn-broken", "0.3"),
    ]
    found = registry(platforms=points)
    assert found.platform_for(Vendor.CPU).name == "cpu"
    with pytest.raises(PlatformMissingError) as caught:
        found.platform_for(Vendor.AMD)
    assert str(caught.value) == (
        "no installed platform serves amd devices; installed: cpu (attn-fake), gpu (attn-fake); "
        "broken = no_such_module:P (attn-broken 0.3): ModuleNotFoundError: No module named "
        "'no_such_module'. Hint: attn-rocm does; in a checkout of attn: "
        "pip install ./platforms/rocm"
    )
    with pytest.raises(PlatformMissingError, match=r"installed: none\. Hint: attn-xpu does; in"):
        registry().platform_for(Vendor.INTEL)


def test_installed_entry_points_are_the_default() -> None:
    # Whatever is installed here: listing it loads nothing and raises nothing.
    names = BackendRegistry().names()
    assert names == tuple(sorted(set(names)))


def test_a_first_party_class_is_an_attention_backend() -> None:
    assert issubclass(backend("X"), AttentionBackend)


# Prefills over latents


def test_prefills_have_names_of_their_own() -> None:
    points = FakeEntryPoints(
        backends=[FakeEntryPoint("FLASH_ATTN", "attn_fake:Backend")],
        prefills=[FakeEntryPoint("FLASH_ATTN", "attn_fake:Prefill", distribution="attn-p")],
    )
    found = BackendRegistry(points)
    assert found.get("FLASH_ATTN").path == "attn_fake:Backend"
    assert found.get("FLASH_ATTN", "mla_prefill").path == "attn_fake:Prefill"
    assert found.names("mla_prefill") == ("FLASH_ATTN",)
    with pytest.raises(UnknownNameError, match="MLA prefill 'TRITON' is known and not provided"):
        found.get("TRITON", "mla_prefill")
    with pytest.raises(UnknownNameError, match="did you mean 'FLASH_ATTN'"):
        found.get("FLASH_ATN", "mla_prefill")


def test_a_backend_is_no_prefill() -> None:
    found = BackendRegistry(FakeEntryPoints())
    with pytest.raises(
        BackendDefinitionError, match=r"MLA prefill X cannot be registered: .*MLAPrefill"
    ):
        found.register("X", backend("X"), kind="mla_prefill")
