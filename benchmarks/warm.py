"""Fills the caches of compiled kernels in parallel, so that a run measures and does not compile."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from benchmarks import cases, peers

Task = tuple[str, str, tuple[tuple[str, float, tuple[str, ...]], ...], tuple[str, ...]]
"""Entry and dtype; layout, size and peers of each setting; directions."""
_TINY = ("dense", 0.0, ("pullback",))


def fill(task: Task) -> str:
    """Runs one entry in one dtype once in every setting: what is compiled stays on disk. Returns what went wrong."""
    torch.set_num_threads(1)
    peers.configure()
    name, dtype, settings, directions = task
    entry = _entries()[name]
    faults = []
    for layout, mb, chosen in (_TINY, *settings):
        rows, cols = cases.extents(mb, dtype) if mb else (64, 64)
        try:
            sets = cases.Operands(entry, dtype, rows, cols, 1, "cuda").views(layout)
            for peer in chosen:
                _once(entry, peer, sets, directions)
            torch.cuda.synchronize()
        except Exception as error:
            faults.append(f"{name} {dtype} {layout} {mb:g} MB: {type(error).__name__}: {error}")
    torch.cuda.empty_cache()
    return "\n".join(faults)


def _once(entry: cases.Entry, peer: str, sets: Sequence[Mapping[str, torch.Tensor]], directions: Sequence[str]) -> None:
    run = peers.function(entry, peer)
    if run is None:
        return
    if "forward" in directions:
        peers.forward(run, sets)(0)
    found = peers.outputs(entry, sets[0])
    if directions != ("forward",) and cases.moved(entry.instance, "backward", sets[0], found):
        call = peers.backward(entry, run, sets, peers.cotangents(found, 1))
        if call is not None:
            call(0)


@functools.cache
def _entries() -> dict[str, cases.Entry]:
    return {e.name: e for e in cases.entries()}


def warm(tasks: Sequence[Any], workers: int, seconds: float, work: Callable[[Any], str] = fill) -> list[str]:
    """All tasks over so many processes, for so many seconds at most. Returns the faults; measuring meets them again."""
    began = time.monotonic()
    faults: list[str] = []
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(work, task) for task in tasks]
    try:
        for future in concurrent.futures.as_completed(futures, timeout=seconds):
            if text := future.result():
                faults.append(text)
    except TimeoutError:
        done = sum(f.done() for f in futures)
        faults.append(f"warming stopped after {seconds:.0f} s: {done} of {len(tasks)} tasks done")
    except BrokenProcessPool as error:
        faults.append(f"warming stopped: a process ended early: {error}")
    pool.shutdown(wait=True, cancel_futures=True)
    print(f"warm: {len(tasks)} tasks, {workers} processes, {time.monotonic() - began:.0f} s", flush=True)
    return faults
