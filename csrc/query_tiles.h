// The grid of a ragged prefill: which tile slots its requests own.
#pragma once

#include <cstdint>

#include "error.h"
#include "pool.h"
#include "tilepress.h"

namespace tilepress {

constexpr int64_t kMaxGridY = 65535;

// Slots up to the last tile that a request owns, where request r owns those from q_indptr[r] / 64 + spare * r on and n rows lie
// in at most n / 64 + spare tiles. Fails where q_indptr_host is not a list of row ranges within q_rows, or where the grid
// cannot hold the slots.
template <typename Args>
static int count_query_tiles(const char *entry, const Args &args, int32_t spare, int32_t *q_tiles) {
  const int32_t *indptr = args.q_indptr_host;
  *q_tiles = 0;
  if (args.q_rows == 0 || args.batch == 0) return TILEPRESS_OK;
  int64_t slots = args.q_rows / kTileRows + static_cast<int64_t>(spare) * args.batch;
  if (indptr != nullptr) {
    slots = 0;
    if (indptr[0] < 0)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_indptr_host[0] is %d; it must be 0 or more", entry, indptr[0]);
    for (int64_t r = 0; r < args.batch; ++r) {
      const int64_t rows = static_cast<int64_t>(indptr[r + 1]) - indptr[r];
      if (rows < 0)
        return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_indptr_host[%lld] is %d, below the %d before it", entry,
                    static_cast<long long>(r + 1), indptr[r + 1], indptr[r]);
      if (rows > 0) slots = indptr[r] / kTileRows + spare * r + (rows - 1) / kTileRows + spare;
    }
    if (indptr[args.batch] > args.q_rows)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_indptr_host ends at %d, past q_rows, %d", entry, indptr[args.batch],
                  args.q_rows);
  }
  if (slots > kMaxGridY)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_rows %d over batch %d are %lld query tiles; at most %lld in one call", entry,
                args.q_rows, args.batch, static_cast<long long>(slots), static_cast<long long>(kMaxGridY));
  *q_tiles = static_cast<int32_t>(slots);
  return TILEPRESS_OK;
}

}  // namespace tilepress
