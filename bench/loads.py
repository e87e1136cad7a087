"""What a decode step serves. No torch: the command line reads it first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """`batch` requests of `context` tokens each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


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
