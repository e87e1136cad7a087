"""The routed entries: the knob's mode, and plans and calls in a mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from bench import library as generated
from bench.inputs import Batch
from bench.outputs import Outputs
from bench.plans import GUARD_WORDS, HEADER_WORDS, Limits, Plan, limit_fields, plan_with

UNSPLIT = 1 << 30  # tokens of a chunk that holds any context


def mode_of(library: ModuleType, text: str | None) -> int:
    """The mode that the knob's value names; None: it is unset. Raises ValueError for a value that names none."""
    found = torch.full((1,), -1, dtype=torch.int32)
    if library.parse_mode(text, found.data_ptr()) != library.OK:
        raise ValueError(library.last_error())
    return int(found.item())


def entry(library: ModuleType, operation: str, batch: Batch) -> Callable[..., Any]:
    """The routed entry of the batch's layer. operation: prefill or decode, with _plan_size or _plan behind it for a planner."""
    found: Callable[..., Any] = getattr(library, f"routed_{'sliding' if batch.geometry.sliding else 'global'}_{operation}")
    return found


def _in_mode(fields: dict[str, Any], mode: int) -> dict[str, Any]:
    """A generated entry's fields as the routed one has them."""
    return {name: value for name, value in fields.items() if name != "page_format"} | {"mode": mode}


def prefill_plan(library: ModuleType, batch: Batch, mode: int) -> Plan:
    """A plan for the rows of `batch`: of no words in a mode that needs none."""
    shape = batch.geometry
    shared = {"num_q_heads": shape.q_heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "mode": mode}
    words = torch.full((1,), -1, dtype=torch.int64)
    size = entry(library, "prefill_plan_size", batch)
    size(plan_words_out=words.data_ptr(), max_rows=batch.q_rows, max_batch=batch.size, **shared)
    q_indptr = batch.q_indptr[: batch.size + 1].cpu()
    host = torch.full((int(words.item()) + GUARD_WORDS,), -1, dtype=torch.int32)
    entry(library, "prefill_plan", batch)(
        q_indptr=q_indptr.data_ptr(),
        plan=host.data_ptr(),
        plan_words=int(words.item()),
        q_rows=batch.q_rows,
        batch=batch.size,
        **shared,
    )
    device = batch.q.device
    return Plan(host, host.to(device, copy=True), torch.empty(0, dtype=torch.int32, device=device), 0, 0)


def prefill_fields(
    batch: Batch,
    mode: int,
    plan: Plan,
    outputs: Outputs,
    *,
    status: bool = True,
    q_indptr_host: torch.Tensor | None = None,
) -> dict[str, int | float]:
    """The routed prefill's keyword arguments on the current stream, without lse, which the incumbent does not give."""
    fields = generated.prefill_fields(batch, outputs, lse=False, status=status, q_indptr_host=q_indptr_host)
    return {**_in_mode(fields, mode), "plan": plan.device.data_ptr(), "plan_host": plan.host.data_ptr()}


def prefill(library: ModuleType, batch: Batch, mode: int, plan: Plan, outputs: Outputs, *, host_indptr: bool = True) -> None:
    """One call of the prefill on the current stream."""
    host = batch.q_indptr.cpu() if host_indptr else None
    entry(library, "prefill", batch)(**prefill_fields(batch, mode, plan, outputs, q_indptr_host=host))


def decode_plan(library: ModuleType, batch: Batch, mode: int, limits: Limits, *, kv_len: Sequence[int] | None = None) -> Plan:
    """A plan for the requests of `batch` and its window, with a workspace that is 0xFF all over. kv_len: tokens of each
    request, if not all that its pages hold."""
    shared = _in_mode(limit_fields(batch, limits), mode)
    return plan_with(entry(library, "decode_plan_size", batch), entry(library, "decode_plan", batch), batch, shared, kv_len)


def decode(library: ModuleType, batch: Batch, mode: int, plan: Plan, outputs: Outputs, *, status: bool = True) -> None:
    """One call of the decode on the current stream, without lse, which the incumbent does not give."""
    fields = generated.decode_fields(batch, plan, outputs, lse=False, status=status)
    entry(library, "decode", batch)(**_in_mode(fields, mode))


def blocks(plan: Plan) -> int:
    """Blocks of a plan in the incumbent's mode, as csrc/routes.h lays it out."""
    return int(plan.host[2])


def chunk_tokens(plan: Plan) -> int:
    """Tokens of a chunk of a plan in the incumbent's mode; 0 where it does not split."""
    found = int(plan.host[HEADER_WORDS])
    return found if found < UNSPLIT else 0
