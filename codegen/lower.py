"""Lowering: plans become the text of kernels, statement by statement as the spec has them.

Takes an `OpPlan`, returns a `Module`: parameter lists and bodies of the kernels, and what the class beside them states. Here
is what all stages share, and the elementwise one; `lower_rows` has that of rows.

    y = x * s, s = sigmoid(x)  ->  s = sigmoid(x)
                                   y = x * s
                                   tl.store(y_ptr + i, y, mask=mask)

Statements that differ between variants stand under `if approximate == "tanh":` on a constexpr.
"""

from __future__ import annotations

import builtins
import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from codegen.diagnostics import Report
from codegen.ir import ATOM, INFIX, SIGN, Bound, Graph, Node, Target, number, spell, walk
from codegen.kinds import floats_of_ints
from codegen.primitives import TABLE
from codegen.schedule import OpPlan, stripped
from codegen.spec import Axes, Dim, TensorDecl
from codegen.stages import Part, Stage, telling, unlike
from codegen.variants import Atom, Variant, atoms

_OWN = {"i", "mask", "n", "sizes", "patch_sizes", "tl", "triton", "start", "tile", "at", "coordinates", "element", "zeros", "added_up", "offset", "scalar", "kept_tile", "reduced_tile", "span", "k", "r",
        "n_kept", "n_reduced", "exists", "within", "first", "last", "share", "part", "largest", "kept_sizes", "reduced_sizes", "k_at", "r_at", "start_k", "LOOP", "STAGES", "LANES", "GROUP",
        "rows", "steps", "row_ptr", "COMPUTE", "ALIGNED", "DTYPES"}  # fmt: skip
_OPTIONS = {
    "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "grid", "warmup", "debug", "instrumentation_mode",
}  # fmt: skip
"""Keywords of a launch: a parameter of such a name would be given twice."""
_RESERVED = (
    _OWN
    | _OPTIONS
    | set(dir(builtins))
    | {row.triton.split(".")[-1] for row in TABLE.values() if row.triton.startswith("math.")}
)


_ROUNDING = ("floor", "ceil", "round", "trunc", "floordiv", "mod", "fmod", "lt", "le", "gt", "ge", "eq", "ne")
_KIND_TESTS = {
    "float": "COMPUTE.is_floating()",
    "int": "COMPUTE.is_int() and COMPUTE != tl.int1",
    "bool": "COMPUTE == tl.int1",
}
"""Compile-time tests of what the numbers are that a kernel computes with."""


_EMITTED = re.compile(
    r"(_ptr|_strides|_number|_sum|_acc|_row|_at|_once|_carry|_stride_\w+|_part|_\d+|^c\d+|^size_\w+)$"
)
"""The endings of names that lowering makes itself."""


def safe(name: str) -> str:
    """A value's name in a kernel: renamed by `_` where it would hide what the kernel uses itself."""
    return f"{name}_" if name in _RESERVED or _EMITTED.search(name) else name


def natural(name: str) -> list[tuple[int, int | str]]:
    """The key by which import sorters order names: digits as numbers, so `log2` comes before `log10`."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def filled(head: str, items: Sequence[str], tail: str) -> str:
    """A list in parentheses on one line; a long one several items a line, and left alone by formatters."""
    line = f"{head}{', '.join(items)}{tail}"
    if len(line) <= 120:
        return line
    text = textwrap.fill(", ".join(items).replace(": ", ":\0") + ",", 112, break_on_hyphens=False).replace("\0", " ")
    return f"{head}\n{textwrap.indent(text, '    ')}\n{tail}  # fmt: skip"


# ---------------------------------------------------------------------------------------------- what is emitted


@dataclass(frozen=True)
class KernelText:
    """A jit function: its parameters as printed, and its body, one statement a line, indented by its own nesting."""

    name: str
    params: tuple[str, ...]
    body: tuple[str, ...]
    prelude: tuple[str, ...] = ()
    """Statements that stand before the loop of a kernel that has one."""
    nest: str = "elements"
    """The loops around the body: elements, sums (of elements), rows, step."""
    numbers: tuple[str, ...] = ()
    """Host numbers that it reads from a table, in their order there; others are parameters."""

    @property
    def text(self) -> str:
        """All statements that are not the nest's own."""
        return "\n".join((*self.prelude, *self.body))

    @property
    def strided(self) -> bool:
        """Whether it reads or writes a tensor that may have strides."""
        return any("offset(i, at, " in line for line in self.body)

    @property
    def header(self) -> str:
        """The `def` line; a long one is filled, several parameters a line, and left alone by formatters."""
        return filled(f"def {self.name}(", self.params, "):")


When = tuple[tuple[str, tuple[str, ...]], ...]
"""Choices with their values as Python has them."""


@dataclass(frozen=True)
class StageText:
    """The kernels of one stage."""

    stage: Stage
    kernel: KernelText
    finish: KernelText | None = None
    """The second kernel of a stage whose rows several programs share."""
    when: When = ()
    """The choices under which it has something to do."""


@dataclass(frozen=True)
class Module:
    """Everything that a template fills in for one op."""

    plan: OpPlan
    forward: tuple[StageText, ...]
    backward: tuple[StageText, ...]
    scalars: tuple[tuple[str, str], ...]
    """Host numbers: parameter name and Python expression over the attrs."""
    choices: tuple[tuple[str, str], ...]
    imports: tuple[str, ...]
    """Lines of names from the runtime's math."""
    passes: tuple[tuple[str, str, str], ...]
    """Gradients that are a cotangent as it is, with the test under which."""
    present: tuple[str, ...]
    """Tensors that the backward takes for their presence alone."""
    equals: tuple[tuple[str, str], ...]
    """Gradients that are the gradient of another tensor, before what was broadcast is summed."""
    updates: tuple[tuple[str, When], ...]
    """Buffers that are written in place, and when."""
    chosen: tuple[tuple[str, tuple[tuple[str, tuple[str, ...], tuple[Dim, ...]], ...]], ...]
    """Outputs whose dims depend on a choice: the choice, its values, and the dims they have then."""
    there: tuple[tuple[str, When], ...] = ()
    """State that is not always there, and when it is."""

    @property
    def kernels(self) -> tuple[KernelText, ...]:
        """Every kernel in the order of launches."""
        return tuple(k for s in (*self.forward, *self.backward) for k in (s.kernel, s.finish) if k is not None)


@dataclass(frozen=True)
class Item:
    key: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass
class Used:
    """What the statements of one kernel need as parameters."""

    scalars: dict[str, str] = field(default_factory=dict)
    """Host numbers, with their kind: one is whole if it is in all variants."""
    choices: dict[str, None] = field(default_factory=dict)
    asked: dict[str, None] = field(default_factory=dict)
    """Tensors whose presence is asked."""
    coarse: bool = False
    """Whether a call takes its cheaper form where the results are stored in half precision."""

    @property
    def prelude(self) -> list[str]:
        """Host numbers as the kernel computes with them: whole ones are compared with indices, which float32 would round."""
        return [
            f"{name} = scalar({name}, {'tl.int64' if kind == 'int' else 'COMPUTE'})"
            for name, kind in self.scalars.items()
        ]


# ---------------------------------------------------------------------------------------------- expressions


class Printer:
    """Prints the nodes of one variant as Triton."""

    def __init__(self, owner: Lowering, graph: Graph, used: Used, exacting: Collection[str]) -> None:
        self.owner, self.graph, self.used, self.exacting = owner, graph, used, exacting
        self.names: dict[int, str] = {}
        for tensor in graph.tensors.values():
            self.names[graph.builder.read(tensor).serial] = owner.names.get(tensor.name) or safe(tensor.name)
        self.chosen = set(_chosen_numbers(graph))

    def text(self, node: Node) -> str:
        return self._print(node)[0]

    def _print(self, node: Node) -> tuple[str, int]:
        if node.serial in self.names:
            return self.names[node.serial], ATOM
        if hosted(node):
            name = self.owner.scalar(node, self.used)
            return (f"({name} != 0)" if node.kind == "bool" else name), ATOM
        if node.op == "const":
            return self._constant(node, False), SIGN if node.params[0] < 0 else ATOM
        if node.op in ("replace",):
            return self._print(node.args[1])
        if node.op in ("stop_gradient", "expand", "sum_to"):
            return self._print(node.args[0])
        if node.op == "cast":
            return self._cast(node), ATOM
        if node.op == "size":
            text = self.extent(node)
            return text, INFIX["mul"][1] if " * " in text else ATOM
        if node.op == "largest":
            return f"largest({node.params[0]}_ptr, COMPUTE)", ATOM
        if node.op == "neg" and any(t.node is node for t in self.graph.outputs):
            return self._function("math.negated", node.args, node), ATOM  # a stored zero shows its sign
        if node.op in ("neg", "not"):
            inner, level = self._print(node.args[0])
            return ("-" if node.op == "neg" else "~") + (inner if level >= SIGN else f"({inner})"), SIGN
        if node.op == "pow":
            return self._power(node)
        if node.op in INFIX and TABLE[node.op].triton == INFIX[node.op][0]:
            return self._infix(node)
        return self._function(TABLE[node.op].triton, node.args, node, self.coarse(node)), ATOM

    def extent(self, node: Node) -> str:
        """A number of elements, as the kernel has it: in 64 bits."""
        return self.owner.count

    def computed(self, node: Node) -> str:
        """An int as a float operation takes it. What is made of extents alone may be a constant of the kernel."""
        text, level = self._print(node)
        if sized(node):
            return f"scalar({text}, COMPUTE)"
        return f"{text if level >= ATOM else f'({text})'}.to(COMPUTE)"

    def stored(self, node: Node, kind: str) -> str:
        """The text of a value that is stored to a tensor of this kind: an int goes to a float tensor by a cast."""
        if kind != "float" or node.kind != "int":
            return f"scalar({self.text(node)}, tl.int64)" if sized(node) else self.text(node)
        return number(float(node.params[0])) if node.op == "const" else self.computed(node)

    def _constant(self, node: Node, argument: bool) -> str:
        value = node.params[0]
        if isinstance(value, float) and not np.isfinite(value):
            return f'float("{number(value)}")'
        if argument and isinstance(value, float) and float(np.float32(value)) != value:
            return f"scalar({value!r}, COMPUTE)"  # as an argument Triton would round it to float32
        return number(value)

    def _argument(self, node: Node, user: Node) -> str:
        if node.op == "const" and node.serial not in self.names:
            return self._constant(node, True)
        return self._floated(node, user)[0] if user.op == "where" else self._extents(node, user)

    def _floated(self, node: Node, user: Node) -> tuple[str, int]:
        """An operand; an int one of a float operation is converted to the compute dtype first."""
        among = user.kind == "float" or any(a.kind == "float" for a in user.args)
        if not among or node.kind != "int" or node.op == "const":
            return self._print(node)
        return self.computed(node), ATOM

    def _infix(self, node: Node) -> tuple[str, int]:
        sign, level = INFIX[node.op]
        words = [self._floated(a, node) for a in node.args]
        if node.op == "div" and self.owner.exact_division(node):
            return self._function("math.divide", node.args, node), ATOM
        left = words[0][0] if words[0][1] >= level + (level == 4) else f"({words[0][0]})"
        right = words[1][0] if words[1][1] > level else f"({words[1][0]})"
        return f"{left} {sign} {right}", level

    def _power(self, node: Node) -> tuple[str, int]:
        base, exponent = node.args
        value = exponent.params[0] if exponent.op == "const" else None
        text, level = self._print(base)
        if value in (2, 3, 4) and level == ATOM and text.isidentifier():
            return " * ".join([text] * int(value)), INFIX["mul"][1]
        if value == 2:
            return self._function("math.square", (base,), node), ATOM
        if value == 0.5:
            return self._function("math.sqrt", (base,), node), ATOM
        return self._function(TABLE[node.op].triton, node.args, node, self.coarse(node)), ATOM

    def _function(self, spelling: str, args: Sequence[Node], user: Node, coarse: bool = False) -> str:
        if user.op in TABLE and not TABLE[user.op].plain:
            words = [self._tensor(a, user) for a in args]
        else:
            words = [self._argument(a, user) for a in args]
        if user.serial in self.chosen:
            words[1] = self._tensor(args[1], user)
        words += ["HALF"] if coarse else []
        return f"{self.owner.use(spelling)}({', '.join(words)})"

    def _tensor(self, node: Node, user: Node) -> str:
        """An argument of a function that takes no constants."""
        return f"scalar({number(node.params[0])}, COMPUTE)" if node.op == "const" else self._extents(node, user)

    def _extents(self, node: Node, user: Node) -> str:
        """An argument of a function; an extent of 1 is a constant of the kernel, which is no tensor."""
        text = self._floated(node, user)[0]
        return f"scalar({text}, tl.int64)" if sized(node) and text == self.text(node) else text

    def coarse(self, node: Node) -> bool:
        """Whether the call may take its cheaper form; then the kernel is told when."""
        coarse = TABLE[node.op].coarse > 0 and spell(node) not in self.exacting
        self.used.coarse |= coarse
        return coarse

    def _cast(self, node: Node) -> str:
        if sized(node.args[0]) and node.params[0] == "float":
            return self.computed(node.args[0])
        inner, level = self._print(node.args[0])
        if node.args[0].kind == node.params[0]:
            return inner if level >= ATOM else f"({inner})"
        target = {"float": "COMPUTE", "int": "tl.int64", "bool": "tl.int1"}[node.params[0]]
        return f"{inner if level >= ATOM else f'({inner})'}.to({target})"


def _chosen_numbers(graph: Graph) -> Iterable[int]:
    """Choices between two numbers that a function is called with: of them Triton would make float32, whatever is computed with."""
    called = set[int]()
    for node in reversed(list(walk(graph.roots()))):
        if node.op in TABLE and node.op not in INFIX and (node.op != "where" or node.serial in called):
            called |= {a.serial for a in node.args}
        if node.op == "where" and node.kind == "float" and node.serial in called:
            if all(a.op == "const" for a in node.args[1:]):
                yield node.serial


def sized(node: Node) -> bool:
    """Whether an int is arithmetic on numbers of elements, which may be constants of the kernel; what a function returns is a tensor."""
    ops = {n.op for n in walk([node])}
    return node.kind == "int" and "size" in ops and ops <= {"size", "const", "add", "sub", "mul", "neg"}


# ---------------------------------------------------------------------------------------------- one op


class Lowering:
    def __init__(self, plan: OpPlan) -> None:
        self.plan, self.op = plan, plan.op
        self.atoms = atoms(plan.op, Report())
        self.grads: dict[str, str] = {}
        self.names = self._named()
        self.hosted: dict[str, str] = {}
        self.choices: dict[str, str] = {}
        let = plan.op.backward.let if plan.op.backward is not None else ()
        update = plan.op.update.let if plan.op.update is not None else ()
        self.order: dict[str, float] = {b.name: place for place, b in enumerate((*plan.op.forward, *update, *let))}
        self.questions: dict[str, str] = {}
        """The atom that each name of a choice asks for."""
        self.imports: dict[str, None] = {}
        self.rounded: set[Node] = set()
        """Quotients that must be IEEE's."""
        self.present: list[str] = []
        self.count = "n"
        """How many elements there are, as the kernel in hand has it."""
        self.without = self._without()
        """By gradient the variants that have none: its pointer is None there. It is called as in either kind of kernel."""
        self._find_rounded()
        own = f"math.{plan.op.name}"
        self.clashes = any(n.op in TABLE and TABLE[n.op].triton == own for _, g in plan.graphs for n in walk(g.roots()))
        """Whether a function of the runtime's math is called as the op is."""

    def _named(self) -> dict[str, str]:
        """What each tensor, gradient, attr and statement of the spec is called in the kernels: no two alike."""
        op = self.op
        out: dict[str, str] = {}
        outputs = [o.name for o in op.outputs]
        statements = [b.name for _, g in self.plan.graphs for b in (*g.bindings, *g.update_let, *g.let)]
        statements += [t.name for t in (*self.plan.saved, *self.plan.scratch)]
        cotangents = [f"d{n}" for n in outputs]
        for name in (*(t.name for t in op.arguments), *outputs, *cotangents):
            out[name] = unlike(safe(name), out.values())
        for name in self.plan.gradients:
            self.grads[name] = unlike(f"d{out[name]}", out.values())
        for name in (*(a.name for a in op.attrs), *statements):
            if name not in out:
                out[name] = unlike(safe(name), [*out.values(), *self.grads.values()])
        return out

    def _without(self) -> dict[str, list[Variant]]:
        found = {
            n: [v for v, g in self.plan.graphs if not any(t.name == n and t.node is not None for t in g.gradients)]
            for n in self.plan.gradients
        }
        return {key: variants for n, variants in found.items() for key in (n, f"d{n}")}

    # -------------------------------------------------------------------------------- parameters

    def use(self, spelling: str) -> str:
        """The name of a function, imported from the runtime's math where it is not `tl`'s."""
        if spelling.startswith("math."):
            name = spelling[5:]
            # One renamed import renames all after it: import sorters do not agree on a renamed one between plain ones.
            renamed = name == self.op.name or (self.clashes and natural(name) > natural(self.op.name))
            own = f"_{name}" if renamed else name  # no name of a spec begins so
            self.imports[f"{name} as {own}" if renamed else name] = None
            return own
        return spelling

    def _import_lines(self) -> list[str]:
        """What to import from the runtime's math, in the order that import sorters keep."""
        plain = sorted((n for n in self.imports if " as " not in n), key=natural)
        renamed = sorted((n for n in self.imports if " as " in n), key=natural)
        lines = [", ".join(plain)] if plain else []
        return sorted([*lines, *renamed], key=lambda line: natural(line.split(",")[0].split(" ")[0]))

    def exact_division(self, node: Node) -> bool:
        return node in self.rounded

    def scalar(self, node: Node, used: Used) -> str:
        """The parameter that carries a host value, computed in float64 before the launch."""
        text = python(node)
        name = next((n for n, t in self.hosted.items() if t == text), None)
        if name is None:
            plain = node.op == "attr" and node.params[2] is None
            name = self.names[node.params[0]] if plain else f"c{len(self.hosted)}"
            self.hosted[name] = text
        used.scalars[name] = node.kind if used.scalars.get(name, node.kind) == node.kind else "float"
        return name

    def condition(self, atom: Atom, values: Sequence[object], used: Used) -> str:
        """The compile-time test that a variant's atom has one of these values."""
        if atom.kind in ("tensor", "cotangent"):
            used.asked[atom.name] = None
            return f"{atom.name}_ptr is {'not ' if True in values else ''}None"
        if atom.kind == "number":
            return " or ".join(_KIND_TESTS[str(v)] for v in values)
        name, expression = self._choice(atom)
        self.choices[name] = expression
        used.choices[name] = None
        if atom.kind == "enum":
            return " or ".join(f'{name} == "{v}"' for v in values)
        return name if True in values else f"not {name}"

    def _choice(self, atom: Atom) -> tuple[str, str]:
        match atom.kind:
            case "enum" | "flag":
                return self.names[atom.name], f'self.attrs["{atom.name}"]'
            case "attr":
                return self._unique(f"HAS_{atom.name.upper()}", atom), f'self.attrs["{atom.name}"] is not None'
        return self._unique(condition_name(atom.key), atom), host_condition(self.plan, atom)

    def _unique(self, name: str, atom: Atom) -> str:
        """The name of a choice: another one where two questions would be spelled alike."""
        found = next((n for n, key in self.questions.items() if key == atom.key), None)
        if found is None:
            found = unlike(name, self.questions)
            self.questions[found] = atom.key
        return found

    # -------------------------------------------------------------------------------- merging variants

    def merge(self, per_variant: dict[Variant, list[Item]], used: Used, beside: Mapping[Variant, Collection[str]] | None = None,
              elsewhere: Collection[str] = ()) -> list[str]:  # fmt: skip
        """One body: statements that are the same in all variants plain, others under the choice that tells them apart.

        Args:
            beside: names that each variant has set before.
            elsewhere: names that any variant sets in another body.
        """
        keys: list[tuple[str, ...]] = []
        for items in per_variant.values():
            place = 0
            for item in items:
                if item.key in keys:
                    place = keys.index(item.key) + 1
                else:
                    keys.insert(place, item.key)
                    place += 1
        keys.sort(key=self._place)
        texts = {v: {i.key: i.lines for i in items} for v, items in per_variant.items()}
        _share_stores(texts, beside or dict.fromkeys(texts, ()), elsewhere, self.without)
        universe = list(per_variant)
        blocks: list[tuple[list[list[Variant]], list[tuple[str, ...]]]] = []
        for key in keys:
            parts = self._partition(universe, key, texts)
            if blocks and blocks[-1][0] == parts:
                blocks[-1][1].append(key)
            else:
                blocks.append((parts, [key]))
        out: list[str] = []
        for parts, members in blocks:
            out += self._block(universe, parts, members, texts, used)
        return out

    def _place(self, key: tuple[str, ...]) -> tuple[int, float]:
        """Loads come first, then the statements in the spec's order, then what is stored: what is read is set before."""
        if key[0] == "finish":
            return 0, 0
        if key[0] != "let":
            return (0 if key[0] in ("load", "part") else 2), 0
        return 1, self.order[key[1]]

    @staticmethod
    def _partition(
        universe: list[Variant], key: tuple[str, ...], texts: dict[Variant, dict[tuple[str, ...], tuple[str, ...]]]
    ) -> list[list[Variant]]:
        groups: dict[tuple[str, ...] | None, list[Variant]] = {}
        for variant in universe:
            groups.setdefault(texts[variant].get(key), []).append(variant)
        return list(groups.values())

    def _block(self, universe: list[Variant], parts: list[list[Variant]], members: list[tuple[str, ...]],
               texts: dict[Variant, dict[tuple[str, ...], tuple[str, ...]]], used: Used) -> list[str]:  # fmt: skip
        bodies = [[line for key in members for line in texts[part[0]].get(key, ())] for part in parts]
        if len(parts) == 1:
            return bodies[0]
        filled = sorted((p, b) for p, b in enumerate(bodies) if b)
        filled.sort(key=lambda pb: -len(pb[1]))
        if len(parts) == 2 and len(filled) == 2 and self._tests(universe, parts[filled[0][0]], used).startswith("not "):
            filled.reverse()
        out: list[str] = []
        left = list(universe)
        for place, (p, body) in enumerate(filled):
            word = "if" if place == 0 else "elif"
            if place == len(filled) - 1 and place > 0 and set(left) == set(parts[p]):
                out.append("else:")
            else:
                out.append(f"{word} {self._tests(left, parts[p], used)}:")
            out += [f"    {line}" for line in body]
            left = [v for v in left if v not in parts[p]]
        return out

    def _tests(self, universe: list[Variant], part: list[Variant], used: Used) -> str:
        """The shortest test over atoms that holds in `part` alone, of the variants still possible."""
        asked = [a for a in self.atoms if len({v[a.key] for v in universe}) > 1]
        for count in range(1, len(asked) + 1):
            for chosen in itertools.combinations(asked, count):
                wanted = [[x for x in a.values if any(v[a.key] == x for v in part)] for a in chosen]
                if [v for v in universe if all(v[a.key] in w for a, w in zip(chosen, wanted))] == part:
                    tests = [self.condition(a, w, used) for a, w in zip(chosen, wanted) if len(w) < len(a.values)]
                    return " and ".join(f"({t})" if " or " in t and len(tests) > 1 else t for t in tests)
        rest = [v for v in universe if v not in part]
        wanted = [[x for x in a.values if any(v[a.key] == x for v in rest)] for a in asked]
        if [
            v for v in universe if all(v[a.key] in w for a, w in zip(asked, wanted))
        ] == rest:  # all but one combination
            others = [(a, [x for x in a.values if x not in w]) for a, w in zip(asked, wanted)]
            return " or ".join(self.condition(a, w, used) for a, w in others if w)
        words = [" and ".join(self.condition(a, [v[a.key]], used) for a in asked) for v in part]
        return " or ".join(f"({w})" for w in words)

    # -------------------------------------------------------------------------------- statements

    def statements(self, graph: Graph, printer: Printer, bindings: Iterable[Bound], roots: list[Node],
                   aliases: Collection[str]) -> list[Item]:  # fmt: skip
        """The bindings that the roots need, as the spec has them; their names are known to the printer from then on.

        Args:
            aliases: names that get a statement even where they only stand for another name.
        """
        live = {n.serial for n in walk(roots)}
        out = []
        for bound in bindings:
            node = bound.node
            if node.serial not in live or node.op in ("const", "stack"):
                continue
            if (node.serial in printer.names or node.host) and bound.name not in aliases:
                continue
            text = printer.text(node)
            name = self.names[bound.name]
            if text == name:
                continue
            printer.names[node.serial] = name
            comment = f"  # {bound.comment}" if bound.comment else ""
            above = tuple(f"# {c}" for c in bound.above)
            out.append(Item(("let", bound.name), (*above, f"{name} = {text}{comment}")))
        return out

    def loads(self, graph: Graph, printer: Printer, roots: list[Node], names: Sequence[str],
              bindings: Iterable[Bound]) -> list[Item]:  # fmt: skip
        """Loads of the tensors that the roots read; a part read by `at` takes the name that the spec gives it."""
        reached = list(walk(roots))
        bound = {b.node.serial: b.name for b in reversed(list(bindings))}
        out = []
        for name in names:
            tensor = graph.tensors.get(name)
            if tensor is None:
                continue
            parts = [n for n in reached if n.op == "at" and n.args[0].op == "read" and n.args[0].params[0] == name]
            if parts:
                out.append(
                    Item(("load", name), (f"{self.names[name]}_at = {name}_ptr + offset(i, at, {name}_strides)",))
                )
                for node in parts:
                    where = "".join(_step(name, axis, i.params[0]) for axis, i in zip(node.params[0], node.args[1:]))
                    part = f"{name}_{'_'.join(str(i.params[0]) for i in node.args[1:])}"
                    own = self.names[bound[node.serial]] if node.serial in bound else part
                    printer.names[node.serial] = own
                    out.append(
                        Item(
                            ("part", own),
                            (f"{own} = {loaded(f'{self.names[name]}_at{where}', tensor.kind, tensor.dtype)}",),
                        )
                    )
            elif any(n.op == "read" and n.params[0] == name for n in reached):
                out.append(Item(("load", name), self._load(name, tensor.kind, tensor.dtype, tensor.scalar)))
        return out

    def _load(self, name: str, kind: str, dtype: str, scalar: bool) -> tuple[str, ...]:
        load = loaded(f"{name}_ptr + offset(i, at, {name}_strides)", kind, dtype)
        return self.loading(name, load, kind, scalar)

    def loading(self, name: str, load: str, kind: str, scalar: bool) -> tuple[str, ...]:
        """The statement of a load; instead of a `scalar` tensor there may be a number."""
        own = self.names.get(name) or safe(name)
        if not scalar:
            return (f"{own} = {load}",)
        whole = kind == "int" and floats_of_ints(self.op, self.plan.graphs)
        return (
            f"if {name}_ptr is None:",
            f"    {own} = scalar({name}_number, {'tl.int64' if whole else 'COMPUTE'})",
            "else:",
            f"    {own} = {load}",
        )

    # -------------------------------------------------------------------------------- kernels

    def module(self, forward: Sequence[StageText], backward: Sequence[StageText]) -> Module:
        """All that a template fills in, of the stages' texts."""
        texts = [replace(t, when=self._when(t.stage)) for t in (*forward, *backward)]
        first, second = tuple(texts[: len(forward)]), tuple(texts[len(forward) :])
        kernels = [k for t in texts for k in (t.kernel, t.finish) if k is not None]
        used = {n for k in kernels for n in (*(p.partition(": ")[0] for p in k.params), *k.numbers)}
        chosen = tuple((o.name, dims) for o in self.op.outputs if (dims := self.chosen_dims(o)))
        updates = self.updates()
        there = tuple(self.there())
        asked = {n for w in (*(t.when for t in texts), *(w for _, w in (*updates, *there))) for n, _ in w}
        asked |= {c for _, dims in chosen for c, _, _ in dims}
        return Module(
            self.plan, first, second, tuple((n, t) for n, t in self.hosted.items() if n in used),
            tuple((n, t) for n, t in self.choices.items() if n in used | asked), tuple(self._import_lines()), tuple(self.passes() if backward else ()),
            tuple(self.present), tuple(self._equals() if backward else ()), updates, chosen, there,
        )  # fmt: skip

    def _when(self, stage: Stage) -> When:
        """The choices that tell the variants of a stage from the others, and which pointers are None in these."""
        graphs = self.plan.floats if stage.suffix.startswith("backward") else self.plan.graphs
        told = self.told([v for v, _ in graphs], [p.variant for p in stage.parts], f"the stage `{stage.suffix}`")
        return (*told, *((f"{name}_ptr", (str(there),)) for name, there in stage.given))

    def told(self, every: Sequence[Variant], part: Sequence[Variant], what: str) -> When:
        out = []
        for atom, values in telling(self.atoms, every, part, what):
            name, expression = self._choice(atom)
            if atom.kind != "enum":
                self.choices[name] = expression
            out.append((name, tuple(f'"{x}"' if atom.kind == "enum" else str(x) for x in values)))
        return tuple(out)

    def updates(self) -> tuple[tuple[str, When], ...]:
        """The buffers that are written, each with the choices under which it is."""
        out = []
        for decl in self.op.buffers:
            writing = [
                v for v, g in self.plan.graphs if any(t.name == decl.name and t.node is not None for t in g.updates)
            ]
            there = [v for v, g in self.plan.graphs if decl.name in g.tensors]
            if writing:
                out.append((decl.name, self.told(there, writing, f"the update of `{decl.name}`")))
        return tuple(out)

    def there(self) -> Iterable[tuple[str, When]]:
        """State and outputs that some variants lack, with the choices under which they are there."""
        for decl in (*self.op.state, *self.op.outputs):
            if decl.when is not None:
                part = [v for v, g in self.plan.graphs if decl.name in g.tensors]
                yield decl.name, self.told([v for v, _ in self.plan.graphs], part, f"`{decl.name}`")

    def chosen_dims(self, decl: TensorDecl) -> tuple[tuple[str, tuple[str, ...], tuple[Dim, ...]], ...]:
        """Other dims of an output than those it has first, with the choice and its values."""
        out = []
        shapes: dict[tuple[str, ...], list[Variant]] = {}
        every = [(v, g) for v, g in self.plan.graphs if decl.name in g.tensors]
        for variant, graph in every:
            shapes.setdefault(graph.tensors[decl.name].axes, []).append(variant)
        for axes, part in list(shapes.items()):
            dims = next(g.tensors[decl.name].dims for _, g in every if g.tensors[decl.name].axes == axes)
            if axes == first_axes(decl):
                continue
            told = self.told([v for v, _ in every], part, f"the shape of `{decl.name}`")
            out.append((told[0][0], told[0][1], dims))
        return tuple(out)

    def fresh(self, name: str) -> str:
        """A name that nothing has yet."""
        return unlike(name, [*self.names.values(), *self.grads.values()])

    def elements(self, stage: Stage) -> StageText:
        """The kernel of a stage whose every element stands for itself."""
        self.count = "n_kept * n_reduced" if stage.summed else "n"
        return StageText(stage, self._backward(stage) if stage.suffix.startswith("backward") else self._forward(stage))

    def _find_rounded(self) -> None:
        """Quotients that are floored, rounded or compared must be IEEE's."""
        for _, graph in self.plan.graphs:
            for node in walk(graph.roots()):
                if node.op in _ROUNDING or (node.op == "cast" and node.params[0] == "int"):
                    self.rounded |= {a for a in node.args if a.op == "div" and not a.host}

    def merged(self, parts: Sequence[Part], exacting: Collection[str],
                items: Callable[[Part, Printer, Collection[str]], list[Item]]) -> tuple[Used, list[str]]:  # fmt: skip
        """The merged body of a stage's parts: with a statement for a name that only some of them compute, if that is shorter.

        A name that is another name in one variant (`low = x if min is None else ...`) is best set in both, so that what
        follows stands once; unless the other name is what the rest of the formula speaks of.
        """

        def built(aliases: Collection[str]) -> tuple[Used, list[str], set[str]]:
            used = Used()
            bodies = {p.variant: items(p, Printer(self, p.graph, used, exacting), aliases) for p in parts}
            named = {i.key[1] for body in bodies.values() for i in body if i.key[0] == "let"}
            return used, self.merge(bodies, used), named

        used, body, named = built(())
        again, other, _ = built(named)
        return (again, other) if len(other) < len(body) else (used, body)

    def _forward(self, stage: Stage) -> KernelText:
        outputs = [o.name for o in self.op.outputs]
        kept = [n for n in stage.stored if n not in outputs]

        def items(part: Part, printer: Printer, aliases: Collection[str]) -> list[Item]:
            graph, saved = part.graph, [s for s in part.stores if s.name in kept]
            roots = [p for t in graph.outputs for p in _parts(t.node)] + [s.node for s in saved]
            out = self.loads(graph, printer, roots, stage.reads, graph.bindings)
            out += self.statements(graph, printer, graph.bindings, roots, aliases)
            for target in graph.outputs:
                out.append(Item(("store", target.name), tuple(self._stores(graph, printer, target.name, target.node))))
            for s in saved:  # without gradients it is not there
                lines = (
                    f"if {s.name}_ptr is not None:",
                    f"    tl.store({s.name}_ptr + i, {printer.stored(s.node, s.kind)}, mask=mask)",
                )
                out.append(Item(("store", s.name), lines))
            return out

        used, body = self.merged(stage.parts, stage.exacting, items)
        asked = [f"{n}_ptr" for n in used.asked if n not in stage.reads]
        params = self._read_params(stage.reads) + asked
        params += self._write_params([*outputs, *kept], ())
        return self._kernel("forward", params, ["n: tl.int64"], used, body, ["BLOCK: tl.constexpr"])

    def _stores(self, graph: Graph, printer: Printer, name: str, node: Node | None) -> list[str]:
        assert node is not None
        parts = _parts(node)
        kind = graph.tensors[name].kind if name in graph.tensors else "float"  # a gradient
        if len(parts) == 1 and node.op != "stack":
            return [f"tl.store({name}_ptr + i, {printer.stored(node, kind)}, mask=mask)"]
        axis = node.params[0]
        at = f"{self.names.get(name) or safe(name)}_at"
        lines = [f"{at} = {name}_ptr + offset(i, at, {name}_strides)"]
        return lines + [
            f"tl.store({at}{_step(name, axis, k)}, {printer.stored(p, kind)}, mask=mask)" for k, p in enumerate(parts)
        ]

    def _backward(self, stage: Stage) -> KernelText:
        def items(part: Part, printer: Printer, aliases: Collection[str]) -> list[Item]:
            graph = part.graph
            targets = [t for t in graph.gradients if t.node is not None]
            roots = [p for t in targets for p in _parts(stripped(t, graph))]
            bindings = (*graph.bindings, *graph.let)
            out = self.loads(graph, printer, roots, stage.reads, bindings)
            out += self.statements(graph, printer, bindings, roots, aliases)
            for target in targets:
                out += self._gradient(graph, printer, target, stage.summed)
            return out

        used, body = self.merged(stage.parts, stage.exacting, items)
        stacked = {f"d{n}" for n in self.plan.gradients if self._is_stacked(n)}
        self.present += [n for n in used.asked if n not in stage.reads]
        reads = self._read_params(stage.reads) + [f"{n}_ptr" for n in self.present]
        if not stage.summed:
            params = reads + self._write_params([f"d{n}" for n in self.plan.gradients], stacked)
            return self._kernel("backward", params, ["n: tl.int64"], used, body, ["BLOCK: tl.constexpr"])
        pointers = [
            p for n in self.plan.gradients
            for p in ([f"d{n}_ptr", f"d{n}_sum_ptr"] if n in stage.summed else self._write_params([f"d{n}"], stacked))
        ]  # fmt: skip
        extents = [
            "kept_sizes",
            "kept_strides",
            "reduced_sizes",
            "reduced_strides",
            "n_kept: tl.int64",
            "n_reduced: tl.int64",
            "span: tl.int64",
        ]
        return self._kernel(
            "backward", reads + pointers, extents, used, body, ["BLOCK_K: tl.constexpr", "BLOCK_R: tl.constexpr"]
        )

    def _gradient(self, graph: Graph, printer: Printer, target: Target, summed: Collection[str]) -> list[Item]:
        """The gradient's statement and its store, or its share of a sum."""
        name, node = target.name, stripped(target, graph)
        grad = self.grads[name]
        if node.op == "stack" or len(self.plan.gradients) == 1 and not summed:
            lines = self._stores(graph, printer, f"d{name}", node)
            if len(self.plan.gradients) > 1:
                lines = [f"if d{name}_ptr is not None:", *(f"    {line}" for line in lines)]
            return [Item(("store", name), tuple(lines))]
        out = []
        text = printer.stored(node, "float")
        if node.op != "const" and (node.serial not in printer.names or self._differs(name)):
            out.append(Item(("grad", name), (f"{grad} = {text}",)))
            text = grad
        stores = [f"if d{name}_ptr is not None:", f"    tl.store(d{name}_ptr + i, {text}, mask=mask)"]
        if name in summed:
            stores += [f"if d{name}_sum_ptr is not None:", f"    d{name}_sum += tl.where(mask, {text}, 0.0)"]
        return [*out, Item(("store", name), tuple(stores))]

    def _differs(self, name: str) -> bool:
        """Whether the gradient's formula is another in another variant: then it gets a name of its own in all."""
        texts = {
            spell(stripped(t, g))
            for _, g in self.plan.floats
            for t in g.gradients
            if t.name == name and t.node is not None
        }
        return len(texts) > 1

    def passes(self) -> list[tuple[str, str, str]]:
        """Gradients that are a cotangent as it is: name, cotangent, and the test under which (Python, or nothing)."""
        out = []
        for name in self.plan.gradients:
            found = {self._passed(graph, name) for _, graph in self.plan.floats}
            if len(found) == 1 and (one := found.pop()) is not None:
                out.append((name, *one))
        return out

    def _equals(self) -> Iterable[tuple[str, str]]:
        passed = {name for name, _, _ in self.passes()}
        for place, name in enumerate(self.plan.gradients):
            for other in self.plan.gradients[:place]:
                if passed.isdisjoint((name, other)) and all(self._same(g, name, other) for _, g in self.plan.floats):
                    yield name, other
                    break

    @staticmethod
    def _same(graph: Graph, name: str, other: str) -> bool:
        nodes = [t.node and stripped(t, graph) for n in (name, other) for t in graph.gradients if t.name == n]
        return len(nodes) == 2 and nodes[0] is not None and nodes[0] is nodes[1]

    @staticmethod
    def _passed(graph: Graph, name: str) -> tuple[str, str] | None:
        """The cotangent that a gradient is, or is times a host number: then only where that number is 1."""
        node = next((stripped(t, graph) for t in graph.gradients if t.name == name and t.node is not None), None)
        test = ""
        if node is not None and node.op == "mul" and any(hosted(a) for a in node.args):
            factor, node = sorted(node.args, key=lambda a: not hosted(a))
            test = f"{python(factor)} == 1"
        if node is not None and node.op == "read" and graph.tensors[node.params[0]].role == "cotangent":
            return str(node.params[0]), test
        return None

    def _is_stacked(self, name: str) -> bool:
        return any(
            t.name == name and t.node is not None and t.node.op == "stack"
            for _, g in self.plan.floats
            for t in g.gradients
        )

    # -------------------------------------------------------------------------------- parameter lists

    def _read_params(self, names: Sequence[str]) -> list[str]:
        out = []
        for name in names:
            out += [f"{name}_ptr", f"{name}_strides"]
            tensor = next((t for t in self.op.arguments if t.name == name), None)
            if tensor is not None and tensor.scalar:
                out.append(f"{name}_number: tl.float64")
            out += [f"{name}_stride_{axis}: tl.int64" for axis in self._sliced_axes(name)]
        return out

    def _write_params(self, names: Sequence[str], stacked: Collection[str]) -> list[str]:
        out = []
        for name in names:
            out.append(f"{name}_ptr")
            axes = self._sliced_axes(name[1:] if name in stacked else name)
            if axes:
                out += [f"{name}_strides", *(f"{name}_stride_{axis}: tl.int64" for axis in axes)]
        return out

    def _sliced_axes(self, name: str) -> list[str]:
        for _, graph in self.plan.graphs:
            if name in graph.tensors:
                return [a for a in graph.tensors[name].axes if a in self.plan.sliced]
        return []

    def _kernel(
        self, suffix: str, params: list[str], extents: list[str], used: Used, body: Sequence[str], blocks: list[str]
    ) -> KernelText:
        prelude = used.prelude
        every = [
            *params, "sizes", "patch_sizes", *extents, *(f"{n}: tl.float64" for n in used.scalars), *(f"{n}: tl.constexpr" for n in used.choices),
            *(["HALF: tl.constexpr"] if used.coarse else []), "COMPUTE: tl.constexpr", "WIDE: tl.constexpr", "RAGGED: tl.constexpr", *blocks,
        ]  # fmt: skip
        name = f"{self.op.name}_{suffix}"
        if "BLOCK: tl.constexpr" in blocks:
            return KernelText(name, tuple(every), (*prelude, *body))
        return KernelText(name, tuple(every), tuple(body), tuple(prelude), "sums")


def _share_stores(
    texts: dict[Variant, dict[tuple[str, ...], tuple[str, ...]]], beside: Mapping[Variant, Collection[str]],
    elsewhere: Collection[str], without: Mapping[str, Collection[Variant]],
) -> None:  # fmt: skip
    """A gradient that a variant has none of is stored nowhere there (its pointer is None), so its statements may stand in every
    variant: where there is one text, and what stands under no test of the pointer reads what has a value everywhere.

    Args:
        beside: what each variant has set before these statements.
        elsewhere: what any variant sets somewhere: of these a statement may read what is set in all.
        without: by gradient the variants that have none.
    """
    for key in sorted({k for items in texts.values() for k in items if k[0] in ("grad", "store") and k[1] in without}):
        found = {items[key] for items in texts.values() if key in items}
        if len(found) > 1 or any(key not in items and v not in without[key[1]] for v, items in texts.items()):
            continue
        (lines,) = found
        guarded = all(re.match(r" |if \w+_ptr is not None:$", line) for line in lines)
        own = {v: {*beside[v], *(n for text in items.values() for n in assigned(text))} for v, items in texts.items()}
        somewhere, everywhere = {*elsewhere}.union(*own.values()), set.intersection(*own.values())
        read = {n for line in lines for n in re.findall(r"[A-Za-z_]\w*", line)} - {*assigned(lines)}
        if guarded or not (read & somewhere) - everywhere:
            for items in texts.values():
                items.setdefault(key, lines)


_ASSIGNED = re.compile(r"^ *([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*) [-+*]?= ")


def assigned(lines: Iterable[str]) -> Iterable[str]:
    """The names that statements set."""
    for line in lines:
        if found := _ASSIGNED.match(line):
            yield from found.group(1).split(", ")


def hosted(node: Node) -> bool:
    """Whether a value is computed before the launch, of attrs alone; numbers of elements are known where the kernel runs."""
    return node.host and node.op != "const" and not any(n.op == "size" for n in walk([node]))


def _parts(node: Node | None) -> list[Node]:
    if node is None:
        return []
    return list(node.args) if node.op == "stack" else [node]


def _step(name: str, axis: str, k: int) -> str:
    return "" if k == 0 else f" + {name}_stride_{axis}" if k == 1 else f" + {k} * {name}_stride_{axis}"


def loaded(address: str, kind: str, dtype: str, mask: str = "mask") -> str:
    """A load, in the dtype that a kernel computes with."""
    load = f"tl.load({address}, mask={mask})" if mask else f"tl.load({address})"
    if kind == "bool":
        return f"{load}.to(tl.int1)"
    return load if kind == "int" and dtype != "number" else f"{load}.to(COMPUTE)"


# ---------------------------------------------------------------------------------------------- host expressions


def python(node: Node) -> str:
    """A host value as Python over `self.attrs`: a function of `runtime/host.py` a primitive, which has its name."""
    words = [python(a) for a in node.args]
    if node.op == "const":
        value = node.params[0]
        return number(value) if not isinstance(value, float) or np.isfinite(value) else f'float("{number(value)}")'
    if node.op == "size":
        return f"size({', '.join(repr(a) for a in node.params)})"
    if node.op == "attr":
        item = "" if node.params[2] is None else f"[{node.params[2]}]"
        return f'self.attrs["{node.params[0]}"]{item}'
    if node.op in INFIX and node.op not in _HOSTED:
        return f"({words[0]} {INFIX[node.op][0]} {words[1]})"
    if node.op in ("neg", "not"):
        sign = "-" if node.op == "neg" else "not " if node.kind == "bool" else "~"
        return f"({sign}{words[0]})"
    if node.op == "where":
        return f"({words[1]} if {words[0]} else {words[2]})"
    if node.op == "cast":
        return f"{'host.whole' if node.params[0] == 'int' else node.params[0]}({words[0]})"
    if len(words) == 1 and node.args[0].op in INFIX and node.args[0].op not in _HOSTED:
        words = [words[0][1:-1]]
    return f"host.{'abs_' if node.op == 'abs' else node.op}({', '.join(words)})"


_HOSTED = ("div", "floordiv", "mod", "shl", "shr")
"""Infix operations whose Python would raise."""


_WORDS = {"==": "IS", "!=": "IS_NOT", "<=": "AT_MOST", ">=": "AT_LEAST", "<": "BELOW", ">": "ABOVE", "+": "PLUS", "-": "MINUS",
          "*": "TIMES", "/": "OVER", ".": "_"}  # fmt: skip


def condition_name(text: str) -> str:
    """A constexpr's name for a condition: `alpha == 1` is ALPHA_IS_1."""
    for sign, word in _WORDS.items():
        text = text.replace(sign, f" {word} " if sign != "." else word)
    name = re.sub(r"\W+", "_", text).strip("_").upper()
    return f"WHEN_{name}" if name[:1].isdigit() else name


def host_condition(plan: OpPlan, atom: Atom) -> str:
    """What a choice is, as Python over `self.attrs`."""
    match atom.kind:
        case "enum" | "flag":
            return f'self.attrs["{atom.name}"]'
        case "attr":
            return f'(self.attrs["{atom.name}"] is not None)'
    asked = [a for a in plan.atoms if a.kind == "condition"]
    return python(plan.graphs[0][1].conditions[asked.index(atom)][0])


def first_axes(decl: TensorDecl) -> tuple[str, ...]:
    """The axes that a declaration has first, where it has several by choice."""
    axes = decl.axes
    while not isinstance(axes, Axes):
        axes = axes.then
    return tuple(f.name for d in axes.dims for f in d.factors)


__all__ = ["KernelText", "Module", "StageText", "natural", "python", "safe"]
