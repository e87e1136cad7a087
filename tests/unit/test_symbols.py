"""Exports against lists: with `exported` replaced by a table here, and with real objects where the marker says build."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from codegen import symbols
from codegen.errors import SymbolError
from codegen.symbols import Built, update, verify
from codegen.toolchain import find_cxx

from .samples import ROOT, table

ONE = table({"name": "a_prefill"})
TWO = table({"name": "a_prefill"}, {"name": "b_prefill"})
COMMON = ["T tilepress_build_info", "T tilepress_last_error", "T tilepress_supports", "T tilepress_version"]
ARCHIVE = sorted([*COMMON, "T tilepress_a_prefill", "T tilepress_b_prefill"])
UNITS = {
    "a_prefill": ["T tilepress_a_prefill"],
    "b_prefill": ["T tilepress_b_prefill"],
    "error": ["T fail", "T tilepress_last_error"],
}


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What each file of the build exports, by name; a test changes it."""
    found = {"libtilepress.a": list(ARCHIVE), **{f"{unit}.o": list(names) for unit, names in UNITS.items()}}
    monkeypatch.setattr(symbols, "exported", lambda path: tuple(found[path.name]))
    return found


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    """The committed lists of that build."""
    (tmp_path / "objects").mkdir()
    (tmp_path / "archive.txt").write_text("".join(f"{line}\n" for line in ARCHIVE))
    for unit, names in UNITS.items():
        (tmp_path / "objects" / f"{unit}.txt").write_text("".join(f"{line}\n" for line in names))
    return tmp_path


def built(*units: str) -> Built:
    return Built(Path("libtilepress.a"), {unit: Path(f"{unit}.o") for unit in units or UNITS})


def difference(lists: Path, build: Built, selected: object = TWO, stub: bool = False) -> list[str]:
    """The lines of the diff, without its headings."""
    with pytest.raises(SymbolError) as caught:
        verify(build, lists, TWO, selected, stub)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.endswith("`python -m codegen verify --update`.")
    return [line for line in message.splitlines()[:-1] if not line.startswith("@@")]


def test_agreement(exports: dict[str, list[str]], lists: Path) -> None:
    verify(built(), lists, TWO, TWO, stub=False)


def test_an_export_is_added_to_the_archive(exports: dict[str, list[str]], lists: Path) -> None:
    exports["libtilepress.a"].insert(0, "T cute_helper")
    assert difference(lists, built()) == ["--- committed archive.txt", "+++ built archive.txt", "+T cute_helper"]


def test_an_export_vanishes_from_an_object(exports: dict[str, list[str]], lists: Path) -> None:
    exports["error.o"].remove("T fail")
    assert difference(lists, built()) == ["--- committed error.txt", "+++ built error.txt", "-T fail"]


def test_an_export_is_renamed(exports: dict[str, list[str]], lists: Path) -> None:
    exports["error.o"][0] = "T refuse"
    assert difference(lists, built())[2:] == ["-T fail", "+T refuse"]


def test_an_export_changes_its_kind(exports: dict[str, list[str]], lists: Path) -> None:
    exports["error.o"][0] = "W fail"
    assert difference(lists, built())[2:] == ["-T fail", "+W fail"]


def test_every_difference_is_printed(exports: dict[str, list[str]], lists: Path) -> None:
    exports["libtilepress.a"].append("T x")
    exports["a_prefill.o"].append("T y")
    exports["error.o"].append("T z")
    lines = difference(lists, built())
    assert [line for line in lines if line.startswith("+T")] == ["+T x", "+T y", "+T z"]


def test_a_unit_without_a_list(exports: dict[str, list[str]], lists: Path) -> None:
    (lists / "objects/b_prefill.txt").unlink()
    assert difference(lists, built()) == ["--- committed b_prefill.txt", "+++ built b_prefill.txt", "+T tilepress_b_prefill"]


def test_a_list_without_a_unit(exports: dict[str, list[str]], lists: Path) -> None:
    """A unit that vanished from a whole build is a difference too."""
    (lists / "objects/gone.txt").write_text("T gone\n")
    assert difference(lists, built()) == ["--- committed gone.txt", "+++ built gone.txt", "-T gone"]


def test_no_lists_at_all(exports: dict[str, list[str]], tmp_path: Path) -> None:
    lines = difference(tmp_path / "absent", built())
    assert [line[1:] for line in lines if line.startswith("+T")] == [
        *ARCHIVE,
        *UNITS["a_prefill"],
        *UNITS["b_prefill"],
        *UNITS["error"],
    ]


def test_one_family_of_two(exports: dict[str, list[str]], lists: Path) -> None:
    exports["libtilepress.a"].remove("T tilepress_b_prefill")
    verify(built("a_prefill", "error"), lists, TWO, ONE, stub=False)
    assert difference(lists, built("a_prefill", "error"))[2] == "-T tilepress_b_prefill"


def test_the_family_left_out_must_not_be_there(exports: dict[str, list[str]], lists: Path) -> None:
    assert difference(lists, built("a_prefill", "error"), ONE)[2:] == ["+T tilepress_b_prefill"]


def test_a_stubs_archive_is_held_and_its_objects_are_not(exports: dict[str, list[str]], lists: Path) -> None:
    exports["error.o"].append("T z")
    verify(built(), lists, TWO, TWO, stub=True)
    exports["libtilepress.a"].append("T z")
    assert difference(lists, built(), stub=True) == ["--- committed archive.txt", "+++ built archive.txt", "+T z"]


def test_update_writes_and_removes(exports: dict[str, list[str]], lists: Path) -> None:
    exports["error.o"].append("T z")
    exports["libtilepress.a"].append("T z")
    (lists / "objects/gone.txt").write_text("T gone\n")
    written = update(built(), lists, stub=False)
    names = ["archive.txt", "objects/a_prefill.txt", "objects/b_prefill.txt", "objects/error.txt"]
    assert [path.relative_to(lists).as_posix() for path in written] == names
    assert sorted(path.relative_to(lists).as_posix() for path in lists.rglob("*.txt")) == names
    assert (lists / "objects/error.txt").read_text() == "T fail\nT tilepress_last_error\nT z\n"
    verify(built(), lists, TWO, TWO, stub=False)


def test_update_makes_the_directory(exports: dict[str, list[str]], tmp_path: Path) -> None:
    update(built(), tmp_path / "new" / "lists", stub=False)
    verify(built(), tmp_path / "new" / "lists", TWO, TWO, stub=False)


def test_update_refuses_a_stub(exports: dict[str, list[str]], lists: Path) -> None:
    before = {path: path.read_text() for path in lists.rglob("*.txt")}
    exports["libtilepress.a"].append("T z")
    with pytest.raises(SymbolError, match="--stub"):
        update(built(), lists, stub=True)
    assert {path: path.read_text() for path in lists.rglob("*.txt")} == before


def test_the_committed_lists_are_the_public_symbols() -> None:
    """The archive exports what the table and the ABI name, all of it code."""
    from codegen import abi
    from codegen.table import load

    names = abi.public_symbols(load(ROOT / "families.toml"))
    lines = (ROOT / "build_tools/symbols/archive.txt").read_text().splitlines()
    assert lines == [f"T {name}" for name in names]


# nm itself


OBJECT = """
int shown(void) { return 1; }
int table[3] = {1, 2, 3};
const int fixed[2] = {1, 2};
int zeroed[100];
__attribute__((weak)) int weak(void) { return 2; }
__attribute__((visibility("hidden"))) int hidden(void) { return 3; }
static int local(void) { return 4; }
extern int absent(void);
int user(void) { return local() + absent(); }
"""


def compile_object(source: str, path: Path) -> Path:
    subprocess.run(
        [find_cxx().path, "-x", "c", "-fno-common", "-O0", "-c", "-", "-o", path], input=source, text=True, check=True
    )
    return path


@pytest.mark.build
def test_exports_of_an_object(tmp_path: Path) -> None:
    """Hidden symbols too, since a linker sees them; neither local nor undefined ones."""
    found = symbols.exported(compile_object(OBJECT, tmp_path / "a.o"))
    assert found == ("B zeroed", "D table", "R fixed", "T hidden", "T shown", "T user", "W weak")


@pytest.mark.build
def test_exports_of_an_archive(tmp_path: Path) -> None:
    first = compile_object("int b(void) { return 1; }", tmp_path / "first.o")
    second = compile_object("int a(void) { return 1; }", tmp_path / "second one.o")
    archive = tmp_path / "a b.a"
    subprocess.run(["ar", "rcsD", archive, first, second], check=True)
    assert symbols.exported(archive) == ("T a", "T b")


@pytest.mark.build
def test_a_real_difference(tmp_path: Path) -> None:
    archive, unit = tmp_path / "libtilepress.a", tmp_path / "a.o"
    compile_object("int tilepress_a_prefill(void) { return 1; }", unit)
    subprocess.run(["ar", "rcsD", archive, unit], check=True)
    build = Built(archive, {"a": unit})
    update(build, tmp_path / "lists", stub=False)
    verify(build, tmp_path / "lists", ONE, ONE, stub=False)
    compile_object("int tilepress_a_prefill(void) { return 1; } int leaked(void) { return 2; }", unit)
    with pytest.raises(SymbolError, match=r"built a\.txt\n.*\n\+T leaked\n"):
        verify(build, tmp_path / "lists", ONE, ONE, stub=False)


@pytest.mark.build
def test_what_nm_cannot_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.o").write_text("no object")
    with pytest.raises(SymbolError, match=r"nm cannot read .*a\.o"):
        symbols.exported(tmp_path / "a.o")
    with pytest.raises(SymbolError, match=r"nm cannot read .*absent\.o"):
        symbols.exported(tmp_path / "absent.o")
