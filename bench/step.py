"""`python -m bench.step`: a server's decode and chunked-prefill steps at a model's full size, under each mode of the knob.

Random weights, allocated whole, so that a step moves the bytes that the model's does. q, k and v, and gate and up, are stacked
in one weight each: one product a stack under the generated modes, and a product for each row range of the same stack under the
incumbent. The preps and the activation are the library's in every mode; attention is the mode's.

- TPOT: one request's decode step, a captured CUDA graph replayed. The plan of the step is made before, on the host.
- chunk: the last 8,192 tokens of a prompt of L, on a pool that holds the tokens before.
- TTFT: a whole prompt in such chunks, from the first launch to the first token, what the host does in between included.
  It is measured at the lengths of --ttft and left open elsewhere, not extrapolated.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table as Grid

from bench import report
from bench.library import load
from examples.hf.kernels import Attention, Band, Norms, Preps, Rope, attention_for, gelu_mul
from examples.hf.models import NORM_SPREAD, QUERY_SIZE, SHAPES
from examples.hf.modes import Mode
from examples.hf.pool import PAGE, Heads, Pool, Step, Table

LENGTHS = (10_602, 40_002, 81_653, 163_336)
TTFT = (10_602, 40_002)
CHUNK = 8192
VOCABULARY = 262_144
SOFTCAP = 30.0
EPS = 1e-6
SECTIONS = ("global attention", "sliding attention", "preps", "activation")


@dataclass(frozen=True)
class Size:
    """A model's widths. layers: its whole stack, five sliding ones to a global one."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: dict[str, Heads]
    vocabulary: int = VOCABULARY

    def kind(self, layer: int) -> str:
        """The layer's."""
        return "global" if layer % 6 == 5 else "sliding"


def size_31b(mode: Mode, *, layers: int = 60, vocabulary: int = VOCABULARY) -> Size:
    """Gemma 4 31B."""
    shape = SHAPES["31B"]
    whole = layers // 6
    heads = {
        "global": Heads("global", shape.q_heads, shape.global_kv, 512, whole, page_format=mode.page_format),
        "sliding": Heads("sliding", shape.q_heads, shape.sliding_kv, 256, layers - whole, window=shape.window),
    }
    return Size("31B", shape.hidden, shape.intermediate, layers, heads, vocabulary)


@dataclass(frozen=True)
class Layer:
    """bf16 weights. qkv: [q, k and, where V is no projection of K's, v rows, hidden]. gate_up: [2 * intermediate, hidden].
    norms: of the stream, [4, hidden]: before and after attention, before and after the MLP."""

    kind: str
    index: int
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """Of a whole model. embedding, bf16 [vocabulary, hidden], is the output matrix, too."""

    layers: list[Layer]
    embedding: torch.Tensor
    norm: torch.Tensor
    ropes: dict[str, Rope]

    @property
    def bytes(self) -> int:
        """Of the layers and the embedding."""
        parts = [self.embedding] + [part for layer in self.layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(2 * part.numel() for part in parts)


def make_weights(size: Size, device: torch.device, positions: int) -> Weights:
    """Random weights, each layer its own."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0, 0.02)

    def norm(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * (1 + NORM_SPREAD * torch.randn(shape, device=device))).to(torch.bfloat16)

    layers = []
    counts = dict.fromkeys(size.heads, 0)
    for layer in range(size.layers):
        kind = size.kind(layer)
        heads = size.heads[kind]
        projections = heads.q_heads + heads.kv_heads * (1 if kind == "global" else 2)
        layers.append(
            Layer(
                kind=kind,
                index=counts[kind],
                qkv=matrix(projections * heads.head_dim, size.hidden),
                o=matrix(size.hidden, heads.q_heads * heads.head_dim),
                gate_up=matrix(2 * size.intermediate, size.hidden),
                down=matrix(size.hidden, size.intermediate),
                norms=norm(4, size.hidden),
                q_norm=norm(heads.head_dim, scale=QUERY_SIZE),
                k_norm=norm(heads.head_dim),
            )
        )
        counts[kind] += 1
    pairs = torch.arange(128, device=device, dtype=torch.float32)
    frequencies = {"global": 1e6 ** (-pairs[:64] / 256), "sliding": 1e4 ** (-pairs / 128)}
    ropes = {kind: Rope.of(frequency, positions) for kind, frequency in frequencies.items()}
    return Weights(layers, matrix(size.vocabulary, size.hidden), norm(size.hidden), ropes)


class Sections:
    """Time by section of a step that is launched, not replayed: events around each."""

    def __init__(self) -> None:
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Times what is launched inside."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._events.append((name, start, end))

    def seconds(self) -> dict[str, float]:
        """By name, once the device is done."""
        found = dict.fromkeys(SECTIONS, 0.0)
        for name, start, end in self._events:
            found[name] += start.elapsed_time(end) / 1e3
        return found


class Untimed(Sections):
    """For a graph's capture: no events."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        yield


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


class Model:
    """A stack under one mode."""

    def __init__(
        self, size: Size, weights: Weights, mode: Mode, library: ModuleType, attention: Attention, preps: Preps
    ) -> None:
        self.size = size
        self.weights = weights
        self.mode = mode
        self.library = library
        self.attention = attention
        self.preps = preps

    def bands(self, x: torch.Tensor, stack: torch.Tensor, lengths: Sequence[int]) -> list[Band]:
        """x times the stack's row ranges: of one product, or each of its own under the incumbent."""
        bands = []
        fused = None if self.mode is Mode.INCUMBENT else F.linear(x, stack)
        offset = 0
        for length in lengths:
            if fused is not None:
                bands.append(Band(fused, offset, length))
            else:
                bands.append(Band(F.linear(x, stack[offset : offset + length]), 0, length))
            offset += length
        return bands

    def queries(self, layer: Layer, x: torch.Tensor, step: Step, sections: Sections) -> torch.Tensor:
        """The prepared queries of the layer; its K and V are then in the pool."""
        heads = step.heads
        q_columns, kv_columns = heads.q_heads * heads.head_dim, heads.kv_heads * heads.head_dim
        lengths = [q_columns, kv_columns] if layer.kind == "global" else [q_columns, kv_columns, kv_columns]
        q, k, *v = self.bands(x, layer.qkv, lengths)
        with sections.section("preps"):
            return self.preps.prepare(
                step,
                layer.index,
                q,
                k,
                v[0] if v else None,
                Norms(layer.q_norm, layer.k_norm, EPS),
                self.weights.ropes[layer.kind],
                k_eq_v=not v,
            )

    def activation(self, layer: Layer, x: torch.Tensor, sections: Sections) -> torch.Tensor:
        """gelu(gate) * up of the layer."""
        gate, up = self.bands(x, layer.gate_up, [self.size.intermediate] * 2)
        with sections.section("activation"):
            return gelu_mul(self.library, gate, up)

    def forward(self, x: torch.Tensor, steps: dict[str, Step], sections: Sections) -> torch.Tensor:
        """x: bf16 [rows, hidden]. Gives the last row's logits, bf16 [vocabulary]."""
        for layer in self.weights.layers:
            step = steps[layer.kind]
            q = self.queries(layer, _norm(x, layer.norms[0]), step, sections)
            with sections.section(f"{layer.kind} attention"):
                out = self.attention.attend(step, layer.index, q, 1.0)
            x = x + _norm(F.linear(out.view(x.shape[0], -1), layer.o), layer.norms[1])
            active = self.activation(layer, _norm(x, layer.norms[2]), sections)
            x = x + _norm(F.linear(active, layer.down), layer.norms[3])
        logits = F.linear(_norm(x[-1:], self.weights.norm), self.weights.embedding)[0]
        return torch.tanh(logits / SOFTCAP) * SOFTCAP

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the stream, bf16 [tokens, hidden]."""
        return self.weights.embedding[tokens] * self.size.hidden**0.5


class Pools:
    """A pool of each kind with random rows, and the pages of one request in them. The sliding pool holds a window, a chunk and
    what of their pages lies outside."""

    def __init__(self, size: Size, tokens: int, device: torch.device) -> None:
        most = {"global": tokens, "sliding": size.heads["sliding"].window + CHUNK}
        self.pools = {kind: Pool(heads, -(-most[kind] // PAGE) + 2, device) for kind, heads in size.heads.items()}
        self.pages = {kind: pool.take(pool.num_pages, "the request") for kind, pool in self.pools.items()}
        for pool in self.pools.values():
            pool.rows.normal_()

    @property
    def bytes(self) -> int:
        """Of both pools."""
        return sum(pool.num_pages * pool.heads.page_bytes for pool in self.pools.values())

    def steps(self, context: int, rows: int) -> dict[str, Step]:
        """The last `rows` tokens of a context, which the pool is taken to hold."""
        steps = {}
        for kind, pool in self.pools.items():
            window = pool.heads.window
            origin = max(context - rows - window + 1, 0) // PAGE * PAGE if window else 0
            count = -(-(context - origin) // PAGE)
            # A page's place in the list is its place in the context, so that a chunk finds what the one before wrote.
            first = origin // PAGE
            pages = self.pages[kind]
            table = Table([pages[(first + page) % len(pages)] for page in range(count)], origin)
            steps[kind] = Step(pool, [table], [context], rows)
        return steps


def decode_seconds(model: Model, x: torch.Tensor, steps: dict[str, Step], repeats: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each replay of the step's graph; and by section, of a graph of that section's calls alone."""
    untimed = Untimed()
    whole = _replays(lambda: model.forward(x, steps, untimed), repeats)
    layers = model.weights.layers
    columns = {kind: (heads.q_heads, heads.head_dim) for kind, heads in model.size.heads.items()}
    q = {kind: torch.randn(1, *shape, device=x.device).to(x.dtype) * QUERY_SIZE for kind, shape in columns.items()}
    parts = {}
    for kind in model.size.heads:
        some = [layer for layer in layers if layer.kind == kind]

        def attend(some: list[Layer] = some, kind: str = kind) -> None:
            for layer in some:
                model.attention.attend(steps[kind], layer.index, q[kind], 1.0)

        parts[f"{kind} attention"] = statistics.median(_replays(attend, repeats))
    fused = {layer.kind: _projected(model, layer, x) for layer in layers}

    def prepare() -> None:
        for layer in layers:
            model.preps.prepare(
                steps[layer.kind],
                layer.index,
                *fused[layer.kind],
                Norms(layer.q_norm, layer.k_norm, EPS),
                model.weights.ropes[layer.kind],
                k_eq_v=layer.kind == "global",
            )

    parts["preps"] = statistics.median(_replays(prepare, repeats))
    gate, up = model.bands(x, layers[0].gate_up, [model.size.intermediate] * 2)
    parts["activation"] = statistics.median(_replays(lambda: [gelu_mul(model.library, gate, up) for _ in layers], repeats))
    return whole, parts


def _projected(model: Model, layer: Layer, x: torch.Tensor) -> tuple[Band, Band, Band | None]:
    heads = model.size.heads[layer.kind]
    q_columns, kv_columns = heads.q_heads * heads.head_dim, heads.kv_heads * heads.head_dim
    lengths = [q_columns, kv_columns] if layer.kind == "global" else [q_columns, kv_columns, kv_columns]
    q, k, *v = model.bands(x, layer.qkv, lengths)
    return q, k, v[0] if v else None


def _replays(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each replay of a CUDA graph of `work`."""
    work()  # what is prepared or loaded lazily may not be while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    for _ in range(2):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del kept
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def chunk_seconds(model: Model, x: torch.Tensor, steps: dict[str, Step]) -> tuple[float, dict[str, float]]:
    """Seconds of one chunk, and by section."""
    sections = Sections()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    model.forward(x, steps, sections)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, sections.seconds()


def first_token(model: Model, pools: Pools, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Seconds of a whole prompt in chunks, the choice of its first token included; and that token's logits, on the host."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    untimed = Untimed()
    done = 0
    for part in tokens.split(CHUNK):
        done += part.numel()
        logits = model.forward(model.embed(part), pools.steps(done, part.numel()), untimed)
    int(logits.argmax())
    return time.perf_counter() - start, logits.float().cpu()


@dataclass
class Row:
    """One mode at one length. Seconds."""

    mode: str
    context: int
    tpot: float
    tpot_low: float
    tpot_high: float
    tpot_sections: dict[str, float]
    chunk_rows: int
    chunk: float
    chunk_sections: dict[str, float]
    ttft: float | None


@dataclass
class ModeResult:
    """What one mode took. Bytes."""

    mode: str
    pool_bytes: int
    peak_bytes: int
    rows: list[Row] = field(default_factory=list)
    first_logits: dict[int, torch.Tensor] = field(default_factory=dict)


def measure(
    size: Size, weights: Weights, mode: Mode, library: ModuleType, options: argparse.Namespace, device: torch.device
) -> ModeResult:
    """One mode at every length."""
    longest = max(options.lengths)
    torch.cuda.reset_peak_memory_stats()
    pools = Pools(size, longest, device)
    model = Model(size, weights, mode, library, attention_for(mode, library, device), Preps(library, device))
    tokens = torch.randint(size.vocabulary, (longest,), generator=torch.Generator().manual_seed(0)).to(device)
    result = ModeResult(mode.label, pools.bytes, 0)
    ttft = {}
    for context in sorted(options.ttft):
        ttft[context], result.first_logits[context] = first_token(model, pools, tokens[:context])
    for context in options.lengths:
        x = model.embed(tokens[context - 1 : context])
        whole, parts = decode_seconds(model, x, pools.steps(context, 1), options.repeats)
        rows = min(CHUNK, context)
        x = model.embed(tokens[context - rows : context])
        chunk, chunk_parts = chunk_seconds(model, x, pools.steps(context, rows))
        model.attention.check()
        model.preps.check()
        row = Row(
            mode=mode.label,
            context=context,
            tpot=statistics.median(whole),
            tpot_low=min(whole),
            tpot_high=max(whole),
            tpot_sections=parts,
            chunk_rows=rows,
            chunk=chunk,
            chunk_sections=chunk_parts,
            ttft=ttft.get(context),
        )
        result.rows.append(row)
        print(f"{mode.label} {context:,}: TPOT {row.tpot * 1e3:.2f} ms, chunk {chunk:.3f} s", file=sys.stderr, flush=True)
    result.peak_bytes = torch.cuda.max_memory_allocated()
    return result


def same_row_ranges(weights: Weights) -> bool:
    """Whether a row range of a stack gives the bits that the same rows give as a weight of their own, for both kinds of layers
    and one and many rows: the incumbent's projections must not notice that their weights are stacked."""
    kinds = {layer.kind: layer for layer in weights.layers}
    for layer in kinds.values():
        for stack in (layer.qkv, layer.gate_up):
            cut = stack.shape[0] // 2
            for rows in (1, 512):
                x = torch.randn(rows, stack.shape[1], device=stack.device).to(stack.dtype)
                for some in (slice(0, cut), slice(cut, None)):
                    if not torch.equal(F.linear(x, stack[some]), F.linear(x, stack[some].clone())):
                        return False
    return True


def agreement(results: Sequence[ModeResult]) -> list[dict[str, Any]]:
    """How near the modes' first logits are to the first mode's: cosine, largest gap, and whether the best token is the same."""
    found = []
    for context, expected in results[0].first_logits.items():
        for result in results[1:]:
            logits = result.first_logits[context]
            found.append(
                {
                    "context": context,
                    "mode": result.mode,
                    "against": results[0].mode,
                    "cosine": float(F.cosine_similarity(logits, expected, 0)),
                    "gap": float((logits - expected).abs().max()),
                    "same_best": bool(logits.argmax() == expected.argmax()),
                }
            )
    return found


def record(host: dict[str, str], size: Size, weights: Weights, results: Sequence[ModeResult], same: bool) -> dict[str, Any]:
    """The JSON document. Seconds and bytes."""
    return {
        "bench": "step",
        **host,
        "model": size.name,
        "layers": size.layers,
        "weight_bytes": weights.bytes,
        "chunk": CHUNK,
        "row_ranges_keep_their_bits": same,
        "agreement": agreement(results),
        "modes": [
            {
                "mode": result.mode,
                "pool_bytes": result.pool_bytes,
                "peak_bytes": result.peak_bytes,
                "rows": [vars(row) for row in result.rows],
            }
            for result in results
        ],
    }


def show(document: dict[str, Any], console: Console) -> None:
    """The tables."""
    console.print(f"{document['model']}, {document['layers']} layers, {document['weight_bytes'] / 1e9:.1f} GB of weights")
    for name, total, parts in (
        ("decode step, one request: TPOT, ms", "tpot", "tpot_sections"),
        (f"prefill chunk, the last {document['chunk']:,} tokens, ms", "chunk", "chunk_sections"),
    ):
        grid = Grid(title=name)
        for column in ("mode", "L", "step", *SECTIONS, "the rest", "attention's share"):
            grid.add_column(column, justify="right")
        for mode in document["modes"]:
            for row in mode["rows"]:
                seconds = [row[parts][section] for section in SECTIONS]
                share = sum(seconds[:2]) / row[total]
                cells = [row[total], *seconds, row[total] - sum(seconds)]
                grid.add_row(mode["mode"], f"{row['context']:,}", *(f"{cell * 1e3:.3f}" for cell in cells), f"{share:.1%}")
        console.print(grid)
    grid = Grid(title="whole prompts and memory")
    for column in ("mode", *(f"TTFT {row['context']:,}, s" for row in document["modes"][0]["rows"]), "pools, GB", "peak, GB"):
        grid.add_column(column, justify="right")
    for mode in document["modes"]:
        ttft = ["not measured" if row["ttft"] is None else f"{row['ttft']:.3f}" for row in mode["rows"]]
        grid.add_row(mode["mode"], *ttft, f"{mode['pool_bytes'] / 1e9:.2f}", f"{mode['peak_bytes'] / 1e9:.2f}")
    console.print(grid)
    console.print(f"row ranges of a stack keep their bits: {document['row_ranges_keep_their_bits']}")
    for line in document["agreement"]:
        best = "the same" if line["same_best"] else "another"
        console.print(
            f"first logits at {line['context']:,}, {line['mode']} against {line['against']}: cosine {line['cosine']:.5f}, "
            f"largest gap {line['gap']:.3f}, best token {best}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="contexts in tokens")
    parser.add_argument("--ttft", type=int, nargs="*", default=list(TTFT), help="contexts whose whole prompt is served")
    parser.add_argument("--mode", action="append", choices=["incumbent", "tilelang", "tilelang640"], default=[])
    parser.add_argument("--layers", type=int, default=60, help="a multiple of 6")
    parser.add_argument("--repeats", type=int, default=10, help="replays of a decode step")
    parser.add_argument("--out", type=Path, help="where the JSON goes, if anywhere")
    parser.add_argument("--commit", default="unknown", help="recorded")
    options = parser.parse_args(arguments)
    if options.layers < 6 or options.layers % 6:
        parser.error(f"--layers is {options.layers}; it must be a multiple of 6")
    if set(options.ttft) - set(options.lengths):
        parser.error("--ttft names a length that --lengths does not")
    if not torch.cuda.is_available():
        print("bench.step needs an NVIDIA GPU, and torch sees none; nothing was measured", file=sys.stderr)
        return 2
    library, device = load(), torch.device("cuda")
    chosen = [mode for mode in Mode if not options.mode or mode.label in options.mode]
    torch.manual_seed(0)
    host = report.environment(library, options.commit)
    results: list[ModeResult] = []
    document: dict[str, Any] | None = None
    failed = False
    with torch.no_grad():
        size = size_31b(chosen[0], layers=options.layers)
        weights = make_weights(size, device, max(options.lengths))
        same = same_row_ranges(weights)
        for mode in chosen:
            try:
                results.append(measure(size_31b(mode, layers=options.layers), weights, mode, library, options, device))
            except RuntimeError as refusal:  # no incumbent in the library, a refused call: the other modes still count
                print(f"{mode.label}: {refusal}", file=sys.stderr)
                failed = True
            else:
                document = record(host, size, weights, results, same)
                if options.out is not None:
                    report.write(document, options.out)  # after every mode: minutes each, and a run may be cut off
            gc.collect()
            torch.cuda.empty_cache()
    if document is None:
        return 2
    show(document, Console(width=None if sys.stdout.isatty() else 150))
    return 0 if same and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
