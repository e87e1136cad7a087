// The check of head counts: whole groups of query heads. Both are 1 or more.
#pragma once

#include <cstdint>

#include "error.h"
#include "tilepress.h"

namespace tilepress {

template <typename Args>
static int check_groups(const char *entry, const Args &args) {
  if (args.num_q_heads % args.num_kv_heads == 0) return TILEPRESS_OK;
  return fail(TILEPRESS_INVALID_ARGUMENT, "%s: num_q_heads is %d, not a multiple of num_kv_heads, %d", entry, args.num_q_heads,
              args.num_kv_heads);
}

}  // namespace tilepress
