"""The page formats: what a page holds, in numbers worked out by hand, and where they are written down."""

from __future__ import annotations

import re

from codegen import abi, rendering
from codegen.formats import FORMATS, ROTATED
from codegen.kernels import OPERATIONS

from .samples import ROOT

PAGE = 64


def columns(name: str, head_dim: int) -> int:
    """bf16 columns that a token and KV head take in a page: a row in each of the layer's tiles."""
    page_format = FORMATS[name]
    return page_format.tiles * (head_dim + page_format.extra_columns)


def test_columns_a_token_and_head() -> None:
    """K and V side by side in tiles of their own; or the rotated 128 columns of K, then V, in one row."""
    assert columns("split", 512) == 512 + 512 == 1024
    assert columns("split", 256) == 256 + 256 == 512
    assert columns("folded", 512) == 128 + 512 == 640


def test_what_folding_saves() -> None:
    """A page of the 31B's ten global layers with 4 KV heads: 64 tokens in 5,120 KB split, 3,200 KB folded."""
    heads, layers = 4, 10
    assert PAGE * heads * layers * columns("split", 512) * 2 == 5_242_880
    assert PAGE * heads * layers * columns("folded", 512) * 2 == 3_276_800


def test_the_formats() -> None:
    found = {f.name: (f.code, f.extra_columns, f.tiles, f.needs_k_eq_v) for f in FORMATS.values()}
    assert found == {"split": (1, 0, 2, False), "folded": (2, 128, 1, True)}
    assert list(FORMATS) == [f.name for f in FORMATS.values()]


def test_a_folded_row_holds_both_rotated_halves() -> None:
    assert ROTATED == 64
    assert FORMATS["folded"].extra_columns == 2 * 64
    assert all(f.extra_columns == 0 for f in FORMATS.values() if not f.needs_k_eq_v)


def test_the_abi_names_them() -> None:
    assert [(code.name, code.value) for code in abi.PAGE_FORMATS] == [("SPLIT", 1), ("FOLDED", 2)]


def test_the_c_sources_read_them() -> None:
    text = rendering.page_formats_header()
    assert '{"split", TILEPRESS_PAGE_FORMAT_SPLIT, 0, 2, false},' in text
    assert '{"folded", TILEPRESS_PAGE_FORMAT_FOLDED, 128, 1, true},' in text


def test_an_operation_asks_for_formats_that_are() -> None:
    for operation in OPERATIONS.values():
        assert set(operation.formats) <= FORMATS.keys()


def test_a_kernel_takes_a_rows_width_from_here() -> None:
    """Both kernels that read folded rows form the width from the format, not from a number of their own."""
    for name in ("prefill", "decode"):
        text = (ROOT / "codegen" / "kernels" / f"{name}.py").read_text(encoding="utf-8")
        assert "].extra_columns" in text
        assert not re.search(r"\b640\b", text.split('"""', 2)[2])
