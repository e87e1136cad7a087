"""The knob and the routed entries, on a host without a GPU: modes, pool sizes, plans by hand, refusals, and what reaches the
incumbent's entries."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .calls import CUDA, FOLDED, INT32_MAX, INVALID, OK, SPLIT, STRUCTS, STUB, STUB_MESSAGE, UNSUPPORTED, Library, host
from .commands import INCUMBENT_UNITS, Narrow
from .test_incumbent import PARAMS

pytestmark = pytest.mark.build

INCUMBENT, TILELANG, TILELANG640 = 1, 2, 3
UNTOUCHED = 0x5A5A5A5A  # what a plan's array holds before a call
ROOM = 10000  # its words: more than any plan here
WITHOUT = "mode is TILEPRESS_MODE_INCUMBENT, but this library was built without the incumbent"
FAMILIES = ("global_prefill", "global_decode", "sliding_prefill", "sliding_decode")
ROUTED = [f"routed_{family}{role}" for family in FAMILIES for role in ("", "_plan_size", "_plan")]
SERVES = {
    "global_prefill": "batch_prefill_paged_cuda_hd512",
    "global_decode": "paged_attention_decode_split_kv_cuda_hd512",
    "sliding_prefill": "batch_prefill_paged_window_cuda_hd256",
    "sliding_decode": "paged_attention_decode_window_cuda_hd256",
}

# Words of csrc/routes.h, written down again: a layout that changed by accident is seen here.
DECODE_MAGIC, PREFILL_MAGIC = 0x54504931, 0x54504A31
CHUNK_TOKENS, TOTAL_ROWS, LISTS = 16, 20, 24
UNSPLIT = 1 << 30


@pytest.fixture(scope="module")
def without(linked: Callable[[Path], Library], narrow: Narrow) -> Library:
    """A full build of a table without the incumbent's rows."""
    return linked(narrow.out)


# The knob's value


@dataclass(frozen=True)
class Parsed:
    """What parse_mode answered; mode -7: none."""

    code: int
    mode: int
    message: str


def parse_mode(library: Library, text: bytes | None) -> Parsed:
    found = ctypes.c_int32(-7)
    code = library.c.call_parse_mode(text, ctypes.byref(found))
    return Parsed(code, found.value, library.c.call_last_error().decode() if code else "")


@pytest.mark.parametrize(
    ("text", "mode"),
    [(None, INCUMBENT), (b"off", INCUMBENT), (b"tilelang", TILELANG), (b"tilelang640", TILELANG640)],
    ids=str,
)
def test_the_knobs_values(stub: Library, without: Library, text: bytes | None, mode: int) -> None:
    """A library without the incumbent knows its mode as well: who calls in it is told."""
    for library in (stub, without):
        assert parse_mode(library, text) == Parsed(OK, mode, "")


OTHERS = ("", " ", "OFF", "Off", "on", "0", "1", "incumbent", "TILELANG", "tilelang ", " tilelang", "tilelang64")
MORE = ("tilelang640 ", "tilelang6400", "tilelang640\n", "off,tilelang", "tilelang\u00e9", "x" * 2000)


@pytest.mark.parametrize("text", [*OTHERS, *MORE])
def test_any_other_value_is_refused(stub: Library, text: str) -> None:
    """Never a default, and *mode is as it was."""
    found = parse_mode(stub, text.encode())
    assert (found.code, found.mode) == (INVALID, -7)
    assert found.message.startswith("tilepress_parse_mode: PEGAINFER_GLOBAL_ATTN is '")
    if len(text) < 100:
        assert found.message.endswith(f"is '{text}'; it must be unset or one of off, tilelang, tilelang640")


def test_a_mode_needs_a_place(stub: Library) -> None:
    assert stub.c.call_parse_mode(b"off", None) == INVALID
    assert stub.c.call_last_error().decode() == "tilepress_parse_mode: mode is null"


# The global pool's bytes


def mode_pool_bytes(library: Library, *arguments: int) -> tuple[int, int, str]:
    found = ctypes.c_int64(-7)
    code = library.c.call_mode_pool_bytes(*arguments, ctypes.byref(found))
    return code, found.value, library.c.call_last_error().decode() if code else ""


@pytest.mark.parametrize(("mode", "columns"), [(INCUMBENT, 1024), (TILELANG, 1024), (TILELANG640, 640)])
def test_pool_bytes_by_hand(stub: Library, mode: int, columns: int) -> None:
    """31B: 10 global layers of 4 KV heads; 1000 pages of 64 tokens, in bf16."""
    assert mode_pool_bytes(stub, mode, 1000, 10, 4, 512, 64, 1) == (OK, 1000 * 64 * 10 * 4 * columns * 2, "")


def test_the_pools_of_31b(stub: Library) -> None:
    assert [mode_pool_bytes(stub, mode, 1, 10, 4, 512, 64, 1)[1] for mode in (INCUMBENT, TILELANG, TILELANG640)] == [
        5_242_880,
        5_242_880,
        3_276_800,
    ]


def test_a_model_whose_v_is_its_own_has_no_folded_pool(stub: Library) -> None:
    for mode in (INCUMBENT, TILELANG):
        assert mode_pool_bytes(stub, mode, 1, 7, 2, 512, 64, 0)[:2] == (OK, 1_835_008)
    code, found, message = mode_pool_bytes(stub, TILELANG640, 1, 7, 2, 512, 64, 0)
    assert (code, found) == (INVALID, -7)
    assert "page_format folded needs k_eq_v" in message


@pytest.mark.parametrize("mode", [0, 4, 7, -1, INT32_MAX])
def test_pool_bytes_of_no_mode(stub: Library, mode: int) -> None:
    assert mode_pool_bytes(stub, mode, 1, 10, 4, 512, 64, 1) == (
        INVALID,
        -7,
        f"tilepress_mode_pool_bytes: mode is {mode}, which is none",
    )


# Calls: 31B's heads; the second of ten layers in a page of ten


HEADS = {"global": {"num_q_heads": 32, "num_kv_heads": 4}, "sliding": {"num_q_heads": 32, "num_kv_heads": 16}}
HEAD_DIM = {"global": 512, "sliding": 256}
LIMITS = {"max_batch": 8, "max_slots": 0, "page_size": 64, "sm_count": 132, "chunk_tokens": 0}
POOL = {"pool": 0x40000, "num_pages": 10, "rows_per_page": 1280, "layer_row": 128, "page_ids": 0x50000, "num_page_ids": 40}
POINTERS = {"q": 0x10000, "out": 0x20000, "status": 0x90000, "plan": 0x60000, "stream": 0x77}

# Of the plans below: words and, of a decode, the workspace's bytes, by hand.
GLOBAL_BLOCKS = 8 * 33  # 8 requests by 132 / 4 chunks
WORDS = {
    # 9 and 8 and 9 words of lists to a multiple of 4; three lists of a word a block, and a byte a block.
    "global_decode": 24 + 12 + 8 + 12 + 3 * GLOBAL_BLOCKS + 68,
    "sliding_decode": 24 + 12 + 8 + 12 + 3 * 8 + 4,
    # 4 and 3 and 4 words; 80 rows of a group in tiles of 16, and one more a request: 43 and 13 blocks.
    "global_prefill": 24 + 4 + 4 + 4 + 3 * 44 + 12,
    "sliding_prefill": 24 + 4 + 4 + 4 + 3 * 16 + 4,
}
WORKSPACE = {"global_decode": GLOBAL_BLOCKS * 32 * (512 * 2 + 4), "sliding_decode": 0}


def layer_of(entry: str) -> str:
    return entry.removeprefix("routed_").split("_")[0]


def family_of(entry: str) -> str:
    return re.sub(r"_plan(_size)?$", "", entry.removeprefix("routed_"))


def values(entry: str) -> dict[str, Any]:
    """Arguments that every check accepts, in any mode, but for the run's plan: that is a planner's."""
    layer, family = layer_of(entry), family_of(entry)
    found: dict[str, Any] = {"mode": INCUMBENT, **HEADS[layer]}
    if entry.endswith("decode_plan"):
        found |= LIMITS | {"kv_len": host(100, 0, 129), "page_indptr": host(0, 2, 2, 5), "batch": 3, "plan_words": ROOM}
        found |= {"plan": host(*[UNTOUCHED] * ROOM), "window": 1024 if layer == "sliding" else 0}
    elif entry.endswith("decode_plan_size"):
        found |= LIMITS | {"head_dim": HEAD_DIM[layer]}
        found |= {name: host(-7, kind=ctypes.c_int64) for name in ("plan_words_out", "workspace_bytes_out")}
    elif entry.endswith("prefill_plan"):
        found |= {"q_indptr": host(3, 8, 8, 73), "plan": host(*[UNTOUCHED] * ROOM), "plan_words": ROOM, "q_rows": 80}
        found |= {"batch": 3, "head_dim": HEAD_DIM[layer]}
    elif entry.endswith("prefill_plan_size"):
        found |= {"plan_words_out": host(-7, kind=ctypes.c_int64), "max_rows": 80, "max_batch": 3}
        found |= {"head_dim": HEAD_DIM[layer]}
    else:
        found |= POOL | POINTERS | {"q_rows": 80, "head_dim": HEAD_DIM[layer], "page_size": 64, "sm_scale": 0.5}
        if family.endswith("decode"):
            found |= {"row_offset": 5, "workspace": 0x100000, "workspace_bytes": 1 << 30}
        else:
            found |= {"page_indptr": 0x61000, "last_page_len": 0x62000, "q_indptr": 0x63000, "batch": 3}
        if family == "sliding_prefill":
            found |= {"window_left": 1023}
    return found


def build(entry: str, changes: Mapping[str, Any]) -> ctypes.Structure:
    struct = STRUCTS[entry]
    args = struct(**{**values(entry), **changes})
    args.struct_size = changes.get("struct_size", ctypes.sizeof(struct))
    return args


def plan(library: Library, family: str, **changes: Any) -> list[int]:
    """What the family's routed planner wrote, and what is behind it."""
    args = build(f"routed_{family}_plan", changes)
    code, message = library.call(f"routed_{family}_plan", args)
    assert code == OK, message
    return list((ctypes.c_int32 * ROOM).from_address(args.plan))


def run_args(library: Library, family: str, planned: Mapping[str, Any], changes: Mapping[str, Any]) -> ctypes.Structure:
    """A run's arguments, with the plan that `planned` makes, in the run's mode unless it says another."""
    mode = changes.get("mode", INCUMBENT)
    words = plan(library, family, **{"mode": mode, **planned})
    return build(f"routed_{family}", {"plan_host": host(*words), **changes})


# Sizes


def sizes(library: Library, family: str, **changes: Any) -> list[int]:
    """Code, words and, of a decode, bytes."""
    args = build(f"routed_{family}_plan_size", changes)
    code, _ = library.call(f"routed_{family}_plan_size", args)
    names = ("plan_words_out", "workspace_bytes_out") if family.endswith("decode") else ("plan_words_out",)
    return [code, *(ctypes.c_int64.from_address(getattr(args, name)).value for name in names)]


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_by_hand(stub: Library, family: str) -> None:
    expected = [OK, WORDS[family], *([WORKSPACE[family]] if family in WORKSPACE else [])]
    assert sizes(stub, family) == expected


def test_declared_slots_are_those_of_every_kv_head(stub: Library) -> None:
    """43 slots are 10 blocks of four KV heads; the windowed decode has one a request."""
    assert sizes(stub, "global_decode", max_slots=43) == [OK, 24 + 12 + 8 + 12 + 3 * 12 + 4, 10 * 32 * 1028]
    assert sizes(stub, "sliding_decode", max_slots=43) == sizes(stub, "sliding_decode")


@pytest.mark.parametrize("mode", [TILELANG, TILELANG640])
def test_a_generated_prefill_needs_no_plan(stub: Library, without: Library, mode: int) -> None:
    for library in (stub, without):
        for family in ("global_prefill", "sliding_prefill"):
            assert sizes(library, family, mode=mode) == [OK, 0]
            assert set(plan(library, family, mode=mode)) == {UNTOUCHED}
            args = build(f"routed_{family}_plan", {"mode": mode, "plan": 0, "plan_words": 0})
            assert library.call(f"routed_{family}_plan", args) == (OK, "")


@pytest.mark.parametrize(("family", "mode"), [("global_decode", TILELANG), ("global_decode", TILELANG640)])
def test_a_generated_decodes_plan_is_the_generated_planners(stub: Library, family: str, mode: int) -> None:
    page_format = FOLDED if mode == TILELANG640 else SPLIT
    size = STRUCTS["decode_plan_size"](
        struct_size=ctypes.sizeof(STRUCTS["decode_plan_size"]),
        **HEADS["global"],
        **LIMITS,
        head_dim=512,
        page_format=page_format,
        plan_words_out=(words := host(-7, kind=ctypes.c_int64)),
        workspace_bytes_out=(bytes_out := host(-7, kind=ctypes.c_int64)),
    )
    assert stub.call("decode_plan_size", size) == (OK, "")
    expected = [ctypes.c_int64.from_address(at).value for at in (words, bytes_out)]
    assert sizes(stub, family, mode=mode) == [OK, *expected]
    given = values("routed_global_decode_plan")
    array = host(*[UNTOUCHED] * ROOM)
    theirs = STRUCTS["decode_plan"](**{name: value for name, value in given.items() if name != "mode"})
    theirs.struct_size, theirs.page_format, theirs.plan = ctypes.sizeof(theirs), page_format, array
    assert stub.call("decode_plan", theirs) == (OK, "")
    assert plan(stub, family, mode=mode) == list((ctypes.c_int32 * ROOM).from_address(array))


@pytest.mark.parametrize("mode", [TILELANG, TILELANG640])
def test_the_sliding_plan_is_split_in_every_mode(stub: Library, mode: int) -> None:
    """kPlanPageFormat of csrc/decode_plan.h."""
    assert plan(stub, "sliding_decode", mode=mode)[6] == SPLIT


# Plans


@dataclass(frozen=True)
class DecodePlan:
    """The parts of a decode's plan in the incumbent's mode."""

    header: list[int]
    chunk_tokens: int
    page_indptr: list[int]
    last_page_len: list[int]
    o_indptr: list[int]
    blocks: list[tuple[int, int]]  # request, chunk
    valid: list[int]


def up(words: int) -> int:
    return (words + 3) // 4 * 4


def parse(words: Sequence[int]) -> DecodePlan:
    batch, count, max_batch, max_blocks = words[1:5]
    last = LISTS + up(max_batch + 1)
    o = last + up(max_batch)
    requests = o + up(max_batch + 1)
    chunks = requests + 2 * up(max_blocks)
    valid = (ctypes.c_int32 * up(max_blocks))(*words[chunks + up(max_blocks) :][: up((max_blocks + 3) // 4)])
    assert set(words[chunks + up(max_blocks) + up((max_blocks + 3) // 4) :]) == {UNTOUCHED}, "written past the plan"
    return DecodePlan(
        list(words[:16]),
        words[CHUNK_TOKENS],
        list(words[LISTS : LISTS + batch + 1]),
        list(words[last : last + batch]),
        list(words[o : o + batch + 1]),
        list(zip(words[requests : requests + count], words[chunks : chunks + count], strict=True)),
        list(bytes(valid)[:max_blocks]),
    )


def test_a_ragged_global_decode_by_hand(stub: Library) -> None:
    """100, no and 129 tokens. The longest has three pages, so chunks of one: two, none and three of them."""
    made = parse(plan(stub, "global_decode"))
    assert made.header == [DECODE_MAGIC, 3, 5, 8, GLOBAL_BLOCKS, 32, 4, 64, 0, 5, 0, 0, 0, 1, 0, 0]
    assert made.chunk_tokens == 64
    assert made.page_indptr == [0, 2, 2, 5]
    assert made.last_page_len == [36, 0, 1]
    assert made.o_indptr == [0, 2, 2, 5]
    assert made.blocks == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    assert made.valid == [1] * 5 + [0] * (GLOBAL_BLOCKS - 5)


def test_the_page_list_may_begin_anywhere(stub: Library) -> None:
    made = parse(plan(stub, "global_decode", page_indptr=host(7, 9, 9, 12)))
    assert made.page_indptr == [7, 9, 9, 12]
    assert made.header[9] == 12
    assert made.o_indptr == [0, 2, 2, 5]


@pytest.mark.parametrize(("kv_heads", "chunk_pages"), [(4, 6), (8, 11), (32, 42)])
def test_the_rule_gives_one_chunk_length(stub: Library, kv_heads: int, chunk_pages: int) -> None:
    """10,600 tokens have 166 pages: 33, 16 and 4 splits at most of ceil(166 / splits) pages; a shorter request has fewer."""
    changes = {"kv_len": host(10_600, 4000), "page_indptr": host(0, 166, 229), "batch": 2, "num_kv_heads": kv_heads}
    made = parse(plan(stub, "global_decode", **changes))
    assert made.chunk_tokens == chunk_pages * 64
    counts = [-(-pages // chunk_pages) for pages in (166, 63)]
    assert made.o_indptr == [0, counts[0], sum(counts)]
    assert made.blocks == [(r, i) for r, count in enumerate(counts) for i in range(count)]


def test_chunks_of_a_given_size(stub: Library) -> None:
    made = parse(plan(stub, "global_decode", chunk_tokens=128, max_slots=40))
    assert made.header[4] == 10
    assert made.chunk_tokens == 128
    assert made.blocks == [(0, 0), (2, 0), (2, 1)]
    assert made.o_indptr == [0, 1, 1, 3]


def test_a_windowed_decode_is_not_split(stub: Library) -> None:
    """5000 tokens from token 3968 on, and 30: a block each, and one for the request without a token."""
    changes = {
        "kv_len": host(5000, 0, 30),
        "kv_origin": host(3968, 0, 0),
        "page_indptr": host(0, 17, 17, 18),
        "chunk_tokens": 128,
        "max_slots": 100,
    }
    made = parse(plan(stub, "sliding_decode", **changes))
    assert made.header == [DECODE_MAGIC, 3, 3, 8, 8, 32, 16, 64, 1024, 18, 0, 0, 0, 0, 0, 0]
    assert made.chunk_tokens == UNSPLIT
    assert made.page_indptr == [0, 17, 17, 18]
    assert made.last_page_len == [8, 0, 30]
    assert made.blocks == [(0, 0), (1, 0), (2, 0)]
    assert made.valid == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("family", ["global_decode", "sliding_decode"])
def test_a_decode_of_no_requests(stub: Library, family: str) -> None:
    made = parse(plan(stub, family, batch=0, kv_len=0, page_indptr=0))
    assert made.header[1:3] == [0, 0]
    assert made.header[9] == 0
    assert not any(made.valid)


def test_a_decode_of_empty_requests(stub: Library) -> None:
    """On pages so large that a chunk of 2^30 tokens is less than one."""
    large = INT32_MAX // 64 * 64
    changes = {"kv_len": host(0, 0), "page_indptr": host(0, 0, 0), "batch": 2, "page_size": large}
    made = parse(plan(stub, "global_decode", **changes))
    assert (made.header[1:3], made.o_indptr) == ([2, 0], [0, 0, 0])
    assert made.chunk_tokens == large


def test_a_chunk_that_does_not_count_in_32_bits_holds_the_request_whole(stub: Library) -> None:
    changes = {"kv_len": host(INT32_MAX), "page_indptr": host(0, 1 << 25), "batch": 1, "sm_count": 1}
    made = parse(plan(stub, "global_decode", **changes))
    assert made.chunk_tokens == INT32_MAX
    assert made.blocks == [(0, 0)]
    assert made.last_page_len == [63]


@dataclass(frozen=True)
class PrefillPlan:
    """The parts of a prefill's plan in the incumbent's mode."""

    header: list[int]
    chunk_tokens: int
    total_rows: int
    blocks: list[tuple[int, int, int]]  # request, query tile, chunk


def parse_prefill(words: Sequence[int]) -> PrefillPlan:
    count, max_batch, max_blocks = words[2:5]
    requests = LISTS + 2 * up(max_batch + 1) + up(max_batch)
    lists = [words[requests + i * up(max_blocks) :][:count] for i in range(3)]
    end = requests + 3 * up(max_blocks) + up((max_blocks + 3) // 4)
    assert set(words[end:]) == {UNTOUCHED}, "written past the plan"
    return PrefillPlan(list(words[:16]), words[CHUNK_TOKENS], words[TOTAL_ROWS], list(zip(*lists, strict=True)))


def test_a_ragged_global_prefill_by_hand(stub: Library) -> None:
    """5, no and 65 rows of a group of 8, in tiles of 32."""
    made = parse_prefill(plan(stub, "global_prefill"))
    assert made.header == [PREFILL_MAGIC, 3, 19, 3, 19, 32, 4, 0, 0, 0, 512, 70, 73, 0, 0, 0]
    assert (made.chunk_tokens, made.total_rows) == (UNSPLIT, 70)
    assert made.blocks == [*((0, i, 0) for i in range(2)), *((2, i, 0) for i in range(17))]


def test_a_ragged_sliding_prefill_by_hand(stub: Library) -> None:
    """5, no and 65 rows of a group of 2, in tiles of 64."""
    made = parse_prefill(plan(stub, "sliding_prefill"))
    assert made.header == [PREFILL_MAGIC, 3, 4, 3, 4, 32, 16, 0, 0, 0, 256, 70, 73, 0, 0, 0]
    assert made.blocks == [(0, 0, 0), *((2, i, 0) for i in range(3))]


@pytest.mark.parametrize(("family", "rows", "blocks"), [("global_prefill", 4, 2), ("sliding_prefill", 8, 1)])
def test_few_rows_have_the_short_tile(stub: Library, family: str, rows: int, blocks: int) -> None:
    made = parse_prefill(plan(stub, family, q_indptr=host(0, rows), batch=1))
    assert made.blocks == [(0, i, 0) for i in range(blocks)]


@pytest.mark.parametrize("family", ["global_prefill", "sliding_prefill"])
def test_a_prefill_of_no_rows(stub: Library, family: str) -> None:
    for changes in ({"batch": 0}, {"q_indptr": host(5, 5, 5, 5)}):
        made = parse_prefill(plan(stub, family, **changes))
        assert made.blocks == []


@pytest.mark.parametrize("family", ["global_prefill", "sliding_prefill"])
@pytest.mark.parametrize("lengths", [(1,) * 64, (0, 16, 17, 1), (31,), (2,), (1, 2, 3, 4, 5)], ids=str)
def test_a_plan_fits_its_size(stub: Library, family: str, lengths: Sequence[int]) -> None:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    (_, words) = sizes(stub, family, max_rows=bounds[-1], max_batch=len(lengths))
    changes = {"q_indptr": host(*bounds), "batch": len(lengths), "q_rows": bounds[-1], "plan_words": words}
    assert set(plan(stub, family, **changes)[words:]) == {UNTOUCHED}


# What the planners refuse

Cases = dict[str, tuple[dict[str, Any], int, str]]
DECODE_LIMITS: Cases = {
    "no whole group": ({"num_q_heads": 33}, INVALID, "num_q_heads is 33, not a multiple of num_kv_heads, "),
    "a group that the incumbent lacks": ({"num_q_heads": 192}, UNSUPPORTED, "the group, is "),
    "chunk_tokens no whole tiles": ({"chunk_tokens": 100, "max_slots": 99}, INVALID, "chunk_tokens is 100, not whole tiles"),
    "chunk_tokens without max_slots": ({"chunk_tokens": 640}, INVALID, "max_slots is 0, but chunk_tokens"),
    "max_slots too many": ({"max_slots": (1 << 24) + 1}, INVALID, "max_slots comes to 16777217"),
    "max_batch zero": ({"max_batch": 0}, INVALID, "max_batch is 0; it must be 1 or more"),
    "sm_count zero": ({"sm_count": 0}, INVALID, "sm_count is 0"),
    "page_size zero": ({"page_size": 0}, INVALID, "page_size is 0"),
}
DECODE_SIZES: Cases = {
    "another head_dim": ({"head_dim": 128}, UNSUPPORTED, "head_dim is 128; compiled for "),
    "plan_words_out null": ({"plan_words_out": 0}, INVALID, "plan_words_out is null"),
    "workspace_bytes_out null": ({"workspace_bytes_out": 0}, INVALID, "workspace_bytes_out is null"),
    "reserved": ({"reserved": 1}, INVALID, "reserved is 1"),
}
DECODE_PLANS: Cases = {
    "batch past max_batch": ({"max_batch": 2}, INVALID, "batch is 3, past max_batch, 2"),
    "batch negative": ({"batch": -1}, INVALID, "batch is -1"),
    "plan null": ({"plan": 0}, INVALID, "plan is null"),
    "kv_len null": ({"kv_len": 0}, INVALID, "kv_len is null"),
    "page_indptr null": ({"page_indptr": 0}, INVALID, "page_indptr is null"),
    "kv_len negative": ({"kv_len": host(100, -1, 129)}, INVALID, "kv_len[1] is -1"),
    "kv_origin no page's": ({"kv_origin": host(0, 0, 32)}, INVALID, "kv_origin[2] is 32; it must be a multiple of page_size"),
    "kv_origin past the first key": ({"kv_origin": host(64, 0, 0)}, INVALID, "kv_origin[0] is 64, past 0"),
    "page_indptr decreasing": ({"page_indptr": host(0, 2, 1, 4)}, INVALID, "page_indptr[1] and the next are 2 and 1"),
    "too few pages": ({"page_indptr": host(0, 1, 1, 4)}, INVALID, "page_indptr lists 1 pages for request 0, but its 100"),
    "too many pages": (
        {"page_indptr": host(0, 2, 3, 6)},
        INVALID,
        "page_indptr lists 1 pages for request 1, whose tokens need 0; the incumbent's mode takes no more",
    ),
}
GLOBAL_PLANS: Cases = {
    "plan_words one short": ({"plan_words": 915}, INVALID, "plan_words is 915; this plan needs 916"),
    "max_slots one block short": ({"max_slots": 19}, INVALID, "max_slots is 19; request 2 needs slots up to 20"),
    "a window": ({"window": 1024}, UNSUPPORTED, "window is 1024, but the incumbent's entry sees whole contexts"),
}
SLIDING_PLANS: Cases = {"plan_words one short": ({"plan_words": 83}, INVALID, "plan_words is 83; this plan needs 84")}
PREFILL_LIMITS: Cases = {
    "no whole group": ({"num_q_heads": 33}, INVALID, "num_q_heads is 33, not a multiple of num_kv_heads, "),
    "num_q_heads zero": ({"num_q_heads": 0}, INVALID, "num_q_heads is 0"),
    "num_kv_heads zero": ({"num_kv_heads": 0}, INVALID, "num_kv_heads is 0"),
    "another head_dim": ({"head_dim": 128}, UNSUPPORTED, "head_dim is 128; compiled for "),
}
PREFILL_SIZES: Cases = {
    "max_rows negative": ({"max_rows": -1}, INVALID, "max_rows is -1"),
    "max_batch negative": ({"max_batch": -1}, INVALID, "max_batch is -1"),
    "max_batch past its most": ({"max_batch": (1 << 24) + 1}, INVALID, "max_batch is 16777217"),
    "more words than count": ({"max_rows": INT32_MAX, "num_q_heads": 65_520}, INVALID, "max_rows 2147483647 and max_batch 3"),
    "plan_words_out null": ({"plan_words_out": 0}, INVALID, "plan_words_out is null"),
}
PREFILL_PLANS: Cases = {
    "q_indptr null": ({"q_indptr": 0}, INVALID, "q_indptr is null"),
    "q_indptr below 0": ({"q_indptr": host(-1, 8, 8, 73)}, INVALID, "q_indptr[0] is -1"),
    "q_indptr decreasing": ({"q_indptr": host(3, 8, 7, 73)}, INVALID, "q_indptr[2] is 7, below the 8 before it"),
    "q_indptr past q_rows": ({"q_rows": 72}, INVALID, "q_indptr ends at 73, past q_rows, 72"),
    "plan null": ({"plan": 0}, INVALID, "plan is null"),
    "plan_words negative": ({"plan_words": -1}, INVALID, "plan_words is -1"),
    "plan_words zero": ({"plan_words": 0}, INVALID, "plan_words is 0; this plan needs "),
    "batch negative": ({"batch": -1}, INVALID, "batch is -1"),
}
PLANNERS: dict[str, Cases] = {
    "routed_global_decode_plan_size": DECODE_LIMITS | DECODE_SIZES,
    "routed_sliding_decode_plan_size": DECODE_LIMITS | DECODE_SIZES,
    "routed_global_decode_plan": DECODE_LIMITS | DECODE_PLANS | GLOBAL_PLANS,
    "routed_sliding_decode_plan": DECODE_LIMITS | DECODE_PLANS | SLIDING_PLANS,
    "routed_global_prefill_plan_size": PREFILL_LIMITS | PREFILL_SIZES,
    "routed_sliding_prefill_plan_size": PREFILL_LIMITS | PREFILL_SIZES,
    "routed_global_prefill_plan": PREFILL_LIMITS | PREFILL_PLANS,
    "routed_sliding_prefill_plan": PREFILL_LIMITS | PREFILL_PLANS,
}


@pytest.mark.parametrize(("entry", "case"), [(entry, case) for entry, cases in PLANNERS.items() for case in cases])
def test_a_planner_refuses_by_name_and_writes_nothing(stub: Library, entry: str, case: str) -> None:
    changes, code, text = PLANNERS[entry][case]
    args = build(entry, changes)
    found = stub.call(entry, args)
    assert found[0] == code, found
    assert found[1].startswith(f"tilepress_{entry}: ") and text in found[1], found
    written = [(name, kind) for name, kind in (("plan", ctypes.c_int32 * ROOM),) if hasattr(args, name) and args.plan]
    assert all(set(kind.from_address(getattr(args, name))) == {UNTOUCHED} for name, kind in written)
    outs = [name for name in ("plan_words_out", "workspace_bytes_out") if getattr(args, name, 0)]
    assert all(ctypes.c_int64.from_address(getattr(args, name)).value == -7 for name in outs)


def test_rows_that_a_launch_cannot_count_are_refused(stub: Library) -> None:
    """By the incumbent's own planner."""
    changes = {"q_indptr": host(0, INT32_MAX), "q_rows": INT32_MAX, "batch": 1}
    code, message = stub.call("routed_global_prefill_plan", build("routed_global_prefill_plan", changes))
    assert code == INVALID
    assert message == "batch_prefill_cta_tile_q: total_seq_len is 2147483647; it must be 0 to 268435455"


# The mode


@pytest.mark.parametrize("tier", ["real", "stub", "without"])
@pytest.mark.parametrize("entry", ROUTED)
def test_a_mode_that_is_none_is_refused(entry: str, tier: str, request: pytest.FixtureRequest) -> None:
    library = request.getfixturevalue(tier)
    for mode in (0, -1, -(2**31)):
        expected = f"tilepress_{entry}: mode is {mode}; it must be 1 or more"
        assert library.call(entry, build(entry, {"mode": mode})) == (INVALID, expected)
    for mode in (4, 7, INT32_MAX):
        expected = f"tilepress_{entry}: mode is {mode}, which is none; tilepress_parse_mode gives one"
        assert library.call(entry, build(entry, {"mode": mode})) == (INVALID, expected)


@pytest.mark.parametrize("entry", ROUTED)
def test_without_the_incumbent_its_mode_is_refused(entry: str, without: Library) -> None:
    """Before its plan is looked at, which such a library cannot make."""
    args = build(entry, {"plan_host": host(*[0] * 16)} if entry.endswith("decode") else {})
    assert without.call(entry, args) == (UNSUPPORTED, f"tilepress_{entry}: {WITHOUT}")


@pytest.mark.parametrize("entry", ROUTED)
def test_a_struct_of_another_size_is_refused(stub: Library, entry: str) -> None:
    code, message = stub.call(entry, build(entry, {"struct_size": 8, "mode": 7}))
    assert (code, message.split(",")[0]) == (INVALID, f"tilepress_{entry}: struct_size is 8")


# Runs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [INCUMBENT, TILELANG, TILELANG640])
def test_a_call_gets_past_every_check(stub: Library, real: Library, family: str, mode: int) -> None:
    """A stub then says that it is one, by the name of who would have served; the library asks for the device."""
    served = SERVES[family] if mode == INCUMBENT else f"tilepress_{family}"
    args = run_args(stub, family, {}, {"mode": mode})
    assert stub.call(f"routed_{family}", args) == (STUB, f"{served}: {STUB_MESSAGE}")
    real.without_a_driver()
    assert real.call(f"routed_{family}", args) == (CUDA, "cudaGetDevice: a made-up error")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_and_the_stub_plan_alike(stub: Library, real: Library, family: str) -> None:
    for mode in (INCUMBENT, TILELANG):
        assert plan(stub, family, mode=mode) == plan(real, family, mode=mode)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_to_do_is_done(stub: Library, family: str) -> None:
    """A plan of no requests, or of no rows, needs no pointer but the plan's."""
    planned = {"batch": 0, "kv_len": 0, "page_indptr": 0} if family.endswith("decode") else {"q_indptr": host(3, 3, 3, 3)}
    for mode in (INCUMBENT, TILELANG):
        changes: dict[str, Any] = {"mode": mode, "q": 0, "out": 0}
        if mode == TILELANG and family.endswith("prefill"):
            changes["batch"] = 0
        assert stub.call(f"routed_{family}", run_args(stub, family, planned, changes)) == (OK, "")


ZEROS = host(*[0] * 16)
# What a run in the incumbent's mode refuses: changes of the call, changes of its plan, the code and the message.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "lse": ({"lse": 0x30000}, {}, UNSUPPORTED, "lse is given, but the incumbent's entries give none"),
    "plan_host null": ({"plan_host": 0}, {}, INVALID, "plan_host is null; the incumbent's mode needs the plan of"),
    "plan_host of zeros": ({"plan_host": ZEROS}, {}, INVALID, "plan_host is no plan that"),
    "plan null": ({"plan": 0}, {}, INVALID, "plan is null"),
    "plan misaligned": ({"plan": 0x60008}, {}, INVALID, "plan is not aligned to 16 bytes"),
    "q misaligned": ({"q": 0x10008}, {}, INVALID, "q is not aligned to 16 bytes"),
    "q null": ({"q": 0}, {}, INVALID, "q is null"),
    "out null": ({"out": 0}, {}, INVALID, "out is null"),
    "pool null": ({"pool": 0}, {}, INVALID, "pool is null"),
    "page_ids null": ({"page_ids": 0}, {}, INVALID, "page_ids is null"),
    "another head_dim": ({"head_dim": 128}, {}, UNSUPPORTED, "head_dim is 128; compiled for "),
    "sm_scale zero": ({"sm_scale": 0.0}, {}, INVALID, "sm_scale is 0; it must be finite and above 0"),
    "layer_row past the page": ({"layer_row": 1216}, {}, INVALID, "layer_row 1216 and its 128 split rows run past"),
    "too many pool rows": ({"num_pages": 1 << 30}, {}, INVALID, "num_pages 1073741824 of rows_per_page 1280"),
}
DECODE_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "a group that the incumbent lacks": ({"num_q_heads": 192}, {}, UNSUPPORTED, "the group, is "),
    "other query heads": ({"num_q_heads": 16}, {}, INVALID, "num_q_heads is 16, but plan_host was built for 32"),
    "another page_size": ({"page_size": 128}, {}, INVALID, "page_size is 128, but plan_host was built for 64"),
    "q_rows too few": ({"q_rows": 7}, {}, INVALID, "row_offset 5 and the plan's batch 3 run past q_rows, 7"),
    "page ids too few": ({"num_page_ids": 4}, {}, INVALID, "num_page_ids is 4, but plan_host reaches into 5 page ids"),
    "a generated mode's plan": ({}, {"mode": TILELANG}, INVALID, "plan_host is no plan that"),
    "early": ({"early": 2}, {}, INVALID, "early is 2"),
}
PREFILL_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "other query heads": ({"num_q_heads": 16}, {}, INVALID, "num_q_heads is 16, but plan_host was built for 32"),
    "another batch": ({"batch": 4}, {}, INVALID, "batch is 4, but plan_host was built for 3"),
    "q_rows too few": ({"q_rows": 72}, {}, INVALID, "plan_host has rows up to 73, past q_rows, 72"),
    "page_indptr null": ({"page_indptr": 0}, {}, INVALID, "page_indptr is null"),
    "last_page_len null": ({"last_page_len": 0}, {}, INVALID, "last_page_len is null"),
    "q_indptr null": ({"q_indptr": 0}, {}, INVALID, "q_indptr is null"),
}
EVERY_RUN = [
    (family, case) for family in FAMILIES for case in (*RUNS, *(DECODE_RUNS if family.endswith("decode") else PREFILL_RUNS))
]


@pytest.mark.parametrize(("family", "case"), EVERY_RUN)
def test_a_run_refuses_by_name(stub: Library, family: str, case: str) -> None:
    cases = RUNS | (DECODE_RUNS if family.endswith("decode") else PREFILL_RUNS)
    changes, planned, code, text = cases[case]
    found = stub.call(f"routed_{family}", run_args(stub, family, planned, changes))
    assert found[0] == code, found
    assert found[1].startswith(f"tilepress_routed_{family}: ") and text in found[1], found


def test_the_incumbent_takes_early_and_does_nothing_else(stub: Library) -> None:
    """It permits, and no mode has to load early."""
    for family in ("sliding_decode", "global_decode"):
        for mode in (INCUMBENT, TILELANG):
            assert run(stub, family, {"mode": mode}, mode=mode, early=1)[0] == STUB


def test_a_workspace_too_small(stub: Library) -> None:
    need = WORKSPACE["global_decode"]
    assert run(stub, "global_decode", workspace_bytes=need)[0] == STUB
    code, message = run(stub, "global_decode", workspace_bytes=need - 1)
    assert code == INVALID
    assert f"workspace_bytes is {need - 1}; this plan needs {need}" in message
    assert run(stub, "sliding_decode", workspace=0, workspace_bytes=0)[0] == STUB


def run(library: Library, family: str, planned: Mapping[str, Any] | None = None, **changes: Any) -> tuple[int, str]:
    return library.call(f"routed_{family}", run_args(library, family, planned or {}, changes))


@pytest.mark.parametrize("family", ["global_decode", "sliding_decode"])
def test_the_incumbents_plan_is_none_of_a_generated_mode(stub: Library, family: str) -> None:
    code, message = run(stub, family, {"mode": INCUMBENT}, mode=TILELANG)
    assert code == INVALID
    assert message == f"tilepress_{family}: plan_host is no plan that this library's tilepress_decode_plan wrote"


def test_a_split_plan_is_none_of_the_folded_mode(stub: Library) -> None:
    code, message = run(stub, "global_decode", {"mode": TILELANG}, mode=TILELANG640)
    assert code == INVALID
    assert "page_format is 2, but plan_host was built for 1" in message


@pytest.mark.parametrize(("planner", "caller"), [("global", "sliding"), ("sliding", "global")])
def test_a_plan_of_the_other_layers_is_refused(stub: Library, planner: str, caller: str) -> None:
    """Where both have the same heads, as in E4B."""
    heads = {"num_q_heads": 8, "num_kv_heads": 2}
    words = plan(stub, f"{planner}_decode", **heads)
    args = build(f"routed_{caller}_decode", {"plan_host": host(*words), **heads})
    code, message = stub.call(f"routed_{caller}_decode", args)
    assert (code, message) == (
        INVALID,
        f"tilepress_routed_{caller}_decode: plan_host was written by another entry's planner",
    )


def test_a_prefills_plan_is_none_of_a_decode(stub: Library) -> None:
    words = plan(stub, "global_prefill")
    code, message = stub.call("routed_global_decode", build("routed_global_decode", {"plan_host": host(*words)}))
    assert code == INVALID
    assert "plan_host is no plan that" in message


@pytest.mark.parametrize("mode", [TILELANG, TILELANG640])
def test_a_generated_prefill_looks_at_no_plan(stub: Library, mode: int) -> None:
    for family in ("global_prefill", "sliding_prefill"):
        args = build(f"routed_{family}", {"mode": mode, "plan": 0, "plan_host": 0, "lse": 0x30000})
        assert stub.call(f"routed_{family}", args)[0] == STUB


# What reaches the incumbent


@pytest.fixture(scope="module")
def recorder(compiler: Callable[..., None], stub_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The stub's objects, less the incumbent's, with entries in their place that only record."""
    folder = tmp_path_factory.mktemp("recorder")
    lines = ["#include <tilepress.h>", "const char *recorded_name;", "double recorded[32];"]
    for name in SERVES.values():
        params = ", ".join(f"{ctype} {param}" for ctype, param in PARAMS[name])
        kept = [
            f"recorded[{place}] = (double)({'uintptr_t' if ctype.endswith('*') else ctype}){param};"
            for place, (ctype, param) in enumerate(PARAMS[name])
        ]
        lines.append(f'int {name}({params}) {{ recorded_name = "{name}"; {" ".join(kept)} return 0; }}')
    lines += [
        "int32_t batch_prefill_cta_tile_q(int32_t rows, int32_t q_heads, int32_t kv_heads, int32_t head_dim) {",
        "  const int64_t packed = (int64_t)rows * (q_heads / kv_heads);",
        "  return head_dim == 512 ? (packed <= 32 ? 16 : 32) : (packed <= 16 ? 16 : 64);",
        "}",
        *(f"int call_{entry}(const {STRUCTS[entry].__name__} *args) {{ return tilepress_{entry}(args); }}" for entry in ROUTED),
        *(
            f"const char *call_{name}(void) {{ return tilepress_{name}(); }}"
            for name in ("last_error", "build_info", "version")
        ),
        "int call_supports(void) { return 0; }",
        "int call_pool_bytes(void) { return 0; }",
        "int call_parse_mode(void) { return 0; }",
        "int call_mode_pool_bytes(void) { return 0; }",
    ]
    source, object_file, shared = folder / "recorder.c", folder / "recorder.o", folder / "recorder.so"
    source.write_text("\n".join(lines) + "\n")
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror")
    compiler("-x", "c", *strict, "-fPIC", f"-I{stub_library / 'include'}", "-c", source, "-o", object_file)
    units = [path for path in (stub_library / ".build/cmake").glob("*.o") if path.stem not in (*INCUMBENT_UNITS, "tilepress")]
    compiler("-shared", object_file, *units, "-Wl,-z,defs", "-Wl,-Bsymbolic", "-o", shared)
    return Library(shared)


def recorded(library: Library, family: str, planned: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, float]:
    """The parameters that the family's incumbent was called with, by name."""
    args = run_args(library, family, planned or {}, changes)
    assert library.call(f"routed_{family}", args) == (OK, "")
    name = ctypes.c_char_p.in_dll(library.c, "recorded_name").value
    assert name == SERVES[family].encode()
    found = (ctypes.c_double * 32).in_dll(library.c, "recorded")
    return {param: found[place] for place, (_, param) in enumerate(PARAMS[SERVES[family]])}


def in_pool(layer: str) -> dict[str, int]:
    """The second of ten layers: rows 128 to 191 are its K, 192 to 255 its V."""
    row = HEADS[layer]["num_kv_heads"] * HEAD_DIM[layer]
    return {
        "kv_data": 0x40000,
        "k_offset_elems": 128 * row,
        "v_offset_elems": 192 * row,
        "stride_page": 1280 * row,
        "page_indices": 0x50000,
        "page_size": 64,
        "num_qo_heads": 32,
        "num_kv_heads": HEADS[layer]["num_kv_heads"],
        "head_dim": HEAD_DIM[layer],
    }


CALLED = {"sm_scale": 0.5, "stream": 0x77}


def at(word: int) -> int:
    """The address of a word of the plan on the device."""
    return 0x60000 + 4 * word


def test_what_a_global_decode_is_called_with(recorder: Library) -> None:
    """Three requests from row 5 on; blocks for as many as the plan has room for."""
    row = 5 * 32 * 512 * 2
    lists = {"page_indptr": 24, "last_page_len_d": 36, "o_indptr": 44, "request_indices": 56, "kv_tile_indices": 584}
    assert recorded(recorder, "global_decode") == {
        **in_pool("global"),
        **CALLED,
        **{name: at(word) for name, word in lists.items()},
        "q": 0x10000 + row,
        "output": 0x20000 + row,
        "kv_chunk_size_ptr": at(CHUNK_TOKENS),
        "block_valid_mask": at(848),
        "tmp_v": 0x100000,
        "tmp_s": 0x100000 + GLOBAL_BLOCKS * 32 * 512 * 2,
        "batch_size": 3,
        "padded_batch_size": GLOBAL_BLOCKS,
    }


def test_what_a_sliding_decode_is_called_with(recorder: Library) -> None:
    row = 5 * 32 * 256 * 2
    lists = {"page_indptr": 24, "last_page_len_d": 36, "request_indices": 56, "kv_tile_indices": 72}
    expected = {
        **in_pool("sliding"),
        **CALLED,
        **{name: at(word) for name, word in lists.items()},
        "q": 0x10000 + row,
        "output": 0x20000 + row,
        "kv_chunk_size_ptr": at(CHUNK_TOKENS),
        "batch_size": 3,
        "window_left": 1023,
    }
    assert recorded(recorder, "sliding_decode") == expected
    assert recorded(recorder, "sliding_decode", {"window": 0}) == expected | {"window_left": -1}


def test_a_step_without_a_key_is_still_merged(recorder: Library) -> None:
    """So that its rows become zeros, as in every mode; no page ids are needed for that."""
    planned = {"kv_len": host(0, 0), "page_indptr": host(0, 0, 0), "batch": 2}
    for family, blocks in (("global_decode", "padded_batch_size"), ("sliding_decode", "batch_size")):
        found = recorded(recorder, family, planned, page_ids=0, num_page_ids=0)
        assert found["batch_size"] == 2
        assert found[blocks] > 0
        assert found["page_indices"] != 0


@pytest.mark.parametrize("layer", ["global", "sliding"])
def test_what_a_prefill_is_called_with(recorder: Library, layer: str) -> None:
    """70 rows of three requests; the plan's lists hold 20 and 4 words."""
    blocks = {"global": 19, "sliding": 4}[layer]
    room = up(blocks)
    expected = {
        **in_pool(layer),
        **CALLED,
        "q": 0x10000,
        "output": 0x20000,
        "page_indptr": 0x61000,
        "last_page_len_d": 0x62000,
        "q_indptr": 0x63000,
        "request_indices": at(36),
        "qo_tile_indices": at(36 + room),
        "kv_tile_indices": at(36 + 2 * room),
        "kv_chunk_size_ptr": at(CHUNK_TOKENS),
        "total_num_rows": at(TOTAL_ROWS),
        "seq_len": 70,
        "batch_size": 3,
        "padded_batch_size": blocks,
        **({"window_left": 1023} if layer == "sliding" else {}),
    }
    assert recorded(recorder, f"{layer}_prefill") == expected


def test_the_layer_and_the_pool_count_in_64_bits(recorder: Library) -> None:
    found = recorded(recorder, "global_decode", rows_per_page=1 << 26, layer_row=(1 << 26) - 128)
    assert found["stride_page"] == (1 << 26) * 2048
    assert found["k_offset_elems"] == ((1 << 26) - 128) * 2048
