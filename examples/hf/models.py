"""Gemma 4 text models to run: real checkpoints, and random weights at the true head dims with a stack of a few layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .backend import NotGemma4, gemma4

SLIDING, GLOBAL = "sliding_attention", "full_attention"
VOCABULARY = 32_768  # of random weights: the true one, 262,144, makes logits slower to compare and no more telling
# Scores are q . k of normed rows, with no factor: with unit norm weights their deviation would be sqrt(head_dim), 16 to 23, and
# a softmax would see one key alone. With Q's weights at this size it is about 1: many keys count, and none is all.
QUERY_SIZE = 0.05
NORM_SPREAD = 0.4  # of norm weights around their size
# Rows of the output matrix differ in length, by a log-normal factor of this deviation: the best tokens then lie apart, as a
# trained model's do. With rows of one length most rows' first two logits would be closer than bf16 rounding moves them.
OUTPUT_SIZE, OUTPUT_SPREAD = 0.003, 1.0


@dataclass(frozen=True)
class Shape:
    """A model's widths, and the stack that the oracle cuts it to: `layers` in order, of which the last `shared` read K and V of
    earlier ones."""

    name: str
    hidden: int
    q_heads: int
    sliding_kv: int
    global_kv: int
    window: int
    intermediate: int
    k_eq_v: bool
    layers: tuple[str, ...]
    shared: int = 0
    per_layer_input: int = 0


_PAIR = (SLIDING, GLOBAL)
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("E2B", 1536, 8, 1, 1, 512, 6144, False, _PAIR * 4, shared=4, per_layer_input=256),
        Shape("E4B", 2560, 8, 2, 2, 512, 10240, False, _PAIR * 4, shared=4, per_layer_input=256),
        Shape("12B", 3840, 16, 8, 1, 1024, 15360, True, _PAIR * 2),
        Shape("31B", 5376, 32, 16, 4, 1024, 21504, True, _PAIR * 2),
    )
}


def config_of(shape: Shape, *, vocabulary: int = VOCABULARY) -> Any:
    """A text config of transformers. The output matrix is its own: tied to the embedding, a model of few layers would answer
    every token with itself, whatever attention does. Raises NotGemma4."""
    gemma4()
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        vocab_size=vocabulary,
        vocab_size_per_layer_input=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=len(shape.layers),
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.sliding_kv,
        num_global_key_value_heads=shape.global_kv,
        head_dim=256,
        global_head_dim=512,
        sliding_window=shape.window,
        layer_types=list(shape.layers),
        attention_k_eq_v=shape.k_eq_v,
        num_kv_shared_layers=shape.shared,
        use_double_wide_mlp=bool(shape.shared),
        hidden_size_per_layer_input=shape.per_layer_input,
        final_logit_softcapping=30.0,
        tie_word_embeddings=False,
        max_position_embeddings=262_144,
    )


def random_model(config: Any, device: torch.device, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Gemma 4 with random weights, made on the device. Norm weights differ from 1 and from one another, so that one which is
    left out or applied to another column is seen."""
    modeling = gemma4()
    with torch.device(device):
        model = modeling.Gemma4ForCausalLM._from_config(config, dtype=dtype, attn_implementation="eager")
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, device=device, dtype=torch.float32)
            if weight.dim() == 1:
                size = QUERY_SIZE if name.endswith("q_norm.weight") else 1.0
                weight.copy_((1 + NORM_SPREAD * noise) * size)
            elif name == "lm_head.weight":
                spread = torch.randn(weight.shape[0], 1, generator=generator, device=device, dtype=torch.float32)
                weight.copy_(noise * OUTPUT_SIZE * torch.exp(OUTPUT_SPREAD * spread))
            else:
                weight.copy_(noise * 0.02)
    return model.eval()


def load(path: Path, device: torch.device) -> Any:
    """A checkpoint's text model in bf16. Raises NotGemma4."""
    modeling = gemma4()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise NotGemma4(f"{path} is no checkpoint that transformers can read: {error}") from error
    if config.model_type not in ("gemma4", "gemma4_text"):
        raise NotGemma4(f"{path} is a {config.model_type} model, not Gemma 4")
    model = modeling.Gemma4ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    return model.to(device).eval()
