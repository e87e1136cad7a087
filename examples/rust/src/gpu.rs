//! A prefill and a decode step on a GPU through the routed entries, against the same attention in f64 on the host.

use std::ffi::{c_int, c_void};
use std::{mem, ptr};

use crate::tilepress_sys::*;
use crate::{Checks, HEAD_DIM, PAGE_SIZE, last_error, name_of, name_of_mode};

// The little of the CUDA runtime that is needed; build.rs links it.
unsafe extern "C" {
    fn cudaGetDeviceCount(count: *mut c_int) -> c_int;
    fn cudaMalloc(address: *mut *mut c_void, bytes: usize) -> c_int;
    fn cudaMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int) -> c_int;
    fn cudaFree(address: *mut c_void) -> c_int;
    fn cudaDeviceSynchronize() -> c_int;
    fn cudaGetDevice(device: *mut c_int) -> c_int;
    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
}

const CUDA_SUCCESS: c_int = 0;
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const MULTIPROCESSOR_COUNT: c_int = 16;

fn cuda(code: c_int) {
    assert!(code == CUDA_SUCCESS, "CUDA error {code}");
}

pub fn present() -> bool {
    let mut count = 0;
    unsafe { cudaGetDeviceCount(&mut count) == CUDA_SUCCESS && count > 0 }
}

/// An array on the device, a copy of one on the host; null where that is empty.
struct DeviceArray<T> {
    data: *mut T,
    len: usize,
}

impl<T: Copy + Default> DeviceArray<T> {
    fn new(host: &[T]) -> Self {
        let mut data: *mut c_void = ptr::null_mut();
        if !host.is_empty() {
            unsafe {
                cuda(cudaMalloc(&mut data, mem::size_of_val(host)));
                cuda(cudaMemcpy(data, host.as_ptr().cast(), mem::size_of_val(host), HOST_TO_DEVICE));
            }
        }
        Self { data: data.cast(), len: host.len() }
    }

    fn to_host(&self) -> Vec<T> {
        let mut host = vec![T::default(); self.len];
        unsafe {
            cuda(cudaMemcpy(
                host.as_mut_ptr().cast(),
                self.data.cast(),
                mem::size_of_val(host.as_slice()),
                DEVICE_TO_HOST,
            ));
        }
        host
    }
}

impl<T> Drop for DeviceArray<T> {
    fn drop(&mut self) {
        unsafe { cudaFree(self.data.cast()) };
    }
}

/// The bits of a bf16: the upper half of an f32.
type Bf16 = u16;

fn to_f64(value: Bf16) -> f64 {
    f32::from_bits(u32::from(value) << 16).into()
}

/// Rounds to nearest, ties to even; `value` is finite.
fn to_bf16(value: f32) -> Bf16 {
    let bits = value.to_bits();
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as Bf16
}

/// The same numbers on every host, uniform in [-1, 1).
struct Random(u64);

impl Random {
    fn next(&mut self) -> Bf16 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        to_bf16((self.0 >> 40) as f32 / 8388608.0 - 1.0)
    }
}

const COLUMNS: usize = HEAD_DIM as usize;
const PAGE: usize = PAGE_SIZE as usize;
const Q_HEADS: usize = 16;
const KV_HEADS: usize = 2;
const GROUP: usize = Q_HEADS / KV_HEADS;
const NUM_PAGES: usize = 8;
const LAYERS: usize = 2;
const LAYER: usize = 1; // the second
const OWNED_ROWS: usize = 103;
const Q_ROWS: usize = OWNED_ROWS + 5; // five rows belong to no request
const MAX_BATCH: i32 = 4;
const SCALE: f32 = 0.125;

struct Request {
    q_from: usize,
    rows: usize,
    pages: &'static [i32],
    last_page_len: usize,
}

/// A prompt of 70 tokens, and 33 tokens appended to a context that then has 150.
const REQUESTS: [Request; 2] = [
    Request { q_from: 0, rows: 70, pages: &[5, 2], last_page_len: 6 },
    Request { q_from: 70, rows: 33, pages: &[0, 7, 3], last_page_len: 22 },
];

const BATCH: usize = REQUESTS.len();

impl Request {
    fn context(&self) -> usize {
        (self.pages.len() - 1) * PAGE + self.last_page_len
    }
}

/// How a mode's pool holds a token. Split: a page has a layer's K rows, then its V rows. Folded: it has one row a token,
/// [K_rot 128 | V 512]; K_rot is what the rotation changes of K, columns 0 to 63 and 256 to 319, and K's other columns are V's.
///
/// row_width: columns of a KV head's row. layer_rows: rows of a layer in a page. k, v: from the first element of a token's row
/// to each column of its K and of its V.
#[derive(Clone)]
struct Layout {
    row_width: usize,
    layer_rows: usize,
    k: Vec<usize>,
    v: Vec<usize>,
}

impl Layout {
    fn new(mode: i32) -> Self {
        const HALF: usize = COLUMNS / 2;
        const ROTATED: usize = 64; // columns of each half
        if mode == MODE_TILELANG640 {
            let v = |column| 2 * ROTATED + column;
            let k = |column| {
                let (half, at) = (column / HALF, column % HALF);
                if at < ROTATED { half * ROTATED + at } else { v(column) }
            };
            let row_width = 2 * ROTATED + COLUMNS;
            Self { row_width, layer_rows: PAGE, k: (0..COLUMNS).map(k).collect(), v: (0..COLUMNS).map(v).collect() }
        } else {
            let k_to_v = PAGE * KV_HEADS * COLUMNS;
            let v = (0..COLUMNS).map(|column| k_to_v + column).collect();
            Self { row_width: COLUMNS, layer_rows: 2 * PAGE, k: (0..COLUMNS).collect(), v }
        }
    }

    fn rows_per_page(&self) -> usize {
        LAYERS * self.layer_rows
    }

    fn layer_row(&self) -> usize {
        LAYER * self.layer_rows
    }

    fn elements(&self) -> usize {
        NUM_PAGES * self.rows_per_page() * KV_HEADS * self.row_width
    }

    /// Where the row of token `t` starts in the pool.
    fn token(&self, request: &Request, t: usize, kv_head: usize) -> usize {
        let row = request.pages[t / PAGE] as usize * self.rows_per_page() + self.layer_row() + t % PAGE;
        (row * KV_HEADS + kv_head) * self.row_width
    }
}

/// q: [rows, Q_HEADS, COLUMNS]. pool: [NUM_PAGES * rows_per_page, KV_HEADS, row_width].
struct Inputs {
    layout: Layout,
    q: Vec<Bf16>,
    pool: Vec<Bf16>,
}

impl Inputs {
    fn write_token(&mut self, request: &Request, t: usize, random: &mut Random) {
        for kv_head in 0..KV_HEADS {
            let row = self.layout.token(request, t, kv_head);
            for (&k, &v) in self.layout.k.iter().zip(&self.layout.v) {
                self.pool[row + v] = random.next();
                self.pool[row + k] = random.next(); // once more the same place, where a folded row has one for both
            }
        }
    }
}

fn queries(rows: usize, random: &mut Random) -> Vec<Bf16> {
    (0..rows * Q_HEADS * COLUMNS).map(|_| random.next()).collect()
}

/// Every slot that holds no token of a request is NaN, and must not show. That holds in the incumbent's mode too: FlashInfer
/// masks the scores of slots past a context, and reads their V as zero.
fn prefill_inputs(mode: i32, random: &mut Random) -> Inputs {
    const NAN: Bf16 = 0x7FC0;
    let layout = Layout::new(mode);
    let pool = vec![NAN; layout.elements()];
    let mut inputs = Inputs { layout, q: queries(Q_ROWS, random), pool };
    for request in &REQUESTS {
        for t in 0..request.context() {
            inputs.write_token(request, t, random);
        }
    }
    inputs
}

/// Each request's next token: its query, and its K and V behind the context in the pool.
fn decode_inputs(before: &Inputs, random: &mut Random) -> Inputs {
    let mut inputs = Inputs { layout: before.layout.clone(), q: queries(BATCH, random), pool: before.pool.clone() };
    for request in &REQUESTS {
        inputs.write_token(request, request.context(), random);
    }
    inputs
}

/// out: [rows, Q_HEADS, COLUMNS]. lse: [rows, Q_HEADS].
struct Expected {
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl Expected {
    fn new(rows: usize) -> Self {
        Self { out: vec![0.0; rows * Q_HEADS * COLUMNS], lse: vec![0.0; rows * Q_HEADS] }
    }

    /// Attention of one row over the first `visible` tokens of its request.
    fn attend(&mut self, inputs: &Inputs, request: &Request, row: usize, visible: usize) {
        for head in 0..Q_HEADS {
            let at = row * Q_HEADS + head;
            let row_of = |t| &inputs.pool[inputs.layout.token(request, t, head / GROUP)..];
            let q = &inputs.q[at * COLUMNS..][..COLUMNS];
            let scores: Vec<f64> = (0..visible)
                .map(|t| {
                    let token = row_of(t);
                    let products = q.iter().zip(&inputs.layout.k).map(|(&a, &k)| to_f64(a) * to_f64(token[k]));
                    products.sum::<f64>() * f64::from(SCALE)
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            self.lse[at] = largest + total.ln();
            for (t, score) in scores.iter().enumerate() {
                let weight = (score - largest).exp() / total;
                let token = row_of(t);
                for (sum, &v) in self.out[at * COLUMNS..][..COLUMNS].iter_mut().zip(&inputs.layout.v) {
                    *sum += weight * to_f64(token[v]);
                }
            }
        }
    }
}

/// A kernel rounds softmax weights or partial outputs to bf16, a relative 2^-9 each, and |V| is at most 1.
const OUT_TOLERANCE: f64 = 0.002;
const LSE_TOLERANCE: f64 = 0.001;

/// Half the distance of bf16 values at `value`: what storing the output may cost.
fn half_ulp(value: f64) -> f64 {
    2f64.powi((value.abs() + OUT_TOLERANCE).log2().floor() as i32 - 8)
}

// Sentinels: a bf16 and an f32 NaN that no kernel computes.
const OUT_SENTINEL: Bf16 = 0x7FA5;
const LSE_SENTINEL: u32 = 0x7FA5_A5A5;
const PAST: usize = 4096;

/// Page ids of the requests, one after another, and where each request's begin.
fn page_lists() -> (Vec<i32>, Vec<i32>) {
    let mut ids = Vec::new();
    let mut indptr = vec![0];
    for request in &REQUESTS {
        ids.extend_from_slice(request.pages);
        indptr.push(ids.len() as i32);
    }
    (ids, indptr)
}

/// What a prefill and a decode step have in common on the device: what they read, and where they write. `out` and `lse` go on
/// after their last row.
struct Call {
    name: &'static str,
    mode: i32,
    q: DeviceArray<Bf16>,
    pool: DeviceArray<Bf16>,
    page_ids: DeviceArray<i32>,
    page_indptr: Vec<i32>,
    out: DeviceArray<Bf16>,
    lse: DeviceArray<u32>,
    status: DeviceArray<u32>,
}

impl Call {
    fn new(name: &'static str, mode: i32, inputs: &Inputs, rows: usize) -> Self {
        let (page_ids, page_indptr) = page_lists();
        Self {
            name,
            mode,
            q: DeviceArray::new(&inputs.q),
            pool: DeviceArray::new(&inputs.pool),
            page_ids: DeviceArray::new(&page_ids),
            page_indptr,
            out: DeviceArray::new(&vec![OUT_SENTINEL; rows * Q_HEADS * COLUMNS + PAST]),
            lse: DeviceArray::new(&vec![LSE_SENTINEL; rows * Q_HEADS + PAST]),
            status: DeviceArray::new(&[0u32]),
        }
    }

    /// The incumbent gives none, and refuses to be asked for it.
    fn gives_lse(&self) -> bool {
        self.mode != MODE_INCUMBENT
    }

    fn lse(&self) -> *mut f32 {
        if self.gives_lse() { self.lse.data.cast() } else { ptr::null_mut() }
    }

    /// Whether the call ran; where it did not, the device must be the reason: the library is built for one kind of GPU.
    fn ran(&self, checks: &mut Checks, code: c_int) -> bool {
        if code == OK {
            cuda(unsafe { cudaDeviceSynchronize() });
            return true;
        }
        println!("{:8} {}: {}, {}", self.name, name_of_mode(self.mode), name_of(code), last_error());
        checks.check(code == DEVICE, "a valid call must run, or be refused for the device");
        false
    }

    /// `expected` has the rows that requests own; what lies behind them must be as it was, and all of an lse that was not asked
    /// for.
    fn compare(&self, checks: &mut Checks, expected: &Expected) {
        let got = self.out.to_host();
        let got_lse = self.lse.to_host();
        let expected_lse: &[f64] = if self.gives_lse() { &expected.lse } else { &[] };
        let mut close = true;
        let mut out_error: f64 = 0.0;
        for (&value, &wanted) in got.iter().zip(&expected.out) {
            let error = (to_f64(value) - wanted).abs();
            out_error = out_error.max(error);
            close &= error <= OUT_TOLERANCE + half_ulp(wanted); // false for NaN
        }
        let mut lse_error: f64 = 0.0;
        for (&bits, &wanted) in got_lse.iter().zip(expected_lse) {
            let error = (f64::from(f32::from_bits(bits)) - wanted).abs();
            lse_error = lse_error.max(error);
            close &= error <= LSE_TOLERANCE;
        }
        let untouched = got[expected.out.len()..].iter().all(|&bits| bits == OUT_SENTINEL)
            && got_lse[expected_lse.len()..].iter().all(|&bits| bits == LSE_SENTINEL);
        let lse = if self.gives_lse() { format!(", {lse_error:.6} of lse") } else { String::new() };
        println!("{:8} {}: largest error: {out_error:.6} of the output{lse}", self.name, name_of_mode(self.mode));
        checks.check(close, "the output is too far from attention in f64");
        checks.check(untouched, "the call wrote past the rows of its requests");
        checks.check(self.status.to_host() == [0], "the call reports a bad index");
    }
}

// The calls: sizes and a plan on the host, the plan copied to the device, one call; the same in every mode

/// Returns whether the device ran it.
fn prefill(checks: &mut Checks, mode: i32, inputs: &Inputs) -> bool {
    let last_page_len = REQUESTS.map(|request| request.last_page_len as i32);
    let q_indptr = [0, 70, 103];

    // Once: a plan for every batch within the limits. Its size is 0 in a mode that needs none.
    let mut words = 0;
    let sizes = tilepress_routed_prefill_plan_size_args {
        plan_words_out: &mut words,
        max_rows: Q_ROWS as i32,
        max_batch: MAX_BATCH,
        num_q_heads: Q_HEADS as i32,
        num_kv_heads: KV_HEADS as i32,
        head_dim: HEAD_DIM,
        mode,
        ..Default::default()
    };
    let code = unsafe { tilepress_routed_global_prefill_plan_size(&sizes) };
    checks.check(code == OK, "a plan of valid limits must have a size");
    let mut plan = vec![0; words as usize];

    // Every batch.
    let planning = tilepress_routed_prefill_plan_args {
        q_indptr: q_indptr.as_ptr(),
        plan: plan.as_mut_ptr(),
        plan_words: words,
        q_rows: Q_ROWS as i32,
        batch: BATCH as i32,
        num_q_heads: Q_HEADS as i32,
        num_kv_heads: KV_HEADS as i32,
        head_dim: HEAD_DIM,
        mode,
        ..Default::default()
    };
    checks.check(unsafe { tilepress_routed_global_prefill_plan(&planning) } == OK, "valid arguments must be planned");

    let call = Call::new("prefill", mode, inputs, Q_ROWS);
    let page_indptr = DeviceArray::new(&call.page_indptr);
    let device_last_page_len = DeviceArray::new(&last_page_len);
    let device_q_indptr = DeviceArray::new(&q_indptr);
    let device_plan = DeviceArray::new(&plan);
    let args = tilepress_routed_prefill_args {
        q: call.q.data.cast(),
        out: call.out.data.cast(),
        lse: call.lse(),
        pool: call.pool.data.cast(),
        page_ids: call.page_ids.data,
        page_indptr: page_indptr.data,
        last_page_len: device_last_page_len.data,
        q_indptr: device_q_indptr.data,
        q_indptr_host: q_indptr.as_ptr(),
        plan: device_plan.data,
        plan_host: plan.as_ptr(),
        status: call.status.data,
        num_pages: NUM_PAGES as i64,
        rows_per_page: inputs.layout.rows_per_page() as i64,
        layer_row: inputs.layout.layer_row() as i64,
        q_rows: Q_ROWS as i32,
        num_page_ids: call.page_ids.len as i32,
        batch: BATCH as i32,
        num_q_heads: Q_HEADS as i32,
        num_kv_heads: KV_HEADS as i32,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        mode,
        sm_scale: SCALE,
        ..Default::default()
    };
    if !call.ran(checks, unsafe { tilepress_routed_global_prefill(&args) }) {
        return false;
    }

    let mut expected = Expected::new(OWNED_ROWS);
    for request in &REQUESTS {
        for i in 0..request.rows {
            expected.attend(inputs, request, request.q_from + i, request.context() - request.rows + i + 1);
        }
    }
    call.compare(checks, &expected);
    true
}

/// Returns whether the device ran it.
fn decode(checks: &mut Checks, mode: i32, inputs: &Inputs) -> bool {
    let kv_len = REQUESTS.map(|request| request.context() as i32 + 1);
    let (mut device, mut sm_count) = (0, 0);
    cuda(unsafe { cudaGetDevice(&mut device) });
    cuda(unsafe { cudaDeviceGetAttribute(&mut sm_count, MULTIPROCESSOR_COUNT, device) });
    let call = Call::new("decode", mode, inputs, BATCH);

    // Once: buffers that serve every plan of up to max_batch requests.
    let (mut words, mut bytes) = (0, 0);
    let sizes = tilepress_routed_decode_plan_size_args {
        plan_words_out: &mut words,
        workspace_bytes_out: &mut bytes,
        max_batch: MAX_BATCH,
        num_q_heads: Q_HEADS as i32,
        num_kv_heads: KV_HEADS as i32,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        mode,
        sm_count,
        ..Default::default()
    };
    let code = unsafe { tilepress_routed_global_decode_plan_size(&sizes) };
    checks.check(code == OK, "a plan of valid limits must have a size");
    let mut plan = vec![0; words as usize];
    let workspace = DeviceArray::new(&vec![0xFFu8; bytes as usize]);

    // Every step: the requests' lengths have grown.
    let planning = tilepress_routed_decode_plan_args {
        kv_len: kv_len.as_ptr(),
        page_indptr: call.page_indptr.as_ptr(),
        plan: plan.as_mut_ptr(),
        plan_words: words,
        batch: BATCH as i32,
        max_batch: MAX_BATCH,
        num_q_heads: Q_HEADS as i32,
        num_kv_heads: KV_HEADS as i32,
        page_size: PAGE_SIZE,
        mode,
        sm_count,
        ..Default::default()
    };
    checks.check(unsafe { tilepress_routed_global_decode_plan(&planning) } == OK, "valid arguments must be planned");

    let device_plan = DeviceArray::new(&plan);
    let args = tilepress_routed_decode_args {
        q: call.q.data.cast(),
        out: call.out.data.cast(),
        lse: call.lse(),
        pool: call.pool.data.cast(),
        page_ids: call.page_ids.data,
        plan: device_plan.data,
        plan_host: plan.as_ptr(),
        workspace: workspace.data.cast(),
        status: call.status.data,
        num_pages: NUM_PAGES as i64,
        rows_per_page: inputs.layout.rows_per_page() as i64,
        layer_row: inputs.layout.layer_row() as i64,
        workspace_bytes: bytes,
        q_rows: BATCH as i32,
        num_page_ids: call.page_ids.len as i32,
        num_q_heads: Q_HEADS as i32,
        num_kv_heads: KV_HEADS as i32,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        mode,
        sm_scale: SCALE,
        ..Default::default()
    };
    if !call.ran(checks, unsafe { tilepress_routed_global_decode(&args) }) {
        return false;
    }

    let mut expected = Expected::new(BATCH);
    for (row, request) in REQUESTS.iter().enumerate() {
        expected.attend(inputs, request, row, request.context() + 1);
    }
    call.compare(checks, &expected);
    true
}

/// Returns whether the device ran both.
pub fn run(checks: &mut Checks, mode: i32) -> bool {
    let mut random = Random(1);
    let prompt = prefill_inputs(mode, &mut random);
    prefill(checks, mode, &prompt) && decode(checks, mode, &decode_inputs(&prompt, &mut random))
}
