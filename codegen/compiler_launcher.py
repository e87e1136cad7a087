"""The compiler launcher that CMake puts before every compile: keeps the compiler's output, and objects by content.

    python -m codegen.compiler_launcher --environment DIGEST [--headers DIR:DIR…] [--cache DIR] -- COMPILER ARGUMENTS…

An object's key is the digest of the environment (compiler, toolkit, TileLang's headers: `build` computes it once), of the
source's bytes, of the headers in DIR… that it includes, and of the flags. Paths of sources, objects and include directories are
not in it, since no object depends on them. Beside each object lies OBJECT.log, the compiler's output, from the cache too. A
user's own launcher (sccache, ccache) is part of COMPILER. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.cache import Store, digest_file, digest_text

SOURCES = (".cu", ".cpp")
PATH_FLAGS = ("-o", "-MF", "-MT", "-I", "-isystem")


@dataclass(frozen=True)
class Compile:
    """A compiler invocation: what it reads and writes, and the flags that shape its output."""

    source: Path
    output: Path
    flags: tuple[str, ...]


def parse(command: list[str]) -> Compile | None:
    """The compile that `command` is, or None where it is another use of the compiler (a link, a version query)."""
    source: Path | None = None
    output: Path | None = None
    flags: list[str] = []
    compiles = False
    words = iter(command)
    for word in words:
        if word in PATH_FLAGS:
            value = next(words, "")
            if word == "-o":
                output = Path(value)
        elif word.startswith(PATH_FLAGS[3:]):
            continue
        elif word.endswith(SOURCES) and not word.startswith("-"):
            source = Path(word)
        else:
            compiles = compiles or word in ("-c", "--compile")
            flags.append(word)
    if not compiles or source is None or output is None:
        return None
    return Compile(source, output, tuple(flags))


INCLUDE = re.compile(rb'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def included(source: Path, folders: Sequence[Path]) -> list[str]:
    """Names and digests of the headers in `folders` that `source` includes, directly or through another of them.

    Every include line counts, those that the preprocessor would skip too.
    """
    found: dict[str, str] = {}
    waiting = [source]
    while waiting:
        for match in INCLUDE.finditer(waiting.pop().read_bytes()):
            name = match[1].decode(errors="replace")
            path = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if path is not None and name not in found:
                found[name] = digest_file(path)
                waiting.append(path)
    return [part for name in sorted(found) for part in (name, found[name])]


def run(command: list[str], environment: str, store: Store | None, folders: Sequence[Path] = ()) -> int:
    """Runs `command`, or takes its object from the store. Returns the compiler's exit code.

    folders: where the headers lie that the environment's digest does not cover.
    """
    compilation = parse(command)
    if compilation is None:
        return subprocess.call(command)
    log = compilation.output.with_name(compilation.output.name + ".log")
    # The compiler's own path does not shape the object; what it is does, and that is in the environment's digest.
    key = digest_text(
        environment, digest_file(compilation.source), *included(compilation.source, folders), "flags", *compilation.flags[1:]
    )
    found = store.find("objects", key) if store else None
    if found:
        compilation.output.write_bytes((found / "object").read_bytes())
        log.write_bytes((found / "log").read_bytes())
        return 0
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    log.write_bytes(done.stdout)
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
    elif store:
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            store.add("objects", key, {"object": compilation.output.read_bytes(), "log": done.stdout})
    return done.returncode


def main(arguments: list[str]) -> int:
    """Parses this launcher's own arguments; see the module."""
    split = arguments.index("--")
    own, command = arguments[:split], arguments[split + 1 :]
    options = dict(zip(own[::2], own[1::2], strict=True))
    store = Store(Path(options["--cache"])) if "--cache" in options else None
    folders = [Path(name) for name in options.get("--headers", "").split(os.pathsep) if name]
    return run(command, options["--environment"], store, folders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
