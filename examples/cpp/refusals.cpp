// What the library refuses, before any CUDA call: a call of every wrong argument, the code that it must return and the argument
// that its message must name.
#include <tilepress.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "example.h"

namespace example {
namespace {

// --- Valid arguments, each table's refusals being one change of them

using Args = tilepress_prefill_args;
using PlanSizeArgs = tilepress_decode_plan_size_args;
using PlanArgs = tilepress_decode_plan_args;
using DecodeArgs = tilepress_decode_args;
using RoutedArgs = tilepress_routed_prefill_args;
using RoutedDecodeArgs = tilepress_routed_decode_args;

// Never read: a refusal comes first.
alignas(16) unsigned char dummy[32];
const int32_t *const kDummyInts = reinterpret_cast<const int32_t *>(dummy);

template <typename T>
T *misaligned(T *) {
  return reinterpret_cast<T *>(dummy + 2);
}

constexpr int32_t kRanges[] = {0, 70, 103};
constexpr int32_t kDecreasing[] = {0, 70, 69};
constexpr int32_t kPastTheRows[] = {0, 70, 104};
constexpr int32_t kNegativeFirst[] = {-1, 70, 103};

// A field that is not set is zero, which means absent.
template <typename T>
T with_heads() {
  T args{};
  args.struct_size = sizeof args;
  args.num_q_heads = 16;
  args.num_kv_heads = 2;
  return args;
}

// What a prefill and a decode step share: 5 pages of a pool of 8, in the second of two layers. T: a call's arguments, direct or
// routed.
template <typename T>
T over_the_pool() {
  T args = with_heads<T>();
  args.q = dummy;
  args.out = dummy;
  args.pool = dummy;
  args.page_ids = kDummyInts;
  args.num_pages = 8;
  args.rows_per_page = 4 * kPageSize;
  args.layer_row = 2 * kPageSize;
  args.num_page_ids = 5;
  args.head_dim = kHeadDim;
  args.page_size = kPageSize;
  args.sm_scale = 1.0f;
  return args;
}

// Two requests of 70 and 33 rows.
template <typename T>
T prefill_of_two() {
  T args = over_the_pool<T>();
  args.page_indptr = kDummyInts;
  args.last_page_len = kDummyInts;
  args.q_indptr = kDummyInts;
  args.q_indptr_host = kRanges;
  args.q_rows = 103;
  args.batch = 2;
  return args;
}

Args valid_args() {
  Args args = prefill_of_two<Args>();
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
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

// A plan is made on the host, in a stub too.
struct Plan {
  std::vector<int32_t> words;
  int64_t workspace_bytes = 0;
};

template <typename T>
T sizes_of_two(int64_t *words, int64_t *workspace_bytes) {
  T args = with_heads<T>();
  args.plan_words_out = words;
  args.workspace_bytes_out = workspace_bytes;
  args.max_batch = 2;
  args.head_dim = kHeadDim;
  args.page_size = kPageSize;
  args.sm_count = kSmCount;
  return args;
}

template <typename T>
T planning_of_two(Plan *plan) {
  T args = with_heads<T>();
  args.kv_len = kLengths;
  args.page_indptr = kPages;
  args.plan = plan->words.data();
  args.plan_words = static_cast<int64_t>(plan->words.size());
  args.batch = 2;
  args.max_batch = 2;
  args.page_size = kPageSize;
  args.sm_count = kSmCount;
  return args;
}

template <typename T>
T decode_of_two(const Plan &plan) {
  T args = over_the_pool<T>();
  args.plan = kDummyInts;
  args.plan_host = plan.words.data();
  args.workspace = dummy;
  args.workspace_bytes = plan.workspace_bytes;
  args.q_rows = 2;
  return args;
}

PlanSizeArgs valid_plan_size_args(int64_t *words, int64_t *workspace_bytes) {
  PlanSizeArgs args = sizes_of_two<PlanSizeArgs>(words, workspace_bytes);
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  return args;
}

PlanArgs valid_plan_args(Plan *plan) {
  PlanArgs args = planning_of_two<PlanArgs>(plan);
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  return args;
}

DecodeArgs valid_decode_args(const Plan &plan) {
  DecodeArgs args = decode_of_two<DecodeArgs>(plan);
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  return args;
}

Plan make_plan() {
  Plan plan;
  int64_t words = 0;
  const PlanSizeArgs sizes = valid_plan_size_args(&words, &plan.workspace_bytes);
  check(tilepress_decode_plan_size(&sizes) == TILEPRESS_OK, "a plan of valid limits must have a size");
  std::printf("planned  %lld words, a workspace of %lld bytes\n", static_cast<long long>(words),
              static_cast<long long>(plan.workspace_bytes));
  plan.words.resize(static_cast<size_t>(words));
  const PlanArgs args = valid_plan_args(&plan);
  check(tilepress_decode_plan(&args) == TILEPRESS_OK, "valid arguments must be planned");
  return plan;
}

// The routed entries: the same calls, with a mode in the place of the page format, and a plan of that mode for either.

Plan make_routed_plan(int32_t mode) {
  Plan plan;
  int64_t words = 0;
  auto sizes = with_heads<tilepress_routed_prefill_plan_size_args>();
  sizes.plan_words_out = &words;
  sizes.max_rows = 103;
  sizes.max_batch = 2;
  sizes.head_dim = kHeadDim;
  sizes.mode = mode;
  check(tilepress_routed_global_prefill_plan_size(&sizes) == TILEPRESS_OK, "a plan of valid limits must have a size");
  plan.words.resize(static_cast<size_t>(words));
  auto args = with_heads<tilepress_routed_prefill_plan_args>();
  args.q_indptr = kRanges;
  args.plan = plan.words.data();
  args.plan_words = words;
  args.q_rows = 103;
  args.batch = 2;
  args.head_dim = kHeadDim;
  args.mode = mode;
  check(tilepress_routed_global_prefill_plan(&args) == TILEPRESS_OK, "valid arguments must be planned");
  return plan;
}

Plan make_routed_decode_plan(int32_t mode) {
  Plan plan;
  int64_t words = 0;
  auto sizes = sizes_of_two<tilepress_routed_decode_plan_size_args>(&words, &plan.workspace_bytes);
  sizes.mode = mode;
  check(tilepress_routed_global_decode_plan_size(&sizes) == TILEPRESS_OK, "a plan of valid limits must have a size");
  plan.words.resize(static_cast<size_t>(words));
  auto args = planning_of_two<tilepress_routed_decode_plan_args>(&plan);
  args.mode = mode;
  check(tilepress_routed_global_decode_plan(&args) == TILEPRESS_OK, "valid arguments must be planned");
  return plan;
}

RoutedArgs valid_routed_args(int32_t mode, const Plan &plan) {
  RoutedArgs args = prefill_of_two<RoutedArgs>();
  args.plan = kDummyInts;
  args.plan_host = plan.words.data();
  args.mode = mode;
  return args;
}

RoutedDecodeArgs valid_routed_decode_args(int32_t mode, const Plan &plan) {
  RoutedDecodeArgs args = decode_of_two<RoutedDecodeArgs>(plan);
  args.mode = mode;
  return args;
}

// --- The refusals

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
    {"early 2", [](DecodeArgs &a) { a.early = 2; }, kInvalid, "early"},
};

// Of calls that are valid in the incumbent's mode.
const Refusal<RoutedArgs> kRoutedRefusals[] = {
    {"mode 0", [](RoutedArgs &a) { a.mode = 0; }, kInvalid, "mode"},
    {"mode 7", [](RoutedArgs &a) { a.mode = 7; }, kInvalid, "mode"},
    {"lse in the incumbent's mode", [](RoutedArgs &a) { a.lse = reinterpret_cast<float *>(dummy); }, kUnsupported, "lse"},
    {"no plan in the incumbent's mode", [](RoutedArgs &a) { a.plan_host = nullptr; }, kInvalid, "plan_host"},
};

const Refusal<RoutedDecodeArgs> kRoutedDecodeRefusals[] = {
    {"mode 0", [](RoutedDecodeArgs &a) { a.mode = 0; }, kInvalid, "mode"},
    {"mode 7", [](RoutedDecodeArgs &a) { a.mode = 7; }, kInvalid, "mode"},
    {"lse in the incumbent's mode", [](RoutedDecodeArgs &a) { a.lse = reinterpret_cast<float *>(dummy); }, kUnsupported, "lse"},
    {"the incumbent's plan in another mode", [](RoutedDecodeArgs &a) { a.mode = TILEPRESS_MODE_TILELANG; }, kInvalid,
     "plan_host"},
};

size_t refused = 0;

// Returns the message.
std::string expect_refused(const std::string &what, int code, int expected, const char *argument) {
  ++refused;
  const std::string message = code == TILEPRESS_OK ? "" : tilepress_last_error();
  std::printf("refused  %s: %s, %s\n", what.c_str(), name_of(code), message.c_str());
  check(code == expected && has_word(message, argument), what + " must return " + name_of(expected) + " and name " + argument);
  return message;
}

template <typename T, typename Valid, size_t n>
void expect_refusals(int (*entry)(const T *), const Valid &valid, const Refusal<T> (&refusals)[n]) {
  expect_refused("args null", entry(nullptr), kInvalid, "args");
  for (const Refusal<T> &refusal : refusals) {
    T args = valid();
    refusal.change(args);
    expect_refused(refusal.what, entry(&args), refusal.code, refusal.argument);
  }
}

// A value of the knob that is none is an error that says what is allowed, never a default.
void expect_unknown_mode() {
  int32_t mode = -1;
  const int code = tilepress_parse_mode("on", &mode);
  const std::string message = expect_refused("the knob at 'on'", code, kInvalid, "PEGAINFER_GLOBAL_ATTN");
  for (const char *allowed : {"off", "tilelang", "tilelang640"})
    check(has_word(message, allowed), std::string("a refused mode must name ") + allowed);
  check(mode == -1, "a refusal leaves the mode as it was");
}

// Calls that have nothing to do succeed on any host.
void expect_nothing_done(const char *what, int code) {
  std::printf("nothing  %s: %s\n", what, name_of(code));
  check(code == TILEPRESS_OK, "a call with nothing to do must succeed");
}

void expect_routed_refusals() {
  constexpr int32_t kMode = TILEPRESS_MODE_INCUMBENT;
  const Plan plan = make_routed_plan(kMode);
  const Plan decode_plan = make_routed_decode_plan(kMode);
  expect_unknown_mode();
  expect_refusals(tilepress_routed_global_prefill, [&] { return valid_routed_args(kMode, plan); }, kRoutedRefusals);
  expect_refusals(
      tilepress_routed_global_decode, [&] { return valid_routed_decode_args(kMode, decode_plan); }, kRoutedDecodeRefusals);
}

}  // namespace

void show_refusals() {
  Plan plan = make_plan();
  int64_t words = 0;
  int64_t workspace_bytes = 0;
  expect_refusals(tilepress_global_prefill, valid_args, kRefusals);
  expect_refusals(
      tilepress_decode_plan_size, [&] { return valid_plan_size_args(&words, &workspace_bytes); }, kPlanSizeRefusals);
  expect_refusals(tilepress_decode_plan, [&] { return valid_plan_args(&plan); }, kPlanRefusals);
  expect_refusals(tilepress_global_decode, [&] { return valid_decode_args(plan); }, kDecodeRefusals);
  expect_routed_refusals();
  std::printf("%zu refusals\n", refused);

  Args args = valid_args();
  args.batch = 0;
  expect_nothing_done("batch 0", tilepress_global_prefill(&args));
  args = valid_args();
  args.q_rows = 0;
  expect_nothing_done("q_rows 0", tilepress_global_prefill(&args));
  PlanArgs empty = valid_plan_args(&plan);
  empty.batch = 0;
  check(tilepress_decode_plan(&empty) == TILEPRESS_OK, "a plan may hold no request");
  const DecodeArgs decode = valid_decode_args(plan);
  expect_nothing_done("a plan of batch 0", tilepress_global_decode(&decode));
}

void expect_no_kernel(int32_t mode, const char *why, int expected) {
  const Plan plan = make_routed_plan(mode);
  const RoutedArgs args = valid_routed_args(mode, plan);
  const int prefill = tilepress_routed_global_prefill(&args);
  std::printf("prefill  %s: %s, %s\n", why, name_of(prefill), tilepress_last_error());
  const Plan decode_plan = make_routed_decode_plan(mode);
  const RoutedDecodeArgs decode_args = valid_routed_decode_args(mode, decode_plan);
  const int decode = tilepress_routed_global_decode(&decode_args);
  std::printf("decode   %s: %s, %s\n", why, name_of(decode), tilepress_last_error());
  check(prefill == expected && decode == expected, "a valid call must say why no kernel can run");
}

}  // namespace example
