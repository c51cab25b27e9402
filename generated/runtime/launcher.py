"""Launching from a packed buffer: what `PackedC` wrote, or any host that follows the C layout, becomes a kernel's arguments.

The buffer holds addresses, sizes, strides and numbers. What is a constant of the launch the `Launch` itself says: constexprs, which
tensors it names, and that the strides of a dense tensor are None.

    run = bind(launch, plan.metas, "cuda:0")
    op.pack(launch, views, packed := PackedC())
    run(packed.buffer)
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from typing import Any

from .plan import Launch, Meta
from .prepared import rounded_after, started
from .views import ITEM_SIZES


class Address:
    """A pointer as Triton takes it in a tensor's place."""

    __slots__ = ("address", "dtype", "extent")

    def __init__(self, address: int, dtype: Any, extent: int) -> None:
        self.address, self.dtype, self.extent = address, dtype, extent

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        """Bytes that can be reached: HIP compiles for what lies within 2 GiB."""
        return self.extent


class BoundLaunch:
    """A launch on a device. Called with a buffer it starts the kernel on the current stream, and waits for nothing."""

    def __init__(self, launch: Launch, metas: Mapping[str, Meta], device: str) -> None:
        import torch

        from .device import torch_library

        for param, name in launch.pointers.items():
            if name not in metas:  # it would be a null pointer, and what it should write be lost
                raise TypeError(
                    f"{launch.kernel.function.fn.__name__}: nothing is known of `{name}`, which `{param}` points to"
                )
        self.metas = metas
        self._torch = torch
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        lib = torch_library()
        self._dtypes = lib.dtypes
        self.launch = launch = launch.on(lib.limits(self._device))
        self._options = launch.options
        self._layout = struct.Struct(launch.kernel.abi.format)
        self._written = self._stored()
        self._content = b""
        self._arguments: list[Any] | None = None
        self._compiled: dict[Any, Any] = {}
        self._specialised: Any = None
        self._start: Callable[..., Any] | None = None

    def __call__(self, buffer: bytes | bytearray | memoryview) -> None:
        """Launches.

        Args:
            buffer: the arguments in the C layout. The addresses must be valid until the kernel has run.

        Raises:
            ValueError: where the buffer has another length than the layout.
        """
        content = bytes(buffer)
        if self._arguments is None or content != self._content:
            self._bind(content)
        if self._device.type == "cuda" and self._torch.cuda.current_device() != self._device.index:
            with self._torch.cuda.device(self._device):
                self._run()
        elif self._written:
            self._interpret()
        else:
            self._run()

    def _run(self) -> None:
        assert self._arguments is not None
        if self._start is not None:
            self._start(*self._arguments)
            return
        compiled = self.launch.kernel.function[self.launch.grid](*self._arguments, **self._options)
        if compiled is not None:  # the interpreter compiles nothing
            self._start = self._compiled[self._specialised] = started(compiled, self.launch.grid)

    def _stored(self) -> dict[str, Meta]:
        """By pointer, what the interpreter is to store through `rounded_after`: bf16 of a launch with a float64 beside it."""
        if self._device.type == "cuda" or all(m.dtype != "f64" for m in self.metas.values()):
            return {}
        from .accesses import accesses

        written = accesses(self.launch.kernel.function).written
        stored = {p: self.metas[n] for p, n in self.launch.pointers.items() if p in written}
        return {p: m for p, m in stored.items() if m.dtype == "bf16" and 0 not in m.shape}

    def _interpret(self) -> None:
        """The elements alone are rounded: what lies between them may be another tensor's."""
        assert self._arguments is not None
        names = [p.name for p in self.launch.kernel.abi.params]
        own = {p: a for p, a in zip(names, self._arguments) if p in self._written and a is not None}
        elements = {p: a.as_strided(self._written[p].shape, self._written[p].strides) for p, a in own.items()}
        with rounded_after(elements) as wide:
            arguments = [wide.get(p, a) for p, a in zip(names, self._arguments)]
            self.launch.kernel.function[self.launch.grid](*arguments, **self._options)

    def _bind(self, content: bytes) -> None:
        """Takes the buffer apart, and looks up what was compiled for arguments of its kind."""
        if len(content) != self._layout.size:
            raise ValueError(
                f"{self.launch.kernel.function.fn.__name__}: a buffer of {len(content)} bytes; its layout has {self._layout.size}"
            )
        items = iter(self._layout.unpack(content))
        arguments: list[Any] = []
        kinds: list[Any] = []
        for param in self.launch.kernel.abi.params:
            constant = self.launch.values.get(param.name)
            if param.role == "constexpr":
                arguments.append(constant)
            elif param.role == "tuple":
                own = tuple(next(items) for _ in range(param.length))
                arguments.append(None if constant is None else own)
                kinds.append(own)
            elif param.role == "ptr":
                address = next(items)
                arguments.append(self._pointer(param.name, address))
                kinds.append((arguments[-1] is None, address % 16))
            else:
                arguments.append(next(items))
                kinds.append(arguments[-1] if param.role == "i64" else None)
        self._content, self._arguments = content, arguments
        # Triton compiles for absent pointers, for alignment, and for some integers: what is alike in all of these is one kernel.
        self._specialised = tuple(kinds)
        self._start = self._compiled.get(self._specialised)

    def _pointer(self, param: str, address: int) -> Any:
        """What stands for an address: nothing where a tensor that would have elements has none."""
        meta = self.metas.get(self.launch.pointers.get(param, ""))
        if meta is None or (address == 0 and 0 not in meta.shape):
            return None
        dtype = self._dtypes[meta.dtype]
        count = 0 if 0 in meta.shape else 1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.strides))
        extent = count * ITEM_SIZES[meta.dtype]
        if self._device.type == "cuda":
            return Address(address, dtype, extent)
        if not count:
            return self._torch.empty(0, dtype=dtype)
        # The interpreter takes no bare address: a tensor over memory of this process, as far as shape and strides reach.
        memory = (ctypes.c_byte * extent).from_address(address)
        return self._torch.frombuffer(memory, dtype=dtype, count=count)


def bind(launch: Launch, metas: Mapping[str, Meta], device: str) -> BoundLaunch:
    """A launch of a plan, to be started from buffers again and again.

    Args:
        metas: the plan's own, or any that say of each tensor that the launch names its dtype, shape and strides.
        device: as torch spells it; on the CPU the kernel runs in Triton's interpreter.
    """
    return BoundLaunch(launch, metas, device)
