"""Trains a model: backward, gradients, masters, optimizers, CUDA graphs.

run = graph.lower(loss).load("cuda", batch=64)
optimizer = run.optimizer(generated.adamw, lr=1e-3)
run.zero_grad()
loss = run.forward_train(x=images, target=labels)
run.backward()
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import moves
from .abi import PackedC
from .backprop import TrainingProgram, build, seed_of
from .executor import Executor, MemoryUse, Run, total_bytes
from .paths import TrainingModel
from .plan import Meta
from .program import ALIGNMENT
from .views import TensorView

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TrainingMemoryUse(MemoryUse):
    """The same with what training has beside."""

    gradients: int

    def __str__(self) -> str:
        return f"{super().__str__()}, gradients {self.gradients / 2**20:.1f}"


class Trainer(Executor):
    """A model that is trained.

    Attributes:
        params: float32 masters where the model computes in another dtype and was loaded with `master="f32"`.
        grads: of each trained param, in the dtype that `params` has it in; zero before the first backward.
        input_grads: of the inputs that the model was lowered with.
    """

    model: TrainingModel
    program: TrainingProgram
    grads: Mapping[str, torch.Tensor]
    input_grads: Mapping[str, torch.Tensor]

    def __init__(self, model: TrainingModel, device: object, sizes: Mapping[str, int], seed: int = 0, share: Executor | None = None,
                 master: str | None = None) -> None:  # fmt: skip
        """As `Executor`.

        Args:
            master: "f32": params of f16 and bf16 are kept and changed in float32, their gradients added up so; launches read copies.
        """
        if master not in (None, "f32"):
            raise ValueError(f"master is {master!r}; it is None or 'f32'")
        halves = [t.name for t in model.graph.tensors.values() if t.trainable and t.dtype in ("f16", "bf16")]
        if master and share is not None:
            raise ValueError("share: masters are one run's own; let the run that is shared have them")
        self._mastered = frozenset(halves if master else ())
        self._compute: dict[str, torch.Tensor] = {}
        """What launches read of params that have a master."""
        super().__init__(model, device, sizes, seed, share)
        self._gradients, grads = self._in_one({n: self._params.get(n, self._fixed[n]) for n in model.wanted})
        self.grads = MappingProxyType({n: g for n, g in grads.items() if n in self._params})
        self.input_grads = MappingProxyType({n: g for n, g in grads.items() if n not in self._params})
        for name, grad in self.grads.items():
            self._params[name].grad = grad
        self._backwards: dict[bool, list[Run]] = {}
        self._fresh, self._ready = True, ""

    def _planned(self, sizes: Mapping[str, int], multiprocessors: int) -> TrainingProgram:
        return build(self.model, sizes, multiprocessors, self._mastered)

    def _fill(self, name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
        super()._fill(name, tensor, values)
        if name in self._mastered:
            self._compute[name], self._params[name] = tensor, values.to(self.device, self._torch.float32)

    def _in_one(self, like: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Dense tensors of zeros in one piece of memory, which is zeroed at once."""
        places, end = {}, 0
        for name, tensor in like.items():
            places[name] = end
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        whole = self._torch.zeros(end, dtype=self._torch.uint8, device=self.device)
        return whole, {
            n: whole[places[n] :][: t.numel() * t.element_size()].view(t.dtype).view(t.shape) for n, t in like.items()
        }

    @property
    def memory(self) -> TrainingMemoryUse:
        own, copies = super().memory, total_bytes(self._compute.values())
        return TrainingMemoryUse(
            own.arena, own.lower_bound, own.params + copies, own.inputs, total_bytes([self._gradients])
        )

    # -------------------------------------------------------------------------------- launches

    def _backward_runs(self, accumulate: bool) -> list[Run]:
        """The launches of a backward, then those that take its gradients to where they are kept. A gradient that is kept as it was
        computed is written there at once."""
        if accumulate not in self._backwards:
            targets = {**self.grads, **self.input_grads}
            homes = {} if accumulate else self._homes(targets)
            elsewhere = {own: targets[name] for name, own in homes.items()}
            views = self._views(elsewhere)
            runs = self._bound(self.program.backward, views, elsewhere)
            for name, own in self.program.gradients.items():
                if name not in homes:
                    runs += self._gather(views[own], targets[name], accumulate)
            self._backwards[accumulate] = runs
        return self._backwards[accumulate]

    def _homes(self, targets: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The params and inputs whose gradients can be computed where they are kept, with the tensor of the run that is."""
        values, out = self.program.values, dict[str, str]()
        storages = [v.storage for v in values.values()]
        for name, own in self.program.gradients.items():
            meta, target = values[own].meta, targets[name]
            dense = meta.strides == tuple(target.stride()) or target.numel() <= 1
            alone = values[own].storage == own and storages.count(own) == 1 and not self.program.storages[own].fixed
            if alone and dense and own not in out.values() and self._dtypes[meta.dtype] == target.dtype:
                out[name] = own
        return out

    def _gather(self, own: TensorView, target: torch.Tensor, accumulate: bool) -> list[Run]:
        words = {v: k for k, v in self._dtypes.items()}
        meta = Meta(own.dtype, own.shape, own.strides)
        out = Meta(words[target.dtype], tuple(target.shape), tuple(target.stride()))
        view = TensorView(target.data_ptr(), out.dtype, out.shape, out.strides, own.device)
        launch = moves.add(meta, out, out) if accumulate else moves.copy(meta, out)
        packed = PackedC()
        launch.kernel.abi.visit(launch.arguments({"x": own, "other": view, "out": view}, {}), packed)
        return [self._launch(launch, {"x": meta, "other": out, "out": out}, packed)] if launch.grid[0] else []

    # -------------------------------------------------------------------------------- running

    def forward(self, /, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """As `Executor.forward`; no backward may follow."""
        self._ready = ""
        found = super().forward(*inputs, **named)
        self._ready = "inference"
        return found

    def forward_train(self, /, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The outputs; `backward` may follow once."""
        self._ready = ""
        found = super().forward(*inputs, **named)
        self._ready = "training"
        return found

    def backward(self, seeds: torch.Tensor | Mapping[str, torch.Tensor] | None = None) -> None:
        """Gradients of what the last `forward_train` gave, into `grads` and `input_grads`: added to what they hold, unless
        `zero_grad` was called since.

        Args:
            seeds: cotangents by output, or the only one's. Without, outputs are of one value each, and their seeds 1.

        Raises:
            RuntimeError: no `forward_train` came before, or its backward was run already.
            TypeError, ValueError: a seed that is missing, unknown, or of another dtype or shape.
        """
        if self._ready != "training":
            why = {"inference": "the last forward was no forward_train", "": "no forward_train came before"}
            raise RuntimeError(
                f"backward: {why.get(self._ready, 'the backward of the last forward_train was run already')}"
            )
        self._seed(seeds)
        self._attach()
        self._ready = "done"
        self._run(self._backward_runs(not self._fresh))
        self._fresh = False

    def _attach(self) -> None:
        """`.grad` is the gradient that launches write: dropped, as torch's optimizers zero it, it is there again and begins with
        nothing; in the place of another tensor it has that one's values."""
        other = [n for n in self.grads if self._params[n].grad is not self.grads[n]]
        gone = [n for n in other if self._params[n].grad is None]
        self._fresh |= bool(gone) and len(gone) == len(self.grads) and not self.input_grads
        for name in other:
            if not self._fresh:
                given = self._params[name].grad
                self.grads[name].zero_() if given is None else self.grads[name].copy_(given)
            self._params[name].grad = self.grads[name]

    def _seed(self, seeds: Any) -> None:
        names = self.model.seeds
        own = {n: self._fixed[seed_of(n)] for n in names}
        if seeds is None:
            for name, seed in own.items():
                if seed.numel() != 1:
                    raise TypeError(f"seeds: `{name}` has {seed.numel()} values: give its cotangent")
            self._ones()
            return
        if isinstance(seeds, self._torch.Tensor) and len(names) == 1:
            seeds = {names[0]: seeds}
        if not isinstance(seeds, Mapping):
            raise TypeError(f"a backward of this model begins with {', '.join(names)}: give a cotangent by each name")
        unknown, missing = [n for n in seeds if n not in names], [n for n in names if n not in seeds]
        if unknown or missing:
            raise TypeError(
                f"seeds: not of the model: {', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}"
            )
        for name, seed in own.items():
            value = seeds[name]
            if not isinstance(value, self._torch.Tensor):
                raise TypeError(f"seeds: `{name}` is a {type(value).__name__}; it takes a torch.Tensor")
            if value.dtype != seed.dtype or value.shape != seed.shape:
                raise ValueError(
                    f"seeds: `{name}` is {value.dtype} {tuple(value.shape)}; the output is {seed.dtype} {tuple(seed.shape)}"
                )
        for name, seed in own.items():
            seed.copy_(seeds[name].detach())

    def _ones(self) -> None:
        for name in self.model.seeds:
            self._fixed[seed_of(name)].fill_(1)

    def zero_grad(self) -> None:
        """Gradients become 0. Nothing is computed twice: the next backward writes instead of adding."""
        if not self._fresh:
            self._gradients.zero_()
        self._fresh = True

    def sync(self) -> None:
        """Takes changed masters to the copies that launches read. An optimizer of this package does so itself."""
        for name, own in self._compute.items():
            own.copy_(self._params[name])

    # -------------------------------------------------------------------------------- files

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_state_dict(state)
        self.sync()

    def load(self, path: str | Path) -> None:
        super().load(path)
        self.sync()

    # -------------------------------------------------------------------------------- CUDA graphs

    def capture(self, optimizer: Any = None, max_norm: float | None = None) -> Captured:
        """A training step as one CUDA graph: forward, backward from seeds of 1, clipping, then the optimizer's launch.

        One step must have run before, so that every kernel is compiled and the optimizer has its state. On a CPU the step runs as it is.

        Args:
            optimizer: one of this package's, whose host part runs before each replay: hyper-parameters may change. Or a function,
                of which what it launches is recorded once.
            max_norm: what the gradients' norm over all params is clipped to.

        Raises:
            RuntimeError: no step has run yet.
            TypeError: a seed is not of one value; what is given is no optimizer of this package and no function.
        """
        if False not in self._backwards:
            raise RuntimeError(
                "capture: run one training step first (forward_train, backward, the optimizer), to compile its kernels"
            )
        own = hasattr(optimizer, "prepare") and hasattr(optimizer, "launch")
        if optimizer is not None and not own and not callable(optimizer):
            raise TypeError(f"capture: a {type(optimizer).__name__} is no optimizer of this package: give its `step`")
        if max_norm is not None and not own:
            raise TypeError("capture: max_norm needs an optimizer of this package")
        self._seed(None)
        self._attach()
        if max_norm is not None:  # its kernels are compiled before; the factor is dropped
            optimizer.clip_grad_norm(max_norm)
            optimizer.zero_grad()
            self._fresh = True
        return Captured(self, optimizer, max_norm)

    # -------------------------------------------------------------------------------- optimizers

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Names and params that are trained, as optimizers take them; each has its gradient in `.grad`."""
        return [(n, self._params[n]) for n in self.grads]

    def optimizer(
        self, make: Callable[..., Any], groups: Sequence[Mapping[str, Any]] | None = None, **hyper: Any
    ) -> Any:
        """An optimizer of this package over the model's params, gradients and, where there are masters, copies.

        Args:
            make: `generated.adamw` or another.
            groups: dicts with names under `params` and hyper-parameters of their own; without, one group of all.
            hyper: of all groups.

        Raises:
            ValueError: a name that is no trained param, is named twice, or is in no group.
        """
        named = dict(self.parameters())
        if groups is not None:
            listed = [n for g in groups for n in g.get("params", ())]
            wrong = {n for n in listed if n not in named or listed.count(n) > 1} | {n for n in named if n not in listed}
            if wrong:
                raise ValueError(f"groups name each trained param once; not so: {', '.join(sorted(wrong))}")
        own = (
            [{**g, "params": [(n, named[n]) for n in g.get("params", ())]} for g in groups]
            if groups
            else list(named.items())
        )
        found = make(own, **hyper)
        if not hasattr(found, "bind"):
            raise TypeError(f"{type(found).__name__} is no optimizer of this package: make it of `run.params.values()`")
        for name, param in named.items():
            found.bind(param, grad=self.grads[name], copy=self._compute.get(name))
        return found


class Captured:
    """A training step on inputs that are copied to where it reads them."""

    def __init__(self, trainer: Trainer, optimizer: Any, max_norm: float | None) -> None:
        self.trainer, self._max_norm, self._graph = trainer, max_norm, None
        self._own = optimizer if hasattr(optimizer, "prepare") else None
        self._other = None if self._own is not None else optimizer
        torch = trainer._torch
        if trainer.device.type == "cuda":
            with torch.cuda.device(trainer.device):
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._step()
            self._graph = graph
        if self._own is not None:  # what the recorded launches read must live as long, and be where it was
            self._held, self._arranged = self._own.held(), self._own.arrangement

    def _step(self) -> None:
        own = self.trainer
        own._ones()
        own._run(own._forward)
        own._run(own._backward_runs(False))
        if self._own is not None:
            if self._max_norm is not None:
                self._own.clip_grad_norm(self._max_norm)
            self._own.launch()
        elif self._other is not None:
            self._other()

    def __call__(self, /, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The outputs of the step, from before its update.

        Raises:
            RuntimeError: the optimizer has changed in more than its hyper-parameters: what was recorded is not right any more.
        """
        self.trainer._take(inputs, named)
        self.trainer._attach()
        if self._own is not None:
            self._own.prepare()
            if self._own.arrangement != self._arranged:
                raise RuntimeError(
                    "the optimizer has other params, state or choices than when it was captured: capture again"
                )
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()
        self.trainer._fresh, self.trainer._ready = False, "done"
        return self.trainer.outputs()
