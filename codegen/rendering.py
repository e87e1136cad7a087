"""Text out of records and Jinja2 templates, and the one writer of files.

Undefined names in a template are errors. The writer writes only what changed and refuses to write a path twice.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from codegen import abi
from codegen.abi import Entry, FamilyEntry, Field, HandWritten, Incumbent, Routed, Struct
from codegen.abi.prep import BULK_BYTES
from codegen.abi.routes import TILE_PLANNER
from codegen.errors import OutputError
from codegen.formats import FORMATS, ROTATED
from codegen.incumbent import DECODE_GROUPS, KEY_FRAGMENTS
from codegen.lowered import Lowered
from codegen.modes import MODES, VARIABLE
from codegen.table import Arch, IncumbentUnit, Table

WIDTH = 120

# TileLang's element dtypes as the CUDA text spells them.
ELEMENT_TYPES = {"bfloat16": "bfloat16_t", "float32": "float", "int32": "int"}


def comment(text: str, indent: int = 0) -> str:
    """`text` as a C block comment, wrapped, `indent` spaces in."""
    pad = " " * indent
    lines = textwrap.wrap(text, WIDTH - indent - 6)
    return pad + "/* " + f"\n{pad} * ".join(lines) + " */"


def describe(field: Field) -> str:
    """A field's shape, memory, limits and meaning, as one sentence."""
    facts = [part for part in (field.shape, _memory(field), _number_limits(field)) if part]
    return f"{field.doc}{' (' + '; '.join(facts) + ')' if facts else ''}."


def describe_entry(entry: Entry) -> str:
    """What an entry does and, where a row made it, what it is compiled for."""
    compiled = ""
    if isinstance(entry, FamilyEntry):
        family = entry.family
        compiled = (
            f" Compiled for head_dim {family.head_dim}, page_size {family.page_size}, page formats "
            f"{', '.join(family.formats)}, groups (num_q_heads / num_kv_heads) {', '.join(map(str, family.groups))}."
        )
    return f"{entry.doc}{compiled} Returns a TILEPRESS_* code."


def limits(field: Field) -> str:
    """A field's array or limits, for a table cell."""
    return "; ".join(part for part in (field.shape, _memory(field), _number_limits(field)) if part)


def _memory(field: Field) -> str:
    words = [field.memory.value] if field.memory else []
    if field.optional:
        words.append("optional")
    if field.align > 4:
        words.append(f"aligned to {field.align} bytes")
    return ", ".join(words)


def _number_limits(field: Field) -> str:
    words = []
    if field.minimum is not None and field.maximum is not None:
        words.append(f"{field.minimum} to {field.maximum}")
    elif field.minimum is not None:
        words.append(f"{field.minimum} or more")
    elif field.maximum is not None:
        words.append(f"{field.maximum} or less")
    if field.multiple > 1:
        words.append(f"a multiple of {field.multiple}")
    return ", ".join(words)


def braced(values: Sequence[str], ctype: str) -> str:
    """A C initialiser list whose elements are cast."""
    return "{" + ", ".join(f"static_cast<{ctype}>({value})" for value in values) + "}"


def cstring(text: str) -> str:
    """A C string literal."""
    return json.dumps(text)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("codegen", "templates"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    for function in (comment, describe, describe_entry, limits, braced, cstring):
        environment.filters[function.__name__] = function
    return environment


ENVIRONMENT = _environment()


def render(template: str, **values: object) -> str:
    """One template's text."""
    return ENVIRONMENT.get_template(template).render(**values)


@dataclass(frozen=True)
class Context:
    """What every rendered file may depend on besides a kernel: the table, the arch and the tier."""

    table: Table
    arch: Arch
    tier: Literal["generate", "stub"]

    @property
    def stub(self) -> bool:
        """Whether the library has entries but no kernels."""
        return self.tier == "stub"


@dataclass(frozen=True)
class Unit:
    """One object of the library: a source file of the generated tree, compiled with `flags` beyond the common ones."""

    name: str
    source: str
    flags: tuple[str, ...] = ()
    incumbent: bool = False


HOST_SOURCES = ("error.cpp", "instances.cpp", "modes.cpp", "pool.cpp")
CUDA_HOST_SOURCES = ("cuda_host.cpp",)


def public_values(table: Table) -> dict[str, object]:
    """What the templates of the public surfaces (header, Rust, Python, documentation) are rendered with."""
    return {
        "library": table.library,
        "return_codes": abi.RETURN_CODES,
        "page_formats": abi.PAGE_FORMATS,
        "modes": abi.MODE_CODES,
        "status_bits": abi.STATUS_BITS,
        "structs": abi.structs(table),
        "entries": abi.entries(table),
        "family_entries": abi.family_entries(table),
        "hand_written": abi.hand_written(table),
        "routes": abi.routes(table),
        "functions": abi.FUNCTIONS,
        "incumbent": abi.incumbent(table),
        "incumbent_params": abi.incumbent_params(table),
        "incumbent_refusals": abi.INCUMBENT_REFUSALS,
    }


def header(table: Table) -> str:
    """tilepress.h."""
    return render("tilepress.h.j2", **public_values(table))


def rust_bindings(table: Table) -> str:
    """tilepress_sys.rs."""
    return render("tilepress_sys.rs.j2", **public_values(table))


def python_bindings(table: Table) -> str:
    """The pybind11 module."""
    return render("python.cpp.j2", **public_values(table))


def abi_document(table: Table) -> str:
    """docs/abi.md."""
    return render("abi.md.j2", **public_values(table))


def paged_launch_header(context: Context) -> str:
    """paged_launch.cuh: the incumbent's checks and launch bodies."""
    return render(
        "paged_launch.cuh.j2",
        stub=context.stub,
        arch=_capability(context.arch),
        params=[(name, ctype) for name, (ctype, _doc) in abi.INCUMBENT_PARAMS.items()],
        decode_groups=DECODE_GROUPS,
        key_fragments=KEY_FRAGMENTS,
    )


def incumbent_source(context: Context, unit: IncumbentUnit) -> str:
    """A unit of the incumbent: its entries."""
    entries = [entry for entry in abi.incumbent(context.table) if entry.unit == unit.name]
    return render(
        "incumbent.cu.j2", unit=unit, entries=[(entry, incumbent_body(entry, unit), _arguments(entry)) for entry in entries]
    )


def incumbent_body(entry: Incumbent, unit: IncumbentUnit) -> str:
    """The launch body or planner that an entry instantiates."""
    dims = entry.head_dims or unit.head_dims
    instances = ", ".join(map(str, dims))
    return f"{entry.body}<{instances}>" if entry.planner else f"launch<{entry.body}, {entry.variant}, {instances}>"


def _arguments(entry: Incumbent) -> str:
    """The entry's Call, in the order of its fields; a head_dim that is no parameter is the one the entry fixes."""
    names = {name for _ctype, name in entry.params}
    values = [f".{name} = {name}" for name in abi.INCUMBENT_PARAMS if name in names]
    if "head_dim" not in names:
        at = list(abi.INCUMBENT_PARAMS).index("head_dim")
        before = sum(name in names for name in list(abi.INCUMBENT_PARAMS)[:at])
        values.insert(before, f".head_dim = {entry.head_dims[0]}")
    return ", ".join([f'.entry = "{entry.name}"', *values])


def page_formats_header() -> str:
    """page_formats.h: what a page of each format holds, for the C sources."""
    return render("page_formats.h.j2", formats=list(FORMATS.values()))


def modes_header() -> str:
    """modes.h: what the knob's modes are, for the C sources."""
    return render("modes.h.j2", modes=list(MODES.values()), variable=VARIABLE)


def routed_source(entry: Routed) -> str:
    """A routed entry. In a library without its incumbent, that mode is refused."""
    return render(
        "routed.cpp.j2",
        entry=entry,
        tile_planner=TILE_PLANNER,
        has_head_dim=any(field.name == "head_dim" for field in entry.struct.fields),
        decode_groups=DECODE_GROUPS,
        **_checked(entry.struct),
    )


def prep_header() -> str:
    """qk_prep.cuh: the device code and the launch that the preps share."""
    return render("qk_prep.cuh.j2", rotated=ROTATED, bulk_bytes=BULK_BYTES)


def hand_written_header(table: Table) -> str:
    """Declarations of the hand-written entries' bodies."""
    return render("hand_written.h.j2", entries=abi.hand_written(table))


def hand_written_source(context: Context, entry: HandWritten) -> str:
    """A hand-written entry's checks."""
    return render(
        "hand_written.cpp.j2", entry=entry, stub=context.stub, arch=_capability(context.arch), **_checked(entry.struct)
    )


def _checked(struct: Struct) -> dict[str, object]:
    """What the checks of a struct's fields are rendered from."""
    return {
        "numbers": [field for field in struct.fields if not field.type.pointer and field.name != "struct_size"],
        "pointers": [field for field in struct.fields if field.type.pointer],
    }


def _capability(arch: Arch) -> dict[str, str]:
    major, minor = arch.compute_capability.split(".")
    return {"major": major, "minor": minor}


def launch_struct(entry: FamilyEntry) -> str:
    """The C++ struct of an operation's launch values, in csrc/<operation>.h."""
    return f"{entry.operation.name.title().replace('_', '')}Launch"


def entry_source(context: Context, entry: FamilyEntry, kernels: Sequence[Lowered]) -> str:
    """The entry's checks and its choice of kernels. Shared memory is the largest need among them."""
    reserved = context.arch.reserved_shared_memory_bytes
    need = max((kernel.dynamic_shared_bytes for kernel in kernels), default=0) + reserved
    stages = [list(kernels) for _, kernels in groupby(entry.family.kernels, key=lambda kernel: kernel.stage)]
    return render(
        "entry.cpp.j2",
        entry=entry,
        stub=context.stub,
        launch_struct=launch_struct(entry),
        stages=stages,
        arch=_capability(context.arch),
        shared_memory_bytes=need,
        **_checked(entry.struct),
    )


def launchers_header(entry: FamilyEntry) -> str:
    """Declarations of a family's launchers."""
    return render("launchers.h.j2", entry=entry, launch_struct=launch_struct(entry))


def kernel_source(entry: FamilyEntry, lowered: Lowered) -> str:
    """A kernel's CUDA text followed by its launcher."""
    derived = set(entry.operation.derived)
    bound = [
        {"local": name, "value": f"{'values' if name in derived else 'args'}.{name}"}
        for name in sorted(lowered.bound_names - abi.LAUNCHER_NAMES)
    ]
    return render(
        "kernel.cu.j2",
        entry=entry,
        lowered=lowered,
        launch_struct=launch_struct(entry),
        bound=bound,
        asks_clusters="resident_clusters" in lowered.bound_names,
        element_types=ELEMENT_TYPES,
    )


def library_source(context: Context) -> str:
    """Version, build info and the table of instances."""
    instances = [instance for family in context.table.family for instance in family.instances]
    hashes = [entry.signature_hash for entry in abi.entries(context.table)]
    hashes += [entry.signature_hash for entry in abi.incumbent(context.table)]
    return render(
        "library.cpp.j2",
        library=context.table.library,
        arch=context.arch,
        tier=context.tier,
        instances=instances,
        abi_hash=abi.digest(" ".join(hashes))[:16],
    )


def units_cmake(
    context: Context, units: Sequence[Unit], kernel_includes: Sequence[str], incumbent_includes: Sequence[str]
) -> str:
    """units.cmake: what CMakeLists.txt builds."""
    return render(
        "units.cmake.j2",
        library=context.table.library,
        arch=context.arch,
        stub=context.stub,
        units=units,
        kernel_includes=kernel_includes,
        incumbent_includes=incumbent_includes,
    )


@dataclass
class FileWriter:
    """Writes text files under `root`: only what changed, no path twice. `paths` lists all it was asked to write."""

    root: Path
    paths: list[Path] = field(default_factory=list)

    def write(self, relative: str, text: str) -> Path:
        """Writes `text` to `root / relative`."""
        path = self.root / relative
        if path in self.paths:
            raise OutputError(f"{path} would be written twice; two units have one name. Rename one.")
        self.paths.append(path)
        try:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path} cannot be written ({error.strerror}). Choose another directory with --out.") from error
        return path

    def remove_others(self, keep: Iterable[Path] = ()) -> None:
        """Removes files under `root` that this writer did not write and `keep` does not hold: what a vanished row left."""
        kept = set(self.paths) | set(keep)
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path.is_file() and path not in kept:
                path.unlink()
