"""The command line: `python -m codegen COMMAND`. Results go to stdout, progress and summaries to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table as Grid

from codegen import abi, build, rendering, symbols, table, toolchain, tree
from codegen.cache import default_root
from codegen.errors import EXIT_CODES, OutputError, TilepressError, ToolchainError
from codegen.formats import FORMATS
from codegen.progress import Progress

CODES = "\n".join(f"  {error.exit_code}  {error.meaning}" for error in EXIT_CODES)
EPILOG = f"\b\nExit codes:\n  0  done\n  2  the command line is wrong\n{CODES}"
WATCHED_VARIABLES = (
    "PEGAINFER_GEMMA4_TILELANG_PYTHON",
    "TILEPRESS_CACHE",
    "TILEPRESS_CUDA",
    "TILEPRESS_FLASHINFER_WHEEL",
    "CUDACXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
    "CMAKE_CXX_COMPILER_LAUNCHER",
    "CMAKE_CUDA_COMPILER_LAUNCHER",
)
DIRECTORY = click.Path(file_okay=False, path_type=Path)


class Commands(click.Group):
    """A group whose commands end with the exit code of the failure, its message on stderr, and no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except TilepressError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Presses TileLang attention kernels, ahead of time, into one static library with a C ABI.

    Start with `python -m codegen doctor`, then `python -m codegen build --arch sm_90`. No command needs a GPU.
    """


def shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that build, emit, verify and list share."""
    for option in (
        click.option(
            "--without",
            multiple=True,
            type=click.Choice(["incumbent"]),
            help="Leave out the incumbent's entries; no FlashInfer.",
        ),
        click.option(
            "--table",
            "table_path",
            type=click.Path(dir_okay=False, path_type=Path),
            default=build.DEFAULT_TABLE,
            help="The family table; by default the families.toml beside the package.",
        ),
        click.option("--family", "families", multiple=True, metavar="NAME", help="Only this family; may be repeated."),
    ):
        command = option(command)
    return command


def generating_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of commands that lower kernels."""
    for option in (
        click.option("--no-cache", is_flag=True, help="Lower and compile everything again; neither read nor fill the cache."),
        click.option(
            "--jobs",
            type=click.IntRange(min=1),
            default=build.default_jobs,
            help="Processes at once.",
            show_default="CPUs",
        ),
        click.option("--arch", required=True, metavar="ARCH", help="The GPU architecture, such as sm_90 (compiled as sm_90a)."),
    ):
        command = option(command)
    return shared_options(command)


@main.command("build")
@generating_options
@click.option("--out", type=DIRECTORY, default=Path("out"), show_default=True, help="Where the install tree goes.")
@click.option(
    "--stub", is_flag=True, help="The same symbols without kernels: every entry refuses. Needs no CUDA and no TileLang."
)
@click.option("--from", "source", type=DIRECTORY, help="Build a tree that `emit` wrote; TileLang is not needed.")
@click.option("--python", is_flag=True, help="Also build the Python module, into OUT/python.")
@click.option("--racecheck", is_flag=True, help="Kernels for compute-sanitizer's racecheck: same protocol, slower barriers.")
@click.option("--emit", "emitted", type=click.Choice(["cargo"]), help="Print what a build.rs prints, on stdout.")
@click.option("--symbols", "lists", type=DIRECTORY, default=symbols.DEFAULT_LISTS, help="The committed symbol lists.")
def build_command(
    table_path: Path,
    families: tuple[str, ...],
    without: tuple[str, ...],
    arch: str,
    jobs: int,
    no_cache: bool,
    out: Path,
    stub: bool,
    source: Path | None,
    python: bool,
    racecheck: bool,
    emitted: str | None,
    lists: Path,
) -> None:
    """Build libtilepress.a, its header, bindings and package files into OUT.

    \b
    OUT/lib/libtilepress.a            OUT/lib/cmake/tilepress/      find_package(tilepress)
    OUT/include/tilepress.h           OUT/lib/pkgconfig/            pkg-config tilepress
    OUT/rust/tilepress_sys.rs         OUT/share/tilepress/          manifest, symbols, depfile
    """
    options = build.Options(
        table_path, arch, out, jobs, families, stub, source, not no_cache, python, lists, without, racecheck
    )
    console = Console(stderr=True)
    _say_arch(console, table_path, arch, source)
    report = build.build(options, Progress(console))
    _summary(console, report)
    if emitted == "cargo":
        click.echo(cargo_lines(report))


@main.command("emit")
@generating_options
@click.option("--out", type=DIRECTORY, default=Path("emitted"), show_default=True, help="Where the source tree goes.")
def emit_command(
    table_path: Path, families: tuple[str, ...], without: tuple[str, ...], arch: str, jobs: int, no_cache: bool, out: Path
) -> None:
    """Write self-contained sources, headers vendored: `build --from DIR` needs no TileLang and no network."""
    console = Console(stderr=True)
    _say_arch(console, table_path, arch, None)
    options = build.Options(table_path, arch, out, jobs, families, cache=not no_cache, without=without)
    emitted = build.emit(options, Progress(console))
    console.print(f"wrote {len(emitted.units)} units to {out}; next: python -m codegen build --arch {arch} --from {out}")


@main.command("verify")
@shared_options
@click.option("--out", type=DIRECTORY, default=Path("out"), show_default=True, help="The install tree of the build to check.")
@click.option("--update", is_flag=True, help="Rewrite the committed lists from that build, for a reviewed change.")
@click.option("--symbols", "lists", type=DIRECTORY, default=symbols.DEFAULT_LISTS, help="The committed symbol lists.")
def verify_command(
    table_path: Path, families: tuple[str, ...], without: tuple[str, ...], out: Path, update: bool, lists: Path
) -> None:
    """Compare the last build's exports, per object and for the archive, with the committed lists."""
    whole = table.load(table_path)
    selected = whole.select(families, without)
    generated = tree.read(out / build.WORK / "tree") if (out / build.WORK / "tree").is_dir() else None
    stub = generated is not None and generated.context.stub
    built = build.built_in(out)
    if update:
        if families or without:
            raise OutputError("--update rewrites the lists of a whole build; leave --family and --without out.")
        written = symbols.update(built, lists, stub)
        click.echo(f"wrote {len(written)} lists to {lists}; review them and commit")
        return
    symbols.verify(built, lists, whole, selected, stub)
    click.echo(f"{len(symbols.exported(built.archive))} exported symbols agree with {lists}")


@main.command("list")
@shared_options
def list_command(table_path: Path, families: tuple[str, ...], without: tuple[str, ...]) -> None:
    """Show the families, their kernels, which serve which model, whole or sharded over GPUs, and the incumbent's units."""
    selected = table.load(table_path).select(families, without)
    console = Console()
    rows = Grid("entry", "layer", "head_dim", "page", "formats", "groups")
    for family in selected.family:
        rows.add_row(
            family.entry,
            family.layer,
            str(family.head_dim),
            str(family.page_size),
            ", ".join(family.formats),
            ", ".join(map(str, family.groups)),
        )
    console.print(rows)
    served = Grid("model", "layer", "GPUs", "heads (q/kv)", "group", "kernels")
    for model in selected.model:
        for layer in table.LAYERS:
            for gpus, heads in model.heads(layer).shards.items():
                names = [
                    kernel.name
                    for family in selected.family
                    if family.layer == layer and family.head_dim == heads.head_dim
                    for kernel in family.kernels
                    if kernel.group == heads.group and (model.k_eq_v or not FORMATS[kernel.page_format].needs_k_eq_v)
                ]
                counts = f"{heads.q_heads}/{heads.kv_heads}"
                served.add_row(model.name, layer, str(gpus), counts, str(heads.group), ", ".join(names) or "none")
    console.print(served)
    if selected.incumbent:
        units = Grid("incumbent's unit", "head_dim", "variants", "entries")
        for row in selected.incumbent:
            count = sum(entry.unit == row.name for entry in abi.incumbent(selected))
            units.add_row(row.name, ", ".join(map(str, row.head_dims)), ", ".join(row.variants), str(count))
        console.print(units)


@main.command("doctor")
def doctor_command() -> None:
    """Show what this host has and lacks for a build, and what to do about it. Fails if a needed part is missing."""
    console = Console()
    rows = Grid("part", "found", "version", "needed for", "next step")
    pinned = table.load(build.DEFAULT_TABLE).library.tilelang
    report = toolchain.doctor_report(default_root(), tilelang=pinned)
    for row in report:
        mark = "[green]ok[/]" if row.ok else "[yellow]absent[/]" if row.optional else "[red]missing[/]"
        rows.add_row(f"{mark} {row.name}", str(row.path or ""), row.version, row.needed_for, row.next_step)
    console.print(rows)
    if any(not row.ok and not row.optional for row in report):
        click.echo("error: a needed part is missing; the table says what to do", err=True)
        sys.exit(ToolchainError.exit_code)


@main.command("docs")
@click.option("--check", is_flag=True, help="Write nothing; fail if docs/abi.md is not up to date.")
def docs_command(check: bool) -> None:
    """Render docs/abi.md from the description of the entries."""
    path = tree.ROOT / "docs" / "abi.md"
    text = rendering.abi_document(table.load(build.DEFAULT_TABLE))
    if check:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise OutputError(f"{path} is not up to date. Run `python -m codegen docs`.")
        return
    rendering.FileWriter(path.parent).write(path.name, text)
    click.echo(f"wrote {path}")


def cargo_lines(report: build.Report) -> str:
    """What a build.rs prints to link the library: search paths, libraries, and the files that call for a rerun."""
    out = report.out.resolve()
    lines = [f"cargo::rustc-link-search=native={out / 'lib'}", "cargo::rustc-link-lib=static=tilepress"]
    if report.cuda:
        lines += [f"cargo::rustc-link-search=native={report.cuda.lib}", "cargo::rustc-link-lib=dylib=cudart"]
        lines.append(f"cargo::metadata=cudart={report.cuda.lib}")
    lines += [
        "cargo::rustc-link-lib=dylib=stdc++",
        f"cargo::rustc-env=TILEPRESS_RUST={out / 'rust'}",
        f"cargo::metadata=include={out / 'include'}",
        *(f"cargo::rerun-if-env-changed={name}" for name in WATCHED_VARIABLES),
        # The folders too, for files that are new there.
        *(f"cargo::rerun-if-changed={folder}" for folder in (tree.ROOT / "csrc", tree.ROOT / "codegen" / "templates")),
    ]
    lines += [f"cargo::rerun-if-changed={path}" for path in report.inputs]
    return "\n".join(lines)


def _say_arch(console: Console, table_path: Path, name: str, source: Path | None) -> None:
    rows = tree.read(source).table if source else table.load(table_path)
    arch = rows.find_arch(name)
    console.print(f"arch {arch.name}: kernels are compiled for {arch.target}", highlight=False)


def _summary(console: Console, report: build.Report) -> None:
    kernels = [lowered for rows in report.tree.kernels.values() for lowered in rows]
    if kernels:
        rows = Grid("kernel", "registers", "spilled", "shared memory", "threads")
        for lowered in kernels:
            found = report.resources[lowered.name]
            x, y, z = lowered.block
            rows.add_row(
                lowered.name,
                str(found.registers),
                f"{found.spill_store_bytes + found.spill_load_bytes} B",
                f"{lowered.dynamic_shared_bytes + found.static_shared_bytes} B",
                str(x * y * z),
            )
        console.print(rows)
    count = len(abi.entries(report.tree.table)) + len(abi.incumbent(report.tree.table))
    times = ", ".join(f"{step} {value:.1f} s" for step, value in report.seconds.items())
    console.print(
        f"{report.out / 'lib/libtilepress.a'}: {count} entries, {len(kernels)} kernels, "
        f"{report.archive_bytes / 1e6:.2f} MB, tier {report.tree.context.tier}; {times}",
        highlight=False,
        soft_wrap=True,
    )
