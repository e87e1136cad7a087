"""The prefill lowered by TileLang itself: its launch facts against values derived by hand from the kernel's text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from codegen import tilelang_python
from codegen.cache import Store
from codegen.errors import LoweringError
from codegen.lowered import Lowered, Param, Request, TensorMap

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]
REQUEST = Request(
    name="global_prefill_g8_split",
    operation="prefill",
    head_dim=512,
    page_size=64,
    group=8,
    page_format="split",
    target="sm_90a",
    tilelang="0.1.15",
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
    return lower_alone(
        tilelang,
        "1",
        REQUEST,
        replace(REQUEST, tilelang="0.1.14"),
        replace(REQUEST, operation="decode"),
        replace(REQUEST, page_size=63),
        REQUEST,
    )


@pytest.fixture(scope="module")
def kernel(replies: list[dict[str, object]]) -> Lowered:
    return tilelang_python.LOWERED.validate_python(replies[0]["lowered"])


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


def test_lowering_is_deterministic(replies: list[dict[str, object]], tilelang: tilelang_python.TileLang) -> None:
    """In another process with another hash seed, and again in the same process after refusals."""
    assert lower_alone(tilelang, "20250131", REQUEST) == [replies[0]]
    assert replies[4] == replies[0]


def test_refusals_leave_the_process_alive(replies: list[dict[str, object]]) -> None:
    assert "0.1.15 is installed" in str(replies[1]["error"])
    assert "pins 0.1.14" in str(replies[1]["error"])
    assert "decode" in str(replies[2]["error"])
    assert len(replies) == 5


def test_a_kernel_that_tilelang_refuses(replies: list[dict[str, object]]) -> None:
    """No tensor core instruction takes 63 keys."""
    assert str(replies[3]["error"]).startswith("TileLang refused the kernel: ")


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
