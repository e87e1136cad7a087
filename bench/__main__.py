"""`python -m bench prefill` and `prep`: measures on the GPU of this host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from codegen.table import load as load_table

ROOT = Path(__file__).resolve().parent.parent
MODELS = {model.name: model for model in load_table(ROOT / "families.toml").model}


def parse_lengths(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Context lengths in tokens, separated by commas."""
    try:
        lengths = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 10602,40002") from None
    if any(length < 1 for length in lengths):
        raise click.BadParameter(f"{value!r} has a length below 1")
    return lengths


def head_commit() -> str:
    """The commit that is checked out, or "unknown" where git cannot tell."""
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@click.group(help=__doc__)
def main() -> None:
    """The commands below."""


@main.command("prefill")
@click.option("--model", type=click.Choice(sorted(MODELS)), default="gemma4-31b", show_default=True)
@click.option(
    "--lengths",
    default="10602,40002,81653,163336",
    show_default=True,
    callback=parse_lengths,
    help="Context lengths in tokens, comma-separated.",
)
@click.option("--rows", type=click.IntRange(1), default=8192, show_default=True, help="Query rows, the last of each L.")
@click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="Layers a page of the pool holds.")
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True, help="Samples for each length.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where the JSON goes, if anywhere.")
@click.option("--commit", envvar="TILEPRESS_COMMIT", help="Recorded; git is asked if absent.  [env: TILEPRESS_COMMIT]")
def prefill_command(
    model: str,
    lengths: tuple[int, ...],
    rows: int,
    layers: int,
    repeats: int,
    out: Path | None,
    commit: str | None,
) -> None:
    """The global prefill against this GPU's matrix product: useful TFLOP/s and share."""
    for length in lengths:
        if length < rows:
            raise click.UsageError(f"--lengths: {length} tokens do not hold --rows {rows} query rows")
    try:
        import torch
    except ImportError as error:
        raise click.ClickException(f"the bench needs PyTorch ({error})") from error
    if not torch.cuda.is_available():
        raise click.ClickException("the bench needs an NVIDIA GPU, and torch sees none; nothing was measured")

    from rich.console import Console
    from rich.progress import Progress

    from bench import prefill, report, roofline
    from bench.inputs import Geometry
    from bench.library import LibraryMissing, load

    try:
        library = load()
    except LibraryMissing as error:
        raise click.ClickException(str(error)) from error
    heads = MODELS[model].global_
    geometry = Geometry(heads.q_heads, heads.kv_heads, head_dim=heads.head_dim, layers=layers, layer=layers // 2)
    results = []
    torch.manual_seed(0)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        steps = progress.add_task("roofline", total=len(lengths) + 2)
        gemm, copy = roofline.gemm(), roofline.copy()
        for length in lengths:
            progress.update(steps, advance=1, description=f"prefill, L = {length:,}")
            torch.cuda.empty_cache()
            try:
                results.append(prefill.measure(library, geometry, rows, length, repeats=repeats))
            except (ArithmeticError, ValueError, library.Error) as error:
                raise click.ClickException(str(error)) from error
        progress.update(steps, advance=1, description="roofline again")
        gemm_after = roofline.gemm()
        progress.update(steps, advance=1)
    host = report.environment(library, commit or head_commit())
    record = report.prefill_record(host, model, geometry, gemm, gemm_after, copy, results)
    report.show(record, Console(width=None if sys.stdout.isatty() else 120))  # a log needs no 80 columns
    if out is not None:
        report.write(record, out)
        click.echo(f"wrote {out}", err=True)


# Columns of an MLP's gate and up, by model; experts left out.
INTERMEDIATE = {"gemma4-e2b": 6144, "gemma4-e4b": 10240, "gemma4-12b": 15360, "gemma4-26b-a4b": 2112, "gemma4-31b": 21504}


@main.command("prep")
@click.option("--model", type=click.Choice(sorted(MODELS)), default="gemma4-31b", show_default=True)
@click.option("--rows", type=click.IntRange(1), default=10602, show_default=True, help="Tokens of the prompt.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Rows of a decode step.")
@click.option("--repeats", type=click.IntRange(1), default=25, show_default=True, help="Samples for each kernel.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where the JSON goes, if anywhere.")
@click.option("--commit", envvar="TILEPRESS_COMMIT", help="Recorded; git is asked if absent.  [env: TILEPRESS_COMMIT]")
def prep_command(model: str, rows: int, requests: int, repeats: int, out: Path | None, commit: str | None) -> None:
    """The preps and the activation against this GPU's device copy: bytes moved, each once, over time."""
    try:
        import torch
    except ImportError as error:
        raise click.ClickException(f"the bench needs PyTorch ({error})") from error
    if not torch.cuda.is_available():
        raise click.ClickException("the bench needs an NVIDIA GPU, and torch sees none; nothing was measured")

    from rich.console import Console

    from bench import prep, report, roofline
    from bench.library import LibraryMissing, load
    from bench.preps import Shape

    try:
        library = load()
    except LibraryMissing as error:
        raise click.ClickException(str(error)) from error
    chosen = MODELS[model]
    heads, sliding = (chosen.global_.q_heads, chosen.global_.kv_heads), (chosen.sliding.q_heads, chosen.sliding.kv_heads)
    formats = ("split", "folded") if chosen.k_eq_v else ("split",)
    shapes = [Shape("global", *heads, page_format=name, k_eq_v=chosen.k_eq_v, layers=1, layer=0) for name in formats]
    shapes.append(Shape("sliding", *sliding, layers=1, layer=0))
    results = []
    copy = roofline.copy()
    try:
        for form, count in (("prompt", rows), ("decode", requests)):
            for shape in shapes:
                torch.cuda.empty_cache()
                results.append(prep.measure_prep(library, shape, count, form, repeats=repeats))
            torch.cuda.empty_cache()
            results.append(prep.measure_activation(library, count, INTERMEDIATE[model], repeats=repeats))
    except (ArithmeticError, ValueError, library.Error) as error:
        raise click.ClickException(str(error)) from error
    copy_after = roofline.copy()
    record = prep.record(report.environment(library, commit or head_commit()), model, copy, copy_after, results)
    prep.show(record, Console(width=None if sys.stdout.isatty() else 120))  # a log needs no 80 columns
    if out is not None:
        report.write(record, out)
        click.echo(f"wrote {out}", err=True)


if __name__ == "__main__":
    main()
