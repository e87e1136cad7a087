"""The knob: which kernels serve attention, and so what a page of the global pool holds."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping

from codegen.modes import MODES, VARIABLE


class Mode(enum.Enum):
    """A value of the knob; its own value is how the variable spells it."""

    INCUMBENT = MODES["incumbent"].text
    TILELANG = MODES["tilelang"].text
    TILELANG640 = MODES["tilelang640"].text

    @property
    def label(self) -> str:
        """The name that tables use."""
        return self.name.lower()

    @property
    def page_format(self) -> str:
        """What the global pool's pages hold: a name in codegen.formats."""
        return MODES[self.label].page_format


def parse(value: str | None) -> Mode:
    """The mode that a value of the knob names; None, which is unset, is the incumbent. Raises ValueError for any other: a typo
    must not choose a kernel."""
    if value is None:
        return Mode.INCUMBENT
    try:
        return Mode(value)
    except ValueError:
        allowed = ", ".join(mode.value for mode in Mode)
        raise ValueError(f"{VARIABLE} is {value!r}; it must be unset or one of {allowed}") from None


def from_environment(environment: Mapping[str, str] = os.environ) -> Mode:
    """The mode that the environment asks for. Raises ValueError."""
    return parse(environment.get(VARIABLE))
