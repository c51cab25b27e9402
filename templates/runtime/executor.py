"""Runs a model: memory, params, launches, files. Launches come of the contract alone; torch gives memory.

    run = graph.lower(logits, LoweringMode.INFERENCE).load("cuda", batch=64)
    run.load("model.safetensors")
    logits = run.forward(images)

All addresses are fixed when a model is loaded: the arguments of every launch are packed once, and a run is a list of launches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import extents
from .abi import PackedC
from .binding import check_indices
from .checkpoint import load_into, read, save
from .device import debugging, interpreted, torch_library
from .graph import Recorded
from .launcher import bind
from .lowering import Model
from .plan import Launch, Meta
from .program import Program, Task, Views, build
from .views import TensorView

if TYPE_CHECKING:
    import torch

Run = Callable[[], Any]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the device. `lower_bound` is what is live in the arena at the worst moment: no plan needs less."""

    arena: int
    lower_bound: int
    params: int
    inputs: int

    def __str__(self) -> str:
        own = {n: v / 2**20 for n, v in vars(self).items()}
        return (
            f"arena {own['arena']:.1f} MiB (at least {own['lower_bound']:.1f}), params and buffers {own['params']:.1f}, "
            f"inputs {own['inputs']:.1f}"
        )


class Executor:
    """A model on a device, for one set of sizes.

    Attributes:
        params: by dotted key.
        buffers: by dotted key, what ops update in place.
        inputs: the names of the inputs, in the order of the graph.
        program: what is launched, and where in memory everything is.
    """

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def __init__(self, model: Model, device: object, sizes: Mapping[str, int], seed: int = 0,
                 share: Executor | None = None) -> None:  # fmt: skip
        """Plans, allocates, fills the params and packs every launch of the forward.

        Args:
            device: of torch: "cuda", "cuda:1", or "cpu" in Triton's interpreter.
            sizes: a number for each size of the graph that was left open.
            seed: of the random numbers that params begin with.
            share: another run, whose params and buffers of the same names are used instead of own ones.

        Raises:
            ValueError, TypeError: naming node and argument.
        """
        lib = torch_library()
        self._torch = lib.torch
        self.device = lib.torch.device(device)
        if self.device.type == "cuda" and not lib.torch.cuda.is_available():
            raise ValueError(f"there is no GPU for {device!r}; without one: load('cpu'), with TRITON_INTERPRET=1 set")
        if self.device.type == "cuda" and interpreted():
            raise ValueError("TRITON_INTERPRET=1 runs kernels on the CPU, over addresses of its memory: load('cpu')")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = lib.torch.device("cuda", lib.torch.cuda.current_device())
        if self.device.type == "cpu" and not interpreted():
            raise ValueError(
                "a model runs on a GPU, or on the CPU in Triton's interpreter: TRITON_INTERPRET=1 python ..."
            )
        self.model, self._dtypes = model, lib.dtypes
        self.program = self._planned(sizes, lib.multiprocessors(self.device))
        self._fixed: dict[str, torch.Tensor] = {}
        self._allocate(share)
        for name, tensor in {**self._params, **self._buffers}.items():
            if share is None or name not in share._fixed:
                self._fill(name, tensor, self._initial(model.graph.tensors[name], tensor, seed))
        self.params, self.buffers = MappingProxyType(self._params), MappingProxyType(self._buffers)
        self._forward = self._bound(self.program.forward, self._views())
        own = {**self._params, **self._buffers}
        self._memory = [(n, t, t.detach(), t.data_ptr()) for n, t in own.items()]

    def _planned(self, sizes: Mapping[str, int], multiprocessors: int) -> Program:
        return build(self.model, sizes, multiprocessors)

    # -------------------------------------------------------------------------------- memory

    def _empty(self, meta: Meta) -> torch.Tensor:
        return self._torch.empty_strided(meta.shape, meta.strides, dtype=self._dtypes[meta.dtype], device=self.device)

    def _allocate(self, share: Executor | None) -> None:
        graph, values = self.model.graph, self.program.values
        self._arena = self._torch.empty(max(1, self.program.memory.arena), dtype=self._torch.uint8, device=self.device)
        if debugging():  # an element of any float dtype is NaN
            self._arena.fill_(255)
        self._fixed = {n: self._empty(values[n].meta) for n, s in self.program.storages.items() if s.fixed}
        roles = {n: graph.tensors[n].role for n in self._fixed if n in graph.tensors}
        self.inputs = tuple(n for n, role in roles.items() if role == "input")
        for name in (n for n, role in roles.items() if share is not None and role != "input"):
            self._borrow(name, share)
        self._buffers = {n: self._fixed[n] for n, role in roles.items() if role == "buffer"}
        self._params = {n: self._fixed[n] for n, role in roles.items() if role == "param"}

    def _borrow(self, name: str, share: Executor | None) -> None:
        """Takes the memory of another run's param or buffer."""
        theirs = None if share is None else share._fixed.get(name)
        if theirs is None:
            return
        own = self._fixed[name]
        if (own.shape, own.dtype, own.device) != (theirs.shape, theirs.dtype, theirs.device):
            raise ValueError(
                f"share: `{name}` is {list(theirs.shape)} {theirs.dtype} on {theirs.device} there, {list(own.shape)} {own.dtype} on {own.device} here"
            )
        self._fixed[name] = theirs

    def _fill(self, name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
        tensor.copy_(values)

    def _initial(self, tensor: Recorded, like: torch.Tensor, seed: int) -> torch.Tensor:
        """First values, drawn on the CPU so that they are the same on every device."""
        torch, init = self._torch, tensor.init
        if init is None:
            raise ValueError(f"{tensor.role} `{tensor.name}`: no op says what it begins with: give it `init=`")
        if init.kind == "constant":
            values = torch.full(tuple(like.shape), init.amount, dtype=torch.float64)
            if not torch.equal(values.to(like.dtype).isfinite(), values.isfinite()) or (
                not like.dtype.is_floating_point and not torch.equal(values.to(like.dtype).double(), values)
            ):
                raise ValueError(f"{tensor.role} `{tensor.name}`: {tensor.dtype} does not hold {init.amount}")
            return values
        digest = hashlib.sha256(f"{seed} {tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        values = torch.empty(tuple(like.shape), dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)
        if init.kind == "normal":
            return values.normal_(0, init.amount, generator=generator)
        return values.uniform_(-init.amount, init.amount, generator=generator)

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor of a run, as torch sees it."""
        value = self.program.values[name]
        if value.storage in self._fixed:
            return self._fixed[value.storage].as_strided(value.meta.shape, value.meta.strides)
        storage, dtype = self.program.storages[value.storage], self._dtypes[value.meta.dtype]
        own = self._arena[max(0, storage.offset) :][: storage.nbytes].view(dtype)
        return own.as_strided(value.meta.shape, value.meta.strides)

    @property
    def memory(self) -> MemoryUse:
        own = self.program.memory
        owned, inputs = [*self._params.values(), *self._buffers.values()], [self._fixed[n] for n in self.inputs]
        return MemoryUse(own.arena, own.lower_bound, total_bytes(owned), total_bytes(inputs))

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
            if task.op is not None and debugging():
                runs.append(partial(self._check_indices, task))
            runs += [(zeroed or {}).get(n, self._tensor(n)).zero_ for n in task.zeros]
            for i, launch in enumerate(task.launches):
                packed = PackedC()
                task.pack(i, views, packed)
                runs.append(self._launch(launch, task.metas, packed))
        return runs

    def _check_indices(self, task: Task) -> None:
        """With `PULLBACK_DEBUG=1`: raises IndexError, naming the node, where an index is out of range."""
        assert task.op is not None
        given = {t: self._tensor(v) if isinstance(v, str) else v for t, v in task.operands.items()}
        try:
            check_indices(task.op, given)
        except IndexError as error:
            raise IndexError(f"{task.label}: {error}") from None

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

    def forward(self, /, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The outputs, as the model was lowered with them: new tensors.

        Raises:
            TypeError, ValueError: an input that is missing, unknown, or of another dtype or shape, by name.
        """
        self._take(inputs, named)
        self._run(self._forward)
        return self.outputs()

    def outputs(self) -> Any:
        """Copies of what the last run gave."""
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
        self._check_memory()
        for name, value in whole.items():
            self._fixed[name].copy_(value.detach())

    def _check_memory(self) -> None:
        """Launches have the addresses that params had when the model was loaded."""
        for name, tensor, _, address in self._memory:
            if tensor.data_ptr() != address:
                raise RuntimeError(
                    f"`{name}` has other memory than when the model was loaded: copy values into it instead"
                )

    def _check(self, name: str, value: Any) -> None:
        own, recorded = self._fixed[name], self.model.graph.tensors[name]
        if not isinstance(value, self._torch.Tensor):
            raise TypeError(f"input `{name}` is a {type(value).__name__}; it takes a torch.Tensor")
        if value.requires_grad and self._torch.is_grad_enabled():
            raise ValueError(
                f"input `{name}` requires a gradient, which autograd would not get: detach it, and name it in `input_gradients=`"
            )
        if value.dtype != own.dtype:
            raise TypeError(f"input `{name}` is {value.dtype}; the graph has {own.dtype}")
        if value.shape != own.shape:
            declared = extents.text(recorded.shape or ())
            raise ValueError(
                f"input `{name}` is {tuple(value.shape)}; the model was loaded for {tuple(own.shape)}, {declared}"
            )

    # -------------------------------------------------------------------------------- files

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Params and buffers by dotted key."""
        return {**self._params, **self._buffers}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes all of it, or nothing. Raises ValueError with every difference."""
        load_into(self.state_dict(), state, "the state")

    def save(self, path: str | Path) -> None:
        """Params and buffers as a safetensors file, which appears whole or not at all."""
        save(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Takes all of a file, or nothing. Raises ValueError where the file is cut or of another model, with every difference."""
        load_into(self.state_dict(), read(Path(path)), str(path))


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
