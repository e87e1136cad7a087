"""Fixtures that more than one module uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch on one thread. Models as small as the tests' gain nothing from more, and where others use the machine, each of
    their many short products waits for a thread that is not running."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
