"""What the entry serves and refuses, through the Python bindings: a refusal names the argument and launches nothing."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch

from bench.inputs import Geometry, Request, build
from bench.library import ENTRY, prefill, prefill_fields
from bench.outputs import make_outputs
from bench.reference import attention

from .harness import DEVICE, assert_close, geometry, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

SERVED = ((8, 1), (8, 2), (16, 1), (16, 2), (32, 4), (32, 8))


@pytest.mark.parametrize(("q_heads", "kv_heads"), SERVED)
def test_the_heads_of_every_model_and_shard_are_served(library: ModuleType, q_heads: int, kv_heads: int) -> None:
    batch = build(Geometry(q_heads, kv_heads), [Request(3, 70)], device=DEVICE)
    assert library.supports(ENTRY, q_heads, kv_heads, 512, 64, library.PAGE_FORMAT_SPLIT) == library.OK
    assert_close(run(library, batch), attention(batch))


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"num_q_heads": 40, "num_kv_heads": 8}, "UNSUPPORTED", "num_q_heads"),
        ({"head_dim": 256}, "UNSUPPORTED", "head_dim"),
        ({"page_size": 32}, "UNSUPPORTED", "page_size"),
        ({"page_format": 0}, "INVALID_ARGUMENT", "page_format"),
        ({"q": 0}, "INVALID_ARGUMENT", "q"),
        ({"out": 0}, "INVALID_ARGUMENT", "out"),
        ({"batch": -1}, "INVALID_ARGUMENT", "batch"),
        ({"rows_per_page": 100}, "INVALID_ARGUMENT", "rows_per_page"),
        ({"layer_row": 320}, "INVALID_ARGUMENT", "layer_row"),
        ({"sm_scale": float("nan")}, "INVALID_ARGUMENT", "sm_scale"),
        ({"q_rows": 60}, "INVALID_ARGUMENT", "q_indptr_host"),
    ],
    ids=str,
)
def test_a_refusal_names_the_argument(library: ModuleType, changes: dict[str, int | float], code: str, named: str) -> None:
    """The rest of the call is right: a group that has an instance, and the data for it."""
    batch = build(geometry(4, 10), [Request(64, 64)], device=DEVICE)
    outputs = make_outputs(batch)
    host = batch.q_indptr.cpu()
    fields = prefill_fields(library, batch, outputs, q_indptr_host=host)
    with pytest.raises(library.Error) as caught:
        library.global_prefill(**{**fields, **changes})
    assert caught.value.code == getattr(library, code)
    assert re.search(rf"\b{named}\b", caught.value.message), caught.value.message
    assert library.last_error() == caught.value.message
    torch.cuda.synchronize()
    assert outputs.touched_rows() == (set(), set())
    assert outputs.status_bits() == 0


def test_supports_gives_the_code_of_the_refusal(library: ModuleType) -> None:
    assert library.supports(ENTRY, 40, 8, 512, 64, library.PAGE_FORMAT_SPLIT) == library.UNSUPPORTED
    assert "num_q_heads" in library.last_error()


def test_a_call_after_a_refusal_works(library: ModuleType) -> None:
    batch = build(geometry(4, 2), [Request(10, 80)], device=DEVICE)
    outputs = make_outputs(batch)
    with pytest.raises(library.Error):
        library.global_prefill(**{**prefill_fields(library, batch, outputs), "pool": 0})
    prefill(library, batch, outputs)
    torch.cuda.synchronize()
    assert_close(outputs, attention(batch))
