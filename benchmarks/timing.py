"""Clocks. Device time: launches are queued behind a sleeping kernel, so that the host does not count. Host time: a call's."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

_LAUNCHES = 400
"""Calls that are queued at most: the queue of a stream is finite, and a full one blocks the host."""
_QUEUE_SECONDS = 3e-3
"""Host time of a round at most: the device sleeps that long."""


def no_device() -> bool:
    """Whether there is nothing to time on; it says so."""
    found = torch.cuda.is_available()
    if not found:
        print("no GPU: nothing can be timed", file=sys.stderr)
    return not found


class DeviceClock:
    """Measures on the current CUDA device. `round_ms` is the device time that a round aims at."""

    def __init__(self, round_ms: float = 3.0, rounds: int = 5) -> None:
        self.round_seconds, self.rounds = round_ms / 1e3, rounds
        self.late = 0
        """Rounds in which the device caught up with the host although the sleep was made longer."""
        self._cycles = self._cycles_per_second()

    @staticmethod
    def _cycles_per_second() -> float:
        cycles = 10_000_000
        seconds = []
        for _ in range(4):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return cycles / min(seconds)

    def _round(self, call: Callable[[int], Any], repeats: int, sleep: float) -> tuple[Any, Any, float, bool]:
        """Events around the calls, the seconds that the host took, and whether it was ahead all the time."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if sleep:
            torch.cuda._sleep(int(sleep * self._cycles))
        start.record()
        before = time.perf_counter()
        for k in range(repeats):
            call(k)
        host = time.perf_counter() - before
        ahead = not start.query()
        end.record()
        return start, end, host, ahead

    def device(self, call: Callable[[int], Any]) -> float:
        """Median seconds of a call on the device."""
        for k in range(2):
            call(k)
        torch.cuda.synchronize()
        start, end, host, _ = self._round(call, 3, 2e-3)
        torch.cuda.synchronize()
        each, host = max(start.elapsed_time(end) / 3e3, 1e-6), host / 3
        repeats = max(2, min(int(self.round_seconds / each), int(_QUEUE_SECONDS / max(host, 1e-6)), _LAUNCHES))
        sleep = 1.5 * host * repeats + 2e-4
        busy = each > 1.2 * host  # then a round keeps the device busy while the next is queued: one sleep is enough
        queued = False
        done: list[tuple[Any, Any]] = []
        tries = 0
        while len(done) < self.rounds:
            start, end, _, ahead = self._round(call, repeats, 0.0 if busy and queued else sleep)
            queued = ahead
            if not ahead and tries < 4:
                tries += 1
                sleep *= 2
                busy = False
                torch.cuda.synchronize()
                continue
            self.late += not ahead
            done.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) / repeats / 1e3 for start, end in done)

    def host(self, call: Callable[[int], Any], repeats: int = 60) -> float:
        """Median seconds that a call keeps the host."""
        for k in range(5):
            call(k)
        torch.cuda.synchronize()
        times = []
        for k in range(repeats):
            before = time.perf_counter()
            call(k)
            times.append(time.perf_counter() - before)
            if k % 20 == 19:
                torch.cuda.synchronize()
        return statistics.median(times)


def copy_bandwidth(clock: Any, count: int = 512 * 2**20, device: str = "cuda") -> float:
    """Bytes a second of a large device-to-device copy, read and written."""
    sources = [torch.randn(count, device=device) for _ in range(2)]
    target = torch.empty_like(sources[0])
    return float(8 * count / clock.device(lambda k: target.copy_(sources[k % 2])))
