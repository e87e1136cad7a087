"""One case through the library, its JIT twin and the fp32 reference."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.inputs import INT32_MIN, TILE, Batch, Geometry
from bench.library import decode, decode_fields, entry, prefill
from bench.outputs import Outputs, make_outputs
from bench.plans import FIRST_SLOT, SPLITS, Limits, Plan, make_plan
from bench.reference import (
    LSE_TOLERANCE,
    OUT_TOLERANCE,
    ROW_TOLERANCE,
    Reference,
    attention,
    lse_error,
    out_error,
    row_error,
)
from codegen.kernels import OPERATIONS
from codegen.lowered import Request as KernelRequest

DEVICE = torch.device("cuda")
FORMATS = ("split", "folded")
GROUPS = (4, 8, 16)
# KV heads that some model or shard of it has, one set a group: 32/8, 32/4 and 16/1; and the smallest ones.
MODEL_KV_HEADS = {4: 8, 8: 4, 16: 1}
# The sliding layers have rows of 256 columns, always split: every model's group, KV heads that some model has (16/8,
# 8/2 and 8/1), and that model's window.
SLIDING_GROUPS = (2, 4, 8)
SLIDING_KV_HEADS = {2: 8, 4: 2, 8: 1}
WINDOW_LEFT = {2: 1023, 4: 511, 8: 511}
SLIDING_HEAD_DIM = 256
PAGE_SIZE = 64
MERGE_VECTOR = 4  # columns of a partial that the decode's merge reads at once


def geometry(group: int, kv_heads: int, page_format: str) -> Geometry:
    """Three layers a page, of which the middle one is used."""
    return Geometry(q_heads=group * kv_heads, kv_heads=kv_heads, page_format=page_format)


def sliding_geometry(group: int, kv_heads: int | None = None) -> Geometry:
    """Three layers a page, of which the middle one is used; by default with a model's KV heads."""
    kv_heads = SLIDING_KV_HEADS[group] if kv_heads is None else kv_heads
    return Geometry(q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=SLIDING_HEAD_DIM)


def run(library: ModuleType, batch: Batch, *, lse: bool = True, status: bool = True, host_indptr: bool = True) -> Outputs:
    """The prefill's outputs, once the device is done."""
    outputs = make_outputs(batch)
    prefill(library, batch, outputs, lse=lse, status=status, host_indptr=host_indptr)
    torch.cuda.synchronize()
    return outputs


@dataclass(frozen=True)
class Instance:
    """One kernel: an operation's stage for a head_dim, and for a group and a page format, which are 0 and empty where it has
    none."""

    operation: str
    stage: str
    head_dim: int
    group: int
    page_format: str


def instances(operation: str, head_dim: int, group: int, page_format: str) -> list[Instance]:
    """The kernels that a call of an operation launches, in order."""
    return [
        Instance(operation, stage.name, head_dim, *((group, page_format) if stage.per_instance else (0, "")))
        for stage in OPERATIONS[operation].stages
    ]


_twins: dict[Instance, Any] = {}


def compile_twins(wanted: Iterable[Instance]) -> None:
    """Compiles kernels by TileLang's JIT, side by side: lowering lets other threads run, and nvcc is a process."""
    tilelang = importlib.import_module("tilelang")
    missing = [instance for instance in dict.fromkeys(wanted) if instance not in _twins]
    modules = [importlib.import_module(OPERATIONS[instance.operation].module) for instance in missing]
    # TileLang parses in this thread: only what compiles is said to be safe in others.
    functions = [module.build(_request(instance)) for module, instance in zip(modules, missing, strict=True)]

    def compiled(work: tuple[Any, ModuleType]) -> Any:
        function, module = work
        return tilelang.compile(
            function,
            target={"kind": "cuda", "arch": "sm_90a"},
            pass_configs=dict(module.PASS_CONFIGS),
            execution_backend="cython",
        )

    if missing:
        with ThreadPoolExecutor(len(missing)) as pool:
            _twins.update(zip(missing, pool.map(compiled, zip(functions, modules, strict=True)), strict=True))


def _request(instance: Instance) -> KernelRequest:
    parts = ("twin", instance.operation, instance.stage, f"d{instance.head_dim}_g{instance.group}", instance.page_format)
    return KernelRequest(
        name="_".join(part for part in parts if part),
        operation=instance.operation,
        stage=instance.stage,
        head_dim=instance.head_dim,
        page_size=PAGE_SIZE,
        group=instance.group,
        page_format=instance.page_format,
        target="sm_90a",
        tilelang=str(importlib.import_module("tilelang").__version__),
    )


def twins(operation: str, shape: Geometry) -> list[Any]:
    """The JIT-compiled kernels of an operation for a geometry, in launch order."""
    wanted = instances(operation, shape.head_dim, shape.group, shape.page_format)
    compile_twins(wanted)
    return [_twins[instance] for instance in wanted]


def query_tiles(batch: Batch, host_indptr: bool) -> int:
    """Tile slots of a call, as csrc/query_tiles.h counts them: up to the last that a request owns, or as many as any q_indptr
    may need without a host copy."""
    spare = 2 if batch.geometry.sliding else 1
    if not host_indptr:
        return batch.q_rows // TILE + spare * batch.size
    indptr = batch.q_indptr[: batch.size + 1].tolist()
    slots = 0
    for r, (start, end) in enumerate(itertools.pairwise(indptr)):
        if end > start:
            slots = start // TILE + spare * r + (end - start - 1) // TILE + spare
    return slots


def tiled_pool(batch: Batch) -> torch.Tensor:
    """The pool as kernels see it: bf16 [pool_tiles, 64, kv_heads, row_width]."""
    return batch.pool.view(-1, TILE, batch.geometry.kv_heads, batch.geometry.row_width)


def sm_count(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def run_twin(batch: Batch, *, host_indptr: bool = True) -> Outputs:
    """The prefill twin's outputs, for the same inputs and the launch values that csrc/prefill.h or csrc/sliding_prefill.h
    computes; over the whole context with other clusters than the library's: their number changes no bit."""
    shape = batch.geometry
    outputs = make_outputs(batch)
    (kernel,) = twins("sliding_prefill" if shape.sliding else "prefill", shape)
    origin = batch.kv_origin
    if origin is None:  # absent: read by nobody
        origin = torch.full((batch.size,), INT32_MIN, dtype=torch.int32, device=batch.q.device)
    torch.cuda.synchronize()
    kernel(
        batch.q,
        tiled_pool(batch),
        batch.page_ids[: batch.num_page_ids],
        batch.page_indptr[: batch.size + 1],
        batch.last_page_len[: batch.size],
        *([origin[: batch.size]] if shape.sliding else []),
        batch.q_indptr[: batch.size + 1],
        outputs.out,
        outputs.lse,
        outputs.status,
        batch.sm_scale,
        *([batch.window_left] if shape.sliding else []),
        batch.num_pages,
        shape.rows_per_page // TILE,
        shape.layer_row // TILE,
        query_tiles(batch, host_indptr),
        *([sm_count(batch.q.device), int(batch.kv_origin is not None)] if shape.sliding else [3]),  # resident_clusters
        1,  # want_lse
        1,  # want_status
    )
    torch.cuda.synchronize()
    return outputs


@dataclass(frozen=True)
class Decoded:
    """What a decode left: its outputs, and its plan with the workspace behind it."""

    batch: Batch
    plan: Plan
    outputs: Outputs

    @property
    def partials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the slots that the plan uses, fp32: values [slots, group, head_dim], maxima and totals [slots, group, 2]."""
        values, sums = self.plan.partials(self.batch.geometry.group, self.batch.geometry.head_dim)
        return values[: self.plan.slots], sums[: self.plan.slots]

    def same_bits(self, other: Decoded) -> bool:
        """Whether outputs, guard zones and the partials that the plan uses are bit-identical."""
        mine, theirs = self.partials, other.partials
        return self.outputs.same_bits(other.outputs) and all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(mine, theirs, strict=True)
        )


def run_decode(
    library: ModuleType, batch: Batch, limits: Limits, *, lse: bool = True, status: bool = True, early: bool = False
) -> Decoded:
    """The decode's outputs, once the device is done."""
    plan = make_plan(library, batch, limits)
    outputs = make_outputs(batch)
    torch.cuda.synchronize()  # so that `early` is no lie
    decode(library, batch, plan, outputs, lse=lse, status=status, early=early)
    torch.cuda.synchronize()
    return Decoded(batch, plan, outputs)


def run_decode_twin(library: ModuleType, batch: Batch, limits: Limits) -> Decoded:
    """The twins of the decode over a plan and a workspace of their own, with the launch values that csrc/decode.h
    computes."""
    if batch.geometry.sliding:
        return run_sliding_decode_twin(library, batch, limits)
    shape = batch.geometry
    plan = make_plan(library, batch, limits)
    outputs = make_outputs(batch)
    views = plan.device_parts
    partial_out, partial_sums = plan.partials(shape.group, shape.head_dim)
    partial, merge = twins("decode", shape)
    torch.cuda.synchronize()
    partial(
        batch.q,
        tiled_pool(batch),
        batch.page_ids[: batch.num_page_ids],
        views.requests,
        views.items,
        partial_out,
        partial_sums,
        outputs.status,
        batch.sm_scale,
        plan.row_offset,
        batch.num_pages,
        shape.rows_per_page // TILE,
        shape.layer_row // TILE,
        limits.sm_count,  # ctas
        0,  # early
        1,  # want_status
    )
    merge(
        views.header,
        views.requests,
        partial_out.flatten(0, 1).unflatten(1, (-1, MERGE_VECTOR)),
        partial_sums.flatten(0, 1),
        outputs.out,
        outputs.lse,
        shape.kv_heads,
        shape.group,
        len(partial_out),  # max_slots
        plan.row_offset,
        merge_blocks(shape, limits),
        1,  # want_lse
    )
    torch.cuda.synchronize()
    return Decoded(batch, plan, outputs)


def merge_blocks(shape: Geometry, limits: Limits) -> int:
    """As csrc/decode.h has it: 128 columns of a head a CTA, or 32 where a KV head may have more than 40 runs."""
    return shape.head_dim // (32 if limits.sm_count // shape.kv_heads > 40 else 128)


def run_sliding_decode_twin(library: ModuleType, batch: Batch, limits: Limits) -> Decoded:
    """The windowed decode's twin, with other clusters than the library's: their number changes no bit."""
    shape = batch.geometry
    plan = make_plan(library, batch, limits)
    outputs = make_outputs(batch)
    views = plan.device_parts
    (kernel,) = twins("sliding_decode", shape)
    torch.cuda.synchronize()
    kernel(
        batch.q,
        tiled_pool(batch),
        batch.page_ids[: batch.num_page_ids],
        views.header,
        views.requests,
        outputs.out,
        outputs.lse,
        outputs.status,
        batch.sm_scale,
        plan.row_offset,
        batch.num_pages,
        shape.rows_per_page // TILE,
        shape.layer_row // TILE,
        3,  # resident_clusters
        0,  # early
        1,  # want_lse
        1,  # want_status
    )
    torch.cuda.synchronize()
    return Decoded(batch, plan, outputs)


def owned_rows(batch: Batch) -> set[int]:
    """Rows of q that a request owns."""
    return {row for span in batch.spans() for row in range(span.q_from, span.q_to)}


def assert_close(outputs: Outputs, expected: Reference) -> None:
    """Holds the rows of `expected` against it. Raises AssertionError; a NaN anywhere in them is one."""
    out = out_error(outputs.out[expected.rows], expected.out)
    row = row_error(outputs.out[expected.rows], expected.out)
    lse = lse_error(outputs.lse[expected.rows], expected.lse)
    assert out <= OUT_TOLERANCE, f"out is {out:.5f} off the fp32 reference beyond bf16 rounding; allowed {OUT_TOLERANCE}"
    assert row <= ROW_TOLERANCE, f"a row of out is {row:.5f} of its length off the fp32 reference; allowed {ROW_TOLERANCE}"
    assert lse <= LSE_TOLERANCE, f"lse is {lse:.6f} off the fp32 reference; allowed {LSE_TOLERANCE}"
    blind = expected.lse == float("-inf")  # rows that see no key: exact, not merely close
    assert not outputs.out[expected.rows][blind].any(), "a row without a visible key has a non-zero output"


def assert_only_owned_rows(batch: Batch, outputs: Outputs) -> None:
    """Every row that a request owns was written, and no other, guard zones included."""
    owned = owned_rows(batch)
    for name, touched in zip(("out", "lse"), outputs.touched_rows(), strict=True):
        assert touched == owned, (
            f"{name}: written though nobody's {sorted(touched - owned)[:8]}, not written {sorted(owned - touched)[:8]}"
        )


def assert_nan_exactly(outputs: Outputs, clean: Outputs, spoiled: torch.Tensor) -> None:
    """What the queries marked in `spoiled`, bool [q_rows, q_heads], gave is NaN, and the rest is bit-identical to `clean`."""
    assert outputs.out[spoiled].isnan().all(), "a NaN query row has an output that is not NaN"
    assert outputs.lse[spoiled].isnan().all(), "a NaN query row has an lse that is not NaN"
    other = ~spoiled
    assert torch.equal(outputs.out[other].view(torch.int16), clean.out[other].view(torch.int16)), "out of another row moved"
    assert torch.equal(outputs.lse[other].view(torch.int32), clean.lse[other].view(torch.int32)), "lse of another row moved"


def spoil_queries(batch: Batch, rows: Sequence[int]) -> torch.Tensor:
    """Puts NaN in these rows of q: all of the first, one element of one head in the others. Gives what it spoiled, bool
    [q_rows, q_heads]."""
    spoiled = torch.zeros(batch.q.shape[:2], dtype=torch.bool, device=batch.q.device)
    for i, row in enumerate(rows):
        if i == 0:
            batch.q[row] = float("nan")
            spoiled[row] = True
        else:
            head = i % batch.geometry.q_heads
            batch.q[row, head, 37 * i % batch.geometry.head_dim] = float("nan")
            spoiled[row, head] = True
    return spoiled


def mark_values(batch: Batch, request: int, keys: Sequence[int]) -> None:
    """Makes a request's V tell which keys a row sees: zeros, and 1 in column i of key keys[i], a position. An output's column i
    is then non-zero just where that key is seen. Split rows."""
    shape, span = batch.geometry, batch.spans()[request]
    ids = torch.tensor(span.page_ids, dtype=torch.int64, device=batch.q.device)
    first = ids * shape.rows_per_page + shape.layer_row + shape.page_size
    at = (first[:, None] + torch.arange(shape.page_size, device=ids.device)).flatten()[: span.resident(shape.page_size)]
    batch.pool[at] = 0
    marked = at[torch.tensor(keys, dtype=torch.int64, device=at.device) - span.origin]
    batch.pool[marked, :, torch.arange(len(keys), device=at.device)] = 1


def seen_columns(outputs: Outputs, rows: int) -> torch.Tensor:
    """Which columns of the first rows are not zero, bool [rows, head_dim]; all heads must agree."""
    seen = outputs.out[:rows] != 0
    assert torch.equal(seen, seen[:, :1].expand_as(seen)), "the heads of a row see different keys"
    return seen[:, 0]


def assert_refused(
    library: ModuleType, entry: Callable[..., None], fields: dict[str, int | float], outputs: Outputs, code: str, named: str
) -> None:
    """The call fails with this code and a message that names this argument, and writes nothing."""
    with pytest.raises(library.Error) as caught:
        entry(**fields)
    assert caught.value.code == getattr(library, code)
    assert re.search(rf"\b{named}\b", caught.value.message), caught.value.message
    assert library.last_error() == caught.value.message
    torch.cuda.synchronize()
    assert outputs.touched_rows() == (set(), set())
    assert outputs.status_bits() == 0


def assert_partials(decoded: Decoded, expected: Reference) -> None:
    """The fp32 partials, merged here in fp64, against the reference: the kernel's own error, apart from the rounding of out
    to bf16, so no allowance for that. And the plan is as it was, and so is what it does not use of the workspace."""
    plan, shape = decoded.plan, decoded.batch.geometry
    used = plan.slots if not shape.sliding else 0  # one kernel leaves no partials
    values, sums = (part.double() for part in decoded.partials)
    for request, row in enumerate(plan.host_parts.requests[: decoded.batch.size].tolist()):
        for kv_head in range(shape.kv_heads if used else 0):
            first = row[FIRST_SLOT] + kv_head * row[SPLITS]
            some = slice(first, first + row[SPLITS])
            heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
            if not row[SPLITS] or (expected.lse[request, heads] == float("-inf")).any():
                continue
            maxima, totals = sums[some].unbind(2)
            weights = torch.exp2(maxima - maxima.amax(0))
            out = (weights[..., None] * values[some]).sum(0) / (weights * totals).sum(0)[..., None]
            error = float((out - expected.out[request, heads]).abs().max())
            # Written so that NaN fails.
            assert error <= OUT_TOLERANCE, f"request {request}'s partials are {error:.5f} off the fp32 reference"
    assert torch.equal(plan.device, plan.host.to(plan.device.device)), "the plan was written"
    for name, whole in zip(("values", "sums"), plan.partials(shape.group, shape.head_dim), strict=True):
        assert (whole[used:].view(torch.int32) == -1).all(), f"the {name} of an unused slot were written"
    assert (plan.workspace[plan.workspace_bytes // 4 :] == -1).all(), "something behind the workspace was written"


def check(library: ModuleType, batch: Batch, *, status: int = 0, host_indptr: bool = True) -> Outputs:
    """The prefill on `batch`: right, bit-identical to its twin, nothing else written, `status` bits and no others."""
    outputs = run(library, batch, host_indptr=host_indptr)
    assert_only_owned_rows(batch, outputs)
    assert_close(outputs, attention(batch))
    bits = outputs.status_bits()
    assert bits == status, f"status bits {bits:#x}, expected {status:#x}"
    other = run_twin(batch, host_indptr=host_indptr)
    assert outputs.same_bits(other), "the library and its JIT twin differ in bits"
    assert other.status_bits() == status, "the JIT twin reports other status bits"
    return outputs


def check_decode(library: ModuleType, batch: Batch, limits: Limits, *, status: int = 0) -> Decoded:
    """The decode on `batch`: right, bit-identical to its twin, nothing else written, `status` bits and no others."""
    decoded = run_decode(library, batch, limits)
    expected = attention(batch)
    assert_only_owned_rows(batch, decoded.outputs)
    assert_close(decoded.outputs, expected)
    assert_partials(decoded, expected)
    bits = decoded.outputs.status_bits()
    assert bits == status, f"status bits {bits:#x}, expected {status:#x}"
    assert decoded.same_bits(run_decode(library, batch, limits, early=True)), "loading early changes bits"
    other = run_decode_twin(library, batch, limits)
    assert decoded.same_bits(other), "the library and its JIT twin differ in bits"
    assert other.outputs.status_bits() == status, "the JIT twin reports other status bits"
    return decoded


def check_decodes_in_a_row(library: ModuleType, batch: Batch, limits: Limits) -> None:
    """Two decodes, of which the second takes the first one's outputs for queries, and starts while that one runs, strict and
    early: the same bits as with the device idle in between. Several times, since a race need not show at once."""
    first = run_decode(library, batch, limits)
    second = run_decode(library, dataclasses.replace(batch, q=first.outputs.out.clone()), limits)
    plan = make_plan(library, batch, limits)
    for early in (False, True) * 8:
        mine, theirs = make_outputs(batch), make_outputs(batch)
        torch.cuda.synchronize()
        decode(library, batch, plan, mine)
        decode(library, dataclasses.replace(batch, q=mine.out), plan, theirs, early=early)
        torch.cuda.synchronize()
        assert mine.same_bits(first.outputs), "a decode differs from itself"
        assert theirs.same_bits(second.outputs), f"a decode, early {early}, did not wait for the one before it"


def check_newest_token_is_awaited(library: ModuleType, writer: Batch, reader: Batch) -> None:
    """Two decodes of one request each. The first one's output row is the second one's newest row of keys, and that may load
    early."""
    shape, span = reader.geometry, reader.spans()[0]
    keys = reader.pool[span.page_ids[-1] * shape.rows_per_page + shape.layer_row + span.last_page_len - 1]
    assert writer.q_rows == 1 and keys.numel() == writer.q.numel()
    limits = Limits(1)
    plan, unused = make_plan(library, writer, limits), make_outputs(writer)  # alive while their addresses are in use
    fields = decode_fields(writer, plan, unused) | {"out": keys.data_ptr()}
    write = entry(library, "decode", writer)
    check_early_decode_waits(library, reader, limits, keys, lambda: write(**fields))


def check_early_decode_waits(
    library: ModuleType, batch: Batch, limits: Limits, written: torch.Tensor, write: Callable[[], object]
) -> None:
    """A decode that may load early, behind `write`, which launches a kernel that writes `written`, something that the decode
    reads: the same bits as with the device idle in between. Several times, as above."""
    write()
    expected = run_decode(library, batch, limits)
    plan = make_plan(library, batch, limits)
    for _ in range(8):
        outputs = make_outputs(batch)
        written.fill_(float("nan"))
        torch.cuda.synchronize()
        write()
        decode(library, batch, plan, outputs, early=True)
        torch.cuda.synchronize()
        assert outputs.same_bits(expected.outputs), "a decode read too early what the kernel before it writes"
