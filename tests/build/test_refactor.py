"""The committed symbol lists through a refactoring: a kernel moves into a header, and the build passes, or names a symbol."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from codegen import errors

from .commands import Cli

pytestmark = pytest.mark.build

BUILD = ("build", "--arch", "sm_90")
KERNEL = re.compile(r"^static __global__ .*?^\}\n", re.DOTALL | re.MULTILINE)


@pytest.fixture
def moved(package: Path) -> Path:
    """The header into which the activation's kernel was moved. All other objects are in the session's cache."""
    source, header = package / "csrc/activation.cu", package / "csrc/gelu_mul_kernel.cuh"
    text = source.read_text(encoding="utf-8")
    (kernel,) = KERNEL.findall(text)
    header.write_text(kernel, encoding="utf-8")
    source.write_text(text.replace(kernel, f'#include "{header.name}"\n'), encoding="utf-8")
    return header


def test_a_moved_body_changes_no_symbol(moved: Path, package: Path, library: Path, run_cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_cli(*BUILD, "--out", out, package=package).succeeded()
    assert "50 exported symbols agree" in run_cli("verify", "--out", out, package=package).succeeded().stdout
    assert (out / "lib/libtilepress.a").read_bytes() == (library / "lib/libtilepress.a").read_bytes()


def test_a_moved_body_with_a_symbol_more_fails(moved: Path, package: Path, library: Path, run_cli: Cli, tmp_path: Path) -> None:
    """A header's kernel that is not static has external linkage."""
    moved.write_text(moved.read_text(encoding="utf-8").removeprefix("static "), encoding="utf-8")
    done = run_cli(*BUILD, "--out", tmp_path / "out", package=package)
    done.failed(errors.SymbolError.exit_code, "activation_body.txt", "+T _ZN9tilepress15gelu_mul_kernel")
    assert "-T" not in done.stderr
    assert library.is_dir()
    assert not (tmp_path / "out/lib").exists()
