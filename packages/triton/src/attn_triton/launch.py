"""Launch Triton kernels through compiled handles, which costs the host a third of a JIT launch.

Triton's own `kernel[grid](...)` looks at every argument of every call to choose the machine code.
A `Launcher` fixes the kernel and its constants once; per call it looks at what can still change the
machine code (dtypes, 16-byte alignment of each pointer, absent pointers, the device) and finds the
handle. Where the caller knows that these do not change, `Launcher.handle` gives the handle itself.

Kernels launched so take their run-time parameters first and constexpr ones last; integers are 32
bits wide unless the parameter is annotated `tl.int64`. Nothing is known about an integer's value: a
kernel that wants wide accesses says `tl.multiple_of(stride, VECTOR)` with a constexpr VECTOR that
`vector_width` gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from attn_triton._noting import PendingHandle, is_noting, note

if TYPE_CHECKING:
    from attn_triton.kernels.compiling import Kind

__all__ = ["AddressedLaunch", "Handle", "Launcher", "is_current", "vector_width"]

_WIDEST_BYTES = 16  # what one thread loads or stores at once
_NUMBERS = frozenset((int, float, bool))


class Handle:
    """A kernel compiled for one device and one class of arguments.

    The caller guarantees what the machine code relies on: the dtypes, each pointer's alignment, and
    which pointers are None are as they were when the handle was made. A tensor may be given as its
    address (`data_ptr()`), which saves a tenth of the cost.
    """

    __slots__ = ("_call", "_head", "_stream_of", "_tail", "device_index")

    def __init__(
        self,
        call: Callable[..., object],
        head: tuple[object, ...],
        tail: tuple[None, ...],
        device_index: int,
    ) -> None:
        """Keep it; `kernels.compiling.launch_call` gives the first three."""
        self._call, self._head, self._tail = call, head, tail
        self._stream_of = _runtime()[0]
        self.device_index = device_index

    def __call__(self, grid: tuple[int, int, int], *args: object) -> None:
        """Launch on the current stream of the handle's device, which has to be the current one.

        Args:
            grid: programs in each dimension; with a 0 nothing is launched.
            args: the run-time arguments, in order.
        """
        x, y, z = grid
        if x and y and z:
            stream = self._stream_of(self.device_index)
            self._call(x, y, z, stream, *self._head, *args, *self._tail)


class Launcher:
    """Launches one kernel with fixed constants.

    Args:
        kernel: a function under `triton.jit`.
        constants: values of its constexpr parameters, by name.
        num_warps: warps per program.
        num_stages: depth of software pipelining, or None for the compiler's own.
        options: further options of the compiler, such as `maxnreg`.
        is_dependent: the kernel begins while the one before it ends; it has a constant PDL, and
            keeps to `kernels.dependent`. None: it has none.
    """

    __slots__ = ("_constants", "_handles", "_kernel", "_options", "is_interpreted")

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, object],
        *,
        num_warps: int = 4,
        num_stages: int | None = None,
        options: Mapping[str, object] | None = None,
        is_dependent: bool | None = None,
    ) -> None:
        from attn_triton.kernels.compiling import is_interpreted

        self._kernel = kernel
        self._constants = dict(constants)
        self._options = {"num_warps": num_warps, **(options or {})}
        if num_stages is not None:
            self._options["num_stages"] = num_stages
        if is_dependent is not None:
            self._constants["PDL"] = is_dependent
        if is_dependent:
            self._options["launch_pdl"] = True
        self._handles: dict[tuple[object, ...], Handle | PendingHandle] = {}
        self.is_interpreted = is_interpreted(kernel)

    def __call__(self, grid: tuple[int, int, int], *args: object) -> None:
        """Launch on the current stream of the device of the first tensor.

        The first launch of a class of arguments compiles and loads, which a graph capture does not
        allow: call `handle` with such arguments before.

        Args:
            grid: programs in each dimension; with a 0 nothing is launched.
            args: the run-time arguments, in order: tensors, numbers, None for an absent pointer.
        """
        if self.is_interpreted:
            if all(grid):
                self._kernel[grid](*args, **self._constants)
            return
        key, addresses, device = _classify(args)
        if device.index != _runtime()[1]():
            with _made_current(device):
                self(grid, *args)
            return
        handle = self._handles.get(key)
        if handle is None:
            handle = self._handles[key] = self._compile(args, device.index)
        handle(grid, *addresses)

    def handle(self, *args: object) -> Handle | PendingHandle:
        """Return the handle for such arguments on the device of the first tensor.

        Raises:
            RuntimeError: the kernel is interpreted, and has no handle.
        """
        if self.is_interpreted:
            raise RuntimeError("an interpreted kernel has no handle: call the launcher.")
        key, _, device = _classify(args)
        with _made_current(device):
            if key not in self._handles:
                self._handles[key] = self._compile(args, device.index)
        return self._handles[key]

    def _compile(self, args: Sequence[object], device_index: int) -> Handle | PendingHandle:
        from attn_triton.kernels.compiling import compile_kernel, launch_call

        kinds = self._kinds(args)

        def make() -> Handle:
            compiled = compile_kernel(self._kernel, kinds, self._constants, options=self._options)
            num_constants = len(self._kernel.arg_names) - len(args)
            return Handle(*launch_call(compiled, num_constants), device_index)

        if is_noting():
            note(self._kernel, kinds, self._constants, self._options)
            return PendingHandle(make, device_index)
        return make()

    def _kinds(self, args: Sequence[object]) -> dict[str, Kind]:
        """Return what the machine code depends on in each run-time argument, by name."""
        from attn_triton.kernels.compiling import kind_of, type_names

        annotated = type_names(self._kernel)
        if len(annotated) - len(args) != annotated.count("constexpr"):
            raise TypeError(
                f"{self._kernel.__name__} takes {annotated.index('constexpr')} run-time arguments, "
                f"got {len(args)}"
            )
        named = zip(self._kernel.arg_names, args, annotated, strict=False)
        return {name: kind_of(arg, annotation) for name, arg, annotation in named}


class AlignedLaunch:
    """A launcher for calls that are known to differ in addresses and numbers alone.

    The caller has looked at dtypes, devices and which pointers are None. Where all leading tensors
    are 16-byte aligned, as they nearly always are, the handle is found without looking at them; any
    other call goes through the launcher.

    Args:
        launcher: what to launch.
    """

    __slots__ = ("_handle", "_launcher", "_rest")

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._handle: Handle | PendingHandle | None = None
        self._rest: tuple[bool, ...] = ()

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        rest: tuple[object, ...],
    ) -> None:
        """Launch on the current stream.

        Args:
            grid: programs in each dimension; with a 0 nothing is launched.
            tensors: the first run-time arguments.
            rest: the run-time arguments after them; tensors among them keep their alignment.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        is_aligned = together & (_WIDEST_BYTES - 1) == 0
        handle = self._handle
        if handle is None or not is_aligned or handle.device_index != _runtime()[1]():
            self._launcher(grid, *tensors, *rest)
            if is_aligned and not self._launcher.is_interpreted:
                self._handle = self._launcher.handle(*tensors, *rest)
            return
        handle(grid, *addresses, *rest)


class AddressedLaunch:
    """A launcher for calls that differ in addresses, numbers and absent pointers alone.

    The caller has looked at dtypes and devices. Where every tensor is 16-byte aligned the kernel is
    handed addresses; any other call goes through the launcher.

    Args:
        launcher: what to launch.
    """

    __slots__ = ("_handles", "_launcher")

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._handles: dict[tuple[bool, ...], Handle | PendingHandle] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Any],
        numbers: Sequence[float],
    ) -> None:
        """Launch on the current stream.

        Args:
            grid: programs in each dimension; with a 0 nothing is launched.
            tensors: the first run-time arguments: tensors, host descriptors, None if absent.
            numbers: those after them.
        """
        together = 0
        addresses: list[Any] = []
        for each in tensors:
            if isinstance(each, torch.Tensor):
                address = each.data_ptr()
                together |= address
                addresses.append(address)
            else:
                addresses.append(each)
        if self._launcher.is_interpreted or together & (_WIDEST_BYTES - 1):
            self._launcher(grid, *tensors, *numbers)
            return
        absent = tuple([each is None for each in tensors])
        handle = self._handles.get(absent)
        if handle is None:
            handle = self._handles[absent] = self._launcher.handle(*tensors, *numbers)
        if handle.device_index != _runtime()[1]():
            self._launcher(grid, *tensors, *numbers)
            return
        handle(grid, *addresses, *numbers)

    def handle(self, tensors: Sequence[Any], numbers: Sequence[float]) -> Handle | PendingHandle:
        """Return the handle of such a call, for a caller that looks at its addresses itself."""
        return self._launcher.handle(*tensors, *numbers)

    @property
    def is_interpreted(self) -> bool:
        """Whether there are no handles."""
        return self._launcher.is_interpreted


def is_current(handle: Handle | PendingHandle) -> bool:
    """Return whether the current device is the handle's."""
    return handle.device_index == _runtime()[1]()


def vector_width(dtype: torch.dtype, numbers: Sequence[int]) -> int:
    """Return how many elements one access may move at most: a power of two that divides all.

    Args:
        dtype: of the elements.
        numbers: strides and sizes in elements, all of which the width must divide.
    """
    width = _WIDEST_BYTES // dtype.itemsize
    while any(number % width for number in numbers):
        width //= 2
    return width


def _classify(args: Sequence[Any]) -> tuple[tuple[object, ...], list[object], torch.device]:
    """Return what chooses the handle, the arguments with addresses for tensors, and the device."""
    key: list[object] = []
    addresses: list[object] = []
    device: torch.device | None = None
    alignments = 1
    for arg in args:
        if type(arg) in _NUMBERS:  # several times quicker than to ask whether it is a tensor
            addresses.append(arg)
        elif arg is None:
            addresses.append(None)
            key.append(None)
        elif isinstance(arg, torch.Tensor):
            address = arg.data_ptr()
            addresses.append(address)
            key.append(arg.dtype)
            alignments += alignments + (address & (_WIDEST_BYTES - 1) == 0)
            if device is None:
                device = arg.device
        else:  # a host tensor descriptor
            addresses.append(arg)
            key.append((arg.base.dtype, *arg.block_shape))
    if device is None:
        raise TypeError("none of the arguments is a tensor, which would say on which device to run")
    return (device, alignments, *key), addresses, device


def _made_current(device: torch.device) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = torch.get_device_module(device).device(device.index)
    return context


@functools.cache
def _runtime() -> tuple[Callable[[int], int], Callable[[], int]]:
    """Return what gives the current stream of a device, and the current device."""
    from attn_triton.kernels.compiling import driver_calls

    return driver_calls()
