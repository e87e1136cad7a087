"""What the attention kernels share: numbers, finding a query tile's request, a decode's maxima, and looks at a plan.

Fragments and arrays are the caller's.
"""

from collections.abc import Mapping
from typing import Any

import tilelang.language as T

BF16 = "bfloat16"
FP32 = "float32"
INT32 = "int32"
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
ROWS = 64  # query rows a tile
WARPGROUP = 128  # threads
WARP = 32

# Of every attention kernel here.
PASS_CONFIGS: Mapping[str, bool] = {
    "tl.enable_fast_math": True,
    "tl.disable_warp_specialized": True,  # warp roles are explicit
    "tl.disable_thread_storage_sync": True,  # and so are their barriers
    "tl.disable_safe_memory_legalize": True,  # every index out of a caller's array is clamped
}

# A query tile's request, in an int32 array: its index, rows [Q_FROM, Q_TO), pages [PAGE_FROM, PAGE_TO), the tokens of its last
# page, and whether an index pointer or length had to be clamped.
OWNER, Q_FROM, Q_TO, PAGE_FROM, PAGE_TO, LAST_LEN, CLAMPED = range(7)
SPAN_WORDS = 7


def request_finder(page_size: int, spare: int) -> Any:
    """A macro that fills a span for a tile slot.

    Request r owns the slots from q_indptr[r] // ROWS + spare * r on; `spare` is how many tiles more than its rows / ROWS a
    request may have, which keeps the slots of successive requests apart. Index arrays are the caller's: whatever they hold is
    clamped into range.
    """

    @T.macro
    def find(span, slot, batch, q_indptr, page_indptr, last_page_len, q_rows, num_page_ids):
        above = T.alloc_var(INT32)
        middle = T.alloc_var(INT32)
        span[OWNER] = 0
        above = batch
        while above - span[OWNER] > 1:
            middle = (span[OWNER] + above) // 2
            if q_indptr[middle] // ROWS + spare * middle <= slot:
                span[OWNER] = middle
            else:
                above = middle
        span[Q_FROM] = T.max(T.min(q_indptr[span[OWNER]], q_rows), 0)
        span[Q_TO] = T.max(T.min(q_indptr[span[OWNER] + 1], q_rows), span[Q_FROM])
        span[PAGE_FROM] = T.max(T.min(page_indptr[span[OWNER]], num_page_ids), 0)
        span[PAGE_TO] = T.max(T.min(page_indptr[span[OWNER] + 1], num_page_ids), span[PAGE_FROM])
        span[LAST_LEN] = T.max(T.min(last_page_len[span[OWNER]], page_size), 1)
        span[CLAMPED] = T.if_then_else(
            T.Or(
                T.Or(span[Q_FROM] != q_indptr[span[OWNER]], span[Q_TO] != q_indptr[span[OWNER] + 1]),
                T.Or(span[PAGE_FROM] != page_indptr[span[OWNER]], span[PAGE_TO] != page_indptr[span[OWNER] + 1]),
            ),
            1,
            0,
        )
        if span[PAGE_TO] > span[PAGE_FROM] and span[LAST_LEN] != last_page_len[span[OWNER]]:
            span[CLAMPED] = 1

    return find


@T.macro
def move_maximum(m, m_new, alpha, columns, scale):
    """Where keys lie on M: the columns' maxima of raw scores, m, take in those of one tile more, m_new.

    Leaves in alpha what sums and output so far are to be multiplied by, and in m_new what the exponentials subtract. A column
    that has seen no key keeps a maximum of -inf; the subtrahend is then 0, so no inf - inf arises.
    """
    for b in T.Parallel(columns):
        m_new[b] = T.max(m[b], m_new[b])
    for b in T.Parallel(columns):
        alpha[b] = T.if_then_else(m_new[b] == -T.infinity(FP32), 1.0, T.exp2((m[b] - m_new[b]) * scale))
    for b in T.Parallel(columns):
        m[b] = m_new[b]
    for b in T.Parallel(columns):
        m_new[b] = T.if_then_else(m_new[b] == -T.infinity(FP32), 0.0, m_new[b] * scale)


# Compiled in front of the text of a kernel that looks at its plan before it may believe it: before it has waited for the kernel
# that may be writing it.
NEAR = r"""
#include <tl_templates/cuda/common.h>

namespace tl {

// Asks for the line at `address` in the L2 cache. All multiprocessors meet there, so a later read finds what was written since.
TL_DEVICE void prefetch_line(const void *address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// The word at `address` as it is in the L2 cache now, with no copy of it left in the multiprocessor's own cache.
TL_DEVICE int glance(const int *address) {
  int word;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}

}  // namespace tl
"""


def prefetch_line(word: Any) -> Any:
    """Asks for a word's line in the L2 cache."""
    return T.evaluate(T.call_extern("handle", "tl::prefetch_line", T.address_of(word)))


def glance(word: Any) -> Any:
    """A word that another kernel may be writing: a guess."""
    return T.call_extern(INT32, "tl::glance", T.address_of(word))


def uniform(number: Any) -> Any:
    """The same number, known to the compiler to be that of every lane of the warp. An index into shared memory that is not
    costs each wgmma twice the instructions: its descriptors are then made by every lane, and moved."""
    return T.shfl_sync(number, 0)
