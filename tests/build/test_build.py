"""The build as its users see it: files, bytes, exit codes, messages. Every build is a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from codegen import errors

from .commands import NARROW_KERNELS, ROOT, Cli, Narrow, environment, narrow_lists, narrow_table

pytestmark = pytest.mark.build

TABLE = (ROOT / "families.toml").read_text(encoding="utf-8")
WIDE = """
[[family]]
name = "wide_prefill"
operation = "prefill"
layer = "global"
head_dim = 512
page_size = 64
groups = [8]
formats = ["split"]
tma = true
"""
# The routed entries: layers and operation, then the plan's part.
ROUTED = [f"{layers}_{operation}" for layers in ("global", "sliding") for operation in ("decode", "prefill")]
OWN = [
    "tilepress_build_info",
    "tilepress_decode_plan",
    "tilepress_decode_plan_size",
    "tilepress_gelu_mul",
    "tilepress_global_decode",
    "tilepress_global_prefill",
    "tilepress_last_error",
    "tilepress_merge_states",
    "tilepress_mode_pool_bytes",
    "tilepress_parse_mode",
    "tilepress_pool_bytes",
    "tilepress_prep_global_decode",
    "tilepress_prep_global_prompt",
    "tilepress_prep_sliding_decode",
    "tilepress_prep_sliding_prompt",
    *(f"tilepress_routed_{name}{part}" for name in ROUTED for part in ("", "_plan", "_plan_size")),
    "tilepress_sliding_decode",
    "tilepress_sliding_prefill",
    "tilepress_supports",
    "tilepress_version",
]
INCUMBENT = [
    "batch_prefill_cta_tile_q",
    "batch_prefill_cta_tile_q_with_override",
    "batch_prefill_paged_cuda",
    "batch_prefill_paged_cuda_hd256",
    "batch_prefill_paged_cuda_hd512",
    "batch_prefill_paged_cuda_with_cta_tile_q",
    "batch_prefill_paged_num_tiles",
    "batch_prefill_paged_num_tiles_with_cta_tile_q",
    "batch_prefill_paged_window_cuda_hd256",
    "paged_attention_decode_cuda",
    "paged_attention_decode_cuda_hd256",
    "paged_attention_decode_split_kv_cuda",
    "paged_attention_decode_split_kv_cuda_hd512",
    "paged_attention_decode_window_cuda_hd256",
    "paged_kv_append_cuda",
    "paged_kv_scatter_cuda",
    "single_prefill_cuda",
    "single_prefill_cuda_hd256",
    "single_prefill_cuda_hd512",
]
SYMBOLS = [*INCUMBENT, *OWN]  # sorted
INSTALLED = [
    "include/tilepress.h",
    "lib/cmake/tilepress/tilepressConfig.cmake",
    "lib/cmake/tilepress/tilepressConfigVersion.cmake",
    "lib/libtilepress.a",
    "lib/pkgconfig/tilepress.pc",
    "rust/tilepress_sys.rs",
    "share/tilepress/libtilepress.d",
    "share/tilepress/manifest.json",
    "share/tilepress/symbols.txt",
]
BUILD = ("build", "--arch", "sm_90")
STUB = (*BUILD, "--stub")


def table_with(path: Path, *changes: tuple[str, str], more: str = "") -> Path:
    """A copy of the committed table with text replaced, each once, and rows appended."""
    text = TABLE
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is not once in families.toml"
        text = text.replace(old, new)
    path.write_text(text + more, encoding="utf-8")
    return path


def files(out: Path) -> dict[str, str]:
    """The digest of every installed file, by its relative path; the working directory left out."""
    return {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.relative_to(out).parts[0] != ".build"
    }


def objects(out: Path) -> dict[str, str]:
    """The digest of every relinked object and of the archive."""
    build = out / ".build" / "cmake"
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted([*build.glob("*.o"), build / "libtilepress.a"])
    }


def relocatable(out: Path) -> dict[str, str]:
    """`files` less the depfile, which names where the tree lies."""
    return {name: value for name, value in files(out).items() if not name.endswith(".d")}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# What a build leaves


@pytest.mark.parametrize("tier", ["library", "stub_library"])
def test_a_build_leaves_exactly_these_files(tier: str, request: pytest.FixtureRequest) -> None:
    assert list(files(request.getfixturevalue(tier))) == INSTALLED


PARTS = ("", "_plan_size", "_plan")  # of a routed entry
# The manifest's entries, less their signature hashes.
ENTRIES: list[dict[str, Any]] = [
    {
        "name": "tilepress_global_prefill",
        "struct": "tilepress_prefill_args",
        "operation": "prefill",
        "head_dim": 512,
        "page_size": 64,
        "groups": [4, 8, 16],
        "formats": ["split", "folded"],
    },
    {
        "name": "tilepress_global_decode",
        "struct": "tilepress_decode_args",
        "operation": "decode",
        "head_dim": 512,
        "page_size": 64,
        "groups": [4, 8, 16],
        "formats": ["split", "folded"],
    },
    {
        "name": "tilepress_sliding_prefill",
        "struct": "tilepress_sliding_prefill_args",
        "operation": "sliding_prefill",
        "head_dim": 256,
        "page_size": 64,
        "groups": [2, 4, 8],
        "formats": ["split"],
    },
    {
        "name": "tilepress_sliding_decode",
        "struct": "tilepress_decode_args",
        "operation": "sliding_decode",
        "head_dim": 256,
        "page_size": 64,
        "groups": [2, 4, 8],
        "formats": ["split"],
    },
    {"name": "tilepress_decode_plan_size", "struct": "tilepress_decode_plan_size_args"},
    {"name": "tilepress_decode_plan", "struct": "tilepress_decode_plan_args"},
    {"name": "tilepress_merge_states", "struct": "tilepress_merge_states_args"},
    {"name": "tilepress_prep_global_prompt", "struct": "tilepress_prep_prompt_args"},
    {"name": "tilepress_prep_global_decode", "struct": "tilepress_prep_decode_args"},
    {"name": "tilepress_prep_sliding_prompt", "struct": "tilepress_prep_prompt_args"},
    {"name": "tilepress_prep_sliding_decode", "struct": "tilepress_prep_decode_args"},
    {"name": "tilepress_gelu_mul", "struct": "tilepress_gelu_mul_args"},
    *({"name": f"tilepress_routed_global_prefill{x}", "struct": f"tilepress_routed_prefill{x}_args"} for x in PARTS),
    *({"name": f"tilepress_routed_global_decode{x}", "struct": f"tilepress_routed_decode{x}_args"} for x in PARTS),
    {"name": "tilepress_routed_sliding_prefill", "struct": "tilepress_routed_sliding_prefill_args"},
    *({"name": f"tilepress_routed_sliding_prefill{x}", "struct": f"tilepress_routed_prefill{x}_args"} for x in PARTS[1:]),
    *({"name": f"tilepress_routed_sliding_decode{x}", "struct": f"tilepress_routed_decode{x}_args"} for x in PARTS),
]

# Grid and threads of every kernel. A windowed prefill's CTAs stay; a merge's has 128 of a head's columns.
PARTIAL_GRID = ["ctas", "1", "1"]
CLUSTERS = ["(std::min(resident_clusters, (max_batch * num_kv_heads)) * 6)", "1", "1"]
KERNELS: dict[str, tuple[list[str], int]] = {
    **{f"global_prefill_g{g}_{f}": ([str(g), "q_tiles", "num_kv_heads"], 384) for f in ("split", "folded") for g in (4, 8, 16)},
    **{f"global_decode_partial_g{g}_{f}": (PARTIAL_GRID, 160) for f in ("split", "folded") for g in (4, 8, 16)},
    "global_decode_merge": (["(group * merge_blocks)", "num_kv_heads", "max_batch"], 256),
    **{f"sliding_prefill_g{g}_split": (["sm_count", "1", "1"], 384) for g in (2, 4, 8)},
    **{f"sliding_decode_g{g}_split": (CLUSTERS, 160 + 16 * g) for g in (2, 4, 8)},  # two heads a merging warp
}


def test_manifest_of_a_full_build(library: Path) -> None:
    manifest: dict[str, Any] = json.loads(read(library / "share/tilepress/manifest.json"))
    assert manifest["library"] == "tilepress"
    assert manifest["version"] == "0.1.0"
    assert manifest["tier"] == "generate"
    assert manifest["arch"] == {"name": "sm_90", "target": "sm_90a"}
    assert manifest["tilelang"] == "0.1.15"
    assert re.fullmatch(r"13\.\d+\.\d+", manifest["nvcc"])
    assert manifest["symbols"] == SYMBOLS
    for entry in manifest["entries"]:
        assert re.fullmatch("[0-9a-f]{64}", entry.pop("signature_hash"))
    assert manifest["entries"] == ENTRIES
    kernels = {kernel["name"]: kernel for kernel in manifest["kernels"]}
    assert {name: kernel["grid"] for name, kernel in kernels.items()} == {name: grid for name, (grid, _) in KERNELS.items()}
    assert {name: kernel["block"] for name, kernel in kernels.items()} == {
        name: [threads, 1, 1] for name, (_, threads) in KERNELS.items()
    }
    assert len(manifest["kernels"]) == len(KERNELS)
    # Q 64 KB and four floats a row. Split: K 64 KB, V two halves of 32 KB, P of two tiles 8 KB each. Folded: two tiles of
    # 80 KB.
    assert {k["dynamic_shared_bytes"] for name, k in kernels.items() if name.startswith("global_prefill")} == {
        (64 + 64 + 2 * 32 + 2 * 8) * 1024 + 4 * 64 * 4,
        (64 + 2 * 80) * 1024 + 4 * 64 * 4,
    }
    for name, kernel in kernels.items():
        ctas = 2 if name.startswith("global_prefill") else 6 if name.startswith("sliding_decode") else 1
        assert kernel["cluster"] == [ctas, 1, 1]
        assert kernel["programmatic"] == ("decode" in name)
    for name, kernel in kernels.items():
        if "prefill" in name:
            # 384 threads of 168 fill the 65,536 registers of a block, which setmaxnreg deals out again as 2 * 240 + 24.
            assert kernel["registers"] == 168
        assert kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == kernel["stack_bytes"] == 0
        assert kernel["nvcc_flags"] == ["--use_fast_math"]
        source = library / ".build/tree/generated" / f"{kernel['name']}.cu"
        assert kernel["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()


def test_manifest_of_a_stub(library: Path, stub_library: Path) -> None:
    stub = json.loads(read(stub_library / "share/tilepress/manifest.json"))
    full = json.loads(read(library / "share/tilepress/manifest.json"))
    assert (stub["tier"], stub["nvcc"], stub["kernels"]) == ("stub", "none", [])
    assert stub["entries"] == full["entries"]
    assert stub["symbols"] == full["symbols"] == SYMBOLS


def test_symbols_are_one_a_line(library: Path) -> None:
    assert read(library / "share/tilepress/symbols.txt") == "".join(f"{name}\n" for name in SYMBOLS)


@pytest.mark.parametrize("tier", ["library", "stub_library"])
def test_the_archive_exports_exactly_the_symbols(tier: str, request: pytest.FixtureRequest) -> None:
    archive = request.getfixturevalue(tier) / "lib/libtilepress.a"
    nm = subprocess.run(["nm", "--extern-only", "--defined-only", archive], capture_output=True, text=True, check=True)
    assert sorted(line.split()[-1] for line in nm.stdout.splitlines() if len(line.split()) == 3) == SYMBOLS


def test_a_stub_has_the_headers_and_bindings_of_a_full_build(library: Path, stub_library: Path) -> None:
    full, stub = files(library), files(stub_library)
    for name in ("include/tilepress.h", "rust/tilepress_sys.rs", "share/tilepress/symbols.txt"):
        assert full[name] == stub[name]


def test_the_archive_needs_no_libcuda(library: Path) -> None:
    nm = subprocess.run(["nm", "-u", library / "lib/libtilepress.a"], capture_output=True, text=True, check=True)
    undefined = {line.split()[-1] for line in nm.stdout.splitlines() if line.strip()}
    assert "cudaLaunchKernelExC" in undefined
    # The driver's API is cu followed by a capital letter.
    assert not [name for name in undefined if re.match(r"cu[A-Z]", name)]


def test_nothing_installed_names_a_place_but_the_depfile(library: Path) -> None:
    named = [name for name in INSTALLED if str(library.parent).encode() in (library / name).read_bytes()]
    assert named == ["share/tilepress/libtilepress.d"]


def test_the_depfile_lists_the_sources(library: Path) -> None:
    target, _, rest = read(library / "share/tilepress/libtilepress.d").partition(":")
    assert Path(target) == library / "lib/libtilepress.a"
    listed = [Path(line.strip(" \\")) for line in rest.splitlines() if line.strip(" \\")]
    wanted = ["families.toml", "CMakeLists.txt", "codegen/abi/decode.py", "codegen/formats.py", "codegen/kernels/prefill.py"]
    wanted += ["codegen/templates/tilepress.h.j2", "codegen/templates/kernel.cu.j2", "csrc/prefill.h", "csrc/error.cpp"]
    wanted += ["csrc/decode_plan.cpp", "csrc/merge_states.cu", "codegen/abi/prep.py", "codegen/templates/qk_prep.cuh.j2"]
    wanted += ["csrc/activation.cu", "csrc/activation.h", "csrc/band.h", "csrc/prep.h", "csrc/prep_global.cu"]
    assert {ROOT / name for name in wanted} <= set(listed)
    assert all(path.is_file() for path in listed)
    assert len(listed) == len(set(listed))


# Two builds agree


def test_two_clean_builds_are_byte_identical(narrow: Narrow, run_cli: Cli, tmp_path: Path) -> None:
    """Nothing from a cache, another directory, another time. Every operation, each stage and page format."""
    out = tmp_path / "a directory elsewhere" / "out"
    run_cli(*BUILD, *narrow.options, "--out", out, "--no-cache", env={"PYTHONHASHSEED": "7"}).succeeded()
    assert objects(out) == objects(narrow.out)
    assert relocatable(out) == relocatable(narrow.out)
    assert {f"{kernel}.o" for kernel in NARROW_KERNELS} < objects(out).keys()


def test_a_narrow_build_has_the_full_builds_kernels(narrow: Narrow, library: Path) -> None:
    """What else the table holds changes no kernel's object."""
    full, some = objects(library), objects(narrow.out)
    for kernel in NARROW_KERNELS:
        assert full[f"{kernel}.o"] == some[f"{kernel}.o"]


def test_a_stub_in_a_directory_with_a_space(stub_library: Path, run_cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "über all" / "out"
    run_cli(*STUB, "--out", out, "--no-cache").succeeded()
    assert objects(out) == objects(stub_library)
    assert relocatable(out) == relocatable(stub_library)
    # make's rule: a space in a prerequisite's or target's name is escaped.
    assert read(out / "share/tilepress/libtilepress.d").startswith(f"{tmp_path}/über\\ all/out/lib/libtilepress.a:")


def test_building_again_changes_no_file(run_cli: Cli, tmp_path: Path) -> None:
    run_cli(*STUB, "--out", tmp_path).succeeded()
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in INSTALLED}
    run_cli(*STUB, "--out", tmp_path).succeeded()
    after = {name: (tmp_path / name).stat().st_mtime_ns for name in INSTALLED}
    # The manifest is removed while a build installs, so that a tree without one is known to be unfinished.
    assert [name for name in INSTALLED if before[name] != after[name]] == ["share/tilepress/manifest.json"]


def test_a_stub_over_a_full_build_leaves_nothing_of_it(stub_library: Path, library: Path, run_cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(library, tmp_path / "out")
    run_cli(*STUB, "--out", tmp_path / "out").succeeded()
    assert relocatable(tmp_path / "out") == relocatable(stub_library)
    assert not {f"{kernel}.o" for kernel in KERNELS} & objects(tmp_path / "out").keys()


def edit(path: Path, old: str, new: str) -> None:
    """Replaces text once, and gives the file a time long before any build."""
    text = read(path)
    assert text.count(old) == 1, f"{old!r} is not once in {path.name}"
    path.write_text(text.replace(old, new), encoding="utf-8")
    os.utime(path, (1, 1))


# The groups of the first row alone: others have the same, without a comment behind.
FIRST_GROUPS = "groups = [4, 8, 16]  "
# What is edited, and in which object it must show.
EDITS = {
    "a source": ("csrc/error.cpp", "message[512]", "message[256]", "error.o"),
    "a header": ("csrc/scale.h", "it must be finite and above 0", "it must be positive", "global_prefill.o"),
    "a template": (
        "codegen/templates/checks.j2",
        "args is null",
        "args is a null pointer",
        "global_prefill.o",
    ),
    "a flag": ("CMakeLists.txt", "cxx_options -O2", "cxx_options -O1", "global_prefill.o"),
    "a planner": ("csrc/decode_plan.cpp", "they must not decrease", "they may not decrease", "decode_plan_body.o"),
    "the page formats": ("codegen/formats.py", "extra_columns=0", "extra_columns=64", "pool.o"),
    "the table": ("families.toml", FIRST_GROUPS, "groups = [4, 8]", "library.o"),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_is_built_whatever_the_file_times_say(case: str, package: Path, run_cli: Cli, tmp_path: Path) -> None:
    name, old, new, changed = EDITS[case]
    out = tmp_path / "out"
    run_cli(*STUB, "--out", out, package=package).succeeded()
    before = objects(out)
    edit(package / name, old, new)
    run_cli(*STUB, "--out", out, package=package).succeeded()
    after = objects(out)
    assert before[changed] != after[changed]
    assert before["libtilepress.a"] != after["libtilepress.a"]
    edit(package / name, new, old)
    run_cli(*STUB, "--out", out, package=package).succeeded()
    assert objects(out) == before


def test_a_kernels_flags_are_the_tables_alone(narrow: Narrow, run_cli: Cli, tmp_path: Path) -> None:
    """Flags in the environment would part the objects from their JIT twins: they are refused or have no effect."""
    flags = {"NVCC_APPEND_FLAGS": "-fmad=false", "CUDAFLAGS": "-fmad=false"}
    build = (*BUILD, *narrow.options, "--family", "sliding_decode", "--out", tmp_path / "out", "--no-cache")
    done = run_cli(*build, env=flags)
    if done.code:
        done.failed(errors.ToolchainError.exit_code, "NVCC_APPEND_FLAGS")
    else:
        bodies = ("merge_states_body.o", "prep_global_body.o", "prep_sliding_body.o", "activation_body.o")
        for name in ("sliding_decode_g4_split.o", *bodies):
            assert objects(tmp_path / "out")[name] == objects(narrow.out)[name]


def test_a_build_for_racecheck_differs_in_the_prefill_alone(narrow: Narrow, run_cli: Cli, tmp_path: Path) -> None:
    """The launcher's cache must not give it the other build's kernels."""
    out = tmp_path / "out"
    run_cli(*BUILD, *narrow.options, "--family", "global_prefill", "--racecheck", "--out", out).succeeded()
    ordinary, checked = objects(narrow.out), objects(out)
    changed = {name for name in checked if checked[name] != ordinary[name]}
    # These three hold the whole library's families, of which this build has one.
    assert changed - {"library.o", "tilepress.o", "libtilepress.a"} == {"global_prefill_g8_folded.o"}


# A family is a row


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, run_cli: Cli) -> tuple[Path, Path, Path]:
    """A full build of the narrow table with one more family: table, install tree, and the symbol lists reviewed for it."""
    folder = tmp_path_factory.mktemp("wide")
    table = narrow_table(folder / "families.toml", more=WIDE)
    lists, out = narrow_lists(folder / "symbols", *NARROW_KERNELS), folder / "out"
    refused = run_cli(*BUILD, "--table", table, "--symbols", lists, "--out", out)
    refused.failed(errors.SymbolError.exit_code, "+T tilepress_wide_prefill", "verify --update")
    assert not (out / "share/tilepress/manifest.json").exists()
    run_cli("verify", "--update", "--table", table, "--symbols", lists, "--out", out).succeeded()
    run_cli(*BUILD, "--table", table, "--symbols", lists, "--out", out).succeeded()
    return table, out, lists


def test_a_new_row_fails_until_its_symbols_are_committed(run_cli: Cli, tmp_path: Path) -> None:
    table = table_with(tmp_path / "families.toml", more=WIDE)
    done = run_cli(*STUB, "--table", table, "--out", tmp_path / "out")
    done.failed(errors.SymbolError.exit_code, "+T tilepress_wide_prefill", "archive.txt", "verify --update")
    assert "tilepress_global_prefill" not in done.stderr[done.stderr.index("error: ") :]
    assert files(tmp_path / "out") == {}


def test_a_row_that_vanished_fails_too(run_cli: Cli, tmp_path: Path) -> None:
    table = table_with(tmp_path / "families.toml", ('name = "global_prefill"', 'name = "renamed_prefill"'))
    done = run_cli(*STUB, "--table", table, "--out", tmp_path / "out")
    done.failed(errors.SymbolError.exit_code, "-T tilepress_global_prefill", "+T tilepress_renamed_prefill")


def test_a_new_family_is_on_every_surface(wide: tuple[Path, Path, Path]) -> None:
    _, out, lists = wide
    assert "int tilepress_wide_prefill(const tilepress_prefill_args *args);" in read(out / "include/tilepress.h")
    assert "pub fn tilepress_wide_prefill(args: *const tilepress_prefill_args)" in read(out / "rust/tilepress_sys.rs")
    assert '"wide_prefill",' in read(out / ".build/tree/generated/python.cpp")
    manifest = json.loads(read(out / "share/tilepress/manifest.json"))
    names = [entry["name"] for entry in manifest["entries"]]
    assert names == [*(e["name"] for e in ENTRIES[:4]), "tilepress_wide_prefill", *(e["name"] for e in ENTRIES[4:])]
    assert {kernel["name"] for kernel in manifest["kernels"]} == {*NARROW_KERNELS, "wide_prefill_g8_split"}
    assert read(out / "share/tilepress/symbols.txt").splitlines() == [*OWN, "tilepress_wide_prefill"]
    assert "T tilepress_wide_prefill" in read(lists / "archive.txt").splitlines()
    assert read(lists / "objects/wide_prefill.txt") == "T tilepress_wide_prefill\n"


def test_a_new_family_changes_no_other_object(wide: tuple[Path, Path, Path], narrow: Narrow) -> None:
    before, after = objects(narrow.out), objects(wide[1])
    changed = {name for name in before if before[name] != after[name]}
    # The instances' table, and what holds it.
    assert changed == {"library.o", "tilepress.o", "libtilepress.a"}


BOTH = r"""
#include <stdio.h>
#include <string.h>
#include "tilepress.h"

static int refused(int (*entry)(const tilepress_prefill_args *), const char *name) {
  tilepress_prefill_args args;
  memset(&args, 0, sizeof args);
  int code = entry(&args);
  printf("%d %s\n", code, strstr(tilepress_last_error(), name) ? "named" : tilepress_last_error());
  return code;
}

int main(void) {
  refused(tilepress_global_prefill, "tilepress_global_prefill: struct_size");
  refused(tilepress_wide_prefill, "tilepress_wide_prefill: struct_size");
  printf("%d\n", tilepress_supports("tilepress_global_prefill", 16, 2, 512, 64, TILEPRESS_PAGE_FORMAT_FOLDED));
  printf("%d\n", tilepress_supports("tilepress_wide_prefill", 16, 1, 512, 64, TILEPRESS_PAGE_FORMAT_SPLIT));
  printf("%d\n", tilepress_supports("tilepress_wide_prefill", 16, 2, 512, 64, TILEPRESS_PAGE_FORMAT_SPLIT));
  return 0;
}
"""


def test_two_families_in_one_program(wide: tuple[Path, Path, Path], compiler: Any, tmp_path: Path) -> None:
    from codegen.toolchain import find_cuda

    out = wide[1]
    cuda = find_cuda(tmp_path)
    (tmp_path / "both.c").write_text(BOTH)
    compiler("-x", "c", "-std=c11", f"-I{out / 'include'}", "-c", tmp_path / "both.c", "-o", tmp_path / "both.o")
    program = tmp_path / "both"
    compiler(
        tmp_path / "both.o", out / "lib/libtilepress.a", f"-L{cuda.lib}", "-lcudart", f"-Wl,-rpath,{cuda.lib}", "-o", program
    )
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["1 named", "1 named", "0", "2", "0", ""]


def test_one_family_of_two(wide: tuple[Path, Path, Path], run_cli: Cli, tmp_path: Path) -> None:
    table, _, lists = wide
    run_cli(*BUILD, "--table", table, "--symbols", lists, "--out", tmp_path, "--family", "wide_prefill").succeeded()
    # Without a decode there is no planner, and a row without an incumbent has no routed entries.
    planner = ("tilepress_decode_plan", "tilepress_decode_plan_size")
    names = [name for name in OWN if name not in (*planner, *(entry["name"] for entry in ENTRIES[:4]))]
    names = [name for name in names if "routed" not in name]
    assert len(names) == 13
    assert read(tmp_path / "share/tilepress/symbols.txt").splitlines() == [*names, "tilepress_wide_prefill"]
    narrow = ("--table", table, "--symbols", lists, "--out", tmp_path)
    run_cli("verify", *narrow, "--family", "wide_prefill").succeeded()
    run_cli("verify", *narrow).failed(errors.SymbolError.exit_code, "-T tilepress_global_prefill")


# The pregenerated tier


NO_TILELANG: dict[str, str | None] = {"PEGAINFER_GEMMA4_TILELANG_PYTHON": "/nonexistent/python"}


def test_an_emitted_tree_builds_the_same_library_without_tilelang(
    emitted: Path, narrow: Narrow, run_cli: Cli, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(emitted, moved)
    done = run_cli(*BUILD, "--from", moved, "--symbols", narrow.lists, "--out", tmp_path / "out", env=NO_TILELANG)
    done.succeeded()
    assert relocatable(tmp_path / "out") == relocatable(narrow.out)
    assert objects(tmp_path / "out") == objects(narrow.out)


def test_an_emitted_family_builds(narrow: Narrow, run_cli: Cli, tmp_path: Path) -> None:
    """A tree of one family is held against the lists of that family, not of the whole table."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    run_cli("emit", "--arch", "sm_90", "--table", narrow.table, "--family", "sliding_decode", "--out", tree).succeeded()
    run_cli(*BUILD, "--from", tree, "--symbols", narrow.lists, "--out", out, env=NO_TILELANG).succeeded()
    others = re.compile("tilepress_(routed_)?(global_prefill|global_decode|sliding_prefill)")
    assert read(out / "share/tilepress/symbols.txt").splitlines() == [name for name in OWN if not others.match(name)]


def test_an_emitted_tree_holds_no_absolute_path(emitted: Path) -> None:
    ours = [path for path in emitted.rglob("*") if path.is_file() and "vendor" not in path.relative_to(emitted).parts]
    assert len(ours) > 40
    for path in ours:
        text = read(path)
        for place in (str(ROOT), str(emitted.parent), str(Path.home()), sys.prefix, "site-packages", "/tmp/", "/usr/"):
            assert place not in text, f"{place} in {path.name}"


def test_emit_again_is_the_same_tree(emitted: Path, narrow: Narrow, run_cli: Cli, tmp_path: Path) -> None:
    run_cli("emit", "--arch", "sm_90", "--table", narrow.table, "--out", tmp_path / "tree").succeeded()
    assert files(tmp_path / "tree") == files(emitted)


def test_emit_does_not_overwrite_other_files(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = run_cli("emit", "--arch", "sm_90", "--out", tmp_path)
    done.failed(errors.OutputError.exit_code, "thesis.tex", "empty directory")
    assert read(tmp_path / "thesis.tex") == "years of work"


DAMAGED = {
    "no such directory": None,
    "not JSON": "{",
    "a JSON array": "[]",
    "another format": '{"format": 99}',
    "nothing but the format": '{"format": 1}',
}


@pytest.mark.parametrize("case", DAMAGED)
def test_from_a_directory_that_is_no_emitted_tree(case: str, run_cli: Cli, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    text = DAMAGED[case]
    if text is not None:
        tree.mkdir()
        (tree / "tilepress.json").write_text(text)
    run_cli(*BUILD, "--from", tree, "--out", tmp_path / "out").failed(errors.OutputError.exit_code, str(tree))


def damaged(emitted: Path, tree: Path, edit: Any) -> Path:
    shutil.copytree(emitted, tree, ignore=shutil.ignore_patterns("vendor"))
    (tree / "vendor").symlink_to(emitted / "vendor")
    record = json.loads(read(tree / "tilepress.json"))
    edit(record)
    (tree / "tilepress.json").write_text(json.dumps(record))
    return tree


def test_from_a_tree_whose_kernels_are_damaged(emitted: Path, run_cli: Cli, tmp_path: Path) -> None:
    tree = damaged(emitted, tmp_path / "tree", lambda record: record["kernels"]["global_prefill"][0].pop("grid"))
    run_cli(*BUILD, "--from", tree, "--out", tmp_path / "out").failed(errors.OutputError.exit_code, str(tree))


def test_from_a_tree_that_lacks_a_source(emitted: Path, run_cli: Cli, tmp_path: Path) -> None:
    tree = damaged(emitted, tmp_path / "tree", lambda record: None)
    (tree / "generated/global_prefill_g8_folded.cu").unlink()
    (tree / "generated/sliding_decode_g4_split.cu").unlink()
    done = run_cli(*BUILD, "--from", tree, "--out", tmp_path / "out")
    lacking = "lacks generated/global_prefill_g8_folded.cu, generated/sliding_decode_g4_split.cu."
    done.failed(errors.OutputError.exit_code, lacking, "Emit the tree again")


@pytest.mark.parametrize("option", [("--stub",), ("--family", "global_prefill")])
def test_from_takes_the_whole_tree(option: tuple[str, ...], emitted: Path, run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli(*BUILD, "--from", emitted, *option, "--out", tmp_path)
    done.failed(errors.OutputError.exit_code, option[0])


# An unfinished build


def test_a_build_that_is_killed_leaves_nothing_broken(narrow: Narrow, cache: Path, run_cli: Cli, tmp_path: Path) -> None:
    own, out = tmp_path / "cache", tmp_path / "out"
    shutil.copytree(cache / "lowered", own / "lowered")
    run_cli(*STUB, "--out", out).succeeded()
    stub = files(out)
    command = [sys.executable, "-m", "codegen", *BUILD, *map(str, narrow.options), "--out", str(out)]
    variables = environment(own)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=variables, start_new_session=True
    ) as process:
        assert process.stderr
        reached = next((line for line in process.stderr if line.startswith("compile [")), None)
        assert reached, "the build never compiled"
        os.killpg(process.pid, signal.SIGKILL)
    assert files(out) == stub
    run_cli(*BUILD, *narrow.options, "--out", out, env={"TILEPRESS_CACHE": str(own)}).succeeded()
    assert relocatable(out) == relocatable(narrow.out)
    assert objects(out) == objects(narrow.out)


def test_a_failed_build_keeps_the_installed_tree(run_cli: Cli, tmp_path: Path) -> None:
    run_cli(*STUB, "--out", tmp_path / "out").succeeded()
    before = files(tmp_path / "out")
    table = table_with(tmp_path / "families.toml", more=WIDE)
    run_cli(*STUB, "--table", table, "--out", tmp_path / "out").failed(errors.SymbolError.exit_code)
    assert files(tmp_path / "out") == before


def test_one_build_at_a_time_in_one_directory(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / ".build").mkdir()
    with FileLock(tmp_path / ".build" / "lock"):
        done = run_cli(*STUB, "--out", tmp_path)
        done.failed(errors.OutputError.exit_code, "another build is writing", str(tmp_path), "--out DIR")
    run_cli(*STUB, "--out", tmp_path).succeeded()


# Failures: exit code, what is wrong, what to do


def test_the_help_lists_every_exit_code(run_cli: Cli) -> None:
    text = run_cli("--help").succeeded().stdout
    listed = dict(re.findall(r"^ +(\d)  (.+)$", text, re.MULTILINE))
    classes: set[type[errors.TilepressError]] = {errors.TilepressError, *errors.TilepressError.__subclasses__()}
    assert {str(c.exit_code) for c in classes} | {"0", "2"} == listed.keys()
    assert len({c.exit_code for c in classes}) == len(classes) == 8
    for c in classes:
        assert listed[str(c.exit_code)] == c.meaning


@pytest.mark.parametrize("command", ["build", "emit", "verify", "list", "doctor", "docs"])
def test_every_command_has_help(command: str, run_cli: Cli) -> None:
    assert run_cli(command, "--help").succeeded().stdout.startswith(f"Usage: python -m codegen {command}")


def test_a_wrong_command_line_exits_2(run_cli: Cli) -> None:
    assert run_cli("build").code == 2
    assert run_cli("press").code == 2


@pytest.mark.parametrize("command", ["build", "emit"])
def test_an_unknown_arch(command: str, run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli(command, "--arch", "sm_80", "--out", tmp_path / "out")
    done.failed(3, "unknown arch 'sm_80'", "sm_90 (compiled as sm_90a)")
    assert not (tmp_path / "out").exists()


def test_an_unknown_family(run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli(*STUB, "--family", "local_prefill", "--out", tmp_path)
    done.failed(3, "unknown family 'local_prefill'; known: global_decode, global_prefill, sliding_decode, sliding_prefill")


def test_a_bad_table(run_cli: Cli, tmp_path: Path) -> None:
    table = table_with(tmp_path / "rows.toml", (FIRST_GROUPS, "groups = [5]"))
    for command in (("build", "--stub", "--arch", "sm_90", "--out", tmp_path / "out"), ("list",)):
        run_cli(*command, "--table", table).failed(3, "rows.toml: [[family]] 'global_prefill': field 'groups'")


def test_a_table_that_is_absent(run_cli: Cli, tmp_path: Path) -> None:
    run_cli("list", "--table", tmp_path / "absent.toml").failed(3, "absent.toml")


def test_an_nvcc_that_does_not_serve(run_cli: Cli, tmp_path: Path) -> None:
    env = {"CUDACXX": str(tmp_path / "nvcc"), "TILEPRESS_CUDA": "auto"}
    done = run_cli(*BUILD, "--out", tmp_path / "out", env=env)
    done.failed(4, str(tmp_path / "nvcc"), "does not exist", "Point CUDACXX at the nvcc of a CUDA 13 toolkit")


def test_no_nvcc_says_how_to_get_it(run_cli: Cli, tmp_path: Path) -> None:
    if any((Path(folder) / "nvidia/cu13/bin/nvcc").is_file() for folder in sys.path):
        pytest.skip("this Python has the CUDA wheels")
    done = run_cli(*BUILD, "--out", tmp_path / "out", env={"TILEPRESS_CUDA": "pypi"})
    done.failed(4, "no usable CUDA 13 toolkit", "pip install nvidia-cuda-nvcc==")


def test_a_stub_needs_neither_cuda_nor_tilelang(stub_library: Path, run_cli: Cli, tmp_path: Path) -> None:
    env = {"CUDACXX": "/nonexistent/nvcc", "TILEPRESS_CUDA": "auto", **NO_TILELANG}
    run_cli(*STUB, "--out", tmp_path, env=env).succeeded()
    assert relocatable(tmp_path) == relocatable(stub_library)


def test_a_python_without_tilelang(run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli(*BUILD, "--out", tmp_path, env=NO_TILELANG)
    done.failed(5, "PEGAINFER_GEMMA4_TILELANG_PYTHON", "/nonexistent/python")


def test_another_tilelang(run_cli: Cli, tmp_path: Path) -> None:
    table = table_with(tmp_path / "families.toml", ('tilelang = "0.1.15"', 'tilelang = "0.1.14"'))
    done = run_cli(*BUILD, "--table", table, "--out", tmp_path / "out")
    done.failed(5, "TileLang 0.1.15 is installed", "pins 0.1.14", "tilelang==0.1.14")


def test_a_gate_that_fails(run_cli: Cli, tmp_path: Path) -> None:
    table = table_with(tmp_path / "families.toml", ("shared_memory_bytes = 232448", "shared_memory_bytes = 100000"))
    done = run_cli(*BUILD, "--table", table, "--out", tmp_path / "out")
    # 231,424: the folded prefill's 230,400, as its file says, and the 1,024 that the system keeps.
    done.failed(6, *(f"{name}: gate 'shared_memory'" for name in KERNELS if "merge" not in name), "231424", "100000")
    assert "merge" not in done.stderr[done.stderr.index("error: ") :]
    assert files(tmp_path / "out") == {}


def test_a_compile_that_fails(package: Path, run_cli: Cli, tmp_path: Path) -> None:
    edit(package / "csrc/error.cpp", "return code;", "return code")
    done = run_cli(*STUB, "--out", tmp_path / "out", package=package)
    done.failed(7, "error.cpp", "expected", "doctor")
    assert files(tmp_path / "out") == {}


def test_an_output_that_cannot_be_written(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", Path("/dev/null/out")):
        run_cli(*STUB, "--out", out).failed(9, str(out), "not writable", "--out DIR")


def test_a_cache_that_cannot_be_written(run_cli: Cli, tmp_path: Path) -> None:
    """The build goes on without it, or says what is wrong."""
    (tmp_path / "file").write_text("")
    done = run_cli(*STUB, "--out", tmp_path / "out", env={"TILEPRESS_CACHE": str(tmp_path / "file" / "cache")})
    if done.code:
        done.failed(9, "TILEPRESS_CACHE")
        assert "Traceback" not in done.stdout + done.stderr


def test_verify_without_a_build(run_cli: Cli, tmp_path: Path) -> None:
    run_cli("verify", "--out", tmp_path).failed(9, "holds no build", "python -m codegen build")


def test_verify_agrees_and_disagrees(library: Path, run_cli: Cli, tmp_path: Path) -> None:
    assert "50 exported symbols agree" in run_cli("verify", "--out", library).succeeded().stdout
    lists = tmp_path / "symbols"
    shutil.copytree(ROOT / "build_tools/symbols", lists)
    (lists / "objects/error.txt").write_text("T tilepress_last_error\n")
    done = run_cli("verify", "--out", library, "--symbols", lists)
    done.failed(8, "error.txt", "+T _ZN9tilepress4failEiPKcz")


def test_update_writes_what_the_repository_has(library: Path, run_cli: Cli, tmp_path: Path) -> None:
    run_cli("verify", "--update", "--out", library, "--symbols", tmp_path / "new").succeeded()
    committed = ROOT / "build_tools/symbols"
    assert {p.relative_to(tmp_path / "new"): read(p) for p in (tmp_path / "new").rglob("*.txt")} == {
        p.relative_to(committed): read(p) for p in committed.rglob("*.txt")
    }


def test_a_stub_does_not_update_the_lists(stub_library: Path, run_cli: Cli, tmp_path: Path) -> None:
    run_cli("verify", "--update", "--out", stub_library, "--symbols", tmp_path / "new").failed(8, "--stub")
    assert not (tmp_path / "new").exists()


# Output for programs


def test_emit_cargo_prints_only_cargo_lines(run_cli: Cli, tmp_path: Path) -> None:
    lines = run_cli(*STUB, "--out", tmp_path, "--emit", "cargo").succeeded().stdout.splitlines()
    assert all(line.startswith("cargo::") for line in lines)
    assert f"cargo::rustc-link-search=native={tmp_path / 'lib'}" in lines
    assert "cargo::rustc-link-lib=static=tilepress" in lines
    assert f"cargo::rustc-env=TILEPRESS_RUST={tmp_path / 'rust'}" in lines
    assert f"cargo::metadata=include={tmp_path / 'include'}" in lines
    assert f"cargo::rerun-if-changed={ROOT / 'families.toml'}" in lines
    assert not [line for line in lines if "cudart" in line]


def test_emit_cargo_of_a_full_build_links_the_cuda_runtime(library: Path, run_cli: Cli) -> None:
    lines = run_cli(*BUILD, "--out", library, "--emit", "cargo").succeeded().stdout.splitlines()
    assert all(line.startswith("cargo::") for line in lines)
    assert "cargo::rustc-link-lib=dylib=cudart" in lines
    searched = [Path(line.partition("=native=")[2]) for line in lines if "rustc-link-search" in line]
    assert any((folder / "libcudart.so").exists() for folder in searched)


def test_a_build_prints_nothing_on_stdout(run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli(*STUB, "--out", tmp_path).succeeded()
    assert done.stdout == ""
    assert "arch sm_90: kernels are compiled for sm_90a" in done.stderr


def test_list_shows_what_serves_each_model(run_cli: Cli) -> None:
    text = run_cli("list").succeeded().stdout
    rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in text.splitlines() if "gemma4-" in line]
    # The 31B's V is K's projection, the E4B's is not: its pool cannot be folded.
    names = "global_prefill_g8_split, global_prefill_g8_folded, global_decode_partial_g8_split, global_decode_partial_g8_folded"
    for gpus, heads in (("1", "32/4"), ("2", "16/2"), ("4", "8/1")):
        assert ["gemma4-31b", "global", gpus, heads, "8", names] in rows
    assert ["gemma4-e4b", "global", "2", "4/1", "4", "global_prefill_g4_split, global_decode_partial_g4_split"] in rows
    assert ["gemma4-31b", "sliding", "8", "4/2", "2", "sliding_prefill_g2_split, sliding_decode_g2_split"] in rows
    assert not [row for row in rows if "none" in row]
    # GPUs that divide both head counts: of the global layers 1, 2, 1, 2, 3; of the sliding ones 1, 2, 4, 4, 4.
    assert len(rows) == 9 + 15


def test_list_shows_what_serves_no_kernel(run_cli: Cli) -> None:
    text = run_cli("list", "--family", "sliding_decode").succeeded().stdout
    rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in text.splitlines() if "gemma4-" in line]
    assert ["gemma4-31b", "global", "1", "32/4", "8", "none"] in rows
    assert len(rows) == 9 + 15


def test_the_abi_document_is_up_to_date(run_cli: Cli) -> None:
    run_cli("docs", "--check").succeeded()


def test_an_abi_document_that_is_not_up_to_date(package: Path, run_cli: Cli) -> None:
    run_cli("docs", "--check", package=package).failed(9, "abi.md is not up to date", "python -m codegen docs")
    run_cli("docs", package=package).succeeded()
    run_cli("docs", "--check", package=package).succeeded()
    (package / "docs/abi.md").write_text(read(package / "docs/abi.md") + "\n")
    run_cli("docs", "--check", package=package).failed(9, "not up to date")
