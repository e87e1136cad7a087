"""The compiler launcher, before a fake compiler that counts its calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from codegen import compiling
from codegen.cache import Store
from codegen.compiler_launcher import Compile, included, parse, run

from .samples import ROOT

# Writes "object of SOURCE with FLAGS" to what follows -o, a line to each of stdout and stderr, and a mark per call.
COMPILER = """#!/bin/sh
echo "$@" >> {calls}
echo "note: on stdout"
echo "warning: on stderr" >&2
for word in "$@"; do
    [ "$before" = -o ] && output=$word
    case $word in *.cpp|*.cu) source=$word ;; esac
    before=$word
done
grep -q error "$source" && {{ echo "fatal: no good" >&2; exit 42; }}
{{ echo object; cat "$source"; echo "$@" | grep -o -e '-O.'; }} > "$output"
"""


@dataclass
class Workshop:
    """A source, a fake compiler, its calls and a store."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "a.cpp"

    @property
    def output(self) -> Path:
        return self.root / "a.o"

    @property
    def log(self) -> str:
        return (self.root / "a.o.log").read_text()

    @property
    def calls(self) -> int:
        path = self.root / "calls"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def compile(
        self,
        *flags: str,
        environment: str = "env",
        output: Path | None = None,
        cached: bool = True,
        before: str = "",
        folders: Sequence[Path] = (),
    ) -> int:
        """Compiles the source by the launcher; returns the exit code."""
        words = [
            *before.split(),
            str(self.root / "c++"),
            "-O2",
            *flags,
            "-o",
            str(output or self.output),
            "-c",
            str(self.source),
        ]
        return run(words, environment, Store(self.root / "store") if cached else None, folders)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(calls=tmp_path / "calls"))
    compiler.chmod(0o755)
    (tmp_path / "a.cpp").write_text("int x;\n")
    return Workshop(tmp_path)


def test_the_second_compile_is_a_hit(shop: Workshop) -> None:
    assert shop.compile() == 0
    compiled, log = shop.output.read_bytes(), shop.log
    assert compiled == b"object\nint x;\n-O2\n"
    assert sorted(log.splitlines()) == ["note: on stdout", "warning: on stderr"]
    shop.output.unlink()
    (shop.root / "a.o.log").unlink()
    assert shop.compile() == 0
    assert shop.calls == 1
    assert (shop.output.read_bytes(), shop.log) == (compiled, log)


def test_a_changed_source_is_a_miss(shop: Workshop) -> None:
    shop.compile()
    shop.source.write_text("int y;\n")
    shop.compile()
    assert shop.calls == 2
    assert shop.output.read_bytes() == b"object\nint y;\n-O2\n"
    shop.source.write_text("int x;\n")
    shop.compile()
    assert shop.calls == 2
    assert shop.output.read_bytes() == b"object\nint x;\n-O2\n"


MISSES = {
    "another flag": ("-O3",),
    "a flag more": ("-DX=1",),
    "a definition of another value": ("-DX=2",),
    "an included file": ("-include", "other.h"),
    "a language standard": ("-std=c++20",),
}


@pytest.mark.parametrize("case", MISSES)
def test_changed_flags_are_a_miss(case: str, shop: Workshop) -> None:
    shop.compile()
    shop.compile(*MISSES[case])
    assert shop.calls == 2


def test_flags_in_another_order_are_a_miss(shop: Workshop) -> None:
    """-DX -UX is not -UX -DX."""
    shop.compile("-DX", "-UX")
    shop.compile("-UX", "-DX")
    assert shop.calls == 2


def test_another_environment_is_a_miss(shop: Workshop) -> None:
    shop.compile()
    shop.compile(environment="another compiler")
    assert shop.calls == 2


HITS = {
    "an include directory": ("-I", "/elsewhere"),
    "an include directory in one word": ("-I/elsewhere",),
    "a system directory": ("-isystem", "/elsewhere"),
    "a system directory as nvcc takes it": ("-isystem=/elsewhere",),
    "a dependency file": ("-MF", "/elsewhere/a.d", "-MT", "a.o"),
}


@pytest.mark.parametrize("case", HITS)
def test_paths_alone_are_a_hit(case: str, shop: Workshop) -> None:
    shop.compile()
    shop.compile(*HITS[case])
    assert shop.calls == 1


# Headers: those of the source tree that a source includes, whichever way, and no others.


def headers(root: Path, **texts: str) -> Path:
    """A folder of headers, NAME.h with its text."""
    root.mkdir(exist_ok=True)
    for name, text in texts.items():
        (root / f"{name}.h").write_text(text)
    return root


def test_the_headers_that_a_source_includes(shop: Workshop) -> None:
    folder = headers(shop.root / "csrc", a='#include "b.h"\n', b="#pragma once\n#include <a.h>\n", c="int c;\n")
    shop.source.write_text('#include "a.h"\n#include <cstdint>\n')
    assert included(shop.source, [folder])[::2] == ["a.h", "b.h"]
    shop.source.write_text('int x;  // #include "a.h"\n')
    assert included(shop.source, [folder]) == []
    # An include that the preprocessor might skip counts too.
    shop.source.write_text('#if 0\n  #  include\t"c.h"\n#endif\n')
    assert included(shop.source, [folder])[::2] == ["c.h"]


def test_the_first_folder_that_has_a_header_is_taken(shop: Workshop) -> None:
    first, second = headers(shop.root / "first", a="1"), headers(shop.root / "second", a="2", b="3")
    shop.source.write_text('#include "a.h"\n#include "b.h"\n')
    one, other = included(shop.source, [first, second]), included(shop.source, [second, first])
    assert one[::2] == other[::2] == ["a.h", "b.h"]
    assert one[1] != other[1] and one[3] == other[3]


def test_a_changed_header_is_a_miss_where_it_is_included(shop: Workshop) -> None:
    folder = headers(shop.root / "csrc", a='#include "b.h"\n', b="1", other="1")
    shop.source.write_text('#include "a.h"\n')
    assert shop.compile(folders=(folder,)) == 0
    headers(folder, other="2")
    assert shop.compile(folders=(folder,)) == 0
    assert shop.calls == 1
    headers(folder, b="2")
    assert shop.compile(folders=(folder,)) == 0
    assert shop.calls == 2
    headers(folder, b="1")
    assert shop.compile(folders=(folder,)) == 0
    assert shop.calls == 2


def test_a_tree_elsewhere_with_the_same_headers_is_a_hit(shop: Workshop) -> None:
    shop.source.write_text('#include "a.h"\n')
    assert shop.compile(folders=(headers(shop.root / "here", a="1"),)) == 0
    assert shop.compile(folders=(headers(shop.root / "there", a="1"),)) == 0
    assert shop.calls == 1


def test_another_directory_is_a_hit(shop: Workshop) -> None:
    shop.compile()
    (shop.root / "elsewhere").mkdir()
    assert shop.compile(output=shop.root / "elsewhere" / "b.o") == 0
    assert shop.calls == 1
    assert (shop.root / "elsewhere/b.o").read_bytes() == shop.output.read_bytes()
    assert (shop.root / "elsewhere/b.o.log").read_text() == shop.log
    (shop.root / "elsewhere/a.cpp").write_text(shop.source.read_text())
    assert Workshop(shop.root).calls == 1


def test_without_a_store_every_compile_is_one(shop: Workshop) -> None:
    shop.compile(cached=False)
    shop.compile(cached=False)
    assert shop.calls == 2
    assert "warning: on stderr" in shop.log
    assert not (shop.root / "store").exists()


def test_a_failure_is_passed_on_and_not_kept(shop: Workshop, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    shop.source.write_text("error\n")
    assert shop.compile() == 42
    assert b"fatal: no good" in capfdbinary.readouterr().err
    assert "fatal: no good" in shop.log
    assert not shop.output.exists()
    assert shop.compile() == 42
    assert shop.calls == 2
    assert b"fatal: no good" in capfdbinary.readouterr().err
    assert not (shop.root / "store").exists()


def test_a_success_prints_nothing(shop: Workshop, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """What it says is in the log; ninja's output stays short."""
    shop.compile()
    captured = capfdbinary.readouterr()
    assert (captured.out, captured.err) == (b"", b"")


def test_the_users_launcher_runs_in_front(shop: Workshop) -> None:
    farm = shop.root / "farm"
    farm.write_text(f'#!/bin/sh\necho farm >> {shop.root}/farmed\nexec "$@"\n')
    farm.chmod(0o755)
    assert shop.compile(before=str(farm)) == 0
    assert (shop.root / "farmed").read_text() == "farm\n"
    assert shop.calls == 1
    assert shop.output.read_bytes() == b"object\nint x;\n-O2\n"
    assert shop.compile(before=str(farm)) == 0
    assert shop.calls == 1


@pytest.mark.parametrize(
    ("users", "words"),
    [("", []), ("sccache", ["sccache"]), ("ccache;--verbose", ["ccache", "--verbose"]), ("'a b' -x", ["a b", "-x"])],
)
def test_our_launcher_comes_first(users: str, words: list[str], tmp_path: Path) -> None:
    list_ = compiling.launcher("digest", Store(tmp_path), users).split(";")
    ours = [sys.executable, "-m", "codegen.compiler_launcher", "--environment", "digest", "--cache", str(tmp_path), "--"]
    assert list_ == ours + words
    assert "--cache" not in compiling.launcher("digest", None, users).split(";")


def test_where_the_trees_headers_lie_is_passed_on(tmp_path: Path) -> None:
    folders = [tmp_path / "include", tmp_path / "c src"]
    words = compiling.launcher("digest", None, "", folders).split(";")
    assert words[words.index("--headers") + 1] == f"{tmp_path}/include:{tmp_path}/c src"
    assert "--headers" not in compiling.launcher("digest", None, "").split(";")


OTHER_USES = {
    "a link": ["c++", "a.o", "-o", "a"],
    "a link of a source": ["c++", "a.cpp", "-o", "a"],
    "a version query": ["c++", "--version"],
    "preprocessing": ["c++", "-E", "a.cpp", "-o", "a.i"],
    "no output": ["c++", "-c", "a.cpp"],
    "nothing": [],
}


@pytest.mark.parametrize("case", OTHER_USES)
def test_other_uses_are_no_compile(case: str) -> None:
    assert parse(OTHER_USES[case]) is None


def test_a_link_passes_through(tmp_path: Path) -> None:
    linker = tmp_path / "ld"
    linker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/linked\nexit 7\n')
    linker.chmod(0o755)
    for _ in range(2):
        assert run([str(linker), "a.o", "-o", "a"], "env", Store(tmp_path / "store")) == 7
    assert (tmp_path / "linked").read_text() == "a.o -o a\na.o -o a\n"
    assert not (tmp_path / "store").exists()


def test_what_a_compile_is_made_of() -> None:
    command = "/usr/bin/c++ -DX=1 -I/a -I /b -isystem /c -O2 -MD -MT a.o -MF a.d -o out/a.o -c src/a.cpp"
    flags: tuple[str, ...] = ("/usr/bin/c++", "-DX=1", "-O2", "-MD", "-c")
    assert parse(command.split(" ")) == Compile(Path("src/a.cpp"), Path("out/a.o"), flags)
    command = "nvcc -forward-unknown-to-host-compiler -isystem=/c --use_fast_math -x cu -c k.cu -o k.o"
    flags = ("nvcc", "-forward-unknown-to-host-compiler", "--use_fast_math", "-x", "cu", "-c")
    assert parse(command.split(" ")) == Compile(Path("k.cu"), Path("k.o"), flags)


def test_the_command_line(shop: Workshop) -> None:
    """As CMake calls it: python -m codegen.compiler_launcher … -- COMPILER …"""
    own = [sys.executable, "-S", "-m", "codegen.compiler_launcher", "--environment", "e", "--cache", str(shop.root / "store")]
    compile_ = [str(shop.root / "c++"), "-O2", "-c", str(shop.source), "-o", str(shop.output)]
    for _ in range(2):
        subprocess.run([*own, "--", *compile_], check=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})
    assert shop.calls == 1
    shop.source.write_text("error\n")
    done = subprocess.run(
        [*own, "--", *compile_],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 42
    assert "fatal: no good" in done.stderr


def test_a_store_that_cannot_be_written_does_not_fail_the_compile(shop: Workshop) -> None:
    (shop.root / "store").write_text("a file")
    assert shop.compile() == 0
    assert shop.output.read_bytes() == b"object\nint x;\n-O2\n"
