"""What the other entries refuse, on a host without a GPU, and what they launch: as test_refusals.py has it for the prefill.

Every refusal names the argument, comes before any CUDA call, and is the same in the stub.
"""

from __future__ import annotations

import ctypes
import re
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
    SPLIT,
    STRUCTS,
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

Changes = dict[str, Any]
Cases = dict[str, tuple[Changes, int, str]]

# Valid arguments

HEADS = {"num_q_heads": 32, "num_kv_heads": 4}
PAGE = {"page_size": 64, "page_format": SPLIT}
POOL = {"pool": 0x40000, "num_pages": 10, "rows_per_page": 10 * 128, "layer_row": 128}
# Two requests of 65 and 130 tokens, on 2 and 3 pages, planned for 132 multiprocessors.
PLANNED = {"batch": 2, "max_batch": 4, "max_slots": 0, "sm_count": 132, "chunk_tokens": 0, "window": 0}
# A request has at most 132 / 4 = 33 partials a KV head: 4 requests by 4 heads by 33.
SLOTS = 4 * 4 * 33
# A header of 16; eight words a request; eight an item, of which each CTA and each slot has one.
WORDS = 16 + 4 * 8 + (132 + SLOTS) * 8
# A partial of 8 heads: 512 columns, a maximum and a sum, in fp32.
WORKSPACE = SLOTS * 8 * (512 + 2) * 4


def plan_array(words: int = WORDS) -> int:
    """The address of an array for a plan."""
    return host(*[-1] * words)


def values(entry: str) -> Changes:
    """Arguments of `entry` that every check accepts."""
    if entry == "decode_plan":
        return {
            **PLANNED,
            **HEADS,
            **PAGE,
            "kv_len": host(65, 130),
            "page_indptr": host(0, 2, 5),
            "kv_origin": 0,
            "plan": plan_array(),
            "plan_words": WORDS,
        }
    if entry == "decode_plan_size":
        return {
            **{name: PLANNED[name] for name in ("max_batch", "max_slots", "sm_count", "chunk_tokens")},
            **HEADS,
            **PAGE,
            "head_dim": 512,
            "plan_words_out": host(-1, kind=ctypes.c_int64),
            "workspace_bytes_out": host(-1, kind=ctypes.c_int64),
        }
    if entry == "sliding_prefill":
        return {
            **POOL,
            **PAGE,
            "q": 0x10000,
            "out": 0x20000,
            "lse": 0x30000,
            "page_ids": 0x50000,
            "page_indptr": 0x60000,
            "last_page_len": 0x70000,
            "kv_origin": 0xA0000,
            "q_indptr": 0x80000,
            "q_indptr_host": host(0, 65, 130),
            "status": 0x90000,
            "q_rows": 130,
            "num_page_ids": 4,
            "batch": 2,
            "num_q_heads": 16,
            "num_kv_heads": 8,
            "head_dim": 256,
            "window_left": 511,
            "sm_scale": 1.0,
        }
    if entry == "merge_states":
        return {
            "partials": 0x10000,
            "partial_lse": 0x20000,
            "out": 0x30000,
            "lse": 0x40000,
            "source_stride": 5 * 16 * 512,
            "lse_stride": 5 * 16,
            "num_sources": 3,
            "num_rows": 5,
            "num_heads": 16,
            "head_dim": 512,
        }
    assert entry in ("global_decode", "sliding_decode")
    attention = {
        **POOL,
        **HEADS,
        **PAGE,
        "q": 0x10000,
        "out": 0x20000,
        "lse": 0x30000,
        "page_ids": 0x50000,
        "plan": 0x60000,
        "plan_host": 0,  # from the planner
        "workspace": 0x100000,
        "status": 0x90000,
        "workspace_bytes": WORKSPACE,
        "q_rows": 5,
        "row_offset": 3,
        "num_page_ids": 5,
        "head_dim": 512,
        "sm_scale": 1.0,
    }
    if entry == "global_decode":
        return attention
    return {**attention, "num_kv_heads": 16, "head_dim": 256, "workspace": 0, "workspace_bytes": 0}


def planned(library: Library, **changes: Any) -> int:
    """The address of a plan that the library's planner wrote."""
    args = build("decode_plan", **changes)
    assert library.call("decode_plan", args) == (OK, "")
    return int(args.plan)


def build(entry: str, **changes: Any) -> ctypes.Structure:
    """The valid arguments with changes."""
    struct = STRUCTS[entry]
    return struct(**({"struct_size": ctypes.sizeof(struct)} | values(entry) | changes))


def valid(library: Library, entry: str, changes: Changes) -> ctypes.Structure:
    """The valid arguments with changes; a decode's plan is planned, with what `planned` in the changes says."""
    changes = dict(changes)
    how = changes.pop("planned", {})
    if entry in ("global_decode", "sliding_decode") and "plan_host" not in changes:
        changes["plan_host"] = planned(library, **{"num_kv_heads": values(entry)["num_kv_heads"], **how})
    return build(entry, **changes)


# What is refused


def sizes(struct: str, size: int) -> Cases:
    return {
        "struct_size zero": ({"struct_size": 0}, INVALID, f"struct_size is 0, but this library's {struct} has {size} bytes"),
        "struct_size smaller": ({"struct_size": size - 8}, INVALID, f"struct_size is {size - 8}"),
        "struct_size greater": ({"struct_size": size + 8}, INVALID, f"struct_size is {size + 8}"),
    }


def nulls(*names: str) -> Cases:
    return {f"{name} null": ({name: 0}, INVALID, f"{name} is null") for name in names}


def misaligned(align: int, *names: str) -> Cases:
    address = 0x10000 + align // 2
    return {f"{name} misaligned": ({name: address}, INVALID, f"{name} is not aligned to {align} bytes") for name in names}


def below(minimum: int, *names: str) -> Cases:
    message = f"is {minimum - 1}; it must be {minimum} or more"
    return {f"{name} below {minimum}": ({name: minimum - 1}, INVALID, f"{name} {message}") for name in names}


def above(maximum: int, *names: str) -> Cases:
    message = f"is {maximum + 1}; it must be {maximum} or less"
    return {f"{name} above {maximum}": ({name: maximum + 1}, INVALID, f"{name} {message}") for name in names}


# Of every attention entry: the pool, the geometry, the scale.
ATTENTION: Cases = {
    **below(1, "num_pages", "rows_per_page", "num_q_heads", "num_kv_heads", "head_dim", "page_size", "page_format"),
    **below(0, "layer_row", "q_rows", "num_page_ids"),
    **above(2**31 - 1, "num_pages"),
    **above(2**24, "num_page_ids"),
    **above(65535, "num_kv_heads"),
    "rows_per_page no multiple": ({"rows_per_page": 1281}, INVALID, "rows_per_page is 1281; it must be a multiple of 64"),
    "layer_row no multiple": ({"layer_row": 32}, INVALID, "layer_row is 32; it must be a multiple of 64"),
    "layer past its page": (
        {"layer_row": 1216},
        INVALID,
        "layer_row 1216 and its 128 split rows run past rows_per_page, 1280",
    ),
    "pool of 2^31 rows": ({"num_pages": 1677722}, INVALID, "num_pages 1677722 of rows_per_page 1280 are 2^31 pool rows"),
    "sm_scale zero": ({"sm_scale": 0.0}, INVALID, "sm_scale is 0; it must be finite and above 0"),
    "sm_scale infinite": ({"sm_scale": float("inf")}, INVALID, "sm_scale is inf"),
    "sm_scale NaN": ({"sm_scale": float("nan")}, INVALID, "sm_scale is "),
    "page_size of no instance": ({"page_size": 128}, UNSUPPORTED, "page_size is 128; compiled for 64"),
}

# Of both planner entries: limits and the machine.
PLANNING: Cases = {
    **below(1, "max_batch", "num_q_heads", "num_kv_heads", "page_size", "page_format", "sm_count"),
    **below(0, "max_slots", "chunk_tokens"),
    **above(65535, "max_batch", "sm_count", "num_kv_heads"),
    "num_q_heads no multiple": ({"num_q_heads": 30}, INVALID, "num_q_heads is 30, not a multiple of num_kv_heads, 4"),
    "page_format of none": ({"page_format": 3}, INVALID, "page_format is 3, which is none"),
    "chunk_tokens no whole tiles": (
        {"chunk_tokens": 96, "max_slots": 100},
        INVALID,
        "chunk_tokens is 96, not whole tiles of page_size, 64",
    ),
    "chunk_tokens without max_slots": (
        {"chunk_tokens": 128},
        INVALID,
        "max_slots is 0, but chunk_tokens leaves their number to the lengths; declare it",
    ),
    "max_slots over": ({"max_slots": 2**24 + 1}, INVALID, "max_slots comes to 16777217; at most 16777216"),
    # 65,535 requests by 4 heads by 65,535 // 4 = 16,383 partials.
    "max_slots of the rule over": (
        {"max_batch": 65535, "sm_count": 65535},
        INVALID,
        "max_slots comes to 4294639620; at most 16777216",
    ),
}

REFUSED: dict[str, Cases] = {
    "global_decode": {
        **ATTENTION,
        **sizes("tilepress_decode_args", 160),
        **nulls("q", "out", "pool", "page_ids", "plan", "plan_host", "workspace"),
        **misaligned(16, "q", "out", "pool", "plan", "workspace"),
        **misaligned(4, "lse", "page_ids", "status"),
        **below(0, "workspace_bytes", "row_offset"),
        "plan_host misaligned": ({"plan_host": host(0, 0) + 2}, INVALID, "plan_host is not aligned to 4 bytes"),
        "plan_host no plan": (
            {"plan_host": host(*[0] * 16)},
            INVALID,
            "plan_host is no plan that this library's tilepress_decode_plan wrote",
        ),
        "plan_host of garbage": ({"plan_host": host(*[-1] * 16)}, INVALID, "plan_host is no plan"),
        "plan for other query heads": (
            {"planned": {"num_q_heads": 16}},
            INVALID,
            "num_q_heads is 32, but plan_host was built for 16",
        ),
        "plan for other KV heads": (
            {"planned": {"num_kv_heads": 8}},
            INVALID,
            "num_kv_heads is 4, but plan_host was built for 8",
        ),
        "plan for another page_size": (
            {"planned": {"page_size": 128}},
            INVALID,
            "page_size is 64, but plan_host was built for 128",
        ),
        "plan for another page_format": (
            {"planned": {"page_format": FOLDED}},
            INVALID,
            "page_format is 1, but plan_host was built for 2",
        ),
        "a folded call with a split plan": (
            {"page_format": FOLDED},
            INVALID,
            "page_format is 2, but plan_host was built for 1",
        ),
        "workspace_bytes too few": (
            {"workspace_bytes": WORKSPACE - 1},
            INVALID,
            f"workspace_bytes is {WORKSPACE - 1}; this plan needs {WORKSPACE}",
        ),
        "num_page_ids below the plan's": (
            {"num_page_ids": 4},
            INVALID,
            "num_page_ids is 4, but plan_host reaches into 5 page ids",
        ),
        "workspace_bytes zero": ({"workspace_bytes": 0}, INVALID, "workspace_bytes is 0; this plan needs"),
        "row_offset past q_rows": (
            {"row_offset": 4},
            INVALID,
            "row_offset 4 and the plan's batch 2 run past q_rows, 5",
        ),
        "row_offset at its greatest": (
            {"row_offset": INT32_MAX},
            INVALID,
            "row_offset 2147483647 and the plan's batch 2 run past q_rows, 5",
        ),
        "q_rows below the plan's batch": (
            {"row_offset": 0, "q_rows": 1},
            INVALID,
            "row_offset 0 and the plan's batch 2 run past q_rows, 1",
        ),
        "num_q_heads no multiple": ({"num_q_heads": 30}, INVALID, "num_q_heads is 30, not a multiple of num_kv_heads, 4"),
        "group of no instance": ({"num_q_heads": 4}, UNSUPPORTED, "the group, is 1; compiled for 4, 8, 16"),
        "head_dim of no instance": ({"head_dim": 256}, UNSUPPORTED, "head_dim is 256; compiled for 512"),
        "page_format of no instance": ({"page_format": 99}, UNSUPPORTED, "page_format is 99; compiled for 1, 2"),
        **below(0, "early"),
        **above(1, "early"),
    },
    "decode_plan_size": {
        **PLANNING,
        **sizes("tilepress_decode_plan_size_args", 64),
        **nulls("plan_words_out", "workspace_bytes_out"),
        **misaligned(8, "plan_words_out", "workspace_bytes_out"),
        # 2^24 slots of 2^31 - 1 heads of 2^31 - 1 columns of 4 bytes.
        "workspace of 2^63 bytes": (
            {"max_slots": 2**24, "num_q_heads": INT32_MAX, "num_kv_heads": 1, "head_dim": INT32_MAX},
            INVALID,
            "head_dim 2147483647 of 16777216 slots makes a workspace of 2^63 bytes or more",
        ),
        **below(1, "head_dim"),
        "reserved": ({"reserved": 1}, INVALID, "reserved is 1"),
    },
    "decode_plan": {
        **PLANNING,
        **sizes("tilepress_decode_plan_args", 88),
        **nulls("kv_len", "page_indptr", "plan"),
        **misaligned(4, "kv_len", "page_indptr", "kv_origin", "plan"),
        **below(0, "plan_words", "batch", "window"),
        **above(2**29, "window"),
        "plan_words too few": ({"plan_words": WORDS - 1}, INVALID, f"plan_words is {WORDS - 1}; this plan needs {WORDS}"),
        "batch past max_batch": ({"batch": 5}, INVALID, "batch is 5, past max_batch, 4"),
        # Request 0 has 2 pages, so 2 partials of each of 4 heads; request 1, 3 pages, needs 12 more.
        "slots past max_slots": ({"max_slots": 19}, INVALID, "max_slots is 19; request 1 needs slots up to 20"),
        "kv_len negative": ({"kv_len": host(65, -1)}, INVALID, "kv_len[1] is -1; it must be 0 or more"),
        "kv_len at its least": ({"kv_len": host(-(2**31), 1)}, INVALID, "kv_len[0] is -2147483648"),
        "page_indptr starts below 0": (
            {"page_indptr": host(-1, 2, 5)},
            INVALID,
            "page_indptr[0] and the next are -1 and 2; they must not decrease from 0",
        ),
        "page_indptr decreases": (
            {"page_indptr": host(0, 2, 1)},
            INVALID,
            "page_indptr[1] and the next are 2 and 1; they must not decrease",
        ),
        "page_indptr lists too few pages": (
            {"page_indptr": host(0, 2, 4)},
            INVALID,
            "page_indptr lists 2 pages for request 1, but its 130 tokens need 3",
        ),
        "page_indptr of a length at its greatest": (
            {"kv_len": host(65, INT32_MAX)},
            INVALID,
            "page_indptr lists 3 pages for request 1, but its 2147483647 tokens need 33554432",
        ),
        "kv_origin negative": ({"kv_origin": host(0, -64)}, INVALID, "kv_origin[1] is -64; it must be a multiple of page_size"),
        "kv_origin no multiple": (
            {"kv_origin": host(32, 0)},
            INVALID,
            "kv_origin[0] is 32; it must be a multiple of page_size, 64",
        ),
        "kv_origin past the first key": (
            {"kv_origin": host(0, 64)},
            INVALID,
            "kv_origin[1] is 64, past 0, the first key that its row sees",
        ),
    },
    "sliding_prefill": {
        **ATTENTION,
        **sizes("tilepress_sliding_prefill_args", 168),
        **nulls("q", "out", "pool", "page_ids", "page_indptr", "last_page_len", "q_indptr"),
        **misaligned(16, "q", "out", "pool"),
        **misaligned(4, "lse", "page_ids", "page_indptr", "last_page_len", "kv_origin", "q_indptr", "status"),
        **below(0, "batch", "window_left"),
        **above(2**29, "window_left"),
        "window_left at its least": ({"window_left": -(2**31)}, INVALID, "window_left is -2147483648"),
        "q_indptr_host misaligned": ({"q_indptr_host": host(0, 0, 0, 0) + 2}, INVALID, "q_indptr_host is not aligned"),
        "q_indptr_host starts below 0": ({"q_indptr_host": host(-1, 65, 130)}, INVALID, "q_indptr_host[0] is -1"),
        "q_indptr_host decreases": (
            {"q_indptr_host": host(0, 65, 64)},
            INVALID,
            "q_indptr_host[2] is 64, below the 65 before it",
        ),
        "q_indptr_host ends past q_rows": (
            {"q_indptr_host": host(0, 65, 131)},
            INVALID,
            "q_indptr_host ends at 131, past q_rows, 130",
        ),
        # Tiles sit on multiples of 64 of the request's positions: its rows may lie in one tile more than they would fill.
        "65,536 tiles that a host copy shows": (
            {"batch": 1, "q_rows": 65534 * 64 + 1, "q_indptr_host": host(0, 65534 * 64 + 1)},
            INVALID,
            "q_rows 4194177 over batch 1 are 65536 query tiles; at most 65535 in one call",
        ),
        "65,536 tiles that there may be": (
            {"batch": 1, "q_rows": 65534 * 64, "q_indptr_host": 0},
            INVALID,
            "q_rows 4194176 over batch 1 are 65536 query tiles",
        ),
        "num_q_heads no multiple": ({"num_q_heads": 30}, INVALID, "num_q_heads is 30, not a multiple of num_kv_heads, 8"),
        "group of no instance": ({"num_q_heads": 8}, UNSUPPORTED, "the group, is 1; compiled for 2, 4, 8"),
        "head_dim of no instance": ({"head_dim": 512}, UNSUPPORTED, "head_dim is 512; compiled for 256"),
        "page_format of no instance": ({"page_format": FOLDED}, UNSUPPORTED, "page_format is 2; compiled for 1"),
    },
    "merge_states": {
        **sizes("tilepress_merge_states_args", 80),
        **nulls("partials", "partial_lse", "out"),
        **misaligned(16, "partials", "out"),
        **misaligned(4, "partial_lse", "lse"),
        **below(0, "source_stride", "lse_stride", "num_rows"),
        **below(1, "num_sources", "num_heads"),
        **below(8, "head_dim"),
        **above(1024, "num_sources"),
        "head_dim above 65536": ({"head_dim": 65544}, INVALID, "head_dim is 65544; it must be 65536 or less"),
        "head_dim no multiple": ({"head_dim": 12}, INVALID, "head_dim is 12; it must be a multiple of 8"),
        "source_stride no multiple": ({"source_stride": 40964}, INVALID, "source_stride is 40964; it must be a multiple of 8"),
        # A source is 5 rows of 16 heads of 512 columns.
        "source_stride too small": (
            {"source_stride": 40952},
            INVALID,
            "source_stride is 40952, below a source's 40960 elements",
        ),
        "lse_stride too small": ({"lse_stride": 79}, INVALID, "lse_stride is 79, below a source's 80 elements"),
        "no strides": ({"source_stride": 0, "lse_stride": 0}, INVALID, "source_stride is 0, below a source's 40960 elements"),
        # A block writes 256 chunks of 8 columns: 2^31 - 1 of them are four heads of 512 columns each.
        "one row too many": (
            {"num_rows": INT32_MAX, "num_heads": 5, "num_sources": 1},
            INVALID,
            "num_rows 2147483647 by num_heads 5 by head_dim 512 are too many for one call",
        ),
        "counts at their greatest": (
            {"num_rows": INT32_MAX, "num_heads": INT32_MAX, "head_dim": 65536, "num_sources": 1},
            INVALID,
            "num_rows 2147483647 by num_heads 2147483647 by head_dim 65536 are too many",
        ),
    },
}
FIELDS = {entry: [name for name, _ in layout(struct.__name__)] for entry, struct in STRUCTS.items()}
EVERY = [(entry, case) for entry, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize("tier", ["real", "stub"])
@pytest.mark.parametrize(("entry", "case"), EVERY)
def test_refused(entry: str, case: str, tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    changes, code, message = REFUSED[entry][case]
    library = request.getfixturevalue(tier)
    found = library.call(entry, valid(library, entry, changes))
    assert found[0] == code, found
    assert found[1].startswith(f"tilepress_{entry}: ") and message in found[1], found
    assert real.fake("calls").value == 0, "a CUDA call came before the refusal"


@pytest.mark.parametrize("entry", REFUSED)
def test_both_tiers_say_the_same(entry: str, real: Library, stub: Library) -> None:
    for changes, _, _ in REFUSED[entry].values():
        assert real.call(entry, valid(real, entry, changes)) == stub.call(entry, valid(stub, entry, changes))


@pytest.mark.parametrize("entry", REFUSED)
def test_every_field_has_a_refusal(entry: str) -> None:
    """Only the stream has none: any value is a stream or the default one."""
    messages = [message for _, _, message in REFUSED[entry].values()]
    named = {name for name in FIELDS[entry] if any(re.search(rf"\b{name}\b", message) for message in messages)}
    assert named | {"stream"} >= set(FIELDS[entry])


@pytest.mark.parametrize("tier", ["real", "stub"])
@pytest.mark.parametrize("entry", STRUCTS)
def test_null_arguments(entry: str, tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    assert request.getfixturevalue(tier).call(entry, None) == (INVALID, f"tilepress_{entry}: args is null")
    assert real.fake("calls").value == 0


# What comes first

ORDERS: dict[str, tuple[str, Changes, str]] = {
    "a struct of another size before its fields": ("global_decode", {"struct_size": 8, "num_pages": -1}, "struct_size"),
    "a number before a pointer": ("global_decode", {"q": 0, "row_offset": -1}, "row_offset"),
    "the geometry before the plan": ("global_decode", {"plan_host": 0, "page_size": 128}, "page_size"),
    "the pool before the plan": ("global_decode", {"plan_host": 0, "layer_row": 1216}, "layer_row"),
    "the plan before the workspace": ("global_decode", {"plan_host": host(*[0] * 16), "workspace_bytes": 0}, "plan_host"),
    "what is too small before what is absent": ("global_decode", {"workspace": 0, "workspace_bytes": 0}, "workspace_bytes"),
    "the strides before a pointer": ("merge_states", {"partials": 0, "lse_stride": 1}, "lse_stride"),
    "a request's length before its pages": ("decode_plan", {"kv_len": host(-1, 1), "page_indptr": host(0, -1, 5)}, "kv_len"),
    "a first request before a second": ("decode_plan", {"kv_len": host(65, -1), "kv_origin": host(32, 0)}, "kv_origin"),
}


@pytest.mark.parametrize("case", ORDERS)
def test_which_refusal_comes_first(case: str, real: Library) -> None:
    entry, changes, named = ORDERS[case]
    code, message = real.call(entry, valid(real, entry, changes))
    assert code in (INVALID, UNSUPPORTED)
    assert re.match(rf"tilepress_{entry}: {named}\b", message), message
    assert real.fake("calls").value == 0


# What is accepted, at the edges of what is refused

ACCEPTED: dict[str, dict[str, Changes]] = {
    "global_decode": {
        "as is": {},
        "no lse and no status": {"lse": 0, "status": 0},
        "no page_ids": {
            "page_ids": 0,
            "num_page_ids": 0,
            "planned": {"kv_len": host(0, 0), "page_indptr": host(0, 0, 0)},
        },
        "more page_ids than the plan reaches into": {"num_page_ids": 2**24},
        "no page of a request is there": {"planned": {"kv_len": host(0, 0), "page_indptr": host(0, 0, 0)}},
        "a folded plan": {"page_format": FOLDED, "planned": {"page_format": FOLDED}},
        "the last folded layer": {"page_format": FOLDED, "layer_row": 1216, "planned": {"page_format": FOLDED}},
        "just enough workspace": {"workspace_bytes": WORKSPACE},
        "early": {"early": 1},
        "the last row": {"q_rows": 2, "row_offset": 0},
        "row_offset at its greatest": {"q_rows": INT32_MAX, "row_offset": INT32_MAX - 2},
        "a smaller plan": {
            "planned": {"max_slots": 20, "plan_words": 16 + 4 * 8 + (132 + 20) * 8},
            "workspace_bytes": 20 * 8 * 514 * 4,
        },
    },
    "sliding_decode": {
        "as is": {},
        "early": {"early": 1},
        "a workspace that nothing needs": {"workspace": 0x100000, "workspace_bytes": 7},
        "a window": {"planned": {"window": 70}},
    },
    "sliding_prefill": {
        "as is": {},
        "no kv_origin": {"kv_origin": 0},
        "a window of one token": {"window_left": 0},
        "the widest window": {"window_left": 2**29},
        "65,535 tiles that a host copy shows": {
            "batch": 1,
            "q_rows": 65534 * 64,
            "q_indptr_host": host(0, 65534 * 64),
        },
        "65,535 tiles that there may be": {"batch": 1, "q_rows": 65533 * 64 + 63, "q_indptr_host": 0},
    },
    "merge_states": {
        "as is": {},
        "no lse": {"lse": 0},
        "one source, of no stride": {"num_sources": 1, "source_stride": 0, "lse_stride": 0},
        "the most sources": {"num_sources": 1024},
        "the narrowest head": {"head_dim": 8},
        # 65,536 columns are 32 blocks a row and head: 2^31 - 1 blocks hold 67,108,863 rows of one head.
        "the most rows": {"num_rows": 67108863, "num_heads": 1, "head_dim": 65536, "num_sources": 1},
    },
}
REACHED = [(entry, case) for entry, cases in ACCEPTED.items() for case in cases]


@pytest.mark.parametrize(("entry", "case"), REACHED)
def test_a_stub_refuses_last_and_says_why(entry: str, case: str, stub: Library) -> None:
    found = stub.call(entry, valid(stub, entry, ACCEPTED[entry][case]))
    assert found == (STUB, f"tilepress_{entry}: {STUB_MESSAGE}")


@pytest.mark.parametrize(("entry", "case"), REACHED)
def test_accepted_arguments_reach_the_device_check(entry: str, case: str, real: Library) -> None:
    assert real.call(entry, valid(real, entry, ACCEPTED[entry][case])) == (CUDA, "cudaGetDevice: a made-up error")
    assert real.fake("calls").value == 1


# The planner is host code: it plans on any host, in a stub too.
PLANNED_CASES: dict[str, Changes] = {
    "as is": {},
    "no requests": {"batch": 0, "kv_len": 0, "page_indptr": 0},
    "a request without tokens": {"kv_len": host(0, 130), "page_indptr": host(0, 0, 3)},
    "more pages than are needed": {"page_indptr": host(0, 10, 100)},
    "just enough slots": {"max_slots": 20, "plan_words": 16 + 4 * 8 + (132 + 20) * 8},
    "chunks": {"max_slots": 20, "chunk_tokens": 64, "plan_words": 16 + 4 * 8 + (132 + 20) * 8},
    "the widest window": {"window": 2**29},
    "fewer multiprocessors than KV heads": {"sm_count": 1},
}


@pytest.mark.parametrize("tier", ["real", "stub"])
@pytest.mark.parametrize("case", PLANNED_CASES)
def test_planned_on_any_host(case: str, tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    library = request.getfixturevalue(tier)
    assert library.call("decode_plan", build("decode_plan", **PLANNED_CASES[case])) == (OK, "")
    assert real.fake("calls").value == 0


@pytest.mark.parametrize("tier", ["real", "stub"])
def test_the_sizes_of_a_plan(tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    library = request.getfixturevalue(tier)
    words, workspace = ctypes.c_int64(), ctypes.c_int64()
    out = {"plan_words_out": ctypes.addressof(words), "workspace_bytes_out": ctypes.addressof(workspace)}
    assert library.call("decode_plan_size", build("decode_plan_size", **out)) == (OK, "")
    assert (words.value, workspace.value) == (WORDS, WORKSPACE) == (5328, 528 * 8 * 514 * 4)
    # 100 slots of 8 heads; 2 multiprocessors.
    changes = {"max_slots": 100, "sm_count": 2, "max_batch": 1, "chunk_tokens": 128}
    assert library.call("decode_plan_size", build("decode_plan_size", **out, **changes)) == (OK, "")
    assert (words.value, workspace.value) == (16 + 8 + (2 + 100) * 8, 100 * 8 * 514 * 4)
    assert real.fake("calls").value == 0


def test_a_refused_plan_stays_as_it_was(real: Library) -> None:
    array = (ctypes.c_int32 * WORDS)(*[7] * WORDS)
    for changes, _, _ in REFUSED["decode_plan"].values():
        if "plan" not in changes:
            assert real.call("decode_plan", build("decode_plan", plan=ctypes.addressof(array), **changes))[0] == INVALID
    assert set(array) == {7}


# Calls with nothing to do

DECODE_POINTERS = ("q", "out", "lse", "pool", "page_ids", "plan", "workspace", "status")
PREFILL_POINTERS = (
    "q", "out", "lse", "pool", "page_ids", "page_indptr", "last_page_len", "kv_origin", "q_indptr", "status", "q_indptr_host",
)  # fmt: skip
NO_REQUESTS: Changes = {"batch": 0, "kv_len": 0, "page_indptr": 0}
EMPTY: dict[str, tuple[str, Changes]] = {
    "a decode of batch 0": ("global_decode", {"planned": NO_REQUESTS}),
    "a decode of batch 0 over no rows": (
        "global_decode",
        {"planned": NO_REQUESTS, "q_rows": 0, "row_offset": 0, **dict.fromkeys(DECODE_POINTERS, 0)},
    ),
    "a windowed prefill of no rows": ("sliding_prefill", {"q_rows": 0, **dict.fromkeys(PREFILL_POINTERS, 0)}),
    "a windowed prefill of no requests": ("sliding_prefill", {"batch": 0, **dict.fromkeys(PREFILL_POINTERS, 0)}),
    "a windowed prefill of requests without rows": ("sliding_prefill", {"q_indptr_host": host(0, 0, 0)}),
    "a merge of no rows": ("merge_states", {"num_rows": 0, **dict.fromkeys(("partials", "partial_lse", "out", "lse"), 0)}),
}


@pytest.mark.parametrize("tier", ["real", "stub"])
@pytest.mark.parametrize("case", EMPTY)
def test_nothing_to_do(case: str, tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    entry, changes = EMPTY[case]
    library = request.getfixturevalue(tier)
    assert library.call(entry, valid(library, entry, changes)) == (OK, "")
    assert real.fake("calls").value == 0


def test_a_decode_of_batch_0_still_refuses(stub: Library) -> None:
    """Arguments are checked first: what a server gets wrong shows in an empty step too."""
    assert stub.call("global_decode", valid(stub, "global_decode", {"planned": NO_REQUESTS, "num_pages": 0}))[0] == INVALID
    found = stub.call("global_decode", valid(stub, "global_decode", {"planned": NO_REQUESTS, "workspace_bytes": 0}))
    assert found[0] == INVALID and "workspace_bytes is 0" in found[1]


# The device

NEEDS = {
    # The g16 split kernel: three tiles, Q and P of 16 heads, and 1,024 bytes of barriers.
    "global_decode": 220704,
    "sliding_prefill": 230624,
}


@pytest.mark.parametrize("entry", NEEDS)
def test_another_device(entry: str, real: Library) -> None:
    real.fake("error").value = 0
    need = NEEDS[entry]
    real.fake("shared_memory").value = need - 1
    assert real.call(entry, valid(real, entry, {})) == (
        DEVICE,
        f"tilepress_{entry}: device 0 offers a block {need - 1} bytes of shared memory; the kernel needs {need}",
    )
    real.fake("minor").value = 1
    assert "has compute capability 9.1; this library is built for 9.0" in real.call(entry, valid(real, entry, {}))[1]
    assert real.fake("launches").value == 0


def test_a_merge_needs_its_device_too(real: Library) -> None:
    real.fake("error").value = 0
    real.fake("major").value = 8
    assert real.call("merge_states", build("merge_states")) == (
        DEVICE,
        "tilepress_merge_states: device 0 has compute capability 8.0; this library is built for 9.0",
    )


# What is launched


def test_a_decode_launches_its_partials_then_their_merge(real: Library, library: Path) -> None:
    real.fake("error").value = 0
    partial, merge = (kernel_record(library, f"global_decode_{name}") for name in ("partial_g8_split", "merge"))
    real.expect(partial, merge)
    assert real.call("global_decode", valid(real, "global_decode", {"stream": 0xABC0, "status": 0})) == (OK, "")
    first, second = real.launches()
    assert (list(first.grid), list(first.block)) == ([132, 1, 1], [160, 1, 1])
    # A head's 512 columns are four blocks: 8 heads of a group by 4, KV heads, the batch that the plan may hold.
    assert (list(second.grid), list(second.block)) == ([32, 4, 4], [256, 1, 1])
    assert (first.dynamic_shared, second.dynamic_shared) == (216624, 4352)
    assert (first.programmatic, second.programmatic) == (1, 1)
    assert (first.stream, second.stream) == (0xABC0, 0xABC0)
    # Parts of the plan at words 16 and 48; of the workspace behind 528 partials of 8 heads of 512 fp32 columns.
    assert arguments(first, partial) == {
        "ctas": 132,
        "early": 0,
        "layer_tile": 2,
        "max_batch": 4,
        "max_items": 132 + 528,
        "max_slots": 528,
        "num_page_ids": 5,
        "num_pages": 10,
        "page_ids": 0x50000,
        "page_tiles": 20,
        "partial_sums": 0x100000 + 528 * 8 * 512 * 4,
        "partial_out": 0x100000,
        "plan_items": 0x60000 + 48 * 4,
        "plan_requests": 0x60000 + 16 * 4,
        "pool_tiles": 200,
        "row_offset": 3,
        "status": 0,
        "want_status": 0,
    }
    assert arguments(second, merge) == {
        "group": 8,
        "lse": 0x30000,
        "max_batch": 4,
        "max_slots": 528,
        "merge_blocks": 4,
        "num_kv_heads": 4,
        "num_q_heads": 32,
        "out": 0x20000,
        "partial_sums": 0x100000 + 528 * 8 * 512 * 4,
        "partial_out": 0x100000,
        "plan_header": 0x60000,
        "plan_requests": 0x60000 + 16 * 4,
        "q_rows": 5,
        "row_offset": 3,
        "want_lse": 1,
    }
    maps = real.maps()
    assert maps.keys() == {0x10000, 0x40000}
    q, pool = maps[0x10000], maps[0x40000]
    assert (q.rank, q.dims[:3], q.strides[:2], q.box[:3]) == (3, [512, 32, 5], [1024, 32 * 1024], [64, 8, 1])
    assert (pool.rank, pool.dims[:4], pool.box[:4]) == (4, [512, 64, 4, 200], [64, 64, 1, 1])


@pytest.mark.parametrize("early", [0, 1])
def test_a_decode_is_told_whether_it_may_load_early(early: int, real: Library, library: Path) -> None:
    real.fake("error").value = 0
    kernel = kernel_record(library, "global_decode_partial_g8_split")
    real.expect(kernel, kernel_record(library, "global_decode_merge"))
    assert real.call("global_decode", valid(real, "global_decode", {"early": early})) == (OK, "")
    assert arguments(real.launches()[0], kernel)["early"] == early


@pytest.mark.parametrize("early", [0, 1])
def test_a_windowed_decode_is_one_launch_of_clusters(early: int, real: Library, library: Path) -> None:
    real.fake("error").value = 0
    kernel = kernel_record(library, "sliding_decode_g2_split")
    real.expect(kernel)
    assert real.call("sliding_decode", valid(real, "sliding_decode", {"early": early})) == (OK, "")
    (launch,) = real.launches()
    found = arguments(launch, kernel)
    # 16 KV heads of four requests, that the plan may hold: more than the clusters that the device holds at once.
    assert list(launch.grid) == [6 * found["resident_clusters"], 1, 1] and found["resident_clusters"] < 4 * 16
    assert (list(launch.block), launch.cluster, launch.programmatic) == ([192, 1, 1], 6, 1)
    assert (found["early"], found["max_batch"], found["num_kv_heads"], found["want_lse"]) == (early, 4, 16, 1)
    assert (found["plan_header"], found["plan_requests"]) == (0x60000, 0x60000 + 16 * 4)


@pytest.mark.parametrize(("group", "kv_heads"), [(4, 2), (8, 1), (16, 2)])
@pytest.mark.parametrize("page_format", [SPLIT, FOLDED])
def test_a_decodes_instance(group: int, kv_heads: int, page_format: int, real: Library, library: Path) -> None:
    real.fake("error").value = 0
    changes = {"num_q_heads": group * kv_heads, "num_kv_heads": kv_heads, "page_format": page_format}
    # 132 multiprocessors to one or two KV heads: 132 slots a request, 528 of 16 heads at most.
    args = valid(real, "global_decode", {**changes, "planned": changes, "workspace_bytes": 528 * 16 * 514 * 4})
    assert real.call("global_decode", args) == (OK, "")
    first, second = real.launches()
    name = f"global_decode_partial_g{group}_{'split' if page_format == SPLIT else 'folded'}"
    assert first.dynamic_shared == kernel_record(library, name)["dynamic_shared_bytes"]
    # 66 runs of a KV head or more: blocks of 32 columns, 16 of a head.
    assert list(second.grid) == [group * 16, kv_heads, 4]


def test_a_windowed_prefill_is_launched_over_its_windows(real: Library, library: Path) -> None:
    real.fake("error").value = 0
    kernel = kernel_record(library, "sliding_prefill_g2_split")
    real.expect(kernel)
    assert real.call("sliding_prefill", valid(real, "sliding_prefill", {})) == (OK, "")
    (launch,) = real.launches()
    # One CTA an SM. Request 1 would own the tile slots from 65 // 64 + 2 = 3 on, and its 65 rows lie in 3 tiles at most: no
    # more than 6 tiles.
    assert (list(launch.grid), list(launch.block), launch.dynamic_shared) == ([132, 1, 1], [384, 1, 1], 229600)
    found = arguments(launch, kernel)
    assert (found["window_left"], found["has_origin"], found["kv_origin"]) == (511, 1, 0xA0000)
    assert (found["q_tiles"], found["layer_tile"], found["page_tiles"], found["pool_tiles"]) == (6, 2, 20, 200)
    real.without_a_driver()
    real.fake("error").value = 0
    real.expect(kernel)
    assert real.call("sliding_prefill", valid(real, "sliding_prefill", {"kv_origin": 0})) == (OK, "")
    found = arguments(real.launches()[0], kernel)
    assert (found["has_origin"], found["kv_origin"]) == (0, 0)


def test_a_windowed_prefills_grid_is_the_devices_multiprocessors(real: Library) -> None:
    real.fake("error").value = 0
    grids = []
    for device, sm_count in ((5, 114), (5, 1), (6, 78), (5, 1), (300, 132), (300, 78)):
        real.c.fake_reset()
        real.fake("device").value, real.fake("sm_count").value = device, sm_count
        assert real.call("sliding_prefill", valid(real, "sliding_prefill", {})) == (OK, "")
        grids.append(list(real.launches()[0].grid))
    real.without_a_driver()
    # Each of 256 devices is asked once; those beyond every time.
    assert grids == [[sm_count, 1, 1] for sm_count in (114, 114, 78, 114, 132, 78)]


def test_a_merge_is_one_launch(real: Library) -> None:
    real.fake("error").value = 0
    assert real.call("merge_states", build("merge_states", stream=0xABC0)) == (OK, "")
    (launch,) = real.launches()
    # 5 rows by 16 heads by 512 columns are 5,120 chunks of 8, 256 a block.
    assert (list(launch.grid), list(launch.block), launch.stream) == ([20, 1, 1], [256, 1, 1], 0xABC0)


# The pool's bytes


def pool_bytes(library: Library, *numbers: int) -> tuple[int, int | str]:
    """The code, and the bytes or the message."""
    out = ctypes.c_int64(-1)
    code = library.c.call_pool_bytes(*numbers, ctypes.addressof(out))
    return code, library.c.call_last_error().decode() if code else out.value


@pytest.mark.parametrize("tier", ["real", "stub"])
def test_pool_bytes(tier: str, request: pytest.FixtureRequest) -> None:
    library = request.getfixturevalue(tier)
    # num_pages, num_layers, num_kv_heads, head_dim, page_size, page_format, k_eq_v. A token and head of a layer: 1,024
    # columns of 2 bytes split, 640 folded.
    assert pool_bytes(library, 1, 1, 1, 512, 1, SPLIT, 0) == (OK, 2048)
    assert pool_bytes(library, 1, 1, 1, 512, 1, FOLDED, 1) == (OK, 1280)
    # The 31B's ten global layers, 4 KV heads: a page of 64 tokens.
    assert pool_bytes(library, 1, 10, 4, 512, 64, SPLIT, 1) == (OK, 5_242_880)
    assert pool_bytes(library, 1, 10, 4, 512, 64, FOLDED, 1) == (OK, 3_276_800)
    # A row wider than 2^31 - 1 columns, counted in 64 bits: (2^31 - 1 + 128) * 2 bytes.
    assert pool_bytes(library, 1, 1, 1, INT32_MAX, 1, FOLDED, 1) == (OK, 4_294_967_550)
    # The 31B's fifty sliding layers, 16 KV heads of 256 columns, 1,000 pages.
    assert pool_bytes(library, 1000, 50, 16, 256, 64, SPLIT, 0) == (OK, 52_428_800_000)


POOL_REFUSED: dict[str, tuple[tuple[int, ...], str]] = {
    "num_pages": ((0, 1, 1, 512, 64, SPLIT, 0), "num_pages is 0; it must be 1 or more"),
    "num_pages negative": ((-(2**63), 1, 1, 512, 64, SPLIT, 0), "num_pages is -9223372036854775808"),
    "num_layers": ((1, 0, 1, 512, 64, SPLIT, 0), "num_layers is 0; it must be 1 or more"),
    "num_kv_heads": ((1, 1, -1, 512, 64, SPLIT, 0), "num_kv_heads is -1; it must be 1 or more"),
    "head_dim": ((1, 1, 1, 0, 64, SPLIT, 0), "head_dim is 0; it must be 1 or more"),
    "page_size": ((1, 1, 1, 512, 0, SPLIT, 0), "page_size is 0; it must be 1 or more"),
    "page_format": ((1, 1, 1, 512, 64, 3, 0), "page_format is 3, which is none"),
    "page_format zero": ((1, 1, 1, 512, 64, 0, 0), "page_format is 0, which is none"),
    "k_eq_v": ((1, 1, 1, 512, 64, FOLDED, 2), "k_eq_v is 2; it must be 0 or 1"),
    "folded without k_eq_v": (
        (1, 1, 1, 512, 64, FOLDED, 0),
        "page_format folded needs k_eq_v: it keeps one row for K and V, which must be one projection",
    ),
    "a product of 2^63": ((2**45, 1, 1, 512, 128, SPLIT, 0), "num_pages 35184372088832 makes a pool of 2^63 bytes or more"),
    "a product past 2^64": ((2**62, 50, 16, 512, 64, SPLIT, 0), "num_pages 4611686018427387904 makes a pool of"),
}


@pytest.mark.parametrize("tier", ["real", "stub"])
@pytest.mark.parametrize("case", POOL_REFUSED)
def test_pool_bytes_refused(case: str, tier: str, request: pytest.FixtureRequest, real: Library) -> None:
    numbers, message = POOL_REFUSED[case]
    code, said = pool_bytes(request.getfixturevalue(tier), *numbers)
    assert code == INVALID
    assert str(said).startswith(f"tilepress_pool_bytes: {message}")
    assert real.fake("calls").value == 0


def test_pool_bytes_at_the_edge(stub: Library) -> None:
    """2^45 - 1 pages of 128 tokens of 2,048 bytes are 2^63 - 2^18 bytes; without a place for them, a refusal."""
    assert pool_bytes(stub, 2**45 - 1, 1, 1, 512, 128, SPLIT, 0) == (OK, 2**63 - 2**18)
    assert stub.c.call_pool_bytes(1, 1, 1, 512, 64, SPLIT, 0, None) == INVALID
    assert stub.c.call_last_error() == b"tilepress_pool_bytes: bytes is null"
