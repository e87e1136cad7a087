"""The compiler launcher that CMake puts before every compile: keeps the compiler's output, and objects by content.

    python -m codegen.compiler_launcher --environment DIGEST [--cache DIR] -- COMPILER ARGUMENTS…

An object's key is the digest of the environment (compiler, headers: `build` computes it once), of the source's bytes and of
the flags. Paths of sources, objects and include directories are not in it, since no object depends on them. Beside each
object lies OBJECT.log, the compiler's output, from the cache too. A user's own launcher (sccache, ccache) is part of COMPILER.
Standard library only.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
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


def run(command: list[str], environment: str, store: Store | None) -> int:
    """Runs `command`, or takes its object from the store. Returns the compiler's exit code."""
    compilation = parse(command)
    if compilation is None:
        return subprocess.call(command)
    log = compilation.output.with_name(compilation.output.name + ".log")
    # The compiler's own path does not shape the object; what it is does, and that is in the environment's digest.
    key = digest_text(environment, digest_file(compilation.source), *compilation.flags[1:])
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
    return run(command, options["--environment"], store)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
