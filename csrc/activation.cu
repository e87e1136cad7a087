// The MLP's activation, gelu_tanh(gate) * up. A thread owns eight columns of one row: it reads 16 bytes of each band and
// writes 16 bytes once.
//
// gelu_tanh(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2 / pi) * (x + 0.044715 x^3): one exponential and one
// division, without the cancellation of 1 + tanh below zero. It is rounded to bf16 and then multiplied, as transformers does.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "cuda_host.h"
#include "hand_written.h"
#include "tilepress.h"

namespace tilepress {

constexpr int kColumns = 8;  // a thread, 16 bytes of bf16
constexpr int kThreads = 128;
constexpr int kMaxGridRows = 65535;
constexpr float kLinear = -2.30220820f;  // -2 * log2(e) * sqrt(2 / pi)
constexpr float kCubic = 0.044715f * kLinear;

union Chunk {
  uint4 words;
  __nv_bfloat162 pairs[kColumns / 2];
};

// For large |x| the square overflows to infinity, and the result is x or a zero, as it should be.
static __device__ float gelu_tanh(float x) { return __fdividef(x, 1.0f + exp2f(x * (kLinear + kCubic * (x * x)))); }

// gate, up: row r at r * stride, in chunks of eight columns. out: packed.
static __global__ void __launch_bounds__(kThreads)
    gelu_mul_kernel(const uint4 *gate, const uint4 *up, uint4 *out, int64_t gate_stride, int64_t up_stride, int32_t rows,
                    int32_t chunks) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= chunks) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    Chunk value;
    Chunk factor;
    value.words = __ldcs(gate + row * gate_stride + at);
    factor.words = __ldcs(up + row * up_stride + at);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float2 pair = __bfloat1622float2(value.pairs[i]);
      value.pairs[i] = __hmul2(__floats2bfloat162_rn(gelu_tanh(pair.x), gelu_tanh(pair.y)), factor.pairs[i]);
    }
    out[row * chunks + at] = value.words;
  }
}

int run_gelu_mul(const char *entry, const tilepress_gelu_mul_args &args) {
  const auto gate = static_cast<const __nv_bfloat16 *>(args.gate_in) + args.gate_band_offset;
  const auto up = static_cast<const __nv_bfloat16 *>(args.up_in) + args.up_band_offset;
  const int32_t chunks = args.columns / kColumns;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((static_cast<int64_t>(chunks) + kThreads - 1) / kThreads),
                        static_cast<unsigned>(std::min(args.rows, kMaxGridRows)));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(args.stream);
  return check_cuda(entry,
                    cudaLaunchKernelEx(&config, gelu_mul_kernel, reinterpret_cast<const uint4 *>(gate),
                                       reinterpret_cast<const uint4 *>(up), static_cast<uint4 *>(args.out),
                                       args.gate_row_stride / kColumns, args.up_row_stride / kColumns, args.rows, chunks));
}

}  // namespace tilepress
