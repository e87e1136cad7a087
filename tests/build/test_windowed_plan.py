"""Plans of rows that see a window, over page lists whose front is released: every visible run worked out by hand.

A page holds 64 tokens. A row at the end of kv_len tokens sees the last `window` of them; its request's page list begins at
position `origin`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from .calls import INT32_MAX, INVALID, OK, SPLIT, STRUCTS, Library, host

pytestmark = pytest.mark.build

# Words of csrc/decode_plan.h, written down again.
HEADER = 16
ITEMS, MAX_BATCH, MAX_SLOTS, SM_COUNT = 2, 7, 8, 9
REQUEST, KV_HEAD, FIRST_PAGE, TILES, SLOT, LAST_LEN, HIDDEN, NEXT = range(8)
ITEM_WORDS = 8
SLOTS = 64


class Planner:
    """Calls of the planner in the stub, which has it whole: as many slots as a test needs, one KV head, one multiprocessor."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def call(
        self,
        kv_len: Sequence[int],
        indptr: Sequence[int],
        *,
        origin: Sequence[int] | None = None,
        window: int,
        sm_count: int = 1,
        kv_heads: int = 1,
        chunk_tokens: int = 0,
    ) -> tuple[int, str, list[int]]:
        """The code, the message, and the plan's words."""
        struct = STRUCTS["decode_plan"]
        words = HEADER + 8 * len(kv_len) + 8 * (sm_count + SLOTS)
        plan = (ctypes.c_int32 * words)()
        args = struct(
            struct_size=ctypes.sizeof(struct),
            kv_len=host(*kv_len),
            page_indptr=host(*indptr),
            kv_origin=host(*origin) if origin else 0,
            plan=ctypes.addressof(plan),
            plan_words=words,
            batch=len(kv_len),
            max_batch=len(kv_len),
            max_slots=SLOTS,
            num_q_heads=8 * kv_heads,
            num_kv_heads=kv_heads,
            page_size=64,
            page_format=SPLIT,
            sm_count=sm_count,
            chunk_tokens=chunk_tokens,
            window=window,
        )
        code, message = self.library.call("decode_plan", args)
        return code, message, list(plan)

    def items(self, *args: Sequence[int], **options: object) -> list[list[int]]:
        """The plan's items, by slot."""
        code, message, plan = self.call(*args, **options)  # type: ignore[arg-type]
        assert code == OK, message
        start = HEADER + 8 * plan[MAX_BATCH]
        rows = [plan[start + i * ITEM_WORDS :][:ITEM_WORDS] for i in range(plan[SM_COUNT] + plan[MAX_SLOTS])]
        rows = [[*row[:NEXT], 0] for row in rows if row[TILES]]  # which CTA takes them is not of interest here
        assert len(rows) == plan[ITEMS]
        return sorted(rows, key=lambda row: row[SLOT])


@pytest.fixture(scope="module")
def planner(stub: Library) -> Planner:
    return Planner(stub)


# kv_len, window, origin; then what the one item must be: pages skipped at the front of the list, tiles, tokens of the first
# page that are older than the window, tokens of the last page.
RUNS: dict[str, tuple[int, int, int, tuple[int, int, int, int]]] = {
    "no window": (130, 0, 0, (0, 3, 0, 2)),
    # Keys 66 to 129: two of the second page are older.
    "a window over two pages": (130, 64, 0, (1, 2, 2, 2)),
    # Keys 64 to 127: the second page, whole.
    "a window that is a page": (128, 64, 0, (1, 1, 0, 64)),
    # Keys 65 to 128.
    "one token further": (129, 64, 0, (1, 2, 1, 1)),
    # Key 128, the first of the third page; key 127, the last of the second.
    "a window of one token": (129, 1, 0, (2, 1, 0, 1)),
    "a window of one token at a page's end": (128, 1, 0, (1, 1, 63, 64)),
    "a window of two tokens over a boundary": (129, 2, 0, (1, 2, 63, 1)),
    "a window larger than the context": (100, 512, 0, (0, 2, 0, 36)),
    "a window of the context": (100, 100, 0, (0, 2, 0, 36)),
    "a window of all but one": (100, 99, 0, (0, 2, 1, 36)),
    "one token": (1, 512, 0, (0, 1, 0, 1)),
    # Keys 488 to 999; 488 is the 40th of page 7, which begins at 448. 1,000 tokens end 40 into page 15.
    "an unreleased front": (1000, 512, 0, (7, 9, 40, 40)),
    "a front released up to the window": (1000, 512, 448, (0, 9, 40, 40)),
    "a front released but for a page": (1000, 512, 384, (1, 9, 40, 40)),
    "an origin at the first key": (1024, 512, 512, (0, 8, 0, 64)),
    "the widest window": (1000, 2**29, 0, (0, 16, 0, 40)),
    # 2^31 - 1 tokens: 63 in the last page; the first key is the 63rd of the ninth page from the end.
    "the longest context": (INT32_MAX, 512, 0, (33554423, 9, 63, 63)),
    "the longest context released": (INT32_MAX, 512, 33554423 * 64, (0, 9, 63, 63)),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_visible_run(case: str, planner: Planner) -> None:
    kv_len, window, origin, (skipped, tiles, hidden, last_len) = RUNS[case]
    pages = -(-(kv_len - origin) // 64)
    (item,) = planner.items([kv_len], [10, 10 + pages], origin=[origin], window=window)
    assert (item[FIRST_PAGE], item[TILES]) == (10 + skipped, tiles)
    assert (item[HIDDEN], item[LAST_LEN]) == (hidden, last_len)
    assert (item[REQUEST], item[KV_HEAD], item[SLOT], item[7]) == (0, 0, 0, 0)


def test_an_absent_origin_is_zero(planner: Planner) -> None:
    assert planner.items([1000], [0, 16], window=512) == planner.items([1000], [0, 16], origin=[0], window=512)


def test_pages_past_the_context_are_not_visited(planner: Planner) -> None:
    assert planner.items([130], [0, 3], window=64) == planner.items([130], [0, 50], window=64)


# Splits: 9 visible pages, boundaries at floor(i * 9 / splits).
SPLITS: dict[str, tuple[dict[str, int], list[tuple[int, int, int, int]]]] = {
    # Three would leave no run longer, but that is three quarters: 0, 2, 4, 6, 9. First page, tiles, hidden, last_len.
    "four multiprocessors": ({"sm_count": 4}, [(7, 2, 40, 64), (9, 2, 0, 64), (11, 2, 0, 64), (13, 3, 0, 40)]),
    # Five leave no run longer than eight would, and that is under two thirds: 0, 1, 3, 5, 7, 9.
    "eight multiprocessors": (
        {"sm_count": 8},
        [(7, 1, 40, 64), (8, 2, 0, 64), (10, 2, 0, 64), (12, 2, 0, 64), (14, 2, 0, 40)],
    ),
    # As many partials as there are pages, whatever the context.
    "more multiprocessors than pages": (
        {"sm_count": 132},
        [(7, 1, 40, 64), *((page, 1, 0, 64) for page in range(8, 15)), (15, 1, 0, 40)],
    ),
    # Two a head: 0, 4, 9.
    "two KV heads": ({"sm_count": 4, "kv_heads": 2}, [(7, 4, 40, 64), (11, 5, 0, 40)] * 2),
    # ceil(9 / 2) partials: 0, 1, 3, 5, 7, 9.
    "chunks of two pages": (
        {"chunk_tokens": 128},
        [(7, 1, 40, 64), (8, 2, 0, 64), (10, 2, 0, 64), (12, 2, 0, 64), (14, 2, 0, 40)],
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_visible_run_is_split(case: str, planner: Planner) -> None:
    options, runs = SPLITS[case]
    items = planner.items([1000], [0, 16], window=512, **options)
    assert [(item[FIRST_PAGE], item[TILES], item[HIDDEN], item[LAST_LEN]) for item in items] == runs
    assert [item[SLOT] for item in items] == list(range(len(runs)))
    heads = options.get("kv_heads", 1)
    assert [item[KV_HEAD] for item in items] == sorted(list(range(heads)) * (len(runs) // heads))


def test_a_request_is_split_as_if_it_were_alone(planner: Planner) -> None:
    """Requests with origins of their own, one of them empty: each has the runs that it has by itself."""
    lengths, origins, pages = [1000, 0, 130, 1000], [448, 512, 0, 0], [9, 0, 3, 16]
    indptr = [0, 9, 9, 12, 28]
    together = planner.items(lengths, indptr, origin=origins, window=512, sm_count=4)
    for request, (kv_len, origin, count) in enumerate(zip(lengths, origins, pages, strict=True)):
        first = indptr[request]
        alone = planner.items([kv_len], [first, first + count], origin=[origin], window=512, sm_count=4)
        found = [item for item in together if item[REQUEST] == request]
        columns = (KV_HEAD, FIRST_PAGE, TILES, LAST_LEN, HIDDEN)
        assert [[item[c] for c in columns] for item in found] == [[item[c] for c in columns] for item in alone]
    assert [sum(item[REQUEST] == request for item in together) for request in range(4)] == [4, 0, 3, 4]


# What is refused: kv_len, pages listed, origin, window; the message names the request and the numbers.
REFUSED: dict[str, tuple[int, int, int, int, str]] = {
    # 1,000 tokens, of which 488 to 999 are seen.
    "an origin past the first visible key": (
        1000,
        100,
        512,
        512,
        "kv_origin[0] is 512, past 488, the first key that its row sees",
    ),
    "an origin at the context's end": (1024, 100, 1024, 512, "kv_origin[0] is 1024, past 512, the first key"),
    "an origin past the context": (100, 100, 128, 1, "kv_origin[0] is 128, past 99, the first key"),
    "an origin with no window": (1000, 100, 64, 0, "kv_origin[0] is 64, past 0, the first key"),
    "an origin with a window larger than the context": (100, 100, 64, 512, "kv_origin[0] is 64, past 0, the first key"),
    # From 448 on, 552 tokens in 9 pages.
    "a list too short": (1000, 8, 448, 512, "page_indptr lists 8 pages for request 0, but its 552 tokens need 9"),
    "a list that lacks the released front": (
        1000,
        9,
        0,
        512,
        "page_indptr lists 9 pages for request 0, but its 1000 tokens need 16",
    ),
    "an empty list": (1, 0, 0, 512, "page_indptr lists 0 pages for request 0, but its 1 tokens need 1"),
    "an origin inside a page": (1000, 100, 450, 512, "kv_origin[0] is 450; it must be a multiple of page_size, 64"),
    "a negative origin": (1000, 100, -64, 512, "kv_origin[0] is -64; it must be a multiple of page_size, 64"),
    "a negative window": (1000, 100, 0, -1, "window is -1; it must be 0 or more"),
    "a window past 2^29": (1000, 100, 0, 2**29 + 1, "window is 536870913; it must be 536870912 or less"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, planner: Planner) -> None:
    kv_len, pages, origin, window, message = REFUSED[case]
    code, said, plan = planner.call([kv_len], [0, pages], origin=[origin], window=window)
    assert code == INVALID
    assert said.startswith(f"tilepress_decode_plan: {message}"), said
    assert set(plan) == {0}, "a refused plan was written to"


def test_an_origin_up_to_the_first_visible_key_is_accepted(planner: Planner) -> None:
    assert planner.call([1000], [0, 9], origin=[448], window=512)[0] == OK
    assert planner.call([1024], [0, 8], origin=[512], window=512)[0] == OK


def test_a_request_that_sees_nothing_has_no_item(planner: Planner) -> None:
    """Its origin is not looked at beyond its form: a context may be released whole."""
    assert planner.items([0], [5, 5], origin=[1024], window=512) == []
    assert planner.items([0], [5, 9], window=512) == []
