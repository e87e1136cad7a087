"""The flow of a build, in order: table, lowering, gates, rendering, compile, gates, symbols, install tree."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from codegen import abi, compiling, flashinfer, gates, install, manifest, symbols, table, tilelang_python, toolchain, tree
from codegen.cache import Store, default_root
from codegen.errors import OutputError
from codegen.gates import Resources, Subject
from codegen.lowered import Lowered, Request
from codegen.lowering import check_version
from codegen.progress import Progress
from codegen.rendering import Context
from codegen.table import Table
from codegen.tree import ROOT, Tree

DEFAULT_TABLE = ROOT / "families.toml"
WORK = ".build"


@dataclass(frozen=True)
class Options:
    """What `build` was asked for. families: none means all. source: an emitted tree, instead of lowering here.

    without: parts to leave out. racecheck: kernels for a race checker, which are slower.
    """

    table: Path
    arch: str
    out: Path
    jobs: int
    families: tuple[str, ...] = ()
    stub: bool = False
    source: Path | None = None
    cache: bool = True
    python: bool = False
    lists: Path = symbols.DEFAULT_LISTS
    without: tuple[str, ...] = ()
    racecheck: bool = False


@dataclass(frozen=True)
class Report:
    """What a build made, for its summary. seconds: by step."""

    tree: Tree
    out: Path
    files: tuple[Path, ...]
    inputs: tuple[Path, ...]
    resources: Mapping[str, Resources]
    archive_bytes: int
    seconds: Mapping[str, float]
    cuda: toolchain.CudaToolkit | None


def build(options: Options, progress: Progress) -> Report:
    """Builds the library into `options.out`. Raises a TilepressError; the install tree changes only at the very end."""
    seconds: dict[str, float] = {}
    store = Store(default_root()) if options.cache else None
    whole = table.load(options.table)
    install.check_writable(options.out)
    with _only_build_in(options.out):
        with _timed(seconds, "generate"):
            if options.source:
                generated = _narrowed(tree.read(options.source), options)
            else:
                generated = generate(options, whole, options.out / WORK / "tree", store, progress)
        tools = compiling.Tools(
            toolchain.find_cmake(),
            toolchain.find_ninja(),
            toolchain.find_cxx(),
            None if generated.context.stub else toolchain.find_cuda(default_root()),
        )
        with _timed(seconds, "compile"), progress.steps("compile") as step:
            compiled = compiling.compile_tree(
                generated,
                tools,
                options.out / WORK / "cmake",
                store,
                options.jobs,
                options.python,
                options.racecheck,
                step.reach,
            )
        with _timed(seconds, "check and install"):
            resources = check_compiled(generated, compiled.logs)
            built = symbols.Built(compiled.archive, compiled.objects)
            symbols.verify(built, options.lists, whole, generated.table, generated.context.stub)
            text = manifest.manifest(generated, tools.cuda.version if tools.cuda else "none", resources)
            inputs = _inputs(options)
            files = install.install(generated, compiled, options.out, text, inputs)
    return Report(
        generated,
        options.out,
        tuple(files),
        tuple(inputs),
        resources,
        compiled.archive.stat().st_size,
        seconds,
        tools.cuda,
    )


def generate(options: Options, whole: Table, root: Path, store: Store | None, progress: Progress, vendor: bool = False) -> Tree:
    """Lowers every instance, holds the gates and writes the source tree to `root`. A stub lowers nothing."""
    selected = whole.select(options.families, options.without)
    arch = selected.find_arch(options.arch)
    if options.stub:
        context = Context(selected, arch, "stub")
        return tree.write(root, context, {family.name: () for family in selected.family}, None, None)
    tilelang = tilelang_python.find()
    check_version(tilelang.version, selected.library.tilelang)
    headers = None
    if selected.incumbent and selected.flashinfer:
        headers = flashinfer.headers(selected.flashinfer, default_root())
    context = Context(selected, arch, "generate")
    requests = [
        Request(
            name=kernel.name,
            operation=family.operation,
            stage=kernel.stage.name,
            head_dim=family.head_dim,
            page_size=family.page_size,
            group=kernel.group,
            page_format=kernel.page_format,
            target=arch.target,
            tilelang=selected.library.tilelang,
        )
        for family in selected.family
        for kernel in family.kernels
    ]
    with progress.steps("lower", len(requests)) as step:
        lowered = tilelang_python.lower_all(tilelang, requests, store, options.jobs, step.advance)
    by_name = {kernel.name: kernel for kernel in lowered}
    kernels = {family.name: tuple(by_name[kernel.name] for kernel in family.kernels) for family in selected.family}
    gates.check_lowered(subjects(context, kernels))
    return tree.write(root, context, kernels, tilelang.root, headers, vendor)


def subjects(context: Context, kernels: Mapping[str, Sequence[Lowered]]) -> list[Subject]:
    """What the gates look at, one a kernel."""
    return [
        Subject(lowered, context.arch, abi.kernel_names(family.operation), family.tma and kernel.stage.tma)
        for family in context.table.family
        for kernel, lowered in zip(family.kernels, kernels[family.name], strict=not context.stub)
    ]


def check_compiled(generated: Tree, logs: Mapping[str, str]) -> dict[str, Resources]:
    """Holds the gates on the compiler's output; returns every kernel's resources."""
    looked = subjects(generated.context, generated.kernels)
    gates.check_compiled((subject, logs[subject.lowered.name]) for subject in looked)
    found = {subject.lowered.name: gates.resources(subject.lowered.kernel, logs[subject.lowered.name]) for subject in looked}
    return {name: resources for name, resources in found.items() if resources is not None}


def emit(options: Options, progress: Progress) -> Tree:
    """Writes the self-contained source tree to `options.out`: headers vendored, buildable without TileLang."""
    whole = table.load(options.table)
    install.check_writable(options.out)
    strangers = [path.name for path in options.out.iterdir() if path.name != "tilepress.json"]
    if strangers and not (options.out / "tilepress.json").is_file():
        raise OutputError(
            f"--out {options.out} holds files that are no emitted tree ({', '.join(sorted(strangers)[:5])}). Choose an empty "
            "directory."
        )
    store = Store(default_root()) if options.cache else None
    return generate(options, whole, options.out, store, progress, vendor=True)


def built_in(out: Path) -> symbols.Built:
    """The objects and the archive that the last build left under `out`."""
    build_dir = out / WORK / "cmake"
    archive = build_dir / "libtilepress.a"
    if not archive.is_file():
        raise OutputError(f"{out} holds no build. Run `python -m codegen build --arch sm_90 --out {out}` first.")
    return symbols.Built(archive, {path.stem: path for path in build_dir.glob("*.o") if path.stem != "tilepress"})


def _narrowed(source: Tree, options: Options) -> Tree:
    """An emitted tree, checked against what else the command line asks."""
    if source.context.table.find_arch(options.arch) != source.context.arch:
        raise OutputError(
            f"--from {source.root} was emitted for {source.context.arch.name}, not {options.arch}. Emit it for that arch."
        )
    if options.families or options.stub or options.without:
        raise OutputError("--from takes the whole emitted tree; --family, --without and --stub belong to `codegen emit`.")
    return source


def _inputs(options: Options) -> list[Path]:
    """The files a build depends on, for the depfile and for cargo: our own sources, absolute."""
    if options.source:
        return sorted(path.resolve() for path in options.source.rglob("*") if path.is_file())
    package = Path(__file__).parent
    found = [path for root in (package, ROOT / "csrc") for path in root.rglob("*") if "__pycache__" not in path.parts]
    files = [path for path in found if path.is_file()]
    return sorted(path.resolve() for path in [*files, options.table, ROOT / "CMakeLists.txt"])


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[step] = time.monotonic() - start


@contextmanager
def _only_build_in(out: Path) -> Iterator[None]:
    """Holds `out` for one build: a second one there would tear the first one's files. Freed when a build dies."""
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    lock = FileLock(work / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OutputError(
            f"another build is writing to {out}. Wait for it, or choose another directory with --out DIR."
        ) from None
    try:
        yield
    finally:
        lock.release()


def default_jobs() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
