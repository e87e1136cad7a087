"""What a call serves. No torch: the command line reads it first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """`batch` requests of `context` tokens each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


@dataclass(frozen=True)
class Prompts:
    """`batch` requests of `rows` query rows each, the last of `context` tokens."""

    batch: int
    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.rows}@{self.context}"


def parse_prompts(text: str) -> tuple[Prompts, ...]:
    """Prefills such as 1x8192@9216,8x1024@4000. Raises ValueError."""
    found = []
    for part in text.split(","):
        batch, times, rest = part.partition("x")
        rows, at, context = rest.partition("@")
        if not times or not at:
            raise ValueError(f"{part!r} is not REQUESTSxROWS@TOKENS")
        prompts = Prompts(int(batch), int(rows), int(context))
        if prompts.batch < 1 or prompts.rows < 1 or prompts.context < prompts.rows:
            raise ValueError(f"{part!r} has a number below 1, or fewer tokens than rows")
        found.append(prompts)
    return tuple(found)


def parse(text: str) -> tuple[Load, ...]:
    """Loads such as 1x10602,16x40002. Raises ValueError."""
    loads = []
    for part in text.split(","):
        batch, times, context = part.partition("x")
        if not times:
            raise ValueError(f"{part!r} is not REQUESTSxTOKENS")
        load = Load(int(batch), int(context))
        if load.batch < 1 or load.context < 1:
            raise ValueError(f"{part!r} has a number below 1")
        loads.append(load)
    return tuple(loads)
