"""FlashInfer's headers, out of its PyPI wheel: fetched when a build needs them, checked against the table's hash, cached."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from codegen.errors import ToolchainError
from codegen.table import FlashInfer

WHEEL_VARIABLE = "TILEPRESS_FLASHINFER_WHEEL"

# What is taken out of the wheel, and where it goes. libcu++ is of the CCCL release that FlashInfer was written against; it
# must be found before the toolkit's own.
PARTS = (
    ("flashinfer/data/include/", "include/"),
    ("flashinfer/data/cccl/libcudacxx/include/", "libcudacxx/include/"),
    ("flashinfer_python-{version}.dist-info/licenses/", "licenses/"),
)
INCLUDES = ("include", "libcudacxx/include")
NEXT_STEP = f"Name a wheel on this host with {WHEEL_VARIABLE}=FILE, or leave its entries out with --without incumbent."


def headers(pinned: FlashInfer, cache_dir: Path, env: Mapping[str, str] = os.environ) -> Path:
    """The directory that holds INCLUDES. From the cache, from the wheel that the environment names, or fetched with pip.

    Raises ToolchainError where the wheel is not to be had or is another than the table pins.
    """
    final = cache_dir.absolute() / "flashinfer" / pinned.wheel_sha256
    named = env.get(WHEEL_VARIABLE)
    if named:
        _check(Path(named), pinned, WHEEL_VARIABLE)  # also where the cache has it: a wrong name is not passed over
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".new-", dir=final.parent))
    except OSError as error:
        raise ToolchainError(f"cannot write in {final.parent}: {error}. Choose another cache with TILEPRESS_CACHE.") from error
    try:
        wheel = Path(named) if named else _fetch(pinned, draft / "wheel", env)
        _check(wheel, pinned, "the fetched file")
        _unpack(wheel, pinned, draft / "tree")
        (draft / "tree").rename(final)
    except OSError as error:
        # Another build may have unpacked it meanwhile.
        if not final.is_dir():
            raise ToolchainError(f"cannot make {final}: {error}. Choose another cache with TILEPRESS_CACHE.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _fetch(pinned: FlashInfer, folder: Path, env: Mapping[str, str]) -> Path:
    """The wheel, fetched into `folder` with the running Python's pip and its configuration."""
    requirements = folder / "requirements.txt"
    folder.mkdir()
    requirements.write_text(f"{pinned.requirement} --hash=sha256:{pinned.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--requirement", str(requirements), "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(env))
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise ToolchainError(f"pip cannot fetch {pinned.requirement}: {' '.join(said)}. {NEXT_STEP}")
    return wheels[0]


def _check(wheel: Path, pinned: FlashInfer, what: str) -> None:
    try:
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        raise ToolchainError(f"{what}: {wheel} cannot be read ({error.strerror}). {NEXT_STEP}") from error
    if found != pinned.wheel_sha256:
        raise ToolchainError(
            f"{what}: {wheel} has SHA-256 {found}, but the table pins {pinned.requirement} with {pinned.wheel_sha256}. "
            f"{NEXT_STEP}"
        )


def _unpack(wheel: Path, pinned: FlashInfer, root: Path) -> None:
    """Writes PARTS of the wheel under `root`."""
    parts = [(source.format(version=pinned.version), target) for source, target in PARTS]
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                for source, target in parts:
                    relative = member.filename.removeprefix(source)
                    if relative == member.filename or not relative or relative.endswith("/"):
                        continue
                    path = root / target / relative
                    if ".." in path.parts:
                        raise ToolchainError(f"{wheel} holds a path out of its tree: {member.filename}. {NEXT_STEP}")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(member))
    except zipfile.BadZipFile as error:
        raise ToolchainError(f"{wheel} is no wheel: {error}. {NEXT_STEP}") from error
    missing = [name for name in INCLUDES if not (root / name).is_dir()]
    if missing:
        raise ToolchainError(f"{wheel} lacks {', '.join(missing)}. {NEXT_STEP}")
