"""Checks on a kernel before the library accepts it. Each is a small function from facts to failures, none a message.

`LOWERED_GATES` look at the lowered kernel, `COMPILED_GATES` at what the compiler said of it. A failure names the kernel, the
gate and, where there is one, the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from codegen.errors import GateError
from codegen.lowered import Lowered
from codegen.table import Arch


@dataclass(frozen=True)
class Subject:
    """A lowered kernel, with what its row and its operation's ABI say of it.

    known_names: what the launcher can bind. tma: whether the row asks for the bulk tensor copy.
    """

    lowered: Lowered
    arch: Arch
    known_names: frozenset[str]
    tma: bool


@dataclass(frozen=True)
class Failure:
    """One reason to refuse a kernel. line: of the text the gate read, 1-based; 0 where it is about no line."""

    gate: str
    kernel: str
    why: str
    line: int = 0

    def __str__(self) -> str:
        where = f", line {self.line}" if self.line else ""
        return f"{self.kernel}: gate '{self.gate}'{where}: {self.why}"


@dataclass(frozen=True)
class Resources:
    """What ptxas reported of a kernel: registers a thread, bytes of stack, spills and static shared memory, barriers."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    barriers: int


Gate = Callable[[Subject], Iterator[Failure]]
CompiledGate = Callable[[Subject, str], Iterator[Failure]]


def shared_memory(subject: Subject) -> Iterator[Failure]:
    """Dynamic shared memory and the reserved part fit a block of the arch: TileLang itself has no such limit."""
    need = subject.lowered.dynamic_shared_bytes + subject.arch.reserved_shared_memory_bytes
    if need > subject.arch.shared_memory_bytes:
        yield Failure(
            "shared_memory",
            subject.lowered.name,
            f"needs {need} bytes ({subject.lowered.dynamic_shared_bytes} dynamic and "
            f"{subject.arch.reserved_shared_memory_bytes} reserved); {subject.arch.target} has "
            f"{subject.arch.shared_memory_bytes} a block",
        )


ENTRY = re.compile(r"__global__[^;{()]*(?:__launch_bounds__\([^)]*\)[^;{()]*)?\b(\w+)\s*\([^;{]*\)\s*\{")
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def _code(source: str) -> str:
    """The source with comments and the insides of strings blanked; every character keeps its place."""

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        if text.startswith('"'):
            return '"' + " " * (len(text) - 2) + '"'
        return re.sub(r"[^\n]", " ", text)

    return COMMENT_OR_STRING.sub(blank, source)


def one_entry(subject: Subject) -> Iterator[Failure]:
    """The source defines exactly one __global__ function, the launched one."""
    source = _code(subject.lowered.source)
    found = [(match.group(1), _line(source, match.start())) for match in ENTRY.finditer(source)]
    names = [name for name, _ in found]
    if names != [subject.lowered.kernel]:
        line = found[1][1] if len(found) > 1 else found[0][1] if found else 0
        yield Failure(
            "one_entry",
            subject.lowered.name,
            f"the source defines the entries {names}; exactly '{subject.lowered.kernel}' is expected",
            line,
        )


def parameters_bound(subject: Subject) -> Iterator[Failure]:
    """Every parameter, tensor and extent is a field of the argument struct or a launch value."""
    for name in sorted(subject.lowered.bound_names - subject.known_names):
        yield Failure(
            "parameters_bound",
            subject.lowered.name,
            f"'{name}' is neither a field of the argument struct nor a launch value; known: "
            f"{', '.join(sorted(subject.known_names))}",
        )


def bulk_copies(subject: Subject) -> Iterator[Failure]:
    """Where the row asks for it, tiles are loaded by tensor maps, and every map is used."""
    if not subject.tma:
        return
    source = re.sub(r"\btma_(?:load|load_multicast|store)(?:<[^<>]*>)?\(", "tma_load(", _code(subject.lowered.source))
    if not subject.lowered.tensor_maps:
        yield Failure("bulk_copies", subject.lowered.name, "the row asks for tma, but the kernel has no tensor map")
    for tensor_map in subject.lowered.tensor_maps:
        if f"tma_load({tensor_map.name}," not in source:
            yield Failure(
                "bulk_copies", subject.lowered.name, f"tensor map '{tensor_map.name}' is encoded, but no copy uses it"
            )


BARRIER = re.compile(r"\b__syncthreads\(\)|\b__sync_thread_partial\(")
ASSIGNMENT = re.compile(r"(?<![=!<>])(?:[+\-*/%&|^]|<<|>>)?=(?!=)")


def merge_barrier(subject: Subject) -> Iterator[Failure]:
    """A kernel that folds slots in place has a barrier between the group's last read of a buffer and its first store.

    Held for every kernel whose name contains `merge_groups`, on its text: for each pointer parameter that is both read and
    written. Without one, a thread stores over what another has yet to read. Whatever is no plain read or store (an atomic, a
    compound assignment, the pointer passed on or kept) counts as both.
    """
    lowered = subject.lowered
    if "merge_groups" not in lowered.name and "merge_groups" not in lowered.kernel:
        return
    source = _code(lowered.source)
    body_at = source.rfind(f"{lowered.kernel}(")
    opening = source.find("{", body_at) if body_at >= 0 else -1
    if opening < 0:
        return  # one_entry refuses it
    for param in lowered.params:
        if param.kind != "pointer":
            continue
        stores, loads = _accesses(source, param.name, opening)
        if not stores or not loads:
            continue
        first_store = min(stores)
        before = [load for load in loads if load <= first_store]
        after = [load for load in loads if load > first_store]
        if after:
            yield Failure(
                "merge_barrier", lowered.name, f"'{param.name}' is read again after its first store", _line(source, after[0])
            )
        elif not _barrier_between(source, max(before), first_store):
            yield Failure(
                "merge_barrier",
                lowered.name,
                f"no barrier between the last read of '{param.name}' (line {_line(source, max(before))}) and its first store",
                _line(source, first_store),
            )


def _barrier_between(source: str, start: int, end: int) -> bool:
    """Whether every path from `start` to `end` meets a barrier: one whose block is still open at `end`, under no condition."""
    for match in BARRIER.finditer(source, start, end):
        depth = 0
        for mark in source[match.end() : end]:
            depth += (mark == "{") - (mark == "}")
            if depth < 0:
                break
        else:
            statement = source[max(source.rfind(mark, 0, match.start()) for mark in ";{}") + 1 : match.start()]
            if not re.search(r"\b(if|else|for|while)\b", statement):
                return True
    return False


def _accesses(source: str, name: str, opening: int) -> tuple[list[int], list[int]]:
    """Positions where a kernel's body stores to and loads from the pointer parameter `name`.

    A statement whose left side dereferences the pointer is a store; a dereference anywhere else is a load.
    """
    stores: list[int] = []
    loads: list[int] = []
    for match in re.finditer(rf"(?<![\w.])(?<!->){re.escape(name)}\b", source[opening:]):
        at = opening + match.start()
        start = max(source.rfind(mark, 0, at) for mark in ";{}") + 1
        end = min((position for mark in ";{" if (position := source.find(mark, at)) >= 0), default=len(source))
        statement, offset = source[start:end], at - start
        assignment = ASSIGNMENT.search(statement)
        if assignment is not None and offset < assignment.start():
            stores.append(at)
            if assignment.group() != "=":
                loads.append(at)
        elif _plain_read(statement, offset, len(name)):
            loads.append(at)
        else:
            stores.append(at)
            loads.append(at)
    return stores, loads


def _plain_read(statement: str, offset: int, length: int) -> bool:
    """Whether the pointer at `offset` is dereferenced there, `p[…]` or `*(T*)(p + …)`, and its address not taken."""
    before, after = statement[:offset].rstrip(), statement[offset + length :].lstrip()
    if re.search(r"(\+\+|--)", statement) and not re.search(r"\bfor\b", statement):
        return False
    if after.startswith("["):
        return re.search(r"(?<!&)&\s*\(*$", before) is None
    return re.search(r"\*\s*(?:\((?:const )?\w+\s*\*\)|reinterpret_cast<[^>]*>)\s*\($", before) is not None


RACE_WORDS = re.compile(r"\braces?\b|\bracy\b|data hazard|hoist(?:ed|ing)|divergent|missing sync", re.IGNORECASE)


def lowering_warnings(subject: Subject) -> Iterator[Failure]:
    """A warning of a race from the lowering is an error: TileLang 0.1.14 only warned where the race remained."""
    for number, line in enumerate(subject.lowered.log.splitlines(), start=1):
        if RACE_WORDS.search(line):
            yield Failure("lowering_warnings", subject.lowered.name, f"TileLang warns: {line.strip()}", number)


def no_spills(subject: Subject, log: str) -> Iterator[Failure]:
    """ptxas reports no stack frame and no spilled bytes."""
    found = resources(subject.lowered.kernel, log)
    if found is None:
        yield Failure("no_spills", subject.lowered.name, f"the compiler reported no resources of '{subject.lowered.kernel}'")
    elif found.stack_bytes or found.spill_store_bytes or found.spill_load_bytes:
        yield Failure(
            "no_spills",
            subject.lowered.name,
            f"{found.stack_bytes} bytes of stack, {found.spill_store_bytes} of spill stores, "
            f"{found.spill_load_bytes} of spill loads",
            _line_of(log, "spill stores", f"Compiling entry function '{subject.lowered.kernel}'"),
        )


def register_file(subject: Subject, log: str) -> Iterator[Failure]:
    """A block's registers fit the arch's file. A warp is given them 256 at a time: eight a thread."""
    found = resources(subject.lowered.kernel, log)
    x, y, z = subject.lowered.block
    if found is not None and -(-found.registers // 8) * 8 * x * y * z > subject.arch.max_registers:
        yield Failure(
            "register_file",
            subject.lowered.name,
            f"{found.registers} registers by {x * y * z} threads exceed {subject.arch.max_registers} a block",
        )


def static_shared_memory(subject: Subject, log: str) -> Iterator[Failure]:
    """Dynamic and static shared memory together fit a block; what ptxas counts as static is at most the reserved part."""
    found = resources(subject.lowered.kernel, log)
    if found is not None and found.static_shared_bytes > subject.arch.reserved_shared_memory_bytes:
        yield Failure(
            "static_shared_memory",
            subject.lowered.name,
            f"{found.static_shared_bytes} bytes of static shared memory exceed the "
            f"{subject.arch.reserved_shared_memory_bytes} that the launch's check reserves",
        )


# ptxas serialises wgmma or ignores setmaxnreg with an information line only.
PTXAS_LOSSES = re.compile(r"\(?(C7508|C7510|C7511)\)?|wgmma\.mma_async instructions are serialized|setmaxnreg ignored")


def tensor_core_pipeline(subject: Subject, log: str) -> Iterator[Failure]:
    """ptxas neither serialises wgmma nor ignores setmaxnreg."""
    for number, line in enumerate(log.splitlines(), start=1):
        if PTXAS_LOSSES.search(line):
            yield Failure("tensor_core_pipeline", subject.lowered.name, f"ptxas says: {line.strip()}", number)


LOWERED_GATES: tuple[Gate, ...] = (
    shared_memory,
    one_entry,
    parameters_bound,
    bulk_copies,
    merge_barrier,
    lowering_warnings,
)
COMPILED_GATES: tuple[CompiledGate, ...] = (no_spills, register_file, static_shared_memory, tensor_core_pipeline)


def check_lowered(subjects: Iterable[Subject]) -> None:
    """Raises GateError with every failure of the lowered kernels."""
    _refuse(failure for subject in subjects for gate in LOWERED_GATES for failure in gate(subject))


def check_compiled(subjects: Iterable[tuple[Subject, str]]) -> None:
    """Raises GateError with every failure of the compiled kernels, each given with its compiler's output."""
    _refuse(failure for subject, log in subjects for gate in COMPILED_GATES for failure in gate(subject, log))


def _refuse(failures: Iterable[Failure]) -> None:
    lines = [str(failure) for failure in failures]
    if lines:
        raise GateError("\n".join([*lines, "Change the kernel; a gate is never relaxed for a build."]))


RESOURCES = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'(?:(?!Compiling entry).)*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"(?:(?!Compiling entry).)*?"
    r"Used (?P<registers>\d+) registers(?:, used (?P<barriers>\d+) barriers)?(?P<rest>[^\n]*)",
    re.DOTALL,
)


def resources(kernel: str, log: str) -> Resources | None:
    """What `ptxas --verbose` says of `kernel` in a compiler's output, or None where it says nothing."""
    for match in RESOURCES.finditer(log):
        if match["kernel"] == kernel:
            shared = re.search(r"(\d+) bytes smem", match["rest"])
            return Resources(
                registers=int(match["registers"]),
                stack_bytes=int(match["stack"]),
                spill_store_bytes=int(match["stores"]),
                spill_load_bytes=int(match["loads"]),
                static_shared_bytes=int(shared[1]) if shared else 0,
                barriers=int(match["barriers"] or 0),
            )
    return None


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _line_of(text: str, needle: str, after: str) -> int:
    return _line(text, text.find(needle, text.find(after)))
