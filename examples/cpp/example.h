// What the parts of the example share.
#pragma once

#include <cstdint>
#include <string>

namespace example {

constexpr int kHeadDim = 512;
constexpr int kPageSize = 64;

// Prints and counts what is not as expected.
void check(bool good, const std::string &what);

const char *name_of(int code);

// A TILEPRESS_MODE_* value, by its name.
const char *name_of_mode(int32_t mode);

// Whether `word` stands in `text` as a whole identifier: "q" does not stand in "q_rows".
bool has_word(const std::string &text, const std::string &word);

// Makes every refused call. Needs no GPU, and makes no CUDA call.
void show_refusals();

// Makes a valid call of both routed entries in a mode, where no kernel can run: both return `expected`.
void expect_no_kernel(int32_t mode, const char *why, int expected);

bool gpu_present();

// A prefill and a decode step in a mode, against the same attention on the host. Returns whether the device ran both.
bool run_on_gpu(int32_t mode);

}  // namespace example
