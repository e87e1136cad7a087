"""The kernels lowered by TileLang itself: their launch facts against values derived by hand from the kernels' text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from codegen import tilelang_python, tree
from codegen.cache import Store
from codegen.errors import LoweringError
from codegen.lowered import Lowered, Param, Request, TensorMap

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]
REQUEST = Request(
    name="global_prefill_g8_split",
    operation="prefill",
    stage="",
    head_dim=512,
    page_size=64,
    group=8,
    page_format="split",
    target="sm_90a",
    tilelang="0.1.15",
)
# One of every other operation, stage, page format and head_dim, as the session's build lowered it.
OTHERS = {
    "folded prefill": "global_prefill_g4_folded",
    "partial": "global_decode_partial_g8_split",
    "folded partial": "global_decode_partial_g16_folded",
    "sliding decode": "sliding_decode_g2_split",
    "merge": "global_decode_merge",
    "sliding prefill": "sliding_prefill_g4_split",
}
REFUSED = (
    replace(REQUEST, tilelang="0.1.14"),
    replace(REQUEST, operation="encode"),
    replace(REQUEST, operation="decode", stage="combine"),
    replace(REQUEST, page_size=63),
)


@pytest.fixture(scope="module")
def tilelang() -> tilelang_python.TileLang:
    return tilelang_python.find()


def lower_alone(tilelang: tilelang_python.TileLang, hash_seed: str, *requests: Request) -> list[dict[str, object]]:
    """A fresh lowering process's replies."""
    done = subprocess.run(
        [tilelang.python, "-m", "codegen.lowering"],
        input="".join(json.dumps(asdict(request)) + "\n" for request in requests),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def replies(tilelang: tilelang_python.TileLang) -> list[dict[str, object]]:
    """One process asked for the kernel, for what it must refuse, and for the kernel again."""
    return lower_alone(tilelang, "1", REQUEST, *REFUSED, REQUEST)


@pytest.fixture(scope="module")
def kernel(replies: list[dict[str, object]]) -> Lowered:
    return tilelang_python.LOWERED.validate_python(replies[0]["lowered"])


@pytest.fixture(scope="module")
def others(library: Path) -> dict[str, Lowered]:
    record = tree.read(library / ".build" / "tree")
    kernels = {kernel.name: kernel for rows in record.kernels.values() for kernel in rows}
    return {case: kernels[name] for case, name in OTHERS.items()}


def test_a_build_lowers_as_the_process_does(library: Path, kernel: Lowered) -> None:
    found = tree.read(library / ".build" / "tree").kernels["global_prefill"]
    assert [one for one in found if one.name == kernel.name] == [kernel]


def test_launch(kernel: Lowered) -> None:
    # T.Kernel(group, q_tiles, num_kv_heads, threads=3 * 128, cluster_dims=(2, 1, 1)); Q 64 KB, K 64 KB, V two halves of 32 KB,
    # P of two tiles 8 KB each, four floats a row.
    assert kernel.name == "global_prefill_g8_split"
    assert kernel.kernel == "global_prefill_g8_split_kernel"
    assert kernel.grid == ("8", "q_tiles", "num_kv_heads")
    assert kernel.block == (384, 1, 1)
    assert kernel.cluster == (2, 1, 1)
    assert kernel.dynamic_shared_bytes == 214016
    assert kernel.nvcc_flags == ("--use_fast_math",)
    assert kernel.tilelang == "0.1.15"
    assert kernel.symbols == ("num_kv_heads", "pool_tiles", "q_rows", "q_tiles")


# Every tensor and scalar that the kernel's body uses, with its dtype. TileLang orders them; the launch follows.
PARAMS = {
    Param("last_page_len", "pointer", "int32"),
    Param("lse", "pointer", "float32"),
    Param("out", "pointer", "bfloat16"),
    Param("page_ids", "pointer", "int32"),
    Param("page_indptr", "pointer", "int32"),
    Param("pool_desc", "tensor_map", ""),
    Param("q_desc", "tensor_map", ""),
    Param("q_indptr", "pointer", "int32"),
    Param("status", "pointer", "int32"),
    Param("batch", "scalar", "int32"),
    Param("layer_tile", "scalar", "int32"),
    Param("num_kv_heads", "scalar", "int32"),
    Param("num_page_ids", "scalar", "int32"),
    Param("num_pages", "scalar", "int32"),
    Param("page_tiles", "scalar", "int32"),
    Param("pool_tiles", "scalar", "int32"),
    Param("q_rows", "scalar", "int32"),
    Param("q_tiles", "scalar", "int32"),
    Param("resident_clusters", "scalar", "int32"),
    Param("sm_scale", "scalar", "float32"),
    Param("want_lse", "scalar", "int32"),
    Param("want_status", "scalar", "int32"),
}


def test_params(kernel: Lowered) -> None:
    assert len(kernel.params) == len(PARAMS)
    assert set(kernel.params) == PARAMS


def test_params_stand_in_the_order_of_the_cuda_signature(kernel: Lowered) -> None:
    start = kernel.source.index(f"{kernel.kernel}(")
    signature = kernel.source[start : kernel.source.index(")", start)]
    names = [part.split()[-1].lstrip("*") for part in signature.partition("(")[2].split(",")]
    assert names == [param.name for param in kernel.params]


# Row-major bf16: q [q_rows, num_kv_heads * 8, 512], pool [pool_tiles, 64, num_kv_heads, 512]. The map over q takes heads
# outermost; a stride is a row's 512 * 2 = 1,024 bytes, or num_kv_heads * 8 of them, or a tile's num_kv_heads * 64.
MAPS = (
    TensorMap(
        name="q_desc",
        tensor="q",
        dtype="CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
        dims=("512", "q_rows", "(num_kv_heads * 8)"),
        strides=("(static_cast<int64_t>(num_kv_heads) * 8192)", "1024"),
        box=("64", "64", "1"),
        element_strides=("1", "1", "1"),
        interleave="CU_TENSOR_MAP_INTERLEAVE_NONE",
        swizzle="CU_TENSOR_MAP_SWIZZLE_128B",
        l2_promotion="CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
        oob_fill="CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ),
    TensorMap(
        name="pool_desc",
        tensor="pool",
        dtype="CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
        dims=("512", "64", "num_kv_heads", "pool_tiles"),
        strides=(
            "(static_cast<int64_t>(num_kv_heads) * 1024)",
            "1024",
            "(static_cast<int64_t>(num_kv_heads) * 65536)",
        ),
        box=("64", "64", "1", "1"),
        element_strides=("1", "1", "1", "1"),
        interleave="CU_TENSOR_MAP_INTERLEAVE_NONE",
        swizzle="CU_TENSOR_MAP_SWIZZLE_128B",
        l2_promotion="CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
        oob_fill="CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ),
)


@pytest.mark.parametrize("expected", MAPS, ids=lambda tensor_map: tensor_map.tensor)
def test_tensor_maps(expected: TensorMap, kernel: Lowered) -> None:
    assert [tensor_map.tensor for tensor_map in kernel.tensor_maps].count(expected.tensor) == 1
    assert len(kernel.tensor_maps) == 2
    (found,) = (tensor_map for tensor_map in kernel.tensor_maps if tensor_map.tensor == expected.tensor)
    assert found == expected


# Grid, threads and dynamic shared memory of the others.
LAUNCHES = {
    # Q 64 KB; two tiles of 80 KB; four floats a row.
    "folded prefill": (("4", "q_tiles", "num_kv_heads"), 384, (64 + 2 * 80) * 1024 + 4 * 64 * 4),
    # Three tiles of [64, 512], 64 KB each; Q of two items, 8 rows of 1 KB each; two P tiles of [8, 64]; a mask of three
    # words, to 16 bytes; two items handed over, four words each; 512 bytes and 1 KB for the reductions.
    "partial": (("ctas", "1", "1"), 160, 3 * 65536 + 2 * 8192 + 2 * 1024 + 16 + 32 + 1536),
    # Two tiles of [64, 640], 80 KB each; Q of two items, 16 rows each; two P tiles of [16, 64].
    "folded partial": (("ctas", "1", "1"), 160, 2 * 81920 + 2 * 16384 + 2 * 2048 + 16 + 32 + 2560),
    # Three tiles of [64, 256], 32 KB each; Q, 8 rows of 512 bytes: the group of 2 is padded to 8; P of three; four parts to
    # send and six received, of 2 * 64 + 8 floats.
    "sliding decode": (
        ("(std::min(resident_clusters, (max_batch * num_kv_heads)) * 6)", "1", "1"),
        192,
        3 * 32768 + 4096 + 3072 + 10 * 136 * 4 + 1536 + 192,
    ),
    # [8, 128] or [32, 32] fp32 sums; totals and maxima of 32 lanes.
    "merge": (("(group * merge_blocks)", "num_kv_heads", "max_batch"), 256, 1024 * 4 + 2 * 32 * 4),
    # Three tiles of Q and four of keys or values, each [64, 256], 32 KB; 12 words of each of four items,
    # and 8 of a request.
    "sliding prefill": (("sm_count", "1", "1"), 384, (3 + 4) * 32 * 1024 + (4 * 12 + 8) * 4),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches_of_the_others(case: str, others: dict[str, Lowered]) -> None:
    kernel = others[case]
    assert (kernel.name, kernel.kernel) == (OTHERS[case], f"{OTHERS[case]}_kernel")
    assert (kernel.grid, kernel.block[0], kernel.dynamic_shared_bytes) == LAUNCHES[case]
    assert kernel.block[1:] == (1, 1)
    assert kernel.nvcc_flags == ("--use_fast_math",)


# The int32 scalars of each, which a launcher takes from the arguments and the launch values of the same names.
SCALARS = {
    "folded prefill": {param.name for param in PARAMS if (param.kind, param.dtype) == ("scalar", "int32")},
    "partial": {
        "ctas",
        "early",
        "layer_tile",
        "max_batch",
        "max_items",
        "max_slots",
        "num_page_ids",
        "num_pages",
        "page_tiles",
        "pool_tiles",
        "row_offset",
        "want_status",
    },
    "merge": {
        "group",
        "max_batch",
        "max_slots",
        "merge_blocks",
        "num_kv_heads",
        "num_q_heads",
        "q_rows",
        "row_offset",
        "want_lse",
    },
    "sliding decode": {
        "early",
        "layer_tile",
        "max_batch",
        "num_kv_heads",
        "num_page_ids",
        "num_pages",
        "page_tiles",
        "pool_tiles",
        "q_rows",
        "resident_clusters",
        "row_offset",
        "want_lse",
        "want_status",
    },
    "sliding prefill": {
        "batch",
        "has_origin",
        "layer_tile",
        "num_kv_heads",
        "num_page_ids",
        "num_pages",
        "page_tiles",
        "pool_tiles",
        "q_rows",
        "q_tiles",
        "sm_count",
        "want_lse",
        "want_status",
        "window_left",
    },
}
SCALARS["folded partial"] = SCALARS["partial"]
POINTERS = {
    "folded prefill": {param.name for param in PARAMS if param.kind == "pointer"},
    "partial": {"page_ids", "partial_sums", "partial_out", "plan_items", "plan_requests", "status"},
    "merge": {"lse", "out", "partial_sums", "partial_out", "plan_header", "plan_requests"},
    "sliding prefill": {param.name for param in PARAMS if param.kind == "pointer"} | {"kv_origin"},
}
POINTERS["folded partial"] = POINTERS["partial"]
POINTERS["sliding decode"] = {"lse", "out", "page_ids", "plan_header", "plan_requests", "status"}


@pytest.mark.parametrize("case", SCALARS)
def test_params_of_the_others(case: str, others: dict[str, Lowered]) -> None:
    params = others[case].params
    assert {p.name for p in params if (p.kind, p.dtype) == ("scalar", "int32")} == SCALARS[case]
    assert {p.name for p in params if p.kind == "pointer"} == POINTERS[case]
    assert {p.name for p in params if (p.kind, p.dtype) == ("scalar", "float32")} == (
        set() if case == "merge" else {"sm_scale"}
    )


# Of each map over the pool: the columns of a row, a row's bytes, and a tile's of 64 rows. A folded row has 640 columns.
POOLS = {
    "folded prefill": ("640", "1280", "81920"),
    "partial": ("512", "1024", "65536"),
    "folded partial": ("640", "1280", "81920"),
    "sliding decode": ("256", "512", "32768"),
    "sliding prefill": ("256", "512", "32768"),
}
QUERIES = {
    # 64 rows of one head; or one row of all heads of a group, padded to 8.
    "folded prefill": ("64", "64", "1"),
    "partial": ("64", "8", "1"),
    "folded partial": ("64", "16", "1"),
    "sliding decode": ("64", "8", "1"),
    "sliding prefill": ("64", "64", "1"),
}


@pytest.mark.parametrize("case", POOLS)
def test_tensor_maps_of_the_others(case: str, others: dict[str, Lowered]) -> None:
    maps = {tensor_map.tensor: tensor_map for tensor_map in others[case].tensor_maps}
    assert maps.keys() == {"q", "pool"} and len(others[case].tensor_maps) == 2
    width, row, tile = POOLS[case]
    assert maps["pool"].dims == (width, "64", "num_kv_heads", "pool_tiles")
    assert maps["pool"].strides == (
        f"(static_cast<int64_t>(num_kv_heads) * {row})",
        row,
        f"(static_cast<int64_t>(num_kv_heads) * {tile})",
    )
    assert maps["pool"].box == ("64", "64", "1", "1")
    assert maps["q"].box == QUERIES[case]
    assert {m.swizzle for m in maps.values()} == {"CU_TENSOR_MAP_SWIZZLE_128B"}


def test_a_merge_reads_no_tensor_map(others: dict[str, Lowered]) -> None:
    assert others["merge"].tensor_maps == ()


def test_lowering_is_deterministic(replies: list[dict[str, object]], tilelang: tilelang_python.TileLang) -> None:
    """In another process with another hash seed, and again in the same process after refusals."""
    assert lower_alone(tilelang, "20250131", REQUEST) == [replies[0]]
    assert replies[5] == replies[0]


def test_refusals_leave_the_process_alive(replies: list[dict[str, object]]) -> None:
    assert "0.1.15 is installed" in str(replies[1]["error"])
    assert "pins 0.1.14" in str(replies[1]["error"])
    assert "encode" in str(replies[2]["error"])
    assert "decode has no stage 'combine'; known: partial, merge" in str(replies[3]["error"])
    assert len(replies) == 2 + len(REFUSED)


def test_a_kernel_that_tilelang_refuses(replies: list[dict[str, object]]) -> None:
    """No tensor core instruction takes 63 keys."""
    assert str(replies[4]["error"]).startswith("TileLang refused the kernel: ")


def test_what_the_lowering_writes_to_stderr_is_captured(tilelang: tilelang_python.TileLang) -> None:
    """By its descriptor, since TileLang's C++ writes there; nothing of it reaches the caller, and stderr is restored."""
    script = """
import os, sys
from codegen.lowering import _captured_stderr
with _captured_stderr() as log:
    os.write(2, b"from C++\\n")
    print("from Python", file=sys.stderr)
print("after", file=sys.stderr)
print(repr("".join(log)))
try:
    with _captured_stderr() as log:
        os.write(2, b"before the error\\n")
        raise ValueError
except ValueError:
    print(repr("".join(log)))
print("at the end", file=sys.stderr)
"""
    done = subprocess.run(
        [tilelang.python, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout.splitlines() == [repr("from C++\nfrom Python\n"), repr("before the error\n")]
    assert done.stderr.splitlines() == ["after", "at the end"]


def test_lower_all_fills_and_uses_its_store(tilelang: tilelang_python.TileLang, tmp_path: Path, kernel: Lowered) -> None:
    store = Store(tmp_path)
    told: list[str] = []
    assert tilelang_python.lower_all(tilelang, [REQUEST], store, 2, told.append) == [kernel]
    # The second time the process is not needed: a Python that cannot run would do.
    absent = replace(tilelang, python=Path(sys.executable).with_name("absent"))
    assert tilelang_python.lower_all(absent, [REQUEST], store, 2, told.append) == [kernel]
    assert told == [REQUEST.name, REQUEST.name]
    with pytest.raises(LoweringError, match=r"pins 0\.1\.14"):
        tilelang_python.lower_all(tilelang, [replace(REQUEST, tilelang="0.1.14")], store, 2, told.append)
    assert told == [REQUEST.name, REQUEST.name]
