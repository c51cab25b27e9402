"""Lowering of rows: the passes over a row, each with its loads, its statements and its reductions.

Takes an `OpPlan` with `rows`, returns a `Module` whose kernels are `RowKernel`s. A value of one element a row (`rstd`) is
computed between two passes, what has the axes of a row again in each pass that needs it.

    rstd = rsqrt(mean(x * x, N) + eps)  ->  pass 1: rstd_mean_acc += tl.where(mask, x * x, 0.0)
    y = x * rstd                            then:   rstd_mean = rows.total(rstd_mean_acc) / n_reduced
                                                    rstd = rsqrt(rstd_mean + eps)
                                            last:   y = x * rstd, and the store
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from codegen.ir import ATOM, Bound, Graph, Node, Target, walk
from codegen.lower import Item, KernelText, Lowering, Module, Printer, Used, loaded, lower, safe
from codegen.rows import level, summed
from codegen.schedule import OpPlan
from codegen.variants import Variant

_NEUTRAL = {"sum": "0.0", "mean": "0.0", "max": 'float("-inf")', "min": 'float("inf")', "prod": "1.0"}


@dataclass(frozen=True)
class Pass:
    """One walk over the elements of a row: accumulators, the loop's body, and what follows it."""

    starts: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class RowKernel(KernelText):
    """A kernel whose programs have whole rows. `body` is what comes before the first pass, and `tail` after the last."""

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
    """Numbers of elements are known where the kernel runs: what is computed of them is no number of the host."""

    def _print(self, node: Node) -> tuple[str, int]:
        if node.serial in self.names:
            return self.names[node.serial], ATOM
        if node.op == "size":
            rows = self.owner.plan.rows
            assert rows is not None
            axes = frozenset(node.params)
            words = [n for n, part in (("n_kept", rows.kept), ("n_reduced", rows.reduced)) if axes & part]
            return f"scalar({' * '.join(words)}, COMPUTE)", ATOM
        return super()._print(node)

    def hosted(self, node: Node) -> bool:
        return super().hosted(node) and not any(n.op == "size" for n in walk([node]))


@dataclass
class _Sections:
    """The statements of one variant by where they stand."""

    items: dict[tuple[str, int], list[Item]] = field(default_factory=dict)

    def add(self, place: str, number: int, items: Iterable[Item]) -> None:
        self.items.setdefault((place, number), []).extend(items)


def lowered(plan: OpPlan, mode: str = "training") -> Module:
    """The text of an op's kernels, whatever its schedule. `mode` inference leaves the backward out."""
    return lower(plan, mode) if plan.rows is None else lower_rows(plan, mode)


def lower_rows(plan: OpPlan, mode: str = "training") -> Module:
    """The text of an op's row kernels."""
    return _RowLowering(plan).module(mode == "training")


class _RowLowering(Lowering):
    def __init__(self, plan: OpPlan) -> None:
        super().__init__(plan)
        assert plan.rows is not None
        self.rows = plan.rows
        self.temps: dict[tuple[str, str, int], str] = {}
        self.shared = self.finishing = self.summing = False
        self.parts: dict[str, str] = {}
        self.finish: RowKernel | None = None

    def _place(self, key: tuple[str, ...]) -> tuple[int, int]:
        return (0, 0) if key[0] == "finish" else super()._place(key)

    def _tile(self, node: Node) -> bool:
        return bool(node.axes & self.rows.reduced)

    def _find_rounded(self) -> None:
        """So are all of one value a row: a quotient costs nothing beside the row, and what is taken off each element, or
        divides it, must be the constant that a constant row has."""
        super()._find_rounded()
        for _, graph in self.plan.graphs:
            for node in walk([*graph.roots(), *(b.node for b in (*graph.bindings, *graph.let))]):
                if node.op == "div" and not node.host and node.kind == "float" and not self._tile(node):
                    self.rounded.add(node.serial)

    # -------------------------------------------------------------------------------- kernels

    def module(self, training: bool) -> Module:
        if not training or not self.plan.gradients:  # nothing reads them
            self.rows = replace(self.rows, saved=())
        out = super().module(training)
        return replace(out, finish=self.finish)

    def _forward(self) -> KernelText:
        def targets(graph: Graph) -> list[tuple[str, Node, Target | None]]:
            saved = [(b.name, b.node, None) for b in graph.bindings if b.name in self.rows.saved]
            return [*((t.name, t.node, t) for t in graph.outputs if t.node is not None), *saved]

        names = [o.name for o in self.op.outputs]
        writes = [p for n in (*names, *self.rows.saved) for p in self._strided(n, self._axes_of(n))]
        optional = set(self.rows.saved)
        arguments = (self.plan.graphs, self.plan.forward_reads, (), targets, writes, optional, self.plan.exacting[0])
        self.shared = self._shareable(targets)
        kernel = self._kernel_of("forward", *arguments)
        if self.shared:
            self.finishing = True
            self.finish = self._kernel_of("finish", *arguments)
            self.finishing = False
        return kernel

    def _shareable(self, targets: Callable[[Graph], list[tuple[str, Node, Target | None]]]) -> bool:
        """Whether several programs may share a row: one pass, and nothing is stored that has elements."""
        graphs = [g for _, g in self.plan.graphs]
        deep = any(self._depth(g, targets(g), ()) != 1 for g in graphs)
        tiled = any(self._axes_at(n, t, g) & self.rows.reduced for g in graphs for n, _, t in targets(g))
        return len(graphs) == 1 and not deep and not tiled

    def _backward(self) -> KernelText:
        def targets(graph: Graph) -> list[tuple[str, Node, Target | None]]:
            return [(f"d{t.name}", t.node, t) for t in graph.gradients if t.node is not None]

        whole = [n for n in self.plan.gradients if n not in self.rows.partial]
        writes = [p for n in whole for p in self._strided(f"d{n}", self._axes_of(n))]
        writes += [f"d{n}_part_ptr" for n in self.rows.partial]
        optional = {f"d{n}" for n in self.plan.gradients} if len(self.plan.gradients) > 1 else set()
        kernel = self._kernel_of(
            "backward", self.plan.floats, self.plan.backward_reads, self.rows.saved, targets, writes, optional,
            self.plan.exacting[1],
        )  # fmt: skip
        return kernel

    def _kernel_of(self, suffix: str, graphs: Sequence[tuple[Variant, Graph]], reads: Sequence[str], kept: Sequence[str],
                   targets: Callable[[Graph], list[tuple[str, Node, Target | None]]], writes: list[str],
                   optional: Collection[str], exacting: Collection[str]) -> RowKernel:  # fmt: skip
        used = Used()
        self.summing = suffix == "backward" and bool(self.rows.partial)
        if self.finishing:  # the elements were read by the first stage
            reads = [n for n in reads if not self._axes_of(n) & self.rows.reduced]
        last = max(self._depth(g, targets(g), kept) for _, g in graphs)
        sections = {
            v: self._sections(g, _RowPrinter(self, g, used, exacting), reads, kept, targets(g), optional, last)
            for v, g in graphs
        }
        partial = tuple(f"d{n}" for n in self.rows.partial) if suffix == "backward" else ()
        parts = self.parts if suffix != "backward" and self.shared else {}
        shared = suffix != "finish" and not partial and (last == 0 or bool(parts))

        def merged(place: str, number: int) -> tuple[str, ...]:
            return tuple(self.merge({v: s.items.get((place, number), []) for v, s in sections.items()}, used))

        count = 1 + max(number for s in sections.values() for place, number in s.items if place != "tail")
        once, body = merged("once", 0), merged("head", 0)
        passes = [Pass(merged("start", p), merged("loop", p), merged("after", p)) for p in range(count)]
        tail = merged("tail", 0)
        asked = [f"{n}_ptr" for n in used.asked if n not in reads]
        self.present = tuple(n for n in used.asked if n not in reads) if suffix == "backward" else self.present
        params = [p for n in (*reads, *kept) for p in self._strided(n, self._axes_of(n))] + asked + writes
        prelude = [f"{n} = scalar({n}, COMPUTE)" for n in used.scalars]
        lines = [*once, *body, *tail, *(line for p in passes for line in (*p.body, *p.after))]
        counted = not self.finishing or any("n_reduced" in line for line in lines)
        every = [
            *params, *(f"{n}_part_ptr" for n in parts), "kept_sizes", *([] if self.finishing else ["reduced_sizes"]), "n_kept: tl.int64",
            *(["n_reduced: tl.int64"] if counted else []), *(["n_parts: tl.int64"] if self.finishing else ["span: tl.int64"] if partial or shared else []),
            *(f"{n}: tl.float64" for n in used.scalars), *(f"{n}: tl.constexpr" for n in used.choices),
            *(["HALF: tl.constexpr"] if used.coarse else []), "COMPUTE: tl.constexpr", "WIDE: tl.constexpr", "RAGGED: tl.constexpr",
            *([] if self.finishing else ["LOOP: tl.constexpr"]), "BLOCK_K: tl.constexpr", "BLOCK_R: tl.constexpr",
            *(["STAGES: tl.constexpr"] if partial else []),
        ]  # fmt: skip
        return RowKernel(
            f"{self.op.name}_{suffix}",
            tuple(every),
            body,
            tuple(prelude),
            tuple(p for p in passes if p.body),
            tail,
            once,
            partial,
            tuple(parts.items()),
            shared,
        )

    def _axes_of(self, name: str) -> frozenset[str]:
        """The axes of a tensor, or of a kept statement."""
        for _, graph in self.plan.graphs:
            if name in graph.tensors:
                return frozenset(graph.tensors[name].axes)
            found = [b.node.axes for b in graph.bindings if b.name == name]
            if found:
                return found[0]
        return frozenset()

    def _axes_at(self, name: str, target: Target | None, graph: Graph) -> frozenset[str]:
        """The axes of what a target is stored to."""
        return self._axes_of(target.name if target is not None and target in graph.gradients else name)

    def _strided(self, name: str, axes: frozenset[str]) -> list[str]:
        return [
            f"{name}_ptr",
            *([f"{name}_kept_strides"] if axes & self.rows.kept else []),
            *([f"{name}_reduced_strides"] if axes & self.rows.reduced else []),
        ]

    def _address(self, name: str, axes: frozenset[str]) -> str:
        words = [f"{name}_ptr"]
        words += [f"offset(k, k_at, {name}_kept_strides)"] if axes & self.rows.kept else []
        words += [f"offset(r, r_at, {name}_reduced_strides)"] if axes & self.rows.reduced else []
        return " + ".join(words)

    def _mask(self, axes: frozenset[str]) -> str:
        kept, reduced = axes & self.rows.kept, axes & self.rows.reduced
        return "mask" if kept and reduced else "within" if reduced else "exists"

    # -------------------------------------------------------------------------------- one variant

    def _sections(self, graph: Graph, printer: _RowPrinter, reads: Sequence[str], kept: Sequence[str],
                  targets: list[tuple[str, Node, Target | None]], optional: Collection[str], last: int) -> _Sections:  # fmt: skip
        out = _Sections()
        bindings = graph.bindings if any(t in graph.outputs for _, _, t in targets) else self._backward_names(graph)
        owners = [
            *((b.node, self.names[b.name]) for b in bindings),
            *((n, self._own(n, t, graph, name)) for name, n, t in targets),
        ]
        for b in graph.bindings:
            if b.name in kept:
                printer.names[b.node.serial] = self.names[b.name]
        given = set(printer.names)
        roots = [self._term(n, t, graph) for _, n, t in targets]
        live = list(self._below(roots, printer.names))
        levels: dict[int, int] = {serial: 0 for serial in printer.names}
        for node in live:
            level(node, levels)
        self._head(out, graph, printer, live, reads, kept)
        self._row_statements(out, printer, bindings, live, levels, 0, ("head", 0))
        reductions = [n for n in live if n.op == "reduce"]
        for number in range(last):
            now = [n for n in reductions if levels[n.serial] == number + 1]
            self._pass(
                out,
                graph,
                printer,
                bindings,
                reads,
                number,
                [(n, self._name_of(n, owners, printer.names, given)) for n in now],
            )
            self._row_statements(out, printer, bindings, live, levels, number + 1, ("after", number))
        self._last_pass(out, graph, printer, bindings, reads, last, targets, optional)
        return out

    @staticmethod
    def _backward_names(graph: Graph) -> tuple[Bound, ...]:
        """All statements; what an output and the backward's own text both name has the backward's name."""
        outputs, own = {t.name for t in graph.outputs}, {b.node.serial for b in graph.let}
        return (*(b for b in graph.bindings if b.name not in outputs or b.node.serial not in own), *graph.let)

    def _depth(self, graph: Graph, targets: list[tuple[str, Node, Target | None]], kept: Sequence[str]) -> int:
        """How many passes come before the last: the same for all variants, so that they store in one place."""
        levels = {b.node.serial: 0 for b in graph.bindings if b.name in kept}
        return max((level(self._term(n, t, graph), levels) for _, n, t in targets), default=0)

    def _over_rows(self, target: Target | None, graph: Graph) -> bool:
        return target is not None and target in graph.gradients and target.name in self.rows.partial

    def _term(self, node: Node, target: Target | None, graph: Graph) -> Node:
        """What is stored, or is summed over the rows."""
        return (
            node.args[0]
            if target is not None and target in graph.gradients and summed(target, graph, self.rows.kept)
            else node
        )

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

    def _head(self, out: _Sections, graph: Graph, printer: _RowPrinter, live: list[Node], reads: Sequence[str],
              kept: Sequence[str]) -> None:  # fmt: skip
        """Where a row begins in each tensor, and loads of what has one value a row."""
        for name in reads:
            tensor = graph.tensors.get(name)
            if tensor is None or not any(n.op == "read" and n.params[0] == name for n in live):
                continue
            axes = frozenset(tensor.axes)
            if axes & self.rows.reduced and axes & self.rows.kept:
                text = f"{name}_row = {name}_ptr + offset(k, k_at, {name}_kept_strides)"
                out.add("head", 0, [Item(("load", f"{name}_row"), (text,))])
            elif self._once(axes):
                text = f"{name}_once = tl.load({self._address(name, axes)}, mask=within)"
                out.add("once", 0, [Item(("load", name), (text,))])
            elif not axes & self.rows.reduced:
                text = f"{self.names[name]} = {loaded(self._address(name, axes), tensor.kind, tensor.dtype, self._mask(axes))}"
                out.add("head", 0, [Item(("load", name), (text,))])
        reached = {n.serial for n in live}
        for b in graph.bindings:
            if b.name in kept and b.node.serial in reached:
                text = f"{self.names[b.name]} = {loaded(self._address(b.name, b.node.axes), b.node.kind, 'compute', 'exists')}"
                out.add("head", 0, [Item(("load", b.name), (text,))])

    def _once(self, axes: frozenset[str]) -> bool:
        """Whether a tensor is read before the loop over the rows of a program."""
        return self.summing and bool(axes & self.rows.reduced) and not axes & self.rows.kept

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
        text, name = printer.text(bound.node), self.names[bound.name]
        printer.names[bound.node.serial] = name
        comment = f"  # {bound.comment}" if bound.comment else ""
        return Item(("let", bound.name), (*(f"# {c}" for c in bound.above), f"{name} = {text}{comment}"))

    def _elements(self, graph: Graph, printer: _RowPrinter, bindings: Iterable[Bound], reads: Sequence[str],
                  roots: list[Node]) -> list[Item]:  # fmt: skip
        """Loads and statements of one pass; the names they give hold in this pass alone."""
        live = list(self._below(roots, printer.names))
        reached = {n.serial for n in live}
        out = []
        for name in reads:
            tensor = graph.tensors.get(name)
            if tensor is None or not frozenset(tensor.axes) & self.rows.reduced:
                continue
            if any(n.op == "read" and n.params[0] == name for n in live):
                axes = frozenset(tensor.axes)
                row = f"{name}_row" if axes & self.rows.kept else f"{name}_ptr"
                address = f"{row} + offset(r, r_at, {name}_reduced_strides)"
                if self._once(axes):
                    text = f"(tl.load({address}, mask=within) if LOOP else {name}_once).to(COMPUTE)"
                else:
                    text = loaded(address, tensor.kind, tensor.dtype, self._mask(axes))
                out.append(Item(("load", name), (f"{self.names[name]} = {text}",)))
        for bound in bindings:
            node = bound.node
            if (
                node.serial in reached
                and self._tile(node)
                and node.op not in ("const", "read")
                and node.serial not in printer.names
            ):
                out.append(self._statement(printer, bound))
        return out

    def _pass(self, out: _Sections, graph: Graph, printer: _RowPrinter, bindings: Sequence[Bound], reads: Sequence[str],
              number: int, reductions: list[tuple[Node, str]]) -> None:  # fmt: skip
        before = dict(printer.names)
        if not self.finishing:
            out.add("loop", number, self._elements(graph, printer, bindings, reads, [n.args[0] for n, _ in reductions]))
        finished = []
        for node, name in reductions:
            acc = f"{name}_acc"
            part = f"tl.load({name}_part_ptr + r * n_kept + k, mask=mask)"
            start, step, finish = _reduction(
                node, name, acc, part if self.finishing else printer.text(node.args[0]), self.finishing
            )
            self.parts[name] = _part(node, acc, finish)
            if "imum(" in step:
                self.use(f"math.{node.params[0]}imum")
            out.add("start", number, [Item(("start", name), (start,))])
            out.add("loop", number, [Item(("acc", name), (step,))])
            finished.append((node, name, finish))
        printer.names = before
        for node, name, finish in finished:
            out.add("after", number, [Item(("finish", name), (finish,))])
            printer.names[node.serial] = name

    def _own(self, node: Node, target: Target | None, graph: Graph, name: str) -> str:
        return (
            self.grads[target.name] if target is not None and target in graph.gradients else self.names.get(name, name)
        )

    def _name_of(self, node: Node, owners: Sequence[tuple[Node, str]], known: Collection[int],
                 given: set[int]) -> str:  # fmt: skip
        """A reduction's name: its statement's, or made of the word and the statement it stands in first. Variants share it."""
        owner = next(((n, name) for n, name in owners if any(part is node for part in self._below([n], known))), None)
        assert owner is not None
        if owner[0] is node:
            return owner[1]
        word = {"sum": "total", "max": "top", "min": "bottom", "prod": "product"}.get(node.params[0], node.params[0])
        stated = {n.serial for n, _ in owners} | given
        alike = [
            n for n in self._below([owner[0]], given)
            if n.op == "reduce" and n.params[0] == node.params[0] and n.serial not in stated
        ]  # fmt: skip
        key = (owner[1], word, next(i for i, n in enumerate(alike) if n is node))
        if key not in self.temps:
            name = safe(f"{owner[1]}_{word}" if key[2] == 0 else f"{owner[1]}_{word}{key[2] + 1}")
            taken = {*self.temps.values(), *self.names.values(), *self.grads.values()}
            while name in taken:
                name += "_"
            self.temps[key] = name
        return self.temps[key]

    def _last_pass(self, out: _Sections, graph: Graph, printer: _RowPrinter, bindings: Sequence[Bound], reads: Sequence[str],
                number: int, targets: list[tuple[str, Node, Target | None]], optional: Collection[str]) -> None:  # fmt: skip
        """The last pass, with what has elements, and the stores of what has one value a row."""
        tiles = [(n, node, t) for n, node, t in targets if self._axes_at(n, t, graph) & self.rows.reduced]
        before = dict(printer.names)
        roots = [self._term(node, t, graph) for _, node, t in tiles]
        out.add("loop", number, self._elements(graph, printer, bindings, reads, roots) if tiles else [])
        for (name, _, target), root in zip(tiles, roots):
            out.add("loop", number, self._target(graph, printer, name, root, target, optional))
        printer.names = before
        for name, node, target in targets:
            if (name, node, target) not in tiles:
                out.add("tail", 0, self._target(graph, printer, name, node, target, optional))

    def _target(self, graph: Graph, printer: _RowPrinter, name: str, node: Node, target: Target | None,
                optional: Collection[str]) -> list[Item]:  # fmt: skip
        kind = graph.tensors[name].kind if name in graph.tensors else "float"
        text = printer.stored(node, kind)
        items = []
        if (
            name.startswith("d")
            and target in graph.gradients
            and node.serial not in printer.names
            and node.op != "const"
        ):
            assert target is not None
            own = self.grads[target.name]
            items.append(Item(("grad", name), (f"{own} = {text}",)))
            text = own
        if self._over_rows(target, graph):
            line = f"{name}_acc = rows.add_columns({name}_acc, {text}, mask, {name}_part_ptr, r, within, start_k > first, n_reduced, LOOP)"
            return [*items, Item(("store", name), (line,))]
        axes = self._axes_at(name, target, graph)
        line = f"tl.store({self._address(name, axes)}, {text}, mask={self._mask(axes)})"
        lines = (f"if {name}_ptr is not None:", f"    {line}") if name in optional else (line,)
        return [*items, Item(("store", name), lines)]


def _part(node: Node, acc: str, finish: str) -> str:
    """What a program has of a reduction that it shares: a mean is of all, and its total is divided at the end."""
    return f"rows.total({acc})" if node.params[0] == "mean" else finish.partition(" = ")[2].lstrip("~")


def _reduction(node: Node, name: str, acc: str, value: str, again: bool = False) -> tuple[str, str, str]:
    """How a reduction begins, takes in an element (`again`: what a program has), and ends."""
    word = node.params[0]
    truth = value if value.isidentifier() or again else f"({value})"
    if again and node.args[0].kind == "bool":
        if word == "sum":
            return (
                _reduction(node, name, acc, value)[0],
                f"{acc} += tl.where(mask, {value}, 0)",
                f"{name} = rows.total({acc})",
            )
        end = f"{name} = {'~' if word == 'all' else ''}rows.holds({acc})"
        return f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], tl.int1)", f"{acc} = {acc} | (mask & {truth}.to(tl.int1))", end
    if node.args[0].kind == "bool" and word == "sum":
        return (
            f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], tl.int64)",
            f"{acc} += (mask & {truth}).to(tl.int64)",
            f"{name} = rows.total({acc})",
        )
    if word == "any":
        return (
            f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], tl.int1)",
            f"{acc} = {acc} | (mask & {truth})",
            f"{name} = rows.holds({acc})",
        )
    if word == "all":
        return (
            f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], tl.int1)",
            f"{acc} = {acc} | (mask & ~{truth})",
            f"{name} = ~rows.holds({acc})",
        )
    neutral = _NEUTRAL[word]
    taken = f"tl.where(mask, {value}, {neutral})"
    if word in ("sum", "mean"):
        end = f"rows.mean({acc}, n_reduced)" if word == "mean" else f"rows.total({acc})"
        return f"{acc} = tl.zeros([BLOCK_K, BLOCK_R], COMPUTE)", f"{acc} += {taken}", f"{name} = {end}"
    start = f"{acc} = tl.full([BLOCK_K, BLOCK_R], {neutral}, COMPUTE)"
    if word == "prod":
        return start, f"{acc} *= {taken}", f"{name} = rows.product({acc})"
    return (
        start,
        f"{acc} = {word}imum({acc}, {taken})",
        f"{name} = rows.{'largest' if word == 'max' else 'smallest'}({acc})",
    )
