"""What is measured side by side. No torch: the command line reads it first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Arm:
    """An implementation of attention. formats: the page formats whose pool it reads. own: the library's own kernels. optional:
    it comes with other packages, and may fail without failing the run. only: the cases that it is for, if not all."""

    name: str
    title: str
    formats: tuple[str, ...]
    own: bool = False
    optional: bool = False
    only: tuple[str, ...] = ()

    def serves(self, case: str, page_format: str) -> bool:
        """Whether it reads pages of this format and is there for this case."""
        return page_format in self.formats and (not self.only or case in self.only)


ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            Arm("generated", "generated", ("split", "folded"), own=True),
            Arm("early", "generated, early loads", ("split", "folded"), own=True, only=("decode", "sliding decode")),
            Arm("incumbent", "incumbent (FlashInfer FA2)", ("split",)),
            Arm("flex", "PyTorch FlexAttention", ("split",), optional=True),
            Arm("fa4", "FlashAttention-4", ("split",), optional=True),
        )
    }
)
DEFAULT = "generated,early,incumbent"


@dataclass(frozen=True)
class Skipped:
    """An arm that gave no figure for a case, and why."""

    arm: str
    case: str
    reason: str


def parse(text: str) -> tuple[str, ...]:
    """Arms such as generated,incumbent, in the order that they are measured in; "all" is all. Raises ValueError."""
    if text == "all":
        return tuple(ARMS)
    found = tuple(text.split(","))
    for name in found:
        if name not in ARMS:
            raise ValueError(f"{name!r} is none of {', '.join(ARMS)}")
        if found.count(name) > 1:
            raise ValueError(f"{name!r} is there twice")
    return found


def serving(arms: tuple[str, ...], case: str, page_format: str) -> tuple[str, ...]:
    """Those that read pages of this format and are there for this case: prefill, decode, sliding prefill or sliding decode."""
    return tuple(name for name in arms if ARMS[name].serves(case, page_format))
