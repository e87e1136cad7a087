"""The global decode on every group and page format: right to the fp32 reference, bit-identical to its two JIT twins, and a
request's bits its own.

Every call here has a plan whose unused words are 0xFF and a workspace that is 0xFF throughout (bench/plans.py), NaN in every
slot of the pool that no request owns, and NaN in every query row that is nobody's (bench/inputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from bench.inputs import INT32_MAX, INT32_MIN, Batch, Geometry, Piece, Request, assemble, build, select
from bench.library import DECODE, decode
from bench.outputs import make_outputs
from bench.plans import BATCH, CHAINED, KV_HEAD, SPLITS, TILES, Limits, make_plan
from bench.reference import attention

from .harness import (
    DEVICE,
    FORMATS,
    GROUPS,
    MODEL_KV_HEADS,
    Decoded,
    assert_close,
    assert_nan_exactly,
    assert_only_owned_rows,
    check_decode,
    check_decodes_in_a_row,
    check_newest_token_is_awaited,
    geometry,
    run_decode,
    spoil_queries,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library", "twins")]
OPERATION, HEAD_DIM = "decode", 512

every_instance = pytest.mark.parametrize(("group", "page_format"), [(g, f) for f in FORMATS for g in GROUPS])

FEW_KV_HEADS = {4: 2, 8: 1, 16: 1}  # where a context is long
CHAIN = 5  # runs, of csrc/decode_plan.h


@dataclass(frozen=True)
class Case:
    """Contexts in tokens, KV heads by group, and where the plan differs from the plain one.

    spare_batch, spare_slots: what the plan could hold besides; with chunk_tokens the slots are declared.
    """

    name: str
    contexts: tuple[int, ...]
    kv_heads: Mapping[int, int]
    lead_rows: int = 0
    chunk_tokens: int = 0
    spare_batch: int = 0
    spare_slots: int = 0
    sm_scale: float = 1.0

    def batch(self, group: int, page_format: str, seed: int = 1) -> Batch:
        """Its inputs: one query row a request."""
        return build(
            geometry(group, self.kv_heads[group], page_format),
            [Request(1, context) for context in self.contexts],
            device=DEVICE,
            seed=seed,
            lead_rows=self.lead_rows,
            sm_scale=self.sm_scale,
        )

    def limits(self, batch: Batch) -> Limits:
        """What its plan is sized for."""
        slots = 0
        if self.chunk_tokens or self.spare_slots:
            slots = self.spare_slots + needed_slots(batch, self.chunk_tokens)
        return Limits(batch.size + self.spare_batch, max_slots=slots, chunk_tokens=self.chunk_tokens)


def needed_slots(batch: Batch, chunk_tokens: int = 0) -> int:
    """Partials that the requests of `batch` need."""
    heads = batch.geometry.kv_heads
    pages = [len(span.page_ids) for span in batch.spans()]
    if chunk_tokens:
        return heads * sum(-(-n * batch.geometry.page_size // chunk_tokens) for n in pages)
    most = max(1, Limits(1).sm_count // heads)
    return heads * sum(-(-n // -(-n // most)) for n in pages if n)


THREE_SPLITS = Case("three unequal splits", (7 * 64 + 20,), MODEL_KV_HEADS, chunk_tokens=192)
PADDED = Case("padded batch and slots", (300, 64, 1000), MODEL_KV_HEADS, spare_batch=13, spare_slots=500)
RAGGED = Case("ragged, eleven requests", (1, 64, 65, 0, 1000, 333, 63, 128, 5000, 0, 191), MODEL_KV_HEADS)
CASES = (
    Case("one token", (1,), MODEL_KV_HEADS),
    Case("one page", (64,), MODEL_KV_HEADS),
    Case("one past a page", (65,), MODEL_KV_HEADS),
    THREE_SPLITS,
    Case("ragged, two requests", (9000, 70), MODEL_KV_HEADS),
    RAGGED,
    Case("ragged, 32 requests", tuple(1 + 97 * r * r % 2500 for r in range(32)), MODEL_KV_HEADS),
    Case("163,336 tokens", (163_336,), FEW_KV_HEADS),
    PADDED,
    Case("an offset output row", (130, 64, 700), MODEL_KV_HEADS, lead_rows=5),
    Case("every kind of last page", tuple(128 + last for last in (1, 2, 31, 32, 33, 62, 63, 64)), MODEL_KV_HEADS),
    Case("chunks of one page", (640, 1, 100), FEW_KV_HEADS, chunk_tokens=64),
    Case("another scale", (400, 30), FEW_KV_HEADS, sm_scale=0.37),
)


@every_instance
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(library: ModuleType, case: Case, group: int, page_format: str) -> None:
    batch = case.batch(group, page_format)
    check_decode(library, batch, case.limits(batch))


def test_the_splits_of_the_case_are_unequal(library: ModuleType) -> None:
    batch = THREE_SPLITS.batch(8, "split")
    parts = make_plan(library, batch, THREE_SPLITS.limits(batch)).host_parts
    assert int(parts.requests[0, SPLITS]) == 3
    mine = (parts.items[:, KV_HEAD] == 0) & (parts.items[:, TILES] > 0)
    assert sorted(parts.items[mine, TILES].tolist()) == [2, 3, 3]


@pytest.mark.parametrize(("group", "page_format"), [(8, "split"), (8, "folded"), (16, "folded")])
def test_the_longest_context_of_any_model(library: ModuleType, group: int, page_format: str) -> None:
    batch = build(geometry(group, 1, page_format), [Request(1, 262_144), Request(1, 1)], device=DEVICE, seed=6)
    check_decode(library, batch, Limits(2))


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 1), (16, 1), (16, 2), (32, 4), (8, 2)])
def test_the_heads_of_every_model_and_shard(library: ModuleType, q_heads: int, kv_heads: int, page_format: str) -> None:
    batch = build(Geometry(q_heads, kv_heads, page_format=page_format), [Request(1, 200), Request(1, 64)], device=DEVICE)
    assert library.supports(DECODE, q_heads, kv_heads, 512, 64, batch.geometry.page_format_code) == library.OK
    check_decode(library, batch, Limits(2))


@every_instance
def test_a_request_that_sees_nothing(library: ModuleType, group: int, page_format: str) -> None:
    """Among others and alone: zeros and -inf, written by the merge, since no item names the request."""
    shape = geometry(group, MODEL_KV_HEADS[group], page_format)
    batch = build(shape, [Request(1, context) for context in (0, 100, 0, 64, 0)], device=DEVICE, seed=8)
    for some in (batch, select(batch, [0]), select(batch, [0, 2])):
        decoded = check_decode(library, some, Limits(5))
        blind = torch.tensor([not span.page_ids for span in some.spans()], device=DEVICE)
        out, lse = decoded.outputs.out[: some.size], decoded.outputs.lse[: some.size]
        assert (lse[blind] == float("-inf")).all()
        assert not out[blind].view(torch.int16).any(), "zeros, without a sign"
        assert lse[~blind].isfinite().all()


@every_instance
def test_a_page_that_is_listed_but_not_needed_is_not_read(library: ModuleType, group: int, page_format: str) -> None:
    """kv_len ends before the pages do, as where a server reserves pages ahead. What lies behind it is NaN here."""
    shape = geometry(group, MODEL_KV_HEADS[group], page_format)
    batch = build(shape, [Request(1, 100), Request(1, 200)], device=DEVICE, seed=9)
    spans = batch.spans()
    spare = torch.tensor([page for page in range(batch.num_pages) if all(page not in span.page_ids for span in spans)][:2])
    pieces, plain = [], []
    for span in spans:
        ids = torch.tensor(span.page_ids, dtype=torch.int32, device=DEVICE)
        query = batch.q[span.q_from : span.q_to]
        plain.append(Piece(query, ids, span.last_page_len))
        pieces.append(Piece(query, torch.cat((ids, spare.to(ids))), span.last_page_len))
    needed = run_decode(library, assemble(shape, batch.pool, plain), Limits(2))
    more = assemble(shape, batch.pool, pieces)
    plan = make_plan(library, more, Limits(2), kv_len=[span.context(shape.page_size) for span in spans])
    outputs = make_outputs(more)
    decode(library, more, plan, outputs)
    torch.cuda.synchronize()
    assert outputs.same_bits(needed.outputs)
    assert outputs.status_bits() == 0


@every_instance
@pytest.mark.parametrize("bad", [-1, INT32_MIN, INT32_MAX, "num_pages"])
def test_a_page_id_outside_the_pool_reads_as_masked(library: ModuleType, group: int, page_format: str, bad: int | str) -> None:
    """In the first, a middle and the last, partly filled page; one request has no other page; one is untouched."""
    batch = build(
        geometry(group, MODEL_KV_HEADS[group], page_format),
        [Request(1, 400), Request(1, 250), Request(1, 64), Request(1, 90)],
        device=DEVICE,
        seed=3,
    )
    value = batch.num_pages if bad == "num_pages" else int(bad)
    first, second, third = batch.page_indptr[:3].tolist()
    for limits in (Limits(4), Limits(4, max_slots=100, chunk_tokens=256)):
        clean = run_decode(library, batch, limits)
        spoiled = select(batch, range(4))
        for at in (first, first + 3, second - 1, second + 1, third):
            spoiled.page_ids[at] = value
        decoded = check_decode(library, spoiled, limits, status=library.STATUS_BAD_PAGE_ID)
        assert (decoded.outputs.lse[2] == float("-inf")).all()
        assert torch.equal(bits(decoded, 3)[0], bits(clean, 3)[0])
        assert torch.equal(bits(decoded, 3)[1], bits(clean, 3)[1])


@every_instance
def test_pages_gigabytes_into_a_pool(library: ModuleType, group: int, page_format: str) -> None:
    """Byte offsets beyond 2^32 and element offsets beyond 2^31, so that neither fits 32 bits, signed or not."""
    shape = geometry(group, MODEL_KV_HEADS[group], page_format)
    page_bytes = shape.rows_per_page * shape.kv_heads * shape.row_width * 2
    first_page = (1 << 32) // page_bytes + 1
    batch = build(shape, [Request(1, 300), Request(1, 64)], device=DEVICE, seed=2, first_page=first_page)
    check_decode(library, batch, Limits(2))
    del batch
    torch.cuda.empty_cache()


@every_instance
def test_a_nan_query_gives_nan_and_moves_no_other_row(library: ModuleType, group: int, page_format: str) -> None:
    """A row of NaN over many partials, and single NaN elements over some and over one."""
    batch = RAGGED.batch(group, page_format)
    limits = RAGGED.limits(batch)
    clean = run_decode(library, batch, limits).outputs
    spoiled = spoil_queries(batch, (8, 0, 4))
    outputs = run_decode(library, batch, limits).outputs
    assert_nan_exactly(outputs, clean, spoiled)
    assert outputs.status_bits() == 0


@every_instance
@pytest.mark.parametrize(("lse", "status"), [(False, True), (True, False), (False, False)])
def test_optional_outputs_may_be_absent(library: ModuleType, group: int, page_format: str, lse: bool, status: bool) -> None:
    batch = RAGGED.batch(group, page_format)
    batch.page_ids[2] = -1  # something to report
    limits = RAGGED.limits(batch)
    whole = run_decode(library, batch, limits).outputs
    outputs = run_decode(library, batch, limits, lse=lse, status=status).outputs
    assert torch.equal(outputs.out_buffer.view(torch.int16), whole.out_buffer.view(torch.int16))
    expected = whole if lse else make_outputs(batch)
    assert torch.equal(outputs.lse_buffer.view(torch.int32), expected.lse_buffer.view(torch.int32))
    assert outputs.status_bits() == (library.STATUS_BAD_PAGE_ID if status else 0)


@pytest.mark.parametrize("page_format", FORMATS)
def test_no_request_at_all_does_nothing(library: ModuleType, page_format: str) -> None:
    batch = build(geometry(8, 1, page_format), [], device=DEVICE)
    decoded = run_decode(library, batch, Limits(4))
    assert decoded.outputs.touched_rows() == (set(), set())
    assert decoded.outputs.status_bits() == 0


def bits(decoded: Decoded, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of a request's out and lse: int16 [q_heads, head_dim] and int32 [q_heads]."""
    row = decoded.batch.spans()[request].q_from
    return decoded.outputs.out[row].view(torch.int16), decoded.outputs.lse[row].view(torch.int32)


MANY = (1, 200, 130, 0, 700, 64, 3000, 33)


def several(group: int, page_format: str) -> Batch:
    """A batch of every length in MANY."""
    shape = geometry(group, MODEL_KV_HEADS[group], page_format)
    return build(shape, [Request(1, context) for context in MANY], device=DEVICE, seed=7)


@every_instance
def test_a_decode_waits_for_the_one_before_it(library: ModuleType, group: int, page_format: str) -> None:
    batch = RAGGED.batch(group, page_format)
    check_decodes_in_a_row(library, batch, RAGGED.limits(batch))


@pytest.mark.parametrize(("page_format", "writers", "readers"), [("split", 2, 8), ("folded", 5, 16)])
def test_an_early_decode_waits_for_its_newest_token(library: ModuleType, page_format: str, writers: int, readers: int) -> None:
    """KV heads such that one's output row is as long as the other's row of the pool: 8 x 512, 20 x 512 = 16 x 640."""
    writer = build(geometry(4, writers, page_format), [Request(1, 20_000)], device=DEVICE, seed=12, tail_rows=0)
    reader = build(geometry(4, readers, page_format), [Request(1, 1000)], device=DEVICE, seed=13)
    check_newest_token_is_awaited(library, writer, reader)


@every_instance
def test_bits_do_not_depend_on_the_batch(library: ModuleType, group: int, page_format: str) -> None:
    """Alone, in reverse, beside itself twice, behind rows of nobody, and in plans of other sizes."""
    whole = several(group, page_format)
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


@every_instance
def test_whole_chains_have_the_bits_of_spread_ones(library: ModuleType, group: int, page_format: str) -> None:
    """In a batch that has runs to spare, a CTA combines a chain; alone, the merge does. With a page that is none, and runs and
    chains of unequal length among them."""
    shape = geometry(group, MODEL_KV_HEADS[group], page_format)
    contexts = (9000, 7000, 2113, 40, 0, 12_001)
    whole = build(shape, [Request(1, context) for context in contexts], device=DEVICE, seed=11)
    whole.page_ids[int(whole.page_indptr[1]) + 3] = -1
    order = [*range(len(contexts)), *[0] * 40]
    batch = select(whole, order)
    decoded = check_decode(library, batch, Limits(len(order)), status=library.STATUS_BAD_PAGE_ID)
    chained = decoded.plan.host_parts.requests[: len(order), CHAINED].tolist()
    assert chained[:6] == [1] * 6, "these are whole"
    assert chained[-1] == CHAIN, "and the last ones spread"
    for r in range(len(contexts)):
        alone = run_decode(library, select(whole, [r]), Limits(1))
        if contexts[r]:
            assert alone.plan.host_parts.requests[0, CHAINED] == CHAIN
        for name, mine, other in zip(("out", "lse"), bits(decoded, r), bits(alone, 0), strict=True):
            assert torch.equal(mine, other), f"{name} of request {r}"
    for name, mine, other in zip(("out", "lse"), bits(decoded, 0), bits(decoded, len(order) - 1), strict=True):
        assert torch.equal(mine, other), f"{name} of a request that is there twice, whole and spread"


@every_instance
def test_a_captured_graph_replays_other_plans(library: ModuleType, group: int, page_format: str) -> None:
    """Captured once, replayed with plans of fewer and other requests and other lengths copied over its own; with as many
    requests as fit, and with none."""
    whole = several(group, page_format)
    limits = Limits(max_batch=6)

    def chosen(order: Sequence[int]) -> Batch:
        return select(whole, order, q_rows=9, num_page_ids=120)

    held = chosen((0, 1, 2, 3, 4))  # the graph holds the addresses of its arrays
    plan = make_plan(library, held, limits)
    outputs = make_outputs(held)
    decode(library, held, plan, outputs)  # warm: what is loaded lazily may not load while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(library, held, plan, outputs)
    for order in ((0, 1, 2, 3, 4), (5, 7, 1), (6,), (), (4, 2, 1, 0, 3, 6), (3,)):
        batch = chosen(order)
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


@every_instance
def test_a_call_is_ordered_on_its_stream(library: ModuleType, group: int, page_format: str) -> None:
    """Behind a long wait on a side stream its inputs change: a call on any other stream would read the NaN before."""
    batch = several(group, page_format)
    expected = run_decode(library, batch, Limits(8))
    late = batch.q.clone()
    batch.q.fill_(float("nan"))
    plan = make_plan(library, batch, Limits(8))
    outputs = make_outputs(batch)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # clock cycles: some 0.1 s
        batch.q.copy_(late)
        decode(library, batch, plan, outputs)
        assert not side.query(), "the wait was over before the call: nothing was tested, or the call synchronised"
    side.synchronize()
    assert outputs.same_bits(expected.outputs)
