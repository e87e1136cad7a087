"""The programs a build needs, where they are, and which versions they have.

Nothing here installs anything. Each finder returns a frozen record or raises ToolchainError, whose last sentence says
the next step. Run as a module (`python -m codegen.toolchain`) it tells build_tools/run whether the host has a CUDA
toolkit; so it must import with nothing but the standard library installed.

Environment read: TILEPRESS_CUDA (auto, host or pypi), CUDACXX, CUDA_HOME, CUDA_PATH, CXX, PATH, and
PEGAINFER_GEMMA4_TILELANG_PYTHON (the Python that has TileLang and torch, when this one lacks them).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import ToolchainError

CUDA_MAJOR = 13
CMAKE_MINIMUM = (3, 24)
PYTHON_MINIMUM = (3, 10)
CUDA_WHEELS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
TILELANG_PYTHON = "PEGAINFER_GEMMA4_TILELANG_PYTHON"

# Where CUDA's installers put toolkits: cuda, and cuda-13.0 and so on beside it.
SYSTEM_PREFIX = Path("/usr/local")

_PROBE_SECONDS = 60
_NO_HOST_TOOLKIT = 3


@dataclass(frozen=True)
class CudaToolkit:
    """A usable CUDA toolkit: nvcc, the runtime's headers and libcudart.so."""

    root: Path
    nvcc: Path
    version: str
    include: Path
    lib: Path
    source: str


@dataclass(frozen=True)
class Tool:
    """A program, its version ("12.2.0") and where it was found ("venv", "PATH" or the variable's name)."""

    name: str
    path: Path
    version: str
    source: str


@dataclass(frozen=True)
class DoctorRow:
    """One line of the doctor's report. An optional row that is not ok stops no build; next_step is "" when ok."""

    name: str
    path: Path | None
    version: str
    ok: bool
    optional: bool
    needed_for: str
    next_step: str


@dataclass(frozen=True)
class _Rejected:
    """A place that was looked at and why it does not serve."""

    where: str
    reason: str


# Running programs


def _run(command: list[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Run a probe and return its exit status and its stdout and stderr together; raises OSError if it cannot start."""
    try:
        done = subprocess.run(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no answer within {_PROBE_SECONDS} s") from error
    return done.returncode, done.stdout


def _which(name: str, env: Mapping[str, str]) -> Path | None:
    """The absolute path of a program named by path or to be found on env's PATH, or None."""
    found = shutil.which(name, path=env.get("PATH", ""))
    return Path(found).absolute() if found else None


# CUDA


def find_cuda(cache_dir: Path, env: Mapping[str, str] = os.environ) -> CudaToolkit:
    """Find a CUDA 13 toolkit: CUDACXX, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, /usr/local/cuda-13*, PyPI's wheels.

    The wheels of the running Python get a root of links under cache_dir, because they lack what nvcc's users expect.
    TILEPRESS_CUDA=host leaves the wheels out, TILEPRESS_CUDA=pypi everything else. Raises ToolchainError if CUDACXX is
    set and unusable, or with every place looked at and its reason if none serves.
    """
    choice = _cuda_choice(env)
    looked: list[_Rejected] = []
    toolkit = None
    if choice != "pypi":
        toolkit = _find_host_cuda(env, looked)
    if toolkit is None and choice != "host":
        toolkit = _find_wheel_cuda(cache_dir, env, looked)
    if toolkit is None:
        raise ToolchainError(_no_cuda_message(looked))
    return toolkit


def _cuda_choice(env: Mapping[str, str]) -> str:
    choice = env.get("TILEPRESS_CUDA") or "auto"
    if choice not in ("auto", "host", "pypi"):
        raise ToolchainError(f"TILEPRESS_CUDA is {choice!r}. Set it to auto, host or pypi, or leave it unset.")
    return choice


def _find_host_cuda(env: Mapping[str, str], looked: list[_Rejected]) -> CudaToolkit | None:
    """The first usable toolkit of the host; every unusable one is added to looked. Raises for an unusable CUDACXX."""
    for source, nvcc in _host_nvccs(env, looked):
        found = _inspect_nvcc(source, nvcc, env)
        if isinstance(found, CudaToolkit):
            return found
        if source == "CUDACXX":
            raise ToolchainError(
                f"CUDACXX is {env['CUDACXX']!r}, but {found.reason}. "
                f"Point CUDACXX at the nvcc of a CUDA {CUDA_MAJOR} toolkit, or unset it."
            )
        looked.append(found)
    return None


def _host_nvccs(env: Mapping[str, str], looked: list[_Rejected]) -> Iterator[tuple[str, Path]]:
    """Each source and nvcc to try, in order; sources that name no nvcc are added to looked."""
    if env.get("CUDACXX"):
        yield "CUDACXX", _which(env["CUDACXX"], env) or Path(env["CUDACXX"])
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(variable):
            yield variable, Path(env[variable]).absolute() / "bin" / "nvcc"
        else:
            looked.append(_Rejected(variable, "not set"))
    on_path = [
        nvcc for folder in env.get("PATH", "").split(os.pathsep) if folder and (nvcc := _which("nvcc", {"PATH": folder}))
    ]
    for nvcc in on_path:
        yield "PATH", nvcc
    if not on_path:
        looked.append(_Rejected("PATH", "no nvcc on it"))
    for root in (SYSTEM_PREFIX / "cuda", *sorted(SYSTEM_PREFIX.glob(f"cuda-{CUDA_MAJOR}*"), reverse=True)):
        yield str(root), root / "bin" / "nvcc"


def _inspect_nvcc(source: str, nvcc: Path, env: Mapping[str, str]) -> CudaToolkit | _Rejected:
    """The toolkit that an nvcc (program, wrapper script or link) belongs to, or why it does not serve."""
    where = source if source.startswith("/") else f"{source} ({nvcc})"
    if not nvcc.is_file():
        return _Rejected(where, f"{nvcc} does not exist")
    try:
        version = _nvcc_version(nvcc, env)
        if version is None:
            return _Rejected(where, f"{nvcc} --version names no CUDA release")
        if int(version.split(".")[0]) != CUDA_MAJOR:
            return _Rejected(where, f"it is CUDA {version}, not {CUDA_MAJOR}.x")
        # A bare link to nvcc looks for its root beside the link; its target looks in the right place.
        first = _toolkit_at(source, nvcc, version, env)
        if isinstance(first, CudaToolkit) or nvcc.resolve() == nvcc:
            return first if isinstance(first, CudaToolkit) else _Rejected(where, first)
        second = _toolkit_at(source, nvcc.resolve(), version, env)
        return second if isinstance(second, CudaToolkit) else _Rejected(where, second)
    except OSError as error:
        return _Rejected(where, f"{nvcc} does not run: {error}")


def _nvcc_version(nvcc: Path, env: Mapping[str, str]) -> str | None:
    """nvcc's full version ("13.0.88"), or None if its answer holds none."""
    status, text = _run([str(nvcc), "--version"], env)
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return match.group(1) if status == 0 and match else None


def _toolkit_at(source: str, nvcc: Path, version: str, env: Mapping[str, str]) -> CudaToolkit | str:
    """The toolkit at the root that nvcc itself names, or what that root lacks."""
    folder = _nvcc_folder(nvcc, env)
    if folder is None:
        return f"{nvcc} --dryrun does not name its own folder"
    root = Path(os.path.normpath(folder.parent))
    include = _first_with(root, ("include", "targets/*/include"), "cuda_runtime.h")
    lib = _first_with(root, ("lib64", "lib", "targets/*/lib"), "libcudart.so")
    if include is None:
        return f"{root} has no include/cuda_runtime.h"
    if lib is None:
        return f"{root} has no lib64/libcudart.so"
    return CudaToolkit(root, folder / "nvcc", version, include, lib, source)


def _nvcc_folder(nvcc: Path, env: Mapping[str, str]) -> Path | None:
    """The folder nvcc takes itself to be in, asked of nvcc because PATH's nvcc may be a script that runs another."""
    # The exit status is no matter: with no host compiler a dry run names the folder and then fails.
    text = _run([str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], env)[1]
    match = re.search(r"^#\$ _HERE_=(.+)$", text, re.MULTILINE)
    return Path(match.group(1).strip()) if match else None


def _first_with(root: Path, patterns: tuple[str, ...], name: str) -> Path | None:
    """The first folder under root that matches a pattern and holds name."""
    folders = (folder for pattern in patterns for folder in sorted(root.glob(pattern)))
    return next((folder for folder in folders if (folder / name).exists()), None)


def _find_wheel_cuda(cache_dir: Path, env: Mapping[str, str], looked: list[_Rejected]) -> CudaToolkit | None:
    """The toolkit of the running Python's wheels, through a shadow root; why not is added to looked."""
    where = f"PyPI wheels of {sys.executable}"
    wheels = _wheel_root()
    if wheels is None:
        looked.append(_Rejected(where, "nvidia-cuda-nvcc is not installed"))
        return None
    missing = [
        name for name in ("include/cuda_runtime.h", "lib/libcudart.so.13", "nvvm/bin/cicc") if not (wheels / name).exists()
    ]
    if missing:
        looked.append(_Rejected(where, f"{wheels} lacks {', '.join(missing)}"))
        return None
    found = _inspect_nvcc("pypi", shadow_root(wheels, cache_dir) / "bin" / "nvcc", env)
    if isinstance(found, CudaToolkit):
        return found
    looked.append(_Rejected(where, found.reason))
    return None


def _wheel_root() -> Path | None:
    """The nvidia/cu13 folder of the running Python that holds nvcc, or None."""
    roots = (Path(folder).absolute() / "nvidia" / f"cu{CUDA_MAJOR}" for folder in sys.path if folder)
    return next((root for root in roots if (root / "bin" / "nvcc").is_file()), None)


def shadow_root(wheels: Path, cache_dir: Path) -> Path:
    """A CUDA root of links to an nvidia/cu13 tree, with the lib64 and libcudart.so that the wheels leave out.

    Its name is a digest of where the tree is, the wheels' versions and what is linked, so an existing root is right as
    it is and another wheel makes another root. Raises ToolchainError if cache_dir cannot be written.
    """
    name = f"cuda-{_wheels_digest(wheels)}"
    final = cache_dir.absolute() / name
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
    except OSError as error:
        raise ToolchainError(f"cannot write in {final.parent}: {error}. Choose another cache directory.") from error
    try:
        draft.chmod(0o755)
        _link_toolkit(wheels, draft)
        draft.rename(final)
    except OSError as error:
        # Another build may have made the same root meanwhile: then its root is the answer.
        if not final.is_dir():
            raise ToolchainError(f"cannot make {final}: {error}. Choose another cache directory.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _wheels_digest(wheels: Path) -> str:
    """Twelve hex digits that change with the tree's place, the NVIDIA wheels' versions and the names linked."""
    # A wheel's metadata folder is named after the wheel and its version.
    installed = (path.name for path in wheels.parent.parent.glob("nvidia_*.dist-info"))
    linked = (str(path.relative_to(wheels)) for folder in ("", "bin", "lib") for path in (wheels / folder).iterdir())
    lines = [str(wheels), *sorted(installed), *sorted(linked)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _link_toolkit(wheels: Path, root: Path) -> None:
    """Fill an empty root. bin and lib64 are real folders: nvcc takes bin/.. for its root, and lib64 gets a new name."""
    for entry in wheels.iterdir():
        if entry.name not in ("bin", "lib", "lib64"):
            (root / entry.name).symlink_to(entry)
    for source, folder in (("bin", "bin"), ("lib", "lib64")):
        (root / folder).mkdir()
        for entry in (wheels / source).iterdir():
            (root / folder / entry.name).symlink_to(entry)
    if not (root / "lib64" / "libcudart.so").is_symlink():
        (root / "lib64" / "libcudart.so").symlink_to(f"libcudart.so.{CUDA_MAJOR}")
    (root / "lib").symlink_to("lib64")


def _no_cuda_message(looked: list[_Rejected]) -> str:
    lines = "\n".join(f"  {rejected.where}: {rejected.reason}" for rejected in looked)
    return (
        f"no usable CUDA {CUDA_MAJOR} toolkit. Looked at:\n{lines}\n"
        f"Run `pip install {' '.join(CUDA_WHEELS)}` for this Python, or build with `./build_tools/run build`."
    )


# CMake, ninja and the C++ compiler


def find_cmake(env: Mapping[str, str] = os.environ) -> Tool:
    """CMake beside the running Python, then on PATH; the first that is new enough. Raises ToolchainError."""
    return _find_packaged("cmake", CMAKE_MINIMUM, env)


def find_ninja(env: Mapping[str, str] = os.environ) -> Tool:
    """ninja beside the running Python, then on PATH. Raises ToolchainError."""
    return _find_packaged("ninja", (1, 10), env)


def _find_packaged(name: str, minimum: tuple[int, int], env: Mapping[str, str]) -> Tool:
    wanted = ".".join(map(str, minimum))
    beside = Path(sys.executable).parent / name
    places = [("venv", beside if beside.is_file() else None), ("PATH", _which(name, env))]
    reasons = []
    for source, path in places:
        version = _version_of(path, env) if path else ""
        if path and version and _at_least(version, minimum):
            return Tool(name, path, version, source)
        if path:
            reasons.append(f"{path} is version {version}, older than {wanted}" if version else f"{path} does not run")
    found = "; ".join(reasons) or f"there is none beside {sys.executable} or on PATH"
    raise ToolchainError(f"no usable {name} {wanted} or newer: {found}. Run `pip install {name}`.")


def find_cxx(env: Mapping[str, str] = os.environ) -> Tool:
    """The C++ compiler: CXX if set, else c++, g++ or clang++ on PATH. Raises ToolchainError; an unusable CXX is one."""
    if env.get("CXX"):
        # CXX may carry flags; the program is its first word.
        program = shlex.split(env["CXX"])[0]
        path = _which(program, env)
        version = _version_of(path, env) if path else ""
        if path and version:
            return Tool("c++", path, version, "CXX")
        reason = "does not run" if path else "is not a program"
        raise ToolchainError(f"CXX is {env['CXX']!r}, but {program!r} {reason}. Point CXX at a C++ compiler, or unset it.")
    for name in ("c++", "g++", "clang++"):
        path = _which(name, env)
        version = _version_of(path, env) if path else ""
        if path and version:
            return Tool("c++", path, version, "PATH")
    raise ToolchainError("no C++ compiler on PATH (c++, g++, clang++). Install one, such as the distribution's g++ package.")


def _version_of(path: Path, env: Mapping[str, str]) -> str:
    """The first dotted number of what `--version` prints, outside parentheses; "" if the program does not answer."""
    try:
        status, text = _run([str(path), "--version"], env)
    except OSError:
        return ""
    # Distributions put their own package version in parentheses: "g++ (Debian 12.2.0-14) 12.2.0".
    match = re.search(r"\d+(?:\.\d+)+", re.sub(r"\([^)]*\)", "", text))
    return match.group(0) if status == 0 and match else ""


def _at_least(version: str, minimum: tuple[int, int]) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) >= minimum


# The doctor


def doctor_report(cache_dir: Path, env: Mapping[str, str] = os.environ, tilelang: str | None = None) -> tuple[DoctorRow, ...]:
    """What a build on this host has and lacks, one row a program. Never raises ToolchainError.

    tilelang is the one TileLang version that serves; without it any version does.
    """
    return (
        _python_row(),
        _tool_row("C++ compiler", lambda: find_cxx(env), "every build"),
        _tool_row("cmake", lambda: find_cmake(env), "every build"),
        _tool_row("ninja", lambda: find_ninja(env), "every build"),
        _cuda_row(cache_dir, env),
        *(
            _path_row(name, env, "every build", "Install the distribution's binutils package.")
            for name in ("ld", "objcopy", "ar")
        ),
        _distribution_row("TileLang", "tilelang", env, tilelang),
        _distribution_row("torch", "torch", env, None),
        _gpu_row(env),
        _path_row("rustc", env, "the Rust example", "Install a Rust toolchain.", optional=True),
    )


def _python_row() -> DoctorRow:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info[:2] >= PYTHON_MINIMUM
    wanted = ".".join(map(str, PYTHON_MINIMUM))
    return _row("python", Path(sys.executable), version, ok, "every build", f"Use Python {wanted} or newer.")


def _tool_row(name: str, find: Callable[[], Tool], needed_for: str) -> DoctorRow:
    try:
        tool = find()
    except ToolchainError as error:
        return _row(name, None, "", False, needed_for, str(error))
    return _row(name, tool.path, tool.version, True, needed_for, "")


def _cuda_row(cache_dir: Path, env: Mapping[str, str]) -> DoctorRow:
    try:
        toolkit = find_cuda(cache_dir, env)
    except ToolchainError as error:
        return _row("CUDA toolkit", None, "", False, "every build", str(error))
    return _row("CUDA toolkit", toolkit.nvcc, toolkit.version, True, "every build", "")


def _path_row(name: str, env: Mapping[str, str], needed_for: str, next_step: str, optional: bool = False) -> DoctorRow:
    path = _which(name, env)
    version = _version_of(path, env) if path else ""
    return _row(name, path, version, bool(version), needed_for, next_step, optional)


def _distribution_row(name: str, package: str, env: Mapping[str, str], wanted: str | None) -> DoctorRow:
    """A Python package that lowering imports, in this Python or in the one TILELANG_PYTHON names."""
    python = env.get(TILELANG_PYTHON) or sys.executable
    version = _package_version(package, env)
    pin = f"{package}=={wanted}" if wanted else package
    next_step = f"{python} has {package} {version or '(none)'}. Run `./build_tools/run build`, or install {pin} there."
    ok = version == wanted if wanted else bool(version)
    return _row(name, _which(python, env), version, ok, "generating kernels", next_step)


def _package_version(package: str, env: Mapping[str, str]) -> str:
    """The installed version of a package, or "" if it is absent or its Python does not run."""
    python = env.get(TILELANG_PYTHON)
    if not python:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""
    script = "import importlib.metadata as metadata, sys; print(metadata.version(sys.argv[1]))"
    try:
        status, text = _run([python, "-c", script, package], env)
    except OSError:
        return ""
    return text.strip() if status == 0 else ""


def _gpu_row(env: Mapping[str, str]) -> DoctorRow:
    path = _which("nvidia-smi", env)
    version = ""
    if path:
        try:
            status, text = _run([str(path), "--query-gpu=driver_version", "--format=csv,noheader"], env)
        except OSError:
            status, text = 1, ""
        version = text.split("\n")[0].strip() if status == 0 else ""
    next_step = "Nothing to do for a build; run the GPU tests on a host with an NVIDIA driver and an H200-class GPU."
    return _row("GPU driver", path, version, bool(version), "the GPU tests", next_step, optional=True)


def _row(
    name: str, path: Path | None, version: str, ok: bool, needed_for: str, next_step: str, optional: bool = False
) -> DoctorRow:
    return DoctorRow(name, path, version, ok, optional, needed_for, "" if ok else next_step)


# For build_tools/run


def main(env: Mapping[str, str] = os.environ) -> int:
    """Print the host's CUDA toolkit. Status 0: usable; 3: none, so use PyPI's wheels; 1: an error, said on stderr."""
    try:
        choice = _cuda_choice(env)
        looked: list[_Rejected] = []
        toolkit = None if choice == "pypi" else _find_host_cuda(env, looked)
        if toolkit is None and choice == "host":
            raise ToolchainError(_no_cuda_message(looked))
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    if toolkit is None:
        return _NO_HOST_TOOLKIT
    print(f"CUDA {toolkit.version} at {toolkit.root} ({toolkit.source})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
