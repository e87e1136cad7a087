"""Hand-written entries: the layout of their structs, the checks rendered around them, and what the preps share."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from codegen import abi, rendering, table
from codegen.abi import HandWritten
from codegen.abi.prep import BULK_BYTES
from codegen.formats import FORMATS, ROTATED
from codegen.rendering import Context
from codegen.tree import ROOT, units

COMMITTED = table.load(ROOT / "families.toml")
ENTRIES = {entry.short_name: entry for entry in abi.hand_written(COMMITTED)}
CHECKED = [name for name, entry in ENTRIES.items() if entry.checks]


def context(stub: bool) -> Context:
    return Context(COMMITTED, COMMITTED.find_arch("sm_90"), "stub" if stub else "generate")


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_struct_has_no_padding(entry: HandWritten) -> None:
    offset = 0
    for field in entry.struct.fields:
        assert offset % field.type.size == 0, field.name
        offset += field.type.size
    assert offset % 8 == 0


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_field_is_documented(entry: HandWritten) -> None:
    for field in entry.struct.fields:
        assert field.doc
        assert not field.type.pointer or (field.memory and (field.shape or field.name == "stream")), field.name


def test_the_preps_and_the_activation_are_entries() -> None:
    preps = [f"prep_{layers}_{form}" for layers in ("global", "sliding") for form in ("prompt", "decode")]
    assert {*preps, "gelu_mul"} <= ENTRIES.keys()
    assert {*preps, "gelu_mul", "merge_states"} == set(CHECKED)


@pytest.mark.parametrize("stub", [False, True])
@pytest.mark.parametrize("name", CHECKED)
def test_its_own_checks_come_before_the_pointers_and_before_a_stubs_refusal(name: str, stub: bool) -> None:
    entry = ENTRIES[name]
    source = rendering.hand_written_source(context(stub), entry)
    assert f'#include "{entry.checks}"' in source
    body = source[source.index('extern "C"') :]
    marks = ["check_numbers(", "check_aligned(", f"check_{name}(", f"args->{entry.empty_when} == 0", "check_present("]
    marks.append("TILEPRESS_STUB" if stub else f"run_{name}(")
    places = [body.index(mark) for mark in marks]
    assert places == sorted(places)


def test_an_entry_without_checks_of_its_own_calls_none() -> None:
    entry = replace(ENTRIES["gelu_mul"], checks="")
    source = rendering.hand_written_source(context(stub=True), entry)
    assert "check_gelu_mul" not in source
    assert "activation.h" not in source


@pytest.mark.parametrize("name", CHECKED)
def test_a_header_of_checks_needs_no_cuda(name: str) -> None:
    """A stub includes it, on a host without a toolkit."""
    seen: set[str] = set()
    waiting = [ENTRIES[name].checks]
    while waiting:
        header = waiting.pop()
        seen.add(header)
        path = ROOT / "csrc" / header
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        waiting += set(re.findall(r'#include "([^"]+)"', text)) - seen
        assert "cuda" not in text.replace("CUDA call", "").lower(), header


def test_the_preps_header_takes_its_numbers_from_the_formats() -> None:
    header = rendering.prep_header()
    assert f"constexpr int kRotated = {ROTATED};" in header
    assert f"constexpr int64_t kBulkBytes = {BULK_BYTES};" in header
    assert FORMATS["folded"].extra_columns == 2 * ROTATED
    assert "{{" not in header and "{%" not in header


def test_both_forms_of_a_prep_are_one_unit() -> None:
    kernels: dict[str, tuple[()]] = {family.name: () for family in COMMITTED.family}
    sources = [unit.source for unit in units(context(stub=False), kernels)]
    for name in ("prep_global.cu", "prep_sliding.cu", "activation.cu"):
        assert sources.count(f"csrc/{name}") == 1
    assert not [unit for unit in units(context(stub=True), kernels) if Path(unit.source).suffix == ".cu"]
