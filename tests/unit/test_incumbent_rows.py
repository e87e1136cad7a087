"""The incumbent's rows and what is rendered from them: no files, no build."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from codegen import abi, rendering
from codegen.errors import TableError
from codegen.incumbent import DECODE_GROUPS, KEY_FRAGMENTS, UNITS
from codegen.rendering import Context
from codegen.table import Table, parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = (Path(__file__).parents[2] / "families.toml").read_text(encoding="utf-8")

# By hand, from the consumers' side: the units and what each exports.
NAMES = {
    "paged_attention": [
        "batch_prefill_cta_tile_q",
        "batch_prefill_cta_tile_q_with_override",
        "batch_prefill_paged_cuda",
        "batch_prefill_paged_cuda_hd256",
        "batch_prefill_paged_cuda_with_cta_tile_q",
        "batch_prefill_paged_num_tiles",
        "batch_prefill_paged_num_tiles_with_cta_tile_q",
        "batch_prefill_paged_window_cuda_hd256",
        "paged_attention_decode_cuda",
        "paged_attention_decode_cuda_hd256",
        "paged_attention_decode_split_kv_cuda",
        "paged_attention_decode_window_cuda_hd256",
        "paged_kv_append_cuda",
        "paged_kv_scatter_cuda",
        "single_prefill_cuda",
        "single_prefill_cuda_hd256",
    ],
    "paged_attention_hd512": [
        "batch_prefill_paged_cuda_hd512",
        "paged_attention_decode_split_kv_cuda_hd512",
        "single_prefill_cuda_hd512",
    ],
}
ALL = [name for unit in NAMES.values() for name in unit]


def raw() -> dict[str, Any]:
    return tomllib.loads(TEXT)


def table(**changes: Any) -> Table:
    return parse({**raw(), **changes}, "families.toml")


def context(chosen: Table, stub: bool = False) -> Context:
    return Context(chosen, chosen.arch[0], "stub" if stub else "generate")


def names(chosen: Table) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in abi.incumbent(chosen):
        found.setdefault(entry.unit, []).append(entry.name)
    return {unit: sorted(entries) for unit, entries in found.items()}


def test_the_committed_rows_make_every_entry() -> None:
    assert names(table()) == NAMES
    assert set(ALL) <= set(abi.public_symbols(table()))


def test_without_leaves_every_entry_out() -> None:
    left = table().select((), ("incumbent",))
    assert abi.incumbent(left) == ()
    assert not set(ALL) & set(abi.public_symbols(left))
    assert left.select(["global_prefill"]).incumbent == ()


def test_a_table_may_have_no_incumbent() -> None:
    rows = raw()
    del rows["incumbent"], rows["flashinfer"]
    assert abi.incumbent(parse(rows, "families.toml")) == ()


def row(**changes: Any) -> dict[str, Any]:
    return {"name": "paged_attention", "head_dims": [64, 128, 256], "variants": ["full", "windowed"], **changes}


def test_a_row_drops_the_entries_it_has_no_instance_for() -> None:
    (only,) = names(table(incumbent=[row(head_dims=[128], variants=["full"])])).values()
    assert not [name for name in only if "hd256" in name or "window" in name]
    assert "single_prefill_cuda" in only


@pytest.mark.parametrize(
    ("changes", "where", "why"),
    [
        ({"name": "flash"}, "[[incumbent]] 'flash': field 'name'", "allowed: paged_attention, paged_attention_hd512"),
        ({"head_dims": [96]}, "[[incumbent]] 'paged_attention': field 'head_dims'", "96; allowed: 64, 128, 256"),
        ({"head_dims": [64, 64]}, "[[incumbent]] 'paged_attention': field 'head_dims'", "twice"),
        ({"head_dims": []}, "[[incumbent]] 'paged_attention': field 'head_dims'", "at least 1"),
        ({"variants": ["causal"]}, "[[incumbent]] 'paged_attention': field 'variants'", "allowed: full, windowed"),
        ({"more": 1}, "[[incumbent]] 'paged_attention': field 'more'", "allowed: name, head_dims, variants"),
    ],
)
def test_a_bad_row_is_named(changes: dict[str, Any], where: str, why: str) -> None:
    with pytest.raises(TableError) as caught:
        table(incumbent=[row(**changes)])
    assert f"families.toml: {where}" in str(caught.value)
    assert why in str(caught.value)


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(TableError, match="two \\[\\[incumbent\\]\\] rows have this name"):
        table(incumbent=[row(), row()])


@pytest.mark.parametrize("release", [None, {"version": "0.6.14"}, {"version": "0.6.14", "wheel_sha256": "12"}])
def test_the_release_is_pinned(release: dict[str, str] | None) -> None:
    rows = raw()
    rows.pop("flashinfer")
    with pytest.raises(TableError, match=r"\[flashinfer\]: field '(version|wheel_sha256)'"):
        parse({**rows, **({"flashinfer": release} if release else {})}, "families.toml")


@pytest.mark.parametrize("stub", [False, True])
@pytest.mark.parametrize("unit", list(NAMES))
def test_every_entry_is_one_line(unit: str, stub: bool) -> None:
    chosen = table()
    (found,) = (one for one in chosen.incumbent if one.name == unit)
    lines = [
        line for line in rendering.incumbent_source(context(chosen, stub), found).splitlines() if line.startswith("extern")
    ]
    shape = re.compile(
        r'extern "C" \w+ (\w+)\(.*\) \{ return (?:launch|plan_tiles|plan_cta_tile)<[^{]*>\(\{ \.entry = "(\w+)".*\}\); \}'
    )
    matches = [shape.fullmatch(line) for line in lines]
    assert sorted(match[1] for match in matches if match and match[1] == match[2]) == NAMES[unit]


def test_every_parameter_reaches_the_body() -> None:
    chosen = table()
    for unit in chosen.incumbent:
        for line in rendering.incumbent_source(context(chosen), unit).splitlines():
            prototype = re.match(r'extern "C" \w+ \w+\((.*?)\) \{', line)
            if prototype:
                params = [part.split()[-1].lstrip("*") for part in prototype[1].split(", ")]
                assert not [name for name in params if f".{name} = {name}" not in line]


def test_the_instances_of_an_entry() -> None:
    (unit, wide) = table().incumbent
    by_name = {entry.name: entry for entry in abi.incumbent(table())}
    bodies = {
        "paged_attention_decode_cuda": "launch<Decode, full, 64, 128, 256>",
        "paged_attention_decode_window_cuda_hd256": "launch<Decode, windowed, 256>",
        "batch_prefill_paged_window_cuda_hd256": "launch<Prefill, windowed, 256>",
        "batch_prefill_cta_tile_q": "plan_cta_tile<64, 128, 256, 512>",
    }
    assert {name: rendering.incumbent_body(by_name[name], unit) for name in bodies} == bodies
    assert rendering.incumbent_body(by_name["single_prefill_cuda_hd512"], wide) == "launch<SinglePrefill, full, 512>"


def test_a_stub_names_no_flashinfer() -> None:
    assert "flashinfer/" in rendering.paged_launch_header(context(table()))
    stub = rendering.paged_launch_header(context(table(), stub=True))
    assert "flashinfer" not in stub
    assert "cuda" not in stub
    assert "catch" not in stub


def test_an_undefined_name_in_the_launch_header_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        rendering.render("paged_launch.cuh.j2", stub=False)


def test_every_surface_declares_the_entries() -> None:
    chosen = table()
    surfaces = {
        rendering.header: "\nint32_t batch_prefill_cta_tile_q(int32_t total_seq_len, int32_t num_qo_heads, "
        "int32_t num_kv_heads, int32_t head_dim);",
        rendering.rust_bindings: "pub fn batch_prefill_cta_tile_q(total_seq_len: i32, num_qo_heads: i32, num_kv_heads: i32, "
        "head_dim: i32) -> i32;",
        rendering.python_bindings: '"batch_prefill_cta_tile_q",',
        rendering.abi_document: "`int32_t batch_prefill_cta_tile_q(",
    }
    for surface, declaration in surfaces.items():
        assert declaration in surface(chosen), surface.__name__
        bare = surface(chosen.select((), ("incumbent",)))
        assert not [name for name in ALL if name in bare], surface.__name__


def test_the_facts_agree_with_one_another() -> None:
    assert {dim for unit in UNITS.values() for dim in unit.head_dims} == set(KEY_FRAGMENTS)
    assert DECODE_GROUPS == (1, 2, 3, 4, 8)
    assert {dim: tuple(tiles) for dim, tiles in KEY_FRAGMENTS.items()} == {
        64: (16, 64, 128),
        128: (16, 64, 128),
        256: (16, 64),
        512: (16, 32),
    }
