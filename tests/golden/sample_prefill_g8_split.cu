#include <cuda.h>
#include <cuda_bf16.h>
typedef __nv_bfloat16 bfloat16_t;
namespace tl { __device__ void tma_load(const CUtensorMap &, int) {} }
extern "C" __global__ void sample_kernel(bfloat16_t* __restrict__ out, const __grid_constant__ CUtensorMap q_desc, int q_rows);
extern "C" __global__ void __launch_bounds__(128, 1) sample_kernel(bfloat16_t* __restrict__ out, const __grid_constant__ CUtensorMap q_desc, int q_rows) {
  tl::tma_load(q_desc, 0);
  out[0] = __float2bfloat16(q_rows);
}

// The launcher of sample_prefill_g8_split. Rendered from the launch facts of the lowered IR; do not edit.
#include <algorithm>

#include "cuda_host.h"
#include "error.h"
#include "sample_prefill_launchers.h"

namespace tilepress {

// static, not in an unnamed namespace: nvcc gives those external names that hold a hash.
static KernelState kernel_state;

int launch_sample_prefill_g8_split(const tilepress_prefill_args &args, const PrefillLaunch &values) {
  const auto num_kv_heads = args.num_kv_heads;
  const auto out = args.out;
  const auto q = args.q;
  const auto q_rows = args.q_rows;
  const auto q_tiles = values.q_tiles;
  CUtensorMap q_desc;
  if (int code = encode_tensor_map(
          "sample_prefill_g8_split",
          {"q",
           CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
           3,
           {static_cast<cuuint64_t>(512), static_cast<cuuint64_t>(q_rows), static_cast<cuuint64_t>((num_kv_heads * 8))},
           {static_cast<cuuint64_t>((static_cast<int64_t>(num_kv_heads) * 8192)), static_cast<cuuint64_t>(1024)},
           {static_cast<cuuint32_t>(64), static_cast<cuuint32_t>(64), static_cast<cuuint32_t>(1)},
           {static_cast<cuuint32_t>(1), static_cast<cuuint32_t>(1), static_cast<cuuint32_t>(1)},
           CU_TENSOR_MAP_INTERLEAVE_NONE,
           CU_TENSOR_MAP_SWIZZLE_128B,
           CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE },
          q, &q_desc))
    return code;
  const auto kernel = sample_kernel;
  if (int code = configure("sample_prefill_g8_split", reinterpret_cast<const void *>(kernel), 65536, &kernel_state))
    return code;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(128, 1, 1);
  config.dynamicSmemBytes = 65536;
  config.stream = static_cast<cudaStream_t>(args.stream);
  config.gridDim = dim3(8, q_tiles, num_kv_heads);
  return check_cuda("sample_prefill_g8_split",
                    cudaLaunchKernelEx(&config, kernel, pointer_to<bfloat16_t>(out), q_desc, q_rows));
}

}  // namespace tilepress
