"""The text that templates make of records: small variations, the golden files, and the writer of files."""

from __future__ import annotations

import difflib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from codegen import abi, rendering
from codegen.abi import CType, Field, Memory
from codegen.abi.prefill import PREFILL
from codegen.errors import OutputError
from codegen.lowered import Param
from codegen.rendering import FileWriter, Unit

from .samples import ARCH, DECODE_FAMILY, GOLDEN, context, entry, lowered, table

# Golden files: also compiled, in tests/build/test_golden.py.

RENDERED = {
    "tilepress.h": rendering.header(table(incumbent=True)),
    "tilepress_sys.rs": rendering.rust_bindings(table(incumbent=True)),
    "sample_prefill_g8_split.cu": rendering.kernel_source(entry(), lowered()),
}


@pytest.mark.parametrize("name", RENDERED)
def test_golden(name: str) -> None:
    path = GOLDEN / name
    if os.environ.get("TILEPRESS_UPDATE_GOLDEN") == "1":
        path.write_text(RENDERED[name], encoding="utf-8")
    committed = path.read_text(encoding="utf-8") if path.is_file() else ""
    diff = "\n".join(
        difflib.unified_diff(committed.splitlines(), RENDERED[name].splitlines(), f"golden/{name}", "rendered", lineterm="")
    )
    assert committed == RENDERED[name], (
        f"{diff}\nIf the change is meant, run the tests with TILEPRESS_UPDATE_GOLDEN=1, review the files and commit them."
    )


# The public surfaces


SURFACES = {
    "header": rendering.header,
    "rust": rendering.rust_bindings,
    "python": rendering.python_bindings,
    "document": rendering.abi_document,
}


@pytest.mark.parametrize("surface", SURFACES)
def test_every_surface_has_every_name(surface: str) -> None:
    text = SURFACES[surface](table({"name": "a_prefill"}, {"name": "b_prefill"}))
    for name in ("tilepress_a_prefill", "tilepress_b_prefill", "tilepress_last_error", "tilepress_supports"):
        assert name in text
    for code in ("INVALID_ARGUMENT", "UNSUPPORTED", "STUB"):
        assert code in text
    for field in ("q_indptr_host", "last_page_len", "num_page_ids", "sm_scale", "reserved"):
        assert field in text


@pytest.mark.parametrize("surface", SURFACES)
def test_the_groups_are_the_rows(surface: str) -> None:
    before, after = SURFACES[surface](table()), SURFACES[surface](table({"groups": [4, 16]}))
    if surface == "rust":
        assert "groups (num_q_heads / num_kv_heads) 4, 16." in after
    assert before != after
    assert after.count("4, 16") == 1
    assert "4, 16" not in before


@pytest.mark.parametrize("surface", ["header", "python"])
def test_the_version_is_the_tables(surface: str) -> None:
    older = table()
    newer = older.model_copy(update={"library": older.library.model_copy(update={"version": "7.8.9"})})
    assert "7.8.9" in SURFACES[surface](newer)
    assert "7.8.9" not in SURFACES[surface](older)


def with_field(monkeypatch: pytest.MonkeyPatch, field: Field) -> abi.FamilyEntry:
    """The sample entry whose struct has one more field."""
    struct = replace(PREFILL.struct, fields=(*PREFILL.struct.fields, field))
    changed = replace(PREFILL, struct=struct)
    monkeypatch.setattr(abi, "OPERATION_ABIS", {"prefill": changed})
    return entry()


def test_a_pointer_field_on_every_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    field = Field("sink", CType.IN_I32, "extra keys", "int32 [batch]", Memory.DEVICE, optional=True, align=16)
    with_field(monkeypatch, field)
    header = rendering.header(table())
    assert "  /* extra keys (int32 [batch]; device, optional, aligned to 16 bytes). */\n  const int32_t *sink;\n" in header
    rust = rendering.rust_bindings(table())
    assert "/// extra keys (int32 [batch]; device, optional, aligned to 16 bytes).\n        pub sink: *const i32,\n" in rust
    python = rendering.python_bindings(table())
    assert "uintptr_t sink" in python
    assert "args.sink = address<const int32_t>(sink);" in python
    assert 'py::arg("sink") = 0,' in python
    document = rendering.abi_document(table())
    assert "| `sink` | `const int32_t *` | int32 [batch]; device, optional, aligned to 16 bytes | extra keys |" in document


def test_a_number_field_on_every_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    with_field(monkeypatch, Field("window", CType.I64, "keys a row sees", minimum=1, maximum=4096, multiple=8))
    header = rendering.header(table())
    assert "  /* keys a row sees (1 to 4096, a multiple of 8). */\n  int64_t window;\n" in header
    assert "        pub window: i64,\n" in rendering.rust_bindings(table())
    assert "int64_t window" in rendering.python_bindings(table())
    assert "| `window` | `int64_t` | 1 to 4096, a multiple of 8 | keys a row sees |" in rendering.abi_document(table())


def test_the_checks_of_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = with_field(monkeypatch, Field("window", CType.I64, "keys", minimum=-3, maximum=4096, multiple=8))
    text = rendering.entry_source(context(), changed, [lowered()])
    for line in (
        "if (args.window < -3)",
        "window is %lld; it must be -3 or more",
        "if (args.window > 4096)",
        "window is %lld; it must be 4096 or less",
        "if (args.window % 8 != 0)",
        "window is %lld; it must be a multiple of 8",
    ):
        assert line in text


def test_a_pointer_that_a_count_excuses(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = with_field(monkeypatch, Field("sink", CType.IN, "keys", memory=Memory.DEVICE, align=8, count="batch"))
    text = rendering.entry_source(context(), changed, [lowered()])
    assert "if (args.sink == nullptr && args.batch > 0)" in text
    assert "sink is not aligned to 8 bytes" in text


def test_an_unlimited_field_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = with_field(monkeypatch, Field("tag", CType.U32, "anything"))
    assert "args.tag" not in rendering.entry_source(context(), changed, [lowered()])


def test_a_stub_has_the_checks_and_no_launch() -> None:
    full = rendering.entry_source(context(), entry(), [lowered()])
    stub = rendering.entry_source(context(tier="stub"), entry(), [])
    assert "return launch_sample_prefill_g8_split(args, values);" in full
    assert "if (int code = run_stage_1(*args, values)) return code;" in full
    assert "cuda" not in stub
    assert "run_stage" not in stub
    assert "launch_" not in stub
    assert "TILEPRESS_STUB" in stub
    assert "TILEPRESS_STUB" not in full
    checks = slice(full.index("int check_numbers"), full.index("int run_stage_1"))
    assert full[checks] in stub


def test_shared_memory_is_the_largest_need() -> None:
    kernels = [lowered(dynamic_shared_bytes=n) for n in (1000, 50000, 2000)]
    assert "{ 9, 0, 51024 }" in rendering.entry_source(context(), entry(), kernels)


# Operations of several kernels


@pytest.fixture
def decode() -> abi.FamilyEntry:
    """The entry of a decode family with two groups and both page formats."""
    row = DECODE_FAMILY | {"groups": [4, 8], "formats": ["split", "folded"]}
    return abi.family_entries(table(row))[0]


def stage(text: str, number: int) -> str:
    """The text of the function that runs a stage."""
    start = text.index(f"int run_stage_{number}(")
    return text[start : text.index("\n}\n", start)]


def test_stages_run_in_launch_order(decode: abi.FamilyEntry) -> None:
    text = rendering.entry_source(context(), decode, [lowered()])
    call = text[text.index('extern "C"') :]
    first, second = (call.index(f"if (int code = run_stage_{n}(*args, values)) return code;") for n in (1, 2))
    assert first < second < call.index("return TILEPRESS_OK;\n}", second)
    assert "run_stage_3" not in text


def test_a_stage_of_instances_picks_by_format_and_group(decode: abi.FamilyEntry) -> None:
    text = stage(rendering.entry_source(context(), decode, [lowered()]), 1)
    for page_format in ("split", "folded"):
        for group in (4, 8):
            assert (
                f"  if (args.page_format == TILEPRESS_PAGE_FORMAT_{page_format.upper()} && "
                f"args.num_q_heads == {group} * args.num_kv_heads)\n"
                f"    return launch_sample_decode_partial_g{group}_{page_format}(args, values);\n"
            ) in text
    assert text.count("return launch_") == 4
    assert "return fail(TILEPRESS_UNSUPPORTED," in text


def test_a_stage_of_the_family_is_launched_as_it_is(decode: abi.FamilyEntry) -> None:
    text = stage(rendering.entry_source(context(), decode, [lowered()]), 2)
    assert text.partition("{\n")[2] == "  return launch_sample_decode_merge(args, values);"


def test_launchers_of_every_stage_are_declared(decode: abi.FamilyEntry) -> None:
    text = rendering.launchers_header(decode)
    assert '#include "decode.h"' in text
    for name in ("partial_g4_split", "partial_g8_split", "partial_g4_folded", "partial_g8_folded", "merge"):
        assert f"int launch_sample_decode_{name}(const tilepress_decode_args &args, const DecodeLaunch &values);" in text
    assert text.count("int launch_") == 5


def test_the_parts_of_a_plan_are_launch_values(decode: abi.FamilyEntry) -> None:
    kernel = lowered(
        params=(Param("plan_items", "pointer", "int32"), Param("row_offset", "scalar", "int32")),
        tensor_maps=(),
        grid=("(group * 4)", "num_kv_heads", "max_batch"),
        symbols=("group", "max_batch", "num_kv_heads"),
    )
    text = rendering.kernel_source(decode, kernel)
    for line in (
        "const auto plan_items = values.plan_items;",
        "const auto row_offset = args.row_offset;",
        "const auto group = values.group;",
        "const auto max_batch = values.max_batch;",
        "const auto num_kv_heads = args.num_kv_heads;",
        "config.gridDim = dim3((group * 4), num_kv_heads, max_batch);",
        "cudaLaunchKernelEx(&config, kernel, pointer_to<int>(plan_items), row_offset)",
    ):
        assert line in text


def test_the_launch_struct_is_the_operations() -> None:
    assert rendering.launch_struct(entry()) == "PrefillLaunch"
    row = {"operation": "sliding_prefill", "layer": "sliding", "head_dim": 256}
    assert rendering.launch_struct(entry(**row)) == "SlidingPrefillLaunch"


# Hand-written entries

HAND_WRITTEN = {entry.short_name: entry for entry in abi.hand_written(table(DECODE_FAMILY))}


def test_a_hand_written_entry_checks_and_runs_its_body() -> None:
    text = rendering.hand_written_source(context(DECODE_FAMILY), HAND_WRITTEN["decode_plan"])
    assert 'extern "C" int tilepress_decode_plan(const tilepress_decode_plan_args *args) {' in text
    for line in (
        "if (args->struct_size != sizeof *args)",
        "if (args.max_batch < 1)",
        "if (args.max_batch > 65535)",
        "if (args.window > 536870912)",
        "if (reinterpret_cast<uintptr_t>(args.plan) % 4 != 0)",
        "if (args.kv_len == nullptr && args.batch > 0)",
        "if (args.plan == nullptr)",
    ):
        assert line in text
    assert "args.kv_origin == nullptr" not in text
    assert "return run_decode_plan(kEntry, *args);" in text
    # Host code: it makes no CUDA call, so it needs no device and a stub runs it.
    assert "check_device" not in text
    assert rendering.hand_written_source(context(DECODE_FAMILY, tier="stub"), HAND_WRITTEN["decode_plan"]) == text


def test_a_hand_written_kernel_asks_for_its_device() -> None:
    text = rendering.hand_written_source(context(), HAND_WRITTEN["merge_states"])
    body = text[text.index('extern "C"') :]
    steps = (
        "args->struct_size",
        "check_numbers(*args)",
        "check_aligned(*args)",
        "check_merge_states(kEntry, *args)",
        "if (args->num_rows == 0) return TILEPRESS_OK;",
        "check_present(*args)",
        "check_device(kEntry, { 9, 0, 0 })",
        "return run_merge_states(kEntry, *args);",
    )
    assert sorted(steps, key=body.index) == list(steps)


def test_a_stub_of_a_hand_written_kernel_refuses() -> None:
    text = rendering.hand_written_source(context(tier="stub"), HAND_WRITTEN["merge_states"])
    assert "TILEPRESS_STUB" in text
    assert "check_merge_states(kEntry, *args)" in text
    assert "run_merge_states" not in text
    assert "cuda" not in text


def test_the_bodies_are_declared() -> None:
    text = rendering.hand_written_header(table(DECODE_FAMILY))
    structs = {
        "decode_plan_size": "decode_plan_size",
        "decode_plan": "decode_plan",
        "merge_states": "merge_states",
        "prep_global_prompt": "prep_prompt",
        "prep_global_decode": "prep_decode",
        "prep_sliding_prompt": "prep_prompt",
        "prep_sliding_decode": "prep_decode",
        "gelu_mul": "gelu_mul",
    }
    assert structs.keys() == HAND_WRITTEN.keys()
    for name, struct in structs.items():
        assert f"int run_{name}(const char *entry, const tilepress_{struct}_args &args);" in text
    assert text.count("int run_") == 8


# Single pieces


def test_undefined_names_raise() -> None:
    with pytest.raises(UndefinedError):
        rendering.render("launchers.h.j2", entry=entry())
    with pytest.raises(UndefinedError):
        rendering.ENVIRONMENT.from_string("{{ absent }}").render()
    with pytest.raises(UndefinedError):
        rendering.ENVIRONMENT.from_string("{% if absent %}x{% endif %}").render()


def test_a_comment_of_one_line() -> None:
    assert rendering.comment("short") == "/* short */"
    assert rendering.comment("short", 4) == "    /* short */"


def test_a_comment_is_wrapped() -> None:
    words = " ".join(["word"] * 60)
    lines = rendering.comment(words, 2).splitlines()
    assert lines[0].startswith("  /* word")
    assert all(line.startswith("   * word") for line in lines[1:])
    assert lines[-1].endswith("word */")
    assert max(map(len, lines)) <= 120
    assert sum(line.count("word") for line in lines) == 60
    assert len(lines) == 3


def test_limits_of_a_field() -> None:
    field = Field("n", CType.I32, "n")
    assert rendering.limits(field) == ""
    assert rendering.limits(replace(field, minimum=0)) == "0 or more"
    assert rendering.limits(replace(field, minimum=0, maximum=9)) == "0 to 9"
    assert rendering.limits(replace(field, maximum=9)) == "9 or less"
    assert rendering.describe(replace(field, minimum=0)) == "n (0 or more)."


def test_braced_casts_each_value() -> None:
    assert rendering.braced(("64", "q_rows"), "cuuint64_t") == "{static_cast<cuuint64_t>(64), static_cast<cuuint64_t>(q_rows)}"
    assert rendering.braced((), "int") == "{}"


def test_a_c_string() -> None:
    assert rendering.cstring('a "b" \\ c\n') == '"a \\"b\\" \\\\ c\\n"'


def test_the_launcher_binds_fields_and_launch_values() -> None:
    text = rendering.kernel_source(entry(), lowered())
    assert "const auto out = args.out;" in text
    assert "const auto q = args.q;" in text
    assert "const auto q_tiles = values.q_tiles;" in text
    assert "cudaLaunchKernelEx(&config, kernel, pointer_to<bfloat16_t>(out), q_desc, q_rows)" in text
    assert "config.gridDim = dim3(8, q_tiles, num_kv_heads);" in text
    assert "config.blockDim = dim3(128, 1, 1);" in text
    assert "config.dynamicSmemBytes = 65536;" in text


def test_a_launch_in_clusters_has_the_attribute() -> None:
    text = rendering.kernel_source(entry(), lowered(cluster=(2, 1, 1)))
    assert "cudaLaunchAttribute attributes[1]{};\n  config.attrs = attributes;\n" in text
    assert "cudaLaunchAttribute &cluster = attributes[config.numAttrs++];" in text
    assert "cluster.id = cudaLaunchAttributeClusterDimension;" in text
    for axis, ctas in (("x", 2), ("y", 1), ("z", 1)):
        assert f"cluster.val.clusterDim.{axis} = {ctas};" in text
    assert "programmatic" not in text
    plain = rendering.kernel_source(entry(), lowered())
    assert "cluster" not in plain and "attrs" not in plain.lower()


def test_a_launch_behind_a_running_kernel_has_the_attribute() -> None:
    text = rendering.kernel_source(entry(), lowered(programmatic=True))
    assert "cudaLaunchAttribute attributes[1]{};" in text
    assert "programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;" in text
    assert "programmatic.val.programmaticStreamSerializationAllowed = 1;" in text
    assert "cluster" not in text
    both = rendering.kernel_source(entry(), lowered(programmatic=True, cluster=(2, 1, 1)))
    assert "cudaLaunchAttribute attributes[2]{};" in both
    assert both.count("attributes[config.numAttrs++]") == 2


def test_a_grid_of_resident_clusters_asks_the_device() -> None:
    grid = ("(std::min(resident_clusters, q_tiles) * 2)", "1", "1")
    text = rendering.kernel_source(entry(), lowered(cluster=(2, 1, 1), grid=grid, symbols=("q_tiles", "resident_clusters")))
    assert "resident_clusters = args" not in text and "resident_clusters = values" not in text
    asked = text.index("count_resident_clusters(")
    assert text.index("attributes[config.numAttrs++]") < asked < text.index("config.gridDim = dim3((std::min(")
    assert "count_resident_clusters" not in rendering.kernel_source(entry(), lowered(cluster=(2, 1, 1)))


def test_an_element_type_without_a_spelling_raises() -> None:
    with pytest.raises(UndefinedError):
        rendering.kernel_source(entry(), lowered(params=(Param("out", "pointer", "float16"),)))


def test_library_source_lists_the_instances() -> None:
    text = rendering.library_source(context({"groups": [4, 8]}))
    assert '{"tilepress_sample_prefill", 512, 64, TILEPRESS_PAGE_FORMAT_SPLIT, 4},' in text
    assert '{"tilepress_sample_prefill", 512, 64, TILEPRESS_PAGE_FORMAT_SPLIT, 8},' in text
    assert "version=0.1.0 tier=generate arch=sm_90a tilelang=0.1.15 nvcc=" in text


def test_units_cmake() -> None:
    units = [Unit("a", "generated/a.cu", ("--use_fast_math", "-DX=1")), Unit("b", "csrc/b.cpp")]
    text = rendering.units_cmake(context(), units, ["/include/a b"], [])
    assert '  tilepress_unit(a generated/a.cu "--use_fast_math" "-DX=1")\n  tilepress_unit(b csrc/b.cpp)\n' in text
    assert 'set(TILEPRESS_KERNEL_INCLUDES "/include/a b")' in text
    assert f'set(TILEPRESS_CUDA_ARCHITECTURES "{ARCH.target.removeprefix("sm_")}-real")' in text
    assert "set(TILEPRESS_STUB OFF)" in text
    assert "set(TILEPRESS_STUB ON)" in rendering.units_cmake(context(tier="stub"), [], [], [])


def test_units_of_the_incumbent_have_their_own_headers() -> None:
    units = [Unit("a", "generated/a.cu"), Unit("b", "generated/b.cu", incumbent=True)]
    text = rendering.units_cmake(context(), units, ["/include/a"], ["/include/b", "/include/c"])
    assert 'set(TILEPRESS_KERNEL_INCLUDES "/include/a")\n' in text
    assert 'set(TILEPRESS_INCUMBENT_INCLUDES "/include/b" "/include/c")\nset(TILEPRESS_INCUMBENT_UNITS b)\n' in text


# The writer


def test_the_writer_writes_only_changes(tmp_path: Path) -> None:
    path = FileWriter(tmp_path).write("a/b.txt", "one")
    os.utime(path, (1, 1))
    before = path.stat()
    FileWriter(tmp_path).write("a/b.txt", "one")
    same = path.stat()
    assert (same.st_mtime_ns, same.st_ino) == (before.st_mtime_ns, before.st_ino)
    FileWriter(tmp_path).write("a/b.txt", "two")
    assert path.read_text() == "two"
    assert path.stat().st_mtime_ns != before.st_mtime_ns


def test_the_writer_refuses_a_path_twice(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    writer.write("a.cu", "one")
    with pytest.raises(OutputError, match=r"a\.cu would be written twice; two units have one name"):
        writer.write("a.cu", "one")
    writer.write("b.cu", "one")
    assert writer.paths == [tmp_path / "a.cu", tmp_path / "b.cu"]


def test_the_writer_removes_what_it_did_not_write(tmp_path: Path) -> None:
    for name in ("kept/old.txt", "gone/old.txt", "old.txt"):
        FileWriter(tmp_path).write(name, "old")
    writer = FileWriter(tmp_path)
    writer.write("new.txt", "new")
    writer.remove_others(keep=(tmp_path / "kept").rglob("*"))
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == ["kept/old.txt", "new.txt"]


def test_the_writer_says_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/b/a\.txt cannot be written \(Not a directory\)"):
        FileWriter(tmp_path / "file").write("b/a.txt", "text")
