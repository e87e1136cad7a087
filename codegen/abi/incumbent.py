"""The incumbent's entries: FlashInfer's attention behind the names and parameters that consumers already link.

An entry is one line of its unit: a launch body of paged_launch.cuh, instantiated for its head_dims and its variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from codegen.abi.records import CType, Function, digest
from codegen.incumbent import KEY_FRAGMENTS, Variant
from codegen.table import Table

# Every parameter that an entry may have: its type and meaning. A name means the same in every entry.
PARAMS: Mapping[str, tuple[CType, str]] = MappingProxyType(
    {
        "q": (CType.OUT, "queries, bf16 [rows, num_qo_heads, head_dim]; a decode has one row a request"),
        "output": (CType.OUT, "attention output, bf16, shaped as q"),
        "kv_data": (CType.OUT, "the KV pool, bf16"),
        "k_offset_elems": (CType.I64, "elements from kv_data to K of page 0; a multiple of 8"),
        "v_offset_elems": (CType.I64, "elements from kv_data to V of page 0; a multiple of 8"),
        "page_indices": (CType.OUT_I32, "page ids, request after request"),
        "page_indptr": (
            CType.OUT_I32,
            "int32 [batch_size + 1]: request r owns page_indices[page_indptr[r] : page_indptr[r + 1]]",
        ),
        "last_page_len_d": (CType.OUT_I32, "int32 [batch_size]: tokens on each request's last page"),
        "k_cache": (CType.OUT, "keys, bf16 [num_kv_heads, max_seq_len, head_dim]"),
        "v_cache": (CType.OUT, "values, shaped as k_cache"),
        "key": (CType.OUT, "keys to append, bf16 [batch_size, num_kv_heads, head_dim]"),
        "value": (CType.OUT, "values to append, shaped as key"),
        "src_k": (CType.OUT, "keys to scatter, bf16; token i, head h at i * src_stride_n + h * src_stride_h"),
        "src_v": (CType.OUT, "values to scatter, laid out as src_k"),
        "batch_indices": (CType.OUT_I32, "int32 [nnz]: the request of each token"),
        "positions": (CType.OUT_I32, "int32 [nnz]: each token's position in its request"),
        "q_indptr": (CType.OUT_I32, "int32 [batch_size + 1]: request r owns rows [q_indptr[r], q_indptr[r + 1])"),
        "request_indices": (CType.OUT_I32, "int32 [blocks of the plan]: the request of each block"),
        "qo_tile_indices": (CType.OUT_I32, "int32 [blocks of the plan]: the block's query tile in its request"),
        "kv_tile_indices": (CType.OUT_I32, "int32 [blocks of the plan]: the block's KV chunk in its request"),
        "kv_chunk_size_ptr": (CType.OUT_I32, "int32 [1]: tokens of a KV chunk"),
        "o_indptr": (CType.OUT_I32, "int32 [batch_size + 1]: request r's partials are tmp_v[o_indptr[r] : o_indptr[r + 1]]"),
        "block_valid_mask": (CType.OUT_U8, "bytes [padded_batch_size]: 0 where a block has nothing to do; null: none"),
        "tmp_v": (CType.OUT, "partial outputs, bf16 [padded_batch_size, num_qo_heads, head_dim]"),
        "tmp_s": (CType.OUT_F32, "their base-2 lse, float [padded_batch_size, num_qo_heads]"),
        "total_num_rows": (CType.OUT_U32, "uint32 [1]: rows of all requests; read by no launch that does not split KV"),
        "num_qo_heads": (CType.I32, "query heads"),
        "num_kv_heads": (CType.I32, "KV heads"),
        "head_dim": (CType.I32, "columns of a head"),
        "page_size": (CType.I32, "tokens of a page"),
        "seq_len": (CType.I32, "query rows, of all requests together: what the CTA tile is resolved from"),
        "total_seq_len": (CType.I32, "query rows, of all requests together"),
        "kv_len": (CType.I32, "tokens in the cache; the last seq_len of them are the queries' own"),
        "max_seq_len": (CType.I32, "tokens the cache has room for in each head"),
        "nnz": (CType.I32, "tokens to scatter"),
        "batch_size": (CType.I32, "requests"),
        "padded_batch_size": (CType.I32, "blocks of the plan, those that do nothing included"),
        "stride_page": (CType.I64, "elements from one page to the next; a page's rows are [page_size, num_kv_heads, head_dim]"),
        "src_stride_n": (CType.I64, "elements from one token to the next; a multiple of 8"),
        "src_stride_h": (CType.I64, "elements from one head to the next; a multiple of 8"),
        "sm_scale": (CType.F32, "softmax scale"),
        "window_left": (CType.I32, "keys seen before the query's own; -1: all"),
        "cta_tile_q_override": (CType.I32, "rows of a query tile, heads of a group counted as rows; 0: resolve it"),
        "stream": (CType.OUT, "a cudaStream_t"),
    }
)

_POOL = "kv_data k_offset_elems v_offset_elems page_indices page_indptr last_page_len_d"
_HEADS = "num_qo_heads num_kv_heads head_dim"
_DECODE = f"q output {_POOL} request_indices kv_tile_indices kv_chunk_size_ptr"
_DECODE_SHAPE = f"{_HEADS} page_size batch_size"
_PREFILL = (
    f"q output {_POOL} q_indptr request_indices qo_tile_indices kv_tile_indices kv_chunk_size_ptr total_num_rows {_HEADS} "
    "page_size seq_len batch_size padded_batch_size stride_page sm_scale"
)
_SINGLE = "q output k_cache v_cache num_qo_heads num_kv_heads"
_SINGLE_SHAPE = "seq_len kv_len max_seq_len sm_scale stream"

_PLAN_HEAD_DIMS = tuple(KEY_FRAGMENTS)


@dataclass(frozen=True)
class Incumbent(Function):
    """An entry of the incumbent.

    body: the launch body or planner of paged_launch.cuh. head_dims: what it takes; empty: the row's. A planner makes no CUDA
    call, so a stub has it whole.
    """

    unit: str
    body: str
    variant: Variant
    head_dims: tuple[int, ...]

    @property
    def planner(self) -> bool:
        """Whether it only counts."""
        return self.body.startswith("plan_")

    @property
    def signature_hash(self) -> str:
        """Changes when a caller must be compiled again."""
        return digest(self.prototype)


def _entry(
    unit: str, name: str, body: str, params: str, doc: str, head_dims: tuple[int, ...] = (), variant: Variant = "full"
) -> Incumbent:
    typed = tuple((PARAMS[param][0], param) for param in params.split())
    planner = body.startswith("plan_")
    returns = "Returns the count, or -1. Makes no CUDA call." if planner else "Returns a TILEPRESS_* code."
    return Incumbent(name, CType.I32 if planner else CType.INT, typed, f"{doc} {returns}", unit, body, variant, head_dims)


_DECODE_DOC = "Decode over paged KV, one block a request and KV head."
_SPLIT_DOC = "Decode over paged KV whose requests the plan cuts into chunks; the partials are merged after."
_PREFILL_DOC = "Causal prefill over paged KV."
_SINGLE_DOC = "Causal prefill of one request over contiguous KV."
_WINDOW_DOC = "A row sees its own position and the window_left before it."
_AT_256 = "At head_dim 256."
_AT_512 = "At head_dim 512."

ENTRIES: tuple[Incumbent, ...] = (
    _entry(
        "paged_attention",
        "paged_attention_decode_cuda",
        "Decode",
        f"{_DECODE} {_DECODE_SHAPE} stride_page sm_scale stream",
        _DECODE_DOC,
    ),
    _entry(
        "paged_attention",
        "paged_attention_decode_split_kv_cuda",
        "SplitDecode",
        f"{_DECODE} o_indptr block_valid_mask tmp_v tmp_s {_DECODE_SHAPE} padded_batch_size stride_page sm_scale stream",
        _SPLIT_DOC,
    ),
    _entry(
        "paged_attention",
        "paged_kv_append_cuda",
        "Append",
        f"{_POOL} key value num_kv_heads head_dim page_size batch_size stride_page stream",
        "Writes each request's last token, one that page_indptr and last_page_len_d already count, into the pool.",
        _PLAN_HEAD_DIMS,
    ),
    _entry(
        "paged_attention",
        "paged_kv_scatter_cuda",
        "Scatter",
        f"{_POOL} src_k src_v batch_indices positions nnz num_kv_heads head_dim page_size stride_page src_stride_n "
        "src_stride_h stream",
        "Writes nnz tokens into the pool, each at a request and a position.",
        _PLAN_HEAD_DIMS,
    ),
    _entry(
        "paged_attention",
        "batch_prefill_paged_num_tiles",
        "plan_tiles",
        f"seq_len {_HEADS}",
        "Query tiles of seq_len rows.",
        _PLAN_HEAD_DIMS,
    ),
    _entry(
        "paged_attention",
        "batch_prefill_paged_num_tiles_with_cta_tile_q",
        "plan_tiles",
        f"seq_len {_HEADS} cta_tile_q_override",
        "Query tiles of seq_len rows, of a given tile.",
        _PLAN_HEAD_DIMS,
    ),
    _entry(
        "paged_attention",
        "batch_prefill_cta_tile_q",
        "plan_cta_tile",
        f"total_seq_len {_HEADS}",
        "Rows of the query tile that a prefill of that many rows is launched with.",
        _PLAN_HEAD_DIMS,
    ),
    _entry(
        "paged_attention",
        "batch_prefill_cta_tile_q_with_override",
        "plan_cta_tile",
        f"total_seq_len {_HEADS} cta_tile_q_override",
        "Rows of the query tile that a prefill with that override is launched with.",
        _PLAN_HEAD_DIMS,
    ),
    _entry(
        "paged_attention",
        "batch_prefill_paged_cuda_with_cta_tile_q",
        "Prefill",
        f"{_PREFILL} cta_tile_q_override stream",
        f"{_PREFILL_DOC} The plan must have been made for the same tile.",
    ),
    _entry("paged_attention", "batch_prefill_paged_cuda", "Prefill", f"{_PREFILL} stream", _PREFILL_DOC),
    _entry("paged_attention", "single_prefill_cuda", "SinglePrefill", f"{_SINGLE} head_dim {_SINGLE_SHAPE}", _SINGLE_DOC),
    _entry(
        "paged_attention",
        "single_prefill_cuda_hd256",
        "SinglePrefill",
        f"{_SINGLE} {_SINGLE_SHAPE}",
        f"{_SINGLE_DOC} {_AT_256}",
        (256,),
    ),
    _entry(
        "paged_attention",
        "paged_attention_decode_cuda_hd256",
        "Decode",
        f"{_DECODE} {_DECODE_SHAPE} stride_page sm_scale stream",
        f"{_DECODE_DOC} {_AT_256}",
        (256,),
    ),
    _entry(
        "paged_attention",
        "paged_attention_decode_window_cuda_hd256",
        "Decode",
        f"{_DECODE} {_DECODE_SHAPE} stride_page sm_scale window_left stream",
        f"{_DECODE_DOC} {_AT_256} {_WINDOW_DOC}",
        (256,),
        "windowed",
    ),
    _entry(
        "paged_attention",
        "batch_prefill_paged_cuda_hd256",
        "Prefill",
        f"{_PREFILL} stream",
        f"{_PREFILL_DOC} {_AT_256}",
        (256,),
    ),
    _entry(
        "paged_attention",
        "batch_prefill_paged_window_cuda_hd256",
        "Prefill",
        f"{_PREFILL} window_left stream",
        f"{_PREFILL_DOC} {_AT_256} {_WINDOW_DOC}",
        (256,),
        "windowed",
    ),
    _entry(
        "paged_attention_hd512",
        "paged_attention_decode_split_kv_cuda_hd512",
        "SplitDecode",
        f"{_DECODE} o_indptr block_valid_mask tmp_v tmp_s {_DECODE_SHAPE} padded_batch_size stride_page sm_scale stream",
        f"{_SPLIT_DOC} {_AT_512}",
        (512,),
    ),
    _entry(
        "paged_attention_hd512",
        "single_prefill_cuda_hd512",
        "SinglePrefill",
        f"{_SINGLE} {_SINGLE_SHAPE}",
        f"{_SINGLE_DOC} {_AT_512}",
        (512,),
    ),
    _entry(
        "paged_attention_hd512",
        "batch_prefill_paged_cuda_hd512",
        "Prefill",
        f"{_PREFILL} stream",
        f"{_PREFILL_DOC} {_AT_512}",
        (512,),
    ),
)

REFUSALS = (
    "a null or misaligned pointer (q, output, the pool, caches, keys, values and tmp_v lie on 16 bytes), a negative count, "
    "query heads that are no multiple of the KV heads, a head_dim without an instance, a page stride below a page's rows or of "
    "2^32 elements or more, a window_left below -1, a softmax scale that is not finite and above 0",
    "decode: a group (query heads per KV head) other than 1, 2, 3, 4, 8",
    "prefill: a CTA tile that has no instance (16, 64, 128 up to head_dim 128; 16, 64 at 256; 16, 32 at 512)",
    "single prefill: kv_len below seq_len or above max_seq_len",
    "append and scatter: more KV heads than fit a block of 1024 threads (128, 64, 32, 32 at head_dim 64, 128, 256, 512)",
)


def incumbent_params(table: Table) -> dict[str, tuple[CType, str]]:
    """The parameters that the table's entries of the incumbent have, each once."""
    used = {name for entry in incumbent(table) for _ctype, name in entry.params}
    return {name: described for name, described in PARAMS.items() if name in used}


def incumbent(table: Table) -> tuple[Incumbent, ...]:
    """The incumbent's entries that the table's rows make: those whose head_dim and variant a row of their unit has."""
    rows = {row.name: row for row in table.incumbent}
    return tuple(
        entry
        for entry in ENTRIES
        if (row := rows.get(entry.unit))
        and entry.variant in row.variants
        and (not entry.head_dims or set(entry.head_dims) & set(row.head_dims))
    )
