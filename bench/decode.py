"""The decode: one query row of each request over its whole context or a window, merge included."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from bench import peers
from bench.arms import Skipped
from bench.inputs import Batch, Geometry, Request, build, released
from bench.loads import Load
from bench.measure import Timing, refuse_zeros, time_graph
from bench.outputs import Outputs, make_outputs
from bench.plans import Limits
from bench.reference import Reference, attention

# Bytes of KV that successive calls read before one reads its own again: twenty times an H200's L2 cache. Where a call reads
# half a megabyte, MAX_SETS make it five times.
ROTATION_BYTES = 1 << 30
MAX_SETS = 512
GRAPH_CALLS = 20  # in a graph, at least


@dataclass(frozen=True)
class Result:
    """One load in one page format and arm. window: tokens that a row sees, 0 for all. items: runs of pages that the plan has.
    chunk_tokens: of the incumbent's chunks, 0 where there are none. kv_bytes: of keys and values that the rows see. sets:
    disjoint inputs that were read in turn. error: out against the fp32 reference."""

    arm: str
    geometry: Geometry
    load: Load
    window: int
    timing: Timing
    items: int
    chunk_tokens: int
    kv_bytes: int
    sets: int
    error: float


def measure(
    library: ModuleType, geometry: Geometry, load: Load, *, arms: Sequence[str], window: int = 0, repeats: int
) -> list[Result | Skipped]:
    """Times a decode step over inputs that no cache holds, each arm on the same sets, and checks what was timed. The plan is
    made before.

    Raises ValueError for data that would flatter and ArithmeticError for a result that is wrong.
    """
    seen = min(load.context, window) if window else load.context
    kv_bytes = load.batch * seen * geometry.token_bytes
    count = min(max(2, -(-ROTATION_BYTES // kv_bytes)), MAX_SETS)
    sets = [_inputs(geometry, load, window, seed) for seed in range(count)]
    checked = {index: _expected(sets[index][0]) for index in (0, count - 1)}
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    limits = Limits(max_batch=load.batch, sm_count=sm_count)
    case = f"decode, {geometry.q_heads}/{geometry.kv_heads}, {load}, {geometry.page_format}"

    def timed(arm: str) -> Result:
        for _, outputs in sets:
            outputs.refill()
        made = peers.decode(arm, library, sets, limits)
        rounds = -(-GRAPH_CALLS // count)
        timing = time_graph([call.run for call in made.calls], rounds=rounds, repeats=peers.repeats_of(arm, repeats))
        error = max(peers.check(arm, case, made.calls[index].out(), expected) for index, expected in checked.items())
        return Result(arm, geometry, load, window, timing, made.items, made.chunk_tokens, kv_bytes, count, error)

    return [peers.attempt(arm, case, functools.partial(timed, arm)) for arm in arms]


def _inputs(geometry: Geometry, load: Load, window: int, seed: int) -> tuple[Batch, Outputs]:
    window_left = window - 1 if window else None
    request = Request(1, load.context) if window_left is None else released(1, load.context, window_left)
    requests = [request] * load.batch
    batch = build(geometry, requests, device=torch.device("cuda"), seed=seed, tail_rows=0, window_left=window_left)
    refuse_zeros("q", batch.q)
    first = int(batch.page_ids[0]) * geometry.rows_per_page + geometry.layer_row
    refuse_zeros("the pool", batch.pool[first : first + geometry.page_size])
    return batch, make_outputs(batch)


def _expected(batch: Batch) -> Reference:
    """Of the first, the last and a middle request."""
    return attention(batch, sorted({0, batch.size // 2, batch.size - 1}))
