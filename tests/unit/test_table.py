"""families.toml: what the committed table says, and the refusal of every kind of bad one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from codegen import table
from codegen.errors import TableError
from codegen.table import Table

from .samples import COMMITTED, DECODE_FAMILY, DELETED, FAMILY, ROOT, raw


def refusal(raw_table: dict[str, Any]) -> str:
    with pytest.raises(TableError) as caught:
        table.parse(raw_table, "families.toml")
    return str(caught.value)


# The committed table


@pytest.fixture(scope="module")
def committed() -> Table:
    return table.load(ROOT / "families.toml")


# The model facts of Gemma 4's published configs, by hand: layers, query heads, KV heads, head_dim, window, group.
MODELS = {
    "gemma4-e2b": (False, (7, 8, 1, 512, None, 8), (28, 8, 1, 256, 512, 8)),
    "gemma4-e4b": (False, (7, 8, 2, 512, None, 4), (35, 8, 2, 256, 512, 4)),
    "gemma4-12b": (True, (8, 16, 1, 512, None, 16), (40, 16, 8, 256, 1024, 2)),
    "gemma4-26b-a4b": (True, (5, 16, 2, 512, None, 8), (25, 16, 8, 256, 1024, 2)),
    "gemma4-31b": (True, (10, 32, 4, 512, None, 8), (50, 32, 16, 256, 1024, 2)),
}


def test_models_are_gemma4s(committed: Table) -> None:
    def facts(heads: table.Heads) -> tuple[int | None, ...]:
        return (heads.layers, heads.q_heads, heads.kv_heads, heads.head_dim, heads.window, heads.group)

    found = {m.name: (m.k_eq_v, facts(m.heads("global")), facts(m.heads("sliding"))) for m in committed.model}
    assert found == MODELS


# Operation, layer, head_dim, groups and formats of every row.
FAMILIES = {
    "tilepress_global_prefill": ("prefill", "global", 512, (4, 8, 16), ("split", "folded")),
    "tilepress_global_decode": ("decode", "global", 512, (4, 8, 16), ("split", "folded")),
    "tilepress_sliding_prefill": ("sliding_prefill", "sliding", 256, (2, 4, 8), ("split",)),
    "tilepress_sliding_decode": ("sliding_decode", "sliding", 256, (2, 4, 8), ("split",)),
}


def test_the_families(committed: Table) -> None:
    found = {f.entry: (f.operation, f.layer, f.head_dim, f.groups, f.formats) for f in committed.family}
    assert found == FAMILIES
    assert all(f.page_size == 64 and f.tma for f in committed.family)


def test_every_group_of_every_layer_is_compiled() -> None:
    assert {group for _, (*_, group), _ in MODELS.values()} == {4, 8, 16}
    assert {group for _, _, (*_, group) in MODELS.values()} == {2, 4, 8}
    for operation, layer, _, groups, _ in FAMILIES.values():
        assert set(groups) == ({4, 8, 16} if layer == "global" else {2, 4, 8}), operation


def test_instances(committed: Table) -> None:
    """Formats outside, groups inside, in the row's order."""
    instances = {f.name: [(i.group, i.page_format) for i in f.instances] for f in committed.family}
    assert instances["sliding_decode"] == [(2, "split"), (4, "split"), (8, "split")]
    assert instances["global_prefill"] == [
        (4, "split"),
        (8, "split"),
        (16, "split"),
        (4, "folded"),
        (8, "folded"),
        (16, "folded"),
    ]


# The kernels of each family, in launch order.
KERNELS = {
    "global_prefill": [
        "global_prefill_g4_split",
        "global_prefill_g8_split",
        "global_prefill_g16_split",
        "global_prefill_g4_folded",
        "global_prefill_g8_folded",
        "global_prefill_g16_folded",
    ],
    "global_decode": [
        "global_decode_partial_g4_split",
        "global_decode_partial_g8_split",
        "global_decode_partial_g16_split",
        "global_decode_partial_g4_folded",
        "global_decode_partial_g8_folded",
        "global_decode_partial_g16_folded",
        "global_decode_merge",
    ],
    "sliding_prefill": ["sliding_prefill_g2_split", "sliding_prefill_g4_split", "sliding_prefill_g8_split"],
    "sliding_decode": [
        "sliding_decode_g2_split",
        "sliding_decode_g4_split",
        "sliding_decode_g8_split",
    ],
}


def test_kernels_and_their_names(committed: Table) -> None:
    assert {family.name: [kernel.name for kernel in family.kernels] for family in committed.family} == KERNELS


def test_a_stage_that_serves_a_family_has_no_instance(committed: Table) -> None:
    """The merge reads partial results, not the pool: neither the group nor the page format, and no bulk copy."""
    merges = [k for family in committed.family for k in family.kernels if k.stage.name == "merge"]
    assert [(k.family.name, k.group, k.page_format) for k in merges] == [("global_decode", 0, "")]
    assert [(k.stage.per_instance, k.stage.tma) for k in merges] == [(False, False)]
    others = [k for family in committed.family for k in family.kernels if k not in merges]
    assert all(k.stage.per_instance and k.stage.tma and k.group and k.page_format for k in others)


def test_arch_is_an_h200(committed: Table) -> None:
    (arch,) = committed.arch
    # CUDA C Programming Guide, compute capability 9.0: 227 KB of shared memory a block, 64 K registers a block.
    assert (arch.shared_memory_bytes, arch.max_registers) == (227 * 1024, 64 * 1024)
    assert arch.compute_capability == "9.0"
    assert arch.cmake == "90a-real"


def test_a_table_is_frozen(committed: Table) -> None:
    with pytest.raises(ValueError, match="frozen"):
        committed.family[0].head_dim = 256


# One edited value per case, and all that the message must hold: file, row, field, what is wrong, what is allowed.

LIBRARY_KEYS = "name, version, tilelang"
ARCH_KEYS = "name, target, compute_capability, shared_memory_bytes, reserved_shared_memory_bytes, max_registers"
FAMILY_KEYS = "name, operation, layer, head_dim, page_size, groups, formats, tma"
HEADS_KEYS = "layers, q_heads, kv_heads, head_dim, window"
FIRST_FAMILY = "[[family]] 'global_prefill'"
FIRST_MODEL = "[[model]] 'gemma4-e2b'"
FIRST_ARCH = "[[arch]] 'sm_90'"

BAD: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "unknown section": ({"extra": 1}, ("extra", "unknown key; allowed: library, arch, model, family")),
    "unknown library key": ({"library__extra": 1}, ("[library]", "'extra'", f"allowed: {LIBRARY_KEYS}")),
    "unknown arch key": ({"arch__0__extra": 1}, (FIRST_ARCH, "'extra'", f"allowed: {ARCH_KEYS}")),
    "unknown model key": (
        {"model__0__extra": 1},
        (FIRST_MODEL, "'extra'", "allowed: name, k_eq_v, global, sliding"),
    ),
    "unknown heads key": ({"model__0__global__extra": 1}, (FIRST_MODEL, "'global.extra'", f"allowed: {HEADS_KEYS}")),
    "unknown family key": ({"family__0__extra": 1}, (FIRST_FAMILY, "'extra'", f"allowed: {FAMILY_KEYS}")),
    "missing section": ({"family": DELETED}, ("family", "missing key")),
    "missing library key": ({"library__tilelang": DELETED}, ("[library]", "'tilelang'", "missing key")),
    "missing family key": ({"family__0__tma": DELETED}, (FIRST_FAMILY, "'tma'", "missing key")),
    "missing heads key": ({"model__0__sliding__layers": DELETED}, (FIRST_MODEL, "'sliding.layers'", "missing key")),
    "missing name": ({"family__0__name": DELETED}, ("[[family]] number 1", "'name'", "missing key")),
    "text for a number": ({"family__0__head_dim": "512"}, (FIRST_FAMILY, "'head_dim'", "valid integer", "'512'")),
    "float for an integer": ({"family__0__head_dim": 512.0}, (FIRST_FAMILY, "'head_dim'", "valid integer", "512.0")),
    "inf for an integer": ({"arch__0__max_registers": float("inf")}, (FIRST_ARCH, "'max_registers'", "inf")),
    "nan for an integer": ({"arch__0__max_registers": float("nan")}, (FIRST_ARCH, "'max_registers'", "nan")),
    "bool for an integer": ({"family__0__page_size": True}, (FIRST_FAMILY, "'page_size'", "valid integer", "True")),
    "integer for a bool": ({"family__0__tma": 1}, (FIRST_FAMILY, "'tma'", "valid boolean", "1")),
    "integer for text": ({"library__tilelang": 1}, ("[library]", "'tilelang'", "valid string", "1")),
    "zero": ({"family__0__head_dim": 0}, (FIRST_FAMILY, "'head_dim'", "greater than 0", "0")),
    "negative": ({"model__1__global__layers": -1}, ("[[model]] 'gemma4-e4b'", "'global.layers'", "greater than 0")),
    "bool in groups": ({"family__0__groups": [True]}, (FIRST_FAMILY, "'groups.0'", "valid integer", "True")),
    "text in groups": ({"family__0__groups": [4, "8"]}, (FIRST_FAMILY, "'groups.1'", "valid integer", "'8'")),
    "number for groups": ({"family__0__groups": 4}, (FIRST_FAMILY, "'groups'", "4")),
    "empty groups": ({"family__0__groups": []}, (FIRST_FAMILY, "'groups'", "at least 1")),
    "empty formats": ({"family__0__formats": []}, (FIRST_FAMILY, "'formats'", "at least 1")),
    "no family": ({"family": []}, ("[family]", "at least 1")),
    "unknown layer": ({"family__0__layer": "local"}, (FIRST_FAMILY, "'layer'", "'global' or 'sliding'", "'local'")),
    "name with a capital": ({"family__0__name": "Prefill"}, ("[[family]] 'Prefill'", "'name'", "^[a-z][a-z0-9_]*$")),
    "name with a digit first": ({"family__0__name": "4x"}, ("[[family]] '4x'", "'name'", "^[a-z][a-z0-9_]*$")),
    "name with a newline": ({"family__0__name": "x\n"}, ("[[family]]", "'name'", "^[a-z][a-z0-9_]*$")),
    "empty name": ({"family__0__name": ""}, ("[[family]]", "'name'", "^[a-z][a-z0-9_]*$")),
    "version of two parts": ({"library__version": "0.1"}, ("[library]", "'version'", "'0.1'")),
    "capability without a dot": ({"arch__0__compute_capability": "90"}, (FIRST_ARCH, "'compute_capability'", "'90'")),
    "group of no model": (
        {"family__0__groups": [4, 3]},
        (FIRST_FAMILY, "'groups'", "group 3", "global query heads of no [[model]] (8, 16, 32)", ": 2, 4, 8, 16, 32"),
    ),
    # The decode's accumulators hold 16 heads; the windowed prefill's tiles hold two heads of a group.
    "group above the decode's": (
        {"family__1__groups": [32]},
        ("[[family]] 'global_decode'", "'groups'", "group 32", "allowed: 1, 2, 4, 8, 16"),
    ),
    "odd group of the windowed prefill": (
        {"family__2__groups": [1]},
        ("[[family]] 'sliding_prefill'", "'groups'", "group 1", "allowed: 2, 4, 8, 16, 32"),
    ),
    "group above the kernel's": ({"family__0__groups": [64]}, (FIRST_FAMILY, "group 64", "allowed: 2, 4, 8, 16, 32")),
    "duplicate group": ({"family__0__groups": [4, 8, 4]}, (FIRST_FAMILY, "'groups'", "twice", "[4, 8, 4]")),
    "duplicate format": ({"family__0__formats": ["split", "split"]}, (FIRST_FAMILY, "'formats'", "twice")),
    "folded windowed prefill": (
        {"family__2__formats": ["folded"]},
        ("[[family]] 'sliding_prefill'", "'formats'", "'folded'", "allowed: split."),
    ),
    "page that is not the tile": ({"family__0__page_size": 128}, (FIRST_FAMILY, "'page_size'", "128", "allowed: 64")),
    "head_dim without a kernel": ({"family__0__head_dim": 256}, (FIRST_FAMILY, "'head_dim'", "256", "allowed: 512")),
    "unknown operation": (
        {"family__0__operation": "prefil"},
        (FIRST_FAMILY, "'operation'", "'prefil'", "allowed: prefill, sliding_prefill, sliding_decode, decode."),
    ),
    "unknown format": ({"family__0__formats": ["packed"]}, (FIRST_FAMILY, "'formats'", "'packed'", "allowed: split, folded.")),
    "two families of one name": ({"family": [FAMILY, FAMILY]}, ("[[family]] 'sample_prefill'", "'name'", "unique")),
    "two models of one name": ({"model__1__name": "gemma4-e2b"}, (FIRST_MODEL, "'name'", "unique")),
    "two archs of one name": ({"arch": COMMITTED["arch"] * 2}, (FIRST_ARCH, "'name'", "unique")),
    "KV heads that divide no query heads": (
        {"model__2__sliding__kv_heads": 7},
        ("[[model]] 'gemma4-12b'", "'sliding.kv_heads'", "7 KV heads", "16 query heads", "allowed: a divisor"),
    ),
    "window of a global layer": ({"model__0__global__window": 512}, (FIRST_MODEL, "'global.window'", "has none")),
    "sliding layer without window": (
        {"model__0__sliding__window": DELETED},
        (FIRST_MODEL, "'sliding.window'", "a sliding layer has a window"),
    ),
    "family is a table": ({"family": FAMILY}, ("[family]", "family")),
    "library is an array": ({"library": [COMMITTED["library"]]}, ("[library]", "library")),
    "library is a number": ({"library": 1}, ("[library]", "library")),
    "family row is a number": ({"family": [1]}, ("[[family]] number 1",)),
    "family row is text": ({"family": [FAMILY, "x"]}, ("[[family]] number 2",)),
    "family row is an array": ({"family": [[FAMILY]]}, ("[[family]] number 1",)),
    "heads are a number": ({"model__0__global": 8}, (FIRST_MODEL, "'global'")),
    "name is a number": ({"family__0__name": 4}, ("[[family]] number 1", "'name'", "valid string", "4")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_refused(case: str) -> None:
    edits, parts = BAD[case]
    message = refusal(raw(**edits))
    for part in ("families.toml: ", *parts, "Correct the row and run again."):
        assert part in message, f"{part!r} is not in {message!r}"
    assert "\n" not in message.replace("x\n", "")


# Every name a row forms must be free: an entry's symbol, a unit's object, a generated file.

TAKEN = {
    "a function's symbol": ("version", ("[[family]] 'version'", "'name'")),
    "another function's symbol": ("last_error", ("[[family]] 'last_error'", "'name'")),
    "a hand-written unit": ("error", ("[[family]] 'error'", "'name'")),
    "another hand-written unit": ("cuda_host", ("[[family]] 'cuda_host'", "'name'")),
    "a generated unit": ("library", ("[[family]] 'library'", "'name'")),
    "a function of the knob": ("parse_mode", ("[[family]] 'parse_mode'", "'name'")),
    "another function of the knob": ("mode_pool_bytes", ("[[family]] 'mode_pool_bytes'", "'name'")),
    "a unit and a header of the knob": ("modes", ("[[family]] 'modes'", "'name'")),
    "a function of the pool": ("pool_bytes", ("[[family]] 'pool_bytes'", "'name'")),
    "a hand-written entry": ("merge_states", ("[[family]] 'merge_states'", "'name'")),
    "a companion of an operation": ("decode_plan_size", ("[[family]] 'decode_plan_size'", "'name'")),
    "a hand-written entry's body": ("decode_plan_body", ("[[family]] 'decode_plan_body'", "'name'")),
    "a generated header": ("page_formats", ("[[family]] 'page_formats'", "'name'")),
    "a generated file": ("python", ("[[family]] 'python'", "'name'")),
    "the archive's own object": ("tilepress", ("[[family]] 'tilepress'", "'name'")),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_taken_name_is_refused(case: str) -> None:
    name, parts = TAKEN[case]
    message = refusal(raw(family=[FAMILY | {"name": name}]))
    for part in parts:
        assert part in message


def test_a_family_named_like_anothers_instance_is_refused() -> None:
    """Both would be the unit wide_g8_split."""
    message = refusal(raw(family=[FAMILY | {"name": "wide"}, FAMILY | {"name": "wide_g8_split"}]))
    assert "wide_g8_split" in message


@pytest.mark.parametrize("name", ["wide_merge", "wide_partial_g8_split"])
def test_a_family_named_like_anothers_stage_is_refused(name: str) -> None:
    message = refusal(raw(family=[DECODE_FAMILY | {"name": "wide"}, FAMILY | {"name": name}]))
    assert f"'{name}' is already the name" in message


@pytest.mark.parametrize("role", ["", "_plan_size", "_plan"])
def test_a_family_named_like_anothers_routed_entry_is_refused(role: str) -> None:
    """In either order. Without an incumbent there is none, and the name is free."""
    routed, named = FAMILY | {"name": "wide", "incumbent": "any"}, FAMILY | {"name": f"routed_wide{role}"}
    for families in ([routed, named], [named, routed]):
        assert f"'routed_wide{role}' is already the name" in refusal(raw(family=families))
    table.parse(raw(family=[routed | {"incumbent": None}, named]), "families.toml")


def test_every_name_of_the_library_is_taken() -> None:
    """What a build makes besides its families: functions, entries, units, generated files."""
    from codegen import abi, rendering

    committed = table.load(ROOT / "families.toml")
    names = {function.name.removeprefix("tilepress_") for function in abi.FUNCTIONS}
    for entry in abi.hand_written(committed):
        names |= {entry.short_name, f"{Path(entry.source).stem}_body"}
    names |= {Path(name).stem for name in (*rendering.HOST_SOURCES, *rendering.CUDA_HOST_SOURCES)}
    names |= {row.name for row in committed.incumbent}
    assert names <= table.TAKEN_NAMES


def test_another_family_is_a_row() -> None:
    more = table.parse(raw(family=[*COMMITTED["family"], FAMILY]), "families.toml")
    assert [family.entry for family in more.family] == [*FAMILIES, "tilepress_sample_prefill"]


def test_parse_does_not_change_its_input() -> None:
    given = raw()
    before = copy.deepcopy(given)
    table.parse(given, "families.toml")
    assert given == before


# Files


def loaded(path: Path) -> str:
    with pytest.raises(TableError) as caught:
        table.load(path)
    return str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    message = loaded(tmp_path / "absent.toml")
    assert "absent.toml: cannot be read (No such file or directory)" in message
    assert "--table" in message


def test_a_directory_is_no_table(tmp_path: Path) -> None:
    assert "cannot be read (Is a directory)" in loaded(tmp_path)


def test_bad_toml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text('[library]\nname = "tilepress\n')
    message = loaded(path)
    assert "rows.toml: not TOML" in message
    assert "line 2" in message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_bytes(b'[library]\nname = "\xff\xfe"\n')
    assert "rows.toml" in loaded(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text("")
    message = loaded(path)
    assert "rows.toml" in message
    assert "'library': missing key" in message


# Names on the command line


@pytest.mark.parametrize("name", ["sm_90", "sm_90a"])
def test_an_arch_is_known_by_its_name_and_its_target(committed: Table, name: str) -> None:
    assert committed.find_arch(name) is committed.arch[0]


@pytest.mark.parametrize("name", ["sm_80", "SM_90", "90", ""])
def test_an_unknown_arch_lists_the_known(committed: Table, name: str) -> None:
    with pytest.raises(TableError) as caught:
        committed.find_arch(name)
    assert f"unknown arch '{name}'; known: sm_90 (compiled as sm_90a)" in str(caught.value)
    assert "--arch" in str(caught.value)


def test_an_unknown_family_lists_the_known() -> None:
    two = table.parse(raw(family=[COMMITTED["family"][0], FAMILY]), "families.toml")
    with pytest.raises(TableError) as caught:
        two.select(["global_prefill", "prefill"])
    assert "unknown family 'prefill'; known: global_prefill, sample_prefill" in str(caught.value)
    assert "--family" in str(caught.value)


def test_select_keeps_the_tables_order_and_everything_else() -> None:
    two = table.parse(raw(family=[COMMITTED["family"][0], FAMILY]), "families.toml")
    one = two.select(["sample_prefill"])
    assert [family.name for family in one.family] == ["sample_prefill"]
    assert (one.model, one.arch, one.library) == (two.model, two.arch, two.library)
    reversed_names = two.select(["sample_prefill", "global_prefill"])
    assert [family.name for family in reversed_names.family] == ["global_prefill", "sample_prefill"]
    assert two.select([]) == two
