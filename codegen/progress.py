"""Progress on stderr: a live bar on a terminal, one line a step elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


@dataclass
class Steps:
    """One phase of a build, of `total` steps once that is known."""

    phase: str
    console: Console
    bars: Bars | None
    task: TaskID | None
    done: int = 0
    total: int = 0

    def advance(self, what: str) -> None:
        """One more step is done."""
        self.reach(self.done + 1, self.total, what)

    def reach(self, done: int, total: int, what: str) -> None:
        """`done` of `total` steps are; the last was `what`."""
        self.done, self.total = done, total
        if self.bars and self.task is not None:
            self.bars.update(self.task, completed=done, total=total, what=what)
        else:
            self.console.print(f"{self.phase} [{done}/{total}] {what}", markup=False, highlight=False, soft_wrap=True)


@dataclass
class Progress:
    """Where progress goes. quiet: nowhere."""

    console: Console = field(default_factory=lambda: Console(stderr=True))
    quiet: bool = False

    @contextmanager
    def steps(self, phase: str, total: int = 0) -> Iterator[Steps]:
        """A phase; its bar lives as long as the block."""
        if self.quiet:
            yield Steps(phase, Console(quiet=True), None, None, total=total)
        elif self.console.is_terminal:
            columns = (
                TextColumn("{task.description:>8}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[what]}"),
            )
            with Bars(*columns, console=self.console) as bars:
                yield Steps(phase, self.console, bars, bars.add_task(phase, total=total or None, what=""), total=total)
        else:
            yield Steps(phase, self.console, None, None, total=total)
