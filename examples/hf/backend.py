"""Gemma 4 of transformers, its attention served by the library over a paged pool.

The function `attend` is registered with transformers' attention interface. It gets the queries, keys and values of the new
tokens, normed and rotated, and the step that the session passed to the model; it writes K and V into the pool and computes
attention over the pages. transformers keeps no cache of its own: what a decode step sees, it sees through the page tables.

With `preps`, the attention modules hand their projections to the library's preps instead, which norm, rotate and write the
pool.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from . import kernels
from .kernels import Attention, Band, Norms, Preps, Rope, Unsupported
from .modes import Mode
from .pool import PAGE, Heads, Pool, Step, Table, folding_weight, store

NAME = "tilepress"  # of the attention implementation
ARGUMENT = "tilepress_pass"  # of the model call, which hands it down to every attention module
KINDS = {"full_attention": "global", "sliding_attention": "sliding"}


class NotGemma4(ValueError):
    """The model, or the transformers release, is not one that this backend serves."""


def gemma4() -> ModuleType:
    """transformers' Gemma 4 module. Raises NotGemma4 where the installed release has none."""
    try:
        import transformers
    except ImportError as error:
        raise NotGemma4(f"the oracle needs transformers ({error}); pip install -e '.[oracle]'") from error
    try:
        from transformers.models.gemma4 import modeling_gemma4
    except ImportError as error:
        raise NotGemma4(
            f"transformers {transformers.__version__} has no Gemma 4 ({error}); pip install 'transformers>=5.24,<6'"
        ) from error
    module: ModuleType = modeling_gemma4
    return module


def register() -> None:
    """Makes `attend` known to transformers, under NAME."""
    gemma4()
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


@dataclass(frozen=True)
class Layer:
    """Where an attention module finds its K and V: the kind's pool, its place among the layers of a page. fold: what its
    queries are multiplied with before they meet folded rows, fp32 [head_dim]."""

    kind: str
    index: int
    shared: bool
    fold: torch.Tensor | None


def text_config(model: Any) -> Any:
    """The model's text config. Raises NotGemma4 where the model is another, or one that attends both ways."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind != "gemma4_text":
        raise NotGemma4(f"the model is {kind or type(model).__name__}, not gemma4_text: its attention is not Gemma 4's")
    config = model.config
    if config.use_bidirectional_attention == "all":
        raise NotGemma4("the model attends to later tokens (use_bidirectional_attention is 'all'); the kernels are causal")
    return config


def layout(model: Any, mode: Mode) -> tuple[dict[str, Heads], list[Layer]]:
    """The kinds of layers that a model has, and where each layer's K and V lie. Raises NotGemma4, and Unsupported for
    folded pages of a model whose K and V are two projections."""
    config = text_config(model)
    if mode is Mode.TILELANG640 and not config.attention_k_eq_v:
        raise Unsupported(
            f"{mode.value} keeps folded rows, which need K and V to be one projection; this model has attention_k_eq_v off "
            f"({config.num_hidden_layers} layers, hidden size {config.hidden_size}): use {Mode.TILELANG.value}"
        )
    owners: dict[str, list[int]] = {}
    places: list[tuple[str, int, bool, int]] = []
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        kind = KINDS[attention.layer_type]
        owned = owners.setdefault(kind, [])
        if not attention.is_kv_shared_layer:
            owned.append(index)
        places.append((kind, len(owned) - 1, attention.is_kv_shared_layer, owned[-1]))
    heads = {}
    for kind, owned in owners.items():
        attention = model.model.layers[owned[0]].self_attn
        heads[kind] = Heads(
            kind=kind,
            q_heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads // attention.num_key_value_groups,
            head_dim=attention.head_dim,
            layers=len(owned),
            window=config.sliding_window if kind == "sliding" else 0,
            page_format=mode.page_format if kind == "global" else "split",
        )
    layers = []
    for kind, place, shared, owner in places:
        norm = model.model.layers[owner].self_attn.k_norm.weight
        layers.append(Layer(kind, place, shared, folding_weight(norm) if heads[kind].folded else None))
    return heads, layers


@dataclass
class Pass:
    """One forward pass: a step of each kind, and what serves it."""

    steps: dict[str, Step]
    layers: list[Layer]
    attention: Attention
    preps: Preps | None
    ropes: dict[str, Rope]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' interface. query: bf16 [batch, q_heads, rows, head_dim]; key, value: the new
    tokens' [batch, kv_heads, new, head_dim]. Gives [batch, rows, q_heads, head_dim]. Layers that share K and V, and layers that
    transformers cuts down to the last rows, have fewer query rows than the step has tokens."""
    now = arguments.get(ARGUMENT)
    if not isinstance(now, Pass):
        raise RuntimeError(f"the attention implementation {NAME!r} needs a session's pass: call Session.forward, not the model")
    if attention_mask is not None:
        raise ValueError("attention_mask: the kernels are causal, with a window; they take no other mask")
    if arguments.get("dropout") or arguments.get("softcap"):
        raise ValueError("dropout and softcap: the kernels have neither")
    layer = now.layers[module.layer_idx]
    step = now.steps[layer.kind]
    batch, q_heads, rows, head_dim = query.shape
    q = query.transpose(1, 2).reshape(batch * rows, q_heads, head_dim)
    if not layer.shared:
        if key.shape[2] != step.rows:
            raise ValueError(
                f"key has {key.shape[2]} tokens, the step {step.rows}: pass use_cache=False, the pool is the cache"
            )
        store(step, layer.index, _rows(key), _rows(value))
    if layer.fold is not None:
        q = (q.float() * layer.fold).to(q.dtype)
    scale = arguments.get("scaling")
    out = now.attention.attend(step, layer.index, q.contiguous(), 1.0 if scale is None else float(scale))
    return out.view(batch, rows, q_heads, head_dim), None


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, head_dim] as [batch * tokens, heads, head_dim]."""
    return states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])


def prepped_forward(
    self: Any, hidden_states: torch.Tensor, *_: Any, attention_mask: torch.Tensor | None = None, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """A forward of Gemma 4's attention module whose norms, rotation and pool writes are the library's preps."""
    now = arguments.get(ARGUMENT)
    if not isinstance(now, Pass) or now.preps is None:
        raise RuntimeError("an attention module with preps needs a session's pass: call Session.forward, not the model")
    layer = now.layers[self.layer_idx]
    step = now.steps[layer.kind]
    shape = hidden_states.shape[:-1]
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])

    def band(projection: torch.nn.Module) -> Band:
        rows = projection(flat)
        return Band(rows, 0, rows.shape[-1])

    k = None if layer.shared else band(self.k_proj)
    v = None if layer.shared or self.v_proj is None else band(self.v_proj)
    q_norm = self.q_norm.weight
    norms = Norms(q_norm, None if layer.shared else self.k_norm.weight, self.q_norm.eps)
    k_eq_v = not layer.shared and self.v_proj is None
    q = now.preps.prepare(step, layer.index, band(self.q_proj), k, v, norms, now.ropes[layer.kind], k_eq_v=k_eq_v)
    out = now.attention.attend(step, layer.index, q, float(self.scaling))
    return self.o_proj(out.view(*shape, -1)), None


@dataclass
class Request:
    """A sequence that the session serves: its tokens in the pools so far, and its pages of each."""

    name: str
    tokens: int
    tables: dict[str, Table]


class Session:
    """A model and its pools under one mode.

    pages: of each kind's pool. Raises NotGemma4 and Unsupported.
    """

    def __init__(
        self,
        model: Any,
        mode: Mode,
        attention: Attention,
        *,
        pages: dict[str, int],
        preps: Preps | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.mode = mode
        self.attention = attention
        self.preps = preps
        self.heads, self.layers = layout(model, mode)
        if model.dtype != torch.bfloat16:
            raise ValueError(f"the model is {model.dtype}; the kernels take bf16")
        device = model.device
        self.pools = {
            kind: Pool(heads, pages[kind], device, seed=seed + number)
            for number, (kind, heads) in enumerate(self.heads.items())
        }
        self.ropes: dict[str, Rope] = {}
        if preps is not None:
            positions = min(model.config.max_position_embeddings, pages["global"] * PAGE)
            for name, kind in KINDS.items():
                if kind in self.heads:
                    self.ropes[kind] = Rope.of(getattr(model.model.rotary_emb, f"{name}_inv_freq"), positions)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.num_pages * pool.heads.page_bytes for pool in self.pools.values())

    def open(self, name: str = "the sequence") -> Request:
        """A new, empty sequence."""
        return Request(name, 0, {kind: Table() for kind in self.heads})

    def close(self, request: Request) -> None:
        """Gives its pages back."""
        for kind, table in request.tables.items():
            self.pools[kind].give(table.pages)
            table.pages.clear()

    def forward(self, requests: Sequence[Request], tokens: torch.Tensor, *, keep: int = 1) -> torch.Tensor:
        """Appends `tokens`, int64 [requests, new], and gives the logits of the last `keep` rows of each, 0: of all, bf16
        [requests, rows, vocabulary]. Raises PoolExhausted before anything is written, and RuntimeError for a status bit."""
        batch, rows = tokens.shape
        if batch != len(requests):
            raise ValueError(f"tokens has {batch} rows for {len(requests)} requests")
        limit = self.model.config.max_position_embeddings
        for request in requests:
            total = request.tokens + rows
            if total > limit:
                raise ValueError(f"{request.name}: {total} tokens, and the model's positions end at {limit}")
            for kind, table in request.tables.items():
                table.grow(self.pools[kind], total, f"{request.name}, {total} tokens")
        contexts = [request.tokens + rows for request in requests]
        steps = {
            kind: Step(pool, [request.tables[kind] for request in requests], contexts, rows)
            for kind, pool in self.pools.items()
        }
        starts = torch.tensor([[request.tokens] for request in requests], device=tokens.device)
        positions = starts + torch.arange(rows, device=tokens.device)
        now = Pass(steps, self.layers, self.attention, self.preps, self.ropes)
        with torch.no_grad(), serving(self.model, preps=self.preps is not None):
            logits = self.model(tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, **{ARGUMENT: now}).logits
        self.attention.check()
        if self.preps is not None:
            self.preps.check()
        for request in requests:
            request.tokens += rows
            for kind, table in request.tables.items():
                table.release(self.pools[kind], request.tokens)
        return logits


@contextmanager
def serving(model: Any, *, preps: bool) -> Iterator[None]:
    """The model with this backend's attention, and with preps its attention modules' forward; as it was, afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    modules = [layer.self_attn for layer in model.model.layers] if preps else []
    for module in modules:
        module.forward = types.MethodType(prepped_forward, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward
        model.set_attn_implementation(before)


def pages_for(heads: dict[str, Heads], tokens: int, chunk: int, requests: int = 1) -> dict[str, int]:
    """Pages that `requests` sequences of up to `tokens` need in each pool, when no step has more than `chunk` tokens."""
    pages = {}
    for kind, some in heads.items():
        most = min(tokens, some.window + chunk) if some.window else tokens
        pages[kind] = requests * (-(-most // PAGE) + 2)  # a window and a chunk may each begin inside a page
    return pages


def session(
    model: Any, mode: Mode, library: ModuleType, *, tokens: int, chunk: int, requests: int = 1, preps: bool = False
) -> Session:
    """A session on the model's device with room for `requests` sequences of `tokens`, served in steps of up to `chunk`."""
    register()
    heads, _ = layout(model, mode)
    return Session(
        model,
        mode,
        kernels.attention_for(mode, library, model.device),
        pages=pages_for(heads, tokens, chunk, requests),
        preps=Preps(library, model.device) if preps else None,
    )
