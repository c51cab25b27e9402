"""`StepOp`: an op that updates state in place, over any number of tensors in one launch. No torch here.

The tensors of one launch have the same dtypes, and their ops the same choices. Their addresses stand in a table on the device, and what
formulas make of hyper-parameters alone in another: neither a new address nor a new number compiles anything.

    op = Momentum(lr=1e-3, ..., first=1)
    table = [op.row(Place(n, first, aligned=True, numbers=0), [0, 0x7f00, 0x7e00, ...])]
    op.step_launch(tiles, {"grad": "bf16", "param": "f32", ...})      # Launch(kernel=..., grid=(tiles, 1, 1), ...)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .abi import ArgVisitor
from .elementwise import triton_dtype
from .op import RuntimeOp
from .plan import Kernel, Launch, Tensor, cdiv
from .views import TensorView

if TYPE_CHECKING:
    from .optim import Optimizer

BLOCK = 2048
"""Elements of a tile."""
VECTOR = 16
"""Bytes that the addresses of a row are multiples of where its tiles are read in vectors."""
TABLES = ("work", "table", "numbers", "scale", "found_inf")
"""What a launch takes, by the names of its pointers; the last two may be absent."""
COUNTER, FRESH = "step", "first"
"""Attrs that go with the state: how many updates a tensor has seen, this one among them, and 1 where its state is new."""


@dataclass(frozen=True)
class Place:
    """What a row of the table says of a tensor beside its addresses."""

    count: int
    """Elements."""
    tile: int
    """The first of its tiles."""
    aligned: bool
    numbers: int
    """Where its numbers begin in their table."""


class StepOp(RuntimeOp):
    """What every op is that updates state. An instance holds hyper-parameters, and the numbers that go with a tensor's state."""

    slots: ClassVar[tuple[str, ...]] = ()
    """What the kernel reads of `scalars()`, in the order of the table."""
    kernel: ClassVar[Kernel]

    # -------------------------------------------------------------------------------- what there is

    @classmethod
    def trained(cls) -> Tensor:
        """The state that is the caller's own."""
        return next(t for t in cls.state if t.init is None)

    @classmethod
    def hosted(cls) -> tuple[Tensor, ...]:
        """State without axes: numbers of each tensor, kept on the host and given as attrs."""
        return tuple(t for t in cls.state if not t.dims)

    @classmethod
    def hyper(cls) -> tuple[str, ...]:
        """The attrs that a caller gives, by name."""
        own = {COUNTER, FRESH, *(t.name for t in cls.hosted())}
        return tuple(n for n in cls.kinds if n not in own)

    @classmethod
    def stored(cls) -> tuple[Tensor, ...]:
        """The tensors in memory, in the order of the table: the gradient, then the state as the spec has it."""
        return (*cls.inputs, *(t for t in cls.state if t.dims))

    def there(self, tensor: Tensor) -> bool:
        """Whether a tensor of state exists under this instance's choices."""
        choices = self.choices()
        return all(choices[name] in values for name, values in tensor.when)

    def initial(self, tensor: Tensor) -> float:
        """What the elements of a tensor of state are at first."""
        return float(self.attrs[tensor.init] if isinstance(tensor.init, str) else tensor.init or 0.0)

    def advanced(self) -> dict[str, float]:
        """The numbers of a tensor's state after this step."""
        return {}

    def slot(self) -> list[float]:
        """The numbers of this instance, as they follow one another in their table."""
        values = self.scalars()
        return [float(values[n]) for n in self.slots]

    # -------------------------------------------------------------------------------- tables

    @staticmethod
    def row(place: Place, addresses: Sequence[int]) -> list[int]:
        """A tensor's row of the table: the addresses of its copy and of what `stored` has, 0 for what is absent."""
        return [place.count, place.tile, int(place.aligned), place.numbers, *addresses]

    def step_launch(self, tiles: int, dtypes: Mapping[str, str]) -> Launch:
        """The launch over so many tiles of tensors of these dtypes, by name; `copy` where a copy is written too.

        Raises:
            TypeError: naming op and tensor: a dtype that it does not take.
        """
        for tensor in self.stored():
            if tensor.name in dtypes and dtypes[tensor.name] not in tensor.dtypes:
                raise TypeError(
                    f"{self.name}: `{tensor.name}` is {dtypes[tensor.name]}; it takes {', '.join(tensor.dtypes)}"
                )
        compute = "f64" if "f64" in dtypes.values() else "f32"
        values = {**self.choices(), "DTYPES": self.codes(dtypes), "COMPUTE": triton_dtype(compute), "BLOCK": BLOCK}
        return Launch(self.kernel, (tiles, 1, 1), {f"{n}_ptr": n for n in TABLES}, values)

    @classmethod
    def codes(cls, dtypes: Mapping[str, str]) -> tuple[Any, ...]:
        """The dtypes by address in a row, as Triton has them; None of what is absent."""
        return tuple(
            triton_dtype(dtypes[n]) if n in dtypes else None for n in ("copy", *(t.name for t in cls.stored()))
        )

    def pack_step_args(
        self, tables: Sequence[TensorView | None], dtypes: Mapping[str, str], visitor: ArgVisitor
    ) -> None:
        """Visits the arguments of the launch, each under the kernel parameter's name. `tables` are as TABLES has them."""
        views = {n: v for n, v in zip(TABLES, tables) if v is not None}
        launch = self.step_launch(views["work"].shape[0], dtypes)
        launch.kernel.abi.visit(launch.arguments(views, {}), visitor)


def tiles(counts: Iterable[int]) -> tuple[list[int], list[int]]:
    """Of tensors of so many elements: the first tile of each, and the tensor of each tile."""
    first: list[int] = []
    work: list[int] = []
    for k, count in enumerate(counts):
        first.append(len(work))
        work += [k] * cdiv(count, BLOCK)
    return first, work


def norm_launches(op: type[StepOp], tile_counts: Sequence[int], dtypes: Sequence[Mapping[str, str]]) -> list[Launch]:
    """The launches that find the norm of all gradients: one for the tables of each of some launches, and one that adds up.

    Their pointers are `work0`, `table0`, `part0`, ...; then `part0`, `limit`, `unscale`, `norm` and `factor`.
    """
    from . import steps

    squares, finish = Kernel.of(steps.square_sums), Kernel.of(steps.clip_factor)
    out = []
    addresses = 1 + len(op.stored())
    for k, (count, own) in enumerate(zip(tile_counts, dtypes)):
        dtype = own[op.inputs[0].name]
        compute = triton_dtype("f64" if dtype == "f64" else "f32")
        values = {"k": 1, "ADDRESSES": addresses, "DTYPES": op.codes(own), "COMPUTE": compute, "BLOCK": BLOCK}
        pointers = {"work_ptr": f"work{k}", "table_ptr": f"table{k}", "part_ptr": f"part{k}"}
        out.append(Launch(squares, (count, 1, 1), pointers, values))
    pointers = {"part_ptr": "part0", **{f"{n}_ptr": n for n in ("limit", "unscale", "norm", "factor")}}
    out.append(Launch(finish, (1, 1, 1), pointers, {"n_parts": sum(tile_counts), "BLOCK": 4096}, 16))
    return out


def optimizer(op: type[StepOp], params: Any, **hyper: Any) -> Optimizer:
    """The optimizer whose step is this op. torch is imported here."""
    from .optim import Optimizer

    return Optimizer(op, params, **hyper)
