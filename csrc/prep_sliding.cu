// Queries, keys and values of the sliding layers, head_dim 256: projections in, attention's operands out. See qk_prep.cuh.
#include "hand_written.h"
#include "qk_prep.cuh"
#include "tilepress.h"

namespace tilepress {

static __global__ void __launch_bounds__(kPrepThreads, kPrepBlocks)
    prep_sliding_prompt_kernel(const __grid_constant__ PrepCall call) {
  prepare_rows<256, false>(call);
}

static __global__ void __launch_bounds__(kBulkThreads, kBulkBlocks)
    prep_sliding_prompt_bulk_kernel(const __grid_constant__ PrepCall call) {
  prepare_part<256>(call);
}

static __global__ void __launch_bounds__(kPrepThreads, kPrepBlocks)
    prep_sliding_decode_kernel(const __grid_constant__ PrepCall call) {
  prepare_rows<256, true>(call);
}

int run_prep_sliding_prompt(const char *entry, const tilepress_prep_prompt_args &args) {
  return launch_prep<256>(entry, args, prep_sliding_prompt_kernel, prep_sliding_prompt_bulk_kernel);
}

int run_prep_sliding_decode(const char *entry, const tilepress_prep_decode_args &args) {
  return launch_prep<256>(entry, args, prep_sliding_decode_kernel);
}

}  // namespace tilepress
