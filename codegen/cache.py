"""A content-addressed store of lowered kernels and objects. A key is a digest of everything the value depends on.

File times are never looked at, so a checkout that moves them, or keeps them, changes nothing. Entries appear by renaming,
so a build that was interrupted leaves no half of one, and builds may share a store.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def default_root() -> Path:
    """TILEPRESS_CACHE, or tilepress under the user's cache directory."""
    named = os.environ.get("TILEPRESS_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilepress"


def digest_text(*parts: str) -> str:
    """SHA-256 over texts; each is framed by its length, so that no two lists run together."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(f"{len(data)}:".encode())
        state.update(data)
    return state.hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_tree(root: Path, suffixes: Iterable[str] | None = None) -> str:
    """SHA-256 over the relative names and contents of the files under `root`; `suffixes` limits which. A file is itself."""
    if root.is_file():
        return digest_file(root)
    wanted = None if suffixes is None else tuple(suffixes)
    parts: list[str] = []
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and (wanted is None or path.name.endswith(wanted)):
            parts += [path.relative_to(root).as_posix(), digest_file(path)]
    return digest_text(*parts)


@dataclass(frozen=True)
class Store:
    """Entries under `root`, each a directory of files named by its key."""

    root: Path

    def find(self, kind: str, key: str) -> Path | None:
        """The entry's directory, or None."""
        path = self._path(kind, key)
        return path if path.is_dir() else None

    def add(self, kind: str, key: str, files: dict[str, bytes]) -> Path:
        """Adds an entry holding `files`, unless another build just did."""
        path = self._path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
        try:
            for name, data in files.items():
                (staging / name).write_bytes(data)
            staging.chmod(0o755)
            try:
                staging.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return path

    def _path(self, kind: str, key: str) -> Path:
        return self.root / kind / key[:2] / key
