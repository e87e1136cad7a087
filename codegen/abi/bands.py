"""Column bands: the part of a fused row that an entry reads."""

from __future__ import annotations

from codegen.abi.records import CType, Field

# A row stride of 2^31 elements by 2^31 rows still counts in 64 bits. 8 elements are 16 bytes, one access.
MAX_STRIDE = (1 << 31) - 8
COLUMNS = 8


def band(name: str, length: str) -> tuple[Field, ...]:
    """The three fields of the band of `<name>_in`. length: what its length must be."""
    return (
        Field(
            f"{name}_band_offset",
            CType.I64,
            f"first column of the band in a row of {name}_in",
            minimum=0,
            maximum=MAX_STRIDE,
            multiple=COLUMNS,
        ),
        Field(f"{name}_band_length", CType.I64, f"columns of the band: {length}", minimum=0, maximum=MAX_STRIDE),
        Field(
            f"{name}_row_stride",
            CType.I64,
            f"elements from one row of {name}_in to the next, which is the length of a fused row",
            minimum=0,
            maximum=MAX_STRIDE,
            multiple=COLUMNS,
        ),
    )


REFUSAL = "a band that is not as long as it must be, or runs past its row"
