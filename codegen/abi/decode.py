"""The decode's argument struct, and its planner's."""

from __future__ import annotations

from codegen.abi import fields
from codegen.abi.records import CType, Field, HandWritten, Memory, OperationAbi, Struct

LIMITS = (
    Field("max_batch", CType.I32, "requests that any plan of these sizes may hold", minimum=1, maximum=65535),
    Field(
        "max_slots",
        CType.I32,
        "partials that any plan of these sizes may hold; 0: what max_batch requests need at most under the rule",
        minimum=0,
    ),
    *fields.HEADS,
)
MACHINE = (
    Field("sm_count", CType.I32, "multiprocessors of the device, one CTA each", minimum=1, maximum=65535),
    Field(
        "chunk_tokens",
        CType.I32,
        "tokens of a partial at most, a multiple of page_size; 0: by its length, into at most sm_count / num_kv_heads",
        minimum=0,
    ),
)

PLAN_SIZE = HandWritten(
    name="tilepress_decode_plan_size",
    struct=Struct(
        name="tilepress_decode_plan_size_args",
        doc="Arguments of tilepress_decode_plan_size.",
        fields=(
            fields.STRUCT_SIZE,
            Field("plan_words_out", CType.OUT_I64, "int32 words of a plan", "int64 [1]", Memory.HOST, align=8),
            Field("workspace_bytes_out", CType.OUT_I64, "bytes of a workspace", "int64 [1]", Memory.HOST, align=8),
            *LIMITS,
            fields.HEAD_DIM,
            *fields.PAGE,
            *MACHINE,
            fields.RESERVED,
        ),
    ),
    doc=(
        "Sizes of a decode plan and of the workspace that its calls need, for buffers that serve every plan of these limits. "
        "Host code: makes no CUDA call."
    ),
    source="decode_plan.cpp",
    refusals=("chunk_tokens that is not whole tiles of page_size, or given without max_slots",),
)

PLAN = HandWritten(
    name="tilepress_decode_plan",
    struct=Struct(
        name="tilepress_decode_plan_args",
        doc="Arguments of tilepress_decode_plan.",
        fields=(
            fields.STRUCT_SIZE,
            Field(
                "kv_len",
                CType.IN_I32,
                "tokens of each request's context, the new token's included; 0: nothing to see",
                "int32 [batch]",
                Memory.HOST,
                align=4,
                count="batch",
            ),
            Field(
                "page_indptr",
                CType.IN_I32,
                "request r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1])",
                "int32 [batch + 1]",
                Memory.HOST,
                align=4,
                count="batch",
            ),
            Field(
                "kv_origin",
                CType.IN_I32,
                "position of the first token of each request's page list, a multiple of page_size; absent: 0",
                "int32 [batch]",
                Memory.HOST,
                optional=True,
                align=4,
            ),
            Field(
                "plan",
                CType.OUT_I32,
                "the plan, written whole; copy it to the device",
                "int32 [plan_words]",
                Memory.HOST,
                align=4,
            ),
            Field("plan_words", CType.I64, "length of plan", minimum=0),
            Field("batch", CType.I32, "requests", minimum=0),
            *LIMITS,
            *fields.PAGE,
            *MACHINE,
            Field(
                "window",
                CType.I32,
                "tokens that a row sees, its own included (window_left + 1); 0: the whole context",
                minimum=0,
                maximum=fields.MAX_WINDOW,
            ),
        ),
    ),
    doc=(
        "Plans a decode step into the caller's array. How a request is split depends on its own length, the head counts and "
        "the SM count alone, so its output bits do not depend on the batch. The array has fixed places for fixed limits: a "
        "captured CUDA graph is replayed with a new plan copied over the old one. Host code: makes no CUDA call. A refusal "
        "leaves the array as it was."
    ),
    source="decode_plan.cpp",
    refusals=(
        "batch past max_batch, slots past max_slots, plan_words that are too few",
        "a negative kv_len, a decreasing page_indptr, a request whose pages are fewer than its kv_len needs",
        "a kv_origin that is no multiple of page_size, or past the first key that the request's row sees",
        "chunk_tokens that is not whole tiles of page_size, or given without max_slots",
    ),
)

REFUSALS = (
    fields.GEOMETRY_REFUSAL,
    *fields.POOL_REFUSALS,
    "a plan_host that tilepress_decode_plan did not write, or wrote for other head counts, page_size or page_format",
    "num_page_ids below what the plan needs, row_offset plus the plan's batch past q_rows",
    fields.SCALE_REFUSAL,
)

DECODE = OperationAbi(
    name="decode",
    doc=(
        "Grouped-query attention of one query row a request over the keys its plan gives it, all or a window, in a paged KV "
        "pool: split over the device's multiprocessors and merged. Request r's query is row row_offset + r. A request whose "
        "kv_len is 0 gives zeros and lse = -inf. Rows past the plan's batch are not written."
    ),
    struct=Struct(
        name="tilepress_decode_args",
        doc="Arguments of every decode entry. Zero the struct, set struct_size, then the fields.",
        fields=(
            fields.STRUCT_SIZE,
            fields.Q,
            fields.OUT,
            fields.LSE,
            fields.POOL,
            fields.PAGE_IDS,
            Field(
                "plan",
                CType.IN_I32,
                "the plan that tilepress_decode_plan wrote, copied to the device",
                "int32 [plan words]",
                Memory.DEVICE,
                align=16,
            ),
            Field(
                "plan_host",
                CType.IN_I32,
                "its host copy, of which the header is read: what the plan was built for must be what this call names. A plan "
                "of no requests launches nothing: capture a CUDA graph with one that has some",
                "int32 [plan words]",
                Memory.HOST,
                align=4,
            ),
            Field(
                "workspace",
                CType.OUT,
                "partial results; may hold anything before and after. Windowed entries need none: they merge in shared memory",
                "bytes [workspace_bytes]",
                Memory.DEVICE,
                optional=True,
                align=16,
            ),
            fields.STATUS,
            fields.STREAM,
            *fields.POOL_GEOMETRY,
            Field("workspace_bytes", CType.I64, "size of workspace; tilepress_decode_plan_size says how much", minimum=0),
            fields.Q_ROWS,
            Field("row_offset", CType.I32, "row of q, out and lse that request 0 has", minimum=0),
            fields.NUM_PAGE_IDS,
            *fields.HEADS,
            fields.HEAD_DIM,
            *fields.PAGE,
            fields.SM_SCALE,
            Field(
                "early",
                CType.I32,
                "1: of all that the call reads, plan and page ids included, the kernel before it on the stream, and any that "
                "may still run beside that one, writes q and the newest token's K and V at most, so the older pages may be "
                "read while it runs",
                minimum=0,
                maximum=1,
            ),
        ),
    ),
    derived=(
        "pool_tiles",
        "page_tiles",
        "layer_tile",
        "ctas",
        "group",
        "max_batch",
        "max_slots",
        "max_items",
        "merge_blocks",
        "plan_header",
        "plan_requests",
        "plan_items",
        "partial_out",
        "partial_sums",
        "want_lse",
        "want_status",
    ),
    refusals=(*REFUSALS, "a workspace that is absent, workspace_bytes below what the plan needs"),
    companions=(PLAN_SIZE, PLAN),
)

SLIDING_DECODE = OperationAbi(
    name="sliding_decode",
    doc=DECODE.doc,
    struct=DECODE.struct,
    derived=(
        "pool_tiles",
        "page_tiles",
        "layer_tile",
        "max_batch",
        "plan_header",
        "plan_requests",
        "want_lse",
        "want_status",
    ),
    refusals=REFUSALS,
    companions=(PLAN_SIZE, PLAN),
)
