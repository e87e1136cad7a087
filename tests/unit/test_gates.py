"""Every gate, red and green. A red case says which line and which words its failure holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from codegen import gates
from codegen.errors import GateError
from codegen.gates import Failure, Resources, Subject
from codegen.lowered import Param

from .samples import ARCH, Q_MAP, SOURCE, subject


@dataclass(frozen=True)
class Red:
    """A subject that its gate refuses. parts: what the failure says. line: which line it names, 0 for none."""

    name: str
    subject: Subject
    parts: tuple[str, ...]
    line: int = 0
    log: str = ""


@dataclass(frozen=True)
class Green:
    """A subject that its gate accepts."""

    name: str
    subject: Subject
    log: str = ""


# What ptxas --verbose prints for two kernels of one file.
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first_kernel' for 'sm_90a'
ptxas info    : Function properties for first_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 1024 bytes smem
ptxas info    : Compile time = 800.014 ms
ptxas info    : Compiling entry function 'sample_kernel' for 'sm_90a'
ptxas info    : Function properties for sample_kernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {stack} bytes cumulative stack size, {shared} bytes smem
ptxas info    : Compile time = 12.345 ms
"""


def ptxas(stack: int = 0, stores: int = 0, loads: int = 0, registers: int = 96, shared: int = 64) -> str:
    return PTXAS.format(stack=stack, stores=stores, loads=loads, registers=registers, shared=shared)


SIGNATURE = (
    'extern "C" __global__ void __launch_bounds__(128, 1) sample_kernel(float* __restrict__ lse, float* __restrict__ p) {'
)


def merge(*body: str, name: str = "decode_merge_groups_g8", signature: str = SIGNATURE) -> Subject:
    """A kernel whose body is these lines. The signature is line 1, so the body starts at line 2."""
    return subject(
        name=name,
        source="\n".join([signature, *(f"  {line}" for line in body), "}", ""]),
        params=(Param("lse", "pointer", "float32"), Param("p", "pointer", "float32")),
    )


READ = "float x = p[threadIdx.x + 128];"
VECTOR_READ = "*(float4*)(x + 0) = *(float4*)(p + (int)threadIdx.x * 4);"
STORE = "p[threadIdx.x] = x;"
VECTOR_STORE = "*(float4*)(p + ((int)threadIdx.x * 4)) = *(float4*)(x + 0);"
BARRIER = "__syncthreads();"
PARTIAL = "tl::__sync_thread_partial(1, 128);"

RED: dict[str, list[Red]] = {
    "shared_memory": [
        Red(
            "one byte over",
            subject(dynamic_shared_bytes=232448 - 1024 + 1),
            ("needs 232449 bytes (231425 dynamic and 1024 reserved)", "sm_90a has 232448"),
        ),
        Red(
            "a smaller arch",
            subject(ARCH.model_copy(update={"shared_memory_bytes": 66559})),
            ("needs 66560 bytes", "66559"),
        ),
    ],
    "one_entry": [
        Red("none", subject(source="int x;\n"), ("[]", "'sample_kernel'")),
        Red("another name", subject(kernel="other_kernel"), ("['sample_kernel']", "'other_kernel'"), 6),
        Red(
            "a second one",
            subject(source=SOURCE + 'extern "C" __global__ void helper(int x) {\n}\n'),
            ("['sample_kernel', 'helper']",),
            10,
        ),
        Red(
            "a second one with C++ linkage",
            subject(source=SOURCE + "static __global__ void helper(int x) {\n}\n"),
            ("helper",),
            10,
        ),
        Red(
            "a second one with launch bounds before void",
            subject(source=SOURCE + 'extern "C" __global__ __launch_bounds__(128) void helper(int x) {\n}\n'),
            ("helper",),
            10,
        ),
        Red("a declaration alone", subject(source=SOURCE.splitlines()[4] + "\n"), ("[]", "'sample_kernel'")),
    ],
    "parameters_bound": [
        Red(
            "a parameter",
            subject(params=(Param("gadget", "scalar", "int32"),)),
            ("'gadget'", "known: num_kv_heads, out, q, q_rows, q_tiles"),
        ),
        Red("an extent", subject(symbols=("q_rows", "gadget")), ("'gadget'",)),
        Red("a tensor", subject(tensor_maps=(replace(Q_MAP, tensor="gadget"),)), ("'gadget'",)),
    ],
    "bulk_copies": [
        Red("no map", subject(tensor_maps=()), ("asks for tma", "no tensor map")),
        Red("an unused map", subject(tensor_maps=(Q_MAP, replace(Q_MAP, name="k_desc"))), ("'k_desc'", "no copy")),
        Red(
            "a copy in a comment",
            subject(source=SOURCE.replace("  tl::tma_load", "  // tl::tma_load")),
            ("'q_desc'",),
        ),
        Red("a call of another name", subject(source=SOURCE.replace("tma_load", "tma_load_reduce")), ("'q_desc'",)),
    ],
    "merge_barrier": [
        Red("no barrier", merge(READ, STORE), ("'p'", "no barrier", "(line 2)"), 3),
        Red("no barrier, vectorised", merge(VECTOR_READ, VECTOR_STORE), ("'p'", "no barrier", "(line 2)"), 3),
        Red("barrier before the last read", merge(READ, BARRIER, "float y = p[1];", STORE), ("(line 4)",), 5),
        Red("barrier after the store", merge(READ, STORE, BARRIER), ("no barrier",), 3),
        Red("read again after the store", merge(READ, BARRIER, STORE, "lse[0] = p[3];"), ("read again",), 5),
        Red("read in the storing statement", merge(READ, BARRIER, "p[0] = p[1] + x;"), ("read again",), 4),
        Red("barrier in a line comment", merge(READ, "// __syncthreads();", STORE), ("no barrier",), 4),
        Red("barrier in a block comment", merge(READ, "/* __syncthreads(); */", STORE), ("no barrier",), 4),
        Red("barrier in a string", merge(READ, 'debug("__syncthreads();");', STORE), ("no barrier",), 4),
        Red("a warp's barrier", merge(READ, "__syncwarp();", STORE), ("no barrier",), 4),
        Red("a barrier of another name", merge(READ, "my__syncthreads();", STORE), ("no barrier",), 4),
        Red("compound assignment", merge(READ, "p[threadIdx.x] += x;"), ("'p'",), 3),
        Red("compound assignment after a barrier", merge(BARRIER, "p[threadIdx.x] *= 2.0f;", READ), ("'p'",)),
        Red("a store under a condition", merge(READ, f"if (threadIdx.x < 32) {VECTOR_STORE}"), ("no barrier",), 3),
        Red("a store in a loop's head line", merge(READ, f"for (int i = 0; i < 4; ++i) {STORE}"), ("no barrier",), 3),
        Red("a store after a pragma", merge(READ, "#pragma unroll", VECTOR_STORE), ("no barrier",), 4),
        Red(
            "a store through reinterpret_cast",
            merge(READ, "*reinterpret_cast<float4*>(p + 4) = y;"),
            ("no barrier",),
            3,
        ),
        Red("a store through a cast pointer", merge(READ, "((float4*)p)[threadIdx.x] = y;"), ("no barrier",), 3),
        Red("a store to a member", merge(READ, "((float4*)p)[0].x = x;"), ("no barrier",), 3),
        Red("a store over two lines", merge(READ, "p[threadIdx.x]", "    = x;"), ("no barrier",), 3),
        Red("an atomic", merge(READ, "atomicAdd(&(p[threadIdx.x]), x);"), ("'p'",), 3),
        Red("TileLang's atomic", merge(READ, "AtomicAdd((&(p[threadIdx.x])), x, 0);"), ("'p'",), 3),
        Red("an alias", merge(READ, "float* alias = p + 4;", "alias[threadIdx.x] = x;"), ("'p'",)),
        Red("of two buffers the second", merge("lse[0] = 1.0f;", READ, STORE), ("'p'",), 4),
        Red("a barrier that most threads skip", merge(READ, f"if (threadIdx.x == 0) {{ {BARRIER} }}", STORE), ("'p'",)),
    ],
    "lowering_warnings": [
        Red("a race", subject(log="fine\n[W] potential race on shared buffer 'k_s'\n"), ("race on shared",), 2),
        Red("upper case", subject(log="WARNING: Data Hazard in pipeline\n"), ("Data Hazard",), 1),
        Red("a barrier in divergent code", subject(log="a sync in divergent control flow was hoisted\n"), ("hoisted",), 1),
    ],
    "no_spills": [
        Red("spill stores", subject(), ("8 of spill stores",), 9, ptxas(stores=8)),
        Red("spill loads", subject(), ("12 of spill loads",), 9, ptxas(loads=12)),
        Red("stack", subject(), ("16 bytes of stack",), 9, ptxas(stack=16)),
        Red("no report", subject(), ("no resources of 'sample_kernel'",), 0, ""),
        Red("a report of another kernel", subject(kernel="third_kernel"), ("no resources of 'third_kernel'",), 0, ptxas()),
        Red(
            "a kernel whose report is cut before another's",
            subject(),
            ("no resources of 'sample_kernel'",),
            0,
            "ptxas info    : Compiling entry function 'sample_kernel' for 'sm_90a'\n"
            + ptxas().split("ptxas info    : Compile time = 800")[0],
        ),
    ],
    "register_file": [
        # 65,536 registers a block: 128 threads of 513 or more are too many.
        Red(
            "too many registers",
            subject(block=(384, 1, 1)),
            ("255 registers by 384 threads", "65536"),
            0,
            ptxas(registers=255),
        ),
        # A warp is given registers in units of 256, so 170 a thread are 176: 176 * 384 = 67,584.
        Red("too many once rounded", subject(block=(384, 1, 1)), ("384 threads",), 0, ptxas(registers=170)),
        Red("too many threads", subject(block=(16, 16, 4)), ("96 registers by 1024 threads",), 0, ptxas()),
    ],
    "static_shared_memory": [
        # With 65,536 dynamic bytes it does not fit the block's 232,448; the launch's check reserves 1,024.
        Red("more than a block has", subject(), ("170000", "1024"), 0, ptxas(shared=170_000)),
        Red("more than is reserved", subject(), ("1025", "1024"), 0, ptxas(shared=1025)),
    ],
    "tensor_core_pipeline": [
        Red(
            "serialised",
            subject(),
            ("wgmma.mma_async instructions are serialized",),
            2,
            "ptxas info    : 0 bytes gmem\nptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions "
            "are serialized due to insufficient register resources\n",
        ),
        Red(
            "setmaxnreg",
            subject(),
            ("setmaxnreg ignored",),
            1,
            "ptxas info    : setmaxnreg ignored to maintain minimum register requirements\n",
        ),
        Red("by number alone", subject(), ("C7508",), 1, "ptxas info    : (C7508) Potential Performance Loss\n"),
    ],
}

GREEN: dict[str, list[Green]] = {
    "shared_memory": [Green("to the byte", subject(dynamic_shared_bytes=232448 - 1024)), Green("less", subject())],
    "one_entry": [
        Green("with its declaration", subject()),
        Green("without launch bounds", subject(source=SOURCE.replace("__launch_bounds__(128, 1) ", ""))),
        Green("with a device function", subject(source="__device__ int f(int x) { return x; }\n" + SOURCE)),
        Green("with another in a comment", subject(source=SOURCE + '// extern "C" __global__ void other(int x) {\n')),
    ],
    "parameters_bound": [Green("all known", subject()), Green("none", subject(params=(), tensor_maps=(), symbols=()))],
    "bulk_copies": [
        Green("a load", subject()),
        Green("a store", subject(source=SOURCE.replace("tma_load", "tma_store"))),
        Green(
            "a load with a cache hint", subject(source=SOURCE.replace("tma_load", "tma_load<tl::CacheHintSm90::EVICT_FIRST>"))
        ),
        Green("a load for a cluster", subject(source=SOURCE.replace("tma_load", "tma_load_multicast"))),
        Green("not asked for", subject(tma=False, tensor_maps=())),
    ],
    "merge_barrier": [
        Green("barrier", merge(READ, BARRIER, STORE)),
        Green("vectorised", merge(VECTOR_READ, BARRIER, VECTOR_STORE)),
        Green("partial barrier", merge(READ, PARTIAL, STORE)),
        Green("two reads, two stores", merge(READ, "float y = p[9];", BARRIER, STORE, "p[1] = y;")),
        Green("comparison is no store", merge("bool same = p[0] == 1.0f && p[1] <= 2.0f && p[2] != 3.0f;")),
        Green("only read", merge(READ, "lse[0] = x;")),
        Green("only written", merge("float x = 0;", STORE)),
        Green("another kernel", merge(READ, STORE, name="decode_g8")),
        Green("a name that holds the pointer's", merge("p_old[0] = x;", "float y = p[0];", "old_p[1] = y;")),
        Green("the name in a comment after the store", merge(READ, BARRIER, STORE, "// p[0] is done")),
        Green("compound assignment to a local", merge("float y = 0;", "y += p[0];", "lse[0] = y;")),
    ],
    "lowering_warnings": [
        Green("silence", subject()),
        Green("another warning", subject(log="[W] buffer 'q_s' is larger than needed\n")),
        Green("words that hold race", subject(log="the trace of the lowering, braces balanced\n")),
    ],
    "no_spills": [
        Green("none", subject(), ptxas()),
        Green("the other kernel", subject(kernel="first_kernel"), ptxas(stores=8)),
    ],
    "register_file": [
        Green("the prefill's", subject(block=(384, 1, 1)), ptxas(registers=168)),
        Green("to the register", subject(block=(256, 1, 1)), ptxas(registers=255)),
        Green("no report, which no_spills refuses", subject(), ""),
    ],
    "static_shared_memory": [
        Green("what is reserved", subject(), ptxas(shared=1024)),
        Green("no report, which no_spills refuses", subject(), ""),
    ],
    "tensor_core_pipeline": [Green("a report", subject(), ptxas()), Green("silence", subject(), "")],
}

GATES = {gate.__name__: gate for gate in (*gates.LOWERED_GATES, *gates.COMPILED_GATES)}


def run(gate: str, looked: Subject, log: str) -> list[Failure]:
    function = GATES[gate]
    found: Iterator[Failure] = function(looked, log) if function in gates.COMPILED_GATES else function(looked)  # type: ignore
    return list(found)


def test_every_gate_has_a_red_and_a_green_case() -> None:
    assert RED.keys() == GREEN.keys() == GATES.keys()
    assert all(RED.values()) and all(GREEN.values())


@pytest.mark.parametrize(("gate", "case"), [pytest.param(g, c, id=f"{g}: {c.name}") for g in RED for c in RED[g]])
def test_red(gate: str, case: Red) -> None:
    failures = run(gate, case.subject, case.log)
    assert len(failures) == 1, [str(failure) for failure in failures]
    (failure,) = failures
    assert (failure.gate, failure.kernel) == (gate, case.subject.lowered.name)
    if case.line:
        assert failure.line == case.line, str(failure)
    for part in (case.subject.lowered.name, f"gate '{gate}'", *case.parts):
        assert part in str(failure)
    assert not failure.line or f"line {failure.line}" in str(failure)


@pytest.mark.parametrize(("gate", "case"), [pytest.param(g, c, id=f"{g}: {c.name}") for g in GREEN for c in GREEN[g]])
def test_green(gate: str, case: Green) -> None:
    assert [str(failure) for failure in run(gate, case.subject, case.log)] == []


def test_the_kernels_name_is_looked_at_too() -> None:
    """A merge kernel may belong to an instance whose own name does not say so."""
    looked = merge(READ, STORE, name="decode_g8", signature=SIGNATURE.replace("sample_kernel", "decode_merge_groups_kernel"))
    looked = replace(looked, lowered=replace(looked.lowered, kernel="decode_merge_groups_kernel"))
    assert len(run("merge_barrier", looked, "")) == 1


def test_a_source_without_the_kernel_is_a_failure_not_a_traceback() -> None:
    looked = merge(READ, STORE)
    absent = replace(looked, lowered=replace(looked.lowered, kernel="absent_kernel"))
    with pytest.raises(GateError, match="one_entry"):
        gates.check_lowered([absent])


def test_an_unused_map_and_a_used_one() -> None:
    """Each map that no copy uses is named; the used one is not."""
    looked = subject(tensor_maps=(Q_MAP, replace(Q_MAP, name="k_desc"), replace(Q_MAP, name="v_desc")))
    failures = [str(failure) for failure in gates.bulk_copies(looked)]
    assert len(failures) == 2
    assert "'k_desc'" in failures[0]
    assert "'v_desc'" in failures[1]


# Over several kernels


def test_check_lowered_names_every_failure() -> None:
    with pytest.raises(GateError) as caught:
        gates.check_lowered([subject(), subject(name="a", tensor_maps=()), subject(name="b", log="a race\n")])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("a: gate 'bulk_copies': ")
    assert lines[1] == "b: gate 'lowering_warnings', line 1: TileLang warns: a race"
    assert lines[2:] == ["Change the kernel; a gate is never relaxed for a build."]


def test_check_compiled_names_every_failure() -> None:
    with pytest.raises(GateError) as caught:
        gates.check_compiled([(subject(name="a"), ptxas(stores=4)), (subject(name="b"), ptxas()), (subject(name="c"), "")])
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["a", "c"]


def test_checks_accept() -> None:
    gates.check_lowered([subject(), merge(READ, BARRIER, STORE, name="decode_g8")][:1])
    gates.check_compiled([(subject(), ptxas())])


# ptxas' report


def test_resources_of_each_kernel() -> None:
    log = ptxas(stack=16, stores=20, loads=24, registers=72, shared=2048)
    assert gates.resources("first_kernel", log) == Resources(168, 0, 0, 0, 1024, 3)
    assert gates.resources("sample_kernel", log) == Resources(72, 16, 20, 24, 2048, 1)
    assert gates.resources("kernel", log) is None
    assert gates.resources("sample_kernel", "") is None


def test_resources_without_barriers_and_shared_memory() -> None:
    log = """\
ptxas info    : Compiling entry function 'sample_kernel' for 'sm_90a'
ptxas info    : Function properties for sample_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""
    assert gates.resources("sample_kernel", log) == Resources(8, 0, 0, 0, 0, 0)
