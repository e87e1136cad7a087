"""The modes of the bench: what each measures, and the record that it makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from rich.console import Console

from bench import decode, prefill, prep, report, roofline, sliding
from bench.arms import Skipped, serving
from bench.inputs import Geometry
from bench.loads import Load, Prompts
from bench.measure import Timing
from bench.preps import Shape


@dataclass(frozen=True)
class Run:
    """What every measurement of a run has. arms: what is measured side by side. step: told before each case what it is."""

    library: ModuleType
    arms: tuple[str, ...]
    repeats: int
    step: Callable[[str], None]

    def begin(self, case: str) -> None:
        """Before a case: the memory of the last one is free again."""
        self.step(case)
        torch.cuda.empty_cache()


COOL = 3.0  # seconds


@dataclass
class Roofs:
    """The rooflines of this process, before and after. bursts: the matrix product as the sliding prefill is timed."""

    gemm: Timing | None = None
    gemm_after: Timing | None = None
    copy: Timing | None = None
    copy_after: Timing | None = None
    bursts: report.Gemm | None = None

    def before(self, needed: frozenset[str], repeats: int) -> None:
        """Measures those that are `needed`: gemm, copy, bursts. The bursts come last, then a rest: they heat the card."""
        if "gemm" in needed:
            self.gemm = roofline.gemm()
        self.copy = roofline.copy()
        if "bursts" in needed:
            self.bursts = report.Gemm(
                cold=roofline.gemm_bursts(launches=sliding.COLD, rest=sliding.REST, repeats=repeats),
                hot=roofline.gemm_bursts(launches=sliding.HOT, rest=sliding.REST, repeats=sliding.HOT_REPEATS),
            )
            time.sleep(COOL)

    def after(self, needed: frozenset[str]) -> None:
        """Measures again what was measured before."""
        torch.cuda.empty_cache()
        if "gemm" in needed:
            self.gemm_after = roofline.gemm()
        self.copy_after = roofline.copy()


class Mode(Protocol):
    """One mode. roofs: the rooflines that its record names, besides the copy."""

    name: ClassVar[str]
    roofs: ClassVar[frozenset[str]]

    @property
    def cases(self) -> int:
        """How often `measure` says what it measures."""

    def measure(self, run: Run) -> list[Any]:
        """Raises ValueError for data that would flatter and ArithmeticError for a result that is wrong."""

    def record(self, host: dict[str, str], roofs: Roofs, found: list[Any]) -> dict[str, Any]:
        """The JSON document, of what `measure` returned."""

    def show(self, record: dict[str, Any], console: Console) -> None:
        """Prints a record."""


def _known(timing: Timing | None) -> Timing:
    if timing is None:
        raise RuntimeError("a roofline of this mode was not measured")
    return timing


def _skipped(found: Sequence[Any]) -> list[Skipped]:
    return [one for one in found if isinstance(one, Skipped)]


@dataclass(frozen=True)
class Prefill:
    """The global prefill. rows: query rows, the last of each of `lengths`."""

    name: ClassVar[str] = "prefill"
    roofs: ClassVar[frozenset[str]] = frozenset({"gemm"})

    model: str
    geometries: Sequence[Geometry]
    lengths: Sequence[int]
    rows: int

    @property
    def cases(self) -> int:
        return len(self.geometries) * len(self.lengths)

    def measure(self, run: Run) -> list[Any]:
        found: list[Any] = []
        for geometry in self.geometries:
            arms = serving(run.arms, "prefill", geometry.page_format)
            for length in self.lengths:
                run.begin(f"prefill, {geometry.page_format}, L = {length:,}")
                found += prefill.measure(run.library, geometry, self.rows, length, arms=arms, repeats=run.repeats)
        return found

    def record(self, host: dict[str, str], roofs: Roofs, found: list[Any]) -> dict[str, Any]:
        results = [one for one in found if isinstance(one, prefill.Result)]
        timings = (_known(roofs.gemm), _known(roofs.gemm_after), _known(roofs.copy))
        return report.prefill_record(host, self.model, *timings, results, _skipped(found))

    def show(self, record: dict[str, Any], console: Console) -> None:
        report.show_prefill(record, console)


@dataclass(frozen=True)
class Decode:
    """The global decode of each model's geometries."""

    name: ClassVar[str] = "decode"
    roofs: ClassVar[frozenset[str]] = frozenset()

    geometries: Sequence[tuple[str, Geometry]]
    loads: Sequence[Load]

    @property
    def cases(self) -> int:
        return len(self.geometries) * len(self.loads)

    def measure(self, run: Run) -> list[Any]:
        found: list[Any] = []
        for model, geometry in self.geometries:
            arms = serving(run.arms, "decode", geometry.page_format)
            for load in self.loads:
                run.begin(f"decode, {model}, {geometry.page_format}, {load}")
                found += [(model, one) for one in decode.measure(run.library, geometry, load, arms=arms, repeats=run.repeats)]
        return found

    def record(self, host: dict[str, str], roofs: Roofs, found: list[Any]) -> dict[str, Any]:
        results = [(model, one) for model, one in found if isinstance(one, decode.Result)]
        skipped = _skipped([one for _, one in found])
        return report.decode_record(host, _known(roofs.copy), _known(roofs.copy_after), results, skipped)

    def show(self, record: dict[str, Any], console: Console) -> None:
        report.show_decode(record, console)


@dataclass(frozen=True)
class Sliding:
    """The windowed prefill of one model, and the windowed decode of `decodes`: model, geometry and window."""

    name: ClassVar[str] = "sliding"
    roofs: ClassVar[frozenset[str]] = frozenset({"bursts"})

    model: str
    geometry: Geometry
    window: int
    prompts: Sequence[Prompts]
    decodes: Sequence[tuple[str, Geometry, int]]
    batches: Sequence[int]

    @property
    def cases(self) -> int:
        return len(self.prompts) + len(self.decodes) * len(self.batches)

    def measure(self, run: Run) -> list[Any]:
        found: list[Any] = []
        arms = serving(run.arms, "sliding prefill", "split")
        for prompts in self.prompts:
            run.begin(f"sliding prefill, {prompts}")
            found += sliding.measure(run.library, self.geometry, prompts, self.window, arms=arms, repeats=run.repeats)
        arms = serving(run.arms, "sliding decode", "split")
        for model, geometry, window in self.decodes:
            for batch in self.batches:
                run.begin(f"sliding decode, {model}, {batch} requests")
                # The window lies across one page more than it fills, and the page before it is released.
                load = Load(batch, window + 100)
                results = decode.measure(run.library, geometry, load, arms=arms, window=window, repeats=run.repeats)
                found += [(model, one) for one in results]
        return found

    def record(self, host: dict[str, str], roofs: Roofs, found: list[Any]) -> dict[str, Any]:
        if roofs.bursts is None:
            raise RuntimeError("the bursts of the matrix product were not measured")
        decodes = [one for one in found if isinstance(one, tuple)]
        return report.sliding_record(
            host,
            self.model,
            roofs.bursts,
            _known(roofs.copy),
            _known(roofs.copy_after),
            [one for one in found if isinstance(one, sliding.Result)],
            [(model, one) for model, one in decodes if isinstance(one, decode.Result)],
            _skipped([*found, *(one for _, one in decodes)]),
        )

    def show(self, record: dict[str, Any], console: Console) -> None:
        report.show_sliding(record, console)


@dataclass(frozen=True)
class Prep:
    """The preps of `shapes` and the activation of `columns`: `rows` tokens of a prompt, and `requests` next tokens."""

    name: ClassVar[str] = "prep"
    roofs: ClassVar[frozenset[str]] = frozenset()

    model: str
    shapes: Sequence[Shape]
    columns: int
    rows: int
    requests: int

    @property
    def cases(self) -> int:
        return 2 * (len(self.shapes) + 1)

    def measure(self, run: Run) -> list[Any]:
        found: list[Any] = []
        for form, count in (("prompt", self.rows), ("decode", self.requests)):
            for shape in self.shapes:
                run.begin(f"prep, {shape.kind}, {shape.page_format}, {form}")
                found.append(prep.measure_prep(run.library, shape, count, form, repeats=run.repeats))
            run.begin(f"gelu_mul, {form}")
            found.append(prep.measure_activation(run.library, count, self.columns, repeats=run.repeats))
        return found

    def record(self, host: dict[str, str], roofs: Roofs, found: list[Any]) -> dict[str, Any]:
        return prep.record(host, self.model, _known(roofs.copy), _known(roofs.copy_after), found)

    def show(self, record: dict[str, Any], console: Console) -> None:
        prep.show(record, console)
