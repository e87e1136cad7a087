"""Inputs of the preps, built to be hostile, and what must come out of them: for the GPU tests and the bench.

The pool is NaN of one bit pattern, which no prep writes, so every row that nobody owns can be told from one that was written.
Columns of a fused row outside the bands, rows of no request and index elements past the end are NaN or garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch

from codegen.abi.prep import BULK_BYTES
from codegen.formats import FORMATS, ROTATED

PAGE = 64  # tokens
EPS = 1e-6
FILL = 0x7FA5  # a NaN as bf16; rounding to bf16 gives another
BF16_ULP = 2.0**-7  # of a value, at most
PADDING = 24  # columns of nobody before and behind each band of a fused row, as tests have it


@dataclass(frozen=True)
class Shape:
    """Heads and pool of one layer kind, `layer` of `layers` in a page. kind: "global" or "sliding"."""

    kind: str
    q_heads: int
    kv_heads: int
    page_format: str = "split"
    k_eq_v: bool = False
    layers: int = 3
    layer: int = 1

    @property
    def head_dim(self) -> int:
        """Columns a head."""
        return {"global": 512, "sliding": 256}[self.kind]

    @property
    def rotary(self) -> int:
        """Columns that turn."""
        return {"global": 2 * ROTATED, "sliding": 256}[self.kind]

    @property
    def folded(self) -> bool:
        """Whether a pool row holds rotated K columns and V."""
        return self.page_format == "folded"

    @property
    def many_rows(self) -> int:
        """Rows of a call that a prompt's prep takes through shared memory."""
        return BULK_BYTES // (2 * self.head_dim * (self.q_heads + self.kv_heads)) + 1

    @property
    def row_width(self) -> int:
        """Columns of a pool row."""
        return self.head_dim + FORMATS[self.page_format].extra_columns

    @property
    def layer_rows(self) -> int:
        """Pool rows that a layer has in a page."""
        return FORMATS[self.page_format].tiles * PAGE

    @property
    def written_bytes_per_token(self) -> int:
        """Bytes of q_out and the pool that a token's prep writes."""
        pool = FORMATS[self.page_format].tiles * self.kv_heads * self.row_width
        return 2 * (self.q_heads * self.head_dim + pool)

    @property
    def read_bytes_per_token(self) -> int:
        """Bytes of projections and of the cos and sin tables that a token's prep reads."""
        projections = self.q_heads + (1 if self.k_eq_v else 2) * self.kv_heads
        return 2 * projections * self.head_dim + 4 * self.rotary


@dataclass(frozen=True)
class Prompt:
    """`rows` tokens from `position` on; the page list begins at `origin` and has pages up to the last token."""

    rows: int
    position: int = 0
    origin: int = 0

    @property
    def pages(self) -> int:
        """Pages in the list."""
        return -(-(self.position + self.rows - self.origin) // PAGE)


def rope_tables(shape: Shape, max_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [max_positions, rotary / 2], of Gemma 4's frequencies."""
    theta = {"global": 1e6, "sliding": 1e4}[shape.kind]
    pairs = torch.arange(shape.rotary // 2, dtype=torch.float64)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * theta ** (-2 * pairs / shape.head_dim)
    return angles.cos().float().to(device), angles.sin().float().to(device)


@dataclass
class Inputs:
    """One call's arrays on one device.

    q, k, v: bf16 [rows, heads * head_dim], v empty with k_eq_v. q_norm, k_norm: bf16 [head_dim]. cos, sin: fp32
    [max_positions, rotary / 2]. pool: bf16 [num_pages, layers * layer_rows, kv_heads, row_width]. The index arrays have garbage
    behind what the call is told of. prompts: what they say.
    """

    shape: Shape
    prompts: list[Prompt]
    lead_rows: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q_out: torch.Tensor
    pool: torch.Tensor
    page_ids: torch.Tensor
    page_indptr: torch.Tensor
    kv_origin: torch.Tensor
    q_indptr: torch.Tensor
    positions: torch.Tensor
    status: torch.Tensor
    num_page_ids: int
    fused: torch.Tensor | None = None
    bands: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of the call."""
        return int(self.q.shape[0])

    def fuse(self, padding: int = PADDING) -> None:
        """Stacks q, k and v in one buffer, with so many NaN columns around each."""
        parts = {"q": self.q, "k": self.k, "v": self.v}
        stride = padding + sum(part.shape[1] + padding for part in parts.values())
        self.fused = torch.full((self.rows, stride), float("nan"), dtype=torch.bfloat16, device=self.q.device)
        offset = padding
        for name, part in parts.items():
            self.fused[:, offset : offset + part.shape[1]] = part
            self.bands[name] = (offset, stride)
            offset += part.shape[1] + padding

    def reset(self) -> None:
        """Fills what is written with its sentinels again."""
        for tensor in (self.q_out, self.pool):
            tensor.view(torch.int16).fill_(FILL)
        self.status.fill_(0)


def make(
    shape: Shape,
    prompts: Sequence[Prompt],
    *,
    device: torch.device,
    seed: int = 0,
    max_positions: int = 0,
    lead_rows: int = 0,
    tail_rows: int = 0,
    q_size: float = 1.0,
) -> Inputs:
    """Random projections for `prompts`, in rows of their own behind `lead_rows` of nobody. q_size: of q_norm's weights.
    max_positions: by default just enough."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = lead_rows + sum(prompt.rows for prompt in prompts) + tail_rows
    max_positions = max_positions or max([1, *(prompt.position + prompt.rows for prompt in prompts)])

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    def projection(heads: int) -> torch.Tensor:
        # Rows of different sizes: the norm must take each at its own.
        sizes = torch.exp2(4 * normal(rows, heads, 1))
        data = (normal(rows, heads, shape.head_dim) * sizes).to(torch.bfloat16).view(rows, heads * shape.head_dim)
        data[:lead_rows] = float("nan")
        data[rows - tail_rows :] = float("nan")
        return data

    def indices(values: list[int]) -> torch.Tensor:
        return torch.tensor([*values, -123456789, 987654321], dtype=torch.int32, device=device)

    q_bounds, page_bounds = [lead_rows], [0]
    for prompt in prompts:
        q_bounds.append(q_bounds[-1] + prompt.rows)
        page_bounds.append(page_bounds[-1] + prompt.pages)
    num_pages = page_bounds[-1] + 3
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    cos, sin = rope_tables(shape, max_positions, device)
    inputs = Inputs(
        shape=shape,
        prompts=list(prompts),
        lead_rows=lead_rows,
        q=projection(shape.q_heads),
        k=projection(shape.kv_heads),
        v=projection(0 if shape.k_eq_v else shape.kv_heads),
        q_norm=((1 + 0.2 * normal(shape.head_dim)) * q_size).to(torch.bfloat16),
        k_norm=(1 + 0.2 * normal(shape.head_dim)).to(torch.bfloat16),
        cos=cos,
        sin=sin,
        q_out=torch.empty(rows, shape.q_heads, shape.head_dim, dtype=torch.bfloat16, device=device),
        pool=torch.empty(
            num_pages, shape.layers * shape.layer_rows, shape.kv_heads, shape.row_width, dtype=torch.bfloat16, device=device
        ),
        page_ids=indices(shuffled[: page_bounds[-1]]),
        page_indptr=indices(page_bounds),
        kv_origin=indices([prompt.origin for prompt in prompts]),
        q_indptr=indices(q_bounds),
        positions=indices([prompt.position for prompt in prompts]),
        status=torch.zeros(1, dtype=torch.int32, device=device),
        num_page_ids=page_bounds[-1],
    )
    inputs.reset()
    return inputs


def fields(library: ModuleType, inputs: Inputs, form: str, stream: int) -> dict[str, int | float]:
    """The keyword arguments of `tilepress.prep_<kind>_<form>`. form: "prompt" or "decode"."""
    shape = inputs.shape
    result: dict[str, int | float] = {
        "q_norm": inputs.q_norm.data_ptr(),
        "k_norm": inputs.k_norm.data_ptr(),
        "cos": inputs.cos.data_ptr(),
        "sin": inputs.sin.data_ptr(),
        "q_out": inputs.q_out.data_ptr(),
        "pool": inputs.pool.data_ptr(),
        "page_ids": inputs.page_ids.data_ptr(),
        "page_indptr": inputs.page_indptr.data_ptr(),
        "kv_origin": inputs.kv_origin.data_ptr(),
        "positions": inputs.positions.data_ptr(),
        "status": inputs.status.data_ptr(),
        "stream": stream,
        "num_pages": inputs.pool.shape[0],
        "rows_per_page": shape.layers * shape.layer_rows,
        "layer_row": shape.layer * shape.layer_rows,
        "rows": inputs.rows,
        "num_page_ids": inputs.num_page_ids,
        "num_q_heads": shape.q_heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "page_size": PAGE,
        "page_format": getattr(library, f"PAGE_FORMAT_{shape.page_format.upper()}"),
        "k_eq_v": int(shape.k_eq_v),
        "rotary": shape.rotary,
        "max_positions": inputs.cos.shape[0],
        "eps": EPS,
    }
    for name, part in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        buffer = part if inputs.fused is None else inputs.fused
        offset, stride = inputs.bands.get(name, (0, part.shape[1]))
        if name == "v" and shape.k_eq_v:
            continue
        result |= {
            f"{name}_in": buffer.data_ptr(),
            f"{name}_band_offset": offset,
            f"{name}_band_length": part.shape[1],
            f"{name}_row_stride": stride,
        }
    if form == "prompt":
        result |= {"q_indptr": inputs.q_indptr.data_ptr(), "batch": len(inputs.prompts)}
    return result


def run(library: ModuleType, inputs: Inputs, form: str, stream: int = 0, **changes: int | float) -> None:
    """One call, with changed arguments."""
    getattr(library, f"prep_{inputs.shape.kind}_{form}")(**{**fields(library, inputs, form, stream), **changes})


def gelu_mul(library: ModuleType, fused: torch.Tensor, out: torch.Tensor) -> None:
    """The activation of gate and up rows stacked in one, bf16 [rows, 2 * columns], into [rows, columns]."""
    rows, columns = out.shape
    library.gelu_mul(
        gate_in=fused.data_ptr(),
        gate_band_length=columns,
        gate_row_stride=2 * columns,
        up_in=fused.data_ptr(),
        up_band_offset=columns,
        up_band_length=columns,
        up_row_stride=2 * columns,
        out=out.data_ptr(),
        rows=rows,
        columns=columns,
        stream=torch.cuda.current_stream().cuda_stream,
    )


def row_positions(inputs: Inputs) -> torch.Tensor:
    """Every row's position; 0 for rows of nobody. int64 [rows]."""
    positions = torch.zeros(inputs.rows, dtype=torch.int64, device=inputs.q.device)
    row = inputs.lead_rows
    for prompt in inputs.prompts:
        positions[row : row + prompt.rows] = torch.arange(prompt.position, prompt.position + prompt.rows)
        row += prompt.rows
    return positions


def normed(x: torch.Tensor) -> torch.Tensor:
    """x / rms(x) over the last dimension, in x's dtype."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [rows, heads, head_dim] with cos and sin [rows, rotary / 2]; columns past the pairs do not turn."""
    half, pairs = x.shape[-1] // 2, cos.shape[-1]
    low, high = x[..., :pairs], x[..., half : half + pairs]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, x[..., pairs:half], high * cos + low * sin, x[..., half + pairs :]], -1)


@dataclass(frozen=True)
class Prepared:
    """bf16 [rows, heads, head_dim]: q as for the page format, and K and V unfolded."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def unrotated_columns(shape: Shape) -> torch.Tensor:
    """Columns of a head that a folded row takes from V. bool [head_dim]."""
    column = torch.arange(shape.head_dim) % (shape.head_dim // 2)
    return column >= ROTATED


def expected(inputs: Inputs, *, rounded: bool = True) -> Prepared:
    """The preps' arithmetic in fp32, with the norm rounded to bf16 before the rotation; `rounded` False: fp32 throughout and
    unfolded, which is what attention is after."""
    shape = inputs.shape
    cos, sin = (table[row_positions(inputs).clamp(max=table.shape[0] - 1)] for table in (inputs.cos, inputs.sin))

    def round_(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).float() if rounded else x

    q, k, v = (x.view(inputs.rows, -1, shape.head_dim).float() for x in (inputs.q, inputs.k, inputs.v))
    q_weight, k_weight = inputs.q_norm.float(), inputs.k_norm.float()
    if shape.folded and rounded:
        q_weight = torch.where(unrotated_columns(shape).to(q.device), q_weight * k_weight, q_weight)
    results = (
        rotated(round_(normed(q) * q_weight), cos, sin),
        rotated(round_(normed(k) * k_weight), cos, sin),
        normed(k if shape.k_eq_v else v),
    )
    return Prepared(*(result.to(torch.bfloat16) if rounded else result for result in results))


def expected_pool(inputs: Inputs, prepared: Prepared) -> torch.Tensor:
    """The pool after the call, FILL where nothing is written. bf16, shaped as inputs.pool."""
    shape = inputs.shape
    pool = torch.empty_like(inputs.pool)
    pool.view(torch.int16).fill_(FILL)
    row, first = inputs.lead_rows, 0
    start = shape.layer * shape.layer_rows
    for prompt in inputs.prompts:
        rows = slice(row, row + prompt.rows)
        token = torch.arange(prompt.rows, device=pool.device) + prompt.position - prompt.origin
        page = inputs.page_ids[first + token // PAGE].long()
        k, v = prepared.k[rows], prepared.v[rows]
        if shape.folded:
            half = shape.head_dim // 2
            pool[page, start + token % PAGE] = torch.cat([k[..., :ROTATED], k[..., half : half + ROTATED], v], -1)
        else:
            pool[page, start + token % PAGE] = k
            pool[page, start + PAGE + token % PAGE] = v
        row += prompt.rows
        first += prompt.pages
    return pool
