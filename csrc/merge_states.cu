// Combines attention outputs over disjoint sets of keys. A thread owns eight columns of one row and head: it reads 16 bytes of
// every source and writes 16 bytes once.
#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

#include "cuda_host.h"
#include "hand_written.h"
#include "merge_states.h"
#include "tilepress.h"

namespace tilepress {

constexpr int kColumns = kMergeColumns;
constexpr int kThreads = kMergeThreads;

union Chunk {
  uint4 words;
  __nv_bfloat162 pairs[kColumns / 2];
};

// partials: bf16 [sources, rows, chunks * 8], rows being rows by heads. lse natural. One pass for the maximum, one for the sum.
static __global__ void __launch_bounds__(kThreads)
    merge_states_kernel(const uint4 *partials, const float *partial_lse, uint4 *out, float *lse, int64_t source_chunks,
                        int64_t lse_stride, int32_t sources, int64_t rows, int32_t chunks) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= rows * chunks) return;
  const int64_t row = index / chunks;
  float maximum = -INFINITY;
  for (int32_t s = 0; s < sources; ++s) maximum = fmaxf(maximum, partial_lse[s * lse_stride + row]);
  // Where no source saw a key every weight is then 0; where a lse is NaN, so is the result.
  const float subtrahend = maximum == -INFINITY ? 0.0f : maximum;
  float total = 0.0f;
  float sum[kColumns] = {};
  for (int32_t s = 0; s < sources; ++s) {
    const float weight = expf(partial_lse[s * lse_stride + row] - subtrahend);
    // A source that saw nothing may hold anything.
    if (weight == 0.0f) continue;
    total += weight;
    Chunk chunk;
    chunk.words = partials[s * source_chunks + index];
    for (int i = 0; i < kColumns / 2; ++i) {
      const float2 pair = __bfloat1622float2(chunk.pairs[i]);
      sum[2 * i] += weight * pair.x;
      sum[2 * i + 1] += weight * pair.y;
    }
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  Chunk chunk;
  for (int i = 0; i < kColumns / 2; ++i) chunk.pairs[i] = __floats2bfloat162_rn(sum[2 * i] * inverse, sum[2 * i + 1] * inverse);
  out[index] = chunk.words;
  if (lse != nullptr && index % chunks == 0) lse[row] = subtrahend + logf(total);
}

int run_merge_states(const char *entry, const tilepress_merge_states_args &args) {
  const int64_t rows = merge_rows(args);
  const int32_t chunks = args.head_dim / kColumns;
  const int64_t blocks = (rows * chunks + kThreads - 1) / kThreads;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(args.stream);
  return check_cuda(entry, cudaLaunchKernelEx(&config, merge_states_kernel, static_cast<const uint4 *>(args.partials),
                                              args.partial_lse, static_cast<uint4 *>(args.out), args.lse,
                                              args.source_stride / kColumns, args.lse_stride, args.num_sources, rows, chunks));
}

}  // namespace tilepress
