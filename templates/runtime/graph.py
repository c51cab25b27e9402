"""Graphs of ops: recorded by calling the generated functions on `SymTensor`s. No torch here.

    x, graph = SymTensor.input("f32", (None, 784))
    weight = graph.param("fc1.weight", (128, 784), init=Init("uniform", 784**-0.5))
    y = relu(linear(x, weight, graph.param("fc1.bias", init=0)))
    print(graph)

A shape may hold None, the size "batch", or a string, a size of that name; they become numbers when the graph is loaded. What
shapes results have, the ops' own axes say.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import extents
from .extents import Extent, Size, Trials
from .layout import ShapeError
from .op import RuntimeOp
from .plan import Given, Meta
from .shaping import Permute, Reshape, Shaping, StopGradient
from .views import FLOATS, ITEM_SIZES

if TYPE_CHECKING:
    from .lowering import LoweringMode, Model

_WORDS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "int32": "i32", "int64": "i64"}
_TAKEN = ("device", "seed", "master")
"""Names that no size can have: `load` has arguments of these names."""


@dataclass(frozen=True)
class Init:
    """What a param or buffer is filled with when a model is loaded: `constant`, `normal` of a deviation, or `uniform`
    between -amount and amount. Random ones are drawn for each name alone: what else a model has makes no difference.
    """

    kind: str
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "normal", "uniform"):
            raise ValueError(f"Init: kind is {self.kind!r}; it is constant, normal or uniform")
        if self.kind != "constant" and not 0 <= self.amount < float("inf"):
            raise ValueError(f"Init: {self.kind} of {self.amount}; it is finite and not negative")


@dataclass(frozen=True)
class Recorded:
    """A tensor of a graph. A param without a shape gets that which its first op gives it."""

    name: str
    role: str
    dtype: str
    shape: tuple[Size, ...] | None
    init: Init | None = None
    trainable: bool = False


@dataclass(frozen=True)
class Node:
    """An op, or a shaping of memory, in a graph. Operands and results by the op's own names."""

    name: str
    op: RuntimeOp | Shaping
    inputs: Mapping[str, str | float | int | None]
    outputs: Mapping[str, str]

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it reads, each once."""
        return tuple(dict.fromkeys(v for v in self.inputs.values() if isinstance(v, str)))

    @property
    def updated(self) -> frozenset[str]:
        """The buffers that it may update in place."""
        updates = self.op.updates if isinstance(self.op, RuntimeOp) else {}
        return frozenset(v for n in updates if isinstance(v := self.inputs.get(n), str))

    @property
    def label(self) -> str:
        return f"node `{self.name}` ({self.op.name})"


class SymTensor:
    """A tensor of a graph: a dtype and a shape, no values."""

    __slots__ = ("graph", "name")

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph, self.name = graph, name

    @staticmethod
    def input(dtype: object, shape: Sequence[int | str | None], name: str = "x") -> tuple[SymTensor, Graph]:
        """A new graph and its first input.

        Args:
            dtype: f16, bf16, f32, f64, i32, i64, bool, or the torch.dtype.
            shape: numbers; None for the size "batch", a string for a size of that name.
        """
        graph = Graph()
        return graph.input(dtype, shape, name), graph

    @property
    def dtype(self) -> str:
        return self.graph.tensors[self.name].dtype

    @property
    def shape(self) -> tuple[Size, ...]:
        """Raises ShapeError for a param whose shape no op has given yet."""
        shape = self.graph.tensors[self.name].shape
        if shape is None:
            raise ShapeError(f"param `{self.name}` has no shape before an op uses it")
        return shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: Any) -> SymTensor:
        """The same elements under another shape, of numbers, extents and names of sizes; one may be -1. Copies only where strides do
        not reach it."""
        own = [Extent.named(n or "batch") if n is None or isinstance(n, str) else n for n in _spread(shape)]
        return self.graph.shaped(self, Reshape(tuple(own)))

    def permute(self, *dims: int | Sequence[int]) -> SymTensor:
        """The dims in another order, without a copy."""
        return self.graph.shaped(self, Permute(_spread(dims)))

    def transpose(self, first: int, second: int) -> SymTensor:
        """Two dims exchanged, without a copy."""
        rank = self.ndim
        if not all(-rank <= d < rank for d in (first, second)):
            raise ShapeError(f"transpose of `{self.name}`: {first} and {second} of {rank} dims")
        order = list(range(rank))
        order[first], order[second] = order[second], order[first]
        return self.permute(order)

    def stop_gradient(self) -> SymTensor:
        """The same value, through which no gradient goes."""
        return self.graph.shaped(self, StopGradient())

    def _operator(self, *other: object) -> SymTensor:
        raise TypeError(f"`{self.name}` is recorded in a graph: it has no operators, call the ops' functions")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __matmul__ = (
        _operator
    )
    __neg__ = __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = _operator

    def __bool__(self) -> bool:
        raise TypeError(f"`{self.name}` is recorded in a graph: it has no value to decide by")

    def __repr__(self) -> str:
        tensor = self.graph.tensors[self.name]
        return f"SymTensor({self.name}: {tensor.dtype}{extents.text(tensor.shape) if tensor.shape is not None else ''})"


def _spread(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(values[0]) if len(values) == 1 and not isinstance(values[0], (int, Extent)) else tuple(values)


def _init(name: str, init: object) -> Init | None:
    if init is None or isinstance(init, Init):
        return init
    if isinstance(init, (int, float)):
        return Init("constant", float(init))
    raise TypeError(f"`{name}`: init is a {type(init).__name__}; it takes a number or an Init")


def _dtype(dtype: object) -> str:
    word = str(dtype).removeprefix("torch.")
    word = _WORDS.get(word, word)
    if word not in ITEM_SIZES:
        raise TypeError(f"{dtype} is no dtype of a graph; it takes {', '.join(ITEM_SIZES)}")
    return word


@dataclass
class Graph:
    """Tensors and nodes, in the order in which they were recorded."""

    tensors: dict[str, Recorded] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    sizes: tuple[str, ...] = ()
    """Names of the extents that are not known yet."""

    # -------------------------------------------------------------------------------- leaves

    def input(self, dtype: object, shape: Sequence[int | str | None], name: str = "x") -> SymTensor:
        """A tensor that every run is given."""
        return self._leaf(Recorded(name, "input", _dtype(dtype), self._shape(shape)))

    def param(self, name: str, shape: Sequence[int] | None = None, dtype: object = "f32", init: Init | float | None = None,
              trainable: bool = True) -> SymTensor:  # fmt: skip
        """A tensor that the model owns and training changes.

        Args:
            name: dotted, as it is saved: `layers.0.norm.weight`.
            shape: may be left to the first op that takes it as a param.
            init: what it is filled with; else what the op says that it begins with.
        """
        own = None if shape is None else self._shape(shape)
        return self._leaf(Recorded(name, "param", _dtype(dtype), own, _init(name, init), trainable))

    def buffer(self, name: str, shape: Sequence[int] | None = None, dtype: object = "f32",
               init: Init | float | None = None) -> SymTensor:  # fmt: skip
        """A tensor that the model owns and ops may update in place: no gradient, no weight decay. Shape and first values may be
        left to its first op, as a param's."""
        own = None if shape is None else self._shape(shape)
        return self._leaf(Recorded(name, "buffer", _dtype(dtype), own, _init(name, init)))

    def _leaf(self, tensor: Recorded) -> SymTensor:
        if not isinstance(tensor.name, str):
            raise TypeError(f"{tensor.name!r} is no name of a tensor: it takes a string")
        if tensor.name in self.tensors:
            raise ValueError(f"the graph has a tensor `{tensor.name}` already: names are given once")
        if tensor.name in ("", "__metadata__") or any(c.isspace() for c in tensor.name):
            raise ValueError(
                f"{tensor.name!r} is no name of a tensor: it has characters, no white space, and files have a use for __metadata__"
            )
        if (
            tensor.role in ("param", "buffer")
            and tensor.shape is not None
            and not all(isinstance(n, int) for n in tensor.shape)
        ):
            raise ShapeError(f"{tensor.role} `{tensor.name}` is {extents.text(tensor.shape)}: its extents are numbers")
        self.tensors[tensor.name] = tensor
        return SymTensor(self, tensor.name)

    def _shape(self, shape: Sequence[Any]) -> tuple[Size, ...]:
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise ShapeError(f"{shape!r} is no shape: a sequence of extents")
        out: list[Size] = []
        for extent in shape:
            if isinstance(extent, Extent) or (isinstance(extent, int) and extent >= 0 and not isinstance(extent, bool)):
                out.append(extent)
            elif extent is None or isinstance(extent, str) and extent.isidentifier() and extent not in _TAKEN:
                out.append(Extent.named(extent or "batch"))
            else:
                raise ShapeError(f"{extent!r} is no extent: a number, None, or the name of a size")
        names = dict.fromkeys(n for e in out if isinstance(e, Extent) for n in e.names)
        self.sizes = tuple(dict.fromkeys((*self.sizes, *names)))
        return tuple(out)

    # -------------------------------------------------------------------------------- recording

    def record(self, op: RuntimeOp, given: Mapping[str, Any]) -> SymTensor | tuple[SymTensor, ...]:
        """Adds a node. What a generated function calls where one of its arguments is a SymTensor.

        Raises:
            TypeError, ValueError: as the op itself, naming the node too.
        """
        name = self._free(op.name)
        try:
            op.require()
            self._check(op, given)
            self._complete(op, given)
            shapes = self._shapes(op, given)
            self._begin(op, given)
        except (TypeError, ValueError, IndexError) as error:
            raise type(error)(f"node `{name}`: {Trials.of(self.sizes).told(str(error))}") from error
        inputs = {n: v.name if isinstance(v, SymTensor) else v for n, v in given.items()}
        outputs = {t: f"{name}.{t}" for t in shapes}
        for own, (dtype, shape) in zip(outputs.values(), shapes.values()):
            self.tensors[own] = Recorded(own, "value", dtype, shape)
        self.nodes.append(Node(name, op, inputs, outputs))
        found = tuple(SymTensor(self, n) for n in outputs.values())
        return found[0] if len(found) == 1 else found

    def shaped(self, x: SymTensor, shaping: Shaping) -> SymTensor:
        """Adds a node that moves no data."""
        name = self._free(shaping.name)
        try:
            shape = shaping.shape(x.shape)
        except ShapeError as error:
            raise ShapeError(f"node `{name}` on `{x.name}`: {error}") from error
        out = f"{name}.y"
        self.tensors[out] = Recorded(out, "value", x.dtype, shape)
        self.nodes.append(Node(name, shaping, {"x": x.name}, {"y": out}))
        return SymTensor(self, out)

    def _free(self, stem: str) -> str:
        count = 1 + sum(n.op.name == stem for n in self.nodes)
        while any(t.partition(".")[0] == f"{stem}_{count}" for t in self.tensors):
            count += 1
        return f"{stem}_{count}"

    def _check(self, op: RuntimeOp, given: Mapping[str, Any]) -> None:
        for tensor in op.tensors:
            value = given.get(tensor.name)
            if isinstance(value, SymTensor):
                if value.graph is not self:
                    raise ValueError(f"{op.name}: `{tensor.public}` is of another graph")
                role = self.tensors[value.name].role
                if tensor.name in op.updates and role != "buffer":
                    raise TypeError(
                        f"{op.name}: `{tensor.public}` is updated in place; `{value.name}` is no buffer of the graph"
                    )
            elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(
                    f"{op.name}: `{tensor.public}` is a {type(value).__name__} beside recorded tensors: make it an input, a param or a buffer of the graph"
                )

    def _complete(self, op: RuntimeOp, given: Mapping[str, Any]) -> None:
        """Gives params that have no shape yet that which the op gives them."""
        unknown = {n: v for n, v in given.items() if isinstance(v, SymTensor) and self.tensors[v.name].shape is None}
        if not unknown:
            return
        known = {n: v for n, v in given.items() if n not in unknown}
        found = [{**op.param_shapes(metas), **op.buffer_shapes(metas)} for metas in self._metas(op, known)]
        for name, value in unknown.items():
            first, second = (shapes.get(name) for shapes in found)
            if first is None or first != second:
                role = self.tensors[value.name].role
                raise ShapeError(
                    f"{op.name}: the shape of {role} `{value.name}` does not follow from the inputs: give it"
                )
            self.tensors[value.name] = replace(self.tensors[value.name], shape=tuple(first))

    def _begin(self, op: RuntimeOp, given: Mapping[str, Any]) -> None:
        """Gives params and buffers that say nothing of it the first values that the op says."""
        for name, first in {**op.param_init_data(), **op.buffer_init_data()}.items():
            value = given.get(name)
            if isinstance(value, SymTensor) and isinstance(first, (int, float)):
                tensor = self.tensors[value.name]
                if tensor.role in ("param", "buffer") and tensor.init is None:
                    self.tensors[value.name] = replace(tensor, init=Init("constant", float(first)))

    def _metas(self, op: RuntimeOp, given: Mapping[str, Any]) -> Iterable[dict[str, Given]]:
        for sizes in Trials.of(self.sizes).sizes:
            yield {n: self.meta(v.name, sizes) if isinstance(v, SymTensor) else v for n, v in given.items()}

    def meta(self, name: str, sizes: Mapping[str, int]) -> Meta:
        """A tensor with numbers for sizes, dense."""
        tensor = self.tensors[name]
        if tensor.shape is None:
            raise ShapeError(f"{tensor.role} `{name}` has no shape: no op has given it one")
        shape = extents.concrete(tensor.shape, sizes)
        return Meta.dense(tensor.dtype, shape)

    def _shapes(self, op: RuntimeOp, given: Mapping[str, Any]) -> dict[str, tuple[str, tuple[Size, ...]]]:
        """Dtype and shape of each result."""
        found = [op.output_metas(metas) for metas in self._metas(op, given)]
        trials = Trials.of(self.sizes)
        shapes = {n: (m.dtype, trials.recover([f[n].shape for f in found])) for n, m in found[0].items()}
        if self.sizes and op.derives:
            self._check_derived(op, given, shapes, trials.primes[0])
        return shapes

    def _check_derived(self, op: RuntimeOp, given: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[Size, ...]]],
                       sizes: Mapping[str, int]) -> None:  # fmt: skip
        """An extent that is rounded down is whole in every trial. Of sizes that nothing divides it is not what it was taken for."""
        metas = {n: self.meta(v.name, sizes) if isinstance(v, SymTensor) else v for n, v in given.items()}
        try:
            made = op.output_metas(metas)
            wanted = {n: extents.concrete(shape, sizes) for n, (_, shape) in shapes.items()}
        except ValueError:
            return  # such sizes are refused, here and when they are known
        if any(made[n].shape != shape for n, shape in wanted.items()):
            raise ShapeError(f"{op.name}: {extents.NO_PRODUCT}")

    # -------------------------------------------------------------------------------- lowering

    def copy(self) -> Graph:
        """What is recorded so far."""
        return Graph(dict(self.tensors), list(self.nodes), self.sizes)

    def lower(self, outputs: SymTensor | Sequence[SymTensor], mode: LoweringMode | None = None, seeds: Sequence[SymTensor] | None = None,
              input_gradients: Sequence[SymTensor] = (), fuse: bool = True) -> Model:  # fmt: skip
        """What a run computes: see `lowering.lower`. Without a mode: for training."""
        from .lowering import LoweringMode, lower

        return lower(self, outputs, mode or LoweringMode.TRAINING, seeds, input_gradients, fuse)

    # -------------------------------------------------------------------------------- text

    def __str__(self) -> str:
        lines = []
        for tensor in self.tensors.values():
            if tensor.role != "value":
                frozen = "" if tensor.role != "param" or tensor.trainable else ", not trained"
                lines.append(f"{tensor.role} {self._typed(tensor.name)}{frozen}")
        for node in self.nodes:
            operands = [f"{n}={v}" for n, v in node.inputs.items() if v is not None]
            attrs = [f"{n}={_brief(v)}" for n, v in node.op.attrs.items() if v is not None]
            results = ", ".join(self._typed(n) for n in node.outputs.values())
            lines.append(f"{results} = {node.op.name}({', '.join(operands + attrs)})")
        return "\n".join(lines)

    def _typed(self, name: str) -> str:
        tensor = self.tensors[name]
        return f"{name}: {tensor.dtype}{extents.text(tensor.shape) if tensor.shape is not None else ''}"

    def to_dict(self, outputs: Sequence[str] = ()) -> dict[str, Any]:
        """The graph as plain data, in the format that `pullback fuse` reads. Where a gradient stops is a node of its own."""

        def shape(name: str) -> list[int | str]:
            return [n if isinstance(n, int) else str(n) for n in self.tensors[name].shape or ()]

        tensors = {
            t.name: {"role": t.role, "dtype": t.dtype, "shape": shape(t.name)}
            for t in self.tensors.values()
            if t.role != "value"
        }
        nodes = [
            {
                "name": n.name, "op": n.op.name, "attrs": _plain(dict(n.op.attrs)), "inputs": dict(n.inputs),
                "outputs": {k: {"name": v, "dtype": self.tensors[v].dtype, "shape": shape(v)} for k, v in n.outputs.items()},
                **({"updates": [k for k, v in n.inputs.items() if v in n.updated]} if n.updated else {}),
            }
            for n in self.nodes
        ]  # fmt: skip
        return {
            "format": "pullback-graph 1",
            "tensors": tensors,
            "nodes": nodes,
            "outputs": list(outputs),
            "stop_gradient": [],
        }

    def to_json(self, outputs: SymTensor | Sequence[SymTensor] = ()) -> str:
        """`to_dict` as text."""
        outputs = [outputs] if isinstance(outputs, SymTensor) else outputs
        return json.dumps(self.to_dict([o.name for o in outputs]), indent=1)

    def dot(self) -> str:
        """The graph for graphviz."""
        out = ["digraph {", '  node [fontname="monospace", fontsize=10];']
        for tensor in self.tensors.values():
            if tensor.role != "value":
                shape = {"input": "ellipse", "param": "note", "buffer": "cylinder"}[tensor.role]
                out.append(f"  {_quoted(tensor.name)} [shape={shape}, label={_quoted(self._typed(tensor.name))}];")
        made = {v: n.name for n in self.nodes for v in n.outputs.values()}
        for node in self.nodes:
            attrs = [f"{n}={_brief(v)}" for n, v in node.op.attrs.items() if v is not None]
            out.append(f"  {_quoted(node.name)} [shape=box, label={_quoted(chr(10).join([node.op.name, *attrs]))}];")
            for value in node.operands:
                label = f" [label={_quoted(self._typed(value).partition(': ')[2])}]" if value in made else ""
                out.append(f"  {_quoted(made.get(value, value))} -> {_quoted(node.name)}{label};")
        return "\n".join([*out, "}"])

    def draw(self, path: str | Path) -> Path:
        """A picture by graphviz; its ending says the format. Raises FileNotFoundError where `dot` is not installed."""
        program, path = shutil.which("dot"), Path(path)
        if program is None:
            raise FileNotFoundError("graphviz's `dot` is not on the PATH; `graph.dot()` is the text for it")
        subprocess.run(
            [program, f"-T{path.suffix[1:] or 'svg'}", "-o", str(path)], input=self.dot(), text=True, check=True
        )
        return path


def _plain(value: Any) -> Any:
    """As JSON has it: lists for tuples."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _brief(value: object) -> str:
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def recording(given: Mapping[str, Any]) -> Graph | None:
    """The graph of the first recorded tensor among a call's arguments."""
    return next((v.graph for v in given.values() if isinstance(v, SymTensor)), None)


def is_float(dtype: str) -> bool:
    return dtype in FLOATS
