"""The attention backend of examples/hf without a GPU: transformers' Gemma 4 with a stand-in for the kernels."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="no transformers; the releases with Gemma 4 need Python 3.11")

import torch  # noqa: E402

from codegen.modes import VARIABLE  # noqa: E402
from examples.hf import __main__ as command  # noqa: E402
from examples.hf import backend, models, modes, oracle  # noqa: E402
from examples.hf.kernels import Preps, Unsupported  # noqa: E402
from examples.hf.modes import Mode  # noqa: E402
from examples.hf.pool import PAGE, PoolExhausted  # noqa: E402

from .hf_standin import StandIn, StandInPreps  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "few_steps")

CPU = torch.device("cpu")
WINDOW = 96
PROMPT = 189  # some pages, longer than the window; the steps cross into another page
STEPS = 5
CHUNK = 70
TOLERANCE = 0.08  # of logits of about 3: what bf16 moves them by; a key too few moves them by 0.2 and more


@pytest.fixture(scope="module")
def few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "STEPS", STEPS)
        yield


@functools.cache
def small(name: str) -> Any:
    """A model of the shape's layers and head dims, its other widths small."""
    shape = models.SHAPES[name]
    narrow = dataclasses.replace(
        shape, hidden=128, intermediate=128, window=WINDOW, per_layer_input=shape.per_layer_input // 16
    )
    return models.random_model(models.config_of(narrow, vocabulary=512), CPU)


@pytest.fixture(scope="module", params=["31B", "E2B"])
def size(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(size: str) -> Any:
    backend.register()
    return small(size)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(3, 512, (PROMPT,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def reference(few_steps: None, model: Any, text: torch.Tensor) -> tuple[oracle.Walk, torch.Tensor]:
    return oracle.reference_walk(model, text, "eager")


def session_of(model: Any, mode: Mode, *, fault: str = "", preps: bool = False, tokens: int = 400) -> backend.Session:
    heads, _ = backend.layout(model, mode)
    pages = backend.pages_for(heads, tokens, CHUNK)
    return backend.Session(model, mode, StandIn(fault), pages=pages, preps=cast(Preps, StandInPreps()) if preps else None)


def served(model: Any, mode: Mode, **options: Any) -> Callable[[torch.Tensor, torch.Tensor], oracle.Walk]:
    return lambda text, steps: oracle.served_walk(session_of(model, mode, **options), text, steps, chunk=CHUNK)


def modes_of(model: Any) -> list[Mode]:
    return [mode for mode in Mode if model.config.attention_k_eq_v or mode is not Mode.TILELANG640]


@pytest.mark.parametrize("preps", [False, True])
def test_the_walk_is_the_references(model: Any, text: torch.Tensor, reference: Any, preps: bool) -> None:
    walk, steps = reference
    for mode in modes_of(model):
        found = served(model, mode, preps=preps)(text, steps)
        assert found.rows.shape == walk.rows.shape
        gap = float(oracle.gaps(found.rows, walk.rows).max())
        assert gap <= TOLERANCE, mode


@pytest.mark.parametrize("fault", ["window", "newest page"])
def test_the_oracle_sees_a_fault(model: Any, text: torch.Tensor, fault: str) -> None:
    def serve(model: Any, mode: Mode, preps: bool, tokens: int) -> backend.Session:
        return session_of(model, mode, fault=fault if mode is Mode.TILELANG else "", preps=preps, tokens=tokens)

    report = oracle.Report()
    oracle.run_model(report, "small", model, serve, [Mode.INCUMBENT, Mode.TILELANG], prompts=(PROMPT,), sweep=(), chunk=CHUNK)
    faulty = [row.path for row in report.rows if row.faults]
    assert faulty == ["tilelang", "tilelang + preps"]
    lines: list[str] = []
    oracle.show(report, lines.append)
    assert sum(line.startswith("small") for line in lines) == 4
    assert sum(line.startswith("FAULT: small tilelang") for line in lines) >= 2
    assert json.loads(json.dumps(report.record()))["rows"][0]["faults"] == []
    (prints,) = report.fingerprints
    assert len(prints.values) == oracle.STEPS + 1
    assert prints.changed_when_asked_again == 0
    assert len(set(prints.values)) == len(prints.values)


def test_a_path_that_fails_leaves_the_others_their_lines(model: Any) -> None:
    def serve(model: Any, mode: Mode, preps: bool, tokens: int) -> backend.Session:
        return session_of(model, mode, preps=preps, tokens=1 if mode is Mode.TILELANG else tokens)

    report = oracle.Report()
    oracle.run_model(report, "small", model, serve, [Mode.INCUMBENT, Mode.TILELANG], prompts=(200,), sweep=(), chunk=CHUNK)
    assert [row.path for row in report.rows] == ["incumbent", "incumbent + preps"]
    assert len(report.failures) == 2
    assert all("pages of the" in failure for failure in report.failures)
    assert report.faults == report.failures


def test_folded_queries_carry_the_norm_weight(model: Any, text: torch.Tensor, reference: Any) -> None:
    if Mode.TILELANG640 not in modes_of(model):
        pytest.skip("K and V are two projections")
    session = session_of(model, Mode.TILELANG640)
    session.layers = [dataclasses.replace(layer, fold=None) for layer in session.layers]
    walk, steps = reference
    found = oracle.served_walk(session, text, steps, chunk=CHUNK)
    assert float(oracle.gaps(found.rows, walk.rows).max()) > 3 * TOLERANCE


def test_requests_in_a_batch_keep_apart(model: Any, text: torch.Tensor) -> None:
    """Two sequences of different lengths, a decode step together, each as it would be alone."""
    session = session_of(model, modes_of(model)[-1], tokens=800)
    lengths = (PROMPT, 65)
    requests = [session.open(), session.open()]
    for request, length in zip(requests, lengths, strict=True):
        for part in text[:length].split(CHUNK):
            session.forward([request], part[None])
    step = torch.tensor([[7], [9]])
    together = session.forward(requests, step)[:, -1]
    for row, (token, length) in enumerate(zip(step, lengths, strict=True)):
        alone = oracle.reference_prefill(model, torch.cat([text[:length], token, text[: oracle.STEPS]]), "eager").prompt[length]
        assert float((together[row].float() - alone.float()).abs().max()) <= TOLERANCE


def test_a_windows_front_is_released(model: Any, text: torch.Tensor) -> None:
    session = session_of(model, Mode.TILELANG)
    request = session.open()
    for part in text.split(CHUNK):
        session.forward([request], part[None])
    table = request.tables["sliding"]
    assert table.origin == (PROMPT - WINDOW + 1) // PAGE * PAGE > 0
    assert request.tables["global"].origin == 0
    session.close(request)
    assert all(pool.free_pages == pool.num_pages for pool in session.pools.values())


def test_layers_that_share_read_the_rows_of_the_last_that_does_not() -> None:
    heads, layers = backend.layout(small("E2B"), Mode.TILELANG)
    assert (heads["global"].layers, heads["sliding"].layers) == (2, 2)
    assert [(layer.kind, layer.index, layer.shared) for layer in layers] == [
        ("sliding", 0, False),
        ("global", 0, False),
        ("sliding", 1, False),
        ("global", 1, False),
        ("sliding", 1, True),
        ("global", 1, True),
        ("sliding", 1, True),
        ("global", 1, True),
    ]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("E2B", {"global": (8, 1, 512), "sliding": (8, 1, 256)}),
        ("E4B", {"global": (8, 2, 512), "sliding": (8, 2, 256)}),
        ("12B", {"global": (16, 1, 512), "sliding": (16, 8, 256)}),
        ("31B", {"global": (32, 4, 512), "sliding": (32, 16, 256)}),
    ],
)
def test_shapes_have_the_models_heads(name: str, kinds: dict[str, tuple[int, int, int]]) -> None:
    heads, _ = backend.layout(small(name), Mode.INCUMBENT)
    assert {kind: (some.q_heads, some.kv_heads, some.head_dim) for kind, some in heads.items()} == kinds


def test_a_sequence_past_the_pool_is_refused(model: Any, text: torch.Tensor) -> None:
    session = session_of(model, Mode.TILELANG, tokens=100)
    request = session.open("a long one")
    with pytest.raises(PoolExhausted, match=r"a long one, 378 tokens: .* pages of the (global|sliding) pool"):
        session.forward([request], torch.cat([text, text])[None])
    assert request.tokens == 0
    session.close(request)
    assert all(pool.free_pages == pool.num_pages for pool in session.pools.values())


def test_a_step_past_the_pool_is_refused(model: Any, text: torch.Tensor) -> None:
    """The pool's last row is used; a token behind it is refused, whoever asks, and no sequence is longer for it."""
    session = session_of(model, Mode.TILELANG, tokens=1)
    end = session.pools["global"].num_pages * PAGE
    text = torch.cat([text, text])[: end + 1]
    one, other = session.open("the first"), session.open("the second")
    for part in text[:end].split(CHUNK):
        session.forward([one], part[None])
    with pytest.raises(PoolExhausted, match=rf"the first, {end + 1} tokens: 1 more pages of the global pool .* 0 of its 3"):
        session.forward([one], text[end:][None])
    with pytest.raises(PoolExhausted, match=r"the second, 1 tokens: 1 more pages of the (global|sliding) pool"):
        session.forward([other], text[:1][None])
    assert (one.tokens, other.tokens) == (end, 0)


def test_a_sequence_past_the_models_positions_is_refused(model: Any) -> None:
    session = session_of(model, Mode.TILELANG)
    request = session.open("the longest")
    request.tokens = limit = model.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"the longest: {limit + 1} tokens, and the model's positions end at {limit}"):
        session.forward([request], torch.tensor([[7]]))


def test_folded_pages_are_refused_where_k_is_not_v() -> None:
    with pytest.raises(Unsupported, match=r"tilelang640 .* attention_k_eq_v off"):
        session_of(small("E4B"), Mode.TILELANG640)


def test_another_model_is_refused() -> None:
    config = transformers.Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    other = transformers.Gemma2ForCausalLM(config)
    with pytest.raises(backend.NotGemma4, match="the model is gemma2"):
        backend.layout(other, Mode.TILELANG)


def test_a_checkpoint_is_read_and_another_models_is_not(tmp_path: Path, model: Any, text: torch.Tensor) -> None:
    model.save_pretrained(tmp_path / "ours")
    loaded = models.load(tmp_path / "ours", CPU)
    rows = oracle.reference_prefill(model, text, "eager").rows
    assert torch.equal(oracle.reference_prefill(loaded, text, "eager").rows, rows)
    transformers.Gemma2Config().save_pretrained(tmp_path / "other")
    with pytest.raises(backend.NotGemma4, match="is a gemma2 model"):
        models.load(tmp_path / "other", CPU)
    with pytest.raises(backend.NotGemma4, match="no checkpoint"):
        models.load(tmp_path / "nothing", CPU)


def test_a_release_without_gemma4_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.gemma4", None)
    says = rf"transformers {transformers.__version__} has no Gemma 4 .*; pip install 'transformers>=5\.24,<6'"
    with pytest.raises(backend.NotGemma4, match=says):
        backend.gemma4()
    with pytest.raises(backend.NotGemma4, match=says):
        models.config_of(models.SHAPES["E2B"])
    with pytest.raises(backend.NotGemma4, match=says):
        models.load(tmp_path, CPU)


def test_a_host_without_transformers_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(backend.NotGemma4, match=r"the oracle needs transformers .*; pip install -e '\.\[oracle\]'"):
        backend.gemma4()


def test_the_command_says_in_a_line_what_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load", lambda: ModuleType("tilepress"))
    monkeypatch.setattr(command, "device", lambda: CPU)
    monkeypatch.delenv(VARIABLE, raising=False)
    transformers.Gemma2Config().save_pretrained(tmp_path)
    for name in ("walk", "oracle"):
        assert command.main([name, "--checkpoint", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"examples.hf: {tmp_path} is a gemma2 model, not Gemma 4\n"
    monkeypatch.setitem(sys.modules, "transformers.models.gemma4", None)
    for name in ("walk", "oracle"):
        assert command.main([name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"examples.hf: transformers {transformers.__version__} has no Gemma 4")


def test_the_model_alone_says_how_to_call_it(model: Any, text: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"Session\.forward"), backend.serving(model, preps=False):
        model(text[None], use_cache=False)


@pytest.mark.parametrize(
    ("value", "mode"), [(None, "INCUMBENT"), ("off", "INCUMBENT"), ("tilelang", "TILELANG"), ("tilelang640", "TILELANG640")]
)
def test_the_knob(value: str | None, mode: str) -> None:
    environment = {} if value is None else {VARIABLE: value}
    assert modes.from_environment(environment) is Mode[mode]


@pytest.mark.parametrize("value", ["", "on", "TILELANG", "tilelang 640", "incumbent"])
def test_an_unknown_value_of_the_knob_is_an_error(value: str) -> None:
    with pytest.raises(ValueError, match="unset or one of off, tilelang, tilelang640"):
        modes.parse(value)


def test_fnv1a() -> None:
    """The published test vectors."""
    assert oracle.fnv1a(b"") == 0xCBF29CE484222325
    assert oracle.fnv1a(b"a") == 0xAF63DC4C8601EC8C
    assert oracle.fnv1a(b"foobar") == 0x85944171F73967E8


def test_fingerprints_are_of_the_bits() -> None:
    row = torch.tensor([[1.0, -0.0]], dtype=torch.bfloat16)
    assert oracle.fingerprints(row) == [f"{oracle.fnv1a(bytes([0x80, 0x3F, 0x00, 0x80])):016x}"]


def test_a_nan_is_a_fault() -> None:
    rows = torch.zeros(20, 8, dtype=torch.bfloat16)
    rows[:, 0] = 1
    walk = oracle.Walk(rows[:2], rows[2:])
    spoiled = rows.clone()
    spoiled[5, 3] = float("nan")
    compared = oracle.Compared.of(2, oracle.Walk(spoiled[:2], spoiled[2:]), walk)
    row = oracle.judge("x", "y", [compared], [oracle.Neutral(2, 0.1, 0.1, 0.1, 0.1, (0.1, 0.1, 0.1))])
    assert any("nan" in fault for fault in row.faults)
