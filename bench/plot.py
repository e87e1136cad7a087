"""Plots of the bench's records: arms side by side, each as a share of what the hardware does. The records are JSON; neither a
GPU nor torch is needed, and matplotlib only to draw."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.arms import ARMS

COLOURS = {
    "generated": "#1f77b4",
    "generated, split": "#1f77b4",
    "generated, folded": "#0b3c5d",
    ARMS["early"].title: "#0b3c5d",
    f"{ARMS['early'].title}, split": "#6baed6",
    f"{ARMS['early'].title}, folded": "#4f6d8a",
    ARMS["incumbent"].title: "#d9822b",
    ARMS["flex"].title: "#8a8a8a",
    ARMS["fa4"].title: "#5a9e4b",
    "incumbent": "#d9822b",
    "tilelang": "#1f77b4",
    "tilelang640": "#0b3c5d",
}
OTHERS = ("#7b5ea7", "#b23a48", "#3aa6a6")
LOGARITHMIC = 20  # times the roof: above, bars next to it could not be read on a linear axis
KINDS = {
    "prefill": "global prefill",
    "decode": "global decode",
    "sliding": "sliding layers",
    "prep": "preps and activation",
    "step": "serving steps",
}


class MatplotlibMissing(RuntimeError):
    """matplotlib cannot be imported."""


@dataclass(frozen=True)
class Bar:
    """A figure with its spread, and what is written above it."""

    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Panel:
    """Groups of bars, a bar a series: bars[series][group], None where there is none. roof: where the hardware's line is, and
    what it says, if there is one. better: "higher" or "lower"."""

    title: str
    y_label: str
    better: str
    roof: tuple[float, str] | None
    groups: tuple[str, ...]
    bars: dict[str, tuple[Bar | None, ...]]


@dataclass(frozen=True)
class Picture:
    """What one record's file shows."""

    title: str
    panels: tuple[Panel, ...]


def read(path: Path) -> dict[str, Any]:
    """A record from its file."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def series_of(row: dict[str, Any]) -> str:
    """The name of a row's series: its arm, and its page format where layers of this kind have several."""
    arm = row.get("arm", "generated")
    if arm not in ARMS:
        return str(arm)
    geometry = row["geometry"]
    split_alone = geometry["head_dim"] == 256 or len(ARMS[arm].formats) == 1
    return ARMS[arm].title if split_alone else f"{ARMS[arm].title}, {geometry['page_format']}"


def picture(record: dict[str, Any]) -> Picture:
    """What a record's file shows. Raises ValueError for a record of no known mode."""
    kind = record["bench"]
    panels = {"prefill": _prefill, "decode": _decode, "sliding": _sliding, "prep": _prep, "step": _step}.get(kind)
    if panels is None:
        raise ValueError(f"a record of {kind!r}; known: {', '.join(KINDS)}")
    title = f"Tilepress: {KINDS[kind]} on one {record['gpu']}, commit {record['commit'][:12]}"
    return Picture(title, tuple(panels(record)))


def _panel(
    title: str, y_label: str, better: str, roof: tuple[float, str] | None, cells: Sequence[tuple[str, str, Bar]]
) -> Panel:
    """A panel of (group, series, bar), in the order that groups and series come up."""
    groups = tuple(dict.fromkeys(group for group, _, _ in cells))
    found = {(series, group): bar for group, series, bar in cells}
    names = sorted(dict.fromkeys(series for _, series, _ in cells), key=_rank)
    return Panel(title, y_label, better, roof, groups, {name: tuple(found.get((name, g)) for g in groups) for name in names})


def _rank(series: str) -> int:
    return list(COLOURS).index(series) if series in COLOURS else len(COLOURS)


def _share(rate: dict[str, float], roof: float, text: str) -> Bar:
    """A rate in per cent of the roof's."""
    median, low, high = (100 * rate[key] / roof for key in ("median", "low", "high"))
    return Bar(median, low, high, text)


def _prefill(record: dict[str, Any]) -> list[Panel]:
    first = record["rows"][0]
    roof = first["useful_tflops"]["median"] / first["share_of_gemm"]  # the better of before and after: see report
    cells = [
        (
            f"L = {row['context']:,}",
            series_of(row),
            _share(row["useful_tflops"], roof, f"{row['useful_tflops']['median']:.0f}"),
        )
        for row in record["rows"]
    ]
    rows = sorted({row["query_rows"] for row in record["rows"]})
    title = f"{record['model']}: the last {', '.join(f'{n:,}' for n in rows)} rows of L tokens; useful TFLOP/s above the bars"
    return [_panel(title, "% of the matrix product", "higher", (100.0, f"bf16 GEMM, {roof:.0f} TFLOP/s"), cells)]


def _decode_panels(rows: Sequence[dict[str, Any]], roof: float) -> list[Panel]:
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for row in rows:
            if row["model"] != model:
                continue
            seconds, floor = row["seconds"], row["floor_seconds"]
            median, low, high = (seconds[key] / floor for key in ("median", "low", "high"))
            group = f"batch {row['batch']}" if row["window"] else f"{row['batch']} x {row['context']:,}"
            cells.append((group, series_of(row), Bar(median, low, high, _microseconds(seconds["median"]))))
        window = next(row["window"] for row in rows if row["model"] == model)
        what = f"decode, window {window:,}" if window else "decode, requests x tokens"
        line = (1.0, f"KV bytes at the device copy, {roof:.2f} TB/s")
        panels.append(_panel(f"{model}: {what}; microseconds above the bars", "time over the floor", "lower", line, cells))
    return panels


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _decode(record: dict[str, Any]) -> list[Panel]:
    return _decode_panels(record["rows"], record["copy_tbps"]["median"])


def _sliding(record: dict[str, Any]) -> list[Panel]:
    panels = []
    for burst in ("cold", "hot"):
        roof = record[f"gemm_{burst}_tflops"]["median"]
        cells = []
        for row in record["prefill"]:
            rate, milliseconds = row[burst]["useful_tflops"], row[burst]["seconds"]["median"] * 1e3
            group = f"{row['batch']} x {row['rows']:,}\nof {row['context']:,}"
            cells.append((group, series_of(row), _share(rate, roof, f"{milliseconds:.3f}")))
        launches = record["launches"][burst]
        title = f"{record['model']}: prefill, {burst} (bursts of {launches}); milliseconds above the bars"
        line = (100.0, f"bf16 GEMM, {roof:.0f} TFLOP/s")
        panels.append(_panel(title, "% of the matrix product", "higher", line, cells))
    return [*panels, *_decode_panels(record["decode"], record["copy_tbps"]["median"])]


def _prep(record: dict[str, Any]) -> list[Panel]:
    roof = record["copy_tbps"]["median"]
    panels = []
    for count in dict.fromkeys(row["rows"] for row in record["rows"]):
        cells = []
        for row in record["rows"]:
            if row["rows"] == count:
                name = row["kernel"].removeprefix("prep_").replace("_prompt", "").replace("_decode", "").replace(", ", "\n")
                text = f"{row['tbps']['median']:.2f} TB/s\n{_microseconds(row['seconds']['median'])} us"
                cells.append((name, "generated", _share(row["tbps"], roof, text)))
        title = f"{record['model']}: {count:,} rows"
        panels.append(_panel(title, "% of the device copy", "higher", (100.0, f"device copy, {roof:.2f} TB/s"), cells))
    return panels


def _step(record: dict[str, Any]) -> list[Panel]:
    decodes, chunks = [], []
    for row in (row for mode in record["modes"] for row in mode["rows"]):
        group, milliseconds = f"L = {row['context']:,}", row["tpot"] * 1e3
        spread = (row["tpot_low"] * 1e3, row["tpot_high"] * 1e3)
        decodes.append((group, row["mode"], Bar(milliseconds, *spread, f"{milliseconds:.1f}")))
        chunks.append((group, row["mode"], Bar(row["chunk"], row["chunk"], row["chunk"], f"{row['chunk']:.2f}")))
    size = f"{record['model']}, {record['layers']} layers"
    return [
        _panel(f"{size}: one request's decode step", "milliseconds", "lower", None, decodes),
        _panel(f"{size}: a prompt's last {record['chunk']:,} tokens", "seconds", "lower", None, chunks),
    ]


def draw(record: dict[str, Any], path: Path) -> None:
    """Writes the record's plot. Raises MatplotlibMissing."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MatplotlibMissing(f"matplotlib cannot be imported ({error}); `pip install -e '.[bench]'` brings it") from error
    shown = picture(record)
    columns = 1 if len(shown.panels) < 4 else 2
    rows = -(-len(shown.panels) // columns)
    figure = figure_module.Figure(figsize=(11.0 if columns == 1 else 17.0, 1.0 + 4.4 * rows), layout="constrained")
    figure.suptitle(shown.title, fontsize=13, fontweight="bold")
    for index, panel in enumerate(shown.panels):
        _draw_panel(figure.add_subplot(rows, columns, index + 1), panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_panel(axes: Any, panel: Panel) -> None:
    count = len(panel.bars)
    width = min(0.84 / count, 0.4)
    size = 8 if count < 4 else 7
    unnamed = iter(OTHERS * 2)
    for index, (name, bars) in enumerate(panel.bars.items()):
        there = [(group, bar) for group, bar in enumerate(bars) if bar is not None]
        places = [group + (index - (count - 1) / 2) * width for group, _ in there]
        values = [bar.value for _, bar in there]
        spread = [[bar.value - bar.low for _, bar in there], [bar.high - bar.value for _, bar in there]]
        colour = COLOURS.get(name) or next(unnamed)
        axes.bar(places, values, width * 0.92, label=name, color=colour)
        axes.errorbar(places, values, yerr=spread, fmt="none", ecolor="black", elinewidth=0.9, capsize=2)
        for place, (_, bar) in zip(places, there, strict=True):
            above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": size}
            axes.annotate(bar.text, (place, bar.high), **above)
    at = 0.0
    if panel.roof is not None:
        at, text = panel.roof
        axes.axhline(at, color="black", linestyle="--", linewidth=1.1, label=text)
    axes.set_xticks(range(len(panel.groups)), panel.groups)
    axes.set_xlim(-0.6, len(panel.groups) - 0.4)
    highest = max([at, *(bar.high for bars in panel.bars.values() for bar in bars if bar is not None)])
    if at and highest > LOGARITHMIC * at:
        axes.set_yscale("log")
        axes.set_ylim(0.5 * at, highest * 2)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, highest * 1.2)
    axes.set_ylabel(f"{panel.y_label} ({panel.better} is better)")
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # Under the groups: inside, it would lie on the bars.
    axes.legend(fontsize=8, ncols=min(count + 1, 4), loc="upper center", bbox_to_anchor=(0.5, -0.11), frameon=False)
