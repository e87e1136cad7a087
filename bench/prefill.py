"""The global prefill: one request's last query rows over a context of L tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from bench import peers
from bench.arms import Skipped
from bench.inputs import Batch, Geometry, Request, build
from bench.measure import Timing, refuse_zeros, time_calls
from bench.outputs import Outputs, make_outputs
from bench.reference import few_rows

SETS = 2  # disjoint pools, queries and outputs, used in turn


@dataclass(frozen=True)
class Result:
    """One context length in one page format and arm. flop: useful floating-point operations a call. error: out against the
    fp32 reference."""

    arm: str
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


def measure(
    library: ModuleType, geometry: Geometry, rows: int, context: int, *, arms: Sequence[str], repeats: int
) -> list[Result | Skipped]:
    """Times the last `rows` query rows of `context` tokens, each arm on the same sets, and checks what was timed.

    Raises ValueError for data that would flatter and ArithmeticError for a result that is wrong.
    """
    sets = [_inputs(geometry, rows, context, seed) for seed in range(SETS)]
    expected = [few_rows(batch) for batch, _ in sets]
    case = f"prefill, L = {context:,}, {geometry.page_format}"

    def timed(arm: str) -> Result:
        for _, outputs in sets:
            outputs.refill()
        calls = [peers.prefill(arm, library, batch, outputs) for batch, outputs in sets]
        timing = time_calls([call.run for call in calls], warmup=2 * SETS, repeats=peers.repeats_of(arm, repeats))
        error = max(peers.check(arm, case, call.out(), some) for call, some in zip(calls, expected, strict=True))
        return Result(arm, geometry, context, rows, timing, useful_flop(geometry, rows, context), error)

    return [peers.attempt(arm, case, functools.partial(timed, arm)) for arm in arms]


def _inputs(geometry: Geometry, rows: int, context: int, seed: int) -> tuple[Batch, Outputs]:
    batch = build(geometry, [Request(rows, context)], device=torch.device("cuda"), seed=seed, tail_rows=0)
    refuse_zeros("q", batch.q)
    refuse_zeros("the pool", batch.pool[: 16 * geometry.rows_per_page])
    return batch, make_outputs(batch)
