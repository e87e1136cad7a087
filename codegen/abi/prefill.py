"""The prefill's argument struct."""

from __future__ import annotations

from codegen.abi import fields
from codegen.abi.records import CType, Field, Memory, OperationAbi, Struct

PAGE_INDPTR = Field(
    "page_indptr",
    CType.IN_I32,
    "request r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1])",
    "int32 [batch + 1]",
    Memory.DEVICE,
    align=4,
)
LAST_PAGE_LEN = Field(
    "last_page_len",
    CType.IN_I32,
    "tokens in each request's last page, 1 to page_size; later slots may hold anything, NaN included",
    "int32 [batch]",
    Memory.DEVICE,
    align=4,
)
Q_INDPTR = Field(
    "q_indptr",
    CType.IN_I32,
    "request r has the query rows [q_indptr[r], q_indptr[r + 1])",
    "int32 [batch + 1]",
    Memory.DEVICE,
    align=4,
)
Q_INDPTR_HOST = Field(
    "q_indptr_host",
    CType.IN_I32,
    "a host copy of q_indptr, checked and used to size the grid. Without it the grid covers every q_indptr within "
    "q_rows and batch: capture a CUDA graph so, and replay it with other plans",
    "int32 [batch + 1]",
    Memory.HOST,
    optional=True,
    align=4,
)

PREFILL = OperationAbi(
    name="prefill",
    doc=(
        "Causal grouped-query attention of a ragged batch of requests over a paged KV pool. Query row i of a request with n "
        "rows and a context of L tokens sees keys 0 to L - n + i: rows continue a context that is already in the pool, their "
        "own keys included. A row that sees no key gives zeros and lse = -inf. A request without rows does nothing. Rows that "
        "no request owns are neither read into a result nor written."
    ),
    struct=Struct(
        name="tilepress_prefill_args",
        doc="Arguments of every prefill entry. Zero the struct, set struct_size, then the fields.",
        fields=(
            fields.STRUCT_SIZE,
            fields.Q,
            fields.OUT,
            fields.LSE,
            fields.POOL,
            fields.PAGE_IDS,
            PAGE_INDPTR,
            LAST_PAGE_LEN,
            Q_INDPTR,
            Q_INDPTR_HOST,
            fields.STATUS,
            fields.STREAM,
            *fields.POOL_GEOMETRY,
            fields.Q_ROWS,
            fields.NUM_PAGE_IDS,
            Field("batch", CType.I32, "requests", minimum=0),
            *fields.HEADS,
            fields.HEAD_DIM,
            *fields.PAGE,
            fields.SM_SCALE,
            fields.RESERVED,
        ),
    ),
    derived=("pool_tiles", "page_tiles", "layer_tile", "q_tiles", "want_lse", "want_status"),
    refusals=(
        fields.GEOMETRY_REFUSAL,
        *fields.POOL_REFUSALS,
        "more than 65,535 query tiles in one call",
        "q_indptr_host that does not start at 0 or above, decreases, or ends past q_rows",
        fields.SCALE_REFUSAL,
    ),
)
