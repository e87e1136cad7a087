"""What the entries serve and refuse, through the Python bindings: a refusal names the argument and launches nothing."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch

from bench.inputs import Geometry, Request, build
from bench.library import DECODE, PREFILL, decode, decode_fields, prefill, prefill_fields
from bench.outputs import make_outputs
from bench.plans import Limits, make_plan
from bench.reference import attention

from .harness import DEVICE, FORMATS, assert_close, assert_refused, geometry, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

SERVED = ((8, 1), (8, 2), (16, 1), (16, 2), (32, 4), (32, 8))


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), SERVED)
def test_the_heads_of_every_model_and_shard_are_served(
    library: ModuleType, q_heads: int, kv_heads: int, page_format: str
) -> None:
    batch = build(Geometry(q_heads, kv_heads, page_format=page_format), [Request(3, 70)], device=DEVICE)
    for entry in (PREFILL, DECODE):
        assert library.supports(entry, q_heads, kv_heads, 512, 64, batch.geometry.page_format_code) == library.OK
    assert_close(run(library, batch), attention(batch))


GEOMETRY_REFUSALS: list[tuple[dict[str, int | float], str, str]] = [
    ({"num_q_heads": 40, "num_kv_heads": 8}, "UNSUPPORTED", "num_q_heads"),
    ({"head_dim": 256}, "UNSUPPORTED", "head_dim"),
    ({"page_size": 32}, "UNSUPPORTED", "page_size"),
    ({"page_format": 0}, "INVALID_ARGUMENT", "page_format"),
    ({"q": 0}, "INVALID_ARGUMENT", "q"),
    ({"out": 0}, "INVALID_ARGUMENT", "out"),
    ({"rows_per_page": 100}, "INVALID_ARGUMENT", "rows_per_page"),
    ({"sm_scale": float("nan")}, "INVALID_ARGUMENT", "sm_scale"),
]


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        *GEOMETRY_REFUSALS,
        ({"layer_row": 384}, "INVALID_ARGUMENT", "layer_row"),
        ({"batch": -1}, "INVALID_ARGUMENT", "batch"),
        ({"q_rows": 60}, "INVALID_ARGUMENT", "q_indptr_host"),
    ],
    ids=str,
)
def test_a_prefill_refusal_names_the_argument(
    library: ModuleType, changes: dict[str, int | float], code: str, named: str, page_format: str
) -> None:
    """The rest of the call is right: a group that has an instance, and the data for it."""
    batch = build(geometry(4, 10, page_format), [Request(64, 64)], device=DEVICE)
    outputs = make_outputs(batch)
    host = batch.q_indptr.cpu()
    fields = prefill_fields(batch, outputs, q_indptr_host=host)
    assert_refused(library, library.global_prefill, {**fields, **changes}, outputs, code, named)


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        *GEOMETRY_REFUSALS,
        ({"layer_row": 384}, "INVALID_ARGUMENT", "layer_row"),
        ({"plan": 0}, "INVALID_ARGUMENT", "plan"),
        ({"plan_host": 0}, "INVALID_ARGUMENT", "plan_host"),
        ({"workspace": 0}, "INVALID_ARGUMENT", "workspace"),
        ({"workspace_bytes": 100}, "INVALID_ARGUMENT", "workspace_bytes"),
        ({"row_offset": -1}, "INVALID_ARGUMENT", "row_offset"),
        ({"row_offset": 1 << 30}, "INVALID_ARGUMENT", "row_offset"),
        ({"num_kv_heads": 5}, "INVALID_ARGUMENT", "num_kv_heads"),
        ({"num_page_ids": -1}, "INVALID_ARGUMENT", "num_page_ids"),
        ({"num_page_ids": 0}, "INVALID_ARGUMENT", "num_page_ids"),
    ],
    ids=str,
)
def test_a_decode_refusal_names_the_argument(
    library: ModuleType, changes: dict[str, int | float], code: str, named: str, page_format: str
) -> None:
    """The rest of the call is right, so only the change is refused; num_kv_heads 5 makes group 8, but not the plan's."""
    batch = build(geometry(4, 10, page_format), [Request(1, 64)], device=DEVICE)
    outputs = make_outputs(batch)
    plan = make_plan(library, batch, Limits(2))
    fields = decode_fields(batch, plan, outputs)
    assert_refused(library, library.global_decode, {**fields, **changes}, outputs, code, named)


@pytest.mark.parametrize(("word", "value", "named"), [(0, 0, "plan_host"), (6, 2, "page_format"), (6, 1, "page_format")])
def test_a_plan_for_something_else_is_refused(library: ModuleType, word: int, value: int, named: str) -> None:
    """No plan at all, and a plan of the other page format, either way."""
    batch = build(geometry(4, 2, "folded" if value == 1 else "split"), [Request(1, 64)], device=DEVICE)
    outputs = make_outputs(batch)
    plan = make_plan(library, batch, Limits(2))
    plan.host[word] = value
    fields = decode_fields(batch, plan, outputs)
    assert_refused(library, library.global_decode, fields, outputs, "INVALID_ARGUMENT", named)


@pytest.mark.parametrize("entry", [PREFILL, DECODE])
def test_supports_gives_the_code_of_the_refusal(library: ModuleType, entry: str) -> None:
    assert library.supports(entry, 40, 8, 512, 64, library.PAGE_FORMAT_SPLIT) == library.UNSUPPORTED
    assert "num_q_heads" in library.last_error()


def test_a_prefill_after_a_refusal_works(library: ModuleType) -> None:
    batch = build(geometry(4, 2, "split"), [Request(10, 80)], device=DEVICE)
    outputs = make_outputs(batch)
    with pytest.raises(library.Error):
        library.global_prefill(**{**prefill_fields(batch, outputs), "pool": 0})
    prefill(library, batch, outputs)
    torch.cuda.synchronize()
    assert_close(outputs, attention(batch))


def test_a_decode_after_a_refusal_works(library: ModuleType) -> None:
    batch = build(geometry(4, 2, "folded"), [Request(1, 80)], device=DEVICE)
    outputs = make_outputs(batch)
    plan = make_plan(library, batch, Limits(1))
    with pytest.raises(library.Error):
        library.global_decode(**{**decode_fields(batch, plan, outputs), "pool": 0})
    decode(library, batch, plan, outputs)
    torch.cuda.synchronize()
    assert_close(outputs, attention(batch))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"partials": 0}, "partials"),
        ({"partial_lse": 0}, "partial_lse"),
        ({"out": 0}, "out"),
        ({"source_stride": 4088}, "source_stride"),
        ({"source_stride": 4100}, "source_stride"),
        ({"lse_stride": 7}, "lse_stride"),
        ({"num_sources": 0}, "num_sources"),
        ({"num_sources": 1025}, "num_sources"),
        ({"num_rows": -1}, "num_rows"),
        ({"num_heads": 0}, "num_heads"),
        ({"head_dim": 4}, "head_dim"),
    ],
    ids=str,
)
def test_merge_states_refuses_by_name(library: ModuleType, changes: dict[str, int], named: str) -> None:
    partials = torch.zeros(2, 1, 8, 512, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.zeros(2, 1, 8, device=DEVICE)
    out = torch.full_like(partials[0], 3)
    fields = {
        "partials": partials.data_ptr(),
        "partial_lse": lse.data_ptr(),
        "out": out.data_ptr(),
        "source_stride": 4096,
        "lse_stride": 8,
        "num_sources": 2,
        "num_rows": 1,
        "num_heads": 8,
        "head_dim": 512,
    }
    with pytest.raises(library.Error) as caught:
        library.merge_states(**{**fields, **changes})
    assert caught.value.code == library.INVALID_ARGUMENT
    assert re.search(rf"\b{named}\b", caught.value.message), caught.value.message
    torch.cuda.synchronize()
    assert (out == 3).all()
