"""The preps: from the rows of the q, k and v projections to attention's operands, Q packed, K and V in the paged pool."""

from __future__ import annotations

from codegen.abi import fields
from codegen.abi.bands import REFUSAL, band
from codegen.abi.records import CType, Field, HandWritten, Memory, Struct

# Of Q's and K's rows: a prompt's prep that reads as much goes through shared memory, one that reads less through registers.
BULK_BYTES = 128 << 20


def _input(name: str, doc: str, optional: bool) -> Field:
    return Field(f"{name}_in", CType.IN, doc, f"bf16 [rows, {name}_row_stride]", Memory.DEVICE, optional=optional, align=16)


def _norm(name: str, optional: bool) -> Field:
    return Field(
        f"{name}_norm",
        CType.IN,
        f"weight of {name}'s RMS norm{', needed with k_in' if optional else ''}",
        "bf16 [head_dim]",
        Memory.DEVICE,
        optional=optional,
        align=16,
    )


def _table(name: str) -> Field:
    return Field(
        name,
        CType.IN_F32,
        f"{name} of position times inverse frequency, by position and RoPE pair",
        "float [max_positions, rotary / 2]",
        Memory.DEVICE,
        align=16,
    )


def _struct(
    form: str, owner: str, positions: str, page_rows: str, request_rows: tuple[Field, ...], tail: tuple[Field, ...]
) -> Struct:
    """owner: the count of requests. request_rows: which rows a request has. tail: the counts after `rows`."""
    return Struct(
        name=f"tilepress_prep_{form}_args",
        doc=f"Arguments of the {form} preps. Zero the struct, set struct_size, then the fields.",
        fields=(
            fields.STRUCT_SIZE,
            _input("q", "rows that hold the q projection as a column band", False),
            _input(
                "k",
                "rows that hold the k projection; absent where the layer shares an earlier one's KV: then Q alone is prepared, "
                "and the fields of k, v and the pool are checked but not used",
                True,
            ),
            _input("v", "rows that hold the v projection; absent with k_eq_v", True),
            _norm("q", False),
            _norm("k", True),
            _table("cos"),
            _table("sin"),
            Field(
                "q_out",
                CType.OUT,
                "queries for attention; must not overlap the inputs",
                "bf16 [rows, num_q_heads, head_dim]",
                Memory.DEVICE,
                align=16,
            ),
            Field(
                "pool",
                CType.OUT,
                "the KV pool, all layers, needed with k_in",
                "bf16 [num_pages * rows_per_page, num_kv_heads, row width of the page format]",
                Memory.DEVICE,
                optional=True,
                align=16,
            ),
            Field(
                "page_ids",
                CType.IN_I32,
                "pages of every request, needed with k_in; a row whose id is outside [0, num_pages) is not written to the pool",
                "int32 [num_page_ids]",
                Memory.DEVICE,
                optional=True,
                align=4,
            ),
            Field(
                "page_indptr",
                CType.IN_I32,
                f"{page_rows} the pages page_ids[page_indptr[r] .. page_indptr[r + 1]), needed with k_in",
                f"int32 [{owner} + 1]",
                Memory.DEVICE,
                optional=True,
                align=4,
            ),
            Field(
                "kv_origin",
                CType.IN_I32,
                "position of the first token of each page list, a multiple of page_size; absent: 0",
                f"int32 [{owner}]",
                Memory.DEVICE,
                optional=True,
                align=4,
            ),
            *request_rows,
            Field("positions", CType.IN_I32, positions, f"int32 [{owner}]", Memory.DEVICE, align=4),
            fields.STATUS,
            fields.STREAM,
            *fields.POOL_GEOMETRY,
            *band("q", "num_q_heads * head_dim"),
            *band("k", "num_kv_heads * head_dim"),
            *band("v", "num_kv_heads * head_dim, unless k_eq_v"),
            Field("rows", CType.I32, "rows, one a token", minimum=0),
            fields.NUM_PAGE_IDS,
            *fields.HEADS,
            fields.HEAD_DIM,
            *fields.PAGE,
            Field(
                "k_eq_v",
                CType.I32,
                "1 where V is K's projection under a norm of its own, without a weight; else 0",
                minimum=0,
                maximum=1,
            ),
            Field(
                "rotary",
                CType.I32,
                "columns that turn: the RoPE pairs are (i, i + head_dim / 2) for i below rotary / 2",
                minimum=2,
                multiple=2,
            ),
            Field("max_positions", CType.I32, "positions that cos and sin hold", minimum=1),
            Field("eps", CType.F32, "added to a row's mean square; finite and above 0"),
            *tail,
        ),
    )


PROMPT = _struct(
    "prompt",
    "batch",
    "position of each request's first row; its others follow",
    "request r has",
    (
        Field(
            "q_indptr",
            CType.IN_I32,
            "request r has the rows [q_indptr[r], q_indptr[r + 1])",
            "int32 [batch + 1]",
            Memory.DEVICE,
            align=4,
        ),
    ),
    (Field("batch", CType.I32, "requests", minimum=0),),
)
DECODE = _struct("decode", "rows", "position of each row's token", "row r has", (), (fields.RESERVED,))

FORMS = {
    PROMPT: "Rows are a ragged batch of prompts, consecutive positions each; rows that no request owns are not written.",
    DECODE: "Every row is one request's next token.",
}
WHAT = (
    "Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and v_in may "
    "be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed without a "
    "weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and rounded. "
)
SKIPS = (
    " A row whose position the cos and sin tables do not hold is skipped; one whose position lies outside its page list, or "
    "whose page lies outside the pool, has its Q written but not its K and V: status bits tell. A row's bits depend on that "
    "row alone."
)
GLOBAL_WHAT = (
    "Global layers, head_dim 512, split or folded pages. With k_eq_v V is K's row under the same inverse RMS. For folded pages "
    "Q carries k_norm's weight on the columns that a folded row does not keep rotated: [64, 256) and [320, 512)."
)
SLIDING_WHAT = "Sliding layers, head_dim 256, split pages."
REFUSALS = (
    REFUSAL,
    "num_q_heads that num_kv_heads does not divide, and a head_dim or page_size that the prep was not compiled for",
    *fields.POOL_REFUSALS,
    "rotary above head_dim, eps that is not finite and above 0",
    "k_in without k_norm, pool, page_ids or page_indptr; v_in absent without k_eq_v, given with it, or given without k_in",
)
GLOBAL_REFUSALS = (
    *REFUSALS,
    "folded pages without k_eq_v, or with rotary above the 128 columns that a folded row keeps rotated",
)
SLIDING_REFUSALS = (*REFUSALS, "k_eq_v, and any page_format but split")


def _entry(layers: str, form: Struct, what: str, refusals: tuple[str, ...]) -> HandWritten:
    return HandWritten(
        name=form.name.replace("prep_", f"prep_{layers}_").removesuffix("_args"),
        struct=form,
        doc=f"{WHAT}{what} {FORMS[form]}{SKIPS}",
        source=f"prep_{layers}.cu",
        refusals=refusals,
        empty_when="rows",
        checks="prep.h",
    )


PREPS = (
    _entry("global", PROMPT, GLOBAL_WHAT, GLOBAL_REFUSALS),
    _entry("global", DECODE, GLOBAL_WHAT, GLOBAL_REFUSALS),
    _entry("sliding", PROMPT, SLIDING_WHAT, SLIDING_REFUSALS),
    _entry("sliding", DECODE, SLIDING_WHAT, SLIDING_REFUSALS),
)
