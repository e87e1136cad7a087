"""The global prefill on every group and page format: right to the fp32 reference, and bit-identical to its JIT twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from bench.inputs import INT32_MAX, INT32_MIN, Batch, Request, build
from bench.outputs import make_outputs
from bench.reference import attention

from .harness import (
    DEVICE,
    FORMATS,
    GROUPS,
    MODEL_KV_HEADS,
    assert_close,
    assert_nan_exactly,
    check,
    geometry,
    run,
    spoil_queries,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library", "twins")]
OPERATION, HEAD_DIM = "prefill", 512

ONE = {4: 1, 8: 1, 16: 1}
TWO = {4: 2, 8: 2, 16: 2}


@dataclass(frozen=True)
class Case:
    """Requests as (query rows, context tokens), KV heads by group, and where the batch differs from the plain one."""

    name: str
    requests: tuple[tuple[int, int], ...]
    kv_heads: Mapping[int, int]
    lead_rows: int = 0
    sm_scale: float = 1.0

    def batch(self, group: int, page_format: str, seed: int = 1) -> Batch:
        """Its inputs."""
        return build(
            geometry(group, self.kv_heads[group], page_format),
            [Request(*request) for request in self.requests],
            device=DEVICE,
            seed=seed,
            lead_rows=self.lead_rows,
            sm_scale=self.sm_scale,
        )


RAGGED = Case(
    "ragged with empty requests",
    ((0, 0), (65, 65), (0, 130), (1, 1), (127, 200), (64, 64), (0, 64), (33, 500), (0, 0)),
    MODEL_KV_HEADS,
)
BLIND = Case("rows without a visible key", ((130, 70), (64, 0), (65, 64), (3, 5), (70, 1), (129, 128)), MODEL_KV_HEADS)
CASES = (
    Case("one tile", ((64, 64),), MODEL_KV_HEADS),
    Case("one row", ((1, 1),), ONE),
    RAGGED,
    Case("rows of nobody in front", ((70, 90), (0, 64), (128, 300)), TWO, lead_rows=69),
    Case("continued contexts", ((100, 1000), (64, 640), (1, 333), (65, 2049)), TWO),
    Case("every kind of last page", tuple((66, 128 + last) for last in (1, 2, 31, 32, 33, 62, 63, 64)), MODEL_KV_HEADS),
    Case("odd and even numbers of key tiles", tuple((50, 64 * tiles - 7) for tiles in range(1, 8)), TWO),
    Case("sixteen requests", tuple((1 + 37 * r % 150, 1 + 37 * r % 150 + 53 * r) for r in range(16)), TWO),
    BLIND,
    Case("another scale", ((100, 400), (30, 30)), ONE, sm_scale=0.37),
    Case("one long context", ((256, 40_000),), {4: 2, 8: 1, 16: 1}),
    Case("more than runs at once", ((600, 17_000),), MODEL_KV_HEADS),
)


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(library: ModuleType, case: Case, group: int, page_format: str) -> None:
    check(library, case.batch(group, page_format))


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_without_a_host_copy_of_q_indptr(library: ModuleType, group: int, page_format: str) -> None:
    batch = RAGGED.batch(group, page_format)
    outputs = check(library, batch, host_indptr=False)
    assert outputs.same_bits(run(library, batch)), "the size of the grid changed a result"


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_rows_without_a_visible_key(library: ModuleType, group: int, page_format: str) -> None:
    batch = BLIND.batch(group, page_format)
    outputs = run(library, batch)
    blind = []
    start = 0
    for rows, context in BLIND.requests:
        blind += [i < rows - context for i in range(rows)]  # row i sees context - rows + i + 1 keys
        start += rows
    unseen = torch.tensor(blind, device=DEVICE)
    lse, out = outputs.lse[:start], outputs.out[:start]
    assert (lse[unseen] == float("-inf")).all()
    assert not out[unseen].any()
    assert lse[~unseen].isfinite().all()


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_nan_query_gives_nan_and_moves_no_other_row(library: ModuleType, group: int, page_format: str) -> None:
    """A row of NaN, and single NaN elements: in the same tile, in another, and in a request of one row."""
    batch = RAGGED.batch(group, page_format)
    clean = run(library, batch)
    spoiled = spoil_queries(batch, (3, 4, 64, 65, 150))
    outputs = run(library, batch)
    assert_nan_exactly(outputs, clean, spoiled)
    assert outputs.status_bits() == 0


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("lse", "status"), [(False, True), (True, False), (False, False)])
def test_optional_outputs_may_be_absent(library: ModuleType, group: int, page_format: str, lse: bool, status: bool) -> None:
    batch = RAGGED.batch(group, page_format)
    whole = run(library, batch)
    outputs = run(library, batch, lse=lse, status=status)
    untouched = make_outputs(batch)
    assert torch.equal(outputs.out_buffer.view(torch.int16), whole.out_buffer.view(torch.int16))
    expected = whole if lse else untouched
    assert torch.equal(outputs.lse_buffer.view(torch.int32), expected.lse_buffer.view(torch.int32))
    assert outputs.status_bits() == 0


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_pages_gigabytes_into_a_pool(library: ModuleType, group: int, page_format: str) -> None:
    """Byte offsets beyond 2^32 and element offsets beyond 2^31, so that neither fits 32 bits, signed or not."""
    shape = geometry(group, MODEL_KV_HEADS[group], page_format)
    page_bytes = shape.rows_per_page * shape.kv_heads * shape.row_width * 2
    first_page = (1 << 32) // page_bytes + 1
    batch = build(shape, [Request(130, 300), Request(64, 64)], device=DEVICE, seed=2, first_page=first_page)
    assert min(page for span in batch.spans() for page in span.page_ids) * page_bytes > 1 << 32
    check(library, batch)
    del batch
    torch.cuda.empty_cache()


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bad", [-1, INT32_MIN, INT32_MAX, "num_pages"])
def test_a_page_id_outside_the_pool_reads_as_masked(library: ModuleType, group: int, page_format: str, bad: int | str) -> None:
    """In the first, a middle and the last, partly filled page; one request has no other page; one is untouched."""
    batch = build(
        geometry(group, MODEL_KV_HEADS[group], page_format),
        [Request(100, 400), Request(70, 250), Request(64, 64), Request(90, 90)],
        device=DEVICE,
        seed=3,
    )
    value = batch.num_pages if bad == "num_pages" else int(bad)
    clean = run(library, batch)
    first, second, third = batch.page_indptr[:3].tolist()
    for at in (first, first + 3, second - 1, second + 1, third):
        batch.page_ids[at] = value
    outputs = check(library, batch, status=library.STATUS_BAD_PAGE_ID)
    lonely, healthy = slice(170, 234), slice(234, 324)
    assert (outputs.lse[lonely] == float("-inf")).all()
    assert torch.equal(outputs.out[healthy].view(torch.int16), clean.out[healthy].view(torch.int16))


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("array", "at", "value"),
    [
        ("q_indptr", 0, -7),
        ("q_indptr", 0, INT32_MIN),
        ("q_indptr", 4, 400),
        ("q_indptr", 4, INT32_MAX),
        ("page_indptr", 0, -3),
        ("page_indptr", 0, INT32_MIN),
        ("page_indptr", 2, 1),
        ("page_indptr", 2, INT32_MIN),
        ("page_indptr", 4, 1000),
        ("page_indptr", 4, INT32_MAX),
        ("last_page_len", 1, 0),
        ("last_page_len", 1, 65),
        ("last_page_len", 1, INT32_MIN),
        ("last_page_len", 1, INT32_MAX),
    ],
)
def test_an_index_out_of_range_is_clamped(
    library: ModuleType, group: int, page_format: str, array: str, at: int, value: int
) -> None:
    """No fault; the request concerned reads what is left after clamping, the others are as they were."""
    # Neither rows nor pages of nobody, so that clamping to the end adds nothing to the last request; and no
    # half-filled page, so that a request that ends up with another's pages reads no NaN.
    batch = build(
        geometry(group, MODEL_KV_HEADS[group], page_format),
        [Request(70, 128), Request(64, 256), Request(100, 192), Request(30, 320)],
        device=DEVICE,
        seed=4,
        tail_rows=0,
        spare_page_ids=0,
    )
    clean = run(library, batch, host_indptr=False)
    getattr(batch, array)[at] = value
    outputs = check(library, batch, status=library.STATUS_BAD_INDEX, host_indptr=False)
    concerned = {min(at, 3), max(at - 1, 0)} if array == "page_indptr" else {min(at, 3)}
    rows = ((0, 70), (70, 134), (134, 234), (234, 264))
    for healthy in {0, 1, 2, 3} - concerned:
        some = slice(*rows[healthy])
        assert torch.equal(outputs.out[some].view(torch.int16), clean.out[some].view(torch.int16)), f"request {healthy}"


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_query_rows_that_run_backwards_do_not_fault(library: ModuleType, group: int, page_format: str) -> None:
    """q_indptr decreases in the middle: requests before and after the place are right, and nothing outside is
    written."""
    batch = build(
        geometry(group, MODEL_KV_HEADS[group], page_format),
        [Request(64, 64), Request(64, 64), Request(64, 64), Request(64, 64)],
        device=DEVICE,
        seed=5,
    )
    batch.q_indptr[2] = 70
    outputs = run(library, batch, host_indptr=False)
    out, lse = outputs.touched_rows()
    assert out <= set(range(256))
    assert lse <= set(range(256))
    assert_close(outputs, attention(batch, [*range(64), *range(192, 256)]))


@pytest.mark.parametrize("host_indptr", [True, False])
@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_batch_of_empty_requests_does_nothing(library: ModuleType, group: int, page_format: str, host_indptr: bool) -> None:
    batch = build(geometry(group, 1, page_format), [Request(0, 0), Request(0, 100), Request(0, 64)], device=DEVICE)
    outputs = run(library, batch, host_indptr=host_indptr)
    assert outputs.touched_rows() == (set(), set())
    assert outputs.status_bits() == 0


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("host_indptr", [True, False])
def test_no_request_at_all_does_nothing(library: ModuleType, page_format: str, host_indptr: bool) -> None:
    batch = build(geometry(8, 1, page_format), [], device=DEVICE)
    outputs = run(library, batch, host_indptr=host_indptr)
    assert outputs.touched_rows() == (set(), set())
    assert outputs.status_bits() == 0
