//! A prefill and a decode step on a GPU, against the same attention in f64 on the host.

use std::ffi::{c_int, c_void};
use std::{mem, ptr};

use crate::tilepress_sys::*;
use crate::{Checks, DecodeArgs, HEAD_DIM, PAGE_SIZE, PlanArgs, PlanSizeArgs, last_error, name_of};

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

/// An array on the device, a copy of one on the host.
struct DeviceArray<T> {
    data: *mut T,
    len: usize,
}

impl<T: Copy + Default> DeviceArray<T> {
    fn new(host: &[T]) -> Self {
        let mut data: *mut c_void = ptr::null_mut();
        unsafe {
            cuda(cudaMalloc(&mut data, mem::size_of_val(host)));
            cuda(cudaMemcpy(data, host.as_ptr().cast(), mem::size_of_val(host), HOST_TO_DEVICE));
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
const ROWS_PER_PAGE: usize = 4 * PAGE; // K and V rows of two layers
const LAYER_ROW: usize = 2 * PAGE; // the second layer
const OWNED_ROWS: usize = 103;
const Q_ROWS: usize = OWNED_ROWS + 5; // five rows belong to no request
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

/// From a token's K to its V in the pool.
const K_TO_V: usize = PAGE * KV_HEADS * COLUMNS;

impl Request {
    fn context(&self) -> usize {
        (self.pages.len() - 1) * PAGE + self.last_page_len
    }

    /// Where the K of token `t` starts in the pool.
    fn k_offset(&self, t: usize, kv_head: usize) -> usize {
        let row = self.pages[t / PAGE] as usize * ROWS_PER_PAGE + LAYER_ROW + t % PAGE;
        (row * KV_HEADS + kv_head) * COLUMNS
    }
}

/// q: [rows, Q_HEADS, COLUMNS]. pool: [NUM_PAGES * ROWS_PER_PAGE, KV_HEADS, COLUMNS].
struct Inputs {
    q: Vec<Bf16>,
    pool: Vec<Bf16>,
}

impl Inputs {
    fn write_token(&mut self, request: &Request, t: usize, random: &mut Random) {
        for kv_head in 0..KV_HEADS {
            let k = request.k_offset(t, kv_head);
            for column in 0..COLUMNS {
                self.pool[k + column] = random.next();
                self.pool[k + K_TO_V + column] = random.next();
            }
        }
    }
}

fn queries(rows: usize, random: &mut Random) -> Vec<Bf16> {
    (0..rows * Q_HEADS * COLUMNS).map(|_| random.next()).collect()
}

/// Every slot that holds no token of a request is NaN, and must not show.
fn prefill_inputs(random: &mut Random) -> Inputs {
    const NAN: Bf16 = 0x7FC0;
    let pool = vec![NAN; NUM_PAGES * ROWS_PER_PAGE * KV_HEADS * COLUMNS];
    let mut inputs = Inputs { q: queries(Q_ROWS, random), pool };
    for request in &REQUESTS {
        for t in 0..request.context() {
            inputs.write_token(request, t, random);
        }
    }
    inputs
}

/// Each request's next token: its query, and its K and V behind the context in the pool.
fn decode_inputs(before: &Inputs, random: &mut Random) -> Inputs {
    let mut inputs = Inputs { q: queries(REQUESTS.len(), random), pool: before.pool.clone() };
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
            let kv_head = head / GROUP;
            let q = &inputs.q[at * COLUMNS..][..COLUMNS];
            let scores: Vec<f64> = (0..visible)
                .map(|t| {
                    let k = &inputs.pool[request.k_offset(t, kv_head)..][..COLUMNS];
                    q.iter().zip(k).map(|(&a, &b)| to_f64(a) * to_f64(b)).sum::<f64>() * f64::from(SCALE)
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            self.lse[at] = largest + total.ln();
            for (t, score) in scores.iter().enumerate() {
                let weight = (score - largest).exp() / total;
                let v = &inputs.pool[request.k_offset(t, kv_head) + K_TO_V..][..COLUMNS];
                for (sum, &value) in self.out[at * COLUMNS..][..COLUMNS].iter_mut().zip(v) {
                    *sum += weight * to_f64(value);
                }
            }
        }
    }
}

/// The kernels round softmax weights to bf16, a relative 2^-9 each, and |V| is at most 1.
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

/// Where a call writes. Both arrays go on after their last row.
struct Results {
    out: DeviceArray<Bf16>,
    lse: DeviceArray<u32>,
    status: DeviceArray<u32>,
}

impl Results {
    fn new(rows: usize) -> Self {
        Self {
            out: DeviceArray::new(&vec![OUT_SENTINEL; rows * Q_HEADS * COLUMNS + PAST]),
            lse: DeviceArray::new(&vec![LSE_SENTINEL; rows * Q_HEADS + PAST]),
            status: DeviceArray::new(&[0u32]),
        }
    }

    /// `expected` has the rows that requests own; what lies behind them must be as it was.
    fn compare(&self, checks: &mut Checks, name: &str, expected: &Expected) {
        let got = self.out.to_host();
        let got_lse = self.lse.to_host();
        let mut close = true;
        let mut out_error: f64 = 0.0;
        for (&value, &wanted) in got.iter().zip(&expected.out) {
            let error = (to_f64(value) - wanted).abs();
            out_error = out_error.max(error);
            close &= error <= OUT_TOLERANCE + half_ulp(wanted); // false for NaN
        }
        let mut lse_error: f64 = 0.0;
        for (&bits, &wanted) in got_lse.iter().zip(&expected.lse) {
            let error = (f64::from(f32::from_bits(bits)) - wanted).abs();
            lse_error = lse_error.max(error);
            close &= error <= LSE_TOLERANCE;
        }
        let untouched = got[expected.out.len()..].iter().all(|&bits| bits == OUT_SENTINEL)
            && got_lse[expected.lse.len()..].iter().all(|&bits| bits == LSE_SENTINEL);
        println!("{name:8} largest error: {out_error:.6} of the output, {lse_error:.6} of lse");
        checks.check(close, "the output is too far from attention in f64");
        checks.check(untouched, "the call wrote past the rows of its requests");
        checks.check(self.status.to_host() == [0], "the call reports a bad index");
    }
}

/// Whether a call ran; where it did not, the device must be the reason: the library is built for one kind of GPU.
fn ran(checks: &mut Checks, name: &str, code: c_int) -> bool {
    if code == OK {
        cuda(unsafe { cudaDeviceSynchronize() });
        return true;
    }
    println!("{name:8} {}, {}", name_of(code), last_error());
    checks.check(code == DEVICE, "a valid call must run, or be refused for the device");
    false
}

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

/// Returns whether the device ran it.
fn prefill(checks: &mut Checks, inputs: &Inputs) -> bool {
    let (ids, indptr) = page_lists();
    let last_page_len = REQUESTS.map(|request| request.last_page_len as i32);
    let q_indptr = [0, 70, 103];

    let q = DeviceArray::new(&inputs.q);
    let pool = DeviceArray::new(&inputs.pool);
    let page_ids = DeviceArray::new(&ids);
    let page_indptr = DeviceArray::new(&indptr);
    let device_last_page_len = DeviceArray::new(&last_page_len);
    let device_q_indptr = DeviceArray::new(&q_indptr);
    let results = Results::new(Q_ROWS);
    let args = tilepress_prefill_args {
        q: q.data.cast(),
        out: results.out.data.cast(),
        lse: results.lse.data.cast(),
        pool: pool.data.cast(),
        page_ids: page_ids.data,
        page_indptr: page_indptr.data,
        last_page_len: device_last_page_len.data,
        q_indptr: device_q_indptr.data,
        q_indptr_host: q_indptr.as_ptr(),
        status: results.status.data,
        num_pages: NUM_PAGES as i64,
        rows_per_page: ROWS_PER_PAGE as i64,
        layer_row: LAYER_ROW as i64,
        q_rows: Q_ROWS as i32,
        num_page_ids: ids.len() as i32,
        batch: REQUESTS.len() as i32,
        num_q_heads: Q_HEADS as i32,
        num_kv_heads: KV_HEADS as i32,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        page_format: PAGE_FORMAT_SPLIT,
        sm_scale: SCALE,
        ..Default::default()
    };
    if !ran(checks, "prefill", unsafe { tilepress_global_prefill(&args) }) {
        return false;
    }

    let mut expected = Expected::new(OWNED_ROWS);
    for request in &REQUESTS {
        for i in 0..request.rows {
            expected.attend(inputs, request, request.q_from + i, request.context() - request.rows + i + 1);
        }
    }
    results.compare(checks, "prefill", &expected);
    true
}

/// A decode step: sizes and plan on the host, the plan copied to the device, one call. Returns whether the device ran it.
fn decode(checks: &mut Checks, inputs: &Inputs) -> bool {
    let (ids, indptr) = page_lists();
    let kv_len = REQUESTS.map(|request| request.context() as i32 + 1);
    let (mut device, mut sm_count) = (0, 0);
    cuda(unsafe { cudaGetDevice(&mut device) });
    cuda(unsafe { cudaDeviceGetAttribute(&mut sm_count, MULTIPROCESSOR_COUNT, device) });

    // Once: buffers that serve every plan of up to max_batch requests.
    let (mut words, mut bytes) = (0, 0);
    let sizes = PlanSizeArgs {
        plan_words_out: &mut words,
        workspace_bytes_out: &mut bytes,
        max_batch: 4,
        num_q_heads: Q_HEADS as i32,
        num_kv_heads: KV_HEADS as i32,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        page_format: PAGE_FORMAT_SPLIT,
        sm_count,
        ..Default::default()
    };
    checks.check(unsafe { tilepress_decode_plan_size(&sizes) } == OK, "a plan of valid limits must have a size");
    let mut host_plan = vec![0; words as usize];
    let workspace = DeviceArray::new(&vec![0xFFu8; bytes as usize]);

    // Every step: the requests' lengths have grown.
    let planning = PlanArgs {
        kv_len: kv_len.as_ptr(),
        page_indptr: indptr.as_ptr(),
        plan: host_plan.as_mut_ptr(),
        plan_words: words,
        batch: REQUESTS.len() as i32,
        max_batch: sizes.max_batch,
        num_q_heads: sizes.num_q_heads,
        num_kv_heads: sizes.num_kv_heads,
        page_size: PAGE_SIZE,
        page_format: PAGE_FORMAT_SPLIT,
        sm_count,
        ..Default::default()
    };
    checks.check(unsafe { tilepress_decode_plan(&planning) } == OK, "valid arguments must be planned");

    let q = DeviceArray::new(&inputs.q);
    let pool = DeviceArray::new(&inputs.pool);
    let page_ids = DeviceArray::new(&ids);
    let plan = DeviceArray::new(&host_plan);
    let results = Results::new(REQUESTS.len());
    let args = DecodeArgs {
        q: q.data.cast(),
        out: results.out.data.cast(),
        lse: results.lse.data.cast(),
        pool: pool.data.cast(),
        page_ids: page_ids.data,
        plan: plan.data,
        plan_host: host_plan.as_ptr(),
        workspace: workspace.data.cast(),
        status: results.status.data,
        num_pages: NUM_PAGES as i64,
        rows_per_page: ROWS_PER_PAGE as i64,
        layer_row: LAYER_ROW as i64,
        workspace_bytes: bytes,
        q_rows: REQUESTS.len() as i32,
        num_page_ids: ids.len() as i32,
        num_q_heads: sizes.num_q_heads,
        num_kv_heads: sizes.num_kv_heads,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        page_format: PAGE_FORMAT_SPLIT,
        sm_scale: SCALE,
        ..Default::default()
    };
    if !ran(checks, "decode", unsafe { tilepress_global_decode(&args) }) {
        return false;
    }

    let mut expected = Expected::new(REQUESTS.len());
    for (row, request) in REQUESTS.iter().enumerate() {
        expected.attend(inputs, request, row, request.context() + 1);
    }
    results.compare(checks, "decode", &expected);
    true
}

/// Returns whether the device ran both.
pub fn run(checks: &mut Checks) -> bool {
    let mut random = Random(1);
    let prompt = prefill_inputs(&mut random);
    prefill(checks, &prompt) && decode(checks, &decode_inputs(&prompt, &mut random))
}
