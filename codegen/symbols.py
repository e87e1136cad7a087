"""What `nm` exports, per object and for the archive, against the committed lists. A difference is an error that prints it.

A list is a text file of one `TYPE NAME` a line, as nm prints them: `archive.txt` for the library and `objects/UNIT.txt` for
each relinked object. nm shows hidden symbols too, so the lists hold what a linker sees, not what a header says.
"""

from __future__ import annotations

import difflib
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen import abi
from codegen.errors import SymbolError, ToolchainError
from codegen.table import Table
from codegen.tree import ROOT

DEFAULT_LISTS = ROOT / "build_tools" / "symbols"
ARCHIVE = "archive.txt"


@dataclass(frozen=True)
class Built:
    """The files of a build whose exports are held. objects: by unit."""

    archive: Path
    objects: Mapping[str, Path]


def exported(path: Path) -> tuple[str, ...]:
    """The defined external symbols of an object or archive, `TYPE NAME`, sorted."""
    nm = shutil.which("nm")
    if nm is None:
        raise ToolchainError("nm is missing. Install binutils (the C++ compiler's package usually brings it).")
    done = subprocess.run(
        [nm, "--defined-only", "--extern-only", "--format=posix", path], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SymbolError(f"nm cannot read {path}: {done.stderr.strip()}. Build again.")
    rows = (line.split() for line in done.stdout.splitlines())
    return tuple(sorted(f"{row[1]} {row[0]}" for row in rows if len(row) >= 2 and not row[-1].endswith(":")))


def expected_archive(lists: Path, table: Table, selected: Table) -> tuple[str, ...]:
    """The committed archive list, less the entries of rows that `selected` leaves out of `table`."""
    left_out = {f"T {name}" for name in set(abi.public_symbols(table)) - set(abi.public_symbols(selected))}
    return tuple(line for line in _read(lists / ARCHIVE) if line not in left_out)


def verify(built: Built, lists: Path, table: Table, selected: Table, stub: bool) -> None:
    """Raises SymbolError with the diff of every list that differs.

    A stub exports the same symbols from the archive; its objects hold no launchers, so only the archive is compared.
    """
    diffs = _diff(lists / ARCHIVE, expected_archive(lists, table, selected), exported(built.archive))
    if not stub:
        for unit, path in sorted(built.objects.items()):
            name = lists / "objects" / f"{unit}.txt"
            diffs += _diff(name, _read(name), exported(path))
        if selected == table:
            for name in sorted((lists / "objects").glob("*.txt")):
                if name.stem not in built.objects:
                    diffs += _diff(name, _read(name), ())
    if diffs:
        raise SymbolError(
            "\n".join(diffs) + "\nExports differ from the committed lists. If the change is meant, review it and run "
            "`python -m codegen verify --update`."
        )


def update(built: Built, lists: Path, stub: bool) -> list[Path]:
    """Rewrites the lists from a whole build, and removes those of units that are gone. Returns what it wrote."""
    if stub:
        raise SymbolError("A stub has no objects to list. Build without --stub, then run verify --update.")
    objects = lists / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    written = [lists / ARCHIVE]
    _write(lists / ARCHIVE, exported(built.archive))
    for unit, path in built.objects.items():
        _write(objects / f"{unit}.txt", exported(path))
        written.append(objects / f"{unit}.txt")
    for old in objects.glob("*.txt"):
        if old not in written:
            old.unlink()
    return written


def _read(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _diff(path: Path, expected: Sequence[str], found: Sequence[str]) -> list[str]:
    return list(difflib.unified_diff(expected, found, f"committed {path.name}", f"built {path.name}", lineterm="", n=0))
