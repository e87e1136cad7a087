"""`python -m bench prefill` and `python -m bench decode`: measure on the GPU of this host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from bench import loads
from codegen.formats import FORMATS
from codegen.table import Model
from codegen.table import load as load_table

if TYPE_CHECKING:
    from bench.inputs import Geometry

ROOT = Path(__file__).resolve().parent.parent
MODELS = {model.name: model for model in load_table(ROOT / "families.toml").model}
LOADS = "1x10602,1x40002,1x81653,1x163336,16x40002,64x10602"


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


def gpu_library() -> ModuleType:
    """The module `tilepress`, on a host that can run it."""
    try:
        import torch
    except ImportError as error:
        raise click.ClickException(f"the bench needs PyTorch ({error})") from error
    if not torch.cuda.is_available():
        raise click.ClickException("the bench needs an NVIDIA GPU, and torch sees none; nothing was measured")
    from bench.library import LibraryMissing, load

    try:
        return load()
    except LibraryMissing as error:
        raise click.ClickException(str(error)) from error


def formats_of(models: Sequence[Model], chosen: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The page formats to measure each model in: the chosen ones, or every one that the model can have."""
    found = {}
    for model in models:
        possible = tuple(name for name, page in FORMATS.items() if model.k_eq_v or not page.needs_k_eq_v)
        for name in chosen:
            if name not in possible:
                raise click.UsageError(f"--format: {model.name} cannot have {name} pages: its K and V are two projections")
        found[model.name] = tuple(chosen) or possible
    return found


def geometry_of(model: Model, page_format: str, layers: int) -> Geometry:
    """A model's global layers, the middle one of `layers` in a page."""
    from bench.inputs import Geometry

    heads = model.global_
    return Geometry(
        heads.q_heads, heads.kv_heads, head_dim=heads.head_dim, layers=layers, layer=layers // 2, page_format=page_format
    )


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that both commands have."""
    options = (
        click.option(
            *("--format", "formats"),
            type=click.Choice(list(FORMATS)),
            multiple=True,
            help="Page format, repeatable; by default all that the model can have.",
        ),
        click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="Layers a page of the pool holds."),
        click.option("--repeats", type=click.IntRange(1), default=15, show_default=True, help="Samples for each figure."),
        click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where the JSON goes, if anywhere."),
        click.option("--commit", envvar="TILEPRESS_COMMIT", help="Recorded; git is asked if absent.  [env: TILEPRESS_COMMIT]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def finish(record: dict[str, Any], show: Callable[..., None], out: Path | None) -> None:
    """Prints and writes what was measured."""
    from rich.console import Console

    from bench import report

    show(record, Console(width=None if sys.stdout.isatty() else 140))  # a log needs no 80 columns
    if out is not None:
        report.write(record, out)
        click.echo(f"wrote {out}", err=True)


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
@common_options
def prefill_command(
    model: str,
    lengths: tuple[int, ...],
    rows: int,
    formats: tuple[str, ...],
    layers: int,
    repeats: int,
    out: Path | None,
    commit: str | None,
) -> None:
    """The global prefill against this GPU's matrix product: useful TFLOP/s and share."""
    for length in lengths:
        if length < rows:
            raise click.UsageError(f"--lengths: {length} tokens do not hold --rows {rows} query rows")
    geometries = [geometry_of(MODELS[model], name, layers) for name in formats_of([MODELS[model]], formats)[model]]
    library = gpu_library()
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from bench import prefill, report, roofline

    results = []
    torch.manual_seed(0)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        steps = progress.add_task("roofline", total=len(geometries) * len(lengths) + 2)
        gemm, copy = roofline.gemm(), roofline.copy()
        for geometry in geometries:
            for length in lengths:
                progress.update(steps, advance=1, description=f"prefill, {geometry.page_format}, L = {length:,}")
                torch.cuda.empty_cache()
                try:
                    results.append(prefill.measure(library, geometry, rows, length, repeats=repeats))
                except (ArithmeticError, ValueError, library.Error) as error:
                    raise click.ClickException(str(error)) from error
        progress.update(steps, advance=1, description="roofline again")
        gemm_after = roofline.gemm()
        progress.update(steps, advance=1)
    host = report.environment(library, commit or head_commit())
    finish(report.prefill_record(host, model, gemm, gemm_after, copy, results), report.show_prefill, out)


def parse_loads(context: click.Context, parameter: click.Parameter, value: str) -> tuple[loads.Load, ...]:
    """Loads such as 1x10602,16x40002."""
    try:
        return loads.parse(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list such as 1x10602,16x40002 ({error})") from None


@main.command("decode")
@click.option(
    *("--model", "models"),
    type=click.Choice(sorted(MODELS)),
    multiple=True,
    default=("gemma4-31b", "gemma4-12b"),
    show_default=True,
    help="Repeatable.",
)
@click.option(
    "--loads", "steps", default=LOADS, show_default=True, callback=parse_loads, help="REQUESTSxTOKENS, comma-separated."
)
@common_options
def decode_command(
    models: tuple[str, ...],
    steps: tuple[loads.Load, ...],
    formats: tuple[str, ...],
    layers: int,
    repeats: int,
    out: Path | None,
    commit: str | None,
) -> None:
    """The global decode, merge included, against this GPU's copy: microseconds, TB/s of keys and values, ratio to the floor."""
    chosen = formats_of([MODELS[model] for model in models], formats)
    library = gpu_library()
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from bench import decode, report, roofline

    results = []
    torch.manual_seed(0)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("roofline", total=len(steps) * sum(map(len, chosen.values())) + 2)
        copy = roofline.copy()
        for model, names in chosen.items():
            for name in names:
                geometry = geometry_of(MODELS[model], name, layers)
                for load in steps:
                    progress.update(task, advance=1, description=f"decode, {model}, {name}, {load}")
                    torch.cuda.empty_cache()
                    try:
                        results.append((model, decode.measure(library, geometry, load, repeats=repeats)))
                    except (ArithmeticError, ValueError, library.Error) as error:
                        raise click.ClickException(str(error)) from error
        progress.update(task, advance=1, description="roofline again")
        copy_after = roofline.copy()
        progress.update(task, advance=1)
    host = report.environment(library, commit or head_commit())
    finish(report.decode_record(host, copy, copy_after, results), report.show_decode, out)


if __name__ == "__main__":
    main()
