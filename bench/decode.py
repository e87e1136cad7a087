"""The decode: one query row of each request over its whole context or a window, merge included."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch

from bench.inputs import Batch, Geometry, Request, build, released
from bench.library import decode
from bench.loads import Load
from bench.measure import Timing, refuse_zeros, time_graph
from bench.outputs import Outputs, make_outputs
from bench.plans import ITEMS, Limits, make_plan
from bench.reference import OUT_TOLERANCE, attention, out_error

# Bytes of KV that successive calls read before one reads its own again: twenty times an H200's L2 cache. Where a call reads
# half a megabyte, MAX_SETS make it five times.
ROTATION_BYTES = 1 << 30
MAX_SETS = 512
GRAPH_CALLS = 20  # in a graph, at least


@dataclass(frozen=True)
class Result:
    """One load in one page format. window: tokens that a row sees, 0 for all. items: runs of pages that the plan has. kv_bytes:
    of keys and values that the rows see. sets: disjoint inputs that were read in turn. error: out against the fp32
    reference."""

    geometry: Geometry
    load: Load
    window: int
    timing: Timing
    items: int
    kv_bytes: int
    sets: int
    error: float


def measure(library: ModuleType, geometry: Geometry, load: Load, *, window: int = 0, repeats: int) -> Result:
    """Times a decode step over inputs that no cache holds, and checks what was timed. The plan is made before.

    Raises ValueError for data that would flatter and ArithmeticError for a result that is wrong.
    """
    seen = min(load.context, window) if window else load.context
    kv_bytes = load.batch * seen * geometry.token_bytes
    count = min(max(2, -(-ROTATION_BYTES // kv_bytes)), MAX_SETS)
    sets = [_inputs(geometry, load, window, seed) for seed in range(count)]
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    # Equal lengths, so equal plans: one serves every set.
    plan = make_plan(library, sets[0][0], Limits(max_batch=load.batch, sm_count=sm_count), hostile=False)
    calls = [functools.partial(decode, library, batch, plan, outputs, lse=False, status=False) for batch, outputs in sets]
    timing = time_graph(calls, rounds=-(-GRAPH_CALLS // len(calls)), repeats=repeats)
    error = max(_error(batch, outputs) for batch, outputs in (sets[0], sets[-1]))
    if not error <= OUT_TOLERANCE:
        raise ArithmeticError(
            f"{load}, {geometry.page_format}: out is {error:.5f} off the fp32 reference; allowed {OUT_TOLERANCE}"
        )
    return Result(geometry, load, window, timing, plan.header[ITEMS], kv_bytes, len(sets), error)


def _inputs(geometry: Geometry, load: Load, window: int, seed: int) -> tuple[Batch, Outputs]:
    window_left = window - 1 if window else None
    request = Request(1, load.context) if window_left is None else released(1, load.context, window_left)
    requests = [request] * load.batch
    batch = build(geometry, requests, device=torch.device("cuda"), seed=seed, tail_rows=0, window_left=window_left)
    refuse_zeros("q", batch.q)
    first = int(batch.page_ids[0]) * geometry.rows_per_page + geometry.layer_row
    refuse_zeros("the pool", batch.pool[first : first + geometry.page_size])
    return batch, make_outputs(batch)


def _error(batch: Batch, outputs: Outputs) -> float:
    """Of the first, the last and a middle request."""
    expected = attention(batch, sorted({0, batch.size // 2, batch.size - 1}))
    return out_error(outputs.out[expected.rows], expected.out)
