"""Causal grouped-query prefill over a paged KV pool, split or folded rows.

Work: one CTA computes 64 query rows of one query head, all 512 columns. The grid is (query heads of a group, query tiles, KV
heads). Two heads of a group, which read the same keys, are a cluster: one copy of a key tile fills both CTAs.

Query tiles: request r owns the tile slots from `q_indptr[r] // 64 + r` on. The first slots of successive requests differ by at
least the tiles the earlier one has, so the slots are disjoint, a binary search over q_indptr finds the owner, and a tile's
rows start where its request does: a request's bits never depend on the batch around it. A slot nobody owns does nothing.

Warp roles, 384 threads: warpgroups 0 and 1 (240 registers) compute, as the even and the odd one of prefill_pair; warps of
warpgroup 2 (24 registers) load. Schedule, shared memory and barriers are the page format's own: prefill_split, prefill_folded.

Keys: one key tile is one page. The pool is seen as [pool_tiles, 64, KV heads, row width]. A last page holding `last` < 64
tokens is copied as the box that starts 64 - last rows before the page, so the copy engine clips, and zeroes, the rows in
front: key k of that page lands in row k + 64 - last, and what lies past the length (NaN, perhaps) is never read. A page id
outside the pool is copied from past the pool's end, which reads as zero, masked whole, and reported in the status word.

Order: as launched, longest first, where a request's query tiles differ much in length, else as reorder says.

Cluster: its two CTAs have the same slot and KV head, so the same key tiles, and agree on every count, none included. They meet
before the first copy, where TileLang has initialised their barriers, and after the last, whatever they had to do.

Numbers: scores and sums in fp32, base-2 exponentials of S * sm_scale * log2(e). lse is natural.
"""

from typing import Any

import tilelang.language as T

from codegen.formats import FORMATS
from codegen.kernels import common, prefill_folded, prefill_pace, prefill_split
from codegen.kernels.common import (
    BF16,
    CLAMPED,
    FP32,
    INT32,
    LAST_LEN,
    LOG2E,
    OWNER,
    PAGE_FROM,
    PAGE_TO,
    Q_FROM,
    Q_TO,
    ROWS,
    SPAN_WORDS,
    WARPGROUP,
)
from codegen.kernels.prefill_pair import CLUSTER, HEAD_DIM, KEYS, PRELUDE, Work
from codegen.lowered import Request
from codegen.status import BAD_INDEX

PASS_CONFIGS = common.PASS_CONFIGS
LONG = 2  # pages a query tile: then a prompt's shortest query tile sees half the keys of its longest, or more
CTAS = {"split": prefill_split.cta, "folded": prefill_folded.cta}


@T.macro
def reorder(number, clusters, q_tiles, num_kv_heads, pairs, turn: T.Ref, slot: T.Ref, kv_head: T.Ref, pair: T.Ref):
    """Which item is launched as the `number`th, of a single request, whose items are of much the same length.

    An item is a query tile, a KV head and a pair of the group's heads; `clusters` of them run at once and make a turn. Longest
    first, items that are no whole number of turns would leave a last turn of a few that all others wait for. So `lead` clusters
    take one item more, the shortest ones: they are launched first in every turn, and thus ahead ever more. They keep pace with
    no other; their turn is -1.
    """
    row = num_kv_heads * pairs
    turns = q_tiles * row // clusters
    lead = q_tiles * row % clusters
    short = T.alloc_var(INT32)  # query tiles of the leading clusters
    item = T.alloc_var(INT32)
    place = T.alloc_var(INT32)
    short = (lead * (turns + 1) + row - 1) // row
    if lead > 0 and short < q_tiles:
        place = number % clusters
        item = turn * (clusters - lead) + place - lead
        if place < lead:
            item = (q_tiles - short) * row + turn * lead + place
            turn = -1
        elif item >= (q_tiles - short) * row:
            item = item + (turns + 1) * lead
        if item < (q_tiles - short) * row:
            kv_head = item // ((q_tiles - short) * pairs)
            slot = q_tiles - 1 - item % ((q_tiles - short) * pairs) // pairs
        else:
            item = item - (q_tiles - short) * row
            kv_head = item // pairs % num_kv_heads  # noqa: F841
            slot = short - 1 - item // row  # noqa: F841
        pair = item % pairs
    else:
        pair = number % pairs  # noqa: F841


def build(request: Request) -> Any:
    """The prim_func of one instance.

    Parameters and dynamic extents are those of `tilepress_prefill_args` (abi) and the launch values of csrc/prefill.h.
    """
    group = request.group
    if (request.head_dim, request.page_size, group % CLUSTER) != (HEAD_DIM, KEYS, 0):
        raise ValueError(f"{request.name}: prefill needs head_dim {HEAD_DIM}, page_size {KEYS} and an even group")
    cta = CTAS[request.page_format]
    prelude = PRELUDE + prefill_pace.PRELUDE if request.page_format == "split" else PRELUDE
    width = HEAD_DIM + FORMATS[request.page_format].extra_columns
    q_rows, batch, num_kv_heads = T.dynamic("q_rows"), T.dynamic("batch"), T.dynamic("num_kv_heads")
    pool_tiles, num_page_ids = T.dynamic("pool_tiles"), T.dynamic("num_page_ids")
    indptr_len, lse_rows, status_words = T.dynamic("indptr_len"), T.dynamic("lse_rows"), T.dynamic("status_words")
    heads = num_kv_heads * group
    find_request = common.request_finder(KEYS, spare=1)

    @T.prim_func
    def kernel(
        q: T.Tensor([q_rows, heads, HEAD_DIM], BF16),
        pool: T.Tensor([pool_tiles, KEYS, num_kv_heads, width], BF16),
        page_ids: T.Tensor([num_page_ids], INT32),
        page_indptr: T.Tensor([indptr_len], INT32),
        last_page_len: T.Tensor([batch], INT32),
        q_indptr: T.Tensor([indptr_len], INT32),
        out: T.Tensor([q_rows, heads, HEAD_DIM], BF16),
        lse: T.Tensor([lse_rows, heads], FP32),
        status: T.Tensor([status_words], INT32),
        sm_scale: T.float32,
        num_pages: T.int32,
        page_tiles: T.int32,
        layer_tile: T.int32,
        q_tiles: T.int32,
        resident_clusters: T.int32,
        want_lse: T.int32,
        want_status: T.int32,
    ):
        with T.Kernel(group, q_tiles, num_kv_heads, threads=3 * WARPGROUP, cluster_dims=(CLUSTER, 1, 1), prelude=prelude) as (
            block_x,
            block_y,
            block_z,
        ):
            tx = T.get_thread_binding()

            # The last slots first: they are the longest of a prompt. A KV head's together: they read the same keys.
            slot = T.alloc_var(INT32)
            kv_head = T.alloc_var(INT32)
            group_head = T.alloc_var(INT32)
            turn = T.alloc_var(INT32)
            slot = q_tiles - 1 - block_y
            kv_head = block_z
            group_head = block_x
            clusters = T.max(resident_clusters, 1)
            number = (block_z * q_tiles + block_y) * (group // CLUSTER) + block_x // CLUSTER
            turn = number // clusters
            span = T.alloc_local([SPAN_WORDS], INT32)
            find_request(span, slot, batch, q_indptr, page_indptr, last_page_len, q_rows, num_page_ids)

            row = T.alloc_var(INT32)
            rows = T.alloc_var(INT32)
            pages = T.alloc_var(INT32)
            position = T.alloc_var(INT32)
            tiles = T.alloc_var(INT32)
            pages = span[PAGE_TO] - span[PAGE_FROM]
            if batch == 1 and pages >= LONG * q_tiles:
                reorder(number, clusters, q_tiles, num_kv_heads, group // CLUSTER, turn, slot, kv_head, group_head)
                group_head = group_head * CLUSTER + block_x % CLUSTER
            row = span[Q_FROM] + (slot - span[OWNER] - span[Q_FROM] // ROWS) * ROWS
            rows = T.if_then_else(row < span[Q_FROM], 0, T.max(T.min(span[Q_TO] - row, ROWS), 0))
            position = T.if_then_else(pages > 0, (pages - 1) * KEYS + span[LAST_LEN], 0) - (span[Q_TO] - row)
            tiles = T.if_then_else(rows > 0, T.max(T.min((position + rows - 1) // KEYS + 1, pages), 0), 0)
            if want_status != 0 and span[CLAMPED] != 0 and tx == 2 * WARPGROUP:
                T.atomic_or(status[0], BAD_INDEX)
            cta(
                Work(
                    q=q,
                    pool=pool,
                    page_ids=page_ids,
                    out=out,
                    lse=lse,
                    status=status,
                    row=row,
                    rows=rows,
                    position=position,
                    tiles=tiles,
                    first_page=span[PAGE_FROM],
                    pages=pages,
                    last_len=span[LAST_LEN],
                    head=kv_head * group + group_head,
                    kv_head=kv_head,
                    turn=turn,
                    owner=span[OWNER],
                    first=block_x % CLUSTER == 0,
                    scale=sm_scale * LOG2E,
                    num_pages=num_pages,
                    page_tiles=page_tiles,
                    layer_tile=layer_tile,
                    pool_tiles=pool_tiles,
                    want_lse=want_lse,
                    want_status=want_status,
                    tx=tx,
                )
            )

    return kernel.with_attr("global_symbol", request.name)
