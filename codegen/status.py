"""Bits of the device status word: what only the device can see, reported instead of faulting.

One place for the numbers: the kernels set them and the header names them.
"""

from __future__ import annotations

BAD_PAGE_ID = 1  # a page id outside the pool: its keys read as masked and are not written
BAD_INDEX = 2  # an index pointer, a last page length or an origin out of range: clamped, or its rows not written
BAD_WINDOW = 4  # a window reaches before the request's page list: those keys read as masked
BAD_POSITION = 8  # a position outside the cos and sin tables or the page list: not written

DOCS = (
    ("BAD_PAGE_ID", BAD_PAGE_ID, "a page id lies outside the pool; its keys were masked, or not written"),
    (
        "BAD_INDEX",
        BAD_INDEX,
        "an index pointer, a last page length or an origin that a tile or row used lies outside its range; it was clamped, or "
        "the row was not written",
    ),
    ("BAD_WINDOW", BAD_WINDOW, "a window reaches before the request's page list; the keys before it were masked"),
    (
        "BAD_POSITION",
        BAD_POSITION,
        "a position lies outside the cos and sin tables, and its row was not written, or outside its page list, and its K and "
        "V were not written",
    ),
)
