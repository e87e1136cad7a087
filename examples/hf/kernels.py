"""Attention over the pool through the library: generated kernels or the incumbent's, by mode; and the preps.

Every call takes device addresses as integers, and keyword arguments named as the fields of the C structs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch

from .modes import Mode
from .pool import PAGE, Heads, Step

INCUMBENT_DECODE_GROUPS = (1, 2, 3, 4, 8)  # query heads per KV head that its decode is compiled for
WHOLE = 1 << 30  # a KV chunk that holds any request


class Unsupported(RuntimeError):
    """A mode cannot serve this model."""


class Attention(Protocol):
    """Attention of a step's rows over their pages."""

    def attend(self, step: Step, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """q: bf16 [batch * rows, q_heads, head_dim], the last `rows` rows of every request, which may be fewer than the step's.
        Gives an output of the same shape."""
        ...

    def check(self) -> None:
        """Waits for the device and raises RuntimeError where a kernel set a bit of the status word."""
        ...


def stream() -> int:
    """The current stream's address."""
    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0


def _geometry(heads: Heads) -> dict[str, int]:
    return {
        "num_q_heads": heads.q_heads,
        "num_kv_heads": heads.kv_heads,
        "head_dim": heads.head_dim,
        "page_size": PAGE,
        "page_format": heads.page_format_code,
    }


def _place(step: Step, layer: int) -> dict[str, int]:
    heads = step.heads
    return {
        "num_pages": step.pool.num_pages,
        "rows_per_page": heads.rows_per_page,
        "layer_row": layer * heads.layer_rows,
    }


@dataclass
class Plan:
    """A decode plan, int32 on both sides, and the workspace of its calls."""

    host: torch.Tensor
    device: torch.Tensor
    workspace: torch.Tensor


class Generated:
    """The generated kernels: one entry an operation and kind of layer."""

    def __init__(self, library: ModuleType, device: torch.device, sm_count: int) -> None:
        self.library = library
        self.sm_count = sm_count
        self.status = torch.zeros(1, dtype=torch.int32, device=device)

    def attend(self, step: Step, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """See Attention. One row a request goes through the decode, more through the prefill."""
        heads, rows = step.heads, q.shape[0] // step.batch
        out = torch.empty_like(q)
        shared: dict[str, int | float] = {
            "q": q.data_ptr(),
            "out": out.data_ptr(),
            "pool": step.pool.rows.data_ptr(),
            "page_ids": step.page_ids.data_ptr(),
            "num_page_ids": step.num_page_ids,
            "status": self.status.data_ptr(),
            "stream": stream(),
            "q_rows": q.shape[0],
            "sm_scale": scale,
            **_geometry(heads),
            **_place(step, layer),
        }
        if rows == 1:
            plan = self._plan(step)
            getattr(self.library, f"{heads.kind}_decode")(
                **shared,
                plan=plan.device.data_ptr(),
                plan_host=plan.host.data_ptr(),
                workspace=plan.workspace.data_ptr(),
                workspace_bytes=plan.workspace.numel(),
            )
            return out
        queries = step.queries(rows)
        if heads.window:
            shared |= {"window_left": heads.window - 1, "kv_origin": step.kv_origin.data_ptr()}
        getattr(self.library, f"{heads.kind}_prefill")(
            **shared,
            page_indptr=step.page_indptr.data_ptr(),
            last_page_len=step.last_page_len.data_ptr(),
            q_indptr=queries.device.data_ptr(),
            q_indptr_host=queries.host.data_ptr(),
            batch=step.batch,
        )
        return out

    def _plan(self, step: Step) -> Plan:
        """The step's plan: one for all layers of its kind."""
        made = step.prepared.get("plan")
        if isinstance(made, Plan):
            return made
        heads, device = step.heads, step.pool.rows.device
        geometry = _geometry(heads)
        head_dim = geometry.pop("head_dim")
        limits = {"max_batch": step.batch, "sm_count": self.sm_count, **geometry}
        sizes = torch.zeros(2, dtype=torch.int64)
        self.library.decode_plan_size(
            plan_words_out=sizes.data_ptr(), workspace_bytes_out=sizes.data_ptr() + 8, head_dim=head_dim, **limits
        )
        words, workspace = sizes.tolist()
        host = torch.empty(words, dtype=torch.int32)
        lengths = torch.tensor(step.contexts, dtype=torch.int32)
        bounds = torch.tensor(step.page_bounds, dtype=torch.int32)
        origins = torch.tensor(step.origins, dtype=torch.int32)
        self.library.decode_plan(
            kv_len=lengths.data_ptr(),
            page_indptr=bounds.data_ptr(),
            kv_origin=origins.data_ptr(),
            plan=host.data_ptr(),
            plan_words=words,
            batch=step.batch,
            window=heads.window,
            **limits,
        )
        plan = Plan(host, host.to(device), torch.empty(workspace, dtype=torch.uint8, device=device))
        step.prepared["plan"] = plan
        return plan

    def check(self) -> None:
        """See Attention."""
        raise_status(self.status)


def raise_status(status: torch.Tensor) -> None:
    """Raises RuntimeError for a status word that is not zero, and clears it."""
    bits = int(status.item())
    if bits:
        status.zero_()
        raise RuntimeError(f"the kernels report status bits {bits:#x}: see TILEPRESS_STATUS_* in docs/abi.md")


@dataclass
class Chunks:
    """The incumbent's plan of a split decode: int32 arrays but for `valid` and the partials."""

    requests: torch.Tensor
    chunks: torch.Tensor
    chunk_size: torch.Tensor
    o_indptr: torch.Tensor
    tmp_v: torch.Tensor
    tmp_s: torch.Tensor


@dataclass
class Tiles:
    """The incumbent's plan of a prefill."""

    requests: torch.Tensor
    tiles: torch.Tensor
    zeros: torch.Tensor
    chunk_size: torch.Tensor
    total_rows: torch.Tensor


class Incumbent:
    """The incumbent's entries, under the names that its consumers link."""

    def __init__(self, library: ModuleType, sm_count: int) -> None:
        missing = "batch_prefill_paged_cuda_hd512"
        if not hasattr(library, missing):
            raise Unsupported(f"this library has no incumbent: {missing} is missing; build it with the incumbent's rows")
        self.library = library
        self.sm_count = sm_count

    def attend(self, step: Step, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """See Attention. Its split decode has no instance for every group: the others go through its prefill."""
        heads, rows = step.heads, q.shape[0] // step.batch
        out = torch.empty_like(q)
        if rows > 1 or heads.group not in INCUMBENT_DECODE_GROUPS:
            code = self._prefill(step, layer, q, out, rows, scale)
        elif heads.window:
            code = self._window_decode(step, layer, q, out, scale)
        else:
            code = self._split_decode(step, layer, q, out, scale)
        if code != self.library.OK:
            raise RuntimeError(self.library.last_error())
        return out

    def _pool(self, step: Step, layer: int) -> dict[str, int]:
        heads = step.heads
        row = heads.kv_heads * heads.head_dim
        k = layer * heads.layer_rows * row
        return {
            "kv_data": step.pool.rows.data_ptr(),
            "k_offset_elems": k,
            "v_offset_elems": k + PAGE * row,
            "page_indices": step.page_ids.data_ptr(),
            "page_indptr": step.page_indptr.data_ptr(),
            "last_page_len_d": step.last_page_len.data_ptr(),
            "num_qo_heads": heads.q_heads,
            "num_kv_heads": heads.kv_heads,
            "head_dim": heads.head_dim,
            "page_size": PAGE,
            "batch_size": step.batch,
            "stride_page": heads.rows_per_page * row,
            "stream": stream(),
        }

    def _prefill(self, step: Step, layer: int, q: torch.Tensor, out: torch.Tensor, rows: int, scale: float) -> int:
        heads = step.heads
        plan = step.prepared.get(("tiles", rows))
        if not isinstance(plan, Tiles):
            shape = (heads.q_heads, heads.kv_heads, heads.head_dim)
            tile = self.library.batch_prefill_cta_tile_q(q.shape[0], *shape)
            count = self.library.batch_prefill_paged_num_tiles_with_cta_tile_q(rows, *shape, tile)
            if tile < 0 or count < 0:
                raise RuntimeError(self.library.last_error())
            plan = Tiles(
                _ints(step, [request for request in range(step.batch) for _ in range(count)]),
                _ints(step, list(range(count)) * step.batch),
                _ints(step, [0] * (count * step.batch)),
                _ints(step, [WHOLE]),
                _ints(step, [q.shape[0]]),
            )
            step.prepared[("tiles", rows)] = plan
        windowed = {"window_left": heads.window - 1} if heads.window else {}
        name = "batch_prefill_paged_window_cuda_hd256" if heads.window else "batch_prefill_paged_cuda_hd512"
        return int(
            getattr(self.library, name)(
                q=q.data_ptr(),
                output=out.data_ptr(),
                **self._pool(step, layer),
                q_indptr=step.queries(rows).device.data_ptr(),
                request_indices=plan.requests.data_ptr(),
                qo_tile_indices=plan.tiles.data_ptr(),
                kv_tile_indices=plan.zeros.data_ptr(),
                kv_chunk_size_ptr=plan.chunk_size.data_ptr(),
                total_num_rows=plan.total_rows.data_ptr(),
                seq_len=q.shape[0],
                padded_batch_size=plan.tiles.numel(),
                sm_scale=scale,
                **windowed,
            )
        )

    def _window_decode(self, step: Step, layer: int, q: torch.Tensor, out: torch.Tensor, scale: float) -> int:
        plan = step.prepared.get("window")
        if not isinstance(plan, Tiles):
            zeros = _ints(step, [0] * step.batch)
            plan = Tiles(_ints(step, list(range(step.batch))), zeros, zeros, _ints(step, [WHOLE]), zeros)
            step.prepared["window"] = plan
        return int(
            self.library.paged_attention_decode_window_cuda_hd256(
                q=q.data_ptr(),
                output=out.data_ptr(),
                **self._pool(step, layer),
                request_indices=plan.requests.data_ptr(),
                kv_tile_indices=plan.zeros.data_ptr(),
                kv_chunk_size_ptr=plan.chunk_size.data_ptr(),
                sm_scale=scale,
                window_left=step.heads.window - 1,
            )
        )

    def _split_decode(self, step: Step, layer: int, q: torch.Tensor, out: torch.Tensor, scale: float) -> int:
        plan = step.prepared.get("chunks")
        if not isinstance(plan, Chunks):
            plan = self._chunks(step)
            step.prepared["chunks"] = plan
        return int(
            self.library.paged_attention_decode_split_kv_cuda_hd512(
                q=q.data_ptr(),
                output=out.data_ptr(),
                **self._pool(step, layer),
                request_indices=plan.requests.data_ptr(),
                kv_tile_indices=plan.chunks.data_ptr(),
                kv_chunk_size_ptr=plan.chunk_size.data_ptr(),
                o_indptr=plan.o_indptr.data_ptr(),
                block_valid_mask=0,
                tmp_v=plan.tmp_v.data_ptr(),
                tmp_s=plan.tmp_s.data_ptr(),
                padded_batch_size=plan.chunks.numel(),
                sm_scale=scale,
            )
        )

    def _chunks(self, step: Step) -> Chunks:
        """Chunks of whole pages, as short as leaves each multiprocessor some two blocks of the step."""
        heads, device = step.heads, step.pool.rows.device
        blocks = max(2 * self.sm_count // heads.kv_heads, 1)
        pages = max(-(-sum(step.page_counts) // blocks), 2)
        requests: list[int] = []
        chunks: list[int] = []
        bounds = [0]
        for request, count in enumerate(step.page_counts):
            some = -(-count // pages)
            requests += [request] * some
            chunks += range(some)
            bounds.append(len(chunks))
        shape = (len(chunks), heads.q_heads, heads.head_dim)
        return Chunks(
            _ints(step, requests),
            _ints(step, chunks),
            _ints(step, [pages * PAGE]),
            _ints(step, bounds),
            torch.empty(shape, dtype=torch.bfloat16, device=device),
            torch.empty(shape[:2], dtype=torch.float32, device=device),
        )

    def check(self) -> None:
        """See Attention. The incumbent has no status word."""
        torch.cuda.synchronize()


def _ints(step: Step, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=step.pool.rows.device)


@dataclass(frozen=True)
class Band:
    """A projection's columns in rows that may hold others too: `length` columns from `offset` on."""

    rows: torch.Tensor
    offset: int
    length: int

    def fields(self, name: str) -> dict[str, int]:
        """The four fields that describe it."""
        return {
            f"{name}_in": self.rows.data_ptr(),
            f"{name}_band_offset": self.offset,
            f"{name}_band_length": self.length,
            f"{name}_row_stride": self.rows.shape[-1],
        }


@dataclass(frozen=True)
class Norms:
    """Weights of the norms of Q and K, bf16 [head_dim], and eps. k is None where the layer has no K of its own."""

    q: torch.Tensor
    k: torch.Tensor | None
    eps: float


@dataclass(frozen=True)
class Rope:
    """cos and sin, fp32 [positions, rotary / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    @staticmethod
    def of(inv_freq: torch.Tensor, positions: int) -> Rope:
        """Tables from a model's inverse frequencies, without the zeros behind them: those columns do not turn."""
        turning = inv_freq[inv_freq != 0].float()
        if turning.numel() == 0 or (inv_freq[turning.numel() :] != 0).any():
            raise Unsupported("the inverse frequencies are not some that turn, followed by zeros: the preps cannot apply them")
        angles = torch.arange(positions, device=inv_freq.device)[:, None].float() * turning
        return Rope(angles.cos().contiguous(), angles.sin().contiguous())


class Preps:
    """The preps: projections to queries, and to K and V in the pool."""

    def __init__(self, library: ModuleType, device: torch.device) -> None:
        self.library = library
        self.status = torch.zeros(1, dtype=torch.int32, device=device)

    def prepare(
        self, step: Step, layer: int, q: Band, k: Band | None, v: Band | None, norms: Norms, rope: Rope, *, k_eq_v: bool
    ) -> torch.Tensor:
        """Queries, bf16 [batch * rows, q_heads, head_dim]; K and V go into the layer's rows of the pool. k None: the layer
        reads rows that another wrote. v None: it is K's projection, if k_eq_v."""
        heads = step.heads
        rows = q.rows.shape[0]
        out = torch.empty(rows, heads.q_heads, heads.head_dim, dtype=torch.bfloat16, device=q.rows.device)
        fields: dict[str, int | float] = {
            **q.fields("q"),
            "q_norm": norms.q.data_ptr(),
            "cos": rope.cos.data_ptr(),
            "sin": rope.sin.data_ptr(),
            "q_out": out.data_ptr(),
            "pool": step.pool.rows.data_ptr(),
            "page_ids": step.page_ids.data_ptr(),
            "page_indptr": step.page_indptr.data_ptr(),
            "kv_origin": step.kv_origin.data_ptr(),
            "positions": self._positions(step, rows // step.batch).data_ptr(),
            "status": self.status.data_ptr(),
            "stream": stream(),
            "rows": rows,
            "num_page_ids": step.num_page_ids,
            "k_eq_v": int(k_eq_v),
            "rotary": 2 * rope.cos.shape[1],
            "max_positions": rope.cos.shape[0],
            "eps": norms.eps,
            **_geometry(heads),
            **_place(step, layer),
        }
        if k is not None and norms.k is not None:
            fields |= {**k.fields("k"), "k_norm": norms.k.data_ptr()}
            if v is not None:
                fields |= v.fields("v")
        form = "decode"
        if rows != step.batch:
            form = "prompt"
            fields |= {"q_indptr": step.queries(rows // step.batch).device.data_ptr(), "batch": step.batch}
        getattr(self.library, f"prep_{heads.kind}_{form}")(**fields)
        return out

    def _positions(self, step: Step, rows: int) -> torch.Tensor:
        """The position of each request's first row: where a layer computes the last rows only, not the step's first."""
        if rows == step.rows:
            return step.positions
        made = step.prepared.get(("positions", rows))
        if not isinstance(made, torch.Tensor):
            made = step.positions + (step.rows - rows)
            step.prepared[("positions", rows)] = made
        return made

    def check(self) -> None:
        """Waits, and raises RuntimeError for a status bit."""
        raise_status(self.status)


def gelu_mul(library: ModuleType, gate: Band, up: Band) -> torch.Tensor:
    """gelu_tanh(gate) * up, bf16 [rows, columns]."""
    out = torch.empty(gate.rows.shape[0], gate.length, dtype=torch.bfloat16, device=gate.rows.device)
    library.gelu_mul(
        **gate.fields("gate"), **up.fields("up"), out=out.data_ptr(), stream=stream(), rows=out.shape[0], columns=gate.length
    )
    return out


def attention_for(mode: Mode, library: ModuleType, device: torch.device) -> Attention:
    """What serves attention under a mode. Raises Unsupported."""
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    if mode is Mode.INCUMBENT:
        return Incumbent(library, sm_count)
    return Generated(library, device, sm_count)
