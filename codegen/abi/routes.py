"""The routed entries: one per family that names an incumbent, and its planners. The call's mode picks who serves it.

A routed struct is the generated entry's with `mode` in the place of page_format, which the mode decides. A server plans, copies
the plan to the device and calls, the same in every mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from codegen.abi import fields
from codegen.abi.decode import PLAN as DECODE_PLAN
from codegen.abi.decode import PLAN_SIZE as DECODE_PLAN_SIZE
from codegen.abi.incumbent import ENTRIES, Incumbent, incumbent
from codegen.abi.prefill import Q_INDPTR_HOST
from codegen.abi.records import CType, Entry, Field, Function, Memory, OperationAbi, Struct
from codegen.errors import TableError
from codegen.incumbent import DECODE_GROUPS, UNITS
from codegen.modes import MODES, VARIABLE
from codegen.table import Family, Table

Role = Literal["run", "plan_size", "plan"]

MODE = Field("mode", CType.I32, "a TILEPRESS_MODE_* value; the server has it from tilepress_parse_mode, once", minimum=1)

FUNCTIONS = (
    Function(
        "tilepress_parse_mode",
        CType.I32,
        ((CType.TEXT, "text"), (CType.OUT_I32, "mode")),
        f"The mode that the knob's value names, into *mode. text: the value of {VARIABLE}, null where it is unset. Unset and "
        f'"off" are the incumbent; {", ".join(repr(m.text) for m in MODES.values() if m.generated)} name themselves; anything '
        "else is refused and leaves *mode as it was. Returns a TILEPRESS_* code. Makes no CUDA call and reads no environment.",
    ),
    Function(
        "tilepress_mode_pool_bytes",
        CType.I32,
        (
            (CType.I32, "mode"),
            (CType.I64, "num_pages"),
            (CType.I32, "num_layers"),
            (CType.I32, "num_kv_heads"),
            (CType.I32, "head_dim"),
            (CType.I32, "page_size"),
            (CType.I32, "k_eq_v"),
            (CType.OUT_I64, "bytes"),
        ),
        "tilepress_pool_bytes of the global layers' pool under a mode. The sliding layers' pool is split in every mode.",
    ),
)

# How the parameters of an incumbent's entry come from a routed call: `route` is what csrc/routes.h made of its arguments. A
# name means the same in every entry, so a family may name any entry of its operation.
ARGUMENTS = {
    "q": "route.q",
    "output": "route.out",
    "kv_data": "route.pool",
    "k_offset_elems": "route.k_offset",
    "v_offset_elems": "route.v_offset",
    "page_indices": "route.page_ids",
    "page_indptr": "route.page_indptr",
    "last_page_len_d": "route.last_page_len",
    "q_indptr": "route.q_indptr",
    "request_indices": "route.request_indices",
    "qo_tile_indices": "route.tile_indices",
    "kv_tile_indices": "route.chunk_indices",
    "kv_chunk_size_ptr": "route.chunk_tokens",
    "o_indptr": "route.o_indptr",
    "block_valid_mask": "route.valid",
    "tmp_v": "route.partial_out",
    "tmp_s": "route.partial_lse",
    "total_num_rows": "route.total_rows",
    "num_qo_heads": "call.num_q_heads",
    "num_kv_heads": "call.num_kv_heads",
    "head_dim": "call.head_dim",
    "page_size": "call.page_size",
    "seq_len": "route.rows",
    "batch_size": "route.batch",
    "padded_batch_size": "route.blocks",
    "stride_page": "route.page_stride",
    "sm_scale": "call.sm_scale",
    "window_left": "route.window_left",
    "stream": "call.stream",
}

TILE_PLANNER = "batch_prefill_cta_tile_q"  # the incumbent's entry that says how long a prefill's query tiles are

# The bodies of paged_launch.cuh that can serve an operation.
BODIES = {
    "prefill": ("Prefill",),
    "sliding_prefill": ("Prefill",),
    "decode": ("Decode", "SplitDecode"),
    "sliding_decode": ("Decode",),
}
DECODES = ("decode", "sliding_decode")


@dataclass(frozen=True)
class Routed(Entry):
    """A routed entry.

    callee: the generated entry that it hands the call to; empty where a generated mode needs nothing done. incumbent: the entry
    that serves the incumbent's mode; served: whether this library has it, else that mode is refused.
    """

    family: Family
    role: Role
    callee: str
    callee_struct: Struct | None
    incumbent: Incumbent
    served: bool
    refusals: tuple[str, ...]

    @property
    def kind(self) -> str:
        """prefill or decode: which of the two plans it has."""
        return "decode" if self.family.operation in DECODES else "prefill"

    @property
    def copied(self) -> tuple[str, ...]:
        """The callee's fields that are the routed struct's own."""
        if self.callee_struct is None:
            return ()
        return tuple(f.name for f in self.callee_struct.fields if f.name not in ("struct_size", "page_format"))

    @property
    def arguments(self) -> tuple[str, ...]:
        """The incumbent's parameters as C++ expressions."""
        return tuple(ARGUMENTS[name] for _, name in self.incumbent.params)


def _with_mode(struct: Struct, name: str, doc: str, more: tuple[Field, ...] = ()) -> Struct:
    """A generated struct with mode for page_format, and `more` in front of the status word."""
    found: list[Field] = []
    for field in struct.fields:
        if more and field.name == "status":
            found += more
        # A plan that needs no workspace has none.
        kept = replace(field, count="workspace_bytes", optional=False) if field.name == "workspace" else field
        found.append(MODE if field.name == "page_format" else kept)
    return Struct(name, doc, tuple(found))


_PREFILL_PLAN_FIELDS = (
    Field(
        "plan",
        CType.IN_I32,
        "the plan that the routed planner wrote, copied to the device; read in the incumbent's mode alone",
        "int32 [plan words]",
        Memory.DEVICE,
        optional=True,
        align=16,
    ),
    Field(
        "plan_host",
        CType.IN_I32,
        "its host copy, of which the header is read",
        "int32 [plan words]",
        Memory.HOST,
        optional=True,
        align=4,
    ),
)
_PLAN_WORDS_OUT = Field(
    "plan_words_out", CType.OUT_I64, "int32 words of a plan; 0 in a mode that needs none", "int64 [1]", Memory.HOST, align=8
)
_MAX_BATCH = Field("max_batch", CType.I32, "requests that any plan of these sizes may hold", minimum=0, maximum=1 << 24)
_PREFILL_GEOMETRY = (
    *fields.HEADS,
    fields.HEAD_DIM,
    MODE,
)
_PREFILL_PLAN_SIZE = Struct(
    "tilepress_routed_prefill_plan_size_args",
    "Arguments of every routed prefill's plan size.",
    (
        fields.STRUCT_SIZE,
        _PLAN_WORDS_OUT,
        replace(fields.Q_ROWS, name="max_rows", doc="query rows that any plan of these sizes may hold"),
        _MAX_BATCH,
        *_PREFILL_GEOMETRY,
    ),
)
_PREFILL_PLAN = Struct(
    "tilepress_routed_prefill_plan_args",
    "Arguments of every routed prefill's planner.",
    (
        fields.STRUCT_SIZE,
        replace(
            Q_INDPTR_HOST, name="q_indptr", doc="request r has the query rows [q_indptr[r], q_indptr[r + 1])", optional=False
        ),
        Field(
            "plan",
            CType.OUT_I32,
            "the plan; copy it to the device",
            "int32 [plan_words]",
            Memory.HOST,
            align=4,
            count="plan_words",
        ),
        Field("plan_words", CType.I64, "length of plan", minimum=0),
        replace(fields.Q_ROWS, doc="rows of q and out that the calls will have"),
        Field("batch", CType.I32, "requests", minimum=0),
        *_PREFILL_GEOMETRY,
    ),
)

_INCUMBENT_LIMITS = (
    "mode that is none; the incumbent's mode in a library that was built without it",
    "in the incumbent's mode: lse, which it does not give; a plan of another mode, or built for other numbers; what the "
    "incumbent's own entry refuses, by its own name",
)
_DECODE_LIMITS = (
    f"in the incumbent's mode: a group (query heads per KV head) other than {', '.join(map(str, DECODE_GROUPS))}; a window "
    "where its entry has none",
)
_NOTE = (
    "In the incumbent's mode page ids must be valid, since FlashInfer does not check them, and status is not written; the "
    "output bits are those of the incumbent's entry called with the same plan."
)


def route(table: Table, operations: Mapping[str, OperationAbi]) -> tuple[Routed, ...]:
    """The routed entries that the table's rows make. Raises TableError where a row names an incumbent that cannot serve it."""
    names = {entry.name for entry in incumbent(table)}
    found: list[Routed] = []
    for family in table.family:
        if family.incumbent is None:
            continue
        chosen = _incumbent_of(family)
        needed = {chosen.name} if family.operation in DECODES else {chosen.name, TILE_PLANNER}
        found += _family_routes(family, chosen, needed <= names, operations[family.operation])
    return tuple(found)


def _incumbent_of(family: Family) -> Incumbent:
    variant = "windowed" if family.layer == "sliding" else "full"
    able = {
        entry.name: entry
        for entry in ENTRIES
        if entry.body in BODIES[family.operation]
        and entry.variant == variant
        and family.head_dim in (entry.head_dims or UNITS[entry.unit].head_dims)
        and {name for _, name in entry.params} <= ARGUMENTS.keys()
    }
    if family.incumbent not in able:
        raise TableError(
            f"[[family]] '{family.name}': field 'incumbent': '{family.incumbent}' cannot serve it; allowed: "
            f"{', '.join(able) or 'none'}. Correct the row and run again."
        )
    return able[family.incumbent]


def _family_routes(family: Family, chosen: Incumbent, served: bool, operation: OperationAbi) -> list[Routed]:
    name = f"tilepress_routed_{family.name}"
    theirs = chosen.name if served else "which this library was built without, a refusal"
    doc = f"{family.entry} or, in the incumbent's mode, {theirs}, as mode says."
    if family.operation in DECODES:
        size = _with_mode(
            DECODE_PLAN_SIZE.struct, "tilepress_routed_decode_plan_size_args", "Arguments of every routed decode's plan size."
        )
        plan = _with_mode(
            DECODE_PLAN.struct, "tilepress_routed_decode_plan_args", "Arguments of every routed decode's planner."
        )
        run = _with_mode(operation.struct, "tilepress_routed_decode_args", "Arguments of every routed decode.")
        return [
            Routed(
                name,
                run,
                f"{doc} {_NOTE} There a captured CUDA graph is replayed with plans of as many requests, "
                "and early changes nothing.",
                family,
                "run",
                family.entry,
                operation.struct,
                chosen,
                served,
                (*_INCUMBENT_LIMITS, *_DECODE_LIMITS, f"what {family.entry} refuses"),
            ),
            Routed(
                f"{name}_plan_size",
                size,
                f"Sizes of the plan and the workspace that {name} needs in a mode. Host code.",
                family,
                "plan_size",
                DECODE_PLAN_SIZE.name,
                DECODE_PLAN_SIZE.struct,
                chosen,
                served,
                (_INCUMBENT_LIMITS[0], *_DECODE_LIMITS, f"what {DECODE_PLAN_SIZE.name} refuses"),
            ),
            Routed(
                f"{name}_plan",
                plan,
                f"Plans a step of {name} in a mode. The incumbent's chunks are chunk_tokens long; 0: one length, which gives "
                "the longest request at most sm_count / num_kv_heads of them. Its windowed decode is not split. Host code. "
                "A refusal leaves the plan as it was.",
                family,
                "plan",
                DECODE_PLAN.name,
                DECODE_PLAN.struct,
                chosen,
                served,
                (
                    _INCUMBENT_LIMITS[0],
                    *_DECODE_LIMITS,
                    "in the incumbent's mode: a page list that is longer than the request needs",
                    f"what {DECODE_PLAN.name} refuses",
                ),
            ),
        ]
    run = _with_mode(
        operation.struct,
        f"tilepress_routed_{operation.name}_args",
        f"Arguments of every routed {operation.name}.",
        _PREFILL_PLAN_FIELDS,
    )
    return [
        Routed(
            name,
            run,
            f"{doc} {_NOTE}",
            family,
            "run",
            family.entry,
            operation.struct,
            chosen,
            served,
            (*_INCUMBENT_LIMITS, f"what {family.entry} refuses"),
        ),
        Routed(
            f"{name}_plan_size",
            _PREFILL_PLAN_SIZE,
            f"Size of the plan that {name} needs in a mode. Host code.",
            family,
            "plan_size",
            "",
            None,
            chosen,
            served,
            (_INCUMBENT_LIMITS[0],),
        ),
        Routed(
            f"{name}_plan",
            _PREFILL_PLAN,
            f"Plans a call of {name} in a mode: the incumbent's query tiles. Writes nothing in a mode that needs no plan. Host "
            "code. A refusal leaves the plan as it was.",
            family,
            "plan",
            "",
            None,
            chosen,
            served,
            (
                _INCUMBENT_LIMITS[0],
                "a q_indptr that does not start at 0 or above, decreases, or ends past q_rows",
                "plan_words that are too few",
            ),
        ),
    ]
