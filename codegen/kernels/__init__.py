"""One module per operation: from a row's numbers to a TileLang prim_func. Nothing else knows TileLang's DSL.

This file lists the operations without importing TileLang, so that the table is checked on a host that lacks it. A module
named here has two names: `PASS_CONFIGS`, TileLang's pass configuration, and `build(name, head_dim, page_size, group,
page_format)`, the prim_func. Kernel parameters and dynamic extents carry the names of the operation's argument struct
(`abi.py`), which is how the launcher binds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Operation:
    """What a kernel module can be asked for.

    head_dims: columns of a head it compiles for. key_tile: keys a tile, which is the page size it needs.
    formats: page formats. max_group: query heads per KV head at most.
    """

    name: str
    module: str
    head_dims: tuple[int, ...]
    key_tile: int
    formats: tuple[str, ...]
    max_group: int


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        operation.name: operation
        for operation in (
            Operation(
                name="prefill",
                module="codegen.kernels.prefill",
                head_dims=(512,),
                key_tile=64,
                formats=("split",),
                max_group=32,
            ),
        )
    }
)
