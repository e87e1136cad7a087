"""The preps and the activation of one layer each: bytes moved over time, beside the device copy of the same process.

A prep's rows are those of one fused projection, q, k and v without a gap, as Gemma 4 stacks them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import preps
from bench.measure import Timing, refuse_zeros, time_calls, time_graph
from bench.preps import Inputs, Prompt, Shape
from bench.report import rate
from bench.roofline import COPY_TRAFFIC

# Bytes that successive calls move before one comes to its own again: five times an H200's L2 cache.
ROTATION_BYTES = 256 << 20
MAX_SETS = 64
GRAPH_BYTES = 64 << 20  # a call that moves less is timed in a graph: its launch would be a share of its time
GRAPH_CALLS = 20  # in a graph, at least
EQUAL_SHARE = 0.98  # of the bits, against PyTorch: the rest rounds the other way


@dataclass(frozen=True)
class Result:
    """One kernel. moved: bytes read and written a call, each once. equal: share of its output's bits that are PyTorch's."""

    name: str
    rows: int
    timing: Timing
    moved: int
    equal: float


def measure_prep(library: ModuleType, shape: Shape, rows: int, form: str, *, repeats: int) -> Result:
    """Times a prep of one prompt of `rows` tokens, or of `rows` requests' next tokens, out of a fused row, and checks it.

    Raises ValueError for data that would flatter and ArithmeticError for a result that is wrong.
    """
    name = f"prep_{shape.kind}_{form}, {shape.page_format}"
    prompts = (
        [Prompt(rows)]
        if form == "prompt"
        else [Prompt(1, 1000 + r, (1000 + r) // preps.PAGE * preps.PAGE) for r in range(rows)]
    )
    moved = rows * (shape.read_bytes_per_token + shape.written_bytes_per_token)
    sets = [_fused(preps.make(shape, prompts, device=torch.device("cuda"), seed=seed)) for seed in range(_sets(moved))]
    calls = [functools.partial(_prep, library, inputs, form) for inputs in sets]
    timing = _time(calls, moved, repeats)
    wanted = preps.expected(sets[0])
    pool = preps.expected_pool(sets[0], wanted)
    equal = min(_equal(name, sets[0].q_out, wanted.q), _equal(name, sets[0].pool, pool))
    return Result(name, rows, timing, moved, equal)


def _prep(library: ModuleType, inputs: Inputs, form: str) -> None:
    preps.run(library, inputs, form, torch.cuda.current_stream().cuda_stream)


def measure_activation(library: ModuleType, rows: int, columns: int, *, repeats: int) -> Result:
    """Times gelu_mul of gate and up rows stacked in one, and checks it. Raises as measure_prep does."""
    moved = 3 * 2 * rows * columns
    sets = []
    for seed in range(_sets(moved)):
        generator = torch.Generator("cuda").manual_seed(seed)
        fused = torch.randn(rows, 2 * columns, device="cuda", generator=generator).to(torch.bfloat16)
        refuse_zeros("gate and up", fused)
        sets.append((fused, torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")))
    calls = [functools.partial(preps.gelu_mul, library, fused, out) for fused, out in sets]
    timing = _time(calls, moved, repeats)
    fused, out = sets[0]
    wanted = torch.nn.functional.gelu(fused[:, :columns], approximate="tanh") * fused[:, columns:]
    return Result("gelu_mul", rows, timing, moved, _equal("gelu_mul", out, wanted))


def _fused(inputs: Inputs) -> Inputs:
    refuse_zeros("the projections", inputs.q)
    inputs.fuse(padding=0)
    return inputs


def _sets(moved: int) -> int:
    """Disjoint inputs and outputs, used in turn."""
    return min(max(2, -(-ROTATION_BYTES // moved)), MAX_SETS)


def _time(calls: Sequence[Callable[[], object]], moved: int, repeats: int) -> Timing:
    if moved < GRAPH_BYTES:
        return time_graph(calls, rounds=-(-GRAPH_CALLS // len(calls)), repeats=repeats)
    return time_calls(calls, warmup=2 * len(calls), repeats=repeats)


def _equal(name: str, found: torch.Tensor, wanted: torch.Tensor) -> float:
    share = float((found.view(torch.int16) == wanted.contiguous().view(torch.int16)).float().mean())
    if not share >= EQUAL_SHARE:
        raise ArithmeticError(f"{name}: {share:.1%} of the bits are PyTorch's; at least {EQUAL_SHARE:.0%} must be")
    return share


def record(host: dict[str, str], model: str, copy: Timing, copy_after: Timing, results: Sequence[Result]) -> dict[str, Any]:
    """The JSON document of a run. Times in seconds, rates in TB/s. share_of_copy: of the device copy before."""
    roof = COPY_TRAFFIC / copy.median
    return {
        "bench": "prep",
        **host,
        "model": model,
        "copy_tbps": rate(COPY_TRAFFIC, copy),
        "copy_after_tbps": rate(COPY_TRAFFIC, copy_after),
        "rows": [
            {
                "kernel": result.name,
                "rows": result.rows,
                "bytes": result.moved,
                "seconds": dataclasses.asdict(result.timing),
                "tbps": rate(result.moved, result.timing),
                "share_of_copy": result.moved / result.timing.median / roof,
                "equal_bits": result.equal,
            }
            for result in results
        ],
    }


def show(record: dict[str, Any], console: Console) -> None:
    """Prints a record."""
    console.print(f"{record['gpu']}, driver {record['driver']}, CUDA {record['cuda']}, torch {record['torch']}")
    console.print(f"tilepress {record['library']} ({record['build_info']}), commit {record['commit']}", markup=False)
    console.print(f"device copy {record['copy_tbps']['median']:.2f} TB/s, after {record['copy_after_tbps']['median']:.2f}")
    table = Table(title=f"preps and activation, {record['model']}; median (min to max)")
    table.add_column("kernel")
    for column in ("rows", "us", "TB/s", "of copy", "equal bits"):
        table.add_column(column, justify="right")
    for row in record["rows"]:
        median, low, high = (row["seconds"][key] * 1e6 for key in ("median", "low", "high"))
        table.add_row(
            row["kernel"],
            f"{row['rows']:,}",
            f"{median:.1f} ({low:.1f} to {high:.1f})",
            f"{row['tbps']['median']:.2f}",
            f"{row['share_of_copy']:.1%}",
            f"{row['equal_bits']:.2%}",
        )
    console.print(table)
