"""The golden files compiled, and the argument structs' layout as C and Rust see it against the hand-written lists."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from codegen.toolchain import find_cuda, find_cxx

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
LANGUAGES = {"c": ("-x", "c", "-std=c11"), "c++": ("-x", "c++", "-std=c++17")}


def layout(struct: str) -> list[str]:
    """`offset size name` of every field and the size of the struct, from the hand-written list."""
    lines = (GOLDEN / f"{struct}.txt").read_text().splitlines()
    rows = [line.split()[:3] for line in lines if not line.startswith("#")]
    return [*(" ".join(row) for row in rows), str(int(rows[-1][0]) + int(rows[-1][1]))]


STRUCTS = sorted(path.stem for path in GOLDEN.glob("*_args.txt"))
NAMES = {struct: [line.split()[2] for line in layout(struct)[:-1]] for struct in STRUCTS}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_header_compiles_without_a_warning(language: str, compiler: Callable[..., None], tmp_path: Path) -> None:
    source = tmp_path / "user"
    # Twice, and first: it stands alone and guards itself.
    source.write_text(
        "#include <tilepress.h>\n#include <tilepress.h>\n"
        "int use(const tilepress_prefill_args *args);\n"
        "int use(const tilepress_prefill_args *args) { return tilepress_sample_prefill(args) == TILEPRESS_OK; }\n"
    )
    compiler(*LANGUAGES[language], *STRICT, f"-I{GOLDEN}", "-c", source, "-o", tmp_path / "user.o")


def test_a_warning_would_be_an_error(tmp_path: Path) -> None:
    """The flags above do refuse a header with a defect."""
    (tmp_path / "tilepress.h").write_text(
        (GOLDEN / "tilepress.h").read_text() + "static int unused(void) { int x; return x; }\n"
    )
    source = tmp_path / "user.c"
    source.write_text('#include "tilepress.h"\n')
    command = [str(find_cxx().path), *LANGUAGES["c"], *STRICT, "-c", str(source), "-o", str(tmp_path / "user.o")]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("language", LANGUAGES)
def test_layout_in_c(language: str, stub_library: Path, compiler: Callable[..., None], tmp_path: Path) -> None:
    statements = []
    for struct, names in NAMES.items():
        statements += [
            f'  printf("%zu %zu {name}\\n", offsetof({struct}, {name}), sizeof((({struct} *)0)->{name}));' for name in names
        ]
        statements.append(f'  printf("%zu\\n", sizeof({struct}));')
    source = tmp_path / "layout"
    body = "\n".join(statements)
    source.write_text(f"#include <stdio.h>\n#include <tilepress.h>\nint main(void) {{\n{body}\n  return 0;\n}}\n")
    program = tmp_path / "layout.exe"
    compiler(*LANGUAGES[language], *STRICT, f"-I{stub_library / 'include'}", source, "-o", program)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == [line for struct in STRUCTS for line in layout(struct)]


def test_the_rust_bindings_compile_without_a_warning(rustc: str, tmp_path: Path) -> None:
    for edition in ("2021", "2024"):
        command = [rustc, "--edition", edition, "--crate-type", "lib", "-D", "warnings", "--emit", "metadata"]
        done = subprocess.run(
            [*command, GOLDEN / "tilepress_sys.rs", "-o", tmp_path / "library"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_layout_in_rust(rustc: str, stub_library: Path, tmp_path: Path) -> None:
    statements = []
    for struct, names in NAMES.items():
        statements += [
            f'    println!("{{}} {{}} {name}", offset_of!({struct}, {name}), size(|args: &{struct}| &args.{name}));'
            for name in names
        ]
        statements.append(f'    println!("{{}}", size_of::<{struct}>());')
        statements.append(f"    assert_eq!({struct}::default().struct_size as usize, size_of::<{struct}>());")
    body = "\n".join(statements)
    (tmp_path / "main.rs").write_text(
        f'include!("{stub_library / "rust" / "tilepress_sys.rs"}");\n'
        "use std::mem::{offset_of, size_of};\nuse tilepress_sys::*;\n"
        "fn size<A, T>(_: fn(&A) -> &T) -> usize {\n    size_of::<T>()\n}\n"
        f"fn main() {{\n{body}\n    assert!(tilepress_prefill_args::default().q.is_null());\n}}\n"
    )
    command = [str(rustc), "--edition", "2021", str(tmp_path / "main.rs"), "-o", str(tmp_path / "main")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == [line for struct in STRUCTS for line in layout(struct)]


def test_the_launcher_compiles(cache: Path, tmp_path: Path) -> None:
    """With nvcc, against the hand-written headers and the golden one."""
    from codegen import abi, rendering
    from codegen.table import load

    cuda = find_cuda(cache)
    shutil.copy(GOLDEN / "sample_prefill_g8_split.cu", tmp_path)
    table = load(ROOT / "families.toml")
    row = table.family[0].model_copy(update={"name": "sample_prefill", "groups": (8,), "formats": ("split",)})
    (entry,) = abi.family_entries(table.model_copy(update={"family": (row,)}))
    (tmp_path / "sample_prefill_launchers.h").write_text(rendering.launchers_header(entry))
    (tmp_path / "page_formats.h").write_text(rendering.page_formats_header())
    includes = (f"-I{tmp_path}", f"-I{GOLDEN}", f"-I{ROOT / 'csrc'}")
    output = tmp_path / "launcher.o"
    command = [
        str(cuda.nvcc),
        "-std=c++20",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-ccbin",
        str(find_cxx().path),
        "-Xcompiler=-Wall,-Werror",
    ]
    done = subprocess.run(
        [*command, *includes, "-c", tmp_path / "sample_prefill_g8_split.cu", "-o", output],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nm = subprocess.run(["nm", "--extern-only", "--defined-only", output], capture_output=True, text=True, check=True)
    assert "launch_sample_prefill_g8_split" in nm.stdout
