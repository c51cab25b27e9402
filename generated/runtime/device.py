"""torch, looked up once: its dtypes by our names, what devices allow, and how kernels run here.

torch is imported when an op is first called, so that the package imports without it, and without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .plan import Given, Limits, Meta

if TYPE_CHECKING:
    import torch


class Torch:
    """What of torch is looked up once."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.names = {
            torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
            torch.int32: "i32", torch.int64: "i64", torch.bool: "bool",
        }  # fmt: skip
        self.dtypes = {v: k for k, v in self.names.items()}
        self.plain = (torch.Tensor, torch.nn.Parameter)
        """Types of tensors that are nothing more."""
        self.processors: dict[Any, int] = {}
        self._limits: dict[Any, Limits] = {}
        self._transforms = torch._C._are_functorch_transforms_active  # as torch's own `Function.apply` asks
        self._forward_ad = torch.autograd.forward_ad

    def multiprocessors(self, device: torch.device) -> int:
        """How many a device has; of the CPU, where the interpreter runs, two."""
        if device.type != "cuda":
            return 2
        if device not in self.processors:
            self.processors[device] = self.torch.cuda.get_device_properties(device).multi_processor_count
        return self.processors[device]

    def limits(self, device: torch.device) -> Limits:
        """What a program may take there: 1024 threads, and as much shared memory as it may ask for."""
        if device not in self._limits:
            shared = 0
            if device.type == "cuda":
                found = self.torch.cuda.get_device_properties(device)
                shared = getattr(found, "shared_memory_per_block_optin", 0)
            self._limits[device] = Limits(16 if self.torch.version.hip else 32, shared or Limits.shared)
        return self._limits[device]

    def transformed(self) -> bool:
        """Whether torch.func, or forward-mode differentiation, is at work."""
        return self._transforms() or self.forward_mode()

    def batched(self, tensor: torch.Tensor) -> bool:
        """Whether it stands for a batch under vmap, torch.func's or the one of `is_grads_batched`: it has no memory."""
        found = self.torch._C._functorch
        return bool(found.is_batchedtensor(tensor) or found.is_legacy_batchedtensor(tensor))

    def wrapped(self, tensor: torch.Tensor) -> bool:
        """Whether a transform of torch.func has it in a wrapper, which has no memory."""
        return bool(self.torch._C._functorch.is_functorch_wrapped_tensor(tensor))

    def forward_mode(self) -> bool:
        """Whether forward-mode differentiation is at work."""
        return bool(self._forward_ad._current_level >= 0)

    def metas(self, given: Mapping[str, Any]) -> dict[str, Given]:
        """What a plan knows of each tensor; what is none stays as it is."""
        return {
            n: Meta(self.names[v.dtype], tuple(v.shape), v.stride()) if isinstance(v, self.torch.Tensor) else v
            for n, v in given.items()
        }


_found: Torch | None = None


def torch_library() -> Torch:
    """torch, imported when it is first needed."""
    global _found
    if _found is None:
        _found = Torch()
    return _found


def torch_if_found() -> Torch | None:
    """torch, if an op has been called before."""
    return _found


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where CPU tensors are welcome."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def debugging() -> bool:
    """`PULLBACK_DEBUG=1`: what kernels write is filled with NaN before, and indices are checked."""
    return os.environ.get("PULLBACK_DEBUG", "0") == "1"
