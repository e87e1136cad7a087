"""What a run leaves: a table on stdout and a JSON file."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import decode, prefill, sliding
from bench.arms import Skipped
from bench.measure import Timing
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


def skipped_rows(skipped: Sequence[Skipped]) -> list[dict[str, str]]:
    """The arms that gave no figure, and why."""
    return [dataclasses.asdict(one) for one in skipped]


def prefill_record(
    host: dict[str, str],
    model: str,
    gemm: Timing,
    gemm_after: Timing,
    copy: Timing,
    results: Sequence[prefill.Result],
    skipped: Sequence[Skipped],
) -> dict[str, Any]:
    """The JSON document of a prefill run. Times in seconds, rates in TFLOP/s (copy: TB/s)."""
    roof = GEMM_FLOP / min(gemm.median, gemm_after.median)  # the better of the two: a hot card's would flatter
    return {
        "bench": "prefill",
        **host,
        "model": model,
        "gemm_tflops": rate(GEMM_FLOP, gemm),
        "gemm_after_tflops": rate(GEMM_FLOP, gemm_after),
        "copy_tbps": rate(COPY_TRAFFIC, copy),
        "rows": [
            {
                "arm": result.arm,
                "page_format": result.geometry.page_format,
                "geometry": dataclasses.asdict(result.geometry),
                "context": result.context,
                "query_rows": result.rows,
                "seconds": dataclasses.asdict(result.timing),
                "useful_tflops": rate(result.flop, result.timing),
                "share_of_gemm": result.flop / result.timing.median / roof,
                "error": result.error,
            }
            for result in results
        ],
        "skipped": skipped_rows(skipped),
    }


def decode_record(
    host: dict[str, str],
    copy: Timing,
    copy_after: Timing,
    results: Sequence[tuple[str, decode.Result]],
    skipped: Sequence[Skipped],
) -> dict[str, Any]:
    """The JSON document of a decode run; `results` with their model. Times in seconds, rates in TB/s."""
    return {
        "bench": "decode",
        **host,
        "copy_tbps": rate(COPY_TRAFFIC, copy),
        "copy_after_tbps": rate(COPY_TRAFFIC, copy_after),
        "rows": _decode_rows(copy, results),
        "skipped": skipped_rows(skipped),
    }


def _decode_rows(copy: Timing, results: Sequence[tuple[str, decode.Result]]) -> list[dict[str, Any]]:
    """The floor of a step is the time that the keys and values it sees take at the copy's rate."""
    bandwidth = COPY_TRAFFIC / copy.median
    return [
        {
            "model": model,
            "arm": result.arm,
            "page_format": result.geometry.page_format,
            "geometry": dataclasses.asdict(result.geometry),
            "batch": result.load.batch,
            "context": result.load.context,
            "window": result.window,
            "items": result.items,
            "chunk_tokens": result.chunk_tokens,
            "sets": result.sets,
            "seconds": dataclasses.asdict(result.timing),
            "kv_bytes": result.kv_bytes,
            "kv_tbps": rate(result.kv_bytes, result.timing),
            "floor_seconds": result.kv_bytes / bandwidth,
            "ratio_to_floor": result.timing.median * bandwidth / result.kv_bytes,
            "error": result.error,
        }
        for model, result in results
    ]


@dataclass(frozen=True)
class Gemm:
    """The matrix product in the bursts that the windowed prefill is timed in."""

    cold: Timing
    hot: Timing


def sliding_record(
    host: dict[str, str],
    model: str,
    gemm: Gemm,
    copy: Timing,
    copy_after: Timing,
    prefills: Sequence[sliding.Result],
    decodes: Sequence[tuple[str, decode.Result]],
    skipped: Sequence[Skipped],
) -> dict[str, Any]:
    """The JSON document of a sliding run; `model` is the prefills'. Times in seconds, rates in TFLOP/s and TB/s. A burst is set
    beside the matrix product's burst of as many launches."""
    return {
        "bench": "sliding",
        **host,
        "model": model,
        "launches": {"cold": sliding.COLD, "hot": sliding.HOT},
        "rest_seconds": sliding.REST,
        "gemm_cold_tflops": rate(GEMM_FLOP, gemm.cold),
        "gemm_hot_tflops": rate(GEMM_FLOP, gemm.hot),
        "copy_tbps": rate(COPY_TRAFFIC, copy),
        "copy_after_tbps": rate(COPY_TRAFFIC, copy_after),
        "prefill": [
            {
                "arm": result.arm,
                "geometry": dataclasses.asdict(result.geometry),
                **dataclasses.asdict(result.prompts),
                "window": result.window,
                "cold": _burst(result.flop, result.cold, gemm.cold),
                "hot": _burst(result.flop, result.hot, gemm.hot),
                "error": result.error,
            }
            for result in prefills
        ],
        "decode": _decode_rows(copy, decodes),
        "skipped": skipped_rows(skipped),
    }


def _burst(flop: int, timing: Timing, gemm: Timing) -> dict[str, Any]:
    return {
        "seconds": dataclasses.asdict(timing),
        "useful_tflops": rate(flop, timing),
        "share_of_gemm": flop / timing.median / (GEMM_FLOP / gemm.median),
    }


def show_prefill(record: dict[str, Any], console: Console) -> None:
    """Prints a prefill record."""
    _show_host(record, console)
    gemm, after, copy = record["gemm_tflops"], record["gemm_after_tflops"], record["copy_tbps"]
    console.print(f"bf16 GEMM {_spread(gemm)} TFLOP/s before, {_spread(after)} after; device copy {_spread(copy, 2)} TB/s")
    table = _table(
        f"global prefill, {record['model']}; median (min to max)",
        ("arm", "format", "heads", "L", "query rows", "ms", "TFLOP/s, useful", "of GEMM", "error"),
    )
    for row in record["rows"]:
        table.add_row(
            row["arm"],
            row["page_format"],
            _heads(row["geometry"]),
            f"{row['context']:,}",
            f"{row['query_rows']:,}",
            _spread(row["seconds"], 3, 1e3),
            _spread(row["useful_tflops"]),
            f"{row['share_of_gemm']:.1%}",
            f"{row['error']:.1e}",
        )
    console.print(table)
    show_skipped(record, console)


def show_decode(record: dict[str, Any], console: Console) -> None:
    """Prints a decode record."""
    _show_host(record, console)
    copy, after = record["copy_tbps"], record["copy_after_tbps"]
    console.print(f"device copy {_spread(copy, 2)} TB/s before, {_spread(after, 2)} after; the floor is KV bytes at the first")
    console.print(_decode_table("global decode", record["rows"]))
    show_skipped(record, console)


def show_sliding(record: dict[str, Any], console: Console) -> None:
    """Prints a sliding record."""
    _show_host(record, console)
    launches = record["launches"]
    cold, hot = (_spread(record[f"gemm_{name}_tflops"]) for name in ("cold", "hot"))
    copy, after = record["copy_tbps"], record["copy_after_tbps"]
    console.print(f"bf16 GEMM {cold} TFLOP/s in bursts of {launches['cold']}, {hot} in bursts of {launches['hot']}")
    console.print(f"device copy {_spread(copy, 2)} TB/s before, {_spread(after, 2)} after; the floor is KV bytes at the first")
    table = _table(
        f"sliding prefill, {record['model']}; a burst after {record['rest_seconds']} s of rest, median (min to max)",
        ("arm", "heads", "window", "requests", "rows", "L", "burst", "ms", "TFLOP/s, useful", "of GEMM", "error"),
    )
    for row in record["prefill"]:
        for name in ("cold", "hot"):
            table.add_row(
                row["arm"],
                _heads(row["geometry"]),
                f"{row['window']:,}",
                f"{row['batch']}",
                f"{row['rows']:,}",
                f"{row['context']:,}",
                f"{name}, {launches[name]}",
                _spread(row[name]["seconds"], 3, 1e3),
                _spread(row[name]["useful_tflops"]),
                f"{row[name]['share_of_gemm']:.1%}",
                f"{row['error']:.1e}",
            )
    console.print(table)
    console.print(_decode_table("sliding decode", record["decode"]))
    show_skipped(record, console)


def _decode_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        f"{title}, merge included; median (min to max)",
        ("arm", "model", "heads", "format", "batch", "L", "window", "us", "TB/s", "floor, us", "of floor", "error"),
    )
    for row in rows:
        table.add_row(
            row["arm"],
            row["model"],
            _heads(row["geometry"]),
            row["page_format"],
            f"{row['batch']}",
            f"{row['context']:,}",
            f"{row['window']:,}" if row["window"] else "all",
            _spread(row["seconds"], 1, 1e6),
            f"{row['kv_tbps']['median']:.2f}",
            f"{row['floor_seconds'] * 1e6:.1f}",
            f"{row['ratio_to_floor']:.3f}",
            f"{row['error']:.1e}",
        )
    return table


def show_skipped(record: dict[str, Any], console: Console) -> None:
    """Prints which arms gave no figure, and why."""
    for one in record["skipped"]:
        console.print(f"skipped: {one['arm']}: {one['case']}: {one['reason']}", markup=False)


def _show_host(record: dict[str, Any], console: Console) -> None:
    console.print(f"{record['gpu']}, driver {record['driver']}, CUDA {record['cuda']}, torch {record['torch']}")
    console.print(f"tilepress {record['library']} ({record['build_info']}), commit {record['commit']}", markup=False)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _heads(geometry: dict[str, Any]) -> str:
    return f"{geometry['q_heads']}/{geometry['kv_heads']}"


def _spread(value: dict[str, Any], digits: int = 0, factor: float = 1.0) -> str:
    median, low, high = (value[key] * factor for key in ("median", "low", "high"))
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def write(record: dict[str, Any], path: Path) -> None:
    """Writes the JSON, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
