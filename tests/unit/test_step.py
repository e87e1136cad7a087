"""The serving step of bench/step.py without a GPU: what its modes compute, with a stand-in for the kernels."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("torch")

import torch

from bench import report, step
from examples.hf.kernels import Band, Preps
from examples.hf.modes import Mode
from examples.hf.pool import Heads

from .hf_standin import StandIn, StandInPreps

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PROMPT = 150
CHUNK = 64
WINDOW = 80


def small(mode: Mode) -> step.Size:
    heads = {
        "global": Heads("global", 4, 1, 512, 1, page_format=mode.page_format),
        "sliding": Heads("sliding", 4, 2, 256, 5, window=WINDOW),
    }
    return step.Size("small", 64, 64, 6, heads, vocabulary=128)


def gelu_mul(_: ModuleType, gate: Band, up: Band) -> torch.Tensor:
    parts = [band.rows[:, band.offset : band.offset + band.length].float() for band in (gate, up)]
    active = torch.nn.functional.gelu(parts[0], approximate="tanh").bfloat16().float()
    return (active * parts[1]).bfloat16()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "gelu_mul", gelu_mul)
    monkeypatch.setattr(step, "CHUNK", CHUNK)


@pytest.fixture(scope="module")
def weights() -> step.Weights:
    torch.manual_seed(1)
    return step.make_weights(small(Mode.INCUMBENT), CPU, PROMPT)


def model_of(weights: step.Weights, mode: Mode) -> step.Model:
    library = cast(ModuleType, SimpleNamespace())
    return step.Model(small(mode), weights, mode, library, StandIn(), cast(Preps, StandInPreps()))


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_the_modes_compute_the_same(weights: step.Weights) -> None:
    """Stacked or not, split or folded: a prompt in chunks over the ring of sliding pages, against one pass over all of it."""
    tokens = torch.randint(128, (PROMPT,), generator=torch.Generator().manual_seed(2))
    found = []
    for mode in Mode:
        model = model_of(weights, mode)
        pools = step.Pools(small(mode), PROMPT, CPU)
        logits = None
        for end in (64, 128, PROMPT):
            part = tokens[end - 64 if end < PROMPT else 128 : end]
            logits = model.forward(model.embed(part), pools.steps(end, part.numel()), step.Untimed())
        assert logits is not None
        found.append(logits.float())
    whole = step.Pools(small(Mode.TILELANG), PROMPT, CPU)
    whole.pages["sliding"] = list(range(-(-PROMPT // 64)))
    model = model_of(weights, Mode.TILELANG)
    expected = model.forward(model.embed(tokens), whole.steps(PROMPT, PROMPT), step.Untimed()).float()
    for logits in found:
        assert float((logits - expected).abs().max()) <= 0.03
    assert float(expected.std()) > 0.1


def test_row_ranges_keep_their_bits(weights: step.Weights) -> None:
    assert step.same_row_ranges(weights)


def test_the_31b_stack_has_the_models_layers_and_bytes() -> None:
    size = step.size_31b(Mode.TILELANG640)
    kinds = [size.kind(layer) for layer in range(size.layers)]
    assert kinds.count("global") == size.heads["global"].layers == 10
    assert kinds.count("sliding") == size.heads["sliding"].layers == 50
    assert kinds[:6] == ["sliding"] * 5 + ["global"]
    assert kinds[-1] == "global"
    assert size.heads["global"].page_bytes == 64 * 10 * 4 * 640 * 2
    assert step.size_31b(Mode.INCUMBENT).heads["global"].page_bytes == 64 * 10 * 4 * 1024 * 2


def test_a_run_that_is_cut_off_keeps_the_modes_that_were_done(
    weights: step.Weights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(size: step.Size, weights: step.Weights, mode: Mode, *rest: object) -> step.ModeResult:
        if mode is not Mode.INCUMBENT:
            raise KeyboardInterrupt
        return step.ModeResult(mode.label, 1, 2)

    for name, value in (
        ("measure", measure),
        ("make_weights", lambda *_: weights),
        ("same_row_ranges", lambda _: True),
        ("load", SimpleNamespace),
    ):
        monkeypatch.setattr(step, name, value)
    monkeypatch.setattr(report, "environment", lambda *_: {"commit": "abc"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "results" / "step.json"
    with pytest.raises(KeyboardInterrupt):
        step.main(["--out", str(out)])
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert (kept["commit"], [mode["mode"] for mode in kept["modes"]]) == ("abc", ["incumbent"])
