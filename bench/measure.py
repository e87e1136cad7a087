"""Timing on the GPU with CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, fastest and slowest of `samples`."""

    median: float
    low: float
    high: float
    samples: int


def time_calls(calls: Sequence[Callable[[], object]], *, warmup: int, repeats: int) -> Timing:
    """Times single calls, taken from `calls` in turn so that none finds its own data in the L2 cache.

    Everything is enqueued before the first wait: the GPU never idles between two samples, and its clocks do not
    recover.
    """
    for i in range(warmup):
        calls[i % len(calls)]()
    return _samples([calls[i % len(calls)] for i in range(repeats)], 1)


def time_bursts(calls: Sequence[Callable[[], object]], *, launches: int, rest: float, repeats: int) -> Timing:
    """Times `launches` calls one behind another, taken from `calls` in turn, after a rest of `rest` seconds: a few find a cool
    GPU at full clocks, many run into its power limit. A sample is one burst's time over its calls."""
    for call in calls:
        call()

    def burst() -> None:
        for i in range(launches):
            calls[i % len(calls)]()

    timings = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        time.sleep(rest)
        timings.append(_samples([burst], launches).median)
    return Timing(statistics.median(timings), min(timings), max(timings), repeats)


def time_graph(calls: Sequence[Callable[[], object]], *, rounds: int, repeats: int) -> Timing:
    """Times calls of a few microseconds: a CUDA graph of `rounds` passes over `calls`, replayed `repeats` times. A sample is
    one replay's time over its calls, so the cost of a launch from the host is not in it.

    A call is captured on the stream that is current when it runs, so it must ask for that stream then.
    """
    for call in calls:  # what is loaded lazily may not load while capturing
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return _samples([graph.replay] * repeats, rounds * len(calls))


def _samples(work: Sequence[Callable[[], object]], calls: int) -> Timing:
    """Times each of `work`, which makes `calls` calls."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in work]
    for (start, end), run in zip(events, work, strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 / calls for start, end in events]
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def refuse_zeros(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where more than a hundredth of `tensor` is zero: zeros cost less power, and time flatters."""
    share = float((tensor == 0).float().mean())
    if share > 0.01:
        raise ValueError(f"{name} is {share:.0%} zeros: measure with random data")
