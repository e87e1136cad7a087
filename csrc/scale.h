// The check of a softmax scale that every attention entry makes.
#pragma once

#include <cmath>

#include "error.h"
#include "tilepress.h"

namespace tilepress {

static inline int check_scale(const char *entry, float sm_scale) {
  if (std::isfinite(sm_scale) && sm_scale > 0.0f) return TILEPRESS_OK;
  return fail(TILEPRESS_INVALID_ARGUMENT, "%s: sm_scale is %g; it must be finite and above 0", entry,
              static_cast<double>(sm_scale));
}

}  // namespace tilepress
