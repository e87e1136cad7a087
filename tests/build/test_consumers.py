"""What a consumer does with the install tree: CMake, cargo, pkg-config, a moved tree, a stub, the header alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from codegen import toolchain
from codegen.abi import Struct
from codegen.abi.decode import DECODE, PLAN
from codegen.abi.prefill import PREFILL
from codegen.cache import default_root
from codegen.modes import VARIABLE
from codegen.toolchain import CudaToolkit

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
CPP = ROOT / "examples" / "cpp"
RUST = ROOT / "examples" / "rust"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
# Bytes of the pool in an example's start-up line, by mode: 4,096 pages of 64 tokens of 10 layers with 4 KV heads; a token has
# 512 columns of K and 512 of V a head, or 640 folded ones, of bf16.
POOLS = {"incumbent": 21_474_836_480, "tilelang": 21_474_836_480, "tilelang640": 13_421_772_800}
# What the knob says, and the mode that this is.
KNOBS = ((None, "incumbent"), ("off", "incumbent"), ("tilelang", "tilelang"), ("tilelang640", "tilelang640"))
# The entries that serve an example's prefill and decode, by mode.
GENERATED = ("tilepress_global_prefill", "tilepress_global_decode")
SERVING = {
    "incumbent": ("batch_prefill_paged_cuda_hd512", "paged_attention_decode_split_kv_cuda_hd512"),
    "tilelang": GENERATED,
    "tilelang640": GENERATED,
}
ENTRY_CALL = '#include <tilepress.h>\nint {name}(void) {{ return tilepress_supports("none", 8, 1, 512, 64, 1); }}\n'


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """The command's stdout. A failure shows its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env={**os.environ, **(env or {})}, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def configuration(prefix: Path, source: Path, build: Path, cuda: CudaToolkit | None) -> list[str | Path]:
    """The command that configures a consumer of the install tree at `prefix`."""
    return [
        *(toolchain.find_cmake().path, "-G", "Ninja", "-S", source, "-B", build),
        f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_MAKE_PROGRAM={toolchain.find_ninja().path}",
        f"-DCMAKE_CXX_COMPILER={toolchain.find_cxx().path}",
        *([f"-DCUDAToolkit_ROOT={cuda.root}"] if cuda else []),
    ]


def configure_and_build(prefix: Path, build: Path, cuda: CudaToolkit | None) -> Path:
    """Builds examples/cpp against the install tree at `prefix`; returns the program."""
    run(*configuration(prefix, CPP, build, cuda))
    run(toolchain.find_cmake().path, "--build", build)
    return build / "tilepress_example"


def run_with_knob(program: Path, value: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An example, run with the knob at `value`; None: unset."""
    env = {name: text for name, text in os.environ.items() if name != VARIABLE}
    if value is not None:
        env[VARIABLE] = value
    return subprocess.run([program, *arguments], env=env, capture_output=True, text=True, check=False)


def assert_a_stub_in_every_mode(program: Path) -> None:
    """An example that links a stub says so, and which entry the mode has chosen for each call."""
    for knob, mode in KNOBS:
        output = run_with_knob(program, knob).stdout
        assert "tier=stub" in output
        assert refusals(output)
        for name, entry in zip(("prefill", "decode"), SERVING[mode], strict=True):
            assert re.search(rf"^{name} +a stub: STUB, {entry}: .*stub", output, re.MULTILINE), output


def refusals(output: str) -> list[str]:
    """The lines that an example prints for refused calls; the example itself says how many there are."""
    lines = [line for line in output.splitlines() if line.startswith("refused ")]
    counted = re.search(r"^(\d+) refusals$", output, re.MULTILINE)
    assert counted and int(counted[1]) == len(lines) > 0, output
    assert output.endswith("all as expected\n")
    return lines


@pytest.fixture(scope="module")
def cuda() -> CudaToolkit:
    """The toolkit that the library was built with."""
    return toolchain.find_cuda(default_root())


@pytest.fixture(scope="module")
def cpp_example(library: Path, cuda: CudaToolkit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/cpp, built with CMake."""
    return configure_and_build(library, tmp_path_factory.mktemp("cpp") / "build", cuda)


@pytest.fixture(scope="module")
def rust_example(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/rust, built with cargo."""
    return build_rust(tmp_path_factory.mktemp("rust") / "target", cache, "")


@pytest.fixture(params=["cpp_example", "rust_example"])
def example(request: pytest.FixtureRequest) -> Path:
    """Each of the two, linked with the full library."""
    program: Path = request.getfixturevalue(request.param)
    return program


@pytest.mark.parametrize(
    ("entry", "struct"),
    [
        ("tilepress_global_prefill", PREFILL.struct),
        ("tilepress_global_decode", DECODE.struct),
        ("tilepress_decode_plan", PLAN.struct),
    ],
)
def test_the_cpp_example_names_every_argument_in_a_refusal(entry: str, struct: Struct, cpp_example: Path) -> None:
    messages = [line.split(":", 2)[2] for line in refusals(run(cpp_example)) if f", {entry}: " in line]
    words = set(re.findall(r"\w+", "\n".join(messages)))
    unchecked = {"stream"}  # an opaque handle
    assert words >= {field.name for field in struct.fields} - unchecked


def test_a_program_needs_the_runtime_but_not_the_driver(cpp_example: Path) -> None:
    needed = run("ldd", cpp_example)
    assert re.search(r"libcudart\.so\.13 => /", needed)
    assert "libcuda.so" not in needed


def test_a_stub_links_and_says_that_it_is_one(stub_library: Path, cpp_example: Path, tmp_path: Path) -> None:
    program = configure_and_build(stub_library, tmp_path / "build", None)
    assert_a_stub_in_every_mode(program)
    assert refusals(run(program)) == refusals(run(cpp_example))
    assert "cuda" not in run("ldd", program)
    required = run_with_knob(program, None, "--require-gpu")
    assert required.returncode == 1
    assert "--require-gpu: no kernel ran" in required.stdout


@pytest.mark.parametrize(("knob", "mode"), KNOBS)
def test_an_example_starts_in_the_mode_that_the_knob_names(example: Path, knob: str | None, mode: str) -> None:
    done = run_with_knob(example, knob)
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"{VARIABLE} unset" if knob is None else f"{VARIABLE}={knob}"
    each = ", ".join(f"{name} {size}" for name, size in POOLS.items())
    line = f"mode     {mode} ({said}): global pool of 4096 pages, {POOLS[mode]} bytes; {each}"
    assert [found for found in done.stdout.splitlines() if found.startswith("mode ")] == [line]


@pytest.mark.parametrize("knob", ["", "on", "tilelang641"])
def test_an_example_does_not_start_in_an_unknown_mode(example: Path, knob: str) -> None:
    done = run_with_knob(example, knob)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{VARIABLE} is '{knob}'" in done.stderr
    assert done.stderr.endswith("it must be unset or one of off, tilelang, tilelang640\n")


def test_a_tree_that_was_moved_still_links(library: Path, cuda: CudaToolkit, tmp_path: Path) -> None:
    first, moved = tmp_path / "first", tmp_path / "moved here"
    shutil.copytree(library, first, ignore=shutil.ignore_patterns(".build"))
    first.rename(moved)
    package_files = [path for folder in ("cmake", "pkgconfig") for path in (moved / "lib" / folder).rglob("*.*")]
    assert package_files
    assert not [path for path in package_files if path.is_file() and str(library) in path.read_text(encoding="utf-8")]
    refusals(run(configure_and_build(moved, tmp_path / "build", cuda)))


def test_pkg_config_flags_link_the_cpp_example(library: Path, cuda: CudaToolkit, tmp_path: Path) -> None:
    pkg_config = shutil.which("pkg-config")
    if pkg_config is None:
        pytest.skip("pkg-config is not installed")
    flags = run(pkg_config, "--cflags", "--libs", "tilepress", env={"PKG_CONFIG_PATH": str(library / "lib" / "pkgconfig")})
    program = tmp_path / "program"
    toolkit = ("-isystem", cuda.include, f"-L{cuda.lib}", f"-Wl,-rpath,{cuda.lib}")
    sources = sorted(CPP.glob("*.cpp"))
    run(toolchain.find_cxx().path, "-std=c++17", *STRICT, *sources, *flags.split(), *toolkit, "-o", program)
    refusals(run(program))


@pytest.mark.parametrize(("language", "standard"), [("c", "c11"), ("c++", "c++17")])
def test_the_header_compiles_alone_without_a_warning(library: Path, tmp_path: Path, language: str, standard: str) -> None:
    source = tmp_path / "unit"
    source.write_text(ENTRY_CALL.format(name="served"), encoding="utf-8")
    compile_alone = ("-x", language, f"-std={standard}", *STRICT, f"-I{library / 'include'}", "-c", source)
    run(toolchain.find_cxx().path, *compile_alone, "-o", tmp_path / "unit.o")


def test_two_units_that_include_the_header_link(library: Path, cuda: CudaToolkit, tmp_path: Path) -> None:
    cxx = toolchain.find_cxx().path
    (tmp_path / "c.c").write_text(ENTRY_CALL.format(name="from_c"), encoding="utf-8")
    (tmp_path / "main.cpp").write_text(
        ENTRY_CALL.format(name="from_cpp")
        + 'extern "C" int from_c(void);\n'
        + "int main() { return from_c() == from_cpp() && from_c() == TILEPRESS_INVALID_ARGUMENT ? 0 : 1; }\n",
        encoding="utf-8",
    )
    include = f"-I{library / 'include'}"
    run(cxx, "-x", "c", "-std=c11", *STRICT, include, "-c", tmp_path / "c.c", "-o", tmp_path / "c.o")
    run(cxx, "-std=c++17", *STRICT, include, "-c", tmp_path / "main.cpp", "-o", tmp_path / "main.o")
    libraries = (library / "lib" / "libtilepress.a", f"-L{cuda.lib}", f"-Wl,-rpath,{cuda.lib}", "-lcudart")
    run(cxx, tmp_path / "main.o", tmp_path / "c.o", *libraries, "-o", tmp_path / "program")
    run(tmp_path / "program")


def readme_code(language: str, containing: str) -> str:
    """The README's one block of this language that holds `containing`."""
    blocks = re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if containing in block]
    return str(found)


def test_the_readmes_cpp_compiles_as_its_cmake_says(library: Path, cuda: CudaToolkit, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(readme_code("cmake", "find_package"), encoding="utf-8")
    code = readme_code("cpp", "<tilepress.h>") + readme_code("cpp", "tilepress_decode_plan(")
    (tmp_path / "server.cpp").write_text(code, encoding="utf-8")
    run(*configuration(library, tmp_path, tmp_path / "build", cuda), f"-DCMAKE_CXX_FLAGS={' '.join(STRICT)}")
    run(toolchain.find_cmake().path, "--build", tmp_path / "build")


@pytest.mark.parametrize(("crate", "containing"), [("bin", "fn main()"), ("lib", "include!")])
def test_the_readmes_rust_compiles(library: Path, tmp_path: Path, crate: str, containing: str) -> None:
    rustc = shutil.which("rustc")
    if rustc is None:
        pytest.skip("rustc is not installed")
    source = tmp_path / "code.rs"
    source.write_text(readme_code("rust", containing), encoding="utf-8")
    options = ("--edition=2024", "-Dwarnings", "--emit=metadata", f"--crate-type={crate}", f"--out-dir={tmp_path}")
    run(rustc, *options, source, env={"TILEPRESS_RUST": str(library / "rust")})


def build_rust(target: Path, cache: Path, arguments: str) -> Path:
    """Builds examples/rust, which builds the library of its own; returns the program."""
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.skip("cargo is not installed")
    env = {
        "CARGO_TARGET_DIR": str(target),
        "RUSTFLAGS": "-D warnings",
        "TILEPRESS_PYTHON": sys.executable,
        "TILEPRESS_BUILD_ARGS": arguments,
        "TILEPRESS_CACHE": str(cache),
    }
    run(cargo, "build", "--offline", "--locked", "--quiet", env=env, cwd=RUST)
    return target / "debug" / "tilepress-example"


def test_the_rust_example_refuses_as_the_cpp_example_does(cpp_example: Path, rust_example: Path) -> None:
    assert refusals(run(rust_example)) == refusals(run(cpp_example))
    needed = run("ldd", rust_example)
    assert re.search(r"libcudart\.so\.13 => /", needed)
    assert "libcuda.so" not in needed


def test_the_rust_example_builds_with_a_stub(cache: Path, tmp_path: Path) -> None:
    program = build_rust(tmp_path / "target", cache, "--stub")
    assert_a_stub_in_every_mode(program)
    assert "cuda" not in run("ldd", program)


def test_a_failed_build_reaches_the_user_of_cargo(tmp_path: Path) -> None:
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.skip("cargo is not installed")
    env = {
        **os.environ,
        "CARGO_TARGET_DIR": str(tmp_path),
        "TILEPRESS_PYTHON": sys.executable,
        "TILEPRESS_BUILD_ARGS": "--stub --family none_such",
    }
    done = subprocess.run(
        [cargo, "build", "--offline", "--locked"], cwd=RUST, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "none_such" in done.stderr
