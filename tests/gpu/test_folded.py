"""Folded rows against split rows, both made from one set of raw projections, norm weights and positions.

Z = Wk x is one projection for K and V. Exactly, with one inverse RMS r(Z) and position t:
    K = rope_t(Z r(Z) w_k)        V = Z r(Z)        Q = rope_t(X r(X) w_q), X = Wq x
Split rows hold bf16(K) and bf16(V), and the query is bf16(Q). Folded rows hold bf16(K) at the 128 rotated columns and
bf16(V), and the query is bf16(Q) at those columns and bf16(Q w_k) at the others, where K = V w_k. So the rotated columns
are the same bits in both, and at the others the score's product Q K = (Q w_k) V is rounded in other places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from bench.inputs import Batch, Geometry, Piece, assemble, nan_pool, write_tiles
from bench.outputs import Outputs
from bench.plans import Limits
from bench.reference import OUT_TOLERANCE

from .harness import DEVICE, GROUPS, run, run_decode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

HEAD_DIM, HALF, ROTATED, PAGE = 512, 256, 64, 64
THETA = 1e6
EPS = 1e-6
BF16_UNIT = 2.0**-8  # rounding to bf16 moves a value by this share of itself at most
# How many standard deviations of its sub-Gaussian bound a sum of rounding errors may reach: 2 exp(-7^2 / 2) = 5e-11 each, and
# under 10^7 elements are compared.
SIGMAS = 7.0

ROTATED_COLUMNS = [*range(ROTATED), *range(HALF, HALF + ROTATED)]
OTHER_COLUMNS = [*range(ROTATED, HALF), *range(HALF + ROTATED, HEAD_DIM)]


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates x, fp64 [tokens, heads, 512], pairs (i, i + 256); the frequency of i >= 64 is zero."""
    i = torch.arange(HALF, dtype=torch.float64, device=x.device)
    frequency = torch.where(i < ROTATED, THETA ** (-2 * i / HEAD_DIM), 0.0)
    angle = (positions[:, None] * frequency)[:, None]
    left, right = x[..., :HALF], x[..., HALF:]
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)


def normed(x: torch.Tensor) -> torch.Tensor:
    """x over its RMS, along the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@dataclass(frozen=True)
class Sequence:
    """One request before any rounding, fp64: q [rows, q_heads, 512] at the last positions, k and v [tokens, kv_heads, 512],
    w_k [512]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    w_k: torch.Tensor

    @property
    def tokens(self) -> int:
        """Tokens of the context."""
        return int(self.k.shape[0])


def sequence(tokens: int, rows: int, q_heads: int, kv_heads: int, seed: int) -> Sequence:
    """Raw projections from bf16 values, uniform, so that |V| stays below 1.8. w_q makes scores of about +-1, and w_k, between
    0.5 and 1.5, would not be missed."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, device=DEVICE, generator=generator) * 2 - 1).to(torch.bfloat16).double()

    z, x = uniform(tokens, kv_heads, HEAD_DIM), uniform(rows, q_heads, HEAD_DIM)
    w_k = (1 + uniform(HEAD_DIM) / 2).to(torch.bfloat16).double()
    w_q = (0.05 + uniform(HEAD_DIM) / 50).to(torch.bfloat16).double()
    positions = torch.arange(tokens, dtype=torch.float64, device=DEVICE)
    v = normed(z)
    return Sequence(rope(normed(x) * w_q, positions[tokens - rows :]), rope(v * w_k, positions), v, w_k)


def batch_of(sequences: list[Sequence], page_format: str) -> Batch:
    """The sequences as requests over a pool in one format: each operand is rounded to bf16 once, here."""
    q_heads, kv_heads = sequences[0].q.shape[1], sequences[0].k.shape[1]
    shape = Geometry(q_heads, kv_heads, layers=2, page_format=page_format)
    counts = [-(-one.tokens // PAGE) for one in sequences]
    pool = nan_pool(shape, sum(counts) + 2, DEVICE)
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.int32)
    pieces = []
    for one, ids in zip(sequences, order.split([*counts, 2])[:-1], strict=True):
        tokens = one.tokens
        if shape.folded:
            q = one.q.clone()
            q[..., OTHER_COLUMNS] *= one.w_k[OTHER_COLUMNS]
            tiles = [torch.cat((one.k[..., ROTATED_COLUMNS], one.v), -1)]
        else:
            q = one.q
            tiles = [one.k, one.v]
        rows = []
        for tile in tiles:
            whole = torch.zeros(ids.numel() * PAGE, *tile.shape[1:], dtype=torch.bfloat16, device=DEVICE)
            whole[:tokens] = tile.to(torch.bfloat16)
            rows.append(whole.view(ids.numel(), PAGE, *tile.shape[1:]))
        write_tiles(shape, pool, ids, tokens, rows)
        pieces.append(Piece(q.to(torch.bfloat16), ids, tokens - (ids.numel() - 1) * PAGE))
    return assemble(shape, pool, pieces)


@dataclass(frozen=True)
class Row:
    """One query row and head: exact out fp64 [512], and what roundings may move each element by, fp64 [512]: `moved` between
    split and folded rows, `rounded` between either and the exact result."""

    out: torch.Tensor
    moved: torch.Tensor
    rounded: torch.Tensor


def exact_row(one: Sequence, row: int, head: int) -> Row:
    """The exact output of a row and head, and its bounds.

    Scores. Let a_kc = q_c k_kc, the terms of key k's score s_k. A rounding of an operand multiplies a term by 1 + e, |e| <=
    u = 2^-8, second powers of u left out; we take the errors e as independent and of zero mean. One rounded operand is the
    query's (the same e_c for every key), one the key's (its own e_kc). So with n_q roundings of the query and n_k of the key
    on the columns C, s_k moves by

        d_k = sum_C a_kc (e_c + e_kc),   sub-Gaussian with scale u sqrt(n_q + n_k) |a_k|,   |a_k|^2 = sum_C a_kc^2.

    Output. o = sum p_k v_k with p the softmax. Its change of first order, sum_k p_k d_k (v_k - o), is linear in the errors:

        key's:    scale u sqrt(n_k G),  G = sum_k p_k^2 (v_k - o)^2 |a_k|^2
        query's:  scale u sqrt(n_q H),  H = sum_C (sum_k p_k a_kc (v_k - o))^2

    The second order is half the third cumulant of (d, d, v) somewhere on the way, at most Var(d) max|v - o| / 2; with every
    |d_k| <= D, Var(d) <= D^2, and max|v - o| <= 2 max|v|: D^2 max|v|. Each scale counts SIGMAS times.

    Values. Both formats hold the same bf16(V), so between them it moves nothing; from the exact output, u sum_k p_k |v_k|.

    Between the formats the columns C are the 384 unrotated ones and n_q = n_k = 2: each format rounds one operand of either
    kind. From the exact result each format has n_q = n_k = 1 on all columns; folded rows round the same V for both products,
    which is why the two parts are added and not taken as independent.
    """
    group = one.q.shape[1] // one.k.shape[1]
    seen = one.tokens - one.q.shape[0] + row + 1
    k, v = one.k[:seen, head // group], one.v[:seen, head // group]
    terms = one.q[row, head] * k
    p = torch.softmax(terms.sum(-1), 0)
    out = p @ v
    away = v - out

    def bound(columns: Iterable[int], roundings: int) -> torch.Tensor:
        a = terms[:, list(columns)]
        sizes = a.square().sum(-1)
        from_keys = (p.square() * sizes) @ away.square()
        from_query = ((p[:, None] * a).T @ away).square().sum(0)
        largest = SIGMAS * BF16_UNIT * (2 * roundings * float(sizes.max())) ** 0.5
        first = SIGMAS * BF16_UNIT * (roundings * (from_keys + from_query)).sqrt()
        return first + largest**2 * v.abs().max()

    return Row(out, bound(OTHER_COLUMNS, 2), bound(range(HEAD_DIM), 1) + BF16_UNIT * (p @ v.abs()))


def half_ulp(values: torch.Tensor) -> torch.Tensor:
    """What rounding to bf16 may move values of this size by."""
    return torch.ldexp(torch.ones_like(values), torch.frexp(values.abs()).exponent - 9)


def assert_within(a: torch.Tensor, b: torch.Tensor, bound: torch.Tensor, roundings: int, what: str) -> None:
    """|a - b| <= bound, beyond what rounding `roundings` of the two to bf16 explains."""
    error = (a - b).abs()
    allowed = bound + roundings * half_ulp(torch.maximum(a.abs(), b.abs()))
    worst = float((error / allowed).nan_to_num(nan=float("inf")).max())
    assert worst <= 1, f"{what}: {worst:.2f} of the bound"


def assert_formats_agree(sequences: list[Sequence], split: Outputs, folded: Outputs) -> None:
    """A few rows and heads of every sequence: each format against the exact result, and one against the other.

    A kernel is off its own operands' result by OUT_TOLERANCE for |V| <= 1, in proportion to the largest |V|.
    """
    first = 0
    for number, one in enumerate(sequences):
        kernel = OUT_TOLERANCE * float(one.v.abs().max())
        rows = one.q.shape[0]
        for row in sorted({0, rows // 2, rows - 1}):
            for head in sorted({0, one.q.shape[1] // 2 + 1, one.q.shape[1] - 1}):
                exact = exact_row(one, row, head)
                s, f = (outputs.out[first + row, head].double() for outputs in (split, folded))
                where = f"sequence {number}, row {row}, head {head}"
                assert_within(s, exact.out, exact.rounded + kernel, 1, f"split from exact, {where}")
                assert_within(f, exact.out, exact.rounded + kernel, 1, f"folded from exact, {where}")
                assert_within(s, f, exact.moved + 2 * kernel, 2, f"split from folded, {where}")
        first += rows


def test_the_bounds_tell_a_mistake_from_a_rounding() -> None:
    """What a wrong fold does to a short and a longer context, far outside the bounds: the weight w_k left out of the query,
    and the two rotated chunks exchanged. Otherwise the tests below would say nothing."""
    for tokens in (3, 20, 150):
        one = sequence(tokens, 1, 8, 1, seed=tokens)
        for mistake in ("weight", "chunks"):
            q, k = one.q.clone(), one.k.clone()
            if mistake == "weight":
                q[..., OTHER_COLUMNS] /= one.w_k[OTHER_COLUMNS]
            else:
                k[..., ROTATED_COLUMNS] = one.k[..., ROTATED_COLUMNS[ROTATED:] + ROTATED_COLUMNS[:ROTATED]]
            wrong = torch.softmax(q[0] @ k[:, 0].T, -1) @ one.v[:, 0]
            outside = []
            for head in range(8):
                exact = exact_row(one, 0, head)
                allowed = exact.moved + 2 * OUT_TOLERANCE * one.v.abs().max() + 2 * half_ulp(exact.out)
                outside.append(float(((wrong[head] - exact.out).abs() / allowed).max()))
            assert max(outside) > 2, f"{tokens} tokens, {mistake}: {max(outside):.2f} of the bound"


@pytest.mark.parametrize("group", GROUPS)
def test_prefill(library: ModuleType, group: int) -> None:
    shapes = ((70, 200), (1, 1), (64, 64), (30, 1000), (5, 4000))
    sequences = [sequence(tokens, rows, 2 * group, 2, seed) for seed, (rows, tokens) in enumerate(shapes)]
    split, folded = (run(library, batch_of(sequences, name)) for name in ("split", "folded"))
    assert_formats_agree(sequences, split, folded)


@pytest.mark.parametrize("group", GROUPS)
def test_decode(library: ModuleType, group: int) -> None:
    lengths = (1, 2, 64, 65, 500, 4000)
    sequences = [sequence(tokens, 1, 2 * group, 2, seed) for seed, tokens in enumerate(lengths)]
    split, folded = (run_decode(library, batch_of(sequences, name), Limits(8)).outputs for name in ("split", "folded"))
    assert_formats_agree(sequences, split, folded)
