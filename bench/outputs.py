"""Output buffers with guard zones, filled with sentinels, so that a write outside a request's rows is seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.inputs import Batch

GUARD_ROWS = 80  # more than a query tile, on either side
# No kernel writes these bit patterns: a bf16 and an fp32 near 1e16, and a status word with a bit that no status uses.
SENTINEL16 = 0x5A5A
SENTINEL32 = 0x5A5A5A5A
STATUS_WORDS = 5  # the third is the status word
STATUS_SENTINEL = 0x40000000


@dataclass(frozen=True)
class Outputs:
    """Whole buffers: out bf16 and lse fp32 [guard + q_rows + guard, q_heads(, head_dim)], status int32
    [STATUS_WORDS]."""

    out_buffer: torch.Tensor
    lse_buffer: torch.Tensor
    status_buffer: torch.Tensor
    guard: int

    @property
    def out(self) -> torch.Tensor:
        """What the call is given: bf16 [q_rows, q_heads, head_dim]."""
        return self.out_buffer[self.guard : self.out_buffer.shape[0] - self.guard]

    @property
    def lse(self) -> torch.Tensor:
        """What the call is given: fp32 [q_rows, q_heads]."""
        return self.lse_buffer[self.guard : self.lse_buffer.shape[0] - self.guard]

    @property
    def status(self) -> torch.Tensor:
        """What the call is given: int32 [1]."""
        return self.status_buffer[STATUS_WORDS // 2 : STATUS_WORDS // 2 + 1]

    def refill(self) -> None:
        """Puts every sentinel back."""
        self.out_buffer.view(torch.int16).fill_(SENTINEL16)
        self.lse_buffer.view(torch.int32).fill_(SENTINEL32)
        self.status_buffer.fill_(STATUS_SENTINEL)

    def status_bits(self) -> int:
        """The bits that calls have set since the last refill. Raises AssertionError where a neighbour or the sentinel's
        own bit changed: bits are or-ed in, never cleared."""
        words = self.status_buffer.tolist()
        bits = int(words.pop(STATUS_WORDS // 2))
        if any(word != STATUS_SENTINEL for word in words) or not bits & STATUS_SENTINEL:
            raise AssertionError(f"status words {[hex(word) for word in self.status_buffer.tolist()]}")
        return bits & ~STATUS_SENTINEL

    def touched_rows(self) -> tuple[set[int], set[int]]:
        """Rows of out and of lse, counted from the call's first one, that hold anything but the sentinel."""
        out = (self.out_buffer.view(torch.int16) != SENTINEL16).flatten(1).any(1)
        lse = (self.lse_buffer.view(torch.int32) != SENTINEL32).any(1)
        rows = (set((changed.nonzero().flatten() - self.guard).tolist()) for changed in (out, lse))
        return next(rows), next(rows)

    def same_bits(self, other: Outputs) -> bool:
        """Whether both buffers are bit-identical, guard zones included."""
        return bool(
            torch.equal(self.out_buffer.view(torch.int16), other.out_buffer.view(torch.int16))
            and torch.equal(self.lse_buffer.view(torch.int32), other.lse_buffer.view(torch.int32))
        )


def make_outputs(batch: Batch, guard: int = GUARD_ROWS) -> Outputs:
    """Sentinel-filled outputs for a call with `batch`."""
    geometry, device = batch.geometry, batch.q.device
    rows = batch.q_rows + 2 * guard
    outputs = Outputs(
        out_buffer=torch.empty(rows, geometry.q_heads, geometry.head_dim, dtype=torch.bfloat16, device=device),
        lse_buffer=torch.empty(rows, geometry.q_heads, dtype=torch.float32, device=device),
        status_buffer=torch.empty(STATUS_WORDS, dtype=torch.int32, device=device),
        guard=guard,
    )
    outputs.refill()
    return outputs
