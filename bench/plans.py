"""Decode plans and their workspaces, built to be hostile: every word that a plan does not use is 0xFFFFFFFF, and so is all of
the workspace. The layout is that of csrc/decode_plan.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from bench.inputs import Batch

SM_COUNT = 132  # an H200's
HEADER_WORDS = 16
HEADER_USED = 11
BATCH, ITEMS, KV_HEADS, MAX_BATCH, MAX_SLOTS, HEADER_SM_COUNT, PAGE_IDS = 1, 2, 4, 7, 8, 9, 10  # words of the header
FIRST_SLOT, SPLITS, CHAINED, REQUEST_WORDS = 0, 1, 6, 8
REQUEST, KV_HEAD, FIRST_PAGE, TILES, SLOT, LAST_LEN, HIDDEN, NEXT, ITEM_WORDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
GUARD_WORDS = 64  # behind a plan and a workspace


@dataclass(frozen=True)
class Limits:
    """What a plan is sized for. max_slots 0: what max_batch requests need at most under the rule of chunk_tokens 0."""

    max_batch: int
    max_slots: int = 0
    chunk_tokens: int = 0
    sm_count: int = SM_COUNT


@dataclass(frozen=True)
class Parts:
    """Views of a plan: header int32 [16], requests [max_batch, 8], items [sm_count + max_slots, 8], of which the first sm_count
    are the CTAs' first ones, empty for a CTA that has none."""

    header: torch.Tensor
    requests: torch.Tensor
    items: torch.Tensor


def parts(words: torch.Tensor, header: Sequence[int]) -> Parts:
    """The parts of the plan in `words`, int32, host or device; `header` is its first words."""
    max_batch, max_slots, sm_count = header[MAX_BATCH], header[MAX_SLOTS], header[HEADER_SM_COUNT]
    requests = HEADER_WORDS
    max_items = sm_count + max_slots
    items = requests + _round_up(max_batch * REQUEST_WORDS)
    return Parts(
        words[:HEADER_WORDS],
        words[requests : requests + max_batch * REQUEST_WORDS].view(max_batch, REQUEST_WORDS),
        words[items : items + max_items * ITEM_WORDS].view(max_items, ITEM_WORDS),
    )


def _round_up(words: int) -> int:
    return (words + 3) // 4 * 4


@dataclass(frozen=True)
class Plan:
    """A plan, int32 [words + guard] on the host and on the device, and its workspace, int32 [words + guard].

    row_offset: the row of q that request 0 has.
    """

    host: torch.Tensor
    device: torch.Tensor
    workspace: torch.Tensor
    workspace_bytes: int
    row_offset: int

    @property
    def header(self) -> list[int]:
        """The plan's first words."""
        return [int(word) for word in self.host[:HEADER_WORDS].tolist()]

    @property
    def host_parts(self) -> Parts:
        """Views of the host copy."""
        return parts(self.host, self.header)

    @property
    def device_parts(self) -> Parts:
        """Views of the device copy."""
        return parts(self.device, self.header)

    @property
    def slots(self) -> int:
        """How many slots of the workspace its requests use."""
        rows = self.host_parts.requests[: self.header[BATCH]].tolist()
        return max((row[FIRST_SLOT] + self.header[KV_HEADS] * row[SPLITS] for row in rows), default=0)

    def partials(self, group: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the workspace, fp32: weighed values [max_slots, group, head_dim] and, [max_slots, group, 2], the base-2
        maximum of their scores and the sum of the weights."""
        slots = self.header[MAX_SLOTS]
        values = self.workspace.view(torch.float32)
        outs = slots * group * head_dim
        return values[:outs].view(slots, group, head_dim), values[outs : outs + 2 * slots * group].view(slots, group, 2)

    def load(self, other: Plan) -> None:
        """Copies another plan of the same limits over this one's device copy, as a server does before it replays a graph."""
        self.device.copy_(other.device)


def make_plan(
    library: ModuleType, batch: Batch, limits: Limits, *, kv_len: Sequence[int] | None = None, hostile: bool = True
) -> Plan:
    """A plan for the requests of `batch` and its window, with a workspace. kv_len: tokens of each request, if not all that its
    pages hold. hostile: put 0xFF wherever the plan's words mean nothing."""
    shared = limit_fields(batch, limits)
    plan = plan_with(library.decode_plan_size, library.decode_plan, batch, shared, kv_len)
    if hostile:
        _poison(plan.host)
        plan.device.copy_(plan.host)
    return plan


def plan_with(
    size: Callable[..., Any], planner: Callable[..., Any], batch: Batch, shared: dict[str, int], kv_len: Sequence[int] | None
) -> Plan:
    """A plan of either kind of planner, with a workspace that is 0xFF all over. shared: the fields that both entries take."""
    sizes = torch.full((2,), -1, dtype=torch.int64)
    size(
        plan_words_out=sizes.data_ptr(),
        workspace_bytes_out=sizes.data_ptr() + 8,
        head_dim=batch.geometry.head_dim,
        **shared,
    )
    words, workspace_bytes = sizes.tolist()
    spans = batch.spans()
    if kv_len is None:
        kv_len = [span.context(batch.geometry.page_size) for span in spans]
    lengths = torch.tensor(kv_len, dtype=torch.int32)
    page_indptr = batch.page_indptr[: batch.size + 1].cpu()
    kv_origin = None if batch.kv_origin is None else batch.kv_origin[: batch.size].cpu()
    host = torch.full((words + GUARD_WORDS,), -1, dtype=torch.int32)
    planner(
        kv_len=lengths.data_ptr(),
        page_indptr=page_indptr.data_ptr(),
        kv_origin=0 if kv_origin is None else kv_origin.data_ptr(),
        plan=host.data_ptr(),
        plan_words=words,
        batch=batch.size,
        window=batch.window,
        **shared,
    )
    device = batch.q.device
    return Plan(
        host=host,
        device=host.to(device, copy=True),
        workspace=torch.full((workspace_bytes // 4 + GUARD_WORDS,), -1, dtype=torch.int32, device=device),
        workspace_bytes=workspace_bytes,
        row_offset=spans[0].q_from if spans else 0,
    )


def limit_fields(batch: Batch, limits: Limits) -> dict[str, int]:
    """The fields that both of a planner's entries take."""
    return {
        "max_batch": limits.max_batch,
        "max_slots": limits.max_slots,
        "num_q_heads": batch.geometry.q_heads,
        "num_kv_heads": batch.geometry.kv_heads,
        "page_size": batch.geometry.page_size,
        "page_format": batch.geometry.page_format_code,
        "sm_count": limits.sm_count,
        "chunk_tokens": limits.chunk_tokens,
    }


def _poison(host: torch.Tensor) -> None:
    """Overwrites what lies behind the header's words, the batch's requests and the items."""
    header = [int(word) for word in host[:HEADER_WORDS].tolist()]
    views = parts(host, header)
    views.header[HEADER_USED:] = -1
    views.requests[header[BATCH] :] = -1
    views.items[max(header[HEADER_SM_COUNT], int(views.items[:, NEXT].max()) + 1) :] = -1
