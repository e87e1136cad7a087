"""The library under test, through its Python extension."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.inputs import Batch
from bench.outputs import Outputs
from bench.plans import Plan

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY_VARIABLE = "TILEPRESS_PYTHON_DIR"
PREFILL = "tilepress_global_prefill"
DECODE = "tilepress_global_decode"
SLIDING_PREFILL = "tilepress_sliding_prefill"
SLIDING_DECODE = "tilepress_sliding_decode"


class LibraryMissing(RuntimeError):
    """The Python extension cannot be imported."""


def load() -> ModuleType:
    """The module `tilepress` from TILEPRESS_PYTHON_DIR, by default out/python. Raises LibraryMissing."""
    directory = os.environ.get(DIRECTORY_VARIABLE) or str(ROOT / "out" / "python")
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module("tilepress")
    except ImportError as error:
        raise LibraryMissing(
            f"no Python extension in {directory} ({error}); build it with `python -m codegen build --python`, or name "
            f"its folder in {DIRECTORY_VARIABLE}"
        ) from error


def entry(library: ModuleType, operation: str, batch: Batch) -> Callable[..., Any]:
    """The entry that serves the batch's layer. operation: prefill or decode."""
    found: Callable[..., Any] = getattr(library, f"{'sliding' if batch.geometry.sliding else 'global'}_{operation}")
    return found


def prefill_fields(
    batch: Batch,
    outputs: Outputs,
    *,
    lse: bool = True,
    status: bool = True,
    q_indptr_host: torch.Tensor | None = None,
) -> dict[str, int | float]:
    """The keyword arguments of `tilepress.global_prefill` or `tilepress.sliding_prefill`, on the current stream.

    q_indptr_host: int32 [size + 1] on the host; it must stay alive until the call returns. Raises ValueError for a sliding
    batch without a window, or a global one with one or with origins.
    """
    geometry = batch.geometry
    if geometry.sliding != (batch.window_left is not None) or (batch.kv_origin is not None and not geometry.sliding):
        raise ValueError("a sliding prefill has a window and may have origins, a global one has neither")
    windowed: dict[str, int | float] = {}
    if batch.window_left is not None:
        origin = batch.kv_origin.data_ptr() if batch.kv_origin is not None else 0
        windowed = {"kv_origin": origin, "window_left": batch.window_left}
    return {
        **windowed,
        "q": batch.q.data_ptr(),
        "out": outputs.out.data_ptr(),
        "lse": outputs.lse.data_ptr() if lse else 0,
        "pool": batch.pool.data_ptr(),
        "page_ids": batch.page_ids.data_ptr(),
        "page_indptr": batch.page_indptr.data_ptr(),
        "last_page_len": batch.last_page_len.data_ptr(),
        "q_indptr": batch.q_indptr.data_ptr(),
        "q_indptr_host": q_indptr_host.data_ptr() if q_indptr_host is not None else 0,
        "status": outputs.status.data_ptr() if status else 0,
        "stream": torch.cuda.current_stream().cuda_stream,
        "num_pages": batch.num_pages,
        "rows_per_page": geometry.rows_per_page,
        "layer_row": geometry.layer_row,
        "q_rows": batch.q_rows,
        "num_page_ids": batch.num_page_ids,
        "batch": batch.size,
        "num_q_heads": geometry.q_heads,
        "num_kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "page_size": geometry.page_size,
        "page_format": geometry.page_format_code,
        "sm_scale": batch.sm_scale,
    }


def prefill(
    library: ModuleType,
    batch: Batch,
    outputs: Outputs,
    *,
    lse: bool = True,
    status: bool = True,
    host_indptr: bool = True,
) -> None:
    """One call of the prefill on the current stream. host_indptr: pass a host copy of q_indptr; else it is absent."""
    host = batch.q_indptr.cpu() if host_indptr else None
    entry(library, "prefill", batch)(**prefill_fields(batch, outputs, lse=lse, status=status, q_indptr_host=host))


def decode_fields(
    batch: Batch, plan: Plan, outputs: Outputs, *, lse: bool = True, status: bool = True, early: bool = False
) -> dict[str, int | float]:
    """The keyword arguments of `tilepress.global_decode` or `tilepress.sliding_decode`, on the current stream. Every request of
    `batch` has one query row, and they follow one another from row plan.row_offset on. The window is the plan's; a windowed
    decode needs no workspace and gets none."""
    geometry = batch.geometry
    return {
        "q": batch.q.data_ptr(),
        "out": outputs.out.data_ptr(),
        "lse": outputs.lse.data_ptr() if lse else 0,
        "pool": batch.pool.data_ptr(),
        "page_ids": batch.page_ids.data_ptr(),
        "plan": plan.device.data_ptr(),
        "plan_host": plan.host.data_ptr(),
        "workspace": 0 if geometry.sliding else plan.workspace.data_ptr(),
        "status": outputs.status.data_ptr() if status else 0,
        "stream": torch.cuda.current_stream().cuda_stream,
        "num_pages": batch.num_pages,
        "rows_per_page": geometry.rows_per_page,
        "layer_row": geometry.layer_row,
        "workspace_bytes": 0 if geometry.sliding else plan.workspace_bytes,
        "q_rows": batch.q_rows,
        "row_offset": plan.row_offset,
        "num_page_ids": batch.num_page_ids,
        "num_q_heads": geometry.q_heads,
        "num_kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "page_size": geometry.page_size,
        "page_format": geometry.page_format_code,
        "sm_scale": batch.sm_scale,
        "early": int(early),
    }


def decode(
    library: ModuleType,
    batch: Batch,
    plan: Plan,
    outputs: Outputs,
    *,
    lse: bool = True,
    status: bool = True,
    early: bool = False,
) -> None:
    """One call of the decode on the current stream."""
    entry(library, "decode", batch)(**decode_fields(batch, plan, outputs, lse=lse, status=status, early=early))


def merge_states(
    library: ModuleType, partials: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """The merge of dense partials, bf16 [sources, rows, heads, head_dim], with their lse, fp32 [sources, rows, heads]."""
    sources, rows, heads, head_dim = partials.shape
    library.merge_states(
        partials=partials.data_ptr(),
        partial_lse=partial_lse.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        stream=torch.cuda.current_stream().cuda_stream,
        source_stride=rows * heads * head_dim,
        lse_stride=rows * heads,
        num_sources=sources,
        num_rows=rows,
        num_heads=heads,
        head_dim=head_dim,
    )
