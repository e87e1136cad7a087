"""Timing on the GPU with CUDA events."""

from __future__ import annotations

import statistics
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
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for i, (start, end) in enumerate(events):
        start.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for start, end in events]
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def refuse_zeros(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where more than a hundredth of `tensor` is zero: zeros cost less power, and time flatters."""
    share = float((tensor == 0).float().mean())
    if share > 0.01:
        raise ValueError(f"{name} is {share:.0%} zeros: measure with random data")
