"""Handwritten digits with a multilayer perceptron, trained without autograd.

    python -m examples.digits                                        # on a GPU, to 97% of the test set and more
    TRITON_INTERPRET=1 python -m examples.digits --device cpu --epochs 1    # anywhere, slowly

The data are 1,797 real digits of 8 by 8 pixels that come with scikit-learn (Alpaydin and Kaynak, 1998).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import generated
from generated.runtime.executor import Executor
from generated.runtime.graph import Graph, Init, SymTensor
from generated.runtime.linalg import linear
from generated.runtime.lowering import LoweringMode

if TYPE_CHECKING:
    import torch

WIDTHS = (64, 128, 64, 10)
BATCH = 64


def digits() -> tuple[Any, Any, Any, Any]:
    """Pixels in [0, 1] and labels: 1,437 to train with, 360 to test with, in an order that is always the same."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(data.target, dtype=torch.int64)[order]
    return pixels[:1437], labels[:1437], pixels[1437:], labels[1437:]


def network() -> tuple[Graph, SymTensor, SymTensor]:
    """The graph, its loss and its logits."""
    x, graph = SymTensor.input("f32", (None, WIDTHS[0]), "pixels")
    for layer, (fan_in, fan_out) in enumerate(zip(WIDTHS, WIDTHS[1:])):
        bound = Init("uniform", fan_in**-0.5)  # as torch.nn.Linear begins
        weight = graph.param(f"layers.{layer}.weight", (fan_out, fan_in), init=bound)
        x = linear(x, weight, graph.param(f"layers.{layer}.bias", (fan_out,), init=bound))
        x = generated.relu(x) if fan_out != WIDTHS[-1] else x
    loss = generated.cross_entropy(x, graph.input("i64", (None,), "labels"))
    return graph, loss, x


def batches(pixels: Any, labels: Any, seed: int, size: int = BATCH) -> Iterator[dict[str, Any]]:
    """Whole batches of one epoch in random order."""
    import torch

    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for k in range(0, len(order) - size + 1, size):
        own = order[k : k + size]
        yield {"pixels": pixels[own], "labels": labels[own]}


def train(run: Executor, optimizer: Any, epochs: int, say: Callable[[str], None] = print) -> list[float]:
    """Trains; the loss of every step."""
    pixels, labels, *_ = (t.to(run.device) for t in digits())
    losses: list[Any] = []
    captured = None
    for epoch in range(epochs):
        for batch in batches(pixels, labels, seed=epoch):
            if captured is None:
                run.zero_grad()
                losses.append(run.forward_train(**batch))
                run.backward()
                optimizer.step()
                run.zero_grad()
                captured = run.capture(optimizer)
            else:
                losses.append(captured(**batch))
        say(f"epoch {epoch}: loss {losses[-1].item():.4f}")
    return [x.item() for x in losses]


def accuracy(run: Executor) -> float:
    """Of the test set, with the params of a model that was trained."""
    *_, pixels, labels = digits()
    graph, _, logits = network()
    test = graph.lower(logits, LoweringMode.INFERENCE).load(run.device, batch=len(labels))
    test.load_state_dict(run.state_dict())
    found: torch.Tensor = test.forward(pixels.to(run.device)).argmax(1).cpu()
    return (found == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    graph, loss, _ = network()
    print(graph)
    run = graph.lower(loss).load(args.device, batch=BATCH)
    print(run.memory)
    optimizer = run.optimizer(generated.adamw, lr=3e-3)
    train(run, optimizer, args.epochs)
    print(f"test accuracy {accuracy(run):.1%}")


if __name__ == "__main__":
    main()
