"""The records that describe the ABI: types, fields, structs, entries."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

from codegen.table import Family


def digest(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


class CType(Enum):
    """A type that may stand in the ABI: its C, Rust and Python spelling and its size in bytes."""

    U64 = ("uint64_t", "u64", "int", 8)
    I64 = ("int64_t", "i64", "int", 8)
    I32 = ("int32_t", "i32", "int", 4)
    U32 = ("uint32_t", "u32", "int", 4)
    INT = ("int", "c_int", "int", 4)
    F32 = ("float", "f32", "float", 4)
    IN = ("const void *", "*const c_void", "int", 8)
    OUT = ("void *", "*mut c_void", "int", 8)
    IN_I32 = ("const int32_t *", "*const i32", "int", 8)
    OUT_U8 = ("uint8_t *", "*mut u8", "int", 8)
    OUT_U32 = ("uint32_t *", "*mut u32", "int", 8)
    OUT_F32 = ("float *", "*mut f32", "int", 8)
    OUT_I32 = ("int32_t *", "*mut i32", "int", 8)
    OUT_I64 = ("int64_t *", "*mut i64", "int", 8)
    IN_F32 = ("const float *", "*const f32", "int", 8)
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
    besides the fields; `sm_count` among them is filled in by the entry. refusals: what that file refuses beyond the fields'
    own limits, for the documentation. companions: hand-written entries that a server needs with it, such as its planner.
    """

    name: str
    doc: str
    struct: Struct
    derived: tuple[str, ...]
    refusals: tuple[str, ...]
    companions: tuple[HandWritten, ...] = ()


@dataclass(frozen=True)
class Function:
    """A public function that takes plain parameters."""

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
    """A public function that takes an argument struct."""

    name: str
    struct: Struct
    doc: str

    @property
    def prototype(self) -> str:
        """Its C declaration, without the semicolon."""
        return f"int {self.name}(const {self.struct.name} *args)"

    @property
    def signature_hash(self) -> str:
        """Changes when a caller must be compiled again: SHA-256 over the prototype and the struct's fields."""
        return digest(f"{self.prototype}; {self.struct.signature}")

    @property
    def short_name(self) -> str:
        """The name without the library's prefix."""
        return self.name.removeprefix("tilepress_")


@dataclass(frozen=True)
class HandWritten(Entry):
    """An entry whose body is `run_<name>` in csrc/<source>; the checks of its fields are rendered.

    source: the file, .cpp for host code and .cu for a kernel. refusals: what it refuses beyond the fields' own limits.
    empty_when: the count that at zero leaves nothing to do. checks: the header of csrc whose `check_<name>` makes refusals that
    no field states alone, on every host and in a stub.
    """

    source: str
    refusals: tuple[str, ...]
    empty_when: str = ""
    checks: str = ""

    @property
    def cuda(self) -> bool:
        """Whether it launches a kernel, which a stub refuses."""
        return self.source.endswith(".cu")


@dataclass(frozen=True)
class FamilyEntry(Entry):
    """An entry that a row of the table makes, through its operation."""

    family: Family
    operation: OperationAbi


@dataclass(frozen=True)
class Code:
    """A named constant of the ABI."""

    name: str
    value: int
    doc: str
