"""Whole models: the examples, trained step by step beside torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from benchmarks.twins import digits_by_torch, transformer_by_torch  # noqa: E402
from examples import digits, transformer  # noqa: E402
from generated.runtime.executor import Executor  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402


def twins(run: Executor) -> dict[str, Any]:
    """The params of torch's model: the same numbers."""
    return {n: p.detach().clone().requires_grad_() for n, p in run.params.items()}


def follow(
    run: Executor, step: Any, params: dict[str, Any], by_torch: Any, optimizer: Any, batches: Any, tolerance: float
) -> list[float]:
    """Steps of both; the loss of each step agrees, and at the end so do the params."""
    losses = []
    for batch in batches:
        run.zero_grad()
        ours = run.forward_train(**batch)
        run.backward()
        step()
        optimizer.zero_grad()
        theirs = by_torch(params, **batch)
        theirs.backward()
        optimizer.step()
        assert abs(ours.item() - theirs.item()) <= tolerance * abs(theirs.item()), len(losses)
        losses.append(ours.item())
    return losses


def few_digits(count: int) -> list[dict[str, Any]]:
    pixels, labels, *_ = (t.to(DEVICE) for t in digits.digits())
    return [b for _, b in zip(range(count), digits.batches(pixels, labels, seed=0))]


def loaded(size: int = digits.BATCH) -> Executor:
    graph, loss, _ = digits.network()
    return graph.lower(loss).load(DEVICE, batch=size)


def test_executor_digits_follow_torch() -> None:
    run = loaded()
    params = twins(run)
    optimizer = torch.optim.AdamW(list(params.values()), lr=3e-3)
    own = run.optimizer(generated.adamw, lr=3e-3)
    losses = follow(run, own.step, params, digits_by_torch, optimizer, few_digits(6), 1e-4)
    assert losses[-1] < losses[0]
    for name, param in params.items():
        torch.testing.assert_close(run.params[name], param.detach(), rtol=1e-2, atol=1e-4)


def test_executor_digits_are_read_in_inference() -> None:
    """What was trained with one batch size is loaded with another."""
    run = loaded()
    assert 0.0 <= digits.accuracy(run) < 0.3  # nothing is learnt yet
    seen: list[str] = []
    digits.train(run, run.optimizer(generated.adamw, lr=1e-2), epochs=1, say=seen.append)
    assert digits.accuracy(run) > 0.6 and len(seen) == 1


def test_executor_transformer_follows_torch() -> None:
    shape = transformer.Shape(width=32, heads=2, layers=1, tokens=16)
    graph, loss = transformer.network(shape)
    run = graph.lower(loss).load(DEVICE, batch=2)
    run.buffers["mask"].copy_(transformer.causal(shape))
    params = twins(run)
    optimizer = torch.optim.AdamW(list(params.values()), lr=1e-2)
    own = run.optimizer(generated.adamw, lr=1e-2)
    batches = [{n: t.to(DEVICE) for n, t in b.items()} for _, b in zip(range(3), transformer.batches(shape, 2))]
    losses = follow(run, own.step, params, lambda p, **b: transformer_by_torch(p, shape, **b), optimizer, batches, 1e-3)
    assert losses[-1] < losses[0]


@pytest.mark.gpu
def test_executor_digits_reach_97_percent() -> None:
    """In full, as whole captured steps."""
    run = loaded()
    digits.train(run, run.optimizer(generated.adamw, lr=3e-3), epochs=40, say=lambda _: None)
    assert digits.accuracy(run) >= 0.97


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_executor_transformer_follows_torch_for_500_steps(dtype: str) -> None:
    """The loss curve is torch's: step by step at first, then as a mean of fifty steps."""
    shape = transformer.Shape()
    graph, loss = transformer.network(shape, dtype)
    run = graph.lower(loss).load(DEVICE, batch=32, master="f32")
    run.buffers["mask"].copy_(transformer.causal(shape))
    params = {n: p.float().detach().clone().requires_grad_() for n, p in run.params.items()}
    optimizer = torch.optim.AdamW(list(params.values()), lr=1e-3)
    own = run.optimizer(generated.adamw, lr=1e-3)
    cast = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    ours, theirs, step = [], [], None
    for _, batch in zip(range(500), transformer.batches(shape, 32)):
        batch = {n: t.to(DEVICE) for n, t in batch.items()}
        if step is None:
            ours.append(run.forward_train(**batch).item())
            run.backward()
            own.step()
            run.zero_grad()
            step = run.capture(own)
        else:
            ours.append(step(**batch).item())
        optimizer.zero_grad()
        value = transformer_by_torch({n: p.to(cast) for n, p in params.items()}, shape, **batch)
        value.backward()
        optimizer.step()
        theirs.append(value.item())
    first = 0.01 if dtype == "f32" else 0.03
    assert all(abs(a - b) <= first * b for a, b in zip(ours[:20], theirs[:20]))
    for k in range(0, 500, 50):
        a, b = (sum(x[k : k + 50]) / 50 for x in (ours, theirs))
        assert abs(a - b) <= 0.03 * b, (k, a, b)
    assert ours[-1] < 0.7 * ours[0]
