"""The prefill's CTA over folded rows, [K_rot 128 | V 512].

A key tile is two halves of 40 KB. The left one is the first rotated chunk R0 and the value chunks V0 to V3, the right one R1
and V4 to V7; a chunk is 64 columns, 8 KB. The scores' operand is R0 V1 V2 V3 | R1 V5 V6 V7; the left half of the output's
columns comes of V0 to V3, the right half of V4 to V7.

Schedule of a pair of tiles (2i, 2i + 1), even and odd warpgroup side by side:

    even: S = Q K(2i); publish the maximum; P; O_left += P V_left(2i);   take the other's P: O_left += P V_left(2i + 1)
    odd:  S = Q K(2i + 1); take the maximum; P; take the other's P: O_right += P V_right(2i);    O_right += P V_right(2i + 1)

A warpgroup's own P is a register operand; the other's comes through shared memory. While one computes exponentials, the other's
products keep the tensor cores busy. Four warps load, one for each half of the even and of the odd tile: none waits for another.

Shared memory, 230,400 bytes: Q 64 KB; the even and the odd tile 80 KB each; maxima and sums, four arrays of 64 floats.
- The even tile's P goes into its R1, the odd tile's into its R0: the scores, the only reader, are done by then.
- The output is staged in the even tile's V0 to V3 and the odd tile's V4 to V7, which only the warpgroup concerned reads.

Barriers in shared memory. Each is used once a pair; use i completes the phase of parity i & 1.
- full[4] of a tile: 0 counts the bytes of R0 V1 V2, 1 of V3 V0, 2 of R1 V5 V6 V7, 3 of V4, and one arrival of the CTA's loader.
  CTA 0's loaders copy for both CTAs; each CTA counts on its own barrier. The tile's scorer waits for 0, 1 and 2 before it
  reads, and the odd warpgroup for both tiles' 3. Who reads what the other has waited for does so after an exchange.
- left_empty and right_empty of a tile: released by the even and the odd warpgroup, whose product is the last reader of that
  half, one arrival a warp at both CTAs' barriers: 8 in all. The half's loader waits for parity (i & 1) ^ 1 before it fills the
  half, so that the first wait passes. A half is released as soon as its product is done, before the next wait.
- q_full: the bytes of Q and one arrival, once, only where there is a key tile to score.

Exchanges (prefill_pair): EVEN_MAX, EVEN_P and ODD_P once a pair, the totals once. 128 threads tell, the other 128 hear.

What they order, in a pair: EVEN_MAX before the odd exponentials and before max_odd is written; EVEN_P before the odd
warpgroup's first product; ODD_P before the even one's second, and before max_even is written again. The even R1 is loaded
again only after right_empty, so after the odd warpgroup has read P there, and likewise the odd R0; the P of an odd tile that is
not there goes into R0 after EVEN_MAX, so after the even warpgroup has read the P before. No barrier is arrived at
twice before it has been left: the even warpgroup passes ODD_P, which the odd one arrives at after it has left EVEN_MAX, and its
next EVEN_P needs the even tile's next right half, which needs right_empty, which follows EVEN_P's wait.
"""

from typing import Any

import tilelang.language as T

from codegen.formats import ROTATED
from codegen.kernels.common import BF16, INT32, ROWS, WARP, WARPGROUP
from codegen.kernels.prefill_pair import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    EVEN_OUT,
    EVEN_P,
    EVEN_SCORED,
    EVEN_TOTAL,
    HALF,
    HEAD_DIM,
    KEYS,
    LOADER_REGISTERS,
    ODD_OUT,
    ODD_SCORED,
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
    visible,
    write_lse,
    write_out,
)

CHUNK = 64  # columns
HALF_TILE = ROTATED + HALF
VALUES = 2 * ROTATED  # a row's first value column


@T.macro
def load_box(work, tile, start, column, columns, target, at, full, index):
    """`columns` of a row from `column` on, into `target` from column `at` on."""
    load(
        work.pool[tile, start : start + KEYS, work.kv_head, column : column + columns],
        target[:, at : at + columns],
        full,
        index,
    )


@T.macro
def load_left(work, leader, tile, start, left, full):
    """R0, V1 to V3 and V0, in the order in which they are read."""
    load_box(work, tile, start, 0, ROTATED, left, 0, full, 0)
    load_box(work, tile, start, VALUES + CHUNK, 2 * CHUNK, left, CHUNK, full, 0)
    if work.tx == leader:
        T.barrier_arrive(full[0])
    load_box(work, tile, start, VALUES + 3 * CHUNK, CHUNK, left, 3 * CHUNK, full, 1)
    load_box(work, tile, start, VALUES, CHUNK, left, 4 * CHUNK, full, 1)
    if work.tx == leader:
        T.barrier_arrive(full[1])


@T.macro
def load_right(work, leader, tile, start, right, full):
    """R1, V5 to V7 and V4."""
    load_box(work, tile, start, ROTATED, ROTATED, right, 0, full, 2)
    load_box(work, tile, start, VALUES + HALF + CHUNK, 3 * CHUNK, right, CHUNK, full, 2)
    if work.tx == leader:
        T.barrier_arrive(full[2])
    load_box(work, tile, start, VALUES + HALF, CHUNK, right, 4 * CHUNK, full, 3)
    if work.tx == leader:
        T.barrier_arrive(full[3])


@T.macro
def feed(work, first, leader, report, load_half, half, full, read):
    """The loader of one half of the even or the odd tiles: a warp, of which `leader` is the first thread."""
    tile = T.alloc_var(INT32)
    start = T.alloc_var(INT32)
    page = T.alloc_var(INT32)
    if work.tiles > first:
        page = page_of(work, first)
    for i in T.serial((work.tiles + 1 - first) // 2):
        locate(work, 2 * i + first, 2, page, report and work.tx == leader, tile, start)
        T.barrier_wait(read[first], (i & 1) ^ 1)
        load_half(work, leader, tile, start, half, full)


@T.macro
def scores(s, q_s, left, right, full, parity):
    """S = Q K^T, done: Q's columns [0, 64) and [256, 320) meet the rotated chunks."""
    T.barrier_wait(full[0], parity)
    T.wgmma_gemm(q_s[:, 0 : 3 * CHUNK], left[:, 0 : 3 * CHUNK], s, transpose_B=True, clear_accum=True)
    T.barrier_wait(full[1], parity)
    T.wgmma_gemm(q_s[:, 3 * CHUNK : HALF], left[:, 3 * CHUNK : HALF], s, transpose_B=True)
    T.barrier_wait(full[2], parity)
    T.wgmma_gemm(q_s[:, HALF:HEAD_DIM], right[:, 0:HALF], s, transpose_B=True)
    T.wait_wgmma(0)


@T.macro
def cta(work: Any):
    """The warp roles. `work` is the same in both CTAs of a cluster but for the head."""
    q_s = T.alloc_shared([ROWS, HEAD_DIM], BF16)
    even_left = T.alloc_shared([KEYS, HALF_TILE], BF16)
    even_right = T.alloc_shared([KEYS, HALF_TILE], BF16)
    odd_left = T.alloc_shared([KEYS, HALF_TILE], BF16)
    odd_right = T.alloc_shared([KEYS, HALF_TILE], BF16)
    q_full = T.alloc_barrier(1)
    shared = allocate_shared()
    even_full = T.alloc_barrier([1] * 4)
    odd_full = T.alloc_barrier([1] * 4)
    left_empty = T.alloc_cluster_barrier([READERS] * 2)  # of the even tile, of the odd one
    right_empty = T.alloc_cluster_barrier([READERS] * 2)
    pairs = T.alloc_var(INT32)
    pairs = (work.tiles + 1) // 2
    if work.tx >= CONSUMERS:
        T.set_max_nreg(LOADER_REGISTERS, 0)
        if work.tx < CONSUMERS + WARP:
            if pairs > 0:
                T.tma_copy(work.q[work.row : work.row + ROWS, work.head, :], q_s, barrier=q_full, leader_scope_threads=WARP)
                if work.tx == CONSUMERS:
                    T.barrier_arrive(q_full)
            feed(work, 0, CONSUMERS, True, load_left, even_left, even_full, left_empty)
        elif work.tx < CONSUMERS + 2 * WARP:
            feed(work, 0, CONSUMERS + WARP, False, load_right, even_right, even_full, right_empty)
        elif work.tx < CONSUMERS + 3 * WARP:
            feed(work, 1, CONSUMERS + 2 * WARP, True, load_left, odd_left, odd_full, left_empty)
        else:
            feed(work, 1, CONSUMERS + 3 * WARP, False, load_right, odd_right, odd_full, right_empty)
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
                scores(mine.s, q_s, even_left, even_right, even_full, i & 1)
                T.sync_threads(EVEN_SCORED, WARPGROUP)
                hide(mine.s, shift, limit)
                even_softmax(mine, even_right[:, 0:CHUNK], shared, work.scale)
                T.wgmma_gemm(mine.p, even_left[:, CHUNK:HALF_TILE], mine.o)
                add_weights(mine)
                T.wait_wgmma(0)
                release(left_empty, 0, work.tx)
                take_odd_maximum(mine, shared, i & 1, work.scale)
                if 2 * i + 1 < work.tiles:
                    T.wgmma_gemm(odd_left[:, 0:CHUNK], odd_left[:, CHUNK:HALF_TILE], mine.o)
                    T.wait_wgmma(0)
                    release(left_empty, 1, work.tx)
            add_other_total(mine, shared.total_even, shared.total_odd, shared.exchange, EVEN_TOTAL, ODD_TOTAL)
            write_out(mine, even_left, CHUNK, EVEN_OUT, 0, CHUNK, work)
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
                    scores(mine.s, q_s, odd_left, odd_right, odd_full, i & 1)
                T.sync_threads(ODD_SCORED, WARPGROUP)
                hide(mine.s, shift, limit)
                odd_softmax(mine, odd_left[:, 0:CHUNK], shared, i & 1, work.scale)
                T.barrier_wait(even_full[3], i & 1)
                hear(shared.exchange, EVEN_P, i & 1)
                T.wgmma_gemm(even_right[:, 0:CHUNK], even_right[:, CHUNK:HALF_TILE], mine.o)
                add_odd_weights(mine, work.scale)
                T.wait_wgmma(0)
                release(right_empty, 0, work.tx)
                rescale(mine.o, mine.alpha, mine.m_even, mine.m_odd)
                if 2 * i + 1 < work.tiles:
                    T.barrier_wait(odd_full[3], i & 1)
                    T.wgmma_gemm(mine.p, odd_right[:, CHUNK:HALF_TILE], mine.o)
                    T.wait_wgmma(0)
                    release(right_empty, 1, work.tx)
            add_other_total(mine, shared.total_odd, shared.total_even, shared.exchange, ODD_TOTAL, EVEN_TOTAL)
            write_out(mine, odd_right, CHUNK, ODD_OUT, HALF, CHUNK, work)
    T.cluster_sync()  # neither CTA leaves while the other may still copy into it or arrive at its barriers
