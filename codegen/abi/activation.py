"""The MLP's activation."""

from __future__ import annotations

from codegen.abi import fields
from codegen.abi.bands import COLUMNS, MAX_STRIDE, REFUSAL, band
from codegen.abi.records import CType, Field, HandWritten, Memory, Struct


def _input(name: str) -> Field:
    return Field(
        f"{name}_in",
        CType.IN,
        f"rows that hold the {name} projection as a column band",
        f"bf16 [rows, {name}_row_stride]",
        Memory.DEVICE,
        align=16,
    )


GELU_MUL = HandWritten(
    name="tilepress_gelu_mul",
    struct=Struct(
        name="tilepress_gelu_mul_args",
        doc="Arguments of tilepress_gelu_mul.",
        fields=(
            fields.STRUCT_SIZE,
            _input("gate"),
            _input("up"),
            Field(
                "out",
                CType.OUT,
                "gelu_tanh(gate) * up; must not overlap gate_in or up_in",
                "bf16 [rows, columns]",
                Memory.DEVICE,
                align=16,
            ),
            fields.STREAM,
            *band("gate", "columns"),
            *band("up", "columns"),
            Field("rows", CType.I32, "rows", minimum=0),
            Field("columns", CType.I32, "columns of out", minimum=COLUMNS, maximum=MAX_STRIDE, multiple=COLUMNS),
        ),
    ),
    doc=(
        "The activation of a gated MLP, gelu_tanh(gate) * up, of rows that may be stacked in one fused row: gate_in and up_in "
        "may be one buffer. gelu_tanh is computed in fp32 and rounded to bf16 before the product, which is rounded once."
    ),
    source="activation.cu",
    refusals=(REFUSAL,),
    empty_when="rows",
    checks="activation.h",
)
