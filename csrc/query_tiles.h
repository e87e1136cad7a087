// The grid of a ragged prefill: which tile slots its requests own.
#pragma once

#include <cstdint>

#include "error.h"
#include "pool.h"
#include "tilepress.h"

namespace tilepress {

constexpr int64_t kMaxGridY = 65535;

// Fails where indptr, the argument called `name`, is not a list of row ranges within q_rows.
template <typename Args>
static int check_row_ranges(const char *entry, const char *name, const int32_t *indptr, const Args &args) {
  if (indptr[0] < 0) return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %s[0] is %d; it must be 0 or more", entry, name, indptr[0]);
  for (int32_t r = 0; r < args.batch; ++r)
    if (indptr[r + 1] < indptr[r])
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %s[%d] is %d, below the %d before it", entry, name, r + 1, indptr[r + 1],
                  indptr[r]);
  if (indptr[args.batch] > args.q_rows)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %s ends at %d, past q_rows, %d", entry, name, indptr[args.batch], args.q_rows);
  return TILEPRESS_OK;
}

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
    if (int code = check_row_ranges(entry, "q_indptr_host", indptr, args)) return code;
    slots = 0;
    for (int64_t r = 0; r < args.batch; ++r) {
      const int64_t rows = static_cast<int64_t>(indptr[r + 1]) - indptr[r];
      if (rows > 0) slots = indptr[r] / kTileRows + spare * r + (rows - 1) / kTileRows + spare;
    }
  }
  if (slots > kMaxGridY)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_rows %d over batch %d are %lld query tiles; at most %lld in one call", entry,
                args.q_rows, args.batch, static_cast<long long>(slots), static_cast<long long>(kMaxGridY));
  *q_tiles = static_cast<int32_t>(slots);
  return TILEPRESS_OK;
}

}  // namespace tilepress
