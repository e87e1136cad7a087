"""What the prefill refuses, on a host without a GPU: the stub and the real library, linked to a CUDA runtime that only counts.

The refusals, their codes and the geometry of the launch are written by hand from design.md and csrc/prefill.h. The other
entries' are in test_entry_refusals.py.
"""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from .calls import (
    CUDA,
    DEVICE,
    FOLDED,
    INT32_MAX,
    INVALID,
    OK,
    PREFILL_ARGS,
    SPLIT,
    STUB,
    STUB_MESSAGE,
    UNSUPPORTED,
    Library,
    arguments,
    host,
    kernel_record,
    layout,
)

pytestmark = [pytest.mark.build, pytest.mark.usefixtures("without_a_driver")]

ENTRY = "global_prefill"
INDPTR = (0, 65, 130)


def valid(**changes: Any) -> ctypes.Structure:
    """Arguments that every check accepts, with changes: two requests of 65 rows, group 8, the second layer of ten."""
    values: dict[str, Any] = {
        "struct_size": 160,
        "q": 0x10000,
        "out": 0x20000,
        "lse": 0x30000,
        "pool": 0x40000,
        "page_ids": 0x50000,
        "page_indptr": 0x60000,
        "last_page_len": 0x70000,
        "q_indptr": 0x80000,
        "q_indptr_host": host(*INDPTR),
        "status": 0x90000,
        "stream": 0,
        "num_pages": 10,
        "rows_per_page": 10 * 128,
        "layer_row": 128,
        "q_rows": 130,
        "num_page_ids": 4,
        "batch": 2,
        "num_q_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 512,
        "page_size": 64,
        "page_format": SPLIT,
        "sm_scale": 1.0,
        "reserved": 0,
    }
    return PREFILL_ARGS(**(values | changes))


def test_the_ctypes_struct_is_the_abis() -> None:
    assert ctypes.sizeof(PREFILL_ARGS) == 160


# What is refused: the changed arguments, the code, and the message after the entry's name.
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "struct_size zero": ({"struct_size": 0}, INVALID, "struct_size is 0, but this library's tilepress_prefill_args has 160"),
    "struct_size smaller": ({"struct_size": 152}, INVALID, "struct_size is 152"),
    "struct_size greater": ({"struct_size": 168}, INVALID, "struct_size is 168"),
    "struct_size huge": ({"struct_size": 2**64 - 1}, INVALID, "struct_size is 18446744073709551615"),
    **{
        f"{name} null": ({name: 0}, INVALID, f"{name} is null")
        for name in ("q", "out", "pool", "page_ids", "page_indptr", "last_page_len", "q_indptr")
    },
    **{f"{name} misaligned": ({name: 0x10008}, INVALID, f"{name} is not aligned to 16 bytes") for name in ("q", "out", "pool")},
    **{
        f"{name} misaligned": ({name: 0x10002}, INVALID, f"{name} is not aligned to 4 bytes")
        for name in ("lse", "page_ids", "page_indptr", "last_page_len", "q_indptr", "status")
    },
    "q_indptr_host misaligned": (
        {"q_indptr_host": host(0, 0, 0, 0) + 2},
        INVALID,
        "q_indptr_host is not aligned to 4 bytes",
    ),
    "num_pages zero": ({"num_pages": 0}, INVALID, "num_pages is 0; it must be 1 or more"),
    "num_pages negative": ({"num_pages": -1}, INVALID, "num_pages is -1"),
    "num_pages over": ({"num_pages": 2**31}, INVALID, "num_pages is 2147483648; it must be 2147483647 or less"),
    "num_pages far over": ({"num_pages": 2**63 - 1}, INVALID, "num_pages is 9223372036854775807"),
    "rows_per_page zero": ({"rows_per_page": 0}, INVALID, "rows_per_page is 0"),
    "rows_per_page negative": ({"rows_per_page": -64}, INVALID, "rows_per_page is -64"),
    "rows_per_page no multiple": ({"rows_per_page": 1279}, INVALID, "rows_per_page is 1279; it must be a multiple of 64"),
    "rows_per_page over": ({"rows_per_page": 2**31}, INVALID, "rows_per_page is 2147483648"),
    "layer_row negative": ({"layer_row": -64}, INVALID, "layer_row is -64; it must be 0 or more"),
    "layer_row no multiple": ({"layer_row": 32}, INVALID, "layer_row is 32; it must be a multiple of 64"),
    "layer_row over": ({"layer_row": 2**62}, INVALID, "layer_row is 4611686018427387904"),
    "layer past its page": (
        {"layer_row": 1280 - 64},
        INVALID,
        "layer_row 1216 and its 128 split rows run past rows_per_page, 1280",
    ),
    # 64 folded rows fit where 128 split ones do not.
    "folded layer past its page": (
        {"layer_row": 1280, "page_format": FOLDED},
        INVALID,
        "layer_row 1280 and its 64 folded rows run past rows_per_page, 1280",
    ),
    # 1,677,722 pages of 1,280 rows are 2,147,484,160: one page more than 2^31 - 1 rows hold.
    "pool of 2^31 rows": ({"num_pages": 1677722}, INVALID, "num_pages 1677722 of rows_per_page 1280"),
    "q_rows negative": ({"q_rows": -1}, INVALID, "q_rows is -1; it must be 0 or more"),
    "num_page_ids negative": ({"num_page_ids": -1}, INVALID, "num_page_ids is -1"),
    "num_page_ids over": ({"num_page_ids": 2**24 + 1}, INVALID, "num_page_ids is 16777217; it must be 16777216 or less"),
    "batch negative": ({"batch": -1}, INVALID, "batch is -1"),
    "num_q_heads zero": ({"num_q_heads": 0}, INVALID, "num_q_heads is 0"),
    "num_q_heads negative": ({"num_q_heads": -8}, INVALID, "num_q_heads is -8"),
    "num_q_heads no multiple": ({"num_q_heads": 30}, INVALID, "num_q_heads is 30, not a multiple of num_kv_heads, 4"),
    "group of no instance": (
        {"num_q_heads": 4},
        UNSUPPORTED,
        "num_q_heads / num_kv_heads, the group, is 1; compiled for 4, 8, 16",
    ),
    "num_kv_heads zero": ({"num_kv_heads": 0}, INVALID, "num_kv_heads is 0"),
    "num_kv_heads over": (
        {"num_q_heads": 65536 * 8, "num_kv_heads": 65536},
        INVALID,
        "num_kv_heads is 65536; it must be 65535 or less",
    ),
    "head_dim zero": ({"head_dim": 0}, INVALID, "head_dim is 0"),
    "head_dim of no instance": ({"head_dim": 256}, UNSUPPORTED, "head_dim is 256; compiled for 512"),
    "page_size negative": ({"page_size": -64}, INVALID, "page_size is -64"),
    "page_size of no instance": ({"page_size": 128}, UNSUPPORTED, "page_size is 128; compiled for 64"),
    "page_format zero": ({"page_format": 0}, INVALID, "page_format is 0; it must be 1 or more"),
    "page_format of no instance": ({"page_format": 99}, UNSUPPORTED, "page_format is 99; compiled for 1, 2"),
    "sm_scale zero": ({"sm_scale": 0.0}, INVALID, "sm_scale is 0; it must be finite and above 0"),
    "sm_scale negative": ({"sm_scale": -1.0}, INVALID, "sm_scale is -1"),
    "sm_scale infinite": ({"sm_scale": float("inf")}, INVALID, "sm_scale is inf"),
    "sm_scale NaN": ({"sm_scale": float("nan")}, INVALID, "sm_scale is "),
    "reserved": ({"reserved": 1}, INVALID, "reserved is 1"),
    "q_indptr_host starts below 0": ({"q_indptr_host": host(-1, 65, 130)}, INVALID, "q_indptr_host[0] is -1"),
    "q_indptr_host decreases": ({"q_indptr_host": host(0, 65, 64)}, INVALID, "q_indptr_host[2] is 64, below the 65 before it"),
    "q_indptr_host ends past q_rows": (
        {"q_indptr_host": host(0, 65, 131)},
        INVALID,
        "q_indptr_host ends at 131, past q_rows, 130",
    ),
    "a range over the int32 range": (
        {"q_indptr_host": host(-INT32_MAX, INT32_MAX, INT32_MAX)},
        INVALID,
        "q_indptr_host[0] is -2147483647",
    ),
    "65,536 tiles that a host copy shows": (
        {"batch": 1, "q_rows": 65535 * 64 + 1, "q_indptr_host": host(0, 65535 * 64 + 1)},
        INVALID,
        "are 65536 query tiles; at most 65535 in one call",
    ),
    "65,536 tiles that there may be": (
        {"batch": 1, "q_rows": 65535 * 64, "q_indptr_host": 0},
        INVALID,
        "q_rows 4194240 over batch 1 are 65536 query tiles",
    ),
    "counts at their greatest": ({"batch": INT32_MAX, "q_rows": INT32_MAX, "q_indptr_host": 0}, INVALID, "query tiles"),
}

# What is accepted, at the edges of what is refused.
ACCEPTED: dict[str, dict[str, Any]] = {
    "as is": {},
    "no lse and no status": {"lse": 0, "status": 0},
    "no page_ids": {"page_ids": 0, "num_page_ids": 0},
    "the last layer": {"layer_row": 1280 - 128},
    "the last folded layer": {"layer_row": 1280 - 64, "page_format": FOLDED},
    "a pool of just under 2^31 rows": {"num_pages": 1677721},
    "the most page ids": {"num_page_ids": 2**24},
    "a q_indptr_host that starts above 0": {"q_indptr_host": host(1, 65, 130)},
    "65,535 tiles that a host copy shows": {"batch": 1, "q_rows": 65535 * 64, "q_indptr_host": host(0, 65535 * 64)},
    "65,535 tiles that there may be": {"batch": 1, "q_rows": 65534 * 64 + 63, "q_indptr_host": 0},
    "group 4": {"num_q_heads": 16},
    "group 16": {"num_q_heads": 64},
    "the most KV heads": {"num_q_heads": 65535 * 8, "num_kv_heads": 65535},
    "the smallest scale": {"sm_scale": 1e-45},
}

# Calls with nothing to do: no pointer is looked at.
POINTERS = ("q", "out", "lse", "pool", "page_ids", "page_indptr", "last_page_len", "q_indptr", "status")
EMPTY: dict[str, dict[str, Any]] = {
    "no rows": {"q_rows": 0, "q_indptr_host": 0, **dict.fromkeys(POINTERS, 0)},
    "no requests": {"batch": 0, "q_indptr_host": 0, **dict.fromkeys(POINTERS, 0)},
    "requests without rows": {"q_indptr_host": host(0, 0, 0)},
}


@pytest.mark.parametrize("tier", ["real", "stub"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    changes, code, message = REFUSED[case]
    found = request.getfixturevalue(tier).call(ENTRY, valid(**changes))
    assert found[0] == code, found
    assert found[1].startswith(f"tilepress_global_prefill: {message}") or message in found[1], found
    assert found[1].startswith("tilepress_global_prefill: ")
    assert real.fake("calls").value == 0, "a CUDA call came before the refusal"


def test_both_tiers_say_the_same(real: Library, stub: Library) -> None:
    differing = [
        case
        for case, (changes, _, _) in REFUSED.items()
        if real.call(ENTRY, valid(**changes)) != stub.call(ENTRY, valid(**changes))
    ]
    assert differing == []


def test_every_field_has_a_refusal() -> None:
    """Only the stream has none: any value is a stream or the default one."""
    named = {name for changes, _, message in REFUSED.values() for name in changes if re.search(rf"\b{name}\b", message)}
    assert named | {"stream"} == {name for name, _ in layout("tilepress_prefill_args")}


@pytest.mark.parametrize("tier", ["real", "stub"])
def test_null_arguments(tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    assert request.getfixturevalue(tier).call(ENTRY, None) == (INVALID, "tilepress_global_prefill: args is null")
    assert real.fake("calls").value == 0


@pytest.mark.parametrize("tier", ["real", "stub"])
@pytest.mark.parametrize("case", EMPTY)
def test_nothing_to_do(case: str, tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    assert request.getfixturevalue(tier).call(ENTRY, valid(**EMPTY[case])) == (OK, "")
    assert real.fake("calls").value == 0


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_stub_refuses_last_and_says_why(case: str, stub: Library) -> None:
    code, message = stub.call(ENTRY, valid(**ACCEPTED[case]))
    assert (code, message) == (
        STUB,
        f"tilepress_global_prefill: {STUB_MESSAGE}",
    )


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted_arguments_reach_the_device_check(case: str, real: Library) -> None:
    assert real.call(ENTRY, valid(**ACCEPTED[case])) == (CUDA, "cudaGetDevice: a made-up error")
    assert real.fake("calls").value == 1


# The device


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"major": 8}, "device 0 has compute capability 8.0; this library is built for 9.0"),
        ({"major": 10, "device": 3}, "device 3 has compute capability 10.0; this library is built for 9.0"),
        ({"minor": 1}, "device 0 has compute capability 9.1; this library is built for 9.0"),
        # The folded kernels' 224 KB and the 1,024 bytes of their barriers.
        ({"shared_memory": 231423}, "device 0 offers a block 231423 bytes of shared memory; the kernel needs 231424"),
    ],
)
def test_another_device(state: dict[str, int], message: str, real: Library) -> None:
    for name, value in {"error": 0, **state}.items():
        real.fake(name).value = value
    assert real.call(ENTRY, valid()) == (DEVICE, f"tilepress_global_prefill: {message}")
    assert real.fake("launches").value == 0


def test_what_is_launched(real: Library, library: Path) -> None:
    real.fake("error").value = 0
    kernel = kernel_record(library, "global_prefill_g8_split")
    real.expect(kernel)
    assert real.call(ENTRY, valid(stream=0xABC0, status=0)) == (OK, "")
    (launch,) = real.launches()
    # Request 0 owns the tiles 0 and 1; request 1 starts at 65 // 64 + 1 = 2 and owns 2 and 3.
    assert list(launch.grid) == [8, 4, 4]
    assert list(launch.block) == [384, 1, 1]
    assert launch.dynamic_shared == 214016
    assert launch.stream == 0xABC0
    assert arguments(launch, kernel) == {
        "batch": 2,
        "last_page_len": 0x70000,
        "layer_tile": 2,
        "lse": 0x30000,
        "num_kv_heads": 4,
        "num_page_ids": 4,
        "num_pages": 10,
        "out": 0x20000,
        "page_ids": 0x50000,
        "page_indptr": 0x60000,
        "page_tiles": 20,
        "pool_tiles": 200,
        "q_indptr": 0x80000,
        "q_rows": 130,
        "q_tiles": 4,
        "resident_clusters": 17,  # the fake device's
        "status": 0,
        "want_lse": 1,
        "want_status": 0,
    }
    maps = real.maps()
    assert maps.keys() == {0x10000, 0x40000}
    q, pool = maps[0x10000], maps[0x40000]
    assert (q.rank, q.dims[:3], q.strides[:2], q.box[:3]) == (3, [512, 130, 32], [32 * 1024, 1024], [64, 64, 1])
    assert (pool.rank, pool.dims[:4]) == (4, [512, 64, 4, 200])
    assert (pool.strides[:3], pool.box[:4]) == ([4 * 1024, 1024, 4 * 64 * 1024], [64, 64, 1, 1])


def test_what_a_folded_call_launches(real: Library, library: Path) -> None:
    """The other kernel: rows of 640 columns, 1,280 bytes."""
    real.fake("error").value = 0
    kernel = kernel_record(library, "global_prefill_g8_folded")
    real.expect(kernel)
    assert real.call(ENTRY, valid(page_format=FOLDED, layer_row=192)) == (OK, "")
    (launch,) = real.launches()
    assert list(launch.grid) == [8, 4, 4]
    assert launch.dynamic_shared == 230400
    found = arguments(launch, kernel)
    assert (found["layer_tile"], found["page_tiles"], found["pool_tiles"]) == (3, 20, 200)
    pool = real.maps()[0x40000]
    assert (pool.rank, pool.dims[:4]) == (4, [640, 64, 4, 200])
    assert (pool.strides[:3], pool.box[:4]) == ([4 * 1280, 1280, 4 * 64 * 1280], [64, 64, 1, 1])


def test_without_a_host_copy_the_grid_covers_every_plan(real: Library) -> None:
    real.fake("error").value = 0
    assert real.call(ENTRY, valid(q_indptr_host=0)) == (OK, "")
    # 130 // 64 + 2: no two ranges over 130 rows own a tile past it.
    assert list(real.launches()[0].grid) == [8, 4, 4]


@pytest.mark.parametrize(("group", "kv_heads"), [(4, 2), (8, 1), (16, 2)])
@pytest.mark.parametrize(("page_format", "shared"), [(SPLIT, 214016), (FOLDED, 230400)])
def test_each_group_and_format_has_its_instance(
    group: int, kv_heads: int, page_format: int, shared: int, real: Library
) -> None:
    real.fake("error").value = 0
    changes = {"num_q_heads": group * kv_heads, "num_kv_heads": kv_heads, "page_format": page_format}
    assert real.call(ENTRY, valid(**changes)) == (OK, "")
    (launch,) = real.launches()
    assert (list(launch.grid), launch.dynamic_shared) == ([group, 4, kv_heads], shared)


def test_attributes_are_set_once_a_device_and_kernel(real: Library) -> None:
    real.fake("error").value = 0
    counts = []
    for device, heads in ((5, 32), (5, 32), (6, 32), (5, 16), (6, 32), (255, 32), (255, 32), (300, 32), (300, 32)):
        real.c.fake_reset()
        real.fake("device").value = device
        assert real.call(ENTRY, valid(num_q_heads=heads)) == (OK, "")
        counts.append(real.fake("attribute_calls").value)
    # 256 devices are remembered; beyond them it is set every time.
    assert counts == [1, 0, 1, 1, 0, 1, 0, 1, 1]


# The other functions


def test_version_and_build_info(real: Library, stub: Library) -> None:
    assert real.c.call_version() == stub.c.call_version() == b"0.1.0"
    info = [dict(pair.split("=") for pair in lib.c.call_build_info().decode().split()) for lib in (real, stub)]
    assert [list(pairs) for pairs in info] == [["version", "tier", "arch", "tilelang", "nvcc", "abi"]] * 2
    assert (info[0]["tier"], info[1]["tier"], info[1]["nvcc"]) == ("generate", "stub", "none")
    assert info[0]["nvcc"].startswith("13.")
    assert info[0] | {"tier": "", "nvcc": ""} == info[1] | {"tier": "", "nvcc": ""}
    assert (info[0]["arch"], info[0]["tilelang"]) == ("sm_90a", "0.1.15")


GEOMETRIES = {
    "served": (32, 4, 512, 64, SPLIT),
    "group 4": (8, 2, 512, 64, SPLIT),
    "group 16": (16, 1, 512, 64, SPLIT),
    "group 2": (16, 8, 512, 64, SPLIT),
    "no multiple": (30, 4, 512, 64, SPLIT),
    "no query heads": (0, 4, 512, 64, SPLIT),
    "no KV heads": (8, 0, 512, 64, SPLIT),
    "negative heads": (-8, -1, 512, 64, SPLIT),
    "too many KV heads": (65536 * 8, 65536, 512, 64, SPLIT),
    "another head_dim": (8, 1, 256, 64, SPLIT),
    "no head_dim": (8, 1, 0, 64, SPLIT),
    "another page": (8, 1, 512, 16, SPLIT),
    "a negative page": (8, 1, 512, -1, SPLIT),
    "folded": (32, 4, 512, 64, FOLDED),
    "group 2 folded": (16, 8, 512, 64, FOLDED),
    "another format": (8, 1, 512, 64, 99),
    "no format": (8, 1, 512, 64, 0),
}


@pytest.mark.parametrize("case", GEOMETRIES)
def test_supports_answers_as_the_entry_does(case: str, real: Library, stub: Library) -> None:
    """With tilepress_supports' own words: OK, or the code that the entry itself would return."""
    names = ("num_q_heads", "num_kv_heads", "head_dim", "page_size", "page_format")
    geometry = GEOMETRIES[case]
    asked = real.c.call_supports(b"tilepress_global_prefill", *geometry)
    assert asked == stub.c.call_supports(b"tilepress_global_prefill", *geometry)
    # A call without rows is accepted where its geometry is.
    refused, message = real.call(ENTRY, valid(q_rows=0, q_indptr_host=0, **dict(zip(names, geometry, strict=True))))
    assert asked == refused, message
    assert real.fake("calls").value == 0


def test_supports_knows_its_entries(real: Library) -> None:
    assert real.c.call_supports(b"tilepress_global_prefill", *GEOMETRIES["served"]) == OK
    assert real.c.call_supports(b"tilepress_prefill", *GEOMETRIES["served"]) == INVALID
    assert real.c.call_last_error() == b"entry 'tilepress_prefill' is not in this library"
    assert real.c.call_supports(None, *GEOMETRIES["served"]) == INVALID
    assert real.c.call_last_error() == b"entry is null; pass an entry's name"


def test_a_long_message_is_cut(real: Library) -> None:
    assert real.c.call_supports(b"x" * 5000, *GEOMETRIES["served"]) == INVALID
    assert real.c.call_last_error() == b"entry '" + b"x" * (511 - len("entry '"))


def test_the_message_is_the_threads_own(real: Library) -> None:
    refused = threading.Barrier(2)
    seen: dict[str, str] = {}

    def work(name: str) -> None:
        seen[f"{name} at first"] = real.c.call_last_error().decode()
        real.call(ENTRY, valid(**{name: -1}))
        refused.wait()
        seen[name] = real.c.call_last_error().decode()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("batch", "q_rows")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {
        "batch at first": "",
        "q_rows at first": "",
        "batch": "tilepress_global_prefill: batch is -1; it must be 0 or more",
        "q_rows": "tilepress_global_prefill: q_rows is -1; it must be 0 or more",
    }
