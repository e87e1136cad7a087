// Uses Tilepress from C++: what the library is, what it serves, what it refuses, and a prefill and a decode step checked on the
// host.
//
// The first three parts need no GPU. Without one the last part is left out, and `--require-gpu` makes that a failure.
// A stub of the library (`codegen build --stub`) has no kernels: compile with EXAMPLE_WITHOUT_CUDA where no CUDA is.
#include <tilepress.h>

#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#ifndef EXAMPLE_WITHOUT_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

constexpr const char *kEntries[] = {"tilepress_global_prefill", "tilepress_global_decode"};
constexpr int kHeadDim = 512;
constexpr int kPageSize = 64;

int failures = 0;

void check(bool good, const char *what) {
  if (good) return;
  std::printf("WRONG    %s\n", what);
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

// Whether `word` stands in `text` as a whole identifier: "q" does not stand in "q_rows".
bool has_word(const std::string &text, const std::string &word) {
  const auto in_identifier = [](char c) { return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !in_identifier(text[at - 1])) && (end == text.size() || !in_identifier(text[end]))) return true;
  }
  return false;
}

// --- What the library serves

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

// --- What it refuses, before any CUDA call

// Never read: a refusal comes first.
alignas(16) unsigned char dummy[32];

template <typename T>
T *misaligned(T *) {
  return reinterpret_cast<T *>(dummy + 2);
}

constexpr int32_t kRanges[] = {0, 70, 103};
constexpr int32_t kDecreasing[] = {0, 70, 69};
constexpr int32_t kPastTheRows[] = {0, 70, 104};
constexpr int32_t kNegativeFirst[] = {-1, 70, 103};

using Args = tilepress_prefill_args;
using PlanSizeArgs = tilepress_decode_plan_size_args;
using PlanArgs = tilepress_decode_plan_args;
using DecodeArgs = tilepress_decode_args;

// Two requests of 70 and 33 rows, on 5 pages of a pool of 8, in the second of two layers.
Args valid_args() {
  Args args{};
  args.struct_size = sizeof args;
  args.q = dummy;
  args.out = dummy;
  args.pool = dummy;
  args.page_ids = reinterpret_cast<const int32_t *>(dummy);
  args.page_indptr = reinterpret_cast<const int32_t *>(dummy);
  args.last_page_len = reinterpret_cast<const int32_t *>(dummy);
  args.q_indptr = reinterpret_cast<const int32_t *>(dummy);
  args.q_indptr_host = kRanges;
  args.num_pages = 8;
  args.rows_per_page = 4 * kPageSize;
  args.layer_row = 2 * kPageSize;
  args.q_rows = 103;
  args.num_page_ids = 5;
  args.batch = 2;
  args.num_q_heads = 16;
  args.num_kv_heads = 2;
  args.head_dim = kHeadDim;
  args.page_size = kPageSize;
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  args.sm_scale = 1.0f;
  return args;
}

// A decode step of the same two requests, with one more token each: 71 and 151 tokens, on a device of 132 multiprocessors.
constexpr int32_t kLengths[] = {71, 151};
constexpr int32_t kPages[] = {0, 2, 5};
constexpr int32_t kFewPages[] = {0, 2, 4};
constexpr int32_t kNegativeLength[] = {71, -1};
constexpr int32_t kInsideAPage[] = {0, 32};
constexpr int32_t kOnePage[] = {0, 64};
constexpr int32_t kNoPlan[16] = {};
constexpr int32_t kSmCount = 132;

int64_t plan_words;
int64_t workspace_bytes;

PlanSizeArgs valid_plan_size_args() {
  PlanSizeArgs args{};
  args.struct_size = sizeof args;
  args.plan_words_out = &plan_words;
  args.workspace_bytes_out = &workspace_bytes;
  args.max_batch = 2;
  args.num_q_heads = 16;
  args.num_kv_heads = 2;
  args.head_dim = kHeadDim;
  args.page_size = kPageSize;
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  args.sm_count = kSmCount;
  return args;
}

std::vector<int32_t> plan;

PlanArgs valid_plan_args() {
  PlanArgs args{};
  args.struct_size = sizeof args;
  args.kv_len = kLengths;
  args.page_indptr = kPages;
  args.plan = plan.data();
  args.plan_words = static_cast<int64_t>(plan.size());
  args.batch = 2;
  args.max_batch = 2;
  args.num_q_heads = 16;
  args.num_kv_heads = 2;
  args.page_size = kPageSize;
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  args.sm_count = kSmCount;
  return args;
}

DecodeArgs valid_decode_args() {
  DecodeArgs args{};
  args.struct_size = sizeof args;
  args.q = dummy;
  args.out = dummy;
  args.pool = dummy;
  args.page_ids = reinterpret_cast<const int32_t *>(dummy);
  args.plan = reinterpret_cast<const int32_t *>(dummy);
  args.plan_host = plan.data();
  args.workspace = dummy;
  args.num_pages = 8;
  args.rows_per_page = 4 * kPageSize;
  args.layer_row = 2 * kPageSize;
  args.workspace_bytes = workspace_bytes;
  args.q_rows = 2;
  args.num_page_ids = 5;
  args.num_q_heads = 16;
  args.num_kv_heads = 2;
  args.head_dim = kHeadDim;
  args.page_size = kPageSize;
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  args.sm_scale = 1.0f;
  return args;
}

// One change of valid arguments: the code it must return and the argument that the message must name.
template <typename T>
struct Refusal {
  const char *what;
  void (*change)(T &);
  int code;
  const char *argument;
};

constexpr int kInvalid = TILEPRESS_INVALID_ARGUMENT;
constexpr int kUnsupported = TILEPRESS_UNSUPPORTED;

const Refusal<Args> kRefusals[] = {
    {"struct_size zero", [](Args &a) { a.struct_size = 0; }, kInvalid, "struct_size"},
    {"struct_size too small", [](Args &a) { a.struct_size -= 8; }, kInvalid, "struct_size"},
    {"struct_size too large", [](Args &a) { a.struct_size += 8; }, kInvalid, "struct_size"},
    {"q null", [](Args &a) { a.q = nullptr; }, kInvalid, "q"},
    {"out null", [](Args &a) { a.out = nullptr; }, kInvalid, "out"},
    {"pool null", [](Args &a) { a.pool = nullptr; }, kInvalid, "pool"},
    {"page_ids null", [](Args &a) { a.page_ids = nullptr; }, kInvalid, "page_ids"},
    {"page_indptr null", [](Args &a) { a.page_indptr = nullptr; }, kInvalid, "page_indptr"},
    {"last_page_len null", [](Args &a) { a.last_page_len = nullptr; }, kInvalid, "last_page_len"},
    {"q_indptr null", [](Args &a) { a.q_indptr = nullptr; }, kInvalid, "q_indptr"},
    {"q misaligned", [](Args &a) { a.q = dummy + 8; }, kInvalid, "q"},
    {"out misaligned", [](Args &a) { a.out = dummy + 8; }, kInvalid, "out"},
    {"pool misaligned", [](Args &a) { a.pool = dummy + 8; }, kInvalid, "pool"},
    {"lse misaligned", [](Args &a) { a.lse = misaligned(a.lse); }, kInvalid, "lse"},
    {"page_ids misaligned", [](Args &a) { a.page_ids = misaligned(a.page_ids); }, kInvalid, "page_ids"},
    {"page_indptr misaligned", [](Args &a) { a.page_indptr = misaligned(a.page_indptr); }, kInvalid, "page_indptr"},
    {"last_page_len misaligned", [](Args &a) { a.last_page_len = misaligned(a.last_page_len); }, kInvalid, "last_page_len"},
    {"q_indptr misaligned", [](Args &a) { a.q_indptr = misaligned(a.q_indptr); }, kInvalid, "q_indptr"},
    {"status misaligned", [](Args &a) { a.status = misaligned(a.status); }, kInvalid, "status"},
    {"num_pages 0", [](Args &a) { a.num_pages = 0; }, kInvalid, "num_pages"},
    {"num_pages -1", [](Args &a) { a.num_pages = -1; }, kInvalid, "num_pages"},
    {"num_pages 2^31", [](Args &a) { a.num_pages = int64_t{1} << 31; }, kInvalid, "num_pages"},
    {"a pool of 2^31 rows", [](Args &a) { a.num_pages = int64_t{1} << 23; }, kInvalid, "num_pages"},
    {"rows_per_page 0", [](Args &a) { a.rows_per_page = 0; }, kInvalid, "rows_per_page"},
    {"rows_per_page -64", [](Args &a) { a.rows_per_page = -64; }, kInvalid, "rows_per_page"},
    {"rows_per_page 300", [](Args &a) { a.rows_per_page = 300; }, kInvalid, "rows_per_page"},
    {"rows_per_page 2^31", [](Args &a) { a.rows_per_page = int64_t{1} << 31; }, kInvalid, "rows_per_page"},
    {"layer_row -64", [](Args &a) { a.layer_row = -64; }, kInvalid, "layer_row"},
    {"layer_row 32", [](Args &a) { a.layer_row = 32; }, kInvalid, "layer_row"},
    {"layer_row past the page", [](Args &a) { a.layer_row = 3 * kPageSize; }, kInvalid, "layer_row"},
    {"q_rows -1", [](Args &a) { a.q_rows = -1; }, kInvalid, "q_rows"},
    {"q_rows of too many tiles",
     [](Args &a) {
       a.q_rows = std::numeric_limits<int32_t>::max();
       a.q_indptr_host = nullptr;
     },
     kInvalid, "q_rows"},
    {"num_page_ids -1", [](Args &a) { a.num_page_ids = -1; }, kInvalid, "num_page_ids"},
    {"num_page_ids 2^24 + 1", [](Args &a) { a.num_page_ids = (1 << 24) + 1; }, kInvalid, "num_page_ids"},
    {"batch -1", [](Args &a) { a.batch = -1; }, kInvalid, "batch"},
    {"num_q_heads 0", [](Args &a) { a.num_q_heads = 0; }, kInvalid, "num_q_heads"},
    {"num_q_heads -16", [](Args &a) { a.num_q_heads = -16; }, kInvalid, "num_q_heads"},
    {"num_q_heads 17 of 2", [](Args &a) { a.num_q_heads = 17; }, kInvalid, "num_q_heads"},
    {"num_kv_heads -1", [](Args &a) { a.num_kv_heads = -1; }, kInvalid, "num_kv_heads"},
    {"num_kv_heads 65536",
     [](Args &a) {
       a.num_q_heads = 8 * 65536;
       a.num_kv_heads = 65536;
     },
     kInvalid, "num_kv_heads"},
    {"group 5",
     [](Args &a) {
       a.num_q_heads = 40;
       a.num_kv_heads = 8;
     },
     kUnsupported, "num_q_heads"},
    {"head_dim 256", [](Args &a) { a.head_dim = 256; }, kUnsupported, "head_dim"},
    {"page_size 32", [](Args &a) { a.page_size = 32; }, kUnsupported, "page_size"},
    {"page_format 0", [](Args &a) { a.page_format = 0; }, kInvalid, "page_format"},
    {"page_format 7", [](Args &a) { a.page_format = 7; }, kUnsupported, "page_format"},
    {"q_indptr_host decreasing", [](Args &a) { a.q_indptr_host = kDecreasing; }, kInvalid, "q_indptr_host"},
    {"q_indptr_host past q_rows", [](Args &a) { a.q_indptr_host = kPastTheRows; }, kInvalid, "q_indptr_host"},
    {"q_indptr_host starts at -1", [](Args &a) { a.q_indptr_host = kNegativeFirst; }, kInvalid, "q_indptr_host"},
    {"sm_scale 0", [](Args &a) { a.sm_scale = 0.0f; }, kInvalid, "sm_scale"},
    {"sm_scale NaN", [](Args &a) { a.sm_scale = std::numeric_limits<float>::quiet_NaN(); }, kInvalid, "sm_scale"},
    {"sm_scale infinite", [](Args &a) { a.sm_scale = std::numeric_limits<float>::infinity(); }, kInvalid, "sm_scale"},
    {"reserved 1", [](Args &a) { a.reserved = 1; }, kInvalid, "reserved"},
};

const Refusal<PlanSizeArgs> kPlanSizeRefusals[] = {
    {"plan_words_out null", [](PlanSizeArgs &a) { a.plan_words_out = nullptr; }, kInvalid, "plan_words_out"},
    {"max_batch 0", [](PlanSizeArgs &a) { a.max_batch = 0; }, kInvalid, "max_batch"},
    {"chunk_tokens 96", [](PlanSizeArgs &a) { a.chunk_tokens = 96; }, kInvalid, "chunk_tokens"},
    {"chunk_tokens without max_slots", [](PlanSizeArgs &a) { a.chunk_tokens = 128; }, kInvalid, "max_slots"},
};

const Refusal<PlanArgs> kPlanRefusals[] = {
    {"struct_size zero", [](PlanArgs &a) { a.struct_size = 0; }, kInvalid, "struct_size"},
    {"kv_len null", [](PlanArgs &a) { a.kv_len = nullptr; }, kInvalid, "kv_len"},
    {"kv_len negative", [](PlanArgs &a) { a.kv_len = kNegativeLength; }, kInvalid, "kv_len"},
    {"page_indptr null", [](PlanArgs &a) { a.page_indptr = nullptr; }, kInvalid, "page_indptr"},
    {"page_indptr of too few pages", [](PlanArgs &a) { a.page_indptr = kFewPages; }, kInvalid, "page_indptr"},
    {"kv_origin inside a page", [](PlanArgs &a) { a.kv_origin = kInsideAPage; }, kInvalid, "kv_origin"},
    {"kv_origin past the first key", [](PlanArgs &a) { a.kv_origin = kOnePage; }, kInvalid, "kv_origin"},
    {"plan null", [](PlanArgs &a) { a.plan = nullptr; }, kInvalid, "plan"},
    {"plan_words too few", [](PlanArgs &a) { a.plan_words -= 1; }, kInvalid, "plan_words"},
    {"batch -1", [](PlanArgs &a) { a.batch = -1; }, kInvalid, "batch"},
    {"batch past max_batch", [](PlanArgs &a) { a.max_batch = 1; }, kInvalid, "max_batch"},
    {"max_slots too few", [](PlanArgs &a) { a.max_slots = 9; }, kInvalid, "max_slots"},
    {"num_q_heads 17 of 2", [](PlanArgs &a) { a.num_q_heads = 17; }, kInvalid, "num_q_heads"},
    {"num_kv_heads 0", [](PlanArgs &a) { a.num_kv_heads = 0; }, kInvalid, "num_kv_heads"},
    {"page_size 0", [](PlanArgs &a) { a.page_size = 0; }, kInvalid, "page_size"},
    {"page_format 7", [](PlanArgs &a) { a.page_format = 7; }, kInvalid, "page_format"},
    {"sm_count 0", [](PlanArgs &a) { a.sm_count = 0; }, kInvalid, "sm_count"},
    {"chunk_tokens 96", [](PlanArgs &a) { a.chunk_tokens = 96; }, kInvalid, "chunk_tokens"},
    {"window -1", [](PlanArgs &a) { a.window = -1; }, kInvalid, "window"},
};

const Refusal<DecodeArgs> kDecodeRefusals[] = {
    {"struct_size zero", [](DecodeArgs &a) { a.struct_size = 0; }, kInvalid, "struct_size"},
    {"q null", [](DecodeArgs &a) { a.q = nullptr; }, kInvalid, "q"},
    {"out null", [](DecodeArgs &a) { a.out = nullptr; }, kInvalid, "out"},
    {"lse misaligned", [](DecodeArgs &a) { a.lse = misaligned(a.lse); }, kInvalid, "lse"},
    {"pool null", [](DecodeArgs &a) { a.pool = nullptr; }, kInvalid, "pool"},
    {"page_ids null", [](DecodeArgs &a) { a.page_ids = nullptr; }, kInvalid, "page_ids"},
    {"plan null", [](DecodeArgs &a) { a.plan = nullptr; }, kInvalid, "plan"},
    {"plan_host null", [](DecodeArgs &a) { a.plan_host = nullptr; }, kInvalid, "plan_host"},
    {"plan_host that is no plan", [](DecodeArgs &a) { a.plan_host = kNoPlan; }, kInvalid, "plan_host"},
    {"workspace null", [](DecodeArgs &a) { a.workspace = nullptr; }, kInvalid, "workspace"},
    {"workspace_bytes too few", [](DecodeArgs &a) { a.workspace_bytes -= 1; }, kInvalid, "workspace_bytes"},
    {"status misaligned", [](DecodeArgs &a) { a.status = misaligned(a.status); }, kInvalid, "status"},
    {"num_pages 0", [](DecodeArgs &a) { a.num_pages = 0; }, kInvalid, "num_pages"},
    {"rows_per_page 300", [](DecodeArgs &a) { a.rows_per_page = 300; }, kInvalid, "rows_per_page"},
    {"layer_row past the page", [](DecodeArgs &a) { a.layer_row = 3 * kPageSize; }, kInvalid, "layer_row"},
    {"q_rows 1", [](DecodeArgs &a) { a.q_rows = 1; }, kInvalid, "q_rows"},
    {"row_offset past q_rows", [](DecodeArgs &a) { a.row_offset = 1; }, kInvalid, "row_offset"},
    {"num_page_ids -1", [](DecodeArgs &a) { a.num_page_ids = -1; }, kInvalid, "num_page_ids"},
    {"num_q_heads unlike the plan's", [](DecodeArgs &a) { a.num_q_heads = 32; }, kInvalid, "num_q_heads"},
    {"num_kv_heads unlike the plan's", [](DecodeArgs &a) { a.num_kv_heads = 4; }, kInvalid, "num_kv_heads"},
    {"head_dim 256", [](DecodeArgs &a) { a.head_dim = 256; }, kUnsupported, "head_dim"},
    {"page_size 32", [](DecodeArgs &a) { a.page_size = 32; }, kUnsupported, "page_size"},
    {"page_format unlike the plan's", [](DecodeArgs &a) { a.page_format = TILEPRESS_PAGE_FORMAT_FOLDED; }, kInvalid,
     "page_format"},
    {"sm_scale NaN", [](DecodeArgs &a) { a.sm_scale = std::numeric_limits<float>::quiet_NaN(); }, kInvalid, "sm_scale"},
    {"reserved 1", [](DecodeArgs &a) { a.reserved = 1; }, kInvalid, "reserved"},
};

size_t refused = 0;

void expect_refused(const char *what, int code, int expected, const char *argument) {
  ++refused;
  const std::string message = code == TILEPRESS_OK ? "" : tilepress_last_error();
  std::printf("refused  %s: %s, %s\n", what, name_of(code), message.c_str());
  if (code == expected && has_word(message, argument)) return;
  std::printf("WRONG    %s must return %s and name %s\n", what, name_of(expected), argument);
  ++failures;
}

template <typename T, size_t n>
void expect_refusals(int (*entry)(const T *), T (*valid)(), const Refusal<T> (&refusals)[n]) {
  expect_refused("args null", entry(nullptr), kInvalid, "args");
  for (const Refusal<T> &refusal : refusals) {
    T args = valid();
    refusal.change(args);
    expect_refused(refusal.what, entry(&args), refusal.code, refusal.argument);
  }
}

// Calls that have nothing to do succeed on any host.
void expect_nothing_done(const char *what, int code) {
  std::printf("nothing  %s: %s\n", what, name_of(code));
  check(code == TILEPRESS_OK, "a call with nothing to do must succeed");
}

// A plan and its sizes are made on the host, in a stub too.
void make_plan() {
  const PlanSizeArgs sizes = valid_plan_size_args();
  check(tilepress_decode_plan_size(&sizes) == TILEPRESS_OK, "a plan of valid limits must have a size");
  plan.assign(static_cast<size_t>(plan_words), 0);
  const PlanArgs args = valid_plan_args();
  check(tilepress_decode_plan(&args) == TILEPRESS_OK, "valid arguments must be planned");
  std::printf("planned  %lld words, a workspace of %lld bytes\n", static_cast<long long>(plan_words),
              static_cast<long long>(workspace_bytes));
}

void show_refusals() {
  make_plan();
  expect_refusals(tilepress_global_prefill, valid_args, kRefusals);
  expect_refusals(tilepress_decode_plan_size, valid_plan_size_args, kPlanSizeRefusals);
  expect_refusals(tilepress_decode_plan, valid_plan_args, kPlanRefusals);
  expect_refusals(tilepress_global_decode, valid_decode_args, kDecodeRefusals);
  std::printf("%zu refusals\n", refused);
  Args args = valid_args();
  args.batch = 0;
  expect_nothing_done("batch 0", tilepress_global_prefill(&args));
  args = valid_args();
  args.q_rows = 0;
  expect_nothing_done("q_rows 0", tilepress_global_prefill(&args));
  PlanArgs empty = valid_plan_args();
  empty.batch = 0;
  check(tilepress_decode_plan(&empty) == TILEPRESS_OK, "a plan may hold no request");
  const DecodeArgs decode = valid_decode_args();
  expect_nothing_done("a plan of batch 0", tilepress_global_decode(&decode));
}

// --- A prefill and a decode step on a GPU, against the same attention in double on the host

#ifndef EXAMPLE_WITHOUT_CUDA

// bf16 is the upper half of an fp32.
using bf16 = uint16_t;

float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to nearest, ties to even; `value` is finite.
bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The same numbers on every host, uniform in [-1, 1).
struct Random {
  uint64_t state = 1;

  bf16 next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return to_bf16(static_cast<float>(state >> 40) / 8388608.0f - 1.0f);
  }
};

constexpr int kQHeads = 16;
constexpr int kKvHeads = 2;
constexpr int kGroup = kQHeads / kKvHeads;
constexpr int kNumPages = 8;
constexpr int kRowsPerPage = 4 * kPageSize;  // K and V rows of two layers
constexpr int kLayerRow = 2 * kPageSize;     // the second layer
constexpr int kOwnedRows = 103;
constexpr int kQRows = kOwnedRows + 5;  // five rows belong to no request
constexpr float kScale = 0.125f;

// The first request is a prompt of 70 tokens; the second appends 33 tokens to a context that then has 150.
struct Request {
  int q_from;
  int rows;
  std::vector<int32_t> pages;
  int last_page_len;

  int context() const { return (static_cast<int>(pages.size()) - 1) * kPageSize + last_page_len; }
};

const Request kRequests[] = {{0, 70, {5, 2}, 6}, {70, 33, {0, 7, 3}, 22}};

struct Inputs {
  std::vector<bf16> q;     // [rows, kQHeads, kHeadDim]
  std::vector<bf16> pool;  // [kNumPages * kRowsPerPage, kKvHeads, kHeadDim]
};

struct Expected {
  explicit Expected(size_t rows) : out(rows * kQHeads * kHeadDim), lse(rows * kQHeads) {}

  std::vector<double> out;  // [rows, kQHeads, kHeadDim]
  std::vector<double> lse;  // [rows, kQHeads]
};

// Where token t's K starts in the pool; its V lies page_size rows further on.
size_t k_offset(const Request &request, int t, int kv_head) {
  const size_t row = static_cast<size_t>(request.pages[t / kPageSize]) * kRowsPerPage + kLayerRow + t % kPageSize;
  return (row * kKvHeads + kv_head) * kHeadDim;
}

constexpr size_t kKToV = static_cast<size_t>(kPageSize) * kKvHeads * kHeadDim;

void write_token(const Request &request, int t, std::vector<bf16> *pool, Random *random) {
  for (int kv_head = 0; kv_head < kKvHeads; ++kv_head)
    for (int column = 0; column < kHeadDim; ++column) {
      const size_t k = k_offset(request, t, kv_head) + column;
      (*pool)[k] = random->next();
      (*pool)[k + kKToV] = random->next();
    }
}

std::vector<bf16> make_queries(int rows, Random *random) {
  std::vector<bf16> q(static_cast<size_t>(rows) * kQHeads * kHeadDim);
  for (bf16 &value : q) value = random->next();
  return q;
}

// Every slot that holds no token of a request is NaN, and must not show.
Inputs prefill_inputs(Random *random) {
  constexpr bf16 kNan = 0x7FC0;
  Inputs inputs{make_queries(kQRows, random),
                std::vector<bf16>(static_cast<size_t>(kNumPages) * kRowsPerPage * kKvHeads * kHeadDim, kNan)};
  for (const Request &request : kRequests)
    for (int t = 0; t < request.context(); ++t) write_token(request, t, &inputs.pool, random);
  return inputs;
}

// Each request's next token: its query, and its K and V behind the context in the pool.
Inputs decode_inputs(const Inputs &before, Random *random) {
  Inputs inputs{make_queries(static_cast<int>(std::size(kRequests)), random), before.pool};
  for (const Request &request : kRequests) write_token(request, request.context(), &inputs.pool, random);
  return inputs;
}

// Attention of one row over the first `visible` tokens of its request.
void attend(const Inputs &inputs, const Request &request, int row, int visible, Expected *expected) {
  for (int head = 0; head < kQHeads; ++head) {
    const size_t at = static_cast<size_t>(row) * kQHeads + head;
    const int kv_head = head / kGroup;
    std::vector<double> weights(visible);
    double largest = -std::numeric_limits<double>::infinity();
    for (int t = 0; t < visible; ++t) {
      const size_t k = k_offset(request, t, kv_head);
      double score = 0;
      for (int column = 0; column < kHeadDim; ++column)
        score += static_cast<double>(to_float(inputs.q[at * kHeadDim + column])) * to_float(inputs.pool[k + column]);
      weights[t] = score * kScale;
      largest = std::fmax(largest, weights[t]);
    }
    double total = 0;
    for (double &weight : weights) total += weight = std::exp(weight - largest);
    expected->lse[at] = largest + std::log(total);
    for (int t = 0; t < visible; ++t) {
      const size_t v = k_offset(request, t, kv_head) + kKToV;
      for (int column = 0; column < kHeadDim; ++column)
        expected->out[at * kHeadDim + column] += weights[t] / total * to_float(inputs.pool[v + column]);
    }
  }
}

void cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("WRONG    CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// An array on the device, a copy of one on the host.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T> &host) : count_(host.size()) {
    cuda(cudaMalloc(reinterpret_cast<void **>(&data_), bytes()));
    cuda(cudaMemcpy(data_, host.data(), bytes(), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray &) = delete;
  DeviceArray &operator=(const DeviceArray &) = delete;

  T *get() const { return data_; }

  std::vector<T> to_host() const {
    std::vector<T> host(count_);
    cuda(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }

  T *data_ = nullptr;
  size_t count_;
};

// The kernel rounds softmax weights to bf16, a relative 2^-9 each, and |V| is at most 1.
constexpr double kOutTolerance = 0.002;
constexpr double kLseTolerance = 0.001;

// Half the distance of bf16 values at `value`: what storing the output may cost.
double half_ulp(double value) { return std::ldexp(1.0, std::ilogb(std::fabs(value) + kOutTolerance) - 8); }

// Where a call writes: sentinels, a bf16 and an fp32 NaN that no kernel computes. Both arrays go on after their last row.
constexpr bf16 kOutSentinel = 0x7FA5;
constexpr uint32_t kLseSentinel = 0x7FA5A5A5;
constexpr size_t kPast = 4096;

struct Results {
  explicit Results(int rows)
      : out(std::vector<bf16>(static_cast<size_t>(rows) * kQHeads * kHeadDim + kPast, kOutSentinel)),
        lse(std::vector<uint32_t>(static_cast<size_t>(rows) * kQHeads + kPast, kLseSentinel)),
        status(std::vector<uint32_t>{0}) {}

  DeviceArray<bf16> out;
  DeviceArray<uint32_t> lse;
  DeviceArray<uint32_t> status;
};

// Whether a call ran; where it did not, the device must be the reason: the library is built for one kind of GPU.
bool ran(const char *name, int code) {
  if (code == TILEPRESS_OK) {
    cuda(cudaDeviceSynchronize());
    return true;
  }
  std::printf("%-8s %s, %s\n", name, name_of(code), tilepress_last_error());
  check(code == TILEPRESS_DEVICE, "a valid call must run, or be refused for the device");
  return false;
}

// `expected` has the rows that requests own; what lies behind them must be as it was.
void compare(const char *name, const Expected &expected, const Results &results) {
  const std::vector<bf16> got = results.out.to_host();
  const std::vector<uint32_t> got_lse = results.lse.to_host();
  double out_error = 0;
  double lse_error = 0;
  bool close = true;
  for (size_t i = 0; i < expected.out.size(); ++i) {
    const double error = std::fabs(to_float(got[i]) - expected.out[i]);
    out_error = std::fmax(out_error, error);
    close = close && error <= kOutTolerance + half_ulp(expected.out[i]);  // false for NaN
  }
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    float value;
    std::memcpy(&value, &got_lse[i], sizeof value);
    const double error = std::fabs(value - expected.lse[i]);
    lse_error = std::fmax(lse_error, error);
    close = close && error <= kLseTolerance;
  }
  bool untouched = true;
  for (size_t i = expected.out.size(); i < got.size(); ++i) untouched = untouched && got[i] == kOutSentinel;
  for (size_t i = expected.lse.size(); i < got_lse.size(); ++i) untouched = untouched && got_lse[i] == kLseSentinel;
  std::printf("%-8s largest error: %.6f of the output, %.6f of lse\n", name, out_error, lse_error);
  check(close, "the output is too far from attention in double");
  check(untouched, "the call wrote past the rows of its requests");
  check(results.status.to_host()[0] == 0, "the call reports a bad index");
}

// Page ids of the requests, one after another, and where each request's begin.
struct PageLists {
  std::vector<int32_t> ids;
  std::vector<int32_t> indptr{0};

  PageLists() {
    for (const Request &request : kRequests) {
      ids.insert(ids.end(), request.pages.begin(), request.pages.end());
      indptr.push_back(static_cast<int32_t>(ids.size()));
    }
  }
};

// Returns whether the device ran it.
bool prefill_on_gpu(const Inputs &inputs) {
  const PageLists pages;
  std::vector<int32_t> last_page_len;
  std::vector<int32_t> q_indptr{0};
  for (const Request &request : kRequests) {
    last_page_len.push_back(request.last_page_len);
    q_indptr.push_back(request.q_from + request.rows);
  }
  const DeviceArray<bf16> q(inputs.q);
  const DeviceArray<bf16> pool(inputs.pool);
  const DeviceArray<int32_t> page_ids(pages.ids);
  const DeviceArray<int32_t> page_indptr(pages.indptr);
  const DeviceArray<int32_t> device_last_page_len(last_page_len);
  const DeviceArray<int32_t> device_q_indptr(q_indptr);
  const Results results(kQRows);

  Args args{};
  args.struct_size = sizeof args;
  args.q = q.get();
  args.out = results.out.get();
  args.lse = reinterpret_cast<float *>(results.lse.get());
  args.pool = pool.get();
  args.page_ids = page_ids.get();
  args.page_indptr = page_indptr.get();
  args.last_page_len = device_last_page_len.get();
  args.q_indptr = device_q_indptr.get();
  args.q_indptr_host = q_indptr.data();
  args.status = results.status.get();
  args.num_pages = kNumPages;
  args.rows_per_page = kRowsPerPage;
  args.layer_row = kLayerRow;
  args.q_rows = kQRows;
  args.num_page_ids = static_cast<int32_t>(pages.ids.size());
  args.batch = static_cast<int32_t>(last_page_len.size());
  args.num_q_heads = kQHeads;
  args.num_kv_heads = kKvHeads;
  args.head_dim = kHeadDim;
  args.page_size = kPageSize;
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  args.sm_scale = kScale;
  if (!ran("prefill", tilepress_global_prefill(&args))) return false;

  Expected expected(kOwnedRows);
  for (const Request &request : kRequests)
    for (int i = 0; i < request.rows; ++i)
      attend(inputs, request, request.q_from + i, request.context() - request.rows + i + 1, &expected);
  compare("prefill", expected, results);
  return true;
}

// A decode step: sizes and plan on the host, the plan copied to the device, one call. Returns whether the device ran it.
bool decode_on_gpu(const Inputs &inputs) {
  const PageLists pages;
  std::vector<int32_t> kv_len;
  for (const Request &request : kRequests) kv_len.push_back(request.context() + 1);
  const auto batch = static_cast<int32_t>(kv_len.size());
  int device = 0;
  int sm_count = 0;
  cuda(cudaGetDevice(&device));
  cuda(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device));

  // Once: buffers that serve every plan of up to max_batch requests.
  int64_t words = 0;
  int64_t bytes = 0;
  PlanSizeArgs sizes = valid_plan_size_args();
  sizes.plan_words_out = &words;
  sizes.workspace_bytes_out = &bytes;
  sizes.max_batch = 4;
  sizes.num_q_heads = kQHeads;
  sizes.num_kv_heads = kKvHeads;
  sizes.sm_count = sm_count;
  check(tilepress_decode_plan_size(&sizes) == TILEPRESS_OK, "a plan of valid limits must have a size");
  std::vector<int32_t> host_plan(static_cast<size_t>(words));
  const DeviceArray<unsigned char> workspace(std::vector<unsigned char>(static_cast<size_t>(bytes), 0xFF));

  // Every step: the requests' lengths have grown.
  PlanArgs planning = valid_plan_args();
  planning.kv_len = kv_len.data();
  planning.page_indptr = pages.indptr.data();
  planning.plan = host_plan.data();
  planning.plan_words = words;
  planning.batch = batch;
  planning.max_batch = sizes.max_batch;
  planning.num_q_heads = kQHeads;
  planning.num_kv_heads = kKvHeads;
  planning.sm_count = sm_count;
  check(tilepress_decode_plan(&planning) == TILEPRESS_OK, "valid arguments must be planned");

  const DeviceArray<bf16> q(inputs.q);
  const DeviceArray<bf16> pool(inputs.pool);
  const DeviceArray<int32_t> page_ids(pages.ids);
  const DeviceArray<int32_t> device_plan(host_plan);
  const Results results(batch);
  DecodeArgs args{};
  args.struct_size = sizeof args;
  args.q = q.get();
  args.out = results.out.get();
  args.lse = reinterpret_cast<float *>(results.lse.get());
  args.pool = pool.get();
  args.page_ids = page_ids.get();
  args.plan = device_plan.get();
  args.plan_host = host_plan.data();
  args.workspace = workspace.get();
  args.status = results.status.get();
  args.num_pages = kNumPages;
  args.rows_per_page = kRowsPerPage;
  args.layer_row = kLayerRow;
  args.workspace_bytes = bytes;
  args.q_rows = batch;
  args.num_page_ids = static_cast<int32_t>(pages.ids.size());
  args.num_q_heads = kQHeads;
  args.num_kv_heads = kKvHeads;
  args.head_dim = kHeadDim;
  args.page_size = kPageSize;
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  args.sm_scale = kScale;
  if (!ran("decode", tilepress_global_decode(&args))) return false;

  Expected expected(kv_len.size());
  for (int r = 0; r < batch; ++r) attend(inputs, kRequests[r], r, kv_len[r], &expected);
  compare("decode", expected, results);
  return true;
}

bool run_on_gpu() {
  Random random;
  const Inputs prompt = prefill_inputs(&random);
  return prefill_on_gpu(prompt) && decode_on_gpu(decode_inputs(prompt, &random));
}

bool gpu_present() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

#endif

// Makes a valid call of each entry where no kernel can run: both return `expected`.
void expect_no_kernel(const char *why, int expected) {
  const Args args = valid_args();
  const int prefill = tilepress_global_prefill(&args);
  std::printf("prefill  %s: %s, %s\n", why, name_of(prefill), tilepress_last_error());
  make_plan();
  const DecodeArgs decode_args = valid_decode_args();
  const int decode = tilepress_global_decode(&decode_args);
  std::printf("decode   %s: %s, %s\n", why, name_of(decode), tilepress_last_error());
  check(prefill == expected && decode == expected, "a valid call must say why no kernel can run");
}

// Returns whether a prefill and a decode step ran.
bool show_attention() {
  const bool stub = has_word(tilepress_build_info(), "tier=stub");
  if (stub) {
    expect_no_kernel("a stub", TILEPRESS_STUB);
    return false;
  }
#ifndef EXAMPLE_WITHOUT_CUDA
  if (gpu_present()) return run_on_gpu();
  // Without a device even valid arguments are refused; these hold addresses of the host, and are not read.
  expect_no_kernel("no GPU here", TILEPRESS_CUDA);
#else
  std::printf("prefill  this program was compiled without CUDA\n");
#endif
  return false;
}

}  // namespace

int main(int argc, char **argv) {
  const bool require_gpu = argc == 2 && std::strcmp(argv[1], "--require-gpu") == 0;
  if (argc > 1 && !require_gpu) {
    std::fprintf(stderr, "usage: %s [--require-gpu]\n", argv[0]);
    return 2;
  }
  std::printf("tilepress %s, header %s\n%s\n", tilepress_version(), TILEPRESS_VERSION, tilepress_build_info());
  check(std::strcmp(tilepress_version(), TILEPRESS_VERSION) == 0, "library and header are of two versions");
  show_served();
  show_refusals();
  const bool attended = show_attention();
  check(attended || !require_gpu, "--require-gpu: no kernel ran");
  std::printf(failures == 0 ? "all as expected\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
