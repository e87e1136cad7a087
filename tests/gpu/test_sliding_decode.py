"""The windowed decode on every group: right to the fp32 reference, bit-identical to its two JIT twins, and a request's bits its
own.

Hostile as in test_decode.py, and with NaN in the pages of a released front. Results are held to the global family's 0.002,
tighter than the 0.0043 that is asked (bench/reference.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from bench.inputs import INT32_MAX, INT32_MIN, Batch, Piece, Request, assemble, build, released, select
from bench.library import SLIDING_DECODE, decode, decode_fields
from bench.outputs import make_outputs
from bench.plans import BATCH, FIRST_PAGE, HIDDEN, ITEMS, PAGE_IDS, TILES, Limits, make_plan
from bench.reference import attention

from .harness import (
    DEVICE,
    SLIDING_GROUPS,
    SLIDING_HEAD_DIM,
    WINDOW_LEFT,
    Decoded,
    assert_close,
    assert_nan_exactly,
    assert_only_owned_rows,
    assert_refused,
    check_decode,
    check_decodes_in_a_row,
    check_newest_token_is_awaited,
    mark_values,
    run_decode,
    seen_columns,
    sliding_geometry,
    spoil_queries,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library", "twins")]
OPERATION, HEAD_DIM = "sliding_decode", SLIDING_HEAD_DIM

every_group = pytest.mark.parametrize("group", SLIDING_GROUPS)


@dataclass(frozen=True)
class Case:
    """Contexts in tokens and where the batch and the plan differ from the plain ones.

    resident: tokens in a request's pages, rounded up to pages; None: all. window_left: keys before its own that a row sees, if
    not the model's; -1: all, in a plan without a window.
    """

    name: str
    contexts: tuple[int, ...]
    resident: int | None = None
    window_left: int | None = None
    lead_rows: int = 0
    chunk_tokens: int = 0
    spare_batch: int = 0
    sm_scale: float = 1.0

    def batch(self, group: int, seed: int = 1) -> Batch:
        """Its inputs: one query row a request."""
        window_left = WINDOW_LEFT[group] if self.window_left is None else self.window_left
        requests = [Request(1, context) for context in self.contexts]
        if self.resident is not None:
            requests = [Request(1, c, max(c - self.resident, 0) // 64 * 64) for c in self.contexts]
        return build(
            sliding_geometry(group),
            requests,
            device=DEVICE,
            seed=seed,
            lead_rows=self.lead_rows,
            sm_scale=self.sm_scale,
            window_left=None if window_left < 0 else window_left,
        )

    def limits(self, batch: Batch) -> Limits:
        """What its plan is sized for."""
        slots = 0
        if self.chunk_tokens:
            pages = sum(len(span.page_ids) for span in batch.spans())
            slots = batch.geometry.kv_heads * pages + 3
        return Limits(batch.size + self.spare_batch, max_slots=slots, chunk_tokens=self.chunk_tokens)


def window_and_a_page(group: int) -> Case:
    """Contexts at pages' ends, with one page more than the window resident: the oldest page is masked whole."""
    window = WINDOW_LEFT[group] + 1
    return Case("", (window + 64, window + 128, window + 1024), resident=window + 64)


RAGGED = Case("ragged", (1, 700, 1300, 0, 5000, 1100, 63, 2048, 0, 1024, 513))
CASES = (
    RAGGED,
    Case("an offset row", (1700, 64, 700), lead_rows=5),
    Case("short rows of 1 to 64 keys", tuple(range(1, 65))),
    Case("a released front", (1700, 3000, 40_000, 64), resident=1100),
    Case("every phase of the window", tuple(1500 + 7 * r for r in range(24)), window_left=299, resident=400),
    Case("a window of one key", (1, 64, 65, 128, 700), window_left=0),
    Case("a window of a page", (1, 64, 65, 128, 700), window_left=63),
    Case("a window of a page and a key", (1, 64, 65, 128, 700), window_left=64, resident=129),
    Case("a window larger than every context", (1, 64, 700, 3000), window_left=100_000),
    Case("the widest window", (1, 64, 700), window_left=(1 << 29) - 1),
    Case("no window", (1, 700, 3000), window_left=-1),
    Case("more pages than a warp has lanes", (12_400, 700), window_left=-1),  # 33 of a CTA
    Case("chunks of two pages", (1700, 40, 900), chunk_tokens=128),
    Case("a padded batch", (1300, 64, 1000), spare_batch=13),
    Case("another scale", (1400, 30), sm_scale=0.37),
)


@every_group
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(library: ModuleType, case: Case, group: int) -> None:
    batch = case.batch(group)
    check_decode(library, batch, case.limits(batch))


@every_group
def test_a_window_and_a_page_resident(library: ModuleType, group: int) -> None:
    """The plan skips the masked page, and so its bytes are not read: they may be NaN."""
    case = window_and_a_page(group)
    batch = case.batch(group)
    decoded = check_decode(library, batch, case.limits(batch))
    shape = batch.geometry
    first = [span.page_ids[0] for span in batch.spans()]
    batch.pool.view(-1, shape.rows_per_page, shape.kv_heads, shape.row_width)[first] = float("nan")
    assert run_decode(library, batch, case.limits(batch)).same_bits(decoded)
    batch.page_ids[batch.page_indptr[: batch.size].long()] = INT32_MIN
    again = run_decode(library, batch, case.limits(batch))
    assert again.same_bits(decoded)
    assert again.outputs.status_bits() == 0


@every_group
def test_the_plan_of_a_window(library: ModuleType, group: int) -> None:
    """Items begin at the page of the first visible key and hide what is older in it."""
    batch = Case("", (1000,), window_left=199, resident=260).batch(group)  # keys 800 to 999; the list begins at 704
    plan = make_plan(library, batch, Limits(1))
    items = plan.host_parts.items
    items = items[items[:, TILES] > 0]
    assert len(items) == plan.header[ITEMS]
    assert int(items[:, TILES].sum()) == 4 * batch.geometry.kv_heads  # 768 to 999
    assert int(items[:, FIRST_PAGE].min()) == 1
    assert int(items[:, HIDDEN].max()) == 32
    assert plan.header[PAGE_IDS] == 5


# The window's edges.

EDGES = (0, 1, 2, 62, 63, 64, 65, 99, 127, 128, 200, 511, 512, 1023, 1024, 5000)


@every_group
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("window_left", EDGES)
def test_a_row_sees_exactly_its_window(library: ModuleType, window_left: int, release: bool, group: int) -> None:
    """V marks every key within a page and more of an edge of the window, and an output shows the marks that it has seen.
    Contexts at every phase of a page, and shorter ones."""
    contexts = [*range(1400, 1466), 1, 2, 63, 64, 65, 150]
    requests = [released(1, c, window_left) if release else Request(1, c) for c in contexts]
    batch = build(sliding_geometry(group, 1), requests, device=DEVICE, seed=3, window_left=window_left)
    expected = torch.zeros(len(contexts), SLIDING_HEAD_DIM, dtype=torch.bool, device=DEVICE)
    for r, request in enumerate(requests):
        position = request.context - 1
        near = [*range(position - window_left - 70, position - window_left + 50), *range(position - 60, position + 1)]
        keys = sorted({key for key in near if request.origin <= key <= position})
        mark_values(batch, r, keys)
        expected[r, : len(keys)] = torch.tensor([key >= position - window_left for key in keys])
    decoded = run_decode(library, batch, Limits(len(contexts)))
    wrong = (seen_columns(decoded.outputs, len(contexts)) != expected).nonzero()
    assert not wrong.numel(), [f"context {contexts[r]}, mark {k}" for r, k in wrong[:8].tolist()]
    assert decoded.outputs.status_bits() == 0


@every_group
def test_a_released_front_changes_no_bit(library: ModuleType, group: int) -> None:
    """The same keys with their front, without, and without but for two pages; an origin of zeros is an absent one."""
    shape, window_left = sliding_geometry(group), 200
    batch = build(shape, [Request(1, c) for c in (1000, 640, 641, 90)], device=DEVICE, seed=6, window_left=window_left)
    limits = Limits(4)
    expected = run_decode(library, batch, limits)
    zeros = dataclasses.replace(batch, kv_origin=torch.zeros_like(batch.last_page_len))
    assert run_decode(library, zeros, limits).same_bits(expected)
    for kept in (0, 2):
        pieces, pool = [], batch.pool.clone()
        pages = pool.view(-1, shape.rows_per_page, shape.kv_heads, shape.row_width)
        for span in batch.spans():
            gone = max((span.context(64) - 1 - window_left) // 64 - kept, 0)
            ids = torch.tensor(span.page_ids, dtype=torch.int32, device=DEVICE)
            pages[ids[:gone].long()] = float("nan")
            pieces.append(Piece(batch.q[span.q_from : span.q_to], ids[gone:], span.last_page_len, 64 * gone))
        front = assemble(shape, pool, pieces, q_rows=batch.q_rows, window_left=window_left)
        decoded = run_decode(library, front, limits)
        assert decoded.same_bits(expected), f"{kept} pages kept"
        assert decoded.outputs.status_bits() == 0


@every_group
def test_a_page_that_is_listed_but_not_needed_is_not_read(library: ModuleType, group: int) -> None:
    """kv_len ends before the pages do, as where a server reserves pages ahead. What lies behind it is NaN here."""
    shape = sliding_geometry(group)
    requests = [released(1, 900, 300), Request(1, 200)]
    batch = build(shape, requests, device=DEVICE, seed=9, window_left=300)
    spans = batch.spans()
    spare = torch.tensor([page for page in range(batch.num_pages) if all(page not in span.page_ids for span in spans)][:2])
    pieces = []
    for span in spans:
        ids = torch.tensor(span.page_ids, dtype=torch.int32, device=DEVICE)
        pieces.append(Piece(batch.q[span.q_from : span.q_to], torch.cat((ids, spare.to(ids))), span.last_page_len, span.origin))
    more = assemble(shape, batch.pool, pieces, q_rows=batch.q_rows, window_left=300)
    plan = make_plan(library, more, Limits(2), kv_len=[span.context(64) for span in spans])
    outputs = make_outputs(more)
    decode(library, more, plan, outputs)
    torch.cuda.synchronize()
    assert outputs.same_bits(run_decode(library, batch, Limits(2)).outputs)
    assert outputs.status_bits() == 0


# What the device reports.


@every_group
@pytest.mark.parametrize("bad", [-1, INT32_MIN, INT32_MAX, "num_pages"])
def test_a_page_id_outside_the_pool_reads_as_masked(library: ModuleType, group: int, bad: int | str) -> None:
    """In the first, a middle and the last, partly filled page; one request has no other page; one is untouched."""
    requests = [released(1, 800, 300), Request(1, 250), Request(1, 64), Request(1, 90)]
    batch = build(sliding_geometry(group), requests, device=DEVICE, seed=3, window_left=300)
    value = batch.num_pages if bad == "num_pages" else int(bad)
    first, second, third = batch.page_indptr[:3].tolist()
    for limits in (Limits(4), Limits(4, max_slots=200, chunk_tokens=256)):
        clean = run_decode(library, batch, limits)
        spoiled = select(batch, range(4))
        for at in (first, first + 3, second - 1, second + 1, third):
            spoiled.page_ids[at] = value
        decoded = check_decode(library, spoiled, limits, status=library.STATUS_BAD_PAGE_ID)
        assert (decoded.outputs.lse[2] == float("-inf")).all()
        for mine, other in zip(bits(decoded, 3), bits(clean, 3), strict=True):
            assert torch.equal(mine, other)


@every_group
def test_a_nan_query_gives_nan_and_moves_no_other_row(library: ModuleType, group: int) -> None:
    """A row of NaN over many partials, and single NaN elements over some and over one."""
    batch = RAGGED.batch(group)
    limits = RAGGED.limits(batch)
    clean = run_decode(library, batch, limits).outputs
    spoiled = spoil_queries(batch, (4, 0, 1))
    outputs = run_decode(library, batch, limits).outputs
    assert_nan_exactly(outputs, clean, spoiled)
    assert outputs.status_bits() == 0


@every_group
@pytest.mark.parametrize(("lse", "status"), [(False, True), (True, False), (False, False)])
def test_optional_outputs_may_be_absent(library: ModuleType, group: int, lse: bool, status: bool) -> None:
    batch = RAGGED.batch(group)
    batch.page_ids[0] = -1  # something to report
    limits = RAGGED.limits(batch)
    whole = run_decode(library, batch, limits).outputs
    outputs = run_decode(library, batch, limits, lse=lse, status=status).outputs
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
    requests = [released(1, 700, 100), Request(1, 64)]
    batch = build(shape, requests, device=DEVICE, seed=2, first_page=first_page, window_left=100)
    check_decode(library, batch, Limits(2))
    del batch
    torch.cuda.empty_cache()


def test_no_request_at_all_does_nothing(library: ModuleType) -> None:
    batch = build(sliding_geometry(2), [], device=DEVICE, window_left=100)
    decoded = run_decode(library, batch, Limits(4))
    assert decoded.outputs.touched_rows() == (set(), set())
    assert decoded.outputs.status_bits() == 0


# A request's bits are its own.

MANY = (1, 200, 130, 0, 700, 64, 3000, 33)


def several(group: int) -> Batch:
    """A batch of every length in MANY with a window of 201, fronts released."""
    requests = [released(1, context, 200) for context in MANY]
    return build(sliding_geometry(group), requests, device=DEVICE, seed=7, window_left=200)


def bits(decoded: Decoded, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of a request's out and lse: int16 [q_heads, head_dim] and int32 [q_heads]."""
    row = decoded.batch.spans()[request].q_from
    return decoded.outputs.out[row].view(torch.int16), decoded.outputs.lse[row].view(torch.int32)


@every_group
def test_a_decode_waits_for_the_one_before_it(library: ModuleType, group: int) -> None:
    batch = RAGGED.batch(group)
    check_decodes_in_a_row(library, batch, RAGGED.limits(batch))


def test_an_early_decode_waits_for_its_newest_token(library: ModuleType) -> None:
    """Of 8 and 16 KV heads: one's output row is as long as the other's row of the pool."""
    writer, reader = (
        build(sliding_geometry(2, kv_heads), [released(1, 3000, 1023)], device=DEVICE, seed=12, tail_rows=0, window_left=1023)
        for kv_heads in (8, 16)
    )
    check_newest_token_is_awaited(library, writer, reader)


@every_group
def test_bits_do_not_depend_on_the_batch(library: ModuleType, group: int) -> None:
    """Alone, in reverse, beside itself twice, behind rows of nobody, and in plans of other sizes."""
    whole = several(group)
    expected = run_decode(library, whole, Limits(len(MANY)))
    orders: list[tuple[Sequence[int], int, Limits]] = [
        *(((r,), 0, Limits(1)) for r in range(len(MANY))),
        ((7, 6, 5, 4, 3, 2, 1, 0), 0, Limits(8)),
        ((4, 1, 4, 6, 2), 0, Limits(64)),
        ((2, 5, 0), 61, Limits(3, max_slots=5000)),
        ((6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6), 0, Limits(12)),
    ]
    for order, lead_rows, limits in orders:
        batch = select(whole, order, lead_rows=lead_rows, q_rows=lead_rows + 20)
        decoded = run_decode(library, batch, limits)
        assert_only_owned_rows(batch, decoded.outputs)
        for at, r in enumerate(order):
            for name, mine, alone in zip(("out", "lse"), bits(decoded, at), bits(expected, r), strict=True):
                assert torch.equal(mine, alone), f"{name} of request {r} in {order}"


@every_group
def test_a_captured_graph_replays_other_plans(library: ModuleType, group: int) -> None:
    """Captured once, replayed with plans of other requests, lengths, origins and windows copied over its own."""
    whole = several(group)
    limits = Limits(max_batch=6)

    def chosen(order: Sequence[int], window_left: int) -> Batch:
        batch = select(whole, order, q_rows=9, num_page_ids=120)
        return dataclasses.replace(batch, window_left=window_left)

    held = chosen((0, 1, 2, 3, 4), 200)  # the graph holds the addresses of its arrays
    plan = make_plan(library, held, limits)
    outputs = make_outputs(held)
    decode(library, held, plan, outputs)  # warm: what is loaded lazily may not load while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(library, held, plan, outputs)
    for order, window_left in (
        ((0, 1, 2, 3, 4), 200),
        ((5, 7, 1), 200),
        ((6,), 70),
        ((), 200),
        ((4, 2, 1, 0, 3, 6), 0),
        ((3,), 200),
    ):
        batch = chosen(order, window_left)
        direct = run_decode(library, batch, limits)
        assert direct.plan.header[BATCH] == len(order)
        held.q.copy_(batch.q)
        held.page_ids.copy_(batch.page_ids)
        plan.load(direct.plan)
        plan.workspace.fill_(-1)
        outputs.refill()
        graph.replay()
        torch.cuda.synchronize()
        assert_only_owned_rows(batch, outputs)
        assert_close(outputs, attention(batch))
        assert outputs.status_bits() == 0
        assert outputs.same_bits(direct.outputs), "a replay and a direct call differ in bits"


# Refusals.

SERVED = ((8, 1), (8, 2), (16, 8), (32, 16), (16, 4), (8, 4), (4, 1), (4, 2), (2, 1))


@pytest.mark.parametrize(("q_heads", "kv_heads"), SERVED)
def test_the_heads_of_every_model_and_shard_are_served(library: ModuleType, q_heads: int, kv_heads: int) -> None:
    batch = build(sliding_geometry(q_heads // kv_heads, kv_heads), [Request(1, 200)], device=DEVICE, window_left=90)
    assert library.supports(SLIDING_DECODE, q_heads, kv_heads, 256, 64, library.PAGE_FORMAT_SPLIT) == library.OK
    check_decode(library, batch, Limits(1))


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"num_q_heads": 40, "num_kv_heads": 8}, "UNSUPPORTED", "num_q_heads"),
        ({"head_dim": 512}, "UNSUPPORTED", "head_dim"),
        ({"page_size": 32}, "UNSUPPORTED", "page_size"),
        ({"page_format": 2}, "UNSUPPORTED", "page_format"),
        ({"num_kv_heads": 20}, "INVALID_ARGUMENT", "num_kv_heads"),
        ({"q": 0}, "INVALID_ARGUMENT", "q"),
        ({"plan_host": 0}, "INVALID_ARGUMENT", "plan_host"),
        ({"num_page_ids": 2}, "INVALID_ARGUMENT", "num_page_ids"),
        ({"row_offset": 1 << 30}, "INVALID_ARGUMENT", "row_offset"),
        ({"sm_scale": 0.0}, "INVALID_ARGUMENT", "sm_scale"),
    ],
    ids=str,
)
def test_a_refusal_names_the_argument(library: ModuleType, changes: dict[str, int | float], code: str, named: str) -> None:
    """The rest of the call is right, so only the change is refused; num_kv_heads 20 makes group 2, but not the plan's."""
    batch = build(sliding_geometry(4, 10), [Request(1, 190)], device=DEVICE, window_left=100)
    outputs = make_outputs(batch)
    plan = make_plan(library, batch, Limits(2))
    fields = decode_fields(batch, plan, outputs)
    assert_refused(library, library.sliding_decode, {**fields, **changes}, outputs, code, named)
    decode(library, batch, plan, outputs)
    torch.cuda.synchronize()
    assert_close(outputs, attention(batch))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"window_left": -2}, "window"),
        ({"window_left": 1 << 29}, "window"),
        ({"kv_origin": [192]}, "kv_origin"),
        ({"kv_origin": [100]}, "kv_origin"),
        ({"kv_origin": [-64]}, "kv_origin"),
    ],
    ids=str,
)
def test_a_plan_refusal_names_the_argument(library: ModuleType, change: dict[str, object], named: str) -> None:
    """A window out of range; an origin past the first visible key, 160, off a page's start, or below 0."""
    batch = build(sliding_geometry(4), [Request(1, 260, 128)], device=DEVICE, window_left=99)
    changed = {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value for name, value in change.items()
    }
    spoiled = dataclasses.replace(batch, **changed)  # type: ignore[arg-type]
    with pytest.raises(library.Error) as caught:
        make_plan(library, spoiled, Limits(1), kv_len=[260])
    assert caught.value.code == library.INVALID_ARGUMENT
    assert named in caught.value.message
