"""`python -m codegen` as a subprocess: its environment, and what it left."""

from __future__ import annotations

import os
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
