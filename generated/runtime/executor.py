"""Runs a model: memory, params, launches; forward, backward, saving and CUDA graphs. Launches come of the contract alone.

    model = graph.lower(loss, LoweringMode.TRAINING)
    run = model.load("cuda", batch=64)
    run.zero_grad()
    loss = run.forward_train(x=images, target=labels)
    run.backward()
    run.grads["fc1.weight"]
    run.save("model.safetensors")

All addresses are fixed when a model is loaded: the arguments of every launch are packed once, and a step is a list of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import extents, moves
from .abi import PackedC
from .binding import debugging, interpreted, torch_library
from .checkpoint import load_into, read, save
from .graph import Init, Recorded
from .launcher import bind
from .lowering import LoweringMode, Model
from .op import RuntimeOp
from .plan import Launch, Meta
from .program import ALIGNMENT, Program, Task, Views, build
from .views import TensorView

if TYPE_CHECKING:
    import torch

Run = Callable[[], None]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the device. `lower_bound` is what is live in the arena at the worst moment: no plan needs less."""

    arena: int
    lower_bound: int
    params: int
    gradients: int
    inputs: int

    def __str__(self) -> str:
        own = {n: v / 2**20 for n, v in vars(self).items()}
        return (
            f"arena {own['arena']:.1f} MiB (at least {own['lower_bound']:.1f}), params and buffers {own['params']:.1f}, "
            f"gradients {own['gradients']:.1f}, inputs {own['inputs']:.1f}"
        )


class Executor:
    """A model on a device, for one set of sizes.

    Attributes:
        params: by dotted key, what training changes: float32 masters where the model computes in another dtype and was loaded
            with `master="f32"`.
        buffers: by dotted key, what ops update in place.
        grads: of each trainable param, in the param's dtype; zero before the first backward.
        input_grads: of the inputs that the model was lowered with.
    """

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    grads: Mapping[str, torch.Tensor]
    input_grads: Mapping[str, torch.Tensor]

    def __init__(
        self, model: Model, device: object, sizes: Mapping[str, int], seed: int = 0, master: str | None = None
    ) -> None:
        """Plans, allocates, fills the params and packs every launch of the forward.

        Args:
            device: of torch: "cuda", "cuda:1", or "cpu" in Triton's interpreter.
            sizes: a number for each size of the graph that was left open.
            seed: of the random numbers that params begin with.
            master: "f32": params of f16 and bf16 are kept and changed in float32; launches read copies.

        Raises:
            ValueError, TypeError: naming node and argument.
        """
        lib = torch_library()
        self._torch = lib.torch
        self.device = lib.torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = lib.torch.device("cuda", lib.torch.cuda.current_device())
        if self.device.type == "cpu" and not interpreted():
            raise ValueError(
                "a model runs on a GPU, or on the CPU in Triton's interpreter: TRITON_INTERPRET=1 python ..."
            )
        if master not in (None, "f32"):
            raise ValueError(f"master is {master!r}; it is None or 'f32'")
        self.model, self._dtypes = model, lib.dtypes
        self.program: Program = build(model, sizes, lib.multiprocessors(self.device))
        self._fixed: dict[str, torch.Tensor] = {}
        self._allocate()
        self._fill(seed, master)
        self._forward = self._bound(self.program.forward, self._views())
        self._backwards: dict[bool, list[Run]] = {}
        self._fresh, self._ready = True, ""

    # -------------------------------------------------------------------------------- memory

    def _empty(self, meta: Meta) -> torch.Tensor:
        return self._torch.empty_strided(meta.shape, meta.strides, dtype=self._dtypes[meta.dtype], device=self.device)

    def _allocate(self) -> None:
        graph, values = self.model.graph, self.program.values
        self._arena = self._torch.empty(max(1, self.program.memory.arena), dtype=self._torch.uint8, device=self.device)
        if debugging():  # an element of any float dtype is NaN
            self._arena.fill_(255)
        self._fixed = {n: self._empty(values[n].meta) for n, s in self.program.storages.items() if s.fixed}
        roles = {n: graph.tensors[n].role for n in self._fixed if n in graph.tensors}
        self.inputs = tuple(n for n, role in roles.items() if role == "input")
        self._buffers = {n: self._fixed[n] for n, role in roles.items() if role == "buffer"}
        self._params = {n: self._fixed[n] for n, role in roles.items() if role == "param"}
        for name in self.model.seeds:
            if f"d{name}" in self._fixed:
                self._fixed[f"d{name}"].fill_(1)

    def _fill(self, seed: int, master: str | None) -> None:
        generator = self._torch.Generator().manual_seed(seed)
        self._compute: dict[str, torch.Tensor] = {}
        """What launches read of params that have a master."""
        for name, tensor in {**self._params, **self._buffers}.items():
            recorded = self.model.graph.tensors[name]
            values = self._initial(recorded, tensor, generator)
            tensor.copy_(values)
            if master and recorded.role == "param" and recorded.trainable and recorded.dtype in ("f16", "bf16"):
                self._compute[name] = tensor
                self._params[name] = values.to(self.device)
        wanted = self.model.wanted
        own = {n: self._params[n] for n in wanted if n in self._params}
        like = {n: own.get(n, self._fixed[n]) for n in wanted}
        grads = self._in_one(like)
        for name, param in own.items():
            param.grad = grads[name]
        self.params, self.buffers = MappingProxyType(self._params), MappingProxyType(self._buffers)
        self.grads = MappingProxyType({n: g for n, g in grads.items() if n in own})
        self.input_grads = MappingProxyType({n: g for n, g in grads.items() if n not in own})

    def _in_one(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Dense tensors of zeros in one piece of memory, which is zeroed at once."""
        places, end = {}, 0
        for name, tensor in like.items():
            places[name] = end
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._gradients = self._torch.zeros(end, dtype=self._torch.uint8, device=self.device)
        return {
            n: self._gradients[places[n] :][: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for n, t in like.items()
        }

    def _initial(self, tensor: Recorded, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Values in float32 on the CPU, so that they are the same on every device."""
        init = tensor.init or self._from_op(tensor.name)
        values = self._torch.empty(tuple(like.shape), dtype=self._torch.float32)
        if init is None:
            raise ValueError(f"param `{tensor.name}`: no op says what it begins with: give it `init=`")
        if init.kind == "normal":
            return values.normal_(0, init.amount, generator=generator)
        if init.kind == "uniform":
            return values.uniform_(-init.amount, init.amount, generator=generator)
        return values.fill_(init.amount)

    def _from_op(self, name: str) -> Init | None:
        for node in self.model.nodes:
            if isinstance(node.op, RuntimeOp):
                for tensor, data in node.op.param_init_data().items():
                    if node.inputs.get(tensor) == name and data is not None:
                        return Init("constant", data)
        return None

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor of the arena, as torch sees it."""
        value = self.program.values[name]
        if value.storage in self._fixed:
            return self._fixed[value.storage].as_strided(value.meta.shape, value.meta.strides)
        storage, dtype = self.program.storages[value.storage], self._dtypes[value.meta.dtype]
        own = self._arena[max(0, storage.offset) :][: storage.nbytes].view(dtype)
        return own.as_strided(value.meta.shape, value.meta.strides)

    @property
    def memory(self) -> MemoryUse:
        def total(tensors: Any) -> int:
            return sum(t.numel() * t.element_size() for t in tensors)

        own = self.program.memory
        params = [*self._params.values(), *self._buffers.values(), *self._compute.values()]
        inputs = [self._fixed[n] for n in self.inputs]
        return MemoryUse(own.arena, own.lower_bound, total(params), total([self._gradients]), total(inputs))

    # -------------------------------------------------------------------------------- launches

    def _views(self, elsewhere: Mapping[str, torch.Tensor] | None = None) -> dict[str, TensorView]:
        """Every tensor of the program; `elsewhere` those that are not in their own memory."""
        base, device, moved = self._arena.data_ptr(), str(self.device), elsewhere or {}
        out = {}
        for name, value in self.program.values.items():
            storage = self.program.storages[value.storage]
            if value.storage in moved:
                address = moved[value.storage].data_ptr()
            elif storage.fixed:
                address = self._fixed[value.storage].data_ptr()
            else:
                address = base + max(0, storage.offset)
            out[name] = TensorView(address, value.meta.dtype, value.meta.shape, value.meta.strides, device)
        return out

    def _bound(self, tasks: list[Task], views: Views, zeroed: Mapping[str, torch.Tensor] | None = None) -> list[Run]:
        runs: list[Run] = []
        for task in tasks:
            runs += [(zeroed or {}).get(n, self._tensor(n)).zero_ for n in task.zeros]
            for i, launch in enumerate(task.launches):
                packed = PackedC()
                task.pack(i, views, packed)
                runs.append(self._launch(launch, task.metas, packed))
        return runs

    def _backward_runs(self, accumulate: bool) -> list[Run]:
        """The launches of a backward, then those that take its gradients to where they are kept. A gradient that is kept as it was
        computed is written there at once."""
        if accumulate not in self._backwards:
            targets = {**self.grads, **self.input_grads}
            direct = {} if accumulate else self._direct(targets)
            runs = self._bound(self.program.backward, self._views(direct), direct)
            for name, own in self.program.gradients.items():
                if own not in direct:
                    runs += self._gather(own, targets[name], accumulate)
            self._backwards[accumulate] = runs
        return self._backwards[accumulate]

    def _direct(self, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the arena that can be where a gradient is kept."""
        values, out = self.program.values, dict[str, Any]()
        shared = [v.storage for v in values.values()]
        for name, own in self.program.gradients.items():
            meta, target = values[own].meta, targets[name]
            dense = meta.strides == tuple(target.stride()) or target.numel() <= 1
            alone = values[own].storage == own and shared.count(own) == 1 and not self.program.storages[own].fixed
            if alone and dense and own not in out and self._dtypes[meta.dtype] == target.dtype:
                out[own] = target
        return out

    def _gather(self, own: str, target: torch.Tensor, accumulate: bool) -> list[Run]:
        words = {v: k for k, v in self._dtypes.items()}
        meta = self.program.values[own].meta
        out = Meta(words[target.dtype], tuple(target.shape), tuple(target.stride()))
        view = TensorView(target.data_ptr(), out.dtype, out.shape, out.strides, str(self.device))
        launch = moves.add(meta, out, out) if accumulate else moves.copy(meta, out)
        views, packed = {"x": self._views()[own], "other": view, "out": view}, PackedC()
        launch.kernel.abi.visit(launch.arguments(views, {}), packed)
        return [self._launch(launch, {"x": meta, "other": out, "out": out}, packed)] if launch.grid[0] else []

    def _launch(self, launch: Launch, metas: Mapping[str, Meta], packed: PackedC) -> Run:
        return partial(bind(launch, metas, str(self.device)), bytes(packed.buffer))

    def _run(self, runs: list[Run]) -> None:
        if self.device.type == "cuda":
            with self._torch.cuda.device(self.device):
                for run in runs:
                    run()
        else:
            for run in runs:
                run()

    # -------------------------------------------------------------------------------- running

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The outputs, as the model was lowered with them: new tensors. No backward may follow.

        Raises:
            TypeError, ValueError: an input that is missing, unknown, or of another dtype or shape, by name.
        """
        return self._go("inference", inputs, named)

    def forward_train(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The outputs; `backward` may follow once. Raises RuntimeError for a model lowered for inference."""
        if self.model.mode is not LoweringMode.TRAINING:
            raise RuntimeError("the model was lowered for inference: it has no backward")
        return self._go("training", inputs, named)

    def _go(self, ready: str, inputs: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]) -> Any:
        self._ready = ""
        self._take(inputs, named)
        self._run(self._forward)
        self._ready = ready
        return self.outputs()

    def outputs(self) -> Any:
        """Copies of what the last forward gave."""
        found = [self._tensor(n).clone() for n in self.model.outputs]
        return found[0] if len(found) == 1 else tuple(found)

    def _take(self, inputs: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]) -> None:
        if len(inputs) > len(self.inputs):
            raise TypeError(f"{len(inputs)} inputs are given; the model has {', '.join(self.inputs)}")
        given = dict(zip(self.inputs, inputs))
        twice, unknown = set(given) & set(named), [n for n in named if n not in self.inputs]
        missing = [n for n in self.inputs if n not in given and n not in named]
        if twice or unknown or missing:
            said = {"given twice": sorted(twice), "not of the model": unknown, "missing": missing}
            raise TypeError("inputs: " + "; ".join(f"{k}: {', '.join(v)}" for k, v in said.items() if v))
        whole = {**given, **named}
        for name, value in whole.items():
            self._check(name, value)
        for name, value in whole.items():
            self._fixed[name].copy_(value, non_blocking=True)

    def _check(self, name: str, value: Any) -> None:
        own, recorded = self._fixed[name], self.model.graph.tensors[name]
        if not isinstance(value, self._torch.Tensor):
            raise TypeError(f"input `{name}` is a {type(value).__name__}; it takes a torch.Tensor")
        if value.dtype != own.dtype:
            raise TypeError(f"input `{name}` is {value.dtype}; the graph has {own.dtype}")
        if value.shape != own.shape:
            declared = extents.text(recorded.shape or ())
            raise ValueError(
                f"input `{name}` is {tuple(value.shape)}; the model was loaded for {tuple(own.shape)}, {declared}"
            )

    def backward(self, seeds: torch.Tensor | Mapping[str, torch.Tensor] | None = None) -> None:
        """Gradients of what the last `forward_train` gave, into `grads` and `input_grads`: added to what they hold, unless
        `zero_grad` was called since.

        Args:
            seeds: cotangents by output, or the only one's; of an output of one value without a seed it is 1.

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
        """Torch's optimizers drop `.grad` where they zero it: it is there again, and begins with nothing."""
        gone = [n for n in self.grads if self._params[n].grad is None]
        self._fresh |= bool(gone) and len(gone) == len(self.grads) and not self.input_grads
        for name in gone:
            if not self._fresh:
                self.grads[name].zero_()
            self._params[name].grad = self.grads[name]

    def _seed(self, seeds: Any) -> None:
        names = self.model.seeds
        if isinstance(seeds, self._torch.Tensor):
            if len(names) != 1:
                raise TypeError(f"a backward of this model begins with {', '.join(names)}: give seeds by name")
            seeds = {names[0]: seeds}
        seeds = dict(seeds or {})
        if unknown := [n for n in seeds if n not in names]:
            raise TypeError(f"seeds: not of the model: {', '.join(unknown)}; it has {', '.join(names)}")
        for name in names:
            own, value = self._fixed[f"d{name}"], seeds.get(name)
            if value is None and own.numel() != 1:
                raise TypeError(f"seeds: `{name}` has {own.numel()} values: give its cotangent")
            if value is not None and (value.dtype != own.dtype or value.shape != own.shape):
                raise ValueError(
                    f"seeds: `{name}` is {value.dtype} {tuple(value.shape)}; the output is {own.dtype} {tuple(own.shape)}"
                )
        for name in names:
            value = seeds.get(name)
            self._fixed[f"d{name}"].fill_(1) if value is None else self._fixed[f"d{name}"].copy_(value)

    def zero_grad(self) -> None:
        """Gradients become 0. Nothing is computed twice: the next backward writes instead of adding."""
        if not self._fresh:
            self._gradients.zero_()
        self._fresh = True

    def sync(self) -> None:
        """Takes changed masters to the copies that launches read. An optimizer of this package does so itself."""
        for name, own in self._compute.items():
            own.copy_(self._params[name])

    def compute(self, name: str) -> torch.Tensor | None:
        """What launches read of a param that has a master."""
        return self._compute.get(name)

    # -------------------------------------------------------------------------------- files

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Params and buffers by dotted key; masters where there are."""
        return {**self._params, **self._buffers}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes all of it, or nothing. Raises ValueError with every difference."""
        load_into(self.state_dict(), state, "the state")
        self.sync()

    def save(self, path: str | Path) -> None:
        """Params and buffers as a safetensors file, which appears whole or not at all."""
        save(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Takes all of a file, or nothing. Raises ValueError where the file is cut or of another model, with every difference."""
        load_into(self.state_dict(), read(Path(path)), str(path))
        self.sync()

    # -------------------------------------------------------------------------------- CUDA graphs

    def capture(self, optimizer: Any = None) -> Captured:
        """A training step as one CUDA graph: forward, backward from seeds of 1, then the optimizer's launch.

        One step must have run before, so that every kernel is compiled and the optimizer has its state. Of an optimizer with `prepare` and
        `launch`, as this package's are, the host's part runs before each replay: hyper-parameters may change. Of any other
        callable everything is recorded once. On a CPU the step runs as it is.

        Raises:
            RuntimeError: no step has run yet, or the model is not for training.
            TypeError: a seed is not of one value.
        """
        if self.model.mode is not LoweringMode.TRAINING or not self._backwards.get(False):
            raise RuntimeError(
                "capture: run one training step first (forward_train, backward, the optimizer), to compile its kernels"
            )
        self._seed(None)
        return Captured(self, optimizer)

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
            listed = [n for g in groups for n in g["params"]]
            wrong = {n for n in listed if n not in named or listed.count(n) > 1} | {n for n in named if n not in listed}
            if wrong:
                raise ValueError(f"groups name each trained param once; not so: {', '.join(sorted(wrong))}")
        own = [{**g, "params": [(n, named[n]) for n in g["params"]]} for g in groups] if groups else list(named.items())
        found = make(own, **hyper)
        for name, param in named.items():
            found.bind(param, grad=self.grads[name], copy=self._compute.get(name))
        return found


class Captured:
    """A training step on inputs that are copied to where it reads them."""

    def __init__(self, executor: Executor, optimizer: Any) -> None:
        self.executor, self._graph = executor, None
        self._prepare = getattr(optimizer, "prepare", None)
        self._launch = getattr(optimizer, "launch", optimizer)
        torch = executor._torch
        if executor.device.type == "cuda":
            with torch.cuda.device(executor.device):
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._step()
            self._graph = graph

    def _step(self) -> None:
        own = self.executor
        own._run(own._forward)
        own._run(own._backward_runs(False))
        if self._launch is not None:
            self._launch()

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The outputs of the step, from before its update."""
        self.executor._take(inputs, named)
        if self._prepare is not None:
            self._prepare()
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()
        self.executor._fresh, self.executor._ready = False, "done"
        return self.executor.outputs()
