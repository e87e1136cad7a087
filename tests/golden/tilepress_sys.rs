// tilepress 0.1.0: the C ABI of tilepress.h for Rust. Rendered from codegen/abi; do not edit.
// Use it with include!(concat!(env!("TILEPRESS_RUST"), "/tilepress_sys.rs")) or as a module of its own.
#[allow(dead_code, non_camel_case_types)]
pub mod tilepress_sys {
    use core::ffi::{c_char, c_int, c_void};

    pub const VERSION: &str = "0.1.0";

    /// done: the work is on the stream
    pub const OK: c_int = 0;
    /// an argument is refused; nothing was launched
    pub const INVALID_ARGUMENT: c_int = 1;
    /// no compiled instance serves these arguments; nothing was launched
    pub const UNSUPPORTED: c_int = 2;
    /// the current device is not one this library was built for; nothing was launched
    pub const DEVICE: c_int = 3;
    /// a CUDA call failed
    pub const CUDA: c_int = 4;
    /// the library was built as a stub, without kernels
    pub const STUB: c_int = 5;

    /// a page holds the layer's page_size K rows, then its page_size V rows; row width head_dim
    pub const PAGE_FORMAT_SPLIT: i32 = 1;
    /// a page holds page_size rows [K_rot 128 | V head_dim]; K_rot is rotated K at columns [0, 64), then at [head_dim / 2, head_dim / 2 + 64); the query carries K's norm weight elsewhere. Only where K and V are one projection (k_eq_v)
    pub const PAGE_FORMAT_FOLDED: i32 = 2;

    /// the incumbent's kernels; the global pool is split (the knob's 'off')
    pub const MODE_INCUMBENT: i32 = 1;
    /// generated kernels; the global pool is split (the knob's 'tilelang')
    pub const MODE_TILELANG: i32 = 2;
    /// generated kernels; the global pool is folded (the knob's 'tilelang640')
    pub const MODE_TILELANG640: i32 = 3;

    /// a page id lies outside the pool; its keys were masked, or not written
    pub const STATUS_BAD_PAGE_ID: u32 = 1;
    /// an index pointer, a last page length or an origin that a tile or row used lies outside its range; it was clamped, or the row was not written
    pub const STATUS_BAD_INDEX: u32 = 2;
    /// a window reaches before the request's page list; the keys before it were masked
    pub const STATUS_BAD_WINDOW: u32 = 4;
    /// a position lies outside the cos and sin tables, and its row was not written, or outside its page list, and its K and V were not written
    pub const STATUS_BAD_POSITION: u32 = 8;

    /// Arguments of every prefill entry. Zero the struct, set struct_size, then the fields.
    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    pub struct tilepress_prefill_args {
        /// sizeof this struct, in bytes; anything else is refused.
        pub struct_size: u64,
        /// queries (bf16 [q_rows, num_q_heads, head_dim]; device, aligned to 16 bytes).
        pub q: *const c_void,
        /// attention output; must not overlap q or pool (bf16 [q_rows, num_q_heads, head_dim]; device, aligned to 16 bytes).
        pub out: *mut c_void,
        /// natural logarithm of the sum of exponentials (float [q_rows, num_q_heads]; device, optional).
        pub lse: *mut f32,
        /// the KV pool, all layers (bf16 [num_pages * rows_per_page, num_kv_heads, row width of the page format]; device, aligned to 16 bytes).
        pub pool: *const c_void,
        /// pages of every request, one request after another; an id outside [0, num_pages) reads as masked keys (int32 [num_page_ids]; device).
        pub page_ids: *const i32,
        /// request r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1]) (int32 [batch + 1]; device).
        pub page_indptr: *const i32,
        /// tokens in each request's last page, 1 to page_size; later slots may hold anything, NaN included (int32 [batch]; device).
        pub last_page_len: *const i32,
        /// request r has the query rows [q_indptr[r], q_indptr[r + 1]) (int32 [batch + 1]; device).
        pub q_indptr: *const i32,
        /// a host copy of q_indptr, checked and used to size the grid. Without it the grid covers every q_indptr within q_rows and batch: capture a CUDA graph so, and replay it with other plans (int32 [batch + 1]; host, optional).
        pub q_indptr_host: *const i32,
        /// status word: bits TILEPRESS_STATUS_* are or-ed in, never cleared (uint32 [1]; device, optional).
        pub status: *mut u32,
        /// a cudaStream_t of the current device; null is the default stream (host, optional).
        pub stream: *mut c_void,
        /// pages in the pool (1 to 2147483647).
        pub num_pages: i64,
        /// rows a page holds over all layers (1 to 2147483584, a multiple of 64).
        pub rows_per_page: i64,
        /// this layer's first row inside a page (0 to 2147483584, a multiple of 64).
        pub layer_row: i64,
        /// rows of q, out and lse (0 or more).
        pub q_rows: i32,
        /// length of page_ids (0 to 16777216).
        pub num_page_ids: i32,
        /// requests (0 or more).
        pub batch: i32,
        /// query heads; a multiple of num_kv_heads (1 or more).
        pub num_q_heads: i32,
        /// KV heads (1 to 65535).
        pub num_kv_heads: i32,
        /// columns a head (1 or more).
        pub head_dim: i32,
        /// tokens a page (1 or more).
        pub page_size: i32,
        /// a TILEPRESS_PAGE_FORMAT_* value (1 or more).
        pub page_format: i32,
        /// factor of the scores before the softmax; finite and above 0.
        pub sm_scale: f32,
        /// zero (0 to 0).
        pub reserved: u32,
    }

    impl Default for tilepress_prefill_args {
        /// All fields absent (zero), struct_size set.
        fn default() -> Self {
            // Integers, floats and raw pointers: all-zero bytes are a valid value of each.
            let mut args: Self = unsafe { core::mem::zeroed() };
            args.struct_size = core::mem::size_of::<Self>() as u64;
            args
        }
    }

    /// Arguments of tilepress_merge_states.
    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    pub struct tilepress_merge_states_args {
        /// sizeof this struct, in bytes; anything else is refused.
        pub struct_size: u64,
        /// attention outputs over disjoint key sets, source s at s * source_stride (bf16 [num_sources, num_rows, num_heads, head_dim]; device, aligned to 16 bytes).
        pub partials: *const c_void,
        /// their natural lse, source s at s * lse_stride (float [num_sources, num_rows, num_heads]; device).
        pub partial_lse: *const f32,
        /// attention over the union; must not overlap partials (bf16 [num_rows, num_heads, head_dim]; device, aligned to 16 bytes).
        pub out: *mut c_void,
        /// the union's natural lse; must not overlap partial_lse (float [num_rows, num_heads]; device, optional).
        pub lse: *mut f32,
        /// a cudaStream_t of the current device; null is the default stream (host, optional).
        pub stream: *mut c_void,
        /// elements from one source of partials to the next (0 or more, a multiple of 8).
        pub source_stride: i64,
        /// elements from one source of partial_lse to the next (0 or more).
        pub lse_stride: i64,
        /// sources (1 to 1024).
        pub num_sources: i32,
        /// rows (0 or more).
        pub num_rows: i32,
        /// query heads (1 or more).
        pub num_heads: i32,
        /// columns a head (8 to 65536, a multiple of 8).
        pub head_dim: i32,
    }

    impl Default for tilepress_merge_states_args {
        /// All fields absent (zero), struct_size set.
        fn default() -> Self {
            // Integers, floats and raw pointers: all-zero bytes are a valid value of each.
            let mut args: Self = unsafe { core::mem::zeroed() };
            args.struct_size = core::mem::size_of::<Self>() as u64;
            args
        }
    }

    /// Arguments of the prompt preps. Zero the struct, set struct_size, then the fields.
    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    pub struct tilepress_prep_prompt_args {
        /// sizeof this struct, in bytes; anything else is refused.
        pub struct_size: u64,
        /// rows that hold the q projection as a column band (bf16 [rows, q_row_stride]; device, aligned to 16 bytes).
        pub q_in: *const c_void,
        /// rows that hold the k projection; absent where the layer shares an earlier one's KV: then Q alone is prepared, and the fields of k, v and the pool are checked but not used (bf16 [rows, k_row_stride]; device, optional, aligned to 16 bytes).
        pub k_in: *const c_void,
        /// rows that hold the v projection; absent with k_eq_v (bf16 [rows, v_row_stride]; device, optional, aligned to 16 bytes).
        pub v_in: *const c_void,
        /// weight of q's RMS norm (bf16 [head_dim]; device, aligned to 16 bytes).
        pub q_norm: *const c_void,
        /// weight of k's RMS norm, needed with k_in (bf16 [head_dim]; device, optional, aligned to 16 bytes).
        pub k_norm: *const c_void,
        /// cos of position times inverse frequency, by position and RoPE pair (float [max_positions, rotary / 2]; device, aligned to 16 bytes).
        pub cos: *const f32,
        /// sin of position times inverse frequency, by position and RoPE pair (float [max_positions, rotary / 2]; device, aligned to 16 bytes).
        pub sin: *const f32,
        /// queries for attention; must not overlap the inputs (bf16 [rows, num_q_heads, head_dim]; device, aligned to 16 bytes).
        pub q_out: *mut c_void,
        /// the KV pool, all layers, needed with k_in (bf16 [num_pages * rows_per_page, num_kv_heads, row width of the page format]; device, optional, aligned to 16 bytes).
        pub pool: *mut c_void,
        /// pages of every request, needed with k_in; a row whose id is outside [0, num_pages) is not written to the pool (int32 [num_page_ids]; device, optional).
        pub page_ids: *const i32,
        /// request r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1]), needed with k_in (int32 [batch + 1]; device, optional).
        pub page_indptr: *const i32,
        /// position of the first token of each page list, a multiple of page_size; absent: 0 (int32 [batch]; device, optional).
        pub kv_origin: *const i32,
        /// request r has the rows [q_indptr[r], q_indptr[r + 1]) (int32 [batch + 1]; device).
        pub q_indptr: *const i32,
        /// position of each request's first row; its others follow (int32 [batch]; device).
        pub positions: *const i32,
        /// status word: bits TILEPRESS_STATUS_* are or-ed in, never cleared (uint32 [1]; device, optional).
        pub status: *mut u32,
        /// a cudaStream_t of the current device; null is the default stream (host, optional).
        pub stream: *mut c_void,
        /// pages in the pool (1 to 2147483647).
        pub num_pages: i64,
        /// rows a page holds over all layers (1 to 2147483584, a multiple of 64).
        pub rows_per_page: i64,
        /// this layer's first row inside a page (0 to 2147483584, a multiple of 64).
        pub layer_row: i64,
        /// first column of the band in a row of q_in (0 to 2147483640, a multiple of 8).
        pub q_band_offset: i64,
        /// columns of the band: num_q_heads * head_dim (0 to 2147483640).
        pub q_band_length: i64,
        /// elements from one row of q_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of 8).
        pub q_row_stride: i64,
        /// first column of the band in a row of k_in (0 to 2147483640, a multiple of 8).
        pub k_band_offset: i64,
        /// columns of the band: num_kv_heads * head_dim (0 to 2147483640).
        pub k_band_length: i64,
        /// elements from one row of k_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of 8).
        pub k_row_stride: i64,
        /// first column of the band in a row of v_in (0 to 2147483640, a multiple of 8).
        pub v_band_offset: i64,
        /// columns of the band: num_kv_heads * head_dim, unless k_eq_v (0 to 2147483640).
        pub v_band_length: i64,
        /// elements from one row of v_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of 8).
        pub v_row_stride: i64,
        /// rows, one a token (0 or more).
        pub rows: i32,
        /// length of page_ids (0 to 16777216).
        pub num_page_ids: i32,
        /// query heads; a multiple of num_kv_heads (1 or more).
        pub num_q_heads: i32,
        /// KV heads (1 to 65535).
        pub num_kv_heads: i32,
        /// columns a head (1 or more).
        pub head_dim: i32,
        /// tokens a page (1 or more).
        pub page_size: i32,
        /// a TILEPRESS_PAGE_FORMAT_* value (1 or more).
        pub page_format: i32,
        /// 1 where V is K's projection under a norm of its own, without a weight; else 0 (0 to 1).
        pub k_eq_v: i32,
        /// columns that turn: the RoPE pairs are (i, i + head_dim / 2) for i below rotary / 2 (2 or more, a multiple of 2).
        pub rotary: i32,
        /// positions that cos and sin hold (1 or more).
        pub max_positions: i32,
        /// added to a row's mean square; finite and above 0.
        pub eps: f32,
        /// requests (0 or more).
        pub batch: i32,
    }

    impl Default for tilepress_prep_prompt_args {
        /// All fields absent (zero), struct_size set.
        fn default() -> Self {
            // Integers, floats and raw pointers: all-zero bytes are a valid value of each.
            let mut args: Self = unsafe { core::mem::zeroed() };
            args.struct_size = core::mem::size_of::<Self>() as u64;
            args
        }
    }

    /// Arguments of the decode preps. Zero the struct, set struct_size, then the fields.
    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    pub struct tilepress_prep_decode_args {
        /// sizeof this struct, in bytes; anything else is refused.
        pub struct_size: u64,
        /// rows that hold the q projection as a column band (bf16 [rows, q_row_stride]; device, aligned to 16 bytes).
        pub q_in: *const c_void,
        /// rows that hold the k projection; absent where the layer shares an earlier one's KV: then Q alone is prepared, and the fields of k, v and the pool are checked but not used (bf16 [rows, k_row_stride]; device, optional, aligned to 16 bytes).
        pub k_in: *const c_void,
        /// rows that hold the v projection; absent with k_eq_v (bf16 [rows, v_row_stride]; device, optional, aligned to 16 bytes).
        pub v_in: *const c_void,
        /// weight of q's RMS norm (bf16 [head_dim]; device, aligned to 16 bytes).
        pub q_norm: *const c_void,
        /// weight of k's RMS norm, needed with k_in (bf16 [head_dim]; device, optional, aligned to 16 bytes).
        pub k_norm: *const c_void,
        /// cos of position times inverse frequency, by position and RoPE pair (float [max_positions, rotary / 2]; device, aligned to 16 bytes).
        pub cos: *const f32,
        /// sin of position times inverse frequency, by position and RoPE pair (float [max_positions, rotary / 2]; device, aligned to 16 bytes).
        pub sin: *const f32,
        /// queries for attention; must not overlap the inputs (bf16 [rows, num_q_heads, head_dim]; device, aligned to 16 bytes).
        pub q_out: *mut c_void,
        /// the KV pool, all layers, needed with k_in (bf16 [num_pages * rows_per_page, num_kv_heads, row width of the page format]; device, optional, aligned to 16 bytes).
        pub pool: *mut c_void,
        /// pages of every request, needed with k_in; a row whose id is outside [0, num_pages) is not written to the pool (int32 [num_page_ids]; device, optional).
        pub page_ids: *const i32,
        /// row r has the pages page_ids[page_indptr[r] .. page_indptr[r + 1]), needed with k_in (int32 [rows + 1]; device, optional).
        pub page_indptr: *const i32,
        /// position of the first token of each page list, a multiple of page_size; absent: 0 (int32 [rows]; device, optional).
        pub kv_origin: *const i32,
        /// position of each row's token (int32 [rows]; device).
        pub positions: *const i32,
        /// status word: bits TILEPRESS_STATUS_* are or-ed in, never cleared (uint32 [1]; device, optional).
        pub status: *mut u32,
        /// a cudaStream_t of the current device; null is the default stream (host, optional).
        pub stream: *mut c_void,
        /// pages in the pool (1 to 2147483647).
        pub num_pages: i64,
        /// rows a page holds over all layers (1 to 2147483584, a multiple of 64).
        pub rows_per_page: i64,
        /// this layer's first row inside a page (0 to 2147483584, a multiple of 64).
        pub layer_row: i64,
        /// first column of the band in a row of q_in (0 to 2147483640, a multiple of 8).
        pub q_band_offset: i64,
        /// columns of the band: num_q_heads * head_dim (0 to 2147483640).
        pub q_band_length: i64,
        /// elements from one row of q_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of 8).
        pub q_row_stride: i64,
        /// first column of the band in a row of k_in (0 to 2147483640, a multiple of 8).
        pub k_band_offset: i64,
        /// columns of the band: num_kv_heads * head_dim (0 to 2147483640).
        pub k_band_length: i64,
        /// elements from one row of k_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of 8).
        pub k_row_stride: i64,
        /// first column of the band in a row of v_in (0 to 2147483640, a multiple of 8).
        pub v_band_offset: i64,
        /// columns of the band: num_kv_heads * head_dim, unless k_eq_v (0 to 2147483640).
        pub v_band_length: i64,
        /// elements from one row of v_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of 8).
        pub v_row_stride: i64,
        /// rows, one a token (0 or more).
        pub rows: i32,
        /// length of page_ids (0 to 16777216).
        pub num_page_ids: i32,
        /// query heads; a multiple of num_kv_heads (1 or more).
        pub num_q_heads: i32,
        /// KV heads (1 to 65535).
        pub num_kv_heads: i32,
        /// columns a head (1 or more).
        pub head_dim: i32,
        /// tokens a page (1 or more).
        pub page_size: i32,
        /// a TILEPRESS_PAGE_FORMAT_* value (1 or more).
        pub page_format: i32,
        /// 1 where V is K's projection under a norm of its own, without a weight; else 0 (0 to 1).
        pub k_eq_v: i32,
        /// columns that turn: the RoPE pairs are (i, i + head_dim / 2) for i below rotary / 2 (2 or more, a multiple of 2).
        pub rotary: i32,
        /// positions that cos and sin hold (1 or more).
        pub max_positions: i32,
        /// added to a row's mean square; finite and above 0.
        pub eps: f32,
        /// zero (0 to 0).
        pub reserved: u32,
    }

    impl Default for tilepress_prep_decode_args {
        /// All fields absent (zero), struct_size set.
        fn default() -> Self {
            // Integers, floats and raw pointers: all-zero bytes are a valid value of each.
            let mut args: Self = unsafe { core::mem::zeroed() };
            args.struct_size = core::mem::size_of::<Self>() as u64;
            args
        }
    }

    /// Arguments of tilepress_gelu_mul.
    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    pub struct tilepress_gelu_mul_args {
        /// sizeof this struct, in bytes; anything else is refused.
        pub struct_size: u64,
        /// rows that hold the gate projection as a column band (bf16 [rows, gate_row_stride]; device, aligned to 16 bytes).
        pub gate_in: *const c_void,
        /// rows that hold the up projection as a column band (bf16 [rows, up_row_stride]; device, aligned to 16 bytes).
        pub up_in: *const c_void,
        /// gelu_tanh(gate) * up; must not overlap gate_in or up_in (bf16 [rows, columns]; device, aligned to 16 bytes).
        pub out: *mut c_void,
        /// a cudaStream_t of the current device; null is the default stream (host, optional).
        pub stream: *mut c_void,
        /// first column of the band in a row of gate_in (0 to 2147483640, a multiple of 8).
        pub gate_band_offset: i64,
        /// columns of the band: columns (0 to 2147483640).
        pub gate_band_length: i64,
        /// elements from one row of gate_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of 8).
        pub gate_row_stride: i64,
        /// first column of the band in a row of up_in (0 to 2147483640, a multiple of 8).
        pub up_band_offset: i64,
        /// columns of the band: columns (0 to 2147483640).
        pub up_band_length: i64,
        /// elements from one row of up_in to the next, which is the length of a fused row (0 to 2147483640, a multiple of 8).
        pub up_row_stride: i64,
        /// rows (0 or more).
        pub rows: i32,
        /// columns of out (8 to 2147483640, a multiple of 8).
        pub columns: i32,
    }

    impl Default for tilepress_gelu_mul_args {
        /// All fields absent (zero), struct_size set.
        fn default() -> Self {
            // Integers, floats and raw pointers: all-zero bytes are a valid value of each.
            let mut args: Self = unsafe { core::mem::zeroed() };
            args.struct_size = core::mem::size_of::<Self>() as u64;
            args
        }
    }

    unsafe extern "C" {
        /// Causal grouped-query attention of a ragged batch of requests over a paged KV pool. Query row i of a request with n rows and a context of L tokens sees keys 0 to L - n + i: rows continue a context that is already in the pool, their own keys included. A row that sees no key gives zeros and lse = -inf. A request without rows does nothing. Rows that no request owns are neither read into a result nor written. Compiled for head_dim 512, page_size 64, page formats split, groups (num_q_heads / num_kv_heads) 8. Returns a TILEPRESS_* code.
        pub fn tilepress_sample_prefill(args: *const tilepress_prefill_args) -> c_int;
        /// Combines attention outputs over disjoint sets of keys, by their lse, into attention over the union: a context sharded over GPUs, or a shared prefix. A source whose lse is -inf weighs nothing; a row that no source saw gives zeros and lse = -inf. The order of the sources is the order of the sum. Returns a TILEPRESS_* code.
        pub fn tilepress_merge_states(args: *const tilepress_merge_states_args) -> c_int;
        /// Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and v_in may be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed without a weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and rounded. Global layers, head_dim 512, split or folded pages. With k_eq_v V is K's row under the same inverse RMS. For folded pages Q carries k_norm's weight on the columns that a folded row does not keep rotated: [64, 256) and [320, 512). Rows are a ragged batch of prompts, consecutive positions each; rows that no request owns are not written. A row whose position the cos and sin tables do not hold is skipped; one whose position lies outside its page list, or whose page lies outside the pool, has its Q written but not its K and V: status bits tell. A row's bits depend on that row alone. Returns a TILEPRESS_* code.
        pub fn tilepress_prep_global_prompt(args: *const tilepress_prep_prompt_args) -> c_int;
        /// Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and v_in may be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed without a weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and rounded. Global layers, head_dim 512, split or folded pages. With k_eq_v V is K's row under the same inverse RMS. For folded pages Q carries k_norm's weight on the columns that a folded row does not keep rotated: [64, 256) and [320, 512). Every row is one request's next token. A row whose position the cos and sin tables do not hold is skipped; one whose position lies outside its page list, or whose page lies outside the pool, has its Q written but not its K and V: status bits tell. A row's bits depend on that row alone. Returns a TILEPRESS_* code.
        pub fn tilepress_prep_global_decode(args: *const tilepress_prep_decode_args) -> c_int;
        /// Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and v_in may be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed without a weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and rounded. Sliding layers, head_dim 256, split pages. Rows are a ragged batch of prompts, consecutive positions each; rows that no request owns are not written. A row whose position the cos and sin tables do not hold is skipped; one whose position lies outside its page list, or whose page lies outside the pool, has its Q written but not its K and V: status bits tell. A row's bits depend on that row alone. Returns a TILEPRESS_* code.
        pub fn tilepress_prep_sliding_prompt(args: *const tilepress_prep_prompt_args) -> c_int;
        /// Prepares attention's operands from the projections' rows, which may be stacked in one fused row: q_in, k_in and v_in may be one buffer. Q = rope(norm(q) * q_norm) into a packed buffer; K = rope(norm(k) * k_norm) and V, normed without a weight, into the paged pool. A norm is in fp32 and rounded to bf16, then the rotation is in fp32 and rounded. Sliding layers, head_dim 256, split pages. Every row is one request's next token. A row whose position the cos and sin tables do not hold is skipped; one whose position lies outside its page list, or whose page lies outside the pool, has its Q written but not its K and V: status bits tell. A row's bits depend on that row alone. Returns a TILEPRESS_* code.
        pub fn tilepress_prep_sliding_decode(args: *const tilepress_prep_decode_args) -> c_int;
        /// The activation of a gated MLP, gelu_tanh(gate) * up, of rows that may be stacked in one fused row: gate_in and up_in may be one buffer. gelu_tanh is computed in fp32 and rounded to bf16 before the product, which is rounded once. Returns a TILEPRESS_* code.
        pub fn tilepress_gelu_mul(args: *const tilepress_gelu_mul_args) -> c_int;
        /// The calling thread's message of its last call that did not return TILEPRESS_OK: which argument and why. Never null; valid until the thread's next call into the library.
        pub fn tilepress_last_error() -> *const c_char;
        /// The library's version, "major.minor.patch".
        pub fn tilepress_version() -> *const c_char;
        /// One line of key=value pairs: version, tier (generate or stub), arch, tilelang, nvcc, abi.
        pub fn tilepress_build_info() -> *const c_char;
        /// Whether the entry of that name has a compiled instance for this geometry: TILEPRESS_OK, or the code that the entry itself would return, with the reason in tilepress_last_error(). Makes no CUDA call, so a server asks at load time on any host.
        pub fn tilepress_supports(entry: *const c_char, num_q_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, page_format: i32) -> i32;
        /// Bytes of a pool of num_pages pages, each page_size tokens of num_layers layers, into *bytes. k_eq_v: 1 where K and V of the model's layers are one projection, else 0; the folded format is refused without it. Returns a TILEPRESS_* code. Makes no CUDA call.
        pub fn tilepress_pool_bytes(num_pages: i64, num_layers: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, page_format: i32, k_eq_v: i32, bytes: *mut i64) -> i32;
        /// The mode that the knob's value names, into *mode. text: the value of PEGAINFER_GLOBAL_ATTN, null where it is unset. Unset and "off" are the incumbent; 'tilelang', 'tilelang640' name themselves; anything else is refused and leaves *mode as it was. Returns a TILEPRESS_* code. Makes no CUDA call and reads no environment.
        pub fn tilepress_parse_mode(text: *const c_char, mode: *mut i32) -> i32;
        /// tilepress_pool_bytes of the global layers' pool under a mode. The sliding layers' pool is split in every mode.
        pub fn tilepress_mode_pool_bytes(mode: i32, num_pages: i64, num_layers: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, k_eq_v: i32, bytes: *mut i64) -> i32;
        /// Decode over paged KV, one block a request and KV head. Returns a TILEPRESS_* code.
        pub fn paged_attention_decode_cuda(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, request_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, batch_size: i32, stride_page: i64, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Decode over paged KV whose requests the plan cuts into chunks; the partials are merged after. Returns a TILEPRESS_* code.
        pub fn paged_attention_decode_split_kv_cuda(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, request_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, o_indptr: *mut i32, block_valid_mask: *mut u8, tmp_v: *mut c_void, tmp_s: *mut f32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, batch_size: i32, padded_batch_size: i32, stride_page: i64, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Writes each request's last token, one that page_indptr and last_page_len_d already count, into the pool. Returns a TILEPRESS_* code.
        pub fn paged_kv_append_cuda(kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, key: *mut c_void, value: *mut c_void, num_kv_heads: i32, head_dim: i32, page_size: i32, batch_size: i32, stride_page: i64, stream: *mut c_void) -> c_int;
        /// Writes nnz tokens into the pool, each at a request and a position. Returns a TILEPRESS_* code.
        pub fn paged_kv_scatter_cuda(kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, src_k: *mut c_void, src_v: *mut c_void, batch_indices: *mut i32, positions: *mut i32, nnz: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, stride_page: i64, src_stride_n: i64, src_stride_h: i64, stream: *mut c_void) -> c_int;
        /// Query tiles of seq_len rows. Returns the count, or -1. Makes no CUDA call.
        pub fn batch_prefill_paged_num_tiles(seq_len: i32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32) -> i32;
        /// Query tiles of seq_len rows, of a given tile. Returns the count, or -1. Makes no CUDA call.
        pub fn batch_prefill_paged_num_tiles_with_cta_tile_q(seq_len: i32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, cta_tile_q_override: i32) -> i32;
        /// Rows of the query tile that a prefill of that many rows is launched with. Returns the count, or -1. Makes no CUDA call.
        pub fn batch_prefill_cta_tile_q(total_seq_len: i32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32) -> i32;
        /// Rows of the query tile that a prefill with that override is launched with. Returns the count, or -1. Makes no CUDA call.
        pub fn batch_prefill_cta_tile_q_with_override(total_seq_len: i32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, cta_tile_q_override: i32) -> i32;
        /// Causal prefill over paged KV. The plan must have been made for the same tile. Returns a TILEPRESS_* code.
        pub fn batch_prefill_paged_cuda_with_cta_tile_q(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, q_indptr: *mut i32, request_indices: *mut i32, qo_tile_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, total_num_rows: *mut u32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, seq_len: i32, batch_size: i32, padded_batch_size: i32, stride_page: i64, sm_scale: f32, cta_tile_q_override: i32, stream: *mut c_void) -> c_int;
        /// Causal prefill over paged KV. Returns a TILEPRESS_* code.
        pub fn batch_prefill_paged_cuda(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, q_indptr: *mut i32, request_indices: *mut i32, qo_tile_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, total_num_rows: *mut u32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, seq_len: i32, batch_size: i32, padded_batch_size: i32, stride_page: i64, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Causal prefill of one request over contiguous KV. Returns a TILEPRESS_* code.
        pub fn single_prefill_cuda(q: *mut c_void, output: *mut c_void, k_cache: *mut c_void, v_cache: *mut c_void, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, seq_len: i32, kv_len: i32, max_seq_len: i32, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Causal prefill of one request over contiguous KV. At head_dim 256. Returns a TILEPRESS_* code.
        pub fn single_prefill_cuda_hd256(q: *mut c_void, output: *mut c_void, k_cache: *mut c_void, v_cache: *mut c_void, num_qo_heads: i32, num_kv_heads: i32, seq_len: i32, kv_len: i32, max_seq_len: i32, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Decode over paged KV, one block a request and KV head. At head_dim 256. Returns a TILEPRESS_* code.
        pub fn paged_attention_decode_cuda_hd256(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, request_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, batch_size: i32, stride_page: i64, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Decode over paged KV, one block a request and KV head. At head_dim 256. A row sees its own position and the window_left before it. Returns a TILEPRESS_* code.
        pub fn paged_attention_decode_window_cuda_hd256(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, request_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, batch_size: i32, stride_page: i64, sm_scale: f32, window_left: i32, stream: *mut c_void) -> c_int;
        /// Causal prefill over paged KV. At head_dim 256. Returns a TILEPRESS_* code.
        pub fn batch_prefill_paged_cuda_hd256(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, q_indptr: *mut i32, request_indices: *mut i32, qo_tile_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, total_num_rows: *mut u32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, seq_len: i32, batch_size: i32, padded_batch_size: i32, stride_page: i64, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Causal prefill over paged KV. At head_dim 256. A row sees its own position and the window_left before it. Returns a TILEPRESS_* code.
        pub fn batch_prefill_paged_window_cuda_hd256(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, q_indptr: *mut i32, request_indices: *mut i32, qo_tile_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, total_num_rows: *mut u32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, seq_len: i32, batch_size: i32, padded_batch_size: i32, stride_page: i64, sm_scale: f32, window_left: i32, stream: *mut c_void) -> c_int;
        /// Decode over paged KV whose requests the plan cuts into chunks; the partials are merged after. At head_dim 512. Returns a TILEPRESS_* code.
        pub fn paged_attention_decode_split_kv_cuda_hd512(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, request_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, o_indptr: *mut i32, block_valid_mask: *mut u8, tmp_v: *mut c_void, tmp_s: *mut f32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, batch_size: i32, padded_batch_size: i32, stride_page: i64, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Causal prefill of one request over contiguous KV. At head_dim 512. Returns a TILEPRESS_* code.
        pub fn single_prefill_cuda_hd512(q: *mut c_void, output: *mut c_void, k_cache: *mut c_void, v_cache: *mut c_void, num_qo_heads: i32, num_kv_heads: i32, seq_len: i32, kv_len: i32, max_seq_len: i32, sm_scale: f32, stream: *mut c_void) -> c_int;
        /// Causal prefill over paged KV. At head_dim 512. Returns a TILEPRESS_* code.
        pub fn batch_prefill_paged_cuda_hd512(q: *mut c_void, output: *mut c_void, kv_data: *mut c_void, k_offset_elems: i64, v_offset_elems: i64, page_indices: *mut i32, page_indptr: *mut i32, last_page_len_d: *mut i32, q_indptr: *mut i32, request_indices: *mut i32, qo_tile_indices: *mut i32, kv_tile_indices: *mut i32, kv_chunk_size_ptr: *mut i32, total_num_rows: *mut u32, num_qo_heads: i32, num_kv_heads: i32, head_dim: i32, page_size: i32, seq_len: i32, batch_size: i32, padded_batch_size: i32, stride_page: i64, sm_scale: f32, stream: *mut c_void) -> c_int;
    }
}
