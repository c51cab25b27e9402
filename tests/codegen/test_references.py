"""Formulas against torch, without a kernel: forward and declared gradients of every variant in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codegen.diagnostics import Report
from codegen.evaluate import Env, evaluate, full
from codegen.ir import Graph, Tensor
from codegen.loader import load
from codegen.primitives import Array
from codegen.sample import NoSample, Sampler
from codegen.spec import OpSpec
from codegen.variants import Variant
from codegen.verify import typed, with_outputs

ROOT = Path(__file__).parents[2]
FOLDERS = ("specs", "tests/ir")


def specs() -> list[OpSpec]:
    report = Report()
    found = load([ROOT / f for f in FOLDERS], report, ROOT)
    assert not report.found, report.render()
    return [op for op in found if op.reference]


def outside(tensor: Tensor, array: Array, env: Env) -> torch.Tensor:
    """What a caller passes: one dim for each dim of the declaration, factors merged, packs as they are."""
    layout = tensor.layout
    order = [a for dim in layout for a in dim]
    rest = sorted(set(env.order) - set(order), key=env.order.index)
    moved = array.transpose([env.order.index(a) for a in (*order, *rest)])
    shape = [int(np.prod([moved.shape[order.index(a)] for a in dim], dtype=np.int64)) for dim in layout]
    return torch.from_numpy(np.ascontiguousarray(moved.reshape(shape)))


def inside(tensor: Tensor, value: torch.Tensor, env: Env, shape: tuple[int, ...]) -> Array:
    """The inverse of `outside`."""
    order = [a for dim in tensor.layout for a in dim]
    rest = sorted(set(env.order) - set(order), key=env.order.index)
    places = [env.order.index(a) for a in (*order, *rest)]
    return value.detach().numpy().reshape([shape[p] for p in places]).transpose(np.argsort(places))
