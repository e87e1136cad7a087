"""merge_states: attention over disjoint sets of keys combined into attention over their union."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from bench.inputs import Batch, Piece, Request, assemble, build
from bench.outputs import SENTINEL16, SENTINEL32
from bench.plans import Limits
from bench.reference import LSE_TOLERANCE, OUT_TOLERANCE, attention, lse_error

from .harness import DEVICE, FORMATS, geometry, run, run_decode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

# bf16 keeps 8 bits: rounding to it moves a value by 2^-8 of itself at most, and by 2^-9 of the next power of two.
BF16_UNIT = 2.0**-8
GUARD = 3  # rows of sentinels on either side of the result

# The kernel's own error, against fp64 arithmetic on the partials that it was given. Its weights are expf(lse - maximum): the
# difference is exact to 2^-24 of at most 40, so 2.4e-6, and expf is off by 2 ulp, 2e-7; the sums over at most 32 sources err by
# 32 * 2^-24 of what they add up, 2e-6. Numerator and denominator both: 1e-5 of the largest partial at most, before out is
# rounded to bf16. lse errs by as much, and by the rounding of the result, 2^-24 * 32.
KERNEL_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Merged:
    """out: bf16 [num_rows, num_heads, head_dim]. lse: fp32 [num_rows, num_heads]."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Partials:
    """out: bf16 [sources, rows, heads, head_dim]. lse: fp32 [sources, rows, heads], natural logarithm."""

    out: torch.Tensor
    lse: torch.Tensor

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Their union in fp64: out [rows, heads, head_dim] and lse [rows, heads]. Sources of lse -inf are left out."""
        lse = self.lse.double()
        union = torch.logsumexp(lse, 0)
        weights = torch.exp(lse - torch.where(union == float("-inf"), 0.0, union))[..., None]
        return (weights * self.out.double().masked_fill(weights == 0, 0)).sum(0), union


def padded(rows: torch.Tensor, stride: int, filling: float) -> torch.Tensor:
    """Sources [sources, elements] of `rows`, `stride` elements apart, with `filling` between them and NaN behind."""
    sources = rows.flatten(1)
    buffer = torch.full((sources.shape[0], stride), filling, dtype=rows.dtype, device=rows.device)
    buffer[:, : sources.shape[1]] = sources
    return buffer


def merge(library: ModuleType, partials: Partials, *, spare: int = 0, want_lse: bool = True) -> Merged:
    """The library's union. spare: elements between a source and the next, NaN all. Raises AssertionError where it wrote
    outside its rows."""
    sources, rows, heads, head_dim = partials.out.shape
    out_stride, lse_stride = rows * heads * head_dim + 8 * spare, rows * heads + spare
    states = padded(partials.out, out_stride, float("nan"))
    lses = padded(partials.lse, lse_stride, float("nan"))
    out = torch.empty(rows + 2 * GUARD, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(rows + 2 * GUARD, heads, dtype=torch.float32, device=DEVICE)
    out.view(torch.int16).fill_(SENTINEL16)
    lse.view(torch.int32).fill_(SENTINEL32)
    library.merge_states(
        partials=states.data_ptr(),
        partial_lse=lses.data_ptr(),
        out=out[GUARD:].data_ptr(),
        lse=lse[GUARD:].data_ptr() if want_lse else 0,
        stream=torch.cuda.current_stream().cuda_stream,
        source_stride=out_stride,
        lse_stride=lse_stride,
        num_sources=sources,
        num_rows=rows,
        num_heads=heads,
        head_dim=head_dim,
    )
    torch.cuda.synchronize()
    last = rows + GUARD
    for guard in (slice(0, GUARD), slice(last, last + GUARD)):
        assert (out[guard].view(torch.int16) == SENTINEL16).all(), "out was written outside its rows"
        assert (lse[guard].view(torch.int32) == SENTINEL32).all(), "lse was written outside its rows"
    if not want_lse:
        assert (lse.view(torch.int32) == SENTINEL32).all(), "lse was written though it is absent"
    return Merged(out[GUARD:last], lse[GUARD:last])


def half_ulp(values: torch.Tensor) -> torch.Tensor:
    """What rounding to bf16 may move values of this size by."""
    return torch.ldexp(torch.ones_like(values), torch.frexp(values.abs()).exponent - 9)


def assert_exact(merged: Merged, partials: Partials) -> None:
    """Holds a union against fp64 arithmetic on its own partials: no attention kernel's error is in it."""
    out, lse = partials.exact()
    seen = partials.lse[..., None] > float("-inf")
    largest = float(partials.out.float().masked_fill(~seen, 0).abs().max())
    allowed = KERNEL_TOLERANCE * largest
    error = (merged.out.double() - out).abs() - half_ulp(out.abs() + allowed)
    assert float(error.nan_to_num(nan=float("inf")).max()) <= allowed
    assert lse_error(merged.lse.double(), lse) <= KERNEL_TOLERANCE
    blind = lse == float("-inf")
    assert not merged.out[blind].view(torch.int16).any(), "a row that no source saw is not zeros"


def shards(batch: Batch, bounds: Sequence[int]) -> list[Batch]:
    """The requests of `batch` over the pages [bounds[i], bounds[i + 1]) of each: disjoint, and together all of them."""
    found = []
    for start, end in itertools.pairwise(bounds):
        pieces = []
        for span in batch.spans():
            ids = torch.tensor(span.page_ids[start:end], dtype=torch.int32, device=DEVICE)
            whole = end < len(span.page_ids)  # the last page, perhaps partly filled, is another shard's
            last = batch.geometry.page_size if whole else span.last_page_len
            pieces.append(Piece(batch.q[span.q_from : span.q_to], ids, last))
        found.append(assemble(batch.geometry, batch.pool, pieces))
    return found


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("bounds", [(0, 5, 100), (0, 1, 2, 9, 10, 100)], ids=["two sources", "five sources"])
@pytest.mark.parametrize("first_by_prefill", [False, True])
def test_partial_attention_merges_into_the_whole(
    library: ModuleType, bounds: Sequence[int], page_format: str, first_by_prefill: bool
) -> None:
    """One query row a request, over a context that shards share out by pages; the short ones are in the first shards only,
    so that the others see nothing of them.

    Against the fp32 reference over the union. A partial is off its own reference by OUT_TOLERANCE and by its rounding to
    bf16, 2^-8 of its largest element M; weighing them by numbers that add up to 1 makes no more of that. The weights are
    w_s = exp(lse_s - lse), off by 2 LSE_TOLERANCE of themselves each, since their sum is wrong by one of these too: together
    that is 2 LSE_TOLERANCE * M. The result's own rounding comes on top, at its size.
    """
    shape = geometry(8, 2, page_format)
    batch = build(shape, [Request(1, context) for context in (1000, 70, 2000, 333)], device=DEVICE, seed=21)
    parts = []
    for i, shard in enumerate(shards(batch, bounds)):
        by_prefill = first_by_prefill and i == 0
        parts.append(run(library, shard) if by_prefill else run_decode(library, shard, Limits(4)).outputs)
    partials = Partials(torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts]))
    assert (partials.lse == float("-inf")).any(), "no shard that sees nothing: the case has lost its point"
    merged = merge(library, partials)
    assert_exact(merged, partials)
    expected = attention(batch)
    largest = float(partials.out.float().abs().max())
    allowed = OUT_TOLERANCE + (BF16_UNIT + 2 * LSE_TOLERANCE) * largest
    error = (merged.out.float() - expected.out).abs() - half_ulp(expected.out.abs() + allowed)
    assert float(error.nan_to_num(nan=float("inf")).max()) <= allowed
    assert lse_error(merged.lse, expected.lse) <= LSE_TOLERANCE + KERNEL_TOLERANCE


def random_partials(sources: int, rows: int, heads: int, head_dim: int, seed: int = 0) -> Partials:
    """Outputs in [-1, 1] and lse of up to +-20, as contexts of very different length have."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    out = torch.rand(sources, rows, heads, head_dim, device=DEVICE, generator=generator) * 2 - 1
    lse = (torch.rand(sources, rows, heads, device=DEVICE, generator=generator) * 2 - 1) * 20
    return Partials(out.to(torch.bfloat16), lse)


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("sources", [1, 2, 3, 8, 32])
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 1, 8), (7, 32, 512), (3, 5, 264), (1000, 16, 256)], ids=str)
def test_any_shape(library: ModuleType, rows: int, heads: int, head_dim: int, sources: int, spare: int) -> None:
    """Heads and columns that fill no block, sources apart with NaN between them."""
    partials = random_partials(sources, rows, heads, head_dim)
    assert_exact(merge(library, partials, spare=spare), partials)


def test_a_source_that_saw_nothing_weighs_nothing(library: ModuleType) -> None:
    """Whatever its rows hold: here NaN and infinities."""
    partials = random_partials(4, 9, 8, 512, seed=1)
    without = Partials(partials.out[1:].clone(), partials.lse[1:].clone())
    expected = merge(library, without)
    partials.lse[0] = float("-inf")
    partials.out[0] = float("nan")
    partials.out[0, ::2] = float("inf")
    merged = merge(library, partials)
    assert_exact(merged, partials)
    assert torch.equal(merged.out.view(torch.int16), expected.out.view(torch.int16))
    assert torch.equal(merged.lse.view(torch.int32), expected.lse.view(torch.int32))


def test_single_rows_that_a_source_did_not_see(library: ModuleType) -> None:
    """Blind rows and heads scattered over the sources, one of them blind in every source."""
    partials = random_partials(3, 40, 8, 512, seed=2)
    blind = torch.rand(partials.lse.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)) < 0.4
    blind[:, 7, 5] = True
    partials.lse[blind] = float("-inf")
    partials.out[blind] = float("nan")
    merged = merge(library, partials)
    assert_exact(merged, partials)
    assert merged.lse[7, 5] == float("-inf")


def test_rows_that_no_source_saw(library: ModuleType) -> None:
    partials = random_partials(3, 5, 8, 512)
    partials.lse.fill_(float("-inf"))
    partials.out.fill_(float("nan"))
    merged = merge(library, partials)
    assert not merged.out.view(torch.int16).any()
    assert (merged.lse == float("-inf")).all()


def test_a_nan_lse_stays_and_moves_no_other_row(library: ModuleType) -> None:
    """A source that saw something, but what is NaN: its row and head are NaN, whatever the other sources hold."""
    partials = random_partials(3, 20, 8, 512, seed=4)
    partials.lse[1:, 9, 6] = float("-inf")
    clean = merge(library, partials)
    spoiled = torch.zeros(20, 8, dtype=torch.bool, device=DEVICE)
    for source, row, head in ((0, 2, 3), (2, 4, 0), (0, 9, 6)):
        partials.lse[source, row, head] = float("nan")
        spoiled[row, head] = True
    partials.lse[:, 11, 1] = float("nan")
    spoiled[11, 1] = True
    merged = merge(library, partials)
    assert merged.out[spoiled].isnan().all()
    assert merged.lse[spoiled].isnan().all()
    assert torch.equal(merged.out[~spoiled].view(torch.int16), clean.out[~spoiled].view(torch.int16))
    assert torch.equal(merged.lse[~spoiled].view(torch.int32), clean.lse[~spoiled].view(torch.int32))


def test_lse_may_be_absent(library: ModuleType) -> None:
    partials = random_partials(2, 5, 8, 512)
    merged = merge(library, partials, want_lse=False)
    assert torch.equal(merged.out.view(torch.int16), merge(library, partials).out.view(torch.int16))


def test_one_source_is_copied(library: ModuleType) -> None:
    """A weight of 1: bits in, bits out."""
    partials = random_partials(1, 6, 8, 512)
    merged = merge(library, partials)
    assert torch.equal(merged.out.view(torch.int16), partials.out[0].view(torch.int16))
    assert torch.equal(merged.lse, partials.lse[0])


def test_rows_do_not_depend_on_the_rows_beside_them(library: ModuleType) -> None:
    partials = random_partials(3, 20, 8, 512)
    whole = merge(library, partials)
    some = merge(library, Partials(partials.out[:, 4:9].contiguous(), partials.lse[:, 4:9].contiguous()))
    assert torch.equal(some.out.view(torch.int16), whole.out[4:9].view(torch.int16))
    assert torch.equal(some.lse.view(torch.int32), whole.lse[4:9].view(torch.int32))


def test_no_rows_do_nothing(library: ModuleType) -> None:
    merge(library, random_partials(2, 0, 8, 512))
