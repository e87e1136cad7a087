//! Uses Tilepress from Rust: what the library is, what it serves, what it refuses, and a prefill and a decode step checked on
//! the host.
//!
//! The first three parts need no GPU. Without one the last part is left out, and `--require-gpu` makes that a failure.

include!(concat!(env!("TILEPRESS_RUST"), "/tilepress_sys.rs"));

#[cfg(tilepress_cuda)]
mod gpu;

use std::ffi::{CStr, c_char, c_int};
use std::{env, process::ExitCode, ptr};

use tilepress_sys::*;

const ENTRIES: [&CStr; 2] = [c"tilepress_global_prefill", c"tilepress_global_decode"];
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
    for entry in ENTRIES {
        for (q_heads, kv_heads) in SERVED {
            let code = supports(entry, q_heads, kv_heads);
            println!("served   {}, {q_heads}/{kv_heads} heads: {}", entry.to_string_lossy(), name_of(code));
            checks.check(code == OK, &last_error());
        }
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
type PlanSizeArgs = tilepress_decode_plan_size_args;
type PlanArgs = tilepress_decode_plan_args;
type DecodeArgs = tilepress_decode_args;

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

static LENGTHS: [i32; 2] = [71, 151];
static PAGES: [i32; 3] = [0, 2, 5];
static FEW_PAGES: [i32; 3] = [0, 2, 4];
static NEGATIVE_LENGTH: [i32; 2] = [71, -1];
static INSIDE_A_PAGE: [i32; 2] = [0, 32];
static ONE_PAGE: [i32; 2] = [0, 64];
static NO_PLAN: [i32; 16] = [0; 16];

/// A plan of the same two requests with one more token each, 71 and 151, on a device of 132 multiprocessors.
struct Plan {
    words: Vec<i32>,
    workspace_bytes: i64,
}

/// Sizes of such a plan, into the two places.
fn valid_plan_size_args(words: &mut i64, workspace_bytes: &mut i64) -> PlanSizeArgs {
    PlanSizeArgs {
        plan_words_out: words,
        workspace_bytes_out: workspace_bytes,
        max_batch: 2,
        num_q_heads: 16,
        num_kv_heads: 2,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        page_format: PAGE_FORMAT_SPLIT,
        sm_count: 132,
        ..PlanSizeArgs::default()
    }
}

fn valid_plan_args(plan: &mut [i32]) -> PlanArgs {
    PlanArgs {
        kv_len: LENGTHS.as_ptr(),
        page_indptr: PAGES.as_ptr(),
        plan: plan.as_mut_ptr(),
        plan_words: plan.len() as i64,
        batch: 2,
        max_batch: 2,
        num_q_heads: 16,
        num_kv_heads: 2,
        page_size: PAGE_SIZE,
        page_format: PAGE_FORMAT_SPLIT,
        sm_count: 132,
        ..PlanArgs::default()
    }
}

/// Sizes and plan are made on the host, in a stub too.
fn make_plan(checks: &mut Checks) -> Plan {
    let (mut words, mut workspace_bytes) = (0, 0);
    let sizes = valid_plan_size_args(&mut words, &mut workspace_bytes);
    checks.check(unsafe { tilepress_decode_plan_size(&sizes) } == OK, "a plan of valid limits must have a size");
    println!("planned  {words} words, a workspace of {workspace_bytes} bytes");
    let mut plan = Plan { words: vec![0; words as usize], workspace_bytes };
    let args = valid_plan_args(&mut plan.words);
    checks.check(unsafe { tilepress_decode_plan(&args) } == OK, "valid arguments must be planned");
    plan
}

fn valid_decode_args(plan: &Plan) -> DecodeArgs {
    DecodeArgs {
        q: dummy(4096),
        out: dummy(4096),
        pool: dummy(4096),
        page_ids: dummy(4096),
        plan: dummy(4096),
        plan_host: plan.words.as_ptr(),
        workspace: dummy(4096),
        num_pages: 8,
        rows_per_page: 4 * i64::from(PAGE_SIZE),
        layer_row: 2 * i64::from(PAGE_SIZE),
        workspace_bytes: plan.workspace_bytes,
        q_rows: 2,
        num_page_ids: 5,
        num_q_heads: 16,
        num_kv_heads: 2,
        head_dim: HEAD_DIM,
        page_size: PAGE_SIZE,
        page_format: PAGE_FORMAT_SPLIT,
        sm_scale: 1.0,
        ..DecodeArgs::default()
    }
}

/// One change of valid arguments: the code it must return and the argument that the message must name.
type Refusal<T> = (&'static str, fn(&mut T), c_int, &'static str);

#[rustfmt::skip]
const REFUSALS: &[Refusal<Args>] = &[
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

#[rustfmt::skip]
const PLAN_SIZE_REFUSALS: &[Refusal<PlanSizeArgs>] = &[
    ("plan_words_out null", |a| a.plan_words_out = ptr::null_mut(), INVALID_ARGUMENT, "plan_words_out"),
    ("max_batch 0", |a| a.max_batch = 0, INVALID_ARGUMENT, "max_batch"),
    ("chunk_tokens 96", |a| a.chunk_tokens = 96, INVALID_ARGUMENT, "chunk_tokens"),
    ("chunk_tokens without max_slots", |a| a.chunk_tokens = 128, INVALID_ARGUMENT, "max_slots"),
];

#[rustfmt::skip]
const PLAN_REFUSALS: &[Refusal<PlanArgs>] = &[
    ("struct_size zero", |a| a.struct_size = 0, INVALID_ARGUMENT, "struct_size"),
    ("kv_len null", |a| a.kv_len = ptr::null(), INVALID_ARGUMENT, "kv_len"),
    ("kv_len negative", |a| a.kv_len = NEGATIVE_LENGTH.as_ptr(), INVALID_ARGUMENT, "kv_len"),
    ("page_indptr null", |a| a.page_indptr = ptr::null(), INVALID_ARGUMENT, "page_indptr"),
    ("page_indptr of too few pages", |a| a.page_indptr = FEW_PAGES.as_ptr(), INVALID_ARGUMENT, "page_indptr"),
    ("kv_origin inside a page", |a| a.kv_origin = INSIDE_A_PAGE.as_ptr(), INVALID_ARGUMENT, "kv_origin"),
    ("kv_origin past the first key", |a| a.kv_origin = ONE_PAGE.as_ptr(), INVALID_ARGUMENT, "kv_origin"),
    ("plan null", |a| a.plan = ptr::null_mut(), INVALID_ARGUMENT, "plan"),
    ("plan_words too few", |a| a.plan_words -= 1, INVALID_ARGUMENT, "plan_words"),
    ("batch -1", |a| a.batch = -1, INVALID_ARGUMENT, "batch"),
    ("batch past max_batch", |a| a.max_batch = 1, INVALID_ARGUMENT, "max_batch"),
    ("max_slots too few", |a| a.max_slots = 9, INVALID_ARGUMENT, "max_slots"),
    ("num_q_heads 17 of 2", |a| a.num_q_heads = 17, INVALID_ARGUMENT, "num_q_heads"),
    ("num_kv_heads 0", |a| a.num_kv_heads = 0, INVALID_ARGUMENT, "num_kv_heads"),
    ("page_size 0", |a| a.page_size = 0, INVALID_ARGUMENT, "page_size"),
    ("page_format 7", |a| a.page_format = 7, INVALID_ARGUMENT, "page_format"),
    ("sm_count 0", |a| a.sm_count = 0, INVALID_ARGUMENT, "sm_count"),
    ("chunk_tokens 96", |a| a.chunk_tokens = 96, INVALID_ARGUMENT, "chunk_tokens"),
    ("window -1", |a| a.window = -1, INVALID_ARGUMENT, "window"),
];

#[rustfmt::skip]
const DECODE_REFUSALS: &[Refusal<DecodeArgs>] = &[
    ("struct_size zero", |a| a.struct_size = 0, INVALID_ARGUMENT, "struct_size"),
    ("q null", |a| a.q = ptr::null(), INVALID_ARGUMENT, "q"),
    ("out null", |a| a.out = ptr::null_mut(), INVALID_ARGUMENT, "out"),
    ("lse misaligned", |a| a.lse = dummy(4098), INVALID_ARGUMENT, "lse"),
    ("pool null", |a| a.pool = ptr::null(), INVALID_ARGUMENT, "pool"),
    ("page_ids null", |a| a.page_ids = ptr::null(), INVALID_ARGUMENT, "page_ids"),
    ("plan null", |a| a.plan = ptr::null(), INVALID_ARGUMENT, "plan"),
    ("plan_host null", |a| a.plan_host = ptr::null(), INVALID_ARGUMENT, "plan_host"),
    ("plan_host that is no plan", |a| a.plan_host = NO_PLAN.as_ptr(), INVALID_ARGUMENT, "plan_host"),
    ("workspace null", |a| a.workspace = ptr::null_mut(), INVALID_ARGUMENT, "workspace"),
    ("workspace_bytes too few", |a| a.workspace_bytes -= 1, INVALID_ARGUMENT, "workspace_bytes"),
    ("status misaligned", |a| a.status = dummy(4098), INVALID_ARGUMENT, "status"),
    ("num_pages 0", |a| a.num_pages = 0, INVALID_ARGUMENT, "num_pages"),
    ("rows_per_page 300", |a| a.rows_per_page = 300, INVALID_ARGUMENT, "rows_per_page"),
    ("layer_row past the page", |a| a.layer_row = 3 * i64::from(PAGE_SIZE), INVALID_ARGUMENT, "layer_row"),
    ("q_rows 1", |a| a.q_rows = 1, INVALID_ARGUMENT, "q_rows"),
    ("row_offset past q_rows", |a| a.row_offset = 1, INVALID_ARGUMENT, "row_offset"),
    ("num_page_ids -1", |a| a.num_page_ids = -1, INVALID_ARGUMENT, "num_page_ids"),
    ("num_q_heads unlike the plan's", |a| a.num_q_heads = 32, INVALID_ARGUMENT, "num_q_heads"),
    ("num_kv_heads unlike the plan's", |a| a.num_kv_heads = 4, INVALID_ARGUMENT, "num_kv_heads"),
    ("head_dim 256", |a| a.head_dim = 256, UNSUPPORTED, "head_dim"),
    ("page_size 32", |a| a.page_size = 32, UNSUPPORTED, "page_size"),
    ("page_format unlike the plan's", |a| a.page_format = PAGE_FORMAT_FOLDED, INVALID_ARGUMENT, "page_format"),
    ("sm_scale NaN", |a| a.sm_scale = f32::NAN, INVALID_ARGUMENT, "sm_scale"),
    ("reserved 1", |a| a.reserved = 1, INVALID_ARGUMENT, "reserved"),
];

/// Makes every refused call of an entry; returns how many there were.
fn expect_refusals<T>(
    checks: &mut Checks,
    entry: unsafe extern "C" fn(*const T) -> c_int,
    valid: impl Fn() -> T,
    refusals: &[Refusal<T>],
) -> usize {
    let mut expect_refused = |what, args: *const T, expected, argument| {
        let code = unsafe { entry(args) };
        let message = if code == OK { String::new() } else { last_error() };
        println!("refused  {what}: {}, {message}", name_of(code));
        checks.check(
            code == expected && has_word(&message, argument),
            &format!("{what} must return {} and name {argument}", name_of(expected)),
        );
    };
    expect_refused("args null", ptr::null(), INVALID_ARGUMENT, "args");
    for &(what, change, expected, argument) in refusals {
        let mut args = valid();
        change(&mut args);
        expect_refused(what, &args, expected, argument);
    }
    1 + refusals.len()
}

fn show_refusals(checks: &mut Checks) {
    let mut plan = make_plan(checks);
    let (mut words, mut bytes) = (0, 0);
    let sizes = valid_plan_size_args(&mut words, &mut bytes);
    let planning = valid_plan_args(&mut plan.words);
    let refused = expect_refusals(checks, tilepress_global_prefill, valid_args, REFUSALS)
        + expect_refusals(checks, tilepress_decode_plan_size, || sizes, PLAN_SIZE_REFUSALS)
        + expect_refusals(checks, tilepress_decode_plan, || planning, PLAN_REFUSALS)
        + expect_refusals(checks, tilepress_global_decode, || valid_decode_args(&plan), DECODE_REFUSALS);
    println!("{refused} refusals");

    // Calls that have nothing to do succeed on any host.
    let mut expect_nothing_done = |what, code| {
        println!("nothing  {what}: {}", name_of(code));
        checks.check(code == OK, "a call with nothing to do must succeed");
    };
    unsafe {
        expect_nothing_done("batch 0", tilepress_global_prefill(&Args { batch: 0, ..valid_args() }));
        expect_nothing_done("q_rows 0", tilepress_global_prefill(&Args { q_rows: 0, ..valid_args() }));
        let code = tilepress_decode_plan(&PlanArgs { batch: 0, ..valid_plan_args(&mut plan.words) });
        assert_eq!(code, OK, "a plan may hold no request");
        expect_nothing_done("a plan of batch 0", tilepress_global_decode(&valid_decode_args(&plan)));
    }
}

// A prefill and a decode step on a GPU

/// Makes a valid call of each entry where no kernel can run: both return `expected`.
fn expect_no_kernel(checks: &mut Checks, why: &str, expected: c_int) {
    let plan = make_plan(checks);
    let prefill = || unsafe { tilepress_global_prefill(&valid_args()) };
    let decode = || unsafe { tilepress_global_decode(&valid_decode_args(&plan)) };
    for (name, call) in [("prefill", &prefill as &dyn Fn() -> c_int), ("decode", &decode)] {
        let code = call();
        println!("{name:8} {why}: {}, {}", name_of(code), last_error());
        checks.check(code == expected, &format!("a valid call must return {} here", name_of(expected)));
    }
}

/// Returns whether a prefill and a decode step ran.
fn show_attention(checks: &mut Checks) -> bool {
    if text(unsafe { tilepress_build_info() }).split(' ').any(|pair| pair == "tier=stub") {
        expect_no_kernel(checks, "a stub", STUB);
        return false;
    }
    #[cfg(tilepress_cuda)]
    {
        if gpu::present() {
            return gpu::run(checks);
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
    let ran = show_attention(&mut checks);
    checks.check(ran || !require_gpu, "--require-gpu: no kernel ran");
    if checks.failures > 0 {
        println!("{} failures", checks.failures);
        return ExitCode::FAILURE;
    }
    println!("all as expected");
    ExitCode::SUCCESS
}
