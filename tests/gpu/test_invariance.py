"""The prefill's bits of a request depend on it alone: not on the batch, the order in it, the stream or a graph. test_decode.py
has the decode's."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from bench.inputs import Batch, Request, build, select
from bench.library import prefill
from bench.outputs import Outputs, make_outputs
from bench.reference import attention

from .harness import DEVICE, FORMATS, GROUPS, MODEL_KV_HEADS, assert_close, assert_only_owned_rows, geometry, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

REQUESTS = (
    Request(1, 1),
    Request(65, 200),
    Request(130, 130),
    Request(0, 70),
    Request(64, 700),
    Request(190, 190),
    Request(17, 3000),
    Request(70, 33),
)


def several(group: int, page_format: str) -> Batch:
    """A batch of every request."""
    return build(geometry(group, MODEL_KV_HEADS[group], page_format), REQUESTS, device=DEVICE, seed=7)


def results(batch: Batch, outputs: Outputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The bits of each request's out and lse: int16 [rows, q_heads, head_dim] and int32 [rows, q_heads]."""
    return [
        (
            outputs.out[span.q_from : span.q_to].view(torch.int16).clone(),
            outputs.lse[span.q_from : span.q_to].view(torch.int32).clone(),
        )
        for span in batch.spans()
    ]


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("order", "lead_rows"),
    [*(((r,), 0) for r in range(len(REQUESTS))), ((7, 6, 5, 4, 3, 2, 1, 0), 0), ((4, 1, 4, 6, 2), 0), ((2, 5, 0), 61)],
    ids=str,
)
def test_bits_do_not_depend_on_the_batch(
    library: ModuleType, group: int, page_format: str, order: Sequence[int], lead_rows: int
) -> None:
    """Alone, in reverse, with another beside itself twice, and behind rows of nobody."""
    whole = several(group, page_format)
    expected = results(whole, run(library, whole))
    batch = select(whole, order, lead_rows=lead_rows, q_rows=lead_rows + 600)
    outputs = run(library, batch)
    assert_only_owned_rows(batch, outputs)
    for r, (out, lse) in zip(order, results(batch, outputs), strict=True):
        assert torch.equal(out, expected[r][0]), f"out of request {r}"
        assert torch.equal(lse, expected[r][1]), f"lse of request {r}"


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_captured_graph_replays_other_plans(library: ModuleType, group: int, page_format: str) -> None:
    """Captured without q_indptr_host, replayed after the plan's arrays were overwritten with fewer and other
    requests."""
    whole = several(group, page_format)
    q_rows, size, num_page_ids = 450, 5, 70
    plans = [
        select(whole, order, q_rows=q_rows, size=size, num_page_ids=num_page_ids)
        for order in ((0, 1, 2, 3, 4), (5, 7, 1), (6,), (), (4, 2, 1, 0, 3))
    ]
    # The graph holds the addresses of these.
    held = select(whole, (0, 1, 2, 3, 4), q_rows=q_rows, size=size, num_page_ids=num_page_ids)
    outputs = make_outputs(held)
    prefill(library, held, outputs, host_indptr=False)  # warm: what is loaded lazily may not load while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill(library, held, outputs, host_indptr=False)
    for plan in plans:
        for name in ("q", "page_ids", "page_indptr", "last_page_len", "q_indptr"):
            getattr(held, name).copy_(getattr(plan, name))
        outputs.refill()
        graph.replay()
        torch.cuda.synchronize()
        assert_only_owned_rows(plan, outputs)
        assert_close(outputs, attention(plan))
        assert outputs.status_bits() == 0
        assert outputs.same_bits(run(library, plan)), "a replay and a fresh call differ in bits"


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_call_is_ordered_on_its_stream(library: ModuleType, group: int, page_format: str) -> None:
    """Behind a long wait on a side stream its inputs change: a call on any other stream would read the NaN before."""
    batch = several(group, page_format)
    expected = run(library, batch)
    late = batch.q.clone()
    batch.q.fill_(float("nan"))
    outputs = make_outputs(batch)
    # Reading q_indptr on the side stream would drain it before the call: the host copy is left out.
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # clock cycles: some 0.1 s
        batch.q.copy_(late)
        prefill(library, batch, outputs, host_indptr=False)
        assert not side.query(), "the wait was over before the call: nothing was tested, or the call synchronised"
    side.synchronize()
    assert outputs.same_bits(expected)
