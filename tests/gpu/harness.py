"""One case through the library, its JIT twin and the fp32 reference."""

from __future__ import annotations

import functools
import importlib
import itertools
from types import ModuleType
from typing import Any

import torch

from bench.inputs import TILE, Batch, Geometry
from bench.library import prefill
from bench.outputs import Outputs, make_outputs
from bench.reference import (
    LSE_TOLERANCE,
    OUT_TOLERANCE,
    ROW_TOLERANCE,
    Reference,
    attention,
    lse_error,
    out_error,
    row_error,
)

DEVICE = torch.device("cuda")
GROUPS = (4, 8, 16)
# KV heads that some model or shard of it has, one set a group: 32/8, 32/4 and 16/1; and the smallest ones.
MODEL_KV_HEADS = {4: 8, 8: 4, 16: 1}


def geometry(group: int, kv_heads: int) -> Geometry:
    """Three layers a page, of which the middle one is used."""
    return Geometry(q_heads=group * kv_heads, kv_heads=kv_heads)


def run(library: ModuleType, batch: Batch, *, lse: bool = True, status: bool = True, host_indptr: bool = True) -> Outputs:
    """The library's outputs, once the device is done."""
    outputs = make_outputs(batch)
    prefill(library, batch, outputs, lse=lse, status=status, host_indptr=host_indptr)
    torch.cuda.synchronize()
    return outputs


@functools.cache
def twin(group: int, head_dim: int, page_size: int) -> Any:
    """The kernel of one instance, compiled by TileLang's JIT."""
    tilelang = importlib.import_module("tilelang")
    kernels = importlib.import_module("codegen.kernels.prefill")
    return tilelang.compile(
        kernels.build(f"twin_prefill_g{group}_split", head_dim, page_size, group, "split"),
        target={"kind": "cuda", "arch": "sm_90a"},
        pass_configs=dict(kernels.PASS_CONFIGS),
        execution_backend="cython",
    )


def query_tiles(batch: Batch, host_indptr: bool) -> int:
    """Tile slots of a call: up to the last that a request owns, or as many as any q_indptr may need without a host
    copy."""
    if not host_indptr:
        return batch.q_rows // TILE + batch.size
    indptr = batch.q_indptr[: batch.size + 1].tolist()
    slots = 0
    for r, (start, end) in enumerate(itertools.pairwise(indptr)):
        if end > start:
            slots = start // TILE + r + -(-(end - start) // TILE)
    return slots


def run_twin(batch: Batch, *, host_indptr: bool = True) -> Outputs:
    """The twin's outputs, for the same inputs and the launch values that csrc/prefill.h computes."""
    shape = batch.geometry
    outputs = make_outputs(batch)
    torch.cuda.synchronize()
    twin(shape.group, shape.head_dim, shape.page_size)(
        batch.q,
        batch.pool.view(-1, TILE, shape.kv_heads, shape.head_dim),
        batch.page_ids[: batch.num_page_ids],
        batch.page_indptr[: batch.size + 1],
        batch.last_page_len[: batch.size],
        batch.q_indptr[: batch.size + 1],
        outputs.out,
        outputs.lse,
        outputs.status,
        batch.sm_scale,
        batch.num_pages,
        shape.rows_per_page // TILE,
        shape.layer_row // TILE,
        query_tiles(batch, host_indptr),
        1,  # want_lse
        1,  # want_status
    )
    torch.cuda.synchronize()
    return outputs


def owned_rows(batch: Batch) -> set[int]:
    """Rows of q that a request owns."""
    return {row for span in batch.spans() for row in range(span.q_from, span.q_to)}


def assert_close(outputs: Outputs, expected: Reference) -> None:
    """Holds the rows of `expected` against it. Raises AssertionError; a NaN anywhere in them is one."""
    out = out_error(outputs.out[expected.rows], expected.out)
    row = row_error(outputs.out[expected.rows], expected.out)
    lse = lse_error(outputs.lse[expected.rows], expected.lse)
    assert out <= OUT_TOLERANCE, f"out is {out:.5f} off the fp32 reference beyond bf16 rounding; allowed {OUT_TOLERANCE}"
    assert row <= ROW_TOLERANCE, f"a row of out is {row:.5f} of its length off the fp32 reference; allowed {ROW_TOLERANCE}"
    assert lse <= LSE_TOLERANCE, f"lse is {lse:.6f} off the fp32 reference; allowed {LSE_TOLERANCE}"
    blind = expected.lse == float("-inf")  # rows that see no key: exact, not merely close
    assert not outputs.out[expected.rows][blind].any(), "a row without a visible key has a non-zero output"


def assert_only_owned_rows(batch: Batch, outputs: Outputs) -> None:
    """Every row that a request owns was written, and no other, guard zones included."""
    owned = owned_rows(batch)
    for name, touched in zip(("out", "lse"), outputs.touched_rows(), strict=True):
        assert touched == owned, (
            f"{name}: written though nobody's {sorted(touched - owned)[:8]}, not written {sorted(owned - touched)[:8]}"
        )


def check(library: ModuleType, batch: Batch, *, status: int = 0, host_indptr: bool = True) -> Outputs:
    """The library on `batch`: right, bit-identical to its twin, nothing else written, `status` bits and no others."""
    outputs = run(library, batch, host_indptr=host_indptr)
    assert_only_owned_rows(batch, outputs)
    assert_close(outputs, attention(batch))
    bits = outputs.status_bits()
    assert bits == status, f"status bits {bits:#x}, expected {status:#x}"
    other = run_twin(batch, host_indptr=host_indptr)
    assert outputs.same_bits(other), "the library and its JIT twin differ in bits"
    assert other.status_bits() == status, "the JIT twin reports other status bits"
    return outputs
