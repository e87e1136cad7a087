"""The one description of every public entry.

The C header, the argument checks, the Rust and Python bindings, the manifest, the symbol list and docs/abi.md are all
rendered from these records, so they cannot drift apart. Checks that no field states alone (a group without an instance, say)
are hand-written per operation in csrc/<operation>.h, beside the launch values it derives from the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from codegen.abi.common import FUNCTIONS as COMMON_FUNCTIONS
from codegen.abi.common import HAND_WRITTEN, PAGE_FORMATS, RETURN_CODES, STATUS_BITS
from codegen.abi.decode import DECODE, SLIDING_DECODE
from codegen.abi.incumbent import PARAMS as INCUMBENT_PARAMS
from codegen.abi.incumbent import REFUSALS as INCUMBENT_REFUSALS
from codegen.abi.incumbent import Incumbent, incumbent, incumbent_params
from codegen.abi.prefill import PREFILL
from codegen.abi.records import (
    Code,
    CType,
    Entry,
    FamilyEntry,
    Field,
    Function,
    HandWritten,
    Memory,
    OperationAbi,
    Struct,
    digest,
)
from codegen.abi.routes import FUNCTIONS as ROUTE_FUNCTIONS
from codegen.abi.routes import Routed, route
from codegen.abi.sliding_prefill import SLIDING_PREFILL
from codegen.kernels import OPERATIONS
from codegen.modes import MODES
from codegen.table import Table

__all__ = [
    "FUNCTIONS",
    "HAND_WRITTEN",
    "INCUMBENT_PARAMS",
    "INCUMBENT_REFUSALS",
    "LAUNCHER_NAMES",
    "MODE_CODES",
    "OPERATION_ABIS",
    "PAGE_FORMATS",
    "RETURN_CODES",
    "STATUS_BITS",
    "CType",
    "Code",
    "Entry",
    "FamilyEntry",
    "Field",
    "Function",
    "HandWritten",
    "Incumbent",
    "Memory",
    "OperationAbi",
    "Routed",
    "Struct",
    "digest",
    "entries",
    "family_entries",
    "hand_written",
    "incumbent",
    "incumbent_params",
    "kernel_names",
    "public_symbols",
    "routes",
    "structs",
]

OPERATION_ABIS: Mapping[str, OperationAbi] = MappingProxyType(
    {abi.name: abi for abi in (PREFILL, SLIDING_PREFILL, DECODE, SLIDING_DECODE)}
)
assert OPERATION_ABIS.keys() == OPERATIONS.keys(), "every operation of kernels/ has its argument struct here"


FUNCTIONS = (*COMMON_FUNCTIONS, *ROUTE_FUNCTIONS)
MODE_CODES = tuple(Code(mode.name.upper(), mode.code, f"{mode.doc} (the knob's {mode.text!r})") for mode in MODES.values())


def family_entries(table: Table) -> tuple[FamilyEntry, ...]:
    """The entries that the table's rows make, in its order."""
    found = []
    for family in table.family:
        operation = OPERATION_ABIS[family.operation]
        found.append(FamilyEntry(family.entry, operation.struct, operation.doc, family, operation))
    return tuple(found)


def hand_written(table: Table) -> tuple[HandWritten, ...]:
    """The hand-written entries: those the table's operations bring, and those that belong to no family."""
    companions = [entry for family in family_entries(table) for entry in family.operation.companions]
    return tuple(dict.fromkeys([*companions, *HAND_WRITTEN]))


def routes(table: Table) -> tuple[Routed, ...]:
    """The routed entries: of every family that names an incumbent. Raises TableError where that cannot serve it."""
    return route(table, OPERATION_ABIS)


def entries(table: Table) -> tuple[Entry, ...]:
    """Every public function that takes an argument struct."""
    return (*family_entries(table), *hand_written(table), *routes(table))


def structs(table: Table) -> tuple[Struct, ...]:
    """The argument structs of the entries, each once."""
    return tuple(dict.fromkeys(entry.struct for entry in entries(table)))


def public_symbols(table: Table) -> tuple[str, ...]:
    """Every symbol that the library exports, sorted."""
    functions = [function.name for function in (*FUNCTIONS, *incumbent(table))]
    return tuple(sorted([*functions, *(entry.name for entry in entries(table))]))


# What a launcher finds out by itself: the clusters of the kernel's size that the device holds at once.
LAUNCHER_NAMES = frozenset({"resident_clusters"})


def kernel_names(operation: str) -> frozenset[str]:
    """The names a kernel of this operation may use as parameters and extents: fields, launch values, and the launcher's own."""
    abi = OPERATION_ABIS[operation]
    return frozenset(field.name for field in abi.struct.fields) | frozenset(abi.derived) | LAUNCHER_NAMES
