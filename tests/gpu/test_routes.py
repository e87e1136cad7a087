"""The routed entries in every mode: the incumbent's bits with the knob off, the generated kernels' own with it on, and the two
close to one another on one pool and one plan.

Heads as Gemma 4 31B has them: 32 query heads over 4 at head_dim 512, over 16 at 256. Hostile as in test_decode.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from bench import routes
from bench.inputs import (
    Batch,
    Geometry,
    Piece,
    Request,
    assemble,
    build,
    nan_pool,
    released,
    score_operand,
    select,
    value_operand,
)
from bench.outputs import Outputs, make_outputs
from bench.plans import Limits, Plan, make_plan
from bench.reference import OUT_TOLERANCE, attention, out_error

from . import direct
from .harness import DEVICE, PAGE_SIZE, owned_rows, run, run_decode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

GLOBAL = Geometry(32, 4)
FOLDED = Geometry(32, 4, page_format="folded")
SLIDING = Geometry(32, 16, head_dim=256)
WINDOW_LEFT = 1023
KNOB = {"incumbent": "off", "tilelang": "tilelang", "tilelang640": "tilelang640"}
SPLITS = 132 // 4  # of the longest request of a global decode, by the planner's rule

# 0.0039: an ulp of bf16 from 0.5 on. With |V| <= 1 outputs are no larger than 1. Each side is within some 0.002 of the exact
# value before it rounds (bench/reference.py), so the two are at most one such ulp apart, or two of those below 0.5.
PARITY = 2**-8

every_mode_of_the_split_pool = pytest.mark.parametrize("knob", ["incumbent", "tilelang"])


def mode_of(library: ModuleType, knob: str) -> int:
    """The mode of that name."""
    mode = routes.mode_of(library, KNOB[knob])
    assert mode == getattr(library, f"MODE_{knob.upper()}")
    return mode


def make(geometry: Geometry, requests: Sequence[Request], *, seed: int = 1, lead_rows: int = 0) -> Batch:
    """A batch of the layer, with the model's window where it has one."""
    window_left = WINDOW_LEFT if geometry.sliding else None
    return build(geometry, requests, device=DEVICE, seed=seed, lead_rows=lead_rows, window_left=window_left)


def held(batch: Batch, plan: Plan, outputs: Outputs) -> Outputs:
    """The outputs of a call, once it is done: the requests' rows were written, nothing else was, nothing was reported."""
    torch.cuda.synchronize()
    assert outputs.touched_rows() == (owned_rows(batch), set())
    assert outputs.status_bits() == 0
    assert torch.equal(plan.device, plan.host.to(plan.device.device)), "the plan was written"
    assert (plan.workspace[plan.workspace_bytes // 4 :] == -1).all(), "something behind the workspace was written"
    return outputs


def routed_prefill(library: ModuleType, batch: Batch, mode: int) -> Outputs:
    """The routed prefill's outputs."""
    plan, outputs = routes.prefill_plan(library, batch, mode), make_outputs(batch)
    routes.prefill(library, batch, mode, plan, outputs)
    return held(batch, plan, outputs)


def routed_decode(library: ModuleType, batch: Batch, mode: int, limits: Limits | None = None) -> Outputs:
    """The routed decode's outputs."""
    plan = routes.decode_plan(library, batch, mode, limits or Limits(batch.size))
    outputs = make_outputs(batch)
    routes.decode(library, batch, mode, plan, outputs)
    return held(batch, plan, outputs)


def direct_prefill(library: ModuleType, batch: Batch) -> Outputs:
    """What the incumbent's own entry leaves."""
    outputs = make_outputs(batch)
    if batch.window_left is None:
        direct.prefill(library, "batch_prefill_paged_cuda_hd512", batch, outputs.out)
    else:
        direct.prefill(library, "batch_prefill_paged_window_cuda_hd256", batch, outputs.out, batch.window_left)
    return outputs


def direct_decode(library: ModuleType, batch: Batch) -> Outputs:
    """What the incumbent's own entry leaves; the global one's chunks have the length that the planner documents."""
    outputs = make_outputs(batch)
    if batch.window_left is None:
        pages = max(len(span.page_ids) for span in batch.spans())
        chunk = PAGE_SIZE * -(-pages // min(pages, SPLITS))
        direct.split_decode(library, "paged_attention_decode_split_kv_cuda_hd512", batch, outputs.out, chunk)
    else:
        direct.decode(library, "paged_attention_decode_window_cuda_hd256", batch, outputs.out, batch.window_left)
    return outputs


def rows_of(batch: Batch, outputs: Outputs) -> torch.Tensor:
    """The requests' rows of out: bf16 [rows, q_heads, head_dim]."""
    return outputs.out[sorted(owned_rows(batch))]


def difference(batch: Batch, one: Outputs, other: Outputs) -> float:
    """The largest |one - other|; NaN is infinitely far."""
    apart = (rows_of(batch, one).float() - rows_of(batch, other).float()).abs()
    return float(apart.nan_to_num(nan=float("inf")).max())


# The knob.


def test_the_knobs_values(library: ModuleType) -> None:
    assert routes.mode_of(library, None) == routes.mode_of(library, "off") == library.MODE_INCUMBENT
    assert routes.mode_of(library, "tilelang") == library.MODE_TILELANG
    assert routes.mode_of(library, "tilelang640") == library.MODE_TILELANG640
    for text in ("", "on", "OFF", "tilelang ", "tilelang6400"):
        with pytest.raises(ValueError, match="PEGAINFER_GLOBAL_ATTN"):
            routes.mode_of(library, text)


# One pool and one plan: the generated kernels against the incumbent, and both against their own entries.

RAGGED = (33, 1, 200, 64, 17, 5, 128, 90, 2, 63, 65, 7, 150, 31, 48, 11)
PREFILLS = {
    "global, 1 request": (GLOBAL, (Request(300, 1500),)),
    "global, 16 requests": (GLOBAL, tuple(Request(rows, rows + 97 * r) for r, rows in enumerate(RAGGED))),
    "sliding, 3 ragged requests": (
        SLIDING,
        (released(200, 3000, WINDOW_LEFT), Request(77, 77), released(130, 1300, WINDOW_LEFT)),
    ),
    "sliding, 16 requests": (SLIDING, tuple(Request(rows, rows + 113 * r) for r, rows in enumerate(RAGGED))),
}


@pytest.mark.parametrize("case", PREFILLS)
def test_prefills_agree(library: ModuleType, case: str) -> None:
    geometry, requests = PREFILLS[case]
    batch = make(geometry, requests, lead_rows=3)
    incumbent = routed_prefill(library, batch, library.MODE_INCUMBENT)
    generated = routed_prefill(library, batch, library.MODE_TILELANG)
    assert incumbent.same_bits(direct_prefill(library, batch))
    assert generated.same_bits(run(library, batch, lse=False))
    assert difference(batch, generated, incumbent) <= PARITY
    expected = attention(batch)
    assert out_error(generated.out[expected.rows], expected.out) <= OUT_TOLERANCE


DECODES = {
    # Beyond the window: the list begins at the page of the oldest key, 16 tokens before it, or just there.
    "sliding, 1040 tokens resident": (SLIDING, tuple(Request(1, 64 * n + 1040, 64 * n) for n in (7, 0, 79))),
    "sliding, 1024 tokens resident": (SLIDING, tuple(Request(1, 64 * n + 1024, 64 * n) for n in (7, 0, 80))),
    "sliding, 528 tokens resident": (SLIDING, (Request(1, 528),) * 3),
    "global, 10.6K tokens": (GLOBAL, (Request(1, 10_600), Request(1, 10_560), Request(1, 4000))),
}


@pytest.mark.parametrize("case", DECODES)
def test_decodes_agree(library: ModuleType, case: str) -> None:
    geometry, requests = DECODES[case]
    batch = make(geometry, requests)
    incumbent = routed_decode(library, batch, library.MODE_INCUMBENT)
    generated = routed_decode(library, batch, library.MODE_TILELANG)
    assert incumbent.same_bits(direct_decode(library, batch))
    assert generated.same_bits(run_decode(library, batch, Limits(batch.size), lse=False).outputs)
    assert difference(batch, generated, incumbent) <= PARITY
    expected = attention(batch)
    assert out_error(generated.out[expected.rows], expected.out) <= OUT_TOLERANCE


@pytest.mark.parametrize("geometry", [GLOBAL, SLIDING], ids=["global", "sliding"])
def test_one_token_is_its_value(library: ModuleType, geometry: Geometry) -> None:
    """A softmax over one key: every mode gives V, bit by bit."""
    batch = make(geometry, (Request(1, 1),) * 3)
    ids = batch.page_ids[: batch.num_page_ids - 5].long()  # build's spare ones are garbage
    values = batch.pool[ids * geometry.rows_per_page + geometry.layer_row + geometry.page_size]
    expected = values.repeat_interleave(geometry.group, dim=1)
    for mode in (library.MODE_INCUMBENT, library.MODE_TILELANG):
        outputs = routed_decode(library, batch, mode)
        assert torch.equal(rows_of(batch, outputs).view(torch.int16), expected.view(torch.int16))


def test_a_plan_of_a_generated_mode_is_the_generated_planners(library: ModuleType) -> None:
    for geometry, mode in ((GLOBAL, "TILELANG"), (FOLDED, "TILELANG640"), (SLIDING, "TILELANG"), (SLIDING, "TILELANG640")):
        batch = make(geometry, (Request(1, 700), Request(1, 0), Request(1, 3000)))
        plan = routes.decode_plan(library, batch, getattr(library, f"MODE_{mode}"), Limits(5))
        expected = make_plan(library, batch, Limits(5), hostile=False)
        assert torch.equal(plan.host, expected.host)
        assert plan.workspace_bytes == expected.workspace_bytes


# The folded pool.


def unfolded(batch: Batch) -> Batch:
    """The same keys and values in a split pool: a folded row is V and, in its rotated columns, K."""
    folded = batch.geometry
    split = dataclasses.replace(folded, page_format="split")
    pool = nan_pool(split, batch.num_pages, DEVICE)
    theirs = batch.pool.view(-1, folded.rows_per_page, folded.kv_heads, folded.row_width)
    ours = pool.view(-1, split.rows_per_page, split.kv_heads, split.row_width)
    rows = theirs[:, folded.layer_row : folded.layer_row + PAGE_SIZE]
    for start, part in zip((0, PAGE_SIZE), (score_operand(folded, rows), value_operand(folded, rows)), strict=True):
        ours[:, split.layer_row + start : split.layer_row + start + PAGE_SIZE] = part
    return dataclasses.replace(batch, geometry=split, pool=pool)


def test_the_folded_prefill(library: ModuleType) -> None:
    """Its generated entry's bits, and as close to the incumbent over the unfolded pool as the split one."""
    batch = make(FOLDED, PREFILLS["global, 16 requests"][1])
    outputs = routed_prefill(library, batch, library.MODE_TILELANG640)
    assert outputs.same_bits(run(library, batch, lse=False))
    assert difference(batch, outputs, routed_prefill(library, unfolded(batch), library.MODE_INCUMBENT)) <= PARITY


def test_the_folded_decode(library: ModuleType) -> None:
    batch = make(FOLDED, (Request(1, 10_600), Request(1, 700), Request(1, 65)))
    outputs = routed_decode(library, batch, library.MODE_TILELANG640)
    assert outputs.same_bits(run_decode(library, batch, Limits(batch.size), lse=False).outputs)
    assert difference(batch, outputs, routed_decode(library, unfolded(batch), library.MODE_INCUMBENT)) <= PARITY


@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
def test_the_sliding_layers_are_the_same_in_both_generated_modes(library: ModuleType, prefill: bool) -> None:
    batch = make(SLIDING, (released(1, 3000, WINDOW_LEFT), Request(1, 700)))
    call: Callable[[ModuleType, Batch, int], Outputs] = routed_prefill if prefill else routed_decode
    outputs = call(library, batch, library.MODE_TILELANG640)
    assert outputs.same_bits(call(library, batch, library.MODE_TILELANG))


# Knob off: the incumbent's bits, through a prefill and the steps behind it.

STEPS = 17
CONTEXTS = (1015, 56, 300)  # of the first step: others cross a page's end, and the first one the window's


def fnv1a(data: bytes, state: int = 0xCBF29CE484222325) -> int:
    """FNV-1a, 64 bits, over `data` and what `state` is of."""
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def bits_of(batch: Batch, outputs: Outputs) -> bytes:
    """The bytes of the requests' rows of out."""
    rows = rows_of(batch, outputs).cpu().contiguous()
    return ctypes.string_at(rows.data_ptr(), rows.numel() * rows.element_size())


def step_of(whole: Batch, step: int) -> Batch:
    """The decode of each request's row `step`: its context then ends with that row's token."""
    pieces = []
    for span, first in zip(whole.spans(), CONTEXTS, strict=True):
        context = first + step
        pages = -(-context // PAGE_SIZE)
        ids = torch.tensor(span.page_ids[:pages], dtype=torch.int32, device=DEVICE)
        pieces.append(Piece(whole.q[span.q_from + step : span.q_from + step + 1], ids, context - (pages - 1) * PAGE_SIZE))
    return assemble(
        whole.geometry,
        whole.pool,
        pieces,
        q_rows=len(pieces) + 2,
        num_page_ids=whole.num_page_ids,
        window_left=whole.window_left,
        seed=step,
    )


@dataclass(frozen=True)
class Served:
    """Who serves a prefill, and a decode."""

    prefill: Callable[[ModuleType, Batch], Outputs]
    decode: Callable[[ModuleType, Batch], Outputs]

    def hashes(self, library: ModuleType, geometry: Geometry) -> list[int]:
        """Of all the output so far: behind a prefill of the last STEPS tokens, then behind each of their decode steps."""
        whole = make(geometry, [Request(STEPS, first + STEPS - 1) for first in CONTEXTS], seed=11)
        found = [fnv1a(bits_of(whole, self.prefill(library, whole)))]
        for step in range(STEPS):
            batch = step_of(whole, step)
            found.append(fnv1a(bits_of(batch, self.decode(library, batch)), found[-1]))
        return found


def test_fnv1a() -> None:
    assert [fnv1a(text) for text in (b"", b"a", b"foobar")] == [0xCBF29CE484222325, 0xAF63DC4C8601EC8C, 0x85944171F73967E8]
    assert fnv1a(b"bar", fnv1a(b"foo")) == fnv1a(b"foobar")


@pytest.mark.parametrize("geometry", [GLOBAL, SLIDING], ids=["global", "sliding"])
def test_knob_off_is_the_incumbent_bit_by_bit(library: ModuleType, geometry: Geometry) -> None:
    expected = Served(direct_prefill, direct_decode).hashes(library, geometry)
    assert len(set(expected)) == STEPS + 1
    for text in (None, "off"):
        mode = routes.mode_of(library, text)
        served = Served(functools.partial(routed_prefill, mode=mode), functools.partial(routed_decode, mode=mode))
        assert served.hashes(library, geometry) == expected


# Rows, and requests without keys.


@every_mode_of_the_split_pool
@pytest.mark.parametrize("geometry", [GLOBAL, SLIDING], ids=["global", "sliding"])
def test_rows_past_the_plan_are_untouched(library: ModuleType, geometry: Geometry, knob: str) -> None:
    """Rows in front of the plan's and behind them, in a plan with room for more requests."""
    mode = mode_of(library, knob)
    requests = (Request(1, 700), Request(1, 1500), Request(1, 65))
    plain = routed_decode(library, make(geometry, requests), mode)
    batch = make(geometry, requests, lead_rows=5)
    outputs = routed_decode(library, batch, mode, Limits(batch.size + 13))
    assert min(owned_rows(batch)) == 5
    assert torch.equal(rows_of(batch, outputs).view(torch.int16), plain.out[:3].view(torch.int16))
    assert not rows_of(batch, outputs).isnan().any()


@every_mode_of_the_split_pool
@pytest.mark.parametrize("geometry", [GLOBAL, SLIDING], ids=["global", "sliding"])
@pytest.mark.parametrize("contexts", [(700, 0, 65), (0, 0)], ids=str)
def test_a_request_without_keys_gives_zeros(
    library: ModuleType, geometry: Geometry, knob: str, contexts: Sequence[int]
) -> None:
    batch = make(geometry, [Request(1, context) for context in contexts])
    outputs = routed_decode(library, batch, mode_of(library, knob))
    for row, context in enumerate(contexts):
        assert bool(outputs.out[row].any()) == (context > 0)


@every_mode_of_the_split_pool
@pytest.mark.parametrize("geometry", [GLOBAL, SLIDING], ids=["global", "sliding"])
def test_no_request_at_all_does_nothing(library: ModuleType, geometry: Geometry, knob: str) -> None:
    batch = make(geometry, ())
    routed_decode(library, batch, mode_of(library, knob), Limits(4))
    routed_prefill(library, batch, mode_of(library, knob))


# Graphs.


def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The call in a graph, made once before: what is loaded lazily may not load while capturing."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@every_mode_of_the_split_pool
@pytest.mark.parametrize("geometry", [GLOBAL, SLIDING], ids=["global", "sliding"])
def test_a_captured_decode_replays_other_plans(library: ModuleType, geometry: Geometry, knob: str) -> None:
    """Plans of as many requests, of other lengths, copied over the captured one's."""
    mode, limits = mode_of(library, knob), Limits(5)
    whole = make(geometry, [Request(1, context) for context in (700, 64, 3000, 33, 1300, 0, 5)], seed=7)

    def chosen(order: Sequence[int]) -> Batch:
        return select(whole, order, q_rows=9, num_page_ids=120)

    kept = chosen((0, 1, 2))
    plan, outputs = routes.decode_plan(library, kept, mode, limits), make_outputs(kept)
    graph = capture(lambda: routes.decode(library, kept, mode, plan, outputs))
    for order in ((0, 1, 2), (4, 3, 6), (2, 2, 0), (5, 1, 5), (3, 4, 2)):
        batch = chosen(order)
        expected = routed_decode(library, batch, mode, limits)
        kept.q.copy_(batch.q)
        kept.page_ids.copy_(batch.page_ids)
        plan.load(routes.decode_plan(library, batch, mode, limits))
        plan.workspace.fill_(-1)
        outputs.refill()
        graph.replay()
        torch.cuda.synchronize()
        assert outputs.same_bits(expected), "a replay and a direct call differ in bits"
        assert outputs.status_bits() == 0


@every_mode_of_the_split_pool
@pytest.mark.parametrize("geometry", [GLOBAL, SLIDING], ids=["global", "sliding"])
def test_a_captured_prefill_replays_other_batches(library: ModuleType, geometry: Geometry, knob: str) -> None:
    """Other queries over other pages, and rows shared out otherwise in as many tiles of the incumbent's."""
    mode = mode_of(library, knob)
    group = geometry.group
    whole = make(geometry, [Request(rows, rows + 300) for rows in (64, 128, 96, 128, 64, 96)], seed=3)
    assert all(rows * group % 64 == 0 for rows in (64, 128, 96)), "whole query tiles"

    def chosen(order: Sequence[int]) -> Batch:
        return select(whole, order, q_rows=300, num_page_ids=40)

    kept = chosen((0, 1, 2))
    plan, outputs = routes.prefill_plan(library, kept, mode), make_outputs(kept)
    graph = capture(lambda: routes.prefill(library, kept, mode, plan, outputs, host_indptr=False))
    for order in ((0, 1, 2), (3, 4, 5), (2, 0, 1)):
        batch = chosen(order)
        expected = routed_prefill(library, batch, mode)
        for name in ("q", "page_ids", "page_indptr", "last_page_len", "q_indptr"):
            getattr(kept, name).copy_(getattr(batch, name))
        plan.load(routes.prefill_plan(library, batch, mode))
        outputs.refill()
        graph.replay()
        torch.cuda.synchronize()
        assert outputs.same_bits(expected), "a replay and a direct call differ in bits"
