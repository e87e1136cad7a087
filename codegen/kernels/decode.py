"""Split-KV decode over a paged KV pool: one query row a request, all keys or a window. Two kernels: partials, then a merge.

partial: CTA c walks a list of the plan's items: item c, which is empty where the CTA has nothing to do, then from each item to
the one that it names as next. An item is a run of pages of one request and one KV head; its result is, for every query head of
the group, the maximum of the scores in base 2, the sum of their weights 2^(score - maximum), and the weighed values. merge:
combines a row's partials. Which run an item is depends on its request's length alone, so a request's bits do not depend on the
batch.

Chains: CHAIN runs, one behind another, are combined first, in their order, and then the chains. Where the plan has one CTA take
a whole chain, that CTA combines it and writes one partial; where it spreads the runs, the merge does, with the same operations
on the same numbers, none of which a compiler may contract. So a batch, which has more runs than it has CTAs for, moves fewer
partials, and the bits are the same.

Both are launched while the kernel before them on the stream still runs, and wait for it before they use what is in memory; the
plan's first item and its page ids come near before that. Where the caller says `early`, the partial kernel's loading warp fills
the ring before it waits, but for a request's newest page. The partial kernel lets the merge start after its own wait, so that
the merge may read the plan before it waits for the partials; the merge lets the next one start at once. What waits for the
merge waits for all that came before it too, since the merge ends after its own wait.

Keys on M: S^T = K Q^T and O^T += V^T P^T, as wgmma m64nNk16 with N the group (8 at least): the group pads nothing, and the
score of a key sits in the row that the key occupies.

Warp roles, 160 threads: warpgroup 0 computes; one warp loads, and reads the plan for both.

Shared memory: a ring of tiles. Split: 192 KB of [64, head_dim], K and V by turns, V a page behind: when an item's last V comes,
its weights are there. Folded: two stages of [64, 640], one tile serving both products, 160 KB. Q of two items where that fits,
else of one. Two P tiles, so that a tile's P is written while the last one's is still to be read.

Barriers: full[stage] counts the copies' bytes and the loading warp; empty[stage] the 128 threads that have read it. q_full
and q_empty likewise, by item parity; with Q the loading warp hands over the item: its tiles, its slot, whether another follows.

Keys: one tile is one page, copied from the pool seen as [pool_tiles, 64, KV heads, row width]. The last page's box starts
64 - last rows early, so that the copy engine clips, and zeroes, what lies before it: key k of that page is row k + 64 - last,
and nothing past the length is read. `hidden[stage]` is how many leading rows of the tile are to be masked: those, the keys
that a window has left behind, or all 64 for a page id outside the pool, whose box lies past the pool's end and reads as zero.

Folded rows are [K_rot 128 | V 512]; the score operand is V with columns [0, 64) and [256, 320) taken from K_rot.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from codegen.formats import FORMATS, ROTATED
from codegen.kernels import common
from codegen.kernels.common import BF16, FP32, INT32, LN2, LOG2E, WARP, WARPGROUP
from codegen.lowered import Request
from codegen.status import BAD_PAGE_ID

PASS_CONFIGS = common.PASS_CONFIGS

# Words of an item of the plan, and of a request, and where the header holds the batch; csrc/decode_plan.h has the same.
ITEM_WORDS = 8
REQUEST, KV_HEAD, FIRST_PAGE, TILES, SLOT, LAST_LEN, HIDDEN, NEXT = range(8)
CARRIED = -2  # as a slot: the partial is carried into the CTA's next item, the next run of the chain
FIRST_SLOT, SPLITS, SEEN_FROM, SEEN_PAGES = range(4)  # what a row sees: so many pages, from that place in the page ids on
CHAINED = 6  # partials of the request that the merge combines as a chain: CHAIN, or 1 where a CTA has done so
REQUEST_WORDS = 8
HEADER_BATCH = 1
HANDED_WORDS = 4  # of an item, from the loading warp to the computing ones; the last pads
CHAIN = 5  # runs; csrc/decode_plan.h has the same
MAXIMUM, TOTAL = range(2)  # of a partial's scores and of their weights
SUMS = 2


def build(request: Request) -> Any:
    """The prim_func of one of the two kernels.

    Parameters and dynamic extents are those of `tilepress_decode_args` (codegen.abi) and the launch values of csrc/decode.h.
    """
    if request.stage == "partial":
        kernel = partial(request.head_dim, request.page_size, request.group, request.page_format)
    elif request.stage == "merge":
        kernel = merge(request.head_dim)
    else:
        raise ValueError(f"{request.name}: decode has no stage {request.stage!r}; known: partial, merge")
    return kernel.with_attr("global_symbol", request.name)


@dataclass(frozen=True)
class Ring:
    """Stages of tiles, [stages, 64, row width], and the barriers that say that one is full, and empty again."""

    tiles: Any
    full: Any
    empty: Any
    stages: int


@T.macro
def fetch(source, target, full, stage, follows):
    """A tile into its stage. A CTA's last item, often its only one, leaves the L2 cache to others. Where more follow, that
    costs a batch 3% of its time."""
    if follows != 0:
        T.tma_copy(source, target, barrier=full[stage])
    else:
        T.tma_copy(source, target, barrier=full[stage], eviction_policy="evict_first")
    T.barrier_arrive(full[stage])


@T.macro
def fetch_values(pool, tile, start, kv_head, page_size, ring, filled: T.Ref, follows):
    """As soon as the next stage is free."""
    T.barrier_wait(ring.empty[filled % ring.stages], ((filled // ring.stages) & 1) ^ 1)
    fetch(
        pool[tile, start : start + page_size, kv_head, :],
        ring.tiles[filled % ring.stages, :, :],
        ring.full,
        filled % ring.stages,
        follows,
    )
    filled = filled + 1


@T.macro
def ask_once(asked: T.Ref, due, waited: T.Ref, q, row, heads_from, columns, q_s, buffer, q_full):
    """Once what an item needs of the kernel before this one is due, waits for that kernel, if nothing has yet, and asks for the
    item's queries, if nothing has."""
    if asked == 0 and due:
        if waited == 0:
            T.pdl_sync()
            waited = 1
        T.tma_copy(q[row, heads_from : heads_from + columns, :], q_s[buffer, :, :], barrier=q_full[buffer])
        T.barrier_arrive(q_full[buffer])
        asked = 1


@T.macro
def score(ring, stage, q_s, buffer, s, chunks):
    """S^T = K Q^T. chunks: (columns of Q from, to, column of the tile from), whose products add up to the scores."""
    for chunk, (q_from, q_to, k_from) in enumerate(chunks):
        T.wgmma_gemm(
            ring[stage, :, k_from : k_from + q_to - q_from],
            q_s[buffer, :, q_from:q_to],
            s,
            transpose_B=True,
            clear_accum=chunk == 0,
        )
    T.wait_wgmma(0)


@T.macro
def weigh(s, mask, m, m_new, alpha, sums, p_s, buffer, scale, page_size, columns):
    """A tile's scores to weights: P into p_s[buffer], the weights into their sums, and into alpha what the values so far are to
    be multiplied by. Keys below `mask` do not count."""
    if mask > 0:
        for a, b in T.Parallel(page_size, columns):
            s[a, b] = T.if_then_else(a >= mask, s[a, b], -T.infinity(FP32))
    # All of a thread's columns at once. It also keeps this reduction's workspace unlike the sum's in size: of two equal ones,
    # TileLang places either first, and two builds would differ.
    T.reduce_max(s, m_new, dim=0, clear=True, batch=columns // 4)
    common.move_maximum(m, m_new, alpha, columns, scale)
    for a, b in T.Parallel(page_size, columns):
        s[a, b] = T.exp2(s[a, b] * scale - m_new[b])
    for a, b in T.Parallel(page_size, columns):
        p_s[buffer, b, a] = s[a, b]
    T.fence_proxy_async()
    for a, b in T.Parallel(page_size, columns):
        sums[a, b] = sums[a, b] * alpha[b] + s[a, b]


@T.macro
def add_values(values, p, o):
    """O^T += V^T P^T."""
    T.wgmma_gemm(values, p, o, transpose_A=True, transpose_B=True)
    T.wait_wgmma(0)


@T.macro
def take_values(ring, used: T.Ref, p_s, buffer, o):
    """The product with a tile of V, as soon as it is there."""
    stage = T.alloc_var(INT32)
    weights = T.alloc_var(INT32)
    stage = common.uniform(used % ring.stages)
    weights = common.uniform(buffer)
    T.barrier_wait(ring.full[stage], (used // ring.stages) & 1)
    add_values(ring.tiles[stage, :, :], p_s[weights, :, :], o)
    T.barrier_arrive(ring.empty[stage])
    used = used + 1


def partial(head_dim: int, page_size: int, group: int, page_format: str) -> Any:
    """The partial kernel's prim_func."""
    folded = page_format == "folded"
    value_at = FORMATS[page_format].extra_columns
    width = head_dim + value_at
    stages = 2 if folded else 3 * 512 // head_dim  # 160 or 192 KB
    columns = max(8, group)
    q_stages = 1 if columns * head_dim > 4096 and not folded else 2  # what the ring leaves room for
    half = head_dim // 2
    q_rows, num_kv_heads, pool_tiles = T.dynamic("q_rows"), T.dynamic("num_kv_heads"), T.dynamic("pool_tiles")
    num_page_ids, max_slots = T.dynamic("num_page_ids"), T.dynamic("max_slots")
    max_batch, max_items, status_words = T.dynamic("max_batch"), T.dynamic("max_items"), T.dynamic("status_words")
    heads = num_kv_heads * group
    minus_inf = -T.infinity(FP32)
    # (columns of Q, columns of the tile) whose products add up to the scores.
    score_chunks = [(0, head_dim, 0)]
    if folded:
        score_chunks = [
            (0, ROTATED, 0),
            (ROTATED, half, value_at + ROTATED),
            (half, half + ROTATED, ROTATED),
            (half + ROTATED, head_dim, value_at + half + ROTATED),
        ]

    @T.prim_func
    def kernel(
        q: T.Tensor([q_rows, heads, head_dim], BF16),
        pool: T.Tensor([pool_tiles, page_size, num_kv_heads, width], BF16),
        page_ids: T.Tensor([num_page_ids], INT32),
        plan_requests: T.Tensor([max_batch, REQUEST_WORDS], INT32),
        plan_items: T.Tensor([max_items, ITEM_WORDS], INT32),
        partial_out: T.Tensor([max_slots, group, head_dim], FP32),
        partial_sums: T.Tensor([max_slots, group, SUMS], FP32),
        status: T.Tensor([status_words], INT32),
        sm_scale: T.float32,
        row_offset: T.int32,
        num_pages: T.int32,
        page_tiles: T.int32,
        layer_tile: T.int32,
        ctas: T.int32,
        early: T.int32,
        want_status: T.int32,
    ):
        with T.Kernel(ctas, threads=WARPGROUP + WARP, prelude=common.NEAR) as cta:
            ring = T.alloc_shared([stages, page_size, width], BF16)
            q_s = T.alloc_shared([q_stages, columns, head_dim], BF16)
            p_s = T.alloc_shared([2, columns, page_size], BF16)
            hidden = T.alloc_shared([stages], INT32)
            handed = T.alloc_shared([q_stages, HANDED_WORDS], INT32)
            full = T.alloc_barrier(arrive_count=[WARP] * stages)
            empty = T.alloc_barrier(arrive_count=[WARPGROUP] * stages)
            ring_parts = Ring(ring, full, empty, stages)
            q_full = T.alloc_barrier(arrive_count=[WARP] * q_stages)
            q_empty = T.alloc_barrier(arrive_count=[WARPGROUP] * q_stages)
            tx = T.get_thread_binding()
            i = T.alloc_var(INT32)  # items so far
            tiles = T.alloc_var(INT32)
            slot = T.alloc_var(INT32)
            follows = T.alloc_var(INT32)
            mask = T.alloc_var(INT32)
            guess = T.alloc_var(INT32)  # this lane's page id of the first item, by its place; the plan may not be believed yet
            guess = -1
            if tx >= WARPGROUP and early == 0:  # brings the first item and its page ids near; they count after the wait
                guess = T.max(T.min(common.glance(plan_items[cta, FIRST_PAGE]), num_page_ids - 1), 0) + tx - WARPGROUP
                if guess < num_page_ids:
                    common.prefetch_line(page_ids[guess])
            if tx < WARPGROUP or early == 0:
                T.pdl_sync()
                T.pdl_trigger()
            i = 0
            follows = 1
            if tx < WARPGROUP:
                s = T.alloc_fragment([page_size, columns], FP32)
                o = T.alloc_fragment([head_dim, columns], FP32)
                sums = T.alloc_fragment([page_size, columns], FP32)  # of P over the tiles: a row of the tile each
                m = T.alloc_fragment([columns], FP32)  # maximum of the raw scores
                m_new = T.alloc_fragment([columns], FP32)
                alpha = T.alloc_fragment([columns], FP32)
                total = T.alloc_fragment([columns], FP32)
                chain = T.alloc_fragment([head_dim, columns], FP32)  # the runs of a chain so far, as the merge has them
                chain_max = T.alloc_fragment([columns], FP32)
                chain_total = T.alloc_fragment([columns], FP32)
                scale = sm_scale * LOG2E
                used = T.alloc_var(INT32)  # stages consumed so far
                stage = T.alloc_var(INT32)
                buffer = T.alloc_var(INT32)  # of Q
                weights = T.alloc_var(INT32)  # which tile of P
                carried = T.alloc_var(INT32)  # whether a chain has begun
                used = 0
                carried = 0
                while follows != 0:
                    T.fill(o, 0)
                    T.fill(sums, 0)
                    T.fill(m, minus_inf)
                    buffer = common.uniform(i % q_stages)
                    T.barrier_wait(q_full[buffer], (i // q_stages) & 1)
                    T.sync_warp()  # the wait does not tell the compiler that it orders memory; this does
                    tiles = handed[buffer, 0]
                    slot = handed[buffer, 1]
                    follows = handed[buffer, 2]
                    if folded:
                        for t in T.serial(tiles):
                            stage = common.uniform(used % stages)
                            weights = common.uniform(t % 2)
                            T.barrier_wait(full[stage], (used // stages) & 1)
                            T.sync_warp()
                            mask = hidden[stage]
                            score(ring, stage, q_s, buffer, s, score_chunks)
                            weigh(s, mask, m, m_new, alpha, sums, p_s, weights, scale, page_size, columns)
                            for d, b in T.Parallel(head_dim, columns):
                                o[d, b] *= alpha[b]
                            T.sync_threads(3, WARPGROUP)
                            add_values(ring[stage, :, value_at : value_at + head_dim], p_s[weights, :, :], o)
                            T.barrier_arrive(empty[stage])
                            used = used + 1
                    else:
                        for t in T.serial(tiles):
                            stage = common.uniform(used % stages)
                            T.barrier_wait(full[stage], (used // stages) & 1)
                            T.sync_warp()
                            mask = hidden[stage]
                            score(ring, stage, q_s, buffer, s, score_chunks)
                            T.barrier_arrive(empty[stage])
                            used = used + 1
                            weigh(s, mask, m, m_new, alpha, sums, p_s, t % 2, scale, page_size, columns)
                            T.sync_threads(3, WARPGROUP)
                            if t > 0:
                                take_values(ring_parts, used, p_s, (t - 1) % 2, o)
                            for d, b in T.Parallel(head_dim, columns):
                                o[d, b] *= alpha[b]
                    T.barrier_arrive(q_empty[buffer])
                    T.reduce_sum(sums, total, dim=0, clear=True)
                    if not folded and tiles > 0:
                        take_values(ring_parts, used, p_s, (tiles - 1) % 2, o)
                    for b in T.Parallel(columns):
                        m[b] *= scale
                    if carried != 0 or slot == CARRIED:
                        if carried == 0:
                            T.fill(chain, 0)
                            T.fill(chain_max, minus_inf)
                            T.fill(chain_total, 0)
                        for b in T.Parallel(columns):
                            m_new[b] = T.max(chain_max[b], m[b])
                        for b in T.Parallel(columns):
                            alpha[b] = T.exp2(chain_max[b] - T.if_then_else(m_new[b] == minus_inf, 0.0, m_new[b]))
                        for b in T.Parallel(columns):
                            m[b] = T.exp2(m[b] - T.if_then_else(m_new[b] == minus_inf, 0.0, m_new[b]))
                        for b in T.Parallel(columns):
                            chain_max[b] = m_new[b]
                        for b in T.Parallel(columns):
                            chain_total[b] = T.ieee_fmaf(m[b], total[b], T.ieee_mul(chain_total[b], alpha[b]))
                        for d, b in T.Parallel(head_dim, columns):
                            chain[d, b] = T.ieee_fmaf(m[b], o[d, b], T.ieee_mul(chain[d, b], alpha[b]))
                        carried = 1
                        if slot != CARRIED:
                            carried = 0
                            T.copy(chain, o)
                            T.copy(chain_max, m)
                            T.copy(chain_total, total)
                    if slot >= 0 and slot < max_slots:
                        for d, b in T.Parallel(head_dim, columns):
                            if b < group:
                                partial_out[slot, b, d] = o[d, b]
                        for b in T.Parallel(columns):
                            if b < group:
                                partial_sums[slot, b, MAXIMUM] = m[b]
                                partial_sums[slot, b, TOTAL] = total[b]
                    i = i + 1
            else:
                lane = tx - WARPGROUP
                words = T.alloc_local([ITEM_WORDS], INT32)
                filled = T.alloc_var(INT32)  # stages filled so far
                item = T.alloc_var(INT32)
                row = T.alloc_var(INT32)
                kv_head = T.alloc_var(INT32)
                first = T.alloc_var(INT32)
                last_len = T.alloc_var(INT32)
                older = T.alloc_var(INT32)  # keys of the item's first page that the window has left behind
                page = T.alloc_var(INT32)
                tile = T.alloc_var(INT32)
                start = T.alloc_var(INT32)
                values_tile = T.alloc_var(INT32)  # of the page before
                values_start = T.alloc_var(INT32)
                ids = T.alloc_var(INT32)  # this lane's of the next 32 page ids
                request = T.alloc_var(INT32)
                newest = T.alloc_var(INT32)  # tile of the item that holds a token of the kernel before this one
                waited = T.alloc_var(INT32)
                asked = T.alloc_var(INT32)  # whether q has been asked for
                filled = 0
                item = cta
                waited = 1 - early
                ids = -1
                if guess >= 0 and guess < num_page_ids:  # read together with the item, and right if it says the same place
                    ids = page_ids[guess]
                while follows != 0:
                    for v in T.vectorized(ITEM_WORDS // 2):
                        words[v] = plan_items[item, v]
                    for v in T.vectorized(ITEM_WORDS // 2):
                        words[ITEM_WORDS // 2 + v] = plan_items[item, ITEM_WORDS // 2 + v]
                    row = words[REQUEST] + row_offset
                    kv_head = words[KV_HEAD]
                    first = words[FIRST_PAGE]
                    tiles = T.max(words[TILES], 0)
                    slot = words[SLOT]
                    last_len = T.max(T.min(words[LAST_LEN], page_size), 1)
                    older = T.max(T.min(words[HIDDEN], page_size), 0)
                    follows = T.if_then_else(T.And(words[NEXT] > item, words[NEXT] < max_items), 1, 0)  # so it ends
                    item = words[NEXT]
                    if first + lane != guess:
                        ids = -1
                        if first + lane >= 0 and first + lane < num_page_ids:
                            ids = page_ids[first + lane]
                    guess = -1
                    T.barrier_wait(q_empty[i % q_stages], ((i // q_stages) & 1) ^ 1)
                    if lane == 0:
                        handed[i % q_stages, 0] = tiles
                        handed[i % q_stages, 1] = slot
                        handed[i % q_stages, 2] = follows
                    T.sync_warp()
                    asked = 0
                    newest = -1
                    if waited == 0:
                        request = T.max(T.min(words[REQUEST], max_batch - 1), 0)
                        newest = plan_requests[request, SEEN_FROM] + plan_requests[request, SEEN_PAGES] - 1 - first
                    for t in T.serial(tiles):
                        if t > 0 and t % WARP == 0:
                            ids = -1
                            if first + t + lane >= 0 and first + t + lane < num_page_ids:
                                ids = page_ids[first + t + lane]
                        page = T.shfl_sync(ids, t % WARP)
                        tile = page * page_tiles + layer_tile
                        start = T.if_then_else(t == tiles - 1, last_len - page_size, 0)
                        mask = T.if_then_else(t == 0, older, 0) - start
                        if page < 0 or page >= num_pages:
                            tile = pool_tiles
                            mask = page_size
                            if want_status != 0 and lane == 0:
                                T.atomic_or(status[0], BAD_PAGE_ID)
                        if waited == 0:
                            # Past what the ring holds, a stage is free when q has met the keys in it.
                            due = T.Or(filled + (0 if folded else T.min(t, 1)) >= stages, t == newest)
                            ask_once(asked, due, waited, q, row, kv_head * group, columns, q_s, i % q_stages, q_full)
                        T.barrier_wait(empty[filled % stages], ((filled // stages) & 1) ^ 1)
                        if lane == 0:
                            hidden[filled % stages] = mask
                        T.sync_warp()
                        fetch(
                            pool[tile, start : start + page_size, kv_head, :],
                            ring[filled % stages, :, :],
                            full,
                            filled % stages,
                            follows,
                        )
                        filled = filled + 1
                        # Behind the first page, which the item waits for longest.
                        ask_once(asked, waited != 0, waited, q, row, kv_head * group, columns, q_s, i % q_stages, q_full)
                        if not folded:
                            if t > 0:
                                fetch_values(pool, values_tile, values_start, kv_head, page_size, ring_parts, filled, follows)
                            values_tile = tile + 1
                            values_start = start
                    ask_once(asked, True, waited, q, row, kv_head * group, columns, q_s, i % q_stages, q_full)
                    if not folded and tiles > 0:
                        fetch_values(pool, values_tile, values_start, kv_head, page_size, ring_parts, filled, follows)
                    i = i + 1

    return kernel


MERGE_THREADS = 256
VECTOR = 4  # output columns a thread
FEW_LANES = 8  # of 32 threads, and so of 128 columns
MANY_LANES = 32  # of 8 threads


@T.macro
def place(rows, at, first, splits, group, in_group):
    """Where the partials of the chain that begins with partial `at` lie, as rows of one head: fewer than 2^31, since a plan has
    2^24 slots at most. Past the last one: the last."""
    for u in T.unroll(CHAIN):
        rows[u] = (first + T.min(at + u, splits - 1)) * group + in_group


@T.macro
def add(m: T.Ref, total: T.Ref, acc, other_max, other_total, other, at):
    """Adds a partial to a running sum of them: maximum, total of the weights, weighed values. Every operation is spelled out,
    as where the partial kernel combines a chain."""
    m_new = T.alloc_var(FP32)
    base = T.alloc_var(FP32)
    decay = T.alloc_var(FP32)
    weight = T.alloc_var(FP32)
    m_new = T.max(m, other_max)
    base = T.if_then_else(m_new == -T.infinity(FP32), 0.0, m_new)  # no key so far: every weight is 0
    decay = T.exp2(m - base)
    weight = T.exp2(other_max - base)
    m = m_new
    total = T.ieee_fmaf(weight, other_total, T.ieee_mul(total, decay))
    for v in T.unroll(VECTOR):
        acc[0, v] = T.ieee_fmaf(weight, other[at, v], T.ieee_mul(acc[0, v], decay))


def merge(head_dim: int) -> Any:
    """The merge kernel's prim_func: a row's partials into its output.

    A CTA merges one of `merge_blocks` blocks of a query head's columns, of one request. Its threads are lanes, 8 or 32, as the
    number of blocks leaves each thread four columns. Lane l takes the chains l, l + lanes, ..., reading one chain's partials at
    once; then the lanes are added in order. That order depends on the number of partials and of lanes alone. A request without
    partials, or whose partials saw no key, gives zeros and lse = -inf.
    """
    q_rows, num_q_heads, partial_rows = T.dynamic("q_rows"), T.dynamic("num_q_heads"), T.dynamic("partial_rows")
    header_words, max_batch, lse_rows = T.dynamic("header_words"), T.dynamic("max_batch"), T.dynamic("lse_rows")
    minus_inf = -T.infinity(FP32)

    @T.prim_func
    def kernel(
        plan_header: T.Tensor([header_words], INT32),
        plan_requests: T.Tensor([max_batch, REQUEST_WORDS], INT32),
        partial_out: T.Tensor([partial_rows, head_dim // VECTOR, VECTOR], FP32),
        partial_sums: T.Tensor([partial_rows, SUMS], FP32),
        out: T.Tensor([q_rows, num_q_heads, head_dim], BF16),
        lse: T.Tensor([lse_rows, num_q_heads], FP32),
        num_kv_heads: T.int32,
        group: T.int32,
        max_slots: T.int32,
        row_offset: T.int32,
        merge_blocks: T.int32,
        want_lse: T.int32,
    ):
        with T.Kernel(group * merge_blocks, num_kv_heads, max_batch, threads=MERGE_THREADS) as (group_block, kv_head, request):
            T.annotate_min_blocks_per_sm(4)  # they wait beside the partial kernel's CTAs, and start as one wave
            sums = T.alloc_shared([MERGE_THREADS, VECTOR], FP32)  # a thread each: [lanes, threads of a lane]
            totals = T.alloc_shared([MANY_LANES], FP32)
            maxima = T.alloc_shared([MANY_LANES], FP32)
            acc = T.alloc_local([1, VECTOR], FP32)
            chain = T.alloc_local([1, VECTOR], FP32)
            read = T.alloc_local([CHAIN, VECTOR], FP32)
            read_sums = T.alloc_local([CHAIN, SUMS], FP32)
            rows = T.alloc_local([CHAIN], INT32)
            m = T.alloc_var(FP32)
            total = T.alloc_var(FP32)
            chain_max = T.alloc_var(FP32)
            chain_total = T.alloc_var(FP32)
            base = T.alloc_var(FP32)
            weight = T.alloc_var(FP32)
            factor = T.alloc_var(FP32)
            value = T.alloc_var(FP32)
            batch = T.alloc_var(INT32)
            first = T.alloc_var(INT32)
            splits = T.alloc_var(INT32)
            chained = T.alloc_var(INT32)
            at = T.alloc_var(INT32)
            row = T.alloc_var(INT32)
            head = T.alloc_var(INT32)
            tx = T.get_thread_binding()
            row = request + row_offset
            T.pdl_trigger()
            # The partial kernel lets this one start after its own wait, and so after whatever wrote the plan.
            batch = plan_header[HEADER_BATCH]
            splits = plan_requests[request, SPLITS]
            first = plan_requests[request, FIRST_SLOT]
            chained = plan_requests[request, CHAINED]
            first = T.max(T.min(first + kv_head * splits, max_slots), 0)
            splits = T.max(T.min(splits, max_slots - first), 0)
            chained = T.max(T.min(chained, CHAIN), 1)
            for lanes in (FEW_LANES, MANY_LANES):  # each with divisors that the compiler knows
                width = MERGE_THREADS // lanes  # threads of a lane
                blocks = head_dim // (width * VECTOR)
                if merge_blocks == blocks:
                    lane = tx // width
                    first_vector = group_block % blocks * width  # of the block, among the head's
                    head = kv_head * group + group_block // blocks
                    at = lane * chained
                    place(rows, at, first, splits, group, group_block // blocks)
                    T.pdl_sync()
                    if request < batch and row >= 0 and row < q_rows:
                        m = minus_inf
                        total = 0
                        for v in T.unroll(VECTOR):
                            acc[0, v] = 0
                        while at < splits:
                            for u in T.unroll(CHAIN):  # without a branch, so that they are on their way together
                                for v in T.vectorized(SUMS):
                                    read_sums[u, v] = partial_sums[rows[u], v]
                                for v in T.vectorized(VECTOR):
                                    read[u, v] = partial_out[rows[u], first_vector + tx % width, v]
                            for u in T.unroll(CHAIN):
                                if u >= chained or at + u >= splits:
                                    read_sums[u, MAXIMUM] = minus_inf
                                    read_sums[u, TOTAL] = 0
                                    for v in T.unroll(VECTOR):
                                        read[u, v] = 0
                            chain_max = read_sums[0, MAXIMUM]
                            chain_total = read_sums[0, TOTAL]
                            for v in T.unroll(VECTOR):
                                chain[0, v] = read[0, v]
                            for u in T.unroll(1, CHAIN):
                                add(chain_max, chain_total, chain, read_sums[u, MAXIMUM], read_sums[u, TOTAL], read, u)
                            if at < lanes * chained:  # the lane's first
                                m = chain_max
                                total = chain_total
                                for v in T.unroll(VECTOR):
                                    acc[0, v] = chain[0, v]
                            else:
                                add(m, total, acc, chain_max, chain_total, chain, 0)
                            at = at + lanes * chained
                            place(rows, at, first, splits, group, group_block // blocks)
                        for v in T.vectorized(VECTOR):
                            sums[tx, v] = acc[0, v]
                        if tx % width == 0:
                            totals[lane] = total
                            maxima[lane] = m
                        T.sync_threads()
                        if tx < width * VECTOR:  # whole warps
                            m = maxima[tx % lanes]
                            base = m
                            for step in tuple(1 << bit for bit in range(lanes.bit_length() - 1)):
                                base = T.max(base, T.shfl_xor(base, step))
                            weight = T.exp2(m - T.if_then_else(base == minus_inf, 0.0, base))
                            total = 0
                            value = 0
                            for u in T.unroll(lanes):
                                factor = T.shfl_sync(weight, u)
                                total = total + factor * totals[u]
                                value = value + factor * sums[u * width + tx // VECTOR, tx % VECTOR]
                            out[row, head, first_vector * VECTOR + tx] = T.if_then_else(total == 0, 0.0, value / total)
                            if want_lse != 0 and first_vector == 0 and tx == 0:
                                lse[row, head] = T.if_then_else(total == 0, minus_inf, (base + T.log2(total)) * LN2)

    return kernel
