"""What the preps and the activation refuse, on a host without a GPU: the stub archive, called through ctypes.

A call that nothing refuses reaches the stub's own refusal, so its code says that every check was passed.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen import abi
from codegen.abi import CType, HandWritten

pytestmark = pytest.mark.build

OK, INVALID, UNSUPPORTED, STUB = 0, 1, 2, 5
SPLIT, FOLDED = 1, 2
ENTRIES = {entry.short_name: entry for entry in abi.HAND_WRITTEN if entry.short_name.startswith(("prep_", "gelu_"))}
GLOBAL, SLIDING = ("prep_global_prompt", "prep_global_decode"), ("prep_sliding_prompt", "prep_sliding_decode")
PREPS = (*GLOBAL, *SLIDING)
NUMBERS = {
    CType.U64: ctypes.c_uint64,
    CType.I64: ctypes.c_int64,
    CType.I32: ctypes.c_int32,
    CType.U32: ctypes.c_uint32,
    CType.F32: ctypes.c_float,
}


def make_struct(entry: HandWritten) -> type[ctypes.Structure]:
    layout = [(field.name, NUMBERS.get(field.type, ctypes.c_uint64)) for field in entry.struct.fields]
    return type("Args", (ctypes.Structure,), {"_fields_": layout})


STRUCTS = {name: make_struct(entry) for name, entry in ENTRIES.items()}


def valid(name: str) -> dict[str, Any]:
    """Arguments that every check accepts: one fused row of q, k and v, or of gate and up, 16 columns of nobody in front."""
    values: dict[str, Any] = {"struct_size": ctypes.sizeof(STRUCTS[name])}
    address = itertools.count(0x10000, 0x10000)
    values |= {field.name: next(address) for field in ENTRIES[name].struct.fields if field.type.pointer}
    if name == "gelu_mul":
        bands = {"gate": 1024, "up": 1024}
        values |= {"rows": 3, "columns": 1024}
    else:
        head_dim = 512 if name in GLOBAL else 256
        bands = {"q": 8 * head_dim, "k": 2 * head_dim, "v": 2 * head_dim}
        values |= {"num_pages": 10, "rows_per_page": 3 * 128, "layer_row": 128, "rows": 3, "num_page_ids": 4, "batch": 2}
        values |= {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": head_dim, "page_size": 64, "page_format": SPLIT}
        values |= {"k_eq_v": 0, "rotary": 128, "max_positions": 100, "eps": 1e-6}
        if "decode" in name:
            del values["batch"]
    offset, stride = 16, 16 + sum(bands.values())
    for band, length in bands.items():
        values |= {f"{band}_band_offset": offset, f"{band}_band_length": length, f"{band}_row_stride": stride}
        offset += length
    return values


Call = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def call(stub_library: Path, compiler: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Call:
    """`call(name, field=value, …)`: code and message of a call with valid arguments but for those given."""
    folder = tmp_path_factory.mktemp("linked")
    shared, source = folder / "stub.so", folder / "calls.c"
    # The archive's symbols are hidden: a shared object of it exports nothing of its own accord.
    calls = [f"int call_{name}(const void *args) {{ return tilepress_{name}(args); }}" for name in ENTRIES]
    calls.append("const char *call_last_error(void) { return tilepress_last_error(); }")
    source.write_text("\n".join(['#include "tilepress.h"', *calls, ""]), encoding="utf-8")
    archive = stub_library / "lib" / "libtilepress.a"
    compiler("-x", "c", "-fPIC", f"-I{stub_library / 'include'}", "-c", source, "-o", folder / "calls.o")
    compiler("-shared", folder / "calls.o", archive, "-Wl,-z,defs", "-o", shared)
    library = ctypes.CDLL(str(shared))
    library.call_last_error.restype = ctypes.c_char_p

    def run(name: str, **changes: Any) -> tuple[int, str]:
        args = STRUCTS[name](**(valid(name) | changes))
        code = getattr(library, f"call_{name}")(ctypes.byref(args))
        return code, library.call_last_error().decode() if code else ""

    return run


def assert_refused(call: Call, name: str, argument: str, code: int = INVALID, /, **changes: Any) -> None:
    found, message = call(name, **changes)
    assert found == code, f"{name} {changes}: code {found}, {message}"
    assert message.startswith(f"tilepress_{name}: ")
    assert re.search(rf"\b{argument}\b", message), message


FOLD = {"page_format": FOLDED, "k_eq_v": 1, "v_in": 0}


@pytest.mark.parametrize("name", ENTRIES)
def test_valid_arguments_pass_every_check(call: Call, name: str) -> None:
    code, message = call(name)
    assert code == STUB, message
    assert call(name, rows=0)[0] == OK


@pytest.mark.parametrize("name", GLOBAL)
def test_other_valid_arguments(call: Call, name: str) -> None:
    for changes in (FOLD, {"k_eq_v": 1, "v_in": 0}, {"rotary": 512}, {"rotary": 2}, {"kv_origin": 0, "status": 0}):
        assert call(name, **changes)[0] == STUB, changes
    # A layer that shares an earlier one's KV: Q alone.
    alone = dict.fromkeys(("k_in", "v_in", "k_norm", "pool", "page_ids", "page_indptr"), 0)
    assert call(name, **alone)[0] == STUB


def number_cases(name: str) -> Iterator[tuple[str, int]]:
    """Every number field with the values just outside its limits, and one that is no multiple."""
    for field in ENTRIES[name].struct.fields:
        if field.type not in (CType.I32, CType.I64, CType.U32):
            continue
        if field.minimum is not None and field.type is not CType.U32:
            yield field.name, field.minimum - 1
        if field.maximum is not None:
            yield field.name, field.maximum + max(field.multiple, 1)
        if field.multiple > 1:
            yield field.name, (field.minimum or 0) + field.multiple + 1


@pytest.mark.parametrize("name", ENTRIES)
def test_a_number_outside_its_limits(call: Call, name: str) -> None:
    cases = list(number_cases(name))
    assert len(cases) > 10
    for field, value in cases:
        assert_refused(call, name, field, **{field: value})


@pytest.mark.parametrize("name", ENTRIES)
def test_pointers(call: Call, name: str) -> None:
    for field in ENTRIES[name].struct.fields:
        if not field.type.pointer or field.name == "stream":
            continue
        assert_refused(call, name, field.name, **{field.name: 0x10000 + field.align // 2})
        if not field.optional:
            assert_refused(call, name, field.name, **{field.name: 0})


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("change", [-8, 8, -(1 << 40)])
def test_a_struct_of_another_size(call: Call, name: str, change: int) -> None:
    size = ctypes.sizeof(STRUCTS[name])
    assert_refused(call, name, "struct_size", struct_size=(size + change) % (1 << 64))


@pytest.mark.parametrize("name", ENTRIES)
def test_a_band_past_its_row(call: Call, name: str) -> None:
    values = valid(name)
    for band in [field.removesuffix("_band_offset") for field in values if field.endswith("_band_offset")]:
        length, stride = values[f"{band}_band_length"], values[f"{band}_row_stride"]
        offset = f"{band}_band_offset"
        assert call(name, **{offset: stride - length})[0] == STUB
        assert_refused(call, name, offset, **{offset: stride - length + 8})
        assert_refused(call, name, offset, **{offset: stride + 8})
        assert_refused(call, name, f"{band}_row_stride", **{offset: 0, f"{band}_row_stride": length - 8})
        assert_refused(call, name, f"{band}_band_length", **{f"{band}_band_length": length + 8})
        assert_refused(call, name, f"{band}_band_length", **{f"{band}_band_length": length - 8})


@pytest.mark.parametrize("name", PREPS)
def test_geometry(call: Call, name: str) -> None:
    assert_refused(call, name, "head_dim", UNSUPPORTED, head_dim=128)
    assert_refused(call, name, "page_size", UNSUPPORTED, page_size=32)
    assert_refused(call, name, "page_format", page_format=3)
    assert_refused(call, name, "num_q_heads", num_q_heads=7)
    assert_refused(call, name, "layer_row", layer_row=320)
    assert_refused(call, name, "num_pages", num_pages=1 << 30)
    assert_refused(call, name, "rotary", rotary=63)
    assert_refused(call, name, "rotary", rotary=(512 if name in GLOBAL else 256) + 2)
    for eps in (0.0, -1e-6, float("nan"), float("inf")):
        assert_refused(call, name, "eps", eps=eps)


@pytest.mark.parametrize("name", GLOBAL)
def test_folded_pages(call: Call, name: str) -> None:
    assert_refused(call, name, "k_eq_v", page_format=FOLDED)
    assert_refused(call, name, "rotary", **FOLD, rotary=130)


@pytest.mark.parametrize("name", SLIDING)
def test_what_sliding_layers_have_not(call: Call, name: str) -> None:
    assert_refused(call, name, "k_eq_v", k_eq_v=1, v_in=0)
    assert_refused(call, name, "page_format", UNSUPPORTED, page_format=FOLDED)


@pytest.mark.parametrize("name", PREPS)
def test_pointers_that_belong_together(call: Call, name: str) -> None:
    for missing in ("v_in", "k_norm", "pool", "page_indptr", "page_ids"):
        assert_refused(call, name, missing, **{missing: 0})
    assert_refused(call, name, "v_in", k_in=0)
    if name in GLOBAL:
        assert_refused(call, name, "v_in", k_eq_v=1)
        assert_refused(call, name, "k_eq_v", k_eq_v=1, v_in=0, k_in=0)
    assert call(name, page_ids=0, num_page_ids=0)[0] == STUB
