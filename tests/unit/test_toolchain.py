"""codegen.toolchain against fake programs: scripts in tmp_path that answer as the real ones do."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from codegen import toolchain
from codegen.errors import ToolchainError
from codegen.toolchain import (
    CUDA_WHEELS,
    CudaToolkit,
    Tool,
    doctor_report,
    find_cmake,
    find_cuda,
    find_cxx,
    find_ninja,
    shadow_root,
)

REPOSITORY = Path(__file__).parents[2]

# As nvcc does, it takes the folder it was called in for its own, and finds its root from there.
NVCC = """#!/bin/sh
case $1 in
--version) echo "Cuda compilation tools, release {release}, V{version}" ;;
--dryrun) echo "#\\$ _SPACE_= "; echo "#\\$ _HERE_=${{0%/*}}"; echo "gcc: No such file or directory"; exit 1 ;;
esac
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def prints(path: Path, line: str) -> Path:
    return script(path, f"#!/bin/sh\necho '{line}'\n")


def nvcc(path: Path, version: str = "13.0.88") -> Path:
    return script(path, NVCC.format(release=version.rsplit(".", 1)[0], version=version))


def toolkit(root: Path, version: str = "13.0.88") -> Path:
    """A host toolkit; returns its root."""
    nvcc(root / "bin" / "nvcc", version)
    for name in ("include/cuda_runtime.h", "lib64/libcudart.so"):
        (root / name).parent.mkdir()
        (root / name).touch()
    return root


def wheels(site_packages: Path, version: str = "13.0.88") -> Path:
    """What the wheels unpack; returns their nvidia/cu13."""
    root = site_packages / "nvidia" / "cu13"
    nvcc(root / "bin" / "nvcc", version)
    for name in ("bin/nvcc.profile", "include/cuda_runtime.h", "lib/libcudart.so.13", "nvvm/bin/cicc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (site_packages / f"nvidia_cuda_nvcc-{version}.dist-info").mkdir()
    return root


@pytest.fixture(autouse=True)
def bare_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this host's toolkits, this Python's wheels and the programs beside it."""
    monkeypatch.setattr(toolchain, "SYSTEM_PREFIX", tmp_path / "usr" / "local")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def host_record(root: Path, source: str, version: str = "13.0.88") -> CudaToolkit:
    return CudaToolkit(root, root / "bin" / "nvcc", version, root / "include", root / "lib64", source)


# CUDA on the host


def test_cudacxx_comes_first(tmp_path: Path, cache: Path) -> None:
    named = toolkit(tmp_path / "named", "13.1.80")
    home = toolkit(tmp_path / "home")
    env = {"CUDACXX": str(named / "bin" / "nvcc"), "CUDA_HOME": str(home)}
    assert find_cuda(cache, env) == host_record(named, "CUDACXX", "13.1.80")


def test_cudacxx_may_be_a_name_on_path(tmp_path: Path, cache: Path) -> None:
    root = toolkit(tmp_path / "kit")
    assert find_cuda(cache, {"CUDACXX": "nvcc", "PATH": str(root / "bin")}) == host_record(root, "CUDACXX")


def test_an_unusable_cudacxx_is_an_error_though_another_toolkit_would_serve(tmp_path: Path, cache: Path) -> None:
    old = toolkit(tmp_path / "old", "12.4.99")
    env = {"CUDACXX": str(old / "bin" / "nvcc"), "CUDA_HOME": str(toolkit(tmp_path / "good"))}
    with pytest.raises(ToolchainError) as failure:
        find_cuda(cache, env)
    assert str(failure.value) == (
        f"CUDACXX is '{old}/bin/nvcc', but it is CUDA 12.4.99, not 13.x. "
        "Point CUDACXX at the nvcc of a CUDA 13 toolkit, or unset it."
    )


def test_a_cudacxx_that_does_not_exist_is_an_error(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ToolchainError, match=re.escape(f"but {tmp_path}/none does not exist. Point CUDACXX at")):
        find_cuda(cache, {"CUDACXX": str(tmp_path / "none")})


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_names_the_root(variable: str, tmp_path: Path, cache: Path) -> None:
    root = toolkit(tmp_path / "kit")
    assert find_cuda(cache, {variable: str(root)}) == host_record(root, variable)


def test_a_toolkit_of_another_major_version_is_passed_over(tmp_path: Path, cache: Path) -> None:
    old = toolkit(tmp_path / "old", "12.4.99")
    good = toolkit(tmp_path / "good")
    path = f"{old}/bin:{good}/bin"
    assert find_cuda(cache, {"CUDA_HOME": str(old), "PATH": path}) == host_record(good, "PATH")


def test_a_wrapper_script_on_path_leads_to_the_real_root(tmp_path: Path, cache: Path) -> None:
    root = toolkit(tmp_path / "kit")
    wrapper = script(tmp_path / "bin" / "nvcc", f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    assert find_cuda(cache, {"PATH": str(wrapper.parent)}) == host_record(root, "PATH")


def test_a_link_on_path_leads_to_the_real_root(tmp_path: Path, cache: Path) -> None:
    root = toolkit(tmp_path / "kit")
    link = tmp_path / "bin" / "nvcc"
    link.parent.mkdir()
    link.symlink_to(root / "bin" / "nvcc")
    assert find_cuda(cache, {"PATH": str(link.parent)}) == host_record(root, "PATH")


def test_the_installers_places_come_last_newest_first(tmp_path: Path, cache: Path) -> None:
    toolkit(tmp_path / "usr" / "local" / "cuda", "12.4.99")
    toolkit(tmp_path / "usr" / "local" / "cuda-13.0")
    newer = toolkit(tmp_path / "usr" / "local" / "cuda-13.1", "13.1.80")
    assert find_cuda(cache, {}) == host_record(newer, str(newer), "13.1.80")


def test_headers_and_library_under_targets_serve(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "kit"
    nvcc(root / "bin" / "nvcc")
    target = root / "targets" / "x86_64-linux"
    for name in ("include/cuda_runtime.h", "lib/libcudart.so"):
        (target / name).parent.mkdir(parents=True)
        (target / name).touch()
    found = find_cuda(cache, {"CUDA_HOME": str(root)})
    assert (found.root, found.include, found.lib) == (root, target / "include", target / "lib")


@pytest.mark.parametrize("missing", ["include/cuda_runtime.h", "lib64/libcudart.so"])
def test_a_toolkit_that_lacks_a_part_is_unusable(missing: str, tmp_path: Path, cache: Path) -> None:
    root = toolkit(tmp_path / "kit")
    (root / missing).unlink()
    with pytest.raises(ToolchainError, match=re.escape(f"CUDA_HOME ({root}/bin/nvcc): {root} has no {missing}\n")):
        find_cuda(cache, {"CUDA_HOME": str(root)})


def test_an_nvcc_that_does_not_start_is_unusable(tmp_path: Path, cache: Path) -> None:
    broken = script(tmp_path / "kit" / "bin" / "nvcc", "#!/nowhere/sh\n")
    with pytest.raises(ToolchainError, match=re.escape(f"{broken} does not run: ")):
        find_cuda(cache, {"CUDA_HOME": str(tmp_path / "kit")})


def test_none_found_names_every_place_and_the_next_step(tmp_path: Path, cache: Path) -> None:
    home = toolkit(tmp_path / "old", "12.4.99")
    prefix = tmp_path / "usr" / "local"
    with pytest.raises(ToolchainError) as failure:
        find_cuda(cache, {"CUDA_HOME": str(home), "PATH": str(tmp_path / "empty")})
    assert str(failure.value) == (
        "no usable CUDA 13 toolkit. Looked at:\n"
        f"  CUDA_HOME ({home}/bin/nvcc): it is CUDA 12.4.99, not 13.x\n"
        "  CUDA_PATH: not set\n"
        "  PATH: no nvcc on it\n"
        f"  {prefix}/cuda: {prefix}/cuda/bin/nvcc does not exist\n"
        f"  PyPI wheels of {sys.executable}: nvidia-cuda-nvcc is not installed\n"
        "Run `pip install nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 "
        "nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85` for this Python, "
        "or build with `./build_tools/run build`."
    )


# CUDA from PyPI


def test_the_wheels_serve_through_a_shadow_root(tmp_path: Path, cache: Path) -> None:
    source = wheels(tmp_path / "site-packages")
    before = sorted(source.rglob("*"))
    found = find_cuda(cache, {})
    assert found == host_record(found.root, "pypi")
    assert found.root.parent == cache
    assert sorted(path.name for path in cache.iterdir()) == [found.root.name]
    assert found.nvcc.resolve() == source / "bin" / "nvcc"
    assert (found.root / "bin" / "nvcc.profile").resolve() == source / "bin" / "nvcc.profile"
    assert (found.root / "nvvm" / "bin" / "cicc").resolve() == source / "nvvm" / "bin" / "cicc"
    assert (found.root / "lib64" / "libcudart.so").resolve() == source / "lib" / "libcudart.so.13"
    assert (found.root / "lib" / "libcudart.so").resolve() == source / "lib" / "libcudart.so.13"
    assert not (found.root / "bin").is_symlink()
    assert sorted(source.rglob("*")) == before


def test_the_host_comes_before_the_wheels_unless_told_otherwise(tmp_path: Path, cache: Path) -> None:
    wheels(tmp_path / "site-packages")
    env = {"CUDA_HOME": str(toolkit(tmp_path / "kit"))}
    assert find_cuda(cache, env).source == "CUDA_HOME"
    assert find_cuda(cache, {**env, "TILEPRESS_CUDA": "host"}).source == "CUDA_HOME"
    assert find_cuda(cache, {**env, "TILEPRESS_CUDA": "pypi"}).source == "pypi"


def test_host_only_does_not_take_the_wheels(tmp_path: Path, cache: Path) -> None:
    wheels(tmp_path / "site-packages")
    with pytest.raises(ToolchainError, match=r"^no usable CUDA 13 toolkit\. Looked at:\n"):
        find_cuda(cache, {"TILEPRESS_CUDA": "host"})
    assert not cache.exists()


def test_an_unknown_choice_is_an_error(cache: Path) -> None:
    with pytest.raises(ToolchainError) as failure:
        find_cuda(cache, {"TILEPRESS_CUDA": "wheel"})
    assert str(failure.value) == "TILEPRESS_CUDA is 'wheel'. Set it to auto, host or pypi, or leave it unset."


def test_an_incomplete_set_of_wheels_is_unusable(tmp_path: Path, cache: Path) -> None:
    source = wheels(tmp_path / "site-packages")
    (source / "nvvm" / "bin" / "cicc").unlink()
    with pytest.raises(ToolchainError, match=re.escape(f"{source} lacks nvvm/bin/cicc\n")):
        find_cuda(cache, {})


def test_a_shadow_root_is_kept_and_another_wheel_makes_another(tmp_path: Path, cache: Path) -> None:
    site_packages = tmp_path / "site-packages"
    source = wheels(site_packages)
    first = shadow_root(source, cache)
    assert shadow_root(source, cache) == first
    (site_packages / "nvidia_cuda_nvcc-13.0.88.dist-info").rename(site_packages / "nvidia_cuda_nvcc-13.0.90.dist-info")
    second = shadow_root(source, cache)
    assert second != first
    (source / "bin" / "cuobjdump").touch()
    third = shadow_root(source, cache)
    assert (third / "bin" / "cuobjdump").resolve() == source / "bin" / "cuobjdump"
    assert sorted(cache.iterdir()) == sorted([first, second, third])


def test_two_builds_at_once_get_one_whole_shadow_root(tmp_path: Path, cache: Path) -> None:
    source = wheels(tmp_path / "site-packages")
    with ThreadPoolExecutor(8) as pool:
        roots = set(pool.map(lambda _: shadow_root(source, cache), range(32)))
    assert sorted(cache.iterdir()) == sorted(roots)
    (root,) = roots
    assert sorted(path.name for path in root.iterdir()) == ["bin", "include", "lib", "lib64", "nvvm"]


def test_a_loser_of_the_race_takes_the_winners_root(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = wheels(tmp_path / "site-packages")
    link = toolchain._link_toolkit

    def link_after_another_build(tree: Path, root: Path) -> None:
        monkeypatch.setattr(toolchain, "_link_toolkit", link)
        shadow_root(tree, cache)
        link(tree, root)

    monkeypatch.setattr(toolchain, "_link_toolkit", link_after_another_build)
    assert sorted(cache.glob("*")) == []
    assert [shadow_root(source, cache)] == sorted(cache.iterdir())


def test_a_cache_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    source = wheels(tmp_path / "site-packages")
    (tmp_path / "file").touch()
    with pytest.raises(ToolchainError, match=r"^cannot write in .*Choose another cache directory\.$"):
        shadow_root(source, tmp_path / "file" / "cache")


# CMake, ninja, the C++ compiler


@pytest.mark.parametrize(
    ("find", "name", "answer", "version"),
    [(find_cmake, "cmake", "cmake version 3.31.6", "3.31.6"), (find_ninja, "ninja", "1.13.2.git", "1.13.2")],
)
def test_a_packaged_tool_is_taken_beside_python_then_on_path(
    find: Callable[..., Tool], name: str, answer: str, version: str, tmp_path: Path
) -> None:
    on_path = prints(tmp_path / "bin" / name, answer)
    env = {"PATH": str(on_path.parent)}
    assert find(env) == Tool(name, on_path, version, "PATH")
    beside = prints(tmp_path / "venv" / "bin" / name, answer)
    assert find(env) == Tool(name, beside, version, "venv")


def test_an_old_cmake_is_refused_by_its_version(tmp_path: Path) -> None:
    old = prints(tmp_path / "bin" / "cmake", "cmake version 3.22.1")
    with pytest.raises(ToolchainError) as failure:
        find_cmake({"PATH": str(old.parent)})
    assert str(failure.value) == (
        f"no usable cmake 3.24 or newer: {old} is version 3.22.1, older than 3.24. Run `pip install cmake`."
    )


def test_no_ninja_says_where_it_was_sought() -> None:
    with pytest.raises(ToolchainError) as failure:
        find_ninja({"PATH": ""})
    assert str(failure.value) == (
        f"no usable ninja 1.10 or newer: there is none beside {sys.executable} or on PATH. Run `pip install ninja`."
    )


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "12.2.0"),
        ("g++ (GCC) 13.2.1 20231011 (Red Hat 13.2.1-7)", "13.2.1"),
        ("Ubuntu clang version 14.0.0-1ubuntu1.1", "14.0.0"),
    ],
)
def test_a_compilers_version_is_its_own_not_its_packages(answer: str, version: str, tmp_path: Path) -> None:
    path = prints(tmp_path / "bin" / "g++", answer)
    assert find_cxx({"PATH": str(path.parent)}) == Tool("c++", path, version, "PATH")


def test_cxx_may_carry_flags(tmp_path: Path) -> None:
    path = prints(tmp_path / "g++-13", "g++-13 (GCC) 13.2.0")
    prints(tmp_path / "bin" / "c++", "c++ (GCC) 11.4.0")
    env = {"CXX": f"{path} -m64", "PATH": str(tmp_path / "bin")}
    assert find_cxx(env) == Tool("c++", path, "13.2.0", "CXX")


def test_an_unusable_cxx_is_an_error_though_path_has_a_compiler(tmp_path: Path) -> None:
    prints(tmp_path / "bin" / "c++", "c++ (GCC) 11.4.0")
    with pytest.raises(ToolchainError) as failure:
        find_cxx({"CXX": "icpx", "PATH": str(tmp_path / "bin")})
    assert str(failure.value) == ("CXX is 'icpx', but 'icpx' is not a program. Point CXX at a C++ compiler, or unset it.")


def test_no_compiler_is_an_error() -> None:
    with pytest.raises(ToolchainError, match=r"^no C\+\+ compiler on PATH \(c\+\+, g\+\+, clang\+\+\)\. Install one"):
        find_cxx({"PATH": ""})


# The doctor


def test_the_doctor_reports_a_bare_host_without_failing(cache: Path) -> None:
    # A named Python that does not run, so that what this environment holds is not reported.
    rows = doctor_report(cache, {"PATH": "", toolchain.TILELANG_PYTHON: "/nowhere/python"})
    assert [(row.name, row.ok, row.optional) for row in rows] == [
        ("python", True, False),
        ("C++ compiler", False, False),
        ("cmake", False, False),
        ("ninja", False, False),
        ("CUDA toolkit", False, False),
        ("ld", False, False),
        ("objcopy", False, False),
        ("ar", False, False),
        ("TileLang", False, False),
        ("torch", False, False),
        ("GPU driver", False, True),
        ("rustc", False, True),
    ]
    assert all(row.ok == (row.next_step == "") for row in rows)


@pytest.mark.parametrize(("wanted", "ok"), [("0.1.15", True), ("0.1.14", False), (None, True)])
def test_the_doctor_asks_the_named_python_for_tilelang(wanted: str | None, ok: bool, tmp_path: Path, cache: Path) -> None:
    python = prints(tmp_path / "other" / "python", "0.1.15")
    rows = doctor_report(cache, {"PATH": "", toolchain.TILELANG_PYTHON: str(python)}, tilelang=wanted)
    (row,) = (row for row in rows if row.name == "TileLang")
    assert (row.path, row.version, row.ok) == (python, "0.1.15", ok)


def test_the_doctor_shows_what_it_found(tmp_path: Path, cache: Path) -> None:
    root = toolkit(tmp_path / "kit")
    smi = prints(tmp_path / "bin" / "nvidia-smi", "580.65.06")
    ar = prints(tmp_path / "bin" / "ar", "GNU ar (GNU Binutils for Debian) 2.40")
    rows = {row.name: row for row in doctor_report(cache, {"CUDA_HOME": str(root), "PATH": str(smi.parent)})}
    assert (rows["CUDA toolkit"].path, rows["CUDA toolkit"].version) == (root / "bin" / "nvcc", "13.0.88")
    assert (rows["ar"].path, rows["ar"].version, rows["ar"].ok) == (ar, "2.40", True)
    assert (rows["GPU driver"].path, rows["GPU driver"].version, rows["GPU driver"].ok) == (smi, "580.65.06", True)


# What build_tools/run asks


@pytest.mark.parametrize("choice", ["auto", "host"])
def test_the_module_names_the_hosts_toolkit(choice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = toolkit(tmp_path / "kit")
    assert toolchain.main({"CUDA_HOME": str(root), "TILEPRESS_CUDA": choice}) == 0
    assert capsys.readouterr().out == f"CUDA 13.0.88 at {root} (CUDA_HOME)\n"


def test_the_module_says_when_the_wheels_are_needed(tmp_path: Path) -> None:
    assert toolchain.main({}) == 3
    assert toolchain.main({"CUDA_HOME": str(toolkit(tmp_path / "kit")), "TILEPRESS_CUDA": "pypi"}) == 3


def test_the_module_fails_where_the_wheels_may_not_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert toolchain.main({"TILEPRESS_CUDA": "host"}) == 1
    assert toolchain.main({"CUDACXX": str(tmp_path / "none")}) == 1
    assert "CUDACXX is" in capsys.readouterr().err


# The pins agree


def requirements(name: str) -> list[str]:
    lines = (REPOSITORY / "build_tools" / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_error_names_the_wheels_that_build_tools_installs() -> None:
    assert set(CUDA_WHEELS) <= set(requirements("cuda"))


def test_the_table_the_package_and_the_requirements_pin_one_tilelang() -> None:
    (version,) = re.findall(r'^tilelang = "(.+?)"', (REPOSITORY / "families.toml").read_text(), re.MULTILINE)
    assert f"tilelang=={version}" in requirements("build")
    assert f'"tilelang=={version}"' in (REPOSITORY / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["build", "cuda", "torch", "test"])
def test_every_requirement_is_exact(name: str) -> None:
    loose = [line for line in requirements(name) if not re.fullmatch(r"[a-z0-9-]+==[0-9.]+(; .+)?", line)]
    assert loose == []
