// The size of a merge, and the refusals that no field of its arguments states alone.
#pragma once

#include <cstdint>

#include "error.h"
#include "tilepress.h"

namespace tilepress {

constexpr int32_t kMergeColumns = 8;    // a thread, 16 bytes of bf16
constexpr int32_t kMergeThreads = 256;  // a block

// Rows by heads.
static inline int64_t merge_rows(const tilepress_merge_states_args &args) {
  return static_cast<int64_t>(args.num_rows) * args.num_heads;
}

// Fails where the sources overlap, or where one launch cannot hold the output. The fields' own limits have been checked.
static inline int check_merge_states(const char *entry, const tilepress_merge_states_args &args) {
  const int64_t rows = merge_rows(args);
  if (rows > int64_t{INT32_MAX} * kMergeThreads / (args.head_dim / kMergeColumns))
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: num_rows %d by num_heads %d by head_dim %d are too many for one call", entry,
                args.num_rows, args.num_heads, args.head_dim);
  const int64_t elements = rows * args.head_dim;
  if (args.num_sources > 1 && args.source_stride < elements)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: source_stride is %lld, below a source's %lld elements", entry,
                static_cast<long long>(args.source_stride), static_cast<long long>(elements));
  if (args.num_sources > 1 && args.lse_stride < rows)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: lse_stride is %lld, below a source's %lld elements", entry,
                static_cast<long long>(args.lse_stride), static_cast<long long>(rows));
  return TILEPRESS_OK;
}

}  // namespace tilepress
