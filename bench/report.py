"""What a run leaves: a table on stdout and a JSON file."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.inputs import Geometry
from bench.measure import Timing
from bench.prefill import Result
from bench.roofline import COPY_TRAFFIC, GEMM_FLOP

TERA = 1e12


def driver_version() -> str:
    """The NVIDIA driver's version, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return lines[0].strip() if lines else "unknown"


def environment(library: ModuleType, commit: str) -> dict[str, str]:
    """Everything a figure depends on besides the code."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cuda": str(torch.version.cuda),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "library": str(library.version()),
        "build_info": str(library.build_info()),
    }


def rate(work: float, timing: Timing) -> dict[str, float | int]:
    """`work` per call as a rate, in units of 1e12 a second: of the median, the slowest and the fastest sample."""
    return {
        "median": work / timing.median / TERA,
        "low": work / timing.high / TERA,
        "high": work / timing.low / TERA,
        "samples": timing.samples,
    }


def prefill_record(
    host: dict[str, str],
    model: str,
    geometry: Geometry,
    gemm: Timing,
    gemm_after: Timing,
    copy: Timing,
    results: Sequence[Result],
) -> dict[str, Any]:
    """The JSON document of a prefill run. Times in seconds, rates in TFLOP/s (copy: TB/s)."""
    roof = GEMM_FLOP / gemm.median
    return {
        "bench": "prefill",
        **host,
        "model": model,
        "geometry": dataclasses.asdict(geometry),
        "gemm_tflops": rate(GEMM_FLOP, gemm),
        "gemm_after_tflops": rate(GEMM_FLOP, gemm_after),
        "copy_tbps": rate(COPY_TRAFFIC, copy),
        "rows": [
            {
                "context": result.context,
                "query_rows": result.rows,
                "seconds": dataclasses.asdict(result.timing),
                "useful_tflops": rate(result.flop, result.timing),
                "share_of_gemm": result.flop / result.timing.median / roof,
                "error": result.error,
            }
            for result in results
        ],
    }


def show(record: dict[str, Any], console: Console) -> None:
    """Prints a prefill record."""
    console.print(f"{record['gpu']}, driver {record['driver']}, CUDA {record['cuda']}, torch {record['torch']}")
    console.print(f"tilepress {record['library']} ({record['build_info']}), commit {record['commit']}", markup=False)
    gemm, after, copy = record["gemm_tflops"], record["gemm_after_tflops"], record["copy_tbps"]
    console.print(f"bf16 GEMM {_spread(gemm)} TFLOP/s before, {_spread(after)} after; device copy {_spread(copy, 2)} TB/s")
    heads = f"{record['geometry']['q_heads']}/{record['geometry']['kv_heads']}"
    table = Table(title=f"global prefill, {record['model']}, heads {heads}, split rows; median (min to max)")
    for column in ("L", "query rows", "ms", "TFLOP/s, useful", "of GEMM", "error"):
        table.add_column(column, justify="right")
    for row in record["rows"]:
        milliseconds = {key: row["seconds"][key] * 1e3 for key in ("median", "low", "high")}
        table.add_row(
            f"{row['context']:,}",
            f"{row['query_rows']:,}",
            _spread(milliseconds, 3),
            _spread(row["useful_tflops"]),
            f"{row['share_of_gemm']:.1%}",
            f"{row['error']:.1e}",
        )
    console.print(table)


def _spread(value: dict[str, Any], digits: int = 0) -> str:
    return f"{value['median']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"


def write(record: dict[str, Any], path: Path) -> None:
    """Writes the JSON, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
