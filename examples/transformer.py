"""A small causal transformer over the bytes of Python's own help texts, trained without autograd.

    python -m examples.transformer                                   # on a GPU
    TRITON_INTERPRET=1 python -m examples.transformer --device cpu --steps 2 --batch 1 --tokens 16    # anywhere, slowly

The text, about 700 kB, comes with every Python as `pydoc_data.topics`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import generated
from generated.runtime.graph import Graph, Init, SymTensor
from generated.runtime.linalg import batched_matmul, embedding, linear

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    width: int = 128
    heads: int = 4
    layers: int = 2
    tokens: int = 64


def text() -> Any:
    """All topics, one after another, as bytes."""
    from pydoc_data.topics import topics

    import torch

    whole = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()


def batches(shape: Shape, batch: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Random pieces of the text, and what follows each byte."""
    import torch

    data, generator = text(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - shape.tokens - 1, (batch, 1), generator=generator)
        pieces = data[starts + torch.arange(shape.tokens + 1)]
        yield {"ids": pieces[:, :-1], "target": pieces[:, 1:].reshape(-1)}


def causal(shape: Shape) -> Any:
    """[T, T]: which byte may look at which."""
    import torch

    return torch.ones(shape.tokens, shape.tokens, dtype=torch.bool).tril()


class _Block:
    """Attention and a gated unit, each behind a norm and beside its operand."""

    def __init__(self, graph: Graph, shape: Shape, name: str, dtype: str) -> None:
        self.graph, self.shape, self.name, self.dtype = graph, shape, name, dtype

    def project(self, x: SymTensor, name: str, fan_in: int, fan_out: int) -> SymTensor:
        init = Init("normal", 0.02)
        return linear(x, self.graph.param(f"{self.name}.{name}.weight", (fan_out, fan_in), self.dtype, init))

    def norm(self, x: SymTensor, name: str) -> SymTensor:
        return generated.rms_norm(x, self.graph.param(f"{self.name}.{name}.weight", dtype=self.dtype))

    def heads(self, x: SymTensor) -> SymTensor:
        s = self.shape
        return x.reshape(-1, s.tokens, s.heads, s.width // s.heads).permute(0, 2, 1, 3)

    def attention(self, x: SymTensor, mask: SymTensor) -> SymTensor:
        s = self.shape
        normed = self.norm(x, "norm1")
        q, k, v = (self.heads(self.project(normed, n, s.width, s.width)) for n in ("query", "key", "value"))
        scores = batched_matmul(q, k.transpose(-2, -1))
        weights = generated.softmax(generated.scale_mask(scores, mask, scale=(s.width // s.heads) ** -0.5), dim=-1)
        own = batched_matmul(weights, v).permute(0, 2, 1, 3).reshape(-1, s.tokens, s.width)
        return generated.add(x, self.project(own, "out", s.width, s.width))

    def gated(self, x: SymTensor) -> SymTensor:
        s = self.shape
        normed = self.norm(x, "norm2")
        gate, up = (self.project(normed, n, s.width, 2 * s.width) for n in ("gate", "up"))
        return generated.add(x, self.project(generated.swiglu(gate, up), "down", 2 * s.width, s.width))


def network(shape: Shape, dtype: str = "f32") -> tuple[Graph, SymTensor]:
    """The graph and its loss, the mean of -log p of each next byte."""
    ids, graph = SymTensor.input("i64", (None, shape.tokens), "ids")
    mask = graph.buffer("mask", (shape.tokens, shape.tokens), "bool", init=0)
    x = embedding(ids, graph.param("embedding.weight", (BYTES, shape.width), dtype, Init("normal", 0.02)))
    x = generated.add(x, graph.param("position.weight", (shape.tokens, shape.width), dtype, Init("normal", 0.02)))
    for layer in range(shape.layers):
        block = _Block(graph, shape, f"layers.{layer}", dtype)
        x = block.gated(block.attention(x, mask))
    last = _Block(graph, shape, "head", dtype)
    logits = last.project(last.norm(x, "norm"), "logits", shape.width, BYTES).reshape(-1, BYTES)
    return graph, generated.cross_entropy(logits, graph.input("i64", (shape.tokens * x.shape[0],), "target"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="f32", choices=("f32", "bf16"))
    args = parser.parse_args()
    shape = Shape(tokens=args.tokens)
    graph, loss = network(shape, args.dtype)
    run = graph.lower(loss).load(args.device, batch=args.batch, master="f32")
    run.buffers["mask"].copy_(causal(shape))
    print(run.memory)
    optimizer = run.optimizer(generated.adamw, lr=1e-3)
    step = None
    for k, batch in zip(range(args.steps), batches(shape, args.batch)):
        if step is None:
            found = run.forward_train(**batch)
            run.backward()
            optimizer.step()
            run.zero_grad()
            step = run.capture(optimizer)
        else:
            found = step(**batch)
        if k % 50 == 0 or k == args.steps - 1:
            print(f"step {k}: {found.item():.3f} nats a byte")


if __name__ == "__main__":
    main()
