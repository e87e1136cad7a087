"""What the incumbent's units may be compiled for: facts of FlashInfer 0.6.14's FA2 headers. The table's rows choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Variant = Literal["full", "windowed"]

VARIANTS: tuple[Variant, ...] = ("full", "windowed")


@dataclass(frozen=True)
class Unit:
    """A translation unit: the head_dims and variants that its launch bodies can be instantiated for."""

    name: str
    head_dims: tuple[int, ...]
    variants: tuple[Variant, ...]


UNITS: Mapping[str, Unit] = MappingProxyType(
    {
        unit.name: unit
        for unit in (
            Unit("paged_attention", (64, 128, 256), VARIANTS),
            Unit("paged_attention_hd512", (512,), ("full",)),
        )
    }
)

# Groups (query heads per KV head) that its CUDA-core decode is instantiated for. The prefills take any.
DECODE_GROUPS = (1, 2, 3, 4, 8)

# By head_dim: the rows of a query tile that its prefills can be instantiated for, each with the fragments of 16 keys a warp
# takes at once. The headers choose those by the device's shared memory; this is their choice for 227 KiB a block and 228 KiB
# an SM, which is sm_90's. A launch that would choose another is refused.
KEY_FRAGMENTS: Mapping[int, Mapping[int, int]] = MappingProxyType(
    {
        64: {16: 4, 64: 8, 128: 4},
        128: {16: 2, 64: 8, 128: 4},
        256: {16: 1, 64: 4},
        512: {16: 1, 32: 2},
    }
)
