//! Uses Tilepress from Rust as a server would: reads the knob once at start, says which mode it chose and what the KV pool
//! takes, then shows what the library serves, what it refuses, and a prefill and a decode step in that mode, checked on the
//! host.
//!
//! All but the last need no GPU. Without one that is left out, and `--require-gpu` makes it a failure.

include!(concat!(env!("TILEPRESS_RUST"), "/tilepress_sys.rs"));

#[cfg(tilepress_cuda)]
mod gpu;
mod refusals;

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::{env, process::ExitCode, ptr};

use tilepress_sys::*;

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

const MODES: [(i32, &str); 3] =
    [(MODE_INCUMBENT, "incumbent"), (MODE_TILELANG, "tilelang"), (MODE_TILELANG640, "tilelang640")];

fn name_of_mode(mode: i32) -> &'static str {
    MODES.iter().find(|(code, _)| *code == mode).map_or("an unknown mode", |(_, name)| name)
}

// The start of a server

const KNOB: &str = "PEGAINFER_GLOBAL_ATTN";

/// The mode that the knob's value names, or the library's message.
fn parse_mode(knob: Option<&OsStr>) -> Result<i32, String> {
    let value = knob.map(|value| CString::new(value.as_bytes()).expect("the environment holds no NUL"));
    let mut mode = 0;
    match unsafe { tilepress_parse_mode(value.as_ref().map_or(ptr::null(), |value| value.as_ptr()), &mut mode) } {
        OK => Ok(mode),
        _ => Err(last_error()),
    }
}

// The global layers of Gemma 4 31B, whose K and V are one projection.
const POOL_PAGES: i64 = 4096;
const POOL_LAYERS: i32 = 10;
const POOL_KV_HEADS: i32 = 4;

fn pool_bytes(checks: &mut Checks, mode: i32) -> i64 {
    let (k_eq_v, mut bytes) = (1, 0);
    let code = unsafe {
        tilepress_mode_pool_bytes(mode, POOL_PAGES, POOL_LAYERS, POOL_KV_HEADS, HEAD_DIM, PAGE_SIZE, k_eq_v, &mut bytes)
    };
    checks.check(code == OK, &last_error());
    bytes
}

/// One line: the mode, the bytes of the global pool that a server would allocate for it, and those under every mode.
fn show_start(checks: &mut Checks, knob: Option<&OsStr>, mode: i32) {
    let said = knob.map_or(" unset".into(), |value| format!("={}", value.to_string_lossy()));
    let bytes = pool_bytes(checks, mode);
    let each = MODES.map(|(mode, name)| format!("{name} {}", pool_bytes(checks, mode)));
    let name = name_of_mode(mode);
    println!("mode     {name} ({KNOB}{said}): global pool of {POOL_PAGES} pages, {bytes} bytes; {}", each.join(", "));
}

// What the library serves

const ENTRIES: [&CStr; 2] = [c"tilepress_global_prefill", c"tilepress_global_decode"];

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

// A prefill and a decode step

/// Returns whether both ran.
fn show_attention(checks: &mut Checks, mode: i32) -> bool {
    if text(unsafe { tilepress_build_info() }).split(' ').any(|pair| pair == "tier=stub") {
        refusals::expect_no_kernel(checks, mode, "a stub", STUB);
        return false;
    }
    #[cfg(tilepress_cuda)]
    {
        if gpu::present() {
            return gpu::run(checks, mode);
        }
        refusals::expect_no_kernel(checks, mode, "no GPU here", CUDA);
    }
    false
}

fn main() -> ExitCode {
    // The knob is read here and nowhere else. A value that is none stops the server before it does anything.
    let knob = env::var_os(KNOB);
    let mode = match parse_mode(knob.as_deref()) {
        Ok(mode) => mode,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
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
    show_start(&mut checks, knob.as_deref(), mode);
    show_served(&mut checks);
    refusals::show(&mut checks);
    let ran = show_attention(&mut checks, mode);
    checks.check(ran || !require_gpu, "--require-gpu: no kernel ran");
    if checks.failures > 0 {
        println!("{} failures", checks.failures);
        return ExitCode::FAILURE;
    }
    println!("all as expected");
    ExitCode::SUCCESS
}
