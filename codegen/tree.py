"""The generated source tree: everything CMake needs to build the library, with or without TileLang on the host.

tilepress.json      the table, the arch, the tier, the lowered kernels
CMakeLists.txt units.cmake symbols.txt
include/            tilepress.h
generated/          entries, kernels with their launchers, bindings
csrc/               the hand-written sources
vendor/             TileLang's, CUTLASS's and FlashInfer's headers, in an emitted tree only
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from codegen import abi, flashinfer, rendering
from codegen.errors import OutputError
from codegen.lowered import Lowered
from codegen.rendering import Context, FileWriter, Unit
from codegen.table import Table, parse

ROOT = Path(__file__).parent.parent
FORMAT = 2
VENDORED = (
    ("src/tl_templates", "vendor/tilelang/tl_templates"),
    ("3rdparty/cutlass/include", "vendor/cutlass/include"),
)
VENDORED_FLASHINFER = "vendor/flashinfer"
INCUMBENT_FLAGS = ("--use_fast_math", "--expt-relaxed-constexpr")  # as FlashInfer compiles these headers itself
LICENSES = ("LICENSE", "NOTICE")  # NOTICE holds the vendored headers' licence texts: their wheel carries none beside them


@dataclass(frozen=True)
class Tree:
    """A generated source tree on disk. kernels: by family name, in launch order. *_includes: directories of headers."""

    root: Path
    context: Context
    kernels: Mapping[str, tuple[Lowered, ...]]
    kernel_includes: tuple[Path, ...]
    incumbent_includes: tuple[Path, ...]

    @property
    def table(self) -> Table:
        """The table it was generated from."""
        return self.context.table

    @property
    def units(self) -> tuple[Unit, ...]:
        """The objects of the library."""
        return units(self.context, self.kernels)


def units(context: Context, kernels: Mapping[str, Sequence[Lowered]]) -> tuple[Unit, ...]:
    """One unit per hand-written source, per entry and per kernel."""
    host = rendering.HOST_SOURCES if context.stub else rendering.HOST_SOURCES + rendering.CUDA_HOST_SOURCES
    result = [Unit(Path(name).stem, f"csrc/{name}") for name in host]
    result.append(Unit("library", "generated/library.cpp"))
    hand_written = abi.hand_written(context.table)
    result += [Unit(entry.short_name, f"generated/{entry.short_name}.cpp") for entry in hand_written]
    bodies = dict.fromkeys(entry.source for entry in hand_written if not (entry.cuda and context.stub))
    result += [Unit(f"{Path(name).stem}_body", f"csrc/{name}") for name in bodies]
    result += [Unit(entry.short_name, f"generated/{entry.short_name}.cpp") for entry in abi.routes(context.table)]
    for entry in abi.family_entries(context.table):
        result.append(Unit(entry.family.name, f"generated/{entry.family.name}.cpp"))
        for lowered in kernels[entry.family.name]:
            result.append(Unit(lowered.name, f"generated/{lowered.name}.cu", lowered.nvcc_flags))
    suffix, flags = ("cpp", ()) if context.stub else ("cu", INCUMBENT_FLAGS)
    result += [Unit(row.name, f"generated/{row.name}.{suffix}", flags, incumbent=True) for row in context.table.incumbent]
    return tuple(result)


def write(
    root: Path,
    context: Context,
    kernels: Mapping[str, tuple[Lowered, ...]],
    tilelang_root: Path | None,
    flashinfer_root: Path | None,
    vendor: bool = False,
) -> Tree:
    """Writes the tree to `root`, removing what an earlier table left there.

    tilelang_root: TileLang's package directory; flashinfer_root: the directory of FlashInfer's unpacked headers. The headers
    are copied with `vendor`, otherwise named where they lie.
    """
    writer = FileWriter(root)
    table = context.table
    relative_includes: list[str] = []
    if tilelang_root and vendor:
        for source, target in VENDORED:
            _copy_tree(tilelang_root / source, root / target)
        for name in LICENSES:
            writer.write(name, (ROOT / name).read_text(encoding="utf-8"))
        relative_includes = ["vendor/tilelang", "vendor/cutlass/include"]
    elif tilelang_root:
        relative_includes = [str(tilelang_root / "src"), str(tilelang_root / "3rdparty/cutlass/include")]
    incumbent_includes: list[str] = []
    if flashinfer_root:
        if vendor:
            _copy_tree(flashinfer_root, root / VENDORED_FLASHINFER)
        headers = VENDORED_FLASHINFER if vendor else str(flashinfer_root)
        incumbent_includes = [f"{headers}/{name}" for name in flashinfer.INCLUDES]

    for path in sorted((ROOT / "csrc").iterdir()):
        writer.write(f"csrc/{path.name}", path.read_text(encoding="utf-8"))
    writer.write("CMakeLists.txt", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    writer.write("include/tilepress.h", rendering.header(table))
    writer.write("generated/tilepress_sys.rs", rendering.rust_bindings(table))
    writer.write("generated/python.cpp", rendering.python_bindings(table))
    writer.write("generated/library.cpp", rendering.library_source(context))
    writer.write("generated/page_formats.h", rendering.page_formats_header())
    writer.write("generated/modes.h", rendering.modes_header())
    for routed in abi.routes(table):
        writer.write(f"generated/{routed.short_name}.cpp", rendering.routed_source(routed))
    if not context.stub:
        writer.write("generated/qk_prep.cuh", rendering.prep_header())
    writer.write("generated/hand_written.h", rendering.hand_written_header(table))
    for hand_written in abi.hand_written(table):
        writer.write(f"generated/{hand_written.short_name}.cpp", rendering.hand_written_source(context, hand_written))
    for entry in abi.family_entries(table):
        family = entry.family.name
        writer.write(f"generated/{family}.cpp", rendering.entry_source(context, entry, kernels[family]))
        if not context.stub:
            writer.write(f"generated/{family}_launchers.h", rendering.launchers_header(entry))
        for lowered in kernels[family]:
            writer.write(f"generated/{lowered.name}.cu", rendering.kernel_source(entry, lowered))
    if table.incumbent:
        writer.write("generated/paged_launch.cuh", rendering.paged_launch_header(context))
    for unit in units(context, kernels):
        for row in table.incumbent:
            if unit.name == row.name:
                writer.write(unit.source, rendering.incumbent_source(context, row))
    writer.write("symbols.txt", "".join(f"{name}\n" for name in abi.public_symbols(table)))
    cmake_includes = (_in_cmake(relative_includes), _in_cmake(incumbent_includes))
    writer.write("units.cmake", rendering.units_cmake(context, units(context, kernels), *cmake_includes))
    writer.write("tilepress.json", _record(context, kernels, relative_includes, incumbent_includes))
    writer.remove_others(keep=(root / "vendor").rglob("*"))
    return Tree(
        root,
        context,
        kernels,
        tuple(root / path for path in relative_includes),
        tuple(root / path for path in incumbent_includes),
    )


def _in_cmake(includes: Sequence[str]) -> list[str]:
    """Include directories as units.cmake writes them: those of the tree relative to it."""
    return [path if Path(path).is_absolute() else f"${{CMAKE_CURRENT_LIST_DIR}}/{path}" for path in includes]


def _copy_tree(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def _record(
    context: Context, kernels: Mapping[str, Sequence[Lowered]], includes: Sequence[str], incumbent_includes: Sequence[str]
) -> str:
    record = {
        "format": FORMAT,
        "table": context.table.model_dump(mode="json", by_alias=True, exclude_none=True),
        "arch": context.arch.name,
        "tier": context.tier,
        "kernel_includes": list(includes),
        "incumbent_includes": list(incumbent_includes),
        "kernels": {family: [asdict(lowered) for lowered in rows] for family, rows in kernels.items()},
    }
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


KERNELS: TypeAdapter[dict[str, tuple[Lowered, ...]]] = TypeAdapter(dict[str, tuple[Lowered, ...]])


def read(root: Path) -> Tree:
    """The tree that `emit` wrote to `root`. Raises OutputError where it is not one, or is of another format."""
    path = root / "tilepress.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OutputError(
            f"{root} is not an emitted tree: tilepress.json cannot be read ({error.strerror}). Write one with "
            "`python -m codegen emit --out DIR`."
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OutputError(f"{path} is damaged: {error}. Emit the tree again.") from error
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise OutputError(f"{path} has format {found!r}; this codegen reads format {FORMAT}. Emit the tree again.")
    try:
        table = parse(record["table"], path.name)
        context = Context(table, table.find_arch(record["arch"]), record["tier"])
        includes = tuple(root / part for part in record["kernel_includes"])
        incumbent_includes = tuple(root / part for part in record["incumbent_includes"])
        found_kernels = KERNELS.validate_python(record["kernels"])
        kernels = {family.name: found_kernels[family.name] for family in table.family}  # the file has them sorted
        tree = Tree(root, context, kernels, includes, incumbent_includes)
        units = tree.units
    except (AttributeError, KeyError, TypeError, ValidationError) as error:
        raise OutputError(f"{path} is damaged: {type(error).__name__}: {error}. Emit the tree again.") from error
    missing = [unit.source for unit in units if not (root / unit.source).is_file()]
    folders = (*record["kernel_includes"], *record["incumbent_includes"])
    missing += [str(part) for part in folders if not (root / part).is_dir()]
    if missing:
        raise OutputError(f"{root} lacks {', '.join(missing)}. Emit the tree again.")
    return tree
