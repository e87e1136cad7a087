"""Ragged batches over a paged KV pool, built to be hostile: whatever no request owns is NaN or garbage.

The pool holds several layers a page, its pages are handed out shuffled, and every row of it that no request owns
(other layers, unused pages, slots past a length, pages of a released front) is NaN. So are the query rows that no request
owns. Index arrays are longer than the batch needs and filled up with random int32 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from codegen.formats import FORMATS, ROTATED

TILE = 64  # rows of a query tile, and of a pool tile
INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
MAX_ORIGIN = 1 << 29  # a page list that begins further on is taken to begin here

# Unit K rows (rms 1, as after a norm) and queries of this size give scores of about +-1: a softmax with many live keys. Folded
# rows have V, of rms 0.58, in three quarters of the score operand, and so scores of about +-0.8.
Q_SIZE = 0.05


@dataclass(frozen=True)
class Geometry:
    """Heads, page and pool layout of one layer. `layers` are in a page; the batch uses `layer`. head_dim: 512 of a global
    layer, 256 of a sliding one. page_format: a name in codegen.formats."""

    q_heads: int
    kv_heads: int
    head_dim: int = 512
    page_size: int = 64
    layers: int = 3
    layer: int = 1
    page_format: str = "split"

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def sliding(self) -> bool:
        """Whether this is a sliding layer, which has entries of its own."""
        return self.head_dim == 256

    @property
    def page_format_code(self) -> int:
        """The TILEPRESS_PAGE_FORMAT_* value."""
        return FORMATS[self.page_format].code

    @property
    def folded(self) -> bool:
        """Whether a row holds rotated K columns and V: one row a token, not a K row and a V row."""
        return self.page_format == "folded"

    @property
    def tiles(self) -> int:
        """Blocks of page_size rows that a layer has in a page."""
        return FORMATS[self.page_format].tiles

    @property
    def row_width(self) -> int:
        """Columns of a pool row."""
        return self.head_dim + FORMATS[self.page_format].extra_columns

    @property
    def rows_per_page(self) -> int:
        """Pool rows a page holds over all layers."""
        return self.tiles * self.page_size * self.layers

    @property
    def layer_row(self) -> int:
        """The layer's first row inside a page."""
        return self.tiles * self.page_size * self.layer

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer, all KV heads."""
        return self.tiles * self.kv_heads * self.row_width * 2


@dataclass(frozen=True)
class Request:
    """`rows` query rows at the end of a context of `context` tokens; more rows than tokens see nothing at first. The pages of
    its first `origin` tokens, a multiple of the page size, are released."""

    rows: int
    context: int
    origin: int = 0

    def pages(self, page_size: int) -> int:
        """Pages that the context needs, released ones included."""
        return -(-self.context // page_size)


def released(rows: int, context: int, window_left: int, page_size: int = 64) -> Request:
    """A request whose front is released up to the page of the oldest key that its first row sees."""
    return Request(rows, context, max(context - rows - window_left, 0) // page_size * page_size)


@dataclass(frozen=True)
class Piece:
    """A request with its data: q bf16 [rows, q_heads, head_dim], page_ids int32 [pages], tokens in the last page, position of
    the first page's first token."""

    q: torch.Tensor
    page_ids: torch.Tensor
    last_page_len: int
    origin: int = 0


@dataclass(frozen=True)
class Batch:
    """The inputs of one call, on one device.

    q: bf16 [q_rows, q_heads, head_dim]. pool: bf16 [num_pages * rows_per_page, kv_heads, row_width]. page_ids,
    page_indptr, last_page_len, q_indptr: int32, longer than `num_page_ids`, `size` + 1, `size`, `size` + 1, with
    garbage past those. window_left: keys before its own that a row sees; None: all. kv_origin: int32, longer than `size`, the
    position of each page list's first token; None: 0.
    """

    geometry: Geometry
    q: torch.Tensor
    pool: torch.Tensor
    page_ids: torch.Tensor
    page_indptr: torch.Tensor
    last_page_len: torch.Tensor
    q_indptr: torch.Tensor
    size: int
    num_page_ids: int
    sm_scale: float
    window_left: int | None = None
    kv_origin: torch.Tensor | None = None

    @property
    def window(self) -> int:
        """Tokens that a row sees, its own included; 0: all."""
        return 0 if self.window_left is None else self.window_left + 1

    @property
    def q_rows(self) -> int:
        """Rows of q, those of no request included."""
        return int(self.q.shape[0])

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return int(self.pool.shape[0]) // self.geometry.rows_per_page

    def spans(self) -> list[Span]:
        """What each request owns, read from the index arrays as they are now and clamped into range as the ABI says."""
        ids = self.page_ids[: self.num_page_ids].tolist()
        q = self.q_indptr[: self.size + 1].tolist()
        pages = self.page_indptr[: self.size + 1].tolist()
        last = self.last_page_len[: self.size].tolist()
        origins = [0] * self.size if self.kv_origin is None else self.kv_origin[: self.size].tolist()
        page_size = self.geometry.page_size
        spans = []
        for r in range(self.size):
            q_from = min(max(q[r], 0), self.q_rows)
            q_to = max(min(q[r + 1], self.q_rows), q_from)
            page_from = min(max(pages[r], 0), self.num_page_ids)
            page_to = max(min(pages[r + 1], self.num_page_ids), page_from)
            tokens = min(max(last[r], 1), page_size)
            origin = max(min(origins[r], MAX_ORIGIN), 0) // page_size * page_size
            spans.append(Span(q_from, q_to, tuple(ids[page_from:page_to]), tokens, origin))
        return spans


@dataclass(frozen=True)
class Span:
    """A request's query rows [q_from, q_to), pages, tokens in its last page, and position of its first page's first token."""

    q_from: int
    q_to: int
    page_ids: tuple[int, ...]
    last_page_len: int
    origin: int = 0

    def resident(self, page_size: int) -> int:
        """Tokens in the pages, those behind a bad page id included."""
        return (len(self.page_ids) - 1) * page_size + self.last_page_len if self.page_ids else 0

    def context(self, page_size: int) -> int:
        """Tokens of the context, released ones included."""
        return self.origin + self.resident(page_size)


def nan_pool(geometry: Geometry, num_pages: int, device: torch.device) -> torch.Tensor:
    """A pool of NaN: bf16 [num_pages * rows_per_page, kv_heads, row_width]."""
    shape = (num_pages * geometry.rows_per_page, geometry.kv_heads, geometry.row_width)
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)


def score_operand(geometry: Geometry, rows: torch.Tensor) -> torch.Tensor:
    """K of folded rows [..., row_width]: V in head order, with columns [0, 64) and [256, 320) of 512 taken from K_rot."""
    half = geometry.head_dim // 2
    k = value_operand(geometry, rows).clone()
    k[..., :ROTATED] = rows[..., :ROTATED]
    k[..., half : half + ROTATED] = rows[..., ROTATED : 2 * ROTATED]
    return k


def value_operand(geometry: Geometry, rows: torch.Tensor) -> torch.Tensor:
    """V of folded rows [..., row_width]: their last head_dim columns, in head order."""
    return rows[..., geometry.row_width - geometry.head_dim :]


def write_context(
    geometry: Geometry, pool: torch.Tensor, page_ids: torch.Tensor, context: int, generator: torch.Generator
) -> None:
    """Fills a request's `context` tokens in the pool, from its first page on: K normal of rms 1, V uniform in [-1, 1]. Slots
    past the context stay NaN.

    V is bounded because the kernel rounds the softmax weights to bf16, which moves the output by a share of the largest
    |V|: so the reference's tolerance holds for rows that see few keys, too.
    """
    size, pages, device = geometry.page_size, page_ids.numel(), pool.device
    if not pages:
        return
    shape = (pages, size, geometry.kv_heads)
    k_columns = 2 * ROTATED if geometry.folded else geometry.head_dim
    k = torch.randn(*shape, k_columns, device=device, generator=generator).to(torch.bfloat16)
    v = (torch.rand(*shape, geometry.head_dim, device=device, generator=generator) * 2 - 1).to(torch.bfloat16)
    tiles = [torch.cat((k, v), -1)] if geometry.folded else [k, v]
    write_tiles(geometry, pool, page_ids, context, tiles)


def write_tiles(
    geometry: Geometry, pool: torch.Tensor, page_ids: torch.Tensor, context: int, tiles: Sequence[torch.Tensor]
) -> None:
    """Puts a request's rows in the pool: `tiles` bf16 [pages, page_size, kv_heads, row_width] each, K's and V's or the folded
    ones. Slots past `context` tokens become NaN."""
    size, pages = geometry.page_size, page_ids.numel()
    paged = pool.view(-1, geometry.rows_per_page, geometry.kv_heads, geometry.row_width)
    for tile, rows in enumerate(tiles):
        rows.view(pages * size, geometry.kv_heads, geometry.row_width)[context:] = float("nan")
        start = geometry.layer_row + tile * size
        paged[page_ids.long(), start : start + size] = rows


def assemble(
    geometry: Geometry,
    pool: torch.Tensor,
    pieces: Sequence[Piece],
    *,
    lead_rows: int = 0,
    q_rows: int | None = None,
    size: int | None = None,
    num_page_ids: int | None = None,
    slack: int = 8,
    sm_scale: float = 1.0,
    window_left: int | None = None,
    has_origin: bool = False,
    seed: int = 0,
) -> Batch:
    """A batch of `pieces` over `pool`.

    lead_rows: query rows before the first request's. q_rows, size, num_page_ids: as large as given, which is how a
    captured graph's shapes hold a smaller plan; requests past the pieces are empty. slack: garbage elements behind
    every index array. has_origin: list the origins even where all of them are 0.
    """
    device = pool.device
    generator = torch.Generator().manual_seed(seed)
    q_from = [lead_rows]
    page_from = [0]
    for piece in pieces:
        q_from.append(q_from[-1] + piece.q.shape[0])
        page_from.append(page_from[-1] + piece.page_ids.numel())
    q_rows = q_from[-1] if q_rows is None else q_rows
    size = len(pieces) if size is None else size
    num_page_ids = page_from[-1] if num_page_ids is None else num_page_ids
    if q_from[-1] > q_rows or len(pieces) > size or page_from[-1] > num_page_ids:
        raise ValueError(f"{len(pieces)} requests, {q_from[-1]} rows and {page_from[-1]} pages do not fit the given sizes")

    def garbage(length: int) -> torch.Tensor:
        return torch.randint(INT32_MIN, INT32_MAX, (length,), dtype=torch.int32, generator=generator)

    def indptr(bounds: list[int]) -> torch.Tensor:
        values = garbage(size + 1 + slack)
        values[: size + 1] = torch.tensor(bounds + bounds[-1:] * (size - len(pieces)), dtype=torch.int32)
        return values.to(device)

    q = torch.full((q_rows, geometry.q_heads, geometry.head_dim), float("nan"), dtype=torch.bfloat16, device=device)
    page_ids = garbage(num_page_ids + slack).to(device)
    last_page_len = garbage(size + slack)
    kv_origin = garbage(size + slack)
    kv_origin[:size] = 0  # an origin that is out of range is reported, even of a request without rows
    for r, piece in enumerate(pieces):
        q[q_from[r] : q_from[r + 1]] = piece.q
        page_ids[page_from[r] : page_from[r + 1]] = piece.page_ids
        kv_origin[r] = piece.origin
        if piece.page_ids.numel():  # a request without pages keeps garbage: nobody may look at it
            last_page_len[r] = piece.last_page_len
    return Batch(
        geometry=geometry,
        q=q,
        pool=pool,
        page_ids=page_ids,
        page_indptr=indptr(page_from),
        last_page_len=last_page_len.to(device),
        q_indptr=indptr(q_from),
        size=size,
        num_page_ids=num_page_ids,
        sm_scale=sm_scale,
        window_left=window_left,
        kv_origin=kv_origin.to(device) if has_origin or any(piece.origin for piece in pieces) else None,
    )


def build(
    geometry: Geometry,
    requests: Sequence[Request],
    *,
    device: torch.device,
    seed: int = 0,
    first_page: int = 0,
    lead_rows: int = 0,
    tail_rows: int = 7,
    spare_page_ids: int = 5,
    slack: int = 8,
    sm_scale: float = 1.0,
    window_left: int | None = None,
    has_origin: bool = False,
) -> Batch:
    """A batch of `requests` over a new pool, with a few pages that nobody uses. Released pages are in it, too: NaN, and in no
    page list.

    first_page: pages below it are nobody's, to place the others far into a large pool. tail_rows, spare_page_ids:
    query rows and page ids behind the last request's, inside what the call is told.
    """
    generator = torch.Generator(device).manual_seed(seed)
    counts = [request.pages(geometry.page_size) for request in requests]
    used = sum(counts)
    pool = nan_pool(geometry, first_page + used + 3, device)
    shuffled = first_page + torch.randperm(used + 3, generator=torch.Generator().manual_seed(seed))[:used]
    pieces = []
    taken = listed = 0
    for request, count in zip(requests, counts, strict=True):
        gone = request.origin // geometry.page_size
        page_ids = shuffled[taken + gone : taken + count].to(device, torch.int32)
        taken += count
        listed += page_ids.numel()
        write_context(geometry, pool, page_ids, request.context - request.origin, generator)
        shape = (request.rows, geometry.q_heads, geometry.head_dim)
        q = (torch.randn(shape, device=device, generator=generator) * Q_SIZE).to(torch.bfloat16)
        pieces.append(Piece(q, page_ids, request.context - (count - 1) * geometry.page_size, request.origin))
    rows = lead_rows + sum(request.rows for request in requests) + tail_rows
    return assemble(
        geometry,
        pool,
        pieces,
        lead_rows=lead_rows,
        q_rows=rows,
        num_page_ids=listed + spare_page_ids,
        slack=slack,
        sm_scale=sm_scale,
        window_left=window_left,
        has_origin=has_origin,
        seed=seed,
    )


def select(
    batch: Batch,
    order: Sequence[int],
    *,
    lead_rows: int = 0,
    q_rows: int | None = None,
    size: int | None = None,
    num_page_ids: int | None = None,
) -> Batch:
    """Another batch over the same pool: the requests of `batch` in `order`, any of them left out or repeated."""
    spans = batch.spans()
    pieces = [
        Piece(
            batch.q[spans[r].q_from : spans[r].q_to],
            torch.tensor(spans[r].page_ids, dtype=torch.int32, device=batch.q.device),
            spans[r].last_page_len,
            spans[r].origin,
        )
        for r in order
    ]
    return assemble(
        batch.geometry,
        batch.pool,
        pieces,
        lead_rows=lead_rows,
        q_rows=q_rows,
        size=size,
        num_page_ids=num_page_ids,
        sm_scale=batch.sm_scale,
        window_left=batch.window_left,
        has_origin=batch.kv_origin is not None,
        seed=len(order),
    )
