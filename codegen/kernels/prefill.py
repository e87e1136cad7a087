"""Causal grouped-query prefill over a paged KV pool, split or folded rows.

Work: one CTA computes 64 query rows of one query head. The grid is (query heads of a group, query tiles, KV heads): the
heads of a group read the same keys and sit side by side, so K and V come from L2 after the first of them.

Query tiles: request r owns the tile slots from `q_indptr[r] // 64 + r` on. The first slots of successive requests differ by at
least the tiles the earlier one has, so the slots are disjoint, a binary search over q_indptr finds the owner, and a tile's
rows start where its request does: a request's bits never depend on the batch around it. A slot nobody owns does nothing.

Warp roles, 384 threads:
- warpgroups 0 and 1 (240 registers) each compute all of S = Q K^T for the tile, so that they need nothing of one another,
  and one half of the output columns, O[:, half] += P V[:, half], P staying in registers.
- one warp of warpgroup 2 (24 registers) loads: Q once, then K and the two halves of V for every key tile.

Shared memory: Q 64 KB. Split: K 64 KB and V in two halves of 32 KB, one stage each: 192 KB in all. Folded: two stages of
the rotated chunks, 16 KB, and V in two halves of 32 KB: 224 KB in all.

Barriers: a full one is filled by the copies, an empty one by each warp that has read, since a warp's wgmma wait speaks for
that warp alone. Split: K's pair, and a pair for each half of V, which one warpgroup reads; the score operand is K. Folded: one
pair a stage; the score operand is V with columns [0, 64) and [256, 320) taken from the rotated chunks, and a stage is free
when both warpgroups have used all of it. The n-th use of a stage waits for full parity n & 1 and empty parity (n & 1) ^ 1,
which makes the first empty wait pass.

Keys: one key tile is one page. The pool is seen as [pool_tiles, 64, KV heads, head_dim]. A last page holding `last` < 64
tokens is copied as the box that starts 64 - last rows before the page, so the copy engine clips, and zeroes, the rows in
front: key k of that page lands in row k + 64 - last, and what lies past the length (NaN, perhaps) is never read. A page id
outside the pool is copied from past the pool's end, which reads as zero, masked whole, and reported in the status word.

Numbers: scores and sums in fp32, base-2 exponentials of S * sm_scale * log2(e). lse is natural.
"""

from typing import Any

import tilelang.language as T

from codegen.formats import FORMATS, ROTATED
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
from codegen.status import BAD_INDEX, BAD_PAGE_ID

PASS_CONFIGS = common.PASS_CONFIGS


def build(request: Request) -> Any:
    """The prim_func of one instance.

    Parameters and dynamic extents are those of `tilepress_prefill_args` (abi.py) and the launch values of csrc/prefill.h.
    """
    head_dim, page_size, group = request.head_dim, request.page_size, request.group
    folded = request.page_format == "folded"
    half = head_dim // 2
    width = head_dim + FORMATS[request.page_format].extra_columns
    stages = 2 if folded else 1
    q_rows, batch, num_kv_heads = T.dynamic("q_rows"), T.dynamic("batch"), T.dynamic("num_kv_heads")
    pool_tiles, num_page_ids = T.dynamic("pool_tiles"), T.dynamic("num_page_ids")
    indptr_len, lse_rows, status_words = T.dynamic("indptr_len"), T.dynamic("lse_rows"), T.dynamic("status_words")
    heads = num_kv_heads * group
    minus_inf = -T.infinity(FP32)
    find_request = common.request_finder(page_size, spare=1)
    softmax = common.softmax_step(page_size)

    @T.macro
    def copy_in(source, target, barriers, index, tx):
        """One warp's bulk copy of a box, and its arrival on the barrier that counts the bytes."""
        T.tma_copy(source, target, barrier=barriers[index], leader_scope_threads=WARP)
        if tx == 2 * WARPGROUP:
            T.barrier_arrive(barriers[index])

    @T.macro
    def scores(s, q_s, key, left, right, stage):
        """S = Q K^T, issued; `key` is K, or the rotated chunks."""
        if folded:
            T.wgmma_gemm(q_s[:, 0:ROTATED], key[stage, :, 0:ROTATED], s, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(q_s[:, ROTATED:half], left[stage, :, ROTATED:half], s, transpose_B=True)
            T.wgmma_gemm(q_s[:, half : half + ROTATED], key[stage, :, ROTATED : 2 * ROTATED], s, transpose_B=True)
            T.wgmma_gemm(q_s[:, half + ROTATED : head_dim], right[stage, :, ROTATED:half], s, transpose_B=True)
        else:
            T.wgmma_gemm(q_s, key[stage, :, :], s, transpose_B=True, clear_accum=True)

    @T.macro
    def attend(
        side,
        q_s,
        key,
        left,
        right,
        q_full,
        key_full,
        key_empty,
        v_full,
        v_empty,
        page_ids,
        first_page,
        tiles,
        last_tile,
        last_shift,
        position,
        num_pages,
        scale,
        row,
        rows,
        head,
        out,
        lse,
        want_lse,
        tx,
    ):
        """One consumer warpgroup: the whole softmax of the tile, and output columns [side * half, (side + 1) * half)."""
        s = T.alloc_fragment([ROWS, page_size], FP32)
        p = T.alloc_fragment([ROWS, page_size], BF16)
        o = T.alloc_fragment([ROWS, half], FP32)
        m = T.alloc_fragment([ROWS], FP32)  # row maximum of the raw scores
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
            # Row a of the tile sees the keys in columns [shift, limit + a].
            page = page_ids[first_page + i]
            shift = T.if_then_else(i == last_tile, last_shift, 0)
            limit = position - i * page_size + shift
            if page < 0 or page >= num_pages:
                limit = -ROWS
            stage = i % stages
            parity = (i // stages) & 1
            T.barrier_wait(key_full[stage], parity)
            scores(s, q_s, key, left, right, stage)
            T.wait_wgmma(0)
            if not folded:
                if tx % WARP == 0:
                    T.barrier_arrive(key_empty[stage])
            if limit < page_size - 1 or shift > 0:
                for a, b in T.Parallel(ROWS, page_size):
                    s[a, b] = T.if_then_else(T.And(b >= shift, b <= limit + a), s[a, b], minus_inf)
            softmax(s, p, m, m_new, alpha, total, partial, scale)
            for a, b in T.Parallel(ROWS, half):
                o[a, b] *= alpha[a]
            if not folded:
                T.barrier_wait(v_full[side], parity)
            if side == 0:
                T.wgmma_gemm(p, left[stage, :, :], o)
            else:
                T.wgmma_gemm(p, right[stage, :, :], o)
            T.wait_wgmma(0)
            if tx % WARP == 0:
                if folded:
                    T.barrier_arrive(key_empty[stage])
                else:
                    T.barrier_arrive(v_empty[side])
        for a in T.Parallel(ROWS):
            partial[a] = T.if_then_else(total[a] == 0, 0.0, 1.0 / total[a])  # a NaN in Q stays a NaN
        for a, b in T.Parallel(ROWS, half):
            o[a, b] *= partial[a]
        # Through this side's half of V, so that global stores are whole 16-byte rows. The named barriers are the
        # warpgroup's own, but in the folded format the other one's scores read this half too.
        if folded:
            T.sync_threads(3, 2 * WARPGROUP)
        else:
            T.sync_threads(1 + side, WARPGROUP)
        if side == 0:
            T.copy(o, left[0, :, :])
        else:
            T.copy(o, right[0, :, :])
        T.sync_threads(1 + side, WARPGROUP)
        for a, b in T.Parallel(ROWS, half):
            if a < rows:
                if side == 0:
                    out[row + a, head, b] = left[0, a, b]
                else:
                    out[row + a, head, half + b] = right[0, a, b]
        if side == 0:
            if want_lse != 0:
                for a in T.Parallel(ROWS):
                    if a < rows:
                        lse[row + a, head] = T.if_then_else(total[a] == 0, minus_inf, (m[a] * scale + T.log2(total[a])) * LN2)

    @T.prim_func
    def kernel(
        q: T.Tensor([q_rows, heads, head_dim], BF16),
        pool: T.Tensor([pool_tiles, page_size, num_kv_heads, width], BF16),
        page_ids: T.Tensor([num_page_ids], INT32),
        page_indptr: T.Tensor([indptr_len], INT32),
        last_page_len: T.Tensor([batch], INT32),
        q_indptr: T.Tensor([indptr_len], INT32),
        out: T.Tensor([q_rows, heads, head_dim], BF16),
        lse: T.Tensor([lse_rows, heads], FP32),
        status: T.Tensor([status_words], INT32),
        sm_scale: T.float32,
        num_pages: T.int32,
        page_tiles: T.int32,
        layer_tile: T.int32,
        q_tiles: T.int32,
        want_lse: T.int32,
        want_status: T.int32,
    ):
        with T.Kernel(group, q_tiles, num_kv_heads, threads=3 * WARPGROUP) as (group_head, tile_y, kv_head):
            q_s = T.alloc_shared([ROWS, head_dim], BF16)
            key = T.alloc_shared([stages, page_size, 2 * ROTATED if folded else head_dim], BF16)
            left = T.alloc_shared([stages, page_size, half], BF16)
            right = T.alloc_shared([stages, page_size, half], BF16)
            q_full = T.alloc_barrier(1)
            key_full = T.alloc_barrier([1] * stages)
            key_empty = T.alloc_barrier([2 * WARPGROUP // WARP] * stages)
            v_full = T.alloc_barrier([1] * 2)
            v_empty = T.alloc_barrier([WARPGROUP // WARP] * 2)
            tx = T.get_thread_binding()
            scale = sm_scale * LOG2E
            head = kv_head * group + group_head

            # The last slots first: they are the longest of a prompt.
            slot = q_tiles - 1 - tile_y
            span = T.alloc_local([SPAN_WORDS], INT32)
            find_request(span, slot, batch, q_indptr, page_indptr, last_page_len, q_rows, num_page_ids)

            row = T.alloc_var(INT32)
            rows = T.alloc_var(INT32)
            position = T.alloc_var(INT32)  # of the tile's first row in its request's context; negative: it sees no key
            tiles = T.alloc_var(INT32)
            pages = T.alloc_var(INT32)
            row = span[Q_FROM] + (slot - span[OWNER] - span[Q_FROM] // ROWS) * ROWS
            rows = T.if_then_else(row < span[Q_FROM], 0, T.max(T.min(span[Q_TO] - row, ROWS), 0))
            pages = span[PAGE_TO] - span[PAGE_FROM]
            position = T.if_then_else(pages > 0, (pages - 1) * page_size + span[LAST_LEN], 0) - (span[Q_TO] - row)
            tiles = T.if_then_else(rows > 0, T.max(T.min((position + rows - 1) // page_size + 1, pages), 0), 0)
            if tx >= 2 * WARPGROUP:
                T.set_max_nreg(24, 0)
                if tx < 2 * WARPGROUP + WARP:
                    if want_status != 0 and span[CLAMPED] != 0 and tx == 2 * WARPGROUP:
                        T.atomic_or(status[0], BAD_INDEX)
                    if tiles > 0:
                        copy_in(q[row : row + ROWS, head, :], q_s, q_full, 0, tx)
                    page = T.alloc_var(INT32)
                    tile = T.alloc_var(INT32)
                    start = T.alloc_var(INT32)
                    for i in T.serial(tiles):
                        page = page_ids[span[PAGE_FROM] + i]
                        tile = page * page_tiles + layer_tile
                        if page < 0 or page >= num_pages:
                            tile = pool_tiles
                            if want_status != 0 and tx == 2 * WARPGROUP:
                                T.atomic_or(status[0], BAD_PAGE_ID)
                        start = T.if_then_else(i == pages - 1, span[LAST_LEN] - page_size, 0)
                        stage = i % stages
                        parity = (i // stages) & 1
                        T.barrier_wait(key_empty[stage], parity ^ 1)
                        if folded:
                            T.tma_copy(
                                pool[tile, start : start + page_size, kv_head, 0 : 2 * ROTATED],
                                key[stage, :, :],
                                barrier=key_full[stage],
                                leader_scope_threads=WARP,
                            )
                            T.tma_copy(
                                pool[tile, start : start + page_size, kv_head, 2 * ROTATED : 2 * ROTATED + half],
                                left[stage, :, :],
                                barrier=key_full[stage],
                                leader_scope_threads=WARP,
                            )
                            copy_in(
                                pool[tile, start : start + page_size, kv_head, 2 * ROTATED + half : width],
                                right[stage, :, :],
                                key_full,
                                stage,
                                tx,
                            )
                        else:
                            copy_in(pool[tile, start : start + page_size, kv_head, :], key[stage, :, :], key_full, stage, tx)
                            # A page holds the layer's K rows, then its V rows: V is the next tile of 64 rows.
                            T.barrier_wait(v_empty[0], parity ^ 1)
                            copy_in(
                                pool[tile + 1, start : start + page_size, kv_head, 0:half], left[stage, :, :], v_full, 0, tx
                            )
                            T.barrier_wait(v_empty[1], parity ^ 1)
                            copy_in(
                                pool[tile + 1, start : start + page_size, kv_head, half:head_dim],
                                right[stage, :, :],
                                v_full,
                                1,
                                tx,
                            )
            elif tx < WARPGROUP:
                T.set_max_nreg(240, 1)
                if rows > 0:
                    attend(
                        0, q_s, key, left, right, q_full, key_full, key_empty, v_full, v_empty,
                        page_ids, span[PAGE_FROM], tiles, pages - 1, page_size - span[LAST_LEN], position, num_pages,
                        scale, row, rows, head, out, lse, want_lse, tx,
                    )  # fmt: skip
            else:
                T.set_max_nreg(240, 1)
                if rows > 0:
                    attend(
                        1, q_s, key, left, right, q_full, key_full, key_empty, v_full, v_empty,
                        page_ids, span[PAGE_FROM], tiles, pages - 1, page_size - span[LAST_LEN], position, num_pages,
                        scale, row, rows, head, out, lse, want_lse, tx,
                    )  # fmt: skip

    return kernel.with_attr("global_symbol", request.name)
