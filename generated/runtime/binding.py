"""torch: from tensors to plans, allocation and launches. Where a gradient is wanted the op goes on to `autograd`.

torch is imported when an op is first called, so that the package imports without it, and without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .graph import recording
from .op import RuntimeOp
from .plan import Given, Launch, Meta, Plan

if TYPE_CHECKING:
    import torch

NO_VMAP = "{}: kernels do not run under torch.func.vmap; add the batch as a leading dim instead"
NO_JVP = "{}: kernels give reverse-mode derivatives only; a forward-mode tangent would be lost"
_NO_TRACE = "{}: kernels run between the graphs of torch.compile, not in them: leave out fullgraph=True"


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
        self.processors: dict[Any, int] = {}
        self.warps = 16 if torch.version.hip else 32
        """Of a program at most: 1024 threads."""

    def multiprocessors(self, device: torch.device) -> int:
        if device.type != "cuda":
            return 2
        if device not in self.processors:
            self.processors[device] = self.torch.cuda.get_device_properties(device).multi_processor_count
        return self.processors[device]


_found: Torch | None = None


def torch_library() -> Torch:
    """torch, imported when it is first needed."""
    global _found
    if _found is None:
        _found = Torch()
    return _found


def most_warps() -> int:
    """Of a program, on the devices that torch was built for."""
    return torch_library().warps


def torch_dtypes() -> Mapping[str, Any]:
    """torch's dtypes by the names that they have here."""
    return torch_library().dtypes


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where CPU tensors are welcome."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def debugging() -> bool:
    """`PULLBACK_DEBUG=1`: what kernels write is filled with NaN before, and indices are checked."""
    return os.environ.get("PULLBACK_DEBUG", "0") == "1"


def call(op: RuntimeOp, given: dict[str, Any]) -> Any:
    """Runs an op on tensors and numbers, with autograd where a gradient is wanted.

    Args:
        op: the instance, holding attrs and choices.
        given: by name in the spec, every input, param and buffer: a tensor, a number, or None.

    Returns:
        The output, or a tuple of them; of recorded tensors, recorded ones.

    Raises:
        TypeError, ValueError: naming op and argument: a wrong type, dtype, device or shape.
    """
    if isinstance(op, type):
        raise TypeError(
            f"{op.name}: `call` was given the class; it takes an instance, which holds the attrs: {op.__name__}(...)"
        )
    if _found is None and (graph := recording(given)) is not None:
        return graph.record(op, given)
    lib = torch_library()
    if lib.torch.compiler.is_compiling():
        lib.torch._dynamo.graph_break(msg=_NO_TRACE.format(op.name))  # with fullgraph=True it is the error
        return lib.torch.compiler.disable(_call)(op, given)
    return _call(op, given, lib)


def _call(op: RuntimeOp, given: dict[str, Any], lib: Torch | None = None) -> Any:
    lib = lib or torch_library()
    op.require()
    given = {n: plain(v, lib) for n, v in given.items()}
    tensors = {n: v for n, v in given.items() if isinstance(v, lib.torch.Tensor)}
    if len(tensors) < len(given) and (graph := recording(given)) is not None:
        return graph.record(op, given)
    _check(op, given, tensors, lib)
    if not all(t.ndim for t in tensors.values()) and (lone := op.lone({n: t.ndim for n, t in tensors.items()})):
        return _lone(op, {n: v.reshape(1) if n in lone else v for n, v in given.items()}, lib)
    wants = lib.torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    if not wants:
        outputs = run_forward(op, given, lib)
    elif not op.has_backward:
        outputs = run_forward(op, given, lib)
        if any(o.is_floating_point() for o in outputs):
            raise RuntimeError(f"{op.name} has no backward ({op.without}), and an input requires a gradient: detach it")
    else:
        outputs = op.with_autograd(given)
    return outputs[0] if len(outputs) == 1 else outputs


def _lone(op: RuntimeOp, given: dict[str, Any], lib: Torch) -> Any:
    """The call on tensors that have got an axis of one element, which results have no more."""
    found = _call(op, given, lib)
    return tuple(o.reshape(()) for o in found) if isinstance(found, tuple) else found.reshape(())


def plain(value: Any, lib: Torch) -> Any:
    """A tensor whose memory is what it says (a lazily negated view is copied), a NumPy scalar as a number."""
    if isinstance(value, lib.torch.Tensor):
        return value.resolve_neg() if value.is_neg() else value
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def _refuse_transforms(op: RuntimeOp, tensors: Mapping[str, torch.Tensor], lib: Torch) -> None:
    functorch = lib.torch._C._functorch
    if any(functorch.is_batchedtensor(t) for t in tensors.values()):
        raise RuntimeError(NO_VMAP.format(op.name))
    forward = lib.torch.autograd.forward_ad
    if forward._current_level >= 0 and any(forward.unpack_dual(t).tangent is not None for t in tensors.values()):
        raise RuntimeError(NO_JVP.format(op.name))


def _check(op: RuntimeOp, given: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], lib: Torch) -> None:
    public = {t.name: t.public for t in op.tensors}
    first: tuple[str, torch.Tensor] | None = None
    _refuse_transforms(op, tensors, lib)
    for name, value in given.items():
        if value is None:
            continue
        if name not in tensors:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                continue
            raise TypeError(f"{op.name}: `{public[name]}` is a {type(value).__name__}; it takes a torch.Tensor")
        tensor = tensors[name]
        if tensor.dtype not in lib.names:
            raise TypeError(f"{op.name}: `{public[name]}` is {tensor.dtype}, which no kernel takes")
        if tensor.layout != lib.torch.strided:
            raise TypeError(f"{op.name}: `{public[name]}` is {tensor.layout}; it takes a strided tensor")
        if first is None:
            first = (name, tensor)
        elif tensor.device != first[1].device:
            raise ValueError(
                f"{op.name}: `{public[name]}` is on {tensor.device}, `{public[first[0]]}` on {first[1].device}"
            )
    if first is None:
        raise TypeError(f"{op.name}: at least one argument must be a tensor")
    device = first[1].device
    if device.type == "cpu" and not interpreted():
        raise ValueError(
            f"{op.name}: `{public[first[0]]}` is on the CPU; move it to a GPU, or run in Triton's interpreter: TRITON_INTERPRET=1 python ..."
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{op.name}: `{public[first[0]]}` is on {device}; kernels run on CUDA and ROCm devices")


def check_indices(op: RuntimeOp, given: Mapping[str, Any]) -> None:
    """Raises IndexError where a tensor of indices has one that is out of range. It waits for the device: for debugging alone."""
    lib = torch_library()
    tensors = [
        t for t in op.tensors if t.indexes and isinstance(given.get(t.name), lib.torch.Tensor) and given[t.name].numel()
    ]
    if not tensors:
        return
    extents = {a[0]: n for o in op.bind(op.tensors, metas_of(given, lib)).values() for a, n in o.extents.items()}
    for tensor in tensors:
        values, size = given[tensor.name], extents[tensor.indexes]
        wrong = (values < 0) | (values >= size)
        other = ""
        if isinstance(tensor.unless, int):
            wrong &= values != tensor.unless
            other = f", or {tensor.unless}"
        elif tensor.unless:
            wrong &= values != op.attrs[tensor.unless]
            other = f", or `{op.named.get(tensor.unless, tensor.unless)}`, which is {op.attrs[tensor.unless]}"
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            raise IndexError(
                f"{op.name}: `{tensor.public}` is {values[place].item()} at {place}; it takes 0 to {size - 1}{other}"
            )


def metas_of(given: Mapping[str, Any], lib: Torch) -> dict[str, Given]:
    return {
        n: Meta(lib.names[v.dtype], tuple(v.shape), v.stride()) if isinstance(v, lib.torch.Tensor) else v
        for n, v in given.items()
    }


def allocate(metas: Mapping[str, Meta], device: torch.device, lib: Torch) -> dict[str, torch.Tensor]:
    new = {
        n: lib.torch.empty_strided(m.shape, m.strides, dtype=lib.dtypes[m.dtype], device=device)
        for n, m in metas.items()
    }
    if debugging():
        for tensor in new.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return new


def launch(
    op: RuntimeOp, plan: Plan, tensors: Mapping[str, Any], given: Mapping[str, Any], device: torch.device, lib: Torch
) -> None:
    numbers = op.numbers(given)
    if device.type == "cuda":
        with lib.torch.cuda.device(device):
            _run(plan, tensors, numbers)
    else:
        _interpret(plan, tensors, numbers)


def _interpret(plan: Plan, tensors: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
    mixed = any(v.dtype == torch_dtypes()["f64"] for v in tensors.values())
    with rounded_after({n: tensors[n] for n in (*plan.outputs, *plan.updated) if mixed}) as wide:
        _run(plan, {**tensors, **wide}, numbers)


@contextmanager
def rounded_after(stored: Mapping[Any, torch.Tensor]) -> Iterator[dict[Any, torch.Tensor]]:
    """Triton's interpreter cannot store a float64 as bf16: what launches store so is float32 first, and rounded after.

    Args:
        stored: CPU tensors of any dtype that launches with a float64 among their operands write.

    Yields:
        By the same keys, what is to be written in place of those that are bf16.
    """
    dtypes, empty = torch_dtypes(), torch_library().torch.empty_strided
    halves = {n: v for n, v in stored.items() if v.dtype == dtypes["bf16"]}
    wide = {n: empty(v.shape, v.stride(), dtype=dtypes["f32"]).copy_(v) for n, v in halves.items()}
    yield wide
    for name, tensor in halves.items():
        tensor.copy_(wide[name])


def _run(plan: Plan, tensors: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
    run(plan.launches, tensors, numbers)


def run(launches: Sequence[Launch], tensors: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
    """Launches kernels on the current device, one after the other."""
    most = most_warps()
    for one in launches:
        arguments = one.kernel.abi.call(one.arguments(tensors, numbers))
        one.kernel.function[one.grid](*arguments, **one.options(most))


def run_forward(op: RuntimeOp, given: dict[str, Any], lib: Torch, saving: bool = False) -> tuple[torch.Tensor, ...]:
    """The outputs; `saving` also what the forward keeps for training, behind them."""
    dense: dict[str, torch.Tensor] = {}
    plan = op.planned(
        op.plan_forward, metas_of(given, lib), lambda name, shape: copied(given[name], name, shape, dense, lib)
    )
    if dense:
        given = {**given, **dense}
    if debugging():
        check_indices(op, given)
    device = next(v.device for v in given.values() if isinstance(v, lib.torch.Tensor))
    outputs = allocate({**plan.outputs, **(plan.saved if saving else {})}, device, lib)
    between = op.between(plan, saving)
    if plan.launches:
        launch(op, plan, {**tensors_of(given, lib), **outputs, **allocate(between, device, lib)}, given, device, lib)
    for name in plan.updated:
        lib.torch.autograd.graph.increment_version(given[name])
    return tuple(outputs.values())


def copied(value: Any, name: str, shape: tuple[int, ...], dense: dict[str, torch.Tensor], lib: Torch) -> Given:
    """Copies a tensor to dense memory, stretched to a shape, for `RuntimeOp.planned`. The copy goes into `dense`."""
    if not isinstance(value, lib.torch.Tensor):
        return Meta.dense(value.dtype, shape) if isinstance(value, Meta) else value
    dense[name] = copy = value.expand(shape).contiguous()
    return Meta(lib.names[copy.dtype], shape, copy.stride())


def tensors_of(given: Mapping[str, Any], lib: Torch) -> dict[str, Any]:
    return {n: v for n, v in given.items() if isinstance(v, lib.torch.Tensor)}
