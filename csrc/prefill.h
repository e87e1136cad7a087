// The prefill's launch values, and the refusals that no field of its arguments states alone.
#pragma once

#include <cstdint>

#include "error.h"
#include "pool.h"
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

constexpr int64_t kMaxGridY = 65535;

// Slots up to the last tile that a request owns; fails where q_indptr_host is not a list of row ranges within q_rows.
static inline int count_query_tiles(const char *entry, const tilepress_prefill_args &args, int64_t *slots) {
  const int32_t *indptr = args.q_indptr_host;
  if (args.q_rows == 0 || args.batch == 0) {
    *slots = 0;
    return TILEPRESS_OK;
  }
  if (indptr == nullptr) {
    *slots = args.q_rows / kTileRows + static_cast<int64_t>(args.batch);
    return TILEPRESS_OK;
  }
  *slots = 0;
  if (indptr[0] < 0)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_indptr_host[0] is %d; it must be 0 or more", entry, indptr[0]);
  for (int64_t r = 0; r < args.batch; ++r) {
    const int64_t rows = static_cast<int64_t>(indptr[r + 1]) - indptr[r];
    if (rows < 0)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_indptr_host[%lld] is %d, below the %d before it", entry,
                  static_cast<long long>(r + 1), indptr[r + 1], indptr[r]);
    if (rows > 0) *slots = indptr[r] / kTileRows + r + (rows + kTileRows - 1) / kTileRows;
  }
  if (indptr[args.batch] > args.q_rows)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_indptr_host ends at %d, past q_rows, %d", entry, indptr[args.batch],
                args.q_rows);
  return TILEPRESS_OK;
}

// Fills `launch` or fails. The fields' own limits and the geometry have been checked.
static inline int prepare(const char *entry, const tilepress_prefill_args &args, PrefillLaunch *launch) {
  if (int code = check_scale(entry, args.sm_scale)) return code;
  if (int code = prepare_pool(entry, args, launch)) return code;
  int64_t slots = 0;
  if (int code = count_query_tiles(entry, args, &slots)) return code;
  if (slots > kMaxGridY)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_rows %d over batch %d are %lld query tiles; at most %lld in one call", entry,
                args.q_rows, args.batch, static_cast<long long>(slots), static_cast<long long>(kMaxGridY));
  launch->q_tiles = static_cast<int32_t>(slots);
  launch->want_lse = args.lse != nullptr;
  launch->want_status = args.status != nullptr;
  return TILEPRESS_OK;
}

}  // namespace tilepress
