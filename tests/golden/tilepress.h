/* tilepress 0.1.0: attention kernels, compiled ahead of time, behind a C ABI.
 *
 * Rendered from codegen/abi and families.toml; do not edit. C11 and C++17.
 *
 * Every entry takes one pointer to an argument struct. Zero the struct, set struct_size to its sizeof, then its fields: a
 * zero field means absent. An entry returns TILEPRESS_OK or another TILEPRESS_* code, with the reason, naming the argument,
 * in tilepress_last_error(). It refuses before any CUDA call, never throws, aborts or prints, allocates nothing and does not
 * synchronise: the work is on the stream when it returns, and may be captured in a CUDA graph. Any thread, any stream of the
 * current device. Pointers are to device memory unless a field says host. bf16 is two bytes, arrays are row-major and dense.
 * A kernel that the caller launches behind an entry by programmatic dependent launch may start beside the entry's: it waits,
 * by griddepcontrol.wait, before it uses what the entry reads or writes.
 */
#ifndef TILEPRESS_H
#define TILEPRESS_H

#include <stddef.h>
#include <stdint.h>

#define TILEPRESS_VERSION "0.1.0"

/* What every entry returns. */
enum {
  TILEPRESS_OK = 0, /* done: the work is on the stream */
  TILEPRESS_INVALID_ARGUMENT = 1, /* an argument is refused; nothing was launched */
  TILEPRESS_UNSUPPORTED = 2, /* no compiled instance serves these arguments; nothing was launched */
  TILEPRESS_DEVICE = 3, /* the current device is not one this library was built for; nothing was launched */
  TILEPRESS_CUDA = 4, /* a CUDA call failed */
  TILEPRESS_STUB = 5 /* the library was built as a stub, without kernels */
};

/* Page formats of a KV pool. */
enum {
  TILEPRESS_PAGE_FORMAT_SPLIT = 1, /* a page holds the layer's page_size K rows, then its page_size V rows; row width head_dim */
  TILEPRESS_PAGE_FORMAT_FOLDED = 2 /* a page holds page_size rows [K_rot 128 | V head_dim]; K_rot is rotated K at columns [0, 64), then at [head_dim / 2, head_dim / 2 + 64); the query carries K's norm weight elsewhere. Only where K and V are one projection (k_eq_v) */
};

/* What the knob chooses between: the value of tilepress_parse_mode. */
enum {
  TILEPRESS_MODE_INCUMBENT = 1, /* the incumbent's kernels; the global pool is split (the knob's 'off') */
  TILEPRESS_MODE_TILELANG = 2, /* generated kernels; the global pool is split (the knob's 'tilelang') */
  TILEPRESS_MODE_TILELANG640 = 3 /* generated kernels; the global pool is folded (the knob's 'tilelang640') */
};

/* Bits of a device status word: what only the device can see. */
enum {
  TILEPRESS_STATUS_BAD_PAGE_ID = 1, /* a page id lies outside the pool; its keys were masked, or not written */
  TILEPRESS_STATUS_BAD_INDEX = 2, /* an index pointer, a last page length or an origin that a tile or row used lies outside its range; it was clamped, or the row was not written */
  TILEPRESS_STATUS_BAD_WINDOW = 4, /* a window reaches before the request's page list; the keys before it were masked */
  TILEPRESS_STATUS_BAD_POSITION = 8 /* a position lies outside the cos and sin tables, and its row was not written, or outside its page list, and its K and V were not written */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Arguments of every prefill entry. Zero the struct, set struct_size, then the fields. */
typedef struct tilepress_prefill_args {
  /* sizeof this struct, in bytes; anything else is refused. */
  uint64_t struct_size;
  /* queries (bf16 [q_rows, num_q_heads, head_dim]; device, aligned to 16 bytes). */
  const void *q;
  /* attention output; must not overlap q or pool (bf16 [q_rows, num_q_heads, head_dim]; device, aligned to 16
   * bytes). */
  void *out;
  /* natural logarithm of the sum of exponentials (float [q_rows, num_q_heads]; device, optional). */
  float *lse;
  /* the KV pool, all layers (bf16 [num_pages * rows_per_page, num_kv_heads, row width of the page format]; device,
   * aligned to 16 bytes). */
  const void *pool;
  /* pages of every request, one request after another; an id outside [0, num_pages) reads as masked keys (int32
   * [num_page_ids]; device). */
  const int32_t *page_ids;
  /* request r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1]) (int32 [batch + 1]; device). */
  const int32_t *page_indptr;
  /* tokens in each request's last page, 1 to page_size; later slots may hold anything, NaN included (int32 [batch];
   * device). */
  const int32_t *last_page_len;
  /* request r has the query rows [q_indptr[r], q_indptr[r + 1]) (int32 [batch + 1]; device). */
  const int32_t *q_indptr;
  /* a host copy of q_indptr, checked and used to size the grid. Without it the grid covers every q_indptr within
   * q_rows and batch: capture a CUDA graph so, and replay it with other plans (int32 [batch + 1]; host, optional). */
  const int32_t *q_indptr_host;
  /* status word: bits TILEPRESS_STATUS_* are or-ed in, never cleared (uint32 [1]; device, optional). */
  uint32_t *status;
  /* a cudaStream_t of the current device; null is the default stream (host, optional). */
  void *stream;
  /* pages in the pool (1 to 2147483647). */
  int64_t num_pages;
  /* rows a page holds over all layers (1 to 2147483584, a multiple of 64). */
  int64_t rows_per_page;
  /* this layer's first row inside a page (0 to 2147483584, a multiple of 64). */
  int64_t layer_row;
  /* rows of q, out and lse (0 or more). */
  int32_t q_rows;
  /* length of page_ids (0 to 16777216). */
  int32_t num_page_ids;
  /* requests (0 or more). */
  int32_t batch;
  /* query heads; a multiple of num_kv_heads (1 or more). */
  int32_t num_q_heads;
  /* KV heads (1 to 65535). */
  int32_t num_kv_heads;
  /* columns a head (1 or more). */
  int32_t head_dim;
  /* tokens a page (1 or more). */
  int32_t page_size;
  /* a TILEPRESS_PAGE_FORMAT_* value (1 or more). */
  int32_t page_format;
  /* factor of the scores before the softmax; finite and above 0. */
  float sm_scale;
  /* zero (0 to 0). */
  uint32_t reserved;
} tilepress_prefill_args;

/* Arguments of tilepress_merge_states. */
typedef struct tilepress_merge_states_args {
  /* sizeof this struct, in bytes; anything else is refused. */
  uint64_t struct_size;
  /* attention outputs over disjoint key sets, source s at s * source_stride (bf16 [num_sources, num_rows, num_heads,
   * head_dim]; device, aligned to 16 bytes). */
  const void *partials;
  /* their natural lse, source s at s * lse_stride (float [num_sources, num_rows, num_heads]; device). */
  const float *partial_lse;
  /* attention over the union; must not overlap partials (bf16 [num_rows, num_heads, head_dim]; device, aligned to 16
   * bytes). */
  void *out;
  /* the union's natural lse; must not overlap partial_lse (float [num_rows, num_heads]; device, optional). */
  float *lse;
  /* a cudaStream_t of the current device; null is the default stream (host, optional). */
  void *stream;
  /* elements from one source of partials to the next (0 or more, a multiple of 8). */
  int64_t source_stride;
  /* elements from one source of partial_lse to the next (0 or more). */
  int64_t lse_stride;
  /* sources (1 to 1024). */
  int32_t num_sources;
  /* rows (0 or more). */
  int32_t num_rows;
  /* query heads (1 or more). */
  int32_t num_heads;
  /* columns a head (8 to 65536, a multiple of 8). */
  int32_t head_dim;
} tilepress_merge_states_args;

/* Arguments of the prompt preps. Zero the struct, set struct_size, then the fields. */
typedef struct tilepress_prep_prompt_args {
  /* sizeof this struct, in bytes; anything else is refused. */
  uint64_t struct_size;
  /* rows that hold the q projection as a column band (bf16 [rows, q_row_stride]; device, aligned to 16 bytes). */
  const void *q_in;
  /* rows that hold the k projection; absent where the layer shares an earlier one's KV: then Q alone is prepared,
   * and the fields of k, v and the pool are checked but not used (bf16 [rows, k_row_stride]; device, optional,
   * aligned to 16 bytes). */
  const void *k_in;
  /* rows that hold the v projection; absent with k_eq_v (bf16 [rows, v_row_stride]; device, optional, aligned to 16
   * bytes). */
  const void *v_in;
  /* weight of q's RMS norm (bf16 [head_dim]; device, aligned to 16 bytes). */
  const void *q_norm;
  /* weight of k's RMS norm, needed with k_in (bf16 [head_dim]; device, optional, aligned to 16 bytes). */
  const void *k_norm;
  /* cos of position times inverse frequency, by position and RoPE pair (float [max_positions, rotary / 2]; device,
   * aligned to 16 bytes). */
  const float *cos;
  /* sin of position times inverse frequency, by position and RoPE pair (float [max_positions, rotary / 2]; device,
   * aligned to 16 bytes). */
  const float *sin;
  /* queries for attention; must not overlap the inputs (bf16 [rows, num_q_heads, head_dim]; device, aligned to 16
   * bytes). */
  void *q_out;
  /* the KV pool, all layers, needed with k_in (bf16 [num_pages * rows_per_page, num_kv_heads, row width of the page
   * format]; device, optional, aligned to 16 bytes). */
  void *pool;
  /* pages of every request, needed with k_in; a row whose id is outside [0, num_pages) is not written to the pool
   * (int32 [num_page_ids]; device, optional). */
  const int32_t *page_ids;
  /* request r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1]), needed with k_in (int32 [batch + 1];
   * device, optional). */
  const int32_t *page_indptr;
  /* position of the first token of each page list, a multiple of page_size; absent: 0 (int32 [batch]; device,
   * optional). */
  const int32_t *kv_origin;
  /* request r has the rows [q_indptr[r], q_indptr[r + 1]) (int32 [batch + 1]; device). */
  const int32_t *q_indptr;
  /* position of each request's first row; its others follow (int32 [batch]; device). */
  const int32_t *positions;
  /* status word: bits TILEPRESS_STATUS_* are or-ed in, never cleared (uint32 [1]; device, optional). */
  uint32_t *status;
  /* a cudaStream_t of the current device; null is the default stream (host, optional). */
  void *stream;
  /* pages in the pool (1 to 2147483647). */
  int64_t num_pages;
  /* rows a page holds over all layers (1 to 2147483584, a multiple of 64). */
  int64_t rows_per_page;
  /* this layer's first row inside a page (0 to 2147483584, a multiple of 64). */
  int64_t layer_row;
  /* first column of the band in a row of q_in (0 to 2147483640, a multiple of 8). */
  int64_t q_band_offset;
  /* columns of the band: num_q_heads * head_dim (0 to 2147483640). */
  int64_t q_band_length;
  /* elements from one row of q_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of
   * 8). */
  int64_t q_row_stride;
  /* first column of the band in a row of k_in (0 to 2147483640, a multiple of 8). */
  int64_t k_band_offset;
  /* columns of the band: num_kv_heads * head_dim (0 to 2147483640). */
  int64_t k_band_length;
  /* elements from one row of k_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of
   * 8). */
  int64_t k_row_stride;
  /* first column of the band in a row of v_in (0 to 2147483640, a multiple of 8). */
  int64_t v_band_offset;
  /* columns of the band: num_kv_heads * head_dim, unless k_eq_v (0 to 2147483640). */
  int64_t v_band_length;
  /* elements from one row of v_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of
   * 8). */
  int64_t v_row_stride;
  /* rows, one a token (0 or more). */
  int32_t rows;
  /* length of page_ids (0 to 16777216). */
  int32_t num_page_ids;
  /* query heads; a multiple of num_kv_heads (1 or more). */
  int32_t num_q_heads;
  /* KV heads (1 to 65535). */
  int32_t num_kv_heads;
  /* columns a head (1 or more). */
  int32_t head_dim;
  /* tokens a page (1 or more). */
  int32_t page_size;
  /* a TILEPRESS_PAGE_FORMAT_* value (1 or more). */
  int32_t page_format;
  /* 1 where V is K's projection under a norm of its own, without a weight; else 0 (0 to 1). */
  int32_t k_eq_v;
  /* columns that turn: the RoPE pairs are (i, i + head_dim / 2) for i below rotary / 2 (2 or more, a multiple of 2). */
  int32_t rotary;
  /* positions that cos and sin hold (1 or more). */
  int32_t max_positions;
  /* added to a row's mean square; finite and above 0. */
  float eps;
  /* requests (0 or more). */
  int32_t batch;
} tilepress_prep_prompt_args;

/* Arguments of the decode preps. Zero the struct, set struct_size, then the fields. */
typedef struct tilepress_prep_decode_args {
  /* sizeof this struct, in bytes; anything else is refused. */
  uint64_t struct_size;
  /* rows that hold the q projection as a column band (bf16 [rows, q_row_stride]; device, aligned to 16 bytes). */
  const void *q_in;
  /* rows that hold the k projection; absent where the layer shares an earlier one's KV: then Q alone is prepared,
   * and the fields of k, v and the pool are checked but not used (bf16 [rows, k_row_stride]; device, optional,
   * aligned to 16 bytes). */
  const void *k_in;
  /* rows that hold the v projection; absent with k_eq_v (bf16 [rows, v_row_stride]; device, optional, aligned to 16
   * bytes). */
  const void *v_in;
  /* weight of q's RMS norm (bf16 [head_dim]; device, aligned to 16 bytes). */
  const void *q_norm;
  /* weight of k's RMS norm, needed with k_in (bf16 [head_dim]; device, optional, aligned to 16 bytes). */
  const void *k_norm;
  /* cos of position times inverse frequency, by position and RoPE pair (float [max_positions, rotary / 2]; device,
   * aligned to 16 bytes). */
  const float *cos;
  /* sin of position times inverse frequency, by position and RoPE pair (float [max_positions, rotary / 2]; device,
   * aligned to 16 bytes). */
  const float *sin;
  /* queries for attention; must not overlap the inputs (bf16 [rows, num_q_heads, head_dim]; device, aligned to 16
   * bytes). */
  void *q_out;
  /* the KV pool, all layers, needed with k_in (bf16 [num_pages * rows_per_page, num_kv_heads, row width of the page
   * format]; device, optional, aligned to 16 bytes). */
  void *pool;
  /* pages of every request, needed with k_in; a row whose id is outside [0, num_pages) is not written to the pool
   * (int32 [num_page_ids]; device, optional). */
  const int32_t *page_ids;
  /* row r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1]), needed with k_in (int32 [rows + 1]; device,
   * optional). */
  const int32_t *page_indptr;
  /* position of the first token of each page list, a multiple of page_size; absent: 0 (int32 [rows]; device,
   * optional). */
  const int32_t *kv_origin;
  /* position of each row's token (int32 [rows]; device). */
  const int32_t *positions;
  /* status word: bits TILEPRESS_STATUS_* are or-ed in, never cleared (uint32 [1]; device, optional). */
  uint32_t *status;
  /* a cudaStream_t of the current device; null is the default stream (host, optional). */
  void *stream;
  /* pages in the pool (1 to 2147483647). */
  int64_t num_pages;
  /* rows a page holds over all layers (1 to 2147483584, a multiple of 64). */
  int64_t rows_per_page;
  /* this layer's first row inside a page (0 to 2147483584, a multiple of 64). */
  int64_t layer_row;
  /* first column of the band in a row of q_in (0 to 2147483640, a multiple of 8). */
  int64_t q_band_offset;
  /* columns of the band: num_q_heads * head_dim (0 to 2147483640). */
  int64_t q_band_length;
  /* elements from one row of q_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of
   * 8). */
  int64_t q_row_stride;
  /* first column of the band in a row of k_in (0 to 2147483640, a multiple of 8). */
  int64_t k_band_offset;
  /* columns of the band: num_kv_heads * head_dim (0 to 2147483640). */
  int64_t k_band_length;
  /* elements from one row of k_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of
   * 8). */
  int64_t k_row_stride;
  /* first column of the band in a row of v_in (0 to 2147483640, a multiple of 8). */
  int64_t v_band_offset;
  /* columns of the band: num_kv_heads * head_dim, unless k_eq_v (0 to 2147483640). */
  int64_t v_band_length;
  /* elements from one row of v_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of
   * 8). */
  int64_t v_row_stride;
  /* rows, one a token (0 or more). */
  int32_t rows;
  /* length of page_ids (0 to 16777216). */
  int32_t num_page_ids;
  /* query heads; a multiple of num_kv_heads (1 or more). */
  int32_t num_q_heads;
  /* KV heads (1 to 65535). */
  int32_t num_kv_heads;
  /* columns a head (1 or more). */
  int32_t head_dim;
  /* tokens a page (1 or more). */
  int32_t page_size;
  /* a TILEPRESS_PAGE_FORMAT_* value (1 or more). */
  int32_t page_format;
  /* 1 where V is K's projection under a norm of its own, without a weight; else 0 (0 to 1). */
  int32_t k_eq_v;
  /* columns that turn: the RoPE pairs are (i, i + head_dim / 2) for i below rotary / 2 (2 or more, a multiple of 2). */
  int32_t rotary;
  /* positions that cos and sin hold (1 or more). */
  int32_t max_positions;
  /* added to a row's mean square; finite and above 0. */
  float eps;
  /* zero (0 to 0). */
  uint32_t reserved;
} tilepress_prep_decode_args;

/* Arguments of tilepress_gelu_mul. */
typedef struct tilepress_gelu_mul_args {
  /* sizeof this struct, in bytes; anything else is refused. */
  uint64_t struct_size;
  /* rows that hold the gate projection as a column band (bf16 [rows, gate_row_stride]; device, aligned to 16 bytes). */
  const void *gate_in;
  /* rows that hold the up projection as a column band (bf16 [rows, up_row_stride]; device, aligned to 16 bytes). */
  const void *up_in;
  /* gelu_tanh(gate) * up; must not overlap gate_in or up_in (bf16 [rows, columns]; device, aligned to 16 bytes). */
  void *out;
  /* a cudaStream_t of the current device; null is the default stream (host, optional). */
  void *stream;
  /* first column of the band in a row of gate_in (0 to 2147483640, a multiple of 8). */
  int64_t gate_band_offset;
  /* columns of the band: columns (0 to 2147483640). */
  int64_t gate_band_length;
  /* elements from one row of gate_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of
   * 8). */
  int64_t gate_row_stride;
  /* first column of the band in a row of up_in (0 to 2147483640, a multiple of 8). */
  int64_t up_band_offset;
  /* columns of the band: columns (0 to 2147483640). */
  int64_t up_band_length;
  /* elements from one row of up_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of
   * 8). */
  int64_t up_row_stride;
  /* rows (0 or more). */
  int32_t rows;
  /* columns of out (8 to 2147483640, a multiple of 8). */
  int32_t columns;
} tilepress_gelu_mul_args;

/* Causal grouped-query attention of a ragged batch of requests over a paged KV pool. Query row i of a request with n
 * rows and a context of L tokens sees keys 0 to L - n + i: rows continue a context that is already in the pool,
 * their own keys included. A row that sees no key gives zeros and lse = -inf. A request without rows does nothing.
 * Rows that no request owns are neither read into a result nor written. Compiled for head_dim 512, page_size 64,
 * page formats split, groups (num_q_heads / num_kv_heads) 8. Returns a TILEPRESS_* code. */
int tilepress_sample_prefill(const tilepress_prefill_args *args);

/* Combines attention outputs over disjoint sets of keys, by their lse, into attention over the union: a context
 * sharded over GPUs, or a shared prefix. A source whose lse is -inf weighs nothing; a row that no source saw gives
 * zeros and lse = -inf. The order of the sources is the order of the sum. Returns a TILEPRESS_* code. */
int tilepress_merge_states(const tilepress_merge_states_args *args);

/* Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and
 * v_in may be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed
 * without a weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and
 * rounded. Global layers, head_dim 512, split or folded pages. With k_eq_v V is K's row under the same inverse RMS.
 * For folded pages Q carries k_norm's weight on the columns that a folded row does not keep rotated: [64, 256) and
 * [320, 512). Rows are a ragged batch of prompts, consecutive positions each; rows that no request owns are not
 * written. A row whose position the cos and sin tables do not hold is skipped; one whose position lies outside its
 * page list, or whose page lies outside the pool, has its Q written but not its K and V: status bits tell. A row's
 * bits depend on that row alone. Returns a TILEPRESS_* code. */
int tilepress_prep_global_prompt(const tilepress_prep_prompt_args *args);

/* Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and
 * v_in may be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed
 * without a weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and
 * rounded. Global layers, head_dim 512, split or folded pages. With k_eq_v V is K's row under the same inverse RMS.
 * For folded pages Q carries k_norm's weight on the columns that a folded row does not keep rotated: [64, 256) and
 * [320, 512). Every row is one request's next token. A row whose position the cos and sin tables do not hold is
 * skipped; one whose position lies outside its page list, or whose page lies outside the pool, has its Q written but
 * not its K and V: status bits tell. A row's bits depend on that row alone. Returns a TILEPRESS_* code. */
int tilepress_prep_global_decode(const tilepress_prep_decode_args *args);

/* Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and
 * v_in may be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed
 * without a weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and
 * rounded. Sliding layers, head_dim 256, split pages. Rows are a ragged batch of prompts, consecutive positions
 * each; rows that no request owns are not written. A row whose position the cos and sin tables do not hold is
 * skipped; one whose position lies outside its page list, or whose page lies outside the pool, has its Q written but
 * not its K and V: status bits tell. A row's bits depend on that row alone. Returns a TILEPRESS_* code. */
int tilepress_prep_sliding_prompt(const tilepress_prep_prompt_args *args);

/* Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and
 * v_in may be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed
 * without a weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and
 * rounded. Sliding layers, head_dim 256, split pages. Every row is one request's next token. A row whose position
 * the cos and sin tables do not hold is skipped; one whose position lies outside its page list, or whose page lies
 * outside the pool, has its Q written but not its K and V: status bits tell. A row's bits depend on that row alone.
 * Returns a TILEPRESS_* code. */
int tilepress_prep_sliding_decode(const tilepress_prep_decode_args *args);

/* The activation of a gated MLP, gelu_tanh(gate) * up, of rows that may be stacked in one fused row: gate_in and
 * up_in may be one buffer. gelu_tanh is computed in fp32 and rounded to bf16 before the product, which is rounded
 * once. Returns a TILEPRESS_* code. */
int tilepress_gelu_mul(const tilepress_gelu_mul_args *args);

/* The calling thread's message of its last call that did not return TILEPRESS_OK: which argument and why. Never
 * null; valid until the thread's next call into the library. */
const char *tilepress_last_error(void);

/* The library's version, "major.minor.patch". */
const char *tilepress_version(void);

/* One line of key=value pairs: version, tier (generate or stub), arch, tilelang, nvcc, abi. */
const char *tilepress_build_info(void);

/* Whether the entry of that name has a compiled instance for this geometry: TILEPRESS_OK, or the code that the entry
 * itself would return, with the reason in tilepress_last_error(). Makes no CUDA call, so a server asks at load time
 * on any host. */
int32_t tilepress_supports(const char *entry, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t page_format);

/* Bytes of a pool of num_pages pages, each page_size tokens of num_layers layers, into *bytes. k_eq_v: 1 where K and
 * V of the model's layers are one projection, else 0; the folded format is refused without it. Returns a TILEPRESS_*
 * code. Makes no CUDA call. */
int32_t tilepress_pool_bytes(int64_t num_pages, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t page_format, int32_t k_eq_v, int64_t *bytes);

/* The mode that the knob's value names, into *mode. text: the value of PEGAINFER_GLOBAL_ATTN, null where it is
 * unset. Unset and "off" are the incumbent; 'tilelang', 'tilelang640' name themselves; anything else is refused and
 * leaves *mode as it was. Returns a TILEPRESS_* code. Makes no CUDA call and reads no environment. */
int32_t tilepress_parse_mode(const char *text, int32_t *mode);

/* tilepress_pool_bytes of the global layers' pool under a mode. The sliding layers' pool is split in every mode. */
int32_t tilepress_mode_pool_bytes(int32_t mode, int64_t num_pages, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t k_eq_v, int64_t *bytes);

/* The incumbent's entries: FlashInfer's attention behind plain parameters, under the names it always had. They refuse, fail
 * and never throw as the entries above do; bf16 data, int32 indices, sizes in elements, pointers to device memory.
 * q: queries, bf16 [rows, num_qo_heads, head_dim]; a decode has one row a request.
 * output: attention output, bf16, shaped as q.
 * kv_data: the KV pool, bf16.
 * k_offset_elems: elements from kv_data to K of page 0; a multiple of 8.
 * v_offset_elems: elements from kv_data to V of page 0; a multiple of 8.
 * page_indices: page ids, request after request.
 * page_indptr: int32 [batch_size + 1]: request r owns page_indices[page_indptr[r] : page_indptr[r + 1]].
 * last_page_len_d: int32 [batch_size]: tokens on each request's last page.
 * k_cache: keys, bf16 [num_kv_heads, max_seq_len, head_dim].
 * v_cache: values, shaped as k_cache.
 * key: keys to append, bf16 [batch_size, num_kv_heads, head_dim].
 * value: values to append, shaped as key.
 * src_k: keys to scatter, bf16; token i, head h at i * src_stride_n + h * src_stride_h.
 * src_v: values to scatter, laid out as src_k.
 * batch_indices: int32 [nnz]: the request of each token.
 * positions: int32 [nnz]: each token's position in its request.
 * q_indptr: int32 [batch_size + 1]: request r owns rows [q_indptr[r], q_indptr[r + 1]).
 * request_indices: int32 [blocks of the plan]: the request of each block.
 * qo_tile_indices: int32 [blocks of the plan]: the block's query tile in its request.
 * kv_tile_indices: int32 [blocks of the plan]: the block's KV chunk in its request.
 * kv_chunk_size_ptr: int32 [1]: tokens of a KV chunk.
 * o_indptr: int32 [batch_size + 1]: request r's partials are tmp_v[o_indptr[r] : o_indptr[r + 1]].
 * block_valid_mask: bytes [padded_batch_size]: 0 where a block has nothing to do; null: none.
 * tmp_v: partial outputs, bf16 [padded_batch_size, num_qo_heads, head_dim].
 * tmp_s: their base-2 lse, float [padded_batch_size, num_qo_heads].
 * total_num_rows: uint32 [1]: rows of all requests; read by no launch that does not split KV.
 * num_qo_heads: query heads.
 * num_kv_heads: KV heads.
 * head_dim: columns of a head.
 * page_size: tokens of a page.
 * seq_len: query rows, of all requests together: what the CTA tile is resolved from.
 * total_seq_len: query rows, of all requests together.
 * kv_len: tokens in the cache; the last seq_len of them are the queries' own.
 * max_seq_len: tokens the cache has room for in each head.
 * nnz: tokens to scatter.
 * batch_size: requests.
 * padded_batch_size: blocks of the plan, those that do nothing included.
 * stride_page: elements from one page to the next; a page's rows are [page_size, num_kv_heads, head_dim].
 * src_stride_n: elements from one token to the next; a multiple of 8.
 * src_stride_h: elements from one head to the next; a multiple of 8.
 * sm_scale: softmax scale.
 * window_left: keys seen before the query's own; -1: all.
 * cta_tile_q_override: rows of a query tile, heads of a group counted as rows; 0: resolve it.
 * stream: a cudaStream_t.
 */

/* Decode over paged KV, one block a request and KV head. Returns a TILEPRESS_* code. */
int paged_attention_decode_cuda(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t batch_size, int64_t stride_page, float sm_scale, void *stream);

/* Decode over paged KV whose requests the plan cuts into chunks; the partials are merged after. Returns a
 * TILEPRESS_* code. */
int paged_attention_decode_split_kv_cuda(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, int32_t *o_indptr, uint8_t *block_valid_mask, void *tmp_v, float *tmp_s, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t batch_size, int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);

/* Writes each request's last token, one that page_indptr and last_page_len_d already count, into the pool. Returns a
 * TILEPRESS_* code. */
int paged_kv_append_cuda(void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, void *key, void *value, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t batch_size, int64_t stride_page, void *stream);

/* Writes nnz tokens into the pool, each at a request and a position. Returns a TILEPRESS_* code. */
int paged_kv_scatter_cuda(void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, void *src_k, void *src_v, int32_t *batch_indices, int32_t *positions, int32_t nnz, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int64_t stride_page, int64_t src_stride_n, int64_t src_stride_h, void *stream);

/* Query tiles of seq_len rows. Returns the count, or -1. Makes no CUDA call. */
int32_t batch_prefill_paged_num_tiles(int32_t seq_len, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim);

/* Query tiles of seq_len rows, of a given tile. Returns the count, or -1. Makes no CUDA call. */
int32_t batch_prefill_paged_num_tiles_with_cta_tile_q(int32_t seq_len, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t cta_tile_q_override);

/* Rows of the query tile that a prefill of that many rows is launched with. Returns the count, or -1. Makes no CUDA
 * call. */
int32_t batch_prefill_cta_tile_q(int32_t total_seq_len, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim);

/* Rows of the query tile that a prefill with that override is launched with. Returns the count, or -1. Makes no CUDA
 * call. */
int32_t batch_prefill_cta_tile_q_with_override(int32_t total_seq_len, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t cta_tile_q_override);

/* Causal prefill over paged KV. The plan must have been made for the same tile. Returns a TILEPRESS_* code. */
int batch_prefill_paged_cuda_with_cta_tile_q(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices, int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size, int32_t padded_batch_size, int64_t stride_page, float sm_scale, int32_t cta_tile_q_override, void *stream);

/* Causal prefill over paged KV. Returns a TILEPRESS_* code. */
int batch_prefill_paged_cuda(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices, int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size, int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);

/* Causal prefill of one request over contiguous KV. Returns a TILEPRESS_* code. */
int single_prefill_cuda(void *q, void *output, void *k_cache, void *v_cache, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t seq_len, int32_t kv_len, int32_t max_seq_len, float sm_scale, void *stream);

/* Causal prefill of one request over contiguous KV. At head_dim 256. Returns a TILEPRESS_* code. */
int single_prefill_cuda_hd256(void *q, void *output, void *k_cache, void *v_cache, int32_t num_qo_heads, int32_t num_kv_heads, int32_t seq_len, int32_t kv_len, int32_t max_seq_len, float sm_scale, void *stream);

/* Decode over paged KV, one block a request and KV head. At head_dim 256. Returns a TILEPRESS_* code. */
int paged_attention_decode_cuda_hd256(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t batch_size, int64_t stride_page, float sm_scale, void *stream);

/* Decode over paged KV, one block a request and KV head. At head_dim 256. A row sees its own position and the
 * window_left before it. Returns a TILEPRESS_* code. */
int paged_attention_decode_window_cuda_hd256(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t batch_size, int64_t stride_page, float sm_scale, int32_t window_left, void *stream);

/* Causal prefill over paged KV. At head_dim 256. Returns a TILEPRESS_* code. */
int batch_prefill_paged_cuda_hd256(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices, int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size, int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);

/* Causal prefill over paged KV. At head_dim 256. A row sees its own position and the window_left before it. Returns
 * a TILEPRESS_* code. */
int batch_prefill_paged_window_cuda_hd256(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices, int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size, int32_t padded_batch_size, int64_t stride_page, float sm_scale, int32_t window_left, void *stream);

/* Decode over paged KV whose requests the plan cuts into chunks; the partials are merged after. At head_dim 512.
 * Returns a TILEPRESS_* code. */
int paged_attention_decode_split_kv_cuda_hd512(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *request_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, int32_t *o_indptr, uint8_t *block_valid_mask, void *tmp_v, float *tmp_s, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t batch_size, int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);

/* Causal prefill of one request over contiguous KV. At head_dim 512. Returns a TILEPRESS_* code. */
int single_prefill_cuda_hd512(void *q, void *output, void *k_cache, void *v_cache, int32_t num_qo_heads, int32_t num_kv_heads, int32_t seq_len, int32_t kv_len, int32_t max_seq_len, float sm_scale, void *stream);

/* Causal prefill over paged KV. At head_dim 512. Returns a TILEPRESS_* code. */
int batch_prefill_paged_cuda_hd512(void *q, void *output, void *kv_data, int64_t k_offset_elems, int64_t v_offset_elems, int32_t *page_indices, int32_t *page_indptr, int32_t *last_page_len_d, int32_t *q_indptr, int32_t *request_indices, int32_t *qo_tile_indices, int32_t *kv_tile_indices, int32_t *kv_chunk_size_ptr, uint32_t *total_num_rows, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t seq_len, int32_t batch_size, int32_t padded_batch_size, int64_t stride_page, float sm_scale, void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TILEPRESS_H */
