"""The tables of docs/performance.md, made from the records in bench/results: no figure there is typed by hand.

A table stands between `<!-- NAME -->` and `<!-- end -->`. NAME: a record, NAME.json, for its tables, or `host` for the card and
the versions of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.plot import read, series_of

MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class MarkerError(ValueError):
    """A marker's record is not there, or has no table."""


def rewrite(text: str, results: Path) -> str:
    """The document with its tables made afresh. Raises MarkerError."""

    def made(match: re.Match[str]) -> str:
        name = match[2]
        if name == "host":
            return f"{match[1]}{_hosts(results)}{match[3]}"
        path = results / f"{name}.json"
        if not path.exists():
            raise MarkerError(f"<!-- {name} --> needs {path.name} in {results}")
        record = read(path)
        if record["bench"] not in TABLES:
            raise MarkerError(f"<!-- {name} -->: {record['bench']} records have no table; those of {', '.join(TABLES)} do")
        return f"{match[1]}{TABLES[record['bench']](record)}{match[3]}"

    return MARKED.sub(made, text)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _spread(value: dict[str, float], digits: int, factor: float = 1.0) -> str:
    median, low, high = (value[key] * factor for key in ("median", "low", "high"))
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _hosts(results: Path) -> str:
    records = [(path.name, read(path)) for path in sorted(results.glob("*.json"))]
    rows = []
    for mode in TABLES:
        for name, record in records:
            if record["bench"] == mode:
                versions = (record[key] for key in ("gpu", "driver", "cuda", "torch"))
                rows.append([f"`{name}`", record["date"][:10], record["commit"][:12], *versions])
    return _table(("file", "date", "commit", "card", "driver", "CUDA", "torch"), rows)


def _skips(record: dict[str, Any]) -> str:
    """Under a table: the arms that gave no figure, a line a reason."""
    cases: dict[tuple[str, str], list[str]] = {}
    for one in record.get("skipped", ()):
        cases.setdefault((one["arm"], one["reason"]), []).append(one["case"])
    if not cases:
        return ""
    lines = [f"- {arm}, {len(found)} cases such as {found[0]}: {reason}\n" for (arm, reason), found in cases.items()]
    return f"\nWithout a figure:\n\n{''.join(lines)}"


def _prefill(record: dict[str, Any]) -> str:
    gemm, after = record["gemm_tflops"], record["gemm_after_tflops"]
    roof = f"bf16 GEMM {_spread(gemm, 0)} TFLOP/s before, {_spread(after, 0)} after. {record['model']}, useful TFLOP/s:\n\n"
    rows = [
        [
            f"{row['context']:,}",
            series_of(row),
            _spread(row["seconds"], 3, 1e3),
            _spread(row["useful_tflops"], 0),
            f"{row['share_of_gemm']:.1%}",
        ]
        for row in sorted(record["rows"], key=lambda row: row["context"])
    ]
    return roof + _table(("L", "arm", "ms", "TFLOP/s", "of the GEMM"), rows) + _skips(record)


def _decode_table(rows: Sequence[dict[str, Any]]) -> str:
    # Arms of one load beside one another, the loads in the order they were measured in.
    order = {key: place for place, key in enumerate(dict.fromkeys(_load(row) for row in rows))}
    cells = [
        [
            row["model"],
            f"{row['batch']} x {row['context']:,}",
            series_of(row),
            _spread(row["seconds"], 1, 1e6),
            f"{row['kv_tbps']['median']:.2f}",
            f"{row['floor_seconds'] * 1e6:,.1f}",
            f"{row['ratio_to_floor']:.3f}",
        ]
        for row in sorted(rows, key=lambda row: order[_load(row)])
    ]
    return _table(("model", "requests x tokens", "arm", "us", "TB/s of KV", "floor, us", "over the floor"), cells)


def _load(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["model"], row["batch"], row["context"]


def _copies(record: dict[str, Any]) -> str:
    return f"Device copy {_spread(record['copy_tbps'], 2)} TB/s before, {_spread(record['copy_after_tbps'], 2)} after.\n\n"


def _decode(record: dict[str, Any]) -> str:
    return _copies(record) + _decode_table(record["rows"]) + _skips(record)


def _sliding(record: dict[str, Any]) -> str:
    gemms = ", ".join(f"{_spread(record[f'gemm_{burst}_tflops'], 0)} {burst}" for burst in ("cold", "hot"))
    rows = []
    for row in record["prefill"]:
        cells = [f"{row['batch']} x {row['rows']:,} of {row['context']:,}", series_of(row)]
        for burst in ("cold", "hot"):
            cells += [_spread(row[burst]["seconds"], 3, 1e3), f"{row[burst]['share_of_gemm']:.1%}"]
        rows.append(cells)
    table = _table(("requests x rows", "arm", "cold, ms", "of the GEMM", "hot, ms", "of the GEMM"), rows)
    head = f"bf16 GEMM, TFLOP/s in the same bursts: {gemms}. {record['model']}, the prefill:\n\n"
    return f"{head}{table}\nThe decode. {_copies(record)}{_decode_table(record['decode'])}{_skips(record)}"


def _prep(record: dict[str, Any]) -> str:
    rows = [
        [
            f"`{row['kernel']}`",
            f"{row['rows']:,}",
            _spread(row["seconds"], 1, 1e6),
            f"{row['tbps']['median']:.2f}",
            f"{row['share_of_copy']:.1%}",
        ]
        for row in record["rows"]
    ]
    return f"{record['model']}. {_copies(record)}" + _table(("kernel", "rows", "us", "TB/s", "of the copy"), rows)


def _step(record: dict[str, Any]) -> str:
    rows = []
    for row in (row for mode in record["modes"] for row in mode["rows"]):
        spread = {"median": row["tpot"], "low": row["tpot_low"], "high": row["tpot_high"]}
        first = "" if row["ttft"] is None else f"{row['ttft']:.2f}"
        rows.append([f"{row['context']:,}", row["mode"], _spread(spread, 2, 1e3), f"{row['chunk'] * 1e3:,.0f}", first])
    rows.sort(key=lambda cells: int(cells[0].replace(",", "")))
    pools = ", ".join(f"{mode['pool_bytes'] / 1e9:.1f} GB under {mode['mode']}" for mode in record["modes"])
    head = f"{record['model']}, all {record['layers']} layers. The pools take {pools}.\n\n"
    return head + _table(("L", "mode", "decode step, ms", f"{record['chunk']:,} tokens, ms", "first token, s"), rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "prefill": _prefill,
    "decode": _decode,
    "sliding": _sliding,
    "prep": _prep,
    "step": _step,
}
