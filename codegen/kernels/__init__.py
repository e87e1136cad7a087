"""One module per operation: from a row's numbers to TileLang prim_funcs. Nothing else knows TileLang's DSL.

This file lists the operations without importing TileLang, so that the table is checked on a host that lacks it. A module
named here has two names: `PASS_CONFIGS`, TileLang's pass configuration, and `build(request)`, the prim_func that a
`lowered.Request` asks for. Kernel parameters and dynamic extents carry the names of the operation's argument struct
(codegen.abi) or of its launch values (csrc/<operation>.h), which is how the launcher binds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Stage:
    """One kernel launch of an operation.

    name: what it does; empty where the operation is one kernel. per_instance: compiled for each group and page format of a
    family, or once for the family. tma: whether a family's `tma` applies to it.
    """

    name: str
    per_instance: bool = True
    tma: bool = True


@dataclass(frozen=True)
class Operation:
    """What a kernel module can be asked for.

    stages: its kernels, in launch order. head_dims: columns of a head it compiles for. key_tile: keys a tile, which is the
    page size it needs. formats: page formats. max_group: query heads per KV head at most; group_multiple: what they must be a
    multiple of.
    """

    name: str
    module: str
    stages: tuple[Stage, ...]
    head_dims: tuple[int, ...]
    key_tile: int
    formats: tuple[str, ...]
    max_group: int
    group_multiple: int = 1


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        operation.name: operation
        for operation in (
            Operation(
                name="prefill",
                module="codegen.kernels.prefill",
                stages=(Stage(""),),
                head_dims=(512,),
                key_tile=64,
                formats=("split", "folded"),
                max_group=32,
                group_multiple=2,
            ),
            Operation(
                name="sliding_prefill",
                module="codegen.kernels.sliding_prefill",
                stages=(Stage(""),),
                head_dims=(256,),
                key_tile=64,
                formats=("split",),
                max_group=32,
                group_multiple=2,
            ),
            Operation(
                name="sliding_decode",
                module="codegen.kernels.sliding_decode",
                stages=(Stage(""),),
                head_dims=(256,),
                key_tile=64,
                formats=("split",),
                max_group=8,
            ),
            Operation(
                name="decode",
                module="codegen.kernels.decode",
                stages=(Stage("partial"), Stage("merge", per_instance=False, tma=False)),
                head_dims=(256, 512),
                key_tile=64,
                formats=("split", "folded"),
                max_group=16,
            ),
        )
    }
)
