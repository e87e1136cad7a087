"""The modes that the knob chooses between: which kernels serve attention, over which global pool.

The one place for them: the ABI and the C sources take them from here. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

VARIABLE = "PEGAINFER_GLOBAL_ATTN"


@dataclass(frozen=True)
class Mode:
    """One mode.

    code: its TILEPRESS_MODE_* value. text: what the knob says. page_format: of the global layers' pool; the sliding layers' is
    split in every mode. generated: whether the generated kernels serve it, else the incumbent's.
    """

    name: str
    code: int
    text: str
    page_format: str
    generated: bool
    doc: str


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            Mode("incumbent", 1, "off", "split", False, "the incumbent's kernels; the global pool is split"),
            Mode("tilelang", 2, "tilelang", "split", True, "generated kernels; the global pool is split"),
            Mode("tilelang640", 3, "tilelang640", "folded", True, "generated kernels; the global pool is folded"),
        )
    }
)
