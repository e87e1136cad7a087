"""Windowed causal grouped-query prefill over a paged KV pool, split rows.

Work: an item is 64 query positions of a request and two query heads of a group. Query tiles sit on multiples of 64 of the
request's positions, so a full window is always the same number of key tiles, and a row's bits depend neither on the batch nor
on where a prompt was cut into chunks, if it was cut at pages (a last page that is not full lies in other columns of its tile).

Order: request by request; of a request eight pairs of heads at a time; of these the query tiles with a full window from first
to last, then the shorter ones before them from the longest to the shortest. What runs at the same time so sees the same keys,
and its next items' keys are mostly those just read: they stay in the L2 cache.

Balance: the grid is persistent. Items are dealt in this order, each to the CTA that has got the fewest key tiles so far. Every
CTA goes through all of it for itself and keeps its own: nothing is exchanged, nothing has to be reset. Dealt are four items at
once, neighbouring heads of one query tile, to teams of four CTAs, or two or one where four does not divide heads and CTAs.

Keys: one key tile is one page. Row at position p sees the keys p - window_left to p. A tile visits the pages from the one that
holds its first row's oldest visible key to the one that holds its last row, or one tile that is masked whole where there is
none. The request's page list begins at the page-aligned position kv_origin: keys before it are gone. Where the window reaches
before it, they are masked and reported.

Schedule: one stream of key tiles runs through all items of a CTA. Of tile t a consumer issues the scores of t + 1, which may be
the next item's first, then O += P V(t), and while that product runs it turns the scores of t + 1 into P. So the tensor cores
have the other warpgroup's products and this one's own under every softmax, also under that of the next item's first tile.

Warp roles, 384 threads: warpgroups 0 and 1 (232 registers) compute one head each, all 256 columns, P staying in registers. Of
warpgroup 2 (40 registers) one warp loads keys and values for both, and one plans: it deals out the items, writes down what the
others need to know of the CTA's own, and loads Q.

Shared memory: a ring of four tiles of [64, 256], 128 KB, in the order K(t + 1), V(t); three buffers of Q, 96 KB, head w of the
CTA's n-th item in buffer (2 n + w) % 3; the facts of four items; a request, for the planning warp alone. O leaves from
registers, a lane 16 bytes at a time.

Barriers, of which use n waits for full parity n & 1 and empty parity (n & 1) ^ 1, so that the first empty wait passes:
- full[stage] and q_full[buffer]: the bytes of the copy and one arrival of the loading warp.
- empty[stage]: one arrival of each consumer warp that has read. q_empty[buffer]: of the warps of the one that reads it.
- facts_full[slot]: an arrival of each lane of the planning warp. facts_empty[slot]: of each thread of both consumers and of
  the loading warp.

The last page's box starts 64 - last rows early, so that the copy engine clips, and zeroes, the rows in front: key k of that
page lands in row k + 64 - last, and what lies past the length is never read. A page id outside the pool is copied from past
the pool's end, which reads as zero, masked whole, and reported.

Numbers: scores and sums in fp32, base-2 exponentials of S * sm_scale * log2(e). What is subtracted is a row's maximum so far,
or one that it has outgrown by less than a factor of 2^8 in P: sums and output are rescaled only when it grows further. lse is
natural.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from codegen.kernels import common
from codegen.kernels.common import BF16, FP32, INT32, LN2, LOG2E, ROWS, WARP, WARPGROUP
from codegen.lowered import Request
from codegen.status import BAD_INDEX, BAD_PAGE_ID, BAD_WINDOW

PASS_CONFIGS: Mapping[str, bool] = common.PASS_CONFIGS
HEADS = 2  # of an item, one a warpgroup
CONSUMERS = HEADS * WARPGROUP  # threads
STAGES = 4
Q_BUFFERS = 3
PAIRS_AT_ONCE = 8  # of heads, so that 132 CTAs hold as many query tiles as a window of 1,024 has key tiles
CONSUMER_REGISTERS, LOADER_REGISTERS = 232, 40
MAX_ORIGIN = 1 << 29  # leaves sums of positions within 32 bits
SLACK = 8.0  # powers of two by which a row's maximum may be outgrown before its sums are rescaled
UINT32 = "uint32"
MINUS_INF = -T.infinity(FP32)

# An item's facts, int32 words in shared memory. Rows [LOW, HIGH) of the tile are the request's, and row a of the tile is row
# ROW + a of q. FIRST_PAGE is an index into page_ids, or -1 where the tile sees no key. Tile t's row a sees the keys in columns
# [REACH - 64 t + a - window_left, REACH - 64 t + a] of it, all of that further right by LAST_SHIFT in tile LAST_TILE.
TILES, FIRST_PAGE, LAST_TILE, LAST_SHIFT, REACH, ROW, LOW, HIGH, HEAD = range(9)  # TILES: key tiles, 0 behind the last item
FACT_WORDS = 12
SLOTS = 4  # items whose facts are kept

# Compiled in front of TileLang's text.
PRELUDE = r"""
#include <tl_templates/cuda/common.h>

namespace tl {

// The lowest of a warp's values.
TL_DEVICE int lowest(int value) { return __reduce_min_sync(0xffffffff, value); }

// Word b of lane q of a quad becomes word q of lane b.
TL_DEVICE void transpose_quad(uint32_t (&words)[4], int q) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b & bit) continue;
      const bool upper = q & bit;
      const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? words[b] : words[b + bit], bit);
      if (upper)
        words[b] = received;
      else
        words[b + bit] = received;
    }
  }
}

// Writes weight * o, a warpgroup's 64 rows of `columns` fp32 in the layout of wgmma, as bf16: row a to out + a * stride, where
// a is in [low, high).
template <int columns>
TL_DEVICE void write_rows(const float *o, const float *weight, bfloat16_t *out, int64_t stride, int low, int high) {
  const int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x % 128 / 32 * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < columns / 32; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float *pair = o + (4 * j + b) * 4 + half * 2;
        const __nv_bfloat162 both = __floats2bfloat162_rn(pair[0] * weight[half], pair[1] * weight[half]);
        words[b] = reinterpret_cast<const uint32_t &>(both);
      }
      transpose_quad(words, q);
      if (low <= row && row < high)
        *reinterpret_cast<uint4 *>(out + row * stride + 32 * j + 8 * q) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace tl
"""


@dataclass(frozen=True)
class Work:
    """A CTA's tensors, scalars and shared memory, and expressions of them. pairs: of query heads, all told."""

    q: Any
    pool: Any
    page_ids: Any
    page_indptr: Any
    last_page_len: Any
    kv_origin: Any
    q_indptr: Any
    out: Any
    lse: Any
    status: Any
    scale: Any
    window_left: Any
    num_pages: Any
    page_tiles: Any
    layer_tile: Any
    q_tiles: Any
    ctas: Any
    has_origin: Any
    want_lse: Any
    want_status: Any
    batch: Any
    q_rows: Any
    num_page_ids: Any
    pool_tiles: Any
    pairs: Any
    heads: Any
    group: int
    page_size: int
    head_dim: int
    q_s: Any
    ring: Any
    facts: Any
    request: Any
    full: Any
    empty: Any
    q_full: Any
    q_empty: Any
    facts_full: Any
    facts_empty: Any
    cta: Any
    tx: Any


@T.macro
def hear_of(work, item):
    """Waits until the facts of a CTA's item-th item are written. Nothing that follows is read before: the wait alone does not
    say so."""
    T.barrier_wait(work.facts_full[item % SLOTS], item // SLOTS & 1)
    T.sync_warp()


@T.macro
def forget(work, item):
    """This thread has read an item's facts. Each arrives for itself: a race checker sees that."""
    T.sync_warp()  # an arrival does not tell the compiler that it orders memory; this does
    T.barrier_arrive(work.facts_empty[item % SLOTS])


# A request: its rows, its pages, the tokens of its last page, the position of its first page and of its first row (below 0:
# that sees no key), and its query tiles.
Q_FROM, Q_TO, PAGE_FROM, PAGES, LAST_LEN, ORIGIN, OFFSET, Q_TILES = range(8)
REQUEST_WORDS = 8


@T.macro
def read_request(work, request, r):
    """Index arrays are the caller's: whatever they hold is clamped."""
    page_to = T.alloc_var(INT32)
    clamped = T.alloc_var(INT32)
    request[Q_FROM] = T.max(T.min(work.q_indptr[r], work.q_rows), 0)
    request[Q_TO] = T.max(T.min(work.q_indptr[r + 1], work.q_rows), request[Q_FROM])
    request[PAGE_FROM] = T.max(T.min(work.page_indptr[r], work.num_page_ids), 0)
    page_to = T.max(T.min(work.page_indptr[r + 1], work.num_page_ids), request[PAGE_FROM])
    request[PAGES] = page_to - request[PAGE_FROM]
    request[LAST_LEN] = T.max(T.min(work.last_page_len[r], work.page_size), 1)
    clamped = 0
    if request[Q_FROM] != work.q_indptr[r] or request[Q_TO] != work.q_indptr[r + 1]:
        clamped = 1
    if request[PAGE_FROM] != work.page_indptr[r] or page_to != work.page_indptr[r + 1]:
        clamped = 1
    if request[PAGES] > 0 and request[LAST_LEN] != work.last_page_len[r]:
        clamped = 1
    request[ORIGIN] = 0
    if work.has_origin != 0:
        request[ORIGIN] = work.kv_origin[r]
        if request[ORIGIN] < 0 or request[ORIGIN] % work.page_size != 0 or request[ORIGIN] > MAX_ORIGIN:
            clamped = 1
            request[ORIGIN] = T.max(T.min(request[ORIGIN], MAX_ORIGIN), 0) // work.page_size * work.page_size
    if clamped != 0 and work.want_status != 0 and work.tx % WARP == 0:
        T.atomic_or(work.status[0], BAD_INDEX)
    request[OFFSET] = request[ORIGIN] - (request[Q_TO] - request[Q_FROM])
    if request[PAGES] > 0:
        request[OFFSET] = request[OFFSET] + (request[PAGES] - 1) * work.page_size + request[LAST_LEN]
    request[Q_TILES] = 0
    if request[Q_TO] > request[Q_FROM]:
        request[Q_TILES] = (request[OFFSET] + request[Q_TO] - request[Q_FROM] - 1) // ROWS - request[OFFSET] // ROWS + 1


@T.macro
def find_pages(work, request, tile, first: T.Ref, pages: T.Ref, cut: T.Ref):
    """The pages that a request's query tile visits: the first, counted in the request's list, and how many; 0 or less where it
    sees no key. cut: whether it would see keys before the list."""
    begin = T.alloc_var(INT32)  # positions of the tile's rows
    end = T.alloc_var(INT32)
    oldest = T.alloc_var(INT32)  # position of the oldest key any of them sees
    begin = (request[OFFSET] // ROWS + tile) * ROWS
    end = T.min(begin + ROWS, request[OFFSET] + request[Q_TO] - request[Q_FROM])
    oldest = T.max(T.max(begin, request[OFFSET]) - work.window_left, 0)
    cut = 0
    if oldest < request[ORIGIN]:
        oldest = request[ORIGIN]
        if end > 0:
            cut = 1  # noqa: F841 - by reference
    first = (oldest - request[ORIGIN]) // work.page_size
    pages = T.min((end - 1 - request[ORIGIN]) // work.page_size + 1, request[PAGES]) - first  # noqa: F841


@T.macro
def announce(work, tile, head, item, lane):
    """Writes down the facts of the CTA's item-th item: a query tile of the request at hand, and the first of its heads."""
    place = T.alloc_var(INT32)  # the tile's first position, a multiple of 64
    row = T.alloc_var(INT32)
    first = T.alloc_var(INT32)
    pages = T.alloc_var(INT32)
    cut = T.alloc_var(INT32)
    slot = item % SLOTS
    T.barrier_wait(work.facts_empty[slot], (item // SLOTS & 1) ^ 1)
    T.sync_warp()
    if lane == 0:
        find_pages(work, work.request, tile, first, pages, cut)
        if cut != 0 and work.want_status != 0:
            T.atomic_or(work.status[0], BAD_WINDOW)
        place = (work.request[OFFSET] // ROWS + tile) * ROWS
        row = work.request[Q_FROM] + place - work.request[OFFSET]
        work.facts[slot, TILES] = T.max(pages, 1)
        work.facts[slot, FIRST_PAGE] = T.if_then_else(pages > 0, work.request[PAGE_FROM] + first, -1)
        work.facts[slot, LAST_TILE] = work.request[PAGES] - 1 - first
        work.facts[slot, LAST_SHIFT] = work.page_size - work.request[LAST_LEN]
        work.facts[slot, REACH] = place - work.request[ORIGIN] - first * work.page_size
        work.facts[slot, ROW] = row
        work.facts[slot, LOW] = T.max(work.request[Q_FROM] - row, 0)
        work.facts[slot, HIGH] = T.min(work.request[Q_TO] - row, ROWS)
        work.facts[slot, HEAD] = head
    T.sync_warp()
    T.barrier_arrive(work.facts_full[slot])


@T.macro
def announce_end(work, item, lane):
    """The CTA has no item-th item."""
    T.barrier_wait(work.facts_empty[item % SLOTS], (item // SLOTS & 1) ^ 1)
    T.sync_warp()
    if lane == 0:
        work.facts[item % SLOTS, TILES] = 0
    T.sync_warp()
    T.barrier_arrive(work.facts_full[item % SLOTS])


@T.macro
def load_queries(work, item, lane):
    """Q of both heads of the CTA's item-th item."""
    use = T.alloc_var(INT32)
    row = T.alloc_var(INT32)
    head = T.alloc_var(INT32)
    row = work.facts[item % SLOTS, ROW]
    head = work.facts[item % SLOTS, HEAD]
    for which in T.unroll(HEADS):
        use = HEADS * item + which
        T.barrier_wait(work.q_empty[use % Q_BUFFERS], (use // Q_BUFFERS & 1) ^ 1)
        T.tma_copy(
            work.q[row : row + ROWS, head + which, :],
            work.q_s[use % Q_BUFFERS, :, :],
            barrier=work.q_full[use % Q_BUFFERS],
            leader_scope_threads=WARP,
        )
        if lane == 0:
            T.barrier_arrive(work.q_full[use % Q_BUFFERS])


# A team's load, in the lane that has the team: twice its key tiles and one more an item, above the team's number. Were it ever
# to overflow, the balance would suffer, in all CTAs alike.
TEAM_BITS = 8
LOADS = 5  # teams of a lane; any CTAs beyond 160 teams get nothing
NO_TEAM = (1 << 31) - 1


@T.macro
def choose_team(work, loads, tiles, team: T.Ref):
    """The team of least load, and of those the first: an item of so many key tiles each is its members'."""
    least = T.alloc_var(INT32)
    least = loads[0]
    for j in T.unroll(1, LOADS):
        least = T.min(least, loads[j])
    least = T.call_extern(INT32, "tl::lowest", least)
    for j in T.unroll(LOADS):
        if loads[j] == least:
            loads[j] = loads[j] + (2 * tiles + 1 << TEAM_BITS)
    team = least % (1 << TEAM_BITS)  # noqa: F841 - by reference


@T.macro
def plan(work):
    """The planning warp: goes through all items, finds out whose each is, and writes down the CTA's own, one ahead of Q."""
    request = T.alloc_local([REQUEST_WORDS], INT32)
    loads = T.alloc_local([LOADS], INT32)
    shift = T.alloc_var(INT32)  # a team is 1 << shift CTAs
    item = T.alloc_var(INT32)
    left = T.alloc_var(INT32)  # query tiles that the launch allows for
    tiles = T.alloc_var(INT32)
    short = T.alloc_var(INT32)  # the first tiles, which do not have a full window
    block = T.alloc_var(INT32)
    pair = T.alloc_var(INT32)
    above = T.alloc_var(INT32)
    team = T.alloc_var(INT32)
    tile = T.alloc_var(INT32)
    first = T.alloc_var(INT32)
    pages = T.alloc_var(INT32)
    cut = T.alloc_var(INT32)
    lane = work.tx % WARP
    shift = T.if_then_else((work.pairs | work.ctas) % 4 == 0, 2, T.if_then_else((work.pairs | work.ctas) % 2 == 0, 1, 0))
    for j in T.unroll(LOADS):
        loads[j] = T.if_then_else(j * WARP + lane < work.ctas >> shift, j * WARP + lane, NO_TEAM)
    item = 0
    left = work.q_tiles
    for r in T.serial(work.batch):
        read_request(work, request, r)
        if lane == 0:  # which alone reads it
            for word in T.unroll(REQUEST_WORDS):
                work.request[word] = request[word]
        tiles = T.min(request[Q_TILES], left)
        left = left - tiles
        short = T.max(T.min((work.window_left + ROWS - 1) // ROWS - request[OFFSET] // ROWS, tiles), 0)
        block = 0
        while block < work.pairs:
            above = T.min(block + PAIRS_AT_ONCE, work.pairs)
            for k in T.serial(tiles):
                tile = T.if_then_else(k < tiles - short, short + k, tiles - 1 - k)
                find_pages(work, request, tile, first, pages, cut)
                pair = block
                while pair < above:
                    choose_team(work, loads, T.max(pages, 1), team)
                    if team == work.cta >> shift:
                        announce(work, tile, (pair + (work.cta & (1 << shift) - 1)) * HEADS, item, lane)
                        if item != 1:  # the first item's Q at once
                            load_queries(work, T.max(item - 1, 0), lane)
                        item = item + 1
                    pair = pair + (1 << shift)
            block = above
    announce_end(work, item, lane)
    if item > 1:
        load_queries(work, item - 1, lane)


@T.macro
def page_of(work, first_page, t):
    """The page id of key tile t; -1 where the query tile sees no key."""
    return T.if_then_else(first_page < 0, -1, work.page_ids[first_page + t])


@T.macro
def load_tile(work, tile, start, kv_head, use, lane):
    """The pool's rows from `start` on of a tile into the ring's stage of its use-th use."""
    T.barrier_wait(work.empty[use % STAGES], (use // STAGES & 1) ^ 1)
    T.tma_copy(
        work.pool[tile, start : start + work.page_size, kv_head, :],
        work.ring[use % STAGES, :, :],
        barrier=work.full[use % STAGES],
        leader_scope_threads=WARP,
    )
    if lane == 0:
        T.barrier_arrive(work.full[use % STAGES])


@T.macro
def locate(work, slot, t, lane, tile: T.Ref, start: T.Ref, kv_head: T.Ref):
    """Where tile t of the item in a slot lies in the pool; a page id outside it is reported."""
    page = T.alloc_var(INT32)
    page = page_of(work, work.facts[slot, FIRST_PAGE], t)
    start = T.if_then_else(t == work.facts[slot, LAST_TILE], -work.facts[slot, LAST_SHIFT], 0)  # noqa: F841 - by reference
    kv_head = work.facts[slot, HEAD] // work.group  # noqa: F841
    tile = page * work.page_tiles + work.layer_tile
    if page < 0 or page >= work.num_pages:
        tile = work.pool_tiles  # noqa: F841
        if work.want_status != 0 and lane == 0 and work.facts[slot, FIRST_PAGE] >= 0:
            T.atomic_or(work.status[0], BAD_PAGE_ID)


@T.macro
def load(work):
    """The loading warp: K of the first tile, then of each tile K of the one after it and its own V."""
    item = T.alloc_var(INT32)
    use = T.alloc_var(INT32)
    tiles = T.alloc_var(INT32)
    after = T.alloc_var(INT32)  # tiles of the next item
    tile = T.alloc_var(INT32)
    start = T.alloc_var(INT32)
    kv_head = T.alloc_var(INT32)
    next_tile = T.alloc_var(INT32)
    next_start = T.alloc_var(INT32)
    next_kv_head = T.alloc_var(INT32)
    lane = work.tx % WARP
    item = 0
    use = 0
    hear_of(work, 0)
    tiles = work.facts[0, TILES]
    if tiles > 0:
        locate(work, 0, 0, lane, tile, start, kv_head)
        load_tile(work, tile, start, kv_head, 0, lane)
        use = 1
    while tiles > 0:
        after = 0
        for i in T.serial(tiles):
            if i < tiles - 1:
                locate(work, item % SLOTS, i + 1, lane, next_tile, next_start, next_kv_head)
            else:
                hear_of(work, item + 1)
                after = work.facts[(item + 1) % SLOTS, TILES]
                if after > 0:
                    locate(work, (item + 1) % SLOTS, 0, lane, next_tile, next_start, next_kv_head)
            if i < tiles - 1 or after > 0:
                load_tile(work, next_tile, next_start, next_kv_head, use, lane)
                use = use + 1
            # A page holds the layer's K rows, then its V rows: V is the next tile of 64 rows.
            load_tile(work, tile + 1, start, kv_head, use, lane)
            use = use + 1
            tile = next_tile
            start = next_start
            kv_head = next_kv_head
        forget(work, item)
        item = item + 1
        tiles = after


@T.macro
def hide(work, s, oldest, seen, t, page, last_tile, last_shift, reach):
    """Turns what no row may see of tile t's scores into -inf. oldest, seen: of a row, the first column it sees and how many."""
    shift = T.alloc_var(INT32)
    limit = T.alloc_var(INT32)
    shift = T.if_then_else(t == last_tile, last_shift, 0)
    limit = reach - t * work.page_size + shift
    if page < 0 or page >= work.num_pages:
        limit = -ROWS
    if limit < work.page_size - 1 or shift > 0 or limit + ROWS - 1 - work.window_left > 0:
        for a in T.Parallel(ROWS):
            oldest[a] = T.max(limit + a - work.window_left, shift)
        for a in T.Parallel(ROWS):
            seen[a] = T.max(limit + a + 1 - oldest[a], 0)
        for a, b in T.Parallel(ROWS, work.page_size):
            s[a, b] = T.if_then_else(T.cast(b - oldest[a], UINT32) < T.cast(seen[a], UINT32), s[a, b], MINUS_INF)


@T.macro
def exponentials(work, s, m, m_new, alpha, total, partial):
    """Masked raw scores into exponentials, in place. m: what is subtracted from a row's scores; -inf where it saw no key yet.
    total: the row's sum. alpha: what the output so far is to be multiplied by, exactly 1 where m stays. A NaN stays one."""
    T.reduce_max(s, m_new, dim=1, clear=True)
    for a in T.Parallel(ROWS):
        alpha[a] = T.if_then_else((m_new[a] - m[a]) * work.scale > SLACK, T.exp2((m[a] - m_new[a]) * work.scale), 1.0)
    for a in T.Parallel(ROWS):
        m[a] = T.if_then_else((m_new[a] - m[a]) * work.scale > SLACK, m_new[a], m[a])
    for a in T.Parallel(ROWS):
        m_new[a] = T.if_then_else(m[a] == MINUS_INF, 0.0, m[a] * work.scale)
    for a, b in T.Parallel(ROWS, work.page_size):
        s[a, b] = T.exp2(s[a, b] * work.scale - m_new[a])
    T.reduce_sum(s, partial, dim=1)
    for a in T.Parallel(ROWS):
        total[a] = total[a] * alpha[a] + partial[a]


@T.macro
def release(barriers, index, tx):
    """A warp has read a buffer."""
    if tx % WARP == 0:
        T.barrier_arrive(barriers[index])


@T.macro
def write_out(work, slot, which, o, m, total, weight):
    """An item's output and lse."""
    row = T.alloc_var(INT32)
    low = T.alloc_var(INT32)
    high = T.alloc_var(INT32)
    head = T.alloc_var(INT32)
    row = work.facts[slot, ROW]
    low = work.facts[slot, LOW]
    high = work.facts[slot, HIGH]
    head = work.facts[slot, HEAD] + which
    for a in T.Parallel(ROWS):
        weight[a] = T.if_then_else(total[a] == 0, 0.0, 1.0 / total[a])  # a NaN in Q stays a NaN
    T.call_extern(
        "handle", f"tl::write_rows<{work.head_dim}>", o.data, weight.data, T.address_of(work.out[row, head, 0]),
        work.heads * work.head_dim, low, high,
    )  # fmt: skip
    if work.want_lse != 0:
        for a in T.Parallel(ROWS):
            if a >= low and a < high:
                work.lse[row + a, head] = T.if_then_else(total[a] == 0, MINUS_INF, (m[a] * work.scale + T.log2(total[a])) * LN2)


@T.macro
def attend(work, which):
    """A consumer warpgroup: head `which` of every item."""
    s = T.alloc_fragment([ROWS, work.page_size], FP32)
    p = T.alloc_fragment([ROWS, work.page_size], BF16)
    o = T.alloc_fragment([ROWS, work.head_dim], FP32)
    m = T.alloc_fragment([ROWS], FP32)
    m_new = T.alloc_fragment([ROWS], FP32)
    m_done = T.alloc_fragment([ROWS], FP32)  # of the item whose output is due
    alpha = T.alloc_fragment([ROWS], FP32)
    total = T.alloc_fragment([ROWS], FP32)
    total_done = T.alloc_fragment([ROWS], FP32)
    partial = T.alloc_fragment([ROWS], FP32)
    oldest = T.alloc_fragment([ROWS], INT32)
    seen = T.alloc_fragment([ROWS], INT32)
    item = T.alloc_var(INT32)
    use = T.alloc_var(INT32)
    tiles = T.alloc_var(INT32)
    after = T.alloc_var(INT32)
    scored = T.alloc_var(INT32)  # tiles of the item whose scores are being computed
    t = T.alloc_var(INT32)
    q_use = T.alloc_var(INT32)
    page = T.alloc_var(INT32)
    first_page = T.alloc_var(INT32)
    last_tile = T.alloc_var(INT32)
    last_shift = T.alloc_var(INT32)
    reach = T.alloc_var(INT32)
    flag = T.alloc_var(INT32)
    item = 0
    hear_of(work, 0)
    tiles = work.facts[0, TILES]
    if tiles > 0:
        first_page = work.facts[0, FIRST_PAGE]
        last_tile = work.facts[0, LAST_TILE]
        last_shift = work.facts[0, LAST_SHIFT]
        reach = work.facts[0, REACH]
        page = page_of(work, first_page, 0)
        q_use = which
        T.fill(o, 0)
        T.fill(total, 0)
        T.fill(m, MINUS_INF)
        T.barrier_wait(work.q_full[q_use], 0)
        T.barrier_wait(work.full[0], 0)
        T.wgmma_gemm(work.q_s[q_use, :, :], work.ring[0, :, :], s, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        release(work.empty, 0, work.tx)
        if tiles == 1:
            release(work.q_empty, q_use, work.tx)
        hide(work, s, oldest, seen, 0, page, last_tile, last_shift, reach)
        exponentials(work, s, m, m_new, alpha, total, partial)
        T.copy(s, p)
        use = 1
        after = 1
        while after > 0:
            hear_of(work, item + 1)
            after = work.facts[(item + 1) % SLOTS, TILES]
            scored = tiles
            for i in T.serial(T.if_then_else(after > 0, tiles, tiles - 1)):
                t = i + 1
                if t == tiles:
                    t = 0
                    scored = after
                    first_page = work.facts[(item + 1) % SLOTS, FIRST_PAGE]
                    last_tile = work.facts[(item + 1) % SLOTS, LAST_TILE]
                    last_shift = work.facts[(item + 1) % SLOTS, LAST_SHIFT]
                    reach = work.facts[(item + 1) % SLOTS, REACH]
                    q_use = q_use + HEADS
                    T.barrier_wait(work.q_full[q_use % Q_BUFFERS], q_use // Q_BUFFERS & 1)
                page = page_of(work, first_page, t)
                T.barrier_wait(work.full[use % STAGES], use // STAGES & 1)
                T.wgmma_gemm(
                    work.q_s[q_use % Q_BUFFERS, :, :], work.ring[use % STAGES, :, :], s, transpose_B=True, clear_accum=True
                )
                T.barrier_wait(work.full[(use + 1) % STAGES], (use + 1) // STAGES & 1)
                T.wgmma_gemm(p, work.ring[(use + 1) % STAGES, :, :], o)
                T.wait_wgmma(1)
                release(work.empty, use % STAGES, work.tx)
                if t == scored - 1:
                    release(work.q_empty, q_use % Q_BUFFERS, work.tx)
                if t == 0:
                    T.copy(total, total_done)
                    T.copy(m, m_done)
                    T.fill(total, 0)
                    T.fill(m, MINUS_INF)
                hide(work, s, oldest, seen, t, page, last_tile, last_shift, reach)
                exponentials(work, s, m, m_new, alpha, total, partial)
                # A branch that is never taken, on what all exponentials are needed for. Without one, ptxas moves the wait for
                # the product up before them.
                flag = 0
                for a in T.Parallel(ROWS):
                    if partial[a] < 0:
                        flag = 1
                if T.any_sync(flag) != 0:
                    T.barrier_wait(work.full[use % STAGES], use // STAGES & 1)
                T.wait_wgmma(0)
                release(work.empty, (use + 1) % STAGES, work.tx)
                if t == 0:
                    write_out(work, item % SLOTS, which, o, m_done, total_done, partial)
                    forget(work, item)
                    T.fill(o, 0)
                else:
                    flag = 0
                    for a in T.Parallel(ROWS):
                        if alpha[a] != 1.0:
                            flag = 1
                    if T.any_sync(flag) != 0:
                        for a, b in T.Parallel(ROWS, work.head_dim):
                            o[a, b] *= alpha[a]
                T.copy(s, p)
                use = use + 2
            item = item + 1
            tiles = after
        T.barrier_wait(work.full[use % STAGES], use // STAGES & 1)
        T.wgmma_gemm(p, work.ring[use % STAGES, :, :], o)
        T.wait_wgmma(0)
        write_out(work, (item - 1) % SLOTS, which, o, m, total, partial)


def build(request: Request) -> Any:
    """The prim_func of one instance.

    Parameters and dynamic extents are those of `tilepress_sliding_prefill_args` (abi) and the launch values of
    csrc/sliding_prefill.h.
    """
    head_dim, page_size, group = request.head_dim, request.page_size, request.group
    q_rows, batch, num_kv_heads = T.dynamic("q_rows"), T.dynamic("batch"), T.dynamic("num_kv_heads")
    pool_tiles, num_page_ids = T.dynamic("pool_tiles"), T.dynamic("num_page_ids")
    indptr_len, lse_rows, status_words = T.dynamic("indptr_len"), T.dynamic("lse_rows"), T.dynamic("status_words")
    origins = T.dynamic("origins")
    heads = num_kv_heads * group

    @T.prim_func
    def kernel(
        q: T.Tensor([q_rows, heads, head_dim], BF16),
        pool: T.Tensor([pool_tiles, page_size, num_kv_heads, head_dim], BF16),
        page_ids: T.Tensor([num_page_ids], INT32),
        page_indptr: T.Tensor([indptr_len], INT32),
        last_page_len: T.Tensor([batch], INT32),
        kv_origin: T.Tensor([origins], INT32),
        q_indptr: T.Tensor([indptr_len], INT32),
        out: T.Tensor([q_rows, heads, head_dim], BF16),
        lse: T.Tensor([lse_rows, heads], FP32),
        status: T.Tensor([status_words], INT32),
        sm_scale: T.float32,
        window_left: T.int32,
        num_pages: T.int32,
        page_tiles: T.int32,
        layer_tile: T.int32,
        q_tiles: T.int32,
        sm_count: T.int32,
        has_origin: T.int32,
        want_lse: T.int32,
        want_status: T.int32,
    ):
        with T.Kernel(sm_count, threads=CONSUMERS + WARPGROUP, prelude=PRELUDE) as cta:
            q_s = T.alloc_shared([Q_BUFFERS, ROWS, head_dim], BF16)
            ring = T.alloc_shared([STAGES, page_size, head_dim], BF16)
            facts = T.alloc_shared([SLOTS, FACT_WORDS], INT32)
            request = T.alloc_shared([REQUEST_WORDS], INT32)
            full = T.alloc_barrier([1] * STAGES)
            empty = T.alloc_barrier([CONSUMERS // WARP] * STAGES)
            q_full = T.alloc_barrier([1] * Q_BUFFERS)
            q_empty = T.alloc_barrier([WARPGROUP // WARP] * Q_BUFFERS)
            facts_full = T.alloc_barrier([WARP] * SLOTS)
            facts_empty = T.alloc_barrier([CONSUMERS + WARP] * SLOTS)
            tx = T.get_thread_binding()
            work = Work(
                q=q, pool=pool, page_ids=page_ids, page_indptr=page_indptr, last_page_len=last_page_len, kv_origin=kv_origin,
                q_indptr=q_indptr, out=out, lse=lse, status=status, scale=sm_scale * LOG2E, window_left=window_left,
                num_pages=num_pages, page_tiles=page_tiles, layer_tile=layer_tile, q_tiles=q_tiles, ctas=sm_count,
                has_origin=has_origin, want_lse=want_lse, want_status=want_status, batch=batch, q_rows=q_rows,
                num_page_ids=num_page_ids, pool_tiles=pool_tiles, pairs=num_kv_heads * (group // HEADS), heads=heads,
                group=group, page_size=page_size, head_dim=head_dim, q_s=q_s, ring=ring, facts=facts, request=request,
                full=full, empty=empty, q_full=q_full, q_empty=q_empty, facts_full=facts_full, facts_empty=facts_empty,
                cta=cta, tx=tx,
            )  # fmt: skip
            if tx >= CONSUMERS:
                T.set_max_nreg(LOADER_REGISTERS, 0)
                if tx < CONSUMERS + WARP:
                    load(work)
                elif tx < CONSUMERS + 2 * WARP:
                    plan(work)
            elif tx < WARPGROUP:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                attend(work, 0)
            else:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                attend(work, 1)

    return kernel.with_attr("global_symbol", request.name)
