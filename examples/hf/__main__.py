"""`python -m examples.hf oracle`: the table. `python -m examples.hf walk`: one prompt under the mode that the knob asks for."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from bench.library import LibraryMissing, load
from bench.report import environment
from codegen.modes import VARIABLE

from . import backend, models, modes, oracle
from .kernels import Unsupported
from .pool import PoolExhausted

ROOT = Path(__file__).resolve().parents[2]


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def device() -> torch.device:
    """The GPU. Raises RuntimeError."""
    if not torch.cuda.is_available():
        raise RuntimeError("the kernels need an NVIDIA GPU, and torch sees none")
    return torch.device("cuda")


def keep(report: oracle.Report, library: ModuleType, options: argparse.Namespace) -> None:
    """Writes what there is of the report so far, if a file is asked for."""
    if options.out is not None:
        import transformers

        host = environment(library, options.commit) | {"transformers": transformers.__version__}
        oracle.write(report, host, options.out)


def oracle_command(options: argparse.Namespace) -> int:
    """1 where a bound is broken."""
    library = load()
    report = oracle.Report()
    serve = oracle.serve_with(library)
    chosen = [modes.parse(None if name == "incumbent" else name) for name in options.mode] or list(modes.Mode)
    lengths = {"prompts": options.prompts, "sweep": () if options.no_sweep else oracle.SWEEP}
    if options.checkpoint is not None:
        model = models.load(options.checkpoint, device())
        oracle.run_model(report, options.checkpoint.name, model, serve, chosen, say=say, **lengths)
    else:
        for name in options.size or list(models.SHAPES):
            start = time.monotonic()
            model = models.random_model(models.config_of(models.SHAPES[name]), device())
            oracle.run_model(report, name, model, serve, chosen, say=say, **lengths)
            del model
            gc.collect()
            torch.cuda.empty_cache()
            say(f"{name}: {time.monotonic() - start:.1f} s")
            keep(report, library, options)
    oracle.show(report)
    keep(report, library, options)
    return 1 if report.faults else 0


def walk_command(options: argparse.Namespace) -> int:
    """Prints the tokens that a model answers a random prompt with."""
    mode = modes.from_environment()
    library = load()
    if options.checkpoint is not None:
        model = models.load(options.checkpoint, device())
    else:
        model = models.random_model(models.config_of(models.SHAPES[options.size]), device())
    total = options.tokens + options.steps
    session = backend.session(model, mode, library, tokens=total, chunk=oracle.CHUNK, preps=options.preps)
    request = session.open()
    prompt = torch.randint(3, model.config.vocab_size, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    for part in prompt.to(model.device).split(oracle.CHUNK, 1):
        logits = session.forward([request], part)
    chosen = []
    for _ in range(options.steps):
        token = logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(int(token))
        logits = session.forward([request], token)
    print(f"{mode.label}: {' '.join(map(str, chosen))}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m examples.hf", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    table = commands.add_parser("oracle", help="transformers' own attention against the library's, in every mode")
    table.add_argument("--size", action="append", choices=sorted(models.SHAPES), default=[], help="by default all")
    table.add_argument("--mode", action="append", choices=["incumbent", "tilelang", "tilelang640"], default=[])
    table.add_argument("--checkpoint", type=Path, help="a folder that transformers can read, instead of random weights")
    table.add_argument("--prompts", type=int, nargs="+", default=list(oracle.PROMPTS), help="prompt lengths in tokens")
    table.add_argument("--no-sweep", action="store_true", help="leave out the lengths around 3,000")
    table.add_argument("--out", type=Path, help="where the JSON goes, if anywhere")
    table.add_argument("--commit", default="unknown", help="recorded")
    table.set_defaults(run=oracle_command)
    walk = commands.add_parser("walk", help=f"serve one prompt under the mode in {VARIABLE}")
    walk.add_argument("--size", choices=sorted(models.SHAPES), default="31B")
    walk.add_argument("--checkpoint", type=Path)
    walk.add_argument("--tokens", type=int, default=512)
    walk.add_argument("--steps", type=int, default=16)
    walk.add_argument("--preps", action="store_true", help="norms, rotation and pool writes by the library's preps")
    walk.set_defaults(run=walk_command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """An error of the caller's, said in a line, is 2."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (backend.NotGemma4, Unsupported, PoolExhausted, LibraryMissing, ValueError, RuntimeError) as error:
        print(f"examples.hf: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
