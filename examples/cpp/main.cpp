// Uses Tilepress from C++: what the library is, what it serves, what it refuses, and one prefill checked on the host.
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
#include <limits>
#include <string>
#include <vector>

#ifndef EXAMPLE_WITHOUT_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

constexpr char kEntry[] = "tilepress_global_prefill";
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
  for (const Served &heads : kServed) {
    const int code =
        tilepress_supports(kEntry, heads.num_q_heads, heads.num_kv_heads, kHeadDim, kPageSize, TILEPRESS_PAGE_FORMAT_SPLIT);
    std::printf("served   %d/%d heads: %s\n", heads.num_q_heads, heads.num_kv_heads, name_of(code));
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

// One change of valid arguments: the code it must return and the argument that the message must name.
struct Refusal {
  const char *what;
  void (*change)(Args &);
  int code;
  const char *argument;
};

constexpr int kInvalid = TILEPRESS_INVALID_ARGUMENT;
constexpr int kUnsupported = TILEPRESS_UNSUPPORTED;

const Refusal kRefusals[] = {
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

void expect_refused(const char *what, const Args *args, int expected, const char *argument) {
  const int code = tilepress_global_prefill(args);
  const std::string message = code == TILEPRESS_OK ? "" : tilepress_last_error();
  std::printf("refused  %s: %s, %s\n", what, name_of(code), message.c_str());
  if (code == expected && has_word(message, argument)) return;
  std::printf("WRONG    %s must return %s and name %s\n", what, name_of(expected), argument);
  ++failures;
}

// Calls that have nothing to do succeed on any host.
void expect_nothing_done(const char *what, const Args &args) {
  const int code = tilepress_global_prefill(&args);
  std::printf("nothing  %s: %s\n", what, name_of(code));
  check(code == TILEPRESS_OK, "a call with nothing to do must succeed");
}

void show_refusals() {
  expect_refused("args null", nullptr, kInvalid, "args");
  for (const Refusal &refusal : kRefusals) {
    Args args = valid_args();
    refusal.change(args);
    expect_refused(refusal.what, &args, refusal.code, refusal.argument);
  }
  std::printf("%zu refusals\n", 1 + sizeof kRefusals / sizeof kRefusals[0]);
  Args args = valid_args();
  args.batch = 0;
  expect_nothing_done("batch 0", args);
  args = valid_args();
  args.q_rows = 0;
  expect_nothing_done("q_rows 0", args);
}

// --- One prefill on a GPU, against the same attention in double on the host

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
  std::vector<bf16> q;     // [kQRows, kQHeads, kHeadDim]
  std::vector<bf16> pool;  // [kNumPages * kRowsPerPage, kKvHeads, kHeadDim]
};

struct Expected {
  std::vector<double> out;  // [kOwnedRows, kQHeads, kHeadDim]
  std::vector<double> lse;  // [kOwnedRows, kQHeads]
};

// Where token t's K starts in the pool; its V lies page_size rows further on.
size_t k_offset(const Request &request, int t, int kv_head) {
  const size_t row = static_cast<size_t>(request.pages[t / kPageSize]) * kRowsPerPage + kLayerRow + t % kPageSize;
  return (row * kKvHeads + kv_head) * kHeadDim;
}

constexpr size_t kKToV = static_cast<size_t>(kPageSize) * kKvHeads * kHeadDim;

// Every slot that holds no token of a request is NaN, and must not show.
Inputs make_inputs() {
  constexpr bf16 kNan = 0x7FC0;
  Random random;
  Inputs inputs{std::vector<bf16>(static_cast<size_t>(kQRows) * kQHeads * kHeadDim),
                std::vector<bf16>(static_cast<size_t>(kNumPages) * kRowsPerPage * kKvHeads * kHeadDim, kNan)};
  for (bf16 &value : inputs.q) value = random.next();
  for (const Request &request : kRequests)
    for (int t = 0; t < request.context(); ++t)
      for (int kv_head = 0; kv_head < kKvHeads; ++kv_head)
        for (int column = 0; column < kHeadDim; ++column) {
          const size_t k = k_offset(request, t, kv_head) + column;
          inputs.pool[k] = random.next();
          inputs.pool[k + kKToV] = random.next();
        }
  return inputs;
}

Expected attend(const Inputs &inputs) {
  Expected expected{std::vector<double>(static_cast<size_t>(kOwnedRows) * kQHeads * kHeadDim),
                    std::vector<double>(static_cast<size_t>(kOwnedRows) * kQHeads)};
  for (const Request &request : kRequests)
    for (int i = 0; i < request.rows; ++i)
      for (int head = 0; head < kQHeads; ++head) {
        const size_t row = static_cast<size_t>(request.q_from + i) * kQHeads + head;
        const int kv_head = head / kGroup;
        const int visible = request.context() - request.rows + i + 1;
        std::vector<double> weights(visible);
        double largest = -std::numeric_limits<double>::infinity();
        for (int t = 0; t < visible; ++t) {
          const size_t k = k_offset(request, t, kv_head);
          double score = 0;
          for (int column = 0; column < kHeadDim; ++column)
            score += static_cast<double>(to_float(inputs.q[row * kHeadDim + column])) * to_float(inputs.pool[k + column]);
          weights[t] = score * kScale;
          largest = std::fmax(largest, weights[t]);
        }
        double total = 0;
        for (double &weight : weights) total += weight = std::exp(weight - largest);
        expected.lse[row] = largest + std::log(total);
        for (int t = 0; t < visible; ++t) {
          const size_t v = k_offset(request, t, kv_head) + kKToV;
          for (int column = 0; column < kHeadDim; ++column)
            expected.out[row * kHeadDim + column] += weights[t] / total * to_float(inputs.pool[v + column]);
        }
      }
  return expected;
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

// Returns whether the device ran it: the library is built for one kind of GPU.
bool prefill_on_gpu() {
  const Inputs inputs = make_inputs();
  std::vector<int32_t> page_ids;
  std::vector<int32_t> page_indptr{0};
  std::vector<int32_t> last_page_len;
  std::vector<int32_t> q_indptr{0};
  for (const Request &request : kRequests) {
    page_ids.insert(page_ids.end(), request.pages.begin(), request.pages.end());
    page_indptr.push_back(static_cast<int32_t>(page_ids.size()));
    last_page_len.push_back(request.last_page_len);
    q_indptr.push_back(request.q_from + request.rows);
  }

  // Sentinels: a bf16 and an fp32 NaN that no kernel computes. Both arrays go on after their last row.
  constexpr bf16 kOutSentinel = 0x7FA5;
  constexpr uint32_t kLseSentinel = 0x7FA5A5A5;
  constexpr size_t kPast = 4096;
  const size_t owned = static_cast<size_t>(kOwnedRows) * kQHeads;
  const size_t rows = static_cast<size_t>(kQRows) * kQHeads;
  const DeviceArray<bf16> q(inputs.q);
  const DeviceArray<bf16> pool(inputs.pool);
  const DeviceArray<int32_t> device_page_ids(page_ids);
  const DeviceArray<int32_t> device_page_indptr(page_indptr);
  const DeviceArray<int32_t> device_last_page_len(last_page_len);
  const DeviceArray<int32_t> device_q_indptr(q_indptr);
  const DeviceArray<bf16> out(std::vector<bf16>(rows * kHeadDim + kPast, kOutSentinel));
  const DeviceArray<uint32_t> lse(std::vector<uint32_t>(rows + kPast, kLseSentinel));
  const DeviceArray<uint32_t> status(std::vector<uint32_t>{0});

  Args args{};
  args.struct_size = sizeof args;
  args.q = q.get();
  args.out = out.get();
  args.lse = reinterpret_cast<float *>(lse.get());
  args.pool = pool.get();
  args.page_ids = device_page_ids.get();
  args.page_indptr = device_page_indptr.get();
  args.last_page_len = device_last_page_len.get();
  args.q_indptr = device_q_indptr.get();
  args.q_indptr_host = q_indptr.data();
  args.status = status.get();
  args.num_pages = kNumPages;
  args.rows_per_page = kRowsPerPage;
  args.layer_row = kLayerRow;
  args.q_rows = kQRows;
  args.num_page_ids = static_cast<int32_t>(page_ids.size());
  args.batch = static_cast<int32_t>(last_page_len.size());
  args.num_q_heads = kQHeads;
  args.num_kv_heads = kKvHeads;
  args.head_dim = kHeadDim;
  args.page_size = kPageSize;
  args.page_format = TILEPRESS_PAGE_FORMAT_SPLIT;
  args.sm_scale = kScale;
  const int code = tilepress_global_prefill(&args);
  if (code != TILEPRESS_OK) {
    std::printf("prefill  %s, %s\n", name_of(code), tilepress_last_error());
    check(code == TILEPRESS_DEVICE, "a valid call must run, or be refused for the device");
    return false;
  }
  cuda(cudaDeviceSynchronize());

  const Expected expected = attend(inputs);
  const std::vector<bf16> got = out.to_host();
  const std::vector<uint32_t> got_lse = lse.to_host();
  double out_error = 0;
  double lse_error = 0;
  bool close = true;
  for (size_t i = 0; i < owned * kHeadDim; ++i) {
    const double error = std::fabs(to_float(got[i]) - expected.out[i]);
    out_error = std::fmax(out_error, error);
    close = close && error <= kOutTolerance + half_ulp(expected.out[i]);  // false for NaN
  }
  for (size_t i = 0; i < owned; ++i) {
    float value;
    std::memcpy(&value, &got_lse[i], sizeof value);
    const double error = std::fabs(value - expected.lse[i]);
    lse_error = std::fmax(lse_error, error);
    close = close && error <= kLseTolerance;
  }
  bool untouched = true;
  for (size_t i = owned * kHeadDim; i < got.size(); ++i) untouched = untouched && got[i] == kOutSentinel;
  for (size_t i = owned; i < got_lse.size(); ++i) untouched = untouched && got_lse[i] == kLseSentinel;
  std::printf("prefill  largest error: %.6f of the output, %.6f of lse\n", out_error, lse_error);
  check(close, "the prefill is too far from attention in double");
  check(untouched, "the prefill wrote past the rows of its requests");
  check(status.to_host()[0] == 0, "the prefill reports a bad index");
  return true;
}

bool gpu_present() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

#endif

// Returns whether a prefill ran.
bool show_prefill() {
  const bool stub = has_word(tilepress_build_info(), "tier=stub");
  if (stub) {
    const Args args = valid_args();
    const int code = tilepress_global_prefill(&args);
    std::printf("prefill  a stub: %s, %s\n", name_of(code), tilepress_last_error());
    check(code == TILEPRESS_STUB, "a stub must refuse a valid call with STUB");
    return false;
  }
#ifndef EXAMPLE_WITHOUT_CUDA
  if (gpu_present()) return prefill_on_gpu();
  // Without a device even valid arguments are refused; these hold addresses of the host, and are not read.
  const Args args = valid_args();
  const int code = tilepress_global_prefill(&args);
  std::printf("prefill  no GPU here: %s, %s\n", name_of(code), tilepress_last_error());
  check(code == TILEPRESS_CUDA, "without a GPU a valid call must return CUDA");
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
  const bool ran = show_prefill();
  check(ran || !require_gpu, "--require-gpu: no prefill ran");
  std::printf(failures == 0 ? "all as expected\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
