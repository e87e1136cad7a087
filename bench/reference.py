"""Attention in fp32 PyTorch, from the bf16 inputs of a batch, and how far a result may be from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.inputs import Batch, Span, score_operand, value_operand

# The kernel sums in fp32 but rounds softmax weights to bf16 before P V: by a relative 2^-8 at most, the largest
# weight of all not at all. With |V| <= 1, as in inputs.py, that moves an output by 2^-8 * (n - 1) / (n + 1) at most
# where n keys are seen: below 0.002 up to three keys, and beyond those the roundings would have to agree in sign and
# size to reach it; 0.0014 is the most that was computed. What fp32 adds (exponentials, order of the sums) is some
# 1e-5. A decode rounds alike in each of its partials, and merges those in fp32 by weights that add up to 1: no more.
# A sliding row sees its window's keys only: no more either, far inside the 0.0043 and 0.011 that are asked of the sliding
# decode and prefill.
OUT_TOLERANCE = 0.002
# Over a long context outputs are small and OUT_TOLERANCE says little: a row of one head, taken as a vector, then says
# more. The roundings of the weights and of the output are random over it, 0.0017 of its length each and 0.0024
# together; a key tile left out of 40,000 keys is 0.04.
ROW_TOLERANCE = 0.004
# lse sees no bf16 rounding. A score is an fp32 sum of 512 exact products (256 in a sliding layer) whose magnitudes add up to
# about 512 * 0.05 * 0.64 = 16; summing them one by one errs by at most 512 * 2^-24 * 16 = 5e-4. The fast exponential and
# logarithm err by a few 1e-6.
LSE_TOLERANCE = 1e-3

SCORES_AT_ONCE = 1 << 27  # fp32 scores held at a time: 512 MB


@dataclass(frozen=True)
class Reference:
    """rows: int64 [n], rows of q. out: fp32 [n, q_heads, head_dim]. lse: fp32 [n, q_heads], natural logarithm."""

    rows: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def attention(batch: Batch, rows: Sequence[int] | None = None) -> Reference:
    """The rows that requests own, or those of them that are in `rows`, in ascending order of request and row.

    A row sees the keys up to its own position, those in its window, not released and on pages inside the pool; one that sees
    none gives zeros and -inf.
    """
    if torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError("the reference needs torch.set_float32_matmul_precision('highest'): TF32 is too coarse")
    wanted = None if rows is None else set(rows)
    geometry, device = batch.geometry, batch.q.device
    owned: list[int] = []
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for span in batch.spans():
        mine = [row for row in range(span.q_from, span.q_to) if wanted is None or row in wanted]
        if not mine:
            continue
        owned += mine
        index = torch.tensor(mine, device=device)
        positions = index + (span.context(geometry.page_size) - span.q_to)
        out = torch.zeros(len(mine), geometry.q_heads, geometry.head_dim, device=device)
        lse = torch.full((len(mine), geometry.q_heads), float("-inf"), device=device)
        if span.page_ids:
            keys = span.origin + torch.arange(span.resident(geometry.page_size), device=device)
            for kv_head in range(geometry.kv_heads):
                heads = slice(kv_head * geometry.group, (kv_head + 1) * geometry.group)
                k, v, live = _context(batch, span, kv_head)
                q = batch.q[index, heads].float()
                seen = Seen(keys, live, positions, batch.window_left)
                out[:, heads], lse[:, heads] = _attend(q, k, v, seen, batch.sm_scale)
        outs.append(out)
        lses.append(lse)
    if not owned:
        nothing = torch.empty(0, geometry.q_heads, geometry.head_dim, device=device)
        return Reference(torch.empty(0, dtype=torch.int64, device=device), nothing, nothing[..., 0])
    return Reference(torch.tensor(owned, device=device), torch.cat(outs), torch.cat(lses))


def few_rows(batch: Batch) -> Reference:
    """Attention of a few rows: the first and last, both sides of a tile's edge, and one in the middle."""
    last = batch.q_rows - 1
    return attention(batch, sorted({row for row in (0, 63, 64, last // 2, last) if row <= last}))


def _context(batch: Batch, span: Span, kv_head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V, fp32 [tokens, head_dim], of one KV head's resident tokens, and which of them live on a page inside the pool,
    bool [tokens].

    The others are zeros: what the pool holds there must not reach a sum, not even times zero.
    """
    geometry, device = batch.geometry, batch.q.device
    tokens = span.resident(geometry.page_size)
    ids = torch.tensor(span.page_ids, dtype=torch.int64, device=device)
    valid = (ids >= 0) & (ids < batch.num_pages)
    first = torch.where(valid, ids, 0) * geometry.rows_per_page + geometry.layer_row
    at = (first[:, None] + torch.arange(geometry.page_size, device=device)).flatten()[:tokens]
    live = valid.repeat_interleave(geometry.page_size)[:tokens]
    rows = batch.pool[at, kv_head].float().masked_fill_(~live[:, None], 0)
    if geometry.folded:
        return score_operand(geometry, rows), value_operand(geometry, rows), live
    return rows, batch.pool[at + geometry.page_size, kv_head].float().masked_fill_(~live[:, None], 0), live


@dataclass(frozen=True)
class Seen:
    """Which keys a row sees. keys: int64 [tokens], their positions; live: bool [tokens], on a page inside the pool; positions:
    int64 [n], of the rows; window_left: keys before its own that a row sees, None for all."""

    keys: torch.Tensor
    live: torch.Tensor
    positions: torch.Tensor
    window_left: int | None

    def hidden(self, some: slice) -> torch.Tensor:
        """bool [rows, tokens]: what these rows do not see."""
        rows = self.positions[some, None]
        hidden = (self.keys > rows) | ~self.live
        return hidden if self.window_left is None else hidden | (self.keys < rows - self.window_left)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q: fp32 [n, group, head_dim]. Gives out and lse, as in Reference."""
    n, group, head_dim = q.shape
    tokens = k.shape[0]
    out = torch.empty_like(q)
    lse = torch.empty(n, group, device=q.device)
    step = max(1, SCORES_AT_ONCE // (group * tokens))
    for start in range(0, n, step):
        some = slice(start, min(start + step, n))
        scores = (q[some].reshape(-1, head_dim) @ k.T).view(-1, group, tokens) * scale
        scores.masked_fill_(seen.hidden(some)[:, None], float("-inf"))
        sums = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - torch.where(sums == float("-inf"), 0.0, sums)[..., None])
        out[some] = (weights.view(-1, tokens) @ v).view(-1, group, head_dim)
        lse[some] = sums
    return out, lse


def out_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |out - expected|, for bf16 `out` and fp32 `expected`, less what rounding out to bf16 may explain.

    The result is stored as bf16, which is not the kernel's error: half an ulp at the value before rounding, which
    itself lies within the tolerance of `expected`, so the ulp is taken at |expected| + OUT_TOLERANCE. NaN counts as
    infinitely wrong.
    """
    exponent = torch.frexp(expected.abs() + OUT_TOLERANCE).exponent
    half_ulp = torch.ldexp(torch.ones_like(expected), exponent - 9)
    return _largest((out.float() - expected).abs() - half_ulp)


def row_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |out - expected| / |expected| over rows and heads, as vectors; rows of zeros are left out."""
    lengths = expected.norm(dim=-1)
    return _largest(((out.float() - expected).norm(dim=-1) / lengths)[lengths > 0])


def lse_error(lse: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |lse - expected|; equal infinities agree, NaN counts as infinitely wrong."""
    return _largest(torch.where(lse == expected, 0.0, (lse - expected).abs()))


def _largest(errors: torch.Tensor) -> float:
    return float(errors.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if errors.numel() else 0.0
