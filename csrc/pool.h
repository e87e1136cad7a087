// The KV pool as kernels see it: tiles of 64 rows.
#pragma once

#include <cstdint>

#include "error.h"
#include "page_formats.h"
#include "tilepress.h"

namespace tilepress {

constexpr int32_t kTileRows = 64;

// Tiles of the pool, of a page over all layers, and the layer's first tile inside a page.
struct PoolTiles {
  int32_t pool_tiles;
  int32_t page_tiles;
  int32_t layer_tile;
};

// Fills `tiles` or fails. Every attention entry's arguments have these fields; their own limits and the geometry are checked.
template <typename Args>
static int prepare_pool(const char *entry, const Args &args, PoolTiles *tiles) {
  const PageFormat *format = find_page_format(args.page_format);
  if (format == nullptr)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: page_format is %d, which is none", entry, args.page_format);
  const int64_t layer_rows = format->tiles * static_cast<int64_t>(args.page_size);
  if (args.layer_row + layer_rows > args.rows_per_page)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: layer_row %lld and its %lld %s rows run past rows_per_page, %lld", entry,
                static_cast<long long>(args.layer_row), static_cast<long long>(layer_rows), format->name,
                static_cast<long long>(args.rows_per_page));
  if (args.num_pages > INT32_MAX / args.rows_per_page)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: num_pages %lld of rows_per_page %lld are 2^31 pool rows or more", entry,
                static_cast<long long>(args.num_pages), static_cast<long long>(args.rows_per_page));
  const int64_t page_tiles = args.rows_per_page / kTileRows;
  tiles->pool_tiles = static_cast<int32_t>(args.num_pages * page_tiles);
  tiles->page_tiles = static_cast<int32_t>(page_tiles);
  tiles->layer_tile = static_cast<int32_t>(args.layer_row / kTileRows);
  return TILEPRESS_OK;
}

}  // namespace tilepress
