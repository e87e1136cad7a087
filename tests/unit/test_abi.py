"""The description of the entries: the struct's layout by hand, and what a signature hash depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codegen import abi
from codegen.abi import CType, Entry, FamilyEntry, Field, Function, HandWritten, OperationAbi, Struct, fields
from codegen.abi.decode import DECODE, PLAN, PLAN_SIZE
from codegen.kernels import OPERATIONS
from codegen.table import load

from .samples import GOLDEN, ROOT, table

# Every argument struct of the committed table.
STRUCTS = abi.structs(load(ROOT / "families.toml"))
HAND_WRITTEN = abi.hand_written(load(ROOT / "families.toml"))


# Bytes of each, by hand.
STRUCT_BYTES = {
    "tilepress_prefill_args": 160,
    "tilepress_sliding_prefill_args": 168,
    "tilepress_decode_args": 160,
    "tilepress_decode_plan_size_args": 64,
    "tilepress_decode_plan_args": 88,
    "tilepress_merge_states_args": 80,
    "tilepress_prep_prompt_args": 280,
    "tilepress_prep_decode_args": 272,
    "tilepress_gelu_mul_args": 96,
    "tilepress_routed_prefill_args": 176,
    "tilepress_routed_sliding_prefill_args": 184,
    "tilepress_routed_prefill_plan_size_args": 40,
    "tilepress_routed_prefill_plan_args": 56,
    "tilepress_routed_decode_args": 160,
    "tilepress_routed_decode_plan_size_args": 64,
    "tilepress_routed_decode_plan_args": 88,
}


def by_hand(struct: str) -> list[tuple[int, int, str, str]]:
    """Offset, size, name and C type of every field, from the hand-written list."""
    lines = (GOLDEN / f"{struct}.txt").read_text().splitlines()
    rows = [line.split(None, 3) for line in lines if not line.startswith("#")]
    return [(int(offset), int(size), name, ctype) for offset, size, name, ctype in rows]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.name)
def test_layout(struct: Struct) -> None:
    found = []
    offset = 0
    for field in struct.fields:
        # Aligned to its size where it stands, so a C compiler puts no padding before it.
        assert offset % field.type.size == 0
        found.append((offset, field.type.size, field.name, field.type.c))
        offset += field.type.size
    assert found == by_hand(struct.name)
    assert offset == STRUCT_BYTES[struct.name]
    assert offset % 8 == 0


def test_every_struct_is_written_down() -> None:
    assert {struct.name for struct in STRUCTS} == STRUCT_BYTES.keys() == {path.stem for path in GOLDEN.glob("*_args.txt")}


def test_every_struct_starts_with_its_size() -> None:
    for struct in STRUCTS:
        first, *rest = struct.fields
        assert (first.name, first.type) == ("struct_size", CType.U64)
        assert len({field.name for field in struct.fields}) == len(rest) + 1


def test_every_field_is_documented() -> None:
    for field in (field for struct in STRUCTS for field in struct.fields):
        assert field.doc
        if field.type.pointer:
            assert field.memory is not None, field.name
            assert field.shape or field.name == "stream"
        else:
            assert not field.shape and field.memory is None and not field.optional


def test_a_count_and_a_field_that_says_when_nothing_is_to_do_are_fields() -> None:
    for struct in STRUCTS:
        names = {field.name for field in struct.fields}
        assert {field.count for field in struct.fields if field.count} <= names
    for entry in HAND_WRITTEN:
        assert not entry.empty_when or entry.empty_when in {field.name for field in entry.struct.fields}


def test_the_structs_are_those_of_the_committed_table() -> None:
    assert [struct.name for struct in STRUCTS] == [
        "tilepress_prefill_args",
        "tilepress_decode_args",
        "tilepress_sliding_prefill_args",
        "tilepress_decode_plan_size_args",
        "tilepress_decode_plan_args",
        "tilepress_merge_states_args",
        "tilepress_prep_prompt_args",
        "tilepress_prep_decode_args",
        "tilepress_gelu_mul_args",
        "tilepress_routed_prefill_args",
        "tilepress_routed_prefill_plan_size_args",
        "tilepress_routed_prefill_plan_args",
        "tilepress_routed_decode_args",
        "tilepress_routed_decode_plan_size_args",
        "tilepress_routed_decode_plan_args",
        "tilepress_routed_sliding_prefill_args",
    ]


def test_every_operation_has_its_description() -> None:
    assert {name: operation.name for name, operation in abi.OPERATION_ABIS.items()} == {name: name for name in OPERATIONS}


SIZES = {
    CType.U64: 8,
    CType.I64: 8,
    CType.I32: 4,
    CType.U32: 4,
    CType.INT: 4,
    CType.F32: 4,
    CType.IN: 8,
    CType.OUT: 8,
    CType.IN_I32: 8,
    CType.OUT_U8: 8,
    CType.OUT_U32: 8,
    CType.OUT_F32: 8,
    CType.OUT_I32: 8,
    CType.OUT_I64: 8,
    CType.IN_F32: 8,
    CType.TEXT: 8,
}


def test_sizes_of_types() -> None:
    assert {ctype: ctype.size for ctype in CType} == SIZES


@pytest.mark.parametrize(
    ("ctype", "declaration", "rust"),
    [
        (CType.I64, "int64_t n", "i64"),
        (CType.INT, "int n", "c_int"),
        (CType.F32, "float n", "f32"),
        (CType.IN, "const void *n", "*const c_void"),
        (CType.OUT, "void *n", "*mut c_void"),
        (CType.IN_I32, "const int32_t *n", "*const i32"),
        (CType.OUT_U8, "uint8_t *n", "*mut u8"),
        (CType.OUT_F32, "float *n", "*mut f32"),
        (CType.OUT_I32, "int32_t *n", "*mut i32"),
        (CType.OUT_I64, "int64_t *n", "*mut i64"),
        (CType.IN_F32, "const float *n", "*const f32"),
        (CType.TEXT, "const char *n", "*const c_char"),
    ],
)
def test_declarations(ctype: CType, declaration: str, rust: str) -> None:
    assert (ctype.declare("n"), ctype.rust) == (declaration, rust)


# The signature hash


FIELDS = (
    fields.STRUCT_SIZE,
    Field("q", CType.IN, "queries", "bf16 [rows]", abi.Memory.DEVICE, align=16),
    Field("rows", CType.I32, "rows of q", minimum=0),
    Field("batch", CType.I32, "requests", minimum=0),
)
OPERATION = OperationAbi("prefill", "An operation.", Struct("sample_args", "Arguments.", FIELDS), (), ())


def entry(*members: Field, name: str = "tilepress_sample_prefill", **changes: object) -> FamilyEntry:
    """An entry over a small struct with these fields, or the default ones, and its operation changed."""
    struct = replace(OPERATION.struct, fields=members or FIELDS)
    operation = replace(OPERATION, **{"struct": struct, **changes})  # type: ignore[arg-type]
    return FamilyEntry(name, operation.struct, operation.doc, table().family[0], operation)


A, B, C, D = FIELDS
CHANGED = {
    "a field is added": (A, B, C, D, Field("more", CType.I32, "")),
    "a field is removed": (A, B, C),
    "a field is renamed": (A, B, replace(C, name="q_rows"), D),
    "a field gets another type": (A, B, replace(C, type=CType.U32), D),
    "a pointer gets another target": (A, replace(B, type=CType.IN_I32), C, D),
    "a pointer's constness changes": (A, replace(B, type=CType.OUT), C, D),
    "two fields change places": (A, B, D, C),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_struct_changes_the_hash(case: str) -> None:
    assert entry(*CHANGED[case]).signature_hash != entry().signature_hash


def test_changes_of_the_signature_are_told_apart() -> None:
    hashes = [entry(*members).signature_hash for members in CHANGED.values()]
    assert len(set(hashes)) == len(CHANGED)


def test_another_name_changes_the_hash() -> None:
    assert entry(name="tilepress_other_prefill").signature_hash != entry().signature_hash
    renamed = entry(struct=replace(OPERATION.struct, name="other_args"))
    assert renamed.signature_hash != entry().signature_hash


KEPT = {
    "a field's documentation": entry(A, B, replace(C, doc="rows that q has"), D),
    "an array's documentation": entry(A, replace(B, shape="bf16 [rows, 512]"), C, D),
    "the struct's documentation": entry(struct=replace(OPERATION.struct, doc="All arguments.")),
    "the operation's documentation": entry(doc="Another.", refusals=("much",)),
    "a launch value": entry(derived=("tiles",)),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_a_caller_does_not_compile_against_keeps_the_hash(case: str) -> None:
    assert KEPT[case].signature_hash == entry().signature_hash


def test_the_hash_is_that_of_the_signature_by_hand() -> None:
    import hashlib

    text = (
        "int tilepress_sample_prefill(const sample_args *args); "
        "sample_args{uint64_t struct_size; const void *q; int32_t rows; int32_t batch}"
    )
    assert entry().signature_hash == hashlib.sha256(text.encode()).hexdigest()


# Symbols and entries


def test_entries_follow_the_table() -> None:
    two = table({"name": "b_prefill"}, {"name": "a_prefill"})
    assert [e.name for e in abi.family_entries(two)] == ["tilepress_b_prefill", "tilepress_a_prefill"]
    assert [e.prototype for e in abi.entries(two)] == [
        "int tilepress_b_prefill(const tilepress_prefill_args *args)",
        "int tilepress_a_prefill(const tilepress_prefill_args *args)",
        "int tilepress_merge_states(const tilepress_merge_states_args *args)",
        "int tilepress_prep_global_prompt(const tilepress_prep_prompt_args *args)",
        "int tilepress_prep_global_decode(const tilepress_prep_decode_args *args)",
        "int tilepress_prep_sliding_prompt(const tilepress_prep_prompt_args *args)",
        "int tilepress_prep_sliding_decode(const tilepress_prep_decode_args *args)",
        "int tilepress_gelu_mul(const tilepress_gelu_mul_args *args)",
    ]
    assert [struct.name for struct in abi.structs(two)] == [
        "tilepress_prefill_args",
        "tilepress_merge_states_args",
        "tilepress_prep_prompt_args",
        "tilepress_prep_decode_args",
        "tilepress_gelu_mul_args",
    ]


# The hand-written entries that every table has.
EVERYWHERE = [
    "tilepress_merge_states",
    "tilepress_prep_global_prompt",
    "tilepress_prep_global_decode",
    "tilepress_prep_sliding_prompt",
    "tilepress_prep_sliding_decode",
    "tilepress_gelu_mul",
]
DECODES = ({"name": "a_decode", "operation": "decode"}, {"name": "b_decode", "operation": "decode"})


def test_an_operation_brings_its_companions_once() -> None:
    assert [e.name for e in abi.hand_written(table(*DECODES))] == [
        "tilepress_decode_plan_size",
        "tilepress_decode_plan",
        *EVERYWHERE,
    ]
    assert [e.name for e in abi.hand_written(table())] == EVERYWHERE
    assert len(abi.entries(table(*DECODES))) == 10
    assert [struct.name for struct in abi.structs(table(*DECODES))] == [
        "tilepress_decode_args",
        "tilepress_decode_plan_size_args",
        "tilepress_decode_plan_args",
        "tilepress_merge_states_args",
        "tilepress_prep_prompt_args",
        "tilepress_prep_decode_args",
        "tilepress_gelu_mul_args",
    ]


def test_which_hand_written_entries_launch_a_kernel() -> None:
    assert {entry.short_name: entry.cuda for entry in HAND_WRITTEN} == {
        "decode_plan_size": False,
        "decode_plan": False,
        "merge_states": True,
        "prep_global_prompt": True,
        "prep_global_decode": True,
        "prep_sliding_prompt": True,
        "prep_sliding_decode": True,
        "gelu_mul": True,
    }
    for entry in HAND_WRITTEN:
        assert (ROOT / "csrc" / entry.source).is_file()


def test_the_hash_of_a_hand_written_entry_ignores_where_it_is_written() -> None:
    moved = replace(PLAN, source="elsewhere.cu", refusals=(), empty_when="batch", doc="")
    assert moved.signature_hash == PLAN.signature_hash != PLAN_SIZE.signature_hash
    assert isinstance(PLAN, HandWritten) and isinstance(PLAN, Entry)


def test_a_plan_is_asked_for_what_it_is_sized_for() -> None:
    """A server fills both structs from the same numbers."""
    sizes = {field.name: field for field in PLAN_SIZE.struct.fields}
    plan = {field.name: field for field in PLAN.struct.fields}
    shared = ("max_batch", "max_slots", "num_q_heads", "num_kv_heads", "page_size", "page_format", "sm_count", "chunk_tokens")
    assert all(sizes[name] == plan[name] for name in shared)


def test_public_symbols_are_sorted_and_ours() -> None:
    assert abi.public_symbols(table({"name": "z_prefill"}, {"name": "a_prefill"})) == (
        "tilepress_a_prefill",
        "tilepress_build_info",
        "tilepress_gelu_mul",
        "tilepress_last_error",
        "tilepress_merge_states",
        "tilepress_mode_pool_bytes",
        "tilepress_parse_mode",
        "tilepress_pool_bytes",
        "tilepress_prep_global_decode",
        "tilepress_prep_global_prompt",
        "tilepress_prep_sliding_decode",
        "tilepress_prep_sliding_prompt",
        "tilepress_supports",
        "tilepress_version",
        "tilepress_z_prefill",
    )


def test_prototypes() -> None:
    function = Function("tilepress_f", CType.TEXT, ((CType.TEXT, "entry"), (CType.I32, "n")), "")
    assert function.prototype == "const char *tilepress_f(const char *entry, int32_t n)"
    assert replace(function, params=(), returns=CType.I32).prototype == "int32_t tilepress_f(void)"


def test_codes_are_distinct_and_fixed() -> None:
    """Numbers that callers were compiled with."""
    assert {code.name: code.value for code in abi.RETURN_CODES} == {
        "OK": 0,
        "INVALID_ARGUMENT": 1,
        "UNSUPPORTED": 2,
        "DEVICE": 3,
        "CUDA": 4,
        "STUB": 5,
    }
    assert {code.name: code.value for code in abi.PAGE_FORMATS} == {"SPLIT": 1, "FOLDED": 2}
    assert {code.name: code.value for code in abi.MODE_CODES} == {"INCUMBENT": 1, "TILELANG": 2, "TILELANG640": 3}
    assert {code.name: code.value for code in abi.STATUS_BITS} == {
        "BAD_PAGE_ID": 1,
        "BAD_INDEX": 2,
        "BAD_WINDOW": 4,
        "BAD_POSITION": 8,
    }


def test_names_a_kernel_may_use() -> None:
    names = abi.kernel_names("prefill")
    assert {"q", "out", "page_ids", "sm_scale", "pool_tiles", "q_tiles", "want_lse"} <= names
    assert "Q" not in names


def test_what_a_plan_and_a_workspace_hold_is_a_launch_value() -> None:
    """A kernel names the parts; a caller passes the whole."""
    names = abi.kernel_names("decode")
    assert {"plan_header", "plan_requests", "plan_items", "max_items", "partial_out", "partial_sums"} <= names
    assert not set(DECODE.derived) & {field.name for field in DECODE.struct.fields}
