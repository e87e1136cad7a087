"""Attention over a paged pool in fp32 PyTorch, in the place of the library's kernels: what examples/hf is tested with where
there is no GPU. It reads the pool through the page tables alone."""

from __future__ import annotations

import torch

from codegen.formats import ROTATED
from examples.hf.kernels import Band, Norms, Rope
from examples.hf.pool import PAGE, Step, folding_weight, store


class StandIn:
    """Attention, as examples.hf.kernels.Attention describes it. `fault` plants a mistake that an oracle must see."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.calls: list[tuple[str, int, int]] = []  # kind, layer, rows a request

    def attend(self, step: Step, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        heads, rows = step.heads, q.shape[0] // step.batch
        self.calls.append((heads.kind, layer, rows))
        out = torch.empty_like(q)
        for request in range(step.batch):
            first, last = step.page_bounds[request : request + 2]
            ids = step.page_ids[first:last].long()
            tokens = (last - first - 1) * PAGE + int(step.last_page_len[request])
            at = ids * heads.rows_per_page + layer * heads.layer_rows
            at = (at[:, None] + torch.arange(PAGE)).flatten()[:tokens]
            pool = step.pool.rows
            if heads.folded:
                v = pool[at][..., 2 * ROTATED :]
                k = v.clone()
                half = heads.head_dim // 2
                k[..., :ROTATED] = pool[at][..., :ROTATED]
                k[..., half : half + ROTATED] = pool[at][..., ROTATED : 2 * ROTATED]
            else:
                k, v = pool[at], pool[at + PAGE]
            some = slice(request * rows, (request + 1) * rows)
            k, v = (part.float().repeat_interleave(heads.group, 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[some].float(), k) * scale
            key = torch.arange(tokens)
            row = torch.arange(tokens - rows, tokens)[:, None]
            hidden = key > row
            if heads.window:
                hidden |= key <= row - heads.window + (1 if self.fault == "window" else 0)
            scores.masked_fill_(hidden, float("-inf"))
            if self.fault == "newest page" and tokens > PAGE:
                scores[..., -(tokens % PAGE or PAGE) :] = float("-inf")
            out[some] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v).to(q.dtype)
        return out

    def check(self) -> None:
        pass


class StandInPreps:
    """The library's preps in fp32: norm, rounded to bf16, then rotation."""

    def prepare(
        self, step: Step, layer: int, q: Band, k: Band | None, v: Band | None, norms: Norms, rope: Rope, *, k_eq_v: bool
    ) -> torch.Tensor:
        heads, rows = step.heads, q.rows.shape[0]
        each = rows // step.batch
        positions = (torch.tensor(step.contexts)[:, None] - each + torch.arange(each)).flatten()
        cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]

        def normed(band: Band, weight: torch.Tensor | None) -> torch.Tensor:
            x = band.rows[:, band.offset : band.offset + band.length].view(rows, -1, heads.head_dim).float()
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.eps)
            return (x if weight is None else x * weight.float()).bfloat16()

        def rotated(x: torch.Tensor) -> torch.Tensor:
            half, pairs = heads.head_dim // 2, cos.shape[-1]
            low, high = x[..., :pairs].float(), x[..., half : half + pairs].float()
            turned = x.clone()
            turned[..., :pairs] = (low * cos - high * sin).bfloat16()
            turned[..., half : half + pairs] = (high * cos + low * sin).bfloat16()
            return turned

        weight = norms.q.float()
        if heads.folded:
            assert norms.k is not None
            weight = weight * folding_weight(norms.k)
        if k is not None:
            assert k_eq_v == (v is None)
            store(step, layer, rotated(normed(k, norms.k)), normed(v or k, None))
        return rotated(normed(q, weight))

    def check(self) -> None:
        pass
