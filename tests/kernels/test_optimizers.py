"""Steps: each optimizer beside torch's own, tables and launches, state dicts, clipping, scaling, copies, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.runtime import optim  # noqa: E402
from generated.runtime.stepwise import BLOCK, StepOp, tiles  # noqa: E402
from generated.runtime.testing import DEVICE, EPS, TORCH  # noqa: E402

NAMES = {
    "sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adamax": "Adamax", "nadam": "NAdam", "radam": "RAdam", "adagrad": "Adagrad",
    "adadelta": "Adadelta", "asgd": "ASGD", "rmsprop": "RMSprop", "rprop": "Rprop",
}  # fmt: skip
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, {"momentum": 0.8, "nesterov": True}, {"maximize": True},
        {"momentum": 0.9, "maximize": True},
    ],
    "adam": [
        {"weight_decay": 0.1}, {"amsgrad": True, "betas": (0.8, 0.9)}, {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True, "eps": 1e-3},
    ],
    "adamw": [{"weight_decay": 0.0}, {"amsgrad": True, "weight_decay": 0.3}, {"maximize": True, "lr": 0.1}],
    "adamax": [{"weight_decay": 0.1, "betas": (0.7, 0.9)}, {"maximize": True, "eps": 1e-2}],
    "nadam": [
        {"weight_decay": 0.1, "momentum_decay": 0.05}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True},
    ],
    "radam": [
        {"weight_decay": 0.1, "betas": (0.9, 0.99)}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True},
    ],
    "adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1}, {"initial_accumulator_value": 0.5, "eps": 1e-2}, {"maximize": True}],
    "adadelta": [{"rho": 0.7, "weight_decay": 0.1}, {"lr": 0.3, "eps": 1e-3}, {"maximize": True}],
    "asgd": [{"lambd": 0.1, "alpha": 0.5, "t0": 3.0}, {"weight_decay": 0.1}, {"maximize": True}],
    "rmsprop": [
        {"momentum": 0.9, "weight_decay": 0.1}, {"centered": True, "alpha": 0.8}, {"centered": True, "momentum": 0.5},
        {"maximize": True, "eps": 1e-2},
    ],
    "rprop": [{"etas": (0.3, 1.5)}, {"step_sizes": (1e-3, 0.02)}, {"maximize": True}],
}  # fmt: skip
SIZES = [(0,), (1,), (13,), (), (3, 5), (BLOCK,), (BLOCK + 5,)]
SOME = [(7,), (BLOCK + 3,)]


def op_class(name: str) -> type[StepOp]:
    module = importlib.import_module(f"generated.ops.{name}")
    found = next(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__)
    assert issubclass(found, StepOp)
    return found


STEPS = [n for n in sorted(dir(generated)) if not importlib.import_module(f"generated.ops.{n}").__dict__.get("call")]


def drawn(shape: tuple[int, ...], seed: int, dtype: str = "f32") -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, TORCH[dtype])


def params(shapes: list[tuple[int, ...]], dtype: str = "f32") -> list[Any]:
    return [drawn(s, 100 + k, dtype) for k, s in enumerate(shapes)]


def give(tensors: list[Any], step: int, *others: list[Any]) -> None:
    """The same random gradients to each list, in its own dtype."""
    for k, tensor in enumerate(tensors):
        grad = drawn(tuple(tensor.shape), 1000 * step + k)
        for own in (tensors, *others):
            own[k].grad = grad.to(own[k].dtype, copy=True)


def groups(tensors: list[Any]) -> list[dict[str, Any]]:
    """Two groups, the second with a learning rate of its own."""
    half = len(tensors) // 2
    return [{"params": tensors[:half]}, {"params": tensors[half:], "lr": 0.02}]


def exactly(name: str, tensors: list[Any], **hyper: Any) -> tuple[Any, list[Any]]:
    """torch's optimizer in float64 on the same numbers."""
    exact = [t.double() for t in tensors]
    return getattr(torch.optim, NAMES[name])(groups(exact), **hyper), exact


def near(got: Any, want: Any, steps: int, ulps: float = 4.0) -> None:
    """Within a few units in the last place a step."""
    names = {v: k for k, v in TORCH.items()}
    bound = steps * ulps * EPS[names[got.dtype]] * (1 + want.abs())
    assert ((got.double() - want).abs() <= bound).all(), float(((got.double() - want).abs() / bound).max())


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The kernels that are launched, with the address of each argument and each constant."""
    seen: list[tuple[str, dict[str, Any]]] = []
    whole = optim.run

    def record(found: Any, tensors: Any, limits: Any) -> None:
        for launch in found:
            own = launch.arguments(tensors, {})
            seen.append(
                (
                    launch.kernel.function.fn.__name__,
                    {n: getattr(v, "data_ptr", lambda v=v: v)() for n, v in own.items()},
                )
            )
        whole(found, tensors, limits)

    monkeypatch.setattr(optim, "run", record)
    return seen


# ---------------------------------------------------------------------------------------------- beside torch


def test_every_step_is_here() -> None:
    assert set(STEPS) == {*NAMES, "lion"} == {n for n in dir(generated) if not op_class_has_outputs(n)}


def op_class_has_outputs(name: str) -> bool:
    module = importlib.import_module(f"generated.ops.{name}")
    return any(getattr(v, "outputs", ()) for v in vars(module).values() if isinstance(v, type))


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_steps_follow_torch(name: str) -> None:
    """Two groups whose learning rates change; the reference is torch's optimizer in float64 on the same gradients."""
    ours = params(SOME)
    reference, exact = exactly(name, ours)
    optimizer = getattr(generated, name)(groups(ours))
    for step in range(100):
        give(ours, step, exact)
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] = reference.defaults["lr"] * (1 + 0.5 * math.sin(step))
            each.step()
        if step % 33 == 0 or step == 99:
            for a, b in zip(ours, exact):
                near(a, b, step + 1)


@pytest.mark.parametrize(("name", "hyper"), [(n, h) for n, options in OPTIONS.items() for h in ({}, *options)], ids=str)
def test_each_option_follows_torch_over_many_sizes(name: str, hyper: dict[str, Any]) -> None:
    ours = params(SIZES)
    reference, exact = exactly(name, ours, **hyper)
    optimizer = getattr(generated, name)(groups(ours), **hyper)
    for step in range(5):
        give(ours, step, exact)
        optimizer.step()
        reference.step()
    for a, b in zip(ours, exact):
        near(a, b, 5)
    state = optimizer.state_dict()["state"]
    for key, own in reference.state_dict()["state"].items():
        assert set(state[key]) == {n for n, v in own.items() if v is not None}
        for n, value in own.items():
            if value is not None:
                near(state[key][n].float(), value.double(), 5, 16.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
def test_parameters_of_other_dtypes_follow_torch_step_by_step(name: str, dtype: str) -> None:
    """A step rounds once: each is torch's in float64 from what was stored before it."""
    ours = params(SOME, dtype)
    optimizer = getattr(generated, name)(groups(ours))
    for step in range(6):
        reference, exact = exactly(name, ours)
        if step:
            reference.load_state_dict(optimizer.state_dict())
        give(ours, step, exact)
        optimizer.step()
        reference.step()
        for a, b in zip(ours, exact):
            near(a, b, 1, 0.75 if dtype != "f64" else 4.0)
    assert all(
        s.dtype == torch.float64 if dtype == "f64" else torch.float32 for p in ours for s in optimizer.state[p].values()
    )


def test_sign_steps_follow_the_paper() -> None:
    """Chen et al. (2023), algorithm 2."""
    ours = params(SOME)
    exact = [p.double() for p in ours]
    moments = [torch.zeros_like(p) for p in exact]
    optimizer = generated.lion(ours, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(20):
        give(ours, step)
        for p, m, own in zip(exact, moments, ours):
            grad = own.grad.double()
            p -= 1e-2 * ((0.9 * m + 0.1 * grad).sign() + 0.1 * p)
            m.mul_(0.99).add_(0.01 * grad)
        optimizer.step()
    for a, b in zip(ours, exact):
        near(a, b, 20)


# ---------------------------------------------------------------------------------------------- tables and launches


def test_tiles_follow_one_another() -> None:
    assert tiles([BLOCK + 1, 0, 1, 2 * BLOCK]) == ([0, 2, 2, 3], [0, 0, 2, 3, 3])
    assert tiles([]) == ([], [])


def test_many_tensors_are_one_launch_and_numbers_compile_nothing(launches: list[tuple[str, dict[str, Any]]]) -> None:
    """Hyper-parameters that change at each step leave every argument of the launch what it was, the grid among them."""
    ours = params([(k,) for k in range(1, 31)])
    optimizer = generated.adamw(ours)
    grads = [torch.ones_like(p) for p in ours]
    for param, grad in zip(ours, grads):
        param.grad = grad
    for step in range(3):
        optimizer.param_groups[0].update(lr=0.1 / (step + 1), betas=(0.5 + 0.1 * step, 0.9), weight_decay=0.1 * step)
        optimizer.step()
    assert [name for name, _ in launches] == ["adamw_step"] * 3
    assert launches[0][1] == launches[1][1] == launches[2][1]


def test_dtypes_and_choices_are_launches_of_their_own(launches: list[tuple[str, dict[str, Any]]]) -> None:
    ours = [*params(SOME), *params(SOME, "bf16")]
    optimizer = generated.adamw([{"params": ours[:1]}, {"params": ours[1:3], "amsgrad": True}, {"params": ours[3:]}])
    give(ours, 0)
    optimizer.step()
    kinds = [(own["amsgrad"], str(own["DTYPES"][2])) for _, own in launches]
    assert kinds == [(False, "fp32"), (True, "fp32"), (True, "bf16"), (False, "bf16")]


def test_new_gradients_change_addresses_alone(launches: list[tuple[str, dict[str, Any]]]) -> None:
    ours = params(SOME)
    optimizer = generated.sgd(ours, momentum=0.9)
    kept = []
    for step in range(3):
        optimizer.zero_grad()
        give(ours, step)
        kept += [p.grad for p in ours]
        optimizer.step()
    assert launches[0][1] == launches[1][1] == launches[2][1]


def test_parameters_without_a_gradient_stay_and_are_not_counted() -> None:
    ours = params(SOME)
    reference, exact = exactly("adam", ours)
    optimizer = generated.adam(groups(ours))
    for step in range(4):
        give(ours, step, exact)
        if step in (0, 2):
            ours[1].grad = exact[1].grad = None
        optimizer.step()
        reference.step()
    for a, b in zip(ours, exact):
        near(a, b, 4)
    assert [s["step"].item() for s in optimizer.state_dict()["state"].values()] == [4.0, 2.0]


def test_layout_and_alignment_change_no_bit() -> None:
    """The same numbers where no vector begins, in another order of dims, and with gradients of other strides."""
    plain = drawn((6, 5), 1)
    wide = torch.zeros(31, device=DEVICE)
    shifted = wide[1:].view(6, 5).copy_(plain)
    turned = plain.t().contiguous().t()
    other = plain.clone()
    ours = [plain.clone(), shifted, turned, other]
    optimizer = generated.adamw(ours)
    for step in range(3):
        grad = drawn((6, 5), 50 + step)
        for param in ours:
            param.grad = grad.clone()
        other.grad = grad.t().contiguous().t()
        optimizer.step()
    assert turned.stride() == (1, 6) and optimizer.state[turned]["exp_avg"].stride() == (1, 6)
    assert all(torch.equal(ours[0], p) for p in ours[1:]) and wide[0] == 0


def test_a_closure_is_called_with_gradients_on() -> None:
    (param,) = params([(5,)])
    param.requires_grad_()
    optimizer = generated.sgd([param], lr=0.5)
    before = param.detach().clone()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (param * param).sum() / 2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx((before * before).sum().item() / 2)
    near(param.detach(), before.double() / 2, 1)


def test_a_scheduler_of_torch_drives_it() -> None:
    ours = params(SOME)
    reference, exact = exactly("sgd", ours)
    optimizer = generated.sgd(groups(ours))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, reference)]
    for step in range(4):
        give(ours, step, exact)
        for each in (optimizer, reference, *schedulers):
            each.step()
    for a, b in zip(ours, exact):
        near(a, b, 4)


def schedulers() -> Iterator[tuple[str, Any]]:
    rates = torch.optim.lr_scheduler
    yield "one cycle", lambda o: rates.OneCycleLR(o, max_lr=0.1, total_steps=10)
    yield "cyclic", lambda o: rates.CyclicLR(o, base_lr=0.01, max_lr=0.1, cycle_momentum=True)
    yield "step", lambda o: rates.StepLR(o, 2)
    yield "averaging", lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05)


@pytest.mark.parametrize("make", [c[1] for c in schedulers()], ids=[c[0] for c in schedulers()])
def test_groups_that_schedulers_wrote_in_are_taken(make: Any) -> None:
    """And what torch's own optimizers have there, and names."""
    ours = params(SOME)
    first = torch.optim.Adam(groups(ours))
    make(first)
    second = generated.adam([{**g, "name": "a"} for g in first.param_groups])
    assert [g["lr"] for g in second.param_groups] == [g["lr"] for g in first.param_groups]
    named = generated.adamw([(f"p{k}", p) for k, p in enumerate(ours)])
    assert named.param_groups[0]["param_names"] == ["p0", "p1"]


def test_a_refused_group_is_left_as_it_was() -> None:
    ours = params(SOME)
    optimizer = generated.adamw(ours[:1])
    group = {"params": ours[1:], "weight_decoy": 0.0}
    with pytest.raises(TypeError, match=r"`weight_decoy` \(did you mean `weight_decay`\?\)"):
        optimizer.add_param_group(group)
    assert sorted(group) == ["params", "weight_decoy"] and len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("param", "grad", "copied"),
    [("f64", "f64", "bf16"), ("bf16", "f64", None), ("bf16", "f64", "bf16"), ("f64", "bf16", "bf16")],
)
def test_doubles_are_rounded_to_bf16(param: str, grad: str, copied: str | None) -> None:
    """Where a step computes in float64, its bf16 results are those numbers rounded."""
    ours = params(SIZES, param)
    optimizer = generated.sgd(ours, lr=0.1, momentum=0.9)
    exact = [p.to(torch.float64, copy=True) for p in ours]
    grads = [drawn(tuple(p.shape), 50 + k, grad) for k, p in enumerate(ours)]
    copies = [None if copied is None else torch.zeros_like(p, dtype=TORCH[copied]) for p in ours]
    for p, g, c in zip(ours, grads, copies):
        optimizer.bind(p, grad=g, copy=c)
    optimizer.step()
    for p, e, g, c in zip(ours, exact, grads, copies):
        want = e - 0.1 * g.double()
        assert torch.allclose(p.double(), want, rtol=2 * EPS[param], atol=1e-15)
        if c is not None:
            assert torch.allclose(c.double(), want, rtol=EPS["bf16"], atol=1e-15)


def test_a_step_bumps_the_version_of_its_parameters() -> None:
    (param,) = params([(5,)])
    param.requires_grad_()
    loss = (param * param).sum()
    param.grad = torch.ones_like(param)
    generated.sgd([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------------------------------------- state dicts


def after(optimizer: Any, tensors: list[Any], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        give(tensors, step)
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_go_both_ways(name: str) -> None:
    """Ours continues in torch's optimizer, torch's in ours, and ours in ours."""
    hyper = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
    make, theirs = getattr(generated, name), getattr(torch.optim, NAMES[name])
    ours = params(SOME, "f64")
    optimizer = make(groups(ours), **hyper)
    after(optimizer, ours, 3)
    second, third = [p.clone() for p in ours], [p.clone() for p in ours]
    in_torch = theirs(groups(second), lr=0.5)
    in_torch.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = make(groups(third), lr=0.5)
    again.load_state_dict(in_torch.state_dict())
    assert again.param_groups[1]["lr"] == 0.02
    for each, own in ((optimizer, ours), (in_torch, second), (again, third)):
        after(each, own, 3, 3)
    for a, b, c in zip(ours, second, third):
        assert torch.equal(a, c)
        near(b.float(), a, 6)  # torch rounds some numbers to float32


def test_state_is_loaded_as_it_is_kept() -> None:
    """Of half parameters too: float32, bit for bit."""
    ours = params(SOME, "bf16")
    optimizer = generated.adamw(ours)
    after(optimizer, ours, 2)
    other = [p.clone() for p in ours]
    again = generated.adamw(other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(ours, other):
        assert all(torch.equal(v, again.state[b][n]) for n, v in optimizer.state[a].items())
        assert all(v.dtype == torch.float32 for v in again.state[b].values())


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    ours = params(SOME)
    optimizer = generated.adamw(ours)
    after(optimizer, ours, 1)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    del wrong["state"][0]["exp_avg"]
    wrong["state"][1]["exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(ValueError) as found:
        optimizer.load_state_dict(wrong)
    assert str(found.value) == (
        "adamw: the state dict does not fit: parameter 0 lacks `exp_avg`; `exp_avg_sq` of parameter 1 is (3,), its parameter (2051,)"
    )
    with pytest.raises(
        ValueError,
        match=r"adamw: the state dict does not fit: it has groups of \[1\] parameters, the optimizer of \[2\]",
    ):
        optimizer.load_state_dict({"state": {}, "param_groups": [{**before["param_groups"][0], "params": [0]}]})
    broken = copy.deepcopy(before)
    del broken["param_groups"][0]["betas"]
    with pytest.raises(ValueError, match="adamw: the state dict does not fit: group 0 lacks `betas`"):
        optimizer.load_state_dict(broken)
    now = optimizer.state_dict()
    assert all(torch.equal(v, now["state"][k][n]) for k, s in before["state"].items() for n, v in s.items())


def damaged() -> Iterator[tuple[str, Any, str]]:
    """What is done to a dict of two parameters, and all that is said of it."""
    first = "exp_avg", "parameter 0"
    takes = "it takes a whole number that is not negative"
    for value, text in (
        (float("nan"), "nan"), (torch.tensor(float("inf")), "tensor(inf)"), ("a", "'a'"), (-5, "-5"), (2.5, "2.5"), (True, "True"),
        (torch.ones(2), "a tensor of shape (2,)"), (10**400, "1" + 39 * "0"),
    ):  # fmt: skip
        yield f"step {text}", lambda d, v=value: d["state"][0].update(
            step=v
        ), f"`step` of {first[1]} is {text}; {takes}"
    for value, text in (
        (3.0, "3.0; it takes a float tensor"),
        (torch.zeros(7, dtype=torch.int64), "torch.strided torch.int64 on cpu; it takes a dense float tensor"),
        (torch.zeros(7).to_sparse(), "torch.sparse_coo torch.float32 on cpu; it takes a dense float tensor"),
        (torch.zeros(7, device="meta"), "torch.strided torch.float32 on meta; it takes a dense float tensor"),
        (torch.zeros(8), "(8,), its parameter (7,)"),
    ):
        yield f"exp_avg {text}", lambda d, v=value: d["state"][0].update(
            exp_avg=v
        ), f"`exp_avg` of {first[1]} is {text}"
    for name, value, text in (
        ("lr", -1.0, "requires lr >= 0"), ("lr", "x", "`lr` is 'x'; it takes a number"), ("betas", (0.9,), "`betas` is (0.9,); it takes 2"),
        ("betas", 5, "requires 0 <= betas[0] < 1"), ("betas", object, None), ("amsgrad", 3, "`amsgrad` is 3; it takes True or False"),
        ("betas", (2, 3), "requires 0 <= betas[0] < 1"),
    ):  # fmt: skip
        said = None if text is None else f"group 0: {text}"
        yield f"{name} {value}", lambda d, n=name, v=value: d["param_groups"][0].update({n: v}), said
    yield "no state", lambda d: d.pop("state"), "`state` is missing"
    yield "a state", lambda d: d.update(state=[1]), "`state` is a list; it takes a dict"
    yield "no groups", lambda d: d.pop("param_groups"), "`param_groups` is missing"
    yield "groups", lambda d: d.update(param_groups=3), "`param_groups` is 3; it takes a list of groups"
    yield "group", lambda d: d["param_groups"].append(3), "group 1: a group is a dict that has a list `params` of ids"
    yield "params", lambda d: d["param_groups"][0].pop(
        "params"
    ), "group 0: a group is a dict that has a list `params` of ids"
    yield "unhashable", lambda d: d["param_groups"][0].update(params=[[0], 1]), (
        "group 0: a group is a dict that has a list `params` of ids"
    )  # fmt: skip
    yield "ids", lambda d: d["param_groups"][0].update(
        params=[3, 1]
    ), "it has state of parameter 0, which no group names"
    yield "twice", lambda d: d["param_groups"][0].update(params=[0, 0]), (
        "it has state of parameter 1, which no group names; parameter 0 is named twice"
    )
    yield "one state", lambda d: d["state"].update({0: 5}), "the state of parameter 0 is 5; it takes a dict"


@pytest.mark.parametrize(("damage", "text"), [c[1:] for c in damaged()], ids=[c[0] for c in damaged()])
def test_a_damaged_state_dict_is_refused_and_changes_nothing(damage: Any, text: str | None) -> None:
    ours = params(SOME)
    optimizer = generated.adamw(ours)
    after(optimizer, ours, 2)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    damage(wrong)
    with pytest.raises(ValueError, match="^adamw: the state dict does not fit: ") as found:
        optimizer.load_state_dict(wrong)
    assert text is None or str(found.value) == f"adamw: the state dict does not fit: {text}"
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    assert all(torch.equal(v, now["state"][k][n]) for k, s in before["state"].items() for n, v in s.items())


def test_all_that_is_damaged_is_said_at_once() -> None:
    ours = params(SOME)
    optimizer = generated.adamw(groups(ours))
    after(optimizer, ours, 1)
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["param_groups"][0] |= {"lr": "x", "betas": (0.9, 3), "eps": -1.0}
    del wrong["param_groups"][1]["weight_decay"]
    wrong["state"][0] |= {"step": "a", "exp_avg": 3.0}
    wrong["state"][1] = 5
    wrong["state"][7] = {}
    with pytest.raises(ValueError) as found:
        optimizer.load_state_dict(wrong)
    assert str(found.value).removeprefix("adamw: the state dict does not fit: ").split("; ") == [
        "it has state of parameter 7, which no group names", "group 0: `lr` is 'x'", "it takes a number",
        "group 0: requires 0 <= betas[1] < 1", "group 0: requires eps >= 0", "`exp_avg` of parameter 0 is 3.0", "it takes a float tensor",
        "`step` of parameter 0 is 'a'", "it takes a whole number that is not negative", "group 1 lacks `weight_decay`",
        "the state of parameter 1 is 5", "it takes a dict",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="adamw: the state dict is a list; it takes a dict"):
        optimizer.load_state_dict([wrong])


def test_numbers_of_the_host_are_checked_too() -> None:
    ours = params(SOME)
    optimizer = generated.nadam(ours)
    after(optimizer, ours, 1)
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][1]["mu_product"] = torch.tensor(float("nan"))
    with pytest.raises(ValueError, match=r"`mu_product` of parameter 1 is tensor\(nan\); it takes a finite number$"):
        optimizer.load_state_dict(wrong)


def test_what_is_loaded_is_not_shared() -> None:
    """A learning rate that is a tensor is copied, as torch copies it; state that wants a gradient takes none along."""
    ours = params(SOME)
    optimizer = generated.adamw(ours)
    after(optimizer, ours, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = torch.tensor(0.5)
    saved["state"][0]["exp_avg"].requires_grad_()
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["lr"].fill_(7.0)
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    assert not optimizer.state[ours[0]]["exp_avg"].requires_grad
    after(optimizer, ours, 1, 1)


def pickled(given: Any) -> Any:
    return pickle.loads(pickle.dumps(given))


@pytest.mark.parametrize("name", ["adamw", "nadam", "sgd"])
@pytest.mark.parametrize("again", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_by_itself(name: str, again: Any) -> None:
    """With the parameters, state, counts and bound tensors of its own; the first does not see its steps."""
    hyper = {"momentum": 0.9} if name == "sgd" else {}
    ours = params(SOME, "f64")
    optimizer = getattr(generated, name)(groups(ours), **hyper)
    optimizer.bind(ours[1], copy=torch.zeros_like(ours[1], dtype=torch.float32))
    after(optimizer, ours, 2)
    at, kept = [p.clone() for p in ours], copy.deepcopy(optimizer.state_dict())
    other, theirs = again((optimizer, ours))
    assert type(other) is type(optimizer) and theirs[0] is other.param_groups[0]["params"][0]
    after(other, theirs, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(ours, at)), "the first has moved"
    now = optimizer.state_dict()
    assert all(torch.equal(v, now["state"][k][n]) for k, s in kept["state"].items() for n, v in s.items())
    after(optimizer, ours, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    assert torch.equal(other._own[theirs[1]].copy, theirs[1].float())
    other.add_param_group({"params": params([(4,)], "f64")})
    assert other.param_groups[2]["lr"] == other.defaults["lr"]


def test_a_copy_clips_as_the_first_would() -> None:
    ours = params(SOME)
    optimizer = generated.sgd(ours, lr=0.1)
    give(ours, 0)
    bound = [p.grad for p in ours]
    for param, grad in zip(ours, bound):
        optimizer.bind(param, grad=grad)
    optimizer.clip_grad_norm(0.5)
    other = copy.deepcopy(optimizer)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, other.param_groups[0]["params"]))


def test_hooks_of_state_dicts_are_called_as_torch_calls_them() -> None:
    calls: dict[str, list[Any]] = {"ours": [], "torch": []}
    kept: dict[str, Any] = {}
    for who, make in (("ours", generated.adamw), ("torch", torch.optim.AdamW)):
        own, seen = params(SOME), calls[who]
        optimizer = make(own, lr=0.1)
        after(optimizer, own, 1)

        def loading(it: Any, d: dict[str, Any], seen: list[Any] = seen) -> dict[str, Any]:
            seen.append(("loading", sorted(d), it.param_groups[0]["lr"]))
            d["note"] = 1  # of a shallow copy
            return {**d, "param_groups": [{**d["param_groups"][0], "lr": 0.25}]}

        def saved(it: Any, d: dict[str, Any], seen: list[Any] = seen) -> dict[str, Any]:
            seen.append(("saved", sorted(d), sorted(d["state"][0])))
            return {**d, "more": 3}

        optimizer.register_state_dict_pre_hook(lambda it, seen=seen: seen.append(("saving", it.param_groups[0]["lr"])))
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(loading)
        optimizer.register_load_state_dict_pre_hook(lambda it, d, seen=seen: seen.append("first"), prepend=True)
        optimizer.register_load_state_dict_post_hook(
            lambda it, seen=seen: seen.append(("loaded", it.param_groups[0]["lr"], torch.is_grad_enabled()))
        )
        kept[who] = optimizer.state_dict()
        optimizer.load_state_dict(kept[who])
        assert kept[who]["more"] == 3 and "note" not in kept[who]
    assert calls["ours"] == calls["torch"] and len(calls["ours"]) == 5
    assert calls["ours"][-1] == ("loaded", 0.25, True)


# ---------------------------------------------------------------------------------------------- clipping, scaling


@pytest.mark.parametrize("limit", [0.5, 1e4])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_clipping_is_torchs(limit: float, dtype: str) -> None:
    ours, second = params(SIZES, dtype), params(SIZES, dtype)
    optimizer, reference = generated.sgd(ours, lr=1.0), torch.optim.SGD(second, lr=1.0)
    for step in range(2):
        give(ours, step, second)
        kept = [p.grad.clone() for p in ours]
        norm = optimizer.clip_grad_norm(limit)
        want = torch.nn.utils.clip_grad_norm_(second, limit)
        assert norm.dtype == want.dtype and norm.shape == () and torch.allclose(norm, want, rtol=8 * EPS[dtype], atol=0)
        optimizer.step()
        reference.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, kept)), "the gradients themselves stay"
    for a, b in zip(ours, second):
        near(a, b.double(), 2)


def test_the_factor_is_of_one_step() -> None:
    (param,) = params([(5,)])
    optimizer = generated.sgd([param], lr=1.0)
    param.grad = torch.full_like(param, 2.0)
    optimizer.clip_grad_norm(1e-3)
    optimizer.step()
    before = param.clone()
    optimizer.step()
    assert torch.equal(before - 2.0, param)


def test_clipping_takes_several_dtypes_and_infinities() -> None:
    ours = [*params(SOME), *params(SOME, "bf16")]
    optimizer = generated.sgd(ours)
    give(ours, 0)
    want = torch.cat([p.grad.double().flatten() for p in ours]).norm()
    assert optimizer.clip_grad_norm(1.0).item() == pytest.approx(want.item(), rel=1e-6)
    ours[0].grad[0] = math.inf
    assert optimizer.clip_grad_norm(1.0).item() == math.inf
    ours[0].grad[0] = math.nan
    assert math.isnan(optimizer.clip_grad_norm(1.0).item())
    with pytest.raises(ValueError, match="sgd: `max_norm` is -1.0; it is not negative"):
        optimizer.clip_grad_norm(-1.0)


@pytest.mark.parametrize("clipped", [False, True])
def test_scaled_gradients_give_the_same_step(clipped: bool) -> None:
    ours, second = params(SOME), params(SOME)
    optimizer, plain = generated.adamw(ours), generated.adamw(second)
    give(ours, 0, second)
    for param in ours:
        param.grad *= 1024.0
    optimizer.grad_scale = torch.full((), 1024.0, device=DEVICE)
    if clipped:
        assert torch.equal(optimizer.clip_grad_norm(0.5), plain.clip_grad_norm(0.5))
    optimizer.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, second))


def test_a_grad_scaler_of_torch_drives_it() -> None:
    """A step with an infinity is left out and not counted, as in torch's own optimizer."""
    ours, second = [p.requires_grad_() for p in params(SOME)], [p.requires_grad_() for p in params(SOME)]
    optimizer, reference = generated.adam(ours), torch.optim.Adam(second)
    scalers = [torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for own, each, scaler in ((ours, optimizer, scalers[0]), (second, reference, scalers[1])):
            each.zero_grad()
            loss = sum((p * drawn(tuple(p.shape), 10 * step + k)).sum() for k, p in enumerate(own))
            scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
            scaler.step(each)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for a, b in zip(ours, second):
        near(a.detach(), b.detach().double(), 5)
    assert {s["step"].item() for s in optimizer.state_dict()["state"].values()} == {4.0}


@pytest.mark.parametrize("name", ["sgd", "nadam"])
def test_what_was_not_taken_is_not_counted(name: str) -> None:
    """Nor is the first momentum, or a number that the host keeps."""
    hyper = {"momentum": 0.9, "dampening": 0.5} if name == "sgd" else {}
    ours, second = params(SOME), params(SOME)
    optimizer, plain = getattr(generated, name)(ours, **hyper), getattr(generated, name)(second, **hyper)
    for step, found in enumerate((1.0, 0.0, 1.0, 0.0)):
        give(ours, step, second)
        optimizer.found_inf = torch.full((), found, device=DEVICE)
        optimizer.step()
        if not found:
            plain.step()
    give(ours, 7, second)
    optimizer.found_inf = torch.ones((), device=DEVICE)
    optimizer.step()
    del optimizer.found_inf
    for each in (optimizer, optimizer, plain, plain):
        each.step()
    assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    for own, other in zip(optimizer.state_dict()["state"].values(), plain.state_dict()["state"].values()):
        assert all(torch.equal(v, other[n]) for n, v in own.items())
    assert all(torch.equal(a, b) for a, b in zip(ours, second))


# ---------------------------------------------------------------------------------------------- masters and copies


def test_gradients_and_copies_of_another_dtype() -> None:
    """Gradients in half precision step float32 parameters, and the copy is what they round to."""
    ours = params(SIZES)
    second = [p.clone() for p in ours]
    grads = [torch.zeros_like(p, dtype=torch.float16) for p in ours]
    copies = [torch.empty_like(p, dtype=torch.float16) for p in ours]
    optimizer, plain = generated.adamw(ours, lr=0.1), generated.adamw(second, lr=0.1)
    for param, grad, low in zip(ours, grads, copies):
        optimizer.bind(param, grad, low)
    for step in range(3):
        for grad, param in zip(grads, second):
            grad.copy_(drawn(tuple(grad.shape), 30 + step))
            param.grad = grad.float()
        optimizer.step()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, second))
    assert all(torch.equal(a.half(), b) for a, b in zip(ours, copies))
    optimizer.zero_grad()
    assert not any(g.any() for g in grads)
    assert optimizer.clip_grad_norm(1.0).item() == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
def test_a_captured_step_takes_new_hyper_parameters(scaled: bool) -> None:
    """A graph of clipping and launch, replayed after `prepare`, does what steps one by one do; a step that is not taken is not counted."""
    ours, second = params(SIZES), params(SIZES)
    optimizer, plain = generated.adamw(ours), generated.adamw(second)
    flag = torch.zeros((), device=DEVICE)
    give(ours, 0, second)
    if scaled:
        optimizer.found_inf = plain.found_inf = flag
    for each in (optimizer, plain):
        each.clip_grad_norm(0.5)
        each.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.clip_grad_norm(0.5)
        optimizer.launch()
    for step in range(1, 6):
        for a, b in zip(ours, second):
            new = drawn(tuple(a.shape), 500 + step)
            a.grad.copy_(new)
            b.grad.copy_(new)
        flag.fill_(float(scaled and step == 3))
        for each in (optimizer, plain):
            each.param_groups[0]["lr"] = 0.1 / step
        optimizer.prepare()
        graph.replay()
        plain.clip_grad_norm(0.5)
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, second))
    counts = {s["step"].item() for o in (optimizer, plain) for s in o.state_dict()["state"].values()}
    assert counts == {5.0 if scaled else 6.0}


@pytest.mark.gpu
def test_a_step_of_the_device_waits_for_no_host() -> None:
    """Nor does clipping: torch raises where one would."""
    ours = params(SIZES)
    optimizer = generated.adamw(ours)
    give(ours, 0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for k in range(2):
            optimizer.param_groups[0]["lr"] = 0.01 * k
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------------------------------- launches that are replayed


def renew(step: int, tensors: list[Any], *others: list[Any]) -> None:
    """New values in the gradients that there are."""
    for k, tensor in enumerate(tensors):
        grad = drawn(tuple(tensor.shape), 1000 * step + k)
        for own in (tensors, *others):
            own[k].grad.copy_(grad)


@pytest.mark.parametrize("name", [*NAMES, "lion"])
def test_gradients_may_be_computed_after_prepare(name: str) -> None:
    """As in a replay: `prepare`, then the gradients, the norm and the launch."""
    ours, second = params(SOME), params(SOME)
    optimizer, plain = getattr(generated, name)(groups(ours)), getattr(generated, name)(groups(second))
    give(ours, 0, second)
    arrangements, norms = set(), []
    for step in range(4):
        for each in (optimizer, plain):
            each.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.prepare()
        arrangements.add(optimizer.arrangement)
        renew(step, ours, second)
        norms.append((optimizer.clip_grad_norm(0.5), plain.clip_grad_norm(0.5)))
        arrangements.add(optimizer.arrangement)
        optimizer.launch()
        plain.step()
    assert all(torch.equal(a, b) for a, b in norms) and len({float(a) for a, _ in norms}) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, second))
    assert len(arrangements) == 1


def test_a_gradient_of_another_layout_is_copied_by_the_launch() -> None:
    """Its values are of the time of the launch, and of that of the norm."""
    param = torch.zeros(4, 8, device=DEVICE)
    optimizer = generated.sgd([param], lr=1.0)
    param.grad = torch.ones(8, 4, device=DEVICE).t()
    optimizer.prepare()
    before = optimizer.arrangement
    param.grad.fill_(5.0)
    optimizer.launch()
    assert (param == -5.0).all()
    optimizer.prepare()
    assert optimizer.arrangement == before
    param.grad.fill_(2.0)
    assert optimizer.clip_grad_norm(1e4).item() == pytest.approx(2.0 * math.sqrt(32), rel=1e-6)
    optimizer.launch()
    assert (param == -7.0).all()
    param.grad = torch.ones(8, 4, device=DEVICE).t()
    optimizer.prepare()
    assert optimizer.arrangement != before, "the launch copies from elsewhere"


def test_numbers_are_where_prepare_put_them() -> None:
    """Two tensors whose counts meet after `prepare`: clipping between it and the launch moves no row to the other's numbers."""
    ours, second = params(SOME), params(SOME)
    hyper: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5}
    optimizer, plain = generated.sgd(ours, **hyper), generated.sgd(second, **hyper)
    state = {0: {"momentum_buffer": torch.ones(SOME[0])}}
    for each in (optimizer, plain):
        each.load_state_dict({"param_groups": each.state_dict()["param_groups"], "state": state})
    give(ours, 0, second)
    optimizer.prepare()
    optimizer.clip_grad_norm(0.5)
    optimizer.launch()
    plain.clip_grad_norm(0.5)
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, second))


def test_what_is_held_is_what_launches_reach(launches: list[tuple[str, dict[str, Any]]]) -> None:
    """Every pointer of a launch, and every address in its table."""
    ours = [*params(SOME), *params(SOME, "bf16")]
    optimizer = generated.adamw([{"params": ours[:1]}, {"params": ours[1:], "amsgrad": True}])
    grads = [torch.ones(p.shape, device=DEVICE, dtype=torch.float32) for p in ours]
    for param, grad in zip(ours, grads):
        optimizer.bind(param, grad, torch.empty_like(param, dtype=torch.float16))
    other = torch.zeros(3, 5, device=DEVICE)
    other.grad = torch.ones(5, 3, device=DEVICE).t()
    optimizer.add_param_group({"params": [other]})
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    optimizer.prepare()
    optimizer.clip_grad_norm(1.0)
    optimizer.launch()
    held = optimizer.held()
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in held]

    def reached(address: int) -> bool:
        return any(begin <= address <= end for begin, end in spans)

    pointers = [v for _, own in launches for n, v in own.items() if n.endswith("_ptr") and v is not None]
    assert pointers and all(map(reached, pointers))
    tables = [t for t in held if t.dtype == torch.int64]
    words = [int(a) for t in tables for row in t.tolist() for a in row[4:] if a]
    assert len(tables) == 4 and len(words) == 5 + 6 + 2 * 6 + 4 and all(map(reached, words))
    assert all(any(t is x for x in held) for t in (*ours, *grads, other, other.grad, optimizer.found_inf))


def change_group(optimizer: Any, ours: list[Any]) -> None:
    (new,) = params([(3,)])
    new.grad = torch.ones_like(new)
    optimizer.add_param_group({"params": [new]})


def change_gradient(optimizer: Any, ours: list[Any]) -> None:
    ours[0].grad = None


def change_flag(optimizer: Any, ours: list[Any]) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def change_dtype(optimizer: Any, ours: list[Any]) -> None:
    optimizer.bind(ours[0], torch.ones_like(ours[0], dtype=torch.float16))


def change_scaler(optimizer: Any, ours: list[Any]) -> None:
    optimizer.found_inf = torch.zeros((), device=DEVICE)


@pytest.mark.parametrize("change", [change_group, change_gradient, change_flag, change_dtype, change_scaler])
def test_other_launches_are_another_arrangement(change: Any) -> None:
    ours = params(SOME)
    optimizer = generated.adamw(ours)
    give(ours, 0)
    optimizer.step()
    before, held = optimizer.arrangement, optimizer.held()
    optimizer.prepare()
    assert optimizer.arrangement == before and hash(optimizer.arrangement) == hash(before)
    change(optimizer, ours)
    optimizer.prepare()
    assert optimizer.arrangement != before
    assert held


def test_what_stands_in_tables_is_the_same_arrangement(launches: list[tuple[str, dict[str, Any]]]) -> None:
    """New gradients, loaded state, counts that part and hyper-parameters: the same launch, to the last address."""
    ours, second = params(SOME), params(SOME)
    optimizer, plain = generated.adamw(ours), generated.adamw(second)
    after(plain, second, 3)
    saved = copy.deepcopy(plain.state_dict())
    saved["state"][1]["step"] = torch.tensor(7.0)
    give(ours, 0)
    optimizer.step()
    before, old = optimizer.arrangement, [optimizer.state[p] for p in ours]
    optimizer.load_state_dict(copy.deepcopy(saved))
    plain.load_state_dict(copy.deepcopy(saved))
    for a, b in zip(ours, second):
        a.copy_(b)
    give(ours, 5, second)
    launches.clear()
    for each in (optimizer, plain):
        each.param_groups[0]["lr"] = 0.3
    optimizer.prepare()
    assert optimizer.arrangement == before and all(a is not optimizer.state[p] for a, p in zip(old, ours))
    optimizer.launch()
    optimizer.step()
    assert launches[0][1] == launches[1][1]
    plain.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, second))
    assert [s["step"].item() for s in optimizer.state_dict()["state"].values()] == [5.0, 9.0]


def unprepared() -> Iterator[tuple[str, Any]]:
    def nothing(optimizer: Any, ours: list[Any]) -> None:
        """No step was taken."""

    def loaded(optimizer: Any, ours: list[Any]) -> None:
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def added(optimizer: Any, ours: list[Any]) -> None:
        optimizer.step()
        change_group(optimizer, ours)

    def bound(optimizer: Any, ours: list[Any]) -> None:
        optimizer.step()
        optimizer.bind(ours[0], torch.ones_like(ours[0]))

    def clipped(optimizer: Any, ours: list[Any]) -> None:
        """The norm makes tables, but no numbers."""
        optimizer.step()
        ours[0].grad = None
        optimizer.clip_grad_norm(1.0)

    yield from ((f.__name__, f) for f in (nothing, loaded, added, bound, clipped))


@pytest.mark.parametrize("before", [c[1] for c in unprepared()], ids=[c[0] for c in unprepared()])
def test_a_launch_that_was_not_prepared_is_refused(before: Any) -> None:
    ours = params(SOME)
    optimizer = generated.adamw(ours)
    give(ours, 0)
    before(optimizer, ours)
    kept = [p.clone() for p in ours]
    with pytest.raises(
        RuntimeError, match="adamw: `launch`: no step of these parameters, state and gradients is prepared"
    ):
        optimizer.launch()
    assert all(torch.equal(a, b) for a, b in zip(ours, kept))
    optimizer.prepare()
    optimizer.launch()
    assert not torch.equal(ours[1], kept[1])


def test_a_step_without_any_gradient_does_nothing() -> None:
    ours = params(SOME)
    optimizer = generated.adamw(ours)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, params(SOME))) and optimizer.state_dict()["state"] == {}


def test_zero_grad_drops_the_factor() -> None:
    (param,) = params([(5,)])
    optimizer = generated.sgd([param], lr=1.0)
    before = param.clone()
    param.grad = torch.full_like(param, 2.0)
    optimizer.clip_grad_norm(1e-3)
    optimizer.zero_grad()
    param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    assert torch.equal(before - 2.0, param)


@pytest.mark.parametrize("to_none", [True, False])
def test_bound_gradients_stay_attached(to_none: bool) -> None:
    """So torch's functions on `.grad` find what the step reads; other gradients are dropped."""
    ours = params(SOME)
    optimizer = generated.sgd(ours, lr=1.0)
    give(ours, 0)
    bound = ours[0].grad
    optimizer.bind(ours[0], bound)
    optimizer.zero_grad(set_to_none=to_none)
    assert ours[0].grad is bound and not bound.any()
    assert ours[1].grad is None if to_none else not ours[1].grad.any()
    bound.fill_(3.0)
    torch.nn.utils.clip_grad_norm_(ours, 1.0)
    before = ours[0].clone()
    optimizer.step()
    near(ours[0], before.double() - 1 / math.sqrt(7), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, "lion"])
@pytest.mark.parametrize("before", [0.5, 3.0])
def test_captured_clipping_goes_on_with_loaded_state(name: str, before: float) -> None:
    """Of memory that was freed nothing is read: what is let go is filled with other numbers."""
    ours, second = params(SIZES), params(SIZES)
    make = getattr(generated, name)
    optimizer, plain = make(groups(ours)), make(groups(second))
    give(ours, 0, second)
    for each in (optimizer, plain):
        each.clip_grad_norm(before)
        each.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = optimizer.clip_grad_norm(0.5)
        optimizer.launch()
    arrangement, held = optimizer.arrangement, optimizer.held()
    saved = copy.deepcopy(optimizer.state_dict())
    for step in range(1, 8):
        if step == 4:
            for each in (optimizer, plain):
                each.load_state_dict(copy.deepcopy(saved))
        if step == 5:  # other calls between replays
            optimizer.clip_grad_norm(7.0)
            optimizer.zero_grad(set_to_none=False)
        optimizer.prepare()
        assert optimizer.arrangement == arrangement
        junk = [torch.full((n,), math.nan, device=DEVICE) for n in (1, 16, 512, BLOCK, 2 * BLOCK) for _ in range(8)]
        renew(step, ours, second)
        graph.replay()
        want = plain.clip_grad_norm(0.5)
        plain.step()
        assert torch.equal(norm, want)
        del junk
    assert held and all(torch.equal(a, b) for a, b in zip(ours, second))


@pytest.mark.gpu
@pytest.mark.parametrize("change", [change_group, change_gradient, change_flag, change_dtype, change_scaler])
def test_a_captured_step_is_told_from_another(change: Any) -> None:
    ours = params(SOME)
    optimizer = generated.adamw(ours)
    give(ours, 0)
    optimizer.clip_grad_norm(0.5)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.clip_grad_norm(0.5)
        optimizer.launch()
    arrangement, held = optimizer.arrangement, optimizer.held()
    for _ in range(2):
        optimizer.prepare()
        assert optimizer.arrangement == arrangement
        graph.replay()
    change(optimizer, ours)
    optimizer.prepare()
    assert held and optimizer.arrangement != arrangement


@pytest.mark.gpu
def test_gradients_of_another_layout_are_copied_by_the_graph() -> None:
    param = torch.zeros(4, 8, device=DEVICE)
    optimizer = generated.sgd([param], lr=1.0)
    param.grad = torch.zeros(8, 4, device=DEVICE).t()
    optimizer.clip_grad_norm(1e4)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = optimizer.clip_grad_norm(1e4)
        optimizer.launch()
    for k in (1.0, 5.0):
        optimizer.prepare()
        param.grad.fill_(k)
        graph.replay()
        assert norm.item() == pytest.approx(k * math.sqrt(32), rel=1e-6)
    assert (param == -6.0).all()


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """A capture of which nothing is replayed; the interpreter has none, so there it is only said to be one."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cuda":
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=DEVICE).add_(1)
                yield
        else:
            patch.setattr(optim, "_capturing", lambda: True)
            yield


def test_what_cannot_be_captured_is_refused() -> None:
    ours = params(SOME)
    optimizer, fresh = generated.adamw(ours), generated.adamw(params(SOME))
    give(ours, 0)
    optimizer.clip_grad_norm(0.5)
    optimizer.step()
    optimizer.clip_grad_norm(0.5)
    counted = optimizer.state_dict()["state"][0]["step"]

    def refused(call: Any, text: str) -> None:
        with captured(), pytest.raises(RuntimeError, match=text):
            call()

    refused(optimizer.launch, "adamw: `clip_grad_norm` and `launch` are captured in one graph or in none")
    refused(optimizer.prepare, "adamw: `prepare` and `step` cannot be captured")
    refused(optimizer.step, "adamw: `prepare` and `step` cannot be captured")
    refused(fresh.launch, "adamw: `launch`: no step of these parameters, state and gradients is prepared")
    refused(lambda: fresh.clip_grad_norm(1.0), "adamw: `clip_grad_norm`: no step of these parameters")
    fresh.step()  # without any gradient
    refused(fresh.launch, "adamw: `launch`: no step of these parameters, state and gradients is prepared")
    with captured():
        optimizer.clip_grad_norm(0.5)
    with pytest.raises(RuntimeError, match="adamw: `clip_grad_norm` and `launch` are captured in one graph or in none"):
        optimizer.launch()
    assert optimizer.state_dict()["state"][0]["step"] == counted


def test_a_capture_holds_no_copy_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host sends would be sent again by each replay. Gradients that were dropped and made anew are no reason either."""
    ours = params(SOME)
    optimizer = generated.adamw(ours)
    give(ours, 0)
    optimizer.clip_grad_norm(3.0)
    optimizer.step()
    arrangement = optimizer.arrangement
    optimizer.zero_grad()
    sent: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(optim, "_send", lambda *_: sent.append(_))
        patch.setattr(optim, "_run", lambda *_: None)
        with captured():
            for param in ours:
                param.grad = torch.ones_like(param)
            optimizer.clip_grad_norm(0.5)
            optimizer.launch()
    assert not sent and optimizer.arrangement == arrangement


# ---------------------------------------------------------------------------------------------- what is refused


def refused() -> Iterator[tuple[str, Any, type[Exception], str]]:
    one = params([(5,)])
    yield "no such name", lambda: optim.Optimizer(op_class("lion"), one, lr=1, betas=(0.9, 0.9), weight_decay=0, maximize=False, eps=1), TypeError, (
        "lion has no hyper-parameter `eps`; it has lr, betas, weight_decay, maximize"
    )  # fmt: skip
    yield "a typo", lambda: generated.lion([{"params": one, "lrr": 1}]), TypeError, (
        "lion has no hyper-parameter `lrr` (did you mean `lr`?); it has lr, betas, weight_decay, maximize"
    )  # fmt: skip
    yield "too few", lambda: generated.adam(one, betas=(0.9,)), TypeError, "adam: `betas` is (0.9,); it takes 2"
    yield "missing", lambda: optim.Optimizer(op_class("lion"), one), TypeError, "lion: `lr` is missing"
    yield "negative", lambda: generated.lion(one, lr=-1.0), ValueError, "lion requires lr >= 0"
    yield "in a group", lambda: generated.lion([{"params": one, "lr": -1.0}]), ValueError, "lion requires lr >= 0"
    yield "kind", lambda: generated.lion(
        one, betas=("x", 0.9)
    ), TypeError, "lion: `betas` is ('x', 0.9); it takes a number"
    yield "ints", lambda: generated.lion([torch.zeros(3, dtype=torch.int64, device=DEVICE)]), TypeError, (
        "lion: a parameter of shape (3,) is torch.int64; it takes floats of 16 to 64 bits"
    )  # fmt: skip
    yield "gaps", lambda: generated.lion([torch.zeros(6, device=DEVICE)[::2]]), ValueError, (
        "lion: a parameter of shape (3,) is not dense in memory; steps take whole tensors"
    )  # fmt: skip
    yield "stranger", lambda: generated.lion(one).bind(torch.zeros(3)), ValueError, (
        "lion: this tensor of shape (3,) is none of its parameters"
    )  # fmt: skip
    yield "shape", lambda: generated.lion(one).bind(one[0], torch.zeros(3, device=DEVICE)), ValueError, (
        f"lion: `grad` is (3,) on {one[0].device}, its parameter (5,) on {one[0].device}"
    )  # fmt: skip
    yield "dtype", lambda: generated.lion(one).bind(one[0], None, torch.zeros(5, dtype=torch.int32, device=DEVICE)), TypeError, (
        "lion: `copy` is torch.int32; it takes a float tensor"
    )  # fmt: skip
    yield "nesterov", lambda: generated.sgd(one, nesterov=True), ValueError, (
        "sgd requires momentum > 0 or (1 if nesterov else 0) == 0"
    )  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), [c[1:] for c in refused()], ids=[c[0] for c in refused()])
def test_what_is_refused_is_named(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as found:
        call()
    assert str(found.value) == text


def test_a_sparse_gradient_is_refused() -> None:
    (param,) = params([(5,)])
    param.grad = torch.ones(5, device=DEVICE).to_sparse()
    with pytest.raises(TypeError, match="sgd: `grad` is torch.sparse_coo torch.float32; it takes dense float tensors"):
        generated.sgd([param]).step()


def test_a_hyper_parameter_that_went_wrong_is_found_at_the_step() -> None:
    (param,) = params([(5,)])
    optimizer = generated.adamw([param])
    param.grad = torch.ones_like(param)
    before = param.clone()
    optimizer.param_groups[0]["betas"] = (1.5, 0.9)
    with pytest.raises(ValueError, match=r"adamw requires 0 <= betas\[0\] < 1"):
        optimizer.step()
    assert torch.equal(before, param)
