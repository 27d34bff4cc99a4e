"""Where the tests of kernels run: under Triton's interpreter, or compiled on a GPU.

A test that takes `device` runs once for each of them, and is skipped with a reason where that is
not to be had. Three things in which the interpreter is unlike a GPU are set right here, not in the
kernels: it multiplies tiles of bfloat16 as the integers of their bits, it rounds to fewer bits by
cutting them off or with a lost carry, where GPUs round to nearest even, and NumPy warns of
overflows, which GPUs turn into infinities without a word.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

GPU = ("xpu", "xpu") if torch.version.xpu else ("cuda", "rocm" if torch.version.hip else "cuda")
DEVICES = [
    pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
    pytest.param(GPU[0], id="gpu", marks=getattr(pytest.mark, GPU[1])),
]
FLOATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
"""torch's names of Triton's floating types."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device whose tensors the kernels take."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def _mended_interpreter() -> None:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    mend_interpreter()


def mend_interpreter() -> None:
    """Make Triton's interpreter compute in this process as GPUs do."""
    import numpy as np
    from triton.runtime import interpreter

    np.seterr(over="ignore", invalid="ignore", divide="ignore")
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = widened(interpreter.InterpreterBuilder.create_dot)


def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Return the bits of `data`, rounded to nearest even as torch rounds."""
    import numpy as np

    del rounding_mode  # no kernel asks for another
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}"))
    values = bits.view(FLOATS[source.name])
    # From fp8 to fp8 torch goes through float32 itself; what is wider holds what is narrower.
    rounded = values.to(torch.float32).to(FLOATS[target.name]).contiguous()
    return rounded.view(getattr(torch, f"int{8 * rounded.itemsize}")).numpy()


def widened(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """Return `create_dot` with its bfloat16 operands in float32, which holds all their products."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def in_float32(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = convert_float(operand.data, tl.bfloat16, tl.float32, None)
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot_of(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(builder, in_float32(a), in_float32(b), *rest)

    return create_dot_of
