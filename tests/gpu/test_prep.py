"""The preps, both head_dims and forms: PyTorch, transformers' Gemma 4 code, and attention over what they wrote."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from bench import preps
from bench.inputs import Geometry, Request, build, released
from bench.plans import Limits
from bench.preps import BF16_ULP, FILL, PAGE, Inputs, Prompt, Shape, expected, expected_pool, make, run

from .conftest import unavailable
from .harness import DEVICE, check_early_decode_waits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

SPLIT = Shape("global", 8, 2)
EQUAL = Shape("global", 16, 1, k_eq_v=True)
FOLDED = Shape("global", 32, 4, "folded", k_eq_v=True)
SLIDING = Shape("sliding", 32, 16)
NARROW = Shape("sliding", 8, 1)
SHAPES = (SPLIT, EQUAL, FOLDED, Shape("global", 5, 5, "folded", k_eq_v=True), SLIDING, NARROW, Shape("sliding", 14, 7))
PROMPTS = (Prompt(70, 3), Prompt(1), Prompt(130, 300, 256), Prompt(0), Prompt(9, 64, 64), Prompt(17, 119))
TOKENS = tuple(Prompt(1, position, origin) for position, origin in ((0, 0), (63, 0), (64, 64), (511, 448), (300, 0), (127, 64)))
# "many rows": so many that a prep goes through shared memory instead of registers.
CASES = ("prompt", "many rows", "decode")


def prompts_of(case: str, shape: Shape) -> tuple[Prompt, ...]:
    """The requests of a case."""
    return TOKENS if case == "decode" else PROMPTS if case == "prompt" else (*PROMPTS, Prompt(shape.many_rows, 41))


def form_of(case: str) -> str:
    """The form of the entry that a case calls."""
    return "decode" if case == "decode" else "prompt"


def inputs_of(case: str, shape: Shape, seed: int, **guards: int) -> Inputs:
    """Inputs of a case on the device."""
    return make(shape, prompts_of(case, shape), device=DEVICE, seed=seed, **guards)


def prepared(library: ModuleType, inputs: Inputs, case: str, **changes: int | float) -> Inputs:
    """The inputs after a call, once the device is done."""
    run(library, inputs, form_of(case), torch.cuda.current_stream().cuda_stream, **changes)
    torch.cuda.synchronize()
    return inputs


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(bits(a), bits(b)))


def owned(inputs: Inputs) -> slice:
    """Rows that requests own."""
    return slice(inputs.lead_rows, inputs.lead_rows + sum(prompt.rows for prompt in inputs.prompts))


def assert_rounds_like(found: torch.Tensor, wanted: torch.Tensor, ulps: float = 1.0, equal_share: float = 0.98) -> None:
    """bf16 [..., width]: every RoPE pair (i, i + width / 2) is within `ulps` of its length, and nearly all bits are equal.

    A sum in another order moves an inverse RMS by 2^-24, so a rare element rounds the other way; a rotation carries that to its
    partner, which may be far smaller: hence the pair's length. Among many millions some element does so twice, before the
    rotation and after it: there `ulps` is 2.
    """
    assert not found.isnan().any(), "a NaN was written"
    pairs = wanted.float().unflatten(-1, (2, -1))
    length = pairs.norm(dim=-2, keepdim=True).expand_as(pairs).flatten(-2)
    off = (found.float() - wanted.float()).abs()
    assert (off <= ulps * BF16_ULP * length).all(), (
        f"off by {float((off / length.clamp(min=1e-30)).max()):.5f} of a pair's length"
    )
    share = float((bits(found.contiguous()) == bits(wanted.contiguous())).float().mean())
    assert share >= equal_share, f"only {share:.1%} of the bits are equal"


def assert_pool(inputs: Inputs, ulps: float = 1.0) -> None:
    """The pool holds what the reference writes, and nothing else was touched, in any layer or page."""
    shape = inputs.shape
    wanted = expected_pool(inputs, expected(inputs))
    written = bits(wanted) != FILL
    assert torch.equal(bits(inputs.pool) != FILL, written), "rows of nobody were written, or rows were left out"
    rows = written.flatten(2).view(*written.shape[:2], shape.kv_heads, -1)[..., 0]
    found, wanted = inputs.pool[rows], wanted[rows]
    extra = shape.row_width - shape.head_dim
    assert_rounds_like(found[:, extra:], wanted[:, extra:], ulps)
    if extra:
        assert_rounds_like(found[:, :extra], wanted[:, :extra], ulps)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_pytorch(library: ModuleType, shape: Shape, case: str) -> None:
    guards = {"lead_rows": 5, "tail_rows": 11} if case != "decode" else {}
    inputs = prepared(library, inputs_of(case, shape, seed=1, **guards), case)
    rows = owned(inputs)
    ulps = 2.0 if case == "many rows" else 1.0
    assert_rounds_like(inputs.q_out[rows], expected(inputs).q[rows], ulps)
    assert_pool(inputs, ulps)
    assert int(inputs.status) == 0
    nobodys = torch.cat([inputs.q_out[: rows.start], inputs.q_out[rows.stop :]])
    assert (bits(nobodys) == FILL).all(), "rows that no request owns were written"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [SPLIT, FOLDED, SLIDING], ids=str)
def test_a_fused_row_gives_the_bits_of_separate_buffers(library: ModuleType, shape: Shape, case: str) -> None:
    apart = prepared(library, inputs_of(case, shape, seed=2), case)
    fused = inputs_of(case, shape, seed=2)
    fused.fuse()
    prepared(library, fused, case)
    assert same(apart.q_out, fused.q_out)
    assert same(apart.pool, fused.pool)


@pytest.mark.parametrize("case", ["prompt", "many rows"])
@pytest.mark.parametrize("shape", [SPLIT, FOLDED, SLIDING, NARROW], ids=str)
def test_a_rows_bits_are_its_own(library: ModuleType, shape: Shape, case: str) -> None:
    """Each request alone as a prompt, and each of its rows alone as a decode step, against the batch."""
    whole = prepared(library, inputs_of(case, shape, seed=3), case)
    row = first = 0
    for prompt in PROMPTS:
        alone = make(shape, [prompt], device=DEVICE, seed=4)
        rows = slice(row, row + prompt.rows)
        for name in ("q", "k", "v"):
            getattr(alone, name).copy_(getattr(whole, name)[rows])
        alone.q_norm, alone.k_norm = whole.q_norm, whole.k_norm
        prepared(library, alone, "prompt")
        assert same(alone.q_out, whole.q_out[rows])
        pages = whole.page_ids[first : first + prompt.pages].long()
        assert same(alone.pool[alone.page_ids[: prompt.pages].long()], whole.pool[pages])
        if prompt.rows == 9:
            steps = [replace(prompt, rows=1, position=prompt.position + i) for i in range(prompt.rows)]
            decoded = make(shape, steps, device=DEVICE, seed=5)
            for name in ("q", "k", "v"):
                getattr(decoded, name).copy_(getattr(whole, name)[rows])
            decoded.q_norm, decoded.k_norm = whole.q_norm, whole.k_norm
            prepared(library, decoded, "decode")
            assert same(decoded.q_out, alone.q_out)
            for i, step in enumerate(steps):
                slot = step.position % PAGE + shape.layer * shape.layer_rows
                assert same(decoded.pool[int(decoded.page_ids[i]), slot], alone.pool[int(alone.page_ids[0]), slot])
        row += prompt.rows
        first += prompt.pages


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("piece", [1000, 1])
def test_many_rows_give_the_bits_of_few(library: ModuleType, shape: Shape, piece: int) -> None:
    """One prompt in one call, through shared memory, against the same in calls of a few rows, through registers: all of it, or
    the last rows one by one."""
    prompt = Prompt(shape.many_rows, 41)
    whole = prepared(library, make(shape, [prompt], device=DEVICE, seed=15), "prompt")
    pieces = make(shape, [prompt], device=DEVICE, seed=15)
    start = 0 if piece > 1 else prompt.rows - 130
    for first in range(start, prompt.rows, piece):
        rows = slice(first, min(first + piece, prompt.rows))
        count = rows.stop - first
        bounds = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        position = pieces.positions[:1] + first
        changes = {"rows": count, "q_indptr": bounds.data_ptr(), "positions": position.data_ptr()}
        for name in ("q", "k") if shape.k_eq_v else ("q", "k", "v"):
            changes[f"{name}_in"] = getattr(pieces, name)[rows].data_ptr()
        prepared(library, pieces, "prompt", q_out=pieces.q_out[rows].data_ptr(), **changes)
    assert same(pieces.q_out[start:], whole.q_out[start:])
    written = bits(pieces.pool) != FILL
    assert torch.equal(bits(pieces.pool)[written], bits(whole.pool)[written])
    if start == 0:
        assert same(pieces.pool, whole.pool)
    assert int(pieces.status) == int(whole.status) == 0


@pytest.mark.parametrize("shape", [SPLIT, SLIDING], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_q_alone_of_a_layer_that_shares_kv(library: ModuleType, shape: Shape, case: str) -> None:
    whole = prepared(library, inputs_of(case, shape, seed=6), case)
    alone = inputs_of(case, shape, seed=6)
    absent = dict.fromkeys(("k_in", "v_in", "k_norm", "pool", "page_ids", "page_indptr", "kv_origin"), 0)
    prepared(library, alone, case, **absent)
    assert same(alone.q_out, whole.q_out)
    assert (bits(alone.pool) == FILL).all()


@pytest.mark.parametrize("case", ["prompt", "many rows"])
@pytest.mark.parametrize("rotary", [2, 20, 62, 128])
def test_any_even_rotary_width(library: ModuleType, rotary: int, case: str) -> None:
    for shape in (SPLIT, FOLDED):
        inputs = inputs_of(case, shape, seed=7)
        inputs.cos, inputs.sin = (table[:, : rotary // 2].contiguous() for table in (inputs.cos, inputs.sin))
        prepared(library, inputs, "prompt", rotary=rotary)
        assert_rounds_like(inputs.q_out, expected(inputs).q)
        assert_pool(inputs)


@pytest.mark.parametrize("shape", [FOLDED, SLIDING], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_position_past_the_table_is_skipped_and_reported(library: ModuleType, shape: Shape, case: str) -> None:
    clean = prepared(library, inputs_of(case, shape, seed=8), case)
    inputs = inputs_of(case, shape, seed=8)
    limit = 310
    inputs.cos, inputs.sin = inputs.cos[:limit].contiguous(), inputs.sin[:limit].contiguous()
    prepared(library, inputs, case)
    past = preps.row_positions(inputs) >= limit
    assert past.any() and not past.all()
    assert int(inputs.status) == library.STATUS_BAD_POSITION
    assert (bits(inputs.q_out[past]) == FILL).all()
    assert same(inputs.q_out[~past], clean.q_out[~past])
    different = (bits(inputs.pool) != bits(clean.pool)).flatten(1).any(1)
    assert (bits(inputs.pool)[bits(inputs.pool) != bits(clean.pool)] == FILL).all()
    assert different.any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("position", [-1, -(1 << 31), (1 << 31) - 1])
def test_a_position_that_is_none(library: ModuleType, position: int, case: str) -> None:
    clean = prepared(library, inputs_of(case, SPLIT, seed=9), case)
    inputs = inputs_of(case, SPLIT, seed=9)
    inputs.positions[1] = position
    prepared(library, inputs, case)
    row = prompts_of(case, SPLIT)[0].rows
    assert int(inputs.status) == library.STATUS_BAD_POSITION
    assert (bits(inputs.q_out[row]) == FILL).all()
    others = torch.arange(inputs.rows, device=DEVICE) != row
    assert same(inputs.q_out[others], clean.q_out[others])


BAD: dict[str, tuple[str, int, int, str]] = {
    "page id below 0": ("page_ids", 1, -1, "BAD_PAGE_ID"),
    "page id past the pool": ("page_ids", 1, 1 << 20, "BAD_PAGE_ID"),
    "page list ends early": ("page_indptr", 1, 0, "BAD_POSITION"),
    "page list decreases": ("page_indptr", 1, 1 << 30, "BAD_INDEX"),
    "page list below 0": ("page_indptr", 0, -5, "BAD_INDEX"),
    "origin after the position": ("kv_origin", 0, 1 << 20, "BAD_POSITION"),
    "origin inside a page": ("kv_origin", 0, 1, "BAD_INDEX"),
    "origin below 0": ("kv_origin", 0, -64, "BAD_INDEX"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [FOLDED, SLIDING], ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_a_page_that_cannot_be_written_is_skipped_and_reported(library: ModuleType, bad: str, shape: Shape, case: str) -> None:
    """Q is written all the same, and every pool row holds its own bits or is untouched."""
    array, at, value, bit = BAD[bad]
    clean = prepared(library, inputs_of(case, shape, seed=10), case)
    inputs = inputs_of(case, shape, seed=10)
    getattr(inputs, array)[at] = value
    prepared(library, inputs, case)
    assert int(inputs.status) & getattr(library, f"STATUS_{bit}")
    assert same(inputs.q_out, clean.q_out)
    found, whole = bits(inputs.pool), bits(clean.pool)
    if array != "page_indptr":  # moved bounds may hand a request another's pages
        assert (found[found != whole] == FILL).all()
    assert (found != whole).any()


@pytest.mark.parametrize("case", ["prompt", "many rows"])
@pytest.mark.parametrize(("at", "value"), [(0, -3), (1, 1 << 30), (1, -(1 << 31)), (len(PROMPTS), 1 << 30)])
def test_row_bounds_out_of_range_do_not_fault(library: ModuleType, at: int, value: int, case: str) -> None:
    clean = prepared(library, inputs_of(case, SPLIT, seed=11), case)
    inputs = inputs_of(case, SPLIT, seed=11)
    inputs.q_indptr[at] = value
    prepared(library, inputs, "prompt")
    middle = slice(71, 201) if at != 1 else slice(0, 0)
    assert same(inputs.q_out[middle], clean.q_out[middle])


@pytest.mark.parametrize("form", ["prompt", "decode"])
def test_no_rows(library: ModuleType, form: str) -> None:
    inputs = prepared(library, make(SPLIT, [], device=DEVICE), form)
    assert (bits(inputs.pool) == FILL).all()
    assert int(inputs.status) == 0


def test_rows_gigabytes_into_a_pool(library: ModuleType) -> None:
    """Element offsets beyond 2^32."""
    inputs = make(FOLDED, [Prompt(70)], device=DEVICE, seed=12)
    page = inputs.pool[0].numel()
    pages = (1 << 32) // page + 2
    inputs.pool = torch.empty(pages, *inputs.pool.shape[1:], dtype=torch.bfloat16, device=DEVICE)
    inputs.page_ids[0], inputs.page_ids[1] = pages - 1, pages - 2
    inputs.reset()
    prepared(library, inputs, "prompt")
    wanted = make(FOLDED, [Prompt(70)], device=DEVICE, seed=12)
    prepared(library, wanted, "prompt")
    for i in range(2):
        assert same(inputs.pool[pages - 1 - i], wanted.pool[int(wanted.page_ids[i])])
    assert (bits(inputs.pool[: pages - 2]) == FILL).all()
    del inputs
    torch.cuda.empty_cache()


@pytest.fixture
def gemma4() -> ModuleType:
    """transformers' Gemma 4 code."""
    try:
        return importlib.import_module("transformers.models.gemma4.modeling_gemma4")
    except ImportError as error:
        unavailable(f"transformers has no Gemma 4 ({error})")


def norms(gemma4: Any, inputs: Inputs) -> tuple[Any, Any, Any]:
    """q_norm, k_norm and v_norm as modules."""
    made = []
    for weight in (inputs.q_norm, inputs.k_norm, None):
        norm = gemma4.Gemma4RMSNorm(inputs.shape.head_dim, eps=preps.EPS, with_scale=weight is not None).to(
            DEVICE, torch.bfloat16
        )
        if weight is not None:
            norm.weight.data.copy_(weight)
        made.append(norm)
    return made[0], made[1], made[2]


def full_tables(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as transformers has them: fp32 [1, rows, head_dim], pairs without a frequency not turning."""
    half = inputs.shape.head_dim // 2
    at = preps.row_positions(inputs)
    tables = []
    for table, still in ((inputs.cos, 1.0), (inputs.sin, 0.0)):
        whole = torch.full((inputs.rows, half), still, device=DEVICE)
        whole[:, : table.shape[1]] = table[at]
        tables.append(torch.cat([whole, whole], -1)[None])
    return tables[0], tables[1]


@pytest.mark.parametrize("shape", [SPLIT, EQUAL, SLIDING], ids=str)
def test_against_transformers(library: ModuleType, gemma4: Any, shape: Shape) -> None:
    """Its norms in bf16; its rotation in fp32, as here, and in bf16, where it rounds cos, sin and the products too."""
    inputs = prepared(library, make(shape, PROMPTS, device=DEVICE, seed=13), "prompt")
    q_norm, k_norm, v_norm = norms(gemma4, inputs)
    cos, sin = full_tables(inputs)
    q, k = (x.view(1, inputs.rows, -1, shape.head_dim) for x in (inputs.q, inputs.k))
    v = k if shape.k_eq_v else inputs.v.view(k.shape)
    with torch.no_grad():
        q, k, v = q_norm(q), k_norm(k), v_norm(v)

    def rotate(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: gemma4.apply_rotary_pos_emb(x.to(dtype), cos.to(dtype), sin.to(dtype), unsqueeze_dim=2)[0].bfloat16()

    for dtype, ulps, share in ((torch.float32, 1.0, 0.98), (torch.bfloat16, 3.0, 0.0)):
        other_q, other_k = (rotate(dtype)(x) for x in (q, k))
        assert_rounds_like(inputs.q_out, other_q, ulps, share)
        wanted = expected_pool(inputs, preps.Prepared(other_q, other_k, v[0]))
        written = bits(wanted) != FILL
        assert torch.equal(bits(inputs.pool) != FILL, written)
        rows = written[..., 0]
        assert_rounds_like(inputs.pool[rows], wanted[rows], ulps, share)


@pytest.mark.parametrize("shape", [SPLIT, FOLDED, SLIDING], ids=str)
def test_an_early_decode_waits_for_the_queries_of_a_prep(library: ModuleType, shape: Shape) -> None:
    """The prep lets a decode start beside it: the same bits as with the device idle in between."""
    inputs = inputs_of("decode", shape, seed=15)
    requests, window = [Request(1, 700)] * len(TOKENS), None
    if shape.kind == "sliding":
        requests, window = [released(1, 700, 200)] * len(TOKENS), 200
    geometry = Geometry(shape.q_heads, shape.kv_heads, head_dim=shape.head_dim, page_format=shape.page_format)
    lead = inputs.lead_rows
    tail = inputs.rows - lead - len(TOKENS)
    batch = build(geometry, requests, device=DEVICE, seed=16, lead_rows=lead, tail_rows=tail, window_left=window)
    batch = replace(batch, q=inputs.q_out)
    stream = torch.cuda.current_stream().cuda_stream
    check_early_decode_waits(library, batch, Limits(len(TOKENS)), inputs.q_out, lambda: run(library, inputs, "decode", stream))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention of the last rows in fp32. q: [rows, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    at = torch.arange(k.shape[0], device=q.device)
    row = at[k.shape[0] - q.shape[0] :, None]
    hidden = (at > row) | (at <= row - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize(
    "shape", [SPLIT, FOLDED, Shape("sliding", 32, 16), Shape("global", 8, 1, "folded", k_eq_v=True)], ids=str
)
def test_from_projections_through_attention(library: ModuleType, shape: Shape) -> None:
    """The prep, then the prefill over what it wrote, against fp32 from the projections on. Queries of size 0.05 give scores of
    about 1. bf16 rounds Q, K, V, the weights and the result, by 0.0017 of a row each, at random: 0.004 together."""
    group = shape.q_heads // shape.kv_heads
    if library.supports(
        f"tilepress_{shape.kind}_prefill",
        *(shape.q_heads, shape.kv_heads, shape.head_dim, PAGE, getattr(library, f"PAGE_FORMAT_{shape.page_format.upper()}")),
    ):
        pytest.fail(f"no instance for group {group}: {library.last_error()}")
    window = 100 if shape.kind == "sliding" else 1 << 30
    prompts = [Prompt(70), Prompt(1), Prompt(200), Prompt(64)]
    inputs = prepared(library, make(shape, prompts, device=DEVICE, seed=14, q_size=0.05), "prompt")
    out = torch.full_like(inputs.q_out, float("nan"))
    last = torch.tensor([(prompt.rows - 1) % PAGE + 1 for prompt in prompts], dtype=torch.int32, device=DEVICE)
    indptr = inputs.q_indptr[: len(prompts) + 1].cpu()
    given = preps.fields(library, inputs, "prompt", torch.cuda.current_stream().cuda_stream)
    shared: tuple[str, ...] = (
        "pool",
        "page_ids",
        "page_indptr",
        "q_indptr",
        "status",
        "stream",
        "num_pages",
        "rows_per_page",
        "layer_row",
    )
    shared += ("num_page_ids", "batch", "num_q_heads", "num_kv_heads", "head_dim", "page_size", "page_format")
    call: dict[str, int | float] = {name: given[name] for name in shared}
    call |= {"q": inputs.q_out.data_ptr(), "out": out.data_ptr(), "last_page_len": last.data_ptr(), "sm_scale": 1.0}
    call |= {"q_indptr_host": indptr.data_ptr(), "q_rows": inputs.rows}
    if shape.kind == "sliding":
        call |= {"window_left": window - 1}
    getattr(library, f"{shape.kind}_prefill")(**call)
    torch.cuda.synchronize()
    exact = expected(inputs, rounded=False)
    row = 0
    for prompt in prompts:
        rows = slice(row, row + prompt.rows)
        wanted = attention(exact.q[rows], exact.k[rows], exact.v[rows], window)
        off = (out[rows].float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(off.nan_to_num(nan=1.0).max()) <= 0.01
        row += prompt.rows
    assert int(inputs.status) == 0
