"""The windowed prefill's argument struct."""

from __future__ import annotations

from codegen.abi import fields
from codegen.abi.prefill import LAST_PAGE_LEN, PAGE_INDPTR, Q_INDPTR, Q_INDPTR_HOST
from codegen.abi.records import CType, Field, Memory, OperationAbi, Struct

SLIDING_PREFILL = OperationAbi(
    name="sliding_prefill",
    doc=(
        "Causal grouped-query attention of a ragged batch of requests over a paged KV pool, each row seeing a window of keys. "
        "Query row i of a request with n rows and a context of L tokens is at position p = L - n + i and sees the keys "
        "p - window_left to p. A request's page list begins at position kv_origin, once its front is released; L counts from "
        "position 0. A row that sees no key gives zeros and lse = -inf. A request without rows does nothing. Rows that no "
        "request owns are neither read into a result nor written."
    ),
    struct=Struct(
        name="tilepress_sliding_prefill_args",
        doc="Arguments of every windowed prefill entry. Zero the struct, set struct_size, then the fields.",
        fields=(
            fields.STRUCT_SIZE,
            fields.Q,
            fields.OUT,
            fields.LSE,
            fields.POOL,
            fields.PAGE_IDS,
            PAGE_INDPTR,
            LAST_PAGE_LEN,
            Field(
                "kv_origin",
                CType.IN_I32,
                "position of the first token of each request's page list, a multiple of page_size; absent: 0",
                "int32 [batch]",
                Memory.DEVICE,
                optional=True,
                align=4,
            ),
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
            Field(
                "window_left",
                CType.I32,
                "keys before its own that a row sees: a window of W tokens is W - 1",
                minimum=0,
                maximum=fields.MAX_WINDOW,
            ),
            fields.SM_SCALE,
        ),
    ),
    derived=("pool_tiles", "page_tiles", "layer_tile", "q_tiles", "sm_count", "has_origin", "want_lse", "want_status"),
    refusals=(
        fields.GEOMETRY_REFUSAL,
        *fields.POOL_REFUSALS,
        "more than 65,535 query tiles in one call",
        "q_indptr_host that does not start at 0 or above, decreases, or ends past q_rows",
        fields.SCALE_REFUSAL,
    ),
)
