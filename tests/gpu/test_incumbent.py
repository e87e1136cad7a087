"""The incumbent's entries on a GPU: attention against the fp32 reference, and what append and scatter write."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from bench.inputs import Batch, Geometry, Request, build
from bench.reference import ROW_TOLERANCE, Reference, attention, row_error

from . import direct
from .direct import heads, ints, pool, stream, stride_page, succeed
from .harness import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

# The largest |out - reference| that bf16 rounding of the softmax weights and of the output explains with |V| <= 1, as the
# windowed prefill rounds both.
TOLERANCE = 0.011
SENTINEL = 7.0
PREFILLS = ((5, 5), (70, 200), (1, 90), (130, 1000))
DECODES = ((1, 1), (1, 64), (1, 700), (1, 1500))


def batch_of(head_dim: int, group: int, requests: Sequence[tuple[int, int]], kv_heads: int = 2, seed: int = 1) -> Batch:
    """A hostile batch of the split pool: NaN in every slot that no request owns."""
    geometry = Geometry(group * kv_heads, kv_heads, head_dim=head_dim)
    return build(geometry, [Request(*request) for request in requests], device=DEVICE, seed=seed, sm_scale=256 / head_dim)


def output_of(batch: Batch) -> torch.Tensor:
    return torch.full_like(batch.q, SENTINEL)


def windowed(batch: Batch, window_left: int) -> Reference:
    """As attention(batch), each row seeing its own position and the window_left before it."""
    geometry = batch.geometry
    rows: list[int] = []
    outs: list[torch.Tensor] = []
    for span in batch.spans():
        tokens = span.context(geometry.page_size)
        ids = torch.tensor(span.page_ids, device=DEVICE)
        first = ids * geometry.rows_per_page + geometry.layer_row
        at = (first[:, None] + torch.arange(geometry.page_size, device=DEVICE)).flatten()[:tokens]
        k, v = batch.pool[at].float(), batch.pool[at + geometry.page_size].float()
        q = batch.q[span.q_from : span.q_to].float()
        k, v = (part.repeat_interleave(geometry.group, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * batch.sm_scale
        position = torch.arange(tokens - (span.q_to - span.q_from), tokens, device=DEVICE)[:, None]
        key = torch.arange(tokens, device=DEVICE)
        scores.masked_fill_((key > position) | (key < position - window_left), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        rows += range(span.q_from, span.q_to)
    out = torch.cat(outs)
    return Reference(torch.tensor(rows, device=DEVICE), out, out[..., 0])


def assert_close(out: torch.Tensor, expected: Reference) -> None:
    """Every expected row is close, and no other was written."""
    found = out[expected.rows].float()
    assert float((found - expected.out).abs().max()) <= TOLERANCE
    assert row_error(out[expected.rows], expected.out) <= 2 * ROW_TOLERANCE
    others = torch.ones(out.shape[0], dtype=torch.bool, device=DEVICE)
    others[expected.rows] = False
    assert (out[others] == SENTINEL).all()


def prefill(library: ModuleType, entry: str, batch: Batch, *tail: float, override: int | None = None) -> torch.Tensor:
    """What direct.prefill leaves."""
    out = output_of(batch)
    direct.prefill(library, entry, batch, out, *tail, override=override)
    return out


@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_prefill_hd512(library: ModuleType, group: int) -> None:
    batch = batch_of(512, group, PREFILLS)
    assert_close(prefill(library, "batch_prefill_paged_cuda_hd512", batch), attention(batch))


@pytest.mark.parametrize("group", [4, 8])
def test_prefill_hd512_of_few_rows(library: ModuleType, group: int) -> None:
    """Small enough for the short tile."""
    batch = batch_of(512, group, ((2, 300), (1, 1)))
    assert_close(prefill(library, "batch_prefill_paged_cuda_hd512", batch), attention(batch))


@pytest.mark.parametrize("group", [2, 4, 8])
def test_prefill_hd256(library: ModuleType, group: int) -> None:
    batch = batch_of(256, group, PREFILLS)
    assert_close(prefill(library, "batch_prefill_paged_cuda_hd256", batch), attention(batch))


@pytest.mark.parametrize("window_left", [-1, 0, 63, 511])
@pytest.mark.parametrize("group", [2, 4, 8])
def test_windowed_prefill_hd256(library: ModuleType, group: int, window_left: int) -> None:
    batch = batch_of(256, group, PREFILLS)
    expected = windowed(batch, window_left if window_left >= 0 else 1 << 20)
    assert_close(prefill(library, "batch_prefill_paged_window_cuda_hd256", batch, window_left), expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_by_head_dim(library: ModuleType, head_dim: int) -> None:
    batch = batch_of(head_dim, 4, PREFILLS)
    assert_close(prefill(library, "batch_prefill_paged_cuda", batch), attention(batch))


@pytest.mark.parametrize(("head_dim", "tile"), [(64, 16), (64, 64), (64, 128), (128, 16), (128, 128), (256, 16), (256, 64)])
def test_prefill_with_every_tile(library: ModuleType, head_dim: int, tile: int) -> None:
    batch = batch_of(head_dim, 4, PREFILLS)
    entry = "batch_prefill_paged_cuda_with_cta_tile_q"
    assert_close(prefill(library, entry, batch, override=tile), attention(batch))


def test_num_tiles_is_the_plan_of_one_request(library: ModuleType) -> None:
    assert library.batch_prefill_paged_num_tiles(100, 32, 4, 512) == 25


def decode(library: ModuleType, entry: str, batch: Batch, *tail: float) -> torch.Tensor:
    """What direct.decode leaves."""
    out = output_of(batch)
    direct.decode(library, entry, batch, out, *tail)
    return out


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode(library: ModuleType, head_dim: int, group: int) -> None:
    batch = batch_of(head_dim, group, DECODES)
    assert_close(decode(library, "paged_attention_decode_cuda", batch), attention(batch))


@pytest.mark.parametrize("group", [2, 4, 8])
def test_decode_hd256(library: ModuleType, group: int) -> None:
    batch = batch_of(256, group, DECODES)
    assert_close(decode(library, "paged_attention_decode_cuda_hd256", batch), attention(batch))


@pytest.mark.parametrize("window_left", [-1, 0, 511])
@pytest.mark.parametrize("group", [2, 4, 8])
def test_windowed_decode_hd256(library: ModuleType, group: int, window_left: int) -> None:
    batch = batch_of(256, group, DECODES)
    expected = windowed(batch, window_left if window_left >= 0 else 1 << 20)
    assert_close(decode(library, "paged_attention_decode_window_cuda_hd256", batch, window_left), expected)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize(
    ("entry", "head_dim", "group"),
    [
        *(("paged_attention_decode_split_kv_cuda", 256, group) for group in (2, 4, 8)),
        ("paged_attention_decode_split_kv_cuda", 128, 4),
        *(("paged_attention_decode_split_kv_cuda_hd512", 512, group) for group in (1, 2, 3, 4, 8)),
    ],
)
def test_split_decode(library: ModuleType, entry: str, head_dim: int, group: int, mask: bool) -> None:
    """Chunks of 256 tokens; with a mask, three blocks more than the plan needs."""
    batch = batch_of(head_dim, group, DECODES)
    out = output_of(batch)
    direct.split_decode(library, entry, batch, out, 256, spare=3 if mask else 0, mask=mask)
    assert_close(out, attention(batch))


@pytest.mark.parametrize(
    ("entry", "head_dim"),
    [
        ("single_prefill_cuda", 64),
        ("single_prefill_cuda", 128),
        ("single_prefill_cuda", 256),
        ("single_prefill_cuda_hd256", 256),
        ("single_prefill_cuda_hd512", 512),
    ],
)
@pytest.mark.parametrize(("rows", "context"), [(1, 1), (3, 300), (200, 333)])
def test_single_prefill(library: ModuleType, entry: str, head_dim: int, rows: int, context: int) -> None:
    """The cache is [kv_heads, max_seq_len, head_dim], with room past the context that holds NaN."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    q_heads, kv_heads, room, scale = 8, 2, context + 70, 256 / head_dim
    q = (torch.randn(rows, q_heads, head_dim, device=DEVICE, generator=generator) * 0.05).bfloat16()
    k = torch.randn(kv_heads, room, head_dim, device=DEVICE, generator=generator).bfloat16()
    v = (torch.rand(kv_heads, room, head_dim, device=DEVICE, generator=generator) * 2 - 1).bfloat16()
    k[:, context:] = float("nan")
    v[:, context:] = float("nan")
    out = torch.full_like(q, SENTINEL)
    dims = (q_heads, kv_heads) if "hd" in entry else (q_heads, kv_heads, head_dim)
    addresses = (q.data_ptr(), out.data_ptr(), k.data_ptr(), v.data_ptr())
    succeed(library, getattr(library, entry)(*addresses, *dims, rows, context, room, scale, stream()))
    wide_k, wide_v = (part[:, :context].float().repeat_interleave(q_heads // kv_heads, dim=0) for part in (k, v))
    scores = torch.einsum("qhd,hkd->hqk", q.float(), wide_k) * scale
    position = torch.arange(context - rows, context, device=DEVICE)[:, None]
    scores.masked_fill_(torch.arange(context, device=DEVICE) > position, float("-inf"))
    expected = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), wide_v)
    assert_close(out, Reference(torch.arange(rows, device=DEVICE), expected, expected[..., 0]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_append_writes_each_requests_last_token(library: ModuleType, head_dim: int) -> None:
    batch = batch_of(head_dim, 2, DECODES)
    geometry = batch.geometry
    key = torch.randn(batch.size, geometry.kv_heads, head_dim, device=DEVICE).bfloat16()
    value = torch.randn(batch.size, geometry.kv_heads, head_dim, device=DEVICE).bfloat16()
    expected = batch.pool.clone()
    for r, span in enumerate(batch.spans()):
        at = span.page_ids[-1] * geometry.rows_per_page + geometry.layer_row + span.last_page_len - 1
        expected[at] = key[r]
        expected[at + geometry.page_size] = value[r]
    shape = (geometry.kv_heads, head_dim, geometry.page_size, batch.size, stride_page(batch))
    code = library.paged_kv_append_cuda(*pool(batch), key.data_ptr(), value.data_ptr(), *shape, stream())
    succeed(library, code)
    assert torch.equal(bits(batch.pool), bits(expected))


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_scatter_writes_each_token_at_its_position(library: ModuleType, head_dim: int) -> None:
    """From a source whose heads lie apart, so that its strides count."""
    batch = batch_of(head_dim, 2, DECODES)
    geometry = batch.geometry
    owners = [0, 1, 1, 2, 2, 2, 3, 3]
    positions = [0, 63, 5, 699, 64, 0, 1499, 128]
    source = torch.randn(2, geometry.kv_heads, len(owners), head_dim, device=DEVICE).bfloat16()
    expected = batch.pool.clone()
    spans = batch.spans()
    for i, (owner, position) in enumerate(zip(owners, positions, strict=True)):
        page, slot = divmod(position, geometry.page_size)
        at = spans[owner].page_ids[page] * geometry.rows_per_page + geometry.layer_row + slot
        expected[at] = source[0, :, i]
        expected[at + geometry.page_size] = source[1, :, i]
    indices = (ints(owners, DEVICE), ints(positions, DEVICE))
    code = library.paged_kv_scatter_cuda(
        *pool(batch),
        source[0].data_ptr(),
        source[1].data_ptr(),
        *(array.data_ptr() for array in indices),
        len(owners),
        geometry.kv_heads,
        head_dim,
        geometry.page_size,
        stride_page(batch),
        head_dim,
        len(owners) * head_dim,
        stream(),
    )
    succeed(library, code)
    assert torch.equal(bits(batch.pool), bits(expected))


def test_a_refusal_launches_nothing(library: ModuleType) -> None:
    batch = batch_of(512, 16, DECODES)
    out = output_of(batch)
    shape = (batch.geometry.page_size, batch.size, batch.size, stride_page(batch), batch.sm_scale)
    arrays = (out.data_ptr(),) * 7
    call = library.paged_attention_decode_split_kv_cuda_hd512
    code = call(batch.q.data_ptr(), out.data_ptr(), *pool(batch), *arrays, *heads(batch), *shape, stream())
    assert code == library.UNSUPPORTED
    assert "the group, is 16" in library.last_error()
    torch.cuda.synchronize()
    assert (out == SENTINEL).all()
