"""One full build and one stub build a session, in a cache of the session's own, and the command line as a subprocess."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from commands import ROOT, Cli, Done, environment


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's TILEPRESS_CACHE."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def run_cli(cache: Path) -> Cli:
    """`run_cli(*args, env=…)`: `python -m codegen ARGS` with the session's cache. package: the root of another codegen."""

    def run(*args: object, env: Mapping[str, str | None] | None = None, package: Path = ROOT) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "codegen", *map(str, args)],
            capture_output=True,
            text=True,
            cwd=package,
            env=environment(cache, env, package),
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, run_cli: Cli) -> Path:
    """The install tree of one full build."""
    out = tmp_path_factory.mktemp("library") / "out"
    run_cli("build", "--arch", "sm_90", "--out", out).succeeded()
    return out


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory, run_cli: Cli) -> Path:
    """The install tree of one stub build."""
    out = tmp_path_factory.mktemp("stub") / "out"
    run_cli("build", "--arch", "sm_90", "--stub", "--out", out).succeeded()
    return out


@pytest.fixture(scope="session")
def emitted(tmp_path_factory: pytest.TempPathFactory, run_cli: Cli) -> Path:
    """The self-contained source tree of one `emit`."""
    out = tmp_path_factory.mktemp("emitted") / "tree"
    run_cli("emit", "--arch", "sm_90", "--out", out).succeeded()
    return out


@pytest.fixture(scope="session")
def compiler() -> Callable[..., None]:
    """`compiler(*args)`: the C++ compiler's driver, which compiles C as C. A failure shows what it said."""
    from codegen.toolchain import find_cxx

    path = find_cxx().path

    def run(*args: object) -> None:
        done = subprocess.run([path, *map(str, args)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def rustc() -> str:
    """rustc, or a skip."""
    path = shutil.which("rustc")
    if path is None:
        pytest.skip("no rustc on PATH")
    return path
