"""Random small specs of one row op each: what is accepted computes what its formula says, forward and backward.

Each formula is drawn twice over in one go, as the text of a spec and as a function of torch, which has every value in the dims
(B, C, N), with an extent of 1 where the value lacks an axis. A spec may be refused with a diagnostic, though most are to be
accepted; what is never right is a traceback, or another number than torch's.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from generated.runtime.testing import DEVICE, EPS  # noqa: E402
from tests.kernels.project import Package, emitted  # noqa: E402

COUNT = 60
AXES = ("B", "C", "N")
ROUNDINGS = 2**20
"""Of float64, in units of the largest element: formulas are of a few operations, an error of the generator is of the first digits."""

Given = dict[str, Any]


@dataclass(frozen=True)
class Term:
    """A formula as text, with its axes, and as a function of what is given.

    `sure` are the axes that it has under every choice: what a choice or an absent param may take away is not reduced over.
    """

    text: str
    axes: frozenset[str]
    sure: frozenset[str]
    of: Callable[[Given], Any]


def full(term: Term, given: Given) -> Any:
    """Its value, stretched over all its axes."""
    return term.of(given).expand([given["extents"][a] if a in term.axes else 1 for a in AXES])


UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh({})": torch.tanh, "sigmoid({})": torch.sigmoid, "exp(-abs({}))": lambda x: torch.exp(-x.abs()),
    "square({})": torch.square, "sin({})": torch.sin, "sqrt(1 + square({}))": lambda x: torch.sqrt(1 + x * x),
    "-{}": torch.neg, "relu({})": torch.relu,
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "({} + {})": torch.add, "({} - {})": torch.sub, "({} * {})": torch.mul, "{} / (1 + square({}))": lambda a, b: a / (1 + b * b),
    "maximum({}, {})": torch.maximum, "minimum({}, {})": torch.minimum,
}  # fmt: skip
REDUCTIONS: dict[str, Callable[[Any, list[int]], Any]] = {
    "sum": lambda v, d: v.sum(d, keepdim=True), "mean": lambda v, d: v.mean(d, keepdim=True),
    "max": lambda v, d: v.amax(d, keepdim=True), "min": lambda v, d: v.amin(d, keepdim=True),
    "logsumexp": lambda v, d: v.logsumexp(d, keepdim=True), "var": lambda v, d: v.var(d, keepdim=True),
}  # fmt: skip


def unary(how: str, a: Term) -> Term:
    return Term(how.format(f"({a.text})"), a.axes, a.sure, lambda g: UNARY[how](a.of(g)))


def binary(how: str, a: Term, b: Term) -> Term:
    return Term(how.format(a.text, b.text), a.axes | b.axes, a.sure | b.sure, lambda g: BINARY[how](a.of(g), b.of(g)))


def where(a: Term, b: Term, c: Term) -> Term:
    text = f"where({a.text} > {b.text}, {a.text}, {c.text})"
    return Term(
        text,
        a.axes | b.axes | c.axes,
        a.sure | b.sure | c.sure,
        lambda g: torch.where(a.of(g) > b.of(g), a.of(g), c.of(g)),
    )


def reduction(how: str, a: Term, over: frozenset[str]) -> Term:
    dims = [AXES.index(n) for n in sorted(over)]
    return Term(
        f"{how}({a.text}, {', '.join(sorted(over))})",
        a.axes - over,
        a.sure - over,
        lambda g: REDUCTIONS[how](full(a, g), dims),
    )


def coordinate(axis: str, g: Given) -> Any:
    k = AXES.index(axis)
    shape = [g["extents"][axis] if d == k else 1 for d in range(3)]
    return torch.arange(g["extents"][axis], dtype=torch.float64, device=DEVICE).reshape(shape)


def masked(a: Term, axis: str, beyond: int) -> Term:
    """The elements before the last few, by `index` and `size`."""
    text = f"where(index({axis}) < size({axis}) - {beyond}, {a.text}, 0)"
    zero = torch.zeros((), dtype=torch.float64, device=DEVICE)
    return Term(
        text,
        a.axes | {axis},
        a.sure | {axis},
        lambda g: torch.where(coordinate(axis, g) < g["extents"][axis] - beyond, a.of(g), zero),
    )


def ramped(a: Term, axis: str) -> Term:
    text = f"{a.text} * (index({axis}) + 1) / size({axis})"
    return Term(
        text, a.axes | {axis}, a.sure | {axis}, lambda g: a.of(g) * (coordinate(axis, g) + 1) / g["extents"][axis]
    )


def shifted(a: Term, by: int) -> Term:
    """The row moved by a constant, zeros for what there is not."""

    def of(g: Given) -> Any:
        value, n = full(a, g), g["extents"]["N"]
        places = torch.arange(n, device=DEVICE) - by
        taken = value.index_select(2, places.clamp(0, n - 1))
        return torch.where((places >= 0) & (places < n), taken, torch.zeros_like(taken))

    return Term(f"at({a.text}, N=index(N) {'-' if by > 0 else '+'} {abs(by)}, fill=0)", a.axes, a.sure, of)


def chosen(test: str, a: Term, b: Term) -> Term:
    holds = {"flag": lambda g: g["flag"], "w is None": lambda g: g["w"] is None}[test]
    return Term(
        f"({a.text} if {test} else {b.text})",
        a.axes | b.axes,
        a.sure & b.sure,
        lambda g: a.of(g) if holds(g) else b.of(g),
    )


@dataclass
class Drawn:
    """A random spec. `tensors` has the axes of each tensor, `statements` what is computed in order, the outputs last."""

    seed: int
    tensors: dict[str, frozenset[str]] = field(default_factory=dict)
    statements: list[tuple[str, Term]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    weight: str = ""
    """Whether `w` is `required`, `optional`, or `defaulted`: optional, and 1 where it is absent."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.over = self.rng.choice([frozenset("N"), frozenset("N"), frozenset("N"), frozenset("CN"), frozenset("C")])
        self.reductions = self.rng.randint(1, 2)
        self.tensors["x"] = frozenset(AXES)
        if self.rng.random() < 0.4:
            self.tensors["z"] = frozenset(self.rng.choice(["BCN", "BN", "BC", "B"]))
        self.tensors["w"] = frozenset(self.rng.choice("NNC"))
        self.weight = self.rng.choice(["required", "optional", "defaulted"])
        self._draw()

    @property
    def name(self) -> str:
        return f"random_{self.seed}"

    @property
    def formula(self) -> str:
        return "".join(f"    {n} = {t.text}\n" for n, t in self.statements)

    @property
    def attrs(self) -> dict[str, str]:
        """Those that the formula reads, with their defaults."""
        return {n: v for n, v in (("k", "0.5"), ("flag", "false")) if re.search(rf"\b{n}\b", self.formula)}

    @property
    def text(self) -> str:
        lists = {n: f"[{', '.join(a for a in AXES if a in axes)}]" for n, axes in self.tensors.items()}
        more = {"required": "", "optional": ", optional: true", "defaulted": ", optional: true, default: 1"}[
            self.weight
        ]
        made = dict(self.statements)
        outputs = ", ".join(f"{n}: [{', '.join(a for a in AXES if a in made[n].axes)}]" for n in self.outputs)
        return (
            f"- op: {self.name}\n  doc: Drawn at random.\n"
            f"  inputs: {{{', '.join(f'{n}: {dims}' for n, dims in lists.items() if n != 'w')}}}\n"
            f"  params: {{w: {{axes: {lists['w']}{more}}}}}\n"
            f"  attrs: {{{', '.join(f'{n}: {{default: {v}}}' for n, v in self.attrs.items())}}}\n"
            f"  outputs: {{{outputs}}}\n  forward: |\n{self.formula}"
            f"  backward: {{{', '.join(f'{n}: auto' for n in self.tensors)}}}\n"
        )

    # -------------------------------------------------------------------------------- drawing

    def _draw(self) -> None:
        rng = self.rng
        known = [self._tensor(n) for n in self.tensors if n != "w" or self.weight != "optional"]
        known.append(Term("k", frozenset(), frozenset(), lambda g: g["k"]))
        unused: list[Term] = []
        for n in range(rng.randint(1, 3)):
            term = self._expression(known, 2)
            if not unused and self.reductions and n:
                term = self._reduced(term)
            if self.weight == "optional" and rng.random() < 0.4:
                term = chosen("w is None", term, binary("({} * {})", term, self._tensor("w")))
            elif rng.random() < 0.35:
                term = chosen("flag", term, self._expression(known, 2))
            named = self._name(f"u{n}", term)
            known.append(named)
            unused = [u for u in unused if u.text not in term.text] + [named]
        if self.reductions:
            whole = next((u for u in unused if self.over <= u.sure), self._tensor("x"))
            unused.append(self._name("r", self._reduced(whole)))
        self._finish(unused)

    def _finish(self, unused: list[Term]) -> None:
        """The outputs: all that was computed is in one of them, and every tensor."""
        rng = self.rng
        small = [u for u in unused if u.axes < frozenset(AXES)]
        if small and len(unused) > 1 and rng.random() < 0.35:
            apart = rng.choice(small)
            unused = [u for u in unused if u is not apart]
        else:
            apart = None
        term = self._tensor("x")
        for other in [*unused, *(self._tensor(n) for n in self.tensors if n not in ("x", "w"))]:
            term = binary(rng.choice(["({} + {})", "({} * {})", "({} - {})"]), term, other)
        w = self._tensor("w")
        term = (
            chosen("w is None", term, binary("({} * {})", term, w))
            if self.weight == "optional"
            else binary("({} * {})", term, w)
        )
        if rng.random() < 0.3:
            named = self._name("t", term)
            term = reduction(rng.choice(["sum", "mean"]), named, self.over & named.sure)
        self._name("y", term)
        self.outputs.append("y")
        if apart is not None:
            self._name("s", unary("tanh({})", apart))
            self.outputs.append("s")

    def _tensor(self, name: str) -> Term:
        axes = self.tensors[name]
        sure = frozenset() if name == "w" and self.weight == "defaulted" else axes
        return Term(name, axes, sure, lambda g: g[name])

    def _name(self, name: str, term: Term) -> Term:
        self.statements.append((name, term))
        return Term(name, term.axes, term.sure, lambda g: g[name])

    def _reduced(self, term: Term) -> Term:
        if not self.over <= term.sure:
            return term
        self.reductions -= 1
        return reduction(self.rng.choice(list(REDUCTIONS)), term, self.over)

    def _expression(self, known: list[Term], depth: int) -> Term:
        rng = self.rng
        if depth == 0:
            return rng.choice(known)

        def inner() -> Term:
            return self._expression(known, depth - 1)

        pick = rng.random()
        if pick < 0.2:
            return unary(rng.choice(list(UNARY)), inner())
        if pick < 0.5:
            return binary(rng.choice(list(BINARY)), inner(), inner())
        if pick < 0.58:
            return where(inner(), inner(), inner())
        if pick < 0.7:
            return rng.choice(
                [lambda: masked(inner(), "N", rng.randint(0, 1)), lambda: ramped(inner(), rng.choice("CN"))]
            )()
        if pick < 0.76:
            return shifted(self._tensor("x"), rng.choice([-1, 1, 2]))
        return self._reduced(inner()) if self.reductions else inner()


# ---------------------------------------------------------------------------------------------- generating, comparing


@cache
def drawn(seed: int) -> Drawn:
    return Drawn(seed)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    made = Package(tmp_path_factory.mktemp("random"))
    yield made
    made.close()


@cache
def generated(seed: int, package: Package) -> tuple[Callable[..., Any] | None, str]:
    """The op, written into the package; None, and why, where it is refused."""
    spec = drawn(seed)
    files, report = emitted(spec.text, package.config)
    assert all(d.code != "internal-fault" for d in report.errors), f"{report.render()}\n{spec.text}"
    package.write(files)
    return (getattr(package.module(f"ops.{spec.name}"), spec.name) if files else None), report.render()


def aligned(value: Any, axes: frozenset[str], extents: dict[str, int]) -> Any:
    return value.reshape([extents[a] if a in axes else 1 for a in AXES])


def meant(spec: Drawn, leaves: dict[str, Any], extents: dict[str, int], flag: bool) -> list[Any]:
    """The outputs by torch."""
    given: Given = {n: None if v is None else aligned(v, spec.tensors[n], extents) for n, v in leaves.items()}
    if leaves["w"] is None and spec.weight == "defaulted":
        given["w"] = torch.ones(1, 1, 1, dtype=torch.float64, device=DEVICE)
    given |= {"k": torch.full((1, 1, 1), 0.5, dtype=torch.float64, device=DEVICE), "flag": flag, "extents": extents}
    made = {}
    for name, term in spec.statements:
        given[name] = made[name] = full(term, given)
    axes = {n: t.axes for n, t in spec.statements}
    return [made[n].reshape([extents[a] for a in AXES if a in axes[n]]) for n in spec.outputs]


def grads(outputs: list[Any], leaves: dict[str, Any], seeds: list[Any]) -> dict[str, Any]:
    wanted = {n: v for n, v in leaves.items() if v is not None}
    found = torch.autograd.grad(outputs, list(wanted.values()), seeds, allow_unused=True)
    return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(wanted.items(), found)}


def near(got: Any, want: Any) -> bool:
    scale = 1 + (want.abs().max().item() if want.numel() else 0)
    return got.shape == want.shape and bool(((got - want).abs() <= ROUNDINGS * EPS["f64"] * scale).all())


def differing(
    spec: Drawn, op: Callable[..., Any], flag: bool, absent: bool, first: int, extents: dict[str, int]
) -> list[str]:
    """What differs from torch. Cotangents are those of the outputs from the `first` on."""
    random_numbers = torch.Generator().manual_seed(spec.seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.float64, generator=random_numbers).to(DEVICE)

    values = {n: normal(*(extents[a] for a in AXES if a in axes)) for n, axes in spec.tensors.items()}
    ours, theirs = (
        {n: None if n == "w" and absent else v.clone().requires_grad_() for n, v in values.items()} for _ in range(2)
    )
    made = op(*ours.values(), **({"flag": flag} if "flag" in spec.attrs else {}))
    made = list(made) if isinstance(made, tuple) else [made]
    wanted = meant(spec, theirs, extents, flag)
    seeds = [normal(*w.shape) for w in wanted]
    found = [n for n, a, b in zip(spec.outputs, made, wanted) if not near(a.detach(), b.detach())]
    reached = [k for k in range(first, len(wanted)) if wanted[k].requires_grad]
    got, want = (
        grads([results[k] for k in reached], leaves, [seeds[k] for k in reached])
        for results, leaves in ((made, ours), (wanted, theirs))
    )
    return found + [f"d{n}" for n, g in want.items() if not near(got[n], g)]


@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_op_is_what_its_formula_says(seed: int, package: Package) -> None:
    spec, op = drawn(seed), generated(seed, package)[0]
    if op is None:
        return
    rng = random.Random(seed)
    extents = {"B": rng.randint(1, 3), "C": rng.randint(2, 4), "N": rng.choice([2, 5, 17])}
    bad = []
    for flag, absent, first in itertools.product((False, True), (False, True), range(len(spec.outputs))):
        if absent and spec.weight == "required" or flag and "flag" not in spec.attrs:
            continue
        case = f"flag={flag}, w {'absent' if absent else 'given'}, cotangents from output {first}"
        try:
            bad += [f"{n} differs: {case}" for n in differing(spec, op, flag, absent, first, extents)]
        except Exception as fault:
            bad.append(f"{type(fault).__name__}: {fault}: {case}")
    assert not bad, "\n".join([*bad, f"extents {extents}", spec.text])


def test_most_are_accepted(package: Package) -> None:
    made = [generated(seed, package) for seed in range(COUNT)]
    reasons = [reason for op, reason in made if op is None]
    assert len(reasons) < COUNT / 2, "\n".join(reasons)
