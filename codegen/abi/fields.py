"""Fields that argument structs share, each described once."""

from __future__ import annotations

from codegen.abi.records import CType, Field, Memory

STRUCT_SIZE = Field("struct_size", CType.U64, "sizeof this struct, in bytes; anything else is refused")

# 2^24 pages of 64 tokens: a context that still counts in 32 bits.
MAX_PAGE_IDS = 1 << 24
MAX_ROWS = 1 << 31
MAX_WINDOW = 1 << 29

Q = Field("q", CType.IN, "queries", "bf16 [q_rows, num_q_heads, head_dim]", Memory.DEVICE, align=16)
OUT = Field(
    "out",
    CType.OUT,
    "attention output; must not overlap q or pool",
    "bf16 [q_rows, num_q_heads, head_dim]",
    Memory.DEVICE,
    align=16,
)
LSE = Field(
    "lse",
    CType.OUT_F32,
    "natural logarithm of the sum of exponentials",
    "float [q_rows, num_q_heads]",
    Memory.DEVICE,
    optional=True,
    align=4,
)
POOL = Field(
    "pool",
    CType.IN,
    "the KV pool, all layers",
    "bf16 [num_pages * rows_per_page, num_kv_heads, row width of the page format]",
    Memory.DEVICE,
    align=16,
)
PAGE_IDS = Field(
    "page_ids",
    CType.IN_I32,
    "pages of every request, one request after another; an id outside [0, num_pages) reads as masked keys",
    "int32 [num_page_ids]",
    Memory.DEVICE,
    align=4,
    count="num_page_ids",
)
STATUS = Field(
    "status",
    CType.OUT_U32,
    "status word: bits TILEPRESS_STATUS_* are or-ed in, never cleared",
    "uint32 [1]",
    Memory.DEVICE,
    optional=True,
    align=4,
)
STREAM = Field(
    "stream",
    CType.OUT,
    "a cudaStream_t of the current device; null is the default stream",
    memory=Memory.HOST,
    optional=True,
)
POOL_GEOMETRY = (
    Field("num_pages", CType.I64, "pages in the pool", minimum=1, maximum=MAX_ROWS - 1),
    Field("rows_per_page", CType.I64, "rows a page holds over all layers", minimum=1, maximum=MAX_ROWS - 64, multiple=64),
    Field("layer_row", CType.I64, "this layer's first row inside a page", minimum=0, maximum=MAX_ROWS - 64, multiple=64),
)
Q_ROWS = Field("q_rows", CType.I32, "rows of q, out and lse", minimum=0)
NUM_PAGE_IDS = Field("num_page_ids", CType.I32, "length of page_ids", minimum=0, maximum=MAX_PAGE_IDS)
HEADS = (
    Field("num_q_heads", CType.I32, "query heads; a multiple of num_kv_heads", minimum=1),
    Field("num_kv_heads", CType.I32, "KV heads", minimum=1, maximum=65535),
)
HEAD_DIM = Field("head_dim", CType.I32, "columns a head", minimum=1)
PAGE = (
    Field("page_size", CType.I32, "tokens a page", minimum=1),
    Field("page_format", CType.I32, "a TILEPRESS_PAGE_FORMAT_* value", minimum=1),
)
SM_SCALE = Field("sm_scale", CType.F32, "factor of the scores before the softmax; finite and above 0")
RESERVED = Field("reserved", CType.U32, "zero", minimum=0, maximum=0)

GEOMETRY_REFUSAL = (
    "num_q_heads that num_kv_heads does not divide, and a head_dim, page_size, page_format or group without an instance"
)
POOL_REFUSALS = (
    "a layer_row whose rows (page_size for K and page_size for V, or page_size folded ones) run past rows_per_page",
    "a pool of 2^31 rows or more",
)
SCALE_REFUSAL = "sm_scale that is not finite and above 0"
