"""pytest collects every directory of tests: by default it leaves out any that is called build."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from .samples import ROOT


def test_no_directory_of_tests_is_left_out(request: pytest.FixtureRequest) -> None:
    patterns = request.config.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {"unit", "build", "gpu"} <= folders
    assert [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in patterns)] == []
