"""`python -m codegen` as a subprocess: its environment, what it left, and a narrow table that is quick to build."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What a user may have set and what would change a build under test.
IGNORED = ("TILEPRESS_CACHE", "CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER")


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it printed."""

    code: int
    stdout: str
    stderr: str

    def succeeded(self) -> Done:
        """Itself, or a failure of the test that shows the command's output."""
        assert self.code == 0, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        return self

    def failed(self, code: int, *parts: str) -> Done:
        """Itself, if it ended with this exit code, no traceback, and an error message that holds every part."""
        assert self.code == code, f"exit code {self.code}, expected {code}\n{self.stdout}\n{self.stderr}"
        assert "Traceback" not in self.stderr, self.stderr
        message = self.stderr[self.stderr.index("error: ") :]
        for part in parts:
            assert part in message, f"{part!r} is not in {message!r}"
        return self


Cli = Callable[..., Done]

# The kernels of the narrow table: every operation and page format, one group a row.
NARROW_KERNELS = (
    "global_prefill_g8_folded",
    "global_decode_partial_g8_folded",
    "global_decode_merge",
    "sliding_prefill_g4_split",
    "sliding_decode_g4_split",
)


@dataclass(frozen=True)
class Narrow:
    """A narrow table, its symbol lists, and where a full build of it lies."""

    table: Path
    lists: Path
    out: Path

    @property
    def options(self) -> tuple[str | Path, ...]:
        """What a command that builds it is given."""
        return ("--table", self.table, "--symbols", self.lists)


INCUMBENT_UNITS = ("paged_attention", "paged_attention_hd512")


def incumbent_rows() -> str:
    """What the committed table says of the incumbent: the last of its rows."""
    text = (ROOT / "families.toml").read_text(encoding="utf-8")
    return text[text.index("[flashinfer]") :]


def narrow_table(path: Path, more: str = "") -> Path:
    """The committed table with the middle one of each row's groups, one page format, no incumbent, and rows appended."""
    text = (ROOT / "families.toml").read_text(encoding="utf-8").removesuffix(incumbent_rows())
    text, rows = re.subn(r"^groups = \[\d+, (\d+), \d+\].*$", r"groups = [\1]", text, flags=re.MULTILINE)
    text, folded = re.subn(r'^formats = \["split", "folded"\]$', 'formats = ["folded"]', text, flags=re.MULTILINE)
    assert (rows, folded) == (4, 2)
    path.write_text(text + more, encoding="utf-8")
    return path


def narrow_lists(folder: Path, *units: str) -> Path:
    """The committed symbol lists, less those of the kernels and the incumbent's units that are not among `units`."""
    shutil.copytree(ROOT / "build_tools/symbols", folder)
    for path in (folder / "objects").glob("*_g[0-9]*_*.txt"):
        if path.stem not in units:
            path.unlink()
    archive = (folder / "archive.txt").read_text(encoding="utf-8").splitlines()
    for unit in set(INCUMBENT_UNITS) - set(units):
        path = folder / f"objects/{unit}.txt"
        names = path.read_text(encoding="utf-8").splitlines()
        archive = [line for line in archive if line not in names]
        path.unlink()
    (folder / "archive.txt").write_text("".join(f"{line}\n" for line in archive), encoding="utf-8")
    return folder


def environment(cache: Path, env: Mapping[str, str | None] | None = None, package: Path = ROOT) -> dict[str, str]:
    """This process's environment for a command: its own cache, `package`'s codegen, and changes (None unsets)."""
    variables = {name: value for name, value in os.environ.items() if name not in IGNORED}
    variables |= {"TILEPRESS_CACHE": str(cache), "PYTHONPATH": str(package), "COLUMNS": "200"}
    for name, value in (env or {}).items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    return variables
