"""What the bench does without a GPU: arms, plots and tables from its records."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import arms, plot, tables
from bench.__main__ import main

from .samples import ROOT

RESULTS = ROOT / "bench" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
RECORDS = tuple(path.stem for path in sorted(RESULTS.glob("*.json")) if plot.read(path)["bench"] in tables.TABLES)


@pytest.fixture(params=RECORDS)
def record(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A committed result."""
    return plot.read(RESULTS / f"{request.param}.json")


def test_arms() -> None:
    assert arms.parse(arms.DEFAULT) == ("generated", "early", "incumbent")
    assert arms.parse("all") == tuple(arms.ARMS)
    assert arms.serving(arms.parse("all"), "decode", "folded") == ("generated", "early")
    assert arms.serving(("incumbent", "early", "generated"), "prefill", "split") == ("incumbent", "generated")
    assert arms.serving(("incumbent", "early", "generated"), "sliding decode", "split") == ("incumbent", "early", "generated")


@pytest.mark.parametrize("text", ["", "flash", "generated,", "incumbent,incumbent", "all,flex"])
def test_what_names_no_arms(text: str) -> None:
    with pytest.raises(ValueError, match=r"none of|twice"):
        arms.parse(text)
    result = CliRunner().invoke(main, ["decode", "--arms", text])
    assert result.exit_code == 2 and "--arms" in result.output


def test_every_row_is_a_bar(record: dict[str, Any]) -> None:
    shown = plot.picture(record)
    steps = [row for mode in record.get("modes", ()) for row in mode["rows"]]
    rows = [*record.get("rows", ()), *record.get("decode", ()), *(2 * record.get("prefill", [])), *(2 * steps)]
    bars = [bar for panel in shown.panels for series in panel.bars.values() for bar in series if bar is not None]
    assert len(bars) == len(rows)
    assert all(bar.low <= bar.value <= bar.high for bar in bars)
    assert record["gpu"] in shown.title and record["commit"][:12] in shown.title
    for panel in shown.panels:
        assert all(len(series) == len(panel.groups) for series in panel.bars.values())


def test_a_bar_is_a_share_of_the_roof() -> None:
    prefill = plot.read(RESULTS / "prefill.json")
    (panel,) = plot.picture(prefill).panels
    first = next(row for row in prefill["rows"] if plot.series_of(row) == "generated, split")
    bar = panel.bars["generated, split"][0]
    assert bar is not None and bar.value == pytest.approx(100 * first["share_of_gemm"])
    decode = plot.read(RESULTS / "decode.json")
    bar = plot.picture(decode).panels[0].bars["generated, split"][0]
    assert bar is not None and bar.value == pytest.approx(decode["rows"][0]["ratio_to_floor"])


def with_peers(record: dict[str, Any]) -> dict[str, Any]:
    """A prefill record in which the first row is there for other arms, too, and one was skipped."""
    more = copy.deepcopy(record)
    more["rows"] = [{**row, "arm": "generated"} for row in more["rows"] if row.get("arm", "generated") == "generated"]
    first = next(row for row in more["rows"] if row["page_format"] == "split")
    more["rows"] += [{**first, "arm": name} for name in ("newcomer", "incumbent")]
    skipped = {"arm": "fa4", "case": "prefill, L = 10,602, split", "reason": "it has no head_dim 512"}
    more["skipped"] = [skipped, {**skipped, "case": "another"}]
    return more


def test_arms_stand_side_by_side() -> None:
    (panel,) = plot.picture(with_peers(plot.read(RESULTS / "prefill.json"))).panels
    incumbent = arms.ARMS["incumbent"].title
    assert list(panel.bars) == ["generated, split", "generated, folded", incumbent, "newcomer"]
    assert panel.bars[incumbent][0] is not None
    assert panel.bars[incumbent][1:] == (None,) * (len(panel.groups) - 1)


def test_a_record_of_no_mode() -> None:
    with pytest.raises(ValueError, match="'tea'"):
        plot.picture({"bench": "tea"})


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_plot_is_drawn(record: dict[str, Any], tmp_path: Path) -> None:
    plot.draw(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_documents_tables_are_those_of_the_results() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert tables.rewrite(text, RESULTS) == text, "run `python -m bench docs`"
    assert set(tables.TABLES) <= set(RECORDS)
    for name in (*RECORDS, "host"):
        assert f"<!-- {name} -->\n" in text
    for name in RECORDS:
        assert f"../bench/results/{name}.png" in text and (RESULTS / f"{name}.png").is_file()


def test_a_table_is_rewritten_between_its_markers() -> None:
    text = "before\n<!-- prep -->\nstale\n<!-- end -->\nafter\n"
    new = tables.rewrite(text, RESULTS)
    assert new.startswith("before\n<!-- prep -->\n") and new.endswith("|\n<!-- end -->\nafter\n") and "stale" not in new
    assert tables.rewrite(new, RESULTS) == new
    rows = plot.read(RESULTS / "prep.json")["rows"]
    assert all(f"| `{row['kernel']}` | {row['rows']:,} |" in new for row in rows)


def test_a_table_says_what_was_skipped() -> None:
    made = tables.TABLES["prefill"](with_peers(plot.read(RESULTS / "prefill.json")))
    assert "- fa4, 2 cases such as prefill, L = 10,602, split: it has no head_dim 512\n" in made
    assert f"| {arms.ARMS['incumbent'].title} |" in made


def test_a_marker_of_no_table(tmp_path: Path) -> None:
    with pytest.raises(tables.MarkerError, match="tea"):
        tables.rewrite("<!-- tea -->\n<!-- end -->", RESULTS)
    with pytest.raises(tables.MarkerError, match=r"prefill\.json"):
        tables.rewrite("<!-- prefill -->\n<!-- end -->", tmp_path)
    with pytest.raises(tables.MarkerError, match="oracle records have no table"):
        tables.rewrite("<!-- oracle -->\n<!-- end -->", RESULTS)
