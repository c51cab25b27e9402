"""Lowering of steps: one function that updates a tile of one tensor, and the kernel that calls it for a tile of many.

Takes the `Lowering` of an op and its stage, returns the `StageText`. What formulas make of attrs alone is read from a table on
the device, so that no change of it compiles or captures anything again.

    param: param - lr * d    ->  lr = steps.number(numbers_ptr, 0, COMPUTE)
                                 param = tl.load(param_ptr + i, mask=mask).to(COMPUTE)
                                 ...
                                 tl.store(param_ptr + i, param - lr * d, mask=mask)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from codegen import steps
from codegen.ir import spell, walk
from codegen.lower import Item, KernelText, Lowering, Printer, StageText, filled, loaded, python
from codegen.spec import Name
from codegen.stages import Part, Stage, unlike


@dataclass(frozen=True)
class StepText(KernelText):
    """The kernel of a step, and the function that holds the formulas."""

    update: KernelText = KernelText("", (), ())
    passed: tuple[str, ...] = ()
    """What the kernel hands on to that function, beside the tile."""
    addresses: int = 0
    """How many a tensor has in the table: those of its copy, its gradient and its state."""

    def call(self, mask: str, aligned: bool) -> str:
        """The call of that function for a tile."""
        own = ("row_ptr", "numbers_ptr", "scale_ptr", "start", "i", mask, *self.passed, str(aligned))
        return filled(f"{self.update.name}(", own, ")")

    @property
    def text(self) -> str:
        return self.update.text


def lowered_step(owner: Lowering, stage: Stage) -> StageText:
    """The text of the one stage of a step."""
    return _Step(owner, stage).text()


_POINTERS = ("row_ptr", "numbers_ptr", "scale_ptr", "copy_ptr")
"""The kernel's own."""


def _constants(*names: str) -> tuple[str, ...]:
    return tuple(f"{n}: tl.constexpr" for n in names)


class _Step:
    def __init__(self, owner: Lowering, stage: Stage) -> None:
        self.owner, self.stage = owner, stage
        self.tensors = [t.name for t in steps.tensors(owner.op)]
        update = owner.op.update
        entries = update.entries if update is not None else ()
        self.sources = {e.name: e.expr.id if isinstance(e.expr, Name) else "" for e in entries}
        """The statement that each tensor takes its value of, where that is all of its formula."""
        self.pointers = {n: unlike(f"{n}_ptr", _POINTERS) for n in self.tensors}
        self.trained = steps.trained(owner.op).name
        self._name_numbers()

    def _name_numbers(self) -> None:
        """Statements of attrs alone keep their names, where a name has one meaning in all variants."""
        meanings: dict[str, set[str]] = {}
        for part in self.stage.parts:
            for bound in part.graph.statements:
                node = bound.node
                own = node.host and node.op != "const" and (node.op != "attr" or node.params[2] is not None)
                meanings.setdefault(bound.name, set()).add(python(node) if own else "")
        for name, texts in meanings.items():
            text = next(iter(texts))
            if len(texts) == 1 and text and text not in self.owner.hosted.values():
                self.owner.hosted[self.owner.names[name]] = text

    def text(self) -> StageText:
        exacting = {spell(n) for p in self.stage.parts for n in walk([s.node for s in p.stores])}
        used, body = self.owner.merged(self.stage.parts, exacting, self._items)
        numbers = tuple(used.scalars)
        prelude = ["numbers_ptr = steps.own(row_ptr, numbers_ptr)"] if numbers else []
        prelude += [f"{n} = steps.number(numbers_ptr, {k}, COMPUTE)" for k, n in enumerate(numbers)]
        handed = (*used.choices, "DTYPES", "COMPUTE")
        tables = ("numbers_ptr", "scale_ptr")
        own = ("row_ptr", *tables, "start", "i", "mask", *_constants(*handed, "ALIGNED"))
        params = ("work_ptr", "table_ptr", *tables, "found_inf_ptr", *_constants(*handed, "BLOCK"))
        name = self.owner.op.name
        update = KernelText(f"{name}_update", own, tuple(body), tuple(prelude))
        count = 1 + len(self.tensors)
        kernel = StepText(f"{name}_step", params, (), (), "step", numbers, update, handed, count)
        return StageText(self.stage, kernel)

    def _items(self, part: Part, printer: Printer, aliases: Collection[str]) -> list[Item]:
        graph, stores = part.graph, part.stores
        roots = [s.node for s in stores]
        read = {n.params[0] for n in walk(roots) if n.op == "read"}
        written = {s.name for s in stores}
        out = [i for n in self.tensors if n in read | written for i in self._load(n, n in read)]
        bindings = (*graph.bindings, *graph.update_let)
        out += self.owner.statements(graph, printer, bindings, roots, aliases)
        named = {i.key[1] for i in out if i.key[0] == "let"}
        for store in stores:
            own = self.sources[store.name]
            out += self._store(
                store.name, self.owner.names[own] if own in named else printer.stored(store.node, "float")
            )
        return out

    def _load(self, name: str, read: bool) -> Iterable[Item]:
        """Where the tile of a tensor begins, and its elements."""
        word = 1 + self.tensors.index(name)
        yield Item(
            ("load", f"{name}_ptr"),
            (f"{self.pointers[name]} = steps.address(row_ptr, {word}, start, DTYPES, ALIGNED)",),
        )
        if read:
            value = loaded(f"{self.pointers[name]} + i", "float", "float")
            value = f"steps.scaled({value}, scale_ptr)" if name in {t.name for t in self.owner.op.inputs} else value
            yield Item(("load", name), (f"{self.owner.names[name]} = {value}",))

    def _store(self, name: str, value: str) -> Iterable[Item]:
        """What is trained is stored twice where there is a copy of it to compute with."""
        if name != self.trained:
            yield Item(("store", name), (f"tl.store({self.pointers[name]} + i, {value}, mask=mask)",))
            return
        new = unlike(f"new_{name}", self.owner.names.values())
        lines = (
            f"{new} = {value}",
            f"tl.store({self.pointers[name]} + i, {new}, mask=mask)",
            "if DTYPES[0] is not None:",
            "    copy_ptr = steps.address(row_ptr, 0, start, DTYPES, ALIGNED)",
            f"    tl.store(copy_ptr + i, {new}, mask=mask)",
        )
        yield Item(("store", name), lines)
