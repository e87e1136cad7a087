"""One full build, one narrow and one stub build a session, and the command line as a subprocess.

Every build is in a cache of the session's own, or in the one that TILEPRESS_TEST_CACHE names, to be kept between sessions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from .calls import HERE, Library
from .commands import NARROW_KERNELS, ROOT, Cli, Done, Narrow, environment, narrow_lists, narrow_table


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's TILEPRESS_CACHE."""
    kept = os.environ.get("TILEPRESS_TEST_CACHE")
    return Path(kept) if kept else tmp_path_factory.mktemp("cache")


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
def narrow(tmp_path_factory: pytest.TempPathFactory, run_cli: Cli) -> Narrow:
    """A full build of the narrow table: six kernels."""
    folder = tmp_path_factory.mktemp("narrow")
    built = Narrow(narrow_table(folder / "families.toml"), narrow_lists(folder / "symbols", *NARROW_KERNELS), folder / "out")
    run_cli("build", "--arch", "sm_90", "--out", built.out, *built.options).succeeded()
    return built


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory, run_cli: Cli) -> Path:
    """The install tree of one stub build."""
    out = tmp_path_factory.mktemp("stub") / "out"
    run_cli("build", "--arch", "sm_90", "--stub", "--out", out).succeeded()
    return out


@pytest.fixture(scope="session")
def emitted(tmp_path_factory: pytest.TempPathFactory, run_cli: Cli, narrow: Narrow) -> Path:
    """The self-contained source tree of one `emit` of the narrow table."""
    out = tmp_path_factory.mktemp("emitted") / "tree"
    run_cli("emit", "--arch", "sm_90", "--table", narrow.table, "--out", out).succeeded()
    return out


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what codegen is made of, to be changed."""
    root = tmp_path / "package"
    for name in ("codegen", "csrc", "build_tools/symbols"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CMakeLists.txt", "families.toml"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture(scope="session")
def compiler() -> Callable[..., None]:
    """`compiler(*args)`: the C++ compiler's driver, which compiles C as C. A failure shows what it said."""
    from codegen.toolchain import find_cxx

    path = find_cxx().path

    def run(*args: object) -> None:
        done = subprocess.run([path, *map(str, args)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture(scope="session")
def linked(compiler: Callable[..., None], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Library]:
    """`linked(prefix)`: the archive of an install tree and the fake CUDA runtime, as a library to call."""
    from codegen.toolchain import find_cuda

    def run(prefix: Path) -> Library:
        folder = tmp_path_factory.mktemp("linked")
        include = find_cuda(cache).include
        strict = ("-Wall", "-Wextra", "-Werror", "-Wno-builtin-declaration-mismatch")
        fake = folder / "fake.o"
        includes = (f"-isystem{include}", f"-I{prefix / 'include'}")
        compiler("-x", "c", "-std=c11", *strict, "-fPIC", *includes, "-c", HERE / "fake_cudart.c", "-o", fake)
        # Nothing else may be missing: the archive needs the C++ runtime and these functions of libcudart.
        libraries = (prefix / "lib/libtilepress.a", "-lstdc++")
        compiler("-shared", fake, *libraries, "-Wl,-z,defs", "-Wl,-Bsymbolic", "-o", folder / "library.so")
        return Library(folder / "library.so")

    return run


@pytest.fixture(scope="session")
def real(linked: Callable[[Path], Library], library: Path) -> Library:
    """The full build, to be called."""
    return linked(library)


@pytest.fixture(scope="session")
def stub(linked: Callable[[Path], Library], stub_library: Path) -> Library:
    """The stub, to be called."""
    return linked(stub_library)


@pytest.fixture
def without_a_driver(real: Library) -> None:
    """The state of a host without a driver, as every test of a call finds it."""
    real.without_a_driver()


@pytest.fixture
def rustc() -> str:
    """rustc, or a skip."""
    path = shutil.which("rustc")
    if path is None:
        pytest.skip("no rustc on PATH")
    return path
