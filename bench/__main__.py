"""`python -m bench prefill`, `decode`, `sliding` and `prep`: measure on the GPU of this host."""

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
PROMPTS = "1x8192@8192,1x8192@9216,1x8192@40000,8x1024@4000"
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


def sliding_geometry_of(model: Model, layers: int) -> Geometry:
    """A model's sliding layers, the middle one of `layers` in a page."""
    from bench.inputs import Geometry

    heads = model.sliding
    return Geometry(heads.q_heads, heads.kv_heads, head_dim=heads.head_dim, layers=layers, layer=layers // 2)


def window_of(model: Model) -> int:
    """Tokens that a row of a model's sliding layers sees."""
    window = model.sliding.window
    assert window is not None  # the table has made sure
    return window


format_option = click.option(
    *("--format", "formats"),
    type=click.Choice(list(FORMATS)),
    multiple=True,
    help="Page format, repeatable; by default all that the model can have.",
)


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every command has."""
    options = (
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
@format_option
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
@format_option
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


def parse_prompts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[loads.Prompts, ...]:
    """Prefills such as 1x8192@9216."""
    try:
        return loads.parse_prompts(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list such as 1x8192@9216 ({error})") from None


@main.command("sliding")
@click.option(
    "--model", type=click.Choice(sorted(MODELS)), default="gemma4-31b", show_default=True, help="Whose prefill is measured."
)
@click.option(
    "--prompts",
    default=PROMPTS,
    show_default=True,
    callback=parse_prompts,
    help="REQUESTSxROWS@TOKENS, comma-separated: the rows are the last of so many tokens.",
)
@click.option(
    *("--decode-model", "decode_models"),
    type=click.Choice(sorted(MODELS)),
    multiple=True,
    default=("gemma4-31b", "gemma4-e2b"),
    show_default=True,
    help="Repeatable.",
)
@click.option(
    "--batches", default="1,16,64", show_default=True, callback=parse_lengths, help="Requests of a decode, comma-separated."
)
@common_options
def sliding_command(
    model: str,
    prompts: tuple[loads.Prompts, ...],
    decode_models: tuple[str, ...],
    batches: tuple[int, ...],
    layers: int,
    repeats: int,
    out: Path | None,
    commit: str | None,
) -> None:
    """The sliding layers: the windowed prefill against this GPU's matrix product, cold and hot, and the windowed decode, merge
    included, against its copy."""
    library = gpu_library()
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from bench import decode, report, roofline, sliding

    prefills, decodes = [], []
    torch.manual_seed(0)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("roofline", total=len(prompts) + len(decode_models) * len(batches) + 2)
        gemm = report.Gemm(
            cold=roofline.gemm_bursts(launches=sliding.COLD, rest=sliding.REST, repeats=repeats),
            hot=roofline.gemm_bursts(launches=sliding.HOT, rest=sliding.REST, repeats=sliding.HOT_REPEATS),
        )
        copy = roofline.copy()
        try:
            geometry = sliding_geometry_of(MODELS[model], layers)
            for load in prompts:
                progress.update(task, advance=1, description=f"sliding prefill, {load}")
                torch.cuda.empty_cache()
                prefills.append(sliding.measure(library, geometry, load, window_of(MODELS[model]), repeats=repeats))
            for name in decode_models:
                geometry, window = sliding_geometry_of(MODELS[name], layers), window_of(MODELS[name])
                for batch in batches:
                    progress.update(task, advance=1, description=f"sliding decode, {name}, {batch} requests")
                    torch.cuda.empty_cache()
                    # The window lies across one page more than it fills, and the page before it is released.
                    step = loads.Load(batch, window + 100)
                    decodes.append((name, decode.measure(library, geometry, step, window=window, repeats=repeats)))
        except (ArithmeticError, ValueError, library.Error) as error:
            raise click.ClickException(str(error)) from error
        progress.update(task, advance=1, description="roofline again")
        copy_after = roofline.copy()
        progress.update(task, advance=1)
    host = report.environment(library, commit or head_commit())
    finish(report.sliding_record(host, model, gemm, copy, copy_after, prefills, decodes), report.show_sliding, out)


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
    library = gpu_library()
    import torch
    from rich.console import Console

    from bench import prep, report, roofline
    from bench.preps import Shape

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
