"""prim_func -> `Lowered`. Nothing else touches TileLang's internals.

Launch facts are read from the lowered IR, never from text and never guessed: a parameter, descriptor argument, dtype code or
pass config that no table here knows stops the build. Runs as a process of its own, `python -m codegen.lowering`, with the
Python that has TileLang: a JSON request per line on stdin, a JSON reply per line on the descriptor it saves from stdout.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from codegen.errors import LoweringError
from codegen.kernels import OPERATIONS
from codegen.lowered import Lowered, Param, Request, TensorMap

# Codes of cuTensorMapEncodeTiled as TileLang passes them, and the names that cuda.h gives them.
MAP_DTYPES: Mapping[int, tuple[str, int]] = MappingProxyType(
    {
        0: ("CU_TENSOR_MAP_DATA_TYPE_UINT8", 1),
        3: ("CU_TENSOR_MAP_DATA_TYPE_INT32", 4),
        6: ("CU_TENSOR_MAP_DATA_TYPE_FLOAT16", 2),
        7: ("CU_TENSOR_MAP_DATA_TYPE_FLOAT32", 4),
        9: ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2),
    }
)
INTERLEAVES = MappingProxyType({0: "CU_TENSOR_MAP_INTERLEAVE_NONE"})
SWIZZLES = MappingProxyType(
    {
        0: "CU_TENSOR_MAP_SWIZZLE_NONE",
        1: "CU_TENSOR_MAP_SWIZZLE_32B",
        2: "CU_TENSOR_MAP_SWIZZLE_64B",
        3: "CU_TENSOR_MAP_SWIZZLE_128B",
    }
)
L2_PROMOTIONS = MappingProxyType(
    {
        0: "CU_TENSOR_MAP_L2_PROMOTION_NONE",
        1: "CU_TENSOR_MAP_L2_PROMOTION_L2_64B",
        2: "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
        3: "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
    }
)
OOB_FILLS = MappingProxyType({0: "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"})

SCALARS = frozenset({"int32", "int64", "float32"})
ELEMENTS = frozenset({"bfloat16", "float32", "int32"})
GRID = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
BLOCK = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
CLUSTER = ("tir.cluster_dim_x", "tir.cluster_dim_y", "tir.cluster_dim_z")
DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
WAITS = "has_cuda_pdl_sync"  # the attribute of a kernel that waits for the one before it (T.pdl_sync)
LAUNCH_PARAMS = (*CLUSTER, *GRID, *BLOCK, DYNAMIC_SHARED)


def _fast_math(value: Any) -> list[str]:
    return ["--use_fast_math"] if value else []


def _register_level(value: Any) -> list[str]:
    return [f"--ptxas-options=--register-usage-level={int(value)}"]


def _device_flags(value: Any) -> list[str]:
    parts = [value] if isinstance(value, str) else list(value)
    return [token for part in parts for token in shlex.split(part)]


def _lowering_only(_value: Any) -> list[str]:
    return []


# Every pass config a kernel may set: whether it reaches nvcc in TileLang's JIT, and as what. An object compiled under other
# flags than its JIT twin's is not bit-identical to it.
PASS_CONFIGS: Mapping[str, Callable[[Any], list[str]]] = MappingProxyType(
    {
        "tl.enable_fast_math": _fast_math,
        "tl.ptxas_register_usage_level": _register_level,
        "tl.device_compile_flags": _device_flags,
        "tl.disable_warp_specialized": _lowering_only,
        "tl.disable_thread_storage_sync": _lowering_only,
        "tl.disable_safe_memory_legalize": _lowering_only,
    }
)


def nvcc_flags(pass_configs: Mapping[str, Any]) -> tuple[str, ...]:
    """The nvcc flags that TileLang's JIT derives from pass configs; an unclassified config is an error."""
    flags: list[str] = []
    for key, value in sorted(pass_configs.items()):
        if key not in PASS_CONFIGS:
            raise LoweringError(
                f"pass config '{key}' is not classified; known: {', '.join(PASS_CONFIGS)}. "
                "Add it to PASS_CONFIGS in codegen/lowering.py with what it means for nvcc."
            )
        flags += PASS_CONFIGS[key](value)
    return tuple(flags)


def installed_tilelang() -> str:
    """TileLang's version in this Python, or an error that says how to get it."""
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        raise LoweringError(
            f"{sys.executable} has no TileLang. Install it (pip install tilelang), name a Python that has it in "
            "PEGAINFER_GEMMA4_TILELANG_PYTHON, or build from emitted sources with --from DIR."
        ) from None


def check_version(found: str, pinned: str) -> None:
    """Refuses another TileLang than the table's: generated code drifts between releases."""
    if found != pinned:
        raise LoweringError(
            f"TileLang {found} is installed, but families.toml pins {pinned}. Install tilelang=={pinned}, or point "
            "PEGAINFER_GEMMA4_TILELANG_PYTHON at a Python that has it."
        )


def lower(request: Request) -> Lowered:
    """Lowers one kernel. Needs TileLang, of exactly the version the request names."""
    found = installed_tilelang()
    check_version(found, request.tilelang)
    import tilelang
    from tilelang import tvm

    module = importlib.import_module(OPERATIONS[request.operation].module)
    pass_configs = dict(module.PASS_CONFIGS)
    flags = nvcc_flags(pass_configs)
    target = tvm.target.Target({"kind": "cuda", "arch": request.target}, host="c")
    with _captured_stderr() as log:
        prim_func = module.build(request)
        with target, tvm.transform.PassContext(opt_level=3, config=pass_configs):
            artifact = tilelang.lower(prim_func, target=target)
    return facts(request.name, artifact, flags, found, "".join(log))


def facts(name: str, artifact: Any, flags: tuple[str, ...], tilelang: str, log: str) -> Lowered:
    """`Lowered` out of a TileLang artifact: the kernel's parameters, its tensor maps and its launch."""
    device = list(artifact.device_mod.functions.items())
    if len(device) != 1:
        names = ", ".join(variable.name_hint for variable, _ in device)
        raise LoweringError(f"{name}: lowered to {len(device)} kernels ({names}); a family instance is exactly one.")
    variable, function = device[0]
    kernel = str(variable.name_hint)
    calls = _packed_calls(artifact.host_mod)
    maps = tuple(_tensor_map(name, args) for args in calls.get("__tvm_tensormap_create_tiled", []))
    launches = calls.get(kernel, [])
    if len(launches) != 1:
        raise LoweringError(f"{name}: the host module launches {kernel} {len(launches)} times; expected once.")
    launch_params = [str(param) for param in function.attrs["tirx.kernel_launch_params"]]
    unknown = [param for param in launch_params if param not in LAUNCH_PARAMS]
    if unknown:
        raise LoweringError(f"{name}: launch parameters {unknown} are unknown; known: {LAUNCH_PARAMS}.")
    params = _params(name, function, {tensor_map.name for tensor_map in maps})
    launch = launches[0]
    arguments, values = launch[: len(params)], launch[len(params) :]
    if len(values) != len(launch_params) or [_name_of(arg) for arg in arguments] != [param.name for param in params]:
        raise LoweringError(f"{name}: the launch's arguments are not the kernel's parameters followed by its geometry.")
    geometry = dict(zip(launch_params, values, strict=True))
    symbols: set[str] = set()
    grid = [c_expression(geometry.get(axis, 1), symbols) for axis in GRID]
    block = [_constant(name, geometry.get(axis, 1)) for axis in BLOCK]
    cluster = _cluster(name, geometry, function.attrs)
    for args in calls.get("__tvm_tensormap_create_tiled", []):
        for argument in args[4:]:
            c_expression(argument, symbols)
    return Lowered(
        name=name,
        kernel=kernel,
        source=str(artifact.kernel_source),
        params=params,
        tensor_maps=maps,
        grid=(grid[0], grid[1], grid[2]),
        block=(block[0], block[1], block[2]),
        cluster=cluster,
        programmatic=WAITS in function.attrs,
        dynamic_shared_bytes=_constant(name, geometry.get(DYNAMIC_SHARED, 0)),
        symbols=tuple(sorted(symbols)),
        nvcc_flags=flags,
        tilelang=tilelang,
        log=log,
    )


def _cluster(name: str, geometry: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[int, int, int]:
    """CTAs of a cluster along each axis, on which the launch and the kernel's attribute must agree; 1 where neither has any."""
    launched = [_constant(name, geometry.get(axis, 1)) for axis in CLUSTER]
    declared = [_constant(name, dim) for dim in attrs["cluster_dims"]] if "cluster_dims" in attrs else [1, 1, 1]
    if launched != declared:
        raise LoweringError(f"{name}: launched in clusters of {launched}, but the kernel declares {declared}.")
    return (launched[0], launched[1], launched[2])


def _params(name: str, function: Any, map_names: set[str]) -> tuple[Param, ...]:
    """The kernel's parameters: pointers with their element dtype, scalars, and the tensor maps by name."""
    params = []
    for var in function.params:
        param = str(var.name)
        dtype = str(var.dtype)
        if param in map_names:
            params.append(Param(name=param, kind="tensor_map", dtype=""))
        elif dtype == "handle":
            element = str(var.type_annotation.element_type.dtype)
            if element not in ELEMENTS:
                raise LoweringError(f"{name}: parameter '{param}' points to '{element}'; known: {sorted(ELEMENTS)}.")
            params.append(Param(name=param, kind="pointer", dtype=element))
        elif dtype in SCALARS:
            params.append(Param(name=param, kind="scalar", dtype=dtype))
        else:
            raise LoweringError(f"{name}: parameter '{param}' has dtype '{dtype}'; known: {sorted(SCALARS)}.")
    return tuple(params)


def _tensor_map(name: str, args: Sequence[Any]) -> TensorMap:
    """One descriptor: dtype, rank, tensor, then dims, strides, box and element strides (rank each), then four codes."""
    descriptor, dtype_code, rank_expr, tensor = args[:4]
    rank = _constant(name, rank_expr)
    rest = list(args[4:])
    if len(rest) != 4 * rank + 4:
        raise LoweringError(f"{name}: a tensor map of rank {rank} has {len(rest)} arguments; known is {4 * rank + 4}.")
    dtype, element_bytes = _coded(name, "dtype", MAP_DTYPES, dtype_code)
    dims, strides, box, element_strides = (
        tuple(c_expression(arg) for arg in rest[start : start + rank]) for start in range(0, 4 * rank, rank)
    )
    if strides[0] != str(element_bytes):
        raise LoweringError(f"{name}: innermost stride {strides[0]} of a tensor map is not its element's {element_bytes}.")
    interleave, swizzle, promotion, fill = rest[4 * rank :]
    return TensorMap(
        name=_name_of(descriptor),
        tensor=_name_of(tensor),
        dtype=dtype,
        dims=dims,
        strides=strides[1:],
        box=box,
        element_strides=element_strides,
        interleave=_coded(name, "interleave", INTERLEAVES, interleave),
        swizzle=_coded(name, "swizzle", SWIZZLES, swizzle),
        l2_promotion=_coded(name, "l2 promotion", L2_PROMOTIONS, promotion),
        oob_fill=_coded(name, "out-of-bounds fill", OOB_FILLS, fill),
    )


def _coded(name: str, what: str, table: Mapping[int, Any], expression: Any) -> Any:
    code = _constant(name, expression)
    if code not in table:
        raise LoweringError(f"{name}: tensor map {what} code {code} is unknown; known: {dict(table)}.")
    return table[code]


def _packed_calls(module: Any) -> dict[str, list[list[Any]]]:
    """Arguments of every call_packed of a host module, by the function called."""
    from tilelang import tvm

    calls: dict[str, list[list[Any]]] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tvm.tirx.Call) and getattr(node.op, "name", "") == "tirx.tvm_call_packed":
            calls.setdefault(str(node.args[0].value), []).append(list(node.args[1:]))

    for _, function in module.functions.items():
        tvm.tirx.stmt_functor.post_order_visit(function.body, visit)
    return calls


def _name_of(expression: Any) -> str:
    return str(expression.name) if hasattr(expression, "name") else str(expression)


def _constant(name: str, expression: Any) -> int:
    value = getattr(expression, "value", expression)
    if not isinstance(value, int):
        raise LoweringError(f"{name}: launch fact {expression} is not a constant; only grid and tensor extents may vary.")
    return value


BINARY: Mapping[str, str] = MappingProxyType({"Add": "+", "Sub": "-", "Mul": "*"})
C_TYPES: Mapping[str, str] = MappingProxyType({"int32": "int32_t", "int64": "int64_t"})


def c_expression(expression: Any, symbols: set[str] | None = None) -> str:
    """An integer TIR expression as fully parenthesised C; the variables it names are added to `symbols`.

    Only what launch facts have been seen to use is known: constants, variables, casts, +, -, *, min, max. Anything else,
    division included, is an error.
    """
    if isinstance(expression, int):
        return str(expression)
    kind = type(expression).__name__
    if kind == "IntImm":
        return str(int(expression.value))
    if kind == "Var":
        if symbols is not None:
            symbols.add(str(expression.name))
        return str(expression.name)
    if kind == "Cast" and str(expression.dtype) in C_TYPES:
        return f"static_cast<{C_TYPES[str(expression.dtype)]}>({c_expression(expression.value, symbols)})"
    if kind in BINARY:
        left, right = c_expression(expression.a, symbols), c_expression(expression.b, symbols)
        return f"({left} {BINARY[kind]} {right})"
    if kind in ("Min", "Max"):
        left, right = c_expression(expression.a, symbols), c_expression(expression.b, symbols)
        return f"std::{kind.lower()}({left}, {right})"
    raise LoweringError(f"launch expression {expression} holds a {kind}, which codegen/lowering.py cannot put into C.")


@contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Fills the list with what C++ and Python wrote to stderr inside: TileLang's warnings reach no Python hook."""
    log: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as sink:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(sink.fileno(), 2)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            sink.seek(0)
            log.append(sink.read())


def serve(lines: Iterable[str], reply: Callable[[str], None]) -> None:
    """Answers one JSON request a line: {"lowered": …} or {"error": …}."""
    for line in lines:
        try:
            answer: dict[str, Any] = {"lowered": asdict(lower(Request(**json.loads(line))))}
        except LoweringError as error:
            answer = {"error": str(error)}
        except Exception as error:  # TileLang refuses a kernel with exceptions of many classes
            answer = {"error": f"TileLang refused the kernel: {type(error).__name__}: {error}"}
        reply(json.dumps(answer))


def main() -> None:
    """The worker: replies go to the real stdout, and whatever TileLang prints goes to stderr instead."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def reply(text: str) -> None:
            out.write(text + "\n")
            out.flush()

        serve(sys.stdin, reply)


if __name__ == "__main__":
    main()
