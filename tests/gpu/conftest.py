"""What every GPU test needs, and what happens where it is missing: a skip, or a failure with
PEGAINFER_REQUIRE_GPU=1."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

REQUIRED = os.environ.get("PEGAINFER_REQUIRE_GPU") == "1"


def unavailable(reason: str) -> NoReturn:
    """Ends the test as this run wants it: a skip, or a failure where a GPU is required."""
    if REQUIRED:
        pytest.fail(f"PEGAINFER_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


class SkippedModule(pytest.Module):
    """A test module that is not imported, because it needs torch."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("needs torch", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """The test modules import torch; without it they are skipped, unless a GPU is required: then the import fails."""
    if REQUIRED or importlib.util.find_spec("torch"):
        return None
    return SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def library() -> ModuleType:
    """The module `tilepress`, on a host with a GPU that it was built for."""
    import torch

    from bench.library import LibraryMissing, load

    if not torch.cuda.is_available():
        unavailable("torch sees no GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        unavailable(f"{torch.cuda.get_device_name()} is not an sm_90 GPU")
    try:
        return load()
    except LibraryMissing as error:
        unavailable(str(error))


@pytest.fixture(scope="session")
def twins(library: ModuleType, request: pytest.FixtureRequest) -> None:
    """The JIT twins of every collected test that asks for them, compiled at once: one after another they would take most of
    the suite's time. A module names its operation in OPERATION and HEAD_DIM; its tests are parametrized by group, and by
    page_format where there are several."""
    try:
        importlib.import_module("tilelang")
    except ImportError as error:
        unavailable(f"TileLang cannot be imported ({error})")
    from .harness import compile_twins, instances

    wanted = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "twins" in item.fixturenames:
            given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
            if "group" in given:
                module = item.module
                wanted += instances(module.OPERATION, module.HEAD_DIM, given["group"], given.get("page_format", "split"))
    compile_twins(wanted)
