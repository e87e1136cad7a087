"""Decode over a window of a paged KV pool: one query row a request. One kernel; a cluster of CTAs reads a request and KV head.

Schedule. An item is a request and KV head. Clusters are persistent: cluster c takes the items c, c + clusters, ... CTA `rank`
of the cluster's six reads the visible pages rank, rank + 6, ..., so which CTA reads a page, and hence the order of every sum,
depends on the request's own window alone. It computes the scores of up to three pages, one softmax over them, and their part of
the output; a window of more than 18 pages takes several such rounds. A page whose scores are there makes room for values. Then
it sends its part, normalised and with the base-2 lse, to the first four ranks, a quarter of the columns each, and these merge
the six parts and write the row.

Launch. The kernel starts while the one before it on the stream still runs, and waits for it: before everything, or, where the
caller says `early`, before it asks for q and a request's newest page. It lets the next one start after that wait: else, where
both are `early`, the next one's keys would be on their way before this one's values. Before the wait it reads where the page
ids lie, as a guess, for the L2 cache; after it the plan, which alone counts, and the ids at that place together.

Keys on M: S^T = K Q^T and O^T += V^T P^T, as wgmma m64n8k16: the group is padded to 8, and the score of a key sits in the row
that the key occupies.

Warp roles: warpgroup 0 computes; one warp loads, and reads the plan for both; a warp for every two heads of the group merges,
so that the others go on with the next item.

Shared memory: stages of [64, 256], 32 KB. Three, one for each page of a round, for its K and then its V, so that two CTAs fit a
multiprocessor and the next call's loads run beside this one's end; six where the parts of a larger group leave no room for two
CTAs anyway: K and V have each their own. Q, P of a round, four parts to send and six received.

Barriers count threads. full[stage] counts the copies' bytes and the loading warp; empty[stage] the 128 threads that have read
it. q_full and q_empty likewise; with Q the loading warp hands over the item: its tiles, whether another follows. part_full of a
merging CTA counts the bytes of five parts and their five arrivals, and for its own part, which the computing threads write in
place, an arrival of each of them; part_empty, in every CTA, one arrival of each merging warp: the parts are read, so they may
be sent, and what they were sent from overwritten, again; own_read, every merging thread of this CTA, says so of its own part,
which racecheck would not see in an arrival that stands for a warp. Of the last item nobody asks that. A CTA leaves when the
parts that it sent have been read: the cluster meets, a merging warp as soon as it has the last ones.

Keys: one tile is one page, copied from the pool seen as [pool_tiles, 64, KV heads, 256]. The box of the last page starts
64 - last rows early, that of the first page at its first visible row: the copy engine clips, and zeroes, the rows outside the
page, which are neither read nor NaN. `visible[stage]` is the range of the tile's rows that count; it is empty for a page id
outside the pool, whose box lies past the pool's end and reads as zero.
"""

from typing import Any

import tilelang.language as T

from codegen.kernels import common
from codegen.kernels.common import BF16, FP32, INT32, LN2, LOG2E, WARP, WARPGROUP
from codegen.kernels.decode import HEADER_BATCH, REQUEST_WORDS
from codegen.lowered import Request
from codegen.status import BAD_PAGE_ID

PASS_CONFIGS = common.PASS_CONFIGS

FIRST_PAGE, PAGES, LAST_LEN, HIDDEN = range(2, 6)  # words of a request of the plan; csrc/decode_plan.h has the same

CLUSTER = 6  # CTAs of an item
MERGING = 4  # of them merge
ROUND = 3  # pages of a CTA whose scores it computes before one softmax
COLUMNS = 8  # query heads of a group, padded
HELD = WARP // ROUND * ROUND  # page ids that the loading warp holds, whole rounds of them
HANDED_WORDS = 2  # of an item, from the loading warp to the computing ones


def build(request: Request) -> Any:
    """The prim_func.

    Parameters and dynamic extents are those of `tilepress_decode_args` (codegen.abi) and the launch values of
    csrc/sliding_decode.h; `resident_clusters` is the launcher's.
    """
    return kernel(request.head_dim, request.page_size, request.group).with_attr("global_symbol", request.name)


@T.macro
def arrive(barrier, index):
    """Every thread of the warp arrives. An arrival does not tell the compiler that it orders memory; the sync does."""
    T.sync_warp()
    T.barrier_arrive(barrier[index])


@T.macro
def fetch(pool, tile, start, kv_head, ring, stage, full, page_size):
    """One warp's copy of a tile into its stage."""
    T.tma_copy(
        pool[tile, start : start + page_size, kv_head, :],
        ring[stage, :, :],
        barrier=full[stage],
        leader_scope_threads=WARP,
        eviction_policy="evict_first",
    )
    arrive(full, stage)


@T.macro
def wait_once(waited: T.Ref, due):
    """Waits for the kernel before this one where that is due, unless that has been done. Only then may the next one start."""
    if waited == 0 and due:
        T.pdl_sync()
        T.pdl_trigger()
        waited = 1


@T.macro
def ask_once(asked: T.Ref, due, q, row, head, q_s, q_full):
    """One warp's copy of an item's queries where that is due, unless they have been asked for."""
    if asked == 0 and due:
        T.tma_copy(q[row, head : head + COLUMNS, :], q_s[:, :], barrier=q_full[0], leader_scope_threads=WARP)
        arrive(q_full, 0)
        asked = 1


def kernel(head_dim: int, page_size: int, group: int) -> Any:
    """The kernel's prim_func."""
    quarter = head_dim // MERGING
    stages = 3 if group <= 2 else 6  # of 32 KB: two CTAs a multiprocessor, or what one has room for
    mergers = group // 2  # warps, two heads each
    values = stages - ROUND  # the stage of a round's first tile of V, where that of K is 0
    shared = values == 0
    part = group * quarter + COLUMNS  # floats of a part: output columns, then the lse of each head
    q_rows, num_kv_heads, pool_tiles = T.dynamic("q_rows"), T.dynamic("num_kv_heads"), T.dynamic("pool_tiles")
    num_page_ids, max_batch = T.dynamic("num_page_ids"), T.dynamic("max_batch")
    header_words, status_words, lse_rows = T.dynamic("header_words"), T.dynamic("status_words"), T.dynamic("lse_rows")
    heads = num_kv_heads * group
    minus_inf = -T.infinity(FP32)

    @T.prim_func
    def kernel(
        q: T.Tensor([q_rows, heads, head_dim], BF16),
        pool: T.Tensor([pool_tiles, page_size, num_kv_heads, head_dim], BF16),
        page_ids: T.Tensor([num_page_ids], INT32),
        plan_header: T.Tensor([header_words], INT32),
        plan_requests: T.Tensor([max_batch, REQUEST_WORDS], INT32),
        out: T.Tensor([q_rows, heads, head_dim], BF16),
        lse: T.Tensor([lse_rows, heads], FP32),
        status: T.Tensor([status_words], INT32),
        sm_scale: T.float32,
        row_offset: T.int32,
        num_pages: T.int32,
        page_tiles: T.int32,
        layer_tile: T.int32,
        resident_clusters: T.int32,
        early: T.int32,
        want_lse: T.int32,
        want_status: T.int32,
    ):
        with T.Kernel(
            T.min(resident_clusters, max_batch * num_kv_heads) * CLUSTER,
            threads=WARPGROUP + WARP + mergers * WARP,
            cluster_dims=(CLUSTER, 1, 1),
            prelude=common.NEAR,
        ) as cta:
            ring = T.alloc_shared([stages, page_size, head_dim], BF16)
            q_s = T.alloc_shared([COLUMNS, head_dim], BF16)
            p_s = T.alloc_shared([COLUMNS, ROUND * page_size], BF16)
            parts = T.alloc_shared([MERGING + CLUSTER, part], FP32)  # those to send, a merging CTA each; those received
            visible = T.alloc_shared([ROUND, 2], INT32)
            handed = T.alloc_shared([HANDED_WORDS], INT32)
            full = T.alloc_barrier(arrive_count=[WARP] * stages)
            empty = T.alloc_barrier(arrive_count=[WARPGROUP] * stages)
            q_full = T.alloc_barrier(arrive_count=[WARP])
            q_empty = T.alloc_barrier(arrive_count=[WARPGROUP])
            part_full = T.alloc_cluster_barrier([CLUSTER - 1 + WARPGROUP])
            part_empty = T.alloc_cluster_barrier([MERGING * mergers])
            own_read = T.alloc_barrier(arrive_count=[mergers * WARP])
            tx = T.get_thread_binding()
            rank = cta % CLUSTER
            received = MERGING + rank  # where a merging CTA has this one's part
            clusters = T.min(resident_clusters, max_batch * num_kv_heads)
            i = T.alloc_var(INT32)  # items so far
            item = T.alloc_var(INT32)
            items = T.alloc_var(INT32)
            more = T.alloc_var(INT32)
            turns = T.alloc_var(INT32)  # bit t: whether the rounds with a page t so far are odd in number
            i = 0
            turns = 0
            item = cta // CLUSTER
            more = 1
            if tx < WARPGROUP:
                s = [T.alloc_fragment([page_size, COLUMNS], FP32) for _ in range(ROUND)]
                o = T.alloc_fragment([head_dim, COLUMNS], FP32)
                highest = T.alloc_fragment([page_size, COLUMNS], FP32)  # of the scores over the tiles: a row of the tile each
                sums = T.alloc_fragment([page_size, COLUMNS], FP32)  # of P over the tiles, likewise
                partial = T.alloc_fragment([COLUMNS], FP32)  # the round's sums of P
                m = T.alloc_fragment([COLUMNS], FP32)  # maximum of the raw scores
                m_new = T.alloc_fragment([COLUMNS], FP32)
                alpha = T.alloc_fragment([COLUMNS], FP32)
                total = T.alloc_fragment([COLUMNS], FP32)
                scale = sm_scale * LOG2E
                tiles = T.alloc_var(INT32)
                left = T.alloc_var(INT32)
                begin = T.alloc_local([ROUND], INT32)
                end = T.alloc_local([ROUND], INT32)
                while more != 0:
                    T.fill(o, 0)
                    T.fill(total, 0)
                    T.fill(m, minus_inf)
                    T.barrier_wait(q_full[0], i & 1)
                    T.sync_warp()  # the wait does not tell the compiler that it orders memory; this does
                    tiles = handed[0]
                    more = handed[1]
                    for r in T.serial(T.ceildiv(tiles, ROUND)):
                        left = tiles - r * ROUND
                        for t in list(range(ROUND)):
                            begin[t] = page_size
                            end[t] = 0
                        for t in list(range(ROUND)):  # a list: unrolled while tracing, since s is one of Python's
                            if t < left:
                                T.barrier_wait(full[t], 0 if shared else (turns >> t) & 1)
                                T.sync_warp()
                                T.wgmma_gemm(ring[t, :, :], q_s[:, :], s[t], transpose_B=True, clear_accum=True)
                                begin[t] = visible[t, 0]
                                end[t] = visible[t, 1]
                                if t > 0:  # a tile of V may take the place of the one before
                                    T.wait_wgmma(1)
                                    arrive(empty, t - 1)
                        T.wait_wgmma(0)
                        arrive(empty, T.min(left, ROUND) - 1)
                        if left <= ROUND:
                            arrive(q_empty, 0)
                        for t in list(range(ROUND)):
                            if begin[t] > 0 or end[t] < page_size:
                                for a, b in T.Parallel(page_size, COLUMNS):
                                    s[t][a, b] = T.if_then_else(T.And(a >= begin[t], a < end[t]), s[t][a, b], minus_inf)
                        for a, b in T.Parallel(page_size, COLUMNS):
                            highest[a, b] = s[0][a, b]
                        for t in list(range(1, ROUND)):
                            for a, b in T.Parallel(page_size, COLUMNS):
                                highest[a, b] = T.max(highest[a, b], s[t][a, b])
                        # Two columns at once. It also keeps this reduction's workspace unlike the sum's in size: of two equal
                        # ones, TileLang places either first, and two builds would differ.
                        T.reduce_max(highest, m_new, dim=0, clear=True, batch=2)
                        common.move_maximum(m, m_new, alpha, COLUMNS, scale)
                        for t in list(range(ROUND)):
                            for a, b in T.Parallel(page_size, COLUMNS):
                                s[t][a, b] = T.exp2(s[t][a, b] * scale - m_new[b])
                            for a, b in T.Parallel(page_size, COLUMNS):
                                p_s[b, t * page_size + a] = s[t][a, b]
                        T.fence_proxy_async()
                        for a, b in T.Parallel(page_size, COLUMNS):
                            sums[a, b] = s[0][a, b]
                        for t in list(range(1, ROUND)):
                            for a, b in T.Parallel(page_size, COLUMNS):
                                sums[a, b] = sums[a, b] + s[t][a, b]
                        for d, b in T.Parallel(head_dim, COLUMNS):
                            o[d, b] *= alpha[b]
                        T.sync_threads(3, WARPGROUP)
                        T.reduce_sum(sums, partial, dim=0, clear=True)
                        for b in T.Parallel(COLUMNS):
                            total[b] = total[b] * alpha[b] + partial[b]
                        for t in list(range(ROUND)):
                            if t < left:
                                T.barrier_wait(full[values + t], 1 if shared else (turns >> t) & 1)
                                T.wgmma_gemm(
                                    ring[values + t, :, :],
                                    p_s[:, t * page_size : (t + 1) * page_size],
                                    o,
                                    transpose_A=True,
                                    transpose_B=True,
                                )
                        T.wait_wgmma(0)
                        for t in list(range(ROUND)):
                            if t < left:
                                arrive(empty, values + t)
                        turns = turns ^ ((1 << T.min(left, ROUND)) - 1)
                    if tiles <= 0:
                        arrive(q_empty, 0)
                    T.barrier_wait(part_empty[0], (i & 1) ^ 1)
                    if rank < MERGING:
                        T.barrier_wait(own_read[0], (i & 1) ^ 1)
                    T.sync_warp()
                    for d, b in T.Parallel(head_dim, COLUMNS):
                        if b < group:
                            parts[T.if_then_else(d // quarter == rank, received, d // quarter), b * quarter + d % quarter] = (
                                T.if_then_else(total[b] == 0, 0.0, o[d, b] / total[b])
                            )
                    for b in T.Parallel(COLUMNS):
                        for k in T.unroll(MERGING):
                            parts[T.if_then_else(k == rank, received, k), group * quarter + b] = T.if_then_else(
                                total[b] == 0, minus_inf, m[b] * scale + T.log2(total[b])
                            )
                    T.fence_proxy_async()
                    T.sync_threads(3, WARPGROUP)
                    if tiles >= 0:
                        for k in list(range(MERGING)):  # a warp each
                            if tx >= k * WARP and tx < (k + 1) * WARP:
                                if k != rank:
                                    T.copy_cluster(parts[k, :], parts[received, :], dst_block=k, remote_barrier=part_full[0])
                        if rank < MERGING:  # its own part lies where it is merged
                            arrive(part_full, 0)
                    i = i + 1
                T.cluster_arrive_relaxed()
                T.cluster_wait()
            elif tx < WARPGROUP + WARP:
                lane = tx - WARPGROUP
                words = T.alloc_local([REQUEST_WORDS], INT32)
                waited = T.alloc_var(INT32)
                request = T.alloc_var(INT32)
                kv_head = T.alloc_var(INT32)
                first = T.alloc_var(INT32)  # of this CTA, in the page ids
                pages = T.alloc_var(INT32)
                last_len = T.alloc_var(INT32)
                older = T.alloc_var(INT32)  # keys of the first page that the window has left behind
                mine = T.alloc_var(INT32)  # pages of this CTA
                here = T.alloc_var(INT32)  # of those in this round
                at = T.alloc_var(INT32)
                page = T.alloc_var(INT32)
                tile = T.alloc_local([ROUND], INT32)
                start = T.alloc_local([ROUND], INT32)
                begin = T.alloc_local([ROUND], INT32)
                end = T.alloc_local([ROUND], INT32)
                ids = T.alloc_var(INT32)  # this lane's of HELD page ids of the CTA
                held = T.alloc_var(INT32)  # which HELD those are
                guess = T.alloc_var(INT32)  # of `first`, until the plan may be believed
                asked = T.alloc_var(INT32)  # whether q has been asked for
                waited = 0
                request = item // num_kv_heads
                if early != 0:
                    guess = -1
                else:
                    # What the plan says before the wait may be out of date. It says what to bring near, and which page ids to
                    # read together with the plan: they count if the plan then says the same.
                    guess = common.glance(plan_requests[T.min(request, max_batch - 1), FIRST_PAGE])
                    guess = T.max(T.min(guess, num_page_ids), 0) + rank
                    common.prefetch_line(plan_header[HEADER_BATCH])
                    if lane < ROUND and guess + lane * CLUSTER < num_page_ids:
                        common.prefetch_line(page_ids[guess + lane * CLUSTER])
                    T.pdl_sync()
                    T.pdl_trigger()
                    waited = 1
                    ids = -1
                    if guess + lane * CLUSTER < num_page_ids:
                        ids = page_ids[guess + lane * CLUSTER]
                while more != 0:
                    items = T.min(plan_header[HEADER_BATCH], max_batch) * num_kv_heads
                    for v in T.vectorized(REQUEST_WORDS // 2):
                        words[v] = plan_requests[T.min(request, max_batch - 1), v]
                    for v in T.vectorized(REQUEST_WORDS // 2):
                        words[REQUEST_WORDS // 2 + v] = plan_requests[T.min(request, max_batch - 1), REQUEST_WORDS // 2 + v]
                    kv_head = item - request * num_kv_heads
                    pages = T.max(words[PAGES], 0)
                    last_len = T.max(T.min(words[LAST_LEN], page_size), 1)
                    older = T.max(T.min(words[HIDDEN], page_size), 0)
                    first = words[FIRST_PAGE] + rank
                    mine = T.max(pages - rank + CLUSTER - 1, 0) // CLUSTER
                    if item >= items:
                        mine = -1
                    more = T.if_then_else(item + clusters < items, 1, 0)
                    asked = 0
                    held = T.if_then_else(T.And(guess >= 0, first == guess), 0, -1)
                    guess = -1
                    T.barrier_wait(q_empty[0], (i & 1) ^ 1)
                    if lane == 0:
                        handed[0] = mine
                        handed[1] = more
                    T.sync_warp()
                    for r in T.serial(T.ceildiv(T.max(mine, 1), ROUND)):
                        here = T.min(mine - r * ROUND, ROUND)
                        if r * ROUND // HELD != held:
                            held = r * ROUND // HELD
                            ids = -1
                            at = first + (held * HELD + lane) * CLUSTER
                            if at >= 0 and at < num_page_ids:
                                ids = page_ids[at]
                        ask_once(asked, waited != 0, q, request + row_offset, kv_head * group, q_s, q_full)
                        # Where the round's pages lie, all at once: between the copies it would hold them up.
                        for t in list(range(ROUND)):
                            at = rank + (r * ROUND + t) * CLUSTER
                            page = T.shfl_sync(ids, (r * ROUND + t) % HELD)
                            tile[t] = page * page_tiles + layer_tile
                            # Rows of the page from `start` on lie in the tile; those of them in [begin, end) count.
                            start[t] = T.if_then_else(at == 0, older, 0)
                            begin[t] = 0
                            end[t] = page_size - start[t]
                            if at == pages - 1:
                                begin[t] = page_size - last_len + start[t]
                                end[t] = page_size
                                start[t] = last_len - page_size
                            if page < 0 or page >= num_pages:
                                tile[t] = pool_tiles
                                begin[t] = page_size
                                if t < here and want_status != 0 and lane == 0:
                                    T.atomic_or(status[0], BAD_PAGE_ID)
                        for t in list(range(ROUND)):
                            if t < here:
                                wait_once(waited, rank + (r * ROUND + t) * CLUSTER == pages - 1)
                                T.barrier_wait(empty[t], (0 if shared else (turns >> t) & 1) ^ 1)
                                if lane == 0:
                                    visible[t, 0] = begin[t]
                                    visible[t, 1] = end[t]
                                T.sync_warp()
                                fetch(pool, tile[t], start[t], kv_head, ring, t, full, page_size)
                        if shared:  # V finds room where K has met q
                            wait_once(waited, True)
                        ask_once(asked, waited != 0, q, request + row_offset, kv_head * group, q_s, q_full)
                        for t in list(range(ROUND)):
                            if t < here:
                                T.barrier_wait(empty[values + t], (1 if shared else (turns >> t) & 1) ^ 1)
                                fetch(pool, tile[t] + 1, start[t], kv_head, ring, values + t, full, page_size)
                        if not shared:
                            wait_once(waited, True)
                            ask_once(asked, True, q, request + row_offset, kv_head * group, q_s, q_full)
                        turns = turns ^ ((1 << T.max(here, 0)) - 1)
                    item = item + clusters
                    request = item // num_kv_heads
                    i = i + 1
                T.cluster_arrive_relaxed()
                T.cluster_wait()
            else:
                lane = tx % WARP
                merger = (tx - WARPGROUP - WARP) // WARP
                highest_lse = T.alloc_var(FP32)
                weight = T.alloc_var(FP32)
                whole = T.alloc_var(FP32)
                acc = T.alloc_local([quarter // WARP], FP32)
                row = T.alloc_var(INT32)
                kv_head = T.alloc_var(INT32)
                T.pdl_sync()
                items = T.min(plan_header[HEADER_BATCH], max_batch) * num_kv_heads
                if item >= items or rank >= MERGING:
                    T.cluster_arrive_relaxed()
                while item < items and rank < MERGING:
                    row = item // num_kv_heads + row_offset
                    kv_head = item % num_kv_heads
                    T.barrier_wait(part_full[0], i & 1)
                    T.sync_warp()
                    if item + clusters >= items:
                        T.cluster_arrive_relaxed()
                    for turn in T.unroll(group // mergers):
                        h = turn * mergers + merger
                        highest_lse = minus_inf
                        for k in T.unroll(CLUSTER):
                            highest_lse = T.max(highest_lse, parts[MERGING + k, group * quarter + h])
                        if highest_lse == minus_inf:
                            highest_lse = 0  # no part has seen a key, and every weight is 0; or a query is NaN, and so are they
                        whole = 0
                        for v in T.unroll(quarter // WARP):
                            acc[v] = 0
                        for k in T.unroll(CLUSTER):
                            weight = T.exp2(parts[MERGING + k, group * quarter + h] - highest_lse)
                            whole = whole + weight
                            for v in T.unroll(quarter // WARP):
                                acc[v] = acc[v] + weight * parts[MERGING + k, h * quarter + v * WARP + lane]
                        if row >= 0 and row < q_rows:
                            for v in T.unroll(quarter // WARP):
                                out[row, kv_head * group + h, rank * quarter + v * WARP + lane] = T.if_then_else(
                                    whole == 0, 0.0, acc[v] / whole
                                )
                            if want_lse != 0 and rank == 0 and lane == 0:
                                lse[row, kv_head * group + h] = T.if_then_else(
                                    whole == 0, minus_inf, (highest_lse + T.log2(whole)) * LN2
                                )
                    if item + clusters < items:  # nobody waits for the last
                        arrive(own_read, 0)
                        if lane < CLUSTER:
                            T.mbarrier_arrive(part_empty[0], lane)
                    item = item + clusters
                    i = i + 1
                T.cluster_wait()

    return kernel
