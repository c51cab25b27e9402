"""What calls of one kind come to, to be run again: what to allocate, and each launch with its arguments in their places.

Planning, and most of what Triton does at a launch, depends on dtypes, shapes and strides alone. It is done once; a call of the same
kind puts its own tensors in.

    prepared = Prepared.of(op, op.plan_forward, {"x": x}, ("x",), x.device, lambda plan: plan.outputs, lambda plan: plan.scratch, lib)
    (y,) = prepared.run(op, [x])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .device import Torch, debugging, torch_library
from .op import RuntimeOp
from .plan import Given, Launch, Limits, Meta, Plan

if TYPE_CHECKING:
    import torch

_NOTHING: Mapping[str, float] = {}


class PreparedLaunch:
    """One launch: its arguments in order, and the places of those that change from call to call.

    What Triton compiles for is fixed by the plan (dtypes, constants, integers, absent tensors) but for one thing: whether pointers are
    aligned to 16 bytes. Those to what was allocated for the call are. On HIP Triton also asks whether a tensor's storage is within
    2 GiB; what a kernel reaches of it is fixed by shape and strides, so either answer holds. A kernel is started as it was compiled
    first: of Triton's settings that are changed later only the hooks of launches are heeded.
    """

    __slots__ = ("_arguments", "_function", "_grid", "_numbers", "_options", "_pointers", "_started", "name")

    def __init__(self, launch: Launch, places: Mapping[str, int], limits: Limits) -> None:
        launch = launch.on(limits)
        self._arguments: list[Any] = []
        self._pointers: list[tuple[int, int]] = []
        self._numbers: list[tuple[int, str]] = []
        for k, param in enumerate(launch.kernel.abi.params):
            self._arguments.append(launch.values.get(param.name))
            if param.role == "ptr":
                place = places.get(launch.pointers.get(param.name, ""))
                if place is not None:
                    self._pointers.append((k, place))
            elif param.name not in launch.values:
                self._numbers.append((k, param.name))
        self.name: str = launch.kernel.function.fn.__name__
        self._function, self._grid, self._options = launch.kernel.function, launch.grid, launch.options
        self._started: dict[tuple[bool, ...], Callable[..., Any]] = {}

    @property
    def takes_numbers(self) -> bool:
        """Whether run-time numbers are among its arguments."""
        return bool(self._numbers)

    def __call__(self, tensors: Sequence[Any], numbers: Mapping[str, float], aligned: tuple[bool, ...]) -> None:
        """Starts the kernel on the current stream.

        Args:
            tensors: what the places count.
            numbers: the run-time numbers of the call, by parameter.
            aligned: whether each tensor of the caller is aligned to 16 bytes.
        """
        arguments = self._arguments.copy()
        for k, place in self._pointers:
            arguments[k] = tensors[place]
        for k, name in self._numbers:
            arguments[k] = numbers[name]
        start = self._started.get(aligned)
        if start is not None:
            start(*arguments)
            return
        compiled = self._function[self._grid](*arguments, **self._options)
        if compiled is not None:  # the interpreter compiles nothing
            self._started[aligned] = started(compiled, self._grid)


def started(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., Any]:
    """What starts a compiled kernel again, on the current stream."""
    ready = getattr(compiled, "result", None)  # where kernels are compiled in the background
    again: Callable[..., Any] = (ready() if callable(ready) else compiled)[grid]
    return again


class Prepared:
    """A plan on one device, for tensors of the dtypes, shapes and strides that it was made for."""

    def __init__(
        self, plan: Plan, names: Sequence[str], made: Mapping[str, Meta], between: Mapping[str, Meta], device: torch.device, lib: Torch,
        copies: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            names: of the values that `run` is given, in their order.
            made: what `run` returns, in this order; every output of the plan that a launch writes is in it or in `between`.
            between: what else is allocated.
            copies: those of the values that are copied to dense memory first, stretched to these shapes.
        """
        new = {**made, **between}
        self.plan, self.device = plan, device
        self._names = tuple(names)
        self._count = len(made)
        places = {n: k for k, n in enumerate((*names, *new))}
        self._new = [(m.shape, m.strides, lib.dtypes[m.dtype]) for m in new.values()]
        self._copies = [(places[n], shape) for n, shape in (copies or {}).items()]
        self._zeros = [places[n] - len(names) for n in plan.zeros]
        self._updated = [places[n] for n in plan.updated]
        self._read = [places[n] for n in names if isinstance(plan.metas.get(n), Meta)]
        self.launches = [PreparedLaunch(launch, places, lib.limits(device)) for launch in plan.launches]
        self._numbered = any(s.takes_numbers for s in self.launches)
        self._empty = lib.torch.empty_strided
        self._filled = debugging()  # asked here: what is kept for later calls is made without
        self._count_update = lib.torch.autograd.graph.increment_version
        self._cuda = lib.torch.cuda if device.type == "cuda" else None
        mixed = self._cuda is None and any(m.dtype == "f64" for m in plan.metas.values())
        self._stored = [places[n] for n in (*plan.outputs, *plan.updated) if mixed]

    @staticmethod
    def of(
        op: RuntimeOp, planning: Callable[[Mapping[str, Given]], Plan], given: Mapping[str, Any], names: Sequence[str],
        device: torch.device, made: Callable[[Plan], Mapping[str, Meta]], between: Callable[[Plan], Mapping[str, Meta]], lib: Torch,
    ) -> Prepared:  # fmt: skip
        """Plans a call of the op.

        Args:
            planning: makes the plan of one direction of what is known by name.
            given: tensors, numbers, None, and of what no kernel reads its `Meta`.
            names: of what `run` will be given.
            device: of the tensors.
            made, between: of a plan, what is returned and what else is allocated.
        """
        copies: dict[str, tuple[int, ...]] = {}

        def copied(name: str, shape: tuple[int, ...]) -> Given:
            value = given[name]
            if isinstance(value, lib.torch.Tensor):
                copies[name] = shape
                return Meta.dense(lib.names[value.dtype], shape)
            return Meta.dense(value.dtype, shape) if isinstance(value, Meta) else value

        plan = op.planned(planning, lib.metas(given), copied)
        return Prepared(plan, names, made(plan), between(plan), device, lib, copies)

    def run(self, op: RuntimeOp, values: Sequence[Any]) -> list[torch.Tensor]:
        """Allocates and launches. Returns what is made, as the plan's metas have it.

        Args:
            op: an instance that the plan holds for; its attrs may have other values where these are run-time numbers.
            values: tensors and numbers in the order of `names`.

        Raises:
            ValueError: of a number that float64 does not hold.
        """
        if self._copies:
            values = list(values)
            for k, shape in self._copies:
                values[k] = values[k].expand(shape).contiguous()
        new = [self._empty(shape, strides, dtype=dtype, device=self.device) for shape, strides, dtype in self._new]
        if self._filled:
            for tensor in new:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        for k in self._zeros:
            new[k].zero_()
        if self.launches:
            numbers = op.numbers(dict(zip(self._names, values))) if self._numbered else _NOTHING
            aligned = tuple([values[k].data_ptr() % 16 == 0 for k in self._read])
            if self._cuda is None or self._cuda.current_device() == self.device.index:
                self._launch([*values, *new], numbers, aligned)
            else:
                with self._cuda.device(self.device):
                    self._launch([*values, *new], numbers, aligned)
            for k in self._updated:
                self._count_update(values[k])
        return new[: self._count]

    def _launch(self, tensors: list[Any], numbers: Mapping[str, float], aligned: tuple[bool, ...]) -> None:
        if not self._stored:
            for launch in self.launches:
                launch(tensors, numbers, aligned)
            return
        with rounded_after({k: tensors[k] for k in self._stored}) as wide:
            own = [wide.get(k, tensor) for k, tensor in enumerate(tensors)]
            for launch in self.launches:
                launch(own, numbers, aligned)


@contextmanager
def rounded_after(stored: Mapping[Any, torch.Tensor]) -> Iterator[dict[Any, torch.Tensor]]:
    """Triton's interpreter cannot store a float64 as bf16: what launches store so is float32 first, and rounded after.

    Args:
        stored: CPU tensors of any dtype that launches with a float64 among their operands write.

    Yields:
        By the same keys, what is to be written in place of those that are bf16.
    """
    torch = torch_library().torch
    halves = {n: v for n, v in stored.items() if v.dtype == torch.bfloat16}
    wide = {n: torch.empty_strided(v.shape, v.stride(), dtype=torch.float32).copy_(v) for n, v in halves.items()}
    yield wide
    for name, tensor in halves.items():
        tensor.copy_(wide[name])


def run(launches: Sequence[Launch], tensors: Mapping[str, Any], limits: Limits) -> None:
    """Launches kernels that take no run-time numbers on the current device, one after the other."""
    for launch in launches:
        one = launch.on(limits)
        arguments = one.kernel.abi.call(one.arguments(tensors, _NOTHING))
        one.kernel.function[one.grid](*arguments, **one.options)
