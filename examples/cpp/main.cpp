// Uses Tilepress from C++ as a server would: reads the knob once at start, says which mode it chose and what the KV pool takes,
// then shows what the library serves, what it refuses, and a prefill and a decode step in that mode, checked on the host.
//
// All but the last need no GPU. Without one that is left out, and `--require-gpu` makes it a failure.
// A stub of the library (`codegen build --stub`) has no kernels: compile with EXAMPLE_WITHOUT_CUDA where no CUDA is.
#include <tilepress.h>

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "example.h"

namespace example {
namespace {

int failures = 0;

struct Mode {
  int32_t code;
  const char *name;
};

constexpr Mode kModes[] = {{TILEPRESS_MODE_INCUMBENT, "incumbent"},
                           {TILEPRESS_MODE_TILELANG, "tilelang"},
                           {TILEPRESS_MODE_TILELANG640, "tilelang640"}};

}  // namespace

void check(bool good, const std::string &what) {
  if (good) return;
  std::printf("WRONG    %s\n", what.c_str());
  ++failures;
}

const char *name_of(int code) {
  switch (code) {
    case TILEPRESS_OK:
      return "OK";
    case TILEPRESS_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case TILEPRESS_UNSUPPORTED:
      return "UNSUPPORTED";
    case TILEPRESS_DEVICE:
      return "DEVICE";
    case TILEPRESS_CUDA:
      return "CUDA";
    case TILEPRESS_STUB:
      return "STUB";
    default:
      return "an unknown code";
  }
}

const char *name_of_mode(int32_t mode) {
  for (const Mode &known : kModes)
    if (known.code == mode) return known.name;
  return "an unknown mode";
}

bool has_word(const std::string &text, const std::string &word) {
  const auto in_identifier = [](char c) { return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !in_identifier(text[at - 1])) && (end == text.size() || !in_identifier(text[end]))) return true;
  }
  return false;
}

namespace {

// --- The start of a server

constexpr char kKnob[] = "PEGAINFER_GLOBAL_ATTN";

// The global layers of Gemma 4 31B, whose K and V are one projection.
constexpr int64_t kPoolPages = 4096;
constexpr int32_t kPoolLayers = 10;
constexpr int32_t kPoolKvHeads = 4;

int64_t pool_bytes(int32_t mode) {
  int64_t bytes = 0;
  const int code =
      tilepress_mode_pool_bytes(mode, kPoolPages, kPoolLayers, kPoolKvHeads, kHeadDim, kPageSize, /*k_eq_v=*/1, &bytes);
  check(code == TILEPRESS_OK, tilepress_last_error());
  return bytes;
}

// One line: the mode, the bytes of the global pool that a server would allocate for it, and those under every mode.
void show_start(const char *knob, int32_t mode) {
  const std::string said = knob != nullptr ? std::string("=") + knob : " unset";
  std::printf("mode     %s (%s%s): global pool of %lld pages, %lld bytes;", name_of_mode(mode), kKnob, said.c_str(),
              static_cast<long long>(kPoolPages), static_cast<long long>(pool_bytes(mode)));
  const char *separator = " ";
  for (const Mode &known : kModes) {
    std::printf("%s%s %lld", separator, known.name, static_cast<long long>(pool_bytes(known.code)));
    separator = ", ";
  }
  std::printf("\n");
}

// --- What the library serves

constexpr const char *kEntries[] = {"tilepress_global_prefill", "tilepress_global_decode"};

struct Served {
  int num_q_heads;
  int num_kv_heads;
};

// Gemma 4's global layers, whole and sharded over GPUs.
constexpr Served kServed[] = {{16, 1}, {8, 1}, {8, 2}, {16, 2}, {32, 4}};

void show_served() {
  for (const char *entry : kEntries)
    for (const Served &heads : kServed) {
      const int code =
          tilepress_supports(entry, heads.num_q_heads, heads.num_kv_heads, kHeadDim, kPageSize, TILEPRESS_PAGE_FORMAT_SPLIT);
      std::printf("served   %s, %d/%d heads: %s\n", entry, heads.num_q_heads, heads.num_kv_heads, name_of(code));
      check(code == TILEPRESS_OK, tilepress_last_error());
    }
  const int code = tilepress_supports("tilepress_nonsense", 16, 2, kHeadDim, kPageSize, TILEPRESS_PAGE_FORMAT_SPLIT);
  std::printf("unknown  %s: %s\n", name_of(code), tilepress_last_error());
  check(code == TILEPRESS_INVALID_ARGUMENT, "an unknown entry must be refused");
}

// --- A prefill and a decode step

// Returns whether both ran.
bool show_attention(int32_t mode) {
  if (has_word(tilepress_build_info(), "tier=stub")) {
    expect_no_kernel(mode, "a stub", TILEPRESS_STUB);
    return false;
  }
#ifndef EXAMPLE_WITHOUT_CUDA
  if (gpu_present()) return run_on_gpu(mode);
  // Without a device even valid arguments are refused; these hold addresses of the host, and are not read.
  expect_no_kernel(mode, "no GPU here", TILEPRESS_CUDA);
#else
  std::printf("prefill  this program was compiled without CUDA\n");
#endif
  return false;
}

}  // namespace
}  // namespace example

int main(int argc, char **argv) {
  using namespace example;
  // The knob is read here and nowhere else. A value that is none stops the server before it does anything.
  const char *knob = std::getenv(kKnob);
  int32_t mode = 0;
  if (tilepress_parse_mode(knob, &mode) != TILEPRESS_OK) {
    std::fprintf(stderr, "%s\n", tilepress_last_error());
    return 2;
  }
  const bool require_gpu = argc == 2 && std::strcmp(argv[1], "--require-gpu") == 0;
  if (argc > 1 && !require_gpu) {
    std::fprintf(stderr, "usage: %s [--require-gpu]\n", argv[0]);
    return 2;
  }
  std::printf("tilepress %s, header %s\n%s\n", tilepress_version(), TILEPRESS_VERSION, tilepress_build_info());
  check(std::strcmp(tilepress_version(), TILEPRESS_VERSION) == 0, "library and header are of two versions");
  show_start(knob, mode);
  show_served();
  show_refusals();
  const bool attended = show_attention(mode);
  check(attended || !require_gpu, "--require-gpu: no kernel ran");
  if (failures > 0) {
    std::printf("%d failures\n", failures);
    return 1;
  }
  std::printf("all as expected\n");
  return 0;
}
