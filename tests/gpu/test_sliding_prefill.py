"""The windowed prefill on every group: right to the fp32 reference, bit-identical to its JIT twin, and a row's bits its own.

Every call here has NaN in whatever no request owns: slots past a length, pages of a released front, query rows of nobody
(bench/inputs.py). Results are held to the global family's 0.002, tighter than the 0.011 that is asked (bench/reference.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from bench.inputs import INT32_MAX, INT32_MIN, MAX_ORIGIN, Batch, Piece, Request, assemble, build, released, select
from bench.library import SLIDING_PREFILL, prefill, prefill_fields
from bench.outputs import Outputs, make_outputs
from bench.reference import attention

from .harness import (
    DEVICE,
    SLIDING_GROUPS,
    SLIDING_HEAD_DIM,
    WINDOW_LEFT,
    assert_close,
    assert_nan_exactly,
    assert_only_owned_rows,
    assert_refused,
    check,
    mark_values,
    run,
    seen_columns,
    sliding_geometry,
    spoil_queries,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library", "twins")]
OPERATION, HEAD_DIM = "sliding_prefill", SLIDING_HEAD_DIM

every_group = pytest.mark.parametrize("group", SLIDING_GROUPS)


@dataclass(frozen=True)
class Case:
    """Requests as (query rows, context tokens) and where the batch differs from the plain one.

    window_left: keys before its own that a row sees, if not the model's. release: whether pages before the first row's window
    are gone.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    window_left: int | None = None
    release: bool = False
    lead_rows: int = 0
    sm_scale: float = 1.0

    def batch(self, group: int, seed: int = 1) -> Batch:
        """Its inputs."""
        window_left = WINDOW_LEFT[group] if self.window_left is None else self.window_left
        whole = [Request(*request) for request in self.requests]
        return build(
            sliding_geometry(group),
            [released(r.rows, r.context, window_left) for r in whole] if self.release else whole,
            device=DEVICE,
            seed=seed,
            lead_rows=self.lead_rows,
            sm_scale=self.sm_scale,
            window_left=window_left,
        )


RAGGED = Case(
    "ragged with empty requests",
    ((0, 0), (65, 65), (0, 130), (1, 1), (127, 1200), (64, 64), (0, 64), (130, 70), (33, 1700), (0, 0)),
)
CASES = (
    Case("crossing the window", ((1300, 1300),)),
    RAGGED,
    Case("continuation with a released front", ((130, 3000), (1, 2048), (64, 1600), (65, 40_010), (300, 500)), release=True),
    Case("tiny", ((1, 1), (3, 3), (2, 5))),
    Case("continuation with its front", ((130, 3000), (1, 2048), (64, 1600)), window_left=255),
    Case("rows of nobody in front", ((70, 90), (0, 64), (128, 300)), window_left=70, lead_rows=69),
    Case("every kind of last page", tuple((66, 328 + last) for last in (1, 2, 31, 32, 33, 62, 63, 64)), window_left=150),
    Case("sixteen requests", tuple((1 + 37 * r % 150, 1 + 37 * r % 150 + 53 * r) for r in range(16)), window_left=300),
    Case("rows without a visible key", ((130, 70), (64, 0), (65, 64), (3, 5), (70, 1), (129, 128)), window_left=31),
    Case("a window of one key", ((200, 333), (1, 64), (5, 5)), window_left=0),
    Case("a window of a page", ((200, 333), (64, 640)), window_left=63, release=True),
    Case("a window of a page and a key", ((200, 333), (64, 640)), window_left=64, release=True),
    Case("a window that is no multiple of 64", ((300, 1000), (77, 400)), window_left=99, release=True),
    Case("a window larger than the context", ((300, 700), (64, 64)), window_left=100_000),
    Case("the widest window", ((100, 400),), window_left=1 << 29),
    Case("another scale", ((100, 400), (30, 30)), window_left=127, sm_scale=0.37),
)


@every_group
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(library: ModuleType, case: Case, group: int) -> None:
    check(library, case.batch(group))


@every_group
def test_without_a_host_copy_of_q_indptr(library: ModuleType, group: int) -> None:
    batch = RAGGED.batch(group)
    outputs = check(library, batch, host_indptr=False)
    assert outputs.same_bits(run(library, batch)), "the size of the grid changed a result"


@every_group
def test_rows_without_a_visible_key(library: ModuleType, group: int) -> None:
    """Zeros and -inf, exactly: rows before position 0."""
    shapes = ((130, 70), (64, 0), (3, 5), (70, 1))
    batch = Case("", shapes, window_left=40).batch(group)
    outputs = run(library, batch)
    blind = torch.tensor([i < rows - context for rows, context in shapes for i in range(rows)], device=DEVICE)
    lse, out = outputs.lse[: blind.numel()], outputs.out[: blind.numel()]
    assert (lse[blind] == float("-inf")).all()
    assert not out[blind].any()
    assert lse[~blind].isfinite().all()
    assert outputs.status_bits() == 0


@every_group
@pytest.mark.parametrize(("lse", "status"), [(False, True), (True, False), (False, False)])
def test_optional_outputs_may_be_absent(library: ModuleType, group: int, lse: bool, status: bool) -> None:
    batch = RAGGED.batch(group)
    batch.page_ids[0] = -1  # something to report
    whole = run(library, batch)
    outputs = run(library, batch, lse=lse, status=status)
    assert torch.equal(outputs.out_buffer.view(torch.int16), whole.out_buffer.view(torch.int16))
    expected = whole if lse else make_outputs(batch)
    assert torch.equal(outputs.lse_buffer.view(torch.int32), expected.lse_buffer.view(torch.int32))
    assert outputs.status_bits() == (library.STATUS_BAD_PAGE_ID if status else 0)


@every_group
def test_pages_gigabytes_into_a_pool(library: ModuleType, group: int) -> None:
    """Byte offsets beyond 2^32 and element offsets beyond 2^31, so that neither fits 32 bits, signed or not."""
    shape = sliding_geometry(group)
    page_bytes = shape.rows_per_page * shape.kv_heads * shape.row_width * 2
    first_page = (1 << 32) // page_bytes + 1
    requests = [released(130, 700, 100), Request(64, 64)]
    batch = build(shape, requests, device=DEVICE, seed=2, first_page=first_page, window_left=100)
    assert min(page for span in batch.spans() for page in span.page_ids) * page_bytes > 1 << 32
    check(library, batch)
    del batch
    torch.cuda.empty_cache()


# The window's edges.

EDGES = (0, 1, 2, 62, 63, 64, 65, 99, 127, 128, 200, 511, 512, 700, 1023, 1024, 5000)


@every_group
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("window_left", EDGES)
def test_a_row_sees_exactly_its_window(library: ModuleType, window_left: int, release: bool, group: int) -> None:
    """Key p - window_left is seen and the one before it is not, key p is seen and the one after it is not: V marks every key
    that lies near an edge of some row, and an output shows the marks that the row has seen. 100 rows at any phase."""
    rows = 100
    for context in (1400, 1409, 1472, 150, rows):
        request = released(rows, context, window_left) if release else Request(rows, context)
        batch = build(sliding_geometry(group, 2), [request], device=DEVICE, seed=context, window_left=window_left)
        first = context - rows
        near = [*range(first - window_left - 10, context - window_left + 10), *range(first - 10, context)]
        keys = sorted({key for key in near if request.origin <= key < context})
        assert len(keys) <= SLIDING_HEAD_DIM
        mark_values(batch, 0, keys)
        outputs = run(library, batch)
        positions = torch.arange(first, context, device=DEVICE)[:, None]
        marked = torch.tensor(keys, device=DEVICE)
        expected = (marked <= positions) & (marked >= positions - window_left)
        wrong = (seen_columns(outputs, rows)[:, : len(keys)] != expected).nonzero()
        assert not wrong.numel(), [f"position {first + i}, key {keys[k]} of {context}" for i, k in wrong[:8].tolist()]
        assert outputs.status_bits() == 0


@every_group
def test_a_window_of_one_key_copies_its_value(library: ModuleType, group: int) -> None:
    """A softmax over one score is 1: V comes out as it is, and the score as lse."""
    batch = build(sliding_geometry(group, 1), [Request(200, 333)], device=DEVICE, seed=4, window_left=0)
    outputs = run(library, batch)
    (span,) = batch.spans()
    shape = batch.geometry
    position = torch.arange(133, 333, device=DEVICE)
    page = torch.tensor(span.page_ids, device=DEVICE)[position // 64].long()
    value = batch.pool[page * shape.rows_per_page + shape.layer_row + 64 + position % 64]
    assert torch.equal(outputs.out[:200], value.expand(200, group, SLIDING_HEAD_DIM))


@every_group
def test_a_spike_is_felt_within_the_window_only(library: ModuleType, group: int) -> None:
    """One key of 400 times the size, which takes a row's whole softmax or none of it, and whose V is 2^16; at every phase of a
    tile."""
    window_left = 130
    for spike in (0, 1, 63, 64, 100, 127, 128, 191):
        batch = build(sliding_geometry(group, 1), [Request(400, 400)], device=DEVICE, seed=spike, window_left=window_left)
        shape, (span,) = batch.geometry, batch.spans()
        at = span.page_ids[spike // 64] * shape.rows_per_page + shape.layer_row + spike % 64
        batch.pool[at] *= 400
        batch.pool[at + 64] = 2.0**16
        outputs = run(library, batch)
        position = torch.arange(400, device=DEVICE)
        within = (position >= spike) & (position <= spike + window_left)
        out = outputs.out[:400].float()
        assert (out[~within].abs() < 1.01).all(), f"key {spike} was felt outside its window"
        taken = attention(batch).out[..., 0] > 60_000  # where its score is far above all others it has the whole row
        assert taken[within].float().mean() > 0.3, "the spike takes too few rows to tell"
        assert (out[taken] > 59_000).all(), f"key {spike} was not felt inside its window"


@every_group
def test_a_released_front_changes_no_bit(library: ModuleType, group: int) -> None:
    """The same keys with their front, without, and without but for two pages; an origin of zeros is an absent one."""
    shape, window_left = sliding_geometry(group), 200
    batch = build(shape, [Request(150, 1000), Request(64, 640)], device=DEVICE, seed=6, window_left=window_left)
    expected = run(library, batch)
    assert run(library, dataclasses.replace(batch, kv_origin=torch.zeros_like(batch.last_page_len))).same_bits(expected)
    for kept in (0, 2):
        pieces, pool = [], batch.pool.clone()
        pages = pool.view(-1, shape.rows_per_page, shape.kv_heads, shape.row_width)
        for span in batch.spans():
            rows = span.q_to - span.q_from
            oldest = span.context(64) - rows - window_left
            gone = oldest // 64 - kept
            ids = torch.tensor(span.page_ids, dtype=torch.int32, device=DEVICE)
            pages[ids[:gone].long()] = float("nan")
            pieces.append(Piece(batch.q[span.q_from : span.q_to], ids[gone:], span.last_page_len, 64 * gone))
        front = assemble(shape, pool, pieces, q_rows=batch.q_rows, window_left=window_left)
        outputs = run(library, front)
        assert outputs.same_bits(expected), f"{kept} pages kept"
        assert outputs.status_bits() == 0


# What the device reports.


@every_group
@pytest.mark.parametrize("bad", [-1, INT32_MIN, INT32_MAX, "num_pages"])
def test_a_page_id_outside_the_pool_reads_as_masked(library: ModuleType, group: int, bad: int | str) -> None:
    """In the first, a middle and the last, partly filled page; one request has no other page; one is untouched."""
    requests = [released(100, 800, 300), Request(70, 250), Request(64, 64), Request(90, 90)]
    batch = build(sliding_geometry(group), requests, device=DEVICE, seed=3, window_left=300)
    value = batch.num_pages if bad == "num_pages" else int(bad)
    clean = run(library, batch)
    first, second, third = batch.page_indptr[:3].tolist()
    for at in (first, first + 3, second - 1, second + 1, third):
        batch.page_ids[at] = value
    outputs = check(library, batch, status=library.STATUS_BAD_PAGE_ID)
    lonely, healthy = slice(170, 234), slice(234, 324)
    assert (outputs.lse[lonely] == float("-inf")).all()
    assert torch.equal(outputs.out[healthy].view(torch.int16), clean.out[healthy].view(torch.int16))


@every_group
def test_a_page_older_than_every_window_is_not_read(library: ModuleType, group: int) -> None:
    """It may be gone though it is listed: a bad id, or NaN in it."""
    batch = build(sliding_geometry(group), [Request(100, 800)], device=DEVICE, seed=3, window_left=300)
    clean = run(library, batch)
    shape, (span,) = batch.geometry, batch.spans()
    oldest = (700 - 300) // 64
    pages = batch.pool.view(-1, shape.rows_per_page, shape.kv_heads, shape.row_width)
    pages[torch.tensor(span.page_ids[:oldest], device=DEVICE)] = float("nan")
    assert run(library, batch).same_bits(clean)
    batch.page_ids[:oldest] = INT32_MIN
    outputs = run(library, batch)
    assert outputs.same_bits(clean)
    assert outputs.status_bits() == 0


@every_group
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
        ("kv_origin", 1, -64),
        ("kv_origin", 1, 1),
        ("kv_origin", 1, 63),
        ("kv_origin", 1, INT32_MIN),
        ("kv_origin", 1, INT32_MAX),
        ("kv_origin", 1, MAX_ORIGIN + 64),
    ],
)
def test_an_index_out_of_range_is_clamped(library: ModuleType, group: int, array: str, at: int, value: int) -> None:
    """No fault; the request concerned reads what is left after clamping, the others are as they were."""
    # As in test_prefill.py: nothing that clamping to an end would add, and no half-filled page. The window is within the pages
    # of the request whose origin is spoiled, so that it is not reported besides.
    batch = build(
        sliding_geometry(group),
        [Request(70, 128), Request(64, 256), Request(100, 192), Request(30, 320)],
        device=DEVICE,
        seed=4,
        tail_rows=0,
        spare_page_ids=0,
        window_left=150,
        has_origin=True,
    )
    clean = run(library, batch, host_indptr=False)
    changed = getattr(batch, array)
    changed[at] = value
    outputs = check(library, batch, status=library.STATUS_BAD_INDEX, host_indptr=False)
    concerned = {min(at, 3), max(at - 1, 0)} if array == "page_indptr" else {min(at, 3)}
    rows = ((0, 70), (70, 134), (134, 234), (234, 264))
    for healthy in {0, 1, 2, 3} - concerned:
        some = slice(*rows[healthy])
        assert torch.equal(outputs.out[some].view(torch.int16), clean.out[some].view(torch.int16)), f"request {healthy}"


@every_group
def test_a_window_that_reaches_before_the_page_list_is_masked_there(library: ModuleType, group: int) -> None:
    """The first row's window, then all rows' but one, then rows that lie before the list themselves."""
    for origin in (384, 448, 576):
        requests = [Request(70, 300), Request(100, 600, origin), Request(64, 128)]
        batch = build(sliding_geometry(group), requests, device=DEVICE, seed=8, window_left=150)
        outputs = check(library, batch, status=library.STATUS_BAD_WINDOW)
        blind = outputs.lse[70:170] == float("-inf")
        assert torch.equal(blind.all(1), torch.arange(500, 600, device=DEVICE) < origin)
        only = select(batch, [0, 2])
        assert run(library, only).status_bits() == 0


@every_group
@pytest.mark.parametrize(
    ("rows", "context", "origin", "window_left", "reported"),
    [
        (1, 200, 64, 135, False),  # position 199: the window begins at 64
        (1, 200, 64, 136, True),
        (1, 200, 128, 71, False),
        (1, 200, 128, 72, True),
        (100, 300, 128, 72, False),  # the first row is at 200
        (100, 300, 128, 73, True),
        (1, 65, 64, 0, False),  # its own key only
        (1, 65, 64, 1, True),
        (130, 300, 0, 5000, False),  # nothing is gone
        (400, 300, 0, 5000, False),  # rows before position 0 have no window
        (400, 300, 64, 5, True),
    ],
    ids=str,
)
def test_the_window_is_reported_from_the_first_lost_key_on(
    library: ModuleType, group: int, rows: int, context: int, origin: int, window_left: int, reported: bool
) -> None:
    request = Request(rows, context, origin)
    batch = build(sliding_geometry(group, 1), [request], device=DEVICE, seed=9, window_left=window_left, has_origin=True)
    outputs = run(library, batch)
    assert outputs.status_bits() == (library.STATUS_BAD_WINDOW if reported else 0)
    assert_close(outputs, attention(batch))


@every_group
def test_query_rows_that_run_backwards_do_not_fault(library: ModuleType, group: int) -> None:
    """q_indptr decreases in the middle: requests before and after the place are right, and nothing outside is written."""
    batch = build(sliding_geometry(group), [Request(64, 64)] * 4, device=DEVICE, seed=5, window_left=40)
    batch.q_indptr[2] = 70
    outputs = run(library, batch, host_indptr=False)
    out, lse = outputs.touched_rows()
    assert out <= set(range(256))
    assert lse <= set(range(256))
    assert_close(outputs, attention(batch, [*range(64), *range(192, 256)]))


@every_group
def test_a_nan_query_gives_nan_and_moves_no_other_row(library: ModuleType, group: int) -> None:
    """A row of NaN, and single NaN elements: in the same tile, in another, and in a request of one row."""
    batch = RAGGED.batch(group)
    clean = run(library, batch)
    spoiled = spoil_queries(batch, (3, 4, 64, 65, 150))
    outputs = run(library, batch)
    assert_nan_exactly(outputs, clean, spoiled)
    assert outputs.status_bits() == 0


@every_group
@pytest.mark.parametrize("host_indptr", [True, False])
@pytest.mark.parametrize("requests", [(), ((0, 0), (0, 100), (0, 64))], ids=["no request", "empty requests"])
def test_no_rows_do_nothing(library: ModuleType, group: int, requests: tuple[tuple[int, int], ...], host_indptr: bool) -> None:
    outputs = run(library, Case("", requests).batch(group), host_indptr=host_indptr)
    assert outputs.touched_rows() == (set(), set())
    assert outputs.status_bits() == 0


# A row's bits are its own.

REQUESTS = (
    Request(1, 1),
    Request(65, 400),
    Request(130, 130),
    Request(0, 70),
    released(64, 1700, 200),
    Request(190, 190),
    released(17, 3000, 200),
    Request(70, 33),
)


def several(group: int) -> Batch:
    """A batch of every request, with a window of 201."""
    return build(sliding_geometry(group), REQUESTS, device=DEVICE, seed=7, window_left=200)


def bits(outputs: Outputs, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of out and lse of rows [start, end): int16 [rows, q_heads, head_dim] and int32 [rows, q_heads]."""
    return outputs.out[start:end].view(torch.int16).clone(), outputs.lse[start:end].view(torch.int32).clone()


@every_group
@pytest.mark.parametrize(
    ("order", "lead_rows"),
    [*(((r,), 0) for r in range(len(REQUESTS))), ((7, 6, 5, 4, 3, 2, 1, 0), 0), ((4, 1, 4, 6, 2), 0), ((2, 5, 0), 61)],
    ids=str,
)
def test_bits_do_not_depend_on_the_batch(library: ModuleType, group: int, order: Sequence[int], lead_rows: int) -> None:
    """Alone, in reverse, with another beside itself twice, and behind rows of nobody."""
    whole = several(group)
    expected = run(library, whole)
    batch = select(whole, order, lead_rows=lead_rows, q_rows=lead_rows + 600)
    outputs = run(library, batch)
    assert_only_owned_rows(batch, outputs)
    for r, mine in zip(order, batch.spans(), strict=True):
        span = whole.spans()[r]
        for name, a, b in zip(
            ("out", "lse"), bits(outputs, mine.q_from, mine.q_to), bits(expected, span.q_from, span.q_to), strict=True
        ):
            assert torch.equal(a, b), f"{name} of request {r}"


# Where a prompt of 700 tokens is cut: at pages. A last page that is not full lies shifted in its tile: another order of sums.
CUTS = {"once": (384,), "often": (64, 128, 384, 640)}


def chunk(whole: Batch, start: int, end: int, release: bool) -> Batch:
    """Rows [start, end) of the one request of `whole`, as they are prefilled when no token past `end` is there yet: those are
    NaN. release: the pages before the chunk's window are gone."""
    shape, (span,) = whole.geometry, whole.spans()
    assert whole.window_left is not None
    gone = max(start - whole.window_left, 0) // 64 if release else 0
    ids = torch.tensor(span.page_ids, dtype=torch.int32, device=DEVICE)
    pages = -(-end // 64)
    last = end - (pages - 1) * 64
    pool = whole.pool.clone()
    paged = pool.view(-1, shape.rows_per_page, shape.kv_heads, shape.row_width)
    paged[ids[pages:].long()] = float("nan")
    paged[ids[:gone].long()] = float("nan")
    for tile in range(2):
        paged[int(ids[pages - 1]), shape.layer_row + tile * 64 + last : shape.layer_row + (tile + 1) * 64] = float("nan")
    piece = Piece(whole.q[span.q_from + start : span.q_from + end], ids[gone:pages], last, 64 * gone)
    return assemble(shape, pool, [piece], window_left=whole.window_left, seed=start)


@every_group
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("window_left", [0, 99, 127, 128, 5000])
@pytest.mark.parametrize("cuts", CUTS)
def test_bits_do_not_depend_on_where_a_prompt_is_cut(
    library: ModuleType, group: int, cuts: str, window_left: int, release: bool
) -> None:
    """Prefilled whole and in chunks: query tiles sit on multiples of 64 positions either way, so row by row the same bits."""
    shape = sliding_geometry(group)
    whole = build(shape, [Request(700, 700)], device=DEVICE, seed=11, window_left=window_left)
    expected = run(library, whole)
    for start, end in itertools.pairwise((0, *CUTS[cuts], 700)):
        outputs = run(library, chunk(whole, start, end, release))
        assert outputs.status_bits() == 0
        for name, mine, one in zip(("out", "lse"), bits(outputs, 0, end - start), bits(expected, start, end), strict=True):
            differ = (mine != one).flatten(1).any(1).nonzero().flatten() + start
            assert not differ.numel(), f"{name} of rows {differ[:8].tolist()} of the chunk from {start} to {end}"


@every_group
def test_a_captured_graph_replays_other_plans(library: ModuleType, group: int) -> None:
    """Captured without q_indptr_host, replayed after the plan's arrays were overwritten with fewer and other requests."""
    whole = several(group)
    q_rows, size, num_page_ids = 450, 5, 70

    def chosen(order: Sequence[int]) -> Batch:
        return select(whole, order, q_rows=q_rows, size=size, num_page_ids=num_page_ids)

    held = chosen((0, 1, 2, 3, 4))  # the graph holds the addresses of its arrays
    outputs = make_outputs(held)
    prefill(library, held, outputs, host_indptr=False)  # warm: what is loaded lazily may not load while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill(library, held, outputs, host_indptr=False)
    for order in ((0, 1, 2, 3, 4), (5, 7, 1), (6,), (), (4, 2, 1, 0, 3)):
        plan = chosen(order)
        for name in ("q", "page_ids", "page_indptr", "last_page_len", "kv_origin", "q_indptr"):
            getattr(held, name).copy_(getattr(plan, name))
        outputs.refill()
        graph.replay()
        torch.cuda.synchronize()
        assert_only_owned_rows(plan, outputs)
        assert_close(outputs, attention(plan))
        assert outputs.status_bits() == 0
        assert outputs.same_bits(run(library, plan)), "a replay and a fresh call differ in bits"


@every_group
def test_a_call_is_ordered_on_its_stream(library: ModuleType, group: int) -> None:
    """Behind a long wait on a side stream its inputs change: a call on any other stream would read the NaN before."""
    batch = several(group)
    expected = run(library, batch)
    late = batch.q.clone()
    batch.q.fill_(float("nan"))
    outputs = make_outputs(batch)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # clock cycles: some 0.1 s
        batch.q.copy_(late)
        prefill(library, batch, outputs, host_indptr=False)
        assert not side.query(), "the wait was over before the call: nothing was tested, or the call synchronised"
    side.synchronize()
    assert outputs.same_bits(expected)


# Refusals.


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(32, 16), (20, 10), (6, 3), (32, 4)])
def test_many_items_are_each_dealt_once(library: ModuleType, q_heads: int, kv_heads: int) -> None:
    """More items than any device has multiprocessors, in teams of four CTAs, of two and of one."""
    requests = [Request(*r) for r in ((1, 1), (700, 700), (1300, 1300), (64, 2000), (700, 900), (500, 500)) * 2]
    batch = build(sliding_geometry(q_heads // kv_heads, kv_heads), requests, device=DEVICE, window_left=511)
    check(library, batch)


SERVED = ((8, 1), (8, 2), (16, 8), (32, 16), (16, 4), (8, 4), (4, 1), (4, 2), (2, 1))


@pytest.mark.parametrize(("q_heads", "kv_heads"), SERVED)
def test_the_heads_of_every_model_and_shard_are_served(library: ModuleType, q_heads: int, kv_heads: int) -> None:
    shape = sliding_geometry(q_heads // kv_heads, kv_heads)
    batch = build(shape, [Request(70, 200)], device=DEVICE, window_left=90)
    assert library.supports(SLIDING_PREFILL, q_heads, kv_heads, 256, 64, library.PAGE_FORMAT_SPLIT) == library.OK
    assert_close(run(library, batch), attention(batch))


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"num_q_heads": 40, "num_kv_heads": 8}, "UNSUPPORTED", "num_q_heads"),
        ({"head_dim": 512}, "UNSUPPORTED", "head_dim"),
        ({"page_size": 32}, "UNSUPPORTED", "page_size"),
        ({"page_format": 0}, "INVALID_ARGUMENT", "page_format"),
        ({"page_format": 2}, "UNSUPPORTED", "page_format"),
        ({"window_left": -1}, "INVALID_ARGUMENT", "window_left"),
        ({"window_left": (1 << 29) + 1}, "INVALID_ARGUMENT", "window_left"),
        ({"kv_origin": 2}, "INVALID_ARGUMENT", "kv_origin"),
        ({"q": 0}, "INVALID_ARGUMENT", "q"),
        ({"out": 0}, "INVALID_ARGUMENT", "out"),
        ({"pool": 8}, "INVALID_ARGUMENT", "pool"),
        ({"page_indptr": 0}, "INVALID_ARGUMENT", "page_indptr"),
        ({"last_page_len": 0}, "INVALID_ARGUMENT", "last_page_len"),
        ({"q_indptr": 0}, "INVALID_ARGUMENT", "q_indptr"),
        ({"rows_per_page": 100}, "INVALID_ARGUMENT", "rows_per_page"),
        ({"layer_row": 384}, "INVALID_ARGUMENT", "layer_row"),
        ({"sm_scale": float("nan")}, "INVALID_ARGUMENT", "sm_scale"),
        ({"batch": -1}, "INVALID_ARGUMENT", "batch"),
        ({"q_rows": 60}, "INVALID_ARGUMENT", "q_indptr_host"),
        ({"num_page_ids": -1}, "INVALID_ARGUMENT", "num_page_ids"),
    ],
    ids=str,
)
def test_a_refusal_names_the_argument(library: ModuleType, changes: dict[str, int | float], code: str, named: str) -> None:
    """The rest of the call is right, so only the change is refused."""
    batch = build(sliding_geometry(4, 10), [released(64, 640, 100)], device=DEVICE, window_left=100)
    outputs = make_outputs(batch)
    host = batch.q_indptr.cpu()
    fields = prefill_fields(batch, outputs, q_indptr_host=host)
    assert_refused(library, library.sliding_prefill, {**fields, **changes}, outputs, code, named)
    prefill(library, batch, outputs)
    torch.cuda.synchronize()
    assert_close(outputs, attention(batch))
