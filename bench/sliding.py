"""The windowed prefill: query rows at the end of requests whose fronts are released, in short bursts and long ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from bench import peers
from bench.arms import Skipped
from bench.inputs import Batch, Geometry, build, released
from bench.loads import Prompts
from bench.measure import Timing, refuse_zeros, time_bursts
from bench.outputs import Outputs, make_outputs
from bench.reference import few_rows

SETS = 2  # disjoint pools, queries and outputs, used in turn
REST = 0.3  # seconds before a burst
COLD, HOT = 8, 200  # launches of a burst
HOT_REPEATS = 3


@dataclass(frozen=True)
class Result:
    """One set of prompts in one arm. window: tokens that a row sees. cold, hot: a call in a burst of COLD and HOT launches.
    flop: useful floating-point operations a call. error: out against the fp32 reference."""

    arm: str
    geometry: Geometry
    prompts: Prompts
    window: int
    cold: Timing
    hot: Timing
    flop: int
    error: float


def useful_flop(geometry: Geometry, prompts: Prompts, window: int) -> int:
    """Two products of head_dim for each visible pair of a query and a key, two operations each; no masked pairs."""
    pairs = sum(min(window, position + 1) for position in range(prompts.context - prompts.rows, prompts.context))
    return 4 * geometry.q_heads * geometry.head_dim * prompts.batch * pairs


def measure(
    library: ModuleType, geometry: Geometry, prompts: Prompts, window: int, *, arms: Sequence[str], repeats: int
) -> list[Result | Skipped]:
    """Times a prefill, each arm on the same sets, and checks what was timed.

    Raises ValueError for data that would flatter and ArithmeticError for a result that is wrong.
    """
    sets = [_inputs(geometry, prompts, window, seed) for seed in range(SETS)]
    expected = [few_rows(batch) for batch, _ in sets]
    case = f"sliding prefill, {prompts}"

    def timed(arm: str) -> Result:
        for _, outputs in sets:
            outputs.refill()
        calls = [peers.prefill(arm, library, batch, outputs) for batch, outputs in sets]
        runs = [call.run for call in calls]
        cold = time_bursts(runs, launches=COLD, rest=REST, repeats=peers.repeats_of(arm, repeats))
        hot = time_bursts(runs, launches=HOT, rest=REST, repeats=HOT_REPEATS)
        error = max(peers.check(arm, case, call.out(), some) for call, some in zip(calls, expected, strict=True))
        return Result(arm, geometry, prompts, window, cold, hot, useful_flop(geometry, prompts, window), error)

    return [peers.attempt(arm, case, functools.partial(timed, arm)) for arm in arms]


def _inputs(geometry: Geometry, prompts: Prompts, window: int, seed: int) -> tuple[Batch, Outputs]:
    requests = [released(prompts.rows, prompts.context, window - 1)] * prompts.batch
    batch = build(geometry, requests, device=torch.device("cuda"), seed=seed, tail_rows=0, window_left=window - 1)
    refuse_zeros("q", batch.q)
    first = int(batch.page_ids[0]) * geometry.rows_per_page + geometry.layer_row
    refuse_zeros("the pool", batch.pool[first : first + geometry.page_size])
    return batch, make_outputs(batch)
