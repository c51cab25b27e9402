"""The peers: our op, its torch reference run eagerly, and that reference compiled. Calls of each, forward and backward."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Entry

Function = Callable[..., tuple[torch.Tensor, ...]]


def environment(cache: Path) -> None:
    """Shared folders of compiled kernels, for this process and those it starts. Before Inductor or Triton is imported."""
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "1"
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def configure() -> None:
    """The same in every process, since a cache is keyed by it."""
    import torch._functorch.config
    import torch._inductor.config

    functorch: Any = torch._functorch.config
    inductor: Any = torch._inductor.config
    functorch.donated_buffer = False  # a graph is run backward again and again
    inductor.autotune_local_cache = False  # what was tuned on a busy device must not be used for measuring


def function(entry: Entry, peer: str) -> Function | None:
    """Of the tensors in the spec's order, to a tuple; None where the op has no reference."""
    names, attrs = entry.names(), dict(entry.attrs)
    if peer == "pullback":
        ours, public = entry.case.function, [t.public for t in entry.tensors]
        return lambda *tensors: _tuple(ours(**dict(zip(public, tensors)), **attrs))
    reference = entry.case.reference
    if reference is None:
        return None
    known = inspect.signature(reference).parameters
    attrs = {n: v for n, v in attrs.items() if n in known}

    def eager(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _tuple(reference(**dict(zip(names, tensors)), **attrs))

    if peer == "eager":
        return eager
    torch._dynamo.reset()  # all references share one code object, and few versions of one are kept
    compiled: Function = torch.compile(eager, dynamic=False, fullgraph=True)
    return compiled


def _tuple(out: Any) -> tuple[torch.Tensor, ...]:
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def outputs(entry: Entry, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the op returns, by the spec's names; the reference's where ours fails, so that peers are measured still."""
    ours, eager = function(entry, "pullback"), function(entry, "eager")
    assert ours is not None
    with torch.no_grad():
        try:
            found = ours(*given.values())
        except Exception:
            if eager is None:
                raise
            found = eager(*given.values())
    return dict(zip((t.name for t in entry.case.op.outputs), found))


def cotangents(found: Mapping[str, torch.Tensor], sets: int) -> list[list[torch.Tensor | None]]:
    """For each set one an output, laid out like it; None for what has no gradient."""
    return [[torch.randn_like(o) if o.is_floating_point() else None for o in found.values()] for _ in range(sets)]


def forward(run: Function, sets: Sequence[Mapping[str, torch.Tensor]]) -> Callable[[int], Any]:
    tensors = [tuple(given.values()) for given in sets]

    def call(k: int) -> Any:
        with torch.no_grad():
            return run(*tensors[k % len(tensors)])

    return call


def leaves(entry: Entry, sets: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Operands of the same memory, of which gradients can be asked."""
    names = entry.differentiable(sets[0])
    return [{n: v.detach().requires_grad_(n in names) for n, v in given.items()} for given in sets]


def backward(
    entry: Entry,
    run: Function,
    sets: Sequence[Mapping[str, torch.Tensor]],
    seeds: Sequence[Sequence[torch.Tensor | None]],
    rebuild: bool = False,
) -> Callable[[int], Any] | None:
    """All gradients at once on graphs built before, or with `rebuild` forward and backward; None if there is no graph."""
    operands = leaves(entry, sets)
    wanted = [[v for v in given.values() if v.requires_grad] for given in operands]
    if rebuild:

        def both(k: int) -> Any:
            k %= len(operands)
            out = run(*operands[k].values())
            kept = [(y, s) for y, s in zip(out, seeds[k]) if y.requires_grad and s is not None]
            return torch.autograd.grad([y for y, _ in kept], wanted[k], [s for _, s in kept], allow_unused=True)

        return both
    graphs = []
    for given, own in zip(operands, seeds):
        pairs = [(y, s) for y, s in zip(run(*given.values()), own) if y.requires_grad and s is not None]
        graphs.append(([y for y, _ in pairs], [s for _, s in pairs]))
    if not graphs[0][0]:
        return None

    def call(k: int) -> Any:
        k %= len(graphs)
        ends, own = graphs[k]
        return torch.autograd.grad(ends, wanted[k], own, retain_graph=True, allow_unused=True)

    return call
