"""A soak: thousands of launches of every kernel over changing plans, without a hang or a changed bit.

Each kernel gets a set of ragged batches of random sizes. They run in a shuffled order, captured in CUDA graphs and replayed one
behind another without a wait between: before each launch its output is filled with a sentinel, after it the output's bits are
compared on the device with those of the batch's first run, rows that no request owns included. A decode's plans are copied over
one another in one place, and its workspace keeps what the last plan left.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import library as generated
from bench import preps
from bench.inputs import Batch, Geometry, Request, build, released, select
from bench.outputs import SENTINEL16, SENTINEL32, Outputs, make_outputs
from bench.plans import Limits, Plan, make_plan
from codegen.table import Family
from codegen.table import load as load_table

DEVICE = torch.device("cuda")
REQUESTS = 24  # to choose a plan's from
MAX_BATCH = 8  # of a plan
ORDERS = 3  # shuffled orders of the plans, a graph each
WAIT_LAUNCHES = 500  # between two looks at whether the device still runs
# By group: heads that keep a launch small and yet have several of a kind, and a window that some model has.
KV_HEADS = {2: 8, 4: 2, 8: 2, 16: 1}
WINDOW = {2: 1024, 4: 512, 8: 512}


class Hang(RuntimeError):
    """The device made no progress for too long."""


@dataclass(frozen=True)
class Launch:
    """One batch's call on the stream that is then current, and the tensors that it may write, contiguous ones."""

    run: Callable[[], None]
    written: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """A kernel under test. launches: of so many plans, by a source of random numbers."""

    name: str
    launches: Callable[[int, random.Random], list[Launch]]


@dataclass(frozen=True)
class Verdict:
    """changed: words that differed from the first run, over all launches."""

    name: str
    launches: int
    seconds: float
    changed: int


def subjects(library: ModuleType) -> Iterator[Subject]:
    """Every kernel that the library has, an instance each."""
    for family in load_table(Path(__file__).resolve().parent.parent / "families.toml").family:
        for instance in family.instances:
            geometry = geometry_of(family, instance.group, instance.page_format)
            make = _decodes if family.operation in ("decode", "sliding_decode") else _prefills
            yield Subject(f"{family.name} g{instance.group} {instance.page_format}", functools.partial(make, library, geometry))
    shapes = {
        "prep_global split": preps.Shape("global", 16, 2, k_eq_v=True),
        "prep_global folded": preps.Shape("global", 16, 2, page_format="folded", k_eq_v=True),
        "prep_sliding": preps.Shape("sliding", 8, 4),
    }
    for name, shape in shapes.items():
        for form in ("prompt", "decode"):
            yield Subject(f"{name} {form}", functools.partial(_preps, library, shape, form))
    yield Subject("gelu_mul", functools.partial(_activations, library))
    yield Subject("merge_states", functools.partial(_merges, library))


def geometry_of(family: Family, group: int, page_format: str) -> Geometry:
    """The middle one of three layers in a page."""
    kv_heads = KV_HEADS[group]
    return Geometry(group * kv_heads, kv_heads, head_dim=family.head_dim, page_format=page_format)


def _window_left(geometry: Geometry) -> int | None:
    return WINDOW[geometry.group] - 1 if geometry.sliding else None


def _requests(geometry: Geometry, source: random.Random, *, max_rows: int, max_context: int) -> list[Request]:
    """Sizes from nothing at all up; a sliding layer's have released their fronts. max_rows 1: one row each."""
    found = []
    for _ in range(REQUESTS):
        rows = 1 if max_rows == 1 else source.randrange(max_rows)
        context = source.randrange(max_context) if max_rows == 1 else rows + source.randrange(max_context)
        left = _window_left(geometry)
        found.append(Request(rows, context) if left is None else released(rows, context, left))
    return found


def _batches(geometry: Geometry, plans: int, source: random.Random, *, max_rows: int, max_context: int) -> list[Batch]:
    """Batches over one pool, with as many rows each: those of no request stay as they are."""
    requests = _requests(geometry, source, max_rows=max_rows, max_context=max_context)
    whole = build(geometry, requests, device=DEVICE, seed=source.randrange(1 << 30), window_left=_window_left(geometry))
    orders = [source.sample(range(REQUESTS), source.randint(1, MAX_BATCH)) for _ in range(plans)]
    rows = max(sum(requests[r].rows for r in order) for order in orders) + 7
    return [select(whole, order, q_rows=rows) for order in orders]


def _prefills(library: ModuleType, geometry: Geometry, plans: int, source: random.Random) -> list[Launch]:
    batches = _batches(geometry, plans, source, max_rows=130, max_context=1200)
    outputs = make_outputs(batches[0], guard=0)

    def call(batch: Batch, host: torch.Tensor) -> None:
        fields = generated.prefill_fields(batch, outputs, status=False, q_indptr_host=host)
        generated.entry(library, "prefill", batch)(**fields)

    return [Launch(functools.partial(call, batch, batch.q_indptr.cpu()), _written(outputs)) for batch in batches]


def _decodes(library: ModuleType, geometry: Geometry, plans: int, source: random.Random) -> list[Launch]:
    batches = _batches(geometry, plans, source, max_rows=1, max_context=3000)
    outputs = make_outputs(batches[0], guard=0)
    limits = Limits(MAX_BATCH, sm_count=torch.cuda.get_device_properties(0).multi_processor_count)
    made = [make_plan(library, batch, limits) for batch in batches]
    place, workspace = torch.empty_like(made[0].device), made[0].workspace

    def call(batch: Batch, plan: Plan, shared: Plan) -> None:
        place.copy_(plan.device)
        generated.decode(library, batch, shared, outputs, status=False)

    shared = [dataclasses.replace(plan, device=place, workspace=workspace) for plan in made]
    return [Launch(functools.partial(call, *parts), _written(outputs)) for parts in zip(batches, made, shared, strict=True)]


def _written(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return outputs.out_buffer, outputs.lse_buffer


def _preps(library: ModuleType, shape: preps.Shape, form: str, plans: int, source: random.Random) -> list[Launch]:
    found = []
    for _ in range(plans):
        count = source.randint(1, 40 if form == "decode" else MAX_BATCH)
        prompts = [_prompt(source, 1 if form == "decode" else source.randint(1, 60)) for _ in range(count)]
        inputs = preps.make(shape, prompts, device=DEVICE, seed=source.randrange(1 << 30))
        inputs.fuse()
        found.append(Launch(functools.partial(_prep, library, inputs, form), (inputs.q_out, inputs.pool)))
    return found


def _prompt(source: random.Random, rows: int) -> preps.Prompt:
    position = source.randrange(500)
    return preps.Prompt(rows, position, position // preps.PAGE * preps.PAGE)


def _prep(library: ModuleType, inputs: preps.Inputs, form: str) -> None:
    preps.run(library, inputs, form, torch.cuda.current_stream().cuda_stream)


def _activations(library: ModuleType, plans: int, source: random.Random) -> list[Launch]:
    found = []
    for _ in range(plans):
        rows, columns = source.randint(1, 300), 8 * source.randint(1, 400)
        fused = torch.randn(rows, 2 * columns, device=DEVICE).to(torch.bfloat16)
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
        found.append(Launch(functools.partial(preps.gelu_mul, library, fused, out), (out,)))
    return found


def _merges(library: ModuleType, plans: int, source: random.Random) -> list[Launch]:
    found = []
    for _ in range(plans):
        sources, rows, heads, head_dim = source.randint(1, 9), source.randint(1, 60), source.randint(1, 32), 512
        partials = torch.randn(sources, rows, heads, head_dim, device=DEVICE).to(torch.bfloat16)
        partial_lse = torch.randn(sources, rows, heads, device=DEVICE)
        out = torch.empty(rows, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        lse = torch.empty(rows, heads, device=DEVICE)
        found.append(Launch(functools.partial(generated.merge_states, library, partials, partial_lse, out, lse), (out, lse)))
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _fill(tensor: torch.Tensor) -> None:
    _bits(tensor).fill_({2: SENTINEL16, 4: SENTINEL32}[tensor.element_size()])


def soak(subject: Subject, launches: int, plans: int, patience: float, source: random.Random) -> Verdict:
    """At least `launches` launches of a kernel. Raises Hang."""
    work = subject.launches(plans, source)
    start = time.monotonic()
    first = []
    for launch in work:
        for tensor in launch.written:
            _fill(tensor)
        launch.run()
        first.append([tensor.clone() for tensor in launch.written])
    _wait(subject.name, patience)
    if all(bool((_bits(kept[0]) == SENTINEL16).all()) for kept in first):
        raise ArithmeticError(f"{subject.name}: nothing was written")
    changed = torch.zeros((), dtype=torch.int64, device=DEVICE)
    graphs = [_captured(work, first, changed, source) for _ in range(ORDERS)]
    replays = -(-launches // len(work))
    between = max(1, WAIT_LAUNCHES // len(work))
    for replay in range(replays):
        graphs[replay % ORDERS].replay()
        if replay % between == 0:
            _wait(subject.name, patience)
    _wait(subject.name, patience)
    return Verdict(subject.name, replays * len(work), time.monotonic() - start, int(changed))


def _captured(
    work: Sequence[Launch], first: Sequence[Sequence[torch.Tensor]], changed: torch.Tensor, source: random.Random
) -> torch.cuda.CUDAGraph:
    """All of `work` once, in a shuffled order; differing words are added to `changed`."""
    order = source.sample(range(len(work)), len(work))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in order:
            for tensor in work[index].written:
                _fill(tensor)
            work[index].run()
            for tensor, kept in zip(work[index].written, first[index], strict=True):
                changed += (_bits(tensor) != _bits(kept)).sum()
    return graph


def _wait(name: str, patience: float) -> None:
    """Until the stream has run what it was given. Raises Hang; a wait for the device itself would never return."""
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + patience
    while not event.query():
        if time.monotonic() > deadline:
            raise Hang(f"{name}: no progress for {patience:g} s")
        time.sleep(0.0005)


def main(library: ModuleType, launches: int, plans: int, patience: float, only: str, seed: int, console: Console) -> int:
    """Soaks the kernels whose name has `only` in it, prints what came of it, and returns the exit status: 1 where a bit changed
    or a call failed; 2 where no kernel has that name. A hang ends the process with 3."""
    chosen = [subject for subject in subjects(library) if only in subject.name]
    if not chosen:
        console.print(f"no kernel has {only!r} in its name")
        return 2
    verdicts = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("soak", total=len(chosen))
        for subject in chosen:
            progress.update(task, description=subject.name)
            # Of its own: a kernel's plans do not depend on which others run.
            source = random.Random(f"{seed} {subject.name}")
            try:
                verdicts.append(soak(subject, launches, plans, patience, source))
            except Hang as hang:
                progress.stop()
                console.print(f"HANG: {hang}", markup=False)
                console.file.flush()
                os._exit(3)  # an ordinary exit waits for the device
            except (ArithmeticError, RuntimeError) as error:
                progress.stop()
                console.print(f"FAILED: {subject.name}: {error}", markup=False)
                return 1
            torch.cuda.empty_cache()
            progress.update(task, advance=1)
    table = Table(title=f"soak, {plans} plans a kernel, seed {seed}")
    for column in ("kernel", "launches", "s", "changed words"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for verdict in verdicts:
        table.add_row(verdict.name, f"{verdict.launches:,}", f"{verdict.seconds:.1f}", f"{verdict.changed:,}")
    console.print(table)
    bad = [verdict.name for verdict in verdicts if verdict.changed]
    console.print(f"{sum(verdict.launches for verdict in verdicts):,} launches; changed bits: {', '.join(bad) or 'none'}")
    return 1 if bad else 0
