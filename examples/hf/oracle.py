"""The oracle: transformers' Gemma 4 with its own attention against the same model on the library's kernels.

Both walk the same tokens: a prompt, then decode steps that are fed what the reference chose. Every prompt row and every step
gives a row of logits. What one row may differ by is measured, not guessed: the *neutral* gap is how far the reference's own
logits move under changes that nobody would call wrong: its walk against one prefill of the same tokens, and its attention as
transformers' "eager" code against its "sdpa" code; for the library's preps, its rotation in bf16 against the same in fp32. The
*noise* is how far the lead of its best token over the next ones moves under the same changes, and half as much again. A row is
*decided* where the reference's best token leads by more than the noise: there the kernels must choose the same.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import backend
from .kernels import Unsupported
from .modes import Mode

PROMPTS = (512, 1500, 3000)
# Around 3,000: at and beside the ends of pages, 2,944 and 3,008, the steps then crossing one or not.
SWEEP = (2943, 2944, 2945, 2999, 3001, 3008, 3009)
STEPS = 17  # decode steps: 16 are asked for; the incumbent's fingerprints have one more
CHUNK = 2048  # a longer prompt is served in steps of so many tokens, so that rows continue a context and windows are released
NOISE = 1.5  # the lead's largest neutral change, times this: the kernels' rows are others than those it was measured on
RIVALS = 7  # the tokens behind the best whose distance to it is looked at
# The largest gap allowed, in largest neutral gaps of the same run and size. See docs/correctness.md for how it was chosen.
DRIFT = 2.0


@dataclass(frozen=True)
class Walk:
    """Logits: prompt, bf16 [prompt tokens, vocabulary], and steps, bf16 [STEPS, vocabulary]."""

    prompt: torch.Tensor
    steps: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """All of them."""
        return torch.cat([self.prompt, self.steps])

    @property
    def served(self) -> torch.Tensor:
        """The rows that a server samples from: the prompt's last and every step's."""
        return torch.cat([self.prompt[-1:], self.steps])


def reference_walk(
    model: Any, prompt: torch.Tensor, implementation: str, steps: torch.Tensor | None = None
) -> tuple[Walk, torch.Tensor]:
    """transformers' own walk over `prompt`, int64 [tokens], and its steps' tokens, int64 [STEPS]: given, or its own choice."""
    from transformers import DynamicCache

    model.set_attn_implementation(implementation)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(prompt[None], cache=cache, use_cache=True).logits[0]
        chosen, rows = [], []
        last = logits[-1]
        for step in range(STEPS):
            token = last.argmax() if steps is None else steps[step]
            chosen.append(token)
            last = model(token.view(1, 1), cache=cache, use_cache=True).logits[0, -1]
            rows.append(last)
    return Walk(logits, torch.stack(rows)), torch.stack(chosen)


@contextmanager
def fp32_rotation(model: Any) -> Iterator[None]:
    """transformers' model with cos, sin and the rotation in fp32, rounded once, where its own code rounds each to bf16."""
    modeling: Any = backend.gemma4()
    rotate, embedding = modeling.apply_rotary_pos_emb, model.model.rotary_emb
    tables = embedding.forward

    def rotate_in_fp32(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> torch.Tensor:
        turned: torch.Tensor = rotate(x.float(), cos, sin, unsqueeze_dim)
        return turned.to(x.dtype)

    modeling.apply_rotary_pos_emb = rotate_in_fp32
    embedding.forward = lambda x, position_ids, layer_type: tables(x.float(), position_ids, layer_type)
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = rotate
        del embedding.forward


def reference_prefill(model: Any, tokens: torch.Tensor, implementation: str) -> Walk:
    """One prefill of all tokens, the steps' too."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0]
    return Walk(logits[:-STEPS], logits[-STEPS:])


def served_walk(session: backend.Session, prompt: torch.Tensor, steps: torch.Tensor, *, chunk: int = CHUNK) -> Walk:
    """The same walk through the library, in a sequence of its own."""
    request = session.open(f"a prompt of {prompt.numel()}")
    try:
        parts = [session.forward([request], part[None], keep=0)[0] for part in prompt.split(chunk)]
        rows = [session.forward([request], token.view(1, 1))[0, -1] for token in steps]
    finally:
        session.close(request)
    return Walk(torch.cat(parts), torch.stack(rows))


ROWS_AT_ONCE = 512


def gaps(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest |difference| of each row's logits, fp32 [rows]; NaN where either has one."""
    parts = zip(rows.split(ROWS_AT_ONCE), reference.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([(a.float() - b.float()).abs().amax(-1) for a, b in parts])


def margins(rows: torch.Tensor) -> torch.Tensor:
    """How far each row's best logit is ahead of its second, fp32 [rows]."""
    best = [part.float().topk(2, -1).values for part in rows.split(ROWS_AT_ONCE)]
    return torch.cat([values[:, 0] - values[:, 1] for values in best])


def leads(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """How far the lead of the reference's best token over each of the next RIVALS differs, at most, fp32 [rows]."""
    found = []
    for a, b in zip(rows.split(ROWS_AT_ONCE), reference.split(ROWS_AT_ONCE), strict=True):
        expected, tokens = b.float().topk(RIVALS + 1, -1)
        there = a.float().gather(-1, tokens)
        found.append(((there[:, :1] - there) - (expected[:, :1] - expected)).abs().amax(-1))
    return torch.cat(found)


def fnv1a(data: bytes) -> int:
    """The 64-bit FNV-1a hash."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def fingerprints(rows: torch.Tensor) -> list[str]:
    """FNV-1a of each row's bf16 bits, little-endian."""
    data = rows.contiguous().view(torch.int16).cpu().numpy().astype("<i2")
    return [f"{fnv1a(row.tobytes()):016x}" for row in data]


@dataclass
class Compared:
    """One mode over one length: per row, its gap to the reference, the reference's margin, whether the best token is the
    same."""

    length: int
    gap: torch.Tensor
    margin: torch.Tensor
    same: torch.Tensor
    served: int  # of the rows, the last so many are the ones that a server samples from

    @staticmethod
    def of(length: int, walk: Walk, reference: Walk) -> Compared:
        """A walk against the reference's."""
        rows, expected = walk.rows, reference.rows
        same = rows.argmax(-1) == expected.argmax(-1)
        return Compared(length, gaps(rows, expected).cpu(), margins(expected).cpu(), same.cpu(), STEPS + 1)


@dataclass
class Neutral:
    """What the reference moved by over one length, as largest gaps: its walk against one prefill, over the rows that a server
    samples from; its eager attention against its sdpa, and its rotation in bf16 against the same in fp32, over all rows.
    median: of the gaps between eager and sdpa. leads: the largest change of a lead under each."""

    length: int
    walk: float
    implementation: float
    rotation: float
    median: float
    leads: tuple[float, float, float]

    @staticmethod
    def of(length: int, walk: Walk, whole: Walk, other: Walk, turned: Walk) -> Neutral:
        """From the reference's walk, its one prefill, and its walks with the other attention and the other rotation."""
        served = torch.cat([whole.prompt[-1:], whole.steps])
        pairs = ((served, walk.served), (other.rows, walk.rows), (turned.rows, walk.rows))
        one, two, three = (float(leads(*pair).max()) for pair in pairs)
        walked, implemented, rotated = (gaps(*pair) for pair in pairs)
        return Neutral(
            length=length,
            walk=float(walked.max()),
            implementation=float(implemented.max()),
            rotation=float(rotated.max()),
            median=float(implemented.median()),
            leads=(one, two, three),
        )


@dataclass
class Row:
    """A line of the table."""

    size: str
    path: str
    lengths: list[int]
    rows: int
    decided: int
    decided_equal: int
    all_equal: int
    served_decided: int
    served_rows: int
    largest_gap: float
    median_gap: float
    neutral_walk: float
    neutral_implementation: float
    neutral_rotation: float | None
    neutral_median: float
    noise: float
    drift_line: float

    @property
    def faults(self) -> list[str]:
        """What breaks a bound."""
        found = []
        if self.decided_equal != self.decided:
            found.append(f"{self.decided - self.decided_equal} of {self.decided} decided rows have another best token")
        if not self.largest_gap <= self.drift_line:  # written so that NaN is a fault
            found.append(f"the largest gap, {self.largest_gap:.4f}, is above the drift line, {self.drift_line:.4f}")
        return found


def judge(
    size: str, path: str, compared: Sequence[Compared], neutral: Sequence[Neutral], *, preps: bool = False, drift: float = DRIFT
) -> Row:
    """The table's line of one mode and size over all its lengths. With the library's preps the rotation is in fp32, and so what
    that moves counts as neutral."""
    changes = 3 if preps else 2
    walk = max(some.walk for some in neutral)
    implementation = max(some.implementation for some in neutral)
    rotation = max(some.rotation for some in neutral) if preps else None
    largest_neutral = max(walk, implementation, rotation or 0.0)
    noise = NOISE * max(lead for some in neutral for lead in some.leads[:changes])
    gap = torch.cat([some.gap for some in compared])
    margin = torch.cat([some.margin for some in compared])
    same = torch.cat([some.same for some in compared])
    decided = margin > noise
    served = torch.cat([some.margin[-some.served :] > noise for some in compared])
    return Row(
        size=size,
        path=path,
        lengths=[some.length for some in compared],
        rows=gap.numel(),
        decided=int(decided.sum()),
        decided_equal=int((same & decided).sum()),
        all_equal=int(same.sum()),
        served_decided=int(served.sum()),
        served_rows=served.numel(),
        largest_gap=float("nan") if bool(gap.isnan().any()) else float(gap.max()),
        median_gap=float(gap.median()),
        neutral_walk=walk,
        neutral_implementation=implementation,
        neutral_rotation=rotation,
        neutral_median=max(some.median for some in neutral),
        noise=noise,
        drift_line=drift * largest_neutral,
    )


@dataclass
class Fingerprints:
    """The incumbent's, of one size and length: of the prompt's last row and every step's, and how many of them a second asking
    changed, which is the floor of any comparison of bits."""

    size: str
    length: int
    values: list[str]
    changed_when_asked_again: int


@dataclass
class Report:
    """An oracle run."""

    rows: list[Row] = field(default_factory=list)
    neutral: dict[str, list[Neutral]] = field(default_factory=dict)
    fingerprints: list[Fingerprints] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What breaks a bound, anywhere."""
        found = [f"{row.size} {row.path}: {fault}" for row in self.rows for fault in row.faults]
        return [*self.failures, *found] + [
            f"{prints.size} incumbent, {prints.length} tokens: {prints.changed_when_asked_again} rows changed when asked again"
            for prints in self.fingerprints
            if prints.changed_when_asked_again
        ]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "bench": "oracle",
            "prompts": list(PROMPTS),
            "sweep": list(SWEEP),
            "steps": STEPS,
            "chunk": CHUNK,
            "drift": DRIFT,
            "noise": NOISE,
            "rivals": RIVALS,
            "rows": [asdict(row) | {"faults": row.faults} for row in self.rows],
            "neutral": {size: [asdict(some) for some in values] for size, values in self.neutral.items()},
            "fingerprints": [asdict(prints) for prints in self.fingerprints],
            "refused": self.refused,
            "failures": self.failures,
        }


Serve = Callable[[Any, Mode, bool, int], backend.Session]


def serve_with(library: ModuleType) -> Serve:
    """Makes sessions on the library, with room for one sequence of a length. The third argument: with the library's preps."""

    def make(model: Any, mode: Mode, preps: bool, tokens: int) -> backend.Session:
        return backend.session(model, mode, library, tokens=tokens, chunk=CHUNK, preps=preps)

    return make


def path_name(size: str, mode: Mode, preps: bool) -> str:
    """A path's name in messages."""
    return f"{size} {mode.label}{' + preps' if preps else ''}"


def run_model(
    report: Report,
    size: str,
    model: Any,
    serve: Serve,
    modes: Iterable[Mode],
    *,
    prompts: Sequence[int] = PROMPTS,
    sweep: Sequence[int] = SWEEP,
    chunk: int = CHUNK,
    seed: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Holds one model under every mode against its reference, and adds the table's lines to the report. Each mode is walked
    twice: with transformers' norms and rotation in front of the attention function, and with the library's preps."""
    generator = torch.Generator().manual_seed(seed)
    longest = max([*prompts, *sweep])
    text = torch.randint(3, model.config.vocab_size, (longest,), generator=generator).to(model.device)
    sessions: dict[tuple[Mode, bool], backend.Session] = {}
    for mode in modes:
        for preps in (False, True):
            try:
                sessions[mode, preps] = serve(model, mode, preps, longest + STEPS)
            except Unsupported as refusal:
                report.refused.append(f"{size} {mode.label}: {refusal}")
                break
    compared: dict[tuple[Mode, bool], list[Compared]] = {key: [] for key in sessions}
    neutral: list[Neutral] = []
    for length in (*prompts, *sweep):
        say(f"{size}, {length} tokens")
        prompt = text[:length]
        walk, steps = reference_walk(model, prompt, "eager")
        whole = reference_prefill(model, torch.cat([prompt, steps]), "eager")
        other, _ = reference_walk(model, prompt, "sdpa", steps)
        with fp32_rotation(model):
            turned, _ = reference_walk(model, prompt, "eager", steps)
        neutral.append(Neutral.of(length, walk, whole, other, turned))
        del whole, other, turned
        for (mode, preps), session in list(sessions.items()):
            try:
                served = served_walk(session, prompt, steps, chunk=chunk)
            except RuntimeError as error:  # a call's refusal or a status bit: the other paths are still worth their table
                report.failures.append(f"{path_name(size, mode, preps)}, {length} tokens: {error}")
                del sessions[mode, preps]
                continue
            compared[mode, preps].append(Compared.of(length, served, walk))
            if mode is Mode.INCUMBENT and not preps and length in prompts:
                again = served_walk(session, prompt, steps, chunk=chunk)
                changed = (served.served.view(torch.int16) != again.served.view(torch.int16)).any(-1)
                report.fingerprints.append(Fingerprints(size, length, fingerprints(served.served), int(changed.sum())))
    for (mode, preps), results in compared.items():
        if results:
            report.rows.append(judge(size, mode.label + (" + preps" if preps else ""), results, neutral, preps=preps))
    report.neutral[size] = neutral
    sessions.clear()
    gc.collect()


def show(report: Report, say: Callable[[str], None] = print) -> None:
    """The table."""
    head = (
        "size",
        "path",
        "rows",
        "decided",
        "argmax equal",
        "of all",
        "gap",
        "median",
        "neutral median",
        "neutral walk",
        "eager/sdpa",
        "rotation",
        "noise",
        "line",
    )
    lines = [
        (
            row.size,
            row.path,
            f"{row.rows}",
            f"{row.decided}",
            f"{row.decided_equal}/{row.decided}",
            f"{row.all_equal / row.rows:.2%}",
            f"{row.largest_gap:.4f}",
            f"{row.median_gap:.4f}",
            f"{row.neutral_median:.4f}",
            f"{row.neutral_walk:.4f}",
            f"{row.neutral_implementation:.4f}",
            "" if row.neutral_rotation is None else f"{row.neutral_rotation:.4f}",
            f"{row.noise:.4f}",
            f"{row.drift_line:.4f}",
        )
        for row in report.rows
    ]
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    for line in (head, *lines):
        say("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    for prints in report.fingerprints:
        say(
            f"fingerprints, {prints.size} incumbent, {prints.length} tokens: prompt {prints.values[0]}, last step "
            f"{prints.values[-1]}; asked again, {prints.changed_when_asked_again} of {len(prints.values)} rows changed"
        )
    for refusal in report.refused:
        say(f"refused: {refusal}")
    for fault in report.faults:
        say(f"FAULT: {fault}")


def write(report: Report, host: dict[str, str], path: Path) -> None:
    """The JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.record() | host, indent=1) + "\n")
