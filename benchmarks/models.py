"""Whole training steps of the examples: the executor, as launches and as one CUDA graph, beside torch eager and compiled.

    python -m benchmarks.models [--out models.json] [--table models.md]

A step is forward, backward and AdamW, over a batch that is on the device. The clock is the wall's, over many steps between two
waits for the device, for on small models the host is what counts; the smallest of several such runs. Peers take
`torch.optim.AdamW(fused=True)`; the compiled one `torch.compile(mode="reduce-overhead")` over the loss. Peak memory is what torch's
allocator had at most, less what was there before. The losses of ten steps are held against eager's first: exit code 1 where
they differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import generated
from benchmarks.report import grid
from benchmarks.twins import digits_by_torch, transformer_by_torch
from examples import digits, transformer
from generated.runtime.executor import Executor

PEERS = ("executor", "executor, captured", "eager", "compiled")
LR = 1e-3
SHAPE = transformer.Shape()
Batch = Mapping[str, torch.Tensor]
Step = Callable[[], torch.Tensor]
Loss = Callable[..., torch.Tensor]


def _digits(dtype: str) -> tuple[Executor, Batch, Loss]:
    graph, loss, _ = digits.network()
    pixels, labels, *_ = (t.cuda() for t in digits.digits())
    return graph.lower(loss).load("cuda", batch=digits.BATCH), next(digits.batches(pixels, labels, 0)), digits_by_torch


def _transformer(dtype: str) -> tuple[Executor, Batch, Loss]:
    graph, loss = transformer.network(SHAPE, dtype)
    run = graph.lower(loss).load("cuda", batch=32, master="f32")
    run.buffers["mask"].copy_(transformer.causal(SHAPE))
    batch = {n: t.cuda() for n, t in next(transformer.batches(SHAPE, 32)).items()}
    cast = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def loss_of(params: dict[str, torch.Tensor], **given: torch.Tensor) -> torch.Tensor:
        return transformer_by_torch({n: p.to(cast) for n, p in params.items()}, SHAPE, **given)

    return run, batch, loss_of


MODELS = {("digits", "f32"): _digits, ("transformer", "f32"): _transformer, ("transformer", "bf16"): _transformer}


def ours(run: Executor, batch: Batch, captured: bool) -> Step:
    optimizer = run.optimizer(generated.adamw, lr=LR)

    def step() -> torch.Tensor:
        found: torch.Tensor = run.forward_train(**batch)
        run.backward()
        optimizer.step()
        run.zero_grad()
        return found

    if not captured:
        return step
    step()  # compiles; the first of the losses is of the second step
    whole = run.capture(optimizer)
    return lambda: whole(**batch)


def theirs(run: Executor, batch: Batch, loss: Loss, compiled: bool) -> Step:
    params = {n: p.detach().float().clone().requires_grad_() for n, p in run.params.items()}
    optimizer = torch.optim.AdamW(list(params.values()), lr=LR, fused=True)
    function = torch.compile(loss, mode="reduce-overhead") if compiled else loss

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = function(params, **batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def measure(step: Step, steps: int = 200, runs: int = 5) -> tuple[float, list[float]]:
    """Microseconds a step, and the losses of the first ten."""
    losses = [step().item() for _ in range(10)]
    best = float("inf")
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / steps * 1e6, losses


def cell(model: str, dtype: str, peer: str) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run, batch, loss = MODELS[(model, dtype)](dtype)
    if peer.startswith("executor"):
        step = ours(run, batch, "captured" in peer)
    else:
        step = theirs(run, batch, loss, peer == "compiled")
        # Of the executor only its params are wanted here.
        del run
        gc.collect()
    torch.cuda.reset_peak_memory_stats()
    took, losses = measure(step)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"model": model, "dtype": dtype, "peer": peer, "us": took, "peak_mb": peak, "losses": losses}


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """Peers whose losses are not eager's."""
    out = []
    for row in rows:
        base = next(
            (r for r in rows if r["peer"] == "eager" and (r["model"], r["dtype"]) == (row["model"], row["dtype"])), row
        )
        ahead = int("captured" in row["peer"])
        allowed = 0.02 if row["dtype"] == "f32" else 0.05
        if any(abs(a - b) > allowed * abs(b) for a, b in zip(row["losses"], base["losses"][ahead:])):
            out.append(f"{row['model']} {row['dtype']} {row['peer']}: {row['losses']} beside {base['losses'][ahead:]}")
    return out


def table(rows: list[dict[str, Any]]) -> str:
    found = {(r["model"], r["dtype"], r["peer"]): r for r in rows}
    lines = []
    for model, dtype in MODELS:
        own = [found.get((model, dtype, peer)) for peer in PEERS]
        lines.append([model, dtype, *("" if r is None else f"{r['us']:.0f} us, {r['peak_mb']:.1f} MiB" for r in own)])
    return "\n".join(grid(["model", "dtype", *PEERS], lines))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args(words)
    rows = [cell(model, dtype, peer) for model, dtype in MODELS for peer in PEERS]
    print(table(rows))
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
    if args.table:
        args.table.write_text(table(rows) + "\n")
    for text in (faults := wrong(rows)):
        print(text)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
