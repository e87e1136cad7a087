"""Every way a command can fail, one exception class and one exit code each.

A message names what was wrong and ends with the next step. `cli` prints it and exits with the class's code; the table of
codes in `--help` is rendered from these classes, so it cannot drift from them.
"""

from __future__ import annotations

from typing import ClassVar


class TilepressError(Exception):
    """Base of every expected failure; anything else is a bug and keeps its traceback (exit code 1)."""

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "a defect in codegen itself, with a traceback"


class TableError(TilepressError):
    """families.toml is not acceptable: the message names file, row, field and what is allowed."""

    exit_code = 3
    meaning = "families.toml, an arch or a family name is not acceptable"


class ToolchainError(TilepressError):
    """A tool the build needs is absent or of the wrong version: nvcc, a C++ compiler, CMake, ninja, binutils."""

    exit_code = 4
    meaning = "a compiler or build tool is missing or of the wrong version"


class LoweringError(TilepressError):
    """TileLang is absent, of another version, or refused a kernel; or a launch fact is unknown to our tables."""

    exit_code = 5
    meaning = "TileLang is missing, of another version, or a kernel does not lower"


class GateError(TilepressError):
    """A lowered or compiled kernel fails a gate: the message names kernel, gate and line."""

    exit_code = 6
    meaning = "a kernel fails a gate"


class CompileError(TilepressError):
    """CMake, ninja, the compiler or the linker failed; the message holds the tail of its output."""

    exit_code = 7
    meaning = "the compiler, CMake or ninja failed"


class SymbolError(TilepressError):
    """Exported symbols differ from the committed lists; the message is the diff."""

    exit_code = 8
    meaning = "exported symbols differ from the committed lists"


class OutputError(TilepressError):
    """An output directory or file cannot be written, or an input tree is not one that codegen wrote."""

    exit_code = 9
    meaning = "an output cannot be written or an input tree is not usable"


EXIT_CODES: tuple[type[TilepressError], ...] = (
    TilepressError,
    TableError,
    ToolchainError,
    LoweringError,
    GateError,
    CompileError,
    SymbolError,
    OutputError,
)
