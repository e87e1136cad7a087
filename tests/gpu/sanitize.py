"""The smallest calls of every kernel, for compute-sanitizer:
`compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py [KERNEL...]`, KERNEL being prefill, decode, sliding_prefill,
sliding_decode, merge_states, prep, gelu_mul or incumbent; `own` stands for all but the last, whose kernels are FlashInfer's.

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

from bench import library as entries
from bench import preps, routes
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
# With a window of 100: one key, a page and a bit, whole pages left behind, and a front released. Then more requests and heads
# than a device holds clusters, so that a cluster has several items and uses its barriers more than once.
SLIDING_DECODES = {"one token": (1,), "ragged": (300, 0, 64, 129), "many": tuple(1 + 37 * i % 200 for i in range(24))}


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
    return said(right, name, f"out {out:.1e} lse {lse:.1e} status {bits}")


def said(right: bool, name: str, found: str) -> bool:
    """Prints a case and returns whether it is right."""
    print(f"{name}: {'right' if right else 'WRONG'}, {found}", flush=True)
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
    """Every instance of the decode's two kernels, with and without a page id outside the pool; a bad one is met early."""
    results = []
    for group, page_format, (name, contexts), bad_page in itertools.product(GROUPS, FORMATS, DECODES.items(), (False, True)):
        shape = Geometry(2 * group, 2, layers=2, page_format=page_format)
        requests = [Request(1, context) for context in contexts]
        batch = build(shape, requests, device=HOST, tail_rows=0, spare_page_ids=0, slack=0)
        if bad_page:
            batch.page_ids[0] = batch.num_pages
        plan = device_plan(library, batch, Limits(len(contexts), max_slots=20, chunk_tokens=128, sm_count=FEW_CTAS))
        outputs = device_outputs(batch)
        decode(library, on_device(batch), plan, outputs, early=bad_page)
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
    """Every instance of the windowed decode, with and without a page id outside the pool; a bad one is met early."""
    results = []
    for group, (name, contexts), bad_page in itertools.product(SLIDING_GROUPS, SLIDING_DECODES.items(), (False, True)):
        shape = Geometry(2 * group, 2, head_dim=256, layers=2)
        requests = [released(1, context, SLIDING_WINDOW_LEFT) for context in contexts]
        batch = build(shape, requests, device=HOST, tail_rows=0, spare_page_ids=0, slack=0, window_left=SLIDING_WINDOW_LEFT)
        if bad_page:
            batch.page_ids[0] = batch.num_pages
        plan = device_plan(library, batch, Limits(len(contexts)))
        outputs = device_outputs(batch)
        decode(library, on_device(batch), plan, outputs, early=bad_page)
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
        entries.merge_states(library, *given, merged, merged_lse)
        torch.cuda.synchronize()
        error = out_error(merged.cpu(), expected)
        off = lse_error(merged_lse.cpu(), torch.logsumexp(lse, 0))
        right = error <= OUT_TOLERANCE and off <= LSE_TOLERANCE
        results.append(said(right, f"merge_states {sources} x {rows} x {heads} x {head_dim}", f"out {error:.1e} lse {off:.1e}"))
    return results


# Requests without rows or keys left out: the incumbent's tests cover those.
INCUMBENT_PREFILLS = {
    "global": (Request(65, 70), Request(3, 129), Request(1, 1)),
    "sliding": (released(70, 333, SLIDING_WINDOW_LEFT), Request(3, 129), Request(1, 1)),
}
INCUMBENT_GROUPS = {"global": (4, 8), "sliding": SLIDING_GROUPS}
INCUMBENT_TOLERANCE = 2 * OUT_TOLERANCE  # it rounds its partials to bf16, too
PREP_SHAPES = {
    "global split": preps.Shape("global", 4, 2),
    "global split, k_eq_v": preps.Shape("global", 4, 2, k_eq_v=True),
    "global folded": preps.Shape("global", 4, 2, page_format="folded", k_eq_v=True),
    "sliding": preps.Shape("sliding", 4, 2),
}
PREP_PROMPTS = {
    "prompt": [preps.Prompt(3), preps.Prompt(70, 60), preps.Prompt(1, 130, 128)],
    "decode": [preps.Prompt(1), preps.Prompt(1, 63), preps.Prompt(1, 130, 128)],
}
PREP_BULK = "many rows"  # so many that a prompt's prep goes through shared memory
EQUAL_BITS = 0.98  # share of the bits that are PyTorch's; the rest rounds the other way


def prep_prompts(case: str, shape: preps.Shape) -> list[preps.Prompt]:
    """The requests of a case."""
    if case != PREP_BULK:
        return PREP_PROMPTS[case]
    return [*PREP_PROMPTS["prompt"], preps.Prompt(shape.many_rows, 41)]


def device_inputs(inputs: preps.Inputs) -> preps.Inputs:
    """The same inputs, each tensor an allocation of its own on the device, with nothing behind the index arrays."""
    requests = len(inputs.prompts)
    lengths = {
        "page_ids": inputs.num_page_ids,
        "page_indptr": requests + 1,
        "kv_origin": requests,
        "q_indptr": requests + 1,
        "positions": requests,
    }
    moved = {}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = value[: lengths.get(field.name, len(value))].to(DEVICE)
    return dataclasses.replace(inputs, **moved)


def equal_bits(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The share of bf16 elements whose bits are equal."""
    return float((found.view(torch.int16) == wanted.contiguous().view(torch.int16)).float().mean())


def sanitize_prep(library: ModuleType) -> list[bool]:
    """Every prep, out of buffers of their own and out of one fused row, with and without a page id outside the pool."""
    results = []
    cases: list[tuple[str, bool, bool]] = [
        *itertools.product(PREP_PROMPTS, (False, True), (False, True)),
        (PREP_BULK, True, True),
    ]
    for (name, shape), (case, fused, bad_page) in itertools.product(PREP_SHAPES.items(), cases):
        form = "decode" if case == "decode" else "prompt"
        inputs = preps.make(shape, prep_prompts(case, shape), device=HOST)
        wanted = preps.expected(inputs)
        pool = preps.expected_pool(inputs, wanted)
        if bad_page:
            pool[int(inputs.page_ids[0])].view(torch.int16).fill_(preps.FILL)
            inputs.page_ids[0] = inputs.pool.shape[0]
        if fused:
            inputs.fuse()
        device = device_inputs(inputs)
        preps.run(library, device, form, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        found, written = device.pool.cpu(), pool.view(torch.int16) != preps.FILL
        q, rows = equal_bits(device.q_out.cpu(), wanted.q), equal_bits(found[written], pool[written])
        bits = int(device.status)
        untouched = torch.equal(found.view(torch.int16) != preps.FILL, written)
        right = untouched and min(q, rows) >= EQUAL_BITS and bits == (library.STATUS_BAD_PAGE_ID if bad_page else 0)
        results.append(
            said(right, f"prep {name} {case}, fused {fused}, bad {bad_page}", f"q {q:.1%} pool {rows:.1%} status {bits}")
        )
    return results


def sanitize_gelu_mul(library: ModuleType) -> list[bool]:
    """Rows that fill no block and rows that fill several; the last one ends where its allocation does."""
    results = []
    for rows, columns in ((1, 8), (3, 1032), (5, 6144)):
        fused = torch.randn(rows, 2 * columns).to(torch.bfloat16)
        out = torch.zeros(rows, columns, dtype=torch.bfloat16).to(DEVICE)
        given = fused.to(DEVICE)
        preps.gelu_mul(library, given, out)
        torch.cuda.synchronize()
        wanted = torch.nn.functional.gelu(fused[:, :columns], approximate="tanh") * fused[:, columns:]
        off = float((out.cpu().float() - wanted.float()).abs().max() / wanted.float().abs().max())
        results.append(said(off <= preps.BF16_ULP, f"gelu_mul {rows} x {columns}", f"off {off:.1e} of the largest"))
    return results


def incumbent_plan(plan: Plan) -> Plan:
    """The plan without anything behind it and its workspace, on the device."""
    words = plan.host[:-GUARD_WORDS]
    return dataclasses.replace(plan, device=words.to(DEVICE), workspace=plan.workspace[: plan.workspace_bytes // 4].to(DEVICE))


def sanitize_incumbent(library: ModuleType) -> list[bool]:
    """The routed entries in the incumbent's mode; nothing in a library that was built without it."""
    mode = library.MODE_INCUMBENT
    results: list[bool] = []
    for layer, groups in INCUMBENT_GROUPS.items():
        head_dim, window_left = (512, None) if layer == "global" else (256, SLIDING_WINDOW_LEFT)
        decodes = tuple(Request(1, n) if window_left is None else released(1, n, window_left) for n in (300, 64, 65))
        for group, operation in itertools.product(groups, ("prefill", "decode")):
            requests = INCUMBENT_PREFILLS[layer] if operation == "prefill" else decodes
            shape = Geometry(2 * group, 2, head_dim=head_dim, layers=2)
            batch = build(shape, requests, device=HOST, tail_rows=0, spare_page_ids=0, slack=0, window_left=window_left)
            outputs, device = device_outputs(batch), on_device(batch)
            try:
                if operation == "prefill":
                    plan = incumbent_plan(routes.prefill_plan(library, batch, mode))
                else:
                    plan = incumbent_plan(routes.decode_plan(library, batch, mode, Limits(len(requests), sm_count=FEW_CTAS)))
            except library.Error as error:
                if error.code != library.UNSUPPORTED:
                    raise
                print(f"incumbent: left out: {error}")
                return results
            if operation == "prefill":
                routes.prefill(library, device, mode, plan, outputs)
            else:
                routes.decode(library, device, mode, plan, outputs)
            torch.cuda.synchronize()
            expected = attention(batch)
            off = out_error(outputs.out.cpu()[expected.rows], expected.out)
            results.append(said(off <= INCUMBENT_TOLERANCE, f"incumbent {layer} {operation} g{group}", f"out {off:.1e}"))
    return results


OWN = {
    "prefill": sanitize_prefill,
    "decode": sanitize_decode,
    "sliding_prefill": sanitize_sliding_prefill,
    "sliding_decode": sanitize_sliding_decode,
    "merge_states": sanitize_merge_states,
    "prep": sanitize_prep,
    "gelu_mul": sanitize_gelu_mul,
}
KERNELS = {**OWN, "incumbent": sanitize_incumbent}


def main(names: list[str]) -> int:
    """Runs every case of the named kernels, or of all."""
    for name in names:
        if name not in {*KERNELS, "own"}:
            print(f"{name!r} is none of {', '.join(KERNELS)}, own", file=sys.stderr)
            return 2
    chosen = [one for name in names or KERNELS for one in (OWN if name == "own" else (name,))]
    library = load()
    results = [right for name in dict.fromkeys(chosen) for right in KERNELS[name](library)]
    print(f"{len(results)} cases, {results.count(False)} wrong")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
