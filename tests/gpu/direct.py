"""Direct calls of the incumbent's entries, with plans that are made here, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from bench.inputs import Batch

UNSPLIT = 1 << 30  # tokens of a chunk that holds any context


def ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32, on the device."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def stream() -> int:
    """The current stream's handle."""
    return int(torch.cuda.current_stream().cuda_stream)


def pool(batch: Batch) -> tuple[int, ...]:
    """kv_data to last_page_len_d."""
    geometry = batch.geometry
    row = geometry.kv_heads * geometry.head_dim
    k = geometry.layer_row * row
    indices = (batch.page_ids.data_ptr(), batch.page_indptr.data_ptr(), batch.last_page_len.data_ptr())
    return (batch.pool.data_ptr(), k, k + geometry.page_size * row, *indices)


def stride_page(batch: Batch) -> int:
    """Elements from one page to the next."""
    geometry = batch.geometry
    return geometry.rows_per_page * geometry.kv_heads * geometry.head_dim


def heads(batch: Batch) -> tuple[int, int, int]:
    """num_qo_heads, num_kv_heads, head_dim."""
    return batch.geometry.q_heads, batch.geometry.kv_heads, batch.geometry.head_dim


def succeed(library: ModuleType, code: int) -> None:
    """The call that returned `code` was taken, and is done."""
    assert code == library.OK, library.last_error()
    torch.cuda.synchronize()


def prefill(
    library: ModuleType, entry: str, batch: Batch, out: torch.Tensor, *tail: float, override: int | None = None
) -> None:
    """A paged prefill with the plan that its planners ask for. tail: what follows sm_scale, before the stream. override: the
    query tile, of the entry that takes one."""
    lengths = [span.q_to - span.q_from for span in batch.spans()]
    total = sum(lengths)
    chosen = override or 0
    tile = library.batch_prefill_cta_tile_q_with_override(total, *heads(batch), chosen)
    if not chosen:
        assert tile == library.batch_prefill_cta_tile_q(total, *heads(batch))
    requests: list[int] = []
    tiles: list[int] = []
    for request, length in enumerate(lengths):
        count = library.batch_prefill_paged_num_tiles_with_cta_tile_q(length, *heads(batch), tile)
        assert count == -(-length * batch.geometry.group // tile)
        requests += [request] * count
        tiles += range(count)
    plan = [ints(part, batch.q.device) for part in (requests, tiles, [0] * len(tiles), [UNSPLIT], [total])]
    size = (batch.geometry.page_size, total, batch.size, len(tiles), stride_page(batch), batch.sm_scale)
    arrays = (batch.q_indptr.data_ptr(), *(array.data_ptr() for array in plan))
    more = (*tail, override) if override is not None else tail
    call = getattr(library, entry)
    succeed(library, call(batch.q.data_ptr(), out.data_ptr(), *pool(batch), *arrays, *heads(batch), *size, *more, stream()))


def decode(library: ModuleType, entry: str, batch: Batch, out: torch.Tensor, *tail: float) -> None:
    """A decode that does not split: row r is request r's. tail: what follows sm_scale, before the stream."""
    plan = [ints(part, batch.q.device) for part in (range(batch.size), [0] * batch.size, [UNSPLIT])]
    size = (batch.geometry.page_size, batch.size, stride_page(batch), batch.sm_scale)
    arrays = tuple(array.data_ptr() for array in plan)
    call = getattr(library, entry)
    succeed(library, call(batch.q.data_ptr(), out.data_ptr(), *pool(batch), *arrays, *heads(batch), *size, *tail, stream()))


def split_decode(
    library: ModuleType, entry: str, batch: Batch, out: torch.Tensor, chunk: int, *, spare: int = 0, mask: bool = True
) -> None:
    """A decode whose requests are cut into chunks of `chunk` tokens, over a workspace of NaN. spare: blocks more than the plan
    needs, which need the mask."""
    geometry, device = batch.geometry, batch.q.device
    requests: list[int] = []
    chunks: list[int] = []
    bounds = [0]
    for request, span in enumerate(batch.spans()):
        count = -(-span.context(geometry.page_size) // chunk)
        requests += [request] * count
        chunks += range(count)
        bounds.append(bounds[-1] + count)
    blocks = len(chunks) + spare
    padding = [0] * spare
    valid = torch.tensor([1] * len(chunks) + padding, dtype=torch.uint8, device=device)
    plan = [ints(part, device) for part in (requests + padding, chunks + padding, [chunk], bounds)]
    tmp_v = torch.full((blocks, geometry.q_heads, geometry.head_dim), float("nan"), dtype=torch.bfloat16, device=device)
    tmp_s = torch.full((blocks, geometry.q_heads), float("nan"), device=device)
    code = getattr(library, entry)(
        batch.q.data_ptr(),
        out.data_ptr(),
        *pool(batch),
        *(array.data_ptr() for array in plan),
        valid.data_ptr() if mask else 0,
        tmp_v.data_ptr(),
        tmp_s.data_ptr(),
        *heads(batch),
        geometry.page_size,
        batch.size,
        blocks,
        stride_page(batch),
        batch.sm_scale,
        stream(),
    )
    succeed(library, code)
