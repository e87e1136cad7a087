//! Builds Tilepress with its generator and links it. TILEPRESS_PYTHON is the Python that runs the generator, python3 by
//! default; TILEPRESS_BUILD_ARGS holds more arguments for it, such as --stub.
use std::process::{Command, exit};
use std::{env, path::Path};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(tilepress_cuda)");
    println!("cargo::rerun-if-env-changed=TILEPRESS_PYTHON");
    println!("cargo::rerun-if-env-changed=TILEPRESS_BUILD_ARGS");
    let python = env::var("TILEPRESS_PYTHON").unwrap_or("python3".into());
    let arguments = env::var("TILEPRESS_BUILD_ARGS").unwrap_or_default();
    let out = Path::new(&env::var("OUT_DIR").unwrap()).join("tilepress");

    let mut command = Command::new(&python);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    command.args(["-m", "codegen", "build", "--arch", "sm_90", "--emit", "cargo", "--out"]).arg(&out);
    command.args(arguments.split_whitespace());
    let output = command.output().unwrap_or_else(|error| panic!("{python} does not run: {error}"));
    if !output.status.success() {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        exit(1);
    }
    let lines = String::from_utf8(output.stdout).expect("cargo lines are UTF-8");
    print!("{lines}");

    // A stub links no CUDA runtime. Otherwise the program finds it at run time where it was found now.
    if lines.lines().any(|line| line == "cargo::rustc-link-lib=dylib=cudart") {
        println!("cargo::rustc-cfg=tilepress_cuda");
        let folders = lines.lines().filter_map(|line| line.strip_prefix("cargo::rustc-link-search=native="));
        for folder in folders.filter(|folder| !Path::new(folder).starts_with(&out)) {
            println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
        }
    }
}
