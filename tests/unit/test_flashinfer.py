"""codegen.flashinfer with a small wheel of its own: what is taken from it, what is refused, and when nothing is fetched."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from codegen import flashinfer
from codegen.errors import ToolchainError
from codegen.table import FlashInfer

FILES = {
    "flashinfer/data/include/flashinfer/page.cuh": "page",
    "flashinfer/data/cccl/libcudacxx/include/cuda/std/array": "array",
    "flashinfer/data/cccl/cub/cub/cub.cuh": "unused",
    "flashinfer_python-0.6.14.dist-info/licenses/LICENSE": "licence",
    "flashinfer/__init__.py": "unused",
}
NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def pinned(path: Path) -> FlashInfer:
    return FlashInfer(version="0.6.14", wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A wheel with everything that is taken, and more."""
    return wheel(tmp_path / "good.whl", FILES)


def test_the_headers_are_taken_and_nothing_else(good: Path, tmp_path: Path) -> None:
    root = flashinfer.headers(pinned(good), tmp_path / "cache", {flashinfer.WHEEL_VARIABLE: str(good)})
    found = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}
    assert found == {
        "include/flashinfer/page.cuh": "page",
        "libcudacxx/include/cuda/std/array": "array",
        "licenses/LICENSE": "licence",
    }
    assert [path.name for path in root.parent.iterdir()] == [root.name], "a draft was left"


def test_a_second_build_fetches_nothing(good: Path, tmp_path: Path) -> None:
    first = flashinfer.headers(pinned(good), tmp_path / "cache", {flashinfer.WHEEL_VARIABLE: str(good)})
    assert flashinfer.headers(pinned(good), tmp_path / "cache", NO_NETWORK) == first


@pytest.mark.parametrize("cached", [False, True])
def test_another_wheel_is_refused(good: Path, tmp_path: Path, cached: bool) -> None:
    if cached:
        flashinfer.headers(pinned(good), tmp_path / "cache", {flashinfer.WHEEL_VARIABLE: str(good)})
    other = wheel(tmp_path / "other.whl", {**FILES, "more": ""})
    with pytest.raises(ToolchainError) as caught:
        flashinfer.headers(pinned(good), tmp_path / "cache", {flashinfer.WHEEL_VARIABLE: str(other)})
    for part in (str(other), pinned(other).wheel_sha256, pinned(good).wheel_sha256, "--without incumbent"):
        assert part in str(caught.value)


def test_a_named_wheel_that_is_not_there_is_refused(good: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"nowhere\.whl cannot be read .*--without incumbent"):
        flashinfer.headers(pinned(good), tmp_path / "cache", {flashinfer.WHEEL_VARIABLE: str(tmp_path / "nowhere.whl")})


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "is no wheel"),
        ({"flashinfer/data/include/a": ""}, "lacks libcudacxx/include"),
        ({"flashinfer/data/include/../../../x": ""}, "a path out of its tree"),
    ],
)
def test_a_damaged_wheel_is_refused_and_leaves_nothing(tmp_path: Path, files: dict[str, str] | None, said: str) -> None:
    path = tmp_path / "damaged.whl"
    if files is None:
        path.write_text("no archive", encoding="utf-8")
    else:
        wheel(path, files)
    with pytest.raises(ToolchainError, match=said):
        flashinfer.headers(pinned(path), tmp_path / "cache", {flashinfer.WHEEL_VARIABLE: str(path)})
    assert not list((tmp_path / "cache/flashinfer").iterdir())


def test_no_network_says_what_to_do(tmp_path: Path) -> None:
    release = FlashInfer(version="0.6.14", wheel_sha256="0" * 64)
    with pytest.raises(ToolchainError) as caught:
        flashinfer.headers(release, tmp_path / "cache", NO_NETWORK)
    for part in ("flashinfer-python==0.6.14", flashinfer.WHEEL_VARIABLE, "--without incumbent"):
        assert part in str(caught.value)
    assert not list((tmp_path / "cache/flashinfer").iterdir())


def test_a_cache_that_cannot_be_written_is_an_error(good: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ToolchainError, match="TILEPRESS_CACHE"):
        flashinfer.headers(pinned(good), tmp_path / "file", {flashinfer.WHEEL_VARIABLE: str(good)})
