"""The constants, and the public entries and functions that belong to no family."""

from __future__ import annotations

from codegen.abi import fields
from codegen.abi.activation import GELU_MUL
from codegen.abi.prep import PREPS
from codegen.abi.records import Code, CType, Field, Function, HandWritten, Memory, Struct
from codegen.formats import FORMATS
from codegen.status import DOCS as STATUS_DOCS

RETURN_CODES = (
    Code("OK", 0, "done: the work is on the stream"),
    Code("INVALID_ARGUMENT", 1, "an argument is refused; nothing was launched"),
    Code("UNSUPPORTED", 2, "no compiled instance serves these arguments; nothing was launched"),
    Code("DEVICE", 3, "the current device is not one this library was built for; nothing was launched"),
    Code("CUDA", 4, "a CUDA call failed"),
    Code("STUB", 5, "the library was built as a stub, without kernels"),
)
PAGE_FORMATS = tuple(Code(page.name.upper(), page.code, page.doc) for page in FORMATS.values())
STATUS_BITS = tuple(Code(*row) for row in STATUS_DOCS)

FUNCTIONS = (
    Function(
        "tilepress_last_error",
        CType.TEXT,
        (),
        "The calling thread's message of its last call that did not return TILEPRESS_OK: which argument and why. Never null; "
        "valid until the thread's next call into the library.",
    ),
    Function("tilepress_version", CType.TEXT, (), 'The library\'s version, "major.minor.patch".'),
    Function(
        "tilepress_build_info",
        CType.TEXT,
        (),
        "One line of key=value pairs: version, tier (generate or stub), arch, tilelang, nvcc, abi.",
    ),
    Function(
        "tilepress_supports",
        CType.I32,
        (
            (CType.TEXT, "entry"),
            (CType.I32, "num_q_heads"),
            (CType.I32, "num_kv_heads"),
            (CType.I32, "head_dim"),
            (CType.I32, "page_size"),
            (CType.I32, "page_format"),
        ),
        "Whether the entry of that name has a compiled instance for this geometry: TILEPRESS_OK, or the code that the entry "
        "itself would return, with the reason in tilepress_last_error(). Makes no CUDA call, so a server asks at load time on "
        "any host.",
    ),
    Function(
        "tilepress_pool_bytes",
        CType.I32,
        (
            (CType.I64, "num_pages"),
            (CType.I32, "num_layers"),
            (CType.I32, "num_kv_heads"),
            (CType.I32, "head_dim"),
            (CType.I32, "page_size"),
            (CType.I32, "page_format"),
            (CType.I32, "k_eq_v"),
            (CType.OUT_I64, "bytes"),
        ),
        "Bytes of a pool of num_pages pages, each page_size tokens of num_layers layers, into *bytes. k_eq_v: 1 where K and V "
        "of the model's layers are one projection, else 0; the folded format is refused without it. Returns a TILEPRESS_* "
        "code. Makes no CUDA call.",
    ),
)

MERGE_STATES = HandWritten(
    name="tilepress_merge_states",
    struct=Struct(
        name="tilepress_merge_states_args",
        doc="Arguments of tilepress_merge_states.",
        fields=(
            fields.STRUCT_SIZE,
            Field(
                "partials",
                CType.IN,
                "attention outputs over disjoint key sets, source s at s * source_stride",
                "bf16 [num_sources, num_rows, num_heads, head_dim]",
                Memory.DEVICE,
                align=16,
            ),
            Field(
                "partial_lse",
                CType.IN_F32,
                "their natural lse, source s at s * lse_stride",
                "float [num_sources, num_rows, num_heads]",
                Memory.DEVICE,
                align=4,
            ),
            Field(
                "out",
                CType.OUT,
                "attention over the union; must not overlap partials",
                "bf16 [num_rows, num_heads, head_dim]",
                Memory.DEVICE,
                align=16,
            ),
            Field(
                "lse",
                CType.OUT_F32,
                "the union's natural lse; must not overlap partial_lse",
                "float [num_rows, num_heads]",
                Memory.DEVICE,
                optional=True,
                align=4,
            ),
            fields.STREAM,
            Field("source_stride", CType.I64, "elements from one source of partials to the next", minimum=0, multiple=8),
            Field("lse_stride", CType.I64, "elements from one source of partial_lse to the next", minimum=0),
            Field("num_sources", CType.I32, "sources", minimum=1, maximum=1024),
            Field("num_rows", CType.I32, "rows", minimum=0),
            Field("num_heads", CType.I32, "query heads", minimum=1),
            Field("head_dim", CType.I32, "columns a head", minimum=8, multiple=8, maximum=65536),
        ),
    ),
    doc=(
        "Combines attention outputs over disjoint sets of keys, by their lse, into attention over the union: a context sharded "
        "over GPUs, or a shared prefix. A source whose lse is -inf weighs nothing; a row that no source saw gives zeros and "
        "lse = -inf. The order of the sources is the order of the sum."
    ),
    source="merge_states.cu",
    refusals=(
        "source_stride or lse_stride below one source's elements, where there is more than one source",
        "num_rows by num_heads by head_dim beyond what one launch holds, 2^31 - 1 blocks of 2,048 elements",
    ),
    empty_when="num_rows",
    checks="merge_states.h",
)
HAND_WRITTEN = (MERGE_STATES, *PREPS, GELU_MUL)
