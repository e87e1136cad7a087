"""`python -m bench MODE`: measure on the GPU of this host, soak its kernels, and draw and tabulate what was measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from bench import arms as known_arms
from bench import loads
from codegen.formats import FORMATS
from codegen.table import Model
from codegen.table import load as load_table

if TYPE_CHECKING:
    from bench.inputs import Geometry
    from bench.modes import Decode, Mode, Prefill, Prep, Sliding

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MODELS = {model.name: model for model in load_table(ROOT / "families.toml").model}
LENGTHS = "10602,40002,81653,163336"
PROMPTS = "1x8192@8192,1x8192@9216,1x8192@40000,8x1024@4000"
BATCHES = "1,16,64"
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


# Columns of an MLP's gate and up, by model; experts left out.
INTERMEDIATE = {"gemma4-e2b": 6144, "gemma4-e4b": 10240, "gemma4-12b": 15360, "gemma4-26b-a4b": 2112, "gemma4-31b": 21504}

format_option = click.option(
    *("--format", "formats"),
    type=click.Choice(list(FORMATS)),
    multiple=True,
    help="Page format, repeatable; by default all that the model can have.",
)
layers_option = click.option(
    "--layers", type=click.IntRange(1), default=1, show_default=True, help="Layers a page of the pool holds."
)
commit_option = click.option(
    "--commit", envvar="TILEPRESS_COMMIT", help="Recorded; git is asked if absent.  [env: TILEPRESS_COMMIT]"
)


def parse_arms(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Arms such as generated,incumbent."""
    try:
        return known_arms.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


arms_option = click.option(
    "--arms",
    default=known_arms.DEFAULT,
    show_default=True,
    callback=parse_arms,
    help=f"What is measured side by side, comma-separated: of {', '.join(known_arms.ARMS)}; or all.",
)


def out_options(name: str, repeats: int = 15) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options that every mode has. name: of its files."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        options = (
            click.option(
                "--repeats", type=click.IntRange(1), default=repeats, show_default=True, help="Samples for each figure."
            ),
            click.option(
                "--out",
                type=click.Path(dir_okay=False, path_type=Path),
                default=RESULTS / f"{name}.json",
                show_default=f"bench/results/{name}.json",
                help="Where the JSON goes; the plot goes beside it.",
            ),
            commit_option,
        )
        for option in reversed(options):
            command = option(command)
        return command

    return add


def execute(
    library: ModuleType,
    modes: Sequence[tuple[Mode, int]],
    outs: Sequence[Path],
    *,
    arms: tuple[str, ...],
    commit: str | None,
) -> None:
    """Measures `modes`, each with its number of samples, in this process; prints, writes and draws what was found."""
    import torch
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from bench import report
    from bench.modes import Roofs, Run

    torch.manual_seed(0)
    needed = frozenset().union(*(mode.roofs for mode, _ in modes))
    roofs, results = Roofs(), []
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rooflines", total=sum(mode.cases for mode, _ in modes) + 2)

        def step(case: str) -> None:
            progress.update(task, advance=1, description=case)

        try:
            roofs.before(needed, max(repeats for _, repeats in modes))
            for mode, repeats in modes:
                results.append(mode.measure(Run(library, arms, repeats, step)))
        except (ArithmeticError, ValueError, library.Error) as error:
            raise click.ClickException(str(error)) from error
        step("rooflines again")
        roofs.after(needed)
        progress.update(task, advance=1)
    host = report.environment(library, commit or head_commit())
    console = Console(width=None if sys.stdout.isatty() else 150)  # a log needs no 80 columns
    for (mode, _), found, out in zip(modes, results, outs, strict=True):
        record = mode.record(host, roofs, found)
        mode.show(record, console)
        report.write(record, out)
        click.echo(f"wrote {out}", err=True)
        draw(record, out.with_suffix(".png"))


def draw(record: dict[str, Any], path: Path) -> None:
    """The record's plot, where matplotlib is there to draw it."""
    from bench import plot

    try:
        plot.draw(record, path)
    except plot.MatplotlibMissing as error:
        click.echo(f"no plot: {error}", err=True)
    else:
        click.echo(f"wrote {path}", err=True)


def prefill_mode(model: str, lengths: Sequence[int], rows: int, formats: Sequence[str], layers: int) -> Prefill:
    """The mode, of one model."""
    from bench.modes import Prefill

    geometries = [geometry_of(MODELS[model], name, layers) for name in formats]
    return Prefill(model, geometries, lengths, rows)


def decode_mode(formats: dict[str, tuple[str, ...]], steps: Sequence[loads.Load], layers: int) -> Decode:
    """The mode, of every model in `formats`."""
    from bench.modes import Decode

    pairs = [(model, geometry_of(MODELS[model], name, layers)) for model, names in formats.items() for name in names]
    return Decode(pairs, steps)


def sliding_mode(
    model: str, prompts: Sequence[loads.Prompts], decode_models: Sequence[str], batches: Sequence[int], layers: int
) -> Sliding:
    """The mode: one model's prefill, and decodes of several."""
    from bench.modes import Sliding

    decodes = [(name, sliding_geometry_of(MODELS[name], layers), window_of(MODELS[name])) for name in decode_models]
    chosen = MODELS[model]
    return Sliding(model, sliding_geometry_of(chosen, layers), window_of(chosen), prompts, decodes, batches)


def prep_mode(model: str, rows: int, requests: int) -> Prep:
    """The mode, of one model's layers."""
    from bench.modes import Prep
    from bench.preps import Shape

    chosen = MODELS[model]
    heads, sliding = (chosen.global_.q_heads, chosen.global_.kv_heads), (chosen.sliding.q_heads, chosen.sliding.kv_heads)
    formats = ("split", "folded") if chosen.k_eq_v else ("split",)
    shapes = [Shape("global", *heads, page_format=name, k_eq_v=chosen.k_eq_v, layers=1, layer=0) for name in formats]
    shapes.append(Shape("sliding", *sliding, layers=1, layer=0))
    return Prep(model, shapes, INTERMEDIATE[model], rows, requests)


@click.group(help=__doc__)
def main() -> None:
    """The commands below."""


@main.command("prefill")
@click.option("--model", type=click.Choice(sorted(MODELS)), default="gemma4-31b", show_default=True)
@click.option(
    "--lengths", default=LENGTHS, show_default=True, callback=parse_lengths, help="Context lengths in tokens, comma-separated."
)
@click.option("--rows", type=click.IntRange(1), default=8192, show_default=True, help="Query rows, the last of each L.")
@format_option
@layers_option
@arms_option
@out_options("prefill")
def prefill_command(
    model: str,
    lengths: tuple[int, ...],
    rows: int,
    formats: tuple[str, ...],
    layers: int,
    arms: tuple[str, ...],
    repeats: int,
    out: Path,
    commit: str | None,
) -> None:
    """The global prefill against this GPU's matrix product: useful TFLOP/s and share."""
    for length in lengths:
        if length < rows:
            raise click.UsageError(f"--lengths: {length} tokens do not hold --rows {rows} query rows")
    chosen = formats_of([MODELS[model]], formats)[model]
    library = gpu_library()
    execute(library, [(prefill_mode(model, lengths, rows, chosen, layers), repeats)], [out], arms=arms, commit=commit)


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
@layers_option
@arms_option
@out_options("decode")
def decode_command(
    models: tuple[str, ...],
    steps: tuple[loads.Load, ...],
    formats: tuple[str, ...],
    layers: int,
    arms: tuple[str, ...],
    repeats: int,
    out: Path,
    commit: str | None,
) -> None:
    """The global decode, merge included, against this GPU's copy: microseconds, TB/s of keys and values, ratio to the floor.
    Strict, and early, where a call may read older pages while the one before it runs."""
    chosen = formats_of([MODELS[model] for model in models], formats)
    library = gpu_library()
    execute(library, [(decode_mode(chosen, steps, layers), repeats)], [out], arms=arms, commit=commit)


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
    "--batches", default=BATCHES, show_default=True, callback=parse_lengths, help="Requests of a decode, comma-separated."
)
@layers_option
@arms_option
@out_options("sliding")
def sliding_command(
    model: str,
    prompts: tuple[loads.Prompts, ...],
    decode_models: tuple[str, ...],
    batches: tuple[int, ...],
    layers: int,
    arms: tuple[str, ...],
    repeats: int,
    out: Path,
    commit: str | None,
) -> None:
    """The sliding layers: the windowed prefill against this GPU's matrix product, cold and hot, and the windowed decode, merge
    included, against its copy: strict, and early, where a call may read older pages while the one before it runs."""
    library = gpu_library()
    mode = sliding_mode(model, prompts, decode_models, batches, layers)
    execute(library, [(mode, repeats)], [out], arms=arms, commit=commit)


@main.command("prep")
@click.option("--model", type=click.Choice(sorted(MODELS)), default="gemma4-31b", show_default=True)
@click.option("--rows", type=click.IntRange(1), default=10602, show_default=True, help="Tokens of the prompt.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Rows of a decode step.")
@out_options("prep", repeats=25)
def prep_command(model: str, rows: int, requests: int, repeats: int, out: Path, commit: str | None) -> None:
    """The preps and the activation against this GPU's device copy: bytes moved, each once, over time."""
    library = gpu_library()
    execute(library, [(prep_mode(model, rows, requests), repeats)], [out], arms=(), commit=commit)


@main.command("all")
@click.option("--quick", is_flag=True, help="The shorter lengths and fewer samples: half a minute.")
@arms_option
@click.option(
    "--out-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    show_default="bench/results",
    help="Where the JSON and the plots go.",
)
@commit_option
def all_command(quick: bool, arms: tuple[str, ...], out_dir: Path, commit: str | None) -> None:
    """Every mode with its default sizes, in one process: the rooflines are measured once."""
    lengths, prompts, steps = (tuple(text.split(",")) for text in (LENGTHS, PROMPTS, LOADS))
    if quick:
        lengths, prompts, steps = lengths[:2], prompts[1:2], (steps[0], steps[1], steps[4])
    library = gpu_library()
    formats = formats_of([MODELS[name] for name in ("gemma4-31b", "gemma4-12b")], ())
    modes: list[Mode] = [
        prefill_mode("gemma4-31b", [int(length) for length in lengths], 8192, formats["gemma4-31b"], 1),
        decode_mode(formats, loads.parse(",".join(steps)), 1),
        sliding_mode(
            "gemma4-31b",
            loads.parse_prompts(",".join(prompts)),
            ("gemma4-31b", "gemma4-e2b"),
            [int(batch) for batch in BATCHES.split(",")],
            1,
        ),
        prep_mode("gemma4-31b", 10602, 64),
    ]
    outs = [out_dir / f"{mode.name}.json" for mode in modes]
    repeats = 7 if quick else 15
    execute(library, [(mode, repeats) for mode in modes], outs, arms=arms, commit=commit)


@main.command("soak")
@click.option("--launches", type=click.IntRange(1), default=10_000, show_default=True, help="Of each kernel.")
@click.option("--plans", type=click.IntRange(2), default=16, show_default=True, help="Different ragged batches.")
@click.option(
    "--patience", type=click.IntRange(1), default=30, show_default=True, help="Seconds without progress that are called a hang."
)
@click.option("--only", default="", help="Kernels whose name has this in it.")
@click.option("--seed", type=int, default=0, show_default=True)
def soak_command(launches: int, plans: int, patience: int, only: str, seed: int) -> None:
    """Thousands of launches of every kernel over changing plans, without a hang or a changed bit."""
    library = gpu_library()
    import torch
    from rich.console import Console

    from bench import soak

    torch.manual_seed(seed)
    sys.exit(soak.main(library, launches, plans, patience, only, seed, Console(width=None if sys.stdout.isatty() else 120)))


@main.command("plot")
@click.option(
    "--results",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=RESULTS,
    show_default="bench/results",
    help="Where the JSON is, and the plots go.",
)
def plot_command(results: Path) -> None:
    """Draws every result of a mode as a PNG beside its JSON. Needs matplotlib, and no GPU."""
    from bench import plot

    for path in sorted(results.glob("*.json")):
        record = plot.read(path)
        if record["bench"] in plot.KINDS:
            try:
                plot.draw(record, path.with_suffix(".png"))
            except plot.MatplotlibMissing as error:
                raise click.ClickException(str(error)) from error
            click.echo(f"wrote {path.with_suffix('.png')}", err=True)


@main.command("docs")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 where the tables are not those of the results.")
def docs_command(check: bool) -> None:
    """Rewrites the tables of docs/performance.md from bench/results. Needs no GPU."""
    from bench import tables

    path = ROOT / "docs" / "performance.md"
    old = path.read_text(encoding="utf-8")
    try:
        new = tables.rewrite(old, RESULTS)
    except tables.MarkerError as error:
        raise click.ClickException(f"{path}: {error}") from error
    if new == old:
        return
    if check:
        raise click.ClickException(f"{path} has other tables than bench/results; run `python -m bench docs`")
    path.write_text(new, encoding="utf-8")
    click.echo(f"wrote {path}", err=True)


if __name__ == "__main__":
    main()
