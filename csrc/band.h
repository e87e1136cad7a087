// The check of a column band: a part of every row of a buffer, such as a fused projection's.
#pragma once

#include <cstdint>

#include "error.h"
#include "tilepress.h"

namespace tilepress {

// Offset, length and row stride in elements. `name` is the fields' prefix.
struct ColumnBand {
  const char *name;
  int64_t offset;
  int64_t length;
  int64_t row_stride;
};

// Fails where the band is not `columns` long or runs past its row. The fields' own limits have been checked.
static inline int check_band(const char *entry, const ColumnBand &band, int64_t columns) {
  if (band.length != columns)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %s_band_length is %lld; the band has %lld columns", entry, band.name,
                static_cast<long long>(band.length), static_cast<long long>(columns));
  if (band.offset > band.row_stride || band.length > band.row_stride - band.offset)
    return fail(TILEPRESS_INVALID_ARGUMENT,
                "%s: %s_band_offset %lld and %s_band_length %lld run past the row, %s_row_stride %lld", entry, band.name,
                static_cast<long long>(band.offset), band.name, static_cast<long long>(band.length), band.name,
                static_cast<long long>(band.row_stride));
  return TILEPRESS_OK;
}

}  // namespace tilepress
