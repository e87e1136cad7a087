// The windowed prefill's launch values, and the refusals that no field of its arguments states alone.
#pragma once

#include <cstdint>

#include "error.h"
#include "pool.h"
#include "query_tiles.h"
#include "scale.h"
#include "tilepress.h"

namespace tilepress {

// What the kernel takes besides the arguments. A query tile is 64 positions of a request.
struct SlidingPrefillLaunch : PoolTiles {
  int32_t q_tiles;   // no fewer than the requests have
  int32_t sm_count;  // the grid, which is persistent: one CTA fits on an SM. Filled once the device has been checked.
  int32_t has_origin;
  int32_t want_lse;
  int32_t want_status;

  bool empty() const { return q_tiles == 0; }
};

// Fills `launch` or fails. The fields' own limits and the geometry have been checked.
static inline int prepare(const char *entry, const tilepress_sliding_prefill_args &args, SlidingPrefillLaunch *launch) {
  if (int code = check_scale(entry, args.sm_scale)) return code;
  if (int code = prepare_pool(entry, args, launch)) return code;
  if (int code = count_query_tiles(entry, args, 2, &launch->q_tiles)) return code;
  launch->has_origin = args.kv_origin != nullptr;
  launch->want_lse = args.lse != nullptr;
  launch->want_status = args.status != nullptr;
  return TILEPRESS_OK;
}

}  // namespace tilepress
