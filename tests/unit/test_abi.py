"""The description of the entries: the struct's layout by hand, and what a signature hash depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from samples import GOLDEN, table

from codegen import abi
from codegen.abi import CType, Entry, Field, Function, OperationAbi, Struct
from codegen.kernels import OPERATIONS


def by_hand() -> list[tuple[int, int, str, str]]:
    """Offset, size, name and C type of every field, from the hand-written list."""
    lines = (GOLDEN / "tilepress_prefill_args.txt").read_text().splitlines()
    rows = [line.split(None, 3) for line in lines if not line.startswith("#")]
    return [(int(offset), int(size), name, ctype) for offset, size, name, ctype in rows]


def test_layout_of_the_prefill_arguments() -> None:
    found = []
    offset = 0
    for field in abi.PREFILL.struct.fields:
        # Aligned to its size where it stands, so a C compiler puts no padding before it.
        assert offset % field.type.size == 0
        found.append((offset, field.type.size, field.name, field.type.c))
        offset += field.type.size
    assert found == by_hand()
    assert offset == 160
    assert offset % 8 == 0


def test_every_struct_starts_with_its_size() -> None:
    for operation in abi.OPERATION_ABIS.values():
        first, *rest = operation.struct.fields
        assert (first.name, first.type) == ("struct_size", CType.U64)
        assert len({field.name for field in operation.struct.fields}) == len(rest) + 1


def test_every_field_is_documented() -> None:
    for field in abi.PREFILL.struct.fields:
        assert field.doc
        if field.type.pointer:
            assert field.memory is not None, field.name
            assert field.shape or field.name == "stream"
        else:
            assert not field.shape and field.memory is None and not field.optional


def test_every_operation_has_its_description() -> None:
    assert {name: operation.name for name, operation in abi.OPERATION_ABIS.items()} == {name: name for name in OPERATIONS}


SIZES = {
    CType.U64: 8,
    CType.I64: 8,
    CType.I32: 4,
    CType.U32: 4,
    CType.F32: 4,
    CType.IN: 8,
    CType.OUT: 8,
    CType.IN_I32: 8,
    CType.OUT_U32: 8,
    CType.OUT_F32: 8,
    CType.TEXT: 8,
}


def test_sizes_of_types() -> None:
    assert {ctype: ctype.size for ctype in CType} == SIZES


@pytest.mark.parametrize(
    ("ctype", "declaration", "rust"),
    [
        (CType.I64, "int64_t n", "i64"),
        (CType.F32, "float n", "f32"),
        (CType.IN, "const void *n", "*const c_void"),
        (CType.OUT, "void *n", "*mut c_void"),
        (CType.IN_I32, "const int32_t *n", "*const i32"),
        (CType.OUT_F32, "float *n", "*mut f32"),
        (CType.TEXT, "const char *n", "*const c_char"),
    ],
)
def test_declarations(ctype: CType, declaration: str, rust: str) -> None:
    assert (ctype.declare("n"), ctype.rust) == (declaration, rust)


# The signature hash


FIELDS = (
    abi.STRUCT_SIZE,
    Field("q", CType.IN, "queries", "bf16 [rows]", abi.Memory.DEVICE, align=16),
    Field("rows", CType.I32, "rows of q", minimum=0),
    Field("batch", CType.I32, "requests", minimum=0),
)
OPERATION = OperationAbi("prefill", "An operation.", Struct("sample_args", "Arguments.", FIELDS), (), ())


def entry(*fields: Field, **changes: object) -> Entry:
    """An entry over a small struct with these fields, or the default ones, and its operation changed."""
    struct = replace(OPERATION.struct, fields=fields or FIELDS)
    return Entry(table().family[0], replace(OPERATION, **{"struct": struct, **changes}))  # type: ignore[arg-type]


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
    hashes = [entry(*fields).signature_hash for fields in CHANGED.values()]
    assert len(set(hashes)) == len(CHANGED)


def test_another_name_changes_the_hash() -> None:
    other = Entry(table({"name": "other_prefill"}).family[0], OPERATION)
    assert other.signature_hash != entry().signature_hash
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
    assert [e.name for e in abi.entries(two)] == ["tilepress_b_prefill", "tilepress_a_prefill"]
    assert [e.prototype for e in abi.entries(two)] == [
        "int tilepress_b_prefill(const tilepress_prefill_args *args)",
        "int tilepress_a_prefill(const tilepress_prefill_args *args)",
    ]
    assert [struct.name for struct in abi.structs(two)] == ["tilepress_prefill_args"]


def test_public_symbols_are_sorted_and_ours() -> None:
    assert abi.public_symbols(table({"name": "z_prefill"}, {"name": "a_prefill"})) == (
        "tilepress_a_prefill",
        "tilepress_build_info",
        "tilepress_last_error",
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
    formats = {code.name: code.value for code in abi.PAGE_FORMATS}
    assert formats["SPLIT"] == 1
    assert len(set(formats.values())) == len(formats)
    assert {code.name: code.value for code in abi.STATUS_BITS} == {"BAD_PAGE_ID": 1, "BAD_INDEX": 2}


def test_names_a_kernel_may_use() -> None:
    names = abi.kernel_names("prefill")
    assert {"q", "out", "page_ids", "sm_scale", "pool_tiles", "q_tiles", "want_lse"} <= names
    assert "Q" not in names
