// The prefill's launch values, and the refusals that no field of its arguments states alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "error.h"
#include "tilepress.h"

namespace tilepress {

// What the prefill kernel takes besides the arguments. A tile of the pool is 64 rows; a query tile is 64 rows of a request.
struct PrefillLaunch {
  int32_t pool_tiles;  // tiles the pool has over all pages
  int32_t page_tiles;  // tiles a page has over all layers
  int32_t layer_tile;  // the layer's first tile inside a page
  int32_t q_tiles;     // query tile slots: request r owns the slots from q_indptr[r] / 64 + r on
  int32_t want_lse;
  int32_t want_status;

  bool empty() const { return q_tiles == 0; }
};

inline constexpr int32_t kTileRows = 64;
inline constexpr int64_t kMaxGridY = 65535;

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
  if (!(std::isfinite(args.sm_scale) && args.sm_scale > 0.0f))
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: sm_scale is %g; it must be finite and above 0", entry,
                static_cast<double>(args.sm_scale));
  if (args.layer_row + 2 * static_cast<int64_t>(args.page_size) > args.rows_per_page)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: layer_row %lld and its %d K and V rows run past rows_per_page, %lld", entry,
                static_cast<long long>(args.layer_row), 2 * args.page_size, static_cast<long long>(args.rows_per_page));
  const int64_t page_tiles = args.rows_per_page / kTileRows;
  if (args.num_pages > INT32_MAX / args.rows_per_page)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: num_pages %lld of rows_per_page %lld are 2^31 pool rows or more", entry,
                static_cast<long long>(args.num_pages), static_cast<long long>(args.rows_per_page));
  int64_t slots = 0;
  if (int code = count_query_tiles(entry, args, &slots)) return code;
  if (slots > kMaxGridY)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: q_rows %d over batch %d are %lld query tiles; at most %lld in one call", entry,
                args.q_rows, args.batch, static_cast<long long>(slots), static_cast<long long>(kMaxGridY));
  launch->pool_tiles = static_cast<int32_t>(args.num_pages * page_tiles);
  launch->page_tiles = static_cast<int32_t>(page_tiles);
  launch->layer_tile = static_cast<int32_t>(args.layer_row / kTileRows);
  launch->q_tiles = static_cast<int32_t>(slots);
  launch->want_lse = args.lse != nullptr;
  launch->want_status = args.status != nullptr;
  return TILEPRESS_OK;
}

}  // namespace tilepress
