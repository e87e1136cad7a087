"""The smallest calls of every kernel, for compute-sanitizer:
`compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py [KERNEL...]`, KERNEL being prefill, decode, sliding_prefill,
sliding_decode or merge_states.

Exits with 1 where a result is wrong. No TileLang, no guard zones, no slack behind the index arrays, and every tensor
an allocation of its own, so that an access past an end is one that the tool sees. Inputs and the reference are computed on
the host: on the device the tool has the library's kernels to watch and little else.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.inputs import Batch, Geometry, Request, build, released
from bench.library import decode, load, prefill
from bench.outputs import Outputs, make_outputs
from bench.plans import GUARD_WORDS, Limits, Plan, make_plan
from bench.reference import LSE_TOLERANCE, OUT_TOLERANCE, attention, lse_error, out_error

HOST, DEVICE = torch.device("cpu"), torch.device("cuda")
GROUPS = (4, 8, 16)
FORMATS = ("split", "folded")
PREFILLS = {
    "one row": (Request(1, 1),),
    "ragged": (Request(65, 70), Request(0, 0), Request(3, 129), Request(10, 4)),
}
# Under three CTAs: some have several items, so that stages and their barriers are used more than once.
DECODES = {"one token": (1,), "ragged": (300, 0, 64, 65)}
FEW_CTAS = 3
SLIDING_GROUPS = (2, 4, 8)
SLIDING_WINDOW_LEFT = 99
SLIDING_PREFILLS = {
    "one row": (Request(1, 1),),
    # A front released, rows that see nothing, a tile that begins and ends amid 64 positions.
    "ragged": (released(70, 333, SLIDING_WINDOW_LEFT), Request(0, 0), Request(3, 129), Request(10, 4)),
}
# Of as many pairs of heads: three or more items a CTA, so that stages, Q's buffers and facts are used more than once.
MANY = "several items a CTA"
MANY_ROWS, MANY_PAIRS = (Request(130, 200), Request(3, 129)), 96
# With a window of 100: one key, a page and a bit, whole pages left behind, and a front released.
SLIDING_DECODES = {"one token": (1,), "ragged": (300, 0, 64, 129)}


def on_device(batch: Batch) -> Batch:
    """The same inputs, each tensor an allocation of its own on the device."""
    tensors = {
        field.name: getattr(batch, field.name).to(DEVICE)
        for field in dataclasses.fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def device_outputs(batch: Batch) -> Outputs:
    """Sentinel-filled outputs of exactly the call's size."""
    made = make_outputs(batch, guard=0)
    return Outputs(made.out_buffer.to(DEVICE), made.lse_buffer.to(DEVICE), made.status_buffer.to(DEVICE), guard=0)


def device_plan(library: ModuleType, batch: Batch, limits: Limits) -> Plan:
    """A plan and a workspace without anything behind them."""
    plan = make_plan(library, batch, limits)
    return dataclasses.replace(
        plan,
        device=plan.host[:-GUARD_WORDS].to(DEVICE),
        workspace=plan.workspace[: plan.workspace_bytes // 4].to(DEVICE),
    )


def verdict(library: ModuleType, name: str, batch: Batch, outputs: Outputs, bad_page: bool) -> bool:
    """Prints and returns whether `outputs`, on the device, is right for `batch`, on the host."""
    torch.cuda.synchronize()
    found = Outputs(outputs.out_buffer.cpu(), outputs.lse_buffer.cpu(), outputs.status_buffer.cpu(), guard=0)
    expected = attention(batch)
    out = out_error(found.out[expected.rows], expected.out)
    lse = lse_error(found.lse[expected.rows], expected.lse)
    bits = found.status_bits()
    right = out <= OUT_TOLERANCE and lse <= LSE_TOLERANCE and bits == (library.STATUS_BAD_PAGE_ID if bad_page else 0)
    print(f"{name}: {'right' if right else 'WRONG'}, out {out:.1e} lse {lse:.1e} status {bits}", flush=True)
    return right


def sanitize_prefill(library: ModuleType) -> list[bool]:
    """Every instance of the prefill, with and without a page id outside the pool."""
    results = []
    for group, page_format, (name, requests), bad_page in itertools.product(GROUPS, FORMATS, PREFILLS.items(), (False, True)):
        shape = Geometry(group, 1, page_format=page_format)
        batch = build(shape, requests, device=HOST, tail_rows=0, spare_page_ids=0, slack=0)
        if bad_page:
            batch.page_ids[0] = batch.num_pages
        outputs = device_outputs(batch)
        prefill(library, on_device(batch), outputs, host_indptr=not bad_page)
        results.append(verdict(library, f"prefill g{group} {page_format}, {name}, bad {bad_page}", batch, outputs, bad_page))
    return results


def sanitize_decode(library: ModuleType) -> list[bool]:
    """Every instance of the decode's two kernels, with and without a page id outside the pool."""
    results = []
    for group, page_format, (name, contexts), bad_page in itertools.product(GROUPS, FORMATS, DECODES.items(), (False, True)):
        shape = Geometry(2 * group, 2, layers=2, page_format=page_format)
        requests = [Request(1, context) for context in contexts]
        batch = build(shape, requests, device=HOST, tail_rows=0, spare_page_ids=0, slack=0)
        if bad_page:
            batch.page_ids[0] = batch.num_pages
        plan = device_plan(library, batch, Limits(len(contexts), max_slots=20, chunk_tokens=128, sm_count=FEW_CTAS))
        outputs = device_outputs(batch)
        decode(library, on_device(batch), plan, outputs)
        results.append(verdict(library, f"decode g{group} {page_format}, {name}, bad {bad_page}", batch, outputs, bad_page))
    return results


def sanitize_sliding_prefill(library: ModuleType) -> list[bool]:
    """Every instance of the windowed prefill, with and without a page id outside the pool."""
    results = []
    prefills = SLIDING_PREFILLS | {MANY: MANY_ROWS}
    for group, (name, requests), bad_page in itertools.product(SLIDING_GROUPS, prefills.items(), (False, True)):
        kv_heads = MANY_PAIRS * 2 // group if name == MANY else 1
        shape = Geometry(group * kv_heads, kv_heads, head_dim=256)
        batch = build(shape, requests, device=HOST, tail_rows=0, spare_page_ids=0, slack=0, window_left=SLIDING_WINDOW_LEFT)
        if bad_page:
            batch.page_ids[0] = batch.num_pages
        outputs = device_outputs(batch)
        prefill(library, on_device(batch), outputs, host_indptr=not bad_page)
        results.append(verdict(library, f"sliding_prefill g{group}, {name}, bad {bad_page}", batch, outputs, bad_page))
    return results


def sanitize_sliding_decode(library: ModuleType) -> list[bool]:
    """Every instance of the decode's two kernels over a window, with and without a page id outside the pool."""
    results = []
    for group, (name, contexts), bad_page in itertools.product(SLIDING_GROUPS, SLIDING_DECODES.items(), (False, True)):
        shape = Geometry(2 * group, 2, head_dim=256, layers=2)
        requests = [released(1, context, SLIDING_WINDOW_LEFT) for context in contexts]
        batch = build(shape, requests, device=HOST, tail_rows=0, spare_page_ids=0, slack=0, window_left=SLIDING_WINDOW_LEFT)
        if bad_page:
            batch.page_ids[0] = batch.num_pages
        plan = device_plan(library, batch, Limits(len(contexts), max_slots=20, chunk_tokens=128, sm_count=FEW_CTAS))
        outputs = device_outputs(batch)
        decode(library, on_device(batch), plan, outputs)
        results.append(verdict(library, f"sliding_decode g{group}, {name}, bad {bad_page}", batch, outputs, bad_page))
    return results


def sanitize_merge_states(library: ModuleType) -> list[bool]:
    """Sources that fill no block, one of them blind and NaN; the last source ends where its allocation does."""
    results = []
    for sources, rows, heads, head_dim in ((1, 1, 1, 8), (3, 5, 3, 264), (2, 4, 8, 512)):
        out = torch.rand(sources, rows, heads, head_dim).to(torch.bfloat16)
        lse = torch.randn(sources, rows, heads)
        if sources > 1:
            lse[0, 0] = float("-inf")
            out[0, 0] = float("nan")
        weights = torch.softmax(lse, 0)[..., None]
        expected = (weights * out.float().masked_fill(weights == 0, 0)).sum(0)
        given = out.to(DEVICE), lse.to(DEVICE)
        merged = torch.zeros(rows, heads, head_dim, dtype=torch.bfloat16).to(DEVICE)
        merged_lse = torch.zeros(rows, heads).to(DEVICE)
        library.merge_states(
            partials=given[0].data_ptr(),
            partial_lse=given[1].data_ptr(),
            out=merged.data_ptr(),
            lse=merged_lse.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
            source_stride=rows * heads * head_dim,
            lse_stride=rows * heads,
            num_sources=sources,
            num_rows=rows,
            num_heads=heads,
            head_dim=head_dim,
        )
        torch.cuda.synchronize()
        error = out_error(merged.cpu(), expected)
        off = lse_error(merged_lse.cpu(), torch.logsumexp(lse, 0))
        right = error <= OUT_TOLERANCE and off <= LSE_TOLERANCE
        print(f"merge_states {sources} x {rows} x {heads} x {head_dim}: {'right' if right else 'WRONG'}", flush=True)
        results.append(right)
    return results


KERNELS = {
    "prefill": sanitize_prefill,
    "decode": sanitize_decode,
    "sliding_prefill": sanitize_sliding_prefill,
    "sliding_decode": sanitize_sliding_decode,
    "merge_states": sanitize_merge_states,
}


def main(names: list[str]) -> int:
    """Runs every case of the named kernels, or of all."""
    for name in names:
        if name not in KERNELS:
            print(f"{name!r} is none of {', '.join(KERNELS)}", file=sys.stderr)
            return 2
    library = load()
    results = [right for name in names or KERNELS for right in KERNELS[name](library)]
    print(f"{len(results)} cases, {results.count(False)} wrong")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
