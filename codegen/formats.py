"""The page formats of a KV pool: the one place for what a page holds. The ABI, the C sources and the kernels take it from here.

A page holds page_size tokens of every layer; rows are [kv_heads, row width] bf16. Standard library only: kernels read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class PageFormat:
    """One format.

    code: its TILEPRESS_PAGE_FORMAT_* value. extra_columns: of a row, in front of the head's own. tiles: blocks of page_size
    rows that a layer has in a page. needs_k_eq_v: whether K and V must be the same projection.
    """

    name: str
    code: int
    extra_columns: int
    tiles: int
    needs_k_eq_v: bool
    doc: str


# The rotated columns of a global head: [0, ROTATED) and, half a head further, as many again.
ROTATED = 64

FORMATS: Mapping[str, PageFormat] = MappingProxyType(
    {
        page_format.name: page_format
        for page_format in (
            PageFormat(
                name="split",
                code=1,
                extra_columns=0,
                tiles=2,
                needs_k_eq_v=False,
                doc="a page holds the layer's page_size K rows, then its page_size V rows; row width head_dim",
            ),
            PageFormat(
                name="folded",
                code=2,
                extra_columns=2 * ROTATED,
                tiles=1,
                needs_k_eq_v=True,
                doc=(
                    "a page holds page_size rows [K_rot 128 | V head_dim]; K_rot is rotated K at columns [0, 64), then at "
                    "[head_dim / 2, head_dim / 2 + 64); the query carries K's norm weight elsewhere. Only where K and V are "
                    "one projection (k_eq_v)"
                ),
            ),
        )
    }
)
