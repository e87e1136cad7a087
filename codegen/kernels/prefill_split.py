"""The prefill's CTA over split rows: a key tile is K and V, 64 KB each.

Schedule of a pair of tiles (2i, 2i + 1), even and odd warpgroup side by side:

    even: S = Q K(2i); publish the maximum; P; O_left += P V_left(2i);   take the other's P: O_left += P V_left(2i + 1)
    odd:  S = Q K(2i + 1); take the maximum; P; take the other's P: O_right += P V_right(2i);    O_right += P V_right(2i + 1)

A warpgroup's own P is a register operand; the other's comes through shared memory. While one computes exponentials, the other's
products keep the tensor cores busy. Three warps load: one Q and K, one the left half of V's columns, one the right half.

Shared memory, 214,016 bytes: Q 64 KB; K 64 KB, one tile at a time; V in two halves of 32 KB, one tile at a time; P of the even
and of the odd tile 8 KB each; maxima and sums, four arrays of 64 floats. The output is staged in V's halves, each of which only
the warpgroup concerned reads.

Barriers in shared memory:
- even_full[4] and odd_full[4]: each counts the bytes of 128 columns of that tile's K, and one arrival of the CTA's K loader.
  Use i completes the phase of parity i & 1; the tile's scorer alone waits. They are two sets because a warpgroup that waits for
  every second tile of one set could not tell its tile from the one before.
- key_empty[2]: released by the even and the odd warpgroup as soon as its scores are done, one arrival a warp at both CTAs'
  barriers: 8 in all. An even tile's load waits for the odd one before it, parity (i & 1) ^ 1, so that the first wait passes; an
  odd tile's load for the even one of its pair, parity i & 1.
- v_full[2]: the bytes of V's left and right half, and one arrival of the half's loader. Tile t completes the phase of parity
  t & 1. The even warpgroup waits for the left half, the odd one for the right half, for every tile.
- v_empty[2]: released by the warpgroup that reads the half, as above. The loader waits for parity (t & 1) ^ 1.
- q_full: the bytes of Q and one arrival, once, only where there is a key tile to score.

Exchanges (prefill_pair): EVEN_MAX, EVEN_P and ODD_P once a pair, EVEN_P_READ from the second pair on, the totals once. 128
threads tell, the other 128 hear.

What they order, in a pair: EVEN_MAX before the odd exponentials, and before max_odd and the odd P are written: the even
warpgroup has then done its second product of the pair before. EVEN_P before the odd warpgroup's first product; EVEN_P_READ,
from the second pair on, after that product and before the even P and max_even are written again. ODD_P before the even
warpgroup's second product. No barrier is arrived at twice before it has been left: EVEN_MAX and EVEN_P follow the even
warpgroup's wait at EVEN_P_READ, which follows the odd one's waits at both; ODD_P follows EVEN_MAX, which follows the even one's
wait at ODD_P; EVEN_P_READ follows EVEN_P, which follows the even one's wait at EVEN_P_READ.
"""

from typing import Any

import tilelang.language as T

from codegen.kernels import prefill_pace
from codegen.kernels.common import BF16, INT32, ROWS, WARP, WARPGROUP
from codegen.kernels.prefill_pair import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    EVEN_OUT,
    EVEN_P,
    EVEN_P_READ,
    EVEN_TOTAL,
    HALF,
    HEAD_DIM,
    KEYS,
    LOADER_REGISTERS,
    ODD_OUT,
    ODD_TOTAL,
    READERS,
    add_odd_weights,
    add_other_total,
    add_weights,
    allocate_fragments,
    allocate_shared,
    clear,
    even_softmax,
    hear,
    hide,
    load,
    locate,
    odd_softmax,
    page_of,
    release,
    rescale,
    take_odd_maximum,
    tell,
    visible,
    write_lse,
    write_out,
)

KV_HEADS = 64  # of a request, told apart in its pace
CHUNKS = 4  # of K, each with a full barrier
CHUNK = HEAD_DIM // CHUNKS  # columns


@T.macro
def feed_key(work, pairs, key, even_full, odd_full, empty):
    """The loader of K."""
    tile = T.alloc_var(INT32)
    start = T.alloc_var(INT32)
    page = T.alloc_var(INT32)
    place = T.alloc_var(INT32)
    place = prefill_pace.place_of(
        work.turn, work.owner * KV_HEADS + work.kv_head, work.tiles, T.And(work.first, work.turn >= 0)
    )
    if pairs > 0:
        page = page_of(work, 0)
    for i in T.serial(pairs):
        prefill_pace.keep_pace(place, 2 * i, work.tiles)
        locate(work, 2 * i, 1, page, work.tx == CONSUMERS, tile, start)
        T.barrier_wait(empty[1], (i & 1) ^ 1)
        load_key(work, tile, start, key, even_full)
        if 2 * i + 1 < work.tiles:
            locate(work, 2 * i + 1, 1, page, work.tx == CONSUMERS, tile, start)
            T.barrier_wait(empty[0], i & 1)
            load_key(work, tile, start, key, odd_full)
    prefill_pace.leave_pace(place)


@T.macro
def load_key(work, tile, start, key, full):
    """K of a tile, chunk by chunk in the order in which the scores read it."""
    for j in T.unroll(CHUNKS):
        load(
            work.pool[tile, start : start + KEYS, work.kv_head, j * CHUNK : (j + 1) * CHUNK],
            key[:, j * CHUNK : (j + 1) * CHUNK],
            full,
            j,
        )
        if work.tx == CONSUMERS:
            T.barrier_arrive(full[j])


@T.macro
def feed_value(work, half, leader, values, full, empty):
    """The loader of a half of V's columns: a warp, of which `leader` is the first thread. A page holds the layer's K rows, then
    its V rows: V is the next tile of 64 rows."""
    tile = T.alloc_var(INT32)
    start = T.alloc_var(INT32)
    page = T.alloc_var(INT32)
    if work.tiles > 0:
        page = page_of(work, 0)
    for t in T.serial(work.tiles):
        locate(work, t, 1, page, False, tile, start)
        T.barrier_wait(empty[half], (t & 1) ^ 1)
        load(
            work.pool[tile + 1, start : start + KEYS, work.kv_head, half * HALF : (half + 1) * HALF],
            values,
            full,
            half,
        )
        if work.tx == leader:
            T.barrier_arrive(full[half])


@T.macro
def scores(s, q_s, key, full, parity):
    """S = Q K^T, done."""
    for j in T.unroll(CHUNKS):
        T.barrier_wait(full[j], parity)
        T.wgmma_gemm(
            q_s[:, j * CHUNK : (j + 1) * CHUNK], key[:, j * CHUNK : (j + 1) * CHUNK], s, transpose_B=True, clear_accum=j == 0
        )
    T.wait_wgmma(0)


@T.macro
def cta(work: Any):
    """The warp roles. `work` is the same in both CTAs of a cluster but for the head."""
    q_s = T.alloc_shared([ROWS, HEAD_DIM], BF16)
    key = T.alloc_shared([KEYS, HEAD_DIM], BF16)
    left = T.alloc_shared([KEYS, HALF], BF16)
    right = T.alloc_shared([KEYS, HALF], BF16)
    p_even = T.alloc_shared([ROWS, KEYS], BF16)
    p_odd = T.alloc_shared([ROWS, KEYS], BF16)
    q_full = T.alloc_barrier(1)
    shared = allocate_shared()
    even_full = T.alloc_barrier([1] * CHUNKS)
    odd_full = T.alloc_barrier([1] * CHUNKS)
    v_full = T.alloc_barrier([1] * 2)
    key_empty = T.alloc_cluster_barrier([READERS] * 2)
    v_empty = T.alloc_cluster_barrier([READERS] * 2)
    pairs = T.alloc_var(INT32)
    pairs = (work.tiles + 1) // 2
    if work.tx >= CONSUMERS:
        T.set_max_nreg(LOADER_REGISTERS, 0)
        if work.tx < CONSUMERS + WARP:
            if pairs > 0:
                T.tma_copy(work.q[work.row : work.row + ROWS, work.head, :], q_s, barrier=q_full, leader_scope_threads=WARP)
                if work.tx == CONSUMERS:
                    T.barrier_arrive(q_full)
            feed_key(work, pairs, key, even_full, odd_full, key_empty)
        elif work.tx < CONSUMERS + 2 * WARP:
            feed_value(work, 0, CONSUMERS + WARP, left, v_full, v_empty)
        elif work.tx < CONSUMERS + 3 * WARP:
            feed_value(work, 1, CONSUMERS + 2 * WARP, right, v_full, v_empty)
    elif work.tx < WARPGROUP:
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        if work.rows > 0:
            mine = allocate_fragments()
            page = T.alloc_var(INT32)
            shift = T.alloc_var(INT32)
            limit = T.alloc_var(INT32)
            clear(mine)
            if pairs > 0:
                page = page_of(work, 0)
                T.barrier_wait(q_full, 0)
            for i in T.serial(pairs):
                visible(work, 2 * i, page, shift, limit)
                scores(mine.s, q_s, key, even_full, i & 1)
                release(key_empty, 0, work.tx)
                if i > 0:
                    hear(shared.exchange, EVEN_P_READ, (i & 1) ^ 1)
                hide(mine.s, shift, limit)
                even_softmax(mine, p_even, shared, work.scale)
                T.barrier_wait(v_full[0], 0)
                T.wgmma_gemm(mine.p, left, mine.o)
                add_weights(mine)
                T.wait_wgmma(0)
                release(v_empty, 0, work.tx)
                take_odd_maximum(mine, shared, i & 1, work.scale)
                if 2 * i + 1 < work.tiles:
                    T.barrier_wait(v_full[0], 1)
                    T.wgmma_gemm(p_odd, left, mine.o)
                    T.wait_wgmma(0)
                    release(v_empty, 0, work.tx)
            add_other_total(mine, shared.total_even, shared.total_odd, shared.exchange, EVEN_TOTAL, ODD_TOTAL)
            write_out(mine, left, 0, EVEN_OUT, 0, 0, work)
            write_lse(mine, work)
    else:
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        if work.rows > 0:
            mine = allocate_fragments()
            page = T.alloc_var(INT32)
            shift = T.alloc_var(INT32)
            limit = T.alloc_var(INT32)
            clear(mine)
            if pairs > 0:
                page = page_of(work, 1)
                T.barrier_wait(q_full, 0)
            for i in T.serial(pairs):
                visible(work, 2 * i + 1, page, shift, limit)
                if 2 * i + 1 < work.tiles:
                    scores(mine.s, q_s, key, odd_full, i & 1)
                    release(key_empty, 1, work.tx)
                hide(mine.s, shift, limit)
                odd_softmax(mine, p_odd, shared, i & 1, work.scale)
                T.barrier_wait(v_full[1], 0)
                hear(shared.exchange, EVEN_P, i & 1)
                T.wgmma_gemm(p_even, right, mine.o)
                add_odd_weights(mine, work.scale)
                T.wait_wgmma(0)
                release(v_empty, 1, work.tx)
                if i + 1 < pairs:
                    tell(shared.exchange, EVEN_P_READ)
                rescale(mine.o, mine.alpha, mine.m_even, mine.m_odd)
                if 2 * i + 1 < work.tiles:
                    T.barrier_wait(v_full[1], 1)
                    T.wgmma_gemm(mine.p, right, mine.o)
                    T.wait_wgmma(0)
                    release(v_empty, 1, work.tx)
            add_other_total(mine, shared.total_odd, shared.total_even, shared.exchange, ODD_TOTAL, EVEN_TOTAL)
            write_out(mine, right, 0, ODD_OUT, HALF, 0, work)
    T.cluster_sync()  # neither CTA leaves while the other may still copy into it or arrive at its barriers
