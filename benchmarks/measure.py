"""The run itself: which settings there are, in which order, and the cells of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import cases, peers
from benchmarks.cases import MAIN_MB, Entry, Operands

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """An entry with dtype, layout and size; `peers` are measured in it."""

    entry: Entry
    dtype: str
    layout: str
    mb: float
    peers: tuple[str, ...]

    def key(self) -> Row:
        return {"op": self.entry.name, "dtype": self.dtype, "layout": self.layout, "mb": self.mb}


@dataclass(frozen=True)
class Choice:
    """What of everything is measured. `everything`: each layout at each size, compiled torch in all of them."""

    layouts: tuple[str, ...] = cases.LAYOUTS
    sizes: tuple[float, ...] = (1, 16, 128, 512, 1024)
    dtypes: tuple[str, ...] = cases.DTYPES
    peers: tuple[str, ...] = cases.PEERS
    directions: tuple[str, ...] = cases.DIRECTIONS
    everything: bool = False

    @property
    def main(self) -> float:
        return MAIN_MB if MAIN_MB in self.sizes else max(self.sizes)


def settings(found: Sequence[Entry], choice: Choice) -> list[Setting]:
    """What matters most comes first: dense at the main size, the other layouts there, the other sizes."""
    rest = [mb for mb in choice.sizes if mb != choice.main]
    others = [layout for layout in choice.layouts if layout != "dense"]
    dense = [layout for layout in choice.layouts if layout == "dense"]
    phases = [(dense, [choice.main]), (others, [choice.main]), (dense, rest)]
    phases += [(others, rest)] if choice.everything else []
    out = []
    for layouts, sizes in phases:
        for entry in found:
            for dtype in entry.dtypes(choice.dtypes):
                for mb in sizes:
                    for layout in (n for n in layouts if n in entry.layouts):
                        compiled = choice.everything or (layout == "dense" and mb == choice.main)
                        names = tuple(p for p in choice.peers if compiled or p != "compiled")
                        if names:
                            out.append(Setting(entry, dtype, layout, mb, names))
    return out


class Lost(Exception):
    """The device answers no more: nothing that follows would mean anything."""


@dataclass
class Run:
    """Measures settings one after the other."""

    choice: Choice
    clock: Any
    bandwidth: float
    device: str = "cuda"
    extents: Callable[[float, str], tuple[int, int]] = cases.extents
    rows: list[Row] = field(default_factory=list)
    left_out: list[Row] = field(default_factory=list)
    _held: tuple[Any, Operands] | None = None

    def all(self, todo: Sequence[Setting], deadline: float, progress: Callable[[str], None]) -> None:
        """Every setting until the deadline (in `time.monotonic`); what is not reached is written down."""
        began, last = time.monotonic(), ""
        for k, setting in enumerate(todo):
            if time.monotonic() >= deadline:
                self.left_out += [s.key() for s in todo[k:]]
                break
            try:
                self.rows += self.setting(setting)
            except Lost as lost:
                self.rows.append({**setting.key(), "direction": "", "peer": "", "error": f"the device is lost: {lost}"})
                self.left_out += [s.key() for s in todo[k + 1 :]]
                break
            where = f"{setting.entry.name} {setting.layout if setting.layout == 'dense' else 'layouts'}"
            if where != last:
                progress(f"{time.monotonic() - began:6.0f} s  {k + 1:5d} of {len(todo)}  {where}, {setting.mb:g} MB")
                last = where
        self._held = None

    def setting(self, setting: Setting) -> list[Row]:
        """The rows of one setting; a fault is a row too."""
        try:
            sets = self._operands(setting).views(setting.layout)
            found = peers.outputs(setting.entry, sets[0])
            backward = self.choice.directions != ("forward",)
            bytes_moved = {d: cases.moved(setting.entry.instance, d, sets[0], found) for d in self.choice.directions}
            seeds = (
                peers.cotangents(found, len(sets))
                if backward and any(n for d, n in bytes_moved.items() if d != "forward")
                else []
            )
            del found
        except Exception as error:
            return [self._fault(setting, d, p, error) for p in setting.peers for d in self.choice.directions]
        out: list[Row] = []
        for peer in setting.peers:
            out += self._peer(setting, peer, sets, seeds, bytes_moved)
        return out

    def _operands(self, setting: Setting) -> Operands:
        """Drawn once for all layouts, which are views of the same memory."""
        key = (setting.entry.name, setting.dtype, setting.mb)
        if self._held is None or self._held[0] != key:
            self._held = None
            if self.device == "cuda" and torch.cuda.memory_reserved() > 48 * 2**30:
                torch.cuda.empty_cache()
            rows, cols = self.extents(setting.mb, setting.dtype)
            sets = Operands.sets_for(setting.entry, setting.dtype, rows, cols) if self.device == "cuda" else 2
            self._held = (key, Operands(setting.entry, setting.dtype, rows, cols, sets, self.device))
        return self._held[1]

    def _peer(self, setting: Setting, peer: str, sets: Any, seeds: Any, bytes_moved: dict[str, int]) -> Iterator[Row]:
        run = None
        for direction in self.choice.directions:
            if bytes_moved[direction] == 0:
                continue
            try:
                run = run or peers.function(setting.entry, peer)
                if run is None:
                    return
                if direction == "forward":
                    call = peers.forward(run, sets)
                else:
                    call = peers.backward(setting.entry, run, sets, seeds, rebuild=direction == "training")
                if call is None:
                    continue
                seconds = self.clock.device(call)
                host = self._host(setting, peer, direction, run, sets, seeds)
            except Exception as error:
                yield self._fault(setting, direction, peer, error)
                continue
            yield {
                **setting.key(),
                "direction": direction,
                "peer": peer,
                "ms": seconds * 1e3,
                "bytes": bytes_moved[direction],
                "bytes_per_second": bytes_moved[direction] / seconds,
                "share": bytes_moved[direction] / seconds / self.bandwidth,
                "host_us": None if host is None else host * 1e6,
            }

    def _host(self, setting: Setting, peer: str, direction: str, run: Any, sets: Any, seeds: Any) -> float | None:
        """Dense bf16 alone, at the main size's turn. Compiled torch keeps the tensors that it was compiled for: the host
        does not wait for them, and another shape would be another compilation."""
        dtypes = setting.entry.dtypes(("bf16",))
        if (
            direction == "backward"
            or (setting.dtype,) != dtypes
            or setting.layout != "dense"
            or setting.mb != self.choice.main
        ):
            return None
        if peer != "compiled":
            sets = Operands(setting.entry, setting.dtype, 64, 64, 1, self.device).views("dense")
            seeds = peers.cotangents(peers.outputs(setting.entry, sets[0]), 1)
        if direction == "forward":
            return float(self.clock.host(peers.forward(run, sets)))
        return float(self.clock.host(peers.backward(setting.entry, run, sets, seeds, rebuild=True)))

    def _fault(self, setting: Setting, direction: str, peer: str, error: Exception) -> Row:
        if self.device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as lost:
                raise Lost(f"{peer} {direction}: {lost}") from error
            torch.cuda.empty_cache()
        text = f"{type(error).__name__}: {error}".strip()
        unable = peer != "pullback" and "derivative for" in text and "is not implemented" in text
        return {**setting.key(), "direction": direction, "peer": peer, "error": text[:2000], "unable": unable}
