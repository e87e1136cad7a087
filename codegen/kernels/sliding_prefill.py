"""Windowed causal grouped-query prefill over a paged KV pool, split rows.

Work: one CTA computes 64 query positions of two query heads of a group. The grid is (pairs of heads, query tiles, KV heads).
Query tiles sit on multiples of 64 of the request's positions, so a full window is always the same number of key tiles, and a
row's bits depend neither on the batch nor on where a prompt was cut into chunks, if it was cut at pages (a last page that is
not full lies in other columns of its tile).

Query tiles of request r own the tile slots from `q_indptr[r] // 64 + 2 r` on: n rows lie in at most n // 64 + 2 tiles.

Keys: one key tile is one page. Row at position p sees the keys p - window_left to p. A tile visits the pages from the one that
holds its first row's oldest visible key to the one that holds its last row. The request's page list begins at the page-aligned
position kv_origin: keys before it are gone. Where the window reaches before it, they are masked and reported.

Warp roles, 384 threads: warpgroups 0 and 1 (240 registers) compute one head each, all 256 columns, P staying in registers; one
warp of warpgroup 2 (24 registers) loads for both.

Shared memory: Q of both heads 64 KB, a ring of four tiles of [64, 256], K and V of a page by turns, 128 KB: 192 KB. O leaves
through the head's own Q, which nobody reads any more.

Barriers: q_full; full[stage], filled by the copies; empty[stage], by each warp that has read. The n-th use of a stage waits for
full parity n & 1 and empty parity (n & 1) ^ 1, which makes the first empty wait pass.

The last page's box starts 64 - last rows early, so that the copy engine clips, and zeroes, the rows in front: key k of that
page lands in row k + 64 - last, and what lies past the length is never read. A page id outside the pool is copied from past
the pool's end, which reads as zero, masked whole, and reported.

Numbers: scores and sums in fp32, base-2 exponentials of S * sm_scale * log2(e). lse is natural.
"""

from typing import Any

import tilelang.language as T

from codegen.kernels import common
from codegen.kernels.common import (
    BF16,
    CLAMPED,
    FP32,
    INT32,
    LAST_LEN,
    LN2,
    LOG2E,
    OWNER,
    PAGE_FROM,
    PAGE_TO,
    Q_FROM,
    Q_TO,
    ROWS,
    SPAN_WORDS,
    WARP,
    WARPGROUP,
)
from codegen.lowered import Request
from codegen.status import BAD_INDEX, BAD_PAGE_ID, BAD_WINDOW

PASS_CONFIGS = common.PASS_CONFIGS
HEADS = 2  # of a CTA, one a warpgroup
STAGES = 4
MAX_ORIGIN = 1 << 29  # leaves sums of positions within 32 bits


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
    minus_inf = -T.infinity(FP32)
    find_request = common.request_finder(page_size, spare=2)
    softmax = common.softmax_step(page_size)

    @T.macro
    def attend(
        which,
        q_s,
        ring,
        q_full,
        full,
        empty,
        page_ids,
        first_page,
        tiles,
        last_tile,
        last_shift,
        reach,
        window_left,
        num_pages,
        scale,
        row,
        low,
        high,
        head,
        out,
        lse,
        want_lse,
        tx,
    ):
        """One consumer warpgroup: one head of the tile, rows [low, high) of its 64."""
        s = T.alloc_fragment([ROWS, page_size], FP32)
        p = T.alloc_fragment([ROWS, page_size], BF16)
        o = T.alloc_fragment([ROWS, head_dim], FP32)
        m = T.alloc_fragment([ROWS], FP32)
        m_new = T.alloc_fragment([ROWS], FP32)
        alpha = T.alloc_fragment([ROWS], FP32)
        total = T.alloc_fragment([ROWS], FP32)
        partial = T.alloc_fragment([ROWS], FP32)
        page = T.alloc_var(INT32)
        shift = T.alloc_var(INT32)
        limit = T.alloc_var(INT32)
        T.fill(o, 0)
        T.fill(total, 0)
        T.fill(m, minus_inf)
        if tiles > 0:
            T.barrier_wait(q_full, 0)
        for i in T.serial(tiles):
            # Row a of the tile sees the keys in columns [limit + a - window_left, limit + a], from `shift` on.
            page = page_ids[first_page + i]
            shift = T.if_then_else(i == last_tile, last_shift, 0)
            limit = reach - i * page_size + shift
            if page < 0 or page >= num_pages:
                limit = -ROWS
            T.barrier_wait(full[(2 * i) % STAGES], (2 * i // STAGES) & 1)
            T.wgmma_gemm(q_s[which, :, :], ring[(2 * i) % STAGES, :, :], s, transpose_B=True, clear_accum=True)
            T.wait_wgmma(0)
            if tx % WARP == 0:
                T.barrier_arrive(empty[(2 * i) % STAGES])
            if limit < page_size - 1 or shift > 0 or limit + ROWS - 1 - window_left > 0:
                for a, b in T.Parallel(ROWS, page_size):
                    s[a, b] = T.if_then_else(
                        T.And(b >= shift, T.And(b <= limit + a, b >= limit + a - window_left)), s[a, b], minus_inf
                    )
            softmax(s, p, m, m_new, alpha, total, partial, scale)
            for a, b in T.Parallel(ROWS, head_dim):
                o[a, b] *= alpha[a]
            T.barrier_wait(full[(2 * i + 1) % STAGES], (2 * i // STAGES) & 1)
            T.wgmma_gemm(p, ring[(2 * i + 1) % STAGES, :, :], o)
            T.wait_wgmma(0)
            if tx % WARP == 0:
                T.barrier_arrive(empty[(2 * i + 1) % STAGES])
        for a in T.Parallel(ROWS):
            partial[a] = T.if_then_else(total[a] == 0, 0.0, 1.0 / total[a])  # a NaN in Q stays a NaN
        for a, b in T.Parallel(ROWS, head_dim):
            o[a, b] *= partial[a]
        # Through this head's Q, so that global stores are whole 16-byte rows. The named barriers are the warpgroup's own.
        T.sync_threads(1 + which, WARPGROUP)
        T.copy(o, q_s[which, :, :])
        T.sync_threads(1 + which, WARPGROUP)
        for a, b in T.Parallel(ROWS, head_dim):
            if a >= low and a < high:
                out[row + a, head, b] = q_s[which, a, b]
        if want_lse != 0:
            for a in T.Parallel(ROWS):
                if a >= low and a < high:
                    lse[row + a, head] = T.if_then_else(total[a] == 0, minus_inf, (m[a] * scale + T.log2(total[a])) * LN2)

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
        has_origin: T.int32,
        want_lse: T.int32,
        want_status: T.int32,
    ):
        with T.Kernel(group // HEADS, q_tiles, num_kv_heads, threads=3 * WARPGROUP) as (pair, tile_y, kv_head):
            q_s = T.alloc_shared([HEADS, ROWS, head_dim], BF16)
            ring = T.alloc_shared([STAGES, page_size, head_dim], BF16)
            q_full = T.alloc_barrier(1)
            full = T.alloc_barrier([1] * STAGES)
            empty = T.alloc_barrier([HEADS * WARPGROUP // WARP] * STAGES)
            tx = T.get_thread_binding()
            scale = sm_scale * LOG2E
            head = kv_head * group + pair * HEADS

            slot = q_tiles - 1 - tile_y
            span = T.alloc_local([SPAN_WORDS], INT32)
            find_request(span, slot, batch, q_indptr, page_indptr, last_page_len, q_rows, num_page_ids)

            origin = T.alloc_var(INT32)
            pages = T.alloc_var(INT32)
            offset = T.alloc_var(INT32)  # position of the request's first query row; below 0: it sees no key
            place = T.alloc_var(INT32)  # the tile's first position, a multiple of 64
            row = T.alloc_var(INT32)  # the row that position `place` would have
            low = T.alloc_var(INT32)
            high = T.alloc_var(INT32)
            oldest = T.alloc_var(INT32)  # position of the oldest key any row of the tile sees
            first = T.alloc_var(INT32)  # the first page visited, counted in the request's list
            tiles = T.alloc_var(INT32)
            bad = T.alloc_var(INT32)
            bad = 0
            pages = span[PAGE_TO] - span[PAGE_FROM]
            origin = 0
            if has_origin != 0:
                origin = kv_origin[span[OWNER]]
                if origin < 0 or origin % page_size != 0 or origin > MAX_ORIGIN:
                    span[CLAMPED] = 1
                    origin = T.max(T.min(origin, MAX_ORIGIN), 0) // page_size * page_size
            offset = origin + T.if_then_else(pages > 0, (pages - 1) * page_size + span[LAST_LEN], 0)
            offset = offset - (span[Q_TO] - span[Q_FROM])
            place = (offset // ROWS + slot - 2 * span[OWNER] - span[Q_FROM] // ROWS) * ROWS
            row = span[Q_FROM] + place - offset
            low = T.max(span[Q_FROM] - row, 0)
            high = T.min(span[Q_TO] - row, ROWS)
            oldest = T.max(place + low - window_left, 0)
            first = (oldest - origin) // page_size
            if oldest < origin:
                first = 0
                if place + high > 0:
                    bad = 1
            tiles = T.if_then_else(low < high, T.max(T.min((place + high - 1 - origin) // page_size + 1, pages) - first, 0), 0)
            if tx >= 2 * WARPGROUP:
                T.set_max_nreg(24, 0)
                if tx < 2 * WARPGROUP + WARP:
                    if want_status != 0 and tx == 2 * WARPGROUP:
                        if span[CLAMPED] != 0:
                            T.atomic_or(status[0], BAD_INDEX)
                        if bad != 0 and low < high:
                            T.atomic_or(status[0], BAD_WINDOW)
                    if tiles > 0:
                        for h in T.unroll(HEADS):
                            T.tma_copy(
                                q[row : row + ROWS, head + h, :], q_s[h, :, :], barrier=q_full, leader_scope_threads=WARP
                            )
                        if tx == 2 * WARPGROUP:
                            T.barrier_arrive(q_full)
                    page = T.alloc_var(INT32)
                    tile = T.alloc_var(INT32)
                    start = T.alloc_var(INT32)
                    for i in T.serial(tiles):
                        page = page_ids[span[PAGE_FROM] + first + i]
                        tile = page * page_tiles + layer_tile
                        if page < 0 or page >= num_pages:
                            tile = pool_tiles
                            if want_status != 0 and tx == 2 * WARPGROUP:
                                T.atomic_or(status[0], BAD_PAGE_ID)
                        start = T.if_then_else(first + i == pages - 1, span[LAST_LEN] - page_size, 0)
                        # A page holds the layer's K rows, then its V rows: V is the next tile of 64 rows.
                        for half in T.unroll(2):
                            T.barrier_wait(empty[(2 * i + half) % STAGES], ((2 * i // STAGES) & 1) ^ 1)
                            T.tma_copy(
                                pool[tile + half, start : start + page_size, kv_head, :],
                                ring[(2 * i + half) % STAGES, :, :],
                                barrier=full[(2 * i + half) % STAGES],
                                leader_scope_threads=WARP,
                            )
                            if tx == 2 * WARPGROUP:
                                T.barrier_arrive(full[(2 * i + half) % STAGES])
            elif tx < WARPGROUP:
                T.set_max_nreg(240, 1)
                if low < high:
                    attend(
                        0, q_s, ring, q_full, full, empty, page_ids, span[PAGE_FROM] + first, tiles, pages - 1 - first,
                        page_size - span[LAST_LEN], place - origin - first * page_size, window_left, num_pages, scale,
                        row, low, high, head, out, lse, want_lse, tx,
                    )  # fmt: skip
            else:
                T.set_max_nreg(240, 1)
                if low < high:
                    attend(
                        1, q_s, ring, q_full, full, empty, page_ids, span[PAGE_FROM] + first, tiles, pages - 1 - first,
                        page_size - span[LAST_LEN], place - origin - first * page_size, window_left, num_pages, scale,
                        row, low, high, head + 1, out, lse, want_lse, tx,
                    )  # fmt: skip

    return kernel.with_attr("global_symbol", request.name)
