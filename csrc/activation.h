// The refusals of the activation that no field of its arguments states alone. Host code, so a stub refuses the same.
#pragma once

#include "band.h"
#include "tilepress.h"

namespace tilepress {

static inline int check_gelu_mul(const char *entry, const tilepress_gelu_mul_args &args) {
  if (int code = check_band(entry, {"gate", args.gate_band_offset, args.gate_band_length, args.gate_row_stride}, args.columns))
    return code;
  return check_band(entry, {"up", args.up_band_offset, args.up_band_length, args.up_row_stride}, args.columns);
}

}  // namespace tilepress
