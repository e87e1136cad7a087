"""The one description of every public entry.

The C header, the argument checks, the Rust and Python bindings, the manifest, the symbol list and docs/abi.md are all
rendered from these records, so they cannot drift apart. Checks that no field states alone (a group without an instance, say)
are hand-written per operation in csrc/<operation>.h, beside the launch values it derives from the arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from codegen.kernels import OPERATIONS
from codegen.status import DOCS as STATUS_DOCS
from codegen.table import Family, Table


def digest(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


class CType(Enum):
    """A type that may stand in the ABI: its C, Rust and Python spelling and its size in bytes."""

    U64 = ("uint64_t", "u64", "int", 8)
    I64 = ("int64_t", "i64", "int", 8)
    I32 = ("int32_t", "i32", "int", 4)
    U32 = ("uint32_t", "u32", "int", 4)
    F32 = ("float", "f32", "float", 4)
    IN = ("const void *", "*const c_void", "int", 8)
    OUT = ("void *", "*mut c_void", "int", 8)
    IN_I32 = ("const int32_t *", "*const i32", "int", 8)
    OUT_U32 = ("uint32_t *", "*mut u32", "int", 8)
    OUT_F32 = ("float *", "*mut f32", "int", 8)
    TEXT = ("const char *", "*const c_char", "str", 8)

    def __init__(self, c: str, rust: str, python: str, size: int) -> None:
        self.c = c
        self.rust = rust
        self.python = python
        self.size = size

    @property
    def pointer(self) -> bool:
        """Whether it is an address."""
        return self.c.endswith("*")

    def declare(self, name: str) -> str:
        """A C declaration of `name`."""
        return f"{self.c}{name}" if self.pointer else f"{self.c} {name}"


class Memory(Enum):
    """Where a pointer points."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class Field:
    """A field of an argument struct.

    shape: of a pointer's array, with its element type. optional: a null pointer means absent. minimum, maximum: of a number,
    inclusive. multiple: what a number must be a multiple of. align: of a pointer, in bytes. count: the field that counts the
    array's elements; at zero the pointer may be null. A number outside its limits and a null or misaligned pointer are refused
    by name.
    """

    name: str
    type: CType
    doc: str
    shape: str = ""
    memory: Memory | None = None
    optional: bool = False
    minimum: int | None = None
    maximum: int | None = None
    multiple: int = 1
    align: int = 1
    count: str = ""


@dataclass(frozen=True)
class Struct:
    """An argument struct. Its first field is always struct_size."""

    name: str
    doc: str
    fields: tuple[Field, ...]

    @property
    def signature(self) -> str:
        """What a caller was compiled against, in one line."""
        return f"{self.name}{{{'; '.join(field.type.declare(field.name) for field in self.fields)}}}"


@dataclass(frozen=True)
class OperationAbi:
    """What every entry of an operation shares.

    derived: the launch values that csrc/<operation>.h computes from the arguments, which kernels may name as parameters
    besides the fields. refusals: what that file refuses beyond the fields' own limits, for the documentation.
    """

    name: str
    doc: str
    struct: Struct
    derived: tuple[str, ...]
    refusals: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """A public function that belongs to no family."""

    name: str
    returns: CType
    params: tuple[tuple[CType, str], ...]
    doc: str

    @property
    def prototype(self) -> str:
        """Its C declaration, without the semicolon."""
        params = ", ".join(ctype.declare(name) for ctype, name in self.params) or "void"
        return self.returns.declare(f"{self.name}({params})")


@dataclass(frozen=True)
class Entry:
    """A public entry: one row of the table through its operation's struct."""

    family: Family
    operation: OperationAbi

    @property
    def name(self) -> str:
        """The exported symbol."""
        return self.family.entry

    @property
    def prototype(self) -> str:
        """Its C declaration, without the semicolon."""
        return f"int {self.name}(const {self.operation.struct.name} *args)"

    @property
    def signature_hash(self) -> str:
        """Changes when a caller must be compiled again: SHA-256 over the prototype and the struct's fields."""
        return digest(f"{self.prototype}; {self.operation.struct.signature}")


@dataclass(frozen=True)
class Code:
    """A named constant of the ABI."""

    name: str
    value: int
    doc: str


RETURN_CODES = (
    Code("OK", 0, "done: the work is on the stream"),
    Code("INVALID_ARGUMENT", 1, "an argument is refused; nothing was launched"),
    Code("UNSUPPORTED", 2, "no compiled instance serves these arguments; nothing was launched"),
    Code("DEVICE", 3, "the current device is not one this library was built for; nothing was launched"),
    Code("CUDA", 4, "a CUDA call failed"),
    Code("STUB", 5, "the library was built as a stub, without kernels"),
)
PAGE_FORMATS = (Code("SPLIT", 1, "a page holds the layer's page_size K rows, then its page_size V rows; row width head_dim"),)
STATUS_BITS = tuple(Code(*row) for row in STATUS_DOCS)

STRUCT_SIZE = Field("struct_size", CType.U64, "sizeof this struct, in bytes; anything else is refused")

# 2^24 pages of 64 tokens: a context that still counts in 32 bits.
MAX_PAGE_IDS = 1 << 24

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
            STRUCT_SIZE,
            Field("q", CType.IN, "queries", "bf16 [q_rows, num_q_heads, head_dim]", Memory.DEVICE, align=16),
            Field(
                "out",
                CType.OUT,
                "attention output; must not overlap q or pool",
                "bf16 [q_rows, num_q_heads, head_dim]",
                Memory.DEVICE,
                align=16,
            ),
            Field(
                "lse",
                CType.OUT_F32,
                "natural logarithm of the sum of exponentials",
                "float [q_rows, num_q_heads]",
                Memory.DEVICE,
                optional=True,
                align=4,
            ),
            Field(
                "pool",
                CType.IN,
                "the KV pool, all layers",
                "bf16 [num_pages * rows_per_page, num_kv_heads, head_dim]",
                Memory.DEVICE,
                align=16,
            ),
            Field(
                "page_ids",
                CType.IN_I32,
                "pages of every request, one request after another; an id outside [0, num_pages) reads as masked keys",
                "int32 [num_page_ids]",
                Memory.DEVICE,
                align=4,
                count="num_page_ids",
            ),
            Field(
                "page_indptr",
                CType.IN_I32,
                "request r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1])",
                "int32 [batch + 1]",
                Memory.DEVICE,
                align=4,
            ),
            Field(
                "last_page_len",
                CType.IN_I32,
                "tokens in each request's last page, 1 to page_size; later slots may hold anything, NaN included",
                "int32 [batch]",
                Memory.DEVICE,
                align=4,
            ),
            Field(
                "q_indptr",
                CType.IN_I32,
                "request r has the query rows [q_indptr[r], q_indptr[r + 1])",
                "int32 [batch + 1]",
                Memory.DEVICE,
                align=4,
            ),
            Field(
                "q_indptr_host",
                CType.IN_I32,
                "a host copy of q_indptr, checked and used to size the grid. Without it the grid covers every q_indptr within "
                "q_rows and batch: capture a CUDA graph so, and replay it with other plans",
                "int32 [batch + 1]",
                Memory.HOST,
                optional=True,
                align=4,
            ),
            Field(
                "status",
                CType.OUT_U32,
                "status word: bits TILEPRESS_STATUS_* are or-ed in, never cleared",
                "uint32 [1]",
                Memory.DEVICE,
                optional=True,
                align=4,
            ),
            Field(
                "stream",
                CType.OUT,
                "a cudaStream_t of the current device; null is the default stream",
                memory=Memory.HOST,
                optional=True,
            ),
            Field("num_pages", CType.I64, "pages in the pool", minimum=1, maximum=(1 << 31) - 1),
            Field(
                "rows_per_page",
                CType.I64,
                "rows a page holds over all layers",
                minimum=1,
                maximum=(1 << 31) - 64,
                multiple=64,
            ),
            Field(
                "layer_row",
                CType.I64,
                "this layer's first row inside a page",
                minimum=0,
                maximum=(1 << 31) - 64,
                multiple=64,
            ),
            Field("q_rows", CType.I32, "rows of q, out and lse", minimum=0),
            Field("num_page_ids", CType.I32, "length of page_ids", minimum=0, maximum=MAX_PAGE_IDS),
            Field("batch", CType.I32, "requests", minimum=0),
            Field("num_q_heads", CType.I32, "query heads; a multiple of num_kv_heads", minimum=1),
            Field("num_kv_heads", CType.I32, "KV heads", minimum=1, maximum=65535),
            Field("head_dim", CType.I32, "columns a head", minimum=1),
            Field("page_size", CType.I32, "tokens a page", minimum=1),
            Field("page_format", CType.I32, "a TILEPRESS_PAGE_FORMAT_* value", minimum=1),
            Field("sm_scale", CType.F32, "factor of the scores before the softmax; finite and above 0"),
            Field("reserved", CType.U32, "zero", minimum=0, maximum=0),
        ),
    ),
    derived=("pool_tiles", "page_tiles", "layer_tile", "q_tiles", "want_lse", "want_status"),
    refusals=(
        "num_q_heads that num_kv_heads does not divide, and a head_dim, page_size, page_format or group without an instance",
        "layer_row + 2 * page_size past rows_per_page (a layer has page_size K rows and page_size V rows)",
        "a pool of 2^31 rows or more, or more than 65,535 query tiles in one call",
        "q_indptr_host that does not start at 0 or above, decreases, or ends past q_rows",
        "sm_scale that is not finite and above 0",
    ),
)

OPERATION_ABIS: Mapping[str, OperationAbi] = MappingProxyType({abi.name: abi for abi in (PREFILL,)})
assert OPERATION_ABIS.keys() == OPERATIONS.keys(), "every operation of kernels/ has its argument struct here"

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
)


def entries(table: Table) -> tuple[Entry, ...]:
    """The public entries of a table, in its order."""
    return tuple(Entry(family, OPERATION_ABIS[family.operation]) for family in table.family)


def structs(table: Table) -> tuple[Struct, ...]:
    """The argument structs that a table's entries take, each once."""
    return tuple(dict.fromkeys(entry.operation.struct for entry in entries(table)))


def public_symbols(table: Table) -> tuple[str, ...]:
    """Every symbol that the library exports, sorted."""
    return tuple(sorted([*(f.name for f in FUNCTIONS), *(entry.name for entry in entries(table))]))


def kernel_names(operation: str) -> frozenset[str]:
    """The names a kernel of this operation may use as parameters and extents: fields and launch values."""
    abi = OPERATION_ABIS[operation]
    return frozenset(field.name for field in abi.struct.fields) | frozenset(abi.derived)
