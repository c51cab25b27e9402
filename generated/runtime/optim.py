"""Optimizers: torch parameters, stepped by one launch a combination of dtypes and choices. Imports torch.

An `Optimizer` is a torch.optim.Optimizer: learning rate schedulers, `torch.amp.GradScaler` and hooks take it, its state dict is
in the format of torch's own. `step` is `prepare`, what the host does, and `launch`, what the device does; a CUDA graph that holds
`clip_grad_norm` and `launch` is replayed after `prepare`, with any hyper-parameters. Whoever captures it keeps `held`, and compares
`arrangement` after each `prepare`: where it is another, the graph is not to be replayed.

    optimizer = Optimizer(Momentum, model.parameters(), lr=3e-4, ...)
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
"""

from __future__ import annotations

import copy as copying
import difflib
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from . import state_dicts
from .device import interpreted, torch_library
from .plan import Launch, Tensor
from .prepared import rounded_after, run
from .stepwise import COUNTER, FRESH, VECTOR, Place, StepOp, norm_launches, tiles

Params: TypeAlias = "Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]"
"""What torch's own optimizers take."""

_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}
_DTYPES = {v: k for k, v in _NAMES.items()}

_NOTES = frozenset(
    ("params", "param_names", "name")
    + ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")  # of torch's schedulers
    + ("foreach", "fused", "capturable", "differentiable")  # how torch's own optimizers launch
)
"""What a group may have beside its hyper-parameters; no step reads it."""


@dataclass
class _Own:
    """What goes with one parameter beside its state in memory."""

    step: int = 0
    fresh: bool = True
    """Whether the state has seen no update."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The state that the host keeps."""
    grad: torch.Tensor | None = None
    """Given by `bind`, in place of `.grad`."""
    copy: torch.Tensor | None = None
    chosen: Any = None
    """The choices for which the state was made, and what follows is known."""
    there: tuple[str, ...] = ()
    """State in memory by the order of the table, an empty name for what is not there."""
    dtypes: tuple[tuple[str, str], ...] = ()
    """Of everything but the gradient."""

    def saved(self) -> tuple[int, bool, dict[str, float]]:
        return self.step, self.fresh, self.numbers


@dataclass
class _Batch:
    """The tensors of one launch, and its tables on the device, which stay where they are as long as it is of these tensors."""

    params: list[torch.Tensor]
    first: list[int]
    launch: Launch
    dtypes: dict[str, str]
    work: torch.Tensor
    table: torch.Tensor
    numbers: torch.Tensor
    """With room for numbers of each tensor's own."""
    rows: list[list[int]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Where the numbers of each tensor begin."""
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    """By tensor, where a launch first copies a gradient that lies otherwise in memory than its parameter."""

    def baked(self) -> tuple[Hashable, ...]:
        """What of it stands in a graph."""
        return len(self.work), *(t.data_ptr() for t in (self.work, self.table, self.numbers))


@dataclass
class _Clip:
    """What finding the norm of all gradients writes."""

    limit: torch.Tensor
    parts: torch.Tensor
    factor: torch.Tensor
    norm: torch.Tensor
    """Of the last call: it is the caller's."""

    def fits(self, count: int, dtype: torch.dtype, device: torch.device) -> bool:
        return self.parts.numel() == count and self.factor.dtype == dtype and self.parts.device == device


@dataclass
class _Kind:
    """What the parameters of a group have in common whose state has seen as many updates."""

    op: StepOp
    chosen: Any
    advanced: dict[str, float]


@dataclass
class _Member:
    """A parameter that has a gradient, and what its next step is computed with."""

    param: torch.Tensor
    grad: torch.Tensor
    own: _Own
    kind: _Kind
    slot: tuple[Any, ...]

    def dtypes(self, grad: str) -> dict[str, str]:
        """By name, that of the gradient under its own."""
        return {grad: _NAMES[self.grad.dtype], **dict(self.own.dtypes)}


class Optimizer(torch.optim.Optimizer):
    """Steps parameters by a `StepOp`.

    Args:
        op: the class of the step.
        params: tensors, (name, tensor) pairs, or groups: dicts with `params` and hyper-parameters of their own. Float tensors that
            are dense in some order of their dims, on one kind of device.
        hyper: the hyper-parameters by their public names. All are read anew at each step, and none compiles anything but flags and
            choices.

    State is kept in float32, in float64 beside float64 parameters, and loaded so, whatever the dtype of the parameter is.
    `grad_scale` and `found_inf` are what torch.amp.GradScaler sets: gradients are divided by the first, and nothing is written where the
    second is not 0.

    Raises:
        TypeError, ValueError: naming op and argument.
    """

    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    def __init__(self, op: type[StepOp], params: Params, **hyper: Any) -> None:
        self._begin(op)
        self._require_known(hyper)
        for name in self._public:
            if name not in hyper:
                raise TypeError(f"{op.name}: `{name}` is missing")
        super().__init__(params, dict(hyper))

    def _begin(self, op: type[StepOp]) -> None:
        """What an optimizer has before it has parameters."""
        self.op = op
        self._public = {op.named.get(n, n): n for n in op.hyper()}
        self._trained = op.trained().name
        self._own: dict[torch.Tensor, _Own] = {}
        self._batches: dict[Any, _Batch] = {}
        self._prepared = False
        """Whether the tables are those of the parameters, state and bound gradients that there are."""
        self._factor: tuple[torch.Tensor, bool] | None = None
        """What the next launch multiplies gradients by, and whether it was found in a graph that is captured."""
        self._clip: _Clip | None = None
        self._undo: list[tuple[_Own, tuple[int, bool, dict[str, float]]]] = []
        self._flag: tuple[torch.Tensor, Any] | None = None
        """Of the last step, with the event after which the host may read it."""
        self._replayed: torch.Tensor | None = None
        """The flag that replays of a captured launch write."""
        self._host: torch.Tensor | None = None
        """Pinned memory for what is found of a step."""

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and pickle take. As with torch's optimizers hooks stay behind; tables are made anew."""
        self._settle()
        own = {p: replace(o, chosen=None, there=(), dtypes=()) for p, o in self._own.items()}
        factor = None if self._factor is None or self._factor[1] else self._factor
        return {**super().__getstate__(), "op": self.op, "_own": own, "_factor": factor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["op"])
        super().__setstate__(state)

    # -------------------------------------------------------------------------------- parameters and groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with hyper-parameters of their own; both are checked here.

        Raises:
            TypeError: a name that is no hyper-parameter, nor what torch's schedulers and optimizers write in groups.
        """
        if isinstance(param_group, dict):
            self._require_known(n for n in param_group if n not in _NOTES)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._instance(group, _Own()).require()
            for param in group["params"]:
                self._check(param)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for param in group["params"]:
            self._own[param] = _Own()
        self._prepared = False

    def _require_known(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._public:
                near = difflib.get_close_matches(str(name), self._public, n=1)
                meant = f" (did you mean `{near[0]}`?)" if near else ""
                raise TypeError(
                    f"{self.op.name} has no hyper-parameter `{name}`{meant}; it has {', '.join(self._public)}"
                )

    def _check(self, param: torch.Tensor) -> None:
        name = f"{self.op.name}: a parameter of shape {tuple(param.shape)}"
        if param.dtype not in _NAMES or _NAMES[param.dtype] not in self.op.trained().dtypes:
            raise TypeError(f"{name} is {param.dtype}; it takes floats of 16 to 64 bits")
        if param.device.type == "cpu" and not interpreted():
            raise ValueError(
                f"{name} is on the CPU; move it to a GPU, or run in Triton's interpreter: TRITON_INTERPRET=1 python ..."
            )
        if param.device.type == "cuda" and interpreted():
            raise ValueError(
                f"{name} is on a GPU; TRITON_INTERPRET=1 runs kernels on the CPU, over addresses of its memory"
            )
        if param.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on {param.device}; kernels run on CUDA and ROCm devices")
        if param.layout != torch.strided or not _is_dense(param):
            raise ValueError(f"{name} is not dense in memory; steps take whole tensors")

    def bind(self, param: torch.Tensor, grad: torch.Tensor | None = None, copy: torch.Tensor | None = None) -> None:
        """Gives a parameter a gradient of any float dtype in place of `.grad`, and a copy that each step writes beside it.

        Args:
            param: one of this optimizer's.
            grad: read at each step from now on; None for `.grad` again.
            copy: of the parameter's shape and strides, in the dtype that a model computes with.
        """
        own = self._own.get(param)
        if own is None:
            raise ValueError(f"{self.op.name}: this tensor of shape {tuple(param.shape)} is none of its parameters")
        for name, tensor in (("grad", grad), ("copy", copy)):
            if tensor is not None and (tensor.shape != param.shape or tensor.device != param.device):
                raise ValueError(
                    f"{self.op.name}: `{name}` is {tuple(tensor.shape)} on {tensor.device}, its parameter {tuple(param.shape)} on {param.device}"
                )
            if tensor is not None and tensor.dtype not in _NAMES:
                raise TypeError(f"{self.op.name}: `{name}` is {tensor.dtype}; it takes a float tensor")
        if copy is not None and not _alike(copy, param):
            raise ValueError(f"{self.op.name}: `copy` has the strides {copy.stride()}, its parameter {param.stride()}")
        own.grad, own.copy, own.chosen = grad, copy, None
        self._prepared = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, and a factor of `clip_grad_norm` that no step has used. Those that were given by `bind` are filled
        with zeros, and stay in `.grad` where they are."""
        bound = [(p, own.grad) for p, own in self._own.items() if own.grad is not None]
        attached = [(p, grad) for p, grad in bound if p.grad is grad]
        super().zero_grad(set_to_none)
        for param, grad in attached:
            param.grad = grad
        if bound:
            torch._foreach_zero_([grad for _, grad in bound])
        self._factor = None

    def _grad(self, param: torch.Tensor) -> torch.Tensor | None:
        bound = self._own[param].grad
        return param.grad if bound is None else bound

    def _instance(self, group: Mapping[str, Any], own: _Own) -> StepOp:
        """The op with the hyper-parameters of a group and the numbers of a parameter's next step."""
        attrs = {name: _number(group[public]) for public, name in self._public.items()}
        more: dict[str, Any] = {COUNTER: own.step + 1, FRESH: int(own.fresh)}
        attrs |= {n: v for n, v in more.items() if n in self.op.kinds}
        op = self.op(**attrs, **{t.name: own.numbers.get(t.name, 0.0) for t in self.op.hosted()})
        if not own.numbers:
            op.attrs |= {t.name: op.initial(t) for t in self.op.hosted()}
        return op

    # -------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. `closure` is called before, with gradients on; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare()
        self.launch()
        return loss

    @torch.no_grad()
    def prepare(self) -> None:
        """What the host does of a step: counts it, and brings addresses and numbers to the device by small asynchronous copies. The
        gradients need not be computed yet, but must be where they will be.

        Raises:
            RuntimeError: a graph is captured: what the host does, no replay does again.
        """
        if _capturing():
            raise RuntimeError(f"{self.op.name}: `prepare` and `step` cannot be captured; capture `launch`")
        self._settle()
        self._flag = None if self._replayed is None else (self._replayed, None)
        for member in self._arrange():
            own = member.own
            self._undo.append((own, own.saved()))
            own.step, own.fresh, own.numbers = own.step + 1, False, {**own.numbers, **member.kind.advanced}
        self._prepared = True

    @torch.no_grad()
    def launch(self) -> None:
        """What the device does of a step, as it was prepared: one launch a combination of dtypes, choices and device.

        Raises:
            RuntimeError: nothing was prepared, or not what there is now; or `clip_grad_norm` stands outside of the graph that this
                is captured in.
        """
        capturing = _capturing()
        self._require_prepared("launch", capturing)
        scale, found_inf = self._taken(capturing), self._scaler("found_inf")
        if scale is None and (own := self._scaler("grad_scale")) is not None:
            scale = own.to(torch.float32).reciprocal()
        self._copy_gradients()
        for batch in self._batches.values():
            tensors = {"work": batch.work, "table": batch.table, "numbers": batch.numbers}
            tensors |= {
                n: v.to(batch.work.device) for n, v in (("scale", scale), ("found_inf", found_inf)) if v is not None
            }
            if batch.work.device.type == "cpu" and "f64" in batch.dtypes.values():
                self._interpret(batch, tensors)
            else:
                _run([batch.launch], tensors, batch.work.device)
            torch.autograd.graph.increment_version(batch.params)
        flag = None if found_inf is None else self._fetched(found_inf, capturing)
        if capturing:
            self._replayed = None if flag is None else flag[0]
        else:
            self._flag = flag

    def _interpret(self, batch: _Batch, tensors: Mapping[str, torch.Tensor]) -> None:
        """A launch in the interpreter that computes in float64: its table has the addresses of what `rounded_after` gives."""
        names = [n for n in batch.dtypes if n != self.op.inputs[0].name]
        stored = {(p, n): self._stored(p, n) for p in batch.params for n in names if p.numel()}
        with rounded_after(stored) as wide:
            moved = {stored[k].data_ptr(): t.data_ptr() for k, t in wide.items()}
            begin = -1 - len(self.op.stored())  # of the addresses in a row
            rows = [[*r[:begin], *(moved.get(a, a) for a in r[begin:])] for r in batch.rows]
            dtypes = {n: "f32" if d == "bf16" and n in names else d for n, d in batch.dtypes.items()}
            launch = replace(batch.launch, values={**batch.launch.values, "DTYPES": self.op.codes(dtypes)})
            table = torch.tensor(rows, dtype=torch.int64)
            _run([launch], {**tensors, "table": table}, batch.work.device)

    def _stored(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """What a step of a parameter writes, by its name."""
        if name == "copy":
            found = self._own[param].copy
            assert found is not None
            return found
        return param if name == self._trained else self.state[param][name]

    def _require_prepared(self, what: str, capturing: bool) -> None:
        ready = self._prepared and all(b.values for b in self._batches.values())
        if not ready or (capturing and not self._batches):
            raise RuntimeError(
                f"{self.op.name}: `{what}`: no step of these parameters, state and gradients is prepared; call `step` or `prepare` before"
            )

    def _taken(self, capturing: bool) -> torch.Tensor | None:
        """The factor, which is of one launch."""
        if self._factor is None:
            return None
        factor, captured = self._factor
        if captured != capturing:
            raise RuntimeError(
                f"{self.op.name}: `clip_grad_norm` and `launch` are captured in one graph or in none; `zero_grad` drops the factor"
            )
        self._factor = None
        return factor

    def _copy_gradients(self) -> None:
        """Those that lie otherwise in memory than their parameters, as they are now, to where the table has them."""
        for batch in self._batches.values():
            for k, copy in batch.copies.items():
                grad = self._grad(batch.params[k])
                if grad is not None:
                    copy.copy_(grad)

    def _scaler(self, name: str) -> torch.Tensor | None:
        """What a GradScaler has set: it sets both before a step and deletes them after it."""
        value = getattr(self, name, None)
        return value if isinstance(value, torch.Tensor) else None

    def _fetched(self, flag: torch.Tensor, capturing: bool) -> tuple[torch.Tensor, Any]:
        """The flag on its way to the host, and the event after it; none while a graph is captured."""
        if flag.device.type != "cuda":
            return flag.clone(), None
        if self._host is None:
            self._host = torch.empty((), pin_memory=True)
        self._host.copy_(flag.reshape(()), non_blocking=True)
        if capturing:
            return self._host, None
        return self._host, torch.cuda.current_stream(flag.device).record_event()

    def _settle(self) -> None:
        """Takes back what was counted of a step that was not taken. It waits for that step alone: what followed is queued."""
        undo, self._undo = self._undo, []
        if self._flag is None or not undo:
            return
        flag, event = self._flag
        if event is not None:
            event.synchronize()
            self._flag = None
        elif self._host is not None:
            torch.cuda.synchronize()
        if flag.item() != 0:
            for own, (step, fresh, numbers) in undo:
                own.step, own.fresh, own.numbers = step, fresh, numbers

    def _arrange(self, numbers: bool = True) -> list[_Member]:
        """Brings the tables up to date with the gradients that there are; that of numbers too, unless a step was prepared already."""
        members: dict[Any, list[_Member]] = {}
        for place, group in enumerate(self.param_groups):
            kinds: dict[Any, _Kind] = {}
            for param in group["params"]:
                own = self._own[param]
                grad = self._grad(param)
                if grad is None:
                    continue
                slot = (place, own.step, own.fresh, *own.numbers.values())
                kind = kinds.get(slot)
                if kind is None:
                    kind = kinds[slot] = self._kind(group, own)
                if own.chosen != kind.chosen:
                    self._make_state(param, own, kind)
                if grad.dtype not in _NAMES or grad.layout != torch.strided:
                    name = self.op.inputs[0].name
                    raise TypeError(
                        f"{self.op.name}: `{name}` is {grad.layout} {grad.dtype}; it takes dense float tensors"
                    )
                key = (kind.chosen, grad.dtype, own.dtypes, param.device)
                members.setdefault(key, []).append(_Member(param, grad, own, kind, slot))
        old = self._batches
        self._batches = {key: self._batch(old.get(key), found, numbers) for key, found in members.items()}
        return [m for found in members.values() for m in found]

    def _kind(self, group: Mapping[str, Any], own: _Own) -> _Kind:
        op = self._instance(group, own)
        op.require()
        return _Kind(op, tuple(op.choices().items()), op.advanced())

    def _make_state(self, param: torch.Tensor, own: _Own, kind: _Kind) -> None:
        """Makes what is not there yet, and writes down what there is under these choices."""
        op, state, trained = kind.op, self.state[param], self._trained
        own.there = tuple(t.name if op.there(t) else "" for t in op.stored()[1:])
        for tensor in op.stored()[1:]:
            if tensor.name in own.there and tensor.name not in (trained, *state):
                state[tensor.name] = torch.full_like(
                    param, op.initial(tensor), dtype=_state_dtype(tensor, param), requires_grad=False
                )
        tensors = {n: param if n == trained else state[n] for n in own.there if n}
        tensors |= {} if own.copy is None else {"copy": own.copy}
        own.dtypes = tuple((n, _NAMES[t.dtype]) for n, t in tensors.items())
        own.numbers = own.numbers or {t.name: op.initial(t) for t in op.hosted()}
        own.chosen = kind.chosen

    def _batch(self, old: _Batch | None, members: Sequence[_Member], numbers: bool) -> _Batch:
        """The batch of these members: the old one where it is of the same tensors, for a graph may read its tables."""
        params = [m.param for m in members]
        if old is None or len(old.params) != len(params) or any(a is not b for a, b in zip(old.params, params)):
            old = self._new_batch(params, members[0])
        if numbers or not old.places:
            slots = {m.slot: m.kind.op for m in members}
            order = {slot: k * len(self.op.slots) for k, slot in enumerate(slots)}
            old.places = [order[m.slot] for m in members]
            values = [op.slot() for op in slots.values()]
            if numbers and values != old.values:
                old.values = values
                _send(values, old.numbers)
        kept, old.copies = old.copies, {}
        for k, m in enumerate(members):
            if not _alike(m.grad, m.param):
                same = kept.get(k)
                old.copies[k] = torch.empty_like(m.param, dtype=m.grad.dtype) if same is None else same
        rows = [self._row(m, old, k) for k, m in enumerate(members)]
        if rows != old.rows:
            old.rows = rows
            _send(rows, old.table)
        return old

    def _new_batch(self, params: list[torch.Tensor], member: _Member) -> _Batch:
        device = member.param.device
        first, work = tiles(p.numel() for p in params)
        dtypes = member.dtypes(self.op.inputs[0].name)
        words = len(self.op.row(Place(0, 0, True, 0), [0] * (1 + len(self.op.stored()))))
        table = torch.empty((len(params), words), dtype=torch.int64, device=device)
        numbers = torch.empty((len(params), len(self.op.slots)), dtype=torch.float64, device=device)
        tiled = torch.empty(len(work), dtype=torch.int32, device=device)
        _send(work, tiled)
        return _Batch(params, first, member.kind.op.step_launch(len(work), dtypes), dtypes, tiled, table, numbers)

    def _row(self, member: _Member, batch: _Batch, k: int) -> list[int]:
        param, own = member.param, member.own
        state, trained = self.state[param], self._trained
        addresses = [0 if own.copy is None else own.copy.data_ptr(), batch.copies.get(k, member.grad).data_ptr()]
        addresses += [(param if n == trained else state[n]).data_ptr() if n else 0 for n in own.there]
        aligned = all(a % VECTOR == 0 for a in addresses)
        return self.op.row(Place(param.numel(), batch.first[k], aligned, batch.places[k]), addresses)

    # -------------------------------------------------------------------------------- what a graph has of it

    @property
    def arrangement(self) -> Hashable:
        """What a captured launch has in it: kernels, grids, and the addresses that no table has. A graph is replayed after `prepare`
        if this is what it was when the graph was captured.

        It is another after a step of other parameters (of an added group, or some without a gradient), of other dtypes, flags or
        choices, or with other tensors of a GradScaler. Hyper-parameters, loaded state and gradients elsewhere leave it what it is:
        they stand in the tables.
        """
        scaler = tuple(None if t is None else t.data_ptr() for t in map(self._scaler, ("grad_scale", "found_inf")))
        return scaler, tuple((key, *b.baked(), *self._copied(b)) for key, b in self._batches.items())

    def _copied(self, batch: _Batch) -> list[Hashable]:
        """From where to where a launch copies gradients."""
        pairs = [(k, self._grad(batch.params[k]), copy) for k, copy in batch.copies.items()]
        return [(k, copy.data_ptr(), None if g is None else (g.data_ptr(), g.stride())) for k, g, copy in pairs]

    def held(self) -> tuple[torch.Tensor, ...]:
        """Every tensor that a launch and `clip_grad_norm` read or write as they are now: a captured graph reads them for as long as
        it is replayed, so whoever captures keeps them."""
        found: list[torch.Tensor | None] = [self._scaler("grad_scale"), self._scaler("found_inf"), self._host]
        if self._clip is not None:
            found += [self._clip.limit, self._clip.parts, self._clip.factor, self._clip.norm]
        for batch in self._batches.values():
            found += [batch.work, batch.table, batch.numbers, *batch.copies.values()]
            for param in batch.params:
                own = self._own[param]
                state = [v for v in self.state[param].values() if isinstance(v, torch.Tensor)]
                found += [param, self._grad(param), own.copy, *state]
        return tuple(t for t in found if t is not None)

    # -------------------------------------------------------------------------------- the norm of the gradients

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """The 2-norm of all gradients together; the next step multiplies them by what makes it `max_norm` at most.

        The gradients stay as they are, and nothing waits for the device. The sums are the same bits every time. With `grad_scale` the
        norm is that of the gradients without it. It can be captured with the launch that follows: replays read the gradients that the
        last `prepare` found. A clipped step before, with any limit, compiles its kernels.

        Returns:
            The norm, of no dims, in float32, or in float64 where all gradients are. A captured one is written by each replay.

        Raises:
            ValueError: a negative limit, or gradients on several devices.
            RuntimeError: it is captured, and no step was prepared before.
        """
        if not max_norm >= 0:
            raise ValueError(f"{self.op.name}: `max_norm` is {max_norm}; it is not negative")
        capturing = _capturing()
        if capturing:  # the host's copies to the tables are not for a graph
            self._require_prepared("clip_grad_norm", capturing)
        else:
            self._arrange(numbers=False)
        batches = list(self._batches.values())
        if len({b.work.device for b in batches}) > 1:
            raise ValueError(f"{self.op.name}: the gradients are on several devices")
        if not batches:
            return torch.zeros(())
        self._copy_gradients()
        clip = self._clip = self._scratch(batches)
        clip.limit.fill_(max_norm)
        tensors = {"limit": clip.limit, "norm": clip.norm, "factor": clip.factor}
        scale, device = self._scaler("grad_scale"), clip.limit.device
        tensors |= {} if scale is None else {"unscale": scale.to(device)}
        tensors |= {"part0": clip.parts}
        counts = [b.work.numel() for b in batches]
        for k, (batch, begin) in enumerate(zip(batches, itertools.accumulate([0, *counts]))):
            tensors |= {f"work{k}": batch.work, f"table{k}": batch.table, f"part{k}": clip.parts[begin:]}
        _run(norm_launches(self.op, counts, [b.dtypes for b in batches]), tensors, device)
        self._factor = clip.factor, capturing
        return clip.norm

    def _scratch(self, batches: Sequence[_Batch]) -> _Clip:
        """The tensors of the last call where they fit, but for the norm: the last one is the caller's."""
        device, count = batches[0].work.device, sum(b.work.numel() for b in batches)
        double = all(b.dtypes[self.op.inputs[0].name] == "f64" for b in batches)
        dtype = torch.float64 if double else torch.float32
        norm = torch.empty((), dtype=dtype, device=device)
        if self._clip is not None and self._clip.fits(count, dtype, device):
            return replace(self._clip, norm=norm)
        limit = torch.empty((), dtype=torch.float64, device=device)
        parts = torch.empty(count, dtype=torch.float64, device=device)
        return _Clip(limit, parts, torch.empty_like(norm), norm)

    # -------------------------------------------------------------------------------- state dicts

    def state_dict(self) -> dict[str, Any]:
        """Groups and state in the format of torch's own optimizers, which load it. Hooks are called as torch calls them."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._settle()
        places: dict[torch.Tensor, int] = {}
        for k, param in enumerate(p for g in self.param_groups for p in g["params"]):
            places.setdefault(param, k)
        groups = [{**g, "params": [places[p] for p in g["params"]]} for g in self.param_groups]
        state = {places[p]: self._packed(p, own) for p, own in self.state.items() if not self._own[p].fresh}
        out: dict[str, Any] = {"state": state, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, out)
            out = out if changed is None else changed
        return out

    def _packed(self, param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        own = self._own[param]
        counted = {COUNTER: torch.tensor(float(own.step))} if COUNTER in self.op.kinds else {}
        return {**counted, **state, **{n: torch.tensor(v, dtype=torch.float64) for n, v in own.numbers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes groups and state from a state dict of this optimizer or of torch's own of the same kind. Hooks are called as torch
        calls them.

        Raises:
            ValueError: naming all that is missing, of another kind or shape, or beyond what the op requires; nothing is changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"{self.op.name}: the state dict is {state_dicts.described(state_dict)}; it takes a dict")
        state_dict = dict(state_dict)  # hooks may change it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        faults = list[str]()
        groups, saved = state_dicts.outline(state_dict, [len(g["params"]) for g in self.param_groups], faults)
        own, state = self._read(groups, saved, faults)
        if faults:
            raise ValueError(f"{self.op.name}: the state dict does not fit: {'; '.join(faults)}")
        self._undo, self._flag, self._factor, self._prepared = [], None, None, False
        for group, mine in zip(groups, self.param_groups):
            mine.update(copying.deepcopy({n: v for n, v in group.items() if n not in ("params", "param_names")}))
        self._own = own
        self.state.clear()
        self.state.update(state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def _read(
        self, groups: Sequence[Mapping[str, Any]], saved: Mapping[Any, Any], faults: list[str]
    ) -> tuple[dict[torch.Tensor, _Own], dict[torch.Tensor, dict[str, torch.Tensor]]]:
        """What goes with each parameter after loading, and its state in memory."""
        own, state = dict[torch.Tensor, _Own](), dict[torch.Tensor, dict[str, torch.Tensor]]()
        keys: dict[Any, torch.Tensor] = {}
        for k, (group, mine) in enumerate(zip(groups, self.param_groups)):
            hyper = self._read_hyper(f"group {k}", group, mine, faults)
            for key, param in zip(group["params"], mine["params"]):
                name, bound, found = f"parameter {key}", self._own[param], saved.get(key, {})
                own[param] = _Own(grad=bound.grad, copy=bound.copy)
                if keys.setdefault(key, param) is not param:
                    faults.append(f"{name} is named twice")
                elif not isinstance(found, Mapping):
                    faults.append(f"the state of {name} is {state_dicts.described(found)}; it takes a dict")
                elif found:
                    self._unpack(hyper, name, param, found, own[param], state, faults)
        return own, state

    def _read_hyper(
        self, name: str, group: Mapping[str, Any], mine: Mapping[str, Any], faults: list[str]
    ) -> dict[str, Any]:
        """The hyper-parameters of a group, ours in place of what is missing or wrong, so that all else can be read."""
        missing = [f"`{n}`" for n in self._public if n not in group]
        faults += [f"{name} lacks {', '.join(missing)}"] if missing else []
        values = {n: group.get(n, mine[n]) for n in self._public}
        while (fault := self._fault(values)) is not None:
            faults.append(f"{name}: {fault}")
            changes = (n for n in values if values[n] is not mine[n] and self._fault({**values, n: mine[n]}) != fault)
            wrong = next(changes, None)
            if wrong is None:
                return {n: mine[n] for n in values}
            values[wrong] = mine[wrong]
        return values

    def _fault(self, hyper: Mapping[str, Any]) -> str | None:
        """What the op says against hyper-parameters, without its name."""
        try:
            self._instance(hyper, _Own()).require()
        except (TypeError, ValueError, RuntimeError) as error:  # the last of a tensor that has no value
            return str(error).removeprefix(self.op.name).removeprefix(":").strip()
        return None

    def _unpack(self, hyper: Mapping[str, Any], name: str, param: torch.Tensor, saved: Mapping[str, Any], own: _Own,
                state: dict[torch.Tensor, dict[str, torch.Tensor]], faults: list[str]) -> None:  # fmt: skip
        """The state of one parameter, in our dtypes and on its device."""
        op = self._instance(hyper, own)
        wanted = [t for t in op.stored()[1:] if t.name != self._trained and op.there(t)]
        counted = [COUNTER] if COUNTER in op.kinds else []
        named = [*(t.name for t in (*wanted, *op.hosted())), *counted]
        given = {n: saved[n] for n in named if saved.get(n) is not None}
        if not given and not op.hosted() and not counted:
            return  # torch makes such state at the first step
        faults += [f"{name} lacks `{n}`" for n in named if n not in given]
        label = {n: f"`{n}` of {name}" for n in given}
        new = state.setdefault(param, {})
        for tensor in (t for t in wanted if t.name in given):
            value = given[tensor.name]
            if state_dicts.fits(value, param, label[tensor.name], faults):
                empty = torch.empty_like(param, dtype=_state_dtype(tensor, param), requires_grad=False)
                new[tensor.name] = empty.copy_(value)
        hosted = [t.name for t in op.hosted() if t.name in given]
        own.numbers = {n: state_dicts.number(given[n], label[n], faults) for n in hosted}
        for n in (n for n in counted if n in given):
            own.step = state_dicts.whole(given[n], label[n], faults)
        own.fresh = False


# ---------------------------------------------------------------------------------------------- tensors


def _number(value: Any) -> Any:
    """A hyper-parameter as Python has it: a learning rate may be a tensor."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return tuple(_number(v) for v in value) if isinstance(value, (tuple, list)) else value


def _state_dtype(tensor: Tensor, param: torch.Tensor) -> torch.dtype:
    if tensor.dtype == "compute":
        return torch.float64 if param.dtype == torch.float64 else torch.float32
    return _DTYPES.get(tensor.dtype, param.dtype)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, in any order of the dims."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != step:
            return tensor.numel() == 0
        step *= size
    return True


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order of memory, without gaps."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return all(s == t for s, t, n in zip(a.stride(), b.stride(), a.shape) if n != 1) and _is_dense(a)


def _send(values: Any, to: torch.Tensor) -> None:
    """Writes numbers to the beginning of a table.

    The copy is asynchronous; its source is pinned memory, which torch keeps until it is done.
    """
    source = torch.tensor(values, dtype=to.dtype, pin_memory=to.device.type == "cuda").flatten()
    to.view(-1)[: source.numel()].copy_(source, non_blocking=True)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _run(launches: Sequence[Launch], tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    launches = [x for x in launches if x.grid[0]]
    limits = torch_library().limits(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            run(launches, tensors, limits)
    else:
        run(launches, tensors, limits)
