//! Uses Tilepress from Rust: what the library is, what it serves, what it refuses, and one prefill checked on the host.
//!
//! The first three parts need no GPU. Without one the last part is left out, and `--require-gpu` makes that a failure.

include!(concat!(env!("TILEPRESS_RUST"), "/tilepress_sys.rs"));

#[cfg(tilepress_cuda)]
mod prefill;

use std::ffi::{CStr, c_char, c_int};
use std::{env, process::ExitCode, ptr};

use tilepress_sys::*;

const ENTRY: &CStr = c"tilepress_global_prefill";
const HEAD_DIM: i32 = 512;
const PAGE_SIZE: i32 = 64;

/// Counts what is not as expected.
#[derive(Default)]
struct Checks {
    failures: u32,
}

impl Checks {
    fn check(&mut self, good: bool, what: &str) {
        if !good {
            println!("WRONG    {what}");
            self.failures += 1;
        }
    }
}

/// The library's text, which is never null.
fn text(pointer: *const c_char) -> String {
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

fn last_error() -> String {
    text(unsafe { tilepress_last_error() })
}

fn name_of(code: c_int) -> &'static str {
    match code {
        OK => "OK",
        INVALID_ARGUMENT => "INVALID_ARGUMENT",
        UNSUPPORTED => "UNSUPPORTED",
        DEVICE => "DEVICE",
        CUDA => "CUDA",
        STUB => "STUB",
        _ => "an unknown code",
    }
}

/// Whether `word` stands in `text` as a whole identifier: "q" does not stand in "q_rows".
fn has_word(text: &str, word: &str) -> bool {
    text.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).any(|part| part == word)
}

// What the library serves

/// Query and KV heads of Gemma 4's global layers, whole and sharded over GPUs.
const SERVED: [(i32, i32); 5] = [(16, 1), (8, 1), (8, 2), (16, 2), (32, 4)];

fn show_served(checks: &mut Checks) {
    let supports = |entry: &CStr, q_heads, kv_heads| unsafe {
        tilepress_supports(entry.as_ptr(), q_heads, kv_heads, HEAD_DIM, PAGE_SIZE, PAGE_FORMAT_SPLIT)
    };
    for (q_heads, kv_heads) in SERVED {
        let code = supports(ENTRY, q_heads, kv_heads);
        println!("served   {q_heads}/{kv_heads} heads: {}", name_of(code));
        checks.check(code == OK, &last_error());
    }
    let code = supports(c"tilepress_nonsense", 16, 2);
    println!("unknown  {}: {}", name_of(code), last_error());
    checks.check(code == INVALID_ARGUMENT, "an unknown entry must be refused");
}

// What it refuses, before any CUDA call

/// An address that is never read, because a refusal comes first.
fn dummy<T>(address: usize) -> *mut T {
    ptr::without_provenance_mut(address)
}

static RANGES: [i32; 3] = [0, 70, 103];
static DECREASING: [i32; 3] = [0, 70, 69];
static PAST_THE_ROWS: [i32; 3] = [0, 70, 104];
static NEGATIVE_FIRST: [i32; 3] = [-1, 70, 103];

type Args = tilepress_prefill_args;

/// Two requests of 70 and 33 rows, on 5 pages of a pool of 8, in the second of two layers.
fn valid_args() -> Args {
    Args {
        q: dummy(4096),
        out: dummy(4096),
        pool: dummy(4096),
        page_ids: dummy(4096),
        page_indptr: dummy(4096),
        last_page_len: dummy(4096),
        q_indptr: dummy(4096),
        q_indptr_host: RANGES.as_ptr(),
        num_pages: 8,
        rows_per_page: 4 * i64::from(PAGE_SIZE),
        layer_row: 2 * i64::from(PAGE_SIZE),
        q_rows: 103,
        num_page_ids: 5,
        batch: 2,
        num_q_heads: 16,
        num_kv_heads: 2,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        page_format: PAGE_FORMAT_SPLIT,
        sm_scale: 1.0,
        ..Args::default()
    }
}

/// One change of valid arguments: the code it must return and the argument that the message must name.
type Refusal = (&'static str, fn(&mut Args), c_int, &'static str);

#[rustfmt::skip]
const REFUSALS: &[Refusal] = &[
    ("struct_size zero", |a| a.struct_size = 0, INVALID_ARGUMENT, "struct_size"),
    ("struct_size too small", |a| a.struct_size -= 8, INVALID_ARGUMENT, "struct_size"),
    ("struct_size too large", |a| a.struct_size += 8, INVALID_ARGUMENT, "struct_size"),
    ("q null", |a| a.q = ptr::null(), INVALID_ARGUMENT, "q"),
    ("out null", |a| a.out = ptr::null_mut(), INVALID_ARGUMENT, "out"),
    ("pool null", |a| a.pool = ptr::null(), INVALID_ARGUMENT, "pool"),
    ("page_ids null", |a| a.page_ids = ptr::null(), INVALID_ARGUMENT, "page_ids"),
    ("page_indptr null", |a| a.page_indptr = ptr::null(), INVALID_ARGUMENT, "page_indptr"),
    ("last_page_len null", |a| a.last_page_len = ptr::null(), INVALID_ARGUMENT, "last_page_len"),
    ("q_indptr null", |a| a.q_indptr = ptr::null(), INVALID_ARGUMENT, "q_indptr"),
    ("q misaligned", |a| a.q = dummy(4104), INVALID_ARGUMENT, "q"),
    ("out misaligned", |a| a.out = dummy(4104), INVALID_ARGUMENT, "out"),
    ("pool misaligned", |a| a.pool = dummy(4104), INVALID_ARGUMENT, "pool"),
    ("lse misaligned", |a| a.lse = dummy(4098), INVALID_ARGUMENT, "lse"),
    ("page_ids misaligned", |a| a.page_ids = dummy(4098), INVALID_ARGUMENT, "page_ids"),
    ("page_indptr misaligned", |a| a.page_indptr = dummy(4098), INVALID_ARGUMENT, "page_indptr"),
    ("last_page_len misaligned", |a| a.last_page_len = dummy(4098), INVALID_ARGUMENT, "last_page_len"),
    ("q_indptr misaligned", |a| a.q_indptr = dummy(4098), INVALID_ARGUMENT, "q_indptr"),
    ("status misaligned", |a| a.status = dummy(4098), INVALID_ARGUMENT, "status"),
    ("num_pages 0", |a| a.num_pages = 0, INVALID_ARGUMENT, "num_pages"),
    ("num_pages -1", |a| a.num_pages = -1, INVALID_ARGUMENT, "num_pages"),
    ("num_pages 2^31", |a| a.num_pages = 1 << 31, INVALID_ARGUMENT, "num_pages"),
    ("a pool of 2^31 rows", |a| a.num_pages = 1 << 23, INVALID_ARGUMENT, "num_pages"),
    ("rows_per_page 0", |a| a.rows_per_page = 0, INVALID_ARGUMENT, "rows_per_page"),
    ("rows_per_page -64", |a| a.rows_per_page = -64, INVALID_ARGUMENT, "rows_per_page"),
    ("rows_per_page 300", |a| a.rows_per_page = 300, INVALID_ARGUMENT, "rows_per_page"),
    ("rows_per_page 2^31", |a| a.rows_per_page = 1 << 31, INVALID_ARGUMENT, "rows_per_page"),
    ("layer_row -64", |a| a.layer_row = -64, INVALID_ARGUMENT, "layer_row"),
    ("layer_row 32", |a| a.layer_row = 32, INVALID_ARGUMENT, "layer_row"),
    ("layer_row past the page", |a| a.layer_row = 3 * i64::from(PAGE_SIZE), INVALID_ARGUMENT, "layer_row"),
    ("q_rows -1", |a| a.q_rows = -1, INVALID_ARGUMENT, "q_rows"),
    ("q_rows of too many tiles", |a| { a.q_rows = i32::MAX; a.q_indptr_host = ptr::null() }, INVALID_ARGUMENT, "q_rows"),
    ("num_page_ids -1", |a| a.num_page_ids = -1, INVALID_ARGUMENT, "num_page_ids"),
    ("num_page_ids 2^24 + 1", |a| a.num_page_ids = (1 << 24) + 1, INVALID_ARGUMENT, "num_page_ids"),
    ("batch -1", |a| a.batch = -1, INVALID_ARGUMENT, "batch"),
    ("num_q_heads 0", |a| a.num_q_heads = 0, INVALID_ARGUMENT, "num_q_heads"),
    ("num_q_heads -16", |a| a.num_q_heads = -16, INVALID_ARGUMENT, "num_q_heads"),
    ("num_q_heads 17 of 2", |a| a.num_q_heads = 17, INVALID_ARGUMENT, "num_q_heads"),
    ("num_kv_heads -1", |a| a.num_kv_heads = -1, INVALID_ARGUMENT, "num_kv_heads"),
    ("num_kv_heads 65536", |a| { a.num_q_heads = 8 * 65536; a.num_kv_heads = 65536 }, INVALID_ARGUMENT, "num_kv_heads"),
    ("group 5", |a| { a.num_q_heads = 40; a.num_kv_heads = 8 }, UNSUPPORTED, "num_q_heads"),
    ("head_dim 256", |a| a.head_dim = 256, UNSUPPORTED, "head_dim"),
    ("page_size 32", |a| a.page_size = 32, UNSUPPORTED, "page_size"),
    ("page_format 0", |a| a.page_format = 0, INVALID_ARGUMENT, "page_format"),
    ("page_format 7", |a| a.page_format = 7, UNSUPPORTED, "page_format"),
    ("q_indptr_host decreasing", |a| a.q_indptr_host = DECREASING.as_ptr(), INVALID_ARGUMENT, "q_indptr_host"),
    ("q_indptr_host past q_rows", |a| a.q_indptr_host = PAST_THE_ROWS.as_ptr(), INVALID_ARGUMENT, "q_indptr_host"),
    ("q_indptr_host starts at -1", |a| a.q_indptr_host = NEGATIVE_FIRST.as_ptr(), INVALID_ARGUMENT, "q_indptr_host"),
    ("sm_scale 0", |a| a.sm_scale = 0.0, INVALID_ARGUMENT, "sm_scale"),
    ("sm_scale NaN", |a| a.sm_scale = f32::NAN, INVALID_ARGUMENT, "sm_scale"),
    ("sm_scale infinite", |a| a.sm_scale = f32::INFINITY, INVALID_ARGUMENT, "sm_scale"),
    ("reserved 1", |a| a.reserved = 1, INVALID_ARGUMENT, "reserved"),
];

fn show_refusals(checks: &mut Checks) {
    let mut expect_refused = |what, args: *const Args, expected, argument| {
        let code = unsafe { tilepress_global_prefill(args) };
        let message = if code == OK { String::new() } else { last_error() };
        println!("refused  {what}: {}, {message}", name_of(code));
        checks.check(
            code == expected && has_word(&message, argument),
            &format!("{what} must return {} and name {argument}", name_of(expected)),
        );
    };
    expect_refused("args null", ptr::null(), INVALID_ARGUMENT, "args");
    for &(what, change, expected, argument) in REFUSALS {
        let mut args = valid_args();
        change(&mut args);
        expect_refused(what, &args, expected, argument);
    }
    println!("{} refusals", 1 + REFUSALS.len());

    // Calls that have nothing to do succeed on any host.
    for (what, args) in
        [("batch 0", Args { batch: 0, ..valid_args() }), ("q_rows 0", Args { q_rows: 0, ..valid_args() })]
    {
        let code = unsafe { tilepress_global_prefill(&args) };
        println!("nothing  {what}: {}", name_of(code));
        checks.check(code == OK, "a call with nothing to do must succeed");
    }
}

// One prefill on a GPU

/// Makes a valid call where no kernel can run: it returns `expected`.
fn expect_no_kernel(checks: &mut Checks, why: &str, expected: c_int) {
    let code = unsafe { tilepress_global_prefill(&valid_args()) };
    println!("prefill  {why}: {}, {}", name_of(code), last_error());
    checks.check(code == expected, &format!("a valid call must return {} here", name_of(expected)));
}

/// Returns whether a prefill ran.
fn show_prefill(checks: &mut Checks) -> bool {
    if text(unsafe { tilepress_build_info() }).split(' ').any(|pair| pair == "tier=stub") {
        expect_no_kernel(checks, "a stub", STUB);
        return false;
    }
    #[cfg(tilepress_cuda)]
    {
        if prefill::gpu_present() {
            return prefill::run(checks);
        }
        expect_no_kernel(checks, "no GPU here", CUDA);
    }
    false
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let require_gpu = arguments == ["--require-gpu"];
    if !arguments.is_empty() && !require_gpu {
        eprintln!("usage: tilepress-example [--require-gpu]");
        return ExitCode::from(2);
    }
    let version = text(unsafe { tilepress_version() });
    println!("tilepress {version}, bindings {VERSION}\n{}", text(unsafe { tilepress_build_info() }));
    let mut checks = Checks::default();
    checks.check(version == VERSION, "library and bindings are of two versions");
    show_served(&mut checks);
    show_refusals(&mut checks);
    let ran = show_prefill(&mut checks);
    checks.check(ran || !require_gpu, "--require-gpu: no prefill ran");
    if checks.failures > 0 {
        println!("{} failures", checks.failures);
        return ExitCode::FAILURE;
    }
    println!("all as expected");
    ExitCode::SUCCESS
}
