"""Ops that reduce along axes, each kind of test over all of them: widths, axes, traps, what is allocated and launched."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import generated  # noqa: E402
from generated.runtime.layout import parse_dims  # noqa: E402
from generated.runtime.plan import Launch, Meta  # noqa: E402
from generated.runtime.rowwise import TILE, WHOLE  # noqa: E402
from generated.runtime.testing import DEVICE, EPS, TORCH  # noqa: E402
from generated.runtime.views import dense_strides  # noqa: E402
from tests.kernels import test_cases as cases  # noqa: E402

OPS, specs, op_class, case, attrs_of = cases.OPS, cases.specs, cases.op_class, cases.case, cases.attrs_of
reference, tensor, tensors, variant = cases.reference, cases.tensor, cases.tensors, cases.variant
present = cases.present
NAN, INF = math.nan, math.inf


def scanning(name: str) -> bool:
    """Whether a kernel carries what it has from step to step of a row."""
    return any("_carry = rows." in inspect.getsource(s.kernel.function.fn) for s in op_class(name).forward)


def pairing(name: str) -> bool:
    """Whether rows of a stage have axes that no operand has together: its work is that of all pairs."""
    named = [{a for d in parse_dims(t.dims) for a in d.axes} for t in tensors(name)]
    whole = [{*s.kept, *s.reduced} for s in (*op_class(name).forward, *op_class(name).backward) if not s.elementwise]
    return not all(any(axes <= own for own in named) for axes in whole)


ROWS = [n for n in OPS if not op_class(n).elementwise]
SIZED = [n for n in ROWS if "shape" in op_class(n).kinds.values()]
GRADIENTS = [n for n in ROWS if op_class(n).gradients]
WEIGHTED = [
    n for n in ROWS
    if any(f"d{g}_part_ptr" in s.kernel.abi.names and not getattr(s, "finish", None)
           for s in op_class(n).backward for g in op_class(n).gradients)
]  # fmt: skip
"""Ops that sum over the rows: gradients of weights that lie along a row."""
PLACED = [n for n in ROWS if "dim" in op_class(n).kinds]
SEVERAL = [n for n in PLACED if "dims" in op_class(n).kinds["dim"]]
SCANNING = [n for n in ROWS if scanning(n)]
PAIRING = [n for n in ROWS if pairing(n)]
PAIRED = (130, 2**18) if DEVICE == "cpu" else (20000, 2**32)
"""Elements of a row of these, and pairs in all: of a row as long as a tile there are too many for an interpreter. Smaller tiles
show that they are passed."""
CHOSEN = [n for n in GRADIENTS if op_class(n).needs_elements and n in SEVERAL]
"""Ops that give an element of the row."""

SIGNS = present("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss")
"""Losses whose target is 1 or -1."""
SEVERAL_NEEDED = [n for n in ROWS if {"training", "use_input_stats"} & set(op_class(n).kinds)]
"""Ops that refuse a row of one element."""
REFUSALS = ("between 0 and 1", "more than 1 value per channel")
"""What torch says of operands that it refuses, where an op has an answer."""

SUMMED_IN_ORDER = present("multi_margin_loss")
"""Ops of which torch's own backward adds a row's terms one after another: it is off by a rounding a term, the op is not."""


def inner(name: str, given: dict[str, Any]) -> float:
    """How large what cancels inside is, where it is larger than operands and results: two norms, two logarithms."""
    if name in ("triplet_margin_loss",):
        return max((v.double().norm(dim=-1).max().item() for v in given.values() if v.numel()), default=0.0)
    if name in (
        "cosine_embedding_loss",
        "cross_entropy",
    ):  # a sum of exponentials, the largest of them 1, has its logarithm
        return 1.0
    if name in ("cross_entropy_soft",):
        finite = given["x"][given["x"].isfinite()]
        return finite.abs().max().item() if finite.numel() else 0.0
    return 0.0


# ---------------------------------------------------------------------------------------------- operands, comparisons


def stage(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of the rows and of a row, as the first kernel of most axes has them."""
    rowwise = [s for s in (*op_class(name).forward, *op_class(name).backward) if not s.elementwise]
    if name in PAIRING:
        named = [{a for d in parse_dims(t.dims) for a in d.axes} for t in tensors(name)]
        rowwise = [s for s in rowwise if any({*s.kept, *s.reduced} <= axes for axes in named)]
    first = max(rowwise, key=lambda s: len(s.kept + s.reduced))
    return first.kept, first.reduced


def divisor(n: int) -> int:
    """The smallest prime factor below 10, else 1."""
    return next((d for d in (2, 3, 5, 7) if n % d == 0 and n > 0), 1)


def extents(name: str, shape: tuple[int, ...], whole: bool = False) -> dict[str, tuple[int, ...]]:
    """What the axes and packs of the operands have, so that there are rows of `shape`, the last of it along a row.

    Several named axes beside a pack have a factor each; all of it the first one, and the pack, if `whole`. Where all is one row
    its axes have the shape.
    """
    kept, reduced = stage(name)
    axes = {a for t in tensors(name) for d in parse_dims(t.dims) for a in d.axes}
    beside = {a: shape[-1:] for a in axes - {*kept, *reduced}} if name in PAIRING else {}  # as long as a row
    if not kept:
        return {**{a: (n,) for a, n in zip(reduced, shape)}, reduced[-1]: shape[len(reduced) - 1 :]}
    out = {a: (1,) for a in (*kept, *reduced)}
    rows, width = shape[:-1], shape[-1]
    if kept == ("...",) or kept[-1] == "...":
        out |= {a: (n,) for a, n in zip(kept[:-1], (*rows, 1))}
        out["..."] = rows[len(kept) - 1 :]
    else:
        count = math.prod(rows)
        part = 1 if whole or len(kept) == 1 else divisor(count)
        out |= {kept[0]: (count // part,), **({kept[-1]: (part,)} if len(kept) > 1 else {})}
    part = 1 if whole or len(reduced) == 1 else divisor(width)
    if len(kept) > 1 and kept[-1] != "..." and part < out[kept[-1]][0]:
        part = 1  # the groups are told from the channels by their smallest factor
    return {**out, **beside, reduced[0]: (part,), reduced[-1]: (width // part,)}


def shaped(t: Any, known: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """A tensor's shape."""
    out: list[int] = []
    for dim in parse_dims(t.dims):
        sizes = [known[a] if a in known else () for a in dim.axes]
        out += sizes[0] if dim.pack or len(sizes) == 1 else (math.prod(n for s in sizes for n in s),)
    return tuple(out)


def filled(name: str, shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> dict[str, Any]:
    """Random operands of rows of one shape. For a question of truth: rows of each answer."""
    shape = paired(shape) if name in PAIRING and shape else shape
    one, out, known = case(name), {}, extents(name, shape)
    for k, t in enumerate(tensors(name)):
        out[t.name] = one._values(t, shaped(t, known), dtype, seed + k, max(1, *known[t.indexes]) if t.indexes else 3)
    if name in SIGNS:
        out["target"] = torch.where(out["target"] < 0, -1, 1).to(out["target"].dtype)
    if len(op_class(name).outputs) > 1:
        # A sum of eighths is exact: a mean that is taken off would magnify its rounding.
        out = {n: ((v * 8).round() / 8).to(v.dtype) for n, v in out.items()}
    if not op_class(name).gradients and shape:
        (x,) = out.values()
        flat = x.reshape(-1, shape[-1])
        flat[0::4], flat[1::4], flat[2::4], flat[3::4] = 0, 2, 0, 2
        flat[2::4, -1:], flat[3::4, -1:] = 3, 0
    for t in tensors(name):
        if isinstance(t.unless, int) and out[t.name].dim():  # each row has a place
            out[t.name][..., :1].clamp_(min=0)
    return out


def paired(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As many rows, and elements of one, as there is time for their pairs."""
    width = min(shape[-1], PAIRED[0])
    most = PAIRED[1] // max(1, width * width)
    return (*(min(n, most) if k == 0 else n for k, n in enumerate(shape[:-1])), width)


def last(name: str) -> dict[str, Any]:
    """The attrs that reduce the last dim alone; of a loss each row's own, of a norm the one with statistics of its own."""
    own = {"dim": -1, "reduction": "none", "training": True, "use_input_stats": True}
    return {
        **attrs_of(name),
        **{n: v for n, v in own.items() if n in op_class(name).kinds and (n != "dim" or name in PLACED)},
    }


def sized(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The extents that the caller gives beside operands of this shape: of the last dim, or a number of groups."""
    kinds = op_class(name).kinds
    return {a: shape[-1:] if kinds[a] == "shape" else divisor(shape[1]) for a in op_class(name).sized.values()}


def call(name: str, given: dict[str, Any], attrs: dict[str, Any]) -> tuple[Any, ...]:
    """The op on operands by the spec's names."""
    return case(name).call(given, {**attrs, **sized(name, tuple(given[tensors(name)[0].name].shape))})


def cotangents(outputs: list[Any], seed: int = 5) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]


def doubled(value: Any) -> Any:
    """What torch is given: float64, indices of 64 bits, and dense memory, which some of its functions need."""
    if value is None:
        return None
    value = value.detach().cpu().contiguous()
    return value.double() if value.is_floating_point() else value.long() if value.dtype == torch.int32 else value


def leaves(given: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The operands, those named wanting a gradient."""
    return {n: v if v is None else v.detach().requires_grad_(n in names) for n, v in given.items()}


def expected(name: str, given: dict[str, Any], attrs: dict[str, Any]) -> list[Any]:
    own = {n: v if v is None or v.requires_grad else doubled(v) for n, v in given.items()}
    own |= {t.name: own[t.name].clone() for t in op_class(name).buffers}
    attrs = {**attrs, **sized(name, tuple(given[tensors(name)[0].name].shape))}
    try:
        found = reference(name, own, attrs)
    except TypeError:  # torch's function takes one dim: those that are reduced become one
        (key,) = own
        dims = sorted(d % own[key].dim() for d in attrs["dim"])
        flat = own[key].movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        found = reference(name, {key: flat}, {**attrs, "dim": -1, "keepdim": False})
        for d in dims if attrs["keepdim"] else ():
            found = found.unsqueeze(d)
    except (RuntimeError, ValueError) as error:  # the op itself in float64
        if not any(said in str(error) for said in REFUSALS):
            raise
        found = call(name, {n: v if v is None else v.to(DEVICE) for n, v in own.items()}, attrs)
    return [v.cpu() for v in found] if isinstance(found, tuple) else [found]


def exact(name: str, given: dict[str, Any], attrs: dict[str, Any], names: list[str], dy: list[Any]) -> dict[str, Any]:
    """torch's gradients in float64 of the same numbers; the op's own in float64 by a target of which torch has none."""
    theirs = leaves({n: doubled(v) for n, v in given.items()}, names)
    try:
        wanted = expected(name, theirs, attrs)
        return dict(zip(names, torch.autograd.grad(wanted, [theirs[n] for n in names], [v.cpu().double() for v in dy])))
    except RuntimeError as error:
        assert "is not implemented" in str(error) or "not differentiable" in str(error), error
    ours = leaves(
        {n: v.double() if v is not None and v.is_floating_point() else v for n, v in given.items()}, ["target"]
    )
    (own,) = torch.autograd.grad(call(name, ours, attrs), ours["target"], [v.double() for v in dy])
    others = [n for n in names if n != "target"]
    return {**(exact(name, given, attrs, others, dy) if others else {}), "target": own.cpu()}


def pair(
    name: str,
    given: dict[str, Any],
    attrs: dict[str, Any],
    seeds: Any = cotangents,
    needed: Collection[str] | None = None,
) -> Iterator[tuple[str, Any, Any]]:
    """Each output and each gradient that is `needed` beside torch's in float64 of the same numbers."""
    names = [n for n in case(name)._differentiable(given) if needed is None or n in needed]
    ours = leaves(given, names)
    outputs, wanted = list(call(name, ours, attrs)), expected(name, {n: doubled(v) for n, v in given.items()}, attrs)
    for k, (y, want) in enumerate(zip(outputs, wanted, strict=True)):
        yield f"output {k}", y.detach(), want.detach()
    if names:
        dy = seeds(outputs)
        found = torch.autograd.grad(outputs, [ours[n] for n in names], dy)
        right = exact(name, given, attrs, names, dy)
        for n, got in zip(names, found):
            assert got.dtype == given[n].dtype
            yield f"d{n}", got, right[n]


def agree(name: str, given: dict[str, Any], attrs: dict[str, Any], dtype: str = "f32", seeds: Any = cotangents) -> None:
    """Within roundings of the largest value; where a backward reads an output again, that was rounded before."""
    whole = {"f64": 64, "f32": 64, "f16": 2, "bf16": 2}[dtype]
    op, unit = op_class(name), 1.0
    rounded = set(op.residuals) & {t.name for t in op.outputs} and dtype in ("f16", "bf16")
    for key, got, want in pair(name, given, attrs, seeds):
        assert got.shape == want.shape, (key, got.shape, want.shape)
        got = got.cpu()
        if not got.is_floating_point():
            assert torch.equal(got, want), key
            continue
        assert got.dtype == TORCH[dtype]
        finite = want[want.isfinite()].abs()
        top = finite.max().item() if finite.numel() else 0.0
        if key == "output 0" and top > 0:
            unit = min(1.0, top)  # a softmax is of small numbers
        allowed = (16 if rounded and key[0] == "d" else whole) * EPS[dtype] * (top + unit)
        allowed += torch.finfo(TORCH[dtype]).smallest_normal  # what is less may be flushed
        allowed += whole * EPS[dtype] * inner(name, given)
        allowed += EPS["f64"] * got.shape[-1] if name in SUMMED_IN_ORDER and got.dim() else 0
        past = got.isinf() & (want.abs() > torch.finfo(got.dtype).max) & (got.sign() == want.sign())
        right = (got == want) | past | (got.isnan() & want.isnan()) | ((got.double() - want).abs() <= allowed)
        assert right.all(), (key, tuple(got.shape), attrs, got[~right][:4], want[~right][:4], allowed)


# ---------------------------------------------------------------------------------------------- widths

WIDTHS = {1: 3, 2: 2, 3: 3, 127: 3, 129: 2, 1000: 1, 4097: 1}
"""Widths, and how many of the row counts they are tried with: the interpreter takes its time for each program."""


@pytest.mark.parametrize("name", ROWS)
def test_widths_and_row_counts(name: str) -> None:
    """Rows of a few elements up to more than a chunk, one row, several, and more than a tile has."""
    for width, most in WIDTHS.items():
        for count in (1, 5, 257)[:most]:
            given = filled(name, (count, width))
            lone = width in (1, last(name).get("num_groups"))  # a row, or a group of it, is one element
            if lone:  # what cancels to 0 leaves a rounding over the element itself
                bounded = {d.name for d in specs()[name].domain}
                given |= {n: torch.where(v.abs() < 1, v.sign() + v, v) for n, v in given.items() if n not in bounded}
            if width == 1 and name in SEVERAL_NEEDED:
                with pytest.raises(ValueError, match=rf"{name} requires \(?size"):
                    call(name, given, last(name))
                continue
            # ... and one of a cotangent times the inverse deviation, which of nothing but epsilon is its root
            weighted = "eps" in op_class(name).kinds and bool(op_class(name).params)
            if not lone or name not in WEIGHTED and (DEVICE == "cpu" or not weighted):
                agree(name, given, last(name))
            if lone and (name in WEIGHTED or weighted):  # on a GPU the product is fused, and leaves that rounding
                agree(name, given, {**last(name), **({"eps": 1.0} if "eps" in op_class(name).kinds else {})})


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16"])
def test_dtypes(name: str, dtype: str) -> None:
    """Half types are computed in float32 and rounded once, float64 in itself."""
    for shape in ((5, 3), (9, 127), (1, 4097)):
        agree(name, filled(name, shape, dtype), last(name), dtype)


@pytest.mark.parametrize("name", ROWS)
def test_rows_longer_than_a_tile(name: str) -> None:
    """A row that is walked over in steps, forward and backward; with a weight its programs have several rows each."""
    for shape in ((5, TILE + 1), (3, 20000), (2, WHOLE + 1)) if name in WEIGHTED else ((1, TILE + 1), (1, WHOLE + 1)):
        agree(name, filled(name, shape), last(name))
    agree(name, filled(name, (2, TILE + 1), "f64"), last(name), "f64")


@pytest.mark.parametrize("name", ROWS)
def test_memory_that_runs_along_the_rows(name: str) -> None:
    """Tiles of many rows side by side, whole ones and the last; the columns are walked over in steps."""
    for count, width in ((70, 40), (64, 33), (3, 300), (130, 3)):
        given = {n: v.mT.contiguous().mT if v.dim() > 1 else v for n, v in filled(name, (count, width)).items()}
        agree(
            name,
            given,
            last(name),
            seeds=lambda out: [v.mT.contiguous().mT if v.dim() > 1 else v for v in cotangents(out)],
        )


FAR = [((3, 65537), "f32"), ((5, 131073), "f32"), ((2, 262144), "f32"), ((100003, 7), "f32"), ((100003, 40), "f32"),
       ((2, 131073), "bf16"), ((100003, 8), "bf16")]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("shape", "dtype"), FAR, ids=str)
def test_wide_and_tall(name: str, shape: tuple[int, int], dtype: str) -> None:
    """Rows of many steps with a ragged end and without, and more rows than a device has programs at a time."""
    agree(name, filled(name, shape, dtype), last(name), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", [(70, 65537), (100003, 9)], ids=str)
def test_wide_and_tall_where_memory_runs_along_the_rows(name: str, shape: tuple[int, int]) -> None:
    given = {n: v.mT.contiguous().mT if v.dim() > 1 else v for n, v in filled(name, shape).items()}
    agree(name, given, last(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_everything_in_one_row(name: str) -> None:
    """A row shared by several programs where one pass is all; else by one, however long it takes."""
    attrs = {**last(name), **({"dim": (0, 1)} if name in SEVERAL else {})}
    agree(name, filled(name, (33, 65537) if name in SEVERAL else (1, 1000003)), attrs)


# ---------------------------------------------------------------------------------------------- axes and layouts

SHAPES = [(7,), (5, 6), (3, 4, 5), (2, 3, 4, 3)]


def layouts(x: Any) -> Iterator[Any]:
    """The same numbers in other places."""
    yield x
    yield x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    yield torch.stack([x, x], -1)[..., 1]
    wide = torch.cat([x, x], 0)
    yield wide[1 : 1 + x.shape[0]]
    yield x.movedim(0, -1).contiguous().movedim(-1, 0)


def stretched(outputs: list[Any]) -> list[Any]:
    """Cotangents without memory of their own, as a sum's backward gives, and with one value a row."""
    return [
        tensor(1.5).to(y.dtype).expand(y.shape) if y.dim() < 2 else cotangents([y[:1]])[0].expand(y.shape)
        for y in outputs
    ]


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_axis(name: str, shape: tuple[int, ...]) -> None:
    """Each dim from the front and from the back, in each layout, with dense cotangents and repeated ones."""
    views = {n: list(layouts(v)) for n, v in filled(name, shape).items()}
    for k, dim in enumerate(range(-len(shape), len(shape))):
        agree(name, {n: v[k % 5] for n, v in views.items()}, {**attrs_of(name), "dim": dim})
        if dim >= 0 and name not in SEVERAL:  # those have them with sets of dims
            mixed = {n: v[(k + 2 + i) % 5] for i, (n, v) in enumerate(views.items())}
            agree(name, mixed, {**attrs_of(name), "dim": dim}, seeds=stretched)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_several_axes_and_all(name: str, shape: tuple[int, ...]) -> None:
    """Every set of dims in some order and of either sign, and None; what is reduced stays as a 1 or goes."""
    given = filled(name, shape)
    (key,) = given
    views = list(layouts(given[key]))
    dims: list[Any] = [c for n in range(1, len(shape) + 1) for c in itertools.combinations(range(len(shape)), n)]
    dims = [tuple(d - len(shape) if k % 2 else d for d in c)[:: -1 if k % 3 else 1] for k, c in enumerate(dims)]
    dims += [None] if op_class(name).kinds["dim"].endswith("?") else []
    for k, dim in enumerate(dims):
        attrs = {**attrs_of(name), "dim": dim, **({"keepdim": k % 4 < 2} if "keepdim" in op_class(name).kinds else {})}
        agree(name, {key: views[k % 5]}, attrs, seeds=(cotangents, stretched)[k % 2])


@pytest.mark.parametrize("name", SEVERAL)
def test_a_tensor_without_dims(name: str) -> None:
    """One element is a row of one."""
    given = {tensors(name)[0].name: tensor(2.5)}
    for dim in (0, -1, *([None] if op_class(name).kinds["dim"].endswith("?") else [])):
        agree(name, given, {**attrs_of(name), "dim": dim})


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_operands_in_layouts_of_their_own(name: str, shape: tuple[int, ...]) -> None:
    """Each operand in another layout than the next, the weight among them."""
    given = filled(name, shape)
    views = {n: list(layouts(v)) for n, v in given.items()}
    for turn in range(5):
        agree(name, {n: v[(turn + 2 * k) % 5] for k, (n, v) in enumerate(views.items())}, last(name))
        agree(name, {n: v[turn] for n, v in views.items()}, last(name), seeds=stretched)


@pytest.mark.parametrize("name", ROWS)
def test_more_dims_than_a_kernel_takes(name: str) -> None:
    """Every second element along each of six dims: none merge, operands are copied, and what is kept goes with them."""
    views = {}
    for n, v in filled(name, (2, 3, 2, 2, 3, 4)).items():
        wide = v
        for d in range(v.dim()):
            wide = wide.repeat_interleave(2, d)
        views[n] = wide[tuple(slice(None, None, 2) for _ in v.shape)]
    agree(name, views, last(name))
    if name in SEVERAL:
        agree(name, views, {**attrs_of(name), "dim": (1, -2)})
        agree(
            name,
            views,
            {**attrs_of(name), "dim": (0, 2, 4), **({"keepdim": True} if "keepdim" in op_class(name).kinds else {})},
        )


def test_dims_that_alternate_too_often() -> None:
    """Kept and reduced dims merge among themselves alone: five of each, taken in turn, are an error that says so."""
    with pytest.raises(ValueError, match="sum: 5 dims that do not merge; a kernel takes 4"):
        generated.sum(torch.ones((2,) * 10, device=DEVICE), (0, 2, 4, 6, 8))


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_weight_without_memory_of_its_own(name: str) -> None:
    """One number for all columns, expanded."""
    given = filled(name, (5, 7))
    agree(name, {**given, **{p.name: tensor(2.0).expand(7) for p in op_class(name).params}}, last(name))


def settings(name: str) -> Iterator[dict[str, float]]:
    """Each number at the ends of its domain."""
    bounds = {d.name: (d.low, d.high) for d in specs()[name].domain}
    for attr in (n for n, kind in op_class(name).kinds.items() if kind == "float"):
        low, high = bounds.get(attr, (-1.0, 2.0))
        yield from ({attr: v} for v in (low, (low + high) / 2, high))


@pytest.mark.parametrize("name", [n for n in ROWS if list(settings(n))])
def test_numbers_at_the_ends_of_their_domains(name: str) -> None:
    """A correction, an epsilon, an offset other than the default, with rows of few elements and more."""
    # a row of one is its own mean, and what is left is a rounding times the inverse of epsilon's root
    for own, shape in itertools.product(settings(name), ((3, 3), (3, 2), (5, 40))):
        agree(name, filled(name, shape), {**last(name), **own})


@pytest.mark.parametrize("name", [n for n in ROWS if sum(t.dtype == "float" for t in op_class(n).inputs) > 1])
@pytest.mark.parametrize("wide", ["f32", "f64"])
def test_inputs_of_two_dtypes(name: str, wide: str) -> None:
    """Outputs have the promoted dtype, and each gradient that of its own input, although the values are the same."""
    first = tensors(name)[0].name
    given = {**filled(name, (5, 8), wide), first: filled(name, (5, 8), "bf16")[first]}
    for key, got, want in pair(name, given, last(name)):
        half = key == f"d{first}"
        assert got.dtype == (torch.bfloat16 if half else TORCH[wide])
        assert torch.allclose(got.cpu().double(), want, rtol=2e-2 if half else 1e-5, atol=1e-5), key


# ---------------------------------------------------------------------------------------------- numerics


def test_a_variance_far_from_zero() -> None:
    """The square of the mean less the mean of the squares would have no digit right."""
    for width in (4, 130, 4097):
        x = 80000.0 + torch.arange(3 * width, device=DEVICE).reshape(3, width) % 4
        for name in ("var", "std"):
            agree(name, {"x": x}, last(name))
    assert generated.var(tensor([80000.0, 80001, 80002, 80003]), correction=0).item() == 1.25


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_norm_far_from_zero(name: str) -> None:
    """Rows of large numbers that hardly differ: y is about the weight."""
    given = filled(name, (3, 4))
    given["x"] = tensor([80000.0, 80001, 80002, 80003]).expand(3, 4)
    agree(name, given, last(name))


@pytest.mark.parametrize("width", [3, 4, 700])
def test_a_row_of_equal_elements(width: int) -> None:
    """No variance and no NaN in its gradient; a softmax of equal shares."""
    x = torch.full((2, width), 3.0, device=DEVICE, requires_grad=True)
    for name in ("var", "std"):
        y = getattr(generated, name)(x, -1)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert not y.any() and not dx.any(), name
    for name in ("softmax", "softmin"):
        y = getattr(generated, name)(x, -1)
        assert torch.equal(y, torch.full_like(y, 1 / width)), name
    near = torch.full((2, width), 0.1, device=DEVICE)
    assert (generated.var(near, -1) < 1e-14).all()


def test_three_columns() -> None:
    """A tile of four has one column that does not exist, and that is neither 0 nor infinite for anyone."""
    x = tensor([[-3.0, -1, -2], [5, 7, 6]])
    right = {
        "amax": [-1, 7], "amin": [-3, 5], "sum": [-6, 18], "mean": [-2, 6], "var": [1, 1], "std": [1, 1], "norm_l1": [6, 18],
        "sum_square": [14, 110], "any": [True, True], "all": [True, True], "count_nonzero": [3, 3],
    }  # fmt: skip
    for name, want in right.items():
        assert getattr(generated, name)(x, -1).tolist() == want, name


@pytest.mark.parametrize("name", present("softmax", "log_softmax", "softmin"))
def test_logits_far_from_zero(name: str) -> None:
    """The largest is taken off before anything else: beside 30000 a logarithm would have three digits."""
    for sign in (1, -1):
        given = {"x": filled(name, (3, 50))["x"] + sign * 30000}
        agree(name, given, last(name))
        y = call(name, given, last(name))[0]
        assert torch.allclose(y.double(), expected(name, given, last(name))[0].to(DEVICE), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("width", [3, 200, WHOLE + 3])
def test_rows_of_infinities(width: int) -> None:
    """Of minus infinity alone, the logarithm of the sum is that, and a softmax NaN as in torch; its neighbour is as ever."""
    x = torch.randn(4, width, device=DEVICE)
    x[1], x[2, 1], x[0, : width // 2] = -INF, INF, -INF
    for name in ("softmax", "log_softmax", "logsumexp"):
        y, want = getattr(generated, name)(x, -1), getattr(torch, name)(x, -1)
        assert torch.allclose(y, want, rtol=1e-5, atol=1e-5, equal_nan=True), (name, y, want)
    assert torch.allclose(generated.softmin(-x, -1), torch.softmax(x, -1), atol=1e-5, equal_nan=True)
    assert generated.logsumexp(x, -1)[1:3].tolist() == [-INF, INF]


@pytest.mark.parametrize("name", GRADIENTS)
def test_masked_columns_have_no_part(name: str) -> None:
    """Elements of minus infinity beside others, as a mask of attention has: values and gradients where torch's are finite."""
    given = filled(name, (4, 9))
    key = tensors(name)[-1 if name in SCANNING else 0].name  # in a scan's order 0 would meet an infinite factor
    given[key] = given[key].clone()
    given[key].view(-1)[5::9] = (
        INF if specs()[name].domain and name not in WEIGHTED and name not in ("var", "std") else -INF
    )
    for key, got, want in pair(name, given, last(name)):
        known, got = ~want.isnan(), got.cpu()
        assert torch.allclose(got.double()[known], want[known], rtol=1e-4, atol=1e-5), (key, got, want)


@pytest.mark.parametrize("name", [n for n in GRADIENTS if shaped(tensors(n)[0], extents(n, (5, 6))) == (5, 6)])
@pytest.mark.parametrize(("shape", "turned"), [((5, 6), False), ((70, 3), True), ((2, 2100), False)], ids=str)
def test_a_nan_stays_in_its_row(name: str, shape: tuple[int, ...], turned: bool) -> None:
    """Whatever rows lie in one tile: the row of the NaN is NaN, and no bit of another changes, nor of its gradient."""
    clean = filled(name, shape)
    if turned:
        clean = {n: v.mT.contiguous().mT if v.dim() > 1 else v for n, v in clean.items()}
    key, classes = tensors(name)[0].name, any(t.indexes for t in tensors(name))
    stained = {**clean, key: clean[key].clone()}
    stained[key][1, slice(None) if classes else 2] = NAN
    plain, found = ({k: g for k, g, _ in pair(name, v, last(name))} for v in (clean, stained))
    others = torch.arange(shape[0], device=DEVICE) != 1
    for key, got in found.items():
        if got.shape[0] == shape[0] and key[1:] not in {t.name for t in op_class(name).params}:
            assert torch.equal(got[others], plain[key][others]), key
    y = found["output 0"][1]
    if name in SCANNING:  # it reaches what follows it
        assert torch.equal(y[:2], plain["output 0"][1, :2]) and y[2:].isnan().all()
    else:
        assert y.isnan() if y.dim() == 0 else y[2].isnan()
    if name in ("softmax", "log_softmax", "softmin"):
        assert y.isnan().all()


@pytest.mark.parametrize("name", WEIGHTED)
def test_squares_past_the_end_of_float16(name: str) -> None:
    """300 squared is no float16, and the norm of it is 1."""
    given = {n: torch.full_like(v, 300.0 if v.dim() > 1 else 1.0) for n, v in filled(name, (2, 6), "f16").items()}
    y = call(name, given, last(name))[-1]
    assert torch.equal(y, torch.ones_like(y))
    agree(name, given, last(name), "f16")


def test_sums_are_not_of_half_types() -> None:
    """Past 256, a bf16 more one is itself; counts are whole numbers."""
    ones = torch.ones(2, 4096, device=DEVICE, dtype=torch.bfloat16)
    assert generated.sum(ones, 1).tolist() == [4096, 4096] and generated.norm_l1(ones).item() == 8192
    for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.int32, torch.int64):
        counted = generated.count_nonzero(ones[:, :256].to(dtype), 1)
        assert counted.dtype == torch.int64 and counted.tolist() == [256, 256]


@pytest.mark.parametrize("name", CHOSEN)
def test_ties_share_the_gradient(name: str) -> None:
    """Each of k equal elements gets a k-th, over a tile, a long row, or everything; zeros of either sign are equal."""
    sign = 1.0 if getattr(generated, name)(tensor([1.0, 2.0])).item() == 2 else -1.0
    for width in (3, WHOLE + 7):
        x = torch.zeros(2, width, device=DEVICE)
        x[0, :2], x[1, 0], x[1, 1:] = sign, 0.0, -0.0
        leaf = x.requires_grad_()
        (dx,) = torch.autograd.grad(getattr(generated, name)(leaf, 1), leaf, tensor([6.0, float(width)]))
        assert dx[0].tolist() == [3.0, 3.0] + [0.0] * (width - 2)
        assert torch.equal(dx[1], torch.ones_like(dx[1]))
    for value in (sign * INF, -sign * INF):
        leaf = torch.full((4,), value, device=DEVICE, requires_grad=True)
        (dx,) = torch.autograd.grad(getattr(generated, name)(leaf), leaf)
        assert dx.tolist() == [0.25] * 4


# ---------------------------------------------------------------------------------------------- errors, and nothing


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("wrong", [(1,), (5,), (7,), (4, 6), ()], ids=str)
def test_a_weight_that_does_not_fit(name: str, wrong: tuple[int, ...]) -> None:
    """An error that names op and argument: a weight is not broadcast, nor is its start taken."""
    given = filled(name, (4, 6))
    for param in op_class(name).params:
        with pytest.raises(ValueError, match=f"{name}: .*`{param.public}`"):
            call(name, {**given, param.name: torch.ones(wrong, device=DEVICE)}, last(name))


@pytest.mark.parametrize("name", [n for n in ROWS if len(op_class(n).inputs) > 1 and not tensors(n)[0].broadcast])
def test_inputs_that_do_not_fit(name: str) -> None:
    """Neither a row for a matrix nor a column: operands of rows are not broadcast."""
    given = filled(name, (4, 6))
    for wrong in ((6,), (1, 6), (4, 1), (3, 6), (2, 4, 6)):
        with pytest.raises(ValueError, match=name):
            second = op_class(name).inputs[1].name
            call(name, {**given, second: torch.ones(wrong, device=DEVICE).to(given[second].dtype)}, last(name))


@pytest.mark.parametrize("name", PLACED)
def test_dims_that_are_not_there(name: str) -> None:
    """Out of range is an IndexError as in torch, twice the same an error, both by name; other kinds are refused."""
    x = {t.name: torch.ones(2, 3, device=DEVICE) for t in tensors(name)}
    dims = [2, -3, 7]
    for dim in [*dims, *((d,) for d in dims), (0, 2)] if name in SEVERAL else dims:
        with pytest.raises(IndexError, match=f"{name}: `dim` is {dim[-1] if isinstance(dim, tuple) else dim}"):
            call(name, x, {**attrs_of(name), "dim": dim})
    for dim in ((0, 0), (1, -1), (0, 1, -2)) if name in SEVERAL else ():
        with pytest.raises(ValueError, match=f"{name}: `dim` names . twice"):
            call(name, x, {**attrs_of(name), "dim": dim})
    for dim in (0.5, "0", True, (0.5,), (None,)):
        with pytest.raises(TypeError, match=f"{name}: `dim` is"):
            call(name, x, {**attrs_of(name), "dim": dim})


@pytest.mark.parametrize("name", SEVERAL)
def test_reductions_of_nothing(name: str) -> None:
    """What torch gives: 0, NaN, an infinity, or an IndexError where there is no such element; rows that do not exist."""
    key = tensors(name)[0].name
    for shape, dim in (((3, 0), 1), ((0,), 0), ((2, 0, 3), (0, 1)), ((0, 4), 1), ((0, 0), 1), ((3, 0, 2), 0)):
        given, attrs = {key: torch.ones(shape, device=DEVICE)}, {**attrs_of(name), "dim": dim}
        try:
            expected(name, given, attrs)
        except IndexError:
            with pytest.raises(IndexError, match=name):
                call(name, given, attrs)
            continue
        agree(name, given, attrs)


@pytest.mark.parametrize("name", [n for n in ROWS if n not in SEVERAL])
@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0), (0,)], ids=str)
def test_rows_of_nothing(name: str, shape: tuple[int, ...]) -> None:
    """What has the shape of its input is empty where that is; a weight's gradient over no rows is 0."""
    if name in SEVERAL_NEEDED or name == "group_norm":  # torch refuses it, or says of a weight's gradient NaN
        try:
            (y,) = call(name, filled(name, shape), last(name))
        except ValueError as error:
            assert " requires size" in str(error) and shape[-1] == 0 or shape[0] == 0
        else:
            assert 0 in y.shape
    elif "reduction" in op_class(name).kinds and op_class(name).needs_elements and shape[-1] == 0:
        with pytest.raises(IndexError, match=f"{name}: nothing to reduce"):  # as torch refuses it
            call(name, filled(name, shape), last(name))
    elif "C" in stage(name)[1] and shape[-1] == 0:  # of no classes none is the target
        assert all(
            y.isnan().all()
            for y in call(name, filled(name, shape), last(name))
            if name != "multilabel_soft_margin_loss"
        )
    else:
        agree(name, filled(name, shape), last(name))


# ---------------------------------------------------------------------------------------------- sums over the rows


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize(
    ("shape", "turned"),
    [((37, 30), False), ((131, 5), False), ((6, 1030), False), ((5, TILE + 9), False), ((131, 40), True)],
    ids=str,
)
def test_sums_over_the_rows_are_the_same_bits(
    name: str, shape: tuple[int, ...], turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten runs, with memory full of NaN before each second one, at row counts that fill neither tiles nor programs."""
    given = filled(name, shape)
    if turned:
        given = {n: v.mT.contiguous().mT if v.dim() > 1 else v for n, v in given.items()}
    leaves = {n: v.requires_grad_() for n, v in given.items()}
    outputs = call(name, leaves, last(name))
    seeds = cotangents(list(outputs))
    runs = []
    for run in range(10 if shape[1] < 1000 else 2):
        monkeypatch.setenv("PULLBACK_DEBUG", str(run % 2))
        runs.append(torch.autograd.grad(outputs, list(leaves.values()), seeds, retain_graph=True))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
    agree(name, given, last(name))


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_program_has_its_share_of_the_rows(name: str) -> None:
    """However many processors there are, the shares cover every row, and none is empty."""
    for count, width, processors in itertools.product(
        (1, 2, 5, 263, 264, 265, 4099), (3, 1000, TILE + 1, WHOLE + 1), (1, 7, 132)
    ):
        for launch in launches(name, (count, width), processors=processors):
            if "span" in launch.values and any(p.endswith("_part_ptr") for p in launch.pointers):
                span, programs = launch.values["span"], launch.grid[0]
                assert span % launch.values["BLOCK_K"] == 0 and (programs - 1) * span < count <= programs * span
                assert programs <= 3 * processors


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("shape", [(1000, 3), (70, 64), (3, TILE + 1)], ids=str)
def test_rows_where_nothing_is_summed_over_them(name: str, shape: tuple[int, int]) -> None:
    """With weights that are constants a program has the rows of one tile, and together they have all."""
    given = filled(name, shape)
    leaves = {n: v.requires_grad_(n not in {p.name for p in op_class(name).params}) for n, v in given.items()}
    theirs = {n: v.detach().cpu().double().requires_grad_(v.requires_grad) for n, v in leaves.items()}
    outputs, wanted = call(name, leaves, last(name)), expected(name, theirs, last(name))
    seeds = cotangents(list(outputs))
    ours = torch.autograd.grad(outputs, [v for v in leaves.values() if v.requires_grad], seeds)
    exact = torch.autograd.grad(
        wanted, [v for v in theirs.values() if v.requires_grad], [v.cpu().double() for v in seeds]
    )
    assert all(torch.allclose(a.cpu().double(), b, rtol=1e-4, atol=1e-4) for a, b in zip(ours, exact, strict=True))


# ---------------------------------------------------------------------------------------------- what is wanted


MANY = [n for n in GRADIENTS if len(op_class(n).outputs) > 1]


@pytest.mark.parametrize("name", MANY)
def test_outputs_that_nobody_uses(name: str) -> None:
    """Each set of outputs beside each set of gradients: what is not used has a cotangent of 0."""
    given, count = filled(name, (5, 7)), len(op_class(name).outputs)
    every = op_class(name).gradients
    theirs = {n: v.detach().cpu().double().requires_grad_() for n, v in given.items()}
    wanted = expected(name, theirs, last(name))
    for used in (c for n in range(1, count + 1) for c in itertools.combinations(range(count), n)):
        seeds = cotangents([wanted[k].detach().float() for k in used])
        exact = torch.autograd.grad(
            [wanted[k] for k in used], list(theirs.values()), [s.double() for s in seeds], retain_graph=True,
            allow_unused=True,
        )  # fmt: skip
        exact = dict(zip(theirs, exact))
        for chosen in (c for n in range(1, len(every) + 1) for c in itertools.combinations(every, n)):
            ours = {n: v.detach().requires_grad_(n in chosen) for n, v in given.items()}
            outputs = call(name, ours, last(name))
            torch.autograd.backward([outputs[k] for k in used], [s.to(DEVICE) for s in seeds])
            for n in every:
                if n not in chosen:
                    assert ours[n].grad is None
                    continue
                want = exact[n] if exact[n] is not None else torch.zeros_like(theirs[n])
                assert torch.allclose(ours[n].grad.cpu().double(), want, rtol=1e-4, atol=1e-4), (used, chosen, n)


@pytest.mark.parametrize("name", WEIGHTED)
def test_without_a_weight(name: str) -> None:
    """A param that is absent is the spec's default, and has neither a gradient nor a sum over the rows."""
    given = filled(name, (5, 12))
    usual = {p.name: p.default.value for p in specs()[name].params if p.default is not None}
    plain = {**given, **{n: torch.full_like(given[n], float(value)) for n, value in usual.items()}}
    names = [t.name for t in op_class(name).inputs]
    results = []
    for params in (plain, {**given, **{p.name: None for p in op_class(name).params if p.optional}}):
        leaves = {n: v if n not in names else v.detach().requires_grad_() for n, v in params.items()}
        outputs = call(name, leaves, last(name))
        results.append([*outputs, *torch.autograd.grad(outputs, [leaves[n] for n in names], cotangents(list(outputs)))])
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(*results, strict=True))


class Allocations(TorchDispatchMode):
    """Shapes of what torch allocates, and the names of all that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func).split(".")[1])
        if str(func).split(".")[1] == "empty_strided":
            self.shapes.append(tuple(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that would run: in the interpreter a launch copies its tensors."""
    from generated.runtime.prepared import Prepared

    names: list[str] = []

    def record(self: Prepared, *_: Any) -> None:
        names.extend(launch.name for launch in self.launches)

    monkeypatch.setattr(Prepared, "_launch", record)
    return names


@pytest.mark.parametrize("name", [n for n in GRADIENTS if n not in PAIRING])  # what pairs come to is handed on
@pytest.mark.parametrize("shape", [(9, 12), (3, TILE + 1)], ids=str)
def test_statistics_are_kept_for_a_gradient_alone(name: str, shape: tuple[int, ...], unlaunched: list[str]) -> None:
    """Nothing but outputs, and what a later stage reads, without a gradient; with one, a number a row for each statistic; then the gradients, and the
    parts of what is summed over the rows.
    """
    given = filled(name, shape)
    op = instance(name, given)
    for chosen in (c for n in range(len(op.gradients) + 1) for c in itertools.combinations(op.gradients, n)):
        needing = leaves(given, chosen)
        with Allocations() as made:
            outputs = call(name, needing, last(name))
        plan = op.plan_forward({n: meta(v) for n, v in given.items()})
        handed = {n for n in plan.saved if sum(n in x.pointers.values() for x in plan.launches) > 1}  # to a later stage
        kept = [m.shape for n, m in plan.saved.items() if chosen or n in handed]
        assert made.shapes == [m.shape for m in plan.outputs.values()] + kept + [m.shape for m in plan.scratch.values()]
        assert all(math.prod(s) <= math.prod(shape[:1]) for s in kept) and not plan.scratch
        assert made.names <= {"empty_strided", "detach", "view", "alias"}
        if not chosen:
            continue
        seeds = cotangents(list(outputs))
        unlaunched.clear()
        with Allocations() as made:
            torch.autograd.grad(outputs, [needing[n] for n in chosen], seeds)
        written = [n for n in chosen if op.equals.get(n) not in chosen]
        over = [n for n in written if any(f"d{n}_part_ptr" in s.kernel.abi.names for s in op.backward)]
        assert made.shapes[: len(written)] == [tuple(given[n].shape) for n in written]
        assert len(made.shapes) == len(written) + len(over)
        assert all(len(s) == 2 and s[1] == shape[1] and s[0] <= shape[0] for s in made.shapes[len(written) :])
        own = [n for n in unlaunched if n != "sum_partials"]
        assert (
            len(own) <= sum(1 + (not s.elementwise and s.by_columns) for s in op.backward)  # dx and sums by columns
            and own[0].startswith(f"{name}_backward")
            and len(unlaunched) == len(own) + len(over)
        )
        assert made.names <= {"empty_strided", "detach", "view", "alias"}


def meta(value: Any) -> Any:
    """What a plan knows of a tensor."""
    words = {v: k for k, v in TORCH.items()}
    return Meta(words[value.dtype], tuple(value.shape), value.stride())


@pytest.mark.parametrize("name", SEVERAL)
def test_a_gradient_of_a_sum_reads_no_more_than_it_needs(name: str) -> None:
    """Outputs of one value a row are all that is kept beside the operands, whatever is reduced."""
    op = op_class(name)(**last(name))
    plan = op.plan_forward(metas(name, (40, 30)))
    assert all(math.prod(m.shape) == 40 for m in (*plan.outputs.values(), *plan.saved.values()))


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_a_launcher_must_keep_is_said(name: str) -> None:
    """Whoever launches the kernels without torch is told the shapes of the statistics too."""
    given = metas(name, (4, 8))
    op = instance(name, given)
    shapes, plan = op.residual_shapes(given), op.plan_forward(given)
    everything = {**given, **plan.outputs, **plan.saved}
    kept = [
        n for n in op.residuals if n in everything and n not in plan.updated
    ]  # what an update replaced is not read again
    assert shapes == {n: everything[n].shape for n in kept}
    assert all(shapes[n] == m.shape for n, m in plan.saved.items() if n in op.residuals)


# ---------------------------------------------------------------------------------------------- launches


def metas(name: str, shape: tuple[int, ...], turned: bool = False) -> dict[str, Any]:
    """Operands without memory; `turned` has that of the first dim innermost."""
    out: dict[str, Any] = {}
    known = extents(name, shape, True)
    for t in tensors(name):
        own = shaped(t, known)
        steps = tuple(math.prod(own[:k]) for k in range(len(own))) if turned else dense_strides(own)
        out[t.name] = Meta("f32" if "f32" in t.dtypes else t.dtypes[0], own, steps)
    return out


def instance(name: str, given: dict[str, Any]) -> Any:
    """The op along the last dim of these operands."""
    return op_class(name)(**{**last(name), **sized(name, given[tensors(name)[0].name].shape)})


def launches(name: str, shape: tuple[int, ...], turned: bool = False, processors: int = 132) -> list[Launch]:
    """Forward and backward along the last dim."""
    given = metas(name, shape, turned)
    op = instance(name, given)
    forward = op.plan_forward(given)
    out = list(forward.launches)
    if op.has_backward:
        dys = {f"d{n}": m for n, m in forward.outputs.items()}
        known = {**given, **forward.outputs, **forward.saved, **dys}
        out += op.plan_backward(known, op.gradients, processors).launches
    return out


@pytest.mark.parametrize("name", ROWS)
def test_row_counts_share_their_kernels(name: str) -> None:
    """Over 25 neighbouring row counts at one width: the variant of multiples of 16, and one more; also where rows become
    enough to be no longer shared.
    """
    sides = {(s.kept, s.reduced) for s in (*op_class(name).forward, *op_class(name).backward) if not s.elementwise}
    most = (
        2 if len(sides) == 1 and stage(name)[0] else 4
    )  # where rows are along a row of another kernel two numbers vary
    for width, turned in itertools.product((3, 64, 1000, TILE + 1, WHOLE + 1), (False, True)):
        found: dict[Any, set[Any]] = {}
        for count in range(1000, 1025):
            parts: dict[str, int] = {}  # a kernel may have several parts in one call
            for launch in launches(name, (count, width), turned):
                kernel = launch.kernel.function.fn.__name__
                parts[kernel] = parts.get(kernel, 0) + 1
                found.setdefault((kernel, parts[kernel], *launch.pointers), set()).add(variant(launch))
        assert all(len(v) <= most for v in found.values()), (width, turned, {k: len(v) for k, v in found.items()})


HUGE = [
    (2**31 // 3 + 1, 3),
    (2**31 + 5, 1),
    (2**33, 3),
    (2**31 - 1, 2),
    (2**20, 2**13),
    (3, 2**31 // 3 + 1),
    (1, 2**33),
]


@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n in ROWS for s in HUGE if n not in PAIRING or s[1] < WHOLE], ids=str
)
@pytest.mark.parametrize("turned", [False, True])
def test_rows_past_two_to_the_31(name: str, shape: tuple[int, int], turned: bool) -> None:
    """The programs cover every row, their number is one that a device takes, and offsets have 64 bits."""
    shape = (shape[0], 2) if name in SEVERAL_NEEDED and shape[1] == 1 else shape
    counts = [math.prod(shape), shape[0], *([math.prod(shape) * shape[1]] if name in PAIRING else [])]
    for launch in launches(name, shape, turned):
        values, (x, y, z) = launch.values, launch.grid
        assert 0 < x < 2**31 and 0 < y < 65536 and z == 1
        count = values.get("n_kept", 1) * values.get("n_reduced", 1)
        walked = values.get("n_kept", 1) * values.get("n_parts", values.get("n_reduced", 1))
        assert values["WIDE"] or walked < 2**31
        if "LOOP" in values and "n_parts" not in values:
            assert count in counts
            summed = any(p[0] == "d" and p.endswith("_part_ptr") for p in launch.pointers)
            assert y == 1 or y * (values["BLOCK_R"] if summed else values["span"]) >= values["n_reduced"]
            assert x * (values["span"] if summed else values["BLOCK_K"]) >= values["n_kept"]
            assert values["LOOP"] or (y if summed else 1) * values["BLOCK_R"] >= values["n_reduced"]


@pytest.mark.parametrize("name", ROWS)
def test_what_fits_in_31_bits_stays_narrow(name: str) -> None:
    """Below the limit no offset pays for 64 bits, and the last tile's own indices still fit."""
    pairs = ((2**31 // 9 - 16384, 3), (2**6, 2**12), (3, 2**14))
    for shape in pairs if name in PAIRING else ((2**31 // 3 - 16384, 3), (2**18, 2**12), (3, 2**31 // 3 - 16384)):
        for launch in launches(name, shape):
            if "LOOP" in launch.values:
                assert not launch.values["WIDE"], shape
                last_row = launch.grid[0] * launch.values["BLOCK_K"]
                assert last_row < 2**31 and launch.values["n_reduced"] + launch.values["BLOCK_R"] < 2**31


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize(
    ("shape", "count"), [((6,), 1), ((5, 6), 1), ((5, 6), 2), ((4, 5, 6), 2), ((4, 5, 6), 3)], ids=str
)
def test_extents_that_the_caller_gives(name: str, shape: tuple[int, ...], count: int) -> None:
    """A norm over the last dims whose extents are given, as torch has it, and errors where they do not fit."""
    own, (attr,) = shape[len(shape) - count :], op_class(name).sized.values()
    given = {
        t.name: tensor(torch.randn(shape if "..." in t.dims.split(", ") else own).tolist(), "f64")
        for t in tensors(name)
    }
    leaves, exact = ({n: v.clone().requires_grad_() for n, v in given.items()} for _ in range(2))
    (y,), (want,) = case(name).call(leaves, {**attrs_of(name), attr: own}), expected(name, exact, attrs_of(name))
    dy = torch.randn(shape, dtype=torch.float64)
    found = [y, *torch.autograd.grad(y, [*leaves.values()], dy.to(DEVICE))]
    meant = [want, *torch.autograd.grad(want, [*exact.values()], dy.to(want.device))]
    assert all(torch.allclose(a, b.to(DEVICE), atol=1e-12) for a, b in zip(found, meant, strict=True))
    with pytest.raises(ValueError, match=f"{name}: `{attr}` is"):
        case(name).call(given, {**attrs_of(name), attr: tuple(n + 1 for n in own)})
