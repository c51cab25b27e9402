"""How the emitted tests check an op that updates state: one step of many tensors against its formulas in float64.

Runs on a GPU, or on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .abi import PackedC, Recorder
from .optim import Optimizer
from .plan import Tensor
from .stepwise import BLOCK, COUNTER, FRESH, TABLES, StepOp
from .testing import DEVICE, TORCH, _close
from .views import TensorView

_SHAPES = ((0,), (1,), (), (5, 7), (BLOCK + 3,), (3, BLOCK))
_SEEN = 2
"""Updates that loaded state has seen."""


class StepCase:
    """One step under test. `domains` bounds tensors and attrs by name; `reference` takes the spec's names, and gives the new state."""

    dtypes = tuple(TORCH)[:4]

    def __init__(self, function: Callable[..., Optimizer], op: type[StepOp], domains: Mapping[str, tuple[float, float]],
                 reference: Callable[..., Mapping[str, Any]] | None = None) -> None:  # fmt: skip
        self.function, self.op, self.domains, self.reference = function, op, domains, reference

    def allowed(self, attrs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those that the op's own conditions let pass."""
        out = []
        for some in attrs:
            try:
                self._instance(some).require()
            except ValueError as error:
                assert " requires " in str(error), error
            else:
                out.append(some)
        assert out
        return out

    def _attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """All hyper-parameters by the spec's names."""
        own = {public: n for n, public in self.op.named.items()}
        defaults = {
            own.get(n, n): p.default for n, p in inspect.signature(self.function).parameters.items() if n != "params"
        }
        return {**defaults, **attrs}

    def _instance(self, attrs: Mapping[str, Any]) -> StepOp:
        more = {n: 1 for n in (COUNTER, FRESH) if n in self.op.kinds}
        op = self.op(**self._attrs(attrs), **more, **{t.name: 0.0 for t in self.op.hosted()})
        op.attrs |= {t.name: op.initial(t) for t in op.hosted()}
        return op

    def _optimizer(self, params: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> Optimizer:
        return self.function(params, **{self.op.named.get(n, n): v for n, v in attrs.items()})

    def _drawn(self, name: str, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        low, high = self.domains.get(name, (-math.inf, math.inf))
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if math.isfinite(low):
            x = (
                low + x.abs()
                if math.isinf(high)
                else low + (high - low) * torch.rand(shape, generator=generator, dtype=x.dtype)
            )
        return x.to(TORCH[dtype]).clamp(low, high).to(DEVICE)

    def _params(self, dtype: str) -> list[torch.Tensor]:
        """Of several shapes; one begins where no vector does, another lies along other dims."""
        name = self.op.trained().name
        out = [self._drawn(name, shape, dtype, k) for k, shape in enumerate(_SHAPES)]
        return [*out, self._drawn(name, (BLOCK + 9,), dtype, 50)[1:], self._drawn(name, (6, 5), dtype, 51).t()]

    def step(self, dtype: str, attrs: Mapping[str, Any], fresh: bool) -> None:
        """A first step, or one of state that has seen others, of parameters and gradients in one dtype."""
        assert self.reference is not None
        params = self._params(dtype)
        optimizer = self._optimizer(params, attrs)
        states = [self._initial(p, attrs) if fresh else self._loaded(p, attrs, k) for k, p in enumerate(params)]
        if not fresh:
            packed = [
                {
                    **{n: torch.as_tensor(v) for n, v in s.items()},
                    **({COUNTER: torch.tensor(float(_SEEN))} if COUNTER in self.op.kinds else {}),
                }
                for s in states
            ]
            optimizer.load_state_dict(
                {"param_groups": optimizer.state_dict()["param_groups"], "state": dict(enumerate(packed))}
            )
        grads = [self._drawn(self.op.inputs[0].name, tuple(p.shape), dtype, 90 + k) for k, p in enumerate(params)]
        before = [p.clone() for p in params]
        for param, grad in zip(params, grads):
            param.grad = grad
        optimizer.step()
        saved = optimizer.state_dict()["state"]
        for k, (param, old, grad, state) in enumerate(zip(params, before, grads, states)):
            want = self._expected(old, grad, state, attrs, fresh)
            self._compare(param, saved[k], want, state)

    def _initial(self, param: torch.Tensor, attrs: Mapping[str, Any]) -> dict[str, Any]:
        op = self._instance(attrs)
        own = {t.name: torch.full_like(param, op.initial(t), dtype=self._state(param)) for t in self._own(op)}
        return {**own, **{t.name: op.initial(t) for t in op.hosted()}}

    def _loaded(self, param: torch.Tensor, attrs: Mapping[str, Any], k: int) -> dict[str, Any]:
        op = self._instance(attrs)
        dtype = "f64" if param.dtype == torch.float64 else "f32"
        own = {
            t.name: self._drawn(t.name, tuple(param.shape), dtype, 300 + 10 * k + j)
            for j, t in enumerate(self._own(op))
        }
        return {**own, **{t.name: self._drawn(t.name, (), "f32", 7).item() for t in op.hosted()}}

    def _own(self, op: StepOp) -> list[Tensor]:
        """The tensors that go with a parameter."""
        return [t for t in op.stored()[1:] if t.name != op.trained().name and op.there(t)]

    @staticmethod
    def _state(param: torch.Tensor) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else torch.float32

    def _expected(self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, Any], attrs: Mapping[str, Any],
                  fresh: bool) -> Mapping[str, Any]:  # fmt: skip
        """The new state in float64."""
        assert self.reference is not None
        given: dict[str, Any] = {t.name: None for t in self.op.stored()}
        given |= {self.op.inputs[0].name: grad, self.op.trained().name: param, **state}
        given = {n: v.detach().double() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        more = {COUNTER: 1 if fresh else _SEEN + 1, FRESH: int(fresh)}
        every = {
            **given,
            **self._instance(attrs).attrs,
            **state_numbers(state),
            **{n: v for n, v in more.items() if n in self.op.kinds},
        }
        return self.reference(**every)

    def _compare(
        self, param: torch.Tensor, saved: Mapping[str, Any], want: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        names = {v: k for k, v in TORCH.items()}
        for name, value in {self.op.trained().name: param, **{n: saved[n] for n in state}}.items():
            expected = torch.as_tensor(want[name], dtype=torch.float64).to(value.device).expand(value.shape)
            _close(value.detach(), expected, names[value.dtype])

    def skips(self, attrs: Mapping[str, Any]) -> None:
        """Nothing is written where an infinity was found, and the step is not counted."""
        params = self._params("f32")
        optimizer = self._optimizer(params, attrs)
        for k in range(2):
            for j, param in enumerate(params):
                param.grad = self._drawn("", tuple(param.shape), "f32", 10 * k + j)
            before = [p.clone() for p in params]
            optimizer.found_inf = torch.full((), float(k == 0), device=DEVICE)
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, params)) == (k == 0)
        counted = [s[COUNTER].item() for s in optimizer.state_dict()["state"].values() if COUNTER in s]
        assert not counted or set(counted) == {1.0}

    def parameters(self) -> None:
        """Each visit has the kernel's own name and its own value."""
        op = self._instance({})
        dtypes = {t.name: "f32" for t in op.stored() if op.there(t)}
        tables = [TensorView(1000 + 16 * k, "i64", (5 + k,), (1,)) for k in range(len(TABLES))]
        recorder, packed = Recorder(), PackedC()
        for visitor in (recorder, packed):
            op.pack_step_args(tables, dtypes, visitor)
        launch = op.step_launch(5, dtypes)
        own = [
            n for n in inspect.signature(launch.kernel.function.fn).parameters if n not in launch.kernel.abi.constexprs
        ]
        assert [name for _, name, _ in recorder.visits] == own
        for kind, name, value in recorder.visits:
            assert (kind, value) == ("ptr", tables[TABLES.index(name.removesuffix("_ptr"))].address), name
        assert len(packed.buffer) == 8 * len(own) and launch.grid == (5, 1, 1)
        assert set(launch.kernel.abi.constexprs) <= set(launch.values)


def state_numbers(state: Mapping[str, Any]) -> dict[str, float]:
    """What of a state the host keeps."""
    return {n: v for n, v in state.items() if isinstance(v, float)}
