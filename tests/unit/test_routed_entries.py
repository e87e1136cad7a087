"""The knob's modes and the routed entries: which families have them, what serves them, and what is rendered."""

from __future__ import annotations

import re
from typing import Any

import pytest

from codegen import abi, rendering
from codegen.abi.decode import DECODE, PLAN, PLAN_SIZE
from codegen.abi.prefill import PREFILL
from codegen.abi.routes import ARGUMENTS
from codegen.errors import TableError
from codegen.formats import FORMATS
from codegen.modes import MODES, VARIABLE
from codegen.table import Table, load, parse

from .samples import DECODE_FAMILY, FAMILY, ROOT, raw, table

COMMITTED = load(ROOT / "families.toml")
WITHOUT = COMMITTED.select((), ("incumbent",))
ROUTES = {entry.short_name: entry for entry in abi.routes(COMMITTED)}

# By hand: the incumbent's entry of each family.
INCUMBENTS = {
    "global_prefill": "batch_prefill_paged_cuda_hd512",
    "global_decode": "paged_attention_decode_split_kv_cuda_hd512",
    "sliding_prefill": "batch_prefill_paged_window_cuda_hd256",
    "sliding_decode": "paged_attention_decode_window_cuda_hd256",
}
ROLES = ("", "_plan_size", "_plan")


# The modes


def test_the_modes_by_hand() -> None:
    assert VARIABLE == "PEGAINFER_GLOBAL_ATTN"
    assert [(m.name, m.code, m.text, m.page_format, m.generated) for m in MODES.values()] == [
        ("incumbent", 1, "off", "split", False),
        ("tilelang", 2, "tilelang", "split", True),
        ("tilelang640", 3, "tilelang640", "folded", True),
    ]
    assert {mode.page_format for mode in MODES.values()} <= FORMATS.keys()


def test_every_surface_names_the_modes() -> None:
    for surface, name in (
        (rendering.header, "TILEPRESS_MODE_{} = {}"),
        (rendering.rust_bindings, "pub const MODE_{}: i32 = {};"),
        (rendering.python_bindings, 'module.attr("MODE_{}")'),
        (rendering.abi_document, "| `TILEPRESS_MODE_{}` | {} |"),
    ):
        for mode in MODES.values():
            assert name.format(mode.name.upper(), mode.code) in surface(table())


def test_the_c_sources_have_the_modes() -> None:
    text = rendering.modes_header()
    assert '{"tilelang640", TILEPRESS_MODE_TILELANG640, "tilelang640", TILEPRESS_PAGE_FORMAT_FOLDED, true},' in text
    assert '{"incumbent", TILEPRESS_MODE_INCUMBENT, "off", TILEPRESS_PAGE_FORMAT_SPLIT, false},' in text
    assert f'"{VARIABLE}"' in text
    assert '"off, tilelang, tilelang640"' in text


# Which families have routed entries


def test_the_committed_families_are_routed() -> None:
    assert list(ROUTES) == [f"routed_{name}{role}" for name in INCUMBENTS for role in ROLES]
    assert {entry.family.name: entry.incumbent.name for entry in ROUTES.values()} == INCUMBENTS
    assert all(entry.served for entry in ROUTES.values())
    assert set(ROUTES) <= {name.removeprefix("tilepress_") for name in abi.public_symbols(COMMITTED)}


def test_without_the_incumbent_the_entries_stay_and_are_not_served() -> None:
    """So that a server links either library."""
    bare = {entry.short_name: entry for entry in abi.routes(WITHOUT)}
    assert bare.keys() == ROUTES.keys()
    assert not [name for name, entry in bare.items() if entry.served]
    assert {n: e.signature_hash for n, e in bare.items()} == {n: e.signature_hash for n, e in ROUTES.items()}


def test_a_family_without_an_incumbent_has_no_routed_entry() -> None:
    some = table({"name": "a_prefill"}, {"name": "b_prefill", "incumbent": INCUMBENTS["global_prefill"]}, incumbent=True)
    assert [entry.short_name for entry in abi.routes(some)] == [f"routed_b_prefill{role}" for role in ROLES]
    assert abi.routes(table()) == ()
    assert "routed" not in rendering.header(table()).replace("routed entries", "")


FULL_DECODES = "paged_attention_decode_split_kv_cuda_hd512"
WINDOWED = {"layer": "sliding", "head_dim": 256, "groups": [8]}
UNABLE: dict[str, tuple[dict[str, Any], str]] = {
    "no entry of that name": ({"incumbent": "paged"}, "batch_prefill_paged_cuda_hd512"),
    "empty": ({"incumbent": ""}, "batch_prefill_paged_cuda_hd512"),
    "a decode for a prefill": ({"incumbent": FULL_DECODES}, "batch_prefill_paged_cuda_hd512"),
    "a prefill over contiguous KV": ({"incumbent": "single_prefill_cuda_hd512"}, "batch_prefill_paged_cuda_hd512"),
    "a planner": ({"incumbent": "batch_prefill_cta_tile_q"}, "batch_prefill_paged_cuda_hd512"),
    "a prefill for a decode": (
        {"operation": "decode", "incumbent": "batch_prefill_paged_cuda_hd512"},
        FULL_DECODES,
    ),
    "another head_dim": ({"incumbent": "batch_prefill_paged_cuda_hd256"}, "batch_prefill_paged_cuda_hd512"),
    "whole contexts for a window": (
        WINDOWED | {"operation": "decode", "incumbent": "paged_attention_decode_cuda_hd256"},
        "paged_attention_decode_window_cuda_hd256",
    ),
    "a window for whole contexts": (
        {"operation": "decode", "head_dim": 512, "incumbent": "paged_attention_decode_window_cuda_hd256"},
        FULL_DECODES,
    ),
    "a tile that the call must choose": (
        WINDOWED | {"operation": "sliding_prefill", "incumbent": "batch_prefill_paged_cuda_with_cta_tile_q"},
        "batch_prefill_paged_window_cuda_hd256",
    ),
}


@pytest.mark.parametrize("case", UNABLE)
def test_an_incumbent_that_cannot_serve_is_refused(case: str) -> None:
    """The row, the field, and what is allowed there."""
    changes, able = UNABLE[case]
    with pytest.raises(TableError) as caught:
        abi.routes(table(changes, incumbent=True))
    expected = (
        f"[[family]] 'sample_prefill': field 'incumbent': '{changes['incumbent']}' cannot serve it; allowed: {able}. "
        "Correct the row and run again."
    )
    assert str(caught.value) == expected


def test_every_entry_that_the_refusal_lists_is_taken() -> None:
    family: dict[str, Any] = DECODE_FAMILY | WINDOWED | {"layer": "global", "head_dim": 256, "groups": [8]}
    with pytest.raises(TableError, match="allowed: ") as caught:
        abi.routes(table(family | {"incumbent": "none"}, incumbent=True))
    listed = re.search(r"allowed: (.*)\. Correct", str(caught.value))
    assert listed is not None
    names = listed[1].split(", ")
    assert names == [
        "paged_attention_decode_cuda",
        "paged_attention_decode_split_kv_cuda",
        "paged_attention_decode_cuda_hd256",
    ]
    for name in names:
        found = abi.routes(table(family | {"incumbent": name}, incumbent=True))
        assert [entry.incumbent.name for entry in found] == [name] * 3
        assert "route" in rendering.routed_source(found[0])


def test_a_table_whose_units_lack_the_entry_does_not_serve_it() -> None:
    rows = [row for row in raw()["incumbent"] if row["name"] != "paged_attention_hd512"]
    left = parse(raw(incumbent=rows), "families.toml")
    served = {entry.family.name: entry.served for entry in abi.routes(left)}
    assert served == {"global_prefill": False, "global_decode": False, "sliding_prefill": True, "sliding_decode": True}
    # A prefill's planner needs the other unit, too.
    rows = [row for row in raw()["incumbent"] if row["name"] != "paged_attention"]
    served = {entry.family.name: entry.served for entry in abi.routes(parse(raw(incumbent=rows), "families.toml"))}
    assert served == {"global_prefill": False, "global_decode": True, "sliding_prefill": False, "sliding_decode": False}


# The structs


def names(fields: tuple[abi.Field, ...]) -> list[str]:
    return [field.name for field in fields]


@pytest.mark.parametrize(
    ("routed", "generated"),
    [
        ("routed_global_decode", DECODE.struct),
        ("routed_sliding_decode", DECODE.struct),
        ("routed_global_decode_plan_size", PLAN_SIZE.struct),
        ("routed_global_decode_plan", PLAN.struct),
        ("routed_global_prefill", PREFILL.struct),
    ],
)
def test_a_call_differs_in_the_mode_and_a_prefills_plan(routed: str, generated: abi.Struct) -> None:
    found = [name for name in names(ROUTES[routed].struct.fields) if "prefill" not in routed or "plan" not in name]
    assert found == ["mode" if name == "page_format" else name for name in names(generated.fields)]
    assert set(ROUTES[routed].copied) == set(names(generated.fields)) - {"struct_size", "page_format"}


def test_families_of_an_operation_share_their_structs() -> None:
    for role in ROLES:
        assert ROUTES[f"routed_global_decode{role}"].struct == ROUTES[f"routed_sliding_decode{role}"].struct
    for role in ROLES[1:]:
        assert ROUTES[f"routed_global_prefill{role}"].struct == ROUTES[f"routed_sliding_prefill{role}"].struct


def test_a_workspace_of_no_bytes_may_be_absent() -> None:
    (workspace,) = (f for f in ROUTES["routed_sliding_decode"].struct.fields if f.name == "workspace")
    assert workspace.count == "workspace_bytes"


# What is rendered


def body(name: str, chosen: Table = COMMITTED) -> str:
    (entry,) = (entry for entry in abi.routes(chosen) if entry.short_name == name)
    text = rendering.routed_source(entry)
    return text[text.index('extern "C"') :]


@pytest.mark.parametrize("family", INCUMBENTS)
def test_a_call_goes_to_the_generated_entry_or_to_the_incumbents(family: str) -> None:
    text = body(f"routed_{family}")
    generated, incumbent = f"return tilepress_{family}(&call);", f"return {INCUMBENTS[family]}("
    assert text.index("find_mode(") < text.index(f"if (mode->generated) {generated}") < text.index(incumbent)
    page_format = "mode->page_format" if family.startswith("global") else "TILEPRESS_PAGE_FORMAT_SPLIT"
    assert f"call.page_format = {page_format};" in text
    for name in ROUTES[f"routed_{family}"].copied:
        assert f"call.{name} = args->{name};" in text


@pytest.mark.parametrize("family", INCUMBENTS)
def test_the_incumbents_parameters_are_in_its_order(family: str) -> None:
    entry = ROUTES[f"routed_{family}"]
    call = re.search(rf"return {INCUMBENTS[family]}\((.*)\);", body(entry.short_name))
    assert call is not None
    assert call[1].split(", ") == [ARGUMENTS[name] for _, name in entry.incumbent.params]
    assert len(set(entry.arguments)) == len(entry.arguments), "a value for two parameters"


@pytest.mark.parametrize("name", ROUTES)
def test_without_the_incumbent_its_mode_is_refused_after_the_generated_ones(name: str) -> None:
    text = body(name, WITHOUT)
    assert "was built without the incumbent" in text
    assert text.index("mode->generated") < text.index("was built without the incumbent")
    assert not [entry for entry in INCUMBENTS.values() if entry in text]
    assert "cta_tile_q" not in text
    whole = rendering.routed_source(next(e for e in abi.routes(WITHOUT) if e.short_name == name))
    assert "route_" not in whole
    assert "was built without the incumbent" not in body(name)


@pytest.mark.parametrize(
    ("family", "able"),
    [("global_decode", "{ true, false }"), ("sliding_decode", "{ false, true }")],
)
def test_a_decodes_planner_knows_what_the_entry_can(family: str, able: str) -> None:
    assert f"prepare_decode_route(kEntry, call, {able}, &route)" in body(f"routed_{family}")
    assert f"plan_size_route(kEntry, call, {able});" in body(f"routed_{family}_plan_size")
    assert f"plan_route(kEntry, call, {able});" in body(f"routed_{family}_plan")
    for role in ROLES:
        assert "group != 1 && group != 2 && group != 3 && group != 4 && group != 8)" in body(f"routed_{family}{role}")


def test_the_window_reaches_the_windowed_prefill_alone() -> None:
    assert "args->plan_host, call.window_left, &route" in body("routed_sliding_prefill")
    assert "args->plan_host, -1, &route" in body("routed_global_prefill")


def test_the_document_names_who_serves() -> None:
    with_it, without = rendering.abi_document(COMMITTED), rendering.abi_document(WITHOUT)
    for family, incumbent in INCUMBENTS.items():
        assert f"tilepress_{family} or, in the incumbent's mode, {incumbent}, as mode says." in with_it
    assert without.count("which this library was built without, a refusal") == len(INCUMBENTS)


def test_a_routed_family_is_a_row() -> None:
    """Another one needs no code: its entries, their structs and their sources follow."""
    row = FAMILY | {"name": "wide", "groups": [16], "incumbent": INCUMBENTS["global_prefill"]}
    more = parse(raw(family=[*raw()["family"], row]), "families.toml")
    added = set(abi.public_symbols(more)) - set(abi.public_symbols(COMMITTED))
    assert added == {"tilepress_wide", *(f"tilepress_routed_wide{role}" for role in ROLES)}
    assert "return tilepress_wide(&call);" in body("routed_wide", more)
