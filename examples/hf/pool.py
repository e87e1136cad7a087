"""A paged KV pool and the page tables of the requests in it, as a server keeps them.

Layers of one kind, global or sliding, share a pool: a page holds 64 tokens of all of them. Pages are handed out shuffled, and a
fresh pool is NaN, so that a kernel which reads a row that nobody wrote cannot go unseen.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from codegen.formats import FORMATS, ROTATED

PAGE = 64  # tokens


class PoolExhausted(RuntimeError):
    """A request needs more pages than the pool has free."""


@dataclass(frozen=True)
class Heads:
    """The layers of one kind.

    kind: "global" or "sliding". layers: those with K and V of their own, which a page holds. window: tokens that a row sees,
    its own included; 0: all. page_format: a name in codegen.formats.
    """

    kind: str
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    window: int = 0
    page_format: str = "split"

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def folded(self) -> bool:
        """Whether a pool row holds rotated K columns and V: one row a token, not a K row and a V row."""
        return self.page_format == "folded"

    @property
    def page_format_code(self) -> int:
        """The TILEPRESS_PAGE_FORMAT_* value."""
        return FORMATS[self.page_format].code

    @property
    def row_width(self) -> int:
        """Columns of a pool row."""
        return self.head_dim + FORMATS[self.page_format].extra_columns

    @property
    def layer_rows(self) -> int:
        """Rows that a layer has in a page."""
        return FORMATS[self.page_format].tiles * PAGE

    @property
    def rows_per_page(self) -> int:
        """Rows of a page, all layers."""
        return self.layers * self.layer_rows

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return 2 * self.rows_per_page * self.kv_heads * self.row_width


class Pool:
    """`num_pages` pages on a device: rows is bf16 [num_pages * rows_per_page, kv_heads, row_width]."""

    def __init__(self, heads: Heads, num_pages: int, device: torch.device, *, seed: int = 0) -> None:
        self.heads = heads
        self.num_pages = num_pages
        shape = (num_pages * heads.rows_per_page, heads.kv_heads, heads.row_width)
        self.rows = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    @property
    def free_pages(self) -> int:
        """Pages that no request has."""
        return len(self._free)

    def take(self, count: int, why: str) -> list[int]:
        """Ids of `count` pages. Raises PoolExhausted, and then takes none."""
        if count > len(self._free):
            raise PoolExhausted(
                f"{why}: {count} more pages of the {self.heads.kind} pool are needed, and {len(self._free)} of its "
                f"{self.num_pages} are free ({PAGE} tokens each)"
            )
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Takes pages back. What they hold becomes NaN: nobody may read it again."""
        if pages:
            paged = self.rows.view(self.num_pages, -1)
            paged[torch.tensor(pages, device=self.rows.device)] = float("nan")
        self._free.extend(pages)


@dataclass
class Table:
    """A request's pages of one pool, from position `origin` on, a multiple of the page size."""

    pages: list[int] = field(default_factory=list)
    origin: int = 0

    def grow(self, pool: Pool, tokens: int, why: str) -> None:
        """Makes room for a context of `tokens`, released ones included. Raises PoolExhausted."""
        needed = -(-(tokens - self.origin) // PAGE) - len(self.pages)
        if needed > 0:
            self.pages += pool.take(needed, why)

    def release(self, pool: Pool, context: int) -> None:
        """Gives back the pages that the rows behind `context` do not see. The newest page stays."""
        if not pool.heads.window:
            return
        oldest = max(context - pool.heads.window + 1, 0)  # what the next row, at position `context`, sees first
        gone = min((oldest - self.origin) // PAGE, len(self.pages) - 1)
        if gone > 0:
            pool.give(self.pages[:gone])
            del self.pages[:gone]
            self.origin += gone * PAGE


@dataclass(frozen=True)
class Queries:
    """Which rows each request has: int32 [batch + 1] on both sides."""

    device: torch.Tensor
    host: torch.Tensor
    rows: int


class Step:
    """One forward pass over one pool: `rows` new tokens of each request, at the end of its context.

    contexts: tokens of each request, the new ones included. Index arrays are int32 on the pool's device. slots: int64
    [batch * rows], the pool row of each new token as if its layer were the first in the page and K's rows the first of the
    layer. prepared: what kernels made for this step and use again in its other layers.
    """

    def __init__(self, pool: Pool, tables: Sequence[Table], contexts: Sequence[int], rows: int) -> None:
        device = pool.rows.device
        self.pool = pool
        self.heads = pool.heads
        self.rows = rows
        self.batch = len(tables)
        self.contexts = list(contexts)
        self.origins = [table.origin for table in tables]
        self.page_counts = [len(table.pages) for table in tables]
        self.prepared: dict[object, object] = {}
        self._queries: dict[int, Queries] = {}

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        ids = [page for table in tables for page in table.pages]
        bounds = [0, *itertools.accumulate(self.page_counts)]
        self.page_bounds = bounds
        self.num_page_ids = len(ids)
        self.page_ids = ints(ids)
        self.page_indptr = ints(bounds)
        self.kv_origin = ints(self.origins)
        self.last_page_len = ints([context - origin - (count - 1) * PAGE for context, origin, count in self._shapes()])
        self.positions = ints([context - rows for context in self.contexts])
        token = torch.arange(rows)
        slots = []
        for table, context in zip(tables, self.contexts, strict=True):
            at = token + (context - rows - table.origin)
            page = torch.tensor(table.pages)[at // PAGE]
            slots.append(page * self.heads.rows_per_page + at % PAGE)
        self.slots = torch.cat(slots).to(device)

    def _shapes(self) -> list[tuple[int, int, int]]:
        return list(zip(self.contexts, self.origins, self.page_counts, strict=True))

    def queries(self, rows: int) -> Queries:
        """The row ranges of `rows` queries a request: the step's last ones, where a layer computes fewer than the others."""
        if rows not in self._queries:
            host = torch.arange(self.batch + 1, dtype=torch.int32) * rows
            self._queries[rows] = Queries(host.to(self.pool.rows.device), host, rows)
        return self._queries[rows]


def store(step: Step, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes the step's K and V, bf16 [batch * rows, kv_heads, head_dim], into the layer's rows of the pool."""
    heads = step.heads
    at = step.slots + layer * heads.layer_rows
    if heads.folded:
        half = heads.head_dim // 2
        step.pool.rows[at] = torch.cat([key[..., :ROTATED], key[..., half : half + ROTATED], value], -1)
    else:
        step.pool.rows[at] = key
        step.pool.rows[at + PAGE] = value


def folding_weight(k_norm: torch.Tensor) -> torch.Tensor:
    """What a query's columns are multiplied with before it meets folded rows: K's norm weight where a row has V in K's place,
    1 where it has rotated K. fp32 [head_dim]."""
    column = torch.arange(k_norm.numel(), device=k_norm.device) % (k_norm.numel() // 2)
    return torch.where(column < ROTATED, 1.0, k_norm.float())
