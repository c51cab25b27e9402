"""torch: a call's tensors checked, and the call run. Where a gradient is wanted the op goes on to `autograd`.

What a call of some kind came to is kept, and the next of its kind only runs it: see `prepared`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .device import Torch, debugging, interpreted, torch_if_found, torch_library
from .graph import recording
from .op import RuntimeOp, remember, told_apart
from .prepared import Prepared
from .views import INTS

if TYPE_CHECKING:
    import torch

NO_VMAP = "{}: kernels do not run under torch.func.vmap; add the batch as a leading dim instead"
NO_JVP = "{}: kernels give reverse-mode derivatives only; a forward-mode tangent would be lost"
_NO_TRANSFORM = "{} has no backward, and its kernels do not run under torch.func: call it outside"
_NO_TRACE = "{}: kernels run between the graphs of torch.compile, not in them: leave out fullgraph=True"


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
    if torch_if_found() is None and (graph := recording(given)) is not None:
        return graph.record(op, given)
    lib = torch_library()
    if lib.torch.compiler.is_compiling():
        lib.torch._dynamo.graph_break(msg=_NO_TRACE.format(op.name))  # with fullgraph=True it is the error
        return lib.torch.compiler.disable(_call)(op, given, lib)
    key = None if debugging() else _key(op, given, lib)
    ready = _ready(op, key)
    if ready is not None:
        return _result(ready.run(op, tuple(given.values())))
    return _call(op, given, lib, key)


def _result(outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _key(op: RuntimeOp, given: Mapping[str, Any], lib: Torch) -> Any:
    """All that checks and plans of a call depend on; None where that is more than is looked at here."""
    if lib.transformed():
        return None
    facts: list[Any] = [*given]
    wants = False
    for value in given.values():
        if type(value) in lib.plain:
            if value.is_neg() or value.layout is not lib.torch.strided:
                return None
            facts.append((value.dtype, value.shape, value.stride(), value.device))
            wants = wants or value.requires_grad
        elif value is None:
            facts.append(None)
        elif type(value) in (float, int):
            facts.append(told_apart(value) if op.plans_numbers else type(value))
        else:
            return None
    return wants and lib.torch.is_grad_enabled(), tuple(facts), op.attrs_key()


def _ready(op: RuntimeOp, key: Any) -> Any:
    try:
        return op.ready.get(key)
    except TypeError:  # an attr that `require` refuses has no hash
        return None


def keep(op: RuntimeOp, key: Any, given: Mapping[str, Any], prepared: Prepared, ready: Any) -> None:
    """Keeps what a call came to, for the next with its key.

    Args:
        key: None where it is not known.
        prepared: of its forward.
        ready: has `run(op, values)`, which returns the outputs.
    """
    if key is None:
        return
    if prepared.plan.compute in INTS:  # of each number it is asked whether it is whole
        looked_at = [isinstance(v, (int, float)) for v in given.values()]
        if any(looked_at) or any(isinstance(v, float) for v in op.attrs.values()):
            return
    remember(op.ready, key, ready)


def _call(op: RuntimeOp, given: dict[str, Any], lib: Torch, key: Any = None) -> Any:
    op.require()
    for name in op.updates:
        if isinstance(value := given.get(name), lib.torch.Tensor) and value.is_neg():
            raise ValueError(
                f"{op.name}: `{name}` is a lazily negated view, and is updated in place: hand over its `resolve_neg()`"
            )
    given = {n: plain(v, lib) for n, v in given.items()}
    tensors = {n: v for n, v in given.items() if isinstance(v, lib.torch.Tensor)}
    if len(tensors) < len(given) and (graph := recording(given)) is not None:
        return graph.record(op, given)
    _check(op, given, tensors, lib)
    if not all(t.ndim for t in tensors.values()) and (lone := op.lone({n: t.ndim for n, t in tensors.items()})):
        return _lone(op, {n: v.reshape(1) if n in lone else v for n, v in given.items()}, lib)
    wants = lib.torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    if op.has_backward and (wants or lib.transformed()):
        outputs = op.with_autograd(given, key)
    else:
        prepared = forward(op, given, lib)
        outputs = prepared.run(op, tuple(given.values()))
        if wants and any(o.is_floating_point() for o in outputs):
            raise RuntimeError(f"{op.name} has no backward ({op.without}), and an input requires a gradient: detach it")
        keep(op, key, given, prepared, prepared)
    return _result(outputs)


def forward(op: RuntimeOp, given: Mapping[str, Any], lib: Torch, saving: bool = False) -> Prepared:
    """The forward of calls like this one; it makes the outputs, and with `saving` behind them what is kept for training.

    Raises:
        TypeError, ValueError: as a call does, naming op and argument.
    """
    device = next(v.device for v in given.values() if isinstance(v, lib.torch.Tensor))
    prepared = Prepared.of(
        op, op.plan_forward, given, tuple(given), device,
        lambda plan: {**plan.outputs, **(plan.saved if saving else {})}, lambda plan: op.between(plan, saving), lib,
    )  # fmt: skip
    if debugging():
        check_indices(op, given)
    return prepared


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
    if any(map(lib.batched, tensors.values())):
        raise RuntimeError(NO_VMAP.format(op.name))
    if not op.has_backward and any(map(lib.wrapped, tensors.values())):
        raise RuntimeError(_NO_TRANSFORM.format(op.name))
    unpacked = lib.torch.autograd.forward_ad.unpack_dual
    if lib.forward_mode() and any(unpacked(t).tangent is not None for t in tensors.values()):
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
    extents = {a[0]: n for o in op.bind(op.tensors, lib.metas(given)).values() for a, n in o.extents.items()}
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
