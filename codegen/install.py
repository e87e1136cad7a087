"""The install tree: what a build leaves for a consumer. Relocatable: nothing in it names where it lies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from codegen import abi, rendering
from codegen.compiling import Compiled
from codegen.errors import OutputError
from codegen.tree import Tree


def check_writable(out: Path) -> None:
    """Raises OutputError where the tree cannot be written, before anything is lowered or compiled."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OutputError(
            f"--out {out} is not writable ({error.strerror}). Choose another directory with --out DIR."
        ) from error


def install(tree: Tree, compiled: Compiled, out: Path, manifest: str, inputs: Iterable[Path]) -> list[Path]:
    """Copies and renders the tree into `out`; returns its files. Each appears whole: written aside, then renamed.

    The manifest is removed first and written last, so that a tree without one is known to be unfinished.
    """
    table = tree.table
    marker = out / "share/tilepress/manifest.json"
    marker.unlink(missing_ok=True)
    values: dict[str, object] = {"library": table.library, "stub": tree.context.stub}
    library = out / "lib/libtilepress.a"
    names = [str(path).replace(" ", "\\ ") for path in (library, *inputs)]
    depfile = f"{names[0]}:" + "".join(f" \\\n  {name}" for name in names[1:]) + "\n"
    files: dict[str, bytes] = {
        "lib/libtilepress.a": compiled.archive.read_bytes(),
        "include/tilepress.h": rendering.header(table).encode(),
        "rust/tilepress_sys.rs": rendering.rust_bindings(table).encode(),
        "lib/cmake/tilepress/tilepressConfig.cmake": rendering.render("tilepressConfig.cmake.j2", **values).encode(),
        "lib/cmake/tilepress/tilepressConfigVersion.cmake": rendering.render(
            "tilepressConfigVersion.cmake.j2", **values
        ).encode(),
        "lib/pkgconfig/tilepress.pc": rendering.render("tilepress.pc.j2", **values).encode(),
        "share/tilepress/symbols.txt": "".join(f"{name}\n" for name in abi.public_symbols(table)).encode(),
        "share/tilepress/libtilepress.d": depfile.encode(),
    }
    if compiled.python:
        files[f"python/{compiled.python.name}"] = compiled.python.read_bytes()
    files["share/tilepress/manifest.json"] = manifest.encode()
    for relative, data in files.items():
        _replace(out / relative, data)
    return [out / relative for relative in files]


def _replace(path: Path, data: bytes) -> None:
    """Writes `data` to `path` by renaming, unless it is there already."""
    if path.is_file() and path.read_bytes() == data:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}). Choose another directory with --out DIR.") from error
