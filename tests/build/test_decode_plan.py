"""The decode planner and the pool's size, on a host without a GPU: real calls into the stub library, which has them whole."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from codegen import abi
from codegen.abi.records import CType, Struct
from codegen.formats import FORMATS
from codegen.table import load as load_table

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
OK, INVALID = 0, 1
SPLIT, FOLDED = FORMATS["split"].code, FORMATS["folded"].code
PAGE = 64
SMS = 132
INT32_MAX = 2**31 - 1
NO_ITEM = (0, 0, 0, 0, -1, 0, 0, 0)  # of a CTA that has nothing to do
UNTOUCHED = 0x5A5A5A5A  # what a plan's array holds before a call

# Words of csrc/decode_plan.h, written down again: a layout that changed by accident is seen here.
HEADER_WORDS = 16
MAGIC, BATCH, ITEMS, Q_HEADS, KV_HEADS, PAGE_SIZE, PAGE_FORMAT, MAX_BATCH, MAX_SLOTS, SM_COUNT = range(10)
REQUEST, KV_HEAD, FIRST_PAGE, TILES, SLOT, LAST_LEN, HIDDEN, NEXT, ITEM_WORDS = range(9)
CARRIED = -2  # the slot of an item whose partial goes into the next item's
CHAIN = 5  # runs

SHIM = """
#include <tilepress.h>
int call_plan_size(const tilepress_decode_plan_size_args *args) { return tilepress_decode_plan_size(args); }
int call_plan(const tilepress_decode_plan_args *args) { return tilepress_decode_plan(args); }
const char *call_last_error(void) { return tilepress_last_error(); }
int32_t call_pool_bytes(int64_t num_pages, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t page_size,
                        int32_t page_format, int32_t k_eq_v, int64_t *bytes) {
  return tilepress_pool_bytes(num_pages, num_layers, num_kv_heads, head_dim, page_size, page_format, k_eq_v, bytes);
}
"""

NUMBERS = {
    CType.U64: ctypes.c_uint64,
    CType.I64: ctypes.c_int64,
    CType.I32: ctypes.c_int32,
    CType.U32: ctypes.c_uint32,
    CType.F32: ctypes.c_float,
}


def structure(name: str) -> type[ctypes.Structure]:
    """An argument struct as ctypes has it. Pointers are addresses."""
    struct: Struct = next(one for one in abi.structs(load_table(ROOT / "families.toml")) if one.name == name)
    fields = [(field.name, NUMBERS.get(field.type, ctypes.c_uint64)) for field in struct.fields]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


SizeArgs = structure("tilepress_decode_plan_size_args")
PlanArgs = structure("tilepress_decode_plan_args")


@pytest.fixture(scope="module")
def c(compiler: Callable[..., None], stub_library: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The stub library in a shared object, whose symbols its archive hides: hence the shim."""
    folder = tmp_path_factory.mktemp("planner")
    source, shim, linked = folder / "shim.c", folder / "shim.o", folder / "planner.so"
    source.write_text(SHIM)
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror")
    compiler("-x", "c", *strict, "-fPIC", f"-I{stub_library / 'include'}", "-c", source, "-o", shim)
    compiler("-shared", shim, stub_library / "lib" / "libtilepress.a", "-Wl,-z,defs", "-o", linked)
    loaded = ctypes.CDLL(str(linked))
    loaded.call_last_error.restype = ctypes.c_char_p
    loaded.call_pool_bytes.argtypes = [ctypes.c_int64, *[ctypes.c_int32] * 6, ctypes.POINTER(ctypes.c_int64)]
    return loaded


def message(c: ctypes.CDLL) -> str:
    """The last error."""
    return str(c.call_last_error().decode())


@dataclass(frozen=True)
class Sizes:
    """What plan_size answered."""

    code: int
    words: int
    workspace_bytes: int


PLAIN: Mapping[str, int] = {
    "max_batch": 8,
    "max_slots": 0,
    "num_q_heads": 32,
    "num_kv_heads": 4,
    "page_size": PAGE,
    "page_format": SPLIT,
    "sm_count": SMS,
    "chunk_tokens": 0,
    "reserved": 0,
}


def sizes(c: ctypes.CDLL, **changes: int) -> Sizes:
    """plan_size with the plain arguments and changes."""
    words, workspace = ctypes.c_int64(-7), ctypes.c_int64(-7)
    values: dict[str, int] = {
        "struct_size": ctypes.sizeof(SizeArgs),
        "plan_words_out": ctypes.addressof(words),
        "workspace_bytes_out": ctypes.addressof(workspace),
        "head_dim": 512,
        **PLAIN,
        **changes,
    }
    code = c.call_plan_size(ctypes.byref(SizeArgs(**values)))
    return Sizes(code, words.value, workspace.value)


@dataclass(frozen=True)
class Plan:
    """A plan's parts, as lists: requests [max_batch] of (first slot, partials of a KV head), chained [max_batch] how many of
    those are a chain, ctas [sm_count] of each one's items, by words."""

    header: list[int]
    requests: list[tuple[int, int]]
    chained: list[int]
    ctas: list[list[tuple[int, ...]]]

    @property
    def items(self) -> list[tuple[int, ...]]:
        """Every CTA's items."""
        return [item for items in self.ctas for item in items]

    def runs(self, request: int, kv_head: int) -> list[tuple[int, ...]]:
        """Items of a request and KV head, by page."""
        mine = [item for item in self.items if item[REQUEST] == request and item[KV_HEAD] == kv_head]
        return sorted(mine, key=lambda item: item[FIRST_PAGE])


def call_plan(
    c: ctypes.CDLL, lengths: Sequence[int], indptr: Sequence[int] | None = None, *, words: int | None = None, **changes: int
) -> tuple[int, list[int]]:
    """The planner's code and its array, of `words` words or what plan_size says, with four behind it. indptr: by default the
    pages that each length needs, and no more."""
    if indptr is None:
        indptr = [0]
        for length in lengths:
            indptr.append(indptr[-1] + -(-length // PAGE))
    if words is None:
        shared = {name: value for name, value in changes.items() if name in PLAIN}
        words = sizes(c, **shared).words
    array = (ctypes.c_int32 * (max(words, 0) + 4))(*[UNTOUCHED] * (max(words, 0) + 4))
    kv_len = (ctypes.c_int32 * len(lengths))(*lengths)
    pages = (ctypes.c_int32 * len(indptr))(*indptr)
    values: dict[str, int] = {
        "struct_size": ctypes.sizeof(PlanArgs),
        "kv_len": ctypes.addressof(kv_len),
        "page_indptr": ctypes.addressof(pages),
        "plan": ctypes.addressof(array),
        "plan_words": words,
        "batch": len(lengths),
        **PLAIN,
        **changes,
    }
    code = c.call_plan(ctypes.byref(PlanArgs(**values)))
    return code, list(array)


def parse(array: Sequence[int]) -> Plan:
    """The parts of a plan that was written."""

    def up(count: int) -> int:
        return (count + 3) // 4 * 4

    header = list(array[:HEADER_WORDS])
    items_at = HEADER_WORDS + 8 * header[MAX_BATCH]
    flat = array[HEADER_WORDS : HEADER_WORDS + 8 * header[MAX_BATCH]]
    items = [tuple(array[items_at + i * ITEM_WORDS :][:ITEM_WORDS]) for i in range(header[SM_COUNT] + header[MAX_SLOTS])]
    ctas = []
    for cta in range(header[SM_COUNT]):
        at, chain = cta, []
        while items[at] != NO_ITEM:
            chain.append(items[at])
            if not items[at][NEXT]:
                break
            assert header[SM_COUNT] <= items[at][NEXT] and items[at][NEXT] > at, "a next item lies further on"
            at = items[at][NEXT]
        ctas.append(chain)
    return Plan(header, list(zip(flat[::8], flat[1::8], strict=True)), list(flat[6::8]), ctas)


def plan(c: ctypes.CDLL, kv_len: Sequence[int], indptr: Sequence[int] | None = None, **changes: int) -> Plan:
    """A plan that the planner accepts."""
    code, array = call_plan(c, kv_len, indptr, **changes)
    assert code == OK, message(c)
    assert array[-4:] == [UNTOUCHED] * 4, "written past plan_words"
    return parse(array)


def pages_of(length: int) -> int:
    """Pages that a length needs."""
    return -(-length // PAGE)


# --- Sizes


def test_sizes_by_hand(c: ctypes.CDLL) -> None:
    """31B on an H200: 33 splits of each of 4 KV heads a request, 8 requests; group 8."""
    slots = 8 * 4 * 33
    words = 16 + 64 + (132 + slots) * 8  # header; 8 requests of 8; items, one of each CTA and one of each slot
    assert sizes(c) == Sizes(OK, words, slots * 8 * (512 + 2) * 4)


def test_declared_slots_replace_the_rule(c: ctypes.CDLL) -> None:
    assert sizes(c, max_slots=10) == Sizes(OK, 16 + 64 + (132 + 10) * 8, 10 * 8 * 514 * 4)
    assert sizes(c, max_slots=10, chunk_tokens=640) == sizes(c, max_slots=10)


def test_more_kv_heads_than_multiprocessors_still_get_one_split(c: ctypes.CDLL) -> None:
    assert sizes(c, sm_count=3, max_batch=1).workspace_bytes == 4 * 8 * 514 * 4
    assert plan(c, [10_000], sm_count=3).requests[0] == (0, 1)


# --- What a plan holds


@pytest.mark.parametrize("page_format", [SPLIT, FOLDED])
def test_the_header_names_what_the_plan_is_for(c: ctypes.CDLL, page_format: int) -> None:
    # The lists have two pages and one: the plan reaches into three page ids.
    made = plan(c, [100, 1], page_format=page_format)
    assert made.header == [0x54504434, 2, 12, 32, 4, PAGE, page_format, 8, 8 * 4 * 33, SMS, 3, *[0] * 5]


LENGTHS = (1, 2, 63, 64, 65, 128, 129, 2111, 2112, 2113, 10_602, 40_002, 81_653, 163_336, 262_143, 262_144)
HEADS = ((8, 1), (16, 1), (16, 2), (32, 4), (8, 2), (32, 8))


@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("length", [*LENGTHS, 4_480])
def test_boundaries_are_floors(c: ctypes.CDLL, length: int, q_heads: int, kv_heads: int) -> None:
    """sm_count / kv_heads splits, or, where fewer than two thirds of them leave no run longer, as few as that; run i is the
    pages [floor(i pages / splits), floor((i + 1) ...))."""
    made = plan(c, [length], num_q_heads=q_heads, num_kv_heads=kv_heads)
    pages = pages_of(length)
    most = SMS // kv_heads
    longest = -(-pages // most)
    splits = -(-pages // longest)
    if longest > 1 and 3 * splits >= 2 * most:
        splits = most
    assert made.requests[0] == (0, splits)
    for head in range(kv_heads):
        runs = made.runs(0, head)
        bounds = [i * pages // splits for i in range(splits + 1)]
        assert [run[FIRST_PAGE] for run in runs] == bounds[:-1]
        assert [run[TILES] for run in runs] == [b - a for a, b in itertools.pairwise(bounds)]
        assert [run[SLOT] for run in runs] == list(range(head * splits, (head + 1) * splits))
        assert [run[LAST_LEN] for run in runs] == [PAGE] * (splits - 1) + [length - (pages - 1) * PAGE]


def test_unequal_splits(c: ctypes.CDLL) -> None:
    """Eight pages in chunks of three: as equal as whole pages allow, not three, three and a rest of two."""
    made = plan(c, [7 * 64 + 20], chunk_tokens=192, max_slots=12)
    assert made.requests[0] == (0, 3)
    assert [run[TILES] for run in made.runs(0, 2)] == [2, 3, 3]
    assert [run[FIRST_PAGE] for run in made.runs(0, 2)] == [0, 2, 5]


@pytest.mark.parametrize("chunk", [64, 128, 192, 640, 262_144])
def test_chunks_of_a_given_size(c: ctypes.CDLL, chunk: int) -> None:
    lengths = [1, 64, 65, 1000, 5000]
    made = plan(c, lengths, chunk_tokens=chunk, max_slots=1000)
    for request, length in enumerate(lengths):
        assert len(made.runs(request, 0)) == -(-pages_of(length) * PAGE // chunk)
        assert all(run[TILES] * PAGE <= chunk for run in made.runs(request, 0))


def batches() -> list[list[int]]:
    """Batches of every kind of length, empty requests among them."""
    draw = random.Random(1)
    found: list[list[int]] = [[], [0], [0, 0, 1, 0], [262_144] * 8, [1] * 8, list(LENGTHS[:8]), list(LENGTHS[8:])]
    found += [[draw.choice((0, 1, draw.randrange(1, 300), draw.randrange(1, 262_145))) for _ in range(8)] for _ in range(20)]
    return found


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(16, 1), (32, 4), (16, 2)])
@pytest.mark.parametrize("spare", [0, 3], ids=["", "reserved pages"])
def test_every_page_is_read_once(c: ctypes.CDLL, q_heads: int, kv_heads: int, spare: int) -> None:
    """Of every request and KV head: the pages that its length needs, none that is only reserved, each in one item; slots are
    distinct and within the declared number, and a request's are where its entry says; CTAs share the items out."""
    for lengths in batches():
        indptr = [2]  # pages in front that belong to nobody
        for length in lengths:
            indptr.append(indptr[-1] + pages_of(length) + spare)
        made = plan(c, lengths, indptr, num_q_heads=q_heads, num_kv_heads=kv_heads)
        slots = [item[SLOT] for item in made.items if item[SLOT] != CARRIED]
        assert len(set(slots)) == len(slots)
        assert set(slots) == set(range(len(slots))), "slots without a gap"
        assert len(slots) <= made.header[MAX_SLOTS]
        for request, length in enumerate(lengths):
            first_slot, partials = made.requests[request]
            for head in range(kv_heads):
                runs = made.runs(request, head)
                assert [run[SLOT] for run in runs if run[SLOT] != CARRIED] == [
                    first_slot + head * partials + i for i in range(partials)
                ]
                pages = [page for run in runs for page in range(run[FIRST_PAGE], run[FIRST_PAGE] + run[TILES])]
                assert pages == list(range(indptr[request], indptr[request] + pages_of(length)))
                assert sum((run[TILES] - 1) * PAGE + run[LAST_LEN] for run in runs) == length
                assert all(run[TILES] >= 1 and 1 <= run[LAST_LEN] <= PAGE for run in runs)
        assert made.requests[len(lengths) :] == [(0, 0)] * (8 - len(lengths))
        assert len(made.items) == made.header[ITEMS]


def test_no_cta_has_more_than_its_share_and_one_run(c: ctypes.CDLL) -> None:
    """Greedy assignment: the CTA that got an item had the least before, so no more than the average. Whole chains come first,
    and enough runs after them that these decide."""
    for lengths in batches():
        made = plan(c, lengths)
        loads = [sum(item[TILES] for item in items) for items in made.ctas]
        longest = max((item[TILES] for item in made.items), default=0)
        assert max(loads) <= sum(loads) / SMS + longest


def chains(items: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """A CTA's items by the partial that they are part of."""
    found: list[list[tuple[int, ...]]] = [[]]
    for item in items:
        found[-1].append(item)
        if item[SLOT] != CARRIED:
            found.append([])
    assert not found[-1], "a CTA's last partial is carried nowhere"
    return found[:-1]


def test_a_whole_chain_is_five_runs_in_a_row(c: ctypes.CDLL) -> None:
    """64 requests of 10,602 tokens, 166 pages in 33 runs: seven chains of a KV head, the longest of at most 30 pages. For each
    of 132 CTAs so many need the 664 pages of six requests: those of the last six are spread."""
    made = plan(c, [10_602] * 64, max_batch=64)
    assert made.chained == [1] * 58 + [CHAIN] * 6
    assert made.requests[57:59] == [(57 * 4 * 7, 7), (58 * 4 * 7, 33)]
    whole = [chain for items in made.ctas for chain in chains(items) if chain[0][REQUEST] < 58]
    assert len(whole) == 58 * 4 * 7
    for chain in whole:
        request, kv_head = chain[0][REQUEST], chain[0][KV_HEAD]
        at = made.runs(request, kv_head).index(chain[0])
        assert at % CHAIN == 0
        assert chain == made.runs(request, kv_head)[at : at + CHAIN]
        assert chain[-1][SLOT] == made.requests[request][0] + kv_head * 7 + at // CHAIN
    assert all(len(chain) == 1 for items in made.ctas for chain in chains(items) if chain[0][REQUEST] >= 58)


def test_a_chain_as_long_as_a_ctas_share_is_spread(c: ctypes.CDLL) -> None:
    """A long request first, whose chains would be 385 pages where a CTA's share is 152, and then short ones."""
    made = plan(c, [163_336] + [10_602] * 15, max_batch=16)
    assert made.chained == [CHAIN] * 16
    assert CARRIED not in {item[SLOT] for item in made.items}


@pytest.mark.parametrize("lengths", [[10_602], [262_144], [40_002] * 4, [1, 64, 65]], ids=str)
def test_a_batch_with_no_runs_to_spare_has_no_whole_chains(c: ctypes.CDLL, lengths: list[int]) -> None:
    made = plan(c, lengths)
    assert made.chained == [CHAIN] * len(lengths) + [0] * (8 - len(lengths))
    assert CARRIED not in {item[SLOT] for item in made.items}


def test_a_lone_long_request_fills_the_machine(c: ctypes.CDLL) -> None:
    """31B and 12B at 163,336 tokens, 2,553 pages, 12B at 40,002, 626 pages, for which 126 runs of five would do, and 31B at
    10,602, 166 pages, for which 28 runs of six would: one item a multiprocessor. 12B at 10,602: 83 runs of two pages, since of
    132 some would have two as well. Their lengths differ by one page at most."""
    for length, q_heads, kv_heads, ctas in (
        (163_336, 32, 4, SMS),
        (163_336, 16, 1, SMS),
        (40_002, 16, 1, SMS),
        (10_602, 32, 4, SMS),
        (10_602, 16, 1, 83),
    ):
        made = plan(c, [length], num_q_heads=q_heads, num_kv_heads=kv_heads)
        assert sorted(len(items) for items in made.ctas) == [0] * (SMS - ctas) + [1] * ctas
        assert max(item[TILES] for item in made.items) - min(item[TILES] for item in made.items) <= 1


def test_a_requests_runs_depend_on_its_own_length_only(c: ctypes.CDLL) -> None:
    """Alone, first, last, in the middle, among the longest, and under other limits of batch and slots: the same runs."""

    def shape(made: Plan, request: int, indptr: Sequence[int]) -> list[list[tuple[int, ...]]]:
        return [
            [(run[FIRST_PAGE] - indptr[request], run[TILES], run[LAST_LEN]) for run in made.runs(request, head)]
            for head in range(4)
        ]

    for length in LENGTHS:
        alone = shape(plan(c, [length]), 0, [0])
        for others in ([], [1], [262_144] * 7, [0, 40_002, 0, 65]):
            for at in {0, len(others) // 2, len(others)}:
                lengths = [*others[:at], length, *others[at:]]
                indptr = [0]
                for one in lengths:
                    indptr.append(indptr[-1] + pages_of(one))
                assert shape(plan(c, lengths), at, indptr) == alone
                assert shape(plan(c, lengths, max_batch=100, max_slots=5000), at, indptr) == alone


def test_empty_requests_have_no_items(c: ctypes.CDLL) -> None:
    made = plan(c, [0, 100, 0])
    assert [splits for _, splits in made.requests[:3]] == [0, 2, 0]
    assert {item[REQUEST] for item in made.items} == {1}


def test_no_requests_make_an_empty_plan(c: ctypes.CDLL) -> None:
    code, array = call_plan(c, [], kv_len=0, page_indptr=0)
    assert code == OK, message(c)
    made = parse(array)
    assert made.header[BATCH] == made.header[ITEMS] == 0
    assert made.ctas == [[]] * SMS


def test_a_plan_is_written_whole(c: ctypes.CDLL) -> None:
    """Nothing of what the array held before is left, and a longer array keeps what lies behind."""
    words = sizes(c).words
    code, array = call_plan(c, [100], words=words + 50)
    assert code == OK
    assert UNTOUCHED not in array[:words]
    assert array[words:] == [UNTOUCHED] * 54
    assert call_plan(c, [100])[1][:words] == array[:words], "the same plan twice"


# --- Refusals

MEANT_FOR_BOTH: dict[str, tuple[dict[str, int], str]] = {
    "max_batch zero": ({"max_batch": 0}, "max_batch is 0; it must be 1 or more"),
    "max_batch negative": ({"max_batch": -1}, "max_batch is -1"),
    "max_batch past the grid": ({"max_batch": 65_536}, "max_batch is 65536; it must be 65535 or less"),
    "max_slots negative": ({"max_slots": -1}, "max_slots is -1"),
    "max_slots too many": ({"max_slots": (1 << 24) + 1}, "max_slots comes to 16777217"),
    "the rule's slots too many": (
        {"max_batch": 65_535, "num_q_heads": 400, "num_kv_heads": 400, "sm_count": 400},
        "max_slots comes to 26214000",
    ),
    "num_q_heads zero": ({"num_q_heads": 0}, "num_q_heads is 0"),
    "num_kv_heads zero": ({"num_kv_heads": 0}, "num_kv_heads is 0"),
    "num_kv_heads past the grid": ({"num_kv_heads": 65_536}, "num_kv_heads is 65536"),
    "no whole group": ({"num_kv_heads": 5}, "num_q_heads is 32, not a multiple of num_kv_heads, 5"),
    "page_size zero": ({"page_size": 0}, "page_size is 0"),
    "page_size negative": ({"page_size": -64}, "page_size is -64"),
    "page_format zero": ({"page_format": 0}, "page_format is 0"),
    "page_format unknown": ({"page_format": 3}, "page_format is 3"),
    "sm_count zero": ({"sm_count": 0}, "sm_count is 0"),
    "sm_count too many": ({"sm_count": 65_536}, "sm_count is 65536"),
    "chunk_tokens negative": ({"chunk_tokens": -64, "max_slots": 99}, "chunk_tokens is -64"),
    "chunk_tokens no whole tiles": ({"chunk_tokens": 100, "max_slots": 99}, "chunk_tokens is 100, not whole tiles"),
    "chunk_tokens without max_slots": ({"chunk_tokens": 640}, "max_slots is 0, but chunk_tokens"),
    "struct_size zero": ({"struct_size": 0}, "struct_size is 0"),
    "struct_size huge": ({"struct_size": 2**63}, "struct_size is 9223372036854775808"),
}
MEANT_FOR_SIZES: dict[str, tuple[dict[str, int], str]] = {
    "reserved": ({"reserved": 1}, "reserved is 1"),
    "plan_words_out null": ({"plan_words_out": 0}, "plan_words_out is null"),
    "workspace_bytes_out null": ({"workspace_bytes_out": 0}, "workspace_bytes_out is null"),
    "head_dim zero": ({"head_dim": 0}, "head_dim is 0"),
    "a workspace past 2^63": (
        {"max_slots": 1 << 24, "num_q_heads": INT32_MAX, "num_kv_heads": 1, "head_dim": INT32_MAX},
        "head_dim",
    ),
}
MEANT_FOR_PLANS: dict[str, tuple[dict[str, int], str]] = {
    "plan null": ({"plan": 0}, "plan is null"),
    "kv_len null": ({"kv_len": 0}, "kv_len is null"),
    "page_indptr null": ({"page_indptr": 0}, "page_indptr is null"),
    "batch negative": ({"batch": -1}, "batch is -1"),
    "batch past max_batch": ({"max_batch": 1}, "batch is 2, past max_batch, 1"),
    "plan_words negative": ({"plan_words": -1}, "plan_words is -1"),
    "plan_words zero": ({"plan_words": 0}, "plan_words is 0; this plan needs 9584"),
    "plan_words one short": ({"plan_words": 9583}, "plan_words is 9583; this plan needs 9584"),
    "max_slots one short": ({"max_slots": 23}, "max_slots is 23; request 1 needs slots up to 24"),
    "chunks need more slots": ({"chunk_tokens": 64, "max_slots": 23}, "max_slots is 23; request 1 needs slots up to 24"),
}


@pytest.mark.parametrize("name", [*MEANT_FOR_BOTH, *MEANT_FOR_SIZES])
def test_plan_size_refuses_by_name(c: ctypes.CDLL, name: str) -> None:
    changes, text = (MEANT_FOR_BOTH | MEANT_FOR_SIZES)[name]
    answer = sizes(c, **changes)
    assert (answer.code, answer.words, answer.workspace_bytes) == (INVALID, -7, -7)
    assert message(c).startswith("tilepress_decode_plan_size: ")
    assert text in message(c)


@pytest.mark.parametrize("name", [*MEANT_FOR_BOTH, *MEANT_FOR_PLANS])
def test_the_planner_refuses_by_name_and_leaves_the_array(c: ctypes.CDLL, name: str) -> None:
    """Two requests of two and four pages: 24 slots."""
    changes, text = (MEANT_FOR_BOTH | MEANT_FOR_PLANS)[name]
    code, array = call_plan(c, [100, 200], None, words=10000, **changes)
    assert code == INVALID
    assert message(c).startswith("tilepress_decode_plan: ")
    assert text in message(c)
    assert set(array) == {UNTOUCHED}


@pytest.mark.parametrize(
    ("kv_len", "indptr", "text"),
    [
        ((100, -1), (0, 2, 4), "kv_len[1] is -1; it must be 0 or more"),
        ((100, -(2**31)), (0, 2, 4), "kv_len[1] is -2147483648"),
        ((100, 64), (0, 2, 1), "page_indptr[1] and the next are 2 and 1; they must not decrease from 0"),
        ((100, 64), (-1, 2, 3), "page_indptr[0] and the next are -1 and 2"),
        ((100, 64), (0, 1, 3), "page_indptr lists 1 pages for request 0, but its 100 tokens need 2"),
        ((100, 65), (0, 2, 3), "page_indptr lists 1 pages for request 1, but its 65 tokens need 2"),
        ((100, INT32_MAX), (0, 2, 3), "page_indptr lists 1 pages for request 1, but its 2147483647 tokens need 33554432"),
    ],
    ids=str,
)
def test_lists_that_contradict_each_other_are_refused(
    c: ctypes.CDLL, kv_len: Sequence[int], indptr: Sequence[int], text: str
) -> None:
    code, array = call_plan(c, kv_len, indptr)
    assert code == INVALID
    assert text in message(c)
    assert set(array) == {UNTOUCHED}


def test_a_null_argument_struct_is_refused(c: ctypes.CDLL) -> None:
    assert c.call_plan(None) == INVALID
    assert "tilepress_decode_plan" in message(c)
    assert c.call_plan_size(None) == INVALID


def test_a_refusal_leaves_the_last_plan_whole(c: ctypes.CDLL) -> None:
    array = (ctypes.c_int32 * 10000)()
    lengths, pages = (ctypes.c_int32 * 2)(100, 200), (ctypes.c_int32 * 3)(0, 2, 6)
    values: dict[str, Any] = {
        "struct_size": ctypes.sizeof(PlanArgs),
        "kv_len": ctypes.addressof(lengths),
        "page_indptr": ctypes.addressof(pages),
        "plan": ctypes.addressof(array),
        "plan_words": 10000,
        "batch": 2,
        **PLAIN,
    }
    assert c.call_plan(ctypes.byref(PlanArgs(**values))) == OK
    before = list(array)
    pages[2] = 5
    assert c.call_plan(ctypes.byref(PlanArgs(**values))) == INVALID
    assert list(array) == before


# --- The pool's size


def pool_bytes(c: ctypes.CDLL, *arguments: int, null: bool = False) -> tuple[int, int]:
    """The code and the bytes, -7 where none were written."""
    found = ctypes.c_int64(-7)
    code = c.call_pool_bytes(*arguments, None if null else ctypes.byref(found))
    return code, found.value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # 31B: 10 global layers, 4 KV heads. A token of a layer is 2 rows of 512 columns a head split, one of 640 folded.
        ((1000, 10, 4, 512, 64, SPLIT, 1), 1000 * 10 * 64 * 4 * 1024 * 2),
        ((1000, 10, 4, 512, 64, FOLDED, 1), 1000 * 10 * 64 * 4 * 640 * 2),
        # 12B: 8 layers, 1 KV head.
        ((7, 8, 1, 512, 64, SPLIT, 1), 7_340_032),
        ((7, 8, 1, 512, 64, FOLDED, 1), 4_587_520),
        # E4B: V is a projection of its own.
        ((1, 7, 2, 512, 64, SPLIT, 0), 1_835_008),
        # A sliding pool.
        ((3, 50, 16, 256, 64, SPLIT, 0), 3 * 50 * 64 * 16 * 512 * 2),
        # Past 2^32 and past 2^53.
        ((2**40, 1, 1, 512, 64, SPLIT, 0), 2**57),
    ],
    ids=str,
)
def test_pool_bytes_by_hand(c: ctypes.CDLL, arguments: Sequence[int], expected: int) -> None:
    assert pool_bytes(c, *arguments) == (OK, expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 10, 4, 512, 64, SPLIT, 1), "num_pages is 0; it must be 1 or more"),
        ((-1, 10, 4, 512, 64, SPLIT, 1), "num_pages is -1"),
        ((1, 0, 4, 512, 64, SPLIT, 1), "num_layers is 0"),
        ((1, 10, 0, 512, 64, SPLIT, 1), "num_kv_heads is 0"),
        ((1, 10, 4, 0, 64, SPLIT, 1), "head_dim is 0"),
        ((1, 10, 4, 512, -64, SPLIT, 1), "page_size is -64"),
        ((1, 10, 4, 512, 64, 0, 1), "page_format is 0"),
        ((1, 10, 4, 512, 64, 3, 1), "page_format is 3"),
        ((1, 10, 4, 512, 64, SPLIT, 2), "k_eq_v is 2; it must be 0 or 1"),
        ((1, 10, 4, 512, 64, SPLIT, -1), "k_eq_v is -1"),
        ((1, 10, 4, 512, 64, FOLDED, 0), "page_format folded needs k_eq_v"),
        ((2**62, 10, 4, 512, 64, SPLIT, 1), "num_pages 4611686018427387904 makes a pool of 2^63 bytes or more"),
        ((2**62, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, SPLIT, 1), "2^63 bytes or more"),
    ],
    ids=str,
)
def test_pool_bytes_refuses_by_name(c: ctypes.CDLL, arguments: Sequence[int], text: str) -> None:
    code, found = pool_bytes(c, *arguments)
    assert (code, found) == (INVALID, -7)
    assert message(c).startswith("tilepress_pool_bytes: ")
    assert text in message(c)


def test_pool_bytes_needs_somewhere_to_write(c: ctypes.CDLL) -> None:
    assert pool_bytes(c, 1, 10, 4, 512, 64, SPLIT, 1, null=True) == (INVALID, -7)
    assert "bytes is null" in message(c)


def test_the_widest_row_does_not_wrap(c: ctypes.CDLL) -> None:
    """A folded row is 128 columns wider than the head: past 2^31 here."""
    assert pool_bytes(c, 1, 1, 1, INT32_MAX, 64, FOLDED, 1) == (OK, (INT32_MAX + 128) * 64 * 2)
