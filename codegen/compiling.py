"""CMake and ninja over a generated tree: from sources to relinked objects and the archive, with the compiler's output."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.cache import Store, digest_file, digest_text, digest_tree
from codegen.errors import CompileError
from codegen.toolchain import CudaToolkit, Tool
from codegen.tree import Tree


@dataclass(frozen=True)
class Tools:
    """The build tools. cuda: absent for a stub."""

    cmake: Tool
    ninja: Tool
    cxx: Tool
    cuda: CudaToolkit | None


@dataclass(frozen=True)
class Compiled:
    """What a build left. objects: relinked, by unit. logs: the compiler's output, by unit. python: the module, if asked."""

    archive: Path
    objects: Mapping[str, Path]
    logs: Mapping[str, str]
    python: Path | None


HEADERS = ("include", "generated", "csrc")  # of a tree; the launcher knows which of them a source includes


def environment_digest(includes: Sequence[Path], tools: Tools) -> str:
    """Changes when the compiler, the toolkit or the headers of others in `includes` do: what every object depends on."""
    parts = [digest_tree(path) for path in includes]
    parts += [digest_file(tools.cxx.path.resolve()), tools.cxx.version]
    if tools.cuda:
        parts += [tools.cuda.version, digest_tree(tools.cuda.include.resolve())]
        parts += [digest_tree(tools.cuda.nvcc.resolve().parent), digest_tree(tools.cuda.root.resolve() / "nvvm")]
    return digest_text(*parts)


def launcher(environment: str, store: Store | None, users: str, folders: Sequence[Path] = ()) -> str:
    """CMAKE_<LANG>_COMPILER_LAUNCHER: ours, then the user's own. A CMake list. folders: where our headers lie."""
    words = [sys.executable, "-m", "codegen.compiler_launcher", "--environment", environment]
    if folders:
        words += ["--headers", os.pathsep.join(str(folder) for folder in folders)]
    if store:
        words += ["--cache", str(store.root)]
    words.append("--")
    words += users.split(";") if ";" in users else shlex.split(users)
    return ";".join(words)


def compile_tree(
    tree: Tree,
    tools: Tools,
    build: Path,
    store: Store | None,
    jobs: int,
    python: bool,
    racecheck: bool,
    progress: Callable[[int, int, str], None],
) -> Compiled:
    """Configures and builds `tree` in `build`, which is made afresh, so that no file time is ever trusted.

    racecheck: kernels for a race checker, see CMakeLists.txt. progress(done, total, what) follows ninja. Raises CompileError
    with the tail of the output.
    """
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    environment = environment_digest(tree.kernel_includes, tools)
    folders = [tree.root / name for name in HEADERS]

    def launch(variable: str, environment: str = environment) -> str:
        return launcher(environment, store, os.environ.get(variable, ""), folders)

    package_parent = str(Path(__file__).parent.parent)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in (package_parent, os.environ.get("PYTHONPATH", "")) if p),
        "NINJA_STATUS": "[%f/%t] ",
        "LC_ALL": "C",
    }
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CUDAFLAGS"):
        variables.pop(name, None)  # a kernel's flags are its JIT twin's, and the cache's key knows no others
    configure = [
        str(tools.cmake.path),
        "-G",
        "Ninja",
        "-S",
        str(tree.root),
        "-B",
        str(build),
        f"-DCMAKE_MAKE_PROGRAM={tools.ninja.path}",
        f"-DCMAKE_CXX_COMPILER={tools.cxx.path}",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_CXX_FLAGS_RELEASE=",
        f"-DCMAKE_CXX_COMPILER_LAUNCHER={launch('CMAKE_CXX_COMPILER_LAUNCHER')}",
        f"-DTILEPRESS_PYTHON={'ON' if python else 'OFF'}",
        f"-DTILEPRESS_RACECHECK={'ON' if racecheck else 'OFF'}",
    ]
    if tools.cuda:
        configure += [
            f"-DCMAKE_CUDA_COMPILER={tools.cuda.nvcc}",
            f"-DCUDAToolkit_ROOT={tools.cuda.root}",
            f"-DCMAKE_CUDA_COMPILER_LAUNCHER={launch('CMAKE_CUDA_COMPILER_LAUNCHER')}",
        ]
    if tree.incumbent_includes:
        # The incumbent's units depend on FlashInfer's headers and not on TileLang's; no other object depends on those.
        own = environment_digest(tree.incumbent_includes, tools)
        configure.append(f"-DTILEPRESS_INCUMBENT_LAUNCHER={launch('CMAKE_CUDA_COMPILER_LAUNCHER', own)}")
    if python:
        configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={_pybind11_dir()}"]
    _run(configure, variables, "CMake cannot configure the build", lambda _line: None)

    status = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")

    def follow(line: str) -> None:
        match = status.match(line)
        if match:
            progress(int(match[1]), int(match[2]), match[3])

    _run([str(tools.ninja.path), "-C", str(build), "-j", str(jobs)], variables, "the build failed", follow)
    names = [unit.name for unit in tree.units]
    return Compiled(
        archive=build / "libtilepress.a",
        objects={name: build / f"{name}.o" for name in names},
        logs={name: _log(build, name) for name in names},
        python=next((build / "python").glob("tilepress*.so"), None) if python else None,
    )


def _log(build: Path, unit: str) -> str:
    logs = sorted((build / "CMakeFiles" / f"{unit}.dir").rglob("*.log"))
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)


def _pybind11_dir() -> str:
    try:
        import pybind11
    except ImportError:
        raise CompileError("--python needs pybind11. Install it (pip install pybind11).") from None
    return str(pybind11.get_cmake_dir())


def _run(command: list[str], variables: Mapping[str, str], failure: str, follow: Callable[[str], None]) -> None:
    """Runs a tool, handing each line of its output to `follow`. Raises CompileError with the last lines."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(variables), errors="replace"
    ) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            follow(lines[-1])
    if process.returncode:
        tail = "\n".join(lines[-60:])
        raise CompileError(f"{failure}:\n{tail}\nRun `python -m codegen doctor` to check the tools, and read the lines above.")
