"""What the preps and the activation refuse, on a host without a GPU, and what they launch.

Refusals are the stub's: a call that nothing refuses reaches the stub's own, so its code says that every check was passed.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from codegen import abi
from codegen.abi import CType
from codegen.abi.prep import BULK_BYTES

from .calls import CUDA, DEVICE, FOLDED, INVALID, OK, SPLIT, STRUCTS, STUB, UNSUPPORTED, Library

pytestmark = pytest.mark.build

ENTRIES = {entry.short_name: entry for entry in abi.HAND_WRITTEN if entry.short_name.startswith(("prep_", "gelu_"))}
GLOBAL, SLIDING = ("prep_global_prompt", "prep_global_decode"), ("prep_sliding_prompt", "prep_sliding_decode")
PREPS = (*GLOBAL, *SLIDING)


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
def call(stub: Library) -> Call:
    """`call(name, field=value, …)`: code and message of a call with valid arguments but for those given."""

    def run(name: str, **changes: Any) -> tuple[int, str]:
        return stub.call(name, STRUCTS[name](**(valid(name) | changes)))

    return run


def assert_refused(call: Call, name: str, argument: str, code: int = INVALID, /, **changes: Any) -> None:
    found, message = call(name, **changes)
    assert found == code, f"{name} {changes}: code {found}, {message}"
    assert message.startswith(f"tilepress_{name}: ")
    assert re.search(rf"\b{argument}\b", message), message


Q_ALONE = dict.fromkeys(("k_in", "v_in", "k_norm", "pool", "page_ids", "page_indptr"), 0)
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
    assert call(name, **Q_ALONE)[0] == STUB


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


# A full build


def build(name: str, **changes: Any) -> ctypes.Structure:
    return STRUCTS[name](**(valid(name) | changes))


@pytest.mark.usefixtures("without_a_driver")
@pytest.mark.parametrize("name", ENTRIES)
def test_both_tiers_refuse_the_same_before_a_cuda_call(name: str, real: Library, stub: Library) -> None:
    for field, value in number_cases(name):
        found = real.call(name, build(name, **{field: value}))
        assert found[0] == INVALID
        assert found == stub.call(name, build(name, **{field: value}))
    assert real.fake("calls").value == 0


@pytest.mark.usefixtures("without_a_driver")
@pytest.mark.parametrize("name", ENTRIES)
def test_without_rows_nothing_is_done(name: str, real: Library, stub: Library) -> None:
    absent = {field.name: 0 for field in ENTRIES[name].struct.fields if field.type.pointer}
    for library in (real, stub):
        assert library.call(name, build(name, rows=0, **absent)) == (OK, "")
    assert real.fake("calls").value == 0


@pytest.mark.usefixtures("without_a_driver")
@pytest.mark.parametrize("name", ENTRIES)
def test_accepted_arguments_reach_the_device_check(name: str, real: Library) -> None:
    assert real.call(name, build(name)) == (CUDA, "cudaGetDevice: a made-up error")
    assert real.fake("calls").value == 1
    real.fake("error").value = 0
    real.fake("major").value = 8
    assert real.call(name, build(name)) == (
        DEVICE,
        f"tilepress_{name}: device 0 has compute capability 8.0; this library is built for 9.0",
    )
    assert real.fake("launches").value == 0


# Of 8 query heads and 2 KV heads. A block is 8 warps, one a token. A warp holds one row of 512 columns, or two of 256: it takes
# two of them of Q, one of K and V.
Q_BLOCKS = dict.fromkeys(GLOBAL, 4) | dict.fromkeys(SLIDING, 2)
KV_BLOCKS = dict.fromkeys(GLOBAL, 2) | dict.fromkeys(SLIDING, 1)


def launched(real: Library, name: str, dynamic_shared: int = 0, **changes: Any) -> tuple[list[int], list[int]]:
    """Grid and block of the one launch of a call."""
    real.without_a_driver()
    real.fake("error").value = 0
    assert real.call(name, build(name, stream=0xABC0, **changes)) == (OK, "")
    (launch,) = real.launches()
    assert (launch.stream, launch.dynamic_shared) == (0xABC0, dynamic_shared)
    return list(launch.grid), list(launch.block)


@pytest.mark.parametrize("name", PREPS)
def test_a_prep_is_one_launch(name: str, real: Library) -> None:
    q, kv = Q_BLOCKS[name], KV_BLOCKS[name]
    assert launched(real, name) == ([q + kv, 1, 1], [256, 1, 1])
    assert launched(real, name, rows=8) == ([q + kv, 1, 1], [256, 1, 1])
    assert launched(real, name, rows=17) == ([q + kv, 3, 1], [256, 1, 1])
    assert launched(real, name, **Q_ALONE) == ([q, 1, 1], [256, 1, 1])
    if "decode" in name:
        assert launched(real, name, rows=2**31 - 1) == ([q + kv, 65535, 1], [256, 1, 1])


def heads(name: str, q: int, kv: int) -> dict[str, int]:
    """Arguments of that many heads, in rows of q, k and v."""
    head_dim = 512 if name in GLOBAL else 256
    bands = {"q": q * head_dim, "k": kv * head_dim, "v": kv * head_dim}
    changes = {"num_q_heads": q, "num_kv_heads": kv}
    changes |= {f"{band}_band_length": length for band, length in bands.items()}
    return (
        changes | {f"{band}_row_stride": 16 + sum(bands.values()) for band in bands} | {"k_band_offset": 0, "v_band_offset": 0}
    )


@pytest.mark.parametrize("name", ("prep_global_prompt", "prep_sliding_prompt"))
def test_a_prep_of_many_rows_goes_through_shared_memory(name: str, real: Library) -> None:
    """As many blocks of 4 warps share a token's heads as leave a warp 7 KB of rows at most."""
    row = 1024 if name in GLOBAL else 512
    few = -(-BULK_BYTES // (10 * row))  # of 8 query heads and 2 KV heads
    q, kv = Q_BLOCKS[name], KV_BLOCKS[name]
    assert launched(real, name, rows=few - 1) == ([q + kv, -(-(few - 1) // 8), 1], [256, 1, 1])
    assert launched(real, name, 4 * (2 + 1 + 1) * row, rows=few) == ([few, 1, 1], [128, 1, 1])
    assert launched(real, name, 4 * 2 * row, rows=2 * few, **Q_ALONE) == ([2 * few, 1, 1], [128, 1, 1])
    assert launched(real, name, 4 * 4 * row, rows=2**31 - 1) == ([2**31 - 1, 1, 1], [128, 1, 1])
    wide = heads(name, 32, 16)
    blocks = 4 if name in GLOBAL else 2
    assert launched(real, name, 4 * 4096, rows=few, **wide) == ([blocks * few, 1, 1], [128, 1, 1])
    # More blocks than a grid has: through registers after all.
    assert launched(real, name, rows=2**31 - 1, **wide) == ([8 * blocks, 65535, 1], [256, 1, 1])


def test_a_folded_prep_of_many_rows_holds_whole_pool_rows(real: Library) -> None:
    folded = heads("prep_global_prompt", 32, 4) | FOLD
    found = launched(real, "prep_global_prompt", 4 * (4 * 1024 + 1024 + 1280), rows=10_602, **folded)
    assert found == ([2 * 10_602, 1, 1], [128, 1, 1])


@pytest.mark.parametrize("name", ("prep_global_prompt", "prep_sliding_prompt"))
def test_a_prompt_prep_without_requests_launches_nothing(name: str, real: Library) -> None:
    real.without_a_driver()
    real.fake("error").value = 0
    assert real.call(name, build(name, batch=0)) == (OK, "")
    assert real.fake("launches").value == 0


def test_an_activation_is_one_launch(real: Library) -> None:
    # A thread has 8 columns, a block 128 threads.
    assert launched(real, "gelu_mul") == ([1, 3, 1], [128, 1, 1])
    wide = {"columns": 1032, "gate_band_length": 1032, "up_band_length": 1032, "gate_row_stride": 4096, "up_row_stride": 4096}
    assert launched(real, "gelu_mul", **wide) == ([2, 3, 1], [128, 1, 1])
    assert launched(real, "gelu_mul", rows=100_000) == ([1, 65535, 1], [128, 1, 1])
