"""Outputs that are there under some choices alone: a call returns those that are, as torch's functions do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from generated.runtime.testing import DEVICE  # noqa: E402
from tests.kernels.project import Package, emitted  # noqa: E402


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    made = Package(tmp_path_factory.mktemp("there"))
    yield made
    made.close()


def spec(name: str, attrs: str, outputs: str, forward: str, inputs: str = "{x: [..., N]}") -> str:
    lines = "".join(f"    {line}\n" for line in forward.split("; "))
    return (
        f"- op: {name}\n  doc: Some outputs are there at times.\n  inputs: {inputs}\n  attrs: {attrs}\n  outputs: {outputs}\n"
        f"  forward: |\n{lines}  backward: {{x: auto}}\n"
    )


FLAG = "{flag: {default: false}}"
MODE = "{mode: {enum: [a, b, c], default: a}, flag: {default: false}}"
OPS: dict[str, tuple[str, Callable[..., list[Any]], dict[str, tuple[Any, ...]]]] = {
    "a_statistic": (
        spec("a_statistic", FLAG, "{y: [..., N], s: {axes: [...], when: flag}}", "s = mean(x, N); y = x - s"),
        lambda x, flag: [x - x.mean(-1, keepdim=True), *([x.mean(-1)] if flag else [])],
        {"flag": (False, True)},
    ),
    "unless": (
        spec("unless", FLAG, "{y: [..., N], s: {axes: [...], when: not flag}}", "y = x * x; s = sum(y, N)"),
        lambda x, flag: [x * x, *([] if flag else [(x * x).sum(-1)])],
        {"flag": (False, True)},
    ),
    "per_element": (
        spec("per_element", FLAG, "{y: [..., N], z: {axes: [..., N], when: flag}}", "y = x * x; z = 3 * x"),
        lambda x, flag: [x * x, *([3 * x] if flag else [])],
        {"flag": (False, True)},
    ),
    "the_first": (
        spec("the_first", FLAG, "{y: {axes: [..., N], when: flag}, z: [...]}", "y = x * x; z = sum(x, N)"),
        lambda x, flag: [*([x * x] if flag else []), x.sum(-1)],
        {"flag": (False, True)},
    ),
    "places": (
        spec("places", "{return_indices: {default: false}}", "{y: [...], i: {axes: [...], dtype: int, when: return_indices}}",
             "y = max(x, N); i = argmax(x, N)"),
        lambda x, return_indices: [x.amax(-1), *([x.argmax(-1)] if return_indices else [])],
        {"return_indices": (False, True)},
    ),
    "by_mode": (
        spec("by_mode", MODE, '{y: [..., N], s: {axes: [...], when: mode == "b"}, t: {axes: [...], when: mode != "a" and flag}}',
             "m = sum(x, N); s = m; t = mean(x * x, N); y = x * m"),
        lambda x, mode, flag: [x * x.sum(-1, keepdim=True), *([x.sum(-1)] if mode == "b" else []),
                               *([(x * x).mean(-1)] if mode != "a" and flag else [])],
        {"mode": ("a", "b", "c"), "flag": (False, True)},
    ),
    "by_number": (
        spec("by_number", "{k: {default: 1.0}}", "{y: [..., N], s: {axes: [...], when: k > 2}}", "s = k * sum(x, N); y = k * x"),
        lambda x, k: [k * x, *([k * x.sum(-1)] if k > 2 else [])],
        {"k": (1.0, 2.0, 3.0)},
    ),
    "by_presence": (
        spec("by_presence", "{k: {optional: true}}", "{y: [..., N], s: {axes: [...], when: k is not None}}",
             "s = 2 * x if k is None else k * x; y = x * x").replace("s: {axes: [...]", "s: {axes: [..., N]"),
        lambda x, k: [x * x, *([k * x] if k is not None else [])],
        {"k": (None, 3.0)},
    ),
    "other_dims": (
        spec("other_dims", MODE, '{y: [..., N], s: {axes: \'[...] if mode == "b" else [..., N]\', when: flag}}',
             's = sum(x, N) if mode == "b" else 2 * x; y = x * x'),
        lambda x, mode, flag: [x * x, *([x.sum(-1) if mode == "b" else 2 * x] if flag else [])],
        {"mode": ("a", "b"), "flag": (False, True)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_a_call_returns_the_outputs_that_are_there(package: Package, name: str) -> None:
    text, reference, choices = OPS[name]
    op = getattr(package.op(text), name)
    x = torch.randn(3, 7, dtype=torch.float64, device=DEVICE)
    for values in itertools.product(*choices.values()):
        attrs = dict(zip(choices, values))
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        made, wanted = op(ours, **attrs), reference(theirs, **attrs)
        assert isinstance(made, tuple) == (len(wanted) > 1), attrs
        found = list(made) if isinstance(made, tuple) else [made]
        assert len(found) == len(wanted)
        for got, want in zip(found, wanted):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-12, msg=str(attrs))
        floats = [k for k, want in enumerate(wanted) if want.requires_grad]
        for reached in (floats, *([k] for k in floats)):
            seeds = [torch.randn_like(wanted[k]) for k in reached]
            grads = [
                torch.autograd.grad([ys[k] for k in reached], leaf, seeds, retain_graph=True)[0]
                for ys, leaf in ((found, ours), (wanted, theirs))
            ]
            torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12, msg=f"{attrs} {reached}")


@pytest.mark.parametrize("name", OPS)
def test_the_contract_and_a_graph_have_the_outputs_that_are_there(package: Package, name: str) -> None:
    text, reference, choices = OPS[name]
    module = package.op(text)
    kind = getattr(module, "".join(w.capitalize() for w in name.split("_")))
    meta = package.module("runtime.plan").Meta.dense("f64", (3, 7))
    for values in itertools.product(*choices.values()):
        attrs = dict(zip(choices, values))
        shapes = tuple(tuple(y.shape) for y in reference(torch.zeros(3, 7), **attrs))
        assert kind(**attrs).output_shapes({"x": meta}) == shapes
        assert tuple(m.shape for m in kind(**attrs).plan_forward({"x": meta}).outputs.values()) == shapes
        x, _ = package.module("runtime.graph").SymTensor.input("f64", (3, 7))
        made = getattr(module, name)(x, **attrs)
        assert tuple(y.shape for y in (made if isinstance(made, tuple) else (made,))) == shapes


REFUSED = {
    "by a tensor": (
        spec("f", FLAG, "{y: [N], s: {axes: [], when: w is None and flag}}", "y = x if w is None else x * w; s = sum(x, N)",
             "{x: [N], w: {axes: [N], optional: true}}").replace("{x: auto}", "{x: auto, w: auto}"),
        "whether `s` is there depends on more than attrs: `w is None and flag`",
    ),
    "by an extent": (
        spec("f", FLAG, "{y: [N], s: {axes: [], when: size(N) > 3}}", "y = x if flag else 2 * x; s = sum(x, N)", "{x: [N]}"),
        "whether `s` is there depends on more than attrs: `size(N) > 3`",
    ),
    "by either of two": (
        spec("f", MODE, '{y: [N], s: {axes: [], when: flag or mode == "b"}}', "y = 2 * x; s = sum(x, N)", "{x: [N]}"),
        "`s` is there under choices that no one value of each tells apart",
    ),
    "none": (
        spec("f", FLAG, "{y: {axes: [N], when: flag}}", "y = 2 * x", "{x: [N]}"),
        "under some choices none of its outputs is there",
    ),
    "kept where it is not there": (
        spec("f", FLAG, "{y: [N], s: {axes: [], when: flag}}", "s = sum(x, N); y = x * s", "{x: [N]}"),
        "the backward keeps `s`, which is an output under other choices: name the two apart",
    ),
    "a buffer": (
        spec("f", FLAG, "{y: [N]}", "y = x", "{x: [N]}").replace("  attrs", "  buffers: {b: {axes: [N], when: flag}}\n  attrs")
        .replace("  backward", "  update:\n    when: flag\n    b: b + x\n  backward"),
        "the buffer `b` is there under choices alone: write `optional: true`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_known_too_late_is_a_diagnostic(package: Package, name: str) -> None:
    files, report = emitted(REFUSED[name][0], package.config)
    assert not files and REFUSED[name][1] in report.render(), report.render()
