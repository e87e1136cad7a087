"""Bits of the device status word: what only the device can see, reported instead of faulting.

One place for the numbers: the kernels set them and the header names them.
"""

from __future__ import annotations

BAD_PAGE_ID = 1  # a page id outside the pool: its keys read as masked
BAD_INDEX = 2  # an index pointer, a last page length or an origin out of range: clamped
BAD_WINDOW = 4  # a window reaches before the request's page list: those keys read as masked

DOCS = (
    ("BAD_PAGE_ID", BAD_PAGE_ID, "a page id lies outside the pool; its keys were masked"),
    (
        "BAD_INDEX",
        BAD_INDEX,
        "an index pointer, a last page length or an origin that a tile used lies outside its range; it was clamped",
    ),
    ("BAD_WINDOW", BAD_WINDOW, "a window reaches before the request's page list; the keys before it were masked"),
)
