"""The contract through its narrow side: addresses, numbers and a buffer, with no tensor of torch handed to a kernel."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.runtime import moves  # noqa: E402
from generated.runtime.abi import KernelAbi, PackedC, Param, Recorder  # noqa: E402
from generated.runtime.launcher import Address, bind  # noqa: E402
from generated.runtime.op import RuntimeOp  # noqa: E402
from generated.runtime.plan import Kernel, Launch, Limits, Meta, Plan  # noqa: E402
from generated.runtime.testing import DEVICE, TORCH, Case  # noqa: E402
from generated.runtime.views import TensorView  # noqa: E402
from tests.kernels.test_contract import OPS, op_class  # noqa: E402

NAMES = {v: k for k, v in TORCH.items()}
PROCESSORS = 2


def attrs_of(name: str, one: Case) -> dict[str, Any]:
    """The defaults, and a value for each attr that has none."""
    usual = {"int": -1, "dims": -1, "shape": 3}
    out = {}
    for attr, value in one._all_attrs({}).items():
        if value is inspect.Parameter.empty:
            value = 3 if attr in one.op.sized.values() else usual.get(str(one.op.kinds.get(attr)), 0.5)
        out[attr] = value
    return out


class Host:
    """What a host of another language would do: it allocates by plans, packs by visits, and launches from buffers."""

    def __init__(self, op: RuntimeOp, given: Mapping[str, Any]) -> None:
        self.op, self.memory = op, dict(given)
        self.given = {n: self.meta(v) for n, v in given.items()}
        self.saved: list[TensorView | None] = [None] * len(op.saved)
        self.outputs: list[TensorView | None] = [None] * len(op.outputs)

    @staticmethod
    def meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return Meta(NAMES[value.dtype], tuple(value.shape), value.stride())

    def allocate(self, metas: Mapping[str, Meta]) -> list[TensorView]:
        self.memory |= {
            n: torch.empty_strided(m.shape, m.strides, dtype=TORCH[m.dtype], device=DEVICE) for n, m in metas.items()
        }
        return [self.view(n) for n in metas]

    def view(self, name: str) -> Any:
        value = self.memory.get(name)
        if not isinstance(value, torch.Tensor):
            return value
        return TensorView(value.data_ptr(), NAMES[value.dtype], tuple(value.shape), value.stride())

    @property
    def sides(self) -> list[list[Any]]:
        return [[self.view(t.name) for t in group] for group in (self.op.inputs, self.op.params, self.op.buffers)]

    def launch(self, plan: Plan, i: int, packed: PackedC) -> None:
        assert len(packed.buffer) % 8 == 0
        bind(plan.launches[i], plan.metas, str(torch.empty(0, device=DEVICE).device))(packed.buffer)

    def forward(self) -> list[Any]:
        op, plan = self.op, self.op.plan_forward(self.given)
        self.outputs, self.saved = self.allocate(plan.outputs), self.allocate(plan.saved)
        scratch = self.allocate(op.scratch_metas(self.given, training=True))
        for i in range(op.n_launches(self.given)):
            op.pack_args(i, *self.sides, self.outputs, self.saved, scratch, packed := PackedC())
            self.launch(plan, i, packed)
        return [self.memory[t.name] for t in op.outputs]

    def backward(self, cotangents: Sequence[Any], needed: Sequence[str]) -> list[Any]:
        op = self.op
        seeds = dict(zip((f"d{t.name}" for t in op.outputs), cotangents))
        self.memory |= seeds
        given = op.backward_given(self.given) | {n: self.meta(v) for n, v in seeds.items()}
        plan = op.plan_backward(given, needed, PROCESSORS)
        self.allocate(plan.outputs)
        for name in plan.zeros:
            self.memory[name].zero_()
        scratch = self.allocate(op.backward_scratch_metas(given, needed, PROCESSORS))
        grads = [[self.view(f"d{t.name}") for t in group] for group in (op.inputs, op.params)]
        given_grads = [self.view(n) for n in seeds]
        for i in range(op.n_backward_launches(given, needed, PROCESSORS)):
            packed = PackedC()
            op.pack_backward_args(
                i, *self.sides, self.outputs, self.saved, given_grads, *grads, scratch, packed, PROCESSORS
            )
            self.launch(plan, i, packed)
        return [self.memory[f"d{n}"] for n in needed]


def same_bits(ours: Any, theirs: Any) -> bool:
    alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    pair = [t.detach().contiguous().flatten().view(torch.uint8) for t in (ours, theirs)]
    return alike and torch.equal(*pair)


def launched_by_name(op: RuntimeOp, needed: Sequence[str]) -> list[str]:
    """The gradients that are launched for: the others are a cotangent, or another gradient, as it is."""
    needed = [n for n in needed if n not in op.passes()]
    return [n for n in needed if op.equals.get(n) not in needed]


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch path plans for as many as the host here does."""
    from generated.runtime.device import Torch

    monkeypatch.setattr(Torch, "multiprocessors", lambda self, device: PROCESSORS)
    for name in OPS:  # what was planned for another number is not to be found
        monkeypatch.setattr(op_class(name), "ready", {})


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("layout", ["matrix", "transposed", "row", "no columns"])
def test_launches_from_a_packed_buffer_give_the_bits_of_the_torch_path(name: str, layout: str) -> None:
    one = Case(getattr(generated, name), op_class(name), domains={})
    attrs = attrs_of(name, one)
    if layout not in one.layouts or one.refused(layout, attrs):
        layout = "cube"
    values = one.inputs(layout, "f32" if "f32" in one.dtypes else one.usual)
    wanted = [n for n in op_class(name).gradients if values[n].is_floating_point()]
    own = {n: v.detach().clone() if any(n == b.name for b in one.op.buffers) else v for n, v in values.items()}
    leaves = {n: v.detach().requires_grad_(n in wanted) for n, v in values.items()}
    theirs = one.call(leaves, attrs)
    host = Host(one.op(**attrs), own)
    assert all(same_bits(a, b) for a, b in zip(host.forward(), theirs, strict=True))
    assert all(same_bits(host.memory[b.name], values[b.name]) for b in one.op.buffers), "a buffer"
    needed = launched_by_name(host.op, wanted)
    if needed:
        seeds = [torch.linspace(-2, 3, y.numel(), device=DEVICE).reshape(y.shape).to(y.dtype) for y in theirs]
        expected = torch.autograd.grad(theirs, [leaves[n] for n in needed], seeds)
        for gradient, ours, want in zip(needed, host.backward(seeds, needed), expected, strict=True):
            assert same_bits(ours, want), gradient


@pytest.mark.parametrize("name", OPS)
def test_no_two_addresses_are_swapped(name: str) -> None:
    """Packed at two sets of made-up addresses: each pointer follows its own tensor, and nothing else moves."""
    one = Case(getattr(generated, name), op_class(name), domains={})
    op = one.op(**attrs_of(name, one))
    moved_by_name(
        op, {n: Host.meta(v) for n, v in one.inputs("matrix", "f32" if "f32" in one.dtypes else one.usual).items()}
    )


def moved_by_name(op: RuntimeOp, given: Mapping[str, Any]) -> None:
    """Every pointer of every launch, of both directions, has the address of its own tensor."""
    plans = [op.plan_forward(given)]
    needed = [n for n in op.gradients if given.get(n) is not None]
    if needed:
        plans.append(op.plan_backward(op.backward_given(given), launched_by_name(op, needed), PROCESSORS))
    for plan in plans:
        for launch in plan.launches:
            visits = []
            for base, step in ((1 << 20, 1 << 12), (7 << 30, 3 << 13)):
                at = {n: base + step * k for k, n in enumerate(sorted(plan.metas))}
                views = {n: TensorView(at[n], m.dtype, m.shape, m.strides) for n, m in plan.metas.items()}
                op.pack(launch, views, recorder := Recorder())
                for kind, param, value in recorder.visits:
                    assert kind != "ptr" or value == at.get(launch.pointers.get(param, ""), 0), param
                visits.append(recorder.visits)
            pointers = [p for p in launch.kernel.abi.params if p.role == "ptr" and p.name in launch.pointers]
            moved = [a[1] for a, b in zip(*visits, strict=True) if a != b]
            assert moved == [p.name for p in pointers]


def test_a_launch_of_whose_tensors_nothing_is_known_is_refused() -> None:
    op = op_class("add")(alpha=1.0)
    plan = op.plan_forward({"x": Meta("f32", (4,), (1,)), "other": 1.0})
    with pytest.raises(TypeError, match="add_forward: nothing is known of `y`, which `y_ptr` points to"):
        bind(plan.launches[0], {"x": plan.metas["x"]}, "cpu")


def test_a_buffer_of_another_length_is_refused() -> None:
    op = op_class("add")(alpha=1.0)
    plan = op.plan_forward({"x": Meta("f32", (4,), (1,)), "other": Meta("f32", (4,), (1,))})
    run = bind(plan.launches[0], plan.metas, "cpu")
    with pytest.raises(ValueError, match=r"add_forward: a buffer of 16 bytes; its layout has \d+"):
        run(bytes(16))


def test_more_or_fewer_tensors_than_the_op_has_are_refused() -> None:
    op = op_class("add")(alpha=1.0)
    x = TensorView(4096, "f32", (4,), (1,))
    for inputs, outputs, text in (([x], [x], "1 inputs; it has 2: x, other"), ([x, x], [], "0 outputs; it has 1: y")):
        with pytest.raises(TypeError, match=f"add: {text}"):
            op.pack_args(0, inputs, [], [], outputs, [], [], Recorder())


def test_a_bound_launch_follows_the_buffer() -> None:
    """The same launch again, on the same memory, on other memory, and with another number."""
    op = op_class("add")(alpha=1.0)
    x = torch.arange(4, device=DEVICE, dtype=torch.float32)
    results = [torch.zeros_like(x) for _ in range(3)]
    plan = op.plan_forward({"x": Host.meta(x), "other": 0.0})
    run = bind(plan.launches[0], plan.metas, str(x.device))
    for y, number in ((results[0], 2.0), (results[1], 2.0), (results[0], 3.0), (results[0], 3.0), (results[2], 4.0)):
        views = {n: TensorView(v.data_ptr(), "f32", (4,), (1,)) for n, v in (("x", x), ("y", y))}
        op.pack(plan.launches[0], {**views, "other": number}, packed := PackedC())
        run(packed.buffer)
    assert [y.tolist() for y in results] == [[3, 4, 5, 6], [2, 3, 4, 5], [4, 5, 6, 7]]


def started(launch: Launch, tensors: Mapping[str, Any]) -> None:
    """A launch from a buffer, over tensors of any strides."""
    views = {n: TensorView(v.data_ptr(), NAMES[v.dtype], tuple(v.shape), v.stride()) for n, v in tensors.items()}
    launch.kernel.abi.visit(launch.arguments(views, {}), packed := PackedC())
    bind(launch, {n: Host.meta(v) for n, v in tensors.items()}, str(torch.empty(0, device=DEVICE).device))(
        packed.buffer
    )


def test_doubles_are_copied_and_added_to_bf16() -> None:
    """Rounded, into columns of a tensor whose other columns are read: those are left as they are."""
    whole = torch.randn(5, 6, device=DEVICE).bfloat16()
    before, x = whole.clone(), torch.randn(5, 3, dtype=torch.float64, device=DEVICE)
    out, other = whole[:, ::2], whole[:, 1::2]
    tensors = {"x": x, "other": other, "out": out}
    metas = {n: Host.meta(v) for n, v in tensors.items()}
    started(moves.add(metas["x"], metas["other"], metas["out"]), tensors)
    assert torch.equal(out, (x + before[:, 1::2].double()).float().bfloat16())
    assert torch.equal(other, before[:, 1::2])
    started(moves.add(metas["out"], metas["x"], metas["out"]), {"x": out, "other": x, "out": out})
    assert torch.equal(out, (x + (x + before[:, 1::2].double()).float().bfloat16().double()).float().bfloat16())
    started(moves.copy(metas["x"], metas["out"]), {"x": x, "out": out})
    assert torch.equal(out, x.float().bfloat16()) and torch.equal(other, before[:, 1::2])


def test_a_gradient_in_bf16_beside_doubles() -> None:
    """Of a param that is broadcast, so that the sum has several launches: the bits of the torch path."""
    x = torch.randn(37, 48, dtype=torch.float64, device=DEVICE).requires_grad_()
    weight = torch.randn(48, device=DEVICE).bfloat16().requires_grad_()
    seed = torch.randn(37, 48, dtype=torch.float64, device=DEVICE)
    op = op_class("rms_norm")(eps=1e-6, offset=0.0)
    host = Host(op, {"x": x.detach(), "weight": weight.detach()})
    (y,) = host.forward()
    want = generated.rms_norm(x, weight, eps=1e-6)
    assert torch.equal(y, want)
    want.backward(seed)
    dx, dweight = host.backward([seed], ["x", "weight"])
    assert dweight.dtype == torch.bfloat16 and torch.equal(dweight, weight.grad) and torch.equal(dx, x.grad)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "i32", "i64", "bool"])
def test_an_address_is_compiled_for_as_a_tensor_is(dtype: str) -> None:
    """On a GPU an address stands for a tensor: Triton must see the same type, and the same alignment."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    tensor = torch.empty(32, dtype=TORCH[dtype])
    for view in (tensor, tensor[1:]):
        stands = Address(view.data_ptr(), view.dtype, view.numel() * view.element_size())
        own, other = (native_specialize_impl(CUDABackend, v, False, True, True) for v in (stands, view))
        assert own == other and own[0].startswith("*")


class Compiler:
    """What Triton is on a GPU: a function that compiles when it is launched, and gives what it compiled."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, list[Any]]] = []
        self.fn = SimpleNamespace(__name__="copy")

    def __getitem__(self, grid: Any) -> Any:
        def start(*arguments: Any, **options: Any) -> Any:
            self.launched.append(("compiled", [getattr(a, "address", a) for a in arguments]))
            again = lambda *a: self.launched.append(("again", [getattr(v, "address", v) for v in a]))  # noqa: E731
            return {grid: again}

        return start


def test_what_is_compiled_is_launched_again_where_arguments_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from generated.runtime.device import Torch

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Torch, "limits", lambda self, device: Limits())
    compiler = Compiler()
    abi = KernelAbi((Param("x_ptr", "ptr"), Param("n", "i64"), Param("eps", "f64"), Param("BLOCK", "constexpr")))
    launch = Launch(Kernel(compiler, abi), (1, 1, 1), {"x_ptr": "x"}, {"n": 4, "eps": 0.5, "BLOCK": 16})
    run = bind(launch, {"x": Meta("f32", (4,), (1,))}, "cuda:0")
    calls = [(4096, 4, 0.5), (4096, 4, 0.5), (8192, 4, 0.25), (8196, 4, 0.5), (8192, 5, 0.5), (0, 4, 0.5), (16, 4, 1.0)]
    for address, n, eps in calls:
        run(struct.pack(abi.format, address, n, eps))
    assert [how for how, _ in compiler.launched] == [
        "compiled",
        "again",
        "again",
        "compiled",
        "compiled",
        "compiled",
        "again",
    ]
    assert [values for _, values in compiler.launched] == [[a or None, n, eps, 16] for a, n, eps in calls]


SHAPES = [
    ("layer_norm", {"normalized_shape": (3, 5), "eps": 1e-5}, {"x": (2, 3, 5)}, {"weight": (3, 5), "bias": (3, 5)}),
    ("group_norm", {"num_groups": 2, "eps": 1e-5}, {"x": (2, 6, 5)}, {"weight": (6,), "bias": (6,)}),
    ("prelu", {}, {"x": (2, 6, 5)}, {"weight": (6,)}),
    ("bias_add", {}, {"x": (2, 6, 5)}, {"bias": (6,)}),
    ("bias_gelu", {"approximate": "none"}, {"x": (2, 6, 5)}, {"bias": None}),
    ("dyt", {}, {"x": (2, 6)}, {"alpha": (), "weight": (6,), "bias": (6,)}),
    ("rms_norm", {"eps": 1e-6, "offset": 0}, {"x": (0, 6)}, {"weight": (6,)}),
    ("prelu", {}, {"x": (2, 6, 5), "weight": (1,)}, {"weight": (1,)}),
]


@pytest.mark.parametrize(("name", "attrs", "shapes", "expected"), SHAPES, ids=str)
def test_shapes_of_params_follow_from_the_inputs(
    name: str, attrs: dict[str, Any], shapes: dict[str, Any], expected: dict[str, Any]
) -> None:
    op = op_class(name)(**attrs)
    given = {n: Host.meta(torch.empty(s)) for n, s in shapes.items()}
    assert op.param_shapes(given) == expected and tuple(expected) == op.param_names


def test_what_a_model_begins_with_is_what_the_spec_says() -> None:
    norm = op_class("batch_norm")(training=False, momentum=0.1, eps=1e-5)
    assert norm.param_init_data() == {"weight": 1, "bias": 0}
    assert norm.buffer_init_data() == {"running_mean": 0, "running_var": 1}
    assert norm.buffer_shapes({"x": Meta("f32", (2, 3, 4), (12, 4, 1))}) == {"running_mean": (3,), "running_var": (3,)}
    assert op_class("dyt")().param_init_data() == {"alpha": 0.5, "weight": 1, "bias": 0}
    assert op_class("bias_add")().param_init_data() == {"bias": None}


def test_the_views_of_a_plan_are_its_own_numbers() -> None:
    op = op_class("rms_norm")(eps=1e-6, offset=0.0)
    given = {"x": Meta("f32", (300, 64), (64, 1)), "weight": Meta("f32", (64,), (1,))}
    plan = op.plan_forward(given)
    assert op.n_launches(given) == len(plan.launches) == 1
    assert op.grid(0, given) == plan.launches[0].grid and op.block(0, given)[0] == 32 * plan.launches[0].warps
    assert op.scratch_metas(given, training=True) == {} and op.residual_shapes(given)["rstd"] == (300,)
    known, needed = op.backward_given(given), ("x", "weight")
    back = op.plan_backward(known, needed, 4)
    assert op.n_backward_launches(known, needed, 4) == len(back.launches) == 2
    assert op.backward_scratch_metas(known, needed, 4) == back.scratch and "dweight_part" in back.scratch
    assert [op.backward_grid(i, known, needed, 4) for i in range(2)] == [launch.grid for launch in back.launches]
    assert op.backward_block(1, known, needed, 4) == (32 * back.launches[1].warps, 1, 1)
