"""The examples' models in plain torch, over params by the same keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from examples import transformer


def digits_by_torch(params: dict[str, Any], pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of `examples.digits`."""
    x = pixels
    for layer in range(3):
        x = F.linear(x, params[f"layers.{layer}.weight"], params[f"layers.{layer}.bias"])
        x = F.relu(x) if layer < 2 else x
    return F.cross_entropy(x, labels)


def transformer_by_torch(
    params: dict[str, Any], shape: transformer.Shape, ids: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """The loss of `examples.transformer`."""

    def norm(x: Any, name: str) -> Any:
        return F.rms_norm(x, x.shape[-1:], params[f"{name}.weight"], 1e-6)

    def heads(x: Any) -> Any:
        return x.reshape(-1, shape.tokens, shape.heads, shape.width // shape.heads).transpose(1, 2)

    x = F.embedding(ids, params["embedding.weight"]) + params["position.weight"]
    for layer in range(shape.layers):
        own = {
            n.removeprefix(f"layers.{layer}.").removesuffix(".weight"): p
            for n, p in params.items()
            if n.startswith(f"layers.{layer}.")
        }
        normed = norm(x, f"layers.{layer}.norm1")
        q, k, v = (heads(F.linear(normed, own[n])) for n in ("query", "key", "value"))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.linear(y, own["out"])
        normed = norm(x, f"layers.{layer}.norm2")
        x = x + F.linear(F.silu(F.linear(normed, own["gate"])) * F.linear(normed, own["up"]), own["down"])
    return F.cross_entropy(F.linear(norm(x, "head.norm"), params["head.logits.weight"]).reshape(-1, 256), target)
