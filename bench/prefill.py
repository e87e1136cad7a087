"""The global prefill: one request's last query rows over a context of L tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch

from bench.inputs import Batch, Geometry, Request, build
from bench.library import prefill_fields
from bench.measure import Timing, refuse_zeros, time_calls
from bench.outputs import Outputs, make_outputs
from bench.reference import OUT_TOLERANCE, attention, out_error

SETS = 2  # disjoint pools, queries and outputs, used in turn


@dataclass(frozen=True)
class Result:
    """One context length in one page format. flop: useful floating-point operations a call. error: out against the fp32
    reference."""

    geometry: Geometry
    context: int
    rows: int
    timing: Timing
    flop: int
    error: float


def useful_flop(geometry: Geometry, rows: int, context: int) -> int:
    """Two products of head_dim for each visible pair of a query and a key, two operations each; no masked pairs."""
    pairs = rows * (context - rows) + rows * (rows + 1) // 2
    return 4 * geometry.q_heads * geometry.head_dim * pairs


def measure(library: ModuleType, geometry: Geometry, rows: int, context: int, *, repeats: int) -> Result:
    """Times the last `rows` query rows of `context` tokens and checks what was timed.

    Raises ValueError for data that would flatter and ArithmeticError for a result that is wrong.
    """
    sets = [_inputs(geometry, rows, context, seed) for seed in range(SETS)]
    host = sets[0][0].q_indptr.cpu()  # every set's is the same
    calls = [
        functools.partial(
            library.global_prefill,
            **prefill_fields(batch, outputs, lse=False, status=False, q_indptr_host=host),
        )
        for batch, outputs in sets
    ]
    timing = time_calls(calls, warmup=2 * SETS, repeats=repeats)
    error = max(_error(batch, outputs) for batch, outputs in sets)
    if not error <= OUT_TOLERANCE:
        raise ArithmeticError(
            f"L = {context}, {geometry.page_format}: out is {error:.5f} off the fp32 reference; allowed {OUT_TOLERANCE}"
        )
    return Result(geometry, context, rows, timing, useful_flop(geometry, rows, context), error)


def _inputs(geometry: Geometry, rows: int, context: int, seed: int) -> tuple[Batch, Outputs]:
    batch = build(geometry, [Request(rows, context)], device=torch.device("cuda"), seed=seed, tail_rows=0)
    refuse_zeros("q", batch.q)
    refuse_zeros("the pool", batch.pool[: 16 * geometry.rows_per_page])
    return batch, make_outputs(batch)


def _error(batch: Batch, outputs: Outputs) -> float:
    """Of a few rows: the first and last, both sides of a tile's edge, and one in the middle."""
    last = batch.q_rows - 1
    expected = attention(batch, sorted({row for row in (0, 63, 64, last // 2, last) if row <= last}))
    return out_error(outputs.out[expected.rows], expected.out)
