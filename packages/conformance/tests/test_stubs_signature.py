"""Signatures as data: parsed as Python reads them, and those that the platforms keep."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature, parse_parameters
from attn_conformance.stubs.vendors.aiter import AITER_0_1_7, AITER_HEAD
from attn_conformance.stubs.vendors.flashinfer import FLASHINFER
from attn_conformance.stubs.vendors.vllm_xpu_kernels import VLLM_XPU_KERNELS

PLATFORMS = Path(__file__).resolve().parents[3] / "platforms"
SIGNATURE = VendorSignature(name="attend", parameters="q, k=1, *, scale=0.5", returns="out")

FILES = {
    "cuda/tests/stubs/flashinfer/flashinfer/__init__.py": (FLASHINFER, "flashinfer"),
    "rocm/tests/stubs/aiter_0_1_7/aiter/ops/mha.py": (AITER_0_1_7, "aiter.ops.mha"),
    "rocm/tests/stubs/aiter_head/aiter/ops/mha.py": (AITER_HEAD, "aiter.ops.mha"),
    "rocm/tests/stubs/aiter_0_1_7/aiter/ops/attention.py": (AITER_0_1_7, "aiter.ops.attention"),
    "rocm/tests/stubs/aiter_head/aiter/ops/attention.py": (AITER_HEAD, "aiter.ops.attention"),
    "rocm/tests/stubs/aiter_0_1_7/aiter/ops/triton/unified_attention.py": (
        AITER_0_1_7,
        "aiter.ops.triton.unified_attention",
    ),
    "rocm/tests/stubs/aiter_head/aiter/ops/triton/attention/unified_attention.py": (
        AITER_HEAD,
        "aiter.ops.triton.attention.unified_attention",
    ),
    "xpu/tests/stubs/vllm_xpu_kernels/vllm_xpu_kernels/flash_attn_interface.py": (
        VLLM_XPU_KERNELS,
        "vllm_xpu_kernels.flash_attn_interface",
    ),
}


def test_parameters_are_those_of_a_def() -> None:
    def call(a, /, b, c=(1, -2), *rest, d, e=None): ...  # type: ignore[no-untyped-def]

    text = "a, /, b, c=(1, -2), *rest, d, e=None"
    assert list(parse_parameters(text)) == list(inspect.signature(call).parameters.values())


@pytest.mark.parametrize("text", ["q, k=compute()", "q, k=other"])
def test_a_default_is_a_literal(text: str) -> None:
    with pytest.raises(ValueError, match="malformed node"):
        list(parse_parameters(text))


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        ((), {}, r"attend\(\) missing a required argument: 'q'"),
        ((1,), {"window": 3}, r"attend\(\) got an unexpected keyword argument 'window'"),
        ((1, 2, 3), {}, r"attend\(\) too many positional arguments"),
        ((1,), {"q": 2}, r"attend\(\) multiple values for argument 'q'"),
    ],
    ids=["missing", "unknown", "keyword-only", "twice"],
)
def test_a_call_that_does_not_fit_is_a_type_error(
    arguments: tuple[int, ...], keywords: dict[str, int], words: str
) -> None:
    recorder = Recorder()

    with pytest.raises(TypeError, match=words):
        recorder.record(SIGNATURE, arguments, keywords)
    assert recorder.calls == []


def test_a_call_is_recorded_with_what_was_given_and_how() -> None:
    recorder = Recorder()

    recorder.record(SIGNATURE, (7,), {"scale": 2.0})

    (call,) = recorder.of("attend")
    assert call.arguments == {"q": 7, "k": 1, "scale": 2.0}
    assert call.given == {"q", "scale"}
    assert call.positional == ("q",)
    assert recorder.of("other") == []


def functions_of(module: object) -> dict[str, inspect.Signature]:
    """Return the public functions of a module, methods of its classes included."""
    found = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value):
            found[name] = inspect.signature(value)
        elif inspect.isclass(value):
            methods = {k: v for k, v in vars(value).items() if inspect.isfunction(v)}
            found |= {f"{name}.{k}": inspect.signature(v) for k, v in methods.items()}
    return found


@pytest.mark.parametrize("file", FILES)
def test_both_descriptions_of_a_release_agree(file: str) -> None:
    path = PLATFORMS / file
    if not path.is_file():
        pytest.skip("the platform keeps no description of its own")
    spec = importlib.util.spec_from_file_location("described", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = functions_of(module)
    stub, name = FILES[file]
    recorder = Recorder()
    content = stub.modules[name]
    made = {k: v.function(recorder) for k, v in content.items() if hasattr(v, "function")}
    ours = functions_of(type("Holder", (), made))

    shared = set(ours) & set(theirs) - {"BatchPrefillWithRaggedKVCacheWrapper.plan"}
    assert shared
    assert {key: str(ours[key]) for key in shared} == {key: str(theirs[key]) for key in shared}
