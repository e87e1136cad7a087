// The prefill's launch values, and the refusals that no field of its arguments states alone.
#pragma once

#include <cstdint>

#include "error.h"
#include "pool.h"
#include "query_tiles.h"
#include "scale.h"
#include "tilepress.h"

namespace tilepress {

// What the prefill kernel takes besides the arguments. A query tile is 64 rows of a request.
struct PrefillLaunch : PoolTiles {
  int32_t q_tiles;  // query tile slots: request r owns the slots from q_indptr[r] / 64 + r on
  int32_t want_lse;
  int32_t want_status;

  bool empty() const { return q_tiles == 0; }
};

// Fills `launch` or fails. The fields' own limits and the geometry have been checked.
static inline int prepare(const char *entry, const tilepress_prefill_args &args, PrefillLaunch *launch) {
  if (int code = check_scale(entry, args.sm_scale)) return code;
  if (int code = prepare_pool(entry, args, launch)) return code;
  if (int code = count_query_tiles(entry, args, 1, &launch->q_tiles)) return code;
  launch->want_lse = args.lse != nullptr;
  launch->want_status = args.status != nullptr;
  return TILEPRESS_OK;
}

}  // namespace tilepress
