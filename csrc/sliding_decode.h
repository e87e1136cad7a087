// The windowed decode's launch values: the decode's, of which its one kernel takes the plan's requests and no workspace.
#pragma once

#include "decode.h"

namespace tilepress {

struct SlidingDecodeLaunch : DecodeLaunch {};

// Fills `launch` or fails.
static inline int prepare(const char *entry, const tilepress_decode_args &args, SlidingDecodeLaunch *launch) {
  return prepare_decode(entry, args, launch);
}

}  // namespace tilepress
