"""What the prefill's two page formats share: the softmax over pairs of key tiles, split between two warpgroups.

The even warpgroup computes the scores of the even key tiles and the left half of the output's columns; the odd one the scores
of the odd tiles and the right half. Each hands the other its P through shared memory. A row's maximum runs through the tiles in
their order. Its sum is kept apart, over the even tiles by one and over the odd tiles by the other, and added at the end.

Where the last pair has no odd tile, none is loaded, scored or multiplied with. The odd warpgroup takes part in the exchanges
with scores that are all hidden: it moves no maximum and adds nothing.

What one warpgroup tells the other (tell, hear) goes through named barriers. compute-sanitizer's racecheck does not follow an
arrival at one, and would report every exchange. `codegen build --racecheck`, which defines TILEPRESS_RACECHECK, tells and hears
at the same places through barriers in shared memory, which racecheck follows. They are there in every build, 48 bytes that are
initialised and else left alone. They would cost 3 to 5% of the speed.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from codegen.kernels.common import BF16, FP32, INT32, LN2, ROWS, WARP, WARPGROUP
from codegen.status import BAD_PAGE_ID

HEAD_DIM = 512  # what the shared-memory budgets are made for
HALF = HEAD_DIM // 2  # output columns of a warpgroup
KEYS = 64  # a tile, which is a page
CLUSTER = 2  # CTAs that share every load of keys and values
EVERY_CTA = (1 << CLUSTER) - 1  # as a multicast mask
CONSUMERS = 2 * WARPGROUP  # threads
READERS = CLUSTER * WARPGROUP // WARP  # warps that release a buffer: one warpgroup's, in every CTA
CONSUMER_REGISTERS, LOADER_REGISTERS = 240, 24
MINUS_INF = -T.infinity(FP32)

# What one warpgroup tells the other. Each has a named barrier, and a barrier in shared memory for the race checker.
(
    EVEN_MAX,  # even to odd: the maximum up to the even tile is written
    EVEN_P,  # even to odd: the even tile's P is written
    ODD_P,  # odd to even: the odd tile's P and the maximum up to that tile are written
    EVEN_P_READ,  # odd to even: the even tile's P may be written over (split rows only)
    EVEN_TOTAL,  # even to odd: the even tiles' sums are written
    ODD_TOTAL,
) = range(6)
EXCHANGES = 6

# Named barriers, each with one use: of a warpgroup among itself, then of the exchanges. 0 is the whole CTA's.
(
    EVEN_SCORED,  # every warp has read the columns that P is about to take
    ODD_SCORED,
    EVEN_OUT,  # around the staging of its output
    ODD_OUT,
    FIRST_EXCHANGE,
) = range(1, 6)

# Compiled in front of TileLang's text.
PRELUDE = r"""
#include <tl_templates/cuda/common.h>

namespace tl {

// TileLang's descriptor is a plain function of an address, so the compiler computes all of a loop's descriptors before the loop
// and spills them, which costs 1,000 to 1,600 cycles a pair of key tiles. One that an empty asm may have changed is computed
// where it is used, in registers.
template <int layout_type, int leading_byte_offset, int stride_byte_offset, typename T>
TL_DEVICE void opaque_wgmma_descriptor(GmmaDescriptor &descriptor, T *start) {
  initialize_wgmma_descriptor<layout_type, leading_byte_offset, stride_byte_offset>(descriptor, start);
  asm volatile("" : "+r"(descriptor.reg32_[0]));
}

// TileLang's named barrier does not tell the compiler that it orders memory. What passes through shared memory relies on it.
TL_DEVICE void ordered_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One warpgroup tells the other of what it has written or read; the other waits for that. 256 threads take part in a named
// barrier: 128 arrive, 128 wait. compute-sanitizer's racecheck follows no arrival at a named barrier, so a build for it uses
// barriers in shared memory, which every thread of the teller arrives at, in the same places. Their operations do not tell the
// compiler that they order memory; __syncwarp does.
template <typename Barrier>
TL_DEVICE void tell_other(Barrier &barrier, int id) {
#ifdef TILEPRESS_RACECHECK
  __syncwarp();
  barrier.arrive();
#else
  asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory");
#endif
}

template <typename Barrier>
TL_DEVICE void hear_other(Barrier &barrier, int id, int parity) {
#ifdef TILEPRESS_RACECHECK
  barrier.wait(parity);
  __syncwarp();
#else
  asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory");
#endif
}

}  // namespace tl

#define initialize_wgmma_descriptor opaque_wgmma_descriptor
#define __sync_thread_partial ordered_barrier_sync
"""


@dataclass(frozen=True)
class Work:
    """A CTA's query tile: the kernel's tensors and scalars, and expressions of them.

    row: the tile's first row of q. rows: how many of its 64 are the request's; 0 for a slot that nobody owns. position: of the
    first row in the request's context; negative where it sees no key. tiles: key tiles that some row sees. first_page: the
    request's first in page_ids; pages: how many it has; last_len: tokens in the last of them. owner: the request.
    turn: of the launch, see prefill_pace; -1: keeps no pace. first: whether this is the cluster's first CTA.
    """

    q: Any
    pool: Any
    page_ids: Any
    out: Any
    lse: Any
    status: Any
    row: Any
    rows: Any
    position: Any
    tiles: Any
    first_page: Any
    pages: Any
    last_len: Any
    turn: Any
    owner: Any
    first: Any
    head: Any
    kv_head: Any
    scale: Any
    num_pages: Any
    page_tiles: Any
    layer_tile: Any
    pool_tiles: Any
    want_lse: Any
    want_status: Any
    tx: Any


@dataclass(frozen=True)
class Fragments:
    """A warpgroup's registers: scores and P of its key tile, its half of O, a row each of the rest.

    m: the maximum of the raw scores up to the last odd tile; m_even: and up to the even tile; m_odd: and up to the odd one, for
    the odd warpgroup alone. alpha: what a moved maximum leaves of a sum. total: the weights of its own tiles. partial: of
    one tile.
    """

    s: Any
    p: Any
    o: Any
    m: Any
    m_even: Any
    m_odd: Any
    alpha: Any
    total: Any
    partial: Any


def allocate_fragments() -> Fragments:
    """Registers for a warpgroup, unset."""
    rows = [T.alloc_fragment([ROWS], FP32) for _ in range(6)]
    return Fragments(
        T.alloc_fragment([ROWS, KEYS], FP32), T.alloc_fragment([ROWS, KEYS], BF16), T.alloc_fragment([ROWS, HALF], FP32), *rows
    )


@T.macro
def clear(mine):
    """As before the first key tile."""
    T.fill(mine.o, 0)
    T.fill(mine.total, 0)
    T.fill(mine.m, MINUS_INF)


@dataclass(frozen=True)
class Shared:
    """What the warpgroups tell each other, in shared memory, fp32 [64] each; exchange: the race checker's barriers."""

    max_even: Any
    max_odd: Any
    total_even: Any
    total_odd: Any
    exchange: Any


@T.macro
def allocate_shared():
    """Shared memory for what the warpgroups tell each other."""
    max_even = T.alloc_shared([ROWS], FP32)
    max_odd = T.alloc_shared([ROWS], FP32)
    total_even = T.alloc_shared([ROWS], FP32)
    total_odd = T.alloc_shared([ROWS], FP32)
    exchange = T.alloc_barrier([WARPGROUP] * EXCHANGES)
    return Shared(max_even, max_odd, total_even, total_odd, exchange)


@T.macro
def page_of(work, t):
    """The page id of key tile t; past the last tile, of the last."""
    index = T.alloc_var(INT32)  # so that it is computed in 32 bits: the loaders have 24 registers
    index = work.first_page + T.min(t, work.tiles - 1)
    return work.page_ids[index]


@T.macro
def locate(work, t, step, page: T.Ref, report, tile: T.Ref, start: T.Ref):
    """Where key tile t, of page id `page`, lies in the pool: its tile, and the row in it from which to copy. Leaves the page id
    of tile t + step in `page`, an iteration before it is needed. report: whether to tell of a bad id."""
    start = T.if_then_else(t == work.pages - 1, work.last_len - KEYS, 0)  # noqa: F841 - the caller's, by reference
    tile = page * work.page_tiles + work.layer_tile
    if page < 0 or page >= work.num_pages:
        tile = work.pool_tiles  # noqa: F841
        if report and work.want_status != 0:
            T.atomic_or(work.status[0], BAD_PAGE_ID)
    page = page_of(work, t + step)


@T.macro
def load(source, target, full, index):
    """One warp's copy of a box into both CTAs; each counts the bytes that it receives on its own full[index]."""
    T.tma_copy(source, target, barrier=full[index], leader_scope_threads=WARP, cluster_mask=EVERY_CTA)


@T.macro
def release(empty, index, tx):
    """A warp has read a buffer: the loaders of both CTAs may fill it, since each load fills both."""
    if tx % WARP == 0:
        for rank in T.unroll(CLUSTER):
            T.mbarrier_arrive(empty[index], rank)


@T.macro
def tell(exchange, index):
    """Tells the other warpgroup of what this one has written or read."""
    T.evaluate(T.call_extern("handle", "tl::tell_other", exchange[index], FIRST_EXCHANGE + index))


@T.macro
def hear(exchange, index, parity):
    """Waits until the other warpgroup has told. The parity is for the race checker's barrier."""
    T.evaluate(T.call_extern("handle", "tl::hear_other", exchange[index], FIRST_EXCHANGE + index, parity))


@T.macro
def visible(work, t, page: T.Ref, shift: T.Ref, limit: T.Ref):
    """What of key tile t, of page id `page`, a row may see: row a sees the columns [shift, limit + a]. Leaves the page id of
    tile t + 2 in `page`."""
    shift = T.if_then_else(t == work.pages - 1, KEYS - work.last_len, 0)
    limit = work.position - t * KEYS + shift
    if page < 0 or page >= work.num_pages or t >= work.tiles:
        limit = -ROWS  # noqa: F841
    page = page_of(work, t + 2)


@T.macro
def hide(s, shift, limit):
    """Turns the scores that no row may see into -inf."""
    if limit < KEYS - 1 or shift > 0:
        for a, b in T.Parallel(ROWS, KEYS):
            s[a, b] = T.if_then_else(T.And(b >= shift, b <= limit + a), s[a, b], MINUS_INF)


@T.macro
def exponentials(s, m, subtrahend, scale):
    """P = exp2((S - m) * scale), in place. A row that has seen no key has m = -inf; its P is zero."""
    for a in T.Parallel(ROWS):
        subtrahend[a] = T.if_then_else(m[a] == MINUS_INF, 0.0, m[a] * scale)
    for a, b in T.Parallel(ROWS, KEYS):
        s[a, b] = T.exp2(s[a, b] * scale - subtrahend[a])


@T.macro
def decay(alpha, before, after, scale):
    """What sums and output are to be multiplied by when the maximum moves; exactly 1 where it does not."""
    for a in T.Parallel(ROWS):
        alpha[a] = T.if_then_else(before[a] == after[a], 1.0, T.exp2((before[a] - after[a]) * scale))


@T.macro
def rescale(o, alpha, before, after):
    """o *= alpha, left out where no maximum of the warp moved: alpha is 1 then, which changes no bit."""
    moved = T.alloc_var(INT32)
    moved = 0
    for a in T.Parallel(ROWS):
        if before[a] != after[a]:
            moved = 1
    if T.any_sync(moved) != 0:
        for a, b in T.Parallel(ROWS, HALF):
            o[a, b] *= alpha[a]


@T.macro
def even_softmax(mine, p_even, shared, scale):
    """The even tile's maximum, told; its P, as an operand and, in p_even, told; O decayed to the new maximum."""
    T.reduce_max(mine.s, mine.m_even, dim=1, clear=True)
    for a in T.Parallel(ROWS):
        mine.m_even[a] = T.max(mine.m_even[a], mine.m[a])
    T.copy(mine.m_even, shared.max_even)
    tell(shared.exchange, EVEN_MAX)
    exponentials(mine.s, mine.m_even, mine.alpha, scale)
    T.copy(mine.s, mine.p)
    T.copy(mine.p, p_even)
    T.fence_proxy_async()
    tell(shared.exchange, EVEN_P)
    decay(mine.alpha, mine.m, mine.m_even, scale)
    rescale(mine.o, mine.alpha, mine.m, mine.m_even)


@T.macro
def odd_softmax(mine, p_odd, shared, parity, scale):
    """The odd tile's maximum, which the even one's goes into; its P, as an operand and, in p_odd, told; O decayed to the even
    tile's maximum."""
    T.reduce_max(mine.s, mine.m_odd, dim=1, clear=True)
    hear(shared.exchange, EVEN_MAX, parity)
    T.copy(shared.max_even, mine.m_even)
    for a in T.Parallel(ROWS):
        mine.m_odd[a] = T.max(mine.m_odd[a], mine.m_even[a])
    exponentials(mine.s, mine.m_odd, mine.alpha, scale)
    T.copy(mine.s, mine.p)
    T.copy(mine.p, p_odd)
    T.copy(mine.m_odd, shared.max_odd)
    T.fence_proxy_async()
    tell(shared.exchange, ODD_P)
    decay(mine.alpha, mine.m, mine.m_even, scale)
    rescale(mine.o, mine.alpha, mine.m, mine.m_even)


@T.macro
def add_weights(mine):
    """A tile's P into the row sums, decayed by alpha."""
    T.reduce_sum(mine.s, mine.partial, dim=1)
    for a in T.Parallel(ROWS):
        mine.total[a] = mine.total[a] * mine.alpha[a] + mine.partial[a]


@T.macro
def take_odd_maximum(mine, shared, parity, scale):
    """The even warpgroup's O and sums, decayed from the even tile's maximum to the odd one's."""
    hear(shared.exchange, ODD_P, parity)
    T.copy(shared.max_odd, mine.m)
    decay(mine.alpha, mine.m_even, mine.m, scale)
    for a in T.Parallel(ROWS):
        mine.total[a] = mine.total[a] * mine.alpha[a]
    rescale(mine.o, mine.alpha, mine.m_even, mine.m)


@T.macro
def add_odd_weights(mine, scale):
    """The odd tile's P into the odd warpgroup's sums, which decay to the even tile's maximum, then to the odd one's: m's."""
    for a in T.Parallel(ROWS):
        mine.total[a] = mine.total[a] * mine.alpha[a]
    decay(mine.alpha, mine.m_even, mine.m_odd, scale)
    add_weights(mine)
    T.copy(mine.m_odd, mine.m)


@T.macro
def add_other_total(mine, written, others, exchange, mine_written, other_written):
    """The row sums of all tiles, from each warpgroup's own, which goes into `written`."""
    T.copy(mine.total, written)
    tell(exchange, mine_written)
    hear(exchange, other_written, 0)
    T.copy(others, mine.partial)
    for a in T.Parallel(ROWS):
        mine.total[a] = mine.total[a] + mine.partial[a]


@T.macro
def write_out(mine, stage, first, stage_barrier, column, turn, work):
    """O / total into out's columns from `column` on, through `stage` from `first` on, so that global stores are whole 16-byte
    rows. Column b of O is the output's (b + turn) % HALF."""
    for a in T.Parallel(ROWS):
        mine.partial[a] = T.if_then_else(mine.total[a] == 0, 0.0, 1.0 / mine.total[a])  # a NaN in Q stays a NaN
    for a, b in T.Parallel(ROWS, HALF):
        mine.o[a, b] *= mine.partial[a]
    T.sync_threads(stage_barrier, WARPGROUP)  # every warp's products have read `stage`
    T.copy(mine.o, stage[:, first : first + HALF])
    T.sync_threads(stage_barrier, WARPGROUP)
    for a, b in T.Parallel(ROWS, HALF):
        if a < work.rows:
            work.out[work.row + a, work.head, column + (b + turn) % HALF] = stage[a, first + b]


@T.macro
def write_lse(mine, work):
    """The natural-log lse of a row, -inf where it saw no key."""
    if work.want_lse != 0:
        for a in T.Parallel(ROWS):
            if a < work.rows:
                work.lse[work.row + a, work.head] = T.if_then_else(
                    mine.total[a] == 0, MINUS_INF, (mine.m[a] * work.scale + T.log2(mine.total[a])) * LN2
                )
