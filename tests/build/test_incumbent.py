"""The incumbent's entries as a consumer meets them: names, parameters, planners, refusals; and its headers, fetched once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from codegen import abi, errors, flashinfer, symbols, table, toolchain
from codegen.cache import default_root

from .commands import INCUMBENT_UNITS, NARROW_KERNELS, Cli, Narrow, incumbent_rows, narrow_lists, narrow_table

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
OK, INVALID, UNSUPPORTED, DEVICE, CUDA, STUB = range(6)

# What consumers declare, parameter by parameter; the library's header is not asked.
DECLARED = {
    "paged_attention": """
int paged_attention_decode_cuda(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems,
    int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices, int32_t *kv_tile_indices,
    int32_t *kv_chunk_size_ptr, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size,
    int32_t batch_size, int64_t stride_page, float sm_scale, void *stream);
int paged_attention_decode_split_kv_cuda(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems,
    int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices, int32_t *kv_tile_indices,
    int32_t *kv_chunk_size_ptr, int32_t *o_indptr, uint8_t *block_valid_mask, void *tmp_v, float *tmp_s, int32_t num_qo_heads,
    int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t batch_size, int32_t padded_batch_size,
    int64_t stride_page, float sm_scale, void *stream);
int paged_kv_append_cuda(void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices,
    int32_t *page_indptr, int32_t *last_page_len_d, void *key, void *value, int32_t num_kv_heads, int32_t head_dim,
    int32_t page_size, int32_t batch_size, int64_t stride_page, void *stream);
int paged_kv_scatter_cuda(void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices,
    int32_t *page_indptr, int32_t *last_page_len_d, void *src_k, void *src_v, int32_t *batch_indices, int32_t *positions,
    int32_t nnz, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int64_t stride_page, int64_t src_stride_n,
    int64_t src_stride_h, void *stream);
int32_t batch_prefill_paged_num_tiles(int32_t seq_len, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim);
int32_t batch_prefill_paged_num_tiles_with_cta_tile_q(int32_t seq_len, int32_t num_qo_heads, int32_t num_kv_heads,
    int32_t head_dim, int32_t cta_tile_q_override);
int32_t batch_prefill_cta_tile_q(int32_t total_seq_len, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim);
int32_t batch_prefill_cta_tile_q_with_override(int32_t total_seq_len, int32_t num_qo_heads, int32_t num_kv_heads,
    int32_t head_dim, int32_t cta_tile_q_override);
int batch_prefill_paged_cuda_with_cta_tile_q(void *q, void *output, void *kv_data, int64_t k_offset_elems,
    int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr,
    int32_t *request_indices, int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr,
    uint32_t *total_num_rows, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len,
    int32_t batch_size, int32_t padded_batch_size, int64_t stride_page, float sm_scale, int32_t cta_tile_q_override,
    void *stream);
int batch_prefill_paged_cuda(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems,
    int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices,
    int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows,
    int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size,
    int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);
int single_prefill_cuda(void *q, void *output, void *k_cache, void *v_cache, int32_t num_qo_heads, int32_t num_kv_heads,
    int32_t head_dim, int32_t seq_len, int32_t kv_len, int32_t max_seq_len, float sm_scale, void *stream);
int single_prefill_cuda_hd256(void *q, void *output, void *k_cache, void *v_cache, int32_t num_qo_heads, int32_t num_kv_heads,
    int32_t seq_len, int32_t kv_len, int32_t max_seq_len, float sm_scale, void *stream);
int paged_attention_decode_cuda_hd256(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems,
    int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices, int32_t *kv_tile_indices,
    int32_t *kv_chunk_size_ptr, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size,
    int32_t batch_size, int64_t stride_page, float sm_scale, void *stream);
int paged_attention_decode_window_cuda_hd256(void *q, void *output, void *kv_data, int64_t k_offset_elems,
    int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices,
    int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim,
    int32_t page_size, int32_t batch_size, int64_t stride_page, float sm_scale, int32_t window_left, void *stream);
int batch_prefill_paged_cuda_hd256(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems,
    int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices,
    int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows,
    int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size,
    int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);
int batch_prefill_paged_window_cuda_hd256(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems,
    int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices,
    int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows,
    int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size,
    int32_t padded_batch_size, int64_t stride_page, float sm_scale, int32_t window_left, void *stream);
""",
    "paged_attention_hd512": """
int paged_attention_decode_split_kv_cuda_hd512(void *q, void *output, void *kv_data, int64_t k_offset_elems,
    int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices,
    int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, int32_t *o_indptr, uint8_t *block_valid_mask, void *tmp_v,
    float *tmp_s, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t batch_size,
    int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);
int single_prefill_cuda_hd512(void *q, void *output, void *k_cache, void *v_cache, int32_t num_qo_heads, int32_t num_kv_heads,
    int32_t seq_len, int32_t kv_len, int32_t max_seq_len, float sm_scale, void *stream);
int batch_prefill_paged_cuda_hd512(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems,
    int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices,
    int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows,
    int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size,
    int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);
""",
}


def declared(text: str) -> dict[str, list[tuple[str, str]]]:
    """The entries of a declaration: type and name of every parameter, by entry."""
    found = {}
    for name, params in re.findall(r"\w+ (\w+)\((.*?)\);", text, re.DOTALL):
        split = [re.fullmatch(r"(.*?[ *])(\w+)", part.strip()) for part in params.split(",")]
        found[name] = [(match[1].strip(), match[2]) for match in split if match]
    return found


ENTRIES = {unit: declared(text) for unit, text in DECLARED.items()}
PARAMS = {name: params for entries in ENTRIES.values() for name, params in entries.items()}
LAUNCHES = [name for name in PARAMS if not name.startswith(("batch_prefill_paged_num", "batch_prefill_cta"))]
ENTRIES_IN_ALL = 19


def valid(entry: str) -> dict[str, object]:
    """Values that every check of the entry accepts: two requests, group 8, the second of three layers in a page."""
    fixed = re.search(r"hd(\d+)$", entry)
    head_dim = int(fixed[1]) if fixed else 128
    page = 64 * 1 * head_dim
    values: dict[str, object] = {name: f"(void *)0x{0x10000 * (place + 1):x}" for place, (_, name) in enumerate(PARAMS[entry])}
    numbers: dict[str, object] = {
        "k_offset_elems": 2 * page,
        "v_offset_elems": 3 * page,
        "num_qo_heads": 8,
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "page_size": 64,
        "batch_size": 2,
        "padded_batch_size": 6,
        "seq_len": 20,
        "total_seq_len": 20,
        "kv_len": 40,
        "max_seq_len": 128,
        "nnz": 3,
        "stride_page": 6 * page,
        "src_stride_n": head_dim,
        "src_stride_h": head_dim,
        "sm_scale": "1.0f",
        "window_left": 511,
        "cta_tile_q_override": 0,
        "stream": "(void *)0",
    }
    return values | {name: value for name, value in numbers.items() if name in values}


def call(entry: str, **changes: object) -> str:
    """The entry's call in C."""
    values = valid(entry) | changes
    assert values.keys() == {name for _, name in PARAMS[entry]}
    return f"{entry}({', '.join(str(values[name]) for _, name in PARAMS[entry])})"


# A device of compute capability 9.0 with that much shared memory a block; launches are noted instead of made. The rest of the
# runtime is libcudart's. 75 and 76 ask for the capability, 81 for the shared memory of an SM, 97 for that of a block.
FAKE_DEVICE = """
struct dim3 { unsigned x, y, z; };
static char noted[256];
int cudaGetDevice(int *device) { return *device = 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 81 ? BLOCK + 1024 : attribute == 97 ? BLOCK : 132;
  return 0;
}
int cudaFuncSetAttribute(const void *function, int attribute, int value) {
  (void)function, (void)attribute;
  return value > BLOCK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t bytes,
                                                           unsigned flags) {
  (void)function, (void)threads, (void)bytes, (void)flags;
  *blocks = 1;
  return 0;
}
int cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t bytes, void *stream) {
  (void)function, (void)arguments, (void)stream;
  size_t used = strlen(noted);
  snprintf(noted + used, sizeof noted - used, "%ux%ux%u/%u ", grid.x, grid.y, grid.z, block.x * block.y * block.z);
  return bytes > BLOCK;
}
"""
SM_90 = 232448


def program(
    folder: Path, prefix: Path, calls: list[str], include_header: bool = False, block_bytes: int = 0
) -> list[tuple[int, str]]:
    """Links a C program that declares every entry itself; what each call returned, and the message it left if not 0.

    block_bytes: of the fake device's shared memory; with it, the launches (grid/threads) stand for the message of a 0.
    """
    lines = "\n".join(f"  show({one});" for one in calls)
    header = "#include <tilepress.h>" if include_header else "extern const char *tilepress_last_error(void);"
    fake = f"enum {{ BLOCK = {block_bytes} }};\n{FAKE_DEVICE}" if block_bytes else 'static char noted[] = "";\n'
    (folder / "main.c").write_text(
        "#include <stdint.h>\n#include <stdio.h>\n#include <string.h>\n"
        f"{header}\n{''.join(DECLARED.values())}\n{fake}"
        "static void show(int code) {\n"
        '  printf("%d\\t%s\\n", code, code ? tilepress_last_error() : noted);\n  noted[0] = 0;\n}\n'
        f"int main(void) {{\n{lines}\n  return 0;\n}}\n",
        encoding="utf-8",
    )
    cxx = toolchain.find_cxx().path
    run(cxx, "-x", "c", *STRICT, f"-I{prefix / 'include'}", "-c", folder / "main.c", "-o", folder / "main.o")
    stub = json.loads((prefix / "share/tilepress/manifest.json").read_text())["tier"] == "stub"
    lib = toolchain.find_cuda(default_root()).lib
    runtime = [] if stub else [f"-L{lib}", f"-Wl,-rpath,{lib}", "-lcudart"]
    run(cxx, folder / "main.o", prefix / "lib/libtilepress.a", *runtime, "-o", folder / "main")
    output = run(folder / "main", env={"CUDA_VISIBLE_DEVICES": ""})
    rows = [line.split("\t", 1) for line in output.splitlines()]
    assert len(rows) == len(calls)
    return [(int(code), message) for code, message in rows]


def run(*command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """The command's stdout. A failure shows its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env={**os.environ, **(env or {})}, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_hand_written_declarations_are_whole() -> None:
    assert len(PARAMS) == ENTRIES_IN_ALL
    assert {name: len(params) for name, params in PARAMS.items()} == {
        entry.name: len(entry.params) for entry in abi.incumbent(table.load(ROOT / "families.toml"))
    }


@pytest.mark.parametrize("unit", list(ENTRIES))
def test_a_unit_exports_its_entries_and_nothing_else(library: Path, unit: str) -> None:
    found = symbols.exported(library / f".build/cmake/{unit}.o")
    assert found == tuple(sorted(f"T {name}" for name in ENTRIES[unit]))


def test_no_path_of_the_headers_is_in_the_archive(library: Path, cache: Path) -> None:
    data = (library / "lib/libtilepress.a").read_bytes()
    assert str(cache).encode() not in data
    assert b".cuh" not in data


@pytest.mark.parametrize("prefix", ["library", "stub_library"])
def test_the_archive_exports_every_entry(prefix: str, request: pytest.FixtureRequest) -> None:
    found = symbols.exported(request.getfixturevalue(prefix) / "lib/libtilepress.a")
    assert {line for line in found if "T tilepress_" not in line} == {f"T {name}" for name in PARAMS}


def test_the_header_declares_what_consumers_declare(library: Path, tmp_path: Path) -> None:
    """A declaration of another type would not compile beside the header's."""
    program(tmp_path, library, [call(name) for name in PARAMS], include_header=True)


# Counted by hand: group 8 packs 100 rows into 800, in tiles of 32 at head_dim 512 that is 25.
PLANNED = {
    "batch_prefill_paged_num_tiles(100, 32, 4, 512)": 25,
    "batch_prefill_paged_num_tiles(4, 32, 4, 512)": 2,  # 32 packed rows: tiles of 16
    "batch_prefill_paged_num_tiles(5, 32, 4, 512)": 2,  # 40 packed rows: tiles of 32
    "batch_prefill_paged_num_tiles(100, 16, 8, 256)": 4,  # 200 packed rows: tiles of 64
    "batch_prefill_paged_num_tiles(8, 16, 8, 256)": 1,  # 16 packed rows: tiles of 16
    "batch_prefill_paged_num_tiles(100, 32, 8, 128)": 4,  # 400 packed rows: tiles of 128
    "batch_prefill_paged_num_tiles(0, 32, 8, 128)": 0,
    "batch_prefill_paged_num_tiles_with_cta_tile_q(100, 32, 4, 512, 0)": 25,
    "batch_prefill_paged_num_tiles_with_cta_tile_q(100, 32, 4, 512, 16)": 50,
    "batch_prefill_paged_num_tiles_with_cta_tile_q(100, 16, 8, 256, 16)": 13,
    "batch_prefill_cta_tile_q(1, 8, 1, 512)": 16,
    "batch_prefill_cta_tile_q(4, 8, 1, 512)": 16,
    "batch_prefill_cta_tile_q(5, 8, 1, 512)": 32,
    "batch_prefill_cta_tile_q(4096, 16, 8, 256)": 64,
    "batch_prefill_cta_tile_q(16, 1, 1, 64)": 16,
    "batch_prefill_cta_tile_q(64, 1, 1, 64)": 64,
    "batch_prefill_cta_tile_q(65, 1, 1, 64)": 128,
    "batch_prefill_cta_tile_q_with_override(100, 32, 8, 128, 64)": 64,
    "batch_prefill_cta_tile_q_with_override(100, 32, 8, 128, 0)": 128,
    # Refused.
    "batch_prefill_paged_num_tiles(-1, 32, 4, 512)": -1,
    "batch_prefill_paged_num_tiles(100, 32, 0, 512)": -1,
    "batch_prefill_paged_num_tiles(100, 30, 4, 512)": -1,
    "batch_prefill_paged_num_tiles(100, 32, 4, 96)": -1,
    "batch_prefill_paged_num_tiles(2147483647, 32, 4, 512)": -1,
    "batch_prefill_paged_num_tiles_with_cta_tile_q(100, 32, 4, 512, 64)": -1,
    "batch_prefill_cta_tile_q(-1, 8, 1, 512)": -1,
    "batch_prefill_cta_tile_q_with_override(100, 16, 8, 256, 128)": -1,
    "batch_prefill_cta_tile_q_with_override(100, 16, 8, 256, -16)": -1,
}


@pytest.mark.parametrize("prefix", ["library", "stub_library"])
def test_the_planners_count(prefix: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found = program(tmp_path, request.getfixturevalue(prefix), list(PLANNED))
    assert dict(zip(PLANNED, (code for code, _ in found), strict=True)) == PLANNED
    assert all(message for code, message in found if code == -1)


def test_the_resolver_agrees_with_flashinfers(library: Path, tmp_path: Path) -> None:
    """FA2DetermineCtaTileQ itself, with a CUDA runtime that says the device is of compute capability 9.0."""
    grid = [(rows, dim) for dim in (64, 128, 256, 512) for rows in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 4096)]
    calls = "".join(f'  printf("%u\\n", flashinfer::FA2DetermineCtaTileQ({rows}, {dim}));\n' for rows, dim in grid)
    (tmp_path / "theirs.cu").write_text(
        f"#include <flashinfer/utils.cuh>\n#include <cstdio>\nint main() {{\n{calls}  return 0;\n}}\n", encoding="utf-8"
    )
    # A unit of its own: the toolkit's headers define these two. 75 asks for the major number.
    (tmp_path / "device.cpp").write_text(
        'extern "C" int cudaGetDevice(int *device) { return *device = 0; }\n'
        'extern "C" int cudaDeviceGetAttribute(int *value, int attribute, int) {\n'
        "  *value = attribute == 75 ? 9 : 0;\n  return 0;\n}\n",
        encoding="utf-8",
    )
    record = json.loads((library / ".build/tree/tilepress.json").read_text())
    includes = [f"-I{path}" for path in record["incumbent_includes"]]
    cuda = toolchain.find_cuda(default_root())
    options = ("-std=c++20", "-arch=sm_90a", *includes, f"-L{cuda.lib}", f"-Xlinker=-rpath={cuda.lib}", "-cudart=shared")
    run(
        cuda.nvcc,
        "-ccbin",
        toolchain.find_cxx().path,
        *options,
        tmp_path / "theirs.cu",
        tmp_path / "device.cpp",
        "-o",
        tmp_path / "theirs",
    )
    theirs = [int(line) for line in run(tmp_path / "theirs").split()]
    ours = program(tmp_path, library, [f"batch_prefill_cta_tile_q({rows}, 1, 1, {dim})" for rows, dim in grid])
    assert [code for code, _ in ours] == theirs


@pytest.mark.parametrize(("prefix", "code"), [("library", CUDA), ("stub_library", STUB)])
def test_a_valid_call_gets_past_the_checks(prefix: str, code: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The library asks for the device, which a host without a GPU lacks; a stub says that it is one."""
    found = program(tmp_path, request.getfixturevalue(prefix), [call(name) for name in LAUNCHES])
    assert [one for one, _ in found] == [code] * len(LAUNCHES)
    if code == STUB:
        assert all(message.startswith(f"{name}: ") for name, (_, message) in zip(LAUNCHES, found, strict=True))


DECODE, SPLIT, WINDOW = (
    "paged_attention_decode_cuda",
    "paged_attention_decode_split_kv_cuda_hd512",
    "batch_prefill_paged_window_cuda_hd256",
)
PREFILL, SINGLE, APPEND = "batch_prefill_paged_cuda_with_cta_tile_q", "single_prefill_cuda_hd512", "paged_kv_append_cuda"
SCATTER = "paged_kv_scatter_cuda"
EMPTY = [
    (DECODE, {"batch_size": 0}),
    (SPLIT, {"padded_batch_size": 0}),
    (PREFILL, {"seq_len": 0}),
    (PREFILL, {"padded_batch_size": 0}),
    (SINGLE, {"seq_len": 0}),
    (APPEND, {"batch_size": 0}),
    (SCATTER, {"nnz": 0}),
]
REFUSED: list[tuple[str, dict[str, object], int, str]] = [
    (DECODE, {"head_dim": 96}, UNSUPPORTED, "head_dim is 96; compiled for 64, 128, 256"),
    (DECODE, {"head_dim": 512}, UNSUPPORTED, "head_dim is 512; compiled for 64, 128, 256"),
    ("paged_attention_decode_cuda_hd256", {"head_dim": 128}, UNSUPPORTED, "head_dim is 128; compiled for 256"),
    (SPLIT, {"head_dim": 256}, UNSUPPORTED, "head_dim is 256; compiled for 512"),
    (DECODE, {"num_qo_heads": 16}, UNSUPPORTED, "the group, is 16; FlashInfer's decode has 1, 2, 3, 4, 8"),
    (SPLIT, {"num_qo_heads": 16}, UNSUPPORTED, "the group, is 16"),
    (DECODE, {"num_kv_heads": 0}, INVALID, "num_kv_heads is 0"),
    (DECODE, {"num_qo_heads": 7, "num_kv_heads": 2}, INVALID, "num_qo_heads is 7; it must be a multiple of 2"),
    (DECODE, {"page_size": 0}, INVALID, "page_size is 0"),
    (DECODE, {"batch_size": -1}, INVALID, "batch_size is -1"),
    (DECODE, {"stride_page": 64}, INVALID, "stride_page is 64"),
    (DECODE, {"stride_page": 1 << 32}, INVALID, "stride_page is 4294967296"),
    (DECODE, {"k_offset_elems": -8}, INVALID, "k_offset_elems is -8"),
    (DECODE, {"v_offset_elems": 4}, INVALID, "v_offset_elems is 4; it must be a multiple of 8"),
    (DECODE, {"sm_scale": "0.0f"}, INVALID, "sm_scale is 0"),
    (DECODE, {"q": "(void *)0x10008"}, INVALID, "q is not aligned to 16 bytes"),
    (SPLIT, {"padded_batch_size": -1}, INVALID, "padded_batch_size is -1"),
    (WINDOW, {"window_left": -2}, INVALID, "window_left is -2"),
    (PREFILL, {"seq_len": -1}, INVALID, "seq_len is -1"),
    (PREFILL, {"cta_tile_q_override": 32}, UNSUPPORTED, "cta_tile_q_override is 32, which has no instance at head_dim 128"),
    (SINGLE, {"kv_len": 19}, INVALID, "seq_len is 20; it must be 0 to 19"),
    (SINGLE, {"kv_len": 129}, INVALID, "kv_len is 129; it must be 0 to 128"),
    (APPEND, {"num_kv_heads": 65}, INVALID, "num_kv_heads is 65; it must be 1 to 64"),
    (SCATTER, {"nnz": -1}, INVALID, "nnz is -1"),
    (SCATTER, {"src_stride_h": 12}, INVALID, "src_stride_h is 12; it must be a multiple of 8"),
]
OPTIONAL = {"stream", "block_valid_mask", "total_num_rows"}


@pytest.mark.parametrize("prefix", ["library", "stub_library"])
def test_refusals_name_the_argument(prefix: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    nulls: list[tuple[str, dict[str, object], int, str]] = [
        (entry, {name: 0}, INVALID, f"{name} is null")
        for entry in LAUNCHES
        for ctype, name in PARAMS[entry]
        if ctype.endswith("*") and name not in OPTIONAL
    ]
    cases = REFUSED + nulls
    found = program(tmp_path, request.getfixturevalue(prefix), [call(entry, **changes) for entry, changes, _, _ in cases])
    for (entry, changes, code, part), (returned, message) in zip(cases, found, strict=True):
        assert returned == code, (entry, changes, message)
        assert message.startswith(f"{entry}: "), (entry, changes, message)
        assert part in message, (entry, changes, message)


@pytest.mark.parametrize("prefix", ["library", "stub_library"])
def test_nothing_to_do_is_done(prefix: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    calls = [call(entry, **changes) for entry, changes in EMPTY]
    assert program(tmp_path, request.getfixturevalue(prefix), calls) == [(OK, "")] * len(calls)


# Launched, but for the device: the grid and the threads of each kernel, counted by hand for two requests, 20 rows, group 8.
LAUNCHED: list[tuple[str, dict[str, object], str]] = [
    ("paged_attention_decode_cuda", {}, "2x1x1/128"),
    ("paged_attention_decode_cuda", {"num_qo_heads": 1}, "2x1x1/128"),
    ("paged_attention_decode_cuda_hd256", {}, "2x1x1/256"),
    ("paged_attention_decode_window_cuda_hd256", {}, "2x1x1/256"),
    ("batch_prefill_paged_cuda", {}, "6x1x1/128"),
    ("batch_prefill_paged_cuda_hd256", {}, "6x1x1/128"),
    ("batch_prefill_paged_window_cuda_hd256", {}, "6x1x1/128"),
    ("batch_prefill_paged_cuda_hd512", {}, "6x1x1/128"),
    ("batch_prefill_paged_cuda_hd512", {"seq_len": 1}, "6x1x1/128"),
    ("single_prefill_cuda", {}, "2x1x1/128"),  # 160 packed rows in tiles of 128
    ("single_prefill_cuda_hd256", {}, "3x1x1/128"),  # of 64
    ("single_prefill_cuda_hd512", {}, "5x1x1/128"),  # of 32
    ("single_prefill_cuda_hd512", {"seq_len": 1}, "1x1x1/128"),
    ("paged_kv_append_cuda", {}, "2x1x1/16"),
    ("paged_kv_scatter_cuda", {}, "132x1x1/16"),
]
TILES = {64: (16, 64, 128), 128: (16, 64, 128), 256: (16, 64)}


def test_every_launch_chooses_the_compiled_instance(library: Path, tmp_path: Path) -> None:
    """FlashInfer chooses by the device's shared memory; one choice is compiled, and on sm_90 it must be that."""
    prefill = [
        call(PREFILL, cta_tile_q_override=tile, head_dim=dim, stride_page=6 * 64 * dim)
        for dim, tiles in TILES.items()
        for tile in tiles
    ]
    single = [call("single_prefill_cuda", head_dim=dim, seq_len=rows) for dim in TILES for rows in (1, 5, 20)]
    cases = [call(entry, **changes) for entry, changes, _ in LAUNCHED]
    found = program(tmp_path, library, [*cases, *prefill, *single], block_bytes=SM_90)
    assert [code for code, _ in found] == [OK] * len(found), found
    assert [noted.strip() for _, noted in found[: len(cases)]] == [noted for _, _, noted in LAUNCHED]
    assert {noted for _, noted in found[len(cases) : len(cases) + len(prefill)]} == {"6x1x1/128 "}


@pytest.mark.parametrize(("entry", "first"), [(SPLIT, "6x1x1/256"), ("paged_attention_decode_split_kv_cuda", "6x1x1/128")])
def test_a_split_decode_merges_its_partials(library: Path, tmp_path: Path, entry: str, first: str) -> None:
    ((code, noted),) = program(tmp_path, library, [call(entry)], block_bytes=SM_90)
    assert code == OK
    assert noted.split()[0] == first
    assert len(noted.split()) == 2


def test_what_flashinfer_throws_is_returned(library: Path, tmp_path: Path) -> None:
    """A device with too little shared memory: an exception inside, a code and a message outside."""
    (found,) = program(tmp_path, library, [call("batch_prefill_paged_cuda_hd512")], block_bytes=60000)
    assert found[0] == UNSUPPORTED
    assert found[1].startswith("batch_prefill_paged_cuda_hd512: FlashInfer refuses: ")


# Building with less, from elsewhere, and again


@pytest.fixture
def no_network() -> dict[str, str]:
    """An environment in which pip finds nothing."""
    return {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", flashinfer.WHEEL_VARIABLE: ""}


def test_without_the_incumbent_nothing_is_fetched(
    run_cli: Cli, narrow: Narrow, no_network: dict[str, str], tmp_path: Path
) -> None:
    """The narrow table, which lacks the incumbent, and here has it again: what is left out is as if it were not there."""
    chosen = narrow_table(tmp_path / "families.toml", more=incumbent_rows())
    lists = narrow_lists(tmp_path / "symbols", *NARROW_KERNELS, *INCUMBENT_UNITS)
    out = tmp_path / "out"
    options = ("--table", chosen, "--symbols", lists, "--out", out)
    # A wheel that is not there would be an error where the headers were wanted.
    env = no_network | {flashinfer.WHEEL_VARIABLE: str(tmp_path / "nowhere.whl")}
    run_cli("build", "--arch", "sm_90", *options, "--without", "incumbent", env=env).succeeded()
    for name in ("include/tilepress.h", "lib/libtilepress.a", "share/tilepress/symbols.txt"):
        assert (out / name).read_bytes() == (narrow.out / name).read_bytes()
    assert not {name for name in PARAMS if name in (out / "include/tilepress.h").read_text()}
    assert not list((out / ".build/tree/generated").glob("paged*"))
    assert json.loads((out / "share/tilepress/manifest.json").read_text())["incumbent"] == {}
    run_cli("verify", *options, "--without", "incumbent").succeeded()
    run_cli("verify", *options).failed(errors.SymbolError.exit_code, "-T paged_kv_append_cuda")
    wanted = run_cli("build", "--arch", "sm_90", *options, env=env)
    wanted.failed(errors.ToolchainError.exit_code, "nowhere.whl", "--without incumbent")


def test_an_unknown_part_is_refused(run_cli: Cli) -> None:
    done = run_cli("build", "--arch", "sm_90", "--without", "attention")
    assert done.code == 2
    assert "'incumbent'" in done.stderr


def test_an_emitted_tree_holds_the_headers(run_cli: Cli, library: Path, no_network: dict[str, str], tmp_path: Path) -> None:
    """They are in the cache since `library` was built."""
    assert library.is_dir()
    tree = tmp_path / "tree"
    run_cli("emit", "--arch", "sm_90", "--family", "sliding_decode", "--out", tree, env=no_network).succeeded()
    assert (tree / "vendor/flashinfer/include/flashinfer/page.cuh").is_file()
    assert (tree / "vendor/flashinfer/licenses/LICENSE").is_file()
    record = json.loads((tree / "tilepress.json").read_text())
    assert record["incumbent_includes"] == ["vendor/flashinfer/include", "vendor/flashinfer/libcudacxx/include"]
    assert "${CMAKE_CURRENT_LIST_DIR}/vendor/flashinfer/include" in (tree / "units.cmake").read_text()
    build = ("build", "--arch", "sm_90", "--from", tree, "--out", tmp_path / "out")
    run_cli(*build, "--without", "incumbent").failed(errors.OutputError.exit_code, "--without")
    shutil.rmtree(tree / "vendor/flashinfer/libcudacxx")
    run_cli(*build).failed(errors.OutputError.exit_code, "lacks vendor/flashinfer/libcudacxx/include")


LAUNCH_BODY = re.compile(r"^struct SinglePrefill \{.*?^\};\n", re.DOTALL | re.MULTILINE)


def test_a_launch_body_in_a_header_of_its_own(run_cli: Cli, package: Path, library: Path, tmp_path: Path) -> None:
    """Both units are compiled again, elsewhere, and are the same objects; all else comes from the session's cache."""
    launch, header = package / "codegen/templates/paged_launch.cuh.j2", package / "csrc/single_prefill.cuh"
    text = launch.read_text(encoding="utf-8")
    (body,) = LAUNCH_BODY.findall(text)
    moved = re.sub(r"^\{%-.*?%\}\n", "", body, flags=re.MULTILINE)  # whether a stub has what follows
    assert "{{" not in moved
    header.write_text(moved, encoding="utf-8")
    launch.write_text(text.replace(body, '#include "single_prefill.cuh"\n'), encoding="utf-8")
    out = tmp_path / "out"
    run_cli("build", "--arch", "sm_90", "--out", out, package=package).succeeded()
    assert "struct SinglePrefill" not in (out / ".build/tree/generated/paged_launch.cuh").read_text()
    exports = len((package / "build_tools/symbols/archive.txt").read_text().splitlines())
    assert f"{exports} exported symbols agree" in run_cli("verify", "--out", out, package=package).succeeded().stdout
    for unit in INCUMBENT_UNITS:
        assert (out / f".build/cmake/{unit}.o").read_bytes() == (library / f".build/cmake/{unit}.o").read_bytes()
