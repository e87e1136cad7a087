"""families.toml read into frozen, validated records. An error names file, row and field, and says what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from codegen.errors import TableError
from codegen.incumbent import UNITS, VARIANTS
from codegen.kernels import OPERATIONS, Stage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Positive = Annotated[int, Field(gt=0)]
Layer = Literal["global", "sliding"]


LAYERS: tuple[Layer, ...] = ("global", "sliding")
SHARDS = (1, 2, 4, 8)  # GPUs that a model's heads are dealt out to


class Row(BaseModel):
    """A row: unknown keys, missing keys and values of another type are errors; nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Library(Row):
    """The library's name and version, and the one TileLang release it is generated with."""

    name: Identifier
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    tilelang: str


class Arch(Row):
    """A GPU architecture. Sizes in bytes per block; `max_registers` counts 32-bit registers per block."""

    name: str
    target: str
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    shared_memory_bytes: Positive
    reserved_shared_memory_bytes: Positive
    max_registers: Positive

    @property
    def cmake(self) -> str:
        """CMAKE_CUDA_ARCHITECTURES: machine code alone, since PTX for the plain arch rejects setmaxnreg."""
        return f"{self.target.removeprefix('sm_')}-real"


class Heads(Row):
    """One attention kind of a model. `window` counts the tokens a sliding layer sees, the query's own included."""

    layers: Positive
    q_heads: Positive
    kv_heads: Positive
    head_dim: Positive
    window: Positive | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def shards(self) -> dict[int, Heads]:
        """What each GPU of a tensor-parallel group has, by the number of GPUs, where that divides both head counts."""
        return {
            gpus: self.model_copy(update={"q_heads": self.q_heads // gpus, "kv_heads": self.kv_heads // gpus})
            for gpus in SHARDS
            if self.q_heads % gpus == 0 and self.kv_heads % gpus == 0
        }


class Model(Row):
    """A model size. `k_eq_v`: V of the global layers is K's projection, which the folded format needs."""

    name: str
    k_eq_v: bool
    global_: Annotated[Heads, Field(alias="global")]
    sliding: Heads

    def heads(self, layer: Layer) -> Heads:
        """The heads of one attention kind."""
        return self.global_ if layer == "global" else self.sliding


class Family(Row):
    """One public entry, compiled for each of `groups` and `formats`.

    incumbent: the entry that its routed form calls in the incumbent's mode; without one it has no routed form.
    """

    name: Identifier
    operation: str
    layer: Layer
    head_dim: Positive
    page_size: Positive
    groups: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)]
    formats: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    tma: bool
    incumbent: str | None = None

    @property
    def entry(self) -> str:
        """The exported symbol."""
        return f"tilepress_{self.name}"

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The compiled instances, in a fixed order."""
        return tuple(Instance(family=self, group=g, page_format=f) for f in self.formats for g in self.groups)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The compiled kernels, in launch order."""
        found: list[Kernel] = []
        for stage in OPERATIONS[self.operation].stages:
            if stage.per_instance:
                found += [Kernel(self, stage, i.group, i.page_format) for i in self.instances]
            else:
                found.append(Kernel(self, stage, 0, ""))
        return tuple(found)


class Instance(Row):
    """A geometry that a family serves."""

    family: Family
    group: int
    page_format: str


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel of a family. group and page_format are 0 and empty where one serves the whole family."""

    family: Family
    stage: Stage
    group: int
    page_format: str

    @property
    def name(self) -> str:
        """The kernel's name, its unit's file name and its launcher's suffix; the one place that forms it."""
        instance = f"g{self.group}_{self.page_format}" if self.stage.per_instance else ""
        return "_".join(part for part in (self.family.name, self.stage.name, instance) if part)


class FlashInfer(Row):
    """The FlashInfer release that the incumbent's units are built over: its PyPI wheel, pinned by hash."""

    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    wheel_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"flashinfer-python=={self.version}"


class IncumbentUnit(Row):
    """A translation unit of the incumbent's entries, compiled for each of `head_dims` and `variants`."""

    name: Identifier
    head_dims: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)]
    variants: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]


class Table(Row):
    """families.toml as a whole. incumbent may be empty; flashinfer is there where it is not."""

    library: Library
    arch: Annotated[tuple[Arch, ...], Field(min_length=1, strict=False)]
    model: Annotated[tuple[Model, ...], Field(min_length=1, strict=False)]
    family: Annotated[tuple[Family, ...], Field(min_length=1, strict=False)]
    flashinfer: FlashInfer | None = None
    incumbent: Annotated[tuple[IncumbentUnit, ...], Field(strict=False)] = ()

    def find_arch(self, name: str) -> Arch:
        """The arch called `name`, by its own name or its target's; an unknown one is an error that lists the known."""
        for arch in self.arch:
            if name in (arch.name, arch.target):
                return arch
        known = ", ".join(f"{arch.name} (compiled as {arch.target})" for arch in self.arch)
        raise TableError(f"unknown arch '{name}'; known: {known}. Pass one of them to --arch.")

    def select(self, names: Iterable[str], without: Iterable[str] = ()) -> Table:
        """The table with only the named families; no names keeps all. without: "incumbent" leaves its rows out."""
        if "incumbent" in without:
            return self.model_copy(update={"incumbent": ()}).select(names)
        wanted = tuple(names)
        known = {family.name for family in self.family}
        for name in wanted:
            if name not in known:
                raise TableError(f"unknown family '{name}'; known: {', '.join(sorted(known))}. Pass one of them to --family.")
        if not wanted:
            return self
        return self.model_copy(update={"family": tuple(f for f in self.family if f.name in wanted)})


def load(path: Path) -> Table:
    """Reads and checks the table at `path`.

    Raises TableError that names the file, the row, the field and what is allowed there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TableError(f"{path}: cannot be read ({error.strerror}). Pass the table with --table FILE.") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not UTF-8 text: {error}. Correct that byte.") from error
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{path}: not TOML: {error}. Correct that line.") from error
    return parse(raw, path.name)


def parse(raw: dict[str, Any], file: str) -> Table:
    """Checks `raw`, the parsed TOML of `file`: first each row's shape, then what rows say of one another."""
    try:
        table = Table.model_validate(raw)
    except ValidationError as error:
        raise TableError(_shape_message(error, raw, file)) from error
    for check in (_unique_names, _models, _families, _incumbent, _unit_names):
        check(table, lambda row, field, why: _fail(file, row, field, why))
    return table


Fail = Callable[[str, str, str], None]


def _fail(file: str, row: str, field: str, why: str) -> None:
    raise TableError(f"{file}: {row}: field '{field}': {why}. Correct the row and run again.")


def _unique_names(table: Table, fail: Fail) -> None:
    kinds: tuple[tuple[str, tuple[Arch | Model | Family | IncumbentUnit, ...]], ...] = (
        ("arch", table.arch),
        ("model", table.model),
        ("family", table.family),
        ("incumbent", table.incumbent),
    )
    for kind, rows in kinds:
        seen: set[str] = set()
        for row in rows:
            if row.name in seen:
                fail(f"[[{kind}]] '{row.name}'", "name", f"two [[{kind}]] rows have this name; names are unique")
            seen.add(row.name)


def _models(table: Table, fail: Fail) -> None:
    for model in table.model:
        for layer in LAYERS:
            heads = model.heads(layer)
            where = f"[[model]] '{model.name}'"
            if heads.q_heads % heads.kv_heads:
                fail(
                    where,
                    f"{layer}.kv_heads",
                    f"{heads.kv_heads} KV heads do not divide {heads.q_heads} query heads; allowed: a divisor",
                )
            if (heads.window is not None) != (layer == "sliding"):
                fail(where, f"{layer}.window", "a sliding layer has a window, a global layer has none")


def _families(table: Table, fail: Fail) -> None:
    for family in table.family:
        where = f"[[family]] '{family.name}'"
        operation = OPERATIONS.get(family.operation)
        if operation is None:
            fail(where, "operation", f"no kernel for '{family.operation}'; allowed: {_listed(OPERATIONS)}")
            continue
        if family.head_dim not in operation.head_dims:
            fail(
                where,
                "head_dim",
                f"operation '{operation.name}' has no kernel for head_dim {family.head_dim}; "
                f"allowed: {_listed(operation.head_dims)}",
            )
        if family.page_size != operation.key_tile:
            fail(
                where,
                "page_size",
                f"{family.page_size} is not the kernel's key tile, and a tile is one page; allowed: {operation.key_tile}",
            )
        for page_format in family.formats:
            if page_format not in operation.formats:
                fail(where, "formats", f"unknown format '{page_format}'; allowed: {_listed(operation.formats)}")
        for field, values in (("groups", family.groups), ("formats", family.formats)):
            if len(set(values)) != len(values):
                fail(where, field, f"a value stands twice in {list(values)}; each is one compiled instance")
        head_counts = {model.heads(family.layer).q_heads for model in table.model}
        steps = range(operation.group_multiple, operation.max_group + 1, operation.group_multiple)
        divisors = {group for count in head_counts for group in steps if count % group == 0}
        for group in family.groups:
            if group not in divisors:
                fail(
                    where,
                    "groups",
                    f"group {group} divides the {family.layer} query heads of no [[model]] "
                    f"({_listed(sorted(head_counts))}); allowed: {_listed(sorted(divisors))}",
                )


# Names that a family's entry, unit or generated file would collide with: the library's functions and its other units.
TAKEN_NAMES = frozenset(
    {
        *("build_info", "last_error", "mode_pool_bytes", "parse_mode", "pool_bytes", "supports", "version"),
        *("decode_plan", "decode_plan_size", "merge_states", "gelu_mul"),
        *("prep_global_prompt", "prep_global_decode", "prep_sliding_prompt", "prep_sliding_decode"),
        *("decode_plan_body", "merge_states_body", "activation_body", "prep_global_body", "prep_sliding_body"),
        *("cuda_host", "error", "instances", "library", "modes", "pool", "tilepress"),
        *("hand_written", "page_formats", "python"),
        *UNITS,
    }
)


def _unit_names(table: Table, fail: Fail) -> None:
    taken = set(TAKEN_NAMES)
    for family in table.family:
        where = f"[[family]] '{family.name}'"
        routed = (f"routed_{family.name}{role}" for role in ("", "_plan_size", "_plan")) if family.incumbent else ()
        for name in (family.name, *(kernel.name for kernel in family.kernels), *routed):
            if name in taken:
                fail(where, "name", f"'{name}' is already the name of a function or unit of the library; choose another")
            taken.add(name)


def _incumbent(table: Table, fail: Fail) -> None:
    if table.incumbent and table.flashinfer is None:
        fail("[flashinfer]", "version", "missing key; the [[incumbent]] rows need a FlashInfer release")
    for row in table.incumbent:
        where = f"[[incumbent]] '{row.name}'"
        unit = UNITS.get(row.name)
        if unit is None:
            fail(where, "name", f"no unit of the incumbent is called that; allowed: {_listed(UNITS)}")
            continue
        fields: tuple[tuple[str, Sequence[object], Sequence[object]], ...] = (
            ("head_dims", row.head_dims, unit.head_dims),
            ("variants", row.variants, [variant for variant in VARIANTS if variant in unit.variants]),
        )
        for field, values, allowed in fields:
            for value in values:
                if value not in allowed:
                    fail(where, field, f"the unit has no launch body for {value!r}; allowed: {_listed(allowed)}")
            if len(set(values)) != len(values):
                fail(where, field, f"a value stands twice in {list(values)}; each is one compiled instance")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _shape_message(error: ValidationError, raw: dict[str, Any], file: str) -> str:
    """One line for the first shape error: pydantic's location turned into row and field, and what is allowed there."""
    first = error.errors()[0]
    location = list(first["loc"])
    section = str(location.pop(0))
    row = f"[{section}]"
    if location and isinstance(location[0], int):
        index = location.pop(0)
        row = f"[[{section}]] {_row_name(raw, section, index)}"
    field = ".".join(str(part) for part in location) or section
    allowed: dict[str, Callable[[], str]] = {
        "extra_forbidden": lambda: f"unknown key; allowed: {_listed(_known_keys(section, location[:-1]))}",
        "missing": lambda: "missing key",
    }
    reason = allowed.get(first["type"], lambda: f"{first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}")
    return f"{file}: {row}: field '{field}': {reason()}. Correct the row and run again."


def _row_name(raw: dict[str, Any], section: str, index: int | str) -> str:
    rows = raw.get(section)
    row = rows[index] if isinstance(rows, list) and isinstance(index, int) else None
    name = row.get("name") if isinstance(row, dict) else None
    return f"'{name}'" if isinstance(name, str) else f"number {int(index) + 1}"


def _known_keys(section: str, path: list[int | str]) -> list[str]:
    models: dict[str, type[Row]] = {
        "library": Library,
        "arch": Arch,
        "model": Model,
        "family": Family,
        "flashinfer": FlashInfer,
        "incumbent": IncumbentUnit,
    }
    model = Heads if path else models.get(section, Table)
    return [field.alias or name for name, field in model.model_fields.items()]
