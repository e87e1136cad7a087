"""Lowering without TileLang: flags, versions, launch expressions and codes over small fakes, and the worker's protocol."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codegen import lowering, tilelang_python
from codegen.errors import LoweringError
from codegen.lowered import Request
from codegen.lowering import c_expression, check_version, nvcc_flags
from codegen.tilelang_python import LOWERED, TileLang, Worker

from .samples import ROOT, lowered

REQUEST = Request("sample", "prefill", "", 512, 64, 8, "split", "sm_90a", "0.0.0")


# nvcc flags


@pytest.mark.parametrize(
    ("pass_configs", "flags"),
    [
        ({}, ()),
        ({"tl.enable_fast_math": True}, ("--use_fast_math",)),
        ({"tl.enable_fast_math": False}, ()),
        ({"tl.ptxas_register_usage_level": 10}, ("--ptxas-options=--register-usage-level=10",)),
        ({"tl.device_compile_flags": "-DA=1 '-DB=x y'"}, ("-DA=1", "-DB=x y")),
        ({"tl.device_compile_flags": ["-DA=1", "-O2 -G"]}, ("-DA=1", "-O2", "-G")),
        ({"tl.disable_warp_specialized": True, "tl.disable_thread_storage_sync": True}, ()),
        (
            {"tl.ptxas_register_usage_level": 5, "tl.enable_fast_math": True},
            ("--use_fast_math", "--ptxas-options=--register-usage-level=5"),
        ),
    ],
)
def test_nvcc_flags(pass_configs: dict[str, Any], flags: tuple[str, ...]) -> None:
    assert nvcc_flags(pass_configs) == flags


def test_an_unclassified_pass_config_is_refused() -> None:
    with pytest.raises(LoweringError) as caught:
        nvcc_flags({"tl.enable_fast_math": True, "tl.enable_faster_math": True})
    for part in ("'tl.enable_faster_math' is not classified", "known: tl.enable_fast_math, ", "codegen/lowering.py"):
        assert part in str(caught.value)


# Versions


def test_the_pinned_version_passes() -> None:
    check_version("0.1.15", "0.1.15")


@pytest.mark.parametrize("found", ["0.1.14", "0.1.16", "0.1.15+cu128", "0.1.15.post1", "0.1"])
def test_another_version_is_refused_with_both_named(found: str) -> None:
    with pytest.raises(LoweringError) as caught:
        check_version(found, "0.1.15")
    for part in (f"TileLang {found} is installed", "pins 0.1.15", "tilelang==0.1.15", "PEGAINFER_GEMMA4_TILELANG_PYTHON"):
        assert part in str(caught.value)


# Launch expressions, over nodes that have TIR's class names and fields


@dataclass
class IntImm:
    value: int


@dataclass
class FloatImm:
    value: float


@dataclass
class Var:
    name: str


@dataclass
class Cast:
    dtype: str
    value: Any


@dataclass
class Binary:
    a: Any
    b: Any


class Add(Binary):
    pass


class Sub(Binary):
    pass


class Mul(Binary):
    pass


class Min(Binary):
    pass


class Max(Binary):
    pass


class FloorDiv(Binary):
    pass


class FloorMod(Binary):
    pass


N, M = Var("n"), Var("m")


@pytest.mark.parametrize(
    ("expression", "c", "named"),
    [
        (7, "7", set()),
        (IntImm(-3), "-3", set()),
        (N, "n", {"n"}),
        (Add(N, IntImm(1)), "(n + 1)", {"n"}),
        # Parenthesised, so that a product of sums is one.
        (Mul(Add(N, IntImm(1)), Sub(M, IntImm(2))), "((n + 1) * (m - 2))", {"n", "m"}),
        (Sub(N, Sub(M, IntImm(1))), "(n - (m - 1))", {"n", "m"}),
        (Mul(Cast("int64", N), IntImm(8192)), "(static_cast<int64_t>(n) * 8192)", {"n"}),
        (Cast("int32", Add(N, M)), "static_cast<int32_t>((n + m))", {"n", "m"}),
        (Min(N, Max(M, IntImm(4))), "std::min(n, std::max(m, 4))", {"n", "m"}),
    ],
)
def test_c_expressions(expression: Any, c: str, named: set[str]) -> None:
    symbols: set[str] = set()
    assert c_expression(expression, symbols) == c
    assert symbols == named
    assert c_expression(expression) == c


@pytest.mark.parametrize(
    "expression", [FloorDiv(N, IntImm(64)), FloorMod(N, IntImm(64)), FloatImm(1.0), Cast("float32", N), "n"]
)
def test_an_unknown_expression_is_refused(expression: Any) -> None:
    with pytest.raises(LoweringError, match=f"holds a {type(expression).__name__}"):
        c_expression(Add(N, expression))


# Tensor maps and parameters: what no table knows stops the build


def tensor_map_args(**changes: Any) -> list[Any]:
    """Arguments of a rank-2 map over bf16 [n, 64], by name."""
    args = {
        "descriptor": Var("x_desc"),
        "dtype": IntImm(9),
        "rank": IntImm(2),
        "tensor": Var("x"),
        "dims": [IntImm(64), N],
        "strides": [IntImm(2), IntImm(128)],
        "box": [IntImm(64), IntImm(8)],
        "element_strides": [IntImm(1), IntImm(1)],
        "interleave": IntImm(0),
        "swizzle": IntImm(3),
        "promotion": IntImm(2),
        "fill": IntImm(0),
    } | changes
    return [item for value in args.values() for item in (value if isinstance(value, list) else [value])]


def test_a_tensor_map() -> None:
    found = lowering._tensor_map("k", tensor_map_args())
    assert (found.name, found.tensor, found.rank) == ("x_desc", "x", 2)
    assert found.dtype == "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"
    assert (found.dims, found.strides) == (("64", "n"), ("128",))
    assert (found.box, found.element_strides) == (("64", "8"), ("1", "1"))
    assert (found.interleave, found.swizzle) == ("CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_128B")
    assert found.l2_promotion == "CU_TENSOR_MAP_L2_PROMOTION_L2_128B"
    assert found.oob_fill == "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"


# The numbers of cuda.h's enumerations, by hand.
CODES = {
    "dtype": {0: "UINT8", 3: "INT32", 6: "FLOAT16", 7: "FLOAT32", 9: "BFLOAT16"},
    "interleave": {0: "NONE"},
    "swizzle": {0: "NONE", 1: "32B", 2: "64B", 3: "128B"},
    "promotion": {0: "NONE", 1: "L2_64B", 2: "L2_128B", 3: "L2_256B"},
    "fill": {0: "NONE"},
}
TABLES = {
    "dtype": ("CU_TENSOR_MAP_DATA_TYPE_", {code: name for code, (name, _) in lowering.MAP_DTYPES.items()}),
    "interleave": ("CU_TENSOR_MAP_INTERLEAVE_", dict(lowering.INTERLEAVES)),
    "swizzle": ("CU_TENSOR_MAP_SWIZZLE_", dict(lowering.SWIZZLES)),
    "promotion": ("CU_TENSOR_MAP_L2_PROMOTION_", dict(lowering.L2_PROMOTIONS)),
    "fill": ("CU_TENSOR_MAP_FLOAT_OOB_FILL_", dict(lowering.OOB_FILLS)),
}


@pytest.mark.parametrize("kind", CODES)
def test_codes_are_cudas(kind: str) -> None:
    prefix, table = TABLES[kind]
    assert table == {code: prefix + name for code, name in CODES[kind].items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": IntImm(12)}, "k: tensor map dtype code 12 is unknown; known: "),
        ({"interleave": IntImm(1)}, "k: tensor map interleave code 1 is unknown"),
        ({"swizzle": IntImm(4)}, "k: tensor map swizzle code 4 is unknown"),
        ({"promotion": IntImm(9)}, "k: tensor map l2 promotion code 9 is unknown"),
        ({"fill": IntImm(1)}, "k: tensor map out-of-bounds fill code 1 is unknown"),
        ({"swizzle": N}, "is not a constant"),
        ({"rank": N}, "is not a constant"),
        ({"rank": IntImm(3)}, "a tensor map of rank 3 has 12 arguments; known is 16"),
        ({"strides": [IntImm(4), IntImm(256)]}, "innermost stride 4 of a tensor map is not its element's 2"),
    ],
)
def test_an_unknown_tensor_map_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoweringError, match=message.replace("(", r"\(")):
        lowering._tensor_map("k", tensor_map_args(**changes))


def parameter(name: str, dtype: str, element: str = "") -> Any:
    annotation = SimpleNamespace(element_type=SimpleNamespace(dtype=element))
    return SimpleNamespace(name=name, dtype=dtype, type_annotation=annotation)


def test_parameters() -> None:
    function = SimpleNamespace(
        params=[parameter("q", "handle", "bfloat16"), parameter("x_desc", "handle"), parameter("scale", "float32")]
    )
    found = lowering._params("k", function, {"x_desc"})
    assert [(p.name, p.kind, p.dtype) for p in found] == [
        ("q", "pointer", "bfloat16"),
        ("x_desc", "tensor_map", ""),
        ("scale", "scalar", "float32"),
    ]


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (parameter("q", "handle", "float8_e4m3"), r"k: parameter 'q' points to 'float8_e4m3'; known: \['bfloat16', "),
        (parameter("n", "uint8"), r"k: parameter 'n' has dtype 'uint8'; known: \['float32', 'int32', 'int64'\]"),
        (parameter("n", "bool"), "k: parameter 'n' has dtype 'bool'"),
    ],
)
def test_an_unknown_dtype_is_refused(param: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        lowering._params("k", SimpleNamespace(params=[param]), set())


def test_every_known_element_can_be_rendered() -> None:
    from codegen.rendering import ELEMENT_TYPES

    assert ELEMENT_TYPES.keys() == lowering.ELEMENTS


# Artifacts


def artifact(*kernels: str) -> Any:
    functions = {SimpleNamespace(name_hint=name).name_hint: None for name in kernels}
    named = [(SimpleNamespace(name_hint=name), function) for name, function in functions.items()]
    return SimpleNamespace(device_mod=SimpleNamespace(functions=SimpleNamespace(items=lambda: named)))


@pytest.mark.parametrize(("kernels", "count"), [((), 0), (("a", "b"), 2)])
def test_an_instance_is_exactly_one_kernel(kernels: tuple[str, ...], count: int) -> None:
    with pytest.raises(LoweringError, match=f"k: lowered to {count} kernels"):
        lowering.facts("k", artifact(*kernels), (), "0.1.15", "")


def launched(monkeypatch: pytest.MonkeyPatch, params: list[str], values: list[Any], **attrs: Any) -> Any:
    """An artifact of one kernel without parameters, launched with `values` for the launch parameters `params`."""
    monkeypatch.setattr(lowering, "_packed_calls", lambda module: {"k_kernel": [values]})
    function = SimpleNamespace(params=[], attrs={"tirx.kernel_launch_params": params, **attrs})
    named = [(SimpleNamespace(name_hint="k_kernel"), function)]
    functions = SimpleNamespace(items=lambda: named)
    return SimpleNamespace(device_mod=SimpleNamespace(functions=functions), host_mod=None, kernel_source="")


GRID_AND_BLOCK = ["blockIdx.x", "threadIdx.x"]
CLUSTER = ["tir.cluster_dim_x", "tir.cluster_dim_y", "tir.cluster_dim_z"]


def test_a_launch_without_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lowering.facts("k", launched(monkeypatch, GRID_AND_BLOCK, [N, IntImm(384)]), (), "0.1.15", "")
    assert (found.grid, found.block, found.cluster) == (("n", "1", "1"), (384, 1, 1), (1, 1, 1))
    assert not found.clustered


def test_a_launch_in_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = [IntImm(2), IntImm(1), IntImm(1)]
    artifact = launched(monkeypatch, CLUSTER + GRID_AND_BLOCK, [*dims, N, IntImm(384)], cluster_dims=dims)
    found = lowering.facts("k", artifact, (), "0.1.15", "")
    assert (found.grid, found.block, found.cluster) == (("n", "1", "1"), (384, 1, 1), (2, 1, 1))
    assert found.clustered


def test_a_kernel_that_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """T.pdl_sync() leaves an attribute, whatever its value; T.pdl_trigger() alone asks nothing of the kernel's own launch."""
    for attrs, programmatic in (({"has_cuda_pdl_sync": 0}, True), ({"has_cuda_pdl_trigger": 1}, False), ({}, False)):
        found = lowering.facts("k", launched(monkeypatch, GRID_AND_BLOCK, [N, IntImm(384)], **attrs), (), "0.1.15", "")
        assert found.programmatic is programmatic


@pytest.mark.parametrize(
    ("params", "values", "attrs", "message"),
    [
        # The launch and the kernel's attribute disagree, or one of them is missing.
        (CLUSTER, [IntImm(2), IntImm(1), IntImm(1)], {}, r"clusters of \[2, 1, 1\], but the kernel declares \[1, 1, 1\]"),
        (
            [],
            [],
            {"cluster_dims": [IntImm(2), IntImm(1), IntImm(1)]},
            r"clusters of \[1, 1, 1\], but the kernel declares \[2, ",
        ),
        (CLUSTER, [IntImm(4), IntImm(1), IntImm(1)], {"cluster_dims": [IntImm(2), IntImm(1), IntImm(1)]}, "clusters of"),
        (CLUSTER, [N, IntImm(1), IntImm(1)], {"cluster_dims": [IntImm(2), IntImm(1), IntImm(1)]}, "is not a constant"),
        (["clusterIdx.x"], [IntImm(2)], {}, r"launch parameters \['clusterIdx.x'\] are unknown; known: "),
    ],
)
def test_a_cluster_that_is_not_understood_is_refused(
    monkeypatch: pytest.MonkeyPatch, params: list[str], values: list[Any], attrs: dict[str, Any], message: str
) -> None:
    artifact = launched(monkeypatch, params + GRID_AND_BLOCK, [*values, N, IntImm(384)], **attrs)
    with pytest.raises(LoweringError, match=message):
        lowering.facts("k", artifact, (), "0.1.15", "")


# The worker's protocol


@pytest.mark.parametrize("line", ["{", "[]", "1", "null", '{"name": "x"}', '{"unknown": 1}', json.dumps(asdict(REQUEST))])
def test_a_bad_request_is_answered_with_an_error(line: str) -> None:
    replies: list[str] = []
    lowering.serve([line, line], replies.append)
    assert len(replies) == 2
    for reply in replies:
        answer = json.loads(reply)
        assert answer.keys() == {"error"}
        assert answer["error"]
        assert "\n" not in reply


def test_the_lowering_process_needs_only_the_standard_library(tmp_path: Path) -> None:
    """The Python that has TileLang may have nothing else; replies are the only thing on stdout."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "codegen.lowering"],
        input=json.dumps(asdict(REQUEST)) + "\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert "has no TileLang" in json.loads(line)["error"]


def script(path: Path, text: str) -> TileLang:
    """A TileLang whose Python is this shell script."""
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return TileLang(path, "0.1.15", path.parent)


def within(seconds: float, work: Callable[[], object], give_up: Callable[[], None]) -> list[object]:
    """The result or the exception of `work`, which must not hang: after that long it is given up."""
    result: list[object] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        give_up()
    return result


def test_a_worker_answers(tmp_path: Path) -> None:
    answer = json.dumps({"lowered": LOWERED.dump_python(lowered(), mode="json")})
    (tmp_path / "answer").write_text(answer + "\n")
    worker = Worker(script(tmp_path / "python", f"read request; cat {tmp_path}/answer; read end"))
    assert worker.lower(REQUEST) == lowered()
    worker.close()


def test_a_worker_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    worker = Worker(script(tmp_path / "python", "read request; echo 'ImportError: libcuda' >&2; exit 3"))
    with pytest.raises(LoweringError) as caught:
        worker.lower(REQUEST)
    worker.close()
    for part in ("sample: the lowering process died (exit code 3)", "ImportError: libcuda", "doctor"):
        assert part in str(caught.value)


def test_a_worker_that_died_before_the_request_is_reported(tmp_path: Path) -> None:
    worker = Worker(script(tmp_path / "python", "exit 3"))
    time.sleep(0.5)
    with pytest.raises(LoweringError, match=r"the lowering process died \(exit code 3\)"):
        worker.lower(REQUEST)
    worker.close()


def test_a_worker_that_prints_much_does_not_hang(tmp_path: Path) -> None:
    """TileLang's progress and warnings may exceed what a pipe holds."""
    answer = json.dumps({"error": "refused"})
    text = f"read request; head -c 300000 /dev/zero | tr '\\0' x >&2; echo '{answer}'; read end"
    worker = Worker(script(tmp_path / "python", text))
    result = within(10, lambda: worker.lower(REQUEST), worker._process.kill)
    assert [str(error) for error in result] == ["sample: refused"]
    worker.close()


def test_a_python_without_tilelang_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("echo null", "exit 1", "echo not JSON"):
        monkeypatch.setenv("PEGAINFER_GEMMA4_TILELANG_PYTHON", str(script(tmp_path / "python", text).python))
        with pytest.raises(LoweringError) as caught:
            tilelang_python.find()
        for part in (f"{tmp_path / 'python'} has no TileLang", "PEGAINFER_GEMMA4_TILELANG_PYTHON", "--from DIR"):
            assert part in str(caught.value)


def test_a_python_with_tilelang_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = script(tmp_path / "python", """echo '["0.1.15", "/site/tilelang/__init__.py"]'""").python
    monkeypatch.setenv("PEGAINFER_GEMMA4_TILELANG_PYTHON", str(named))
    found = tilelang_python.find()
    assert found == TileLang(named, "0.1.15", Path("/site/tilelang"))
    assert found.includes == (Path("/site/tilelang/src"), Path("/site/tilelang/3rdparty/cutlass/include"))
