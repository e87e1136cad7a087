"""The content-addressed store: what a digest depends on, and entries that are whole or absent."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from codegen.cache import Store, default_root, digest_file, digest_text, digest_tree


def test_an_added_entry_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.find("objects", "abcd") is None
    added = store.add("objects", "abcd", {"object": b"\0\1", "log": b""})
    found = store.find("objects", "abcd")
    assert found == added
    assert found and {path.name: path.read_bytes() for path in found.iterdir()} == {"object": b"\0\1", "log": b""}
    assert store.find("lowered", "abcd") is None
    assert store.find("objects", "abce") is None


def test_an_entry_is_kept_when_added_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.add("objects", "abcd", {"object": b"first"})
    assert store.add("objects", "abcd", {"object": b"second"}) == first
    assert (first / "object").read_bytes() == b"first"


def test_an_entry_that_fails_to_be_written_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(OSError):
        store.add("objects", "abcd", {"object": b"first", "no/such/directory": b""})
    assert store.find("objects", "abcd") is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_builds_may_add_one_entry_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    files = {"object": b"x" * 100_000, "log": b"y" * 1000}
    with ThreadPoolExecutor(16) as pool:
        places = list(pool.map(lambda _: store.add("objects", "abcd", files), range(64)))
    assert len(set(places)) == 1
    assert {path.name: path.read_bytes() for path in places[0].iterdir()} == files
    assert [path.name for path in places[0].parent.iterdir()] == ["abcd"]


def test_the_root_is_named_or_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEPRESS_CACHE", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "named"
    monkeypatch.delenv("TILEPRESS_CACHE")
    assert default_root() == tmp_path / "xdg" / "tilepress"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_root() == tmp_path / "home" / ".cache" / "tilepress"


def test_texts_do_not_run_together() -> None:
    lists = [(), ("",), ("", ""), ("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ("1:a",), ("c", "ab")]
    assert len({digest_text(*parts) for parts in lists}) == len(lists)


def test_the_digest_of_a_text_by_hand() -> None:
    assert digest_text("ab", "ü") == hashlib.sha256("2:ab2:ü".encode()).hexdigest()


def tree(root: Path) -> Path:
    for name, text in {"a.h": "one", "b.cpp": "two", "sub/c.h": "three"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_tree_is_its_names_and_contents(tmp_path: Path) -> None:
    digest = digest_tree(tree(tmp_path / "a"))
    assert digest == digest_tree(tree(tmp_path / "elsewhere" / "b"))
    for path in (tmp_path / "a").rglob("*"):
        os.utime(path, (1, 1))
    assert digest_tree(tmp_path / "a") == digest

    (tmp_path / "a/sub/c.h").write_text("3")
    assert digest_tree(tmp_path / "a") != digest
    tree(tmp_path / "a")
    (tmp_path / "a/a.h").rename(tmp_path / "a/z.h")
    assert digest_tree(tmp_path / "a") != digest
    (tmp_path / "a/z.h").rename(tmp_path / "a/a.h")
    assert digest_tree(tmp_path / "a") == digest
    (tmp_path / "a/d.h").write_text("")
    assert digest_tree(tmp_path / "a") != digest


def test_a_tree_of_suffixes(tmp_path: Path) -> None:
    digest = digest_tree(tree(tmp_path), (".h",))
    (tmp_path / "b.cpp").write_text("changed")
    assert digest_tree(tmp_path, (".h",)) == digest
    assert digest_tree(tmp_path) != digest
    (tmp_path / "a.h").write_text("changed")
    assert digest_tree(tmp_path, (".h",)) != digest


def test_compiled_python_does_not_count(tmp_path: Path) -> None:
    digest = digest_tree(tree(tmp_path))
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.pyc").write_bytes(b"x")
    assert digest_tree(tmp_path) == digest


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\0")
    assert digest_file(tmp_path / "a") == hashlib.sha256(b"\xff\0").hexdigest() == digest_tree(tmp_path / "a")
