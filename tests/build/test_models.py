"""Every size of Gemma 4, whole and sharded over GPUs, against what the built library answers at load time."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.table import Layer, load

from .calls import FOLDED, OK, SPLIT, UNSUPPORTED, Library

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]
MODELS = {model.name: model for model in load(ROOT / "families.toml").model}

# Query and KV heads of a GPU, by hand: the size, its layer, and what each of 1, 2, 4 and 8 GPUs has where that divides both.
SHARDS: dict[tuple[str, Layer], list[tuple[int, int]]] = {
    ("gemma4-e2b", "global"): [(8, 1)],
    ("gemma4-e2b", "sliding"): [(8, 1)],
    ("gemma4-e4b", "global"): [(8, 2), (4, 1)],
    ("gemma4-e4b", "sliding"): [(8, 2), (4, 1)],
    ("gemma4-12b", "global"): [(16, 1)],
    ("gemma4-12b", "sliding"): [(16, 8), (8, 4), (4, 2), (2, 1)],
    ("gemma4-26b-a4b", "global"): [(16, 2), (8, 1)],
    ("gemma4-26b-a4b", "sliding"): [(16, 8), (8, 4), (4, 2), (2, 1)],
    ("gemma4-31b", "global"): [(32, 4), (16, 2), (8, 1)],
    ("gemma4-31b", "sliding"): [(32, 16), (16, 8), (8, 4), (4, 2)],
}
HEAD_DIMS = {"global": 512, "sliding": 256}
ENTRIES = {
    "global": ("tilepress_global_prefill", "tilepress_global_decode"),
    "sliding": ("tilepress_sliding_prefill", "tilepress_sliding_decode"),
}


def test_the_table_has_every_size_and_shard() -> None:
    found = {
        (model.name, layer): [(heads.q_heads, heads.kv_heads) for heads in model.heads(layer).shards.values()]
        for model in MODELS.values()
        for layer in ("global", "sliding")
    }
    assert found == SHARDS
    assert all(MODELS[name].heads(layer).head_dim == HEAD_DIMS[layer] for name, layer in SHARDS)


@pytest.mark.parametrize(("name", "layer"), SHARDS)
@pytest.mark.parametrize("tier", ["real", "stub"])
def test_every_shard_is_served(name: str, layer: Layer, tier: str, request: pytest.FixtureRequest) -> None:
    library: Library = request.getfixturevalue(tier)
    # A folded pool keeps one row for K and V: only for global layers, and only where they are one projection.
    folded = layer == "global" and MODELS[name].k_eq_v
    for entry in ENTRIES[layer]:
        for q_heads, kv_heads in SHARDS[name, layer]:
            for page_format in (SPLIT, *([FOLDED] if folded else [])):
                geometry = (q_heads, kv_heads, HEAD_DIMS[layer], 64, page_format)
                code = library.c.call_supports(entry.encode(), *geometry)
                assert code == OK, (entry, geometry, library.c.call_last_error())


@pytest.mark.parametrize("layer", ENTRIES)
def test_no_layer_is_served_by_the_others_entries(layer: Layer, stub: Library) -> None:
    other = "sliding" if layer == "global" else "global"
    for entry in ENTRIES[other]:
        assert stub.c.call_supports(entry.encode(), 8, 1, HEAD_DIMS[layer], 64, SPLIT) == UNSUPPORTED
    for entry in ENTRIES["sliding"]:
        assert stub.c.call_supports(entry.encode(), 8, 1, 256, 64, FOLDED) == UNSUPPORTED
