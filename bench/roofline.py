"""What this GPU does in this process: a large bf16 matrix product and a device copy, to set the other figures
beside."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from bench.measure import Timing, refuse_zeros, time_bursts, time_calls

GEMM_SIZE = 8192
COPY_BYTES = 2 << 30
SETS = 2


def gemm(repeats: int = 20) -> Timing:
    """One bf16 product of two 8192 x 8192 matrices: GEMM_FLOP floating-point operations."""
    return time_calls(_products(), warmup=5, repeats=repeats)


def gemm_bursts(*, launches: int, rest: float, repeats: int) -> Timing:
    """The same product, `launches` at a time after a rest."""
    return time_bursts(_products(), launches=launches, rest=rest, repeats=repeats)


def _products() -> list[Callable[[], object]]:
    shape = (GEMM_SIZE, GEMM_SIZE)
    sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for _ in range(SETS)]
    refuse_zeros("the matrix product's input", sets[0][0])
    return [functools.partial(torch.matmul, a, b, out=c) for a, b, c in sets]


def copy(repeats: int = 20) -> Timing:
    """One device copy of COPY_BYTES, which moves twice as many: each byte is read and written."""
    pairs = []
    for _ in range(SETS):
        source = torch.randn(COPY_BYTES // 2, device="cuda", dtype=torch.bfloat16)
        pairs.append((source, torch.empty_like(source)))
    refuse_zeros("the copy's source", pairs[0][0])
    calls = [lambda source=source, target=target: target.copy_(source) for source, target in pairs]
    return time_calls(calls, warmup=3, repeats=repeats)


GEMM_FLOP = 2 * GEMM_SIZE**3
COPY_TRAFFIC = 2 * COPY_BYTES
