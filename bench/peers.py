"""The calls that each arm makes on a batch: the library's, in a generated or the incumbent's mode, and those of others.

All read the batch's own pool but FlexAttention, which has no pages: its keys and values are gathered once, outside what is
timed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

import torch

from bench import library as generated
from bench import routes
from bench.arms import ARMS, Skipped
from bench.inputs import Batch
from bench.outputs import Outputs
from bench.plans import ITEMS, Limits, make_plan
from bench.reference import OUT_TOLERANCE, Reference, out_error, row_error

# The others may round partial results to bf16, too.
PEER_TOLERANCE = 2 * OUT_TOLERANCE
# Of a row of one head, taken as a vector: a key tile left out of 163,336 keys is 0.02.
ROW_LIMIT = 0.01
PEER_REPEATS = 7  # samples of an arm that is not the library's own kernels: some are slow

R = TypeVar("R")


class Unavailable(Exception):
    """An arm cannot serve a case; the message says why."""


@dataclass(frozen=True)
class Call:
    """run: one call on the stream that is then current. out: what calls have left, bf16 [q_rows, q_heads, head_dim]. kept: what
    its pointers point at."""

    run: Callable[[], object]
    out: Callable[[], torch.Tensor]
    kept: tuple[object, ...] = ()


@dataclass(frozen=True)
class Decode:
    """Calls over sets of equal lengths. items: runs of pages that the plan has, 0 where there is no plan. chunk_tokens: of the
    incumbent's chunks, else 0."""

    calls: Sequence[Call]
    items: int = 0
    chunk_tokens: int = 0


def attempt(arm: str, case: str, measure: Callable[[], R]) -> R | Skipped:
    """What `measure` returns, or why the arm has no figure: it cannot serve the case, or an optional arm failed."""
    try:
        return measure()
    except Unavailable as reason:
        return Skipped(arm, case, str(reason))
    except Exception as error:
        if not ARMS[arm].optional:
            raise
        lines = str(error).strip().splitlines() or [""]
        return Skipped(arm, case, f"{type(error).__name__}: {lines[0][:200]}")


def repeats_of(arm: str, repeats: int) -> int:
    """Samples of an arm where the library's own kernels have `repeats`."""
    return repeats if ARMS[arm].own else min(repeats, PEER_REPEATS)


def check(arm: str, case: str, out: torch.Tensor, expected: Reference) -> float:
    """How far `out`, bf16 [q_rows, q_heads, head_dim], is from the reference's rows. Raises ArithmeticError where too far."""
    found = out[expected.rows]
    limit = OUT_TOLERANCE if ARMS[arm].own else PEER_TOLERANCE
    error, row = out_error(found, expected.out), row_error(found, expected.out)
    if not (error <= limit and row <= ROW_LIMIT):
        raise ArithmeticError(
            f"{case}, {arm}: out is {error:.5f} off the fp32 reference, a row {row:.4f} of its length; allowed {limit} and "
            f"{ROW_LIMIT}"
        )
    return error


def prefill(arm: str, library: ModuleType, batch: Batch, outputs: Outputs) -> Call:
    """An arm's prefill of `batch`, into `outputs` where it takes a buffer. Raises Unavailable."""
    if arm == "generated":
        host = batch.q_indptr.cpu()
        fields = generated.prefill_fields(batch, outputs, lse=False, status=False, q_indptr_host=host)
        entry = generated.entry(library, "prefill", batch)
        return Call(functools.partial(entry, **fields), functools.partial(_buffer, outputs), (batch, outputs, host))
    if arm == "incumbent":
        mode = library.MODE_INCUMBENT
        plan = _served(library, lambda: routes.prefill_plan(library, batch, mode))
        host = batch.q_indptr.cpu()
        fields = routes.prefill_fields(batch, mode, plan, outputs, status=False, q_indptr_host=host)
        entry = routes.entry(library, "prefill", batch)
        return Call(functools.partial(entry, **fields), functools.partial(_buffer, outputs), (batch, outputs, plan, host))
    return _other(arm, batch)


def decode(arm: str, library: ModuleType, sets: Sequence[tuple[Batch, Outputs]], limits: Limits) -> Decode:
    """An arm's decode of each of `sets`, whose equal lengths make equal plans: one serves them all. Raises Unavailable."""
    if ARMS[arm].own:
        early = arm == "early"  # older pages may be read while the call before runs: it writes none of them
        plan = make_plan(library, sets[0][0], limits, hostile=False)
        calls = [
            Call(
                functools.partial(generated.decode, library, batch, plan, outputs, lse=False, status=False, early=early),
                functools.partial(_buffer, outputs),
            )
            for batch, outputs in sets
        ]
        return Decode(calls, items=plan.header[ITEMS])
    if arm == "incumbent":
        mode = library.MODE_INCUMBENT
        plan = _served(library, lambda: routes.decode_plan(library, sets[0][0], mode, limits))
        calls = [
            Call(
                functools.partial(routes.decode, library, batch, mode, plan, outputs, status=False),
                functools.partial(_buffer, outputs),
            )
            for batch, outputs in sets
        ]
        return Decode(calls, items=routes.blocks(plan), chunk_tokens=routes.chunk_tokens(plan))
    return Decode([_other(arm, batch) for batch, _ in sets])


def _buffer(outputs: Outputs) -> torch.Tensor:
    return outputs.out


def _served(library: ModuleType, plan: Callable[[], R]) -> R:
    """What `plan` returns; a mode or a geometry that the library has nothing for makes the arm unavailable."""
    try:
        return plan()
    except library.Error as error:
        if getattr(error, "code", None) != library.UNSUPPORTED:
            raise
        raise Unavailable(str(error)) from error


def _other(arm: str, batch: Batch) -> Call:
    return {"flex": _flex, "fa4": _fa4}[arm](batch)


@dataclass
class _Last:
    """A call that makes its own output, and the last one that it made."""

    call: Callable[[], torch.Tensor]
    value: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        self.value[:] = [self.call()]


def _lengths(batch: Batch) -> tuple[int, int]:
    """Query rows and resident tokens of every request, which must have equal ones."""
    geometry = batch.geometry
    found = {(span.q_to - span.q_from, span.resident(geometry.page_size)) for span in batch.spans()}
    if len(found) != 1 or batch.q_rows % batch.size:
        raise Unavailable("the requests have different lengths")
    return next(iter(found))


def _tiles(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the split pool: the layer's K and V, bf16 [num_pages, page_size, kv_heads, head_dim] each."""
    geometry = batch.geometry
    paged = batch.pool.view(-1, geometry.rows_per_page, geometry.kv_heads, geometry.head_dim)
    start = geometry.layer_row
    middle = start + geometry.page_size
    return paged[:, start:middle], paged[:, middle : middle + geometry.page_size]


def _pages(batch: Batch) -> torch.Tensor:
    """int32 [size, pages of a request]."""
    return torch.tensor([span.page_ids for span in batch.spans()], dtype=torch.int32, device=batch.q.device)


def _flex(batch: Batch) -> Call:
    """FlexAttention over contiguous keys and values: those of the released front are not among them."""
    geometry, (rows, tokens) = batch.geometry, _lengths(batch)
    pages = _pages(batch).long()

    def gathered(tiles: torch.Tensor) -> torch.Tensor:
        found = tiles[pages].flatten(1, 2)[:, :tokens]
        return found.transpose(1, 2).contiguous()

    k, v = (gathered(tiles) for tiles in _tiles(batch))
    q = batch.q.view(batch.size, rows, geometry.q_heads, geometry.head_dim).transpose(1, 2).contiguous()
    mask = _mask(rows, tokens, batch.window or tokens, batch.q.device)
    compiled = _compiled_flex(tuple(q.shape), tuple(k.shape))
    last = _Last(lambda: compiled(q, k, v, block_mask=mask, scale=batch.sm_scale, enable_gqa=True))
    return Call(last.run, lambda: last.value[0].transpose(1, 2).reshape(batch.q.shape), (q, k, v, mask))


@functools.cache
def _mask(rows: int, tokens: int, window: int, device: torch.device) -> Any:
    """FlexAttention's block mask of the last `rows` of `tokens`; None where every row sees all. One object for all batches of a
    size: another one would be compiled for again."""
    first = tokens - rows
    if rows == 1 and window >= tokens:
        return None

    def seen(_request: Any, _head: Any, row: Any, key: Any) -> Any:
        return (key <= row + first) & (key > row + first - window)

    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return flex.create_block_mask(seen, None, None, rows, tokens, device=device)


@functools.cache
def _compiled_flex(*_shapes: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """One function for each shape: past a number of shapes, torch.compile would run the next one uncompiled."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    importlib.import_module("torch._dynamo").reset()
    compiled: Callable[..., torch.Tensor] = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
    return compiled


def _fa4(batch: Batch) -> Call:
    """FlashAttention-4 over the paged pool. Its keys past a request's last are zeroed: it multiplies them by zero."""
    if batch.geometry.head_dim > 256:
        raise Unavailable(f"it has no head_dim {batch.geometry.head_dim} on sm_90")
    try:
        call = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func
    except Exception as error:  # its own imports fail in many ways
        raise Unavailable(f"flash_attn.cute cannot be imported ({type(error).__name__}: {error})") from error
    rows, tokens = _lengths(batch)
    k, v = _tiles(batch)
    pages = _pages(batch)
    filled = tokens - (pages.shape[1] - 1) * batch.geometry.page_size
    for tiles in (k, v):
        tiles[pages[:, -1].long(), filled:] = 0
    fields = {
        "cu_seqlens_q": batch.q_indptr[: batch.size + 1].contiguous(),
        "seqused_k": torch.full((batch.size,), tokens, dtype=torch.int32, device=batch.q.device),
        "max_seqlen_q": rows,
        "max_seqlen_k": tokens,
        "page_table": pages,
        "softmax_scale": batch.sm_scale,
        "causal": True,
        "window_size": (batch.window_left, 0) if batch.window_left is not None else (None, None),
    }
    known = inspect.signature(call).parameters  # releases differ in the lengths that they ask for
    given = {name: value for name, value in fields.items() if name in known or not name.startswith("max_")}

    def run() -> torch.Tensor:
        result = call(batch.q, k, v, **given)
        return result[0] if isinstance(result, tuple) else result

    last = _Last(run)
    return Call(last.run, lambda: last.value[0].view(batch.q.shape), (given, k, v))
