// The windowed prefill's launch values, and the refusals that no field of its arguments states alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "error.h"
#include "pool.h"
#include "query_tiles.h"
#include "scale.h"
#include "tilepress.h"

namespace tilepress {

// The persistent grid: the SMs of an SXM Hopper, on each of which one CTA fits.
constexpr int64_t kSlidingPrefillCtas = 132;

// What the kernel takes besides the arguments. A query tile is 64 positions of a request.
struct SlidingPrefillLaunch : PoolTiles {
  int32_t q_tiles;  // no fewer than the requests have
  int32_t ctas;
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
  const int64_t items = static_cast<int64_t>(launch->q_tiles) * (args.num_q_heads / 2);
  if (items > INT32_MAX - 2 * kSlidingPrefillCtas)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %d query tiles of num_q_heads %d are too many for one call", entry,
                launch->q_tiles, args.num_q_heads);
  launch->ctas = static_cast<int32_t>(std::min(items, kSlidingPrefillCtas));
  launch->has_origin = args.kv_origin != nullptr;
  launch->want_lse = args.lse != nullptr;
  launch->want_status = args.status != nullptr;
  return TILEPRESS_OK;
}

}  // namespace tilepress
