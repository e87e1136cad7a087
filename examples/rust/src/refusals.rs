//! What the library refuses, before any CUDA call: a call of every wrong argument, the code that it must return and the
//! argument that its message must name.

use std::ffi::c_int;
use std::ptr;

use crate::tilepress_sys::*;
use crate::{Checks, HEAD_DIM, KNOB, PAGE_SIZE, last_error, name_of};

// Valid arguments, each refusal being one change of them

/// An address that is never read, because a refusal comes first.
fn dummy<T>(address: usize) -> *mut T {
    ptr::without_provenance_mut(address)
}

static RANGES: [i32; 3] = [0, 70, 103];
static DECREASING: [i32; 3] = [0, 70, 69];
static PAST_THE_ROWS: [i32; 3] = [0, 70, 104];
static NEGATIVE_FIRST: [i32; 3] = [-1, 70, 103];
static LENGTHS: [i32; 2] = [71, 151];
static PAGES: [i32; 3] = [0, 2, 5];
static FEW_PAGES: [i32; 3] = [0, 2, 4];
static NEGATIVE_LENGTH: [i32; 2] = [71, -1];
static INSIDE_A_PAGE: [i32; 2] = [0, 32];
static ONE_PAGE: [i32; 2] = [0, 64];
static NO_PLAN: [i32; 16] = [0; 16];

type Args = tilepress_prefill_args;
type PlanSizeArgs = tilepress_decode_plan_size_args;
type PlanArgs = tilepress_decode_plan_args;
type DecodeArgs = tilepress_decode_args;
type RoutedArgs = tilepress_routed_prefill_args;
type RoutedPlanSizeArgs = tilepress_routed_prefill_plan_size_args;
type RoutedPlanArgs = tilepress_routed_prefill_plan_args;
type RoutedDecodePlanSizeArgs = tilepress_routed_decode_plan_size_args;
type RoutedDecodePlanArgs = tilepress_routed_decode_plan_args;
type RoutedDecodeArgs = tilepress_routed_decode_args;

/// A plan, made on the host, in a stub too, and the workspace that it needs.
struct Plan {
    words: Vec<i32>,
    workspace_bytes: i64,
}

/// Valid arguments of the direct entries or of the routed ones, which have a mode in the place of the page format.
macro_rules! valid_arguments {
    ($choice:ident, $prefill:ident, $decode_plan_size:ident, $decode_plan:ident, $decode:ident) => {
        /// Two requests of 70 and 33 rows, on 5 pages of a pool of 8, in the second of two layers.
        pub fn prefill($choice: i32) -> $prefill {
            $prefill {
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
                $choice,
                sm_scale: 1.0,
                ..Default::default()
            }
        }

        /// Sizes of a decode plan, into the two places.
        pub fn decode_plan_size($choice: i32, words: &mut i64, workspace_bytes: &mut i64) -> $decode_plan_size {
            $decode_plan_size {
                plan_words_out: words,
                workspace_bytes_out: workspace_bytes,
                max_batch: 2,
                num_q_heads: 16,
                num_kv_heads: 2,
                head_dim: HEAD_DIM,
                page_size: PAGE_SIZE,
                $choice,
                sm_count: 132,
                ..Default::default()
            }
        }

        /// The same two requests with one more token each, 71 and 151, on a device of 132 multiprocessors.
        pub fn decode_plan($choice: i32, plan: &mut [i32]) -> $decode_plan {
            $decode_plan {
                kv_len: LENGTHS.as_ptr(),
                page_indptr: PAGES.as_ptr(),
                plan: plan.as_mut_ptr(),
                plan_words: plan.len() as i64,
                batch: 2,
                max_batch: 2,
                num_q_heads: 16,
                num_kv_heads: 2,
                page_size: PAGE_SIZE,
                $choice,
                sm_count: 132,
                ..Default::default()
            }
        }

        pub fn decode($choice: i32, plan: &Plan) -> $decode {
            $decode {
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
                $choice,
                sm_scale: 1.0,
                ..Default::default()
            }
        }
    };
}

mod direct {
    use super::*;
    valid_arguments!(page_format, Args, PlanSizeArgs, PlanArgs, DecodeArgs);
}

mod routed {
    use super::*;
    valid_arguments!(mode, RoutedArgs, RoutedDecodePlanSizeArgs, RoutedDecodePlanArgs, RoutedDecodeArgs);
}

fn make_plan(checks: &mut Checks) -> Plan {
    let (mut words, mut workspace_bytes) = (0, 0);
    let sizes = direct::decode_plan_size(PAGE_FORMAT_SPLIT, &mut words, &mut workspace_bytes);
    checks.check(unsafe { tilepress_decode_plan_size(&sizes) } == OK, "a plan of valid limits must have a size");
    println!("planned  {words} words, a workspace of {workspace_bytes} bytes");
    let mut plan = Plan { words: vec![0; words as usize], workspace_bytes };
    let args = direct::decode_plan(PAGE_FORMAT_SPLIT, &mut plan.words);
    checks.check(unsafe { tilepress_decode_plan(&args) } == OK, "valid arguments must be planned");
    plan
}

/// A routed prefill's plan, which needs no workspace.
fn make_routed_plan(checks: &mut Checks, mode: i32) -> Plan {
    let mut words = 0;
    let sizes = RoutedPlanSizeArgs {
        plan_words_out: &mut words,
        max_rows: 103,
        max_batch: 2,
        num_q_heads: 16,
        num_kv_heads: 2,
        head_dim: HEAD_DIM,
        mode,
        ..Default::default()
    };
    let code = unsafe { tilepress_routed_global_prefill_plan_size(&sizes) };
    checks.check(code == OK, "a plan of valid limits must have a size");
    let mut plan = Plan { words: vec![0; words as usize], workspace_bytes: 0 };
    let args = RoutedPlanArgs {
        q_indptr: RANGES.as_ptr(),
        plan: plan.words.as_mut_ptr(),
        plan_words: words,
        q_rows: 103,
        batch: 2,
        num_q_heads: 16,
        num_kv_heads: 2,
        head_dim: HEAD_DIM,
        mode,
        ..Default::default()
    };
    checks.check(unsafe { tilepress_routed_global_prefill_plan(&args) } == OK, "valid arguments must be planned");
    plan
}

fn make_routed_decode_plan(checks: &mut Checks, mode: i32) -> Plan {
    let (mut words, mut workspace_bytes) = (0, 0);
    let sizes = routed::decode_plan_size(mode, &mut words, &mut workspace_bytes);
    let code = unsafe { tilepress_routed_global_decode_plan_size(&sizes) };
    checks.check(code == OK, "a plan of valid limits must have a size");
    let mut plan = Plan { words: vec![0; words as usize], workspace_bytes };
    let args = routed::decode_plan(mode, &mut plan.words);
    checks.check(unsafe { tilepress_routed_global_decode_plan(&args) } == OK, "valid arguments must be planned");
    plan
}

fn routed_prefill(mode: i32, plan: &Plan) -> RoutedArgs {
    RoutedArgs { plan: dummy(4096), plan_host: plan.words.as_ptr(), ..routed::prefill(mode) }
}

// The refusals

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
    ("early 2", |a| a.early = 2, INVALID_ARGUMENT, "early"),
];

/// Of calls that are valid in the incumbent's mode.
#[rustfmt::skip]
const ROUTED_REFUSALS: &[Refusal<RoutedArgs>] = &[
    ("mode 0", |a| a.mode = 0, INVALID_ARGUMENT, "mode"),
    ("mode 7", |a| a.mode = 7, INVALID_ARGUMENT, "mode"),
    ("lse in the incumbent's mode", |a| a.lse = dummy(4096), UNSUPPORTED, "lse"),
    ("no plan in the incumbent's mode", |a| a.plan_host = ptr::null(), INVALID_ARGUMENT, "plan_host"),
];

#[rustfmt::skip]
const ROUTED_DECODE_REFUSALS: &[Refusal<RoutedDecodeArgs>] = &[
    ("mode 0", |a| a.mode = 0, INVALID_ARGUMENT, "mode"),
    ("mode 7", |a| a.mode = 7, INVALID_ARGUMENT, "mode"),
    ("lse in the incumbent's mode", |a| a.lse = dummy(4096), UNSUPPORTED, "lse"),
    ("the incumbent's plan in another mode", |a| a.mode = MODE_TILELANG, INVALID_ARGUMENT, "plan_host"),
];

/// Whether `word` stands in `text` as a whole identifier: "q" does not stand in "q_rows".
fn has_word(text: &str, word: &str) -> bool {
    text.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).any(|part| part == word)
}

/// Holds a call's code, and its message, which it returns.
fn expect_refused(checks: &mut Checks, what: &str, code: c_int, expected: c_int, argument: &str) -> String {
    let message = if code == OK { String::new() } else { last_error() };
    println!("refused  {what}: {}, {message}", name_of(code));
    checks.check(
        code == expected && has_word(&message, argument),
        &format!("{what} must return {} and name {argument}", name_of(expected)),
    );
    message
}

/// Makes every refused call of an entry; returns how many there were.
fn expect_refusals<T>(
    checks: &mut Checks,
    entry: unsafe extern "C" fn(*const T) -> c_int,
    valid: impl Fn() -> T,
    refusals: &[Refusal<T>],
) -> usize {
    expect_refused(checks, "args null", unsafe { entry(ptr::null()) }, INVALID_ARGUMENT, "args");
    for &(what, change, expected, argument) in refusals {
        let mut args = valid();
        change(&mut args);
        expect_refused(checks, what, unsafe { entry(&args) }, expected, argument);
    }
    1 + refusals.len()
}

/// A value of the knob that is none is an error that says what is allowed, never a default.
fn expect_unknown_mode(checks: &mut Checks) -> usize {
    let mut mode = -1;
    let code = unsafe { tilepress_parse_mode(c"on".as_ptr(), &mut mode) };
    let message = expect_refused(checks, "the knob at 'on'", code, INVALID_ARGUMENT, KNOB);
    for allowed in ["off", "tilelang", "tilelang640"] {
        checks.check(has_word(&message, allowed), &format!("a refused mode must name {allowed}"));
    }
    checks.check(mode == -1, "a refusal leaves the mode as it was");
    1
}

fn expect_routed_refusals(checks: &mut Checks) -> usize {
    let plan = make_routed_plan(checks, MODE_INCUMBENT);
    let decode_plan = make_routed_decode_plan(checks, MODE_INCUMBENT);
    let prefill = || routed_prefill(MODE_INCUMBENT, &plan);
    let decode = || routed::decode(MODE_INCUMBENT, &decode_plan);
    expect_unknown_mode(checks)
        + expect_refusals(checks, tilepress_routed_global_prefill, prefill, ROUTED_REFUSALS)
        + expect_refusals(checks, tilepress_routed_global_decode, decode, ROUTED_DECODE_REFUSALS)
}

/// Makes every refused call. Needs no GPU, and makes no CUDA call.
pub fn show(checks: &mut Checks) {
    let mut plan = make_plan(checks);
    let (mut words, mut bytes) = (0, 0);
    let prefill = || direct::prefill(PAGE_FORMAT_SPLIT);
    let sizes = direct::decode_plan_size(PAGE_FORMAT_SPLIT, &mut words, &mut bytes);
    let planning = direct::decode_plan(PAGE_FORMAT_SPLIT, &mut plan.words);
    let decode = |plan: &Plan| direct::decode(PAGE_FORMAT_SPLIT, plan);
    let refused = expect_refusals(checks, tilepress_global_prefill, prefill, REFUSALS)
        + expect_refusals(checks, tilepress_decode_plan_size, || sizes, PLAN_SIZE_REFUSALS)
        + expect_refusals(checks, tilepress_decode_plan, || planning, PLAN_REFUSALS)
        + expect_refusals(checks, tilepress_global_decode, || decode(&plan), DECODE_REFUSALS)
        + expect_routed_refusals(checks);
    println!("{refused} refusals");

    // Calls that have nothing to do succeed on any host.
    let mut expect_nothing_done = |what, code| {
        println!("nothing  {what}: {}", name_of(code));
        checks.check(code == OK, "a call with nothing to do must succeed");
    };
    unsafe {
        expect_nothing_done("batch 0", tilepress_global_prefill(&Args { batch: 0, ..prefill() }));
        expect_nothing_done("q_rows 0", tilepress_global_prefill(&Args { q_rows: 0, ..prefill() }));
        let empty = PlanArgs { batch: 0, ..direct::decode_plan(PAGE_FORMAT_SPLIT, &mut plan.words) };
        assert_eq!(tilepress_decode_plan(&empty), OK, "a plan may hold no request");
        expect_nothing_done("a plan of batch 0", tilepress_global_decode(&decode(&plan)));
    }
}

/// Makes a valid call of both routed entries in a mode, where no kernel can run: both return `expected`.
pub fn expect_no_kernel(checks: &mut Checks, mode: i32, why: &str, expected: c_int) {
    let plan = make_routed_plan(checks, mode);
    let decode_plan = make_routed_decode_plan(checks, mode);
    let prefill = || unsafe { tilepress_routed_global_prefill(&routed_prefill(mode, &plan)) };
    let decode = || unsafe { tilepress_routed_global_decode(&routed::decode(mode, &decode_plan)) };
    for (name, call) in [("prefill", &prefill as &dyn Fn() -> c_int), ("decode", &decode)] {
        let code = call();
        println!("{name:8} {why}: {}, {}", name_of(code), last_error());
        checks.check(code == expected, &format!("a valid call must return {} here", name_of(expected)));
    }
}
