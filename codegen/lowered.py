"""`Lowered`: everything that leaves the lowering step, as frozen records that travel as JSON between processes.

These records are the only channel from TileLang to the gates, the launcher and the manifest. Standard library only, since
the Python that has TileLang may have nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Request:
    """One kernel to lower, for one target such as sm_90a, with exactly one TileLang release.

    stage: which of the operation's kernels. group and page_format are 0 and empty for a stage that is compiled once a family.
    """

    name: str
    operation: str
    stage: str
    head_dim: int
    page_size: int
    group: int
    page_format: str
    target: str
    tilelang: str


@dataclass(frozen=True)
class Param:
    """A parameter of the CUDA kernel, in its order.

    kind: a device pointer, a scalar, or a tensor map. dtype: the element's or the scalar's TileLang dtype; empty for a map.
    """

    name: str
    kind: Literal["pointer", "scalar", "tensor_map"]
    dtype: str


@dataclass(frozen=True)
class TensorMap:
    """Arguments of cuTensorMapEncodeTiled, as C expressions over launch values. Strides in bytes, innermost left out."""

    name: str
    tensor: str
    dtype: str
    dims: tuple[str, ...]
    strides: tuple[str, ...]
    box: tuple[str, ...]
    element_strides: tuple[str, ...]
    interleave: str
    swizzle: str
    l2_promotion: str
    oob_fill: str

    @property
    def rank(self) -> int:
        """Dimensions of the tensor."""
        return len(self.dims)


@dataclass(frozen=True)
class Lowered:
    """A lowered kernel.

    source: the CUDA text. kernel: its __global__ entry. grid: three C expressions over launch values. block: threads.
    dynamic_shared_bytes: dynamic shared memory a block. symbols: the launch values that the expressions name.
    nvcc_flags: what the kernel must be compiled with to equal its JIT twin. cluster: blocks of a cluster along each axis of the
    grid. programmatic: launched while the kernel before it on the stream still runs, for whose results it waits itself (CUDA's
    programmatic dependent launch). log: what TileLang said while lowering.
    """

    name: str
    kernel: str
    source: str
    params: tuple[Param, ...]
    tensor_maps: tuple[TensorMap, ...]
    grid: tuple[str, str, str]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int
    symbols: tuple[str, ...]
    nvcc_flags: tuple[str, ...]
    tilelang: str
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False
    log: str = ""

    @property
    def clustered(self) -> bool:
        """Whether blocks are launched in clusters of more than one."""
        return self.cluster != (1, 1, 1)

    @property
    def bound_names(self) -> frozenset[str]:
        """Every name the launcher must be able to bind: pointers, scalars, tensors and extents."""
        params = {param.name for param in self.params if param.kind != "tensor_map"}
        tensors = {tensor_map.tensor for tensor_map in self.tensor_maps}
        return frozenset(params | tensors | set(self.symbols))
