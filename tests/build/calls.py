"""Calls into a library on a host without a GPU: its archive linked to a CUDA runtime that only counts (fake_cudart.c)."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
OK, INVALID, UNSUPPORTED, DEVICE, CUDA, STUB = range(6)
SPLIT, FOLDED = 1, 2
INT32_MAX = 2**31 - 1
STUB_MESSAGE = "this library was built as a stub (codegen build --stub): it has the entries, but no kernels"

C_TYPES = {
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
}


def layout(struct: str) -> list[tuple[str, str]]:
    """Names and C types of an argument struct, from the hand-written list."""
    lines = (GOLDEN / f"{struct}.txt").read_text().splitlines()
    rows = [line.split(None, 3) for line in lines if not line.startswith("#")]
    return [(name, ctype) for _, _, name, ctype in rows]


def structure(name: str) -> type[ctypes.Structure]:
    """An argument struct as ctypes has it; pointers are addresses."""
    fields = [(field, C_TYPES.get(ctype, ctypes.c_uint64)) for field, ctype in layout(name)]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# The struct of every entry, by the entry's short name.
PREFILL_ARGS = structure("tilepress_prefill_args")
DECODE_ARGS = structure("tilepress_decode_args")
PREP_PROMPT_ARGS = structure("tilepress_prep_prompt_args")
PREP_DECODE_ARGS = structure("tilepress_prep_decode_args")
STRUCTS = {
    "global_prefill": PREFILL_ARGS,
    "sliding_prefill": structure("tilepress_sliding_prefill_args"),
    "global_decode": DECODE_ARGS,
    "sliding_decode": DECODE_ARGS,
    "decode_plan_size": structure("tilepress_decode_plan_size_args"),
    "decode_plan": structure("tilepress_decode_plan_args"),
    "merge_states": structure("tilepress_merge_states_args"),
    "prep_global_prompt": PREP_PROMPT_ARGS,
    "prep_global_decode": PREP_DECODE_ARGS,
    "prep_sliding_prompt": PREP_PROMPT_ARGS,
    "prep_sliding_decode": PREP_DECODE_ARGS,
    "gelu_mul": structure("tilepress_gelu_mul_args"),
    "routed_global_prefill": structure("tilepress_routed_prefill_args"),
    "routed_sliding_prefill": structure("tilepress_routed_sliding_prefill_args"),
    **{
        f"routed_{layer}_{shared}": structure(f"tilepress_routed_{shared}_args")
        for shared in ("prefill_plan_size", "prefill_plan", "decode", "decode_plan_size", "decode_plan")
        for layer in ("global", "sliding")
    },
}

KEPT: list[Any] = []  # host arrays live as long as the process


def host(*values: int, kind: Any = ctypes.c_int32) -> int:
    """The address of a host array."""
    KEPT.append((kind * len(values))(*values))
    return ctypes.addressof(KEPT[-1])


class Map(ctypes.Structure):
    """A recorded tensor map."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("rank", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint64 * 5),
    ]


class Launch(ctypes.Structure):
    """A recorded launch."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("cluster", ctypes.c_uint),
        ("programmatic", ctypes.c_uint),
        ("arguments", ctypes.c_uint64 * 32),
    ]


LAUNCHES = 4  # that the fake records, and tensor maps twice as many
BYTES = {"pointer": 8, "tensor_map": 8, "scalar": 4}


class Library:
    """A shared object made of one tier's archive and the fake runtime."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        for name in ("last_error", "build_info", "version"):
            getattr(self.c, f"call_{name}").restype = ctypes.c_char_p
        self.c.call_supports.argtypes = [ctypes.c_char_p, *[ctypes.c_int32] * 5]
        self.c.call_pool_bytes.argtypes = [ctypes.c_int64, *[ctypes.c_int32] * 6, ctypes.c_void_p]
        self.c.call_parse_mode.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self.c.call_mode_pool_bytes.argtypes = [ctypes.c_int32, ctypes.c_int64, *[ctypes.c_int32] * 5, ctypes.c_void_p]

    def fake(self, name: str, kind: Any = ctypes.c_int) -> Any:
        """A variable of the fake runtime."""
        return kind.in_dll(self.c, f"fake_{name}")

    def call(self, entry: str, args: ctypes.Structure | None) -> tuple[int, str]:
        """The entry's code and, where it is not OK, the message."""
        code = getattr(self.c, f"call_{entry}")(ctypes.byref(args) if args is not None else None)
        return code, self.c.call_last_error().decode() if code else ""

    def without_a_driver(self) -> None:
        """Puts the fake runtime into the state of a host without a driver."""
        self.c.fake_reset()
        for name, value in {"error": 35, "device": 0, "major": 9, "minor": 0, "shared_memory": 232448, "sm_count": 132}.items():
            self.fake(name).value = value

    def launches(self) -> list[Launch]:
        """What was launched since the last reset."""
        return list(self.fake("launch", Launch * LAUNCHES)[: self.fake("launches").value])

    def maps(self) -> dict[int, Map]:
        """The tensor maps that were encoded, by the address of the tensor."""
        return {m.address: m for m in self.fake("map", Map * (2 * LAUNCHES))[: self.fake("maps").value]}

    def expect(self, *kernels: dict[str, Any]) -> None:
        """Says what the next launches will be, so that the fake reads as many bytes of each argument as there are."""
        sizes = self.fake("argument_bytes", ctypes.c_int * 32 * LAUNCHES)
        for launch, kernel in enumerate(kernels):
            for place in range(32):
                params = kernel["params"]
                sizes[launch][place] = BYTES[params[place]["kind"]] if place < len(params) else 0


def kernel_record(library: Path, name: str) -> dict[str, Any]:
    """A kernel's launch facts in the tree that a build left."""
    record = json.loads((library / ".build/tree/tilepress.json").read_text())
    (found,) = (kernel for kernels in record["kernels"].values() for kernel in kernels if kernel["name"] == name)
    return dict(found)


def arguments(launch: Launch, kernel: dict[str, Any]) -> dict[str, int]:
    """The integer scalars and the pointers of a launch by their names in the kernel's signature."""
    return {
        param["name"]: launch.arguments[place]
        for place, param in enumerate(kernel["params"])
        if param["kind"] == "pointer" or param["dtype"] == "int32"
    }
