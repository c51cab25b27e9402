"""What is kept of a call for the next of its kind: that it is found again, and that what a call depends on makes a kind of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.runtime import prepared  # noqa: E402
from generated.runtime.abi import KernelAbi, Param  # noqa: E402
from generated.runtime.binding import call  # noqa: E402
from generated.runtime.linalg import embedding  # noqa: E402
from generated.runtime.op import RuntimeOp  # noqa: E402
from generated.runtime.plan import Kernel, Launch, Limits  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402
from tests.kernels.test_contract import OPS, case, op_class, required  # noqa: E402


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ops that are planned for, in their order: one that is called again as before is not."""
    seen: list[str] = []
    planned = RuntimeOp.planned

    def watched(self: RuntimeOp, *more: Any) -> Any:
        seen.append(self.name)
        return planned(self, *more)

    monkeypatch.setattr(RuntimeOp, "planned", watched)
    for name in (
        "add",
        "silu",
        "rms_norm",
        "softmax",
        "leaky_relu",
        "batch_norm",
        "cross_entropy",
        "floor_divide",
        "layer_norm",
    ):
        monkeypatch.setattr(op_class(name), "ready", {})
    yield seen


def test_a_call_of_a_kind_is_planned_once_forward_and_backward(plans: list[str]) -> None:
    weight = drawn(6, seed=1).requires_grad_()
    for seed in range(3):
        x = drawn(4, 6, seed=seed).requires_grad_()
        y = generated.rms_norm(x, weight)
        found = torch.autograd.grad(y, (x, weight), drawn(4, 6, seed=9))
        exact = [v.detach().double().requires_grad_() for v in (x, weight)]
        want = torch.nn.functional.rms_norm(exact[0], (6,), exact[1], 1e-6)
        right = torch.autograd.grad(want, exact, drawn(4, 6, seed=9).double())
        for a, b in zip((y, *found), (want, *right)):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    assert plans == ["rms_norm"] * 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: drawn(6, 4, seed=3).t(), lambda: drawn(4, 7, seed=3), lambda: drawn(4, 6, seed=3, dtype=torch.bfloat16),
        lambda: drawn(4, 12, seed=3)[:, ::2], lambda: drawn(1, 6, seed=3).expand(4, 6),
    ],
)  # fmt: skip
def test_another_layout_or_dtype_is_another_kind(other: Any, plans: list[str]) -> None:
    x = drawn(4, 6)
    for value in (x, other(), x, other()):
        torch.testing.assert_close(generated.silu(value), torch.nn.functional.silu(value))
    assert plans == ["silu", "silu"]


def test_numbers_are_those_of_the_call(plans: list[str]) -> None:
    """Of attrs, and of tensors that are given as numbers: in the backward too."""
    x = drawn(4, 6).requires_grad_()
    for number in (2.0, 3.0, -0.0, 0.0, float("nan"), 2.0):
        y = generated.add(x, number)
        torch.testing.assert_close(y, x + number, equal_nan=True)
    for number in (2.0, -1.5):
        (grad,) = torch.autograd.grad(generated.mul(x, number), x, torch.ones_like(x))
        assert grad.eq(number).all()
    for slope in (0.25, 0.5, -0.0, 0.0):
        y = generated.leaky_relu(x.detach(), slope)
        want = torch.nn.functional.leaky_relu(x.detach(), slope)
        assert torch.equal(y, want) and torch.equal(y.signbit(), want.signbit())
    assert plans.count("add") == 1


def test_values_that_are_equal_but_of_other_types_are_told_apart(plans: list[str]) -> None:
    x = drawn(4, 6)
    generated.leaky_relu(x, 1.0)
    for wrong in (True, "1.0", None, [1.0], {}, torch.ones(())):
        with pytest.raises(TypeError, match="leaky_relu: `negative_slope` is"):
            generated.leaky_relu(x, wrong)
    generated.softmax(x, 1)
    with pytest.raises(TypeError, match="softmax: `dim`"):
        generated.softmax(x, 1.0)
    with pytest.raises(TypeError, match="softmax: `dim`"):
        generated.softmax(x, True)
    with pytest.raises(IndexError):
        generated.softmax(x, 2)


def test_a_float_that_passes_or_checks_read_is_looked_at_each_time(plans: list[str]) -> None:
    """Where a gradient is the cotangent itself for one value of an attr, where a value is refused, or must be whole."""
    a, b = drawn(3).requires_grad_(), drawn(3, seed=1).requires_grad_()
    for alpha in (1.0, 2.0, 1.0, -1.0):
        for function, sign in ((generated.add, 1.0), (generated.sub, -1.0)):
            (grad,) = torch.autograd.grad(function(a, b, alpha).sum(), b)
            assert grad.eq(sign * alpha).all(), (function, alpha)
    x, ints = drawn(4), torch.arange(3, device=DEVICE)
    for function, good, wrong in (
        (generated.celu, (1.0,), (0.0,)),
        (generated.hardtanh, (-1.0, 1.0), (2.0, 1.0)),
        (generated.softshrink, (0.5,), (-1.0,)),
    ):
        function(x, *good)
        with pytest.raises(ValueError, match=function.__name__):
            function(x, *wrong)
    assert generated.add(ints, ints, 2.0).tolist() == [0, 3, 6]
    for wrong in (2.5, float("nan"), float("inf")):
        with pytest.raises(TypeError, match="add"):
            generated.add(ints, ints, wrong)


def test_every_float_attr_is_that_of_the_call() -> None:
    """Each op with such attrs: after a call with one value, one with another is what it is in a fresh cache, backward too."""
    for name in OPS:
        kinds = {
            n: k
            for n, k in op_class(name).kinds.items()
            if isinstance(k, str) and k.startswith("float") and "*" not in k
        }
        one = case(name)
        dtype = "f32" if "f32" in one.dtypes else one.usual
        given = one.inputs("matrix" if "matrix" in one.layouts else "cube", dtype)
        for attr in kinds:
            found = []
            for fresh in (True, False):
                for value in (0.75, 0.25, -0.0, 1.0):
                    if fresh:
                        op_class(name).ready.clear()
                    found.append(outcome(name, given, {**required(name), attr: value}))
            for (kind, before), (again, after) in zip(found[:4], found[4:]):
                assert kind == again, (name, attr, before, after)
                if kind == "error":
                    assert before == after
                else:
                    assert all(
                        torch.equal(p.nan_to_num(7.0), q.nan_to_num(7.0)) for p, q in zip(before, after, strict=True)
                    ), (name, attr)


def outcome(name: str, given: dict[str, Any], attrs: dict[str, Any]) -> tuple[str, Any]:
    """Results and gradients of a call, or what it raises."""
    leaves = {
        n: v.detach().clone().requires_grad_(v.is_floating_point() and n in op_class(name).gradients)
        if isinstance(v, torch.Tensor) else v for n, v in given.items()
    }  # fmt: skip
    try:
        outputs = case(name).call(leaves, attrs)
        smooth = [y for y in outputs if y.requires_grad]
        wanted = [v for v in leaves.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        grads = (
            torch.autograd.grad(smooth, wanted, [torch.ones_like(y) for y in smooth], allow_unused=True)
            if smooth
            else ()
        )
        return "values", [*outputs, *(g for g in grads if g is not None)]
    except (TypeError, ValueError) as error:
        return "error", str(error)


def test_attrs_are_told_by_their_names() -> None:
    """In whatever order an instance gets them."""
    x, clamp = torch.tensor([-2.0, 0.5, 3.0], device=DEVICE), op_class("clamp")
    assert call(clamp(min=1.0, max=None), {"x": x}).tolist() == [1.0, 1.0, 3.0]
    assert call(clamp(max=1.0, min=None), {"x": x}).tolist() == [-2.0, 0.5, 1.0]


def test_debugging_checks_indices_after_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing, or of another dtype or shape, is said as it is without."""
    x, target = drawn(3, 5), torch.tensor([0, 4, 2], device=DEVICE)
    calls = (
        lambda: generated.cross_entropy(None, target), lambda: generated.cross_entropy(2.0, target), lambda: generated.nll_loss(None, target),
        lambda: embedding(target, None), lambda: embedding(target.float(), x), lambda: generated.nll_loss(x, target, drawn(4)),
    )  # fmt: skip
    said = []
    for debug in ("0", "1"):
        monkeypatch.setenv("PULLBACK_DEBUG", debug)
        for one in calls:
            with pytest.raises((TypeError, ValueError)) as caught:
                one()
            said.append(str(caught.value))
    assert said[: len(calls)] == said[len(calls) :]


def test_items_of_tuples_are_told_apart(plans: list[str]) -> None:
    generated.layer_norm(drawn(4, 6), (6,))
    generated.layer_norm(drawn(4, 1), (1,))
    for x, wrong in ((drawn(4, 6), (6.0,)), (drawn(4, 1), (True,))):
        with pytest.raises(TypeError, match="layer_norm: `normalized_shape` is"):
            generated.layer_norm(x, wrong)


def test_a_float_that_changes_is_no_kind_of_its_own(plans: list[str]) -> None:
    """As a slope that anneals: where no plan depends on it the cache does not grow. Where one does, each has its own."""
    x, ints = drawn(4, 6), torch.arange(6, device=DEVICE)
    for k in range(5):
        torch.testing.assert_close(generated.leaky_relu(x, k / 8), torch.nn.functional.leaky_relu(x, k / 8))
        assert torch.isnan(generated.leaky_relu(-x.abs(), float("nan"))).all()
        assert torch.equal(generated.add(ints, ints), 2 * ints)
    assert plans == ["leaky_relu", "add"] and len(op_class("leaky_relu").ready) == 1
    logits, target = drawn(3, 5), torch.tensor([0, 4, 2], device=DEVICE)
    for smoothing in (0.0, 0.1, 0.0):
        y = generated.cross_entropy(logits, target, label_smoothing=smoothing)
        torch.testing.assert_close(y, torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing))


def test_what_is_kept_has_an_end(plans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes, and is found anew."""
    monkeypatch.setattr("generated.runtime.op.KEPT", 4)
    for _ in range(2):
        for n in range(1, 7):
            torch.testing.assert_close(generated.silu(drawn(n)), torch.nn.functional.silu(drawn(n)))
        assert len(op_class("silu").ready) == 4
    assert len(plans) == 12


def test_what_is_checked_is_checked_each_time(plans: list[str]) -> None:
    x = drawn(4, 6)
    generated.add(x, x)
    for wrong in ("x", x.tolist(), x.to_sparse(), x.to(torch.complex64)):
        with pytest.raises(TypeError):
            generated.add(x, wrong)
    ints = torch.arange(6, device=DEVICE)
    assert generated.floor_divide(ints, 2).tolist() == (ints // 2).tolist()
    assert generated.floor_divide(ints, 4).tolist() == (ints // 4).tolist()
    with pytest.raises((TypeError, ValueError), match="floor_divide"):
        generated.floor_divide(ints, 2**70)


def test_memory_that_is_not_what_it_says_is_copied(plans: list[str]) -> None:
    x = drawn(4, 6)
    generated.silu(x)
    lazily = torch._neg_view(x)
    torch.testing.assert_close(generated.silu(lazily), torch.nn.functional.silu(-x))


def test_a_gradient_is_wanted_or_not(plans: list[str]) -> None:
    x = drawn(4, 6)
    leaf = x.clone().requires_grad_()
    assert not generated.silu(x).requires_grad
    for _ in range(2):
        assert generated.silu(leaf).requires_grad
        with torch.no_grad():
            assert not generated.silu(leaf).requires_grad
        with torch.inference_mode():
            assert generated.silu(leaf).is_inference()
    assert generated.silu(torch.nn.Parameter(x)).requires_grad and len(plans) == 2


def test_each_set_of_gradients_and_layout_of_cotangents_has_its_way(plans: list[str]) -> None:
    x, w, b = drawn(4, 6), drawn(6, seed=1), drawn(6, seed=2)
    cotangents = [drawn(4, 6, seed=7), drawn(6, 4, seed=7).t(), drawn(1, 1, seed=7).expand(4, 6)]
    for _ in range(2):
        leaves = [v.clone().requires_grad_() for v in (x, w, b)]
        exact = [v.double().requires_grad_() for v in (x, w, b)]
        y = generated.layer_norm(leaves[0], (6,), *leaves[1:])
        want = torch.nn.functional.layer_norm(exact[0], (6,), *exact[1:])
        for dy in cotangents:
            for chosen in ([0], [1], [2], [0, 2], [1, 2], [0, 1, 2]):
                found = torch.autograd.grad(y, [leaves[k] for k in chosen], dy, retain_graph=True)
                right = torch.autograd.grad(want, [exact[k] for k in chosen], dy.double(), retain_graph=True)
                for a, c in zip(found, right):
                    torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-5)
    assert len(plans) == 1 + len(cotangents)  # torch asks for every gradient that a leaf may get


def test_leaves_of_one_kind_may_want_other_gradients(plans: list[str]) -> None:
    """A frozen weight, a frozen input: the call is planned once, each backward for itself."""
    x, w = drawn(4, 6), drawn(6, seed=1)
    for wanted in ((True, True), (True, False), (False, True), (True, True), (False, True)):
        leaves = [v.clone().requires_grad_(own) for v, own in zip((x, w), wanted)]
        exact = [v.double().requires_grad_(own) for v, own in zip((x, w), wanted)]
        generated.rms_norm(*leaves).backward(drawn(4, 6, seed=3))
        torch.nn.functional.rms_norm(exact[0], (6,), exact[1], 1e-6).backward(drawn(4, 6, seed=3).double())
        for leaf, right in zip(leaves, exact):
            assert (leaf.grad is None) == (right.grad is None)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad.double(), right.grad, rtol=1e-5, atol=1e-6)
    assert len(plans) == 1 + 3


def test_what_a_hook_lays_out_anew_is_read_as_it_lies(plans: list[str]) -> None:
    """As `torch.autograd.graph.save_on_cpu` does: strides of what was saved are not those of the forward."""
    x = drawn(6, 4).t()
    found = []
    for pack in (lambda v: v, lambda v: v.contiguous(), lambda v: v.t().contiguous().t()):
        leaf = x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
            y = generated.silu(leaf)
        found.append(torch.autograd.grad(y, leaf, drawn(4, 6, seed=3))[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_a_hook_negates_lazily_is_what_it_says() -> None:
    x = drawn(4, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda v: -v, torch._neg_view):
        y = generated.silu(x)
    found, want = (torch.autograd.grad(v.sum(), x)[0] for v in (y, torch.nn.functional.silu(x)))
    torch.testing.assert_close(found, want)


def test_a_buffer_that_is_negated_lazily_is_refused() -> None:
    mean, var = torch._neg_view(torch.zeros(3, device=DEVICE)), torch.ones(3, device=DEVICE)
    with pytest.raises(ValueError, match="batch_norm: `running_mean` is a lazily negated view"):
        generated.batch_norm(drawn(8, 3), mean, var, None, None, True)


def test_a_sparse_cotangent_is_refused_by_name() -> None:
    x = drawn(4, 6).requires_grad_()
    with pytest.raises(TypeError, match="silu: a cotangent is torch.sparse_coo"):
        torch.autograd.grad(generated.silu(x), x, torch.ones(4, 6, device=DEVICE).to_sparse())


def test_a_call_within_a_transform_may_want_no_gradient() -> None:
    x = drawn(4)

    def mixed(f: Any) -> Any:
        return torch.func.grad(lambda v: (f(v.detach()) * v).sum() + f(x).sum())(x)

    torch.testing.assert_close(mixed(generated.silu), mixed(torch.nn.functional.silu))
    with pytest.raises(RuntimeError, match="argmax has no backward, and its kernels do not run under torch.func"):
        torch.func.grad(lambda v: v[generated.argmax(v)].sum())(x)


def test_a_batch_of_cotangents_is_handed_on_where_nothing_is_launched() -> None:
    x = drawn(4).requires_grad_()
    (grads,) = torch.autograd.grad(generated.add(x, 1.0), x, torch.eye(4, device=DEVICE), is_grads_batched=True)
    assert torch.equal(grads, torch.eye(4, device=DEVICE))


def test_buffers_count_every_update(plans: list[str]) -> None:
    mean, var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    x, want = drawn(8, 3), torch.nn.BatchNorm1d(3, affine=False).to(DEVICE)
    for k in range(3):
        y = generated.batch_norm(x, mean, var, None, None, True)
        torch.testing.assert_close(y, want(x))
        torch.testing.assert_close(mean, want.running_mean)
        torch.testing.assert_close(var, want.running_var)
        assert mean._version == k + 1
    assert len(plans) == 1


def test_second_derivatives_are_refused_every_time(plans: list[str]) -> None:
    x = drawn(4, 6).requires_grad_()
    for _ in range(2):
        dy = torch.ones_like(x).requires_grad_()
        (grad,) = torch.autograd.grad(generated.silu(x), x, dy, create_graph=True)
        with pytest.raises(RuntimeError, match="silu was differentiated twice"):
            grad.sum().backward()


def test_debugging_may_begin_later(plans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = drawn(3, 5), torch.tensor([0, 4, 7], device=DEVICE)
    with torch.no_grad():
        generated.cross_entropy(logits, target)
    monkeypatch.setenv("PULLBACK_DEBUG", "1")
    with pytest.raises(IndexError, match=r"cross_entropy: `target` is 7 at \(2,\)"):
        generated.cross_entropy(logits, target)


def test_transforms_after_a_plain_call(plans: list[str]) -> None:
    x = drawn(4, 6)
    generated.silu(x.clone().requires_grad_())
    want = torch.func.grad(lambda v: torch.nn.functional.silu(v).sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda v: generated.silu(v).sum())(x), want)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(generated.silu)(x)
    with pytest.raises(RuntimeError, match="reverse-mode"):
        torch.func.jvp(generated.silu, (x,), (x,))


def test_transforms_of_a_backward_name_the_op(plans: list[str]) -> None:
    """A tangent on a cotangent, a batch of cotangents: neither is lost, or ends in torch's own words."""
    x = drawn(3).requires_grad_()
    y = generated.silu(x)
    with pytest.raises(RuntimeError, match="silu.*vmap"):
        torch.autograd.grad(y, x, torch.eye(3, device=DEVICE), is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="silu.*vmap"):
        torch.func.jacrev(generated.silu)(x.detach())
    with torch.autograd.forward_ad.dual_level():
        dy = torch.autograd.forward_ad.make_dual(torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE))
        with pytest.raises(RuntimeError, match="silu.*reverse-mode"):
            torch.autograd.grad(y, x, dy, retain_graph=True)
    torch.testing.assert_close(
        *(torch.autograd.grad(f(x).sum(), x)[0] for f in (generated.silu, torch.nn.functional.silu))
    )


def test_no_tensor_of_a_call_is_held(plans: list[str]) -> None:
    import gc
    import weakref

    x = drawn(4, 6).requires_grad_()
    y = generated.rms_norm(x, drawn(6, seed=1))
    y.sum().backward()
    gone = weakref.ref(x), weakref.ref(y)
    del x, y
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


class Compiler:
    """In a jit function's place: says whether a launch went through Triton, or to what it had compiled."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, list[Any]]] = []
        self.fn = type(self)

    def __getitem__(self, grid: Any) -> Any:
        def compiled(*arguments: Any, **options: Any) -> Any:
            self.launched.append(("compiled", [*arguments]))
            again = lambda *arguments: self.launched.append(("again", [*arguments]))  # noqa: E731
            return {grid: again}

        return compiled


def test_a_launch_is_compiled_once_for_each_alignment() -> None:
    """Triton compiles for pointers that are aligned to 16 bytes; all else that it looks at is fixed by the plan."""
    abi = KernelAbi(
        (
            Param("x_ptr", "ptr"),
            Param("w_ptr", "ptr"),
            Param("n", "i64"),
            Param("eps", "f64"),
            Param("BLOCK", "constexpr"),
        )
    )
    compiler = Compiler()
    launch = Launch(Kernel(compiler, abi), (3, 1, 1), {"x_ptr": "x"}, {"n": 4, "BLOCK": 16})
    start = prepared.PreparedLaunch(launch, {"y": 0, "x": 1}, Limits())
    for eps, aligned in ((0.5, (True,)), (0.25, (True,)), (0.5, (False,)), (0.5, (True,)), (1.0, (False,))):
        start(["y", eps], {"eps": eps}, aligned)
    assert [how for how, _ in compiler.launched] == ["compiled", "again", "compiled", "again", "again"]
    assert [a for _, a in compiler.launched] == [[e, None, 4, e, 16] for e in (0.5, 0.25, 0.5, 0.5, 1.0)]


def test_a_tensor_of_another_alignment_is_said_so(monkeypatch: pytest.MonkeyPatch, plans: list[str]) -> None:
    """Forward and backward, whichever comes first; what is found is right on a GPU too, which faults where it is not."""
    seen: list[tuple[bool, ...]] = []
    whole = prepared.PreparedLaunch.__call__

    def watched(self: Any, tensors: Any, numbers: Any, aligned: tuple[bool, ...]) -> None:
        seen.append(aligned)
        whole(self, tensors, numbers, aligned)

    monkeypatch.setattr(prepared.PreparedLaunch, "__call__", watched)
    memory, seed = drawn(4104), drawn(4104, seed=1)
    for first, begin in ((0, 4), (1, 4), (0, 5), (3, 3)):
        x, dy = memory[first : first + 4096].detach().requires_grad_(), seed[begin : begin + 4096]
        y = generated.silu(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        want = torch.nn.functional.silu(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(dx, torch.autograd.grad(want, x, dy)[0])
    assert seen == [(True,), (True, True), (False,), (False, True), (True,), (True, False), (False,), (False, False)]
    assert len(plans) == 2


def test_devices_make_kinds() -> None:
    from generated.runtime.binding import _key
    from generated.runtime.device import torch_library

    op = op_class("silu")()
    keys = [_key(op, {"x": torch.empty(3, device=d)}, torch_library()) for d in ("cpu", "meta", "cpu")]
    assert keys[0] == keys[2] != keys[1] is not None


def test_a_kernel_that_is_compiled_in_the_background_is_waited_for() -> None:
    class Future:
        def result(self) -> Any:
            return {(1, 1, 1): "started"}

    assert prepared.started(Future(), (1, 1, 1)) == prepared.started({(1, 1, 1): "started"}, (1, 1, 1)) == "started"
