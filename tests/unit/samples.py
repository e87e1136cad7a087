"""Default records for the unit tests. A test takes one, replaces a field and says what must follow."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from codegen import abi
from codegen.gates import Subject
from codegen.lowered import Lowered, Param, TensorMap
from codegen.rendering import Context
from codegen.table import Arch, Table, parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
COMMITTED: dict[str, Any] = tomllib.loads((ROOT / "families.toml").read_text(encoding="utf-8"))
FAMILY: dict[str, Any] = {
    "name": "sample_prefill",
    "operation": "prefill",
    "layer": "global",
    "head_dim": 512,
    "page_size": 64,
    "groups": [8],
    "formats": ["split"],
    "tma": True,
}
DECODE_FAMILY: dict[str, Any] = {**FAMILY, "name": "sample_decode", "operation": "decode"}
DELETED = object()


def raw(**edits: object) -> dict[str, Any]:
    """The committed table as parsed TOML, with edits: family__0__groups=[4] sets family[0].groups; DELETED removes."""
    table = copy.deepcopy(COMMITTED)
    for path, value in edits.items():
        place: Any = table
        *steps, last = (int(step) if step.isdigit() else step for step in path.split("__"))
        for step in steps:
            place = place[step]
        if value is DELETED:
            del place[last]
        else:
            place[last] = value
    return table


def table(*families: dict[str, Any], incumbent: bool = False) -> Table:
    """A table with the committed rows but for its families: those given, by default one with group 8.

    incumbent: with the incumbent's rows too.
    """
    whole = parse(raw(family=[FAMILY | changes for changes in families] or [FAMILY]), "families.toml")
    return whole if incumbent else whole.select((), ("incumbent",))


ARCH = Arch(
    name="sm_90",
    target="sm_90a",
    compute_capability="9.0",
    shared_memory_bytes=232448,
    reserved_shared_memory_bytes=1024,
    max_registers=65536,
)

PARAMS = "bfloat16_t* __restrict__ out, const __grid_constant__ CUtensorMap q_desc, int q_rows"
SOURCE = f"""\
#include <cuda.h>
#include <cuda_bf16.h>
typedef __nv_bfloat16 bfloat16_t;
namespace tl {{ __device__ void tma_load(const CUtensorMap &, int) {{}} }}
extern "C" __global__ void sample_kernel({PARAMS});
extern "C" __global__ void __launch_bounds__(128, 1) sample_kernel({PARAMS}) {{
  tl::tma_load(q_desc, 0);
  out[0] = __float2bfloat16(q_rows);
}}
"""

Q_MAP = TensorMap(
    name="q_desc",
    tensor="q",
    dtype="CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    dims=("512", "q_rows", "(num_kv_heads * 8)"),
    strides=("(static_cast<int64_t>(num_kv_heads) * 8192)", "1024"),
    box=("64", "64", "1"),
    element_strides=("1", "1", "1"),
    interleave="CU_TENSOR_MAP_INTERLEAVE_NONE",
    swizzle="CU_TENSOR_MAP_SWIZZLE_128B",
    l2_promotion="CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
    oob_fill="CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
)

LOWERED = Lowered(
    name="sample_prefill_g8_split",
    kernel="sample_kernel",
    source=SOURCE,
    params=(
        Param("out", "pointer", "bfloat16"),
        Param("q_desc", "tensor_map", ""),
        Param("q_rows", "scalar", "int32"),
    ),
    tensor_maps=(Q_MAP,),
    grid=("8", "q_tiles", "num_kv_heads"),
    block=(128, 1, 1),
    dynamic_shared_bytes=65536,
    symbols=("num_kv_heads", "q_rows", "q_tiles"),
    nvcc_flags=(),
    tilelang="0.1.15",
)


def lowered(**changes: Any) -> Lowered:
    """A tiny kernel with one pointer, one tensor map and one scalar, with fields replaced."""
    return replace(LOWERED, **changes)


def subject(arch: Arch = ARCH, tma: bool = True, **changes: Any) -> Subject:
    """A gate's subject over the tiny kernel with fields replaced."""
    return Subject(lowered(**changes), arch, frozenset({"num_kv_heads", "out", "q", "q_rows", "q_tiles"}), tma)


def entry(**changes: Any) -> abi.FamilyEntry:
    """The entry of the sample family, with values of its row replaced."""
    return abi.family_entries(table(changes))[0]


def context(*families: dict[str, Any], tier: Literal["generate", "stub"] = "generate") -> Context:
    """What files are rendered with, over `table`."""
    return Context(table(*families), ARCH, tier)
