// A prefill and a decode step on a GPU through the routed entries, against the same attention in double on the host.
#include <cuda_runtime_api.h>
#include <tilepress.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "example.h"

namespace example {
namespace {

// --- Numbers

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

// --- The batch, and its pool in each mode

constexpr int kQHeads = 16;
constexpr int kKvHeads = 2;
constexpr int kGroup = kQHeads / kKvHeads;
constexpr int kNumPages = 8;
constexpr int kLayers = 2;
constexpr int kLayer = 1;  // the second
constexpr int kOwnedRows = 103;
constexpr int kQRows = kOwnedRows + 5;  // five rows belong to no request
constexpr int kMaxBatch = 4;
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
constexpr auto kBatch = static_cast<int32_t>(std::size(kRequests));

// How a mode's pool holds a token. Split: a page has a layer's K rows, then its V rows. Folded: it has one row a token,
// [K_rot 128 | V 512]; K_rot is what the rotation changes of K, columns 0 to 63 and 256 to 319, and K's other columns are V's.
struct Layout {
  int row_width;   // columns of a KV head's row
  int layer_rows;  // rows of a layer in a page
  // From the first element of a token's row to each column of its K and of its V.
  std::array<size_t, kHeadDim> k;
  std::array<size_t, kHeadDim> v;

  explicit Layout(int32_t mode) {
    constexpr size_t kHalf = kHeadDim / 2;
    constexpr size_t kRotated = 64;  // columns of each half
    const bool folded = mode == TILEPRESS_MODE_TILELANG640;
    row_width = folded ? 2 * kRotated + kHeadDim : kHeadDim;
    layer_rows = folded ? kPageSize : 2 * kPageSize;
    for (size_t column = 0; column < kHeadDim; ++column) {
      if (folded) {
        v[column] = 2 * kRotated + column;
        k[column] = column % kHalf < kRotated ? column / kHalf * kRotated + column % kHalf : v[column];
      } else {
        k[column] = column;
        v[column] = static_cast<size_t>(kPageSize) * kKvHeads * kHeadDim + column;
      }
    }
  }

  int64_t rows_per_page() const { return int64_t{kLayers} * layer_rows; }
  int64_t layer_row() const { return int64_t{kLayer} * layer_rows; }
  size_t elements() const { return static_cast<size_t>(kNumPages * rows_per_page() * kKvHeads * row_width); }

  // Where the row of token t starts in the pool.
  size_t token(const Request &request, int t, int kv_head) const {
    const int64_t row = request.pages[t / kPageSize] * rows_per_page() + layer_row() + t % kPageSize;
    return static_cast<size_t>((row * kKvHeads + kv_head) * row_width);
  }
};

struct Inputs {
  Layout layout;
  std::vector<bf16> q;     // [rows, kQHeads, kHeadDim]
  std::vector<bf16> pool;  // [kNumPages * rows_per_page, kKvHeads, row_width]

  void write_token(const Request &request, int t, Random *random) {
    for (int kv_head = 0; kv_head < kKvHeads; ++kv_head) {
      bf16 *row = &pool[layout.token(request, t, kv_head)];
      for (int column = 0; column < kHeadDim; ++column) {
        row[layout.v[column]] = random->next();
        row[layout.k[column]] = random->next();  // once more the same place, where a folded row has one for both
      }
    }
  }
};

std::vector<bf16> make_queries(int rows, Random *random) {
  std::vector<bf16> q(static_cast<size_t>(rows) * kQHeads * kHeadDim);
  for (bf16 &value : q) value = random->next();
  return q;
}

// Every slot that holds no token of a request is NaN, and must not show. That holds in the incumbent's mode too: FlashInfer
// masks the scores of slots past a context, and reads their V as zero.
Inputs prefill_inputs(int32_t mode, Random *random) {
  constexpr bf16 kNan = 0x7FC0;
  const Layout layout(mode);
  Inputs inputs{layout, make_queries(kQRows, random), std::vector<bf16>(layout.elements(), kNan)};
  for (const Request &request : kRequests)
    for (int t = 0; t < request.context(); ++t) inputs.write_token(request, t, random);
  return inputs;
}

// Each request's next token: its query, and its K and V behind the context in the pool.
Inputs decode_inputs(const Inputs &before, Random *random) {
  Inputs inputs{before.layout, make_queries(kBatch, random), before.pool};
  for (const Request &request : kRequests) inputs.write_token(request, request.context(), random);
  return inputs;
}

// --- Attention on the host

struct Expected {
  explicit Expected(size_t rows) : out(rows * kQHeads * kHeadDim), lse(rows * kQHeads) {}

  std::vector<double> out;  // [rows, kQHeads, kHeadDim]
  std::vector<double> lse;  // [rows, kQHeads]
};

// Attention of one row over the first `visible` tokens of its request.
void attend(const Inputs &inputs, const Request &request, int row, int visible, Expected *expected) {
  for (int head = 0; head < kQHeads; ++head) {
    const size_t at = static_cast<size_t>(row) * kQHeads + head;
    const bf16 *q = &inputs.q[at * kHeadDim];
    double *out = &expected->out[at * kHeadDim];
    const auto token = [&](int t) { return &inputs.pool[inputs.layout.token(request, t, head / kGroup)]; };
    std::vector<double> weights(visible);
    double largest = -std::numeric_limits<double>::infinity();
    for (int t = 0; t < visible; ++t) {
      const bf16 *row_of_token = token(t);
      double score = 0;
      for (int column = 0; column < kHeadDim; ++column)
        score += static_cast<double>(to_float(q[column])) * to_float(row_of_token[inputs.layout.k[column]]);
      weights[t] = score * kScale;
      largest = std::fmax(largest, weights[t]);
    }
    double total = 0;
    for (double &weight : weights) total += weight = std::exp(weight - largest);
    expected->lse[at] = largest + std::log(total);
    for (int t = 0; t < visible; ++t) {
      const bf16 *row_of_token = token(t);
      for (int column = 0; column < kHeadDim; ++column)
        out[column] += weights[t] / total * to_float(row_of_token[inputs.layout.v[column]]);
    }
  }
}

// --- The device

void cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("WRONG    CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// An array on the device, a copy of one on the host; null where that is empty.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T> &host) : count_(host.size()) {
    if (host.empty()) return;
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

// Where a call writes: sentinels, a bf16 and an fp32 NaN that no kernel computes. Both arrays go on after their last row.
constexpr bf16 kOutSentinel = 0x7FA5;
constexpr uint32_t kLseSentinel = 0x7FA5A5A5;
constexpr size_t kPast = 4096;

// A kernel rounds softmax weights or partial outputs to bf16, a relative 2^-9 each, and |V| is at most 1.
constexpr double kOutTolerance = 0.002;
constexpr double kLseTolerance = 0.001;

// Half the distance of bf16 values at `value`: what storing the output may cost.
double half_ulp(double value) { return std::ldexp(1.0, std::ilogb(std::fabs(value) + kOutTolerance) - 8); }

// The arguments that tell a routed entry and its planners how many heads there are, and the mode; the rest is absent.
template <typename T>
T routed_args(int32_t mode) {
  T args{};
  args.struct_size = sizeof args;
  args.num_q_heads = kQHeads;
  args.num_kv_heads = kKvHeads;
  args.mode = mode;
  return args;
}

// What a prefill and a decode step have in common on the device: what they read, and where they write.
class Call {
 public:
  Call(const char *name, int32_t mode, const Inputs &inputs, int32_t rows)
      : name_(name),
        mode_(mode),
        layout_(inputs.layout),
        rows_(rows),
        q_(inputs.q),
        pool_(inputs.pool),
        page_ids_(pages.ids),
        out_(std::vector<bf16>(static_cast<size_t>(rows) * kQHeads * kHeadDim + kPast, kOutSentinel)),
        lse_(std::vector<uint32_t>(static_cast<size_t>(rows) * kQHeads + kPast, kLseSentinel)),
        status_(std::vector<uint32_t>{0}) {}

  const PageLists pages;

  // The arguments that both routed entries have. T: either's.
  template <typename T>
  T args() const {
    T args = routed_args<T>(mode_);
    args.q = q_.get();
    args.out = out_.get();
    args.lse = gives_lse() ? reinterpret_cast<float *>(lse_.get()) : nullptr;
    args.pool = pool_.get();
    args.page_ids = page_ids_.get();
    args.status = status_.get();
    args.num_pages = kNumPages;
    args.rows_per_page = layout_.rows_per_page();
    args.layer_row = layout_.layer_row();
    args.q_rows = rows_;
    args.num_page_ids = static_cast<int32_t>(pages.ids.size());
    args.head_dim = kHeadDim;
    args.page_size = kPageSize;
    args.sm_scale = kScale;
    return args;
  }

  // Whether the call ran; where it did not, the device must be the reason: the library is built for one kind of GPU.
  bool ran(int code) const {
    if (code == TILEPRESS_OK) {
      cuda(cudaDeviceSynchronize());
      return true;
    }
    std::printf("%-8s %s: %s, %s\n", name_, name_of_mode(mode_), name_of(code), tilepress_last_error());
    check(code == TILEPRESS_DEVICE, "a valid call must run, or be refused for the device");
    return false;
  }

  // `expected` has the rows that requests own; what lies behind them must be as it was, and all of an lse that was not asked
  // for.
  void compare(const Expected &expected) const {
    const std::vector<bf16> got = out_.to_host();
    const std::vector<uint32_t> got_lse = lse_.to_host();
    const size_t lse_count = gives_lse() ? expected.lse.size() : 0;
    double out_error = 0;
    double lse_error = 0;
    bool close = true;
    for (size_t i = 0; i < expected.out.size(); ++i) {
      const double error = std::fabs(to_float(got[i]) - expected.out[i]);
      out_error = std::fmax(out_error, error);
      close = close && error <= kOutTolerance + half_ulp(expected.out[i]);  // false for NaN
    }
    for (size_t i = 0; i < lse_count; ++i) {
      float value;
      std::memcpy(&value, &got_lse[i], sizeof value);
      const double error = std::fabs(value - expected.lse[i]);
      lse_error = std::fmax(lse_error, error);
      close = close && error <= kLseTolerance;
    }
    bool untouched = true;
    for (size_t i = expected.out.size(); i < got.size(); ++i) untouched = untouched && got[i] == kOutSentinel;
    for (size_t i = lse_count; i < got_lse.size(); ++i) untouched = untouched && got_lse[i] == kLseSentinel;
    std::printf("%-8s %s: largest error: %.6f of the output", name_, name_of_mode(mode_), out_error);
    if (gives_lse()) std::printf(", %.6f of lse", lse_error);
    std::printf("\n");
    check(close, "the output is too far from attention in double");
    check(untouched, "the call wrote past the rows of its requests");
    check(status_.to_host()[0] == 0, "the call reports a bad index");
  }

 private:
  // The incumbent gives none, and refuses to be asked for it.
  bool gives_lse() const { return mode_ != TILEPRESS_MODE_INCUMBENT; }

  const char *name_;
  int32_t mode_;
  Layout layout_;
  int32_t rows_;
  DeviceArray<bf16> q_;
  DeviceArray<bf16> pool_;
  DeviceArray<int32_t> page_ids_;
  DeviceArray<bf16> out_;
  DeviceArray<uint32_t> lse_;
  DeviceArray<uint32_t> status_;
};

// --- The calls: sizes and a plan on the host, the plan copied to the device, one call; the same in every mode

// Returns whether the device ran it.
bool prefill(int32_t mode, const Inputs &inputs) {
  std::vector<int32_t> last_page_len;
  std::vector<int32_t> q_indptr{0};
  for (const Request &request : kRequests) {
    last_page_len.push_back(request.last_page_len);
    q_indptr.push_back(request.q_from + request.rows);
  }

  // Once: a plan for every batch within the limits. Its size is 0 in a mode that needs none.
  int64_t words = 0;
  auto sizes = routed_args<tilepress_routed_prefill_plan_size_args>(mode);
  sizes.plan_words_out = &words;
  sizes.max_rows = kQRows;
  sizes.max_batch = kMaxBatch;
  sizes.head_dim = kHeadDim;
  check(tilepress_routed_global_prefill_plan_size(&sizes) == TILEPRESS_OK, "a plan of valid limits must have a size");
  std::vector<int32_t> plan(static_cast<size_t>(words));

  // Every batch.
  auto planning = routed_args<tilepress_routed_prefill_plan_args>(mode);
  planning.q_indptr = q_indptr.data();
  planning.plan = plan.data();
  planning.plan_words = words;
  planning.q_rows = kQRows;
  planning.batch = kBatch;
  planning.head_dim = kHeadDim;
  check(tilepress_routed_global_prefill_plan(&planning) == TILEPRESS_OK, "valid arguments must be planned");

  const Call call("prefill", mode, inputs, kQRows);
  const DeviceArray<int32_t> page_indptr(call.pages.indptr);
  const DeviceArray<int32_t> device_last_page_len(last_page_len);
  const DeviceArray<int32_t> device_q_indptr(q_indptr);
  const DeviceArray<int32_t> device_plan(plan);
  auto args = call.args<tilepress_routed_prefill_args>();
  args.page_indptr = page_indptr.get();
  args.last_page_len = device_last_page_len.get();
  args.q_indptr = device_q_indptr.get();
  args.q_indptr_host = q_indptr.data();
  args.plan = device_plan.get();
  args.plan_host = plan.data();
  args.batch = kBatch;
  if (!call.ran(tilepress_routed_global_prefill(&args))) return false;

  Expected expected(kOwnedRows);
  for (const Request &request : kRequests)
    for (int i = 0; i < request.rows; ++i)
      attend(inputs, request, request.q_from + i, request.context() - request.rows + i + 1, &expected);
  call.compare(expected);
  return true;
}

// Returns whether the device ran it.
bool decode(int32_t mode, const Inputs &inputs) {
  std::vector<int32_t> kv_len;
  for (const Request &request : kRequests) kv_len.push_back(request.context() + 1);
  int device = 0;
  int sm_count = 0;
  cuda(cudaGetDevice(&device));
  cuda(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device));
  const Call call("decode", mode, inputs, kBatch);

  // Once: buffers that serve every plan of up to max_batch requests.
  int64_t words = 0;
  int64_t bytes = 0;
  auto sizes = routed_args<tilepress_routed_decode_plan_size_args>(mode);
  sizes.plan_words_out = &words;
  sizes.workspace_bytes_out = &bytes;
  sizes.max_batch = kMaxBatch;
  sizes.head_dim = kHeadDim;
  sizes.page_size = kPageSize;
  sizes.sm_count = sm_count;
  check(tilepress_routed_global_decode_plan_size(&sizes) == TILEPRESS_OK, "a plan of valid limits must have a size");
  std::vector<int32_t> plan(static_cast<size_t>(words));
  const DeviceArray<unsigned char> workspace(std::vector<unsigned char>(static_cast<size_t>(bytes), 0xFF));

  // Every step: the requests' lengths have grown.
  auto planning = routed_args<tilepress_routed_decode_plan_args>(mode);
  planning.kv_len = kv_len.data();
  planning.page_indptr = call.pages.indptr.data();
  planning.plan = plan.data();
  planning.plan_words = words;
  planning.batch = kBatch;
  planning.max_batch = kMaxBatch;
  planning.page_size = kPageSize;
  planning.sm_count = sm_count;
  check(tilepress_routed_global_decode_plan(&planning) == TILEPRESS_OK, "valid arguments must be planned");

  const DeviceArray<int32_t> device_plan(plan);
  auto args = call.args<tilepress_routed_decode_args>();
  args.plan = device_plan.get();
  args.plan_host = plan.data();
  args.workspace = workspace.get();
  args.workspace_bytes = bytes;
  if (!call.ran(tilepress_routed_global_decode(&args))) return false;

  Expected expected(kv_len.size());
  for (int r = 0; r < kBatch; ++r) attend(inputs, kRequests[r], r, kv_len[r], &expected);
  call.compare(expected);
  return true;
}

}  // namespace

bool gpu_present() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

bool run_on_gpu(int32_t mode) {
  Random random;
  const Inputs prompt = prefill_inputs(mode, &random);
  return prefill(mode, prompt) && decode(mode, decode_inputs(prompt, &random));
}

}  // namespace example
