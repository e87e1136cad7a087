"""Gemma 4 of transformers on these kernels against the same model with its own attention. See examples/hf/oracle.py for what is
compared and docs/correctness.md for the bounds."""

from __future__ import annotations

import gc
from types import ModuleType

import pytest
import torch

from examples.hf import backend, models, oracle
from examples.hf.modes import Mode
from examples.hf.pool import PoolExhausted

from .conftest import unavailable
from .harness import DEVICE

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def gemma4(library: ModuleType) -> None:
    try:
        backend.gemma4()
    except backend.NotGemma4 as reason:
        unavailable(str(reason))


@pytest.mark.parametrize("size", list(models.SHAPES))
def test_the_model_on_these_kernels_is_the_model(library: ModuleType, size: str) -> None:
    """Every mode, with transformers' norms and rotation and with the preps: the best token of every decided row, every gap
    under the drift line, and the incumbent's bits the same when asked twice."""
    report = oracle.Report()
    shape = models.SHAPES[size]
    model = models.random_model(models.config_of(shape), DEVICE)
    oracle.run_model(report, size, model, oracle.serve_with(library), Mode)
    oracle.show(report)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    assert report.faults == []
    assert [refusal.split(":")[0] for refusal in report.refused] == ([] if shape.k_eq_v else [f"{size} tilelang640"])
    assert len(report.rows) == (6 if shape.k_eq_v else 4)
    assert all(row.decided > row.rows / 2 for row in report.rows), "the noise drowns most rows: the table says little"


def test_a_sequence_past_the_pool_is_an_error(library: ModuleType) -> None:
    model = models.random_model(models.config_of(models.SHAPES["E2B"], vocabulary=512), DEVICE)
    session = backend.session(model, Mode.TILELANG, library, tokens=200, chunk=200)
    with pytest.raises(PoolExhausted, match="the sequence, 1000 tokens"):
        session.forward([session.open()], torch.zeros(1, 1000, dtype=torch.int64, device=DEVICE))
