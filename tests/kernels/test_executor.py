"""Models that run: the executor beside torch's autograd over the same ops, its memory, its errors, its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.runtime.executor import Executor  # noqa: E402
from generated.runtime.graph import Graph, Init, SymTensor  # noqa: E402
from generated.runtime.lowering import LoweringMode  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402

F32 = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def gated(dtype: str = "f32") -> tuple[Graph, list[SymTensor]]:
    """Fan-out, a shared param, a norm with statistics, a broadcast param, views, a loss beside what it is of."""
    x, graph = SymTensor.input(dtype, (None, 3, 8))
    scale = graph.param("scale", (8,), dtype, Init("uniform", 1.0))
    shift = graph.param("block.shift", (3, 8), dtype, Init("normal", 0.5))
    h = generated.add(generated.mul(x, scale), shift)
    normed = generated.rms_norm(h, graph.param("block.norm.weight", dtype=dtype))
    gate = generated.silu(normed)
    both = generated.add(generated.mul(gate, h), generated.mul(normed, scale))
    out = generated.softmax(both.transpose(1, 2), dim=-1)
    loss = generated.mse_loss(out, graph.input(dtype, (None, 8, 3), "target"))
    return graph, [loss, out]


def by_torch(params: dict[str, Any], x: Any, target: Any) -> list[Any]:
    """The same by the functions on tensors."""
    h = generated.add(generated.mul(x, params["scale"]), params["block.shift"])
    normed = generated.rms_norm(h, params["block.norm.weight"])
    both = generated.add(generated.mul(generated.silu(normed), h), generated.mul(normed, params["scale"]))
    out = generated.softmax(both.transpose(1, 2), dim=-1)
    return [generated.mse_loss(out, target), out]


def given(dtype: str = "f32", seed: int = 0, batch: int = 5) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    x, target = torch.randn(batch, 3, 8, generator=g), torch.rand(batch, 8, 3, generator=g)
    return {"x": x.to(DEVICE, F32[dtype]), "target": target.to(DEVICE, F32[dtype])}


def leaves(run: Executor) -> dict[str, Any]:
    return {n: p.detach().clone().requires_grad_() for n, p in run.params.items()}


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_outputs_and_gradients_are_those_of_autograd(dtype: str) -> None:
    """The kernels are the same: so are the bits, but where three gradients of one tensor are added in another order."""
    graph, outputs = gated(dtype)
    run = graph.lower(outputs, input_gradients=[SymTensor(graph, "x")], fuse=False).load(DEVICE, batch=5)
    inputs, params = given(dtype), leaves(run)
    found = run.forward_train(**inputs)
    x = inputs["x"].clone().requires_grad_()
    wanted = by_torch(params, x, inputs["target"])
    for got, want in zip(found, wanted):
        assert torch.equal(got, want)
    run.backward()
    wanted[0].backward()
    close = {"rtol": 1e-5, "atol": 1e-7} if dtype == "f32" else {"rtol": 2e-2, "atol": 1e-4}
    assert set(run.grads) == set(params) and all(g.abs().sum() > 0 for g in run.grads.values())
    for name, param in params.items():
        torch.testing.assert_close(run.grads[name], param.grad, **close)
    torch.testing.assert_close(run.input_grads["x"], x.grad, **close)


def test_gradients_add_up_over_micro_batches_until_they_are_zeroed() -> None:
    graph, outputs = gated()
    run = graph.lower(outputs).load(DEVICE, batch=5)
    params = leaves(run)
    for seed in (1, 2, 3):
        run.forward_train(**given(seed=seed))
        run.backward()
        by_torch(params, **given(seed=seed))[0].backward()
    for name, param in params.items():
        torch.testing.assert_close(run.grads[name], param.grad, rtol=1e-5, atol=1e-7)
    run.zero_grad()
    assert all((g == 0).all() for g in run.grads.values())
    run.forward_train(**given(seed=1))
    run.backward()
    once = {n: g.clone() for n, g in run.grads.items()}
    run.zero_grad()
    run.forward_train(**given(seed=1))
    run.backward()
    assert all(torch.equal(once[n], g) for n, g in run.grads.items())


def test_several_seeds() -> None:
    graph, outputs = gated()
    run = graph.lower(outputs, seeds=outputs).load(DEVICE, batch=5)
    params, inputs = leaves(run), given()
    one = torch.ones((), device=DEVICE)
    seed = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    run.forward_train(**inputs)
    run.backward({outputs[1].name: seed, outputs[0].name: one})
    loss, out = by_torch(params, **inputs)
    torch.autograd.backward([loss, out], [torch.ones_like(loss), seed])
    for name, param in params.items():
        torch.testing.assert_close(run.grads[name], param.grad, rtol=1e-5, atol=1e-6)


def test_masters_in_float32_take_gradients_in_float32() -> None:
    """Gradients of bf16 are added up in float32; launches read the copy, until it is synced the old one."""
    graph, outputs = gated("bf16")
    run = graph.lower(outputs).load(DEVICE, batch=5, master="f32")
    assert all(
        p.dtype == torch.float32 and g.dtype == torch.float32 for p, g in zip(run.params.values(), run.grads.values())
    )
    plain = graph.lower(outputs).load(DEVICE, batch=5)
    for model in (run, plain):
        for seed in (1, 2):
            model.forward_train(**given("bf16", seed))
            model.backward()
    for name, grad in run.grads.items():
        torch.testing.assert_close(grad, plain.grads[name].float(), rtol=3e-2, atol=1e-3)
    before = run.forward(**given("bf16"))[0]
    with torch.no_grad():
        run.params["scale"].mul_(2)
    assert torch.equal(run.forward(**given("bf16"))[0], before)
    run.sync()
    assert not torch.equal(run.forward(**given("bf16"))[0], before)


@pytest.mark.parametrize("zeroed", ["by the run", "by the optimizer", "to zeros", "of some"])
def test_torch_optimizers_train_it(zeroed: str) -> None:
    """Whoever zeroes the gradients, and where `.grad` is dropped."""
    graph, outputs = gated()
    run = graph.lower(outputs).load(DEVICE, batch=5)
    params = leaves(run)
    ours, theirs = (torch.optim.SGD(list(p.values()), lr=0.5, momentum=0.9) for p in (run.params, params))
    losses = []
    for seed in range(4):
        if zeroed == "by the run":
            run.zero_grad()
        elif zeroed == "of some":
            for k, param in enumerate(run.params.values()):
                param.grad = None if k else param.grad.zero_()
        else:
            ours.zero_grad(set_to_none=zeroed == "by the optimizer")
        losses.append(run.forward_train(**given(seed=seed))[0].item())
        run.backward()
        ours.step()
        theirs.zero_grad()
        by_torch(params, **given(seed=seed))[0].backward()
        theirs.step()
    for name, param in params.items():
        torch.testing.assert_close(run.params[name], param.detach(), rtol=1e-4, atol=1e-6)
    assert len(set(losses)) == 4


def test_buffers_are_updated_and_not_trained() -> None:
    x, graph = SymTensor.input("f32", (None, 4, 6))
    mean, var = graph.buffer("bn.running_mean", (4,)), graph.buffer("bn.running_var", (4,), init=1)
    y = generated.batch_norm(x, mean, var, graph.param("bn.weight"), graph.param("bn.bias"), training=True)
    model = graph.lower(generated.mean(generated.mul(y, y), dim=None))
    run = model.load(DEVICE, batch=7)
    assert (
        set(run.params) == {"bn.weight", "bn.bias"}
        and (run.params["bn.weight"] == 1).all()
        and (run.params["bn.bias"] == 0).all()
    )
    value = torch.randn(7, 4, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    run.forward_train(value)
    run.backward()
    norm = torch.nn.BatchNorm1d(4).double()
    wanted = norm(value.cpu().double())
    (wanted * wanted).mean().backward()
    torch.testing.assert_close(run.buffers["bn.running_var"].cpu().double(), norm.running_var, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.grads["bn.weight"].cpu().double(), norm.weight.grad, rtol=1e-4, atol=1e-6)
    assert set(run.state_dict()) == {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"}
    assert "bn.running_mean" not in run.grads


def test_views_that_no_strides_reach_are_copied() -> None:
    """A reshape of a transposed tensor, forward and backward; and dims that do not merge into what a kernel takes."""
    x, graph = SymTensor.input("f32", (None, 3, 4))
    w = graph.param("w", (12,), init=Init("uniform", 1.0))
    y = generated.mul(x.transpose(1, 2).reshape(-1, 12), w).reshape(-1, 4, 3).permute(2, 0, 1)
    z = generated.mul(y, y)
    run = graph.lower(z, input_gradients=[x]).load(DEVICE, batch=5)
    value = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    seed = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    got = run.forward_train(value)
    run.backward(seed)
    leaf, p = value.clone().requires_grad_(), run.params["w"].detach().clone().requires_grad_()
    want = (leaf.transpose(1, 2).reshape(-1, 12) * p).reshape(-1, 4, 3).permute(2, 0, 1) ** 2
    want.backward(seed)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(run.grads["w"], p.grad)
    torch.testing.assert_close(run.input_grads["x"], leaf.grad)


def test_gradients_that_are_one_cotangent_do_not_share_memory() -> None:
    """x + w: both gradients are the cotangent itself."""
    x, graph = SymTensor.input("f32", (None, 4))
    w, v = (graph.param(n, (4,), init=1) for n in "wv")
    z = generated.add(generated.add(w, v), generated.mul(w, 0.0))
    run = graph.lower(generated.add(z, x)).load(DEVICE, batch=3)
    run.forward_train(torch.zeros(3, 4, device=DEVICE))
    seed = torch.arange(12.0, device=DEVICE).reshape(3, 4)
    run.backward(seed)
    assert torch.equal(run.grads["w"], seed.sum(0)) and torch.equal(run.grads["v"], seed.sum(0))
    run.grads["w"].fill_(7)
    assert torch.equal(run.grads["v"], seed.sum(0))


def test_a_cotangent_that_is_the_gradient_of_several() -> None:
    """Two params and an input of which nothing but the sum is read; the first backward and the later ones."""
    x, graph = SymTensor.input("f32", (3, 4))
    w, v = (graph.param(n, (3, 4), init=1) for n in "wv")
    run = graph.lower(generated.square(generated.add(generated.add(w, v), x)), input_gradients=[x]).load(DEVICE)
    seed = torch.arange(12.0, device=DEVICE).reshape(3, 4)
    for count in (1, 2):
        run.forward_train(torch.zeros(3, 4, device=DEVICE))
        run.backward(seed)
        for grad in (run.grads["w"], run.grads["v"], run.input_grads["x"]):
            assert torch.equal(grad, count * 4 * seed)


def _statistics(graph: Graph) -> tuple[SymTensor, SymTensor]:
    return graph.buffer("rm", (4,), init=1.0), graph.buffer("rv", (4,), init=1.0)


def test_a_backward_reads_buffers_as_they_were() -> None:
    """A product with a running mean that is updated after it; the running statistics first as they are, then updated."""
    x, graph = SymTensor.input("f32", (None, 4))
    rm, rv = _statistics(graph)
    s = graph.param("s", (4,), init=2.0)
    first = generated.mul(s, rm.reshape(1, 4))
    second = generated.batch_norm(x, rm, rv, training=False, weight=graph.param("w", (4,), init=1.0))
    third = generated.batch_norm(x, rm, rv, training=True)
    run = graph.lower(generated.sum(generated.add(generated.add(second, third), first), dim=None)).load(DEVICE, batch=6)
    value = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE) + 5
    run.forward_train(value)
    run.backward()
    torch.testing.assert_close(run.grads["s"], torch.full((4,), 6.0, device=DEVICE))
    torch.testing.assert_close(run.grads["w"], (value - 1).sum(0) / (1 + 1e-5) ** 0.5)
    assert not torch.equal(run.buffers["rm"], torch.ones(4, device=DEVICE))


def test_a_fused_op_reads_buffers_as_its_steps_did() -> None:
    x, graph = SymTensor.input("f32", (None, 4))
    rm, rv = _statistics(graph)
    r = generated.relu(rm)
    b = generated.batch_norm(x, rm, rv, training=True)
    y = generated.mul(r, graph.param("w", (4,), init=1.0))
    values = []
    for fuse in (False, True):
        run = graph.lower([y, b], LoweringMode.INFERENCE, fuse=fuse).load(DEVICE, batch=6)
        values.append(run.forward(torch.full((6, 4), 9.0, device=DEVICE))[0])
    assert torch.equal(*values) and torch.equal(values[0], torch.ones(4, device=DEVICE))


def test_many_dims_that_do_not_merge() -> None:
    """Patches of images: six dims; a product of five that is turned, forward and backward."""
    x, graph = SymTensor.input("f32", (None, 3, 8, 8))
    patches = x.reshape(-1, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, 4, 48)
    w = graph.param("w", (2, 3, 2, 3, 2), init=Init("uniform", 1.0))
    turned = generated.sin(generated.mul(w, 2.0).permute(3, 1, 4, 2, 0))
    run = graph.lower([patches, turned], input_gradients=[x], seeds=[patches, turned]).load(DEVICE, batch=2)
    g = torch.Generator().manual_seed(1)
    value, a, b = (torch.randn(s, generator=g).to(DEVICE) for s in ((2, 3, 8, 8), (2, 4, 48), (3, 3, 2, 2, 2)))
    found = run.forward_train(value)
    run.backward({patches.name: a, turned.name: b})
    leaf, p = value.clone().requires_grad_(), run.params["w"].detach().clone().requires_grad_()
    want = [
        leaf.reshape(-1, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, 4, 48),
        torch.sin(2 * p).permute(3, 1, 4, 2, 0),
    ]
    torch.autograd.backward(want, [a, b])
    for got, wanted in zip((*found, run.input_grads["x"], run.grads["w"]), (*want, leaf.grad, p.grad)):
        torch.testing.assert_close(got, wanted)


def test_runs_share_what_is_trained() -> None:
    graph, outputs = gated("bf16")
    run = graph.lower(outputs).load(DEVICE, batch=5, master="f32")
    test = graph.lower(outputs[1], LoweringMode.INFERENCE).load(DEVICE, batch=3, share=run)
    with torch.no_grad():
        run.params["scale"].mul_(2)
    run.sync()
    own = {"x": given("bf16", batch=3)["x"]}
    alone = graph.lower(outputs[1], LoweringMode.INFERENCE).load(DEVICE, batch=3)
    alone.load_state_dict(run.state_dict())  # float32 masters into bf16
    assert torch.equal(test.forward(**own), alone.forward(**own))


def test_indices_are_checked_in_debug_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULLBACK_DEBUG", "1")
    x, graph = SymTensor.input("f32", (None, 4))
    run = graph.lower(generated.cross_entropy(x, graph.input("i64", (None,), "t")), input_gradients=[x]).load(
        DEVICE, batch=2
    )
    with pytest.raises(
        IndexError, match=r"node `cross_entropy_1` \(cross_entropy\): cross_entropy: `target` is 9 at \(1,\)"
    ):
        run.forward_train(torch.zeros(2, 4, device=DEVICE), torch.tensor([0, 9], device=DEVICE))


def test_what_is_recorded_later_is_no_part_of_a_model() -> None:
    graph, outputs = gated()
    model = graph.lower(outputs, fuse=False)
    graph.param("later", (3,), init=1)
    assert "later" not in model.graph.tensors and "later" not in model.load(DEVICE, batch=2).params


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_nothing_and_of_one(batch: int) -> None:
    graph, outputs = gated()
    run = graph.lower(outputs).load(DEVICE, batch=batch)
    found = run.forward_train(**given(batch=batch))
    run.backward()
    params = leaves(run)
    wanted = by_torch(params, **given(batch=batch))
    wanted[0].backward()
    assert torch.equal(found[1], wanted[1])
    for name, param in params.items():
        torch.testing.assert_close(run.grads[name], param.grad, equal_nan=True)


# ---------------------------------------------------------------------------------------------- memory, modes


def test_inference_keeps_nothing() -> None:
    """A chain of ten needs two tensors; for training what backwards read is kept."""
    x, graph = SymTensor.input("f32", (None, 1024))
    y = x
    for _ in range(10):
        y = generated.gelu(y)
    z = generated.mul(y, graph.param("w", (1024,), init=1))
    size = 16 * 1024 * 4
    run = graph.lower(z, LoweringMode.INFERENCE).load(DEVICE, batch=16)
    assert run.memory.arena == run.memory.lower_bound == 2 * size
    assert not hasattr(run.program, "backward") and not hasattr(run.memory, "gradients")
    trained = graph.lower(z, input_gradients=[x]).load(DEVICE, batch=16)
    assert trained.memory.lower_bound >= 10 * size and trained.memory.arena <= 1.1 * trained.memory.lower_bound
    assert not hasattr(run, "backward") and not hasattr(run, "forward_train")


def test_no_two_live_tensors_share_memory() -> None:
    graph, outputs = gated()
    program = graph.lower(outputs, input_gradients=[SymTensor(graph, "x")]).load(DEVICE, batch=5).program
    inside = [s for s in program.storages.values() if not s.fixed and s.nbytes]
    assert len(inside) > 10
    for k, a in enumerate(inside):
        assert a.offset % 256 == 0 and a.offset + a.nbytes <= program.memory.arena
        for b in inside[:k]:
            together = a.first <= b.last and b.first <= a.last
            assert not together or a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
    assert program.memory.lower_bound <= program.memory.arena
    dead = [s for s in inside if s.last < len(program.forward)]
    assert dead  # something is freed before the backward


def test_everything_is_written_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of NaN gives the same gradients."""
    monkeypatch.setenv("PULLBACK_DEBUG", "1")
    graph, outputs = gated()
    run = graph.lower(outputs).load(DEVICE, batch=5)
    run.forward_train(**given())
    run.backward()
    assert all(g.isfinite().all() for g in run.grads.values())


# ---------------------------------------------------------------------------------------------- errors


def test_runs_out_of_order_are_refused() -> None:
    graph, outputs = gated()
    run = graph.lower(outputs).load(DEVICE, batch=5)
    with pytest.raises(RuntimeError, match="no forward_train came before"):
        run.backward()
    run.forward(**given())
    with pytest.raises(RuntimeError, match="the last forward was no forward_train"):
        run.backward()
    run.forward_train(**given())
    run.backward()
    with pytest.raises(RuntimeError, match="was run already"):
        run.backward()


def _loaded() -> Executor:
    graph, outputs = gated()
    return graph.lower(outputs).load(DEVICE, batch=5)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: _loaded().forward(), TypeError, "inputs: missing: x, target"),
        (lambda: _loaded().forward(given()["x"], x=given()["x"]), TypeError, "given twice: x; missing: target"),
        (lambda: _loaded().forward(**given(), y=1), TypeError, "not of the model: y"),
        (lambda: _loaded().forward(*given().values(), 1), TypeError, "3 inputs are given; the model has x, target"),
        (lambda: _loaded().forward(x=[1.0], target=given()["target"]), TypeError, "input `x` is a list"),
        (lambda: _loaded().forward(**{**given(), "x": given()["x"].double()}), TypeError, "input `x` is torch.float64; the graph has torch.float32"),
        (lambda: _loaded().forward(**given(batch=4)), ValueError, r"input `x` is \(4, 3, 8\); the model was loaded for \(5, 3, 8\), \[batch, 3, 8\]"),
        (lambda: gated()[0].lower(gated()[1]), ValueError, "is of another graph"),
        (lambda: (lambda g, o: g.lower(o).load(DEVICE))(*gated()), ValueError, "sizes of the model: missing: batch; not in the graph: none"),
        (lambda: (lambda g, o: g.lower(o).load(DEVICE, batch=2, heads=3))(*gated()), ValueError, "missing: none; not in the graph: heads"),
        (lambda: (lambda g, o: g.lower(o).load(DEVICE, batch=-2))(*gated()), ValueError, "size `batch` is -2"),
        (lambda: (lambda g, o: g.lower(o).load(DEVICE, batch=2, master="f64"))(*gated()), ValueError, "master is 'f64'"),
        (lambda: _loaded().forward(**{**given(), "x": given()["x"].requires_grad_()}), ValueError, "input `x` requires a gradient"),
        (lambda: _loaded().load("no such file"), FileNotFoundError, "there is no such file"),
        (lambda: _loaded().save("no such folder/x"), FileNotFoundError, "there is no folder no such folder"),
        (lambda: _loaded().load_state_dict(None), TypeError, "a state is a mapping of names to tensors"),
        (lambda: _loaded().load_state_dict({"scale": [1.0]}), TypeError, "a state is a mapping of names to tensors"),
        (lambda: _loaded().load_state_dict({"scale": torch.ones(8, device="meta")}), TypeError, "that are dense in memory"),
        (lambda: _first("i32", 0.5), ValueError, "buffer `b`: i32 does not hold 0.5"),
        (lambda: _first("i32", 2**31), ValueError, "buffer `b`: i32 does not hold 2147483648.0"),
        (lambda: _first("f16", 1e6), ValueError, "buffer `b`: f16 does not hold 1000000.0"),
        (lambda: _loaded().capture(), RuntimeError, "run one training step first"),
        (lambda: _loaded().optimizer(lambda params, **_: torch.optim.SGD(dict(params).values(), lr=1)), TypeError, "SGD is no optimizer of this package"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def _first(dtype: str, value: float) -> Any:
    """A buffer that begins with a number."""
    x, graph = SymTensor.input(dtype, (3,))
    b = graph.buffer("b", (3,), dtype, value)
    return graph.lower([x, b], LoweringMode.INFERENCE).load(DEVICE).buffers["b"]


def test_first_values_are_exact_and_go_with_the_name() -> None:
    assert _first("i64", 2**24 + 1).tolist() == [2**24 + 1] * 3 and _first("f64", 0.1).tolist() == [0.1] * 3
    graph, outputs = gated()
    trained, inferred = graph.lower(outputs).load(DEVICE, batch=2), graph.lower(
        outputs[1], LoweringMode.INFERENCE
    ).load(DEVICE, batch=2)
    assert all(torch.equal(trained.params[n], p) for n, p in inferred.params.items())


def test_params_in_other_memory_are_refused() -> None:
    run = _loaded()
    run.params["scale"].data = run.params["scale"].data * 2
    with pytest.raises(RuntimeError, match="`scale` has other memory than when the model was loaded"):
        run.forward(**given())


def test_gradients_that_were_replaced_count() -> None:
    """`param.grad = param.grad * 0.5`, then another backward adds to that."""
    run = _loaded()
    run.forward_train(**given())
    run.backward()
    once = {n: g.clone() for n, g in run.grads.items()}
    for param in run.params.values():
        param.grad = param.grad * 0.5
    run.forward_train(**given())
    run.backward()
    for name, grad in once.items():
        torch.testing.assert_close(run.params[name].grad, 1.5 * grad)
        assert run.params[name].grad is run.grads[name]


def test_a_captured_torch_optimizer_has_gradients() -> None:
    run = _loaded()
    optimizer = torch.optim.SGD(run.params.values(), lr=0.5)
    run.forward_train(**given())
    run.backward()
    optimizer.step()
    optimizer.zero_grad()
    step, before = run.capture(optimizer.step), {n: p.clone() for n, p in run.params.items()}
    step(**given())
    assert not any(torch.equal(before[n], p) for n, p in run.params.items())


def test_seeds_are_checked() -> None:
    graph, outputs = gated()
    run = graph.lower(outputs, seeds=outputs).load(DEVICE, batch=5)
    loss, out = (o.name for o in outputs)
    one, whole = torch.ones((), device=DEVICE), torch.ones(5, 8, 3, device=DEVICE)
    run.forward_train(**given())
    for seeds, kind, text in (
        (None, TypeError, f"`{out}` has 120 values: give its cotangent"),
        ({"y": one}, TypeError, f"not of the model: y; missing: {loss}, {out}"),
        ({out: whole}, TypeError, f"not of the model: none; missing: {loss}"),
        (one, TypeError, "give a cotangent by each name"),
        ([1.0], TypeError, "give a cotangent by each name"),
        ({loss: 1.0, out: whole}, TypeError, f"`{loss}` is a float"),
        ({loss: one, out: whole[..., 1:]}, ValueError, r"the output is torch.float32 \(5, 8, 3\)"),
        ({loss: one, out: whole.double()}, ValueError, "is torch.float64"),
    ):
        with pytest.raises(kind, match=text):
            run.backward(seeds)
    run.backward({loss: one, out: whole})  # what was refused has cost nothing
    assert loss in run.model.seeds


def test_a_param_that_begins_with_nothing_is_named() -> None:
    x, graph = SymTensor.input("f32", (None, 4))
    y = generated.mul(x, graph.param("w", (4,)))
    with pytest.raises(ValueError, match="param `w`: no op says what it begins with"):
        graph.lower(y).load(DEVICE, batch=1)


# ---------------------------------------------------------------------------------------------- files


def test_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    graph, outputs = gated()
    first, second = (graph.lower(outputs).load(DEVICE, batch=5, seed=s) for s in (1, 2))
    assert not torch.equal(first.params["scale"], second.params["scale"])
    first.save(tmp_path / "model.safetensors")
    second.load(tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(first.forward(**given()), second.forward(**given())))
    again = graph.lower(outputs).load(DEVICE, batch=5, seed=1)
    assert all(torch.equal(again.params[n], p) for n, p in first.params.items())
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    graph, outputs = gated()
    run = graph.lower(outputs).load(DEVICE, batch=5)
    path = tmp_path / "model.safetensors"
    run.save(path)
    before = {n: p.clone() for n, p in run.params.items()}
    whole = path.read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="no whole safetensors file"):
            run.load(path)
    with pytest.raises(FileNotFoundError):
        run.load(tmp_path / "other.safetensors")
    state = {n: torch.zeros_like(p) for n, p in run.state_dict().items()}
    state["scale"], state["block.shift"] = torch.zeros(9), state["block.shift"].double()
    state["more"] = state.pop("block.norm.weight")
    with pytest.raises(ValueError) as caught:
        run.load_state_dict(state)
    assert str(caught.value) == (
        "the state does not fit, nothing is loaded:\n  `block.norm.weight` is missing\n  `more` is not of this model\n"
        "  `scale` is [9] there, [8] here\n  `block.shift` is torch.float64 there, torch.float32 here"
    )
    assert all(torch.equal(before[n], p) for n, p in run.params.items())


# ---------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_captured_steps_are_steps(max_norm: float | None) -> None:
    """A step as one graph on a GPU; on a CPU it runs as it is. Whatever ran between, seeds are 1; hyper-parameters may change."""
    graph, outputs = gated()
    plain, captured = (graph.lower(outputs).load(DEVICE, batch=5) for _ in range(2))
    optimizers = [run.optimizer(generated.adamw, lr=0.1) for run in (plain, captured)]

    def step(run: Any, optimizer: Any, seed: int, cotangent: Any = None) -> Any:
        run.zero_grad()
        found = run.forward_train(**given(seed=seed))
        run.backward(cotangent)
        if max_norm is not None:
            optimizer.clip_grad_norm(max_norm)
        optimizer.step()
        return found

    for run, optimizer in zip((plain, captured), optimizers):
        step(run, optimizer, 1)
    whole = captured.capture(optimizers[1], max_norm=max_norm)
    for run, optimizer in zip((plain, captured), optimizers):
        step(run, optimizer, 2, torch.full((), 5.0, device=DEVICE))
    for seed in (3, 4):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 * seed
        wanted, found = step(plain, optimizers[0], seed), whole(**given(seed=seed))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
        assert all(torch.equal(plain.grads[n], g) for n, g in captured.grads.items())
        assert all(torch.equal(plain.params[n], p) for n, p in captured.params.items())


def test_what_cannot_be_captured_is_refused() -> None:
    graph, outputs = gated()
    run = graph.lower(outputs).load(DEVICE, batch=5)
    run.forward_train(**given())
    run.backward()
    for call, text in (
        (
            lambda: run.capture(torch.optim.SGD(run.params.values(), lr=1)),
            "a SGD is no optimizer of this package: give its `step`",
        ),
        (lambda: run.capture(lambda: None, max_norm=1.0), "max_norm needs an optimizer of this package"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
    optimizer = run.optimizer(generated.adamw, lr=0.1)
    optimizer.step()
    step = run.capture(optimizer)
    step(**given())
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(RuntimeError, match="other params, state or choices than when it was captured: capture again"):
        step(**given())


# ---------------------------------------------------------------------------------------------- fused ops


def gated_unit() -> tuple[Graph, SymTensor]:
    """relu, then a product: what `reglu` stands for; then a chain for which nothing stands."""
    x, graph = SymTensor.input("f32", (None, 8))
    up = generated.mul(x, graph.param("w", (8,), init=Init("uniform", 1.0)))
    y = generated.mul(generated.relu(generated.add(x, graph.param("b", (8,), init=0.5))), up)
    return graph, generated.mean(generated.square(generated.exp(y)), dim=None)


def test_fused_ops_run_where_their_steps_were_recorded() -> None:
    graph, loss = gated_unit()
    fused, plain = graph.lower(loss), graph.lower(loss, fuse=False)
    assert fused.replaced == (("reglu", ("relu_1", "mul_2")),) and not plain.replaced
    said = fused.fusions().split("\n")
    assert said[0] == "relu_1, mul_2: run as reglu" and any(
        "could be one op, see `pullback fuse`" in s for s in said[1:]
    )
    runs = [m.load(DEVICE, batch=5) for m in (fused, plain)]
    assert len(runs[0].program.forward) == len(runs[1].program.forward) - 1
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses = [r.forward_train(x) for r in runs]
    for r in runs:
        r.backward()
    torch.testing.assert_close(losses[0], losses[1])
    for name, grad in runs[1].grads.items():
        torch.testing.assert_close(runs[0].grads[name], grad)
