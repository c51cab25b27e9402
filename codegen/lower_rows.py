"""Lowering of rows: the passes over a row, each with its loads, its statements and its reductions.

Takes a `Stage` of rows, returns its `RowKernel`s. A value of one element a row (`rstd`) is computed between two passes, what
has the axes of a row again in each pass that needs it.

    rstd = rsqrt(mean(x * x, N) + eps)  ->  pass 1: rstd_mean_acc += tl.where(mask, x * x, 0.0)
    y = x * rstd                            then:   rstd_mean = rows.mean(rstd_mean_acc, n_reduced)
                                                    rstd = rsqrt(rstd_mean + eps)
                                            last:   y = x * rstd, and the store
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from codegen.diagnostics import Span
from codegen.ir import ATOM, Bound, Graph, Node, Tensor, spell, walk
from codegen.lower import Item, KernelText, Lowering, Module, Printer, StageText, Used, assigned, loaded, safe
from codegen.lower_step import lowered_step
from codegen.rows import EXTREMES
from codegen.schedule import OpPlan
from codegen.spec import PACK
from codegen.stages import Part, Stage, Store, depth, largest_of, last_pass, level, scans, shift, unlike
from codegen.variants import Variant

_LASTING = ("once", "head", "start", "after")
"""Sections whose names hold in all that follows; those of a loop hold in it alone."""
_SCANS = {"cumsum": "running_sum", "cumprod": "running_product", "linear": "recurrence"}
_NEUTRAL = {"sum": "0.0", "mean": "0.0", "max": 'float("-inf")', "min": 'float("inf")', "prod": "1.0"}

_WHOLE = {"sum": "0", "max": "-(2**63)", "min": "2**63 - 1", "prod": "1"}
"""Of integers, which are added up in 64 bits."""
_PART_DTYPES = {"int": "i64", "bool": "bool"}


@dataclass(frozen=True)
class Pass:
    """One walk over the elements of a row: accumulators, the loop's body, and what follows it."""

    starts: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]
    reverse: bool = False
    """Whether it walks from the last step to the first."""


@dataclass(frozen=True)
class RowKernel(KernelText):
    """A kernel whose programs have whole rows. `body` is what comes before the first pass, and `tail` after the last."""

    nest: str = "rows"
    passes: tuple[Pass, ...] = ()
    tail: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    """Loads of what all rows share, before the loop over the rows of a program."""
    partial: tuple[str, ...] = ()
    """Gradients that are summed over the rows of a program, and then over the programs."""
    parts: tuple[tuple[str, str], ...] = ()
    """Reductions that several programs may share, by name, with what a program has of each; they are finished by a kernel of its
    own."""
    shared: bool = False
    """Whether several programs may each walk over a share of a row."""
    finishing: bool = False
    """Whether its elements are what the programs of another kernel have."""
    part_dtypes: tuple[tuple[str, str], ...] = ()
    """Of those that are whole numbers or truths, whatever the operands are: the dtype of what a program has."""
    by_columns: bool = False
    """Whether what is summed over the rows needs no reduction of a row: some columns alone can be summed."""
    single: bool = False
    """Whether a row is walked over once: then its next elements are on their way while some are computed."""

    @property
    def text(self) -> str:
        return "\n".join(
            [
                *self.prelude,
                *self.once,
                *self.body,
                *(x for p in self.passes for x in (*p.starts, *p.body, *p.after)),
                *self.tail,
            ]
        )

    @property
    def strided(self) -> bool:
        return True


class _RowPrinter(Printer):
    """Prints the nodes of one variant, with what lies along the axes of a row."""

    def __init__(self, rows: _Rows, graph: Graph, used: Used) -> None:
        super().__init__(rows.owner, graph, used, rows.stage.exacting)
        self.rows = rows

    def _print(self, node: Node) -> tuple[str, int]:
        if node.serial in self.names:
            return self.names[node.serial], ATOM
        if node.op == "index":
            return self.rows.coordinate(node.params[0]), ATOM
        if node.op == "at":
            return self.rows.taken(node, self), ATOM
        return super()._print(node)

    def extent(self, node: Node) -> str:
        return self.rows.size(node.params)


@dataclass
class _Sections:
    """The statements of one variant by where they stand."""

    items: dict[tuple[str, int], list[Item]] = field(default_factory=dict)

    def add(self, place: str, number: int, items: Iterable[Item]) -> None:
        self.items.setdefault((place, number), []).extend(items)


def lowered(plan: OpPlan, mode: str = "training") -> Module:
    """The text of an op's kernels, stage by stage. `mode` inference leaves the backward out, and what is kept for it."""
    owner = Lowering(plan)
    training = mode == "training" and bool(plan.gradients)
    forward = tuple(_lowered(owner, s) for s in plan.stages(training))
    backward = tuple(_lowered(owner, s) for s in plan.backward) if training else ()
    return owner.module(forward, backward)


def _lowered(owner: Lowering, stage: Stage) -> StageText:
    if stage.nest == "step":
        return lowered_step(owner, stage)
    return _Rows(owner, stage).text() if stage.nest == "rows" else owner.elements(stage)


class _Rows:
    """The kernels of one stage of rows."""

    def __init__(self, owner: Lowering, stage: Stage) -> None:
        self.owner, self.stage = owner, stage
        self.kept, self.reduced = stage.kept, stage.reduced
        self.temps: dict[tuple[str, str, int], str] = {}
        self.finishing = False
        self.parts: dict[str, str] = {}
        self.kinds: dict[str, set[str]] = {}
        """Of what kinds each reduction is, over the variants."""
        self.extra: dict[str, None] = {}
        """Parameters that indexing along an axis asks for."""
        self.rowed: set[str] = set()
        """Tensors whose row begins at a name of its own."""
        self.scans = scans(stage)
        self.mixed = self._mixed()
        """Statements that are a reduction in one variant and more in another: the reduction has a name of its own."""
        self._round()

    def _mixed(self) -> set[str]:
        found: dict[str, set[bool]] = {}
        for part in (p for p in self.stage.parts if p.stores):
            for node, name in self._owners(part):
                if any(n.op == "reduce" for n in walk([node])):
                    found.setdefault(name, set()).add(node.op == "reduce")
        return {name for name, kinds in found.items() if len(kinds) == 2}

    def _round(self) -> None:
        """Quotients of one value a row are IEEE's: one costs nothing beside the row, and what is taken off each element, or divides
        it, must be the constant that a constant row has."""
        for part in self.stage.parts:
            for node in walk([*(s.node for s in part.stores), *(b.node for b in part.graph.statements)]):
                if node.op == "div" and not node.host and node.kind == "float" and not self._tile(node):
                    self.owner.rounded.add(node)

    def _tile(self, node: Node) -> bool:
        return bool(node.axes & self.reduced)

    def text(self) -> StageText:
        kernel = self._kernel(self.stage.suffix, self.stage.parts)
        finish = None
        if kernel.parts:
            self.finishing = True
            finish = self._kernel(
                f"{self.stage.suffix}_finish" if self.stage.suffix != "forward" else "finish",
                [p for p in self.stage.parts if not p.stores or p in self._shareable()],
            )
            self.finishing = False
        return StageText(self.stage, kernel, finish)

    def _shareable(self) -> tuple[Part, ...]:
        """The variants in which several programs may share a row: one pass, and nothing is stored that has elements."""
        if self.stage.partial or self.scans:
            return ()
        return tuple(
            p for p in self.stage.parts
            if depth(p) == 1 and not any(s.axes & self.reduced for s in p.stores)
            and not any(largest_of(n) for n in walk([s.node for s in p.stores]))
        )  # fmt: skip

    # -------------------------------------------------------------------------------- what a value is called, and where it is

    def size(self, axes: Sequence[str]) -> str:
        """A number of elements."""
        asked = frozenset(axes)
        words = [n for n, part in (("n_kept", self.kept), ("n_reduced", self.reduced)) if part and part <= asked]
        left = asked - frozenset[str]().union(*(part for part in (self.kept, self.reduced) if part <= asked))
        for axis in sorted(left):
            words.append(self._extent(axis))
        return " * ".join(words) or "1"

    def _extent(self, axis: str) -> str:
        name = "others" if axis == PACK else axis
        self.extra[f"size_{name}: tl.int64"] = None
        return f"size_{name}"

    def coordinate(self, axis: str) -> str:
        """Where an element lies along an axis."""
        packs = [a.name for p in self.stage.parts for a in p.graph.axes.values() if a.pack]
        if axis not in packs:
            for word, axes in (("r", self.reduced), ("k", self.kept)):
                if axes == {axis}:
                    return word
        word = "r" if axis in self.reduced else "k"
        self.extra[f"{axis}_index_strides"] = None
        return f"offset({word}, {word}_at, {axis}_index_strides)"

    def taken(self, node: Node, printer: Printer) -> str:
        """One element along an axis of a tensor, by an index that a tensor gives or that is computed."""
        source, index = node.args[0], node.args[1]
        axis, name = node.params[0][0], source.params[0]
        axes, mask = source.axes - {axis}, self._mask(node.axes)
        row = f"{name}_row" if name in self.rowed and not axes & self.reduced else self._address(name, axes)
        if (by := self._shifted(node)) is not None:
            at = "r" if by == 0 else f"r {'+' if by > 0 else '-'} {abs(by)}"
            fill = printer.text(node.args[2]) if node.params[1] else 'float("nan")'
            return f"rows.shifted({row}, {at}, {name}_reduced_strides, n_reduced, {mask}, {fill}, COMPUTE)"
        stride = f"{name}_stride_{axis}"
        self.extra |= {f"{stride}: tl.int64": None, f"size_{axis}: tl.int64": None}
        if any(axis in group and axes & group for group in (self.kept, self.reduced)):
            row = f"{row} - {_atom(self.coordinate(axis))} * {stride}"  # its strides lead to the element beside it
        return f"rows.take({row}, {printer.text(index)}, {stride}, size_{axis}, {mask}, COMPUTE)"

    def _shifted(self, node: Node) -> int | None:
        """By how many elements of the row a read is shifted, if that is all: then it is a load like any other."""
        found = shift(node)
        return found[1] if found is not None and self.reduced == {found[0]} else None

    def axes_of(self, name: str) -> frozenset[str]:
        """The axes of a tensor in any variant."""
        out = frozenset[str]()
        for part in self.stage.parts:
            if name in part.graph.tensors:
                out |= frozenset(part.graph.tensors[name].axes)
            out = out.union(*(s.axes for s in part.stores if s.name == name))
        return out

    def _name(self, name: str) -> str:
        return self.owner.names.get(name) or safe(name)

    def _strided(self, name: str) -> list[str]:
        axes, scalar = self.axes_of(name), any(t.name == name and t.scalar for t in self.owner.op.arguments)
        return [
            f"{name}_ptr",
            *([f"{name}_kept_strides"] if axes & self.kept else []),
            *([f"{name}_reduced_strides"] if axes & self.reduced else []),
            *([f"{name}_number: tl.float64"] if scalar else []),
        ]

    def _address(self, name: str, axes: frozenset[str]) -> str:
        words = [f"{name}_ptr"]
        words += [f"offset(k, k_at, {name}_kept_strides)"] if axes & self.kept else []
        words += [f"offset(r, r_at, {name}_reduced_strides)"] if axes & self.reduced else []
        words += ["k"] if not axes and not self.kept else []  # the only row
        return " + ".join(words)

    def _mask(self, axes: frozenset[str]) -> str:
        kept, reduced = axes & self.kept, axes & self.reduced
        return "mask" if kept and reduced else "within" if reduced else "exists" if axes or not self.kept else ""

    def _over(self, value: Node) -> str:
        """The elements that a reduction is over. What all rows have in common is there where no row is."""
        return "within" if self.kept and not value.axes & self.kept else "mask"

    # -------------------------------------------------------------------------------- kernels

    def _kernel(self, suffix: str, parts: Sequence[Part]) -> RowKernel:
        owner, used = self.owner, Used()
        reads = list(self.stage.reads)
        if self.finishing:  # the elements were read by the first kernel
            reads = [n for n in reads if not self.axes_of(n) & self.reduced or n in self._taken_of_rows(parts)]
        self.parts = {}
        sections = {p.variant: self._sections(p, _RowPrinter(self, p.graph, used), reads) for p in parts}
        stored = [n for n in dict.fromkeys(s.name for p in parts for s in p.stores)]
        partial = self.stage.partial
        split, shared = self._sharing(parts)
        once, body, passes, tail = self._merged(sections, used)
        single = len(passes) == 1 and not partial and not self.finishing
        lines = [*once, *body, *tail, *(line for p in passes for line in (*p.starts, *p.body, *p.after))]
        if self.finishing:
            reads = [n for n in reads if any(re.search(rf"\b{n}_ptr\b", line) for line in lines)]
        parted = split or (self.parts if self.finishing else {})
        every = self._parameters(used, reads, stored, parted, lines, bool(partial) or shared, bool(partial) or single)
        return RowKernel(
            f"{owner.op.name}_{suffix}", every, body, tuple(used.prelude),
            passes=passes, tail=tail, once=once, partial=partial,
            parts=tuple(parted.items()), shared=shared, finishing=self.finishing,
            part_dtypes=tuple((n, _PART_DTYPES[k]) for n in split for k in _PART_DTYPES if self.kinds[n] == {k}),
            by_columns=bool(partial) and all(level(s.node, {}) == 0 for p in parts for s in p.stores if s.partial), single=single,
        )  # fmt: skip

    def _sharing(self, parts: Sequence[Part]) -> tuple[dict[str, str], bool]:
        """The reductions that several programs may share, with what a program has of each, and whether they may share a row at all."""
        shareable, storing = self._shareable(), [p for p in parts if p.stores]
        free = [p for p in storing if depth(p) == 0]
        if self.stage.partial or self.scans or self.finishing or any(p not in (*shareable, *free) for p in storing):
            return {}, False
        split = dict(self.parts) if shareable and self._alike(shareable) else {}
        return split, bool(split or free)

    def _merged(
        self, sections: Mapping[Variant, _Sections], used: Used
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Pass, ...], tuple[str, ...]]:
        """What stands once, before the first pass, in each pass and after the last, of all variants."""
        names = {
            (v, where): {n for item in items for n in assigned(item.lines)}
            for v, s in sections.items() for where, items in s.items.items()
        }  # fmt: skip
        beside: dict[Variant, set[str]] = {v: set() for v in sections}
        for (variant, (place, _)), own in names.items():
            beside[variant] |= own if place in _LASTING else set()
        anywhere = set[str]().union(*names.values())

        def merged(place: str, number: int = 0) -> tuple[str, ...]:
            bodies = {v: s.items.get((place, number), []) for v, s in sections.items()}
            return tuple(self.owner.merge(bodies, used, beside, anywhere))

        count = 1 + max(number for s in sections.values() for place, number in s.items if place != "tail")
        once, head = merged("once"), merged("head")
        passes = [
            Pass(
                merged("start", p),
                merged("loop", p),
                merged("after", p),
                any(n.params[2] for n in self.scans.get(p, ())),
            )
            for p in range(count)
        ]
        return once, head, tuple(p for p in passes if p.body), merged("tail")

    def _parameters(self, used: Used, reads: Sequence[str], stored: Sequence[str], parted: Collection[str], lines: Sequence[str],
                    spanned: bool, staged: bool) -> tuple[str, ...]:  # fmt: skip
        """The kernel's parameters, in their order.

        Args:
            parted: reductions of which each program stores its part.
            spanned: whether a program has a share of rows, or of a row.
            staged: whether loads are pipelined.
        """
        owner, partial = self.owner, self.stage.partial
        asked = [n for n in used.asked if n not in reads]
        owner.present += [n for n in asked if n not in owner.present and self.stage.suffix.startswith("backward")]
        params = [p for n in reads for p in self._strided(n)] + [f"{n}_ptr" for n in asked]
        params += [p for n in stored if n not in reads and n not in partial for p in self._strided(n)]
        params += [f"{n}_part_ptr" for n in (*partial, *parted)]
        extra = [p for p in self.extra if any(p.partition(":")[0] in line for line in lines)]
        counted = not self.finishing or any("n_reduced" in line for line in lines)
        return (
            *params, *extra, "kept_sizes", *([] if self.finishing else ["reduced_sizes"]), "n_kept: tl.int64",
            *(["n_reduced: tl.int64"] if counted else []), *(["n_parts: tl.int64"] if self.finishing else ["span: tl.int64"] if spanned else []),
            *(f"{n}: tl.float64" for n in used.scalars), *(f"{n}: tl.constexpr" for n in used.choices),
            *(["HALF: tl.constexpr"] if used.coarse else []), "COMPUTE: tl.constexpr", "WIDE: tl.constexpr", "RAGGED: tl.constexpr",
            *([] if self.finishing else ["LOOP: tl.constexpr"]), "BLOCK_K: tl.constexpr", "BLOCK_R: tl.constexpr",
            *(["LANES: tl.constexpr", "GROUP: tl.constexpr"] if any(line.endswith(_IN_LANES) for line in lines) else []),
            *(["STAGES: tl.constexpr"] if staged else []),
        )  # fmt: skip

    def _taken_of_rows(self, parts: Sequence[Part]) -> set[str]:
        """The tensors of which one element a row is taken."""
        nodes = [n for p in parts for n in walk([s.node for s in p.stores]) if n.op == "at" and not self._tile(n)]
        return {n.args[0].params[0] for n in nodes}

    def _alike(self, parts: Sequence[Part]) -> bool:
        """Whether all of them reduce to the same names: a program has one set of them."""
        texts = {tuple(self._reductions(p)) for p in parts}
        return len(texts) == 1

    def _reductions(self, part: Part) -> list[str]:
        levels: dict[int, int] = {}
        for s in part.stores:
            level(s.node, levels)
        owners = self._owners(part)
        nodes = [n for n in self._below([s.node for s in part.stores], ()) if n.op == "reduce"]
        return [self._reduction_name(n, owners, (), set()) for n in nodes]

    # -------------------------------------------------------------------------------- one variant

    def _sections(self, part: Part, printer: _RowPrinter, reads: Sequence[str]) -> _Sections:
        out = _Sections()
        graph, last = part.graph, last_pass(self.stage, part)
        roots = [s.node for s in part.stores]
        known = {n.serial for n in walk(roots) if n.op == "reduce"} if self.finishing else set()
        live = list(self._below(roots, {*printer.names, *known}))
        bindings = self._with_own(part, live)
        owners = self._owners(part)
        given = set(printer.names)
        levels: dict[int, int] = {serial: 0 for serial in printer.names}
        for node in live:
            level(node, levels)
        self._head(out, graph, live, reads)
        self._row_statements(out, printer, bindings, live, levels, 0, ("head", 0))
        reductions = [n for n in live if n.op == "reduce"]
        for number in range(last):
            now = [n for n in reductions if levels[n.serial] == number + 1]
            named = [(n, self._reduction_name(n, owners, printer.names, given)) for n in now]
            self._pass(out, graph, printer, bindings, reads, number, named)
            self._row_statements(out, printer, bindings, live, levels, number + 1, ("after", number))
        self._last_pass(out, part, printer, bindings, reads, last)
        return out

    def _owners(self, part: Part) -> list[tuple[Node, str]]:
        return [
            *((b.node, self._name(b.name)) for b in self._bindings(part)),
            *((s.node, self._own(s)) for s in part.stores),
        ]

    def _own(self, store: Store) -> str:
        return self.owner.grads[store.gradient] if store.gradient else self._name(store.name)

    def _bindings(self, part: Part) -> tuple[Bound, ...]:
        """All statements; what an output and the backward's own text both name has the backward's name."""
        graph = part.graph
        if not self.stage.suffix.startswith("backward"):
            return (*graph.bindings, *graph.update_let)
        outputs, own = {t.name for t in graph.outputs}, {b.node.serial for b in graph.let}
        return (*(b for b in graph.bindings if b.name not in outputs or b.node.serial not in own), *graph.let)

    def _with_own(self, part: Part, live: Sequence[Node]) -> list[Bound]:
        """The statements, with one for each element that is taken inside a formula, and for each scan: each is a statement of
        its own."""
        out = list(self._bindings(part))
        named = {b.node.serial for b in out}
        for node in live:
            if node.op not in ("at", "scan") or node.serial in named:
                continue
            place = next((i for i, b in enumerate(out) if any(n is node for n in walk([b.node]))), len(out))
            name = self._taken_name(node) if node.op == "at" else self._scan_name(node, part, out[place:])
            before = (
                self.owner.order.get(out[place].name, len(self.owner.order))
                if place < len(out)
                else len(self.owner.order)
            )
            self.owner.order.setdefault(name, before - 0.5)
            self.owner.names.setdefault(name, name)
            out.insert(place, Bound(name, node, Span("", 0, 0, 0)))
        return out

    def _scan_name(self, node: Node, part: Part, after: Sequence[Bound]) -> str:
        """The name of a scan that no statement has: of what is stored if it is that, else of the statement it stands in."""
        own = next((s for s in part.stores if s.node is node), None)
        if own is not None:
            return self._own(own)
        owners = [self._name(b.name) for b in after[:1]]
        owners += [self._own(s) for s in part.stores if any(n is node for n in walk([s.node]))]
        key = (spell(node), "scan", 0)
        if key not in self.temps:
            self.temps[key] = self.owner.fresh(f"{owners[0]}_{node.params[0]}")
        return self.temps[key]

    def _taken_name(self, node: Node) -> str:
        """The name of an element that is taken inside a formula; variants share it."""
        key = (spell(node), "at", 0)
        if key not in self.temps:
            self.temps[key] = self.owner.fresh(f"{self._name(node.args[0].params[0])}_at")
        return self.temps[key]

    @staticmethod
    def _below(roots: Iterable[Node], named: Collection[int]) -> Iterable[Node]:
        """Every node that must be computed for the roots, operands first; what has a name is there already."""
        seen: set[int] = set()
        stack = [(n, False) for n in reversed(list(roots))]
        while stack:
            node, ready = stack.pop()
            if ready:
                yield node
            elif node.serial not in seen:
                seen.add(node.serial)
                stack.append((node, True))
                if node.serial not in named:
                    stack += [(a, False) for a in reversed(node.args)]

    @staticmethod
    def _whole_reads(live: Sequence[Node]) -> set[str]:
        """The tensors that are read element by element, not only taken from by an index."""
        roots = {n.serial for n in live}
        taken = {n.args[0].serial for n in live if n.op == "at"}
        used = {a.serial for n in live if n.op != "at" for a in n.args} | {
            a.serial for n in live if n.op == "at" for a in n.args[1:]
        }
        return {
            n.params[0]
            for n in live
            if n.op == "read" and (n.serial not in taken or n.serial in used) and n.serial in roots
        }

    def _head(self, out: _Sections, graph: Graph, live: list[Node], reads: Sequence[str]) -> None:
        """Where a row begins in each tensor, and loads of what has one value a row."""
        whole = self._whole_reads(live)
        shifted = {n.args[0].params[0] for n in live if self._shifted(n) is not None}
        self.rowed = set()
        for name in reads:
            tensor = graph.tensors.get(name)
            if tensor is None or name not in whole | shifted:
                continue
            axes = frozenset(tensor.axes)
            if axes & self.reduced and self.finishing:
                continue
            if axes & self.reduced and axes & self.kept:
                text = f"{name}_row = {name}_ptr + offset(k, k_at, {name}_kept_strides)"
                self.rowed.add(name)
                out.add("head", 0, [Item(("load", f"{name}_row"), (text,))])
            elif name not in whole:
                continue
            elif self._once(tensor):
                text = f"{name}_once = tl.load({self._address(name, axes)}, mask=within)"
                out.add("once", 0, [Item(("load", name), (text,))])
            elif not axes & self.reduced:
                load = loaded(self._address(name, axes), tensor.kind, tensor.dtype, self._mask(axes))
                out.add("head", 0, [Item(("load", name), self.owner.loading(name, load, tensor.kind, tensor.scalar))])

    def _once(self, tensor: Tensor) -> bool:
        """Whether a tensor is read before the loop over the rows of a program."""
        axes = frozenset(tensor.axes)
        alike = bool(axes & self.reduced) and not axes & self.kept
        return bool(self.stage.partial) and alike and tensor.kind == "float" and not tensor.scalar

    def _row_statements(self, out: _Sections, printer: _RowPrinter, bindings: Iterable[Bound], live: Iterable[Node],
                        levels: dict[int, int], number: int, place: tuple[str, int]) -> None:  # fmt: skip
        """The statements with one value a row that are known after so many passes."""
        needed = {n.serial for n in live}
        for bound in bindings:
            node = bound.node
            if node.serial not in needed or node.op in ("const", "read") or self._tile(node) or node.host:
                continue
            if node.serial in printer.names or levels[node.serial] != number:
                continue
            out.add(*place, [self._statement(printer, bound)])

    def _statement(self, printer: _RowPrinter, bound: Bound) -> Item:
        text, name = printer.text(bound.node), self._name(bound.name)
        printer.names[bound.node.serial] = name
        comment = f"  # {bound.comment}" if bound.comment else ""
        return Item(("let", bound.name), (*(f"# {c}" for c in bound.above), f"{name} = {text}{comment}"))

    def _scan(self, printer: _RowPrinter, bound: Bound) -> tuple[Item, Item]:
        """How a scan begins, and its statement: a tile's part of it, and what the next step goes on from."""
        node, name = bound.node, self._name(bound.name)
        word, _, reverse, exclusive = node.params
        kind = "COMPUTE" if node.kind == "float" else "tl.int64"
        start = (
            f"tl.{'full' if word == 'cumprod' else 'zeros'}([BLOCK_K, 1], {'1.0, ' if word == 'cumprod' else ''}{kind})"
        )
        words = [*(printer.text(a) for a in node.args), f"{name}_carry", "mask", "LOOP"]
        words += ["REVERSE=True"] if reverse else []
        words += ["EXCLUSIVE=True"] if exclusive else []
        printer.names[node.serial] = name
        line = f"{name}, {name}_carry = rows.{_SCANS[word]}({', '.join(words)})"
        above = (*bound.above, *([bound.comment] if bound.comment else []))  # the line is long
        return (
            Item(("start", name), (f"{name}_carry = {start}",)),
            Item(("let", bound.name), (*(f"# {c}" for c in above), line)),
        )

    def _elements(self, out: _Sections, number: int, graph: Graph, printer: _RowPrinter, bindings: Iterable[Bound],
                  reads: Sequence[str], roots: list[Node]) -> None:  # fmt: skip
        """Loads and statements of one pass; the names they give hold in this pass alone."""
        live = list(self._below(roots, printer.names))
        reached, whole = {n.serial for n in live}, self._whole_reads(live)
        for name in reads:
            tensor = graph.tensors.get(name)
            if tensor is None or not frozenset(tensor.axes) & self.reduced or name not in whole:
                continue
            axes = frozenset(tensor.axes)
            row = f"{name}_row" if axes & self.kept else f"{name}_ptr"
            address = f"{row} + offset(r, r_at, {name}_reduced_strides)"
            text = loaded(address, tensor.kind, tensor.dtype, self._mask(axes))
            if self._once(tensor):
                text = f"(tl.load({address}, mask=within) if LOOP else {name}_once).to(COMPUTE)"
            out.add("loop", number, [Item(("load", name), self.owner.loading(name, text, tensor.kind, tensor.scalar))])
        for bound in bindings:
            node = bound.node
            if (
                node.serial in reached
                and self._tile(node)
                and node.op not in ("const", "read")
                and node.serial not in printer.names
            ):
                if node.op == "scan":
                    start, line = self._scan(printer, bound)
                    out.add("start", number, [start])
                else:
                    line = self._statement(printer, bound)
                out.add("loop", number, [line])

    def _pass(self, out: _Sections, graph: Graph, printer: _RowPrinter, bindings: Sequence[Bound], reads: Sequence[str],
              number: int, reductions: list[tuple[Node, str]]) -> None:  # fmt: skip
        before, names = dict(printer.names), {n.serial: name for n, name in reductions}
        tops = {n.serial: top for n, _ in reductions if (top := largest_of(n)) is not None and top.serial in names}
        beside = {top.serial for top in tops.values()}
        values = {n.serial: tops.get(n.serial, n).args[0] for n, _ in reductions}
        if not self.finishing:
            self._elements(out, number, graph, printer, bindings, reads, list(values.values()))
        finished = []
        for node, name in reductions:
            acc = f"{name}_acc"
            part = f"tl.load({name}_part_ptr + r * n_kept + k, mask=mask)"
            value = part if self.finishing else printer.text(values[node.serial])
            if node.serial in tops:
                largest = names[tops[node.serial].serial]
                start, step, finish = _beside_largest(
                    node, name, largest, value, self._over(values[node.serial]), printer
                )
            elif node.serial in beside:
                continue
            else:
                mask = "mask" if self.finishing else self._over(values[node.serial])
                start, step, finish = _reduction(node, name, acc, value, mask, self.finishing)
                if (chosen := _chosen(node)) is not None and not self.finishing:
                    hit, value = (printer.text(n) for n in chosen)
                    step = f"{acc} = {node.params[0]}imum({acc}, tl.where({mask} & {_atom(hit)}, {_wide(value)}, {_WHOLE[node.params[0]]}))"
                self.parts[name] = _part(node, acc, finish)
                self.kinds.setdefault(name, set()).add(node.kind)
            if node.params[0] in ("max", "min") and node.serial not in tops:
                self.owner.use(f"math.{node.params[0]}imum")
            out.add("start", number, [Item(("start", name), tuple(start.split("\n")))])
            out.add("loop", number, [Item(("acc", name), (step,))])
            finished.append((node, name, finish))
        printer.names = before
        for _, name, finish in finished:
            out.add("after", number, [Item(("finish", name), (finish,))])
        printer.names |= names

    def _reduction_name(self, node: Node, owners: Sequence[tuple[Node, str]], known: Collection[int],
                        given: set[int]) -> str:  # fmt: skip
        """A reduction's name: its statement's, or made of the word and the statement it stands in first. Variants share it."""
        stated_as = next((name for n, name in owners if n is node), None)
        if stated_as is not None and stated_as not in self.mixed:
            return stated_as
        stated = {n.serial for n, _ in owners} | given
        owner = next(
            (n, name) for n, name in owners
            if any(part is node for part in self._below([n], (stated | {*known}) - {n.serial}))
        )  # fmt: skip
        if owner[0] is node:
            return self._temp(owner[1], node.params[0], 0)
        alike = [
            n for n in self._below([owner[0]], stated - {owner[0].serial})
            if n.op == "reduce" and n.params[0] == node.params[0] and n.serial not in stated
        ]  # fmt: skip
        return self._temp(owner[1], node.params[0], next(i for i, n in enumerate(alike) if n is node))

    def _temp(self, owner: str, reduction: str, number: int) -> str:
        """The name of a reduction that is part of a statement."""
        word = {"sum": "total", "max": "top", "min": "bottom", "prod": "product"}.get(reduction, reduction)
        key = (owner, word, number)
        if key not in self.temps:
            name = safe(f"{owner}_{word}" if number == 0 else f"{owner}_{word}{number + 1}")
            self.temps[key] = unlike(
                name, [*self.temps.values(), *self.owner.names.values(), *self.owner.grads.values()]
            )
        return self.temps[key]

    def _last_pass(self, out: _Sections, part: Part, printer: _RowPrinter, bindings: Sequence[Bound], reads: Sequence[str],
                   number: int) -> None:  # fmt: skip
        """The last pass, with what has elements, and the stores of what has one value a row."""
        tiles = [s for s in part.stores if s.axes & self.reduced]
        before = dict(printer.names)
        roots = [s.node for s in tiles]
        if tiles:
            self._elements(out, number, part.graph, printer, bindings, reads, roots)
        for store in tiles:
            out.add("loop", number, self._store(printer, store))
        printer.names = before
        for store in part.stores:
            if store not in tiles:
                out.add("tail", 0, self._store(printer, store))

    def _store(self, printer: _RowPrinter, store: Store) -> list[Item]:
        text = printer.stored(store.node, store.kind)
        items = []
        name = store.name
        if store.gradient and store.node.serial not in printer.names and store.node.op != "const":
            own = self.owner.grads[store.gradient]
            items.append(Item(("grad", name), (f"{own} = {text}",)))
            text = own
        if store.partial:
            line = f"{name}_acc = rows.add_columns({name}_acc, {text}, mask, {name}_part_ptr, r, within, start_k > first, n_reduced, LOOP)"
            return [*items, Item(("store", name), (line,))]
        address, mask = self._address(name, store.axes), self._mask(store.axes)
        if self.kept and not store.axes & self.kept:  # all rows have it: the first one stores it
            address = address.replace(f"{name}_ptr", f"{name}_ptr + k", 1)
            mask = "(k == 0) & within" if store.axes else "k == 0"
        line = f"tl.store({address}, {text}, mask={mask})"
        lines = (f"if {name}_ptr is not None:", f"    {line}") if self._optional(store) else (line,)
        return [*items, Item(("store", name), lines)]

    def _optional(self, store: Store) -> bool:
        """Whether the tensor may be absent: a gradient that is not needed beside one that is, what a later stage would read for such a
        gradient, a statistic without gradients."""
        if store.gradient:
            return len(self.owner.plan.gradients) > 1
        if self.stage.suffix.startswith("backward"):
            return len(self.stage.stored) > 1
        return any(t.name == store.name for t in self.owner.plan.saved)


def _part(node: Node, acc: str, finish: str) -> str:
    """What a program has of a reduction that it shares: a mean is of all, and its total is divided at the end."""
    return f"rows.total({acc})" if node.params[0] == "mean" else finish.partition(" = ")[2].lstrip("~")


def _chosen(node: Node) -> tuple[Node, Node] | None:
    """The condition and the value where a reduction is of those elements alone for which a condition holds."""
    x = node.args[0]
    if node.kind != "int" or node.params[0] not in EXTREMES or x.op != "where" or x.args[2].op != "const":
        return None
    return (x.args[0], x.args[1]) if x.args[2].params[0] == EXTREMES[node.params[0]] else None


def _atom(text: str) -> str:
    return text if text.isidentifier() or re.fullmatch(r"[\w.]+\([^()]*\)", text) else f"({text})"


def _wide(text: str) -> str:
    """An integer in 64 bits, as what an extreme of them begins with has."""
    return f"{_atom(text)}.to(tl.int64)"


_IN_LANES = "rows.no_exponentials(COMPUTE, BLOCK_K, LANES)"


def _beside_largest(node: Node, name: str, top: str, value: str, mask: str, printer: Printer) -> tuple[str, str, str]:
    """The sum of exponentials of what is less than the largest, or its logarithm, and the largest: begin, take in an element,
    end."""
    state = f"{top}, {name}_acc"
    start = f"{state} = {_IN_LANES}"
    if node.params[0] == "logsumexp":
        return (
            start,
            f"{state} = rows.exponentials({state}, {value}, {mask}, LANES, GROUP)",
            f"{top}, {name} = rows.logarithm_beside_largest({state}, LANES)",
        )
    half = "HALF" if printer.coarse(node.args[0]) else "False"
    return (
        start,
        f"{state} = rows.beside_largest({state}, {value}, {mask}, LOOP, LANES, GROUP, {half})",
        f"{top}, {name} = rows.sum_beside_largest({state}, LANES)",
    )


def _reduction(
    node: Node, name: str, acc: str, value: str, mask: str = "mask", again: bool = False
) -> tuple[str, str, str]:
    """How a reduction begins, takes in an element (`again`: what a program has), and ends."""
    word = node.params[0]
    truth = value if again else _atom(value)
    if node.kind == "float" and node.args[0].kind == "int" and not again:
        value = f"{_atom(value)}.to(COMPUTE)"  # beside a float number Triton would make it float32
    if again and node.args[0].kind == "bool":
        if word == "sum":
            return (
                _reduction(node, name, acc, value)[0],
                f"{acc} += tl.where({mask}, {value}, 0)",
                f"{name} = rows.total({acc})",
            )
        end = f"{name} = {'~' if word == 'all' else ''}rows.holds({acc})"
        return f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], tl.int1)", f"{acc} = {acc} | ({mask} & {truth}.to(tl.int1))", end
    if node.args[0].kind == "bool" and word == "sum":
        return (
            f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], tl.int64)",
            f"{acc} += ({mask} & {truth}).to(tl.int64)",
            f"{name} = rows.total({acc})",
        )
    if word == "any":
        return (
            f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], tl.int1)",
            f"{acc} = {acc} | ({mask} & {truth})",
            f"{name} = rows.holds({acc})",
        )
    if word == "all":
        return (
            f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], tl.int1)",
            f"{acc} = {acc} | ({mask} & ~{truth})",
            f"{name} = ~rows.holds({acc})",
        )
    if word == "logsumexp":
        lanes, group = ("1", "1") if again else ("LANES", "GROUP")
        return (
            f"{name}_top, {acc} = {_IN_LANES.replace('LANES', lanes)}",
            f"{name}_top, {acc} = rows.exponentials({name}_top, {acc}, {value}, {mask}, {lanes}, {group})",
            f"{name} = rows.logarithm({name}_top, {acc}, {lanes})",
        )
    whole = node.kind == "int"
    neutral, dtype = (_WHOLE if whole else _NEUTRAL)[word], "tl.int64" if whole else "COMPUTE"
    taken = f"tl.where({mask}, {_wide(value) if whole and word in EXTREMES else value}, {neutral})"
    if word in ("sum", "mean"):
        end = f"rows.mean({acc}, n_reduced)" if word == "mean" else f"rows.total({acc})"
        return f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], {dtype})", f"{acc} += {taken}", f"{name} = {end}"
    start = f"{acc} = tl.full([BLOCK_K, BLOCK_R], {neutral}, {dtype})"
    if word == "prod":
        return start, f"{acc} *= {taken}", f"{name} = rows.product({acc})"
    return (
        start,
        f"{acc} = {word}imum({acc}, {taken})",
        f"{name} = rows.{'largest' if word == 'max' else 'smallest'}({acc})",
    )
